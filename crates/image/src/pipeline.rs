//! The import of a layer, as a pipeline of threads.
//!
//! ```text
//! caller's thread     read, hash the stream as it comes
//!   -> decode         gzip, zstd, or nothing
//!      -> hash        SHA-256 of the tar: the diffID
//!      -> parse       entries; small files go to the workers, large ones are written here
//!         -> write    BLAKE3, then a file unless the object is there
//! ```
//!
//! A gzip stream can only be decompressed by one thread, which bounds the speed; all other stages
//! run in parallel. Channels are bounded, so a slow disk slows the network and memory stays below
//! about 50 MiB per layer.
//!
//! When a stage fails, its channel closes, the stages before it stop, and the stages after it see
//! an early end. The returned error is that of the first stage in the order above that failed by
//! itself. In every case a layer becomes visible only after both digests were compared.

use std::fs;
use std::io::{self, BufRead, Read};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;

use sha2::Digest as _;

use crate::archive::{Entry, Kind, MAX_ENTRIES, Piece, Reader, Source};
use crate::arrival::{Expect, Ingested};
use crate::bound::{Budget, check_expansion};
use crate::digest::{Digest, ObjectId};
use crate::error::{At, Fault, ImageError, Result};
use crate::layer::{Content, Recorder};
use crate::object::{INLINE_MAX, Objects};
use crate::progress::Progress;
use crate::store::{Store, sync_dir};

/// Bytes handed from stage to stage at once.
const CHUNK: usize = 256 << 10;
/// Chunks that wait between two stages.
const WAITING: usize = 8;
/// Larger files are written by the parser as they come.
const SMALL: u64 = 512 << 10;
/// Small files that wait for a writer.
const FILES_WAITING: usize = 32;

type Chunk = Arc<Vec<u8>>;

/// The results of the parser.
struct Parsed {
    entries: Vec<Entry<Content>>,
    recorder: Recorder,
    tar_bytes: u64,
}

pub(crate) fn run(
    store: &Store,
    reader: &mut dyn Read,
    expect: Expect,
    progress: &dyn Progress,
) -> Result<Ingested> {
    let objects = Objects::new(store)?;
    if let Some(bytes) = expect.blob_bytes {
        objects.room_for(bytes)?;
    }
    let (to_decoder, from_reader) = sync_channel::<Chunk>(WAITING);
    let (to_parser, from_decoder) = sync_channel::<Chunk>(WAITING);
    let (to_hasher, to_hash) = sync_channel::<Chunk>(WAITING);
    let (read, decoded, hashed, parsed) = thread::scope(|scope| {
        let decoder = scope.spawn(move || decode(from_reader, &to_parser, &to_hasher));
        let hasher = scope.spawn(move || {
            let mut hasher = sha2::Sha256::new();
            to_hash.iter().for_each(|chunk: Chunk| hasher.update(&chunk[..]));
            Digest::from_bytes(hasher.finalize().into())
        });
        let parser = scope.spawn(|| parse(&objects, from_decoder));
        let read = read_all(reader, &to_decoder, expect, progress);
        drop(to_decoder);
        (read, join(decoder), join(hasher), join(parser))
    });
    let (blob, blob_bytes) = read?;
    let found = |what: &str, expected: Option<Digest>, found: Digest| match expected {
        Some(expected) if expected != found => Err(ImageError::from(Fault::Digest {
            what: what.to_owned(),
            expected: expected.to_string(),
            found: found.to_string(),
        })),
        _ => Ok(()),
    };
    decoded??;
    let parsed = parsed??;
    found("the layer as it was received", expect.blob, blob)?;
    let diff_id = hashed?;
    found("the uncompressed layer", expect.diff_id, diff_id)?;
    let Parsed { entries, recorder, tar_bytes } = parsed;
    if tar_bytes == 0 {
        // An empty tar has two empty blocks; an empty file is the result of a full disk or a cut
        // download.
        let problem = "it is empty".to_owned();
        return Err(Fault::Archive { what: "the archive".to_owned(), problem }.into());
    }
    // A layer is kept only if its entries make a tree.
    crate::tree::check_layer(&entries)?;
    let file = recorder.finish(tar_bytes, &entries)?;
    publish(store, &diff_id, &file)?;
    Ok(Ingested { blob, blob_bytes, diff_id, tar_bytes, new_bytes: objects.new_bytes() })
}

