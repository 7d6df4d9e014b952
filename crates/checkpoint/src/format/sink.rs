//! The file `pages` while it is written: appended to, with a checksum of every chunk.
//!
//! Large contents are hashed and written by a thread of their own, so that whoever copies them out of a
//! process that stands still waits for neither. A thread costs more than a few megabytes take.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;

use dormouse_kernel::call;

use super::{CHUNK_BYTES, PAGE_BYTES, Pages};
use crate::error::{Error, Result};

/// From so many bytes on a thread is worth it.
const LARGE_BYTES: u64 = 4 << 20;
/// So many bytes at a time are given to the disk, which is then done with most when all is written.
const TO_DISK_BYTES: u64 = 8 << 20;
/// LIMIT: appended pieces that wait for the thread.
const WAITING: usize = 4;

/// Appends pages to a file.
#[derive(Debug)]
pub(super) struct Sink {
    path: PathBuf,
    bytes: u64,
    way: Option<Way>,
}

#[derive(Debug)]
enum Way {
    Here(Box<Hashed>),
    There(Worker),
}

/// The file, and the checksums so far.
#[derive(Debug)]
struct Hashed {
    path: PathBuf,
    file: File,
    bytes: u64,
    chunk: blake3::Hasher,
    chunks: Vec<String>,
}

#[derive(Debug)]
struct Worker {
    full: SyncSender<Vec<u8>>,
    /// Buffers that were written, to be used again.
    free: Receiver<Vec<u8>>,
    done: JoinHandle<Result<Box<Hashed>>>,
}

impl Sink {
    pub(super) fn new(path: PathBuf, file: File) -> Self {
        let (chunk, chunks) = (blake3::Hasher::new(), Vec::new());
        let here = Hashed { path: path.clone(), file, bytes: 0, chunk, chunks };
        Self { path, bytes: 0, way: Some(Way::Here(Box::new(here))) }
    }

    /// How many bytes were appended.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Appends whole pages.
    pub(super) fn append(&mut self, pages: &[u8]) -> Result<()> {
        debug_assert!((pages.len() as u64).is_multiple_of(PAGE_BYTES));
        if pages.is_empty() {
            return Ok(());
        }
        self.bytes += pages.len() as u64;
        if let Some(Way::Here(_)) = &self.way
            && self.bytes > LARGE_BYTES
        {
            self.way = match self.way.take() {
                Some(Way::Here(hashed)) => Some(Way::There(Worker::begin(hashed))),
                other => other,
            };
        }
        let appended = match &mut self.way {
            Some(Way::Here(hashed)) => return hashed.append(pages),
            Some(Way::There(worker)) => worker.append(pages),
            None => false,
        };
        // It ends before it is told to when it cannot write, and says why.
        if appended { Ok(()) } else { self.settle().map(drop) }
    }

    /// All that was appended is in the file.
    fn settle(&mut self) -> Result<&mut Hashed> {
        self.way = match self.way.take() {
            Some(Way::There(Worker { full, done, .. })) => {
                drop(full);
                let hashed = done.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                Some(Way::Here(hashed?))
            }
            other => other,
        };
        match &mut self.way {
            Some(Way::Here(hashed)) => Ok(hashed),
            // It has failed before, which was told.
            _ => Err(Error::file("cannot write", &self.path)(std::io::ErrorKind::Other.into())),
        }
    }

    /// Checksums of all that was appended.
    pub(super) fn pages(&mut self) -> Result<Pages> {
        let hashed = self.settle()?;
        if !hashed.bytes.is_multiple_of(CHUNK_BYTES) {
            hashed.end_chunk();
        }
        let chunks = std::mem::take(&mut hashed.chunks);
        Ok(Pages { bytes: hashed.bytes, chunks, parts: Vec::new() })
    }

    /// It is on the disk.
    pub(super) fn make_durable(&mut self) -> Result<()> {
        let hashed = self.settle()?;
        hashed.file.sync_all().map_err(Error::file("cannot write", &hashed.path))
    }
}

impl Worker {
    fn begin(mut hashed: Box<Hashed>) -> Self {
        let (full, pieces) = sync_channel::<Vec<u8>>(WAITING);
        let (give_back, free) = channel();
        let done = std::thread::spawn(move || {
            let mut given = 0;
            for piece in pieces {
                hashed.append(&piece)?;
                if hashed.bytes - given >= TO_DISK_BYTES {
                    // Where that cannot be done all is written in the end.
                    let _ = call::begin_to_write(hashed.file.as_fd(), given, hashed.bytes - given);
                    given = hashed.bytes;
                }
                let _ = give_back.send(piece); // nobody needs it when all is appended
            }
            Ok(hashed)
        });
        Self { full, free, done }
    }

    /// Whether the thread takes it.
    fn append(&self, pages: &[u8]) -> bool {
        let mut buffer = self.free.try_recv().unwrap_or_default();
        buffer.clear();
        buffer.extend_from_slice(pages);
        self.full.send(buffer).is_ok()
    }
}

impl Hashed {
    fn append(&mut self, pages: &[u8]) -> Result<()> {
        self.file.write_all(pages).map_err(Error::file("cannot write", &self.path))?;
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
        Ok(())
    }

    fn end_chunk(&mut self) {
        self.chunks.push(self.chunk.finalize().to_hex().to_string());
        self.chunk.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Contents of so many pages, appended by so many at a time.
    fn written(pages: usize, at_a_time: usize) -> (Vec<u8>, Pages) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pages");
        let mut sink = Sink::new(path.clone(), File::create(&path).unwrap());
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
    fn a_thread_writes_what_would_have_been_written_without_one() {
        for (pages, at_a_time) in [(0, 1), (3, 1), (1024, 1024), (2500, 700), (5000, 33)] {
            let (bytes, told) = written(pages, at_a_time);
            let expected: Vec<u8> = (0..pages * 4096).map(|n| (n / 7) as u8).collect();
            assert!(bytes == expected, "{pages} by {at_a_time}");
            let chunks = expected.chunks(CHUNK_BYTES as usize);
            let hashes = chunks.map(|c| blake3::hash(c).to_hex().to_string());
            assert_eq!(told.chunks, hashes.collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_thread_that_cannot_write_says_so() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut sink = Sink::new("/dev/full".into(), full);
        let piece = vec![1; 8 << 20];
        let failed = (0..100).find_map(|_| sink.append(&piece).err());
        let failed = failed.or_else(|| sink.pages().err()).expect("there is no room");
        assert!(failed.to_string().contains("/dev/full"), "{failed}");
        assert!(sink.pages().is_err(), "and again");
    }
}
