//! Views of containers for lists and `inspect`.

use std::net::IpAddr;

pub(crate) use dormouse_api::Port;
use dormouse_container::{Engine, Listed};
use dormouse_model::{Config, DiskRate, Publish, RootSource, Sleep, State};

use crate::option::time::{now_ms, span};
use crate::output;

/// Returns whether a container lives: it has processes, or will have them again after an event.
pub(crate) fn is_alive(state: State) -> bool {
    state.is_alive()
}

/// `after 90 s without work, drowsy after 30 s`; empty for a container that does neither by itself.
pub(crate) fn sleep(config: &Config) -> String {
    let seconds = |sleep: Sleep| sleep.after().map(|after| after.as_secs_f64());
    match (seconds(config.spec.sleep), seconds(config.spec.drowsy)) {
        (Some(s), None) => format!("after {s} s without work"),
        (Some(s), Some(d)) => format!("after {s} s without work, drowsy after {d} s"),
        (None, Some(d)) => format!("drowsy after {d} s without work"),
        (None, None) => String::new(),
    }
}

/// `7 of 100`, or `7` without a limit.
pub(crate) fn of_most(number: u64, most: Option<u32>) -> String {
    most.map_or_else(|| number.to_string(), |most| format!("{number} of {most}"))
}

/// `read 10m/s, write 100 requests/s on /dev/sda`
pub(crate) fn disk_rates(rates: &[DiskRate]) -> String {
    rates.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// The image's name, or the directory of `--rootfs`.
pub(crate) fn image(root: &RootSource) -> String {
    match root {
        RootSource::Image { reference, .. } => reference.to_string(),
        RootSource::Directory(dir) => dir.display().to_string(),
    }
}

/// `Up 3 minutes`, `Exited (0) 2 hours ago`.
pub(crate) fn status(c: &Listed) -> String {
    let ago = |ms: i64| span(now_ms() - ms);
    if let (State::Asleep, Some(since)) = (c.state, c.asleep_unix_ms) {
        let failed =
            c.failed_wake.as_ref().map(|failed| format!(" (wake failed: {})", failed.cause));
        let short = match (c.is_short_of_memory, c.evicted_above_bytes) {
            (true, _) => " (out of memory)".to_owned(),
            (false, Some(above)) => {
                format!(" (evicted: {} above its guarantee)", output::bytes(above))
            }
            (false, None) => String::new(),
        };
        let warm = if c.is_warm { " (warm)" } else { "" };
        return format!("Asleep {}{warm}{short}{}", ago(since), failed.unwrap_or_default());
    }
    if let (State::Drowsy, Some(since)) = (c.state, c.asleep_unix_ms) {
        return format!("Drowsy {}", ago(since));
    }
    match (c.state, c.started_unix_ms, &c.exit) {
        (State::Running, Some(started), _) => format!("Up {}", ago(started)),
        (State::Paused, Some(started), _) => format!("Up {} (paused)", ago(started)),
        (State::Stopped, _, Some(exit)) => {
            let code = exit.code.map_or_else(|| "unknown".to_owned(), |c| c.to_string());
            let oom = if exit.oom_killed { ", out of memory" } else { "" };
            format!("Exited ({code}{oom}) {} ago", ago(exit.finished_unix_ms))
        }
        (state, ..) => {
            let mut word = state.as_str().to_owned();
            word[..1].make_ascii_uppercase();
            word
        }
    }
}

/// The status, and the checkpoints of a container without processes: `Exited (0) 2 hours ago, 1 checkpoint`.
pub(crate) fn status_with_checkpoints(engine: &Engine, c: &Listed) -> String {
    let kept = match c.state.is_alive() {
        true => 0,
        false => engine.checkpoint_numbers(&c.id).map_or(0, |numbers| numbers.len()),
    };
    match kept {
        0 => status(c),
        1 => format!("{}, 1 checkpoint", status(c)),
        n => format!("{}, {n} checkpoints", status(c)),
    }
}

/// `*:8080->80/tcp, ...`
pub(crate) fn ports(ports: &[Publish]) -> String {
    let port = |p: &Publish| {
        let p = Port::from(p);
        format!("{}->{}", p.host(), p.container())
    };
    ports.iter().map(port).collect::<Vec<_>>().join(", ")
}

/// `10.136.0.1, fd00::1`
pub(crate) fn addresses(addresses: &[IpAddr]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
