//! The records of a twin: those of its checkpoint, without everything that has an effect beyond the twin.
//!
//! Whatever is held back is replaced here, before anything is restored, so that the restore of a twin is
//! the restore of other records by the same code. A container in which that is not enough has no twin, and
//! [`records`] names the cause. `docs/state.md` lists both.
//!
//! | held back | because |
//! |---|---|
//! | sockets, named pipes | a path leads to the socket or pipe of the original, and a packet to its peers |
//! | standard streams, terminals | they are shared with the engine, with the container's devpts |
//! | locks | the original holds them |
//! | contents of a tmpfs | the tmpfs of the original is mounted, with its contents |
//! | contents of memory | a second copy may not fit; checksums cover them |
//! | contexts of asynchronous I/O, whose rings become anonymous memory | the host limits all requests |
//! | locked memory | the kernel would fill it with pages |
//! | the times of timers and of interrupted waits | none expires while the twin exists |
//! | the score of the OOM killer | the twin is the first to be killed |
//!
//! An open file of these kinds becomes a timerfd, which keeps its number, its duplicates and its items in
//! an epoll. A timerfd that is not armed is never ready, neither for reading nor for writing: a poll(2) for it goes on,
//! and is compared.

use dormouse_record::{
    Area, Backing, File, Memory, PAGE_BYTES, Process, Records, Run, Thing, Thread, TimeLimit,
    TimerFd,
};

use crate::remaining;

/// A time that no twin exists for: a day.
const LATER_NS: u64 = 86_400_000_000_000;
/// Events of inotify(7) that the restore of a file may cause: IN_ACCESS, IN_CLOSE_WRITE, IN_CLOSE_NOWRITE,
/// IN_OPEN.
const REPORTS_OPENS: u32 = 0x1 | 0x8 | 0x10 | 0x20;
/// Events that the contents of a file cause: IN_MODIFY, IN_ATTRIB.
const REPORTS_CHANGES: u32 = 0x2 | 0x4;
/// The highest value of `/proc/PID/oom_score_adj`.
const FIRST_TO_BE_KILLED: i32 = 1000;

/// Returns the records of a twin; or the object for which a container has none.
///
/// LIMIT: files that processes outside the container watch or lease are opened as by any restore.
pub(super) fn records(records: &Records) -> Result<Records, String> {
    if let Some(object) = obstacle(records) {
        return Err(object);
    }
    let mut twin = records.clone();
    twin.about.network = None;
    let is_held: Vec<bool> =
        records.objects.iter().map(|object| is_held_back(records, &object.thing)).collect();
    for (object, is_held) in twin.objects.iter_mut().zip(&is_held) {
        object.file_locks.clear();
        if *is_held {
            *object = placeholder(&object.thing).into();
        }
        reduce(&mut object.thing);
    }
    let mounts = records.objects.iter().map(|object| matches!(object.thing, Thing::Mounts(_)));
    let is_mounts: Vec<bool> = mounts.collect();
    for object in &mut twin.objects {
        // The mounts that processes have added are there.
        if let Thing::File(File { namespace, .. }) = &mut object.thing {
            namespace.take_if(|namespace| is_mounts.get(*namespace) == Some(&true));
        }
    }
    for process in &mut twin.processes {
        of_process(process, &is_held);
    }
    for (n, memory) in twin.memories.iter_mut().enumerate() {
        let threads = records.processes.iter().filter(|process| process.memory == Some(n));
        let wanted: Vec<u64> =
            threads.flat_map(|process| &process.threads).flat_map(pointers).collect();
        without_rings(memory, records);
        of_memory(memory, &wanted);
    }
    Ok(twin)
}

