//! Contracts for CPU and memory: admission of reservations, and the static weights and limits that keep them
//! without a daemon.
//!
//! `RUN/contract.json` is the *ledger*: the running containers with a reservation. A start adds its container
//! under `RUN/contract.lock`, or is refused, so that two starts never share the last CPU. A container that
//! stops or sleeps leaves the ledger, and its wake is admitted again. While the ledger is empty it does not
//! exist, and no other container pays for it but one access(2) at its start and at its end, and on cgroup v1 a small
//! file at its wake.
//!
//! **Weights.** A reservation is kept by a weight, which depends on the weights of all running containers
//! ([`dormouse_governor::cpu`]). The weights are computed again when a container with a reservation comes,
//! changes or goes, and when the number of the others has changed by a twentieth. The daemon changes the same
//! weights ten times a second. It marks that with `RUN/governed`, and the first command after a killed daemon
//! writes the static weights.
//!
//! **Limits.** A guarantee of memory is kept by the kernel on cgroup v2, and by limits of all containers on v1
//! (`contract/memory.rs`). They are computed again when a container with a guarantee comes, changes or goes. The
//! ledger has them before the kernel has, so after a kill the next start or end of a container writes them
//! (`contract/writer.rs`). A thread of the daemon lowers and raises limits of v1 ([`MemoryLimits`]), which
//! `RUN/governed-memory` marks.
//!
//! **Stale entries.** A killed start leaves its entry. An entry counts only while `RUN/c/ID` exists, and where a
//! container would be refused, only if the holder lives or is locked by a verb.
//!
//! LIMIT: the ledger is that of one instance; instances (`--root`) promise the same CPUs independently.
//!
//! Uses `ground`, `state`, `settings`, `rate`, `bandwidth`, `drive`, `socket`, `usage` and `debt`.

mod ledger;
mod memory;
mod writer;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use dormouse_governor::cpu::{Host, Setting, statics};
use dormouse_kernel::cgroup::{
    self, CgroupError, ChargingImages, Controllers, LimitSet, MemoryShare,
};
use dormouse_model::{Bits, Config, ContainerId, Cpu, Cpus, Evict, Limits, Memory, Spec};

use crate::disk::{self, Durable, Lock};
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::place::Places;
use crate::{bandwidth, debt, drive, rate, settings, socket, state};

use self::ledger::{Extent, Grant, InForce, Ledger, lock, path, read, write};
pub(crate) use self::memory::expect_restored;
use self::writer::Snapshot;

/// A part of the number of containers, and of their weight, whose change is ignored.
const CHANGE: u64 = 20;

/// Returns whether a container has, or had, a reservation.
pub(crate) fn has_ledger(ground: &Ground) -> bool {
    path(ground).exists()
}

/// Refuses limits that contradict each other, or that this host can never keep.
pub(crate) fn check(ground: &Ground, limits: &Limits) -> Result<()> {
    let cpu = Cpu::of(limits);
    cpu.check().map_err(CgroupError::from)?;
    memory::check(ground, &Memory::of(limits))?;
    rate::check(ground, limits)?;
    drive::check(limits)?;
    bandwidth::check(ground, limits)?;
    socket::check(ground, limits)?;
    if limits.memory_high_bytes.is_some() {
        ground.cgroups()?.check_memory_high(limits)?;
    }
    let cpuset = limits.cpuset_cpus.as_deref().and_then(cgroup::count_cpus);
    if cpu.reserve_milli == 0 {
        return Ok(cpu.check_on(0, cpuset).map_err(CgroupError::from)?);
    }
    let (host, all) = host_milli(ground)?;
    Ok(cpu.check_on(all.saturating_sub(host), cpuset).map_err(CgroupError::from)?)
}

/// Refuses a throttle on cgroup v1, which has none: a limit there ends processes.
pub(crate) fn check_evict(ground: &Ground, spec: &Spec) -> Result<()> {
    if spec.evict != Evict::Throttle || ground.cgroups()?.keeps_memory() {
        return Ok(());
    }
    let why = "--evict throttle needs memory.high, which cgroup v1 does not have: give sleep, restart, kill or never";
    Err(Error::Invalid(why.into()))
}

