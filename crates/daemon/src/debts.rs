//! Debts: reads what shared services have worked for other accounts, and writes the weights and quotas with which
//! clients pay for it. [`dormouse_governor::debt`] decides. The room of contracts ([`crate::govern`]) calls it.
//!
//! While work goes on, the work for others, and the CPU time of the services and their clients, are read ten times a
//! second, and the CPU time of all other containers twice. Otherwise the work alone is read once a second. Readings
//! take at most a tenth of the time of one CPU, however many containers run.
//!
//! **Descriptors.** A weight is written through a descriptor of the cgroup for which it was decided. A container that
//! has been started again has another cgroup, and the settings of its contract.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use dormouse_container::{Debtor, Engine, Party, Use};
use dormouse_governor::cpu::{Host, TICK_MS};
use dormouse_governor::debt::{self, Member, Quota, Readings, Setting, State, Work};
use dormouse_kernel::cgroup::{CpuQuota, CpuShare, CpuTime, Hierarchy, shares_of_weight};
use dormouse_model::ContainerId;

use crate::error::Result;

/// Time between decisions while work goes on.
const TICK: Duration = Duration::from_millis(TICK_MS);
/// Time between readings while none does.
const REST: Duration = Duration::from_secs(1);
/// Time between readings of containers that take no part.
const OTHERS: Duration = Duration::from_millis(500);
/// At least so many times the duration of readings passes before the next ones.
const SPARING: u32 = 20;

/// Weight and quota of one container.
#[derive(Debug)]
struct Handle {
    share: CpuShare,
    quota: Option<CpuQuota>,
}

impl Handle {
    /// Opens those of one cgroup; `None` if the container has another one, or none.
    fn open(cgroups: &Hierarchy, id: &ContainerId, debtor: &Debtor) -> Result<Option<Self>> {
        let name = id.as_str();
        let Some(share) = cgroups.cpu_share(name)? else { return Ok(None) };
        let quota = match debtor.cpu.max_milli {
            Some(_) => cgroups.cpu_quota(name)?,
            None => None,
        };
        // ORDER: after the descriptors were opened. The cgroup of v2 is removed with the others.
        let is_same = cgroups.v2_id(name)? == Some(debtor.cgroup_v2_id);
        Ok(is_same.then_some(Self { share, quota }))
    }

    fn write(&self, shares: Option<u32>, quota: Option<Quota>) -> Result<()> {
        if let Some(shares) = shares {
            self.share.set(shares)?;
        }
        if let (Some(handle), Some(Quota { quota_us, period_us, burst_us })) = (&self.quota, quota)
        {
            handle.set(quota_us, period_us, burst_us)?;
        }
        Ok(())
    }
}

/// The debts of running containers.
#[derive(Debug)]
pub(crate) struct Debts {
    /// Gates are loaded, containers run, and the setting is on.
    is_on: bool,
    debtors: BTreeMap<ContainerId, Debtor>,
    /// Of the containers whose settings were changed.
    handles: BTreeMap<ContainerId, Handle>,
    /// Containers that are marked: their settings may differ from their contracts.
    marked: BTreeSet<ContainerId>,
    /// Containers that are marked beside them, for an idle host.
    raised: BTreeSet<ContainerId>,
    /// Weights of reservations.
    base: BTreeMap<ContainerId, u32>,
    state: State<ContainerId, Party>,
    counted: Instant,
    count_took: Duration,
    others_read: Instant,
    others_took: Duration,
    found: Option<Instant>,
    find_took: Duration,
}

