//! Objects with the fields and names of podman and docker, for scripts that were written for these.
//!
//! Fields that podman 4, podman 5 and docker write differently are as in docker. States are podman's
//! words: an asleep or drowsy container is `running`, because a typed client knows no other word for a
//! container that answers. The object `Dormouse` has its own state, the sleep policy and the checkpoints.

use std::collections::BTreeMap;

use serde::Serialize;

/// The time of an event that has not happened, as Go prints it.
pub const NEVER: &str = "0001-01-01T00:00:00Z";

/// A container in `inspect`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct Container {
    /// Identity: 32 hex digits.
    pub id: String,
    /// Time of creation (RFC 3339).
    pub created: String,
    /// The program.
    pub path: String,
    /// Its arguments.
    pub args: Vec<String>,
    /// Its state.
    pub state: State,
    /// The image's id; empty with `--rootfs`.
    pub image: String,
    /// The digest of the manifest that the image was pulled with.
    pub image_digest: String,
    /// The image's name.
    pub image_name: String,
    /// The directory of `--rootfs`.
    pub rootfs: String,
    /// Name given by the operator.
    pub name: String,
    /// Starts after failures, without a success in between.
    pub restart_count: u32,
    /// `overlay`.
    pub driver: &'static str,
    /// Capabilities of its first process.
    pub effective_caps: Vec<String>,
    /// The most that a process of it can get.
    pub bounding_caps: Vec<String>,
    /// Its writable layer.
    pub graph_driver: GraphDriver,
    /// File of its output.
    pub log_path: String,
    /// Mounts given by the operator and the image.
    pub mounts: Vec<Mount>,
    /// Its addresses.
    pub network_settings: NetworkSettings,
    /// The part of its configuration that describes the process.
    pub config: ContainerConfig,
    /// The part of its configuration that describes limits and rights.
    pub host_config: HostConfig,
    /// Facts that other engines do not have.
    pub dormouse: Dormouse,
}

/// The state of a container.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct State {
    /// `created`, `running`, `paused` or `exited`.
    pub status: &'static str,
    /// It lives, also while it is paused.
    pub running: bool,
    /// An operator has frozen it.
    pub paused: bool,
    /// Always false: a restart is part of the exit.
    pub restarting: bool,
    /// The kernel's OOM killer ended a process of its last run.
    #[serde(rename = "OOMKilled")]
    pub oom_killed: bool,
    /// Always false.
    pub dead: bool,
    /// The host's pid of its first process; 0 without one.
    pub pid: u32,
    /// Last exit code; 0 while it lives.
    pub exit_code: i32,
    /// Always empty.
    pub error: &'static str,
    /// Time of the last start.
    pub started_at: String,
    /// Time of the last exit.
    pub finished_at: String,
    /// Always empty: there are no health checks.
    pub health: Health,
}

/// The result of health checks.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct Health {
    /// Always empty.
    pub status: &'static str,
    /// Always 0.
    pub failing_streak: u32,
}

/// The writable layer of a container.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct GraphDriver {
    /// `overlay`.
    pub name: &'static str,
    /// Directories of the layer.
    pub data: BTreeMap<&'static str, String>,
}

/// A mount.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct Mount {
    /// `bind`, `volume`, `tmpfs` or `devpts`.
    pub r#type: &'static str,
    /// Name of the volume; empty for others.
    pub name: String,
    /// Path on the host.
    pub source: String,
    /// Path inside.
    pub destination: String,
    /// `local` for a volume.
    pub driver: &'static str,
    /// Always empty.
    pub mode: &'static str,
    /// Options in the words of mount(8).
    pub options: Vec<&'static str>,
    /// It can be written.
    #[serde(rename = "RW")]
    pub rw: bool,
    /// Propagation of later mounts.
    pub propagation: &'static str,
}

