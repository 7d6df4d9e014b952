//! Looking into another task and steering it: ptrace(2), kcmp(2), process_vm_readv(2), pagemaps.
//!
//! A tracer is a *thread*: every call on a tracee comes from the thread that seized it, and
//! [`wait_stop`] returns stops of that thread's tracees and children alone. Task ids are those of
//! the caller's pid namespace. A tracee keeps its id until its tracer has waited for its exit.
//! Here, and only here, a number therefore identifies a task as well as a descriptor would.

use std::cmp::Ordering;
use std::ffi::c_long;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use super::check;
use crate::Errno;

bitflags::bitflags! {
    /// Options of [`seize`].
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct TraceOptions: u64 {
        /// Children by fork are tracees from birth.
        const FORK = 0x2;
        /// Children by vfork, the same.
        const VFORK = 0x4;
        /// Threads and other clones, the same.
        const CLONE = 0x8;
        /// Stop after a successful execve.
        const EXEC = 0x10;
        /// System call stops set bit 7 of the signal.
        const SYSGOOD = 0x1;
        /// Every tracee is killed when the tracer ends.
        const EXIT_KILL = 0x10_0000;
        /// System call filters are not run while the task is traced. Needs CAP_SYS_ADMIN of the
        /// initial user namespace. KERNEL(4.3).
        const SUSPEND_SECCOMP = 0x20_0000;
    }
}

fn ptrace(request: u32, tid: u32, address: u64, data: u64) -> Result<usize, Errno> {
    // SAFETY: callers in this module pass numbers, or addresses of their own memory that is as
    // large as the request requires.
    check(unsafe { libc::syscall(libc::SYS_ptrace, c_long::from(request), tid, address, data) })
}

/// PTRACE_SEIZE: becomes the tracer of a task, which keeps running. EPERM if it has a tracer.
pub fn seize(tid: u32, options: TraceOptions) -> Result<(), Errno> {
    ptrace(libc::PTRACE_SEIZE, tid, 0, options.bits()).map(drop)
}

/// PTRACE_SETOPTIONS.
pub fn set_trace_options(tid: u32, options: TraceOptions) -> Result<(), Errno> {
    ptrace(libc::PTRACE_SETOPTIONS, tid, 0, options.bits()).map(drop)
}

/// PTRACE_INTERRUPT: a seized task stops soon, out of a system call if need be.
pub fn interrupt(tid: u32) -> Result<(), Errno> {
    ptrace(libc::PTRACE_INTERRUPT, tid, 0, 0).map(drop)
}

/// PTRACE_CONT, delivering `signal` unless it is 0.
pub fn resume(tid: u32, signal: i32) -> Result<(), Errno> {
    ptrace(libc::PTRACE_CONT, tid, 0, signal as u64).map(drop)
}

/// PTRACE_SINGLESTEP: one instruction.
pub fn single_step(tid: u32) -> Result<(), Errno> {
    ptrace(libc::PTRACE_SINGLESTEP, tid, 0, 0).map(drop)
}

/// PTRACE_SYSCALL: until the entry to or the exit from a system call.
pub fn resume_to_call(tid: u32) -> Result<(), Errno> {
    ptrace(libc::PTRACE_SYSCALL, tid, 0, 0).map(drop)
}

/// PTRACE_DETACH, delivering `signal` unless it is 0.
pub fn detach(tid: u32, signal: i32) -> Result<(), Errno> {
    ptrace(libc::PTRACE_DETACH, tid, 0, signal as u64).map(drop)
}

/// PTRACE_GETEVENTMSG: the id of a new child, or the status of a task that ends.
pub fn event_message(tid: u32) -> Result<u64, Errno> {
    let mut message = 0u64;
    ptrace(libc::PTRACE_GETEVENTMSG, tid, 0, &raw mut message as u64)?;
    Ok(message)
}

/// The general registers of x86_64, as `struct user_regs_struct` has them.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[allow(missing_docs, reason = "the names are the registers'")]
pub struct Registers {
    pub r15: u64,
    pub r14: u64,
    pub r13: u64,
    pub r12: u64,
    pub rbp: u64,
    pub rbx: u64,
    pub r11: u64,
    pub r10: u64,
    pub r9: u64,
    pub r8: u64,
    pub rax: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    pub orig_rax: u64,
    pub rip: u64,
    pub cs: u64,
    pub eflags: u64,
    pub rsp: u64,
    pub ss: u64,
    pub fs_base: u64,
    pub gs_base: u64,
    pub ds: u64,
    pub es: u64,
    pub fs: u64,
    pub gs: u64,
}

