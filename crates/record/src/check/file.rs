//! Checks of files, with a name and without, and of their locks.

use super::{FILE_BYTES_MAX, Found, TEXT_MAX, ensure, memory, object};
use crate::{
    Bytes, Deleted, File, Lock, MemoryFile, PAGE_BYTES, Pages, ProcessFile, Records, Thing,
};

/// Whether a text is an absolute path.
pub(super) fn is_path(path: &str) -> bool {
    path.starts_with('/') && path.len() < TEXT_MAX && !path.contains('\0')
}

pub(super) fn file(file: &File, records: &Records) -> Found {
    ensure(is_path(&file.path), || "its path".into())?;
    file.locks.iter().try_for_each(lock)?;
    ensure(file.write_hint <= File::WRITE_HINT_MAX, || "its hint".into())?;
    if let Some(n) = file.namespace {
        let found = matches!(object(n, records)?, Thing::Mounts(_));
        ensure(found && file.deleted.is_none(), || "in no mount namespace".into())?;
    }
    let Some(n) = file.deleted else { return Ok(()) };
    let is_kind = |mode: u32| mode & libc::S_IFMT == file.file_type;
    let found = match object(n, records)? {
        Thing::Deleted(deleted) => is_kind(deleted.mode),
        Thing::MemoryFile(memory) => is_kind(memory.mode),
        _ => false,
    };
    ensure(found, || "of nothing deleted".into())
}

/// A number in the path would be one of a thread or a descriptor, which a restore makes later.
pub(super) fn of_process(file: &ProcessFile) -> Found {
    let is_sound = |part: &str| {
        let is_number = part.bytes().all(|byte| byte.is_ascii_digit());
        part != "." && part != ".." && !is_number
    };
    ensure(is_path(&file.whole_path()), || "its path".into())?;
    ensure(file.path.is_empty() || file.path.split('/').all(is_sound), || "its path".into())?;
    let kinds = [libc::S_IFREG, libc::S_IFDIR];
    let is_place = file.flags & libc::O_PATH as u32 != 0;
    ensure(kinds.contains(&file.file_type) && !is_place, || "its kind".into())
}

pub(super) fn deleted(deleted: &Deleted, all: &Pages) -> Found {
    ensure(is_path(&deleted.place), || "its place".into())?;
    let kind = deleted.mode & libc::S_IFMT;
    ensure([libc::S_IFREG, libc::S_IFDIR].contains(&kind), || "no file".into())?;
    // A checkpoint must not create a file that gives root's rights to a process that executes it.
    let gives = kind == libc::S_IFREG && deleted.mode & (libc::S_ISUID | libc::S_ISGID) != 0;
    ensure(!gives, || "its mode".into())?;
    let known = |name: &str| name.starts_with("user.") && name.len() < 256 && !name.contains('\0');
    let sound = |(name, value): &(String, Bytes)| known(name) && value.0.len() <= 64 << 10;
    ensure(deleted.attributes.iter().all(sound), || "its attributes".into())?;
    ensure(deleted.bytes <= FILE_BYTES_MAX, || "its length".into())?;
    let pages = deleted.bytes.next_multiple_of(PAGE_BYTES);
    memory::runs(&deleted.runs, 0, pages, all)
}

pub(super) fn in_memory(file: &MemoryFile, all: &Pages) -> Found {
    let name = &file.name;
    ensure(name.len() < 250 && !name.contains('\0'), || "its name".into())?;
    ensure(file.mode & libc::S_IFMT == libc::S_IFREG, || "its mode".into())?;
    ensure(file.mode & 0o7000 == 0 && file.seals <= 0x3f, || "its mode or seals".into())?;
    ensure(file.bytes <= FILE_BYTES_MAX, || "its length".into())?;
    if let Some(page_bytes) = file.huge_page_bytes {
        memory::huge_page(page_bytes)?;
        let whole = file.bytes.is_multiple_of(page_bytes) && file.bytes <= 1 << 46;
        ensure(whole, || "its length".into())?;
    }
    memory::runs(&file.runs, 0, file.bytes.next_multiple_of(PAGE_BYTES), all)
}

pub(super) fn lock(lock: &Lock) -> Found {
    let top = i64::MAX as u64;
    let sound = lock.start <= top && lock.end.is_none_or(|end| end >= lock.start && end <= top);
    ensure(sound, || "a lock".into())
}
