//! Cgroup namespaces: each is created by a helper process in the control group at its root, and
//! entered by its members.

use dormouse_record::{Process, Result, Thing};

use super::plan::Plan;
use super::{helper, open};
use crate::inject::program::{Arg, Call, Sequence};

/// Makes all namespaces. ORDER: the control groups exist, and none has controllers enabled for its
/// children yet: such groups take no process.
pub(super) fn make_all(plan: &mut Plan<'_>, sequence: &mut Sequence) -> Result<()> {
    let records = plan.records;
    for (n, object) in records.objects.iter().enumerate() {
        let Thing::CgroupNamespace(it) = &object.thing else { continue };
        let what = format!("object {n} ({})", object.thing.name());
        let mut part = Sequence::default();
        part.call(&*what, Call::new(libc::SYS_unshare, [Arg::from(libc::CLONE_NEWCGROUP)]));
        let path = "/proc/self/ns/cgroup";
        let made = open::own_path(plan, &mut part, &what, path, libc::O_RDONLY as u32)?;
        // The first process is still in the container's own group.
        let root = if it.root.is_empty() { None } else { plan.cgroups.get(&it.root).copied() };
        helper::run_in_cgroup(plan, sequence, &what, root, part);
        plan.cells[n] = Some(plan.lift(sequence, &what, made));
    }
    Ok(())
}

/// Makes a process enter its cgroup namespace. ORDER: before it has threads.
pub(super) fn enter(plan: &Plan<'_>, sequence: &mut Sequence, record: &Process) -> Result<()> {
    let Some(namespace) = record.cgroup_namespace else { return Ok(()) };
    let what = format!("the cgroup namespace of process {}", record.pid);
    let args = [plan.object(namespace)?.into(), Arg::from(libc::CLONE_NEWCGROUP)];
    sequence.call(what, Call::new(libc::SYS_setns, args));
    Ok(())
}
