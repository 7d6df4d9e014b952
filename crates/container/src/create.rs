//! Creation of a container, its name, and the request for a clone.
//!
//! Uses `ground`, `account`, `drive`, `contract`, `gating`, `view`, `net`, `pending`, `spare` and `layer`.

use std::fs;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::Path;

use dormouse_kernel::proc;
use dormouse_model::{Config, ContainerId, IdMap, IdSlot, Name, RootSource, Spec};

use crate::disk::{self, Lock};
use crate::error::{Error, Result};
use crate::ground::{self, CONFIG, Ground};
use crate::pending::{self, Intent, New};
use crate::spare::{self, Spare};
use crate::spec::{self, Create};
use crate::{account, contract, drive, event, gating, layer, net, view};

/// A container that was just created and is still locked: no other command starts, changes or
/// removes it while this exists.
#[derive(Debug)]
pub struct Created {
    /// Its configuration.
    pub config: Config,
    #[expect(dead_code, reason = "held, not read")]
    lock: Lock,
    #[expect(dead_code, reason = "held, not read")]
    drive: Option<OwnedFd>,
    /// Its parts that were made ahead, for the start.
    pub(crate) spare: Option<Spare>,
}

/// What follows the creation of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    /// Its start by the same process, which may take a spare.
    Start,
    /// Its start by another command, for which a spare may wait.
    StartLater,
    /// Content that no spare has.
    Rest,
}

/// Creates a container that is started at once: its name, ids, addresses and empty writable layer, of which some may
/// have been made ahead ([`crate::spare`]). No process runs.
///
/// ORDER: everything is made inside a directory that is not visible yet; its lock shows that
/// this create is in progress, and one rename publishes it. A failure releases what was taken.
/// For a killed create the next command does that ([`crate::pending`]).
pub(crate) fn create_to_start(ground: &Ground, create: Create) -> Result<Created> {
    create_then(ground, create, Then::Start, |_, _| Ok(()))
}

/// Creates a container for a checkpoint with this memory, from which it is started at once. `may_take_spare`: parts
/// made ahead are as the checkpoint needs them.
///
/// ORDER: the memory of one with a cgroup is on record before others can find the container: a writer of limits that
/// knows it gives it room for that ([`contract::expect_restored`]).
pub(crate) fn create_to_restore(
    ground: &Ground,
    create: Create,
    memory_bytes: u64,
    may_take_spare: bool,
) -> Result<Created> {
    let then = if may_take_spare { Then::Start } else { Then::Rest };
    create_then(ground, create, then, |config, _| match spare::is_adopted(ground, &config.id) {
        true => contract::expect_restored(ground, &config.id, memory_bytes),
        false => Ok(()),
    })
}

/// Creates a container that another command is to start. Its parts may have been made ahead, and are kept for that
/// command by the nursery ([`spare::keep`]).
pub(crate) fn create_to_start_later(ground: &Ground, create: Create) -> Result<Created> {
    let mut created = create_then(ground, create, Then::StartLater, |_, _| Ok(()))?;
    if let Some(spare) = created.spare.take() {
        spare::keep(ground, &created.config, spare);
    }
    Ok(created)
}

/// Creates a container with further content: `fill` puts it into the container's directory.
pub(crate) fn create_with(
    ground: &Ground,
    create: Create,
    fill: impl FnOnce(&Config, &Path) -> Result<()>,
) -> Result<Created> {
    create_then(ground, create, Then::Rest, fill)
}

fn create_then(
    ground: &Ground,
    create: Create,
    then: Then,
    fill: impl FnOnce(&Config, &Path) -> Result<()>,
) -> Result<Created> {
    let (config, new, made) = draft_then(ground, create, then, |config, dir| {
        fill(config, dir)?;
        ground.write_config(dir, config)
    })?;
    match publish(ground, &config, &new) {
        Ok(()) => {
            let (drive, spare) = match made {
                Made::Now(drive) => (drive, None),
                Made::Ahead(spare) => (None, Some(*spare)),
            };
            Ok(Created { config, lock: new.lock, drive, spare })
        }
        Err(e) => {
            let _ = abandon(ground, &config.id, &config.name, &new, made); // the first error is returned
            Err(e)
        }
    }
}

