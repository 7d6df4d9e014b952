//! Calls that change the calling task: namespaces, ids, capabilities, keyrings, filter, program.
//!
//! The ids and capabilities are those of the calling *thread*: the C library's wrappers would
//! change all threads, by signals, which is neither needed nor possible between clone and exec.

use std::ffi::{CStr, c_char, c_long};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::check;
use crate::Errno;

bitflags::bitflags! {
    /// Flags of clone3(2), unshare(2) and setns(2); the last two take the `NEW` ones alone.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct CloneFlags: u64 {
        /// A time namespace for children. KERNEL(5.6).
        const NEWTIME = 0x80;
        /// Both have one root, working directory and umask; to unshare it gives the caller its own.
        const FS = 0x200;
        /// Both have one table of descriptors.
        const FILES = 0x400;
        /// The parent is stopped until the child execs or ends.
        const VFORK = 0x4000;
        /// The child's parent is the caller's: they become siblings. EINVAL for a pid namespace's
        /// first process.
        const PARENT = 0x8000;
        /// A new mount namespace.
        const NEWNS = 0x2_0000;
        /// A new cgroup namespace, rooted where the task is placed *now*.
        const NEWCGROUP = 0x200_0000;
        /// A new uts namespace.
        const NEWUTS = 0x400_0000;
        /// A new ipc namespace.
        const NEWIPC = 0x800_0000;
        /// A new user namespace, made before the others, which it then owns.
        const NEWUSER = 0x1000_0000;
        /// A new pid namespace (for children, where unshare or setns take it).
        const NEWPID = 0x2000_0000;
        /// A new network namespace.
        const NEWNET = 0x4000_0000;
        /// Signal handlers of the child are the defaults. KERNEL(5.5).
        const CLEAR_SIGHAND = 0x1_0000_0000;
    }
}

/// The arguments of [`clone3`].
#[derive(Debug, Clone, Copy, Default)]
pub struct CloneArgs<'a> {
    /// Namespaces to make and how to run; sharing memory is not offered.
    pub flags: CloneFlags,
    /// The v2 cgroup that the child is born in. KERNEL(5.7).
    pub into_cgroup: Option<BorrowedFd<'a>>,
    /// The process id of the child in its pid namespace; the kernel's choice where there is none.
    /// KERNEL(5.5); needs CAP_CHECKPOINT_RESTORE in the namespace's owner.
    pub number: Option<i32>,
}

/// On which side of a [`clone3`] the caller finds itself.
#[derive(Debug)]
pub enum Cloned {
    /// In the new process.
    Child,
    /// In the old one.
    Parent {
        /// Process id of the child, in the caller's pid namespace.
        pid: u32,
        /// The child, whatever becomes of its pid; closed on exec.
        pidfd: OwnedFd,
    },
}

/// clone(2) of a child that exits at once and sends no signal; it is a zombie until [`reap`].
pub fn ended_child() -> Result<u32, Errno> {
    // SAFETY: as fork(2); the child makes one system call, and uses no memory.
    let child =
        check(unsafe { libc::syscall(libc::SYS_clone, 0_u64, 0_u64, 0_u64, 0_u64, 0_u64) })?;
    if child == 0 {
        loop {
            // SAFETY: it does not return.
            unsafe { libc::syscall(libc::SYS_exit_group, 0) };
        }
    }
    let child = child as u32;
    const OF_A_PROCESS: u32 = 1;
    let options = libc::WEXITED | libc::WNOWAIT | libc::__WALL;
    let null = std::ptr::null::<u8>();
    loop {
        // SAFETY: null means that nothing is written.
        let waited = check(unsafe {
            libc::syscall(libc::SYS_waitid, OF_A_PROCESS, child, null, options, null)
        });
        match waited {
            Err(Errno::INTR) => {}
            other => return other.map(|_| child),
        }
    }
}

/// wait4(2) for a child that has exited, without its status.
pub fn reap(child: u32) {
    let null = std::ptr::null::<u8>();
    // SAFETY: null means that nothing is written.
    unsafe { libc::syscall(libc::SYS_wait4, child, null, libc::__WALL, null) };
}

