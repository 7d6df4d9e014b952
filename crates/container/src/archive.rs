//! Checkpoints that travel: one archive with the processes, the files that the container has
//! changed, and its configuration; and a new container made from it, on this host or another.
//!
//! ```text
//! part        content                                                trusted
//! container   the configuration, JSON                                no: shown to the importer
//! files       a tar of the writable layer, as a commit makes one     as a layer of any image
//! records     the checkpoint                                         as any checkpoint
//! pages
//! ```
//!
//! The framing is [`dormouse_parcel::archive`]'s. The image below the files is not in
//! the archive: it is named by its id, and must be on this host (`save` and `load` can transfer
//! it). Volumes are not in the archive either.
//!
//! **A restore never widens.** The confinement of the new container (capabilities, filter, limits,
//! mounts, network, ids) is chosen by the importer, in a [`Create`] made after seeing the old
//! configuration.
//!
//! **Interrupted.** The last step of `create` publishes the new container with its
//! checkpoint. An interrupted import leaves an image without a name, which `prune` removes.
//!
//! Uses `ground`, `state`, `saved`, `drive`, `layer` and `create`.

use std::io::{Read, Write};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::Path;

use dormouse_checkpoint::{Error as CheckpointError, load};
use dormouse_image::{Commit, Image, Progress};
use dormouse_model::{Config, ContainerId, Reference, RootSource, State};
use dormouse_parcel::archive::{ArchiveReader, ArchiveWriter};
use dormouse_parcel::{Reader, archive};
use dormouse_record::Records;
use serde::{Deserialize, Serialize};

use crate::drive::{self, Purpose};
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::saved::{self, From};
use crate::spec::Create;
use crate::{create, disk, layer, state};

/// Names of the parts that belong to this crate.
const CONTAINER: &str = "container";

const FILES: &str = "files";

/// LIMIT: bytes of a configuration.
const CONFIG_BYTES_MAX: u64 = 4 << 20;

/// Name of the output and the input in messages.
const ARCHIVE: &str = "the archive";

/// The archive's description of its container.
#[derive(Debug, Serialize, Deserialize)]
struct Carried {
    config: Config,
    /// `files` has all files, and needs no image below.
    whole: bool,
}

/// Writes a checkpoint of a stopped container, and its files as they are now, as an archive.
pub(crate) fn export(
    ground: &Ground,
    id: &ContainerId,
    which: &From,
    compress: bool,
    out: &mut dyn Write,
) -> Result<()> {
    let _lock = ground.lock(id)?;
    let config = ground.config(id)?;
    let state = state::observe(ground, &config)?.state;
    if !matches!(state, State::Created | State::Stopped) {
        let hint = "its files are no longer those of a checkpoint: make one as an archive \
                    (checkpoint --archive --to FILE)";
        return Err(Error::state(&config, state, hint));
    }
    let checkpoint = saved::find(ground, &config, which)?;
    write(ground, &config, &checkpoint, compress, out)
}

/// Writes a checkpoint of a container and its files as an archive.
///
/// ORDER: no process runs that could change the files: see `save::checkpoint_while`.
pub(crate) fn write(
    ground: &Ground,
    config: &Config,
    checkpoint: &Path,
    compress: bool,
    out: &mut dyn Write,
) -> Result<()> {
    let reader = Reader::open(checkpoint)?;
    let failed = |e| Error::file("cannot write", ARCHIVE)(e);
    let whole = matches!(config.spec.root, RootSource::Directory(_));
    let carried = serde_json::to_vec(&Carried { config: config.clone(), whole })
        .map_err(|e| Error::Invalid(format!("the configuration cannot be written: {e}")))?;
    let mut archive = ArchiveWriter::begin(out, compress).map_err(failed)?;
    let mut part = archive.part(CONTAINER).map_err(failed)?;
    part.write_all(&carried).map_err(failed)?;
    part.finish().map_err(failed)?;
    let mut part = archive.part(FILES).map_err(failed)?;
    let lower = layer::lower(ground, &config.spec.root)?;
    let own = drive::open(ground, config, Purpose::Look)?;
    ground.images()?.changes(whole, &lower, own.upper.as_fd(), &config.ids, &mut part)?;
    part.finish().map_err(failed)?;
    archive::pack(&mut archive, &reader)?;
    archive.finish().map_err(failed)?;
    Ok(())
}

