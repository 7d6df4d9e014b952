//! Descriptors of processes, and open files of procfs that are of one: opened by each process that has them, once
//! all processes exist. So each process has a file description of its own.

use std::collections::HashMap;

use dormouse_record::{Error, PidFd, ProcessFile, Result, Thing};

use super::open;
use super::plan::Plan;
use super::restore::Restore;
use crate::inject::program::{Arg, Call, Cell, Sequence};
use crate::look;

/// Opens such an object, at a number that no process uses; `None` for all others.
pub(super) fn make(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    thing: &Thing,
) -> Result<Option<Cell>> {
    let (what, low) = match thing {
        Thing::PidFd(it) => of_process(plan, sequence, what, it),
        Thing::ProcessFile(it) => file(plan, sequence, what, it)?,
        _ => return Ok(None),
    };
    Ok(Some(plan.lift(sequence, &what, low)))
}

fn of_process(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    pidfd: &PidFd,
) -> (String, Cell) {
    let what = format!("{what} (a pidfd of process {})", pidfd.pid);
    let low = plan.cell();
    let taken = (libc::O_NONBLOCK | libc::O_EXCL) as u32;
    let args = [pidfd.pid.into(), Arg::from(pidfd.flags & taken)];
    sequence.call_into(what.clone(), low, Call::new(libc::SYS_pidfd_open, args));
    open::set_later(sequence, &what, low, pidfd.flags);
    (what, low)
}

/// LIMIT: an offset in the middle of a file that is generated when it is read (seq_file) is one of what the file
/// has at that time.
fn file(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    file: &ProcessFile,
) -> Result<(String, Cell)> {
    let path = file.whole_path();
    let what = format!("{what} '{path}'");
    let low = open::path(plan, sequence, &what, &path, file.flags)?;
    if file.offset != 0 {
        let args = [low.into(), Arg::Number(file.offset), Arg::from(libc::SEEK_SET)];
        sequence.call(what.clone(), Call::new(libc::SYS_lseek, args).returns(file.offset));
    }
    Ok((what, low))
}

/// Refuses such a file that is not of procfs, or of another type than its record: the container may have something
/// else at `/proc`. `by_inner` reads all tasks by their ids inside, which takes a look at each.
pub(super) fn check_opened(
    restore: &Restore,
    by_inner: impl FnOnce() -> Result<HashMap<u32, u32>>,
) -> Result<()> {
    let objects = &restore.records.objects;
    if !objects.iter().any(|object| matches!(object.thing, Thing::ProcessFile(_))) {
        return Ok(());
    }
    let by_inner = by_inner()?;
    for table in restore.records.tables() {
        for descriptor in table.descriptors {
            let thing = objects.get(descriptor.object).map(|object| &object.thing);
            let Some(Thing::ProcessFile(file)) = thing else { continue };
            let task = by_inner.get(&table.task).copied().unwrap_or_default();
            let place = format!("/proc/{task}/fd/{}", descriptor.number);
            let found = rustix::fs::stat(&place).map_err(Error::of("look at a file", task))?;
            let of = rustix::fs::statfs(&place).map_err(Error::of("look at a file", task))?;
            let is_same = found.st_mode & libc::S_IFMT == file.file_type;
            if of.f_type != look::file::PROCFS || !is_same {
                return Err(Error::Elsewhere(format!(
                    "descriptor {} of process {}: '{}' is another file: /proc is not the container's",
                    descriptor.number,
                    table.task,
                    file.whole_path()
                )));
            }
        }
    }
    Ok(())
}
