//! Namespaces that are held by a descriptor alone.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use crate::call::{self, CloneArgs, CloneFlags, Cloned, Namespace};
use crate::error::{CallError, Explain, Result};
use crate::{Errno, pidfd, process};

/// A user namespace with the given maps (user_namespaces(7)) and no process in it: for mapping the
/// ids of a mount, or to be joined later.
///
/// A map is lines of `INSIDE OUTSIDE COUNT`. EINVAL when one is malformed or overlaps itself,
/// ENOSPC or EUSERS when the caller's number of user namespaces is used up, EPERM without
/// CAP_SETUID and CAP_SETGID.
pub fn new_user(uid_map: &str, gid_map: &str) -> Result<OwnedFd> {
    born_with(CloneFlags::NEWUSER, |pid, pidfd| map_and_hold(pid, pidfd, uid_map, gid_map))
}

/// A network namespace (network_namespaces(7)) that belongs to a user namespace made for it, in
/// which no process is and, having no ids, none can do anything. Who created it, root of the
/// caller's user namespace, has every capability over it; root of any other user namespace has none.
///
/// What belongs to the initial user namespace hears every uevent of the machine (lib/kobject_uevent.c);
/// this hears only those of its own network devices. Some settings are not shown in it:
/// `net/ipv6/route`, `net/core/xfrm_*` and, before Linux 6, a few more.
///
/// ENOSPC when a limit of namespaces is reached.
pub fn new_network() -> Result<OwnedFd> {
    let mut flags = CloneFlags::NEWUSER | CloneFlags::NEWNET;
    flags.set(CloneFlags::NEWUSER, !crate::weakened("network-owner"));
    born_with(flags, |_, pidfd| pidfd::namespace(pidfd, Namespace::Net))
}

/// Takes a descriptor from a process that is born into new namespaces and ends at once.
fn born_with(
    flags: CloneFlags,
    take: impl FnOnce(u32, &OwnedFd) -> Result<OwnedFd>,
) -> Result<OwnedFd> {
    let args = CloneArgs { flags, into_cgroup: None };
    let parent = rustix::process::getpid();
    // SAFETY: the child only makes system calls of the thin layer until it is killed.
    match unsafe { process::clone3(&args)? } {
        Cloned::Child => wait_to_be_killed(parent),
        Cloned::Parent { pid, pidfd } => {
            let result = take(pid, &pidfd);
            // ORDER: killed and reaped whatever happened, and only then the result is looked at.
            let killed = pidfd::send_signal(&pidfd, libc::SIGKILL);
            let reaped = killed.and_then(|()| pidfd::wait(&pidfd, None)).and_then(|_| {
                match pidfd::reap(&pidfd) {
                    // Somebody ignores SIGCHLD or reaps everything: then it is reaped, too.
                    Err(error) if error.errno() == libc::ECHILD => Ok(None),
                    other => other,
                }
            });
            let namespace = result?;
            reaped?;
            Ok(namespace)
        }
    }
}

/// What kind of namespace a descriptor is of: one of the `NEW` flags (ioctl_nsfs(2),
/// NS_GET_NSTYPE). KERNEL(4.11).
///
/// ENOTTY for a descriptor of something else.
pub fn kind(namespace: BorrowedFd<'_>) -> Result<CloneFlags> {
    const NS_GET_NSTYPE: libc::c_ulong = 0xb703;
    // SAFETY: the request takes no argument and writes nothing.
    let kind = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_NSTYPE) };
    if kind < 0 {
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        let arguments = format!("{}, NS_GET_NSTYPE", namespace.as_raw_fd());
        return Err(CallError::new("ioctl", arguments, errno));
    }
    Ok(CloneFlags::from_bits_retain(kind as u64))
}

/// The life of the process that a namespace is born with.
fn wait_to_be_killed(parent: rustix::process::Pid) -> ! {
    // ORDER: first ask to die with the parent, then see whether it died before that.
    let asked = call::set_parent_death_signal(libc::SIGKILL);
    if asked.is_err() || rustix::process::getppid() != Some(parent) {
        call::exit(1);
    }
    loop {
        call::pause();
    }
}

