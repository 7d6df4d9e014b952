//! Credentials: a process takes those of a peer for a moment, and its recorded ones last of all.
//!
//! The check that recorded credentials only narrow the grants of the configuration is
//! [`super::check`]; a thread takes no capability beyond the configuration here either.

use dormouse_record::{Credentials, PeerCredentials, Thread};

use super::allowed::Allowed;
use super::check::credentials::check;
use super::plan::Plan;
use crate::inject::program::{Arg, Call, Sequence};

/// Credentials to present to a peer: the recorded ones if the container's configuration allows
/// them, otherwise the configured ones.
pub(super) fn narrowed(who: &PeerCredentials, allowed: &Allowed) -> PeerCredentials {
    match check(&ids_of(who), allowed) {
        Ok(()) => who.clone(),
        Err(_) => {
            let Allowed { uid, gid, groups, .. } = allowed.clone();
            PeerCredentials { pid: who.pid, uid, gid, groups }
        }
    }
}

/// Credentials with the ids of a peer.
fn ids_of(who: &PeerCredentials) -> Credentials {
    let PeerCredentials { uid, gid, ref groups, .. } = *who;
    let groups = groups.clone();
    Credentials { uids: [uid; 4], gids: [gid; 4], groups, ..Credentials::default() }
}

/// Takes the ids of a peer, and keeps all capabilities.
pub(super) fn assume(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    who: &PeerCredentials,
) {
    keep_while_changing(sequence, what);
    set_ids(plan, sequence, what, &ids_of(who));
}

/// Makes later changes of ids keep all capabilities.
pub(super) fn keep_while_changing(sequence: &mut Sequence, what: &str) {
    const NO_SETUID_FIXUP: u64 = 4;
    sequence.call(what, prctl(libc::PR_SET_SECUREBITS, [NO_SETUID_FIXUP, 0, 0, 0]));
}

/// Reverts [`assume`], for a process that continues.
pub(super) fn resume_own(plan: &mut Plan<'_>, sequence: &mut Sequence, what: &str) {
    let root = PeerCredentials { pid: None, uid: 0, gid: 0, groups: Vec::new() };
    set_ids(plan, sequence, what, &ids_of(&root));
    sequence.call(what, prctl(libc::PR_SET_SECUREBITS, [0; 4]));
    // Makes the process's own descriptors in procfs accessible to it again.
    sequence.call(what, prctl(libc::PR_SET_DUMPABLE, [1, 0, 0, 0]));
}

fn prctl(request: i32, args: [u64; 4]) -> Call {
    let [a, b, c, d] = args.map(Arg::Number);
    Call::new(libc::SYS_prctl, [Arg::from(request), a, b, c, d])
}

/// The thread takes its recorded credentials. Until here it is root of its user namespace with all
/// capabilities.
pub(super) fn take_on(plan: &mut Plan<'_>, sequence: &mut Sequence, thread: &Thread) {
    let found = &thread.credentials;
    let what = format!("the credentials of thread {}", thread.tid);
    let what = what.as_str();
    let capabilities = found.capabilities.map(|mask| mask & plan.allowed.capabilities);
    bound(sequence, what, capabilities);
    sequence.call(what, prctl(libc::PR_SET_KEEPCAPS, [1, 0, 0, 0]));
    set_ids(plan, sequence, what, found);
    drop_the_rest(plan, sequence, what, found, capabilities);
}

/// The same in another user namespace, whose entry has granted every capability in there. The ids
/// were set before the entry.
pub(super) fn take_on_inside(plan: &mut Plan<'_>, sequence: &mut Sequence, thread: &Thread) {
    let found = &thread.credentials;
    let what = format!("the credentials of thread {}", thread.tid);
    bound(sequence, &what, found.capabilities);
    drop_the_rest(plan, sequence, &what, found, found.capabilities);
}

