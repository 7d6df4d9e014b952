//! Checkpoints that travel: one archive of processes, of the files that the container has changed, and
//! of what the container was; and a new container from it, on this host or another.
//!
//! ```text
//! part        what                                                   believed
//! container   the configuration, JSON                                nothing: shown to who imports
//! files       a tar of the writable layer, as a commit makes one     as a layer of any image
//! records     the checkpoint                                         as any checkpoint
//! pages
//! ```
//!
//! The framing is [`dormouse_checkpoint::format::archive`]'s. The image below the files does not travel:
//! it is named by its id, and must be here (it may be sent by `save` and `load`). Neither do volumes.
//!
//! **A restore never widens.** What confines the new container (capabilities, filter, limits, mounts,
//! network, ids) is what the one who imports says, in a [`Create`] that he makes when he has seen what the
//! old one had.
//!
//! **Interrupted.** The new container is published by the last step of [`Engine::create`], with its
//! checkpoint in it; what an interrupted import leaves is an image without a name, which `prune` removes.

use std::fs;
use std::io::{Read, Write};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::Path;

use dormouse_checkpoint::Error as CheckpointError;
use dormouse_checkpoint::format::archive::{self, ArchiveReader, ArchiveWriter};
use dormouse_checkpoint::format::{Reader, Records};
use dormouse_checkpoint::load;
use dormouse_image::{Commit, Image, Progress, Store};
use dormouse_model::{Config, ContainerId, Reference, RootSource, State};
use serde::{Deserialize, Serialize};

use crate::checkpoint::{From as Which, connection_outside};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::spec::Create;

/// Names of our parts.
const CONTAINER: &str = "container";
const FILES: &str = "files";
/// LIMIT: bytes of a configuration.
const CONFIG_BYTES_MAX: u64 = 4 << 20;
/// What messages call what is written to and read from.
const ARCHIVE: &str = "the archive";

/// What an archive says of the container that it is of.
#[derive(Debug, Serialize, Deserialize)]
struct Carried {
    config: Config,
    /// `files` is everything it had, and lies on no image.
    whole: bool,
}

impl Engine {
    /// Writes a checkpoint of a stopped container, and its files as they are now, as an archive.
    pub fn export_checkpoint(
        &self,
        id: &ContainerId,
        which: &Which,
        compress: bool,
        out: &mut dyn Write,
    ) -> Result<()> {
        let _lock = self.lock(id)?;
        let config = self.config(id)?;
        let state = self.look(&config)?.state;
        if !matches!(state, State::Created | State::Stopped) {
            let hint = "its files are no longer those of a checkpoint: make one as an archive \
                        (checkpoint --archive --to FILE)";
            return Err(self.not(&config, state, hint));
        }
        let checkpoint = self.find_checkpoint(&config, which)?;
        self.write_archive(&config, &checkpoint, compress, out)
    }

    /// Writes a checkpoint of a container and its files as an archive. ORDER: nothing runs that could
    /// change them: see [`Engine::checkpoint_while`].
    pub fn write_archive(
        &self,
        config: &Config,
        checkpoint: &Path,
        compress: bool,
        out: &mut dyn Write,
    ) -> Result<()> {
        let reader = Reader::open(checkpoint)?;
        let failed = |e| Error::file("cannot write", ARCHIVE)(e);
        let whole = matches!(config.root, RootSource::Directory(_));
        let carried = serde_json::to_vec(&Carried { config: config.clone(), whole })
            .map_err(|e| Error::Invalid(format!("the configuration cannot be written: {e}")))?;
        let mut archive = ArchiveWriter::begin(out, compress).map_err(failed)?;
        let mut part = archive.part(CONTAINER).map_err(failed)?;
        part.write_all(&carried).map_err(failed)?;
        part.finish().map_err(failed)?;
        let mut part = archive.part(FILES).map_err(failed)?;
        let lower = self.lower(&config.root)?;
        let (upper, _work) = Store::open_upper(&self.dir(&config.id))?;
        self.images()?.changes(whole, &lower, upper.as_fd(), &config.ids, &mut part)?;
        part.finish().map_err(failed)?;
        archive::pack(&mut archive, &reader)?;
        archive.finish().map_err(failed)?;
        Ok(())
    }

