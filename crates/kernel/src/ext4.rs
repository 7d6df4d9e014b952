//! An ext4 in a file: made, mounted, trimmed and grown.
//!
//! The programs are those of e2fsprogs. The file is given to them locked, as their standard input: the lock
//! ([`crate::loop_device`]) then belongs to them too, and no other process attaches the file before they have ended,
//! also if this process is killed.
//!
//! **Grown where nothing can be torn.** The kernel grows a mounted file system in its journal, and permits that with
//! CAP_SYS_RESOURCE. resize2fs has no journal. Each block that it overwrites is therefore saved before (`-z`), and
//! [`undo`] writes the blocks back after an interruption.
//!
//! **Not trusted.** A container writes files, and never blocks of this file system. Its programs are run on a file
//! that the kernel and they themselves have written.

use std::fs::{self, File};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{Mode, OFlags};

use crate::error::{CallError, ErrorKind, Explain};
use crate::loop_device::LoopDevice;
use crate::mount::{FsContext, MountAttr};

/// LIMIT: lines of a program's output that an error repeats.
const LINES: usize = 3;
/// LIMIT: size of a journal, in MB. A larger one makes no small drive faster.
const JOURNAL_MB: std::ops::RangeInclusive<u64> = 4..=64;
/// The size of a block.
const BLOCK_BYTES: u64 = 4096;
/// The size of an inode.
const INODE_BYTES: u64 = 256;
/// Bytes that are copied at once.
const COPIED_BYTES: usize = 256 << 10;
const MAGIC: u16 = 0xef53;
/// `EXT4_FEATURE_INCOMPAT_RECOVER`: the journal has changes that are not in place yet.
const NEEDS_RECOVERY: u32 = 4;
const FITRIM: libc::c_ulong = 0xc018_5879;
const EXT4_IOC_RESIZE_FS: libc::c_ulong = 0x4008_6610;

/// A step that failed.
#[derive(Debug, thiserror::Error)]
pub enum Ext4Error {
    /// A program could not be run.
    #[error("cannot run {program}; it is in the package e2fsprogs")]
    NotRun {
        /// Its name.
        program: &'static str,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A program failed, with its message.
    #[error("{program}: {message}")]
    Failed {
        /// Its name.
        program: &'static str,
        /// Its last lines.
        message: String,
    },
    /// A system call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The file is no ext4 that was made here.
    #[error("the file of the disk is damaged: {0}")]
    Damaged(&'static str),
}

impl Ext4Error {
    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotRun { .. } => ErrorKind::NotFound,
            Self::Failed { .. } => ErrorKind::Os(libc::EIO),
            Self::Call(e) => e.kind(),
            Self::Damaged(_) => ErrorKind::Corrupt,
        }
    }
}

/// The result of a step.
pub type Result<T> = std::result::Result<T, Ext4Error>;

/// Facts of the superblock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Superblock {
    /// The size of the file system.
    pub bytes: u64,
    /// Files and directories that it can have.
    pub inodes: u32,
    /// It was not unmounted before its host went down.
    pub needs_recovery: bool,
}

/// Runs a program on a file that is its standard input as well; returns its exit status and output.
fn run(
    program: &'static str,
    arguments: &[&str],
    image: (&Path, &File),
    after: &[&str],
) -> Result<(i32, String)> {
    // Debian's path: the process that cleans up after a container may have no PATH.
    let usual = Path::new("/usr/sbin").join(program);
    let failed = |source| Ext4Error::NotRun { program, source };
    let output = Command::new(if usual.exists() { usual.as_path() } else { Path::new(program) })
        .args(arguments)
        .arg(image.0)
        .args(after)
        .env("LC_ALL", "C")
        .stdin(Stdio::from(image.1.try_clone().map_err(failed)?))
        .output()
        .map_err(failed)?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let last = lines[lines.len().saturating_sub(LINES)..].join(" ");
    Ok((output.status.code().unwrap_or(-1), last))
}

fn run_or_fail(
    program: &'static str,
    arguments: &[&str],
    image: (&Path, &File),
    after: &[&str],
) -> Result<()> {
    match run(program, arguments, image, after)? {
        (0, _) => Ok(()),
        (_, message) => Err(Ext4Error::Failed { program, message }),
    }
}

