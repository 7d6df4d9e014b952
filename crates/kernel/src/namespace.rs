//! Namespaces that are held by a descriptor alone.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{AtFlags, StatxFlags};
use rustix::pipe::PipeFlags;

use crate::call::{self, CloneArgs, CloneFlags, Cloned, Namespace};
use crate::error::{CallError, Explain, Result};
use crate::process::Exit;
use crate::{Errno, pidfd, proc, process};

/// Returns the procfs link of a thread's namespace, named as there, such as `net`:
/// `net:[4026531840]`. Equal links mean the same namespace. None if the thread has exited, or the
/// kernel lacks the kind.
pub fn link(pid: u32, tid: u32, name: &str) -> Option<String> {
    let process = format!("/proc/{pid}");
    let task = if tid == pid { process } else { format!("{process}/task/{tid}") };
    let link = std::fs::read_link(format!("{task}/ns/{name}")).ok()?;
    link.into_os_string().into_string().ok()
}

/// Calls `act` in a cgroup, IPC, network or UTS namespace (setns(2)). Only the calling thread enters it, and returns
/// to its own. A new thread costs ten times as much: its stack and its heap are new pages.
///
/// A thread cannot return to a namespace that its user namespace does not own. `act` then runs in a new thread, which
/// ends in the namespace. If a return fails, the process is aborted: its later calls would be made in the wrong
/// namespace. Therefore `act` leaves the credentials as they are, or sets them back.
///
/// EINVAL when `namespace` is of another kind, or `kind` is one that a single thread cannot enter; EPERM without
/// CAP_SYS_ADMIN over it.
pub fn visit<T: Send>(
    namespace: BorrowedFd<'_>,
    kind: Namespace,
    act: impl FnOnce() -> T + Send,
) -> std::result::Result<T, Errno> {
    if !matches!(kind, Namespace::Cgroup | Namespace::Ipc | Namespace::Net | Namespace::Uts) {
        return Err(Errno::INVAL);
    }
    let flag = kind.flag();
    let path = format!("/proc/thread-self/ns/{}", kind.file());
    let own = File::open(path).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
    if call::setns(own.as_fd(), flag).is_ok() {
        call::setns(namespace, flag)?;
        let _return = Return { to: own.as_fd(), flag };
        return Ok(act());
    }
    let there = || call::setns(namespace, flag).map(|()| act());
    std::thread::scope(|scope| match scope.spawn(there).join() {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

/// The return of a thread to its namespace, also after a panic.
struct Return<'a> {
    to: BorrowedFd<'a>,
    flag: CloneFlags,
}

impl Drop for Return<'_> {
    fn drop(&mut self) {
        if let Err(e) = call::setns(self.to, self.flag) {
            eprintln!("cannot return from a namespace ({:?}): setns: {e}", self.flag);
            std::process::abort();
        }
    }
}

/// A user namespace with the given maps (user_namespaces(7)) and no process in it: for mapping the
/// ids of a mount, or to be joined later.
///
/// A map is lines of `INSIDE OUTSIDE COUNT`. EINVAL when one is malformed or overlaps itself,
/// ENOSPC or EUSERS when the caller's number of user namespaces is used up, EPERM without
/// CAP_SETUID and CAP_SETGID.
pub fn new_user(uid_map: &str, gid_map: &str) -> Result<OwnedFd> {
    born_with(
        CloneFlags::NEWUSER,
        || Ok(()),
        |pid, pidfd| map_and_hold(pid, pidfd, uid_map, gid_map),
    )
}

/// Creates a network namespace (network_namespaces(7)) that belongs to a user namespace made for
/// it. That user namespace contains no process and maps no ids, so no process in it can act. Its
/// creator, root of the caller's user namespace, has every capability over it; root of any other
/// user namespace has none.
///
/// A namespace of the initial user namespace receives every uevent of the machine
/// (lib/kobject_uevent.c); this one receives only those of its own network devices. Some settings
/// are not shown in it: `net/ipv6/route`, `net/core/xfrm_*` and, before Linux 6, a few more.
///
/// ENOSPC when a limit of namespaces is reached.
pub fn new_network() -> Result<OwnedFd> {
    let mut flags = CloneFlags::NEWUSER | CloneFlags::NEWNET;
    flags.set(CloneFlags::NEWUSER, !crate::weakened("network-owner"));
    born_with(flags, || Ok(()), |_, pidfd| pidfd::namespace(pidfd, Namespace::Net))
}

/// Returns the offsets of a time namespace as text (time_namespaces(7)). `/proc/PID/timens_offsets`
/// shows those of the namespace for a process's children, so a helper process enters the namespace
/// and its file is read. KERNEL(5.8).
///
/// EPERM without CAP_SYS_ADMIN over it, EINVAL when it is no time namespace.
pub fn clock_offsets(time: BorrowedFd<'_>) -> Result<String> {
    let flags = PipeFlags::CLOEXEC;
    let pipe = rustix::pipe::pipe_with(flags).explain("pipe2", || format!("{flags:?}"));
    let (entered, enters) = pipe?;
    let enter = || {
        call::setns(time, CloneFlags::NEWTIME)?;
        rustix::io::write(&enters, b"!").map(drop)
    };
    born_with(CloneFlags::empty(), enter, |pid, pidfd| {
        let ended = PollFd::new(pidfd, PollFlags::IN);
        let mut either = [PollFd::new(&entered, PollFlags::IN), ended];
        while rustix::event::poll(&mut either, None) == Err(Errno::INTR) {}
        if either[0].revents().is_empty() {
            let errno = pidfd::reap(pidfd)?.map_or(libc::ESRCH, Exit::code);
            return Err(CallError::new("setns", format!("{time:?}, NEWTIME"), errno));
        }
        let path = format!("/proc/{pid}/timens_offsets");
        let text = crate::proc::whole_text(&path);
        text.map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO)).explain("read", || path)
    })
}

