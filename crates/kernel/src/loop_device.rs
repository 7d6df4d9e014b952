//! Loop devices: a file as a block device (loop(4)).
//!
//! **One device per file.** Two devices of one file are two page caches, and a file system on both of them is soon
//! damaged. A process therefore takes the lock of a file (flock(2)) before it attaches the file. The device keeps the
//! open file that it was given, and a lock belongs to the open file: the file stays locked until the device is gone,
//! whatever becomes of the process that attached it. Where the lock is held, [`find`] finds the device.
//!
//! **Nothing to sweep.** Devices are made with LO_FLAGS_AUTOCLEAR: a device detaches its file when its last user has
//! closed it, and a mounted file system is a user.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use crate::Errno;
use crate::error::{CallError, Explain, Result};

const LOOP_CONFIGURE: libc::c_ulong = 0x4c0a;
const LOOP_GET_STATUS64: libc::c_ulong = 0x4c05;
const LOOP_SET_CAPACITY: libc::c_ulong = 0x4c07;
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4c82;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;
/// LIMIT: how often another process may take the device that was free a moment ago.
const TRIES: usize = 256;

/// `struct loop_info64` (linux/loop.h).
#[repr(C)]
#[derive(Clone, Copy)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct Setup {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

const NO_INFO: Info = Info {
    device: 0,
    inode: 0,
    rdevice: 0,
    offset: 0,
    size_limit: 0,
    number: 0,
    encrypt_type: 0,
    encrypt_key_size: 0,
    flags: 0,
    file_name: [0; 64],
    crypt_name: [0; 64],
    encrypt_key: [0; 32],
    init: [0; 2],
};

/// A device with a file, which stays attached at least as long as this exists.
#[derive(Debug)]
pub struct LoopDevice {
    device: File,
    path: PathBuf,
}

impl LoopDevice {
    /// Its device node.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its device number, in the encoding of stat(2).
    pub(crate) fn number(&self) -> Result<u64> {
        let stat = rustix::fs::fstat(&self.device);
        Ok(stat.explain("fstat", || self.path.display().to_string())?.st_rdev)
    }

    /// Takes over the size of a file that has grown.
    pub fn update_size(&self) -> Result<()> {
        // SAFETY: the request takes no argument.
        let done = unsafe { libc::ioctl(self.device.as_raw_fd(), LOOP_SET_CAPACITY) };
        answer(done).explain("ioctl(LOOP_SET_CAPACITY)", || self.path.display().to_string())?;
        Ok(())
    }
}

fn answer(result: libc::c_int) -> std::result::Result<libc::c_int, Errno> {
    match result {
        n if n >= 0 => Ok(n),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

/// Takes the lock of a file without waiting. Returns false while a device has the file, or another process is
/// about to attach it.
pub fn lock(file: &File) -> Result<bool> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(e) => Err(e).explain("flock", || "the file of a loop device".into()),
    }
}

/// Attaches a file that the caller has locked ([`lock`]); `name` is shown by losetup(8). Reads and writes bypass the
/// page cache of the file where its file system supports that, so data is not cached twice. KERNEL(5.8).
pub fn attach(file: &File, name: &str) -> Result<LoopDevice> {
    let control = "/dev/loop-control";
    let open = File::options().read(true).write(true).open(control);
    let free = open.explain("open", || control.into())?;
    let mut file_name = [0; 64];
    for (to, from) in file_name[..63].iter_mut().zip(name.bytes()) {
        *to = from;
    }
    for _ in 0..TRIES {
        // SAFETY: the request takes no argument.
        let number = unsafe { libc::ioctl(free.as_raw_fd(), LOOP_CTL_GET_FREE) };
        let number = answer(number).explain("ioctl(LOOP_CTL_GET_FREE)", || control.into())?;
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device = match File::options().read(true).write(true).open(&path) {
            // Another process has removed it, or clears it now.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENXIO | libc::ENODEV)) => continue,
            device => device.explain("open", || path.display().to_string())?,
        };
        let flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO;
        let setup = Setup {
            fd: file.as_raw_fd() as u32,
            // That of the disk below.
            block_size: 0,
            info: Info { flags, file_name, ..NO_INFO },
            reserved: [0; 8],
        };
        // SAFETY: the request reads a `struct loop_config`, which `setup` is.
        let done = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const setup) };
        match answer(done) {
            Ok(_) => return Ok(LoopDevice { device, path }),
            Err(Errno::BUSY) => {} // another process was faster
            Err(e) => {
                return Err(e).explain("ioctl(LOOP_CONFIGURE)", || path.display().to_string());
            }
        }
    }
    Err(CallError::new("ioctl(LOOP_CONFIGURE)", "every free device".into(), libc::EBUSY))
}

