//! `dormouse-oci checkpoint` and `restore`: containers of bundles become files and are restored,
//! with the options of podman and containerd. Each kind of kernel object is tested by
//! `tests/checkpoint.rs`. Its workloads run here in bundles.

use crate::bundle;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use bundle::{Bundle, Oci};
use dormouse_testkit::{image, slowness, soon, wait_until};
use serde_json::{Value, json};

/// Rounds of each workload: one only under emulation.
fn rounds() -> usize {
    if slowness() == 1 { 3 } else { 1 }
}

/// A bundle with a workload, a tmpfs, and the capabilities that the workloads need.
fn workload(oci: &Oci, name: &str) -> Bundle {
    let bundle = Bundle::new(oci, &[&format!("/bin/{name}")]);
    let program = image::workloads().join("bin").join(name);
    fs::copy(program, bundle.rootfs().join("bin").join(name)).expect("copied");
    let capabilities: Vec<String> = [
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "NET_BIND_SERVICE",
        "SETFCAP",
        "SETGID",
        "SETPCAP",
        "SETUID",
        "SYS_CHROOT",
    ]
    .map(|name| format!("CAP_{name}"))
    .into();
    bundle.edit(|c| {
        c["process"]["env"]
            .as_array_mut()
            .expect("a list")
            .push(format!("ROUNDS={}", rounds()).into());
        for set in ["bounding", "effective", "permitted"] {
            c["process"]["capabilities"][set] = json!(capabilities);
        }
        let mounts = c["mounts"].as_array_mut().expect("a list");
        mounts.push(json!({"destination": "/scratch", "type": "tmpfs", "source": "tmpfs"}));
    });
    bundle
}

/// Maps the ids of the bundle to other ids outside.
fn with_user_namespace(oci: &Oci, bundle: &Bundle) {
    oci.sh(&format!("chown -R 200000:200000 {}", bundle.rootfs().display())).ok();
    bundle.edit(|c| {
        let map = json!([{"containerID": 0, "hostID": 200_000, "size": 65_536}]);
        (c["linux"]["uidMappings"], c["linux"]["gidMappings"]) = (map.clone(), map);
        c["linux"]["namespaces"].as_array_mut().expect("a list").push(json!({"type": "user"}));
    });
}

/// The file with the output of a detached container.
fn output_file(oci: &Oci) -> PathBuf {
    oci.host().dir().join("output")
}

#[track_caller]
fn wait_for_line(oci: &Oci, line: &str) {
    let mut text = String::new();
    let found = wait_until(soon(), || {
        text = fs::read_to_string(output_file(oci)).unwrap_or_default();
        text.lines().any(|l| l == line || l.starts_with("failed"))
    });
    assert!(found && text.lines().any(|l| l == line), "no '{line}': {text}");
}

fn image_of(oci: &Oci) -> String {
    oci.host().dir().join("image").display().to_string()
}

/// Runs `checkpoint` with the usual image path.
fn checkpoint(oci: &Oci, more: &[&str]) -> dormouse_testkit::Output {
    let image = image_of(oci);
    let words = ["checkpoint", "--image-path", &image, "--work-path", "/tmp"];
    oci.run(&[&words[..], more, &["c"]].concat())
}

fn restore(oci: &Oci, bundle: &Bundle, more: &[&str]) -> dormouse_testkit::Output {
    let image = image_of(oci);
    let words = ["restore", "-d", "--image-path", &image, "--work-path", "/tmp", "-b"];
    oci.run(&[&words[..], &[bundle.dir()], more, &["c"]].concat())
}

#[track_caller]
fn is_running(oci: &Oci) {
    assert_eq!(oci.status("c"), "running");
}

#[track_caller]
fn wait_for_end(oci: &Oci) {
    let is_over = || oci.status("c") == "stopped";
    assert!(wait_until(soon(), is_over), "{}", oci.status("c"));
    oci.run(&["delete", "c"]).ok();
    oci.assert_nothing_left();
}

