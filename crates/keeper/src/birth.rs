//! Clones a newborn with its namespaces, in its cgroup, with its ids.

use std::convert::Infallible;
use std::ffi::{c_int, c_void};
use std::fmt::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use dormouse_kernel::call::{
    self as kernel, CloneArgs, CloneFlags, Cloned, FsCommand, MountAttr, Namespace,
};
use dormouse_kernel::{pidfd, weakened};
use dormouse_launch::protocol::{SpawnRequest, with};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::newborn::{Heritage, live};
use crate::tiny::Outside;
use crate::{Failed, Step, call, tiny};

/// The namespaces that a spawn may request.
const NAMESPACES: CloneFlags = CloneFlags::NEWTIME
    .union(CloneFlags::NEWNS)
    .union(CloneFlags::NEWCGROUP)
    .union(CloneFlags::NEWUTS)
    .union(CloneFlags::NEWIPC)
    .union(CloneFlags::NEWUSER)
    .union(CloneFlags::NEWPID)
    .union(CloneFlags::NEWNET);

/// A cloned process that waits for its plan.
#[derive(Debug)]
pub struct Born {
    /// Its pid.
    pub pid: u32,
    /// Field 22 of `/proc/PID/stat`.
    pub start_time: u64,
    /// A pidfd of it.
    pub pidfd: OwnedFd,
    /// A procfs of its pid namespace, if requested.
    pub proc: Option<OwnedFd>,
}

/// Properties of the newborn.
#[derive(Debug)]
pub struct Wanted<'w> {
    /// `CLONE_NEW*`.
    pub flags: CloneFlags,
    /// Its end of the socket to the engine.
    pub sock: BorrowedFd<'w>,
    /// The network namespace in which it is cloned.
    pub netns: Option<BorrowedFd<'w>>,
    /// The pid namespace in which it is cloned: the namespace, or a pidfd of a process in it.
    pub pid_namespace: Option<BorrowedFd<'w>>,
    /// The user namespace in which it is cloned, which then owns its other new ones.
    pub user_namespace: Option<BorrowedFd<'w>>,
    /// The v2 cgroup in which it is cloned.
    pub cgroup: Option<BorrowedFd<'w>>,
    /// Text for uid_map, empty for none.
    pub uid_map: &'w str,
    /// Text for gid_map.
    pub gid_map: &'w str,
    /// Whether to make a procfs of its pid namespace.
    pub proc: bool,
}

impl<'w> Wanted<'w> {
    /// Converts a request, with its descriptors in their places.
    pub(crate) fn of(request: &'w SpawnRequest, fds: &'w [OwnedFd]) -> Result<Self, Failed> {
        let mut fds = fds.iter().map(AsFd::as_fd);
        let sock = fds.next().ok_or(Errno::BADMSG).step("find the newborn's socket")?;
        let mut take = |bit| if request.with & bit != 0 { fds.next() } else { None };
        Ok(Self {
            flags: CloneFlags::from_bits_retain(request.flags),
            sock,
            netns: take(with::NETNS),
            pid_namespace: take(with::PID_NAMESPACE),
            user_namespace: None,
            cgroup: take(with::CGROUP),
            uid_map: &request.uid_map,
            gid_map: &request.gid_map,
            proc: request.with & with::PROC != 0,
        })
    }
}

/// Clones a newborn. If a step after the clone fails, the newborn is killed; it is reaped as any
/// other child.
pub fn give(outside: &Outside, heritage: Heritage, wanted: &Wanted<'_>) -> Result<Born, Failed> {
    let born = clone_newborn(outside, heritage, wanted, CloneFlags::empty())?;
    raise(outside, heritage, wanted, born)
}

