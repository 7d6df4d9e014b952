//! Custody: the held descriptors of sleeping containers, and the detection of clients.
//!
//! A listening socket keeps listening here: the kernel completes connections, which wait in its
//! queue. An open connection stays open, too: the kernel acknowledges incoming data, sends what is
//! still queued, and reports through epoll(7) that there is data to read, space to write, or a
//! hang-up. One report is enough (EPOLLONESHOT). The container is then woken by a waker process,
//! which takes the descriptors out and has the rest released. The container therefore accepts the
//! waiting client first.
//!
//! **Parked.** The number of descriptors of a process is limited (RLIMIT_NOFILE), and each clone
//! copies all of them. Therefore the descriptors of a container are parked ([`crate::lot`]) once
//! all of them have arrived. A private epoll set is parked with them: it is a member of the
//! keeper's set, so the keeper is still notified, and a set whose last descriptor is closed leaves
//! the other set. Requested descriptors are taken out first, and polled as before.
//!
//! Parked descriptors outlive the keeper, in the vault ([`crate::vault`]): the next keeper finds
//! them there.
//!
//! **Failed wakes.** A container whose wake failed is parked and polled again. Its clients wait, and the
//! time until the next attempt doubles with each failure, from one second to a minute.
//!
//! **Silent clients.** A container may be woken by the first byte of a client only. The waker looks for it, and
//! leaves the container asleep while all clients are silent. The kernel reports no data of a connection that
//! is not accepted. Such a container is looked at again after 10 ms, then after times that double, so that a
//! client waits about as long as it was silent, and a minute at most. A new connection is reported at once:
//! the descriptors are polled for changes (EPOLLET).
//!
//! LIMIT: a container with more descriptors than fit into one message is not parked, nor is one
//! during its wake: the vault does not have their descriptors.

use std::collections::{BTreeMap, HashMap};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use dormouse_launch::protocol::{Id, watch};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;

use crate::lot::{DESCRIPTORS, Found, Lots};
use crate::output::{Outputs, Target};
use crate::vault::Vault;

/// Time before another attempt to release descriptors, and the shortest time before another attempt to
/// wake a container that could not be woken, while a client waits.
const AGAIN: Duration = Duration::from_secs(1);

/// The longest time before another attempt to wake a container.
const AGAIN_MAX: Duration = Duration::from_secs(60);

/// The shortest time before silent clients are looked at again.
const SILENT: Duration = Duration::from_millis(10);

/// A bit of [`watch`] in a label: only changes are events.
const CHANGES: u8 = 1 << 7;

/// Returns the time before the next look at silent clients, after so many.
fn look_after(silences: u32) -> Duration {
    SILENT.saturating_mul(1 << silences.saturating_sub(1).min(16)).min(AGAIN_MAX)
}

/// Returns the time before another attempt, after so many failed ones.
fn again_after(failures: u32) -> Duration {
    let doubled = AGAIN.saturating_mul(1 << failures.saturating_sub(1).min(16));
    doubled.min(AGAIN_MAX)
}

/// The bit of the number of an epoll set that is parked; the others are those of its first
/// descriptor.
const SET: u64 = 1 << 63;

/// The held descriptors of one container.
#[derive(Debug, Default)]
struct Sleeper {
    held: Vec<Numbered>,
    /// If parked: the number in the epoll set and in the lot, and the order of the descriptors.
    parked: Option<(u64, Vec<Parked>)>,
    /// A wake is in progress; no other is started before it is over.
    is_called: bool,
    /// Failed wakes in a row.
    failures: u32,
    /// The number of its entry in `again`; other entries are over.
    due: Option<u64>,
    /// Looks in a row that have found silent clients only.
    silences: u32,
    /// Its clients are silent: only a change is an event.
    is_silent: bool,
    /// Polled anew by [`Custody::look`], not because of an event.
    is_polled_anew: bool,
    /// Its last wake has failed, and the time of the next has not come. `is_called` is set meanwhile.
    is_put_off: bool,
    /// Found in the vault and not requested yet.
    is_found: bool,
    /// No longer wanted, but not closed yet, because no descriptor number was free to take it out.
    is_let_go: bool,
}

