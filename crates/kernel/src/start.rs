//! The start of a program, without the part of Rust's runtime that a command of milliseconds does not need.
//!
//! `fn main` of Rust reads `/proc/self/maps` with sscanf(3) to find the guard page of the stack, and maps an alternate
//! stack for a handler of SIGSEGV, which only writes a message about a full stack. That is 17 system calls and 30,000
//! instructions in front of every command (Rust 1.95). Programs of [`main!`](crate::main) begin in C's `main`.
//! A full stack ends them with SIGSEGV instead of SIGABRT and that message. The rest of that start is here: open
//! standard streams, SIGPIPE ignored, 101 as the exit code of a panic, and `stdout` written out at the end.

use std::ffi::{OsStr, OsString};
use std::panic::{UnwindSafe, catch_unwind};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// The exit code of a program that panicked, as that of Rust.
const PANICKED: i32 = 101;

/// Defines the start of a program: `main!(NAME)`, with a function that returns the exit code, beside `#![no_main]`.
#[macro_export]
macro_rules! main {
    ($main:path) => {
        // SAFETY: the C library's start is the one caller, and no other function of the program has this name.
        #[unsafe(no_mangle)]
        extern "C" fn main(_count: i32, _words: *const *const u8) -> i32 {
            $crate::start::run($main)
        }
    };
}

/// Runs a program, and exits. Called by [`main!`](crate::main) alone.
#[doc(hidden)]
pub fn run(main: impl FnOnce() -> u8 + UnwindSafe) -> ! {
    if open_streams().is_err() {
        std::process::abort(); // as Rust's runtime does
    }
    // SAFETY: no handler is installed, and there is one thread.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    let code = catch_unwind(main).map_or(PANICKED, i32::from);
    std::process::exit(code) // writes out what is buffered for the standard output
}

/// Returns whether this process has no thread beside this one.
pub fn has_one_thread() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1)
}

/// Makes these variables the environment of this process.
///
/// # Errors
/// EBUSY: this process has other threads, which may read it.
#[expect(clippy::disallowed_methods, reason = "the place where there is one thread for certain")]
pub fn set_environment<'v>(
    variables: impl Iterator<Item = (&'v OsStr, &'v OsStr)>,
) -> Result<(), Errno> {
    if !has_one_thread() {
        return Err(Errno::BUSY);
    }
    let old: Vec<OsString> = std::env::vars_os().map(|(name, _)| name).collect();
    // SAFETY: there is one thread, which is here.
    unsafe {
        old.iter().for_each(|name| std::env::remove_var(name));
        variables.for_each(|(name, value)| std::env::set_var(name, value));
    }
    Ok(())
}

/// Opens `/dev/null` in place of closed standard streams, so that no other file gets their numbers.
fn open_streams() -> Result<(), Errno> {
    let streams = [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()];
    let mut polled = streams.map(|stream| PollFd::from_borrowed_fd(stream, PollFlags::empty()));
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    loop {
        match poll(&mut polled, Some(&now)) {
            Err(Errno::INTR) => {}
            other => break other.map(drop)?,
        }
    }
    for _ in polled.iter().filter(|stream| stream.revents().contains(PollFlags::NVAL)) {
        // The lowest free number is that of the first closed stream (open(2)). It stays open.
        let null = rustix::fs::open(c"/dev/null", OFlags::RDWR, Mode::empty())?;
        let _ = std::os::fd::IntoRawFd::into_raw_fd(null);
    }
    Ok(())
}