/// The CPUs that are kept for the host, and all CPUs, in thousandths.
fn host_milli(ground: &Ground) -> Result<(u32, u32)> {
    let all = cgroup::online_cpus()?.saturating_mul(1000);
    Ok((settings::host_cpu_milli(&ground.settings(), all)?, all))
}

/// Enters the reservation of a container that starts, wakes or is updated; `limits` are those from now on. The
/// caller holds its lock, and has made `RUN/c/ID`.
///
/// Errors: [`Error::NoCpu`] and [`Error::NoMemory`] with the numbers. Nothing has changed then.
pub(crate) fn admit(ground: &Ground, config: &Config, limits: &Limits) -> Result<()> {
    enter(ground, config, limits, Admission::Checked)
}

/// Enters the reservation of a running container again, as it is on record, after an interrupted change.
pub(crate) fn admit_again(ground: &Ground, config: &Config) -> Result<()> {
    enter(ground, config, &config.spec.limits, Admission::Kept)
}

/// Whether a reservation may be refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Admission {
    Checked,
    Kept,
}

fn enter(ground: &Ground, config: &Config, limits: &Limits, how: Admission) -> Result<()> {
    let grant = Grant::of(limits);
    if grant.is_none() && !path(ground).exists() {
        return Ok(());
    }
    let _alone = lock(ground)?;
    let mut ledger = read(ground)?;
    match grant {
        None => {
            if ledger.granted.remove(&config.id).is_some() && ledger.granted.is_empty() {
                balance_locked(ground, &mut ledger)?; // no later step finds the ledger
            }
        }
        Some(grant) if how == Admission::Kept => {
            ledger.granted.insert(config.id.clone(), grant);
        }
        Some(grant) => {
            check(ground, limits)?;
            // A wrong setting of one resource is no error for a container that reserves another.
            let cpus = (grant.cpu.reserve_milli > 0).then(|| host_milli(ground)).transpose()?;
            let memory = (grant.memory_min_bytes > 0).then(|| memory::host(ground)).transpose()?;
            let uplink_bps =
                if grant.net_rate_bps > 0 { bandwidth::uplink_bps(ground)? } else { 0 };
            ledger.granted.insert(config.id.clone(), grant);
            let refused = |ledger: &Ledger| {
                let no_cpu = cpus.and_then(|(host, all)| refusal(ledger, config, host, all));
                let no_memory = || memory::refusal(&ledger.minima(), config, memory?);
                no_cpu.or_else(no_memory).or_else(|| no_bandwidth(ledger, config, uplink_bps))
            };
            if refused(&ledger).is_some() {
                ledger.granted.retain(|id, _| *id == config.id || lives(ground, id));
            }
            if let Some(error) = refused(&ledger) {
                return Err(error);
            }
        }
    }
    write(ground, &ledger)
}

/// Returns the error for a ledger that promises more than there is, `config` being the container that came last.
fn refusal(ledger: &Ledger, config: &Config, host_milli: u32, all_milli: u32) -> Option<Error> {
    let own = ledger.granted.get(&config.id).filter(|own| own.cpu.reserve_milli > 0)?;
    let sum = |all: &mut dyn Iterator<Item = &Grant>| -> u32 {
        all.fold(0, |sum, grant| sum.saturating_add(grant.cpu.reserve_milli))
    };
    let error = |of: String, all: u32, host: u32, taken: u32, holders: usize| Error::NoCpu {
        name: config.name.to_string(),
        wanted: Cpus(own.cpu.reserve_milli),
        free: Cpus(all.saturating_sub(host).saturating_sub(taken)),
        of,
        taken: Cpus(taken),
        holders,
        host: Cpus(host),
    };
    let others = || ledger.cpus().filter(|(id, _)| **id != config.id).map(|(_, it)| it);
    let taken = sum(&mut others());
    if taken.saturating_add(own.cpu.reserve_milli) > all_milli.saturating_sub(host_milli) {
        let of = format!("{} CPUs", Cpus(all_milli));
        return Some(error(of, all_milli, host_milli, taken, others().count()));
    }
    // Containers with the same CPU set compete for it alone.
    let set = own.cpuset.as_ref()?;
    let same = || others().filter(|grant| grant.cpuset.as_ref() == Some(set));
    let (taken, cpus) = (sum(&mut same()), cgroup::count_cpus(set)?.saturating_mul(1000));
    let too_much = taken.saturating_add(own.cpu.reserve_milli) > cpus;
    let of = format!("{} CPUs of the CPU set {set}", Cpus(cpus));
    too_much.then(|| error(of, cpus, 0, taken, same().count()))
}

