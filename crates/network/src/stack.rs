//! Working in another network stack: threads that join it.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use dormouse_kernel::CallError;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::thread::LinkNameSpaceType;

use crate::error::{Error, Result};

/// Runs `work` on a thread inside the network namespace. Processes it spawns are inside, too.
pub(crate) fn inside<T: Send>(
    netns: BorrowedFd<'_>,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    let visit = move || {
        rustix::thread::move_into_link_name_space(netns, Some(LinkNameSpaceType::Network))
            .map_err(Error::errno("enter the network namespace", "setns"))?;
        work()
    };
    std::thread::scope(|scope| match scope.spawn(visit).join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

/// Sets a sysctl of this thread's stack: a path below `/proc/sys`.
pub(crate) fn sysctl(path: &str, value: &str) -> Result<()> {
    let path = Path::new("/proc/sys").join(path);
    std::fs::write(&path, value).map_err(Error::file("write", path))
}

/// The same for a value that may be refused or missing without harm.
pub(crate) fn sysctl_if_there(path: &str, value: &str) {
    let _ = sysctl(path, value); // the kernel was built without it
}

/// Returns the cookie of this thread's stack, which never changes and is never reused.
pub(crate) fn cookie() -> Result<u64> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(Error::errno("make a socket", "socket"))?;
    dormouse_bpf::call::netns_cookie(socket.as_fd())
        .map_err(|e: CallError| Error::Step("read the cookie of the network namespace", e))
}

/// Sets the loopback device of this thread's stack up: one message of rtnetlink(7), because the
/// event loop of the library would cost more than the rest of making a stack.
pub(crate) fn loopback_up() -> Result<()> {
    const NEW_LINK: u16 = 16;
    const REQUEST_ACK: u16 = 1 | 4;
    const UP: u32 = 1;
    let step = "set the loopback device up";
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        None, // 0: NETLINK_ROUTE
    )
    .map_err(Error::errno(step, "socket"))?;
    let mut message = Vec::with_capacity(32);
    message.extend(32u32.to_ne_bytes()); // nlmsghdr: length, type, flags, sequence, port
    message.extend(NEW_LINK.to_ne_bytes());
    message.extend(REQUEST_ACK.to_ne_bytes());
    message.extend([0; 8]);
    message.extend([0; 4]); // ifinfomsg: family, type, index, flags, which flags
    message.extend(1i32.to_ne_bytes());
    message.extend(UP.to_ne_bytes());
    message.extend(UP.to_ne_bytes());
    rustix::io::write(&socket, &message).map_err(Error::errno(step, "write"))?;
    let mut answer = [0u8; 64];
    let length = rustix::io::read(&socket, &mut answer).map_err(Error::errno(step, "read"))?;
    // nlmsgerr: a header, then the negative error number, 0 for done.
    let error = answer
        .get(16..20)
        .filter(|_| length >= 20)
        .map_or(-libc_eio(), |b| i32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
    if error == 0 {
        return Ok(());
    }
    Err(Error::Step(step, CallError::new("netlink", "RTM_NEWLINK lo up".into(), -error)))
}

fn libc_eio() -> i32 {
    rustix::io::Errno::IO.raw_os_error()
}
