//! `restore`: a container of a bundle, with processes from a checkpoint.
//!
//! A restore is a `create` ([`crate::create`]) up to the place where the newborn would wait for
//! `start`. There the newborn reports ready, gets the configuration's filter, and follows a restore
//! program (`dormouse_checkpoint::load`). This process conducts and traces all of it, so a kill in
//! the middle ends every new process, too. The record has the pid before the newborn continues; the
//! pid file is written when all processes are complete.
//!
//! **Trust.** The caller and the bundle are trusted, as in `create`; the checkpoint is not. Its
//! credentials, capabilities and filters can only narrow those of the bundle.
//!
//! **Hooks.** `prestart`, `createRuntime` and `createContainer` run, since namespaces and mounts
//! are new; `startContainer` and `poststart` do not, since no program is started.

use std::path::PathBuf;
use std::sync::Arc;

use dormouse_parcel::Reader;

use crate::Runtime;
use crate::checkpoint::NAME;
use crate::comeback::Comeback;
use crate::create::{Create, Created};
use crate::error::{Error, Result};

/// Options of `restore`.
#[derive(Debug, Default)]
pub struct Restore {
    /// Options of `create`.
    pub create: Create,
    /// The directory that contains the checkpoint.
    pub image: PathBuf,
    /// Its TCP connections are restored, too.
    pub connections: bool,
}

impl Runtime {
    /// Makes a container from a bundle and a checkpoint. On failure the container is removed.
    pub fn restore(&self, id: &str, restore: &Restore) -> Result<Created> {
        let comeback = open(restore)?;
        self.make(id, &restore.create, Some(&comeback))
    }
}

fn open(restore: &Restore) -> Result<Comeback> {
    let dir = restore.image.join(NAME);
    if !dir.exists() {
        let image = restore.image.display();
        let why = match restore.image.join("inventory.img").exists() {
            true => format!("{image} holds a checkpoint of CRIU's, which only CRIU restores"),
            false => format!("{image} holds no checkpoint: there is no '{NAME}' in it"),
        };
        return Err(Error::Usage(why));
    }
    let reader = Reader::open(&dir)?;
    let connections = reader.records().connections().next().is_some();
    if connections && !restore.connections {
        let why = "it has TCP connections, which are restored with --tcp-established only";
        return Err(Error::Usage(why.into()));
    }
    Ok(Comeback { reader: Arc::new(reader), connections })
}
