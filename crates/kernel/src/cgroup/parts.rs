//! The memory, the waiting time and the disk use of a container in parts, as views of its files show them.

use super::dir::{Dir, field};
use super::error::CgroupError;
use super::{Cgroup, Controllers};
use crate::error::Result as CallResult;

/// Memory of a container, in bytes, with everything below its cgroup. What the kernel does not count is 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryParts {
    /// All that is charged.
    pub bytes: u64,
    /// Swap in use.
    pub swap: u64,
    /// Page cache, with tmpfs.
    pub file: u64,
    /// Anonymous pages.
    pub anon: u64,
    /// Of the page cache, tmpfs and shared memory.
    pub shmem: u64,
    /// Of the page cache, mapped.
    pub mapped: u64,
    /// Of the page cache, to be written.
    pub dirty: u64,
    /// Of the page cache, being written.
    pub writeback: u64,
    /// Recently used anonymous pages.
    pub active_anon: u64,
    /// Other anonymous pages.
    pub inactive_anon: u64,
    /// Recently used page cache.
    pub active_file: u64,
    /// Other page cache.
    pub inactive_file: u64,
    /// Pages that cannot be reclaimed.
    pub unevictable: u64,
    /// Kernel objects that can be reclaimed.
    pub slab_reclaimable: u64,
    /// Kernel objects that cannot.
    pub slab_unreclaimable: u64,
    /// Kernel stacks.
    pub kernel_stack: u64,
    /// Page tables.
    pub page_tables: u64,
}

/// What a container has read from and written to a block device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Device {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
    /// Read from it.
    pub read_bytes: u64,
    /// Written to it. On v1 without what went through the page cache.
    pub written_bytes: u64,
    /// Requests that read.
    pub reads: u64,
    /// Requests that wrote.
    pub writes: u64,
}

impl Cgroup {
    /// Reads the parts of its memory (Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst).
    pub fn memory_parts(&self) -> Result<MemoryParts, CgroupError> {
        let read = || match (self.in_v2(Controllers::MEMORY), self.in_v1(Controllers::MEMORY)) {
            (Some(v2), _) => memory_of_v2(v2),
            (_, Some(v1)) => memory_of_v1(v1),
            _ => Ok(MemoryParts::default()),
        };
        read().map_err(CgroupError::Read)
    }

    /// The time in which at least one task waited for a CPU; 0 without pressure stall information. KERNEL(4.20)
    pub fn cpu_wait_ns(&self) -> Result<u64, CgroupError> {
        let Some(v2) = &self.v2 else { return Ok(0) };
        match v2.read("cpu.pressure") {
            Ok(text) => Ok(total_us(&text, "some ").unwrap_or(0).saturating_mul(1000)),
            // EOPNOTSUPP where the kernel has it and `psi=0`.
            Err(e) if matches!(e.errno(), libc::ENOENT | libc::EOPNOTSUPP) => Ok(0),
            Err(e) => Err(CgroupError::Read(e)),
        }
    }

    /// Reads its use of each block device.
    pub fn devices(&self) -> Result<Vec<Device>, CgroupError> {
        let read = || {
            if let Some(v2) = self.in_v2(Controllers::IO) {
                return Ok(devices_of_v2(&v2.read("io.stat")?));
            }
            let Some(v1) = self.in_v1(Controllers::IO) else { return Ok(Vec::new()) };
            // KERNEL(4.20)
            let [bytes, requests] = ["io_service_bytes", "io_serviced"]
                .map(|name| v1.read(&format!("blkio.throttle.{name}_recursive")));
            match bytes {
                Err(e) if e.errno() == libc::ENOENT => Ok(Vec::new()),
                bytes => Ok(devices_of_v1(&bytes?, &requests?)),
            }
        };
        read().map_err(CgroupError::Read)
    }
}

fn memory_of_v2(v2: &Dir) -> CallResult<MemoryParts> {
    let stat = v2.read("memory.stat")?;
    let of = |name| field(&stat, name);
    let swap = match v2.read_number("memory.swap.current") {
        Err(e) if e.errno() == libc::ENOENT => 0,
        swap => swap?.unwrap_or(0),
    };
    Ok(MemoryParts {
        bytes: v2.read_number("memory.current")?.unwrap_or(0),
        swap,
        file: of("file"),
        anon: of("anon"),
        shmem: of("shmem"),
        mapped: of("file_mapped"),
        dirty: of("file_dirty"),
        writeback: of("file_writeback"),
        active_anon: of("active_anon"),
        inactive_anon: of("inactive_anon"),
        active_file: of("active_file"),
        inactive_file: of("inactive_file"),
        unevictable: of("unevictable"),
        slab_reclaimable: of("slab_reclaimable"),
        slab_unreclaimable: of("slab_unreclaimable"),
        kernel_stack: of("kernel_stack"),
        page_tables: of("pagetables"),
    })
}

