//! `update`: limits, policies and addresses of an existing container.
//!
//! Uses `ground`, `state`, `deal`, `usage`, `contract`, `view`, `sysinfo`, `net`, `rate`, `bandwidth`, `drive`,
//! `freeze`, `pending`, `spare`, `socket`, `end` and `shortage`.

use std::os::fd::AsFd;

use dormouse_kernel::cgroup::Cgroup;
use dormouse_model::{CPU_WEIGHT, ContainerId, Evict, Limits, OutOfMemory, State};

use crate::error::Result;
use crate::ground::Ground;
use crate::pending::{self, Intent};
use crate::spec::{self, Update};
use crate::{
    bandwidth, contract, deal, drive, end, freeze, net, rate, shortage, socket, spare, state,
    sysinfo, usage, view,
};

/// Changes limits, policies and addresses; of a running container at once. Returns whether it sleeps for want of
/// memory, and is to wake now.
pub(crate) fn update(ground: &Ground, id: &ContainerId, update: &Update) -> Result<bool> {
    let _lock = ground.lock(id)?;
    let mut config = ground.config(id)?;
    let mut before = config.clone();
    let observed = state::observe_locked(ground, &config)?;
    let alive = observed.is_alive();
    // What it has was made for the present configuration.
    end::cool_locked(ground, &config)?;
    drive::check_change(ground, &before, &update.limits)?;
    config.spec.limits.replace(&update.limits);
    contract::check(ground, &config.spec.limits)?;
    spec::bandwidth_allowed(&config.spec)?;
    let is_memory = update.limits.memory_max_bytes.or(update.limits.swap_max_bytes).is_some();
    if observed.state == State::Asleep && is_memory {
        usage::check_wake_fits(ground, &before, &config.spec.limits)?;
    }
    if let Some(restart) = update.restart {
        config.spec.restart = restart;
    }
    if let Some(sleep) = update.sleep {
        spec::sleep_allowed(sleep, config.spec.auto_remove)?;
        config.spec.sleep = sleep;
    }
    if let Some(drowsy) = update.drowsy {
        spec::long_enough(drowsy)?;
        config.spec.drowsy = drowsy;
    }
    if let Some(wake_on) = update.wake_on {
        config.spec.wake_on = wake_on;
    }
    config.spec.oom = update.oom.unwrap_or(config.spec.oom);
    spec::oom_allowed(&config.spec)?;
    config.spec.evict = update.evict.unwrap_or(config.spec.evict);
    spec::evict_allowed(&config.spec)?;
    spec::network_sleeps(&config.spec)?;
    contract::check_evict(ground, &config.spec)?;
    if observed.state == State::Asleep && bandwidth::is_in(&update.limits) {
        // ORDER: before the record changes, by which the end of a container knows whether it has a class. A wake
        // makes one.
        bandwidth::leave(ground, Some(&before))?;
    }
    if !update.ip_add.is_empty() || !update.ip_rm.is_empty() {
        // ORDER: with the limits on record: new ones may be refused.
        let state = observed.state;
        spare::allocate(ground, || net::update_addresses(ground, &mut before, update, state))?;
        config.addresses.clone_from(&before.addresses);
    }
    let changed = alive && update.limits != dormouse_model::Limits::default();
    let cgroup = changed.then(|| state::cgroup(ground, &config)).transpose()?;
    // ORDER: on record, then in force: a command that finds the intent applies the record. A reservation is
    // admitted before: a refused one changes nothing.
    let _doing = changed.then(|| pending::intend(ground, id, &Intent::Limits)).transpose()?;
    if changed {
        contract::admit(ground, &config, &config.spec.limits)?;
    }
    let is_bandwidth = changed && bandwidth::is_in(&update.limits);
    let record = || -> Result<()> {
        if is_bandwidth {
            bandwidth::give_up(ground, &before, &config)?;
        }
        ground.write_config(&ground.dir(id), &config)
    };
    record().inspect_err(|_| {
        let _ = contract::admit_again(ground, &before); // the first error is returned
        if is_bandwidth {
            let _ = bandwidth::set(ground, &before);
        }
    })?;
    let set = |cgroup: Cgroup| -> Result<()> {
        // ORDER: the lock is released before the limits of all are written, also those that were left to its holder.
        let writer = contract::hold_limits(ground, &update.limits)?;
        let set = cgroup.set(&in_kernel(&update.limits, &config.spec.limits));
        drop(writer);
        set?;
        if !update.limits.disk_rates.is_empty() {
            rate::set(ground, &config, &cgroup)?;
        }
        if bandwidth::is_in(&update.limits) {
            bandwidth::set(ground, &config)?;
        }
        if update.limits.pids_max.is_some() {
            deal::again(ground, &config);
        }
        if update.limits.sockets_max.is_some() {
            socket::set(ground, &config, &cgroup)?;
        }
        contract::balance_all(ground, &update.limits, &config.spec.limits)
    };
    // ORDER: last, because a drive that has grown stays so.
    let grow = || match update.limits.disk_bytes {
        Some(_) => drive::grow(ground, &config),
        None => Ok(()),
    };
    if let Err(e) = cgroup.map_or(Ok(()), set).and_then(|()| grow()) {
        (config.spec.limits, config.spec.restart) = (before.spec.limits, before.spec.restart);
        (config.spec.sleep, config.spec.drowsy) = (before.spec.sleep, before.spec.drowsy);
        (config.spec.wake_on, config.spec.oom) = (before.spec.wake_on, before.spec.oom);
        config.spec.evict = before.spec.evict;
        ground.write_config(&ground.dir(id), &config)?;
        // The first error is returned.
        if freeze::finish_limits(ground, &config).is_err() && is_bandwidth {
            let _ = bandwidth::set(ground, &config);
        }
        return Err(e);
    }
    if let Some(init) = observed.init.as_ref().filter(|_| changed)
        && let Some(process) = state::handle(init)
    {
        view::update(ground, &config, (init.pid, process.as_fd()))?;
        sysinfo::update(ground, &config)?;
    }
    let is_left_to_kernel = config.spec.oom != OutOfMemory::Sleep;
    let is_other_brink = is_left_to_kernel || update.limits.memory_max_bytes.is_some();
    let is_throttled =
        before.spec.evict == Evict::Throttle && before.spec.evict != config.spec.evict;
    if alive && (is_throttled || is_other_brink && before.spec.oom == OutOfMemory::Sleep) {
        // ORDER: before the event, by which a daemon sets its own. One that was killed has left the old one.
        shortage::run_free(ground, &config)?;
    }
    ground.record("update", id.as_str(), config.name.as_str(), &[]);
    let is_larger = config.spec.limits.memory_max_bytes > before.spec.limits.memory_max_bytes;
    Ok((is_larger || is_left_to_kernel)
        && observed.state == State::Asleep
        && state::slept(ground, id)?.is_some_and(|slept| slept.shortages.is_of_its_own()))
}

