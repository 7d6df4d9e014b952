//! Swap files (swapon(8)): where memory goes that is pushed out.
//!
//! The kernel takes areas of one priority in turn, page by page and cluster by cluster, so that
//! those on several disks share the work (swapon(2)).

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;

use crate::call;

/// A page, of which the first is the head of the area.
const PAGE_BYTES: u64 = 4096;
/// Behind the room for a boot loader: version, last page, number of pages that are bad.
const HEAD_AT: u64 = 1024;
/// Mark of a swap area, at the end of its first page.
const MAGIC: &[u8; 10] = b"SWAPSPACE2";
const MAGIC_AT: u64 = PAGE_BYTES - MAGIC.len() as u64;
/// LIMIT: a smaller one is not worth it.
pub const BYTES_MIN: u64 = 1 << 20;

/// A swap area in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Area {
    /// A file or a device.
    pub path: PathBuf,
    /// Size in bytes.
    pub bytes: u64,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Areas with the highest number are used first.
    pub priority: i32,
}

/// All that is in use (`/proc/swaps`, proc(5)).
pub fn areas() -> io::Result<Vec<Area>> {
    let text = fs::read_to_string("/proc/swaps")?;
    Ok(text.lines().skip(1).filter_map(area).collect())
}

/// Reads `FILE TYPE SIZE USED PRIORITY`, sizes in kB, spaces in names as `\040`.
fn area(line: &str) -> Option<Area> {
    let mut words = line.split_ascii_whitespace();
    let (path, _kind) = (words.next()?, words.next()?);
    let mut kb = || words.next()?.parse::<u64>().ok()?.checked_mul(1024);
    let (bytes, used_bytes) = (kb()?, kb()?);
    let priority = words.next()?.parse().ok()?;
    let path = std::ffi::OsString::from_vec(unescaped(path)).into();
    Some(Area { path, bytes, used_bytes, priority })
}

/// `\040` and its like become the bytes that they stand for.
fn unescaped(name: &str) -> Vec<u8> {
    let mut parts = name.split('\\');
    let mut all = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let (digits, rest) = part.split_at_checked(3).unwrap_or_default();
        match u8::from_str_radix(digits, 8) {
            Ok(byte) => {
                all.push(byte);
                all.extend_from_slice(rest.as_bytes());
            }
            Err(_) => all.extend([b"\\", part.as_bytes()].concat()),
        }
    }
    all
}

/// Opens an area, by a path without links: the checked file is the one that is [swapped to](begin),
/// even if the name is given to another file meanwhile.
pub fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)
}

/// Returns whether a file has the mark of a swap area.
pub fn is_area(file: &File) -> io::Result<bool> {
    let mut magic = [0; MAGIC.len()];
    match file.read_exact_at(&mut magic, MAGIC_AT) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        read => read.map(|()| magic == *MAGIC),
    }
}

/// Creates a new swap file, without holes, of mode 0600. The file appears whole, or not at all.
pub fn make(path: &Path, bytes: u64) -> io::Result<()> {
    let mut name = std::ffi::OsString::from(".new-");
    name.push(path.file_name().unwrap_or_default());
    let partial = path.with_file_name(name);
    let made = fill(&partial, bytes).and_then(|()| fs::hard_link(&partial, path));
    let removed = fs::remove_file(&partial);
    made.and(removed)
}

fn fill(path: &Path, bytes: u64) -> io::Result<()> {
    // A file left by a killed process is created anew. A user with write access to the directory
    // may have made a link of that name.
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)?;
    let last_page = u32::try_from(bytes / PAGE_BYTES - 1).map_err(io::Error::other)?;
    let head = [1, last_page, 0].map(u32::to_ne_bytes).concat();
    file.write_all_at(&head, HEAD_AT)?;
    file.write_all_at(MAGIC, MAGIC_AT)?;
    file.sync_all()
}

/// Enables swapping to a file, with a priority from 0 to 32767. EINVAL if its file system does not
/// support that (tmpfs, overlayfs), or if it has holes; EBUSY if it is in use already.
///
/// swapon(2) wants a name: that of the descriptor leads to the file itself (proc_pid_fd(5)), and
/// the kernel shows the file's own in `/proc/swaps`.
pub fn begin(file: &File, priority: u16) -> io::Result<()> {
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(call::swap_on(&std::ffi::CString::new(name)?, priority)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_are_read_with_spaces_in_their_names() {
        let line = r"/var/my\040swap  file  1048572  12  -2";
        let area = area(line).expect("it is one");
        assert_eq!(area.path, Path::new("/var/my swap"));
        assert_eq!((area.bytes, area.used_bytes, area.priority), (1_048_572 << 10, 12 << 10, -2));
        assert_eq!(super::area("Filename Type Size Used Priority"), None);
    }

    #[test]
    fn swap_file_creation_does_not_follow_links() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        fs::write(&victim, "kept").unwrap();
        std::os::unix::fs::symlink(&victim, dir.path().join(".new-swap")).unwrap();
        make(&dir.path().join("swap"), BYTES_MIN).unwrap();
        assert_eq!(fs::read_to_string(victim).unwrap(), "kept");
    }

    #[test]
    fn created_file_is_a_swap_area_and_others_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("swap");
        make(&path, BYTES_MIN).unwrap();
        assert!(is_area(&open(&path).unwrap()).unwrap());
        let meta = fs::metadata(&path).unwrap();
        assert_eq!(meta.len(), BYTES_MIN);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
        let again = make(&path, BYTES_MIN).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists, "nothing is lost");
        for other in ["", "a text"] {
            let path = dir.path().join("other");
            fs::write(&path, other).unwrap();
            assert!(!is_area(&open(&path).unwrap()).unwrap());
        }
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert_eq!(open(&link).unwrap_err().raw_os_error(), Some(libc::ELOOP));
    }
}
