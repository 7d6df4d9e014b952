//! Containers that give memory while the host is short of it (`--evict`): the room that chooses them.
//!
//! [`dormouse_governor::eviction`] has the decisions. This room reads the memory of the host, and that of all
//! containers together while they have a limit: once a second, and ten times a second while little is free. The
//! containers are read when one of them is to give memory; their CPU time, for their popularity, every two seconds,
//! and never for more than a thousandth of the time. Without a container that gives memory the room does not tick.
//!
//! **On cgroup v1** the memory of guarantees is set aside, also where it is not used: the others are kept out of it by
//! limits ([`crate::shrink`]). It counts as taken here, so that a container gives memory before another one meets its
//! limit.
//!
//! **Sleep.** A container that has not run for a second sleeps as an idle one, and its clients wake it. One at work
//! sleeps for a pause ([`dormouse_container::Reason::Evicted`]). The room wakes it when there is room for it again.
//! After the end of this daemon the keeper does so, at the end of the pause.
//!
//! **Throttle** (cgroup v2). The container is slowed down above its present memory until enough is free. After
//! SIGKILL of the daemon that stays until a daemon runs again, or the container has another `--evict`.
//!
//! **Restart.** A container that was started again for its memory is left alone for half a minute, then for twice as
//! long after each further time, up to ten minutes.
//!
//! **Refused.** A container that cannot sleep continues, and the event `awake` has the reason. It is tried again
//! after a second, two, four and so on up to ten minutes. The next one is chosen at once.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use dormouse_api::EventKind;
use dormouse_container::{Engine, Idle, Outcome, Reason, Request, Tier};
use dormouse_governor::eviction::{Gauge, Level, Reading, Shortage, Supply, Turns, decide};
use dormouse_kernel::cgroup::{self, CpuTime, Held, MemoryCharged, Supplies};
use dormouse_model::{ContainerId, Eviction, Memory, Size, State};

use crate::error::Result;
use crate::notify::say;
use crate::popularity::Use;
use crate::room::{Done, Job, Notice, Room, cpu_time};

/// Time between readings.
const LOOKS: Duration = Duration::from_secs(1);
/// The same while little is free.
const LOOKS_NEAR: Duration = Duration::from_millis(100);
/// Readings take at most one part in so many of the time.
const LOOKS_SHARE: u32 = 20;
/// Time between readings of CPU time.
const SAMPLES: Duration = Duration::from_secs(2);
/// These take at most one part in so many of the time.
const SAMPLES_SHARE: u32 = 1000;
/// A container that has not run for so long is idle.
const IDLE: Duration = Duration::from_secs(1);
/// The first and the longest pause after a refusal.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(600));
/// A container that has not given memory for so long holds up no other one.
const GIVES_WITHIN: Duration = Duration::from_secs(60);
/// The first pause after a restart.
const RESTART_PAUSE: Duration = Duration::from_secs(30);

/// The supplies of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Of {
    Host,
    Containers,
}

impl Of {
    /// The word of events.
    fn as_str(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Containers => "containers",
        }
    }
}

/// What is short, for messages.
#[derive(Debug, Clone, Copy)]
struct Short(Of, Shortage);

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(of, it) = self;
        let of = match of {
            Of::Host => "of the host",
            Of::Containers => "for all containers together",
        };
        let (free, all, wanted) = (mb(it.free_bytes), mb(it.all_bytes), mb(it.wanted_bytes));
        write!(f, "of {all} {of}, {free} are free, and {wanted} are to be")?;
        match it.stalled_permille {
            Some(part) => {
                write!(f, ", and tasks waited for memory {}.{} % of the time", part / 10, part % 10)
            }
            None => Ok(()),
        }
    }
}

/// Whole megabytes.
fn mb(bytes: u64) -> Size {
    Size(bytes >> 20 << 20)
}

/// A running container that gives memory, or has a guarantee.
#[derive(Debug)]
struct Member {
    /// `None` if it gives none.
    eviction: Option<Eviction>,
    min_bytes: u64,
    used: Option<Use>,
    /// The next try, and the pause before it, after a refusal.
    later: Option<(Instant, Duration)>,
    /// The same after a restart for its memory.
    restarted: Option<(Instant, Duration)>,
    /// The reason of the last refusal that was reported.
    reported: String,
}

