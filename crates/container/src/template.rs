//! The source that clones are made from.
//!
//! Clones of a container with a single process can share memory. A *template*, a process of the
//! keeper (`dormouse_keeper`, `template`), reads the memory once, and each clone's newborn is a
//! clone(2) of it. The kernel copies a page when a clone writes to it
//! ([why](../../../docs/decisions/0019-clones-share.md)). The template ends with [`Template`], or
//! with the process that holds it.
//!
//! Uses `ground`, `hold` and `saved`.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use dormouse_checkpoint::load;
use dormouse_checkpoint::load::Shared;
use dormouse_launch::template::{Area, Piece};
use dormouse_launch::{Keeper, LaunchError, template};
use dormouse_model::Config;
use dormouse_parcel::Reader;
use rustix::fs::MemfdFlags;

use crate::error::{Error, Result};
use crate::ground::{self, Ground};
use crate::user::PasswdUser;
use crate::{hold, saved};

/// A checkpoint for clones, verified.
#[derive(Debug)]
pub struct Template {
    pub(crate) reader: Arc<Reader>,
    pub(crate) common: Option<Arc<Common>>,
    /// The user of its first process, if that is on record.
    pub(crate) user: Option<PasswdUser>,
    unshared: Option<Error>,
}

/// Memory that is loaded already.
#[derive(Debug)]
pub(crate) struct Common {
    /// The keeper's key of the template, valid at this keeper only.
    pub(crate) key: String,
    pub(crate) choice: Shared,
    #[expect(dead_code, reason = "held, not read: the template ends with this connection")]
    keeper: Keeper,
}

impl Template {
    /// Returns why clones do not share memory although they might; only once.
    pub fn unshared(&mut self) -> Option<Error> {
        self.unshared.take()
    }
}

/// Prepares clones of a container from a checkpoint of it. With `share` they share as much
/// memory as possible, charged to the keeper; pages they write to are their own. If sharing
/// fails each clone has all memory for itself, and [`Template::unshared`] returns the reason.
pub(crate) fn make(
    ground: &Ground,
    other: &Config,
    checkpoint: &Path,
    share: bool,
) -> Result<Template> {
    let reader = Arc::new(open_for_clones(other, checkpoint)?);
    let (common, unshared) = match if share { common(ground, &reader) } else { Ok(None) } {
        Ok(common) => (common, None),
        // For example not enough memory, or more areas than a process may have.
        Err(e @ Error::Launch(LaunchError::Refused { .. })) => (None, Some(e)),
        Err(e) => return Err(e),
    };
    let user = saved::first(ground, &other.id, checkpoint).and_then(|first| first.user);
    Ok(Template { reader, common: common.map(Arc::new), user, unshared })
}

/// Opens a checkpoint for clones and verifies its contents.
pub(crate) fn open_for_clones(other: &Config, checkpoint: &Path) -> Result<Reader> {
    if !other.spec.anonymous_volumes.is_empty() {
        return Err(Error::Invalid(format!(
            "'{}' has anonymous volumes, which two containers cannot share: name them",
            other.name
        )));
    }
    let reader = Reader::open(checkpoint)?;
    reader.verify()?;
    match saved::connection_outside(reader.records(), &other.spec.net) {
        Some(found) => Err(Error::Invalid(format!(
            "'{}' has a TCP connection with {found}, which two containers cannot share",
            other.name
        ))),
        None => Ok(reader),
    }
}

fn common(ground: &Ground, reader: &Reader) -> Result<Option<Common>> {
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
    let key = ground::new_id()?.to_string();
    let mut keeper = hold::keeper(ground)?;
    keeper.template(&key, file.as_fd(), &load::pages_of(reader)?)?;
    let mapped = template::mapped(&file, list.areas.len());
    let mapped = mapped.map_err(Error::file("cannot read", "the list of a template"))?;
    choice.keep(|place| mapped.get(place).is_some_and(|is_mapped| *is_mapped));
    Ok(Some(Common { key, choice, keeper }))
}

fn area(area: load::SharedArea) -> Area {
    let load::SharedArea { start, end, no_reserve, huge_pages } = area;
    Area { start, end, no_reserve, huge_pages }
}

fn piece(piece: &load::SharedPiece) -> Piece {
    let load::SharedPiece { start, bytes, part, offset } = *piece;
    Piece { start, bytes, part: part as u64, offset }
}
