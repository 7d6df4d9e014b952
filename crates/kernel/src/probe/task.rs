//! Processes, namespaces, filters.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use super::scratch::{Probed, Reason, Scratch, lack};
use crate::call::{self, Instruction, Namespace};
use crate::process::{self, CloneArgs, CloneFlags, Cloned, Exit};
use crate::{Errno, namespace, pidfd};

/// A child that is killed and reaped when it is dropped.
pub(super) struct Child {
    pub(super) pid: u32,
    pub(super) pidfd: OwnedFd,
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = pidfd::send_signal(&self.pidfd, libc::SIGKILL);
        let _ = pidfd::wait(&self.pidfd, None);
        let _ = pidfd::reap(&self.pidfd);
    }
}

/// Clones a child that runs `then`, which calls nothing but the thin layer and returns the exit
/// status.
pub(super) fn child(args: &CloneArgs<'_>, then: fn() -> i32) -> crate::error::Result<Child> {
    // SAFETY: `then` is one of the functions of these modules, which only make system calls.
    match unsafe { process::clone3(args)? } {
        Cloned::Child => call::exit(then()),
        Cloned::Parent { pid, pidfd } => Ok(Child { pid, pidfd }),
    }
}

/// Waits until the parent ends us.
pub(super) fn forever() -> i32 {
    // ORDER: set the death signal first, so that a dying parent leaves no sleeping child.
    if call::set_parent_death_signal(libc::SIGKILL).is_err() {
        return 1;
    }
    loop {
        call::pause();
    }
}

fn status(flags: CloneFlags, then: fn() -> i32) -> Result<i32, Reason> {
    let child = child(&CloneArgs { flags, ..CloneArgs::default() }, then)?;
    pidfd::wait(&child.pidfd, None)?;
    match pidfd::reap(&child.pidfd)? {
        Some(exit) => Ok(exit.code()),
        None => lack("the child was reaped by another thread"),
    }
}

fn succeeds(flags: CloneFlags, then: fn() -> i32) -> Probed {
    match status(flags, then)? {
        0 => Ok(String::new()),
        errno => lack(crate::error::describe(errno)),
    }
}

fn errno(result: Result<(), Errno>) -> i32 {
    result.map_or_else(|e| e.raw_os_error(), |()| 0)
}

pub(super) fn clone3(_: &Scratch) -> Probed {
    match status(CloneFlags::empty(), || 7)? {
        7 => Ok(String::new()),
        other => lack(format!("the child ended with {other} instead of 7")),
    }
}

pub(super) fn pidfd(_: &Scratch) -> Probed {
    let child = child(&CloneArgs::default(), forever)?;
    let opened = pidfd::open(child.pid)?;
    pidfd::send_signal(&opened, libc::SIGKILL)?;
    pidfd::wait(&opened, None)?;
    match pidfd::reap(&opened)? {
        Some(Exit::Signal(libc::SIGKILL)) => Ok(String::new()),
        other => lack(format!("the end of a killed child was {other:?}")),
    }
}

pub(super) fn user_namespace(_: &Scratch) -> Probed {
    namespace::new_user("0 700000 1000\n65534 701000 1\n", "0 700000 1001\n")?;
    Ok(String::new())
}

pub(super) fn mount_namespace(_: &Scratch) -> Probed {
    succeeds(CloneFlags::NEWNS, || 0)
}

pub(super) fn pid_namespace(_: &Scratch) -> Probed {
    let first = || i32::from(rustix::process::getpid().as_raw_pid() != 1);
    succeeds(CloneFlags::NEWPID, first)
}

pub(super) fn ipc_namespace(_: &Scratch) -> Probed {
    succeeds(CloneFlags::NEWIPC, || 0)
}

pub(super) fn uts_namespace(_: &Scratch) -> Probed {
    succeeds(CloneFlags::NEWUTS, || 0)
}

pub(super) fn net_namespace(_: &Scratch) -> Probed {
    succeeds(CloneFlags::NEWNET, || 0)
}

pub(super) fn cgroup_namespace(_: &Scratch) -> Probed {
    succeeds(CloneFlags::empty(), || errno(call::unshare(CloneFlags::NEWCGROUP)))
}

pub(super) fn time_namespace(_: &Scratch) -> Probed {
    succeeds(CloneFlags::NEWTIME, || 0)
}

pub(super) fn seccomp(_: &Scratch) -> Probed {
    succeeds(CloneFlags::empty(), || {
        // RET ALLOW
        let allow = Instruction { code: 0x06, jump_true: 0, jump_false: 0, k: 0x7fff_0000 };
        errno(call::set_no_new_privs().and_then(|()| call::load_filter(&[allow])))
    })
}

pub(super) fn close_range(_: &Scratch) -> Probed {
    // SAFETY: the range holds no descriptor: no process can have so many.
    let returned = unsafe { libc::syscall(libc::SYS_close_range, 0x7fff_fff0u32, u32::MAX, 0) };
    if returned == 0 {
        return Ok(String::new());
    }
    lack(std::io::Error::last_os_error().to_string())
}

