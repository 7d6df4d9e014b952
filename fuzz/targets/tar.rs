//! See `dormouse_fuzz::tar`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dormouse_fuzz::tar(bytes));
