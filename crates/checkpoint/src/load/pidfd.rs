//! Descriptors of processes: opened by each process that has them, once all processes exist. A
//! pidfd has no state, so each process may have a file description of its own.

use dormouse_record::PidFd;

use super::open;
use super::plan::Plan;
use crate::inject::program::{Arg, Call, Cell, Sequence};

/// Opens a pidfd, at a number that no process uses.
pub(super) fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    pidfd: &PidFd,
) -> Cell {
    let what = format!("{what} (a pidfd of process {})", pidfd.pid);
    let low = plan.cell();
    let taken = (libc::O_NONBLOCK | libc::O_EXCL) as u32;
    let args = [pidfd.pid.into(), Arg::from(pidfd.flags & taken)];
    sequence.call_into(what.clone(), low, Call::new(libc::SYS_pidfd_open, args));
    open::set_later(sequence, &what, low, pidfd.flags);
    plan.lift(sequence, &what, low)
}
