//! The nursery: a process that makes spares and gives them away ([`crate::spare`]).
//!
//! The keeper starts it (`dormouse internal nursery`) behind the answer to a second start within a second. It makes
//! nothing before a command has asked for a spare, and exits a second after the last one did, with all that it has. A
//! host that starts a container now and then has none.
//!
//! **Two threads.** One answers commands, with spares that are ready: it takes no lock but that of the [`Nursery`], and
//! makes nothing. The other one makes spares, and releases those that are not wanted. It begins when a command that
//! has asked has ended, or [`BUSY`] later, so behind the answer of that command.
//!
//! **Created containers.** A command that creates a container leaves its parts here, and the command that starts it
//! takes them ([`spare::keep`]). They are kept for a second, at most `[spares] keep` of them. They belong to the
//! container: its removal or an ordinary start releases them as those of an interrupted start, and does not ask here.
//! For ten seconds after one that was not started in time, such commands get no spare.
//!
//! **How many.** As many as commands have asked for in the last second, at most `[spares] keep` of them; of the two
//! kinds that were asked for last, because a spare has its image mounted. More than that are given up when they are a
//! second old. All are given up where memory is short, where
//! the settings or the program have changed, while CPUs or memory are reserved (each group counts there), and when a
//! command needs what they hold ([`spare::dismiss`]).
//!
//! Uses `ground`, `settings`, `state`, `contract`, `net`, `layer`, `admission`, `spare` and `start`.

use std::collections::VecDeque;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dormouse_image::{Assembled, Store};
use dormouse_kernel::cgroup::Cgroup;
use dormouse_launch::{Keeper, LaunchError, wire};
use dormouse_model::{Config, ContainerId, IdMap, State};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};

use crate::disk::{self, Lock};
use crate::error::{Error, Result};
use crate::ground::{self, Ground};
use crate::net::{self, Net};
use crate::spare::{self, Kind, MESSAGE_BYTES_MAX, Request, Seen, Spare, Stamp};
use crate::start::{self, Bearer, Born};
use crate::{admission, contract, layer, settings, state};

/// How long spares are kept without a start.
const KEPT: Duration = Duration::from_secs(1);

/// A command that has asked and has not ended after this time is not waited for: its container runs.
const BUSY: Duration = Duration::from_millis(20);

/// LIMIT: how long commands that create containers get no spare after a container that was not started in time.
const RESTED: Duration = Duration::from_secs(10);

/// LIMIT: kinds of spares. Each has an image mounted.
const KINDS_MAX: usize = 2;

/// How often the memory of the host is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// A spare with what it was made for.
#[derive(Debug)]
struct Ready {
    kind: Kind,
    spare: Spare,
    since: Instant,
}

/// The parts of a created container until its start.
#[derive(Debug)]
struct Kept {
    spare: Spare,
    /// Its configuration at its creation.
    config: Seen,
    since: Instant,
}

/// What both threads know.
#[derive(Debug, Default)]
struct Nursery {
    ready: Vec<Ready>,
    kept: Vec<Kept>,
    /// When the last created container that was not started in time has lost its parts.
    rested: Option<Instant>,
    /// Spares that could not be given away.
    unwanted: Vec<Spare>,
    /// When commands have asked in the last second, and for what.
    asked: VecDeque<(Instant, Kind)>,
    last_asked: Option<Instant>,
    /// A command that had asked has its answer.
    is_due: bool,
    /// The nursery is to exit.
    ends: bool,
    /// Commands that wait for its end.
    waiting: Vec<OwnedFd>,
}