/// Does the first step: clones the newborn, which waits for its plan. With PARENT the newborn is a
/// sibling of this process, not its child.
pub(crate) fn clone_newborn(
    outside: &Outside,
    heritage: Heritage,
    wanted: &Wanted<'_>,
    more: CloneFlags,
) -> Result<(u32, OwnedFd), Failed> {
    let flags = wanted.flags;
    let maps_without_user = !wanted.uid_map.is_empty() && !flags.contains(CloneFlags::NEWUSER);
    if !NAMESPACES.contains(flags) || maps_without_user {
        return Err(Failed { step: "make such namespaces", source: Errno::INVAL });
    }
    // A helper that shares this process's memory enters the pid namespace by itself, below.
    let pid_namespace = wanted.pid_namespace.filter(|_| wanted.user_namespace.is_none());
    let _back = Visit::go(outside, wanted.netns, pid_namespace)?;
    let flags = flags | more | CloneFlags::CLEAR_SIGHAND;
    let args = CloneArgs { flags, into_cgroup: wanted.cgroup, ..CloneArgs::default() };
    let (sock, proc) = (wanted.sock.as_raw_fd(), outside.proc.as_raw_fd());
    match wanted.user_namespace {
        Some(user) => {
            let within = Within { user, pid: wanted.pid_namespace };
            clone_within(within, args, &|| live(sock, proc, heritage)).step("clone a process")
        }
        // SAFETY: the keeper has one thread; the child lives in `live`, which neither allocates
        // nor locks, and never returns.
        None => match unsafe { kernel::clone3(&args) } {
            Ok(Cloned::Child) => live(sock, proc, heritage),
            Ok(Cloned::Parent { pid, pidfd }) => Ok((pid, pidfd)),
            Err(source) => Err(Failed { step: "clone a process", source }),
        },
    }
}

/// Does the other steps, in the keeper. If one fails, the newborn is killed.
pub(crate) fn raise(
    outside: &Outside,
    heritage: Heritage,
    wanted: &Wanted<'_>,
    (pid, pidfd): (u32, OwnedFd),
) -> Result<Born, Failed> {
    let rest = || {
        if !wanted.uid_map.is_empty() {
            write_maps(outside.proc.as_fd(), pid, wanted).step("map the ids")?;
        }
        if let Some(value) = heritage.oom_score_adj {
            // Written by the keeper: only a writer with the host's CAP_SYS_RESOURCE also resets how
            // far the newborn may lower the value again (oom_score_adj_min).
            write_file(outside.proc.as_fd(), pid, "oom_score_adj", &value.to_string())
                .step("give back its oom_score_adj")?;
        }
        let proc = match wanted.proc {
            false => None,
            true => Some(make_proc(outside, pidfd.as_fd()).step("make its procfs")?),
        };
        Ok((start_time(outside.proc.as_fd(), pid).step("read its start time")?, proc))
    };
    match rest() {
        Ok((start_time, proc)) => Ok(Born { pid, start_time, pidfd, proc }),
        Err(e) => {
            let _ = kernel::pidfd_send_signal(pidfd.as_fd(), 9);
            Err(e)
        }
    }
}

/// The namespaces that a helper enters before it clones.
#[derive(Clone, Copy)]
struct Within<'w> {
    user: BorrowedFd<'w>,
    pid: Option<BorrowedFd<'w>>,
}

