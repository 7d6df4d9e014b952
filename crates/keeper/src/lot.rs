//! Descriptors that are open though nobody has them: parked in the queues of sockets.
//!
//! A descriptor that was sent (unix(7), SCM_RIGHTS) and not received yet is an open file without a
//! number: it counts against no RLIMIT_NOFILE. What belongs together is one message, a *bundle*; a
//! *lot* is a pair of sockets whose queue holds some of them. To take one out, those before it are
//! received and sent again, behind it; so a lot is small.
//!
//! Files on their way count against the sender's limit, unless he has CAP_SYS_ADMIN; the
//! search for cycles among them looks at unix sockets only, and there are few.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dormouse_launch::wire;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair};

/// LIMIT: bundles in one lot, of which half are moved on average to take one.
const BUNDLES: usize = 32;
/// LIMIT: descriptors of a bundle.
pub(crate) const DESCRIPTORS: usize = wire::FDS_PER_MESSAGE;

/// All that is parked. Keys are the caller's, and unique.
#[derive(Debug, Default)]
pub(crate) struct Lots {
    lots: HashMap<u32, Lot>,
    /// Where each bundle is.
    places: HashMap<u64, u32>,
    /// Lots that are not full.
    free: BTreeSet<u32>,
    number: u32,
}

#[derive(Debug)]
struct Lot {
    entrance: OwnedFd,
    exit: OwnedFd,
    /// Keys of its bundles, in the order of the queue.
    bundles: Vec<u64>,
}

impl Lots {
    /// Parks copies of some descriptors.
    pub(crate) fn park(&mut self, key: u64, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let number = match self.free.first() {
            Some(number) => *number,
            None => self.make()?,
        };
        let lot = self.lots.get_mut(&number).ok_or(Errno::NOENT)?;
        lot.put(key, fds)?;
        if lot.bundles.len() == BUNDLES {
            self.free.remove(&number);
        }
        self.places.insert(key, number);
        Ok(())
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
        Ok(Self { entrance, exit, bundles: Vec::with_capacity(BUNDLES) })
    }

    fn put(&mut self, key: u64, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        // One byte: a message of none would be the end.
        wire::send(&self.entrance, &[0], fds, SendFlags::DONTWAIT)?;
        self.bundles.push(key);
        Ok(())
    }

    fn take(&mut self, key: u64) -> Result<Vec<OwnedFd>, Errno> {
        loop {
            let mut fds = Vec::new();
            match wire::receive(&self.exit, &mut [0], RecvFlags::DONTWAIT, |fd| fds.push(fd)) {
                // LIMIT: with no number left some of it is lost, and its owner makes it again.
                Ok(_) | Err(Errno::MSGSIZE) => {}
                Err(e) => return Err(e),
            }
            let first = self.bundles.remove(0); // it was there: the queue had one more
            if first == key {
                return Ok(fds);
            }
            let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
            self.put(first, &borrowed)?;
        }
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
        assert_eq!(lots.lots.len(), 3);
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