impl Nursery {
    /// The kinds that are wanted, the last first, with their numbers.
    fn wanted(&mut self, now: Instant, keep: usize) -> Vec<(Kind, usize)> {
        while self.asked.front().is_some_and(|(at, _)| *at + KEPT <= now) {
            self.asked.pop_front();
        }
        let mut kinds: Vec<(Kind, usize)> = Vec::new();
        for (_, kind) in self.asked.iter().rev() {
            match kinds.iter().position(|(known, _)| known == kind) {
                Some(at) => kinds[at].1 += 1,
                None if kinds.len() < KINDS_MAX => kinds.push((kind.clone(), 1)),
                None => {}
            }
        }
        let mut room = keep;
        for (_, number) in &mut kinds {
            *number = (*number).min(room);
            room -= *number;
        }
        kinds
    }

    /// Takes a spare that is not wanted, or the parts of a container that was not started in time. `keep` is 0 where
    /// none are kept now.
    fn surplus(&mut self, wanted: &[(Kind, usize)], now: Instant, keep: usize) -> Option<Spare> {
        if let Some(spare) = self.unwanted.pop() {
            return Some(spare);
        }
        let is_none_kept = self.ends || keep == 0;
        let is_late = |kept: &Kept| kept.since + KEPT <= now;
        if let Some(at) = self.kept.iter().position(|kept| is_none_kept || is_late(kept)) {
            if is_late(&self.kept[at]) {
                self.rested = Some(now);
            }
            return Some(self.kept.swap_remove(at).spare);
        }
        let count = |kind: &Kind| self.ready.iter().filter(|ready| ready.kind == *kind).count();
        let is_wanted = |ready: &Ready| {
            let number = wanted.iter().find(|(kind, _)| *kind == ready.kind).map_or(0, |it| it.1);
            // More than that are kept for a moment alone: requests do not come at equal distances.
            number > 0 && (count(&ready.kind) <= number || now < ready.since + KEPT)
        };
        // The oldest first.
        let at = self.ready.iter().position(|ready| !is_wanted(ready))?;
        Some(self.ready.remove(at).spare)
    }

    /// The kind of which one is missing.
    fn missing(&self, wanted: &[(Kind, usize)]) -> Option<Kind> {
        let count = |kind: &Kind| self.ready.iter().filter(|ready| ready.kind == *kind).count();
        wanted.iter().find(|(kind, number)| count(kind) < *number).map(|(kind, _)| kind.clone())
    }
}

/// The nursery and its signal for the thread that makes spares.
#[derive(Default)]
struct Shared {
    nursery: Mutex<Nursery>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Nursery> {
        self.nursery.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes spares and gives them away, until none is asked for. `keeper` is a socket that is closed when the keeper ends.
pub(crate) fn run(ground: &Ground, keeper: BorrowedFd<'_>) -> Result<()> {
    let keep = settings::spares(&ground.settings())?;
    if keep == 0 {
        return Ok(());
    }
    let Some(_alone) = Lock::try_take_new(&spare::lock(ground))? else { return Ok(()) };
    disk::make_dir(&ground.places.spares(), 0o700)?;
    let stamp = Stamp::now(ground);
    let path = ground.places.run.join(spare::SOCKET);
    let listener = listen(ground, &path)?;
    let shared = Shared::default();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let answering = Answering { ground, shared: &shared, stamp: &stamp, keep };
            answer(&answering, &listener, keeper);
            // Commands do not wait for an answer while spares are released.
            let _ = disk::remove(&path);
            drop(listener);
        });
        make_all(ground, &shared, &stamp, keep);
    });
    Ok(())
}

fn listen(ground: &Ground, path: &Path) -> Result<OwnedFd> {
    disk::remove(path)?; // of a killed nursery
    let failed = |e: Errno| Error::file("cannot listen at", path)(e.into());
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let sock = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let sock = sock.map_err(failed)?;
    let (address, _dir) = admission::address(&ground.places.run, spare::SOCKET).map_err(failed)?;
    rustix::net::bind(&sock, &address).map_err(failed)?;
    rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR).map_err(failed)?;
    rustix::net::listen(&sock, 256).map_err(failed)?;
    Ok(sock)
}

