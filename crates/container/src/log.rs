//! Where the output of a container goes.
//!
//! By the driver of its configuration ([`LogDriver`]):
//!
//! - `k8s-file`: two pipes, of which the keeper's reader appends the contents to `output.log`
//!   (`dormouse_keeper`, `reader`). The container's ends can be read and written, so that a
//!   container without a reader waits and gets no SIGPIPE, and are in packet mode, which gives the
//!   reader the order of the writes. No file of the host is in the container.
//! - `file`: the container appends to `stdout.log` and `stderr.log` itself. Truncation cannot be
//!   prevented: it opens `/dev/stdout` again.
//! - `none`: `/dev/null`.
//!
//! A container with a terminal has `stdout.log`, to which the keeper and attached clients append.
//!
//! `RUN/c/ID/log.json` identifies the pipes of the running processes: a checkpoint saves their ends
//! as streams of the engine, named like the files. Any checkpoint can therefore be restored under
//! any driver. Each start, wake and restore makes new pipes; unread output of the old ones is read
//! until they are empty.
//!
//! A keeper of an older program refuses pipes. Until it has ended, `file` is used instead.
//!
//! Uses `ground` and `hold`.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use dormouse_checkpoint::save::Outside;
use dormouse_kernel::Errno;
use dormouse_launch::keeper::VAULT;
use dormouse_launch::{Keeper, LaunchError};
use dormouse_model::{Config, ContainerId, LogDriver};
use dormouse_record::{Records, Thing};
use rustix::fs::{Mode, OFlags};
use rustix::pipe::{PipeFlags, pipe_with};
use serde::{Deserialize, Serialize};

use crate::disk::{self, Durable};
use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::hold;

/// Names of the streams in checkpoints, and of their files with the driver `file`.
pub(crate) const NAMES: [&str; 2] = ["stdout.log", "stderr.log"];
/// Name of the log with the driver `k8s-file`.
const ENTRIES: &str = "output.log";
/// Name of the record of the pipes.
const PIPES: &str = "log.json";

/// `RUN/c/ID/log.json`: device and inode of each pipe.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Pipes {
    version: u32,
    stdout: Option<(u64, u64)>,
    stderr: Option<(u64, u64)>,
}

/// The files with the output of a container. Each may be absent.
#[derive(Debug, Clone)]
pub struct Logs {
    /// Standard output, or the output of its terminal.
    pub stdout: PathBuf,
    /// Standard error.
    pub stderr: Option<PathBuf>,
    /// Both, as entries ([`dormouse_model::LogEntry`]).
    pub entries: Option<PathBuf>,
    /// Its configuration keeps no output.
    pub is_off: bool,
}

/// The container's ends of the streams that go to its log.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    /// `None`: the stream does not go there, or the container has no log.
    pub(crate) streams: [Option<OwnedFd>; 2],
    /// Logs that no reader bounds.
    pub(crate) unbounded: Vec<PathBuf>,
}

impl Logs {
    pub(crate) fn of(ground: &Ground, config: &Config) -> Self {
        let dir = ground.dir(&config.id);
        let (has_terminal, driver) = (config.spec.process.terminal, config.spec.log_driver);
        Self {
            stdout: dir.join(NAMES[0]),
            stderr: (!has_terminal).then(|| dir.join(NAMES[1])),
            entries: (driver == LogDriver::K8sFile && !has_terminal).then(|| dir.join(ENTRIES)),
            is_off: driver == LogDriver::None,
        }
    }
}

/// The output of one container.
#[derive(Debug)]
pub(crate) struct Output<'c> {
    config: &'c Config,
    /// `LIB/containers/ID`.
    dir: PathBuf,
    /// `RUN/c/ID`.
    run_dir: PathBuf,
}

impl<'c> Output<'c> {
    pub(crate) fn of(ground: &Ground, config: &'c Config) -> Self {
        Self { config, dir: ground.dir(&config.id), run_dir: ground.run_dir(&config.id) }
    }

    /// Opens the container's ends of the streams that go to its log. With a reader, the keeper has
    /// the other ends when this returns.
    pub(crate) fn ends(&self, keeper: &mut Keeper, wanted: [bool; 2]) -> Result<Ends> {
        let driver = self.config.spec.log_driver;
        let mut ends = Ends::default();
        if driver == LogDriver::K8sFile {
            if wanted != [true; 2] {
                ends.unbounded.push(self.dir.join(ENTRIES)); // clients that are attached append, too
            }
            if wanted == [false; 2] {
                return Ok(ends);
            }
            if let Some(streams) = self.pipes(keeper, wanted)? {
                return Ok(Ends { streams, ..ends });
            }
        }
        if driver != LogDriver::None {
            ends.unbounded = NAMES.map(|name| self.dir.join(name)).into();
            for ((end, path), wanted) in ends.streams.iter_mut().zip(&ends.unbounded).zip(wanted) {
                *end = wanted.then(|| open_log(path)).transpose()?;
            }
        }
        Ok(ends)
    }

    /// Makes pipes, gives the read ends to the keeper and returns the container's ends. `None` if
    /// the keeper is of an older program.
    fn pipes(
        &self,
        keeper: &mut Keeper,
        wanted: [bool; 2],
    ) -> Result<Option<[Option<OwnedFd>; 2]>> {
        // The reader makes no file, so that none is left of a removed container.
        drop(open_log(&self.dir.join(ENTRIES))?);
        let (mut own, mut reads) = ([None, None], [None, None]);
        for stream in (0..2).filter(|stream| wanted[*stream]) {
            let (read, end) = pipe()?;
            (own[stream], reads[stream]) = (Some(end), Some(read));
        }
        match self.keep(keeper, &reads) {
            Err(LaunchError::Refused { source, .. }) if source == Errno::BADMSG => return Ok(None),
            kept => kept?,
        }
        let [stdout, stderr] = own.each_ref().map(|end| end.as_ref().map(identity));
        let (stdout, stderr) = (stdout.transpose()?, stderr.transpose()?);
        let record = Pipes { version: 1, stdout, stderr };
        disk::write_json(&self.run_dir.join(PIPES), &record, Durable::No)?;
        Ok(Some(own))
    }

