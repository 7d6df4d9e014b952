//! The contents of views: the files of procfs and sysfs, as a machine of the container's size would have them.
//!
//! Every line has the same length whatever its numbers are. A reader that meets a writer therefore sees lines of
//! before and after, and no torn line. Numbers that the kernel writes at the right of a column stay there; other
//! lines have spaces at their end.
//!
//! Pure: readings in, text out.

use std::fmt::Write;

use dormouse_kernel::cgroup::{Device, MemoryParts};
use dormouse_kernel::proc;
use dormouse_model::Limits;

/// The column of a number in `/proc/meminfo`. The kernel's grows with the number.
const MEMINFO_NAME: usize = 16;
const MEMINFO_MIN: usize = 8;

/// The length of a line of `/proc/stat`: ten numbers of 15 digits.
const STAT_LINE: usize = 176;
/// The length of the line of `/proc/loadavg`.
const LOAD_LINE: usize = 56;
/// The length of a line of `/proc/diskstats`.
const DISK_LINE: usize = 184;
/// The length of the second line of `/proc/swaps`.
const SWAP_LINE: usize = 104;

/// USER_HZ: the unit of `/proc/stat` on all architectures of Dormouse.
const TICK_NS: u64 = 10_000_000;

const SECTOR_BYTES: u64 = 512;

/// Memory of the host, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// `MemTotal`.
    pub total: u64,
    /// `MemAvailable`.
    pub available: u64,
    /// `SwapTotal`.
    pub swap: u64,
    /// `SwapFree`.
    pub swap_free: u64,
    /// `VmallocTotal`, `Hugepagesize`.
    pub constants: [u64; 2],
}

impl HostMemory {
    /// Parses the host's `/proc/meminfo`.
    pub fn parse(meminfo: &str) -> Self {
        let field = |name: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
            kib.unwrap_or(0).saturating_mul(1024)
        };
        Self {
            total: field("MemTotal"),
            available: field("MemAvailable"),
            swap: field("SwapTotal"),
            swap_free: field("SwapFree"),
            constants: [field("VmallocTotal"), field("Hugepagesize")],
        }
    }
}

/// Memory that a container has: its limit, or all of the host.
pub(crate) fn memory_bytes(limits: &Limits, host: &HostMemory) -> u64 {
    limits.memory_max_bytes.unwrap_or(u64::MAX).min(host.total)
}

/// Swap that a container has.
pub(crate) fn swap_bytes(limits: &Limits, host: &HostMemory) -> u64 {
    limits.swap_max_bytes.unwrap_or(u64::MAX).min(host.swap)
}