/// The addresses of a container.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct NetworkSettings {
    /// Always empty: containers have no interface.
    pub gateway: &'static str,
    /// First IPv4 address.
    #[serde(rename = "IPAddress")]
    pub ip_address: String,
    /// Length of its network's prefix.
    #[serde(rename = "IPPrefixLen")]
    pub ip_prefix_len: u8,
    /// First IPv6 address.
    #[serde(rename = "GlobalIPv6Address")]
    pub global_ipv6_address: String,
    /// Length of its network's prefix.
    #[serde(rename = "GlobalIPv6PrefixLen")]
    pub global_ipv6_prefix_len: u8,
    /// Always empty.
    pub mac_address: &'static str,
    /// Published ports: `80/tcp` and the host's addresses.
    pub ports: BTreeMap<String, Vec<PortBinding>>,
    /// The trust domain with the same addresses.
    pub networks: BTreeMap<String, Network>,
}

/// A network of a container.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct Network {
    /// Name of the trust domain.
    #[serde(rename = "NetworkID")]
    pub network_id: String,
    /// First IPv4 address.
    #[serde(rename = "IPAddress")]
    pub ip_address: String,
    /// Length of its network's prefix.
    #[serde(rename = "IPPrefixLen")]
    pub ip_prefix_len: u8,
    /// First IPv6 address.
    #[serde(rename = "GlobalIPv6Address")]
    pub global_ipv6_address: String,
    /// Names by which others find it.
    pub aliases: Vec<String>,
}

/// An address of the host that leads to a port.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct PortBinding {
    /// The host's address; empty for all.
    pub host_ip: String,
    /// The host's port.
    pub host_port: String,
}

/// The process of a container.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct ContainerConfig {
    /// Host name inside.
    pub hostname: String,
    /// NIS domain name inside.
    pub domainname: String,
    /// User, by name or number.
    pub user: String,
    /// It has a terminal.
    pub tty: bool,
    /// Its standard input stays open.
    pub open_stdin: bool,
    /// `NAME=value`.
    pub env: Vec<String>,
    /// The command behind the entrypoint.
    pub cmd: Vec<String>,
    /// The image's name.
    pub image: String,
    /// Working directory.
    pub working_dir: String,
    /// The program in front of the command.
    pub entrypoint: Vec<String>,
    /// Free-form labels.
    pub labels: BTreeMap<String, String>,
    /// Always empty.
    pub annotations: BTreeMap<String, String>,
    /// The signal that stops it, by name.
    pub stop_signal: String,
    /// Seconds until a stop becomes a kill.
    pub stop_timeout: u32,
    /// umask(2), octal.
    pub umask: String,
}

/// Limits and rights of a container.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct HostConfig {
    /// `SOURCE:TARGET:OPTIONS` of bind mounts and volumes.
    pub binds: Vec<String>,
    /// Where its output goes.
    pub log_config: LogConfig,
    /// `address`, `host` or `none`.
    pub network_mode: &'static str,
    /// Published ports.
    pub port_bindings: BTreeMap<String, Vec<PortBinding>>,
    /// The action at its exit.
    pub restart_policy: RestartPolicy,
    /// It is removed at its exit.
    pub auto_remove: bool,
    /// Capabilities beyond the default.
    pub cap_add: Vec<String>,
    /// Capabilities of the default that it lacks.
    pub cap_drop: Vec<String>,
    /// Name servers instead of the host's.
    pub dns: Vec<String>,
    /// `NAME:ADDRESS` in its /etc/hosts.
    pub extra_hosts: Vec<String>,
    /// `private`.
    pub ipc_mode: &'static str,
    /// `private`.
    pub pid_mode: &'static str,
    /// `private`.
    #[serde(rename = "UTSMode")]
    pub uts_mode: &'static str,
    /// `private`.
    pub userns_mode: &'static str,
    /// Preference of the OOM killer.
    pub oom_score_adj: i32,
    /// All capabilities of its own user namespace, and no filter.
    pub privileged: bool,
    /// Its root cannot be written.
    pub readonly_rootfs: bool,
    /// `seccomp=unconfined`, `no-new-privileges`.
    pub security_opt: Vec<&'static str>,
    /// Mounts of memory, with their options.
    pub tmpfs: BTreeMap<String, String>,
    /// A tiny init is its first process.
    pub init: bool,
    /// Sysctls of its namespaces.
    pub sysctls: BTreeMap<String, String>,
    /// Always 0: see `CpuWeight`.
    pub cpu_shares: u64,
    /// Share of contended processor time, 1 to 10,000; 0 is the default.
    pub cpu_weight: u32,
    /// Processors, in billionths; 0 is no limit.
    pub nano_cpus: u64,
    /// Microseconds in which `CpuQuota` may be used; 0 without a limit.
    pub cpu_period: u64,
    /// Microseconds of processor time; 0 without a limit.
    pub cpu_quota: i64,
    /// Processors it may run on.
    pub cpuset_cpus: String,
    /// Memory in bytes; 0 is no limit.
    pub memory: u64,
    /// Memory and swap in bytes; 0 is no limit.
    pub memory_swap: u64,
    /// Tasks; 0 is no limit.
    pub pids_limit: u32,
    /// Share of contended disk time; 0 is the default.
    pub blkio_weight: u32,
    /// The most bytes read per second.
    pub blkio_device_read_bps: Vec<DeviceRate>,
    /// The most bytes written per second.
    pub blkio_device_write_bps: Vec<DeviceRate>,
    /// The most requests per second that read.
    pub blkio_device_read_i_ops: Vec<DeviceRate>,
    /// The most requests per second that write.
    pub blkio_device_write_i_ops: Vec<DeviceRate>,
    /// `size` and `inodes` of its disk; empty without one of its own.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub storage_opt: BTreeMap<&'static str, String>,
    /// Resource limits of its processes.
    pub ulimits: Vec<Ulimit>,
}

