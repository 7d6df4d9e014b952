//! File handles: the identity of a file or directory beyond its path and its descriptors.
//!
//! A handle has the inode and its generation. It stays the same when the file is renamed, is different for a copy, and
//! is refused (ESTALE) once the file is removed, also where a new file has the same inode number.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::fs::OFlags;

use crate::Errno;
use crate::call::check;

/// MAX_HANDLE_SZ: no handle is longer.
const BYTES_MAX: usize = 128;

/// `struct file_handle`: the length, a type, then so many bytes.
type Raw = [u32; 2 + BYTES_MAX / 4];

/// Returns the handle of a file: its type in four bytes, then the handle (name_to_handle_at(2), Linux 2.6.39).
/// The file may be open O_PATH. EOPNOTSUPP where the file system has no handles.
///
/// For shared memory it is an identity that is unique also among namespaces that use the same ids.
pub fn handle_of(file: BorrowedFd<'_>) -> Result<Vec<u8>, Errno> {
    let mut handle: Raw = [0; 2 + BYTES_MAX / 4];
    handle[0] = BYTES_MAX as u32;
    let mut mount = 0i32;
    // SAFETY: the path is empty. The kernel writes at most as many bytes as the head gives, which
    // the buffer has behind it, and one mount number; both outlive the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            file.as_raw_fd(),
            c"".as_ptr(),
            handle.as_mut_ptr(),
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    })?;
    let bytes: Vec<u8> = handle[1..].iter().flat_map(|word| word.to_ne_bytes()).collect();
    let length = 4 + (handle[0] as usize).min(BYTES_MAX);
    Ok(bytes[..length].to_vec())
}

/// Opens a file by its handle, as [`handle_of`] returns it, without any path (open_by_handle_at(2), Linux 2.6.39).
/// `mount` is an open file or directory of its file system, not O_PATH. Needs CAP_DAC_READ_SEARCH.
///
/// ESTALE if the file is removed. ESTALE also if the kernel cannot read its inode, because it reports
/// each error but ENOMEM so.
pub fn open_handle(mount: BorrowedFd<'_>, handle: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    let mut raw: Raw = [0; 2 + BYTES_MAX / 4];
    let length = handle.len().checked_sub(4).filter(|n| *n <= BYTES_MAX).ok_or(Errno::INVAL)?;
    raw[0] = length as u32;
    for (word, bytes) in raw[1..].iter_mut().zip(handle.chunks(4)) {
        let mut whole = [0; 4];
        whole[..bytes.len()].copy_from_slice(bytes);
        *word = u32::from_ne_bytes(whole);
    }
    let flags = (flags | OFlags::CLOEXEC).bits();
    // SAFETY: the kernel reads the head and as many bytes as it gives, at most BYTES_MAX, which the
    // buffer has behind it.
    let fd = check(unsafe {
        libc::syscall(libc::SYS_open_by_handle_at, mount.as_raw_fd(), raw.as_ptr(), flags)
    })?;
    // SAFETY: the call returned a new descriptor, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn root_handle_follows_a_rename_and_is_stale_after_removal() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) = (dir.path().join("old"), dir.path().join("new"));
        fs::create_dir(&old).unwrap();
        let handle = match handle_of(File::open(&old).unwrap().as_fd()) {
            Err(Errno::OPNOTSUPP) => {
                return eprintln!("not run: no handles in {}", dir.path().display());
            }
            handle => handle.unwrap(),
        };
        let mount = File::open(dir.path()).unwrap();
        let open = || open_handle(mount.as_fd(), &handle, OFlags::PATH).map(File::from);
        fs::rename(&old, &new).unwrap();
        let inode = fs::metadata(&new).unwrap().ino();
        assert_eq!(open().unwrap().metadata().unwrap().ino(), inode);
        fs::remove_dir(&new).unwrap();
        assert_eq!(open().unwrap_err(), Errno::STALE);
        assert_eq!(open_handle(mount.as_fd(), &[0; 3], OFlags::PATH).unwrap_err(), Errno::INVAL);
        assert_eq!(open_handle(mount.as_fd(), &[0; 133], OFlags::PATH).unwrap_err(), Errno::INVAL);
    }
}
