//! The thread that holds new connections to shared services, and admits them in the order of
//! [`dormouse_governor::order`].
//!
//! A *first packet* (SYN) to a service comes to the queue of the stack ([`dormouse_stacks::held`]). While few
//! connections are pending at the service, it goes on at once. Otherwise it is held, and admitted when the service
//! has begun with those. The client's connect(2) takes longer meanwhile; the service sees nothing of this: readiness,
//! accept(2) and its errors are the kernel's own.
//!
//! A connection is *pending* while it is in the backlog, and while its service has read nothing of what it has sent. A
//! server with an event loop accepts all connections at once, and then reads from one after the other. A connection of
//! which something was read is not pending: its client may send without reading answers. Nor is one for more than
//! [`UNREAD_WITHIN`].
//!
//! ```text
//! first packet ---> the account by its source, the listener by sock_diag(7)
//!     none is held, and few are pending:   admitted
//!     else:                                held, in the queue of its account
//! each half millisecond, while some are held: the pending ones of each listener are counted, and others admitted
//! each 25 ms, while some are held: the CPU time that services have used for each account
//! ```
//!
//! **Bounds.** A service that accepts and reads nothing for [`STALLS`] is no longer ordered until it does so again. An
//! account has at most [`WAITING_MAX`] held connections at one listener, as if its backlog were full, and
//! [`ACCOUNT_MAX`] in a stack: further first packets are dropped, and repeated by the client. Those of the outside,
//! which is many clients, go on. Beyond [`held::HELD_MAX`] of all, or [`LISTENERS_MAX`] listeners, packets go on
//! unordered. A packet that the client repeats takes the place of the one before.
//!
//! **Ends.** After SIGKILL the kernel drops the held packets, and clients repeat them after a second. All later ones go
//! on. At an end on purpose all are admitted, and the rules are removed.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use dormouse_container::{Party, Places, Services};
#[cfg(doc)]
use dormouse_governor::order::WAITING_MAX;
use dormouse_governor::order::{self, Queue};
use dormouse_kernel::CallError;
use dormouse_kernel::netlink::listener::{Found, Listener, Listeners};
use dormouse_kernel::netlink::queue::{Packet, Verdict};
use dormouse_model::Name;
use dormouse_stacks::held::{self, Holding};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::notify::say;

/// Time between looks at the backlogs, while connections are held.
const LOOK: Duration = Duration::from_micros(500);
/// Time between readings while connections are held.
const READ: Duration = Duration::from_millis(25);
/// Time between readings after that, and how long these go on.
const READ_AFTER: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(1));
/// At least so many times the duration of looks or readings passes before the next ones.
const SPARING: u32 = 20;
/// LIMIT: the time without progress of the service after which all are admitted.
///
/// It is long for a guest without hardware virtualization, in which two commands take seconds.
const STALLS: Duration = Duration::from_secs(30);
/// LIMIT: listeners of one stack that are known.
const LISTENERS_MAX: usize = 1024;
/// A listener without a held connection is forgotten after this time.
const FORGOTTEN: Duration = Duration::from_secs(5);
/// LIMIT: admitted connections of one listener whose first request is waited for.
const ADMITTED_MAX: usize = 64;
/// LIMIT: time within which a client sends its first request, if it is to count as pending until it is read.
const SENDS_WITHIN: Duration = Duration::from_millis(100);
/// LIMIT: time for which an admitted connection counts as pending because nothing of it was read.
const UNREAD_WITHIN: Duration = Duration::from_secs(1);
/// LIMIT: held packets of one account in one stack. [`held::HELD_MAX`] is for all.
const ACCOUNT_MAX: u32 = 1024;
/// Packets that are received before the next look.
const PACKETS: usize = 64;
/// Time after which a stack that cannot be held is tried again.
const AGAIN: Duration = Duration::from_secs(30);
/// Time between looks at a thread that ends.
const LOOKS_AGAIN: Duration = Duration::from_millis(5);
/// The weight of the outside and of root: that of a container by default.
const WEIGHT: u32 = 100;
/// The nice value of the thread.
const NICE: i32 = -10;
const NAME: &str = "admit";

/// An account; `None` for the outside and root, which are one.
type Account = Option<Party>;

