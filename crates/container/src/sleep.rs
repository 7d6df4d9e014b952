//! Sleep and wake: a container without processes that still accepts connections.
//!
//! An *asleep* container is a checkpoint, `LIB/containers/ID/asleep`. The keeper holds its sockets
//! that are reachable from outside: TCP sockets that listen or have a connection, UDP sockets
//! ([`dormouse_launch::Keeper::hold`]). The container has no process, no cgroup, no mount;
//! it keeps its addresses, names and published ports. The kernel completes an incoming connection
//! and queues it at the held socket. The keeper then runs `dormouse internal wake ID`, which
//! restores the processes with the same socket in its old place. The container accepts that
//! connection first, and nothing was refused or sent twice. An open connection stays open: the
//! kernel continues it, and incoming data, space in the send buffer, or its end wakes the
//! container. [`crate::policy`] describes when a container falls asleep by itself, and which timers
//! wake it.
//!
//! **Activity.** Only a container whose threads all wait can stay asleep. A container that was
//! stopped while active is woken as soon as it sleeps. In the middle of sending a file, for
//! example, its peer sends nothing that would wake it.
//!
//! **Killed at any step.** The checkpoint is published while all processes are stopped. Then the
//! record of the first process is marked (`sleeping`), then the processes are killed. Waking is the
//! reverse: the record has the mark until all processes run. If the marked first process was
//! killed, or never released, the container is therefore asleep ([`end::settle_found`]). Without
//! the mark the container is not asleep, and its checkpoint is outdated. A request that arrives
//! meanwhile wakes the container right after.
//!
//! **Again.** A large checkpoint is kept while the container is awake (`LIB/containers/ID/woken`),
//! until the container sleeps again or ends. Memory that has not changed by then is not written a
//! second time ([`dormouse_parcel::Base`]).
//!
//! LIMIT: only a container that can be checkpointed sleeps. If the keeper is killed and the vault
//! too, open connections are lost; the next command makes the other sockets again
//! ([`crate::recover::custody`]). The same holds after a reboot; the container's clocks continue.
//!
//! **Proven.** Before the processes are marked and killed, the checkpoint is restored as a twin and compared
//! ([`crate::proof`]). After a difference the container continues.
//!
//! Uses `ground`, `state`, `saved`, `exit`, `hold`, `io`, `pending`,
//! `policy`, `end`, `save`, `twin`, `proof`, `drowsy`, `shortage` and `stacked`.

use std::os::fd::AsFd;
use std::time::Duration;

use dormouse_checkpoint::save::{Figures, Subject, stop};
use dormouse_kernel::ErrorKind;
use dormouse_model::{ContainerId, State};
use dormouse_parcel::DirSink;

use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::pending::{self, Intent};
use crate::policy::{self, Idle, Reason};
use crate::proof::Trial;
use crate::state;
use crate::twin::Original;
use crate::{drowsy, end, exit, hold, io, proof, save, saved, shortage, stacked};

/// Puts a container to sleep; if `idle` is given, only if it is still idle.
pub(crate) fn sleep(
    ground: &Ground,
    id: &ContainerId,
    idle: Option<&Idle>,
    reason: Reason,
    trial: Trial,
) -> Result<Option<Figures>> {
    let _lock = ground.lock(id)?;
    let config = ground.config(id)?;
    let observed = state::observe_locked(ground, &config)?;
    if observed.state == State::Asleep {
        return Ok(None);
    }
    if config.spec.auto_remove {
        return Err(Error::Invalid(
            "a container of --rm does not sleep: its files are not kept beyond its processes"
                .into(),
        ));
    }
    idle.map_or(Ok(()), |idle| policy::check_idle(ground, &config, idle))?;
    if (observed.state, reason) == (State::Drowsy, Reason::Shortage) {
        return Err(Error::state(&config, State::Drowsy, "it does not grow"));
    }
    // A drowsy container that cannot be saved stays drowsy.
    if let (State::Drowsy, Some(init)) = (observed.state, observed.init) {
        drowsy::resume_to_sleep(ground, &config, init)?;
    }
    let (mut init, process) = save::can_be_saved(ground, &config)?;
    let pause = match reason {
        Reason::Shortage | Reason::Evicted if init.stopping => {
            return Err(Error::state(&config, State::Running, "it is being stopped"));
        }
        Reason::Shortage => Some(shortage::enter(ground, &config, &mut init.shortages)?),
        Reason::Evicted => shortage::evict(ground, &config, &mut init.shortages, idle.is_some())?,
        _ => {
            // The mark of a sleep that was killed.
            init.shortages = init.shortages.awake();
            None
        }
    };
    let quiet = idle.map_or(Duration::ZERO, |idle| idle.quiet);
    let subject = Subject { quiet, ..save::to_sleep(ground, &config)? };
    end::forget_sleep(ground, &config)?; // leftovers of an interrupted sleep
    let writer = DirSink::begin_upon(&ground.asleep_dir(id), save::earlier(ground, id))?;
    let mut stopped = stop(&subject)?;
    let mut written = stopped.write(&subject, writer)?;
    saved::write_first(&ground.asleep_dir(id), &init)?;
    stacked::record_of(ground, &config, process.as_fd())?;
    // ORDER: before any socket is held: a twin takes a while, and after a difference the container continues.
    // Without a recorded user no trial is made.
    let mut unproven = Some("it was started by an older program".to_owned());
    if let (Trial::Made, Some(user)) = (trial, &init.user) {
        let waits = stopped.take_waits();
        let process = io::clone_fd(process.as_fd())?;
        let original =
            Original { config: config.clone(), process, user: user.clone(), subject, waits };
        match proof::prove(ground, original, &ground.asleep_dir(id)) {
            Ok(proved) => (written.figures.proof, unproven) = (proved.took, proved.unproven),
            Err(e) => {
                end::forget_sleep(ground, &config)?;
                return Err(e);
            }
        }
    }
    // No request precedes this sleep of a container at work, so a wake has to be possible.
    if let (Some(_), Some(object)) = (pause, unproven) {
        end::forget_sleep(ground, &config)?;
        return Err(Error::Unproven { name: config.name.to_string(), object });
    }
    let held = match pause {
        None => hold::hold_files(ground, &config, written.held, written.is_busy),
        Some(_) => hold::hold_files(ground, &shortage::quiet(&config), written.held, false),
    };
    let held = held.map_err(|e| match e.kind() {
        ErrorKind::Busy => Error::Awaited(config.name.to_string()),
        _ => e,
    });
    let alarm = || match pause {
        None => policy::set_alarm(ground, &config, written.next_ring, idle),
        Some(pause) => policy::ring_after(ground, id, pause),
    };
    if let Err(e) = held.and_then(|()| alarm()) {
        end::forget_sleep(ground, &config)?;
        return Err(e);
    }
    let _doing = pending::intend(ground, id, &Intent::Sleep)?;
    // ORDER: published and held; then marked; only now may the processes be killed.
    init.sleeping = true;
    state::write_init(ground, id, &init)?;
    let cgroup = ground.cgroups()?.find(id.as_str())?;
    stopped.kill(|| cgroup.map_or(Ok(()), |cgroup| cgroup.kill()))?;
    end::wait_killed(&config, init.pid, process.as_fd())?;
    // ORDER: the keeper has recorded the exit before `release_objects` removes the directory of that
    // record.
    exit::of(ground, id, &init)?;
    end::release_objects(ground, &config)?;
    ground.record("sleep", id.as_str(), config.name.as_str(), &policy::reason(reason));
    Ok(Some(written.figures))
}
