//! Credentials: a record only narrows the grants of the container's configuration.

use std::net::IpAddr;

use super::{Plan, user};
use crate::error::{Error, Result};
use crate::format::{Credentials, PeerCredentials, Records, Thing, Thread};
use crate::inject::program::{Arg, Call, Sequence};

/// The grants of a container's configuration.
#[derive(Debug, Clone, Default)]
pub struct Allowed {
    /// The first process is the init of the house.
    pub has_init: bool,
    /// Capabilities, as a mask (capabilities(7)).
    pub capabilities: u64,
    /// Those of them that its first process has as another user than root (ambient ones).
    pub ambient: u64,
    /// Those of them that its first process has as inheritable ones, as any user.
    pub inheritable: u64,
    /// The user its first process runs as, inside.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Its supplementary groups.
    pub groups: Vec<u32>,
    /// How many ids it has, from 0; and 65,534.
    pub ids: u32,
    /// Directories inside that are tmpfs.
    pub memory: Vec<String>,
    /// Its network stack is private.
    pub own_network: bool,
    /// It may create control groups below its own.
    pub cgroups: bool,
    /// Any process may create a user namespace (user_namespaces(7)).
    pub user_namespaces: bool,
    /// No filter prevents chroot(2) by a process with the capability in its own user namespace.
    pub chroots: bool,
    /// No process gains privileges by execve.
    pub no_new_privileges: bool,
    /// Objects with open files that were held and are passed in ([`super::Wanted::Held`]); all
    /// others are created again.
    pub held: Vec<u32>,
    /// It has a terminal, whose master is the engine's.
    pub console: bool,
    /// Addresses of another container, each with the address that replaces it.
    pub addresses: Vec<(IpAddr, IpAddr)>,
    /// The restore runs beside the saved container, as a child beside its parent: memory that is
    /// wiped by a fork (MADV_WIPEONFORK), such as the state of random number generators, is empty.
    pub beside: bool,
    /// Time that has passed for its timers and waits since the checkpoint; 0 if time has stopped
    /// for it.
    pub passed_ns: u64,
}

impl Allowed {
    /// Whether it has an id.
    pub(super) fn has_id(&self, id: u32) -> bool {
        id < self.ids || id == 65_534
    }
}

const SYS_CHROOT: u64 = 1 << 18;
const SYS_ADMIN: u64 = 1 << 21;
const SYS_TIME: u64 = 1 << 25;
const NET_ADMIN: u64 = 1 << 12;
const NET_RAW: u64 = 1 << 13;
const SETGID: u64 = 1 << 6;
const SETUID: u64 = 1 << 7;
const SETPCAP: u64 = 1 << 8;
/// SECBIT_KEEP_CAPS, which is everybody's to set (PR_SET_KEEPCAPS(2const)).
const KEEP_CAPS: u64 = 1 << 4;

/// Refuses records that cannot result from the configuration.
pub(super) fn check(records: &Records, allowed: &Allowed) -> Result<()> {
    let may_set_up = allowed.own_network && allowed.capabilities & NET_ADMIN != 0;
    if records.about.network.is_some() && !may_set_up {
        let text = "its network stack has a configuration, which the container's configuration \
                    does not allow (a network of its own, and NET_ADMIN)";
        return Err(Error::Elsewhere(text.into()));
    }
    for (n, object) in records.objects.iter().enumerate() {
        let is_raw = match &object.thing {
            Thing::RawSocket(raw) => raw.socket_type == libc::SOCK_RAW,
            Thing::PacketSocket(_) => true,
            _ => false,
        };
        if is_raw && allowed.capabilities & NET_RAW == 0 {
            return Err(Error::Elsewhere(format!(
                "object {n} is a {}, which the container's configuration does not allow (NET_RAW)",
                object.thing.name()
            )));
        }
        if let Thing::Net(net) = &object.thing
            && !net.is_new()
            && object.user.is_none()
            && allowed.capabilities & NET_ADMIN == 0
        {
            return Err(Error::Elsewhere(format!(
                "object {n} is a configured {}, which the container's configuration does not \
                 allow (NET_ADMIN)",
                object.thing.name()
            )));
        }
        if let Thing::Time(time) = &object.thing
            && !time.is_new()
            && allowed.capabilities & SYS_TIME == 0
        {
            return Err(Error::Elsewhere(format!(
                "object {n} is a {} with clocks that were set, which the container's \
                 configuration does not allow (SYS_TIME)",
                object.thing.name()
            )));
        }
        // The restore makes these with more capabilities than the processes have. Network stacks
        // and IPC objects take memory that is not accounted to a cgroup. So their creation needs
        // SYS_ADMIN even in a user namespace of the process itself.
        let is_namespace = match object.thing {
            Thing::Mounts(_) | Thing::Ipc(_) | Thing::Net(_) => true,
            Thing::Time(_) | Thing::CgroupNamespace(_) => true,
            Thing::Uts(_) => object.user.is_none(),
            _ => false,
        };
        if is_namespace && allowed.capabilities & SYS_ADMIN == 0 {
            return Err(Error::Elsewhere(format!(
                "object {n} is a {}, which the container's configuration does not allow \
                 (SYS_ADMIN)",
                object.thing.name()
            )));
        }
    }
    for process in &records.processes {
        // A process that can choose the root directory controls any set-user-ID program run there.
        // Inside its own user namespace every process can, so set-user-ID programs give no
        // credentials outside that namespace's map.
        let may_choose = match process.user {
            Some(_) => allowed.capabilities & SYS_CHROOT != 0 || allowed.chroots,
            None => allowed.capabilities & SYS_CHROOT != 0,
        };
        if let Some(root) = process.root.as_ref().filter(|_| !may_choose) {
            let (pid, name) = (process.pid, &process.name);
            return Err(Error::Elsewhere(format!(
                "process {pid} ({name}) has the root '{root}', which the container's configuration \
                 does not allow"
            )));
        }
        for thread in &process.threads {
            let said = |what: String| {
                let (tid, name) = (thread.tid, &thread.name);
                Error::Elsewhere(format!(
                    "thread {tid} ({name}) {what}, which the container's configuration does not \
                     allow"
                ))
            };
            let sound = match process.user {
                Some(user) => user::check_thread(&thread.credentials, records, user, allowed),
                None => check_thread(&thread.credentials, allowed),
            };
            sound.map_err(said)?;
        }
    }
    user::check(records, allowed)
}

