//! The output of containers, as the keeper knows it: which reader has it, and copies for the next
//! reader.
//!
//! An output is up to two read ends of pipes ([`crate::reader`]). They are sent to a reader and
//! parked ([`crate::lot`]) under a label, so that they outlive both. If the reader was killed,
//! another one gets them; if this process was killed, the next keeper finds them in the vault.
//!
//! LIMIT: an output whose label does not fit into a message (a path of several thousand bytes) is
//! not parked, and has no reader after the keeper was killed.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use dormouse_kernel::call as kernel;
use dormouse_launch::protocol::Id;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::lot::Lots;
use crate::reader::{self, Report};
use crate::setting::NOFILE;
use crate::tiny::Outside;

/// Held by the readers of one keeper; the next keeper's readers wait for it.
const GUARD: &str = "log.lock";
/// Time before another attempt to start a reader, or to send to one that is busy.
const AGAIN: Duration = Duration::from_millis(20);
/// The bit of the number of a parked output.
const OUTPUT: u64 = 1 << 62;

/// Where an output goes: the contents of its label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) id: Id,
    /// Bits of [`dormouse_launch::protocol::stream`].
    pub(crate) streams: u8,
    pub(crate) bound_bytes: u64,
    pub(crate) path: String,
}

impl Target {
    /// The first byte tells it from the label of a sleeping container, which begins with the length
    /// of an id.
    fn label(&self) -> Vec<u8> {
        let id = self.id.as_str().as_bytes();
        let mut label = vec![0, self.streams, id.len() as u8];
        label.extend_from_slice(id);
        label.extend_from_slice(&self.bound_bytes.to_ne_bytes());
        label.extend_from_slice(self.path.as_bytes());
        label
    }

    /// Reads a label; `None` if it is another one.
    pub(crate) fn read(label: &[u8]) -> Option<Self> {
        let [0, streams, length, rest @ ..] = label else { return None };
        let (id, rest) = rest.split_at_checked(usize::from(*length))?;
        let (bound, path) = rest.split_first_chunk()?;
        Some(Self {
            id: Id::new(id).ok()?,
            streams: *streams,
            bound_bytes: u64::from_ne_bytes(*bound),
            path: std::str::from_utf8(path).ok()?.to_owned(),
        })
    }
}

#[derive(Debug)]
struct Output {
    target: Target,
    /// Until they are parked.
    ends: Vec<OwnedFd>,
    /// The number of its reader.
    reader: Option<u64>,
}

#[derive(Debug)]
struct Reader {
    sock: OwnedFd,
    /// How many outputs it has.
    count: usize,
}

/// A client that waits until a log is complete.
#[derive(Debug)]
struct Flush {
    key: u64,
    connection: u64,
    is_sent: bool,
}

/// All outputs. Keys are the server's numbers.
#[derive(Debug, Default)]
pub(crate) struct Outputs {
    all: HashMap<u64, Output>,
    /// By number in the server's epoll set.
    readers: HashMap<u64, Reader>,
    /// Outputs without a reader.
    unread: VecDeque<u64>,
    flushes: HashMap<u64, Flush>,
    ticket: u64,
    /// The lock, from the first reader on.
    guard: Option<OwnedFd>,
    next_attempt: Option<Instant>,
    /// Sockets of readers that have exited.
    gone: Vec<OwnedFd>,
}

impl Outputs {
    /// Takes over an output that an earlier keeper has parked. Returns its number among the parked.
    pub(crate) fn restore(&mut self, key: u64, target: Target) -> u64 {
        self.all.insert(key, Output { target, ends: Vec::new(), reader: None });
        self.unread.push_back(key);
        key | OUTPUT
    }

    /// Takes the read ends of an output.
    ///
    /// ORDER: when this returns a reader has them, or they are queued for the next attempt, and copies are
    /// parked.
    pub(crate) fn keep(
        &mut self,
        key: u64,
        target: Target,
        ends: Vec<OwnedFd>,
        lots: &mut Lots,
        reader: impl FnMut(&mut Self) -> Result<u64, Errno>,
    ) -> Result<(), Errno> {
        let label = target.label();
        self.all.insert(key, Output { target, ends, reader: None });
        self.unread.push_back(key);
        self.assign(lots, reader);
        let Some(output) = self.all.get_mut(&key) else { return Err(Errno::IO) };
        let borrowed: Vec<BorrowedFd<'_>> = output.ends.iter().map(AsFd::as_fd).collect();
        if lots.park(key | OUTPUT, &label, &borrowed).is_ok() {
            output.ends.clear();
        }
        Ok(())
    }

