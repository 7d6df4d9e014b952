//! Credentials of threads: ids, groups, capabilities and securebits.

use dormouse_record::Credentials;

use crate::load::allowed::{Allowed, SETGID, SETPCAP, SETUID};

/// SECBIT_KEEP_CAPS, which every process may set (PR_SET_KEEPCAPS(2const)).
const KEEP_CAPS: u64 = 1 << 4;

/// Refuses credentials that a thread outside of user namespaces cannot have obtained. The text
/// continues a sentence about the thread.
pub(in crate::load) fn check(
    found: &Credentials,
    allowed: &Allowed,
) -> std::result::Result<(), String> {
    let all = found.uids.iter().chain(&found.gids).chain(&found.groups);
    if let Some(id) = all.copied().find(|id| !allowed.has_id(*id)) {
        return Err(format!("has id {id}"));
    }
    let may = |capability: u64| allowed.may_have(capability);
    if found.uids.iter().any(|uid| *uid != allowed.uid) && !may(SETUID) {
        return Err(format!("has uids {:?}", found.uids));
    }
    let own_groups = found.groups.iter().all(|g| allowed.groups.contains(g));
    if (found.gids.iter().any(|gid| *gid != allowed.gid) || !own_groups) && !may(SETGID) {
        return Err(format!("has gids {:?} and groups {:?}", found.gids, found.groups));
    }
    if let Some((name, mask)) = ["inheritable", "permitted", "effective", "bounding", "ambient"]
        .iter()
        .zip(found.capabilities)
        .find(|(_, mask)| mask & !allowed.capabilities != 0)
    {
        return Err(format!("has {name} capabilities {mask:x}"));
    }
    // No program gives a process of another user more than the process had at its start.
    let gains = allowed.uid == 0 || !allowed.no_new_privileges;
    let [inheritable, permitted, effective, _, ambient] = found.capabilities;
    let own = inheritable & !allowed.inheritable | permitted | effective | ambient;
    if !gains && own & !allowed.ambient != 0 {
        return Err(format!("has capabilities {own:x} as another user than root"));
    }
    if found.securebits & !KEEP_CAPS != 0 && !may(SETPCAP) {
        return Err(format!("has securebits {:x}", found.securebits));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_only_narrow_the_configuration() {
        let allowed = Allowed {
            capabilities: SETUID | 1,
            ids: 1000,
            no_new_privileges: true,
            ..Allowed::default()
        };
        let root = Credentials { capabilities: [0, 1, 1, 1, 0], ..Credentials::default() };
        assert!(check(&root, &allowed).is_ok());
        let other = Credentials { uids: [33; 4], ..root.clone() };
        assert!(check(&other, &allowed).is_ok(), "it has CAP_SETUID");
        let group = Credentials { gids: [33; 4], ..root.clone() };
        assert!(check(&group, &allowed).is_err(), "it has no CAP_SETGID");
        let more = Credentials { capabilities: [0, 0, 0, 4, 0], ..root.clone() };
        assert!(check(&more, &allowed).is_err());
        let unmapped = Credentials { uids: [0, 0, 0, 5000], ..root.clone() };
        assert!(check(&unmapped, &allowed).is_err());
        let secure = Credentials { securebits: 0x1, ..root.clone() };
        assert!(check(&secure, &allowed).is_err_and(|excess| excess.contains("securebits")));
        let secure = Credentials { securebits: KEEP_CAPS, ..root.clone() };
        assert!(check(&secure, &allowed).is_ok());
        let own = |capabilities, no_new_privileges, ambient| {
            let found = Credentials { uids: [5; 4], gids: [0; 4], capabilities, ..root.clone() };
            let allowed = Allowed { uid: 5, no_new_privileges, ambient, ..allowed.clone() };
            check(&found, &allowed).is_ok()
        };
        assert!(own([0, 1, 1, 1, 0], false, 0), "by a set-user-ID program");
        assert!(!own([0, 1, 1, 1, 0], true, 0) && !own([1, 0, 0, 1, 0], true, 0));
        assert!(own([0, 0, 0, 1, 0], true, 0) && own([1, 1, 1, 1, 1], true, 1));
        let user = Allowed { uid: 5, ..allowed };
        assert!(
            check(&Credentials::default(), &user).is_err(),
            "root, but the configuration has a user"
        );
    }
}