/// `/proc/meminfo` (proc_meminfo(5)).
///
/// `MemAvailable` is also bounded by what the host has available: more cannot be had.
pub fn meminfo(limits: &Limits, host: &HostMemory, used: &MemoryParts) -> String {
    let total = memory_bytes(limits, host);
    let free = total.saturating_sub(used.bytes).min(host.available);
    let reclaimable = used.active_file + used.inactive_file + used.slab_reclaimable;
    let available = free.saturating_add(reclaimable).min(host.available).min(total);
    let swap = swap_bytes(limits, host);
    let swap_free = swap.saturating_sub(used.swap).min(host.swap_free);
    let commit = total / 2 + swap;
    let committed = used.anon + used.shmem + used.swap;
    let cached = used.file;
    let [vmalloc, huge_page] = host.constants;
    let rows: [(&str, u64); 36] = [
        ("MemTotal", total),
        ("MemFree", free),
        ("MemAvailable", available),
        ("Buffers", 0),
        ("Cached", cached),
        ("SwapCached", 0),
        ("Active", used.active_anon + used.active_file),
        ("Inactive", used.inactive_anon + used.inactive_file),
        ("Active(anon)", used.active_anon),
        ("Inactive(anon)", used.inactive_anon),
        ("Active(file)", used.active_file),
        ("Inactive(file)", used.inactive_file),
        ("Unevictable", used.unevictable),
        ("Mlocked", used.unevictable),
        ("SwapTotal", swap),
        ("SwapFree", swap_free),
        ("Dirty", used.dirty),
        ("Writeback", used.writeback),
        ("AnonPages", used.anon),
        ("Mapped", used.mapped),
        ("Shmem", used.shmem),
        ("KReclaimable", used.slab_reclaimable),
        ("Slab", used.slab_reclaimable + used.slab_unreclaimable),
        ("SReclaimable", used.slab_reclaimable),
        ("SUnreclaim", used.slab_unreclaimable),
        ("KernelStack", used.kernel_stack),
        ("PageTables", used.page_tables),
        ("NFS_Unstable", 0),
        ("Bounce", 0),
        ("WritebackTmp", 0),
        ("CommitLimit", commit),
        ("Committed_AS", committed),
        ("VmallocTotal", vmalloc),
        ("VmallocUsed", 0),
        ("VmallocChunk", 0),
        ("Hugepagesize", huge_page),
    ];
    // No number but VmallocTotal, a constant, is larger than all of the host.
    let width = (host.total.max(host.swap) / 1024).to_string().len().max(MEMINFO_MIN);
    let mut text = String::with_capacity(rows.len() * 28);
    for (name, bytes) in rows {
        let bound = if name == "VmallocTotal" { u64::MAX } else { host.total + host.swap };
        let kib = bytes.min(bound) / 1024;
        let name = format!("{name}:");
        let _ = writeln!(text, "{name:<MEMINFO_NAME$}{kib:>width$} kB");
    }
    text
}

/// `/proc/swaps` (proc_swaps(5)): one device of the size of the container's swap, if it has any.
pub fn swaps(limits: &Limits, host: &HostMemory, used: &MemoryParts) -> String {
    let mut text = String::from("Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n");
    let swap = swap_bytes(limits, host);
    if swap > 0 {
        let used = used.swap.min(swap) / 1024;
        let line = format!("none\t\t\t\t\tvirtual\t\t{}\t\t{used}\t\t0", swap / 1024);
        push_line(&mut text, &line, SWAP_LINE);
    }
    text
}

/// Adds a line with spaces at its end up to a length.
fn push_line(text: &mut String, line: &str, length: usize) {
    let _ = writeln!(text, "{line:<length$}");
}

/// The CPUs that a container has: those of its set, and of these as many as its quota fills. `online` are those of
/// the host.
pub(crate) fn cpus(limits: &Limits, online: &str) -> Vec<u32> {
    let host = list(online);
    let mut own: Vec<u32> = match &limits.cpuset_cpus {
        Some(set) => {
            let set = list(set);
            host.iter().copied().filter(|cpu| set.contains(cpu)).collect()
        }
        None => host.clone(),
    };
    if own.is_empty() {
        own = host;
    }
    if let Some(milli) = limits.cpu_max_milli {
        own.truncate((milli.div_ceil(1000) as usize).max(1));
    }
    own
}

/// The CPUs of a list such as `0-3,8`; none if it is no such list.
fn list(text: &str) -> Vec<u32> {
    let runs = proc::cpu_runs(text.trim()).unwrap_or_default();
    runs.into_iter().flat_map(|(first, last)| first..=last).collect()
}

/// `/sys/devices/system/cpu/online`: a list such as `0-3,8`.
pub fn cpu_list(cpus: &[u32]) -> String {
    let mut text = String::new();
    let mut rest = cpus;
    while let Some((first, _)) = rest.split_first() {
        let run = rest.iter().zip(*first..).take_while(|(cpu, wanted)| *cpu == wanted).count();
        let comma = if text.is_empty() { "" } else { "," };
        let last = rest[run - 1];
        let _ = match run {
            1 => write!(text, "{comma}{first}"),
            _ => write!(text, "{comma}{first}-{last}"),
        };
        rest = &rest[run..];
    }
    text + "\n"
}