/// Takes something from a process that is born into new namespaces, does something `first`, which
/// makes system calls of the thin layer and nothing else, and ends at once.
fn born_with<T>(
    flags: CloneFlags,
    first: impl FnOnce() -> std::result::Result<(), Errno>,
    take: impl FnOnce(u32, &OwnedFd) -> Result<T>,
) -> Result<T> {
    let args = CloneArgs { flags, ..CloneArgs::default() };
    let parent = rustix::process::getpid();
    // SAFETY: the child only makes system calls of the thin layer until it is killed.
    match unsafe { process::clone3(&args)? } {
        Cloned::Child => match first() {
            Ok(()) => wait_to_be_killed(parent),
            Err(e) => call::exit(e.raw_os_error()),
        },
        Cloned::Parent { pid, pidfd } => {
            let result = take(pid, &pidfd);
            // ORDER: killed and reaped in any case, and only then the result is used.
            let killed = pidfd::send_signal(&pidfd, libc::SIGKILL);
            let reaped = killed.and_then(|()| pidfd::wait(&pidfd, None)).and_then(|_| {
                match pidfd::reap(&pidfd) {
                    // With SIGCHLD ignored, or another reaper in this process, it was reaped
                    // already.
                    Err(error) if error.errno() == libc::ECHILD => Ok(None),
                    other => other,
                }
            });
            let taken = result?;
            reaped?;
            Ok(taken)
        }
    }
}

/// Returns the kind of namespace of a descriptor: one of the `NEW` flags (ioctl_nsfs(2),
/// NS_GET_NSTYPE). KERNEL(4.11).
///
/// ENOTTY for a descriptor of something else.
pub fn kind(namespace: BorrowedFd<'_>) -> Result<CloneFlags> {
    const NS_GET_NSTYPE: libc::c_ulong = 0xb703;
    let kind = ask(namespace, (NS_GET_NSTYPE, "NS_GET_NSTYPE"), std::ptr::null_mut::<u32>())?;
    Ok(CloneFlags::from_bits_retain(kind as u64))
}

