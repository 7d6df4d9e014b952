//! Descriptors that are open though nobody has them: parked in the queues of sockets.
//!
//! A descriptor that was sent (unix(7), SCM_RIGHTS) and not received yet is an open file without a
//! number: it counts against no RLIMIT_NOFILE. What belongs together is a *bundle*; a *lot* is a pair of
//! sockets with one message in its queue, of all that its bundles have. A message takes 4 kB of the kernel,
//! however few descriptors it has (Linux 6.10 and later keep `struct scm_fp_list` as it was allocated), so
//! several containers share one. To add to a lot or to take from it, it is received and what stays is
//! sent again; so a lot is small.
//!
//! Files on their way count against the sender's limit, unless he has CAP_SYS_ADMIN; the
//! search for cycles among them looks at unix sockets only, and there are few.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dormouse_launch::wire;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair};

/// LIMIT: bundles in one lot.
const BUNDLES: usize = 16;
/// LIMIT: descriptors of a lot, but where one bundle has more: all are received and sent to take one.
const SHARED: usize = 64;
/// LIMIT: descriptors of a bundle.
pub(crate) const DESCRIPTORS: usize = wire::FDS_PER_MESSAGE;

/// All that is parked. Keys are the caller's, and unique.
#[derive(Debug, Default)]
pub(crate) struct Lots {
    lots: HashMap<u32, Lot>,
    /// Where each bundle is.
    places: HashMap<u64, u32>,
    /// Lots that may have room.
    free: BTreeSet<u32>,
    number: u32,
}

#[derive(Debug)]
struct Lot {
    entrance: OwnedFd,
    exit: OwnedFd,
    /// Keys of its bundles and how many descriptors each has, in the order of the message.
    bundles: Vec<(u64, usize)>,
}

impl Lots {
    /// Parks copies of some descriptors.
    pub(crate) fn park(&mut self, key: u64, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let number = match self.with_room(fds.len()) {
            Some(number) => number,
            None => self.make()?,
        };
        let lot = self.lots.get_mut(&number).ok_or(Errno::NOENT)?;
        lot.put(key, fds)?;
        if !lot.has_room(1) {
            self.free.remove(&number);
        }
        self.places.insert(key, number);
        Ok(())
    }

    /// A lot with room for so many. One that has not is not looked at again until something is taken out.
    fn with_room(&mut self, count: usize) -> Option<u32> {
        let number = *self.free.first()?;
        if self.lots.get(&number).is_some_and(|lot| lot.has_room(count)) {
            return Some(number);
        }
        self.free.remove(&number);
        None
    }

    /// One more lot, which is empty.
    fn make(&mut self) -> Result<u32, Errno> {
        let lot = Lot::new()?;
        while self.lots.contains_key(&self.number) {
            self.number = self.number.wrapping_add(1);
        }
        self.lots.insert(self.number, lot);
        self.free.insert(self.number);
        Ok(self.number)
    }

    /// Takes a bundle out, in the order in which it was put together.
    pub(crate) fn take(&mut self, key: u64) -> Result<Vec<OwnedFd>, Errno> {
        let number = *self.places.get(&key).ok_or(Errno::NOENT)?;
        let lot = self.lots.get_mut(&number).ok_or(Errno::NOENT)?;
        let bundle = lot.take(key)?;
        self.places.remove(&key);
        if lot.bundles.is_empty() {
            self.lots.remove(&number);
            self.free.remove(&number);
        } else {
            self.free.insert(number);
        }
        Ok(bundle)
    }
}

impl Lot {
    fn new() -> Result<Self, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (entrance, exit) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok(Self { entrance, exit, bundles: Vec::new() })
    }

    fn has_room(&self, count: usize) -> bool {
        let held: usize = self.bundles.iter().map(|(_, count)| count).sum();
        self.bundles.is_empty() || self.bundles.len() < BUNDLES && held + count <= SHARED
    }

    fn put(&mut self, key: u64, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let held = self.copies()?;
        let all: Vec<BorrowedFd<'_>> =
            held.iter().map(AsFd::as_fd).chain(fds.iter().copied()).collect();
        self.replace(&all)?;
        self.bundles.push((key, fds.len()));
        Ok(())
    }

    fn take(&mut self, key: u64) -> Result<Vec<OwnedFd>, Errno> {
        let at = self.bundles.iter().position(|(of, _)| *of == key).ok_or(Errno::NOENT)?;
        let first: usize = self.bundles[..at].iter().map(|(_, count)| count).sum();
        let mut rest = self.copies()?;
        let bundle: Vec<OwnedFd> = rest.drain(first..first + self.bundles[at].1).collect();
        self.replace(&rest.iter().map(AsFd::as_fd).collect::<Vec<_>>())?;
        self.bundles.remove(at);
        Ok(bundle)
    }

    /// Copies of all that it has. EMSGSIZE where there are not as many numbers left: nothing is lost then.
    fn copies(&self) -> Result<Vec<OwnedFd>, Errno> {
        let mut fds = Vec::new();
        if !self.bundles.is_empty() {
            let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            wire::receive(&self.exit, &mut [0], flags, |fd| fds.push(fd))?;
        }
        Ok(fds)
    }

    /// Has these instead.
    fn replace(&mut self, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        if !fds.is_empty() {
            // One byte: a message of none would be the end.
            wire::send(&self.entrance, &[0], fds, SendFlags::DONTWAIT)?;
        }
        if !self.bundles.is_empty() {
            // ORDER: the new one is there. Whoever has no room for descriptors has the kernel close them.
            rustix::net::recv(&self.exit, &mut [0; 1], RecvFlags::DONTWAIT)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn what_was_parked_is_taken_out_in_any_order() {
        let mut lots = Lots::default();
        let count = BUNDLES as u64 * 2 + 5;
        for key in 0..count {
            // Two of each, which say the key and the one after it.
            let pair =
                [key + 1, key + 2].map(|n| eventfd(n as u32, EventfdFlags::CLOEXEC).unwrap());
            lots.park(key, &[pair[0].as_fd(), pair[1].as_fd()]).unwrap();
        }
        assert_eq!(lots.lots.len(), 3, "each is full but the last");
        for n in 0..count {
            let key = n * 7 % count; // each once: 7 does not divide the count
            let fds = lots.take(key).unwrap();
            let said: Vec<u64> = fds
                .iter()
                .map(|fd| {
                    let mut bytes = [0; 8];
                    rustix::io::read(fd, &mut bytes).unwrap();
                    u64::from_ne_bytes(bytes)
                })
                .collect();
            assert_eq!(said, [key + 1, key + 2]);
        }
        assert!(lots.lots.is_empty() && lots.places.is_empty() && lots.free.is_empty());
        assert_eq!(lots.take(1).unwrap_err(), Errno::NOENT);
    }
}
