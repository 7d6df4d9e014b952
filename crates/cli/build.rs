//! Makes the first instructions of `dormouse` those of crate `entry`, and has it linked again after a change of the
//! list of functions.

fn main() {
    for path in
        ["build.rs", "functions.gz", "../../scripts/ordered-cc", "../../scripts/plain-names.sed"]
    {
        println!("cargo::rerun-if-changed={path}");
    }
    // A program that is relocated at its start would read addresses there that are not set yet.
    let flags = std::env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    if flags.contains("relocation-model=static") {
        println!("cargo::rustc-link-arg-bin=dormouse=-Wl,--entry=dormouse_entry");
    }
}
