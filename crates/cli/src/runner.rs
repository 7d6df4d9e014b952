//! A runner: a process of the keeper that executes commands for their callers.
//!
//! The caller's process ([`dormouse_entry`]) sends its words, its environment, its standard streams and its working
//! directory, and waits for the exit code. Here they become those of this process, and the command is executed as in
//! a process of its own. One runner executes one command at a time, in one thread.
//!
//! **Callers.** The caller must be what this process is: the host's root with the same namespaces, root
//! directory, capabilities, security label and program, and without a filter ([`Standing`]). Any other executes its
//! command itself, as do callers with a terminal.
//!
//! **Kills.** When the caller is killed, the kernel kills this process, wherever it is in the command. Signals arrive
//! as they would in the caller's process, which forwards them: the verb reads them ([`crate::signal`]), or they kill.
//!
//! **Nothing stays.** After a command the standard streams are `/dev/null`. A runner that may have kept something of a
//! caller exits: after a panic, a thread that lives on, and output that could not be written. All exit after
//! [`COMMANDS_MAX`] commands or [`LIFE`], so that what a process remembers of the host is not older than that.
//!
//! LIMIT: the cgroup, the resource limits, the nice value, the supplementary groups and the session of a command are
//! those of the keeper. A Landlock domain of a caller, and what its cgroup refuses, do not apply to it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::panic::catch_unwind;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use dormouse_entry::{Answer, DESCRIPTORS, FORWARDED, Head, TEXTS_MAX_BYTES, bit};
use dormouse_kernel::{call, pidfd, proc, start};
use dormouse_launch::wire;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, StatxFlags};
use rustix::net::{RecvFlags, SendFlags, sockopt};
use rustix::process::Signal;

use crate::{quick, umask};

/// Commands until a runner exits.
const COMMANDS_MAX: usize = 1000;
/// Time until a runner exits.
const LIFE: Duration = Duration::from_secs(60);
/// How long a caller takes to send its command, and to end when it has its exit code.
const SILENT_MAX: Duration = Duration::from_secs(1);
/// The exit code of a command that panicked.
const PANICKED: u8 = 101;

/// Executes commands until the keeper, whose socket is the standard input, has no more.
pub(crate) fn run() -> Result<()> {
    let keeper = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3);
    let keeper = keeper.context("cannot duplicate a descriptor")?;
    let own = pidfd::open(std::process::id())?;
    let standing = Standing::of(std::process::id())?;
    forget_streams()?;
    let since = Instant::now();
    for _ in 0..COMMANDS_MAX {
        // ORDER: the last caller has ended, so no signal of it is under way.
        rustix::net::send(&keeper, b"\n", SendFlags::NOSIGNAL)
            .context("cannot answer the keeper")?;
        let mut clients = Vec::new();
        let received = wire::receive(&keeper, &mut [0], RecvFlags::empty(), |fd| clients.push(fd));
        let Some(client) = clients.pop().filter(|_| received.is_ok()) else { break };
        // Without an answer the caller executes its command itself.
        if since.elapsed() > LIFE || execute(&client, &own, &standing)? == After::Exit {
            break;
        }
    }
    Ok(())
}

/// What a runner does after a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    Next,
    Exit,
}

/// Executes the command of a client, or leaves it to the client.
fn execute(client: &OwnedFd, own: &OwnedFd, standing: &Standing) -> Result<After> {
    let silent = Some(SILENT_MAX);
    sockopt::set_socket_timeout(client, sockopt::Timeout::Recv, silent)
        .context("cannot set a timeout")?;
    let peer = sockopt::socket_peercred(client).context("cannot find the caller")?;
    let Some(command) = Command::receive(client.as_fd()) else { return Ok(After::Next) };
    let caller = Standing::of(peer.pid.as_raw_pid() as u32);
    if !standing.is_free() || caller.ok().as_ref() != Some(standing) {
        return Ok(After::Next);
    }
    // ORDER: the caller writes nothing to the pipe, so its next event is the caller's end. An earlier end causes none.
    call::set_file_signal(command.end.as_fd(), Some(Signal::KILL.as_raw()))
        .context("cannot be ended with the caller")?;
    if ends_within(&command.end, Duration::ZERO) {
        return Ok(After::Exit);
    }
    let (words, end) = command.become_process()?;
    wire::send(client, &Answer::TAKEN, &[own.as_fd()], SendFlags::empty())
        .context("cannot answer the caller")?;
    let code = catch_unwind(|| quick::main(words));
    let is_written = std::io::stdout().flush().is_ok();
    let is_alone = start::has_one_thread();
    call::set_file_signal(end.as_fd(), None).context("cannot outlive the caller")?;
    // ORDER: before the answer, with which the files that the caller has named are its own again.
    forget_streams()?;
    let ended = Answer::ended(*code.as_ref().unwrap_or(&PANICKED));
    let _ = wire::send(client, &ended, &[], SendFlags::empty());
    let is_clean = code.is_ok() && is_written && is_alone;
    Ok(if is_clean && ends_within(&end, SILENT_MAX) { After::Next } else { After::Exit })
}

/// A command with what belongs to it.
struct Command {
    words: Vec<OsString>,
    variables: Vec<Vec<u8>>,
    umask: u32,
    ignored: u32,
    streams: [OwnedFd; 3],
    cwd: OwnedFd,
    /// The read end of a pipe, which hangs up when the caller ends.
    end: OwnedFd,
}

