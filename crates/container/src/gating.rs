//! Gates are loaded and unloaded, and containers are made known to them.
//!
//! A container is known by its cgroup and by its addresses. A start makes it known if gates are loaded, and a load
//! does so for all containers.
//!
//! ORDER: a load names the maps, and then looks for containers. A start makes the cgroup, and then looks for the maps.
//! So one of the two makes the container known, before a program of it runs or a gate does.
//!
//! A load that is killed leaves a part, which the next load or unload removes. Labels begin again after a load. What
//! was counted before is charged by the unload, before the figures are removed.
//!
//! **Changes of rules and accounts** are written to the disk, and then the table follows ([`change`]). A file in
//! `LIB/pending` marks the time in between, so that the next command finishes what a killed one has begun.
//!
//! Uses `ground`, `gates`, `account`, `socket`, `deal` and `disk`.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use dormouse_account::rule::{Gate, Table};
use dormouse_bpf::BpfError;
use dormouse_bpf::call::{count_runs, wait_for_programs};
use dormouse_bpf::gates::{self as programs, Edge, Gates, Home, Party, Rule, Set, Stat};
use dormouse_kernel::ErrorKind;
use dormouse_kernel::cgroup::Cgroup;
use dormouse_model::Config;

use crate::disk::{self, Lock};
use crate::error::{Error, Result};
use crate::ground::{self, Ground};
use crate::{account, bpffs, deal, gates, socket};

/// Makes a container with a new cgroup known. `netns` is the cookie of the stack of its domain.
pub(crate) fn enter(
    ground: &Ground,
    config: &Config,
    cgroup: &Cgroup,
    netns: Option<u64>,
) -> Result<()> {
    let Some(gates) = gates::find(ground)? else { return Ok(()) };
    let Some(id) = cgroup.v2_id() else { return Ok(()) };
    let party = account::party(ground, config)?;
    announce_at(ground, &gates, config, party)?;
    gates.enter(id, home(config, party, netns))?;
    let _ = refresh_for(ground, config); // an event has the cause
    Ok(())
}

fn home(config: &Config, party: Party, netns: Option<u64>) -> Home {
    Home { party, netns, is_shared: account::is_shared(config) }
}

/// Makes the addresses of a container known.
pub(crate) fn announce(ground: &Ground, config: &Config) -> Result<()> {
    let Some(gates) = gates::find(ground)? else { return Ok(()) };
    announce_at(ground, &gates, config, account::party(ground, config)?)
}

fn announce_at(ground: &Ground, gates: &Gates, config: &Config, party: Party) -> Result<()> {
    let indices = ground.network()?.indices(&config.addresses)?;
    Ok(indices.into_iter().try_for_each(|index| gates.announce(index, party))?)
}

/// A container was removed, and its name is free: its addresses and its rules are forgotten.
pub(crate) fn withdraw(ground: &Ground, config: &Config) -> Result<()> {
    let Some(gates) = gates::find(ground)? else { return Ok(()) };
    gates::withdraw(ground, &gates, config)?;
    if !refresh_for(ground, config) {
        // The next container may have its number, and is not to have its rules.
        let _alone = lock(ground)?;
        gates::find(ground)?.map_or(Ok(()), |gates| gates.apply(&[], &[], &[]))?;
    }
    Ok(())
}

fn lock(ground: &Ground) -> Result<Lock> {
    Lock::take_new(&ground.places.run.join("gates.lock"))
}

fn of(gate: Gate) -> programs::Gate {
    match gate {
        Gate::Receive => programs::Gate::Receive,
        Gate::Send => programs::Gate::Send,
        Gate::Fork => programs::Gate::Fork,
        Gate::Exec => programs::Gate::Exec,
        Gate::Create => programs::Gate::Create,
        Gate::Open => programs::Gate::Open,
        Gate::Message => programs::Gate::Message,
        Gate::Pipe => programs::Gate::Pipe,
        Gate::Semaphore => programs::Gate::Semaphore,
        Gate::Shm => programs::Gate::Shm,
    }
}

