//! Clones that come to be asleep: containers without a process, of which there never was one.
//!
//! Such a clone has all that a container has that was put to sleep (name, ids, addresses, record,
//! layer of its own, checkpoint, sockets in custody), and `asleep/origin.json`, which says whose
//! addresses the checkpoint speaks of. When it is woken it goes on from where the other was, as a clone
//! does that runs at once: by itself, and with generators of random numbers that start anew
//! ([`dormouse_checkpoint::load::Allowed::beside`]).
//!
//! **Shared.** A checkpoint is never written to again, so clones have it by hard links; a link goes with
//! its container, and the last one with the contents.
//!
//! **Whoever is killed when.** A clone is made in `LIB/pending` like any container, its sockets too: what
//! is half there is given back by the next command, sockets included. Then it is published by one rename.
//! Somebody who calls just before that is answered a moment later: the keeper tries again.
//!
//! ORDER: some are made, their records written out together, and then published: a power cut leaves
//! whole containers, and a bulk of them does not wait for the disk once for each.

use std::fs;
use std::io::ErrorKind as Io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use dormouse_model::{Config, Name, NetMode, RootSource};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::checkpoint::{like, moved};
use crate::custody::Listener;
use crate::disk::{self, Durable, Lock};
use crate::engine::{Engine, write_config_as};
use crate::error::{Error, Result};
use crate::pending::New;
use crate::sleep::ASLEEP;

/// LIMIT: how many are published together, whose locks are held meanwhile.
const TOGETHER: usize = 128;

/// `asleep/origin.json`: the checkpoint is of another container.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Origin {
    /// The other's addresses, and what takes their place.
    pub(crate) addresses: Vec<(IpAddr, IpAddr)>,
}

impl Origin {
    fn path(asleep: &Path) -> PathBuf {
        asleep.join("origin.json")
    }

    /// Where an asleep container was saved as another one.
    pub(crate) fn of(asleep: &Path) -> Result<Option<Self>> {
        disk::read_json(&Self::path(asleep))
    }
}

/// What makes clones that sleep.
#[derive(Debug)]
pub struct Unborn<'e> {
    engine: &'e Engine,
    other: Config,
    root: RootSource,
    checkpoint: PathBuf,
    listener: Listener,
    /// Made, and not there for others yet.
    made: Vec<(Config, New)>,
    #[expect(dead_code, reason = "held, not read")]
    in_use: Lock,
}

impl Engine {
    /// Gets ready to make clones of a container that sleep, whose root is what its files were and whose
    /// processes are those of a checkpoint of it.
    pub fn unborn(
        &self,
        other: &Config,
        root: RootSource,
        checkpoint: &Path,
    ) -> Result<Unborn<'_>> {
        if other.auto_remove {
            return Err(Error::Invalid(
                "a container of --rm does not sleep: its files are not kept beyond its processes"
                    .into(),
            ));
        }
        self.clonable(other, checkpoint)?;
        let in_use = self.in_use()?;
        self.note_custody(&mut self.keeper()?)?;
        Ok(Unborn {
            engine: self,
            other: other.clone(),
            root,
            checkpoint: checkpoint.to_owned(),
            listener: Listener::start(self)?,
            made: Vec::with_capacity(TOGETHER),
            in_use,
        })
    }
}

impl Unborn<'_> {
    /// Makes one more. Gives the names of those that are there from now on.
    pub fn make(&mut self, name: Name, addresses: Vec<IpAddr>) -> Result<Vec<Name>> {
        let create = like(&self.other, name, addresses, self.root.clone());
        let (engine, other) = (self.engine, &self.other);
        let (checkpoint, listener) = (&self.checkpoint, &mut self.listener);
        let one = engine.draft(create, |config, dir| {
            // ORDER: first: where it is, sockets may be held, which whoever finds it takes back.
            let asleep = dir.join(ASLEEP);
            disk::make_dir(&asleep, 0o700)?;
            share(checkpoint, &asleep)?;
            let origin = Origin { addresses: moved(other, config) };
            disk::write_json(&Origin::path(&asleep), &origin, Durable::No)?;
            write_config_as(dir, config, Durable::No)?;
            engine.announce(config)?;
            listener.listen(engine, dir)
        })?;
        self.made.push(one);
        if self.made.len() == TOGETHER { self.publish() } else { Ok(Vec::new()) }
    }

    /// Publishes what is made by now.
    pub fn publish(&mut self) -> Result<Vec<Name>> {
        if self.made.is_empty() {
            return Ok(Vec::new());
        }
        let lib = &self.engine.places().lib;
        fs::File::open(lib)
            .and_then(|lib| Ok(rustix::fs::syncfs(lib)?))
            .map_err(Error::file("cannot write out", lib))?;
        let mut names = Vec::new();
        while let Some((config, new)) = self.made.pop() {
            let published = self.engine.publish(&config, &new);
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

/// Gives back what was not published.
impl Drop for Unborn<'_> {
    fn drop(&mut self) {
        for (config, new) in self.made.drain(..) {
            let _ = self.engine.abandon(&config.id, &config.name, &new); // or the next command does
        }
    }
}

impl Engine {
    /// Makes a container that has no processes known to its domain, if it is in one: its addresses lead
    /// there, and its names to its addresses.
    pub(crate) fn announce(&self, config: &Config) -> Result<()> {
        let NetMode::Address { domain } = &config.net else { return Ok(()) };
        let network = self.network()?;
        let domain = self.domain(domain)?;
        network.announce(&domain, &config.id, &config.addresses)?;
        self.name_in_domain(config, &domain)
    }
}

/// Has a directory have the files of a checkpoint.
fn share(checkpoint: &Path, asleep: &Path) -> Result<()> {
    for entry in fs::read_dir(checkpoint).map_err(Error::file("cannot list", checkpoint))? {
        let entry = entry.map_err(Error::file("cannot list", checkpoint))?;
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

/// LIMIT: a file has so many links and no more (65,000 on ext4): a copy takes its place.
fn renew(path: &Path) -> std::io::Result<()> {
    let new = path.with_extension("new");
    fs::copy(path, &new)?;
    fs::rename(new, path)
}