impl Member {
    fn new(eviction: Option<Eviction>, min_bytes: u64) -> Self {
        let (used, later, restarted, reported) = (None, None, None, String::new());
        Self { eviction, min_bytes, used, later, restarted, reported }
    }

    /// Whether it may be chosen now.
    fn is_due(&self, now: Instant) -> bool {
        let passed = |pause: Option<(Instant, Duration)>| pause.is_none_or(|(next, _)| next <= now);
        self.eviction.is_some() && passed(self.later) && passed(self.restarted)
    }

    /// Takes a refusal. Returns whether its reason is new.
    fn refused(&mut self, now: Instant, why: &str) -> bool {
        let pause = self.later.map_or(PAUSES.0, |(_, last)| (last * 2).min(PAUSES.1));
        self.later = Some((now + pause, pause));
        let is_new = self.reported != why;
        self.reported = why.to_owned();
        is_new
    }

    fn began_again(&mut self, now: Instant) {
        let pause = self.restarted.map_or(RESTART_PAUSE, |(_, last)| (last * 2).min(PAUSES.1));
        self.restarted = Some((now + pause, pause));
    }
}

/// A container that gives memory now.
#[derive(Debug)]
struct Giving {
    id: ContainerId,
    name: String,
    action: Eviction,
    reading: Reading<ContainerId>,
    short: Short,
    /// It sleeps for a pause.
    is_at_work: bool,
    since: Instant,
}

/// A container that was put to sleep at work, and what it needs.
#[derive(Debug)]
struct Sleeper {
    id: ContainerId,
    name: String,
    bytes: u64,
}

/// The room of evictions.
#[derive(Debug)]
pub(crate) struct Evictions {
    engine: Rc<Engine>,
    cpu: Rc<CpuTime>,
    supplies: Supplies,
    charged: MemoryCharged,
    gauges: [(Of, Gauge); 2],
    /// The beginning of the clock of the decisions.
    began: Instant,
    turns: Turns,
    members: BTreeMap<ContainerId, Member>,
    /// Containers that have begun to run, or have other settings.
    new: Vec<ContainerId>,
    giving: Option<Giving>,
    /// The container that is being woken.
    waking: Option<ContainerId>,
    /// How many jobs of any room are under way for a container.
    jobs: BTreeMap<ContainerId, usize>,
    /// Containers that sleep for a pause, the longest first.
    sleepers: Vec<Sleeper>,
    throttled: BTreeSet<ContainerId>,
    next_look: Instant,
    next_sample: Instant,
    /// No reading before this time.
    not_before: Instant,
    /// A shortage that no container can end was reported.
    is_reported: bool,
}

impl Evictions {
    /// Begins with no container: those that run are found by the room of idle containers. `keep_bytes` of the host's
    /// memory are to stay free, or a default. `None` without a memory controller.
    pub(crate) fn begin(
        engine: Rc<Engine>,
        cpu: Rc<CpuTime>,
        keep_bytes: Option<u64>,
    ) -> Result<Option<Self>> {
        let parent = &engine.places().cgroup;
        let (Some(supplies), Some(charged)) =
            (Supplies::below(parent)?, MemoryCharged::below(parent)?)
        else {
            return Ok(None);
        };
        let now = Instant::now();
        Ok(Some(Self {
            engine,
            cpu,
            supplies,
            charged,
            gauges: [(Of::Host, Gauge::new(keep_bytes)), (Of::Containers, Gauge::new(None))],
            began: now,
            turns: Turns::default(),
            members: BTreeMap::new(),
            new: Vec::new(),
            giving: None,
            waking: None,
            jobs: BTreeMap::new(),
            sleepers: Vec::new(),
            throttled: BTreeSet::new(),
            next_look: now,
            next_sample: now,
            not_before: now,
            is_reported: false,
        }))
    }

