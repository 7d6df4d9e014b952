//! IPC namespaces: each is created by a helper process, with its message queues, and entered by its
//! members. Objects of System V are created by the engine ([`super::system_v`]).

use dormouse_record::{Process, Result, Thing};

use super::plan::Plan;
use super::{helper, mqueue, open, user};
use crate::inject::program::{Arg, Call, Sequence};

/// Makes all namespaces. ORDER: before mounts, which may show their message queues.
pub(super) fn make_all(plan: &mut Plan<'_>, sequence: &mut Sequence) -> Result<()> {
    let records = plan.records;
    for (n, object) in records.objects.iter().enumerate() {
        if !matches!(object.thing, Thing::Ipc(_)) {
            continue;
        }
        let what = format!("object {n} (IPC namespace)");
        let mut part = Sequence::default();
        user::enter_one(plan, &mut part, &what, object.user)?;
        part.call(&*what, Call::new(libc::SYS_unshare, [Arg::from(libc::CLONE_NEWIPC)]));
        let made =
            open::own_path(plan, &mut part, &what, "/proc/self/ns/ipc", libc::O_RDONLY as u32)?;
        for (index, object) in records.objects.iter().enumerate() {
            let Thing::MessageQueue(queue) = &object.thing else { continue };
            if queue.namespace == Some(n) {
                let what = format!("object {index} ({})", object.thing.name());
                mqueue::make(plan, &mut part, &what, index, queue)?;
            }
        }
        helper::run(plan, sequence, &what, part);
        plan.cells[n] = Some(plan.lift(sequence, &what, made));
    }
    Ok(())
}

/// Makes a process enter its IPC namespace. ORDER: before it attaches memory.
pub(super) fn enter(plan: &Plan<'_>, sequence: &mut Sequence, record: &Process) -> Result<()> {
    let Some(ipc) = record.ipc else { return Ok(()) };
    let what = format!("the IPC namespace of process {}", record.pid);
    let args = [plan.object(ipc)?.into(), Arg::from(libc::CLONE_NEWIPC)];
    sequence.call(what, Call::new(libc::SYS_setns, args));
    Ok(())
}
