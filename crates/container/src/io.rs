//! Standard streams of a container's processes: terminals, logs, pipes, descriptors of the caller.
//!
//! The keeper holds the terminal, or the write end of standard input, and bounds the logs.
//!
//! Uses `ground`.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use dormouse_kernel::ErrorKind;
use dormouse_launch::{Keeper, Plan, Terminal};
use dormouse_model::{Config, IdMap};
use rustix::fs::{FileType, Mode, OFlags};

use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::spec::{Stdio, Stream};
use crate::user::PasswdUser;

/// Where the output of a container is.
#[derive(Debug, Clone)]
pub struct Logs {
    /// Its standard output, or everything that was written to its terminal.
    pub stdout: PathBuf,
    /// Its standard error; `None` with a terminal.
    pub stderr: Option<PathBuf>,
}

/// The group that owns terminals on Debian and most others.
pub(crate) const TTY_GROUP: u32 = 5;

/// Standard streams of a process: a terminal of these rows and columns, or three descriptors.
pub(crate) enum Io {
    Terminal((u16, u16)),
    Fds([OwnedFd; 3]),
}

pub(crate) struct Streams {
    pub(crate) io: Io,
    pub(crate) kept: Option<OwnedFd>,
}

/// Streams that the keeper holds of a container and its starter uses.
#[derive(Default)]
pub(crate) struct KeeperStreams {
    pub(crate) console: Option<OwnedFd>,
    pub(crate) console_log: Option<OwnedFd>,
    pub(crate) stdin: Option<OwnedFd>,
}

/// Where the output of a container is.
pub(crate) fn logs(ground: &Ground, config: &Config) -> Logs {
    let dir = ground.dir(&config.id);
    let stderr = (!config.spec.process.terminal).then(|| dir.join("stderr.log"));
    Logs { stdout: dir.join("stdout.log"), stderr }
}

/// Opens the standard streams of a container.
pub(crate) fn streams(
    ground: &Ground,
    config: &Config,
    user: &PasswdUser,
    io: Stdio,
) -> Result<Streams> {
    if config.spec.process.terminal {
        let size = io.terminal_size.unwrap_or_default();
        return Ok(Streams { io: Io::Terminal(size), kept: None });
    }
    let mut kept = None;
    let dir = ground.dir(&config.id);
    let mut open = |stream: Stream, name: &str| -> Result<OwnedFd> {
        match stream {
            Stream::Log => own(open_log(&dir.join(name))?, config.ids, user.uid),
            Stream::Kept => {
                let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
                    .map_err(|e| Error::file("cannot make", "a pipe")(e.into()))?;
                kept = Some(write);
                own(read, config.ids, user.uid)
            }
            other => open_stream(other, config.ids, user.uid),
        }
    };
    let fds =
        [open(io.stdin, "stdin")?, open(io.stdout, "stdout.log")?, open(io.stderr, "stderr.log")?];
    Ok(Streams { io: Io::Fds(fds), kept })
}

/// Gives the terminal or the kept end of standard input to the keeper, attaches to it at once,
/// and has the keeper bound the logs.
pub(crate) fn hand_over(
    ground: &Ground,
    keeper: &mut Keeper,
    config: &Config,
    console: Option<OwnedFd>,
    kept: Option<OwnedFd>,
) -> Result<KeeperStreams> {
    let id = config.id.as_str();
    let logs = logs(ground, config);
    if config.spec.log_max_bytes > 0 && !config.spec.auto_remove {
        let paths: Vec<&Path> =
            std::iter::once(&logs.stdout).chain(&logs.stderr).map(PathBuf::as_path).collect();
        keeper.keep_logs(id, config.spec.log_max_bytes, &paths)?;
    }
    match (console, kept) {
        (Some(master), _) => keeper.keep_console(id, master, open_log(&logs.stdout)?)?,
        (None, Some(write)) => keeper.keep_stdin(id, write)?,
        (None, None) => return Ok(KeeperStreams::default()),
    }
    take_over(keeper, config)
}

/// Attaches to the streams that the keeper holds of a container, as long as the connection
/// lives.
pub(crate) fn take_over(keeper: &mut Keeper, config: &Config) -> Result<KeeperStreams> {
    let id = config.id.as_str();
    if config.spec.process.terminal {
        let console = keeper.attach_console(id)?;
        let (console, log) = (Some(console.master), Some(console.log));
        return Ok(KeeperStreams { console, console_log: log, stdin: None });
    }
    let stdin = if config.spec.process.stdin {
        match keeper.attach_stdin(id) {
            Err(e) if e.kind() == ErrorKind::NotFound => None, // its starter gave another stdin
            other => Some(other?),
        }
    } else {
        None
    };
    Ok(KeeperStreams { stdin, ..KeeperStreams::default() })
}

/// Opens a stream that needs neither the container's log nor the keeper.
pub(crate) fn open_stream(stream: Stream, ids: IdMap, uid: u32) -> Result<OwnedFd> {
    match stream {
        Stream::Null => open_null(),
        Stream::Fd(fd) => {
            let stat = rustix::fs::fstat(&fd)
                .map_err(|e| Error::file("cannot look at", "a standard stream")(e.into()))?;
            let is_pipe = FileType::from_raw_mode(stat.st_mode) == FileType::Fifo;
            if is_pipe { own(fd, ids, uid) } else { Ok(fd) }
        }
        Stream::Log | Stream::Kept => Err(Error::Invalid(
            "only the first process of a container has a log: give this one descriptors".into(),
        )),
    }
}

/// Gives a stream to the process's user: programs open `/dev/stdout` again.
fn own(fd: OwnedFd, ids: IdMap, uid: u32) -> Result<OwnedFd> {
    let uid = rustix::fs::Uid::from_raw(ids.to_host(uid).unwrap_or(ids.base));
    rustix::fs::fchown(&fd, Some(uid), None)
        .map_err(|e| Error::file("cannot own", "a standard stream")(e.into()))?;
    Ok(fd)
}

/// Adds the streams or the terminal of a process to its plan.
pub(crate) fn plan_io(plan: &mut Plan, io: Io, uid: u32, console: bool) {
    match io {
        Io::Terminal(size) => {
            plan.terminal(&Terminal { uid, console, size, ..Terminal::default() });
        }
        Io::Fds([stdin, stdout, stderr]) => {
            let fds = [plan.fd(stdin), plan.fd(stdout), plan.fd(stderr)];
            plan.stdio(fds);
        }
    }
}

fn open_null() -> Result<OwnedFd> {
    rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty())
        .map_err(|e| Error::file("cannot open", "/dev/null")(e.into()))
}

/// Opens a log file for appending only: a program that reopens it through `/proc/self/fd` can
/// damage its own log and no other.
pub(crate) fn open_log(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::NOFOLLOW;
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::from_raw_mode(0o600))
        .map_err(|e| Error::file("cannot open log", path)(e.into()))
}

/// Duplicates a descriptor.
pub(crate) fn clone_fd(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    fd.try_clone_to_owned().map_err(Error::file("cannot duplicate", "a descriptor"))
}