/// Syncs objects and layer file, and names the layer.
fn publish(store: &Store, diff_id: &Digest, file: &[u8]) -> Result<()> {
    let path = store.layer_path(diff_id);
    let tmp = store.tmp_path();
    let write = || -> io::Result<()> {
        fs::write(&tmp, file)?;
        // ORDER: the objects and this file are synced before the name is.
        rustix::fs::syncfs(fs::File::open(&tmp)?)?;
        fs::rename(&tmp, &path)?;
        sync_dir(&store.dir.join("layers"))
    };
    write().inspect_err(|_| drop(fs::remove_file(&tmp))).at("write the layer", &path)
}

/// The result of a stage; a panic in it is an error like others.
fn join<T>(stage: thread::ScopedJoinHandle<'_, T>) -> Result<T> {
    stage.join().map_err(|_| {
        let what = "a bug: a thread that unpacked the layer panicked".to_owned();
        Fault::Invalid { what }.into()
    })
}

/// Reads the stream to its end; its digest and its length.
fn read_all(
    reader: &mut dyn Read,
    to_decoder: &SyncSender<Chunk>,
    expect: Expect,
    progress: &dyn Progress,
) -> Result<(Digest, u64)> {
    let name = match expect.blob.or(expect.diff_id) {
        Some(digest) => format!("layer {}", &digest.hex()[..12]),
        None => "layer".to_owned(),
    };
    let task = progress.start(&name, expect.blob_bytes);
    let mut hasher = sha2::Sha256::new();
    let mut total = 0;
    let result = loop {
        let mut chunk = vec![0; CHUNK];
        let n = match fill(reader, &mut chunk) {
            Ok(0) => break Ok(()),
            Ok(n) => n,
            Err(source) => {
                break Err(Fault::Io { step: "read the layer", path: "stream".into(), source });
            }
        };
        chunk.truncate(n);
        total += n as u64;
        if let Some(limit) = expect.blob_bytes.filter(|limit| total > *limit) {
            break Err(Fault::Limit { what: "the size of the layer".to_owned(), limit });
        }
        hasher.update(&chunk);
        progress.advance(task, n as u64);
        if to_decoder.send(Arc::new(chunk)).is_err() {
            // A later stage failed, and returns the cause.
            break Ok(());
        }
    };
    progress.finish(task);
    result?;
    Ok((Digest::from_bytes(hasher.finalize().into()), total))
}

/// Reads until the buffer is full or the stream ends.
fn fill(reader: &mut dyn Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut n = 0;
    while n < buffer.len() {
        match reader.read(&mut buffer[n..]) {
            Ok(0) => break,
            Ok(more) => n += more,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(n)
}

/// The compression of a stream, recognised by its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    None,
    Gzip,
    Zstd,
}

impl Packing {
    pub(crate) fn of(head: &[u8]) -> Result<Self> {
        let other = |what: &str| {
            let what = format!("the archive is compressed by {what}: only gzip and zstd are read");
            Err(Fault::Invalid { what }.into())
        };
        match head {
            [0x1f, 0x8b, ..] => Ok(Self::Gzip),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Ok(Self::Zstd),
            // A skippable frame, as zstd:chunked has them.
            [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Ok(Self::Zstd),
            [0xfd, b'7', b'z', b'X', b'Z', ..] => other("xz"),
            [b'B', b'Z', b'h', ..] => other("bzip2"),
            _ => Ok(Self::None),
        }
    }

    /// Returns the decompressed stream.
    pub(crate) fn decoder<'r>(self, stream: impl BufRead + 'r) -> io::Result<Box<dyn Read + 'r>> {
        Ok(match self {
            Self::None => Box::new(stream),
            Self::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(stream)),
            Self::Zstd => Box::new(zstd::stream::read::Decoder::with_buffer(stream)?),
        })
    }
}

