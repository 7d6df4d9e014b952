//! Resource limits: `--memory`, `--memory-min`, `--memory-low`,
//! `--memory-high`, `--memory-swap`, `--pids`, `--sockets`, `--cpus`, `--cpu-reserve`, `--cpu-period`,
//! `--cpu-idle-rate`, `--cpu-burst`, `--cpu-weight`, `--cpu-shares`, `--cpuset-cpus`, `--io-weight`,
//! `--io-read-bps` and its like, `--disk`, `--inodes`, `--disk-guaranteed`, `--net-rate`, `--net-ceil`,
//! `--net-weight`, `--ulimit`, `--umask`.

use dormouse_kernel::call::Namespace;
use dormouse_kernel::{proc, sysctl};
use dormouse_model::{
    CpuBurst, DiskRate, DiskRateKind, Drive, Limits, Rlimit, TASKS_UNLIMITED, parse_bytes,
    parse_cpu_idle_rate, parse_cpu_period_us, parse_cpu_reserve, parse_cpus, parse_net_rate,
    parse_net_weight,
};

use super::Invalid;

/// The limits of `run`, `create` and `update`, as given on the command line.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Limits")]
pub(crate) struct LimitArgs {
    /// The most CPU time, in CPUs (0.5 is half of one)
    #[arg(long, value_name = "NUMBER")]
    pub(crate) cpus: Option<String>,
    /// CPU time that is guaranteed, in CPUs, 0 for none
    ///
    /// The container gets so much whenever it has work, and its share (--cpu-weight) of the CPU time that is
    /// not reserved. CPU time that it does not use goes to other containers. The sum over all running
    /// containers is at most the CPUs of the host without its own part ([contract] host-cpu-reserve in
    /// config.toml, 5%). Without `dormouse daemon` the guarantee is a share of the CPU time that all
    /// containers together get, and time that the container slept is not made up for.
    #[arg(long, value_name = "NUMBER")]
    pub(crate) cpu_reserve: Option<String>,
    /// The most CPU time while the host has idle CPUs, in CPUs, 0 for that of --cpus
    ///
    /// More than --cpus, which it needs. Kept by `dormouse daemon`: it raises the limit while CPUs are idle, and
    /// lowers it within 200 ms when others want them. A twentieth of the CPUs, at least a fifth of one, stays free.
    #[arg(long, value_name = "NUMBER")]
    pub(crate) cpu_idle_rate: Option<String>,
    /// Period in which --cpus is counted, 1ms to 1s, or in microseconds (default 100ms)
    ///
    /// Periods below 10ms lose some 5 % of the CPU time.
    #[arg(long, value_name = "TIME")]
    pub(crate) cpu_period: Option<String>,
    /// CPU time of idle periods that may be used above --cpus, as a time or a part of a period's (default 100%)
    ///
    /// 20ms, 50%, a number of microseconds, or 0 for none. At most the CPU time of one period.
    #[arg(long, value_name = "TIME|PERCENT")]
    pub(crate) cpu_burst: Option<String>,
    /// Share of contended CPU time, 1 to 10000 (default 100), or idle
    ///
    /// With 'idle' the container runs while no other container wants the CPU.
    #[arg(long, value_name = "WEIGHT")]
    pub(crate) cpu_weight: Option<String>,
    /// Share of contended CPU time on the old scale, 2 to 262144
    #[arg(long, value_name = "SHARES", hide = true, conflicts_with = "cpu_weight")]
    pub(crate) cpu_shares: Option<String>,
    /// CPUs it may run on (0-3,7)
    #[arg(long, value_name = "LIST")]
    pub(crate) cpuset_cpus: Option<String>,
    /// Memory (512m, 2g)
    #[arg(long, short = 'm', value_name = "SIZE")]
    pub(crate) memory: Option<String>,
    /// Memory that is guaranteed (512m), 0 for none
    ///
    /// Neither other containers nor the host take it, also not the pages of files. The sum over all running
    /// containers is at most 15/16 of the memory of the host without its own part ([contract] host-memory-reserve
    /// in config.toml, 5%). On cgroup v1 it is kept by limits for the other containers, and beside several that
    /// grow by `dormouse daemon`.
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory_min: Option<String>,
    /// Memory that is reclaimed last (512m), 0 for none
    #[arg(long, value_name = "SIZE", alias = "memory-reservation")]
    pub(crate) memory_low: Option<String>,
    /// Memory above which the container is slowed down, and never killed (512m); cgroup v2 only
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory_high: Option<String>,
    /// Memory and swap together, -1 for swap without limit (default twice the memory)
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) memory_swap: Option<String>,
    /// Tasks: processes and threads, 0 for no limit (default 2048)
    ///
    /// 'pids' under [run] in config.toml is another default for new containers.
    #[arg(long, value_name = "NUMBER", alias = "pids-limit", allow_hyphen_values = true)]
    pub(crate) pids: Option<String>,
    /// Sockets of IPv4 and IPv6 that it has at a time, 0 for no limit
    ///
    /// Accepted connections count, and closed ones until the other side knows. At the limit socket() fails with
    /// EMFILE. New connections wait as behind a full backlog until another socket is closed.
    #[arg(long, value_name = "NUMBER")]
    pub(crate) sockets: Option<String>,
    /// Share of contended disk time, 1 to 10000 (default 100)
    #[arg(long, value_name = "WEIGHT", alias = "blkio-weight")]
    pub(crate) io_weight: Option<String>,
    /// The most bytes read per second from the disk with its storage, or from DEVICE (10m), 0 for no limit
    ///
    /// A part of a disk stands for the disk. 64k at least: a process that waits for the disk can be neither
    /// frozen nor checkpointed.
    #[arg(long, value_name = "[DEVICE:]RATE", alias = "device-read-bps")]
    pub(crate) io_read_bps: Vec<String>,
    /// The most bytes written per second, as --io-read-bps
    ///
    /// On cgroup v1 the kernel does not count writes through the page cache for a container, but those with
    /// O_DIRECT or O_SYNC. `run`, `inspect` and `check` say so.
    #[arg(long, value_name = "[DEVICE:]RATE", alias = "device-write-bps")]
    pub(crate) io_write_bps: Vec<String>,
    /// The most requests per second that read, as --io-read-bps
    #[arg(long, value_name = "[DEVICE:]NUMBER", alias = "device-read-iops")]
    pub(crate) io_read_iops: Vec<String>,
    /// The most requests per second that write, as --io-write-bps
    #[arg(long, value_name = "[DEVICE:]NUMBER", alias = "device-write-iops")]
    pub(crate) io_write_iops: Vec<String>,
    /// Size of the file system with all that the container writes outside of volumes (10g)
    ///
    /// The container gets an ext4 of its own, in a file that takes place as files are written. A full one refuses
    /// writes in this container alone (ENOSPC). A container that is made without --disk has no limit, and can get none
    /// later. `update` makes it larger: at once where the container does not run or the host permits that, and
    /// otherwise when it stops or falls asleep. Needs e2fsprogs.
    #[arg(long, value_name = "SIZE")]
    pub(crate) disk: Option<String>,
    /// Files and directories on the disk of --disk, rounded up (default one for each 16k)
    #[arg(long, value_name = "NUMBER")]
    pub(crate) inodes: Option<String>,
    /// Take the place of --disk at once, so that it is never missing
    ///
    /// Refused where it does not fit into the free space of the store. Without it other containers and the host may
    /// need that place first.
    #[arg(long)]
    pub(crate) disk_guaranteed: bool,
    /// size=SIZE and inodes=NUMBER, podman's spelling of --disk and --inodes
    #[arg(long, value_name = "NAME=VALUE", hide = true)]
    pub(crate) storage_opt: Vec<String>,
    /// Bandwidth that is guaranteed at the uplink of its domain, in each direction (10mbit), 0 for none
    ///
    /// The sum over all running containers is at most 'uplink-rate' under [network] in config.toml, which has to
    /// be set. Bandwidth that is not used goes to other containers. The guarantee holds among the containers of one
    /// trust domain.
    #[arg(long, value_name = "RATE")]
    pub(crate) net_rate: Option<String>,
    /// The most bandwidth at the uplink of its domain, in each direction (100mbit), 0 for no limit
    ///
    /// Traffic between containers of one trust domain does not leave it, and has no limit.
    #[arg(long, value_name = "RATE")]
    pub(crate) net_ceil: Option<String>,
    /// Share of the bandwidth that is not guaranteed, 100 to 10000 (default 100)
    #[arg(long, value_name = "WEIGHT")]
    pub(crate) net_weight: Option<String>,
}

