//! The loop of the keeper: requests in, ends of processes out.
//!
//! **State.** Everything is in the tables of [`Server`], touched by one thread:
//!
//! ```text
//! connections   clients, by serial number             consoles  terminals, by serial number
//! children      live processes, by pid                stdins    write ends, by container
//! unsettled     exited, clean-up by the spawner       logs      files kept under a bound
//!               not reported yet                      custody   descriptors of sleeping containers
//!                                                     alarms    wake-up times without a client
//! adopted       first processes of containers whose keeper was killed
//! newborns      of asleep containers that are kept warm, by container
//! fills         memory of containers that is being filled while they run
//! templates     processes whose memory newborns share, by serial number, with pending requests
//! queue         errands: containers to be settled or woken by a process, 4 of each kind at once,
//!               up to 16 where others last long, and more where they wait for a restart
//! ```
//!
//! **Exit of a child.** The child is reaped. For a first process the exit file is written before
//! the clients are notified, so that they find it. The connection that spawned it and those that
//! wait receive `Exited`. If the spawner requested settling, it must send `Settled`; if its
//! connection closes before that, or had closed long ago, a *settler* receives the id. Clean-up after
//! a container's exit therefore happens at least once, even if processes are killed. A settler is a
//! process `SETTLE...` in the host's mount namespace. It reads lines `ID` from its standard input, and
//! answers each with a byte when that container is settled. Before that it may send `~`: the container waits for its
//! restart, and others are settled meanwhile by other processes. A settler without work exits after a second.
//!
//! **Sleep.** The sockets of a sleeping container are in [`Custody`]. When one becomes readable, or
//! its alarm expires, a *waker* takes them and has the rest released. If the wake fails, the
//! sockets are polled again, later after each failure; if the waker was killed, another one is notified at
//! once. If the keeper is killed, the [`crate::vault`] still has them. A waker is a process
//! `WAKE...` that has finished its start-up. It reads lines `ID called` or `ID timer` from its
//! standard input, and answers each with a byte when that container is awake, or with `.` when it
//! sleeps on because its clients have sent nothing yet or may not wake it; at end of file it
//! exits. While any container sleeps one waker is kept, so that a client does not wait for the
//! start-up of a process. More are started when several containers are called at once; those exit
//! after a second without work.
//!
//! **Commands.** A client at the second socket has its command executed by a *runner*, a process that has finished its
//! start-up ([`crate::commands`]). The keeper reads nothing there: it gives the connection away.
//!
//! **Hostile input.** Only root may connect. An invalid message is answered by `Refused`. The
//! keeper never blocks on a reply: a client that does not read is disconnected.
//!
//! **The end of the keeper.** Some time after the last child, connection, errand and sleeper is
//! removed ([`Parts::linger`], a second at least), the keeper takes the lock that clients start
//! keepers under, checks once more for a client, unlinks its socket and becomes the tidy program,
//! which removes resources that no container needs any more.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ffi::{CString, c_int, c_void};
use std::mem::MaybeUninit;
use std::ops::Bound;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::null;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dormouse_kernel::call::{self as kernel, CloneFlags};
use dormouse_launch::keeper::{LOCK, SOCKET};
use dormouse_launch::protocol::{
    DESCRIPTORS_MAX, Ended, Id, Kind, MESSAGE_MAX_BYTES, Reply, Request, SpawnRequest, Status,
    feature, watch,
};
use dormouse_launch::wire;
use rustix::event::{Timespec, epoll};
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags, sockopt};

use crate::adopted::{Adopted, Gone};
use crate::alarm::Alarms;
use crate::birth;
use crate::call;
use crate::commands::Commands;
use crate::console::{Console, Logs, Pumped};
use crate::custody::{Custody, Held};
use crate::exit::{code_of, write_exit_file};
use crate::fill::{self, Fill};
use crate::hand::{Errand, Hand, HandKind, IDLE, Reason, Running, long};
use crate::heritage::Heritage;
use crate::output::{Outputs, Target};
use crate::owner::AsOwner;
use crate::starts::Starts;
use crate::sweep::Sweep;
use crate::template::{self, PendingBirth, Template};
use crate::tiny::Outside;
use crate::vault::Vault;
use crate::{Failed, Step};

/// LIMIT: processes at once that settle, and as many that wake: those may have to wait for memory,
/// which the others give back.
const ERRANDS_MAX: usize = 4;
/// LIMIT: processes at once that settle, and as many that wake, with those that last long.
const LASTING_MAX: usize = 16;
/// LIMIT: processes at once that settle, with those that wait to restart a container. A process each, because it
/// restarts its container also after the keeper was killed.
const SETTLERS_MAX: usize = 512;
/// Interval of the checks of logs.
const LOOK: Duration = Duration::from_secs(2);
/// LIMIT: containers whose logs are checked each time; with more, they take turns.
const LOOK_AT: usize = 1000;
/// Time before a failed step is tried again.
const AGAIN: Duration = Duration::from_millis(100);
/// SIGCHLD as a bit of a signal mask.
const CHILD_SIGNAL: u64 = 1 << (libc::SIGCHLD - 1);

/// The answer of a waker that has left a container asleep, because its clients have sent nothing yet.
const SILENT: [u8; 1] = *b".";
/// What a settler sends before its answer, when it begins to wait until a container is to be restarted.
const WAITS: [u8; 1] = *b"~";

const LISTENER: u64 = 0;
const SIGNALS: u64 = 1;
const COMMANDS: u64 = 2;
const FIRST_SERIAL: u64 = 3;

/// A process that lives.
#[derive(Debug)]
pub struct Child {
    id: Id,
    connection: u64,
    kind: Kind,
    settle: bool,
}

/// A container whose first process has exited and whose spawner is still connected.
#[derive(Debug)]
struct Unsettled {
    pid: u32,
    id: Id,
    connection: u64,
}

/// The parts of a keeper, before it runs.
#[derive(Debug)]
pub struct Parts {
    /// The runtime directory.
    pub run: OwnedFd,
    /// The listening socket.
    pub listener: OwnedFd,
    /// Descriptors left by an earlier keeper.
    pub vault: Vault,
    /// Descriptors of the host's namespaces.
    pub outside: Outside,
    /// Settings that its newborns inherit.
    pub heritage: Heritage,
    /// Program and arguments of a settler.
    pub settle: Vec<CString>,
    /// Program and arguments of a waker.
    pub wake: Vec<CString>,
    /// Program and arguments that the keeper becomes at its end.
    pub tidy: Vec<CString>,
    /// Program and arguments of the nursery.
    pub nursery: Vec<CString>,
    /// Commands that runners execute, if they do.
    pub commands: Option<Commands>,
    /// How long the keeper stays when nothing is left to keep; less than a second means a second.
    pub linger: Duration,
}