/// A connected command. One whose container runs goes on without: its connection is closed after [`BUSY`].
struct Client {
    sock: OwnedFd,
    /// When it has connected, or has asked.
    since: Instant,
    has_asked: bool,
}

impl Client {
    /// When it is not waited for any more.
    fn until(&self) -> Instant {
        self.since + if self.has_asked { BUSY } else { KEPT }
    }
}

/// What the thread that answers commands knows.
struct Answering<'n> {
    ground: &'n Ground,
    shared: &'n Shared,
    stamp: &'n Stamp,
    /// LIMIT: created containers with parts that are kept.
    keep: usize,
}

/// The thread that answers commands.
fn answer(answering: &Answering<'_>, listener: &OwnedFd, keeper: BorrowedFd<'_>) {
    let shared = answering.shared;
    let mut clients: Vec<Client> = Vec::new();
    // No descriptor is left: a connection that cannot be accepted stays readable.
    let mut deaf_until = None;
    loop {
        let now = Instant::now();
        let mut next = now + LOOK;
        clients.retain(|client| {
            let stays = now < client.until();
            match stays {
                true => next = next.min(client.until()),
                false if client.has_asked => due(shared),
                false => {}
            }
            stays
        });
        if shared.lock().ends {
            return;
        }
        deaf_until = deaf_until.filter(|until| now < *until);
        let wait = next.saturating_duration_since(now);
        let ready: Vec<bool> = {
            let mut all = vec![PollFd::from_borrowed_fd(keeper, PollFlags::IN)];
            let calls = if deaf_until.is_some() { PollFlags::empty() } else { PollFlags::IN };
            all.push(PollFd::new(listener, calls));
            all.extend(clients.iter().map(|client| PollFd::new(&client.sock, PollFlags::IN)));
            let timeout = Timespec {
                tv_sec: wait.as_secs() as i64,
                tv_nsec: i64::from(wait.subsec_nanos()) + 1,
            };
            if poll(&mut all, Some(&timeout)).is_err() {
                continue; // interrupted, or without memory for a moment
            }
            all.iter().map(|fd| !fd.revents().is_empty()).collect()
        };
        if ready[0] {
            // The keeper sends nothing: it has ended, and with it all newborns that it would settle.
            shared.lock().ends = true;
            shared.changed.notify_all();
            return;
        }
        let mut kept = Vec::with_capacity(clients.len() + 1);
        for (client, is_ready) in clients.into_iter().zip(&ready[2..]) {
            match is_ready {
                true => kept.extend(answering.serve(client)),
                false => kept.push(client),
            }
        }
        clients = kept;
        if ready[1] {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(listener, flags) {
                Ok(sock) if sockopt::socket_peercred(&sock).is_ok_and(|it| it.uid.is_root()) => {
                    let client = Client { sock, since: Instant::now(), has_asked: false };
                    // Its request is mostly there already.
                    clients.extend(answering.serve(client));
                }
                Ok(_) => {}
                Err(_) => deaf_until = Some(Instant::now() + LOOK),
            }
        }
    }
}

/// A spare may be made in place of one that was given away.
fn due(shared: &Shared) {
    shared.lock().is_due = true;
    shared.changed.notify_all();
}

