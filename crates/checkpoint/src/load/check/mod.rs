//! Refuses records that cannot result from the container's configuration.
//!
//! The engine makes objects with more rights than the processes of the container have had, and a
//! record may be forged. Each right that a record needs is therefore compared with the
//! configuration, before anything is created: by [`check`] for objects, roots and filters, by
//! [`credentials`] for threads, and by [`user`] for user namespaces. [`dormouse_record::check`] has
//! proved before that the numbers of a record refer to something.
//!
//! These modules use [`super::allowed`] and the records alone.

pub(super) mod credentials;
mod user;

use dormouse_kernel::weakened;
use dormouse_record::{Error, Object, Process, Records, Result, Thing, Thread};

use super::allowed::{Allowed, NET_ADMIN, NET_RAW, SYS_ADMIN, SYS_CHROOT, SYS_TIME};

/// Refuses records that cannot result from the configuration.
pub(super) fn check(records: &Records, allowed: &Allowed) -> Result<()> {
    let may_set_up = allowed.own_network && allowed.capabilities & NET_ADMIN != 0;
    if records.about.network.is_some() && !may_set_up {
        let text = "its network stack has a configuration, which the container's configuration \
                    does not allow (a network of its own, and NET_ADMIN)";
        return Err(Error::Elsewhere(text.into()));
    }
    let about = &records.about;
    let has_names = about.hostname.is_some() || about.domainname.is_some();
    if has_names && !(allowed.own_names && allowed.capabilities & SYS_ADMIN != 0) {
        let text = "its processes have set the host name, which the container's configuration does \
                    not allow (a host name of its own, and SYS_ADMIN)";
        return Err(Error::Elsewhere(text.into()));
    }
    if let (Some((name, _)), false) = (about.ipc_limits.first(), allowed.own_ipc) {
        return Err(Error::Elsewhere(format!(
            "its processes have set {name}, and this container shares its IPC namespace"
        )));
    }
    for (n, object) in records.objects.iter().enumerate() {
        check_object(n, object, allowed)?;
        check_options(n, object, records, allowed)?;
    }
    for process in &records.processes {
        check_root(process, allowed)?;
        for thread in &process.threads {
            check_thread(thread, process, records, allowed)?;
        }
    }
    user::check(records, allowed)?;
    check_filters(records, allowed)
}

/// Refuses object `n` if making it needs a capability that the processes cannot have had.
fn check_object(n: usize, object: &Object, allowed: &Allowed) -> Result<()> {
    let lacks = |capability: u64| allowed.capabilities & capability == 0;
    let is_raw = match &object.thing {
        Thing::RawSocket(raw) => raw.socket_type == libc::SOCK_RAW,
        Thing::PacketSocket(_) => true,
        _ => false,
    };
    if is_raw && lacks(NET_RAW) {
        return Err(Error::Elsewhere(format!(
            "object {n} is a {}, which the container's configuration does not allow (NET_RAW)",
            object.thing.name()
        )));
    }
    if let Thing::Net(net) = &object.thing
        && !net.is_new()
        && object.user.is_none()
        && lacks(NET_ADMIN)
    {
        return Err(Error::Elsewhere(format!(
            "object {n} is a configured {}, which the container's configuration does not \
             allow (NET_ADMIN)",
            object.thing.name()
        )));
    }
    if let Thing::Time(time) = &object.thing
        && !time.is_new()
        && lacks(SYS_TIME)
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
    if is_namespace && lacks(SYS_ADMIN) {
        return Err(Error::Elsewhere(format!(
            "object {n} is a {}, which the container's configuration does not allow \
             (SYS_ADMIN)",
            object.thing.name()
        )));
    }
    Ok(())
}

/// Refuses options of object `n` that only a process with rights over the network stack can have set. In a
/// user namespace inside, any process may have them.
fn check_options(n: usize, object: &Object, records: &Records, allowed: &Allowed) -> Result<()> {
    let owner = object.net.and_then(|net| records.objects.get(net)).and_then(|net| net.user);
    let may_set = owner.is_some() || allowed.capabilities & (NET_ADMIN | NET_RAW) != 0;
    let excess = object.thing.socket_options().iter().find(|one| one.needs_network_rights());
    match excess.filter(|_| !may_set) {
        Some(one) => Err(Error::Elsewhere(format!(
            "object {n} ({}) has the option {} of level {}, which the container's configuration does \
             not allow (NET_ADMIN)",
            object.thing.name(),
            one.name,
            one.level
        ))),
        None => Ok(()),
    }
}

