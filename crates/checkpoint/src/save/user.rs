//! User namespaces: the one of each process, the parent of each, and the one that owns other
//! namespaces, by ioctl_nsfs(2).
//!
//! procfs shows ids as mapped in the reader's user namespace, which is the host's. All ids of a
//! record are those of the container's own user namespace: [`Seen::maps`] is the map.

use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::call::Namespace;
use dormouse_kernel::namespace::{self, UserMaps};
use dormouse_kernel::{pidfd, proc};
use dormouse_record::{Ids, Thing, User};

use super::refusal::{self, Reason};
use super::seen::{Seen, link_of_first};
use super::survey::{Survey, Surveyed};

/// Parses the inode of a link in procfs: `user:[4026531837]`.
fn inode(link: &str) -> Option<u64> {
    link.strip_prefix("user:[")?.strip_suffix(']')?.parse().ok()
}

/// Finds the members of each namespace. ORDER: before objects are inspected that may belong to one.
pub(super) fn find(survey: &mut Survey<'_>, tree: &[Seen]) {
    let Some(first) = tree.first() else { return };
    let own = link_of_first(first.first, tree, "user").as_deref().and_then(inode);
    survey.users.own = own;
    for seen in tree.iter().filter(|seen| !seen.is_zombie) {
        // The process may have exited meanwhile: nothing is stopped yet.
        if let Some(inode) = seen.link("user").and_then(inode).filter(|inode| Some(*inode) != own) {
            survey.users.members.entry(inode).or_insert(seen.pid);
        }
    }
}

/// Refuses a container whose init has left its pid namespace's user namespace: no process is left
/// there to set it up again.
pub(super) fn check_first(seen: &Seen) -> Result<(), Reason> {
    let Some(process) = &seen.pidfd else { return Ok(()) };
    let own =
        pidfd::namespace(process, Namespace::Pid).and_then(|pids| namespace::owner(pids.as_fd()));
    // If the owner may not be read, the process is in a namespace below it, or has exited.
    let own = own.ok().and_then(|own| rustix::fs::fstat(own).ok()).map(|stat| stat.st_ino);
    match own.zip(seen.link("user").and_then(inode)) {
        Some((own, its)) if own != its => {
            Err("it is the first, and in another user namespace, which is not saved yet".into())
        }
        _ => Ok(()),
    }
}

/// The object of the user namespace of a process outside the container's own.
pub(super) fn of_process(survey: &mut Survey<'_>, seen: &Seen) -> Result<usize, Reason> {
    let said = |why: &dyn std::fmt::Display| format!("it is in a user namespace of its own {why}");
    let process = seen.pidfd.as_ref().ok_or_else(|| said(&"and has exited"))?;
    let its = pidfd::namespace(process, Namespace::User);
    let its = its.map_err(|e| said(&format!("that cannot be inspected: {e}")))?;
    let found = object(survey, seen, &its).map_err(|why| said(&why))?;
    let found = found.ok_or_else(|| said(&"that it has made just now"));
    // A thread may change its ids alone. In the namespace it cannot take ids that are not mapped,
    // and all threads enter the namespace together.
    let ids = |tid: u32| {
        let fields = proc::fields(tid).ok()?; // it may have exited
        Some(["Uid", "Gid", "Groups"].map(|name| fields.field(name).map(str::to_owned)))
    };
    let first = ids(seen.pid);
    let is_another = |tid: &u32| ids(*tid).is_some_and(|ids| Some(ids) != first);
    if first.is_some() && seen.tids.iter().any(is_another) {
        return Err(said(&"and has a thread with other ids, which is not saved yet"));
    }
    found
}

/// Sets the owning user namespaces of the other namespaces of a process.
pub(super) fn own(survey: &mut Survey<'_>, seen: &Seen, surveyed: &Surveyed) {
    let others = [
        (surveyed.mounts, Namespace::Mount, "mount"),
        (surveyed.uts, Namespace::Uts, "UTS"),
        (surveyed.ipc, Namespace::Ipc, "IPC"),
        (surveyed.net, Namespace::Net, "network"),
        (surveyed.time[0], Namespace::Time, "time"),
        (surveyed.cgroup_namespace, Namespace::Cgroup, "cgroup"),
    ];
    if surveyed.user.is_some() && surveyed.time[1].is_some() {
        let why = "it has made a time namespace for its children in a user namespace of its own, \
                   which is not saved yet";
        survey.found.refusals.push(seen.refuse("", why));
    }
    for (index, kind, name) in others {
        let (Some(index), Some(process)) = (index, &seen.pidfd) else { continue };
        let failed = |e: dormouse_kernel::CallError| format!("that cannot be inspected: {e}");
        let namespace = pidfd::namespace(process, kind);
        let owner = namespace.and_then(|namespace| namespace::owner(namespace.as_fd()));
        let found = owner.map_err(failed).and_then(|owner| object(survey, seen, &owner));
        let is_shared = match &survey.found.objects[index].thing {
            Thing::Mounts(mounts) => mounts.mounts.iter().any(|mount| mount.shared),
            _ => false,
        };
        let found = found.and_then(|owner| match (owner, kind) {
            (Some(_), Namespace::Time | Namespace::Cgroup) => Err("which is not saved yet".into()),
            (Some(_), _) if is_shared => {
                Err("and has shared mounts, which is not saved yet".into())
            }
            (Some(_), kind) if kind != Namespace::Uts && !may_administer(seen.first) => {
                let why = "that cannot be created again without CAP_SYS_ADMIN";
                Err(why.into())
            }
            _ => Ok(owner),
        });
        match found {
            Ok(owner) => survey.found.objects[index].user = owner,
            Err(why) => {
                let why = format!(
                    "it is in a {name} namespace that belongs to a user namespace of its own {why}"
                );
                survey.found.refusals.push(seen.refuse("", why));
            }
        }
    }
}

