//! Checks of processes and threads.

use std::collections::{HashMap, HashSet};

use super::{
    BARRIERS, Found, NUMBER_MAX, PERSONALITIES, TASKS_MAX, address, cgroup_namespace, ensure, file,
    memory, object, path, system_v, time, user,
};
use crate::{Filter, INIT, PROGRAMS, Process, Records, Schedule, Signal, Table, Thing, Thread};

/// LIMIT: the number of a CPU.
const CPU_MAX: u32 = 8192;

pub(super) fn all(records: &Records) -> Found {
    let all = &records.processes;
    let tasks: usize = all.iter().map(|p| p.threads.len().max(1)).sum();
    ensure(tasks <= TASKS_MAX, || format!("{tasks} tasks"))?;
    let first = all.first().ok_or("there is none")?;
    let has_init = records.has_init();
    let is_first = match has_init {
        true => PROGRAMS.contains(&first.pid),
        false => (first.pid, first.parent) == (1, 0),
    };
    ensure(is_first, || "the first is not the first".into())?;
    ensure(first.ended.is_none(), || "the first has ended".into())?;
    let mut tids = HashSet::new();
    let mut memories = HashSet::new();
    let mut born: HashMap<u32, &Process> = HashMap::new();
    for process in all {
        let pid = process.pid;
        let said = |what: String| format!("process {pid}: {what}");
        ensure(pid > 0 && pid < NUMBER_MAX, || said("no process id".into()))?;
        let is_of_init = has_init && process.parent == INIT;
        let lives = |pid: &u32| born.get(pid).is_some_and(|process| process.ended.is_none());
        let parent_lives = pid == first.pid || is_of_init || lives(&process.parent);
        ensure(pid != INIT || !has_init, || said("in the place of the init".into()))?;
        ensure(parent_lives, || said(format!("its parent {} is not there", process.parent)))?;
        ensure(born.insert(pid, process).is_none(), || said("twice".into()))?;
        let ids = [process.session, process.group];
        ensure(ids.iter().all(|id| *id < NUMBER_MAX), || said("session or group".into()))?;
        ensure(process.name.len() < 64, || said("its name".into()))?;
        if process.ended.is_some() {
            let ids = process.ended_ids.map_or([0; 2], |(uid, gid)| [uid, gid]);
            ensure(ids.iter().all(|id| *id != u32::MAX), || said("its user".into()))?;
            tids.insert(pid);
            continue;
        }
        self::process(process, records, &mut tids).map_err(said)?;
        shares(process, &born).map_err(said)?;
        // What is made for an address space is bounded by its record.
        let is_own = process.memory.is_none_or(|n| memories.insert(n));
        ensure(is_own, || said("the memory of another process".into()))?;
    }
    Ok(())
}