/// Returns the limits to be set in the kernel: those that change, and those that depend on them.
fn in_kernel(changed: &Limits, all: &Limits) -> Limits {
    let mut limits = changed.clone();
    // The weight of a container with a reservation is not its own, and may be none any longer.
    limits.cpu_reserve_milli = all.cpu_reserve_milli;
    // Of no file, and checked with the limit, which may be the one on record.
    limits.cpu_idle_rate_milli = None;
    if changed.cpu_reserve_milli.is_some() {
        limits.cpu_weight = all.cpu_weight.or(Some(CPU_WEIGHT));
    }
    // v1 has one limit of memory and swap. The limit of memory in force may be below the own one.
    if changed.memory_max_bytes.or(changed.swap_max_bytes).is_some() {
        limits.swap_max_bytes = all.swap_max_bytes;
        limits.memory_max_bytes = all.memory_max_bytes.or(Some(u64::MAX));
    }
    // A quota, its period and its burst are one setting. A daemon has changed it for an idle rate.
    let is_quota = changed.cpu_max_milli.is_some()
        || changed.cpu_period_us.is_some()
        || changed.cpu_idle_rate_milli.is_some()
        || changed.cpu_burst.is_some();
    if is_quota {
        limits.cpu_max_milli = all.cpu_max_milli;
        limits.cpu_period_us = all.cpu_period_us;
        limits.cpu_idle_rate_milli = all.cpu_idle_rate_milli;
        limits.cpu_burst = all.cpu_burst;
    }
    limits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_limit_takes_those_along_that_depend_on_it() {
        let all = Limits {
            cpu_max_milli: Some(1000),
            cpu_period_us: Some(10_000),
            cpu_reserve_milli: Some(500),
            pids_max: Some(5),
            ..Limits::default()
        };
        let pids = Limits { pids_max: Some(5), ..Limits::default() };
        let set = in_kernel(&pids, &all);
        assert_eq!((set.cpu_max_milli, set.cpu_weight, set.pids_max), (None, None, Some(5)));
        let period = Limits { cpu_period_us: Some(10_000), ..Limits::default() };
        assert_eq!(in_kernel(&period, &all).cpu_max_milli, Some(1000));
        let rate = Limits { cpu_idle_rate_milli: Some(0), ..Limits::default() };
        assert_eq!(in_kernel(&rate, &all).cpu_max_milli, Some(1000));
        let with_swap = Limits { swap_max_bytes: Some(7), ..all.clone() };
        let memory = Limits { memory_max_bytes: Some(9), ..Limits::default() };
        assert_eq!(in_kernel(&memory, &with_swap).swap_max_bytes, Some(7));
        let swap = Limits { swap_max_bytes: Some(7), ..Limits::default() };
        let with_memory = Limits { memory_max_bytes: Some(9), ..with_swap };
        assert_eq!(in_kernel(&swap, &with_memory).memory_max_bytes, Some(9));
        let none = Limits { cpu_reserve_milli: Some(0), ..all.clone() };
        let set = in_kernel(&Limits { cpu_reserve_milli: Some(0), ..Limits::default() }, &none);
        assert_eq!(set.cpu_weight, Some(CPU_WEIGHT), "the weight that was the reservation's");
    }
}
