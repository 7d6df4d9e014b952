//! See `dormouse_fuzz::manifest`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dormouse_fuzz::manifest(bytes));
