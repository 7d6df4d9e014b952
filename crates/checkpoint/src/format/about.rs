//! Of what a checkpoint is, and where it can come back.

use serde::{Deserialize, Serialize};

use super::{Bytes, Net};

/// Of what, when, where.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// The container's id.
    pub container: String,
    /// Its name at that time.
    pub name: String,
    /// When, in milliseconds since the epoch.
    pub created_unix_ms: i64,
    /// `uname -r`.
    pub kernel: String,
    /// The boot it was made in.
    pub boot_id: String,
    /// BLAKE3 of the kernel's shared object, which programs have mapped.
    pub vdso: String,
    /// That object, which processes keep under another kernel.
    #[serde(default)]
    pub vdso_image: Bytes,
    /// Features of the CPU that its processes may use, by the names of `/proc/cpuinfo`.
    pub cpu: Vec<String>,
    /// The parts of the extended state that they may have, beyond x87 and SSE.
    #[serde(default)]
    pub cpu_state: Vec<StatePart>,
    /// CLOCK_MONOTONIC of the container, in nanoseconds.
    pub monotonic_ns: i64,
    /// The same for CLOCK_BOOTTIME.
    pub boottime_ns: i64,
    /// What of that its time namespace has added to the host's, in nanoseconds.
    #[serde(default)]
    pub monotonic_offset_ns: i64,
    /// The same for CLOCK_BOOTTIME.
    #[serde(default)]
    pub boottime_offset_ns: i64,
    /// What was set up in the container's own network stack, where it has one to itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Net>,
}

/// A part of the extended registers, as XSAVE writes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatePart {
    /// Its bit in XCR0.
    pub number: u32,
    /// Where it is.
    pub offset: u32,
    /// Its length.
    pub bytes: u32,
}
