//! Settings for the keeper, for wakes, for mounts, for contracts and for accounts: `[keeper]`, `[wake]`, `[run]`,
//! `[contract]` and `[account]` in `config.toml`.
//!
//! ```toml
//! [keeper]
//! linger = "10m"   # the keeper and what containers share stay so long after the last container
//! runners = 0      # processes that execute commands for their callers, at most 16; 0 is none
//!
//! [spares]
//! keep = 0   # parts of containers made ahead while containers come and go, at most 8; 0 is none
//!
//! [sleep]
//! warm = 0   # asleep containers for whose wake parts are kept, at most 1024; 0 is none
//!
//! [run]
//! default-volume = "noidmap"   # options of each -v HOST:CTR and --mount type=bind, before its own
//! log-driver = "k8s-file"      # of containers without --log-driver: k8s-file, file, none
//! barrier = true               # calls that reach out of a container are refused by security modules as well
//! pids = 2048                  # tasks of new containers without --pids, 0 for no limit
//!
//! [wake]
//! block = "64k"   # memory filled when a page of it is touched: a power of two, 4k to 1m
//! clients-wait = "forever"   # time until waiting clients of a container that cannot be woken are
//!                            # reset, such as "30s" or "10m"
//! within = "2m"   # longest time of a restore, plus a second for each 10 MB of memory
//! reserve = "0"   # memory of the host that a wake leaves free, such as "500m"
//! client-rate = "unlimited"   # wakes by new connections of one client address, such as "10/1m"
//! probers = []    # addresses and ranges whose connections wake no container
//!
//! [contract]
//! host-cpu-reserve = "5%"   # CPUs that containers cannot reserve: a percentage of all, or a number
//! cpu-scheduler = "kernel"   # "sched_ext": the daemon schedules all tasks of the host itself, where the kernel can
//! host-memory-reserve = "5%"   # memory that containers cannot reserve, or use beside a guarantee
//! service-debt = true   # clients pay for the work of shared services from their own share of CPU time
//! service-order = true   # a shared service has the connection next whose account had the least service
//!
//! [account]
//! every = "15m"   # how often the daemon charges what running containers have used, 1s to 1d
//! ```

use std::fs::Metadata;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use dormouse_launch::fill::{AROUND_BYTES, is_around};
use dormouse_model::{
    Cpus, Invalid, LogDriver, Size, TASKS_DEFAULT, TASKS_UNLIMITED, parse_bytes, parse_cpu_reserve,
    parse_span_ms,
};
use serde::Deserialize;

use crate::error::{Error, Result};

#[derive(Clone, Deserialize, Default)]
struct File {
    #[serde(default)]
    keeper: KeeperSection,
    #[serde(default)]
    spares: SparesSection,
    #[serde(default)]
    sleep: SleepSection,
    #[serde(default)]
    wake: Section,
    #[serde(default)]
    run: RunSection,
    #[serde(default)]
    contract: ContractSection,
    #[serde(default)]
    account: AccountSection,
}

#[derive(Clone, Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct SparesSection {
    #[serde(default)]
    keep: Keep,
}

/// LIMIT: spares at once. Each has a process, a slot and addresses, and 0.3 MB.
const SPARES_MAX: i64 = 8;

/// A number of spares. None by default: beside a busy processor, making them costs the starts more than it saves.
#[derive(Clone, Copy, Default, Deserialize)]
#[serde(try_from = "i64")]
struct Keep(usize);

impl TryFrom<i64> for Keep {
    type Error = Invalid;

    fn try_from(keep: i64) -> std::result::Result<Self, Invalid> {
        match keep {
            0..=SPARES_MAX => Ok(Self(keep as usize)),
            _ => Err(Invalid::new("keep", keep.to_string(), "a number from 0 to 8")),
        }
    }
}

#[derive(Clone, Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct SleepSection {
    #[serde(default)]
    warm: WarmMost,
}

/// LIMIT: warm sleepers. Each has a process, cgroups and mounts, 0.3 MB in all.
const WARM_MAX: i64 = 1024;

/// A number of warm sleepers; none by default.
#[derive(Clone, Copy, Default, Deserialize)]
#[serde(try_from = "i64")]
struct WarmMost(usize);

impl TryFrom<i64> for WarmMost {
    type Error = Invalid;

