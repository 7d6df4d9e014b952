//! Control groups: created by the first process where they are mounted inside, before any other
//! process exists. The first process enters its own; every other process is created in its group
//! (clone3(2), CLONE_INTO_CGROUP). A group with controllers in `cgroup.subtree_control` takes no
//! process, so the controllers are enabled after the first process has left for its own group.
//! Groups that were frozen are frozen by the engine once all registers are set and before any
//! process runs.

use dormouse_record::{CGROUPS_AT, Cgroup, Error, Records, Result};

use super::plan::Plan;
use super::{cgroup_namespace, open};
use crate::inject::program::{Arg, Call, Cell, Sequence};
use crate::look;

/// Makes all groups.
pub(super) fn make_all(plan: &mut Plan<'_>, sequence: &mut Sequence) -> Result<()> {
    let records = plan.records;
    let Some(cgroups) = records.cgroups() else {
        return cgroup_namespace::make_all(plan, sequence);
    };
    if !plan.allowed.cgroups {
        let text = "it has control groups inside, and this container may have none (--systemd)";
        return Err(Error::Elsewhere(text.into()));
    }
    for group in &cgroups.groups {
        let cell = make(plan, sequence, group)?;
        plan.cgroups.insert(group.path.clone(), cell);
    }
    cgroup_namespace::make_all(plan, sequence)?;
    if let Some(own) = &records.processes[0].cgroup {
        write(plan, sequence, own, "cgroup.procs", "0")?;
    }
    for group in &cgroups.groups {
        for controller in &group.hands_down {
            let text = format!("+{controller}");
            write(plan, sequence, &group.path, "cgroup.subtree_control", &text)?;
        }
        for (name, value) in &group.settings {
            for line in value.lines() {
                write(plan, sequence, &group.path, name, line)?;
            }
        }
    }
    Ok(())
}

/// Freezes the groups that were frozen. `pid` is the first process; all processes are stopped.
pub(super) fn freeze(pid: u32, records: &Records) -> Result<()> {
    let Some(cgroups) = records.cgroups() else { return Ok(()) };
    look::cgroup::freeze(pid, cgroups).map_err(Error::call("freeze its control groups"))
}

fn what(path: &str) -> String {
    format!("the control group '{path}'")
}

fn place(path: &str) -> String {
    format!("{CGROUPS_AT}/{path}")
}

/// Makes a group, unless it is the container's own, and opens it.
fn make(plan: &mut Plan<'_>, sequence: &mut Sequence, group: &Cgroup) -> Result<Cell> {
    let (what, place) = (what(&group.path), place(&group.path));
    let at = plan.builder.text(place.as_bytes());
    let here = Arg::from(libc::AT_FDCWD);
    open::check_parent(plan, sequence, &what, &place);
    if !group.path.is_empty() {
        let args = [here, at.into(), Arg::from(group.mode)];
        sequence.call(what.clone(), Call::new(libc::SYS_mkdirat, args));
        let args = [here, at.into(), Arg::from(group.mode), Arg::Number(0)];
        sequence.call(what.clone(), Call::new(libc::SYS_fchmodat, args));
        for (name, value) in &group.attributes {
            let (name, length) = (plan.builder.text(name.as_bytes()), value.0.len() as u64);
            let value = plan.builder.data(&value.0);
            let args = [at.into(), name.into(), value.into(), length.into(), Arg::Number(0)];
            sequence.call(what.clone(), Call::new(libc::SYS_setxattr, args));
        }
        let mut own = |name: &str, (uid, gid): (u32, u32)| {
            if (uid, gid) != (0, 0) {
                let at = plan.builder.text(format!("{place}{name}").as_bytes());
                let args = [here, at.into(), uid.into(), gid.into(), Arg::Number(0)];
                sequence.call(what.clone(), Call::new(libc::SYS_fchownat, args));
            }
        };
        own("", group.owner);
        for name in ["/cgroup.procs", "/cgroup.threads", "/cgroup.subtree_control"] {
            own(name, group.manager);
        }
    }
    let flags = (libc::O_PATH | libc::O_DIRECTORY) as u32;
    let cell = open::path(plan, sequence, &what, &place, flags)?;
    Ok(plan.lift(sequence, &what, cell))
}

/// Writes to a file of a group.
fn write(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    path: &str,
    name: &str,
    text: &str,
) -> Result<()> {
    let what = format!("{} ({name})", what(path));
    let place = format!("{}/{name}", place(path).trim_end_matches('/'));
    let cell = open::path(plan, sequence, &what, &place, libc::O_WRONLY as u32)?;
    let (at, bytes) = (plan.builder.data(text.as_bytes()), text.len() as u64);
    let args = [cell.into(), at.into(), bytes.into()];
    sequence.call(what.clone(), Call::new(libc::SYS_write, args).returns(bytes));
    sequence.call(what, Call::new(libc::SYS_close, [cell.into()]));
    Ok(())
}
