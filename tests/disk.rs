//! Disks of containers: their size and number of files hold, a full one harms no other, their files and limits are
//! kept over every verb, and nothing of them is left on the host.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use dormouse_testkit::{Host, Output, image, soon, wait_until};

use crate::contracts::{Daemon, id, start};

/// Runs until it is killed.
const SLEEP: &[&str] = &["busybox", "sleep", "1000000"];

/// Files of this host on loop devices.
pub(crate) fn attached(host: &Host) -> Vec<String> {
    let root = host.root().display().to_string();
    let of = |entry: fs::DirEntry| fs::read_to_string(entry.path().join("loop/backing_file")).ok();
    let all = fs::read_dir("/sys/block").expect("sysfs").flatten().filter_map(of);
    let mut all: Vec<_> = all.filter(|file| file.starts_with(&root)).collect();
    all.sort();
    all
}

/// Waits until so many disks are in use.
#[track_caller]
fn expect_attached(host: &Host, count: usize, what: &str) {
    let all_are = wait_until(soon(), || attached(host).len() == count);
    assert!(all_are, "{what}: {:?} are attached, not {count}", attached(host));
}

/// The file with the disk of a container.
#[track_caller]
fn file(host: &Host, name: &str) -> PathBuf {
    host.root().join("lib/containers").join(id(host, name)).join("drive")
}

/// Bytes of a file on the host.
#[track_caller]
fn place(file: &Path) -> u64 {
    fs::metadata(file).expect("the file of the disk").blocks() * 512
}

#[track_caller]
fn inside(host: &Host, name: &str, script: &str) -> Output {
    host.dm(&["exec", name, "sh", "-c", script])
}

/// Size and free space of the root directory inside, in kB, then files and free files.
#[track_caller]
fn df(host: &Host, name: &str) -> [u64; 4] {
    let row = |options: &str| -> [u64; 2] {
        let text = inside(host, name, &format!("df {options} -P / | tail -n 1")).ok();
        let words: Vec<&str> = text.split_whitespace().collect();
        [words[1], words[3]].map(|word| word.parse().unwrap_or_else(|_| panic!("df: {text}")))
    };
    let ([size, free], [files, free_files]) = (row("-k"), row("-i"));
    [size, free, files, free_files]
}

/// The size of a disk as `df` shows it: without the journal and the tables of the file system.
#[track_caller]
fn assert_size(host: &Host, name: &str, mb: u64, what: &str) {
    let [size, ..] = df(host, name);
    assert!((mb * 1024 * 3 / 4..=mb * 1024).contains(&size), "{what}: {size} kB of {mb} MB");
}

#[test]
fn vm_disk_has_its_size_and_files_and_a_full_one_harms_no_other() {
    let host = Host::with_busybox();
    start(&host, "x", &["--disk", "32m", "--inodes", "500"]);
    start(&host, "y", &["--storage-opt", "size=32m"]);
    start(&host, "z", &[]);
    assert_size(&host, "x", 32, "x");
    let [_, free, files, free_files] = df(&host, "x");
    assert!((500..700).contains(&files), "{files}");
    assert!(free > 20 << 10 && free_files > 450, "{free} kB, {free_files} files");
    expect_attached(&host, 2, "two run");

    // Blocks.
    let line = inside(&host, "x", "dd if=/dev/zero of=/fill bs=64k").stderr;
    assert!(line.contains("No space left on device"), "{line}");
    let [_, free, ..] = df(&host, "x");
    assert!(free < 64, "{free} kB are free");
    let write = "dd if=/dev/zero of=/f bs=64k count=16 2>/dev/null && sync && rm /f";
    inside(&host, "y", write).ok();
    inside(&host, "z", write).ok();
    let of_x = file(&host, "x");
    assert!(place(&of_x) > 20 << 20, "{}", place(&of_x));
    inside(&host, "x", "rm /fill && sync && echo again > /f").ok();
    // At a commit of the journal.
    let given_back = wait_until(soon(), || place(&of_x) < 8 << 20);
    assert!(given_back, "{} bytes stay", place(&of_x));

    // Files.
    let line = inside(&host, "x", "i=0; while echo 1 > /n$i; do i=$((i + 1)); done; echo $i");
    let made: u64 = line.stdout.trim().parse().expect("a number");
    assert!(line.stderr.contains("No space left"), "{line}");
    assert!((450..700).contains(&made), "{made}");
    let [_, _, _, free_files] = df(&host, "x");
    assert_eq!(free_files, 0);
    inside(&host, "y", write).ok();

    let table = host.dm(&["inspect", "--format", "table", "x"]).ok();
    assert!(table.contains("32m, 500 inodes"), "{table}");
    let podman: serde_json::Value =
        serde_json::from_str(&host.dm(&["inspect", "y"]).ok()).expect("JSON");
    assert_eq!(podman[0]["HostConfig"]["StorageOpt"]["size"], "32m");
    for name in ["x", "y", "z"] {
        host.dm(&["rm", "-f", name]).ok();
    }
    expect_attached(&host, 0, "all are removed");
}

