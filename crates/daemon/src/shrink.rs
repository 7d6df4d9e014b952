//! The thread that keeps guarantees of memory on cgroup v1.
//!
//! [`dormouse_governor::memory`] decides, this thread reads and writes: ten times a second the memory of every
//! running container, through descriptors that stay open. A new limit is written when it has changed by a
//! fiftieth. The write returns when the kernel has reclaimed what is above the limit, which may take long: hence a
//! thread, not a room.
//!
//! **A limit that stays**, because the memory cannot be reclaimed, is tried again after a second, then after two,
//! and so on up to a minute. Each try takes page cache of the container. Meanwhile others are limited in its place.
//!
//! **Verbs change limits too**: those of a container that starts, wakes or is updated, and of all when a guarantee
//! changes. The thread lowers no limit to a ceiling but one that it has written itself: a container that wakes with
//! more than its ceiling keeps it.
//!
//! **The end.** [`Shrinker::stop`] does not wait, because a limit may just be written. Once the thread has ended, the
//! caller writes the limits that hold without it ([`dormouse_container::Engine::govern_memory`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dormouse_container::{MemoryGranted, Places};
use dormouse_governor::memory::{Reading, State, decide};
use dormouse_kernel::cgroup::{CgroupError, Hierarchy, MemoryShare};
use dormouse_model::ContainerId;

use crate::notify::say;

/// Time between decisions.
const TICK: Duration = Duration::from_millis(100);
/// Time between looks at a thread that ends.
const LOOKS_AGAIN: Duration = Duration::from_millis(10);
/// The first and the longest pause after a limit that stays.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The running thread. A drop ends it, and does not wait.
#[derive(Debug)]
pub(crate) struct Shrinker {
    orders: Option<Sender<MemoryGranted>>,
    thread: JoinHandle<()>,
}

impl Shrinker {
    /// Begins without containers.
    pub(crate) fn begin(places: &Places) -> Self {
        let (orders, received) = mpsc::channel();
        let parent = places.cgroup.clone();
        let thread = std::thread::spawn(move || {
            if let Err(e) = run(&parent, &received) {
                say(&format!("memory is not governed: {e}"));
            }
        });
        Self { orders: Some(orders), thread }
    }

    /// Replaces the containers and what is guaranteed to them.
    pub(crate) fn order(&self, order: MemoryGranted) {
        // The thread may have ended after an error, which it has reported.
        let _ = self.orders.as_ref().map(|orders| orders.send(order));
    }

    /// Lets the thread end.
    pub(crate) fn stop(&mut self) {
        self.orders = None;
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.orders.is_none()
    }

    /// Returns whether the thread has ended: it was stopped, or had an error.
    pub(crate) fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for the end of a stopped thread. Returns false if a limit is still being written after so long.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        while !self.has_ended() && Instant::now() < until {
            std::thread::sleep(LOOKS_AGAIN);
        }
        self.has_ended()
    }
}

/// A running container.
struct Member {
    share: MemoryShare,
    /// The limit that was read last.
    limit_bytes: u64,
    /// The limit that was written last.
    written_bytes: Option<u64>,
    /// The next try, and the pause before it, after a limit that stayed.
    later: Option<(Instant, Duration)>,
}

impl Member {
    fn new(share: MemoryShare) -> Self {
        Self { share, limit_bytes: u64::MAX, written_bytes: None, later: None }
    }

    fn is_paused(&self, now: Instant) -> bool {
        self.later.is_some_and(|(next, _)| now < next)
    }

    /// Writes a limit. A lower one waits for its time where the last one stayed.
    fn set(&mut self, limit_bytes: u64) -> Result<(), CgroupError> {
        let now = Instant::now();
        let is_lower = limit_bytes < self.limit_bytes;
        if is_lower && self.is_paused(now) {
            return Ok(());
        }
        let is_set = self.share.set(limit_bytes)?;
        if is_set {
            // Read, because the kernel rounds it.
            self.written_bytes = self.share.limit_bytes()?;
        }
        if is_lower {
            let next = || self.later.map_or(PAUSES.0, |(_, last)| (last * 2).min(PAUSES.1));
            self.later = (!is_set).then(next).map(|pause| (now + pause, pause));
        }
        Ok(())
    }
}

fn run(parent: &str, orders: &Receiver<MemoryGranted>) -> Result<(), CgroupError> {
    let cgroups = Hierarchy::open(parent)?;
    let mut order = MemoryGranted::default();
    let mut members: BTreeMap<ContainerId, Member> = BTreeMap::new();
    // Containers of the order whose cgroup was removed. If they come back, they may have been restored.
    let mut gone = BTreeSet::new();
    let mut state = State::default();
    loop {
        match orders.recv_timeout(TICK) {
            Ok(new) => {
                order = orders.try_iter().last().unwrap_or(new);
                gone.clear();
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        let readings = read(&cgroups, &order, &mut members, &mut gone)?;
        let now = Instant::now();
        let cache = |id: &ContainerId| match members.get(id) {
            Some(member) if !member.is_paused(now) => {
                cgroups.file_cache_bytes(id.as_str()).unwrap_or(0)
            }
            _ => 0,
        };
        let (next, settings) = decide(order.room_bytes, &readings, &state, cache);
        state = next;
        for setting in settings {
            if let Some(member) = members.get_mut(&setting.id) {
                member.set(setting.limit_bytes)?;
            }
        }
    }
}

/// Reads the memory of all containers of an order.
fn read(
    cgroups: &Hierarchy,
    order: &MemoryGranted,
    members: &mut BTreeMap<ContainerId, Member>,
    gone: &mut BTreeSet<ContainerId>,
) -> Result<Vec<Reading<ContainerId>>, CgroupError> {
    let mut readings = Vec::with_capacity(order.ceilings.len());
    members.retain(|id, _| order.ceilings.contains_key(id));
    for (id, &ceiling_bytes) in &order.ceilings {
        if gone.contains(id) {
            continue;
        }
        let member = match members.remove(id) {
            Some(member) => Some(member),
            None => cgroups.memory_share(id.as_str())?.map(Member::new),
        };
        // The cgroup of a container that slept is a new one.
        let now = member.as_ref().map(|it| it.share.used_bytes()).transpose()?.flatten();
        let (Some(mut member), Some(used_bytes)) = (member, now) else {
            gone.insert(id.clone());
            continue;
        };
        member.limit_bytes = member.share.limit_bytes()?.unwrap_or(u64::MAX);
        let is_ours = member.written_bytes == Some(member.limit_bytes);
        if is_ours && member.limit_bytes > ceiling_bytes {
            member.set(ceiling_bytes)?; // written for an older order
            member.limit_bytes = member.share.limit_bytes()?.unwrap_or(u64::MAX);
        }
        readings.push(Reading {
            id: id.clone(),
            used_bytes,
            min_bytes: order.minima.get(id).copied().unwrap_or(0),
            restored_bytes: order.restored.get(id).copied().unwrap_or(0),
            ceiling_bytes,
            limit_bytes: member.limit_bytes,
        });
        members.insert(id.clone(), member);
    }
    Ok(readings)
}
