//! Notifications to the service manager (sd_notify(3)), and the daemon's lines on standard error.

use std::io::Write;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Sends `state` to the service manager, if there is one. A failure is ignored.
pub(crate) fn tell(state: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match path.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&path),
    };
    if let (Ok(address), Ok(socket)) = (address, UnixDatagram::unbound()) {
        let _ = socket.send_to_addr(state.as_bytes(), &address); // the manager may be gone
    }
}

/// Writes one line to standard error; a closed reader is ignored.
pub(crate) fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "dormouse daemon: {}", shown(line));
}

/// Returns a line with control characters in visible form. Reasons contain names of files and programs
/// of containers.
fn shown(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    for c in line.chars() {
        if c.is_control() { text.extend(c.escape_default()) } else { text.push(c) }
    }
    text
}
