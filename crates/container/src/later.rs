//! Memory that is filled while the processes run already.
//!
//! Wake, and `restore --lazy`, of much memory does not wait until all of it is read. Two small
//! processes of the keeper fill large areas (`dormouse_keeper`, `fill`), pages with waiting threads
//! first. Filled areas are ordinary memory afterwards
//! ([why](../../../docs/decisions/0015-lazy-memory.md)).
//!
//! `RUN/c/ID/fill` is the job of these two processes ([`dormouse_launch::fill`]). The file is
//! locked until all memory is filled; a checkpoint or a push-out of the container waits for that.
//! If the file is unlocked and not marked as done, both processes and the keeper were killed, and
//! the missing pages have become zeros. The first command that finds this kills the container.
//!
//! `LIB/containers/ID/touched` lists the pages that threads waited for: the next wake or restore
//! reads them before any process runs. Its content is not trusted; it only chooses when a page is
//! read.
//!
//! Uses `ground`, `state`, `exit` and `hold`.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use dormouse_checkpoint::load;
use dormouse_checkpoint::load::{Lazy, Sources};
use dormouse_kernel::{call, pidfd};
use dormouse_launch::fill::{AROUND_BYTES, Job, Piece, SOURCES_MAX, head};
use dormouse_launch::{Keeper, fill};
use dormouse_model::{Config, ContainerId};
use dormouse_parcel::Reader;
use dormouse_record::{CHUNK_BYTES, PARTS_MAX};
use rustix::fs::{FlockOperation, OFlags};

use crate::error::{Error, Result};
use crate::exit::SIGKILL;
use crate::ground::Ground;
use crate::{hold, settings, state};

const _: () = assert!(PARTS_MAX == fill::PARTS_MAX);

/// How long a command waits for memory to be filled.
const FILLED_WITHIN: Duration = Duration::from_secs(60);

/// The lazy part of a restore, and its prerequisites.
#[derive(Debug)]
pub(crate) struct Later {
    pub(crate) lazy: Lazy,
    /// `/dev/userfaultfd`, the source of userfaultfd descriptors.
    pub(crate) device: OwnedFd,
    touched: File,
    around_bytes: u64,
}

/// Checks that the settings for wakes (`[wake]` in `config.toml`) can be read. A wake itself
/// uses the defaults if they cannot, rather than keep a caller out.
pub(crate) fn check_settings(ground: &Ground) -> Result<()> {
    settings::block_bytes(&ground.settings())?;
    settings::clients_wait(&ground.settings())?;
    settings::within(&ground.settings())?;
    settings::reserve_bytes(&ground.settings()).map(drop)
}

/// Chooses the lazy part of a checkpoint; `None` if all memory is read at once, because it is
/// small or the kernel has no support.
pub(crate) fn choose(ground: &Ground, id: &ContainerId, reader: &Reader) -> Result<Option<Later>> {
    let around_bytes = settings::block_bytes(&ground.settings())?;
    Ok(choose_by(ground, id, reader, around_bytes))
}

/// Chooses the lazy part for a wake: unreadable settings do not prevent it.
pub(crate) fn choose_for_wake(ground: &Ground, id: &ContainerId, reader: &Reader) -> Option<Later> {
    let chosen = settings::block_bytes(&ground.settings());
    choose_by(ground, id, reader, chosen.unwrap_or(AROUND_BYTES))
}

fn choose_by(
    ground: &Ground,
    id: &ContainerId,
    reader: &Reader,
    around_bytes: u64,
) -> Option<Later> {
    // Most checkpoints are small.
    Lazy::choose(reader.records(), SOURCES_MAX, &[], around_bytes)?;
    let device = File::options().read(true).write(true).open("/dev/userfaultfd").ok()?;
    let own = call::userfault_new(device.as_fd()).ok()?;
    call::userfault_begin(own.as_fd()).ok()?;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let touched =
        options.custom_flags(OFlags::NOFOLLOW.bits() as i32).open(ground.dir(id).join("touched"));
    let touched = touched.ok()?;
    let places: Vec<(u32, u64)> =
        fill::read_touched(&touched).iter().map(|t| (t.pid, t.start)).collect();
    let lazy = Lazy::choose(reader.records(), SOURCES_MAX, &places, around_bytes)?;
    Some(Later { lazy, device: device.into(), touched, around_bytes })
}

