//! Open descriptors without a number in any process: parked in the queues of sockets.
//!
//! A descriptor that was sent (unix(7), SCM_RIGHTS) and not yet received is an open file without a
//! number, so RLIMIT_NOFILE does not count it. A *bundle* is a group of descriptors with a label. A
//! *lot* is a socket connected to itself, with one queued message that carries all its bundles. A
//! message takes 4 kB of kernel memory, however few descriptors it has (Linux 6.10 and later keep
//! `struct scm_fp_list` as it was allocated), so several containers share one. To add to a lot or
//! take from it, the message is received and the rest is sent again; so a lot is small. No other
//! process can send to it: a connected datagram socket receives from its peer alone.
//!
//! **The vault** ([`crate::vault`]) has a copy of each lot's socket. If this process is killed the
//! queues stay, and the labels identify their contents to the next keeper.
//!
//! In-flight files count against the sender's limit, unless it has CAP_SYS_ADMIN, and against the
//! limit of all other processes of the same user. Therefore they are sent under a separate user id
//! ([`UID`]). The search for cycles among in-flight files visits unix sockets only, and those are
//! few.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dormouse_kernel::call as kernel;
use dormouse_launch::wire;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::call;
use crate::vault::Vault;

/// The real uid for sending: not in use, above a host's own users and below subordinate ids
/// (login.defs(5), SUB_UID_MIN).
const UID: u32 = 99_999;

/// LIMIT: bundles in one lot.
const BUNDLES: usize = 32;
/// LIMIT: descriptors of a lot of several bundles: all are received and sent to take one.
const SHARED: usize = 96;
/// LIMIT: descriptors of a bundle.
pub(crate) const DESCRIPTORS: usize = wire::FDS_PER_MESSAGE;
/// LIMIT: bytes of a message: the labels of its bundles.
const MESSAGE: usize = 4096;
/// The key of a bundle without an owner.
const NOBODYS: u64 = u64::MAX;
/// Bytes before a label: its length (2), and the number of its descriptors.
const HEAD: usize = 3;

/// All parked bundles. Keys are the caller's, and unique.
#[derive(Debug, Default)]
pub(crate) struct Lots {
    lots: HashMap<u32, Lot>,
    /// The lot of each bundle.
    places: HashMap<u64, u32>,
    /// Lots that may have room.
    free: BTreeSet<u32>,
    number: u32,
    vault: Vault,
}

#[derive(Debug)]
struct Lot {
    sock: OwnedFd,
    /// Keys of its bundles and their numbers of descriptors, in the order of the message.
    bundles: Vec<(u64, usize)>,
}

/// A bundle that the last keeper has parked.
#[derive(Debug)]
pub(crate) struct Found<'l> {
    pub(crate) label: &'l [u8],
    pub(crate) fds: &'l [OwnedFd],
}

impl Lots {
    /// Takes over the lots of an earlier keeper from the vault. `name` returns the key for each
    /// bundle; a bundle without a key is released.
    pub(crate) fn restore(&mut self, vault: Vault, mut name: impl FnMut(Found<'_>) -> Option<u64>) {
        self.vault = vault;
        for (number, sock) in self.vault.take_stock() {
            self.number = self.number.max(number.wrapping_add(1));
            match Lot::found(sock, &mut name) {
                Ok(lot) => {
                    self.places.extend(lot.bundles.iter().map(|(key, _)| (*key, number)));
                    if lot.has_room(1) {
                        self.free.insert(number);
                    }
                    self.lots.insert(number, lot);
                }
                // Empty or unreadable: its container is treated as after a reboot.
                Err(_) => self.vault.forget(number),
            }
        }
    }

    /// Readable when the vault has ended.
    pub(crate) fn vault(&self) -> Option<BorrowedFd<'_>> {
        self.vault.watched()
    }

    pub(crate) fn lose_vault(&mut self) {
        self.vault.lose();
    }

    /// Starts a vault if there is none and it is needed. Returns whether it did.
    pub(crate) fn secure(&mut self) -> bool {
        if self.lots.is_empty() || self.vault.is_there() || !self.vault.make() {
            return false;
        }
        for (number, lot) in &self.lots {
            self.vault.keep(*number, lot.sock.as_fd());
        }
        true
    }

