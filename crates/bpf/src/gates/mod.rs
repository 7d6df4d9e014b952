//! Gates: labels of tasks, and the time that tasks of one container work for another account; see
//! `gates.bpf.c`.
//!
//! There are several sets ([`Set`]): gates at tracepoints, and those that need trampolines, which not every host
//! permits: at the hooks of security modules (`security.h`) and at functions of the kernel (`pipe.h`, `semaphore.h`).
//! All have the same maps and the same table.
//!
//! Maps and links have names in a directory of a bpffs, which the caller mounts, and which keeps them while no
//! process has a descriptor. Callers hold a lock for [`Gates::load`], [`Gates::apply`],
//! [`Gates::detach`] and [`Gates::remove`].
//!
//! ORDER: a load names the map of homes after all others, and [`Gates::remove`] removes that name
//! first.
//! [`Gates::find`] looks for it: behind it are all others, or gates that are being unloaded.

use std::collections::BTreeMap;
use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libbpf_rs::btf::{Btf, types};

use crate::address::Constants;
use crate::call::{self, Map, Program, Runs};
use crate::error::BpfError;
use crate::group::{Description, is_named};
use crate::record::{Field, Record, record};

type Result<T, E = BpfError> = std::result::Result<T, E>;

/// The programs. They are attached to tracepoints, which are a part of each.
pub static GROUP: Description = Description {
    name: "gates",
    object: include_bytes!(concat!(env!("OUT_DIR"), "/gates.o")),
    programs: &[],
    anchor: "",
    maps: &MAPS,
    about: "",
};

const HOMES: &str = "dm_gate_homes";
const PEERS: &str = "dm_gate_peers";
const USES: &str = "dm_gate_uses";
const CLIENTS: &str = "dm_gate_clients";
const TABLES: &str = "dm_gate_tables";
const ACTIVE: &str = "dm_gate_active";
const LINES: &str = "dm_gate_lines";
const COUNTS: &str = "dm_gate_counts";
const HOSTS: &str = "dm_gate_hosts";
const KNOWN: &str = "dm_gate_known";
const PATHS: &str = "dm_gate_paths";
const TRACE: &str = "dm_gate_trace";
const EDGES: &str = "dm_gate_edges";
const SOCKETS: &str = "dm_gate_sockets";

/// The maps with names, in the order in which [`Gates::remove`] removes them.
const MAPS: [&str; 14] = [
    HOMES, PEERS, USES, CLIENTS, TABLES, ACTIVE, LINES, COUNTS, HOSTS, KNOWN, PATHS, TRACE, EDGES,
    SOCKETS,
];

/// LIMIT: containers with a home, and addresses with a peer.
pub const HOMES_MAX: u32 = 1 << 18;
/// LIMIT: pairs of a container and an account that it has worked for.
pub const USES_MAX: u32 = 1 << 18;
/// LIMIT: rows of a table.
pub const ROWS_MAX: usize = 256;
/// LIMIT: an account and those above it.
pub const DEPTH: usize = 9;
/// LIMIT: paths of a table.
pub const PATHS_MAX: usize = 256;
/// LIMIT: bytes of a path with the '/' behind it.
pub const PATH_BYTES: usize = 248;
/// `PATHS_MAX` in words of bits.
const PATH_WORDS: usize = PATHS_MAX / 64;

/// A gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Gate {
    /// A task has received data from a socket.
    Receive = 1,
    /// A task has given data to a socket.
    Send = 2,
    /// A task has made another one.
    Fork = 3,
    /// A task has begun another program.
    Exec = 4,
    /// A task makes another one, if no row refuses that.
    Create = 5,
    /// A task opens a file.
    Open = 6,
    /// A task has received a message of System V.
    Message = 7,
    /// A task has read from a pipe or FIFO.
    Pipe = 8,
    /// A task has taken from a semaphore of System V.
    Semaphore = 9,
    /// A task attaches shared memory of System V.
    Shm = 10,
}

/// A set of gates: a kernel takes all of a set, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Set {
    /// At tracepoints, sockets and cgroups.
    Tracepoints,
    /// At the hooks of security modules.
    Security,
    /// At functions of the kernel for pipes.
    Pipe,
    /// At a function of the kernel for semaphores, and at a hook of security modules.
    Semaphore,
}

impl Set {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Tracepoints, Self::Security, Self::Pipe, Self::Semaphore];

    /// Whether one of its programs is at a hook of security modules.
    fn has_security_hook(self) -> bool {
        matches!(self, Self::Security | Self::Semaphore)
    }
}

impl Gate {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Receive,
        Self::Send,
        Self::Fork,
        Self::Exec,
        Self::Create,
        Self::Open,
        Self::Message,
        Self::Pipe,
        Self::Semaphore,
        Self::Shm,
    ];

    /// The set that it belongs to.
    pub fn set(self) -> Set {
        match self {
            Self::Receive | Self::Send | Self::Fork | Self::Exec => Set::Tracepoints,
            Self::Create | Self::Open | Self::Message | Self::Shm => Set::Security,
            Self::Pipe => Set::Pipe,
            Self::Semaphore => Set::Semaphore,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Receive => "receive",
            Self::Send => "send",
            Self::Fork => "fork",
            Self::Exec => "exec",
            Self::Create => "create",
            Self::Open => "open",
            Self::Message => "message",
            Self::Pipe => "pipe",
            Self::Semaphore => "semaphore",
            Self::Shm => "shm",
        }
    }
}