/// A shared service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Service {
    pub(crate) cgroup_v2_id: u64,
    /// The address at which a socket for all addresses is bound.
    pub(crate) first: Ipv4Addr,
}

/// The services of one stack, and the accounts at its other addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct StackPlan {
    pub(crate) services: BTreeMap<IpAddr, Service>,
    pub(crate) clients: BTreeMap<IpAddr, Party>,
}

/// What the thread follows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// By domain; those without a service are left out.
    pub(crate) stacks: BTreeMap<Name, StackPlan>,
    pub(crate) weights: BTreeMap<Party, u32>,
}

impl Plan {
    fn weight(&self, account: &Account) -> u32 {
        account.as_ref().and_then(|party| self.weights.get(party)).copied().unwrap_or(WEIGHT)
    }
}

/// What the room gives to the thread.
#[derive(Debug, Default)]
struct Shared {
    plan: Mutex<Option<Plan>>,
    ends: AtomicBool,
}

/// The running thread.
#[derive(Debug)]
pub(crate) struct Admitter {
    shared: Arc<Shared>,
    call: Arc<OwnedFd>,
    thread: JoinHandle<()>,
}

impl Admitter {
    /// Begins without services. Errors: the thread cannot be made.
    pub(crate) fn begin(places: &Places) -> std::io::Result<Self> {
        let call = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let shared = Arc::new(Shared::default());
        let mut work = Work {
            places: Services::new(places),
            plan: Plan::default(),
            stacks: BTreeMap::new(),
            services: BTreeMap::new(),
            again: None,
            said: None,
        };
        let (received, called) = (Arc::clone(&shared), Arc::clone(&call));
        let body = move || work.run(&received, &called);
        let thread = Builder::new().name(NAME.into()).spawn(body)?;
        Ok(Self { shared, call, thread })
    }

    /// Gives the thread another plan.
    pub(crate) fn follow(&self, plan: Plan) {
        *self.shared.plan.lock().unwrap_or_else(PoisonError::into_inner) = Some(plan);
        self.call();
    }

    fn call(&self) {
        // A counter that is full wakes the thread as well.
        let _ = rustix::io::write(&*self.call, &1u64.to_ne_bytes());
    }

    /// Returns whether the thread has ended, after a panic.
    pub(crate) fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Has the thread admit all and end, and waits so long for it.
    pub(crate) fn stop(self, limit: Duration) {
        self.shared.ends.store(true, Ordering::Release);
        self.call();
        let until = Instant::now() + limit;
        while !self.has_ended() && Instant::now() < until {
            std::thread::sleep(LOOKS_AGAIN);
        }
    }
}

/// A held first packet.
#[derive(Debug)]
struct Held {
    id: u32,
    ends: [SocketAddr; 2],
}

/// A listener of a service.
#[derive(Debug)]
struct Listening {
    service: u64,
    queue: Queue<Account, Held>,
    /// Connections that were admitted lately, and whose first request may be unread.
    admitted: VecDeque<([SocketAddr; 2], Instant)>,
    /// When a connection was admitted last, or the service made progress.
    moved: Instant,
    /// The backlog at the last count.
    backlog: u32,
    /// It has stalled: connections go on until it makes progress, or its backlog is empty.
    is_open: bool,
    /// It accepts connections before it has begun with those that it has.
    is_eager: bool,
}

impl Listening {
    /// Counts the pending connections.
    fn pending(
        &mut self,
        found: Listener,
        listeners: &mut Listeners,
        now: Instant,
    ) -> Result<u32, CallError> {
        self.counted(found.pending, now);
        let mut unread = 0;
        for _ in 0..self.admitted.len() {
            let Some((ends, since)) = self.admitted.pop_front() else { break };
            let Some(Found::Connection(one)) = listeners.connection(ends)? else { continue };
            if one.received_bytes > 0 && !one.is_unread() {
                self.has_progress(now);
                continue;
            }
            let within = if one.is_unread() { UNREAD_WITHIN } else { SENDS_WITHIN };
            if since + within > now {
                unread += u32::from(one.is_unread());
                self.admitted.push_back((ends, since));
            }
        }
        self.is_eager |= unread > found.pending;
        // Those in the backlog may have unread requests as well.
        Ok(found.pending.max(unread))
    }

