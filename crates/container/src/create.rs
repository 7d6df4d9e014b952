//! Creation of a container, its name, and the request for a clone.
//!
//! Uses `ground`, `net`, `pending` and `layer`.

use std::fs;
use std::net::IpAddr;
use std::path::Path;

use dormouse_image::Store;
use dormouse_model::{Config, ContainerId, Name, NetMode, RootSource};

use crate::disk::Lock;
use crate::error::{Error, Result};
use crate::ground::{self, Ground};
use crate::pending::{self, Intent, New};
use crate::spec::{self, Create};
use crate::{event, layer, net};

/// A container that was just created and is still locked: no other command starts, changes or
/// removes it while this exists.
#[derive(Debug)]
pub struct Created {
    /// Its configuration.
    pub config: Config,
    #[expect(dead_code, reason = "held, not read")]
    lock: Lock,
}

/// Creates a container: its name, ids, addresses and empty writable layer. No process runs.
///
/// ORDER: everything is made inside a directory that is not visible yet; its lock shows that
/// this create is in progress, and one rename publishes it. A failure releases what was taken.
/// For a killed create the next command does that ([`crate::pending`]).
pub(crate) fn create(ground: &Ground, create: Create) -> Result<Created> {
    create_with(ground, create, |_, _| Ok(()))
}

/// Creates a container with further content: `fill` puts it into the container's directory.
pub(crate) fn create_with(
    ground: &Ground,
    create: Create,
    fill: impl FnOnce(&Config, &Path) -> Result<()>,
) -> Result<Created> {
    let (config, new) = draft(ground, create, |config, dir| {
        fill(config, dir)?;
        ground.write_config(dir, config)
    })?;
    match publish(ground, &config, &new) {
        Ok(()) => Ok(Created { config, lock: new.lock }),
        Err(e) => {
            let _ = pending::abandon(ground, &config.id, &config.name, &new); // the first error is returned
            Err(e)
        }
    }
}

/// Makes a container up to its publication: `fill` puts the rest into its directory, the record
/// last.
pub(crate) fn draft(
    ground: &Ground,
    create: Create,
    fill: impl FnOnce(&Config, &Path) -> Result<()>,
) -> Result<(Config, New)> {
    let id = ground::new_id()?;
    spec::validate(&create)?;
    let new = pending::begin(ground, &id)?;
    let name = create.name.clone();
    match create_in(ground, &new.dir, &id, create, fill) {
        Ok(config) => Ok((config, new)),
        Err(e) => {
            let _ = pending::abandon(ground, &id, &name, &new); // the first error is returned
            Err(e)
        }
    }
}

/// Publishes a container: from now on all commands find it.
pub(crate) fn publish(ground: &Ground, config: &Config, new: &New) -> Result<()> {
    let dir = ground.dir(&config.id);
    fs::rename(&new.dir, &dir).map_err(Error::file("cannot publish", &dir))?;
    ground.record("create", config.id.as_str(), config.name.as_str(), &[]);
    Ok(())
}

fn create_in(
    ground: &Ground,
    new: &Path,
    id: &ContainerId,
    create: Create,
    fill: impl FnOnce(&Config, &Path) -> Result<()>,
) -> Result<Config> {
    take_name(ground, &create.name, id)?;
    let ids = ground.slots.take(create.wide_ids, id)?;
    if let RootSource::Image { id: image, .. } = &create.root
        && create.image.is_none()
    {
        ground.images()?.find(image)?;
    }
    let addresses = match &create.net {
        NetMode::Address { domain } => ground.network()?.allocate(domain, id, &create.addresses)?,
        NetMode::Host | NetMode::None => Vec::new(),
    };
    let hostname = create.hostname.unwrap_or_else(|| id.short().to_owned());
    let config = Config {
        version: 1,
        id: id.clone(),
        name: create.name,
        created_unix_s: event::now_unix_ms() / 1000,
        root: create.root,
        ids,
        process: create.process,
        security: create.security,
        hostname,
        domainname: create.domainname,
        extra_hosts: create.extra_hosts,
        dns: create.dns,
        anonymous_volumes: create.anonymous_volumes,
        mounts: create.mounts,
        net: create.net,
        addresses,
        publish: create.publish,
        limits: create.limits,
        restart: create.restart,
        sleep: create.sleep,
        drowsy: create.drowsy,
        wake_on: create.wake_on,
        auto_remove: create.auto_remove,
        read_only: create.read_only,
        init: create.init,
        systemd: create.systemd,
        log_max_bytes: create.log_max_bytes,
        stop_signal: create.stop_signal,
        stop_timeout_s: create.stop_timeout_s,
        labels: create.labels,
        sysctls: create.sysctls,
    };
    Store::create_upper(new, &ids, &layer::lower(ground, &config.root)?)?;
    fill(&config, new)?;
    Ok(config)
}

