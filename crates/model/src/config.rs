//! The configuration of a container: everything that is fixed when it is created.
//!
//! A [`Spec`] is chosen by the operator and the image, a [`Config`] is a created container with one. The
//! configuration is written once, as `config.json`, and read by every later verb. Fields are
//! only ever added, each with a default, so that a newer program reads an older container. The
//! parts that `update` and `rename` may change (name, limits, addresses, restart policy, sleep) are
//! rewritten as a whole.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{
    ContainerId, Evict, Eviction, IdMap, Invalid, Limits, LogDriver, Name, OutOfMemory, Reference,
    Views, WakeOn,
};

/// The configuration of one container.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Format of this record; this page describes 1.
    pub version: u32,
    /// Identity.
    pub id: ContainerId,
    /// The name given by the operator.
    pub name: Name,
    /// Seconds since the epoch.
    pub created_unix_s: i64,
    /// Its ids on the host.
    pub ids: IdMap,
    /// Its own addresses; empty with `--net host` and `--net none`.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
    /// The choices of the operator and the image.
    #[serde(flatten)]
    pub spec: Spec,
}

/// The part of a configuration that the operator and the image choose. The engine chooses the id, the
/// host ids and the addresses.
///
/// In `config.json` these fields are beside those of [`Config`], without a level of their own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// The source of its root file system.
    pub root: RootSource,
    /// Its first process.
    pub process: Process,
    /// The restrictions.
    pub security: Security,
    /// Host name inside; empty for the short id, until the container is created.
    pub hostname: String,
    /// NIS domain name inside (setdomainname(2)).
    #[serde(default)]
    pub domainname: Option<String>,
    /// Lines of its own for `/etc/hosts`.
    #[serde(default)]
    pub extra_hosts: Vec<(String, IpAddr)>,
    /// Name servers instead of the host's.
    #[serde(default)]
    pub dns: Vec<IpAddr>,
    /// Volumes made for it alone, which go when it is removed.
    #[serde(default)]
    pub anonymous_volumes: Vec<Name>,
    /// Volumes, bind mounts and tmpfs, in the order given.
    pub mounts: Vec<Mount>,
    /// The network mode.
    pub net: NetMode,
    /// Ports of the host that lead to it.
    #[serde(default)]
    pub publish: Vec<Publish>,
    /// The resource limits.
    #[serde(default)]
    pub limits: Limits,
    /// The action at the exit of its first process.
    #[serde(default)]
    pub restart: Restart,
    /// Idle time after which it falls asleep by itself.
    #[serde(default)]
    pub sleep: Sleep,
    /// Idle time after which it becomes drowsy by itself.
    #[serde(default)]
    pub drowsy: Sleep,
    /// The events that wake a sleeping or drowsy container.
    #[serde(default, skip_serializing_if = "WakeOn::is_default")]
    pub wake_on: WakeOn,
    /// The action when it has used its memory.
    #[serde(default, skip_serializing_if = "OutOfMemory::is_default")]
    pub oom: OutOfMemory,
    /// How it gives memory while the host is short of it.
    #[serde(default, skip_serializing_if = "Evict::is_default")]
    pub evict: Evict,
    /// Removed as soon as it stops.
    #[serde(default)]
    pub auto_remove: bool,
    /// The root filesystem cannot be written.
    #[serde(default)]
    pub read_only: bool,
    /// A tiny init is its first process, which reaps orphans and passes signals on.
    #[serde(default)]
    pub init: bool,
    /// It has a devpts from the start, so that its programs can open terminals. Without it, one is
    /// mounted for a terminal, an init or a systemd, and by the first exec with a terminal.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub devpts: bool,
    /// Its first process is a systemd: `/run` is memory, cgroups can be managed inside.
    #[serde(default)]
    pub systemd: bool,
    /// Bytes kept of its output, of each stream if the streams have files of their own; older
    /// output is dropped.
    #[serde(default = "default_log_max_bytes")]
    pub log_max_bytes: u64,
    /// Where its output goes.
    #[serde(default)]
    pub log_driver: LogDriver,
    /// The signal that requests its first process to exit: 15 (SIGTERM), or the one in the image.
    pub stop_signal: i32,
    /// Seconds between that signal and SIGKILL.
    pub stop_timeout_s: u32,
    /// Free-form labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Sysctls of its own namespaces (sysctl(8) names).
    #[serde(default)]
    pub sysctls: BTreeMap<String, String>,
    /// The account that its use is charged to; its own if `None`, and root with `auto_remove`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub account: Option<Name>,
    /// It works for other containers: what it does for a client is charged to the client's account.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shared: bool,
    /// Which files of procfs and sysfs show its own resources.
    #[serde(default, skip_serializing_if = "Views::is_default")]
    pub views: Views,
    /// The number of CPUs in a set that was chosen for it (`limits.cpuset_cpus`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nproc: Option<u32>,
}

