//! Guarantees of memory: what is refused, which limits are written, and what stays in memory beside containers that
//! read large files.

use std::fs;
use std::path::PathBuf;

use dormouse_testkit::{Host, soon, wait_until};

use crate::contracts::{Daemon, id, start};

/// Memory of all containers together, while one has a guarantee.
const ROOM_MB: u64 = 400;
/// A command that does nothing for a long time.
const SLEEP: &[&str] = &["busybox", "sleep", "100000"];

/// The memory of this machine, in bytes.
fn all_bytes() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").expect("proc_meminfo(5)");
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:")).expect("all memory");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

/// A host that keeps all memory for itself but [`ROOM_MB`].
#[track_caller]
fn small_host() -> Host {
    let host = Host::with_busybox();
    let config = host.root().join("etc/config.toml");
    let text = fs::read_to_string(&config).expect("the settings");
    let kept = all_bytes() - (ROOM_MB << 20);
    let section = format!("[contract]\nhost-memory-reserve = \"{kept}\"\n");
    fs::write(&config, text + &section).expect("written");
    host
}

/// Reads a file of a container's memory cgroup, or of the one above (""), by its name in v1 or in v2.
#[track_caller]
fn read(host: &Host, below: &str, v1: &str, v2: &str) -> String {
    let places = host.cgroups();
    let files = places.iter().flat_map(|dir| [dir.join(below).join(v1), dir.join(below).join(v2)]);
    let all: Vec<PathBuf> = files.collect();
    all.iter()
        .find_map(|file| fs::read_to_string(file).ok())
        .unwrap_or_else(|| panic!("none of {all:?}"))
}

/// The limit of a container or of all (""), in megabytes; `None` without one.
#[track_caller]
fn limit_mb(host: &Host, below: &str) -> Option<u64> {
    let text = read(host, below, "memory.limit_in_bytes", "memory.max");
    let bytes = text.trim().parse::<u64>().ok().filter(|bytes| *bytes < 1 << 60);
    bytes.map(|bytes| bytes >> 20)
}

/// Whether the kernel itself keeps guarantees: the memory controller is one of cgroup v2.
fn is_v2() -> bool {
    let controllers = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    controllers.split_whitespace().any(|name| name == "memory")
}

/// The page cache that is charged to a container, in megabytes.
#[track_caller]
fn cached_mb(host: &Host, id: &str) -> u64 {
    let text = read(host, id, "memory.stat", "memory.stat");
    let of = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.map(|value| value.parse::<u64>().expect("a number"))
    };
    of("total_cache").or_else(|| of("file")).expect("page cache") >> 20
}

#[test]
fn memory_contract_is_refused_with_the_number_that_does_not_fit() {
    let host = small_host();
    let refused = |options: &[&str]| {
        let out = host.dm(&[&["create", "--name", "x"], options, SLEEP].concat());
        assert_eq!(out.status, 125, "{out}");
        out.stderr
    };
    let text = refused(&["--memory-min", "200m", "--memory", "100m"]);
    assert!(text.contains("--memory-min 200m is more than --memory 100m"), "{text}");
    let text = refused(&["--memory-min", "500m"]);
    assert!(text.contains("500m of memory is more than the 375m"), "{text}");
    assert!(text.contains("host-memory-reserve"), "{text}");
    let text = refused(&["--memory-min", "much"]);
    assert!(text.contains("'much'"), "{text}");
    // In the background: where the limit is accepted, the container runs.
    let out = host.dm(&[&["run", "-d", "--name", "high", "--memory-high", "100m"], SLEEP].concat());
    let is_accepted = out.status == 0;
    let is_named = out.stderr.contains("cgroup v1 has no memory.high");
    assert_eq!((is_accepted, is_named), (is_v2(), !is_v2()), "{out}");

    // A sixteenth of 400 MB cannot be promised.
    start(&host, "x", &["--memory-min", "274m"]);
    let out = host.dm(&[&["run", "-d", "--name", "y", "--memory-min", "102m"], SLEEP].concat());
    assert_eq!(out.status, 125, "{out}");
    let parts = ["'y'", "102m of memory guaranteed", "101m of", "274m is guaranteed to 1 running"];
    for part in parts {
        assert!(out.stderr.contains(part), "{part}: {out}");
    }
    let out = host.dm(&["update", "--memory-min", "376m", "x"]);
    assert!(out.stderr.contains("376m of memory is more than"), "{out}");
    host.dm(&["update", "--memory-min", "273m", "x"]).ok();
    start(&host, "y", &["--memory-min", "102m"]);
    host.dm(&["stop", "--time", "0", "x"]).ok();
    start(&host, "z", &["--memory-min", "273m"]);
}

