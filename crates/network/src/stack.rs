//! Work in another network stack, which a thread visits.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use dormouse_kernel::call::Namespace;
use dormouse_kernel::{CallError, namespace};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::error::{Error, Result};

/// Runs `work` inside the network namespace. Processes it spawns are inside, too.
pub(crate) fn inside<T: Send>(
    netns: BorrowedFd<'_>,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    namespace::visit(netns, Namespace::Net, work)
        .map_err(Error::errno("enter the network namespace", "setns"))?
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
