//! A runner: a process of the keeper that executes commands for their callers.
//!
//! The caller's process ([`dormouse_entry`]) sends its words, its environment, its standard streams and its working
//! directory, and waits for the exit code. Here they become those of this process, and the command is executed as in
//! a process of its own. One runner executes one command at a time, in one thread.
//!
//! **Whose command.** The caller must be what this process is: the host's root with the same namespaces, root
//! directory, capabilities, filter, security label and program ([`Standing`]). Any other executes its command itself,
//! as do callers with a terminal.
//!
//! **Kills.** When the caller is killed, the kernel kills this process, wherever it is in the command. Signals arrive
//! as they would in the caller's process, which forwards them: the verb reads them ([`crate::signal`]), or they kill.
//!
//! **Nothing stays.** After a command the standard streams are `/dev/null`. A runner that may have kept something of a
//! caller exits: after a panic, and after output that could not be written. All exit after [`COMMANDS_MAX`] commands
//! or [`LIFE`], so that what a process remembers of the host is not older than that.
//!
//! LIMIT: the cgroup, the resource limits, the nice value and the session of a command are those of the keeper.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::panic::catch_unwind;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use dormouse_entry::{Answer, DESCRIPTORS, Head, TEXTS_MAX_BYTES};
use dormouse_kernel::{call, proc, start};
use dormouse_launch::wire;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags, sockopt};
use rustix::process::Signal;

use crate::{quick, umask};

/// Commands until a runner exits.
const COMMANDS_MAX: usize = 1000;
/// Time until a runner exits.
const LIFE: Duration = Duration::from_secs(60);
/// How long a caller takes to send its command, and to close its connection at the end.
const SILENT_MAX: Duration = Duration::from_secs(1);
/// The exit code of a command that panicked.
const PANICKED: u8 = 101;

/// Executes commands until the keeper, whose socket is the standard input, has no more.
pub(crate) fn run() -> Result<()> {
    let keeper = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3);
    let keeper = keeper.context("cannot duplicate a descriptor")?;
    let own = Standing::of(std::process::id())?;
    forget_streams()?;
    let since = Instant::now();
    for _ in 0..COMMANDS_MAX {
        let mut clients = Vec::new();
        let received = wire::receive(&keeper, &mut [0], RecvFlags::empty(), |fd| clients.push(fd));
        let Some(client) = clients.pop().filter(|_| received.is_ok()) else { break };
        if execute(&client, &own)? == After::Exit || since.elapsed() > LIFE {
            break;
        }
        // ORDER: the caller has closed its connection, so no signal of it is under way.
        rustix::net::send(&keeper, b"\n", SendFlags::NOSIGNAL)
            .context("cannot answer the keeper")?;
    }
    Ok(())
}

/// What a runner does after a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    Next,
    Exit,
}

/// Executes the command of a client, or declines.
fn execute(client: &OwnedFd, own: &Standing) -> Result<After> {
    let silent = Some(SILENT_MAX);
    sockopt::set_socket_timeout(client, sockopt::Timeout::Recv, silent)
        .context("cannot set a timeout")?;
    let peer = sockopt::socket_peercred(client).context("cannot find the caller")?;
    let Some(command) = Command::receive(client.as_fd()) else { return Ok(After::Next) };
    let caller = Standing::of(peer.pid.as_raw_pid() as u32);
    if caller.ok().as_ref() != Some(own) || command.become_process().is_err() {
        forget_streams()?;
        let _ = wire::send(client, &Answer::DECLINED, &[], SendFlags::empty());
        return Ok(After::Next);
    }
    // ORDER: the caller sends nothing more, so its next event is its end. One that has ended before causes none.
    let kill = Some(Signal::KILL.as_raw());
    call::set_file_signal(client.as_fd(), kill).context("cannot be ended with the caller")?;
    if ends_within(client.as_fd(), Duration::ZERO) {
        return Ok(After::Exit);
    }
    let Command { words, .. } = command;
    let code = catch_unwind(|| quick::main(words));
    let is_written = std::io::stdout().flush().is_ok();
    call::set_file_signal(client.as_fd(), None).context("cannot outlive the caller")?;
    let _ = wire::send(
        client,
        &Answer::ended(*code.as_ref().unwrap_or(&PANICKED)),
        &[],
        SendFlags::empty(),
    );
    forget_streams()?;
    let is_clean = code.is_ok() && is_written && ends_within(client.as_fd(), SILENT_MAX);
    Ok(if is_clean { After::Next } else { After::Exit })
}

