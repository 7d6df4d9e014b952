//! The vault: a second process that has copies of what the keeper parks, and parses nothing.
//!
//! Each lot ([`crate::lot`]) is one socket with descriptors in its queue. The vault has a copy of
//! each of these sockets, by a number: one per 32 sleeping containers or so. If the keeper is
//! killed, the kernel still completes connections to sleeping containers, and open connections stay
//! open. The next keeper requests the sockets from the vault and finds the descriptors in their
//! queues.
//!
//! The vault is forked when a descriptor is parked for the first time. It listens at
//! `RUN/vault.sock` for new keepers and has a connection to the present keeper. When it has held
//! nothing for a second it exits. A keeper whose vault has exited makes another one when it needs
//! one. If both are killed at once, open connections are lost, but no container is.
//!
//! ```text
//! vault -> keeper   first: the listening socket, and a pidfd of itself
//!                   to a new client: all sockets, each with its number; then a message of one byte
//! keeper -> vault   number and socket: keep it; number alone: drop it
//! ```
//!
//! **Never two.** A vault that no keeper can find would hold sockets that clients wait at. Only the
//! vault listens on `RUN/vault.sock`, so at most one vault is reachable. It receives no descriptors
//! before it listens, so an unreachable vault holds none and exits. The peer's pid (unix(7),
//! SO_PEERCRED) is that of the process that called listen(2) last, possibly an earlier vault;
//! signals therefore go to the pidfd that the vault has sent.

use std::collections::HashMap;
use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use dormouse_kernel::call::{self as kernel, CloneArgs, Cloned};
use dormouse_kernel::pidfd;
use dormouse_launch::keeper::VAULT as SOCKET;
use dormouse_launch::wire;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, Mode};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use rustix::process::PidfdFlags;

use crate::call;

/// LIMIT: sockets in one message.
const PART: usize = 128;
/// Idle time before the vault exits.
const IDLE: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// LIMIT: keepers that wait to be accepted.
const BACKLOG: i32 = 8;
/// LIMIT: how long either side waits for the other to read a message.
const PATIENCE: Duration = Duration::from_secs(5);
/// Interval at which a keeper retries to connect.
const AGAIN: Duration = Duration::from_millis(10);
/// Its name.
const NAME: &CStr = c"dormouse-vault";

/// The keeper's state of the vault.
#[derive(Debug, Default)]
pub struct Vault {
    /// Bound, and listening if there has been a vault.
    listener: Option<OwnedFd>,
    there: Option<There>,
}

/// A running vault.
#[derive(Debug)]
struct There {
    sock: OwnedFd,
    process: OwnedFd,
}

impl Vault {
    /// Connects to the vault of an earlier keeper, or creates the socket for a new one.
    ///
    /// ORDER: while `/proc` can be reached.
    pub fn open(run: &OwnedFd) -> Result<Self, Errno> {
        // A name of 108 bytes at most fits into an address; this one is always short.
        let address = SocketAddrUnix::new(format!("/proc/self/fd/{}/{SOCKET}", run.as_raw_fd()))?;
        let until = Instant::now() + PATIENCE;
        let sock = loop {
            let sock = socket()?;
            if rustix::net::connect(&sock, &address).is_err() {
                break sock;
            }
            set_patience(&sock)?;
            match greeting(&sock) {
                Ok((listener, process)) => {
                    let there = Some(There { sock, process });
                    return Ok(Self { listener: Some(listener), there });
                }
                Err(Errno::AGAIN) => end_silent(&sock),
                // A vault that is just exiting; the next attempt finds none.
                Err(_) => std::thread::sleep(AGAIN),
            }
            if Instant::now() > until {
                break socket()?;
            }
        };
        Self::leave(run);
        let before = rustix::process::umask(Mode::from_raw_mode(0o177));
        let bound = rustix::net::bind(&sock, &address);
        rustix::process::umask(before);
        bound.map(|()| Self { listener: Some(sock), there: None })
    }

    /// Removes the vault's socket, which is not needed any more.
    pub(crate) fn leave(run: &OwnedFd) {
        let _ = rustix::fs::unlinkat(run, SOCKET, AtFlags::empty()); // there may be none
    }

    /// Returns the lots of the earlier keeper.
    pub(crate) fn take_stock(&mut self) -> Vec<(u32, OwnedFd)> {
        let Some(there) = &self.there else { return Vec::new() };
        // If the vault fails, its containers are listened for anew.
        stock(&there.sock).unwrap_or_else(|_| {
            self.lose();
            Vec::new()
        })
    }

    pub(crate) fn is_there(&self) -> bool {
        self.there.is_some()
    }

