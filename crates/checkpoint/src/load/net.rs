//! Network namespaces: each is created by a helper process, filled by the engine, and entered by
//! its members. A socket belongs to the namespace in which it was created, whatever process has it.
//! Each socket of such a namespace is therefore created by a helper process that enters the
//! namespace.

use dormouse_kernel::{Errno, pidfd};
use dormouse_record::{Elsewhere, Error, Process, Result, Thing};

use super::plan::Plan;
use super::restore::Restore;
use super::{helper, open, stage, user};
use crate::inject::program::{Arg, Call, Cell, Sequence};
use crate::net::{self, Site, Unlike};
use crate::stack;

/// Makes all namespaces. ORDER: before sockets.
pub(super) fn make_all(plan: &mut Plan<'_>, sequence: &mut Sequence) -> Result<()> {
    let mut is_any = plan.records.about.network.is_some();
    for (n, object) in plan.records.objects.iter().enumerate() {
        if !matches!(object.thing, Thing::Net(_)) {
            continue;
        }
        is_any = true;
        let what = format!("object {n} (network namespace)");
        let mut part = Sequence::default();
        user::enter_one(plan, &mut part, &what, object.user)?;
        part.call(&*what, Call::new(libc::SYS_unshare, [Arg::from(libc::CLONE_NEWNET)]));
        let made =
            open::own_path(plan, &mut part, &what, "/proc/self/ns/net", libc::O_RDONLY as u32)?;
        helper::run(plan, sequence, &what, part);
        plan.cells[n] = Some(plan.lift(sequence, &what, made));
    }
    if is_any {
        sequence.stage(stage::STACKS);
    }
    Ok(())
}

/// Fills all namespaces, and the container's own. The first process waits, and no other exists.
pub(super) fn restore(pid: u32, restore: &Restore) -> Result<()> {
    let mut sites = Vec::new();
    for (n, object) in restore.records.objects.iter().enumerate() {
        let Thing::Net(net) = &object.thing else { continue };
        let number = restore.number(n).map_err(Error::of("find a network namespace", pid))?;
        let netns = pidfd::open(pid).and_then(|handle| pidfd::copy_descriptor(&handle, number));
        let netns = netns.map_err(|e| Error::Elsewhere(e.to_string()))?;
        sites.push(Site { stack: Elsewhere::Object(n), netns, net });
    }
    if let Some(net) = &restore.records.about.network {
        sites.push(Site { stack: Elsewhere::Container, netns: stack::of(pid)?, net });
    }
    net::build(&sites).map_err(|(stack, why)| {
        let what = match stack {
            Elsewhere::Container => "the network".to_owned(),
            Elsewhere::Object(n) => format!("object {n} (network namespace)"),
        };
        match why {
            Unlike::What(why) => {
                Error::Elsewhere(format!("{what} cannot be restored as one {why}"))
            }
            Unlike::Refused(e) => {
                let note = if e.note().is_empty() { "" } else { ", " };
                let call = format!("{}({}){note}{}", e.call(), e.arguments(), e.note());
                let source = Errno::from_raw_os_error(e.errno());
                Error::Restore { what, call, source }
            }
        }
    })
}

/// Runs a part in a network namespace, unless that is the container's own.
pub(super) fn inside(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    net: Option<usize>,
    call: impl FnOnce(&mut Sequence),
) -> Result<()> {
    let Some(net) = net else {
        call(sequence);
        return Ok(());
    };
    let mut part = Sequence::default();
    enter_one(plan, &mut part, what, net)?;
    call(&mut part);
    helper::run(plan, sequence, what, part);
    Ok(())
}

/// socket(2) for the object that is being made, in its network namespace, and by its owner: filters of packets
/// match the user that has opened a socket, which fchown(2) does not change.
pub(super) fn socket(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    cell: Cell,
    args: [Arg; 3],
) -> Result<()> {
    let (net, inode) = (plan.net, plan.inode);
    inside(plan, sequence, what, net, |part| {
        let act_as = |part: &mut Sequence, uid: u32, gid: u32| {
            part.call(what, Call::new(libc::SYS_setfsgid, [gid.into()]));
            part.call(what, Call::new(libc::SYS_setfsuid, [uid.into()]));
        };
        if let Some(inode) = inode {
            act_as(part, inode.uid, inode.gid);
        }
        part.call_into(what, cell, Call::new(libc::SYS_socket, args));
        if inode.is_some() {
            act_as(part, 0, 0);
        }
    })
}

/// Makes the calling process enter a network namespace.
pub(super) fn enter_one(
    plan: &Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    net: usize,
) -> Result<()> {
    let args = [plan.object(net)?.into(), Arg::from(libc::CLONE_NEWNET)];
    sequence.call(what, Call::new(libc::SYS_setns, args));
    Ok(())
}

/// Makes a process enter its network namespace. ORDER: before it has threads.
pub(super) fn enter(plan: &Plan<'_>, sequence: &mut Sequence, record: &Process) -> Result<()> {
    let Some(net) = record.net else { return Ok(()) };
    enter_one(plan, sequence, &format!("the network namespace of process {}", record.pid), net)
}