/// Checkpoints, removes and restores a workload in every round.
#[track_caller]
fn round_trip(oci: &Oci, bundle: &Bundle, more: &[&str]) {
    let pid_file = bundle.path("pid");
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    for round in 0..rounds() {
        wait_for_line(oci, &format!("ready {round}"));
        let out = checkpoint(oci, more);
        assert_eq!(out.status, 0, "round {round}: {out}");
        // Like runc: only the image is left of the container.
        assert!(oci.run(&["state", "c"]).err(1).contains("does not exist"));
        oci.assert_nothing_left();
        let out = restore(oci, bundle, &[&["--pid-file", &pid_file], more].concat());
        assert_eq!(out.status, 0, "round {round}: {out}");
        is_running(oci);
        let pid = fs::read_to_string(&pid_file).expect("a pid file");
        assert_eq!(oci.state("c")["pid"].to_string(), pid);
        fs::write(bundle.rootfs().join(format!("go-{round}")), "").expect("written");
    }
    wait_for_line(oci, "ok");
    wait_for_end(oci);
}

#[test]
fn vm_bundle_restore_keeps_memory_files_and_processes() {
    for name in ["memory", "file", "tree"] {
        let oci = Oci::new();
        round_trip(&oci, &workload(&oci, name), &[]);
    }
}

#[test]
fn vm_bundle_restore_keeps_sockets() {
    for (name, more) in [("listener", &[][..]), ("unix", &[]), ("tcp", &["--tcp-established"])] {
        let oci = Oci::new();
        round_trip(&oci, &workload(&oci, name), more);
    }
}

/// Its connections are read when the command is killed; the workload checks them behind each round. Nightly only: a
/// task that waits in read(2) sees an error if the kill comes in the microseconds in which its socket is read.
#[test]
fn big_connections_outlive_killed_checkpoints() {
    const KILLS: u32 = 16;
    let oci = Oci::new();
    let bundle = workload(&oci, "tcp");
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    for round in 0..rounds() {
        wait_for_line(&oci, &format!("ready {round}"));
        let image = image_of(&oci);
        let image = format!("{image}-{round}");
        let words = ["checkpoint", "--leave-running", "--tcp-established", "--image-path"];
        let words = [&words[..], &[&image, "c"]].concat();
        let began = Instant::now();
        oci.run(&words).ok();
        let longest = began.elapsed();
        for kill in 0..KILLS {
            fs::remove_dir_all(&image).expect("its image");
            fs::create_dir(&image).expect("an empty one");
            let mut command = oci.command(&words);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            let mut child = command.spawn().expect("the command starts");
            std::thread::sleep(longest * kill / KILLS);
            child.kill().expect("a child");
            child.wait().expect("a child");
        }
        fs::write(bundle.rootfs().join(format!("go-{round}")), "").expect("written");
    }
    wait_for_line(&oci, "ok");
    wait_for_end(&oci);
}

#[test]
fn bundle_restore_keeps_other_kernel_objects() {
    for name in
        ["tmpfs", "system_v", "thread", "signal", "clock", "credential", "user", "deleted", "lock"]
    {
        let oci = Oci::new();
        round_trip(&oci, &workload(&oci, name), &[]);
    }
}

#[test]
fn vm_bundle_restore_keeps_id_mappings() {
    for name in ["tmpfs", "credential", "user"] {
        let oci = Oci::new();
        let bundle = workload(&oci, name);
        with_user_namespace(&oci, &bundle);
        round_trip(&oci, &bundle, &[]);
    }
}

