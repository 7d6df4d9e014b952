//! The thread that holds new connections to shared services, and admits them in the order of
//! [`dormouse_governor::order`].
//!
//! A *first packet* (SYN) to a service comes to the queue of the stack ([`dormouse_stacks::held`]). While few
//! connections are pending at the service, it goes on at once. Otherwise it is held, and admitted when the service
//! has begun with those. The client's connect(2) takes longer meanwhile; the service sees nothing of this: readiness,
//! accept(2) and its errors are the kernel's own.
//!
//! A connection is *pending* while it is being made, while it is in the backlog, and while its service has read nothing
//! of what it has sent. A server with an event loop accepts all connections at once, and then reads from one after the
//! other. A connection of which something was read is not pending: its client may send without reading answers. Nor is
//! one for more than [`UNREAD_WITHIN`].
//!
//! A connection is *in service* from its admission until the service has answered something, one side has ended it, or
//! [`UNREAD_WITHIN`] has passed. A server with a process or thread for each connection has nothing pending, however
//! much it has to do. While its tasks wait for a processor (`cpu.pressure`), an account with connections in service
//! waits for these. Idle connections, such as those of a pool, were answered before, or nothing came over them.
//!
//! ```text
//! first packet ---> the account by its source, the listener by sock_diag(7)
//!     none is held, and few are pending:   admitted
//!     else:                                held, in the queue of its account
//! each half millisecond, while some are held: the pending ones of each listener are counted, and others admitted
//! each 25 ms, while some are held: the CPU time that services have used for each account
//! ```
//!
//! **Connections that need not wait.** A packet that is held costs the connection some 20 us. So when the daemon
//! admits one and none waits, as many more as it would admit at once may go on ([`Queue::allowance`]); a program in
//! the kernel counts them and notes their clients ([`held::pass`]). The packet after these is held. Then the daemon
//! takes the allowance back, and admits the noted ones afterwards. So pending ones are as few as before, and none
//! overtakes a held one. With limits of connections, and with agreed hosts, each packet is held: these need the account
//! before the admission. A listener of a group (SO_REUSEPORT) has no allowance either.
//!
//! **Bounds.** A service that accepts and reads nothing for [`STALLS`] is no longer ordered until it does so again. An
//! account has at most [`WAITING_MAX`] held connections at one listener, as if its backlog were full, and
//! [`ACCOUNT_MAX`] in a stack: further first packets are dropped, and repeated by the client. Those of the outside,
//! which is many clients, go on. Beyond [`held::HELD_MAX`] of all, or [`LISTENERS_MAX`] listeners, packets go on
//! unordered. A packet that the client repeats takes the place of the one before.
//!
//! **Limits.** A connection of an account that has as many as it may have is held until another one has ended, or is
//! refused or lost. How many it has is counted in the kernel ([`Used`]).
//!
//! **Other hosts.** A connection from a host with which accounts are shared is one of the account that came along in
//! its first packet, as for the gates. They note it with the connection when the handshake ends. Until then it is known
//! here alone ([`Coming`]).
//!
//! **Ends.** After SIGKILL the kernel drops the held packets, and clients repeat them after a second. All later ones go
//! on, within an allowance and without. At an end on purpose all are admitted, and the rules are removed.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use dormouse_container::{
    Agreement, ConnectionLimit, ConnectionLimits, Effort, Labels, OnLimit, Party, Places, Services,
};
#[cfg(doc)]
use dormouse_governor::order::WAITING_MAX;
use dormouse_governor::order::{self, Bounds, Queue};
use dormouse_kernel::CallError;
use dormouse_kernel::netlink::listener::{Found, Listener, Listeners};
use dormouse_kernel::netlink::queue::{Packet, Verdict};
use dormouse_model::{ContainerId, Name};
use dormouse_stacks::held::{self, Holding};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::notify::say;