fn decode(
    from_reader: Receiver<Chunk>,
    to_parser: &SyncSender<Chunk>,
    to_hasher: &SyncSender<Chunk>,
) -> Result<()> {
    let mut stream = ChunkReader::new(from_reader);
    let packing = Packing::of(stream.fill_buf().unwrap_or_default())?;
    let give =
        |chunk: Chunk| to_hasher.send(chunk.clone()).is_ok() && to_parser.send(chunk).is_ok();
    if packing == Packing::None {
        while let Some(chunk) = stream.chunk() {
            if !give(chunk) {
                break;
            }
        }
        return Ok(());
    }
    let bad = |source| -> ImageError {
        Fault::Io { step: "decompress the layer", path: "stream".into(), source }.into()
    };
    let packed = stream.taken();
    let mut decoder = packing.decoder(stream).map_err(bad)?;
    let mut unpacked = 0;
    loop {
        let mut chunk = vec![0; CHUNK];
        let n = fill(&mut decoder, &mut chunk).map_err(bad)?;
        if n == 0 {
            return Ok(());
        }
        chunk.truncate(n);
        unpacked += n as u64;
        check_expansion(packed.load(Ordering::Relaxed), unpacked)?;
        if !give(Arc::new(chunk)) {
            return Ok(());
        }
    }
}

/// Chunks of a channel as a stream.
struct ChunkReader {
    from: Receiver<Chunk>,
    chunk: Chunk,
    at: usize,
    taken: Arc<AtomicU64>,
}

impl ChunkReader {
    fn new(from: Receiver<Chunk>) -> Self {
        Self { from, chunk: Chunk::default(), at: 0, taken: Arc::default() }
    }

    /// A counter of the bytes that were taken from the channel.
    fn taken(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.taken)
    }

    /// The rest of the current chunk, or the next.
    fn chunk(&mut self) -> Option<Chunk> {
        if self.at == 0 && !self.chunk.is_empty() {
            return Some(std::mem::take(&mut self.chunk));
        }
        self.from.recv().ok()
    }
}

impl Read for ChunkReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.fill_buf()?.read(buffer)?;
        self.consume(n);
        Ok(n)
    }
}

impl BufRead for ChunkReader {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.at == self.chunk.len()
            && let Ok(chunk) = self.from.recv()
        {
            self.taken.fetch_add(chunk.len() as u64, Ordering::Relaxed);
            self.chunk = chunk;
            self.at = 0;
        }
        Ok(&self.chunk[self.at..])
    }

    fn consume(&mut self, n: usize) {
        self.at += n;
    }
}

/// The tar as the parser sees it: data of files, and bytes to remember.
struct Stream {
    chunks: ChunkReader,
    recorder: Recorder,
    total: u64,
}

impl Source for Stream {
    fn data(&mut self, limit: usize) -> Result<&[u8]> {
        self.chunks.fill_buf().at("read", "stream")?;
        let at = self.chunks.at;
        let n = limit.min(self.chunks.chunk.len() - at);
        self.chunks.at += n;
        self.total += n as u64;
        Ok(&self.chunks.chunk[at..at + n])
    }

    fn raw(&mut self, buffer: &mut [u8]) -> Result<bool> {
        let n = fill(&mut self.chunks, buffer).at("read", "stream")?;
        if n == 0 && !buffer.is_empty() {
            return Ok(false);
        }
        if n < buffer.len() {
            return Err(truncated());
        }
        self.total += n as u64;
        self.recorder.raw(buffer)?;
        Ok(true)
    }
}

fn truncated() -> ImageError {
    let problem = "it ends in the middle of an entry".to_owned();
    Fault::Archive { what: "the archive".to_owned(), problem }.into()
}

/// A small file on its way to a writer: the index of its entry, and its content.
type Job = (usize, Vec<u8>);

fn parse(objects: &Objects<'_>, from_decoder: Receiver<Chunk>) -> Result<Parsed> {
    let (to_writers, jobs) = sync_channel::<Job>(FILES_WAITING);
    let failed = AtomicBool::new(false);
    let jobs = Mutex::new(jobs);
    let writers = thread::available_parallelism().map_or(2, |n| n.get().min(4));
    thread::scope(|scope| {
        let writers: Vec<_> =
            (0..writers).map(|_| scope.spawn(|| write_small(objects, &jobs, &failed))).collect();
        let result = read_entries(objects, from_decoder, &to_writers, &failed);
        drop(to_writers);
        let ids: Vec<Result<Vec<(usize, ObjectId)>>> =
            writers.into_iter().map(|w| join(w).and_then(|r| r)).collect();
        // A failed writer is the cause of a failed parser.
        let ids: Vec<(usize, ObjectId)> =
            ids.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
        let mut parsed = result?;
        for (index, id) in ids {
            if let Kind::File { content, .. } = &mut parsed.entries[index].kind {
                *content = Content::Object { id, map: None };
            }
        }
        Ok(parsed)
    })
}