/// Returns these gates, if the kernel takes them, or all that it takes if none is named.
fn choose(named: &[Gate]) -> Result<Vec<Gate>> {
    let mut chosen = if named.is_empty() { Gate::ALL.to_vec() } else { named.to_vec() };
    for set in Set::ALL.into_iter().filter(|set| *set != Set::Tracepoints) {
        let is_of_set = |gate: &Gate| of(*gate).set() == set;
        let Some(first) = chosen.iter().copied().find(is_of_set) else { continue };
        match programs::supported(set) {
            Ok(()) => {}
            Err(_) if named.is_empty() => chosen.retain(|gate| !is_of_set(gate)),
            Err(source) => {
                return Err(Error::GateRefused { gate: first.name(), why: why(source) });
            }
        }
    }
    Ok(chosen)
}

/// Loads these gates and no others, with the table of the rules, or all that the kernel takes if none is named.
/// Containers may run meanwhile. Returns what is loaded.
pub(crate) fn load(ground: &Ground, named: &[Gate]) -> Result<Vec<Gate>> {
    // Before others are unloaded.
    let which = choose(named)?;
    let _alone = lock(ground)?;
    let Some(parent) = ground.cgroups()?.v2_parent()? else {
        return Err(Error::Invalid(
            "gates need a cgroup v2 hierarchy: mount one with `mount -t cgroup2 none /sys/fs/cgroup/unified`".into(),
        ));
    };
    unload_alone(ground)?;
    let place = gates::place(ground);
    bpffs::mount(&place)?;
    load_at(ground, &place, &which, parent.as_fd()).inspect_err(|_| {
        let _ = unload_alone(ground); // the first error is the one to return
    })?;
    // A daemon has debts paid from now on.
    ground.record("gates_loaded", "", "", &[]);
    Ok(which)
}

fn load_at(ground: &Ground, place: &Path, which: &[Gate], parent: BorrowedFd<'_>) -> Result<()> {
    let which: Vec<_> = which.iter().map(|gate| of(*gate)).collect();
    let loaded = Gates::load(place, ground.network()?.program_constants()?, &which)?;
    let gates = loaded.gates();
    apply_at(gates, &account::table(ground)?)?;
    for id in ground.ids()? {
        let config = match ground.config(&id) {
            Err(Error::NoContainer(_) | Error::Corrupt { .. }) => continue,
            other => other?,
        };
        let party = account::party(ground, &config)?;
        announce_at(ground, gates, &config, party)?;
        let cgroup = ground.cgroups()?.find(id.as_str())?;
        if let Some(id) = cgroup.and_then(|cgroup| cgroup.v2_id()) {
            let netns = ground.network()?.netns_cookie(id)?;
            gates.enter_new(id, home(&config, party, netns))?;
        }
    }
    let gates = loaded.attach(parent)?;
    agree_at(ground, &gates, parent)
}

/// Makes the hosts with which accounts are shared, and these accounts, known.
fn agree_at(ground: &Ground, gates: &Gates, parent: BorrowedFd<'_>) -> Result<()> {
    let hosts = account::hosts(ground)?;
    let hosts: Vec<_> = hosts.iter().map(|host| host.mapped()).collect();
    Ok(gates.agree(&hosts, &account::shared(ground)?, parent)?)
}

fn apply_at(gates: &Gates, table: &Table) -> Result<()> {
    let rule = |row: &dormouse_account::rule::Row| Rule {
        gate: row.gate,
        becomes: row.becomes,
        account: row.account,
        home: row.home,
        label: row.label,
        peer: row.peer,
        below: row.below,
        port: row.port,
        owner: row.owner,
        path: row.path,
        reserved: 0,
    };
    let rows: Vec<Rule> = table.of_file().map(rule).collect();
    Ok(gates.apply(&rows, &table.lines, &table.paths)?)
}

