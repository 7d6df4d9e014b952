//! Keys in the kernel's keyrings (keyrings(7)), and keyrings with names of their own, which no checkpoint has. The
//! kernel chooses the number of every key and keyring, which programs keep. Even a keyring that another process
//! keeps alive is not joined again by its name, unless its permissions let others search it; one without a name
//! never is. The contents of some keys cannot be read at all. Keyrings without keys that the kernel has named are
//! no reason to refuse: programs that begin a login make them.
//!
//! `/proc/keys` shows the keys that its reader may view, and by default that is the user of a key. A thread
//! with the id of each user that has keys therefore reads it.
//!
//! LIMIT: the users of a container without a user namespace of its own are those of the host, and their keys
//! are not told apart. A key whose user may not view it (keyctl_setperm(3)) is not found.

use std::thread;

use dormouse_kernel::{call, proc};

use super::refusal::Reason;
use crate::look::ids::Maps;

/// A key.
#[derive(Debug, PartialEq, Eq)]
struct Key<'t> {
    uid: u32,
    kind: &'t str,
    description: &'t str,
}

/// The reason to refuse: a key of a user of the container.
pub(super) fn find(maps: &Maps) -> Option<Reason> {
    let users = proc::whole_text("/proc/key-users").ok()?; // none where the kernel has no keys
    users.lines().filter_map(user).filter(|uid| is_own(maps, *uid)).find_map(|uid| {
        let text = thread::scope(|scope| scope.spawn(|| viewed_by(uid)).join().ok().flatten())?;
        let mut keys = text.lines().filter_map(key);
        let key = keys.find(|key| key.uid == uid && !key.is_keyring_of_the_kernel())?;
        let (inside, _) = maps.owner(uid, u32::MAX);
        Some(match key.kind {
            "keyring" => format!(
                "the keyring '{}' (keyrings(7)) of user {inside}, which is not saved: revoke it first, or end \
                 its session",
                key.description
            ),
            kind => format!(
                "the key '{}' (keyrings(7), type {kind}) of user {inside}, which is not saved: remove it first",
                key.description
            ),
        })
    })
}

impl Key<'_> {
    /// Whether this is a keyring with a name of the kernel: of a session without a name, of a thread, a process, a
    /// user, or of the users of a user namespace.
    fn is_keyring_of_the_kernel(&self) -> bool {
        let of_a_user = ["_uid.", "_uid_ses.", "_persistent."];
        let is_named = |prefix: &&str| self.description.starts_with(*prefix);
        let is_own = ["_ses", "_tid", "_pid", ".user_reg"].contains(&self.description);
        self.kind == "keyring" && (is_own || of_a_user.iter().any(is_named))
    }
}

/// Whether a user of the host is one of the container alone.
fn is_own(maps: &Maps, uid: u32) -> bool {
    let has = |(inside, outside, count): &(u32, u32, u32)| {
        uid >= *outside && uid - outside < *count && inside != outside
    };
    maps.uids.iter().any(has)
}

/// `/proc/keys` as a user sees it; this thread ends afterwards.
fn viewed_by(uid: u32) -> Option<String> {
    call::set_effective_uid(uid).ok()?;
    proc::whole_text("/proc/keys").ok()
}

/// The user of `1911357440:     1 1/1 1/200 5/20000`.
fn user(line: &str) -> Option<u32> {
    line.split_once(':')?.0.trim().parse().ok()
}

/// Reads `1f2a3b4c I--Q---     1 perm 3f010000  1000  1000 user      name: 5`: number, flags, references,
/// time left, permissions, user, group, type, description.
fn key(line: &str) -> Option<Key<'_>> {
    let mut words = line.split_ascii_whitespace();
    let is_gone = words.nth(1)?.contains(['R', 'D']);
    let uid = words.nth(3)?.parse().ok()?;
    let kind = words.nth(1)?;
    let rest = words.next()?;
    let at = rest.as_ptr() as usize - line.as_ptr() as usize;
    let description = line[at..].rsplit_once(':').map_or(&line[at..], |(name, _)| name);
    (!is_gone).then_some(Key { uid, kind, description })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_procfs_are_read() {
        let line = "1f2a3b4c I--Q---     1 perm 3f010000  1000  1001 user      a name: 5";
        assert_eq!(key(line), Some(Key { uid: 1000, kind: "user", description: "a name" }));
        let line = "00c84a6f IR-Q---     1 expd 3f010000     7     7 keyring   _ses: empty";
        assert_eq!(key(line), None, "revoked");
        for (name, is_known) in [
            ("_ses", true),
            ("_uid.1000", true),
            ("_tid", true),
            ("mine", false),
            ("_session", false),
        ] {
            let line =
                format!("00c84a6f I--Q---     1 perm 3f010000     7     7 keyring   {name}: empty");
            assert_eq!(key(&line).unwrap().is_keyring_of_the_kernel(), is_known, "{name}");
        }
        assert_eq!(user("   12:     1 1/1 1/200 5/20000"), Some(12));
        let maps = Maps { uids: vec![(0, 1000, 10), (40, 40, 5)], gids: Vec::new() };
        assert!(is_own(&maps, 1009) && !is_own(&maps, 1010) && !is_own(&maps, 41));
    }
}