    fn keep(
        &self,
        keeper: &mut Keeper,
        reads: &[Option<OwnedFd>; 2],
    ) -> std::result::Result<(), LaunchError> {
        let (path, bound) = (self.dir.join(ENTRIES), self.config.spec.log_max_bytes);
        let given = reads.each_ref().map(|read| read.as_ref().map(AsFd::as_fd));
        keeper.keep_output(self.config.id.as_str(), &path, bound, given)
    }

    /// Returns the streams of a running container that are the engine's.
    pub(crate) fn streams(&self) -> Result<Vec<Outside>> {
        let mut all = Vec::new();
        let mut add = |name: &str, identity| {
            all.push(Outside { name: name.to_owned(), identity, number: None });
        };
        for name in NAMES {
            // A log that was never opened does not exist.
            if let Ok(meta) = fs::metadata(self.dir.join(name)) {
                add(name, (meta.dev(), meta.ino()));
            }
        }
        if let Some(pipes) = self.record()? {
            for (name, identity) in NAMES.into_iter().zip([pipes.stdout, pipes.stderr]) {
                identity.into_iter().for_each(|identity| add(name, identity));
            }
        }
        Ok(all)
    }

    fn record(&self) -> Result<Option<Pipes>> {
        disk::read_json(&self.run_dir.join(PIPES))
    }

    /// Whether the running container was started with pipes.
    pub(crate) fn has_pipes(&self) -> bool {
        self.run_dir.join(PIPES).exists()
    }

    /// Has the output of a running container read again that a killed keeper and its vault had.
    /// Its processes have the pipes open.
    pub(crate) fn resume(&self, keeper: &mut Keeper, pids: &[u32]) -> Result<()> {
        let Some(pipes) = self.record()? else { return Ok(()) };
        if keeper.holds_output(self.config.id.as_str())? {
            return Ok(());
        }
        let found = [pipes.stdout, pipes.stderr].map(|pipe| find(pids, pipe?));
        if found.iter().all(Option::is_none) {
            return Ok(()); // closed by all processes
        }
        Ok(self.keep(keeper, &found)?)
    }
}

/// Waits until the log of a container has all output that was written before. If the keeper was
/// killed, another one is started that has the output read.
pub(crate) fn flush(ground: &Ground, id: &ContainerId) -> Result<()> {
    let run = &ground.places.run;
    for _ in 0..2 {
        let keeper = match Keeper::connect(run)? {
            Some(keeper) => Some(keeper),
            None if run.join(VAULT).exists() => Some(hold::keeper(ground)?),
            None => None,
        };
        let Some(mut keeper) = keeper else { return Ok(()) };
        match keeper.flush_output(id.as_str()) {
            Err(LaunchError::KeeperGone) => {}
            done => return Ok(done?),
        }
    }
    Ok(())
}

/// Makes a pipe: the read end, and the container's end.
fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    let failed = |e: Errno| Error::file("cannot make", "a pipe")(e.into());
    let (read, write) = pipe_with(PipeFlags::CLOEXEC).map_err(failed)?;
    let path = format!("/proc/self/fd/{}", write.as_raw_fd());
    let both = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    let both = both.map_err(failed)?;
    rustix::fs::fcntl_setfl(&both, OFlags::DIRECT).map_err(failed)?;
    Ok((read, both))
}

/// Opens the read end of a pipe that one of these processes has open.
fn find(pids: &[u32], pipe: (u64, u64)) -> Option<OwnedFd> {
    let is_it = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino) == pipe;
    for pid in pids {
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            // ORDER: a place of the file, which is then known, and only then opened: the container
            // may put another file at this number at any time.
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            let Ok(place) = rustix::fs::open(entry.path(), flags, Mode::empty()) else { continue };
            if !rustix::fs::fstat(&place).is_ok_and(is_it) {
                continue;
            }
            let path = format!("/proc/self/fd/{}", place.as_raw_fd());
            let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
            return rustix::fs::open(path, flags, Mode::empty()).ok();
        }
    }
    None
}

fn identity(end: &OwnedFd) -> Result<(u64, u64)> {
    let stat = rustix::fs::fstat(end);
    let stat = stat.map_err(|e| Error::file("cannot look at", "a pipe")(e.into()))?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Makes writes to a restored stream return at once if they did so before. All ends of one stream
/// share this setting, because they are one open file again.
pub(crate) fn with_flags(end: OwnedFd, records: &Records, name: &str) -> Result<OwnedFd> {
    let is_non_blocking = records.objects.iter().any(|object| match &object.thing {
        Thing::External(external) if external.name == name => {
            OFlags::from_bits_retain(external.flags).contains(OFlags::NONBLOCK)
        }
        _ => false,
    });
    if is_non_blocking {
        let flags = rustix::fs::fcntl_getfl(&end);
        let set = flags.and_then(|flags| rustix::fs::fcntl_setfl(&end, flags | OFlags::NONBLOCK));
        set.map_err(|e| Error::file("cannot set the flags of", "a standard stream")(e.into()))?;
    }
    Ok(end)
}

/// Opens a log file for appending only. The file is made with the mode of the engine; a program
/// that has it open can change its own log and no other.
pub(crate) fn open_log(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::NOFOLLOW;
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::from_raw_mode(0o600))
        .map_err(|e| Error::file("cannot open log", path)(e.into()))
}
