//! Limits as what is written into which file: pure, so that everything that can be refused is
//! refused before anything is made.
//!
//! Limits are in v2's units; for v1's files they are converted as the kernel does:
//!
//! | limit | v2 | v1 |
//! |---|---|---|
//! | CPU time | `cpu.max` "quota period" | `cpu.cfs_period_us`, `cpu.cfs_quota_us` |
//! | CPU burst | `cpu.max.burst` | `cpu.cfs_burst_us` |
//! | CPU weight | `cpu.weight` | `cpu.shares` = weight x 1024 / 100 (`cpu_weight_write_u64()`) |
//! | CPU weight 0, idle | `cpu.idle` | the same; the kernel refuses a weight meanwhile |
//! | CPUs | `cpuset.cpus` | the same, and `cpuset.mems`, which is empty in a new cgroup |
//! | memory | `memory.max` | `memory.limit_in_bytes` |
//! | guaranteed memory | `memory.min` | limits of the other containers ([`super::guarantee`]) |
//! | memory reclaimed last | `memory.low` | `memory.soft_limit_in_bytes` |
//! | memory before it is slowed down | `memory.high` | none |
//! | swap | `memory.swap.max` | `memory.memsw.limit_in_bytes`, which counts memory *and* swap |
//! | tasks | `pids.max` | the same |
//! | disk weight | `io.weight`, `io.bfq.weight` | `blkio.bfq.weight`, `blkio.weight` |
//! | disk rates | `io.max` ([`super::disk`]) | `blkio.throttle.*_device` |
//!
//! A CPU reservation is not translated here. It becomes a weight that depends on the other containers
//! ([`super::share`]), so the weight of such a container is left to the caller.

use dormouse_model::{Cpu, Invalid, Limits, Memory};

use super::controller::Controllers;
use super::error::CgroupError;
use crate::proc::cpu_runs;

/// LIMIT: under this the first process is killed before its first instruction (page tables, kernel
/// stacks and the program itself count).
const MEMORY_LEAST_BYTES: u64 = 1 << 20;
/// Whether a cgroup runs only while CPUs are idle.
const IDLE: &str = "cpu.idle";
/// The value that v1 shows for no limit: the largest count of pages, in bytes.
pub(super) const V1_UNLIMITED_BYTES: u64 = (i64::MAX as u64) & !4095;

/// One write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) controller: Controllers,
    /// The limit it comes from, for messages.
    pub(super) limit: &'static str,
    pub(super) file: &'static str,
    pub(super) value: String,
}

/// The interface of a controller on a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    V1,
    V2,
}

/// The facts about a host that are needed to translate limits.
pub(super) trait Host {
    /// Returns the version of a controller; `None` if the host lacks it.
    fn version(&self, controller: Controllers) -> Option<Version>;
    /// Returns whether its cgroups have this file.
    fn has(&self, controller: Controllers, file: &str) -> bool;
    /// Why the host lacks it.
    fn why_missing(&self, controller: Controllers) -> String;
    /// The CPUs that are online, in the kernel's list format.
    fn cpus(&self) -> Result<String, CgroupError>;
    /// The memory nodes that a v1 CPU set is to use.
    fn mems(&self) -> Result<String, CgroupError>;
}

/// The present limits of a v1 cgroup, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct MemoryV1 {
    pub(super) limit: u64,
    /// Memory and swap together.
    pub(super) memsw: u64,
}

impl MemoryV1 {
    /// A new cgroup's.
    pub(super) const UNLIMITED: Self =
        Self { limit: V1_UNLIMITED_BYTES, memsw: V1_UNLIMITED_BYTES };
}

/// Everything to be written for `limits`, in order; `now` is what holds at present.
pub(super) fn plan(
    limits: &Limits,
    host: &impl Host,
    now: MemoryV1,
) -> Result<Vec<Setting>, CgroupError> {
    let mut plan = Plan { host, settings: Vec::new() };
    plan.cpu(limits)?;
    plan.cpuset(limits)?;
    plan.memory(limits, now)?;
    plan.pids(limits)?;
    plan.io(limits)?;
    Ok(plan.settings)
}

struct Plan<'a, H> {
    host: &'a H,
    settings: Vec<Setting>,
}

