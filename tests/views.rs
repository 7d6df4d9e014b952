//! Truthful views: files of procfs and sysfs inside a container agree with its limits.

use std::time::Instant;

use dormouse_testkit::{Host, soon, wait_until};

use crate::contracts::{Daemon, start};

const MIB_KIB: u64 = 1024;

/// The output of a script in a container.
#[track_caller]
fn inside(host: &Host, name: &str, script: &str) -> String {
    host.dm(&["exec", name, "sh", "-c", script]).ok()
}

/// A number of `/proc/meminfo` in a container, in KiB.
#[track_caller]
fn meminfo(host: &Host, name: &str, field: &str) -> u64 {
    let text = inside(host, name, "cat /proc/meminfo");
    let line = text.lines().find(|line| line.starts_with(&format!("{field}:")));
    let line = line.unwrap_or_else(|| panic!("no {field}: {text}"));
    line.split_whitespace().nth(1).and_then(|word| word.parse().ok()).expect("a number")
}

/// The mounts of views in a container.
#[track_caller]
fn mounted(host: &Host, name: &str) -> Vec<String> {
    let table = inside(host, name, "cat /proc/self/mountinfo");
    let places = table.lines().filter_map(|line| line.split(' ').nth(4));
    let is_view = |place: &&str| {
        ["meminfo", "swaps", "cpuinfo", "stat", "loadavg", "diskstats", "online", "possible"]
            .contains(&place.rsplit('/').next().unwrap_or_default())
    };
    let mut places: Vec<String> = places.filter(is_view).map(str::to_owned).collect();
    places.sort();
    places
}

const OF_MEMORY: [&str; 4] = ["/proc/diskstats", "/proc/loadavg", "/proc/meminfo", "/proc/swaps"];

#[test]
fn vm_views_show_the_limits_of_the_container() {
    let host = Host::with_busybox();
    let begin = Instant::now();
    start(&host, "x", &["--memory", "64m", "--cpus", "1"]);
    assert_eq!(meminfo(&host, "x", "MemTotal"), 64 * MIB_KIB);
    assert!(meminfo(&host, "x", "MemAvailable") <= 64 * MIB_KIB);
    assert!(meminfo(&host, "x", "SwapTotal") <= 64 * MIB_KIB);
    assert_eq!(inside(&host, "x", "grep -c ^processor /proc/cpuinfo").trim(), "1");
    assert_eq!(inside(&host, "x", "cat /sys/devices/system/cpu/online"), "0");
    assert_eq!(inside(&host, "x", "grep -c '^cpu[0-9]' /proc/stat").trim(), "1");
    assert_eq!(inside(&host, "x", "wc -w < /proc/loadavg").trim(), "5");
    assert!(inside(&host, "x", "cat /proc/swaps").starts_with("Filename"));
    // The kernel's own file, by the boot clock of the container.
    let uptime = inside(&host, "x", "cat /proc/uptime");
    let seconds: f64 = uptime.split(' ').next().and_then(|s| s.parse().ok()).expect("a number");
    assert!(seconds <= begin.elapsed().as_secs_f64() + 0.1, "{uptime}");
    // btime of /proc/stat and the start times of processes are of the same clock (ps, top).
    let btime = inside(&host, "x", "sed -n 's/^btime //p' /proc/stat");
    let now = inside(&host, "x", "date +%s");
    let [btime, now] = [&btime, &now].map(|text| text.trim().parse::<f64>().expect("a number"));
    let uptime = inside(&host, "x", "cat /proc/uptime");
    let seconds: f64 = uptime.split(' ').next().and_then(|s| s.parse().ok()).expect("a number");
    assert!(now - btime <= seconds + 2.0 && btime <= now, "{btime} {now} {seconds}");
    let born = inside(&host, "x", "sed 's/.*) //' /proc/1/stat | cut -d' ' -f20");
    assert!(
        born.trim().parse::<u64>().expect("a number") < 1000,
        "start time of process 1: {born}"
    );
    let text = host.dm(&["inspect", "--format", "table", "x"]).ok();
    assert!(text.contains("nproc"), "{text}");
    assert_eq!(host.inspect("x")["not_shown_inside"].as_array().map(Vec::len), Some(2));
}

#[test]
fn vm_container_without_limits_has_the_files_of_the_kernel() {
    let host = Host::with_busybox();
    start(&host, "x", &[]);
    start(&host, "no", &["--memory", "64m", "--views", "no"]);
    start(&host, "privileged", &["--memory", "64m", "--privileged"]);
    for name in ["x", "no", "privileged"] {
        assert_eq!(mounted(&host, name), Vec::<String>::new(), "{name}");
    }
    assert!(!host.root().join("run/views").exists(), "nothing is mounted for them");
    start(&host, "yes", &["--views", "yes"]);
    assert_eq!(mounted(&host, "yes").len(), 7);
    let all = host.sh("grep -c ^processor /proc/cpuinfo").ok();
    assert_eq!(inside(&host, "yes", "grep -c ^processor /proc/cpuinfo"), all);
}