/// Whether a process may gain CAP_SYS_ADMIN; for the first process, whether the container was
/// granted it.
fn may_administer(pid: u32) -> bool {
    const SYS_ADMIN: u64 = 1 << 21;
    let bound = proc::fields(pid).ok().and_then(|fields| fields.mask("CapBnd"));
    bound.is_some_and(|mask| mask & SYS_ADMIN != 0)
}

/// The object of a user namespace; `None` for the container's own.
fn object(
    survey: &mut Survey<'_>,
    seen: &Seen,
    namespace: &OwnedFd,
) -> Result<Option<usize>, Reason> {
    let failed = |e: &dyn std::fmt::Display| format!("that cannot be inspected: {e}");
    let inode = rustix::fs::fstat(namespace).map_err(|e| failed(&e))?.st_ino;
    if survey.users.own == Some(inode) {
        return Ok(None);
    }
    if let Some(known) = survey.users.known.get(&inode) {
        return known.clone().map(Some);
    }
    let found = read(survey, seen, namespace, inode);
    survey.users.known.insert(inode, found.clone());
    found.map(Some)
}

/// Adds a user namespace, after its parent.
fn read(
    survey: &mut Survey<'_>,
    seen: &Seen,
    namespace: &OwnedFd,
    inode: u64,
) -> Result<usize, Reason> {
    let failed = |e: dormouse_kernel::CallError| format!("that cannot be inspected: {e}");
    // The initial namespace has no parent.
    let parent = namespace::owner(namespace.as_fd());
    let parent = parent.map_err(|_| "that does not descend from the container's".to_owned())?;
    let parent = object(survey, seen, &parent)?;
    let of_member = survey.users.members.get(&inode).map(|pid| UserMaps::of_process(*pid));
    // The process may have exited, or left, meanwhile: nothing is stopped yet.
    let maps = match of_member {
        Some(Ok(maps)) => maps,
        _ => UserMaps::of(namespace.as_fd()).map_err(failed)?,
    };
    let (container_uids, container_gids) = seen.maps().ids();
    let owner = namespace::owner_uid(namespace.as_fd()).map_err(failed)?;
    let owner = Ids { inside: 0, outside: owner, count: 1 }.within(&container_uids);
    let foreign = || "with ids that the container does not have".to_owned();
    let record = User {
        parent,
        owner: owner.ok_or_else(foreign)?.outside,
        uids: ids(&maps.uid_map, &container_uids).ok_or_else(foreign)?,
        gids: ids(&maps.gid_map, &container_gids).ok_or_else(foreign)?,
        denies_groups: maps.denies_groups,
    };
    Ok(survey.add(Thing::User(record)))
}

/// Parses the lines of a map, by the container's ids.
fn ids(text: &str, container: &[Ids]) -> Option<Vec<Ids>> {
    let line = |line: &str| {
        let mut numbers = line.split_ascii_whitespace().map(|n| n.parse().ok());
        let (inside, outside, count) = (numbers.next()??, numbers.next()??, numbers.next()??);
        Ids { inside, outside, count }.within(container)
    };
    text.lines().map(line).collect()
}

/// Refuses objects that can only be created again from inside a namespace.
pub(super) fn finish(survey: &mut Survey<'_>) {
    let objects = &survey.found.objects;
    let is_inside = |object: &dormouse_record::Object| match &object.thing {
        Thing::MessageQueue(queue) => {
            queue.namespace.is_some_and(|namespace| objects[namespace].user.is_some())
        }
        _ => false,
    };
    if objects.iter().any(is_inside) {
        let why = "a message queue in an IPC namespace that belongs to a user namespace of a \
                   process's own, which is not saved yet";
        survey.found.refusals.push(refusal::of_object(why.into()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_read_with_ids_of_the_container() {
        let container = [
            Ids { inside: 0, outside: 100_000, count: 32_767 },
            Ids { inside: 65_534, outside: 132_767, count: 1 },
        ];
        let said =
            ids("         0     101000          1\n     65534     132767          1\n", &container);
        let expected = [
            Ids { inside: 0, outside: 1000, count: 1 },
            Ids { inside: 65_534, outside: 65_534, count: 1 },
        ];
        assert_eq!(said.as_deref(), Some(&expected[..]));
        assert_eq!(ids("", &container), Some(Vec::new()));
        assert_eq!(ids("0 0 1\n", &container), None);
        assert_eq!(ids("0 132766 2\n", &container), None);
    }
}