/// Reduces the bounding set to these capabilities.
fn bound(sequence: &mut Sequence, what: &str, [.., bounding, _]: [u64; 5]) {
    for capability in (0..64u64).filter(|n| bounding & (1 << n) == 0) {
        // Capabilities that the kernel does not know are absent already.
        sequence.call(what, prctl(libc::PR_CAPBSET_DROP, [capability, 0, 0, 0]).lenient());
    }
}

/// Sets all ids.
pub(super) fn set_ids(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    found: &Credentials,
) {
    let groups: Vec<u8> = found.groups.iter().flat_map(|g| g.to_ne_bytes()).collect();
    let at = plan.builder.data(&groups);
    let count = found.groups.len() as u64;
    sequence.call(what, Call::new(libc::SYS_setgroups, [count.into(), at.into()]));
    let ids = |call, [real, effective, saved, _]: [u32; 4]| {
        Call::new(call, [real.into(), effective.into(), saved.into()])
    };
    sequence.call(what, ids(libc::SYS_setresgid, found.gids));
    // ORDER: the change of user ids removes the effective capabilities, without which a group that
    // is none of its own is refused, silently.
    if found.gids[3] != found.gids[1] {
        sequence.call(what, Call::new(libc::SYS_setfsgid, [found.gids[3].into()]));
    }
    sequence.call(what, ids(libc::SYS_setresuid, found.uids));
    set_file_system_user(sequence, what, found);
}

/// The user id for files, where it is another than the effective one.
fn set_file_system_user(sequence: &mut Sequence, what: &str, found: &Credentials) {
    if found.uids[3] != found.uids[1] {
        sequence.call(what, Call::new(libc::SYS_setfsuid, [found.uids[3].into()]));
    }
}

/// Sets the capabilities, securebits and no_new_privs.
fn drop_the_rest(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    found: &Credentials,
    [inheritable, permitted, effective, _, ambient]: [u64; 5],
) {
    // A change of the effective uid has cleared the effective set: the permitted set is restored
    // first.
    let everything = capset(plan, [EVERYTHING, EVERYTHING, inheritable]);
    sequence.call(what, everything.lenient());
    set_file_system_user(sequence, what, found); // one that is none of its own needs them
    sequence.call(what, prctl(libc::PR_SET_KEEPCAPS, [0; 4]));
    if found.securebits != 0 {
        sequence.call(what, prctl(libc::PR_SET_SECUREBITS, [found.securebits, 0, 0, 0]));
    }
    for capability in (0..64u64).filter(|n| ambient & (1 << n) != 0) {
        let raise = [libc::PR_CAP_AMBIENT_RAISE as u64, capability, 0, 0];
        sequence.call(what, prctl(libc::PR_CAP_AMBIENT, raise));
    }
    let last = capset(plan, [effective, permitted, inheritable]);
    sequence.call(what, last);
    if found.no_new_privileges {
        sequence.call(what, prctl(libc::PR_SET_NO_NEW_PRIVS, [1, 0, 0, 0]));
    }
}

/// All capabilities that may exist.
const EVERYTHING: u64 = u64::MAX >> 23;

/// Reduces the capabilities of the calling process to these.
pub(super) fn keep_only(plan: &mut Plan<'_>, sequence: &mut Sequence, what: &str, mask: u64) {
    let call = capset(plan, [EVERYTHING & mask, EVERYTHING & mask, 0]);
    sequence.call(what, call);
}

/// capset(2): effective, permitted, inheritable.
fn capset(plan: &mut Plan<'_>, sets: [u64; 3]) -> Call {
    const VERSION_3: u32 = 0x2008_0522;
    let mut header = VERSION_3.to_ne_bytes().to_vec();
    header.extend([0; 4]);
    let header = plan.builder.data(&header);
    let words = [0, 32].into_iter().flat_map(|shift| sets.map(|set| (set >> shift) as u32));
    let bytes: Vec<u8> = words.flat_map(u32::to_ne_bytes).collect();
    let data = plan.builder.data(&bytes);
    Call::new(libc::SYS_capset, [header.into(), data.into()])
}
