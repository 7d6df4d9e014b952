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

/// The root of the blkio hierarchy of cgroup v1, if it has the rates of disks.
fn blkio_root() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").expect("mounts");
    let is_blkio = |line: &&str| {
        let words: Vec<&str> = line.split(' ').collect();
        words[2] == "cgroup" && words[3].split(',').any(|option| option == "blkio")
    };
    Some(PathBuf::from(mounts.lines().find(is_blkio)?.split(' ').nth(1)?))
}

/// Loop devices with rates of containers of this host, by the records of the engine.
pub(crate) fn of_root(host: &Host) -> Vec<String> {
    let all = fs::read_dir("/run/dormouse-writeback").into_iter().flatten().flatten();
    let lib = host.root().join("lib").display().to_string();
    let device = |entry: fs::DirEntry| {
        let record = fs::read_to_string(entry.path()).ok()?;
        let name = entry.file_name().into_string().ok()?;
        record.contains(&lib).then(|| name.split_once('-').expect("a device").0.to_owned())
    };
    let mut all: Vec<String> = all.filter_map(device).collect();
    all.sort();
    all
}

/// The loop device with the disk of a container of this host, such as `loop3`.
#[track_caller]
fn loop_of(host: &Host, name: &str) -> String {
    let file = host.root().join("lib/containers").join(id(host, name)).join("drive");
    let all = fs::read_dir("/sys/block").expect("sysfs").flatten();
    let is_it = |entry: &fs::DirEntry| {
        let of = fs::read_to_string(entry.path().join("loop/backing_file"));
        of.is_ok_and(|text| Path::new(text.trim()) == file)
    };
    let found = all.into_iter().find(is_it).expect("the disk is attached");
    found.file_name().into_string().expect("a name")
}

/// The rate of written bytes and that of requests of a device in the root; `max` where it has none.
#[track_caller]
fn in_root(device: &str) -> (String, String) {
    let root = blkio_root().expect("cgroup v1");
    let dev = fs::read_to_string(Path::new("/sys/block").join(device).join("dev"));
    let dev = dev.expect("the device exists").trim().to_owned();
    let of = |file: &str| {
        let text = fs::read_to_string(root.join(file)).expect("a file of the root");
        let most = text.lines().find_map(|line| line.strip_prefix(&format!("{dev} ")));
        most.unwrap_or("max").to_owned()
    };
    (of("blkio.throttle.write_bps_device"), of("blkio.throttle.write_iops_device"))
}

/// Bytes that a device has written.
#[track_caller]
fn written(device: &str) -> u64 {
    let text = fs::read_to_string(Path::new("/sys/block").join(device).join("stat"));
    let text = text.expect("the device exists");
    let sectors = text.split_whitespace().nth(6).expect("written sectors");
    sectors.parse::<u64>().expect("a number") * 512
}

/// Pages are written by a thread of the kernel, which cgroup v1 counts for the host. The rate is not above its limit,
/// however busy the machine is.
#[test]
fn disk_rates_bound_writes_through_the_page_cache_of_a_disk() {
    let host = Host::with_busybox();
    let script = "while :; do dd if=/dev/zero of=/f bs=1M count=64 conv=notrunc 2>/dev/null; done";
    let options = ["--disk", "128m", "--io-write-bps", "4m"];
    let words = [&["run", "-d", "--name", "x"], &options[..], &["busybox", "sh", "-c", script]];
    let said = stderr_of(host.dm(&words.concat()));
    assert!(!said.contains("not enforced for writes through the page cache"), "{said}");
    let device = loop_of(&host, "x");
    let (begin, start) = (written(&device), Instant::now());
    const BYTES: u64 = 24 << 20;
    let all_is_written = wait_until(soon() * 4, || written(&device) >= begin + BYTES);
    assert!(all_is_written, "{} of {BYTES} bytes", written(&device) - begin);
    let took = start.elapsed();
    // The kernel admits the requests of the first second at once, and counts them when the last one is done.
    let least = Duration::from_secs_f64((24.0 / 4.0 - 2.0) / 1.06);
    assert!(took >= least, "{took:?}");
    // The bound of dirty pages: the rest waits in no other place.
    let start = Instant::now();
    host.dm(&["rm", "-f", "x"]).ok();
    assert!(start.elapsed() < soon(), "{:?}", start.elapsed());
    assert_eq!(of_root(&host), [""; 0]);
}

