//! A plan, as the keeper's newborn reads it: no access leaves it.
#![no_main]

use dormouse_launch::flat::{Flat, MAGIC, VERSION};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let mut plan = bytes.to_vec();
    // The first fields are always the same; the fuzzer's time is for the others.
    if let Some(head) = plan.get_mut(..12) {
        head[..8].copy_from_slice(&MAGIC);
        head[8..].copy_from_slice(&VERSION.to_ne_bytes());
    }
    let range = plan.as_ptr_range();
    let inside = |text: &[u8]| {
        let text = text.as_ptr_range();
        assert!(range.start <= text.start && text.end <= range.end);
    };
    let Ok(mut flat) = Flat::new(&mut plan) else { return };
    for index in 0..flat.count().min(256) {
        let Ok(record) = flat.record(index) else { continue };
        if let Ok(text) = flat.text(&record) {
            inside(text.to_bytes_with_nul());
        }
        if let Ok(data) = flat.data(&record) {
            inside(data);
        }
        if let Ok(text) = flat.text_at(record.a) {
            inside(text.to_bytes_with_nul());
        }
        let _ = flat.relocate(record.b); // most are no tables
    }
    assert!(flat.record(flat.count()).is_err());
});
