//! Checks of processes and threads.

use std::collections::{HashMap, HashSet};

use super::{
    BARRIERS, Found, NUMBER_MAX, PERSONALITIES, TASKS_MAX, address, cgroup_namespace, ensure, file,
    object, path, system_v, time, user,
};
use crate::{Filter, INIT, PROGRAMS, Process, Records, Schedule, Signal, Thing};

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
    let mut born: HashMap<u32, bool> = HashMap::new();
    for process in all {
        let pid = process.pid;
        let said = |what: String| format!("process {pid}: {what}");
        ensure(pid > 0 && pid < NUMBER_MAX, || said("no process id".into()))?;
        let is_of_init = has_init && process.parent == INIT;
        let parent_lives =
            pid == first.pid || is_of_init || born.get(&process.parent) == Some(&true);
        ensure(pid != INIT || !has_init, || said("in the place of the init".into()))?;
        ensure(parent_lives, || said(format!("its parent {} is not there", process.parent)))?;
        ensure(born.insert(pid, process.ended.is_none()).is_none(), || said("twice".into()))?;
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
        if let Some(place) = &thread.place {
            ensure(tid != process.pid && place.umask <= 0o777, || "a thread's own place".into())?;
            object(place.directory, records).map(drop)?;
        }
        let mut signals = thread.pending.iter().chain(&process.pending);
        let good = |s: &Signal| s.info.0.len() == 128 && (1..=64).contains(&s.number());
        ensure(signals.all(good), || "a pending signal".into())?;
    }
    let mut numbers = HashSet::new();
    for descriptor in &process.descriptors {
        let number = descriptor.number;
        ensure(number < NUMBER_MAX && numbers.insert(number), || format!("descriptor {number}"))?;
        object(descriptor.object, records).map_err(|e| format!("descriptor {number}: {e}"))?;
    }
    for held in &process.locks {
        ensure(numbers.contains(&held.number), || format!("a lock of {}", held.number))?;
        file::lock(&held.lock)?;
    }
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

fn schedule(schedule: &Schedule) -> Found {
    let known = [0, 1, 2, 3, 5]; // OTHER, FIFO, RR, BATCH, IDLE
    ensure(known.contains(&schedule.policy), || "a scheduling policy".into())?;
    ensure(schedule.priority < 100, || "a priority".into())?;
    let cpus = &schedule.cpus;
    let fits = cpus.len() <= CPU_MAX as usize && cpus.iter().all(|cpu| *cpu < CPU_MAX);
    ensure(fits, || "the CPUs of a thread".into())
}
