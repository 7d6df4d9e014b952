//! Scheduling attributes of another task: sched_getattr(2), sched_getaffinity(2), ioprio_get(2).

use super::check;
use crate::Errno;

/// `struct sched_attr`, the fields that every kernel since 5.3 has.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SchedulingAttributes {
    /// Its length.
    pub size: u32,
    /// `SCHED_*`.
    pub policy: u32,
    /// `SCHED_FLAG_*`.
    pub flags: u64,
    /// nice(2), of policies that have it.
    pub nice: i32,
    /// Of SCHED_FIFO and SCHED_RR.
    pub priority: u32,
    /// Of SCHED_DEADLINE; the slice of others. KERNEL(6.12): before, only the first.
    pub runtime_ns: u64,
    /// Of SCHED_DEADLINE.
    pub deadline_ns: u64,
    /// The same.
    pub period_ns: u64,
    /// Hints of how much it will run.
    pub util_min: u32,
    /// The same.
    pub util_max: u32,
}

/// sched_getattr(2) of a thread; 0 is the caller. KERNEL(3.14).
pub fn scheduling_attributes(tid: u32) -> Result<SchedulingAttributes, Errno> {
    let mut found = SchedulingAttributes::default();
    let size = size_of::<SchedulingAttributes>();
    // SAFETY: the size passed is that of the structure.
    check(unsafe { libc::syscall(libc::SYS_sched_getattr, tid, &raw mut found, size, 0) })?;
    Ok(found)
}

/// The cookie of a thread for core scheduling (PR_SCHED_CORE_GET, prctl(2)): threads with different cookies never
/// run on one core at once, and 0 is none. The caller needs to be permitted to trace the thread. KERNEL(5.14): ENODEV
/// without cores of several hardware threads, and EINVAL without core scheduling in the kernel.
pub fn core_cookie(tid: u32) -> Result<u64, Errno> {
    const SCHED_CORE: i32 = 62;
    const GET: usize = 0;
    const OF_THREAD: usize = 0;
    let mut cookie = 0u64;
    // SAFETY: the kernel writes one word.
    check(unsafe {
        libc::syscall(libc::SYS_prctl, SCHED_CORE, GET, tid as usize, OF_THREAD, &raw mut cookie)
    })?;
    Ok(cookie)
}

/// sched_getaffinity(2) of a thread: fills `mask`, a bit per CPU, and returns how many bytes of it
/// are used. EINVAL if the mask is too short for this host.
pub fn affinity(tid: u32, mask: &mut [u64]) -> Result<usize, Errno> {
    // SAFETY: pointer and length describe one slice.
    check(unsafe {
        libc::syscall(libc::SYS_sched_getaffinity, tid, size_of_val(mask), mask.as_mut_ptr())
    })
}

/// sched_setaffinity(2) of the calling thread: a bit a CPU, in words of 64 bits of the machine's order.
/// EINVAL where none of them may be used.
pub fn set_affinity(mask: &[u8]) -> Result<(), Errno> {
    // SAFETY: pointer and length describe one slice, which the kernel copies byte by byte.
    check(unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, mask.len(), mask.as_ptr()) })
        .map(drop)
}

/// set_mempolicy(2) of the calling thread: `mode` with its flags; `nodes` has a bit a node, in words of
/// 64 bits of the machine's order. ENOSYS without NUMA in the kernel.
pub fn set_memory_policy(mode: u32, nodes: &[u8]) -> Result<(), Errno> {
    // The kernel takes the number of bits to be one more than it is.
    let bits = if nodes.is_empty() { 0 } else { nodes.len() * 8 + 1 };
    let at = if nodes.is_empty() { std::ptr::null() } else { nodes.as_ptr() };
    // SAFETY: the kernel copies so many bits of the slice, or none.
    check(unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, at, bits) }).map(drop)
}

/// ioprio_get(2) of a thread: class and level; 0 where it has none of its own.
pub fn io_priority(tid: u32) -> Result<u32, Errno> {
    const OF_A_PROCESS: i32 = 1;
    // SAFETY: only integers are passed.
    check(unsafe { libc::syscall(libc::SYS_ioprio_get, OF_A_PROCESS, tid) }).map(|n| n as u32)
}