/// Returns the error for a ledger that promises more bandwidth than the uplink has.
fn no_bandwidth(ledger: &Ledger, config: &Config, uplink_bps: u64) -> Option<Error> {
    let wanted = ledger.granted.get(&config.id)?.net_rate_bps;
    let others = || {
        let others = ledger.granted.iter().filter(|(id, _)| **id != config.id);
        others.map(|(_, grant)| grant.net_rate_bps).filter(|rate| *rate > 0)
    };
    let taken = others().fold(0, u64::saturating_add);
    let free = uplink_bps.saturating_sub(taken);
    (wanted > free).then(|| Error::NoBandwidth {
        name: config.name.to_string(),
        wanted: Bits(wanted),
        free: Bits(free),
        all: Bits(uplink_bps),
        taken: Bits(taken),
        holders: others().count(),
    })
}

/// Returns whether the holder of an entry has processes, or a verb is about to start some. ORDER: locks of
/// containers are only tried here, because every caller holds one.
fn lives(ground: &Ground, id: &ContainerId) -> bool {
    let Ok(config) = ground.config(id) else { return ground.dir(id).exists() };
    match state::observe(ground, &config) {
        Ok(observed) if observed.is_alive() => true,
        Ok(observed) if observed.needs_settling() => false,
        // Without a record it is being started, or its start was interrupted.
        _ => !matches!(Lock::try_take(&ground.dir(id)), Ok(Some(_))),
    }
}

/// Removes the entry of a container that has stopped or fallen asleep. Best effort: an entry that stays is
/// dropped by the next reader.
pub(crate) fn leave(ground: &Ground, id: &ContainerId) {
    if !path(ground).exists() {
        return;
    }
    let _ = ledger::change(ground, |ledger| match ledger.granted.remove(id) {
        Some(_) => balance_locked(ground, ledger),
        None => balance_if_changed(ground, ledger, 0),
    });
    let _ = writer::settle(ground, Extent::Raises);
}

/// Writes the static weights and limits after the cgroup of a container was made.
///
/// A container without a guarantee does not wait for limits of others, and starts although they cannot be written.
pub(crate) fn balance(ground: &Ground, config: &Config) -> Result<()> {
    if !path(ground).exists() {
        return Ok(());
    }
    let limits = &config.spec.limits;
    ledger::change(ground, |ledger| {
        match Grant::of(limits) {
            Some(_) => balance_locked(ground, ledger)?,
            None => balance_if_changed(ground, ledger, Cpu::of(limits).weight)?,
        }
        writer::begin(ground, ledger, &config.id)
    })?;
    let settled = writer::settle(ground, extent(limits));
    if is_guaranteed(limits) { settled } else { Ok(()) }
}

fn is_guaranteed(limits: &Limits) -> bool {
    Memory::of(limits).min_bytes > 0
}

/// The limits for which a container waits.
fn extent(limits: &Limits) -> Extent {
    if is_guaranteed(limits) { Extent::All } else { Extent::Raises }
}

/// Waits until no other process writes limits of memory, for a caller that is to change those of a running container.
/// `None` if none of memory change, or none follow from a guarantee. The caller drops it before [`balance_all`].
pub(crate) fn hold_limits(ground: &Ground, changed: &Limits) -> Result<Option<Lock>> {
    let is_memory = changed.memory_max_bytes.or(changed.swap_max_bytes).is_some();
    if !is_memory || !path(ground).exists() || read(ground)?.memory.is_none() {
        return Ok(None);
    }
    writer::Site::writer(ground, Extent::All)
}