    /// Takes a count of the backlog. A backlog that falls is progress of the service.
    fn counted(&mut self, backlog: u32, now: Instant) {
        if backlog < std::mem::replace(&mut self.backlog, backlog) {
            self.has_progress(now);
        }
        self.is_open &= backlog > 0;
    }

    fn has_progress(&mut self, now: Instant) {
        (self.moved, self.is_open) = (now, false);
    }
}

/// One stack with services.
#[derive(Debug)]
struct Stack {
    netns: OwnedFd,
    holding: Holding,
    plan: StackPlan,
    /// By cookie.
    listening: BTreeMap<u64, Listening>,
    /// The listeners of held packets, and the accounts in whose queues these are. The plan may have another account
    /// since.
    held: HashMap<[SocketAddr; 2], (u64, Account)>,
    /// Held packets by account.
    counts: BTreeMap<Account, u32>,
}

/// A service, and when a connection to it was admitted last.
#[derive(Debug)]
struct Served {
    order: order::Service<Account>,
    admitted: Instant,
    read: Instant,
}

type All = BTreeMap<u64, Served>;

impl Stack {
    fn decide(&self, id: u32, verdict: Verdict) -> Result<(), CallError> {
        match self.holding.queue.decide(id, verdict) {
            // The kernel has given up the packet.
            Err(e) if e.errno() == rustix::io::Errno::NOENT.raw_os_error() => Ok(()),
            other => other,
        }
    }

    /// The listener that will have a connection.
    fn find(
        &mut self,
        ends: [SocketAddr; 2],
        service: Service,
    ) -> Result<Option<Listener>, CallError> {
        if let Some(found) = self.holding.listeners.find(ends)? {
            return Ok(Some(found));
        }
        let first = SocketAddr::new(service.first.into(), ends[1].port());
        if first == ends[1] {
            return Ok(None);
        }
        // A socket for all addresses is bound to the first one, and has the packets of the others (address.bpf.c).
        let from = SocketAddr::new(service.first.into(), ends[0].port());
        self.holding.listeners.find([from, first])
    }

    /// Takes a packet that has come.
    fn take(&mut self, packet: Packet, plan: &Plan, all: &mut All) -> Result<(), CallError> {
        let Packet { id, ends } = packet;
        let to = ends.and_then(|ends| Some((ends, *self.plan.services.get(&ends[1].ip())?)));
        let Some((ends, service)) = to else { return self.decide(id, Verdict::Accept) };
        let account: Account = self.plan.clients.get(&ends[0].ip()).copied();
        if let Some((cookie, account)) = self.held.get(&ends)
            && let Some(listening) = self.listening.get_mut(cookie)
            && let Some(held) = listening.queue.find(account, |held| held.ends == ends)
        {
            // The client repeats it, or has another connection with the same port.
            let before = std::mem::replace(&mut held.id, id);
            return self.decide(before, Verdict::Drop);
        }
        // The outside is many clients, and a drop would be for all.
        let refuses = if account.is_some() { Verdict::Drop } else { Verdict::Accept };
        if self.counts.get(&account).is_some_and(|count| *count >= ACCOUNT_MAX) {
            return self.decide(id, refuses);
        }
        let Some(found) = self.find(ends, service)? else {
            return self.decide(id, Verdict::Accept);
        };
        let is_known = self.listening.contains_key(&found.cookie);
        if !is_known && self.listening.len() >= LISTENERS_MAX {
            return self.decide(id, Verdict::Accept);
        }
        let now = Instant::now();
        let listening = self.listening.entry(found.cookie).or_insert_with(|| Listening {
            service: service.cgroup_v2_id,
            queue: Queue::default(),
            admitted: VecDeque::new(),
            moved: now,
            backlog: 0,
            is_open: false,
            is_eager: false,
        });
        let waits = !listening.queue.is_empty();
        if !waits {
            listening.moved = now;
        }
        let weight = plan.weight(&account);
        let served = served(all, listening.service, now);
        if let Some(refused) =
            listening.queue.push(&mut served.order, &account, weight, Held { id, ends })
        {
            return self.decide(refused.id, refuses);
        }
        self.held.insert(ends, (found.cookie, account));
        *self.counts.entry(account).or_default() += 1;
        // The next look is for those that wait. A count for each packet would be a part of its price.
        if waits && !listening.is_open {
            return Ok(());
        }
        // The backlog alone, where that says enough.
        let pending = match listening.is_eager {
            true => listening.pending(found, &mut self.holding.listeners, now)?,
            false => {
                listening.counted(found.pending, now);
                found.pending
            }
        };
        self.admit(Listener { pending, ..found }, plan, all, now)
    }

