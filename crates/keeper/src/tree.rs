//! The root of a container as its newborn builds it: paths below it, and the mounts on them.
//!
//! **Trust.** Writers below the root are not trusted: every path is opened by openat2 with
//! RESOLVE_IN_ROOT and RESOLVE_NO_MAGICLINKS. Mount points of procfs, sysfs, devpts and the like
//! are opened without following any link, and files from devpts are verified to be of that file
//! system (CVE-2019-16884, CVE-2019-19921, CVE-2023-27561, CVE-2025-31133, CVE-2025-52565,
//! CVE-2025-52881, CVE-2026-41579).
//!
//! **Rules** are those of [`crate::newborn`]: nothing here allocates, locks or panics.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};

use dormouse_kernel::call::{self as kernel, FsCommand, MountAttr, OpenTreeFlags, Propagation};
use dormouse_kernel::weakened;
use dormouse_launch::flat::{self, Record};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;

use crate::setting::{Outcome, become_stdio, decimal};
use crate::tiny;

/// LIMIT: the most terminals of a devpts, whatever a plan requests.
const TERMINALS_MAX: u32 = 256;
/// f_type of devpts.
const DEVPTS_MAGIC: u64 = 0x1cd1;
/// f_type of procfs.
const PROC_MAGIC: u64 = 0x9fa0;
/// f_type of sysfs.
const SYSFS_MAGIC: u64 = 0x6265_6572;

/// No attribute.
fn none() -> MountAttr {
    MountAttr::empty()
}

/// The required type of a target: the kinds of `launch::TargetKind`, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    Dir,
    File,
    PlainDir,
}

impl Target {
    pub(crate) fn from_number(number: u64) -> Option<Self> {
        match number {
            0 => Some(Self::Dir),
            1 => Some(Self::File),
            2 => Some(Self::PlainDir),
            _ => None,
        }
    }

    /// The restrictions on the path to the target.
    fn resolve(self) -> ResolveFlags {
        match self {
            Self::PlainDir if !weakened("plain-targets") => ResolveFlags::NO_SYMLINKS,
            _ => ResolveFlags::empty(),
        }
    }
}

/// A kind of propagation by the number of `launch::Spread`.
fn propagation(number: u64) -> Option<Propagation> {
    match number {
        0 => Some(Propagation::Private),
        1 => Some(Propagation::Slave),
        2 => Some(Propagation::Shared),
        3 => Some(Propagation::Unbindable),
        _ => None,
    }
}

fn open_dir(path: &CStr) -> Outcome<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty())
}

/// Covers the root of this process by a mount, which becomes its root.
pub(crate) fn put_root(mount: BorrowedFd<'_>) -> Outcome {
    kernel::move_mount(mount, open_dir(c"/")?.as_fd(), c"")?;
    cover_root(mount)
}

fn cover_root(mount: BorrowedFd<'_>) -> Outcome {
    enter(mount)
}

/// The mount becomes the root of this process.
pub(crate) fn enter(mount: BorrowedFd<'_>) -> Outcome {
    rustix::process::fchdir(mount)?;
    rustix::process::chroot(c".")?;
    rustix::process::chdir(c"/")
}

/// Sets the propagation of a mount in turn, as `Plan::spreads` has written it.
fn spread_each(mount: BorrowedFd<'_>, mut spreads: u64) -> Outcome {
    while spreads & flat::SPREAD_SET != 0 {
        let kind = propagation(spreads & (flat::SPREAD_RECURSIVE - 1)).ok_or(Errno::INVAL)?;
        let below = spreads & flat::SPREAD_RECURSIVE != 0;
        kernel::mount_setattr(mount, below, none(), none(), Some(kind), None)?;
        spreads >>= flat::SPREAD_BITS;
    }
    Ok(())
}

/// Attaches a mount and sets its propagation.
pub(crate) fn attach(mount: BorrowedFd<'_>, place: BorrowedFd<'_>, spreads: u64) -> Outcome {
    kernel::move_mount(mount, place, c"")?;
    spread_each(mount, spreads)
}

