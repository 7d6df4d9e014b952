//! The scheduler of containers, which a daemon loads where `scheduler = "ext"` under `[contract]` in `config.toml`
//! says so ([`dormouse_bpf::scheduler`]).
//!
//! The static weights stay in the kernel, so they hold at once when the scheduler ends, and for containers that it
//! does not know. `RUN/scheduler` marks that a daemon has loaded it. A stale mark says nothing: the daemon holds a
//! lock while it lives.
//!
//! Uses `ground`, `disk` and `settings`.

use std::collections::BTreeSet;
use std::path::PathBuf;

use dormouse_bpf::scheduler::{Cpus, SHOWN, Scheduler, Share};
use dormouse_kernel::cgroup::Hierarchy;
use dormouse_kernel::proc;
use dormouse_model::{ContainerId, Cpu};

use crate::disk::{self, Durable, Lock};
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::place::Places;
use crate::{debt, settings};

/// What divides CPU time by contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CpuBackend {
    /// Weights that were written when a container came or went.
    Weights,
    /// A daemon, which changes weights and quotas.
    Governor,
    /// A scheduler that a daemon has loaded.
    Scheduler,
}

impl CpuBackend {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weights => "static weights",
            Self::Governor => "weights of the daemon",
            Self::Scheduler => "scheduler of the daemon (sched_ext)",
        }
    }
}

/// A scheduler that is loaded for as long as this exists.
#[derive(Debug)]
pub struct CpuScheduler {
    places: Places,
    scheduler: Scheduler,
}

fn mark(ground: &Ground) -> PathBuf {
    ground.places.run.join("scheduler")
}

/// Loads the scheduler, if the settings say so.
pub(crate) fn begin(ground: &Ground) -> Result<Option<CpuScheduler>> {
    if !settings::uses_scheduler(&ground.settings())? {
        return Ok(None);
    }
    let (host_milli, all_milli) = super::host_milli(ground)?;
    // ORDER: the mark of an earlier daemon first: this one may fail.
    disk::remove(&mark(ground))?;
    let cpus = Cpus { all_milli, host_milli };
    let scheduler = Scheduler::load(&ground.places.cgroup, cpus).map_err(Error::Scheduler)?;
    disk::write(&mark(ground), b"", Durable::No)?;
    Ok(Some(CpuScheduler { places: ground.places.clone(), scheduler }))
}

impl CpuScheduler {
    /// Sets the contracts of the running containers with a reservation.
    pub fn keep(&self, cgroups: &Hierarchy, reserved: &[(ContainerId, Cpu)]) -> Result<()> {
        let mut known = BTreeSet::new();
        for (id, cpu) in reserved {
            // A container that is just being started has no cgroup yet; its event comes later.
            let Some(cgroup) = cgroups.cpu_id(id.as_str())? else { continue };
            let share = Share { reserve_milli: cpu.reserve_milli, weight: cpu.weight };
            self.scheduler.set(cgroup, &share).map_err(Error::Scheduler)?;
            known.insert(cgroup);
        }
        self.scheduler.retain(&|cgroup| known.contains(&cgroup)).map_err(Error::Scheduler)
    }

    /// Returns why the kernel has unloaded it; `None` while it is loaded.
    pub fn ended(&self) -> Result<Option<String>> {
        Ok(self.scheduler.state().map_err(Error::Scheduler)?.ended)
    }
}

impl Drop for CpuScheduler {
    fn drop(&mut self) {
        // Ignored: without a daemon the mark says nothing, and the next one removes it.
        let _ = disk::remove(&mark(&Ground::new(self.places.clone())));
    }
}

/// Returns what divides CPU time by contract at present.
pub(crate) fn backend(ground: &Ground) -> Result<CpuBackend> {
    let marks = [mark(ground), debt::path(ground)].map(|path| path.exists());
    if marks == [false; 2] || Lock::try_take(&ground.places.run.join("daemon.lock"))?.is_some() {
        return Ok(CpuBackend::Weights);
    }
    // A scheduler that the kernel has unloaded is noticed by its daemon a second later.
    let is_loaded = || {
        let text = proc::read_text("/sys/kernel/sched_ext/root/ops", 256);
        text.is_ok_and(|text| text.trim() == SHOWN)
    };
    Ok(match marks {
        [true, _] if is_loaded() => CpuBackend::Scheduler,
        [_, true] => CpuBackend::Governor,
        _ => CpuBackend::Weights,
    })
}