/// clone3(2) with a pidfd and SIGCHLD, without shared memory: a fork that chooses its namespaces
/// and its cgroup. KERNEL(5.3).
///
/// # Safety
/// The child is a copy of the calling thread alone. Where other threads existed, their locks may
/// be held forever in the child, the allocator's among them: until exec the child must then call
/// nothing but this module and what else neither allocates nor locks.
pub unsafe fn clone3(args: &CloneArgs<'_>) -> Result<Cloned, Errno> {
    /// The kernel's `struct clone_args`, third version.
    #[repr(C)]
    #[derive(Default)]
    struct Raw {
        flags: u64,
        pidfd: u64,
        child_tid: u64,
        parent_tid: u64,
        exit_signal: u64,
        stack: u64,
        stack_size: u64,
        tls: u64,
        set_tid: u64,
        set_tid_size: u64,
        cgroup: u64,
    }
    const PIDFD: u64 = 0x1000;
    const INTO_CGROUP: u64 = 0x2_0000_0000;
    let mut pidfd: i32 = -1;
    let mut raw = Raw {
        flags: args.flags.bits() | PIDFD,
        pidfd: &mut pidfd as *mut i32 as u64,
        // A sibling ends with the signal that the caller itself would.
        exit_signal: if args.flags.contains(CloneFlags::PARENT) { 0 } else { libc::SIGCHLD as u64 },
        ..Raw::default()
    };
    if let Some(cgroup) = args.into_cgroup {
        raw.flags |= INTO_CGROUP;
        raw.cgroup = cgroup.as_raw_fd() as u64;
    }
    if let Some(number) = &args.number {
        raw.set_tid = std::ptr::from_ref(number) as u64;
        raw.set_tid_size = 1;
    }
    // SAFETY: the structure and the pidfd it points to outlive the call, the child runs on a copy
    // of this stack (no memory is shared); the rest is the caller's promise.
    let pid =
        check(unsafe { libc::syscall(libc::SYS_clone3, &raw as *const Raw, size_of::<Raw>()) })?;
    if pid == 0 {
        return Ok(Cloned::Child);
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(Cloned::Parent { pid: pid as u32, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } })
}

/// unshare(2) of namespaces.
///
/// NEWNS also gives the calling thread a root and a working directory of its own.
pub fn unshare(flags: CloneFlags) -> Result<(), Errno> {
    // SAFETY: none of the flags that exist in the type touches memory or the descriptor table.
    check(unsafe { libc::syscall(libc::SYS_unshare, flags.bits() as libc::c_ulong) }).map(drop)
}

/// setns(2): joins one namespace by its descriptor, or with a pidfd all that `flags` name.
/// KERNEL(5.8) for pidfds.
pub fn setns(fd: BorrowedFd<'_>, flags: CloneFlags) -> Result<(), Errno> {
    // SAFETY: only integers are passed.
    check(unsafe { libc::syscall(libc::SYS_setns, fd.as_raw_fd(), flags.bits() as libc::c_int) })
        .map(drop)
}

/// setresuid(2) of the calling thread: real, effective and saved.
pub fn set_uid(uid: u32) -> Result<(), Errno> {
    // SAFETY: only integers are passed.
    check(unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) }).map(drop)
}

/// setresuid(2) of the calling thread: only the effective id, and with it the file system id.
pub fn set_effective_uid(uid: u32) -> Result<(), Errno> {
    const SAME: libc::uid_t = libc::uid_t::MAX;
    // SAFETY: only integers are passed.
    check(unsafe { libc::syscall(libc::SYS_setresuid, SAME, uid, SAME) }).map(drop)
}

/// setresgid(2) of the calling thread: real, effective and saved.
pub fn set_gid(gid: u32) -> Result<(), Errno> {
    // SAFETY: only integers are passed.
    check(unsafe { libc::syscall(libc::SYS_setresgid, gid, gid, gid) }).map(drop)
}

/// setgroups(2) of the calling thread.
pub fn set_groups(groups: &[u32]) -> Result<(), Errno> {
    // SAFETY: pointer and length describe one slice of 32-bit ids.
    check(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) }).map(drop)
}

/// Capability sets of one thread, as masks: bit N is capability N (capabilities(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CapabilityMasks {
    /// The set that the kernel checks.
    pub effective: u64,
    /// The capabilities that may be made effective.
    pub permitted: u64,
    /// The capabilities kept over execve if the file has them, too.
    pub inheritable: u64,
}

