//! Falling asleep by itself, and the timers that wake: the time aspects of sleep.
//!
//! **Idle** is a container without a running task for the time in its configuration
//! ([`dormouse_model::Sleep`]). The kernel counts the CPU time of its cgroup anyway, and an
//! unchanged number is proof ([`CpuTime`]). The daemon passes the number it saw. The number is
//! compared again under the container's lock, so that a container that ran meanwhile is left alone.
//!
//! **Timers.** The checkpoint contains the time until the first timer of the container expires or
//! the first wait times out. The keeper sets an alarm to that time and wakes the container then. A
//! container with an early timer is not worth suspending and stays awake.

use std::time::{Duration, Instant};

use dormouse_checkpoint::format::Records;
use dormouse_checkpoint::save::{self, Wait};
use dormouse_checkpoint::{Error as CheckpointError, Refusal};
use dormouse_kernel::cgroup::CpuTime;
use dormouse_launch::Keeper;
use dormouse_model::{Config, ContainerId, State, WakeOn, WakeOnTimer};
use serde::{Deserialize, Serialize};

use crate::engine::Engine;
use crate::error::{Error, Result};

/// Reason why a container fell asleep or was woken: the attribute `reason` of the events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
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
}

/// How far a container is suspended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    /// Frozen, its memory pushed out ([`crate::Engine::drowse`]).
    Drowsy,
    /// Without processes ([`crate::Engine::sleep`]).
    Asleep,
}

/// Request for an idle container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// Push its pages out to swap while it is idle; its state does not change.
    PagesOut,
    /// Suspend it to this tier.
    Fall(Tier),
}

impl Asked {
    /// Returns the word of the command line and the events.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::PagesOut => "pages-out",
            Self::Fall(Tier::Drowsy) => "drowsy",
            Self::Fall(Tier::Asleep) => "asleep",
        }
    }
}

impl std::str::FromStr for Asked {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self> {
        let all = [Self::PagesOut, Self::Fall(Tier::Drowsy), Self::Fall(Tier::Asleep)];
        let found = all.into_iter().find(|asked| asked.as_str() == word);
        found
            .ok_or_else(|| Error::Invalid(format!("'{word}' is none of pages-out, drowsy, asleep")))
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
    /// Its timers may wait while it sleeps, so regular work for timers does not count.
    pub timers_wait: bool,
}

impl Why {
    /// Returns the word of the events.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Operator => "operator",
            Self::Idle => "idle",
            Self::Called => "called",
            Self::Timer => "timer",
            Self::Memory => "memory",
            Self::Keeper => "keeper",
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
            _ => Self::Idle,
        }
    }
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

/// Outcome of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fell {
    /// The container is asleep.
    Asleep {
        /// From begin to end.
        took_us: u64,
    },
    /// The container is drowsy.
    Drowsy {
        /// From begin to end.
        took_us: u64,
    },
    /// The container continues, and its memory was pushed out.
    Swapped {
        /// Number of bytes.
        bytes: u64,
    },
    /// A task had run again.
    Ran,
    /// The container is not running, or does not exist.
    Gone,
    /// The container cannot sleep now, and was not changed.
    Awake {
        /// The reasons.
        why: String,
    },
}