/// Time between looks at the backlogs, while connections are held.
const LOOK: Duration = Duration::from_micros(500);
/// The same when none was admitted for some time: they wait for others of their account to end.
const LOOK_LATER: Duration = Duration::from_millis(5);
const LATELY: Duration = Duration::from_millis(100);
/// Time between counts of the connections of accounts with a limit, while one of these has no room.
const COUNT: Duration = Duration::from_millis(1);
/// Time between readings while connections are held.
const READ: Duration = Duration::from_millis(25);
/// Time between readings after that, and how long these go on.
const READ_AFTER: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(1));
/// At least so many times the CPU time of looks or readings passes before the next ones. On a busy machine they take
/// longer than that, and cost no more.
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
/// LIMIT: time for which an admitted connection counts as pending because nothing of it was read, and as in service
/// because nothing was answered.
const UNREAD_WITHIN: Duration = Duration::from_secs(1);
/// The part of the time for which tasks of a service wait for a processor, from which on more connections do not make
/// it faster: 1 of so many. The kernel takes the mean over processors.
const BUSY_PART: u32 = 4;
/// Time between readings of that.
const BUSY_EVERY: Duration = Duration::from_micros(200);
/// LIMIT: connections from other hosts that are being made, of accounts with a limit. Further ones count when they are
/// made.
const COMING_MAX: usize = 4096;
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
    /// The services by their cgroups.
    pub(crate) containers: BTreeMap<u64, ContainerId>,
    pub(crate) weights: BTreeMap<Party, u32>,
    pub(crate) limits: ConnectionLimits,
    pub(crate) agreement: Agreement,
}

impl Plan {
    fn weight(&self, account: &Account) -> u32 {
        account.as_ref().and_then(|party| self.weights.get(party)).copied().unwrap_or(WEIGHT)
    }

    /// The limits of an account, its own first.
    fn limits(&self, account: &Account) -> &[(u32, ConnectionLimit)] {
        let of = account.as_ref().and_then(|party| self.limits.get(&party.account));
        of.map_or(&[], Vec::as_slice)
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
            plan: Plan::default(),
            stacks: BTreeMap::new(),
            all: All {
                places: Services::new(places),
                services: BTreeMap::new(),
                used: Used::default(),
                clock: Clock::begin(),
            },
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
    sequence: u32,
}

/// A connection that was admitted lately.
#[derive(Debug)]
struct Admitted {
    ends: [SocketAddr; 2],
    account: Account,
    since: Instant,
    /// It was found.
    was_made: bool,
    /// The service has read something of it.
    was_read: bool,
}

/// A listener of a service.
#[derive(Debug)]
struct Listening {
    service: u64,
    queue: Queue<Account, Held>,
    /// Connections that were admitted lately, and that may be in service.
    admitted: VecDeque<Admitted>,
    /// When a connection was admitted last, or the service made progress.
    moved: Instant,
    /// The last look while connections were held.
    looked: Option<Instant>,
    /// The backlog at the last count.
    backlog: u32,
    /// It has stalled: connections go on until it makes progress, or its backlog is empty.
    is_open: bool,
    /// It accepts connections before it has begun with those that it has.
    is_eager: bool,
    /// Where connections to it are allowed without waiting.
    allowed: Option<SocketAddr>,
}

impl Listening {
    /// Counts the pending connections. `all`: also looks which of those that were read are still in service.
    fn pending(
        &mut self,
        found: Listener,
        listeners: &mut Listeners,
        now: Instant,
        all: bool,
    ) -> Result<u32, CallError> {
        self.counted(found.pending, now);
        let (mut unread, mut being_made) = (0, 0);
        for _ in 0..self.admitted.len() {
            let Some(mut one) = self.admitted.pop_front() else { break };
            if one.since + UNREAD_WITHIN <= now {
                continue;
            }
            if one.was_read && !all {
                self.admitted.push_back(one);
                continue;
            }
            let found = match listeners.connection(one.ends)? {
                Some(Found::Connection(is)) => Some(is),
                Some(Found::Listener(_)) | None => None,
            };
            // On a busy machine a client answers some time after the first packet went on. One in another stack, which
            // has no side here, may never answer.
            let [from, to] = one.ends;
            if !one.was_made
                && found.is_some_and(|is| is.is_being_made())
                && listeners.connection([to, from])?.is_some()
            {
                being_made += 1;
                self.admitted.push_back(one);
                continue;
            }
            let Some(is) = found else { continue };
            one.was_made = true;
            if is.received_bytes > 0 && !is.is_unread() && !one.was_read {
                one.was_read = true;
                self.has_progress(now);
            }
            unread += u32::from(is.is_unread());
            let has_request = is.received_bytes > 0 || one.since + SENDS_WITHIN > now;
            if is.is_unread() || (is.is_unanswered() && has_request) {
                self.admitted.push_back(one);
            }
        }
        self.is_eager |= unread > found.pending;
        // Those in the backlog may have unread requests as well.
        Ok(found.pending.max(unread) + being_made)
    }

