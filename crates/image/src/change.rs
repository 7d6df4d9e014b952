//! What a container changed: as a list, as a layer, as a tree.

use std::io::Write;
use std::os::fd::BorrowedFd;

use dormouse_model::{IdMap, Reference};

use crate::error::Result;
use crate::mount::Lower;
use crate::progress::Progress;
use crate::store::{Image, ImageId, Store};

/// How a path changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeKind {
    /// It was not there.
    Added,
    /// It was there and is another now; a directory also when something in it changed.
    Changed,
    /// It is not there any more.
    Deleted,
}

impl ChangeKind {
    /// The letter that `diff` prints: `A`, `C` or `D`.
    pub fn letter(self) -> char {
        match self {
            Self::Added => 'A',
            Self::Changed => 'C',
            Self::Deleted => 'D',
        }
    }
}

/// One path that differs between a container and what it was made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// How.
    pub kind: ChangeKind,
    /// Where, absolute inside the container; bytes as the file system has them.
    pub path: Vec<u8>,
}

/// What a commit writes beside the files.
#[derive(Debug, Clone, Default)]
pub struct Commit {
    /// What the new image is to be called.
    pub name: Option<Reference>,
    /// `author` of the configuration.
    pub author: Option<String>,
    /// Recorded in the history.
    pub message: Option<String>,
    /// Changes of the configuration in the words of a Dockerfile: `CMD`, `ENTRYPOINT`, `ENV`,
    /// `EXPOSE`, `LABEL`, `STOPSIGNAL`, `USER`, `VOLUME`, `WORKDIR`.
    pub changes: Vec<String>,
}

impl Store {
    /// What a container changed, sorted by path. `upper` is its upper directory, whose owners are
    /// host ids of `ids`. The container may run; what it changes meanwhile is seen or not.
    pub fn diff(
        &self,
        _lower: &Lower,
        _upper: BorrowedFd<'_>,
        _ids: &IdMap,
    ) -> Result<Vec<Change>> {
        Err(crate::not_yet("compare a container with its image"))
    }

    /// Makes an image of a container: its image (none for `--rootfs`, then everything is in the one
    /// new layer) and a layer with its changes. The container must be stopped or paused.
    pub fn commit(
        &self,
        _base: Option<&Image>,
        _lower: &Lower,
        _upper: BorrowedFd<'_>,
        _ids: &IdMap,
        _commit: &Commit,
        _progress: &dyn Progress,
    ) -> Result<ImageId> {
        Err(crate::not_yet("commit a container"))
    }

    /// Writes the files of a container as a tar, with the ids that the container sees.
    pub fn export(
        &self,
        _lower: &Lower,
        _upper: Option<BorrowedFd<'_>>,
        _ids: &IdMap,
        _out: &mut dyn Write,
    ) -> Result<()> {
        Err(crate::not_yet("export a container"))
    }
}