/// Programs that every gate needs: they add up, inherit and end labels.
const ALWAYS: [&str; 3] = ["dm_gate_switch", "dm_gate_fork", "dm_gate_exit"];
/// Programs that note the other side of connections, and the account that it works for.
const NOTES: [&str; 3] = ["dm_gate_state", "dm_gate_unix", "dm_gate_told"];
/// Programs that note the senders of datagrams, and their hooks of the cgroup above all containers.
const SENDERS: [(&str, u32); 2] = [
    ("dm_gate_udp4", libbpf_rs::libbpf_sys::BPF_CGROUP_UDP4_RECVMSG),
    ("dm_gate_udp6", libbpf_rs::libbpf_sys::BPF_CGROUP_UDP6_RECVMSG),
];

/// The program that answers the call by which a task names its client, and its hook of the same cgroup. Not every
/// kernel that has the gates takes it.
const BIND: (&str, u32) = ("dm_gate_bind", libbpf_rs::libbpf_sys::BPF_CGROUP_SETSOCKOPT);

/// Programs that exchange accounts with other hosts, and their hooks of the same cgroup. They are attached while there
/// is such a host.
const WIRES: [(&str, u32); 2] = [
    ("dm_gate_wire", libbpf_rs::libbpf_sys::BPF_CGROUP_SOCK_OPS),
    ("dm_gate_syn", libbpf_rs::libbpf_sys::BPF_CGROUP_INET_INGRESS),
];

/// Programs of a gate beside its own, in the order in which they are attached. They note the account of the other side,
/// and are only there with the gate.
fn beside(gate: Gate) -> &'static [&'static str] {
    match gate {
        Gate::Message => &["dm_gate_msgfree", "dm_gate_msgsnd"],
        // ORDER: the last one makes notes, which the others keep right.
        Gate::Pipe => &[
            "dm_gate_pfree",
            "dm_gate_plock",
            "dm_gate_plocks",
            "dm_gate_wrote",
            "dm_gate_write",
            "dm_gate_pmake",
        ],
        Gate::Semaphore => &["dm_gate_semfree"],
        Gate::Shm => &["dm_gate_shmfree", "dm_gate_shmget"],
        Gate::Receive | Gate::Send | Gate::Fork | Gate::Exec | Gate::Create | Gate::Open => &[],
    }
}

/// The programs of all gates beside their own, in the order in which they are attached.
fn all_beside() -> impl DoubleEndedIterator<Item = &'static str> {
    Gate::ALL.into_iter().flat_map(|gate| beside(gate).iter().copied())
}

/// The set of a program.
fn set_of(name: &str) -> Set {
    let gate = Gate::ALL.into_iter().find(|g| program(*g) == name || beside(*g).contains(&name));
    gate.map_or(Set::Tracepoints, Gate::set)
}

/// Programs at functions that have another name in this kernel, with this name.
///
/// KERNEL(6.15): the functions of pipes were renamed.
fn targets() -> &'static [(&'static str, &'static str)] {
    static IS_RENAMED: OnceLock<bool> = OnceLock::new();
    let has = || {
        let btf = Btf::from_vmlinux().ok()?;
        btf.type_by_name::<types::Func<'_>>("anon_pipe_read").map(|_| true)
    };
    match *IS_RENAMED.get_or_init(|| has().unwrap_or(false)) {
        true => &[
            ("dm_gate_write", "anon_pipe_write"),
            ("dm_gate_wrote", "anon_pipe_write"),
            ("dm_gate_read", "anon_pipe_read"),
        ],
        false => &[],
    }
}

/// The name of a program of [`WIRES`], which keeps it while it is not attached.
fn kept(program: &str) -> String {
    format!("program_{program}")
}

/// The program of a gate. That of forks inherits labels in any case, and has rows only if the gate is loaded.
fn program(gate: Gate) -> &'static str {
    match gate {
        Gate::Receive => "dm_gate_receive",
        Gate::Send => "dm_gate_send",
        Gate::Fork => "dm_gate_fork",
        Gate::Exec => "dm_gate_exec",
        Gate::Create => "dm_gate_create",
        Gate::Open => "dm_gate_open",
        Gate::Message => "dm_gate_msgrcv",
        Gate::Pipe => "dm_gate_read",
        Gate::Semaphore => "dm_gate_semop",
        Gate::Shm => "dm_gate_shmat",
    }
}

/// Names of all programs in the order in which they are attached, those that count first.
fn programs(gates: &[Gate]) -> Vec<&'static str> {
    let sockets = gates.iter().any(|gate| matches!(gate, Gate::Receive | Gate::Send));
    let notes = NOTES.into_iter().filter(|_| sockets);
    let receives = gates.contains(&Gate::Receive);
    let senders = SENDERS.into_iter().filter(|_| receives).map(|(name, _)| name);
    let beside = gates.iter().flat_map(|gate| beside(*gate).iter().copied());
    let own = gates.iter().filter(|gate| **gate != Gate::Fork).map(|gate| program(*gate));
    let bind = Some(BIND.0).filter(|_| receives);
    ALWAYS.into_iter().chain(notes).chain(senders).chain(beside).chain(own).chain(bind).collect()
}

record! {
    struct Config = "dm_gate_config" {
        level: u32,
        pool4: u32,
        pool_count: u32,
        public6: [u32; 3],
    }
}

record! {
    struct HomeRecord = "dm_gate_home" {
        owner: u64,
        netns: u64,
        account: u32,
        flags: u32,
        uses: u32,
        reserved: u32,
    }
}

record! {
    struct PeerRecord = "dm_gate_peer" {
        owner: u64,
        account: u32,
        reserved: u32,
    }
}

record! {
    struct Work = "dm_gate_work" {
        cgroup: u64,
        owner: u64,
        account: u32,
        reserved: u32,
    }
}

record! {
    struct UseRecord = "dm_gate_use" {
        cpu_ns: u64,
    }
}

record! {
    struct Nth = "dm_gate_nth" {
        cgroup: u64,
        number: u32,
        reserved: u32,
    }
}