/// Refuses a root directory of its own that the process cannot have chosen.
///
/// A process that can choose the root directory controls any set-user-ID program run there. Inside
/// its own user namespace every process can, so set-user-ID programs give no credentials outside
/// that namespace's map.
fn check_root(process: &Process, allowed: &Allowed) -> Result<()> {
    let has_capability = allowed.capabilities & SYS_CHROOT != 0;
    let may_choose = has_capability || process.user.is_some() && allowed.chroots;
    match &process.root {
        Some(root) if !may_choose => Err(Error::Elsewhere(format!(
            "process {} ({}) has the root '{root}', which the container's configuration does not \
             allow",
            process.pid, process.name
        ))),
        _ => Ok(()),
    }
}

/// Refuses credentials that the thread cannot have obtained.
fn check_thread(
    thread: &Thread,
    process: &Process,
    records: &Records,
    allowed: &Allowed,
) -> Result<()> {
    let sound = match process.user {
        Some(user) => user::check_thread(&thread.credentials, records, user, allowed),
        None if weakened("restored-users") => Ok(()),
        None => credentials::check(&thread.credentials, allowed),
    };
    sound.map_err(|excess| {
        let (tid, name) = (thread.tid, &thread.name);
        Error::Elsewhere(format!(
            "thread {tid} ({name}) {excess}, which the container's configuration does not allow"
        ))
    })
}