impl Spec {
    /// Returns what is done with it while the host is short of memory; `None` if nothing is.
    pub fn eviction(&self) -> Option<Eviction> {
        let sleeps = self.sleep.after().is_some() || self.oom == OutOfMemory::Sleep;
        self.evict.eviction(sleeps && !self.auto_remove)
    }
}

fn yes() -> bool {
    true
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_yes(is: &bool) -> bool {
    *is
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_zero(n: &usize) -> bool {
    *n == 0
}

fn default_log_max_bytes() -> u64 {
    16 << 20
}

/// The source of a root file system.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RootSource {
    /// An image of the store, by its id, and the name it was requested by.
    Image {
        /// The name as given.
        reference: Reference,
        /// 64 hex digits.
        id: String,
    },
    /// A directory of the host (`--rootfs`), used as a read-only lower layer.
    Directory(PathBuf),
}

/// A process to be executed in a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Program and arguments; a program without a slash is looked up in the `PATH` of `env`.
    pub args: Vec<String>,
    /// How many of them are the entrypoint, in front of the command.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub entrypoint: usize,
    /// `NAME=value`.
    pub env: Vec<String>,
    /// Working directory inside, absolute.
    pub cwd: String,
    /// The user of the process.
    pub user: User,
    /// umask(2).
    pub umask: Option<u32>,
    /// Whether it gets a terminal of its own.
    #[serde(default)]
    pub terminal: bool,
    /// Its standard input stays open.
    #[serde(default)]
    pub stdin: bool,
}

/// `USER[:GROUP]` as names or numbers, resolved in the container's own `/etc/passwd`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct User(pub String);

/// The restrictions on the processes of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Security {
    /// Capabilities by name (`CAP_CHOWN`), the bounding and the permitted set (capabilities(7)).
    pub capabilities: Vec<String>,
    /// No process gains privileges by execve (prctl(2), PR_SET_NO_NEW_PRIVS).
    pub no_new_privileges: bool,
    /// The system call filter.
    pub seccomp: SeccompChoice,
    /// The filter refuses io_setup(2): the host has one number of requests for all.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_aio: bool,
    /// Unmasked `/proc` and `/sys`, all capabilities of its own user namespace, no seccomp filter.
    pub privileged: bool,
    /// Resource limits by name.
    pub rlimits: Vec<Rlimit>,
    /// oom_score_adj, -1000 to 1000 (proc(5)).
    pub oom_score_adj: Option<i32>,
}

/// The choice of a system call filter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SeccompChoice {
    /// The default allow-list.
    Default,
    /// None: the operator chose `--security-opt seccomp=unconfined`.
    Unconfined,
}

/// One resource limit (setrlimit(2)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rlimit {
    /// `nofile`, `nproc`, `core`, ...: the constant's name without `RLIMIT_`, lower case.
    pub name: String,
    /// The limit in force; `u64::MAX` is unlimited.
    pub soft: u64,
    /// The bound up to which the process may raise it.
    pub hard: u64,
}