record! {
    struct ClientRecord = "dm_gate_client" {
        owner: u64,
        account: u32,
        reserved: u32,
    }
}

record! {
    /// A row of a table: the first that matches a passage decides.
    pub struct Rule = "dm_rule" {
        /// The number of the gate.
        pub gate: u32,
        /// What the label becomes: 0 the same, 1 the home, 2 the peer, 3 `account`; 4 the call fails.
        pub becomes: u32,
        /// An account, or the errno with which a call fails.
        pub account: u32,
        /// The home, or `u32::MAX` for any.
        pub home: u32,
        /// The label before.
        pub label: u32,
        /// The other side.
        pub peer: u32,
        /// Bit 0 home, 1 label, 2 peer: accounts below it match as well.
        pub below: u32,
        /// Local port of the socket, 0 any.
        pub port: u32,
        /// The owner of `account`, as in [`Party`].
        pub owner: u64,
        /// 1 and the index of the path below which the file is, 0 any.
        pub path: u32,
        /// Unused.
        pub reserved: u32,
    }
}

record! {
    struct PathRecord = "dm_gate_path" {
        bits: u32,
        table: u32,
        path: [u8; PATH_BYTES],
    }
}

record! {
    struct BelowRecord = "dm_gate_below" {
        paths: [u64; PATH_WORDS],
    }
}

record! {
    struct Header = "none" {
        count: u32,
        gates: u32,
        below: u32,
        reserved: u32,
    }
}

record! {
    struct Place = "dm_gate_place" {
        table: u32,
        account: u32,
    }
}

record! {
    struct Line = "dm_line" {
        accounts: [u32; DEPTH],
    }
}

record! {
    struct HostRecord = "dm_gate_host" {
        bits: u32,
        address: [u32; 4],
    }
}

record! {
    struct SharedRecord = "dm_gate_shared" {
        owner: u64,
    }
}

record! {
    struct ConnectionRecord = "connection" {
        owner: u64,
        account: u32,
        is_opened: u32,
        reader: u64,
    }
}

/// `DM_NOBODY`
const NOBODY: u32 = 0xffff_fffe;

record! {
    struct EdgeRecord = "dm_gate_edge" {
        home_owner: u64,
        peer_owner: u64,
        home: u32,
        peer: u32,
        port: u32,
        is_opened: u32,
    }
}

record! {
    struct EdgeCount = "dm_gate_edge_count" {
        passages: u64,
    }
}

record! {
    struct Count = "dm_gate_count" {
        passages: u64,
        changed: u64,
        unknown: u64,
        full: u64,
        refused: u64,
    }
}

/// An account with its owner, which tells accounts apart that have one number after another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Party {
    /// The account.
    pub account: u32,
    /// The first eight bytes of the container's id if it is its own account; when it was made, if an operator chose
    /// its number; else 0.
    pub owner: u64,
}

/// What gates know of the container of a cgroup.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Home {
    /// Its account.
    pub party: Party,
    /// The cookie of the stack of its domain; `None` without an address.
    pub netns: Option<u64>,
    /// Whether it works for its clients where no row decides.
    pub is_shared: bool,
}

/// `DM_HOME_SHARED`
const SHARED: u32 = 1;

/// The work of a container for another account, since the gates were loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Use {
    /// The container's cgroup (its id in the v2 hierarchy).
    pub service_cgroup: u64,
    /// The account that it worked for.
    pub party: Party,
    /// CPU time, as the scheduler counts it.
    pub cpu_ns: u64,
}

/// Data that containers of one account have received from another one over connections, during a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Edge {
    /// The account of the receiver.
    pub home: Party,
    /// The account of the sender.
    pub peer: Party,
    /// The local port of connections that the sender has opened; 0 for those of unix sockets, and for all that the
    /// receiver has opened.
    pub port: u16,
    /// The receiver has opened the connections.
    pub is_opened: bool,
    /// How often data was received.
    pub passages: u64,
}

/// Counters of a gate or of a program that all gates need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stat {
    /// The gate; `None` for a program that all need.
    pub gate: Option<Gate>,
    /// Its program, and the program's id.
    pub program: (String, u32),
    /// Its runs while they were counted.
    pub runs: Runs,
    /// Passages of tasks of containers for which a row might have matched.
    pub passages: u64,
    /// Labels that they changed.
    pub changed: u64,
    /// Passages with the other side outside of all containers, or not known.
    pub unknown: u64,
    /// Labels that could not be kept.
    pub full: u64,
    /// Calls that failed by a row.
    pub refused: u64,
}

fn config(constants: Constants) -> Vec<u8> {
    let [a, b, c, d, e, f] = constants.prefix6;
    let config = Config {
        level: constants.level,
        pool4: u32::from(constants.pool),
        pool_count: constants.pool_count,
        public6: [u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, 0, 0]), 0],
    };
    config.to_bytes()
}

/// Tests whether this kernel loads and attaches the programs of a set. They see every task of the host for a moment,
/// and know no container. Those of a cgroup are attached to none.
pub fn supported(set: Set) -> Result<()> {
    let is_of_set = |name: &str| name != BIND.0 && set_of(name) == set;
    let (_maps, programs) = GROUP.load_at(&config(some_constants()), &is_of_set, targets())?;
    let mut traces = programs.iter().filter(|program| hook(program).is_none());
    traces.try_for_each(|program| attach(program, None).map(drop))?;
    if set.has_security_hook() && !call::has_bpf_module() {
        return Err(BpfError::Inactive);
    }
    Ok(())
}

/// Tests whether this kernel loads the program that answers the call of a task.
pub fn supports_calls() -> Result<()> {
    GROUP.load_some(&config(some_constants()), &|name| name == BIND.0).map(drop)
}

