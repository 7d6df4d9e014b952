//! `process.json`, which `exec` is given.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dormouse_oci::fuzz::process(bytes));
