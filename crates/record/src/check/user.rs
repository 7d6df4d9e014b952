//! Checks of user namespaces, of the processes in them, and of the objects that belong to them.

use super::{Found, ensure, object};
use crate::{Ids, Object, Process, Records, Thing, User};

/// LIMIT: user namespaces inside, and the depth of their nesting (user_namespaces(7)).
const NAMESPACES_MAX: usize = 1024;
const DEPTH_MAX: usize = 32;
/// LIMIT: bytes of a map in its written form, which the kernel accepts in one write.
const MAP_BYTES_MAX: usize = 4096;
/// LIMIT: the largest id.
const ID_MAX: u64 = u32::MAX as u64;

/// Checks that there are no more than a program could have made.
pub(super) fn number(records: &Records) -> Found {
    let is_user = |object: &&Object| matches!(object.thing, Thing::User(_));
    let count = records.objects.iter().filter(is_user).count();
    ensure(count <= NAMESPACES_MAX, || format!("{count} user namespaces"))
}

pub(super) fn user(n: usize, user: &User, records: &Records) -> Found {
    let mut around = None;
    let mut depth = 1;
    let mut at = (n, user.parent);
    while let (inner, Some(parent)) = at {
        let Thing::User(found) = object(parent, records)? else {
            return Err("in no user namespace".into());
        };
        ensure(parent < inner, || "in one that is not made before".into())?;
        around = around.or(Some(found));
        depth += 1;
        at = (parent, found.parent);
    }
    ensure(depth <= DEPTH_MAX, || "too deep".into())?;
    let is_there = |id, all: &[Ids]| Ids::has(all, id);
    ensure(around.is_none_or(|around| is_there(user.owner, &around.uids)), || "its owner".into())?;
    ensure(around.is_none_or(|around| !around.gids.is_empty()), || "in one without groups".into())?;
    let denied = around.is_some_and(|around| around.denies_groups);
    ensure(user.denies_groups || !denied, || "its groups".into())?;
    map(&user.uids, around.map(|around| &around.uids[..]))
        .map_err(|what| format!("users {what}"))?;
    map(&user.gids, around.map(|around| &around.gids[..])).map_err(|what| format!("groups {what}"))
}

fn map(all: &[Ids], around: Option<&[Ids]>) -> Found {
    ensure(all.len() <= Ids::MAX, || "too many".into())?;
    let sound = |ids: &Ids| {
        let fits = |first: u32| u64::from(first) + u64::from(ids.count) <= ID_MAX;
        ids.count > 0 && fits(ids.inside) && fits(ids.outside)
    };
    ensure(all.iter().all(sound), || "beyond all ids".into())?;
    let meets = |a: u32, b: u32, one: &Ids, other: &Ids| a < b + other.count && b < a + one.count;
    let is_twice = |one: &Ids, other: &Ids| {
        meets(one.inside, other.inside, one, other) || meets(one.outside, other.outside, one, other)
    };
    let pairs =
        || all.iter().enumerate().flat_map(|(n, one)| all[..n].iter().map(move |o| (one, o)));
    ensure(!pairs().any(|(one, other)| is_twice(one, other)), || "twice".into())?;
    let mut bytes = 0;
    for ids in all {
        let there = around.map_or(Some(*ids), |around| ids.within(around));
        let Ids { inside, outside, count } = there.ok_or("that are not in its parent")?;
        bytes += format!("{inside} {outside} {count}\n").len();
    }
    ensure(bytes < MAP_BYTES_MAX, || "too many".into())
}

/// Checks that a process's user namespace exists, and holds all its threads.
pub(super) fn process(process: &Process, records: &Records) -> Found {
    let Some(n) = process.user else { return Ok(()) };
    ensure(matches!(object(n, records)?, Thing::User(_)), || "in no user namespace".into())?;
    let first = process.threads.first().map(|thread| &thread.credentials);
    let is_same = |thread: &crate::Thread| {
        let own = &thread.credentials;
        first.is_some_and(|f| (&f.uids, &f.gids, &f.groups) == (&own.uids, &own.gids, &own.groups))
    };
    ensure(process.threads.iter().all(is_same), || "a thread with other ids".into())
}

