//! The proof of a checkpoint: its processes are restored as a *twin* beside the stopped originals, read
//! back by the code that saves, and compared with the records.
//!
//! ```text
//! engine           save, publish             the originals stay stopped
//! Proof::of        records of a twin         `hold`: what has an effect beyond the twin is replaced
//! engine           newborn                   in namespaces of its own, in a cgroup of its own
//! read_back        load, save                every task is traced, and none runs an instruction of the program
//! Proof::compare   facts                     a difference names its place
//! ```
//!
//! Every task of the twin is traced from its birth to its end, and killed when the tracing thread ends.
//! The twin is therefore read in a thread of its own ([`read_back`]): the originals have another tracer, and
//! a tracer is a thread.
//!
//! A twin proves structure: that every object can be restored, and is saved again as it was. LIMIT: it has
//! no contents of memory beyond the pages that the kernel reads for a thread.
//!
//! [`shape`](features) decides when a proof is needed again. [`facts`] and [`OF_RECORDS`] are also what the
//! fixpoint test compares whole containers by.
//!
//! This module is above `save` and `load`.

mod facts;
mod hold;
mod shape;
mod table;

use std::os::fd::OwnedFd;

use dormouse_parcel::{PageFiles, Reader, Source};
use dormouse_record::fact::{Difference, unexplained};
use dormouse_record::{Records, Result, check};

use crate::load::{Restore, Traced};
use crate::save::{Blocks, Subject, read_twin};

pub use facts::facts;
pub use shape::features;
pub use table::{LOOKS_APART_NS, OF_RECORDS};

/// The proof of a checkpoint: the source of its twin's restore.
#[derive(Debug)]
pub struct Proof {
    records: Records,
    pages: PageFiles,
}

/// What a comparison found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unlike {
    /// The first difference: the place in the records, and both values.
    pub first: Difference,
    /// The number of all differences.
    pub count: usize,
}

impl std::fmt::Display for Unlike {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.first)?;
        match self.count {
            1 => Ok(()),
            count => write!(f, " (and {} differences more)", count - 1),
        }
    }
}

impl Proof {
    /// The proof of a checkpoint; or the object because of which the container has no twin.
    ///
    /// Errors: of the pages, and [`Error::Damaged`](dormouse_record::Error::Damaged) if the records of the twin
    /// are not valid.
    pub fn of(reader: &Reader) -> Result<std::result::Result<Self, String>> {
        let records = match hold::records(reader.records()) {
            Ok(records) => records,
            Err(object) => return Ok(Err(object)),
        };
        check::records(&records)?;
        let pages = reader.pages().try_clone();
        let pages = pages.map_err(dormouse_record::Error::file("cannot duplicate", "pages"))?;
        Ok(Ok(Self { records, pages }))
    }

    /// Compares the records of the twin as they were read back. `None` if they are alike.
    pub fn compare(&self, mut read: Records) -> Result<Option<Unlike>> {
        forget_ended_waits(&self.records, &mut read);
        let (before, after) = (facts::of_structure(&self.records)?, facts::of_structure(&read)?);
        let differences = unexplained(before.differences(&after), OF_RECORDS);
        let differences = unexplained(differences, table::OF_TWINS);
        let count = differences.len();
        Ok(differences.into_iter().next().map(|first| Unlike { first, count }))
    }
}

/// Gives threads of a twin their saved waits back, where the restore found that a wait is over.
///
/// A restore makes an interrupted call again, and the call may return at once, as that of the original would: a
/// futex has another value by then, or a descriptor is ready. A thread that has no call any more (orig_rax of
/// syscall(2) is -1) continues with the result, and the rest of its registers is compared.
fn forget_ended_waits(saved: &Records, read: &mut Records) {
    for (saved, read) in saved.processes.iter().zip(&mut read.processes) {
        for (saved, read) in saved.threads.iter().zip(&mut read.threads) {
            let is_over = read.restart.is_none() && read.registers.orig_rax == u64::MAX;
            if saved.tid == read.tid && saved.restart.is_some() && is_over {
                read.restart.clone_from(&saved.restart);
                read.registers.rax = saved.registers.rax;
                read.registers.orig_rax = saved.registers.orig_rax;
            }
        }
    }
}

impl Source for Proof {
    fn records(&self) -> &Records {
        &self.records
    }

    fn pages(&self) -> &PageFiles {
        &self.pages
    }

    /// LIMIT: the reader of the checkpoint verifies its pages, which a twin does not have.
    fn verify_some(&self, _: &dyn Fn(usize) -> bool) -> Result<()> {
        Ok(())
    }
}

/// Restores a twin up to its first instruction, reads its records, and ends it. `first` is its process 1; `waits` is
/// that of the originals, since it takes a while to load.
///
/// The calling thread has no other tracee, and makes this call last: with it, all tasks of the twin end.
pub fn read_back(
    traced: Traced,
    restore: &Restore,
    subject: &Subject,
    first: OwnedFd,
    waits: Blocks,
) -> Result<Records> {
    let twin = traced.complete(restore)?;
    read_twin(subject, twin, first, waits)
}

#[cfg(test)]
mod tests {
    use dormouse_record::{Restart, sample};

    use super::*;

    #[test]
    fn wait_that_is_over_in_a_twin_is_no_difference() {
        let with = |restart: Option<Restart>, orig_rax: u64, rip: u64| {
            let mut all = sample::small();
            let thread = &mut all.processes[0].threads[0];
            thread.restart = restart;
            (thread.registers.orig_rax, thread.registers.rip) = (orig_rax, rip);
            all
        };
        let wait = || Some(Restart { call: libc::SYS_futex, args: [7; 6], remaining_ns: Some(9) });
        let futex = libc::SYS_futex as u64;
        for (saved, read, is_alike) in [
            (with(wait(), futex, 1), with(None, u64::MAX, 1), true),
            // Another place in the program, a call that is not over, and one that was never a wait.
            (with(wait(), futex, 1), with(None, u64::MAX, 2), false),
            (with(wait(), futex, 1), with(None, futex, 1), false),
            (with(None, futex, 1), with(None, u64::MAX, 1), false),
        ] {
            let mut read = read;
            forget_ended_waits(&saved, &mut read);
            assert_eq!(saved.processes == read.processes, is_alike);
        }
    }
}
