//! See `dormouse_fuzz::image_config`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dormouse_fuzz::image_config(bytes));
