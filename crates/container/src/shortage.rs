//! Sleep for want of memory: of the container's own (`--oom sleep`), and of the host's (`--evict sleep`).
//!
//! # Of its own
//!
//! A container that has used its memory is saved before the kernel would end one of its processes.
//!
//! The daemon finds the container at the brink of its limit ([`dormouse_model::Brink`]), and a worker puts it to
//! sleep as it is, at work. On cgroup v2 the daemon makes the brink `memory.high` as long as it runs, so that the
//! kernel slows the processes down meanwhile. v1 has no such limit. LIMIT: there a container that grows by more than
//! the margin until its processes are stopped loses one to the kernel, as without this option.
//!
//! **Events do not wake it.** A server would be called again at once, and be short of memory again. It sleeps for a
//! time that doubles with each shortage of its life, and its clients wait. The operator wakes it at any time, and a
//! larger limit does so, too.
//!
//! **A container that is short again and again** is left to the kernel: the third time within a minute it does not
//! sleep. A larger limit begins anew.
//!
//! # Of the host's
//!
//! The daemon chooses a container that uses more than its guarantee while the host, or all containers together, are
//! short of memory ([`dormouse_governor::eviction`]). One that is idle sleeps as any idle one does. One at work would
//! be called again at once, or goes on by itself: events do not wake it for a pause, which doubles with each eviction
//! up to ten minutes, and begins anew after an hour without one. The daemon wakes it before, when there is memory
//! again.
//!
//! Uses `ground`.

use std::time::Duration;

use dormouse_kernel::cgroup::{MemoryCharged, Supplies};
use dormouse_model::{Config, Eviction, Memory, WakeOn};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::event;
use crate::ground::Ground;

/// The first pause. It doubles with each shortage.
const PAUSE_LEAST: Duration = Duration::from_secs(30);
/// The longest pause.
const PAUSE_MOST: Duration = Duration::from_secs(3600);
/// Shortages within [`AGAIN_WITHIN`] of which the last is left to the kernel.
const AGAIN: usize = 3;
const AGAIN_WITHIN: Duration = Duration::from_secs(60);
/// LIMIT: shortages on record; more of them change nothing.
const KEPT: usize = 16;

/// The longest pause after an eviction; the first is [`PAUSE_LEAST`].
const EVICTED_MOST: Duration = Duration::from_secs(600);
/// The time without evictions after which the next pause is the first again.
const EVICTED_FADES: Duration = Duration::from_secs(3600);

/// The sleeps of a container for want of memory, since its start or a larger limit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shortages {
    /// When it fell asleep, in milliseconds since the epoch, the last one last.
    slept_unix_ms: Vec<i64>,
    /// Its limit then.
    max_bytes: u64,
    /// When it is woken, if it sleeps for want of memory now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    wakes_unix_ms: Option<i64>,
    /// Its last eviction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    evicted: Option<Evicted>,
}

/// The evictions of a container by sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Evicted {
    /// Pauses in a row.
    count: u32,
    /// When the last one began, in milliseconds since the epoch.
    unix_ms: i64,
    /// The memory that it had above its guarantee, if it sleeps by an eviction now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    above_bytes: Option<u64>,
    /// When it is woken, if it was at work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    wakes_unix_ms: Option<i64>,
}

impl Shortages {
    /// Returns whether there was none.
    pub(crate) fn is_none(&self) -> bool {
        self.slept_unix_ms.is_empty() && self.evicted.is_none()
    }

    /// Enters one more, with this limit. Returns how long the container is to sleep; `None` if it is short too often.
    fn enter(&mut self, max_bytes: u64, now_unix_ms: i64) -> Option<Duration> {
        if max_bytes > self.max_bytes {
            *self = Self { evicted: self.evicted, ..Self::default() };
        }
        self.max_bytes = max_bytes;
        // A clock that was set back makes none of them recent.
        let is_recent = |at: &&i64| {
            u64::try_from(now_unix_ms - **at).is_ok_and(|ago| ago < AGAIN_WITHIN.as_millis() as u64)
        };
        if self.slept_unix_ms.iter().filter(is_recent).count() + 1 >= AGAIN {
            return None;
        }
        let doublings = u32::try_from(self.slept_unix_ms.len()).unwrap_or(u32::MAX);
        let pause = PAUSE_LEAST.saturating_mul(1 << doublings.min(16)).min(PAUSE_MOST);
        self.slept_unix_ms.push(now_unix_ms);
        let surplus = self.slept_unix_ms.len().saturating_sub(KEPT);
        self.slept_unix_ms.drain(..surplus);
        self.wakes_unix_ms = Some(now_unix_ms.saturating_add(pause.as_millis() as i64));
        Some(pause)
    }