/// Writes the static weights and limits of all containers after the limits of one have `changed`, which are now `all`.
pub(crate) fn balance_all(ground: &Ground, changed: &Limits, all: &Limits) -> Result<()> {
    if !path(ground).exists() {
        return Ok(());
    }
    let of_memory = [changed.memory_max_bytes, changed.memory_min_bytes, changed.swap_max_bytes];
    let is_memory = of_memory.iter().any(Option::is_some);
    ledger::change(ground, |ledger| {
        if is_memory {
            ledger.decide(memory::room(ground), true);
        }
        balance_locked(ground, ledger)
    })?;
    // A limit of another container that is refused concerns the guarantee of this one, if it has one.
    match (is_memory, is_guaranteed(all)) {
        (true, true) => writer::settle(ground, Extent::All),
        (is_memory, _) => {
            let extent = if is_memory { Extent::All } else { extent(all) };
            let _ = writer::settle(ground, extent); // the next writer repeats it
            Ok(())
        }
    }
}

/// The limits of memory of an instance, for the thread of a daemon that changes them. Its calls wait for the kernel's
/// reclaim.
///
/// The cgroups are opened again for each reading of the guarantees: a command removes the cgroup above all containers
/// while none runs, and the next start makes another one.
#[derive(Debug)]
pub struct MemoryLimits {
    places: Places,
}

/// What is guaranteed to running containers on cgroup v1.
#[derive(Debug)]
pub struct MemoryGranted {
    /// With the cgroups of this reading.
    ground: Ground,
    /// Another number for each change of the guarantees.
    turn: u64,
    /// Memory of all containers and images together.
    all_bytes: u64,
    /// The memory of images, if they have a cgroup.
    images: Option<MemoryShare>,
    /// The running containers.
    pub members: BTreeMap<ContainerId, MemoryMember>,
}

/// A running container beside a guarantee, or with one.
#[derive(Debug)]
pub struct MemoryMember {
    /// Usage and limit of its cgroup, which a later one of the same container does not have.
    pub share: MemoryShare,
    /// Its guarantee; 0 is none.
    pub min_bytes: u64,
    /// The memory with which it was restored; 0 if it was not.
    pub restored_bytes: u64,
    /// Its limit without the daemon.
    pub ceiling_bytes: u64,
}

impl MemoryLimits {
    /// Opens nothing yet.
    pub fn new(places: &Places) -> Self {
        Self { places: places.clone() }
    }

    fn ground(&self) -> Ground {
        Ground::new(self.places.clone())
    }

    /// Returns the containers whose limits can be changed; `None` without guarantees, and on cgroup v2, where the
    /// kernel keeps them. Limits that a killed verb has left are written.
    pub fn granted(&self) -> Result<Option<MemoryGranted>> {
        let ground = self.ground();
        if !governs_memory(&ground)? {
            return Ok(None);
        }
        // A refused limit is reported by the verb of its container.
        if ledger::change(&ground, |ledger| Ok(ledger.is_due(Extent::All)))? {
            let _ = writer::settle(&ground, Extent::All);
        }
        let Some(Snapshot { ledger, members }) = writer::snapshot(&ground)? else {
            return Ok(None);
        };
        let Some(now) = &ledger.memory else { return Ok(None) };
        let minima = ledger.minima();
        let member = |it: writer::Member<MemoryShare>| {
            let ceiling_bytes = it.due_bytes(&ledger);
            let min_bytes = minima.get(&it.id).copied().unwrap_or(0);
            let (share, restored_bytes) = (it.group, it.restored_bytes);
            (it.id, MemoryMember { share, min_bytes, restored_bytes, ceiling_bytes })
        };
        let members = members.into_iter().map(member).collect();
        let (turn, all_bytes) = (now.turn, now.room_bytes);
        let images = ground.cgroups()?.images_share()?;
        Ok(Some(MemoryGranted { ground, turn, all_bytes, images, members }))
    }