/// `/proc/cpuinfo`: the blocks of these CPUs. The whole text where it has no blocks by numbers of CPUs.
pub fn cpuinfo(cpus: &[u32], host: &str) -> String {
    let number = |block: &&str| -> Option<u32> {
        let line = block.lines().next()?.strip_prefix("processor")?;
        line.trim().strip_prefix(':')?.trim().parse().ok()
    };
    let mut text = String::new();
    for block in host.split("\n\n") {
        if number(&block).is_some_and(|number| cpus.contains(&number)) {
            text += block.trim_end_matches('\n');
            text += "\n\n";
        }
    }
    if text.is_empty() { host.to_owned() } else { text }
}

/// Time of a container and its CPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuReading {
    /// CPU time in user mode.
    pub user_ns: u64,
    /// CPU time in the kernel.
    pub system_ns: u64,
    /// Time since the container started.
    pub uptime_ns: u64,
    /// Time of day of its start.
    pub started_unix_s: u64,
    /// Its tasks.
    pub tasks: u64,
}

/// `/proc/stat` (proc_stat(5)). The kernel counts CPU time per container, not per CPU of a container: each of its
/// CPUs has an equal part.
pub fn stat(cpus: &[u32], read: &CpuReading) -> String {
    let count = (cpus.len() as u64).max(1);
    let part = |ns: u64| ns / TICK_NS / count;
    let (user, system) = (part(read.user_ns), part(read.system_ns));
    let idle = (read.uptime_ns / TICK_NS).saturating_sub(user + system);
    let mut text = String::with_capacity((cpus.len() + 2) * STAT_LINE);
    let line = |name: &str, times: u64| {
        let [user, system, idle] = [user, system, idle].map(|part| part * times);
        format!("{name} {user} 0 {system} {idle} 0 0 0 0 0 0")
    };
    push_line(&mut text, &line("cpu ", count), STAT_LINE);
    for cpu in cpus {
        push_line(&mut text, &line(&format!("cpu{cpu}"), 1), STAT_LINE);
    }
    let rest = format!("btime {}\nprocesses {:<20}\n", read.started_unix_s, read.tasks);
    text + "intr 0\nctxt 0\n" + &rest + "procs_running 1\nprocs_blocked 0\nsoftirq 0\n"
}

/// Load averages over 1, 5 and 15 minutes: of running tasks, and one more while a task waits for a CPU.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Load {
    averages: [f64; 3],
    /// CPU time and time of waiting up to the last reading.
    busy_ns: u64,
    at_ns: u64,
}

/// The times of [`Load`]'s averages, as the kernel's (kernel/sched/loadavg.c).
const LOAD_NS: [f64; 3] = [60e9, 300e9, 900e9];

impl Load {
    /// Begins at the start of a container.
    pub fn begin(start_ns: u64) -> Self {
        Self { at_ns: start_ns, ..Self::default() }
    }

    /// Adds the time since the last reading. `busy_ns` is CPU time plus time in which a task waited for a CPU, since
    /// the start.
    pub fn read(&mut self, busy_ns: u64, now_ns: u64) {
        let passed = now_ns.saturating_sub(self.at_ns) as f64;
        if passed <= 0.0 {
            return;
        }
        let load = busy_ns.saturating_sub(self.busy_ns) as f64 / passed;
        for (average, span) in self.averages.iter_mut().zip(LOAD_NS) {
            let kept = (-passed / span).exp();
            *average = *average * kept + load * (1.0 - kept);
        }
        (self.busy_ns, self.at_ns) = (busy_ns, now_ns);
    }

    /// The averages over 1, 5 and 15 minutes.
    pub fn averages(&self) -> [f64; 3] {
        self.averages
    }

