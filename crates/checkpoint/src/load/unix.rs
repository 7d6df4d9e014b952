//! Unix sockets: bound to their names, connected to their peers, with the messages in flight.
//!
//! The first process makes all of them before any other process exists, after every other object:
//!
//! 1. pairs without an inherited name by socketpair(2), all others by socket(2); names are bound,
//!    and replace the socket files of the saved sockets;
//! 2. names with a file that was removed or replaced: bound in an empty file system that is the root
//!    for so long, where everything that needs the name is done; its directory may be gone, too;
//! 3. names with their file: queues of datagrams, connections, pending connections.
//!
//! A connection inherits its name from the listener that accepted it. Such a connection is
//! therefore made by connecting to that listener and accepting. If the listener does not exist any
//! more, a temporary one is used.
//!
//! A pending connection whose client had already closed is re-created: a temporary socket connects
//! in the recorded order, sends the recorded bytes and is closed.
//!
//! Messages are sent once all sockets exist, since sockets may be in flight in them. Messages of
//! named datagram sockets are sent as soon as the name leads to the socket.
//!
//! The credentials of the process that listened, connected, made a pair or sent (SO_PEERCRED,
//! SCM_CREDENTIALS) are those of the caller of the system call. So a *helper process* with its pid,
//! user and groups makes the call: a child of the first process that shares its descriptors, and
//! exits before the process with that pid is created.
//!
//! LIMIT: a pidfd of a peer (SO_PEERPIDFD) refers to the helper process, which has exited. If the
//! recorded peer no longer exists, an unused pid is presented.

use std::collections::BTreeMap;

use dormouse_record::{
    Error, PeerCredentials, Records, Result, SocketOption, Thing, UnixLeft, UnixMessage, UnixName,
    UnixPeer, UnixSocket,
};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};

use super::plan::Plan;
use super::{credentials, helper, mount, net, open, socket};
use crate::inject::program::{Arg, Call, Cell, Sequence};

/// Makes all unix sockets.
pub(super) fn make_all(plan: &mut Plan<'_>, sequence: &mut Sequence) -> Result<()> {
    let mut all = sockets(plan.records);
    // A held socket exists, has its queue, and is used by no socket inside.
    all.retain(|index, _| !plan.held.contains_key(index));
    let passes_late = all.values().any(|socket| passes_credentials(socket))
        && all.values().any(|socket| {
            let is_accepted = socket.name.as_ref().is_some_and(|name| name.inherited);
            let lacks = |message: &UnixMessage| message.credentials.is_none();
            // The kernel gives such a socket a name when it sends a message, also one that is sent again here.
            let is_named_by_sending =
                socket.name.is_none() && socket.socket_type != libc::SOCK_STREAM;
            socket.reset
                || is_named_by_sending && passes_credentials(socket)
                || socket.on_its_way().any(lacks)
                || is_accepted && !passes_credentials(socket)
        });
    let (closed_peers, closed_clients) = (Vec::new(), Vec::new());
    let (empty, depth) = (Vec::new(), 0);
    let mut work =
        Work { plan, sequence, all, closed_peers, closed_clients, passes_late, empty, depth };
    work.make_sockets()?;
    work.bind_names();
    work.accept_inherited_names()?;
    work.bind_removed_names()?;
    for index in work.indices() {
        let Some(name) = work.all[&index].name.as_ref() else { continue };
        if !leads_elsewhere(name) {
            work.use_name(index)?;
        }
    }
    work.send_queues()?;
    work.finish()
}

/// Whether a socket receives the credentials of senders. The kernel adds them to a message when it is sent to or by
/// such a socket.
fn passes_credentials(socket: &UnixSocket) -> bool {
    socket.options.iter().any(is_about_credentials)
}

fn is_about_credentials(option: &SocketOption) -> bool {
    option.is(libc::SOL_SOCKET, libc::SO_PASSCRED)
}

fn sockets(records: &Records) -> BTreeMap<usize, &UnixSocket> {
    let objects = records.objects.iter().enumerate();
    let unix = objects.filter_map(|(n, object)| match &object.thing {
        Thing::UnixSocket(socket) => Some((n, socket)),
        _ => None,
    });
    unix.collect()
}

/// Whether the name leads to no file or to another socket, or is inherited from a listener.
fn leads_elsewhere(name: &UnixName) -> bool {
    name.inherited || name.path().is_some() && name.file.is_none()
}

