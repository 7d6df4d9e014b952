//! Objects: contents of files, each kept once, named by its hash, never modified.
//!
//! A plain file's object is named by the BLAKE3 hash of its bytes. A sparse file's object is sparse
//! too, and named by a hash over its size, its map and its data, in a key space of its own: a hole
//! of terabytes is neither read nor written. The same bytes with and without holes are two objects.
//!
//! A run of zeros in a plain file becomes a hole on disk, which changes neither its bytes nor its name.
//!
//! An object is written in `tmp/` and renamed to its name. One that is there already is left alone
//! if it is as long as it must be: its inode may be in use by containers, and sharing its pages
//! depends on its staying the same inode.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::archive::Piece;
use crate::digest::ObjectId;
use crate::error::{At, Fault, Result};
use crate::store::Store;

/// Files of this size and less are kept in the metadata, as composefs does: an object would cost
/// an inode and a block.
pub(crate) const INLINE_MAX: u64 = 64;

/// Runs of zeros become holes in aligned blocks of this size. Smaller ones would cut a file of the disk into
/// more extents than the saved room is worth.
const HOLE: u64 = 64 << 10;

/// Separates the names of sparse objects from all others.
const SPARSE_CONTEXT: &str = "dormouse image store 2026-11-21 sparse object v1";

/// Writes objects into a store; from several threads.
#[derive(Debug)]
pub(crate) struct Objects<'s> {
    store: &'s Store,
    objects: OwnedFd,
    space: Space,
    new_bytes: AtomicU64,
}

impl<'s> Objects<'s> {
    pub(crate) fn new(store: &'s Store) -> Result<Self> {
        let path = store.dir.join("objects");
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let objects = rustix::fs::open(&path, flags, Mode::empty()).at("open", &path)?;
        let space = Space::new(store)?;
        Ok(Self { store, objects, space, new_bytes: AtomicU64::new(0) })
    }

    /// Bytes of objects that were not there before.
    pub(crate) fn new_bytes(&self) -> u64 {
        self.new_bytes.load(Ordering::Relaxed)
    }

    /// Fails where so many bytes more would not leave the reserve.
    pub(crate) fn room_for(&self, bytes: u64) -> Result<()> {
        self.space.check(bytes)
    }

    /// Stores a content that is in memory.
    pub(crate) fn put(&self, data: &[u8]) -> Result<ObjectId> {
        let id = ObjectId(blake3::hash(data).into());
        if self.has(&id, data.len() as u64) {
            return Ok(id);
        }
        let (file, tmp) = self.create()?;
        let written = self
            .write_around_zeros(&file, &tmp, 0, data)
            .and_then(|_| file.set_len(data.len() as u64).at("set the size of", &tmp.0));
        drop(file);
        written?;
        self.place(tmp, &id, data.len() as u64)?;
        Ok(id)
    }

    /// Begins a content that comes in pieces.
    pub(crate) fn begin(&self) -> Result<ObjectWriter<'_>> {
        let (file, tmp) = self.create()?;
        let hasher = blake3::Hasher::new();
        Ok(ObjectWriter { objects: self, file, tmp, hasher, length: 0, sparse: None })
    }

    /// Begins a sparse content of `size` bytes; the data follows in pieces.
    pub(crate) fn begin_sparse(&self, size: u64, map: &[Piece]) -> Result<ObjectWriter<'_>> {
        let (file, tmp) = self.create()?;
        file.set_len(size).at("make a sparse file of the size given in the archive", &tmp.0)?;
        let hasher = sparse_hasher(size, map);
        let sparse = Some(Sparse { size, map: map.to_vec(), piece: 0, done: 0 });
        Ok(ObjectWriter { objects: self, file, tmp, hasher, length: 0, sparse })
    }

    /// Writes data of a plain file at an offset, without runs of zeros.
    fn write_around_zeros(&self, file: &File, tmp: &Temporary, at: u64, data: &[u8]) -> Result<()> {
        let (mut from, mut end) = (0, 0);
        while end < data.len() {
            let in_block = HOLE - (at + end as u64) % HOLE;
            let next = data.len().min(end + in_block as usize);
            if is_zero(&data[end..next]) {
                self.write_at(file, tmp, at + from as u64, &data[from..end])?;
                from = next;
            }
            end = next;
        }
        self.write_at(file, tmp, at + from as u64, &data[from..end])
    }

    fn write_at(&self, file: &File, tmp: &Temporary, at: u64, data: &[u8]) -> Result<()> {
        self.space.take(data.len() as u64)?;
        file.write_all_at(data, at).at("write", &tmp.0)
    }

    fn has(&self, id: &ObjectId, size: u64) -> bool {
        rustix::fs::statat(&self.objects, id.path(), AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|stat| stat.st_size as u64 == size)
    }

    fn create(&self) -> Result<(File, Temporary)> {
        // An inode counts as well, so that files of holes lead to the check of free inodes.
        self.space.take(512)?;
        let tmp = Temporary(self.store.tmp_path());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o444);
        let file = rustix::fs::open(&tmp.0, flags, mode).at("create", &tmp.0)?;
        Ok((file.into(), tmp))
    }

    /// Renames a written file to its name, unless the object exists.
    fn place(&self, tmp: Temporary, id: &ObjectId, size: u64) -> Result<()> {
        let name = id.path();
        let rename =
            |flags| rustix::fs::renameat_with(rustix::fs::CWD, &tmp.0, &self.objects, &name, flags);
        let mut result = rename(RenameFlags::NOREPLACE);
        if result == Err(Errno::NOENT) {
            match rustix::fs::mkdirat(&self.objects, &name[..2], Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(e) => return Err(e).at("make the directory", &name[..2]),
            }
            result = rename(RenameFlags::NOREPLACE);
        }
        if result == Err(Errno::EXIST) {
            if self.has(id, size) {
                return Ok(());
            }
            // Cut off by a crash of the machine before it was brought to the disk.
            result = rename(RenameFlags::empty());
        }
        result.at("name an object", &name)?;
        self.new_bytes.fetch_add(size, Ordering::Relaxed);
        Ok(())
    }
}