/// An object because of which a container has no twin.
fn obstacle(records: &Records) -> Option<String> {
    if records.processes.iter().any(|process| !process.leases.is_empty()) {
        return Some("a lease of a file (F_SETLEASE)".into());
    }
    // The restore of a deleted file writes to one without a name, which is in the directory of such a watch.
    let has_deleted = records.objects.iter().any(|it| matches!(it.thing, Thing::Deleted(_)));
    let reports = REPORTS_OPENS | if has_deleted { REPORTS_CHANGES } else { 0 };
    let has_huge = |area: &Area| matches!(area.backing, Backing::Huge { .. });
    if records.memories.iter().flat_map(|memory| &memory.areas).any(has_huge) {
        return Some("memory of huge pages".into());
    }
    records.objects.iter().find_map(|object| match &object.thing {
        Thing::Inotify(inotify) => {
            let watch = inotify.watches.iter().find(|watch| watch.mask & reports != 0)?;
            Some(format!("an inotify watch of '{}' that reports opened files", watch.path))
        }
        Thing::MemoryFile(file) if file.huge_page_bytes.is_some() => {
            Some(format!("the memory file '{}' of huge pages", file.name))
        }
        Thing::Deleted(file) if file.mode & libc::S_IFMT == libc::S_IFDIR => {
            Some(format!("a deleted directory, once in '{}'", file.place))
        }
        Thing::Mounts(mounts) if !mounts.own => Some(name(&object.thing)),
        Thing::Fanotify(_) | Thing::Net(_) | Thing::Cgroups(_) | Thing::CgroupNamespace(_) => {
            Some(name(&object.thing))
        }
        _ => None,
    })
}

fn name(thing: &Thing) -> String {
    format!("{} inside", thing.name())
}

/// Whether an object is held back.
fn is_held_back(records: &Records, thing: &Thing) -> bool {
    match thing {
        Thing::External(_)
        | Thing::Terminal(_)
        | Thing::TerminalSide(_)
        | Thing::Tmpfs(_)
        | Thing::Mounts(_)
        | Thing::AioContext(_) => true,
        Thing::Pipe(pipe) => pipe.path.is_some(),
        Thing::PipeEnd(end) => {
            let pipe = records.objects.get(end.pipe).map(|object| &object.thing);
            matches!(pipe, Some(Thing::Pipe(pipe)) if pipe.path.is_some())
        }
        other => other.is_socket(),
    }
}

/// The object in the place of one that is held back.
fn placeholder(thing: &Thing) -> Thing {
    let flags = match thing {
        Thing::External(it) => it.flags,
        Thing::TerminalSide(it) => it.flags,
        Thing::PipeEnd(it) => it.flags,
        _ => 0,
    };
    let flags = flags & libc::O_NONBLOCK as u32 | libc::O_RDWR as u32;
    let clock = libc::CLOCK_MONOTONIC;
    let (ticks, value_ns, interval_ns, cancelled_at_set_ns) = (0, 0, 0, None);
    Thing::Timer(TimerFd { flags, clock, ticks, value_ns, interval_ns, cancelled_at_set_ns })
}

/// Takes from an object what a twin does not have.
fn reduce(thing: &mut Thing) {
    match thing {
        Thing::File(file) => file.locks.clear(),
        Thing::SharedMemory(memory) => memory.runs.clear(),
        Thing::SystemVMemory(memory) => memory.runs.clear(),
        Thing::MemoryFile(file) => file.runs.clear(),
        Thing::Deleted(file) => file.runs.clear(),
        Thing::Inotify(inotify) => inotify.held = false,
        Thing::Timer(timer) if is_due(timer.value_ns) => {
            timer.value_ns += LATER_NS;
            let end = timer.cancelled_at_set_ns.as_mut();
            end.into_iter().for_each(|at| *at = at.saturating_add(LATER_NS));
        }
        _ => {}
    }
}

fn of_process(process: &mut Process, is_held: &[bool]) {
    process.locks.clear();
    for table in process.threads.iter_mut().filter_map(|thread| thread.table.as_mut()) {
        table.locks.clear();
    }
    process.mounts = None;
    let held = process.descriptors.iter().filter(|one| is_held.get(one.object) == Some(&true));
    let held: Vec<u32> = held.map(|one| one.number).collect();
    process.notices.retain(|notice| !held.contains(&notice.number));
    process.threads.iter_mut().for_each(put_off);
    if process.ended.is_none() {
        process.oom_score_adj = FIRST_TO_BE_KILLED;
    }
    for timer in process.timers.iter_mut().filter(|timer| is_due(timer.value_ns)) {
        timer.value_ns += LATER_NS;
    }
    let is_due_us = |us: u64| is_due(us.saturating_mul(1000));
    for timer in process.interval_timers.iter_mut().filter(|timer| is_due_us(timer.value_us)) {
        timer.value_us += LATER_NS / 1000;
    }
}