/// The keeper.
pub struct Server {
    parts: Parts,
    epoll: OwnedFd,
    signals: OwnedFd,
    sweep: Sweep,
    serial: u64,
    connections: HashMap<u64, OwnedFd>,
    children: HashMap<u32, Child>,
    /// The first process of each container.
    firsts: HashMap<Id, u32>,
    waiters: Vec<(u32, u64)>,
    unsettled: Vec<Unsettled>,
    consoles: HashMap<u64, Console>,
    stdins: HashMap<Id, OwnedFd>,
    /// Sockets to newborns of asleep containers. The vault does not have them: the newborns exit with this keeper.
    newborns: HashMap<Id, OwnedFd>,
    logs: BTreeMap<Id, Logs>,
    outputs: Outputs,
    custody: Custody,
    /// The serial number of the vault: a new one for each, because a newborn may have a copy of the
    /// last one's socket.
    vault: u64,
    alarms: Alarms,
    adopted: Adopted,
    fills: HashMap<u64, Fill>,
    /// Memory that is no longer filled, until its container has ended.
    lost: Vec<Fill>,
    templates: HashMap<u64, Template>,
    queue: VecDeque<Errand>,
    errands: HashMap<u32, Running>,
    /// By serial number.
    hands: HashMap<u64, Hand>,
    /// Runners that execute a command, or are not ready yet.
    busy: HashSet<u32>,
    /// No spare waker is started before this time, because one without work has exited.
    next_waker: Instant,
    starts: Starts,
    deaf_until: Option<Instant>,
    next_look: Instant,
    /// When the keeper exits, if it stays idle.
    exits_at: Option<Instant>,
    ending: bool,
    /// The container with the last checked logs.
    log_turn: Option<Id>,
}

type Answer = (Reply, Vec<OwnedFd>);

fn refused(errno: Errno, step: impl Into<String>) -> Answer {
    (Reply::Refused { errno: errno.raw_os_error(), step: step.into() }, Vec::new())
}

fn done() -> Answer {
    (Reply::Done, Vec::new())
}