/// Kind of the file that marks a change in progress.
pub(crate) const CHANGE: &str = "table";

/// Changes what the table is made from, and puts the new one in force, if gates are loaded. Limits of sockets and
/// tasks follow as well, which need no gates.
///
/// ORDER: the mark is there before the change, and until the table is in force.
pub(crate) fn change<T>(ground: &Ground, change: impl FnOnce() -> Result<T>) -> Result<T> {
    let pending = ground.places.pending();
    let mark = pending.join(format!("{CHANGE}-{}", ground::new_id()?));
    let _lock = {
        let _making = Lock::share(&pending)?;
        Lock::take_new(&mark)?
    };
    let changed = change();
    // A change that has failed may have been made all the same.
    let refreshed = follow(ground);
    if refreshed.is_ok() {
        disk::remove(&mark)?;
    }
    let value = changed?;
    refreshed.map(|()| value)
}

/// Finishes the change of a killed command. A table that cannot be made now is left to the next command.
pub(crate) fn finish_change(ground: &Ground, mark: &Path) -> Result<bool> {
    match follow(ground) {
        Ok(()) => {
            // The killed command may have said nothing to the daemon.
            account::record_change(ground);
            disk::remove(mark).map(|()| true)
        }
        Err(_) => Ok(false),
    }
}

/// Has the kernel follow the disk.
fn follow(ground: &Ground) -> Result<()> {
    refresh(ground)?;
    socket::follow(ground)?;
    deal::follow(ground)
}

/// Puts the table of the rules, which have changed, in force, if gates are loaded.
///
/// ORDER: read under the lock: of two changes the later one has the last word.
fn refresh(ground: &Ground) -> Result<()> {
    if gates::find(ground)?.is_none() {
        return Ok(());
    }
    let _alone = lock(ground)?;
    match gates::find(ground)? {
        Some(gates) => {
            apply_at(&gates, &account::table(ground)?)?;
            let parent = ground.cgroups()?.v2_parent()?;
            parent.map_or(Ok(()), |parent| agree_at(ground, &gates, parent.as_fd()))
        }
        None => Ok(()),
    }
}

/// The same after a container has its name, or has it no more. Rules that cannot be read stop no container: the old
/// table stays in force, and an event has the cause. Returns whether the table is in force.
pub(crate) fn refresh_for(ground: &Ground, config: &Config) -> bool {
    let step = || match gates::find(ground)? {
        Some(_) if account::depends_on(ground, config)? => refresh(ground),
        _ => Ok(()),
    };
    let done = step();
    if let Err(e) = &done {
        let (id, name) = (config.id.as_str(), config.name.as_str());
        ground.record("rules_unapplied", id, name, &[("error", e.with_causes())]);
    }
    done.is_ok()
}

/// Unloads all gates. Returns whether some were loaded.
pub(crate) fn unload(ground: &Ground) -> Result<bool> {
    if !bpffs::is_mounted(&gates::place(ground)) {
        return Ok(false);
    }
    let _alone = lock(ground)?;
    let was_there = unload_alone(ground)?;
    ground.record("gates_unloaded", "", "", &[]);
    Ok(was_there)
}

/// ORDER: the programs end, the last figures are charged, the figures are removed.
fn unload_alone(ground: &Ground) -> Result<bool> {
    let place = gates::place(ground);
    let mut was_there = false;
    while bpffs::is_mounted(&place) {
        was_there = true;
        Gates::detach(&place)?;
        wait_for_programs();
        if gates::find(ground)?.is_some() {
            account::update(ground)?;
        }
        Gates::remove(&place)?;
        bpffs::unmount(&place)?;
    }
    bpffs::remove(&place)?;
    Ok(was_there)
}