/// Refuses system call filters that the threads cannot have loaded.
///
/// A filter can fake the results of system calls of a set-user-ID program. Without no_new_privs,
/// only a process with CAP_SYS_ADMIN in the container can have loaded a filter.
fn check_filters(records: &Records, allowed: &Allowed) -> Result<()> {
    // In its own user namespace any process may have the capability.
    let outside = records.processes.iter().filter(|process| process.user.is_none());
    let threads = outside.flat_map(|process| &process.threads);
    for thread in threads.filter(|thread| !thread.filters.is_empty()) {
        let is_bound = thread.credentials.no_new_privileges || allowed.no_new_privileges;
        if !is_bound && allowed.capabilities & SYS_ADMIN == 0 {
            return Err(Error::Elsewhere(format!(
                "thread {} ({}) has a system call filter and may gain privileges, which the \
                 container's configuration does not allow",
                thread.tid, thread.name
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use dormouse_record::{
        Bytes, CgroupNamespace, Credentials, Filter, Net, SocketOption, Time, UdpSocket, User, Uts,
    };

    use super::*;

    /// The error of a check, or an empty text.
    fn refusal(records: &Records, allowed: &Allowed) -> String {
        check(records, allowed).err().map(|e| e.to_string()).unwrap_or_default()
    }

    fn of(thing: Thing) -> Records {
        Records { objects: vec![thing.into()], ..Records::default() }
    }

    fn allowed(capabilities: u64) -> Allowed {
        Allowed { capabilities, ids: 1000, no_new_privileges: true, ..Allowed::default() }
    }

    #[test]
    fn namespaces_need_their_capabilities() {
        let uts = || of(Thing::Uts(Uts { hostname: None, domainname: None }));
        assert!(refusal(&uts(), &allowed(1)).contains("SYS_ADMIN"));
        assert_eq!(refusal(&uts(), &allowed(SYS_ADMIN)), "");
        let net = |up| of(Thing::Net(Net { up, ..Net::default() }));
        assert_eq!(refusal(&net(false), &allowed(SYS_ADMIN)), "");
        assert!(refusal(&net(true), &allowed(SYS_ADMIN)).contains("NET_ADMIN"));
        let time = |monotonic_ns| of(Thing::Time(Time { monotonic_ns, boottime_ns: 0 }));
        assert_eq!(refusal(&time(0), &allowed(SYS_ADMIN)), "");
        assert!(refusal(&time(1), &allowed(SYS_ADMIN)).contains("SYS_TIME"));
        assert!(refusal(&time(1), &allowed(SYS_TIME)).contains("SYS_ADMIN"));
        assert_eq!(refusal(&time(1), &allowed(SYS_ADMIN | SYS_TIME)), "");
        let cgroups = || of(Thing::CgroupNamespace(CgroupNamespace::default()));
        assert_eq!(refusal(&cgroups(), &allowed(SYS_ADMIN)), "");
        assert!(refusal(&cgroups(), &allowed(SYS_TIME)).contains("SYS_ADMIN"));
    }

    #[test]
    fn settings_need_private_namespaces() {
        let mut records = Records::default();
        records.about.domainname = Some("other".into());
        let own = |capabilities| Allowed { own_names: true, ..allowed(capabilities) };
        assert_eq!(refusal(&records, &own(SYS_ADMIN)), "");
        assert!(refusal(&records, &own(NET_ADMIN)).contains("SYS_ADMIN"));
        assert!(refusal(&records, &allowed(SYS_ADMIN)).contains("a host name of its own"));
        let mut records = Records::default();
        records.about.ipc_limits.push(("kernel/msgmax".into(), "1\n".into()));
        assert_eq!(refusal(&records, &Allowed { own_ipc: true, ..allowed(0) }), "");
        assert!(refusal(&records, &allowed(SYS_ADMIN)).contains("kernel/msgmax"));
    }

    #[test]
    fn privileged_socket_options_need_a_right_over_the_network() {
        let with = |level, name, value: i32, owner: Option<usize>| {
            let value = Bytes(value.to_ne_bytes().to_vec());
            let options = vec![SocketOption { level, name, value }];
            let udp = UdpSocket {
                v6: false,
                flags: 0,
                address: None,
                free: false,
                chosen: false,
                peer: None,
                received: Vec::new(),
                error: None,
                shut: 0,
                groups: Vec::new(),
                options,
            };
            let net = Object { user: owner, ..Thing::Net(Net::default()).into() };
            let socket = Object { net: Some(0), ..Thing::UdpSocket(udp).into() };
            Records { objects: vec![net, socket], ..Records::default() }
        };
        let (mark, priority) = (libc::SO_MARK, libc::SO_PRIORITY);
        let (socket, ip) = (libc::SOL_SOCKET, libc::IPPROTO_IP);
        let allowed = |capabilities| allowed(SYS_ADMIN | capabilities);
        for (level, name, value) in
            [(socket, mark, 7), (socket, priority, 7), (ip, libc::IP_TRANSPARENT, 1)]
        {
            let marked = with(level, name, value, None);
            assert!(refusal(&marked, &allowed(0)).contains("NET_ADMIN"), "{level} {name}");
            assert_eq!(refusal(&marked, &allowed(NET_ADMIN)), "");
            assert_eq!(refusal(&marked, &allowed(NET_RAW)), "");
        }
        assert_eq!(refusal(&with(socket, priority, 6, None), &allowed(0)), "");
        let users = |records: &Records| check_options(1, &records.objects[1], records, &allowed(0));
        assert!(users(&with(socket, mark, 7, Some(2))).is_ok(), "in its own user namespace");
    }

    #[test]
    fn network_configuration_needs_a_network_of_its_own() {
        let mut records = Records::default();
        records.about.network = Some(Net::default());
        let own = |own_network, capabilities| {
            check(&records, &Allowed { own_network, ..allowed(capabilities) }).is_ok()
        };
        assert!(own(true, NET_ADMIN) && !own(false, NET_ADMIN) && !own(true, SYS_ADMIN));
    }

    #[test]
    fn root_directory_needs_the_right_to_choose_it() {
        let jailed = |user, capabilities, chroots| {
            let objects = vec![Thing::User(User { owner: 0, ..User::default() }).into()];
            let root = Some("/jail".to_owned());
            let processes = vec![Process { user, root, ..Process::default() }];
            let records = Records { objects, processes, ..Records::default() };
            let user_namespaces = true;
            refusal(&records, &Allowed { user_namespaces, chroots, ..allowed(capabilities) })
        };
        assert_eq!(jailed(None, SYS_CHROOT, false), "");
        assert!(jailed(None, !SYS_CHROOT, true).contains("'/jail'"));
        assert_eq!(jailed(Some(0), SYS_CHROOT, false), "");
        assert_eq!(jailed(Some(0), !SYS_CHROOT, true), "", "allowed inside its own namespace");
        assert!(
            jailed(Some(0), !SYS_CHROOT, false).contains("'/jail'"),
            "a filter prevents chroot"
        );
    }

    #[test]
    fn filters_need_no_new_privileges_or_the_capability() {
        let filtered = |user: Option<usize>, no_new_privileges| {
            let filters = vec![Filter { flags: 0, code: Bytes(Vec::new()) }];
            let credentials = Credentials { no_new_privileges, ..Credentials::default() };
            let threads = vec![Thread { filters, credentials, ..Thread::default() }];
            let objects = user.iter().map(|_| Thing::User(User::default()).into()).collect();
            let processes = vec![Process { user, threads, ..Process::default() }];
            Records { objects, processes, ..Records::default() }
        };
        let free = |capabilities| Allowed {
            user_namespaces: true,
            no_new_privileges: false,
            ..allowed(capabilities)
        };
        assert!(refusal(&filtered(None, false), &free(0)).contains("system call filter"));
        assert_eq!(refusal(&filtered(None, false), &free(SYS_ADMIN)), "");
        assert_eq!(refusal(&filtered(None, false), &allowed(0)), "");
        assert_eq!(refusal(&filtered(None, true), &free(0)), "");
        assert_eq!(refusal(&filtered(Some(0), false), &free(0)), "", "allowed in its namespace");
    }
}