/// A filter of the configuration, not of the checkpoint, refuses mkdir; and no_new_privs.
#[test]
fn vm_restore_confines_by_configuration() {
    let oci = Oci::new();
    let script = "for n in 0 1; do echo ready $n; until test -e /go-$n; do sleep 0.05; done; \
                  mkdir /x$n && echo made || echo refused; done; echo ok";
    let bundle = Bundle::new(&oci, &["sh", "-c", script]);
    let refuse = |c: &mut Value| {
        c["linux"]["seccomp"] = json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
            {"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO"}]});
    };
    bundle.edit(refuse);
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    let go = |n: u32| fs::write(bundle.rootfs().join(format!("go-{n}")), "").expect("written");
    wait_for_line(&oci, "ready 0");
    checkpoint(&oci, &[]).ok();
    restore(&oci, &bundle, &[]).ok();
    go(0);
    wait_for_line(&oci, "refused");
    wait_for_line(&oci, "ready 1");
    let status = fs::read_to_string(format!("/proc/{}/status", oci.state("c")["pid"]));
    let status = status.expect("the process exists");
    for line in ["Seccomp_filters:\t1", "NoNewPrivs:\t1"] {
        assert!(status.lines().any(|l| l == line), "{line}: {status}");
    }
    checkpoint(&oci, &[]).ok();
    // A process with fewer capabilities than the checkpoint records is not restored.
    bundle.edit(|c| {
        for set in ["bounding", "effective", "permitted"] {
            c["process"]["capabilities"][set] = json!(["CAP_KILL"]);
        }
    });
    let out = restore(&oci, &bundle, &[]);
    assert!(out.status == 1 && out.stderr.contains("capabilities"), "{out}");
    oci.assert_nothing_left();
}

/// The streams are those of the restoring command. Several generations of an image replace each
/// other.
#[test]
fn vm_repeated_checkpoint_is_restored_in_foreground() {
    let oci = Oci::new();
    let script = "n=0; while ! test -e /stop; do n=$((n+1)); echo $n > /count.new; \
                  mv /count.new /count; sleep 0.02; done; echo counted; exit 7";
    let bundle = Bundle::new(&oci, &["sh", "-c", script]);
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    let count = || -> u64 {
        let text = fs::read_to_string(bundle.rootfs().join("count")).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    };
    let grows = |from: u64| {
        let grown = || count() > from;
        assert!(wait_until(soon(), grown), "{} of {from}", count());
    };
    grows(3);
    for _ in 0..2 {
        let before = count();
        checkpoint(&oci, &["--leave-running", "--shell-job", "--file-locks"]).ok();
        is_running(&oci);
        grows(before);
    }
    let names = fs::read_dir(image_of(&oci)).expect("the image").flatten();
    let names: Vec<_> = names.map(|entry| entry.file_name()).collect();
    assert_eq!(names, ["dormouse"], "the last checkpoint alone");
    checkpoint(&oci, &[]).ok();
    let stopped = count();
    // In the foreground, under another name; the command returns the container's exit code.
    let image = image_of(&oci);
    let command = oci.command(&["restore", "--image-path", &image, "-b", bundle.dir(), "d"]);
    let waits =
        std::thread::spawn(move || dormouse_testkit::run(command, b"", Duration::from_secs(60)));
    grows(stopped);
    fs::write(bundle.rootfs().join("stop"), "").expect("written");
    let out = waits.join().expect("no panic");
    assert_eq!((out.status, out.stdout.as_str()), (7, "counted\n"), "{out}");
    oci.assert_nothing_left();
}

/// Reads from a terminal's master until the output contains a text.
fn read_until(master: &mut fs::File, what: &str) -> String {
    let mut text = String::new();
    let began = Instant::now();
    let mut bytes = [0; 1024];
    while !text.contains(what) {
        assert!(began.elapsed() < Duration::from_secs(20) * slowness(), "no {what}: {text}");
        let n = master.read(&mut bytes).expect("an open terminal");
        text.push_str(&String::from_utf8_lossy(&bytes[..n]));
    }
    text
}

#[test]
fn vm_restore_sends_terminal_to_console_socket() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sh"]);
    bundle.edit(|c| {
        c["process"]["terminal"] = true.into();
        c["process"]["consoleSize"] = json!({"height": 33, "width": 77});
    });
    let path = oci.host().dir().join("console");
    let listener = UnixListener::bind(&path).expect("bound");
    let path = path.display().to_string();
    let receive = || fs::File::from(bundle::receive(&listener.accept().expect("connected").0));
    oci.run(&["run", "-d", "-b", bundle.dir(), "--console-socket", &path, "c"]).ok();
    let mut master = receive();
    master.write_all(b"kept=va''lue; echo set''_up\n").expect("written");
    read_until(&mut master, "set_up");
    for _ in 0..rounds() {
        checkpoint(&oci, &[]).ok();
        restore(&oci, &bundle, &["--console-socket", &path]).ok();
        master = receive();
        master.write_all(b"echo is''_$kept; tty; stty size\n").expect("written");
        let text = read_until(&mut master, "33 77");
        assert!(text.contains("is_value") && text.contains("/dev/pts/0"), "{text}");
    }
    master.write_all(b"exit\n").expect("written");
    wait_for_end(&oci);
}