fn map_and_hold(pid: u32, pidfd: &OwnedFd, uid_map: &str, gid_map: &str) -> Result<OwnedFd> {
    for (file, map) in [("uid_map", uid_map), ("gid_map", gid_map)] {
        // The process is our unreaped child: its pid is its own until we reap it.
        let path = format!("/proc/{pid}/{file}");
        let mut opened =
            OpenOptions::new().write(true).open(&path).explain("open", || path.clone())?;
        // ORDER: one write, as the kernel takes the first for the whole map.
        let written =
            opened.write(map.as_bytes()).explain("write", || format!("{file}, {map:?}"))?;
        if written != map.len() {
            let arguments = format!("{file}, {map:?}");
            return Err(CallError::new("write", arguments, Errno::IO.raw_os_error()));
        }
    }
    pidfd::user_namespace(pidfd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn root_user_namespace_outlives_its_process() {
        let namespace = new_user("0 700000 32767\n65534 732767 1\n", "0 700000 32768\n").unwrap();
        // Joined by a process of its own: a thread of a process with several can't.
        let args = CloneArgs::default();
        // SAFETY: the child calls the thin layer only.
        match unsafe { process::clone3(&args).unwrap() } {
            Cloned::Child => {
                let joined = call::setns(namespace.as_fd(), CloneFlags::NEWUSER)
                    .and_then(|()| call::set_gid(32767))
                    .and_then(|()| call::set_uid(65534));
                call::exit(i32::from(joined.is_err()))
            }
            Cloned::Parent { pid, pidfd } => {
                pidfd::wait(&pidfd, None).unwrap();
                // A zombie still has its ids.
                let fields = crate::proc::fields(pid).unwrap();
                assert_eq!(fields.field("Uid"), Some("732767\t732767\t732767\t732767"));
                assert_eq!(fields.number("Gid"), Some(732_767));
                assert_eq!(pidfd::reap(&pidfd).unwrap(), Some(process::Exit::Code(0)));
            }
        }
    }

    #[test]
    fn root_network_belongs_to_nobody_and_obeys_its_maker() {
        use std::os::fd::AsRawFd;
        let netns = new_network().unwrap();
        // SAFETY: both requests take no argument and give a descriptor.
        let ask = |fd: &OwnedFd, request| unsafe {
            let fd = libc::ioctl(fd.as_raw_fd(), request);
            assert!(fd >= 0, "{}", std::io::Error::last_os_error());
            <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fd)
        };
        let (get_owner, get_parent) = (0xb701, 0xb702); // NS_GET_USERNS, NS_GET_PARENT
        let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
        let owner = ask(&netns, get_owner);
        let own = std::fs::File::open("/proc/self/ns/user").unwrap().into();
        assert_ne!(inode(&owner), inode(&own));
        assert_eq!(inode(&ask(&owner, get_parent)), inode(&own));
        std::thread::spawn(move || {
            process::setns(netns.as_fd(), CloneFlags::NEWNET).unwrap();
            std::fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "7").unwrap();
        })
        .join()
        .unwrap();
    }

    #[test]
    fn kind_of_a_namespace_is_known() {
        let open = |name| std::fs::File::open(format!("/proc/self/ns/{name}")).unwrap();
        assert_eq!(kind(open("uts").as_fd()).unwrap(), CloneFlags::NEWUTS);
        assert_eq!(kind(open("net").as_fd()).unwrap(), CloneFlags::NEWNET);
        assert!(kind(std::fs::File::open("/dev/null").unwrap().as_fd()).is_err());
    }

    #[test]
    fn root_bad_map_is_refused_and_leaves_no_process() {
        let error = new_user("0 700000 32768\n5 800000 1\n", "0 700000 1\n").unwrap_err();
        assert_eq!(error.errno(), libc::EINVAL, "{error}");
        // The calling thread made it; other tests have children under other threads.
        let children = crate::proc::read_text("/proc/thread-self/children", 4096).unwrap();
        assert_eq!(children, "");
    }
}
