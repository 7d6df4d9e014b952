//! A layer file of the store.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dormouse_image::fuzz::layer(bytes));
