//! Containers and processes of all instances of the host, of every trust domain: for the operator alone.
//!
//! An *instance* is known by the host's table of ids ([`crate::host_ids`]), in which each instance with containers has
//! its place. It is opened for reading: no interrupted work is completed in it, nothing of its last boot is removed,
//! and no cache is written. Commands with its own `--root` do that.
//!
//! A process belongs to the container whose cgroup it is in. The name of that cgroup is the second component of its
//! path: containers make cgroups of any name below, and none beside it.
//!
//! No container takes part. The table belongs to root, and files and processes of other containers are not visible
//! inside.
//!
//! Uses `ground`, `host_ids`, `inspect` and `list`.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use dormouse_kernel::proc;
use dormouse_model::{Config, ContainerId};

use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::host_ids::{self, REGISTRY};
use crate::list::{self, Listed};
use crate::place::Places;

/// LIMIT: bytes of `/proc/PID/cgroup`: a line for each hierarchy, with a path.
const CGROUP_BYTES: usize = 64 << 10;

/// An instance of the host, opened for reading.
#[derive(Debug)]
pub struct Spectated {
    ground: Ground,
}

impl Spectated {
    /// The directory for `--root`; `None` for the instance of the system.
    pub fn root(&self) -> Option<&Path> {
        self.ground.places.root()
    }

    /// All its containers.
    pub fn list(&self) -> Result<Vec<Box<Listed>>> {
        list::list_only(&self.ground)
    }

    /// Whether its directory is gone, as when it is removed while it is looked at.
    pub fn is_gone(&self) -> bool {
        !self.ground.places.containers().exists()
    }

    /// The configuration of one of its containers.
    pub fn config(&self, id: &ContainerId) -> Result<Config> {
        self.ground.config(id)
    }
}

/// All instances of the host that have had containers, and the own one, by their directories.
pub fn instances(own: &Places) -> Result<Vec<Spectated>> {
    let system = Places::system();
    let real = |lib: &Path| fs::canonicalize(lib).unwrap_or_else(|_| lib.to_owned());
    let (own_lib, system_lib) = (real(&own.lib), real(&system.lib));
    let mut all: Vec<Places> = host_ids::libs(Path::new(REGISTRY))?
        .into_iter()
        .filter(|lib| *lib != own_lib)
        .filter_map(|lib| match (lib == system_lib, lib.file_name()?.to_str()?) {
            (true, _) => Some(system.clone()),
            (false, "lib") => Some(Places::below(lib.parent()?)),
            (false, _) => None,
        })
        .collect();
    if own.containers().exists() {
        all.push(own.clone());
    }
    all.sort_by(|a, b| a.lib.cmp(&b.lib));
    Ok(all.into_iter().map(|places| Spectated { ground: Ground::new(places) }).collect())
}

/// The processes of all containers of the host, by container, in ascending order.
pub fn processes() -> Result<HashMap<ContainerId, Vec<u32>>> {
    let entries = fs::read_dir("/proc").map_err(Error::file("cannot list", "/proc"))?;
    let pid = |entry: fs::DirEntry| entry.file_name().to_str()?.parse::<u32>().ok();
    let mut pids: Vec<u32> = entries.flatten().filter_map(pid).collect();
    pids.sort_unstable();
    let mut all: HashMap<ContainerId, Vec<u32>> = HashMap::new();
    for pid in pids {
        // A process that exits meanwhile is left out.
        let path = PathBuf::from(format!("/proc/{pid}/cgroup"));
        if let Some(id) = proc::read_text(path, CGROUP_BYTES).ok().as_deref().and_then(container_of)
        {
            all.entry(id).or_default().push(pid);
        }
    }
    Ok(all)
}

/// The container in whose cgroup a process is, by the lines of `/proc/PID/cgroup`.
fn container_of(text: &str) -> Option<ContainerId> {
    let of_line = |line: &str| {
        let mut parts = line.splitn(3, ':').nth(2)?.strip_prefix('/')?.split('/');
        let (parent, name) = (parts.next()?, parts.next()?);
        let is_ours = parent.strip_prefix("dormouse").is_some_and(|rest| {
            rest.strip_prefix('-').map_or(rest.is_empty(), |hash| hash.len() == HASH_DIGITS)
        });
        name.parse().ok().filter(|_| is_ours)
    };
    text.lines().find_map(of_line)
}

/// Hexadecimal digits of the hash in the name of a cgroup of an instance with `--root` ([`Places::below`]).
const HASH_DIGITS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_belongs_to_the_container_right_below_the_parent() {
        let (own, other) = ("a".repeat(ContainerId::LEN), "b".repeat(ContainerId::LEN));
        let hash = format!("dormouse-{:016x}", 7);
        let of = |text: &str| container_of(text).map(String::from);
        assert_eq!(of(&format!("0::/dormouse/{own}\n")), Some(own.clone()));
        assert_eq!(of(&format!("7:blkio:/\n0::/{hash}/{own}/dormouse-exec\n")), Some(own.clone()));
        // A cgroup that root of a container has made.
        assert_eq!(of(&format!("0::/dormouse/{own}/dormouse/{other}")), Some(own.clone()));
        for text in [
            String::new(),
            "0::/".to_owned(),
            "0::/dormouse/keeper".to_owned(),
            format!("0::/user.slice/dormouse/{own}"),
            format!("0::/dormouses/{own}"),
            format!("0::/dormouse-x/{own}"),
        ] {
            assert_eq!(of(&text), None, "{text}");
        }
    }
}
