//! See `dormouse_fuzz::layer`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dormouse_fuzz::layer(bytes));