    /// Parks copies of some descriptors.
    pub(crate) fn park(
        &mut self,
        key: u64,
        label: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), Errno> {
        let number = match self.with_room(fds.len()) {
            Some(number) => number,
            None => self.make()?,
        };
        let lot = self.lots.get_mut(&number).ok_or(Errno::NOENT)?;
        match lot.put(key, label, fds) {
            // Its labels leave no room for this one; an empty lot has none.
            Err(Errno::MSGSIZE) if !lot.bundles.is_empty() => {
                self.free.remove(&number);
                return self.park(key, label, fds);
            }
            put => put?,
        }
        if !lot.has_room(1) {
            self.free.remove(&number);
        }
        self.places.insert(key, number);
        Ok(())
    }

    /// Returns a lot with room for so many. A lot without room is not tried again until a bundle is
    /// taken out.
    fn with_room(&mut self, count: usize) -> Option<u32> {
        let number = *self.free.first()?;
        if self.lots.get(&number).is_some_and(|lot| lot.has_room(count)) {
            return Some(number);
        }
        self.free.remove(&number);
        None
    }

    /// Creates an empty lot.
    fn make(&mut self) -> Result<u32, Errno> {
        let lot = Lot { sock: call::self_connected()?, bundles: Vec::new() };
        while self.lots.contains_key(&self.number) {
            self.number = self.number.wrapping_add(1);
        }
        self.vault.keep(self.number, lot.sock.as_fd());
        self.lots.insert(self.number, lot);
        self.free.insert(self.number);
        Ok(self.number)
    }

    /// Returns copies of a bundle's descriptors, which stay parked.
    pub(crate) fn copies(&self, key: u64) -> Result<Vec<OwnedFd>, Errno> {
        let number = self.places.get(&key).ok_or(Errno::NOENT)?;
        let lot = self.lots.get(number).ok_or(Errno::NOENT)?;
        let (at, first) = lot.find(key)?;
        let (_, mut fds) = lot.copies()?;
        let count = lot.bundles[at].1;
        if fds.len() < first + count {
            return Err(Errno::BADMSG);
        }
        Ok(fds.drain(first..first + count).collect())
    }

    /// Takes a bundle out, with its descriptors in their original order.
    pub(crate) fn take(&mut self, key: u64) -> Result<Vec<OwnedFd>, Errno> {
        let number = *self.places.get(&key).ok_or(Errno::NOENT)?;
        let lot = self.lots.get_mut(&number).ok_or(Errno::NOENT)?;
        let bundle = lot.take(key)?;
        self.places.remove(&key);
        if lot.bundles.is_empty() {
            self.lots.remove(&number);
            self.free.remove(&number);
            self.vault.forget(number);
        } else {
            self.free.insert(number);
        }
        Ok(bundle)
    }
}