/// A mount inside a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Absolute path inside.
    pub target: String,
    /// The kind of mount.
    pub kind: MountKind,
    /// Whether it is read-only.
    #[serde(default)]
    pub read_only: bool,
    /// Programs on it cannot be executed.
    #[serde(default)]
    pub no_exec: bool,
}

/// The kind of a mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MountKind {
    /// A file or directory of the host.
    Bind {
        /// Absolute path on the host.
        source: PathBuf,
        /// With everything mounted below it.
        recursive: bool,
        /// The mount is idmapped: file owners on the host appear as the container's ids.
        idmap: bool,
        /// Propagation of later mounts.
        propagation: Propagation,
    },
    /// A named volume, made when first used.
    Volume {
        /// Its name.
        name: Name,
        /// A new volume stays empty and is owned by the container's root. Otherwise its first use
        /// copies the files, the owner and the mode of the image's directory.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        no_copy: bool,
    },
    /// Memory.
    Tmpfs {
        /// Largest size.
        size_bytes: Option<u64>,
        /// Permissions of its root, 01777 by default.
        mode: u32,
    },
    /// A devpts of its own, at another place or in a container that was started without one.
    Devpts,
}

/// Mount propagation (mount_namespaces(7)).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Propagation {
    /// None.
    #[default]
    Private,
    /// From the host into the container.
    Slave,
    /// Both ways.
    Shared,
}

/// The network mode of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NetMode {
    /// Addresses of its own in the shared stack of a trust domain.
    Address {
        /// The trust domain.
        domain: Name,
    },
    /// The host's own stack.
    Host,
    /// A stack with nothing but a loopback.
    None,
    /// A stack of its own, with a device that leads to the stack of a trust domain.
    Private {
        /// The trust domain.
        domain: Name,
    },
}

impl NetMode {
    /// The trust domain that gives the container its addresses and its name.
    pub fn domain(&self) -> Option<&Name> {
        match self {
            Self::Address { domain } | Self::Private { domain } => Some(domain),
            Self::Host | Self::None => None,
        }
    }

    /// Whether the container has a stack, which belongs to its user namespace and ends with its processes.
    pub fn is_own(&self) -> bool {
        matches!(self, Self::None | Self::Private { .. })
    }

    /// Its name, as given to `--net`.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Address { .. } => "address",
            Self::Host => "host",
            Self::None => "none",
            Self::Private { .. } => "private",
        }
    }
}

/// A port of the host that leads to a port of the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Publish {
    /// The host's address; all of them if `None`.
    pub host_ip: Option<IpAddr>,
    /// The host's port.
    pub host_port: u16,
    /// The container's port.
    pub container_port: u16,
    /// TCP or UDP.
    pub protocol: Protocol,
}

/// A transport protocol.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP.
    #[default]
    Tcp,
    /// UDP.
    Udp,
}

impl Protocol {
    /// `tcp` or `udp`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

impl FromStr for Publish {
    type Err = Invalid;

    /// Parses `[[IP:]HOST_PORT:]CONTAINER_PORT[/tcp|/udp]`; an IPv6 address is in brackets. Without
    /// a host port the container's port is used.
    fn from_str(s: &str) -> Result<Self, Invalid> {
        let bad = || Invalid::new("port", s, "[[IP:]HOST_PORT:]CONTAINER_PORT[/tcp|/udp]");
        let port = |p: &str| p.parse::<u16>().ok().filter(|p| *p != 0).ok_or_else(bad);
        let (ports, protocol) = match s.split_once('/') {
            None | Some((_, "tcp")) => (s.strip_suffix("/tcp").unwrap_or(s), Protocol::Tcp),
            Some((ports, "udp")) => (ports, Protocol::Udp),
            Some(_) => return Err(bad()),
        };
        let Some((host, container)) = ports.rsplit_once(':') else {
            let both = port(ports)?;
            return Ok(Self { host_ip: None, host_port: both, container_port: both, protocol });
        };
        let (ip, host) = match host.rsplit_once(':') {
            None => (None, host),
            Some((ip, host)) => {
                let ip = ip.strip_prefix('[').and_then(|i| i.strip_suffix(']')).unwrap_or(ip);
                (Some(ip.parse().map_err(|_| bad())?), host)
            }
        };
        let container_port = port(container)?;
        let host_port = if host.is_empty() { container_port } else { port(host)? };
        Ok(Self { host_ip: ip, host_port, container_port, protocol })
    }
}

/// The action at the exit of the first process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Restart {
    /// Stays stopped.
    #[default]
    No,
    /// Restarted, unless an operator stopped it.
    Always,
    /// The same as `Always`.
    UnlessStopped,
    /// Restarted after a failure, at most so many times.
    OnFailure {
        /// `None` is without end.
        retries: Option<u32>,
    },
}

