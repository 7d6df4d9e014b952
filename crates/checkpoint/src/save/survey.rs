//! The survey of a container: all objects that were found so far, and all refusals.
//!
//! Here is only the data. The modules of the kinds fill it, and [`super::object`] decides which of them
//! reads which open file.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::fs;
use std::os::fd::OwnedFd;

use dormouse_kernel::proc;
use dormouse_record::seat::Use;
use dormouse_record::{
    Descriptor, Device, HeldLock, Lease, Memory, Net, Notice, Object, Process, Refusal, Thing,
};

use super::ahead::Ahead;
use super::held::HeldFile;
use super::known::aio::AioContexts;
use super::known::file::{Leased, Mapped, Unread};
use super::known::mount::MountNamespaces;
use super::known::namespace::{
    CgroupNamespaces, Home, IpcNamespaces, TimeNamespaces, UserNamespaces,
};
use super::known::net::NetNamespaces;
use super::known::shared::{Apart, Sharing};
use super::known::socket::{FoundConnection, FoundListener, UnixSockets};
use super::known::stream::{PipeEnds, TerminalSides};
use super::open::{Alike, Key, Open};
use super::option::Fresh;
use super::refusal::Reason;
use super::subject::Subject;
use crate::look::cgroup::Own;
use crate::look::mountinfo;

/// The survey of one process.
#[derive(Debug, Default)]
pub(crate) struct Surveyed {
    pub(crate) descriptors: Vec<Descriptor>,
    /// The first process with the same table of descriptors, by its id inside.
    pub(crate) table_of: Option<u32>,
    pub(crate) locks: Vec<HeldLock>,
    pub(crate) notices: Vec<Notice>,
    pub(crate) directory: Option<usize>,
    /// The first process with the same directory, by its id inside.
    pub(crate) place_of: Option<u32>,
    /// The first process with the same undo values of semaphores, by its id inside.
    pub(crate) undo_of: Option<u32>,
    /// The first process with the same I/O context, by its id inside.
    pub(crate) io_of: Option<u32>,
    pub(crate) root: Option<String>,
    /// What its threads have apart from it, by the host's ids.
    pub(crate) apart: HashMap<u32, Apart>,
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

/// A lease of an open file, with what decides which process takes it again.
#[derive(Debug)]
pub(crate) struct FoundLease {
    /// The open file, an object.
    pub(crate) object: usize,
    /// The process that has set it, by the host's ids.
    pub(crate) set_by: Option<u32>,
    /// The user of the file, by the host's ids.
    pub(crate) uid: u32,
    pub(crate) lease: Lease,
}

/// All objects of a container that were found so far.
pub(crate) struct Survey<'s> {
    pub(crate) subject: &'s Subject,
    /// Memory that was copied ahead.
    pub(crate) ahead: Option<&'s Ahead>,
    pub(crate) found: Found,
    /// Objects of open files.
    pub(super) open_files: HashMap<Key, Alike>,
    /// Files by name and flags, and the mount namespace that they were opened in.
    pub(crate) named: HashMap<(String, u32, Option<usize>), usize>,
    pub(crate) pipes: HashMap<(u64, u64), PipeEnds>,
    pub(crate) unix: UnixSockets,
    /// Peers of unix sockets, by object: the pid that the container shows for each.
    pub(crate) peers: HashMap<usize, u32>,
    pub(crate) shared: HashMap<(u64, u64), usize>,
    /// Contexts of asynchronous I/O.
    pub(crate) aio: AioContexts,
    /// All descriptors, by the ids inside.
    pub(super) uses: Vec<Use>,
    /// Children that job control has stopped: the ids inside of parent and child.
    pub(crate) stopped: Vec<(u32, u32)>,
    /// Those of them with a parent that has not waited for the stop.
    pub(crate) unreported: Vec<u32>,
    /// Shared memory of System V, by the handles of its files.
    pub(crate) segments: HashMap<Vec<u8>, usize>,
    /// POSIX message queues, by device and inode.
    pub(crate) message_queues: HashMap<(u64, u64), usize>,
    /// Terminals by their number.
    pub(crate) terminals: HashMap<u32, TerminalSides>,
    /// Deleted files, by device and inode.
    pub(crate) deleted: HashMap<(u64, u64), usize>,
    /// Files with contents to be read, not opened yet, by object.
    pub(crate) unread: Vec<(usize, Unread)>,
    /// Open files with a lease for writing, by device and inode.
    pub(crate) leased: HashMap<(u64, u64), Leased>,
    /// Files opened again for mappings, by object.
    pub(crate) mapped: HashMap<usize, Mapped>,
    /// Leases of open files.
    pub(crate) leases: Vec<FoundLease>,
    /// Mount namespaces but the container's own.
    pub(crate) mounts: MountNamespaces,
    /// IPC namespaces but the container's own.
    pub(crate) ipc: IpcNamespaces,
    /// Network namespaces but the container's own.
    pub(crate) nets: NetNamespaces,
    /// Time namespaces but the container's own.
    pub(crate) times: TimeNamespaces,
    /// Cgroup namespaces but the container's own.
    pub(crate) cgroup_namespaces: CgroupNamespaces,
    /// User namespaces but the container's own.
    pub(crate) users: UserNamespaces,
    /// UTS namespaces but the container's own, by their links in procfs.
    pub(crate) uts: HashMap<String, usize>,
    /// The control group below which others may have been created inside.
    pub(crate) own_cgroup: Option<Own>,
    /// Processes that share descriptors or directories.
    pub(crate) sharing: Sharing,
    /// The namespaces and groups of the first process, read on first use.
    pub(crate) home: OnceCell<Option<Home>>,
    /// Options of new sockets.
    pub(super) fresh: Fresh,
    /// Devices of volumes, read on first use.
    volumes: OnceCell<Vec<u64>>,
    /// Copies of inspected in-flight files that no process has open. They live as long as the
    /// survey, since their numbers are compared.
    pub(super) in_flight: Vec<OwnedFd>,
}

