//! `config.json` of a bundle: what is refused is refused by the name of its field.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dormouse_oci::fuzz::config(bytes));