    /// A packet is held no longer.
    fn leaves(&mut self, ends: [SocketAddr; 2]) {
        let Some((_, account)) = self.held.remove(&ends) else { return };
        if let Some(count) = self.counts.get_mut(&account) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.counts.remove(&account);
            }
        }
    }

    /// Admits what a listener has room for.
    fn admit(
        &mut self,
        found: Listener,
        plan: &Plan,
        all: &mut All,
        now: Instant,
    ) -> Result<(), CallError> {
        let Listener { cookie, mut pending } = found;
        while let Some(listening) = self.listening.get_mut(&cookie) {
            let served = served(all, listening.service, now);
            if !listening.is_open && listening.queue.room(&served.order, pending) == 0 {
                break;
            }
            let weight = |account: &Account| plan.weight(account);
            let Some(next) = listening.queue.pop(&mut served.order, weight) else { break };
            served.admitted = now;
            if !listening.is_open {
                listening.moved = now;
            }
            pending += 1;
            if listening.admitted.len() == ADMITTED_MAX {
                listening.admitted.pop_front();
            }
            listening.admitted.push_back((next.ends, now));
            self.leaves(next.ends);
            self.decide(next.id, Verdict::Accept)?;
        }
        Ok(())
    }

    /// Looks at the backlog of each listener for which packets are held.
    fn look(&mut self, plan: &Plan, all: &mut All, now: Instant) -> Result<(), CallError> {
        let waits = |(cookie, one): (&u64, &Listening)| (!one.queue.is_empty()).then_some(*cookie);
        let cookies: Vec<u64> = self.listening.iter().filter_map(waits).collect();
        for cookie in cookies {
            self.look_at(cookie, plan, all, now)?;
        }
        Ok(())
    }

    fn look_at(
        &mut self,
        cookie: u64,
        plan: &Plan,
        all: &mut All,
        now: Instant,
    ) -> Result<(), CallError> {
        while let Some(listening) = self.listening.get_mut(&cookie) {
            let served = served(all, listening.service, now);
            let Some(ends) = listening.queue.peek(&served.order).map(|held| held.ends) else {
                break;
            };
            let service = self.plan.services.get(&ends[1].ip()).copied();
            let found = match service {
                Some(service) => self.find(ends, service)?,
                None => None,
            };
            let Some(listening) = self.listening.get_mut(&cookie) else { break };
            if let Some(found) = found.filter(|found| found.cookie == cookie) {
                let pending = listening.pending(found, &mut self.holding.listeners, now)?;
                listening.queue.limit.look(pending);
                if now.duration_since(listening.moved) > STALLS {
                    listening.is_open = true;
                }
                return self.admit(Listener { pending, ..found }, plan, all, now);
            }
            // It is a connection already, the listener is closed, or its group has another member. The kernel knows
            // where the packet goes.
            let Some(held) = listening.queue.skip(&served.order) else { break };
            self.leaves(held.ends);
            self.decide(held.id, Verdict::Accept)?;
        }
        Ok(())
    }

    /// Lets all held packets of a listener go on.
    fn release(&mut self, cookie: u64) -> Result<(), CallError> {
        let Some(mut listening) = self.listening.remove(&cookie) else { return Ok(()) };
        let mut done = Ok(());
        for held in listening.queue.take_all() {
            self.leaves(held.ends);
            done = done.and(self.decide(held.id, Verdict::Accept));
        }
        done
    }

    /// Lets all that are no longer for a service go on.
    fn release_all(&mut self, but: impl Fn(u64) -> bool) -> Result<(), CallError> {
        let gone = |(cookie, one): (&u64, &Listening)| (!but(one.service)).then_some(*cookie);
        let cookies: Vec<u64> = self.listening.iter().filter_map(gone).collect();
        let release = |done: Result<(), CallError>, cookie| done.and(self.release(cookie));
        cookies.into_iter().fold(Ok(()), release)
    }

    /// Lets all packets go on: those that are held, and those that wait to be received.
    ///
    /// ORDER: before the rules are removed or replaced. The kernel then drops what is in the queue.
    fn flush(&mut self) -> Result<(), CallError> {
        self.release_all(|_| false)?;
        while let Some(packet) = self.holding.queue.take()? {
            self.decide(packet.id, Verdict::Accept)?;
        }
        Ok(())
    }

    /// Removes the rules. All packets go on.
    fn close(mut self) -> Result<(), String> {
        let flushed = self.flush().map_err(|e| e.to_string());
        let Self { netns, holding, .. } = self;
        // ORDER: without the queue packets pass, while the rules are being removed.
        drop(holding);
        flushed.and(held::hold(netns.as_fd(), &[]).map_err(|e| e.to_string()))
    }
}