/// Finds the device that has a file; `None` if there is none, or it is being attached or detached.
pub fn find(file: &File) -> Result<Option<LoopDevice>> {
    let stat = rustix::fs::fstat(file.as_fd()).explain("fstat", || "a file".into())?;
    for path in attached()? {
        if let Some((device, its)) = open(&path)
            && its == (stat.st_dev, stat.st_ino)
        {
            return Ok(Some(device));
        }
    }
    Ok(None)
}

/// The devices that have a file.
fn attached() -> Result<Vec<PathBuf>> {
    let all = fs::read_dir("/sys/block").explain("open", || "/sys/block".into())?;
    let path = |entry: fs::DirEntry| {
        let name = entry.file_name();
        let name = name.to_str().filter(|name| name.starts_with("loop"))?;
        let has_file = entry.path().join("loop/backing_file").exists();
        has_file.then(|| Path::new("/dev").join(name))
    };
    Ok(all.flatten().filter_map(path).collect())
}

/// The path of each device with its file, which is given by the device of its file system and its inode.
pub fn all() -> Result<HashMap<(u64, u64), PathBuf>> {
    let file = |path: PathBuf| open(&path).map(|(_, file)| (file, path));
    Ok(attached()?.into_iter().filter_map(file).collect())
}

/// Opens a device if it has this file.
pub fn open_of(path: &Path, file: (u64, u64)) -> Option<LoopDevice> {
    open(path).filter(|(_, its)| *its == file).map(|(device, _)| device)
}

/// Opens a device and reads which file it has. Only for reading: after a close of one that could be written, udev
/// looks for a file system on it.
fn open(path: &Path) -> Option<(LoopDevice, (u64, u64))> {
    // It may be cleared just now.
    let device = File::open(path).ok()?;
    let mut info = NO_INFO;
    // SAFETY: the request writes a `struct loop_info64`, which `info` is.
    let read = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64, &raw mut info) };
    let file = (info.device, info.inode);
    answer(read).is_ok().then(|| (LoopDevice { device, path: path.to_owned() }, file))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn root_file_has_one_device_which_ends_with_its_last_user() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        fs::write(&path, vec![0; 1 << 20]).unwrap();
        let open = || File::options().read(true).write(true).open(&path).unwrap();
        let (first, second) = (open(), open());
        assert!(lock(&first).unwrap());
        let device = attach(&first, "test").unwrap();
        drop(first);
        assert!(!lock(&second).unwrap(), "the device has the lock");
        let found = find(&second).unwrap().expect("the device");
        assert_eq!(found.path(), device.path());
        drop(device);
        assert!(!lock(&second).unwrap(), "it has another user");
        second.set_len(2 << 20).unwrap();
        found.update_size().unwrap();
        let name = found.path().file_name().unwrap().to_owned();
        let size = fs::read_to_string(Path::new("/sys/block").join(name).join("size")).unwrap();
        assert_eq!(size.trim(), "4096", "sectors");
        drop(found);
        let until = Instant::now() + Duration::from_secs(30);
        while !lock(&second).unwrap() {
            assert!(Instant::now() < until, "the device is not gone");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(find(&second).unwrap().is_none());
    }
}