    fn try_from(warm: i64) -> std::result::Result<Self, Invalid> {
        match warm {
            0..=WARM_MAX => Ok(Self(warm as usize)),
            _ => Err(Invalid::new("warm", warm.to_string(), "a number from 0 to 1024")),
        }
    }
}

/// Returns how many asleep containers are kept warm at most.
pub(crate) fn warm(path: &Path) -> Result<usize> {
    Ok(read(path)?.sleep.warm.0)
}

/// Returns how many spares are kept at most while containers come and go.
pub(crate) fn spares(path: &Path) -> Result<usize> {
    Ok(read(path)?.spares.keep.0)
}

#[derive(Clone, Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct AccountSection {
    every: Option<String>,
}

/// How often running containers are charged by default.
const ACCOUNT_EVERY: Duration = Duration::from_secs(15 * 60);

/// Returns how often the daemon charges what running containers have used.
pub(crate) fn account_period(path: &Path) -> Result<Duration> {
    let Some(text) = read(path)?.account.every else { return Ok(ACCOUNT_EVERY) };
    match parse_span_ms(&text) {
        Some(ms @ 1_000..=86_400_000) => Ok(Duration::from_millis(ms.unsigned_abs())),
        _ => {
            let what =
                Invalid::new("period of accounts", text, "a time from 1s to 1d, such as 15m");
            Err(Error::Invalid(format!("{}: {what}", path.display())))
        }
    }
}

#[derive(Clone, Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ContractSection {
    host_cpu_reserve: Option<String>,
    #[serde(default)]
    cpu_scheduler: CpuScheduler,
    host_memory_reserve: Option<String>,
    images_memory: Option<String>,
    service_debt: Option<bool>,
    service_order: Option<bool>,
}

/// What decides which task runs.
#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
enum CpuScheduler {
    #[default]
    #[serde(rename = "kernel")]
    Kernel,
    #[serde(rename = "sched_ext")]
    SchedExt,
}

/// Returns whether the daemon is to schedule the tasks of the host.
pub(crate) fn has_scheduler(path: &Path) -> Result<bool> {
    Ok(read(path)?.contract.cpu_scheduler == CpuScheduler::SchedExt)
}

/// Returns whether clients pay for the work of shared services from their own share of CPU time.
pub(crate) fn charges_debts(path: &Path) -> Result<bool> {
    Ok(read(path)?.contract.service_debt.unwrap_or(true))
}

/// Returns whether connections of shared services are ordered by account.
pub(crate) fn orders_services(path: &Path) -> Result<bool> {
    Ok(read(path)?.contract.service_order.unwrap_or(true))
}

/// The part of the CPUs that is kept for the host by default: a twentieth.
const HOST_PART: u32 = 20;
/// The part of the memory of all containers that is kept for images, unless the operator sets another one.
pub(crate) const IMAGES_PART: u64 = 32;

/// Parses a percentage of `all`, such as `5%`.
fn part_of(all: u64, text: &str) -> Option<u64> {
    let digits = text.strip_suffix('%').filter(|text| text.bytes().all(|b| b.is_ascii_digit()))?;
    let percent = digits.parse::<u64>().ok().filter(|percent| *percent <= 100)?;
    Some((u128::from(all) * u128::from(percent) / 100) as u64)
}

/// Returns how much of `all_bytes` of memory is kept for the host.
pub(crate) fn host_memory_bytes(path: &Path, all_bytes: u64) -> Result<u64> {
    let Some(text) = read(path)?.contract.host_memory_reserve else {
        return Ok(all_bytes / u64::from(HOST_PART));
    };
    let size = || parse_bytes(&text).ok().filter(|bytes| *bytes <= all_bytes);
    part_of(all_bytes, &text).or_else(size).ok_or_else(|| {
        let what = format!(
            "host-memory-reserve '{text}' is not a percentage such as 5%, or a part such as 1g of the host's {}",
            Size(all_bytes)
        );
        Error::Invalid(format!("{}: {what}", path.display()))
    })
}