/// Makes an ext4 in an empty file of this size. Nothing is reserved for root, and unused tables and the journal take
/// no place: a file without data reads as zeros.
///
/// It is made in memory and copied, because mkfs.ext4 waits several times until its file is on the disk. The first
/// device of the file does so once.
pub fn make(image: &File, inodes: Option<u32>) -> Result<()> {
    let shown = || "the file of a disk".to_owned();
    let bytes = image.metadata().explain("fstat", shown)?.len();
    let memory = rustix::fs::memfd_create("drive", rustix::fs::MemfdFlags::CLOEXEC);
    let memory = File::from(memory.explain("memfd_create", shown)?);
    memory.set_len(bytes).explain("ftruncate", shown)?;
    let journal = ((bytes >> 20) / 64).clamp(*JOURNAL_MB.start(), *JOURNAL_MB.end());
    let journal = format!("size={journal}");
    let inodes = inodes.map(|n| n.to_string());
    let mut options = vec!["-q", "-F", "-b", "4096", "-I", "256", "-m", "0", "-J", &journal];
    options.extend(["-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1"]);
    options.extend(inodes.iter().flat_map(|n| ["-N", n]));
    // Its standard input.
    run_or_fail("mkfs.ext4", &options, (Path::new("/proc/self/fd/0"), &memory), &[])?;
    copy_data(&memory, image, bytes).explain("copy", shown)?;
    Ok(())
}

/// Copies the parts of a file that are not holes.
fn copy_data(from: &File, to: &File, bytes: u64) -> std::io::Result<()> {
    use rustix::fs::SeekFrom;
    let mut buffer = vec![0; COPIED_BYTES];
    let mut at = 0;
    while at < bytes {
        let begin = match rustix::fs::seek(from, SeekFrom::Data(at)) {
            Err(crate::Errno::NXIO) => break, // only a hole is left
            begin => begin?,
        };
        let end = rustix::fs::seek(from, SeekFrom::Hole(begin))?.min(bytes);
        at = begin;
        while at < end {
            let length = COPIED_BYTES.min(usize::try_from(end - at).unwrap_or(COPIED_BYTES));
            from.read_exact_at(&mut buffer[..length], at)?;
            to.write_all_at(&buffer[..length], at)?;
            at += length as u64;
        }
    }
    Ok(())
}

/// Reads the superblock.
pub fn superblock(image: &File) -> Result<Superblock> {
    let mut bytes = [0; 1024];
    image.read_exact_at(&mut bytes, 1024).explain("pread", || "a superblock".into())?;
    let number =
        |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    if u16::from_le_bytes([bytes[0x38], bytes[0x39]]) != MAGIC {
        return Err(Ext4Error::Damaged("it has no superblock"));
    }
    if number(0x18) != 2 {
        return Err(Ext4Error::Damaged("its blocks are not of 4 kB"));
    }
    let incompatible = number(0x60);
    // `EXT4_FEATURE_INCOMPAT_64BIT`: the number of blocks has an upper half.
    let high = if incompatible & 0x80 != 0 { u64::from(number(0x150)) } else { 0 };
    Ok(Superblock {
        bytes: (high << 32 | u64::from(number(4))).saturating_mul(BLOCK_BYTES),
        inodes: number(0),
        needs_recovery: incompatible & NEEDS_RECOVERY != 0,
    })
}

/// How a drive is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MountOptions {
    /// The place of removed files is given back below, at each commit of the journal and at the end of the mount.
    pub discard: bool,
    /// The files need not outlast the host: nothing waits until the disk has emptied its own cache.
    pub volatile: bool,
}

/// Mounts a device, detached.
///
/// The mount of a device that is mounted already is one more of the same file system, whose options hold.
pub fn mount(device: &Path, options: MountOptions) -> Result<OwnedFd> {
    let context = FsContext::open("ext4")?;
    context.set_string("source", &device.to_string_lossy())?;
    context.set_flag(if options.discard { "discard" } else { "nodiscard" })?;
    if options.volatile {
        context.set_flag("nobarrier")?;
    }
    // Unused tables are zeros already, and would take place if they were written.
    context.set_flag("noinit_itable")?;
    context.set_string("errors", "remount-ro")?;
    Ok(context.create(MountAttr::empty())?)
}

/// A descriptor of the root of a mount on which ioctl(2) works: that of a mount itself has only a path.
fn root_of(mount: BorrowedFd<'_>) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(mount, ".", flags, Mode::empty());
    Ok(root.explain("openat", || "the root of a drive".into())?)
}