/// Clones from inside a user namespace, so that it owns the new namespaces. A process cannot leave a
/// user namespace, so a helper process enters it and clones a sibling of itself.
///
/// The helper stays in this process's pid namespace, and the newborn's number is read from its pidfd
/// by this process. A number from inside a joined pid namespace names another process here.
///
/// Processes of the joined user namespace may trace what is in it (ptrace(2)). The helper shares this
/// process's memory, and the newborn begins with a copy, so neither is dumpable.
fn clone_within(
    within: Within<'_>,
    args: CloneArgs<'_>,
    live: &dyn Fn() -> Infallible,
) -> Result<(u32, OwnedFd), Errno> {
    struct Errand<'e> {
        within: Within<'e>,
        args: CloneArgs<'e>,
        live: &'e dyn Fn() -> Infallible,
        made: Option<Result<OwnedFd, Errno>>,
    }
    extern "C" fn body(errand: *mut c_void) -> c_int {
        // SAFETY: it points to the caller's variable; the caller is suspended meanwhile.
        let errand = unsafe { &mut *errand.cast::<Errand<'_>>() };
        let enter = || {
            // ORDER: inside the user namespace there are no rights over the pid namespace's parent.
            if let Some(pid) = errand.within.pid {
                kernel::setns(pid, CloneFlags::NEWPID)?;
            }
            kernel::setns(errand.within.user, CloneFlags::NEWUSER)?;
            kernel::set_groups(&[])?;
            kernel::set_gid(0)?;
            kernel::set_uid(0)
        };
        let clone = || {
            enter()?;
            // SAFETY: the child lives in `live`, which neither allocates nor locks, and never
            // returns; it has a copy of this stack.
            match unsafe { kernel::clone3(&errand.args) }? {
                Cloned::Child => match (errand.live)() {},
                Cloned::Parent { pidfd, .. } => Ok(pidfd),
            }
        };
        errand.made = Some(clone());
        0
    }
    let args = CloneArgs { flags: args.flags | CloneFlags::PARENT, ..args };
    let mut errand = Errand { within, args, live, made: None };
    let was_dumpable = kernel::is_dumpable()?;
    kernel::set_dumpable(weakened("undumpable"))?;
    // SAFETY: the body makes system calls only; what it writes outlives it.
    let helper = unsafe { call::run_aside(body, (&raw mut errand).cast()) };
    kernel::set_dumpable(was_dumpable)?;
    reap(helper?);
    let pidfd = errand.made.unwrap_or(Err(Errno::IO))?;
    match pidfd::pid(&pidfd) {
        Ok(pid) => Ok((pid, pidfd)),
        Err(e) => {
            let _ = kernel::pidfd_send_signal(pidfd.as_fd(), libc::SIGKILL); // it may have ended
            Err(Errno::from_raw_os_error(e.errno()))
        }
    }
}

/// Reaps a process that `run_aside` has run: it no longer uses the shared memory and is a zombie
/// now or soon.
fn reap(pid: c_int) {
    let helper = rustix::process::Pid::from_raw(pid);
    let _ = rustix::io::retry_on_intr(|| {
        rustix::process::waitpid(helper, rustix::process::WaitOptions::empty())
    });
}

/// While this exists, the keeper's children are cloned into other namespaces.
struct Visit<'o> {
    home_net: BorrowedFd<'o>,
    home_pid: BorrowedFd<'o>,
    net: bool,
    pid: bool,
}

impl<'o> Visit<'o> {
    fn go(
        outside: &'o Outside,
        net: Option<BorrowedFd<'_>>,
        pid_of: Option<BorrowedFd<'_>>,
    ) -> Result<Self, Failed> {
        let (home_net, home_pid) = (outside.net.as_fd(), outside.pid.as_fd());
        let mut visit = Self { home_net, home_pid, net: false, pid: false };
        if let Some(net) = net {
            kernel::setns(net, CloneFlags::NEWNET).step("enter the network namespace")?;
            visit.net = true;
        }
        if let Some(process) = pid_of {
            kernel::setns(process, CloneFlags::NEWPID).step("enter the pid namespace")?;
            visit.pid = true;
        }
        Ok(visit)
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        // A keeper that cannot return to its own namespaces would put the next container into this
        // one's. The keeper exits instead, and its children live on without it. Neither call needs
        // memory that could be lacking for long, and both succeed for a process for which the
        // opposite direction just succeeded.
        if self.net && kernel::setns(self.home_net, CloneFlags::NEWNET).is_err() {
            kernel::exit(1);
        }
        if self.pid && kernel::setns(self.home_pid, CloneFlags::NEWPID).is_err() {
            kernel::exit(1);
        }
    }
}

fn write_maps(proc: BorrowedFd<'_>, pid: u32, wanted: &Wanted<'_>) -> Result<(), Errno> {
    write_file(proc, pid, "uid_map", wanted.uid_map)?;
    write_file(proc, pid, "gid_map", wanted.gid_map)
}

/// Writes a file of a process in one call.
fn write_file(proc: BorrowedFd<'_>, pid: u32, name: &str, text: &str) -> Result<(), Errno> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(proc, format!("{pid}/{name}"), flags, Mode::empty())?;
    match rustix::io::write(&file, text.as_bytes())? == text.len() {
        true => Ok(()),
        false => Err(Errno::INVAL),
    }
}

