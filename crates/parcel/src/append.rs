//! Writes the file `pages`: appends, with a checksum of every chunk.
//!
//! Large contents are written by separate threads, so that the copy from a frozen process waits
//! neither for the file, nor for checksums, nor for the disk:
//!
//! ```text
//! append -> write(2) -> checksums
//!               \----> fdatasync(2), again and again
//! ```
//!
//! A disk first stores written data in its cache, and only a flush makes it durable: a single flush
//! at the end would wait for all of it. For a few megabytes, threads cost more than they save.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, channel, sync_channel};
use std::thread::JoinHandle;

use dormouse_record::{CHUNK_BYTES, Checksums, Error, PAGE_BYTES, Pages, Result};

/// Minimum of bytes for which threads are used.
const LARGE_BYTES: u64 = 4 << 20;
/// Bytes of a piece that is passed to the threads.
const PIECE_BYTES: usize = 1 << 20;
/// LIMIT: pieces in the queue of a thread.
const WAITING: usize = 8;
/// LIMIT: bytes that are buffered before they are written.
const EARLY_BYTES: u64 = 1 << 20;
/// Bytes of each flush to the disk.
const TO_DISK_BYTES: u64 = 32 << 20;

/// Appends pages to a file.
#[derive(Debug)]
pub(crate) struct Appender {
    path: PathBuf,
    file: File,
    bytes: u64,
    way: Way,
    /// The buffer of appended pages that are not written yet, up to its capacity.
    early: Vec<u8>,
    /// The first error, which is reported again by all later calls.
    failed: Option<std::io::ErrorKind>,
}

#[derive(Debug)]
enum Way {
    Here(Box<Chunks>),
    There(Threads),
}

/// The checksums of all chunks so far.
#[derive(Debug, Default)]
struct Chunks {
    bytes: u64,
    chunk: blake3::Hasher,
    all: Vec<[u8; 32]>,
}

#[derive(Debug)]
struct Threads {
    /// The piece that is being filled.
    piece: Vec<u8>,
    full: SyncSender<Vec<u8>>,
    /// Buffers for reuse.
    free: Receiver<Vec<u8>>,
    writer: JoinHandle<std::io::Result<()>>,
    hasher: JoinHandle<Chunks>,
    syncer: JoinHandle<std::io::Result<()>>,
}

impl Appender {
    pub(crate) fn new(path: PathBuf, file: File) -> Self {
        Self {
            path,
            file,
            bytes: 0,
            way: Way::Here(Box::default()),
            early: Vec::new(),
            failed: None,
        }
    }

    /// The number of appended bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Allocates memory for so many bytes, which are appended next and written later.
    pub(crate) fn make_room(&mut self, bytes: u64) {
        if self.early.is_empty() {
            warm(&mut self.early, bytes.min(EARLY_BYTES) as usize);
            self.early.clear();
        }
    }

    /// Appends whole pages.
    pub(crate) fn append(&mut self, pages: &[u8]) -> Result<()> {
        debug_assert!((pages.len() as u64).is_multiple_of(PAGE_BYTES));
        if pages.is_empty() {
            return Ok(());
        }
        if self.failed.is_some() {
            return self.settle().map(drop);
        }
        self.bytes += pages.len() as u64;
        if self.early.capacity() - self.early.len() >= pages.len() {
            self.early.extend_from_slice(pages);
            return Ok(());
        }
        self.pass_early_on()?;
        self.pass_on(pages)
    }

    /// Writes the buffered pages; later pages are not buffered.
    fn pass_early_on(&mut self) -> Result<()> {
        let early = std::mem::take(&mut self.early);
        if early.is_empty() { Ok(()) } else { self.pass_on(&early) }
    }

    fn pass_on(&mut self, pages: &[u8]) -> Result<()> {
        if let Way::Here(chunks) = &mut self.way
            && self.bytes > LARGE_BYTES
        {
            let begun = Threads::begin(&self.file, std::mem::take(&mut **chunks));
            self.way = Way::There(begun.map_err(|e| self.fail(e))?);
        }
        match &mut self.way {
            Way::Here(chunks) => {
                let written = self.file.write_all(pages);
                chunks.update(pages);
                written.map_err(|e| self.fail(e))
            }
            Way::There(threads) => {
                if threads.append(pages) {
                    return Ok(());
                }
                // The threads end early only after a failed write, and return its error.
                self.settle().map(drop)
            }
        }
    }