fn request<T>(
    mount: BorrowedFd<'_>,
    name: &'static str,
    number: libc::c_ulong,
    value: &mut T,
) -> Result<()> {
    let root = root_of(mount)?;
    // SAFETY: callers pass the structure that the request reads or writes.
    let done = unsafe { libc::ioctl(root.as_raw_fd(), number, std::ptr::from_mut(value)) };
    match done {
        0 => Ok(()),
        _ => Ok(Err(std::io::Error::last_os_error()).explain(name, || "a drive".into())?),
    }
}

/// Gives back the place of all unused blocks (ioctl_fitrim(2)).
pub fn trim(mount: BorrowedFd<'_>) -> Result<()> {
    // `struct fstrim_range`: start, length, and the least length of one piece.
    let mut range: [u64; 3] = [0, u64::MAX, 0];
    request(mount, "ioctl(FITRIM)", FITRIM, &mut range)
}

/// The space of a mounted file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// Free, without what data that is still in memory will take. A part of it is reserved.
    pub free_bytes: u64,
    /// The part that no file may take ([`reserve`]).
    pub reserved_bytes: u64,
    /// What data that is still in memory will take (delayed allocation).
    pub delayed_bytes: u64,
    /// The inodes of no file, in the tables.
    pub free_inode_bytes: u64,
}

/// `struct ustat` (ustat(2)).
#[repr(C)]
#[derive(Default)]
struct Usage {
    free_blocks: i32,
    free_inodes: libc::c_ulong,
    names: [u8; 12],
}

/// Reads the space of the file system that is mounted from a device; `None` if none is any more. By the number of the
/// device, as ustat(2) does: it needs no path, and a container has no influence on it. Waits while the file system is
/// being mounted or unmounted.
pub fn space(device: &LoopDevice) -> Result<Option<Space>> {
    let what = || device.path().display().to_string();
    let mut usage = Usage::default();
    // The kernel's encoding of a device number is the lower half of that of stat(2).
    let of_device = device.number()? as u32;
    // SAFETY: the kernel writes a `struct ustat`, which `usage` is.
    let read = unsafe { libc::syscall(libc::SYS_ustat, of_device, &raw mut usage) };
    match (read, std::io::Error::last_os_error()) {
        (0, _) => {}
        (_, e) if e.raw_os_error() == Some(libc::EINVAL) => return Ok(None),
        (_, e) => return Ok(Err(e).explain("ustat", what)?),
    }
    // The kernel cuts the number to 32 bits, which hold the blocks of the largest drive.
    let free_blocks = u64::from(usage.free_blocks as u32);
    let (Some(reserved), Some(delayed)) =
        (number(device, RESERVED)?, number(device, "delayed_allocation_blocks")?)
    else {
        return Ok(None);
    };
    let bytes = |blocks: u64| blocks.saturating_mul(BLOCK_BYTES);
    Ok(Some(Space {
        free_bytes: bytes(free_blocks),
        reserved_bytes: bytes(reserved),
        delayed_bytes: bytes(delayed),
        free_inode_bytes: usage.free_inodes.saturating_mul(INODE_BYTES),
    }))
}

/// Sets the part of the free space that no file may take, in whole blocks: statfs(2) shows less space, and writes
/// beyond it fail with ENOSPC, as where the file system is full. Data in memory keeps the blocks that it was promised.
/// The next mount has what [`usual_reserve`] returns.
///
/// `reserved_clusters`: `Documentation/ABI/testing/sysfs-fs-ext4` of the kernel.
pub fn reserve(device: &LoopDevice, bytes: u64) -> Result<()> {
    let path = attribute(device, RESERVED);
    let text = (bytes / BLOCK_BYTES).to_string();
    Ok(fs::write(&path, text).explain("write", || path.display().to_string())?)
}

/// What the kernel reserves by itself of a file system of this size (`ext4_calculate_resv_clusters`).
pub fn usual_reserve(bytes: u64) -> u64 {
    (bytes / BLOCK_BYTES / 50).min(4096) * BLOCK_BYTES
}

/// Blocks that no file may take.
const RESERVED: &str = "reserved_clusters";

fn attribute(device: &LoopDevice, name: &str) -> PathBuf {
    Path::new("/sys/fs/ext4").join(device.path().file_name().unwrap_or_default()).join(name)
}