impl Debts {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            is_on: false,
            debtors: BTreeMap::new(),
            handles: BTreeMap::new(),
            marked: BTreeSet::new(),
            raised: BTreeSet::new(),
            base: BTreeMap::new(),
            state: State::default(),
            counted: now,
            count_took: Duration::ZERO,
            others_read: now,
            others_took: Duration::ZERO,
            found: None,
            find_took: Duration::ZERO,
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.is_on
    }

    /// The time of the next readings.
    pub(crate) fn due(&self) -> Option<Instant> {
        let every = if self.state.is_at_rest() { REST } else { TICK };
        self.is_on.then(|| self.counted + every.max(self.count_took * SPARING))
    }

    /// The time before which [`find`](Self::find) is not called again.
    pub(crate) fn not_before(&self) -> Option<Instant> {
        self.found.filter(|_| self.is_on).map(|found| found + self.find_took * SPARING)
    }

    /// Finds the running containers. The caller governs weights, and has marked that.
    pub(crate) fn find(
        &mut self,
        engine: &Engine,
        cgroups: &Hierarchy,
        now: Instant,
    ) -> Result<()> {
        let begun = Instant::now();
        if !self.is_on {
            (self.is_on, self.counted) = (true, now);
        }
        // On an error, the known ones stay.
        let before = self.debtors.clone();
        let cgroup = |all: &BTreeMap<ContainerId, Debtor>, id: &ContainerId| {
            all.get(id).map(|debtor| debtor.cgroup_v2_id)
        };
        let known: BTreeMap<ContainerId, u64> =
            before.iter().map(|(id, debtor)| (id.clone(), debtor.cgroup_v2_id)).collect();
        self.debtors = engine.debtors(cgroups, before)?;
        for (id, was) in known {
            if cgroup(&self.debtors, &id) != Some(was) {
                self.handles.remove(&id);
                self.base.remove(&id);
                self.state.forget(&id);
            }
        }
        // An update may have ended a reservation: the weight of the contract is in force again.
        let is_reserved = |id: &ContainerId| {
            self.debtors.get(id).is_some_and(|debtor| debtor.cpu.reserve_milli > 0)
        };
        self.base.retain(|id, _| is_reserved(id));
        // An update may have given the container its first quota.
        self.handles.retain(|id, handle| {
            let has = self.debtors.get(id).is_some_and(|debtor| debtor.cpu.max_milli.is_some());
            handle.quota.is_some() == has
        });
        // An update has written settings, and a start those of reservations.
        for (id, handle) in &self.handles {
            let quota_us = handle.quota.as_ref().map(CpuQuota::get).transpose()?.flatten();
            self.state.found(id, cgroups.shares_of(id.as_str())?, quota_us);
        }
        (self.found, self.find_took) = (Some(now), begun.elapsed());
        Ok(())
    }

    /// Marks the containers whose quota was raised for an idle host, beside those with debts.
    pub(crate) fn mark_raised(
        &mut self,
        engine: &Engine,
        raised: &BTreeSet<ContainerId>,
    ) -> Result<()> {
        self.raised.clone_from(raised);
        Ok(engine.mark_debts(&self.marked.union(raised).cloned().collect())?)
    }

    /// Ends debts, because gates were unloaded: the settings of contracts are written.
    pub(crate) fn stop(&mut self, engine: &Engine) -> Result<()> {
        if self.is_on {
            engine.give_back_debts()?;
            engine.mark_debts(&BTreeSet::new())?;
        }
        self.clear();
        Ok(())
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        *self = Self::new(self.counted);
    }

    fn members(
        &self,
        used_ns: impl Fn(&ContainerId, Option<&Party>) -> Option<u64>,
    ) -> Vec<Member<ContainerId, Party>> {
        let member = |(id, debtor): (&ContainerId, &Debtor)| Member {
            id: id.clone(),
            account: debtor.payer,
            cpu: debtor.cpu,
            shares: shares_of_weight(debtor.cpu.weight),
            used_ns: used_ns(id, debtor.payer.as_ref()),
        };
        self.debtors.iter().map(member).collect()
    }

    /// Reads and counts. Returns false if gates were unloaded.
    pub(crate) fn count(
        &mut self,
        engine: &Engine,
        time: &CpuTime,
        host: &Host,
        now: Instant,
    ) -> Result<bool> {
        let begun = Instant::now();
        let Some((load, worked)) = engine.worked()? else {
            self.counted = now;
            return Ok(false);
        };
        let services: BTreeMap<u64, &ContainerId> =
            self.debtors.iter().map(|(id, debtor)| (debtor.cgroup_v2_id, id)).collect();
        let work = |one: Use| {
            let service = (*services.get(&one.service_cgroup)?).clone();
            Some(Work { service, account: one.party, cpu_ns: one.cpu_ns })
        };
        let works = worked.into_iter().filter_map(work).collect();
        let is_at_rest = self.state.is_at_rest();
        let others_due =
            !is_at_rest && self.others_read + OTHERS.max(self.others_took * SPARING) <= now;
        let involved = self.state.involved();
        let members = self.members(|id, payer| {
            // A container that has ended since it was listed does not compete.
            let reads = others_due || involved.has(id, payer) || self.base.contains_key(id);
            reads.then(|| time.of(id.as_str()).ok().flatten()).flatten()
        });
        let passed_ns = now.duration_since(self.counted).as_nanos() as u64;
        let readings = Readings { passed_ns, load, members, works };
        let was = std::mem::take(&mut self.state);
        self.state = debt::count(host, &readings, was);
        self.counted = now;
        if others_due {
            (self.others_read, self.others_took) = (now, begun.elapsed());
        } else {
            self.count_took = begun.elapsed();
        }
        Ok(true)
    }

    /// The CPU time that counts for a container's reservation.
    pub(crate) fn own_ns(&self, id: &ContainerId, used_ns: u64) -> u64 {
        match self.is_on {
            true => used_ns.saturating_add_signed(self.state.own_beyond_ns(id)),
            false => used_ns,
        }
    }

    /// The weight of a container's contract, in shares; `None` if it is not known here.
    pub(crate) fn shares(&self, id: &ContainerId) -> Option<u32> {
        self.debtors.get(id).map(|debtor| shares_of_weight(debtor.cpu.weight))
    }

    /// The weight of a reservation was decided.
    pub(crate) fn set_base(&mut self, id: &ContainerId, shares: u32) {
        self.base.insert(id.clone(), shares);
    }

    /// Decides and writes.
    pub(crate) fn settle(
        &mut self,
        engine: &Engine,
        cgroups: &Hierarchy,
        host: &Host,
    ) -> Result<()> {
        let members = self.members(|_, _| None);
        let settings = debt::decide(host, &members, &self.base, &mut self.state);
        if settings.is_empty() {
            return Ok(());
        }
        let written = self.write(engine, cgroups, &settings);
        if written.is_err() {
            settings.iter().for_each(|setting| self.state.found(&setting.id, None, None));
        }
        written
    }

    fn write(
        &mut self,
        engine: &Engine,
        cgroups: &Hierarchy,
        settings: &[Setting<ContainerId>],
    ) -> Result<()> {
        let new = |one: &&Setting<ContainerId>| !one.is_plain && !self.marked.contains(&one.id);
        let new: Vec<ContainerId> = settings.iter().filter(new).map(|one| one.id.clone()).collect();
        if !new.is_empty() {
            let known = self.marked.iter().filter(|id| self.debtors.contains_key(*id)).cloned();
            let marked: BTreeSet<ContainerId> = known.chain(new).collect();
            // ORDER: marked first: settings that a killed daemon has changed are always found.
            engine.mark_debts(&marked.union(&self.raised).cloned().collect())?;
            self.marked = marked;
        }
        // A setting that the kernel refuses keeps no other container from its own.
        let each = settings.iter().map(|setting| self.write_one(cgroups, setting));
        each.fold(Ok(()), Result::and)
    }

    fn write_one(&mut self, cgroups: &Hierarchy, setting: &Setting<ContainerId>) -> Result<()> {
        let Setting { id, shares, quota, .. } = setting;
        let Some(debtor) = self.debtors.get(id) else { return Ok(()) };
        // The kernel refuses the weight of a container that is idle, and it has none to pay with.
        let shares = shares.filter(|_| debtor.cpu.weight > 0);
        if !self.handles.contains_key(id)
            && let Some(handle) = Handle::open(cgroups, id, debtor)?
        {
            self.handles.insert(id.clone(), handle);
        }
        self.handles.get(id).map_or(Ok(()), |handle| handle.write(shares, *quota))
    }
}
