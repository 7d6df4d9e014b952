//! Records of drop rules for connections whose processes are gone and may be restored.
//!
//! The packets of a checkpoint's connections are dropped in their network stack (crate
//! `checkpoint`, `quiet`). That stack may be removed before the restore: a trust domain ends with
//! the last of its containers, and with the host. The rules are therefore kept on disk. A domain
//! that is made again has them before any peer can reach it, whichever of its containers starts
//! first. [`crate::net`] applies them.
//!
//! Uses `ground`.

use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;

use dormouse_model::{Config, ContainerId, Name, NetMode};
use dormouse_record::Records;

use crate::disk::{self, Durable};
use crate::error::{Error, Result};
use crate::ground::Ground;

/// When and where connections were saved.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Saved {
    /// On this host, and their packets are dropped since.
    JustNow,
    /// Earlier, perhaps on another host.
    Before,
}

/// Returns the drop rules of all containers of a domain. Rules of removed containers are
/// deleted.
pub(crate) fn rules_of(ground: &Ground, domain: &Name) -> String {
    let mut all = String::new();
    for entry in fs::read_dir(dir(ground)).into_iter().flatten().flatten() {
        let id = entry.file_name().to_str().and_then(|id| id.parse::<ContainerId>().ok());
        let Some(id) = id else { continue };
        match ground.config(&id).map(|config| config.spec.net) {
            Ok(net) if net.domain() == Some(domain) => {
                // The file may have been removed in the meantime.
                all += &fs::read_to_string(entry.path()).unwrap_or_default();
            }
            Err(Error::NoContainer(_)) => drop(fs::remove_file(entry.path())),
            _ => {}
        }
    }
    all
}

/// Records drop rules for the connections of these records, until they are restored. Returns
/// whether a rule file was written.
pub(crate) fn record(
    ground: &Ground,
    config: &Config,
    records: &Records,
    saved: Saved,
) -> Result<bool> {
    let path = path(ground, &config.id);
    if path.exists() {
        return Ok(false);
    }
    // A checkpoint may be forged: it must not silence the connections of others.
    let is_own = |ip: IpAddr| match &config.spec.net {
        NetMode::None => false, // a private stack has no peers outside
        NetMode::Address { .. } | NetMode::Private { .. } => config.addresses.contains(&ip),
        NetMode::Host => saved == Saved::JustNow,
    };
    let rules = dormouse_checkpoint::silence(records, config.id.as_str(), is_own);
    let rules = match rules {
        Some(rules) => rules,
        // Rules in force must be ended later, so an empty file is written; another stack needs
        // none.
        None if saved == Saved::JustNow => String::new(),
        None => return Ok(false),
    };
    disk::make_dir(&dir(ground), 0o700)?;
    disk::write(&path, rules.as_bytes(), Durable::No)?;
    Ok(true)
}

/// Returns whether packets for connections of a container are dropped.
pub(crate) fn is_quiet(ground: &Ground, id: &ContainerId) -> bool {
    path(ground, id).exists()
}

/// Removes the recorded rules.
pub(crate) fn forget(ground: &Ground, id: &ContainerId) -> Result<()> {
    let path = path(ground, id);
    match fs::remove_file(&path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::file("cannot remove", path)(e))
        }
        _ => Ok(()),
    }
}

fn dir(ground: &Ground) -> PathBuf {
    ground.places.lib.join("quiet")
}

/// File with the drop rules of a container; present while they are in force.
pub(crate) fn path(ground: &Ground, id: &ContainerId) -> PathBuf {
    dir(ground).join(id.as_str())
}