    /// Marks that the caller, a daemon, changes limits, or that it does no longer. Then the static limits are written.
    pub fn govern(&self, governs: bool) -> Result<()> {
        let ground = self.ground();
        match governs {
            true => disk::write(&governed_memory(&ground), b"", Durable::No),
            false => give_back(&ground, Extent::All),
        }
    }
}

impl MemoryGranted {
    /// Returns the memory of all containers together: what images use is not among it, and is not taken for them.
    pub fn room_bytes(&self) -> Result<u64> {
        let used = self.images.as_ref().map(MemoryShare::used_bytes).transpose()?.flatten();
        Ok(self.all_bytes.saturating_sub(used.unwrap_or(0)))
    }

    /// Sets a limit that was decided for these guarantees. `None` if the guarantees have changed since.
    pub fn set(&self, share: &MemoryShare, bytes: u64) -> Result<Option<LimitSet>> {
        writer::write_one(&self.ground, self.turn, share, bytes)
    }

    /// Reads the page cache of files that is charged to a container.
    pub fn file_cache_bytes(&self, id: &ContainerId) -> Result<u64> {
        Ok(self.ground.cgroups()?.file_cache_bytes(id.as_str())?)
    }
}

/// Has the page cache of files that this process reads and writes charged to images, until the result is dropped.
/// `None` if that is not possible here, which is no reason to fail.
pub(crate) fn charge_images(ground: &Ground) -> Option<ChargingImages> {
    let charging = ground.cgroups().ok()?.charge_images().ok()??;
    // A limit that cannot be written is written by the next change of a guarantee.
    let _ = memory::protect_images(ground);
    Some(charging)
}

/// Returns the memory that is charged to images, and how much of it is protected.
pub(crate) fn images_memory(ground: &Ground) -> Result<(u64, u64)> {
    let used = match cgroup::exists(&ground.places.cgroup)? {
        true => ground.cgroups()?.images_memory()?.map_or(0, |held| held.bytes),
        false => 0,
    };
    let (host, all) = memory::host(ground)?;
    Ok((used, settings::images_memory_bytes(&ground.settings(), all - host)?))
}

/// Returns whether memory is guaranteed, and by limits that a daemon changes: on cgroup v1.
pub(crate) fn governs_memory(ground: &Ground) -> Result<bool> {
    Ok(path(ground).exists()
        && !read(ground)?.minima().is_empty()
        && !ground.cgroups()?.keeps_memory())
}

/// Writes the static limits, which a daemon has changed, also if nothing is guaranteed any longer.
///
/// ORDER: the mark is removed last: if this is interrupted, the next command repeats it.
fn give_back(ground: &Ground, extent: Extent) -> Result<()> {
    // No limit is left without a cgroup, and an open would make one.
    if !cgroup::exists(&ground.places.cgroup)? {
        return disk::remove(&governed_memory(ground));
    }
    ledger::change(ground, |ledger| {
        ledger.memory = Some(InForce::of(ledger, memory::room(ground)));
        Ok(())
    })?;
    let settled = writer::settle(ground, extent);
    disk::remove(&governed_memory(ground))?;
    settled
}

/// The running containers with reserved CPUs.
pub(crate) fn granted(ground: &Ground) -> Result<Vec<(ContainerId, Cpu)>> {
    if !path(ground).exists() {
        return Ok(Vec::new());
    }
    let ledger = read(ground)?;
    Ok(ledger.cpus().map(|(id, grant)| (id.clone(), grant.cpu)).collect())
}

/// The running containers with a rate for idle hosts.
pub(crate) fn idle_rates(ground: &Ground) -> Result<Vec<(ContainerId, Cpu)>> {
    if !path(ground).exists() {
        return Ok(Vec::new());
    }
    let all = read(ground)?.granted.into_iter().map(|(id, grant)| (id, grant.cpu));
    Ok(all.filter(|(_, cpu)| cpu.idle_rate_milli.is_some()).collect())
}

