//! An earlier checkpoint, the base, with pages that need not be written again.
//!
//! **By contents.** A page is taken from the base only if it is equal, byte by byte. The page to
//! compare with is a guess: the one at the same address of the process with the same id, or of the
//! object with the same number. A wrong guess only costs a page that is written, so any earlier
//! checkpoint can be the base.
//!
//! **By file.** A file of the base becomes a file of the new checkpoint, by a hard link, if the
//! base still refers to at least half of its pages; pages of the other files are written again. So
//! a checkpoint has at most twice the bytes that it needs, except for changes since the base. If
//! there would be more files than [`PARTS_MAX`], only the largest is taken.
//!
//! Taken files are first compared with their checksums: damage is never propagated.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;

use dormouse_record::{
    CHUNK_BYTES, Checksums, Error, Of, PAGE_BYTES, PARTS_MAX, Pages, Records, Result, Run,
};
use rustix::fs::{AtFlags, CWD};

use crate::part::{PageFiles, part_name};
use crate::read::Reader;

/// A smaller amount is not taken from a base, but written again.
const BYTES_MIN: u64 = 4 << 20;
/// LIMIT: chunks that are kept in memory: one of each part, so that reads by address read each
/// chunk once.
const CHUNKS_KEPT: usize = PARTS_MAX;

/// The files, checksums and runs that a new checkpoint may take from a base, by the numbers of the
/// new one.
#[derive(Debug, Clone)]
pub struct Base {
    taken: Arc<Taken>,
    /// Recently read chunks, the last used at the end.
    kept: Vec<(u64, Vec<u8>)>,
}

#[derive(Debug)]
struct Taken {
    files: PageFiles,
    /// Lengths of the files, in bytes.
    parts: Vec<u64>,
    chunks: Vec<[u8; 32]>,
    /// Runs, sorted by address.
    runs: HashMap<Of, Vec<Run>>,
}

impl Base {
    /// Finds the files that can be taken; `None` if it is not worth it.
    ///
    /// Errors: as of [`Reader::verify`]. The base cannot be used then.
    pub fn of(reader: &Reader) -> Result<Option<Self>> {
        let records = reader.records();
        let all = records.pages.parts();
        let named = named(records, &all);
        let half = |n: &usize| named[*n] * PAGE_BYTES * 2 >= all[*n].end - all[*n].start;
        let mut taken: Vec<usize> = (0..all.len()).filter(half).collect();
        if taken.len() >= PARTS_MAX {
            taken = taken.into_iter().max_by_key(|n| named[*n]).into_iter().collect();
        }
        if taken.iter().map(|n| named[*n] * PAGE_BYTES).sum::<u64>() < BYTES_MIN {
            return Ok(None);
        }
        let chunks_of = |part: &Range<u64>| {
            (part.start / CHUNK_BYTES) as usize..part.end.div_ceil(CHUNK_BYTES) as usize
        };
        reader.verify_some(|chunk| taken.iter().any(|n| chunks_of(&all[*n]).contains(&chunk)))?;
        let (mut files, mut moved, mut chunks) = (Vec::new(), Vec::new(), Vec::new());
        for number in taken {
            let was = &all[number];
            let start = chunks.len() as u64 * CHUNK_BYTES;
            let file = reader.pages().parts()[number].1.try_clone();
            let file = file.map_err(Error::file("cannot duplicate", part_name(number)))?;
            files.push((start..start + (was.end - was.start), file));
            moved.push((was.clone(), start));
            chunks.extend_from_slice(&records.pages.chunks.0[chunks_of(was)]); // checked
        }
        let mut runs: HashMap<Of, Vec<Run>> = HashMap::new();
        for (of, run) in records.runs() {
            runs.entry(of).or_default().extend(renumbered(run, &moved));
        }
        for runs in runs.values_mut() {
            runs.sort_unstable_by_key(|run| run.address);
        }
        let parts = files.iter().map(|(part, _)| part.end - part.start).collect();
        let taken = Taken { files: PageFiles::new(files), parts, chunks, runs };
        Ok(Some(Self { taken: Arc::new(taken), kept: Vec::new() }))
    }

    /// Links its files into a directory; if that fails, no link is left there.
    pub(crate) fn link_into(&self, dir: &Path) -> bool {
        let link = |(number, file): (usize, &std::fs::File)| {
            let from = format!("/proc/self/fd/{}", file.as_raw_fd());
            rustix::fs::linkat(CWD, from, CWD, dir.join(part_name(number)), AtFlags::SYMLINK_FOLLOW)
        };
        // The directory may be on another file system, or a file has too many links.
        let is_linked = self.taken.files.files().enumerate().all(|one| link(one).is_ok());
        if !is_linked {
            (0..self.parts()).for_each(|n| drop(std::fs::remove_file(dir.join(part_name(n)))));
        }
        is_linked
    }

    /// The number of its files.
    pub(crate) fn parts(&self) -> usize {
        self.taken.parts.len()
    }