/// Puts off the end of an interrupted wait, which a restore begins again, or ends if its time is over by then.
fn put_off(thread: &mut Thread) {
    // Another call ends at a moment that it has been given.
    let is_put_off =
        |limit: &&mut TimeLimit| remaining::register(limit).is_some() && limit.left_ns < LATER_NS;
    if let Some(limit) = thread.time_limit.as_mut().filter(is_put_off) {
        limit.left_ns += LATER_NS;
    }
    let Some(restart) = &mut thread.restart else { return };
    // That of a futex may be a time of a clock.
    let is_futex = restart.call == libc::SYS_futex;
    let left = restart.remaining_ns.as_mut().filter(|left| is_futex || **left < LATER_NS);
    left.into_iter().for_each(|left| *left = left.saturating_add(LATER_NS));
}

/// Whether a timer with this time left could expire while a twin exists.
fn is_due(left_ns: u64) -> bool {
    (1..LATER_NS).contains(&left_ns)
}

/// Addresses of memory that the kernel reads for a thread: arguments of its call, its stack, its rseq.
fn pointers(thread: &Thread) -> Vec<u64> {
    let it = &thread.registers;
    let rseq = thread.rseq.as_ref().map(|rseq| rseq.address);
    let all = [it.rdi, it.rsi, it.rdx, it.r10, it.r8, it.r9, it.rsp];
    all.into_iter().chain(rseq).collect()
}

/// Bytes behind such an address that are read, at most.
const READ_BYTES: u64 = 256;

/// Puts anonymous memory in the place of rings of asynchronous I/O. No process leads to their contexts then, so none
/// is made.
fn without_rings(memory: &mut Memory, records: &Records) {
    for area in &mut memory.areas {
        if let Backing::Shared { object, .. } = area.backing
            && let Some(Thing::AioContext(_)) = records.objects.get(object).map(|it| &it.thing)
        {
            area.backing = Backing::Anonymous;
            area.flags.clear();
        }
    }
}

/// Leaves only the pages with one of these addresses.
fn of_memory(memory: &mut Memory, wanted: &[u64]) {
    memory.locks_later = 0;
    let mut pages: Vec<u64> = wanted
        .iter()
        .flat_map(|at| [*at, at.saturating_add(READ_BYTES)])
        .map(|at| at / PAGE_BYTES * PAGE_BYTES)
        .collect();
    pages.sort_unstable();
    pages.dedup();
    for area in &mut memory.areas {
        area.flags.retain(|flag| flag != "lo" && flag != "lf");
        let runs = std::mem::take(&mut area.runs);
        let from = pages.partition_point(|page| *page < area.start);
        area.runs = pages[from..]
            .iter()
            .take_while(|page| **page < area.end)
            .filter_map(|page| {
                let next = runs.partition_point(|run| run.address <= *page);
                let run = runs[..next].last()?;
                if *page >= run.address + run.pages * PAGE_BYTES {
                    return None;
                }
                let first = run.first + (page - run.address) / PAGE_BYTES;
                Some(Run { address: *page, pages: 1, first })
            })
            .collect();
    }
}

#[cfg(test)]
mod tests {
    use dormouse_record::{Descriptor, Inotify, Lease, Pipe, PipeEnd, Restart, Watch, sample};

    use super::*;

    fn with(thing: Thing) -> Records {
        let mut all = sample::small();
        all.objects.push(thing.into());
        all
    }

    #[test]
    fn containers_without_a_twin_are_named_by_the_object() {
        let watch = |mask| Watch { number: 1, path: "/w".into(), mask };
        let inotify =
            |mask| Thing::Inotify(Inotify { flags: 0, watches: vec![watch(mask)], held: true });
        assert!(records(&with(inotify(0x20))).unwrap_err().contains("'/w'"));
        assert!(records(&with(inotify(0x2))).is_ok());
        let mut leased = sample::small();
        let (owner_kind, signal) = (0, 0);
        let lease = Lease { number: 3, writes: true, owner_kind, owner: 1, signal };
        leased.processes[0].leases.push(lease);
        assert!(records(&leased).unwrap_err().contains("lease"));
    }

