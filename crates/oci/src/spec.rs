//! `config.json` of the runtime-spec 1.2, the part that concerns Linux.
//!
//! Unknown fields are ignored, as the specification requires. A field of the wrong type is an error
//! that names it ([`read`]); rules beyond the types are checked where a field is used.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The version of the specification that this implements.
pub const OCI_VERSION: &str = "1.2.1";

/// LIMIT: longest configuration. The kernel takes 6 MiB of arguments and environment at most.
const LARGEST_BYTES: u64 = 16 << 20;

/// Reads a JSON file; an error names the field.
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let failed = |why: String| Error::Config { path: path.to_owned(), why };
    let open = || {
        let file = std::fs::File::open(path)?;
        let meta = file.metadata()?;
        Ok((file, meta))
    };
    let (file, meta): (_, std::fs::Metadata) =
        open().map_err(|e: std::io::Error| failed(e.to_string()))?;
    // `--process <(...)` gives a pipe; a directory is no configuration.
    if meta.len() > LARGEST_BYTES || meta.is_dir() {
        return Err(failed(format!("it is not a file of at most {LARGEST_BYTES} bytes")));
    }
    let mut text = Vec::new();
    std::io::Read::read_to_end(&mut std::io::Read::take(file, LARGEST_BYTES), &mut text)
        .map_err(|e| failed(e.to_string()))?;
    parse(&text).map_err(failed)
}

/// Reads JSON; the error names the field. A `null` field counts as missing, as Go programs mean it.
pub fn parse<T: DeserializeOwned>(text: &[u8]) -> std::result::Result<T, String> {
    let first = parse_strictly(text);
    if first.as_ref().is_err_and(|why| why.contains("type: null")) {
        let mut value = parse_strictly::<serde_json::Value>(text)?;
        drop_nulls(&mut value);
        let text = serde_json::to_vec(&value).map_err(|e| e.to_string())?;
        return parse_strictly(&text);
    }
    first
}

fn drop_nulls(value: &mut serde_json::Value) {
    match value {
        serde_json::Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(drop_nulls);
        }
        serde_json::Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

fn parse_strictly<T: DeserializeOwned>(text: &[u8]) -> std::result::Result<T, String> {
    let mut json = serde_json::Deserializer::from_slice(text);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|e| {
        let path = e.path().to_string();
        match path.as_str() {
            "." => e.inner().to_string(),
            _ => format!("{path}: {}", e.inner()),
        }
    })?;
    json.end().map_err(|e| e.to_string())?;
    Ok(value)
}

/// A whole configuration.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Spec {
    pub oci_version: String,
    pub root: Option<Root>,
    pub hostname: Option<String>,
    pub domainname: Option<String>,
    pub mounts: Vec<Mount>,
    pub process: Option<Process>,
    pub hooks: Hooks,
    pub linux: Option<Linux>,
    pub annotations: BTreeMap<String, String>,
    /// For other systems: refused.
    pub vm: Option<serde_json::Value>,
    pub solaris: Option<serde_json::Value>,
    pub windows: Option<serde_json::Value>,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Root {
    pub path: String,
    pub readonly: bool,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Mount {
    pub destination: String,
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub source: Option<String>,
    pub options: Vec<String>,
    pub uid_mappings: Vec<IdMapping>,
    pub gid_mappings: Vec<IdMapping>,
}

#[derive(Debug, Clone, Copy, Default, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct IdMapping {
    #[serde(rename = "containerID")]
    pub container_id: u32,
    #[serde(rename = "hostID")]
    pub host_id: u32,
    pub size: u32,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Process {
    pub terminal: bool,
    pub console_size: Option<ConsoleSize>,
    pub user: User,
    pub args: Vec<String>,
    pub env: Vec<String>,
    pub cwd: String,
    pub capabilities: Option<Capabilities>,
    pub rlimits: Vec<Rlimit>,
    pub no_new_privileges: bool,
    pub apparmor_profile: Option<String>,
    pub oom_score_adj: Option<i32>,
    pub scheduler: Option<Scheduler>,
    pub selinux_label: Option<String>,
    pub io_priority: Option<IoPriority>,
    #[serde(rename = "execCPUAffinity")]
    pub exec_cpu_affinity: Option<CpuAffinity>,
}

/// Lists of CPUs, as in `0-3,7`.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct CpuAffinity {
    pub initial: String,
    #[serde(rename = "final")]
    pub last: String,
}

