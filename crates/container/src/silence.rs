//! Drop rules for connections whose processes are gone, for as long as they may be restored.
//!
//! The packets of a checkpoint's connections are dropped in their network stack (crate
//! `checkpoint`, `quiet`). That stack may be removed before the restore: a trust domain ends with
//! the last of its containers, and with the host. The rules are therefore kept on disk. A domain
//! that is made again has them before any peer can reach it, whichever of its containers starts
//! first.

use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;

use dormouse_checkpoint::format::Records;
use dormouse_model::{Config, ContainerId, Name, NetMode};
use dormouse_network::Domain;

use crate::disk::{self, Durable};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::start::Net;

/// When and where connections were saved.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Saved {
    /// On this host, and their packets are dropped since.
    JustNow,
    /// Earlier, perhaps on another host.
    Before,
}

impl Engine {
    /// Returns the trust domain, made if missing.
    pub(crate) fn domain(&self, name: &Name) -> Result<Domain> {
        Ok(self.network()?.domain(name, || self.silences_of(name))?)
    }

    /// Returns the drop rules of all containers of a domain. Rules of removed containers are
    /// deleted.
    fn silences_of(&self, domain: &Name) -> String {
        let mut all = String::new();
        for entry in fs::read_dir(self.silences()).into_iter().flatten().flatten() {
            let id = entry.file_name().to_str().and_then(|id| id.parse::<ContainerId>().ok());
            let Some(id) = id else { continue };
            match self.config(&id).map(|config| config.net) {
                Ok(NetMode::Address { domain: its }) if its == *domain => {
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
    pub(crate) fn note_silence(
        &self,
        config: &Config,
        records: &Records,
        saved: Saved,
    ) -> Result<bool> {
        let path = self.silence(&config.id);
        if path.exists() {
            return Ok(false);
        }
        // A checkpoint may be forged: it must not silence the connections of others.
        let is_own = |ip: IpAddr| match &config.net {
            NetMode::None => false, // a private stack has no peers outside
            NetMode::Address { .. } => config.addresses.contains(&ip),
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
        disk::make_dir(&self.silences(), 0o700)?;
        disk::write(&path, rules.as_bytes(), Durable::No)?;
        Ok(true)
    }

    /// Applies the recorded rules in a stack, which may not have them.
    pub(crate) fn keep_quiet_in(&self, config: &Config, net: &Net) -> Result<()> {
        let path = self.silence(&config.id);
        let rules = fs::read_to_string(&path).map_err(Error::file("cannot read", &path))?;
        match net {
            Net::None { .. } => Ok(()),
            Net::Host { netns, .. } => Ok(dormouse_checkpoint::keep_quiet(netns, &rules)?),
            Net::Domain(domain) => Ok(dormouse_checkpoint::keep_quiet(&domain.netns, &rules)?),
        }
    }

    /// Returns whether packets for connections of a container are dropped.
    pub(crate) fn is_quiet(&self, id: &ContainerId) -> bool {
        self.silence(id).exists()
    }

    /// Ends the drop rules of connections that will not be restored, so that their peers are reset.
    pub(crate) fn end_silence(&self, config: &Config) -> Result<()> {
        if !self.is_quiet(&config.id) {
            return Ok(());
        }
        if let NetMode::Address { domain } = &config.net
            && self.network()?.find_domain(domain)?.is_none()
        {
            return self.forget_silence(&config.id); // the stack is gone, too
        }
        self.end_silence_in(config, &self.find_network(config)?)
    }

    /// Ends the drop rules in a given stack.
    pub(crate) fn end_silence_in(&self, config: &Config, net: &Net) -> Result<()> {
        if !self.is_quiet(&config.id) {
            return Ok(());
        }
        let id = config.id.as_str();
        match net {
            Net::None { .. } => {}
            Net::Host { netns, .. } => dormouse_checkpoint::end_quiet(netns, id)?,
            Net::Domain(domain) => dormouse_checkpoint::end_quiet(&domain.netns, id)?,
        }
        self.forget_silence(&config.id)
    }

    /// Removes the recorded rules.
    pub(crate) fn forget_silence(&self, id: &ContainerId) -> Result<()> {
        let path = self.silence(id);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::file("cannot remove", path)(e))
            }
            _ => Ok(()),
        }
    }

    fn silences(&self) -> PathBuf {
        self.places().lib.join("quiet")
    }

    /// File with the drop rules of a container; present while they are in force.
    fn silence(&self, id: &ContainerId) -> PathBuf {
        self.silences().join(id.as_str())
    }
}