/// Bytes that are written by the container are counted once, although they pass two devices.
#[test]
fn vm_writes_to_a_disk_are_counted_once() {
    let host = Host::with_busybox();
    start(&host, "x", &["--disk", "64m"]);
    let script = "dd if=/dev/zero of=/f bs=1M count=8 oflag=direct 2>/dev/null";
    inside(&host, "x", script).ok();
    let text = host.dm(&["stats", "--no-stream", "--json", "x"]).ok();
    let stats: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let stats = if stats.is_array() { &stats[0] } else { &stats };
    let written = stats["io_write_bytes"].as_u64().expect("a number");
    assert!((8 << 20..12 << 20).contains(&written), "{written}");
}

#[test]
fn vm_files_and_limits_of_a_disk_are_kept_over_every_verb() {
    let host = Host::with_busybox();
    start(&host, "x", &["--disk", "48m", "--inodes", "900"]);
    inside(&host, "x", "dd if=/dev/urandom of=/data bs=64k count=32 2>/dev/null; mv /www /e").ok();
    let sum = inside(&host, "x", "md5sum < /data").ok();
    let [size, _, files, _] = df(&host, "x");
    #[track_caller]
    fn same(host: &Host, (name, what): (&str, &str), sum: &str, size: u64, files: u64) {
        assert_eq!(inside(host, name, "md5sum < /data").ok(), sum, "{what}");
        assert!(inside(host, name, "test -d /e && ! test -e /www").status == 0, "{what}");
        let [now, _, of, _] = df(host, name);
        assert_eq!((now, of), (size, files), "{what}");
    }
    same(&host, ("x", "a start"), &sum, size, files);

    host.put_to_sleep("x");
    expect_attached(&host, 0, "asleep");
    let changes = host.dm(&["diff", "x"]).ok();
    assert!(changes.lines().any(|line| line == "A /data"), "{changes}");
    expect_attached(&host, 0, "asleep, after diff");
    host.dm(&["wake", "x"]).ok();
    same(&host, ("x", "a wake"), &sum, size, files);

    host.dm(&["restart", "--time", "0", "x"]).ok();
    same(&host, ("x", "a restart"), &sum, size, files);
    host.dm(&["checkpoint", "x"]).ok();
    expect_attached(&host, 0, "checkpointed");
    host.dm(&["restore", "x"]).ok();
    same(&host, ("x", "a restore"), &sum, size, files);

    host.dm(&["clone", "--name", "y", "x"]).ok();
    same(&host, ("y", "a clone"), &sum, size, files);
    inside(&host, "y", "echo other > /data").ok();
    same(&host, ("x", "beside its clone"), &sum, size, files);
    expect_attached(&host, 2, "with a clone");
    host.dm(&["clone", "--asleep", "--name", "z", "x"]).ok();
    expect_attached(&host, 2, "with an asleep clone");
    host.dm(&["wake", "z"]).ok();
    same(&host, ("z", "a clone that wakes"), &sum, size, files);

    let archive = host.dir().join("x.tar").display().to_string();
    host.dm(&["checkpoint", "--archive", "--to", &archive, "x"]).ok();
    for name in ["x", "y", "z"] {
        host.dm(&["rm", "-f", name]).ok();
    }
    expect_attached(&host, 0, "all are removed");
}

