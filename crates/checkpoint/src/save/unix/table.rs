//! The kernel's table of unix sockets, by sock_diag(7), of a network namespace.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use dormouse_kernel::call::Namespace;
use dormouse_kernel::pidfd;
use rustix::io::Errno;

use crate::save::diag::{self, u32_at};
use crate::save::refusal::Reason;
use crate::stack;

/// A socket as sock_diag(7) reports it.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) listens: bool,
    /// `sun_path`.
    pub(super) name: Vec<u8>,
    /// The inode of the file that it was bound to, the lower half.
    pub(super) file: Option<u32>,
    /// The inode of its peer; 0 is a peer that no process has open.
    pub(super) peer: Option<u32>,
    /// The inodes of the clients of pending connections.
    pub(super) waiting: Vec<u32>,
    /// For a listener: the number of pending connections, and the backlog. Otherwise bytes received
    /// and sent.
    pub(super) queues: (u32, u32),
    pub(super) shut: u8,
}

/// Queries sock_diag(7) for all unix sockets of a process's network namespace.
pub(super) fn query(pid: u32) -> Result<HashMap<u64, Entry>, Reason> {
    let failed = |e: &dyn std::fmt::Display| format!("a unix socket: {e}");
    let handle = pidfd::open(pid).map_err(|e| failed(&e))?;
    let netns = pidfd::namespace(&handle, Namespace::Net).map_err(|e| failed(&e))?;
    query_in(&netns)
}

/// The same for a network namespace.
pub(super) fn query_in(netns: &OwnedFd) -> Result<HashMap<u64, Entry>, Reason> {
    stack::inside_of(netns, dump).map_err(|e| format!("a unix socket: sock_diag: {e}"))
}

fn dump() -> Result<HashMap<u64, Entry>, Errno> {
    /// UDIAG_SHOW_NAME, _VFS, _PEER, _ICONS, _RQLEN.
    const SHOW: u32 = 0x1f;
    // struct unix_diag_req: family, states, inode, what to show, a cookie.
    let mut request = vec![libc::AF_UNIX as u8, 0, 0, 0];
    for word in [u32::MAX, 0, SHOW, u32::MAX, u32::MAX] {
        request.extend(word.to_ne_bytes());
    }
    let mut all = HashMap::new();
    diag::dump(&request, |answer| {
        let (inode, entry) = entry(answer)?;
        all.insert(u64::from(inode), entry);
        Some(())
    })?;
    Ok(all)
}

/// Parses one answer: `struct unix_diag_msg`, attributes.
fn entry(answer: &[u8]) -> Option<(u32, Entry)> {
    const LISTEN: u8 = 10;
    const HEAD_BYTES: usize = 16;
    let mut entry = Entry { listens: *answer.get(2)? == LISTEN, ..Entry::default() };
    let inode = u32_at(answer, 4)?;
    for (kind, value) in diag::attributes(answer.get(HEAD_BYTES..)?)? {
        match kind {
            0 => entry.name = value.to_vec(),
            1 => entry.file = u32_at(value, 0),
            2 => entry.peer = u32_at(value, 0),
            3 => entry.waiting = value.chunks_exact(4).filter_map(|b| u32_at(b, 0)).collect(),
            4 => entry.queues = (u32_at(value, 0)?, u32_at(value, 4)?),
            6 => entry.shut = *value.first()?,
            _ => {}
        }
    }
    Some((inode, entry))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_of_sock_diag_is_read_or_refused() {
        let mut message = vec![0; 16];
        message[2] = 10;
        message[4] = 7;
        let attributes: [(u16, &[u8]); 4] = [
            (0, b"/run/a"),
            (2, &[9, 0, 0, 0]),
            (3, &[1, 0, 0, 0, 2, 0, 0, 0]),
            (4, &[2, 0, 0, 0, 17, 0, 0, 0]),
        ];
        for (kind, value) in attributes {
            message.extend((value.len() as u16 + 4).to_ne_bytes());
            message.extend(kind.to_ne_bytes());
            message.extend(value);
            message.resize(message.len().next_multiple_of(4), 0);
        }
        let expected = Entry {
            listens: true,
            name: b"/run/a".to_vec(),
            peer: Some(9),
            waiting: vec![1, 2],
            queues: (2, 17),
            ..Entry::default()
        };
        assert_eq!(entry(&message), Some((7, expected)));
        // A size beyond the end.
        message[16] = 200;
        assert_eq!(entry(&message), None);
    }
}
