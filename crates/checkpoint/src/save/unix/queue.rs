//! Receive queues of unix sockets, read without consuming them, and credentials of peers and senders.

use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::call;
use dormouse_record::{Bytes, PeerCredentials, UnixMessage};
use rustix::io::Errno;

use crate::inject::peek::{Peeked, before_last_write, message};
use crate::look::ids::Maps;
use crate::save::refusal::Reason;
use crate::save::seen::Seen;

/// Translates credentials to those that the container would see.
pub(super) struct Translator<'s> {
    pub(super) tree: &'s [Seen],
    pub(super) maps: &'s Maps,
}

impl Translator<'_> {
    /// From pid, user and group outside. `None` if the kernel has none; without a pid if the
    /// process is outside.
    pub(super) fn of(&self, [pid, uid, gid]: [u32; 3]) -> Option<PeerCredentials> {
        let (uid, gid) = self.maps.owner(uid, gid);
        let is_known = pid != 0 && uid != u32::MAX && gid != u32::MAX;
        let pid = self.tree.iter().find(|seen| seen.pid == pid).map(|seen| seen.inner);
        is_known.then_some(PeerCredentials { pid, uid, gid, groups: Vec::new() })
    }

    /// The answers of SO_PEERCRED and SO_PEERGROUPS.
    pub(super) fn of_peer(&self, socket: &OwnedFd) -> Result<Option<PeerCredentials>, Reason> {
        /// LIMIT: bytes of groups, of which there are 65,536 at most.
        const GROUPS_BYTES_MAX: usize = 4 << 16;
        const SO_PEERGROUPS: i32 = 59;
        let failed = |e: Errno| format!("a unix socket without readable peer credentials: {e}");
        let mut bytes = [0; 12];
        call::socket_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, &mut bytes)
            .map_err(failed)?;
        let word =
            |n: usize| bytes[n * 4..][..4].iter().rev().fold(0, |w, b| w << 8 | u32::from(*b));
        let Some(mut credentials) = self.of([word(0), word(1), word(2)]) else { return Ok(None) };
        let mut groups = vec![0; 256];
        let groups = loop {
            let buffer = &mut groups[..];
            match call::socket_option(socket.as_fd(), libc::SOL_SOCKET, SO_PEERGROUPS, buffer) {
                Err(Errno::RANGE) if groups.len() < GROUPS_BYTES_MAX => {
                    groups.resize(GROUPS_BYTES_MAX, 0);
                }
                Err(Errno::NODATA) => break &groups[..0],
                got => break &groups[..got.map_err(failed)?],
            }
        };
        let groups = groups.chunks_exact(4).filter_map(|g| g.try_into().ok());
        let groups = groups.map(|g| self.maps.owner(0, u32::from_ne_bytes(g)).1);
        credentials.groups = groups.filter(|gid| *gid != u32::MAX).collect();
        Ok(Some(credentials))
    }
}

/// A message and its in-flight descriptors.
pub(super) type Received = (UnixMessage, Vec<OwnedFd>);

/// Reads the receive queue without consuming it. `None` if a message carries anything but data and
/// descriptors. A socket that is reset has an error that a read behind its data would take.
pub(super) fn queue(
    socket: &OwnedFd,
    (socket_type, is_reset): (i32, bool),
    translator: &Translator<'_>,
) -> Result<Option<Vec<Received>>, Errno> {
    let before = call::int_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_PEEK_OFF)?;
    let peek_at =
        |offset| call::set_int_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_PEEK_OFF, offset);
    let waiting = if is_reset { Some(rustix::io::ioctl_fionread(socket)?) } else { None };
    peek_at(0)?;
    let mut all: Vec<Received> = Vec::new();
    let mut buffer = vec![0; 1 << 20];
    let mut offset = 0;
    let result = loop {
        if waiting == Some(offset as u64) {
            break Ok(Some(all));
        }
        match message(socket.as_fd(), &mut buffer) {
            // A stream that was never connected, or a socket without a peer.
            Err(Errno::AGAIN | Errno::INVAL | Errno::NOTCONN) => break Ok(Some(all)),
            Err(e) => break Err(e),
            Ok(Peeked { is_whole: false, .. }) => break Ok(None),
            Ok(got) if got.bytes == 0 && socket_type != libc::SOCK_DGRAM => break Ok(Some(all)),
            // The descriptors may belong to data behind this.
            Ok(got) if got.bytes == buffer.len() && !got.descriptors.is_empty() => break Ok(None),
            // A read of an empty message does not advance, and would repeat for ever.
            Ok(got) if got.bytes == 0 => break Ok(None),
            Ok(got) => {
                let data = &buffer[..got.bytes];
                let is_stream = socket_type == libc::SOCK_STREAM;
                // The read ends with the write that carried the descriptors, and includes the
                // writes before it.
                let found = match is_stream && !got.descriptors.is_empty() {
                    true => peek_at(offset)
                        .and_then(|()| before_last_write(socket.as_fd(), &mut vec![0; got.bytes])),
                    false => Ok(0),
                };
                let alone = match found {
                    Ok(alone) => alone,
                    Err(e) => break Err(e),
                };
                let is_datagram = socket_type == libc::SOCK_DGRAM;
                let from = if is_datagram { name_of(&got.from) } else { &[] };
                let message = |data: &[u8]| UnixMessage {
                    data: Bytes(data.to_vec()),
                    from: Bytes(from.to_vec()),
                    descriptors: Vec::new(),
                    credentials: got.sender.and_then(|sender| translator.of(sender)),
                };
                if alone > 0 {
                    all.push((message(&data[..alone]), Vec::new()));
                }
                all.push((message(&data[alone..]), got.descriptors));
                offset += got.bytes as i32;
                if is_stream && let Err(e) = peek_at(offset) {
                    break Err(e);
                }
            }
        }
    };
    peek_at(before)?;
    result
}

/// The bytes of the sender's name of a message.
fn name_of(from: &[u8]) -> &[u8] {
    match from.first() {
        Some(0) => from,
        _ => from.split(|b| *b == 0).next().unwrap_or_default(),
    }
}