    fn now_ms(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.began).as_millis()).unwrap_or(u64::MAX)
    }

    /// Whether some container may give memory, or is to have its own back.
    fn is_needed(&self) -> bool {
        let gives = |member: &Member| member.eviction.is_some();
        !self.sleepers.is_empty() || self.members.values().any(gives)
    }

    /// Reads the settings of containers after an event.
    fn consider(&mut self) {
        for id in std::mem::take(&mut self.new) {
            let config = self.engine.config(&id).ok();
            let found =
                config.map(|it| (it.spec.eviction(), Memory::of(&it.spec.limits).min_bytes));
            let (eviction, min_bytes) = found.unwrap_or((None, 0));
            if eviction != Some(Eviction::Throttle) && self.throttled.remove(&id) {
                self.run_free(&id);
            }
            if eviction.is_none() && min_bytes == 0 {
                self.members.remove(&id);
                continue;
            }
            if eviction == Some(Eviction::Throttle) && !self.members.contains_key(&id) {
                self.run_free(&id); // a killed daemon may have slowed it down
            }
            let member = self.members.entry(id).or_insert_with(|| Member::new(eviction, min_bytes));
            (member.eviction, member.min_bytes, member.later) = (eviction, min_bytes, None);
        }
    }

    /// Has the kernel no longer slow a container down, but at limits of its own.
    fn run_free(&self, id: &ContainerId) {
        let config = self.engine.config(id).ok();
        let own = config.and_then(|it| {
            let brink = it.spec.oom.brink(&it.spec.limits).map(|brink| brink.bytes);
            it.spec.limits.memory_high_bytes.or(brink)
        });
        self.slow_down(id, own);
    }

    fn slow_down(&self, id: &ContainerId, above_bytes: Option<u64>) {
        if let Err(e) = self.charged.slow_down(id.as_str(), above_bytes) {
            say(&format!("{}: {e}", id.short()));
        }
    }

    /// Reads the CPU time of containers that may give memory, and forgets those that have ended or sleep.
    fn sample(&mut self, now: Instant) {
        let began = cpu_time();
        let (cpu, giving) = (&self.cpu, self.giving.as_ref().map(|giving| &giving.id));
        self.members.retain(|id, member| match cpu.of(id.as_str()) {
            Ok(None) => giving == Some(id),
            Ok(Some(used_ns)) => {
                match &mut member.used {
                    Some(used) => used.look(now, used_ns),
                    used => *used = Some(Use::new(now, used_ns)),
                }
                true
            }
            Err(_) => true,
        });
        let members = &self.members;
        self.throttled.retain(|id| members.contains_key(id));
        let took = cpu_time().saturating_sub(began);
        self.next_sample = now + SAMPLES.max(took * SAMPLES_SHARE);
    }

    /// Reads the supplies. Returns the level of each.
    fn read(&mut self, now: Instant) -> Result<[Level; 2]> {
        let now_ms = self.now_ms(now);
        let mut levels = [Level::Ample; 2];
        let host = supply(self.supplies.of_host()?);
        let containers = self.supplies.of_containers()?.map(supply);
        let containers = containers.map(|it| self.without_guarantees(it)).transpose()?;
        let supplies = [Some(host), containers];
        for ((level, supply), (_, gauge)) in levels.iter_mut().zip(supplies).zip(&mut self.gauges) {
            match supply {
                Some(supply) => *level = gauge.read(now_ms, supply),
                None => gauge.begin_again(),
            }
        }
        Ok(levels)
    }

    /// Takes what is kept for guarantees from the free memory of all containers: page cache that the kernel does not
    /// reclaim, and on v1 also the part that is not used.
    fn without_guarantees(&self, mut supply: Supply) -> Result<Supply> {
        for (id, member) in self.members.iter().filter(|(_, member)| member.min_bytes > 0) {
            let Some(held) = self.supplies.of(id.as_str())? else { continue };
            let Held { bytes, file_bytes, .. } = held;
            let kept = match self.supplies.keeps_memory() {
                true => member.min_bytes.min(bytes),
                false => member.min_bytes,
            };
            let kept = kept.saturating_sub(bytes.saturating_sub(file_bytes));
            supply.free_bytes = supply.free_bytes.saturating_sub(kept);
        }
        Ok(supply)
    }

    /// Reads the containers that may give memory now.
    fn readings(&self, now: Instant) -> Result<Vec<Reading<ContainerId>>> {
        let mut readings = Vec::new();
        for (id, member) in self.members.iter().filter(|(_, member)| member.is_due(now)) {
            if self.throttled.contains(id) || self.jobs.contains_key(id) {
                continue;
            }
            let Some(held) = self.supplies.of(id.as_str())? else { continue };
            readings.push(Reading {
                id: id.clone(),
                used_bytes: held.bytes.saturating_sub(held.inactive_file_bytes),
                min_bytes: member.min_bytes,
                popularity: member.used.map_or(0.0, Use::popularity),
            });
        }
        Ok(readings)
    }

    /// Looks at the supplies, and has a container give memory, or get its own back.
    fn look(&mut self, now: Instant) -> Result<Vec<Notice>> {
        let began = cpu_time();
        let levels = self.read(now)?;
        self.give_up(now);
        let is_ample = levels.iter().all(|level| *level == Level::Ample);
        self.next_look = now + if is_ample { LOOKS } else { LOOKS_NEAR };
        let short = self.gauges.iter().zip(&levels).find_map(|((of, _), level)| match level {
            Level::Short(shortage) => Some(Short(*of, *shortage)),
            Level::Ample | Level::Near => None,
        });
        let notices = match short {
            Some(short) => self.take(now, &levels, short)?,
            None => {
                self.is_reported &= !is_ample;
                self.give_back(now)
            }
        };
        let took = cpu_time().saturating_sub(began);
        self.not_before = Instant::now() + took * LOOKS_SHARE;
        Ok(notices)
    }

    /// Has a container give memory.
    fn take(&mut self, now: Instant, levels: &[Level], short: Short) -> Result<Vec<Notice>> {
        let now_ms = self.now_ms(now);
        if !self.turns.is_due(now_ms) {
            return Ok(Vec::new());
        }
        self.sample(now);
        let readings = self.readings(now)?;
        let Some(reading) = decide(now_ms, levels, self.turns, &readings).cloned() else {
            if !std::mem::replace(&mut self.is_reported, true) {
                say(&format!(
                    "memory is short: {short}; no container that may give some uses more than its guarantee"
                ));
            }
            return Ok(Vec::new());
        };
        let member = self.members.get(&reading.id);
        let (Some(action), Ok(config)) =
            (member.and_then(|member| member.eviction), self.engine.config(&reading.id))
        else {
            return Ok(Vec::new());
        };
        let idle = member.and_then(|member| member.used).filter(|used| used.quiet() >= IDLE);
        let idle =
            idle.map(|used| Idle { quiet: used.quiet(), used_ns: used.used_ns(), worth: IDLE });
        let idle = idle.filter(|_| action == Eviction::Sleep);
        let giving = Giving {
            id: reading.id.clone(),
            name: config.name.to_string(),
            action,
            reading,
            short,
            is_at_work: idle.is_none(),
            since: now,
        };
        giving.report();
        self.turns.begin();
        let asked = match action {
            Eviction::Sleep => Request::Suspend(Tier::Asleep),
            Eviction::Restart => Request::Restart,
            Eviction::Kill => Request::Kill,
            Eviction::Throttle => {
                let own = config.spec.limits.memory_high_bytes.unwrap_or(u64::MAX);
                self.slow_down(&giving.id, Some(giving.reading.used_bytes.min(own)));
                self.throttled.insert(giving.id.clone());
                self.gave(now, &giving);
                return Ok(Vec::new());
            }
        };
        let job = Job { id: giving.id.clone(), asked, idle, why: Reason::Evicted };
        self.giving = Some(giving);
        Ok(vec![Notice::Wanted(job)])
    }

    /// Gives containers their memory back, if there is enough.
    fn give_back(&mut self, now: Instant) -> Vec<Notice> {
        if !self.turns.is_due(self.now_ms(now)) {
            return Vec::new();
        }
        let limits_all = self.supplies.of_containers().is_ok_and(|all| all.is_some());
        let has_room = |bytes| {
            let counts = |of: &Of| *of == Of::Host || limits_all;
            self.gauges
                .iter()
                .filter(|(of, _)| counts(of))
                .all(|(_, gauge)| gauge.has_room_for(bytes))
        };
        if !self.throttled.is_empty() && has_room(0) {
            let throttled = std::mem::take(&mut self.throttled);
            throttled.iter().for_each(|id| self.run_free(id));
            return Vec::new();
        }
        let is_next = |it: &Sleeper| self.waking.is_none() && has_room(it.bytes);
        let Some(at) = self.sleepers.iter().position(is_next) else {
            return Vec::new();
        };
        let Sleeper { id, name, bytes } = self.sleepers.remove(at);
        say(&format!("{name} is woken: there is room for its {} again", mb(bytes)));
        // A wake may wait for admission, and containers give memory meanwhile.
        self.waking = Some(id.clone());
        let job = Job { id, asked: Request::Wake, idle: None, why: Reason::Memory };
        vec![Notice::Wanted(job)]
    }

    /// A container has given memory.
    fn gave(&mut self, now: Instant, giving: &Giving) {
        let kind = EventKind::Evict;
        self.engine.record(kind, giving.id.as_str(), &giving.name, &giving.attributes());
        self.turns.end(self.now_ms(now), true);
        self.gauges.iter_mut().for_each(|(_, gauge)| gauge.begin_again());
        self.next_look = now;
    }

    /// Lets the next container give memory, while the job of the last one takes long.
    fn give_up(&mut self, now: Instant) {
        let is_late =
            |giving: &mut Giving| now.saturating_duration_since(giving.since) > GIVES_WITHIN;
        if let Some(giving) = self.giving.take_if(is_late) {
            self.refused(now, &giving, "it has not given memory within a minute");
            self.turns.end(self.now_ms(now), false);
        }
    }

    /// Takes the outcome of a job. Only those of this room change what it does.
    fn ended(&mut self, now: Instant, Done { id, asked, why, fell }: &Done) {
        if let Some(count) = self.jobs.get_mut(id) {
            *count -= 1;
            if *count == 0 {
                self.jobs.remove(id);
            }
        }
        if self.waking.as_ref() == Some(id) && matches!(asked, Request::Wake) {
            // A failed wake has an event of its own, and the keeper repeats it.
            self.waking = None;
            let now_ms = self.now_ms(now);
            return self.turns.pause(now_ms);
        }
        let is_own = |giving: &mut Giving| giving.id == *id && *why == Reason::Evicted;
        let Some(giving) = self.giving.take_if(is_own) else { return };
        let is_done = match (giving.action, fell) {
            (Eviction::Sleep, Outcome::Asleep { .. })
            | (Eviction::Restart, Outcome::Began)
            | (Eviction::Kill, Outcome::Gone) => true,
            (_, Outcome::Awake { why }) => {
                self.refused(now, &giving, why);
                false
            }
            // It runs again, or has ended: it is looked at again, and not at once.
            _ => {
                if let Some(member) = self.members.get_mut(id) {
                    member.later = Some((now + PAUSES.0, PAUSES.0));
                }
                false
            }
        };
        if !is_done {
            return self.turns.end(self.now_ms(now), false);
        }
        match giving.action {
            Eviction::Sleep if giving.is_at_work => {
                let (name, bytes) = (giving.name.clone(), giving.reading.used_bytes);
                self.sleepers.push(Sleeper { id: id.clone(), name, bytes });
            }
            Eviction::Restart => {
                if let Some(member) = self.members.get_mut(id) {
                    member.began_again(now);
                }
            }
            _ => {}
        }
        self.gave(now, &giving);
    }

    fn refused(&mut self, now: Instant, giving: &Giving, why: &str) {
        let is_new = self.members.get_mut(&giving.id).is_some_and(|it| it.refused(now, why));
        if is_new {
            let why = [("reason", why.to_owned())];
            self.engine.record(EventKind::Awake, giving.id.as_str(), &giving.name, &why);
        }
    }
}