    /// Notes a connection that was admitted.
    fn note(&mut self, ends: [SocketAddr; 2], account: Account, since: Instant) {
        if self.admitted.len() == ADMITTED_MAX {
            self.admitted.pop_front();
        }
        let (was_made, was_read) = (false, false);
        self.admitted.push_back(Admitted { ends, account, since, was_made, was_read });
    }

    /// Forgets the connections admitted before the last one, if the service has begun with that or ended it. A count
    /// for each connection would be a part of its price. The service has then begun with the others, or does so in
    /// other tasks.
    fn forget_begun(&mut self, listeners: &mut Listeners) -> Result<(), CallError> {
        let Some(last) = self.admitted.back() else { return Ok(()) };
        let has_begun = match listeners.connection(last.ends)? {
            Some(Found::Connection(is)) => is.received_bytes > 0 && !is.is_unread(),
            Some(Found::Listener(_)) | None => true,
        };
        if has_begun {
            self.admitted.clear();
        }
        Ok(())
    }

    /// The connections in service by account, as of the last look.
    fn serving(&self) -> BTreeMap<Account, u32> {
        let mut all = BTreeMap::new();
        for one in &self.admitted {
            *all.entry(one.account).or_default() += 1;
        }
        all
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
    /// The inode of that.
    number: u64,
    holding: Holding,
    plan: StackPlan,
    /// By cookie.
    listening: BTreeMap<u64, Listening>,
    /// The listeners of held packets, and the accounts in whose queues these are. The plan may have another account
    /// since.
    held: HashMap<[SocketAddr; 2], (u64, Account)>,
    /// Held packets by account.
    counts: BTreeMap<Account, u32>,
    coming: Coming,
    /// The listeners that have allowances, by where connections come, and since when it is these.
    targets: HashMap<SocketAddr, (u64, Instant)>,
}

/// A service, and when a connection to it was admitted last.
#[derive(Debug)]
struct Served {
    order: order::Service<Account>,
    admitted: Instant,
    read: Instant,
    /// `None` if it has ended.
    effort: Option<Effort>,
    /// For how long its tasks have waited for a processor, and when that was read.
    waited: Option<(u64, Instant)>,
    /// They wait for one.
    is_busy: bool,
}

impl Served {
    /// Looks whether tasks of the service wait for a processor.
    fn look(&mut self, now: Instant) -> bool {
        let is_recent = |(_, at): (u64, Instant)| at + BUSY_EVERY > now;
        if self.waited.is_some_and(is_recent) {
            return self.is_busy;
        }
        // Without a reading it has what it needs.
        let waited_ns = self.effort.as_ref().and_then(|effort| effort.waited_ns().ok());
        self.is_busy = match (waited_ns, self.waited) {
            (Some(waited_ns), Some((was_ns, at))) => {
                let waited = Duration::from_nanos(waited_ns.saturating_sub(was_ns));
                waited * BUSY_PART >= now.duration_since(at)
            }
            _ => false,
        };
        self.waited = waited_ns.map(|ns| (ns, now));
        self.is_busy
    }
}

/// The connections of accounts with a limit, those of the accounts below included.
///
/// They are counted in the kernel, and each admitted one is added until they are counted again. So the count follows
/// whatever becomes of connections, and an earlier daemon leaves nothing to know.
#[derive(Debug, Default)]
struct Used {
    /// By the number of the account, and by stack.
    counts: BTreeMap<u32, BTreeMap<u64, u32>>,
    /// By stack, when they may be counted again.
    again: BTreeMap<u64, Instant>,
    /// A held connection has no room.
    is_wanted: bool,
}

impl Used {
    /// What becomes of a further connection of an account, if it has no room for it.
    fn over(&self, plan: &Plan, account: &Account) -> Option<OnLimit> {
        let is_over = |(number, limit): &&(u32, ConnectionLimit)| {
            let used: u32 = self.counts.get(number).map_or(0, |stacks| stacks.values().sum());
            used >= limit.connections && limit.on_limit != OnLimit::Pass
        };
        plan.limits(account).iter().find(is_over).map(|(_, limit)| limit.on_limit)
    }