impl Server {
    /// Creates a listening keeper. SIGCHLD is blocked from here on.
    pub fn new(mut parts: Parts) -> Result<Self, Failed> {
        call::block_signals(CHILD_SIGNAL).step("block a signal")?;
        let signals = call::signal_fd(CHILD_SIGNAL).step("listen for signals")?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).step("make an epoll set")?;
        let add = |fd: BorrowedFd<'_>, token| {
            let data = epoll::EventData::new_u64(token);
            epoll::add(&epoll, fd, data, epoll::EventFlags::IN).step("watch a descriptor")
        };
        add(parts.listener.as_fd(), LISTENER)?;
        add(signals.as_fd(), SIGNALS)?;
        parts.commands.as_ref().map_or(Ok(()), |it| add(it.listener.as_fd(), COMMANDS))?;
        let mut serial = FIRST_SERIAL;
        let mut outputs = Outputs::default();
        let next = || {
            serial += 1;
            serial
        };
        let vault = std::mem::take(&mut parts.vault);
        let custody = Custody::restore(&epoll, vault, next, &mut outputs);
        outputs.start(Instant::now());
        serial += 1;
        custody.vault().map_or(Ok(()), |vault| add(vault, serial))?;
        Ok(Self {
            parts,
            epoll,
            signals,
            sweep: Sweep::new(Instant::now()),
            serial,
            vault: serial,
            connections: HashMap::new(),
            children: HashMap::new(),
            firsts: HashMap::new(),
            waiters: Vec::new(),
            unsettled: Vec::new(),
            consoles: HashMap::new(),
            stdins: HashMap::new(),
            newborns: HashMap::new(),
            logs: BTreeMap::new(),
            outputs,
            custody,
            alarms: Alarms::default(),
            adopted: Adopted::default(),
            fills: HashMap::new(),
            lost: Vec::new(),
            templates: HashMap::new(),
            queue: VecDeque::new(),
            errands: HashMap::new(),
            hands: HashMap::new(),
            busy: HashSet::new(),
            next_waker: Instant::now(),
            starts: Starts::default(),
            deaf_until: None,
            next_look: Instant::now(),
            exits_at: None,
            ending: false,
            log_turn: None,
        })
    }

    /// Runs until there is nothing to keep.
    pub fn run(mut self) -> Result<(), Failed> {
        let mut events = [MaybeUninit::uninit(); 64];
        loop {
            let timeout = self.timeout();
            let ready = match epoll::wait(&self.epoll, &mut events[..], timeout.as_ref()) {
                Ok((ready, _)) => ready,
                Err(Errno::INTR) => continue,
                Err(source) => return Err(Failed { step: "wait", source }),
            };
            for event in ready.iter() {
                match event.data.u64() {
                    LISTENER => self.accept(),
                    SIGNALS => self.reap(),
                    COMMANDS => self.take_command(),
                    serial => self.serve(serial, event.flags),
                }
            }
            if self.look() {
                return self.become_tidy();
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.children.is_empty()
            && self.adopted.is_empty()
            && self.connections.is_empty()
            && self.errands.is_empty()
            && self.busy.is_empty()
            && self.queue.is_empty()
            && self.custody.is_empty()
            && self.outputs.is_empty()
            && self.fills.is_empty()
    }

    fn timeout(&mut self) -> Option<Timespec> {
        let now = Instant::now();
        let linger = self.parts.linger.max(IDLE);
        self.exits_at = if self.is_idle() { self.exits_at.or(Some(now + linger)) } else { None };
        let look = self.has_to_look().then_some(self.next_look);
        let idle = self.exits_at;
        let queue = (!self.queue.is_empty() && !self.works()).then(|| now + AGAIN);
        let long = self.next_long(now);
        let custody = self.custody.next();
        let alarm = self.alarms.next();
        let waker = self.lacks_a_waker().then_some(self.next_waker);
        let rest = self.next_rest();
        let pending = self.pending().map(|pending| pending.until).min();
        let sweep = self.sweep.next();
        let output = self.outputs.next();
        let adopted = self.adopted.next(now);
        let next = [
            look,
            idle,
            queue,
            long,
            custody,
            alarm,
            waker,
            rest,
            pending,
            sweep,
            output,
            adopted,
            self.deaf_until,
        ];
        let next = next.into_iter().flatten().min()?;
        let wait = next.saturating_duration_since(now) + Duration::from_millis(1);
        Some(Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) })
    }

    /// Starts a vault if there is none and it is needed.
    fn secure(&mut self) {
        if self.custody.secure() {
            // If it cannot be polled, its end is noticed at the next request to it.
            self.serial += 1;
            self.vault = self.serial;
            let _ = self.custody.vault().map(|vault| self.watch(vault, self.vault));
        }
    }

    /// Runs the timed work. Returns true if the keeper is to exit.
    fn look(&mut self) -> bool {
        let now = Instant::now();
        if self.deaf_until.is_some_and(|until| until <= now) {
            self.listen_again();
        }
        if self.has_to_look() && self.next_look <= now {
            self.next_look = now + LOOK;
            self.look_after_logs();
            self.look_after_consoles();
        }
        self.sweep(now);
        self.custody.look(&self.epoll, now);
        self.look_after_outputs(now);
        self.adopted.take_gone(now).into_iter().for_each(|gone| self.settle_adopted(gone));
        self.secure();
        while let Some(id) = self.alarms.rung(now) {
            if self.custody.start_wake(id) {
                self.queue.push_back(Errand::wake(id, Reason::Timer));
                self.start_errands();
            }
        }
        self.start_errands();
        self.keep_hands(now);
        if self.pending().any(|pending| pending.until <= now) {
            // A late answer could not be matched to its request.
            let is_late = |pending: &PendingBirth| pending.until <= now;
            let which = |_, template: &Template| template.pending.as_ref().is_some_and(is_late);
            self.end_templates(Errno::TIMEDOUT, which);
        }
        if self.ending {
            // ORDER: the client that requested the end stays connected and sees it when the keeper
            // is gone; all other connections are closed.
            let open = std::mem::take(&mut self.connections);
            let ended = self.end();
            if !ended {
                self.connections.extend(open);
                return false;
            }
            return true;
        }
        let over = self.is_idle() && self.exits_at.is_some_and(|at| at <= now);
        over && self.end()
    }

    /// Pending requests for newborns of templates.
    fn pending(&self) -> impl Iterator<Item = &PendingBirth> {
        self.templates.values().filter_map(|template| template.pending.as_ref())
    }

    fn has_to_look(&self) -> bool {
        !self.logs.is_empty() || self.consoles.values().any(|c| c.hung_up)
    }

    fn look_after_logs(&mut self) {
        let behind = self.log_turn.take().map_or(Bound::Unbounded, Bound::Excluded);
        let some = self.logs.range((behind, Bound::Unbounded)).take(LOOK_AT);
        let mut looked = 0;
        for (id, logs) in some {
            logs.trim(&self.parts.outside.root);
            looked += 1;
            // The next time from the first one on, where these are the last.
            self.log_turn = (looked == LOOK_AT).then_some(*id);
        }
    }

    fn look_after_outputs(&mut self, now: Instant) {
        let (parts, epoll, serial) = (&self.parts, &self.epoll, &mut self.serial);
        let reader = |outputs: &mut Outputs| start_reader(outputs, parts, epoll, serial);
        self.outputs.look(now, self.custody.lots(), reader);
        for sock in self.outputs.take_gone() {
            // ORDER: a newborn may have a copy for a moment, which would keep it in the set.
            let _ = epoll::delete(&self.epoll, &sock);
        }
    }

    /// Takes the output of a container.
    fn keep_output(&mut self, target: Target, fds: Vec<OwnedFd>) -> Answer {
        self.serial += 1;
        let key = self.serial;
        let (parts, epoll, serial) = (&self.parts, &self.epoll, &mut self.serial);
        let reader = |outputs: &mut Outputs| start_reader(outputs, parts, epoll, serial);
        let kept = self.outputs.keep(key, target, fds, self.custody.lots(), reader);
        self.secure();
        match kept {
            Ok(()) => done(),
            Err(e) => refused(e, "read the output of a container"),
        }
    }

    /// A reader has reported something, or has exited.
    fn receive_from_reader(&mut self, serial: u64) {
        while let Some(waiting) = self.outputs.receive(serial, self.custody.lots()) {
            for connection in waiting {
                self.send(connection, &Reply::Done, &[]);
            }
        }
    }

    /// A terminal that was closed may be in use again: a getty opens and closes it.
    fn look_after_consoles(&mut self) {
        let epoll = &self.epoll;
        for (token, console) in &mut self.consoles {
            if console.hung_up && console.attached.is_none() {
                let data = epoll::EventData::new_u64(*token);
                let added = epoll::add(epoll, &console.master, data, epoll::EventFlags::IN);
                console.hung_up = added.is_err();
            }
        }
    }

    /// Stops serving, unless a client has connected or is about to.
    fn end(&mut self) -> bool {
        self.exits_at = Some(Instant::now() + AGAIN);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o600);
        match rustix::fs::openat(&self.parts.run, LOCK, flags, mode) {
            Ok(lock) => {
                if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
                    return false;
                }
                self.accept();
                if !self.is_idle() {
                    return false;
                }
                for name in [SOCKET, dormouse_entry::SOCKET] {
                    let _ = rustix::fs::unlinkat(&self.parts.run, name, AtFlags::empty());
                }
                Vault::leave(&self.parts.run);
                self.custody.lose_vault();
                true
            }
            // The directory has been removed, and with it the socket.
            Err(_) => true,
        }
    }

    fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let sock = match rustix::net::accept_with(&self.parts.listener, flags) {
            Ok(sock) => sock,
            Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                // No connection is accepted until descriptors are free again; otherwise this would
                // be a busy loop.
                let _ = epoll::delete(&self.epoll, &self.parts.listener);
                self.deaf_until = Some(Instant::now() + AGAIN);
                return;
            }
            Err(_) => return,
        };
        match sockopt::socket_peercred(&sock) {
            Ok(peer) if peer.uid.is_root() => {}
            _ => return,
        }
        self.serial += 1;
        if self.watch(sock.as_fd(), self.serial).is_ok() {
            self.connections.insert(self.serial, sock);
        }
    }

    fn listen_again(&mut self) {
        let commands = self.parts.commands.as_ref().map(|it| (it.listener.as_fd(), COMMANDS));
        let mut all = [(self.parts.listener.as_fd(), LISTENER)].into_iter().chain(commands);
        let listens = |fd, token| matches!(self.watch(fd, token), Ok(()) | Err(Errno::EXIST));
        let all_listen = all.all(|(fd, token)| listens(fd, token));
        self.deaf_until = (!all_listen).then(|| Instant::now() + AGAIN);
    }

    /// Gives a command to a runner at rest. Without one the client executes it by itself. Behind that, a runner is
    /// started if none is at rest and there is room for another one.
    fn take_command(&mut self) {
        let Some(commands) = &self.parts.commands else { return };
        let client = match commands.accept() {
            Ok(Some(client)) => client,
            Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                let _ = epoll::delete(&self.epoll, &commands.listener);
                self.deaf_until = Some(Instant::now() + AGAIN);
                return;
            }
            _ => return,
        };
        let most = commands.most;
        let ready = self.at_rest(HandKind::Runner).find(|(_, hand)| hand.give(&client));
        self.busy.extend(ready.map(|(_, hand)| hand.pid));
        drop(client);
        let is_runner = |hand: &&Hand| hand.kind == HandKind::Runner;
        let has_room = self.hands.values().filter(is_runner).count() < most;
        if has_room && self.at_rest(HandKind::Runner).next().is_none() {
            // Commands do not depend on it. It is given one after it has reported that it is ready.
            let made = self.make_hand(HandKind::Runner).ok();
            let made = made.and_then(|serial| self.hands.get(&serial));
            self.busy.extend(made.map(|hand| hand.pid));
        }
    }

    fn watch(&self, fd: BorrowedFd<'_>, token: u64) -> Result<(), Errno> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN)
    }

    fn serve(&mut self, serial: u64, flags: epoll::EventFlags) {
        if serial == self.vault {
            return self.custody.lose_vault(); // the vault sends nothing, so it has exited
        }
        if let Some(console) = self.consoles.get(&serial) {
            let readable = flags.contains(epoll::EventFlags::IN);
            if console.attached.is_none() && (!readable || console.pump() == Pumped::HungUp) {
                self.hung_up(serial);
            }
            return;
        }
        if self.hands.contains_key(&serial) {
            return self.receive_from_hand(serial);
        }
        if let Some(fill) = self.fills.remove(&serial) {
            return self.filled(fill);
        }
        if self.templates.contains_key(&serial) {
            return self.receive_from_template(serial);
        }
        if self.outputs.reader(serial).is_some() {
            return self.receive_from_reader(serial);
        }
        if let Some(process) = self.adopted.exited(serial, Instant::now()) {
            let _ = epoll::delete(&self.epoll, process);
            return;
        }
        if let Some(id) = self.custody.called(serial) {
            self.queue.push_back(Errand::wake(id, Reason::Called));
            return self.start_errands();
        }
        let Some(sock) = self.connections.get(&serial) else { return };
        let mut bytes = [0; MESSAGE_MAX_BYTES];
        let mut fds = Vec::new();
        let (reply, fds) = match wire::receive(sock, &mut bytes, RecvFlags::DONTWAIT, |fd| {
            // LIMIT: no message has more.
            if fds.len() < DESCRIPTORS_MAX {
                fds.push(fd);
            }
        }) {
            Err(Errno::AGAIN) => return,
            Err(Errno::MSGSIZE) => refused(Errno::MSGSIZE, "read a message so long"),
            Ok(0) | Err(_) => return self.close(serial),
            Ok(n) => match Request::decode(&bytes[..n]) {
                Err(e) => refused(Errno::BADMSG, format!("read the message: {e}")),
                Ok(request) if request.descriptors() != fds.len() => {
                    refused(Errno::BADMSG, "read the message: its descriptors are not as many")
                }
                Ok(request) => match self.answer(serial, request, fds) {
                    Some(answer) => answer,
                    None => return,
                },
            },
        };
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        self.send(serial, &reply, &fds);
    }

    /// Sends to a connection, which is closed if it does not take it.
    fn send(&mut self, serial: u64, reply: &Reply, fds: &[BorrowedFd<'_>]) -> bool {
        let Some(sock) = self.connections.get(&serial) else { return false };
        let sent = wire::send(sock, &reply.encode(), fds, SendFlags::DONTWAIT).is_ok();
        if !sent {
            self.close(serial);
        }
        sent
    }

    /// Handles a closed connection: the keeper takes back its attached terminals, and settles its
    /// children.
    fn close(&mut self, serial: u64) {
        if self.connections.remove(&serial).is_none() {
            return;
        }
        self.keep_nursery();
        self.waiters.retain(|(_, waiter)| *waiter != serial);
        self.outputs.close(serial);
        self.end_templates(Errno::CHILD, |_, template| template.connection == serial);
        let (gone, rest) =
            std::mem::take(&mut self.unsettled).into_iter().partition(|u| u.connection == serial);
        self.unsettled = rest;
        let gone: Vec<Unsettled> = gone;
        gone.iter().for_each(|unsettled| self.settle(unsettled.id));
        let epoll = &self.epoll;
        for (token, console) in &mut self.consoles {
            if console.attached == Some(serial) {
                console.attached = None;
                console.hung_up = false;
                let data = epoll::EventData::new_u64(*token);
                let _ = epoll::add(epoll, &console.master, data, epoll::EventFlags::IN);
            }
        }
        if self.deaf_until.is_some() {
            self.listen_again();
        }
    }

    fn answer(&mut self, serial: u64, request: Request, fds: Vec<OwnedFd>) -> Option<Answer> {
        Some(match request {
            Request::Status => (Reply::Status(self.status()), Vec::new()),
            Request::Hello => {
                (Reply::Hello { pid: std::process::id(), features: feature::ALL }, Vec::new())
            }
            Request::Spawn(spawn) => return self.spawn(serial, spawn, fds),
            Request::Wait { pid } => match self.children.contains_key(&pid) {
                true => {
                    self.waiters.push((pid, serial));
                    return None;
                }
                false => refused(Errno::SRCH, "wait for a process that is not its child"),
            },
            Request::Adopt { id, pid } => self.adopt(id, pid, fds),
            Request::HasAdopted { id } => match self.adopted.has(id) {
                true => done(),
                false => refused(Errno::SRCH, "find an adopted process of a container"),
            },
            Request::Settle { id } => {
                self.settle(id);
                done()
            }
            Request::Settled { pid } => {
                let at = self.unsettled.iter().position(|u| u.pid == pid && u.connection == serial);
                at.map(|at| self.unsettled.swap_remove(at));
                done()
            }
            Request::KeepConsole { id } => self.keep_console(id, fds),
            // The first process may have ended before: then nothing would remove the entry.
            Request::KeepStdin { id } => {
                let fd = fds.into_iter().next().filter(|_| self.has_first(id));
                self.stdins.extend(fd.map(|fd| (id, fd)));
                done()
            }
            Request::KeepLogs { id, bound_bytes, paths } => {
                if self.has_first(id) {
                    let paths = paths.into_iter().map(String::into_boxed_str).collect();
                    self.logs.insert(id, Logs { paths, bound_bytes });
                }
                done()
            }
            Request::AttachConsole { id } => self.attach_console(serial, id),
            Request::AttachStdin { id } => match self.stdins.get(&id).map(OwnedFd::try_clone) {
                Some(Ok(fd)) => (Reply::Attached, vec![fd]),
                Some(Err(_)) => refused(Errno::MFILE, "hand out a descriptor"),
                None => refused(Errno::NOENT, "find its standard input"),
            },
            Request::KeepNewborn { id } => {
                let fd = fds.into_iter().next().filter(|_| self.firsts.contains_key(&id));
                self.newborns.extend(fd.map(|fd| (id, fd)));
                done()
            }
            Request::TakeNewborn { id } => match self.newborns.remove(&id) {
                Some(fd) => {
                    let first = self.firsts.get(&id).and_then(|pid| self.children.get_mut(pid));
                    first.into_iter().for_each(|it| it.connection = serial); // its starter now
                    (Reply::Attached, vec![fd])
                }
                None => refused(Errno::NOENT, "find a newborn"),
            },
            Request::Forget { id } => {
                self.forget(id);
                done()
            }
            Request::Hold { id, key, watch } => self.hold(serial, id, key, watch, fds),
            Request::Park { id } => {
                // Descriptors that cannot be parked now stay open, in this keeper alone.
                let _ = self.custody.park_again(&self.epoll, id);
                self.secure();
                done()
            }
            Request::Take { id, key } => match self.custody.take(&self.epoll, id, key) {
                Ok(fd) => (Reply::Attached, vec![fd]),
                Err(e) => refused(e, "find what it holds of a sleeping container"),
            },
            Request::Ready { id, key } => match self.custody.is_ready(&self.epoll, id, key) {
                Ok(true) => done(),
                Ok(false) => refused(Errno::AGAIN, "find an event"),
                Err(e) => refused(e, "find what it holds of a sleeping container"),
            },
            Request::Holds { id } => match self.custody.request(id) {
                true => done(),
                false => refused(Errno::NOENT, "find a sleeping container"),
            },
            Request::LetGoUnasked => {
                self.custody.unrequested().into_iter().for_each(|id| self.let_go(id));
                done()
            }
            Request::LetGo { id } => {
                self.let_go(id);
                done()
            }
            Request::Alarm { id, after_ms } => self.set_alarm(id, after_ms),
            Request::Fill { id, parts, .. } => {
                match Fill::begin(id, parts, fds).and_then(|fill| self.watch_fill(fill)) {
                    Ok(()) => done(),
                    Err(e) => refused(e, "have memory filled"),
                }
            }
            Request::Template { key, .. } => return self.make_template(serial, key, fds),
            Request::KeepOutput { id, streams, bound_bytes, path } => {
                self.keep_output(Target { id, streams, bound_bytes, path }, fds)
            }
            Request::HoldsOutput { id } => match self.outputs.has(id) {
                true => done(),
                false => refused(Errno::NOENT, "find output of a container"),
            },
            Request::FlushOutput { id } => match self.outputs.flush(id, serial) {
                true => return None,
                false => done(),
            },
            Request::End => {
                let alone = self.connections.len() == 1 && self.unsettled.is_empty();
                let free = self.children.is_empty()
                    && self.adopted.is_empty()
                    && self.errands.is_empty()
                    && self.busy.is_empty()
                    && self.fills.is_empty();
                let holds = !self.custody.is_empty() || !self.outputs.is_empty();
                if !(alone && free && self.queue.is_empty()) || holds {
                    return Some(refused(Errno::BUSY, "end while there is something to keep"));
                }
                self.ending = true;
                done()
            }
        })
    }

    /// Spawns a process. A request to a template is answered when the template has answered.
    fn spawn(&mut self, serial: u64, request: SpawnRequest, fds: Vec<OwnedFd>) -> Option<Answer> {
        let (outside, heritage) = (&self.parts.outside, self.parts.heritage);
        let wanted = birth::Wanted::of(&request, &fds);
        let born = match request.template {
            Some(key) if wanted.is_ok() => {
                let requested = self.request_birth(key, serial, request, fds);
                return requested.err().map(|Failed { step, source }| refused(source, step));
            }
            _ => wanted.and_then(|wanted| {
                let _owner = AsOwner::of(wanted.uid_map);
                birth::give(outside, heritage, &wanted)
            }),
        };
        Some(self.born(serial, &request, born))
    }

    /// Records a newborn as a child, or returns the error.
    fn born(
        &mut self,
        connection: u64,
        request: &SpawnRequest,
        born: Result<birth::Born, Failed>,
    ) -> Answer {
        let born = match born {
            Ok(born) => born,
            Err(Failed { step, source }) => return refused(source, step),
        };
        let SpawnRequest { id, kind, settle, .. } = *request;
        self.children.insert(born.pid, Child { id, connection, kind, settle });
        if kind == Kind::Init {
            self.firsts.insert(id, born.pid);
            self.newborns.remove(&id); // of an earlier one, which is ending
            self.note_start(connection, request.template.is_some());
        }
        let fds = [Some(born.pidfd), born.proc].into_iter().flatten().collect();
        (Reply::Spawned { pid: born.pid, start_time: born.start_time }, fds)
    }

    /// Notes that a client starts a container. The nursery makes spares, which are no starts. The starts of other hands
    /// (wakes, restarts), and those from a template, take none.
    fn note_start(&mut self, connection: u64, has_template: bool) {
        if self.parts.nursery.is_empty() {
            return;
        }
        let peer = self.connections.get(&connection).map(sockopt::socket_peercred);
        let Some(Ok(peer)) = peer else { return };
        let pid = peer.pid.as_raw_pid() as u32;
        self.starts.note_use(pid);
        let is_by = |hand: &Hand| hand.pid == pid && hand.kind != HandKind::Runner;
        if !has_template && !self.hands.values().any(is_by) {
            self.starts.note(Instant::now());
        }
    }

    fn nursery(&self) -> Option<u32> {
        self.hands.values().find(|hand| hand.kind == HandKind::Nursery).map(|hand| hand.pid)
    }

    /// Starts a nursery while containers come and go. A client's connection has ended: it has its answer.
    fn keep_nursery(&mut self) {
        let may = !self.parts.nursery.is_empty() && self.nursery().is_none();
        if may && self.starts.want_nursery(Instant::now()) {
            // Starts wait for nothing that is made ahead.
            let made = self.make_hand(HandKind::Nursery).ok();
            let hand = made.and_then(|serial| self.hands.get(&serial));
            self.starts.begun(hand.map(|hand| hand.pid));
        }
    }

    fn request_birth(
        &mut self,
        key: Id,
        serial: u64,
        request: SpawnRequest,
        fds: Vec<OwnedFd>,
    ) -> Result<(), Failed> {
        let is_it = |template: &&mut Template| template.key == key && !template.is_awaited;
        let found = self.templates.values_mut().find(is_it);
        let template = found.ok_or(Errno::NOENT).step("find the template")?;
        template.request(request, fds, serial).step(template::BEAR)
    }

    /// Starts a template. The answer follows when its memory is there.
    fn make_template(&mut self, serial: u64, key: Id, fds: Vec<OwnedFd>) -> Option<Answer> {
        if self.templates.values().any(|template| template.key == key) {
            return Some(refused(Errno::EXIST, "make a second template of one name"));
        }
        let own = (&self.parts.outside, self.parts.heritage);
        self.serial += 1;
        let token = self.serial;
        let made = Template::begin(own, key, serial, fds)
            .and_then(|made| self.watch(made.sock(), token).step("watch it").map(|()| made));
        match made {
            Ok(template) => {
                self.templates.insert(token, template);
                None
            }
            Err(Failed { step, source }) => Some(refused(source, step)),
        }
    }

    /// The template's memory is there, a newborn is, or the template has exited.
    fn receive_from_template(&mut self, token: u64) {
        let Some(template) = self.templates.get_mut(&token) else { return };
        let received = match template.receive() {
            Err(Errno::AGAIN) => return,
            received => received,
        };
        if let Some(pending) = template.pending.take() {
            if received.is_err() {
                self.end_templates(Errno::CHILD, |it, _| it == token);
            }
            return self.answer_pending(&pending, pending.born(received));
        }
        let reply = match received {
            Ok((reply, _)) if template.is_awaited => reply,
            _ => refused(Errno::CHILD, "fill the memory of a template, which has ended").0,
        };
        let is_awaited = std::mem::replace(&mut template.is_awaited, false);
        let connection = template.connection;
        if reply != Reply::Done {
            self.end_templates(Errno::CHILD, |it, _| it == token);
        }
        if is_awaited {
            self.send(connection, &reply, &[]);
        }
    }

    /// Answers a client that waits for a newborn of a template.
    fn answer_pending(&mut self, pending: &PendingBirth, born: Result<(u32, OwnedFd), Errno>) {
        let PendingBirth { request, fds, connection, .. } = pending;
        let (outside, heritage) = (&self.parts.outside, self.parts.heritage);
        let born = birth::Wanted::of(request, fds).and_then(|wanted| {
            birth::raise(outside, heritage, &wanted, born.step(template::BEAR)?)
        });
        let (reply, fds) = self.born(*connection, request, born);
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        self.send(*connection, &reply, &fds);
    }

    /// Ends templates; clients that wait for a newborn of theirs receive the cause.
    fn end_templates(&mut self, why: Errno, which: impl Fn(u64, &Template) -> bool) {
        let epoll = &self.epoll;
        let mut waiting = Vec::new();
        self.templates.retain(|token, template| {
            let goes = which(*token, template);
            if goes {
                // ORDER: a newborn may have a copy for a moment, which would keep it in the set.
                let _ = epoll::delete(epoll, template.sock());
                waiting.extend(template.pending.take());
            }
            !goes
        });
        waiting.into_iter().for_each(|pending| self.answer_pending(&pending, Err(why)));
    }

    fn status(&self) -> Status {
        Status {
            children: self.children.len() as u32,
            connections: self.connections.len() as u32,
            consoles: self.consoles.len() as u32,
            settling: (self.errands.len() + self.queue.len()) as u32,
            pid: std::process::id(),
        }
    }

    fn keep_console(&mut self, id: Id, fds: Vec<OwnedFd>) -> Answer {
        let mut fds = fds.into_iter();
        let (Some(master), Some(log)) = (fds.next(), fds.next()) else {
            return refused(Errno::BADMSG, "keep a terminal");
        };
        if self.consoles.values().any(|c| c.id == id) {
            return refused(Errno::EXIST, "keep a second terminal of one container");
        }
        self.serial += 1;
        if let Err(e) = self.watch(master.as_fd(), self.serial) {
            return refused(e, "watch a terminal");
        }
        self.consoles
            .insert(self.serial, Console { id, master, log, attached: None, hung_up: false });
        done()
    }

    fn hold(&mut self, serial: u64, id: Id, key: u32, watch: u8, fds: Vec<OwnedFd>) -> Answer {
        let first = self.firsts.get(&id);
        // A client of its terminal stays with the container.
        let has_terminal = |connection| {
            self.consoles.values().any(|c| c.id == id && c.attached == Some(connection))
        };
        let awaited = first.and_then(|pid| self.children.get(pid)).is_some_and(|child| {
            let spawner =
                child.connection != serial && self.connections.contains_key(&child.connection);
            let spawner = spawner && !has_terminal(child.connection);
            spawner || self.waiters.iter().any(|(waited, _)| Some(waited) == first)
        });
        if awaited && watch & watch::STAYS == 0 {
            return refused(Errno::BUSY, "hold descriptors while a client waits for its exit");
        }
        let Some(fd) = fds.into_iter().next() else { return refused(Errno::BADMSG, "hold it") };
        let watch = watch & !watch::STAYS;
        self.serial += 1;
        match self.custody.hold(&self.epoll, self.serial, id, Held { key, watch, fd }) {
            Ok(()) => done(),
            Err(e) => refused(e, "watch what it is to hold"),
        }
    }

    fn let_go(&mut self, id: Id) {
        self.custody.let_go(&self.epoll, id);
        self.alarms.let_go(id);
        self.queue.retain(|errand| !matches!(errand, Errand::Wake { id: of, .. } if *of == id));
    }

    fn watch_fill(&mut self, fill: Fill) -> Result<(), Errno> {
        self.serial += 1;
        self.watch(fill.alive(), self.serial)?;
        self.fills.insert(self.serial, fill);
        Ok(())
    }

    /// The filling processes have exited. If they cannot be polled, that is found when the
    /// container ends.
    fn filled(&mut self, mut fill: Fill) {
        let _ = epoll::delete(&self.epoll, fill.alive());
        match fill.ended() {
            fill::Ended::Done => {}
            fill::Ended::Again => drop(self.watch_fill(fill)),
            fill::Ended::Lost => self.lost.push(fill),
        }
    }

    fn set_alarm(&mut self, id: Id, after_ms: u64) -> Answer {
        // A time beyond the range of the clock never comes.
        let Some(at) = Instant::now().checked_add(Duration::from_millis(after_ms)) else {
            return done();
        };
        if !self.custody.has(id) {
            return refused(Errno::NOENT, "set an alarm for what it holds nothing of");
        }
        self.alarms.set(id, at);
        done()
    }

    fn attach_console(&mut self, serial: u64, id: Id) -> Answer {
        let Some(console) = self.consoles.values_mut().find(|c| c.id == id) else {
            return refused(Errno::NOENT, "find its terminal");
        };
        if console.attached.is_some() {
            return refused(Errno::BUSY, "attach to a terminal that is already attached");
        }
        match (console.master.try_clone(), console.log.try_clone()) {
            (Ok(master), Ok(log)) => {
                console.attached = Some(serial);
                let _ = epoll::delete(&self.epoll, &console.master);
                (Reply::Attached, vec![master, log])
            }
            _ => refused(Errno::MFILE, "hand out a terminal"),
        }
    }

    /// The other side of a terminal was closed. A container's own terminal may be opened again,
    /// that of an exec is not.
    fn hung_up(&mut self, serial: u64) {
        let Some(console) = self.consoles.get_mut(&serial) else { return };
        let _ = epoll::delete(&self.epoll, &console.master);
        console.hung_up = true;
        if !self.firsts.contains_key(&console.id) {
            self.consoles.remove(&serial);
        }
    }

    fn forget(&mut self, id: Id) {
        self.consoles.retain(|_, console| {
            if console.id == id && console.attached.is_none() {
                console.drain();
            }
            console.id != id
        });
        self.stdins.remove(&id);
        if let Some(logs) = self.logs.remove(&id) {
            logs.trim(&self.parts.outside.root);
        }
    }

    /// Reaps the child that the signal names, and children that exited while it was pending.
    fn reap(&mut self) {
        let named = call::signalled_by(&self.signals);
        if let Some(Ok(Some((pid, status)))) = named.map(|pid| call::reap(Some(pid))) {
            self.ended(pid as u32, status);
        }
        self.sweep.request();
        self.sweep(Instant::now());
    }

    /// Checks all children for an exit, if the time for that has come.
    fn sweep(&mut self, now: Instant) {
        if self.sweep.next().is_none_or(|next| now < next) {
            return;
        }
        loop {
            let begun = Instant::now();
            let Ok(Some((pid, status))) = call::reap(None) else {
                return self.sweep.done(begun, Instant::now());
            };
            self.ended(pid as u32, status);
        }
    }

    fn ended(&mut self, pid: u32, status: i32) {
        if code_of(status).1 == libc::SIGKILL {
            self.starts.note_use(pid);
        }
        self.busy.remove(&pid);
        if let Some(Running { errand, .. }) = self.errands.remove(&pid) {
            let is_killed = code_of(status).1 == libc::SIGKILL;
            self.dismiss(|hand| hand.pid == pid);
            match errand {
                // Killed during the job or before it began: the next one completes it. A wake is
                // retried once at once, not twice: memory may be too short for it.
                Errand::Wake { id, why, is_second: false } if is_killed && self.custody.has(id) => {
                    self.queue.push_back(Errand::Wake { id, why, is_second: true });
                }
                Errand::Wake { id, .. } => self.custody.came_back(&self.epoll, id),
                Errand::Settle(_) if is_killed => self.queue.push_back(errand),
                Errand::Settle(_) => {}
            }
            return self.start_errands();
        }
        if self.dismiss(|hand| hand.pid == pid && hand.kind == HandKind::Waker) {
            self.next_waker = Instant::now() + IDLE;
        }
        let Some(child) = self.children.remove(&pid) else {
            let waiting = self.templates.values_mut().filter_map(|it| it.pending.as_mut());
            return waiting.for_each(|pending| pending.ended.push(pid));
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (code, signal) = code_of(status);
        let ended = Ended { code, signal, finished_unix_ms: now.as_millis() as i64 };
        if child.kind == Kind::Init {
            if self.firsts.get(&child.id) == Some(&pid) {
                self.firsts.remove(&child.id);
                self.newborns.remove(&child.id);
            }
            // A wake that found a newborn dead may have made another one, whose streams these are.
            if !self.firsts.contains_key(&child.id) {
                self.lost.retain(|fill| fill.id != child.id);
                self.forget(child.id);
            }
            // Without its directory the container is being removed, and no command will read the
            // file.
            let _ = write_exit_file(&self.parts.run, child.id, pid, ended);
        }
        let reply = Reply::Exited { pid, ended };
        let received = self.send(child.connection, &reply, &[]);
        let (to_notify, rest) =
            std::mem::take(&mut self.waiters).into_iter().partition(|w| w.0 == pid);
        self.waiters = rest;
        let to_notify: Vec<(u32, u64)> = to_notify;
        for (_, waiter) in to_notify {
            self.send(waiter, &reply, &[]);
        }
        if child.settle {
            match received {
                true => {
                    let (id, connection) = (child.id, child.connection);
                    self.unsettled.push(Unsettled { pid, id, connection });
                }
                false => self.settle(child.id),
            }
        }
    }

    /// Whether the first process of a container lives, and its end is going to be noticed.
    fn has_first(&self, id: Id) -> bool {
        self.firsts.contains_key(&id) || self.adopted.has(id)
    }

    /// Watches the first process of a container whose keeper was killed.
    fn adopt(&mut self, id: Id, pid: u32, fds: Vec<OwnedFd>) -> Answer {
        let Some(process) = fds.into_iter().next() else {
            return refused(Errno::BADMSG, "adopt a process without its descriptor");
        };
        self.serial += 1;
        let serial = self.serial;
        let Some(process) = self.adopted.add(serial, id, pid, process) else { return done() };
        let data = epoll::EventData::new_u64(serial);
        match epoll::add(&self.epoll, process, data, epoll::EventFlags::IN) {
            Ok(()) => done(),
            Err(e) => {
                self.adopted.remove(serial);
                refused(e, "watch the first process of a container")
            }
        }
    }

    /// An adopted process has ended: as for a child without a client.
    fn settle_adopted(&mut self, Gone { id, pid, ended }: Gone) {
        self.lost.retain(|fill| fill.id != id);
        self.forget(id);
        if let Some(ended) = ended {
            // Without its directory the container is being removed.
            let _ = write_exit_file(&self.parts.run, id, pid, ended);
        }
        self.settle(id);
    }

    fn settle(&mut self, id: Id) {
        if !self.parts.settle.is_empty() {
            self.queue.push_back(Errand::Settle(id));
            self.start_errands();
        }
    }

    fn start_errands(&mut self) {
        let since = Instant::now();
        while let Some(at) = self.next_errand(since) {
            let errand = self.queue[at];
            match self.run_errand(errand) {
                Ok(pid) => {
                    self.queue.remove(at);
                    self.errands.insert(pid, Running { errand, since, waits: false });
                }
                // No process can be made now: it stays in the queue.
                Err(_) => break,
            }
        }
    }

    /// The errands of a kind that are worked on, by their begin.
    fn begun(&self, kind: HandKind) -> impl Iterator<Item = Instant> {
        let works = move |running: &&Running| running.errand.by() == kind && !running.waits;
        self.errands.values().filter(works).map(|running| running.since)
    }

    /// Whether an errand is worked on.
    fn works(&self) -> bool {
        self.errands.values().any(|running| !running.waits)
    }

    /// Index of the first errand in the queue whose kind is below its limit.
    fn next_errand(&self, now: Instant) -> Option<usize> {
        let may = |kind| {
            let recent = self.begun(kind).filter(|since| *since + long(kind) > now).count();
            recent < ERRANDS_MAX && self.begun(kind).count() < LASTING_MAX
        };
        let settlers = self.errands.values().filter(|it| it.errand.by() == HandKind::Settler);
        let has_room = settlers.count() < SETTLERS_MAX;
        let (wake, settle) = (may(HandKind::Waker), has_room && may(HandKind::Settler));
        self.queue.iter().position(|errand| match errand.by() {
            HandKind::Waker => wake,
            HandKind::Settler => settle,
            HandKind::Nursery | HandKind::Runner => false, // they have no errands
        })
    }

    /// When the first of the errands in progress lasts long, if another one waits for that.
    fn next_long(&self, now: Instant) -> Option<Instant> {
        let kinds = [HandKind::Waker, HandKind::Settler];
        let waits = |kind: &HandKind| self.queue.iter().any(|errand| errand.by() == *kind);
        let long = |kind| self.begun(kind).map(move |since| since + long(kind));
        kinds.into_iter().filter(waits).flat_map(long).filter(|long| *long > now).min()
    }

    /// Hands of a kind that have nothing to do, by their serial numbers.
    fn at_rest(&self, kind: HandKind) -> impl Iterator<Item = (u64, &Hand)> {
        let rests = move |(_, hand): &(&u64, &Hand)| {
            let works = self.errands.contains_key(&hand.pid) || self.busy.contains(&hand.pid);
            hand.kind == kind && !works
        };
        self.hands.iter().filter(rests).map(|(serial, hand)| (*serial, hand))
    }

    /// Hands at rest without the one waker that is kept while any container sleeps.
    fn spare(&self) -> impl Iterator<Item = &Hand> {
        let kept = usize::from(!self.custody.is_empty());
        let spare = self.at_rest(HandKind::Waker).skip(kept);
        let others = [HandKind::Settler, HandKind::Runner].into_iter();
        spare.chain(others.flat_map(|kind| self.at_rest(kind))).map(|(_, hand)| hand)
    }

    /// When the next of them has rested for long enough.
    fn next_rest(&self) -> Option<Instant> {
        self.spare().map(Hand::rests_until).min()
    }

    /// Keeps one waker while any container sleeps, and ends the other hands when they have no work.
    fn keep_hands(&mut self, now: Instant) {
        let over = |hand: &&Hand| hand.rests_until() <= now;
        let spare: Vec<u32> = self.spare().filter(over).map(|hand| hand.pid).collect();
        if !spare.is_empty() {
            self.dismiss(|hand| spare.contains(&hand.pid));
        }
        if self.lacks_a_waker()
            && self.next_waker <= now
            && self.make_hand(HandKind::Waker).is_err()
        {
            // A client then waits a little longer.
            self.next_waker = now + IDLE;
        }
    }

    /// Returns whether containers are asleep while no waker is idle or starting.
    fn lacks_a_waker(&self) -> bool {
        let is_wanted = !self.custody.is_empty() && !self.parts.wake.is_empty();
        let is_waker = |hand: &Hand| hand.kind == HandKind::Waker;
        is_wanted && !self.hands.values().any(is_waker) && !self.works()
    }

    /// Starts a hand, which receives requests under this serial number.
    fn make_hand(&mut self, kind: HandKind) -> Result<u64, Errno> {
        use rustix::net::{AddressFamily, SocketType, socketpair};
        let (socket, flags) = (SocketType::STREAM, SocketFlags::CLOEXEC);
        let (input, requests) = socketpair(AddressFamily::UNIX, socket, flags, None)?;
        let program = match kind {
            HandKind::Waker => &self.parts.wake,
            HandKind::Settler => &self.parts.settle,
            HandKind::Nursery => &self.parts.nursery,
            HandKind::Runner => {
                self.parts.commands.as_ref().map(|it| &it.program).ok_or(Errno::NOENT)?
            }
        };
        let pid = self.run_program(program, input.as_fd())?;
        self.serial += 1;
        // A hand that cannot be polled exits, because its input is closed.
        self.watch(requests.as_fd(), self.serial)?;
        self.hands.insert(self.serial, Hand { pid, kind, requests, rests_since: Instant::now() });
        Ok(self.serial)
    }

    /// Ends hands. Returns whether there was one.
    fn dismiss(&mut self, which: impl Fn(&Hand) -> bool) -> bool {
        let before = self.hands.len();
        let epoll = &self.epoll;
        self.hands.retain(|_, hand| {
            let goes = which(hand);
            if goes {
                // ORDER: a newborn may have a copy for a moment, which would keep it in the set.
                let _ = epoll::delete(epoll, &hand.requests);
            }
            !goes
        });
        self.hands.len() < before
    }

    /// A hand has done its errand, or has exited.
    fn receive_from_hand(&mut self, serial: u64) {
        let Some(hand) = self.hands.get_mut(&serial) else { return };
        let (pid, kind) = (hand.pid, hand.kind);
        let mut answer = [0; 1];
        match rustix::net::recv(&hand.requests, &mut answer, RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            Ok((1, _)) if kind == HandKind::Settler && answer == WAITS => {
                if let Some(running) = self.errands.get_mut(&pid) {
                    running.waits = true;
                }
                self.start_errands();
            }
            Ok((1, _)) => {
                hand.rests_since = Instant::now();
                self.busy.remove(&pid);
                match self.errands.remove(&pid).map(|running| running.errand) {
                    Some(Errand::Wake { id, .. }) if answer == SILENT => {
                        self.custody.was_silent(&self.epoll, id);
                    }
                    Some(Errand::Wake { id, .. }) => self.custody.came_back(&self.epoll, id),
                    Some(Errand::Settle(_)) | None => {}
                }
                self.start_errands();
            }
            // An unfinished job is handled when the process is reaped.
            _ => {
                self.dismiss(|hand| hand.pid == pid);
                if kind == HandKind::Waker && !self.errands.contains_key(&pid) {
                    self.next_waker = Instant::now() + IDLE;
                }
            }
        }
    }

    /// Has an errand done by a hand at rest, or by a new one.
    fn run_errand(&mut self, errand: Errand) -> Result<u32, Errno> {
        let kind = errand.by();
        let ready = self.at_rest(kind).find(|(_, hand)| hand.request(errand));
        if let Some((_, hand)) = ready {
            return Ok(hand.pid);
        }
        let serial = self.make_hand(kind)?;
        let hand = self.hands.get(&serial).ok_or(Errno::SRCH)?;
        // One that has exited by now, because its program is gone, has failed in its errand: it is not tried again and
        // again.
        let _ = hand.request(errand);
        Ok(hand.pid)
    }

    /// Runs a program in the host's mount namespace, with this standard input.
    ///
    /// ORDER: the caller blocks until execve(2). Until then the child shares the keeper's memory
    /// and its table of descriptors: no table of a hundred thousand entries is copied, and no
    /// descriptor that is closed meanwhile stays open in a copy.
    fn run_program(&self, program: &[CString], input: BorrowedFd<'_>) -> Result<u32, Errno> {
        struct Becoming<'s> {
            server: &'s Server,
            program: &'s CString,
            argv: &'s [*const libc::c_char],
        }
        extern "C" fn body(becoming: *mut c_void) -> c_int {
            // SAFETY: the pointer is to a variable of the caller, which is blocked meanwhile.
            let Becoming { server, program, argv } = unsafe { &*becoming.cast::<Becoming<'_>>() };
            if rustix::process::setsid().is_ok() {
                // SAFETY: the table ends with null, and its texts live in this process.
                let _ = unsafe { server.become_program(program, argv, call::part_with_from) };
            }
            127
        }
        let argv: Vec<_> = program.iter().map(|w| w.as_ptr()).chain([null()]).collect();
        let program = program.first().ok_or(Errno::INVAL)?;
        let mut becoming = Becoming { server: self, program, argv: &argv };
        // The child inherits standard input from the keeper: otherwise /dev/null, like standard output.
        rustix::stdio::dup2_stdin(input)?;
        // SAFETY: the body makes system calls only, and writes nothing.
        let pid = unsafe { call::run_aside(body, (&raw mut becoming).cast()) };
        rustix::stdio::dup2_stdin(rustix::stdio::stdout())?;
        Ok(pid? as u32)
    }

    /// The last thing: this process becomes the tidy program, where there is one.
    fn become_tidy(&self) -> Result<(), Failed> {
        let Some(program) = self.parts.tidy.first() else { return Ok(()) };
        let argv: Vec<_> = self.parts.tidy.iter().map(|w| w.as_ptr()).chain([null()]).collect();
        // SAFETY: the table ends with null, and its texts live in this process.
        let source = unsafe { self.become_program(program, &argv, call::close_on_exec_from) };
        Err(Failed { step: "become the tidy program", source })
    }

    /// Executes a program of the host, in its mount namespace and with the settings that the keeper
    /// was started with. `part` closes or unshares descriptors from 3 on. Returns only on failure;
    /// allocates nothing.
    ///
    /// # Safety
    /// `argv` ends with null and points to C strings.
    unsafe fn become_program(
        &self,
        program: &CString,
        argv: &[*const libc::c_char],
        part: fn(c_int) -> Result<(), Errno>,
    ) -> Errno {
        let path = c"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        let envp = [path.as_ptr(), null()];
        let outside = &self.parts.outside;
        let ready = kernel::setns(outside.mounts.as_fd(), CloneFlags::NEWNS)
            .and_then(|()| call::block_signals(0))
            .and_then(|()| self.parts.heritage.give_back(outside.proc.as_fd()))
            .and_then(|()| part(3));
        match ready {
            // SAFETY: both tables end with null and point to texts that live.
            Ok(()) => unsafe { call::execve(program, argv.as_ptr(), envp.as_ptr()) },
            Err(errno) => errno,
        }
    }

    /// Bytes of one entry of the table of children, for the curious.
    pub const CHILD_BYTES: usize = size_of::<(u32, Child)>();
}

/// Starts a reader of output and watches it. Returns its number.
fn start_reader(
    outputs: &mut Outputs,
    parts: &Parts,
    epoll: &OwnedFd,
    serial: &mut u64,
) -> Result<u64, Errno> {
    *serial += 1;
    let sock = outputs.start_reader(*serial, &parts.run, &parts.outside)?;
    let data = epoll::EventData::new_u64(*serial);
    epoll::add(epoll, sock, data, epoll::EventFlags::IN).map(|()| *serial)
}
