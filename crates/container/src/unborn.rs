//! Clones that are created asleep: containers that never had a process.
//!
//! Such a clone has the same parts as a suspended container: name, ids, addresses, record, own
//! layer, checkpoint, held sockets. In addition `asleep/origin.json` contains the addresses that
//! the checkpoint uses. When the clone is woken it continues from the other container's state, as a
//! clone does that runs at once: independent, and with newly seeded random number generators
//! ([`dormouse_checkpoint::load::Allowed::beside`]).
//!
//! **Shared.** A checkpoint is never written again, so clones have it by hard links. A link is
//! removed with its container, and the contents with the last link.
//!
//! **Killed at any step.** A clone is made in `LIB/pending` like any container, its sockets too.
//! The next command removes a partly made clone, including its sockets. One rename publishes a
//! complete clone. A connection that arrives just before is served a moment later: the keeper tries
//! the wake again.
//!
//! ORDER: a batch is made, its records are synced together, and then it is published. A power cut
//! leaves complete containers, and a batch waits for the disk once only.
//!
//! Uses `ground`, `state`, `hold`, `saved`, `net`, `pending`, `create`, `listen`, `spec` and `template`.

use std::fs;
use std::io::ErrorKind as Io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use dormouse_model::{Config, Name, RootSource};
use rustix::io::Errno;

use crate::disk::{self, Durable, Lock};
use crate::error::{Error, Result};
use crate::ground::{self, ASLEEP, Ground};
use crate::listen::{Listener, Origin};
use crate::pending::{self, New};
use crate::state::SLEPT;
use crate::{create, hold, net, saved, spec, template};

/// LIMIT: how many clones are published together; their locks are held meanwhile.
const TOGETHER: usize = 128;

/// Maker of clones that are created asleep.
#[derive(Debug)]
pub struct Unborn<'e> {
    ground: &'e Ground,
    other: Config,
    root: RootSource,
    checkpoint: PathBuf,
    listener: Listener,
    /// Made, and not published yet.
    made: Vec<(Config, New)>,
    #[expect(dead_code, reason = "held, not read")]
    in_use: Lock,
}

/// Prepares clones of a container that are created asleep. Their root has the container's
/// files, and their processes are those of a checkpoint of it.
pub(crate) fn begin<'g>(
    ground: &'g Ground,
    other: &Config,
    root: RootSource,
    checkpoint: &Path,
) -> Result<Unborn<'g>> {
    if other.spec.auto_remove {
        return Err(Error::Invalid(
            "a container of --rm does not sleep: its files are not kept beyond its processes"
                .into(),
        ));
    }
    // The checkpoint may be of before the container had a capability.
    spec::saved_network(other.name.as_str(), &other.spec)?;
    template::open_for_clones(other, checkpoint)?;
    let in_use = ground.in_use()?;
    hold::record_keeper(ground, &mut hold::keeper(ground)?)?;
    Ok(Unborn {
        ground,
        other: other.clone(),
        root,
        checkpoint: checkpoint.to_owned(),
        listener: Listener::start(ground)?,
        made: Vec::with_capacity(TOGETHER),
        in_use,
    })
}

impl Unborn<'_> {
    /// Makes one more clone. Returns the names of the clones published by this call.
    pub fn make(&mut self, name: Name, addresses: Vec<IpAddr>) -> Result<Vec<Name>> {
        let create = create::request_like(&self.other, name, addresses, self.root.clone());
        let (ground, other) = (self.ground, &self.other);
        let (checkpoint, listener) = (&self.checkpoint, &mut self.listener);
        let one = create::draft(ground, create, |config, dir| {
            // ORDER: first: if this directory exists, recovery looks for held sockets and drops
            // them.
            let asleep = dir.join(ASLEEP);
            disk::make_dir(&asleep, 0o700)?;
            share(checkpoint, &asleep)?;
            let user = saved::first(ground, &other.id, checkpoint).and_then(|first| first.user);
            let origin = Origin { addresses: create::address_pairs(other, config), user };
            disk::write_json(&Origin::path(&asleep), &origin, Durable::No)?;
            ground::write_config_as(dir, config, Durable::No)?;
            net::announce(ground, config)?;
            listener.listen(ground, dir)
        })?;
        self.made.push(one);
        if self.made.len() == TOGETHER { self.publish() } else { Ok(Vec::new()) }
    }

    /// Publishes the clones made so far.
    pub fn publish(&mut self) -> Result<Vec<Name>> {
        if self.made.is_empty() {
            return Ok(Vec::new());
        }
        let lib = &self.ground.places.lib;
        fs::File::open(lib)
            .and_then(|lib| Ok(rustix::fs::syncfs(lib)?))
            .map_err(Error::file("cannot write out", lib))?;
        let mut names = Vec::new();
        while let Some((config, new)) = self.made.pop() {
            let published = create::publish(self.ground, &config, &new);
            if published.is_err() {
                self.made.push((config, new));
                return published.map(|()| names);
            }
            names.push(config.name);
        }
        names.reverse();
        Ok(names)
    }
}

/// Removes the clones that were not published.
impl Drop for Unborn<'_> {
    fn drop(&mut self) {
        for (config, new) in self.made.drain(..) {
            let _ = pending::abandon(self.ground, &config.id, &config.name, &new); // or the next command does
        }
    }
}

/// Links the files of a checkpoint into a directory, except for the record of the other's first process.
fn share(checkpoint: &Path, asleep: &Path) -> Result<()> {
    for entry in fs::read_dir(checkpoint).map_err(Error::file("cannot list", checkpoint))? {
        let entry = entry.map_err(Error::file("cannot list", checkpoint))?;
        if entry.file_name() == SLEPT {
            continue;
        }
        let (from, to) = (entry.path(), asleep.join(entry.file_name()));
        let linked = match fs::hard_link(&from, &to) {
            Err(e) if Errno::from_io_error(&e) == Some(Errno::MLINK) => {
                renew(&from).and_then(|()| fs::hard_link(&from, &to))
            }
            Err(e) if e.kind() == Io::CrossesDevices => fs::copy(&from, &to).map(drop),
            other => other,
        };
        linked.map_err(Error::file("cannot share", from))?;
    }
    Ok(())
}

/// Replaces a file by a copy. LIMIT: a file has a maximum of links (65,000 on ext4).
fn renew(path: &Path) -> std::io::Result<()> {
    let new = path.with_extension("new");
    fs::copy(path, &new)?;
    fs::rename(new, path)
}