/// Attaches a copy of a mount, which is younger. Only an attached mount of this namespace can be
/// copied, so the mount itself is attached for a moment.
///
/// ORDER: the propagation comes last. An unbindable mount cannot be copied, so mounts below it
/// would be left out; below a shared mount everything is attached as shared.
pub(crate) fn attach_copy(
    mount: BorrowedFd<'_>,
    place: BorrowedFd<'_>,
    proc: BorrowedFd<'_>,
    spreads: u64,
) -> Outcome {
    kernel::move_mount(mount, place, c"")?;
    let copy = copy(mount, true)?;
    // ORDER: unmounting below a shared mount propagates to its peers: on the host, and in the copy.
    kernel::mount_setattr(mount, true, none(), none(), Some(Propagation::Private), None)?;
    let mut path = *b"self/fd/\0\0\0\0\0\0\0\0\0\0\0\0";
    let mut digits = [0; 20];
    let digits = decimal(mount.as_raw_fd().into(), &mut digits);
    path[8..8 + digits.len()].copy_from_slice(digits);
    let path = CStr::from_bytes_until_nul(&path).map_err(|_| Errno::INVAL)?;
    let here = open_dir(c".")?;
    rustix::process::fchdir(proc)?;
    kernel::umount_detach_what(path)?;
    rustix::process::fchdir(&here)?;
    kernel::move_mount(copy.as_fd(), place, c"")?;
    spread_each(copy.as_fd(), spreads)
}

/// Attaches the mount at a path of the host, in a mount namespace that is a copy of the host's and
/// becomes private: later mounts here do not propagate.
pub(crate) fn put_root_below(mount: BorrowedFd<'_>, place: &CStr) -> Outcome {
    let top = open_dir(c"/")?;
    let all = kernel::open_tree(top.as_fd(), c"", OpenTreeFlags::EMPTY_PATH)?;
    kernel::mount_setattr(all.as_fd(), true, none(), none(), Some(Propagation::Private), None)?;
    kernel::move_mount(mount, open_dir(place)?.as_fd(), c"")
}

/// Makes an attached mount the root of the mount namespace and detaches all others.
pub(crate) fn pivot(mount: BorrowedFd<'_>) -> Outcome {
    rustix::process::fchdir(mount)?;
    // Both are one place: the old root ends up on top of the new one, and is unmounted from it.
    rustix::process::pivot_root(c".", c".")?;
    kernel::umount_detach(c".")?;
    rustix::process::chdir(c"/")
}

/// The same without pivot_root(2), which does not work on the initramfs: the mount covers the root,
/// so that `..` from it does not lead out.
///
/// The covered mounts stay in the mount namespace. The kernel permits a user namespace to mount a
/// procfs or sysfs where an unmasked one is in the mount namespace, reachable or not
/// (mount_too_revealing in fs/namespace.c). So the host's are unmounted first, and so is the
/// container's, of which only the copy gets masks.
///
/// Root of a user namespace may not search every directory of the host, and where one of these mounts is
/// below such a directory it can be neither unmounted nor covered. Then all of the host is detached by
/// pivot_root(2) after all; on an initramfs that is EINVAL, and the first error is reported.
pub(crate) fn cover(mount: BorrowedFd<'_>, proc: BorrowedFd<'_>) -> Outcome {
    // A mount on the path to a mount point cannot be moved there: a copy can.
    let copy = copy(mount, true)?;
    // ORDER: an unmount below a shared mount propagates to its peers: to the host, and to the copy.
    kernel::mount_setattr(mount, true, none(), none(), Some(Propagation::Private), None)?;
    rustix::process::fchdir(mount)?;
    kernel::umount_detach(c".")?;
    rustix::process::chdir(c"/")?;
    let left = if weakened("host-proc") { Ok(()) } else { leave_host_proc(proc) };
    match left {
        Ok(()) => put_root(copy.as_fd()),
        Err(Errno::ACCESS) => {
            kernel::move_mount(copy.as_fd(), open_dir(c"/")?.as_fd(), c"")?;
            pivot(copy.as_fd()).map_err(|_| Errno::ACCESS)
        }
        Err(e) => Err(e),
    }
}