    /// Enters an eviction of a container that has so much above its guarantee. Returns how long it is to sleep if it is
    /// at work.
    fn evict(&mut self, above_bytes: u64, is_idle: bool, now_unix_ms: i64) -> Option<Duration> {
        let is_recent = |last: &Evicted| {
            let ago = u64::try_from(now_unix_ms.saturating_sub(last.unix_ms));
            ago.is_ok_and(|ms| ms < EVICTED_FADES.as_millis() as u64)
        };
        let before = self.evicted.filter(is_recent);
        let count = before.map_or(0, |last| last.count);
        let pause = PAUSE_LEAST.saturating_mul(1 << count.min(16)).min(EVICTED_MOST);
        let pause = (!is_idle).then_some(pause);
        let ends = |pause: Duration| now_unix_ms.saturating_add(pause.as_millis() as i64);
        self.evicted = Some(Evicted {
            count: count.saturating_add(u32::from(!is_idle)),
            unix_ms: now_unix_ms,
            above_bytes: Some(above_bytes),
            wakes_unix_ms: pause.map(ends),
        });
        pause
    }

    /// Returns how long a container that sleeps for want of memory sleeps on whatever happens; `None` if events wake
    /// it.
    pub(crate) fn sleeps_on(&self) -> Option<Duration> {
        let evicted = self.evicted.and_then(|last| last.wakes_unix_ms);
        let left = self.wakes_unix_ms.or(evicted)?.saturating_sub(event::now_unix_ms());
        Some(Duration::from_millis(left.max(0).unsigned_abs()).min(PAUSE_MOST))
    }

    /// Whether a container sleeps because it has used its own memory.
    pub(crate) fn is_of_its_own(&self) -> bool {
        self.wakes_unix_ms.is_some()
    }

    /// The memory above its guarantee of a container that sleeps by an eviction.
    pub(crate) fn evicted_above_bytes(&self) -> Option<u64> {
        self.evicted?.above_bytes
    }

    /// Those of a container that wakes now, or falls asleep for another reason.
    pub(crate) fn awake(&self) -> Self {
        let evicted =
            self.evicted.map(|last| Evicted { above_bytes: None, wakes_unix_ms: None, ..last });
        Self { wakes_unix_ms: None, evicted, ..self.clone() }
    }
}

/// Has the kernel no longer slow down a container that is not to sleep for want of memory.
pub(crate) fn run_free(ground: &Ground, config: &Config) -> Result<()> {
    match MemoryCharged::below(&ground.places.cgroup)? {
        Some(charged) => {
            Ok(charged.slow_down(config.id.as_str(), config.spec.limits.memory_high_bytes)?)
        }
        None => Ok(()),
    }
}

/// Enters a shortage of a running container that no operator stops. Returns how long it is to sleep.
///
/// ORDER: under the container's lock. The daemon has decided by an older reading, and perhaps for another limit.
pub(crate) fn enter(
    ground: &Ground,
    config: &Config,
    shortages: &mut Shortages,
) -> Result<Duration> {
    let charged = MemoryCharged::below(&ground.places.cgroup)?;
    let charged = charged.map_or(Ok(None), |charged| charged.of(config.id.as_str(), |_| true))?;
    let (Some(brink), Some(now)) = (config.spec.oom.brink(&config.spec.limits), charged) else {
        return Err(Error::NotIdle(config.name.to_string()));
    };
    if !brink.is_reached(now.bytes, now.cache_bytes, now.swap_left_bytes) {
        return Err(Error::NotIdle(config.name.to_string()));
    }
    let max_bytes = config.spec.limits.memory_max_bytes.unwrap_or(u64::MAX);
    let pause = shortages.enter(max_bytes, event::now_unix_ms());
    pause.ok_or_else(|| Error::ShortAgain(config.name.to_string()))
}

/// Returns how much a running container uses above its guarantee, in bytes.
///
/// ORDER: under the container's lock. The daemon has decided by an older reading, and perhaps for another guarantee.
///
/// Errors: [`Error::NotIdle`] if it uses no more than that.
pub(crate) fn above_guarantee(ground: &Ground, config: &Config) -> Result<u64> {
    let supplies = Supplies::below(&ground.places.cgroup)?;
    let held = supplies.map_or(Ok(None), |supplies| supplies.of(config.id.as_str()))?;
    let used_bytes = held.map_or(0, |held| held.bytes.saturating_sub(held.inactive_file_bytes));
    match used_bytes.saturating_sub(Memory::of(&config.spec.limits).min_bytes) {
        0 => Err(Error::NotIdle(config.name.to_string())),
        above => Ok(above),
    }
}

