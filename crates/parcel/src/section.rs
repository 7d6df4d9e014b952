//! The file `records`: sections with a checksum each, and one of the whole.

use dormouse_record::{Error, Records, Result, check};
use serde::de::DeserializeOwned;

/// First bytes of `records`.
pub const MAGIC: [u8; 8] = *b"DORMCKPT";
/// The version that this code writes, and the only one that it reads.
pub const VERSION: u32 = 4;
/// LIMIT: bytes of one section.
pub const SECTION_BYTES_MAX: u64 = 1 << 30;

/// A part of `records`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Section {
    /// The origin of the checkpoint.
    About,
    /// Processes and threads.
    Process,
    /// Address spaces.
    Memory,
    /// Objects.
    Object,
    /// Checksums of `pages`.
    Page,
}

impl Section {
    /// All sections, in order.
    pub const ALL: [Self; 5] = [Self::About, Self::Process, Self::Memory, Self::Object, Self::Page];

    /// Its name in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::About => "about",
            Self::Process => "process",
            Self::Memory => "memory",
            Self::Object => "object",
            Self::Page => "page",
        }
    }
}

/// The file `records`.
pub(crate) fn encode(records: &Records) -> Vec<u8> {
    let Records { about, processes, memories, objects, pages } = records;
    // Maps with non-text keys could fail; these records have none.
    let json = |value: serde_json::Result<Vec<u8>>| value.unwrap_or_default();
    let sections = [
        (Section::About, json(serde_json::to_vec(about))),
        (Section::Process, json(serde_json::to_vec(processes))),
        (Section::Memory, json(serde_json::to_vec(memories))),
        (Section::Object, json(serde_json::to_vec(objects))),
        (Section::Page, json(serde_json::to_vec(pages))),
    ];
    let mut out = Vec::new();
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&(sections.len() as u32).to_le_bytes());
    let mut at = out.len() as u64 + sections.len() as u64 * 64;
    for (section, bytes) in &sections {
        let mut name = [0; 16];
        name[..section.name().len()].copy_from_slice(section.name().as_bytes());
        out.extend_from_slice(&name);
        out.extend_from_slice(&at.to_le_bytes());
        out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
        out.extend_from_slice(blake3::hash(bytes).as_bytes());
        at += bytes.len() as u64;
    }
    for (_, bytes) in &sections {
        out.extend_from_slice(bytes);
    }
    let whole = blake3::hash(&out);
    out.extend_from_slice(whole.as_bytes());
    out
}

/// Reads `records`.
pub(crate) fn decode(bytes: &[u8]) -> Result<Records> {
    let table = Table::read(bytes)?;
    let records = Records {
        about: table.part(Section::About)?,
        processes: table.part(Section::Process)?,
        memories: table.part(Section::Memory)?,
        objects: table.part(Section::Object)?,
        pages: table.part(Section::Page)?,
    };
    check::records(&records)?;
    Ok(records)
}

/// The table of sections of a file with a matching checksum.
struct Table<'b> {
    bytes: &'b [u8],
    count: usize,
}

const HEAD_BYTES: usize = 16;
const ROW_BYTES: usize = 64;
const HASH_BYTES: usize = 32;

impl<'b> Table<'b> {
    fn read(bytes: &'b [u8]) -> Result<Self> {
        let head = |what: &str| Error::damaged("head", what);
        let number = |at: usize| {
            let found = bytes.get(at..at + 4).and_then(|b| b.try_into().ok());
            found.map(u32::from_le_bytes).ok_or_else(|| head("it is too short"))
        };
        if bytes.get(..8) != Some(&MAGIC) {
            return Err(head("it is not a checkpoint"));
        }
        let version = number(8)?;
        if version != VERSION {
            let text = format!(
                "format {version}, this program reads {VERSION}: restore it with the program that \
                 made it"
            );
            return Err(Error::Elsewhere(text));
        }
        let count = number(12)? as usize;
        // LIMIT: sections of a checkpoint.
        if count > 64 || bytes.len() < HEAD_BYTES + count * ROW_BYTES + HASH_BYTES {
            return Err(head("it is cut"));
        }
        let table = Self { bytes, count };
        let (all, whole) = bytes.split_at(bytes.len() - HASH_BYTES);
        if blake3::hash(all).as_bytes() != whole {
            // The checksums of the parts serve to name the damaged one.
            for section in Section::ALL {
                table.intact(section)?;
            }
            return Err(Error::damaged("the whole", "its checksum differs"));
        }
        Ok(table)
    }

    /// The bytes of a section, and their checksum.
    fn row_of(&self, section: Section) -> Result<(&'b [u8], &'b [u8])> {
        let damaged = |what: &str| Error::damaged(format!("section '{}'", section.name()), what);
        let rows = self.bytes[HEAD_BYTES..].chunks_exact(ROW_BYTES).take(self.count);
        let named = |row: &&[u8]| {
            let name = row[..16].split(|b| *b == 0).next();
            name == Some(section.name().as_bytes())
        };
        let mut found = rows.filter(named);
        let row = found.next().ok_or_else(|| damaged("it is missing"))?;
        if found.next().is_some() {
            return Err(damaged("it occurs twice"));
        }
        let number = |at: usize| {
            let bytes = row[at..at + 8].try_into().unwrap_or([0; 8]); // the slice has eight bytes
            u64::from_le_bytes(bytes)
        };
        let (offset, length) = (number(16), number(24));
        let end = offset.checked_add(length).filter(|end| *end <= self.bytes.len() as u64);
        let end = end.filter(|_| length <= SECTION_BYTES_MAX);
        let end = end.ok_or_else(|| damaged("it reaches beyond the end"))?;
        Ok((&self.bytes[offset as usize..end as usize], &row[32..64]))
    }

    /// Compares a section with its checksum.
    fn intact(&self, section: Section) -> Result<()> {
        let (bytes, hash) = self.row_of(section)?;
        match blake3::hash(bytes).as_bytes() == hash {
            true => Ok(()),
            false => {
                let part = format!("section '{}'", section.name());
                Err(Error::damaged(part, "its checksum differs"))
            }
        }
    }

    fn part<T: DeserializeOwned>(&self, section: Section) -> Result<T> {
        serde_json::from_slice(self.row_of(section)?.0)
            .map_err(|e| Error::damaged(format!("section '{}'", section.name()), e.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use dormouse_record::sample::small;

    use super::*;

    #[test]
    fn encoded_records_are_decoded_unchanged() {
        let records = small();
        assert_eq!(decode(&encode(&records)).unwrap(), records);
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let good = encode(&small());
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            assert!(decode(&bad).is_err(), "byte {at}");
        }
    }

    #[test]
    fn every_cut_is_found() {
        let good = encode(&small());
        for length in 0..good.len() {
            assert!(decode(&good[..length]).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn a_damaged_section_is_named() {
        let good = encode(&small());
        let at = good.windows(9).position(|w| w == b"\"session\"").unwrap();
        let mut bad = good;
        bad[at] ^= 1;
        let text = decode(&bad).unwrap_err().to_string();
        assert!(text.contains("section 'process'"), "{text}");
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(0u8.., 0..400)) {
            let _ = decode(&bytes); // returns for any bytes
            let mut with_head = MAGIC.to_vec();
            with_head.extend(VERSION.to_le_bytes());
            with_head.extend(bytes);
            let _ = decode(&with_head);
        }
    }
}
