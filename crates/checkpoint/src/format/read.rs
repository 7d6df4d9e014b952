//! Reads a checkpoint, which may contain any bytes.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use super::{
    CHUNK_BYTES, MAGIC, PAGE_BYTES, PageFiles, Records, SECTION_BYTES_MAX, VERSION, check,
    part_name,
};
use crate::error::{Error, Result};

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

/// A checkpoint with checked records.
#[derive(Debug)]
pub struct Reader {
    records: Records,
    pages: PageFiles,
    dir: PathBuf,
}

impl Reader {
    /// Opens a checkpoint and checks its records, as a whole, per part and number by number.
    ///
    /// Errors: [`Error::Damaged`] with the part's name.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join("records");
        let file = open(&path)?;
        let mut bytes = Vec::new();
        // LIMIT: five sections at their largest.
        file.take(SECTION_BYTES_MAX * 5)
            .read_to_end(&mut bytes)
            .map_err(Error::file("cannot read", &path))?;
        let records = decode(&bytes)?;
        let mut files = Vec::new();
        for (number, part) in records.pages.parts().into_iter().enumerate() {
            let path = dir.join(part_name(number));
            let file = open(&path)?;
            let length = file.metadata().map_err(Error::file("cannot read", &path))?.len();
            let expected = part.end - part.start;
            if length != expected {
                let what = format!("{length} bytes where {expected} belong");
                return Err(Error::damaged(part_name(number), what));
            }
            files.push((part, file));
        }
        Ok(Self { records, pages: PageFiles::new(files), dir: dir.to_owned() })
    }

    /// The records.
    pub fn records(&self) -> &Records {
        &self.records
    }

    /// The files of pages.
    pub fn pages(&self) -> &PageFiles {
        &self.pages
    }

    /// Checks the contents of memory against their checksums.
    ///
    /// Errors: [`Error::Damaged`] with the process or object of the first damaged page.
    pub fn verify(&self) -> Result<()> {
        self.verify_some(|_| true)
    }

    /// The same for the chunks that `which` selects by their numbers.
    pub(crate) fn verify_some(&self, which: impl Fn(usize) -> bool) -> Result<()> {
        self.each_chunk_of(which, |_, _| Ok(()))
    }

    /// The same, and calls `act` with each correct chunk and its number.
    pub(super) fn each_chunk(&self, act: impl FnMut(usize, &[u8]) -> Result<()>) -> Result<()> {
        self.each_chunk_of(|_| true, act)
    }

    fn each_chunk_of(
        &self,
        which: impl Fn(usize) -> bool,
        mut act: impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let chunks = &self.records.pages.chunks.0;
        let mut buffer = vec![0; CHUNK_BYTES as usize];
        for (number, (part, _)) in self.pages.parts().iter().enumerate() {
            let first = (part.start / CHUNK_BYTES) as usize;
            let end = part.end.div_ceil(CHUNK_BYTES) as usize;
            for n in (first..end).filter(|n| which(*n)) {
                let at = n as u64 * CHUNK_BYTES;
                let length = CHUNK_BYTES.min(part.end - at) as usize;
                let (chunk, name) = (&mut buffer[..length], part_name(number));
                let read = self.pages.read_exact_at(chunk, at);
                read.map_err(Error::file("cannot read", self.dir.join(&name)))?;
                // The number of checksums was checked.
                if blake3::hash(chunk).as_bytes() != &chunks[n] {
                    let first = at / PAGE_BYTES;
                    let whose = whose(&self.records, first, first + length as u64 / PAGE_BYTES);
                    return Err(Error::damaged(name, whose));
                }
                act(n, chunk)?;
            }
        }
        Ok(())
    }
}

/// The owner of the contents of some pages, for messages.
pub(super) fn whose(records: &Records, first: u64, end: u64) -> String {
    let hit = |runs: &[super::Run]| runs.iter().any(|r| r.first < end && r.first + r.pages > first);
    for process in &records.processes {
        let memory = process.memory.and_then(|m| records.memories.get(m));
        let area = memory.and_then(|m| m.areas.iter().find(|a| hit(&a.runs)));
        if let Some(area) = area {
            let (pid, name) = (process.pid, &process.name);
            return format!("memory at {:x} of process {pid} ({name})", area.start);
        }
    }
    "shared memory".into()
}

fn open(path: &Path) -> Result<File> {
    let mut options = std::fs::OpenOptions::new();
    // Without O_NONBLOCK, a fifo or a device in its place could block the reader.
    options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(path).map_err(Error::file("cannot open", path))?;
    let is_file = file.metadata().map_err(Error::file("cannot read", path))?.is_file();
    if is_file { Ok(file) } else { Err(Error::damaged(path.display().to_string(), "not a file")) }
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

/// The table of sections, of which the checksums were checked.
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
        // ORDER: parts first, so that the message names the damaged one.
        for section in Section::ALL {
            table.bytes_of(section)?;
        }
        let (all, whole) = bytes.split_at(bytes.len() - HASH_BYTES);
        if blake3::hash(all).as_bytes() != whole {
            return Err(Error::damaged("the whole", "its checksum differs"));
        }
        Ok(table)
    }

    fn bytes_of(&self, section: Section) -> Result<&'b [u8]> {
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
        let bytes = &self.bytes[offset as usize..end as usize];
        if blake3::hash(bytes).as_bytes() != &row[32..64] {
            return Err(damaged("its checksum differs"));
        }
        Ok(bytes)
    }

    fn part<T: DeserializeOwned>(&self, section: Section) -> Result<T> {
        serde_json::from_slice(self.bytes_of(section)?)
            .map_err(|e| Error::damaged(format!("section '{}'", section.name()), e.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::write::encode;
    use super::*;
    use crate::format::check::tests::small;

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
