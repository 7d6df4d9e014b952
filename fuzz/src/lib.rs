//! Fuzz targets over every reader of outside data: one function each, from bytes to nothing.
//!
//! A program of `fuzz/targets` gives a function to libFuzzer (`cargo xtask fuzz`). The test here gives each
//! function every input of its committed corpus, so that a finding stays found where no fuzzer runs.
#![forbid(unsafe_code)]

use dormouse_account::rule::{Gate, Own, Passage, RuleError, Rules};
use dormouse_account::{Account, Book, Number};
use dormouse_launch::flat::{Flat, MAGIC, VERSION};
use dormouse_launch::protocol::{FromNewborn, Reply, Request, ToNewborn};
use dormouse_model::{Config, Name};
use dormouse_parcel::archive::ArchiveReader;
use dormouse_record::{Records, check};

pub use dormouse_image::fuzz::{image_config, layer, manifest, tar};
pub use dormouse_oci::fuzz::{config as oci_config, process as oci_process};

/// LIMIT: bytes of an archive's part that are read; a compressed part could have any length.
const PART_BYTES_MAX: u64 = 1 << 20;

/// The framing of an archive, or else the records of a checkpoint. Records are read without the checksums,
/// which random bytes would never match; records that are written and read again are the same, and the
/// check has the same result.
pub fn checkpoint(bytes: &[u8]) {
    if let Ok(mut archive) = ArchiveReader::open(bytes) {
        for name in ["container", "files", "records", "pages"] {
            let Ok(part) = archive.part(name) else { return };
            if part.read_whole(PART_BYTES_MAX).is_err() {
                return;
            }
        }
        let _ = archive.end(); // any result will do: the reader returns
        return;
    }
    let Ok(records) = serde_json::from_slice::<Records>(bytes) else { return };
    let is_good = check::records(&records).is_ok();
    let text = serde_json::to_vec(&records).expect("records can be written");
    let again: Records = serde_json::from_slice(&text).expect("written records can be read");
    assert_eq!(again, records);
    assert_eq!(check::records(&again).is_ok(), is_good);
}

/// A plan, as the newborn reads it: no access leaves the plan.
pub fn plan(bytes: &[u8]) {
    let mut plan = bytes.to_vec();
    // The first fields are constant; the fuzzer's time is for the others.
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
        let _ = flat.relocate(record.b); // most records are no tables
    }
    assert!(flat.record(flat.count()).is_err());
}

/// The messages between engine, keeper and newborn: a message that can be read is written the same way.
pub fn protocol(bytes: &[u8]) {
    if let Ok(request) = Request::decode(bytes) {
        let _ = request.descriptors();
        let written = request.encode();
        assert_eq!(Request::decode(&written).map(|r| r.encode()).ok(), Some(written));
    }
    if let Ok(reply) = Reply::decode(bytes) {
        let written = reply.encode();
        assert_eq!(Reply::decode(&written).map(|r| r.encode()).ok(), Some(written));
    }
    if let Some(word) = ToNewborn::from_bytes(bytes) {
        assert_eq!(ToNewborn::from_bytes(&word.to_bytes()), Some(word));
    }
    if let Some(word) = FromNewborn::from_bytes(bytes) {
        assert_eq!(FromNewborn::from_bytes(&word.to_bytes()), Some(word));
    }
}

/// The configuration of a container: a record that can be read is written and read as the same.
pub fn state(bytes: &[u8]) {
    if let Ok(config) = serde_json::from_slice::<Config>(bytes) {
        let text = serde_json::to_vec(&config).expect("a record can be written");
        assert_eq!(serde_json::from_slice::<Config>(&text).ok(), Some(config));
    }
}

/// A file of rules: every error has a line of the file, and the table decides as the explanation says.
pub fn rules(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let lines = 1 + text.matches('\n').count();
    let check = |errors: &[RuleError]| {
        assert!(!errors.is_empty());
        assert!(errors.iter().all(|e| (1..=lines).contains(&e.line) && !e.reason.is_empty()));
    };
    let mut rules = match Rules::parse(text) {
        Ok(rules) => rules,
        Err(errors) => return check(&errors),
    };
    let name = |text: &str| text.parse::<Name>().expect("a name");
    let mut book = Book::default();
    for (number, account, parent) in [(1, "a", "root"), (2, "b", "a"), (3, "peer", "root")] {
        let account = Account::new(Number(number), name(account), name(parent), 0);
        book.add(account).expect("a place in the hierarchy");
    }
    rules.share([name("d")]);
    let own = |container: &Name| match container.as_str() {
        "d" => Own::Number(Number(70_000)),
        _ => Own::Missing,
    };
    let compiled = match rules.compile(&book, own) {
        Ok(compiled) => compiled,
        Err(errors) => return check(&errors),
    };
    assert_eq!(compiled.rules().len(), compiled.table.rows.len() + compiled.inert().count());
    let accounts = [0, 1, 2, 3, 70_000];
    for (gate, home) in Gate::ALL.into_iter().flat_map(|gate| accounts.map(|home| (gate, home))) {
        for (label, peer) in
            accounts.into_iter().zip([Some(2), None, Some(0), Some(70_000), Some(1)])
        {
            let passage = Passage { gate, home, label, peer, port: 1, path: Some("/srv/a") };
            let explained = compiled.explain(&passage);
            assert_eq!(explained.label, compiled.table.label(&passage));
            assert_eq!(explained.decides.is_some(), compiled.table.decide(&passage).is_some());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::path::Path;

    /// Gives every input of a committed corpus to its target.
    fn replay(name: &str, target: fn(&[u8])) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
        let file =
            std::fs::File::open(path.with_extension("tar")).expect("the corpus is committed");
        let mut corpus = ::tar::Archive::new(std::io::BufReader::new(file));
        let mut inputs = 0;
        for entry in corpus.entries().expect("the corpus is a tar") {
            let mut bytes = Vec::new();
            entry.and_then(|mut it| it.read_to_end(&mut bytes)).expect("an entry can be read");
            target(&bytes);
            inputs += 1;
        }
        assert!(inputs > 10, "the corpus of {name} has {inputs} inputs");
    }

    macro_rules! replays {
        ($($target:ident),*) => {$(
            #[test]
            fn $target() {
                replay(stringify!($target), super::$target);
            }
        )*};
    }

    replays!(checkpoint, image_config, layer, manifest, oci_config, oci_process);
    replays!(plan, protocol, rules, state, tar);
}