impl Answering<'_> {
    /// Reads a request. Returns the client while it is connected.
    fn serve(&self, mut client: Client) -> Option<Client> {
        let (mut text, mut fds) = (vec![0; MESSAGE_BYTES_MAX], Vec::new());
        let received =
            wire::receive(&client.sock, &mut text, RecvFlags::DONTWAIT, |fd| fds.push(fd));
        let n = match received {
            Err(Errno::AGAIN) => return Some(client),
            Ok(0) | Err(_) => {
                if client.has_asked {
                    due(self.shared);
                }
                return None;
            }
            Ok(n) => n,
        };
        match serde_json::from_slice(&text[..n]) {
            Ok(Request::Take { kind, stamp, rests }) => {
                let spare = self.taken(*kind, &stamp, rests);
                let is_given = spare.is_some();
                let is_answered = self.give(&client, spare);
                // The next one is made behind the start, and not between it and the creation.
                (client.since, client.has_asked) = (Instant::now(), !(rests && is_given));
                if stamp != *self.stamp || !is_answered {
                    due(self.shared);
                }
                Some(client)
            }
            Ok(Request::Keep { given, config }) => {
                self.keep(Spare::received(self.ground, *given, fds)?, config);
                None
            }
            Ok(Request::Begin { id, config, stamp }) => {
                let is_answered = self.give(&client, self.begun(&id, &config, &stamp));
                (client.since, client.has_asked) = (Instant::now(), true);
                if !is_answered {
                    due(self.shared);
                }
                Some(client)
            }
            Ok(Request::Dismiss) => {
                let mut nursery = self.shared.lock();
                nursery.ends = true;
                nursery.waiting.push(client.sock);
                self.shared.changed.notify_all();
                None
            }
            // Not a request: a process of root that is no command of this program.
            Err(_) => None,
        }
    }

    /// The spare for a request of this kind, if there is one.
    fn taken(&self, kind: Kind, stamp: &Stamp, rests: bool) -> Option<Spare> {
        let now = Instant::now();
        let mut nursery = self.shared.lock();
        // Another program, or other settings: the next nursery has them.
        nursery.ends |= stamp != self.stamp;
        nursery.last_asked = Some(now);
        let at = nursery.ready.iter().position(|ready| ready.kind == kind);
        nursery.asked.push_back((now, kind));
        // LIMIT: as many created containers keep their parts as there may be spares.
        let has_rested = nursery.rested.is_some_and(|at| now < at + RESTED);
        let may_rest = !has_rested && nursery.kept.len() < self.keep;
        // ORDER: a command that has them released finds no use of an image afterwards.
        let at = at.filter(|_| !nursery.ends && (may_rest || !rests))?;
        // The oldest first: the clock of one with views goes on.
        Some(nursery.ready.remove(at).spare)
    }

    /// Keeps the parts of a created container.
    fn keep(&self, spare: Spare, config: Seen) {
        let since = Instant::now();
        let mut nursery = self.shared.lock();
        nursery.last_asked = Some(since);
        match !nursery.ends && nursery.kept.len() < self.keep {
            true => nursery.kept.push(Kept { spare, config, since }),
            false => nursery.unwanted.push(spare),
        }
        self.shared.changed.notify_all();
    }

    /// The parts of a created container that starts. Those that are outdated are released.
    fn begun(&self, id: &ContainerId, config: &Seen, stamp: &Stamp) -> Option<Spare> {
        let mut nursery = self.shared.lock();
        nursery.ends |= stamp != self.stamp;
        nursery.last_asked = Some(Instant::now());
        let at = nursery.kept.iter().position(|kept| kept.spare.id == *id)?;
        let Kept { spare, config: made_with, .. } = nursery.kept.swap_remove(at);
        if nursery.ends || made_with != *config {
            nursery.unwanted.push(spare);
            return None;
        }
        Some(spare)
    }

    /// Answers with a spare, or that there is none. Returns whether the command has received that.
    fn give(&self, to: &Client, spare: Option<Spare>) -> bool {
        let Some(spare) = spare else {
            return wire::send(&to.sock, b"-", &[], SendFlags::DONTWAIT).is_ok();
        };
        let is_given = spare.give(to.sock.as_fd()).is_ok();
        match is_given {
            true => spare.leave(),
            false => self.shared.lock().unwanted.push(spare),
        }
        is_given
    }
}

