//! See `dormouse_fuzz::state`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dormouse_fuzz::state(bytes));