/// Unmounts every procfs and sysfs that the root of this process leads to; covers it where that is not
/// allowed. The mount namespace is this process's own, and private.
///
/// Lines of the table are read while mounts go: a line may be of one that went with another.
fn leave_host_proc(proc: BorrowedFd<'_>) -> Outcome {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let table = rustix::fs::openat(proc, c"self/mountinfo", flags, Mode::empty())?;
    // LIMIT: the longest line; one of the kernel's has a few kilobytes.
    let mut text = [0u8; 64 << 10];
    let mut length = 0;
    loop {
        let n = rustix::io::retry_on_intr(|| rustix::io::read(&table, &mut text[length..]))?;
        length += n;
        let mut start = 0;
        while let Some(end) = text[start..length].iter().position(|byte| *byte == b'\n') {
            if let Some(place) = whole_proc_or_sysfs(&text[start..start + end]) {
                take_off(place)?;
            }
            start += end + 1;
        }
        if n == 0 {
            return Ok(());
        }
        text.copy_within(start..length, 0);
        length -= start;
        if length == text.len() {
            return Err(Errno::NAMETOOLONG);
        }
    }
}

/// The place of a mount, as a line of mountinfo writes it (proc_pid_mountinfo(5)), where it shows all of
/// a procfs or sysfs.
fn whole_proc_or_sysfs(line: &[u8]) -> Option<&[u8]> {
    let mut fields = line.split(|byte| *byte == b' ');
    let (root, place) = (fields.nth(3)?, fields.next()?);
    let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
    (root == b"/" && [b"proc".as_slice(), b"sysfs"].contains(&kind)).then_some(place)
}

/// Takes off what is mounted at a place, as far down as there is a procfs or sysfs.
fn take_off(escaped: &[u8]) -> Outcome {
    let mut path = [0u8; 4096 + 1];
    let path = unescape(escaped, &mut path)?;
    // LIMIT: mounts one on the other.
    for _ in 0..256 {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let place = match rustix::fs::open(path, flags, Mode::empty()) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()), // it went with another
            place => place?,
        };
        let is_one = is_of(&place, PROC_MAGIC).is_ok() || is_of(&place, SYSFS_MAGIC).is_ok();
        match (kernel::umount_detach(path), is_one) {
            (Ok(()), _) => {}
            (Err(Errno::INVAL | Errno::PERM), false) => return Ok(()),
            // Mounts that came from another user namespace are locked (mount_namespaces(7)).
            (Err(Errno::INVAL | Errno::PERM), true) => {
                let attr = MountAttr::RDONLY | MountAttr::NOSUID | MountAttr::NODEV;
                let empty = tiny::new(c"tmpfs", &[], attr | MountAttr::NOEXEC)?;
                return kernel::move_mount(empty.as_fd(), place.as_fd(), c"");
            }
            (Err(e), _) => return Err(e),
        }
    }
    Err(Errno::LOOP)
}

/// A path without the escapes of mountinfo: a backslash and three octal digits.
fn unescape<'p>(escaped: &[u8], path: &'p mut [u8; 4096 + 1]) -> Outcome<&'p CStr> {
    let (mut from, mut to) = (escaped, 0);
    while let [first, rest @ ..] = from {
        let (byte, rest) = match (first, rest) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', rest @ ..]) => {
                ((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'), rest)
            }
            _ => (*first, rest),
        };
        *path.get_mut(to).filter(|_| to < 4096).ok_or(Errno::NAMETOOLONG)? = byte;
        (from, to) = (rest, to + 1);
    }
    CStr::from_bytes_until_nul(path).map_err(|_| Errno::INVAL)
}

/// What [`Tree::make`] came to.
enum Made {
    /// The end of the path.
    Whole(OwnedFd),
    /// A dangling link at these bytes of the path, and how long its own text is.
    Link { start: usize, end: usize, link_length: usize },
}

/// The root below which a newborn works.
pub(crate) struct Tree {
    top: OwnedFd,
}

