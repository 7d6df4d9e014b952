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
//! **How many.** As many as commands have asked for in the last second, at most `[spares] keep` of them; of the two
//! kinds that were asked for last, because a spare has its image mounted. All are given up where memory is short, where
//! the settings or the program have changed, while CPUs or memory are reserved (each group counts there), and when a
//! command needs what they hold ([`spare::dismiss`]).
//!
//! Uses `ground`, `settings`, `contract`, `net`, `layer`, `admission`, `spare` and `start`.

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
use dormouse_model::{Config, ContainerId, IdMap};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};

use crate::disk::{self, Lock};
use crate::error::{Error, Result};
use crate::ground::{self, Ground};
use crate::net::{self, Net};
use crate::spare::{self, Kind, MESSAGE_BYTES_MAX, Request, Spare, Stamp};
use crate::start::{self, Bearer, Born};
use crate::{admission, contract, layer, settings};

/// How long spares are kept without a start.
const KEPT: Duration = Duration::from_secs(1);

/// A command that has asked and has not ended after this time is not waited for: its container runs.
const BUSY: Duration = Duration::from_millis(20);

/// LIMIT: kinds of spares. Each has an image mounted.
const KINDS_MAX: usize = 2;

/// How often the memory of the host is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// A spare with what it was made for.
#[derive(Debug)]
struct Ready {
    kind: Kind,
    spare: Spare,
}

/// What both threads know.
#[derive(Debug, Default)]
struct Nursery {
    ready: Vec<Ready>,
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

    /// Takes a spare that is not wanted.
    fn surplus(&mut self, wanted: &[(Kind, usize)]) -> Option<Spare> {
        if let Some(spare) = self.unwanted.pop() {
            return Some(spare);
        }
        let is_wanted = |ready: &Ready| wanted.iter().any(|(kind, _)| *kind == ready.kind);
        let at = self.ready.iter().position(|ready| !is_wanted(ready))?;
        Some(self.ready.swap_remove(at).spare)
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
            answer(&shared, &listener, keeper, &stamp);
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

/// The thread that answers commands.
fn answer(shared: &Shared, listener: &OwnedFd, keeper: BorrowedFd<'_>, stamp: &Stamp) {
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
                true => kept.extend(serve(shared, stamp, client)),
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
                    clients.extend(serve(shared, stamp, client));
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

/// Reads a request. Returns the client while it is connected.
fn serve(shared: &Shared, stamp: &Stamp, mut client: Client) -> Option<Client> {
    let mut text = vec![0; MESSAGE_BYTES_MAX];
    let n = match wire::receive(&client.sock, &mut text, RecvFlags::DONTWAIT, drop) {
        Err(Errno::AGAIN) => return Some(client),
        Ok(0) | Err(_) => {
            if client.has_asked {
                due(shared);
            }
            return None;
        }
        Ok(n) => n,
    };
    match serde_json::from_slice(&text[..n]) {
        Ok(Request::Take { kind, stamp: theirs }) => {
            let now = Instant::now();
            let is_current = theirs == *stamp;
            let given = {
                let mut nursery = shared.lock();
                // Another program, or other settings: the next nursery has them.
                nursery.ends |= !is_current;
                nursery.last_asked = Some(now);
                nursery.asked.push_back((now, (*kind).clone()));
                let at = nursery.ready.iter().position(|ready| ready.kind == *kind);
                // ORDER: a command that has them released finds no use of an image afterwards.
                at.filter(|_| !nursery.ends).map(|at| nursery.ready.swap_remove(at).spare)
            };
            let sent = match given {
                Some(spare) => {
                    let sent = spare.give(client.sock.as_fd()).is_ok();
                    if !sent {
                        shared.lock().unwanted.push(spare);
                    }
                    sent
                }
                None => wire::send(&client.sock, b"-", &[], SendFlags::DONTWAIT).is_ok(),
            };
            (client.since, client.has_asked) = (now, true);
            if !is_current || !sent {
                due(shared);
            }
            Some(client)
        }
        Ok(Request::Dismiss) => {
            let mut nursery = shared.lock();
            nursery.ends = true;
            nursery.waiting.push(client.sock);
            shared.changed.notify_all();
            None
        }
        // Not a request: a process of root that is no command of this program.
        Err(_) => None,
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
            let surplus = nursery.surplus(&wanted);
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
                Ok(spare) => shared.lock().ready.push(Ready { kind, spare }),
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
            Ok(Spare { id, ids, addresses, lock: Some(lock), keeper, newborn, root, device })
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
    let dir = ground.places.spares().join(spare.id.as_str());
    spare.end(|id, ids| spare::release(ground, id, &dir, Some(ids)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(image: &str) -> Kind {
        let kind = serde_json::json!({
            "image": image, "domain": "default", "auto_remove": false, "limits": {},
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
