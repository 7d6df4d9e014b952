//! System calls that only the keeper and its newborns make. None allocates or locks.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::offset_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;

fn check(returned: libc::c_long) -> Result<usize, Errno> {
    if returned >= 0 {
        return Ok(returned as usize);
    }
    // SAFETY: the location is valid for the life of the thread.
    Err(Errno::from_raw_os_error(unsafe { *libc::__errno_location() }))
}

/// signalfd(2) for the signals of a mask as of [`block_signals`]; it is closed by execve.
pub fn signal_descriptor(mask: u64) -> Result<OwnedFd, Errno> {
    // SAFETY: the mask is 8 bytes, the size that is passed.
    let fd = check(unsafe {
        libc::syscall(libc::SYS_signalfd4, -1, &mask as *const u64, 8usize, libc::SFD_CLOEXEC)
    })?;
    // SAFETY: the kernel has just returned it, and no other code has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// sigprocmask(2): bit N-1 of `mask` blocks signal N; all others are unblocked.
pub fn block_signals(mask: u64) -> Result<(), Errno> {
    // SAFETY: the mask is 8 bytes, the size that is passed.
    check(unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &mask as *const u64,
            std::ptr::null::<u64>(),
            8usize,
        )
    })
    .map(drop)
}

/// signalfd4(2) for the signals of `mask`, closed on exec, never blocking.
pub fn signal_fd(mask: u64) -> Result<OwnedFd, Errno> {
    let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
    // SAFETY: the mask is 8 bytes, the size that is passed.
    let fd = check(unsafe {
        libc::syscall(libc::SYS_signalfd4, -1, &mask as *const u64, 8usize, flags)
    })?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as c_int) })
}

/// sigwaitinfo(2): waits for one of the blocked signals of `mask`.
pub fn wait_signal(mask: u64) -> Result<i32, Errno> {
    // SAFETY: the mask is 8 bytes, the size that is passed; null means no details and no timeout.
    check(unsafe {
        libc::syscall(
            libc::SYS_rt_sigtimedwait,
            &mask as *const u64,
            std::ptr::null::<c_void>(),
            std::ptr::null::<c_void>(),
            8usize,
        )
    })
    .map(|signal| signal as i32)
}

/// kill(2).
pub fn kill(pid: i32, signal: i32) -> Result<(), Errno> {
    // SAFETY: only integers are passed.
    check(unsafe { libc::syscall(libc::SYS_kill, pid, signal) }).map(drop)
}

/// Reads signalfd(2): returns the sender of a pending SIGCHLD. SIGCHLD is not queued: children that
/// exit while it is pending are not reported.
pub fn signalled_by(signals: &OwnedFd) -> Option<u32> {
    const PID: usize = offset_of!(libc::signalfd_siginfo, ssi_pid);
    let mut info = [0; size_of::<libc::signalfd_siginfo>()];
    let read = rustix::io::read(signals, &mut info).ok()?;
    let pid = info[..read].get(PID..PID + 4)?;
    Some(u32::from_ne_bytes(pid.try_into().ok()?))
}

/// How many signals [`ready_descriptors`] reads at most.
pub(crate) const SIGNALS_READ: usize = 64;

/// Reads signalfd(2): the descriptors that queued signals name (fcntl(2), F_SETSIG), in their
/// order. `None` is a signal without one, which the kernel sends when the queue is full.
pub(crate) fn ready_descriptors(signals: &OwnedFd) -> Vec<Option<i32>> {
    const LENGTH: usize = size_of::<libc::signalfd_siginfo>();
    const FD: usize = offset_of!(libc::signalfd_siginfo, ssi_fd);
    let mut bytes = [0; SIGNALS_READ * LENGTH];
    let read = rustix::io::read(signals, &mut bytes).unwrap_or(0);
    let one = |info: &[u8; LENGTH]| {
        let number = |at: usize| Some(i32::from_ne_bytes(info.get(at..at + 4)?.try_into().ok()?));
        number(FD).filter(|_| number(0) != Some(libc::SIGIO))
    };
    bytes[..read].as_chunks::<LENGTH>().0.iter().map(one).collect()
}

