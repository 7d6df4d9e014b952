//! Objects: made once, by the first process, before any other process exists to inherit them.
//!
//! This module is the table of kinds: it calls each kind for its objects, in an order in which an
//! object comes after those that it needs.

use dormouse_record::{Object, Result, Thing};

use super::plan::Plan;
use super::{
    deleted, event, fanotify, file, inotify, ipc, lock, memfd, memory, mount, mqueue, net, netlink,
    pipe, raw, socket, tcp, terminal, time, timer, udp, unix, user, uts,
};
use crate::inject::program::{Arg, Call, Cell, Sequence};

/// Makes all objects.
pub(super) fn make_all(plan: &mut Plan<'_>, sequence: &mut Sequence) -> Result<()> {
    let records = plan.records;
    lift_given(plan, sequence);
    user::make_all(plan, sequence)?;
    net::make_all(plan, sequence)?;
    ipc::make_all(plan, sequence)?;
    mount::make_all(plan, sequence)?;
    terminal::make_all(plan, sequence)?;
    for (index, object) in records.objects.iter().enumerate() {
        if let Some(given) = plan.held.get(&index) {
            plan.cells[index] = Some(*given);
            continue;
        }
        plan.net = object.net;
        plan.inode = object.inode;
        let what = format!("object {index} ({})", object.thing.name());
        if let Some(made) = make(plan, sequence, &what, index, object)? {
            plan.cells[index] = Some(plan.lift_object(sequence, (&what, index), made));
        }
    }
    unix::make_all(plan, sequence)?;
    finish(plan, sequence);
    close_below(plan, sequence);
    Ok(())
}

/// Gives the objects what several kinds have: an inode, and locks. A held file has both.
fn finish(plan: &mut Plan<'_>, sequence: &mut Sequence) {
    for (index, object) in plan.records.objects.iter().enumerate() {
        let Some(cell) = plan.cells[index].filter(|_| !plan.held.contains_key(&index)) else {
            continue;
        };
        let what = || format!("object {index} ({})", object.thing.name());
        if let Some(inode) = &object.inode {
            let owner = [cell.into(), inode.uid.into(), inode.gid.into()];
            sequence.call(what(), Call::new(libc::SYS_fchown, owner));
            let mode = [cell.into(), inode.mode.into()];
            sequence.call(what(), Call::new(libc::SYS_fchmod, mode));
        }
        lock::of_file(plan, sequence, &what(), cell.into(), &object.file_locks);
    }
}

/// Makes one object. Returns its descriptor, unless the object has none, or was or will be made
/// together with others.
fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    index: usize,
    object: &Object,
) -> Result<Option<Cell>> {
    Ok(match &object.thing {
        // Made with the object that holds its contents.
        Thing::File(it) if it.deleted.is_some() => None,
        // Made with its mount namespace, before all others.
        Thing::File(it) if it.namespace.is_some() => None,
        Thing::Mounts(_) | Thing::Ipc(_) | Thing::Net(_) | Thing::User(_) => None,
        Thing::File(it) => Some(file::make(plan, sequence, what, it)?),
        Thing::MemoryFile(it) => {
            memfd::make(plan, sequence, what, index, it)?;
            None
        }
        Thing::Deleted(it) => {
            deleted::make(plan, sequence, what, index, it)?;
            None
        }
        Thing::Device(it) => Some(file::device(plan, sequence, what, it)?),
        Thing::External(it) => Some(file::external(plan, sequence, what, it)?),
        // Both ends at once; each object of an end takes its descriptor from here.
        Thing::Pipe(it) => {
            pipe::make(plan, sequence, what, index, it)?;
            None
        }
        Thing::PipeEnd(_) | Thing::Terminal(_) | Thing::TerminalSide(_) => None,
        // All together, after all others.
        Thing::UnixSocket(_) => None,
        Thing::Listener(it) => Some(socket::listener(plan, sequence, what, it)?),
        // Filled by the engine, before the first object.
        Thing::Tmpfs(_) => None,
        // Made before all others.
        Thing::Cgroups(_) | Thing::CgroupNamespace(_) => None,
        // Made by the process that has it, with its memory.
        Thing::AioContext(_) => None,
        // Made by the engine, before any process attaches memory.
        Thing::SystemVMemory(_) | Thing::SystemVSemaphores(_) | Thing::SystemVQueue(_) => None,
        Thing::TcpSocket(it) => Some(tcp::make(plan, sequence, what, it)?),
        Thing::UdpSocket(it) => Some(udp::make(plan, sequence, what, it)?),
        Thing::RawSocket(it) => Some(raw::make(plan, sequence, what, it)?),
        Thing::PacketSocket(it) => Some(raw::packet(plan, sequence, what, it)?),
        Thing::Netlink(it) => Some(netlink::make(plan, sequence, what, it)?),
        Thing::MessageQueue(it) if it.namespace.is_some() => None,
        // The objects of open descriptors take them from here.
        Thing::MessageQueue(it) => {
            mqueue::make(plan, sequence, what, index, it)?;
            None
        }
        Thing::OpenQueue(_) => None,
        Thing::Event(it) => Some(event::event(plan, sequence, what, it)?),
        Thing::Timer(it) => Some(timer::make(plan, sequence, what, it)?),
        Thing::Signal(it) => Some(event::signal(plan, sequence, what, it)?),
        // Opened by each process that has it, once all processes exist.
        Thing::PidFd(_) | Thing::ProcessFile(_) => None,
        Thing::Fanotify(it) => Some(fanotify::make(plan, sequence, what, it)?),
        Thing::Inotify(it) => Some(inotify::make(plan, sequence, what, it)?),
        Thing::Epoll(it) => Some(event::epoll(plan, sequence, what, it)?),
        Thing::Uts(it) => Some(uts::make(plan, sequence, what, it, object.user)?),
        Thing::Time(it) => time::make(plan, sequence, what, index, it)?,
        Thing::SharedMemory(it) => {
            memory::make_shared(plan, sequence, index, it)?;
            None
        }
    })
}

/// Moves the descriptors that were passed in above the numbers that processes use.
fn lift_given(plan: &Plan<'_>, sequence: &mut Sequence) {
    let given = plan.outside.values().chain(plan.held.values()).copied();
    let pages = plan.pages.iter().map(|(_, cell)| *cell);
    for cell in pages.chain(plan.userfaults.device).chain(plan.last_pid).chain(given) {
        plan.lift(sequence, "a descriptor of the engine", cell);
    }
    // A newly opened file may get any number but the reserved one ([`super::open::again`]).
    let args = [plan.contents_at(0).0.into(), (plan.above - 1).into(), Arg::from(libc::O_CLOEXEC)];
    sequence.call("a number that no process uses", Call::new(libc::SYS_dup3, args));
    // Until the object is there, nothing else has its number.
    for seat in plan.seats.values() {
        let [contents, _, flags] = args;
        let call = Call::new(libc::SYS_dup3, [contents, (*seat).into(), flags]);
        sequence.call("the number of an object", call);
    }
}

fn close_below(plan: &Plan<'_>, sequence: &mut Sequence) {
    let seats = plan.seats.values().copied().collect();
    Plan::close_others(sequence, seats, plan.above - 1);
}