    /// Records the error. The whole file is invalid then: earlier appends may be lost.
    fn fail(&mut self, e: std::io::Error) -> Error {
        self.failed = Some(e.kind());
        Error::file("cannot write", &self.path)(e)
    }

    /// Waits until all appended pages are in the file.
    fn settle(&mut self) -> Result<&mut Chunks> {
        if self.failed.is_none() {
            self.pass_early_on()?;
        }
        if matches!(self.way, Way::There(_))
            && let Way::There(threads) = std::mem::replace(&mut self.way, Way::Here(Box::default()))
        {
            let (chunks, ended) = threads.end();
            self.way = Way::Here(Box::new(chunks));
            ended.map_err(|e| self.fail(e))?;
        }
        match (&mut self.way, self.failed) {
            (Way::Here(chunks), None) => Ok(chunks),
            (_, kind) => {
                let kind = kind.unwrap_or(std::io::ErrorKind::Other);
                Err(Error::file("cannot write", &self.path)(kind.into()))
            }
        }
    }

    /// Checksums of all appended pages.
    pub(crate) fn pages(&mut self) -> Result<Pages> {
        let chunks = self.settle()?;
        if !chunks.bytes.is_multiple_of(CHUNK_BYTES) {
            chunks.end_chunk();
        }
        let bytes = chunks.bytes;
        Ok(Pages { bytes, chunks: Checksums(std::mem::take(&mut chunks.all)), parts: Vec::new() })
    }

    /// Makes the file durable.
    pub(crate) fn make_durable(&mut self) -> Result<()> {
        self.settle()?;
        self.file.sync_all().map_err(Error::file("cannot write", &self.path))
    }
}

impl Threads {
    fn begin(file: &File, mut chunks: Chunks) -> std::io::Result<Self> {
        let (mut to, flushed) = (file.try_clone()?, file.try_clone()?);
        let (full, pieces) = sync_channel::<Vec<u8>>(WAITING);
        let (hash, written) = sync_channel::<Vec<u8>>(WAITING);
        let (give_back, free) = channel();
        // A queue of one is enough: pages that are written during a flush are part of the next.
        let (flush, asked) = sync_channel::<()>(1);
        // If a thread cannot be created (for example by pids.max of a cgroup), the frozen processes
        // wait and must continue: threads that were created end by themselves.
        let writer = thread("dormouse-write", move || {
            let mut since = 0;
            for piece in pieces {
                to.write_all(&piece)?;
                since += piece.len() as u64;
                if since >= TO_DISK_BYTES {
                    since = 0;
                    if let Err(TrySendError::Disconnected(())) = flush.try_send(()) {
                        break; // the flush failed; `end` returns its error
                    }
                }
                if hash.send(piece).is_err() {
                    break; // the thread panicked; `joined` continues the panic
                }
            }
            Ok(())
        })?;
        let hasher = thread("dormouse-hash", move || {
            for piece in written {
                chunks.update(&piece);
                let _ = give_back.send(piece); // fails after the last append
            }
            chunks
        })?;
        let sync = move || asked.iter().try_for_each(|()| flushed.sync_data());
        let syncer = thread("dormouse-sync", sync)?;
        Ok(Self { piece: Vec::with_capacity(PIECE_BYTES), full, free, writer, hasher, syncer })
    }

    /// Passes pages to the threads; `false` if the threads have ended.
    fn append(&mut self, pages: &[u8]) -> bool {
        self.piece.extend_from_slice(pages);
        self.piece.len() < PIECE_BYTES || {
            let mut next = self.free.try_recv().unwrap_or_default();
            next.clear();
            self.full.send(std::mem::replace(&mut self.piece, next)).is_ok()
        }
    }

    /// Waits for the threads; returns the checksums, and the error of a failed write.
    fn end(self) -> (Chunks, std::io::Result<()>) {
        let _ = self.full.send(self.piece); // an ended thread returns its error
        drop(self.full);
        let written = joined(self.writer);
        let chunks = joined(self.hasher);
        // A failed flush is reported only once: later calls of fsync(2) succeed.
        (chunks, written.and(joined(self.syncer)))
    }
}

