//! What clones are made from.
//!
//! Of a container with a single process they can share memory: a *template*, a process of the keeper's
//! (`dormouse_keeper`, `template`), reads it once, and each clone's newborn comes from that by clone(2), with
//! pages that are the kernel's to copy when somebody writes ([why](../../../docs/decisions/0019-clones-share.md)).
//! The template ends with [`Template`], or with the process that has it.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use dormouse_checkpoint::format::Reader;
use dormouse_checkpoint::load::{self, Shared};
use dormouse_launch::template::{self, Area, Piece};
use dormouse_launch::{Keeper, LaunchError};
use dormouse_model::Config;
use rustix::fs::MemfdFlags;

use crate::engine::{Engine, new_id};
use crate::error::{Error, Result};

/// A checkpoint that clones can be made from, whose contents are whole.
#[derive(Debug)]
pub struct Template {
    pub(crate) reader: Arc<Reader>,
    pub(crate) common: Option<Arc<Common>>,
    unshared: Option<Error>,
}

/// Memory that is there already.
#[derive(Debug)]
pub(crate) struct Common {
    /// By which the keeper knows it. Another keeper knows it not.
    pub(crate) key: String,
    pub(crate) choice: Shared,
    #[expect(dead_code, reason = "held, not read: it is there as long as this connection")]
    keeper: Keeper,
}

impl Template {
    /// Why clones do not share what they might; it is told once.
    pub fn unshared(&mut self) -> Option<Error> {
        self.unshared.take()
    }
}

impl Engine {
    /// Gets ready to make clones of a container from a checkpoint of it. They may `share` what they can of its
    /// memory, which is then charged to the keeper; what they write to is their own. Where that cannot be made
    /// each has all for itself, and it is told why ([`Template::unshared`]).
    ///
    /// Errors: [`Error::Invalid`] where the container has what two cannot have; of damage.
    pub fn template(&self, other: &Config, checkpoint: &Path, share: bool) -> Result<Template> {
        let reader = Arc::new(self.clonable(other, checkpoint)?);
        let (common, unshared) = match if share { self.common(&reader) } else { Ok(None) } {
            Ok(common) => (common, None),
            // There is no memory for it, say, or there are more areas than a process may have.
            Err(e @ Error::Launch(LaunchError::Refused { .. })) => (None, Some(e)),
            Err(e) => return Err(e),
        };
        Ok(Template { reader, common: common.map(Arc::new), unshared })
    }

    fn common(&self, reader: &Reader) -> Result<Option<Common>> {
        let lowest = dormouse_kernel::process::lowest_address();
        let Some(mut choice) = Shared::choose(reader.records(), lowest) else { return Ok(None) };
        let list = template::Template {
            no_huge_pages: choice.no_huge_pages(),
            areas: choice.areas().into_iter().map(area).collect(),
            pieces: choice.pieces().iter().map(piece).collect(),
        };
        let failed = Error::file("cannot write", "the list of a template");
        let memory = rustix::fs::memfd_create(c"dormouse-template", MemfdFlags::CLOEXEC);
        let memory = memory.map(File::from).map_err(std::io::Error::from);
        let file = memory.and_then(|file| list.write(&file).map(|()| file)).map_err(failed)?;
        let key = new_id()?.to_string();
        let mut keeper = self.keeper()?;
        keeper.template(&key, file.as_fd(), &load::pages_of(reader)?)?;
        let mapped = template::mapped(&file, list.areas.len());
        let mapped = mapped.map_err(Error::file("cannot read", "the list of a template"))?;
        choice.keep(|place| mapped.get(place).is_some_and(|is_mapped| *is_mapped));
        Ok(Some(Common { key, choice, keeper }))
    }
}

fn area(area: load::SharedArea) -> Area {
    let load::SharedArea { start, end, no_reserve, huge_pages } = area;
    Area { start, end, no_reserve, huge_pages }
}

fn piece(piece: &load::SharedPiece) -> Piece {
    let load::SharedPiece { start, bytes, part, offset } = *piece;
    Piece { start, bytes, part: part as u64, offset }
}