/// Returns whether any process may have held the capability. Root with CAP_SETUID can take any uid;
/// so can a process without no_new_privs, through a set-user-ID program.
pub(super) fn may(allowed: &Allowed, capability: u64) -> bool {
    let by_itself = allowed.uid == 0 || !allowed.no_new_privileges;
    by_itself && allowed.capabilities & capability != 0
}

pub(super) fn check_thread(
    found: &Credentials,
    allowed: &Allowed,
) -> std::result::Result<(), String> {
    let all = found.uids.iter().chain(&found.gids).chain(&found.groups);
    if let Some(id) = all.copied().find(|id| !allowed.has_id(*id)) {
        return Err(format!("has id {id}"));
    }
    let may = |capability: u64| may(allowed, capability);
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
    // By no program does a process of another user come to have more than it began with.
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

/// Credentials to present to a peer: the recorded ones if the container's configuration allows
/// them, otherwise the configured ones.
pub(super) fn narrowed(who: &PeerCredentials, allowed: &Allowed) -> PeerCredentials {
    match check_thread(&ids_of(who), allowed) {
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
pub(super) fn play(
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

/// Reverts [`play`], for a process that continues.
pub(super) fn play_no_more(plan: &mut Plan<'_>, sequence: &mut Sequence, what: &str) {
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
    let_go_of_the_rest(plan, sequence, what, found, capabilities);
}

/// The same in another user namespace, whose entry has granted every capability in there. The ids
/// were set before the entry.
pub(super) fn take_on_inside(plan: &mut Plan<'_>, sequence: &mut Sequence, thread: &Thread) {
    let found = &thread.credentials;
    let what = format!("the credentials of thread {}", thread.tid);
    bound(sequence, &what, found.capabilities);
    let_go_of_the_rest(plan, sequence, &what, found, found.capabilities);
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
    // ORDER: the change of user ids takes the effective capabilities away, without which a group that is none
    // of its own is refused, silently.
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
fn let_go_of_the_rest(
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
pub(super) fn have(plan: &mut Plan<'_>, sequence: &mut Sequence, what: &str, mask: u64) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{CgroupNamespace, Net, Object, Process, Time, User, Uts};

    #[test]
    fn records_only_narrow_the_configuration() {
        let allowed = Allowed {
            has_init: false,
            capabilities: SETUID | 1,
            ambient: 0,
            inheritable: 0,
            uid: 0,
            gid: 0,
            groups: vec![],
            ids: 1000,
            memory: vec![],
            own_network: false,
            cgroups: false,
            user_namespaces: false,
            chroots: false,
            held: Vec::new(),
            no_new_privileges: true,
            console: false,
            addresses: Vec::new(),
            beside: false,
            passed_ns: 0,
        };
        let uts = Thing::Uts(Uts { hostname: None, domainname: None });
        let objects = vec![Object::from(uts)];
        let apart = Records { objects, ..Records::default() };
        let said = check(&apart, &allowed).map_err(|e| e.to_string());
        assert!(said.is_err_and(|said| said.contains("SYS_ADMIN")));
        let capabilities = allowed.capabilities | SYS_ADMIN;
        assert!(check(&apart, &Allowed { capabilities, ..allowed.clone() }).is_ok());
        let net = |up| {
            let objects = vec![Thing::Net(Net { up, ..Net::default() }).into()];
            let apart = Records { objects, ..Records::default() };
            let said = check(&apart, &Allowed { capabilities, ..allowed.clone() });
            said.map_err(|e| e.to_string())
        };
        assert!(net(false).is_ok());
        assert!(net(true).is_err_and(|said| said.contains("NET_ADMIN")));
        let of = |thing: Thing, capabilities| {
            let apart = Records { objects: vec![thing.into()], ..Records::default() };
            let said = check(&apart, &Allowed { capabilities, ..allowed.clone() });
            said.map_err(|e| e.to_string())
        };
        let own = |own_network, capabilities| {
            let mut records = Records::default();
            records.about.network = Some(Net::default());
            check(&records, &Allowed { own_network, capabilities, ..allowed.clone() }).is_ok()
        };
        assert!(own(true, NET_ADMIN) && !own(false, NET_ADMIN) && !own(true, SYS_ADMIN));
        let time = |monotonic_ns| Thing::Time(Time { monotonic_ns, boottime_ns: 0 });
        assert!(of(time(0), SYS_ADMIN).is_ok());
        assert!(of(time(1), SYS_ADMIN).is_err_and(|said| said.contains("SYS_TIME")));
        assert!(of(time(1), SYS_TIME).is_err_and(|said| said.contains("SYS_ADMIN")));
        assert!(of(time(1), SYS_ADMIN | SYS_TIME).is_ok());
        let root = || Thing::CgroupNamespace(CgroupNamespace::default());
        assert!(of(root(), SYS_ADMIN).is_ok());
        assert!(of(root(), SYS_TIME).is_err_and(|said| said.contains("SYS_ADMIN")));
        let root = Credentials { capabilities: [0, 1, 1, 1, 0], ..Credentials::default() };
        assert!(check_thread(&root, &allowed).is_ok());
        let other = Credentials { uids: [33; 4], ..root.clone() };
        assert!(check_thread(&other, &allowed).is_ok(), "it has CAP_SETUID");
        let group = Credentials { gids: [33; 4], ..root.clone() };
        assert!(check_thread(&group, &allowed).is_err(), "it has no CAP_SETGID");
        let more = Credentials { capabilities: [0, 0, 0, 4, 0], ..root.clone() };
        assert!(check_thread(&more, &allowed).is_err());
        let unmapped = Credentials { uids: [0, 0, 0, 5000], ..root.clone() };
        assert!(check_thread(&unmapped, &allowed).is_err());
        let secure = Credentials { securebits: 0x1, ..root.clone() };
        assert!(check_thread(&secure, &allowed).is_err_and(|said| said.contains("securebits")));
        let secure = Credentials { securebits: KEEP_CAPS, ..root.clone() };
        assert!(check_thread(&secure, &allowed).is_ok());
        let own = |capabilities, no_new_privileges, ambient| {
            let found = Credentials { uids: [5; 4], gids: [0; 4], capabilities, ..root.clone() };
            let allowed = Allowed { uid: 5, no_new_privileges, ambient, ..allowed.clone() };
            check_thread(&found, &allowed).is_ok()
        };
        assert!(own([0, 1, 1, 1, 0], false, 0), "by a set-user-id program");
        assert!(!own([0, 1, 1, 1, 0], true, 0) && !own([1, 0, 0, 1, 0], true, 0));
        assert!(own([0, 0, 0, 1, 0], true, 0) && own([1, 1, 1, 1, 1], true, 1));
        let jailed = |user, capabilities, chroots| {
            let user_namespace = User { owner: 0, ..User::default() };
            let objects = vec![Thing::User(user_namespace).into()];
            let root = Some("/jail".to_owned());
            let processes = vec![Process { user, root, ..Process::default() }];
            let records = Records { objects, processes, ..Records::default() };
            let user_namespaces = true;
            let allowed = Allowed { capabilities, user_namespaces, chroots, ..allowed.clone() };
            check(&records, &allowed).map_err(|e| e.to_string())
        };
        assert!(jailed(None, SYS_CHROOT, false).is_ok());
        assert!(jailed(None, !SYS_CHROOT, true).is_err_and(|said| said.contains("'/jail'")));
        assert!(jailed(Some(0), SYS_CHROOT, false).is_ok());
        assert!(jailed(Some(0), !SYS_CHROOT, true).is_ok(), "allowed inside its own namespace");
        assert!(jailed(Some(0), !SYS_CHROOT, false).is_err(), "a filter prevents chroot");
        let user = Allowed { uid: 5, ..allowed };
        assert!(
            check_thread(&Credentials::default(), &user).is_err(),
            "root, but the configuration has a user"
        );
    }
}
