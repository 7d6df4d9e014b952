//! The configuration of an image, and a change that `commit` makes to it.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dormouse_image::fuzz::image_config(bytes));