impl Giving {
    fn report(&self) {
        let Self { name, action, reading, short, .. } = self;
        let (used, min, above) =
            (mb(reading.used_bytes), mb(reading.min_bytes), mb(reading.above_bytes()));
        let action = action.as_str();
        say(&format!(
            "{name} gives memory ({action}): it uses {used}, {above} above its guarantee of {min}; {short}"
        ));
    }

    /// The attributes of the event.
    fn attributes(&self) -> Vec<(&'static str, String)> {
        let Self { action, reading, short: Short(of, shortage), .. } = self;
        let mut all = vec![
            ("action", action.as_str().to_owned()),
            ("used", reading.used_bytes.to_string()),
            ("guarantee", reading.min_bytes.to_string()),
            ("above", reading.above_bytes().to_string()),
            ("of", of.as_str().to_owned()),
            ("free", shortage.free_bytes.to_string()),
            ("wanted", shortage.wanted_bytes.to_string()),
            ("all", shortage.all_bytes.to_string()),
        ];
        if let Some(part) = shortage.stalled_permille {
            all.push(("stalled_permille", part.to_string()));
        }
        all
    }
}

/// The reading of a supply, for the decision.
fn supply(read: cgroup::Supply) -> Supply {
    let cgroup::Supply { all_bytes, free_bytes, stalled_us } = read;
    Supply { all_bytes, free_bytes, stalled_us }
}

