//! The scheduler of containers (sched_ext); see `scheduler.bpf.c`.
//!
//! One process loads it, and holds the link. With the link ends the scheduler: the kernel takes all tasks back into its
//! own classes, also after SIGKILL. The kernel ends it as well, on an error or when a task has waited for 30 s; then
//! [`Scheduler::state`] has the reason.

use std::os::fd::AsFd;

use libbpf_rs::{Link, MapCore, MapType, Object};

use crate::call::Map;
use crate::error::BpfError;
use crate::group::{Description, duplicate};
use crate::record::{Record, record};

static GROUP: Description = Description {
    name: NAME,
    object: include_bytes!(concat!(env!("OUT_DIR"), "/scheduler.o")),
    programs: &[],
    anchor: "",
    maps: &[SHARES, STATE],
    about: "",
};

const NAME: &str = "scheduler";
const SHARES: &str = "dm_shares";
const STATE: &str = "dm_state";
const OPS: &str = "dm_scheduler";
/// LIMIT: bytes of the name of the cgroup above all containers, with a zero at its end.
const NAME_MAX: usize = 64;
/// The depth of a container's cgroup.
const LEVEL: u32 = 2;
/// The name under which the kernel shows it (`/sys/kernel/sched_ext/root/ops`).
pub const SHOWN: &str = "dormouse";

record! {
    struct Config = "dm_scheduler_config" {
        level: u32,
        cpus_milli: u32,
        host_milli: u32,
        reserved: u32,
        parent: [u8; NAME_MAX],
    }
}

record! {
    /// The contract of a container with a reservation.
    pub struct Share = "dm_share" {
        /// CPU time that is guaranteed, in thousandths of a CPU.
        pub reserve_milli: u32,
        /// Share of the CPU time that is not reserved, 1 to 10,000.
        pub weight: u32,
    }
}

record! {
    struct Seen = "dm_state" {
        repaid_ns: u64,
        throttled: u64,
        rescued: u64,
        exit_kind: u32,
        reserved: u32,
        reason: [u8; 128],
    }
}

/// The CPUs of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpus {
    /// CPUs that are online, in thousandths.
    pub all_milli: u32,
    /// CPUs that are kept for the host.
    pub host_milli: u32,
}

/// What became of a scheduler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// CPU time that was given for tokens of reservations.
    pub repaid_ns: u64,
    /// Times that a task waited for its quota.
    pub throttled: u64,
    /// Tasks that were moved to the front because they had waited for ten seconds.
    pub rescued: u64,
    /// The kernel's reason, if it was unloaded.
    pub ended: Option<String>,
}

/// A scheduler that is loaded for as long as this exists.
#[derive(Debug)]
pub struct Scheduler {
    // ORDER: dropped before the object.
    _link: Link,
    _object: Object,
    shares: Map,
    state: Map,
}

/// Tests whether this kernel loads the programs. They schedule nothing. A kernel whose quotas are not given to a
/// scheduler (before 6.17) does not.
pub fn supported() -> Result<(), BpfError> {
    GROUP.supported(&config("dormouse", Cpus { all_milli: 1000, host_milli: 0 })?)
}

fn config(parent: &str, cpus: Cpus) -> Result<Vec<u8>, BpfError> {
    let mut name = [0; NAME_MAX];
    if parent.len() >= NAME_MAX {
        let name = format!("cgroup '{parent}', of at most {} bytes", NAME_MAX - 1);
        return Err(BpfError::Missing { object: NAME, name });
    }
    name[..parent.len()].copy_from_slice(parent.as_bytes());
    let Cpus { all_milli: cpus_milli, host_milli } = cpus;
    Ok(Config { level: LEVEL, cpus_milli, host_milli, reserved: 0, parent: name }.to_bytes())
}

impl Scheduler {
    /// Loads and begins. `parent` is the name of the cgroup above all containers. From now on it schedules all tasks of
    /// the host but those with real-time policies.
    ///
    /// Errors: the kernel lacks a part, or another scheduler is loaded.
    pub fn load(parent: &str, cpus: Cpus) -> Result<Self, BpfError> {
        let mut object = GROUP.load_object(&config(parent, cpus)?, &|_| true, None)?;
        let missing = |name: &str| BpfError::Missing { object: NAME, name: name.into() };
        let find = |name: &str| {
            let map = object.maps().find(|map| map.name() == name);
            Map::new(duplicate(map.ok_or_else(|| missing(name))?.as_fd())?).map_err(BpfError::from)
        };
        let (shares, state) = (find(SHARES)?, find(STATE)?);
        let mut maps = object.maps_mut();
        let mut ops = maps
            .find(|map| map.map_type() == MapType::StructOps && map.name() == OPS)
            .ok_or_else(|| missing(OPS))?;
        let begun = ops.attach_struct_ops();
        let link = begun.map_err(|source| BpfError::Begin { object: NAME, source })?;
        drop(maps);
        let loaded = Self { _link: link, _object: object, shares, state };
        match loaded.state()?.ended {
            Some(reason) => Err(BpfError::Ended { object: NAME, reason }),
            None => Ok(loaded),
        }
    }

    /// Sets the contract of a container with a reservation, by the id of its cgroup in the hierarchy of the cpu
    /// controller. The end of the cgroup removes it.
    pub fn set(&self, cgroup: u64, share: &Share) -> Result<(), BpfError> {
        Ok(self.shares.set(&cgroup.to_ne_bytes(), &share.to_bytes())?)
    }

    /// Removes the contracts of all containers but these: their weights are those of their cgroups.
    pub fn retain(&self, keep: &dyn Fn(u64) -> bool) -> Result<(), BpfError> {
        for (key, _) in self.shares.entries()? {
            let id = key.first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
            if !keep(id) {
                self.shares.remove(&key)?;
            }
        }
        Ok(())
    }

    /// Returns what became of it.
    pub fn state(&self) -> Result<State, BpfError> {
        let bytes = self.state.get(&0u32.to_ne_bytes())?.unwrap_or_default();
        let Seen { repaid_ns, throttled, rescued, exit_kind, reason, .. } =
            Seen::from_bytes(&bytes);
        let text = reason.split(|byte| *byte == 0).next().unwrap_or_default();
        let ended = (exit_kind != 0).then(|| String::from_utf8_lossy(text).into_owned());
        Ok(State { repaid_ns, throttled, rescued, ended })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_have_the_layout_of_the_header() {
        crate::record::tests::assert_same::<Config>(GROUP.object);
        crate::record::tests::assert_same::<Share>(GROUP.object);
        crate::record::tests::assert_same::<Seen>(GROUP.object);
    }

    #[test]
    fn name_that_is_too_long_is_refused() {
        let cpus = Cpus { all_milli: 2000, host_milli: 100 };
        assert_eq!(config(&"x".repeat(NAME_MAX - 1), cpus).unwrap().len(), size_of::<Config>());
        assert!(config(&"x".repeat(NAME_MAX), cpus).is_err());
    }
}