impl LimitArgs {
    /// Converts the limits to the kernel's units; missing ones stay `None`.
    pub(crate) fn read(&self) -> Result<Limits, Invalid> {
        let text = |o: &Option<String>| o.as_deref().map(str::trim).map(str::to_owned);
        let memory_max_bytes = match text(&self.memory) {
            None => None,
            Some(t) => {
                let bytes = parse_bytes(&t)?;
                if bytes < MEMORY_MIN_BYTES {
                    return Err(Invalid::new("memory limit", t, "at least 512k"));
                }
                Some(bytes)
            }
        };
        let cpu_weight = match (&self.cpu_weight, &self.cpu_shares) {
            (Some(w), _) if w.trim() == "idle" => Some(0),
            (Some(w), _) => Some(cpu_weight_of(w)?),
            (None, Some(s)) => Some(weight_of_shares(s)?),
            (None, None) => None,
        };
        let (disk_bytes, disk_inodes) = self.drive()?;
        Ok(Limits {
            cpu_max_milli: self.cpus.as_deref().map(parse_cpus).transpose()?,
            cpu_reserve_milli: self.cpu_reserve.as_deref().map(parse_cpu_reserve).transpose()?,
            cpu_idle_rate_milli: self
                .cpu_idle_rate
                .as_deref()
                .map(parse_cpu_idle_rate)
                .transpose()?,
            cpu_period_us: text(&self.cpu_period).map(|t| parse_cpu_period_us(&t)).transpose()?,
            cpu_burst: text(&self.cpu_burst).map(|t| t.parse::<CpuBurst>()).transpose()?,
            cpu_weight,
            cpuset_cpus: self.cpuset_cpus.as_deref().map(cpu_list).transpose()?,
            memory_max_bytes,
            memory_min_bytes: text(&self.memory_min).map(|t| parse_bytes(&t)).transpose()?,
            memory_low_bytes: text(&self.memory_low).map(|t| parse_bytes(&t)).transpose()?,
            memory_high_bytes: text(&self.memory_high).map(|t| parse_bytes(&t)).transpose()?,
            swap_max_bytes: swap(self.memory_swap.as_deref(), memory_max_bytes)?,
            pids_max: self.pids.as_deref().map(pids).transpose()?,
            sockets_max: self.sockets.as_deref().map(sockets).transpose()?,
            io_weight: self.io_weight.as_deref().map(|w| weight("disk weight", w)).transpose()?,
            disk_rates: self.disk_rates()?,
            disk_bytes,
            disk_inodes,
            disk_guaranteed: self.disk_guaranteed,
            net_rate_bps: self.net_rate.as_deref().map(parse_net_rate).transpose()?,
            net_ceil_bps: self.net_ceil.as_deref().map(parse_net_rate).transpose()?,
            net_weight: self.net_weight.as_deref().map(parse_net_weight).transpose()?,
        })
    }

