//! The check of an object, above those of each kind.

use dormouse_kernel::call::TERMIOS_BYTES;

use super::file::{self, is_path};
use super::{
    CONTENT_MAX, FILE_BYTES_MAX, Found, ON_THE_WAY_MAX, aio, cgroup, cgroup_namespace, ensure,
    memory, mount, mqueue, net, object, path, socket, system_v, time, tmpfs, user,
};
use crate::{
    Bytes, DeletedFifo, Lock, LockKind, Mark, Object, PAGE_BYTES, Pipe, Process, Records, Terminal,
    Thing, TmpfsKind, Watch,
};

/// LIMIT: locks of a file description.
const LOCKS_MAX: usize = 1 << 20;
/// LIMIT: numbers of terminals, which are made one after the other.
const TERMINALS_MAX: u32 = 1024;

/// Checks what objects of several kinds have: locks, and an inode.
pub(super) fn common(object: &Object) -> Found {
    ensure(object.file_locks.len() <= LOCKS_MAX, || "its locks".into())?;
    object.file_locks.iter().try_for_each(file::lock)?;
    let is_of_a_process = |lock: &Lock| lock.kind == LockKind::Process;
    ensure(!object.file_locks.iter().any(is_of_a_process), || "its locks".into())?;
    let Some(inode) = &object.inode else { return Ok(()) };
    let has_one = matches!(object.thing, Thing::PipeEnd(_)) || object.thing.is_socket();
    ensure(has_one && inode.mode <= 0o777, || "its inode".into())
}

/// Checks an object, which has the number `n`.
pub(super) fn thing(n: usize, thing: &Thing, records: &Records) -> Found {
    path::of_thing(thing)?;
    match thing {
        Thing::File(it) => file::file(it, records),
        Thing::Deleted(it) => file::deleted(it, &records.pages),
        Thing::MemoryFile(it) => file::in_memory(it, &records.pages),
        Thing::Device(device) => {
            let known = ["null", "zero", "full", "random", "urandom"];
            ensure(known.contains(&device.name.as_str()), || "its name".into())
        }
        Thing::External(external) => ensure(external.name.len() < 64, || "its name".into()),
        Thing::Pipe(it) => pipe(it),
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
                memory::runs(all, 0, bytes.next_multiple_of(PAGE_BYTES), &records.pages)?;
            }
            Ok(())
        }
        Thing::Cgroups(cgroups) => cgroup::all(cgroups, records),
        Thing::SystemVMemory(memory) => {
            system_v::head(&memory.head, records)?;
            ensure((1..=1 << 46).contains(&memory.bytes), || "its length".into())?;
            memory::runs(&memory.runs, 0, memory.bytes.next_multiple_of(PAGE_BYTES), &records.pages)
        }
        Thing::SystemVSemaphores(set) => system_v::semaphores(set, records),
        Thing::SystemVQueue(queue) => system_v::queue(queue, records),
        Thing::RawSocket(raw) => socket::raw(raw),
        Thing::PacketSocket(packet) => socket::packet(packet),
        Thing::MessageQueue(queue) => mqueue::queue(queue, records),
        Thing::OpenQueue(open) => {
            let is_queue = matches!(object(open.queue, records)?, Thing::MessageQueue(_));
            ensure(is_queue, || "of no queue".into())?;
            const KNOWN: i32 = libc::O_ACCMODE
                | libc::O_NONBLOCK
                | libc::O_CLOEXEC
                | libc::O_APPEND
                | libc::O_NOATIME;
            ensure(open.flags & !(KNOWN as u32) == 0, || "its flags".into())
        }
        Thing::TcpSocket(tcp) => socket::tcp(tcp),
        Thing::UdpSocket(udp) => socket::udp(udp),
        Thing::UnixSocket(socket) => socket::unix(n, socket, records),
        Thing::Terminal(it) => terminal(it, records),
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
            let flags = (libc::O_NONBLOCK | libc::O_EXCL | libc::O_APPEND | libc::O_NOATIME) as u32;
            ensure(records.processes.iter().any(is), || "of a process that is not there".into())?;
            ensure(pidfd.flags & !flags == 0, || "its flags".into())
        }
        Thing::ProcessFile(of) => {
            ensure(records.processes.iter().any(|process| process.pid == of.pid), || {
                "of a process that is not there".into()
            })?;
            file::of_process(of)
        }
        Thing::Inotify(inotify) => {
            let sound = |w: &Watch| is_path(&w.path) && (1..=i32::MAX as u32).contains(&w.number);
            ensure(inotify.watches.len() <= 1 << 20, || "its watches".into())?;
            ensure(inotify.watches.iter().all(sound), || "a watch".into())
        }
        Thing::Fanotify(fanotify) => {
            let sound = |m: &Mark| is_path(&m.path) && m.flags & !Mark::FLAGS == 0;
            ensure(fanotify.marks.len() <= 1 << 20, || "its marks".into())?;
            ensure(fanotify.marks.iter().all(sound), || "a mark".into())
        }
        Thing::Epoll(epoll) => ensure(epoll.items.len() <= 1 << 20, || "its items".into()),
        Thing::AioContext(it) => aio::context(it, records),
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
            memory::runs(&memory.runs, 0, memory.bytes, &records.pages)
        }
    }
}

fn pipe(pipe: &Pipe) -> Found {
    let fits = pipe.content.0.len() <= pipe.capacity_bytes as usize;
    ensure(fits && pipe.capacity_bytes as usize <= CONTENT_MAX, || "its content".into())?;
    let packets: u64 = pipe.packets.iter().map(|n| u64::from(*n)).sum();
    let whole = pipe.packets.is_empty() || packets == pipe.content.0.len() as u64;
    ensure(whole && !pipe.packets.contains(&0), || "its packets".into())?;
    ensure(pipe.path.as_deref().is_none_or(is_path), || "its path".into())?;
    let sound = |fifo: &DeletedFifo| fifo.mode <= 0o777 && pipe.path.is_some();
    ensure(pipe.deleted.as_ref().is_none_or(sound), || "its mode".into())
}

fn terminal(terminal: &Terminal, records: &Records) -> Found {
    let number = terminal.number;
    ensure(number < TERMINALS_MAX, || "its number".into())?;
    let same = |o: &&Object| matches!(&o.thing, Thing::Terminal(t) if t.number == number);
    ensure(records.objects.iter().filter(same).count() == 1, || "it occurs twice".into())?;
    ensure(terminal.termios.0.len() == TERMIOS_BYTES, || "its modes".into())?;
    ensure(terminal.owner.2 <= 0o777, || "its mode".into())?;
    let fits = |bytes: &Bytes| bytes.0.len() <= ON_THE_WAY_MAX;
    ensure(fits(&terminal.typed) && fits(&terminal.written), || "its bytes in flight".into())
}
