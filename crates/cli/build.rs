//! Makes the first instructions of `dormouse` those of crate `entry`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // A program that is relocated at its start would read addresses there that are not set yet.
    let flags = std::env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    if flags.contains("relocation-model=static") {
        println!("cargo::rustc-link-arg-bin=dormouse=-Wl,--entry=dormouse_entry");
    }
}
