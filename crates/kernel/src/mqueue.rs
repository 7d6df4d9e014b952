//! POSIX message queues (mq_overview(7)), for saving and restoring them.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

use crate::Errno;
use crate::call::check;

/// The type of the filesystem that the queues of an ipc namespace are in (statfs(2)).
pub const MAGIC: u64 = 0x1980_0202;

/// Attributes of a queue (mq_getattr(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// Limit on the number of messages.
    pub messages_max: u64,
    /// Limit on the bytes of each.
    pub message_bytes: u64,
    /// Number of messages in the queue.
    pub messages: u64,
}

/// All queues of the ipc namespace of the calling thread: a mount of their filesystem that is
/// nowhere (Linux 5.2).
pub fn directory() -> Result<OwnedFd, Errno> {
    let context = rustix::mount::fsopen("mqueue", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let mount = rustix::mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(&mount, c".", flags, Mode::empty())
}

/// mq_getattr(3).
pub fn attributes(queue: BorrowedFd<'_>) -> Result<Attributes, Errno> {
    let mut found = [0i64; 8];
    let fd = queue.as_raw_fd();
    // SAFETY: the kernel writes one struct mq_attr of eight words, and reads nothing.
    check(unsafe { libc::syscall(libc::SYS_mq_getsetattr, fd, 0usize, found.as_mut_ptr()) })?;
    let [_, messages_max, message_bytes, messages, ..] = found.map(|word| word as u64);
    Ok(Attributes { messages_max, message_bytes, messages })
}

/// Takes the oldest message of the highest priority from a queue that is open O_NONBLOCK: how long
/// it is, and its priority. The buffer has room for the longest.
pub fn receive(queue: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<(usize, u32), Errno> {
    let mut priority = 0u32;
    // SAFETY: pointer and length describe the buffer, the kernel writes one word to the priority,
    // and there is no time limit.
    let length = check(unsafe {
        libc::syscall(
            libc::SYS_mq_timedreceive,
            queue.as_raw_fd(),
            buffer.as_mut_ptr(),
            buffer.len(),
            &raw mut priority,
            0usize,
        )
    })?;
    Ok((length as usize, priority))
}

/// Puts a message into a queue that is open O_NONBLOCK, behind all of its priority.
pub fn send(queue: BorrowedFd<'_>, data: &[u8], priority: u32) -> Result<(), Errno> {
    // SAFETY: pointer and length describe the data, which the kernel only reads; no time limit.
    check(unsafe {
        libc::syscall(
            libc::SYS_mq_timedsend,
            queue.as_raw_fd(),
            data.as_ptr(),
            data.len(),
            priority,
            0usize,
        )
    })
    .map(drop)
}
