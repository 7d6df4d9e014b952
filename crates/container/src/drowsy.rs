//! Drowsy: frozen with all processes alive, memory in swap, until an event arrives.
//!
//! Drowsy is the tier between awake and asleep. Nothing is saved: processes, sockets and objects
//! that no checkpoint supports stay in the kernel, frozen (cgroups(7), freezer), and their memory
//! is pushed out to the host's swap. Waking is thawing.
//!
//! **Not `pause`.** A container that an operator has paused stays frozen until the operator resumes
//! it; the record of the first process contains `paused`. A drowsy container has `drowsy_unix_ms`
//! there. It is thawed by an incoming connection, by any event at one of its watched descriptors,
//! by its timers, by `exec`, `wake`, `stop`. `pause` makes a drowsy container paused and no longer
//! drowsy; a paused container does not become drowsy.
//!
//! **Events.** The keeper has copies of the descriptors through which events may arrive from
//! outside ([`dormouse_checkpoint::save::Calls`]) and is notified by epoll(7), as for sleeping
//! containers. The first timer and the first timeout are its alarm. As with sleep, a container that
//! was stopped while active is thawed as soon as it is frozen.
//!
//! ORDER, to drowsy: all threads stopped by a tracer; frozen; tracer detached; descriptors held;
//! recorded; memory pushed out, without the container's lock. Back: mark removed; descriptors
//! dropped; thawed. Meanwhile an intent makes the record decisive. A killed command therefore
//! leaves a drowsy container that the keeper watches, or a running one. When the keeper is killed
//! the next command, or the daemon at once, thaws all drowsy containers ([`crate::recover::custody`]).
//!
//! LIMIT: the kernel's own 30 to 60 kB of a process (stack, page tables) stay; a traced process is
//! frozen at any point.
//!
//! Uses `ground`, `state`, `hold`, `freeze`, `pending`, `later`, `policy` and `save`.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use dormouse_checkpoint::save::stand_still;
use dormouse_kernel::cgroup::{Cgroup, CgroupError, CpuTime, MemoryInUse};
use dormouse_kernel::{call, pidfd, proc};
use dormouse_launch::protocol::watch;
use dormouse_launch::{Keeper, LaunchError};
use dormouse_model::{Config, ContainerId, State, WakeOnTimer};

use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::pending::{self, Intent};
use crate::policy::{self, Idle, Reason};
use crate::state::{self, InitRecord};
use crate::{event, freeze, hold, later, save};

/// How much memory is pushed out between two checks whether the container is still drowsy.
const PIECE_BYTES: u64 = 32 << 20;

/// How long thawed threads may take to wait again.
const SETTLE_WITHIN: Duration = Duration::from_millis(100);

/// Result of a push-out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PushOut {
    /// Memory charged to the container before, in bytes.
    pub before_bytes: u64,
    /// The same after, in bytes.
    pub after_bytes: u64,
    /// The host has swap. Without swap only page cache can be reclaimed.
    pub has_swap: bool,
}

/// Makes a container drowsy; if `idle` is given, only if it is still idle.
pub(crate) fn drowse(
    ground: &Ground,
    id: &ContainerId,
    idle: Option<&Idle>,
    reason: Reason,
) -> Result<Option<PushOut>> {
    let lock = ground.lock(id)?;
    let config = ground.config(id)?;
    let observed = state::observe_locked(ground, &config)?;
    if matches!(observed.state, State::Drowsy | State::Asleep) {
        return Ok(None);
    }
    let (mut init, _) = state::alive(ground, &config)?;
    if init.paused {
        return Err(Error::state(&config, State::Paused, "unpause it first"));
    }
    idle.map_or(Ok(()), |idle| policy::check_idle(ground, &config, idle))?;
    state::wait_for_exec(ground, &config)?;
    later::wait_until_filled(ground, &config)?;
    let cgroup = state::cgroup(ground, &config)?;
    let mut keeper = hold::keeper(ground)?;
    hold::record_keeper(ground, &mut keeper)?;
    let doing = pending::intend(ground, id, &Intent::Freezer)?;
    let frozen = freeze_watched(ground, &config, &cgroup, &mut keeper, idle);
    let marked = frozen.and_then(|()| {
        init.drowsy_unix_ms = Some(event::now_unix_ms());
        state::write_init(ground, id, &init)
    });
    if let Err(e) = marked {
        // The first error is returned.
        let _ = keeper.let_go(id.as_str());
        let _ = cgroup.thaw();
        return Err(e);
    }
    // ORDER: write the record, then verify that the keeper still holds the descriptors. A
    // recovery that ran before the record was written did not see this container, so its
    // callers would be lost.
    if !keeper.holds(id.as_str()).unwrap_or(false) {
        freeze::thaw(ground, &config, &mut init)?;
        return Err(LaunchError::KeeperGone.into());
    }
    ground.record("drowsy", id.as_str(), config.name.as_str(), &policy::reason(reason));
    // ORDER: from here on an event wakes the container without waiting for the push-out.
    drop((doing, lock));
    let goes_on = || state::is_drowsy(ground, id);
    let before_bytes = cgroup.memory_bytes()?;
    let pushed = push_out(&cgroup, &goes_on);
    let pushed = pushed.and_then(|has_swap| Ok((has_swap, cgroup.memory_bytes()?)));
    let (has_swap, after_bytes) = match pushed {
        // The container was woken, and has ended.
        Err(_) if !goes_on() => (has_swap(), before_bytes),
        other => other?,
    };
    Ok(Some(PushOut { before_bytes, after_bytes, has_swap }))
}