/// The thread that makes spares, and releases them.
fn make_all(ground: &Ground, shared: &Shared, stamp: &Stamp, keep: usize) {
    let began = Instant::now();
    loop {
        let now = Instant::now();
        let is_short = spare::is_short_of_memory();
        let keep = if is_short || contract::has_ledger(ground) { 0 } else { keep };
        let (surplus, missing) = {
            let mut nursery = shared.lock();
            let over = nursery.last_asked.unwrap_or(began) + KEPT <= now;
            nursery.ends |= over || *stamp != Stamp::now(ground);
            let wanted = if nursery.ends { Vec::new() } else { nursery.wanted(now, keep) };
            let has_none = wanted.iter().all(|(_, number)| *number == 0);
            let wanted = if has_none { Vec::new() } else { wanted };
            let surplus = nursery.surplus(&wanted, now, keep);
            if surplus.is_none() && nursery.ends {
                // ORDER: the lock is held to the end, so no spare is made or given away any more.
                nursery.waiting.clear();
                return;
            }
            let missing = nursery.missing(&wanted).filter(|_| nursery.is_due);
            if surplus.is_none() && missing.is_none() {
                nursery.is_due = false;
                drop(shared.changed.wait_timeout(nursery, LOOK));
                continue;
            }
            (surplus, missing)
        };
        if let Some(spare) = surplus {
            let _ = give_up(ground, spare); // otherwise the next command releases it
            continue;
        }
        if let Some(kind) = missing {
            match make(ground, &kind) {
                Ok(spare) => {
                    let since = Instant::now();
                    shared.lock().ready.push(Ready { kind, spare, since });
                }
                // A start has the same error, and reports it. The next nursery tries again.
                Err(_) => shared.lock().ends = true,
            }
        }
    }
}

/// Makes a spare.
fn make(ground: &Ground, kind: &Kind) -> Result<Spare> {
    // Shared objects are not removed meanwhile.
    let _in_use = ground.in_use()?;
    let id = ground::new_id()?;
    let dir = ground.places.spares().join(id.as_str());
    let made = fs::DirBuilder::new().mode(0o700).create(&dir);
    made.map_err(Error::file("cannot make directory", &dir))?;
    // ORDER: the lock of the nursery is held: no other process takes this one for the rest of a killed nursery.
    let lock = Lock::take(&dir)?;
    match make_in(ground, kind, &id, &dir) {
        Ok((born, root, config)) => {
            let Config { ids, addresses, .. } = config;
            let Born { keeper, newborn, device, .. } = born;
            let (lock, root) = (Some(lock), Some(root));
            Ok(Spare { id, ids, addresses, lock, keeper, newborn, root, device, user: None })
        }
        Err(e) => {
            let _ = spare::release(ground, &id, &dir, None); // the first error is returned
            Err(e)
        }
    }
}

fn make_in(
    ground: &Ground,
    kind: &Kind,
    id: &ContainerId,
    dir: &Path,
) -> Result<(Born, OwnedFd, Config)> {
    let ids: IdMap = ground.slots.take(false, id)?;
    let addresses = ground.network()?.allocate(kind.domain(), id, &[])?;
    let config = kind.config(id, ids, addresses)?;
    let lower = layer::lower(ground, &config.spec.root)?;
    Store::create_upper(dir, &ids, &lower)?;
    let run_dir = ground.run_dir(id);
    let made = fs::DirBuilder::new().mode(0o700).create(&run_dir);
    made.map_err(Error::file("cannot make directory", &run_dir))?;
    let maker = Maker { ground, config: &config, dir: dir.to_owned() };
    let (born, root) = start::bear(ground, &config, None, maker)?;
    if !born.newborn.takes_parts() {
        return Err(Error::Launch(LaunchError::Newborn { what: "takes no plan in parts" }));
    }
    Ok((born, root, config))
}

/// The nursery, for the birth of a spare.
struct Maker<'m> {
    ground: &'m Ground,
    config: &'m Config,
    dir: PathBuf,
}