    /// The end of its pages, in bytes.
    pub(crate) fn end(&self) -> u64 {
        self.taken.chunks.len() as u64 * CHUNK_BYTES
    }

    /// Its pages, followed by `own`, which are a file of their own if there are any.
    pub(crate) fn followed_by(&self, own: Pages) -> Pages {
        let Taken { parts, chunks, files, .. } = &*self.taken;
        let end = files.parts().last().map_or(0, |(part, _)| part.end);
        let (mut parts, mut chunks, mut bytes) = (parts.clone(), chunks.clone(), end);
        if own.bytes > 0 {
            bytes = self.end() + own.bytes;
            parts.push(own.bytes);
            chunks.extend(own.chunks.0);
        }
        if parts.len() == 1 {
            parts.clear();
        }
        Pages { bytes, chunks: Checksums(chunks), parts }
    }

    /// The number of a page in the base with this address and these contents.
    pub(crate) fn find(&mut self, of: Of, address: u64, page: &[u8]) -> Option<u64> {
        let runs = self.taken.runs.get(&of)?;
        let after = runs.partition_point(|run| run.address <= address);
        let run = runs[..after].last()?;
        let within = (address - run.address) / PAGE_BYTES;
        if within >= run.pages {
            return None;
        }
        let number = run.first + within;
        let at = number * PAGE_BYTES;
        let chunk = self.chunk(at / CHUNK_BYTES)?;
        let at = (at % CHUNK_BYTES) as usize;
        (chunk.get(at..at + PAGE_BYTES as usize)? == page).then_some(number)
    }

    fn chunk(&mut self, number: u64) -> Option<&[u8]> {
        let place = self.kept.iter().position(|(n, _)| *n == number);
        let kept = match place {
            Some(place) => self.kept.remove(place),
            None => {
                let at = number * CHUNK_BYTES;
                let files = &self.taken.files;
                let (part, _) = &files.parts()[files.number_of(at)?];
                let mut bytes = match self.kept.len() {
                    CHUNKS_KEPT.. => self.kept.remove(0).1,
                    _ => Vec::new(),
                };
                bytes.resize(CHUNK_BYTES.min(part.end - at) as usize, 0);
                // Pages that cannot be read any more are written again.
                files.read_exact_at(&mut bytes, at).ok()?;
                (number, bytes)
            }
        };
        self.kept.push(kept);
        self.kept.last().map(|(_, bytes)| &**bytes)
    }
}

/// The number of referred pages of each part.
fn named(records: &Records, parts: &[Range<u64>]) -> Vec<u64> {
    let mut is_named = vec![false; (records.pages.bytes / PAGE_BYTES) as usize];
    for (_, run) in records.runs() {
        is_named[run.first as usize..(run.first + run.pages) as usize].fill(true); // checked
    }
    let count = |part: &Range<u64>| {
        let pages = &is_named[(part.start / PAGE_BYTES) as usize..(part.end / PAGE_BYTES) as usize];
        pages.iter().filter(|is_named| **is_named).count() as u64
    };
    parts.iter().map(count).collect()
}

/// The ranges of a run in parts that have moved: `moved` has the old range and the new start of
/// each.
fn renumbered(run: &Run, moved: &[(Range<u64>, u64)]) -> Vec<Run> {
    let whole = run.first..run.first + run.pages;
    let within = |(was, now): &(Range<u64>, u64)| {
        let (start, end) = (was.start / PAGE_BYTES, was.end / PAGE_BYTES);
        let (from, to) = (whole.start.max(start), whole.end.min(end));
        (from < to).then(|| Run {
            address: run.address + (from - whole.start) * PAGE_BYTES,
            pages: to - from,
            first: now / PAGE_BYTES + (from - start),
        })
    };
    moved.iter().filter_map(within).collect()
}

#[cfg(test)]
mod tests {
    use dormouse_record::sample::small;
    use dormouse_record::{Area, Backing, check};

    use super::*;
    use crate::dir::DirSink;
    use crate::sink::Sink;

    const P: u64 = PAGE_BYTES;
    const AT: u64 = 1 << 30;
    /// Pages of the memory: enough to be worth it, and not a whole number of chunks.
    const PAGES: u64 = 3000;

