//! Silence for connections whose processes are gone, for as long as they may come back.
//!
//! The packets of connections that a checkpoint has are dropped in the stack that they lead to
//! (crate `checkpoint`, `quiet`). That stack may go before they are back: a trust domain ends with
//! the last of its containers, and with the host. So what is to be dropped is kept on the disk, and a
//! domain that is made has it from before anybody can reach it, whoever of its containers is first.

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
    /// Here, and they are quiet since.
    JustNow,
    /// Some time, perhaps by somebody else.
    Before,
}

impl Engine {
    /// The trust domain, made where it is missing.
    pub(crate) fn domain(&self, name: &Name) -> Result<Domain> {
        Ok(self.network()?.domain(name, || self.silences_of(name))?)
    }

    /// What is to be dropped for containers of a domain, as rules. What removed ones have left goes.
    fn silences_of(&self, domain: &Name) -> String {
        let mut all = String::new();
        for entry in fs::read_dir(self.silences()).into_iter().flatten().flatten() {
            let id = entry.file_name().to_str().and_then(|id| id.parse::<ContainerId>().ok());
            let Some(id) = id else { continue };
            match self.config(&id).map(|config| config.net) {
                Ok(NetMode::Address { domain: its }) if its == *domain => {
                    // One that has ended in the meantime is none.
                    all += &fs::read_to_string(entry.path()).unwrap_or_default();
                }
                Err(Error::NoContainer(_)) => drop(fs::remove_file(entry.path())),
                _ => {}
            }
        }
        all
    }

    /// The connections of these records are nowhere: keeps in mind that they are to be quiet until they
    /// are back. Whether that is news.
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
        // A checkpoint may be anybody's: it silences nobody else's connections.
        let is_own = |ip: IpAddr| match &config.net {
            NetMode::None => false, // nobody is outside of a stack of its own
            NetMode::Address { .. } => config.addresses.contains(&ip),
            NetMode::Host => saved == Saved::JustNow,
        };
        let rules = dormouse_checkpoint::silence(records, config.id.as_str(), is_own);
        let rules = match rules {
            Some(rules) => rules,
            // What was begun is to be ended; another stack needs none of it.
            None if saved == Saved::JustNow => String::new(),
            None => return Ok(false),
        };
        disk::make_dir(&self.silences(), 0o700)?;
        disk::write(&path, rules.as_bytes(), Durable::No)?;
        Ok(true)
    }

    /// Has what was noted dropped in a stack, which may not know of it.
    pub(crate) fn keep_quiet_in(&self, config: &Config, net: &Net) -> Result<()> {
        let path = self.silence(&config.id);
        let rules = fs::read_to_string(&path).map_err(Error::file("cannot read", &path))?;
        match net {
            Net::None { .. } => Ok(()),
            Net::Host { netns, .. } => Ok(dormouse_checkpoint::keep_quiet(netns, &rules)?),
            Net::Domain(domain) => Ok(dormouse_checkpoint::keep_quiet(&domain.netns, &rules)?),
        }
    }

    /// Whether connections of a container are kept quiet.
    pub(crate) fn is_quiet(&self, id: &ContainerId) -> bool {
        self.silence(id).exists()
    }

    /// Connections that were kept quiet and that nobody restores: their peers may know now.
    pub(crate) fn end_silence(&self, config: &Config) -> Result<()> {
        if !self.is_quiet(&config.id) {
            return Ok(());
        }
        if let NetMode::Address { domain } = &config.net
            && self.network()?.find_domain(domain)?.is_none()
        {
            return self.forget_silence(&config.id); // its stack has ended, too
        }
        self.end_silence_in(config, &self.find_network(config)?)
    }

    /// The same in a stack that was found.
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

    /// It has ended.
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

    /// There while packets for connections of a container are dropped, and says which.
    fn silence(&self, id: &ContainerId) -> PathBuf {
        self.silences().join(id.as_str())
    }
}
