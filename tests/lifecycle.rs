//! The life of a container: created, running, paused, stopped, gone.

use std::time::Duration;

use dormouse_testkit::{Host, run, soon, wait_until};

#[test]
fn vm_run_passes_output_and_returns_exit_status() {
    let host = Host::with_busybox();
    let out = host.dm(&["run", "--rm", "busybox", "sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!((out.status, out.stdout.as_str(), out.stderr.as_str()), (7, "out\n", "err\n"));
    assert_eq!(host.dm(&["ps", "--all", "--quiet"]).ok(), "");
}

#[test]
fn vm_open_files_of_caller_are_not_inherited() {
    let host = Host::with_busybox();
    let file = host.dir().join("lock");
    let script = format!("exec 9> {}; exec \"$0\" \"$@\"", file.display());
    let words = ["run", "-d", "busybox", "sleep", "1000"];
    let command = host.dormouse_under(&["sh", "-c", &script], &words);
    dormouse_testkit::run(command, b"", Duration::from_secs(60)).ok();
    for (pid, line) in host.processes() {
        let open = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let links = open.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        let found: Vec<_> = links.filter(|link| *link == file).collect();
        assert!(found.is_empty(), "{pid} {line} has an open file of the command's caller");
    }
}

#[test]
fn vm_rootfs_runs_without_an_image() {
    let host = Host::new();
    // A copy: in the guest the original is a mount of the host, where ids cannot be mapped.
    let dir = host.dir().join("tree").display().to_string();
    let dir = dir.as_str();
    let source = dormouse_testkit::image::busybox();
    host.sh(&format!("cp -a {} {dir}", source.display())).ok();
    let out = host.dm(&["run", "--rm", "--rootfs", dir, "--net", "none", "cat", "/etc/hostname"]);
    assert_eq!(out.status, 0, "{out}");
    // Files written by the container stay out of the directory.
    host.dm(&["run", "--rm", "--rootfs", dir, "--net", "none", "touch", "/written"]).ok();
    assert!(!std::path::Path::new(dir).join("written").exists());
}

#[test]
fn vm_container_passes_through_its_states() {
    let host = Host::with_busybox();
    let id = host.dm(&["create", "--name", "a", "busybox", "sleep", "1000"]).ok();
    assert!(id.len() >= 32, "{id}");
    assert_eq!(host.state_of("a"), "created");
    host.dm(&["start", "a"]).ok();
    assert_eq!(host.state_of("a"), "running");
    assert_eq!(host.dm(&["exec", "a", "cat", "/proc/1/comm"]).ok(), "sleep");
    host.dm(&["pause", "a"]).ok();
    assert_eq!(host.state_of("a"), "paused");
    host.dm(&["unpause", "a"]).ok();
    assert_eq!(host.state_of("a"), "running");
    host.dm(&["kill", "a"]).ok();
    host.wait_for_state("a", "stopped");
    assert_eq!(host.dm(&["wait", "a"]).ok(), "137");
    host.dm(&["start", "a"]).ok();
    assert_eq!(host.state_of("a"), "running");
    host.dm(&["stop", "--time", "0", "a"]).ok();
    assert_eq!(host.state_of("a"), "stopped");
    host.dm(&["rm", "a"]).ok();
    assert_eq!(host.dm(&["ps", "--all", "--quiet"]).ok(), "");
}

#[test]
fn vm_written_files_stay_until_removal() {
    let host = Host::with_busybox();
    host.dm(&["run", "--name", "a", "busybox", "sh", "-c", "echo kept >/file"]).ok();
    let id = host.inspect("a")["id"].as_str().expect("an id").to_owned();
    assert_eq!(host.dm(&["start", "a"]).status, 0);
    assert_eq!(host.dm(&["wait", "a"]).ok(), "0");
    let out = host.dm(&["create", "--name", "b", "busybox", "cat", "/file"]);
    assert_eq!(out.status, 0, "{out}");
    assert_ne!(host.dm(&["start", "--attach", "b"]).status, 0, "another container sees the file");
    assert!(host.root().join("lib/containers").join(&id).is_dir());
    host.dm(&["rm", "a"]).ok();
    assert!(!host.root().join("lib/containers").join(&id).exists());
}

#[test]
fn vm_exec_has_own_status_user_and_directory() {
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--name", "a", "-e", "A=1", "busybox", "sleep", "1000"]).ok();
    assert_eq!(host.dm(&["exec", "a", "sh", "-c", "exit 9"]).status, 9);
    let script = "echo $A $B $(id -u):$(id -g) $PWD";
    let words = ["exec", "-e", "B=2", "-u", "user", "-w", "/tmp", "a", "sh", "-c", script];
    assert_eq!(host.dm(&words).ok(), "1 2 1000:1000 /tmp");
    assert_eq!(host.dm_with_input(b"typed", &["exec", "-i", "a", "cat"]).ok(), "typed");
    // The exec'd program is visible inside, and ends with the container.
    host.dm(&["exec", "-d", "a", "sleep", "999"]).ok();
    host.wait_inside("a", "ps | grep -q '[s]leep 999'");
    host.dm(&["rm", "--force", "a"]).ok();
    let is_gone = || !host.processes().iter().any(|(_, line)| line.contains("sleep 999"));
    assert!(wait_until(soon(), is_gone), "{:?}", host.processes());
}

#[test]
fn vm_detached_output_is_logged_by_stream() {
    let host = Host::with_busybox();
    let script = "echo one; echo two >&2; echo three";
    host.dm(&["run", "-d", "--name", "a", "busybox", "sh", "-c", script]).ok();
    assert_eq!(host.dm(&["wait", "a"]).ok(), "0");
    let out = host.dm(&["logs", "a"]);
    assert_eq!((out.stdout.as_str(), out.stderr.as_str()), ("one\nthree\n", "two\n"));
    assert_eq!(host.dm(&["logs", "--tail", "1", "a"]).stdout, "three\n");
}

#[test]
fn vm_stop_sends_sigterm_and_kills_after_timeout() {
    let host = Host::with_busybox();
    let script = "trap 'echo asked; exit 5' TERM; echo ready; while :; do sleep 0.1; done";
    host.dm(&["run", "-d", "--name", "a", "busybox", "sh", "-c", script]).ok();
    let ready = || host.dm(&["logs", "a"]).stdout.contains("ready");
    assert!(wait_until(soon(), ready));
    host.dm(&["stop", "a"]).ok();
    assert_eq!(host.dm(&["wait", "a"]).ok(), "5");
    assert_eq!(host.dm(&["logs", "a"]).stdout, "ready\nasked\n");
    // sleep as process 1 has no handler for SIGTERM, and does not receive it.
    host.dm(&["run", "-d", "--name", "b", "busybox", "sleep", "1000"]).ok();
    host.dm(&["stop", "--time", "1", "b"]).ok();
    assert_eq!(host.dm(&["wait", "b"]).ok(), "137");
}

#[test]
fn vm_restart_policy_applies_after_failure_but_not_after_stop() {
    let host = Host::with_busybox();
    let policy = ["run", "-d", "--restart", "on-failure:2", "--name", "a", "busybox"];
    host.dm(&[&policy[..], &["sh", "-c", "echo again; exit 1"]].concat()).ok();
    let count = || host.dm(&["logs", "a"]).stdout.lines().count();
    assert!(wait_until(soon(), || count() == 3), "{}", count());
    host.wait_for_state("a", "stopped");
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(count(), 3, "two retries, no more");
    let always = ["run", "-d", "--restart", "always", "--name", "b", "busybox", "sleep", "1000"];
    host.dm(&always).ok();
    let pid = host.inspect("b")["pid"].as_u64().expect("a pid");
    host.sh(&format!("kill -9 {pid}")).ok();
    let other = || {
        let record = host.inspect("b");
        record["state"] == "running" && record["pid"].as_u64().is_some_and(|p| p != pid)
    };
    assert!(wait_until(soon(), other));
    host.dm(&["stop", "--time", "0", "b"]).ok();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(host.state_of("b"), "stopped");
}

#[test]
fn vm_names_are_unique_and_can_be_changed() {
    let host = Host::with_busybox();
    host.dm(&["create", "--name", "a", "busybox", "true"]).ok();
    let line = host.dm(&["create", "--name", "a", "busybox", "true"]).err(125);
    assert!(line.contains("'a'"), "{line}");
    host.dm(&["rename", "a", "b"]).ok();
    host.dm(&["create", "--name", "a", "busybox", "true"]).ok();
    let names = host.dm(&["ps", "--all", "--json"]).ok();
    let list: serde_json::Value = serde_json::from_str(&names).expect("JSON");
    let mut names: Vec<&str> = list
        .as_array()
        .expect("a list")
        .iter()
        .map(|c| c["name"].as_str().expect("a name"))
        .collect();
    names.sort_unstable();
    assert_eq!(names, ["a", "b"]);
}

#[test]
fn vm_container_that_removes_itself_is_gone_when_run_returns() {
    let host = Host::with_busybox();
    for round in 0..10 {
        // The name is free at once, and the status is that of the command.
        let script = format!("exit {}", round % 3);
        let out = host.dm(&["run", "--rm", "--name", "a", "busybox", "sh", "-c", &script]);
        assert_eq!(out.status, round % 3, "{out}");
        assert_eq!(host.dm(&["ps", "--all", "--quiet"]).ok(), "");
    }
    // So is the address.
    host.dm(&["run", "-d", "--name", "b", "busybox", "sleep", "1000"]).ok();
    let address = host.address_of("b");
    host.dm(&["rm", "--force", "b"]).ok();
    for _ in 0..5 {
        host.dm(&["run", "--rm", "--ip", &address, "busybox", "true"]).ok();
    }
    let events = host.dm(&["events", "--no-stream"]).ok();
    let removed = events.lines().filter(|line| line.contains("remove")).count();
    assert_eq!(removed, 16, "{events}");
    host.await_settlers(); // spares have directories, too
    for dir in ["lib/containers", "lib/names", "run/c"] {
        let left = std::fs::read_dir(host.root().join(dir)).expect("a directory").count();
        assert_eq!(left, 0, "{dir}");
    }
}

#[test]
fn removal_that_ends_early_is_finished_by_the_next_command() {
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--name", "other", "busybox", "sleep", "100000"]).ok();
    let disk = rustix::fs::statvfs(host.dir()).expect("a file system");
    if disk.f_bavail < disk.f_blocks / 3 && disk.f_bavail * disk.f_frsize < 40 << 30 {
        eprintln!("the disk is so full that files are removed before the answer");
        return;
    }
    let words = ["run", "--rm", "--name", "a", "busybox", "sh", "-c", "echo >/fixed; sleep 1000"];
    let mut run = host.dormouse(&words).spawn().expect("the command starts");
    let fixed = || {
        let all = std::fs::read_dir(host.root().join("lib/containers")).into_iter().flatten();
        all.flatten().map(|dir| dir.path().join("upper/fixed")).find(|file| file.exists())
    };
    assert!(wait_until(soon(), || fixed().is_some()));
    // Such a file cannot be removed (chattr(1)): the process behind the answer ends there.
    host.sh(&format!("chattr +i {}", fixed().expect("a file").display())).ok();
    host.dm(&["kill", "a"]).ok();
    assert_eq!(run.wait().expect("it ends").code(), Some(137));
    assert_eq!(host.dm(&["ps", "--quiet"]).ok().lines().count(), 1);
    let is_at_it = |line: &str| line.contains("--rm") || line.contains(" internal settle");
    let has_ended = || !host.processes().iter().any(|(_, line)| is_at_it(line));
    assert!(wait_until(soon(), has_ended));
    let pending = host.root().join("lib/pending");
    let dead = || std::fs::read_dir(&pending).expect("a directory").flatten().next();
    let dead = dead().expect("the rest of the container").path().join("upper/fixed");
    assert!(dead.exists(), "{}", dead.display());
    host.sh(&format!("chattr -i {}", dead.display())).ok();
    host.dm(&["ps"]).ok();
    assert_eq!(std::fs::read_dir(&pending).expect("a directory").count(), 0);
}

#[test]
fn vm_limits_apply_inside() {
    let host = Host::with_busybox();
    let limits = ["run", "-d", "--memory", "64m", "--pids", "20", "--cpus", "0.5", "--name", "a"];
    host.dm(&[&limits[..], &["busybox", "sleep", "1000"]].concat()).ok();
    let bomb = "for i in $(seq 40); do sleep 5 & done; wait";
    let out = host.dm(&["exec", "a", "sh", "-c", bomb]);
    assert!(out.stderr.contains("fork"), "{out}");
    // A line without end is kept in memory as a whole.
    let hog = host.dm(&["exec", "a", "sh", "-c", "tr '\\0' x </dev/zero | head -c 200m | sort"]);
    assert_ne!(hog.status, 0, "{hog}");
    assert_eq!(host.state_of("a"), "running");
}

#[test]
fn vm_init_reaps_and_forwards_signals() {
    let host = Host::with_busybox();
    let script = "trap 'exit 3' TERM; (sleep 0.1 &) ; while :; do sleep 0.1; done";
    host.dm(&["run", "-d", "--init", "--name", "a", "busybox", "sh", "-c", script]).ok();
    std::thread::sleep(Duration::from_millis(500));
    assert_ne!(host.dm(&["exec", "a", "cat", "/proc/1/comm"]).ok(), "sh");
    // A child of the loop may be a zombie between its exit and the shell's wait.
    let find_zombies = ["exec", "a", "sh", "-c", "grep -l '^State:.Z' /proc/[0-9]*/status"];
    let none = || host.dm(&find_zombies).stdout.is_empty();
    assert!(wait_until(soon(), none), "orphans stay unreaped");
    host.dm(&["stop", "a"]).ok();
    assert_eq!(host.dm(&["wait", "a"]).ok(), "3");
}

#[test]
fn vm_cp_copies_files_in_and_out() {
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--name", "a", "busybox", "sleep", "1000"]).ok();
    let file = host.dir().join("file");
    std::fs::write(&file, "from the host").expect("written");
    let file = file.to_str().expect("UTF-8");
    host.dm(&["cp", file, "a:/tmp/there"]).ok();
    assert_eq!(host.dm(&["exec", "a", "cat", "/tmp/there"]).ok(), "from the host");
    host.dm(&["exec", "a", "sh", "-c", "echo inside >/tmp/back"]).ok();
    let back = host.dir().join("back");
    host.dm(&["cp", "a:/tmp/back", back.to_str().expect("UTF-8")]).ok();
    assert_eq!(std::fs::read_to_string(back).expect("the copied file"), "inside\n");
}

#[test]
fn vm_volumes_and_mounts_are_at_requested_paths() {
    let host = Host::with_busybox();
    let shared = host.dir().join("shared");
    std::fs::create_dir(&shared).expect("made");
    std::fs::write(shared.join("file"), "of the host\n").expect("written");
    let bind = format!("{}:/mnt/bind:ro", shared.display());
    let script = "cat /mnt/bind/file; touch /mnt/bind/x 2>/dev/null && echo writable; \
                  echo kept >/data/file; echo $(stat -c %a /scratch)";
    let words = ["run", "--rm", "-v", &bind, "-v", "data:/data", "--tmpfs", "/scratch", "busybox"];
    let out = host.dm(&[&words[..], &["sh", "-c", script]].concat());
    assert_eq!(out.ok(), "of the host\n1777");
    let words = ["run", "--rm", "-v", "data:/data", "busybox", "cat", "/data/file"];
    assert_eq!(host.dm(&words).ok(), "kept");
    let words = ["run", "--rm", "--read-only", "busybox", "touch", "/x"];
    assert_ne!(host.dm(&words).status, 0);
}

#[test]
fn vm_containers_are_stopped_and_restartable_after_reboot() {
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--name", "a", "busybox", "sh", "-c", "echo x >>/count; sleep 1000"])
        .ok();
    host.wait_inside("a", "test -s /count");
    // A reboot ends every process and empties the kernel, but leaves RUN unchanged if it is on a
    // disk. Only the boot id shows the reboot.
    for (pid, _) in host.processes() {
        host.sh(&format!("kill -9 {pid}"));
    }
    let boot = host.root().join("run/boot_id");
    if boot.exists() {
        std::fs::write(&boot, "00000000-0000-0000-0000-000000000000\n").expect("written");
    }
    host.wait_for_state("a", "stopped");
    host.dm(&["start", "a"]).ok();
    host.wait_inside("a", "test $(wc -l </count) = 2");
}

#[test]
fn vm_running_containers_need_one_keeper_only() {
    let host = Host::with_busybox();
    for name in ["a", "b", "c"] {
        host.dm(&["run", "-d", "--name", name, "busybox", "sleep", "1000"]).ok();
    }
    // An interlude has ended processes, which are settled.
    host.await_settlers();
    let all = host.processes();
    let others: Vec<_> = all.iter().filter(|(_, line)| !line.starts_with("sleep")).collect();
    assert_eq!(all.len() - others.len(), 3, "{all:?}");
    assert!(others.len() <= 1, "one keeper for all of them: {others:?}");
}

/// The processes of a killed keeper are children of this test, which does not reap them in time. Their exit
/// status is unknown until then, and a removal does not store it.
#[test]
fn vm_forced_removal_does_not_wait_for_a_process_to_be_reaped() {
    use rustix::process::{Pid, Signal, WaitOptions};
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).expect("a subreaper");
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--name", "x", "busybox", "sleep", "1000"]).ok();
    let pid = host.inspect("x")["pid"].as_i64().expect("the container runs") as i32;
    let first = host.keeper().expect("a keeper");
    let as_pid = |pid: i32| Pid::from_raw(pid).expect("a pid");
    rustix::process::kill_process(as_pid(first as i32), Signal::KILL).expect("it exists");
    let is_gone = || host.processes().iter().all(|(pid, _)| *pid != first);
    assert!(wait_until(soon(), is_gone));
    // Not `dm`, which may run an interlude: a restore makes another first process.
    let dm = |args: &[&str]| run(host.dormouse(args), b"", soon());
    let running = dm(&["ps"]).ok(); // starts the next keeper
    assert!(running.contains("busybox"), "{running}");
    dm(&["rm", "--force", "x"]).ok();
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("not reaped yet");
    assert!(stat.contains(") Z "), "{stat}");
    let events = dm(&["events", "--no-stream", "--json"]).ok();
    // An interlude before the keeper was killed has ended the process, too.
    let last = events.lines().rfind(|line| line.contains("\"die\"")).expect("an end");
    assert!(last.contains("\"exit_code\":\"137\""), "{events}");
    for pid in [pid, first as i32] {
        rustix::process::waitpid(Some(as_pid(pid)), WaitOptions::empty()).expect("our child");
    }
    rustix::process::set_child_subreaper(None).expect("no subreaper");
}

#[test]
fn vm_start_waits_for_open_files_of_last_run() {
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--name", "x", "busybox", "sleep", "1000"]).ok();
    let open = |host: &Host| {
        let pid = host.inspect("x")["pid"].as_u64().expect("the container runs");
        let file = std::fs::File::open(format!("/proc/{pid}/root/etc/passwd"));
        let file = file.expect("a file of the image");
        // Not `dm`, which may run an interlude before the command.
        run(host.dormouse(&["stop", "--time", "0", "x"]), b"", Duration::from_secs(20)).ok();
        file
    };
    let file = open(&host);
    let closing = std::thread::spawn(|| {
        std::thread::sleep(Duration::from_millis(300));
        drop(file);
    });
    host.dm(&["start", "x"]).ok();
    closing.join().expect("no panic");
    let file = open(&host);
    let message = host.dm(&["start", "x"]).fails();
    assert!(message.contains("still in use"), "{message}");
    drop(file);
    host.dm(&["start", "x"]).ok();
}

#[test]
fn restart_delay_grows_also_after_success() {
    use dormouse_testkit::slowness;
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--restart", "always", "--name", "a", "busybox", "true"]).ok();
    let starts = || -> Vec<i64> {
        let text = std::fs::read_to_string(host.root().join("lib/events")).unwrap_or_default();
        let events = text.lines().filter_map(|l| serde_json::from_str::<serde_json::Value>(l).ok());
        let starts = events.filter(|event| event["kind"] == "start");
        starts.filter_map(|event| event["unix_ms"].as_i64()).collect()
    };
    assert!(wait_until(Duration::from_secs(60) * slowness(), || starts().len() >= 5));
    let starts = starts();
    for (pair, at_least) in starts.windows(2).zip([100, 200, 400, 800]) {
        assert!(pair[1] - pair[0] >= at_least, "{starts:?}: {at_least} ms");
    }
    host.dm(&["update", "--restart", "no", "a"]).ok();
    host.dm(&["rm", "--force", "a"]).ok();
}

#[test]
fn instances_of_one_host_have_different_ids() {
    const BLOCK: u64 = 64 * 32_768;
    let host = Host::new();
    let instance = |name: &str, words: &[&str]| {
        let mut command = host.command(dormouse_testkit::dormouse());
        command.arg("--root").arg(host.dir().join(name)).args(words);
        run(command, b"", Duration::from_secs(180))
    };
    // The slots of an instance begin at a hash of this path (FNV-1a), of which 13 bits were used before there was a
    // registry of the host, and 7 since.
    let start = |name: &str| {
        let path = host.dir().join(name).join("lib/ids");
        let step = |h: u64, b: &u8| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3);
        path.as_os_str().as_encoded_bytes().iter().fold(0xcbf2_9ce4_8422_2325, step) % 8_192
    };
    let mut names = std::collections::HashMap::new();
    let (one, other) = (0..)
        .find_map(|n: u32| {
            let name = format!("i{n}");
            let before = names.insert(start(&name), name.clone())?;
            Some((before, name))
        })
        .expect("two names with the same start");
    let image = dormouse_testkit::image::busybox();
    let image = image.to_str().expect("UTF-8");
    let mut first_ids = Vec::new();
    let mut make = |name: &str, option: &[&str]| {
        instance(name, &[&["create"], option, &["busybox", "true"]].concat()).ok();
        let dir = host.dir().join(name).join("lib/containers");
        let of = |entry: std::io::Result<std::fs::DirEntry>| {
            let path = entry.expect("an entry").path().join("config.json");
            let text = std::fs::read(path).expect("a configuration");
            let value: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
            value["ids"]["base"].as_u64().expect("a number")
        };
        let all: Vec<u64> = std::fs::read_dir(dir).expect("there").map(of).collect();
        first_ids.retain(|(holder, _)| holder != name);
        first_ids.extend(all.into_iter().map(|id| (name.to_owned(), id)));
    };
    for name in [&one, &other] {
        let etc = host.dir().join(name).join("etc");
        std::fs::create_dir_all(&etc).expect("made");
        let pool = if *name == one { "10.200.0.0/16" } else { "10.201.0.0/16" };
        let text = format!("[network]\npool = \"{pool}\"\n[keeper]\nlinger = \"0s\"\n");
        std::fs::write(etc.join("config.toml"), text).expect("written");
        instance(name, &["import", "--name", "busybox", image]).ok();
    }
    for option in [&[][..], &["--ids", "65536"], &[]] {
        make(&one, option);
        make(&other, option);
    }
    assert_eq!(first_ids.len(), 6);
    for (holder, id) in &first_ids {
        for (other, its) in &first_ids {
            let is_apart = holder == other || id / BLOCK != its / BLOCK;
            assert!(is_apart, "{holder} has {id}, {other} has {its}");
        }
    }
    for name in [&one, &other] {
        let ids = instance(name, &["ps", "--all", "--quiet"]).ok();
        ids.lines().for_each(|id| drop(instance(name, &["rm", id]).ok()));
        instance(name, &["internal", "reset"]).ok();
    }
}
