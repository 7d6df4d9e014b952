//! Standard streams of a container's processes: terminals, logs, pipes, descriptors of the caller.
//!
//! The keeper holds the terminal, or the write end of standard input, and bounds the logs.
//!
//! Uses `ground` and `log`.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use dormouse_kernel::ErrorKind;
use dormouse_launch::{Keeper, Plan, Terminal};
use dormouse_model::{Config, IdMap};
use rustix::fs::{FileType, Mode, OFlags};

use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::log::{Ends, Logs, Output, open_log};
use crate::spec::{Stdio, Stream};
use crate::user::PasswdUser;

/// The group that owns terminals on Debian and most others.
pub(crate) const TTY_GROUP: u32 = 5;

/// LIMIT: terminals of a container. The host has 3,072 for all of them (`kernel.pty.max` without
/// `kernel.pty.reserve`), so 47 containers that open all of theirs leave some to others.
pub(crate) const TERMINALS: u32 = 64;

/// Standard streams of a process: a terminal of these rows and columns, or three descriptors.
pub(crate) enum Io {
    Terminal((u16, u16)),
    Fds([OwnedFd; 3]),
}

pub(crate) struct Streams {
    pub(crate) io: Io,
    pub(crate) kept: Option<OwnedFd>,
    /// Logs that the keeper has to bound.
    pub(crate) unbounded: Vec<PathBuf>,
}

/// Streams that the keeper holds of a container and its starter uses.
#[derive(Default)]
pub(crate) struct KeeperStreams {
    pub(crate) console: Option<OwnedFd>,
    pub(crate) console_log: Option<OwnedFd>,
    pub(crate) stdin: Option<OwnedFd>,
}

/// Opens the standard streams of a container.
pub(crate) fn streams(
    ground: &Ground,
    keeper: &mut Keeper,
    config: &Config,
    user: &PasswdUser,
    io: Stdio,
) -> Result<Streams> {
    if config.spec.process.terminal {
        let size = io.terminal_size.unwrap_or_default();
        let logs = Logs::of(ground, config);
        let unbounded = if logs.is_off { Vec::new() } else { vec![logs.stdout] };
        return Ok(Streams { io: Io::Terminal(size), kept: None, unbounded });
    }
    let mut kept = None;
    let logged = [&io.stdout, &io.stderr].map(|stream| matches!(stream, Stream::Log));
    let Ends { streams: mut logs, unbounded } = Output::of(ground, config).ends(keeper, logged)?;
    let mut open = |stream: Stream, log: Option<OwnedFd>| -> Result<OwnedFd> {
        match stream {
            Stream::Log => match log {
                Some(end) => own(end, config.ids, user.uid),
                None => open_null(),
            },
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
        [open(io.stdin, None)?, open(io.stdout, logs[0].take())?, open(io.stderr, logs[1].take())?];
    Ok(Streams { io: Io::Fds(fds), kept, unbounded })
}

/// Has the keeper bound logs that no reader bounds.
pub(crate) fn bound_new_logs(
    keeper: &mut Keeper,
    config: &Config,
    unbounded: &[PathBuf],
) -> Result<()> {
    if config.spec.log_max_bytes > 0 && !config.spec.auto_remove && !unbounded.is_empty() {
        let paths: Vec<&Path> = unbounded.iter().map(PathBuf::as_path).collect();
        keeper.keep_logs(config.id.as_str(), config.spec.log_max_bytes, &paths)?;
    }
    Ok(())
}

/// Gives the terminal or the kept end of standard input to the keeper, and attaches to it at once.
pub(crate) fn hand_over(
    ground: &Ground,
    keeper: &mut Keeper,
    config: &Config,
    console: Option<OwnedFd>,
    kept: Option<OwnedFd>,
) -> Result<KeeperStreams> {
    let id = config.id.as_str();
    let logs = Logs::of(ground, config);
    let console_log = || match logs.is_off {
        true => open_null(),
        false => open_log(&logs.stdout),
    };
    match (console, kept) {
        (Some(master), _) => keeper.keep_console(id, master, console_log()?)?,
        (None, Some(write)) => keeper.keep_stdin(id, write)?,
        (None, None) => return Ok(KeeperStreams::default()),
    }
    take_over(keeper, config)
}

/// Has the logs of a running container bounded that no reader bounds, after its keeper was killed.
pub(crate) fn bound_logs(ground: &Ground, keeper: &mut Keeper, config: &Config) -> Result<()> {
    let logs = Logs::of(ground, config);
    let is_bounded = config.spec.log_max_bytes > 0 && !config.spec.auto_remove;
    if !is_bounded || logs.is_off || Output::of(ground, config).has_pipes() {
        return Ok(());
    }
    let paths: Vec<&Path> = [Some(&logs.stdout), logs.stderr.as_ref()]
        .into_iter()
        .flatten()
        .map(PathBuf::as_path)
        .collect();
    Ok(keeper.keep_logs(config.id.as_str(), config.spec.log_max_bytes, &paths)?)
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

pub(crate) fn open_null() -> Result<OwnedFd> {
    rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty())
        .map_err(|e| Error::file("cannot open", "/dev/null")(e.into()))
}

/// Duplicates a descriptor.
pub(crate) fn clone_fd(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    fd.try_clone_to_owned().map_err(Error::file("cannot duplicate", "a descriptor"))
}