/// The most on one disk.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct DeviceRate {
    /// The device; empty for the disk with the container's storage.
    pub path: String,
    /// Bytes or requests per second.
    pub rate: u64,
}

/// Where the output of a container goes.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct LogConfig {
    /// The log driver.
    pub r#type: String,
    /// Always empty.
    pub config: BTreeMap<String, String>,
    /// The file.
    pub path: String,
    /// Bytes kept.
    pub size: String,
}

/// The action at the exit of the first process.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct RestartPolicy {
    /// `no`, `always`, `unless-stopped` or `on-failure`.
    pub name: &'static str,
    /// Restarts after a failure; 0 is without end.
    pub maximum_retry_count: u32,
}

/// A resource limit.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct Ulimit {
    /// `RLIMIT_NOFILE`.
    pub name: String,
    /// The limit in force; -1 is unlimited.
    pub soft: i64,
    /// The bound up to which a process may raise it.
    pub hard: i64,
}

/// Facts that other engines do not have.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct Dormouse {
    /// `created`, `running`, `paused`, `drowsy`, `asleep` or `stopped`.
    pub state: &'static str,
    /// Since when it is drowsy or asleep; empty in other states.
    pub asleep_since: String,
    /// Milliseconds without work after which it falls asleep; 0 is never.
    pub sleep_after_ms: u64,
    /// The same for drowsy.
    pub drowsy_after_ms: u64,
    /// The events that wake it, as `--wake-on` takes them.
    pub wake_on: String,
    /// The action when it has used its memory: `kill` or `sleep`.
    pub out_of_memory: &'static str,
    /// How it gives memory while the host is short of it, as `--evict` takes it.
    pub evict: &'static str,
    /// Its checkpoints, oldest first.
    pub checkpoints: Vec<Checkpoint>,
    /// Its trust domain; empty with `--net host` and `--net none`.
    pub domain: String,
    /// All of its addresses.
    pub addresses: Vec<String>,
    /// Its host ids, as in /proc/PID/uid_map.
    pub host_ids: Vec<String>,
    /// Its first process is a systemd.
    pub systemd: bool,
    /// The most sockets of IPv4 and IPv6; 0 if there is no limit.
    pub sockets_limit: u32,
    /// Its sockets, counted if it has a limit.
    pub sockets: u64,
}

/// A checkpoint of a container.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct Checkpoint {
    /// Its number.
    pub number: u32,
    /// When it was made; empty if it is damaged.
    pub created: String,
    /// Number of processes.
    pub processes: usize,
    /// Bytes on disk.
    pub size: u64,
}