/// Returns how much of `room_bytes`, the memory of all containers together, is kept for page cache of images.
pub(crate) fn images_memory_bytes(path: &Path, room_bytes: u64) -> Result<u64> {
    let Some(text) = read(path)?.contract.images_memory else {
        return Ok(room_bytes / IMAGES_PART);
    };
    let size = || parse_bytes(&text).ok().filter(|bytes| *bytes <= room_bytes);
    part_of(room_bytes, &text).or_else(size).ok_or_else(|| {
        let what = format!(
            "images-memory '{text}' is not a percentage such as 3%, or a part such as 500m of the {} for containers",
            Size(room_bytes)
        );
        Error::Invalid(format!("{}: {what}", path.display()))
    })
}

/// Returns how many of `all_milli` CPUs are kept for the host, all in thousandths.
pub(crate) fn host_cpu_milli(path: &Path, all_milli: u32) -> Result<u32> {
    let Some(text) = read(path)?.contract.host_cpu_reserve else {
        return Ok(all_milli / HOST_PART);
    };
    let number = || parse_cpu_reserve(&text).ok().filter(|milli| *milli <= all_milli);
    let part = part_of(all_milli.into(), &text).map(|milli| milli as u32);
    part.or_else(number).ok_or_else(|| {
        let all = Cpus(all_milli);
        let what = format!(
            "host-cpu-reserve '{text}' is not a percentage such as 5%, or a number of the {all} CPUs"
        );
        Error::Invalid(format!("{}: {what}", path.display()))
    })
}

#[derive(Clone, Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct KeeperSection {
    #[serde(default)]
    linger: Linger,
    #[serde(default)]
    runners: Runners,
}

/// LIMIT: runners at once. Each has 5 MB, of which 4 are the program's text.
const RUNNERS_MAX: i64 = 16;

/// A number of runners.
#[derive(Clone, Copy, Default, Deserialize)]
#[serde(try_from = "i64")]
struct Runners(usize);

impl TryFrom<i64> for Runners {
    type Error = Invalid;

    fn try_from(number: i64) -> std::result::Result<Self, Invalid> {
        match number {
            0..=RUNNERS_MAX => Ok(Self(number as usize)),
            _ => Err(Invalid::new("runners", number.to_string(), "a number from 0 to 16")),
        }
    }
}

/// How long the keeper stays after the last container.
#[derive(Clone, Deserialize)]
#[serde(try_from = "String")]
struct Linger(Duration);

impl Linger {
    /// LIMIT: ten years; no clock of the kernel overflows with that.
    const MAX_MS: i64 = 10 * 366 * 86_400_000;
}

impl Default for Linger {
    /// A start after that time loads the BPF programs of its domain again, which takes ten times as
    /// long as the start itself.
    fn default() -> Self {
        Self(Duration::from_secs(600))
    }
}

impl TryFrom<String> for Linger {
    type Error = Invalid;

    fn try_from(text: String) -> std::result::Result<Self, Invalid> {
        match parse_span_ms(&text) {
            Some(ms @ 0..=Self::MAX_MS) => Ok(Self(Duration::from_millis(ms.unsigned_abs()))),
            _ => Err(Invalid::new("duration", text, "a time such as 0s, 30s or 10m")),
        }
    }
}

/// Returns how long the keeper stays after the last container.
pub(crate) fn linger(path: &Path) -> Result<Duration> {
    Ok(read(path)?.keeper.linger.0)
}

/// Returns how many commands are executed by runners at once.
pub(crate) fn runners(path: &Path) -> Result<usize> {
    Ok(read(path)?.keeper.runners.0)
}

#[derive(Clone, Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RunSection {
    default_volume: Option<String>,
    log_driver: Option<LogDriver>,
    barrier: Option<bool>,
    #[serde(default)]
    pids: Tasks,
}

/// A number of tasks; 0, and podman's -1, are no limit.
#[derive(Clone, Copy, Deserialize)]
#[serde(try_from = "i64")]
struct Tasks(Option<u32>);

impl Default for Tasks {
    fn default() -> Self {
        Self(Some(TASKS_DEFAULT))
    }
}

impl TryFrom<i64> for Tasks {
    type Error = Invalid;

    fn try_from(tasks: i64) -> std::result::Result<Self, Invalid> {
        match u32::try_from(tasks) {
            Ok(0) => Ok(Self(None)),
            Ok(tasks @ 1..=TASKS_UNLIMITED) => Ok(Self(Some(tasks))),
            _ if tasks == -1 => Ok(Self(None)),
            _ => Err(Invalid::new("pids", tasks.to_string(), "1 to 4194304, or 0 for no limit")),
        }
    }
}

