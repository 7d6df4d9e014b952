//! Settings of the calling process that a newborn and the programs on its way share.
//!
//! The rules are those of [`crate::newborn`]: no code here allocates, locks or panics.

use std::os::fd::{BorrowedFd, RawFd};

use dormouse_kernel::call as kernel;
use dormouse_launch::flat::{self, Record};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::call;

/// Resource number of the limit on descriptors (getrlimit(2)).
pub(crate) const NOFILE: u32 = 7;

pub(crate) type Outcome<T = ()> = Result<T, Errno>;

pub(crate) fn rlimit(op: &Record) -> Outcome {
    match kernel::prlimit(op.fd, Some((op.a, op.b))) {
        Err(Errno::PERM) if op.flags & flat::LENIENT != 0 => {
            let (_, hard) = kernel::prlimit(op.fd, None)?;
            let hard = hard.min(op.b);
            kernel::prlimit(op.fd, Some((op.a.min(hard), hard))).map(drop)
        }
        other => other.map(drop),
    }
}

pub(crate) fn become_stdio(fds: [BorrowedFd<'_>; 3]) -> Outcome {
    for (number, fd) in fds.into_iter().enumerate() {
        // SAFETY: no value owns 0 to 2; descriptors of a plan have higher numbers.
        unsafe { call::duplicate_to(fd, number as RawFd, false)? };
    }
    Ok(())
}

/// Writes the calling process's oom_score_adj through a procfs.
pub(crate) fn write_oom_score_adj(proc: BorrowedFd<'_>, value: i64) -> Outcome {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(proc, c"self/oom_score_adj", flags, Mode::empty())?;
    rustix::io::write(&file, decimal(value, &mut [0; 20])).map(drop)
}

/// Writes a number in decimal digits into the end of `text`.
pub(crate) fn decimal(value: i64, text: &mut [u8; 20]) -> &[u8] {
    let mut at = text.len();
    let mut rest = value.unsigned_abs();
    loop {
        at -= 1;
        text[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 || at == 1 {
            break;
        }
    }
    if value < 0 {
        at -= 1;
        text[at] = b'-';
    }
    &text[at..]
}