/// Freezes the container, and has the keeper watch its descriptors.
fn freeze_watched(
    ground: &Ground,
    config: &Config,
    cgroup: &Cgroup,
    keeper: &mut Keeper,
    idle: Option<&Idle>,
) -> Result<()> {
    let id = config.id.as_str();
    let mut still = stand_still(|| cgroup.pids().unwrap_or_default())?;
    let calls = still.read()?;
    if idle.is_some() && (calls.is_busy || calls.is_called) {
        return Err(Error::NotIdle(config.name.to_string()));
    }
    cgroup.freeze()?;
    // ORDER: tasks released by the tracer pass from one stop into the other.
    drop(still);
    cgroup.freeze()?;
    keeper.let_go(id)?; // leftovers of an interrupted command
    let timers = config.spec.wake_on.timer;
    let timerfd = calls.next_timerfd.filter(|_| timers != WakeOnTimer::InTime);
    let next_ring = calls.next_ring.into_iter().chain(timerfd).min();
    hold::hold_by(keeper, config, calls.held, calls.is_busy, watch::STAYS)?;
    policy::set_alarm(ground, config, next_ring, idle)
}

/// Thaws a drowsy container. The caller holds its lock.
pub(crate) fn resume(
    ground: &Ground,
    config: &Config,
    mut init: InitRecord,
    reason: Reason,
) -> Result<()> {
    let _doing = pending::intend(ground, &config.id, &Intent::Freezer)?;
    init.wakes = init.wakes.saturating_add(1);
    freeze::thaw(ground, config, &mut init)?;
    ground.record("wake", config.id.as_str(), config.name.as_str(), &policy::reason(reason));
    Ok(())
}