#[repr(C)]
struct CapHeader {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapWords {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

const CAP_VERSION_3: u32 = 0x2008_0522;

/// capget(2) of the calling thread.
pub fn capget() -> Result<CapabilityMasks, Errno> {
    let header = CapHeader { version: CAP_VERSION_3, pid: 0 };
    let mut words = [CapWords::default(); 2];
    // SAFETY: version 3 fills two structures, which is what is there.
    check(unsafe {
        libc::syscall(libc::SYS_capget, &header as *const CapHeader, words.as_mut_ptr())
    })?;
    let join = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    let [low, high] = words;
    Ok(CapabilityMasks {
        effective: join(low.effective, high.effective),
        permitted: join(low.permitted, high.permitted),
        inheritable: join(low.inheritable, high.inheritable),
    })
}

/// capset(2) of the calling thread.
pub fn capset(masks: CapabilityMasks) -> Result<(), Errno> {
    let header = CapHeader { version: CAP_VERSION_3, pid: 0 };
    let part = |shift: u32| CapWords {
        effective: (masks.effective >> shift) as u32,
        permitted: (masks.permitted >> shift) as u32,
        inheritable: (masks.inheritable >> shift) as u32,
    };
    let words = [part(0), part(32)];
    // SAFETY: version 3 reads two structures, which is what is there.
    check(unsafe { libc::syscall(libc::SYS_capset, &header as *const CapHeader, words.as_ptr()) })
        .map(drop)
}

/// Removes from the bounding set all capabilities but those in `keep`.
///
/// Needs CAP_SETPCAP in the thread's own user namespace.
pub fn capability_bound(keep: u64) -> Result<(), Errno> {
    for number in (0..64u64).filter(|number| keep & (1 << number) == 0) {
        match prctl(libc::PR_CAPBSET_DROP, number, 0, 0) {
            Ok(_) => {}
            // The kernel has no capability of this number, nor any above it.
            Err(Errno::INVAL) => break,
            // Without CAP_SETPCAP, what is not in the set needs no removal.
            Err(e) => match prctl(libc::PR_CAPBSET_READ, number, 0, 0) {
                Ok(0) => {}
                Err(Errno::INVAL) => break,
                _ => return Err(e),
            },
        }
    }
    Ok(())
}

/// Makes `mask` the ambient set. Its capabilities must be permitted and inheritable. KERNEL(4.3).
pub fn capability_ambient(mask: u64) -> Result<(), Errno> {
    prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL as u64, 0, 0)?;
    for number in (0..64u64).filter(|number| mask & (1 << number) != 0) {
        prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_RAISE as u64, number, 0)?;
    }
    Ok(())
}

/// prctl(2) with plain numbers. Requests that take a pointer are not reachable from outside.
fn prctl(request: i32, a: u64, b: u64, c: u64) -> Result<usize, Errno> {
    // SAFETY: callers in this module pass requests whose arguments are numbers, or pointers to
    // memory that outlives the call.
    check(unsafe { libc::syscall(libc::SYS_prctl, request, a, b, c, 0) })
}

/// PR_SET_PDEATHSIG: the signal that the calling process gets when the *thread* that made it ends.
/// Forgotten by exec of a program that gains privilege; 0 means none.
pub fn set_parent_death_signal(signal: i32) -> Result<(), Errno> {
    prctl(libc::PR_SET_PDEATHSIG, signal as u64, 0, 0).map(drop)
}

/// PR_SET_NO_NEW_PRIVS: no exec will ever grant anything again.
pub fn set_no_new_privs() -> Result<(), Errno> {
    prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0).map(drop)
}

/// PR_SET_DUMPABLE: whether other processes of the same ids may inspect this one (ptrace(2)).
pub fn set_dumpable(dumpable: bool) -> Result<(), Errno> {
    prctl(libc::PR_SET_DUMPABLE, u64::from(dumpable), 0, 0).map(drop)
}

/// PR_GET_DUMPABLE: what [`set_dumpable`] has set.
pub fn is_dumpable() -> Result<bool, Errno> {
    prctl(libc::PR_GET_DUMPABLE, 0, 0, 0).map(|dumpable| dumpable == 1)
}

/// PR_SET_KEEPCAPS: permitted capabilities survive the change from uid 0 to another.
pub fn set_keep_capabilities(keep: bool) -> Result<(), Errno> {
    prctl(libc::PR_SET_KEEPCAPS, u64::from(keep), 0, 0).map(drop)
}

/// PR_SET_CHILD_SUBREAPER: orphaned descendants become children of this process.
pub fn set_child_subreaper(on: bool) -> Result<(), Errno> {
    prctl(libc::PR_SET_CHILD_SUBREAPER, u64::from(on), 0, 0).map(drop)
}

/// PR_SET_NAME: what `ps` shows for the calling thread; cut after 15 bytes.
pub fn set_name(name: &CStr) -> Result<(), Errno> {
    prctl(libc::PR_SET_NAME, name.as_ptr() as u64, 0, 0).map(drop)
}