fn some_constants() -> Constants {
    let pool = Ipv4Addr::new(10, 136, 0, 0);
    Constants { level: 2, pool, pool_count: 1, chunk: 1, prefix6: [0; 6], has_cookies: false }
}

/// The hook of a program of a cgroup; the others are of tracepoints.
fn hook(program: &Program) -> Option<u32> {
    SENDERS
        .into_iter()
        .chain(WIRES)
        .chain([BIND])
        .find(|(name, _)| is_named(&program.name, name))
        .map(|(_, hook)| hook)
}

/// Attaches a program to its tracepoint, or to this cgroup.
fn attach(program: &Program, cgroup: Option<BorrowedFd<'_>>) -> Result<OwnedFd> {
    let all = || programs(&Gate::ALL).into_iter();
    let name = all().find(|name| is_named(&program.name, name)).unwrap_or("dm_gate");
    let attached = match (hook(program), cgroup) {
        (Some(hook), Some(cgroup)) => call::link_to_cgroup(cgroup, program.as_fd(), hook),
        _ => call::attach_to_tracepoint(program.as_fd()),
    };
    attached.map_err(|source| BpfError::Attach { program: name, source })
}

/// The gates of an instance.
#[derive(Debug)]
pub struct Gates {
    dir: PathBuf,
    homes: Map,
    /// The loaded gates, found when they are needed.
    which: OnceLock<Vec<Gate>>,
}

fn used(work: &Work, value: &[u8]) -> Use {
    Use {
        service_cgroup: work.cgroup,
        party: Party { account: work.account, owner: work.owner },
        cpu_ns: UseRecord::from_bytes(value).cpu_ns,
    }
}

/// The accounts that a container has worked for, with their numbers below `numbers`.
fn all_clients(clients: &Map, cgroup_v2_id: u64, numbers: u32) -> Result<Vec<(Nth, Work)>> {
    let mut all = Vec::new();
    for number in 0..numbers {
        let nth = Nth { cgroup: cgroup_v2_id, number, reserved: 0 };
        let Some(found) = clients.get(&nth.to_bytes())? else { continue };
        let ClientRecord { owner, account, .. } = ClientRecord::from_bytes(&found);
        all.push((nth, Work { cgroup: cgroup_v2_id, owner, account, reserved: 0 }));
    }
    Ok(all)
}

/// What gates have noted with connections, in a storage of sockets.
#[derive(Debug)]
pub struct Connections(Map);

impl Connections {
    /// Reads the account of the client from the note of the side that was connected to. `None` for a side that has
    /// opened its connection, and for a client outside of all containers whose host has sent no account along.
    pub fn client(note: &[u8]) -> Option<u32> {
        let note = (note.len() == size_of::<ConnectionRecord>())
            .then(|| ConnectionRecord::from_bytes(note))?;
        (note.is_opened == 0 && note.account != NOBODY).then_some(note.account)
    }
}

impl AsFd for Connections {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Gates that are loaded, and not attached yet.
#[derive(Debug)]
pub struct Loaded {
    gates: Gates,
    programs: Vec<Program>,
}

fn home_record(home: Home) -> HomeRecord {
    HomeRecord {
        owner: home.party.owner,
        netns: home.netns.unwrap_or(0),
        account: home.party.account,
        flags: if home.is_shared { SHARED } else { 0 },
        uses: 0,
        reserved: 0,
    }
}

impl Gates {
    /// Loads the programs of these gates, and names their maps in this directory of a bpffs. No program runs before
    /// [`Loaded::attach`].
    pub fn load(dir: &Path, constants: Constants, which: &[Gate]) -> Result<Loaded> {
        if which.iter().any(|gate| gate.set().has_security_hook()) && !call::has_bpf_module() {
            return Err(BpfError::Inactive);
        }
        let wanted = programs(which);
        let load = |with_calls: bool| {
            let is_wanted = |name: &str| match name {
                name if name == BIND.0 => with_calls,
                name => set_of(name) == Set::Tracepoints || wanted.contains(&name),
            };
            GROUP.load_at(&config(constants), &is_wanted, targets())
        };
        let (maps, programs) = match load(wanted.contains(&BIND.0)) {
            // KERNEL(6.16): earlier ones refuse that program.
            Err(BpfError::Load { .. }) if wanted.contains(&BIND.0) => load(false)?,
            other => other?,
        };
        let (homes, others): (Vec<Map>, Vec<Map>) =
            maps.into_iter().partition(|map| is_named(&map.name, HOMES));
        let homes = homes.into_iter().next().ok_or_else(|| missing(HOMES))?;
        for map in &others {
            call::pin(map.as_fd(), &dir.join(&map.name))?;
        }
        call::pin(homes.as_fd(), &dir.join(HOMES))?;
        // They have no names before they are attached.
        let which = OnceLock::from(which.to_vec());
        Ok(Loaded { gates: Self { dir: dir.into(), homes, which }, programs })
    }

    /// The gates with names in this directory, attached or not; `None` if there are none, or those of another build
    /// with other records, which know no further container.
    pub fn find(dir: &Path) -> Result<Option<Self>> {
        let Some(homes) = call::pinned(&dir.join(HOMES))? else { return Ok(None) };
        let homes = Map::new(homes)?;
        if homes.value_bytes() != size_of::<HomeRecord>() {
            return Ok(None);
        }
        Ok(Some(Self { dir: dir.into(), homes, which: OnceLock::new() }))
    }

    /// Returns the loaded gates.
    fn which(&self) -> &[Gate] {
        let is_attached = |gate: &Gate| self.dir.join(gate.name()).exists();
        self.which.get_or_init(|| Gate::ALL.into_iter().filter(is_attached).collect())
    }

