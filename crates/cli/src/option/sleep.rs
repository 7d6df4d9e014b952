//! When a container falls asleep by itself.

use dormouse_model::{Sleep, WakeOn, WakeOnTimer};

use super::{Invalid, time};

/// The options of `run`, `create` and `update`.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct SleepArgs {
    /// Let it fall asleep when it has been idle for so long (30s, 10m); 'dormouse daemon' sees to it
    #[arg(long, value_name = "DURATION", conflicts_with = "never_sleep")]
    sleep_after: Option<String>,
    /// Let it become drowsy when it has been idle for so long: frozen until somebody calls. What cannot
    /// sleep becomes so instead
    #[arg(long, value_name = "DURATION")]
    drowsy_after: Option<String>,
    /// Do not let it fall asleep or become drowsy by itself, which is the default; drowsy only
    /// beside --drowsy-after
    #[arg(long)]
    never_sleep: bool,
    /// What wakes it, in a list: call (somebody connects, a datagram), data (on a connection that is open),
    /// file (that it watches), timer, or timer=DURATION for those that may wait so long and ring together;
    /// none. All, each timer in its time, is the default. What does not wake it waits until it is awake
    #[arg(long, value_name = "LIST")]
    wake_on: Option<String>,
}

impl SleepArgs {
    /// What was given of sleep, if anything.
    pub(crate) fn read(&self) -> Result<Option<Sleep>, Invalid> {
        self.given(self.sleep_after.as_deref())
    }

    /// What was given of being drowsy, if anything.
    pub(crate) fn read_drowsy(&self) -> Result<Option<Sleep>, Invalid> {
        self.given(self.drowsy_after.as_deref())
    }

    /// What was given of what wakes it, if anything.
    pub(crate) fn read_wake_on(&self) -> Result<Option<WakeOn>, Invalid> {
        self.wake_on.as_deref().map(wake_on).transpose()
    }

    fn given(&self, after: Option<&str>) -> Result<Option<Sleep>, Invalid> {
        Ok(match after.map(duration_ms).transpose()? {
            Some(ms) => Some(Sleep::AfterMs(ms)),
            None => self.never_sleep.then_some(Sleep::Never),
        })
    }
}

/// The words of `--wake-on`.
fn wake_on(text: &str) -> Result<WakeOn, Invalid> {
    let mut all = WakeOn::NOTHING;
    if text == "none" {
        return Ok(all);
    }
    for word in text.split(',') {
        match word.split_once('=') {
            None if word == "call" => all.call = true,
            None if word == "data" => all.data = true,
            None if word == "file" => all.file = true,
            None if word == "timer" => all.timer = WakeOnTimer::InTime,
            Some(("timer", time)) => all.timer = WakeOnTimer::AfterMs(duration_ms(time)?),
            _ => {
                let expected =
                    "none, or of call, data, file, timer and timer=DURATION, with commas";
                return Err(Invalid::new("what wakes a container", text, expected));
            }
        }
    }
    Ok(all)
}

/// LIMIT: ten years, which no clock of the kernel overflows.
const LONGEST_MS: u64 = 10 * 366 * 86_400_000;

/// Milliseconds of `500ms`, `30s`, `1h30m`; a number alone is seconds.
fn duration_ms(text: &str) -> Result<u64, Invalid> {
    let bad = || Invalid::new("duration", text, "seconds, or a time such as 500ms, 30s or 1h30m");
    let seconds = text.parse::<u64>().ok().and_then(|s| s.checked_mul(1000));
    let ms = seconds.or_else(|| time::span_ms(text).and_then(|ms| u64::try_from(ms).ok()));
    ms.filter(|ms| (1..=LONGEST_MS).contains(ms)).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        for (text, ms) in [("1", 1000), ("250ms", 250), ("90s", 90_000), ("1h30m", 5_400_000)] {
            assert_eq!(duration_ms(text), Ok(ms), "{text}");
        }
        for bad in ["", "0", "0s", "-1s", "1x", "s", "1.5s", "99999999999d", "18446744073709551615"]
        {
            assert!(duration_ms(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_wakes_is_a_list_of_words() {
        let shown = |text: &str| wake_on(text).map(|all| all.to_string());
        for text in ["none", "call", "call,data,file,timer", "data,timer=90s", "timer=250ms"] {
            assert_eq!(shown(text).as_deref(), Ok(text));
        }
        assert_eq!(shown("timer=1m,call").as_deref(), Ok("call,timer=60s"), "in any order");
        for bad in ["", "all", "call,", "call data", "timer=", "timer=x", "data=5s", "none,call"] {
            assert!(wake_on(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn nothing_given_changes_nothing() {
        assert_eq!(SleepArgs::default().read(), Ok(None));
        let never = SleepArgs { never_sleep: true, ..SleepArgs::default() };
        assert_eq!(never.read(), Ok(Some(Sleep::Never)));
        assert_eq!(never.read_drowsy(), Ok(Some(Sleep::Never)));
        let drowsy = SleepArgs { drowsy_after: Some("30s".into()), ..never };
        assert_eq!(drowsy.read(), Ok(Some(Sleep::Never)));
        assert_eq!(drowsy.read_drowsy(), Ok(Some(Sleep::AfterMs(30_000))));
    }
}