#[test]
fn vm_limits_beside_a_guarantee_follow_it() {
    let host = small_host();
    start(&host, "before", &["--memory", "350m"]);
    assert_eq!(limit_mb(&host, ""), None);
    start(&host, "x", &["--memory-min", "150m"]);
    start(&host, "after", &["--memory", "100m"]);
    let of = |name: &str| limit_mb(&host, &id(&host, name));
    assert_eq!(limit_mb(&host, ""), Some(ROOM_MB));
    // On v2 the kernel keeps the guarantee, and each container has its own limit alone.
    let is_v2 = is_v2();
    let expected = |v1, v2| Some(if is_v2 { v2 } else { v1 });
    assert_eq!(of("before"), expected(250, 350));
    assert_eq!(of("after"), Some(100));
    if is_v2 {
        let min = |below: &str| read(&host, below, "", "memory.min").trim().to_owned();
        assert_eq!((min(&id(&host, "x")), min("")), ("157286400".into(), "157286400".into()));
    } else {
        assert_eq!(of("x"), Some(ROOM_MB));
    }
    host.dm(&["update", "--memory", "300m", "after"]).ok();
    assert_eq!(of("after"), expected(250, 300));
    host.dm(&["update", "--memory-min", "200m", "x"]).ok();
    assert_eq!(of("before"), expected(200, 350));
    host.dm(&["rm", "--force", "x"]).ok();
    assert_eq!((of("before"), of("after")), (Some(350), Some(300)));
    assert_eq!(limit_mb(&host, ""), None, "nothing is guaranteed any longer");
}

/// A container that keeps so many megabytes of random data in memory.
#[track_caller]
fn hold(host: &Host, name: &str, mb: u64) {
    // dd(1) waits for the pipe, with its buffer full.
    let script = format!(
        "busybox dd if=/dev/urandom bs={mb}M count=1 iflag=fullblock 2>/dev/null | busybox sleep 100000"
    );
    host.dm(&["run", "-d", "--name", name, "busybox", "busybox", "sh", "-c", &script]).ok();
    let id = id(host, name);
    let filled = || anonymous_mb(host, &id) >= mb;
    assert!(wait_until(soon(), filled), "{} of {mb} MB", anonymous_mb(host, &id));
}

/// Keeps the memory of a container from the host's swap, which other tests may have.
#[track_caller]
fn keep_from_swap(host: &Host, id: &str) {
    let files = ["memory.swappiness", "memory.swap.max"];
    let all = host.cgroups().into_iter().flat_map(|dir| files.map(|file| dir.join(id).join(file)));
    let file = all.into_iter().find(|file| file.exists()).expect("a limit of swap");
    fs::write(&file, "0").unwrap_or_else(|e| panic!("{file:?}: {e}"));
}

/// The memory of a container's processes, in megabytes.
#[track_caller]
fn anonymous_mb(host: &Host, id: &str) -> u64 {
    let text = read(host, id, "memory.stat", "memory.stat");
    let of = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    let bytes = of("total_rss").or_else(|| of("anon")).expect("memory of processes");
    bytes.parse::<u64>().expect("a number") >> 20
}