impl Bearer for Maker<'_> {
    type Seen = OwnedFd;

    fn keeper(&mut self) -> Result<Keeper> {
        // Each spare has a connection of its own, which is given away with it.
        Ok(Keeper::connect(&self.ground.places.run)?.ok_or(LaunchError::KeeperGone)?)
    }

    fn introduce(&mut self, cgroup: &Cgroup, net: &Net) -> Result<()> {
        match net {
            Net::Domain(domain) => net::enter_unnamed(self.ground, self.config, cgroup, domain),
            Net::Host { .. } | Net::None { .. } | Net::Private { .. } => Ok(()),
        }
    }

    fn meanwhile(&mut self) -> Result<()> {
        Ok(())
    }

    fn assemble(&mut self, userns: BorrowedFd<'_>) -> Result<Assembled> {
        layer::assemble_spare(self.ground, self.config, &self.dir, userns)
    }

    fn look(&mut self, root: BorrowedFd<'_>) -> Result<OwnedFd> {
        root.try_clone_to_owned().map_err(Error::file("cannot keep", "the root of a spare"))
    }
}

/// Releases a spare that is not wanted any more.
fn give_up(ground: &Ground, spare: Spare) -> Result<()> {
    if spare.lock.is_none() {
        return spare.end(|id, _| release_kept(ground, id));
    }
    let dir = ground.places.spares().join(spare.id.as_str());
    spare.end(|id, ids| spare::release(ground, id, &dir, Some(ids)))
}

/// Releases the parts of a created container, unless it was started or removed meanwhile.
///
/// ORDER: its lock is not waited for, because its holder may wait for the nursery. The settler that follows an error
/// waits for it.
fn release_kept(ground: &Ground, id: &ContainerId) -> Result<()> {
    let dir = ground.dir(id);
    let Some(_lock) = Lock::try_take(&dir)? else {
        return match dir.exists() {
            true => Err(Error::file("cannot lock", &dir)(std::io::ErrorKind::WouldBlock.into())),
            false => Ok(()),
        };
    };
    let config = match ground.config(id) {
        Err(Error::NoContainer(_)) => return Ok(()), // withdrawn since
        other => other?,
    };
    let observed = state::observe(ground, &config)?;
    match observed.state == State::Created && ground.run_dir(id).exists() {
        true => spare::release_objects(ground, id),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(image: &str) -> Kind {
        let kind = serde_json::json!({
            "image": image, "domain": "default", "auto_remove": false, "limits": {}, "views": "auto",
        });
        serde_json::from_value(kind).unwrap()
    }

    #[test]
    fn spares_are_as_many_as_requests_of_the_last_second() {
        let now = Instant::now() + Duration::from_secs(10);
        let asked = |requests: &[(u64, &str)]| {
            let at = |ms| now - Duration::from_millis(ms);
            let asked = requests.iter().map(|(ms, image)| (at(*ms), kind(image))).collect();
            Nursery { asked, ..Nursery::default() }
        };
        let wanted = |requests: &[(u64, &str)], keep| asked(requests).wanted(now, keep);
        assert!(wanted(&[], 8).is_empty());
        assert!(wanted(&[(1000, "a")], 8).is_empty(), "too old");
        assert_eq!(wanted(&[(1001, "a"), (999, "a"), (1, "a")], 8), [(kind("a"), 2)]);
        // The last two kinds, the last one first.
        let three = [(900, "a"), (800, "b"), (700, "b"), (600, "c"), (500, "b")];
        assert_eq!(wanted(&three, 8), [(kind("b"), 3), (kind("c"), 1)]);
        assert_eq!(wanted(&three, 2), [(kind("b"), 2), (kind("c"), 0)]);
        assert_eq!(wanted(&[(5, "a"); 20], 8), [(kind("a"), 8)]);
        assert_eq!(asked(&three).missing(&[(kind("b"), 0), (kind("c"), 1)]), Some(kind("c")));
        assert_eq!(asked(&three).missing(&[(kind("b"), 0)]), None);
    }
}