    /// Saves memory of one process, upon a base; returns it and the number of new pages.
    fn saved(place: &Path, memory: &[u8], before: Option<&Reader>) -> (Reader, u64) {
        let base = before.and_then(|reader| Base::of(reader).unwrap());
        let mut writer = Box::new(DirSink::begin_upon(place, base).unwrap());
        let mut records = small();
        let of = Of::Process(records.processes[0].pid);
        let mut runs = Vec::new();
        for (n, page) in (0..).zip(memory.chunks(P as usize)) {
            let first = writer.find(of, AT + n * P, page).unwrap_or(writer.next_page());
            if first == writer.next_page() {
                writer.append(page).unwrap();
            }
            runs.push(Run { address: AT + n * P, pages: 1, first });
        }
        let end = AT + runs.len() as u64 * P;
        let (backing, flags) = (Backing::Anonymous, Vec::new());
        records.memories[0].areas = vec![Area { start: AT, end, access: 3, backing, flags, runs }];
        records.pages = writer.pages().unwrap();
        check::records(&records).unwrap();
        let new = writer.new_bytes() / P;
        writer.publish(&records).unwrap();
        let reader = Reader::open(place).unwrap();
        reader.verify().unwrap();
        let area = &reader.records().memories[0].areas[0];
        let mut found = vec![0; memory.len()];
        for (run, page) in area.runs.iter().zip(found.chunks_mut(P as usize)) {
            reader.pages().read_exact_at(page, run.first * P).unwrap();
        }
        assert!(found == memory, "the saved memory is read back");
        (reader, new)
    }

    fn memory() -> Vec<u8> {
        (0..PAGES * P).map(|n| (n / 5 + n / P) as u8).collect()
    }

    fn names(dir: &Path) -> Vec<String> {
        let name =
            |e: std::io::Result<std::fs::DirEntry>| e.unwrap().file_name().into_string().unwrap();
        let mut all: Vec<String> = std::fs::read_dir(dir).unwrap().map(name).collect();
        all.sort();
        all
    }

    #[test]
    fn only_changed_pages_are_written() {
        let dir = tempfile::tempdir().unwrap();
        let place = |n: usize| dir.path().join(n.to_string());
        let mut memory = memory();
        let (mut last, new) = saved(&place(0), &memory, None);
        assert_eq!(new, PAGES);
        // Ten other pages each time, more often than the limit of files.
        for n in 1..12 {
            for page in n * 20..n * 20 + 10 {
                memory[page * P as usize] ^= 0xff;
            }
            let (next, new) = saved(&place(n), &memory, Some(&last));
            // At the limit of files, pages of the small ones are written again.
            assert_eq!(new, if n == 8 { 80 } else { 10 }, "{n}");
            assert!(next.records().pages.parts.len() <= PARTS_MAX);
            last = next;
        }
        assert_eq!(names(&place(3)), ["pages", "pages.1", "pages.2", "pages.3", "records"]);
        // Each is complete by itself.
        for n in 0..11 {
            std::fs::remove_dir_all(place(n)).unwrap();
        }
        Reader::open(&place(11)).unwrap().verify().unwrap();
    }

    #[test]
    fn unchanged_memory_writes_no_pages() {
        let dir = tempfile::tempdir().unwrap();
        let (first, _) = saved(&dir.path().join("0"), &memory(), None);
        let (second, new) = saved(&dir.path().join("1"), &memory(), Some(&first));
        assert_eq!(
            (new, names(&dir.path().join("1"))),
            (0, vec!["pages".into(), "records".into()])
        );
        assert_eq!(second.records().pages, first.records().pages);
    }

    #[test]
    fn a_file_of_mostly_unused_pages_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let (first, _) = saved(&dir.path().join("0"), &memory(), None);
        let mut half = memory();
        half[..2000 * P as usize].fill(9);
        let (second, new) = saved(&dir.path().join("1"), &half, Some(&first));
        assert_eq!(new, 2000);
        // A third of the first file is left.
        let (third, new) = saved(&dir.path().join("2"), &half, Some(&second));
        assert_eq!((new, third.records().pages.parts.len()), (1000, 2));
        // A small rest of a large file is enough.
        let (_, new) = saved(&dir.path().join("3"), &half[..4 * P as usize], Some(&third));
        assert_eq!(new, 0);
        let few = Reader::open(&dir.path().join("3")).unwrap();
        assert!(Base::of(&few).unwrap().is_none());
    }

    #[test]
    fn a_damaged_base_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let (first, _) = saved(&dir.path().join("0"), &memory(), None);
        let mut other = memory();
        other[0] ^= 1;
        let (second, _) = saved(&dir.path().join("1"), &other, Some(&first));
        let flip = |name: &str| {
            let path = dir.path().join("1").join(name);
            let mut bytes = std::fs::read(&path).unwrap();
            bytes[100] ^= 1;
            std::fs::write(&path, bytes).unwrap();
        };
        flip("pages.1");
        let said = second.verify().unwrap_err().to_string();
        assert!(said.contains("pages.1") && said.contains("process 1"), "{said}");
        assert!(Base::of(&second).is_err());
        flip("pages.1");
        flip("pages"); // a link: the same file
        assert!(first.verify().unwrap_err().to_string().contains("pages"));
        assert!(Base::of(&second).is_err());
        flip("pages");
        let shorter =
            std::fs::File::options().write(true).open(dir.path().join("1/pages.1")).unwrap();
        shorter.set_len(0).unwrap();
        let said = Reader::open(&dir.path().join("1")).unwrap_err().to_string();
        assert!(said.contains("pages.1"), "{said}");
    }
}
