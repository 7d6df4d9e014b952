//! Debts: what a daemon needs to know of running containers so that the work of shared services is paid by their
//! clients ([`dormouse_governor::debt`]), and how the settings of the contracts are found again without it. The same
//! knowledge orders the connections of shared services ([`dormouse_governor::order`]).
//!
//! `RUN/governed` has a line with the id of each container whose weight or quota may differ from its contract. A daemon
//! writes the line before it changes one. [`give_back`] writes the settings of these containers.
//!
//! Uses `ground`, `settings`, `gates` and `account`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use dormouse_bpf::gates::{Connections, Party, Use};
use dormouse_kernel::cgroup::{Cgroup, CpuTime, Hierarchy};
use dormouse_model::{ContainerId, Cpu, Limits, Name};
use dormouse_stacks::held::{self, Notes};

use crate::disk::{self, Durable};
use crate::error::{Error, Result};
use crate::ground::{CONFIG, Ground};
use crate::place::Places;
use crate::{account, gates, settings};

/// LIMIT: a larger file is none of ours: some 30,000 containers with debts.
const MARK_BYTES_MAX: u64 = 1 << 20;

/// A running container, as far as debts need it.
#[derive(Debug, Clone)]
pub struct Debtor {
    /// Its account. `None` for root, which is the account of containers that have nothing to do with each other.
    pub payer: Option<Party>,
    /// Its contract.
    pub cpu: Cpu,
    /// Its cgroup, which is another one after a restart.
    pub cgroup_v2_id: u64,
    /// The domain in whose stack it has addresses.
    pub domain: Option<Name>,
    /// Its addresses there.
    pub addresses: Vec<IpAddr>,
    /// Whether it works for its clients.
    pub is_shared: bool,
    /// Of the file with its configuration.
    stamp: (u64, i64, i64),
}

/// Returns whether debts are to be enforced: gates are loaded, and the setting is on.
pub(crate) fn is_on(ground: &Ground) -> Result<bool> {
    // A damaged setting is reported by the verbs, and ends no debts.
    let is_wanted = || settings::charges_debts(&ground.settings()).unwrap_or(true);
    Ok(gates::find(ground)?.is_some() && is_wanted())
}

/// Returns whether connections of shared services are to be ordered: gates are loaded, and the setting is on.
pub(crate) fn orders(ground: &Ground) -> Result<bool> {
    let is_wanted = || settings::orders_services(&ground.settings()).unwrap_or(true);
    Ok(gates::find(ground)?.is_some() && is_wanted())
}

/// What a thread of a daemon that orders connections looks up: stacks, and what services have worked.
#[derive(Debug, Clone)]
pub struct Services {
    places: Places,
}

impl Services {
    /// Opens nothing yet.
    pub fn new(places: &Places) -> Self {
        Self { places: places.clone() }
    }

    /// Returns the network stack of a domain; `None` if it is gone.
    pub fn stack(&self, domain: &Name) -> Result<Option<OwnedFd>> {
        let ground = Ground::new(self.places.clone());
        Ok(ground.network()?.find_domain(domain)?.map(|domain| domain.netns))
    }

    /// Opens the counters of a running container; `None` if it is gone.
    pub fn effort(&self, id: &ContainerId) -> Result<Option<Effort>> {
        let Some(cgroup) = Hierarchy::open(&self.places.cgroup)?.find(id.as_str())? else {
            return Ok(None);
        };
        Ok(Some(Effort { cgroup, time: CpuTime::below(&self.places.cgroup)? }))
    }

    /// Returns the accounts that gates have noted with connections; `None` without gates.
    pub fn labels(&self) -> Result<Option<Labels>> {
        labels(&Ground::new(self.places.clone()))
    }

    /// Returns what the container with this cgroup has worked for other accounts, with the load of the gates that have
    /// counted; the number is 0 if that is nothing.
    pub fn worked(&self, cgroup_v2_id: u64) -> Result<(u32, Vec<Use>)> {
        let ground = Ground::new(self.places.clone());
        let Some(gates) = gates::find(&ground)? else { return Ok((0, Vec::new())) };
        Ok(gates.uses_of(cgroup_v2_id)?)
    }
}

/// The accounts of the clients of connections, as the gates have noted them.
#[derive(Debug)]
pub struct Labels(Connections);

impl Labels {
    /// Returns where the kernel has them.
    pub fn notes(&self) -> Notes<'_> {
        Notes { map: self.0.as_fd(), account: Connections::client }
    }
}

fn labels(ground: &Ground) -> Result<Option<Labels>> {
    let Some(gates) = gates::find(ground)? else { return Ok(None) };
    Ok(gates.connections()?.map(Labels))
}

/// Counters of the processors that one container uses, and that it waits for.
#[derive(Debug)]
pub struct Effort {
    cgroup: Cgroup,
    time: CpuTime,
}

impl Effort {
    /// Returns its CPU time, in nanoseconds; `None` if its cgroup is gone.
    pub fn used_ns(&self) -> Result<Option<u64>> {
        Ok(self.time.of(self.cgroup.name())?)
    }

    /// Returns the time in which one of its tasks waited for a processor, in nanoseconds; 0 where the kernel does not
    /// count it.
    pub fn waited_ns(&self) -> Result<u64> {
        Ok(self.cgroup.cpu_wait_ns()?)
    }
}