/// A command with what belongs to it.
struct Command {
    words: Vec<OsString>,
    variables: Vec<Vec<u8>>,
    umask: u32,
    streams: [OwnedFd; 3],
    cwd: OwnedFd,
}

impl Command {
    /// Receives a command. `None` if it is malformed or late.
    fn receive(client: BorrowedFd<'_>) -> Option<Self> {
        let mut bytes = vec![0; Head::BYTES + TEXTS_MAX_BYTES];
        let mut fds = Vec::new();
        let length =
            wire::receive(client, &mut bytes, RecvFlags::empty(), |fd| fds.push(fd)).ok()?;
        let (head, texts) = bytes.get(..length)?.split_first_chunk::<{ Head::BYTES }>()?;
        let head = Head::decode(head);
        let texts = texts.strip_suffix(&[0]).filter(|_| head.bytes as usize == texts.len())?;
        let mut texts = texts.split(|byte| *byte == 0).map(<[u8]>::to_vec);
        let words = texts.by_ref().take(head.words as usize).map(OsString::from_vec).collect();
        let variables = texts.collect();
        let [stdin, stdout, stderr, cwd] = <[OwnedFd; DESCRIPTORS]>::try_from(fds).ok()?;
        let streams = [stdin, stdout, stderr];
        let is_known = head.magic == Head::MAGIC;
        is_known.then_some(Self { words, variables, umask: head.umask, streams, cwd })
    }

    /// Makes streams, directory, umask and environment those of this process.
    fn become_process(&self) -> Result<()> {
        let [stdin, stdout, stderr] = &self.streams;
        rustix::stdio::dup2_stdin(stdin)?;
        rustix::stdio::dup2_stdout(stdout)?;
        rustix::stdio::dup2_stderr(stderr)?;
        rustix::process::fchdir(&self.cwd)?;
        umask::set_callers(self.umask);
        let variables = self.variables.iter().filter_map(|variable| {
            // As the C library: a name has one byte at least.
            let at = 1 + variable.get(1..)?.iter().position(|byte| *byte == b'=')?;
            Some((OsStr::from_bytes(&variable[..at]), OsStr::from_bytes(&variable[at + 1..])))
        });
        Ok(start::set_environment(variables)?)
    }
}

/// Makes the standard streams `/dev/null`, and leaves the caller's directory.
fn forget_streams() -> Result<()> {
    let null = File::options().read(true).write(true).open("/dev/null");
    let null = null.context("cannot open /dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    std::env::set_current_dir("/").context("cannot enter /")
}

/// Waits for the end of a connection.
fn ends_within(client: BorrowedFd<'_>, time: Duration) -> bool {
    let mut polled = [PollFd::new(&client, PollFlags::empty())];
    let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
    poll(&mut polled, Some(&time)).is_ok_and(|ready| ready > 0)
}

/// What a process may do, and where it is.
#[derive(Debug, PartialEq, Eq)]
struct Standing {
    /// Device and inode of its namespaces, its root directory and its program.
    places: Vec<(u64, u64)>,
    /// Its ids, its capabilities and its filter (proc_pid_status(5)).
    rights: Vec<Option<String>>,
    /// Its label of a security module. None where there is no such module.
    label: Option<Vec<u8>>,
}

impl Standing {
    fn of(pid: u32) -> Result<Self> {
        let place = |name: &str| {
            let path = format!("/proc/{pid}/{name}");
            let found =
                std::fs::metadata(&path).with_context(|| format!("cannot look at '{path}'"));
            found.map(|it: Metadata| (it.dev(), it.ino()))
        };
        let places = [
            "ns/cgroup",
            "ns/ipc",
            "ns/mnt",
            "ns/net",
            "ns/pid",
            "ns/time",
            "ns/user",
            "ns/uts",
            "root",
            "exe",
        ];
        let fields = proc::fields(pid)?;
        let rights = [
            "Uid",
            "Gid",
            "CapInh",
            "CapPrm",
            "CapEff",
            "CapBnd",
            "CapAmb",
            "NoNewPrivs",
            "Seccomp",
        ];
        Ok(Self {
            places: places.into_iter().map(place).collect::<Result<_>>()?,
            rights: rights.into_iter().map(|name| fields.field(name).map(str::to_owned)).collect(),
            label: std::fs::read(format!("/proc/{pid}/attr/current")).ok(),
        })
    }
}