#[test]
fn vm_update_changes_views_at_once() {
    let host = Host::with_busybox();
    start(&host, "x", &[]);
    host.dm(&["update", "--memory", "64m", "x"]).ok();
    assert_eq!(meminfo(&host, "x", "MemTotal"), 64 * MIB_KIB);
    assert_eq!(mounted(&host, "x"), OF_MEMORY);
    host.dm(&["update", "--memory", "96m", "x"]).ok();
    assert_eq!(meminfo(&host, "x", "MemTotal"), 96 * MIB_KIB);
    host.dm(&["update", "--cpus", "0.5", "x"]).ok();
    assert_eq!(inside(&host, "x", "cat /sys/devices/system/cpu/online"), "0");
    assert_eq!(mounted(&host, "x").len(), 7);
    host.put_to_sleep("x");
    host.dm(&["update", "--memory", "80m", "x"]).ok();
    host.dm(&["wake", "x"]).ok();
    assert_eq!(meminfo(&host, "x", "MemTotal"), 80 * MIB_KIB);
    assert_eq!(mounted(&host, "x").len(), 7);
}

/// A process inside cannot change a view, whatever it can do to the mount of it.
#[test]
fn vm_view_cannot_be_written_from_inside() {
    let host = Host::with_busybox();
    let attack = "echo x > /proc/meminfo; rm -f /proc/meminfo; chmod 666 /proc/meminfo
        mount -o remount,bind,rw /proc/meminfo; mount -o remount,rw /proc/meminfo
        chmod 666 /proc/meminfo; echo x > /proc/meminfo; truncate -s 0 /proc/meminfo
        chown 0:0 /proc/meminfo; umount /proc/meminfo; true";
    start(&host, "x", &["--memory", "64m"]);
    inside(&host, "x", attack);
    assert_eq!(mounted(&host, "x"), OF_MEMORY);
    assert_eq!(meminfo(&host, "x", "MemTotal"), 64 * MIB_KIB);
    // With all capabilities inside, mounts can be removed: the file stays as it is.
    start(
        &host,
        "strong",
        &["--memory", "64m", "--cap-add", "ALL", "--security-opt", "seccomp=unconfined"],
    );
    inside(&host, "strong", attack);
    let views = host.root().join("run/views");
    let all = host.sh(&format!("head -qn 1 {}/*/meminfo", views.display())).ok();
    let all: Vec<&str> = all.lines().collect();
    assert_eq!(all, ["MemTotal:          65536 kB"; 2]);
}

/// Programs that have views open are saved and restored with them.
#[test]
fn vm_views_survive_sleep_checkpoint_and_clone() {
    let host = Host::with_busybox();
    let holder = "exec 3</proc/meminfo 4</sys/devices/system/cpu/online; read -r line <&3
        while :; do sleep 1000; done";
    let options = ["run", "-d", "--name", "x", "--memory", "64m", "--cpus", "1", "busybox"];
    host.dm(&[&options[..], &["busybox", "sh", "-c", holder]].concat()).ok();
    host.wait_inside("x", "test -e /proc/1/fd/4");
    let before = inside(&host, "x", "cat /proc/uptime");
    for _ in 0..2 {
        host.put_to_sleep("x");
        host.dm(&["wake", "x"]).ok();
        assert_eq!(meminfo(&host, "x", "MemTotal"), 64 * MIB_KIB);
        assert_eq!(mounted(&host, "x").len(), 7);
        assert_eq!(inside(&host, "x", "readlink /proc/1/fd/3"), "/proc/meminfo");
    }
    let uptime =
        |text: &str| text.split(' ').next().and_then(|s| s.parse::<f64>().ok()).expect("a number");
    let after = inside(&host, "x", "cat /proc/uptime");
    assert!(uptime(&after) >= uptime(&before), "{before} {after}");
    let btime = inside(&host, "x", "echo $(( $(date +%s) - $(sed -n 's/^btime //p' /proc/stat) ))");
    let since: f64 = btime.trim().parse().expect("a number");
    let now = uptime(&inside(&host, "x", "cat /proc/uptime"));
    assert!((now - since).abs() <= 2.0, "{now} {since}");
    assert_eq!(host.inspect("x")["unproven"].as_str().unwrap_or_default(), "");
    host.dm(&["clone", "--name", "y", "x"]).ok();
    host.wait_for_state("y", "running");
    host.dm(&["update", "--memory", "72m", "y"]).ok();
    assert_eq!(meminfo(&host, "y", "MemTotal"), 72 * MIB_KIB);
    assert_eq!(meminfo(&host, "x", "MemTotal"), 64 * MIB_KIB);
    host.dm(&["checkpoint", "x"]).ok();
    host.dm(&["restore", "x"]).ok();
    assert_eq!(meminfo(&host, "x", "MemTotal"), 64 * MIB_KIB);
}

