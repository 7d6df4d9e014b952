//! Attachment to a process of a container: `run`, `start -a`, `exec`, `attach`.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use dormouse_container::{Engine, Logs, Running, Stdio, Stream};
use dormouse_model::{ContainerId, LogStream, State};
use rustix::fs::{FileType, OFlags};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::create::AttachArgs;
use crate::entry::{Entries, Selection};
use crate::fail;
use crate::log::{Follower, Growing, Sink};
use crate::option::keys::Matcher;
use crate::signal::{self, Signals};
use crate::stream::{self, Ended, LogCopy, Rest, Streams, Watch};
use crate::terminal::{self, Raw};

/// Our ends of the pipes to a process.
#[derive(Debug, Default)]
pub(crate) struct Pipes {
    stdin: Option<OwnedFd>,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
}

/// Makes streams for a foreground process without a terminal, and our ends of them.
///
/// A container never gets a descriptor of the caller: it could change the flags of a pipe, read a
/// terminal, or clear O_APPEND of a log. Output that the caller sends to `/dev/null` goes to
/// `unwanted`.
pub(crate) fn pipes(interactive: bool, unwanted: fn() -> Stream) -> Result<(Stdio, Pipes)> {
    let mut ours = Pipes::default();
    let pipe = || pipe_with(PipeFlags::CLOEXEC).context("cannot make a pipe");
    let stdin = if interactive && !is_null(rustix::stdio::stdin()) {
        let (read, write) = pipe()?;
        ours.stdin = Some(write);
        Stream::Fd(read)
    } else {
        Stream::Null
    };
    let out = |fd, end: &mut Option<OwnedFd>| -> Result<Stream> {
        if is_null(fd) {
            return Ok(unwanted());
        }
        let (read, write) = pipe()?;
        *end = Some(read);
        Ok(Stream::Fd(write))
    };
    let stdout = out(rustix::stdio::stdout(), &mut ours.stdout)?;
    let stderr = out(rustix::stdio::stderr(), &mut ours.stderr)?;
    Ok((Stdio { stdin, stdout, stderr, terminal_size: None }, ours))
}

/// Makes streams for a process in the background or with a terminal.
pub(crate) fn elsewhere(stdin: Stream, output: fn() -> Stream) -> Stdio {
    let terminal_size = terminal::size().map(|s| (s.ws_row, s.ws_col));
    Stdio { stdin, stdout: output(), stderr: output(), terminal_size }
}

/// Returns whether a descriptor is `/dev/null`.
fn is_null(fd: impl AsFd) -> bool {
    rustix::fs::fstat(fd).is_ok_and(|s| {
        FileType::from_raw_mode(s.st_mode) == FileType::CharacterDevice
            && s.st_rdev == rustix::fs::makedev(1, 3)
    })
}

/// Moves bytes until the process exits; returns its exit code, or 0 after detaching.
pub(crate) fn foreground(
    engine: &Engine,
    mut running: Running,
    pipes: Pipes,
    interactive: bool,
    of: Of,
    attach: &AttachArgs,
    signals: &Signals,
) -> Result<Ending> {
    let (mut out, mut err) = (None, None);
    let piped = pipes.stdout.is_some() || pipes.stderr.is_some();
    if of == (Of::Container { logs: true }) && (piped || running.console.is_some()) {
        let logs = engine.logs(&running.id)?;
        out = open_log(&logs, LogStream::Stdout);
        err = open_log(&logs, LogStream::Stderr);
    }
    let streams = match running.console.take() {
        Some(master) => Streams::Terminal {
            master,
            stdin: interactive,
            keys: Matcher::new(attach.detach_keys.clone()),
            log: out,
            typed: Vec::new(),
        },
        None => Streams::Pipes {
            stdin: pipes.stdin,
            stdout: pipes.stdout.map(|p| (p, out)),
            stderr: pipes.stderr.map(|p| (p, err)),
        },
    };
    serve(engine, running, of, streams, attach, signals, None)
}

