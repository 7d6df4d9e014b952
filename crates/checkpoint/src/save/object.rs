//! Identity: which descriptors, areas and directories refer to the same object, and its kind.
//!
//! An open file description is one object, however many descriptors of however many processes refer
//! to it. kcmp(2) decides among descriptors that look alike. Things behind file descriptions (a
//! pipe, a pair of sockets, shared memory) are separate objects, identified by inode.

use super::ahead::Ahead;
use super::tree::Seen;
use super::{
    HeldFile, Subject, Wakes, cgroup_namespace, event, fanotify, file, inotify, ipc, lock, memory,
    mount, mqueue, net, pidfd, pipe, shared, socket, tcp, terminal, time, timer, unix, user, uts,
};
use crate::error::{Refusal, Result};
use crate::format::{
    Descriptor, HeldLock, Lease, LockKind, Memory, Notice, Object, OwnPlace, Thing,
};
use crate::look::descriptor::numbers;
use crate::look::mountinfo;
use dormouse_kernel::{call, proc};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::Stat;
use std::cell::OnceCell;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::fs;

/// An open descriptor, inspected from outside.
pub(crate) struct Open<'p> {
    pub(crate) process: &'p Seen,
    pub(crate) number: u32,
    /// The target of `/proc/PID/fd/NUMBER`.
    pub(crate) link: String,
    /// `/proc/PID/fdinfo/NUMBER`.
    pub(crate) info: String,
    pub(crate) stat: Stat,
    /// A copy in this program: the same file description.
    pub(crate) copy: OwnedFd,
    /// The number that its object will have.
    pub(crate) index: usize,
    /// The network namespace of a socket, an object; `None` for the container's own.
    pub(crate) net: Option<usize>,
}

impl Open<'_> {
    /// A field of fdinfo.
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        let value = |line: &'_ str| -> Option<usize> {
            line.strip_prefix(name)?.strip_prefix(':').map(|rest| line.len() - rest.len())
        };
        self.info.lines().find_map(|line| value(line).map(|at| line[at..].trim()))
    }

    fn octal(&self, name: &str) -> u32 {
        self.field(name).and_then(|f| u32::from_str_radix(f, 8).ok()).unwrap_or(0)
    }

    /// `O_*` without O_CLOEXEC, which belongs to the descriptor.
    pub(crate) fn flags(&self) -> u32 {
        self.octal("flags") & !(libc::O_CLOEXEC as u32)
    }

    pub(crate) fn offset(&self) -> u64 {
        self.field("pos").and_then(|f| f.parse().ok()).unwrap_or(0)
    }

    fn key(&self) -> Key {
        (self.stat.st_dev, self.stat.st_ino, self.flags(), self.offset())
    }
}

/// Properties that descriptors of the same file description share: device, inode, flags, offset.
type Key = (u64, u64, u32, u64);

/// Open files that look alike: process, number, object. In the order of kcmp(2), so that one of many is
/// found with few looks.
#[derive(Default)]
struct Alike(Vec<(u32, u32, usize)>);

impl Alike {
    /// The object of an open file, or the place for it.
    fn find(&self, pid: u32, number: u32) -> std::result::Result<usize, usize> {
        // A descriptor that was closed meanwhile is equal to none, wherever it is put.
        let order = |other: &(u32, u32, usize)| {
            call::compare_files((other.0, other.1), (pid, number)).unwrap_or(Ordering::Less)
        };
        self.0.binary_search_by(order).map(|at| self.0[at].2)
    }

    fn add(&mut self, pid: u32, number: u32, index: usize) {
        if let Err(place) = self.find(pid, number) {
            self.0.insert(place, (pid, number, index));
        }
    }
}

/// Why something cannot be saved, in words that follow its name.
pub(crate) type Why = String;