impl<H: Host> Plan<'_, H> {
    fn cpu(&mut self, limits: &Limits) -> Result<(), CgroupError> {
        let cpu = Cpu::of(limits);
        cpu.check()?;
        if let Some(quota) = cpu.quota_us() {
            let limit = "CPU time";
            let period = cpu.period_us;
            match self.home(limit, Controllers::CPU)? {
                Version::V2 => {
                    let value = format!("{quota} {period}");
                    self.require(limit, Controllers::CPU, "cpu.max", "CONFIG_CFS_BANDWIDTH")?;
                    self.add(limit, Controllers::CPU, "cpu.max", value);
                }
                Version::V1 => {
                    let quota_file = "cpu.cfs_quota_us";
                    self.require(limit, Controllers::CPU, quota_file, "CONFIG_CFS_BANDWIDTH")?;
                    self.add(limit, Controllers::CPU, "cpu.cfs_period_us", period.to_string());
                    self.add(limit, Controllers::CPU, quota_file, quota.to_string());
                }
            }
            self.burst(&cpu)?;
        }
        if cpu.reserve_milli > 0 {
            self.home("CPU reservation", Controllers::CPU)?;
        } else if let Some(weight) = limits.cpu_weight {
            let limit = "CPU weight";
            if weight == 0 {
                self.home(limit, Controllers::CPU)?;
                // KERNEL(5.15): cpu.idle.
                if !self.host.has(Controllers::CPU, IDLE) {
                    let why = format!("the kernel has no {IDLE} for --cpu-weight idle");
                    return Err(CgroupError::Missing { limit, why, since: "5.15" });
                }
                self.add(limit, Controllers::CPU, IDLE, "1".into());
                return Ok(());
            }
            check_weight(limit, weight)?;
            match self.home(limit, Controllers::CPU)? {
                Version::V2 => {
                    self.add(limit, Controllers::CPU, "cpu.weight", weight.to_string());
                }
                Version::V1 => {
                    let shares = shares(weight).to_string();
                    self.add(limit, Controllers::CPU, "cpu.shares", shares);
                }
            }
        }
        Ok(())
    }

    /// ORDER: the kernel refuses a burst above the quota, so the quota is set before.
    fn burst(&mut self, cpu: &Cpu) -> Result<(), CgroupError> {
        let limit = "CPU burst";
        let file = burst_file(self.home(limit, Controllers::CPU)?);
        let burst = cpu.burst_us();
        // KERNEL(5.14): before, only a burst that was requested is an error.
        if !self.host.has(Controllers::CPU, file) {
            if cpu.burst.is_none() || burst == 0 {
                return Ok(());
            }
            let why = format!("the kernel has no {file}");
            return Err(CgroupError::Missing { limit, why, since: "5.14" });
        }
        if burst > 0 {
            self.add(limit, Controllers::CPU, file, burst.to_string());
        }
        Ok(())
    }

    fn cpuset(&mut self, limits: &Limits) -> Result<(), CgroupError> {
        let Some(cpus) = &limits.cpuset_cpus else { return Ok(()) };
        let limit = "CPU set";
        let bad = || Invalid::new(limit, cpus, "a list such as 0-3,8 of CPUs that are online");
        let wanted = cpu_runs(cpus).ok_or_else(bad)?;
        let version = self.home(limit, Controllers::CPUSET)?;
        // v2 takes CPUs that do not exist and then uses all of the parent's: checked here.
        let online = self.host.cpus()?;
        let online = cpu_runs(online.trim()).unwrap_or_default();
        let covered = |cpu: u32| online.iter().any(|(a, b)| (*a..=*b).contains(&cpu));
        if !wanted.iter().all(|(a, b)| (*a..=*b).all(covered)) {
            return Err(bad().into());
        }
        if version == Version::V1 {
            // ORDER: a v1 cgroup takes no process before both files are filled.
            let mems = self.host.mems()?;
            self.add(limit, Controllers::CPUSET, "cpuset.mems", mems);
        }
        self.add(limit, Controllers::CPUSET, "cpuset.cpus", cpus.clone());
        Ok(())
    }

    fn memory(&mut self, limits: &Limits, now: MemoryV1) -> Result<(), CgroupError> {
        let (memory, swap) = ("memory", "swap");
        if let Some(bytes) = limits.memory_max_bytes
            && bytes < MEMORY_LEAST_BYTES
        {
            return Err(Invalid::new(memory, bytes.to_string(), "at least 1 MiB").into());
        }
        Memory::of(limits).check()?;
        self.protected_memory(limits)?;
        if limits.memory_max_bytes.is_none() && limits.swap_max_bytes.is_none() {
            return Ok(());
        }
        let limit = if limits.memory_max_bytes.is_some() { memory } else { swap };
        let version = self.home(limit, Controllers::MEMORY)?;
        if limits.swap_max_bytes.is_some() {
            let file = match version {
                Version::V2 => "memory.swap.max",
                Version::V1 => "memory.memsw.limit_in_bytes",
            };
            self.require(swap, Controllers::MEMORY, file, "CONFIG_SWAP and swapaccount=1")?;
        }
        if version == Version::V2 {
            if let Some(bytes) = limits.swap_max_bytes {
                self.add(swap, Controllers::MEMORY, "memory.swap.max", bytes.to_string());
            }
            if let Some(bytes) = limits.memory_max_bytes {
                let none = bytes >= V1_UNLIMITED_BYTES;
                let value = if none { "max".into() } else { bytes.to_string() };
                self.add(memory, Controllers::MEMORY, "memory.max", value);
            }
            return Ok(());
        }
        let new = memory_v1(limits, now)?;
        let write = |limit, file, bytes: u64| Setting {
            controller: Controllers::MEMORY,
            limit,
            file,
            value: if bytes >= V1_UNLIMITED_BYTES { "-1".into() } else { bytes.to_string() },
        };
        let first = write(memory, "memory.limit_in_bytes", new.limit);
        let second = write(swap, "memory.memsw.limit_in_bytes", new.memsw);
        // ORDER: v1 refuses every moment in which memory alone may be more than memory and swap.
        let mut pair = if new.limit <= now.memsw { [first, second] } else { [second, first] };
        pair.iter_mut().for_each(|s| {
            if s.file.contains("memsw") && limits.swap_max_bytes.is_none() {
                s.limit = memory; // follows the limit of memory
            }
        });
        let changed = |s: &Setting| match s.file {
            "memory.limit_in_bytes" => new.limit != now.limit,
            _ => new.memsw != now.memsw,
        };
        self.settings.extend(pair.into_iter().filter(changed));
        Ok(())
    }

    /// Memory that is protected from reclaim, or is reclaimed early.
    fn protected_memory(&mut self, limits: &Limits) -> Result<(), CgroupError> {
        if let Some(bytes) = limits.memory_min_bytes {
            let limit = "guaranteed memory";
            if self.home(limit, Controllers::MEMORY)? == Version::V2 {
                self.require(limit, Controllers::MEMORY, "memory.min", "Linux 4.18")?;
                self.add(limit, Controllers::MEMORY, "memory.min", bytes.to_string());
            }
        }
        if let Some(bytes) = limits.memory_low_bytes {
            let limit = "memory reclaimed last";
            let file = match self.home(limit, Controllers::MEMORY)? {
                Version::V2 => "memory.low",
                Version::V1 => "memory.soft_limit_in_bytes",
            };
            // v1 reclaims what is above a soft limit first; without one nothing is above.
            let is_none = bytes == 0 && file != "memory.low";
            let value = if is_none { "-1".into() } else { bytes.to_string() };
            self.add(limit, Controllers::MEMORY, file, value);
        }
        if let Some(bytes) = limits.memory_high_bytes {
            let limit = "memory before it is slowed down";
            if self.home(limit, Controllers::MEMORY)? == Version::V1 {
                return Err(CgroupError::Missing {
                    limit,
                    why: "cgroup v1 has no memory.high: limit memory with --memory".into(),
                    since: "4.5",
                });
            }
            self.add(limit, Controllers::MEMORY, "memory.high", bytes.to_string());
        }
        Ok(())
    }

    fn pids(&mut self, limits: &Limits) -> Result<(), CgroupError> {
        let Some(pids) = limits.pids_max else { return Ok(()) };
        let limit = "number of tasks";
        if pids == 0 {
            return Err(Invalid::new(limit, "0", "at least 1").into());
        }
        let Some(pids) = limits.tasks_max() else {
            // A host without the controller has no limit, either.
            if self.host.version(Controllers::PIDS).is_some() {
                self.add(limit, Controllers::PIDS, "pids.max", "max".into());
            }
            return Ok(());
        };
        self.home(limit, Controllers::PIDS)?;
        self.add(limit, Controllers::PIDS, "pids.max", pids.to_string());
        Ok(())
    }

    fn io(&mut self, limits: &Limits) -> Result<(), CgroupError> {
        let Some(weight) = limits.io_weight else { return Ok(()) };
        let limit = "disk weight";
        check_weight(limit, weight)?;
        let version = self.home(limit, Controllers::IO)?;
        let before = self.settings.len();
        let bfq = bfq_weight(weight).to_string();
        match version {
            Version::V2 => {
                if self.host.has(Controllers::IO, "io.weight") {
                    self.add(limit, Controllers::IO, "io.weight", format!("default {weight}"));
                }
                // KERNEL(5.4): `io.bfq.weight` is there once the bfq module is loaded.
                if self.host.has(Controllers::IO, "io.bfq.weight") {
                    self.add(limit, Controllers::IO, "io.bfq.weight", format!("default {bfq}"));
                }
            }
            Version::V1 => {
                if self.host.has(Controllers::IO, "blkio.bfq.weight") {
                    self.add(limit, Controllers::IO, "blkio.bfq.weight", bfq);
                } else if self.host.has(Controllers::IO, "blkio.weight") {
                    // The CFQ scheduler's, until 4.20: 10 to 1000, default 500.
                    let cfq = (u64::from(weight) * 5).clamp(10, 1000).to_string();
                    self.add(limit, Controllers::IO, "blkio.weight", cfq);
                }
            }
        }
        if self.settings.len() == before {
            return Err(CgroupError::Missing {
                limit,
                why: "the kernel has neither io.cost nor the bfq scheduler (modprobe bfq)".into(),
                since: "5.4",
            });
        }
        Ok(())
    }

    fn home(&self, limit: &'static str, controller: Controllers) -> Result<Version, CgroupError> {
        self.host.version(controller).ok_or_else(|| CgroupError::Missing {
            limit,
            why: self.host.why_missing(controller),
            since: since(controller),
        })
    }

    fn require(
        &self,
        limit: &'static str,
        controller: Controllers,
        file: &str,
        needs: &str,
    ) -> Result<(), CgroupError> {
        if self.host.has(controller, file) {
            return Ok(());
        }
        let why = format!("the kernel has no {file} (it needs {needs})");
        Err(CgroupError::Missing { limit, why, since: since(controller) })
    }

    fn add(&mut self, limit: &'static str, c: Controllers, file: &'static str, value: String) {
        self.settings.push(Setting { controller: c, limit, file, value });
    }
}