/// Opens the log of a stream for appending; a container whose log cannot be opened runs without.
fn open_log(logs: &Logs, stream: LogStream) -> Option<LogCopy> {
    let (path, entries_of) = match (&logs.entries, stream) {
        _ if logs.is_off => return None,
        (Some(entries), stream) => (entries, Some(stream)),
        (None, LogStream::Stdout) => (&logs.stdout, None),
        (None, LogStream::Stderr) => (logs.stderr.as_ref()?, None),
    };
    let log = File::options().append(true).create(true).mode(0o600).open(path).ok()?;
    Some(LogCopy { log: log.into(), entries_of })
}

/// End of an attachment.
#[derive(Debug)]
pub(crate) enum Ending {
    /// The process has exited with this code.
    Exited(u8),
    /// The caller detached.
    Detached,
}

impl Ending {
    /// Returns the exit code of this program.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Exited(code) => *code,
            Self::Detached => 0,
        }
    }
}

/// Kind of the attached process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Of {
    /// First process of a container, which is settled at its exit.
    Container {
        /// Data from the pipes is appended to the container's logs, too.
        logs: bool,
    },
    /// First process of a container started by another command.
    Other,
    /// Process of `exec`.
    Exec,
}

/// Serves an attachment to its end. A terminal stays attached while its container is asleep: the caller's input wakes
/// the container, and so does anything else.
///
/// LIMIT: input that arrives while the container is being saved is lost, as it is in the old terminal.
fn serve(
    engine: &Engine,
    mut running: Running,
    mut of: Of,
    mut streams: Streams,
    attach: &AttachArgs,
    signals: &Signals,
    mut watch: Option<&mut dyn Watch>,
) -> Result<Ending> {
    let id = running.id.clone();
    let is_terminal = of != Of::Exec && matches!(streams, Streams::Terminal { .. });
    let mut stdin = matches!(streams, Streams::Terminal { stdin: true, .. });
    // In between the caller's terminal remains raw.
    let _raw = if stdin { Raw::enter()? } else { None };
    loop {
        let pidfd = running.pidfd.try_clone().context("cannot duplicate a descriptor")?;
        let pass = |number| {
            if attach.sig_proxy {
                let _ = running.signal(number); // the process may just have exited
                true
            } else {
                !matches!(number, signal::SIGHUP | signal::SIGINT | signal::SIGTERM)
            }
        };
        match stream::attach(streams, pidfd.as_fd(), signals, watch.take(), pass)? {
            Ended::Detached => {
                running.detach();
                return Ok(Ending::Detached);
            }
            Ended::Exited if is_terminal && engine.fell_asleep(&running)? => {}
            Ended::Exited => {
                let code = match of {
                    Of::Container { .. } => Some(engine.finish(running)?.code),
                    Of::Other => engine.wait(&id)?.code,
                    Of::Exec => Some(running.wait()?.code),
                };
                return Ok(Ending::Exited(exit_code(code)));
            }
        }
        // The keeper writes the output to the log until this program is attached again.
        let shown = open_shown(engine, &id);
        match of {
            Of::Container { .. } => drop(engine.finish(running)?),
            _ => running.detach(),
        }
        let mut keys = Matcher::new(attach.detach_keys.clone());
        let is_over = || Ok(engine.state(&id)? != State::Asleep);
        let typed = match stream::rest(&mut stdin, &mut keys, signals, is_over)? {
            Rest::Typed(typed) => typed,
            Rest::Over if engine.state(&id)? == State::Stopped => {
                return Ok(Ending::Exited(exit_code(engine.wait(&id)?.code)));
            }
            Rest::Over => Vec::new(),
            Rest::Detached => return Ok(Ending::Detached),
        };
        running = engine.attach(&id)?;
        let master = running.console.take().context("the woken container has no terminal")?;
        if let Some(mut shown) = shown {
            shown.show_rest();
        }
        let log = open_log(&engine.logs(&id)?, LogStream::Stdout);
        streams = Streams::Terminal { master, stdin, keys, log, typed };
        of = Of::Other;
    }
}