/// The tasks of new containers without `--pids`; `None` is no limit.
pub(crate) fn default_pids(path: &Path) -> Result<Option<u32>> {
    Ok(read(path)?.run.pids.0)
}

/// The options before those of every mount of a host directory, in the form of `-v`.
pub(crate) fn default_volume(path: &Path) -> Result<String> {
    Ok(read(path)?.run.default_volume.unwrap_or_default())
}

/// Whether containers are put behind the barrier, where the kernel has what it needs.
pub(crate) fn barrier(path: &Path) -> Result<bool> {
    Ok(read(path)?.run.barrier.unwrap_or(true))
}

/// The log driver of containers without `--log-driver`.
pub(crate) fn log_driver(path: &Path) -> Result<LogDriver> {
    Ok(read(path)?.run.log_driver.unwrap_or_default())
}

/// The settings that were parsed last, with the state of their file. A wake needs several of them.
static LAST: Mutex<Option<(PathBuf, Stamp, File)>> = Mutex::new(None);

/// Device, inode, size, and the times of the last changes of contents and inode.
type Stamp = [u64; 7];

fn stamp(meta: &Metadata) -> Stamp {
    let times = [meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec()];
    let [a, b, c, d] = times.map(i64::cast_unsigned);
    [meta.dev(), meta.ino(), meta.size(), a, b, c, d]
}

/// LIMIT: a change of the file's contents, but not of its size, within one tick of the file system's clock after a
/// reading is not seen (some milliseconds; none since Linux 6.13).
fn read(path: &Path) -> Result<File> {
    let stamp = match std::fs::metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(File::default()),
        meta => stamp(&meta.map_err(Error::file("cannot read", path))?),
    };
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, _, file)) = last.as_ref().filter(|(of, at, _)| of == path && *at == stamp) {
        return Ok(file.clone());
    }
    // ORDER: after its state: a change in between is seen the next time.
    let text = std::fs::read_to_string(path).map_err(Error::file("cannot read", path))?;
    let file: File =
        toml::from_str(&text).map_err(|e| Error::Invalid(format!("{}: {e}", path.display())))?;
    *last = Some((path.to_owned(), stamp, file.clone()));
    Ok(file)
}

#[derive(Clone, Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Section {
    block: Option<String>,
    clients_wait: Option<String>,
    within: Option<String>,
    reserve: Option<String>,
    client_rate: Option<String>,
    #[serde(default)]
    probers: Vec<String>,
}

/// How often new connections of one client wake containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rate {
    /// So many at once.
    pub(crate) count: u32,
    /// The time in which as many are permitted again.
    pub(crate) period: Duration,
}

impl Rate {
    /// LIMIT: a day; no client waits longer for its next wake.
    const PERIOD_MAX: Duration = Duration::from_secs(86_400);

    fn parse(text: &str) -> Option<Self> {
        let (count, period) = text.split_once('/')?;
        let count = count.bytes().all(|b| b.is_ascii_digit()).then(|| count.parse().ok())??;
        let period = span(period)?;
        let fits = Duration::from_secs(1) <= period && period <= Self::PERIOD_MAX;
        (fits && (1..=1_000_000).contains(&count)).then_some(Self { count, period })
    }
}

/// A range of addresses: one, or `ADDRESS/BITS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    first: IpAddr,
    bits: u8,
}

impl Range {
    fn parse(text: &str) -> Option<Self> {
        let (first, bits) = match text.split_once('/') {
            None => (text, None),
            Some((first, bits)) => (first, Some(bits.parse().ok()?)),
        };
        let first: IpAddr = first.parse().ok()?;
        let most = if first.is_ipv4() { 32 } else { 128 };
        let bits = bits.unwrap_or(most);
        (bits <= most).then_some(Self { first, bits })
    }

    /// Returns whether an address lies in it.
    pub(crate) fn contains(self, address: IpAddr) -> bool {
        let cut = |number: u128, most: u8| {
            number.checked_shr(u32::from(most.saturating_sub(self.bits))).unwrap_or(0)
        };
        match (self.first.to_canonical(), address.to_canonical()) {
            (IpAddr::V4(a), IpAddr::V4(b)) => {
                cut(u32::from(a).into(), 32) == cut(u32::from(b).into(), 32)
            }
            (IpAddr::V6(a), IpAddr::V6(b)) => cut(a.into(), 128) == cut(b.into(), 128),
            _ => false,
        }
    }
}