pub(super) fn setns_pidfd(_: &Scratch) -> Probed {
    let other = child(&CloneArgs { flags: CloneFlags::NEWUTS, ..CloneArgs::default() }, forever)?;
    // A thread of our own may join the namespace of another host name, and ends with it.
    let fd = other.pidfd.as_fd();
    std::thread::scope(|scope| scope.spawn(move || call::setns(fd, CloneFlags::NEWUTS)).join())
        .unwrap_or(Err(Errno::CHILD))?;
    Ok(String::new())
}

/// Opens a file of its own process.
fn own_file(path: &str) -> Result<OwnedFd, Reason> {
    use rustix::fs::{Mode, OFlags};
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

pub(super) fn pagemap_scan(_: &Scratch) -> Probed {
    let pagemap = own_file("/proc/self/pagemap")?;
    // A page that is there for sure, as it was written to.
    let here = [1u8; 8192];
    let start = std::hint::black_box(&here).as_ptr() as u64 & !4095;
    let mut runs = [call::PageRun::default(); 4];
    let scan = call::Scan::Look;
    match call::scan_own_pages(pagemap.as_fd(), scan, start, start + 4096, &mut runs)? {
        (1.., _) => Ok(String::new()),
        _ => lack("it finds nothing"),
    }
}

pub(super) fn trace_past_a_filter(_: &Scratch) -> Probed {
    let child = child(&CloneArgs::default(), forever)?;
    call::seize(child.pid, call::TraceOptions::SUSPEND_SECCOMP)?;
    Ok(String::new())
}

pub(super) fn kcmp(_: &Scratch) -> Probed {
    let file = own_file("/proc/self/stat")?;
    let number = (std::process::id(), file.as_raw_fd() as u32);
    match call::compare_files(number, number)? {
        std::cmp::Ordering::Equal => Ok(String::new()),
        _ => lack("a file is not itself"),
    }
}

pub(super) fn pidfd_getfd(_: &Scratch) -> Probed {
    let root = super::scratch::open_dir("/".as_ref())?;
    let child = child(&CloneArgs::default(), forever)?;
    // The child was born with a copy of it.
    let copied = pidfd::copy_descriptor(&child.pidfd, root.as_raw_fd())?;
    match rustix::fs::fstat(&copied)?.st_ino == rustix::fs::fstat(&root)?.st_ino {
        true => Ok(String::new()),
        false => lack("another descriptor was copied"),
    }
}

pub(super) fn page_out(_: &Scratch) -> Probed {
    let child = child(&CloneArgs::default(), forever)?;
    // Of its own memory, no page.
    call::page_out(child.pidfd.as_fd(), 0, 0)?;
    Ok(String::new())
}

pub(super) fn userfault(_: &Scratch) -> Probed {
    let device = own_file("/dev/userfaultfd")?;
    call::userfault_begin(call::userfault_new(device.as_fd())?.as_fd())?;
    Ok(String::new())
}

pub(super) fn note_writes(_: &Scratch) -> Probed {
    call::userfault_note_writes(call::userfault_noting()?.as_fd())?;
    Ok(String::new())
}

pub(super) fn pidfd_namespace(_: &Scratch) -> Probed {
    let child = child(&CloneArgs::default(), forever)?;
    call::pidfd_get_namespace(child.pidfd.as_fd(), Namespace::User)?;
    Ok(String::new())
}

pub(super) fn mounts(_: &Scratch) -> Probed {
    let child = child(&CloneArgs { flags: CloneFlags::NEWNS, ..CloneArgs::default() }, forever)?;
    let root = namespace::unique_mount_id(format!("/proc/{}/root", child.pid))?;
    let of = std::fs::File::open(format!("/proc/{}/ns/mnt", child.pid))?;
    match (root, root.map(|root| namespace::mounts_below(of.as_fd(), root)).transpose()?) {
        (Some(_), Some(below)) if !below.is_empty() => Ok(String::new()),
        _ => lack("the mounts of a namespace are not listed"),
    }
}

pub(super) fn own_mounts(_: &Scratch) -> Probed {
    let count = namespace::mounts()?.len();
    Ok(format!("{count} mounts"))
}

pub(super) fn pidfd_exit(_: &Scratch) -> Probed {
    let child = child(&CloneArgs::default(), || 7)?;
    pidfd::wait(&child.pidfd, None)?;
    pidfd::reap(&child.pidfd)?;
    match pidfd::exit_status(&child.pidfd)? {
        Some(Exit::Code(7)) => Ok(String::new()),
        _ => lack("the status of a reaped child is not kept"),
    }
}

pub(super) fn keyring(_: &Scratch) -> Probed {
    succeeds(CloneFlags::empty(), || errno(call::join_session_keyring().map(drop)))
}

pub(super) fn sys_resource(_: &Scratch) -> Probed {
    const CAP_SYS_RESOURCE: u32 = 24;
    if call::capget()?.effective & 1 << CAP_SYS_RESOURCE != 0 {
        return Ok(String::new());
    }
    lack("this process does not have it")
}
