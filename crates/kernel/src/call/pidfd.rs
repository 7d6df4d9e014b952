//! Requests to a pidfd that go beyond pidfd_open(2) and pidfd_send_signal(2).

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::{CloneFlags, check};
use crate::Errno;

/// The result of PIDFD_GET_INFO; the first version of the kernel's `struct pidfd_info`, 64 bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct PidfdInfo {
    /// Which of the fields are filled in: [`PidfdInfo::PID`], [`PidfdInfo::EXIT`] and so on.
    pub mask: u64,
    /// Id of the v2 cgroup.
    pub cgroup_id: u64,
    /// Thread id as the caller's pid namespace sees it.
    pub pid: u32,
    /// Process id as the caller's pid namespace sees it.
    pub tgid: u32,
    /// Process id of the parent, 0 when it is not visible.
    pub ppid: u32,
    /// Real user id.
    pub ruid: u32,
    /// Real group id.
    pub rgid: u32,
    /// Effective user id.
    pub euid: u32,
    /// Effective group id.
    pub egid: u32,
    /// Saved user id.
    pub suid: u32,
    /// Saved group id.
    pub sgid: u32,
    /// File system user id.
    pub fsuid: u32,
    /// File system group id.
    pub fsgid: u32,
    /// The status as wait(2) encodes it, when the mask has [`PidfdInfo::EXIT`].
    pub exit_code: i32,
}

impl PidfdInfo {
    /// `pid`, `tgid` and `ppid` are filled in.
    pub const PID: u64 = 1;
    /// The ids of user and group are filled in.
    pub const CREDS: u64 = 2;
    /// `cgroup_id` is filled in.
    pub const CGROUP_ID: u64 = 4;
    /// `exit_code` is filled in: the process was reaped. KERNEL(6.15).
    pub const EXIT: u64 = 8;
}

/// ioctl(PIDFD_GET_INFO): facts about the process, selected by `wanted`. KERNEL(6.13).
///
/// ESRCH if the process was reaped and its exit status was not requested or not kept.
pub fn pidfd_get_info(pidfd: BorrowedFd<'_>, wanted: u64) -> Result<PidfdInfo, Errno> {
    // _IOWR(0xFF, 11, struct pidfd_info): the size is part of the number.
    const PIDFD_GET_INFO: libc::c_ulong =
        (3 << 30) | ((size_of::<PidfdInfo>() as libc::c_ulong) << 16) | (0xFF << 8) | 11;
    let mut info = PidfdInfo { mask: wanted, ..PidfdInfo::default() };
    // SAFETY: the structure has the size that the request's number names.
    check(unsafe {
        libc::syscall(
            libc::SYS_ioctl,
            pidfd.as_raw_fd(),
            PIDFD_GET_INFO,
            &mut info as *mut PidfdInfo,
        )
    })?;
    Ok(info)
}

/// A kind of namespace, by its file in `/proc/PID/ns`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Namespace {
    /// cgroup_namespaces(7)
    Cgroup = 1,
    /// ipc_namespaces(7)
    Ipc = 2,
    /// mount_namespaces(7)
    Mount = 3,
    /// network_namespaces(7)
    Net = 4,
    /// pid_namespaces(7)
    Pid = 5,
    /// time_namespaces(7)
    Time = 7,
    /// user_namespaces(7)
    User = 9,
    /// uts_namespaces(7)
    Uts = 10,
}

impl Namespace {
    /// The name of the file in `/proc/PID/ns`.
    pub fn file(self) -> &'static str {
        match self {
            Self::Cgroup => "cgroup",
            Self::Ipc => "ipc",
            Self::Mount => "mnt",
            Self::Net => "net",
            Self::Pid => "pid",
            Self::Time => "time",
            Self::User => "user",
            Self::Uts => "uts",
        }
    }

    /// The flag of its kind in clone(2), unshare(2) and setns(2).
    pub fn flag(self) -> CloneFlags {
        match self {
            Self::Cgroup => CloneFlags::NEWCGROUP,
            Self::Ipc => CloneFlags::NEWIPC,
            Self::Mount => CloneFlags::NEWNS,
            Self::Net => CloneFlags::NEWNET,
            Self::Pid => CloneFlags::NEWPID,
            Self::Time => CloneFlags::NEWTIME,
            Self::User => CloneFlags::NEWUSER,
            Self::Uts => CloneFlags::NEWUTS,
        }
    }
}

/// ioctl(PIDFD_GET_*_NAMESPACE): a namespace of the process, as a descriptor. KERNEL(6.11): ENOTTY
/// or EINVAL before.
pub fn pidfd_get_namespace(pidfd: BorrowedFd<'_>, kind: Namespace) -> Result<OwnedFd, Errno> {
    // _IO(0xFF, kind)
    let request: libc::c_ulong = (0xFF << 8) | kind as libc::c_ulong;
    // SAFETY: only integers are passed.
    let fd = check(unsafe { libc::syscall(libc::SYS_ioctl, pidfd.as_raw_fd(), request, 0) })?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// pidfd_send_signal(2), with any signal number and 0. KERNEL(5.1).
pub fn pidfd_send_signal(pidfd: BorrowedFd<'_>, signal: i32) -> Result<(), Errno> {
    // SAFETY: a null siginfo means the one that kill(2) would send.
    check(unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_raw_fd(),
            signal,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    })
    .map(drop)
}