    /// The rates of disks, in which 0 removes one.
    fn disk_rates(&self) -> Result<Vec<DiskRate>, Invalid> {
        let options = [
            (DiskRateKind::ReadBps, &self.io_read_bps),
            (DiskRateKind::WriteBps, &self.io_write_bps),
            (DiskRateKind::ReadIops, &self.io_read_iops),
            (DiskRateKind::WriteIops, &self.io_write_iops),
        ];
        let all =
            options.into_iter().flat_map(|(kind, texts)| texts.iter().map(move |t| (kind, t)));
        all.map(|(kind, text)| DiskRate::parse(kind, text)).collect()
    }

    /// The size of the disk, and its number of files.
    fn drive(&self) -> Result<(Option<u64>, Option<u32>), Invalid> {
        let (mut size, mut inodes) = (self.disk.as_deref(), self.inodes.as_deref());
        for option in self.storage_opt.iter().flat_map(|options| options.split(',')) {
            let expected = "size=SIZE or inodes=NUMBER, each once";
            let bad = || Invalid::new("storage option", option, expected);
            let (name, value) = option.split_once('=').ok_or_else(bad)?;
            let place = match name.trim() {
                "size" => &mut size,
                "inodes" => &mut inodes,
                _ => return Err(bad()),
            };
            if place.replace(value).is_some() {
                return Err(bad());
            }
        }
        Ok((
            size.map(Drive::parse_bytes).transpose()?,
            inodes.map(Drive::parse_inodes).transpose()?,
        ))
    }

    /// The limits of a new container.
    pub(crate) fn read_new(&self) -> Result<Limits, Invalid> {
        let mut limits = Limits::default();
        limits.replace(&self.read()?);
        Ok(limits)
    }
}

/// LIMIT: below this no program starts, and the kernel refuses the limit or kills at once.
const MEMORY_MIN_BYTES: u64 = 512 << 10;