/// One kind of open file: a test for it, and a function that makes its record.
struct Kind {
    is: fn(&Open<'_>) -> bool,
    save: fn(&mut Survey<'_>, &Open<'_>) -> std::result::Result<Thing, Why>,
}

/// Every kind that can be saved, in order of precedence.
const KINDS: &[Kind] = &[
    Kind { is: pipe::is_pipe, save: pipe::save },
    Kind { is: socket::is_socket, save: socket::save },
    Kind { is: event::is_event, save: event::event },
    Kind { is: event::is_signal, save: event::signal },
    Kind { is: event::is_epoll, save: event::epoll },
    Kind { is: pidfd::is_pidfd, save: pidfd::save },
    Kind { is: inotify::is_inotify, save: inotify::save },
    Kind { is: fanotify::is_fanotify, save: fanotify::save },
    Kind { is: timer::is_timer, save: timer::save },
    Kind { is: terminal::is_terminal, save: terminal::save },
    Kind { is: file::is_device, save: file::device },
    Kind { is: mqueue::is_queue, save: mqueue::save },
    Kind { is: file::is_file, save: file::save },
];

/// The survey of one process.
#[derive(Debug, Default)]
pub(crate) struct Surveyed {
    pub(crate) descriptors: Vec<Descriptor>,
    pub(crate) locks: Vec<HeldLock>,
    pub(crate) leases: Vec<Lease>,
    pub(crate) notices: Vec<Notice>,
    pub(crate) directory: Option<usize>,
    pub(crate) root: Option<String>,
    /// Directories and umasks that its threads have to themselves, by the host's ids.
    pub(crate) places: HashMap<u32, OwnPlace>,
    /// Its mount namespace, an object.
    pub(crate) mounts: Option<usize>,
    /// Its UTS namespace, an object.
    pub(crate) uts: Option<usize>,
    /// Its IPC namespace, an object.
    pub(crate) ipc: Option<usize>,
    /// Its network namespace, an object.
    pub(crate) net: Option<usize>,
    /// Its time namespace, and the one that it has made for its children, objects.
    pub(crate) time: [Option<usize>; 2],
    /// Its cgroup namespace, an object.
    pub(crate) cgroup_namespace: Option<usize>,
    /// Its user namespace, an object.
    pub(crate) user: Option<usize>,
    /// Its control group inside.
    pub(crate) cgroup: Option<String>,
    /// Its memory, without contents.
    pub(crate) memory: Memory,
}

/// All objects of a container that were found so far.
pub(crate) struct Survey<'s> {
    pub(crate) subject: &'s Subject,
    /// Memory that was copied ahead.
    pub(crate) ahead: Option<&'s Ahead>,
    pub(crate) found: Found,
    open_files: HashMap<Key, Alike>,
    /// Files by name and flags, and the mount namespace that they were opened in.
    pub(crate) named: HashMap<(String, u32, Option<usize>), usize>,
    pub(crate) pipes: HashMap<(u64, u64), pipe::Ends>,
    pub(crate) unix: unix::Known,
    /// Peers of unix sockets, by object: the pid that the container shows for each.
    pub(crate) peers: HashMap<usize, u32>,
    pub(crate) shared: HashMap<(u64, u64), usize>,
    /// The highest number of a descriptor.
    highest: u32,
    /// Children that job control has stopped, by their parents, as the container knows both.
    pub(crate) stopped: Vec<(u32, u32)>,
    /// Of these, those whose parent has not waited for the stop.
    pub(crate) untold: Vec<u32>,
    /// Shared memory of System V, by the handles of its files.
    pub(crate) segments: HashMap<Vec<u8>, usize>,
    /// POSIX message queues, by device and inode.
    pub(crate) message_queues: HashMap<(u64, u64), usize>,
    /// Terminals by their number.
    pub(crate) terminals: HashMap<u32, terminal::Sides>,
    /// Deleted files, by device and inode.
    pub(crate) deleted: HashMap<(u64, u64), usize>,
    /// Mount namespaces but the container's own.
    pub(crate) mounts: mount::Apart,
    /// IPC namespaces but the container's own.
    pub(crate) ipc: ipc::Apart,
    /// Network namespaces but the container's own.
    pub(crate) nets: net::Apart,
    /// Time namespaces but the container's own.
    pub(crate) times: time::Apart,
    /// Cgroup namespaces but the container's own.
    pub(crate) cgroup_namespaces: cgroup_namespace::Apart,
    /// User namespaces but the container's own.
    pub(crate) users: user::Apart,
    /// UTS namespaces, by their links in procfs.
    pub(crate) uts: HashMap<String, usize>,
    /// The control group below which others may have been created inside.
    pub(crate) own_cgroup: Option<crate::look::cgroup::Own>,
    /// The namespaces and groups of the first process, read on first use.
    pub(crate) home: OnceCell<Option<super::process::Home>>,
    /// Devices of volumes, read on first use.
    volumes: OnceCell<Vec<u64>>,
    /// Copies of inspected in-flight files that no process has open. They live as long as the
    /// survey, since their numbers are compared.
    on_their_way: Vec<OwnedFd>,
}

