//! Timers: descriptors (timerfd) and POSIX timers.

use std::os::fd::AsRawFd;

use dormouse_kernel::{Errno, proc};
use dormouse_record::{PosixTimer, Thing, TimerFd};

use super::calls::run;
use super::halt::Halt;
use super::open::Open;
use super::refusal::Reason;
use super::seen::Seen;
use super::signal;
use super::survey::Survey;
use crate::inject::landing::Ground;
use crate::inject::script::{Answers, Script};

pub(crate) fn is_timer(open: &Open<'_>) -> bool {
    open.link == "anon_inode:[timerfd]"
}

pub(crate) fn save(_: &mut Survey<'_>, open: &Open<'_>) -> Result<Thing, Reason> {
    let record = |info: &str| {
        Some(TimerFd {
            flags: open.flags(),
            clock: field_of(info, "clockid")?.parse().ok()?,
            ticks: field_of(info, "ticks")?.parse().ok()?,
            value_ns: pair_ns(field_of(info, "it_value")?)?,
            interval_ns: pair_ns(field_of(info, "it_interval")?)?,
            cancelled_at_set_ns: None,
        })
    };
    let incomplete = "a timerfd with an incomplete fdinfo";
    let mut timer: TimerFd = record(&open.info).ok_or(incomplete)?;
    if timer.value_ns == 0 && timer.interval_ns != 0 && timer.ticks != 0 {
        // An expired, unread timer is not armed and counts no ticks until a read(2) or
        // timerfd_gettime(2). ORDER: the call counts the ticks and arms the timer, as one of the
        // program's own would.
        let failed = |e: &dyn std::fmt::Display| format!("a timerfd: {e}");
        rustix::time::timerfd_gettime(&open.copy).map_err(|e| failed(&e))?;
        let path = format!("/proc/self/fdinfo/{}", open.copy.as_raw_fd());
        let info = proc::whole_text(path).map_err(|e| failed(&e))?;
        timer = record(&info).ok_or(incomplete)?;
    }
    let settime = open.field("settime flags").and_then(|f| u32::from_str_radix(f, 8).ok());
    if settime.unwrap_or(0) & TimerFd::CANCEL_ON_SET != 0 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
        let now_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        timer.cancelled_at_set_ns = Some(now_ns.saturating_add(timer.value_ns));
    }
    Ok(Thing::Timer(timer))
}

/// A field of fdinfo.
fn field_of<'t>(info: &'t str, name: &str) -> Option<&'t str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// Parses `(SECONDS, NANOSECONDS)`.
fn pair_ns(text: &str) -> Option<u64> {
    let (seconds, nanoseconds) = text.trim_matches(['(', ')']).split_once(',')?;
    let seconds: u64 = seconds.trim().parse().ok()?;
    let nanoseconds: u64 = nanoseconds.trim().parse().ok()?;
    seconds.checked_mul(1_000_000_000)?.checked_add(nanoseconds)
}

/// The POSIX timers of a process, as `/proc/PID/timers` lists them. Their remaining times are
/// queried by calls in the process itself.
pub(crate) fn posix(seen: &Seen) -> Result<Vec<PosixTimer>, Reason> {
    let text = proc::whole_text(format!("/proc/{}/timers", seen.pid)).unwrap_or_default();
    let mut all = Vec::new();
    for line in text.lines() {
        let Some((name, value)) = line.split_once(':') else { continue };
        let value = value.trim();
        if name == "ID" {
            all.push(PosixTimer {
                id: value.parse().unwrap_or(-1),
                clock: 0,
                notify: 0,
                signal: 0,
                value: 0,
                tid: 0,
                value_ns: 0,
                interval_ns: 0,
            });
            continue;
        }
        let Some(timer) = all.last_mut() else { continue };
        match name {
            "signal" => {
                let (signal, pointer) = value.split_once('/').unwrap_or((value, "0"));
                timer.signal = signal.parse().unwrap_or(0);
                timer.value = u64::from_str_radix(pointer, 16).unwrap_or(0);
            }
            "notify" => {
                // `signal/tid.5`, `none/pid.5`, `thread/pid.5`
                let (how, target) = value.split_once('/').unwrap_or((value, ""));
                let is_tid = target.starts_with("tid.");
                timer.notify = match how {
                    "signal" => 0,
                    "none" => 1,
                    _ => return Err("a POSIX timer of unknown notification".into()),
                };
                if is_tid {
                    timer.notify |= 4;
                }
                let number = target.split_once('.').map_or("", |(_, n)| n);
                timer.tid = number.parse().unwrap_or(0);
            }
            "ClockID" => timer.clock = value.parse().unwrap_or(0),
            _ => {}
        }
    }
    Ok(all)
}

/// Queries interval and remaining time of a POSIX timer.
pub(super) fn posix_time(
    script: &mut Script,
    id: i32,
) -> impl FnOnce(&Answers) -> std::result::Result<(u64, u64), Errno> + use<> {
    let to = script.room(32);
    let queried = script.call(libc::SYS_timer_gettime, [id.into(), to.into()]);
    move |answers| {
        answers.returned(queried)?;
        let [interval_s, interval_ns, value_s, value_ns] = answers.numbers(to);
        let ns = |s: u64, ns: u64| s.saturating_mul(1_000_000_000).saturating_add(ns);
        Ok((ns(interval_s, interval_ns), ns(value_s, value_ns)))
    }
}

/// How long until the first timer of a stopped process expires that sends a signal (setitimer(2),
/// of real time; timer_create(2)); `None` if no call can be injected.
pub(crate) fn next_timer_ns(seen: &Seen) -> std::result::Result<Option<u64>, Errno> {
    let pid = seen.pid;
    let Some(ground) = Ground::in_object(pid) else { return Ok(None) };
    let mut script = Script::default();
    let intervals = signal::interval_timers(&mut script);
    let posix = posix(seen).unwrap_or_default();
    let rest = posix.iter().map(|timer| posix_time(&mut script, timer.id)).collect::<Vec<_>>();
    let _halt = Halt::take(seen, &ground)?;
    let answers = run(seen, pid, &ground, &script, None)?;
    const REAL: u32 = 0;
    let real = intervals(&answers)?.into_iter().find(|t| t.which == REAL && t.value_us != 0);
    let mut next = real.map(|timer| timer.value_us.saturating_mul(1000));
    for rest in rest {
        let (_, value_ns) = rest(&answers)?;
        next = next.into_iter().chain((value_ns != 0).then_some(value_ns)).min();
    }
    Ok(next)
}