/// The same verb finds the same files whether the container runs or not.
#[test]
fn vm_files_on_a_disk_are_read_and_written_whether_it_runs_or_not() {
    let host = Host::with_busybox();
    let local = host.dir().join("local");
    fs::write(&local, "from the host").expect("written");
    let local = local.display().to_string();
    start(&host, "x", &["--disk", "32m"]);
    inside(&host, "x", "mkdir /d && echo inside > /d/f && rm /bin/vi").ok();
    for (step, runs) in [("running", true), ("stopped", false)] {
        if !runs {
            host.dm(&["stop", "--time", "0", "x"]).ok();
            expect_attached(&host, 0, "stopped");
        }
        let changes = host.dm(&["diff", "x"]).ok();
        assert!(changes.lines().any(|line| line == "A /d/f"), "{step}: {changes}");
        assert!(changes.lines().any(|line| line == "D /bin/vi"), "{step}: {changes}");
        assert!(!changes.contains("lost+found"), "{step}: {changes}");
        let to = format!("x:/d/{step}");
        host.dm(&["cp", &local, &to]).ok();
        let back = host.dir().join("back").display().to_string();
        host.dm(&["cp", &to, &back]).ok();
        assert_eq!(fs::read_to_string(&back).expect("copied"), "from the host", "{step}");
        host.dm(&["commit", "x", &format!("made-{step}")]).ok();
        let run = ["run", "--rm", "--net", "none", &format!("made-{step}"), "cat", "/d/f"];
        assert_eq!(host.dm(&run).ok(), "inside", "{step}");
        let tar = host.dir().join("x.tar").display().to_string();
        host.dm(&["export", "--output", &tar, "x"]).ok();
        assert!(host.sh(&format!("tar -tf {tar}")).ok().contains("d/f"), "{step}");
        if !runs {
            expect_attached(&host, 0, "stopped, after all verbs");
        }
    }
    host.dm(&["start", "x"]).ok();
    assert_eq!(inside(&host, "x", "cat /d/running /d/stopped").ok(), "from the hostfrom the host");
}

#[test]
fn vm_disk_grows_and_never_shrinks() {
    let host = Host::with_busybox();
    host.dm(&[&["create", "--name", "x", "--disk", "32m"], SLEEP].concat()).ok();
    let update = |options: &[&str]| host.dm(&[&["update"], options, &["x"]].concat());
    // It does not run.
    update(&["--disk", "48m"]).ok();
    host.dm(&["start", "x"]).ok();
    assert_size(&host, "x", 48, "grown before its first start");
    inside(&host, "x", "echo kept > /data").ok();

    for (bad, why) in [
        (["--disk", "32m"].as_slice(), "32m, where it has 48m"),
        (&["--inodes", "9000"], "chosen when the container is made"),
        (&["--disk-guaranteed"], "chosen when the container is made"),
        (&["--disk", "1m"], "at least 16m"),
    ] {
        let line = update(bad).fails();
        assert!(line.contains(why), "{bad:?}: {line}");
    }
    assert_eq!(host.inspect("x")["config"]["limits"]["disk_bytes"], 48 << 20);

    // It runs: at once where the host permits that, otherwise at its end.
    let out = update(&["--disk", "300m"]);
    let later = out.stderr.contains("until the container stops");
    out.ok();
    if later {
        assert_size(&host, "x", 48, "growth is due");
        let said = host.inspect("x")["not_enforced"].to_string();
        assert!(said.contains("until the container stops"), "{said}");
        host.dm(&["stop", "--time", "0", "x"]).ok();
        let grown = wait_until(soon(), || host.inspect("x").get("not_enforced").is_none());
        assert!(grown, "{}", host.inspect("x"));
        host.dm(&["start", "x"]).ok();
    }
    assert_size(&host, "x", 300, "grown");
    assert_eq!(inside(&host, "x", "cat /data").ok(), "kept");
    inside(&host, "x", "dd if=/dev/zero of=/fill bs=1M count=100 2>/dev/null && sync").ok();

    // Asleep.
    host.dm(&["rm", "-f", "x"]).ok();
    start(&host, "x", &["--disk", "32m"]);
    inside(&host, "x", "echo kept > /data").ok();
    host.put_to_sleep("x");
    update(&["--disk", "64m"]).ok();
    host.dm(&["wake", "x"]).ok();
    assert_size(&host, "x", 64, "grown while it was asleep");
    assert_eq!(inside(&host, "x", "cat /data").ok(), "kept");
}