fn thread<T: Send + 'static>(
    name: &str,
    does: impl FnOnce() -> T + Send + 'static,
) -> std::io::Result<JoinHandle<T>> {
    std::thread::Builder::new().name(name.into()).spawn(does)
}

fn joined<T>(thread: JoinHandle<T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

impl Chunks {
    fn update(&mut self, pages: &[u8]) {
        let mut rest = pages;
        while !rest.is_empty() {
            let room = (CHUNK_BYTES - self.bytes % CHUNK_BYTES) as usize;
            let (now, later) = rest.split_at(room.min(rest.len()));
            self.chunk.update(now);
            self.bytes += now.len() as u64;
            if self.bytes.is_multiple_of(CHUNK_BYTES) {
                self.end_chunk();
            }
            rest = later;
        }
    }

    fn end_chunk(&mut self) {
        self.all.push(self.chunk.finalize().into());
        self.chunk.reset();
    }
}

/// Allocates memory for so many bytes in advance, so that processes are not frozen during page
/// faults.
pub fn warm(buffer: &mut Vec<u8>, bytes: usize) {
    // The kernel allocates pages of zeros only when they are written to.
    const NOT_ZERO: u8 = 1;
    if buffer.len() < bytes {
        buffer.resize(bytes, NOT_ZERO);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Appends so many pages, a number at a time; returns the file's contents and checksums.
    fn written(pages: usize, at_a_time: usize, room: u64) -> (Vec<u8>, Pages) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pages");
        let mut sink = Appender::new(path.clone(), File::create(&path).unwrap());
        sink.make_room(room);
        let all: Vec<u8> = (0..pages * 4096).map(|n| (n / 7) as u8).collect();
        for piece in all.chunks(at_a_time * 4096) {
            sink.append(piece).unwrap();
        }
        assert_eq!(sink.bytes(), all.len() as u64);
        let pages = sink.pages().unwrap();
        sink.make_durable().unwrap();
        (std::fs::read(path).unwrap(), pages)
    }

    #[test]
    fn threads_write_the_same_bytes() {
        let sizes = [(0, 1), (3, 1), (1024, 1024), (2500, 700), (5000, 33)];
        for ((pages, at_a_time), room) in sizes.into_iter().flat_map(|s| [(s, 0), (s, 40_960)]) {
            let (bytes, told) = written(pages, at_a_time, room);
            let expected: Vec<u8> = (0..pages * 4096).map(|n| (n / 7) as u8).collect();
            assert!(bytes == expected, "{pages} by {at_a_time}, room for {room}");
            let chunks = expected.chunks(CHUNK_BYTES as usize);
            let hashes = chunks.map(|c| *blake3::hash(c).as_bytes());
            assert_eq!(told.chunks.0, hashes.collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_failed_append_makes_all_later_calls_fail() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut sink = Appender::new("/dev/full".into(), full);
        assert!(sink.append(&[1; 4096]).is_err(), "there is no room");
        // Room becomes available.
        sink.file = tempfile::tempfile().unwrap();
        for _ in 0..3 {
            assert!(sink.append(&[1; 4 << 20]).is_err(), "the error is reported again");
        }
        assert_eq!(sink.file.metadata().unwrap().len(), 0);
        assert_eq!(sink.bytes(), 4096);
        assert!(sink.make_durable().is_err() && sink.pages().is_err());
    }

    #[test]
    fn a_failed_write_of_buffered_pages_is_reported() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut sink = Appender::new("/dev/full".into(), full);
        sink.make_room(8192);
        sink.append(&[1; 4096]).expect("there is room in memory");
        assert!(sink.pages().is_err() && sink.make_durable().is_err() && sink.pages().is_err());
    }

    #[test]
    fn a_failed_write_of_a_thread_is_reported() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut sink = Appender::new("/dev/full".into(), full);
        let piece = vec![1; 8 << 20];
        let failed = (0..100).find_map(|_| sink.append(&piece).err());
        let failed = failed.or_else(|| sink.pages().err()).expect("there is no room");
        assert!(failed.to_string().contains("/dev/full"), "{failed}");
        assert!(sink.pages().is_err(), "the error is reported again");
    }
}
