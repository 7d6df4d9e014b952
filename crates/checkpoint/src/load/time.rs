//! Time namespaces. A namespace that only has members is created by a helper process. A namespace
//! that a process has created for its children, without being in it, is created by that process
//! again, since setns(2) would change both. The process does so after the creation of its children.
//! Members enter the namespace afterwards, at one stage for each generation.
//!
//! Offsets can be written until a process enters (time_namespaces(7)).

use dormouse_record::{Process, Result, Thing, Time};

use super::plan::Plan;
use super::{helper, open, stage};
use crate::clock;
use crate::inject::program::{Arg, Call, Cell, Sequence};

/// Makes a namespace; `None` if a process does.
pub(super) fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    index: usize,
    time: &Time,
) -> Result<Option<Cell>> {
    if plan.times.contains_key(&index) {
        return Ok(None);
    }
    let mut part = Sequence::default();
    for_children(plan, &mut part, what, time)?;
    let path = "/proc/self/ns/time_for_children";
    let cell = open::own_path(plan, &mut part, what, path, libc::O_RDONLY as u32)?;
    helper::run(plan, sequence, what, part);
    Ok(Some(cell))
}

/// Makes the calling process create a namespace for its children.
fn for_children(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    time: &Time,
) -> Result<()> {
    // Dumpable: its files in procfs then belong to it, and other processes may use them to find the
    // namespace.
    let args = [Arg::from(libc::PR_SET_DUMPABLE), Arg::Number(1)];
    sequence.call(what, Call::new(libc::SYS_prctl, args));
    sequence.call(what, Call::new(libc::SYS_unshare, [Arg::from(libc::CLONE_NEWTIME)]));
    let text = clock::ahead(plan.clocks, time).text();
    let path = "/proc/self/timens_offsets";
    let cell = open::own_path(plan, sequence, what, path, libc::O_WRONLY as u32)?;
    let (at, bytes) = (plan.builder.data(text.as_bytes()), text.len() as u64);
    let args = [cell.into(), at.into(), bytes.into()];
    sequence.call(what, Call::new(libc::SYS_write, args).returns(bytes));
    sequence.call(what, Call::new(libc::SYS_close, [cell.into()]));
    Ok(())
}

/// Makes a process enter its namespace, and create the one for its children. ORDER: its children
/// exist, and it has no threads yet; every live process exists, and waits for the others.
pub(super) fn enter(plan: &mut Plan<'_>, sequence: &mut Sequence, record: &Process) -> Result<()> {
    let last = plan.times.values().map(|made| made.generation).max().unwrap_or(0);
    let made = record.time.and_then(|n| plan.times.get(&n)).copied();
    for generation in 0..=last {
        if generation > 0 {
            sequence.stage(stage::CLOCKS);
        }
        if generation != made.map_or(0, |made| made.generation) {
            continue;
        }
        let what = format!("the time namespace of process {}", record.pid);
        if let Some(n) = record.time {
            let cell = match made {
                None => plan.object(n)?,
                Some(made) => {
                    let path = format!("/proc/{}/ns/time_for_children", made.by);
                    open::own_path(plan, sequence, &what, &path, libc::O_RDONLY as u32)?
                }
            };
            let args = [cell.into(), Arg::from(libc::CLONE_NEWTIME)];
            sequence.call(&*what, Call::new(libc::SYS_setns, args));
            if made.is_some() {
                sequence.call(&*what, Call::new(libc::SYS_close, [cell.into()]));
            }
        }
        let records = plan.records;
        let object = record.time_for_children.and_then(|n| records.objects.get(n));
        if let Some(Thing::Time(time)) = object.map(|object| &object.thing) {
            let what = format!("the time namespace of the children of process {}", record.pid);
            for_children(plan, sequence, &what, time)?;
        }
    }
    Ok(())
}