fn process(process: &Process, records: &Records, tids: &mut HashSet<u32>) -> Found {
    let has_groups = records.objects.iter().any(|o| matches!(o.thing, Thing::Cgroups(_)));
    ensure(process.cgroup.is_none() || has_groups, || "in a control group of none".into())?;
    let memory = process.memory.and_then(|m| records.memories.get(m));
    ensure(memory.is_some(), || "no memory".into())?;
    // It would go on with the newborn's.
    ensure(memory.is_some_and(|m| m.program.is_some()), || "no program".into())?;
    ensure(process.threads.first().is_some_and(|t| t.tid == process.pid), || {
        "its first thread is another's".into()
    })?;
    for thread in &process.threads {
        let tid = thread.tid;
        ensure(tid > 0 && tid < NUMBER_MAX && tids.insert(tid), || format!("thread id {tid}"))?;
        ensure(thread.extended.0.len() <= 1 << 16, || "extended registers".into())?;
        ensure(thread.credentials.groups.len() <= 1 << 16, || "too many groups".into())?;
        ensure(thread.name.len() < 64, || "a thread's name".into())?;
        schedule(&thread.schedule)?;
        let sound = |f: &Filter| {
            let length = f.code.0.len();
            length.is_multiple_of(8) && (8..=4096 * 8).contains(&length) && f.flags & !2 == 0
        };
        let filters = &thread.filters;
        ensure(filters.len() <= 1024 && filters.iter().all(sound), || "a filter".into())?;
        ensure(thread.personality & !PERSONALITIES == 0, || "a personality".into())?;
        let sound = thread.restart.as_ref().map_or(Ok(()), address::is_wait);
        sound.map_err(|what| format!("thread {tid}: {what}"))?;
        let policy = thread.memory_error_policy;
        ensure(policy.is_none_or(|policy| policy < 3), || "a policy of memory errors".into())?;
        thread.memory_policy.as_ref().map_or(Ok(()), memory::policy)?;
        ensure(thread.login_uid != Some(u32::MAX), || "a login".into())?;
        if let Some(place) = &thread.place {
            ensure(place.umask <= 0o777, || "a thread's own place".into())?;
            object(place.directory, records).map(drop)?;
        }
        let mut signals = thread.pending.iter().chain(&process.pending);
        let good = |s: &Signal| s.info.0.len() == 128 && (1..=64).contains(&s.number());
        ensure(signals.all(good), || "a pending signal".into())?;
        // It would stop the restore.
        let is_stop = |signal: &Signal| signal.number() == libc::SIGSTOP;
        let is_at_rest = process.stopped.is_some() && !thread.pending.iter().any(is_stop);
        let stops = thread.pending.iter().chain(&process.pending).any(is_stop);
        ensure(is_at_rest || !stops, || "a pending SIGSTOP".into())?;
    }
    apart(process)?;
    for own in process.threads.iter().filter_map(Thread::own_table) {
        table(own, records).map_err(|what| format!("thread {}: {what}", own.task))?;
    }
    let numbers = table(process.table(), records)?;
    for lease in &process.leases {
        let is_known = (0..=2).contains(&lease.owner_kind) && (0..=64).contains(&lease.signal);
        let sound = is_known && lease.owner <= i32::MAX as u32 && numbers.contains(&lease.number);
        ensure(sound, || format!("a lease of {}", lease.number))?;
    }
    for notice in &process.notices {
        let is_known = (0..=2).contains(&notice.owner_kind) && (0..=64).contains(&notice.signal);
        let sound = is_known && notice.owner <= i32::MAX as u32 && numbers.contains(&notice.number);
        ensure(sound, || format!("the notices of {}", notice.number))?;
    }
    let score = process.oom_score_adj;
    ensure((-1000..=1000).contains(&score), || format!("oom_score_adj {score}"))?;
    let nice = process.autogroup_nice;
    ensure((-20..=19).contains(&nice), || format!("the nice value {nice} of its session"))?;
    ensure(process.limits.iter().all(|l| l.resource < 64), || "a limit".into())?;
    ensure(process.actions.iter().all(|a| (1..=64).contains(&a.signal)), || "an action".into())?;
    ensure(process.interval_timers.iter().all(|t| t.which < 3), || "a timer".into())?;
    ensure(process.barriers & !BARRIERS == 0, || "a registration of membarrier".into())?;
    ensure(process.write_or_execute <= 3, || "a rule of executable memory".into())?;
    ensure(process.timers.len() <= 1 << 16, || "too many timers".into())?;
    let is_uts = |n| object(n, records).map(|thing| matches!(thing, Thing::Uts(_)));
    ensure(process.uts.map_or(Ok(true), is_uts)?, || "in no UTS namespace".into())?;
    let is_mounts = |n| object(n, records).map(|thing| matches!(thing, Thing::Mounts(m) if !m.own));
    ensure(process.mounts.map_or(Ok(true), is_mounts)?, || "in no mount namespace".into())?;
    let is_ipc = |n| object(n, records).map(|thing| matches!(thing, Thing::Ipc(_)));
    ensure(process.ipc.map_or(Ok(true), is_ipc)?, || "in no IPC namespace".into())?;
    let is_net = |n| object(n, records).map(|thing| matches!(thing, Thing::Net(_)));
    ensure(process.net.map_or(Ok(true), is_net)?, || "in no network namespace".into())?;
    time::of_process(process, records)?;
    cgroup_namespace::of_process(process, records)?;
    user::process(process, records)?;
    let areas = memory.map_or(&[][..], |memory| &memory.areas);
    address::of_process(process, areas).map_err(|(tid, what)| format!("thread {tid}: {what}"))?;
    let stops = [libc::SIGSTOP, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];
    ensure(process.stopped.is_none_or(|signal| stops.contains(&signal)), || {
        "what has stopped it".into()
    })?;
    ensure(system_v::are_reached(areas, process.ipc, records), || {
        "memory of another IPC namespace".into()
    })?;
    let is_path = |root: &String| root.starts_with('/') && !root.contains('\0');
    ensure(process.root.as_ref().is_none_or(is_path), || "a root".into())?;
    process.root.as_ref().map_or(Ok(()), |root| path::leads_into(root, "its root"))?;
    object(process.directory.ok_or("no working directory")?, records).map(drop)
}

