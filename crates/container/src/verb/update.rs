//! `update`: limits, policies and addresses of an existing container.
//!
//! Uses `ground`, `state`, `usage`, `net`, `freeze` and `pending`.

use dormouse_model::{ContainerId, State};

use crate::error::Result;
use crate::ground::Ground;
use crate::pending::{self, Intent};
use crate::spec::{self, Update};
use crate::{freeze, net, state, usage};

/// Changes limits, policies and addresses; of a running container at once.
pub(crate) fn update(ground: &Ground, id: &ContainerId, update: &Update) -> Result<()> {
    let _lock = ground.lock(id)?;
    let mut config = ground.config(id)?;
    let before = config.clone();
    let observed = state::observe_locked(ground, &config)?;
    let alive = observed.is_alive();
    let l = &mut config.spec.limits;
    let new = update.limits.clone();
    l.cpu_max_milli = new.cpu_max_milli.or(l.cpu_max_milli);
    l.cpu_weight = new.cpu_weight.or(l.cpu_weight);
    l.cpuset_cpus = new.cpuset_cpus.or(l.cpuset_cpus.take());
    l.memory_max_bytes = new.memory_max_bytes.or(l.memory_max_bytes);
    l.swap_max_bytes = new.swap_max_bytes.or(l.swap_max_bytes);
    l.pids_max = new.pids_max.or(l.pids_max);
    l.io_weight = new.io_weight.or(l.io_weight);
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
    if !update.ip_add.is_empty() || !update.ip_rm.is_empty() {
        net::update_addresses(ground, &mut config, update, alive)?;
    }
    let changed = alive && update.limits != dormouse_model::Limits::default();
    let cgroup = changed.then(|| state::cgroup(ground, &config)).transpose()?;
    // ORDER: on record, then in force: a command that finds the intent applies the record.
    let _doing = changed.then(|| pending::intend(ground, id, &Intent::Limits)).transpose()?;
    ground.write_config(&ground.dir(id), &config)?;
    if let Some(Err(e)) = cgroup.map(|cgroup| cgroup.set(&update.limits)) {
        (config.spec.limits, config.spec.restart) = (before.spec.limits, before.spec.restart);
        (config.spec.sleep, config.spec.drowsy) = (before.spec.sleep, before.spec.drowsy);
        config.spec.wake_on = before.spec.wake_on;
        ground.write_config(&ground.dir(id), &config)?;
        let _ = freeze::finish_limits(ground, &config); // the first error is returned
        return Err(e.into());
    }
    ground.record("update", id.as_str(), config.name.as_str(), &[]);
    Ok(())
}