    /// Has restored outputs read from now on.
    pub(crate) fn start(&mut self, now: Instant) {
        self.next_attempt = (!self.unread.is_empty()).then_some(now);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Returns whether a container has output that is not complete.
    pub(crate) fn has(&self, id: Id) -> bool {
        self.all.values().any(|output| output.target.id == id)
    }

    /// Time of the next attempt.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.next_attempt
    }

    /// Retries requests that failed.
    pub(crate) fn look(
        &mut self,
        now: Instant,
        lots: &mut Lots,
        reader: impl FnMut(&mut Self) -> Result<u64, Errno>,
    ) {
        if self.next_attempt.is_some_and(|at| at <= now) {
            self.assign(lots, reader);
        }
    }

    /// Gives outputs without a reader to one, and sends pending flushes. `reader` starts a reader
    /// and returns its number.
    fn assign(&mut self, lots: &mut Lots, mut reader: impl FnMut(&mut Self) -> Result<u64, Errno>) {
        self.next_attempt = None;
        while let Some(key) = self.unread.front().copied() {
            if !self.all.contains_key(&key) {
                self.unread.pop_front();
                continue;
            }
            let (_, most) = kernel::prlimit(NOFILE, None).unwrap_or((0, 1024));
            let most = reader::capacity(most).max(1);
            let free = self.readers.iter().find(|(_, it)| it.count < most).map(|(n, _)| *n);
            let number = match free.map_or_else(|| reader(self), Ok) {
                Ok(number) => number,
                Err(_) => return self.retry(),
            };
            match self.send(key, number, lots) {
                Ok(()) => {
                    self.unread.pop_front();
                }
                Err(Errno::PIPE | Errno::CONNRESET) => self.lose(number),
                Err(Errno::AGAIN) => return self.retry(),
                // It was never parked, or its lot is damaged: its pipes are lost.
                Err(Errno::NOENT | Errno::BADMSG) => {
                    self.unread.pop_front();
                    self.all.remove(&key);
                    let _ = lots.take(key | OUTPUT); // there may be none
                }
                // Too little memory or too few free descriptor numbers, now.
                Err(_) => {
                    self.unread.rotate_left(1);
                    return self.retry();
                }
            }
        }
        self.send_flushes();
    }

    fn retry(&mut self) {
        self.next_attempt = Some(Instant::now() + AGAIN);
    }

    fn send(&mut self, key: u64, number: u64, lots: &Lots) -> Result<(), Errno> {
        let output = self.all.get_mut(&key).ok_or(Errno::NOENT)?;
        let reader = self.readers.get_mut(&number).ok_or(Errno::PIPE)?;
        let copies;
        let ends = match output.ends.is_empty() {
            true => {
                copies = lots.copies(key | OUTPUT)?;
                &copies
            }
            false => &output.ends,
        };
        let ends: Vec<BorrowedFd<'_>> = ends.iter().map(AsFd::as_fd).collect();
        let Target { streams, bound_bytes, path, .. } = &output.target;
        reader::send_add(&reader.sock, key, (*streams, *bound_bytes, path), &ends)?;
        output.reader = Some(number);
        reader.count += 1;
        Ok(())
    }

