//! Rates and weights of disks: in force before the first process, changed while it runs, kept over sleep and copies,
//! and said where they are not enforced.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dormouse_testkit::{Host, Output, soon, wait_until};

use crate::contracts::{id, start};

/// Runs until it is killed.
const SLEEP: &[&str] = &["busybox", "sleep", "1000000"];

/// The number of the whole disk with the storage of a host, as the kernel writes it.
fn disk(host: &Host) -> String {
    let device = fs::metadata(host.root()).expect("the root exists").dev();
    let number = format!("{}:{}", libc_major(device), libc_minor(device));
    let sysfs = Path::new("/sys/dev/block").join(&number);
    match sysfs.join("partition").exists() {
        true => fs::read_to_string(sysfs.join("../dev")).expect("a number").trim().to_owned(),
        false => number,
    }
}

/// As makedev(3) composes it.
fn libc_major(device: u64) -> u64 {
    (device >> 32) & 0xffff_f000 | (device >> 8) & 0xfff
}

fn libc_minor(device: u64) -> u64 {
    (device >> 12) & 0xffff_ff00 | device & 0xff
}

/// A device node of a disk.
fn node(disk: &str) -> String {
    let text = fs::read_to_string(Path::new("/sys/dev/block").join(disk).join("uevent"));
    let text = text.expect("the disk exists");
    let name = text.lines().find_map(|line| line.strip_prefix("DEVNAME="));
    format!("/dev/{}", name.expect("a name"))
}

/// The rules in force: read and written bytes, read and written requests, as `io.max` has them.
#[track_caller]
fn rules(host: &Host, name: &str) -> String {
    let id = id(host, name);
    let of = |file: &str| -> Option<String> {
        let dirs: Vec<PathBuf> = host.cgroups().iter().map(|dir| dir.join(&id)).collect();
        dirs.iter().find_map(|dir| fs::read_to_string(dir.join(file)).ok())
    };
    if let Some(text) = of("io.max") {
        return text.trim().to_owned();
    }
    let disk = disk(host);
    let files = ["read_bps", "write_bps", "read_iops", "write_iops"];
    let rates = files.map(|name| {
        let text = of(&format!("blkio.throttle.{name}_device")).expect("the rules of v1");
        let most = text.lines().find_map(|line| line.strip_prefix(&format!("{disk} ")));
        most.unwrap_or("max").trim().to_owned()
    });
    match rates.iter().all(|rate| rate == "max") {
        true => String::new(),
        false => format!(
            "{disk} rbps={} wbps={} riops={} wiops={}",
            rates[0], rates[1], rates[2], rates[3]
        ),
    }
}

