//! Failed wakes: the record of the last one, its event, and the clients that wait meanwhile.
//!
//! A container whose wake failed is asleep as before, with its complete checkpoint. The cause is on record
//! until a wake succeeds or the sleep ends: `ps` and `inspect` show it. The record is at `RUN/unwoken-ID`,
//! or at `LIB/containers/ID/unwoken.json` where RUN has no space: a full disk is one of the causes. An event
//! that could not be written is written later, by the next attempt.
//!
//! The keeper tries again at growing intervals while a client waits. Clients wait in the queues of the held
//! sockets without limit, or for the time that the operator sets (`[wake] clients-wait`). After that time
//! the connections of new clients are reset. Open connections are never reset here: the container owns them.
//!
//! Uses `ground`, `hold` and `settings`.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use dormouse_api::EventKind;
use dormouse_launch::Keeper;
use dormouse_model::{Config, ContainerId};
use dormouse_parcel::Reader;
use dormouse_stacks::stack;
use rustix::net::sockopt;
use serde::{Deserialize, Serialize};

use crate::disk::{self, Durable};
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::policy::Reason;
use crate::{event, settings};

/// The name of a record in RUN, before the id.
const PREFIX: &str = "unwoken-";

/// LIMIT: characters of a recorded cause.
const CAUSE_CHARS_MAX: usize = 1000;

/// LIMIT: connections of one listening socket that are reset at a time; the kernel's largest queue
/// (`net.core.somaxconn`) is seldom longer.
const RESETS_MAX: u32 = 1 << 16;

/// Failed wakes of a sleeping container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedWake {
    /// The cause of the last failure, in one line.
    pub cause: String,
    /// Time of the first failure since the container fell asleep, in milliseconds since the epoch.
    pub since_unix_ms: i64,
    /// Time of the last failure.
    pub last_unix_ms: i64,
    /// Number of failed attempts.
    pub attempts: u32,
    /// The event of the last failure with this cause is in the log.
    #[serde(default)]
    is_reported: bool,
}

/// Returns the failed wakes of a sleeping container; `None` if its last wake did not fail.
pub(crate) fn of(ground: &Ground, id: &ContainerId) -> Option<FailedWake> {
    paths(ground, id).iter().find_map(|path| disk::read_json(path).ok()?)
}

/// Returns the containers with a record in RUN, which the time of their directory does not show.
pub(crate) fn in_run(ground: &Ground) -> Vec<ContainerId> {
    let entries = fs::read_dir(&ground.places.run).into_iter().flatten().flatten();
    let id = |entry: fs::DirEntry| entry.file_name().to_str()?.strip_prefix(PREFIX)?.parse().ok();
    entries.filter_map(id).collect()
}

/// Records a failed wake. A repeated attempt of the keeper with the same cause makes no further event.
pub(crate) fn note(ground: &Ground, config: &Config, why: &Error, reason: Reason) -> FailedWake {
    let cause: String = why.with_causes().chars().take(CAUSE_CHARS_MAX).collect();
    let (before, now) = (of(ground, &config.id), event::now_unix_ms());
    let is_known = before.as_ref().is_some_and(|it| it.cause == cause && it.is_reported);
    let mut failed = FailedWake {
        cause,
        since_unix_ms: before.as_ref().map_or(now, |it| it.since_unix_ms),
        last_unix_ms: now,
        attempts: before.map_or(0, |it| it.attempts).saturating_add(1),
        is_reported: is_known,
    };
    if !is_known || reason == Reason::Operator {
        let why = [("cause", failed.cause.clone()), ("reason", reason.as_str().to_owned())];
        failed.is_reported = report(ground, config, now, &why);
    }
    write(ground, &config.id, &failed);
    failed
}

/// Removes the record. An event that could not be written before is written now.
pub(crate) fn forget(ground: &Ground, config: &Config) {
    if let Some(failed) = of(ground, &config.id)
        && !failed.is_reported
    {
        let _ = report(ground, config, failed.last_unix_ms, &[("cause", failed.cause)]);
    }
    remove(ground, &config.id);
}

/// Removes the record of a container, of whose configuration nothing is known.
pub(crate) fn remove(ground: &Ground, id: &ContainerId) {
    paths(ground, id).iter().for_each(|path| drop(disk::remove(path)));
}

/// Removes all records in RUN: the last boot's causes may be gone.
pub(crate) fn remove_all(ground: &Ground) {
    in_run(ground).iter().for_each(|id| remove(ground, id));
}

/// Resets the clients that wait for a connection, if they have waited as long as the operator allows.
/// `held` are sockets that the failed wake had taken from the keeper; without any they are taken here.
pub(crate) fn reset_clients(
    ground: &Ground,
    config: &Config,
    failed: &FailedWake,
    held: &[(u32, OwnedFd)],
) -> Result<()> {
    let limit = match settings::clients_wait(&ground.settings()) {
        Ok(Some(limit)) => limit,
        // Unreadable settings reset no client.
        Ok(None) | Err(_) => return Ok(()),
    };
    let waited = failed.last_unix_ms.saturating_sub(failed.since_unix_ms);
    if Duration::from_millis(waited.unsigned_abs()) < limit {
        return Ok(());
    }
    if !held.is_empty() {
        return held.iter().try_for_each(|(_, socket)| reset_at(socket.as_fd()));
    }
    let reader = Reader::open(&ground.asleep_dir(&config.id))?;
    let Some(mut keeper) = Keeper::connect(&ground.places.run)? else { return Ok(()) };
    let called = (0..).zip(&reader.records().objects);
    for (number, _) in called.filter(|(_, object)| object.is_called_from_outside()) {
        match keeper.take(config.id.as_str(), number) {
            Ok(socket) => reset_at(socket.as_fd())?,
            Err(e) if e.kind() == dormouse_kernel::ErrorKind::NotFound => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(keeper.park(config.id.as_str())?)
}

/// Resets all connections in the queue of a listening socket; leaves other sockets alone. The container may
/// have passed the socket to a process elsewhere, which may accept at the same time.
fn reset_at(socket: BorrowedFd<'_>) -> Result<()> {
    if !sockopt::socket_acceptconn(socket).unwrap_or(false) {
        return Ok(());
    }
    stack::reset_clients(socket, RESETS_MAX)
        .map_err(|e| Error::file("cannot reset clients of", "a held socket")(e.into()))
}

/// Writes an event. Returns false if the disk has no space for it.
fn report(ground: &Ground, config: &Config, unix_ms: i64, why: &[(&str, String)]) -> bool {
    let (id, name) = (config.id.as_str(), config.name.as_str());
    ground.record_at(unix_ms, EventKind::WakeFailed, id, name, why).is_ok()
}

/// Writes the record at the first place that has space. Without any, only the event shows the cause.
fn write(ground: &Ground, id: &ContainerId, failed: &FailedWake) {
    let [first, second] = paths(ground, id);
    if disk::write_json(&first, failed, Durable::No).is_ok() {
        let _ = disk::remove(&second); // of an earlier failure
    } else if disk::write_json(&second, failed, Durable::No).is_ok() {
        let _ = disk::remove(&first);
    }
}

/// The places of the record, in the order of reading.
fn paths(ground: &Ground, id: &ContainerId) -> [PathBuf; 2] {
    [ground.places.run.join(format!("{PREFIX}{id}")), ground.dir(id).join("unwoken.json")]
}
