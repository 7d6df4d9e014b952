//! Idle times, timers, and the reasons for falling asleep and waking.
//!
//! **Idle** is a container without a running task for the time in its configuration
//! ([`dormouse_model::Sleep`]). The kernel counts the CPU time of its cgroup anyway, and an
//! unchanged number is proof ([`CpuTime`]). The daemon passes the number it saw. The number is
//! compared again under the container's lock, so that a container that ran meanwhile is left alone.
//!
//! **Timers.** The checkpoint contains the time until the first timer of the container expires or
//! the first wait times out. The keeper sets an alarm to that time and wakes the container then. A
//! container with an early timer is not worth suspending and stays awake.
//!
//! Uses `ground`, `settings` and `state`.

use std::time::Duration;

use dormouse_checkpoint::{Error as CheckpointError, Refusal};
use dormouse_kernel::cgroup::CpuTime;
use dormouse_launch::Keeper;
use dormouse_model::{Config, ContainerId, State, WakeOn, WakeOnTimer};
use dormouse_record::Records;

use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::{settings, state};

/// Reason why a container fell asleep or was woken: the attribute `reason` of the events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// Command of an operator, or one that needs the container awake.
    Operator,
    /// No task had run for the configured time.
    Idle,
    /// An event arrived, for example a connection.
    Called,
    /// A timer of the container expires.
    Timer,
    /// Other containers need its memory.
    Memory,
    /// The keeper that would have received its events was killed.
    Keeper,
    /// It has used its own memory (`crate::shortage`).
    Shortage,
    /// The host is short of memory, and it uses more than its guarantee (`crate::shortage`).
    Evicted,
}

impl Reason {
    /// Returns the word of the events.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Operator => "operator",
            Self::Idle => "idle",
            Self::Called => "called",
            Self::Timer => "timer",
            Self::Memory => "memory",
            Self::Keeper => "keeper",
            Self::Shortage => "out-of-memory",
            Self::Evicted => "evicted",
        }
    }

    /// Parses the keeper's word.
    pub fn of_keeper(word: Option<&str>) -> Self {
        match word {
            Some("timer") => Self::Timer,
            _ => Self::Called,
        }
    }

    /// Parses the daemon's word.
    pub fn of_daemon(word: &str) -> Self {
        match word {
            "memory" => Self::Memory,
            "out-of-memory" => Self::Shortage,
            "evicted" => Self::Evicted,
            _ => Self::Idle,
        }
    }
}

/// How far a container is suspended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    /// Frozen, its memory pushed out ([`crate::Engine::drowse`]).
    Drowsy,
    /// Without processes ([`crate::Engine::sleep`]).
    Asleep,
}

/// Request of the daemon for a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Push its pages out to swap while it is idle; its state does not change.
    PagesOut,
    /// Suspend it to this tier.
    Suspend(Tier),
    /// Stop it and start it again, because the host is short of memory.
    Restart,
    /// Kill it for the same reason.
    Kill,
    /// Wake it: there is memory again.
    Wake,
    /// Give up what a warm sleeper has beside its checkpoint.
    Cool,
}

impl Request {
    /// Returns the word of the command line and the events.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::PagesOut => "pages-out",
            Self::Suspend(Tier::Drowsy) => "drowsy",
            Self::Suspend(Tier::Asleep) => "asleep",
            Self::Restart => "restart",
            Self::Kill => "kill",
            Self::Wake => "wake",
            Self::Cool => "cool",
        }
    }
}

impl std::str::FromStr for Request {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self> {
        let tiers = [Tier::Drowsy, Tier::Asleep].map(Self::Suspend);
        let others = [Self::PagesOut, Self::Restart, Self::Kill, Self::Wake, Self::Cool];
        let words = "pages-out, drowsy, asleep, restart, kill, wake, cool";
        let found = others.into_iter().chain(tiers).find(|request| request.as_str() == word);
        found.ok_or_else(|| Error::Invalid(format!("'{word}' is none of {words}")))
    }
}

/// Idle times after which a container is suspended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Policy {
    /// Time until drowsy.
    pub drowsy: Option<Duration>,
    /// Time until asleep.
    pub asleep: Option<Duration>,
    /// The container is drowsy now.
    pub is_drowsy: bool,
    /// Its timers may wait while it sleeps, or the operator has named probers: a little regular work does not
    /// count.
    pub timers_wait: bool,
}