impl Tree {
    /// The root of this process, or a mount that will be.
    pub(crate) fn new(mount: Option<BorrowedFd<'_>>) -> Outcome<Self> {
        let top = match mount {
            Some(mount) => rustix::io::fcntl_dupfd_cloexec(mount, 5)?,
            None => open_dir(c"/")?,
        };
        Ok(Self { top })
    }

    pub(crate) fn make_read_only(&self) -> Outcome {
        kernel::mount_setattr(self.top.as_fd(), false, MountAttr::RDONLY, none(), None, None)
    }

    pub(crate) fn spread(&self, kind: u64, recursive: bool) -> Outcome {
        let propagation = Some(propagation(kind).ok_or(Errno::INVAL)?);
        kernel::mount_setattr(self.top.as_fd(), recursive, none(), none(), propagation, None)
    }

    /// Opens a path below the root as O_PATH, never leaving the root.
    pub(crate) fn open(&self, path: &CStr, extra: ResolveFlags) -> Outcome<OwnedFd> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        if weakened("in-root") {
            // A naive concatenation of paths: links lead anywhere.
            let start = path.to_bytes().iter().take_while(|byte| **byte == b'/').count();
            let rest = &path.to_bytes_with_nul()[start..];
            let rest = CStr::from_bytes_with_nul(rest).map_err(|_| Errno::INVAL)?;
            let path = if rest.is_empty() { c"." } else { rest };
            return rustix::fs::openat2(&self.top, path, flags, Mode::empty(), extra);
        }
        let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | extra;
        // A rename anywhere on the way makes `..` uncertain for the kernel: EAGAIN.
        for _ in 0..128 {
            match rustix::fs::openat2(&self.top, path, flags, Mode::empty(), how) {
                Err(Errno::AGAIN) => {}
                other => return other,
            }
        }
        Err(Errno::AGAIN)
    }

    /// Opens the target of a mount; creates a missing one if `create` is set.
    pub(crate) fn target(&self, path: &CStr, kind: Target, create: bool) -> Outcome<OwnedFd> {
        let fd = match self.open(path, kind.resolve()) {
            Err(Errno::NOENT) if create => self.make(path, kind, Mode::from_raw_mode(0o755))?,
            other => other?,
        };
        match (kind, is_dir(fd.as_fd())?) {
            (Target::File, true) => Err(Errno::ISDIR),
            (Target::Dir | Target::PlainDir, false) => Err(Errno::NOTDIR),
            _ => Ok(fd),
        }
    }

    /// Creates a directory, or an empty file, with its parent directories. Links on the path are
    /// followed inside the root, and the target of a dangling link is created there.
    pub(crate) fn make(&self, path: &CStr, kind: Target, mode: Mode) -> Outcome<OwnedFd> {
        let mut whole = [0u8; 4096];
        let bytes = path.to_bytes();
        whole.get_mut(..bytes.len()).ok_or(Errno::NAMETOOLONG)?.copy_from_slice(bytes);
        let (mut length, mut link) = (bytes.len(), [0u8; 4096]);
        // LIMIT: the kernel's, of links on one way (path_resolution(7)).
        for _ in 0..40 {
            match self.make_until_link(&whole[..length], kind, mode, &mut link)? {
                Made::Whole(place) => return Ok(place),
                Made::Link { start, end, link_length } => {
                    let points_to = &link[..link_length];
                    // An absolute link begins at the root, another in the directory that has it.
                    let above = if points_to.first() == Some(&b'/') { 0 } else { start };
                    let mut next = [0u8; 4096];
                    let mut at = 0;
                    for piece in [&whole[..above], points_to, &whole[end..length]] {
                        let room = next.get_mut(at..at + piece.len()).ok_or(Errno::NAMETOOLONG)?;
                        room.copy_from_slice(piece);
                        at += piece.len();
                    }
                    (whole, length) = (next, at);
                }
            }
        }
        Err(Errno::LOOP)
    }

    /// The same up to the first dangling link, which is read into `link`.
    fn make_until_link(
        &self,
        bytes: &[u8],
        kind: Target,
        mode: Mode,
        link: &mut [u8; 4096],
    ) -> Outcome<Made> {
        let extra = kind.resolve();
        let mut part = [0u8; 4096];
        if bytes.len() >= part.len() {
            return Err(Errno::NAMETOOLONG);
        }
        let mut here = self.open(c"/", extra)?;
        let mut start = 0;
        while start < bytes.len() {
            if bytes[start] == b'/' {
                start += 1;
                continue;
            }
            let end =
                bytes[start..].iter().position(|b| *b == b'/').map_or(bytes.len(), |n| start + n);
            let last = bytes[end..].iter().all(|b| *b == b'/');
            part[..end].copy_from_slice(&bytes[..end]);
            part[end] = 0;
            let name = CStr::from_bytes_until_nul(&part[start..]).map_err(|_| Errno::INVAL)?;
            let so_far = CStr::from_bytes_until_nul(&part).map_err(|_| Errno::INVAL)?;
            here = match self.open(so_far, extra) {
                Err(Errno::NOENT) => {
                    if last && kind == Target::File {
                        make_file(&here, name)?;
                    } else {
                        make_dir(&here, name, if last { Some(mode) } else { None })?;
                    }
                    match self.open(so_far, extra) {
                        Err(Errno::NOENT) => {
                            let read = rustix::fs::readlinkat_raw(&here, name, &mut link[..]);
                            let link_length = read.map_err(|_| Errno::NOENT)?;
                            return Ok(Made::Link { start, end, link_length });
                        }
                        made => made?,
                    }
                }
                other => other?,
            };
            start = end;
        }
        Ok(Made::Whole(here))
    }

    /// Returns the parent directory of a path, created if missing, and the last component in
    /// `part`.
    fn parent<'p>(
        &self,
        path: &CStr,
        part: &'p mut [u8; 4096],
        kind: Target,
    ) -> Outcome<(OwnedFd, &'p CStr)> {
        let bytes = path.to_bytes();
        if bytes.len() >= part.len() {
            return Err(Errno::NAMETOOLONG);
        }
        part[..bytes.len()].copy_from_slice(bytes);
        let slash = bytes.iter().rposition(|b| *b == b'/');
        let (parent, name) = match slash {
            None => (self.open(c"/", kind.resolve())?, 0),
            Some(at) => {
                part[at] = 0;
                let parent = CStr::from_bytes_until_nul(part).map_err(|_| Errno::INVAL)?;
                let whole = if parent.is_empty() { c"/" } else { parent };
                (self.make(whole, kind, Mode::from_raw_mode(0o755))?, at + 1)
            }
        };
        let name = CStr::from_bytes_until_nul(&part[name..]).map_err(|_| Errno::INVAL)?;
        Ok((parent, name))
    }

    /// Makes a symbolic link unless something has that name.
    pub(crate) fn symlink(&self, points_to: &CStr, path: &CStr) -> Outcome {
        let mut part = [0u8; 4096];
        let (parent, name) = self.parent(path, &mut part, Target::Dir)?;
        match rustix::fs::symlinkat(points_to, &parent, name) {
            Err(Errno::EXIST) => Ok(()),
            other => other,
        }
    }

    /// Creates a device node; an existing one must be the same.
    pub(crate) fn device(&self, op: &Record, path: &CStr) -> Outcome {
        let mut part = [0u8; 4096];
        let (parent, name) = self.parent(path, &mut part, Target::PlainDir)?;
        let mode = op.b as u32;
        let (kind, bits) = (FileType::from_raw_mode(mode), Mode::from_raw_mode(mode & 0o7777));
        let umask = rustix::process::umask(Mode::empty());
        let made = rustix::fs::mknodat(&parent, name, kind, bits, op.a);
        rustix::process::umask(umask);
        match made {
            Err(Errno::EXIST) => {
                let flags = AtFlags::SYMLINK_NOFOLLOW;
                let there = rustix::fs::statat(&parent, name, flags)?;
                let same = FileType::from_raw_mode(there.st_mode) == kind && there.st_rdev == op.a;
                return if same { Ok(()) } else { Err(Errno::EXIST) };
            }
            other => other?,
        }
        let (uid, gid) = ((op.b >> 32) as u32, op.fd);
        let (uid, gid) = (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid));
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        rustix::fs::chownat(&parent, name, Some(uid), Some(gid), flags)
    }

    /// mqueue, devpts or cgroup2 of the process's own namespaces.
    pub(crate) fn new_filesystem(&self, op: &Record, path: &CStr) -> Outcome {
        let name = flat::FILESYSTEMS.get(op.b as usize).ok_or(Errno::NODEV)?;
        let context = kernel::fsopen(name)?;
        let context = context.as_fd();
        kernel::fsconfig(context, FsCommand::String(c"source", name))?;
        let mut attr = MountAttr::NOSUID | MountAttr::NOEXEC;
        if op.b == 1 {
            kernel::fsconfig(context, FsCommand::Flag(c"newinstance"))?;
            kernel::fsconfig(context, FsCommand::String(c"ptmxmode", c"0666"))?;
            kernel::fsconfig(context, FsCommand::String(c"mode", c"0620"))?;
            // LIMIT: the terminals of a container. The host has 4,096 for all (kernel.pty.max).
            set_number(context, c"max", op.fd.min(TERMINALS_MAX))?;
            if op.a <= u64::from(u32::MAX) {
                set_number(context, c"gid", op.a as u32)?;
            }
        } else {
            attr |= MountAttr::NODEV;
        }
        kernel::fsconfig(context, FsCommand::Create)?;
        let mount = kernel::fsmount(context, attr)?;
        let place = self.target(path, Target::PlainDir, true)?;
        kernel::move_mount(mount.as_fd(), place.as_fd(), c"")
    }

    /// Mounts any file system: `words` contains its type and then its options one after the other.
    pub(crate) fn filesystem<'p>(
        &self,
        op: &Record,
        mut words: impl Iterator<Item = Outcome<&'p CStr>>,
        path: &CStr,
    ) -> Outcome {
        let kind = Target::from_number(op.fd.into()).ok_or(Errno::INVAL)?;
        let name = words.next().ok_or(Errno::INVAL)??;
        let context = kernel::fsopen(name)?;
        let context = context.as_fd();
        let (mut has_source, mut has_mode) = (false, false);
        for word in words {
            let word = word?;
            let bytes = word.to_bytes();
            let Some(at) = bytes.iter().position(|b| *b == b'=') else {
                kernel::fsconfig(context, FsCommand::Flag(word))?;
                continue;
            };
            let mut key = [0u8; 256];
            key.get_mut(..at).ok_or(Errno::NAMETOOLONG)?.copy_from_slice(&bytes[..at]);
            let key = CStr::from_bytes_until_nul(&key).map_err(|_| Errno::NAMETOOLONG)?;
            let value = CStr::from_bytes_until_nul(&word.to_bytes_with_nul()[at + 1..])
                .map_err(|_| Errno::INVAL)?;
            has_source |= key == c"source";
            has_mode |= key == c"mode";
            kernel::fsconfig(context, FsCommand::String(key, value))?;
        }
        if !has_source {
            kernel::fsconfig(context, FsCommand::String(c"source", name))?;
        }
        if name == c"tmpfs" && !has_mode {
            self.keep_mode(context, path, kind)?;
        }
        kernel::fsconfig(context, FsCommand::Create)?;
        let (attr, spreads) = (op.a & u64::from(u32::MAX), op.a >> 32);
        let mount = kernel::fsmount(context, MountAttr::from_bits_retain(attr))?;
        let place = self.target(path, kind, true)?;
        if op.flags & flat::APART != 0 {
            // Below a detached root the propagation could not be set any more.
            spread_each(mount.as_fd(), spreads)?;
            return kernel::move_mount(mount.as_fd(), place.as_fd(), c"");
        }
        kernel::move_mount(mount.as_fd(), place.as_fd(), c"")?;
        spread_each(mount.as_fd(), spreads)
    }

    /// The top of a new tmpfs has the permissions of the directory that it covers, if there is one.
    fn keep_mode(&self, context: BorrowedFd<'_>, path: &CStr, kind: Target) -> Outcome {
        let covered = match self.open(path, kind.resolve()) {
            Err(Errno::NOENT) => return Ok(()),
            covered => rustix::fs::fstat(covered?)?,
        };
        let mut text = *b"0000\0";
        for (at, digit) in text[..4].iter_mut().enumerate() {
            *digit += (covered.st_mode >> (9 - 3 * at)) as u8 & 7;
        }
        let mode = CStr::from_bytes_with_nul(&text).map_err(|_| Errno::INVAL)?;
        kernel::fsconfig(context, FsCommand::String(c"mode", mode))
    }

    pub(crate) fn bind(&self, source: &CStr, path: &CStr, read_only: bool) -> Outcome {
        let source = self.open(source, ResolveFlags::empty())?;
        let kind = if is_dir(source.as_fd())? { Target::Dir } else { Target::File };
        let mount = copy(source.as_fd(), true)?;
        if read_only {
            kernel::mount_setattr(mount.as_fd(), true, MountAttr::RDONLY, none(), None, None)?;
        }
        kernel::move_mount(mount.as_fd(), self.target(path, kind, true)?.as_fd(), c"")
    }

    /// Copies the mount at a path, with the attributes and ids of the operation.
    pub(crate) fn take(
        &self,
        path: &CStr,
        op: &Record,
        userns: Option<BorrowedFd<'_>>,
    ) -> Outcome<OwnedFd> {
        let source = self.open(path, ResolveFlags::empty())?;
        let mount = copy(source.as_fd(), op.flags & flat::RECURSIVE != 0)?;
        let bits = |half: u64| MountAttr::from_bits_truncate(half & u64::from(u32::MAX));
        let (set, clear) = (bits(op.a), bits(op.a >> 32));
        if !set.is_empty() || !clear.is_empty() {
            kernel::mount_setattr(mount.as_fd(), false, set, clear, None, None)?;
        }
        if userns.is_some() {
            let below = op.b >> 32 != 0;
            kernel::mount_setattr(mount.as_fd(), below, none(), none(), None, userns)?;
        }
        Ok(mount)
    }

    /// Hides a path. A mount from outside can be copied only once it is attached here, so the first
    /// use attaches it and later ones copy that.
    pub(crate) fn mask(&self, path: &CStr, null: BorrowedFd<'_>, empty: BorrowedFd<'_>) -> Outcome {
        let place = match self.open(path, ResolveFlags::NO_SYMLINKS) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
            other => other?,
        };
        let with = if is_dir(place.as_fd())? { empty } else { null };
        match copy(with, false) {
            Err(Errno::INVAL) => kernel::move_mount(with, place.as_fd(), c""),
            mount => kernel::move_mount(mount?.as_fd(), place.as_fd(), c""),
        }
    }

    pub(crate) fn read_only(&self, path: &CStr) -> Outcome {
        let place = match self.open(path, ResolveFlags::NO_SYMLINKS) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
            other => other?,
        };
        let mount = copy(place.as_fd(), true)?;
        kernel::mount_setattr(mount.as_fd(), true, MountAttr::RDONLY, none(), None, None)?;
        kernel::move_mount(mount.as_fd(), place.as_fd(), c"")
    }

    /// Opens a terminal of the devpts at `path`; returns its master.
    pub(crate) fn terminal(&self, op: &Record, path: &CStr) -> Outcome<RawFd> {
        let devpts = self.open(path, ResolveFlags::NO_SYMLINKS)?;
        is_of(&devpts, DEVPTS_MAGIC)?;
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let master = rustix::fs::openat(&devpts, c"ptmx", flags, Mode::empty())?;
        rustix::pty::unlockpt(&master)?;
        // As open(2) would, with O_LARGEFILE: a restore opens it by its path. Nothing is executed before
        // the descriptor is closed.
        const O_LARGEFILE: u32 = 0o100_000;
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY;
        let flags = flags | OpenptFlags::from_bits_retain(O_LARGEFILE);
        let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
        rustix::fs::fchown(&slave, Some(rustix::fs::Uid::from_raw(op.fd)), None)?;
        let (rows, columns) = ((op.a >> 16) as u16, op.a as u16);
        if rows != 0 && columns != 0 {
            let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
            rustix::termios::tcsetwinsize(&master, size)?;
        }
        match rustix::process::setsid() {
            // Already a session leader.
            Ok(_) | Err(Errno::PERM) => {}
            Err(e) => return Err(e),
        }
        rustix::process::ioctl_tiocsctty(&slave)?;
        become_stdio([slave.as_fd(); 3])?;
        if op.flags & flat::CONSOLE != 0 {
            let mount = match weakened("console-by-handle") {
                // A naive lookup of the first terminal by its name (CVE-2025-52565).
                true => copy(self.open(c"/dev/pts/0", ResolveFlags::empty())?.as_fd(), false)?,
                false => copy(slave.as_fd(), false)?,
            };
            let place = self.target(c"/dev/console", Target::File, true)?;
            kernel::move_mount(mount.as_fd(), place.as_fd(), c"")?;
        }
        Ok(master.into_raw_fd())
    }
}

