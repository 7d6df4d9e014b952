//! Terminals: sends the master of a terminal to the caller's socket (`--console-socket`). Also the
//! runtime's own sockets with a path.

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use dormouse_launch::wire;
use rustix::fs::{Mode, OFlags};
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect,
    listen as listen_on, socket_with,
};

use crate::error::{Error, Result};
use crate::store::short_path;

/// Checks that a terminal and a destination of its master are given together.
pub(crate) fn check(terminal: bool, socket: Option<&Path>, kept: bool) -> Result<()> {
    match (terminal, socket) {
        (true, None) if !kept => Err(Error::Usage(
            "cannot allocate tty if runc will detach without setting console socket: \
             process.terminal is true, so --console-socket is needed"
                .into(),
        )),
        (false, Some(_)) => Err(Error::Usage(
            "cannot use console socket if runc will not detach or allocate tty: process.terminal \
             is false"
                .into(),
        )),
        _ => Ok(()),
    }
}

/// Leaves the end of a line to the terminal that the bytes are copied to: the container's own adds no
/// carriage return, as with runc.
pub(crate) fn leave_line_ends(master: &OwnedFd) -> Result<()> {
    let set = || {
        let mut termios = rustix::termios::tcgetattr(master)?;
        termios.output_modes.remove(rustix::termios::OutputModes::ONLCR);
        rustix::termios::tcsetattr(master, rustix::termios::OptionalActions::Now, &termios)
    };
    set().map_err(|e| Error::file("set up", "the terminal")(e.into()))
}

fn open_dir(path: &Path) -> std::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

/// Returns the address of a socket, through a descriptor of its directory: an address holds 108
/// bytes.
fn address(path: &Path) -> std::io::Result<(OwnedFd, SocketAddrUnix)> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    let dir = open_dir(dir.unwrap_or(Path::new(".")))?;
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.ok_or(rustix::io::Errno::INVAL)?;
    let address = SocketAddrUnix::new(short_path(&dir, name))?;
    Ok((dir, address))
}

fn socket(kind: SocketType) -> std::io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?)
}

/// Sends the master of a terminal to a listening stream socket, as runc does.
pub(crate) fn send(path: &Path, master: OwnedFd) -> Result<()> {
    send_fd(path, b"/dev/ptmx", master.as_fd()).map_err(Error::file("send the terminal to", path))
}

/// Sends the pidfd of a new process to a listening stream socket (`--pidfd-socket`), with the word that
/// runc sends: `standard` for a container's first process, `setns` for a later one.
pub(crate) fn send_pidfd(path: &Path, word: &str, pidfd: BorrowedFd<'_>) -> Result<()> {
    send_fd(path, word.as_bytes(), pidfd).map_err(Error::file("send the pidfd to", path))
}

fn send_fd(path: &Path, word: &[u8], fd: BorrowedFd<'_>) -> std::io::Result<()> {
    let (_dir, address) = address(path)?;
    let socket = socket(SocketType::STREAM)?;
    connect(&socket, &address)?;
    wire::send(&socket, word, &[fd], SendFlags::empty())?;
    Ok(())
}

/// Makes a listening socket in a directory of the runtime, for root only.
pub(crate) fn listen(dir: &Path, name: &str) -> Result<OwnedFd> {
    let path = dir.join(name);
    let make = || -> std::io::Result<OwnedFd> {
        let (_dir, address) = address(&path)?;
        let socket = socket(SocketType::SEQPACKET)?;
        bind(&socket, &address)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        listen_on(&socket, 1)?;
        Ok(socket)
    };
    make().map_err(Error::file("listen at", &path))
}

/// Connects to such a socket; `None` if no process listens any more.
pub(crate) fn call(dir: &Path, name: &str) -> Result<Option<OwnedFd>> {
    let path = dir.join(name);
    let connect_to = || -> std::io::Result<OwnedFd> {
        let (_dir, address) = address(&path)?;
        let socket = socket(SocketType::SEQPACKET)?;
        connect(&socket, &address)?;
        Ok(socket)
    };
    match connect_to() {
        Err(e)
            if matches!(
                e.kind(),
                std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused
            ) =>
        {
            Ok(None)
        }
        other => other.map(Some).map_err(Error::file("connect to", path)),
    }
}

/// Sends a seccomp listener with the state of its container to the process that serves it.
pub(crate) fn send_listener(path: &Path, state: &[u8], listener: OwnedFd) -> Result<()> {
    let send = || -> std::io::Result<()> {
        let (_dir, address) = address(path)?;
        let socket = socket(SocketType::STREAM)?;
        connect(&socket, &address)?;
        // ORDER: the descriptor goes with the first bytes; a long state follows.
        let (first, rest) = state.split_at(state.len().min(4096));
        wire::send(&socket, first, &[listener.as_fd()], SendFlags::empty())?;
        std::fs::File::from(socket).write_all(rest)
    };
    send().map_err(Error::file("send the listener: failed to connect with seccomp agent", path))
}
