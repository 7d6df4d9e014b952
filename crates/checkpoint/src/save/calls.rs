//! Calls that are injected into a stopped thread.

use dormouse_kernel::Errno;
use dormouse_record::Thread;

use super::restart::begin_again;
use super::seen::Seen;
use super::wait::resume_registers;
use crate::inject::landing::Ground;
use crate::inject::remote::Remote;
use crate::inject::script::{Answers, Script};

/// Injects calls into a thread, and stores its registers and mask in its record.
pub(super) fn run(
    seen: &Seen,
    tid: u32,
    ground: &Ground,
    script: &Script,
    record: Option<&mut Thread>,
) -> std::result::Result<Answers, Errno> {
    let mut remote = begin(seen, tid, ground)?;
    if let Some(record) = record {
        record.mask = remote.mask();
        record.registers = begin_again(remote.registers());
    }
    let answers = script.run(seen.pid, &mut remote);
    remote.give_back()?;
    answers
}

/// Begins to inject calls into a thread, which continues in the end as if it had not been stopped.
pub(super) fn begin<'g>(
    seen: &Seen,
    tid: u32,
    ground: &'g Ground,
) -> std::result::Result<Remote<'g>, Errno> {
    Remote::begin_to_resume(tid, ground, |registers| resume_registers(seen, tid, registers))
}