    /// One of the maps; `None` if the gates are being unloaded.
    fn map(&self, name: &str) -> Result<Option<Map>> {
        Ok(call::pinned(&self.dir.join(name))?.map(Map::new).transpose()?)
    }

    /// Makes this the home of processes below a cgroup, of which none has run yet. E2BIG if the map is full.
    pub fn enter(&self, cgroup_v2_id: u64, home: Home) -> Result<()> {
        Ok(self.homes.set(&cgroup_v2_id.to_ne_bytes(), &home_record(home).to_bytes())?)
    }

    /// The same for a cgroup that has none yet: a start that is under way knows better.
    pub fn enter_new(&self, cgroup_v2_id: u64, home: Home) -> Result<()> {
        let record = home_record(home).to_bytes();
        Ok(self.homes.set_new(&cgroup_v2_id.to_ne_bytes(), &record).map(drop)?)
    }

    /// Ends the homes of cgroups that have no processes any more, and forgets what they have worked.
    ///
    /// ORDER: the home last: it leads to the others.
    pub fn leave(&self, gone: &[u64]) -> Result<()> {
        let mut maps = None;
        for id in gone {
            let numbers = self.numbers(*id)?;
            // Most containers have worked for no other account.
            if maps.is_none() && numbers > 0 {
                maps = self.map(USES)?.zip(self.map(CLIENTS)?);
            }
            if let Some((uses, clients)) = &maps {
                for (nth, work) in all_clients(clients, *id, numbers)? {
                    uses.remove(&work.to_bytes())?;
                    clients.remove(&nth.to_bytes())?;
                }
            }
            self.homes.remove(&id.to_ne_bytes())?;
        }
        Ok(())
    }

    /// How many accounts a container has worked for, with those that found no room.
    fn numbers(&self, cgroup_v2_id: u64) -> Result<u32> {
        let home = self.homes.get(&cgroup_v2_id.to_ne_bytes())?;
        Ok(home.map_or(0, |home| HomeRecord::from_bytes(&home).uses))
    }

    /// Returns whether the container of this cgroup has worked for other accounts.
    pub fn has_worked(&self, cgroup_v2_id: u64) -> Result<bool> {
        Ok(self.numbers(cgroup_v2_id)? > 0)
    }

    /// The cgroups that have a home.
    pub fn homes(&self) -> Result<Vec<u64>> {
        let id = |(key, _): (Vec<u8>, Vec<u8>)| {
            key.first_chunk().map_or(0, |id| u64::from_ne_bytes(*id))
        };
        Ok(self.homes.entries()?.into_iter().map(id).collect())
    }

    /// Makes `party` the account behind an address of the pool. E2BIG if the map is full.
    pub fn announce(&self, index: u32, party: Party) -> Result<()> {
        let Some(peers) = self.map(PEERS)? else { return Ok(()) };
        let peer = PeerRecord { owner: party.owner, account: party.account, reserved: 0 };
        Ok(peers.set(&index.to_ne_bytes(), &peer.to_bytes())?)
    }

    /// No container has this address any more.
    pub fn withdraw(&self, index: u32) -> Result<()> {
        let Some(peers) = self.map(PEERS)? else { return Ok(()) };
        peers.remove(&index.to_ne_bytes())?;
        Ok(())
    }

    /// What containers have worked for other accounts, with the id of the map: it is another one after each load.
    pub fn uses(&self) -> Result<(u32, Vec<Use>)> {
        let Some(uses) = self.map(USES)? else { return Ok((0, Vec::new())) };
        let all = uses.entries()?.into_iter();
        let all = all.map(|(key, value)| used(&Work::from_bytes(&key), &value));
        Ok((uses.id, all.collect()))
    }

    /// What the container of this cgroup has worked for other accounts, in a time that does not depend on others. The
    /// id of the map is 0 if that is nothing.
    pub fn uses_of(&self, cgroup_v2_id: u64) -> Result<(u32, Vec<Use>)> {
        let numbers = self.numbers(cgroup_v2_id)?;
        if numbers == 0 {
            return Ok((0, Vec::new()));
        }
        let (uses, clients) = (self.map(USES)?, self.map(CLIENTS)?);
        let (Some(uses), Some(clients)) = (uses, clients) else { return Ok((0, Vec::new())) };
        let mut all = Vec::new();
        for (_, work) in all_clients(&clients, cgroup_v2_id, numbers)? {
            all.extend(uses.get(&work.to_bytes())?.map(|value| used(&work, &value)));
        }
        Ok((uses.id, all))
    }

    /// Replaces the table: a passage is decided by the old one or by the new one as a whole. Rows of gates that are
    /// not loaded have no effect. Each line is an account and those above it. Rows name paths by their place in
    /// `paths`.
    ///
    /// ORDER: the table that is not in force is written, and then put in force. The next call writes the other one
    /// only after every program that may have begun with it has ended.
    pub fn apply(
        &self,
        rows: &[Rule],
        lines: &[(u32, [u32; DEPTH])],
        paths: &[String],
    ) -> Result<()> {
        let map = |name| self.map(name)?.ok_or_else(|| missing(name));
        let (tables, active, all_lines) = (map(TABLES)?, map(ACTIVE)?, map(LINES)?);
        // Gates of an earlier build: they keep their rules until the next load.
        if tables.value_bytes() != size_of::<Header>() + ROWS_MAX * size_of::<Rule>() {
            return Ok(());
        }
        let zero = 0u32.to_ne_bytes();
        let in_force = active.get(&zero)?.and_then(|n| n.first_chunk().copied());
        let next = 1 - in_force.map_or(0, u32::from_ne_bytes).min(1);
        for (key, _) in all_lines.entries()? {
            if Place::from_bytes(&key).table == next {
                all_lines.remove(&key)?;
            }
        }
        for (account, accounts) in lines {
            let place = Place { table: next, account: *account };
            all_lines.set(&place.to_bytes(), &Line { accounts: *accounts }.to_bytes())?;
        }
        set_paths(&map(PATHS)?, next, paths)?;
        let is_loaded = |row: &&Rule| self.which().iter().any(|gate| *gate as u32 == row.gate);
        let rows: Vec<&Rule> = rows.iter().filter(is_loaded).take(ROWS_MAX).collect();
        let header = Header {
            count: rows.len() as u32,
            gates: rows.iter().fold(0, |gates, row| gates | 1 << row.gate.min(31)),
            below: rows.iter().fold(0, |below, row| below | row.below),
            reserved: 0,
        };
        let mut table = header.to_bytes();
        rows.iter().for_each(|row| table.extend(row.to_bytes()));
        table.resize(tables.value_bytes(), 0);
        tables.set(&next.to_ne_bytes(), &table)?;
        active.set(&zero, &next.to_ne_bytes())?;
        call::wait_for_programs();
        Ok(())
    }