    fn add(&mut self, plan: &Plan, account: &Account, stack: u64) {
        for (number, _) in plan.limits(account) {
            *self.counts.entry(*number).or_default().entry(stack).or_default() += 1;
        }
    }
}

/// Connections of accounts with a limit that have come from other hosts, from their admission until the gates have
/// noted the account.
///
/// Only a host that receives the answers ends its handshake, so one that is forged counts no longer than
/// [`UNREAD_WITHIN`].
#[derive(Debug, Default)]
struct Coming(HashMap<[SocketAddr; 2], (Party, Instant)>);

impl Coming {
    fn add(&mut self, ends: [SocketAddr; 2], party: Party, now: Instant) {
        if self.0.len() >= COMING_MAX {
            self.forget(now);
        }
        if self.0.len() < COMING_MAX {
            self.0.insert(ends, (party, now));
        }
    }

    fn forget(&mut self, now: Instant) {
        self.0.retain(|_, (_, since)| *since + UNREAD_WITHIN > now);
    }

    fn of(&self, ends: [SocketAddr; 2]) -> Option<Party> {
        self.0.get(&ends).map(|(party, _)| *party)
    }
}

/// What is known of all stacks together.
#[derive(Debug)]
struct All {
    places: Services,
    /// By cgroup.
    services: BTreeMap<u64, Served>,
    used: Used,
    clock: Clock,
}

/// A clock that stands still while the thread waits for a processor: on a busy machine that is a part of the time
/// between two packets, and none of the service.
#[derive(Debug)]
struct Clock {
    begun: Instant,
    /// `schedstat` of the thread (proc(5)). Without it the clock goes on.
    delays: Option<File>,
}

impl Clock {
    /// The clock of the calling thread.
    fn begin() -> Self {
        Self { begun: Instant::now(), delays: File::open("/proc/thread-self/schedstat").ok() }
    }

    fn at(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.begun).saturating_sub(self.delay().unwrap_or_default())
    }

