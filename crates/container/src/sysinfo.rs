//! sysinfo(2) in a container with views, by a BPF program that changes what the call returns.
//!
//! The daemon loads the program once the first container has views. `RUN/sysinfo`, a bpffs, keeps it: after SIGKILL of
//! the daemon the call stays as it is. The program is removed with the file system of views. Starts and updates make
//! their container known to it, where it is loaded; a load does so for all containers.
//!
//! ORDER: a load attaches the program and names its map, and then looks for containers. A start makes the cgroup, and
//! then looks for the map. So one of the two makes the container known.
//!
//! LIMIT: without the program (a kernel in lockdown, or without trampolines of BPF) the call returns memory and load of
//! the host.
//!
//! Uses `ground`, `disk` and `view`.

use std::collections::HashMap;
use std::time::Duration;

use dormouse_bpf::sysinfo::{Memory, Sysinfo, View};
use dormouse_kernel::cgroup::{Cgroup, Hierarchy};
use dormouse_model::Config;

use crate::bpffs;
use crate::disk::Lock;
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::place::Places;
use crate::view::{self, Viewed, boot_ns, has};

/// Containers that have not called for so long are not measured.
const CALLED_WITHIN: Duration = Duration::from_secs(60);

/// LIMIT: containers that are measured at once; others have older numbers.
const MEASURED_MAX: usize = 256;

fn lock(ground: &Ground) -> Result<Lock> {
    Lock::take_new(&ground.places.sysinfo().with_extension("lock"))
}

/// Whether the program is loaded.
pub(crate) fn is_loaded(ground: &Ground) -> bool {
    Sysinfo::find(&ground.places.sysinfo()).is_ok_and(|found| found.is_some())
}

/// Makes a container known, of which no process has run yet. One without views is not.
pub(crate) fn enter(ground: &Ground, config: &Config, cgroup: &Cgroup) -> Result<()> {
    if !has(config) {
        return Ok(());
    }
    match Sysinfo::find(&ground.places.sysinfo())? {
        Some(sysinfo) => enter_at(ground, &sysinfo, config, cgroup),
        None => Ok(()),
    }
}

fn enter_at(ground: &Ground, sysinfo: &Sysinfo, config: &Config, cgroup: &Cgroup) -> Result<()> {
    let Some(id) = cgroup.v2_id() else { return Ok(()) };
    let before = sysinfo.get(id)?.unwrap_or_default();
    let shared_bytes = before.memory.map_or(0, |memory| memory.shared_bytes);
    let memory = view::memory_of(config)?.map(|(bytes, swap_bytes)| Memory {
        bytes,
        swap_bytes,
        shared_bytes,
    });
    let seen = View { base: config.ids.base, memory, ..before };
    Ok(sysinfo.set(id, &seen, ground.cgroups()?.keeps_memory())?)
}

/// Changes what a running container sees after its limits have changed.
pub(crate) fn update(ground: &Ground, config: &Config) -> Result<()> {
    if !has(config) || !is_loaded(ground) {
        return Ok(());
    }
    let Some(cgroup) = ground.cgroups()?.find(config.id.as_str())? else { return Ok(()) };
    // ORDER: one at a time with measurements, which write a whole entry.
    let _alone = lock(ground)?;
    enter(ground, config, &cgroup)
}

/// Forgets a container without processes. Its cgroup still exists.
pub(crate) fn leave(ground: &Ground, config: Option<&Config>, cgroup: &Cgroup) -> Result<()> {
    if config.is_some_and(|config| !has(config)) {
        return Ok(());
    }
    let Some(sysinfo) = Sysinfo::find(&ground.places.sysinfo())? else { return Ok(()) };
    cgroup.v2_id().map_or(Ok(()), |id| Ok(sysinfo.leave(id)?))
}

/// Removes the program. The caller ensures that no container runs or starts.
pub(crate) fn unload(ground: &Ground) -> Result<()> {
    let place = ground.places.sysinfo();
    while bpffs::is_mounted(&place) {
        bpffs::unmount(&place)?;
    }
    bpffs::remove(&place)
}

