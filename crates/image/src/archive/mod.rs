//! Archives: entries of a tar, read from an untrusted stream, and written.

mod read;
mod write;

pub(crate) use read::{Reader, Source};
pub(crate) use write::{Head, Writer};

/// Largest number of entries in one layer. LIMIT: a million files are an odd image. Their memory is
/// bounded apart, in `bound`.
pub(crate) const MAX_ENTRIES: usize = 2_000_000;
/// Longest path, symlink target or link target, in bytes (PATH_MAX less its NUL).
pub(crate) const MAX_PATH: usize = 4095;
/// Longest path component, in bytes (NAME_MAX).
pub(crate) const MAX_NAME: usize = 255;
/// Bytes of all xattrs of one file together. LIMIT: the kernel takes 64 KiB for one.
pub(crate) const MAX_XATTRS: usize = 64 * 1024;

/// The owner of a file and its other metadata, but not its type.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Meta {
    /// Permissions with the setuid, setgid and sticky bits: 07777 at most.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Seconds since the epoch, and nanoseconds.
    pub mtime: (i64, u32),
    /// Names and values, sorted by name.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// A piece of a sparse file that has data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub offset: u64,
    pub length: u64,
}

/// The type of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind<C> {
    Directory,
    File { size: u64, content: C },
    HardLink { target: Vec<u8> },
    Symlink { target: Vec<u8> },
    Char { major: u32, minor: u32 },
    Block { major: u32, minor: u32 },
    Fifo,
}

/// One entry; `C` is the type of a file's content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry<C> {
    /// Without a leading `/` or `./`; empty for the root.
    pub path: Vec<u8>,
    pub meta: Meta,
    pub kind: Kind<C>,
}

/// Returns whether an xattr is kept when a layer is imported.
///
/// `trusted.overlay.*` would speak to overlayfs as if we had written it (a redirect to any object);
/// every other `trusted.*` is the host's. `user.overlay.*` means something to an overlay that a
/// container mounts itself with `userxattr`. `security.selinux` and the like are the labels of
/// another host. `system.*` other than ACLs cannot be set.
pub(crate) fn keep_xattr(name: &[u8]) -> bool {
    let plain_user = name.starts_with(b"user.") && !name.starts_with(b"user.overlay.");
    (plain_user && name.len() > 5)
        || name == b"security.capability"
        || name == b"system.posix_acl_access"
        || name == b"system.posix_acl_default"
}

/// Returns whether a map of data in a sparse file is sorted, and lies inside the file.
pub(crate) fn map_is_sound(map: &[Piece], size: u64) -> bool {
    let mut end = 0;
    map.iter().all(|piece| {
        let sound = piece.offset >= end;
        end = match piece.offset.checked_add(piece.length) {
            Some(end) => end,
            None => return false,
        };
        sound && end <= size
    })
}