#[test]
fn vm_unsupported_checkpoint_is_refused_and_container_continues() {
    let oci = Oci::new();
    let script = "n=0; while :; do n=$((n+1)); echo $n > /count; sleep 0.02; done";
    let bundle = Bundle::new(&oci, &["sh", "-c", script]);
    bundle.edit(|c| {
        for set in ["bounding", "effective", "permitted"] {
            c["process"]["capabilities"][set] = json!(["CAP_SYS_ADMIN"]);
        }
    });
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    let refused = |more: &[&str], why: &str| {
        let out = checkpoint(&oci, more);
        assert!(out.status == 1 && out.stderr.contains(why), "{why}: {out}");
        assert!(!Path::new(&image_of(&oci)).join("dormouse").exists(), "{why}");
    };
    for (flag, why) in [
        (&["--pre-dump"][..], "--pre-dump"),
        (&["--parent-path", "../before"], "--parent-path"),
        (&["--lazy-pages"], "--lazy-pages"),
        (&["--page-server", "a:1"], "--page-server"),
        (&["--empty-ns", "ipc"], "network"),
    ] {
        refused(flag, why);
    }
    oci.run(&["exec", "c", "mkdir", "/here"]).ok();
    oci.run(&["exec", "c", "mount", "-t", "tmpfs", "none", "/here"]).ok();
    refused(&[], "'/here' was mounted inside");
    oci.run(&["exec", "c", "umount", "/here"]).ok();
    oci.run(&["exec", "-d", "c", "sleep", "1000"]).ok();
    refused(&[], "(sleep): its parent is outside the container");
    oci.run(&["exec", "c", "sh", "-c", "kill $(pidof sleep)"]);
    oci.run(&["pause", "c"]).ok();
    refused(&[], "resume it first");
    oci.run(&["resume", "c"]).ok();
    is_running(&oci);
    let read = || fs::read_to_string(bundle.rootfs().join("count")).unwrap_or_default();
    let before = read();
    assert!(wait_until(soon(), || read() != before), "the container does not continue");
    oci.run(&["delete", "-f", "c"]).ok();

    // A namespace shared with other processes.
    bundle.edit(|c| {
        let list = c["linux"]["namespaces"].as_array_mut().expect("a list");
        list.retain(|n| n["type"] != "pid");
    });
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    refused(&[], "no private pid namespace");
    oci.run(&["kill", "c", "KILL"]).ok();
    wait_for_end(&oci);
}

#[test]
fn vm_tcp_connections_require_tcp_established() {
    let oci = Oci::new();
    let bundle = workload(&oci, "tcp");
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    wait_for_line(&oci, "ready 0");
    let out = checkpoint(&oci, &[]);
    assert!(out.status == 1 && out.stderr.contains("--tcp-established"), "{out}");
    is_running(&oci);
    checkpoint(&oci, &["--tcp-established"]).ok();
    let out = restore(&oci, &bundle, &[]);
    assert!(out.status == 1 && out.stderr.contains("--tcp-established"), "{out}");
    oci.assert_nothing_left();
    restore(&oci, &bundle, &["--tcp-established"]).ok();
    oci.run(&["delete", "-f", "c"]).ok();
    oci.assert_nothing_left();
}

/// Flips one bit of a file. A second call restores the bit.
fn flip(path: &Path, at: u64) {
    let file = fs::OpenOptions::new().read(true).write(true).open(path).expect("the file exists");
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("a byte at the offset");
    file.write_all_at(&[byte[0] ^ 4], at).expect("write the file");
}