/// Formats an error and its causes in one line.
pub(crate) fn told(error: &Error) -> String {
    let causes = std::iter::successors(std::error::Error::source(error), |e| e.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Time from now until a sleeping container is to be woken. LIMIT: also for a timer that has no
/// effect.
pub(crate) fn alarm_ms(asleep: &Records, wake_on: WakeOn) -> Option<u64> {
    let ring = Duration::from_nanos(asleep.next_ring_ns(0)?);
    let left = wake_on.timer.ends_after(ring)?;
    let left = left.saturating_sub(Duration::from_nanos(asleep.about.passed_ns()));
    Some(left.as_millis() as u64 + 1)
}

impl Engine {
    /// Returns the idle times of a container that falls asleep or becomes drowsy by itself; `None`
    /// if it does not, or has no processes that could.
    pub fn policy(&self, id: &ContainerId) -> Result<Option<Policy>> {
        let config = self.config(id)?;
        let (drowsy, asleep) = (config.drowsy.after(), config.sleep.after());
        if drowsy.or(asleep).is_none() {
            return Ok(None);
        }
        let state = self.look(&config)?.state;
        let is_drowsy = state == State::Drowsy;
        let timers_wait = config.wake_on.timer != WakeOnTimer::InTime;
        let policy = Policy { drowsy, asleep, is_drowsy, timers_wait };
        Ok((is_drowsy || state == State::Running).then_some(policy))
    }

    /// Returns the waits that keep a running container from ever being idle long enough: those with
    /// shorter timeouts. Empty for a container that does not fall asleep by itself.
    pub fn stirs(&self, id: &ContainerId) -> Result<Vec<Wait>> {
        let config = self.config(id)?;
        let after = config.sleep.after().into_iter().chain(config.drowsy.after()).min();
        let Some(after) = after.filter(|_| config.wake_on.timer == WakeOnTimer::InTime) else {
            return Ok(Vec::new());
        };
        let mut waits = save::waits(&self.subject(&config)?)?;
        waits.retain(|wait| wait.at_most < after);
        Ok(waits)
    }

    /// Puts a container to sleep, makes it drowsy or pushes its memory out; if `idle` is given,
    /// only if it is still idle.
    pub fn fall_asleep(
        &self,
        id: &ContainerId,
        idle: Option<&Idle>,
        asked: Asked,
        why: Why,
    ) -> Fell {
        let began = Instant::now();
        let took_us = || began.elapsed().as_micros() as u64;
        let fell = match asked {
            Asked::Fall(Tier::Asleep) => self
                .sleep_as(id, idle, why)
                .map(|done| done.map(|_| Fell::Asleep { took_us: took_us() })),
            Asked::Fall(Tier::Drowsy) => self
                .drowse_as(id, idle, why)
                .map(|done| done.map(|_| Fell::Drowsy { took_us: took_us() })),
            Asked::PagesOut => self.swap_out(id, idle).map(|bytes| Some(Fell::Swapped { bytes })),
        };
        match fell {
            Ok(Some(fell)) => fell,
            Ok(None) | Err(Error::NoContainer(_) | Error::State { .. }) => Fell::Gone,
            Err(Error::NotIdle(_)) => Fell::Ran,
            // All refusals are reported, in one line.
            Err(Error::Checkpoint(CheckpointError::Refused(refusals))) => {
                let all: Vec<String> = refusals.iter().map(ToString::to_string).collect();
                Fell::Awake { why: all.join("; ") }
            }
            Err(e) => Fell::Awake { why: told(&e) },
        }
    }

    /// Refuses a container that has run since.
    ///
    /// ORDER: under the container's lock, before any process is stopped.
    pub(crate) fn still_idle(&self, config: &Config, idle: &Idle) -> Result<()> {
        let used = CpuTime::below(&self.places().cgroup)?.of(config.id.as_str())?;
        match used == Some(idle.used_ns) && !self.is_entered(&config.id)? {
            true => Ok(()),
            false => Err(Error::NotIdle(config.name.to_string())),
        }
    }

    /// Refuses a sleep that would end too soon; otherwise sets the keeper's alarm for its end.
    pub(crate) fn set_alarm(
        &self,
        config: &Config,
        next_ring: Option<Duration>,
        idle: Option<&Idle>,
    ) -> Result<()> {
        let ends_after = |ring| config.wake_on.timer.ends_after(ring);
        let Some(next_ring) = next_ring.and_then(ends_after) else { return Ok(()) };
        if idle.is_some_and(|idle| next_ring < idle.worth) {
            let (pid, process, what) = (0, String::new(), String::new());
            // Without numbers, which would differ each time.
            let why = "a timer expires too soon for a sleep to be worth it".to_owned();
            let refusal = Refusal { pid, process, what, why };
            return Err(CheckpointError::Refused(vec![refusal]).into());
        }
        if let Some(mut keeper) = Keeper::connect(&self.places().run)? {
            // Rounded up: a wait that is woken early continues waiting.
            keeper.set_alarm(config.id.as_str(), next_ring.as_millis() as u64 + 1)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcome_is_one_line_of_json() {
        let text = |fell: &Fell| serde_json::to_string(fell).unwrap();
        assert_eq!(text(&Fell::Asleep { took_us: 5 }), "{\"asleep\":{\"took_us\":5}}");
        assert_eq!(text(&Fell::Ran), "\"ran\"");
        let awake = Fell::Awake { why: "a\nb".into() };
        assert_eq!(serde_json::from_str::<Fell>(&text(&awake)).unwrap(), awake);
        assert!(!text(&awake).contains('\n'));
    }
}