fn start_time(proc: BorrowedFd<'_>, pid: u32) -> Result<u64, Errno> {
    let mut path = String::with_capacity(16);
    // Writing to a String cannot fail.
    let _ = write!(path, "{pid}/stat");
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(proc, path, flags, Mode::empty())?;
    let mut text = [0u8; 1024];
    let n = rustix::io::read(&file, &mut text)?;
    let text = std::str::from_utf8(&text[..n]).map_err(|_| Errno::ILSEQ)?;
    let fields = text.rsplit(')').next().unwrap_or_default();
    fields.split_whitespace().nth(19).and_then(|f| f.parse().ok()).ok_or(Errno::BADMSG)
}

const PROC_ATTR: MountAttr = MountAttr::NOSUID.union(MountAttr::NODEV).union(MountAttr::NOEXEC);

/// Makes a detached procfs of the newborn's pid namespace. KERNEL(6.17): by the `pidns` parameter;
/// before, by a helper process that is in the namespace for a moment.
fn make_proc(outside: &Outside, newborn: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    match proc_by_parameter(newborn) {
        Err(_) => proc_by_helper(outside.pid.as_fd(), newborn),
        made => made,
    }
}

fn proc_by_parameter(newborn: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let namespace = kernel::pidfd_get_namespace(newborn, Namespace::Pid)?;
    let context = kernel::fsopen(c"proc")?;
    kernel::fsconfig(context.as_fd(), FsCommand::String(c"source", c"proc"))?;
    kernel::fsconfig(context.as_fd(), FsCommand::Fd(c"pidns", namespace.as_fd()))?;
    kernel::fsconfig(context.as_fd(), FsCommand::Create)?;
    kernel::fsmount(context.as_fd(), PROC_ATTR)
}

/// The helper shares memory and descriptors with the keeper, which is suspended until the helper
/// has exited. The helper is the second process of the namespace, and has exited before the first
/// gets its plan.
fn proc_by_helper(home: BorrowedFd<'_>, newborn: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    extern "C" fn body(made: *mut c_void) -> c_int {
        let made = made.cast::<Option<Result<OwnedFd, Errno>>>();
        // SAFETY: it points to the caller's variable; the caller is suspended meanwhile.
        unsafe { made.write(Some(tiny::new(c"proc", &[], PROC_ATTR))) };
        0
    }
    let mut made: Option<Result<OwnedFd, Errno>> = None;
    let pid = {
        let mut visit = Visit { home_net: home, home_pid: home, net: false, pid: false };
        kernel::setns(newborn, CloneFlags::NEWPID)?;
        visit.pid = true;
        // SAFETY: the body makes four system calls; what it writes outlives it.
        unsafe { call::run_aside(body, (&raw mut made).cast()) }?
    };
    reap(pid);
    made.unwrap_or(Err(Errno::IO))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    /// Covers kernels before 6.17; on a newer one this path may never be used otherwise.
    #[test]
    fn root_helper_makes_a_procfs_of_another_pid_namespace() {
        let flags = CloneFlags::NEWPID;
        // SAFETY: the child makes one system call and is killed.
        let (pid, pidfd) =
            match unsafe { kernel::clone3(&CloneArgs { flags, ..CloneArgs::default() }) } {
                Ok(Cloned::Child) => loop {
                    // SAFETY: no argument.
                    unsafe { libc::pause() };
                },
                Ok(Cloned::Parent { pid, pidfd }) => (pid, pidfd),
                Err(e) => panic!("clone3: {e}"),
            };
        let home = std::fs::File::open("/proc/self/ns/pid").unwrap();
        let names = |proc: OwnedFd| -> Vec<u32> {
            let dir = std::fs::read_dir(format!("/proc/self/fd/{}", proc.as_raw_fd())).unwrap();
            let names = dir.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            names.filter_map(|name| name.parse().ok()).collect()
        };
        let made = [proc_by_helper(home.as_fd(), pidfd.as_fd()), proc_by_parameter(pidfd.as_fd())];
        let seen = made.map(|made| made.map(names));
        kernel::pidfd_send_signal(pidfd.as_fd(), 9).unwrap();
        let pid = rustix::process::Pid::from_raw(pid as i32);
        rustix::process::waitpid(pid, rustix::process::WaitOptions::empty()).unwrap();
        assert_eq!(seen[0], Ok(vec![1]));
        assert!(seen[1].is_err() || seen[1] == Ok(vec![1]), "{:?}", seen[1]);
    }
}