/// fcntl(2): this thread receives a queued signal for each write to a pipe, with the number of this
/// read end. Also of a pipe that had another owner. Reads never block.
pub(crate) fn signal_writes(pipe: BorrowedFd<'_>, signal: c_int) -> Result<(), Errno> {
    let set = |command: c_int, value: c_int| {
        // SAFETY: only integers are passed.
        check(unsafe { libc::syscall(libc::SYS_fcntl, pipe.as_raw_fd(), command, value) })
    };
    const F_SETSIG: c_int = 10;
    const F_SETOWN_EX: c_int = 15;
    const F_OWNER_TID: c_int = 0;
    let owner = [F_OWNER_TID, rustix::thread::gettid().as_raw_pid()];
    // ORDER: the number is recorded when the flag changes, so it is cleared first.
    set(libc::F_SETFL, libc::O_NONBLOCK)?;
    set(F_SETSIG, signal)?;
    // SAFETY: the pointer is to a `struct f_owner_ex`, two numbers.
    check(unsafe {
        libc::syscall(libc::SYS_fcntl, pipe.as_raw_fd(), F_SETOWN_EX, owner.as_ptr())
    })?;
    set(libc::F_SETFL, libc::O_NONBLOCK | libc::O_ASYNC).map(drop)
}

/// wait4(2) for one child, or any of them, without blocking: pid and status, `None` if none has
/// exited.
pub fn reap(which: Option<u32>) -> Result<Option<(i32, i32)>, Errno> {
    let mut status = 0;
    // SAFETY: the status is written to a c_int; null means no resource usage.
    let pid = check(unsafe {
        libc::syscall(
            libc::SYS_wait4,
            which.map_or(-1, |pid| pid as c_int),
            &mut status as *mut c_int,
            libc::WNOHANG,
            std::ptr::null::<c_void>(),
        )
    })?;
    Ok((pid != 0).then_some((pid as i32, status)))
}

/// fork(2) by the plain system call: a filter that cannot read clone3's structure refuses clone3.
/// Returns 0 in the child.
///
/// # Safety
/// There is one thread, and the child calls nothing that allocates or locks.
pub unsafe fn fork() -> Result<i32, Errno> {
    // SAFETY: no memory is shared and no pointer passed; the rest is the caller's promise.
    check(unsafe {
        libc::syscall(
            libc::SYS_clone,
            libc::SIGCHLD as libc::c_long,
            0usize,
            0usize,
            0usize,
            0usize,
        )
    })
    .map(|pid| pid as i32)
}

/// execve(2) with tables that lie in memory as the kernel wants them. Returns only on failure.
///
/// # Safety
/// Both tables are arrays of pointers to texts ended by NUL, and end with null.
pub unsafe fn execve(path: &CStr, argv: *const *const c_char, envp: *const *const c_char) -> Errno {
    // SAFETY: the path is a C string; the tables are the caller's promise.
    let failed = check(unsafe { libc::syscall(libc::SYS_execve, path.as_ptr(), argv, envp) });
    failed.err().unwrap_or(Errno::NOEXEC)
}

/// close_range(2): closes descriptors from `first` on. KERNEL(5.9).
///
/// # Safety
/// No code uses them afterwards.
pub unsafe fn close_from(first: c_int) -> Result<(), Errno> {
    // SAFETY: only integers are passed; the rest is the caller's promise.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0) }).map(drop)
}

/// Runs a function under another real uid (setresuid(2)). If that uid cannot be taken, as in a user
/// namespace that does not map it, the function runs under the present one. Permissions stay the
/// same, because they depend on the effective and saved uid.
pub(crate) fn as_user<T>(uid: u32, does: impl FnOnce() -> T) -> T {
    let real = rustix::process::getuid().as_raw();
    // SAFETY: only integers are passed.
    let set = |uid: u32| check(unsafe { libc::syscall(libc::SYS_setresuid, uid, -1, -1) });
    let is_other = set(uid).is_ok();
    let done = does();
    if is_other && set(real).is_err() {
        // The effective uid may always become the real one.
        std::process::abort();
    }
    done
}

/// Returns a socket that is connected to itself, so no other socket can send to it (unix(7)).
pub(crate) fn self_connected() -> Result<OwnedFd, Errno> {
    use rustix::net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, getsockname,
        socket_with,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let sock = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    // The kernel finds a name for it, in the network namespace.
    bind(&sock, &SocketAddrUnix::new_unnamed())?;
    connect(&sock, &getsockname(&sock)?)?;
    Ok(sock)
}