/// v1 does not divide the memory of the kernel: all of it counts as unreclaimable.
fn memory_of_v1(v1: &Dir) -> CallResult<MemoryParts> {
    let stat = v1.read("memory.stat")?;
    let of = |name: &str| field(&stat, &format!("total_{name}"));
    let kernel = match v1.read_number("memory.kmem.usage_in_bytes") {
        Err(e) if e.errno() == libc::ENOENT => 0,
        kernel => kernel?.unwrap_or(0),
    };
    Ok(MemoryParts {
        bytes: v1.read_number("memory.usage_in_bytes")?.unwrap_or(0),
        swap: of("swap"),
        file: of("cache"),
        anon: of("rss"),
        shmem: of("shmem"),
        mapped: of("mapped_file"),
        dirty: of("dirty"),
        writeback: of("writeback"),
        active_anon: of("active_anon"),
        inactive_anon: of("inactive_anon"),
        active_file: of("active_file"),
        inactive_file: of("inactive_file"),
        unevictable: of("unevictable"),
        slab_unreclaimable: kernel,
        ..MemoryParts::default()
    })
}

/// The total of a line such as `some avg10=0.00 avg60=0.00 avg300=0.00 total=1`, which begins with `kind`.
pub(super) fn total_us(text: &str, kind: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(kind))?;
    line.split(' ').find_map(|word| word.strip_prefix("total="))?.parse().ok()
}

fn number_of(device: &str) -> Option<(u32, u32)> {
    let (major, minor) = device.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// `8:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=5 dios=6` for each device.
fn devices_of_v2(text: &str) -> Vec<Device> {
    let parse = |line: &str| -> Option<Device> {
        let mut words = line.split(' ');
        let (major, minor) = number_of(words.next()?)?;
        let mut device = Device { major, minor, ..Device::default() };
        for (name, value) in words.filter_map(|word| word.split_once('=')) {
            let value = value.parse().unwrap_or(0);
            match name {
                "rbytes" => device.read_bytes = value,
                "wbytes" => device.written_bytes = value,
                "rios" => device.reads = value,
                "wios" => device.writes = value,
                _ => {}
            }
        }
        Some(device)
    };
    text.lines().filter_map(parse).collect()
}

/// `8:0 Read 1` and `8:0 Write 2` for each device, in two files.
fn devices_of_v1(bytes: &str, requests: &str) -> Vec<Device> {
    let mut devices: Vec<Device> = Vec::new();
    for (text, are_bytes) in [(bytes, true), (requests, false)] {
        for line in text.lines() {
            let mut words = line.split(' ');
            let number = words.next().and_then(number_of);
            let (Some((major, minor)), Some(kind), Some(value)) =
                (number, words.next(), words.next().and_then(|word| word.parse().ok()))
            else {
                continue;
            };
            let found = devices.iter_mut().find(|d| (d.major, d.minor) == (major, minor));
            let device = match found {
                Some(device) => device,
                None => {
                    devices.push(Device { major, minor, ..Device::default() });
                    let Some(device) = devices.last_mut() else { continue };
                    device
                }
            };
            match (kind, are_bytes) {
                ("Read", true) => device.read_bytes = value,
                ("Write", true) => device.written_bytes = value,
                ("Read", false) => device.reads = value,
                ("Write", false) => device.writes = value,
                _ => {}
            }
        }
    }
    devices
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_both_versions_are_the_same() {
        let device =
            Device { major: 8, minor: 0, read_bytes: 5, written_bytes: 7, reads: 1, writes: 2 };
        let v2 = "8:0 rbytes=5 wbytes=7 rios=1 wios=2 dbytes=9 dios=0\n";
        assert_eq!(devices_of_v2(v2), [device]);
        let bytes = "8:0 Read 5\n8:0 Write 7\n8:0 Sync 3\n8:0 Total 12\nTotal 12\n";
        assert_eq!(devices_of_v1(bytes, "8:0 Read 1\n8:0 Write 2\nTotal 3\n"), [device]);
    }

    #[test]
    fn waiting_time_is_that_of_some_or_of_all_tasks() {
        let text = "some avg10=0.00 avg60=0.02 avg300=0.00 total=4711\nfull avg10=0.00 total=9\n";
        assert_eq!((total_us(text, "some "), total_us(text, "full ")), (Some(4711), Some(9)));
        assert_eq!(total_us("", "some "), None);
    }
}