#[test]
fn vm_guarantee_is_refused_while_its_memory_is_in_use() {
    let host = small_host();
    hold(&host, "y", ROOM_MB + 20);
    keep_from_swap(&host, &id(&host, "y"));
    let pid = host.inspect("y")["pid"].clone();
    let out = host.dm(&[&["run", "-d", "--name", "x", "--memory-min", "50m"], SLEEP].concat());
    assert!(out.status != 0 && out.stderr.contains("memory"), "{out}");
    assert_eq!(limit_mb(&host, ""), None, "a refused guarantee leaves no limit");
    assert_eq!(limit_mb(&host, &id(&host, "y")), None);
    // Nothing was killed for it.
    let y = host.inspect("y");
    assert_eq!((host.state_of("y").as_str(), &y["pid"]), ("running", &pid), "{y}");
    assert_eq!(anonymous_mb(&host, &id(&host, "y")), ROOM_MB + 20);
    // Others start although the next guarantee is refused in the same way.
    start(&host, "z", &[]);
    host.dm(&["rm", "--force", "y"]).ok();
    start(&host, "x", &["--memory-min", "50m"]);
    assert_eq!(limit_mb(&host, ""), Some(ROOM_MB));
}

#[test]
fn vm_sleeper_that_is_larger_than_its_ceiling_wakes() {
    let host = small_host();
    hold(&host, "y", 280);
    host.put_to_sleep("y");
    let mut daemon = Daemon::start(&host);
    start(&host, "x", &["--memory-min", "150m"]);
    host.dm(&["wake", "y"]).ok();
    let y = id(&host, "y");
    assert!(wait_until(soon(), || anonymous_mb(&host, &y) >= 280), "{}", anonymous_mb(&host, &y));
    // Limits are decided again for another guarantee.
    start(&host, "z", &["--memory-min", "10m"]);
    assert_eq!(host.state_of("y"), "running");
    if !is_v2() {
        assert!(limit_mb(&host, &y) >= Some(290), "{:?}", limit_mb(&host, &y));
    }
    daemon.kill();
    for guarantee in ["x", "z"] {
        host.dm(&["rm", "--force", guarantee]).ok();
    }
    assert_eq!((host.state_of("y").as_str(), limit_mb(&host, &y)), ("running", None));
}

#[test]
fn vm_memory_reclaimed_last_is_that_of_the_parent_too() {
    let host = Host::with_busybox();
    start(&host, "a", &["--memory-low", "20m"]);
    start(&host, "b", &["--memory-low", "30m"]);
    let low = |below: &str| {
        let text = read(&host, below, "memory.soft_limit_in_bytes", "memory.low");
        text.trim().parse::<u64>().expect("a number") >> 20
    };
    assert_eq!([low(&id(&host, "a")), low(&id(&host, "b"))], [20, 30]);
    // On v1 the parent has no part in it.
    let of_parent = |mb| assert!(!is_v2() || low("") == mb, "{}", low(""));
    of_parent(50);
    host.dm(&["update", "--memory-low", "40m", "b"]).ok();
    of_parent(60);
    host.dm(&["rm", "--force", "a"]).ok();
    of_parent(40);
    assert_eq!(limit_mb(&host, ""), None, "nothing is guaranteed");
    host.dm(&["update", "--memory-low", "0", "b"]).ok();
    of_parent(0);
}

/// Reads a large file again and again.
fn stream(host: &Host, name: &str) {
    let script = "busybox truncate -s 1073741824 /f; while :; do busybox cat /f >/dev/null; done";
    host.dm(&["run", "-d", "--name", name, "busybox", "busybox", "sh", "-c", script]).ok();
}

/// Starts the container with a guarantee, which reads 120 MB.
#[track_caller]
fn with_files(host: &Host) -> String {
    start(host, "x", &["--memory-min", "150m"]);
    let id = id(host, "x");
    host.dm(&["exec", "x", "busybox", "truncate", "-s", "125829120", "/f"]).ok();
    read_files(host, &id);
    id
}

