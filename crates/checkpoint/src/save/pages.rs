//! Contents of memory: pages are found by PAGEMAP_SCAN, read from `/proc/PID/mem` or from a file, and written
//! to the checkpoint.
//!
//! Pages that parent and child share since fork(2) are read from each, since the kernel may move them at
//! any time, and written once.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use dormouse_kernel::Errno;
use dormouse_kernel::call::{self, PageRun, Scan};
use dormouse_parcel::{Sink, warm};
use dormouse_record::{Area, Backing, Error, Of, PAGE_BYTES, Result, Run};
use rustix::fs::SeekFrom;

use super::seen::Seen;

/// Bytes that are copied at a time: as much as stays in a processor's cache until it is written.
const BATCH_BYTES: u64 = 1 << 20;

/// Writes the contents of a file, without its holes.
pub(super) fn file_runs(
    file: &File,
    bytes: u64,
    of: Of,
    sink: &mut dyn Sink,
) -> std::io::Result<Result<Vec<Run>>> {
    let mut runs = Vec::new();
    let (mut at, mut buffer) = (0, Vec::new());
    while at < bytes {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Err(rustix::io::Errno::NXIO) => break,
            found => found? / PAGE_BYTES * PAGE_BYTES,
        };
        let end = rustix::fs::seek(file, SeekFrom::Hole(start))?.next_multiple_of(PAGE_BYTES);
        let end = end.min(bytes);
        at = start;
        while at < end {
            let length = (end - at).min(BATCH_BYTES);
            buffer.clear();
            buffer.resize(length as usize, 0); // zeros behind the end of the file
            let n = file.read_at(&mut buffer, at)?;
            debug_assert!(n as u64 == length || at + n as u64 >= file.metadata()?.len());
            if let Err(e) = put(&mut runs, of, at, &buffer, false, sink) {
                return Ok(Err(e));
            }
            at += length;
        }
    }
    Ok(Ok(runs))
}

/// The same for memory of huge pages, which does not report its holes: they read as zeros.
pub(super) fn huge_runs(
    file: &File,
    bytes: u64,
    of: Of,
    sink: &mut dyn Sink,
) -> std::io::Result<Result<Vec<Run>>> {
    let mut runs = Vec::new();
    let mut buffer = vec![0; BATCH_BYTES as usize];
    for at in (0..bytes).step_by(BATCH_BYTES as usize) {
        let part = &mut buffer[..(bytes - at).min(BATCH_BYTES) as usize];
        file.read_exact_at(part, at)?;
        if let Err(e) = put(&mut runs, of, at, part, true, sink) {
            return Ok(Err(e));
        }
    }
    Ok(Ok(runs))
}

/// Writes all pages of a part of a process's memory; addresses are offsets from its begin.
pub(super) fn memory_runs(
    memory: &File,
    part: Range<u64>,
    of: Of,
    sink: &mut dyn Sink,
) -> std::io::Result<Result<Vec<Run>>> {
    let mut runs = Vec::new();
    let mut buffer = Vec::new();
    let bytes = part.end - part.start;
    for at in (0..bytes).step_by(BATCH_BYTES as usize) {
        buffer.resize((bytes - at).min(BATCH_BYTES) as usize, 0);
        memory.read_exact_at(&mut buffer, part.start + at)?;
        if let Err(e) = put(&mut runs, of, at, &buffer, false, sink) {
            return Ok(Err(e));
        }
    }
    Ok(Ok(runs))
}

/// Writes contents that begin at an address, without pages that an earlier checkpoint has.
fn put(
    runs: &mut Vec<Run>,
    of: Of,
    start: u64,
    contents: &[u8],
    skips_zeros: bool,
    sink: &mut dyn Sink,
) -> Result<()> {
    // Adjacent pages are written at once.
    let mut new = 0..0;
    let places = (0..contents.len()).step_by(PAGE_BYTES as usize);
    for (at, page) in places.zip(contents.chunks(PAGE_BYTES as usize)) {
        if skips_zeros && page == ZEROS {
            continue;
        }
        let address = start + at as u64;
        let number = match sink.find(of, address, page) {
            Some(known) => known,
            None => {
                if new.end != at {
                    sink.append(&contents[std::mem::replace(&mut new, at..at)])?;
                }
                new.end = at + page.len();
                sink.next_page() + (at - new.start) as u64 / PAGE_BYTES
            }
        };
        note(runs, address, number);
    }
    sink.append(&contents[new])
}

