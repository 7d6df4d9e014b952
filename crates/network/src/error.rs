//! What can fail here.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use dormouse_bpf::BpfError;
use dormouse_kernel::{CallError, ErrorKind};

/// A step of networking that failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of ours or of the kernel's could not be used.
    #[error("{what} '{}'", path.display())]
    File {
        /// What was tried.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A system call.
    #[error("{0}")]
    Step(&'static str, #[source] CallError),
    /// The kernel refused a change of links, addresses or routes.
    #[error("{step}")]
    Netlink {
        /// What was to be changed.
        step: String,
        /// The kernel's answer.
        #[source]
        source: rtnetlink::Error,
    },
    /// A BPF program or map.
    #[error("the address programs (BPF)")]
    Bpf(#[from] BpfError),
    /// nft(8) could not be run, or refused the rules.
    #[error("nft could not {step}: {message}")]
    Nft {
        /// What the rules were for.
        step: &'static str,
        /// What it said.
        message: String,
    },
    /// The configuration file.
    #[error("[network] in '{}': {message}", path.display())]
    Settings {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// The pool overlaps with a network that the host reaches.
    #[error(
        "the address pool {pool} overlaps with the host's route to {route}; choose another one with \
         'pool' under [network] in config.toml"
    )]
    PoolOverlaps {
        /// The pool.
        pool: String,
        /// The route.
        route: String,
    },
    /// The allocations on disk belong to another pool.
    #[error("addresses have been given from {found}, the configuration says {wanted}; remove all containers and '{}' to change it", path.display())]
    PoolChanged {
        /// The pool on disk.
        found: String,
        /// The pool of the configuration.
        wanted: String,
        /// Where it is written.
        path: PathBuf,
    },
    /// An address that was asked for is not one of the pool.
    #[error("address {address} is not in the pool {pool}, or reserved")]
    NotInPool {
        /// Asked for.
        address: IpAddr,
        /// The pool.
        pool: String,
    },
    /// An address that was asked for is another container's or another domain's.
    #[error("address {address} belongs to {owner}")]
    AddressTaken {
        /// Asked for.
        address: IpAddr,
        /// Whose it is.
        owner: String,
    },
    /// No address is left.
    #[error("all addresses of {pool} are in use")]
    PoolFull {
        /// The pool.
        pool: String,
    },
    /// A port of the host that is asked for is in use.
    #[error("port {port} of the host is in use by {owner}")]
    PortTaken {
        /// `8080/tcp`, with the address where one was given.
        port: String,
        /// Whose it is.
        owner: String,
    },
    /// The container has no addresses here.
    #[error("container {0} has no address")]
    NoAddress(String),
    /// The first address of a container stays with it.
    #[error("{0} is the container's first address and cannot be removed")]
    FirstAddress(IpAddr),
    /// An address to be removed is not the container's.
    #[error("{0} is not an address of the container")]
    NotItsOwn(IpAddr),
    /// A file of ours is damaged.
    #[error("'{}' is damaged: {message}", path.display())]
    Corrupt {
        /// Which.
        path: PathBuf,
        /// How.
        message: String,
    },
    /// There is no cgroup v2 hierarchy.
    #[error("no cgroup v2 hierarchy is mounted; address networking needs one")]
    NoCgroup2,
}

impl Error {
    /// What a caller may decide on.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::File { source, .. } => match source.raw_os_error() {
                Some(errno) => CallError::new("file", String::new(), errno).kind(),
                None => ErrorKind::Corrupt,
            },
            Self::Step(_, source) => source.kind(),
            Self::Netlink { source, .. } => match source {
                rtnetlink::Error::NetlinkError(e) => match e.code {
                    Some(code) => CallError::new("netlink", String::new(), -code.get()).kind(),
                    None => ErrorKind::Os(0),
                },
                _ => ErrorKind::Invalid,
            },
            Self::Bpf(e) => e.kind(),
            Self::Nft { .. } => ErrorKind::Unsupported { since: "5.6" },
            Self::Settings { .. } | Self::NotInPool { .. } => ErrorKind::Invalid,
            Self::PoolOverlaps { .. }
            | Self::PoolChanged { .. }
            | Self::AddressTaken { .. }
            | Self::PortTaken { .. } => ErrorKind::Busy,
            Self::PoolFull { .. } => ErrorKind::Limit,
            Self::FirstAddress(_) => ErrorKind::Invalid,
            Self::NoAddress(_) | Self::NotItsOwn(_) => ErrorKind::NotFound,
            Self::Corrupt { .. } => ErrorKind::Corrupt,
            Self::NoCgroup2 => ErrorKind::Unsupported { since: "4.5" },
        }
    }

    pub(crate) fn file(
        what: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { what, path, source }
    }

    /// For rustix, whose errors are bare numbers.
    pub(crate) fn errno(
        step: &'static str,
        call: &'static str,
    ) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |e| Self::Step(step, CallError::new(call, String::new(), e.raw_os_error()))
    }
}

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;