/// What a survey found.
#[derive(Default)]
pub(crate) struct Found {
    pub(crate) objects: Vec<Object>,
    pub(crate) refusals: Vec<Refusal>,
    /// How many of these are likely to pass in a moment.
    pub(crate) passing: usize,
    /// The configuration of the container's own network stack.
    pub(crate) network: Option<crate::format::Net>,
    /// Connections, to be read once everything is stopped.
    pub(crate) connections: Vec<super::tcp::Met>,
    /// Listeners with pending connections, which are taken out then.
    pub(crate) queues: Vec<super::tcp::Queue>,
    /// Open files to be held.
    pub(crate) held: Vec<HeldFile>,
    /// The root directory of each tmpfs, by object.
    pub(crate) memories: Vec<(usize, OwnedFd)>,
    /// Objects whose contents are to be read, each with the file to read from.
    pub(crate) contents: Vec<(usize, fs::File)>,
    /// Fifos without an open read end, to be read once everything is stopped, each with a write
    /// end.
    pub(crate) fifos: Vec<(usize, OwnedFd)>,
    /// UDP sockets with a pending error, to be read then.
    pub(crate) in_error: Vec<(usize, OwnedFd)>,
    /// POSIX message queues, to be read once everything is stopped.
    pub(crate) message_queues: Vec<(usize, OwnedFd)>,
    /// Terminals, through which data may be in transit.
    pub(crate) terminals: Vec<terminal::Sides>,
}

impl<'s> Survey<'s> {
    pub(crate) fn new(subject: &'s Subject, ahead: Option<&'s Ahead>) -> Self {
        Self {
            subject,
            ahead,
            found: Found::default(),
            open_files: HashMap::new(),
            named: HashMap::new(),
            pipes: HashMap::new(),
            unix: unix::Known::new(),
            peers: HashMap::new(),
            shared: HashMap::new(),
            highest: 0,
            stopped: Vec::new(),
            untold: Vec::new(),
            segments: HashMap::new(),
            message_queues: HashMap::new(),
            terminals: HashMap::new(),
            deleted: HashMap::new(),
            mounts: mount::Apart::default(),
            ipc: ipc::Apart::default(),
            nets: net::Apart::default(),
            times: time::Apart::default(),
            cgroup_namespaces: cgroup_namespace::Apart::default(),
            users: user::Apart::default(),
            uts: HashMap::new(),
            own_cgroup: None,
            home: OnceCell::new(),
            volumes: OnceCell::new(),
            on_their_way: Vec::new(),
        }
    }

    /// Adds a new object.
    pub(crate) fn add(&mut self, thing: Thing) -> usize {
        self.found.objects.push(thing.into());
        self.found.objects.len() - 1
    }

    /// Reserves the place of an object whose record is made later: it may depend on other objects.
    pub(crate) fn reserve(&mut self) -> usize {
        self.add(placeholder())
    }

    /// Refuses processes of the cgroup that are not in the tree.
    pub(crate) fn outsiders(&mut self, tree: &[Seen]) {
        for pid in &self.subject.pids {
            let is_init = self.subject.has_init && *pid == self.subject.init;
            if is_init || tree.iter().any(|seen| seen.pid == *pid) {
                continue;
            }
            // The process may have exited since.
            let Ok(fields) = proc::fields(*pid) else { continue };
            if fields.field("State").is_some_and(|s| s.starts_with(['Z', 'X'])) {
                continue;
            }
            self.found.refusals.push(Refusal {
                pid: fields.pids().last().copied().unwrap_or(0),
                process: fields.field("Name").unwrap_or_default().to_owned(),
                what: String::new(),
                why: "its parent is outside the container (it was started by exec): end it first"
                    .into(),
            });
        }
    }