/// Takes a name, also from a holder that no longer exists: a create or a removal that was
/// killed between its two steps.
fn take_name(ground: &Ground, name: &Name, id: &ContainerId) -> Result<()> {
    let taken = ground.names.take(name, id);
    let Err(Error::NameTaken { .. }) = &taken else { return taken };
    if let Some(holder) = ground.names.holder(name)?
        && !ground.dir(&holder).exists()
        && !pending::is_being_created(ground, &holder)?
    {
        ground.names.release(name, &holder)?;
        return ground.names.take(name, id);
    }
    taken
}

/// Renames a container.
pub(crate) fn rename(ground: &Ground, id: &ContainerId, name: &Name) -> Result<()> {
    let _lock = ground.lock(id)?;
    let mut config = ground.config(id)?;
    let old = std::mem::replace(&mut config.name, name.clone());
    if old == *name {
        return Ok(());
    }
    // ORDER: new name, configuration, old name: a kill leaves one name too many, never none,
    // and the next command releases that.
    let _intent =
        pending::intend(ground, id, &Intent::Rename { names: [old.clone(), name.clone()] })?;
    take_name(ground, name, id)?;
    ground.write_config(&ground.dir(id), &config).inspect_err(|_| {
        let _ = ground.names.release(name, id); // the first error is returned
    })?;
    ground.names.release(&old, id)?;
    net::rename(ground, &config)?;
    ground.record("rename", id.as_str(), name.as_str(), &[("old_name", old.to_string())]);
    Ok(())
}

/// Derives the request for a clone from a container's configuration.
pub(crate) fn request_like(
    other: &Config,
    name: Name,
    addresses: Vec<IpAddr>,
    root: RootSource,
) -> Create {
    let own_name = other.hostname != other.id.short();
    let other = other.clone();
    Create {
        name,
        root,
        image: None,
        process: other.process,
        security: other.security,
        hostname: own_name.then_some(other.hostname),
        domainname: other.domainname,
        mounts: other.mounts,
        anonymous_volumes: Vec::new(),
        net: other.net,
        addresses,
        // The host's ports lead to the other container.
        publish: Vec::new(),
        extra_hosts: other.extra_hosts,
        dns: other.dns,
        limits: other.limits,
        restart: other.restart,
        sleep: other.sleep,
        drowsy: other.drowsy,
        wake_on: other.wake_on,
        auto_remove: other.auto_remove,
        read_only: other.read_only,
        init: other.init,
        systemd: other.systemd,
        stop_signal: other.stop_signal,
        stop_timeout_s: other.stop_timeout_s,
        labels: other.labels,
        sysctls: other.sysctls,
        wide_ids: other.ids.wide,
        log_max_bytes: other.log_max_bytes,
    }
}

/// Pairs the other container's addresses with those of the clone.
pub(crate) fn address_pairs(other: &Config, clone: &Config) -> Vec<(IpAddr, IpAddr)> {
    other.addresses.iter().copied().zip(clone.addresses.iter().copied()).collect()
}