/// A file in `tmp/` that goes away with this, unless it was renamed.
#[derive(Debug)]
struct Temporary(std::path::PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        // Renamed or not: no other process uses the name.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A content that comes in pieces.
#[derive(Debug)]
pub(crate) struct ObjectWriter<'o> {
    objects: &'o Objects<'o>,
    file: File,
    tmp: Temporary,
    hasher: blake3::Hasher,
    length: u64,
    sparse: Option<Sparse>,
}

/// Position of the next data of a sparse file.
#[derive(Debug)]
struct Sparse {
    size: u64,
    map: Vec<Piece>,
    piece: usize,
    done: u64,
}

impl ObjectWriter<'_> {
    /// Adds data.
    pub(crate) fn write(&mut self, mut data: &[u8]) -> Result<()> {
        let at = self.length;
        self.hasher.update(data);
        self.length += data.len() as u64;
        let Some(sparse) = &mut self.sparse else {
            return self.objects.write_around_zeros(&self.file, &self.tmp, at, data);
        };
        self.objects.space.take(data.len() as u64)?;
        while !data.is_empty() {
            let Some(piece) = sparse.map.get(sparse.piece) else {
                let what = "a sparse file has more data than its map".to_owned();
                return Err(Fault::Invalid { what }.into());
            };
            let n = (piece.length - sparse.done).min(data.len() as u64);
            let (now, later) = data.split_at(n as usize);
            self.file.write_all_at(now, piece.offset + sparse.done).at("write", &self.tmp.0)?;
            data = later;
            sparse.done += n;
            if sparse.done == piece.length {
                sparse.piece += 1;
                sparse.done = 0;
            }
        }
        Ok(())
    }

    /// Names the object.
    pub(crate) fn finish(self) -> Result<ObjectId> {
        let id = ObjectId(self.hasher.finalize().into());
        let size = self.sparse.as_ref().map_or(self.length, |s| s.size);
        if self.sparse.is_none() {
            // The file may end in a hole.
            self.file.set_len(size).at("set the size of", &self.tmp.0)?;
        }
        drop(self.file);
        if !self.objects.has(&id, size) {
            self.objects.place(self.tmp, &id, size)?;
        }
        Ok(id)
    }
}

/// Whether all bytes are zero. Blocks of 64 bytes let the compiler use vector instructions.
fn is_zero(data: &[u8]) -> bool {
    data.chunks(64).all(|block| block.iter().fold(0, |any, byte| any | byte) == 0)
}

fn sparse_hasher(size: u64, map: &[Piece]) -> blake3::Hasher {
    let mut hasher = blake3::Hasher::new_derive_key(SPARSE_CONTEXT);
    hasher.update(&size.to_le_bytes());
    hasher.update(&(map.len() as u64).to_le_bytes());
    for piece in map {
        hasher.update(&piece.offset.to_le_bytes());
        hasher.update(&piece.length.to_le_bytes());
    }
    hasher
}

