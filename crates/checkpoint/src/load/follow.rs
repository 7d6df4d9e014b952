//! The last operation of a newborn's plan: it follows the restore instead of executing a program.
//!
//! This module is above the restore, and passes its descriptors to crate `launch`.

use std::os::fd::{AsFd, OwnedFd};

use dormouse_launch::Follow;
use dormouse_record::{Error, Result};

use super::restore::{Passed, Restore, Wanted};

impl Restore {
    /// Returns the operation. `duplicate` supplies the descriptors of the caller.
    ///
    /// Errors: of `duplicate`, and [`Error::File`] if a descriptor cannot be duplicated or opened.
    pub fn follow<E: From<Error>>(
        &self,
        mut duplicate: impl FnMut(&Wanted) -> std::result::Result<OwnedFd, E>,
    ) -> std::result::Result<Follow, E> {
        let mut descriptors = Vec::new();
        for passed in &self.passed {
            descriptors.push(match passed {
                Passed::Program => copy(self.program.sealed(), "the restore program")?,
                Passed::Pages(part) => self.copy_pages(*part)?,
                Passed::LastPid => last_pid()?,
                Passed::Caller(wanted) => duplicate(wanted)?,
            });
        }
        Ok(Follow {
            memory: copy(self.program.memory(), "the restore program")?,
            base: self.program.base(),
            length_bytes: self.program.length_bytes(),
            start: self.program.start(),
            descriptors_at: self.program.descriptors_at(),
            descriptors,
        })
    }

    /// Duplicates the descriptor of a part of the contents of memory.
    fn copy_pages(&self, part: usize) -> Result<OwnedFd> {
        let file = self.pages.files().nth(part);
        let file =
            file.ok_or_else(|| Error::damaged("pages", format!("part {part} has no file")))?;
        copy(file, "pages")
    }
}

fn copy(file: impl AsFd, name: &str) -> Result<OwnedFd> {
    file.as_fd().try_clone_to_owned().map_err(Error::file("cannot duplicate", name))
}

/// Opens `/proc/sys/kernel/ns_last_pid` (proc_sys_kernel(5)), which acts on the pid namespace of
/// the writing process.
fn last_pid() -> Result<OwnedFd> {
    let path = "/proc/sys/kernel/ns_last_pid";
    let file = std::fs::OpenOptions::new().write(true).open(path);
    file.map(OwnedFd::from).map_err(Error::file("cannot open", path))
}
