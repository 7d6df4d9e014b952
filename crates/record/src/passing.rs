//! Time that passes while a container only exists as records.
//!
//! Records hold the remaining time of every timer and every timed wait, at the time of the
//! checkpoint. After an explicit checkpoint and restore, timers and waits continue with the
//! remaining time. A container that sleeps on this host must wake at the time at which its next
//! timer would have expired: [`Records::next_ring_ns`] returns the longest time that it may sleep,
//! and [`Records::let_pass`] subtracts the elapsed time from all timers and waits. Absolute times
//! (futex(2) except `FUTEX_WAIT`, clock_nanosleep(2) with `TIMER_ABSTIME`) are not changed: the
//! clocks have advanced.
//!
//! LIMIT: time limits of sockets (`SO_RCVTIMEO`) and of POSIX message queues are not known; a wait
//! with such a limit starts again when the container wakes for another reason.

use rustix::time::ClockId;

use crate::{
    About, PosixTimer, Process, Records, Restart, Thing, Thread, Time, TimeLimit, TimerFd,
};

/// Clocks that advance by time on a CPU (timer_create(2)); negative ones are of a process.
const CPU_CLOCKS: [i32; 2] = [libc::CLOCK_PROCESS_CPUTIME_ID, libc::CLOCK_THREAD_CPUTIME_ID];
/// `setitimer(2)`: the timer in real time.
const REAL: u32 = 0;
/// A timer with this notification has no visible expiry.
const SIGEV_NONE: i32 = 1;
/// The mask of the command in an operation of futex(2), and the bit for CLOCK_REALTIME.
const FUTEX_COMMAND: i32 = 127;
const FUTEX_REALTIME: i32 = 256;

fn is_of_a_cpu(clock: i32) -> bool {
    clock < 0 || CPU_CLOCKS.contains(&clock)
}

/// The value of a clock in a time namespace at the time of the checkpoint.
fn then_ns(about: &About, time: &Time, clock: i32) -> u64 {
    let ns = match clock {
        libc::CLOCK_REALTIME => about.created_unix_ms.saturating_mul(1_000_000),
        libc::CLOCK_BOOTTIME => about.boottime_ns.saturating_add(time.boottime_ns),
        _ => about.monotonic_ns.saturating_add(time.monotonic_ns),
    };
    u64::try_from(ns).unwrap_or(0)
}

impl About {
    /// Nanoseconds since the checkpoint, for timers: by CLOCK_MONOTONIC, or by CLOCK_REALTIME if
    /// the host has been rebooted since.
    pub fn passed_ns(&self) -> u64 {
        let same_boot = dormouse_kernel::proc::boot_id().is_ok_and(|boot| boot == self.boot_id);
        let (clock, then_ns) = match same_boot {
            true => {
                (ClockId::Monotonic, self.monotonic_ns.saturating_sub(self.monotonic_offset_ns))
            }
            false => (ClockId::Realtime, self.created_unix_ms.saturating_mul(1_000_000)),
        };
        let now = rustix::time::clock_gettime(clock);
        let now_ns = now.tv_sec.saturating_mul(1_000_000_000).saturating_add(now.tv_nsec);
        u64::try_from(now_ns.saturating_sub(then_ns)).unwrap_or(0)
    }
}

impl Records {
    /// The time from the checkpoint to the first expiry of a timer or of a wait; `None` if there is
    /// none. A timer that expired repeatedly in the last `quiet_ns`, in which no task ran, is not
    /// counted: no task reacts to it.
    pub fn next_ring_ns(&self, quiet_ns: u64) -> Option<u64> {
        let of_timers = self.objects.iter().filter_map(|object| match &object.thing {
            Thing::Timer(timer) => of_timer(timer, quiet_ns),
            _ => None,
        });
        let of_processes = self.processes.iter().filter_map(|p| of_process(self, p));
        of_timers.chain(of_processes).min()
    }

    /// Subtracts `ns` from the remaining time of all timers and waits. Afterwards
    /// [`Thread::time_limit`] is only set if a register or memory must receive the remaining time.
    pub fn let_pass(&mut self, ns: u64) {
        for object in &mut self.objects {
            if let Thing::Timer(timer) = &mut object.thing {
                pass_timer(timer, ns);
            }
        }
        for process in &mut self.processes {
            for timer in process.timers.iter_mut().filter(|t| !is_of_a_cpu(t.clock)) {
                pass_posix(timer, ns);
            }
            for timer in process.interval_timers.iter_mut().filter(|t| t.which == REAL) {
                if timer.value_us != 0 {
                    timer.value_us = timer.value_us.saturating_sub(ns / 1_000).max(1);
                }
            }
            process.threads.iter_mut().for_each(|thread| pass_thread(thread, ns));
        }
    }
}