/// Counts for this time which container has received data from which account, and returns the counts.
///
/// A killed trace goes on counting, without a bound but the table's, until the next trace ends or the gates are
/// unloaded.
pub(crate) fn trace(ground: &Ground, during: Duration) -> Result<Vec<Edge>> {
    let find = || match gates::find(ground)? {
        Some(gates) if gates.is_tracing_possible() => Ok(gates),
        _ => Err(Error::Invalid(
            "a trace needs the gate that sees data arrive: `dormouse gate load receive`".into(),
        )),
    };
    let _alone = Lock::take_new(&ground.places.run.join("trace.lock"))?;
    find()?.trace(true)?;
    std::thread::sleep(during);
    let gates = find()?; // not those of another load
    gates.trace(false)?;
    Ok(gates.edges()?)
}

/// A gate as verbs show it.
#[derive(Debug, Clone)]
pub struct GateState {
    /// The gate.
    pub gate: Gate,
    /// Its counters; `None` if it is not loaded.
    pub stat: Option<Stat>,
    /// The reason for which this kernel does not take it, if that was asked.
    pub lack: Option<String>,
}

/// The reason for which a kernel does not take gates, in a line.
fn why(error: BpfError) -> String {
    const EPERM: i32 = rustix::io::Errno::PERM.raw_os_error();
    match &error {
        BpfError::Load { .. } if error.kind() == ErrorKind::Os(EPERM) => {
            "the kernel permits no such BPF programs (EPERM)".into()
        }
        BpfError::Inactive => error.to_string(),
        _ => Error::from(error).with_causes(),
    }
}

/// Returns all gates, each with the reason for which this kernel does not take it.
pub(crate) fn list_with_lacks(ground: &Ground) -> Result<Vec<GateState>> {
    let mut gates = list(ground, None)?.0;
    let mut lacks = Vec::new();
    for set in Set::ALL {
        // Loaded ones are the proof.
        if gates.iter().any(|state| state.stat.is_some() && of(state.gate).set() == set) {
            continue;
        }
        if let Err(e) = programs::supported(set) {
            lacks.push((set, why(e)));
        }
    }
    for state in &mut gates {
        let lack = lacks.iter().find(|(set, _)| *set == of(state.gate).set());
        state.lack = lack.map(|(_, why)| why.clone());
    }
    Ok(gates)
}

/// Returns all gates, and the programs that they share, if one is loaded. With `during`, runs are counted for this
/// time, and the counters are those of it.
pub(crate) fn list(
    ground: &Ground,
    during: Option<Duration>,
) -> Result<(Vec<GateState>, Vec<Stat>)> {
    let read =
        || gates::find(ground)?.map_or(Ok(Vec::new()), |gates| Ok::<_, Error>(gates.stats()?));
    let stats = match during {
        None => read()?,
        Some(time) => {
            let counting = count_runs().map_err(dormouse_bpf::BpfError::from)?;
            let before = read()?;
            std::thread::sleep(time);
            let after = read()?;
            drop(counting);
            after.into_iter().map(|stat| since(&before, stat)).collect()
        }
    };
    let state = |gate| GateState {
        gate,
        stat: stats.iter().find(|stat| stat.gate == Some(of(gate))).cloned(),
        lack: None,
    };
    let gates = Gate::ALL.map(state).to_vec();
    Ok((gates, stats.into_iter().filter(|stat| stat.gate.is_none()).collect()))
}

/// Returns what the counters of a program have beyond earlier ones.
fn since(before: &[Stat], mut stat: Stat) -> Stat {
    let is_same = |old: &&Stat| old.program == stat.program && old.gate == stat.gate;
    if let Some(old) = before.iter().find(is_same) {
        stat.runs.count -= old.runs.count.min(stat.runs.count);
        stat.runs.ns -= old.runs.ns.min(stat.runs.ns);
        stat.passages -= old.passages.min(stat.passages);
        stat.changed -= old.changed.min(stat.changed);
        stat.unknown -= old.unknown.min(stat.unknown);
        stat.full -= old.full.min(stat.full);
        stat.refused -= old.refused.min(stat.refused);
    }
    stat
}
