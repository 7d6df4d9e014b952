//! `restore`, and clones from a checkpoint.
//!
//! Uses `ground`, `state`, `saved`, `silence`, `later`, `end`, `net`, `create`, `restore`,
//! `template`, `remove`, `view` and `start`.

use std::net::IpAddr;
use std::sync::Arc;

use dormouse_model::{Config, ContainerId, Name, NetMode, RootSource, State};
use dormouse_parcel::Reader;

use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::restore::{Check, RestorePlan};
use crate::saved::{self, From};
use crate::silence::{self, Saved};
use crate::start::{self, Running};
use crate::template::Template;
use crate::{create, end, later, net, remove, state, view};

/// Restores the processes of a stopped container.
pub(crate) fn restore(
    ground: &Ground,
    id: &ContainerId,
    from: &From,
    lazy: bool,
) -> Result<Running> {
    let _lock = ground.lock(id)?;
    let config = ground.config(id)?;
    let observed = state::observe(ground, &config)?;
    if observed.is_alive() {
        return Err(Error::state(&config, observed.state, "stop it first"));
    }
    if observed.state == State::Asleep {
        return Err(Error::state(&config, observed.state, "wake it, or stop it first"));
    }
    let path = saved::find(ground, &config, from)?;
    let reader = Reader::open(&path)?;
    let whose = &reader.records().about.container;
    if whose != id.as_str() {
        return Err(Error::Invalid(format!(
            "the checkpoint is of container {whose}: this container does not have its files"
        )));
    }
    let later = if lazy { later::choose(ground, id, &reader)? } else { None };
    end::settle_locked(ground, &config, false)?;
    let mut comeback = RestorePlan::verified(Arc::new(reader));
    let first = saved::first(ground, id, &path);
    comeback.device = first.as_ref().and_then(|first| first.device);
    comeback.user = first.and_then(|first| first.user);
    // No process runs before it is done, and damage is rare.
    comeback.check = Some(Check::begin(&comeback.reader, later.as_ref()));
    comeback.later = later;
    // Recorded rules may be missing in the host's stack, for example after a reboot.
    let is_news = silence::record(ground, &config, comeback.reader.records(), Saved::Before)?;
    comeback.keeps_quiet =
        is_news || silence::is_quiet(ground, id) && config.spec.net == NetMode::Host;
    let running = start::start_restored(ground, &config, &comeback, None)?;
    if matches!(config.spec.net, NetMode::Private { .. }) {
        // A restore ends those in the container's stack.
        net::end_quiet(ground, &config)?;
    }
    silence::forget(ground, id)?; // the rules were removed from the stack
    Ok(running)
}

/// Makes a container like another, with its own name, ids and addresses (`addresses`, or some
/// of the pool). Its root has the files of the other, and its processes come from a checkpoint
/// of the other.
pub(crate) fn clone_of(
    ground: &Ground,
    other: &Config,
    name: Name,
    addresses: Vec<IpAddr>,
    root: RootSource,
    template: &Template,
) -> Result<Running> {
    let (common, user) = (template.common.clone(), template.user.clone());
    let verified = RestorePlan::verified(Arc::clone(&template.reader));
    let mut comeback = RestorePlan { beside: true, common, user, ..verified };
    let request = create::request_like(other, name, addresses, root);
    // The clock of a spare with views has begun: a checkpoint with the host's clock needs one that has not.
    let may_take_spare = comeback.may_take_spare() && !view::has_of(&request.spec);
    let memory_bytes = comeback.memory_bytes();
    let mut created = create::create_to_restore(ground, request, memory_bytes, may_take_spare)?;
    comeback.addresses = create::address_pairs(other, &created.config);
    let spare = created.spare.take();
    start::start_restored(ground, &created.config, &comeback, spare)
        .inspect_err(|_| remove::discard(ground, created))
}
