//! The origin of a checkpoint, and the conditions of its restore.

use serde::{Deserialize, Serialize};

use crate::{Bytes, Net};

/// LIMIT: bytes of a vDSO; present ones have two pages.
pub const VDSO_BYTES_MAX: u64 = 64 << 10;

/// BLAKE3 of a vDSO, as [`About::vdso`] holds it.
pub fn vdso_hash(image: &[u8]) -> String {
    blake3::hash(image).to_hex().to_string()
}

/// The container, the time, and the host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// The container's id.
    pub container: String,
    /// Its name at that time.
    pub name: String,
    /// The time of the checkpoint, in milliseconds since the epoch.
    pub created_unix_ms: i64,
    /// `uname -r`.
    pub kernel: String,
    /// The id of the boot.
    pub boot_id: String,
    /// BLAKE3 of the kernel's shared object (vdso), which programs have mapped.
    pub vdso: String,
    /// The image of the vdso, which processes keep under another kernel.
    #[serde(default)]
    pub vdso_image: Bytes,
    /// Features of the CPU that its processes may use, by the names of `/proc/cpuinfo`.
    pub cpu: Vec<String>,
    /// The parts of the extended state that its processes may have, beyond x87 and SSE.
    #[serde(default)]
    pub cpu_state: Vec<StatePart>,
    /// CLOCK_MONOTONIC of the container, in nanoseconds.
    pub monotonic_ns: i64,
    /// The same for CLOCK_BOOTTIME.
    pub boottime_ns: i64,
    /// The part of it that the container's time namespace has added to the host's clock, in
    /// nanoseconds.
    #[serde(default)]
    pub monotonic_offset_ns: i64,
    /// The same for CLOCK_BOOTTIME.
    #[serde(default)]
    pub boottime_offset_ns: i64,
    /// The host name, if processes have set another one than that of the configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// The NIS domain name, if processes have set another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domainname: Option<String>,
    /// Limits of the container's own IPC namespace that differ from those of a new one: the name below
    /// `/proc/sys` ([`crate::IPC_LIMITS`]), and the text of the file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ipc_limits: Vec<(String, String)>,
    /// Configuration of the container's own network stack, if it has a private one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Net>,
}

/// A part of the extended registers, as XSAVE writes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatePart {
    /// Its bit in XCR0.
    pub number: u32,
    /// Its offset in the XSAVE area.
    pub offset: u32,
    /// Its length.
    pub bytes: u32,
}
