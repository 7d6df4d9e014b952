//! Options for falling asleep by itself.

use dormouse_model::{Evict, OutOfMemory, Sleep, WakeOn, WakeOnTimer, parse_span_ms};

use super::Invalid;

/// The options of `run`, `create` and `update`.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct SleepArgs {
    /// Let it fall asleep when it has been idle for so long (30s, 10m); needs 'dormouse daemon'
    #[arg(long, value_name = "DURATION", conflicts_with = "never_sleep")]
    sleep_after: Option<String>,
    /// Make it drowsy when it has been idle for so long: frozen until an event arrives. A container
    /// that cannot sleep becomes drowsy instead
    #[arg(long, value_name = "DURATION")]
    drowsy_after: Option<String>,
    /// Do not let it fall asleep or become drowsy by itself (default); with --drowsy-after only
    /// drowsy
    #[arg(long)]
    never_sleep: bool,
    /// Events that wake it, as a list: call (incoming connection or datagram), data-first (incoming
    /// connection when its first byte arrives, or datagram), data (on an open connection), file (that
    /// it watches), timer, or timer=DURATION for timers that may be delayed by so long and expire
    /// together; none. Default: call,data,file,timer. Other events wait until it is awake
    #[arg(long, value_name = "LIST")]
    wake_on: Option<String>,
    /// When its memory (--memory) is used: kill (the kernel ends a process; default), sleep (it falls asleep before,
    /// with all its state, until it has more memory or some time has passed); needs 'dormouse daemon'
    #[arg(long, value_name = "ACTION")]
    oom: Option<OutOfMemory>,
    /// When the host is short of memory and it uses more than its guarantee (--memory-min): sleep, throttle (it is
    /// slowed down; cgroup v2), restart, kill, never, or auto: sleep with --sleep-after or --oom sleep, else never
    /// (default); needs 'dormouse daemon'
    #[arg(long, value_name = "ACTION")]
    evict: Option<Evict>,
}

impl SleepArgs {
    /// Returns the given sleep policy, if any.
    pub(crate) fn read(&self) -> Result<Option<Sleep>, Invalid> {
        self.given(self.sleep_after.as_deref())
    }

    /// Returns the given policy for becoming drowsy, if any.
    pub(crate) fn read_drowsy(&self) -> Result<Option<Sleep>, Invalid> {
        self.given(self.drowsy_after.as_deref())
    }

    /// Returns the given events that wake it, if any.
    pub(crate) fn read_wake_on(&self) -> Result<Option<WakeOn>, Invalid> {
        self.wake_on.as_deref().map(wake_on).transpose()
    }

    /// Returns the given action for a container without memory, if any.
    pub(crate) fn read_oom(&self) -> Option<OutOfMemory> {
        self.oom
    }

    /// Returns the given way in which it gives memory, if any.
    pub(crate) fn read_evict(&self) -> Option<Evict> {
        self.evict
    }

    fn given(&self, after: Option<&str>) -> Result<Option<Sleep>, Invalid> {
        Ok(match after.map(duration_ms).transpose()? {
            Some(ms) => Some(Sleep::AfterMs(ms)),
            None => self.never_sleep.then_some(Sleep::Never),
        })
    }
}

/// Reads the words of `--wake-on`.
fn wake_on(text: &str) -> Result<WakeOn, Invalid> {
    let mut all = WakeOn::NOTHING;
    if text == "none" {
        return Ok(all);
    }
    for word in text.split(',') {
        match word.split_once('=') {
            None if word == "call" => all.call = true,
            None if word == "data-first" => (all.call, all.data_first) = (true, true),
            None if word == "data" => all.data = true,
            None if word == "file" => all.file = true,
            None if word == "timer" => all.timer = WakeOnTimer::InTime,
            Some(("timer", time)) => all.timer = WakeOnTimer::AfterMs(duration_ms(time)?),
            _ => {
                let expected =
                    "none, or a list of call, data-first, data, file, timer, timer=DURATION";
                return Err(Invalid::new("list of wake events", text, expected));
            }
        }
    }
    Ok(all)
}

/// LIMIT: ten years; no clock of the kernel overflows with that.
const LONGEST_MS: u64 = 10 * 366 * 86_400_000;

/// Reads `500ms`, `30s`, `1h30m` as milliseconds; a number alone is seconds.
fn duration_ms(text: &str) -> Result<u64, Invalid> {
    let bad = || Invalid::new("duration", text, "seconds, or a time such as 500ms, 30s or 1h30m");
    let seconds = text.parse::<u64>().ok().and_then(|s| s.checked_mul(1000));
    let ms = seconds.or_else(|| parse_span_ms(text).and_then(|ms| u64::try_from(ms).ok()));
    ms.filter(|ms| (1..=LONGEST_MS).contains(ms)).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duration_is_parsed_or_refused() {
        for (text, ms) in [("1", 1000), ("250ms", 250), ("90s", 90_000), ("1h30m", 5_400_000)] {
            assert_eq!(duration_ms(text), Ok(ms), "{text}");
        }
        for bad in ["", "0", "0s", "-1s", "1x", "s", "1.5s", "99999999999d", "18446744073709551615"]
        {
            assert!(duration_ms(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn wake_on_is_a_list_of_words() {
        let shown = |text: &str| wake_on(text).map(|all| all.to_string());
        for text in [
            "none",
            "call",
            "call,data,file,timer",
            "data,timer=90s",
            "timer=250ms",
            "data-first,data",
        ] {
            assert_eq!(shown(text).as_deref(), Ok(text));
        }
        assert_eq!(shown("timer=1m,call").as_deref(), Ok("call,timer=60s"), "in any order");
        for bad in ["", "all", "call,", "call data", "timer=", "timer=x", "data=5s", "none,call"] {
            assert!(wake_on(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn missing_sleep_options_change_nothing() {
        assert_eq!(SleepArgs::default().read(), Ok(None));
        let never = SleepArgs { never_sleep: true, ..SleepArgs::default() };
        assert_eq!(never.read(), Ok(Some(Sleep::Never)));
        assert_eq!(never.read_drowsy(), Ok(Some(Sleep::Never)));
        let drowsy = SleepArgs { drowsy_after: Some("30s".into()), ..never };
        assert_eq!(drowsy.read(), Ok(Some(Sleep::Never)));
        assert_eq!(drowsy.read_drowsy(), Ok(Some(Sleep::AfterMs(30_000))));
    }
}