/// Refuses to begin if a file that is not a socket has replaced one: it would be removed. No
/// process of the container runs yet.
pub(super) fn check_places(records: &Records, pid: u32) -> Result<()> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let mut root = None;
    for socket in sockets(records).values() {
        let Some(name) = socket.name.as_ref().filter(|n| n.file.is_some()) else { continue };
        let Some(path) = name.path() else { continue };
        let whole = match &name.directory {
            Some(dir) => format!("{dir}/{path}"),
            None => path.to_owned(),
        };
        let root = match &root {
            Some(root) => root,
            None => {
                let path = format!("/proc/{pid}/root");
                let opened = rustix::fs::open(path, flags | OFlags::DIRECTORY, Mode::empty());
                root.insert(opened.map_err(Error::of("open the root", pid))?)
            }
        };
        let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let found = rustix::fs::openat2(root, &whole, flags | OFlags::NOFOLLOW, Mode::empty(), how)
            .and_then(rustix::fs::fstat);
        match found {
            Err(rustix::io::Errno::NOENT) => {}
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Socket => {}
            Ok(_) => {
                let text =
                    format!("'{whole}' is no socket any more: something has taken its place");
                return Err(Error::Elsewhere(text));
            }
            Err(e) => {
                return Err(Error::Elsewhere(format!("the place of its socket '{whole}': {e}")));
            }
        }
    }
    Ok(())
}

/// `struct sockaddr_un`.
fn sockaddr(name: &[u8]) -> Vec<u8> {
    let mut address = (libc::AF_UNIX as u16).to_ne_bytes().to_vec();
    address.extend_from_slice(name);
    // A path ends with a NUL, which an abstract name must not have.
    if name.first().is_some_and(|b| *b != 0) && name.len() < 108 {
        address.push(0);
    }
    address
}