/// The order of a service, which begins now if it is new.
fn served(all: &mut All, service: u64, now: Instant) -> &mut Served {
    let new = || Served { order: order::Service::default(), admitted: now, read: now };
    all.entry(service).or_insert_with(new)
}

/// The thread.
#[derive(Debug)]
struct Work {
    places: Services,
    plan: Plan,
    stacks: BTreeMap<Name, Stack>,
    services: All,
    /// When a stack that could not be held is tried again.
    again: Option<Instant>,
    /// The last reported failure.
    said: Option<String>,
}

impl Work {
    fn run(&mut self, shared: &Shared, call: &OwnedFd) {
        // The thread works some microseconds at a time, for which a service may wait. Without the right to set it, the
        // wait is longer.
        let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE);
        let (mut look, mut read) = (Instant::now(), Instant::now());
        loop {
            let now = Instant::now();
            let is_holding = self.stacks.values().any(|stack| !stack.held.is_empty());
            let reads =
                is_holding || self.services.values().any(|one| one.admitted + READ_AFTER.1 > now);
            let every = if is_holding { READ } else { READ_AFTER.0 };
            let due =
                [is_holding.then_some(look), reads.then_some(read.min(now + every)), self.again];
            let calls = self.wait(call, due.into_iter().flatten().min());
            if calls[0] {
                let _ = rustix::io::read(call, &mut [0; 8]);
                if shared.ends.load(Ordering::Acquire) {
                    break;
                }
                let plan = shared.plan.lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some(plan) = plan {
                    self.plan = plan;
                    self.follow();
                }
            }
            let begun = Instant::now();
            if self.again.is_some_and(|again| again <= begun) {
                self.follow();
            }
            self.receive(&calls[1..]);
            let begun = Instant::now();
            if is_holding && look <= begun {
                self.each(|stack, plan, all| stack.look(plan, all, begun));
                look = begun + LOOK.max(begun.elapsed() * SPARING);
            }
            let begun = Instant::now();
            if reads && read <= begun {
                self.read(begun);
                read = begun + every.max(begun.elapsed() * SPARING);
            }
        }
        for (_, stack) in std::mem::take(&mut self.stacks) {
            if let Err(e) = stack.close() {
                say(&format!("connections of shared services: {e}"));
            }
        }
    }

    /// Waits for packets, a call, or a time. The first flag is that of the call.
    fn wait(&self, call: &OwnedFd, until: Option<Instant>) -> Vec<bool> {
        let queues = self.stacks.values().map(|stack| stack.holding.queue.as_fd());
        let mut all: Vec<PollFd<'_>> = std::iter::once(call.as_fd())
            .chain(queues)
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.map(|left| Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        });
        // An interrupted wait is a short one.
        let _ = poll(&mut all, left.as_ref());
        all.iter().map(|fd| !fd.revents().is_empty()).collect()
    }

    fn receive(&mut self, ready: &[bool]) {
        let mut ready = ready.iter().copied();
        self.each(|stack, plan, all| {
            // A stack that was opened since the wait has no flag.
            if !ready.next().unwrap_or(true) {
                return Ok(());
            }
            for _ in 0..PACKETS {
                let Some(packet) = stack.holding.queue.take()? else { break };
                stack.take(packet, plan, all)?;
            }
            Ok(())
        });
    }

    /// Works on each stack. A stack that fails is held no longer: its packets go on, its queue ends, and the kernel
    /// admits all that come later.
    fn each(&mut self, mut work: impl FnMut(&mut Stack, &Plan, &mut All) -> Result<(), CallError>) {
        let mut failed = Vec::new();
        for (name, stack) in &mut self.stacks {
            if let Err(e) = work(stack, &self.plan, &mut self.services) {
                failed.push((name.clone(), e));
            }
        }
        for (name, e) in failed {
            self.give_up(&name);
            self.again = Some(Instant::now() + AGAIN);
            self.say(&name, &e.to_string());
        }
    }

    /// Ends the queue of a stack. Its rules stay, and pass all without a queue.
    fn give_up(&mut self, name: &Name) {
        if let Some(mut stack) = self.stacks.remove(name) {
            // The kernel drops what is left in the queue, and clients repeat it.
            let _ = stack.flush();
        }
    }

    /// Reports a failure once while it repeats.
    fn say(&mut self, domain: &Name, what: &str) {
        let line =
            format!("connections of shared services in domain {domain} are not ordered: {what}");
        if self.said.as_ref() != Some(&line) {
            say(&line);
        }
        self.said = Some(line);
    }

    /// Opens and closes stacks as the plan has them.
    fn follow(&mut self) {
        self.again = None;
        let gone: Vec<Name> = self
            .stacks
            .keys()
            .filter(|name| !self.plan.stacks.contains_key(*name))
            .cloned()
            .collect();
        for stack in gone.into_iter().filter_map(|name| self.stacks.remove(&name)) {
            let _ = stack.close(); // the stack may be gone with its domain
        }
        for (name, plan) in self.plan.stacks.clone() {
            if let Err(what) = self.follow_one(&name, plan) {
                self.give_up(&name);
                self.again = Some(Instant::now() + AGAIN);
                self.say(&name, &what);
            }
        }
        let stacks = self.plan.stacks.values();
        let live: Vec<u64> =
            stacks.flat_map(|stack| stack.services.values().map(|one| one.cgroup_v2_id)).collect();
        self.services.retain(|id, _| live.contains(id));
    }

    fn follow_one(&mut self, name: &Name, plan: StackPlan) -> Result<(), String> {
        let opened = self.places.stack(name).map_err(|e| e.to_string())?;
        let Some(netns) = opened else {
            return Err("the domain is gone".into());
        };
        // A domain that was made again has another stack.
        let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).map(|stat| stat.st_ino);
        if let Some(stack) = self.stacks.get_mut(name)
            && inode(&stack.netns) == inode(&netns)
        {
            let is_same = stack.plan.services.keys().eq(plan.services.keys());
            stack.plan = plan;
            let live: Vec<u64> =
                stack.plan.services.values().map(|service| service.cgroup_v2_id).collect();
            stack.release_all(|id| live.contains(&id)).map_err(|e| e.to_string())?;
            return match is_same {
                true => Ok(()),
                false => {
                    stack.flush().map_err(|e| e.to_string())?;
                    hold(stack)
                }
            };
        }
        let holding = held::open(netns.as_fd()).map_err(|e| e.to_string())?;
        let (listening, held, counts) = (BTreeMap::new(), HashMap::new(), BTreeMap::new());
        let stack = Stack { netns, holding, plan, listening, held, counts };
        hold(&stack)?;
        self.stacks.insert(name.clone(), stack);
        Ok(())
    }

    /// Reads what services have used for each account.
    fn read(&mut self, now: Instant) {
        for (id, served) in &mut self.services {
            if served.admitted + READ_AFTER.1 < now && served.read > served.admitted {
                continue;
            }
            served.read = now;
            // Without a reading the estimates stay. An unload of gates is followed by a plan.
            let Ok((load, uses)) = self.places.worked(*id) else { continue };
            if load == 0 {
                continue;
            }
            let uses: Vec<(Account, u64)> = uses
                .into_iter()
                .map(|one| (Some(one.party).filter(|party| party.account != 0), one.cpu_ns))
                .collect();
            let readings = uses.iter().map(|(account, ns)| (account, *ns));
            served.order.read(load, readings, |account| self.plan.weight(account));
        }
        for stack in self.stacks.values_mut() {
            stack.listening.retain(|_, one| !one.queue.is_empty() || one.moved + FORGOTTEN > now);
        }
    }
}

fn hold(stack: &Stack) -> Result<(), String> {
    let services: Vec<IpAddr> = stack.plan.services.keys().copied().collect();
    held::hold(stack.netns.as_fd(), &services).map_err(|e| e.to_string())
}