/// Makes a container from an archive, with the checkpoint as its first; it has no process yet.
pub(crate) fn import<E: std::convert::From<Error>>(
    ground: &Ground,
    input: &mut dyn Read,
    progress: &dyn Progress,
    ask: impl FnOnce(&Config) -> std::result::Result<Create, E>,
) -> std::result::Result<Config, E> {
    let mut archive = ArchiveReader::open(input).map_err(Error::from)?;
    let carried = carried(&mut archive)?;
    let (reference, base) = base(ground, &carried)?;
    // ORDER: first, since the importer may have to give more options.
    let mut create = ask(&carried.config)?;
    let image = take_files(ground, &mut archive, base.as_ref(), progress)?;
    create.spec.root = RootSource::Image { reference, id: image };
    create.image = None;
    let created = create::create_with(ground, create, |config, dir| {
        let all = dir.join("checkpoints");
        disk::make_dir(&all, 0o700)?;
        let adapt = |records: &mut Records| adapt(records, &carried.config, config);
        Ok(archive::unpack(archive, &all.join("1"), adapt)?)
    })?;
    Ok(created.config)
}

/// Returns the image below the files of an archive, and its name.
fn base(ground: &Ground, carried: &Carried) -> Result<(Reference, Option<Image>)> {
    let (reference, id) = match &carried.config.spec.root {
        RootSource::Image { reference, id } if !carried.whole => (reference, id),
        _ => return Ok(("imported".parse()?, None)),
    };
    // An id only: a name could be another image here.
    let is_id = id.len() == 64 && id.bytes().all(|b| b.is_ascii_hexdigit());
    let found = is_id.then(|| ground.images()?.find(id).map_err(Error::from));
    match found {
        Some(Ok(image)) => Ok((reference.clone(), Some(image))),
        Some(Err(e)) if e.kind() != dormouse_kernel::ErrorKind::NotFound => Err(e),
        _ => Err(Error::Missing(format!(
            "image '{reference}' with the id {} below its files is not on this host: `dormouse \
             save` it there and `dormouse load` it here, or pull it",
            id.escape_default()
        ))),
    }
}

/// Imports the files of an archive as an image without a name; returns its id.
fn take_files(
    ground: &Ground,
    archive: &mut ArchiveReader<&mut dyn Read>,
    base: Option<&Image>,
    progress: &dyn Progress,
) -> Result<String> {
    let message = Some("files of a checkpoint".to_owned());
    let commit = Commit { message, ..Commit::default() };
    let mut part = archive.part(FILES)?;
    let image = ground.images()?.add_layer(base, &mut part, &commit, progress)?;
    Ok(image.to_string())
}

fn carried(archive: &mut ArchiveReader<&mut dyn Read>) -> Result<Carried> {
    let text = archive.part(CONTAINER)?.read_whole(CONFIG_BYTES_MAX)?;
    serde_json::from_slice(&text).map_err(|e| {
        let part = format!("part '{CONTAINER}' of {ARCHIVE}");
        CheckpointError::Damaged { part, what: e.to_string() }.into()
    })
}

/// Changes the records to those of another container.
fn adapt(
    records: &mut Records,
    old: &Config,
    new: &Config,
) -> std::result::Result<(), CheckpointError> {
    if let Some(peer) = saved::connection_outside(records, &new.spec.net) {
        return Err(CheckpointError::Elsewhere(format!(
            "it has a TCP connection with {peer}, which ends where the container was"
        )));
    }
    load::move_to(records, &pairs(&old.addresses, &new.addresses));
    records.about.container = new.id.to_string();
    records.about.name = new.name.to_string();
    Ok(())
}

/// Pairs old and new addresses: the nth of a family with the nth.
fn pairs(old: &[IpAddr], new: &[IpAddr]) -> Vec<(IpAddr, IpAddr)> {
    let of = |all: &[IpAddr], v4: bool| -> Vec<IpAddr> {
        all.iter().copied().filter(|ip| ip.is_ipv4() == v4).collect()
    };
    [true, false].into_iter().flat_map(|v4| of(old, v4).into_iter().zip(of(new, v4))).collect()
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