/// Which clients do not wake a container, or not always.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Callers {
    /// `None`: each connection of other clients wakes.
    pub(crate) rate: Option<Rate>,
    /// Their connections wake no container.
    pub(crate) probers: Vec<Range>,
}

impl Callers {
    /// Returns whether the setting changes nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.rate.is_none() && self.probers.is_empty()
    }

    /// Returns whether an address is that of a prober.
    pub(crate) fn is_prober(&self, address: IpAddr) -> bool {
        self.probers.iter().any(|range| range.contains(address))
    }
}

/// Returns which clients do not wake a container, or not always.
pub(crate) fn callers(path: &Path) -> Result<Callers> {
    let Section { client_rate, probers, .. } = read(path)?.wake;
    let bad = |what: String| Error::Invalid(format!("{}: {what}", path.display()));
    let rate = match client_rate {
        Some(text) if text != "unlimited" => Some(Rate::parse(&text).ok_or_else(|| {
            bad(format!("client-rate '{text}' is not 'unlimited', or COUNT/TIME such as 10/1m"))
        })?),
        _ => None,
    };
    let range = |text: &String| {
        Range::parse(text).ok_or_else(|| {
            let expected = "an address such as 192.0.2.1, or a range such as 192.0.2.0/24";
            bad(format!("probers: '{text}' is not {expected}"))
        })
    };
    Ok(Callers { rate, probers: probers.iter().map(range).collect::<Result<_>>()? })
}

/// Returns how much memory of the host a wake leaves free, in bytes.
pub(crate) fn reserve_bytes(path: &Path) -> Result<u64> {
    let Some(text) = read(path)?.wake.reserve else { return Ok(0) };
    let bad = |e: dormouse_model::Invalid| format!("{}: reserve: {e}", path.display());
    parse_bytes(&text).map_err(|e| Error::Invalid(bad(e)))
}

/// The longest time of a restore, without its memory.
const WITHIN: Duration = Duration::from_secs(120);

/// Returns the longest time of a restore, without its memory.
pub(crate) fn within(path: &Path) -> Result<Duration> {
    let Some(text) = read(path)?.wake.within else { return Ok(WITHIN) };
    let limit = span(&text).filter(|limit| *limit >= Duration::from_secs(1));
    limit.ok_or_else(|| {
        let what = format!("within '{text}' is not a time of at least 1s, such as 30s or 10m");
        Error::Invalid(format!("{}: {what}", path.display()))
    })
}

/// Memory that a slow disk supplies in a second.
const BYTES_PER_SECOND_MIN: u64 = 10 << 20;

/// Returns the longest time of a restore of so much memory. Unreadable settings do not prevent a wake.
pub(crate) fn restore_limit(path: &Path, bytes: u64) -> Duration {
    let within = within(path).unwrap_or(WITHIN);
    within.saturating_add(Duration::from_secs(bytes / BYTES_PER_SECOND_MIN))
}

fn span(text: &str) -> Option<Duration> {
    parse_span_ms(text).and_then(|ms| u64::try_from(ms).ok()).map(Duration::from_millis)
}

/// Returns how long clients wait for a container whose wake fails; `None` if without limit.
pub(crate) fn clients_wait(path: &Path) -> Result<Option<Duration>> {
    let text = match read(path)?.wake.clients_wait {
        None => return Ok(None),
        Some(text) if text == "forever" => return Ok(None),
        Some(text) => text,
    };
    span(&text).map(Some).ok_or_else(|| {
        let expected = "'forever', or a time such as 30s or 10m";
        let what = format!("clients-wait '{text}' is not {expected}");
        Error::Invalid(format!("{}: {what}", path.display()))
    })
}