/// Reads an attribute of a mounted file system; `None` if it is not mounted any more.
fn number(device: &LoopDevice, name: &str) -> Result<Option<u64>> {
    let path = attribute(device, name);
    let text = match fs::read_to_string(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        text => text.explain("read", || path.display().to_string())?,
    };
    let number = text.trim().parse().map_err(|_| Ext4Error::Damaged("its blocks"))?;
    Ok(Some(number))
}

/// Grows a mounted file system to the size of its device. EPERM without CAP_SYS_RESOURCE.
pub fn grow_mounted(mount: BorrowedFd<'_>, bytes: u64) -> Result<()> {
    let mut blocks = bytes / BLOCK_BYTES;
    request(mount, "ioctl(EXT4_IOC_RESIZE_FS)", EXT4_IOC_RESIZE_FS, &mut blocks)
}

/// Grows a file system that is not mounted, and its file. Blocks that are overwritten are saved in `saved`, which
/// does not exist: where that file remains, the change was interrupted ([`undo`]).
pub fn grow(path: &Path, image: &File, bytes: u64, saved: &Path) -> Result<()> {
    // Replays the journal, and is required by resize2fs. Status 1: errors were corrected.
    match run("e2fsck", &["-f", "-p"], (path, image), &[])? {
        (0 | 1, _) => {}
        (_, message) => return Err(Ext4Error::Failed { program: "e2fsck", message }),
    }
    let saved = saved.to_string_lossy();
    let blocks = (bytes / BLOCK_BYTES).to_string();
    run_or_fail("resize2fs", &["-z", &saved], (path, image), &[&blocks])?;
    image.sync_all().explain("fsync", || path.display().to_string())?;
    Ok(())
}