#[test]
fn vm_nproc_is_a_set_of_cpus() {
    let host = Host::with_busybox();
    start(&host, "x", &["--nproc", "1"]);
    assert_eq!(inside(&host, "x", "nproc"), "1");
    let cpu = inside(&host, "x", "cat /sys/devices/system/cpu/online");
    assert_eq!(inside(&host, "x", "cat /sys/devices/system/cpu/possible"), cpu);
    assert_eq!(inside(&host, "x", "sed -n 's/^Cpus_allowed_list:\\t//p' /proc/self/status"), cpu);
    let processor = inside(&host, "x", "sed -n 's/^processor[^0-9]*//p' /proc/cpuinfo");
    assert_eq!(processor, cpu);
    // The threads of a clone are bound to the set of the original.
    host.dm(&["clone", "--name", "y", "x"]).ok();
    host.wait_for_state("y", "running");
    assert_eq!(inside(&host, "y", "cat /sys/devices/system/cpu/online"), cpu);
    assert_eq!(inside(&host, "y", "sed -n 's/^Cpus_allowed_list:\\t//p' /proc/1/status"), cpu);
    assert_eq!(host.inspect("y")["config"]["limits"]["cpuset_cpus"], cpu.trim());
    let refused = host.dm(&["run", "--nproc", "100000", "busybox", "true"]).fails();
    assert!(refused.contains("the host has"), "{refused}");
}

/// Fills memory in a container, and returns when its view shows that.
#[track_caller]
fn shows_use(host: &Host, name: &str, mib: u64) {
    let file = format!("/dev/shm/{mib}");
    inside(host, name, &format!("dd if=/dev/zero of={file} bs=1M count={mib} 2>/dev/null"));
    let shown = || meminfo(host, name, "Shmem") >= mib * MIB_KIB;
    assert!(wait_until(soon(), shown), "{}", meminfo(host, name, "Shmem"));
    inside(host, name, &format!("rm {file}"));
    let is_gone = || meminfo(host, name, "Shmem") < mib * MIB_KIB;
    assert!(wait_until(soon(), is_gone), "{}", meminfo(host, name, "Shmem"));
}