/// Checks the descriptors and locks of a table; returns the numbers of the descriptors.
fn table(table: Table<'_>, records: &Records) -> std::result::Result<HashSet<u32>, String> {
    let mut numbers = HashSet::new();
    for descriptor in table.descriptors {
        let number = descriptor.number;
        ensure(number < NUMBER_MAX && numbers.insert(number), || format!("descriptor {number}"))?;
        object(descriptor.object, records).map_err(|e| format!("descriptor {number}: {e}"))?;
    }
    for held in table.locks {
        ensure(numbers.contains(&held.number), || format!("a lock of {}", held.number))?;
        file::lock(&held.lock)?;
    }
    Ok(numbers)
}

/// Checks what threads have apart from their process. The first thread has everything of the process, and threads in
/// a user namespace inside are created when nothing can be given to them any more.
fn apart(process: &Process) -> Found {
    let (mut places, mut tables) = (HashSet::new(), HashSet::new());
    for thread in &process.threads {
        let tid = thread.tid;
        let found =
            (thread.place.is_some(), thread.place_of, thread.table.is_some(), thread.table_of);
        if found == (false, None, false, None) {
            continue;
        }
        ensure(tid != process.pid && process.user.is_none(), || {
            format!("thread {tid} has something to itself")
        })?;
        let sound = |has: bool, of: Option<u32>, known: &mut HashSet<u32>| {
            let is_one = of.is_none_or(|of| !has && known.contains(&of));
            is_one && (!has || known.insert(tid))
        };
        ensure(sound(found.0, found.1, &mut places), || format!("the directory of thread {tid}"))?;
        ensure(sound(found.2, found.3, &mut tables), || format!("the table of thread {tid}"))?;
    }
    Ok(())
}

/// Checks the resources that a process shares with an earlier one: both records have the same contents of them, and
/// the restore can make the two processes share (clone(2), setns(2)).
fn shares(process: &Process, earlier: &HashMap<u32, &Process>) -> Found {
    let owner = |of: Option<u32>, is_owner: fn(&Process) -> bool| {
        let Some(pid) = of else { return Ok(None) };
        // Parents come before their children, and an owner before those that share with it.
        let found = earlier
            .get(&pid)
            .copied()
            .filter(|one| one.pid != process.pid && one.ended.is_none() && is_owner(one));
        found.map(Some).ok_or_else(|| format!("what it shares with process {pid} is not there"))
    };
    if let Some(of) = owner(process.table_of, |one| one.table_of.is_none())? {
        let is_same = process.descriptors == of.descriptors;
        ensure(is_same, || format!("other descriptors than process {}", of.pid))?;
        let is_inside = process.user.is_some() || of.user.is_some();
        ensure(!is_inside, || "descriptors shared in a user namespace".into())?;
    }
    if let Some(of) = owner(process.undo_of, |one| one.undo_of.is_none())? {
        // A task leaves them when it enters a namespace.
        let is_apart = process.ipc.is_some() || of.ipc.is_some();
        ensure(!is_apart, || "undo values shared in an IPC namespace".into())?;
    }
    owner(process.io_of, |one| one.io_of.is_none())?;
    if let Some(of) = owner(process.place_of, |one| one.place_of.is_none())? {
        let place = |one: &Process| (one.directory, one.umask);
        ensure(place(process) == place(of), || {
            format!("another directory than process {}", of.pid)
        })?;
        // The kernel lets no task that shares them enter a namespace of either kind.
        let is_apart = |one: &Process| one.user.is_some() || one.mounts.is_some();
        ensure(!is_apart(process) && !is_apart(of), || "a directory shared in a namespace".into())?;
        let has_root = process.root.is_some() || of.root.is_some();
        ensure(!has_root, || "a directory shared below another root".into())?;
    }
    Ok(())
}