impl Sleeper {
    fn begin_wake(&mut self) {
        (self.is_called, self.due) = (true, None);
    }
}

/// Takes the present events of a set, and returns their numbers: from then on only changes are reported.
fn take_present(set: &OwnedFd) -> Result<Vec<u64>, Errno> {
    const AT_ONCE: usize = 64;
    let (mut events, mut all) = ([MaybeUninit::uninit(); AT_ONCE], Vec::new());
    loop {
        let (ready, _) = epoll::wait(set, &mut events[..], Some(&Timespec::default()))?;
        all.extend(ready.iter().map(|event| event.data.u64()));
        if ready.len() < AT_ONCE {
            return Ok(all);
        }
    }
}

/// A held descriptor.
#[derive(Debug)]
pub(crate) struct Held {
    /// The key that its container uses for it.
    pub(crate) key: u32,
    /// Bits of [`watch`]. LIMIT: a descriptor without any is in no epoll set, since epoll would
    /// report a hang-up that the container has already seen.
    pub(crate) watch: u8,
    pub(crate) fd: OwnedFd,
}

/// A descriptor that is held, and its number in the epoll set.
type Numbered = (u64, Held);

/// A parked descriptor: the fields of [`Held`] without the descriptor itself.
#[derive(Debug)]
struct Parked {
    token: u64,
    key: u32,
    watch: u8,
}

/// The held descriptors of all sleeping containers.
#[derive(Debug, Default)]
pub(crate) struct Custody {
    sleepers: HashMap<Id, Sleeper>,
    tokens: HashMap<u64, Id>,
    lots: Lots,
    /// Containers that are polled again, by the time; the number makes an entry unique.
    again: BTreeMap<(Instant, u64), Id>,
    number: u64,
}

fn watched(token: u64, held: &Held) -> (epoll::EventData, epoll::EventFlags) {
    let mut flags = epoll::EventFlags::ONESHOT;
    flags.set(epoll::EventFlags::IN, held.watch & watch::READ != 0);
    flags.set(epoll::EventFlags::OUT, held.watch & watch::WRITE != 0);
    (epoll::EventData::new_u64(token), flags)
}

/// Returns whether a descriptor is a socket that listens.
fn listens(held: &Held) -> bool {
    rustix::net::sockopt::socket_acceptconn(&held.fd).unwrap_or(false)
}

/// Returns the label of a container's parked descriptors: its id, and the key and watch of each.
fn label(id: Id, held: &[Numbered], more: u8) -> Vec<u8> {
    let text = id.as_str().as_bytes();
    let mut label = vec![text.len() as u8];
    label.extend_from_slice(text);
    for (_, Held { key, watch, .. }) in held {
        label.extend_from_slice(&key.to_ne_bytes());
        label.push(*watch | more);
    }
    label
}

fn read_label(label: &[u8]) -> Option<(Id, Vec<(u32, u8)>)> {
    let (length, rest) = label.split_first()?;
    let (id, rest) = rest.split_at_checked(usize::from(*length))?;
    let (held, left) = rest.as_chunks::<5>();
    let one = |[a, b, c, d, watch]: &[u8; 5]| (u32::from_ne_bytes([*a, *b, *c, *d]), *watch);
    left.is_empty().then_some((Id::new(id).ok()?, held.iter().map(one).collect()))
}