/// keyctl(KEYCTL_JOIN_SESSION_KEYRING): a new anonymous session keyring (keyrings(7)), so that the
/// keys of the starting process are out of reach. Returns its serial number.
///
/// ENOSYS on kernels without keyrings; EDQUOT when the user's quota of keys is used up.
pub fn join_session_keyring() -> Result<i32, Errno> {
    const JOIN_SESSION_KEYRING: libc::c_int = 1;
    // SAFETY: a null name means an anonymous keyring.
    check(unsafe {
        libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, std::ptr::null::<c_char>())
    })
    .map(|serial| serial as i32)
}

/// LANDLOCK_ACCESS_FS_MAKE_SOCK: rights that a ruleset restricts.
pub const RESTRICT_MAKE_SOCK: u64 = 1 << 9;

/// landlock_create_ruleset(2), of rights to files. KERNEL(5.13). ENOSYS or EOPNOTSUPP where Landlock is
/// missing or disabled.
pub fn create_ruleset(rights: u64) -> Result<OwnedFd, Errno> {
    const CREATE_RULESET: c_long = 444;
    // SAFETY: the attributes are one number, which outlives the call.
    let fd =
        check(unsafe { libc::syscall(CREATE_RULESET, &raw const rights, size_of::<u64>(), 0) })?;
    // SAFETY: the kernel has just made it, for this caller.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// landlock_restrict_self(2): the calling thread enters a domain, for good.
///
/// EPERM without no_new_privs or CAP_SYS_ADMIN in the thread's user namespace.
pub fn restrict_self(ruleset: BorrowedFd<'_>) -> Result<(), Errno> {
    const RESTRICT_SELF: c_long = 446;
    // SAFETY: only integers are passed.
    check(unsafe { libc::syscall(RESTRICT_SELF, ruleset.as_raw_fd(), 0) }).map(drop)
}

/// One instruction of classic BPF (seccomp(2)).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Instruction {
    /// Operation.
    pub code: u16,
    /// How many instructions to skip when the comparison holds.
    pub jump_true: u8,
    /// How many to skip when it does not.
    pub jump_false: u8,
    /// Constant.
    pub k: u32,
}

/// seccomp(SECCOMP_SET_MODE_FILTER): every later system call of the thread passes `filter`.
///
/// EACCES without no_new_privs or CAP_SYS_ADMIN in the thread's user namespace, EINVAL when the
/// filter is malformed or longer than 4096 instructions.
pub fn load_filter(filter: &[Instruction]) -> Result<(), Errno> {
    load_filter_with(filter, 0).map(drop)
}

/// The same with `SECCOMP_FILTER_FLAG_*`. Returns the number of the listener's descriptor for
/// [`FILTER_NEW_LISTENER`], closed on exec, and otherwise 0.
pub fn load_filter_with(filter: &[Instruction], flags: u32) -> Result<i32, Errno> {
    load_program(filter.as_ptr().cast(), filter.len(), flags)
}

/// SECCOMP_FILTER_FLAG_NEW_LISTENER (seccomp_unotify(2)). KERNEL(5.0).
pub const FILTER_NEW_LISTENER: u32 = 8;

/// The same with the instructions as bytes, eight each, at any alignment.
pub fn load_filter_bytes(filter: &[u8]) -> Result<(), Errno> {
    if !filter.len().is_multiple_of(size_of::<Instruction>()) {
        return Err(Errno::INVAL);
    }
    load_program(filter.as_ptr(), filter.len() / size_of::<Instruction>(), 0).map(drop)
}

fn load_program(instructions: *const u8, length: usize, flags: u32) -> Result<i32, Errno> {
    /// The kernel's `struct sock_fprog`.
    #[repr(C)]
    struct Program {
        length: u16,
        instructions: *const u8,
    }
    const SET_MODE_FILTER: libc::c_uint = 1;
    let Ok(length) = u16::try_from(length) else { return Err(Errno::INVAL) };
    let program = Program { length, instructions };
    // SAFETY: pointer and length are those of one slice, by the two callers; the kernel copies
    // from it at any alignment, and checks what it finds.
    check(unsafe {
        libc::syscall(libc::SYS_seccomp, SET_MODE_FILTER, flags, &program as *const Program)
    })
    .map(|fd| fd as i32)
}

/// A table of pointers to C strings that ends with null, as execve(2) takes it.
///
/// Built over memory that the caller provides, so that it can be made between clone and exec.
#[derive(Debug)]
pub struct StringTable<'a> {
    pointers: &'a [usize],
}