/// State that is kept from one process to the next.
#[derive(Default)]
pub(crate) struct Known {
    /// Pages that several processes share (fork(2)), by a hash of their contents: each is written
    /// once.
    pages: HashMap<[u8; 32], u64>,
    /// The buffer for copies, reused: new memory costs as much as the copy into it.
    buffer: Vec<u8>,
}

impl Known {
    /// Prepares the buffer for as many bytes that are read next.
    pub(crate) fn make_room(&mut self, bytes: u64) {
        warm(&mut self.buffer, bytes.min(BATCH_BYTES) as usize);
    }
}

/// The files by which memory is found and read (proc_pid_pagemap(5), proc_pid_mem(5)).
#[derive(Debug)]
pub(super) struct Files {
    pub(super) pagemap: File,
    pub(super) memory: File,
}

impl Files {
    pub(super) fn of(pid: u32) -> Result<Self> {
        let open = |name: &str| {
            let path = format!("/proc/{pid}/{name}");
            File::open(&path).map_err(Error::file("cannot open", path))
        };
        Ok(Self { pagemap: open("pagemap")?, memory: open("mem")? })
    }
}

/// Runs of private pages, each entirely clean or entirely written.
pub(super) fn own_pages(
    pagemap: &File,
    scan: Scan,
    start: u64,
    end: u64,
) -> std::result::Result<Vec<PageRun>, Errno> {
    let mut all: Vec<PageRun> = Vec::new();
    let mut buffer = [PageRun::default(); 512];
    let mut at = start;
    while at < end {
        let (count, walked) = call::scan_own_pages(pagemap.as_fd(), scan, at, end, &mut buffer)?;
        for run in &buffer[..count] {
            match all.last_mut() {
                Some(last) if last.end == run.start && last.is_clean() == run.is_clean() => {
                    last.end = run.end;
                }
                _ => all.push(*run),
            }
        }
        if walked <= at {
            return Err(Errno::IO); // the kernel promises progress
        }
        at = walked;
    }
    Ok(all)
}

/// LIMIT: places that are copied at a time.
const PLACES_MAX: usize = 1024;

/// A part of an area to be copied.
struct Place {
    area: usize,
    address: u64,
    bytes: u64,
}

/// The places that are copied at a time.
pub(super) struct Batch<'p> {
    seen: &'p Seen,
    files: &'p Files,
    places: Vec<Place>,
    bytes: u64,
}

/// The contents of a page that was never written.
const ZEROS: [u8; PAGE_BYTES as usize] = [0; PAGE_BYTES as usize];

impl<'p> Batch<'p> {
    pub(super) fn new(seen: &'p Seen, files: &'p Files) -> Self {
        Self { seen, files, places: Vec::new(), bytes: 0 }
    }