/// A growth that was interrupted by a kill, at the steps that no other command is at.
#[test]
fn vm_interrupted_growth_is_undone_and_made_again() {
    let host = Host::with_busybox();
    host.dm(&[&["create", "--name", "x", "--disk", "32m"], SLEEP].concat()).ok();
    let (disk, dir) = (file(&host, "x"), file(&host, "x").with_file_name(""));
    for saved in [None, Some("")] {
        let image = fs::File::options().write(true).open(&disk).expect("the file of the disk");
        image.set_len(200 << 20).expect("extended");
        fs::write(dir.join("drive.growing"), "").expect("written");
        if let Some(text) = saved {
            fs::write(dir.join("drive.saved"), text).expect("written");
        }
        host.dm(&["start", "x"]).ok();
        assert_size(&host, "x", 32, "the growth is undone");
        for name in ["drive.growing", "drive.saved"] {
            assert!(!dir.join(name).exists(), "{name}");
        }
        host.dm(&["stop", "--time", "0", "x"]).ok();
    }
    host.dm(&["update", "--disk", "48m", "x"]).ok();
    host.dm(&["start", "x"]).ok();
    assert_size(&host, "x", 48, "made again");
}

#[test]
fn vm_guaranteed_disk_has_its_place_and_gives_none_back() {
    let host = Host::with_busybox();
    start(&host, "x", &["--disk", "32m", "--disk-guaranteed"]);
    let disk = file(&host, "x");
    assert!(place(&disk) >= 32 << 20, "{}", place(&disk));
    let script = "dd if=/dev/zero of=/f bs=1M count=16 2>/dev/null; sync; rm /f; sync";
    inside(&host, "x", script).ok();
    host.dm(&["stop", "--time", "0", "x"]).ok();
    expect_attached(&host, 0, "stopped");
    assert!(place(&disk) >= 32 << 20, "{}", place(&disk));
    host.dm(&["update", "--disk", "48m", "x"]).ok();
    assert!(place(&disk) >= 48 << 20, "{}", place(&disk));
    host.dm(&["start", "x"]).ok();
    assert_size(&host, "x", 48, "grown");
    let before = df(&host, "x");
    host.dm(&["restart", "--time", "0", "x"]).ok();
    assert_eq!(df(&host, "x"), before);
}

