//! Calls that are injected into a stopped thread.

use dormouse_kernel::Errno;
use dormouse_record::Thread;

use super::restart::begin_again;
use super::seen::Seen;
use super::wait::resume_registers;
use crate::inject::remote::Remote;
use crate::inject::script::{Answers, Script};

/// Injects calls into a thread, and stores its registers and mask in its record.
pub(super) fn run(
    seen: &Seen,
    tid: u32,
    gadget: u64,
    script: &Script,
    record: Option<&mut Thread>,
) -> std::result::Result<Answers, Errno> {
    let mut remote = Remote::begin(tid, gadget)?;
    if let Some(record) = record {
        record.mask = remote.mask();
        record.registers = begin_again(remote.registers());
    }
    let answers = script.run(seen.pid, &mut remote);
    give_back(seen, tid, remote)?;
    answers
}

/// Restores a task's registers, so that it continues as if it had not been stopped.
pub(super) fn give_back(seen: &Seen, tid: u32, remote: Remote) -> std::result::Result<(), Errno> {
    let (registers, mask) = (resume_registers(seen, tid, remote.registers()), remote.mask());
    remote.finish(&registers, mask)
}