#[test]
fn vm_damaged_image_is_refused_and_leaves_nothing() {
    let oci = Oci::new();
    let bundle = workload(&oci, "memory");
    let out = restore(&oci, &bundle, &[]);
    assert!(out.status == 1 && out.stderr.contains("holds no checkpoint"), "{out}");
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    wait_for_line(&oci, "ready 0");
    checkpoint(&oci, &[]).ok();
    let dir = PathBuf::from(image_of(&oci)).join("dormouse");
    let (records, pages) = (dir.join("records"), dir.join("pages"));
    let text = fs::read(&records).expect("the file exists");
    let at = |what: &str| {
        let found = text.windows(what.len()).position(|w| w == what.as_bytes());
        found.unwrap_or_else(|| panic!("no {what}")) as u64
    };
    let length = fs::metadata(&pages).expect("the file exists").len();
    for (path, at, part) in [
        (&records, 3, "head"),
        (&records, at("\"umask\""), "section 'process'"),
        (&records, at("\"start_brk\""), "section 'memory'"),
        (&records, at("\"stdout\""), "section 'object'"),
        (&pages, 0, "of process 1 (memory)"),
        (&pages, length - 1, "of process 1 (memory)"),
    ] {
        flip(path, at);
        let out = restore(&oci, &bundle, &[]);
        assert!(out.status == 1 && out.stderr.contains(part), "{part}: {out}");
        oci.assert_nothing_left();
        flip(path, at);
    }
    // A file of the bundle that the checkpoint needs is missing.
    let hidden = bundle.rootfs().join("bin/hidden");
    fs::rename(bundle.rootfs().join("bin/memory"), &hidden).expect("renamed");
    let out = restore(&oci, &bundle, &[]);
    assert!(out.status == 1 && out.stderr.contains("'/bin/memory'"), "{out}");
    oci.assert_nothing_left();
    fs::rename(hidden, bundle.rootfs().join("bin/memory")).expect("renamed");
    restore(&oci, &bundle, &[]).ok();
    is_running(&oci);
    oci.run(&["delete", "-f", "c"]).ok();
    oci.assert_nothing_left();
}

/// Directories in memory keep their contents, and a restore does not fill them like a start.
#[test]
fn vm_restore_keeps_contents_of_tmpfs() {
    let oci = Oci::new();
    let script = "rm /copied/old; echo new > /copied/new; rm /dev/stderr; ln -s /new /dev/link; \
                  echo in > /dev/shm/file; echo ready 0; \
                  until test -e /go-0; do sleep 0.05; done; \
                  ls /copied; cat /copied/new /dev/shm/file /run/bound; readlink /dev/link; \
                  test -c /dev/null && test ! -e /copied/old && test -L /dev/fd && ! test -L /dev/stderr && echo ok";
    let bundle = Bundle::new(&oci, &["sh", "-c", script]);
    fs::create_dir(bundle.rootfs().join("copied")).expect("made");
    fs::write(bundle.rootfs().join("copied/old"), "of the image").expect("written");
    fs::write(bundle.path("bound"), "bound\n").expect("written");
    bundle.edit(|c| {
        let source = bundle.path("bound");
        let mounts = c["mounts"].as_array_mut().expect("a list");
        mounts.push(json!({"destination": "/copied", "type": "tmpfs", "source": "up",
                           "options": ["tmpcopyup"]}));
        mounts.push(json!({"destination": "/run", "type": "tmpfs", "source": "run"}));
        mounts.push(json!({"destination": "/run/bound", "type": "bind", "source": source,
                           "options": ["bind"]}));
    });
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    wait_for_line(&oci, "ready 0");
    checkpoint(&oci, &[]).ok();
    restore(&oci, &bundle, &[]).ok();
    fs::write(bundle.rootfs().join("go-0"), "").expect("written");
    wait_for_line(&oci, "ok");
    let text = fs::read_to_string(output_file(&oci)).expect("the file exists");
    assert_eq!(text, "new\nnew\nin\nbound\n/new\nok\n");
    wait_for_end(&oci);
}
