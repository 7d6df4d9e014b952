//! Paths from outside, resolved so that they can't lead out (openat2(2)). KERNEL(5.6).
//!
//! A process with write access to a tree may replace any of its directories by a link at any time.
//! Therefore the kernel resolves a path in one step, as if the tree's top were "/". The result is a
//! descriptor, and the path is not used again.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags};

use crate::Errno;
use crate::error::{CallError, Explain, Result};

/// LIMIT: how often a resolution is tried again when something was renamed meanwhile (EAGAIN).
const ATTEMPTS: usize = 64;

/// Opens `path` as if `root` were "/": absolute links and ".." stay inside, links of /proc to open
/// files and the like are refused (ELOOP). `flags` get CLOEXEC; `mode` is that of a file they
/// create, and otherwise empty.
///
/// EAGAIN when others kept renaming for too long.
pub fn in_root(
    root: BorrowedFd<'_>,
    path: impl AsRef<Path>,
    flags: OFlags,
    mode: Mode,
) -> Result<OwnedFd> {
    let path = path.as_ref();
    let describe = || format!("{}, {path:?}, {flags:?}, RESOLVE_IN_ROOT", root.as_raw_fd());
    let Ok(name) = CString::new(path.as_os_str().as_bytes()) else {
        return Err(CallError::new("openat2", describe(), libc::EINVAL));
    };
    raw::in_root(root, &name, flags, mode).explain("openat2", describe)
}

/// Whether a file or directory belongs to a file system whose files are views of the kernel (statfs(2)).
/// Root reads data of the host there, in every container. The descriptor may be O_PATH.
pub fn shows_the_kernel(file: impl AsFd) -> bool {
    const MAGIC: [i64; 32] = [
        0x9fa0,      // proc
        0x9fa1,      // openpromfs
        0x9fa2,      // usbdevice
        0x1cd1,      // devpts
        0x0027_e0eb, // cgroup
        0x6367_7270, // cgroup2
        0x0765_5821, // resctrl
        0x6265_6572, // sysfs
        0x6265_6570, // configfs
        0x6462_6720, // debugfs
        0x7472_6163, // tracefs
        0x6165_676c, // pstore
        0x7363_6673, // securityfs
        0x5a3c_69f0, // apparmorfs
        0xf97c_ff8c, // selinuxfs
        0x4341_5d53, // smackfs
        0xde5e_81e4, // efivarfs
        0x4249_4e4d, // binfmt_misc
        0x6c6f_6f70, // binder
        0xcafe_4a11, // bpf
        0x6e73_6673, // nsfs
        0x5049_4446, // pidfs
        0x0904_1934, // anonymous inodes
        0x5345_434d, // secretmem
        0x444d_4142, // dmabuf
        0x1980_0202, // mqueue
        0x6573_5543, // fusectl
        0x6759_6969, // rpc_pipefs
        0x6e66_7364, // nfsd
        0xabba_1974, // xenfs
        0x534f_434b, // sockfs
        0x5049_5045, // pipefs
    ];
    let is_view = rustix::fs::fstatfs(file).is_ok_and(|stat| MAGIC.contains(&stat.f_type));
    is_view && !crate::weakened("kernel-files")
}

/// Makes the directory `path` inside `root`, and those above it, with `mode`; returns it.
///
/// Links on the way are followed inside the root. ENOTDIR where something else is in the way,
/// EEXIST for a link that leads nowhere.
pub fn create_directories(
    root: BorrowedFd<'_>,
    path: impl AsRef<Path>,
    mode: Mode,
) -> Result<OwnedFd> {
    let path = path.as_ref();
    let describe = || format!("{}, {path:?}", root.as_raw_fd());
    let Ok(name) = CString::new(path.as_os_str().as_bytes()) else {
        return Err(CallError::new("mkdir -p", describe(), libc::EINVAL));
    };
    raw::create_directories(root, &name, mode).explain("mkdir -p", describe)
}

/// Creates the regular file `path` inside `root` with its parent directories, unless something
/// exists there; returns an O_PATH descriptor. The file is a mount point: a link at the end is
/// followed.
pub fn create_file(root: BorrowedFd<'_>, path: impl AsRef<Path>, mode: Mode) -> Result<OwnedFd> {
    let path = path.as_ref();
    let describe = || format!("{}, {path:?}", root.as_raw_fd());
    let Ok(name) = CString::new(path.as_os_str().as_bytes()) else {
        return Err(CallError::new("create", describe(), libc::EINVAL));
    };
    raw::create_file(root, &name, mode).explain("create", describe)
}