    /// Gathers a range of an area, and saves each batch that is full.
    pub(super) fn add(
        &mut self,
        area: usize,
        range: Range<u64>,
        areas: &mut [Area],
        known: &mut Known,
        sink: &mut dyn Sink,
    ) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            at += self.gather(area, at..range.end);
            if self.bytes == BATCH_BYTES || self.places.len() == PLACES_MAX {
                self.save(areas, known, sink)?;
            }
        }
        Ok(())
    }

    /// Gathers as much as there is space for; returns the number of bytes.
    pub(super) fn gather(&mut self, area: usize, range: Range<u64>) -> u64 {
        let bytes = (range.end - range.start).min(BATCH_BYTES - self.bytes);
        self.places.push(Place { area, address: range.start, bytes });
        self.bytes += bytes;
        bytes
    }

    /// Copies the gathered places, and writes the pages that are not stored yet.
    pub(super) fn save(
        &mut self,
        areas: &mut [Area],
        known: &mut Known,
        sink: &mut dyn Sink,
    ) -> Result<()> {
        let shared = self.read(known)?;
        self.write(shared, areas, known, sink)
    }

    /// Copies the gathered places; returns which pages of each place are shared with another
    /// process.
    pub(super) fn read(&mut self, known: &mut Known) -> Result<Vec<Vec<bool>>> {
        let shared = |place: &Place| shared_pages(&self.files.pagemap, place.address, place.bytes);
        let shared = self.places.iter().map(shared).collect::<std::result::Result<Vec<_>, _>>();
        let shared = shared.map_err(Error::of("find the pages in memory", self.seen.pid))?;
        self.copy(&mut known.buffer)?;
        Ok(shared)
    }

    /// Writes the copied pages that are not stored yet.
    pub(super) fn write(
        &mut self,
        shared: Vec<Vec<bool>>,
        areas: &mut [Area],
        known: &mut Known,
        sink: &mut dyn Sink,
    ) -> Result<()> {
        let buffer = std::mem::take(&mut known.buffer);
        let mut rest = &buffer[..];
        let of = Of::Process(self.seen.inner);
        // Adjacent pages are written at once.
        let mut new = 0..0;
        for (place, shared) in std::mem::take(&mut self.places).into_iter().zip(shared) {
            let is_anonymous =
                matches!(areas[place.area].backing, Backing::Anonymous | Backing::Huge { .. });
            for (address, is_shared) in (place.address..).step_by(PAGE_BYTES as usize).zip(shared) {
                let at = buffer.len() - rest.len();
                let (page, later) = rest.split_at(PAGE_BYTES as usize);
                rest = later;
                if is_anonymous && page == ZEROS {
                    continue;
                }
                let next = sink.next_page() + new.len() as u64 / PAGE_BYTES;
                let mut find = || sink.find(of, address, page).unwrap_or(next);
                let number = match is_shared {
                    true => *known.pages.entry(*blake3::hash(page).as_bytes()).or_insert_with(find),
                    false => find(),
                };
                if number == next && new.end == at {
                    new.end += page.len();
                } else if number == next {
                    sink.append(&buffer[new])?;
                    new = at..at + page.len();
                }
                note(&mut areas[place.area].runs, address, number);
            }
        }
        self.bytes = 0;
        sink.append(&buffer[new])?;
        known.buffer = buffer;
        Ok(())
    }

    /// Reads through the process's memory file, which does not change the memory.
    /// process_vm_readv(2) pins the pages that it reads, which costs three times as much. In
    /// addition it refuses areas with PROT_NONE (whose pages may have been written before) and
    /// permanently copies each page that is shared since fork(2) (KERNEL(5.19)).
    fn copy(&self, buffer: &mut Vec<u8>) -> Result<()> {
        buffer.resize(self.bytes as usize, 0);
        let failed = |e| Error::file("cannot read", format!("/proc/{}/mem", self.seen.pid))(e);
        let mut rest = &mut buffer[..];
        for place in &self.places {
            let (now, later) = rest.split_at_mut(place.bytes as usize);
            self.files.memory.read_exact_at(now, place.address).map_err(failed)?;
            rest = later;
        }
        Ok(())
    }
}

/// Adds a page to runs.
fn note(runs: &mut Vec<Run>, address: u64, number: u64) {
    match runs.last_mut() {
        Some(last)
            if last.address + last.pages * PAGE_BYTES == address
                && last.first + last.pages == number =>
        {
            last.pages += 1;
        }
        _ => runs.push(Run { address, pages: 1, first: number }),
    }
}

/// Which of the pages another process has mapped, too (pagemap, bit 56).
fn shared_pages(pagemap: &File, address: u64, bytes: u64) -> std::result::Result<Vec<bool>, Errno> {
    const ENTRY_BYTES: u64 = 8;
    const PRESENT: u64 = 1 << 63;
    const EXCLUSIVE: u64 = 1 << 56;
    let mut entries = vec![0; (bytes / PAGE_BYTES * ENTRY_BYTES) as usize];
    pagemap
        .read_exact_at(&mut entries, address / PAGE_BYTES * ENTRY_BYTES)
        .map_err(|e| e.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error))?;
    let is_shared = |entry: &[u8]| {
        let entry = u64::from_ne_bytes(entry.try_into().unwrap_or([0; 8])); // eight bytes each
        entry & (PRESENT | EXCLUSIVE) == PRESENT
    };
    Ok(entries.chunks_exact(ENTRY_BYTES as usize).map(is_shared).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_next_to_each_other_are_one_run() {
        let mut runs = Vec::new();
        for (address, number) in [(0, 5), (4096, 6), (8192, 9), (20480, 10), (24576, 11)] {
            note(&mut runs, address, number);
        }
        let found: Vec<_> = runs.iter().map(|r| (r.address, r.pages, r.first)).collect();
        assert_eq!(found, [(0, 2, 5), (8192, 1, 9), (20480, 2, 10)]);
    }
}
