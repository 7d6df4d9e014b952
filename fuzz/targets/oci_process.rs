//! See `dormouse_fuzz::oci_process`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dormouse_fuzz::oci_process(bytes));