    /// Makes hosts and the accounts that they share with this one known, instead of earlier ones. A host is an address,
    /// IPv4 mapped into IPv6, of which the first bits count. `cgroup` is the one above all containers. Without a gate
    /// of sockets there is no connection to see, and nothing is attached.
    ///
    /// ORDER: the programs first where the first host comes, and last where the last one goes: with a host in the map
    /// they run.
    pub fn agree(
        &self,
        hosts: &[(Ipv6Addr, u32)],
        accounts: &[Party],
        cgroup: BorrowedFd<'_>,
    ) -> Result<()> {
        // Gates of an earlier build: they exchange none until the next load.
        let (Some(known), Some(hosts_map)) = (self.map(KNOWN)?, self.map(HOSTS)?) else {
            return Ok(());
        };
        let is_active = self.sees_connections() && !hosts.is_empty();
        if is_active {
            for (name, hook) in WIRES {
                let link = self.dir.join(name);
                if link.exists() {
                    continue;
                }
                let program = call::pinned(&self.dir.join(kept(name)))?;
                let program = program.ok_or_else(|| missing(name))?;
                let attached = call::link_to_cgroup(cgroup, program.as_fd(), hook);
                let attached =
                    attached.map_err(|source| BpfError::Attach { program: name, source })?;
                call::pin(attached.as_fd(), &link)?;
            }
        }
        let wanted = accounts.iter().map(|party| {
            (party.account.to_ne_bytes().to_vec(), SharedRecord { owner: party.owner }.to_bytes())
        });
        replace(&known, &wanted.collect())?;
        let wanted = hosts.iter().map(|(address, bits)| {
            let [a, b, c, d] = Field::get(&address.octets());
            let host = HostRecord { bits: *bits, address: [a, b, c, d] };
            (host.to_bytes(), 1u32.to_ne_bytes().to_vec())
        });
        replace(&hosts_map, &wanted.collect())?;
        if !is_active {
            WIRES.iter().try_for_each(|(name, _)| unname(&self.dir.join(name)))?;
        }
        Ok(())
    }

    /// Returns whether connections are seen, by a gate of sockets.
    pub fn sees_connections(&self) -> bool {
        self.which().iter().any(|gate| matches!(gate, Gate::Receive | Gate::Send))
    }

    /// What is noted with connections; `None` if the gates are of an earlier build, or are being unloaded.
    pub fn connections(&self) -> Result<Option<Connections>> {
        Ok(self.map(SOCKETS)?.map(Connections))
    }

    /// Returns whether passages can be traced: the gate that sees data arrive is loaded.
    pub fn is_tracing_possible(&self) -> bool {
        self.which().contains(&Gate::Receive)
    }

    /// Begins to count edges, from none, or ends it.
    pub fn trace(&self, is_on: bool) -> Result<()> {
        let map = |name| self.map(name)?.ok_or_else(|| missing(name));
        let (trace, zero) = (map(TRACE)?, 0u32.to_ne_bytes());
        trace.set(&zero, &zero)?;
        if is_on {
            call::wait_for_programs();
            let edges = map(EDGES)?;
            for (key, _) in edges.entries()? {
                edges.remove(&key)?;
            }
            trace.set(&zero, &1u32.to_ne_bytes())?;
        }
        Ok(())
    }

    /// Reads the edges of the last trace.
    pub fn edges(&self) -> Result<Vec<Edge>> {
        let Some(edges) = self.map(EDGES)? else { return Ok(Vec::new()) };
        let edge = |(key, value): (Vec<u8>, Vec<u8>)| {
            let record = EdgeRecord::from_bytes(&key);
            Edge {
                home: Party { account: record.home, owner: record.home_owner },
                peer: Party { account: record.peer, owner: record.peer_owner },
                port: record.port.min(u16::MAX.into()) as u16,
                is_opened: record.is_opened != 0,
                passages: EdgeCount::from_bytes(&value).passages,
            }
        };
        Ok(edges.entries()?.into_iter().map(edge).collect())
    }