/// Idle time after which the daemon suspends a container, or makes it drowsy. An operator may
/// suspend a container at any time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sleep {
    /// Never.
    #[default]
    Never,
    /// After none of its tasks has run for so many milliseconds.
    AfterMs(u64),
}

impl Sleep {
    /// Returns that time.
    pub fn after(self) -> Option<Duration> {
        match self {
            Self::Never => None,
            Self::AfterMs(ms) => Some(Duration::from_millis(ms)),
        }
    }
}

impl FromStr for Restart {
    type Err = Invalid;

    fn from_str(s: &str) -> Result<Self, Invalid> {
        let bad = || {
            Invalid::new("restart policy", s, "no, always, unless-stopped or on-failure[:RETRIES]")
        };
        match s {
            "no" | "never" => Ok(Self::No),
            "always" => Ok(Self::Always),
            "unless-stopped" => Ok(Self::UnlessStopped),
            "on-failure" => Ok(Self::OnFailure { retries: None }),
            _ => {
                let retries = s.strip_prefix("on-failure:").ok_or_else(bad)?;
                Ok(Self::OnFailure { retries: Some(retries.parse().map_err(|_| bad())?) })
            }
        }
    }
}

/// A range of ids that no slot may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdRange {
    /// First id.
    pub first: u32,
    /// Number of ids.
    pub count: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A `config.json` as version 0.1 writes it, byte for byte.
    const WRITTEN: &str = concat!(
        r#"{"version":1,"id":"45bdbfd36bb0eedfe039d6610cead33b","name":"web","#,
        r#""created_unix_s":1795729366,"root":{"directory":"/srv"},"#,
        r#""ids":{"base":2022309888,"wide":false},"process":{"args":["/bin/server","-x"],"#,
        r#""env":["PATH=/usr/bin:/bin","A=b"],"cwd":"/w","user":"www:33","umask":23,"#,
        r#""terminal":false,"stdin":false},"security":{"capabilities":["CAP_CHOWN"],"#,
        r#""no_new_privileges":false,"seccomp":"default","privileged":false,"#,
        r#""rlimits":[{"name":"nofile","soft":64,"hard":128}],"oom_score_adj":100},"#,
        r#""hostname":"box","domainname":null,"extra_hosts":[["db","10.0.0.9"]],"#,
        r#""dns":["10.0.0.53"],"anonymous_volumes":[],"mounts":[{"target":"/data","#,
        r#""kind":{"volume":{"name":"data"}},"read_only":true,"no_exec":false},"#,
        r#"{"target":"/opt","kind":{"bind":{"source":"/opt","recursive":true,"idmap":true,"#,
        r#""propagation":"private"}},"read_only":false,"no_exec":false},"#,
        r#"{"target":"/scratch","kind":{"tmpfs":{"size_bytes":4096,"mode":1023}},"#,
        r#""read_only":false,"no_exec":true}],"net":{"address":{"domain":"shop"}},"#,
        r#""addresses":["10.136.0.4","fdea:cf3a:5a43::4"],"publish":[{"host_ip":"127.0.0.1","#,
        r#""host_port":8080,"container_port":80,"protocol":"udp"}],"#,
        r#""limits":{"cpu_max_milli":1500,"cpu_weight":null,"cpuset_cpus":null,"#,
        r#""memory_max_bytes":67108864,"swap_max_bytes":67108864,"pids_max":null,"#,
        r#""io_weight":null},"restart":{"on-failure":{"retries":3}},"#,
        r#""sleep":{"after_ms":90000},"drowsy":"never","auto_remove":false,"read_only":true,"#,
        r#""init":true,"systemd":false,"log_max_bytes":16777216,"stop_signal":15,"#,
        r#""stop_timeout_s":7,"labels":{"k":"v"},"sysctls":{"kernel.shm_rmid_forced":"1"}}"#,
    );

    #[test]
    fn configuration_of_earlier_version_is_read_and_keeps_its_fields() {
        let config: Config = serde_json::from_str(WRITTEN).unwrap();
        assert_eq!((config.name.as_str(), config.spec.hostname.as_str()), ("web", "box"));
        assert_eq!(
            config.addresses,
            ["10.136.0.4", "fdea:cf3a:5a43::4"].map(|ip| ip.parse::<IpAddr>().unwrap())
        );
        assert_eq!(config.spec.extra_hosts, [("db".to_owned(), "10.0.0.9".parse().unwrap())]);
        assert_eq!(config.spec.restart, Restart::OnFailure { retries: Some(3) });
        assert_eq!(config.spec.limits.memory_max_bytes, Some(64 << 20));
        // The same fields with the same values, all on one level; a later version may add some.
        let old: serde_json::Map<_, _> = serde_json::from_str(WRITTEN).unwrap();
        let new = serde_json::to_value(&config).unwrap();
        for (field, value) in &old {
            assert_eq!(new.get(field), Some(value), "{field}");
        }
        assert_eq!(serde_json::from_value::<Config>(new).unwrap(), config);
    }

    #[test]
    fn field_of_specification_has_a_default_or_is_required() {
        let old: serde_json::Map<_, _> = serde_json::from_str(WRITTEN).unwrap();
        let required = ["process", "security", "hostname", "mounts", "net", "root"];
        for field in old.keys() {
            let mut less = old.clone();
            less.remove(field);
            let read = serde_json::from_value::<Config>(less.into());
            let own =
                ["version", "id", "name", "created_unix_s", "ids", "stop_signal", "stop_timeout_s"];
            let is_required = required.contains(&field.as_str()) || own.contains(&field.as_str());
            assert_eq!(read.is_err(), is_required, "{field}");
        }
    }

    #[test]
    fn ports() {
        let p: Publish = "8080:80".parse().unwrap();
        assert_eq!((p.host_port, p.container_port, p.host_ip), (8080, 80, None));
        let p: Publish = "127.0.0.1:8080:80/udp".parse().unwrap();
        assert_eq!(p.host_ip, Some("127.0.0.1".parse().unwrap()));
        assert_eq!(p.protocol, Protocol::Udp);
        let p: Publish = "[::1]:53:5353/tcp".parse().unwrap();
        assert_eq!(p.host_ip, Some("::1".parse().unwrap()));
        for bad in ["", "0", "80:0", "x", "80/icmp", "70000", "1.2.3:80:80", "a:b:c:d", "80:"] {
            assert!(bad.parse::<Publish>().is_err(), "{bad}");
        }
    }

    #[test]
    fn sleep_is_a_word_or_a_time() {
        let text = |sleep| serde_json::to_string(&sleep).unwrap();
        assert_eq!(text(Sleep::Never), "\"never\"");
        assert_eq!(text(Sleep::AfterMs(1500)), "{\"after_ms\":1500}");
        let read: Sleep = serde_json::from_str("{\"after_ms\":1500}").unwrap();
        assert_eq!(read.after(), Some(Duration::from_millis(1500)));
        assert_eq!(Sleep::default().after(), None);
    }

    #[test]
    fn restart_policies() {
        assert_eq!("on-failure:3".parse(), Ok(Restart::OnFailure { retries: Some(3) }));
        assert!("on-failure:-1".parse::<Restart>().is_err());
        assert!("sometimes".parse::<Restart>().is_err());
    }
}
