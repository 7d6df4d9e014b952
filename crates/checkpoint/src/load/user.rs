//! User namespaces: each is created by a helper process, gets its id maps from another, and is
//! entered by its members, last of all.
//!
//! **Creation.** A helper process takes the uid of the namespace's owner and enters the parent
//! namespace. There it creates the new one (unshare(2)), and exists until another helper has
//! written the id maps. That one is still in the parent namespace, has every capability there, and
//! writes to the files of the first in procfs (user_namespaces(7)). Each waits for the other with
//! futex(2) at a cell.
//!
//! **Entry.** A process that enters a user namespace has every capability in it, and none any more
//! over the container's own. Steps that need those come before. So does the change of its ids,
//! which the entry keeps and which need not be mapped there. The process has one thread until then,
//! as setns(2) requires. Its other threads are created inside ([`super::numberer`]).
//!
//! [`super::check`] refuses namespaces that processes of the configuration could not have created.
//! The entry is in [`super::process`], which is above this module.

use dormouse_record::{Ids, PeerCredentials, Result, Thing, User};

use super::allowed::SETFCAP;
use super::plan::Plan;
use super::{credentials, helper, open};
use crate::inject::program::{Arg, Call, Cell, Sequence};

fn name_of(n: usize) -> String {
    format!("object {n} (user namespace)")
}

/// Makes all namespaces. ORDER: before objects that belong to one.
pub(super) fn make_all(plan: &mut Plan<'_>, sequence: &mut Sequence) -> Result<()> {
    let records = plan.records;
    for (n, object) in records.objects.iter().enumerate() {
        let Thing::User(user) = &object.thing else { continue };
        let made = make(plan, sequence, &name_of(n), user)?;
        plan.cells[n] = Some(plan.lift(sequence, &name_of(n), made));
    }
    Ok(())
}

/// Makes a namespace.
fn make(plan: &mut Plan<'_>, sequence: &mut Sequence, what: &str, user: &User) -> Result<Cell> {
    let around = user.parent.and_then(|parent| match &plan.records.objects[parent].thing {
        Thing::User(around) => Some(around),
        _ => None,
    });
    // The owning group has no effect, but it must be mapped in the parent namespace.
    let gid = around.and_then(|around| around.gids.first()).map_or(0, |ids| ids.outside);
    let owner = PeerCredentials { pid: None, uid: user.owner, gid, groups: Vec::new() };
    let (is_made, has_ids) = (plan.cell(), plan.cell());
    let pids = [plan.fresh_pid(), plan.fresh_pid()];

    let mut part = Sequence::default();
    credentials::assume(plan, &mut part, what, &owner);
    if plan.allowed.capabilities & SETFCAP == 0 {
        // A creator without CAP_SETFCAP cannot map the container's root itself.
        credentials::keep_only(plan, &mut part, what, !SETFCAP);
    }
    enter_one(plan, &mut part, what, user.parent)?;
    part.call(what, Call::new(libc::SYS_unshare, [Arg::from(libc::CLONE_NEWUSER)]));
    let made = open::own_path(plan, &mut part, what, "/proc/self/ns/user", libc::O_RDONLY as u32)?;
    // Its files in procfs belong to its user only while it is dumpable.
    let dumpable = [Arg::from(libc::PR_SET_DUMPABLE), Arg::Number(1)];
    part.call(what, Call::new(libc::SYS_prctl, dumpable));
    helper::set(&mut part, what, is_made);
    helper::wait_until_set(&mut part, what, has_ids);
    helper::begin(plan, sequence, what, (pids[0], None), part, libc::CLONE_FILES as u64);

    let mut part = Sequence::default();
    credentials::assume(plan, &mut part, what, &owner);
    enter_one(plan, &mut part, what, user.parent)?;
    helper::wait_until_set(&mut part, what, is_made);
    let mut write = |name: &str, text: String| -> Result<()> {
        let path = format!("/proc/{}/{name}", pids[0]);
        let file = open::path(plan, &mut part, what, &path, libc::O_WRONLY as u32)?;
        let (at, bytes) = (plan.builder.data(text.as_bytes()), text.len() as u64);
        let args = [file.into(), at.into(), bytes.into()];
        part.call(format!("{what}, {name}"), Call::new(libc::SYS_write, args).returns(bytes));
        part.call(what, Call::new(libc::SYS_close, [file.into()]));
        Ok(())
    };
    // ORDER: before the group map.
    if user.denies_groups && !around.is_some_and(|around| around.denies_groups) {
        write("setgroups", "deny".into())?;
    }
    for (name, ids, around) in [
        ("uid_map", &user.uids, around.map(|around| &around.uids)),
        ("gid_map", &user.gids, around.map(|around| &around.gids)),
    ] {
        if !ids.is_empty() {
            write(name, map(ids, around.map(Vec::as_slice)))?;
        }
    }
    helper::set(&mut part, what, has_ids);
    helper::begin(plan, sequence, what, (pids[1], None), part, libc::CLONE_FILES as u64);
    for pid in pids {
        helper::wait(sequence, what, pid);
    }
    Ok(made)
}

/// The lines of a map, by ids of the parent namespace; `None` is the container's own.
fn map(ids: &[Ids], around: Option<&[Ids]>) -> String {
    let line = |ids: &Ids| {
        // All ids are in the parent's map, as was checked.
        let ids = around.map_or(Some(*ids), |around| ids.within(around)).unwrap_or(*ids);
        format!("{} {} {}\n", ids.inside, ids.outside, ids.count)
    };
    ids.iter().map(line).collect()
}

/// Makes the calling process enter a namespace; `None` is the container's own, where it is. Objects
/// that it creates then belong to the namespace.
pub(super) fn enter_one(
    plan: &Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    user: Option<usize>,
) -> Result<()> {
    let Some(user) = user else { return Ok(()) };
    let args = [plan.object(user)?.into(), Arg::from(libc::CLONE_NEWUSER)];
    sequence.call(what, Call::new(libc::SYS_setns, args));
    Ok(())
}

/// Makes a process keep the user namespace open that it will enter, while it closes all other
/// descriptors.
pub(super) fn keep(plan: &Plan<'_>, sequence: &mut Sequence, pid: u32, user: usize) -> Result<()> {
    let what = format!("the user namespace of process {pid}");
    let args = [plan.object(user)?.into(), plan.kept().into(), Arg::from(libc::O_CLOEXEC)];
    sequence.call(what, Call::new(libc::SYS_dup3, args));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_written_with_ids_of_the_parent_namespace() {
        let around = [Ids { inside: 0, outside: 1000, count: 10 }];
        let ids = [Ids { inside: 3, outside: 1004, count: 2 }];
        assert_eq!(map(&ids, None), "3 1004 2\n");
        assert_eq!(map(&ids, Some(&around)), "3 4 2\n");
    }
}