    /// Readable when it has ended.
    pub(crate) fn watched(&self) -> Option<BorrowedFd<'_>> {
        self.there.as_ref().map(|there| there.sock.as_fd())
    }

    /// Kills the vault, or records that it has exited. Beside a new one it would hold descriptors
    /// that the new one does not know of, and would answer in its place.
    pub(crate) fn lose(&mut self) {
        if let Some(There { process, .. }) = self.there.take() {
            end(&process);
        }
    }

    /// Starts a vault, which holds nothing yet. Returns false if that fails now.
    pub(crate) fn make(&mut self) -> bool {
        self.there = self.listener.as_ref().and_then(|listener| fork(listener).ok());
        self.is_there()
    }

    pub(crate) fn keep(&mut self, number: u32, sock: BorrowedFd<'_>) {
        self.send_lot(number, &[sock]);
    }

    pub(crate) fn forget(&mut self, number: u32) {
        self.send_lot(number, &[]);
    }

    fn send_lot(&mut self, number: u32, fds: &[BorrowedFd<'_>]) {
        let Some(There { sock, .. }) = &self.there else { return };
        if wire::send(sock, &number.to_ne_bytes(), fds, SendFlags::empty()).is_err() {
            self.lose();
        }
    }
}

fn socket() -> Result<OwnedFd, Errno> {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)
}

/// Kills a vault that does not respond. No other process can be the peer: copies of a keeper's
/// descriptors are about to be closed by their holders.
fn end_silent(sock: &OwnedFd) {
    let Ok(peer) = sockopt::socket_peercred(sock) else { return };
    let Ok(process) = rustix::process::pidfd_open(peer.pid, PidfdFlags::empty()) else { return };
    // ORDER: the name is that of the process behind the pidfd, unless it has exited and cannot be
    // signalled.
    let name = std::fs::read(format!("/proc/{}/comm", peer.pid.as_raw_pid()));
    if name.is_ok_and(|name| name.trim_ascii_end() == NAME.to_bytes()) {
        end(&process);
    }
}

/// Its descriptors are then closed, and its control group is empty.
fn end(process: &OwnedFd) {
    let _ = pidfd::send_signal(process, libc::SIGKILL); // may have exited
    let _ = pidfd::wait(process, Some(PATIENCE));
}

fn set_patience(sock: &OwnedFd) -> Result<(), Errno> {
    sockopt::set_socket_timeout(sock, sockopt::Timeout::Send, Some(PATIENCE))?;
    sockopt::set_socket_timeout(sock, sockopt::Timeout::Recv, Some(PATIENCE))
}

/// Receives the vault's first message: its listening socket and its pidfd.
fn greeting(sock: &OwnedFd) -> Result<(OwnedFd, OwnedFd), Errno> {
    let mut fds = Vec::new();
    wire::receive(sock, &mut [0], RecvFlags::empty(), |fd| fds.push(fd))?;
    match <[OwnedFd; 2]>::try_from(fds) {
        Ok([listener, process]) => Ok((listener, process)),
        Err(_) => Err(Errno::BADMSG),
    }
}

fn greet(sock: &OwnedFd, listener: &OwnedFd, own: &OwnedFd) -> Result<(), Errno> {
    wire::send(sock, &[0], &[listener.as_fd(), own.as_fd()], SendFlags::empty())
}

/// Receives the lots that the vault sends to a new keeper.
fn stock(sock: &OwnedFd) -> Result<Vec<(u32, OwnedFd)>, Errno> {
    let mut bytes = [0; PART * 4];
    let mut all = Vec::new();
    loop {
        let mut fds = Vec::new();
        let length = wire::receive(sock, &mut bytes, RecvFlags::empty(), |fd| fds.push(fd))?;
        let (numbers, rest) = bytes[..length].as_chunks();
        if !rest.is_empty() {
            return Ok(all);
        }
        if fds.is_empty() || fds.len() != numbers.len() {
            return Err(Errno::BADMSG);
        }
        all.extend(numbers.iter().map(|number| u32::from_ne_bytes(*number)).zip(fds));
    }
}

fn fork(listener: &OwnedFd) -> Result<There, Errno> {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let (keeper, own) = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None)?;
    set_patience(&keeper)?;
    set_patience(&own)?;
    // SAFETY: there is one thread, so the child may do all that the parent may.
    match unsafe { kernel::clone3(&CloneArgs::default()) }? {
        Cloned::Parent { pidfd, .. } => {
            drop(own);
            // ORDER: descriptors are sent to it once it listens, and so can be found.
            match greeting(&keeper) {
                Ok(_) => Ok(There { sock: keeper, process: pidfd }),
                Err(e) => {
                    end(&pidfd);
                    Err(e)
                }
            }
        }
        Cloned::Child => {
            let _ = rustix::process::setsid();
            let _ = kernel::set_name(NAME);
            // ORDER: all descriptors but these two are closed: copies of held descriptors would
            // stay open. Their owners in the parent's memory are neither used nor dropped in this
            // process.
            if call::close_all_but([listener.as_fd(), own.as_fd()]).is_ok() {
                let _ = serve(listener, own);
            }
            kernel::exit(0)
        }
    }
}

