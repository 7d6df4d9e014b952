//! The record of a domain: `RUN/domains/NAME/ready`, and how the domain is found by it.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use dormouse_bpf::address::Trace;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::store;

const NSFS_MAGIC: u64 = 0x6e73_6673;

/// `ready`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ready {
    pub version: u32,
    pub netns_inode: u64,
    pub netns_cookie: u64,
    pub uplink: String,
    /// Chunks with routes; the first has the ends of the uplink.
    pub chunks: Vec<u32>,
    /// Ids of a program and of the programs' map of members, by which the map is found.
    #[serde(default)]
    pub trace: (u32, u32),
}

impl Ready {
    /// Records the ids by which the programs are found; returns whether they have changed.
    pub fn note(&mut self, trace: Trace) -> bool {
        std::mem::replace(&mut self.trace, (trace.anchor, trace.map)) != self.trace
    }

    pub fn trace(&self) -> Trace {
        Trace { anchor: self.trace.0, map: self.trace.1 }
    }
}

/// Reads `ready` and opens the namespace; `None` unless both are there and belong together.
pub(crate) fn read_ready(dir: &Path) -> Result<Option<(Ready, OwnedFd)>> {
    let path = dir.join("ready");
    let text = match fs::read(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(Error::file("read", &path))?,
    };
    let Ok(ready) = serde_json::from_slice::<Ready>(&text) else { return Ok(None) };
    let Ok(netns) = File::open(dir.join("net")) else { return Ok(None) };
    let kind = rustix::fs::fstatfs(&netns).map_err(Error::errno("look at a domain", "fstatfs"))?;
    let inode = netns.metadata().map_err(Error::file("look at", dir.join("net")))?.ino();
    let same = kind.f_type as u64 == NSFS_MAGIC && inode == ready.netns_inode;
    Ok(same.then(|| (ready, netns.into())))
}

pub(crate) fn write_ready(dir: &Path, ready: &Ready) -> Result<()> {
    let path = dir.join("ready");
    let text = serde_json::to_vec(ready)
        .map_err(|e| Error::Corrupt { path: path.clone(), message: e.to_string() })?;
    store::replace(&path, &text)
}
