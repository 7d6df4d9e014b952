//! Directories of an instance, and the leftovers of the last boot.
//!
//! Uses `ground`, `state`, `exit`, `contract`, `pending`, `unwoken`, `end`, `remove` and
//! `recover::interrupted`.

use std::fs;
use std::os::unix::fs::MetadataExt;

use dormouse_kernel::weakened;
use dormouse_model::ContainerId;

use crate::disk::{self, Durable, Lock};
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::recover::interrupted;
use crate::state;
use crate::{contract, end, exit, pending, remove, spare, unwoken};

/// Prepares the directories for a command, and finishes the work of killed ones.
pub(crate) fn open(ground: &Ground) -> Result<()> {
    close_to_others(ground)?;
    recover_after_boot(ground)?;
    let _ = interrupted::finish(ground); // every command tries again; `prune` reports errors
    let _ = contract::recover(ground); // likewise
    Ok(())
}

/// Closes LIB and RUN to the host's other users. Both hold locks, secrets of environments, and
/// files of containers, some of them set-user-id. Directories of an earlier version were open.
fn close_to_others(ground: &Ground) -> Result<()> {
    let own = rustix::process::geteuid();
    if !own.is_root() || weakened("private-directories") {
        return Ok(()); // the modes of the files refuse other users
    }
    // A file that every LIB, and every RUN, of this engine has.
    for (dir, mark) in [(&ground.places.lib, "containers"), (&ground.places.run, "boot")] {
        let meta = match fs::metadata(dir) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            other => other.map_err(Error::file("cannot look at", dir))?,
        };
        if meta.uid() != own.as_raw() {
            return Err(Error::Invalid(format!(
                "'{}' belongs to uid {}, which could replace anything in it: give it to \
                 root (chown), or choose another --root",
                dir.display(),
                meta.uid()
            )));
        }
        if meta.mode() & 0o077 != 0 {
            let is_other = |entry: std::io::Result<fs::DirEntry>| {
                entry.map_or(true, |entry| entry.file_name() != "lost+found")
            };
            let mut entries = fs::read_dir(dir).map_err(Error::file("cannot read", dir))?;
            if !dir.join(mark).exists() && entries.any(is_other) {
                return Err(Error::Invalid(format!(
                    "'{}' has files that are not Dormouse's: choose another --root",
                    dir.display()
                )));
            }
            disk::close(dir, &["containers", "pending", "names", "ids", "quiet", "c"])?;
        }
    }
    Ok(())
}

/// At the first call after a boot: makes the directories, forgets the processes of the last
/// boot and releases the leftovers of interrupted verbs.
fn recover_after_boot(ground: &Ground) -> Result<()> {
    let marker = ground.places.run.join("boot");
    let boot = dormouse_kernel::proc::boot_id().map_err(Error::call("cannot read boot id"))?;
    if fs::read_to_string(&marker).is_ok_and(|b| b == boot) {
        return Ok(());
    }
    let p = &ground.places;
    let mode = if weakened("private-directories") { 0o755 } else { 0o700 };
    for dir in [&p.lib, &p.run] {
        if let Some(above) = dir.parent() {
            disk::make_dir(above, 0o755)?;
        }
        disk::make_dir(dir, mode)?;
    }
    let lib = [p.containers(), p.pending(), p.names(), p.volumes(), p.spares(), p.lib.join("ids")];
    for dir in lib.into_iter().chain([p.running(), p.changes()]) {
        disk::make_dir(&dir, mode)?;
    }
    let _lock = Lock::take(&p.run)?;
    if fs::read_to_string(&marker).is_ok_and(|b| b == boot) {
        return Ok(());
    }
    unwoken::remove_all(ground);
    forget_last_boot(ground)?;
    let _ = spare::sweep(ground); // as at every command: one that cannot be released stops nothing else
    sweep_containers(ground)?;
    recover_slots(ground)?;
    disk::write(&marker, boot.as_bytes(), Durable::No)
}

/// Settles containers that ran when the host went down, with unknown exits. A pid of the last
/// boot means nothing in this one, so no process is looked up.
fn forget_last_boot(ground: &Ground) -> Result<()> {
    for id in ground.ids()? {
        let config = match ground.config(&id) {
            Err(Error::Corrupt { .. } | Error::NoContainer(_)) => continue,
            other => other?,
        };
        if let Some(init) = state::read_init(ground, &id)? {
            if !init.sleeping {
                end::forget_sleep(ground, &config)?; // an old checkpoint: the container ran on
            }
            state::write_exit(ground, &id, &exit::from_status(&init, None))?;
            end::tear_down(ground, &id, Some(&config))?;
        } else if ground.asleep_dir(&id).exists() && ground.run_dir(&id).exists() {
            end::release_objects(ground, &config)?; // it was warm, or its wake was interrupted
        }
        if config.spec.auto_remove {
            remove::remove_locked(ground, &id, Some(&config), true)?;
        }
    }
    Ok(())
}

/// Releases id slots of containers that were never published. Runs only after a boot, when no
/// create can be under way. Does nothing if a record is damaged, for its slot is not known
/// then.
fn recover_slots(ground: &Ground) -> Result<()> {
    let owners = || ground.ids()?.into_iter().map(|id| Ok((ground.config(&id)?.ids, id))).collect();
    match ground.slots.reset(owners) {
        Err(Error::Corrupt { .. }) => Ok(()),
        other => other,
    }
}

/// Releases names, addresses and process records without a container. Every command finishes
/// interrupted creates and removals ([`crate::pending`]); this is a full search, after a boot
/// and for `prune`. Returns how many things were released.
pub(crate) fn sweep(ground: &Ground) -> Result<usize> {
    let spares = spare::sweep(ground);
    let swept = sweep_containers(ground)?;
    Ok(spares? + swept)
}

/// The same but for spares.
fn sweep_containers(ground: &Ground) -> Result<usize> {
    let mut swept = interrupted::finish_containers(ground)?;
    for (name, holder) in ground.names.all()? {
        // ORDER: in the order of a create, which is published between the two.
        let alive = pending::is_being_created(ground, &holder)? || ground.dir(&holder).exists();
        if !alive {
            ground.names.release(&name, &holder)?;
            swept += 1;
        }
    }
    // The rest of a removal is released by the process that has its lock.
    // ORDER: as they go from one to the next: a spare is adopted, created, withdrawn.
    let is_someone = |id: &ContainerId| {
        spare::exists(ground, id)
            || pending::is_being_created(ground, id).unwrap_or(true)
            || ground.dir(id).exists()
            || pending::withdrawn_dir(ground, id).exists()
    };
    swept += ground.network()?.sweep(&is_someone)? as usize;
    for entry in fs::read_dir(ground.places.running()).into_iter().flatten().flatten() {
        let id = entry.file_name().to_str().and_then(|n| n.parse::<ContainerId>().ok());
        if let Some(id) = id
            && !is_someone(&id)
        {
            end::tear_down(ground, &id, None)?;
            swept += 1;
        }
    }
    Ok(swept)
}
