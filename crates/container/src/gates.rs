//! The gates of this instance, as far as they are loaded: where they are, and what they have counted.
//!
//! The bpffs at `RUN/gates` keeps programs and maps. Nothing else of them is on a disk, and a boot ends them.
//!
//! Uses `ground`.

use std::path::PathBuf;

use dormouse_account::{Client, Number, Work};
use dormouse_bpf::gates::{Gates, Use};
use dormouse_kernel::cgroup::Cgroup;
use dormouse_model::{Config, ContainerId};

use crate::error::Result;
use crate::ground::Ground;

/// Where the bpffs is mounted.
pub(crate) fn place(ground: &Ground) -> PathBuf {
    ground.places.run.join("gates")
}

/// Returns the gates, if they are loaded, which takes one system call to know.
pub(crate) fn find(ground: &Ground) -> Result<Option<Gates>> {
    Ok(Gates::find(&place(ground))?)
}

/// What containers have worked for other accounts.
#[derive(Debug, Default)]
pub(crate) struct Works {
    load: u32,
    uses: Vec<Use>,
}

impl Works {
    /// Reads what was counted up to now; nothing without gates.
    pub(crate) fn read(ground: &Ground) -> Result<Self> {
        let Some(gates) = find(ground)? else { return Ok(Self::default()) };
        let (load, uses) = gates.uses()?;
        Ok(Self { load, uses })
    }

    /// Reads that of the container with this cgroup alone.
    pub(crate) fn read_of(ground: &Ground, cgroup: &Cgroup) -> Result<Self> {
        let Some(gates) = find(ground)? else { return Ok(Self::default()) };
        let Some(id) = cgroup.v2_id() else { return Ok(Self::default()) };
        let (load, uses) = gates.uses_of(id)?;
        Ok(Self { load, uses })
    }

    /// Returns the work of the container with this cgroup.
    pub(crate) fn of(&self, cgroup_v2_id: u64) -> Vec<Work> {
        let of = self.uses.iter().filter(|one| one.service_cgroup == cgroup_v2_id);
        let work = of.map(|one| {
            let (number, owner) = (Number(one.party.account), one.party.owner);
            Work { client: Client { number, owner, load: self.load }, cpu_ns: one.cpu_ns }
        });
        work.filter(|work| work.cpu_ns > 0).collect()
    }
}

/// Returns whether a container has worked for other accounts, as far as gates know.
pub(crate) fn has_worked(ground: &Ground, id: &ContainerId) -> Result<bool> {
    let Some(gates) = find(ground)? else { return Ok(false) };
    let cgroup = ground.cgroups()?.find(id.as_str())?;
    cgroup.and_then(|cgroup| cgroup.v2_id()).map_or(Ok(false), |id| Ok(gates.has_worked(id)?))
}

/// Forgets a container whose cgroup was removed, after its use was charged.
pub(crate) fn leave(ground: &Ground, cgroup: &Cgroup) -> Result<()> {
    let Some(gates) = find(ground)? else { return Ok(()) };
    cgroup.v2_id().map_or(Ok(()), |id| Ok(gates.leave(&[id])?))
}

/// Forgets containers whose cgroups are gone, of which a killed command has left something here. A cgroup is removed
/// after its use was charged.
///
/// ORDER: first the list, and then the cgroups that exist.
pub(crate) fn forget_gone(ground: &Ground) -> Result<()> {
    let Some(gates) = find(ground)? else { return Ok(()) };
    let mut known = gates.homes()?; // all else is found through a home, which is removed last
    if known.is_empty() {
        return Ok(());
    }
    let cgroups = ground.cgroups()?;
    for name in cgroups.names()? {
        let id = cgroups.find(&name)?.and_then(|cgroup| cgroup.v2_id());
        known.retain(|known| Some(*known) != id);
    }
    if known.is_empty() {
        return Ok(());
    }
    Ok(gates.leave(&known)?)
}

/// Forgets the addresses of a container that is removed.
///
/// ORDER: before they are released. A removal is completed behind the answer, or again after a kill: what was released
/// may be another container's by then, and known as such.
pub(crate) fn withdraw(ground: &Ground, gates: &Gates, config: &Config) -> Result<()> {
    let network = ground.network()?;
    for address in &config.addresses {
        // An address outside of the pool is no container's: gates do not know it either.
        for index in network.indices(&[*address]).unwrap_or_default() {
            if network.is_held(&config.id, index)? {
                gates.withdraw(index)?;
            }
        }
    }
    Ok(())
}