/// Reads a weight on the kernel's scale.
fn weight(what: &'static str, text: &str) -> Result<u32, Invalid> {
    let weight = text.trim().parse().ok().filter(|w| (1..=10_000).contains(w));
    weight.ok_or_else(|| Invalid::new(what, text, "a number from 1 to 10000"))
}

fn cpu_weight_of(text: &str) -> Result<u32, Invalid> {
    let weight = text.trim().parse().ok().filter(|w| (1..=10_000).contains(w));
    weight.ok_or_else(|| Invalid::new("CPU weight", text, "a number from 1 to 10000, or idle"))
}

/// Converts `cpu.shares` of cgroup v1 to `cpu.weight`, as the OCI runtimes do.
fn weight_of_shares(text: &str) -> Result<u32, Invalid> {
    let shares = text.trim().parse::<u32>().ok().filter(|s| (2..=262_144).contains(s));
    let shares = shares.ok_or_else(|| Invalid::new("CPU shares", text, "2 to 262144"))?;
    Ok((1 + (u64::from(shares - 2) * 9_999) / 262_142) as u32)
}

/// Returns swap without the memory: podman's `--memory-swap` counts both, and is twice the memory
/// by default.
fn swap(text: Option<&str>, memory: Option<u64>) -> Result<Option<u64>, Invalid> {
    let expected = "a size no smaller than --memory, which must be given too, or -1";
    match (text.map(str::trim), memory) {
        (None | Some("0"), memory) => Ok(memory),
        (Some("-1"), _) => Ok(None),
        (Some(t), Some(memory)) => {
            let swap = parse_bytes(t)?.checked_sub(memory);
            Ok(Some(swap.ok_or_else(|| Invalid::new("memory and swap", t, expected))?))
        }
        (Some(t), None) => Err(Invalid::new("memory and swap", t, expected)),
    }
}

/// Reads a number of tasks; `0`, and podman's `-1`, are no limit.
fn pids(text: &str) -> Result<u32, Invalid> {
    match text.trim() {
        "0" | "-1" => Ok(TASKS_UNLIMITED),
        t => {
            let max = t.parse().ok().filter(|n| (1..=TASKS_UNLIMITED).contains(n));
            max.ok_or_else(|| Invalid::new("number of tasks", t, "1 to 4194304, or 0 for no limit"))
        }
    }
}

/// LIMIT: sockets of a container; more than any kernel has memory for.
const SOCKETS_MAX: u32 = 100_000_000;

/// Reads a number of sockets; 0 is no limit.
fn sockets(text: &str) -> Result<u32, Invalid> {
    let most = text.trim().parse().ok().filter(|most| *most <= SOCKETS_MAX);
    most.ok_or_else(|| Invalid::new("number of sockets", text, "1 to 100000000, or 0 for no limit"))
}

/// Checks a list of CPUs such as `0-3,7`.
fn cpu_list(text: &str) -> Result<String, Invalid> {
    let bad = || Invalid::new("list of CPUs", text, "numbers and ranges such as 0-3,7");
    let runs = proc::cpu_runs(text).filter(|runs| runs.iter().all(|(_, last)| *last < 8192));
    runs.ok_or_else(bad)?;
    Ok(text.to_owned())
}

/// The resource names of setrlimit(2), in lower case.
const RLIMITS: [&str; 16] = [
    "as",
    "core",
    "cpu",
    "data",
    "fsize",
    "locks",
    "memlock",
    "msgqueue",
    "nice",
    "nofile",
    "nproc",
    "rss",
    "rtprio",
    "rttime",
    "sigpending",
    "stack",
];

/// Reads one `--ulimit NAME=SOFT[:HARD]`; `-1` and `unlimited` are no limit.
pub(crate) fn ulimit(text: &str) -> Result<Rlimit, Invalid> {
    let bad = || {
        Invalid::new("ulimit", text, "NAME=SOFT[:HARD], a name of setrlimit(2) such as nofile=1024")
    };
    let (name, values) = text.split_once('=').ok_or_else(bad)?;
    let name = name.to_ascii_lowercase();
    let name = name.strip_prefix("rlimit_").unwrap_or(&name);
    if !RLIMITS.contains(&name) {
        return Err(bad());
    }
    let value = |s: &str| match s {
        "-1" | "unlimited" => Ok(u64::MAX),
        s => s.parse().map_err(|_| bad()),
    };
    let (soft, hard) = values.split_once(':').unwrap_or((values, values));
    let (soft, hard) = (value(soft)?, value(hard)?);
    if soft > hard {
        return Err(bad());
    }
    Ok(Rlimit { name: name.to_owned(), soft, hard })
}

