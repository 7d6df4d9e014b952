//! Reads a checkpoint, which may contain any bytes.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use dormouse_record::{CHUNK_BYTES, Error, PAGE_BYTES, Records, Result, Run};

use crate::part::{PageFiles, part_name};
use crate::section::{SECTION_BYTES_MAX, decode};
use crate::source::Source;

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
        // LIMIT: five sections at their largest.
        let bytes_max = SECTION_BYTES_MAX * 5;
        // The length is a hint: `take` alone would read into buffers that grow from 32 bytes.
        let length = file.metadata().map_or(0, |meta| meta.len().min(bytes_max));
        let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or(0) + 1);
        file.take(bytes_max).read_to_end(&mut bytes).map_err(Error::file("cannot read", &path))?;
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
    pub(crate) fn each_chunk(&self, act: impl FnMut(usize, &[u8]) -> Result<()>) -> Result<()> {
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

impl Source for Reader {
    fn records(&self) -> &Records {
        self.records()
    }

    fn pages(&self) -> &PageFiles {
        self.pages()
    }

    fn verify_some(&self, which: &dyn Fn(usize) -> bool) -> Result<()> {
        self.verify_some(which)
    }
}

/// The owner of the contents of some pages, for messages.
pub(crate) fn whose(records: &Records, first: u64, end: u64) -> String {
    let hit = |runs: &[Run]| runs.iter().any(|r| r.first < end && r.first + r.pages > first);
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