impl Command {
    /// Receives a command. `None` if it is malformed or late.
    fn receive(client: BorrowedFd<'_>) -> Option<Self> {
        let mut bytes = vec![0; Head::BYTES + TEXTS_MAX_BYTES];
        let mut fds = Vec::new();
        let keep = |fd| fds.push(fd);
        let length = wire::receive(client, &mut bytes, RecvFlags::empty(), keep).ok()?;
        let (head, texts) = bytes.get(..length)?.split_first_chunk::<{ Head::BYTES }>()?;
        let Head { magic, words, umask, ignored, bytes } = Head::decode(head);
        let is_whole = magic == Head::MAGIC && bytes as usize == texts.len();
        let texts = texts.strip_suffix(&[0]).filter(|_| is_whole)?;
        let mut texts = texts.split(|byte| *byte == 0).map(<[u8]>::to_vec);
        let words = texts.by_ref().take(words as usize).map(OsString::from_vec).collect();
        let variables = texts.collect();
        let [stdin, stdout, stderr, cwd, end] = <[OwnedFd; DESCRIPTORS]>::try_from(fds).ok()?;
        let streams = [stdin, stdout, stderr];
        Some(Self { words, variables, umask, ignored, streams, cwd, end })
    }

    /// Makes streams, directory, umask, ignored signals and environment those of this process. Returns the words and
    /// the pipe.
    fn become_process(self) -> Result<(Vec<OsString>, OwnedFd)> {
        let [stdin, stdout, stderr] = &self.streams;
        rustix::stdio::dup2_stdin(stdin)?;
        rustix::stdio::dup2_stdout(stdout)?;
        rustix::stdio::dup2_stderr(stderr)?;
        rustix::process::fchdir(&self.cwd)?;
        umask::set_callers(self.umask);
        ignore(self.ignored)?;
        start::set_environment(pairs(&self.variables))?;
        Ok((self.words, self.end))
    }
}

/// Name and value of each variable, the first of a name last: that one counts (getenv(3)).
fn pairs(variables: &[Vec<u8>]) -> impl Iterator<Item = (&OsStr, &OsStr)> {
    variables.iter().rev().filter_map(|variable| {
        let at = variable.iter().position(|byte| *byte == b'=').filter(|at| *at > 0)?;
        Some((OsStr::from_bytes(&variable[..at]), OsStr::from_bytes(&variable[at + 1..])))
    })
}

/// Ignores these signals of those that callers forward, and no others.
fn ignore(set: u32) -> Result<()> {
    for signal in FORWARDED {
        call::set_ignored(signal as i32, set & bit(signal) != 0)?;
    }
    Ok(())
}

/// Makes the standard streams `/dev/null`, and leaves the caller's directory.
#[expect(clippy::disallowed_methods, reason = "a runner has one thread")]
fn forget_streams() -> Result<()> {
    let null = File::options().read(true).write(true).open("/dev/null");
    let null = null.context("cannot open /dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    std::env::set_current_dir("/").context("cannot enter /")
}

/// Waits for the end of a caller.
fn ends_within(end: &OwnedFd, time: Duration) -> bool {
    let mut polled = [PollFd::new(end, PollFlags::empty())];
    let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
    poll(&mut polled, Some(&time)).is_ok_and(|ready| ready > 0)
}

/// What a process may do, and where it is.
#[derive(Debug, PartialEq, Eq)]
struct Standing {
    /// Device, inode and mount of its namespaces, its root directory and its program. None where the kernel has no
    /// such namespace.
    places: Vec<Option<(u32, u32, u64, u64)>>,
    /// Its ids and its capabilities (proc_pid_status(5)).
    rights: Vec<Option<String>>,
    /// Its mode of seccomp(2).
    filter: Option<u64>,
    /// Its label of a security module. None where there is no such module.
    label: Option<Vec<u8>>,
}

impl Standing {
    fn of(pid: u32) -> Result<Self> {
        let place = |name: &str| {
            let path = format!("/proc/{pid}/{name}");
            let fields = StatxFlags::INO | StatxFlags::MNT_ID;
            let found = rustix::fs::statx(CWD, path, AtFlags::empty(), fields).ok()?;
            Some((found.stx_dev_major, found.stx_dev_minor, found.stx_ino, found.stx_mnt_id))
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
        let rights = ["Uid", "Gid", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs"];
        Ok(Self {
            places: places.into_iter().map(place).collect(),
            rights: rights.into_iter().map(|name| fields.field(name).map(str::to_owned)).collect(),
            filter: fields.number("Seccomp"),
            label: std::fs::read(format!("/proc/{pid}/attr/current")).ok(),
        })
    }

    /// Returns whether it has no filter: two of them cannot be compared.
    fn is_free(&self) -> bool {
        self.filter.unwrap_or(0) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_have_names_and_the_first_of_a_name_counts() {
        let all = ["A=1", "=A=2", "A=3", "B", "C=", "D=x=y", ""].map(|it| it.as_bytes().to_vec());
        let all: Vec<_> =
            pairs(&all).map(|(name, value)| (name.to_str(), value.to_str())).collect();
        let pair = |name, value| (Some(name), Some(value));
        assert_eq!(all, [pair("D", "x=y"), pair("C", ""), pair("A", "3"), pair("A", "1")]);
    }
}