/// The same without allocation, for use between clone and exec.
pub mod raw {
    use super::*;

    /// LIMIT: longest path that is accepted, in bytes, with its NUL.
    const PATH_MAX: usize = 4096;

    /// See [`super::in_root`].
    pub fn in_root(
        root: BorrowedFd<'_>,
        path: &CStr,
        flags: OFlags,
        mode: Mode,
    ) -> Result<OwnedFd, Errno> {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        for _ in 0..ATTEMPTS {
            match rustix::fs::openat2(root, path, flags | OFlags::CLOEXEC, mode, resolve) {
                Err(Errno::AGAIN | Errno::INTR) => continue,
                other => return other,
            }
        }
        Err(Errno::AGAIN)
    }

    /// The bytes of a path and, in `buffer`, the C string of the first `length` of them.
    fn prefix<'a>(
        path: &[u8],
        length: usize,
        buffer: &'a mut [u8; PATH_MAX],
    ) -> Result<&'a CStr, Errno> {
        let space = buffer.get_mut(..=length).ok_or(Errno::NAMETOOLONG)?;
        space[..length].copy_from_slice(&path[..length]);
        space[length] = 0;
        if length == 0 {
            return Ok(c"/");
        }
        CStr::from_bytes_with_nul(space).map_err(|_| Errno::INVAL)
    }

    /// See [`super::create_directories`].
    pub fn create_directories(
        root: BorrowedFd<'_>,
        path: &CStr,
        mode: Mode,
    ) -> Result<OwnedFd, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        // Nearly always it is there.
        match in_root(root, path, flags, Mode::empty()) {
            Err(Errno::NOENT) => {}
            other => return other,
        }
        let path = path.to_bytes();
        let mut buffer = [0u8; PATH_MAX];
        let mut name = [0u8; 256];
        let mut parent = in_root(root, c"/", flags, Mode::empty())?;
        let mut start = 0;
        while start < path.len() {
            if path[start] == b'/' {
                start += 1;
                continue;
            }
            let length = path[start..].iter().take_while(|&&byte| byte != b'/').count();
            let end = start + length;
            // ORDER: opened by the path from the top, so that links and ".." mean what they mean
            // inside the root; made relative to the descriptor of the directory above.
            let so_far = prefix(path, end, &mut buffer)?;
            parent = match in_root(root, so_far, flags, Mode::empty()) {
                Err(Errno::NOENT) => {
                    let last = name.get_mut(..=length).ok_or(Errno::NAMETOOLONG)?;
                    last[..length].copy_from_slice(&path[start..end]);
                    last[length] = 0;
                    let last = CStr::from_bytes_with_nul(last).map_err(|_| Errno::INVAL)?;
                    match rustix::fs::mkdirat(&parent, last, mode) {
                        // Another process was faster, or the name is a dangling link: the open
                        // distinguishes the two.
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(error) => return Err(error),
                    }
                    match in_root(root, so_far, flags, Mode::empty()) {
                        Err(Errno::NOENT) => return Err(Errno::EXIST),
                        other => other?,
                    }
                }
                other => other?,
            };
            start = end;
        }
        Ok(parent)
    }

    /// See [`super::create_file`].
    pub fn create_file(root: BorrowedFd<'_>, path: &CStr, mode: Mode) -> Result<OwnedFd, Errno> {
        match in_root(root, path, OFlags::PATH, Mode::empty()) {
            Err(Errno::NOENT) => {}
            other => return other,
        }
        let bytes = path.to_bytes();
        let slash = bytes.iter().rposition(|&byte| byte == b'/').unwrap_or(0);
        let mut buffer = [0u8; PATH_MAX];
        let above = prefix(bytes, slash, &mut buffer)?;
        drop(create_directories(root, above, mode | Mode::XUSR | Mode::XGRP | Mode::XOTH)?);
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::NOCTTY | OFlags::NONBLOCK;
        drop(in_root(root, path, flags, mode)?);
        in_root(root, path, OFlags::PATH, Mode::empty())
    }
}

/// Returns whether the descriptor is of a file system of the given type (`statfs(2)`), such as
/// [`PROC_SUPER_MAGIC`]: to be called before a write to a file that should be procfs.
pub fn is_on(fd: impl AsFd, magic: i64) -> Result<bool> {
    let found = rustix::fs::fstatfs(fd.as_fd())
        .explain("fstatfs", || fd.as_fd().as_raw_fd().to_string())?;
    Ok(found.f_type as i64 == magic)
}

/// The type of procfs for [`is_on`].
pub const PROC_SUPER_MAGIC: i64 = 0x9fa0;
