//! How threads are scheduled: the kernel reports all of it for any task, except the timer slack.
//!
//! A container has no CAP_SYS_NICE of the host, so a thread is restored with its own permissions. A
//! setting that only a process outside can have made is refused.

use dormouse_kernel::{Errno, call, proc};
use dormouse_record::{Limit, Schedule};

use super::refusal::Reason;
use super::seen::Seen;

/// The resource number of the limit on real-time priorities.
const RTPRIO: u32 = 14;

/// Shift of the class in an I/O priority, and the class above all others.
const IO_CLASS: (u32, u32) = (13, 1);

/// SCHED_FLAG_RESET_ON_FORK.
const RESET_ON_FORK: u64 = 1;

/// util_max of a thread without a setting of its own.
const UTIL_MAX: u32 = 1024;

/// LIMIT: CPUs of a host.
pub(crate) const CPUS_MAX: u32 = 8192;

/// Everything but the timer slack, which only the thread itself can read.
pub(crate) fn of(tid: u32) -> Result<Schedule, Errno> {
    let found = call::scheduling_attributes(tid)?;
    // The kernel also reports a slice for threads without one of their own: the host's default, as
    // for this program.
    let host = call::scheduling_attributes(0)?;
    let own_slice = found.runtime_ns != host.runtime_ns && is_fair(found.policy);
    Ok(Schedule {
        policy: found.policy,
        reset_on_fork: found.flags & RESET_ON_FORK != 0,
        priority: found.priority,
        slice_ns: if own_slice { found.runtime_ns } else { 0 },
        cpus: bound_to(tid)?,
        io_priority: call::io_priority(tid)?,
        timer_slack_ns: 0,
    })
}

fn is_fair(policy: u32) -> bool {
    [libc::SCHED_OTHER, libc::SCHED_BATCH].contains(&(policy as i32))
}

/// The CPUs that a thread may run on; empty if these are all.
fn bound_to(tid: u32) -> Result<Vec<u32>, Errno> {
    let mut mask = [0u64; CPUS_MAX as usize / 64];
    call::affinity(tid, &mut mask)?;
    let has = |cpu: &u32| mask[*cpu as usize / 64] & 1 << (cpu % 64) != 0;
    let online = proc::whole_text("/sys/devices/system/cpu/online").unwrap_or_default();
    if !online.is_empty() && cpus(&online).all(|cpu| has(&cpu)) {
        return Ok(Vec::new());
    }
    Ok((0..CPUS_MAX).filter(has).collect())
}

/// The CPUs of a list such as `0-3,8`; none if it is no such list.
fn cpus(list: &str) -> impl Iterator<Item = u32> {
    let runs = proc::cpu_runs(list.trim()).unwrap_or_default();
    runs.into_iter().flat_map(|(first, last)| first..=last.min(CPUS_MAX - 1))
}

/// Checks that a process's threads can be scheduled again as they are.
pub(crate) fn check(seen: &Seen, limits: &[Limit]) -> Result<(), Reason> {
    for tid in &seen.tids {
        // The thread may have exited since it was found.
        let Ok(found) = call::scheduling_attributes(*tid) else { continue };
        let allowed = limits.iter().find(|l| l.resource == RTPRIO).map_or(0, |l| l.soft);
        match found.policy as i32 {
            libc::SCHED_OTHER | libc::SCHED_BATCH | libc::SCHED_IDLE => {}
            libc::SCHED_FIFO | libc::SCHED_RR if u64::from(found.priority) <= allowed => {}
            libc::SCHED_FIFO | libc::SCHED_RR => {
                return Err(format!(
                    "it has real-time priority {}, set from outside the container: its limit \
                     (rtprio) is {allowed}",
                    found.priority
                ));
            }
            other => return Err(format!("it has scheduling policy {other}, not saved yet")),
        }
        if found.util_min != 0 || ![0, UTIL_MAX].contains(&found.util_max) {
            return Err("it has hints of its use of a CPU (uclamp), which are not saved yet".into());
        }
        // Without core scheduling no thread has a cookie. One that is inherited from this program is had again.
        let inherited = || call::core_cookie(0).unwrap_or(0);
        if call::core_cookie(*tid).is_ok_and(|cookie| cookie != 0 && cookie != inherited()) {
            return Err(
                "it shares a core with chosen threads only (PR_SCHED_CORE), not saved yet".into()
            );
        }
        let io_class = call::io_priority(*tid).unwrap_or(0) >> IO_CLASS.0;
        if io_class == IO_CLASS.1 {
            return Err("it has a real-time I/O priority, set from outside the container".into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus_are_read() {
        assert_eq!(cpus("0-3,8\n").collect::<Vec<_>>(), [0, 1, 2, 3, 8]);
        assert_eq!(cpus("0").collect::<Vec<_>>(), [0]);
        assert_eq!(cpus("").count() + cpus("x-").count() + cpus("3-1").count(), 0);
    }
}