#[test]
fn bad_disks_are_refused_and_leave_nothing() {
    let host = Host::with_busybox();
    let refused = |options: &[&str], why: &str| {
        let words = [&["run", "-d", "--net", "none"], options, SLEEP].concat();
        let line = host.dm(&words).fails();
        assert!(line.contains(why), "{options:?}: {line}");
    };
    let free = host.sh(&format!("df -P -k {} | tail -n 1", host.root().display())).ok();
    let free: u64 = free.split_whitespace().nth(3).expect("df").parse().expect("a number");
    let more = format!("{}k", free + 4096);
    refused(&["--disk", &more, "--disk-guaranteed"], "does not fit");
    refused(&["--disk", "15m"], "at least 16m");
    refused(&["--disk", "16t"], "less than 16t");
    refused(&["--disk", "x"], "size");
    refused(&["--inodes", "1000"], "add --disk");
    refused(&["--disk-guaranteed"], "add --disk");
    refused(&["--disk", "16m", "--inodes", "100000"], "one for each 8k");
    refused(&["--storage-opt", "size=16m", "--disk", "16m"], "each once");
    refused(&["--storage-opt", "overlay.x=1"], "size=SIZE");
    assert_eq!(host.dm(&["ps", "-aq"]).ok(), "");
    assert_eq!(attached(&host), [""; 0]);
    let pending = fs::read_dir(host.root().join("lib/pending")).expect("a directory").count();
    assert_eq!(pending, 0);

    // One that is larger than what is free is made, and says so.
    let out = host.dm(&[&["create", "--name", "x", "--disk", &more], SLEEP].concat());
    assert!(out.stderr.contains("is not guaranteed"), "{out}");
    out.ok();
    let line = host.dm(&[&["create", "--name", "y"], SLEEP].concat());
    line.ok();
    let line = host.dm(&["update", "--disk", "1g", "y"]).fails();
    assert!(line.contains("no disk of its own"), "{line}");
}

/// A mount namespace in which the directory with the programs is empty.
#[test]
fn missing_programs_are_named() {
    let host = Host::with_busybox();
    let program = dormouse_testkit::dormouse().display().to_string();
    let root = host.root().display().to_string();
    let command = format!("{program} --root {root} create --net none --disk 16m busybox true");
    let hidden = format!(
        "busybox unshare -m busybox sh -c 'busybox mount -t tmpfs none /usr/sbin && PATH=/none exec {command}'"
    );
    let line = host.sh(&hidden).fails();
    assert!(line.contains("cannot run mkfs.ext4; it is in the package e2fsprogs"), "{line}");
    assert_eq!(host.dm(&["ps", "-aq"]).ok(), "");
}

/// A container that removes itself, and one whose root is read by no other.
#[test]
fn vm_disk_of_a_container_that_removes_itself_is_gone_with_it() {
    let host = Host::with_busybox();
    let run = ["run", "--rm", "--net", "none", "--disk", "16m", "busybox", "sh", "-c"];
    let out = host.dm(&[&run[..], &["df -P -k / | tail -n 1; echo x > /f"]].concat()).ok();
    let size: u64 = out.split_whitespace().nth(1).expect("df").parse().expect("a number");
    assert!(size < 16 << 10, "{size}");
    expect_attached(&host, 0, "removed");
}

/// A host with its store on a file system of this size.
#[track_caller]
fn small_store(mb: u64) -> Host {
    let host = Host::new();
    let (image, lib) = (host.dir().join("store"), host.root().join("lib"));
    let (image, lib) = (image.display(), lib.display());
    host.sh(&format!(
        "truncate -s {mb}M {image} && /usr/sbin/mkfs.ext4 -q -F -m 0 {image} && mkdir -p {lib} && \
         mount -o loop {image} {lib}"
    ))
    .ok();
    host.import(&image::busybox(), "busybox");
    host
}

/// The free space of the store, in kB.
#[track_caller]
fn free_below(host: &Host) -> u64 {
    let text = host.sh(&format!("df -P -k {} | tail -n 1", host.root().join("lib").display())).ok();
    text.split_whitespace().nth(3).expect("df").parse().expect("a number")
}

