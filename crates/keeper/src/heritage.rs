//! The inheritance of a newborn from the keeper: limits, arguments, memory shared with a template.

use std::os::fd::BorrowedFd;

use dormouse_kernel::call as kernel;

use crate::call;
use crate::setting::{NOFILE, Outcome, write_oom_score_adj};

/// Settings that a newborn inherits from the keeper.
#[derive(Debug, Clone, Copy)]
pub struct Heritage {
    /// Limit on descriptors before the keeper raised its own.
    pub nofile: (u64, u64),
    /// The keeper's oom_score_adj before it lowered its own.
    pub oom_score_adj: Option<i32>,
    pub(crate) arguments: call::Arguments,
    pub(crate) shared: Shared,
}

/// Memory that a newborn shares with a template: it belongs to the program, not to the newborn.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Shared(pub(crate) &'static [(u64, u64)]);

impl Shared {
    /// Records the shared areas for the lifetime of this process and its copies.
    pub(crate) fn leak(areas: Vec<(u64, u64)>) -> Self {
        Self(areas.leak())
    }

    /// Unmaps the areas, in a process that does not become the program.
    pub(crate) fn let_go(self) -> Outcome {
        for (start, end) in self.0 {
            let at = std::ptr::with_exposed_provenance_mut(*start as usize);
            // SAFETY: the template has mapped it for the program alone.
            unsafe { rustix::mm::munmap(at, (end - start) as usize) }?;
        }
        Ok(())
    }
}

impl Heritage {
    /// Reads the present settings of this process, before it changes them.
    pub fn now() -> Self {
        let nofile = kernel::prlimit(NOFILE, None).unwrap_or((1024, 4096));
        let arguments = call::Arguments::find();
        Self { nofile, oom_score_adj: None, arguments, shared: Shared::default() }
    }

    /// The same, with shared memory.
    pub(crate) fn with(self, shared: Shared) -> Self {
        Self { shared, ..self }
    }

    /// Restores the limits and settings that the keeper has changed for itself.
    pub(crate) fn give_back(&self, proc: BorrowedFd<'_>) -> Outcome {
        kernel::prlimit(NOFILE, Some(self.nofile))?;
        match self.oom_score_adj {
            Some(value) => write_oom_score_adj(proc, i64::from(value)),
            None => Ok(()),
        }
    }
}