#[test]
fn vm_daemon_writes_views_when_they_are_opened() {
    let host = Host::with_busybox();
    start(&host, "x", &["--memory", "64m", "--cpus", "1"]);
    let mut daemon = Daemon::start(&host);
    shows_use(&host, "x", 8);
    // A container that starts later, and one that wakes.
    start(&host, "y", &["--memory", "64m"]);
    shows_use(&host, "y", 9);
    host.put_to_sleep("y");
    host.dm(&["wake", "y"]).ok();
    shows_use(&host, "y", 10);
    inside(&host, "x", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done");
    let used = || {
        let text = inside(&host, "x", "grep '^cpu ' /proc/stat");
        let words: Vec<u64> =
            text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        words[0] + words[2] > 0 && inside(&host, "x", "cat /proc/loadavg") != "0.00 0.00 0.00 1/1 1"
    };
    assert!(wait_until(soon(), used));
    host.dm(&["update", "--memory", "48m", "x"]).ok();
    assert_eq!(meminfo(&host, "x", "MemTotal"), 48 * MIB_KIB);
    // Killed: the last contents stay, and no open waits.
    daemon.kill();
    assert_eq!(meminfo(&host, "x", "MemTotal"), 48 * MIB_KIB);
    host.dm(&["rm", "-f", "y"]).ok();
    start(&host, "y", &["--memory", "40m"]);
    assert_eq!(meminfo(&host, "y", "MemTotal"), 40 * MIB_KIB);
    let _daemon = Daemon::start(&host);
    shows_use(&host, "y", 11);
    shows_use(&host, "x", 12);
}

/// The file system of views ends with the last container, and the next container has another one.
#[test]
fn vm_daemon_writes_views_of_a_file_system_that_is_mounted_again() {
    let host = Host::with_busybox();
    let _daemon = Daemon::start(&host);
    let views = host.root().join("run/views").display().to_string();
    let is_mounted = || host.mounts().contains(&views);
    for mib in 8..11 {
        start(&host, "x", &["--memory", "64m"]);
        assert!(is_mounted());
        shows_use(&host, "x", mib);
        host.dm(&["rm", "-f", "x"]).ok();
        // The keeper does the same at its end.
        assert!(wait_until(soon(), || host.dm(&["internal", "reset"]).status == 0));
        assert!(!is_mounted());
    }
}

/// Opens in a loop keep no other container waiting.
#[test]
fn vm_container_that_opens_views_in_a_loop_stalls_no_other() {
    let host = Host::with_busybox();
    let _daemon = Daemon::start(&host);
    start(&host, "x", &["--memory", "64m"]);
    start(&host, "loop", &["--memory", "64m"]);
    let hog = "for i in 1 2 3 4 5 6 7 8; do
        (while :; do read -r a </proc/meminfo; read -r a </proc/loadavg; done) & done; sleep 1000";
    host.dm(&["exec", "-d", "loop", "sh", "-c", hog]).ok();
    for round in 0..3 {
        shows_use(&host, "x", 4 + round);
    }
    host.dm(&["rm", "-f", "loop"]).ok();
    shows_use(&host, "x", 9);
}

/// Memory of `free` in a container, which is that of sysinfo(2): all and free, in KiB.
#[track_caller]
fn free(host: &Host, name: &str) -> (u64, u64) {
    let text = inside(host, name, "free");
    let line = text.lines().find(|line| line.trim_start().starts_with("Mem:"));
    let numbers = line.unwrap_or_else(|| panic!("{text}")).split_whitespace().skip(1);
    let numbers: Vec<u64> = numbers.map(|word| word.parse().expect("a number")).collect();
    (numbers[0], numbers[2])
}

/// Whether this kernel lets a program change what sysinfo(2) returns.
fn changes_sysinfo(host: &Host) -> bool {
    let report: serde_json::Value =
        serde_json::from_str(&host.dm(&["check", "--json"]).stdout).expect("JSON");
    let mut features = report["features"].as_array().expect("features").iter();
    let is_it = |name: &str| name.contains("return of sysinfo(2)");
    let row = features.rfind(|row| row["name"].as_str().is_some_and(is_it)).expect("a probe");
    if row["have"] != true {
        eprintln!("SKIPPED: {row}");
    }
    row["have"] == true
}

#[test]
fn vm_sysinfo_shows_the_container() {
    let host = Host::with_busybox();
    start(&host, "before", &["--memory", "64m"]);
    start(&host, "plain", &[]);
    let of_host = free(&host, "before").0;
    assert!(of_host > 64 * MIB_KIB, "no daemon has run");
    let says = |name: &str| host.inspect(name)["not_shown_inside"].to_string().contains("sysinfo");
    assert!(says("before"));
    if !changes_sysinfo(&host) {
        return;
    }
    let mut daemon = Daemon::start(&host);
    let all = |name: &str| free(&host, name).0;
    assert!(wait_until(soon(), || all("before") == 64 * MIB_KIB), "{}", all("before"));
    assert!(!says("before"));
    assert_eq!(all("plain"), of_host, "a container without a limit has all of the host");
    start(&host, "after", &["--memory", "32m", "--cpus", "1"]);
    let (total, left) = free(&host, "after");
    assert_eq!(total, 32 * MIB_KIB);
    assert!(left < total, "{left} of {total} KiB are free: it uses some");
    // The kernel's counter at the moment of the call.
    inside(&host, "after", "dd if=/dev/zero of=/dev/shm/file bs=1M count=8 2>/dev/null");
    let after = free(&host, "after").1;
    assert!(left - after >= 7 * MIB_KIB, "{left} KiB were free, {after} are");
    inside(&host, "after", "(while :; do :; done) >/dev/null 2>&1 &");
    let load = || inside(&host, "after", "uptime | sed 's/.*load average: //'");
    let is_loaded = || load().split(',').next().is_some_and(|one| one.trim() != "0.00");
    assert!(wait_until(soon(), is_loaded), "{}", load());
    assert_eq!(inside(&host, "before", "uptime | grep -c 'average: 0.0'").trim(), "1");

    daemon.kill();
    assert_eq!((all("before"), all("after")), (64 * MIB_KIB, 32 * MIB_KIB));
    start(&host, "later", &["--memory", "48m"]);
    assert_eq!(all("later"), 48 * MIB_KIB);
    host.dm(&["update", "--memory", "96m", "before"]).ok();
    assert_eq!(all("before"), 96 * MIB_KIB);
    host.dm(&["rm", "--force", "after"]).ok(); // it takes the CPU time of a trial restore
    host.put_to_sleep("later");
    host.dm(&["wake", "later"]).ok();
    assert_eq!(all("later"), 48 * MIB_KIB, "it has another cgroup");
    host.dm(&["stop", "--time", "0", "later"]).ok();
    host.dm(&["start", "later"]).ok();
    assert_eq!(all("later"), 48 * MIB_KIB);

    let place = host.root().join("run/sysinfo");
    let is_mounted = || host.mounts().contains(&place.display().to_string());
    assert!(is_mounted());
    host.dm(&["rm", "--force", "--all"]).ok();
    assert!(wait_until(soon(), || !is_mounted()), "it ends with the last container");
}
