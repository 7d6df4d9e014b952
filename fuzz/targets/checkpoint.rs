//! The records of a checkpoint, without the checksums that nobody gets past by chance: what is checked
//! is the same when it was written and read again. And the framing of an archive, which comes first when
//! one is imported.
#![no_main]

use dormouse_checkpoint::format::archive::ArchiveReader;
use dormouse_checkpoint::format::{Records, check};

/// LIMIT: bytes of a part that are looked at; a compressed one could be any length.
const PART_BYTES_MAX: u64 = 1 << 20;

fn archive(mut archive: ArchiveReader<&[u8]>) {
    for name in ["container", "files", "records", "pages"] {
        let Ok(part) = archive.part(name) else { return };
        if part.read_whole(PART_BYTES_MAX).is_err() {
            return;
        }
    }
    let _ = archive.end(); // it comes back, whatever it says
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(read) = ArchiveReader::open(bytes) {
        return archive(read);
    }
    let Ok(records) = serde_json::from_slice::<Records>(bytes) else { return };
    let is_good = check::records(&records).is_ok();
    let text = serde_json::to_vec(&records).expect("records can be written");
    let again: Records = serde_json::from_slice(&text).expect("what was written can be read");
    assert_eq!(again, records);
    assert_eq!(check::records(&again).is_ok(), is_good);
});
