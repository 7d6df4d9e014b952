//! Swap files of the daemon: memory of drowsy containers goes there, spread over their disks, and
//! comes back. So do pages of idle containers where other containers need memory.

use std::path::PathBuf;
use std::process::Stdio;

use dormouse_testkit::{Host, image, run, soon, wait_until};
use rustix::process::{Pid, Signal, kill_process};

const MEGABYTES: u64 = 48;

/// A host with two small disks, and the path of a future swap file on each.
struct Disks {
    host: Host,
    files: [PathBuf; 2],
}

/// A swap area as the kernel reports it.
#[derive(Debug)]
struct Area {
    used_mb: u64,
    priority: i32,
}

impl Disks {
    fn new() -> Self {
        let host = Host::with_busybox();
        let files = [1, 2].map(|number| {
            let [disk, at] = ["disk", "at"].map(|name| host.dir().join(format!("{name}{number}")));
            std::fs::create_dir_all(&at).expect("made");
            let (disk, to) = (disk.display(), at.display());
            host.sh(&format!(
                "fallocate -l 64M {disk} && mke2fs -q -t ext4 -m 0 {disk} && mount -o loop {disk} {to}"
            ))
            .ok();
            at.join("swap")
        });
        Self { host, files }
    }

    /// The swap files in use, read in the mount namespace with their disks.
    fn areas(&self) -> Vec<Area> {
        let text = self.host.sh("cat /proc/swaps").ok();
        let of = |file: &PathBuf| {
            let line = text.lines().find(|line| line.starts_with(&*file.to_string_lossy()))?;
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            let used_mb = words[3].parse::<u64>().expect("a number") >> 10;
            Some(Area { used_mb, priority: words[4].parse().expect("a number") })
        };
        self.files.iter().filter_map(of).collect()
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        for file in &self.files {
            let disk = file.parent().expect("a file on a disk");
            self.host.sh(&format!("swapoff {}; umount {}", file.display(), disk.display()));
        }
    }
}

/// Starts a server that numbers its connections, with `kib` of private memory.
#[track_caller]
fn serve(host: &Host, name: &str, kib: u64, options: &[&str]) {
    let run = [&["run", "-d", "--name", name], options].concat();
    let serve = ["busybox", "probe", "count", "0.0.0.0", "80", &kib.to_string()];
    host.dm(&[&run[..], &serve].concat()).ok();
}

/// Returns the server's answer to a request.
#[track_caller]
fn query(host: &Host, name: &str) -> String {
    let address = host.address_of(name);
    let mut answer = String::new();
    let answers = || {
        let mut probe = host.command(image::probe());
        probe.args(["ask", &address, "80"]);
        answer = run(probe, b"", soon()).stdout.trim().to_owned();
        !answer.is_empty()
    };
    assert!(wait_until(soon(), answers), "an answer");
    answer
}

/// Twelve servers of 8 MB, memory for four, and swap for some of the others.
#[test]
fn idle_pages_go_to_swap_and_containers_sleep_when_swap_is_full() {
    let disks = Disks::new();
    let host = &disks.host;
    let names: Vec<String> = (0..12).map(|n| format!("c{n}")).collect();
    for name in &names {
        serve(host, name, 8 << 10, &["--sleep-after", "3600s"]);
        assert_eq!(query(host, name), "call 1");
    }
    let asleep = || names.iter().filter(|name| host.state_of(name) == "asleep").count();
    let in_memory = || -> u64 {
        let of = |name: &String| {
            let pid = host.inspect(name)["pid"].as_u64().filter(|pid| *pid > 0)?;
            let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
            let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
        };
        names.iter().filter_map(of).sum::<u64>() >> 10
    };
    for (swap, room) in [(48, true), (20, false)] {
        let [first, second] =
            disks.files.each_ref().map(|file| format!("{}={swap}m", file.display()));
        let options = ["daemon", "--memory", "40m", "--swap", &first, "--swap", &second];
        let mut daemon =
            host.dormouse(&options).stderr(Stdio::null()).spawn().expect("the command starts");
        let fits = || in_memory() < 40 && (room || asleep() > 0);
        assert!(wait_until(soon(), fits), "{} MB, {} sleep", in_memory(), asleep());
        assert_eq!(asleep() == 0, room, "{} sleep", asleep());
        // Each container answers from its restored memory, while others are swapped out or
        // suspended instead.
        for round in 2..4 {
            for name in &names {
                let number = if room { round } else { round + 2 };
                assert_eq!(query(host, name), format!("call {number}"), "{name}");
            }
        }
        assert!(wait_until(soon(), fits), "{} MB, {} sleep", in_memory(), asleep());
        kill_process(Pid::from_child(&daemon), Signal::TERM).expect("the process runs");
        daemon.wait().expect("our child");
        // All pages are in memory again, and smaller swap files can be created.
        for file in &disks.files {
            host.sh(&format!("swapoff {0} && rm {0}", file.display())).ok();
        }
    }
}

#[test]
fn drowsy_memory_is_spread_over_swap_files_of_daemon() {
    let disks = Disks::new();
    let host = &disks.host;
    let [first, second] = disks.files.each_ref().map(|file| format!("{}=40m", file.display()));
    // The daemon is killed, and its swap files stay in use.
    let begin = || {
        let mut daemon = host.dormouse(&["daemon", "--swap", &first, "--swap", &second]);
        let mut child = daemon.stderr(Stdio::null()).spawn().expect("the command starts");
        assert!(wait_until(soon(), || disks.areas().len() == 2), "{:?}", disks.areas());
        kill_process(Pid::from_child(&child), Signal::KILL).expect("the process runs");
        child.wait().expect("our child");
    };
    begin();
    let areas = disks.areas();
    assert_eq!(areas[0].priority, areas[1].priority, "the kernel uses the files in turn");
    assert!(areas[0].priority > 0, "the files precede other swap");
    serve(host, "x", MEGABYTES << 10, &[]);
    let call = || query(host, "x");
    assert_eq!(call(), "call 1");
    host.dm(&["sleep", "--drowsy", "x"]).ok();
    let areas = disks.areas();
    assert!(areas.iter().all(|area| area.used_mb >= MEGABYTES / 4), "{areas:?}");
    // The next daemon uses the swap files unchanged.
    begin();
    assert_eq!(call(), "call 2");
    host.dm(&["rm", "-f", "x"]).ok();
}

#[test]
fn vm_daemon_refuses_foreign_file_as_swap() {
    let host = Host::new();
    let diary = host.dir().join("diary");
    std::fs::write(&diary, "dear diary").expect("written");
    for (file, why) in
        [(format!("{}=8m", diary.display()), "not a swap file"), ("8m".into(), "path")]
    {
        let out = host.dm(&["daemon", "--swap", &file]);
        assert_ne!(out.status, 0);
        assert!(out.stderr.contains(why), "{}", out.stderr);
    }
    assert_eq!(std::fs::read_to_string(&diary).expect("the file exists"), "dear diary");
}
