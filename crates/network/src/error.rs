//! Errors of the network.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use dormouse_bpf::BpfError;
use dormouse_kernel::{CallError, ErrorKind};

/// A step of networking that failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of the store or of the kernel could not be used.
    #[error("{what} '{}'", path.display())]
    File {
        /// The step.
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
        /// The intended change.
        step: String,
        /// The kernel's answer.
        #[source]
        source: CallError,
    },
    /// A BPF program or map.
    #[error("the address programs (BPF)")]
    Bpf(#[from] BpfError),
    /// nft(8) could not be run, or refused the rules.
    #[error("nft could not {step}: {message}")]
    Nft {
        /// The purpose of the rules.
        step: &'static str,
        /// The message of nft.
        message: String,
    },
    /// The configuration file.
    #[error("[network] in '{}': {message}", path.display())]
    Settings {
        /// The file.
        path: PathBuf,
        /// The fault.
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
    /// Another instance on this host uses the pool.
    #[error(
        "the address pool {pool} is used by another instance of Dormouse ({other}, device {uplink}); \
         choose another one with 'pool' under [network] in config.toml, or end the other instance once none of its \
         containers runs ('dormouse --root DIR internal reset'), or, if it is gone, remove its device with \
         'ip link del'"
    )]
    PoolOfAnother {
        /// The pool.
        pool: String,
        /// The other instance's runtime directory.
        other: String,
        /// Its uplink.
        uplink: String,
    },
    /// The allocations on disk belong to another pool.
    #[error("addresses are allocated from {found}, the configuration has {wanted}; remove all containers and '{}' to change it", path.display())]
    PoolChanged {
        /// The pool on disk.
        found: String,
        /// The pool of the configuration.
        wanted: String,
        /// The file with that pool.
        path: PathBuf,
    },
    /// The requested address is not one of the pool.
    #[error("address {address} is not in the pool {pool}, or reserved")]
    NotInPool {
        /// The requested address.
        address: IpAddr,
        /// The pool.
        pool: String,
    },
    /// The requested address belongs to another container or another domain.
    #[error("address {address} belongs to {owner}")]
    AddressTaken {
        /// The requested address.
        address: IpAddr,
        /// The owner.
        owner: String,
    },
    /// No address is left.
    #[error("all addresses of {pool} are in use")]
    PoolFull {
        /// The pool.
        pool: String,
    },
    /// The requested port of the host is in use.
    #[error("port {port} of the host is in use by {owner}")]
    PortTaken {
        /// `8080/tcp`, with the address if one was given.
        port: String,
        /// The owner.
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
    /// A file of the store is damaged.
    #[error("'{}' is damaged: {message}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The damage.
        message: String,
    },
    /// No class is free.
    #[error(
        "65,533 containers of the domain have a contract for their network, and no more can: use another --domain"
    )]
    NoClass,
    /// There is no cgroup v2 hierarchy.
    #[error("no cgroup v2 hierarchy is mounted; address networking needs one")]
    NoCgroup2,
}

impl Error {
    /// The kind of the error, for decisions of callers.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::File { source, .. } => match source.raw_os_error() {
                Some(errno) => CallError::new("file", String::new(), errno).kind(),
                None => ErrorKind::Corrupt,
            },
            Self::Step(_, source) | Self::Netlink { source, .. } => source.kind(),
            Self::Bpf(e) => e.kind(),
            Self::Nft { .. } => ErrorKind::Unsupported { since: "5.6" },
            Self::Settings { .. } | Self::NotInPool { .. } => ErrorKind::Invalid,
            Self::PoolOverlaps { .. }
            | Self::PoolOfAnother { .. }
            | Self::PoolChanged { .. }
            | Self::AddressTaken { .. }
            | Self::PortTaken { .. } => ErrorKind::Busy,
            Self::PoolFull { .. } | Self::NoClass => ErrorKind::Limit,
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

    /// For rustix, with errors that are bare numbers.
    pub(crate) fn errno(
        step: &'static str,
        call: &'static str,
    ) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |e| Self::Step(step, CallError::new(call, String::new(), e.raw_os_error()))
    }
}

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;