/// The write before a quota or a burst is changed: a present burst may be above the new quota.
pub(super) fn no_burst(host: &impl Host) -> Option<Setting> {
    let file = burst_file(host.version(Controllers::CPU)?);
    let controller = Controllers::CPU;
    let setting = Setting { controller, limit: "CPU burst", file, value: "0".into() };
    host.has(controller, file).then_some(setting)
}

/// The write before a weight is changed: the kernel refuses the weight of a cgroup that is idle.
pub(super) fn not_idle(host: &impl Host) -> Option<Setting> {
    let controller = Controllers::CPU;
    let setting = Setting { controller, limit: "CPU weight", file: IDLE, value: "0".into() };
    host.has(controller, IDLE).then_some(setting)
}

fn burst_file(version: Version) -> &'static str {
    match version {
        Version::V1 => "cpu.cfs_burst_us",
        Version::V2 => "cpu.max.burst",
    }
}

/// Computes the v1 limits. A limit that is not requested stays; the swap on top of memory, if it is
/// limited, stays when memory alone changes.
fn memory_v1(limits: &Limits, now: MemoryV1) -> Result<MemoryV1, CgroupError> {
    // The kernel keeps whole pages.
    let pages = |bytes: u64| bytes & !4095;
    let limit = limits.memory_max_bytes.map_or(now.limit, pages).min(V1_UNLIMITED_BYTES);
    let memsw = match limits.swap_max_bytes {
        Some(_) if limit >= V1_UNLIMITED_BYTES => {
            return Err(CgroupError::Missing {
                limit: "swap",
                why: "cgroup v1 limits swap only together with memory: limit memory too".into(),
                since: "4.5",
            });
        }
        Some(swap) => limit.saturating_add(pages(swap)),
        None if now.memsw >= V1_UNLIMITED_BYTES => now.memsw,
        None => limit.saturating_add(now.memsw.saturating_sub(now.limit)),
    };
    Ok(MemoryV1 { limit, memsw: memsw.min(V1_UNLIMITED_BYTES) })
}