fn of_timer(timer: &TimerFd, quiet_ns: u64) -> Option<u64> {
    // While a tick is unread the kernel does not arm it again, and no task is woken.
    let unheard = timer.interval_ns != 0 && (timer.interval_ns < quiet_ns || timer.ticks != 0);
    (timer.value_ns != 0 && !unheard).then_some(timer.value_ns)
}

fn of_process(records: &Records, process: &Process) -> Option<u64> {
    let heard =
        |t: &&PosixTimer| t.value_ns != 0 && t.notify != SIGEV_NONE && !is_of_a_cpu(t.clock);
    let posix = process.timers.iter().filter(heard).map(|t| t.value_ns);
    let interval = process.interval_timers.iter().filter(|t| t.which == REAL && t.value_us != 0);
    let interval = interval.map(|t| t.value_us.saturating_mul(1_000));
    let time = records.time_of(process);
    let rest = |restart: &Restart| of_restart(&records.about, &time, restart);
    let restarts = process.threads.iter().filter_map(|t| rest(t.restart.as_ref()?));
    let limits = process.threads.iter().filter_map(|t| Some(t.time_limit.as_ref()?.left_ns));
    posix.chain(interval).chain(restarts).chain(limits).min()
}

fn of_restart(about: &About, time: &Time, restart: &Restart) -> Option<u64> {
    let left = restart.remaining_ns?;
    match moment_of(restart) {
        Some(clock) => Some(left.saturating_sub(then_ns(about, time, clock))),
        None => (!is_on_a_cpu(restart)).then_some(left),
    }
}

/// The clock of a wait that ends at an absolute time.
fn moment_of(restart: &Restart) -> Option<i32> {
    let operation = restart.args[1] as i32;
    let is_moment =
        restart.call == libc::SYS_futex && operation & FUTEX_COMMAND != libc::FUTEX_WAIT;
    let clock = match operation & FUTEX_REALTIME {
        0 => libc::CLOCK_MONOTONIC,
        _ => libc::CLOCK_REALTIME,
    };
    is_moment.then_some(clock)
}

/// Whether it is a sleep in CPU time.
fn is_on_a_cpu(restart: &Restart) -> bool {
    restart.call == libc::SYS_clock_nanosleep && is_of_a_cpu(restart.args[0] as i32)
}

fn pass_timer(timer: &mut TimerFd, ns: u64) {
    if timer.value_ns == 0 {
        return;
    }
    let Some(late) = ns.checked_sub(timer.value_ns) else {
        timer.value_ns -= ns;
        return;
    };
    let (rings, next) = match timer.interval_ns {
        0 => (0, 0),
        interval => (late / interval, interval - late % interval),
    };
    timer.ticks = timer.ticks.saturating_add(1).saturating_add(rings);
    timer.value_ns = next;
}

/// LIMIT: several missed expiries count as one (timer_getoverrun(2)).
fn pass_posix(timer: &mut PosixTimer, ns: u64) {
    if timer.value_ns != 0 {
        timer.value_ns = timer.value_ns.saturating_sub(ns).max(1);
    }
}

fn pass_thread(thread: &mut Thread, ns: u64) {
    if let Some(restart) = &mut thread.restart
        && moment_of(restart).is_none()
        && !is_on_a_cpu(restart)
    {
        restart.remaining_ns = restart.remaining_ns.map(|left| left.saturating_sub(ns));
    }
    let Some(limit) = thread.time_limit.take() else { return };
    let left_ns = limit.left_ns.saturating_sub(ns);
    match over(limit.call).filter(|_| left_ns == 0) {
        Some(returned) => {
            thread.registers.rax = returned as u64;
            thread.registers.orig_rax = u64::MAX;
        }
        // The kernel wrote the remaining time to memory when the call was interrupted.
        None if limit.begins_anew() || limit.at.is_some() && ns != 0 => {
            thread.time_limit = Some(TimeLimit { left_ns, ..limit });
        }
        None => {}
    }
}