#[test]
fn vm_disk_rates_are_kept_over_update_restart_sleep_and_clone() {
    let host = Host::with_busybox();
    let disk = disk(&host);
    start(&host, "x", &["--io-read-bps", "4m", "--io-write-iops", "100"]);
    let first = format!("{disk} rbps=4194304 wbps=max riops=max wiops=100");
    assert_eq!(rules(&host, "x"), first);
    let update = |options: &[&str]| host.dm(&[&["update"], options, &["x"]].concat());
    let device = format!("{}:2m", node(&disk));
    update(&["--io-write-bps", &device, "--io-write-iops", "0"]).ok();
    let second = format!("{disk} rbps=4194304 wbps=2097152 riops=max wiops=max");
    assert_eq!(rules(&host, "x"), second);
    // Of two rates for one disk the smaller one holds.
    update(&["--io-write-bps", "3m", "--device-read-bps", &device]).ok();
    let third = format!("{disk} rbps=2097152 wbps=2097152 riops=max wiops=max");
    assert_eq!(rules(&host, "x"), third);

    let before = host.inspect("x")["config"]["limits"].clone();
    for (bad, why) in [
        (["--io-write-bps", "/dev/null:1m"], "a block device"),
        (["--io-write-bps", "/no/such/device:1m"], "No such file"),
        (["--io-write-bps", "1k"], "at least 64k"),
        (["--io-read-iops", "4294967295"], "1 to 4294967294"),
    ] {
        let line = update(&bad).fails();
        assert!(line.contains(why), "{line}");
    }
    assert_eq!(host.inspect("x")["config"]["limits"], before, "a refused change changes nothing");
    assert_eq!(rules(&host, "x"), third);

    host.put_to_sleep("x");
    host.dm(&["wake", "x"]).ok();
    assert_eq!(rules(&host, "x"), third, "a wake");
    host.dm(&["clone", "--name", "y", "x"]).ok();
    host.dm(&["restart", "x"]).ok();
    assert_eq!(rules(&host, "x"), third, "a restart");
    assert_eq!(host.inspect("y")["config"]["limits"], before, "a clone");
    assert_eq!(rules(&host, "y"), third, "a clone");

    let table = host.dm(&["inspect", "--format", "table", "x"]).ok();
    let device = node(&disk);
    let line = format!("read 4m/s, write 2m/s on {device}, read 2m/s on {device}, write 3m/s");
    assert!(table.contains(&line), "{table}");
    let stats = host.dm(&["stats", "--no-stream", "x"]).ok();
    assert!(stats.contains("DISK MOST") && stats.contains("write 3m/s"), "{stats}");
    let podman: serde_json::Value =
        serde_json::from_str(&host.dm(&["inspect", "x"]).ok()).expect("JSON");
    let rate = &podman[0]["HostConfig"]["BlkioDeviceWriteBps"][0];
    assert_eq!((&rate["Path"], &rate["Rate"]), (&node(&disk).into(), &(2 << 20).into()));

    update(&["--io-read-bps", "0", "--io-write-bps", "0"]).ok();
    let rest = format!("{}:0", node(&disk));
    update(&["--io-read-bps", &rest, "--io-write-bps", &rest]).ok();
    assert_eq!(rules(&host, "x"), "");
    assert!(host.inspect("x")["config"]["limits"].get("disk_rates").is_none());
}

#[test]
fn bad_disk_rates_are_refused_before_anything_is_made() {
    let host = Host::with_busybox();
    for (option, why) in [
        ("--io-read-bps=/dev/null:1m", "a block device"),
        ("--io-read-bps=x:1m", "[DEVICE:]RATE"),
        ("--io-write-iops=/no/such/device:1", "No such file"),
    ] {
        let line = host.dm(&[&["run", "-d", option], SLEEP].concat()).fails();
        assert!(line.contains(why), "{option}: {line}");
    }
    assert_eq!(host.dm(&["ps", "-aq"]).ok(), "");
}

/// Runs a command in a new container; returns the time that it took.
#[track_caller]
fn timed(host: &Host, options: &[&str], script: &str) -> Duration {
    let start = Instant::now();
    let words = [&["run", "--rm"], options, &["busybox", "sh", "-c", script]].concat();
    host.dm(&words).ok();
    start.elapsed()
}

/// The rate that a container got is not above its limit, however busy the machine is.
#[test]
fn vm_disk_rates_bound_direct_reads_and_writes() {
    let host = Host::with_busybox();
    const WRITE: &str = "dd if=/dev/zero of=/f bs=1M count=8 oflag=direct 2>/dev/null";
    let read = format!("{WRITE} && dd if=/f of=/dev/null bs=1M iflag=direct 2>/dev/null");
    // The kernel admits the requests of the first tenth of a second at once.
    let least = Duration::from_secs_f64(8.0 / 4.0 / 1.06 - 0.1);
    for (option, script) in [("--io-write-bps=4m", WRITE), ("--io-read-bps=4m", &read)] {
        let took = timed(&host, &[option], script);
        assert!(took >= least, "{option}: {took:?}");
    }
    // 40 requests of 4 kB.
    let small = "dd if=/dev/zero of=/f bs=4k count=40 oflag=direct 2>/dev/null";
    let took = timed(&host, &["--io-write-iops=20"], small);
    assert!(took >= Duration::from_secs_f64(40.0 / 20.0 / 1.06 - 0.1), "{took:?}");
}

