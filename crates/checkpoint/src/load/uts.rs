//! UTS namespaces: each is created by a helper process and entered by its members.

use dormouse_record::{Process, Result, Uts};

use super::plan::Plan;
use super::{helper, open, user};
use crate::inject::program::{Arg, Call, Cell, Sequence};

pub(super) fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    uts: &Uts,
    owner: Option<usize>,
) -> Result<Cell> {
    let mut part = Sequence::default();
    user::enter_one(plan, &mut part, what, owner)?;
    part.call(what, Call::new(libc::SYS_unshare, [Arg::from(libc::CLONE_NEWUTS)]));
    for (call, name) in
        [(libc::SYS_sethostname, &uts.hostname), (libc::SYS_setdomainname, &uts.domainname)]
    {
        let Some(name) = name else { continue };
        let at = plan.builder.data(name.as_bytes());
        part.call(what, Call::new(call, [at.into(), Arg::Number(name.len() as u64)]));
    }
    let cell = open::own_path(plan, &mut part, what, "/proc/self/ns/uts", libc::O_RDONLY as u32)?;
    helper::run(plan, sequence, what, part);
    Ok(cell)
}

/// Sets the names that processes have set in the container's own namespace.
pub(super) fn set_own(plan: &mut Plan<'_>, sequence: &mut Sequence) {
    let about = &plan.records.about;
    for (call, name) in
        [(libc::SYS_sethostname, &about.hostname), (libc::SYS_setdomainname, &about.domainname)]
    {
        let Some(name) = name else { continue };
        let at = plan.builder.data(name.as_bytes());
        let call = Call::new(call, [at.into(), Arg::Number(name.len() as u64)]);
        sequence.call("the host name", call);
    }
}

/// Makes a process enter its UTS namespace. ORDER: before it has threads.
pub(super) fn enter(plan: &Plan<'_>, sequence: &mut Sequence, record: &Process) -> Result<()> {
    let Some(uts) = record.uts else { return Ok(()) };
    let what = format!("the UTS namespace of process {}", record.pid);
    let args = [plan.object(uts)?.into(), Arg::from(libc::CLONE_NEWUTS)];
    sequence.call(what, Call::new(libc::SYS_setns, args));
    Ok(())
}
