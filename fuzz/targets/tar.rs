//! The tar of a layer, as any registry or file may hold it.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dormouse_image::fuzz::tar(bytes));
