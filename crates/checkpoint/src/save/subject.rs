//! The container to be saved, as its engine describes it.

use std::time::Duration;

/// A file of the host that descriptors of the container may refer to.
#[derive(Debug, Clone)]
pub struct Outside {
    /// The name: `stdout.log`.
    pub name: String,
    /// `st_dev` and `st_ino`.
    pub identity: (u64, u64),
    /// The descriptor number that it was passed as. It decides between two names for one file.
    pub number: Option<u32>,
}

/// The container to be saved.
#[derive(Debug, Clone)]
pub struct Subject {
    /// Its id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Its first process, by the host's id.
    pub init: u32,
    /// The first process is the house's init, which a start creates anew and which is not saved.
    pub has_init: bool,
    /// The names that its configuration gives its UTS namespace; `None` if the namespace is shared.
    pub names: Option<Names>,
    /// The sysctls of its configuration: each path below `/proc/sys`, with its value.
    pub sysctls: Vec<(String, String)>,
    /// All processes of its cgroup, by the host's ids.
    pub pids: Vec<u32>,
    /// Its standard streams and other files of the engine.
    pub outside: Vec<Outside>,
    /// Directories inside that are tmpfs.
    pub memory: Vec<String>,
    /// Devices in these directories that the configuration creates again.
    pub nodes: Vec<String>,
    /// The places where the engine mounts something; `None` if the configuration makes all mounts.
    pub mounts: Option<Places>,
    /// Mount points of volumes, whose files other containers may use.
    pub volumes: Vec<String>,
    /// Its IPC namespace is private, and is removed with the container.
    pub own_ipc: bool,
    /// Its network stack is private, and its processes may configure it.
    pub own_network: bool,
    /// It may create control groups below its own.
    pub cgroups: bool,
    /// TCP connections are saved; otherwise they are refused.
    pub connections: bool,
    /// System call filters that its configuration gives every process.
    pub filters: u32,
    /// Sockets that are reachable from outside are held open ([`Written::held`](super::Written::held)) until the
    /// container is restored on this host, so that later connections are not refused. Existing
    /// connections, accepted or pending, stay open, and data that their peers send is queued.
    pub hold: bool,
    /// As far as is known, no task has run for this time: all have waited at least that long.
    pub quiet: Duration,
    /// Arguments of this program (`/proc/self/exe`) that make it call [`super::rescue_connections`]; none, and a kill
    /// of the save may leave connections unusable.
    pub rescue: &'static [&'static str],
}

/// The names of a private UTS namespace at its start.
#[derive(Debug, Clone)]
pub struct Names {
    /// The host name; `None` for that of the host.
    pub hostname: Option<String>,
    /// The NIS domain name; `None` for that of the host.
    pub domainname: Option<String>,
    /// Processes of the container may set both (CAP_SYS_ADMIN).
    pub can_be_set: bool,
}

/// Places in the container's own namespace where the engine mounts something.
#[derive(Debug, Clone, Default)]
pub struct Places {
    /// Mount points of the configuration.
    pub configured: Vec<String>,
    /// Those of them below which mounts of the host may be included.
    pub trees: Vec<String>,
    /// Mount points of devpts that the engine may have added since, and mounts again when needed.
    pub terminals: String,
}