    /// Inspects everything that one process has.
    pub(crate) fn process(&mut self, seen: &Seen) -> Result<Surveyed> {
        if seen.is_zombie {
            return Ok(Surveyed::default());
        }
        let apart = super::process::check(seen, self);
        let mut surveyed = Surveyed::default();
        match time::of(self, &apart) {
            Ok(found) => surveyed.time = found,
            Err(why) => self.found.refusals.push(seen.refuse("", why)),
        }
        match cgroup_namespace::of(self, &apart) {
            Ok(found) => surveyed.cgroup_namespace = found,
            Err(why) => self.found.refusals.push(seen.refuse("", why)),
        }
        let mounts = apart.mounts.map(|link| match self.mounts.object(&link) {
            Some(found) => found,
            None => Err(self.passing("it has made a mount namespace just now".into())),
        });
        let mounts = mounts.transpose();
        let ipc = apart.ipc.map(|link| match self.ipc.object(&link) {
            Some(found) => found,
            None => Err(self.passing("it has made an IPC namespace just now".into())),
        });
        let ipc = ipc.transpose();
        let net = apart.net.map(|link| match self.nets.object(&link) {
            Some(found) => found,
            None => Err(self.passing("it has made a network namespace just now".into())),
        });
        let net = net.transpose();
        let uts = apart.uts.map(|link| uts::object(self, seen, &link)).transpose();
        let user = apart.user.map(|_| user::of_process(self, seen)).transpose();
        let places =
            [&mut surveyed.mounts, &mut surveyed.uts, &mut surveyed.ipc, &mut surveyed.net];
        let places = places.into_iter().chain([&mut surveyed.user]);
        for (found, to) in [mounts, uts, ipc, net, user].into_iter().zip(places) {
            match found {
                Ok(index) => *to = index,
                Err(why) => self.found.refusals.push(seen.refuse("", why)),
            }
        }
        user::own(self, seen, &surveyed);
        for number in numbers(seen.pid)? {
            match self.descriptor(seen, number, &mut surveyed) {
                Ok(Some(descriptor)) => surveyed.descriptors.push(descriptor),
                Ok(None) => {}
                Err(why) => {
                    let refusal = seen.refuse(format!("descriptor {number}"), why);
                    self.found.refusals.push(refusal);
                }
            }
        }
        match file::directory(self, seen) {
            Ok(index) => surveyed.directory = Some(index),
            Err(why) => self.found.refusals.push(seen.refuse("working directory", why)),
        }
        match file::root(self, seen) {
            Ok(root) => surveyed.root = root,
            Err(why) => self.found.refusals.push(seen.refuse("root", why)),
        }
        surveyed.places = shared::places(self, seen, &surveyed);
        surveyed.cgroup = super::process::cgroup(seen.pid, self);
        let memory = memory::areas(self, seen)?;
        surveyed.memory = memory;
        Ok(surveyed)
    }

    fn descriptor(
        &mut self,
        seen: &Seen,
        number: u32,
        surveyed: &mut Surveyed,
    ) -> std::result::Result<Option<Descriptor>, Why> {
        let Some(open) = self.open(seen, number)? else { return Ok(None) };
        self.highest = self.highest.max(number);
        hold(&open, &mut surveyed.locks)?;
        let close_on_exec = open.octal("flags") & libc::O_CLOEXEC as u32 != 0;
        let found = |object| Ok(Some(Descriptor { number, object, close_on_exec }));
        let key = open.key();
        let alike = self.open_files.get(&key);
        if let Some(Ok(index)) = alike.map(|alike| alike.find(seen.pid, number)) {
            return found(index);
        }
        // The first process that has it open acquires it again.
        surveyed.leases.extend(lock::lease(&open)?);
        if let Some(external) = file::external(self.subject, &open) {
            let index = self.add(external);
            self.open_files.entry(key).or_default().add(seen.pid, number, index);
            return found(index);
        }
        let notice = lock::notice(&open)?;
        let kind = KINDS.iter().find(|kind| (kind.is)(&open));
        let Some(kind) = kind else { return Err(unknown(&open.link)) };
        let index = open.index;
        self.reserve();
        let thing = (kind.save)(self, &open)?;
        crate::format::check::paths(&thing)?;
        if self.holds(&open) && thing.is_called_from_outside() {
            let failed = |e: std::io::Error| format!("it cannot be held: {e}");
            let wakes = match &thing {
                Thing::TcpSocket(_) => tcp::wakes(&open.copy).map_err(|e| failed(e.into()))?,
                _ => Wakes { readable: true, writable: false },
            };
            let file = open.copy.try_clone().map_err(failed)?;
            let cause = thing.cause();
            self.found.held.push(HeldFile { object: index as u32, file, wakes, cause });
        }
        self.found.objects[index] = Object { thing, net: open.net, user: None };
        surveyed.notices.extend(notice);
        self.open_files.entry(key).or_default().add(seen.pid, number, index);
        found(index)
    }