    /// Reads the counters of the gates.
    pub fn stats(&self) -> Result<Vec<Stat>> {
        let counts = self.map(COUNTS)?;
        let mut stats = Vec::new();
        let gates = Gate::ALL.map(|gate| (Some(gate), gate.name(), program(gate)));
        let senders = SENDERS.map(|(name, _)| name);
        let wires = WIRES.map(|(name, _)| name);
        let always =
            ALWAYS.into_iter().chain(NOTES).chain(senders).chain(all_beside()).chain(wires);
        let always = always.chain([BIND.0]).map(|name| (None, name, name));
        for (gate, file, name) in always.chain(gates) {
            let Some(link) = call::pinned(&self.dir.join(file))? else { continue };
            let id = call::program_of_link(link.as_fd())?;
            let mut stat = Stat {
                gate,
                program: (name.into(), id),
                runs: Program::by_id(id)?.runs()?,
                passages: 0,
                changed: 0,
                unknown: 0,
                full: 0,
                refused: 0,
            };
            if let (Some(gate), Some(counts)) = (gate, &counts) {
                for value in counts.get_per_cpu(&(gate as u32).to_ne_bytes())? {
                    let count = Count::from_bytes(&value);
                    stat.passages += count.passages;
                    stat.changed += count.changed;
                    stat.unknown += count.unknown;
                    stat.full += count.full;
                    stat.refused += count.refused;
                }
            }
            stats.push(stat);
        }
        Ok(stats)
    }

    /// Ends all gates in a directory, complete or not. Labels end, and the figures stay until [`remove`](Self::remove).
    pub fn detach(dir: &Path) -> Result<()> {
        let gates = Gate::ALL.into_iter().map(Gate::name);
        // ORDER: those that change labels first.
        let senders = SENDERS.map(|(name, _)| name);
        let wires = WIRES.map(|(name, _)| name);
        let beside = all_beside().rev();
        let notes = senders.into_iter().chain(beside).chain(wires).chain(NOTES);
        for file in [BIND.0].into_iter().chain(gates).chain(notes).chain(ALWAYS.into_iter().rev()) {
            unname(&dir.join(file))?;
        }
        Ok(())
    }

    /// Removes the maps.
    pub fn remove(dir: &Path) -> Result<()> {
        for file in MAPS {
            unname(&dir.join(file))?;
        }
        for (name, _) in WIRES {
            unname(&dir.join(kept(name)))?;
        }
        Ok(())
    }
}

/// Gives a map these entries and no others.
///
/// ORDER: those that go, then those that come: there is room.
fn replace(map: &Map, wanted: &BTreeMap<Vec<u8>, Vec<u8>>) -> Result<()> {
    // Not in batches: of a trie of prefixes, the place in one is a key.
    let mut gone = Vec::new();
    let mut last: Option<Vec<u8>> = None;
    while let Some(key) = map.next_key(last.as_deref())? {
        if !wanted.contains_key(&key) {
            gone.push(key.clone());
        }
        last = Some(key);
    }
    for key in gone {
        map.remove(&key)?;
    }
    Ok(wanted.iter().try_for_each(|(key, value)| map.set(key, value))?)
}

/// Writes the paths of a table in the place of those that it had.
fn set_paths(map: &Map, table: u32, paths: &[String]) -> Result<()> {
    let mut gone = Vec::new();
    let mut last: Option<Vec<u8>> = None;
    while let Some(key) = map.next_key(last.as_deref())? {
        if PathRecord::from_bytes(&key).table == table {
            gone.push(key.clone());
        }
        last = Some(key);
    }
    for key in gone {
        map.remove(&key)?;
    }
    // With the '/' behind it, a directory is above its files, and not above those of one with a longer name.
    let directory = |path: &String| format!("{}/", path.trim_end_matches('/'));
    let directories: Vec<String> = paths.iter().map(directory).take(PATHS_MAX).collect();
    for path in &directories {
        let mut below = BelowRecord { paths: [0; PATH_WORDS] };
        for (index, above) in directories.iter().enumerate() {
            if let (true, Some(word)) = (path.starts_with(above), below.paths.get_mut(index / 64)) {
                *word |= 1 << (index % 64);
            }
        }
        let bytes = path.as_bytes();
        let mut record =
            PathRecord { bits: 8 * (4 + bytes.len() as u32), table, path: [0; PATH_BYTES] };
        let Some(place) = record.path.get_mut(..bytes.len()) else { continue };
        place.copy_from_slice(bytes);
        map.set(&record.to_bytes(), &below.to_bytes())?;
    }
    Ok(())
}

fn unname(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            let errno = e.raw_os_error().unwrap_or(libc::EIO);
            Err(dormouse_kernel::CallError::new("unlink", format!("{path:?}"), errno).into())
        }
        _ => Ok(()),
    }
}

fn missing(name: &str) -> BpfError {
    BpfError::Missing { object: GROUP.name, name: name.into() }
}

impl Loaded {
    /// The maps.
    pub fn gates(&self) -> &Gates {
        &self.gates
    }