/// Computes the name that the file at `path` should have; `map` lists the data of a sparse one.
pub(crate) fn name_of(path: &Path, map: Option<&[Piece]>) -> Result<ObjectId> {
    let file = File::open(path).at("open", path)?;
    let size = file.metadata().at("stat", path)?.len();
    let whole = [Piece { offset: 0, length: size }];
    let (mut hasher, pieces) = match map {
        None => (blake3::Hasher::new(), &whole[..]),
        Some(map) => (sparse_hasher(size, map), map),
    };
    let mut buffer = vec![0; 256 << 10];
    for piece in pieces {
        let mut at = piece.offset;
        while at < piece.offset + piece.length {
            let n = (piece.offset + piece.length - at).min(buffer.len() as u64) as usize;
            file.read_exact_at(&mut buffer[..n], at).at("read", path)?;
            hasher.update(&buffer[..n]);
            at += n as u64;
        }
    }
    Ok(ObjectId(hasher.finalize().into()))
}

/// Keeps an import from filling the disk. LIMIT: the import is refused while a reserve is still
/// free, so that containers can continue to write and `prune` can work.
#[derive(Debug)]
pub(crate) struct Space {
    dir: OwnedFd,
    path: std::path::PathBuf,
    /// Bytes written since the last query of free space.
    unasked: AtomicU64,
    /// Bytes after which it is queried again.
    step: AtomicU64,
}

impl Space {
    /// Most bytes after which free space is queried again.
    const STEP: u64 = 8 << 20;
    /// On a disk that is nearly full, that part of the free space. The other parts are for writes of other
    /// threads meanwhile, and for the rounding of sizes to blocks.
    const PART: u64 = 8;

    fn new(store: &Store) -> Result<Self> {
        let path = store.dir.clone();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(&path, flags, Mode::empty()).at("open", &path)?;
        let space = Self { dir, path, unasked: AtomicU64::new(0), step: AtomicU64::new(0) };
        space.check(0)?;
        Ok(space)
    }

    fn take(&self, bytes: u64) -> Result<()> {
        let unasked = self.unasked.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if unasked >= self.step.load(Ordering::Relaxed) {
            self.unasked.store(0, Ordering::Relaxed);
            return self.check(bytes);
        }
        Ok(())
    }

    fn check(&self, need: u64) -> Result<()> {
        let stat =
            rustix::fs::fstatvfs(self.dir.as_fd()).at("read the free space in", &self.path)?;
        let free = stat.f_bavail * stat.f_frsize;
        // One part in fifty, at most 512 MiB.
        let reserve = (stat.f_blocks * stat.f_frsize / 50).min(512 << 20);
        if free < reserve || free - reserve < need {
            return Err(Fault::Full { path: self.path.clone(), need, free, reserve }.into());
        }
        let step = ((free - reserve - need) / Self::PART).min(Self::STEP);
        self.step.store(step, Ordering::Relaxed);
        // Some file systems create inodes on demand and report 0 of 0.
        if stat.f_files > 0 && stat.f_favail < stat.f_files / 100 {
            return Err(Fault::Limit {
                what: format!("one more file in '{}'", self.path.display()),
                limit: stat.f_files - stat.f_files / 100,
            }
            .into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::Metadata;

    #[test]
    fn runs_of_zeros_become_holes_and_bytes_stay() {
        let dir = tempfile::tempdir().unwrap();
        let at = |sub: &str| dir.path().join(sub);
        let store = Store::open_with(&at("images"), &at("run"), Metadata::Stub).unwrap();
        let objects = Objects::new(&store).unwrap();
        // Zeros, data that begin and end inside a block, zeros, one byte, zeros to the end.
        let mut data = vec![0; 8 << 20];
        data[3_000_001..3_100_000].fill(7);
        data[5_000_000] = 1;
        let name = ObjectId(blake3::hash(&data).into());
        let mut writer = objects.begin().unwrap();
        for piece in data.chunks(200_003) {
            writer.write(piece).unwrap();
        }
        assert_eq!(writer.finish().unwrap(), name);
        let path = at("images").join("objects").join(name.path());
        let written = |path: &Path| std::fs::metadata(path).unwrap().blocks() * 512;
        assert_eq!(std::fs::read(&path).unwrap(), data);
        assert!(written(&path) <= 6 * HOLE, "{}", written(&path));

        let small = vec![0; 300 << 10];
        let name = objects.put(&small).unwrap();
        let path = at("images").join("objects").join(name.path());
        assert_eq!(std::fs::read(&path).unwrap(), small);
        assert_eq!(written(&path), 0);
    }
}