#[track_caller]
fn read_files(host: &Host, id: &str) {
    host.dm(&["exec", "x", "busybox", "sh", "-c", "busybox cat /f >/dev/null"]).ok();
    assert!(cached_mb(host, id) >= 119, "{}", cached_mb(host, id));
}

/// Waits until containers have read so much that the files of another would be gone, and returns the least that it
/// kept.
#[track_caller]
fn least_kept_mb(host: &Host, id: &str, streams: &[&str]) -> u64 {
    let read_mb = |name: &str| {
        let pid = host.inspect(name)["pid"].as_u64().expect("a pid");
        let text = fs::read_to_string(format!("/proc/{pid}/io")).expect("proc_pid_io(5)");
        let bytes = text.lines().find_map(|line| line.strip_prefix("rchar: ")).expect("reads");
        bytes.parse::<u64>().expect("a number") >> 20
    };
    let before: Vec<u64> = streams.iter().map(|name| read_mb(name)).collect();
    let mut least = u64::MAX;
    let is_enough = || {
        least = least.min(cached_mb(host, id));
        // Of a shell, with the commands that have ended.
        streams.iter().zip(&before).all(|(name, before)| read_mb(name) > before + 3000)
    };
    assert!(wait_until(soon(), is_enough), "the others read");
    least
}

#[test]
fn vm_guaranteed_memory_is_kept_beside_one_that_reads_without_daemon() {
    let host = small_host();
    let id = with_files(&host);
    stream(&host, "s");
    let least = least_kept_mb(&host, &id, &["s"]);
    assert!(least >= 116, "0.97 of 120 MB: {least}");
}

#[test]
fn vm_guaranteed_memory_is_kept_beside_several_that_read() {
    let host = small_host();
    let mut daemon = Daemon::start(&host);
    let id = with_files(&host);
    stream(&host, "s");
    stream(&host, "t");
    if !is_v2() {
        // Two that begin to read may fill the memory before they are limited.
        let of = |name: &str| limit_mb(&host, &self::id(&host, name)).expect("a limit");
        let sum = || of("s") + of("t");
        assert!(wait_until(soon(), || sum() < 250), "both are limited: {}", sum());
    }
    read_files(&host, &id);
    let least = least_kept_mb(&host, &id, &["s", "t"]);
    assert!(least >= 116, "0.97 of 120 MB: {least}");
    daemon.kill();
    // The next command writes the static limits again.
    host.dm(&["rm", "--force", "t"]).ok();
    if !is_v2() {
        assert_eq!(limit_mb(&host, &self::id(&host, "s")), Some(250));
    }
}

#[test]
fn vm_lowered_limits_end_with_the_last_guarantee() {
    let host = small_host();
    // The daemon goes on for its reservation of CPU.
    start(&host, "c", &["--cpu-reserve", "0.01"]);
    let _daemon = Daemon::start(&host);
    start(&host, "x", &["--memory-min", "150m"]);
    stream(&host, "s");
    stream(&host, "t");
    let of = |name: &str| limit_mb(&host, &id(&host, name));
    if !is_v2() {
        let sum = || of("s").expect("a limit") + of("t").expect("a limit");
        assert!(wait_until(soon(), || sum() < 350), "both are limited: {}", sum());
    }
    host.dm(&["rm", "--force", "x"]).ok();
    let is_none = || [of("s"), of("t"), limit_mb(&host, "")] == [None; 3];
    assert!(wait_until(soon(), is_none), "{:?} {:?}", of("s"), of("t"));
    let mark = host.root().join("run/governed");
    if !is_v2() {
        let content = || fs::read(&mark).expect("CPU is still governed");
        assert!(wait_until(soon(), || content().is_empty()), "{:?}", content());
        assert!(is_none(), "{:?} {:?}", of("s"), of("t"));
    }
}