impl Registers {
    /// Returns whether they are of 64-bit code.
    pub fn are_of_64_bit(&self) -> bool {
        const CODE: u64 = 0x33; // __USER_CS
        self.cs == CODE
    }
}

/// PTRACE_GETREGS.
pub fn registers(tid: u32) -> Result<Registers, Errno> {
    let mut registers = Registers::default();
    ptrace(libc::PTRACE_GETREGS, tid, 0, &raw mut registers as u64)?;
    Ok(registers)
}

/// PTRACE_SETREGS. The kernel refuses bases outside user memory and keeps what a program must not
/// change of the flags.
pub fn set_registers(tid: u32, registers: &Registers) -> Result<(), Errno> {
    ptrace(libc::PTRACE_SETREGS, tid, 0, registers as *const Registers as u64).map(drop)
}

/// NT_X86_XSTATE, the register set of PTRACE_GETREGSET that holds all beyond the general ones.
const XSTATE: u64 = 0x202;

/// PTRACE_GETREGSET of the extended state: fills `buffer` and returns how much of it is used.
pub fn extended_state(tid: u32, buffer: &mut [u8]) -> Result<usize, Errno> {
    let mut iov = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    ptrace(libc::PTRACE_GETREGSET, tid, XSTATE, &raw mut iov as u64)?;
    Ok(iov.iov_len)
}

/// PTRACE_SETREGSET of the extended state; EINVAL or EFAULT if it does not fit this CPU.
pub fn set_extended_state(tid: u32, state: &[u8]) -> Result<(), Errno> {
    let mut iov = libc::iovec { iov_base: state.as_ptr() as *mut _, iov_len: state.len() };
    ptrace(libc::PTRACE_SETREGSET, tid, XSTATE, &raw mut iov as u64).map(drop)
}

/// PTRACE_GETSIGMASK. KERNEL(3.11).
pub fn signal_mask(tid: u32) -> Result<u64, Errno> {
    let mut mask = 0u64;
    ptrace(libc::PTRACE_GETSIGMASK, tid, 8, &raw mut mask as u64)?;
    Ok(mask)
}

/// PTRACE_SETSIGMASK.
pub fn set_signal_mask(tid: u32, mask: u64) -> Result<(), Errno> {
    ptrace(libc::PTRACE_SETSIGMASK, tid, 8, &raw const mask as u64).map(drop)
}

/// Bytes of a `siginfo_t`.
pub const SIGINFO_BYTES: usize = 128;

/// PTRACE_PEEKSIGINFO: signal number `index` of the queue of the process (`shared`) or of the
/// thread; `None` past its end.
pub fn pending_signal(
    tid: u32,
    shared: bool,
    index: u64,
) -> Result<Option<[u8; SIGINFO_BYTES]>, Errno> {
    #[repr(C)]
    struct Args {
        offset: u64,
        flags: u32,
        count: i32,
    }
    const PEEKSIGINFO: u32 = 0x4209;
    let args = Args { offset: index, flags: u32::from(shared), count: 1 };
    let mut info = [0u8; SIGINFO_BYTES];
    let found = ptrace(PEEKSIGINFO, tid, &raw const args as u64, info.as_mut_ptr() as u64)?;
    Ok((found == 1).then_some(info))
}

/// PTRACE_SECCOMP_GET_FILTER: the instructions of a task's system call filter, 0 being the one that
/// was loaded first; `None` where there are fewer. Needs CAP_SYS_ADMIN. KERNEL(4.4).
pub fn filter(tid: u32, index: u64) -> Result<Option<Vec<u8>>, Errno> {
    const GET_FILTER: u32 = 0x420c;
    /// Bytes of an instruction (`struct sock_filter`).
    const INSTRUCTION: usize = 8;
    let length = match ptrace(GET_FILTER, tid, index, 0) {
        Err(Errno::NOENT) => return Ok(None),
        found => found?,
    };
    let mut bytes = vec![0; length * INSTRUCTION];
    ptrace(GET_FILTER, tid, index, bytes.as_mut_ptr() as u64)?;
    Ok(Some(bytes))
}

