//! See `dormouse_fuzz::checkpoint`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dormouse_fuzz::checkpoint(bytes));
