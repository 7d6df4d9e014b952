//! The client side of the keeper: finding it, starting it under a lock, and requests over its
//! socket.
//!
//! `RUN/keeper.sock` is a SOCK_SEQPACKET socket, mode 0600. A process that starts a keeper and a
//! keeper that exits hold `RUN/keeper.lock` (flock(2)), so that there is at most one keeper and no
//! client connects to an exiting one. A connection with at least one reply keeps the keeper alive.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::{FlockOperation, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect,
    socket_with, socketpair, sockopt,
};

use serde::{Deserialize, Serialize};

use crate::protocol::{
    Ended, FILL_DESCRIPTORS, Id, Kind, MESSAGE_MAX_BYTES, Reply, Request, SpawnRequest, Status,
    feature, stream, with,
};
use crate::{ExitStatus, LaunchError, Newborn, wire};

/// Name of the socket in the runtime directory.
pub const SOCKET: &str = "keeper.sock";
/// Name of the vault's socket there: held descriptors of sleeping containers outlive the keeper.
pub const VAULT: &str = "vault.sock";
/// Name of the lock in the runtime directory.
pub const LOCK: &str = "keeper.lock";

/// The parameters of a new keeper.
#[derive(Debug, Clone, Default)]
pub struct KeeperStart {
    /// RUN: its socket, its lock, `c/ID/exit`.
    pub run_dir: PathBuf,
    /// The program `dormouse-keeper`.
    pub program: PathBuf,
    /// Directories of its own cgroup, one per hierarchy; it enters them by itself.
    pub cgroups: Vec<PathBuf>,
    /// Program and arguments that settle containers without a spawner: it reads a line `ID` for each
    /// from its standard input, a socket, and answers with a byte when that container is settled. A `~` before that
    /// says that it waits for the restart of the container. Empty: nothing is settled.
    pub settle: Vec<OsString>,
    /// Program and arguments that wake containers: it reads a line `ID WHY` (`called`, `timer`) for
    /// each from its standard input, a socket, and answers with a byte when that container is
    /// awake.
    pub wake: Vec<OsString>,
    /// Program and arguments that the keeper executes before it exits, after it has closed its
    /// socket, in the host's mount namespace. Empty: none.
    pub tidy: Vec<OsString>,
    /// Program and arguments of the process that makes spares and gives them away. It exits at the end of its standard
    /// input, a socket. Empty: there are none.
    pub nursery: Vec<OsString>,
    /// Program and arguments of a process that executes commands for clients (`dormouse_entry`), which receives their
    /// connections over its standard input, a socket. It sends a byte when it is ready for one, at first as well, and
    /// exits at the end of that socket.
    pub runner: Vec<OsString>,
    /// How many of them there are at once. 0: none.
    pub runners: usize,
    /// How long the keeper stays when nothing is left to keep; less than a second means a second.
    pub linger: Duration,
}

/// A process to be cloned.
#[derive(Debug)]
pub struct Spawn {
    /// The container.
    pub id: String,
    /// First process or a later one.
    pub kind: Kind,
    /// `CLONE_NEW*` (clone(2)). Not NEWCGROUP: see [`crate::Plan::unshare`].
    pub flags: u64,
    /// The network namespace of the new process.
    pub netns: Option<OwnedFd>,
    /// A process (pidfd); the new process joins its pid namespace.
    pub pid_namespace_of: Option<OwnedFd>,
    /// The v2 cgroup (its directory) of the new process.
    pub cgroup: Option<OwnedFd>,
    /// Texts for uid_map and gid_map.
    pub id_map: Option<(String, String)>,
    /// The keeper makes a procfs of its pid namespace: [`Newborn::take_proc`].
    pub proc: bool,
    /// If this connection is closed before [`Keeper::settled`], the keeper settles.
    pub settle: bool,
    /// The [template](Keeper::template) whose memory the new process shares.
    pub template: Option<String>,
}

impl Spawn {
    /// A process of container `id` with new namespaces `flags` and nothing else.
    pub fn new(id: &str, kind: Kind, flags: u64) -> Self {
        Self {
            id: id.to_owned(),
            kind,
            flags,
            netns: None,
            pid_namespace_of: None,
            cgroup: None,
            id_map: None,
            proc: false,
            settle: false,
            template: None,
        }
    }
}