/// PTRACE_SECCOMP_GET_METADATA: flags that a filter was loaded with. KERNEL(4.16).
pub fn filter_flags(tid: u32, index: u64) -> Result<u64, Errno> {
    const GET_METADATA: u32 = 0x420d;
    let mut metadata = [index, 0];
    let size = size_of_val(&metadata) as u64;
    ptrace(GET_METADATA, tid, size, metadata.as_mut_ptr() as u64)?;
    Ok(metadata[1])
}

/// The registration of a task's restartable sequences (rseq(2)).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RseqConfiguration {
    /// Address of the structure; 0 without a registration.
    pub address: u64,
    /// Its length.
    pub length_bytes: u32,
    /// The signature in front of abort handlers.
    pub signature: u32,
    /// Flags of the registration.
    pub flags: u32,
    padding: u32,
}

/// PTRACE_GET_RSEQ_CONFIGURATION. KERNEL(5.13).
pub fn rseq_configuration(tid: u32) -> Result<RseqConfiguration, Errno> {
    const REQUEST: u32 = 0x420f;
    let mut found = RseqConfiguration::default();
    let size = size_of::<RseqConfiguration>() as u64;
    ptrace(REQUEST, tid, size, &raw mut found as u64)?;
    Ok(found)
}

/// Which system calls of a thread are reported to itself by SIGSYS instead of made: those from outside a range of
/// addresses, or from inside one (PR_SET_SYSCALL_USER_DISPATCH(2const)).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dispatch {
    /// [`Dispatch::FROM_OUTSIDE`] or [`Dispatch::FROM_INSIDE`].
    pub mode: u64,
    /// The address of a byte with which the thread switches this on ([`Dispatch::BLOCK`]) and off; 0: it is always on.
    pub selector: u64,
    /// The first address of the range.
    pub start: u64,
    /// The length of the range in bytes.
    pub length_bytes: u64,
}

impl Dispatch {
    /// SYSCALL_DISPATCH_FILTER_ALLOW, in the byte of the selector.
    pub const ALLOW: u8 = 0;
    /// SYSCALL_DISPATCH_FILTER_BLOCK.
    pub const BLOCK: u8 = 1;

    /// All calls are made.
    pub const NONE: Self = Self { mode: 0, selector: 0, start: 0, length_bytes: 0 };

    /// PR_SYS_DISPATCH_EXCLUSIVE_ON, in the mode.
    pub const FROM_OUTSIDE: u64 = 1;
    /// PR_SYS_DISPATCH_INCLUSIVE_ON. KERNEL(6.16).
    pub const FROM_INSIDE: u64 = 2;
}

/// The dispatch of system calls of a tracee; `None` if it has none. PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG,
/// KERNEL(6.4): EIO before.
pub fn dispatch(tid: u32) -> Result<Option<Dispatch>, Errno> {
    const REQUEST: u32 = 0x4211;
    let mut found = Dispatch::NONE;
    ptrace(REQUEST, tid, size_of::<Dispatch>() as u64, &raw mut found as u64)?;
    let Dispatch { mode, start, length_bytes, .. } = found;
    let end = start.wrapping_add(length_bytes);
    // The kernel keeps a range of calls from inside as all other addresses, from its end on.
    if mode == Dispatch::FROM_OUTSIDE && start != 0 && end <= start {
        let length_bytes = length_bytes.wrapping_neg();
        found = Dispatch { mode: Dispatch::FROM_INSIDE, start: end, length_bytes, ..found };
    }
    Ok((mode != 0).then_some(found))
}

/// Gives a tracee a dispatch of its system calls. PTRACE_SET_SYSCALL_USER_DISPATCH_CONFIG, KERNEL(6.4).
///
/// EINVAL for a mode that this kernel does not have, or a range beyond the last address.
pub fn set_dispatch(tid: u32, dispatch: &Dispatch) -> Result<(), Errno> {
    const REQUEST: u32 = 0x4210;
    let size = size_of::<Dispatch>() as u64;
    ptrace(REQUEST, tid, size, std::ptr::from_ref(dispatch) as u64).map(drop)
}

