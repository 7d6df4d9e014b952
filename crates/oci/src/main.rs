//! `dormouse-oci`: see the library.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), no_main)]

#[cfg(not(test))]
dormouse_kernel::main!(begin);

#[cfg_attr(test, expect(dead_code, reason = "tests have a start of their own"))]
fn begin() -> u8 {
    // ORDER: first, so that the caller's umask changes no mode of the instance's files.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    dormouse_oci::command::main()
}
