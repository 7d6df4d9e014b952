//! The tiny init: pid 1 of a container that asked for one.
//!
//! It does not execute a program of its own: it is the newborn itself, which forks the program and
//! stays. It holds no descriptor, cannot be looked into (its memory is the keeper's copy, owned by
//! the host's user namespace), and calls rt_sigtimedwait, wait4, kill and exit_group only.
//!
//! LIMIT: it costs the copied pages of the keeper, about 100 kB, where a program of its own would
//! cost an execve and its file.

use dormouse_kernel::call::{self as kernel, CapabilityMasks};
use rustix::io::Errno;

use crate::call;

/// All signals.
const ALL: u64 = u64::MAX;

/// Forks; returns in the program, and in the init never.
///
/// ORDER: signals are blocked before the fork, so that none is lost: a blocked signal is queued
/// even for the first process of a pid namespace, which the kernel protects from those it does not
/// handle.
pub fn become_init(
    arguments: call::Arguments,
    capabilities: Option<CapabilityMasks>,
) -> Result<(), Errno> {
    call::block_signals(ALL)?;
    // SAFETY: there is one thread; the child goes on as a newborn, without allocation or locks.
    let pid = match unsafe { call::fork() } {
        Ok(0) => {
            // A process group of its own, in the foreground of the terminal if there is one;
            // SIGTTOU is blocked still.
            let _ = rustix::process::setpgid(None, None);
            let own = rustix::process::getpid();
            // SAFETY: standard input is open or the call fails.
            let input = unsafe { std::os::fd::BorrowedFd::borrow_raw(0) };
            let _ = rustix::termios::tcsetpgrp(input, own);
            return call::block_signals(0);
        }
        other => other?,
    };
    let _ = kernel::set_name(c"dormouse-init");
    if let Some(masks) = capabilities {
        let _ = kernel::capset(masks);
    }
    // SAFETY: this process holds nothing any more; its arguments are nobody's.
    unsafe {
        let _ = call::close_from(0);
        arguments.overwrite(b"dormouse-init");
    }
    pass_and_reap(pid)
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
            match call::reap() {
                Ok(Some((pid, status))) if pid == program => {
                    kernel::exit(crate::server::code_of(status).0)
                }
                Ok(Some(_)) => {}
                Ok(None) => break,
                // No child at all: the program cannot be waited for any more.
                Err(Errno::CHILD) => kernel::exit(125),
                Err(_) => break,
            }
        }
    }
}