impl Custody {
    /// Takes over what an earlier keeper has left in the vault. `next` returns an unused number. The
    /// output of containers is parked in the same lots.
    pub(crate) fn restore(
        epoll: &OwnedFd,
        vault: Vault,
        mut next: impl FnMut() -> u64,
        outputs: &mut Outputs,
    ) -> Self {
        let mut custody = Self::default();
        let (sleepers, tokens) = (&mut custody.sleepers, &mut custody.tokens);
        let mut silent = Vec::new();
        custody.lots.restore(vault, |Found { label, fds }| {
            if let Some(target) = Target::read(label) {
                return Some(outputs.restore(next(), target));
            }
            let (id, held) = read_label(label)?;
            if held.len() + 1 != fds.len() || sleepers.contains_key(&id) {
                return None;
            }
            let is_silent = held.iter().any(|(_, watch)| watch & CHANGES != 0);
            let number = next() | SET;
            let flags = epoll::EventFlags::IN | epoll::EventFlags::ONESHOT;
            epoll::add(epoll, &fds[0], epoll::EventData::new_u64(number), flags).ok()?;
            let parked = held.into_iter();
            let parked = parked.map(|(key, watch)| (key, watch & !CHANGES));
            let parked = parked.map(|(key, watch)| Parked { token: next(), key, watch });
            let parked = Some((number, parked.collect()));
            sleepers
                .insert(id, Sleeper { parked, is_found: true, is_silent, ..Sleeper::default() });
            silent.extend(is_silent.then_some(id));
            tokens.insert(number, id);
            Some(number)
        });
        silent.into_iter().for_each(|id| custody.poll_again(id, AGAIN));
        custody
    }

    /// The lots, in which the output of containers is parked, too.
    pub(crate) fn lots(&mut self) -> &mut Lots {
        &mut self.lots
    }