/// The user namespace that a namespace belongs to (ioctl_nsfs(2), NS_GET_USERNS); of a user
/// namespace the one that it was made in. KERNEL(4.9).
///
/// EPERM when that is not the caller's own, nor below it; so of the first user namespace, which has
/// none.
pub fn owner(namespace: BorrowedFd<'_>) -> Result<OwnedFd> {
    const NS_GET_USERNS: libc::c_ulong = 0xb701;
    let fd = ask(namespace, (NS_GET_USERNS, "NS_GET_USERNS"), std::ptr::null_mut::<u32>())?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns the effective user of the creator of a user namespace, as the caller's namespace maps it
/// (ioctl_nsfs(2), NS_GET_OWNER_UID). KERNEL(4.11).
///
/// EINVAL for a namespace of another kind.
pub fn owner_uid(namespace: BorrowedFd<'_>) -> Result<u32> {
    const NS_GET_OWNER_UID: libc::c_ulong = 0xb704;
    let mut uid = u32::MAX;
    ask(namespace, (NS_GET_OWNER_UID, "NS_GET_OWNER_UID"), &mut uid)?;
    Ok(uid)
}

/// STATX_MNT_ID_UNIQUE (statx(2)). KERNEL(6.8): an older kernel returns the id of mountinfo instead.
pub const MNT_ID_UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);

/// Returns the unique id of the mount that a path leads to, `None` on an older kernel.
pub fn unique_mount_id(path: impl AsRef<Path>) -> Result<Option<u64>> {
    let path = path.as_ref();
    let found = rustix::fs::statx(rustix::fs::CWD, path, AtFlags::empty(), MNT_ID_UNIQUE)
        .explain("statx", || path.display().to_string())?;
    Ok((found.stx_mask & MNT_ID_UNIQUE.bits() != 0).then_some(found.stx_mnt_id))
}

/// LIMIT: mounts that [`mounts_below`] returns.
const MOUNTS_MAX: usize = 256;

/// Returns the unique ids (statx(2), STATX_MNT_ID_UNIQUE) of the mounts below one of another mount namespace, 256
/// at most (listmount(2)). With the root of a process these are the mounts that `/proc/PID/mountinfo` has, but
/// for the root itself. KERNEL(6.11).
///
/// ENOENT for a mount that is not of the namespace; ENOTTY and ENOSYS of an older kernel.
pub fn mounts_below(namespace: BorrowedFd<'_>, mount: u64) -> Result<Vec<u64>> {
    const NS_GET_MNTNS_ID: libc::c_ulong = 0x8008_b705;
    const SYS_LISTMOUNT: libc::c_long = 458;
    /// `struct mnt_id_req`.
    #[repr(C)]
    struct Wanted {
        size: u32,
        spare: u32,
        below: u64,
        after: u64,
        namespace: u64,
    }
    let mut id = 0u64;
    ask(namespace, (NS_GET_MNTNS_ID, "NS_GET_MNTNS_ID"), &mut id)?;
    let size = size_of::<Wanted>() as u32;
    let wanted = Wanted { size, spare: 0, below: mount, after: 0, namespace: id };
    let mut found = vec![0u64; MOUNTS_MAX];
    // SAFETY: the request is a local of its own size; the kernel writes at most as many numbers as it is passed.
    let count = unsafe {
        libc::syscall(SYS_LISTMOUNT, &raw const wanted, found.as_mut_ptr(), MOUNTS_MAX, 0)
    };
    let Ok(count) = usize::try_from(count) else {
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        return Err(CallError::new("listmount", namespace.as_raw_fd().to_string(), errno));
    };
    found.truncate(count);
    Ok(found)
}

/// Returns the unique ids (statx(2), STATX_MNT_ID_UNIQUE) of all mounts of the calling process's namespace but its
/// root, in order (listmount(2)). KERNEL(6.8).
pub fn mounts() -> Result<Vec<u64>> {
    const SYS_LISTMOUNT: libc::c_long = 458;
    const LSMT_ROOT: u64 = u64::MAX;
    /// `struct mnt_id_req`, version 0: size, spare, mount, the last id of the part before.
    #[repr(C)]
    struct Wanted(u32, u32, u64, u64);
    let mut found: Vec<u64> = Vec::new();
    let mut part = [0u64; 256];
    loop {
        let after = found.last().copied().unwrap_or(0);
        let wanted = Wanted(size_of::<Wanted>() as u32, 0, LSMT_ROOT, after);
        // SAFETY: the request is a local of its own size; the kernel writes at most as many numbers as `part` has.
        let count = unsafe {
            libc::syscall(SYS_LISTMOUNT, &raw const wanted, part.as_mut_ptr(), part.len(), 0)
        };
        let Ok(count) = usize::try_from(count) else {
            let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
            return Err(CallError::new("listmount", "LSMT_ROOT".into(), errno));
        };
        found.extend_from_slice(&part[..count]);
        if count < part.len() {
            return Ok(found);
        }
    }
}