/// What a survey found.
#[derive(Default)]
pub(crate) struct Found {
    pub(crate) objects: Vec<Object>,
    pub(crate) refusals: Vec<Refusal>,
    /// How many of these are likely to pass in a moment.
    pub(crate) passing: usize,
    /// The configuration of the container's own network stack.
    pub(crate) network: Option<Net>,
    /// Connections, to be read once everything is stopped.
    pub(crate) connections: Vec<FoundConnection>,
    /// Listeners with pending connections, which are taken out then.
    pub(crate) queues: Vec<FoundListener>,
    /// Open files to be held.
    pub(crate) held: Vec<HeldFile>,
    /// The root directory of each tmpfs, by object.
    pub(crate) memories: Vec<(usize, OwnedFd)>,
    /// Objects whose contents are to be read, each with the file to read from.
    pub(crate) contents: Vec<(usize, fs::File)>,
    /// Rings of asynchronous I/O to be read once everything is stopped: object, process and address.
    pub(crate) rings: Vec<(usize, u32, u64)>,
    /// Pipes without an open read end, to be read once everything is stopped, each with a write
    /// end.
    pub(crate) fifos: Vec<(usize, OwnedFd)>,
    /// UDP sockets with a pending error, to be read then.
    pub(crate) in_error: Vec<(usize, OwnedFd)>,
    /// POSIX message queues, to be read once everything is stopped.
    pub(crate) message_queues: Vec<(usize, OwnedFd)>,
    /// Terminals, through which data may be in transit.
    pub(crate) terminals: Vec<TerminalSides>,
    /// All processes with what they share and nothing else, if any share what processes seldom share.
    pub(crate) outline: Vec<Process>,
    /// Options of new sockets, for the next survey.
    pub(super) fresh: Fresh,
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
            unix: UnixSockets::new(),
            peers: HashMap::new(),
            shared: HashMap::new(),
            aio: AioContexts::default(),
            uses: Vec::new(),
            stopped: Vec::new(),
            unreported: Vec::new(),
            segments: HashMap::new(),
            message_queues: HashMap::new(),
            terminals: HashMap::new(),
            deleted: HashMap::new(),
            unread: Vec::new(),
            leased: HashMap::new(),
            mapped: HashMap::new(),
            leases: Vec::new(),
            mounts: MountNamespaces::default(),
            ipc: IpcNamespaces::default(),
            nets: NetNamespaces::default(),
            times: TimeNamespaces::default(),
            cgroup_namespaces: CgroupNamespaces::default(),
            users: UserNamespaces::default(),
            uts: HashMap::new(),
            own_cgroup: None,
            sharing: Sharing::default(),
            home: OnceCell::new(),
            fresh: Fresh::default(),
            volumes: OnceCell::new(),
            in_flight: Vec::new(),
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
    pub(crate) fn passing(&mut self, why: Reason) -> Reason {
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
}

/// The content of an object until its record is made.
fn placeholder() -> Thing {
    Thing::Device(Device { name: "null".into(), flags: 0 })
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
