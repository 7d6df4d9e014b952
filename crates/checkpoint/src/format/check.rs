//! Checks of records: every number that refers to something has a valid target, and no value
//! exceeds the range that the kernel could have reported.
//!
//! A checksum only detects accidental changes. The restore relies on these checks: it indexes, adds
//! and multiplies with checked numbers.

mod address;
mod cgroup;
mod cgroup_namespace;
mod mount;
mod mqueue;
mod net;
mod path;
mod socket;
mod system_v;
mod time;
mod tmpfs;
mod user;

pub(crate) use address::of_process as addresses;
pub(crate) use path::of_thing as paths;

use std::collections::{HashMap, HashSet};

use dormouse_kernel::call::TERMIOS_BYTES;

use super::{
    About, Area, Backing, Bytes, Deleted, Filter, INIT, Lock, Memory, PAGE_BYTES, PROGRAMS, Pages,
    Process, Records, Run, Schedule, Terminal, Thing, TmpfsKind,
};
use crate::clock::CLOCK_MAX_NS;
use crate::error::{Error, Result};

/// The end of user memory on x86_64 with four-level tables.
pub const USER_END: u64 = 0x7fff_ffff_f000;
/// LIMIT: processes and threads of a checkpoint.
pub const TASKS_MAX: usize = 1 << 16;
/// LIMIT: a process id, and the number of a descriptor.
const NUMBER_MAX: u32 = 1 << 22;
/// LIMIT: bytes of a text.
const TEXT_MAX: usize = 4096;
/// LIMIT: bytes in one socket or pipe.
const CONTENT_MAX: usize = 64 << 20;
/// LIMIT: numbers of terminals, which are made one after the other.
const TERMINALS_MAX: u32 = 1024;
/// LIMIT: bytes in flight in a terminal, in one direction.
pub const ON_THE_WAY_MAX: usize = 256 << 10;
/// LIMIT: bytes of a file.
const FILE_BYTES_MAX: u64 = 1 << 62;

/// LIMIT: the number of a CPU.
const CPU_MAX: u32 = 8192;
/// The allowed values of personality(2): Linux, with 64 or 32 bits, and flags that only change the
/// process's own view.
pub const PERSONALITIES: u32 = 0x0ff6_0000 | 8;

/// Commands of membarrier(2) that register: GLOBAL_EXPEDITED, and PRIVATE_EXPEDITED alone, with SYNC_CORE and
/// with RSEQ.
pub const BARRIERS: u32 = 1 << 2 | 1 << 4 | 1 << 6 | 1 << 8;

/// Checks all records.
pub fn records(records: &Records) -> Result<()> {
    let part = |section: &str| format!("section '{section}'");
    let pages = &records.pages;
    if !pages.is_whole() {
        return Err(Error::damaged(part("page"), "checksums for another number of pages"));
    }
    mount::number(records).map_err(|what| Error::damaged(part("object"), what))?;
    net::number(records).map_err(|what| Error::damaged(part("object"), what))?;
    net::pairs(records).map_err(|what| Error::damaged(part("object"), what))?;
    cgroup_namespace::number(records).map_err(|what| Error::damaged(part("object"), what))?;
    time::all(records).map_err(|what| Error::damaged(part("object"), what))?;
    user::number(records).map_err(|what| Error::damaged(part("object"), what))?;
    about(&records.about).map_err(|what| Error::damaged(part("about"), what))?;
    for (n, memory) in records.memories.iter().enumerate() {
        check_memory(memory, records)
            .map_err(|what| Error::damaged(part("memory"), format!("number {n}: {what}")))?;
    }
    processes(records).map_err(|what| Error::damaged(part("process"), what))?;
    for (n, object) in records.objects.iter().enumerate() {
        let sound = check_object(n, &object.thing, records);
        let sound = sound.and_then(|()| net::place(object, records));
        sound.and_then(|()| user::owner(object, records)).map_err(|what| {
            let name = object.thing.name();
            Error::damaged(part("object"), format!("number {n} ({name}): {what}"))
        })?;
    }
    Ok(())
}