/// Marks that a daemon governs the weights, or that it does no longer and static weights are to hold.
pub(crate) fn govern(ground: &Ground, governs: bool) -> Result<()> {
    if governs {
        // What an earlier daemon has left is found by its marks alone.
        debt::give_back(ground)?;
        return debt::mark(ground, &BTreeSet::new());
    }
    // ORDER: the mark is removed last: if this is interrupted, the next command repeats it. The weights of the others
    // come first, because those of reservations depend on them.
    let given_back = debt::give_back(ground);
    let weighed = match path(ground).exists() {
        true => ledger::change(ground, |ledger| weigh(ground, ledger)),
        false => Ok(()),
    };
    given_back?; // the mark stays, and the next command repeats it
    disk::remove(&debt::path(ground))?;
    weighed
}

/// Writes the static weights and limits if a daemon was killed while it governed them.
pub(crate) fn recover(ground: &Ground) -> Result<()> {
    let has = [debt::path(ground), governed_memory(ground)].map(|mark| mark.exists());
    if has == [false; 2] {
        return Ok(());
    }
    // The lock of a running daemon. A daemon that starts now waits for it.
    let Some(_no_daemon) = Lock::try_take(&ground.places.run.join("daemon.lock"))? else {
        return Ok(());
    };
    let weights = if has[0] { govern(ground, false) } else { Ok(()) };
    // The limits that the daemon has lowered are raised, which does not wait.
    let limits = if has[1] { give_back(ground, Extent::Raises) } else { Ok(()) };
    weights.and(limits)
}

/// Marks that a daemon changes limits of memory.
fn governed_memory(ground: &Ground) -> PathBuf {
    ground.places.run.join("governed-memory")
}

/// Computes the weights again if the number of containers has changed much, or one with much weight came.
fn balance_if_changed(ground: &Ground, ledger: &mut Ledger, weight: u32) -> Result<()> {
    if ledger.is_outdated() {
        ledger.decide(memory::room(ground), false);
    }
    if ledger.cpus().next().is_none() && !ledger.granted.is_empty() {
        return Ok(()); // only memory
    }
    let started = count_started(ground);
    let is_much = |change: u64, of: u64| change.saturating_mul(CHANGE) > of;
    let same = !ledger.granted.is_empty()
        && started != 0
        && ledger.started != 0
        && !is_much(started.abs_diff(ledger.started), ledger.started)
        && !is_much(u64::from(weight) * 1024 / 100, ledger.others_shares);
    if same {
        return Ok(());
    }
    balance_locked(ground, ledger)
}

/// The number of entries in `RUN/c`, by its count of links; 0 where a file system does not count.
fn count_started(ground: &Ground) -> u64 {
    let links = fs::metadata(ground.places.running()).map_or(0, |meta| meta.nlink());
    links.saturating_sub(2)
}

/// Decides the limits of memory, and writes the static weights.
fn balance_locked(ground: &Ground, ledger: &mut Ledger) -> Result<()> {
    ledger.decide(memory::room(ground), false);
    weigh(ground, ledger)
}

