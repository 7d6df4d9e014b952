//! Accounts: charges what running containers have used, at the end of every quarter of an hour.
//!
//! Without these readings the whole use of a container that runs for a week would stand on the day on which it ends.
//! The periods (`[account] every` in config.toml) begin at midnight, UTC, and a reading is made half a second before
//! the end of each, so that it still counts for the day.
//!
//! **Limits of tasks** of accounts are dealt to their containers again each second, as long as there are any, so that a
//! container gets what another one does not use.
//!
//! **Cost.** A reading takes about a tenth of a millisecond for each running container, and one write for each
//! account whose containers have run. A thread makes it, because a turn of a room must be short.

use std::os::fd::BorrowedFd;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use dormouse_container::{Engine, Places};
use dormouse_kernel::clock::now_unix_ms;

use crate::error::{Result, step};
use crate::notify::say;
use crate::room::{Notice, Room};

/// How long before the end of a period the counters are read.
const BEFORE_MS: u64 = 500;
/// Time between two deals.
const DEAL_EVERY: Duration = Duration::from_secs(1);
/// The same while no account has a limit.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// The room of accounts.
#[derive(Debug)]
pub(crate) struct Accounts {
    places: Places,
    every: Duration,
    next: Instant,
    reading: Option<JoinHandle<()>>,
    next_deal: Instant,
    /// Returns whether an account has a limit.
    dealing: Option<JoinHandle<bool>>,
    /// When an account had changed last, at the last deal.
    looked: Option<Option<SystemTime>>,
}

impl Accounts {
    pub(crate) fn begin(engine: &Engine) -> Result<Self> {
        let every = engine.account_period()?;
        let next = Instant::now() + until_next(now_unix_ms(), every);
        let (places, next_deal) = (engine.places().clone(), Instant::now());
        Ok(Self { places, every, next, reading: None, next_deal, dealing: None, looked: None })
    }

    /// Begins a deal, unless the last one goes on, or no account has a limit.
    fn deal(&mut self, now: Instant) -> Result<()> {
        self.next_deal = now + DEAL_EVERY;
        let has_limits = match self.dealing.take() {
            Some(dealing) if !dealing.is_finished() => {
                self.dealing = Some(dealing);
                return Ok(());
            }
            Some(dealing) => dealing.join().unwrap_or(false), // a panic was printed
            None => false,
        };
        // A record of an account is replaced, which changes the directory.
        let made = self.places.lib.join("accounts/made");
        let changed = std::fs::metadata(made).and_then(|meta| meta.modified()).ok();
        if !has_limits && self.looked == Some(changed) {
            self.next_deal = now + LOOK_EVERY;
            return Ok(());
        }
        self.looked = Some(changed);
        let places = self.places.clone();
        let body = move || {
            let dealt = Engine::open(places).and_then(|engine| engine.deal_tasks());
            dealt.unwrap_or_else(|e| {
                say(&format!("cannot deal the tasks of accounts: {e}"));
                true
            })
        };
        let thread = Builder::new().name("tasks".into()).spawn(body);
        self.dealing = Some(thread.map_err(step("make a thread"))?);
        Ok(())
    }
}

/// Returns the time until the next reading.
fn until_next(unix_ms: i64, every: Duration) -> Duration {
    let every_ms = u64::try_from(every.as_millis()).unwrap_or(u64::MAX).max(1);
    let before_ms = BEFORE_MS.min(every_ms / 2);
    let day_ms = unix_ms.rem_euclid(86_400_000).unsigned_abs();
    // A period ends with the day at the latest.
    let ends_ms = ((day_ms + before_ms) / every_ms + 1).saturating_mul(every_ms);
    let end_ms = if day_ms + before_ms < 86_400_000 { ends_ms.min(86_400_000) } else { ends_ms };
    Duration::from_millis(end_ms - before_ms - day_ms)
}

impl Room for Accounts {
    fn name(&self) -> &'static str {
        "accounts"
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn due(&self) -> Option<Instant> {
        Some(self.next.min(self.next_deal))
    }

    fn turn(&mut self, now: Instant, _ready: &[bool]) -> Result<Vec<Notice>> {
        if now >= self.next_deal {
            self.deal(now)?;
        }
        if now < self.next {
            return Ok(Vec::new());
        }
        self.next = now + until_next(now_unix_ms(), self.every);
        // A reading that takes longer than a period is followed by the next one after it.
        if self.reading.as_ref().is_none_or(JoinHandle::is_finished) {
            let places = self.places.clone();
            let body = move || {
                let read = Engine::open(places).and_then(|engine| engine.charge_running());
                if let Err(e) = read {
                    say(&format!("cannot charge running containers: {e}"));
                }
            };
            let thread = Builder::new().name("accounts".into()).spawn(body);
            self.reading = Some(thread.map_err(step("make a thread"))?);
        }
        Ok(Vec::new())
    }

    fn end(self: Box<Self>) {
        // A reading ends by itself, and a killed one is repeated.
        if let Some(reading) = self.reading {
            let _ = reading.join(); // a panic was printed
        }
        if let Some(dealing) = self.dealing {
            let _ = dealing.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_reading_of_a_day_is_just_before_midnight() {
        const DAY_MS: i64 = 86_400_000;
        let quarter = Duration::from_secs(900);
        for (day_ms, every, at_ms) in [
            (0, quarter, 899_500),
            (899_499, quarter, 899_500),
            (899_500, quarter, 1_799_500),
            (DAY_MS - 600, quarter, DAY_MS - 500),
            (DAY_MS - 500, quarter, DAY_MS + 899_500),
            (0, Duration::from_secs(50_000), 49_999_500),
            (60_000_000, Duration::from_secs(50_000), DAY_MS - 500),
            (5, Duration::from_secs(86_400), DAY_MS - 500),
            (10, Duration::from_millis(100), 50),
        ] {
            for days in [0, 20_000] {
                let wait = until_next(days * DAY_MS + day_ms, every);
                assert_eq!(day_ms + wait.as_millis() as i64, at_ms, "{day_ms} {every:?}");
            }
        }
        for ms in (0..DAY_MS).step_by(333_333) {
            let wait = until_next(ms, quarter);
            assert!(!wait.is_zero() && wait <= quarter, "{ms}: {wait:?}");
        }
    }
}
