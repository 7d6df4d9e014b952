//! The host a checkpoint is made on: what its processes may have come to rely on.

use std::fs;

use dormouse_kernel::proc;

use super::Subject;
use crate::clock::{self, Offsets};
use crate::error::{Error, Result};
use crate::format::About;

/// What of a host stays as it is: looked at while everything still runs.
#[derive(Debug)]
pub(crate) struct Host(About);

impl Host {
    pub(crate) fn look() -> Result<Self> {
        let boot_id = proc::boot_id().map_err(|e| Error::Elsewhere(e.to_string()))?;
        Ok(Self(About {
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            boot_id,
            vdso: vdso_hash().unwrap_or_default(),
            cpu: cpu_features(),
            ..About::default()
        }))
    }
}

/// Of whom a checkpoint is, and what its clocks say now.
pub(crate) fn about(subject: &Subject, host: &Host) -> Result<About> {
    let offsets = Offsets::of(subject.init)?;
    let now = clock::now(offsets)?;
    Ok(About {
        container: subject.id.clone(),
        name: subject.name.clone(),
        created_unix_ms: now_unix_ms(),
        monotonic_ns: now.monotonic_ns,
        boottime_ns: now.boottime_ns,
        monotonic_offset_ns: offsets.monotonic_ns,
        boottime_offset_ns: offsets.boottime_ns,
        ..host.0.clone()
    })
}

/// The time of day, in milliseconds since the epoch.
pub(crate) fn now_unix_ms() -> i64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |d| d.as_millis() as i64)
}

/// CPU features by the names of `/proc/cpuinfo`, sorted.
pub(crate) fn cpu_features() -> Vec<String> {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("flags")?.split_once(':'));
    let mut all: Vec<String> = line
        .map(|(_, flags)| flags.split_ascii_whitespace().map(str::to_owned).collect())
        .unwrap_or_default();
    all.sort_unstable();
    all
}

/// BLAKE3 of the kernel's shared object as this very process has it mapped. `None` without one.
pub(crate) fn vdso_hash() -> Option<String> {
    use std::os::unix::fs::FileExt;
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| line.ends_with("[vdso]"))?;
    let (start, end) = line.split_ascii_whitespace().next()?.split_once('-')?;
    let start = u64::from_str_radix(start, 16).ok()?;
    let end = u64::from_str_radix(end, 16).ok()?;
    let mut bytes = vec![0; (end - start) as usize];
    fs::File::open("/proc/self/mem").ok()?.read_exact_at(&mut bytes, start).ok()?;
    Some(blake3::hash(&bytes).to_hex().to_string())
}