    /// `/proc/loadavg` (proc_loadavg(5)).
    pub fn text(&self, tasks: u64) -> String {
        let [one, five, fifteen] = self.averages;
        let mut text = String::new();
        let line = format!("{one:.2} {five:.2} {fifteen:.2} 1/{} {0}", tasks.max(1));
        push_line(&mut text, &line, LOAD_LINE);
        text
    }
}

/// `/proc/diskstats`: the devices that a container has used. `host` is the host's file, for their names.
pub fn diskstats(devices: &[Device], host: &str) -> String {
    let mut text = String::new();
    for device in devices {
        let name = host.lines().find_map(|line| {
            let mut words = line.split_whitespace();
            let mut number = || words.next()?.parse::<u32>().ok();
            let is_it = (number()?, number()?) == (device.major, device.minor);
            is_it.then(|| words.next()).flatten()
        });
        let Some(name) = name else { continue };
        let (read, written) =
            (device.read_bytes / SECTOR_BYTES, device.written_bytes / SECTOR_BYTES);
        let line = format!(
            "{:>4} {:>7} {name} {} 0 {read} 0 {} 0 {written} 0 0 0 0 0 0 0 0 0 0",
            device.major, device.minor, device.reads, device.writes
        );
        push_line(&mut text, &line, DISK_LINE);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn host() -> HostMemory {
        HostMemory::parse(
            "MemTotal:       24683652 kB\nMemFree:         3205796 kB\nMemAvailable:   23947912 kB\n\
             SwapTotal:       1048576 kB\nSwapFree:        1048000 kB\nHugepagesize:       2048 kB\n",
        )
    }

    fn kib(text: &str, name: &str) -> u64 {
        let line = text.lines().find(|line| line.starts_with(&format!("{name}:"))).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn meminfo_is_that_of_a_machine_with_the_limit() {
        let limits = Limits {
            memory_max_bytes: Some(512 * MIB),
            swap_max_bytes: Some(256 * MIB),
            ..Limits::default()
        };
        let used = MemoryParts {
            bytes: 100 * MIB,
            inactive_file: 40 * MIB,
            swap: MIB,
            ..MemoryParts::default()
        };
        let text = meminfo(&limits, &host(), &used);
        assert_eq!(kib(&text, "MemTotal"), 512 << 10);
        assert_eq!(kib(&text, "MemFree"), 412 << 10);
        assert_eq!(kib(&text, "MemAvailable"), 452 << 10);
        assert_eq!((kib(&text, "SwapTotal"), kib(&text, "SwapFree")), (256 << 10, 255 << 10));
        assert!(text.starts_with("MemTotal:         524288 kB\n"), "{text}");
        let more = MemoryParts { bytes: 512 * MIB, active_anon: 512 * MIB, ..used };
        assert_eq!(meminfo(&limits, &host(), &more).len(), text.len(), "its length never changes");
        let short = HostMemory { available: 10 * MIB, ..host() };
        let text = meminfo(&limits, &short, &used);
        assert_eq!((kib(&text, "MemFree"), kib(&text, "MemAvailable")), (10 << 10, 10 << 10));
        let none = meminfo(&Limits::default(), &host(), &used);
        assert_eq!((kib(&none, "MemTotal"), kib(&none, "SwapTotal")), (24_683_652, 1 << 20));
    }

    #[test]
    fn swaps_has_a_device_where_there_is_swap() {
        let none = Limits { swap_max_bytes: Some(0), ..Limits::default() };
        assert_eq!(swaps(&none, &host(), &MemoryParts::default()).lines().count(), 1);
        let used = MemoryParts { swap: 2 * MIB, ..MemoryParts::default() };
        let some = Limits { swap_max_bytes: Some(4 * MIB), ..Limits::default() };
        let text = swaps(&some, &host(), &used);
        let words: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(words, ["none", "virtual", "4096", "2048", "0"]);
    }

    #[test]
    fn cpus_are_those_of_the_set_up_to_the_quota() {
        let of = |milli, set: Option<&str>| {
            let limits = Limits {
                cpu_max_milli: milli,
                cpuset_cpus: set.map(str::to_owned),
                ..Limits::default()
            };
            cpu_list(&cpus(&limits, "0-7\n"))
        };
        assert_eq!(of(None, None), "0-7\n");
        assert_eq!(of(Some(1500), None), "0-1\n");
        assert_eq!(of(Some(100), None), "0\n");
        assert_eq!(of(Some(64_000), None), "0-7\n");
        assert_eq!(of(None, Some("2,4-5")), "2,4-5\n");
        assert_eq!(of(Some(2000), Some("2,4-5")), "2,4\n");
        assert_eq!(of(None, Some("6-9")), "6-7\n", "offline CPUs are left out");
        assert_eq!(of(None, Some("9")), "0-7\n");
        assert_eq!(of(None, Some("0-4294967295")), "0-7\n", "no list");
    }

    #[test]
    fn cpuinfo_has_the_blocks_of_its_cpus() {
        let host = "processor\t: 0\nflags\t: a\n\nprocessor\t: 1\nflags\t: b\n\nprocessor\t: 10\nflags\t: c\n\n";
        assert_eq!(cpuinfo(&[1, 10], host), host.split_once("\n\n").unwrap().1);
        assert_eq!(cpuinfo(&[0, 1, 10], host), host);
        assert_eq!(cpuinfo(&[0], "vendor_id : IBM\n"), "vendor_id : IBM\n");
    }

    #[test]
    fn stat_divides_time_among_the_cpus() {
        let read = CpuReading {
            user_ns: 4_000_000_000,
            system_ns: 2_000_000_000,
            uptime_ns: 10_000_000_000,
            started_unix_s: 1_700_000_000,
            tasks: 7,
        };
        let text = stat(&[0, 1], &read);
        let words = |n: usize| text.lines().nth(n).unwrap().split_whitespace().collect::<Vec<_>>();
        assert_eq!(words(0)[..5], ["cpu", "400", "0", "200", "1400"]);
        assert_eq!(words(1)[..5], ["cpu0", "200", "0", "100", "700"]);
        assert_eq!(words(2)[0], "cpu1");
        assert!(text.starts_with("cpu  400"), "as the kernel, with two spaces");
        assert!(text.contains("\nbtime 1700000000\n"));
        let later = CpuReading { user_ns: u64::MAX / 2, uptime_ns: u64::MAX / 2, ..read };
        assert_eq!(stat(&[0, 1], &later).len(), text.len());
    }

    #[test]
    fn load_follows_use_at_any_interval() {
        let mut load = Load::begin(0);
        for second in 1..=120 {
            load.read(second * 2_000_000_000, second * 1_000_000_000);
        }
        let mut rare = Load::begin(0);
        rare.read(240_000_000_000, 120_000_000_000);
        for (often, rare) in load.averages.iter().zip(rare.averages) {
            assert!((often - rare).abs() < 0.01, "{often} {rare}");
        }
        assert!(load.text(3).starts_with("1.73 0.66 0.25 1/3 3 "), "{}", load.text(3));
        load.read(0, 121_000_000_000);
        assert!(load.averages.iter().all(|average| *average >= 0.0), "counters of a new life");
    }

    #[test]
    fn diskstats_has_the_devices_of_the_container() {
        let host = "   8       0 sda 1 2 3\n   8       1 sda1 1 2 3\n";
        let device = |minor| Device {
            major: 8,
            minor,
            read_bytes: 4096,
            written_bytes: 512,
            reads: 2,
            writes: 1,
        };
        let text = diskstats(&[device(1), device(7)], host);
        assert_eq!(text.lines().count(), 1, "a device without a name is left out");
        let words: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(words[..10], ["8", "1", "sda1", "2", "0", "8", "0", "1", "0", "1"]);
        assert_eq!(words.len(), 20);
    }
}