/// The calls of all containers of an instance, for the daemon.
#[derive(Debug)]
pub struct SysinfoCalls {
    places: Places,
    measured: HashMap<u64, Viewed>,
}

impl SysinfoCalls {
    /// Loads the program, if it is not there, and makes all running containers known.
    ///
    /// Errors: the kernel refuses the program, or has no cgroup v2.
    pub fn load(places: &Places) -> Result<Self> {
        let ground = Ground::new(places.clone());
        // Nothing removes what is made here meanwhile.
        let _in_use = ground.in_use()?;
        let _alone = lock(&ground)?;
        let place = places.sysinfo();
        let cgroups = ground.cgroups()?;
        if cgroups.v2_parent()?.is_none() {
            return Err(Error::Invalid("there is no cgroup v2 hierarchy".into()));
        }
        if Sysinfo::find(&place)?.is_none() {
            unload(&ground)?;
            bpffs::mount(&place)?;
            let level = places.cgroup.split('/').count() as u32 + 1;
            if Sysinfo::load(&place, level).is_err() {
                let _ = unload(&ground); // the first error is the one to return
                let what = "this kernel refuses the BPF program: `dormouse check` has the reason";
                return Err(Error::Invalid(what.into()));
            }
        }
        let Some(sysinfo) = Sysinfo::find(&place)? else {
            return Ok(Self { places: places.clone(), measured: HashMap::new() });
        };
        for id in ground.started()? {
            // One that ends just now needs no entry.
            let Ok(config) = ground.config(&id) else { continue };
            let Some(cgroup) = cgroups.find(id.as_str())?.filter(|_| has(&config)) else {
                continue;
            };
            enter_at(&ground, &sysinfo, &config, &cgroup)?;
        }
        Ok(Self { places: places.clone(), measured: HashMap::new() })
    }

    /// Measures load and shared memory of the containers that have called lately. Returns false if the program is no
    /// longer loaded.
    pub fn measure(&mut self) -> Result<bool> {
        let ground = Ground::new(self.places.clone());
        let place = self.places.sysinfo();
        let Some(sysinfo) = Sysinfo::find(&place)? else { return Ok(false) };
        let now_ns = boot_ns().unsigned_abs();
        let is_new = |seen: &View| {
            let since_ns = now_ns.saturating_sub(seen.called_ns);
            seen.called_ns > 0 && since_ns < CALLED_WITHIN.as_nanos() as u64
        };
        let mut called = sysinfo.all()?;
        called.retain(|(_, seen)| is_new(seen));
        called.truncate(MEASURED_MAX);
        self.measured.retain(|id, viewed| {
            viewed.is_current() && called.iter().any(|(called, _)| called == id)
        });
        if called.is_empty() {
            return Ok(true);
        }
        // A hierarchy has descriptors of cgroups that may have been removed with the last container.
        let cgroups = Hierarchy::open(&self.places.cgroup)?;
        for (id, seen) in called {
            if !self.measured.contains_key(&id) {
                match Viewed::open(&cgroups, &self.places.views(), seen.base)? {
                    Some(viewed) if viewed.cgroup_v2_id() == Some(id) => {
                        self.measured.insert(id, viewed);
                    }
                    // Left by a killed command.
                    _ => {
                        sysinfo.leave(id)?;
                        continue;
                    }
                }
            }
            let Some(viewed) = self.measured.get_mut(&id) else { continue };
            // One that ends just now is no reason to leave out the others.
            let Ok((loads, shared_bytes)) = viewed.measure() else { continue };
            let _alone = lock(&ground)?;
            let Some(now) = sysinfo.get(id)? else { continue };
            let memory = now.memory.map(|memory| Memory { shared_bytes, ..memory });
            sysinfo.set(id, &View { loads, memory, ..now }, cgroups.keeps_memory())?;
        }
        Ok(true)
    }
}