    /// Readable when the vault has ended.
    pub(crate) fn vault(&self) -> Option<BorrowedFd<'_>> {
        self.lots.vault()
    }

    pub(crate) fn lose_vault(&mut self) {
        self.lots.lose_vault();
    }

    /// Starts a vault if there is none and it is needed. Returns whether it did.
    pub(crate) fn secure(&mut self) -> bool {
        self.lots.secure()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.sleepers.is_empty()
    }

    /// Takes a descriptor into custody and watches it.
    pub(crate) fn hold(
        &mut self,
        epoll: &OwnedFd,
        token: u64,
        id: Id,
        held: Held,
    ) -> Result<(), Errno> {
        if self.sleepers.get(&id).is_some_and(|sleeper| sleeper.is_let_go) {
            self.let_go(epoll, id);
        }
        self.fetch(epoll, id)?;
        if self.find(id, held.key).is_some() {
            return Err(Errno::EXIST);
        }
        if held.watch != 0 {
            let (data, flags) = watched(token, &held);
            epoll::add(epoll, &held.fd, data, flags)?;
            self.tokens.insert(token, id);
        }
        self.sleepers.entry(id).or_default().held.push((token, held));
        Ok(())
    }

    /// Like [`Custody::park`], also at the end of a wake that has failed. The descriptors are not polled before
    /// [`Custody::came_back`] has set the time.
    pub(crate) fn park_again(&mut self, epoll: &OwnedFd, id: Id) -> Result<(), Errno> {
        if let Some(sleeper) = self.sleepers.get_mut(&id) {
            sleeper.is_put_off |= sleeper.is_called;
        }
        self.park(epoll, id)
    }

    /// Parks all held descriptors of a container; does nothing during its wake. After a failed wake they are
    /// not polled.
    pub(crate) fn park(&mut self, epoll: &OwnedFd, id: Id) -> Result<(), Errno> {
        let Some(sleeper) = self.sleepers.get_mut(&id) else { return Ok(()) };
        let Some((first, _)) = sleeper.held.first() else { return Ok(()) };
        let number = first | SET;
        let (is_put_off, is_silent) = (sleeper.is_put_off, sleeper.is_silent);
        if sleeper.is_called && !is_put_off || sleeper.held.len() + 1 > DESCRIPTORS {
            return Ok(());
        }
        let own = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (token, held) in sleeper.held.iter().filter(|(_, held)| held.watch != 0) {
            let (data, mut flags) = watched(*token, held);
            if is_silent && listens(held) {
                flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
            }
            epoll::add(&own, &held.fd, data, flags)?;
        }
        // An event of another descriptor is not to be lost.
        let is_other = |token| {
            let found = sleeper.held.iter().find(|(one, _)| *one == token);
            found.is_some_and(|(_, held)| !listens(held))
        };
        let has_other = is_silent && take_present(&own)?.into_iter().any(is_other);
        let mut flags = epoll::EventFlags::ONESHOT;
        flags.set(epoll::EventFlags::IN, !is_put_off);
        epoll::add(epoll, &own, epoll::EventData::new_u64(number), flags)?;
        let fds = std::iter::once(&own).chain(sleeper.held.iter().map(|(_, held)| &held.fd));
        let label = label(id, &sleeper.held, if is_silent { CHANGES } else { 0 });
        self.lots.park(number, &label, &fds.map(AsFd::as_fd).collect::<Vec<_>>())?;
        // ORDER: first parked, in the container's own set; then removed from the keeper's.
        let held = std::mem::take(&mut sleeper.held);
        for (token, held) in &held {
            if self.tokens.remove(token).is_some() {
                let _ = epoll::delete(epoll, &held.fd); // a member of the set
            }
        }
        let parked = held.into_iter();
        let parked = parked.map(|(token, Held { key, watch, .. })| Parked { token, key, watch });
        sleeper.parked = Some((number, parked.collect()));
        self.tokens.insert(number, id);
        if has_other {
            self.poll_again(id, SILENT);
        }
        Ok(())
    }

    /// Takes the descriptors of a container out of the lot, if they are parked.
    fn fetch(&mut self, epoll: &OwnedFd, id: Id) -> Result<(), Errno> {
        let Some(sleeper) = self.sleepers.get_mut(&id) else { return Ok(()) };
        let Some((number, _)) = &sleeper.parked else { return Ok(()) };
        let fds = self.lots.take(*number)?;
        let Some((number, parked)) = sleeper.parked.take() else { return Ok(()) };
        self.tokens.remove(&number);
        // The first is its epoll set, which is closed here.
        for (Parked { token, key, watch }, fd) in parked.into_iter().zip(fds.into_iter().skip(1)) {
            let held = Held { key, watch, fd };
            if held.watch != 0 {
                let (data, flags) = watched(token, &held);
                epoll::add(epoll, &held.fd, data, flags)?;
                self.tokens.insert(token, id);
            }
            sleeper.held.push((token, held));
        }
        Ok(())
    }

    /// Returns a copy of a held descriptor.
    pub(crate) fn take(&mut self, epoll: &OwnedFd, id: Id, key: u32) -> Result<OwnedFd, Errno> {
        self.fetch(epoll, id)?;
        self.find(id, key).ok_or(Errno::NOENT)?.fd.try_clone().map_err(|_| Errno::MFILE)
    }

    fn find(&self, id: Id, key: u32) -> Option<&Held> {
        self.sleepers.get(&id)?.held.iter().map(|(_, held)| held).find(|held| held.key == key)
    }

    /// ORDER: out of the epoll set, then closed: the container has the same open file, which would
    /// stay in the set for as long as it lives.
    pub(crate) fn let_go(&mut self, epoll: &OwnedFd, id: Id) {
        let _ = self.fetch(epoll, id);
        if let Some(sleeper) = self.sleepers.get_mut(&id)
            && sleeper.parked.is_some()
        {
            (sleeper.is_let_go, sleeper.is_called, sleeper.is_silent) = (true, true, false);
            self.poll_again(id, AGAIN);
            return;
        }
        for (token, held) in self.sleepers.remove(&id).into_iter().flat_map(|s| s.held) {
            if self.tokens.remove(&token).is_some() {
                let _ = epoll::delete(epoll, &held.fd); // may not be a member
            }
        }
    }

    /// Returns the container whose descriptor has this number, unless its wake is in progress.
    pub(crate) fn called(&mut self, token: u64) -> Option<Id> {
        let id = *self.tokens.get(&token)?;
        let sleeper = self.sleepers.get_mut(&id)?;
        if sleeper.is_called {
            return None;
        }
        if !std::mem::take(&mut sleeper.is_polled_anew) {
            sleeper.silences = 0; // a new client
        }
        sleeper.begin_wake();
        Some(id)
    }

    /// Starts a wake for another reason. Returns whether none was in progress.
    pub(crate) fn start_wake(&mut self, id: Id) -> bool {
        let Some(sleeper) = self.sleepers.get_mut(&id).filter(|it| !it.is_called) else {
            return false;
        };
        sleeper.begin_wake();
        true
    }

    /// Returns whether descriptors of a container are held.
    pub(crate) fn has(&self, id: Id) -> bool {
        self.sleepers.get(&id).is_some_and(|sleeper| !sleeper.is_let_go)
    }

    /// Like [`Custody::has`], for a client that knows the container to be asleep: marks its
    /// descriptors as requested.
    pub(crate) fn request(&mut self, id: Id) -> bool {
        if let Some(sleeper) = self.sleepers.get_mut(&id) {
            sleeper.is_found = false;
        }
        self.has(id)
    }

    /// Returns the containers whose descriptors were found in the vault and not requested.
    pub(crate) fn unrequested(&self) -> Vec<Id> {
        self.sleepers.iter().filter(|(_, sleeper)| sleeper.is_found).map(|(id, _)| *id).collect()
    }

    /// Handles the exit of a waker's job: if descriptors are still held, the wake has failed.
    /// They are parked until the next attempt: the vault has them.
    pub(crate) fn came_back(&mut self, epoll: &OwnedFd, id: Id) {
        let Some(sleeper) = self.sleepers.get_mut(&id).filter(|it| !it.is_let_go) else { return };
        sleeper.failures = sleeper.failures.saturating_add(1);
        (sleeper.is_called, sleeper.is_put_off, sleeper.is_silent) = (true, true, false);
        let after = again_after(sleeper.failures);
        self.poll_again(id, after);
        // A descriptor that cannot be parked now stays open, in this keeper alone.
        let _ = self.park(epoll, id);
    }

    /// Handles the answer of a waker that has found silent clients only.
    pub(crate) fn was_silent(&mut self, epoll: &OwnedFd, id: Id) {
        // Parked from a release that is not complete, or taken out by the waker.
        let _ = self.fetch(epoll, id);
        let Some(sleeper) = self.sleepers.get_mut(&id).filter(|it| !it.is_let_go) else { return };
        sleeper.silences = sleeper.silences.saturating_add(1);
        (sleeper.is_called, sleeper.is_put_off, sleeper.is_silent) = (false, false, true);
        let after = look_after(sleeper.silences);
        self.poll_again(id, after);
        // Descriptors that cannot be parked are looked at again at that time, not earlier.
        let _ = self.park(epoll, id);
    }

    /// Returns whether an event that wakes the container is present at a held descriptor.
    pub(crate) fn is_ready(&mut self, epoll: &OwnedFd, id: Id, key: u32) -> Result<bool, Errno> {
        self.fetch(epoll, id)?;
        let held = self.find(id, key).ok_or(Errno::NOENT)?;
        let mut events = PollFlags::empty();
        events.set(PollFlags::IN, held.watch & watch::READ != 0);
        events.set(PollFlags::OUT, held.watch & watch::WRITE != 0);
        if events.is_empty() {
            return Ok(false);
        }
        let mut fds = [PollFd::new(&held.fd, events)];
        Ok(poll(&mut fds, Some(&Timespec::default()))? > 0)
    }

    fn poll_again(&mut self, id: Id, after: Duration) {
        self.number += 1;
        if let Some(sleeper) = self.sleepers.get_mut(&id) {
            sleeper.due = Some(self.number);
        }
        self.again.insert((Instant::now() + after, self.number), id);
    }

    /// Returns when [`Custody::look`] has to run next.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.again.first_key_value().map(|((at, _), _)| *at)
    }

    /// Retries failed wakes and releases when their time has come.
    pub(crate) fn look(&mut self, epoll: &OwnedFd, now: Instant) {
        while self.next().is_some_and(|at| at <= now) {
            let Some(((_, number), id)) = self.again.pop_first() else { return };
            if self.sleepers.get(&id).is_none_or(|sleeper| sleeper.due != Some(number)) {
                continue; // a wake has begun since
            }
            if self.sleepers.get(&id).is_some_and(|sleeper| sleeper.is_let_go) {
                self.let_go(epoll, id);
                continue;
            }
            if self.fetch(epoll, id).is_err() {
                self.poll_again(id, AGAIN);
                continue;
            }
            let Some(sleeper) = self.sleepers.get_mut(&id) else { continue };
            (sleeper.is_called, sleeper.is_put_off, sleeper.is_silent) = (false, false, false);
            sleeper.is_polled_anew = sleeper.silences > 0;
            for (token, held) in sleeper.held.iter().filter(|(_, held)| held.watch != 0) {
                let (data, flags) = watched(*token, held);
                let _ = epoll::modify(epoll, &held.fd, data, flags); // a member of the set
            }
            // A descriptor that cannot be parked now stays open, in this keeper alone.
            let _ = self.park(epoll, id);
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    /// How long this test may be stopped between two lines.
    const SLACK: Duration = Duration::from_secs(30);

    fn id(n: usize) -> Id {
        Id::new(format!("c{n}").as_bytes()).unwrap()
    }

    /// Returns the containers to wake, as the server finds them.
    fn called(custody: &mut Custody, epoll: &OwnedFd) -> Vec<Id> {
        let mut events = [MaybeUninit::uninit(); 16];
        let (ready, _) = epoll::wait(epoll, &mut events[..], Some(&Timespec::default())).unwrap();
        ready.iter().filter_map(|event| custody.called(event.data.u64())).collect()
    }

    #[test]
    fn of_many_sleeping_containers_the_called_one_is_reported() {
        const COUNT: usize = 100;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let mut custody = Custody::default();
        let mut serial = 0;
        let mut next = || {
            serial += 1;
            serial
        };
        let mut callers = Vec::new();
        for n in 0..COUNT {
            let (other, silent) =
                (eventfd(0, EventfdFlags::CLOEXEC), eventfd(9, EventfdFlags::CLOEXEC));
            let (other, silent) = (other.unwrap(), silent.unwrap());
            callers.push(other.try_clone().unwrap());
            for (key, watch, fd) in [(5, watch::READ, other), (6, 0, silent)] {
                custody.hold(&epoll, next(), id(n), Held { key, watch, fd }).unwrap();
            }
            custody.park(&epoll, id(n)).unwrap();
        }
        let open =
            |custody: &Custody| custody.sleepers.values().map(|it| it.held.len()).sum::<usize>();
        assert_eq!((open(&custody), custody.next()), (0, None));
        assert_eq!(called(&mut custody, &epoll), [], "no client has connected yet");
        for n in [77, 3, 99, 50] {
            rustix::io::write(&callers[n], &1u64.to_ne_bytes()).unwrap();
            assert_eq!(called(&mut custody, &epoll), [id(n)]);
            assert_eq!(called(&mut custody, &epoll), [], "one report per wake");
            let taken = custody.take(&epoll, id(n), 5).unwrap();
            let mut bytes = [0; 8];
            rustix::io::read(&taken, &mut bytes).unwrap();
            assert_eq!(u64::from_ne_bytes(bytes), 1, "it is the very file");
            assert_eq!(custody.take(&epoll, id(n), 7).unwrap_err(), Errno::NOENT);
            custody.let_go(&epoll, id(n));
            assert_eq!(custody.take(&epoll, id(n), 5).unwrap_err(), Errno::NOENT);
        }
        // A container that could not be woken is reported again, later after each failure.
        rustix::io::write(&callers[60], &1u64.to_ne_bytes()).unwrap();
        assert_eq!(called(&mut custody, &epoll), [id(60)]);
        for doubled in [1, 2, 4, 8, 16, 32, 60, 60] {
            custody.take(&epoll, id(60), 5).unwrap(); // by the failed wake
            assert_eq!(open(&custody), 2);
            let begin = Instant::now();
            custody.came_back(&epoll, id(60));
            assert_eq!(open(&custody), 0, "parked meanwhile, for the vault");
            let wait = custody.next().unwrap() - begin;
            let doubled_s = Duration::from_secs(doubled);
            assert!((doubled_s..doubled_s + SLACK).contains(&wait), "{wait:?}");
            custody.look(&epoll, begin + AGAIN * doubled as u32 / 2);
            assert_eq!(called(&mut custody, &epoll), [], "not before its time");
            custody.look(&epoll, Instant::now() + AGAIN * (doubled as u32 + 1));
            assert_eq!(open(&custody), 0, "parked again");
            assert_eq!(called(&mut custody, &epoll), [id(60)]);
        }
        (0..COUNT).for_each(|n| custody.let_go(&epoll, id(n)));
        assert!(custody.is_empty() && custody.tokens.is_empty() && open(&custody) == 0);
    }
    #[test]
    fn silent_clients_are_looked_at_later_each_time_and_new_ones_at_once() {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let mut custody = Custody::default();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let other = event.try_clone().unwrap();
        for (token, key, fd) in [(1, 5, listener.into()), (2, 6, event)] {
            let held = Held { key, watch: watch::READ, fd };
            custody.hold(&epoll, token, id(1), held).unwrap();
        }
        custody.park(&epoll, id(1)).unwrap();
        let connect = || std::net::TcpStream::connect(address).unwrap();
        let first = connect();
        assert_eq!(called(&mut custody, &epoll), [id(1)]);
        for doubled in [10, 20, 40] {
            assert!(custody.is_ready(&epoll, id(1), 5).unwrap());
            assert!(!custody.is_ready(&epoll, id(1), 6).unwrap());
            let begin = Instant::now();
            custody.was_silent(&epoll, id(1));
            let wait = custody.next().unwrap() - begin;
            let doubled = Duration::from_millis(doubled);
            assert!((doubled..doubled + SLACK).contains(&wait), "{wait:?}");
            assert_eq!(called(&mut custody, &epoll), [], "nothing has changed");
            custody.look(&epoll, begin + Duration::from_secs(70));
            assert_eq!(called(&mut custody, &epoll), [id(1)], "it is time for another look");
        }
        custody.was_silent(&epoll, id(1));
        let second = connect();
        assert_eq!(called(&mut custody, &epoll), [id(1)], "a new client");
        assert_eq!(custody.sleepers[&id(1)].silences, 0);
        custody.look(&epoll, Instant::now() + Duration::from_secs(70));
        assert!(custody.sleepers[&id(1)].is_called, "the time of an earlier look is void");
        custody.was_silent(&epoll, id(1));
        rustix::io::write(&other, &1u64.to_ne_bytes()).unwrap();
        assert_eq!(called(&mut custody, &epoll), [id(1)], "another event");
        custody.let_go(&epoll, id(1));
        assert!(custody.is_empty() && custody.tokens.is_empty());
        drop((first, second));
    }

    #[test]
    fn label_round_trips_id_keys_and_watches() {
        let fd = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let held = [
            (1, Held { key: 7, watch: 3, fd: fd() }),
            (2, Held { key: u32::MAX, watch: 0, fd: fd() }),
        ];
        let text = label(id(5), &held, 0);
        assert_eq!(read_label(&text), Some((id(5), vec![(7, 3), (u32::MAX, 0)])));
        assert_eq!(read_label(&label(id(5), &[], CHANGES)), Some((id(5), vec![])));
        for cut in 0..text.len() {
            let read = read_label(&text[..cut]);
            assert!(read.is_none_or(|(of, held)| of == id(5) && held.len() < 2), "{cut}");
        }
    }
}