/// Thaws a drowsy container that is about to fall asleep, if all of it can be saved. Returns
/// when its threads wait as before.
pub(crate) fn resume_to_sleep(
    ground: &Ground,
    config: &Config,
    mut init: InitRecord,
) -> Result<()> {
    let refusals = save::explain_sleep(ground, &config.id)?;
    if !refusals.is_empty() {
        return Err(dormouse_checkpoint::Error::Refused(refusals).into());
    }
    let _doing = pending::intend(ground, &config.id, &Intent::Freezer)?;
    freeze::thaw(ground, config, &mut init)?;
    let until = Instant::now() + SETTLE_WITHIN;
    while !waits_again(&state::cgroup(ground, config)?)? && Instant::now() < until {
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}

/// Pushes the memory of a running container out to swap as long as none of its tasks runs. The
/// container continues, and the kernel reads touched pages again; nothing is recorded. Returns
/// the number of bytes.
pub(crate) fn swap_out(ground: &Ground, id: &ContainerId, idle: Option<&Idle>) -> Result<u64> {
    let config = ground.config(id)?;
    let state = state::observe(ground, &config)?.state;
    if state != State::Running {
        return Err(Error::state(&config, state, "it is not running"));
    }
    let at_work = || Error::NotIdle(config.name.to_string());
    // The container is in use by the engine: its memory is still being filled.
    later::wait_until_filled(ground, &config).map_err(|e| match e {
        Error::Filling(_) => at_work(),
        other => other,
    })?;
    let parent = &ground.places.cgroup;
    let cpu = CpuTime::below(parent)?;
    let goes_on = || {
        let used = || cpu.of(id.as_str()).ok().flatten();
        idle.is_none_or(|idle| used() == Some(idle.used_ns))
    };
    if !goes_on() {
        return Err(at_work());
    }
    let memory = MemoryInUse::below(parent)?;
    let pages = || -> Result<u64> {
        let found = memory.as_ref().map(|memory| memory.of(id.as_str())).transpose()?;
        Ok(found.flatten().unwrap_or_default().for_swap_bytes)
    };
    let before = pages()?;
    push_out(&state::cgroup(ground, &config)?, &goes_on)?;
    // An interrupted push-out gives no measure of the memory that could go.
    if !goes_on() {
        return Err(at_work());
    }
    Ok(before.saturating_sub(pages()?))
}

/// Pushes the memory of all processes of a group out while `goes_on` returns true; the remaining
/// pages stay. Returns whether the host has swap: without swap only page cache can be reclaimed.
fn push_out(
    cgroup: &Cgroup,
    goes_on: &impl Fn() -> bool,
) -> std::result::Result<bool, CgroupError> {
    let has_swap = has_swap();
    if has_swap {
        let opened =
            cgroup.pids()?.into_iter().filter_map(|pid| Some((pid, pidfd::open(pid).ok()?)));
        let opened: Vec<(u32, OwnedFd)> = opened.collect();
        // ORDER: opened, then found in the group once more: the pid was not reused by a foreign
        // process.
        let pids = cgroup.pids()?;
        for (pid, process) in opened.iter().filter(|(pid, _)| pids.contains(pid)) {
            if !push_out_process(*pid, process, goes_on) {
                break;
            }
        }
    }
    // Page cache, unmapped pages, and swap cache that was not freed yet.
    cgroup.reclaim(goes_on)?;
    Ok(has_swap)
}

/// Pushes the memory of a process out. False if the container is to be left alone now.
fn push_out_process(pid: u32, process: &OwnedFd, goes_on: &impl Fn() -> bool) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let mut until_look = 0;
    for (start, end) in maps.lines().filter_map(range) {
        let mut at = start;
        while at < end {
            if until_look == 0 {
                if !goes_on() {
                    return false;
                }
                until_look = PIECE_BYTES;
            }
            let bytes = (end - at).min(until_look);
            // Locked pages and device mappings stay: the kernel returns an error for them.
            let _ = call::page_out(process.as_fd(), at, bytes);
            at += bytes;
            until_look -= bytes;
        }
    }
    true
}

/// Parses the addresses of a line of proc_pid_maps(5); `None` for the kernel's own mappings.
fn range(line: &str) -> Option<(u64, u64)> {
    if line.ends_with(']') && line.contains("[v") {
        return None;
    }
    let (start, end) = line.split_once(' ')?.0.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    number(start).zip(number(end))
}

/// Returns whether the host has swap of any kind (proc_swaps(5)): a line below the heading.
fn has_swap() -> bool {
    proc::read_text("/proc/swaps", 1 << 20).is_ok_and(|text| text.lines().nth(1).is_some())
}

/// Returns whether all threads of a container wait, and not in the freezer.
fn waits_again(cgroup: &Cgroup) -> Result<bool> {
    let threads = cgroup.pids()?.into_iter().flat_map(|pid| {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
        tasks.into_iter().flatten().flatten().map(|task| task.path())
    });
    let waits = |task: std::path::PathBuf| {
        let read = |name| std::fs::read_to_string(task.join(name)).unwrap_or_default();
        let place = read("wchan");
        let in_freezer = ["freez", "refrigerator", "get_signal"].iter().any(|w| place.contains(w));
        !in_freezer && !read("syscall").starts_with("running")
    };
    Ok(threads.into_iter().all(waits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn map_lines_give_ranges_except_kernel_mappings() {
        let line = "7f00-8000 rw-p 00000000 00:00 0 ";
        assert_eq!(range(line), Some((0x7f00, 0x8000)));
        assert_eq!(range("7ffe-7fff rw-p 0 00:00 0 [stack]"), Some((0x7ffe, 0x7fff)));
        assert_eq!(range("7ffe-7fff r-xp 0 00:00 0 [vdso]"), None);
        assert_eq!(range("ffff-fffff --xp 0 00:00 0 [vsyscall]"), None);
        assert_eq!(range("nonsense"), None);
    }
}