/// The stops that [`wait_stop`] returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// A signal is about to be delivered.
    Signal(i32),
    /// A ptrace event by its number; with PTRACE_EVENT_STOP (128) also the signal of a group stop.
    Event(i32, i32),
    /// At the entry to or the exit from a system call.
    Call,
    /// The task has ended; the wait status.
    Ended(i32),
}

/// waitpid(2) for a tracee of the calling thread, or for all of them where `tid` is `None`.
///
/// The stop of the one tracee `tid` before a signal is reported until the tracee is resumed. If this process ends
/// before, the signal is delivered. ECHILD if there is no tracee.
pub fn wait_stop(tid: Option<u32>) -> Result<(u32, Stop), Errno> {
    loop {
        if let Some(found) = wait(tid, 0)? {
            return Ok(found);
        }
    }
}

/// The same for one tracee, without waiting: `None` if it runs.
pub fn poll_stop(tid: u32) -> Result<Option<Stop>, Errno> {
    wait(Some(tid), libc::WNOHANG).map(|found| found.map(|(_, stop)| stop))
}

fn wait(tid: Option<u32>, flags: i32) -> Result<Option<(u32, Stop)>, Errno> {
    const NO_OTHER_THREADS: i32 = 0x2000_0000;
    let which = tid.map_or(-1, |tid| tid as i32);
    let flags = flags | libc::__WALL | NO_OTHER_THREADS;
    if let Some(tid) = tid
        && let Some(signal) = next_signal(tid, flags)?
    {
        return Ok(Some((tid, Stop::Signal(signal))));
    }
    let mut status = 0i32;
    // SAFETY: the status is written to an i32; null means no resource usage.
    let found = match check(unsafe {
        libc::syscall(libc::SYS_wait4, which, &raw mut status, flags, std::ptr::null::<u8>())
    }) {
        Ok(0) | Err(Errno::INTR) => return Ok(None),
        other => other?,
    };
    let stop = if libc::WIFSTOPPED(status) {
        match (libc::WSTOPSIG(status), status >> 16) {
            (signal, 0) if signal == libc::SIGTRAP | 0x80 => Stop::Call,
            (signal, 0) => Stop::Signal(signal),
            (signal, event) => Stop::Event(event, signal),
        }
    } else {
        Stop::Ended(status)
    };
    Ok(Some((found as u32, stop)))
}

/// The signal that the next stop of a tracee is before, if it is such a stop.
///
/// The kernel keeps the signal of a stop in the place that wait4(2) clears (`wait_task_stopped()`): a tracer that ends
/// after that and before it resumes the tracee takes the signal with it. WNOWAIT leaves it.
fn next_signal(tid: u32, flags: i32) -> Result<Option<i32>, Errno> {
    let flags = flags | libc::WEXITED | libc::WSTOPPED | libc::WNOWAIT;
    // SAFETY: zeros are a siginfo_t, which the kernel writes; null means no resource usage.
    let (waited, info) = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let (place, usage) = (&raw mut info, std::ptr::null_mut::<u8>());
        (check(libc::syscall(libc::SYS_waitid, libc::P_PID, tid, place, flags, usage)), info)
    };
    match waited {
        // wait4(2) reports these.
        Err(Errno::INTR | Errno::CHILD) => return Ok(None),
        other => other?,
    };
    // SAFETY: the kernel has written the fields of SIGCHLD.
    let (is_stop, status) = unsafe { (info.si_code == libc::CLD_TRAPPED, info.si_status()) };
    let is_signal = is_stop && status >> 8 == 0 && status != libc::SIGTRAP | 0x80;
    Ok(is_signal.then_some(status))
}

fn kcmp(kind: i32, one: (u32, u64), other: (u32, u64)) -> Result<Ordering, Errno> {
    // SAFETY: only integers are passed, or a pointer that the caller has made for this request.
    let found =
        check(unsafe { libc::syscall(libc::SYS_kcmp, one.0, other.0, kind, one.1, other.1) })?;
    Ok(match found {
        0 => Ordering::Equal,
        1 => Ordering::Less,
        _ => Ordering::Greater,
    })
}

