//! What engine, keeper and newborn say to one another: what is read is written the same way.
#![no_main]

use dormouse_launch::protocol::{FromNewborn, Reply, Request, ToNewborn};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(request) = Request::decode(bytes) {
        let _ = request.descriptors();
        let said = request.encode();
        assert_eq!(Request::decode(&said).map(|r| r.encode()).ok(), Some(said));
    }
    if let Ok(reply) = Reply::decode(bytes) {
        let said = reply.encode();
        assert_eq!(Reply::decode(&said).map(|r| r.encode()).ok(), Some(said));
    }
    if let Some(word) = ToNewborn::from_bytes(bytes) {
        assert_eq!(ToNewborn::from_bytes(&word.to_bytes()), Some(word));
    }
    if let Some(word) = FromNewborn::from_bytes(bytes) {
        assert_eq!(FromNewborn::from_bytes(&word.to_bytes()), Some(word));
    }
});