/// Closes all descriptors but these and the standard streams.
///
/// # Errors
/// As close_range(2).
pub(crate) fn close_all_but<'k>(
    kept: impl IntoIterator<Item = BorrowedFd<'k>>,
) -> Result<(), Errno> {
    let mut kept: Vec<_> = kept.into_iter().map(|fd| fd.as_raw_fd()).collect();
    kept.sort_unstable();
    let mut first = 3;
    for fd in kept {
        // SAFETY: as below.
        unsafe { close_range(first, fd - 1) }?;
        first = fd + 1;
    }
    // SAFETY: the caller is a process that has just been cloned, and never returns to the owners of
    // the other descriptors.
    unsafe { close_from(first) }
}

/// close_range(2): closes descriptors from `first` to `last`, if any. KERNEL(5.9).
///
/// # Safety
/// No code uses them afterwards.
pub unsafe fn close_range(first: c_int, last: c_int) -> Result<(), Errno> {
    if first > last {
        return Ok(());
    }
    // SAFETY: only integers are passed; the rest is the caller's promise.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) }).map(drop)
}

/// close_range(2) with CLOSE_RANGE_UNSHARE: closes descriptors from `first` on in this process
/// alone. Of a shared table only the lower descriptors are copied. KERNEL(5.9).
pub fn part_with_from(first: c_int) -> Result<(), Errno> {
    // SAFETY: only integers are passed; the caller is about to execute another program.
    check(unsafe {
        libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_UNSHARE)
    })
    .map(drop)
}

/// close_range(2) with CLOSE_RANGE_CLOEXEC: execve closes descriptors from `first` on.
/// KERNEL(5.11).
pub fn close_on_exec_from(first: c_int) -> Result<(), Errno> {
    // SAFETY: only integers are passed.
    check(unsafe {
        libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC)
    })
    .map(drop)
}

/// dup3(2) onto a fixed number, whatever was there; closed on exec if `close_on_exec`.
///
/// # Safety
/// No value owns the number.
pub unsafe fn duplicate_to(
    fd: BorrowedFd<'_>,
    number: c_int,
    close_on_exec: bool,
) -> Result<(), Errno> {
    if fd.as_raw_fd() == number {
        return rustix::io::fcntl_setfd(
            fd,
            match close_on_exec {
                true => rustix::io::FdFlags::CLOEXEC,
                false => rustix::io::FdFlags::empty(),
            },
        );
    }
    let flags = if close_on_exec { libc::O_CLOEXEC } else { 0 };
    // SAFETY: only integers are passed; the rest is the caller's promise.
    check(unsafe { libc::syscall(libc::SYS_dup3, fd.as_raw_fd(), number, flags) }).map(drop)
}

/// sethostname(2) or setdomainname(2).
pub fn set_uts_name(name: &CStr, domain: bool) -> Result<(), Errno> {
    let call = if domain { libc::SYS_setdomainname } else { libc::SYS_sethostname };
    // SAFETY: pointer and length describe the text.
    check(unsafe { libc::syscall(call, name.as_ptr(), name.count_bytes()) }).map(drop)
}

/// Sets the loopback device of this process's network namespace up (netdevice(7)). Any socket
/// carries the request; a unix socket needs nothing of the network stack.
pub fn loopback_up() -> Result<(), Errno> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: all zeroes are a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as c_char;
    request.ifr_name[1] = b'o' as c_char;
    request.ifr_ifru.ifru_flags = libc::IFF_UP as _;
    let at: *const libc::ifreq = &request;
    // SAFETY: the request reads an ifreq at that place.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, at) };
    check(libc::c_long::from(done)).map(drop)
}

/// PR_SET_THP_DISABLE(2const): no transparent huge pages for this process and its children.
pub(crate) fn disable_huge_pages() -> Result<(), Errno> {
    // SAFETY: only integers are passed.
    check(unsafe { libc::syscall(libc::SYS_prctl, libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) }).map(drop)
}

/// personality(2).
pub fn set_personality(persona: u64) -> Result<(), Errno> {
    // SAFETY: only an integer is passed.
    check(unsafe { libc::syscall(libc::SYS_personality, persona) }).map(drop)
}