    /// For how long the thread has waited: the second of the numbers.
    fn delay(&self) -> Option<Duration> {
        let mut text = [0; 64];
        let length = self.delays.as_ref()?.read_at(&mut text, 0).ok()?;
        let text = str::from_utf8(text.get(..length)?).ok()?;
        text.split_whitespace().nth(1)?.parse().ok().map(Duration::from_nanos)
    }
}

impl All {
    /// The accounts of connections, as far as other hosts send some along. Without a reading they are those of the
    /// outside.
    fn labels(&self, plan: &Plan) -> Option<Labels> {
        if plan.agreement.is_none() {
            return None;
        }
        self.places.labels().ok().flatten()
    }
}

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
        let Packet { id, ends, sequence, options } = packet;
        let to = ends.and_then(|ends| Some((ends, *self.plan.services.get(&ends[1].ip())?)));
        let Some((ends, service)) = to else { return self.decide(id, held::ADMIT) };
        let from = ends[0].ip();
        let own = self.plan.clients.get(&from).copied();
        let account: Account = own.or_else(|| plan.agreement.sent_along(from, &options));
        if let Some((cookie, account)) = self.held.get(&ends)
            && let Some(listening) = self.listening.get_mut(cookie)
            && let Some(held) = listening.queue.find(account, |held| held.ends == ends)
        {
            // The client repeats it, or has another connection with the same port. That of another host may be for
            // another account now, and keeps the place.
            held.sequence = sequence;
            let before = std::mem::replace(&mut held.id, id);
            return self.decide(before, Verdict::Drop);
        }
        if all.used.over(plan, &account).is_some() {
            let is_counted = self.count(plan, all, false)?;
            match all.used.over(plan, &account) {
                Some(how @ (OnLimit::Refuse | OnLimit::Drop)) if is_counted => {
                    return self.refuse(&Held { id, ends, sequence }, how);
                }
                // It waits for room, or for a count.
                _ => {}
            }
        }
        // The outside is many clients, and a drop would be for all.
        let refuses = if account.is_some() { Verdict::Drop } else { held::ADMIT };
        if self.counts.get(&account).is_some_and(|count| *count >= ACCOUNT_MAX) {
            return self.decide(id, refuses);
        }
        let now = Instant::now();
        // ORDER: before the backlog is read, which has those that have used the allowance. In a group that may be one
        // of another listener, and would be for packets after this one.
        let has_passed = match self.targets.get(&ends[1]).copied() {
            Some((cookie, _)) => self.take_back(cookie, plan, all, now)?,
            None => false,
        };
        let Some(found) = self.find(ends, service)? else {
            return self.decide(id, held::ADMIT);
        };
        let is_known = self.listening.contains_key(&found.cookie);
        if !is_known && self.listening.len() >= LISTENERS_MAX {
            return self.decide(id, held::ADMIT);
        }
        // One that is for another address of the listener.
        let has_passed = self.take_back(found.cookie, plan, all, now)? || has_passed;
        let listening = self.listening.entry(found.cookie).or_insert_with(|| Listening {
            service: service.cgroup_v2_id,
            queue: Queue::default(),
            admitted: VecDeque::new(),
            moved: now,
            looked: None,
            backlog: 0,
            is_open: false,
            is_eager: false,
            allowed: None,
        });
        let waits = !listening.queue.is_empty();
        if !waits {
            listening.moved = now;
        }
        let weight = plan.weight(&account);
        let Some(served) = all.services.get_mut(&listening.service) else {
            return self.decide(id, held::ADMIT); // the plan has another service by now
        };
        if let Some(refused) =
            listening.queue.push(&mut served.order, &account, weight, Held { id, ends, sequence })
        {
            return self.decide(refused.id, refuses);
        }
        self.held.insert(ends, (found.cookie, account));
        *self.counts.entry(account).or_default() += 1;
        // The next look is for those that wait. A count for each packet would be a part of its price.
        if waits && !listening.is_open {
            return Ok(());
        }
        if has_passed && served.order.ahead_of_any() == order::LIMIT_MAX {
            listening.forget_begun(&mut self.holding.listeners)?;
        }
        let own = listening.admitted.iter().filter(|one| one.account == account).count();
        let is_crowded = own > served.order.ahead(&account) as usize;
        let is_new = listening.admitted.iter().any(|one| !one.was_made);
        // The backlog alone, where that says enough.
        let pending = match is_crowded || is_new || listening.is_eager {
            true => listening.pending(found, &mut self.holding.listeners, now, is_crowded)?,
            false => {
                listening.counted(found.pending, now);
                found.pending
            }
        };
        if is_crowded {
            served.look(now);
        }
        if !waits {
            listening.queue.limit.arrives(pending, all.clock.at(now));
        }
        self.admit(Listener { pending, ..found }, plan, all, now)
    }

    /// Ends the allowance of a listener, and notes the connections that have used it. Returns whether some have.
    fn take_back(
        &mut self,
        cookie: u64,
        plan: &Plan,
        all: &mut All,
        now: Instant,
    ) -> Result<bool, CallError> {
        let Some(listening) = self.listening.get_mut(&cookie) else { return Ok(false) };
        let Some(to) = listening.allowed.take() else { return Ok(false) };
        let Some(passes) = &self.holding.passes else { return Ok(false) };
        let Some(passed) = passes.take_back(to)? else { return Ok(false) };
        let Some(served) = all.services.get_mut(&listening.service) else { return Ok(false) };
        if passed.count == 0 {
            return Ok(false);
        }
        served.admitted = now;
        listening.moved = now;
        for client in &passed.clients {
            // No host sends accounts along where connections pass.
            let account = self.plan.clients.get(&client.ip()).copied();
            listening.queue.passed(&mut served.order, &account, plan.weight(&account));
            listening.note([*client, to], account, now);
        }
        // Of the others no account is known.
        let others = passed.count.saturating_sub(passed.clients.len() as u32);
        listening.queue.limit.admitted(others);
        Ok(true)
    }

    /// Lets as many connections to a listener go on as it has room for, if none waits.
    fn allow(
        &mut self,
        found: Listener,
        to: SocketAddr,
        plan: &Plan,
        all: &All,
        now: Instant,
    ) -> Result<(), CallError> {
        // What has a limit is counted before it is admitted, and what is sent along is in the held packet.
        if !plan.limits.is_empty() || !plan.agreement.is_none() {
            return Ok(());
        }
        let Some(passes) = &self.holding.passes else { return Ok(()) };
        let Some(listening) = self.listening.get_mut(&found.cookie) else { return Ok(()) };
        let Some(served) = all.services.get(&listening.service) else { return Ok(()) };
        let count = listening.queue.allowance(&served.order, found.pending);
        if count == 0 || listening.is_open {
            return Ok(());
        }
        // The listeners of a group have connections to one place in turn, and an allowance is for all of them.
        let target = self.targets.entry(to).or_insert((found.cookie, now));
        if target.0 != found.cookie {
            *target = (found.cookie, now + FORGOTTEN);
        }
        if target.1 > now {
            return Ok(());
        }
        match passes.allow(to, count) {
            Ok(()) => listening.allowed = Some(to),
            // LIMIT: listeners with an allowance. The connections of others are held.
            Err(e) if e.errno() == rustix::io::Errno::TOOBIG.raw_os_error() => {}
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// Forgets listeners that have had no held connection lately.
    fn forget(&mut self, now: Instant) {
        let passes = &self.holding.passes;
        self.listening.retain(|_, one| {
            if !one.queue.is_empty() || one.moved + FORGOTTEN > now {
                return true;
            }
            // A listener stays known while its allowance cannot be ended.
            match (passes, one.allowed) {
                (Some(passes), Some(to)) => passes.take_back(to).is_err(),
                _ => false,
            }
        });
        let listening = &self.listening;
        self.targets.retain(|_, (cookie, since)| listening.contains_key(cookie) || *since > now);
    }

    /// Ends all allowances, without a note of what has used them.
    fn disallow(&mut self) -> Result<(), CallError> {
        let Some(passes) = &self.holding.passes else { return Ok(()) };
        let mut all = self.listening.values_mut().filter_map(|one| one.allowed.take());
        all.try_for_each(|to| passes.take_back(to).map(drop))
    }

    /// Counts the connections of accounts with a limit; `is_due`: whenever that was done last. Returns whether it was
    /// done.
    fn count(&mut self, plan: &Plan, all: &mut All, is_due: bool) -> Result<bool, CallError> {
        let (begun, spent) = (Instant::now(), spent());
        let labels = all.labels(plan);
        let used = &mut all.used;
        let is_early = |again: &Instant| *again > begun;
        if !is_due && used.again.get(&self.number).is_some_and(is_early) {
            return Ok(false);
        }
        for stacks in used.counts.values_mut() {
            stacks.remove(&self.number);
        }
        let StackPlan { services, clients } = &self.plan;
        self.coming.forget(begun);
        let coming = &self.coming;
        let add = |ends: [SocketAddr; 2], noted: Option<u32>| {
            let from = ends[0].ip();
            let sent = || plan.agreement.party(from, noted?);
            let account = clients.get(&from).copied().or_else(sent).or_else(|| coming.of(ends));
            used.add(plan, &account, self.number);
        };
        let (listeners, notes) = (&mut self.holding.listeners, labels.as_ref().map(Labels::notes));
        let counted = held::count(listeners, notes, |ip| services.contains_key(&ip), add);
        used.counts.retain(|_, stacks| !stacks.is_empty());
        used.again.insert(self.number, begun + COUNT.max(since(spent) * SPARING));
        counted.map(|()| true)
    }

    /// Ends a connection that is beyond a limit.
    fn refuse(&self, held: &Held, how: OnLimit) -> Result<(), CallError> {
        if how == OnLimit::Refuse {
            // The client repeats the packet if that fails.
            let _ = self.holding.resets.refuse(held.ends, held.sequence);
        }
        self.decide(held.id, Verdict::Drop)
    }

    /// Ends held connections of accounts that have no room, and that are not to wait for it.
    fn refuse_all(&mut self, plan: &Plan, all: &mut All) -> Result<(), CallError> {
        if !all.used.is_wanted || !self.count(plan, all, false)? {
            return Ok(());
        }
        let accounts: Vec<Account> = self.counts.keys().copied().collect();
        for account in accounts {
            let Some(how @ (OnLimit::Refuse | OnLimit::Drop)) = all.used.over(plan, &account)
            else {
                continue;
            };
            let queues = self.listening.values_mut().map(|one| &mut one.queue);
            let all: Vec<Held> = queues.flat_map(|queue| queue.take_of(&account)).collect();
            for held in all {
                self.leaves(held.ends);
                self.refuse(&held, how)?;
            }
        }
        Ok(())
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
            let Some(served) = all.services.get_mut(&listening.service) else {
                return self.release(cookie);
            };
            let is_limited = served.is_busy && !listening.is_open;
            let serving = is_limited.then(|| listening.serving());
            let is_full = |account: &Account| all.used.over(plan, account).is_some();
            let bounds = Bounds { serving: serving.as_ref(), is_full: &is_full };
            if !listening.is_open && listening.queue.room(&served.order, pending, bounds) == 0 {
                break;
            }
            let weight = |account: &Account| plan.weight(account);
            let popped = listening.queue.pop(&mut served.order, weight, bounds);
            let Some((account, next)) = popped else { break };
            served.admitted = now;
            all.used.add(plan, &account, self.number);
            let [from, _] = next.ends;
            let is_of_here = self.plan.clients.contains_key(&from.ip());
            if let Some(party) =
                account.filter(|_| !is_of_here && !plan.limits(&account).is_empty())
            {
                self.coming.add(next.ends, party, now);
            }
            if !listening.is_open {
                listening.moved = now;
            }
            pending += 1;
            listening.note(next.ends, account, now);
            let is_last = listening.queue.is_empty();
            self.leaves(next.ends);
            // ORDER: before the packet goes on, which wakes its client. That may have the processor of this thread.
            let allowed = match is_last {
                true => self.allow(Listener { pending, ..found }, next.ends[1], plan, all, now),
                false => Ok(()),
            };
            self.decide(next.id, held::ADMIT)?;
            allowed?;
        }
        Ok(())
    }

    /// Looks at the backlog of each listener for which packets are held.
    fn look(&mut self, plan: &Plan, all: &mut All, now: Instant) -> Result<(), CallError> {
        self.refuse_all(plan, all)?;
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
            let Some(served) = all.services.get_mut(&listening.service) else {
                return self.release(cookie);
            };
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
                let since = listening.looked.replace(now).map(|was| now.duration_since(was));
                // A longer time is one without held connections.
                if let Some(since) = since.filter(|since| *since < LATELY) {
                    served.order.looked(since);
                }
                let is_busy = served.look(now);
                let listeners = &mut self.holding.listeners;
                let pending = listening.pending(found, listeners, now, is_busy)?;
                listening.queue.limit.look(pending);
                if pending == 0 {
                    // Its clients wait for themselves.
                    listening.moved = now;
                }
                if now.duration_since(listening.moved) > STALLS {
                    listening.is_open = true;
                }
                return self.admit(Listener { pending, ..found }, plan, all, now);
            }
            // It is a connection already, the listener is closed, or its group has another member. The kernel knows
            // where the packet goes.
            let Some(held) = listening.queue.skip(&served.order) else { break };
            self.leaves(held.ends);
            self.decide(held.id, held::ADMIT)?;
        }
        Ok(())
    }

    /// Lets all held packets of a listener go on.
    fn release(&mut self, cookie: u64) -> Result<(), CallError> {
        let Some(mut listening) = self.listening.remove(&cookie) else { return Ok(()) };
        let mut done = match (&self.holding.passes, listening.allowed) {
            (Some(passes), Some(to)) => passes.take_back(to).map(drop),
            _ => Ok(()),
        };
        for held in listening.queue.take_all() {
            self.leaves(held.ends);
            done = done.and(self.decide(held.id, held::ADMIT));
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
            self.decide(packet.id, held::ADMIT)?;
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

/// The CPU time of the calling thread.
fn spent() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

fn since(spent: Duration) -> Duration {
    self::spent().saturating_sub(spent)
}

/// The thread.
#[derive(Debug)]
struct Work {
    plan: Plan,
    stacks: BTreeMap<Name, Stack>,
    all: All,
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
        self.all.clock = Clock::begin();
        let (mut look, mut read) = (Instant::now(), Instant::now());
        loop {
            let now = Instant::now();
            let is_holding = self.stacks.values().any(|stack| !stack.held.is_empty());
            let reads = is_holding
                || self.all.services.values().any(|one| one.admitted + READ_AFTER.1 > now);
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
            let (begun, spent) = (Instant::now(), self::spent());
            if is_holding && look <= begun {
                let mut held = self.stacks.values().flat_map(|stack| stack.counts.keys());
                let is_over = |account| self.all.used.over(&self.plan, account).is_some();
                self.all.used.is_wanted = held.any(is_over);
                self.each(|stack, plan, all| stack.look(plan, all, begun));
                let is_recent = |one: &Served| one.admitted + LATELY > begun;
                let every = match self.all.services.values().any(is_recent) {
                    true => LOOK,
                    false => LOOK_LATER,
                };
                look = begun + every.max(since(spent) * SPARING);
            }
            let (begun, spent) = (Instant::now(), self::spent());
            if reads && read <= begun {
                self.read(begun);
                read = begun + every.max(since(spent) * SPARING);
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
            if let Err(e) = work(stack, &self.plan, &mut self.all) {
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
        self.all.services.retain(|id, _| live.contains(id));
        let now = Instant::now();
        for (cgroup, id) in &self.plan.containers {
            let places = &self.all.places;
            self.all.services.entry(*cgroup).or_insert_with(|| Served {
                order: order::Service::default(),
                admitted: now,
                read: now,
                // Without its counters the order knows less.
                effort: places.effort(id).ok().flatten(),
                waited: None,
                is_busy: false,
            });
        }
        self.all.used = Used::default();
        if !self.plan.limits.is_empty() {
            self.each(|stack, plan, all| stack.count(plan, all, true).map(drop));
        }
    }

    fn follow_one(&mut self, name: &Name, plan: StackPlan) -> Result<(), String> {
        let opened = self.all.places.stack(name).map_err(|e| e.to_string())?;
        let Some(netns) = opened else {
            return Err("the domain is gone".into());
        };
        // A domain that was made again has another stack.
        let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).map(|stat| stat.st_ino);
        if let Some(stack) = self.stacks.get_mut(name)
            && inode(&stack.netns) == inode(&netns)
        {
            // ORDER: before the next plan has other accounts, limits or hosts.
            stack.disallow().map_err(|e| e.to_string())?;
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
        let number = inode(&netns).map_err(|e| e.to_string())?;
        let (listening, held, counts) = (BTreeMap::new(), HashMap::new(), BTreeMap::new());
        let (coming, targets) = (Coming::default(), HashMap::new());
        let mut stack =
            Stack { netns, number, holding, plan, listening, held, counts, coming, targets };
        hold(&mut stack)?;
        self.stacks.insert(name.clone(), stack);
        Ok(())
    }

    /// Reads what services have used for each account.
    fn read(&mut self, now: Instant) {
        for (id, served) in &mut self.all.services {
            if served.admitted + READ_AFTER.1 < now && served.read > served.admitted {
                continue;
            }
            served.read = now;
            // Without a reading the estimates stay. An unload of gates is followed by a plan.
            let used_ns = served.effort.as_ref().and_then(|effort| effort.used_ns().ok().flatten());
            let Ok((load, uses)) = self.all.places.worked(*id) else { continue };
            let uses: Vec<(Account, u64)> = uses
                .into_iter()
                .map(|one| (Some(one.party).filter(|party| party.account != 0), one.cpu_ns))
                .collect();
            let readings = uses.iter().map(|(account, ns)| (account, *ns));
            let weight = |account: &Account| self.plan.weight(account);
            served.order.read(load, used_ns, readings, weight);
        }
        for stack in self.stacks.values_mut() {
            stack.forget(now);
        }
    }
}

fn hold(stack: &mut Stack) -> Result<(), String> {
    let services: Vec<IpAddr> = stack.plan.services.keys().copied().collect();
    held::hold(stack.netns.as_fd(), &services).map_err(|e| e.to_string())?;
    // Where it is not supported, all are held.
    let passes = stack.holding.passes.take();
    stack.holding.passes = passes.filter(|passes| held::pass(stack.netns.as_fd(), passes).is_ok());
    Ok(())
}
