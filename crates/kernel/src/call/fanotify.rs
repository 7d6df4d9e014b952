//! Permission events at the open of a file (fanotify(7)).

use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::check;
use crate::Errno;

/// A group whose events must be answered, for [`fanotify_open_perm`]. Descriptors of events are for reading.
/// EPERM without CAP_SYS_ADMIN. KERNEL(2.6.37)
pub fn fanotify_init() -> Result<OwnedFd, Errno> {
    let flags = libc::FAN_CLASS_CONTENT
        | libc::FAN_CLOEXEC
        | libc::FAN_NONBLOCK
        | libc::FAN_UNLIMITED_QUEUE
        | libc::FAN_UNLIMITED_MARKS;
    let events = libc::O_RDONLY | libc::O_LARGEFILE | libc::O_CLOEXEC;
    // SAFETY: only integers are passed.
    let fd = check(unsafe { libc::syscall(libc::SYS_fanotify_init, flags, events) })?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Requests an event for each open of a file of the file system on which `of` is. Its opener waits for the answer.
/// KERNEL(4.20)
pub fn fanotify_open_perm(group: BorrowedFd<'_>, of: BorrowedFd<'_>) -> Result<(), Errno> {
    mark(group, libc::FAN_MARK_ADD | libc::FAN_MARK_FILESYSTEM, of)
}

/// Leaves out the events of one file, or requests them again.
pub fn fanotify_ignore(
    group: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    is_ignored: bool,
) -> Result<(), Errno> {
    let change = if is_ignored { libc::FAN_MARK_ADD } else { libc::FAN_MARK_REMOVE };
    let flags = libc::FAN_MARK_IGNORED_MASK | libc::FAN_MARK_IGNORED_SURV_MODIFY;
    mark(group, change | flags, file)
}

fn mark(group: BorrowedFd<'_>, flags: u32, of: BorrowedFd<'_>) -> Result<(), Errno> {
    let nothing: *const libc::c_char = std::ptr::null();
    // SAFETY: without a path the mark is for the descriptor.
    check(unsafe {
        libc::syscall(
            libc::SYS_fanotify_mark,
            group.as_raw_fd(),
            flags,
            libc::FAN_OPEN_PERM,
            of.as_raw_fd(),
            nothing,
        )
    })
    .map(drop)
}

/// An open that waits for an answer.
#[derive(Debug)]
pub struct Opening {
    /// The file.
    pub file: OwnedFd,
    /// The opening process, in the pid namespace of the group's maker; 0 if it is not there.
    pub pid: i32,
}

/// Reads the waiting events; none if there is none. An event with an error of the kernel is left out: its opener
/// does not wait.
pub fn fanotify_read(group: BorrowedFd<'_>) -> Result<Vec<Opening>, Errno> {
    const EVENT: usize = size_of::<libc::fanotify_event_metadata>();
    let mut buffer = [0u8; 64 * EVENT];
    let length = match rustix::io::read(group, &mut buffer[..]) {
        Ok(length) => length,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut all = Vec::new();
    let mut rest = &buffer[..length];
    while rest.len() >= EVENT {
        // SAFETY: so many bytes are there, every pattern of bits is a value, and the read is of any alignment.
        let event: libc::fanotify_event_metadata =
            unsafe { std::ptr::read_unaligned(rest.as_ptr().cast()) };
        if event.fd >= 0 {
            // SAFETY: the kernel has made this descriptor for the reader of the event.
            let file = unsafe { OwnedFd::from_raw_fd(event.fd) };
            all.push(Opening { file, pid: event.pid });
        }
        let next = (event.event_len as usize).max(EVENT);
        rest = rest.get(next..).unwrap_or_default();
    }
    Ok(all)
}

/// Lets an open go on. ENOENT if it was answered before.
pub fn fanotify_allow(group: BorrowedFd<'_>, file: BorrowedFd<'_>) -> Result<(), Errno> {
    let answer = libc::fanotify_response { fd: file.as_raw_fd(), response: libc::FAN_ALLOW };
    let mut bytes = [0u8; size_of::<libc::fanotify_response>()];
    bytes[..4].copy_from_slice(&answer.fd.to_ne_bytes());
    bytes[4..].copy_from_slice(&answer.response.to_ne_bytes());
    rustix::io::write(group, &bytes).map(drop)
}