/// Returns how much memory is filled when a page of it is touched, in bytes.
pub(crate) fn block_bytes(path: &Path) -> Result<u64> {
    let Some(block) = read(path)?.wake.block else { return Ok(AROUND_BYTES) };
    let bad = |what: String| Error::Invalid(format!("{}: {what}", path.display()));
    let bytes = parse_bytes(&block).map_err(|e| bad(e.to_string()))?;
    match is_around(bytes) {
        true => Ok(bytes),
        false => Err(bad(format!("block '{block}' is no power of two from 4k to 1m"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn period_of_accounts_is_a_time_of_at_most_a_day() {
        let read = |text: &str| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), text).unwrap();
            account_period(file.path())
        };
        assert_eq!(read("").unwrap(), Duration::from_secs(900));
        assert_eq!(read("[account]\nevery = \"1h\"\n").unwrap(), Duration::from_secs(3600));
        for bad in ["0s", "999ms", "25h", "-1s", "often", ""] {
            let error = read(&format!("[account]\nevery = \"{bad}\"\n")).unwrap_err();
            assert!(error.to_string().contains("15m"), "{error}");
        }
        assert!(read("[account]\nevry = \"1h\"\n").is_err());
    }

    #[test]
    fn debts_are_charged_unless_switched_off() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = |text: &str| {
            std::fs::write(file.path(), text).unwrap();
            charges_debts(file.path())
        };
        assert!(read("").unwrap() && read("[contract]\nservice-debt = true\n").unwrap());
        assert!(!read("[contract]\nservice-debt = false\n").unwrap());
        assert!(read("[contract]\nservice-debt = \"off\"\n").is_err());
    }

    #[test]
    fn default_of_tasks_is_a_number_or_no_limit() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = |text: &str| {
            std::fs::write(file.path(), text).unwrap();
            default_pids(file.path())
        };
        assert_eq!(read("").unwrap(), Some(2048));
        assert_eq!(read("[run]\nlog-driver = \"none\"\n").unwrap(), Some(2048));
        for (text, tasks) in [("500", Some(500)), ("0", None), ("-1", None)] {
            assert_eq!(read(&format!("[run]\npids = {text}\n")).unwrap(), tasks, "{text}");
        }
        for bad in ["-2", "4194305", "9999999999999", "\"many\"", "1.5"] {
            let error = read(&format!("[run]\npids = {bad}\n")).unwrap_err().to_string();
            assert!(error.contains("pids"), "{error}");
        }
    }

    #[test]
    fn linger_is_a_time_of_at_most_ten_years() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = |text: &str| {
            std::fs::write(file.path(), text).unwrap();
            linger(file.path())
        };
        assert_eq!(read("").unwrap(), Duration::from_secs(600));
        assert_eq!(read("[keeper]\nlinger = \"0s\"\n").unwrap(), Duration::ZERO);
        assert_eq!(read("[keeper]\nlinger = \"1m30s\"\n").unwrap(), Duration::from_secs(90));
        for bad in ["10", "-1s", "forever", "99999d"] {
            let error = read(&format!("[keeper]\nlinger = \"{bad}\"\n")).unwrap_err();
            assert!(error.to_string().contains(bad), "{error}");
        }
        assert!(read("[keeper]\nlinger = 10\n").is_err());
        assert!(read("[keeper]\nlingers = \"1s\"\n").is_err());
    }

    #[test]
    fn number_of_runners_is_at_most_16() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = |text: &str| {
            std::fs::write(file.path(), text).unwrap();
            runners(file.path())
        };
        assert_eq!(read("").unwrap(), 0);
        assert_eq!(read("[keeper]\nrunners = 16\n").unwrap(), 16);
        for bad in ["17", "-1", "\"3\"", "1.5"] {
            assert!(read(&format!("[keeper]\nrunners = {bad}\n")).is_err(), "{bad}");
        }
    }

    #[test]
    fn number_of_spares_is_at_most_eight() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = |text: &str| {
            std::fs::write(file.path(), text).unwrap();
            spares(file.path())
        };
        assert_eq!(read("").unwrap(), 0);
        assert_eq!(read("[spares]\nkeep = 0\n").unwrap(), 0);
        assert_eq!(read("[spares]\nkeep = 3\n").unwrap(), 3);
        for bad in ["9", "-1", "\"3\"", "1.5"] {
            assert!(read(&format!("[spares]\nkeep = {bad}\n")).is_err(), "{bad}");
        }
        assert!(read("[spares]\ncount = 1\n").is_err());
    }

    #[test]
    fn number_of_warm_sleepers_is_at_most_1024() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = |text: &str| {
            std::fs::write(file.path(), text).unwrap();
            warm(file.path())
        };
        assert_eq!(read("").unwrap(), 0);
        assert_eq!(read("[sleep]\nwarm = 64\n").unwrap(), 64);
        for bad in ["1025", "-1", "\"3\"", "1.5"] {
            assert!(read(&format!("[sleep]\nwarm = {bad}\n")).is_err(), "{bad}");
        }
        assert!(read("[sleep]\nwarmth = 1\n").is_err());
    }

    #[test]
    fn host_memory_reserve_is_a_percentage_or_a_size() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let set = |text: &str| {
            let text = format!("[contract]\nhost-memory-reserve = \"{text}\"\n");
            std::fs::write(file.path(), text).unwrap();
            host_memory_bytes(file.path(), 1 << 30)
        };
        assert_eq!(set("50%").unwrap(), 512 << 20);
        assert_eq!(set("100m").unwrap(), 100 << 20);
        assert_eq!(set("0").unwrap(), 0);
        for bad in ["2g", "101%", "-1%", "much", "5 %"] {
            let error = set(bad).unwrap_err().to_string();
            assert!(error.contains("host-memory-reserve") && error.contains("1g"), "{error}");
        }
        std::fs::write(file.path(), "").unwrap();
        assert_eq!(host_memory_bytes(file.path(), 2000).unwrap(), 100);
    }

    #[test]
    fn scheduler_is_the_kernels_or_sched_ext() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let set = |text: &str| {
            let text = format!("[contract]\ncpu-scheduler = \"{text}\"\n");
            std::fs::write(file.path(), text).unwrap();
            has_scheduler(file.path())
        };
        assert!(!set("kernel").unwrap() && set("sched_ext").unwrap());
        let error = set("scx").unwrap_err();
        let text = error.with_causes();
        assert!(text.contains("cpu-scheduler") && text.contains("sched_ext"), "{text}");
        std::fs::write(file.path(), "").unwrap();
        assert!(!has_scheduler(file.path()).unwrap());
    }

    #[test]
    fn memory_of_images_is_a_percentage_or_a_size() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let set = |text: &str| {
            std::fs::write(file.path(), format!("[contract]\nimages-memory = \"{text}\"\n"))
                .unwrap();
            images_memory_bytes(file.path(), 1 << 30)
        };
        assert_eq!(["50%", "100m", "0"].map(|text| set(text).unwrap() >> 20), [512, 100, 0]);
        for bad in ["2g", "101%", "much"] {
            let error = set(bad).unwrap_err().to_string();
            assert!(error.contains("images-memory") && error.contains("500m"), "{error}");
        }
        std::fs::write(file.path(), "").unwrap();
        assert_eq!(images_memory_bytes(file.path(), 3200).unwrap(), 100);
    }

    #[test]
    fn host_reserve_is_a_percentage_or_a_number_of_cpus() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = |text: &str| {
            let text = format!("[contract]\nhost-cpu-reserve = \"{text}\"\n");
            std::fs::write(file.path(), text).unwrap();
            host_cpu_milli(file.path(), 2000)
        };
        assert_eq!(host_cpu_milli(file.path(), 2000).unwrap(), 100);
        assert_eq!(
            ["10%", "0%", "100%", "0.5", "0"].map(|t| read(t).unwrap()),
            [200, 0, 2000, 500, 0]
        );
        for bad in ["101%", "-1%", "+1%", "%", "", "2.5", "some"] {
            let error = read(bad).unwrap_err().to_string();
            assert!(error.contains("host-cpu-reserve") && error.contains("the 2 CPUs"), "{error}");
        }
        std::fs::write(file.path(), "[contract]\nhost-cpu = \"1\"\n").unwrap();
        assert!(host_cpu_milli(file.path(), 2000).is_err());
    }

    #[test]
    fn changed_file_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let (path, new) = (dir.path().join("config.toml"), dir.path().join("new"));
        let reserve = |text: &str| {
            std::fs::write(&new, format!("[wake]\nreserve = \"{text}\"\n")).unwrap();
            std::fs::rename(&new, &path).unwrap();
            reserve_bytes(&path)
        };
        assert_eq!(reserve_bytes(&path).unwrap(), 0, "no file");
        assert_eq!([reserve("1m").unwrap(), reserve_bytes(&path).unwrap()], [1 << 20; 2]);
        assert_eq!(reserve("2m").unwrap(), 2 << 20, "another inode of the same size");
        assert!(reserve("some").is_err() && reserve_bytes(&path).is_err());
        assert_eq!(reserve("300m").unwrap(), 300 << 20);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(reserve_bytes(&path).unwrap(), 0);
    }

    #[test]
    fn client_rate_and_probers_are_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = |text: &str| {
            std::fs::write(file.path(), format!("[wake]\n{text}\n")).unwrap();
            callers(file.path())
        };
        assert!(read("").unwrap().is_empty());
        assert!(read("client-rate = \"unlimited\"").unwrap().is_empty());
        let rate = Rate { count: 10, period: Duration::from_secs(60) };
        assert_eq!(read("client-rate = \"10/1m\"").unwrap().rate, Some(rate));
        for bad in ["10", "0/1m", "-1/1m", "+1/1m", "10/", "10/1", "/1m", "1/10ms", "1/2d"] {
            let error = read(&format!("client-rate = \"{bad}\"")).unwrap_err().to_string();
            assert!(error.contains(&format!("'{bad}'")) && error.contains("10/1m"), "{error}");
        }
        let probers = read("probers = [\"192.0.2.7\", \"10.0.0.0/8\", \"2001:db8::/32\"]").unwrap();
        let is_one = |text: &str| probers.is_prober(text.parse().unwrap());
        for one in ["192.0.2.7", "::ffff:192.0.2.7", "10.255.1.2", "2001:db8:1::5"] {
            assert!(is_one(one), "{one}");
        }
        for other in ["192.0.2.6", "11.0.0.1", "2001:db9::1", "::1", "::c000:207"] {
            assert!(!is_one(other), "{other}");
        }
        let all = read("probers = [\"0.0.0.0/0\"]").unwrap();
        assert!(all.is_prober("1.2.3.4".parse().unwrap()));
        assert!(!all.is_prober("::1".parse().unwrap()));
        for bad in ["x", "1.2.3.4/33", "::/129", "1.2.3.4/", "host.example"] {
            let error = read(&format!("probers = [\"{bad}\"]")).unwrap_err().to_string();
            assert!(error.contains(&format!("'{bad}'")), "{error}");
        }
    }

    #[test]
    fn block_size_is_power_of_two_within_bounds() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = |text: &str| {
            std::fs::write(file.path(), text).unwrap();
            block_bytes(file.path())
        };
        assert_eq!(read("[daemon]\nmemory = \"off\"\n").unwrap(), AROUND_BYTES);
        assert_eq!(read("[wake]\nblock = \"4k\"\n").unwrap(), 4096);
        for bad in ["5k", "2k", "2m", "much"] {
            let error = read(&format!("[wake]\nblock = \"{bad}\"\n")).unwrap_err();
            assert!(error.to_string().contains(bad), "{error}");
        }
        assert!(read("[run]\ndefault-volumes = \"ro\"\n").is_err());
        assert!(read("[wake]\nblocks = \"4k\"\n").is_err());
        let wait = |text: &str| {
            std::fs::write(file.path(), format!("[wake]\nclients-wait = \"{text}\"\n")).unwrap();
            clients_wait(file.path())
        };
        assert_eq!(wait("forever").unwrap(), None);
        assert_eq!(wait("1m30s").unwrap(), Some(Duration::from_secs(90)));
        std::fs::write(file.path(), "[wake]\nwithin = \"1m\"\n").unwrap();
        assert_eq!(within(file.path()).unwrap(), Duration::from_secs(60));
        std::fs::write(file.path(), "[wake]\nwithin = \"10ms\"\n").unwrap();
        assert!(within(file.path()).unwrap_err().to_string().contains("'10ms'"));
        std::fs::write(file.path(), "[wake]\nreserve = \"2g\"\n").unwrap();
        assert_eq!(reserve_bytes(file.path()).unwrap(), 2 << 30);
        std::fs::write(file.path(), "[wake]\nreserve = \"some\"\n").unwrap();
        assert!(reserve_bytes(file.path()).unwrap_err().to_string().contains("'some'"));
        assert_eq!(wait("0s").unwrap(), Some(Duration::ZERO), "no client waits");
        let error = wait("long").unwrap_err().to_string();
        assert!(error.contains("'long'") && error.contains("forever"), "{error}");
        assert_eq!(block_bytes(Path::new("/no/such/file")).unwrap(), AROUND_BYTES);
    }
}