/// KCMP_FILE: how the open files behind two descriptors stand in an order of the kernel's own;
/// equal where it is one.
pub fn compare_files(one: (u32, u32), other: (u32, u32)) -> Result<Ordering, Errno> {
    kcmp(0, (one.0, u64::from(one.1)), (other.0, u64::from(other.1)))
}

/// Parts of a process that two tasks may share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shared {
    /// The address space.
    Memory = 1,
    /// The table of descriptors.
    Descriptors = 2,
    /// Root, working directory, umask.
    FileSystem = 3,
    /// Signal handlers.
    Handlers = 4,
    /// The I/O context, which has the I/O priority; a task may have none.
    Io = 5,
    /// The undo values of semaphores (semop(2), SEM_UNDO); a task may have no list.
    Undo = 6,
}

/// KCMP_VM, KCMP_FILES, ...: whether two tasks share it.
pub fn is_shared(what: Shared, one: u32, other: u32) -> Result<bool, Errno> {
    Ok(compare(what, one, other)? == Ordering::Equal)
}

/// The same, with how what they do not share stands in an order of the kernel's own.
pub fn compare(what: Shared, one: u32, other: u32) -> Result<Ordering, Errno> {
    kcmp(what as i32, (one, 0), (other, 0))
}

/// KCMP_EPOLL_TFD: whether descriptor `target.1` of task `target.0` is the file that the `nth` item
/// with number `number` of an epoll is about. KERNEL(4.13).
pub fn is_epoll_target(
    target: (u32, u32),
    epoll: (u32, u32),
    number: u32,
    nth: u32,
) -> Result<bool, Errno> {
    #[repr(C)]
    struct Slot {
        epoll: u32,
        number: u32,
        nth: u32,
    }
    const EPOLL_TFD: i32 = 7;
    let slot = Slot { epoll: epoll.1, number, nth };
    let found = kcmp(EPOLL_TFD, (target.0, u64::from(target.1)), (epoll.0, &raw const slot as u64));
    found.map(|order| order == Ordering::Equal)
}

/// get_robust_list(2) of another task: address and length of its head.
pub fn robust_list(tid: u32) -> Result<(u64, u64), Errno> {
    let (mut head, mut length) = (0u64, 0u64);
    // SAFETY: both are written where a u64 is.
    check(unsafe {
        libc::syscall(libc::SYS_get_robust_list, tid, &raw mut head, &raw mut length)
    })?;
    Ok((head, length))
}

/// process_vm_readv(2): fills `buffer` from `places` (address, length) of another process, in
/// order. Gives how many bytes were read; fewer where a page is missing. LIMIT: 1,024 places.
pub fn read_memory(pid: u32, buffer: &mut [u8], places: &[(u64, u64)]) -> Result<usize, Errno> {
    let mut remote = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 1024];
    let places = places.get(..1024).unwrap_or(places);
    for (iov, (address, length)) in remote.iter_mut().zip(places) {
        *iov = libc::iovec { iov_base: *address as *mut _, iov_len: *length as usize };
    }
    let local = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: the local part is one slice; the remote addresses are another process's.
    check(unsafe {
        libc::syscall(
            libc::SYS_process_vm_readv,
            pid,
            &raw const local,
            1usize,
            remote.as_ptr(),
            places.len(),
            0usize,
        )
    })
}

/// process_vm_writev(2) to one place.
pub fn write_memory(pid: u32, address: u64, bytes: &[u8]) -> Result<usize, Errno> {
    let local = libc::iovec { iov_base: bytes.as_ptr() as *mut _, iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: address as *mut _, iov_len: bytes.len() };
    // SAFETY: the local part is one slice, which is read; the address is another process's.
    check(unsafe {
        libc::syscall(
            libc::SYS_process_vm_writev,
            pid,
            &raw const local,
            1usize,
            &raw const remote,
            1usize,
            0usize,
        )
    })
}

/// A run of pages of one kind.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PageRun {
    /// First address.
    pub start: u64,
    /// The address after the last.
    pub end: u64,
    /// Properties of the pages: bits of [`page`].
    pub categories: u64,
}

impl PageRun {
    /// Returns whether these pages were not written since they were protected ([`Scan::Protect`]).
    pub fn is_clean(&self) -> bool {
        self.categories & (page::WATCHED | page::WRITTEN) == page::WATCHED
    }
}