/// Starts the filling of memory.
pub(crate) fn fill(
    ground: &Ground,
    keeper: &mut Keeper,
    id: &ContainerId,
    (later, reader): (&Later, &Reader),
    first: BorrowedFd<'_>,
    sources: &Sources,
) -> Result<()> {
    let path = path(ground, id);
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true).mode(0o600);
    let job = Job {
        bytes: reader.records().pages.bytes,
        parts: reader.pages().lengths(),
        chunk_bytes: CHUNK_BYTES,
        checksums: reader.records().pages.chunks.0.clone(),
        around_bytes: later.around_bytes,
        processes: later.lazy.processes(),
    };
    let written = || -> io::Result<File> {
        let file = options.open(&path)?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        job.write(&file, &pieces(&later.lazy))?;
        Ok(file)
    };
    // A recovery after the keeper died checks whether all memory was filled.
    hold::record_keeper(ground, keeper)?;
    let file = written().map_err(Error::file("cannot write", &path))?;
    let pages = load::pages_of(reader)?;
    let given = [file.as_fd(), first, later.touched.as_fd()];
    Ok(keeper.fill(id.as_str(), given, &pages, sources)?)
}

/// Waits until all memory of a container is filled.
///
/// Errors: [`Error::Filling`] after a timeout; [`Error::Unfilled`] if some memory never will
/// be: the container was killed.
pub(crate) fn wait_until_filled(ground: &Ground, config: &Config) -> Result<()> {
    let Some(file) = open_job(ground, &config.id)? else { return Ok(()) };
    let began = Instant::now();
    loop {
        match is_filled(ground, config, &file)? {
            Some(true) => return Ok(()),
            Some(false) => return end_unfilled(ground, config, &file),
            None => {}
        }
        if began.elapsed() > FILLED_WITHIN {
            return Err(Error::Filling(config.name.to_string()));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Checks without waiting, for a holder of the container's lock; no error while memory is being
/// filled.
pub(crate) fn check(ground: &Ground, config: &Config) -> Result<()> {
    let Some(file) = open_job(ground, &config.id)? else { return Ok(()) };
    match is_filled(ground, config, &file)? {
        Some(false) => end_unfilled(ground, config, &file),
        _ => Ok(()),
    }
}

/// Returns whether all memory was filled; `None` while it is being filled.
fn is_filled(ground: &Ground, config: &Config, file: &File) -> Result<Option<bool>> {
    let what = |e: io::Error| Error::file("cannot look at", path(ground, &config.id))(e);
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => {}
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
        Err(e) => return Err(what(e.into())),
    }
    match fill::number(file, head::DONE) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(None), // being written
        done => Ok(Some(done.map_err(what)? != 0)),
    }
}

/// Kills a container whose memory is no longer filled and which must not continue.
fn end_unfilled(ground: &Ground, config: &Config, file: &File) -> Result<()> {
    // The first reason is kept.
    if !fill::reason(file).is_ok_and(|reason| reason.is_some()) {
        let why = "the processes that filled its memory were killed, and the keeper, too";
        fill::give_reason(file, why)
            .map_err(Error::file("cannot write", path(ground, &config.id)))?;
    }
    let (_, first) = state::alive(ground, config)?;
    let _ = pidfd::send_signal(first.as_fd(), SIGKILL); // may have exited already
    let ended = pidfd::wait(first.as_fd(), Some(FILLED_WITHIN));
    ended.map_err(Error::call("cannot wait for the container"))?;
    Err(Error::Unfilled(config.name.to_string()))
}

fn open_job(ground: &Ground, id: &ContainerId) -> Result<Option<File>> {
    let path = path(ground, id);
    match File::options().read(true).write(true).open(&path) {
        Ok(file) => Ok(Some(file)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::file("cannot open", path)(e)),
    }
}

/// Returns whether memory of a container is or was filled lazily since its start.
pub(crate) fn has_job(ground: &Ground, id: &ContainerId) -> bool {
    path(ground, id).exists()
}

/// Returns why the fill processes killed a container, if they did.
pub(crate) fn failure(ground: &Ground, id: &ContainerId) -> Option<String> {
    fill::reason(&File::open(path(ground, id)).ok()?).ok()?
}

fn path(ground: &Ground, id: &ContainerId) -> PathBuf {
    ground.run_dir(id).join("fill")
}

fn pieces(lazy: &Lazy) -> Vec<Piece> {
    let piece = |p: load::Piece| Piece {
        source: p.source as i64,
        start: p.start,
        end: p.end,
        offset: p.offset,
    };
    lazy.pieces().into_iter().map(piece).collect()
}