/// Checks that an object of a user namespace is a namespace, and can be made there.
pub(super) fn owner(it: &Object, records: &Records) -> Found {
    if let Thing::MessageQueue(queue) = &it.thing
        && let Some(namespace) = queue.namespace.and_then(|n| records.objects.get(n))
    {
        ensure(namespace.user.is_none(), || "of another user namespace".into())?;
    }
    let Some(n) = it.user else { return Ok(()) };
    ensure(matches!(object(n, records)?, Thing::User(_)), || "of no user namespace".into())?;
    let is_namespace = match &it.thing {
        Thing::Uts(_) | Thing::Ipc(_) | Thing::Net(_) => true,
        Thing::Mounts(mounts) => !mounts.own && mounts.mounts.iter().all(|mount| !mount.shared),
        _ => false,
    };
    ensure(is_namespace, || "of a user namespace, and not a namespace".into())
}

#[cfg(test)]
mod tests {
    use super::super::records;
    use super::*;
    use crate::sample::small;
    use crate::{Thread, Uts};

    fn its(records: &mut Records, n: usize) -> &mut User {
        match &mut records.objects[n].thing {
            Thing::User(user) => user,
            _ => unreachable!("it is one"),
        }
    }

    #[test]
    fn invalid_user_namespaces_are_refused() {
        let said = |change: fn(&mut Records)| {
            let mut all = small();
            let ids = |inside, outside, count| vec![Ids { inside, outside, count }];
            let outer = User {
                parent: None,
                owner: 0,
                uids: ids(0, 100, 10),
                gids: ids(0, 100, 10),
                denies_groups: true,
            };
            let inner = User {
                parent: Some(1),
                owner: 105,
                uids: ids(5, 105, 5),
                gids: Vec::new(),
                denies_groups: true,
            };
            all.objects.push(Thing::User(outer).into());
            all.objects.push(Thing::User(inner).into());
            let uts = Thing::Uts(Uts { hostname: None, domainname: None });
            all.objects.push(Object { user: Some(2), ..uts.into() });
            all.processes[0].user = Some(2);
            change(&mut all);
            records(&all).err().map(|e| e.to_string()).unwrap_or_default()
        };
        assert_eq!(said(|_| {}), "");
        type Case = (fn(&mut Records), &'static str);
        let cases: [Case; 16] = [
            (|r| r.processes[0].user = Some(0), "in no user namespace"),
            (|r| r.processes[0].user = Some(9), "not there"),
            (
                |r| {
                    let mut other = Thread { tid: 77, ..Thread::default() };
                    other.credentials.uids = [1; 4];
                    r.processes[0].threads.push(other);
                },
                "a thread with other ids",
            ),
            (|r| r.objects[0].user = Some(1), "not a namespace"),
            (|r| r.objects[3].user = Some(0), "of no user namespace"),
            (|r| its(r, 2).parent = Some(0), "in no user namespace"),
            (|r| its(r, 2).parent = Some(2), "not made before"),
            (|r| its(r, 1).parent = Some(2), "not made before"),
            (|r| its(r, 2).owner = 99, "its owner"),
            (|r| its(r, 1).gids.clear(), "without groups"),
            (|r| its(r, 2).denies_groups = false, "its groups"),
            (|r| its(r, 2).uids[0].count = 6, "not in its parent"),
            (|r| its(r, 1).uids[0].count = 0, "beyond all ids"),
            (|r| its(r, 1).gids[0].outside = u32::MAX, "beyond all ids"),
            (
                |r| {
                    let one = its(r, 1).uids[0];
                    its(r, 1).uids.push(Ids { inside: 9, outside: 500, ..one });
                },
                "users twice",
            ),
            (
                |r| {
                    let one = r.objects[1].clone();
                    r.objects.extend(std::iter::repeat_n(one, NAMESPACES_MAX));
                },
                "1026 user namespaces",
            ),
        ];
        for (change, text) in cases {
            let said = said(change);
            assert!(said.contains(text), "{text}: {said}");
        }
    }
}