type Found = std::result::Result<(), String>;

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Found {
    if holds { Ok(()) } else { Err(what()) }
}

fn about(about: &About) -> Found {
    let clock = |ns: i64| (0..=CLOCK_MAX_NS).contains(&ns);
    ensure(clock(about.monotonic_ns) && clock(about.boottime_ns), || "its clocks".into())?;
    let image = &about.vdso_image.0;
    let is_whole = image.is_empty() || crate::vdso::hash(image) == about.vdso;
    let bytes = image.len() as u64;
    let fits = bytes.is_multiple_of(PAGE_BYTES) && bytes <= crate::vdso::IMAGE_BYTES_MAX;
    ensure(is_whole && fits, || "the kernel's object".into())?;
    let offset = |ns: i64| (-CLOCK_MAX_NS..=CLOCK_MAX_NS).contains(&ns);
    let offsets = offset(about.monotonic_offset_ns) && offset(about.boottime_offset_ns);
    ensure(offsets, || "the offsets of its clocks".into())?;
    about
        .network
        .as_ref()
        .map_or(Ok(()), |network| net::net(network).map_err(|what| format!("its network: {what}")))
}

fn processes(records: &Records) -> Found {
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
            tids.insert(pid);
            continue;
        }
        check_process(process, records, &mut tids).map_err(said)?;
    }
    Ok(())
}