/// Kinds of pages (`PAGE_IS_*`).
pub mod page {
    /// Writes to it are noted ([`super::super::userfault_note_writes`]).
    pub const WATCHED: u64 = 1;
    /// Not protected: written to since it was, or never protected.
    pub const WRITTEN: u64 = 1 << 1;
    /// Of a file, or of memory that is shared.
    pub const FILE: u64 = 1 << 2;
    /// In memory.
    pub const PRESENT: u64 = 1 << 3;
    /// In swap.
    pub const SWAPPED: u64 = 1 << 4;
    /// The page of zeros.
    pub const ZERO: u64 = 1 << 5;
    /// A guard (MADV_GUARD_INSTALL). KERNEL(6.16)
    pub const GUARD: u64 = 1 << 8;
}

/// The action of a scan on the pages that it finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scan {
    /// No action.
    Look,
    /// Protects them: the next write to one is noted. EPERM where writes are not.
    Protect,
}

/// PAGEMAP_SCAN over `start..end` of the process of this pagemap: runs of pages that are present or
/// swapped, and neither of a file nor the zero page. Returns how many runs were found and the
/// address to continue from. KERNEL(6.7).
pub fn scan_own_pages(
    pagemap: BorrowedFd<'_>,
    scan: Scan,
    start: u64,
    end: u64,
    runs: &mut [PageRun],
) -> Result<(usize, u64), Errno> {
    const WP_MATCHING: u64 = 1;
    const CHECK_WPASYNC: u64 = 2;
    // A guard counts as swapped, and cannot be read.
    static KNOWS_GUARDS: AtomicBool = AtomicBool::new(true);
    loop {
        let guard = if KNOWS_GUARDS.load(Relaxed) { page::GUARD } else { 0 };
        let wanted = Wanted {
            flags: if scan == Scan::Protect { WP_MATCHING | CHECK_WPASYNC } else { 0 },
            none_of: page::FILE | page::ZERO | guard,
            any_of: page::PRESENT | page::SWAPPED,
        };
        match scan_pages(pagemap, &wanted, start, end, runs) {
            Err(Errno::INVAL) if guard != 0 => KNOWS_GUARDS.store(false, Relaxed),
            other => return other,
        }
    }
}

/// The same: runs of pages that are guards (madvise(2), MADV_GUARD_INSTALL). EINVAL where this kernel does
/// not say so. KERNEL(6.16)
pub fn scan_guards(
    pagemap: BorrowedFd<'_>,
    start: u64,
    end: u64,
    runs: &mut [PageRun],
) -> Result<(usize, u64), Errno> {
    let wanted = Wanted { flags: 0, none_of: 0, any_of: page::GUARD };
    scan_pages(pagemap, &wanted, start, end, runs)
}

/// Which pages a scan finds.
struct Wanted {
    flags: u64,
    none_of: u64,
    any_of: u64,
}

fn scan_pages(
    pagemap: BorrowedFd<'_>,
    wanted: &Wanted,
    start: u64,
    end: u64,
    runs: &mut [PageRun],
) -> Result<(usize, u64), Errno> {
    #[repr(C)]
    #[derive(Default)]
    struct Args {
        size: u64,
        flags: u64,
        start: u64,
        end: u64,
        walk_end: u64,
        vec: u64,
        vec_len: u64,
        max_pages: u64,
        category_inverted: u64,
        category_mask: u64,
        category_any_of_mask: u64,
        return_mask: u64,
    }
    /// `_IOWR('f', 16, struct pm_scan_arg)`.
    const PAGEMAP_SCAN: u64 = 0xc060_6610;
    let mut args = Args {
        size: size_of::<Args>() as u64,
        flags: wanted.flags,
        start,
        end,
        vec: runs.as_mut_ptr() as u64,
        vec_len: runs.len() as u64,
        category_inverted: wanted.none_of,
        category_mask: wanted.none_of,
        category_any_of_mask: wanted.any_of,
        return_mask: page::WATCHED | page::WRITTEN,
        ..Args::default()
    };
    // SAFETY: the structure and the array it points to outlive the call and have the sizes passed.
    let found = check(unsafe {
        libc::syscall(libc::SYS_ioctl, pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut args)
    })?;
    Ok((found, args.walk_end))
}
