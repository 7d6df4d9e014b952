//! All containers of the host, for the verbs with `--all-domains`.

use std::sync::Arc;

use anyhow::Result;
use dormouse_container::{Listed, Spectated};
use dormouse_model::Config;

use crate::command::Global;
use crate::fail;

/// The containers of all instances of the host, by instance.
pub(crate) struct Spectator {
    pub(crate) containers: Vec<Seen>,
    /// The exit code of the last instance that could not be read, or 0.
    code: u8,
}

/// A container of one of them.
pub(crate) struct Seen {
    instance: Arc<Spectated>,
    root: Option<String>,
    pub(crate) listed: Box<Listed>,
    /// The host's pids of its processes.
    pub(crate) pids: Vec<u32>,
}

impl Spectator {
    /// Looks at all of them. An instance that cannot be read is reported, and hides no other.
    pub(crate) fn look(global: &Global) -> Result<Self> {
        let mut this = Self { containers: Vec::new(), code: 0 };
        let instances = dormouse_container::instances(&global.places())?;
        let mut listed = Vec::new();
        for instance in instances {
            match instance.list() {
                Ok(list) => listed.push((Arc::new(instance), list)),
                Err(_) if instance.is_gone() => {}
                Err(e) => this.code = fail::tell(&e.into()),
            }
        }
        // ORDER: after the lists: a process of a listed container is found, or has exited.
        let mut processes = dormouse_container::processes()?;
        for (instance, list) in listed {
            let root = instance.root().map(|root| root.display().to_string());
            for listed in list {
                let pids = processes.remove(&listed.id).unwrap_or_default();
                let (instance, root) = (Arc::clone(&instance), root.clone());
                this.containers.push(Seen { instance, root, listed, pids });
            }
        }
        Ok(this)
    }

    /// The exit code.
    pub(crate) fn code(&self) -> u8 {
        self.code
    }
}

impl Seen {
    /// The directory for `--root`; `None` for the instance of the system.
    pub(crate) fn root(&self) -> Option<&str> {
        self.root.as_deref()
    }

    /// The trust domain.
    pub(crate) fn domain(&self) -> Option<&str> {
        self.listed.net.domain().map(|domain| domain.as_str())
    }

    /// Its configuration.
    pub(crate) fn config(&self) -> Result<Config> {
        Ok(self.instance.config(&self.listed.id)?)
    }
}
