//! Names of unix sockets: the paths are found from the root of the first process.

use std::os::fd::AsFd;
use std::path::Path;

use dormouse_record::{Bytes, UnixFile, UnixName};
use rustix::fs::{FileType, Stat};
use rustix::net::{SocketType, sockopt};

use super::table::Entry;
use crate::look::file;
use crate::look::ids::Maps;
use crate::save::file::covered;
use crate::save::known::socket::Socket;
use crate::save::refusal::Reason;

/// The name of a socket, and the device of its file.
pub(super) fn name(
    socket: &Socket,
    entry: &Entry,
) -> Result<(Option<UnixName>, Option<u64>), Reason> {
    let bytes = match entry.name.first() {
        None => return Ok((None, None)),
        Some(0) => entry.name.clone(),
        // The kernel counts the NUL at the end of a path.
        Some(_) => entry.name.split(|b| *b == 0).next().unwrap_or_default().to_vec(),
    };
    let mut name = UnixName { bytes: Bytes(bytes), directory: None, file: None, inherited: false };
    if name.bytes.0[0] == 0 {
        return Ok((Some(name), None));
    }
    let path = name.path().ok_or("a unix socket with a path that is not UTF-8")?.to_owned();
    let whole = if path.starts_with('/') {
        path.clone()
    } else {
        if !socket.directory.starts_with('/') || socket.directory.ends_with(" (deleted)") {
            return Err(format!("a unix socket named '{path}' in a removed directory"));
        }
        name.directory = Some(socket.directory.clone());
        format!("{}/{path}", socket.directory)
    };
    // A file that has replaced it belongs to another socket.
    let own = |stat: &Stat| {
        FileType::from_raw_mode(stat.st_mode) == FileType::Socket
            && entry.file == Some(stat.st_ino as u32)
    };
    let look = |pid| file::lookup(pid, &whole).and_then(rustix::fs::fstat).ok().filter(own);
    let found = look(socket.first);
    if found.is_none() && look(socket.pid).is_some() {
        let why = format!("a unix socket bound to '{whole}' below another root, not saved yet");
        return Err(why);
    }
    let mut found = found;
    if let (None, Some(directory)) = (found, name.directory.clone()) {
        // Its process has changed its directory since: further down, as most do.
        for above in Path::new(&directory).ancestors().skip(1).filter_map(Path::to_str) {
            let other = format!("{}/{path}", above.trim_end_matches('/'));
            let look = file::lookup(socket.first, &other).and_then(rustix::fs::fstat);
            if let Some(stat) = look.ok().filter(own) {
                found = Some(stat);
                name.directory = Some(above.to_owned());
                break;
            }
        }
        if found.is_none() && is_called_by_name(socket, entry) && !is_removed(socket) {
            let why =
                format!("a unix socket bound to the relative path {name}, which is not found");
            return Err(format!("{why} from the directory of its process, not saved yet"));
        }
    }
    if found.is_none() && !is_removed(socket) {
        let file = dormouse_kernel::call::bound_file(socket.copy.as_fd()).ok();
        let covered = file.and_then(|file| covered(socket.first, &whole, file.as_fd()));
        return Err(match covered {
            Some(why) => format!("a unix socket bound to {why}"),
            None => format!(
                "a unix socket bound to '{whole}', whose file has another name now, not saved"
            ),
        });
    }
    let device = found.map(|stat| stat.st_dev);
    name.file = found.map(|stat| {
        let (uid, gid) = Maps::read(socket.first).owner(stat.st_uid, stat.st_gid);
        UnixFile { mode: stat.st_mode & 0o777, uid, gid }
    });
    Ok((Some(name), device))
}

/// Whether the file of a socket has no name any more. A file that was renamed, or is in a renamed directory, is called
/// by its new name.
fn is_removed(socket: &Socket) -> bool {
    let file = dormouse_kernel::call::bound_file(socket.copy.as_fd());
    file.is_ok_and(|file| rustix::fs::fstat(&file).is_ok_and(|stat| stat.st_nlink == 0))
}

/// Whether peers use its address: a listener or a datagram socket.
fn is_called_by_name(socket: &Socket, entry: &Entry) -> bool {
    let kind = sockopt::socket_type(&socket.copy);
    entry.listens || kind.is_ok_and(|kind| kind == SocketType::DGRAM)
}