fn check_weight(limit: &'static str, weight: u32) -> Result<(), Invalid> {
    if (1..=10_000).contains(&weight) {
        return Ok(());
    }
    Err(Invalid::new(limit, weight.to_string(), "1 to 10000 (100 is the default)"))
}

/// `cpu.shares` of a `cpu.weight`: 100 is 1024, as sched/core.c converts it, within v1's bounds.
pub(super) fn shares(weight: u32) -> u64 {
    (u64::from(weight) * 1024 + 50).div_euclid(100).clamp(2, 262_144)
}

/// bfq accepts 1 to 1000; both defaults are 100, and both halves are stretched linearly.
fn bfq_weight(weight: u32) -> u32 {
    if weight <= 100 { weight } else { 100 + (weight - 100) * 900 / 9_900 }
}

/// The first kernel with a controller.
fn since(controller: Controllers) -> &'static str {
    match controller {
        Controllers::PIDS => "4.3",
        Controllers::MEMORY => "2.6.25",
        _ => "2.6.24",
    }
}

#[cfg(test)]
mod tests {
    use dormouse_model::CpuBurst;

    use super::*;

    struct Fake {
        version: Option<Version>,
        files: &'static [&'static str],
    }

    const V1_FILES: &[&str] =
        &["cpu.cfs_quota_us", "cpu.cfs_burst_us", "memory.memsw.limit_in_bytes"];
    const V2_FILES: &[&str] = &[
        "cpu.max",
        "cpu.max.burst",
        "memory.min",
        "memory.swap.max",
        "io.weight",
        "io.bfq.weight",
    ];
    const V1: Fake = Fake { version: Some(Version::V1), files: V1_FILES };
    const V2: Fake = Fake { version: Some(Version::V2), files: V2_FILES };

    impl Host for Fake {
        fn version(&self, _: Controllers) -> Option<Version> {
            self.version
        }
        fn has(&self, _: Controllers, file: &str) -> bool {
            self.files.contains(&file)
        }
        fn why_missing(&self, _: Controllers) -> String {
            "it is not there".into()
        }
        fn cpus(&self) -> Result<String, CgroupError> {
            Ok("0-3,6\n".into())
        }
        fn mems(&self) -> Result<String, CgroupError> {
            Ok("0-1".into())
        }
    }

    fn written(limits: &Limits, host: &Fake, now: MemoryV1) -> Vec<(&'static str, String)> {
        let plan = plan(limits, host, now).unwrap();
        plan.into_iter().map(|s| (s.file, s.value)).collect()
    }

    fn fresh(limits: &Limits, host: &Fake) -> Vec<(&'static str, String)> {
        written(limits, host, MemoryV1::UNLIMITED)
    }

    fn all() -> Limits {
        Limits {
            cpu_max_milli: Some(1500),
            cpu_reserve_milli: None,
            cpu_idle_rate_milli: None,
            cpu_period_us: None,
            cpu_burst: Some(CpuBurst::Percent(10)),
            cpu_weight: Some(100),
            cpuset_cpus: Some("0-1,6".into()),
            memory_max_bytes: Some(64 << 20),
            memory_min_bytes: Some(8 << 20),
            memory_low_bytes: Some(16 << 20),
            memory_high_bytes: None,
            swap_max_bytes: Some(1 << 20),
            pids_max: Some(7),
            io_weight: None,
            disk_rates: Vec::new(),
            net_rate_bps: None,
            net_ceil_bps: None,
            net_weight: None,
            ..Limits::default()
        }
    }

    #[test]
    fn limits_are_written_in_v2_file_formats() {
        let limits = Limits { io_weight: Some(10_000), memory_high_bytes: Some(32 << 20), ..all() };
        let expected = [
            ("cpu.max", "150000 100000"),
            ("cpu.max.burst", "15000"),
            ("cpu.weight", "100"),
            ("cpuset.cpus", "0-1,6"),
            ("memory.min", "8388608"),
            ("memory.low", "16777216"),
            ("memory.high", "33554432"),
            ("memory.swap.max", "1048576"),
            ("memory.max", "67108864"),
            ("pids.max", "7"),
            ("io.weight", "default 10000"),
            ("io.bfq.weight", "default 1000"),
        ];
        assert_eq!(fresh(&limits, &V2), expected.map(|(f, v)| (f, v.to_owned())));
    }

    #[test]
    fn limits_are_converted_for_v1() {
        let expected = [
            ("cpu.cfs_period_us", "100000"),
            ("cpu.cfs_quota_us", "150000"),
            ("cpu.cfs_burst_us", "15000"),
            ("cpu.shares", "1024"),
            ("cpuset.mems", "0-1"),
            ("cpuset.cpus", "0-1,6"),
            ("memory.soft_limit_in_bytes", "16777216"),
            ("memory.limit_in_bytes", "67108864"),
            ("memory.memsw.limit_in_bytes", "68157440"),
            ("pids.max", "7"),
        ];
        assert_eq!(fresh(&all(), &V1), expected.map(|(f, v)| (f, v.to_owned())));
    }

    #[test]
    fn burst_is_written_where_the_kernel_has_it() {
        let limits = |burst| Limits {
            cpu_max_milli: Some(500),
            cpu_period_us: Some(10_000),
            cpu_burst: burst,
            ..Limits::default()
        };
        let whole = ("cpu.cfs_burst_us", "5000".to_owned());
        assert_eq!(fresh(&limits(None), &V1)[2], whole, "the default is one quota");
        assert_eq!(fresh(&limits(Some(CpuBurst::Us(0))), &V1).len(), 2, "a new cgroup has none");
        assert_eq!(no_burst(&V2).map(|s| (s.file, s.value)), Some(("cpu.max.burst", "0".into())));

        let old = Fake { version: Some(Version::V2), files: &["cpu.max"] };
        assert_eq!(fresh(&limits(None), &old), [("cpu.max", "5000 10000".to_owned())]);
        assert_eq!(no_burst(&old), None);
        let error = plan(&limits(Some(CpuBurst::Us(1))), &old, MemoryV1::UNLIMITED).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Unsupported { since: "5.14" });
        let above = limits(Some(CpuBurst::Us(5001)));
        let error = plan(&above, &V2, MemoryV1::UNLIMITED).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Invalid);
    }

    #[test]
    fn weight_of_idle_container_is_a_file_of_its_own() {
        const IDLE_FILES: &[&str] = &["cpu.idle"];
        let idle = Limits { cpu_weight: Some(0), ..Limits::default() };
        for version in [Version::V1, Version::V2] {
            let host = Fake { version: Some(version), files: IDLE_FILES };
            assert_eq!(fresh(&idle, &host), [("cpu.idle", "1".to_owned())]);
            let first = not_idle(&host).map(|s| (s.file, s.value));
            assert_eq!(first, Some(("cpu.idle", "0".into())));
        }
        assert_eq!(not_idle(&V2), None);
        let error = plan(&idle, &V2, MemoryV1::UNLIMITED).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Unsupported { since: "5.15" });
    }

    #[test]
    fn weight_of_reserved_container_is_left_to_the_caller() {
        let mut limits = Limits { cpu_weight: Some(200), ..Limits::default() };
        assert_eq!(fresh(&limits, &V2), [("cpu.weight", "200".to_owned())]);
        limits.cpu_reserve_milli = Some(500);
        assert!(fresh(&limits, &V2).is_empty() && fresh(&limits, &V1).is_empty());
        let none = Fake { version: None, files: &[] };
        let error = plan(&limits, &none, MemoryV1::UNLIMITED).unwrap_err();
        assert!(error.to_string().starts_with("CPU reservation cannot be"), "{error}");
        limits.cpu_reserve_milli = Some(0);
        assert_eq!(fresh(&limits, &V2), [("cpu.weight", "200".to_owned())]);
    }

    #[test]
    fn no_limits_write_nothing() {
        assert!(fresh(&Limits::default(), &V1).is_empty());
        assert!(fresh(&Limits::default(), &V2).is_empty());
        let none = Fake { version: None, files: &[] };
        assert!(fresh(&Limits::default(), &none).is_empty());
    }

    #[test]
    fn v1_memory_never_exceeds_memory_and_swap_on_the_way() {
        const M: u64 = 1 << 20;
        let cases = [(4, 1), (100, 0), (64, 64), (1, 300), (300, 1)];
        for (limit, swap) in cases {
            for (old_limit, old_swap) in cases {
                let mut now = MemoryV1 { limit: old_limit * M, memsw: (old_limit + old_swap) * M };
                let limits = Limits {
                    memory_max_bytes: Some(limit * M),
                    swap_max_bytes: Some(swap * M),
                    ..Limits::default()
                };
                for (file, value) in written(&limits, &V1, now) {
                    let value = value.parse().unwrap();
                    match file {
                        "memory.limit_in_bytes" => now.limit = value,
                        _ => now.memsw = value,
                    }
                    assert!(now.limit <= now.memsw, "{limit} {swap} {old_limit} {old_swap}");
                }
                assert_eq!((now.limit, now.memsw), (limit * M, (limit + swap) * M));
            }
        }
    }

    #[test]
    fn v1_swap_stays_when_memory_changes_alone() {
        let limits = Limits { memory_max_bytes: Some(32 << 20), ..Limits::default() };
        let now = MemoryV1 { limit: 16 << 20, memsw: 24 << 20 };
        let wrote = written(&limits, &V1, now);
        assert_eq!(wrote[0], ("memory.memsw.limit_in_bytes", (40u64 << 20).to_string()));
        assert_eq!(wrote[1], ("memory.limit_in_bytes", (32u64 << 20).to_string()));
    }

    #[test]
    fn bad_values_are_refused() {
        let set = |change: fn(&mut Limits)| {
            let mut limits = Limits::default();
            change(&mut limits);
            [V1, V2].map(|host| plan(&limits, &host, MemoryV1::UNLIMITED).unwrap_err().kind())
        };
        let invalid = [crate::ErrorKind::Invalid; 2];
        assert_eq!(set(|l| l.cpu_max_milli = Some(9)), invalid);
        assert_eq!(set(|l| l.cpu_weight = Some(10_001)), invalid);
        assert_eq!(set(|l| l.memory_max_bytes = Some(1 << 19)), invalid);
        assert_eq!(set(|l| l.pids_max = Some(0)), invalid);
        assert_eq!(set(|l| l.io_weight = Some(0)), invalid);
        for list in ["", "x", "3-1", "0-", "-1", "+1", "0,,1", "4", "0-6", "0 1", "99999999999"] {
            let limits = Limits { cpuset_cpus: Some(list.into()), ..Limits::default() };
            let error = plan(&limits, &V2, MemoryV1::UNLIMITED).unwrap_err();
            assert_eq!(error.kind(), crate::ErrorKind::Invalid, "{list}");
        }
    }

    #[test]
    fn missing_controllers_are_named() {
        let none = Fake { version: None, files: &[] };
        let limits = Limits { pids_max: Some(5), ..Limits::default() };
        let error = plan(&limits, &none, MemoryV1::UNLIMITED).unwrap_err();
        assert_eq!(error.to_string(), "number of tasks cannot be limited: it is not there");
        assert_eq!(error.kind(), crate::ErrorKind::Unsupported { since: "4.3" });

        let limits = Limits { io_weight: Some(5), ..Limits::default() };
        let error = plan(&limits, &V1, MemoryV1::UNLIMITED).unwrap_err();
        assert!(error.to_string().contains("bfq"), "{error}");

        let limits = Limits { memory_high_bytes: Some(1 << 20), ..Limits::default() };
        let error = plan(&limits, &V1, MemoryV1::UNLIMITED).unwrap_err();
        assert!(error.to_string().contains("no memory.high"), "{error}");

        let limits = Limits { swap_max_bytes: Some(0), ..Limits::default() };
        let error = plan(&limits, &V1, MemoryV1::UNLIMITED).unwrap_err();
        assert!(error.to_string().contains("limit memory too"), "{error}");
    }

    #[test]
    fn weights_keep_their_middle_and_ends() {
        assert_eq!([1, 100, 10_000].map(shares), [10, 1024, 102_400]);
        assert_eq!([1, 100, 10_000].map(bfq_weight), [1, 100, 1000]);
    }
}