/// An attached terminal.
#[derive(Debug)]
pub struct Console {
    /// The master. While the connection is open, no other process reads it.
    pub master: OwnedFd,
    /// Its log, opened for appending; output read from the master belongs there too.
    pub log: OwnedFd,
}

/// A keeper that was contacted and has not answered yet: it may be about to exit.
#[derive(Debug)]
pub struct Calling(Keeper);

impl Calling {
    /// Waits for the answer; `None` when there was none.
    pub fn answer(mut self) -> Result<Option<Keeper>, LaunchError> {
        match self.0.answer() {
            Ok((Reply::Hello { pid, features }, _)) => {
                (self.0.pid, self.0.features) = (pid, features);
                Ok(Some(self.0))
            }
            Ok(_) => Err(unexpected()),
            // The keeper of an older program does not know the message.
            Err(LaunchError::Refused { source: Errno::BADMSG, .. }) => {
                match self.0.status() {
                    Err(LaunchError::KeeperGone) => return Ok(None),
                    status => self.0.pid = status?.pid,
                }
                Ok(Some(self.0))
            }
            Err(LaunchError::KeeperGone) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

/// A requested process: the socket that will carry its plan.
#[derive(Debug)]
pub struct Expected(OwnedFd);

/// What another process needs to go on with a newborn, beside the descriptors ([`Keeper::pass`]).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Passed {
    pid: u32,
    start_time: u64,
    keeper: u32,
    features: u32,
    waits: bool,
    sent: usize,
    steps: Vec<(u16, String)>,
}

impl Passed {
    /// Returns whether the newborn lives.
    pub fn is_alive(&self) -> bool {
        dormouse_kernel::pidfd::open_exactly(self.pid, self.start_time)
            .is_ok_and(dormouse_kernel::pidfd::is_alive)
    }

    fn newborn(self, pidfd: OwnedFd, sock: OwnedFd) -> Newborn {
        let Self { pid, start_time, waits, sent, steps, .. } = self;
        let mut newborn = Newborn::new(pid, start_time, pidfd, sock);
        newborn.recall(&steps);
        (newborn.waits, newborn.takes_parts, newborn.sent) = (waits, true, sent);
        newborn
    }
}

/// A connection to the keeper.
#[derive(Debug)]
pub struct Keeper {
    sock: OwnedFd,
    path: PathBuf,
    pid: u32,
    /// Bits of [`feature`].
    features: u32,
    mine: HashSet<u32>,
    ended: HashMap<u32, Ended>,
    /// Another process may have this socket for a moment longer ([`Keeper::take_over`]).
    is_shared: bool,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if self.is_shared {
            // Its close would be seen after that of the other process.
            let _ = rustix::net::shutdown(&self.sock, rustix::net::Shutdown::Both);
        }
    }
}

impl AsFd for Keeper {
    /// Readable when a child has exited ([`Keeper::try_wait`]) or the keeper has.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.sock.as_fd()
    }
}

fn id(text: &str) -> Result<Id, LaunchError> {
    Id::new(text.as_bytes()).map_err(|source| LaunchError::Protocol { source })
}

impl Keeper {
    /// Connects to the keeper of this runtime directory, and starts one if there is none.
    pub fn connect_or_start(start: &KeeperStart) -> Result<Self, LaunchError> {
        if let Some(keeper) = Self::connect(&start.run_dir)? {
            return Ok(keeper);
        }
        let lock = lock(&start.run_dir)?;
        if let Some(keeper) = Self::connect(&start.run_dir)? {
            return Ok(keeper);
        }
        run_program(start, lock)?;
        Self::connect(&start.run_dir)?
            .ok_or_else(|| LaunchError::Start { why: "it does not answer".into() })
    }

    /// Connects to the keeper, if there is one.
    pub fn connect(run_dir: &Path) -> Result<Option<Self>, LaunchError> {
        Self::call(run_dir)?.map_or(Ok(None), Calling::answer)
    }

