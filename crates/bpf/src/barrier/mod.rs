//! Calls of containers that reach outside of them; see `barrier.bpf.c`.
//!
//! Map and links have names in a directory of a bpffs, which the caller mounts, and which keeps them while no process
//! has a descriptor. Callers hold a lock for [`Barrier::load`].
//!
//! ORDER: a load names the map last, after the programs are attached. [`Barrier::find`] looks for it.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use crate::call::{self, Map};
use crate::error::BpfError;
use crate::group::Description;
use crate::record::{Record, record};

type Result<T, E = BpfError> = std::result::Result<T, E>;

static GROUP: Description = Description {
    name: "barrier",
    object: include_bytes!(concat!(env!("OUT_DIR"), "/barrier.o")),
    programs: &[],
    anchor: "dm_bar_open",
    maps: &[CONTAINERS],
    about: CONTAINERS,
};

const CONTAINERS: &str = "dm_barrier";

/// LIMIT: containers behind the barrier.
pub const CONTAINERS_MAX: u32 = 262_144;

record! {
    struct Config = "dm_barrier_config" {
        level: u32,
    }
}

record! {
    struct IdsRecord = "dm_barrier_ids" {
        base: u32,
        count: u32,
        refused: u64,
    }
}

/// A program, attached until its link and all names of it are gone.
type Link = (String, OwnedFd);

/// Loads and attaches the programs.
fn attach(level: u32) -> Result<(Map, Vec<Link>)> {
    let (maps, programs) = GROUP.load_alone_with(&Config { level }.to_bytes())?;
    let missing = || BpfError::Missing { object: GROUP.name, name: CONTAINERS.into() };
    let map = maps.into_iter().next().ok_or_else(missing)?;
    let attached = programs.into_iter().map(|program| {
        let link = call::attach_to_tracepoint(program.as_fd());
        let link = link.map_err(|source| BpfError::Attach { program: GROUP.name, source })?;
        Ok((program.name, link))
    });
    Ok((map, attached.collect::<Result<_>>()?))
}

/// Returns whether the kernel calls such programs. Where it says that it may, [`Barrier::load`] can still fail.
pub fn is_possible() -> bool {
    let is_listed = || {
        let list = std::fs::read_to_string("/sys/kernel/security/lsm");
        list.is_ok_and(|text| text.trim().split(',').any(|module| module == "bpf"))
    };
    call::bpf_module().unwrap_or_else(is_listed)
}

/// The containers of an instance that are behind the barrier.
#[derive(Debug)]
pub struct Barrier {
    containers: Map,
}

impl Barrier {
    /// Loads and attaches the programs for containers at this level below the root of cgroups, and names them in this
    /// directory of a bpffs, which has no names yet.
    pub fn load(dir: &Path, level: u32) -> Result<Self> {
        let (containers, links) = attach(level)?;
        for (name, link) in &links {
            call::pin(link.as_fd(), &dir.join(name))?;
        }
        call::pin(containers.as_fd(), &dir.join(CONTAINERS))?;
        Ok(Self { containers })
    }

    /// The containers with names in this directory; `None` if there are none, or those of a build with other records.
    pub fn find(dir: &Path) -> Result<Option<Self>> {
        let Some(containers) = call::pinned(&dir.join(CONTAINERS))? else { return Ok(None) };
        let containers = Map::new(containers)?;
        let is_own = containers.value_bytes() == size_of::<IdsRecord>();
        Ok(is_own.then_some(Self { containers }))
    }

    /// Puts a cgroup of v2 behind the barrier, with its host ids: the first one, and how many. E2BIG: the map is full.
    pub fn enter(&self, cgroup_v2_id: u64, (base, count): (u32, u32)) -> Result<()> {
        let value = IdsRecord { base, count, refused: 0 }.to_bytes();
        Ok(self.containers.set_new(&cgroup_v2_id.to_ne_bytes(), &value).map(drop)?)
    }

    /// How many calls of a container were refused; `None` if it is not behind the barrier.
    pub fn refused(&self, cgroup_v2_id: u64) -> Result<Option<u64>> {
        let value = self.containers.get(&cgroup_v2_id.to_ne_bytes())?;
        Ok(value.map(|value| IdsRecord::from_bytes(&value).refused))
    }

    /// Forgets a cgroup that has no processes any more.
    pub fn leave(&self, cgroup_v2_id: u64) -> Result<()> {
        Ok(self.containers.remove(&cgroup_v2_id.to_ne_bytes()).map(drop)?)
    }
}

#[cfg(test)]
mod tests {
    use dormouse_kernel::ErrorKind;

    use crate::group::tests::assert_full;
    use crate::record::tests::assert_same;

    use super::*;

    #[test]
    fn records_have_the_layout_of_the_header() {
        assert_same::<Config>(GROUP.object);
        assert_same::<IdsRecord>(GROUP.object);
    }

    #[test]
    fn root_kernel_takes_the_programs_where_it_calls_them() {
        match attach(2) {
            Ok((map, links)) => {
                assert_eq!(links.len(), 12);
                for (name, _) in &links {
                    assert!(name.starts_with("dm_bar_") && name.len() <= 15, "{name}");
                }
                assert_full(&map, CONTAINERS_MAX);
            }
            // A kernel without such programs, or one that permits no trampolines.
            Err(error) if !is_possible() || error.kind() == ErrorKind::Os(libc::EPERM) => {
                eprintln!("NOT RUN: {error}");
            }
            Err(error) => panic!("{error:?}"),
        }
    }
}