/// Reads an octal `--umask`.
pub(crate) fn umask(text: &str) -> Result<u32, Invalid> {
    let mask = u32::from_str_radix(text, 8).ok().filter(|m| *m <= 0o777 && !text.starts_with('+'));
    mask.ok_or_else(|| Invalid::new("umask", text, "an octal number up to 0777"))
}

/// Reads one `--sysctl NAME=VALUE`. Permits only sysctls of the container's own namespaces
/// (ipc_namespaces(7), uts_namespaces(7), network_namespaces(7)). With `own_network` its network
/// stack is one of them.
pub(crate) fn sysctl(text: &str, own_network: bool) -> Result<(String, String), Invalid> {
    let bad = |expected| Invalid::new("sysctl", text, expected);
    let (name, value) = text.split_once('=').ok_or_else(|| bad("NAME=VALUE"))?;
    if sysctl::path(name).is_none() || !sysctl::is_value(value) {
        return Err(bad("NAME=VALUE"));
    }
    match sysctl::owner(name) {
        Some(Namespace::Net) if !own_network => Err(bad(
            "its network stack is not the container's own: add --net private, or --net none",
        )),
        Some(_) => Ok((name.to_owned(), value.to_owned())),
        None => Err(bad("one of the container's own namespaces: kernel.shm*, kernel.msg*, \
                         kernel.sem, kernel.pid_max, fs.mqueue.*, user.max_*, net.*")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(memory: Option<&str>, swap: Option<&str>) -> Result<Limits, Invalid> {
        let own = |o: Option<&str>| o.map(str::to_owned);
        LimitArgs { memory: own(memory), memory_swap: own(swap), ..LimitArgs::default() }.read()
    }

    #[test]
    fn swap_is_what_exceeds_memory() {
        let of = |m, s| limits(m, s).map(|l| (l.memory_max_bytes, l.swap_max_bytes));
        assert_eq!(of(None, None), Ok((None, None)));
        assert_eq!(of(Some("1g"), None), Ok((Some(1 << 30), Some(1 << 30))));
        assert_eq!(of(Some("1g"), Some("1g")), Ok((Some(1 << 30), Some(0))));
        assert_eq!(of(Some("1g"), Some("3g")), Ok((Some(1 << 30), Some(2 << 30))));
        assert_eq!(of(Some("1g"), Some("-1")), Ok((Some(1 << 30), None)));
        for (m, s) in [(None, "1g"), (Some("2g"), "1g"), (Some("1g"), "-2"), (Some("1g"), "x")] {
            assert!(of(m, Some(s)).is_err(), "{m:?} {s}");
        }
        assert!(of(Some("100k"), None).is_err());
        assert!(of(Some("-1"), None).is_err());
    }

    #[test]
    fn cpu_contract_is_read_in_the_units_of_the_kernel() {
        let own = |text: &str| Some(text.to_owned());
        let args = LimitArgs {
            cpu_reserve: own("0.5"),
            cpu_idle_rate: own("1.5"),
            cpu_weight: own("idle"),
            cpu_period: own("10000"),
            cpu_burst: own("50%"),
            ..LimitArgs::default()
        };
        let limits = args.read().unwrap();
        assert_eq!((limits.cpu_reserve_milli, limits.cpu_period_us), (Some(500), Some(10_000)));
        assert_eq!(limits.cpu_burst, Some(CpuBurst::Percent(50)));
        assert_eq!((limits.cpu_idle_rate_milli, limits.cpu_weight), (Some(1500), Some(0)));
        for bad in ["0", "10001", "Idle", ""] {
            let weight = LimitArgs { cpu_weight: own(bad), ..LimitArgs::default() };
            assert!(weight.read().is_err(), "{bad}");
        }
        for bad in ["-1", "x", ""] {
            let reserve = LimitArgs { cpu_reserve: own(bad), ..LimitArgs::default() };
            let period = LimitArgs { cpu_period: own(bad), ..LimitArgs::default() };
            let burst = LimitArgs { cpu_burst: own(bad), ..LimitArgs::default() };
            assert!([reserve, period, burst].iter().all(|args| args.read().is_err()), "{bad}");
        }
    }

    #[test]
    fn disk_is_read_in_both_spellings() {
        let read = |disk: Option<&str>, options: &[&str]| {
            let storage_opt = options.iter().map(ToString::to_string).collect();
            let disk = disk.map(str::to_owned);
            LimitArgs { disk, storage_opt, ..LimitArgs::default() }.read()
        };
        let of = |disk, options| read(disk, options).map(|it| (it.disk_bytes, it.disk_inodes));
        assert_eq!(of(None, &[]), Ok((None, None)));
        assert_eq!(of(Some("64m"), &[]), Ok((Some(64 << 20), None)));
        assert_eq!(of(None, &["size=1G,inodes=500"]), Ok((Some(1 << 30), Some(500))));
        assert_eq!(of(Some("1g"), &["inodes=64"]), Ok((Some(1 << 30), Some(64))));
        for bad in [&["size=1g", "size=2g"][..], &["size"], &["x=1"], &["size=1"], &[""]] {
            assert!(of(None, bad).is_err(), "{bad:?}");
        }
        assert!(of(Some("1g"), &["size=1g"]).is_err());
    }

    #[test]
    fn weights_and_task_counts_are_parsed_or_refused() {
        assert_eq!(weight("w", "10000"), Ok(10_000));
        assert_eq!(weight_of_shares("1024"), Ok(39));
        assert_eq!(weight_of_shares("262144"), Ok(10_000));
        assert_eq!(pids("-1"), Ok(TASKS_UNLIMITED));
        assert_eq!(pids("100"), Ok(100));
        assert_eq!(pids("0"), Ok(TASKS_UNLIMITED));
        for bad in ["", "-0", "-2", "0x10", "5000000", "1.5", " "] {
            assert!(pids(bad).is_err(), "{bad}");
        }
        assert_eq!((sockets("0"), sockets("1000")), (Ok(0), Ok(1000)));
        for bad in ["", "-1", "1.5", "100000001", "many"] {
            assert!(sockets(bad).is_err(), "{bad}");
        }
        for bad in ["", "0", "10001", "-1", "x"] {
            assert!(weight("w", bad).is_err(), "{bad}");
        }
        for (good, bad) in [("0", ""), ("0-3,7", "3-1"), ("0,1", "0,"), ("63", "1-"), ("1", "a")] {
            assert!(cpu_list(good).is_ok(), "{good}");
            assert!(cpu_list(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ulimit_is_parsed_or_refused() {
        let of = |t| ulimit(t).map(|r| (r.name, r.soft, r.hard));
        assert_eq!(of("nofile=1024:2048"), Ok(("nofile".into(), 1024, 2048)));
        assert_eq!(of("core=0"), Ok(("core".into(), 0, 0)));
        assert_eq!(of("RLIMIT_NPROC=5:-1"), Ok(("nproc".into(), 5, u64::MAX)));
        for bad in ["", "nofile", "nofile=", "nofile=2:1", "x=1", "nofile=1:2:3", "nofile=-2"] {
            assert!(ulimit(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn umask_is_octal_up_to_0777() {
        assert_eq!(umask("0022"), Ok(0o22));
        for bad in ["", "8", "-1", "1000", "0x1", "+22"] {
            assert!(umask(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sysctl_outside_own_namespaces_is_refused() {
        assert!(sysctl("kernel.shmmax=1", false).is_ok());
        assert!(sysctl("fs.mqueue.msg_max=20", false).is_ok());
        assert!(sysctl("net.ipv4.ip_forward=1", true).is_ok());
        for bad in [
            "net.ipv4.ip_forward=1",
            "kernel.core_pattern=|/x",
            "kernel.shmmax",
            "vm.swappiness=1",
            "fs.mqueue./../../kernel.core_pattern=x",
            "net.../x=1",
            "=1",
            "kernel.sem=1\n2",
        ] {
            assert!(sysctl(bad, false).is_err(), "{bad}");
        }
    }

    proptest::proptest! {
        #[test]
        fn limit_parsers_accept_or_refuse_any_text(text in "[-+0-9a-zA-Z=:,. ]{0,24}|.*") {
            if let Ok(r) = ulimit(&text) {
                proptest::prop_assert!(r.soft <= r.hard);
            }
            if let Ok(m) = umask(&text) {
                proptest::prop_assert!(m <= 0o777);
            }
            if let Ok((name, _)) = sysctl(&text, true) {
                proptest::prop_assert!(sysctl::owner(&name).is_some());
            }
            let _ = (pids(&text), cpu_list(&text), weight_of_shares(&text));
            let _ = limits(Some(&text), Some(&text));
        }
    }
}