/// sched_setattr(2) of the calling thread; the attributes are the kernel's `struct sched_attr`.
pub fn set_scheduler(attributes: &[u8]) -> Result<(), Errno> {
    if attributes.len() < 48 {
        return Err(Errno::INVAL);
    }
    // SAFETY: the first field of the structure contains its size, which the plan's writer has set
    // to its length. The kernel reads at most the size that it knows, 56 bytes, of a mapping that
    // is longer.
    check(unsafe { libc::syscall(libc::SYS_sched_setattr, 0, attributes.as_ptr(), 0) }).map(drop)
}

/// ioprio_set(2) of the calling process.
pub fn set_io_priority(priority: i32) -> Result<(), Errno> {
    const WHO_PROCESS: i32 = 1;
    // SAFETY: only integers are passed.
    check(unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, priority) }).map(drop)
}

/// Returns whether getcwd(2) is a path below the root; outside of it the text is
/// `(unreachable)/...`.
pub fn directory_is_reachable() -> bool {
    let mut text = [0u8; 4096];
    // SAFETY: pointer and length describe the buffer.
    let n = check(unsafe { libc::syscall(libc::SYS_getcwd, text.as_mut_ptr(), text.len()) });
    n.is_ok() && text[0] == b'/'
}

/// Location of this program's arguments, which `ps` shows: from `/proc/self/stat`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Arguments {
    start: usize,
    end: usize,
}

impl Arguments {
    /// Finds them; an empty range if the file cannot be read.
    pub fn find() -> Self {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
        let fields = stat.rsplit(')').next().unwrap_or_default();
        let mut fields = fields.split_whitespace().skip(45).map(str::parse);
        match (fields.next(), fields.next()) {
            (Some(Ok(start)), Some(Ok(end))) if start < end && end - start < 1 << 20 => {
                Self { start, end }
            }
            _ => Self::default(),
        }
    }

    /// Overwrites them with `name`: a newborn is seen inside a container before it has a program.
    ///
    /// # Safety
    /// This process is a newborn: nothing reads the arguments any more.
    pub unsafe fn overwrite(self, name: &[u8]) {
        let length = self.end - self.start;
        if length == 0 {
            return;
        }
        let n = name.len().min(length - 1);
        // SAFETY: the kernel has laid the arguments there, on the stack, and no other code writes
        // to them; the length was checked by `find`.
        unsafe {
            std::ptr::write_bytes(self.start as *mut u8, 0, length);
            std::ptr::copy_nonoverlapping(name.as_ptr(), self.start as *mut u8, n);
        }
    }
}

/// Runs `body` with `argument` in a separate process that shares memory and descriptors with the
/// caller. The caller is blocked until that process has exited (vfork(2)). Returns its pid, to be
/// reaped.
///
/// # Safety
/// `body` neither allocates, locks, panics nor returns to Rust code of the caller; it ends by
/// returning, and what it writes through `argument` outlives the call.
pub unsafe fn run_aside(
    body: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
) -> Result<i32, Errno> {
    #[repr(align(16))]
    struct Stack([u8; 128 << 10]);
    let mut stack = Stack([0; 128 << 10]);
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FILES | libc::SIGCHLD;
    // SAFETY: the stack grows down from its end and lives until the process has ended, for which
    // CLONE_VFORK waits; the rest is the caller's promise.
    let pid = unsafe {
        let top = stack.0.as_mut_ptr().add(stack.0.len());
        libc::clone(body, top.cast(), flags, argument)
    };
    check(libc::c_long::from(pid)).map(|pid| pid as i32)
}

/// Continues in the interpreter of a restore program at `code`, with its first operation at
/// `start`.
///
/// # Safety
/// `code` is the begin of such an interpreter, mapped executable, and `start` the address of an
/// operation of its program. Nothing of the caller is ever used again.
pub unsafe fn follow(code: *const u8, start: u64) -> ! {
    // SAFETY: the interpreter needs no stack and does not return; the rest is the caller's promise.
    unsafe {
        std::arch::asm!(
            "mov rbx, {start}",
            "jmp {code}",
            start = in(reg) start,
            code = in(reg) code,
            options(noreturn),
        )
    }
}
