//! The records of a checkpoint, without the checksums that nobody gets past by chance: what is checked
//! is the same when it was written and read again.
#![no_main]

use dormouse_checkpoint::format::{Records, check};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(records) = serde_json::from_slice::<Records>(bytes) else { return };
    let is_good = check::records(&records).is_ok();
    let text = serde_json::to_vec(&records).expect("records can be written");
    let again: Records = serde_json::from_slice(&text).expect("what was written can be read");
    assert_eq!(again, records);
    assert_eq!(check::records(&again).is_ok(), is_good);
});
