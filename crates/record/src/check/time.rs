//! Checks of time namespaces: each can be made, and its clocks can have the recorded values.

use super::{Found, ensure, object};
use crate::{CLOCK_MAX_NS, Object, Process, Records, Thing, Time};

/// LIMIT: time namespaces inside, and the number that are made one after the other.
const NAMESPACES_MAX: usize = 1024;
const GENERATIONS_MAX: usize = 32;

/// Checks that there are no more than a program could have made, and that each can be made.
pub(super) fn all(records: &Records) -> Found {
    let is_time = |object: &&Object| matches!(object.thing, Thing::Time(_));
    let count = records.objects.iter().filter(is_time).count();
    ensure(count <= NAMESPACES_MAX, || format!("{count} time namespaces"))?;
    // ORDER: before any chain of namespaces is followed: the number of processes is not checked
    // yet.
    let makers = records.processes.iter().filter(|p| p.time_for_children.is_some()).count();
    ensure(makers <= NAMESPACES_MAX, || format!("{makers} makers of time namespaces"))?;
    let made = records.times_made().ok_or("time namespaces that come from each other")?;
    let last = made.values().map(|made| made.generation).max().unwrap_or(0);
    ensure(last <= GENERATIONS_MAX, || format!("{last} time namespaces in each other"))
}

/// Checks that a process's time namespace, and that of its children, are such.
pub(super) fn of_process(process: &Process, records: &Records) -> Found {
    for namespace in [process.time, process.time_for_children].into_iter().flatten() {
        let is_time = matches!(object(namespace, records)?, Thing::Time(_));
        ensure(is_time, || "in no time namespace".into())?;
    }
    Ok(())
}

pub(super) fn time(time: &Time, records: &Records) -> Found {
    let about = &records.about;
    let clocks = [(about.monotonic_ns, time.monotonic_ns), (about.boottime_ns, time.boottime_ns)];
    let sound = |(own, ahead): (i64, i64)| {
        let now = own.checked_add(ahead);
        ahead.abs_diff(0) <= CLOCK_MAX_NS as u64
            && now.is_some_and(|now| (0..=CLOCK_MAX_NS).contains(&now))
    };
    ensure(clocks.into_iter().all(sound), || "its clocks".into())
}

#[cfg(test)]
mod tests {
    use super::super::records;
    use super::*;
    use crate::sample::small;

    /// A namespace with a process in it that has made another.
    fn namespaces() -> Records {
        let mut records = small();
        records.about.monotonic_ns = 10;
        let first = records.objects.len();
        let time = Time { monotonic_ns: -10, boottime_ns: 7 };
        records.objects.extend([Thing::Time(time).into(), Thing::Time(Time::default()).into()]);
        records.processes[0].time = Some(first);
        records.processes[0].time_for_children = Some(first + 1);
        records
    }

    #[test]
    fn invalid_time_namespaces_are_refused() {
        assert!(records(&namespaces()).is_ok());
        let first = small().objects.len();
        let said = |change: &dyn Fn(&mut Records)| {
            let mut all = namespaces();
            change(&mut all);
            records(&all).unwrap_err().to_string()
        };
        let clock = |time: Time| said(&|all| all.objects[first].thing = Thing::Time(time.clone()));
        for (monotonic_ns, boottime_ns) in [(-11, 0), (CLOCK_MAX_NS, 0), (0, -1), (i64::MIN, 0)] {
            assert!(clock(Time { monotonic_ns, boottime_ns }).contains("its clocks"));
        }
        assert!(said(&|all| all.processes[0].time = Some(0)).contains("no time namespace"));
        let own = said(&|all| all.processes[0].time = Some(first + 1));
        assert!(own.contains("come from each other"), "{own}");
        let many = said(&|all| {
            let one = all.objects[first].clone();
            all.objects.extend(std::iter::repeat_n(one, NAMESPACES_MAX));
        });
        assert!(many.contains("1026 time namespaces"), "{many}");
        // Each in the namespace that another has made: the check must not follow a chain of a
        // million.
        let chain = said(&|all| {
            for n in 0..1 << 20 {
                let (time, time_for_children) = (Some(first + n), Some(first + n + 1));
                all.processes.push(Process { time, time_for_children, ..Process::default() });
            }
        });
        assert!(chain.contains("1048577 makers"), "{chain}");
        // Two that have each made the namespace of the other; and two that have made the same.
        let second = |records: &mut Records, time, time_for_children| {
            let (pid, parent) = (2, 1);
            let other = Process { pid, parent, time, time_for_children, ..Process::default() };
            records.processes.push(other);
        };
        let circle = said(&|all| second(all, Some(first + 1), Some(first)));
        assert!(circle.contains("come from each other"), "{circle}");
        let twice = said(&|all| second(all, None, Some(first + 1)));
        assert!(twice.contains("come from each other"), "{twice}");
    }
}
