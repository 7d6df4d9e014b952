//! The origin of a checkpoint that is being restored.

use std::fmt::Debug;
use std::sync::Arc;

use dormouse_record::{Records, Result};

use crate::part::PageFiles;

/// Supplies checked records, and pages as files: restored processes read their memory from descriptors.
///
/// [`Reader`](crate::Reader) is a directory. Pages that arrive over a network are put into files, such as
/// memory files, before their restore.
pub trait Source: Debug + Send + Sync {
    /// The records.
    fn records(&self) -> &Records;

    /// The files of pages.
    fn pages(&self) -> &PageFiles;

    /// Checks the chunks of pages that `which` selects by their numbers against their checksums.
    ///
    /// Errors: [`Error::Damaged`](dormouse_record::Error::Damaged) with the process or object of the first
    /// damaged page.
    fn verify_some(&self, which: &dyn Fn(usize) -> bool) -> Result<()>;

    /// The same for all pages.
    fn verify(&self) -> Result<()> {
        self.verify_some(&|_| true)
    }
}

impl<S: Source + ?Sized> Source for Arc<S> {
    fn records(&self) -> &Records {
        (**self).records()
    }

    fn pages(&self) -> &PageFiles {
        (**self).pages()
    }

    fn verify_some(&self, which: &dyn Fn(usize) -> bool) -> Result<()> {
        (**self).verify_some(which)
    }
}