/// Facts about a container that is to fall asleep by itself.
#[derive(Debug, Clone, Copy)]
pub struct Idle {
    /// For how long none of its tasks has run.
    pub quiet: Duration,
    /// Its CPU time at the begin and the end of that.
    pub used_ns: u64,
    /// Shortest sleep worth the effort: an earlier timer prevents it.
    pub worth: Duration,
}

/// Returns the idle times of a container that falls asleep or becomes drowsy by itself; `None`
/// if it does not, or has no processes that could.
pub(crate) fn of(ground: &Ground, id: &ContainerId) -> Result<Option<Policy>> {
    let config = ground.config(id)?;
    let (drowsy, asleep) = (config.spec.drowsy.after(), config.spec.sleep.after());
    if drowsy.or(asleep).is_none() {
        return Ok(None);
    }
    let state = state::observe(ground, &config)?.state;
    let is_drowsy = state == State::Drowsy;
    // Unreadable settings name no prober.
    let is_probed = settings::callers(&ground.settings()).is_ok_and(|it| !it.probers.is_empty());
    let timers_wait = is_probed || config.spec.wake_on.timer != WakeOnTimer::InTime;
    let policy = Policy { drowsy, asleep, is_drowsy, timers_wait };
    Ok((is_drowsy || state == State::Running).then_some(policy))
}

/// Refuses a container that has run since.
///
/// ORDER: under the container's lock, before any process is stopped.
pub(crate) fn check_idle(ground: &Ground, config: &Config, idle: &Idle) -> Result<()> {
    let used = CpuTime::below(&ground.places.cgroup)?.of(config.id.as_str())?;
    match used == Some(idle.used_ns) && !state::is_entered(ground, &config.id)? {
        true => Ok(()),
        false => Err(Error::NotIdle(config.name.to_string())),
    }
}

/// Refuses a sleep that would end too soon; otherwise sets the keeper's alarm for its end.
pub(crate) fn set_alarm(
    ground: &Ground,
    config: &Config,
    next_ring: Option<Duration>,
    idle: Option<&Idle>,
) -> Result<()> {
    let ends_after = |ring| config.spec.wake_on.timer.ends_after(ring);
    let Some(next_ring) = next_ring.and_then(ends_after) else { return Ok(()) };
    if idle.is_some_and(|idle| next_ring < idle.worth) {
        let (pid, process, what) = (0, String::new(), String::new());
        // Without numbers, which would differ each time.
        let why = "a timer expires too soon for a sleep to be worth it".to_owned();
        let refusal = Refusal { pid, process, what, why };
        return Err(CheckpointError::Refused(vec![refusal]).into());
    }
    ring_after(ground, &config.id, next_ring)
}

/// Sets the keeper's alarm for the end of a sleep.
pub(crate) fn ring_after(ground: &Ground, id: &ContainerId, time: Duration) -> Result<()> {
    if let Some(mut keeper) = Keeper::connect(&ground.places.run)? {
        // Rounded up: a wait that is woken early continues waiting.
        keeper.set_alarm(id.as_str(), time.as_millis() as u64 + 1)?;
    }
    Ok(())
}

/// Time from now until a sleeping container is to be woken. LIMIT: also for a timer that has no
/// effect.
pub(crate) fn alarm_ms(ground: &Ground, config: &Config, asleep: &Records) -> Option<u64> {
    match sleeps_on(ground, &config.id) {
        Some(time) => Some(time.as_millis() as u64 + 1),
        None => timers_ms(asleep, config.spec.wake_on),
    }
}

/// Returns how long a container that sleeps for want of memory sleeps on; `None` if it sleeps for another reason.
pub(crate) fn sleeps_on(ground: &Ground, id: &ContainerId) -> Option<Duration> {
    state::slept(ground, id).ok().flatten()?.shortages.sleeps_on()
}

fn timers_ms(asleep: &Records, wake_on: WakeOn) -> Option<u64> {
    let ring = Duration::from_nanos(asleep.next_ring_ns(0)?);
    let left = wake_on.timer.ends_after(ring)?;
    let left = left.saturating_sub(Duration::from_nanos(asleep.about.passed_ns()));
    Some(left.as_millis() as u64 + 1)
}

/// The attribute of an event.
pub(crate) fn reason(reason: Reason) -> [(&'static str, String); 1] {
    [("reason", reason.as_str().to_owned())]
}
