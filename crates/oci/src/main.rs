//! `dormouse-oci`: see the library.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    // ORDER: first, so that the caller's umask changes no mode of the instance's files.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    ExitCode::from(dormouse_oci::command::main())
}
