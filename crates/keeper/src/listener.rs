//! The listening sockets of a keeper.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{AtFlags, Mode};
use rustix::io::Errno;
use rustix::net::SocketFlags;

use crate::{Failed, Step};

/// Removes a socket that an earlier keeper has left in a runtime directory. The caller holds the lock.
pub fn remove(run: &OwnedFd, name: &str) -> Result<(), Failed> {
    match rustix::fs::unlinkat(run, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(source) => Err(Failed { step: "remove an old socket", source }),
    }
}

/// Creates a listening socket in a runtime directory. The caller holds the lock.
pub fn listen(run: &OwnedFd, name: &str) -> Result<OwnedFd, Failed> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket_with};
    remove(run, name)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let sock = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .step("make a socket")?;
    // A name of 108 bytes at most fits into an address; this one is always short.
    let path = format!("/proc/self/fd/{}/{name}", run.as_raw_fd());
    let address = SocketAddrUnix::new(path).step("name the socket")?;
    let before = rustix::process::umask(Mode::from_raw_mode(0o177));
    let bound = bind(&sock, &address);
    rustix::process::umask(before);
    bound.step("bind the socket")?;
    listen(&sock, 1024).step("listen")?;
    Ok(sock)
}