/// Two disks that are larger than the store are filled at once. Each write is stored or refused; without the daemon
/// some are lost, and a disk becomes read-only.
#[test]
fn disks_without_a_guarantee_accept_no_more_than_there_is_below() {
    const FILL: &str = "dd if=/dev/urandom of=/fill bs=64k 2>&1; sync";
    let host = small_store(400);
    let mut daemon = Daemon::start(&host);
    for name in ["x", "y"] {
        start(&host, name, &["--disk", "1g", "--net", "none"]);
    }
    let below = free_below(&host);
    let is_bounded = |name: &str| df(&host, name)[1] < below;
    assert!(wait_until(soon(), || is_bounded("x") && is_bounded("y")), "{:?}", df(&host, "x"));
    let events = || host.dm(&["events", "--no-stream", "--json"]).ok().to_owned();
    let are_reported = || events().matches("\"disk_short\"").count() == 2;
    assert!(wait_until(soon(), are_reported), "{}", events());

    let lines = std::thread::scope(|scope| {
        let host = &host;
        let fill = |name| scope.spawn(move || inside(host, name, FILL));
        ["x", "y"].map(fill).map(|it| it.join().expect("the thread ends"))
    });
    for line in lines {
        assert!(line.stdout.contains("No space left on device"), "{line}");
    }
    assert!(free_below(&host) > 16 << 10, "the host keeps a part: {} kB", free_below(&host));
    let sums = ["x", "y"].map(|name| inside(&host, name, "md5sum < /fill").ok());
    let sizes = ["x", "y"].map(|name| inside(&host, name, "stat -c %s /fill").ok());
    let sizes = sizes.map(|text| text.trim().parse::<u64>().expect("a number"));
    assert!(sizes.iter().sum::<u64>() > 100 << 20, "{sizes:?}");
    for (name, sum) in ["x", "y"].into_iter().zip(&sums) {
        // Read from the store.
        host.dm(&["restart", "--time", "0", name]).ok();
        assert_eq!(&inside(&host, name, "md5sum < /fill").ok(), sum, "{name}");
    }

    // A restart mounts both anew. Then files that are removed make place for the other disk, too.
    let own = |name: &str| df(&host, name)[1];
    let are_bounded = || own("x") < 256 << 10 && own("y") < 256 << 10;
    assert!(wait_until(soon(), are_bounded), "{} kB, {} kB", own("x"), own("y"));
    let before = own("x");
    inside(&host, "y", "rm /fill && sync && echo kept > /f").ok();
    let has_more = wait_until(soon(), || own("x") > before + (16 << 10));
    assert!(has_more, "{before} kB, now {} kB, {} kB below", own("x"), free_below(&host));

    let bounded = own("y");
    host.sh(&format!("kill -TERM {}", daemon.child().id())).ok();
    daemon.child().wait().expect("it ends");
    assert!(own("y") > bounded + (256 << 10), "{} kB, {bounded} kB before", own("y"));
    for name in ["x", "y"] {
        host.dm(&["rm", "-f", name]).ok();
    }
    expect_attached(&host, 0, "all are removed");
    host.dm(&["internal", "reset"]).ok();
    host.sh(&format!("umount {}", host.root().join("lib").display())).ok();
}

/// One disk may fill what the host does not keep, and a guaranteed one loses nothing to it.
#[test]
fn guaranteed_disk_has_its_place_beside_one_that_is_filled() {
    let host = small_store(400);
    let daemon = Daemon::start(&host);
    start(&host, "sure", &["--disk", "64m", "--disk-guaranteed", "--net", "none"]);
    start(&host, "x", &["--disk", "2g", "--net", "none"]);
    let below = free_below(&host);
    let is_bounded = || df(&host, "x")[1] < below;
    assert!(wait_until(soon(), is_bounded), "{:?}", df(&host, "x"));
    let line =
        inside(&host, "x", "dd if=/dev/zero of=/fill bs=1M 2>&1; sync; echo more > /f; sync");
    assert!(line.stdout.contains("No space left on device"), "{line}");
    let write = "dd if=/dev/urandom of=/f bs=1M count=40 2>/dev/null && sync && md5sum < /f";
    let sum = inside(&host, "sure", write).ok();
    host.dm(&["restart", "--time", "0", "sure"]).ok();
    assert_eq!(inside(&host, "sure", "md5sum < /f").ok(), sum);
    for name in ["x", "sure"] {
        host.dm(&["rm", "-f", name]).ok();
    }
    expect_attached(&host, 0, "all are removed");
    drop(daemon);
    host.dm(&["internal", "reset"]).ok();
    host.sh(&format!("umount {}", host.root().join("lib").display())).ok();
}