    /// Starts a reader. The caller watches its socket under this number.
    pub(crate) fn start_reader(
        &mut self,
        number: u64,
        run: &OwnedFd,
        outside: &Outside,
    ) -> Result<BorrowedFd<'_>, Errno> {
        if self.guard.is_none() {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let guard = rustix::fs::openat(run, GUARD, flags, Mode::from_raw_mode(0o600))?;
            // ORDER: two readers of one pipe would repeat and lose output.
            rustix::fs::flock(&guard, FlockOperation::NonBlockingLockExclusive)?;
            self.guard = Some(guard);
        }
        let guard = self.guard.as_ref().ok_or(Errno::BADF)?;
        let sock = reader::start(outside.root.as_fd(), guard.as_fd())?;
        let reader = self.readers.entry(number).or_insert(Reader { sock, count: 0 });
        Ok(reader.sock.as_fd())
    }

    /// Returns the socket of a reader.
    pub(crate) fn reader(&self, number: u64) -> Option<BorrowedFd<'_>> {
        self.readers.get(&number).map(|reader| reader.sock.as_fd())
    }

    /// Has a client answered when the log of a container is complete. Returns false if it is.
    pub(crate) fn flush(&mut self, id: Id, connection: u64) -> bool {
        let of_id = |(_, output): &(&u64, &Output)| output.target.id == id;
        // An output from before a sleep or a restart may not have ended yet.
        let keys: Vec<u64> = self.all.iter().filter(of_id).map(|(key, _)| *key).collect();
        for key in &keys {
            self.ticket += 1;
            self.flushes.insert(self.ticket, Flush { key: *key, connection, is_sent: false });
        }
        self.send_flushes();
        !keys.is_empty()
    }

    fn send_flushes(&mut self) {
        for (ticket, flush) in &mut self.flushes {
            let number = self.all.get(&flush.key).and_then(|output| output.reader);
            let Some(reader) = number.and_then(|number| self.readers.get(&number)) else {
                continue;
            };
            if flush.is_sent {
                continue;
            }
            match reader::send_flush(&reader.sock, flush.key, *ticket) {
                Ok(()) => flush.is_sent = true,
                // A reader that has exited is noticed by the end of its socket.
                Err(_) => self.next_attempt = Some(Instant::now() + AGAIN),
            }
        }
    }

    /// Receives one report of a reader. Returns clients to be answered, or `None` if there is no
    /// report now.
    pub(crate) fn receive(&mut self, number: u64, lots: &mut Lots) -> Option<Vec<u64>> {
        let reader = self.readers.get_mut(&number)?;
        match reader::receive(&reader.sock) {
            Ok(Report::Ended(key)) => {
                reader.count = reader.count.saturating_sub(1);
                self.all.remove(&key);
                let _ = lots.take(key | OUTPUT); // may not have been parked
                let mut waiting = Vec::new();
                self.flushes.retain(|_, flush| {
                    let is_done = flush.key == key;
                    waiting.extend(is_done.then_some(flush.connection));
                    !is_done
                });
                Some(self.answered(waiting))
            }
            Ok(Report::Flushed(ticket)) => {
                let flush = self.flushes.remove(&ticket);
                Some(self.answered(flush.map(|flush| flush.connection).into_iter().collect()))
            }
            Err(Errno::AGAIN | Errno::INTR) => None,
            Err(_) => {
                self.lose(number);
                None
            }
        }
    }

    /// Keeps those connections that wait for no other output.
    fn answered(&self, mut connections: Vec<u64>) -> Vec<u64> {
        connections.sort_unstable();
        connections.dedup();
        let waits = |connection: &u64| self.flushes.values().any(|it| it.connection == *connection);
        connections.retain(|connection| !waits(connection));
        connections
    }

    /// A reader has exited: its outputs get another one.
    fn lose(&mut self, number: u64) {
        self.gone.extend(self.readers.remove(&number).map(|reader| reader.sock));
        for (key, output) in &mut self.all {
            if output.reader == Some(number) {
                output.reader = None;
                self.unread.push_back(*key);
            }
        }
        for flush in self.flushes.values_mut() {
            let output = self.all.get(&flush.key);
            flush.is_sent &= output.is_some_and(|output| output.reader.is_some());
        }
        self.retry();
    }

    /// Returns the sockets of readers that have exited, to be removed from the server's epoll set.
    pub(crate) fn take_gone(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.gone)
    }

    /// Forgets the requests of a closed connection.
    pub(crate) fn close(&mut self, connection: u64) {
        self.flushes.retain(|_, flush| flush.connection != connection);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_round_trips_and_is_told_from_a_sleepers() {
        let target = Target {
            id: Id::new(b"c1").unwrap(),
            streams: 3,
            bound_bytes: 16 << 20,
            path: "/var/lib/dormouse/containers/c1/output.log".to_owned(),
        };
        let label = target.label();
        assert_eq!(Target::read(&label), Some(target));
        for cut in 0..12 {
            assert_eq!(Target::read(&label[..cut]), None, "{cut}");
        }
        assert_eq!(Target::read(b"\x02c1"), None);
    }
}
