//! Falling asleep by itself, and the timers that wake: what sleep has to do with time.
//!
//! **Idle** is a container of which no task has run for the time that its configuration says
//! ([`dormouse_model::Sleep`]); the kernel counts the CPU time of its cgroup anyway, and a number that
//! stays the same is proof ([`CpuTime`]). Whoever watches (the daemon) says what the number was; it is
//! looked at again under the container's lock, so that one that was called meanwhile is left alone.
//!
//! **Timers.** The checkpoint knows when the first timer of the container rings or the first wait is
//! over. The keeper has that as an alarm and wakes it then. One whose time comes soon is not worth
//! its sleep and stays awake.

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

/// Why a container fell asleep or was woken: the attribute `reason` of the events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// An operator said so, or did something that needs it awake.
    Operator,
    /// None of its tasks had run for its time.
    Idle,
    /// Somebody called.
    Called,
    /// A timer of it rings.
    Timer,
    /// Others need its memory.
    Memory,
    /// The keeper that would have heard of callers was killed.
    Keeper,
}

/// How far down a container is put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    /// Frozen, its memory pushed out ([`crate::Engine::drowse`]).
    Drowsy,
    /// Without processes ([`crate::Engine::sleep`]).
    Asleep,
}

/// What is asked of a container that does nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// Its pages go to swap, as long as it does nothing; it stays as it is.
    PagesOut,
    /// It is put further down.
    Fall(Tier),
}

impl Asked {
    /// The word for it.
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

/// After how much time without work a container is put where.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Policy {
    /// Until it is drowsy.
    pub drowsy: Option<Duration>,
    /// Until it is asleep.
    pub asleep: Option<Duration>,
    /// It is drowsy now.
    pub is_drowsy: bool,
    /// Its timers may wait while it sleeps: what it does for them now and then keeps it from nothing.
    pub timers_wait: bool,
}

impl Why {
    /// The word for it.
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

    /// The reason behind the keeper's word.
    pub fn of_keeper(word: Option<&str>) -> Self {
        match word {
            Some("timer") => Self::Timer,
            _ => Self::Called,
        }
    }

    /// The reason behind the daemon's word.
    pub fn of_daemon(word: &str) -> Self {
        match word {
            "memory" => Self::Memory,
            _ => Self::Idle,
        }
    }
}

/// What is known of a container that is to fall asleep by itself.
#[derive(Debug, Clone, Copy)]
pub struct Idle {
    /// None of its tasks has run for so long.
    pub quiet: Duration,
    /// The CPU time that it had used then and now.
    pub used_ns: u64,
    /// A sleep that a timer ends sooner is not worth it.
    pub worth: Duration,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fell {
    /// It sleeps.
    Asleep {
        /// From the begin to the end.
        took_us: u64,
    },
    /// It is drowsy.
    Drowsy {
        /// From the begin to the end.
        took_us: u64,
    },
    /// It goes on, and its memory was pushed out.
    Swapped {
        /// How much.
        bytes: u64,
    },
    /// It had run again.
    Ran,
    /// It is not running, or not there.
    Gone,
    /// It cannot sleep now; nothing happened to it.
    Awake {
        /// Why.
        why: String,
    },
}

/// An error and its causes, in one line.
pub(crate) fn told(error: &Error) -> String {
    let causes = std::iter::successors(std::error::Error::source(error), |e| e.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// When a container that sleeps is to be woken, from now. LIMIT: also for a timer that nobody hears.
pub(crate) fn alarm_ms(asleep: &Records, wake_on: WakeOn) -> Option<u64> {
    let ring = Duration::from_nanos(asleep.next_ring_ns(0)?);
    let left = wake_on.timer.ends_after(ring)?;
    let left = left.saturating_sub(Duration::from_nanos(asleep.about.passed_ns()));
    Some(left.as_millis() as u64 + 1)
}

impl Engine {
    /// For how long a container has to be idle to fall asleep or become drowsy by itself, if it has
    /// processes that may and does so.
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

    /// What keeps a running container from ever being idle for its time: threads that wait for less.
    /// Empty for one that does not fall asleep by itself.
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

    /// Puts a container to sleep, has it become drowsy or pushes its memory out, if it is still idle where
    /// that is why.
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
            // All that was found is told, and not more than one line of it.
            Err(Error::Checkpoint(CheckpointError::Refused(refusals))) => {
                let all: Vec<String> = refusals.iter().map(ToString::to_string).collect();
                Fell::Awake { why: all.join("; ") }
            }
            Err(e) => Fell::Awake { why: told(&e) },
        }
    }

    /// ORDER: under the container's lock, before anything is stopped.
    pub(crate) fn still_idle(&self, config: &Config, idle: &Idle) -> Result<()> {
        let used = CpuTime::below(&self.places().cgroup)?.of(config.id.as_str())?;
        match used == Some(idle.used_ns) && !self.is_entered(&config.id)? {
            true => Ok(()),
            false => Err(Error::NotIdle(config.name.to_string())),
        }
    }

    /// Refuses a sleep that would end too soon, and has the keeper end all others in time.
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
            // Without numbers, which would be others each time.
            let why = "a timer of it rings too soon for a sleep to be worth it".to_owned();
            let refusal = Refusal { pid, process, what, why };
            return Err(CheckpointError::Refused(vec![refusal]).into());
        }
        if let Some(mut keeper) = Keeper::connect(&self.places().run)? {
            // Not before its time: a wait that is woken early goes on waiting.
            keeper.set_alarm(config.id.as_str(), next_ring.as_millis() as u64 + 1)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_of_it_is_a_line_of_json() {
        let text = |fell: &Fell| serde_json::to_string(fell).unwrap();
        assert_eq!(text(&Fell::Asleep { took_us: 5 }), "{\"asleep\":{\"took_us\":5}}");
        assert_eq!(text(&Fell::Ran), "\"ran\"");
        let awake = Fell::Awake { why: "a\nb".into() };
        assert_eq!(serde_json::from_str::<Fell>(&text(&awake)).unwrap(), awake);
        assert!(!text(&awake).contains('\n'));
    }
}
