//! Processes and their namespaces, with errors that contain the call.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::call;
pub use crate::call::{CloneArgs, CloneFlags, Cloned};
use crate::error::{Explain, Result};

/// Exit status of a process (wait(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Exited by itself with this status.
    Code(i32),
    /// Killed by this signal.
    Signal(i32),
}

impl Exit {
    /// Decodes what wait(2) stores; `None` when that is no end (stopped, continued).
    pub fn from_wait_status(status: i32) -> Option<Self> {
        if libc::WIFEXITED(status) {
            Some(Self::Code(libc::WEXITSTATUS(status)))
        } else if libc::WIFSIGNALED(status) {
            Some(Self::Signal(libc::WTERMSIG(status)))
        } else {
            None
        }
    }

    /// The number a shell shows: the status, or 128 + the signal.
    pub fn code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        }
    }
}

/// clone3(2) with a pidfd. KERNEL(5.3); `into_cgroup` KERNEL(5.7).
///
/// Errors: ENOSPC or EUSERS when a limit of namespaces is reached, EAGAIN when the cgroup's or the
/// user's number of processes is, EBUSY when the cgroup is not a leaf.
///
/// # Safety
/// See [`call::clone3`].
pub unsafe fn clone3(args: &CloneArgs<'_>) -> Result<Cloned> {
    // SAFETY: the caller's promise is the same.
    unsafe { call::clone3(args) }.explain("clone3", || {
        let into = if args.into_cgroup.is_some() { " into a cgroup" } else { "" };
        format!("{:?}{into}", args.flags)
    })
}

/// A child of the caller that has exited, and is reaped when this is dropped: a task that has released all its
/// resources, for comparisons with tasks that have none (kcmp(2)).
#[derive(Debug)]
pub struct Ended(u32);

impl Ended {
    /// Makes such a child, which executes nothing else.
    pub fn make() -> Result<Self> {
        call::ended_child().map(Self).explain("clone", String::new)
    }

    /// Its id.
    pub fn pid(&self) -> u32 {
        self.0
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        call::reap(self.0);
    }
}

/// unshare(2) of the calling thread's namespaces.
pub fn unshare(flags: CloneFlags) -> Result<()> {
    call::unshare(flags).explain("unshare", || format!("{flags:?}"))
}

/// setns(2): the calling thread joins the namespaces of `fd`, which is a namespace or, KERNEL(5.8),
/// a pidfd.
///
/// Errors: EINVAL for a user or mount namespace in a process of several threads.
pub fn setns(fd: BorrowedFd<'_>, flags: CloneFlags) -> Result<()> {
    call::setns(fd, flags).explain("setns", || format!("{fd:?}, {flags:?}"))
}

/// Maps all file-backed pages of this program and its libraries, so that later steps wait for no
/// page of them. On a kernel without this, pages are read when they are needed. KERNEL(5.14):
/// MADV_POPULATE_READ.
pub fn map_own_program() {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    for line in maps.lines().filter(|line| line.contains(" r") && line.contains(" /")) {
        // proc_pid_maps(5): FROM-TO PERMISSIONS ...
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let number = |text| usize::from_str_radix(text, 16).ok();
        if let Some((from, to)) = range
            && let (Some(from), Some(to)) = (number(from), number(to))
        {
            call::populate(from, to - from);
        }
    }
}

/// A block of the heap that [`touch_memory`] writes to: less than malloc(3) maps apart (M_MMAP_THRESHOLD of
/// mallopt(3)).
const HEAP_BYTES: usize = 100 << 10;

/// Number of these blocks.
const HEAP_BLOCKS: usize = 4;

/// Bytes of the stack that [`touch_memory`] writes to.
const STACK_BYTES: usize = 32 << 10;

/// Makes pages of the heap and of the stack present, so that later steps cause fewer page faults.
pub fn touch_memory() {
    let blocks: [Vec<u8>; HEAP_BLOCKS] = std::array::from_fn(|_| vec![1; HEAP_BYTES]);
    // free(3) gives the end of the heap back to the kernel (M_TRIM_THRESHOLD). A last block that is never written
    // remains the end: gaps between older blocks are smaller.
    std::hint::black_box(Vec::<u8>::with_capacity(HEAP_BYTES)).leak();
    drop(std::hint::black_box(blocks));
    touch_stack();
}

#[inline(never)]
fn touch_stack() {
    std::hint::black_box([1_u8; STACK_BYTES]);
}

/// The lowest address that a process may map which has no CAP_SYS_RAWIO over the host
/// (`vm.mmap_min_addr`, proc_sys_vm(5)); where it cannot be read, what x86 has by default.
pub fn lowest_address() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/vm/mmap_min_addr").ok();
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(1 << 16)
}

/// The largest timeout poll(2) can be given, for waits that have one.
pub(crate) fn timespec(timeout: Duration) -> rustix::event::Timespec {
    rustix::event::Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(timeout.subsec_nanos()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{Shared, is_shared};

    #[test]
    fn an_ended_child_has_nothing_to_share() {
        let (one, other) = (Ended::make().unwrap(), Ended::make().unwrap());
        for what in [Shared::Io, Shared::Undo, Shared::FileSystem] {
            assert_eq!(is_shared(what, one.pid(), other.pid()), Ok(true), "{what:?}");
        }
        assert_eq!(is_shared(Shared::FileSystem, one.pid(), std::process::id()), Ok(false));
    }
}
