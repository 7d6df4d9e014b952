//! The manifest and the configuration that a registry answers with.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dormouse_image::fuzz::manifest(bytes));
