//! Custody: descriptors of sleeping containers, and who calls them.
//!
//! A socket that listens goes on listening here; whoever connects is answered by the kernel and waits
//! in its queue. epoll(7) tells once (EPOLLONESHOT) that there is somebody; the container is then woken
//! by a process of ours, which takes the descriptors out and lets go of them, so the waiting caller is
//! the first whom the container accepts.
//!
//! LIMIT: as many descriptors as the keeper may have open (RLIMIT_NOFILE).

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use dormouse_launch::protocol::Id;
use rustix::event::epoll;
use rustix::io::Errno;

/// How soon one that could not be woken is tried again, while somebody calls.
const AGAIN: Duration = Duration::from_secs(1);

/// What one container left here.
#[derive(Debug, Default)]
struct Sleeper {
    held: Vec<Held>,
    /// Somebody has called, and nobody is told again before this is over.
    is_called: bool,
}

#[derive(Debug)]
struct Held {
    key: u32,
    /// Its number in the epoll set.
    token: u64,
    fd: OwnedFd,
}

/// What all sleeping containers left here.
#[derive(Debug, Default)]
pub(crate) struct Custody {
    sleepers: HashMap<Id, Sleeper>,
    tokens: HashMap<u64, Id>,
    /// Those that are watched again, and when, soonest first.
    again: VecDeque<(Instant, Id)>,
}

fn watched(token: u64) -> (epoll::EventData, epoll::EventFlags) {
    (epoll::EventData::new_u64(token), epoll::EventFlags::IN | epoll::EventFlags::ONESHOT)
}

impl Custody {
    pub(crate) fn is_empty(&self) -> bool {
        self.sleepers.is_empty()
    }

    /// Takes a descriptor into custody and watches it.
    pub(crate) fn hold(
        &mut self,
        epoll: &OwnedFd,
        token: u64,
        id: Id,
        key: u32,
        fd: OwnedFd,
    ) -> Result<(), Errno> {
        if self.find(id, key).is_some() {
            return Err(Errno::EXIST);
        }
        let (data, flags) = watched(token);
        epoll::add(epoll, &fd, data, flags)?;
        self.sleepers.entry(id).or_default().held.push(Held { key, token, fd });
        self.tokens.insert(token, id);
        Ok(())
    }

    /// A copy of what is held.
    pub(crate) fn take(&self, id: Id, key: u32) -> Result<OwnedFd, Errno> {
        self.find(id, key).ok_or(Errno::NOENT)?.fd.try_clone().map_err(|_| Errno::MFILE)
    }

    fn find(&self, id: Id, key: u32) -> Option<&Held> {
        self.sleepers.get(&id)?.held.iter().find(|held| held.key == key)
    }

    /// ORDER: out of the epoll set, then closed: the container has the same open file, which would
    /// stay in the set for as long as it lives.
    pub(crate) fn let_go(&mut self, epoll: &OwnedFd, id: Id) {
        for held in self.sleepers.remove(&id).into_iter().flat_map(|sleeper| sleeper.held) {
            let _ = epoll::delete(epoll, &held.fd); // it is in the set, or nothing is lost
            self.tokens.remove(&held.token);
        }
    }

    /// The container that is called by what has this number, if nobody was told yet.
    pub(crate) fn called(&mut self, token: u64) -> Option<Id> {
        let id = *self.tokens.get(&token)?;
        let sleeper = self.sleepers.get_mut(&id)?;
        (!std::mem::replace(&mut sleeper.is_called, true)).then_some(id)
    }

    /// The process that was to wake a container has ended; if it is still here, it has failed.
    pub(crate) fn came_back(&mut self, id: Id) {
        if self.sleepers.contains_key(&id) {
            self.again.push_back((Instant::now() + AGAIN, id));
        }
    }

    /// When [`Custody::watch_again`] has something to do.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.again.front().map(|(at, _)| *at)
    }

    pub(crate) fn watch_again(&mut self, epoll: &OwnedFd, now: Instant) {
        while self.next().is_some_and(|at| at <= now) {
            let Some((_, id)) = self.again.pop_front() else { return };
            let Some(sleeper) = self.sleepers.get_mut(&id) else { continue };
            sleeper.is_called = false;
            for held in &sleeper.held {
                let (data, flags) = watched(held.token);
                let _ = epoll::modify(epoll, &held.fd, data, flags); // it is in the set
            }
        }
    }
}
