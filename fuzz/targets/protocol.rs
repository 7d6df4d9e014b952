//! See `dormouse_fuzz::protocol`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dormouse_fuzz::protocol(bytes));