/// A request of ioctl_nsfs(2), which writes one number or nothing.
fn ask<N>(
    namespace: BorrowedFd<'_>,
    (request, name): (libc::c_ulong, &str),
    to: *mut N,
) -> Result<i32> {
    // SAFETY: `to` is the place for the result of a request, or is not used: callers pass a number
    // of their own, of the request's size, to a request that writes.
    let answer = unsafe { libc::ioctl(namespace.as_raw_fd(), request, to) };
    if answer < 0 {
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        let arguments = format!("{}, {name}", namespace.as_raw_fd());
        return Err(CallError::new("ioctl", arguments, errno));
    }
    Ok(answer)
}

/// The ids of a user namespace, as procfs shows them to the caller's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserMaps {
    /// Lines of `INSIDE OUTSIDE COUNT` (`/proc/PID/uid_map`); empty if no map was written.
    pub uid_map: String,
    /// The same for groups.
    pub gid_map: String,
    /// setgroups(2) is denied (`/proc/PID/setgroups`, KERNEL(3.19)).
    pub denies_groups: bool,
}

impl UserMaps {
    /// Reads the maps of a process's user namespace; the process may be a zombie.
    pub fn of_process(pid: u32) -> Result<Self> {
        // LIMIT: 340 lines of three numbers.
        let read = |name: &str| proc::read_text(format!("/proc/{pid}/{name}"), 1 << 16);
        let denies_groups = read("setgroups")?.trim() == "deny";
        Ok(Self { uid_map: read("uid_map")?, gid_map: read("gid_map")?, denies_groups })
    }

    /// Reads the maps of a user namespace without processes: a helper process enters it and exits.
    pub fn of(namespace: BorrowedFd<'_>) -> Result<Self> {
        // SAFETY: the child only makes system calls of the thin layer.
        match unsafe { process::clone3(&CloneArgs::default())? } {
            Cloned::Child => {
                let entered = call::setns(namespace, CloneFlags::NEWUSER);
                call::exit(entered.map_or_else(Errno::raw_os_error, |()| 0))
            }
            Cloned::Parent { pid, pidfd } => {
                // ORDER: what has ended and was not reaped is still in it.
                let looked = pidfd::wait(&pidfd, None).and_then(|_| Self::of_process(pid));
                let exit = pidfd::reap(&pidfd)?;
                match exit {
                    Some(process::Exit::Code(errno @ 1..)) => {
                        let arguments = format!("{}, NEWUSER", namespace.as_raw_fd());
                        Err(CallError::new("setns", arguments, errno))
                    }
                    _ => looked,
                }
            }
        }
    }
}