/// Writes the static weights, and that of the parent of all containers.
fn weigh(ground: &Ground, ledger: &mut Ledger) -> Result<()> {
    let cgroups = ground.cgroups()?;
    if ledger.cpus().next().is_none() {
        // Without a controller of CPU no weight was set.
        return match cgroups.home(Controllers::CPU) {
            Ok(_) => Ok(cgroups.set_parent_shares(None)?),
            Err(_) => Ok(()),
        };
    }
    ledger.started = count_started(ground);
    let mut others_shares = 0;
    let is_reserved =
        |id: &ContainerId| ledger.granted.get(id).is_some_and(|grant| grant.cpu.reserve_milli > 0);
    for id in ground.started()?.iter().filter(|id| !is_reserved(id)) {
        others_shares += u64::from(cgroups.shares_of(id.as_str())?.unwrap_or(0));
    }
    ledger.others_shares = others_shares;
    let all_milli = cgroup::online_cpus()?.saturating_mul(1000);
    let reserved_milli: u32 = ledger.cpus().map(|(_, grant)| grant.cpu.reserve_milli).sum();
    cgroups.set_parent_shares(Some((reserved_milli, all_milli)))?;
    let host = Host { cpus_milli: all_milli, shares_max: cgroups.shares_max() };
    let all: Vec<(&ContainerId, Cpu)> = ledger.cpus().map(|(id, grant)| (id, grant.cpu)).collect();
    for Setting { id, shares } in statics(&host, &all, others_shares) {
        cgroups.set_shares(id.as_str(), shares)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::Places;

    fn id(number: u8) -> ContainerId {
        ContainerId::from_bytes([number; 16])
    }

    fn limits(reserve_milli: u32, cpuset: Option<&str>) -> Limits {
        Limits {
            cpu_reserve_milli: Some(reserve_milli),
            cpuset_cpus: cpuset.map(str::to_owned),
            ..Limits::default()
        }
    }

    fn config(number: u8) -> Config {
        let config = serde_json::json!({
            "version": 1, "id": id(number), "name": format!("c{number}"), "created_unix_s": 0,
            "ids": { "base": 1 << 20, "wide": false }, "root": { "directory": "/srv" },
            "process": { "args": [], "env": [], "cwd": "/", "user": "", "umask": null },
            "security": { "capabilities": [], "no_new_privileges": false, "seccomp": "default",
                "privileged": false, "rlimits": [], "oom_score_adj": null },
            "hostname": "x", "mounts": [], "net": "none", "stop_signal": 15, "stop_timeout_s": 7,
        });
        serde_json::from_value(config).unwrap()
    }

    fn ledger(of: &[(u8, u32, Option<&str>)]) -> Ledger {
        let one = |(number, reserve, cpuset): &(u8, u32, Option<&str>)| {
            (id(*number), Grant::of(&limits(*reserve, *cpuset)).unwrap())
        };
        Ledger { granted: of.iter().map(one).collect(), ..Ledger::default() }
    }

    #[test]
    fn refusal_has_the_numbers_of_the_ledger() {
        let fits = ledger(&[(1, 1000, None), (2, 900, None)]);
        assert!(refusal(&fits, &config(2), 100, 2000).is_none());
        let over = ledger(&[(1, 1000, None), (2, 950, None)]);
        let text = refusal(&over, &config(2), 100, 2000).unwrap().to_string();
        for part in ["'c2'", "0.95 CPUs", "0.9 of 2 CPUs are free", "1 is reserved by 1", "0.1 is"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        let alone = ledger(&[(1, 2000, None)]);
        assert!(refusal(&alone, &config(1), 0, 2000).is_none());
    }

    #[test]
    fn containers_of_one_cpu_set_are_admitted_by_its_size() {
        let over = ledger(&[(1, 600, Some("0")), (2, 500, Some("0")), (3, 500, Some("1"))]);
        let text = refusal(&over, &config(2), 100, 4000).unwrap().to_string();
        assert!(text.contains("0.4 of 1 CPUs of the CPU set 0 are free"), "{text}");
        assert!(refusal(&over, &config(3), 100, 4000).is_none());
    }

    #[test]
    fn ledger_drops_containers_without_a_runtime_directory() {
        let dir = tempfile::tempdir().unwrap();
        let ground = Ground::new(Places::below(dir.path()));
        fs::create_dir_all(ground.run_dir(&id(1))).unwrap();
        write(&ground, &ledger(&[(1, 500, None), (2, 500, None)])).unwrap();
        assert_eq!(read(&ground).unwrap().granted.into_keys().collect::<Vec<_>>(), [id(1)]);
        assert_eq!(granted(&ground).unwrap().len(), 1);
        write(&ground, &Ledger::default()).unwrap();
        assert!(!path(&ground).exists(), "an empty ledger is no file");
        assert!(granted(&ground).unwrap().is_empty());
    }

    #[test]
    fn entry_counts_while_its_container_is_locked_or_lives() {
        let dir = tempfile::tempdir().unwrap();
        let ground = Ground::new(Places::below(dir.path()));
        assert!(!lives(&ground, &id(1)), "removed");
        fs::create_dir_all(ground.dir(&id(1))).unwrap();
        ground.write_config(&ground.dir(&id(1)), &config(1)).unwrap();
        assert!(!lives(&ground, &id(1)), "it has no process");
        let _lock = ground.lock(&id(1)).unwrap();
        assert!(lives(&ground, &id(1)), "a verb works on it");
    }
}