fn schedule(schedule: &Schedule) -> Found {
    let known = [0, 1, 2, 3, 5]; // OTHER, FIFO, RR, BATCH, IDLE
    ensure(known.contains(&schedule.policy), || "a scheduling policy".into())?;
    ensure(schedule.priority < 100, || "a priority".into())?;
    let cpus = &schedule.cpus;
    let fits = cpus.len() <= CPU_MAX as usize && cpus.iter().all(|cpu| *cpu < CPU_MAX);
    ensure(fits, || "the CPUs of a thread".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::small;
    use crate::{Descriptor, HeldLock, Lock, LockKind, OwnPlace, OwnTable};

    /// A change of something valid, and a part of the error.
    type Case<T> = (fn(&mut T), &'static str);

    /// A first process, and a child that shares its descriptors and its directory.
    fn two() -> Records {
        let mut all = small();
        all.processes[0].descriptors =
            vec![Descriptor { number: 3, object: 0, close_on_exec: false }];
        let mut child = all.processes[0].clone();
        (child.pid, child.parent, child.threads[0].tid) = (2, 1, 2);
        (child.table_of, child.place_of) = (Some(1), Some(1));
        child.memory = Some(all.memories.len());
        all.memories.push(all.memories[0].clone());
        all.processes.push(child);
        all
    }

    #[test]
    fn threads_share_what_an_earlier_thread_has_to_itself() {
        let check = |change: fn(&mut Process)| {
            let mut all = small();
            let process = &mut all.processes[0];
            let threads = [2, 3].map(|tid| Thread { tid, ..Thread::default() });
            process.threads.extend(threads);
            let own = Descriptor { number: 3, object: 0, close_on_exec: false };
            process.threads[1].table = Some(OwnTable { descriptors: vec![own], locks: Vec::new() });
            process.threads[1].place = Some(OwnPlace { directory: 0, umask: 0 });
            (process.threads[2].table_of, process.threads[2].place_of) = (Some(2), Some(2));
            change(process);
            super::all(&all).err().unwrap_or_default()
        };
        assert_eq!(check(|_| {}), "");
        let cases: [Case<Process>; 9] = [
            (|it| it.threads[2].table_of = Some(3), "the table of thread 3"),
            (|it| it.threads[2].place_of = Some(1), "the directory of thread 3"),
            (|it| it.threads[1].table_of = Some(1), "the table of thread 2"),
            (|it| it.threads[2].place = it.threads[1].place.clone(), "the directory of thread 3"),
            (|it| it.threads[0].table = Some(OwnTable::default()), "thread 1 has something"),
            (|it| it.threads[0].place_of = Some(1), "thread 1 has something"),
            (|it| it.threads[1].place.as_mut().unwrap().umask = 0o1000, "own place"),
            (
                |it| it.threads[1].table.as_mut().unwrap().descriptors[0].object = 99,
                "thread 2: descriptor 3: object 99",
            ),
            (
                |it| {
                    let lock = Lock { kind: LockKind::Process, writes: true, start: 0, end: None };
                    let locks = &mut it.threads[1].table.as_mut().unwrap().locks;
                    locks.push(HeldLock { number: 4, lock });
                },
                "thread 2: a lock of 4",
            ),
        ];
        for (change, why) in cases {
            let found = check(change);
            assert!(found.contains(why), "{found:?} for {why:?}");
        }
    }

    #[test]
    fn shared_resources_are_those_of_an_earlier_process() {
        let check = |change: fn(&mut Vec<Process>)| {
            let mut all = two();
            change(&mut all.processes);
            super::all(&all).err().unwrap_or_default()
        };
        assert_eq!(check(|_| {}), "");
        let cases: [Case<Vec<Process>>; 15] = [
            (|all| all[1].memory = all[0].memory, "process 2: the memory of another process"),
            (|all| all[0].io_of = Some(2), "process 1: what it shares with process 2"),
            (|all| all[1].undo_of = Some(7), "with process 7 is not there"),
            (|all| all[1].table_of = Some(2), "with process 2 is not there"),
            (|all| all[1].place_of = Some(7), "with process 7 is not there"),
            (|all| all[0].table_of = Some(2), "process 1: what it shares with process 2"),
            (|all| all[0].place_of = Some(1), "process 1: what it shares with process 1"),
            (|all| all[1].descriptors.clear(), "other descriptors than process 1"),
            (|all| all[1].descriptors[0].close_on_exec = true, "other descriptors"),
            (|all| all[0].descriptors.clear(), "other descriptors"),
            (|all| all[1].umask = 1, "another directory than process 1"),
            (|all| all[0].umask = 1, "another directory"),
            (|all| all[0].root = Some("/a".into()), "below another root"),
            (|all| all[1].root = Some("/a".into()), "below another root"),
            (
                |all| {
                    let mut third = all[1].clone();
                    (third.pid, third.threads[0].tid, third.table_of) = (3, 3, Some(2));
                    all.push(third);
                },
                "with process 2 is not there",
            ),
        ];
        for (change, why) in cases {
            let found = check(change);
            assert!(found.contains(why), "{found:?} for {why:?}");
        }
    }
}