/// The vault itself.
fn serve(listener: &OwnedFd, keeper: OwnedFd) -> Result<(), Errno> {
    // From now on SO_PEERCRED names this process (unix(7)).
    rustix::net::listen(listener, BACKLOG)?;
    let own = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())?;
    greet(&keeper, listener, &own)?;
    let mut keeper = Some(keeper);
    let mut stock = HashMap::new();
    loop {
        let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
        fds.extend(keeper.as_ref().map(|sock| PollFd::new(sock, PollFlags::IN)));
        let ready = poll(&mut fds, stock.is_empty().then_some(&IDLE));
        let [comes, says] = [0, 1].map(|n| fds.get(n).is_some_and(|fd| !fd.revents().is_empty()));
        match ready {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(_) => continue,
        }
        // ORDER: first all messages that the keeper sent before it was killed, then the next
        // keeper.
        if says || comes {
            keeper = keeper.filter(|sock| receive_all(sock, &mut stock));
        }
        if comes && let Ok(sock) = accept(listener) {
            let greeted = greet(&sock, listener, &own).and_then(|()| send_all(&sock, &stock));
            keeper = greeted.is_ok().then_some(sock).or(keeper);
        }
    }
}

/// Receives all pending messages of the keeper. Returns false when the keeper has exited.
fn receive_all(sock: &OwnedFd, stock: &mut HashMap<u32, OwnedFd>) -> bool {
    loop {
        let (mut number, mut given) = ([0; 4], None);
        match wire::receive(sock, &mut number, RecvFlags::DONTWAIT, |fd| given = Some(fd)) {
            Ok(4) => {}
            Err(Errno::AGAIN) => return true,
            Ok(0) => return false,
            Ok(_) | Err(Errno::MSGSIZE) => continue,
            Err(_) => return false,
        }
        let number = u32::from_ne_bytes(number);
        match given {
            Some(fd) => stock.insert(number, fd),
            None => stock.remove(&number),
        };
    }
}

fn accept(listener: &OwnedFd) -> Result<OwnedFd, Errno> {
    let sock = rustix::net::accept_with(listener, SocketFlags::CLOEXEC)?;
    if !sockopt::socket_peercred(&sock)?.uid.is_root() {
        return Err(Errno::PERM);
    }
    set_patience(&sock)?;
    Ok(sock)
}

/// Sends all lots to a new keeper.
fn send_all(sock: &OwnedFd, stock: &HashMap<u32, OwnedFd>) -> Result<(), Errno> {
    let all: Vec<(&u32, &OwnedFd)> = stock.iter().collect();
    for part in all.chunks(PART) {
        let numbers: Vec<u8> = part.iter().flat_map(|(number, _)| number.to_ne_bytes()).collect();
        let fds: Vec<BorrowedFd<'_>> = part.iter().map(|(_, fd)| fd.as_fd()).collect();
        wire::send(sock, &numbers, &fds, SendFlags::empty())?;
    }
    wire::send(sock, &[0], &[], SendFlags::empty())
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn parked_descriptors_outlive_the_keeper() {
        let dir = tempfile::tempdir().unwrap();
        let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
        let run = rustix::fs::open(dir.path(), flags, Mode::empty()).unwrap();
        let mut first = Vault::open(&run).unwrap();
        assert!(first.take_stock().is_empty() && !first.is_there());
        // A thread in place of the process, because this process has several threads.
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let pair = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None);
        let (sock, own) = pair.unwrap();
        let listener = first.listener.take().unwrap();
        let vault = std::thread::spawn(move || serve(&listener, own));
        let (listener, process) = greeting(&sock).unwrap();
        assert_eq!(pidfd::pid(&process).unwrap(), std::process::id());
        drop(listener);
        first.there = Some(There { sock, process });
        // More than one message.
        let count = PART as u32 * 2 + 3;
        for number in 0..count {
            let fd = eventfd(number + 1, EventfdFlags::CLOEXEC).unwrap();
            first.keep(number, fd.as_fd());
        }
        first.forget(7);
        drop(first);
        for round in 0..2 {
            let mut next = Vault::open(&run).unwrap();
            let mut all = next.take_stock();
            all.sort_by_key(|(number, _)| *number);
            let numbers: Vec<u32> = all.iter().map(|(number, _)| *number).collect();
            assert!(numbers.into_iter().eq((0..count).filter(|number| *number != 7)), "{round}");
            if round == 1 {
                let (number, fd) = &all[100];
                let mut bytes = [0; 8];
                rustix::io::read(fd, &mut bytes).unwrap();
                assert_eq!(u64::from_ne_bytes(bytes), u64::from(number + 1), "it is the very file");
                all.iter().for_each(|(number, _)| next.forget(*number));
            }
        }
        // Without any socket left the vault exits.
        vault.join().unwrap().unwrap();
        assert!(!Vault::open(&run).unwrap().is_there());
    }
}
