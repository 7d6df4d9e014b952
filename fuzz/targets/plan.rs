//! See `dormouse_fuzz::plan`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dormouse_fuzz::plan(bytes));