#[derive(Debug, Clone, Copy, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct ConsoleSize {
    pub height: u16,
    pub width: u16,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    pub umask: Option<u32>,
    pub additional_gids: Vec<u32>,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Capabilities {
    pub bounding: Vec<String>,
    pub effective: Vec<String>,
    pub inheritable: Vec<String>,
    pub permitted: Vec<String>,
    pub ambient: Vec<String>,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
pub struct Rlimit {
    #[serde(rename = "type")]
    pub kind: String,
    pub soft: u64,
    pub hard: u64,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Scheduler {
    pub policy: String,
    pub nice: i32,
    pub priority: i32,
    pub flags: Vec<String>,
    pub runtime: u64,
    pub deadline: u64,
    pub period: u64,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct IoPriority {
    pub class: String,
    pub priority: i32,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Hooks {
    pub prestart: Vec<Hook>,
    pub create_runtime: Vec<Hook>,
    pub create_container: Vec<Hook>,
    pub start_container: Vec<Hook>,
    pub poststart: Vec<Hook>,
    pub poststop: Vec<Hook>,
}

impl Hooks {
    /// Returns whether there is no hook.
    pub fn is_empty(&self) -> bool {
        let Self {
            prestart,
            create_runtime,
            create_container,
            start_container,
            poststart,
            poststop,
        } = self;
        let all =
            [prestart, create_runtime, create_container, start_container, poststart, poststop];
        all.into_iter().all(Vec::is_empty)
    }
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Hook {
    pub path: String,
    pub args: Vec<String>,
    /// Not the same as an empty list where the hook is `startContainer`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env: Option<Vec<String>>,
    pub timeout: Option<i64>,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Linux {
    pub namespaces: Vec<Namespace>,
    pub uid_mappings: Vec<IdMapping>,
    pub gid_mappings: Vec<IdMapping>,
    pub time_offsets: BTreeMap<String, TimeOffset>,
    pub devices: Vec<Device>,
    pub cgroups_path: Option<String>,
    pub rootfs_propagation: Option<String>,
    pub resources: Option<Resources>,
    pub seccomp: Option<Seccomp>,
    pub sysctl: BTreeMap<String, String>,
    pub masked_paths: Vec<String>,
    pub readonly_paths: Vec<String>,
    pub mount_label: Option<String>,
    pub intel_rdt: Option<serde_json::Value>,
    /// Refused unless empty.
    pub net_devices: BTreeMap<String, serde_json::Value>,
    pub memory_policy: Option<MemoryPolicy>,
    pub personality: Option<Personality>,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
pub struct Namespace {
    #[serde(rename = "type")]
    pub kind: String,
    #[serde(default)]
    pub path: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct TimeOffset {
    pub secs: i64,
    pub nanosecs: u32,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Device {
    #[serde(rename = "type")]
    pub kind: String,
    pub path: String,
    pub major: i64,
    pub minor: i64,
    pub file_mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct MemoryPolicy {
    pub mode: String,
    pub nodes: String,
    pub flags: Vec<String>,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Personality {
    pub domain: String,
    pub flags: Vec<String>,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Resources {
    pub devices: Vec<DeviceRule>,
    pub memory: Option<Memory>,
    pub cpu: Option<Cpu>,
    pub pids: Option<Pids>,
    #[serde(rename = "blockIO")]
    pub block_io: Option<BlockIo>,
    pub hugepage_limits: Vec<HugepageLimit>,
    pub network: Option<Network>,
    pub rdma: BTreeMap<String, Rdma>,
    pub unified: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct DeviceRule {
    pub allow: bool,
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub major: Option<i64>,
    pub minor: Option<i64>,
    pub access: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Memory {
    pub limit: Option<i64>,
    pub reservation: Option<i64>,
    pub swap: Option<i64>,
    pub kernel: Option<i64>,
    #[serde(rename = "kernelTCP")]
    pub kernel_tcp: Option<i64>,
    pub swappiness: Option<u64>,
    #[serde(rename = "disableOOMKiller")]
    pub disable_oom_killer: Option<bool>,
    pub use_hierarchy: Option<bool>,
    pub check_before_update: Option<bool>,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Cpu {
    pub shares: Option<u64>,
    pub quota: Option<i64>,
    pub burst: Option<u64>,
    pub period: Option<u64>,
    pub realtime_runtime: Option<i64>,
    pub realtime_period: Option<u64>,
    pub cpus: Option<String>,
    pub mems: Option<String>,
    pub idle: Option<i64>,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Pids {
    pub limit: Option<i64>,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BlockIo {
    pub weight: Option<u16>,
    pub leaf_weight: Option<u16>,
    pub weight_device: Vec<WeightDevice>,
    pub throttle_read_bps_device: Vec<ThrottleDevice>,
    pub throttle_write_bps_device: Vec<ThrottleDevice>,
    #[serde(rename = "throttleReadIOPSDevice")]
    pub throttle_read_iops_device: Vec<ThrottleDevice>,
    #[serde(rename = "throttleWriteIOPSDevice")]
    pub throttle_write_iops_device: Vec<ThrottleDevice>,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WeightDevice {
    pub major: i64,
    pub minor: i64,
    pub weight: Option<u16>,
    pub leaf_weight: Option<u16>,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct ThrottleDevice {
    pub major: i64,
    pub minor: i64,
    pub rate: u64,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HugepageLimit {
    pub page_size: String,
    pub limit: u64,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Network {
    #[serde(rename = "classID")]
    pub class_id: Option<u32>,
    pub priorities: Vec<InterfacePriority>,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct InterfacePriority {
    pub name: String,
    pub priority: u32,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Rdma {
    pub hca_handles: Option<u32>,
    pub hca_objects: Option<u32>,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Seccomp {
    pub default_action: String,
    pub default_errno_ret: Option<u32>,
    pub architectures: Vec<String>,
    /// Not the same as an empty list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flags: Option<Vec<String>>,
    pub listener_path: Option<PathBuf>,
    pub listener_metadata: Option<String>,
    pub syscalls: Vec<Syscall>,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Syscall {
    pub names: Vec<String>,
    pub action: String,
    pub errno_ret: Option<u32>,
    pub args: Vec<Argument>,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Argument {
    pub index: u32,
    pub value: u64,
    pub value_two: u64,
    pub op: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_type_is_refused_with_its_field() {
        let error = |text: &str| parse::<Spec>(text.as_bytes()).expect_err("it is bad");
        let text = r#"{"linux": {"resources": {"memory": {"limit": "a lot"}}}}"#;
        assert!(error(text).starts_with("linux.resources.memory.limit: "), "{}", error(text));
        let text = r#"{"mounts": [{"destination": "/a"}, {"destination": 7}]}"#;
        assert!(error(text).starts_with("mounts[1].destination: "), "{}", error(text));
        let text = r#"{"linux": {"uidMappings": [{"hostID": 4294967296}]}}"#;
        assert!(error(text).starts_with("linux.uidMappings[0].hostID: "), "{}", error(text));
        assert!(error("{} {}").contains("trailing"));
        assert!(parse::<Spec>(br#"{"mounts": null, "linux": {"namespaces": null}}"#).is_ok());
    }

    #[test]
    fn unread_field_survives_round_trip() {
        let spec: Spec = parse(br#"{"vm":2650000e-061}"#).unwrap();
        let written = serde_json::to_vec(&spec).unwrap();
        let again: Spec = parse(&written).unwrap();
        assert_eq!(serde_json::to_vec(&again).unwrap(), written);
    }

    #[test]
    fn deeply_nested_document_is_refused() {
        let text = format!("{{\"vm\": {}{}}}", "[".repeat(200_000), "]".repeat(200_000));
        assert!(parse::<Spec>(text.as_bytes()).is_err());
    }
}