fn make_file(parent: &OwnedFd, name: &CStr) -> Outcome {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(parent, name, flags, Mode::from_raw_mode(0o644)) {
        Ok(_) | Err(Errno::EXIST) => Ok(()),
        Err(e) => Err(e),
    }
}

/// Makes a directory with exactly this mode, or an ordinary one.
fn make_dir(parent: &OwnedFd, name: &CStr, mode: Option<Mode>) -> Outcome {
    let ordinary = Mode::from_raw_mode(0o755);
    match rustix::fs::mkdirat(parent, name, mode.unwrap_or(ordinary)) {
        // The umask has reduced the mode.
        Ok(()) => match mode.filter(|mode| mode.bits() & 0o7022 != 0) {
            Some(mode) => rustix::fs::chmodat(parent, name, mode, AtFlags::empty()),
            None => Ok(()),
        },
        Err(Errno::EXIST) => Ok(()),
        Err(e) => Err(e),
    }
}

fn is_dir(fd: BorrowedFd<'_>) -> Outcome<bool> {
    Ok(FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode) == FileType::Directory)
}

/// A detached copy of the mount at `place`.
fn copy(place: BorrowedFd<'_>, recursive: bool) -> Outcome<OwnedFd> {
    let mut flags = OpenTreeFlags::CLONE | OpenTreeFlags::EMPTY_PATH;
    if recursive {
        flags |= OpenTreeFlags::RECURSIVE;
    }
    kernel::open_tree(place, c"", flags)
}