impl<'a> StringTable<'a> {
    /// A table of the strings in `bytes`, each ended by a NUL byte, written into `space`, which
    /// must hold one entry more than there are strings. `None` if it does not, or if the last
    /// string is not ended.
    pub fn build(bytes: &'a [u8], space: &'a mut [usize]) -> Option<Self> {
        let mut count = 0;
        let mut rest = bytes;
        while !rest.is_empty() {
            let end = rest.iter().position(|&byte| byte == 0)?;
            *space.get_mut(count)? = rest.as_ptr() as usize;
            count += 1;
            rest = &rest[end + 1..];
        }
        *space.get_mut(count)? = 0;
        Some(Self { pointers: &space[..=count] })
    }
}

/// execveat(2): the calling process becomes another program. Returns only on failure.
///
/// With an empty `path` the program is `dir` itself; a script can't be started so if `dir` is
/// closed on exec.
pub fn execveat(
    dir: BorrowedFd<'_>,
    path: &CStr,
    arguments: &StringTable<'_>,
    environment: &StringTable<'_>,
) -> Errno {
    let flags = if path.is_empty() { libc::AT_EMPTY_PATH } else { 0 };
    // SAFETY: both tables end with null and point to strings that end with NUL, by construction,
    // and borrow what they point to.
    let failed = check(unsafe {
        libc::syscall(
            libc::SYS_execveat,
            dir.as_raw_fd(),
            path.as_ptr(),
            arguments.pointers.as_ptr(),
            environment.pointers.as_ptr(),
            flags,
        )
    });
    failed.err().unwrap_or(Errno::NOEXEC)
}

/// exit_group(2): the calling process ends now, without destructors or exit handlers.
pub fn exit(status: i32) -> ! {
    // SAFETY: only an integer is passed, and the call does not return.
    unsafe {
        libc::syscall(libc::SYS_exit_group, status);
        libc::_exit(status)
    }
}

/// pause(2): returns after a signal was handled.
pub fn pause() {
    // SAFETY: the call has no arguments.
    unsafe { libc::syscall(libc::SYS_pause) };
}

/// kill(2) of the calling process by `signal`.
pub fn kill_self(signal: i32) -> Result<(), Errno> {
    // SAFETY: only integers are passed.
    check(unsafe { libc::syscall(libc::SYS_kill, libc::getpid(), signal) }).map(drop)
}

/// Ignores a signal, or gives it its default action (signal(2)).
pub fn set_ignored(signal: i32, is_ignored: bool) -> Result<(), Errno> {
    let action = if is_ignored { libc::SIG_IGN } else { libc::SIG_DFL };
    // SAFETY: neither action has code to run.
    let before = unsafe { libc::signal(signal, action) };
    if before == libc::SIG_ERR { Err(Errno::INVAL) } else { Ok(()) }
}

/// Gives every signal its default action and unblocks all, as a new program expects them.
///
/// CLEAR_SIGHAND resets handlers, but leaves ignored signals ignored and blocked ones blocked.
pub fn reset_signals() -> Result<(), Errno> {
    /// The kernel's `struct sigaction`.
    #[repr(C)]
    struct Action {
        handler: usize,
        flags: u64,
        restorer: usize,
        mask: u64,
    }
    let default = Action { handler: libc::SIG_DFL, flags: 0, restorer: 0, mask: 0 };
    for signal in 1..=64 {
        if signal == libc::SIGKILL || signal == libc::SIGSTOP {
            continue;
        }
        // SAFETY: the structure is what x86_64 expects; a default action has no code to run.
        check(unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                &default as *const Action,
                std::ptr::null::<Action>(),
                8usize,
            )
        })?;
    }
    let none = 0u64;
    // SAFETY: the mask is 8 bytes, the size that is passed.
    check(unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &none as *const u64,
            std::ptr::null::<u64>(),
            8usize,
        )
    })
    .map(drop)
}

/// madvise(2) with MADV_POPULATE_READ: has pages mapped as if each had been read. KERNEL(5.14).
///
/// A range that is not mapped, or cannot be read, is left as it is.
pub fn populate(address: usize, bytes: usize) {
    // SAFETY: no memory changes, whatever the range is.
    let _ = unsafe { libc::syscall(libc::SYS_madvise, address, bytes, libc::MADV_POPULATE_READ) };
}

/// prlimit64(2) of the calling process: soft and hard limit as they were before.
pub fn prlimit(resource: u32, new: Option<(u64, u64)>) -> Result<(u64, u64), Errno> {
    let new = new.map(|(soft, hard)| [soft, hard]);
    let new = new.as_ref().map_or(std::ptr::null(), |pair| pair.as_ptr());
    let mut old = [0u64; 2];
    // SAFETY: null or a pair of 64-bit numbers, and space for one.
    check(unsafe { libc::syscall(libc::SYS_prlimit64, 0, resource, new, old.as_mut_ptr()) })?;
    Ok((old[0], old[1]))
}
