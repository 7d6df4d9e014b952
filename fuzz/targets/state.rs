//! The record of a container: what is read can be written, and is then read as the same.
#![no_main]

use dormouse_model::Config;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(config) = serde_json::from_slice::<Config>(bytes) {
        let text = serde_json::to_vec(&config).expect("a record can be written");
        assert_eq!(serde_json::from_slice::<Config>(&text).ok(), Some(config));
    }
});
