//! Descriptors of processes: opened by each process that has them, once all processes exist. A
//! pidfd has no state, so each process may have a file description of its own.

use dormouse_record::PidFd;

use super::plan::Plan;
use crate::inject::program::{Arg, Call, Cell, Sequence};

/// Opens a pidfd, at a number that no process uses.
pub(super) fn open(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    pidfd: &PidFd,
) -> Cell {
    let what = format!("{what} (a pidfd of process {})", pidfd.pid);
    let low = plan.cell();
    let args = [pidfd.pid.into(), Arg::from(pidfd.flags)];
    sequence.call_into(what.clone(), low, Call::new(libc::SYS_pidfd_open, args));
    plan.lift(sequence, &what, low)
}