fn write_small(
    objects: &Objects<'_>,
    jobs: &Mutex<Receiver<Job>>,
    failed: &AtomicBool,
) -> Result<Vec<(usize, ObjectId)>> {
    let mut ids = Vec::new();
    let next = || {
        // A writer that panicked while it held the lock left the receiver as it was.
        let jobs = jobs.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        jobs.recv()
    };
    let mut result = Ok(());
    while let Ok((index, data)) = next() {
        // After a failure the channel is emptied all the same: the parser must not hang.
        if result.is_ok() {
            match objects.put(&data) {
                Ok(id) => ids.push((index, id)),
                Err(e) => {
                    result = Err(e);
                    failed.store(true, Ordering::Relaxed);
                }
            }
        }
    }
    result.map(|()| ids)
}

fn read_entries(
    objects: &Objects<'_>,
    from_decoder: Receiver<Chunk>,
    to_writers: &SyncSender<Job>,
    failed: &AtomicBool,
) -> Result<Parsed> {
    let recorder = Recorder::new()?;
    let stream = Stream { chunks: ChunkReader::new(from_decoder), recorder, total: 0 };
    let mut reader = Reader::new(stream);
    let mut entries = Vec::new();
    let mut budget = Budget::of_entries();
    while let Some(entry) = reader.next()? {
        budget.take(&entry)?;
        let Entry { path, meta, kind } = entry;
        if failed.load(Ordering::Relaxed) {
            break;
        }
        let index = entries.len();
        if index >= MAX_ENTRIES {
            let what = "the number of entries in the layer".to_owned();
            return Err(Fault::Limit { what, limit: MAX_ENTRIES as u64 }.into());
        }
        let kind = match kind {
            Kind::File { size, content: data } => {
                let pieces = data.map.as_ref().map_or(0, Vec::len);
                budget.take_bytes((pieces * size_of::<Piece>()) as u64)?;
                if data.length > 0 {
                    reader.source.recorder.file(index);
                }
                let content = if data.map.is_none() && size <= INLINE_MAX {
                    Content::Inline(take(&mut reader.source, size)?)
                } else if data.map.is_none() && size <= SMALL {
                    let bytes = take(&mut reader.source, size)?;
                    // Fails only if all writers have panicked, which joining them reports.
                    let _ = to_writers.send((index, bytes));
                    Content::Inline(Vec::new())
                } else {
                    objects.room_for(data.length).map_err(|e| name_entry(&path, e))?;
                    let mut object = match &data.map {
                        Some(map) => objects.begin_sparse(size, map)?,
                        None => objects.begin()?,
                    };
                    let mut left = data.length;
                    while left > 0 {
                        let bytes = reader.source.data(left.min(1 << 30) as usize)?;
                        if bytes.is_empty() {
                            return Err(truncated());
                        }
                        object.write(bytes)?;
                        left -= bytes.len() as u64;
                    }
                    Content::Object { id: object.finish()?, map: data.map }
                };
                Kind::File { size, content }
            }
            Kind::Directory => Kind::Directory,
            Kind::HardLink { target } => Kind::HardLink { target },
            Kind::Symlink { target } => Kind::Symlink { target },
            Kind::Char { major, minor } => Kind::Char { major, minor },
            Kind::Block { major, minor } => Kind::Block { major, minor },
            Kind::Fifo => Kind::Fifo,
        };
        entries.push(Entry { path, meta, kind });
    }
    let Stream { recorder, total, .. } = reader.source;
    Ok(Parsed { entries, recorder, tar_bytes: total })
}

fn name_entry(path: &[u8], cause: ImageError) -> ImageError {
    let kind = cause.kind();
    let name = String::from_utf8_lossy(path).chars().take(120).collect::<String>();
    ImageError::with_source(kind, format!("archive entry '{}'", name.escape_debug()), cause)
}

/// Reads the whole content of a small file.
fn take(stream: &mut Stream, size: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(size as usize);
    while (bytes.len() as u64) < size {
        let more = stream.data(size as usize - bytes.len())?;
        if more.is_empty() {
            return Err(truncated());
        }
        bytes.extend_from_slice(more);
    }
    Ok(bytes)
}
