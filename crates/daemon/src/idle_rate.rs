//! Rates for idle hosts: reads the idle time of the host and the CPU time of the containers with `--cpu-idle-rate`, and
//! writes their quotas. [`dormouse_governor::idle_rate`] decides. The room of contracts ([`crate::govern`]) calls it.
//!
//! **Killed.** A raised quota stays in the kernel. Its container is marked before (`RUN/governed`), so that the first
//! command afterwards, or the next daemon, writes the quota of the contract.
//!
//! LIMIT: while clients pay for the work of shared services ([`crate::debts`]), which is by quotas as well, every
//! container has the quota of its contract.

use std::collections::{BTreeMap, BTreeSet};

use dormouse_governor::idle_rate::{self, Rated, Readings, State};
use dormouse_kernel::cgroup::{CpuQuota, CpuShare, Hierarchy};
use dormouse_kernel::proc;
use dormouse_model::{ContainerId, Cpu};

use crate::error::{Result, step};

/// A running container with a rate for idle hosts.
#[derive(Debug)]
struct Held {
    cpu: Cpu,
    share: CpuShare,
    quota: CpuQuota,
}

/// The rates of running containers.
#[derive(Debug, Default)]
pub(crate) struct IdleRates {
    held: BTreeMap<ContainerId, Held>,
    state: State<ContainerId>,
    /// Containers whose quota may be above that of the contract.
    raised: BTreeSet<ContainerId>,
    /// Idle time of the host since its boot; `None` before the first reading.
    idle_ns: Option<u64>,
}

impl IdleRates {
    pub(crate) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// The containers whose quota may be above that of the contract.
    pub(crate) fn raised(&self) -> &BTreeSet<ContainerId> {
        &self.raised
    }

    /// Opens the containers that are new. Returns whether a quota is to be given back: its container has no rate any
    /// longer.
    pub(crate) fn find(
        &mut self,
        cgroups: &Hierarchy,
        rated: Vec<(ContainerId, Cpu)>,
    ) -> Result<bool> {
        let mut before = std::mem::take(&mut self.held);
        for (id, cpu) in rated {
            // The cgroup of a container that slept is a new one.
            let kept =
                before.remove(&id).filter(|held| matches!(held.share.used_ns(), Ok(Some(_))));
            let held = match kept {
                Some(held) => Some(Held { cpu, ..held }),
                None => cgroups
                    .cpu_share(id.as_str())?
                    .zip(cgroups.cpu_quota(id.as_str())?)
                    .map(|(share, quota)| Held { cpu, share, quota }),
            };
            if let Some(held) = held {
                self.held.insert(id, held);
            }
        }
        // An update has written the quota of the contract.
        self.state.forget_limits();
        let is_left = self.raised.iter().any(|id| !self.held.contains_key(id));
        Ok(is_left)
    }

    /// The quotas of all containers are those of their contracts again.
    pub(crate) fn given_back(&mut self) {
        self.raised.clear();
        self.state.forget_limits();
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Reads, decides and writes. `mark` records the containers whose quota may be above that of the contract. Returns
    /// whether a container was found that has ended.
    pub(crate) fn govern(
        &mut self,
        cpus_milli: u32,
        passed_ns: u64,
        is_hungry: bool,
        mark: &mut dyn FnMut(&BTreeSet<ContainerId>) -> Result<()>,
    ) -> Result<bool> {
        let idle_ns = proc::idle_ns().map_err(|e| step("read the idle time of the host")(&e))?;
        let Some(before) = self.idle_ns.replace(idle_ns) else { return Ok(false) };
        let (mut rated, mut has_ended) = (Vec::with_capacity(self.held.len()), false);
        for (id, held) in &self.held {
            match held.share.used_ns()? {
                Some(used_ns) => rated.push(Rated { id: id.clone(), cpu: held.cpu, used_ns }),
                None => has_ended = true,
            }
        }
        let idle_ns = idle_ns.saturating_sub(before);
        let readings = Readings { cpus_milli, passed_ns, idle_ns, is_hungry, rated };
        let (state, settings) = idle_rate::decide(&readings, std::mem::take(&mut self.state));
        self.state = state;
        let new = settings.iter().filter(|it| !it.is_plain && !self.raised.contains(&it.id));
        let new: Vec<ContainerId> = new.map(|it| it.id.clone()).collect();
        if !new.is_empty() {
            self.raised.extend(new);
            // ORDER: marked first: quotas that a killed daemon has raised are always found.
            mark(&self.raised).inspect_err(|_| self.state.forget_limits())?;
        }
        for it in &settings {
            let Some(held) = self.held.get(&it.id) else { continue };
            let set = held.quota.set(it.quota_us, it.period_us, it.burst_us);
            set.inspect_err(|_| self.state.forget_limits())?;
        }
        Ok(has_ended)
    }
}
