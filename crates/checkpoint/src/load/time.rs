//! Time namespaces: those that only had processes in them are made by stand-ins. Those that a process had
//! made for its children, and is not in, it makes again: nothing else brings it there (setns(2) changes
//! both). It does so when its children are born, and who was in one enters it afterwards, at a stage for
//! each generation of them.
//!
//! Offsets can be written until somebody is in it (time_namespaces(7)).

use super::{Plan, file};
use crate::error::Result;
use crate::format::{Process, Thing, Time};
use crate::inject::program::{Arg, Call, Cell, Sequence};

/// The stage at which those of a generation are there.
const STAGE: &str = "clocks";

/// Makes one; nothing where a process does.
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
    let cell = file::open(plan, &mut part, what, path, libc::O_RDONLY as u32)?;
    let pid = plan.fresh_pid();
    plan.stand_in(sequence, what, pid, part);
    Ok(Some(cell))
}

/// Has the calling process make one for its children.
fn for_children(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    time: &Time,
) -> Result<()> {
    // Its files in procfs are its own by that, and others may look at it to find the namespace.
    let args = [Arg::from(libc::PR_SET_DUMPABLE), Arg::Number(1)];
    sequence.call(what, Call::new(libc::SYS_prctl, args));
    sequence.call(what, Call::new(libc::SYS_unshare, [Arg::from(libc::CLONE_NEWTIME)]));
    let text = plan.clocks.ahead(time).text();
    let path = "/proc/self/timens_offsets";
    let cell = file::open(plan, sequence, what, path, libc::O_WRONLY as u32)?;
    let (at, bytes) = (plan.builder.data(text.as_bytes()), text.len() as u64);
    let args = [cell.into(), at.into(), bytes.into()];
    sequence.call(what, Call::new(libc::SYS_write, args).returns(bytes));
    sequence.call(what, Call::new(libc::SYS_close, [cell.into()]));
    Ok(())
}

/// Has a process enter the one it was in, and make the one that it had made for its children. ORDER: it has
/// made those that it has, and has no threads yet; everybody who lives is there, and waits for the others.
pub(super) fn enter(plan: &mut Plan<'_>, sequence: &mut Sequence, record: &Process) -> Result<()> {
    let last = plan.times.values().map(|made| made.generation).max().unwrap_or(0);
    let made = record.time.and_then(|n| plan.times.get(&n)).copied();
    for generation in 0..=last {
        if generation > 0 {
            sequence.stage(STAGE);
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
                    file::open(plan, sequence, &what, &path, libc::O_RDONLY as u32)?
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
