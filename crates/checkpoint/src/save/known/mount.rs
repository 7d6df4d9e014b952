//! Mount namespaces that were found, and the namespace of an open file.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;

use crate::look::file::mount_of;
use crate::look::mountinfo::Row;
use crate::save::refusal::Reason;
use crate::save::seen::Seen;

/// All mount namespaces; of the container's own, the mounts that its processes have added.
#[derive(Debug, Default)]
pub(crate) struct MountNamespaces {
    /// By their links in procfs; or why one cannot be saved.
    pub(crate) by_link: HashMap<String, Result<usize, Reason>>,
    pub(crate) all: Vec<MountNamespace>,
    /// The index of the namespace of a mount, by the mount's id.
    pub(crate) of_mounts: HashMap<u64, usize>,
}

/// One of them, or the mounts that were added to the container's own.
#[derive(Debug)]
pub(crate) struct MountNamespace {
    /// A process whose root is the namespace's.
    pub(crate) witness: u32,
    pub(crate) object: usize,
    pub(crate) rows: Vec<Row>,
    /// The row of each mount of the record.
    pub(crate) order: Vec<usize>,
}

impl MountNamespaces {
    /// Whether there is only the container's own, without added mounts.
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The object of a namespace, by its link; `None` if it was created just now, while nothing is
    /// stopped.
    pub(crate) fn object(&self, link: &str) -> Option<Result<usize, Reason>> {
        let why = |why: &Reason| format!("it is in a mount namespace of its own with {why}");
        let found = self.by_link.get(link)?.as_ref();
        Some(found.map(|n| self.all[*n].object).map_err(why))
    }

    /// The process from whose root names in a namespace are found, and the object; `None` if the
    /// open file is on a mount of the container's own.
    pub(crate) fn of_file(&self, open: BorrowedFd<'_>) -> Option<(u32, usize)> {
        if self.is_empty() {
            return None;
        }
        let of = &self.all[*self.of_mounts.get(&mount_of(open).ok()?)?];
        Some((of.witness, of.object))
    }

    /// The mount of an open file, if it is not one of the container's own.
    pub(crate) fn row_of_file(&self, open: BorrowedFd<'_>) -> Option<&Row> {
        let id = mount_of(open).ok()?;
        self.all[*self.of_mounts.get(&id)?].rows.iter().find(|row| row.id == id)
    }

    /// The process that is used as root for the paths of a process.
    pub(crate) fn witness(&self, seen: &Seen) -> u32 {
        let found = || self.by_link.get(seen.link("mnt")?)?.as_ref().ok();
        let found = if self.is_empty() { None } else { found() };
        found.map_or(seen.first, |n| self.all[*n].witness)
    }
}