/// The state while the sockets are made.
struct Work<'w, 'r> {
    plan: &'w mut Plan<'r>,
    sequence: &'w mut Sequence,
    all: BTreeMap<usize, &'r UnixSocket>,
    /// Sockets whose peer was closed, each with a temporary peer until all messages are sent.
    closed_peers: Vec<(usize, Cell)>,
    /// Temporary clients in place of closed ones, each with the listener and the record.
    closed_clients: Vec<(usize, Cell, &'r UnixLeft)>,
    /// Where a socket receives credentials, some message was sent, or some connection accepted, before it did: the
    /// option is set last, and for each message with credentials. Listeners have it early, and pass it to what they
    /// accept.
    passes_late: bool,
    /// Empty file systems, made when they are needed first.
    empty: Vec<Cell>,
    /// How many of them are in use.
    depth: usize,
}

/// A client that connects, and waits to be accepted.
enum Client<'r> {
    /// A socket, an object.
    Socket(usize, Option<&'r PeerCredentials>),
    /// A client that is closed again.
    Left(&'r UnixLeft),
}

impl<'r> Work<'_, 'r> {
    fn indices(&self) -> Vec<usize> {
        self.all.keys().copied().collect()
    }

    fn what(&self, index: usize) -> String {
        match &self.all[&index].name {
            Some(name) => format!("object {index} (unix socket {name})"),
            None => format!("object {index} (unix socket)"),
        }
    }

    fn call<const N: usize>(&mut self, index: usize, number: i64, args: [Arg; N]) {
        let what = self.what(index);
        self.sequence.call(what, Call::new(number, args));
    }

    fn lenient<const N: usize>(&mut self, index: usize, number: i64, args: [Arg; N]) {
        let what = self.what(index);
        self.sequence.call(what, Call::new(number, args).lenient());
    }

    /// A socket of the type, in non-blocking mode.
    fn socket(&mut self, index: usize) -> Result<Cell> {
        let kind = self.all[&index].socket_type | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let cell = self.plan.cell();
        let args = [Arg::from(libc::AF_UNIX), Arg::from(kind), Arg::Number(0)];
        let what = self.what(index);
        let net = self.net(index);
        net::inside(self.plan, self.sequence, &what, net, |part| {
            part.call_into(&*what, cell, Call::new(libc::SYS_socket, args));
        })?;
        Ok(cell)
    }

    /// Two sockets that are connected to each other.
    fn pair(&mut self, index: usize) -> Result<[Cell; 2]> {
        let kind = self.all[&index].socket_type | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // socketpair writes two numbers next to each other: the cells are adjacent.
        let cells = [self.plan.cell(), self.plan.cell()];
        let at = Arg::At(cells[0]);
        let args = [Arg::from(libc::AF_UNIX), Arg::from(kind), Arg::Number(0), at];
        self.act_as_inside(index, self.all[&index].peer_credentials.as_ref(), |work| {
            work.call(index, libc::SYS_socketpair, args);
            Ok(())
        })?;
        Ok(cells)
    }

    /// Sets the options of a socket, and records its descriptor.
    fn register(&mut self, index: usize, cell: Cell) -> Result<()> {
        for option in &self.all[&index].options {
            if self.is_late(index) && is_about_credentials(option) {
                continue;
            }
            let what = self.what(index);
            socket::option(self.plan, self.sequence, &what, cell, option);
        }
        let what = self.what(index);
        let cell = self.plan.lift_object(self.sequence, (&what, index), cell);
        self.plan.cells[index] = Some(cell);
        Ok(())
    }

    /// Whether a socket receives credentials only for the time of a message that has some.
    fn is_late(&self, index: usize) -> bool {
        self.passes_late && self.all[&index].backlog.is_none()
    }

    /// Makes a socket receive the credentials of senders, or not.
    fn pass_credentials(&mut self, index: usize, cell: Cell, on: u32) {
        let at = self.plan.builder.data(&on.to_ne_bytes());
        let (level, name) = (Arg::from(libc::SOL_SOCKET), Arg::from(libc::SO_PASSCRED));
        let args = [cell.into(), level, name, at.into(), Arg::Number(4)];
        self.call(index, libc::SYS_setsockopt, args);
    }

    fn is_made(&self, index: usize) -> bool {
        self.plan.cells[index].is_some()
    }

    fn inherits_name(&self, index: usize) -> bool {
        self.all[&index].name.as_ref().is_some_and(|name| name.inherited)
    }

    /// Calls `act` with the credentials that a peer is to see; as the first process if none are
    /// known.
    fn act_as(
        &mut self,
        index: usize,
        who: Option<&PeerCredentials>,
        act: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        self.act_within(index, None, who, act)
    }

    /// The same in the network namespace of the socket, which always takes a helper process.
    fn act_as_inside(
        &mut self,
        index: usize,
        who: Option<&PeerCredentials>,
        act: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        self.act_within(index, self.net(index), who, act)
    }

    /// Calls `act` in a network namespace, unless that is the container's own, and with the
    /// credentials that a peer is to see. The first process makes the calls itself if it can, and
    /// a helper process otherwise.
    fn act_within(
        &mut self,
        index: usize,
        net: Option<usize>,
        who: Option<&PeerCredentials>,
        act: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        let first = self.plan.records.processes[0].pid;
        let who = who.map(|who| credentials::narrowed(who, self.plan.allowed));
        let is_first_process = who.as_ref().is_none_or(|who| {
            who.pid == Some(first) && (who.uid, who.gid) == (0, 0) && who.groups.is_empty()
        });
        if net.is_none() && is_first_process {
            return act(self);
        }
        // The pid of a process that exists already cannot be given to a helper.
        let pid = who.as_ref().and_then(|who| who.pid);
        let is_taken = pid.is_some_and(|pid| pid <= first);
        let by_first = net.is_none() && is_taken;
        let what = self.what(index);
        let outer = std::mem::take(self.sequence);
        let done = self.collect_within(&what, net, who.as_ref(), by_first, act);
        let part = std::mem::replace(self.sequence, outer);
        done?;
        if by_first {
            self.sequence.append(part);
            return Ok(());
        }
        let pid = pid.filter(|_| !is_taken).unwrap_or_else(|| self.plan.fresh_pid());
        helper::run_with_pid(self.plan, self.sequence, &what, pid, part);
        Ok(())
    }

    /// The calls for [`Work::act_within`]; `reverts` if the process continues with its own
    /// credentials.
    fn collect_within(
        &mut self,
        what: &str,
        net: Option<usize>,
        who: Option<&PeerCredentials>,
        reverts: bool,
        act: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        if let Some(net) = net {
            net::enter_one(self.plan, self.sequence, what, net)?;
        }
        if let Some(who) = who {
            credentials::assume(self.plan, self.sequence, what, who);
            // A new socket belongs to the ids for files, which may have been others than those that a peer sees.
            // Its recorded owner is set later, if it is not root.
            for call in [libc::SYS_setfsgid, libc::SYS_setfsuid] {
                self.sequence.call(what, Call::new(call, [Arg::Number(0)]));
            }
        }
        act(self)?;
        if reverts {
            credentials::resume_own(self.plan, self.sequence, what);
        }
        Ok(())
    }

    /// The network namespace of a socket, unless it is the container's own.
    fn net(&self, index: usize) -> Option<usize> {
        self.plan.records.objects[index].net
    }

    /// Makes a socket listen, with the recorded credentials.
    fn listen(
        &mut self,
        index: usize,
        cell: Cell,
        backlog: i32,
        who: Option<&PeerCredentials>,
    ) -> Result<()> {
        self.act_as(index, who, |work| {
            work.call(index, libc::SYS_listen, [cell.into(), Arg::from(backlog)]);
            Ok(())
        })
    }

    /// Makes pairs and single sockets; not those that are accepted, and their clients.
    fn make_sockets(&mut self) -> Result<()> {
        for index in self.indices() {
            if self.is_made(index) || self.inherits_name(index) {
                continue;
            }
            match self.all[&index].peer {
                UnixPeer::Socket { object } if self.inherits_name(object) => {
                    let cell = self.socket(index)?;
                    self.register(index, cell)?;
                }
                UnixPeer::Socket { object } if self.is_mutual(index, object) => {
                    let [one, other] = self.pair(index)?;
                    self.register(index, one)?;
                    self.register(object, other)?;
                }
                UnixPeer::Gone => {
                    let [one, other] = self.pair(index)?;
                    let what = self.what(index);
                    let other = self.plan.lift(self.sequence, &what, other);
                    self.closed_peers.push((index, other));
                    self.register(index, one)?;
                }
                UnixPeer::None if self.was_one_of_a_pair(index) => {
                    let [one, other] = self.pair(index)?;
                    self.call(index, libc::SYS_close, [other.into()]);
                    let family = (libc::AF_UNSPEC as u16).to_ne_bytes();
                    let at = self.plan.builder.data(&family);
                    let args = [one.into(), at.into(), Arg::Number(family.len() as u64)];
                    self.call(index, libc::SYS_connect, args);
                    self.register(index, one)?;
                }
                UnixPeer::Socket { .. } | UnixPeer::None | UnixPeer::Waiting { .. } => {
                    let cell = self.socket(index)?;
                    self.register(index, cell)?;
                }
            }
        }
        Ok(())
    }

    /// Whether a datagram socket was parted from its peer: only socketpair(2) gives such a socket credentials of one,
    /// and these stay.
    fn was_one_of_a_pair(&self, index: usize) -> bool {
        let socket = self.all[&index];
        socket.socket_type == libc::SOCK_DGRAM && socket.peer_credentials.is_some()
    }

    fn is_mutual(&self, index: usize, other: usize) -> bool {
        index != other && self.all[&other].peer == UnixPeer::Socket { object: index }
    }

    /// Changes to the directory of a relative path, and back. A name that leads elsewhere needs none.
    fn in_directory(
        &mut self,
        index: usize,
        name: &UnixName,
        act: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        let directory = name.directory.as_ref().filter(|_| !leads_elsewhere(name));
        let Some(directory) = directory else { return act(self) };
        let what = self.what(index);
        let flags = (libc::O_PATH | libc::O_DIRECTORY) as u32;
        let cell = open::path(self.plan, self.sequence, &what, directory, flags)?;
        self.call(index, libc::SYS_fchdir, [cell.into()]);
        self.call(index, libc::SYS_close, [cell.into()]);
        act(self)?;
        let root = self.plan.builder.text(b"/");
        self.call(index, libc::SYS_chdir, [root.into()]);
        Ok(())
    }

    /// bind(2) and connect(2) take a path as it is.
    fn check_place(&mut self, index: usize, path: &str) {
        let what = self.what(index);
        open::check_parent(self.plan, self.sequence, &what, path);
    }

    /// `struct sockaddr_un` in data, and its length.
    fn address(&mut self, bytes: &[u8]) -> [Arg; 2] {
        let address = sockaddr(bytes);
        [self.plan.builder.data(&address).into(), Arg::Number(address.len() as u64)]
    }

    fn bind(&mut self, index: usize, cell: Cell, bytes: &[u8]) {
        let [at, length] = self.address(bytes);
        self.call(index, libc::SYS_bind, [cell.into(), at, length]);
    }

    /// Connects a socket. One that receives credentials and has no name would get one (unix(7), Autobind feature).
    ///
    /// LIMIT: one with SO_PASSPIDFD gets one.
    fn connect(&mut self, index: usize, cell: Cell, bytes: &[u8]) {
        let socket = self.all.get(&index);
        let gets_name = socket.is_some_and(|it| passes_credentials(it) && it.name.is_none());
        if gets_name {
            self.pass_credentials(index, cell, 0);
        }
        let [at, length] = self.address(bytes);
        self.call(index, libc::SYS_connect, [cell.into(), at, length]);
        if gets_name && !self.is_late(index) {
            self.pass_credentials(index, cell, 1);
        }
    }

    /// Binds all names that lead to their sockets.
    fn bind_names(&mut self) {
        for index in self.indices() {
            let Some(name) = self.all[&index].name.as_ref().filter(|name| !leads_elsewhere(name))
            else {
                continue;
            };
            let Some(cell) = self.plan.cells[index] else { continue };
            // No step in it fails.
            let _ = self.in_directory(index, name, |work| {
                work.bind_name(index, cell, name);
                Ok(())
            });
        }
    }

    fn bind_name(&mut self, index: usize, cell: Cell, name: &UnixName) {
        if let (Some(path), Some(file)) = (name.path(), &name.file) {
            self.check_place(index, path);
            let text = self.plan.builder.text(path.as_bytes());
            let here = Arg::from(libc::AT_FDCWD);
            // An old socket file is removed: `check_places` has checked its type.
            self.lenient(index, libc::SYS_unlinkat, [here, text.into(), Arg::Number(0)]);
            self.bind(index, cell, &name.bytes.0);
            let mode = Arg::from(file.mode & 0o777);
            self.call(index, libc::SYS_fchmodat, [here, text.into(), mode]);
            let nofollow = Arg::from(libc::AT_SYMLINK_NOFOLLOW);
            let args = [here, text.into(), file.uid.into(), file.gid.into(), nofollow];
            self.call(index, libc::SYS_fchownat, args);
        } else {
            self.bind(index, cell, &name.bytes.0);
        }
    }

    /// Sockets that were accepted by a listener that does not exist any more: a temporary one
    /// accepts them.
    fn accept_inherited_names(&mut self) -> Result<()> {
        for index in self.indices() {
            let Some(name) = self.all[&index].name.as_ref().filter(|name| name.inherited) else {
                continue;
            };
            if self.acceptor(index).is_some() {
                continue;
            }
            self.in_directory(index, name, |work| {
                let cell = work.socket(index)?;
                work.with_removed_name(index, name, |work| {
                    work.bind(index, cell, &name.bytes.0);
                    work.listen(index, cell, 0, work.accepted_by(index))?;
                    work.accept(index, cell, &name.bytes.0)
                })?;
                work.call(index, libc::SYS_close, [cell.into()]);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// The listener with the name of a socket.
    fn acceptor(&self, index: usize) -> Option<usize> {
        let (socket_type, net) = (self.all[&index].socket_type, self.net(index));
        let name = self.all[&index].name.as_ref()?;
        // An abstract name belongs to its network namespace.
        let is_reachable = |other: usize| name.path().is_some() || self.net(other) == net;
        let listens = |socket: &UnixSocket| {
            let own = socket.name.as_ref().is_some_and(|n| {
                (&n.bytes, &n.directory) == (&name.bytes, &name.directory) && !n.inherited
            });
            own && socket.backlog.is_some() && socket.socket_type == socket_type
        };
        let found =
            |(other, socket): &(&usize, &&UnixSocket)| listens(socket) && is_reachable(**other);
        self.all.iter().find(found).map(|(index, _)| *index)
    }

    /// Acts while a name without a file can be bound and connected to: below the root of an empty file system. The
    /// name of a socket is the text of its bind(2) alone.
    fn with_removed_name(
        &mut self,
        index: usize,
        name: &UnixName,
        act: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        let Some(path) = name.path() else { return act(self) };
        let what = self.what(index);
        let empty = self.empty(&what)?;
        let flags = (libc::O_PATH | libc::O_DIRECTORY) as u32;
        let root = open::path(self.plan, self.sequence, &what, "/", flags)?;
        let directory = open::path(self.plan, self.sequence, &what, ".", flags)?;
        self.enter_root(index, empty);
        let here = Arg::from(libc::AT_FDCWD);
        for (end, _) in path.match_indices('/').filter(|(end, _)| *end > 0) {
            let text = self.plan.builder.text(&path.as_bytes()[..end]);
            self.lenient(index, libc::SYS_mkdirat, [here, text.into(), Arg::Number(0o755)]);
        }
        self.depth += 1;
        act(self)?;
        self.depth -= 1;
        let text = self.plan.builder.text(path.as_bytes());
        self.call(index, libc::SYS_unlinkat, [here, text.into(), Arg::Number(0)]);
        self.enter_root(index, root);
        self.call(index, libc::SYS_fchdir, [directory.into()]);
        for cell in [root, directory] {
            self.call(index, libc::SYS_close, [cell.into()]);
        }
        Ok(())
    }

    /// An empty file system, one for each name that is in use: two may be the same text.
    fn empty(&mut self, what: &str) -> Result<Cell> {
        if self.empty.len() == self.depth {
            let made = mount::new(self.plan, self.sequence, what, (("tmpfs", None), &[]), 0)?;
            self.empty.push(self.plan.lift(self.sequence, what, made));
        }
        Ok(self.empty[self.depth])
    }

    /// Makes a directory the root and the working directory.
    fn enter_root(&mut self, index: usize, directory: Cell) {
        let here = self.plan.builder.text(b".");
        self.call(index, libc::SYS_fchdir, [directory.into()]);
        self.call(index, libc::SYS_chroot, [here.into()]);
    }

    fn bind_removed_names(&mut self) -> Result<()> {
        for index in self.indices() {
            let Some(name) = self.all[&index].name.as_ref() else { continue };
            if !leads_elsewhere(name) || name.inherited {
                continue;
            }
            let cell = self.plan.object(index)?;
            self.in_directory(index, name, |work| {
                work.with_removed_name(index, name, |work| {
                    work.bind(index, cell, &name.bytes.0);
                    work.use_name(index)
                })
            })?;
        }
        Ok(())
    }

    /// Makes everything that reaches a socket by its name, while the name leads to it.
    fn use_name(&mut self, index: usize) -> Result<()> {
        let record = self.all[&index];
        let Some(name) = &record.name else { return Ok(()) };
        if name.inherited {
            return Ok(());
        }
        let cell = self.plan.object(index)?;
        self.in_directory(index, name, |work| {
            if let Some(backlog) = record.backlog {
                return work.connections(index, cell, name, backlog);
            }
            if record.socket_type == libc::SOCK_DGRAM && record.peer == UnixPeer::None {
                work.datagrams(index, record, name)?;
            }
            work.connect_to(index, name)
        })
    }

    /// The credentials that the client of an accepted connection has seen: those of the listener
    /// then.
    fn accepted_by(&self, index: usize) -> Option<&'r PeerCredentials> {
        match self.all[&index].peer {
            UnixPeer::Socket { object } => self.all[&object].peer_credentials.as_ref(),
            _ => None,
        }
    }

    /// The connections of a listener: accepted ones, and pending ones, in order.
    fn connections(
        &mut self,
        index: usize,
        cell: Cell,
        name: &UnixName,
        backlog: i32,
    ) -> Result<()> {
        let own = self.all[&index].peer_credentials.as_ref();
        self.listen(index, cell, backlog, own)?;
        let mut last = own;
        // Another process may have listened there before.
        let mut listen_as = |work: &mut Self, who: Option<&'r PeerCredentials>| {
            let is_as_before = who.is_none() || who == last;
            last = who.or(last);
            if is_as_before { Ok(()) } else { work.listen(index, cell, backlog, who) }
        };
        let mut waiting = BTreeMap::new();
        for other in self.indices() {
            let socket = self.all[&other];
            if let UnixPeer::Waiting { listener, place, by, .. } = &socket.peer
                && *listener == index
            {
                waiting.insert((*place, other), Client::Socket(other, by.as_ref()));
            }
            let is_accepted_here = socket.name.as_ref().is_some_and(|n| n.inherited)
                && !self.is_made(other)
                && self.acceptor(other) == Some(index);
            if is_accepted_here {
                listen_as(self, self.accepted_by(other))?;
                self.accept(other, cell, &name.bytes.0)?;
            }
        }
        for (n, left) in self.all[&index].left.iter().enumerate() {
            waiting.insert((left.place, usize::MAX - n), Client::Left(left));
        }
        for one in waiting.into_values() {
            let (client, by) = match one {
                Client::Socket(client, by) => (client, by),
                Client::Left(left) => {
                    self.connect_closed_client(index, name, left)?;
                    continue;
                }
            };
            let cell = self.plan.object(client)?;
            listen_as(self, self.all[&client].peer_credentials.as_ref())?;
            self.act_as(client, by, |work| {
                work.connect(client, cell, &name.bytes.0);
                Ok(())
            })?;
        }
        listen_as(self, own)
    }

    /// Queues a connection whose client side is closed at once.
    fn connect_closed_client(
        &mut self,
        index: usize,
        name: &UnixName,
        left: &'r UnixLeft,
    ) -> Result<()> {
        let cell = self.socket(index)?;
        let what = self.what(index);
        let cell = self.plan.lift(self.sequence, &what, cell);
        self.act_as(index, left.by.as_ref(), |work| {
            work.connect(index, cell, &name.bytes.0);
            Ok(())
        })?;
        self.closed_clients.push((index, cell, left));
        Ok(())
    }

    /// Makes an accepted socket, by connecting to the listener of that name.
    fn accept(&mut self, index: usize, listener: Cell, name: &[u8]) -> Result<()> {
        let (of, client) = match self.all[&index].peer {
            UnixPeer::Socket { object } => (object, self.plan.object(object)?),
            _ => (index, self.socket(index)?),
        };
        self.act_as(index, self.all[&index].peer_credentials.as_ref(), |work| {
            work.connect(of, client, name);
            Ok(())
        })?;
        let accepted = self.plan.cell();
        let flags = Arg::from(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK);
        let args = [listener.into(), Arg::Number(0), Arg::Number(0), flags];
        let what = self.what(index);
        self.sequence.call_into(what, accepted, Call::new(libc::SYS_accept4, args));
        if self.is_late(index) {
            self.pass_credentials(index, accepted, 0);
        }
        if self.all[&index].peer == UnixPeer::Gone {
            let what = self.what(index);
            let client = self.plan.lift(self.sequence, &what, client);
            self.closed_peers.push((index, client));
        }
        self.register(index, accepted)
    }

    /// Sends the datagrams in the queue of a named socket.
    fn datagrams(&mut self, index: usize, record: &UnixSocket, name: &UnixName) -> Result<()> {
        for message in &record.received {
            let by_name = |socket: &&UnixSocket| {
                socket.socket_type == libc::SOCK_DGRAM
                    && socket
                        .name
                        .as_ref()
                        .is_some_and(|n| n.bytes == message.from && !leads_elsewhere(n))
            };
            let sender = self.all.iter().find(|(_, socket)| by_name(socket)).map(|(n, _)| *n);
            let to = Some(name.bytes.0.as_slice());
            match sender {
                // ORDER: a socket with another peer may still send to a given address.
                Some(sender) => {
                    let cell = self.plan.object(sender)?;
                    self.send(index, cell, message, to)?;
                }
                None => {
                    let cell = self.socket(index)?;
                    let removed = UnixName {
                        bytes: message.from.clone(),
                        directory: None,
                        file: None,
                        inherited: false,
                    };
                    if message.from.0.is_empty() {
                        self.send(index, cell, message, to)?;
                    } else {
                        self.with_removed_name(index, &removed, |work| {
                            work.bind(index, cell, &message.from.0);
                            Ok(())
                        })?;
                        self.send(index, cell, message, to)?;
                    }
                    self.call(index, libc::SYS_close, [cell.into()]);
                }
            }
        }
        Ok(())
    }

    /// Connects datagram sockets to a named one that is not connected to them.
    fn connect_to(&mut self, index: usize, name: &UnixName) -> Result<()> {
        for other in self.indices() {
            let socket = self.all[&other];
            let sends_there = socket.peer == UnixPeer::Socket { object: index };
            if socket.socket_type == libc::SOCK_DGRAM
                && sends_there
                && !self.is_mutual(other, index)
            {
                let cell = self.plan.object(other)?;
                self.connect(other, cell, &name.bytes.0);
            }
        }
        Ok(())
    }

    fn send(
        &mut self,
        index: usize,
        from: Cell,
        message: &UnixMessage,
        to: Option<&[u8]>,
    ) -> Result<()> {
        let who = message.credentials.as_ref();
        let receiver = self.plan.object(index)?;
        let is_for_it = who.is_some() && self.is_late(index);
        if is_for_it {
            self.pass_credentials(index, receiver, 1);
        }
        self.act_as(index, who, |work| work.send_message(index, from, message, to))?;
        if is_for_it {
            self.pass_credentials(index, receiver, 0);
        }
        Ok(())
    }

    fn send_message(
        &mut self,
        index: usize,
        from: Cell,
        message: &UnixMessage,
        to: Option<&[u8]>,
    ) -> Result<()> {
        if !message.descriptors.is_empty() {
            return self.send_descriptors(index, from, message, to);
        }
        let bytes = message.data.0.len() as u64;
        let at = self.plan.builder.data(&message.data.0);
        let what = self.what(index);
        match to {
            None => {
                let args = [from.into(), at.into(), bytes.into()];
                self.sequence.call(what, Call::new(libc::SYS_write, args).returns(bytes));
            }
            Some(name) => {
                let [address, length] = self.address(name);
                let args = [from.into(), at.into(), bytes.into(), Arg::Number(0), address, length];
                self.sequence.call(what, Call::new(libc::SYS_sendto, args));
            }
        }
        Ok(())
    }

    /// The same with descriptors (SCM_RIGHTS of unix(7)). The numbers are only known at run time:
    /// each descriptor is duplicated by a call that writes its number into the message. The
    /// duplicates are closed with all others at the end.
    fn send_descriptors(
        &mut self,
        index: usize,
        from: Cell,
        message: &UnixMessage,
        to: Option<&[u8]>,
    ) -> Result<()> {
        const HEAD_BYTES: u64 = 16;
        let what = self.what(index);
        // struct cmsghdr: cmsg_len, cmsg_level, cmsg_type; then the numbers.
        let length = HEAD_BYTES + message.descriptors.len() as u64 * 4;
        let mut control = length.to_ne_bytes().to_vec();
        control.extend(libc::SOL_SOCKET.to_ne_bytes());
        control.extend(libc::SCM_RIGHTS.to_ne_bytes());
        control.resize(length.next_multiple_of(8) as usize, 0);
        let control_at = self.plan.builder.writable(&control);
        for (n, object) in message.descriptors.iter().enumerate() {
            let cell = self.plan.object(*object)?;
            let args = [cell.into(), Arg::from(libc::F_DUPFD_CLOEXEC), self.plan.above.into()];
            let at = control_at + HEAD_BYTES + n as u64 * 4;
            self.sequence.call_to(what.clone(), at, Call::new(libc::SYS_fcntl, args));
        }
        let bytes = message.data.0.len() as u64;
        let data_at = self.plan.builder.data(&message.data.0);
        let pieces = self.plan.builder.numbers(&[data_at, bytes]);
        let name = to.map_or_else(Vec::new, sockaddr);
        let name_at = if name.is_empty() { 0 } else { self.plan.builder.data(&name) };
        // struct msghdr: name and length, pieces and their number, control and length, flags.
        let head =
            [name_at, name.len() as u64, pieces, 1, control_at, length.next_multiple_of(8), 0];
        let at = self.plan.builder.numbers(&head);
        let args = [from.into(), at.into(), Arg::Number(0)];
        self.sequence.call(what, Call::new(libc::SYS_sendmsg, args).returns(bytes));
        Ok(())
    }

    /// Sends the messages of connected sockets from their peers, and those of pending connections
    /// from their clients.
    fn send_queues(&mut self) -> Result<()> {
        for index in self.indices() {
            let record = self.all[&index];
            if let UnixPeer::Waiting { sent, .. } = &record.peer {
                let own = self.plan.object(index)?;
                for message in sent {
                    // Such a message has the credentials in any case, and its sender is the only socket that there is.
                    let who = message.credentials.as_ref();
                    self.act_as(index, who, |work| work.send_message(index, own, message, None))?;
                }
            }
            let UnixPeer::Socket { object } = record.peer else { continue };
            if record.socket_type == libc::SOCK_DGRAM && !self.is_mutual(index, object) {
                continue;
            }
            let from = self.plan.object(object)?;
            for message in &record.received {
                self.send(index, from, message, None)?;
            }
        }
        for (index, from) in std::mem::take(&mut self.closed_peers) {
            for message in &self.all[&index].received {
                self.send(index, from, message, None)?;
            }
            if self.all[&index].reset {
                // A byte that the closed peer has not read.
                let byte = self.plan.builder.data(&[0]);
                let own = self.plan.object(index)?;
                self.call(index, libc::SYS_write, [own.into(), byte.into(), Arg::Number(1)]);
            }
            self.call(index, libc::SYS_close, [from.into()]);
        }
        for (index, from, left) in std::mem::take(&mut self.closed_clients) {
            for message in &left.sent {
                self.send(index, from, message, None)?;
            }
            self.call(index, libc::SYS_close, [from.into()]);
        }
        Ok(())
    }

    /// Shuts the sockets down and sets their flags: nothing is sent any more.
    fn finish(&mut self) -> Result<()> {
        for index in self.indices() {
            let record = self.all[&index];
            let cell = self.plan.object(index)?;
            // The close of its peer shuts a socket with a connection down; a datagram socket stays as it was.
            let is_shut_by_peer =
                record.peer == UnixPeer::Gone && record.socket_type != libc::SOCK_DGRAM;
            if record.shut != 0 && !is_shut_by_peer {
                let how = Arg::from(u32::from(record.shut) - 1);
                self.call(index, libc::SYS_shutdown, [cell.into(), how]);
            }
            if self.is_late(index) && passes_credentials(record) {
                self.pass_credentials(index, cell, 1);
            }
            let what = self.what(index);
            open::set_flags(self.sequence, &what, cell, record.flags);
        }
        Ok(())
    }
}