    #[test]
    fn named_pipe_and_its_ends_become_timers() {
        let pipe = |path: Option<&str>| {
            let mut all = with(Thing::Pipe(Pipe {
                capacity_bytes: 65_536,
                content: Default::default(),
                packets: Vec::new(),
                path: path.map(str::to_owned),
                deleted: None,
            }));
            let pipe = all.objects.len() - 1;
            let flags = (libc::O_WRONLY | libc::O_NONBLOCK) as u32;
            all.objects.push(Thing::PipeEnd(PipeEnd { pipe, writes: true, flags }).into());
            let object = pipe + 1;
            let close_on_exec = false;
            all.processes[0].descriptors = vec![Descriptor { number: 9, object, close_on_exec }];
            let twin = records(&all).unwrap();
            [pipe, object].map(|n| twin.objects[n].thing.clone())
        };
        assert!(matches!(pipe(None), [Thing::Pipe(_), Thing::PipeEnd(_)]));
        let [one, two] = pipe(Some("/f"));
        assert!(matches!(one, Thing::Timer(_)));
        let expected = (libc::O_RDWR | libc::O_NONBLOCK) as u32;
        assert!(matches!(two, Thing::Timer(TimerFd { flags, .. }) if flags == expected));
    }

    #[test]
    fn armed_timers_are_put_off_and_disarmed_ones_are_not() {
        let left = |value_ns| {
            let (flags, clock, ticks, interval_ns) = (0, 1, 0, 5);
            let cancelled_at_set_ns = None;
            let timer = TimerFd { flags, clock, ticks, value_ns, interval_ns, cancelled_at_set_ns };
            let twin = records(&with(Thing::Timer(timer))).unwrap();
            match &twin.objects.last().unwrap().thing {
                Thing::Timer(timer) => timer.value_ns,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!([left(0), left(7), left(u64::MAX)], [0, LATER_NS + 7, u64::MAX]);
    }

    #[test]
    fn interrupted_wait_is_put_off_if_it_ends() {
        let left = |remaining_ns| {
            let mut all = sample::small();
            let restart = Restart { call: libc::SYS_poll, args: [0; 6], remaining_ns };
            all.processes[0].threads[0].restart = Some(restart);
            let twin = records(&all).unwrap();
            twin.processes[0].threads[0].restart.as_ref().unwrap().remaining_ns
        };
        let all = [Some(0), Some(7), Some(u64::MAX), None].map(left);
        assert_eq!(all, [Some(LATER_NS), Some(LATER_NS + 7), Some(u64::MAX), None]);
    }

    #[test]
    fn time_limit_of_a_call_is_put_off_if_it_ends() {
        let left = |call, left_ns| {
            let mut all = sample::small();
            let limit = TimeLimit { call, left_ns, at: None, microseconds: false };
            all.processes[0].threads[0].time_limit = Some(limit);
            let twin = records(&all).unwrap();
            twin.processes[0].threads[0].time_limit.as_ref().unwrap().left_ns
        };
        let of_epoll = [0, 7, u64::MAX].map(|ns| left(libc::SYS_epoll_wait, ns));
        assert_eq!(of_epoll, [LATER_NS, LATER_NS + 7, u64::MAX]);
        assert_eq!(left(libc::SYS_clock_nanosleep, 7), 7, "until a moment of a clock");
    }

    #[test]
    fn pages_remain_where_a_register_points() {
        let mut memory = Memory::default();
        memory.areas.push(Area {
            start: 0x10_000,
            end: 0x20_000,
            access: 3,
            backing: Backing::Anonymous,
            flags: vec!["lo".into(), "gd".into()],
            runs: vec![Run { address: 0x10_000, pages: 4, first: 7 }],
        });
        of_memory(&mut memory, &[0x12_ff8, 0x50_000]);
        let area = &memory.areas[0];
        let runs: Vec<(u64, u64)> = area.runs.iter().map(|run| (run.address, run.first)).collect();
        assert_eq!(runs, [(0x12_000, 9), (0x13_000, 10)]);
        assert_eq!(area.flags, ["gd"]);
    }
}