    fn open<'p>(
        &self,
        process: &'p Seen,
        number: u32,
    ) -> std::result::Result<Option<Open<'p>>, Why> {
        let pid = process.pid;
        let Ok(link) = fs::read_link(format!("/proc/{pid}/fd/{number}")) else { return Ok(None) };
        let info = proc::whole_text(format!("/proc/{pid}/fdinfo/{number}"));
        let Ok(info) = info else { return Ok(None) }; // closed meanwhile
        let Some(handle) = &process.pidfd else { return Ok(None) };
        let copy = match dormouse_kernel::pidfd::copy_descriptor(handle, number as i32) {
            Ok(copy) => copy,
            Err(e) if matches!(e.errno(), libc::EBADF | libc::ESRCH) => return Ok(None),
            Err(e) => return Err(format!("it cannot be inspected: {e}")),
        };
        let stat = rustix::fs::fstat(&copy).map_err(|e| format!("it cannot be inspected: {e}"))?;
        let link = link.to_string_lossy().into_owned();
        let (index, net) = (self.found.objects.len(), self.net_of(&link, &copy)?);
        Ok(Some(Open { process, number, link, info, stat, copy, index, net }))
    }

    /// The object of an in-flight file (SCM_RIGHTS). `copy` is the same file description.
    pub(crate) fn on_its_way(
        &mut self,
        process: &Seen,
        copy: OwnedFd,
    ) -> std::result::Result<usize, Why> {
        let failed = |e: &dyn std::fmt::Display| format!("it cannot be inspected: {e}");
        let number = copy.as_raw_fd();
        let link = fs::read_link(format!("/proc/self/fd/{number}")).map_err(|e| failed(&e))?;
        let info =
            proc::whole_text(format!("/proc/self/fdinfo/{number}")).map_err(|e| failed(&e))?;
        let stat = rustix::fs::fstat(&copy).map_err(|e| failed(&e))?;
        let link = link.to_string_lossy().into_owned();
        let (number, index) = (number as u32, self.found.objects.len());
        let net = self.net_of(&link, &copy)?;
        let open = Open { process, number, link, info, stat, copy, index, net };
        let (own, key) = (std::process::id(), open.key());
        let alike = self.open_files.get(&key);
        if let Some(Ok(index)) = alike.map(|alike| alike.find(own, number)) {
            return Ok(index);
        }
        let thing = match file::external(self.subject, &open) {
            Some(external) => external,
            None => {
                let kind = KINDS.iter().find(|kind| (kind.is)(&open));
                let kind = kind.ok_or_else(|| unknown(&open.link))?;
                self.reserve();
                (kind.save)(self, &open)?
            }
        };
        // Seals of a memfd are set by a process that has it open.
        let memory = match &thing {
            Thing::File(it) => it.deleted.map(|n| &self.found.objects[n].thing),
            _ => None,
        };
        let is_sealed = matches!(memory, Some(Thing::MemoryFile(memory)) if memory.seals != 0);
        if is_sealed || lock::lease(&open)?.is_some() || !thing.needs_no_owner() {
            return Err(format!(
                "{}, which is in flight and not open in any process",
                thing.name()
            ));
        }
        match self.found.objects.get_mut(index) {
            Some(place) => *place = Object { thing, net, user: None },
            None => self.found.objects.push(Object { thing, net, user: None }),
        }
        self.open_files.entry(key).or_default().add(own, number, index);
        self.on_their_way.push(open.copy);
        Ok(index)
    }

    /// The network namespace of an open file, if it is a socket.
    fn net_of(&self, link: &str, copy: &OwnedFd) -> std::result::Result<Option<usize>, Why> {
        if link.starts_with("socket:[") { self.nets.of_socket(copy) } else { Ok(None) }
    }

    /// Whether an open file is held if it is reachable from outside.
    pub(crate) fn holds(&self, open: &Open<'_>) -> bool {
        self.subject.hold && open.net.is_none()
    }

    /// The object of a descriptor of a process, if the object was first found through it.
    pub(crate) fn open_at(&self, pid: u32, number: u32) -> Option<usize> {
        let mut all = self.open_files.values().flat_map(|alike| &alike.0);
        all.find(|(other, at, _)| (*other, *at) == (pid, number)).map(|(.., index)| *index)
    }

    /// Marks a refusal as one that is likely to pass in a moment.
    pub(crate) fn passing(&mut self, why: Why) -> Why {
        self.found.passing += 1;
        why
    }

    /// Whether a device is that of a volume, where processes outside may connect or change
    /// something while the container is suspended, and the files that they use are to be held.
    pub(crate) fn is_volume(&self, device: u64) -> bool {
        let devices = self.volumes.get_or_init(|| match self.subject.hold {
            true => volumes(self.subject),
            false => Vec::new(),
        });
        devices.contains(&device)
    }

    /// Refuses more open files than a restore has descriptor numbers for: its first process opens all of
    /// them, above every number of a process, before each process gets its own.
    fn check_numbers(&mut self, tree: &[Seen]) {
        const NOFILE: u32 = 7;
        // LIMIT: descriptors that the restore itself uses.
        const OWN: u64 = 64;
        let Some(first) = tree.first() else { return };
        let limits = first.limits().unwrap_or_default();
        let Some(most) = limits.iter().find(|limit| limit.resource == NOFILE) else { return };
        let has_number = |object: &&Object| {
            use Thing::{Pipe, SharedMemory, SystemVMemory, SystemVQueue, SystemVSemaphores};
            !matches!(
                object.thing,
                Pipe(_)
                    | SharedMemory(_)
                    | SystemVMemory(_)
                    | SystemVQueue(_)
                    | SystemVSemaphores(_)
            )
        };
        let open = self.found.objects.iter().filter(has_number).count() as u64;
        let needed = u64::from(self.highest) + open + OWN;
        if needed > most.hard {
            let why = format!(
                "with {open} open files and numbers up to {}, which a restore cannot have within its \
                 limit of {} (ulimit -n): raise the limit, or open fewer files",
                self.highest, most.hard
            );
            self.found.refusals.push(first.refuse("", why));
        }
    }

    /// Completes the survey with facts that depend on all processes.
    pub(crate) fn finish(mut self, tree: &[Seen]) -> Found {
        self.check_numbers(tree);
        // ORDER: an end of a pipe may be in flight through a unix socket.
        unix::finish(&mut self, tree);
        pipe::finish(&mut self);
        user::finish(&mut self);
        self.found.terminals = self.terminals.into_values().collect();
        self.found
    }
}

