//! Of what a checkpoint is, and where it can come back.

use serde::{Deserialize, Serialize};

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
    /// CPU features of the host, by the names of `/proc/cpuinfo`: processes may use any.
    pub cpu: Vec<String>,
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
}
