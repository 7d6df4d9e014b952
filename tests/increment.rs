//! A later checkpoint of a container shares unchanged pages with an earlier one, and is whole by
//! itself. The workload writes to two megabytes from one round to the next, and checks its memory.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use dormouse_testkit::{Host, slowness, soon, wait_until};

use super::{flip, host, rounds, wait_for_line};

const NAME: &str = "increment";
/// Bytes that a round changes.
const CHANGED_BYTES: u64 = 2 << 20;
/// Further changed pages: single writes of the program, and pages that the kernel writes to.
const MORE_BYTES: u64 = 1 << 20;

/// Private memory of the workload in MB; less under emulation.
fn megabytes() -> u64 {
    if slowness() == 1 { 48 } else { 16 }
}

/// All memory of the workload, with the shared part.
fn all_bytes() -> u64 {
    (megabytes() + 8) << 20
}

fn begin(host: &Host, rounds: usize, more: &[&str]) {
    let rounds = format!("ROUNDS={rounds}");
    let megabytes = format!("MB={}", megabytes());
    let run = ["run", "-d", "--name", NAME, "--net", "none", "--env", &megabytes, "--env", &rounds];
    host.dm(&[&run[..], more, &["workloads", "/bin/increment"]].concat()).ok();
    wait_for_line(host, NAME, "ready 0");
}

/// Ends a round of the workload, and waits until the next has begun or the workload has ended.
fn next(host: &Host, round: usize, is_last: bool) {
    let out = host.dm(&["exec", NAME, "sh", "-c", "printf . > /go"]);
    assert!(out.status == 0 || is_last && out.status == 137, "{out}");
    match is_last {
        true => wait_for_line(host, NAME, "ok"),
        false => wait_for_line(host, NAME, &format!("ready {}", round + 1)),
    }
}

fn place(host: &Host, below: &str) -> PathBuf {
    let id = host.inspect(NAME)["id"].as_str().expect("a container id").to_owned();
    host.root().join("lib/containers").join(id).join(below)
}

/// Opens the page files of a checkpoint. An open file keeps its inode number from being reused.
fn files(dir: &Path) -> Vec<File> {
    let all =
        fs::read_dir(dir).expect("the file exists").map(|e| e.expect("a directory entry").path());
    let is_pages = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("pages"))
    };
    all.filter(is_pages).map(|path| File::open(path).expect("the file exists")).collect()
}

fn inode(file: &File) -> u64 {
    file.metadata().expect("metadata of an open file").ino()
}

/// Returns the bytes of files that were not there before.
fn new_bytes(now: &[File], before: &[File]) -> u64 {
    let known: Vec<u64> = before.iter().map(inode).collect();
    let new = now.iter().filter(|file| !known.contains(&inode(file)));
    new.map(|file| file.metadata().expect("metadata of an open file").blocks() * 512).sum()
}

#[track_caller]
fn is_small(bytes: u64) {
    assert!((CHANGED_BYTES..=CHANGED_BYTES + MORE_BYTES).contains(&bytes), "{bytes} bytes are new");
}

#[test]
fn vm_second_sleep_writes_only_changes() {
    let host = host();
    let rounds = rounds() + 1;
    begin(&host, rounds, &[]);
    let mut before = Vec::new();
    for round in 0..rounds {
        host.dm(&["sleep", NAME]).ok();
        assert_eq!(host.state_of(NAME), "asleep");
        let now = files(&place(&host, "asleep"));
        match round {
            0 => assert!(new_bytes(&now, &before) >= all_bytes()),
            _ => is_small(new_bytes(&now, &before)),
        }
        assert!(
            !place(&host, "woken").exists(),
            "the former checkpoint was merged into the new one"
        );
        before = now;
        host.dm(&["wake", NAME]).ok();
        assert!(place(&host, "woken").exists() && !place(&host, "asleep").exists());
        next(&host, round, round + 1 == rounds);
    }
    host.wait_for_state(NAME, "stopped");
    let woken = place(&host, "woken");
    assert!(wait_until(soon(), || !woken.exists()), "the container has ended");
}

/// A parent and a child share most memory. Each checkpoint is restored without the others.
#[test]
fn checkpoint_reuses_unchanged_data_of_earlier_one() {
    let host = host();
    begin(&host, 3, &["--env", "CHILD=1"]);
    let mut before: Vec<File> = Vec::new();
    for round in 0..3 {
        let made = host.dm(&["checkpoint", "--leave-running", "--json", NAME]).ok();
        let made: serde_json::Value = serde_json::from_str(&made).expect("JSON");
        let number = |name: &str| made[name].as_u64().expect("a number");
        assert!(number("bytes") >= all_bytes());
        let now = files(&place(&host, &format!("checkpoints/{}", round + 1)));
        match round {
            0 => assert_eq!(number("new_bytes"), number("bytes")),
            _ => {
                is_small(number("new_bytes"));
                is_small(new_bytes(&now, &before));
            }
        }
        before.extend(now);
        host.dm(&["checkpoint", "verify", NAME]).ok();
        if round < 2 {
            next(&host, round, false);
        }
    }
    host.dm(&["kill", NAME]).ok();
    host.wait_for_state(NAME, "stopped");
    // The last checkpoint does not need the others.
    for number in ["1", "2"] {
        host.dm(&["checkpoint", "rm", NAME, number]).ok();
    }
    let to = host.dir().join("elsewhere").display().to_string();
    for words in [&["restore", NAME][..], &["restore", "--lazy", NAME]] {
        host.dm(words).ok();
        host.dm(&["checkpoint", "--to", &to, NAME]).ok();
        let parts = files(Path::new(&to)).len();
        assert_eq!(parts, 1, "a checkpoint elsewhere shares no file");
        fs::remove_dir_all(&to).expect("the file exists");
    }
    host.dm(&["restore", NAME]).ok();
    next(&host, 2, true);
}

#[test]
fn data_reused_from_earlier_checkpoint_is_verified() {
    let host = host();
    begin(&host, 2, &[]);
    host.dm(&["checkpoint", "--leave-running", NAME]).ok();
    next(&host, 0, false);
    host.dm(&["checkpoint", "--leave-running", NAME]).ok();
    let second = place(&host, "checkpoints/2");
    for name in ["pages", "pages.1"] {
        flip(&second.join(name), 5000);
        let out = host.dm(&["checkpoint", "verify", NAME, "2"]);
        assert!(out.status != 0 && out.stderr.contains(&format!("{name}:")), "{out}");
        // A third checkpoint takes nothing from a damaged file. It reuses the first or nothing, and
        // is whole.
        host.dm(&["checkpoint", "--leave-running", NAME]).ok();
        host.dm(&["checkpoint", "verify", NAME]).ok();
        host.dm(&["checkpoint", "rm", NAME, "3"]).ok();
        flip(&second.join(name), 5000);
    }
    host.dm(&["checkpoint", "verify", NAME, "2"]).ok();
    host.dm(&["kill", NAME]).ok();
    host.wait_for_state(NAME, "stopped");
    // Containers made from the second checkpoint have all of its memory.
    let archive = host.dir().join("archive").display().to_string();
    host.dm(&["checkpoint", "export", "-o", &archive, NAME]).ok();
    host.dm(&["checkpoint", "import", "--name", "other", "--net", "none", &archive]).ok();
    host.dm(&["clone", "--name", "third", NAME]).ok();
    host.dm(&["restore", "other"]).ok();
    for name in ["other", "third"] {
        host.dm(&["exec", name, "sh", "-c", "printf . > /go"]);
        wait_for_line(&host, name, "ok");
    }
}