/// The parts of a container in creation.
#[derive(Debug)]
enum Made {
    /// By this process, with the mount of its drive.
    Now(Option<OwnedFd>),
    Ahead(Box<Spare>),
}

/// Releases the resources of a failed create.
fn abandon(ground: &Ground, id: &ContainerId, name: &Name, new: &New, made: Made) -> Result<()> {
    match made {
        Made::Ahead(spare) => spare.end(|_, _| {
            spare::release_objects(ground, id)?;
            pending::abandon(ground, id, name, new)
        }),
        Made::Now(_) => pending::abandon(ground, id, name, new),
    }
}

/// Makes a container up to its publication: `fill` puts the rest into its directory, the record
/// last.
pub(crate) fn draft(
    ground: &Ground,
    create: Create,
    fill: impl FnOnce(&Config, &Path) -> Result<()>,
) -> Result<(Config, New)> {
    draft_then(ground, create, Then::Rest, fill).map(|(config, new, _)| (config, new))
}

/// The same, with its parts.
fn draft_then(
    ground: &Ground,
    create: Create,
    then: Then,
    fill: impl FnOnce(&Config, &Path) -> Result<()>,
) -> Result<(Config, New, Made)> {
    spec::validate(&create)?;
    contract::check(ground, &create.spec.limits)?;
    contract::check_evict(ground, &create.spec)?;
    let account = account::reserve(ground, &create.spec)?;
    let adopted = match then {
        Then::Start => spare::adopt(ground, &create, false),
        Then::StartLater => spare::adopt(ground, &create, true),
        Then::Rest => None,
    };
    let (id, new, mut made) = match adopted {
        Some((spare, new)) => (spare.id.clone(), new, Made::Ahead(Box::new(spare))),
        None => {
            let id = ground::new_id()?;
            let new = pending::begin(ground, &id)?;
            (id, new, Made::Now(None))
        }
    };
    let new = New { account, ..new };
    let name = create.name.clone();
    match create_in(ground, &new.dir, &id, create, &mut made, fill) {
        Ok(config) => Ok((config, new, made)),
        Err(e) => {
            let _ = abandon(ground, &id, &name, &new, made); // the first error is returned
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
    made: &mut Made,
    fill: impl FnOnce(&Config, &Path) -> Result<()>,
) -> Result<Config> {
    take_name(ground, &create.name, id)?;
    let ids = match made {
        Made::Ahead(spare) => spare.ids,
        Made::Now(_) => take_slot(ground, create.wide_ids, id)?,
    };
    let mut spec = create.spec;
    if let RootSource::Image { id: image, .. } = &spec.root
        && create.image.is_none()
    {
        ground.images()?.find(image)?;
    }
    // A clone keeps the set of its original, to which its threads may be bound.
    if let Some(count) = spec.nproc.filter(|_| spec.limits.cpuset_cpus.is_none()) {
        let online = proc::online_cpus().map_err(Error::call("cannot read"))?;
        let set = view::choose_cpus(count, ids.base / IdSlot::IDS, &online)?;
        spec.limits.cpuset_cpus = Some(set);
        contract::check(ground, &spec.limits)?;
    }
    let addresses = match (spec.net.domain(), &*made) {
        (Some(_), Made::Ahead(spare)) => spare.addresses.clone(),
        (Some(domain), _) => {
            let allocate =
                || -> Result<_> { Ok(ground.network()?.allocate(domain, id, &create.addresses)?) };
            match allocate() {
                // The rest of a removal may have them for a moment, or have had them. Its error is that of the next
                // command.
                Err(_) => {
                    let _ = end_withdrawn(ground, |_| true);
                    spare::allocate(ground, allocate)?
                }
                Ok(addresses) => addresses,
            }
        }
        (None, _) => Vec::new(),
    };
    if spec.hostname.is_empty() {
        id.short().clone_into(&mut spec.hostname);
    }
    let config = Config {
        version: 1,
        id: id.clone(),
        name: create.name,
        created_unix_s: event::now_unix_ms() / 1000,
        ids,
        addresses,
        spec,
    };
    if let Made::Now(drive) = made {
        let lower = layer::lower(ground, &config.spec.root)?;
        *drive = drive::make(ground, new, &config, &lower)?;
    }
    fill(&config, new)?;
    Ok(config)
}

/// Takes a slot of host ids. Spares give theirs back where slots are short.
fn take_slot(ground: &Ground, wide: bool, id: &ContainerId) -> Result<IdMap> {
    ground.slots.take(wide, id).or_else(|e| match e {
        Error::NoIds(_) => {
            spare::dismiss(ground);
            ground.slots.take(wide, id)
        }
        e => Err(e),
    })
}

/// Takes a name, also from a holder that no longer exists: a create or a removal that was
/// killed between its two steps.
fn take_name(ground: &Ground, name: &Name, id: &ContainerId) -> Result<()> {
    // The name is not to lead to the addresses of its last holder.
    end_withdrawn(ground, |config| config.name == *name)?;
    let taken = ground.names.take(name, id);
    let Err(Error::NameTaken { .. }) = &taken else { return taken };
    if let Some(holder) = ground.names.holder(name)?
        // ORDER: in the order of a create, which is published between the two.
        && !pending::is_being_created(ground, &holder)?
        && !ground.dir(&holder).exists()
    {
        ground.names.release(name, &holder)?;
        return ground.names.take(name, id);
    }
    taken
}

/// Ends the registrations of withdrawn containers in their domains, and releases their addresses, where the rest of
/// their removal has not come to that.
fn end_withdrawn(ground: &Ground, which: impl Fn(&Config) -> bool) -> Result<()> {
    let mut failed = None;
    // One whose addresses cannot be released keeps no other from it.
    for (_, dir) in pending::withdrawn(ground)? {
        let config: Option<Config> = disk::read_json(&dir.join(CONFIG)).unwrap_or(None);
        let Some(config) = config.filter(&which) else { continue };
        if config.spec.net.domain().is_some() {
            failed = failed.or(end_registrations(ground, &config, &dir).err());
        }
    }
    failed.map_or(Ok(()), Err)
}

/// The same for one of them, in its directory.
///
/// ORDER: its addresses are the last of this. A removal that has released them may go on for long with the files of the
/// container, and is not waited for.
fn end_registrations(ground: &Ground, config: &Config, dir: &Path) -> Result<()> {
    if !ground.network()?.has_addresses(&config.id)? {
        return Ok(());
    }
    // Its removal goes on in another process, or the lock shows that it was interrupted.
    let _lock = match Lock::take(dir) {
        Err(Error::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Ok(());
        }
        other => other?,
    };
    if dir.exists() {
        net::leave(ground, &config.id, Some(config))?;
        // ORDER: its rules end before another container has its addresses.
        gating::withdraw(ground, config)?;
        ground.network()?.release(&config.id)?;
    }
    Ok(())
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
    let has_name = other.spec.hostname != other.id.short();
    let hostname = if has_name { other.spec.hostname.clone() } else { String::new() };
    let spec = Spec {
        root,
        hostname,
        anonymous_volumes: Vec::new(),
        // The host's ports lead to the other container.
        publish: Vec::new(),
        ..other.spec.clone()
    };
    Create { name, image: None, spec, addresses, wide_ids: other.ids.wide }
}

/// Pairs the other container's addresses with those of the clone.
pub(crate) fn address_pairs(other: &Config, clone: &Config) -> Vec<(IpAddr, IpAddr)> {
    other.addresses.iter().copied().zip(clone.addresses.iter().copied()).collect()
}
