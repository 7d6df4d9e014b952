//! The listening socket of a keeper.

use std::os::fd::{AsRawFd, OwnedFd};

use dormouse_launch::keeper::SOCKET;
use rustix::fs::{AtFlags, Mode};
use rustix::io::Errno;
use rustix::net::SocketFlags;

use crate::{Failed, Step};

/// Creates the listening socket of a runtime directory. The caller holds the lock.
pub fn listen(run: &OwnedFd) -> Result<OwnedFd, Failed> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket_with};
    match rustix::fs::unlinkat(run, SOCKET, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(source) => return Err(Failed { step: "remove an old socket", source }),
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let sock = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .step("make a socket")?;
    // A name of 108 bytes at most fits into an address; this one is always short.
    let path = format!("/proc/self/fd/{}/{SOCKET}", run.as_raw_fd());
    let address = SocketAddrUnix::new(path).step("name the socket")?;
    let before = rustix::process::umask(Mode::from_raw_mode(0o177));
    let bound = bind(&sock, &address);
    rustix::process::umask(before);
    bound.step("bind the socket")?;
    listen(&sock, 1024).step("listen")?;
    Ok(sock)
}