/// Undoes an interrupted [`grow`] where it has begun, also of a mounted file system whose host went down, and gives the
/// file the size of its file system.
pub fn undo(path: &Path, image: &File, saved: &Path) -> Result<()> {
    let mut message = String::new();
    if saved.exists() {
        // Where resize2fs has saved no whole block yet there is nothing to undo, which e2undo takes for an error:
        // the check finds every other one.
        let text = saved.to_string_lossy();
        message = run("e2undo", &["-f", &text], (path, image), &[])?.1;
    }
    // ORDER: the size is right only when the journal was replayed.
    let (status, checked) = run("e2fsck", &["-f", "-p"], (path, image), &[])?;
    if status > 1 {
        let message = [message, checked].join(" ");
        return Err(Ext4Error::Failed { program: "e2fsck", message });
    }
    let bytes = superblock(image)?.bytes;
    image.set_len(bytes).explain("ftruncate", || path.display().to_string())?;
    image.sync_all().explain("fsync", || path.display().to_string())?;
    match fs::remove_file(saved) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Ok(Err(e).explain("unlink", || saved.display().to_string())?)
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::loop_device;

    struct Scratch {
        dir: tempfile::TempDir,
    }

    impl Scratch {
        fn new(bytes: u64, inodes: Option<u32>) -> Self {
            let it = Self { dir: tempfile::tempdir().unwrap() };
            let image = File::create_new(it.path()).unwrap();
            image.set_len(bytes).unwrap();
            make(&image, inodes).unwrap();
            it
        }

        fn path(&self) -> PathBuf {
            self.dir.path().join("drive")
        }

        fn saved(&self) -> PathBuf {
            self.dir.path().join("saved")
        }

        /// Opens and locks it.
        fn image(&self) -> File {
            let image = File::options().read(true).write(true).open(self.path()).unwrap();
            let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
            while !loop_device::lock(&image).unwrap() {
                assert!(std::time::Instant::now() < until, "the file is in use");
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            image
        }

        fn mount(&self) -> OwnedFd {
            let device = loop_device::attach(&self.image(), "test").unwrap();
            mount(device.path(), MountOptions { discard: true, volatile: false }).unwrap()
        }

        fn write(&self, name: &str, bytes: usize) {
            let mount = self.mount();
            let file =
                rustix::fs::openat(&mount, name, OFlags::CREATE | OFlags::WRONLY, Mode::RWXU)
                    .unwrap();
            std::io::Write::write_all(&mut File::from(file), &vec![7; bytes]).unwrap();
        }

        fn check(&self) -> i32 {
            run("e2fsck", &["-f", "-n"], (&self.path(), &self.image()), &[]).unwrap().0
        }
    }

    #[test]
    fn root_file_system_has_its_size_and_files_and_gives_back_their_place() {
        use std::os::unix::fs::MetadataExt;
        let it = Scratch::new(64 << 20, Some(1000));
        let found = superblock(&it.image()).unwrap();
        assert_eq!((found.bytes, found.needs_recovery), (64 << 20, false));
        assert!((1000..1100).contains(&found.inodes), "{}", found.inodes);
        let used = || fs::metadata(it.path()).unwrap().blocks() * 512;
        let before = used();
        assert!(before < 1 << 20, "{before}");
        it.write("a", 8 << 20);
        assert!(it.image().metadata().is_ok() && used() > 8 << 20);
        let mount = it.mount();
        rustix::fs::unlinkat(&mount, "a", rustix::fs::AtFlags::empty()).unwrap();
        assert!(
            superblock(&File::open(it.path()).unwrap()).unwrap().needs_recovery,
            "it is mounted"
        );
        drop(mount);
        drop(it.image());
        assert!(used() < 2 << 20, "{} of {before}", used());
        it.write("b", 8 << 20);
        let mount = it.mount();
        trim(mount.as_fd()).unwrap();
        drop(mount);
        assert_eq!(it.check(), 0);
    }

    #[test]
    fn root_reserved_space_is_taken_by_no_file() {
        let it = Scratch::new(64 << 20, None);
        let (image, mount) = (File::open(it.path()).unwrap(), it.mount());
        let device = loop_device::find(&image).unwrap().expect("it is mounted");
        let before = space(&device).unwrap().expect("it is mounted");
        assert_eq!(before.reserved_bytes, usual_reserve(64 << 20));
        assert!((50 << 20..64 << 20).contains(&before.free_bytes), "{before:?}");
        let write = |bytes: usize| {
            let flags = OFlags::CREATE | OFlags::TRUNC | OFlags::WRONLY;
            let file = rustix::fs::openat(&mount, "a", flags, Mode::RWXU).unwrap();
            std::io::Write::write_all(&mut File::from(file), &vec![7; bytes])
        };
        reserve(&device, before.free_bytes - (2 << 20)).unwrap();
        let full = write(4 << 20).unwrap_err();
        assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
        write(1 << 20).unwrap();
        let after = space(&device).unwrap().expect("it is mounted");
        assert!(after.free_bytes <= before.free_bytes - (1 << 20), "{before:?} {after:?}");
        reserve(&device, before.reserved_bytes).unwrap();
        write(4 << 20).unwrap();
        drop(mount);
        assert_eq!(space(&device).unwrap(), None, "its file system is gone");
    }

    #[test]
    fn root_file_system_grows_and_interrupted_growth_is_undone() {
        let it = Scratch::new(64 << 20, None);
        it.write("a", 3 << 20);
        grow(&it.path(), &it.image(), 256 << 20, &it.saved()).unwrap();
        assert_eq!(superblock(&it.image()).unwrap().bytes, 256 << 20);
        // As after a kill at the end, and, with a part of the saved blocks, in the middle.
        undo(&it.path(), &it.image(), &it.saved()).unwrap();
        assert!(!it.saved().exists());
        assert_eq!(it.image().metadata().unwrap().len(), 64 << 20);
        assert_eq!(it.check(), 0);
        // As after a kill before the first block was saved, and before that.
        for begun in [true, false] {
            it.image().set_len(128 << 20).unwrap();
            if begun {
                fs::write(it.saved(), b"").unwrap();
            }
            undo(&it.path(), &it.image(), &it.saved()).unwrap();
            assert_eq!(it.image().metadata().unwrap().len(), 64 << 20);
            assert_eq!(it.check(), 0);
        }
        let mount = it.mount();
        let size = rustix::fs::statat(&mount, "a", rustix::fs::AtFlags::empty()).unwrap().st_size;
        assert_eq!(size, 3 << 20);
    }

    #[test]
    fn damaged_superblock_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        fs::write(&path, vec![0; 4096]).unwrap();
        assert!(matches!(superblock(&File::open(&path).unwrap()), Err(Ext4Error::Damaged(_))));
        fs::write(&path, b"short").unwrap();
        assert!(matches!(superblock(&File::open(&path).unwrap()), Err(Ext4Error::Call(_))));
    }
}