/// Returns the running containers. Those that are `known` are read again only if they have changed.
pub(crate) fn debtors(
    ground: &Ground,
    cgroups: &Hierarchy,
    mut known: BTreeMap<ContainerId, Debtor>,
) -> Result<BTreeMap<ContainerId, Debtor>> {
    let mut all = BTreeMap::new();
    for id in ground.started()? {
        // A container that is just being started, or has just ended: an event comes.
        let Some(cgroup_v2_id) = cgroups.v2_id(id.as_str())? else { continue };
        let Ok(meta) = fs::metadata(ground.dir(&id).join(CONFIG)) else { continue };
        let stamp = (meta.ino(), meta.mtime(), meta.mtime_nsec());
        let same = |it: &Debtor| it.cgroup_v2_id == cgroup_v2_id && it.stamp == stamp;
        let debtor = match known.remove(&id).filter(same) {
            Some(debtor) => debtor,
            None => match ground.config(&id) {
                Err(Error::NoContainer(_) | Error::Corrupt { .. }) => continue,
                config => {
                    let config = config?;
                    let party = account::party(ground, &config)?;
                    let payer = (party.account != 0).then_some(party);
                    let domain = config.spec.net.domain().cloned();
                    let (cpu, is_shared) =
                        (Cpu::of(&config.spec.limits), account::is_shared(&config));
                    let addresses = config.addresses;
                    Debtor { payer, cpu, cgroup_v2_id, domain, addresses, is_shared, stamp }
                }
            },
        };
        all.insert(id, debtor);
    }
    Ok(all)
}

/// Returns how many connections to running shared services each account has, by the numbers of accounts.
pub(crate) fn connections(ground: &Ground) -> Result<BTreeMap<u32, u32>> {
    let mut services: BTreeMap<Name, BTreeSet<IpAddr>> = BTreeMap::new();
    let mut clients: BTreeMap<IpAddr, u32> = BTreeMap::new();
    for config in ground.started_configs()? {
        let config = config?;
        let Some(domain) = config.spec.net.domain().cloned() else { continue };
        let number = account::party(ground, &config)?.account;
        clients.extend(config.addresses.iter().map(|ip| (*ip, number)));
        if account::is_shared(&config) {
            services.entry(domain).or_default().extend(&config.addresses);
        }
    }
    let agreement = account::agreement(ground)?;
    let labels = if agreement.is_none() { None } else { labels(ground)? };
    let notes = labels.as_ref().map(Labels::notes);
    let mut counts = BTreeMap::new();
    for (domain, addresses) in services {
        let Some(found) = ground.network()?.find_domain(&domain)? else { continue };
        let count = |[client, _]: [SocketAddr; 2], noted: Option<u32>| {
            let own = clients.get(&client.ip()).copied();
            let sent = || Some(agreement.party(client.ip(), noted?)?.account);
            if let Some(number) = own.or_else(sent) {
                *counts.entry(number).or_default() += 1;
            }
        };
        let is_service = |ip| addresses.contains(&ip);
        held::count_in(found.netns.as_fd(), notes, is_service, count).map_err(|e| {
            Error::Invalid(format!("cannot count connections in domain {domain}: {e}"))
        })?;
    }
    Ok(counts)
}

/// Returns what was worked for other accounts, with the load of the gates that have counted; `None` without gates.
pub(crate) fn worked(ground: &Ground) -> Result<Option<(u32, Vec<Use>)>> {
    let Some(gates) = gates::find(ground)? else { return Ok(None) };
    Ok(Some(gates.uses()?).filter(|(load, _)| *load != 0)) // 0: they are being unloaded
}

/// Marks that a daemon governs weights, and which settings may differ from contracts.
pub(crate) fn mark(ground: &Ground, changed: &BTreeSet<ContainerId>) -> Result<()> {
    let text: String = changed.iter().map(|id| format!("{id}\n")).collect();
    disk::write(&path(ground), text.as_bytes(), Durable::No)
}

/// Where a daemon marks that it governs weights.
pub(crate) fn path(ground: &Ground) -> PathBuf {
    ground.places.run.join("governed")
}

/// Writes the settings of the contracts of all containers that are marked. Weights of reservations, which depend on
/// other containers, are left to the caller.
pub(crate) fn give_back(ground: &Ground) -> Result<()> {
    let path = path(ground);
    let file = match File::open(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(Error::file("cannot read", &path))?,
    };
    let mut text = String::new();
    let read = file.take(MARK_BYTES_MAX).read_to_string(&mut text);
    read.map_err(Error::file("cannot read", &path))?;
    let mut done = Ok(());
    // The file is written by a rename, so a line that is no id is none of ours.
    for id in text.lines().filter_map(|line| line.parse::<ContainerId>().ok()) {
        done = done.and(give_back_of(ground, &id));
    }
    done
}

fn give_back_of(ground: &Ground, id: &ContainerId) -> Result<()> {
    let config = match ground.config(id) {
        // Without a record there is no contract to write.
        Err(Error::NoContainer(_) | Error::Corrupt { .. }) => return Ok(()),
        other => other?,
    };
    let Some(cgroup) = ground.cgroups()?.find(id.as_str())? else { return Ok(()) };
    let cpu = Cpu::of(&config.spec.limits);
    let plain = Limits {
        cpu_reserve_milli: Some(cpu.reserve_milli),
        cpu_weight: Some(cpu.weight),
        cpu_max_milli: cpu.max_milli,
        cpu_idle_rate_milli: cpu.idle_rate_milli,
        cpu_period_us: Some(cpu.period_us),
        cpu_burst: cpu.burst,
        ..Limits::default()
    };
    match cgroup.set(&plain) {
        // It has ended meanwhile.
        Err(_) if ground.cgroups()?.find(id.as_str())?.is_none() => Ok(()),
        other => Ok(other?),
    }
}
