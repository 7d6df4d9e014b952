//! A scheduler of containers in place of the kernel's weights (`bpf/scheduler`), where the settings ask for it and the
//! kernel has sched_ext.
//!
//! The daemon owns it. The kernel gives it the weights, quotas and idleness of cgroups, which commands write as without
//! it, so nothing is lost when it ends: the kernel's own scheduler follows, with these. The daemon writes reservations,
//! of which the kernel knows nothing.
//!
//! Uses `ground` and `settings`.

use std::collections::BTreeMap;

use dormouse_bpf::scheduler::{Reservation, Scheduler as Programs};
use dormouse_kernel::cgroup::{self, CgroupError};
use dormouse_kernel::proc;
use dormouse_model::Cpu;

use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::settings;

/// Weight of the processes of the host for each CPU, as `cpu.weight`: that of one container.
const HOST_WEIGHT: u32 = 100;
const WEIGHT_MAX: u32 = 10_000;

/// The scheduler of a host, while this exists.
#[derive(Debug)]
pub struct Scheduler {
    programs: Programs,
}

/// Returns whether the settings ask for a scheduler of containers.
pub(crate) fn is_wanted(ground: &Ground) -> Result<bool> {
    settings::has_scheduler(&ground.settings())
}

/// The part of the host: `host-cpu-reserve`, and a share.
fn host(ground: &Ground) -> Result<Reservation> {
    let cpus = cgroup::online_cpus()?;
    let reserve_milli = settings::host_cpu_milli(&ground.settings(), cpus.saturating_mul(1000))?;
    let weight = cpus.saturating_mul(HOST_WEIGHT).min(WEIGHT_MAX);
    Ok(Reservation { reserve_milli, weight })
}

impl Scheduler {
    /// Loads it, without reservations of containers.
    pub(crate) fn load(ground: &Ground) -> Result<Self> {
        if !cgroup::cpu_is_v2()? {
            let why = "cpu-scheduler: sched_ext needs the cpu controller of cgroup v2, which this host has in v1";
            return Err(Error::Invalid(why.into()));
        }
        let possible = proc::possible_cpus().map_err(CgroupError::Read)?;
        let cpus = proc::cpu_runs(possible.trim()).and_then(|runs| Some(runs.last()?.1 + 1));
        let cpus = cpus.map_or_else(cgroup::online_cpus, Ok)?;
        let programs = Programs::load(&ground.places.cgroup, cpus, host(ground)?);
        Ok(Self { programs: programs.map_err(Error::Scheduler)? })
    }

    /// Writes reservations, in place of those before.
    pub(crate) fn reserve(&mut self, ground: &Ground, all: &BTreeMap<u64, Cpu>) -> Result<usize> {
        let all = all.iter().map(|(cgroup, cpu)| {
            let (reserve_milli, weight) = (cpu.reserve_milli, cpu.weight);
            (*cgroup, Reservation { reserve_milli, weight })
        });
        self.programs.reserve(host(ground)?, &all.collect()).map_err(Error::Scheduler)
    }

    /// Why the kernel has ended it; `None` while it runs.
    pub fn end(&self) -> Result<Option<String>> {
        self.programs.end().map_err(Error::Scheduler)
    }
}