/// The life of the process that a namespace is born with.
fn wait_to_be_killed(parent: rustix::process::Pid) -> ! {
    // ORDER: first set the death signal, then check whether the parent exited before that.
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
    fn root_new_network_has_an_empty_owner_and_obeys_its_creator() {
        let netns = new_network().unwrap();
        let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
        let its = owner(netns.as_fd()).unwrap();
        let own = std::fs::File::open("/proc/self/ns/user").unwrap().into();
        assert_ne!(inode(&its), inode(&own));
        assert_eq!(inode(&owner(its.as_fd()).unwrap()), inode(&own));
        std::thread::spawn(move || {
            process::setns(netns.as_fd(), CloneFlags::NEWNET).unwrap();
            std::fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "7").unwrap();
        })
        .join()
        .unwrap();
    }

    #[test]
    fn root_mounts_of_a_namespace_are_listed() {
        // SAFETY: the child sleeps, and calls nothing else.
        let Cloned::Parent { pid, pidfd } = (unsafe {
            process::clone3(&CloneArgs { flags: CloneFlags::NEWNS, ..CloneArgs::default() })
                .unwrap()
        }) else {
            std::thread::sleep(std::time::Duration::from_secs(1000));
            call::exit(1)
        };
        let id = |path: &str| unique_mount_id(path).unwrap().unwrap_or_default();
        let below = |path: &str| {
            let namespace = std::fs::File::open(format!("/proc/{pid}/ns/mnt")).unwrap();
            mounts_below(namespace.as_fd(), id(path))
        };
        let listed = below(&format!("/proc/{pid}/root"));
        let foreign = below("/");
        let [inside, own] = [id(&format!("/proc/{pid}/root/proc")), id("/proc")];
        crate::pidfd::send_signal(pidfd.as_fd(), 9).unwrap();
        pidfd::reap(&pidfd).unwrap();
        match listed {
            Err(e) => assert!([libc::ENOTTY, libc::ENOSYS].contains(&e.errno()), "{e}"),
            Ok(listed) => {
                assert!(listed.contains(&inside), "{listed:?}");
                assert!(!listed.contains(&own), "of its namespace only");
                assert!(foreign.is_err(), "{foreign:?}");
            }
        }
    }

    #[test]
    fn root_visit_returns_and_nests() {
        let own = || std::fs::read_link("/proc/thread-self/ns/net").unwrap();
        let before = own();
        let [one, two] = [new_network().unwrap(), new_network().unwrap()];
        let there = visit(one.as_fd(), Namespace::Net, || {
            let inner = visit(two.as_fd(), Namespace::Net, own).unwrap();
            (own(), inner)
        });
        let (first, second) = there.unwrap();
        assert!(first != before && second != before && first != second);
        assert_eq!(own(), before);
        let panics = || visit(one.as_fd(), Namespace::Net, || -> () { panic!("meant") });
        assert!(std::panic::catch_unwind(panics).is_err());
        assert_eq!(own(), before, "after a panic, too");
        let wrong = visit(one.as_fd(), Namespace::Uts, own);
        assert_eq!(wrong, Err(Errno::INVAL));
        assert_eq!(own(), before);
    }

    /// In a user namespace that does not own the process's network namespace, setns(2) refuses the return.
    #[test]
    fn root_visit_that_cannot_return_is_made_by_a_thread() {
        let exe = std::env::current_exe().unwrap();
        let exe = exe.to_str().unwrap();
        let test = "namespace::tests::root_visit_returns_and_nests";
        let done = std::process::Command::new("unshare")
            .args(["--user", "--map-root-user", exe, "--exact", test])
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&done.stdout);
        assert!(output.contains("1 passed"), "{output}{}", String::from_utf8_lossy(&done.stderr));
    }

    #[test]
    fn root_clock_offsets_are_read_from_the_given_namespace() {
        let own = std::fs::File::open("/proc/self/ns/time").unwrap();
        let expected = crate::proc::whole_text("/proc/self/timens_offsets").unwrap();
        assert_eq!(clock_offsets(own.as_fd()).unwrap(), expected);
        let args = CloneArgs { flags: CloneFlags::NEWTIME, ..CloneArgs::default() };
        // SAFETY: the child calls the thin layer only.
        match unsafe { process::clone3(&args).unwrap() } {
            Cloned::Child => loop {
                call::pause();
            },
            Cloned::Parent { pid, pidfd } => {
                let other = std::fs::File::open(format!("/proc/{pid}/ns/time")).unwrap();
                assert_eq!(clock_offsets(other.as_fd()).unwrap(), expected, "a copy of ours");
                pidfd::send_signal(&pidfd, libc::SIGKILL).unwrap();
                pidfd::reap(&pidfd).unwrap();
            }
        }
        let none = std::fs::File::open("/proc/self/ns/uts").unwrap();
        assert_eq!(clock_offsets(none.as_fd()).unwrap_err().errno(), libc::EINVAL);
    }

    #[test]
    fn root_id_maps_of_an_empty_user_namespace_are_readable() {
        let uid_map = "0 700000 32767\n65534 732767 1\n";
        let namespace = new_user(uid_map, "0 700000 32768\n").unwrap();
        let maps = UserMaps::of(namespace.as_fd()).unwrap();
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words(&maps.uid_map), words(uid_map));
        assert_eq!(words(&maps.gid_map), ["0", "700000", "32768"]);
        assert!(!maps.denies_groups);
        assert_eq!(owner_uid(namespace.as_fd()).unwrap(), 0);
        let other = std::fs::File::open("/proc/self/ns/uts").unwrap();
        assert_eq!(owner_uid(other.as_fd()).unwrap_err().errno(), libc::EINVAL);
        assert_eq!(UserMaps::of(other.as_fd()).unwrap_err().errno(), libc::EINVAL);
        let children = proc::read_text("/proc/thread-self/children", 4096).unwrap();
        assert_eq!(children, "");
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