/// The rates of a device would hold for the next program that gets its number.
#[test]
fn rates_of_the_root_end_with_each_life_and_no_other_device_is_changed() {
    if blkio_root().is_none() {
        eprintln!("SKIPPED: cgroup v2 needs no rates of the root");
        return;
    }
    let host = Host::with_busybox();
    // A device of the operator, with a rate of its own.
    let foreign = host.dir().join("foreign");
    fs::write(&foreign, vec![0; 1 << 20]).expect("a file");
    let node = host.sh(&format!("losetup --find --show {}", foreign.display())).ok();
    let other = node.trim().trim_start_matches("/dev/").to_owned();
    let rate_of_other = |rate: &str| {
        let dev = fs::read_to_string(Path::new("/sys/block").join(&other).join("dev"));
        let line = format!("{} {rate}", dev.expect("the device").trim());
        let file = blkio_root().expect("v1").join("blkio.throttle.write_bps_device");
        fs::write(file, line).expect("a rate");
    };
    rate_of_other("7340032");

    let rated = ["--disk", "16m", "--io-write-bps", "1m", "--io-write-iops", "50"];
    start(&host, "x", &rated);
    let mut device = loop_of(&host, "x");
    let rates = |bytes: &str, requests: &str| (bytes.to_owned(), requests.to_owned());
    assert_eq!(in_root(&device), rates("1048576", "50"));
    assert_eq!(of_root(&host), [device.clone()]);
    host.dm(&["update", "--io-write-bps", "2m", "--io-write-iops", "0", "x"]).ok();
    assert_eq!(in_root(&device), rates("2097152", "max"));

    // A device that another test got meanwhile has rates of its own, and no record of this host.
    let expect_none = |device: &str, what: &str| {
        assert!(wait_until(soon(), || of_root(&host).is_empty()), "{what}");
        let is_ours = || in_root(device).0 == "2097152";
        assert!(wait_until(soon(), || !is_ours()), "{what}: {:?}", in_root(device));
    };
    host.put_to_sleep("x");
    expect_none(&device, "asleep");
    host.dm(&["wake", "x"]).ok();
    device = loop_of(&host, "x");
    assert_eq!(in_root(&device), rates("2097152", "max"), "a wake");
    host.dm(&["stop", "--time", "0", "x"]).ok();
    expect_none(&device, "a stop");
    // A command that looks at the files gives the device no rates.
    host.dm(&["diff", "x"]).ok();
    expect_none(&device, "a look");
    host.dm(&["start", "x"]).ok();
    device = loop_of(&host, "x");
    assert_eq!(in_root(&device), rates("2097152", "max"), "a start");
    host.dm(&["exec", "x", "kill", "-9", "-1"]);
    let pid = host.inspect("x")["pid"].as_u64();
    pid.map(|pid| host.sh(&format!("kill -9 {pid}")));
    expect_none(&device, "the end by itself");
    host.dm(&["start", "x"]).ok();
    device = loop_of(&host, "x");
    host.dm(&["update", "--io-write-bps", "0", "x"]).ok();
    assert_eq!(in_root(&device), rates("max", "max"), "an update");
    assert_eq!(of_root(&host), [""; 0]);
    host.dm(&["update", "--io-write-bps", "2m", "x"]).ok();
    assert_eq!(in_root(&device), rates("2097152", "max"));
    host.dm(&["rm", "-f", "x"]).ok();
    expect_none(&device, "removed");

    assert_eq!(in_root(&other), rates("7340032", "max"), "the operator's device");
    rate_of_other("0");
    host.sh(&format!("losetup --detach {}", node.trim())).ok();
}

/// A killed command and a removed instance leave rates to a device that the next container gets.
#[test]
fn rates_of_an_earlier_file_are_cleared_before_a_device_is_used() {
    if blkio_root().is_none() {
        eprintln!("SKIPPED: cgroup v2 needs no rates of the root");
        return;
    }
    let host = Host::with_busybox();
    let file = blkio_root().expect("v1").join("blkio.throttle.write_bps_device");
    let earlier = host.dir().join("earlier");
    fs::write(&earlier, vec![0; 1 << 20]).expect("a file");
    // A rate that no other test has.
    let rate = "123456789";
    // Other tests may get some of the devices first, or free others, which a container gets before these.
    for round in 0..10 {
        let losetup = format!("losetup --find --show {}", earlier.display());
        let nodes: Vec<String> = (0..8).map(|_| host.sh(&losetup).ok().trim().to_owned()).collect();
        let name_of = |node: &String| node.trim_start_matches("/dev/").to_owned();
        let devices: Vec<String> = nodes.iter().map(name_of).collect();
        let give = |device: &str, rate: &str| {
            let number = fs::read_to_string(Path::new("/sys/block").join(device).join("dev"));
            let number = number.expect("the device");
            fs::write(&file, format!("{} {rate}", number.trim())).expect("a rate");
        };
        devices.iter().for_each(|device| give(device, rate));
        host.sh(&format!("losetup --detach {}", nodes.join(" "))).ok();
        let name = format!("x{round}");
        start(&host, &name, &["--disk", "16m"]);
        let own = loop_of(&host, &name);
        let found = in_root(&own);
        devices.iter().filter(|device| in_root(device).0 == rate).for_each(|it| give(it, "0"));
        if devices.contains(&own) {
            assert_eq!(found, ("max".to_owned(), "max".to_owned()));
            return;
        }
    }
    panic!("no container got the device of an earlier file");
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
    let seen = |name: &str| {
        let row = host.feature(name);
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
    // Of a container with a disk of its own they are.
    let out =
        host.dm(&[&["run", "-d", "--name", "d", "--disk", "16m", "--io-write-bps", "1m"], SLEEP]
            .concat());
    let (said, text) = (stderr_of(out), seen("io rates of a disk"));
    match text.split_once("; ") {
        Some((_, text)) => assert!(said.contains(text), "{said}"),
        None => assert!(!said.contains("not enforced for writes"), "{said}"),
    }

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