/// The log of a terminal, at the end of the output that this program has shown.
struct Shown(File);

/// Opens the log of a terminal at its end. A container without a log shows no output of the time in between.
fn open_shown(engine: &Engine, id: &ContainerId) -> Option<Shown> {
    let logs = engine.logs(id).ok()?;
    if logs.is_off || logs.entries.is_some() {
        return None;
    }
    let mut log = File::open(&logs.stdout).ok()?;
    log.seek(SeekFrom::End(0)).ok()?;
    Some(Shown(log))
}

impl Shown {
    /// Shows what was appended since.
    fn show_rest(&mut self) {
        // The caller may read no more, which the next output shows.
        let _ = std::io::copy(&mut self.0, &mut std::io::stdout().lock());
        let _ = std::io::stdout().flush();
    }
}

/// Converts an exit code for a program's return; an unknown exit is a failure of this program.
fn exit_code(code: Option<i32>) -> u8 {
    code.map_or(fail::FAILED, |code| (code & 0xff) as u8)
}

/// Attaches to a running container. Without a terminal the output is read from its logs, from now
/// on.
pub(crate) fn attach(
    engine: &Engine,
    id: &ContainerId,
    stdin: bool,
    args: &AttachArgs,
) -> Result<Ending> {
    let signals = Signals::take()?;
    let mut running = engine.attach(id)?;
    if let Some(master) = running.console.take() {
        let keys = Matcher::new(args.detach_keys.clone());
        let log = open_log(&engine.logs(id)?, LogStream::Stdout);
        let streams = Streams::Terminal { master, stdin, keys, log, typed: Vec::new() };
        return serve(engine, running, Of::Other, streams, args, &signals, None);
    }
    let mut follower =
        follow(engine, id, &Selection { tail: Some(0), ..Selection::default() }, true)?;
    let to = running.stdin.take().filter(|_| stdin);
    let streams = Streams::Pipes { stdin: to, stdout: None, stderr: None };
    serve(engine, running, Of::Other, streams, args, &signals, Some(&mut *follower))
}

/// Opens the log of a container at the first line that is selected.
pub(crate) fn follow(
    engine: &Engine,
    id: &ContainerId,
    selection: &Selection,
    follows: bool,
) -> Result<Box<dyn Watch>> {
    let logs = engine.logs(id)?;
    engine.flush_log(id)?;
    let mut plain = Follower::new(plain_logs(&logs, selection.tail)?, follows)?;
    let Some(path) = logs.entries.as_deref() else {
        if selection.needs_times() {
            bail!(
                "the log of this container has no times, because its program writes to it: \
                 create it with --log-driver k8s-file and without --tty, or use --tail"
            );
        }
        return Ok(Box::new(plain));
    };
    let mut entries = Entries::open(path, selection, follows)?;
    // Plain files, too, of a start under a keeper of an older program. The present one goes on.
    match modified(path) >= modified(&logs.stdout) {
        true => plain.serve().map(|()| Box::new(entries) as Box<dyn Watch>),
        false => entries.serve().map(|()| Box::new(plain) as Box<dyn Watch>),
    }
}

fn modified(path: &Path) -> Option<SystemTime> {
    std::fs::metadata(path).and_then(|meta| meta.modified()).ok()
}

/// Opens the plain logs of a container, each at the beginning of its last `tail` lines.
fn plain_logs(logs: &Logs, tail: Option<u64>) -> Result<Vec<(Growing, Sink)>> {
    let mut all = Vec::new();
    for (path, sink) in [(Some(&logs.stdout), Sink::Out), (logs.stderr.as_ref(), Sink::Err)] {
        if let Some(mut log) = path.map(|p| Growing::open(p)).transpose()?.flatten() {
            match tail {
                Some(0) => log.seek_end()?,
                Some(lines) => log.seek_last(lines)?,
                None => {}
            }
            all.push((log, sink));
        }
    }
    Ok(all)
}

/// Flags that open a directory for `*at` calls.
pub(crate) const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW);