/// The locks of a process. Each shows at every descriptor of its file. Descriptors that could have
/// acquired it are kept: setting a lock twice changes nothing.
fn hold(open: &Open<'_>, locks: &mut Vec<HeldLock>) -> std::result::Result<(), Why> {
    let access = open.flags() & libc::O_ACCMODE as u32;
    for lock in lock::of(&open.info)?.into_iter().filter(|l| l.kind == LockKind::Process) {
        let other = if lock.writes { libc::O_RDONLY } else { libc::O_WRONLY } as u32;
        if access != other {
            locks.push(HeldLock { number: open.number, lock });
        }
    }
    Ok(())
}

/// The content of an object until its record is made.
fn placeholder() -> Thing {
    Thing::Device(crate::format::Device { name: "null".into(), flags: 0 })
}

/// The name of an open file of no known kind.
fn unknown(link: &str) -> Why {
    let name = link.trim_start_matches("anon_inode:").trim_matches(['[', ']']);
    match name {
        "io_uring" => "an io_uring, which is not saved yet".into(),
        "userfaultfd" => "a userfaultfd, which is not saved: its memory has an owner".into(),
        _ if link.starts_with("anon_inode:") => format!("{name}, which is not saved yet"),
        _ => format!("'{link}', which is not saved yet"),
    }
}

/// Devices of volumes, as the first process sees them.
fn volumes(subject: &Subject) -> Vec<u64> {
    let table = proc::whole_text(format!("/proc/{}/mountinfo", subject.init)).unwrap_or_default();
    let mounts: Vec<(u64, String)> =
        table.lines().filter_map(mountinfo::device_and_place).collect();
    // A mount over a volume is not the volume.
    let first = |place: &String| mounts.iter().find(|(_, other)| other == place);
    subject.volumes.iter().filter_map(first).map(|(device, _)| *device).collect()
}
