//! A SIGSTOP that is pending for a process in a job control stop.
//!
//! No mask blocks the signal: the kernel would deliver it between two injected calls. So it is taken from the
//! queue before the first call, and sent again after the last one. A stopped process is at rest with it.

use dormouse_kernel::call::{self, Stop};
use dormouse_kernel::{Errno, pidfd};
use dormouse_record::{Bytes, Process, Signal};

use super::calls::begin;
use super::seen::Seen;
use crate::inject::landing::Ground;
use crate::inject::remote::EVENT_STOP;

const INFO_BYTES: usize = 128;

/// The signal that was taken; the drop sends it again.
pub(super) struct Halt<'s> {
    seen: &'s Seen,
    is_taken: bool,
}

impl<'s> Halt<'s> {
    /// Takes the signal from the queues of a stopped process. Others stay there.
    pub(super) fn take(seen: &'s Seen, ground: &Ground) -> Result<Self, Errno> {
        let mut halt = Self { seen, is_taken: false };
        if seen.stopped.is_none() {
            return Ok(halt);
        }
        for tid in &seen.tids {
            // That of the process is in the queue of each thread until one of them takes it.
            if !has_one(*tid)? {
                continue;
            }
            // Blocks all others.
            let remote = begin(seen, *tid, ground)?;
            while has_one(*tid)? {
                take_from(*tid)?;
                halt.is_taken = true;
            }
            remote.give_back()?;
        }
        Ok(halt)
    }

    /// Notes it in the record, in which it is one of the process.
    pub(super) fn note(&self, record: &mut Process) {
        let others = |signal: &Signal| signal.number() != libc::SIGSTOP;
        record.threads.iter_mut().for_each(|thread| thread.pending.retain(others));
        record.pending.retain(others);
        if self.is_taken {
            // No program can read its sender.
            let mut info = vec![0; INFO_BYTES];
            info[..4].copy_from_slice(&libc::SIGSTOP.to_ne_bytes());
            record.pending.push(Signal { info: Bytes(info) });
        }
    }
}

impl Drop for Halt<'_> {
    fn drop(&mut self) {
        if self.is_taken
            && let Ok(process) = pidfd::open(self.seen.pid)
        {
            // One that was killed meanwhile needs none.
            let _ = pidfd::send_signal(&process, libc::SIGSTOP);
        }
    }
}

/// Whether the signal is pending for a thread, alone or with its process.
fn has_one(tid: u32) -> Result<bool, Errno> {
    for shared in [false, true] {
        let mut nth = 0;
        while let Some(info) = call::pending_signal(tid, shared, nth)? {
            let signal = Signal { info: Bytes(info.to_vec()) };
            if signal.number() == libc::SIGSTOP {
                return Ok(true);
            }
            nth += 1;
        }
    }
    Ok(false)
}

/// Resumes a thread until it has taken the signal from the queue. Whatever resumes it next drops the signal.
fn take_from(tid: u32) -> Result<(), Errno> {
    call::resume(tid, 0)?;
    loop {
        match call::wait_stop(Some(tid))?.1 {
            Stop::Signal(libc::SIGSTOP) => return Ok(()),
            Stop::Event(EVENT_STOP, _) => call::resume(tid, 0)?,
            Stop::Ended(_) => return Err(Errno::SRCH),
            _ => return Err(Errno::INTR),
        }
    }
}