/// A request of several MB takes a minute at this rate, and the process that waits for it cannot be killed.
#[test]
fn vm_container_that_waits_for_its_turn_at_the_disk_is_removed_at_once() {
    let host = Host::with_busybox();
    let script = "dd if=/dev/zero of=/f bs=8M count=1 oflag=direct";
    let rate = "--io-write-bps=64k";
    host.dm(&["run", "-d", "--name", "x", rate, "busybox", "sh", "-c", script]).ok();
    let waits = || {
        let rows: serde_json::Value =
            serde_json::from_str(&host.dm(&["top", "--json", "x"]).ok()).expect("JSON");
        let mut rows = rows.as_array().expect("a list").iter();
        rows.any(|row| row["state"] == "D")
    };
    assert!(wait_until(soon(), waits), "{}", host.dm(&["top", "x"]));
    host.dm(&["rm", "-f", "x"]).ok();
}

/// What a command that succeeded has said on standard error.
#[track_caller]
fn stderr_of(out: Output) -> String {
    assert_eq!(out.status, 0, "{out}");
    out.stderr
}

/// `run`, `inspect` and `check` say in the same words that a limit is not enforced.
#[test]
fn vm_limits_of_disks_that_are_not_enforced_are_said_in_the_same_words() {
    let host = Host::with_busybox();
    let check: serde_json::Value =
        serde_json::from_str(&host.dm(&["check", "--json"]).stdout).expect("JSON");
    let seen = |name: &str| {
        let features = check["features"].as_array().expect("a list");
        let row = features.iter().find(|row| row["name"] == name).expect("the feature");
        assert_eq!(row["have"], true, "{row}");
        row["seen"].as_str().expect("text").to_owned()
    };
    let (weight, rates) = (seen("io weight"), seen("io rates"));
    let device = Path::new("/sys/dev/block").join(disk(&host));
    let scheduler = fs::read_to_string(device.join("queue/scheduler")).unwrap_or_default();
    let costs = fs::read_to_string("/sys/fs/cgroup/io.cost.qos").unwrap_or_default();
    // A disk of device mapper has the schedulers of the disks below it.
    match scheduler.contains('[') && !costs.contains("enable=1") {
        true => assert_eq!(weight.is_empty(), scheduler.contains("[bfq]"), "{weight}"),
        false => eprintln!("SKIPPED: whether '{weight}' is true of {}", device.display()),
    }
    let v1 = rates.strip_prefix("v1; ");

    let out = host.dm(&[&["run", "-d", "--name", "x", "--io-weight", "200"], SLEEP].concat());
    let said = stderr_of(out);
    match weight.is_empty() {
        true => assert_eq!(said, ""),
        false => assert!(said.contains(&weight), "{said}"),
    }
    let out = host.dm(&[&["run", "-d", "--name", "y", "--io-write-bps", "1m"], SLEEP].concat());
    let said = stderr_of(out);
    match v1 {
        Some(text) => assert!(said.contains(text), "{said}"),
        None => assert!(rates == "v2" && said.is_empty(), "{rates} {said}"),
    }
    let texts = |name: &str| -> Vec<String> {
        let list = host.inspect(name)["not_enforced"].as_array().cloned().unwrap_or_default();
        list.iter().map(|text| text.as_str().expect("text").to_owned()).collect()
    };
    let lines = |text: &str| if text.is_empty() { vec![] } else { vec![text.to_owned()] };
    assert_eq!(texts("x"), lines(&weight));
    assert_eq!(texts("y"), lines(v1.unwrap_or("")));
    // Reads are enforced everywhere.
    let out = host.dm(&[&["run", "-d", "--name", "z", "--io-read-bps", "1m"], SLEEP].concat());
    assert_eq!(stderr_of(out), "");
    assert!(texts("z").is_empty());
    let said = stderr_of(host.dm(&["update", "--io-write-iops", "9", "z"]));
    assert_eq!(said.contains("not enforced"), v1.is_some(), "{said}");
}