/// An image in `inspect`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct Image {
    /// 64 hex digits.
    pub id: String,
    /// Digest of the manifest it was pulled with.
    pub digest: String,
    /// Its names.
    pub repo_tags: Vec<String>,
    /// Its names with the digest.
    pub repo_digests: Vec<String>,
    /// Always empty.
    pub parent: &'static str,
    /// The comment of its last step.
    pub comment: String,
    /// Time of creation.
    pub created: String,
    /// The defaults of its containers.
    pub config: ImageConfig,
    /// Its author.
    pub author: String,
    /// The machine, in Go's words.
    pub architecture: String,
    /// `linux`.
    pub os: String,
    /// Bytes of its files.
    pub size: u64,
    /// The same.
    pub virtual_size: u64,
    /// Its layers.
    #[serde(rename = "RootFS")]
    pub root_fs: RootFs,
    /// Free-form labels.
    pub labels: BTreeMap<String, String>,
    /// The default user.
    pub user: String,
    /// The steps that made it.
    pub history: serde_json::Value,
}

/// The defaults of an image's containers.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct ImageConfig {
    /// User, by name or number.
    pub user: String,
    /// `NAME=value`.
    pub env: Vec<String>,
    /// The program in front of the command.
    pub entrypoint: Vec<String>,
    /// The command.
    pub cmd: Vec<String>,
    /// Volumes that it declares.
    pub volumes: BTreeMap<String, BTreeMap<String, String>>,
    /// Ports that it declares.
    pub exposed_ports: BTreeMap<String, BTreeMap<String, String>>,
    /// Working directory.
    pub working_dir: String,
    /// Free-form labels.
    pub labels: BTreeMap<String, String>,
    /// The signal that stops it.
    pub stop_signal: String,
}

/// The layers of an image.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct RootFs {
    /// `layers`.
    pub r#type: &'static str,
    /// Digests of the uncompressed layers, lowest first.
    pub layers: Vec<String>,
}

/// A container in `ps --format json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct ListedContainer {
    /// Program and arguments.
    pub command: Vec<String>,
    /// Seconds since the epoch.
    pub created: i64,
    /// The same as a text.
    pub created_at: String,
    /// It has ended.
    pub exited: bool,
    /// Seconds since the epoch; 0 without an exit.
    pub exited_at: i64,
    /// Last exit code.
    pub exit_code: i32,
    /// Identity.
    pub id: String,
    /// The image's name.
    pub image: String,
    /// The image's id.
    #[serde(rename = "ImageID")]
    pub image_id: String,
    /// Free-form labels.
    pub labels: BTreeMap<String, String>,
    /// Its name.
    pub names: Vec<String>,
    /// Its trust domain.
    pub networks: Vec<String>,
    /// The host's pid of its first process; 0 without one.
    pub pid: u32,
    /// Published ports.
    pub ports: Vec<ListedPort>,
    /// Seconds since the epoch; 0 if it was never started.
    pub started_at: i64,
    /// `created`, `running`, `paused` or `exited`.
    pub state: &'static str,
    /// `Up 3 minutes`, `Asleep 2 hours`.
    pub status: String,
}

/// A published port in `ps --format json`, in podman's names.
#[derive(Debug, Serialize)]
pub struct ListedPort {
    /// The host's address; empty for all.
    pub host_ip: String,
    /// The container's port.
    pub container_port: u16,
    /// The host's port.
    pub host_port: u16,
    /// Always 1.
    pub range: u16,
    /// `tcp` or `udp`.
    pub protocol: &'static str,
}

/// An image in `images --format json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct ListedImage {
    /// 64 hex digits.
    pub id: String,
    /// Its names.
    pub names: Vec<String>,
    /// Digest of the manifest it was pulled with.
    pub digest: String,
    /// Bytes of its files.
    pub size: u64,
    /// Containers that are made from it.
    pub containers: usize,
    /// Free-form labels.
    pub labels: BTreeMap<String, String>,
    /// Time of creation.
    pub created_at: String,
}

/// A volume in `volume inspect` and `volume ls --format json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct Volume {
    /// Its name.
    pub name: String,
    /// `local`.
    pub driver: &'static str,
    /// Its directory on the host.
    pub mountpoint: String,
    /// Time of creation.
    pub created_at: String,
    /// Free-form labels.
    pub labels: BTreeMap<String, String>,
    /// `local`.
    pub scope: &'static str,
    /// Always empty.
    pub options: BTreeMap<String, String>,
    /// Containers that mount it, by name.
    pub used_by: Vec<String>,
    /// The first container copies the image's files at its mount point into it.
    pub needs_copy_up: bool,
}
