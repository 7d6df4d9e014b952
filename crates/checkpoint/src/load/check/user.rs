//! User namespaces, and credentials of the threads in them: no more than processes of the
//! configuration could have created.

use dormouse_record::{Credentials, Error, Ids, Records, Result, Thing};

use super::credentials;
use crate::load::allowed::{Allowed, SETFCAP, SETGID, SETUID};

/// Refuses namespaces that processes of that configuration could not have created.
///
/// Without CAP_SETUID/CAP_SETGID a process may map only its own uid and gid (setgroups denied);
/// with them, any id of the container, id 0 only with CAP_SETFCAP. Below such a namespace any ids
/// that are mapped in it may be mapped.
pub(super) fn check(records: &Records, allowed: &Allowed) -> Result<()> {
    for (n, object) in records.objects.iter().enumerate() {
        let Thing::User(user) = &object.thing else { continue };
        let refused = |what: &str| {
            Error::Elsewhere(format!(
                "object {n} is a user namespace {what}, which the container's configuration does \
                 not allow"
            ))
        };
        if !allowed.user_namespaces {
            return Err(refused("(SYS_ADMIN)"));
        }
        if user.parent.is_some() {
            continue;
        }
        let owner =
            Credentials { uids: [user.owner; 4], gids: [allowed.gid; 4], ..Credentials::default() };
        credentials::check(&owner, allowed)
            .map_err(|excess| refused(&format!("with an owner that {excess}")))?;
        let may = |capability| allowed.may_have(capability);
        let is_one = |ids: &[Ids], own: u32| {
            ids.is_empty() || matches!(ids, [ids] if ids.outside == own && ids.count == 1)
        };
        if !may(SETUID) && !is_one(&user.uids, user.owner) {
            return Err(refused(&format!("with users {:?}", user.uids)));
        }
        let is_own =
            is_one(&user.gids, allowed.gid) && (user.gids.is_empty() || user.denies_groups);
        if !may(SETGID) && !is_own {
            return Err(refused(&format!("with groups {:?}", user.gids)));
        }
        if !may(SETFCAP) && Ids::has(&user.uids, 0) {
            return Err(refused("with root among its users"));
        }
        let all = user.uids.iter().chain(&user.gids);
        let mut last = all.flat_map(|ids| [ids.outside, ids.outside + (ids.count - 1)]);
        if !last.all(|id| allowed.has_id(id)) {
            return Err(refused("with ids that the container does not have"));
        }
    }
    Ok(())
}

/// Refuses a thread whose credentials are impossible in its namespace. Ids must be allowed by the
/// configuration, or be mapped. Capabilities apply only inside, and may be any.
pub(super) fn check_thread(
    found: &Credentials,
    records: &Records,
    user: usize,
    allowed: &Allowed,
) -> std::result::Result<(), String> {
    // The outermost namespace around it maps the most ids.
    let mut outermost = None;
    let mut at = Some(user);
    while let Some(Thing::User(user)) = at.map(|n| &records.objects[n].thing) {
        outermost = Some(user);
        at = user.parent; // the parent comes first, as was checked
    }
    let Some(outermost) = outermost else { return Err("is in no user namespace".into()) };
    // A process inside may have taken any mapped id.
    let rest = |ids: [u32; 4], mapped: &[Ids], own: u32| {
        ids.map(|id| if Ids::has(mapped, id) && allowed.has_id(id) { own } else { id })
    };
    let groups = found.groups.iter().copied();
    let taken = |id: &u32| {
        !outermost.denies_groups && Ids::has(&outermost.gids, *id) && allowed.has_id(*id)
    };
    let outside = Credentials {
        uids: rest(found.uids, &outermost.uids, allowed.uid),
        gids: rest(found.gids, &outermost.gids, allowed.gid),
        groups: groups.filter(|id| !taken(id)).collect(),
        ..Credentials::default()
    };
    credentials::check(&outside, allowed)
}

#[cfg(test)]
mod tests {
    use dormouse_record::User;

    use super::*;

    fn allowed(capabilities: u64, uid: u32) -> Allowed {
        Allowed {
            capabilities,
            uid,
            gid: uid,
            ids: 1000,
            user_namespaces: true,
            no_new_privileges: true,
            ..Allowed::default()
        }
    }

    fn records(user: User) -> Records {
        let inner = User { parent: Some(0), owner: user.owner, ..user.clone() };
        let objects = vec![Thing::User(user).into(), Thing::User(inner).into()];
        Records { objects, ..Records::default() }
    }

    fn one(inside: u32, outside: u32, count: u32) -> Vec<Ids> {
        vec![Ids { inside, outside, count }]
    }

    #[test]
    fn user_namespaces_beyond_the_configuration_are_refused() {
        let refusal = |user: &User, allowed: &Allowed| {
            check(&records(user.clone()), allowed).err().map(|e| e.to_string()).unwrap_or_default()
        };
        let own = User {
            parent: None,
            owner: 5,
            uids: one(0, 5, 1),
            gids: one(0, 5, 1),
            denies_groups: true,
        };
        let plain = allowed(0, 5);
        assert_eq!(refusal(&own, &plain), "");
        let none = Allowed { user_namespaces: false, ..plain.clone() };
        assert!(refusal(&own, &none).contains("(SYS_ADMIN)"));
        assert!(refusal(&User { owner: 6, ..own.clone() }, &plain).contains("with an owner"));
        assert!(
            refusal(&User { uids: one(0, 6, 1), ..own.clone() }, &plain).contains("with users")
        );
        assert!(
            refusal(&User { uids: one(0, 5, 2), ..own.clone() }, &plain).contains("with users")
        );
        assert!(
            refusal(&User { gids: one(0, 6, 1), ..own.clone() }, &plain).contains("with groups")
        );
        let groups = User { denies_groups: false, ..own.clone() };
        assert!(refusal(&groups, &plain).contains("with groups"));
        let root = allowed(SETUID | SETGID, 0);
        let many = User { uids: one(1, 1, 999), ..groups };
        assert_eq!(refusal(&many, &root), "");
        assert!(refusal(&User { uids: one(0, 0, 1), ..many.clone() }, &root).contains("root"));
        assert!(
            refusal(&User { uids: one(1, 1, 1000), ..many.clone() }, &root)
                .contains("does not have")
        );
        let all = allowed(SETUID | SETGID | SETFCAP, 0);
        assert_eq!(refusal(&User { uids: one(0, 0, 1), ..many }, &all), "");
    }

    #[test]
    fn ids_of_a_thread_are_mapped_or_from_before() {
        let user = User {
            parent: None,
            owner: 0,
            uids: one(0, 100, 10),
            gids: one(0, 200, 10),
            denies_groups: false,
        };
        let records = records(user);
        let root = allowed(0, 0);
        let refusal = |uid, gid, groups: &[u32]| {
            let groups = groups.to_vec();
            let found =
                Credentials { uids: [uid; 4], gids: [gid; 4], groups, ..Credentials::default() };
            check_thread(&found, &records, 1, &root).err().unwrap_or_default()
        };
        assert_eq!(refusal(0, 0, &[]), "");
        assert_eq!(refusal(109, 200, &[201, 209]), "");
        assert!(refusal(110, 0, &[]).contains("uids"));
        assert!(refusal(0, 199, &[]).contains("gids"));
        assert!(refusal(0, 0, &[210]).contains("groups"));
    }
}
