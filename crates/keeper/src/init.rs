//! The tiny init: pid 1 of a container that requested one (`--init`).
//!
//! The init executes no program: the newborn itself forks the program and stays. It holds no
//! descriptor and cannot be inspected (its memory is the keeper's copy, owned by the host's user
//! namespace). Its only system calls are rt_sigtimedwait, wait4, kill and exit_group.
//!
//! LIMIT: it costs the copied pages of the keeper, about 100 kB, where a program of its own would
//! cost an execve and its file.

use dormouse_kernel::call::{self as kernel, CapabilityMasks, CloneArgs, Cloned};
use rustix::io::Errno;

use crate::call;
use crate::exit::code_of;
use crate::heritage::Shared;

/// All signals.
const ALL: u64 = u64::MAX;

/// Identity of the init.
#[derive(Debug, Clone, Copy)]
pub struct Own {
    /// User and group, if they differ from the present ones.
    pub ids: Option<(u32, u32)>,
    /// Its capabilities, the same.
    pub capabilities: Option<CapabilityMasks>,
    /// The process id of its program, if it is not the next one.
    pub program: Option<i32>,
}

impl Own {
    /// Reads the identity from the data of its operation; None if there is none.
    pub fn read(data: &[u8]) -> Result<Option<Self>, Errno> {
        if data.is_empty() {
            return Ok(None);
        }
        let mut numbers = [0; 6];
        for (number, bytes) in numbers.iter_mut().zip(data.chunks_exact(8)) {
            *number = u64::from_ne_bytes(bytes.try_into().map_err(|_| Errno::BADMSG)?);
        }
        let [uid, gid, effective, permitted, inheritable, program] = numbers;
        let id = |number: u64| u32::try_from(number).map_err(|_| Errno::BADMSG);
        if data.len() != 48 {
            return Err(Errno::BADMSG);
        }
        Ok(Some(Self {
            ids: Some((id(uid)?, id(gid)?)),
            capabilities: Some(CapabilityMasks { effective, permitted, inheritable }),
            program: Some(i32::try_from(program).map_err(|_| Errno::BADMSG)?),
        }))
    }

    /// Becomes that, for good.
    fn take_on(&self) -> Result<(), Errno> {
        if let Some((uid, gid)) = self.ids {
            kernel::set_groups(&[])?;
            kernel::set_gid(gid)?;
            kernel::set_uid(uid)?;
        }
        self.capabilities.map_or(Ok(()), kernel::capset)
    }
}

/// Forks; returns in the program, and in the init never.
///
/// ORDER: signals are blocked before the fork, so that none is lost: a blocked signal is queued
/// even for the first process of a pid namespace, which the kernel protects from those it does not
/// handle.
pub(crate) fn become_init(
    arguments: call::Arguments,
    own: &Own,
    shared: Shared,
) -> Result<(), Errno> {
    call::block_signals(ALL)?;
    // SAFETY: there is one thread; the child continues as a newborn, without allocation or locks.
    let pid = match unsafe { fork(own.program) } {
        Ok(0) => {
            // A process group of its own, in the foreground of the terminal if there is one;
            // SIGTTOU is blocked still.
            let _ = rustix::process::setpgid(None, None);
            let group = rustix::process::getpid();
            // SAFETY: standard input is open or the call fails.
            let input = unsafe { std::os::fd::BorrowedFd::borrow_raw(0) };
            let _ = rustix::termios::tcsetpgrp(input, group);
            return call::block_signals(0);
        }
        other => other?,
    };
    let _ = kernel::set_name(c"dormouse-init");
    // If dropping privileges fails the init exits; the kernel then kills the pid namespace. Memory
    // shared with other containers is unmapped, because the init would keep it for as long as it
    // lives.
    if shared.let_go().and_then(|()| own.take_on()).is_err() {
        kernel::exit(125);
    }
    // SAFETY: this process uses no descriptor any more, and no code uses its arguments.
    unsafe {
        let _ = call::close_from(0);
        arguments.overwrite(b"dormouse-init");
    }
    pass_and_reap(pid)
}

/// Returns 0 in the child.
///
/// # Safety
/// There is one thread, and the child calls nothing that allocates or locks.
unsafe fn fork(number: Option<i32>) -> Result<i32, Errno> {
    let Some(number) = number else {
        // SAFETY: the caller's promise.
        return unsafe { call::fork() };
    };
    let args = CloneArgs { number: Some(number), ..CloneArgs::default() };
    // SAFETY: the caller's promise.
    match unsafe { kernel::clone3(&args) }? {
        Cloned::Child => Ok(0),
        Cloned::Parent { .. } => Ok(number),
    }
}

/// Passes signals on to the program and reaps until it has ended.
fn pass_and_reap(program: i32) -> ! {
    loop {
        match call::wait_signal(ALL) {
            Ok(libc::SIGCHLD) => {}
            Ok(signal) => {
                let _ = call::kill(program, signal);
                continue;
            }
            Err(_) => {}
        }
        loop {
            match call::reap(None) {
                Ok(Some((pid, status))) if pid == program => kernel::exit(code_of(status).0),
                Ok(Some(_)) => {}
                Ok(None) => break,
                // No child at all: the program cannot be waited for any more.
                Err(Errno::CHILD) => kernel::exit(125),
                Err(_) => break,
            }
        }
    }
}