    /// Contacts the keeper, if there is one, and does not wait for its answer.
    pub fn call(run_dir: &Path) -> Result<Option<Calling>, LaunchError> {
        let path = run_dir.join(SOCKET);
        let failed = |source| LaunchError::Connect { path: path.clone(), source };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = match rustix::fs::open(run_dir, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            dir => dir.map_err(failed)?,
        };
        // A name of 108 bytes at most fits into an address; this one is always short.
        let short = format!("/proc/self/fd/{}/{SOCKET}", dir.as_raw_fd());
        let address = SocketAddrUnix::new(short).map_err(failed)?;
        let kind = SocketType::SEQPACKET;
        let sock = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
        let sock = sock.map_err(failed)?;
        match connect(&sock, &address) {
            Err(Errno::NOENT | Errno::CONNREFUSED) => return Ok(None),
            result => result.map_err(failed)?,
        }
        if !sockopt::socket_peercred(&sock).map_err(failed)?.uid.is_root() {
            return Err(failed(Errno::PERM));
        }
        let (mine, ended) = (HashSet::new(), HashMap::new());
        let mut keeper =
            Self { sock, path: path.clone(), pid: 0, features: 0, mine, ended, is_shared: false };
        match keeper.say(&Request::Hello, &[]) {
            Ok(()) => Ok(Some(Calling(keeper))),
            Err(LaunchError::KeeperGone) => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn receive(&mut self, flags: RecvFlags) -> Result<Option<(Reply, Vec<OwnedFd>)>, LaunchError> {
        let mut bytes = [0; MESSAGE_MAX_BYTES];
        let mut fds = Vec::new();
        let n = match wire::receive(&self.sock, &mut bytes, flags, |fd| fds.push(fd)) {
            Ok(0) | Err(Errno::CONNRESET | Errno::PIPE) => return Err(LaunchError::KeeperGone),
            Ok(n) => n,
            Err(Errno::AGAIN) => return Ok(None),
            Err(source) => return Err(LaunchError::Connect { path: self.path.clone(), source }),
        };
        let reply = Reply::decode(&bytes[..n]);
        Ok(Some((reply.map_err(|source| LaunchError::Protocol { source })?, fds)))
    }

    fn say(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(), LaunchError> {
        match wire::send(&self.sock, &request.encode(), fds, SendFlags::empty()) {
            Ok(()) => Ok(()),
            Err(Errno::PIPE | Errno::CONNRESET) => Err(LaunchError::KeeperGone),
            Err(source) => Err(LaunchError::Connect { path: self.path.clone(), source }),
        }
    }

    /// Sends a request and waits for the reply; exits reported in between are kept for later.
    fn ask(
        &mut self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Vec<OwnedFd>), LaunchError> {
        self.say(request, fds)?;
        self.answer()
    }

    fn answer(&mut self) -> Result<(Reply, Vec<OwnedFd>), LaunchError> {
        loop {
            match self.receive(RecvFlags::empty())? {
                None => {}
                Some((Reply::Exited { pid, ended }, _)) => {
                    self.ended.insert(pid, ended);
                }
                Some((Reply::Refused { errno, step }, _)) => {
                    let source = Errno::from_raw_os_error(errno);
                    return Err(LaunchError::Refused { step, source });
                }
                Some(other) => return Ok(other),
            }
        }
    }

    fn done(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(), LaunchError> {
        self.ask(request, fds).map(drop)
    }

    /// The keeper's pid: the parent of the processes it has cloned.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns the keeper's counts.
    pub fn status(&mut self) -> Result<Status, LaunchError> {
        match self.ask(&Request::Status, &[])? {
            (Reply::Status(status), _) => Ok(status),
            _ => Err(unexpected()),
        }
    }

    /// Clones a process, which waits for its plan.
    pub fn spawn(&mut self, spawn: Spawn) -> Result<Newborn, LaunchError> {
        let expected = self.expect(spawn)?;
        self.born(expected)
    }

    /// Requests a process and does not wait until it is [born](Self::born), which must be called
    /// next.
    pub fn expect(&mut self, spawn: Spawn) -> Result<Expected, LaunchError> {
        let failed = |source| LaunchError::Connect { path: self.path.clone(), source };
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let pair = socketpair(AddressFamily::UNIX, kind, flags, None);
        let (sock, theirs) = pair.map_err(failed)?;
        let mut bits = if spawn.proc { with::PROC } else { 0 };
        let mut fds = vec![theirs.as_fd()];
        for (bit, fd) in [
            (with::NETNS, &spawn.netns),
            (with::PID_NAMESPACE, &spawn.pid_namespace_of),
            (with::CGROUP, &spawn.cgroup),
        ] {
            if let Some(fd) = fd {
                bits |= bit;
                fds.push(fd.as_fd());
            }
        }
        let (uid_map, gid_map) = spawn.id_map.clone().unwrap_or_default();
        let request = Request::Spawn(SpawnRequest {
            id: id(&spawn.id)?,
            kind: spawn.kind,
            settle: spawn.settle,
            with: bits,
            flags: spawn.flags,
            uid_map,
            gid_map,
            template: spawn.template.as_deref().map(id).transpose()?,
        });
        self.say(&request, &fds)?;
        Ok(Expected(sock))
    }

    /// Returns the requested process.
    pub fn born(&mut self, expected: Expected) -> Result<Newborn, LaunchError> {
        let (reply, fds) = self.answer()?;
        let Reply::Spawned { pid, start_time } = reply else { return Err(unexpected()) };
        let mut fds = fds.into_iter();
        let pidfd = fds.next().ok_or_else(unexpected)?;
        self.mine.insert(pid);
        let limit = Some(crate::newborn::SILENT_MAX);
        sockopt::set_socket_timeout(&expected.0, sockopt::Timeout::Recv, limit)
            .map_err(|source| LaunchError::HearNewborn { source })?;
        Ok(Newborn {
            pid,
            start_time,
            pidfd,
            proc: fds.next(),
            sock: expected.0,
            steps: Vec::new(),
            waits: false,
            takes_parts: self.features & feature::PARTS != 0,
            sent: 0,
        })
    }

    /// Describes this connection and a newborn of it for another process, which goes on with both. Their descriptors
    /// are to be sent beside it, in this order: the connection, the newborn's pidfd, its socket.
    ///
    /// The keeper notices nothing: the connection stays that of the newborn's starter. The newborn has executed its
    /// plan up to here, and waits for the next part.
    pub fn pass<'k>(&'k self, newborn: &'k Newborn) -> (Passed, [BorrowedFd<'k>; 3]) {
        (self.passed(newborn), [self.sock.as_fd(), newborn.pidfd.as_fd(), newborn.sock.as_fd()])
    }

    /// Describes a newborn of this connection for another process, which goes on with it
    /// ([`Keeper::taken_newborn`]).
    pub fn passed(&self, newborn: &Newborn) -> Passed {
        Passed {
            pid: newborn.pid,
            start_time: newborn.start_time,
            keeper: self.pid,
            features: self.features,
            waits: newborn.waits,
            sent: newborn.sent,
            steps: newborn.memory(),
        }
    }

    /// Goes on with what another process has [passed](Self::pass).
    pub fn take_over(
        run_dir: &Path,
        passed: Passed,
        [sock, pidfd, newborn]: [OwnedFd; 3],
    ) -> (Self, Newborn) {
        let (keeper, features) = (passed.keeper, passed.features);
        let path = run_dir.join(SOCKET);
        let mine = HashSet::from([passed.pid]);
        let ended = HashMap::new();
        let own = Self { sock, path, pid: keeper, features, mine, ended, is_shared: true };
        (own, passed.newborn(pidfd, newborn))
    }

    /// Leaves this connection to the process to which it was [passed](Self::pass): one that was taken over is not shut
    /// down.
    pub fn leave(mut self) {
        self.is_shared = false;
    }

    /// Gives the socket of a newborn to the keeper, whose child it is: the newborn waits for the rest of its plan until
    /// a later process [takes](Self::ask_for_newborn) it, and exits with the keeper.
    ///
    /// Errors: the keeper is of an older program.
    pub fn keep_newborn(&mut self, container: &str, newborn: Newborn) -> Result<(), LaunchError> {
        self.done(&Request::KeepNewborn { id: id(container)? }, &[newborn.sock.as_fd()])
    }

    /// Requests a newborn that [`Keeper::keep_newborn`] has given to the keeper, without waiting for the reply, which
    /// [`Keeper::taken_newborn`] reads. `None` if it is not of this keeper: then nothing is requested.
    pub fn ask_for_newborn(
        &mut self,
        container: &str,
        passed: Passed,
    ) -> Result<Option<Passed>, LaunchError> {
        if passed.keeper != self.pid {
            return Ok(None);
        }
        self.say(&Request::TakeNewborn { id: id(container)? }, &[])?;
        Ok(Some(passed))
    }

    /// Returns the newborn that was requested, which is one of this connection then; `None` if it has exited, or the
    /// keeper has it no more.
    pub fn taken_newborn(&mut self, passed: Passed) -> Result<Option<Newborn>, LaunchError> {
        let sock = match self.taken() {
            Err(LaunchError::Refused { source: Errno::NOENT | Errno::BADMSG, .. }) => {
                return Ok(None);
            }
            sock => sock?,
        };
        self.mine.insert(passed.pid);
        let Ok(pidfd) = dormouse_kernel::pidfd::open_exactly(passed.pid, passed.start_time) else {
            return Ok(None);
        };
        Ok(Some(passed.newborn(pidfd, sock)).filter(Newborn::is_waiting))
    }

    /// Returns whether the keeper lives and has reported nothing: none of the children of this connection has exited.
    pub fn is_quiet(&self) -> bool {
        wire::is_quiet(&self.sock)
    }

    /// Waits until the child has exited. A child of another connection can be waited for too.
    pub fn wait(&mut self, pid: u32) -> Result<ExitStatus, LaunchError> {
        if !self.mine.contains(&pid) && !self.ended.contains_key(&pid) {
            self.say(&Request::Wait { pid }, &[])?;
        }
        loop {
            if let Some(ended) = self.ended.remove(&pid) {
                self.mine.remove(&pid);
                return Ok(ended.into());
            }
            self.hear(RecvFlags::empty())?;
        }
    }

    /// Returns the exit status of the child, spawned over this connection, if it has exited; never
    /// blocks.
    pub fn try_wait(&mut self, pid: u32) -> Result<Option<ExitStatus>, LaunchError> {
        while self.hear(RecvFlags::DONTWAIT)? {}
        let ended = self.ended.remove(&pid);
        if ended.is_some() {
            self.mine.remove(&pid);
        }
        Ok(ended.map(ExitStatus::from))
    }

    fn hear(&mut self, flags: RecvFlags) -> Result<bool, LaunchError> {
        match self.receive(flags)? {
            None => Ok(false),
            Some((Reply::Exited { pid, ended }, _)) => {
                self.ended.insert(pid, ended);
                Ok(true)
            }
            Some((Reply::Refused { errno, step }, _)) => {
                Err(LaunchError::Refused { step, source: Errno::from_raw_os_error(errno) })
            }
            Some(_) => Err(unexpected()),
        }
    }

    /// Reports that clean-up after the exit of a child spawned with [`Spawn::settle`] is done. The
    /// keeper reads the report before the end of the connection, so there is no reply to wait for.
    pub fn settled(mut self, pid: u32) -> Result<(), LaunchError> {
        self.say(&Request::Settled { pid }, &[])
    }

    /// Passes the master of a container's terminal, and its log (opened for appending), to the
    /// keeper: output goes to the log while no client is attached.
    pub fn keep_console(
        &mut self,
        container: &str,
        master: OwnedFd,
        log: OwnedFd,
    ) -> Result<(), LaunchError> {
        let request = Request::KeepConsole { id: id(container)? };
        self.done(&request, &[master.as_fd(), log.as_fd()])
    }

    /// Passes the write end of a container's standard input to the keeper.
    pub fn keep_stdin(&mut self, container: &str, write_end: OwnedFd) -> Result<(), LaunchError> {
        let request = Request::KeepStdin { id: id(container)? };
        self.done(&request, &[write_end.as_fd()])
    }

    /// Keeps the logs of a container under `bound_bytes` each, by holes at their head: readers
    /// begin at SEEK_DATA (lseek(2)), writers (O_APPEND) are not affected. The paths are absolute,
    /// two at most.
    pub fn keep_logs(
        &mut self,
        container: &str,
        bound_bytes: u64,
        paths: &[&Path],
    ) -> Result<(), LaunchError> {
        let text = |p: &&Path| p.to_str().map(str::to_owned);
        let paths: Option<Vec<String>> = paths.iter().map(text).collect();
        let Some(paths) = paths.filter(|p| p.len() <= 2) else {
            return Err(LaunchError::Plan { why: "a log's path is not UTF-8" });
        };
        self.done(&Request::KeepLogs { id: id(container)?, bound_bytes, paths }, &[])
    }

    /// Passes the read ends of the pipes for a container's output to the keeper, whose reader
    /// appends their contents as entries ([`dormouse_model::LogEntry`]) to the log at `path`. The
    /// path is absolute and the file exists. On disk the log has `bound_bytes`; 0: no bound.
    ///
    /// Refused with EBADMSG by a keeper of an older program.
    pub fn keep_output(
        &mut self,
        container: &str,
        path: &Path,
        bound_bytes: u64,
        ends: [Option<BorrowedFd<'_>>; 2],
    ) -> Result<(), LaunchError> {
        let path = path.to_str().ok_or(LaunchError::Plan { why: "a log's path is not UTF-8" })?;
        let bits = ends.iter().zip([stream::OUT, stream::ERR]);
        let streams = bits.filter_map(|(end, bit)| end.map(|_| bit)).sum();
        let (id, path) = (id(container)?, path.to_owned());
        let request = Request::KeepOutput { id, streams, bound_bytes, path };
        let ends: Vec<_> = ends.into_iter().flatten().collect();
        self.done(&request, &ends)
    }

    /// Waits until the log of a container has all output that was written before. A keeper of an
    /// older program has nothing to wait for.
    pub fn flush_output(&mut self, container: &str) -> Result<(), LaunchError> {
        match self.done(&Request::FlushOutput { id: id(container)? }, &[]) {
            Err(LaunchError::Refused { source, .. }) if source == Errno::BADMSG => Ok(()),
            done => done,
        }
    }

    /// Returns whether the keeper has output of a container. A keeper of an older program has none.
    pub fn holds_output(&mut self, container: &str) -> Result<bool, LaunchError> {
        match self.done(&Request::HoldsOutput { id: id(container)? }, &[]) {
            Err(LaunchError::Refused { source: Errno::NOENT | Errno::BADMSG, .. }) => Ok(false),
            done => done.map(|()| true),
        }
    }

    /// Takes over a container's terminal for as long as this connection is open. Refused with EBUSY
    /// while another client is attached, with ENOENT if the container has no terminal.
    pub fn attach_console(&mut self, container: &str) -> Result<Console, LaunchError> {
        let (_, fds) = self.ask(&Request::AttachConsole { id: id(container)? }, &[])?;
        let mut fds = fds.into_iter();
        let (Some(master), Some(log)) = (fds.next(), fds.next()) else {
            return Err(unexpected());
        };
        Ok(Console { master, log })
    }

    /// Returns the write end of a container's standard input. ENOENT if the keeper holds none.
    pub fn attach_stdin(&mut self, container: &str) -> Result<OwnedFd, LaunchError> {
        let (_, fds) = self.ask(&Request::AttachStdin { id: id(container)? }, &[])?;
        fds.into_iter().next().ok_or_else(unexpected)
    }

    /// Requests the keeper to exit now and waits until it has closed its socket. Refused with EBUSY
    /// while it has children or other connections.
    pub fn end(mut self) -> Result<(), LaunchError> {
        match self.ask(&Request::End, &[]) {
            Err(LaunchError::KeeperGone) => return Ok(()),
            other => drop(other?),
        }
        loop {
            match self.hear(RecvFlags::empty()) {
                Ok(_) => {}
                Err(LaunchError::KeeperGone) => return Ok(()),
                Err(e) => return Err(e),
            }
        }
    }

    /// Passes a descriptor of a container that falls asleep to the keeper. When it is ready as in
    /// `watch` (bits of [`crate::protocol::watch`]), the keeper runs [`KeeperStart::wake`]. Refused
    /// with EBUSY while a client waits for the exit of the container's first process, which a
    /// suspend would look like.
    pub fn hold(
        &mut self,
        container: &str,
        key: u32,
        fd: BorrowedFd<'_>,
        watch: u8,
    ) -> Result<(), LaunchError> {
        self.done(&Request::Hold { id: id(container)?, key, watch }, &[fd])
    }

    /// Ends the descriptors of a container: from now on they outlive the keeper, in its vault.
    pub fn park(&mut self, container: &str) -> Result<(), LaunchError> {
        self.done(&Request::Park { id: id(container)? }, &[])
    }

    /// Returns a descriptor passed by [`Keeper::hold`]. ENOENT if this keeper never received it.
    pub fn take(&mut self, container: &str, key: u32) -> Result<OwnedFd, LaunchError> {
        self.ask_for(container, key)?;
        self.taken()
    }

    /// Requests it without waiting for the reply, which [`Keeper::taken`] reads.
    ///
    /// LIMIT: the keeper disconnects a client with some hundred unread replies.
    pub fn ask_for(&mut self, container: &str, key: u32) -> Result<(), LaunchError> {
        self.say(&Request::Take { id: id(container)?, key }, &[])
    }

    /// Returns the descriptor that was requested first and not received yet.
    pub fn taken(&mut self) -> Result<OwnedFd, LaunchError> {
        let (_, fds) = self.answer()?;
        fds.into_iter().next().ok_or_else(unexpected)
    }

    /// Has the first process of a container, whose keeper was killed, watched: the keeper settles the
    /// container after its exit.
    pub fn adopt(
        &mut self,
        container: &str,
        pid: u32,
        process: OwnedFd,
    ) -> Result<(), LaunchError> {
        self.done(&Request::Adopt { id: id(container)?, pid }, &[process.as_fd()])
    }

    /// Returns whether the exit of an adopted process of a container is still to be written.
    pub fn has_adopted(&mut self, container: &str) -> Result<bool, LaunchError> {
        match self.done(&Request::HasAdopted { id: id(container)? }, &[]) {
            Err(LaunchError::Refused { source, .. }) if source == Errno::SRCH => Ok(false),
            other => other.map(|()| true),
        }
    }

    /// Has a container settled whose first process exited while there was no keeper.
    pub fn settle(&mut self, container: &str) -> Result<(), LaunchError> {
        self.done(&Request::Settle { id: id(container)? }, &[])
    }

    /// Returns whether the keeper holds descriptors of a container.
    pub fn holds(&mut self, container: &str) -> Result<bool, LaunchError> {
        match self.done(&Request::Holds { id: id(container)? }, &[]) {
            Err(LaunchError::Refused { source, .. }) if source == Errno::NOENT => Ok(false),
            other => other.map(|()| true),
        }
    }

    /// Returns whether an event that wakes the container is present at a held descriptor; false if it is not
    /// held. A keeper of an older program refuses the request.
    pub fn is_ready(&mut self, container: &str, key: u32) -> Result<bool, LaunchError> {
        match self.done(&Request::Ready { id: id(container)?, key }, &[]) {
            Err(LaunchError::Refused { source: Errno::AGAIN | Errno::NOENT, .. }) => Ok(false),
            other => other.map(|()| true),
        }
    }

    /// Makes the keeper drop descriptors of an earlier keeper that [`Keeper::holds`] was not called
    /// for.
    pub fn let_go_unasked(&mut self) -> Result<(), LaunchError> {
        self.done(&Request::LetGoUnasked, &[])
    }

    /// Makes the keeper drop all held descriptors of a container. If the keeper has exited, the
    /// vault has them until the next keeper finds that the container runs.
    pub fn let_go(&mut self, container: &str) -> Result<(), LaunchError> {
        match self.done(&Request::LetGo { id: id(container)? }, &[]) {
            Err(LaunchError::KeeperGone) => Ok(()),
            done => done,
        }
    }

    /// Has a container with held descriptors woken after so many milliseconds.
    pub fn set_alarm(&mut self, container: &str, after_ms: u64) -> Result<(), LaunchError> {
        self.done(&Request::Alarm { id: id(container)?, after_ms }, &[])
    }

    /// Has memory of a container filled by separate processes, as in [`crate::fill`]. The
    /// descriptors: the file, the first process, the file for the record of touched pages, the
    /// files of the contents, and the address spaces.
    pub fn fill(
        &mut self,
        container: &str,
        given: [BorrowedFd<'_>; FILL_DESCRIPTORS],
        parts: &[OwnedFd],
        sources: &[OwnedFd],
    ) -> Result<(), LaunchError> {
        let (id, more) = (id(container)?, parts.iter().chain(sources));
        let (parts, sources) = (parts.len() as u8, sources.len() as u8);
        let request = Request::Fill { id, parts, sources };
        let fds: Vec<_> = given.into_iter().chain(more.map(AsFd::as_fd)).collect();
        self.done(&request, &fds)
    }

    /// Starts a process from which newborns that share its memory ([`Spawn::template`]) are cloned,
    /// and waits until the memory is there. The inputs are the file of [`crate::template`] and the
    /// files of contents. The name must be unique. The process ends with this connection.
    pub fn template(
        &mut self,
        key: &str,
        list: BorrowedFd<'_>,
        parts: &[OwnedFd],
    ) -> Result<(), LaunchError> {
        let request = Request::Template { key: id(key)?, parts: parts.len() as u8 };
        let fds: Vec<_> = std::iter::once(list).chain(parts.iter().map(AsFd::as_fd)).collect();
        self.done(&request, &fds)
    }

    /// Makes the keeper drop console, standard input and logs of a container.
    pub fn forget(&mut self, container: &str) -> Result<(), LaunchError> {
        self.done(&Request::Forget { id: id(container)? }, &[])
    }
}

fn unexpected() -> LaunchError {
    let why = crate::protocol::Malformed("it answers something else");
    LaunchError::Protocol { source: why }
}

/// Takes the keeper's lock; it is released with the file.
fn lock(run_dir: &Path) -> Result<File, LaunchError> {
    let path = run_dir.join(LOCK);
    let failed = |source: std::io::Error| LaunchError::Lock { path: path.clone(), source };
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true).mode(0o600);
    let file = options.open(&path).map_err(failed)?;
    loop {
        match rustix::fs::flock(&file, FlockOperation::LockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::INTR) => {}
            Err(e) => return Err(failed(e.into())),
        }
    }
}

/// A sealed copy of the program: a write through `/proc/PID/exe` of the keeper or of a newborn
/// cannot change the file on disk (CVE-2019-5736).
fn sealed_copy(program: &Path) -> Result<OwnedFd, LaunchError> {
    let failed = |source| LaunchError::Program { path: program.to_owned(), source };
    let bytes = std::fs::read(program).map_err(failed)?;
    let memory = |source| LaunchError::Memory { source };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // KERNEL(6.3): MFD_EXEC marks it as executable; before, every memfd is.
    let fd = rustix::fs::memfd_create(c"dormouse-keeper", flags | MemfdFlags::EXEC)
        .or_else(|_| rustix::fs::memfd_create(c"dormouse-keeper", flags))
        .map_err(memory)?;
    let mut file = File::from(fd);
    file.write_all(&bytes).map_err(failed)?;
    // Not F_SEAL_WRITE: the kernel waits for it until no page has an extra reference, and fails
    // after 0.15 s (EBUSY); reclaim and other processors' lists of new pages hold references for a
    // while. There is no mapping yet, so forbidding new ones and write(2) is as much.
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE;
    rustix::fs::fcntl_add_seals(&file, seals).map_err(memory)?;
    // A process of a container that comes by it as `/proc/PID/exe` cannot open it: it belongs to the host's
    // root, which alone executes it.
    rustix::fs::fchmod(&file, Mode::XUSR).map_err(memory)?;
    Ok(file.into())
}

/// Runs the keeper's program, which returns when its daemon listens.
fn run_program(start: &KeeperStart, lock: File) -> Result<(), LaunchError> {
    let program = sealed_copy(&start.program)?;
    let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
    command.arg0("dormouse-keeper"); // shown by ps
    // ORDER: the child holds the lock itself until it has started the keeper: this process may be
    // killed, and the next one would start another keeper beside it.
    command.env_clear().current_dir("/").stdin(lock).stdout(Stdio::null());
    command.stderr(Stdio::piped()).arg("--run").arg(&start.run_dir);
    for dir in &start.cgroups {
        command.arg("--cgroup").arg(dir);
    }
    command.arg("--linger").arg(start.linger.as_millis().to_string());
    for word in &start.settle {
        command.arg("--settle").arg(word);
    }
    for word in &start.wake {
        command.arg("--wake").arg(word);
    }
    for word in &start.tidy {
        command.arg("--tidy").arg(word);
    }
    for word in &start.nursery {
        command.arg("--nursery").arg(word);
    }
    for word in &start.runner {
        command.arg("--runner").arg(word);
    }
    command.arg("--runners").arg(start.runners.to_string());
    let failed = |e: std::io::Error| LaunchError::Start { why: e.to_string() };
    dormouse_kernel::rlimit::without_raise(&mut command);
    let output = command.spawn().and_then(|child| child.wait_with_output()).map_err(failed)?;
    if output.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&output.stderr);
    let why = match message.trim() {
        "" => output.status.to_string(),
        message => message.to_owned(),
    };
    Err(LaunchError::Start { why })
}