    /// Attaches the programs, those of datagrams to the cgroup above all containers, and names them in the directory.
    ///
    /// ORDER: the programs that count and inherit before those that change labels.
    pub fn attach(self, cgroup: BorrowedFd<'_>) -> Result<Gates> {
        for (name, _) in WIRES {
            let program = self.programs.iter().find(|program| is_named(&program.name, name));
            let program = program.ok_or_else(|| missing(name))?;
            call::pin(program.as_fd(), &self.gates.dir.join(kept(name)))?;
        }
        for name in programs(self.gates.which()) {
            let program = self.programs.iter().find(|program| is_named(&program.name, name));
            if program.is_none() && name == BIND.0 {
                continue;
            }
            let program = program.ok_or_else(|| missing(name))?;
            let link = attach(program, Some(cgroup))?;
            let of = Gate::ALL.into_iter().find(|gate| self::program(*gate) == name);
            let file = of.filter(|gate| *gate != Gate::Fork).map_or(name, Gate::name);
            call::pin(link.as_fd(), &self.gates.dir.join(file))?;
            if of == Some(Gate::Fork) && self.gates.which().contains(&Gate::Fork) {
                call::pin(link.as_fd(), &self.gates.dir.join(Gate::Fork.name()))?;
            }
        }
        Ok(self.gates)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use dormouse_kernel::mount::{FsContext, MountAttr};

    use crate::group::tests::assert_full;
    use crate::record::tests::assert_same;

    use super::*;

    #[test]
    fn records_have_the_layout_of_the_header() {
        assert_same::<Config>(GROUP.object);
        assert_same::<HomeRecord>(GROUP.object);
        assert_same::<PeerRecord>(GROUP.object);
        assert_same::<Work>(GROUP.object);
        assert_same::<UseRecord>(GROUP.object);
        assert_same::<Nth>(GROUP.object);
        assert_same::<ClientRecord>(GROUP.object);
        assert_same::<Rule>(GROUP.object);
        assert_same::<PathRecord>(GROUP.object);
        assert_same::<BelowRecord>(GROUP.object);
        assert_same::<Place>(GROUP.object);
        assert_same::<Line>(GROUP.object);
        assert_same::<HostRecord>(GROUP.object);
        assert_same::<SharedRecord>(GROUP.object);
        assert_same::<ConnectionRecord>(GROUP.object);
        assert_same::<EdgeRecord>(GROUP.object);
        assert_same::<EdgeCount>(GROUP.object);
        assert_same::<Count>(GROUP.object);
        assert_eq!(size_of::<Rule>(), 48);
    }

    #[test]
    fn names_of_programs_fit_into_those_of_the_kernel() {
        for name in programs(&Gate::ALL).into_iter().chain(GROUP.maps.iter().copied()) {
            assert!(name.len() <= 15, "{name}");
        }
        assert_eq!(programs(&[]), ALWAYS);
        assert_eq!(programs(&[Gate::Fork]), ALWAYS);
        let send = ["dm_gate_state", "dm_gate_unix", "dm_gate_told", "dm_gate_send"];
        assert_eq!(programs(&[Gate::Send])[3..], send);
        assert_eq!(programs(&[Gate::Receive])[6..8], ["dm_gate_udp4", "dm_gate_udp6"]);
    }

    #[test]
    fn root_kernel_takes_the_programs() {
        supported(Set::Tracepoints).unwrap();
    }

    #[test]
    fn root_kernel_takes_the_program_of_calls_or_refuses_it_alone() {
        match supports_calls() {
            Ok(()) => {}
            Err(error @ BpfError::Load { .. }) => {
                assert!(error.to_string().contains("dm_gate_bind"), "{error}");
                eprintln!("NOT RUN: {error}");
            }
            Err(error) => panic!("{error:?}"),
        }
    }

    #[test]
    fn root_kernel_takes_the_programs_of_security_or_says_why_not() {
        for set in [Set::Security, Set::Pipe, Set::Semaphore] {
            match supported(set) {
                Ok(()) => {}
                // A kernel that permits no trampolines, or no BPF among its security modules.
                Err(error @ (BpfError::Load { .. } | BpfError::Inactive))
                    if error.kind() == dormouse_kernel::ErrorKind::Os(libc::EPERM) =>
                {
                    eprintln!("NOT RUN: {set:?}: {error}");
                }
                Err(error) => panic!("{set:?}: {error:?}"),
            }
        }
    }

    #[test]
    fn root_end_of_a_container_reads_and_forgets_its_own_work() {
        let fs = FsContext::open("bpf").and_then(|fs| fs.create(MountAttr::NOSUID)).unwrap();
        let dir = PathBuf::from(format!("/proc/self/fd/{}", fs.as_raw_fd()));
        let loaded = Gates::load(&dir, some_constants(), &[Gate::Receive]).unwrap();
        let gates = loaded.gates();
        let map = |name| gates.map(name).unwrap().unwrap();
        // As the programs do: container 7 has worked for 1, 2 and 3, of which the second found no room.
        for cgroup in [7_u64, 8] {
            let home = HomeRecord { uses: 3, ..home_record(Home::default()) };
            map(HOMES).set(&cgroup.to_ne_bytes(), &home.to_bytes()).unwrap();
            for number in [0, 2] {
                let (owner, account, reserved) = (5, number + 1, 0);
                let nth = Nth { cgroup, number, reserved };
                let client = ClientRecord { owner, account, reserved };
                map(CLIENTS).set(&nth.to_bytes(), &client.to_bytes()).unwrap();
                let work = Work { cgroup, owner, account, reserved };
                let used = UseRecord { cpu_ns: cgroup * 10 + u64::from(account) };
                map(USES).set(&work.to_bytes(), &used.to_bytes()).unwrap();
            }
        }
        let of = |cgroup: u64| {
            let all = gates.uses_of(cgroup).unwrap().1.into_iter();
            all.map(|one| (one.party.account, one.party.owner, one.cpu_ns)).collect::<Vec<_>>()
        };
        assert_eq!(of(7), [(1, 5, 71), (3, 5, 73)]);
        assert_eq!(gates.uses().unwrap().1.len(), 4);
        gates.leave(&[7]).unwrap();
        gates.leave(&[7]).unwrap();
        assert_eq!((of(7), of(8)), (vec![], vec![(1, 5, 81), (3, 5, 83)]));
        assert_eq!(map(CLIENTS).entries().unwrap().len(), 2);
        assert_eq!(gates.homes().unwrap(), [8]);
    }

    #[test]
    fn root_full_maps_refuse_one_more_entry_and_take_it_after_a_removal() {
        let is_tracepoint = |name: &str| set_of(name) == Set::Tracepoints;
        let maps = GROUP.load_some(&config(some_constants()), &is_tracepoint).unwrap().0;
        let map = |name: &str| maps.iter().find(|map| map.name == name).unwrap();
        assert_full(map(HOMES), HOMES_MAX);
        assert_full(map(PEERS), HOMES_MAX);
        assert_full(map(USES), USES_MAX);
        assert_eq!(map(USES).entries().unwrap().len(), USES_MAX as usize);
    }
}