/// Sets an option of a file system to a number.
fn set_number(context: BorrowedFd<'_>, name: &CStr, number: u32) -> Outcome {
    let (mut text, mut value) = ([0; 20], [0; 21]);
    let digits = decimal(number.into(), &mut text);
    value[..digits.len()].copy_from_slice(digits);
    let value = CStr::from_bytes_until_nul(&value).map_err(|_| Errno::INVAL)?;
    kernel::fsconfig(context, FsCommand::String(name, value))
}

pub(crate) fn is_of(fd: &OwnedFd, magic: u64) -> Outcome {
    if rustix::fs::fstatfs(fd)?.f_type as u64 == magic { Ok(()) } else { Err(Errno::NODEV) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_line_names_place_of_whole_procfs() {
        let proc = b"22 28 0:21 / /proc\\040x rw,nosuid shared:12 master:3 - proc proc rw";
        let mut path = [0; 4097];
        let place = whole_proc_or_sysfs(proc).expect("it is one");
        assert_eq!(unescape(place, &mut path), Ok(c"/proc x"));
        let sysfs = b"23 28 0:22 / /sys rw - sysfs sysfs rw";
        assert_eq!(whole_proc_or_sysfs(sysfs), Some(b"/sys".as_slice()));
        for other in [
            b"24 28 0:21 /sys /proc/sys ro - proc proc rw".as_slice(),
            b"25 28 0:23 / /proc rw - tmpfs proc rw",
            b"26 28 0:23 / /proc rw",
            b"",
        ] {
            assert_eq!(whole_proc_or_sysfs(other), None);
        }
        let long = vec![b'a'; 4097];
        assert_eq!(unescape(&long, &mut [0; 4097]), Err(Errno::NAMETOOLONG));
    }
}