impl Lot {
    /// Takes over a lot of an earlier keeper.
    fn found(
        sock: OwnedFd,
        name: &mut impl FnMut(Found<'_>) -> Option<u64>,
    ) -> Result<Self, Errno> {
        let (labels, fds) = last(&sock)?;
        let (mut labels, mut fds) = (&labels[..], &fds[..]);
        let mut all = Vec::new();
        while !labels.is_empty() {
            let (head, rest) = labels.split_at_checked(HEAD).ok_or(Errno::BADMSG)?;
            let (length, count) =
                (usize::from(head[0]) | usize::from(head[1]) << 8, head[2].into());
            let label;
            (label, labels) = rest.split_at_checked(length).ok_or(Errno::BADMSG)?;
            let own;
            (own, fds) = fds.split_at_checked(count).ok_or(Errno::BADMSG)?;
            all.push(Found { label, fds: own });
        }
        // ORDER: `name` is called when all bundles were read, so each named one is there.
        let bundle = |found: Found<'_>| (found.fds.len(), name(found).unwrap_or(NOBODYS));
        let bundles = all.into_iter().map(bundle).map(|(count, key)| (key, count)).collect();
        let mut lot = Self { sock, bundles };
        while lot.bundles.iter().any(|(key, _)| *key == NOBODYS) && lot.take(NOBODYS).is_ok() {}
        match lot.bundles.is_empty() {
            true => Err(Errno::NOENT),
            false => Ok(lot),
        }
    }

    fn has_room(&self, count: usize) -> bool {
        let held: usize = self.bundles.iter().map(|(_, count)| count).sum();
        self.bundles.is_empty() || self.bundles.len() < BUNDLES && held + count <= SHARED
    }

    fn put(&mut self, key: u64, label: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let (mut labels, held) = self.copies()?;
        let [low, high, ..] = label.len().to_le_bytes();
        labels.extend_from_slice(&[low, high, fds.len() as u8]); // as many as a message has at most
        labels.extend_from_slice(label);
        if labels.len() > MESSAGE {
            return Err(Errno::MSGSIZE);
        }
        let all: Vec<BorrowedFd<'_>> =
            held.iter().map(AsFd::as_fd).chain(fds.iter().copied()).collect();
        self.replace(&labels, &all)?;
        self.bundles.push((key, fds.len()));
        Ok(())
    }

    /// Position of a bundle, and of its first descriptor.
    fn find(&self, key: u64) -> Result<(usize, usize), Errno> {
        let at = self.bundles.iter().position(|(of, _)| *of == key).ok_or(Errno::NOENT)?;
        Ok((at, self.bundles[..at].iter().map(|(_, count)| count).sum()))
    }

    fn take(&mut self, key: u64) -> Result<Vec<OwnedFd>, Errno> {
        let (at, first) = self.find(key)?;
        let (mut labels, mut rest) = self.copies()?;
        if rest.len() != self.bundles.iter().map(|(_, count)| count).sum::<usize>() {
            return Err(Errno::BADMSG);
        }
        let bundle: Vec<OwnedFd> = rest.drain(first..first + self.bundles[at].1).collect();
        let length =
            |at: usize| HEAD + usize::from(labels[at]) + (usize::from(labels[at + 1]) << 8);
        let begin = (0..at).fold(0, |begin, _| begin + length(begin));
        let end = begin + length(begin);
        labels.drain(begin..end);
        self.replace(&labels, &rest.iter().map(AsFd::as_fd).collect::<Vec<_>>())?;
        self.bundles.remove(at);
        Ok(bundle)
    }

    /// Returns the labels of all bundles, and copies of the descriptors.
    fn copies(&self) -> Result<(Vec<u8>, Vec<OwnedFd>), Errno> {
        match self.bundles.is_empty() {
            true => Ok(Default::default()),
            false => peek(&self.sock),
        }
    }

    /// Replaces the contents.
    fn replace(&mut self, labels: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        call::as_user(UID, || {
            if !labels.is_empty() {
                wire::send(&self.sock, labels, fds, SendFlags::DONTWAIT)?;
            }
            if !self.bundles.is_empty() {
                // ORDER: the new message is there. A receive without space for descriptors makes
                // the kernel close them.
                rustix::net::recv(&self.sock, &mut [0; 1], RecvFlags::DONTWAIT)?;
            }
            Ok(())
        })
    }
}

/// Returns the contents of a lot's last message, which stays and is the only one afterwards. A
/// keeper that was killed during [`Lot::replace`] has left two messages.
///
/// ORDER: no message is removed before all were read, and the last one never: a kill at any point
/// loses nothing.
fn last(sock: &OwnedFd) -> Result<(Vec<u8>, Vec<OwnedFd>), Errno> {
    // From the first message, wherever the position of an earlier keeper was; each peek advances to
    // the next.
    look_from(sock, 0)?;
    let mut found = peek(sock)?;
    let mut older = 0;
    loop {
        match peek(sock) {
            Ok(next) => (found, older) = (next, older + 1),
            Err(Errno::AGAIN) => break,
            Err(e) => return Err(e),
        }
    }
    look_from(sock, -1)?;
    for _ in 0..older {
        rustix::net::recv(sock, &mut [0; 1], RecvFlags::DONTWAIT)?;
    }
    Ok(found)
}

/// Sets the peek position (unix(7), SO_PEEK_OFF); -1: always the first message.
fn look_from(sock: &OwnedFd, bytes: i32) -> Result<(), Errno> {
    kernel::set_int_option(sock.as_fd(), libc::SOL_SOCKET, libc::SO_PEEK_OFF, bytes)
}

/// Returns the contents of a lot's first message, which stays. On EMSGSIZE (too few free descriptor
/// numbers) nothing is lost.
fn peek(sock: &OwnedFd) -> Result<(Vec<u8>, Vec<OwnedFd>), Errno> {
    let (mut labels, mut fds) = (vec![0; MESSAGE], Vec::new());
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let length = wire::receive(sock, &mut labels, flags, |fd| fds.push(fd))?;
    labels.truncate(length);
    Ok((labels, fds))
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn send(sock: &OwnedFd, labels: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        wire::send(sock, labels, fds, SendFlags::DONTWAIT)
    }

    #[test]
    fn parked_descriptors_are_taken_out_in_any_order() {
        let mut lots = Lots::default();
        let count = BUNDLES as u64 * 2 + 5;
        for key in 0..count {
            // Two for each, with the key and the key + 1 as values.
            let pair =
                [key + 1, key + 2].map(|n| eventfd(n as u32, EventfdFlags::CLOEXEC).unwrap());
            let label = vec![key as u8; key as usize]; // of none, too
            lots.park(key, &label, &[pair[0].as_fd(), pair[1].as_fd()]).unwrap();
        }
        assert_eq!(lots.lots.len(), 3, "each is full but the last");
        for n in 0..count {
            let key = n * 7 % count; // each once: 7 does not divide the count
            let fds = lots.take(key).unwrap();
            let numbers: Vec<u64> = fds
                .iter()
                .map(|fd| {
                    let mut bytes = [0; 8];
                    rustix::io::read(fd, &mut bytes).unwrap();
                    u64::from_ne_bytes(bytes)
                })
                .collect();
            assert_eq!(numbers, [key + 1, key + 2]);
        }
        assert!(lots.lots.is_empty() && lots.places.is_empty() && lots.free.is_empty());
        assert_eq!(lots.take(1).unwrap_err(), Errno::NOENT);
    }

    #[test]
    fn of_two_messages_the_last_is_current() {
        let mut lot = Lot { sock: call::self_connected().unwrap(), bundles: Vec::new() };
        let fds: Vec<OwnedFd> =
            (1..=3).map(|n| eventfd(n, EventfdFlags::CLOEXEC).unwrap()).collect();
        lot.put(1, b"one", &[fds[0].as_fd()]).unwrap();
        lot.put(2, b"two", &[fds[1].as_fd(), fds[2].as_fd()]).unwrap();
        // Killed while the first is taken: the rest was sent, and the old message is still there.
        let (labels, _) = lot.copies().unwrap();
        let second = &labels[HEAD + 3..];
        send(&lot.sock, second, &[fds[1].as_fd(), fds[2].as_fd()]).unwrap();
        // The same state after a reader that was killed.
        look_from(&lot.sock, 0).unwrap();
        peek(&lot.sock).unwrap();
        let mut seen = Vec::new();
        let mut found = Lot::found(lot.sock, &mut |found: Found<'_>| {
            seen.push((found.label.to_vec(), found.fds.len()));
            Some(7)
        });
        let found = found.as_mut().unwrap();
        assert_eq!((seen, &found.bundles[..]), (vec![(b"two".to_vec(), 2)], &[(7, 2)][..]));
        assert_eq!(found.take(7).unwrap().len(), 2);
        assert_eq!(peek(&found.sock).unwrap_err(), Errno::AGAIN, "nothing is left");
    }
    #[test]
    fn unknown_bundle_is_released_and_the_rest_stays() {
        let mut lot = Lot { sock: call::self_connected().unwrap(), bundles: Vec::new() };
        let fds: Vec<OwnedFd> =
            (1..=3).map(|n| eventfd(n, EventfdFlags::CLOEXEC).unwrap()).collect();
        for (label, fd) in [b"one", b"two", b"six"].into_iter().zip(&fds) {
            lot.put(1, label, &[fd.as_fd()]).unwrap();
        }
        let name = &mut |found: Found<'_>| (found.label == b"two").then_some(2);
        let mut found = Lot::found(lot.sock, name).unwrap();
        assert_eq!(found.bundles, [(2, 1)]);
        let mut bytes = [0; 8];
        rustix::io::read(&found.take(2).unwrap()[0], &mut bytes).unwrap();
        assert_eq!(u64::from_ne_bytes(bytes), 2, "it is the very file");
        // A truncated label names no container.
        send(&found.sock, &[9, 0, 1, b'x'], &[fds[0].as_fd()]).unwrap();
        let named = Lot::found(found.sock, &mut |_| panic!("it cannot be read"));
        assert_eq!(named.unwrap_err(), Errno::BADMSG);
    }
}