/// The return value of a call after its time is over; `None` if the repeated call returns by
/// itself.
fn over(call: i64) -> Option<i64> {
    match call {
        libc::SYS_epoll_wait
        | libc::SYS_epoll_pwait
        | libc::SYS_epoll_pwait2
        | libc::SYS_io_getevents => Some(0),
        libc::SYS_rt_sigtimedwait | libc::SYS_semtimedop => Some(-i64::from(libc::EAGAIN)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IntervalTimer;

    const SECOND: u64 = 1_000_000_000;

    fn timer(value_ns: u64, interval_ns: u64) -> TimerFd {
        TimerFd {
            flags: 0,
            clock: libc::CLOCK_MONOTONIC,
            ticks: 0,
            value_ns,
            interval_ns,
            cancelled_at_set_ns: None,
        }
    }

    fn one_thread(thread: Thread) -> Records {
        let process = Process { threads: vec![thread], ..Process::default() };
        Records { processes: vec![process], ..Records::default() }
    }

    fn sleep(call: i64, args: [u64; 6], left: u64) -> Thread {
        Thread {
            restart: Some(Restart { call, args, remaining_ns: Some(left) }),
            ..Thread::default()
        }
    }

    #[test]
    fn a_timer_descriptor_counts_missed_expiries() {
        let after = |ns, mut timer: TimerFd| {
            pass_timer(&mut timer, ns);
            (timer.ticks, timer.value_ns)
        };
        assert_eq!(after(3, timer(10, 0)), (0, 7));
        assert_eq!(after(10, timer(10, 0)), (1, 0), "a single timer is disarmed after its expiry");
        assert_eq!(after(10, timer(10, 4)), (1, 4));
        assert_eq!(after(25, timer(10, 4)), (4, 1), "at 10, 14, 18 and 22, next at 26");
        assert_eq!(after(99, timer(0, 0)), (0, 0), "a disarmed timer stays disarmed");
    }

    #[test]
    fn the_first_expiry_decides() {
        let mut records = one_thread(sleep(libc::SYS_nanosleep, [0; 6], 5 * SECOND));
        assert_eq!(records.next_ring_ns(0), Some(5 * SECOND));
        records.objects.push(Thing::Timer(timer(2 * SECOND, SECOND / 2)).into());
        assert_eq!(records.next_ring_ns(0), Some(2 * SECOND));
        assert_eq!(records.next_ring_ns(SECOND), Some(5 * SECOND), "no task reacts");
        let alarm = IntervalTimer { which: REAL, value_us: 3_000_000, interval_us: 0 };
        let of_cpu = IntervalTimer { which: 1, value_us: 1, interval_us: 0 };
        records.processes[0].interval_timers.extend([of_cpu, alarm]);
        assert_eq!(records.next_ring_ns(SECOND), Some(3 * SECOND));
        records.let_pass(2 * SECOND);
        assert_eq!(records.next_ring_ns(SECOND), Some(SECOND));
        records.let_pass(20 * SECOND);
        assert_eq!(records.next_ring_ns(SECOND), Some(0), "the sleep is over");
        assert_eq!(records.processes[0].interval_timers[1].value_us, 1, "expires at once");
        assert_eq!(records.processes[0].interval_timers[0].value_us, 1, "no CPU time has passed");
    }

    #[test]
    fn absolute_times_do_not_change() {
        let wait = [0, libc::FUTEX_WAIT_BITSET as u64, 0, 0, 0, 0];
        let mut records = one_thread(sleep(libc::SYS_futex, wait, 70 * SECOND));
        records.about.monotonic_ns = 60 * SECOND as i64;
        assert_eq!(records.next_ring_ns(0), Some(10 * SECOND));
        records.let_pass(4 * SECOND);
        let left = records.processes[0].threads[0].restart.as_ref().unwrap().remaining_ns;
        assert_eq!(left, Some(70 * SECOND));
        let ahead = Time { monotonic_ns: 7 * SECOND as i64, boottime_ns: 0 };
        records.objects.push(Thing::Time(ahead).into());
        records.processes[0].time = Some(0);
        assert_eq!(records.next_ring_ns(0), Some(3 * SECOND), "by the clock of its time namespace");
        let cpu = [libc::CLOCK_PROCESS_CPUTIME_ID as u64, 0, 0, 0, 0, 0];
        assert_eq!(one_thread(sleep(libc::SYS_clock_nanosleep, cpu, 1)).next_ring_ns(0), None);
    }

    #[test]
    fn an_expired_wait_returns_the_value_of_its_call() {
        let waiting = |call, left_ns, at| {
            let limit = TimeLimit { call, left_ns, at, microseconds: false };
            one_thread(Thread { time_limit: Some(limit), ..Thread::default() })
        };
        let rax = |records: &Records| records.processes[0].threads[0].registers.rax as i64;
        let mut epoll = waiting(libc::SYS_epoll_wait, 10, None);
        epoll.processes[0].threads[0].registers.rax = 77;
        epoll.let_pass(9);
        assert_eq!(rax(&epoll), 77, "the wait is not over and starts again");
        let left = |records: &Records| {
            records.processes[0].threads[0].time_limit.as_ref().map(|limit| limit.left_ns)
        };
        assert_eq!(left(&epoll), Some(1), "with the remaining time");
        epoll.let_pass(0);
        assert_eq!(left(&epoll), Some(1), "also if no time has passed");
        let mut signals = waiting(libc::SYS_rt_sigtimedwait, 10, None);
        signals.let_pass(10);
        assert_eq!(rax(&signals), -i64::from(libc::EAGAIN));
        let mut select = waiting(libc::SYS_select, 10, Some(0x1000));
        select.let_pass(4);
        let limit = select.processes[0].threads[0].time_limit.as_ref().unwrap();
        assert_eq!((limit.left_ns, limit.at), (6, Some(0x1000)), "memory is stale");
        let mut untouched = waiting(libc::SYS_select, 10, Some(0x1000));
        untouched.let_pass(0);
        assert_eq!(untouched.processes[0].threads[0].time_limit, None);
    }
}