fn check_process(process: &Process, records: &Records, tids: &mut HashSet<u32>) -> Found {
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
        check_schedule(&thread.schedule)?;
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
        let good = |s: &super::Signal| s.info.0.len() == 128 && (1..=64).contains(&s.number());
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
        check_lock(&held.lock)?;
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

fn check_schedule(schedule: &Schedule) -> Found {
    let known = [0, 1, 2, 3, 5]; // OTHER, FIFO, RR, BATCH, IDLE
    ensure(known.contains(&schedule.policy), || "a scheduling policy".into())?;
    ensure(schedule.priority < 100, || "a priority".into())?;
    let cpus = &schedule.cpus;
    let fits = cpus.len() <= CPU_MAX as usize && cpus.iter().all(|cpu| *cpu < CPU_MAX);
    ensure(fits, || "the CPUs of a thread".into())
}

fn object(n: usize, records: &Records) -> std::result::Result<&Thing, String> {
    records.objects.get(n).map(|o| &o.thing).ok_or_else(|| format!("object {n} is not there"))
}

/// Checks that an IPC namespace exists; `None` is the container's own.
fn in_ipc(namespace: Option<usize>, records: &Records) -> Found {
    let Some(n) = namespace else { return Ok(()) };
    ensure(matches!(object(n, records)?, Thing::Ipc(_)), || "in no IPC namespace".into())
}

fn check_memory(memory: &Memory, records: &Records) -> Found {
    let mut end = 0;
    ensure(memory.areas.len() <= 1 << 20, || "too many areas".into())?;
    for area in &memory.areas {
        let said = |what: &str| format!("area at {:x}: {what}", area.start);
        let aligned = [area.start, area.end].iter().all(|a| a.is_multiple_of(PAGE_BYTES));
        ensure(aligned, || said("not of whole pages"))?;
        let inside = area.start >= end && area.start < area.end && area.end <= USER_END;
        ensure(inside, || said("overlaps another or nothing"))?;
        ensure(area.access <= 7, || said("access"))?;
        end = area.end;
        check_area(area, records).map_err(|what| said(&what))?;
    }
    let mut end = 0;
    for (first, behind) in memory.guards.iter().copied() {
        let aligned = first.is_multiple_of(PAGE_BYTES) && behind.is_multiple_of(PAGE_BYTES);
        let in_order = first >= end && first < behind;
        // The restore itself may lie where no area is.
        let next = memory.areas.partition_point(|area| area.end <= first);
        let mut covered = first;
        for area in memory.areas[next..].iter().take_while(|area| area.start < behind) {
            covered = if area.start <= covered { area.end } else { covered };
        }
        ensure(aligned && in_order && covered >= behind, || format!("guards at {first:x}"))?;
        end = behind;
    }
    if let Some((start, bytes)) = memory.vdso {
        let fits = start.is_multiple_of(PAGE_BYTES) && bytes <= 1 << 20 && start < USER_END - bytes;
        ensure(fits, || "the kernel's object".into())?;
    }
    address::of_layout(&memory.layout)?;
    ensure(memory.auxv.0.len() <= 4096, || "the auxiliary vector".into())?;
    match memory.program {
        Some(n) => ensure(matches!(object(n, records)?, Thing::File(_)), || "program".into()),
        None => Ok(()),
    }
}

fn check_area(area: &Area, records: &Records) -> Found {
    runs(&area.runs, area.start, area.end, &records.pages)?;
    match area.backing {
        Backing::Anonymous => Ok(()),
        Backing::Huge { page_bytes } => {
            huge_page(page_bytes)?;
            let whole = [area.start, area.end].iter().all(|at| at.is_multiple_of(page_bytes));
            ensure(whole, || "not of whole pages".into())
        }
        Backing::Private { object: n, offset } => {
            ensure(offset.is_multiple_of(PAGE_BYTES), || "offset".into())?;
            ensure(matches!(object(n, records)?, Thing::File(_) | Thing::Device(_)), || {
                "maps an object that is not a file".into()
            })
        }
        Backing::Shared { object: n, offset } => {
            ensure(area.runs.is_empty(), || "pages of its own".into())?;
            ensure(offset.is_multiple_of(PAGE_BYTES), || "offset".into())?;
            match object(n, records)? {
                Thing::SystemVMemory(memory) => {
                    let whole = memory.bytes.next_multiple_of(PAGE_BYTES);
                    ensure(offset == 0 && area.bytes() == whole, || "a part of it".into())
                }
                Thing::File(_) => Ok(()),
                Thing::SharedMemory(memory) => {
                    let end = offset.checked_add(area.bytes());
                    ensure(end.is_some_and(|end| end <= memory.bytes), || "beyond the end".into())
                }
                _ => Err("maps an object that is not a file".into()),
            }
        }
    }
}

/// LIMIT: bytes of a huge page, of any architecture.
fn huge_page(bytes: u64) -> Found {
    let known = bytes.is_power_of_two() && (64 << 10..=16 << 30).contains(&bytes);
    ensure(known, || "the size of its pages".into())
}

fn runs(runs: &[Run], start: u64, end: u64, pages: &Pages) -> Found {
    let mut at = start;
    for run in runs {
        let bytes = run.pages.checked_mul(PAGE_BYTES).ok_or("too many pages")?;
        let run_end = run.address.checked_add(bytes).ok_or("too many pages")?;
        let fits = run.address.is_multiple_of(PAGE_BYTES) && run.address >= at && run_end <= end;
        ensure(fits && run.pages > 0, || format!("pages at {:x}", run.address))?;
        let first = run.first.checked_mul(PAGE_BYTES);
        let there = first.and_then(|first| Some(first..first.checked_add(bytes)?));
        ensure(there.is_some_and(|all| pages.has(all)), || "pages that are not there".into())?;
        at = run_end;
    }
    Ok(())
}

fn check_object(n: usize, thing: &Thing, records: &Records) -> Found {
    let path = |path: &str| path.starts_with('/') && path.len() < TEXT_MAX && !path.contains('\0');
    path::of_thing(thing)?;
    match thing {
        Thing::File(file) => {
            ensure(path(&file.path), || "its path".into())?;
            file.locks.iter().try_for_each(check_lock)?;
            if let Some(n) = file.namespace {
                let found = matches!(object(n, records)?, Thing::Mounts(_));
                ensure(found && file.deleted.is_none(), || "in no mount namespace".into())?;
            }
            let Some(n) = file.deleted else { return Ok(()) };
            let is_kind = |mode: u32| mode & libc::S_IFMT == file.file_type;
            let found = match object(n, records)? {
                Thing::Deleted(deleted) => is_kind(deleted.mode),
                Thing::MemoryFile(memory) => is_kind(memory.mode),
                _ => false,
            };
            ensure(found, || "of nothing deleted".into())
        }
        Thing::Deleted(deleted) => check_deleted(deleted, path, &records.pages),
        Thing::MemoryFile(file) => {
            let name = &file.name;
            ensure(name.len() < 250 && !name.contains('\0'), || "its name".into())?;
            ensure(file.mode & libc::S_IFMT == libc::S_IFREG, || "its mode".into())?;
            ensure(file.mode & 0o7000 == 0 && file.seals <= 0x3f, || "its mode or seals".into())?;
            ensure(file.bytes <= FILE_BYTES_MAX, || "its length".into())?;
            if let Some(page_bytes) = file.huge_page_bytes {
                huge_page(page_bytes)?;
                let whole = file.bytes.is_multiple_of(page_bytes) && file.bytes <= 1 << 46;
                ensure(whole, || "its length".into())?;
            }
            runs(&file.runs, 0, file.bytes.next_multiple_of(PAGE_BYTES), &records.pages)
        }
        Thing::Device(device) => {
            let known = ["null", "zero", "full", "random", "urandom"];
            ensure(known.contains(&device.name.as_str()), || "its name".into())
        }
        Thing::External(external) => ensure(external.name.len() < 64, || "its name".into()),
        Thing::Pipe(pipe) => {
            let fits = pipe.content.0.len() <= pipe.capacity_bytes as usize;
            ensure(fits && pipe.capacity_bytes as usize <= CONTENT_MAX, || "its content".into())?;
            let packets: u64 = pipe.packets.iter().map(|n| u64::from(*n)).sum();
            let whole = pipe.packets.is_empty() || packets == pipe.content.0.len() as u64;
            ensure(whole && !pipe.packets.contains(&0), || "its packets".into())?;
            ensure(pipe.path.as_deref().is_none_or(path), || "its path".into())?;
            let sound = |fifo: &super::DeletedFifo| fifo.mode <= 0o777 && pipe.path.is_some();
            ensure(pipe.deleted.as_ref().is_none_or(sound), || "its mode".into())
        }
        Thing::PipeEnd(end) => {
            ensure(matches!(object(end.pipe, records)?, Thing::Pipe(_)), || "of no pipe".into())
        }
        Thing::Tmpfs(tmpfs) => {
            tmpfs::names(tmpfs)?;
            if let Some(n) = tmpfs.namespace {
                let found = matches!(object(n, records)?, Thing::Mounts(_));
                ensure(found, || "in no mount namespace".into())?;
            }
            for entry in &tmpfs.entries {
                let TmpfsKind::File { bytes, runs: all } = &entry.what else { continue };
                ensure(*bytes <= FILE_BYTES_MAX, || "a length".into())?;
                runs(all, 0, bytes.next_multiple_of(PAGE_BYTES), &records.pages)?;
            }
            Ok(())
        }
        Thing::Cgroups(cgroups) => cgroup::all(cgroups, records),
        Thing::SystemVMemory(memory) => {
            system_v::head(&memory.head, records)?;
            ensure((1..=1 << 46).contains(&memory.bytes), || "its length".into())?;
            runs(&memory.runs, 0, memory.bytes.next_multiple_of(PAGE_BYTES), &records.pages)
        }
        Thing::SystemVSemaphores(set) => system_v::semaphores(set, records),
        Thing::SystemVQueue(queue) => system_v::queue(queue, records),
        Thing::RawSocket(raw) => socket::raw(raw),
        Thing::PacketSocket(packet) => socket::packet(packet),
        Thing::MessageQueue(queue) => mqueue::queue(queue, records),
        Thing::OpenQueue(open) => {
            let is_queue = matches!(object(open.queue, records)?, Thing::MessageQueue(_));
            ensure(is_queue, || "of no queue".into())?;
            let known = (libc::O_ACCMODE | libc::O_NONBLOCK) as u32;
            ensure(open.flags & !known == 0, || "its flags".into())
        }
        Thing::TcpSocket(tcp) => socket::tcp(tcp),
        Thing::UdpSocket(udp) => socket::udp(udp),
        Thing::UnixSocket(socket) => socket::unix(n, socket, records),
        Thing::Terminal(terminal) => check_terminal(terminal, records),
        Thing::TerminalSide(side) => {
            let is_terminal = matches!(object(side.terminal, records)?, Thing::Terminal(_));
            ensure(is_terminal, || "of no terminal".into())
        }
        Thing::Listener(listener) => socket::listener(listener),
        Thing::Netlink(netlink) => socket::netlink(netlink),
        Thing::Event(_) | Thing::Signal(_) => Ok(()),
        Thing::Timer(timer) => {
            let can_be_set = [libc::CLOCK_REALTIME, libc::CLOCK_REALTIME_ALARM];
            let sound = timer.cancelled_at_set_ns.is_none() || can_be_set.contains(&timer.clock);
            ensure(sound, || "its clock, which cannot be set".into())
        }
        Thing::PidFd(pidfd) => {
            let is = |p: &Process| {
                p.pid == pidfd.pid || p.threads.iter().any(|thread| thread.tid == pidfd.pid)
            };
            let flags = (libc::O_NONBLOCK | libc::O_EXCL) as u32;
            ensure(records.processes.iter().any(is), || "of a process that is not there".into())?;
            ensure(pidfd.flags & !flags == 0, || "its flags".into())
        }
        Thing::Inotify(inotify) => {
            let sound =
                |w: &super::Watch| path(&w.path) && (1..=i32::MAX as u32).contains(&w.number);
            ensure(inotify.watches.len() <= 1 << 20, || "its watches".into())?;
            ensure(inotify.watches.iter().all(sound), || "a watch".into())
        }
        Thing::Fanotify(fanotify) => {
            let sound = |m: &super::Mark| path(&m.path) && m.flags & !super::Mark::FLAGS == 0;
            ensure(fanotify.marks.len() <= 1 << 20, || "its marks".into())?;
            ensure(fanotify.marks.iter().all(sound), || "a mark".into())
        }
        Thing::Epoll(epoll) => ensure(epoll.items.len() <= 1 << 20, || "its items".into()),
        Thing::Mounts(mounts) => mount::all(n, mounts, records),
        Thing::Uts(uts) => {
            // LIMIT: __NEW_UTS_LEN
            let sound = |name: &String| name.len() <= 64 && !name.contains('\0');
            let names = [&uts.hostname, &uts.domainname];
            ensure(names.into_iter().flatten().all(sound), || "a name".into())
        }
        Thing::Ipc(_) => Ok(()),
        Thing::Net(it) => net::net(it),
        Thing::Time(it) => time::time(it, records),
        Thing::CgroupNamespace(it) => cgroup_namespace::namespace(it, records),
        Thing::User(it) => user::user(n, it, records),
        Thing::SharedMemory(memory) => {
            let sound = memory.bytes.is_multiple_of(PAGE_BYTES) && memory.bytes <= 1 << 46;
            ensure(sound, || "its length".into())?;
            runs(&memory.runs, 0, memory.bytes, &records.pages)
        }
    }
}

fn check_deleted(deleted: &Deleted, path: impl Fn(&str) -> bool, all: &Pages) -> Found {
    ensure(path(&deleted.place), || "its place".into())?;
    let kind = deleted.mode & libc::S_IFMT;
    ensure([libc::S_IFREG, libc::S_IFDIR].contains(&kind), || "no file".into())?;
    // A checkpoint must not create a file that gives root's rights to a process that executes it.
    let gives = kind == libc::S_IFREG && deleted.mode & (libc::S_ISUID | libc::S_ISGID) != 0;
    ensure(!gives, || "its mode".into())?;
    let known = |name: &str| name.starts_with("user.") && name.len() < 256 && !name.contains('\0');
    let sound = |(name, value): &(String, Bytes)| known(name) && value.0.len() <= 64 << 10;
    ensure(deleted.attributes.iter().all(sound), || "its attributes".into())?;
    ensure(deleted.bytes <= FILE_BYTES_MAX, || "its length".into())?;
    let pages = deleted.bytes.next_multiple_of(PAGE_BYTES);
    runs(&deleted.runs, 0, pages, all)
}

fn check_terminal(terminal: &Terminal, records: &Records) -> Found {
    let number = terminal.number;
    ensure(number < TERMINALS_MAX, || "its number".into())?;
    let same = |o: &&super::Object| matches!(&o.thing, Thing::Terminal(t) if t.number == number);
    ensure(records.objects.iter().filter(same).count() == 1, || "it occurs twice".into())?;
    ensure(terminal.termios.0.len() == TERMIOS_BYTES, || "its modes".into())?;
    ensure(terminal.owner.2 <= 0o777, || "its mode".into())?;
    let fits = |bytes: &Bytes| bytes.0.len() <= ON_THE_WAY_MAX;
    ensure(fits(&terminal.typed) && fits(&terminal.written), || "its bytes in flight".into())
}

fn check_lock(lock: &Lock) -> Found {
    let top = i64::MAX as u64;
    let sound = lock.start <= top && lock.end.is_none_or(|end| end >= lock.start && end <= top);
    ensure(sound, || "a lock".into())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::format::{
        About, Checksums, File, Inotify, LockKind, MemoryFile, Object, Pages, PidFd, Pipe,
        TerminalSide, Thread, Uts, Watch,
    };

    /// One process with one page of memory.
    pub(crate) fn small() -> Records {
        let area = Area {
            start: 0x10_0000,
            end: 0x10_1000,
            access: 3,
            backing: Backing::Anonymous,
            flags: Vec::new(),
            runs: vec![Run { address: 0x10_0000, pages: 1, first: 0 }],
        };
        let file = File {
            path: "/".into(),
            flags: 0,
            offset: 0,
            file_type: libc::S_IFDIR,
            bytes: 0,
            modified_ns: 0,
            unchanged: false,
            deleted: None,
            namespace: None,
            locks: Vec::new(),
        };
        let process = Process {
            pid: 1,
            session: 1,
            group: 1,
            name: "a".into(),
            memory: Some(0),
            directory: Some(0),
            threads: vec![Thread { tid: 1, ..Thread::default() }],
            ..Process::default()
        };
        Records {
            about: About::default(),
            processes: vec![process],
            memories: vec![Memory { areas: vec![area], program: Some(0), ..Memory::default() }],
            objects: vec![Thing::File(file).into()],
            pages: Pages { bytes: 4096, chunks: Checksums(vec![[0; 32]]), parts: Vec::new() },
        }
    }

    #[test]
    fn references_without_a_target_are_refused() {
        assert!(records(&small()).is_ok());
        let bad = |change: fn(&mut Records)| {
            let mut all = small();
            change(&mut all);
            records(&all).unwrap_err().to_string()
        };
        type Case = (fn(&mut Records), &'static str);
        let cases: [Case; 15] = [
            (|r| r.processes[0].memory = Some(1), "no memory"),
            (
                |r| r.memories[0].areas[0].backing = Backing::Huge { page_bytes: 2 << 20 },
                "not of whole pages",
            ),
            (
                |r| r.memories[0].areas[0].backing = Backing::Huge { page_bytes: 0 },
                "the size of its pages",
            ),
            (|r| r.processes[0].directory = Some(7), "object 7"),
            (|r| r.processes[0].uts = Some(0), "no UTS namespace"),
            (|r| r.processes[0].threads[0].tid = 2, "first thread"),
            (|r| r.memories[0].areas[0].runs[0].pages = 2, "pages at 100000"),
            (|r| r.memories[0].areas[0].runs[0].first = 1, "not there"),
            (|r| r.memories[0].areas[0].end = u64::MAX - 4095, "overlaps"),
            (
                |r| r.memories[0].areas[0].backing = Backing::Shared { object: 0, offset: 0 },
                "its own",
            ),
            (|r| r.pages.bytes = 8192 << 20, "another number"),
            (|r| r.pages.parts = vec![4096, 4096], "another number"),
            (|r| r.pages.parts = vec![0, u64::MAX - 4095], "another number"),
            (
                // Between the end of one file and the start of the next.
                |r| {
                    let chunks = Checksums(vec![[0; 32]; 2]);
                    let bytes = crate::format::CHUNK_BYTES + 4096;
                    r.pages = Pages { bytes, chunks, parts: vec![4096; 2] };
                    r.memories[0].areas[0].runs[0].first = 1;
                },
                "not there",
            ),
            (|r| r.processes[0].pid = 3, "not the first"),
        ];
        for (change, text) in cases {
            let said = bad(change);
            assert!(said.contains(text), "{said}");
        }
    }

    /// A checkpoint must not exceed the container's rights: every case would.
    #[test]
    fn records_beyond_the_containers_rights_are_refused() {
        let deleted = |change: fn(&mut Deleted)| {
            let mut it = Deleted {
                place: "/".into(),
                mode: libc::S_IFREG | 0o644,
                uid: 0,
                gid: 0,
                bytes: 5,
                modified_ns: 0,
                runs: vec![Run { address: 0, pages: 1, first: 0 }],
                attributes: Vec::new(),
            };
            change(&mut it);
            let mut all = small();
            all.objects.push(Thing::Deleted(it).into());
            records(&all).err().map(|e| e.to_string()).unwrap_or_default()
        };
        type Case = (fn(&mut Deleted), &'static str);
        let cases: [Case; 7] = [
            (|_| {}, ""),
            (|d| d.mode |= libc::S_ISUID, "its mode"),
            (|d| d.mode = libc::S_IFCHR | 0o666, "no file"),
            (|d| d.place = "../x".into(), "its place"),
            (|d| d.bytes = u64::MAX, "its length"),
            (|d| d.runs[0].first = 9, "not there"),
            (|d| d.attributes.push(("security.capability".into(), Bytes::default())), "attributes"),
        ];
        for (change, text) in cases {
            let said = deleted(change);
            assert!(said.contains(text) && said.is_empty() == text.is_empty(), "{text}: {said}");
        }
        let bad = |change: fn(&mut Records)| {
            let mut all = small();
            change(&mut all);
            records(&all).unwrap_err().to_string()
        };
        let lock = Lock { kind: LockKind::Whole, writes: true, start: 9, end: Some(3) };
        assert!(check_lock(&lock).is_err());
        assert!(bad(|r| r.processes[0].threads[0].schedule.policy = 6).contains("policy"));
        assert!(bad(|r| r.processes[0].threads[0].schedule.cpus = vec![1 << 20]).contains("CPUs"));
        assert!(bad(|r| r.processes[0].threads[0].personality = 3).contains("personality"));
        assert!(bad(|r| r.processes[0].oom_score_adj = 1001).contains("oom_score_adj"));
        let filter = |flags: u32, bytes: usize| {
            let mut all = small();
            let filter = Filter { flags, code: Bytes(vec![0; bytes]) };
            all.processes[0].threads[0].filters.push(filter);
            records(&all).is_ok()
        };
        assert!(filter(0, 8) && !filter(0, 0) && !filter(0, 12) && !filter(0, 1 << 20));
        assert!(!filter(8, 8), "a filter with a listener");
    }

    #[test]
    fn invalid_objects_are_refused() {
        let said = |things: &[Thing]| {
            let mut all = small();
            all.objects.extend(things.iter().cloned().map(Object::from));
            records(&all).err().map(|e| e.to_string()).unwrap_or_default()
        };
        let terminal = |change: fn(&mut Terminal)| {
            let mut it = Terminal {
                number: 3,
                is_console: false,
                termios: Bytes(vec![0; TERMIOS_BYTES]),
                size: [0; 4],
                owner: (0, 5, 0o620),
                locked: false,
                packet: false,
                exclusive: false,
                typed: Bytes::default(),
                written: Bytes::default(),
                foreground: 0,
                session: 0,
            };
            change(&mut it);
            Thing::Terminal(it)
        };
        let good = terminal(|_| {});
        assert_eq!(said(std::slice::from_ref(&good)), "");
        assert!(said(&[good.clone(), good]).contains("twice"));
        assert!(said(&[terminal(|t| t.number = 5000)]).contains("its number"));
        assert!(said(&[terminal(|t| t.termios.0.truncate(9))]).contains("its modes"));
        assert!(said(&[terminal(|t| t.owner.2 = 0o4777)]).contains("its mode"));
        assert!(said(&[terminal(|t| t.typed.0 = vec![0; 1 << 20])]).contains("in flight"));
        let side = TerminalSide { terminal: 0, is_master: true, as_console: false, flags: 0 };
        assert!(said(&[Thing::TerminalSide(side)]).contains("of no terminal"));
        let memory = |mode: u32, seals: u32, name: &str| {
            let (name, runs) = (name.to_owned(), Vec::new());
            let (uid, gid, bytes) = (0, 0, 0);
            let huge_page_bytes = None;
            said(&[Thing::MemoryFile(MemoryFile {
                name,
                mode,
                uid,
                gid,
                bytes,
                huge_page_bytes,
                seals,
                runs,
            })])
        };
        assert_eq!(memory(libc::S_IFREG | 0o777, 0x3f, "a"), "");
        assert!(memory(libc::S_IFREG | 0o4777, 0, "a").contains("its mode"));
        assert!(memory(libc::S_IFREG, 0x40, "a").contains("seals"));
        assert!(memory(libc::S_IFREG, 0, "a\0b").contains("its name"));
        let pipe = |packets: &[u32], path: Option<&str>| {
            said(&[Thing::Pipe(Pipe {
                capacity_bytes: 4096,
                content: Bytes(vec![0; 5]),
                packets: packets.to_vec(),
                path: path.map(str::to_owned),
                deleted: None,
            })])
        };
        assert_eq!(pipe(&[2, 3], Some("/fifo")), "");
        assert!(pipe(&[2, 4], None).contains("packets"));
        assert!(pipe(&[5, 0], None).contains("packets"));
        assert!(pipe(&[], Some("../fifo")).contains("its path"));
        let uts =
            |name: &str| said(&[Thing::Uts(Uts { hostname: Some(name.into()), domainname: None })]);
        assert_eq!(uts(&"a".repeat(64)), "");
        assert!(uts(&"a".repeat(65)).contains("a name") && uts("a\0b").contains("a name"));
        let pidfd = |pid, flags| said(&[Thing::PidFd(PidFd { pid, flags })]);
        assert_eq!(pidfd(1, libc::O_NONBLOCK as u32), "");
        assert!(pidfd(77, 0).contains("not there") && pidfd(1, 1).contains("flags"));
        let watch = |number, path: &str| {
            let watches = vec![Watch { number, path: path.into(), mask: 2 }];
            said(&[Thing::Inotify(Inotify { flags: 0, watches, held: false })])
        };
        assert_eq!(watch(1, "/etc"), "");
        assert!(watch(0, "/etc").contains("a watch") && watch(1, "etc").contains("a watch"));
    }
}
