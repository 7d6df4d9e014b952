//! Guarantees of memory: what is refused, which limits are written, and what stays in memory beside containers that
//! read large files.

use std::fs;
use std::path::PathBuf;

use dormouse_testkit::{Host, soon, wait_until};

use crate::contracts::{Daemon, id, start};

/// Memory of all containers together, while one has a guarantee.
const ROOM_MB: u64 = 400;
/// The limit of the others on cgroup v1, beside a guarantee of 150 MB.
const CEILING_MB: u64 = ROOM_MB - 150;
/// A command that does nothing for a long time.
const SLEEP: &[&str] = &["busybox", "sleep", "100000"];

/// The memory of this machine, in bytes.
pub(crate) fn all_bytes() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").expect("proc_meminfo(5)");
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:")).expect("all memory");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

/// A host that keeps all memory for itself but [`ROOM_MB`].
#[track_caller]
pub(crate) fn small_host() -> Host {
    let host = Host::with_busybox();
    let config = host.root().join("etc/config.toml");
    let text = fs::read_to_string(&config).expect("the settings");
    let kept = all_bytes().checked_sub(ROOM_MB << 20).expect("a machine with more memory");
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
    let out = host.dm(&[&["create", "--name", "later", "--memory-high", "100m"], SLEEP].concat());
    assert_eq!(out.status == 0, is_v2(), "before the first start: {out}");
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

/// A container that keeps so many megabytes of random data in memory, and out of swap.
#[track_caller]
fn hold(host: &Host, name: &str, mb: u64) {
    // dd(1) waits for the pipe, with its buffer full.
    let fill = format!(
        "busybox dd if=/dev/urandom bs={mb}M count=1 iflag=fullblock 2>/dev/null | busybox sleep 100000"
    );
    let script = format!("until [ -e /go ]; do busybox sleep 0.05; done; {fill}");
    host.dm(&["run", "-d", "--name", name, "busybox", "busybox", "sh", "-c", &script]).ok();
    let id = id(host, name);
    // The cgroups that are made later, as that of a wake, have the setting of the parent.
    keep_from_swap(host, "");
    keep_from_swap(host, &id);
    host.dm(&["exec", name, "busybox", "touch", "/go"]).ok();
    let filled = || anonymous_mb(host, &id) >= mb;
    assert!(wait_until(soon(), filled), "{} of {mb} MB", anonymous_mb(host, &id));
}

/// Keeps the memory of a container or of all ("") from the host's swap, which other tests may have.
#[track_caller]
fn keep_from_swap(host: &Host, below: &str) {
    let files = ["memory.swappiness", "memory.swap.max"];
    let places = host.cgroups();
    let all = places.iter().flat_map(|dir| files.map(|file| dir.join(below).join(file)));
    // Without a file the kernel does not count swap: the host must have none then.
    let Some(file) = all.into_iter().find(|file| file.exists()) else {
        let swap = fs::read_to_string("/proc/swaps").expect("swap areas");
        return assert_eq!(swap.lines().count(), 1, "swap is not limited by cgroups: {swap}");
    };
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
    let pid = host.inspect("y")["pid"].clone();
    let out = host.dm(&[&["run", "-d", "--name", "x", "--memory-min", "50m"], SLEEP].concat());
    assert!(out.status != 0 && out.stderr.contains("memory"), "{out}");
    assert_eq!(limit_mb(&host, ""), None, "a refused guarantee leaves no limit");
    assert_eq!(limit_mb(&host, &id(&host, "y")), None);
    // Nothing was killed for it.
    let y = host.inspect("y");
    assert_eq!((host.state_of("y").as_str(), &y["pid"]), ("running", &pid), "{y}");
    let kept = anonymous_mb(&host, &id(&host, "y"));
    assert!(kept > ROOM_MB, "{kept} MB");
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
fn vm_container_that_woke_before_the_first_guarantee_has_a_limit_above_its_memory() {
    let host = small_host();
    hold(&host, "y", 280);
    host.put_to_sleep("y");
    host.dm(&["wake", "y"]).ok();
    start(&host, "x", &["--memory-min", "150m"]);
    let y = id(&host, "y");
    if !is_v2() {
        // Also if its memory has not arrived yet.
        let limit = limit_mb(&host, &y);
        assert!((290..=ROOM_MB).contains(&limit.unwrap_or(0)), "{limit:?}");
    }
    assert!(wait_until(soon(), || anonymous_mb(&host, &y) >= 280), "{}", anonymous_mb(&host, &y));
    assert_eq!(host.state_of("y"), "running");
}

#[test]
fn vm_keeper_and_small_guarantee_outlive_containers_without_memory() {
    let host = small_host();
    start(&host, "x", &["--memory-min", "40m"]);
    let keeper = host.keeper().expect("a keeper");
    // Without the daemon: each one fits below its ceiling, and both together are more than all may have.
    hold(&host, "y", 300);
    let fill = "busybox dd if=/dev/urandom bs=300M count=1 iflag=fullblock | busybox sleep 100000";
    host.dm(&["run", "-d", "--name", "z", "busybox", "busybox", "sh", "-c", fill]).ok();
    let z = id(&host, "z");
    keep_from_swap(&host, &z);
    let kills = |name: &str| {
        let text = read(&host, &id(&host, name), "memory.oom_control", "memory.events");
        let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        line.expect("kills").trim().parse::<u64>().expect("a number")
    };
    let is_killed = |name: &str| host.state_of(name) != "running" || kills(name) > 0;
    assert!(wait_until(soon(), || is_killed("y") || is_killed("z")), "memory suffices");
    assert_eq!((host.state_of("x").as_str(), kills("x")), ("running", 0));
    assert_eq!(host.keeper(), Some(keeper));
    host.dm(&["exec", "x", "busybox", "true"]).ok();
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
    // On v1 the parent has no part in it. On v2 it has the part of images besides.
    let of_parent = |mb| {
        assert!(
            !is_v2() || low("").abs_diff(low("images") + mb) <= 1,
            "{} {}",
            low(""),
            low("images")
        );
    };
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

/// Starts the container with a guarantee, and returns its id.
#[track_caller]
fn with_files(host: &Host) -> String {
    start(host, "x", &["--memory-min", "150m"]);
    host.dm(&["exec", "x", "busybox", "truncate", "-s", "125829120", "/f"]).ok();
    id(host, "x")
}

/// Reads the 120 MB of the container with a guarantee, and returns how many are in memory.
#[track_caller]
fn read_files(host: &Host, id: &str) -> u64 {
    let is_read = || {
        host.dm(&["exec", "x", "busybox", "sh", "-c", "busybox cat /f >/dev/null"]).ok();
        // The kernel counts in batches.
        cached_mb(host, id) >= 115
    };
    assert!(wait_until(soon(), is_read), "{}", cached_mb(host, id));
    cached_mb(host, id)
}

/// Refuses that less than 0.97 of some pages was kept.
#[track_caller]
fn assert_kept(least_mb: u64, of_mb: u64) {
    // Both are rounded.
    assert!((least_mb + 1) as f64 >= of_mb as f64 * 0.97, "{least_mb} of {of_mb} MB");
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
        streams.iter().zip(&before).all(|(name, before)| read_mb(name) > before + 2000)
    };
    assert!(wait_until(soon(), is_enough), "the others read");
    least
}

#[test]
fn vm_guaranteed_memory_is_kept_beside_one_that_reads_without_daemon() {
    let host = small_host();
    let id = with_files(&host);
    let all = read_files(&host, &id);
    stream(&host, "s");
    assert_kept(least_kept_mb(&host, &id, &["s"]), all);
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
        let both = || ["s", "t"].map(of);
        let are_limited = || both().iter().all(|mb| *mb < CEILING_MB);
        assert!(wait_until(soon(), are_limited), "below the ceiling: {:?}", both());
    }
    let all = read_files(&host, &id);
    assert_kept(least_kept_mb(&host, &id, &["s", "t"]), all);
    let weights = host.root().join("run/governed");
    assert!(!weights.exists(), "without a reservation of CPU the weights are left alone");
    daemon.kill();
    // The next command writes the static limits again.
    host.dm(&["rm", "--force", "t"]).ok();
    if !is_v2() {
        assert_eq!(limit_mb(&host, &self::id(&host, "s")), Some(CEILING_MB));
    }
}

#[test]
fn vm_daemon_lowers_limits_again_after_all_containers_have_ended() {
    let host = small_host();
    let _daemon = Daemon::start(&host);
    let mark = host.root().join("run/governed-memory");
    start(&host, "x", &["--memory-min", "150m"]);
    assert!(is_v2() || wait_until(soon(), || mark.exists()), "limits are not governed");
    host.dm(&["rm", "--force", "x"]).ok();
    // The last container that ends takes the cgroup above all of them along.
    assert!(wait_until(soon(), || host.cgroups().is_empty()), "{:?}", host.cgroups());
    assert!(wait_until(soon(), || !mark.exists()), "limits are still governed");
    start(&host, "x", &["--memory-min", "150m"]);
    stream(&host, "s");
    stream(&host, "t");
    if !is_v2() {
        let of = |name: &str| limit_mb(&host, &id(&host, name)).expect("a limit");
        let both = || ["s", "t"].map(of);
        let are_limited = || both().iter().all(|mb| *mb < CEILING_MB);
        assert!(wait_until(soon(), are_limited), "below the ceiling: {:?}", both());
    }
}

/// Page cache of a file that stays would be charged to all containers, and the kernel would take it from each of them.
#[test]
fn page_cache_of_an_ended_container_is_not_left_to_the_others() {
    const FILE_MB: u64 = 100;
    if is_v2() {
        return; // the kernel reclaims it before memory that is guaranteed
    }
    let host = small_host();
    start(&host, "min", &["--memory-min", "50m"]);
    let path = host.dir().join("file");
    fs::write(&path, vec![1; (FILE_MB << 20) as usize]).expect("written");
    let file = fs::File::open(&path).expect("there");
    file.sync_all().expect("stored");
    // Otherwise the pages stay charged to this test.
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("dropped");
    let used_mb = || {
        let used = read(&host, "", "memory.usage_in_bytes", "memory.current");
        used.trim().parse::<u64>().expect("a number") >> 20
    };
    let volume = format!("{}:/file:ro", path.display());
    start(&host, "x", &["--volume", &volume]);
    let before = used_mb();
    host.dm(&["exec", "x", "busybox", "sh", "-c", "busybox cat /file >/dev/null"]).ok();
    // The kernel counts in batches.
    let is_read = || cached_mb(&host, &id(&host, "x")) >= FILE_MB * 9 / 10;
    assert!(wait_until(soon(), is_read), "{} MB", cached_mb(&host, &id(&host, "x")));
    host.dm(&["rm", "--force", "x"]).ok();
    let is_dropped = || used_mb() < before + FILE_MB / 2;
    assert!(wait_until(soon(), is_dropped), "{before} to {} MB", used_mb());
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
        assert!(wait_until(soon(), || sum() < 2 * CEILING_MB), "below the ceilings: {}", sum());
    }
    host.dm(&["rm", "--force", "x"]).ok();
    let is_none = || [of("s"), of("t"), limit_mb(&host, "")] == [None; 3];
    assert!(wait_until(soon(), is_none), "{:?} {:?}", of("s"), of("t"));
    let mark = |name: &str| host.root().join("run").join(name).exists();
    assert!(wait_until(soon(), || !mark("governed-memory")), "limits are still governed");
    assert!(mark("governed") && is_none(), "{:?} {:?}", of("s"), of("t"));
}