    /// Makes a container of an archive, with the checkpoint as its first; it has no process yet.
    ///
    /// `ask` is told what the old one was, as far as the archive can be believed, and says what the new
    /// one is; its root is not asked for.
    ///
    /// Errors: [`Error::Missing`] names what the archive relies on and is not here; damage is
    /// refused by the name of the part. There is no new container then.
    pub fn import_checkpoint<E: std::convert::From<Error>>(
        &self,
        input: &mut dyn Read,
        progress: &dyn Progress,
        ask: impl FnOnce(&Config) -> std::result::Result<Create, E>,
    ) -> std::result::Result<Config, E> {
        let mut archive = ArchiveReader::open(input).map_err(Error::from)?;
        let carried = carried(&mut archive)?;
        let (reference, base) = self.base(&carried)?;
        // ORDER: first, since whoever imports may have to say more.
        let mut create = ask(&carried.config)?;
        let image = self.take_files(&mut archive, base.as_ref(), progress)?;
        create.root = RootSource::Image { reference, id: image };
        create.image = None;
        let created = self.create_with(create, |config, dir| {
            let all = dir.join("checkpoints");
            crate::disk::make_dir(&all, 0o700)?;
            let adapt = |records: &mut Records| adapt(records, &carried.config, config);
            Ok(archive::unpack(archive, &all.join("1"), adapt)?)
        })?;
        Ok(created.config)
    }

    /// What the files of an archive lie on, and what that is called.
    fn base(&self, carried: &Carried) -> Result<(Reference, Option<Image>)> {
        let (reference, id) = match &carried.config.root {
            RootSource::Image { reference, id } if !carried.whole => (reference, id),
            _ => return Ok(("imported".parse()?, None)),
        };
        // A name would be another image.
        let is_id = id.len() == 64 && id.bytes().all(|b| b.is_ascii_hexdigit());
        let found = is_id.then(|| self.images()?.find(id).map_err(Error::from));
        match found {
            Some(Ok(image)) => Ok((reference.clone(), Some(image))),
            Some(Err(e)) if e.kind() != dormouse_kernel::ErrorKind::NotFound => Err(e),
            _ => Err(Error::Missing(format!(
                "image '{reference}' with the id {} is not here, on which its files lie: `dormouse \
                 save` it there and `dormouse load` it here, or pull it",
                id.escape_default()
            ))),
        }
    }

    /// The files of an archive as an image without a name; gives its id.
    fn take_files(
        &self,
        archive: &mut ArchiveReader<&mut dyn Read>,
        base: Option<&Image>,
        progress: &dyn Progress,
    ) -> Result<String> {
        let message = Some("files of a checkpoint".to_owned());
        let commit = Commit { message, ..Commit::default() };
        let mut part = archive.part(FILES)?;
        let image = self.images()?.add_layer(base, &mut part, &commit, progress)?;
        Ok(image.to_string())
    }
}

fn carried(archive: &mut ArchiveReader<&mut dyn Read>) -> Result<Carried> {
    let text = archive.part(CONTAINER)?.read_whole(CONFIG_BYTES_MAX)?;
    serde_json::from_slice(&text).map_err(|e| {
        let part = format!("part '{CONTAINER}' of {ARCHIVE}");
        CheckpointError::Damaged { part, what: e.to_string() }.into()
    })
}

/// Makes the records those of another container.
fn adapt(
    records: &mut Records,
    old: &Config,
    new: &Config,
) -> std::result::Result<(), CheckpointError> {
    if let Some(peer) = connection_outside(records, &new.net) {
        return Err(CheckpointError::Elsewhere(format!(
            "it has a TCP connection with {peer}, which ends where the container was"
        )));
    }
    load::move_to(records, &pairs(&old.addresses, &new.addresses));
    records.about.container = new.id.to_string();
    records.about.name = new.name.to_string();
    Ok(())
}

/// Which address takes the place of which: the nth of a family that of the nth.
fn pairs(old: &[IpAddr], new: &[IpAddr]) -> Vec<(IpAddr, IpAddr)> {
    let of = |all: &[IpAddr], v4: bool| -> Vec<IpAddr> {
        all.iter().copied().filter(|ip| ip.is_ipv4() == v4).collect()
    };
    [true, false].into_iter().flat_map(|v4| of(old, v4).into_iter().zip(of(new, v4))).collect()
}

/// Removes what a save has published that is not wanted after all.
pub(crate) fn withdraw(checkpoint: &Path) -> Result<()> {
    fs::remove_dir_all(checkpoint).map_err(Error::file("cannot remove", checkpoint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_replaced_family_by_family() {
        let all =
            |texts: &[&str]| -> Vec<IpAddr> { texts.iter().map(|t| t.parse().unwrap()).collect() };
        let found =
            pairs(&all(&["10.0.0.1", "fd00::1", "10.0.0.2"]), &all(&["fd00::9", "10.9.0.1"]));
        let expected: Vec<(IpAddr, IpAddr)> = vec![
            ("10.0.0.1".parse().unwrap(), "10.9.0.1".parse().unwrap()),
            ("fd00::1".parse().unwrap(), "fd00::9".parse().unwrap()),
        ];
        assert_eq!(found, expected);
    }
}