/// Enters an eviction of a running container that no operator stops. Returns how long it is to sleep whatever happens,
/// if it is at work.
pub(crate) fn evict(
    ground: &Ground,
    config: &Config,
    shortages: &mut Shortages,
    is_idle: bool,
) -> Result<Option<Duration>> {
    // The operator may have changed what is done with it.
    if config.spec.eviction() != Some(Eviction::Sleep) {
        return Err(Error::NotIdle(config.name.to_string()));
    }
    let above_bytes = above_guarantee(ground, config)?;
    *shortages = shortages.awake();
    Ok(shortages.evict(above_bytes, is_idle, event::now_unix_ms()))
}

/// Returns the configuration of a container as its sleep follows it: no event wakes one that is short of memory.
pub(crate) fn quiet(config: &Config) -> Config {
    let mut config = config.clone();
    config.spec.wake_on = WakeOn::NOTHING;
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1 << 20;

    #[test]
    fn pauses_double_up_to_an_hour() {
        let (mut shortages, mut now, mut pauses) = (Shortages::default(), 1_000_000, Vec::new());
        assert!(shortages.is_none());
        for _ in 0..40 {
            let pause = shortages.enter(MB, now).expect("it wakes late enough");
            assert_eq!(shortages.wakes_unix_ms, Some(now + pause.as_millis() as i64));
            pauses.push(pause.as_secs());
            now += pause.as_millis() as i64 + 1;
            shortages = shortages.awake();
        }
        assert_eq!(pauses[..8], [30, 60, 120, 240, 480, 960, 1920, 3600]);
        assert_eq!(pauses.last(), Some(&3600));
        assert_eq!((shortages.slept_unix_ms.len(), shortages.wakes_unix_ms), (KEPT, None));
    }

    #[test]
    fn third_shortage_within_a_minute_is_left_to_the_kernel() {
        let mut shortages = Shortages::default();
        assert!(shortages.enter(MB, 0).is_some() && shortages.enter(MB, 20_000).is_some());
        let before = shortages.clone();
        assert_eq!(shortages.enter(MB, 59_999), None);
        assert_eq!(shortages, before, "it did not sleep");
        assert!(shortages.enter(MB, 60_000).is_some(), "the first is a minute ago");
        assert!(before.clone().enter(MB, -1_000).is_some(), "after the clock was set back");
    }

    #[test]
    fn larger_limit_begins_anew() {
        let mut shortages = Shortages::default();
        for round in 0..50 {
            let pause = shortages.enter(MB + round, 1_000);
            assert_eq!(pause, Some(PAUSE_LEAST), "round {round}");
        }
        assert!(shortages.enter(MB, 1_000).is_some(), "the second");
        assert_eq!(shortages.enter(MB, 1_000), None, "a smaller limit does not");
    }

    #[test]
    fn pauses_of_evictions_double_up_to_ten_minutes_and_fade() {
        let (mut shortages, mut now, mut pauses) = (Shortages::default(), 1_000_000, Vec::new());
        for _ in 0..8 {
            let pause = shortages.evict(5, false, now).expect("it is at work");
            assert_eq!(shortages.evicted_above_bytes(), Some(5));
            assert!(!shortages.is_of_its_own() && !shortages.is_none());
            assert!(shortages.sleeps_on().is_some());
            pauses.push(pause.as_secs());
            now += pause.as_millis() as i64 + 1;
            shortages = shortages.awake();
            assert_eq!((shortages.evicted_above_bytes(), shortages.sleeps_on()), (None, None));
        }
        assert_eq!(pauses, [30, 60, 120, 240, 480, 600, 600, 600]);
        assert_eq!(shortages.evict(5, true, now), None, "an idle one is woken by its clients");
        assert_eq!(shortages.evicted_above_bytes(), Some(5));
        assert_eq!(shortages.evict(5, false, now), Some(EVICTED_MOST), "and counts for nothing");
        now += EVICTED_FADES.as_millis() as i64;
        assert_eq!(shortages.evict(5, false, now), Some(PAUSE_LEAST));
    }

    #[test]
    fn evictions_and_shortages_of_its_own_do_not_count_for_each_other() {
        let mut shortages = Shortages::default();
        for _ in 0..5 {
            shortages.evict(5, false, 1_000);
        }
        shortages = shortages.awake();
        assert!(shortages.enter(MB, 1_000).is_some() && shortages.is_of_its_own());
        assert_eq!(shortages.evicted_above_bytes(), None);
        shortages = shortages.awake();
        assert_eq!(shortages.evict(5, false, 1_000), Some(Duration::from_secs(600)));
    }

    #[test]
    fn record_of_an_awake_container_has_no_end_of_a_pause() {
        let record: Shortages =
            serde_json::from_str(r#"{"slept_unix_ms":[5],"max_bytes":1}"#).unwrap();
        assert_eq!(record.wakes_unix_ms, None);
    }
}