impl Room for Evictions {
    fn name(&self) -> &'static str {
        "evictions"
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn due(&self) -> Option<Instant> {
        let next = self.is_needed().then(|| self.next_look.min(self.next_sample));
        let new = self.new.first().map(|_| self.not_before);
        next.map(|next| next.max(self.not_before)).into_iter().chain(new).min()
    }

    fn turn(&mut self, now: Instant, _ready: &[bool]) -> Result<Vec<Notice>> {
        self.consider();
        if !self.is_needed() {
            return Ok(Vec::new());
        }
        if self.next_sample <= now {
            self.sample(now);
        }
        if self.next_look <= now { self.look(now) } else { Ok(Vec::new()) }
    }

    fn notice(&mut self, now: Instant, notice: &Notice) {
        match notice {
            Notice::MaySleep(id, _) => {
                self.new.push(id.clone());
                // One with an idle time is considered again while it sleeps.
                let sleeps = || matches!(self.engine.state(id), Ok(State::Asleep));
                self.sleepers.retain(|it| it.id != *id || sleeps());
            }
            Notice::Wanted(job) => *self.jobs.entry(job.id.clone()).or_default() += 1,
            Notice::Ended(done) => self.ended(now, done),
            Notice::Events => {}
        }
    }

    fn end(self: Box<Self>) {
        self.throttled.iter().for_each(|id| self.run_free(id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_container_is_tried_again_ever_later_and_reported_once() {
        let (mut now, mut pauses) = (Instant::now(), Vec::new());
        let mut member = Member::new(Some(Eviction::Sleep), 0);
        for round in 0..11 {
            assert!(member.is_due(now));
            assert_eq!(member.refused(now, "it has a debugger"), round == 0);
            let (next, pause) = member.later.expect("a pause");
            assert!(!member.is_due(next - Duration::from_millis(1)));
            pauses.push(pause.as_secs());
            now = next;
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600]);
        assert!(member.refused(now, "it has two"), "another reason is reported");
        assert!(!Member::new(None, 5).is_due(now), "it gives nothing");
    }

    #[test]
    fn container_is_not_started_again_soon() {
        let now = Instant::now();
        let mut member = Member::new(Some(Eviction::Restart), 0);
        member.began_again(now);
        assert!(!member.is_due(now + Duration::from_secs(29)));
        assert!(member.is_due(now + Duration::from_secs(30)));
        member.began_again(now);
        assert!(!member.is_due(now + Duration::from_secs(59)));
    }

    #[test]
    fn shortage_is_described_with_its_numbers() {
        let shortage = Shortage {
            all_bytes: 200 << 20,
            free_bytes: (20 << 20) + 5,
            wanted_bytes: 25 << 20,
            stalled_permille: None,
        };
        let text = Short(Of::Containers, shortage).to_string();
        assert_eq!(text, "of 200m for all containers together, 20m are free, and 25m are to be");
        let text = Short(Of::Host, Shortage { stalled_permille: Some(61), ..shortage }).to_string();
        assert!(
            text.starts_with("of 200m of the host, ") && text.ends_with("6.1 % of the time"),
            "{text}"
        );
    }
}
