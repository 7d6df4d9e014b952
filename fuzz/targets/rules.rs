//! See `dormouse_fuzz::rules`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dormouse_fuzz::rules(bytes));
