//! The OCI command line as container managers use it: bundles, processes, errors that name the
//! field, and no leftovers.

use crate::bundle;

use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use bundle::{Bundle, Oci};
use dormouse_testkit::{leftover, soon, wait_until};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};

/// Waits until a container has a state.
#[track_caller]
fn wait_for(oci: &Oci, id: &str, status: &str) {
    let is = || oci.status(id) == status;
    assert!(wait_until(soon(), is), "{id} is {}", oci.status(id));
}

#[test]
fn vm_container_lifecycle_from_create_to_delete() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sh", "-c", "echo started > /out/log; exec sleep 1000"]);
    bundle.edit(|c| bundle.volume(c, "/out"));
    let pid_file = bundle.path("pid");
    oci.run(&["create", "-b", bundle.dir(), "--pid-file", &pid_file, "c"]).ok();
    assert_eq!(oci.status("c"), "created");
    let pid = fs::read_to_string(&pid_file).expect("a pid file");
    assert_eq!(oci.state("c")["pid"].to_string(), pid);
    assert!(!bundle.out("log").exists(), "the program has started before 'start'");
    assert!(oci.run(&["create", "-b", bundle.dir(), "c"]).err(1).contains("already exists"));

    oci.run(&["start", "c"]).ok();
    assert!(wait_until(soon(), || bundle.out("log").exists()));
    assert_eq!(oci.status("c"), "running");
    assert!(oci.run(&["start", "c"]).err(1).contains("running"));
    assert!(oci.run(&["delete", "c"]).err(1).contains("not stopped"));
    let listed = oci.run(&["list", "-f", "json"]).ok();
    assert!(listed.contains("\"id\":\"c\"") && listed.contains("\"running\""), "{listed}");

    oci.run(&["kill", "c", "KILL"]).ok();
    wait_for(&oci, "c", "stopped");
    assert!(oci.run(&["kill", "c", "KILL"]).err(1).contains("container not running"));
    oci.run(&["delete", "c"]).ok();
    assert!(oci.run(&["state", "c"]).err(1).contains("does not exist"));
    oci.run(&["delete", "--force", "c"]).ok();
    oci.assert_nothing_left();
}

#[test]
fn run_returns_exit_code_of_program() {
    let oci = Oci::new();
    for (script, code) in [("exit 7", 7), ("kill -9 $PPID; kill -TERM 1; exit 0", 0)] {
        let bundle = Bundle::new(&oci, &["sh", "-c", script]);
        let out = oci.run(&["run", "-b", bundle.dir(), "c"]);
        assert_eq!(out.status, code, "{script}: {out:?}");
    }
    oci.assert_nothing_left();
}

/// Returns the lines of a container's mountinfo below a path: the mount point and its propagation.
fn propagation_of(text: &str, below: &str) -> Vec<(String, String)> {
    let kind = |words: &[&str]| {
        let optional = words.iter().skip(6).take_while(|word| **word != "-");
        let kinds: Vec<&str> = optional.map(|w| w.split(':').next().unwrap_or_default()).collect();
        if kinds.is_empty() { "private".to_owned() } else { kinds.join(" ") }
    };
    let lines = text.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let there = lines.filter(|words| words.len() > 6 && words[4].starts_with(below));
    there.map(|words| (words[4].to_owned(), kind(&words))).collect()
}

/// Each mount has its place in the kernel's table in the order of the configuration, also with a
/// propagation option and on a mount that the runtime makes.
#[test]
fn vm_mounts_keep_order_and_propagation() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["cat", "/proc/self/mountinfo"]);
    let kinds = [
        ("shared", "shared"),
        ("slave", "master"),
        ("private", "private"),
        ("unbindable", "unbindable"),
    ];
    let mut expected = Vec::new();
    // A slave mount without a master is private.
    let alone = |kind: &str| if kind == "master" { "private" } else { kind }.to_owned();
    let mut list = Vec::new();
    for (word, kind) in kinds {
        let place = format!("/all/tmpfs-{word}");
        list.push(json!({"destination": place, "type": "tmpfs", "source": "x", "options": [word]}));
        expected.push((place, alone(kind)));
        for (bind, word) in [("bind", word.to_owned()), ("rbind", format!("r{word}"))] {
            let place = format!("/all/{bind}-{word}");
            list.push(json!({"destination": place, "type": "bind", "source": bundle.path("out"),
                             "options": [bind, word]}));
            // The host's own mounts are shared, and container mounts of them are slaves by default.
            let kind = if kind == "shared" { "shared master" } else { kind };
            expected.push((place, kind.to_owned()));
        }
        let place = format!("/all/full-{word}");
        list.push(json!({"destination": place, "type": "tmpfs", "source": "x",
                         "options": ["ro", word]}));
        expected.push((place, alone(kind)));
    }
    bundle.edit(|c| c["mounts"].as_array_mut().expect("a list").append(&mut list));
    let table = oci.run(&["run", "-b", bundle.dir(), "c"]).ok();
    assert_eq!(propagation_of(&table, "/all/"), expected);

    // Also below a shared mount.
    bundle.edit(|c| {
        let mount = |place: &str, word: &str| {
            json!({"destination": place, "type": "tmpfs", "source": "x", "options": [word]})
        };
        let list = c["mounts"].as_array_mut().expect("a list");
        list.retain(|m| !m["destination"].as_str().is_some_and(|d| d.starts_with("/all")));
        list.push(mount("/all/top", "shared"));
        list.push(mount("/all/top/below", "unbindable"));
        list.push(json!({"destination": "/all/top/bound", "type": "bind",
                         "source": bundle.path("out"), "options": ["bind", "private"]}));
    });
    let table = oci.run(&["run", "-b", bundle.dir(), "c"]).ok();
    let pair = |place: &str, kind: &str| (place.to_owned(), kind.to_owned());
    let nested = [
        pair("/all/top", "shared"),
        pair("/all/top/below", "unbindable"),
        pair("/all/top/bound", "private"),
    ];
    assert_eq!(propagation_of(&table, "/all/"), nested);

    bundle.edit(|c| {
        let mut words = vec!["private"; 8];
        words.push("bind");
        let list = c["mounts"].as_array_mut().expect("a list");
        list.last_mut().expect("one")["options"] = json!(words);
    });
    let error = oci.run(&["run", "-b", bundle.dir(), "c"]).err(1);
    assert!(error.contains("options: 8 words about propagation"), "{error}");
    oci.assert_nothing_left();
}

/// With `rshared`, mounts inside propagate to the host where the configuration allows it, and the
/// host's mounts in a volume stay (a volume of docker or Kubernetes).
#[test]
fn vm_shared_volume_keeps_mounts_of_host() {
    let oci = Oci::new();
    let volume = oci.host().dir().join("volume");
    let place = volume.display();
    oci.sh(&format!(
        "mkdir {place} && mount -t tmpfs volume {place} && mkdir {place}/of-host {place}/of-inside &&
         mount -t tmpfs below {place}/of-host && touch {place}/of-host/file"
    ))
    .ok();
    let script = "ls /volume/of-host && \
                  mount -t tmpfs inside /volume/of-inside && touch /volume/of-inside/seen && \
                  cat /proc/self/mountinfo";
    for root in [json!("rshared"), Value::Null] {
        let bundle = Bundle::new(&oci, &["sh", "-c", script]);
        bundle.edit(|c| {
            c["linux"]["rootfsPropagation"] = root.clone();
            for set in ["bounding", "effective", "permitted"] {
                c["process"]["capabilities"][set] = json!(["CAP_SYS_ADMIN"]);
            }
            c["mounts"].as_array_mut().expect("a list").push(json!({"destination": "/volume",
                "type": "bind", "source": volume, "options": ["rbind", "rshared"]}));
        });
        let output = oci.run(&["run", "-b", bundle.dir(), "c"]).ok();
        assert!(output.starts_with("file\n"), "{root}: the container lacks a mount: {output}");
        let mounts = oci.host().mounts();
        let is_there = |name: &str| mounts.contains(&format!("{place}/{name}"));
        assert!(is_there("of-host"), "{root}: the host has lost a mount: {mounts:?}");
        assert_eq!(is_there("of-inside"), !root.is_null(), "{root}: {mounts:?}");
        if !root.is_null() {
            oci.sh(&format!("umount {place}/of-inside")).ok();
        }
    }
    oci.sh(&format!("umount -R {place}")).ok();
    oci.assert_nothing_left();
}

/// A process that shares the path of a container's cgroup, or is below it, is not killed with the
/// container.
#[test]
fn vm_delete_spares_processes_in_shared_cgroup_path() {
    let oci = Oci::new();
    let sleeper = || Bundle::new(&oci, &["sleep", "1000"]);
    let path = |bundle: &Bundle| {
        let path = bundle.read()["linux"]["cgroupsPath"].as_str().expect("a path").to_owned();
        path.rsplit_once('/').expect("two names").0.to_owned()
    };
    let first = sleeper();
    oci.run(&["run", "-d", "-b", first.dir(), "first"]).ok();
    // The same cgroup, then its parent, then that of a stopped container.
    let other = sleeper();
    for cgroup in [first.read()["linux"]["cgroupsPath"].clone(), path(&first).into()] {
        other.edit(|c| c["linux"]["cgroupsPath"] = cgroup.clone());
        for verb in ["create", "run"] {
            let error = oci.run(&[verb, "-b", other.dir(), "other"]).err(1);
            let is_named = error.contains("linux.cgroupsPath") && error.contains("is not empty");
            assert!(is_named, "{error}");
        }
    }
    assert_eq!(oci.status("first"), "running");
    oci.run(&["kill", "first", "KILL"]).ok();
    wait_for(&oci, "first", "stopped");
    other.edit(|c| c["linux"]["cgroupsPath"] = first.read()["linux"]["cgroupsPath"].clone());
    let error = oci.run(&["create", "-b", other.dir(), "other"]).err(1);
    assert!(error.contains("it is the cgroup of container"), "{error}");
    oci.run(&["delete", "first"]).ok();

    // A container below another one's cgroup survives the other's deletion.
    let above = sleeper();
    above.edit(|c| c["linux"]["cgroupsPath"] = path(&above).into());
    oci.run(&["run", "-d", "-b", above.dir(), "above"]).ok();
    let below = sleeper();
    if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        // With v2 alone, a cgroup has either processes or child cgroups.
        let error = oci.run(&["run", "-d", "-b", below.dir(), "below"]).err(1);
        assert!(
            error.contains("linux.cgroupsPath") && error.contains("runs none below"),
            "{error}"
        );
        oci.run(&["delete", "--force", "above"]).ok();
        return oci.assert_nothing_left();
    }
    oci.run(&["run", "-d", "-b", below.dir(), "below"]).ok();
    let out = oci.run(&["delete", "--force", "above"]);
    assert!(out.status == 0 && out.stderr.contains("others are below it"), "{out:?}");
    assert_eq!(oci.status("below"), "running");
    oci.run(&["delete", "--force", "below"]).ok();
    let own = &path(&below)[1..];
    leftover::remove_cgroups(own);
    assert!(leftover::cgroups(own).is_empty(), "{own} is busy");
    oci.assert_nothing_left();
}

/// A bundle that uses as many fields as possible.
fn rich(oci: &Oci) -> Bundle {
    let bundle = Bundle::new(oci, &["sh", "-c", RICH]);
    fs::create_dir(bundle.rootfs().join("copied")).expect("made");
    fs::write(bundle.rootfs().join("copied/up"), "from the image").expect("written");
    bundle.edit(|c| {
        bundle.volume(c, "/out");
        c["hostname"] = "rich".into();
        c["domainname"] = "example".into();
        c["process"]["user"] = json!({"uid": 7, "gid": 8, "umask": 0o77, "additionalGids": [9, 10]});
        c["process"]["cwd"] = "/made/by/runtime".into();
        c["process"]["oomScoreAdj"] = 123.into();
        c["process"]["rlimits"] = json!([{"type": "RLIMIT_CORE", "soft": 0, "hard": 4096}]);
        c["process"]["scheduler"] = json!({"policy": "SCHED_BATCH", "nice": 5});
        c["process"]["ioPriority"] = json!({"class": "IOPRIO_CLASS_IDLE", "priority": 0});
        c["linux"]["personality"] = json!({"domain": "LINUX32"});
        c["linux"]["sysctl"] = json!({"kernel.shmmax": "123456", "net.ipv4.ip_forward": "1"});
        c["linux"]["maskedPaths"] = json!(["/proc/version", "/proc/bus", "/proc/none"]);
        c["linux"]["readonlyPaths"] = json!(["/proc/sys"]);
        c["linux"]["namespaces"].as_array_mut().expect("a list").push(json!({"type": "time"}));
        c["linux"]["timeOffsets"] = json!({"boottime": {"secs": 1_000_000, "nanosecs": 5}});
        c["linux"]["devices"] =
            json!([{"type": "c", "path": "/dev/sub/null", "major": 1, "minor": 3, "fileMode": 0o604,
                    "uid": 7, "gid": 8}]);
        c["linux"]["resources"]["pids"] = json!({"limit": 33});
        c["linux"]["resources"]["memory"] = json!({"limit": 64 << 20});
        c["linux"]["resources"]["cpu"] = json!({"shares": 512, "quota": 50_000, "period": 100_000});
        let mounts = c["mounts"].as_array_mut().expect("a list");
        mounts.push(json!({"destination": "/copied", "type": "tmpfs", "source": "up",
                           "options": ["tmpcopyup", "nodev", "size=1m"]}));
        mounts.push(json!({"destination": "/host", "type": "bind", "source": bundle.dir(),
                           "options": ["rbind", "rro", "nosuid"]}));
    });
    bundle
}

const RICH: &str = "
    id -u; id -g; id -G; umask; pwd; hostname; cat /proc/sys/kernel/domainname
    cat /proc/self/oom_score_adj; ulimit -c; ulimit -Hc
    cut -d' ' -f41 /proc/self/stat; uname -m
    cat /proc/sys/kernel/shmmax /proc/sys/net/ipv4/ip_forward
    wc -c < /proc/version; ls /proc/bus | wc -l
    echo 1 2>/dev/null > /proc/sys/kernel/shmmax && echo writable || echo read-only
    test $(cut -d. -f1 /proc/uptime) -gt 1000000 && echo later
    stat -c '%F %t:%T %a %u:%g' /dev/sub/null; stat -c '%F' /dev/null /dev/ptmx
    cat /copied/up; echo; touch /host/x 2>/dev/null || echo no writing there
";

#[test]
fn vm_configuration_fields_take_effect() {
    let oci = Oci::new();
    let bundle = rich(&oci);
    let lines = oci.run(&["run", "-b", bundle.dir(), "c"]).ok();
    let lines: Vec<&str> = lines.lines().map(str::trim).collect();
    let expected = [
        "7",
        "8",
        "8 9 10",
        "0077",
        "/made/by/runtime",
        "rich",
        "example",
        "123",
        "0",
        "8",
        "3",
        "i686",
        "123456",
        "1",
        "0",
        "0",
        "read-only",
        "later",
        "character special file 1:3 604 7:8",
        "character special file",
        "symbolic link",
        "from the image",
        "no writing there",
    ];
    assert_eq!(lines, expected);
    oci.assert_nothing_left();
}

#[test]
fn vm_resource_limits_apply_and_update() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sleep", "1000"]);
    bundle.edit(|c| {
        c["linux"]["resources"]["pids"] = json!({"limit": 33});
        c["linux"]["resources"]["memory"] = json!({"limit": 64 << 20});
    });
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    assert_eq!(oci.cgroup("c", "pids", "pids.max", "pids.max"), "33");
    let memory = || oci.cgroup("c", "memory", "memory.limit_in_bytes", "memory.max");
    assert_eq!(memory(), (64 << 20).to_string());
    oci.run(&["update", "--memory", "96m", "--pids-limit", "44", "c"]).ok();
    assert_eq!(memory(), (96 << 20).to_string());
    assert_eq!(oci.cgroup("c", "pids", "pids.max", "pids.max"), "44");
    let file = bundle.path("resources.json");
    fs::write(&file, r#"{"memory": {"limit": 83886080}}"#).expect("written");
    oci.run(&["update", "-r", &file, "c"]).ok();
    assert_eq!(memory(), (80 << 20).to_string());

    let stats = oci.run(&["events", "--stats", "c"]).ok();
    let stats: Value = serde_json::from_str(&stats).expect("JSON");
    assert_eq!(stats["type"], "stats");
    assert_eq!(stats["data"]["pids"]["limit"], 44);
    assert!(stats["data"]["memory"]["usage"]["usage"].as_u64() > Some(0), "{stats}");
    oci.run(&["pause", "c"]).ok();
    assert_eq!(oci.status("c"), "paused");
    assert!(oci.run(&["exec", "c", "true"]).err(255).contains("paused"));
    oci.run(&["resume", "c"]).ok();
    assert_eq!(oci.status("c"), "running");
    let pids: Vec<u32> =
        serde_json::from_str(&oci.run(&["ps", "-f", "json", "c"]).ok()).expect("JSON");
    assert_eq!(pids, [oci.state("c")["pid"].as_u64().expect("a pid") as u32]);
    oci.run(&["delete", "-f", "c"]).ok();
    oci.assert_nothing_left();
}

/// Each entry: a field, an invalid value, and the text that the error must contain.
fn bad() -> Vec<(&'static str, Value, &'static str)> {
    vec![
        ("/ociVersion", json!("99.0.0"), "ociVersion"),
        ("/ociVersion", json!(7), "ociVersion"),
        ("/linux", Value::Null, "linux"),
        ("/root", Value::Null, "root"),
        ("/root/path", json!("nowhere"), "root.path"),
        ("/root/path", json!("/"), "root.path"),
        ("/hostname", json!("x".repeat(65)), "hostname"),
        ("/mounts/0/type", json!("tmpfs"), "mounts[0].destination"),
        ("/mounts/0/destination", json!(""), "mounts[0].destination"),
        ("/mounts/1/options", json!(["size=lots"]), "cannot mount /dev"),
        ("/process/args", json!([]), "process.args"),
        ("/process/args", json!(["a\u{0}b"]), "process.args[0]"),
        ("/process/cwd", json!("relative"), "process.cwd"),
        ("/process/user/uid", json!(4_294_967_296_u64), "process.user.uid"),
        ("/process/user/uid", json!(-1), "process.user.uid"),
        (
            "/process/rlimits",
            json!([{"type": "RLIMIT_X", "soft": 1, "hard": 1}]),
            "process.rlimits[0].type",
        ),
        (
            "/process/rlimits",
            json!([{"type": "RLIMIT_CPU", "soft": 2, "hard": 1}]),
            "process.rlimits[0].soft",
        ),
        ("/process/scheduler", json!({"policy": "SCHED_X"}), "process.scheduler.policy"),
        ("/process/ioPriority", json!({"class": "X"}), "process.ioPriority.class"),
        ("/linux/namespaces/0/type", json!("nothing"), "linux.namespaces[0].type"),
        ("/linux/namespaces/0/type", json!("ipc"), "linux.namespaces"),
        ("/linux/namespaces/0/path", json!("/dev/null"), "linux.namespaces[0].path"),
        (
            "/linux/uidMappings",
            json!([{"containerID": 0, "hostID": 1, "size": 1}]),
            "linux.uidMappings",
        ),
        ("/linux/devices", json!([{"type": "x", "path": "/dev/x"}]), "linux.devices[0].type"),
        ("/linux/devices", json!([{"type": "c", "path": "/dev/../x"}]), "linux.devices[0].path"),
        ("/linux/sysctl", json!({"kernel.core_pattern": "x"}), "linux.sysctl[kernel.core_pattern]"),
        ("/linux/sysctl", json!({"net.x": "1\n2"}), "linux.sysctl[net.x]"),
        ("/linux/intelRdt", json!({"closID": "x"}), "linux.intelRdt"),
        ("/linux/rootfsPropagation", json!("sideways"), "linux.rootfsPropagation"),
        ("/linux/personality", json!({"domain": "BSD"}), "linux.personality.domain"),
        ("/linux/timeOffsets", json!({"boottime": {"secs": 1}}), "linux.timeOffsets"),
        ("/linux/cgroupsPath", json!("../../up"), "cgroup path"),
        ("/linux/resources/devices/0/access", json!("x"), "linux.resources.devices[0].access"),
        ("/linux/resources/memory", json!({"limit": "1g"}), "linux.resources.memory.limit"),
        (
            "/linux/resources/memory",
            json!({"limit": 10_000_000, "swap": 1}),
            "linux.resources.memory.swap",
        ),
        ("/linux/resources/unified", json!({"../x": "1"}), "linux.resources.unified[../x]"),
        (
            "/linux/resources/unified",
            json!({"cgroup.procs": "1"}),
            "linux.resources.unified[cgroup.procs]",
        ),
        ("/linux/seccomp", json!({"defaultAction": "X"}), "linux.seccomp.defaultAction"),
        ("/linux/maskedPaths", json!(["proc"]), "linux.maskedPaths[0]"),
        ("/hooks", json!({"prestart": [{"path": "x"}]}), "hooks.prestart[0].path"),
        (
            "/hooks",
            json!({"poststop": [{"path": "/x", "timeout": 0}]}),
            "hooks.poststop[0].timeout",
        ),
        ("/windows", json!({}), "windows"),
    ]
}

#[test]
fn invalid_field_is_named_and_leaves_nothing() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["true"]);
    let good = bundle.read();
    for (pointer, value, names) in bad() {
        bundle.edit(|c| {
            let (parent, field) = pointer.rsplit_once('/').expect("a pointer");
            let place = c.pointer_mut(parent).expect("the parent of the field");
            match place {
                Value::Array(list) => {
                    list[field.parse::<usize>().expect("an index")] = value.clone()
                }
                place => place[field] = value.clone(),
            }
        });
        let error = oci.run(&["run", "-b", bundle.dir(), "c"]).err(1);
        assert!(error.contains(names), "{pointer} = {value}: {error}");
        bundle.write(&good);
    }
    oci.assert_nothing_left();
}

#[test]
fn malformed_config_is_refused() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["true"]);
    let good = fs::read_to_string(bundle.path("config.json")).expect("read");
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(200_000), "]".repeat(200_000));
    let env = good.replace("\"env\":[", &format!("\"env\":[\"X={}\",", "x".repeat(11 << 20)));
    assert_ne!(env, good);
    for text in ["", "{", "[]", "null", "{\"ociVersion\"", &good[..good.len() / 2], &deep, &env] {
        fs::write(bundle.path("config.json"), text).expect("written");
        oci.run(&["create", "-b", bundle.dir(), "c"]).err(1);
    }
    fs::remove_file(bundle.path("config.json")).expect("removed");
    oci.run(&["create", "-b", bundle.dir(), "c"]).err(1);
    for id in ["", ".", "..", "a/b", "a b", &"x".repeat(300)] {
        oci.run(&["create", "-b", bundle.dir(), id]).err(1);
    }
    oci.assert_nothing_left();
}

#[test]
fn create_reports_missing_program() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["true"]);
    for (program, words) in [
        ("/nowhere", "no such file or directory"),
        ("nowhere", "executable file not found in $PATH"),
        ("/etc", "permission denied"),
    ] {
        bundle.edit(|c| c["process"]["args"] = json!([program]));
        let error = oci.run(&["create", "-b", bundle.dir(), "c"]).err(1);
        assert!(error.contains(words), "{error}");
    }
    fs::write(bundle.rootfs().join("bin/broken"), "no program").expect("written");
    let mode = fs::Permissions::from_mode(0o755);
    fs::set_permissions(bundle.rootfs().join("bin/broken"), mode).expect("set");
    bundle.edit(|c| c["process"]["args"] = json!(["/bin/broken"]));
    oci.run(&["create", "-b", bundle.dir(), "c"]).ok();
    let error = oci.run(&["start", "c"]).err(1);
    assert!(error.to_lowercase().contains("exec format error"), "{error}");
    oci.run(&["delete", "c"]).ok();
    oci.assert_nothing_left();
}

#[test]
fn hooks_run_in_order_and_read_the_state() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sh", "-c", "echo program >> /out/order"]);
    let order = bundle.out("order");
    let stages =
        ["prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"];
    bundle.edit(|c| {
        bundle.volume(c, "/out");
        for stage in stages {
            // The hook in the container's root finds the volume there.
            let file = if stage == "startContainer" { "/out/order".into() } else { order.clone() };
            let script = format!("s=$(cat); echo {stage} $A $s >> {}", file.display());
            c["hooks"][stage] =
                json!([{"path": "/bin/sh", "args": ["sh", "-c", script], "env": ["A=b", "PATH=/bin:/usr/bin"]}]);
        }
    });
    oci.run(&["create", "-b", bundle.dir(), "c"]).ok();
    oci.run(&["start", "c"]).ok();
    wait_for(&oci, "c", "stopped");
    oci.run(&["delete", "c"]).ok();
    let text = fs::read_to_string(&order).expect("the file was written");
    let names: Vec<&str> = text.lines().filter_map(|line| line.split(' ').next()).collect();
    let mut sorted = names.clone();
    // The program and the poststart hook run side by side.
    sorted.sort_by_key(|name| stages.iter().position(|s| s == name).unwrap_or(4));
    assert_eq!(sorted.len(), 7, "{text}");
    assert_eq!(names[..4], stages[..4], "{text}");
    assert_eq!(names[6], "poststop", "{text}");
    for line in text.lines().filter(|line| !line.starts_with("program")) {
        let json = line.splitn(3, ' ').nth(2).expect("a state");
        assert!(line.contains(" b {"), "the hook's environment: {line}");
        let state: Value = serde_json::from_str(json).expect("JSON");
        assert_eq!(state["id"], "c");
        assert_eq!(state["bundle"], bundle.dir());
        let is_alive = !line.starts_with("poststop");
        assert_eq!(state["pid"].as_u64().is_some(), is_alive, "{line}");
    }
    oci.assert_nothing_left();
}

#[test]
fn failed_or_hanging_hook_ends_container() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sleep", "1000"]);
    for stage in ["prestart", "createRuntime", "createContainer", "startContainer"] {
        for (path, args, timeout, words) in [
            ("/bin/false", json!(["false"]), None, "exit status: 1"),
            ("/bin/sleep", json!(["sleep", "1000"]), Some(1), "killed"),
        ] {
            bundle.edit(|c| {
                c["hooks"] = json!({stage: [{"path": path, "args": args, "timeout": timeout}]});
            });
            let error = oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).err(1);
            let is_reported = error.contains(words) || error.contains("exit status 1");
            assert!(is_reported && error.contains(path), "{stage}: {error}");
            assert_eq!(oci.run(&["list", "-q"]).ok(), "");
        }
    }
    oci.assert_nothing_left();
}

#[test]
fn vm_exec_joins_all_namespaces_and_returns_exit_code() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sleep", "1000"]);
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    let script = "for n in ipc mnt net pid uts cgroup; do readlink /proc/1/ns/$n >> /tmp/one; \
                  readlink /proc/self/ns/$n >> /tmp/two; done; cmp /tmp/one /tmp/two && \
                  id -u && pwd && echo $A; exit 5";
    let out =
        oci.run(&["exec", "-u", "0:0", "--cwd", "/tmp", "-e", "A=b", "c", "sh", "-c", script]);
    assert_eq!((out.status, out.stdout.as_str()), (5, "0\n/tmp\nb\n"), "{out:?}");
    let file = bundle.path("process.json");
    let process = json!({"args": ["sh", "-c", "id -u; grep CapEff /proc/self/status"],
                         "env": ["PATH=/bin"], "cwd": "/", "user": {"uid": 77, "gid": 0}});
    fs::write(&file, process.to_string()).expect("written");
    let output = oci.run(&["exec", "--process", &file, "c"]).ok();
    assert_eq!(output, "77\nCapEff:\t0000000000000000");
    let pid_file = bundle.path("exec-pid");
    oci.run(&["exec", "-d", "--pid-file", &pid_file, "c", "sleep", "500"]).ok();
    let pid: u32 = fs::read_to_string(pid_file).expect("a pid").parse().expect("a number");
    let pids: Vec<u32> =
        serde_json::from_str(&oci.run(&["ps", "-f", "json", "c"]).ok()).expect("JSON");
    assert!(pids.contains(&pid), "{pids:?}");
    oci.run(&["exec", "c", "/nowhere"]).err(255);
    for user in ["", "1:", ":1", "+1", "01", "4294967296", "-1", "root"] {
        oci.run(&["exec", "-u", user, "c", "id"]).err(255);
    }
    oci.run(&["delete", "-f", "c"]).ok();
    oci.assert_nothing_left();
}

#[test]
fn descriptors_are_inherited_only_with_preserve_fds() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sh", "-c", "cat <&3; ls /proc/self/fd | wc -l"]);
    let file = bundle.path("file");
    fs::write(&file, "three\n").expect("written");
    let script = |flag: &str| {
        format!(
            "exec 3< {file} 4< {file} 9< /; {} --root {} run {flag} -b {} c 2>&1",
            oci.program().display(),
            oci.root().display(),
            bundle.dir()
        )
    };
    let output = oci.sh(&script("--preserve-fds 1")).ok();
    // 0 to 3, and the directory that `ls` reads.
    assert_eq!(output, "three\n5");
    let output = oci.sh(&script("")).ok();
    assert!(output.ends_with("\n4") && output.contains("ad file descriptor"), "{output}");
    oci.assert_nothing_left();
}

#[test]
fn vm_next_command_cleans_up_after_killed_create() {
    let oci = Oci::new();
    let bundle = rich(&oci);
    bundle.edit(|c| c["process"]["args"] = json!(["sleep", "1000"]));
    let started = std::time::Instant::now();
    oci.run(&["create", "-b", bundle.dir(), "whole"]).ok();
    let whole_us = started.elapsed().as_micros() as u64;
    oci.run(&["delete", "whole"]).ok();
    let (mut before, mut during) = (0, 0);
    for round in 0..60 {
        let mut create = oci.command(&["create", "-b", bundle.dir(), "c"]);
        create.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        let mut child = create.spawn().expect("started");
        std::thread::sleep(Duration::from_micros(whole_us * round / 50));
        child.kill().expect("killed");
        child.wait().expect("reaped");
        // Any next command cleans up.
        let left = oci.run(&["list", "-q"]).ok();
        match left.trim() {
            "" => during += 1,
            _ => {
                before += 1;
                assert_eq!(oci.status("c"), "created", "round {round}");
                oci.run(&["delete", "c"]).ok();
            }
        }
        oci.assert_nothing_left();
    }
    println!("{during} swept, {before} complete");
    assert!(during > 0, "no kill during a create");
}

#[test]
fn vm_user_namespace_root_is_unprivileged_outside() {
    let oci = Oci::new();
    let bundle = Bundle::new(
        &oci,
        &[
            "sh",
            "-c",
            "id -u; echo x > /mapped/file; \
        stat -c %u /mapped/file /mapped /dev/null; cat /proc/self/uid_map; echo > /dev/null && echo ok",
        ],
    );
    oci.sh(&format!("chown -R 200000:200000 {}", bundle.rootfs().display())).ok();
    let shared = bundle.path("shared");
    fs::create_dir(&shared).expect("made");
    bundle.edit(|c| {
        let map = json!([{"containerID": 0, "hostID": 200_000, "size": 65_536}]);
        (c["linux"]["uidMappings"], c["linux"]["gidMappings"]) = (map.clone(), map);
        c["linux"]["namespaces"].as_array_mut().expect("a list").push(json!({"type": "user"}));
        c["mounts"].as_array_mut().expect("a list").push(json!({
            "destination": "/mapped", "type": "bind", "source": shared, "options": ["bind", "idmap"]}));
    });
    let output = oci.run(&["run", "-b", bundle.dir(), "c"]);
    let output = output.ok();
    let lines: Vec<&str> = output.lines().map(str::trim).collect();
    // `/dev/null` is the node of the host.
    assert_eq!(lines[..4], ["0", "0", "0", "65534"], "{output}");
    assert!(lines[4].starts_with('0') && lines[4].contains("200000"), "{output}");
    assert_eq!(lines[5], "ok");
    assert_eq!(fs::metadata(Path::new(&shared).join("file")).expect("there").uid(), 0);
    oci.assert_nothing_left();
}

#[test]
fn vm_namespaces_are_joined_by_path() {
    let oci = Oci::new();
    let first = Bundle::new(&oci, &["sleep", "1000"]);
    oci.run(&["run", "-d", "-b", first.dir(), "first"]).ok();
    let pid = oci.state("first")["pid"].to_string();
    let bundle = Bundle::new(&oci, &["sh", "-c", "for n in /proc/self/ns/*; do readlink $n; done"]);
    let joined = [("ipc", "ipc"), ("uts", "uts"), ("network", "net"), ("pid", "pid")];
    bundle.edit(|c| {
        c["hostname"] = Value::Null;
        for one in c["linux"]["namespaces"].as_array_mut().expect("a list") {
            let kind = one["type"].as_str().expect("a word").to_owned();
            if let Some((_, file)) = joined.iter().find(|(word, _)| *word == kind) {
                one["path"] = format!("/proc/{pid}/ns/{file}").into();
            }
        }
    });
    let output = oci.run(&["run", "-b", bundle.dir(), "c"]).ok();
    for (_, file) in joined {
        let theirs = fs::read_link(format!("/proc/{pid}/ns/{file}")).expect("read");
        assert!(output.contains(theirs.to_str().expect("UTF-8")), "{file}: {output}");
    }
    let mounts = fs::read_link(format!("/proc/{pid}/ns/mnt")).expect("read");
    assert!(!output.contains(mounts.to_str().expect("UTF-8")));
    oci.run(&["delete", "-f", "first"]).ok();
    oci.assert_nothing_left();
}

#[test]
fn vm_seccomp_profile_matches_calls_and_arguments() {
    let oci = Oci::new();
    let script = "mkdir /tmp/x || echo refused; chmod 700 /tmp && echo allowed; \
                  chmod 755 /tmp 2>/dev/null || echo refused too; grep Seccomp: /proc/self/status";
    let bundle = Bundle::new(&oci, &["sh", "-c", script]);
    bundle.edit(|c| {
        c["linux"]["seccomp"] = json!({
            "defaultAction": "SCMP_ACT_ALLOW",
            "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"],
            "syscalls": [
                {"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1},
                {"names": ["chmod", "fchmodat"], "action": "SCMP_ACT_ERRNO",
                 "args": [{"index": 1, "value": 0o755, "op": "SCMP_CMP_EQ"}]},
                {"names": ["fchmodat"], "action": "SCMP_ACT_ERRNO",
                 "args": [{"index": 2, "value": 0o755, "op": "SCMP_CMP_EQ"}]},
            ],
        });
    });
    let out = oci.run(&["run", "-b", bundle.dir(), "c"]);
    assert!(out.stderr.contains("Operation not permitted"), "{out:?}");
    assert_eq!(out.ok(), "refused\nallowed\nrefused too\nSeccomp:\t2");
    oci.assert_nothing_left();
}

#[test]
fn vm_seccomp_listener_receives_notifications() {
    let oci = Oci::new();
    let script = "echo started; mkdir /tmp/x 2>&1; touch /tmp/y && echo not notified";
    let bundle =
        Bundle::new(&oci, &["sh", "-c", &format!("({script}) > /out/log; exec sleep 1000")]);
    let path = bundle.path("listener");
    bundle.edit(|c| {
        bundle.volume(c, "/out");
        c["linux"]["seccomp"] = json!({
            "defaultAction": "SCMP_ACT_ALLOW",
            "listenerPath": path,
            "listenerMetadata": "of the caller",
            "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_NOTIFY"}],
        });
    });
    let socket = std::os::unix::net::UnixListener::bind(&path).expect("bound");
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    let (stream, _) = socket.accept().expect("a connection");
    let (listener, mut text) = bundle::receive_with(&stream);
    (&stream).read_to_end(&mut text).expect("read");
    let state: Value = serde_json::from_slice(&text).expect("JSON");
    assert_eq!(state["fds"], json!(["seccompFd"]));
    assert_eq!(state["metadata"], "of the caller");
    assert_eq!((&state["state"]["id"], &state["pid"]), (&json!("c"), &oci.state("c")["pid"]));
    // The call waits for an answer.
    let mut fds = [PollFd::new(&listener, PollFlags::IN)];
    let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
    assert_eq!(poll(&mut fds, Some(&limit)), Ok(1), "no notification");
    assert_eq!(fs::read_to_string(bundle.out("log")).expect("written"), "started\n");
    // Without a listener the call fails with ENOSYS.
    drop(listener);
    let log = || fs::read_to_string(bundle.out("log")).expect("written");
    assert!(wait_until(soon(), || log().contains("not notified")));
    assert!(log().contains("not implemented"), "{}", log());
    oci.run(&["delete", "-f", "c"]).ok();
    oci.assert_nothing_left();
}

#[test]
fn vm_user_namespace_is_joined_by_path() {
    let oci = Oci::new();
    let own = |bundle: &Bundle| {
        oci.sh(&format!("chown -R 200000:200000 {}", bundle.rootfs().display())).ok();
    };
    let first = Bundle::new(&oci, &["sleep", "1000"]);
    own(&first);
    first.edit(|c| {
        let map = json!([{"containerID": 0, "hostID": 200_000, "size": 65_536}]);
        (c["linux"]["uidMappings"], c["linux"]["gidMappings"]) = (map.clone(), map);
        c["linux"]["namespaces"].as_array_mut().expect("a list").push(json!({"type": "user"}));
    });
    oci.run(&["run", "-d", "-b", first.dir(), "first"]).ok();
    let place = format!("/proc/{}/ns/user", oci.state("first")["pid"]);
    let script = "id -u; readlink /proc/self/ns/user; cat /proc/self/uid_map; hostname inside && \
                  hostname; touch /file && stat -c %u /file; echo > /dev/null && echo end";
    let bundle = Bundle::new(&oci, &["sh", "-c", script]);
    own(&bundle);
    bundle.edit(|c| {
        for set in ["bounding", "effective", "permitted"] {
            c["process"]["capabilities"][set] = json!(["CAP_SYS_ADMIN"]);
        }
        let list = c["linux"]["namespaces"].as_array_mut().expect("a list");
        list.push(json!({"type": "user", "path": place}));
    });
    let lines = oci.run(&["run", "-b", bundle.dir(), "c"]).ok();
    let lines: Vec<&str> = lines.lines().map(str::trim).collect();
    let theirs = fs::read_link(&place).expect("read");
    assert_eq!(lines[..2], ["0", theirs.to_str().expect("UTF-8")], "{lines:?}");
    assert!(lines[2].contains("200000"), "{lines:?}");
    // The new namespaces belong to the joined user namespace.
    assert_eq!(lines[3..], ["inside", "0", "end"], "{lines:?}");
    assert_eq!(fs::metadata(bundle.rootfs().join("file")).expect("made").uid(), 200_000);
    oci.run(&["delete", "-f", "first"]).ok();
    oci.assert_nothing_left();
}

/// By the device controller of v1, or by a BPF program on v2.
#[test]
fn vm_device_rules_apply_in_order() {
    let oci = Oci::new();
    let run = |rules: Value| {
        let script = "mknod /tmp/k c 1 11; true > /tmp/k && echo write; true < /tmp/k && echo read; \
                      true < /dev/zero && true > /dev/null && echo ordinary";
        let bundle = Bundle::new(&oci, &["sh", "-c", script]);
        bundle.edit(|c| {
            for set in ["bounding", "effective", "permitted"] {
                c["process"]["capabilities"][set] = json!(["CAP_MKNOD", "CAP_SYSLOG"]);
            }
            c["linux"]["resources"]["devices"] = rules;
        });
        oci.run(&["run", "-b", bundle.dir(), "c"]).stdout
    };
    let none = json!({"allow": false, "access": "rwm"});
    let kmsg = json!({"type": "c", "major": 1, "minor": 11});
    let one = |allow: bool, access: &str| {
        let mut rule = kmsg.clone();
        (rule["allow"], rule["access"]) = (allow.into(), access.into());
        rule
    };
    assert_eq!(run(json!([none])), "ordinary\n");
    assert_eq!(run(json!([none, one(true, "w")])), "write\nordinary\n");
    assert_eq!(run(json!([none, one(true, "rw")])), "write\nread\nordinary\n");
    // The last matching rule decides.
    assert_eq!(run(json!([none, one(true, "rw"), one(false, "r")])), "write\nordinary\n");
    assert_eq!(run(json!([{"allow": true, "access": "rwm"}])), "write\nread\nordinary\n");
    oci.assert_nothing_left();
}

#[test]
fn vm_console_socket_receives_terminal_master() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sh", "-c", "tty; stty size; read line; echo got $line"]);
    bundle.edit(|c| {
        c["process"]["terminal"] = true.into();
        c["process"]["consoleSize"] = json!({"height": 33, "width": 77});
    });
    assert!(oci.run(&["create", "-b", bundle.dir(), "c"]).err(1).contains("console"));
    let path = bundle.path("console");
    let listener = std::os::unix::net::UnixListener::bind(&path).expect("bound");
    oci.run(&["create", "-b", bundle.dir(), "--console-socket", &path, "c"]).ok();
    let (stream, _) = listener.accept().expect("a connection");
    let mut master = fs::File::from(bundle::receive(&stream));
    oci.run(&["start", "c"]).ok();
    master.write_all(b"hello\n").expect("written");
    let mut output = String::new();
    let mut bytes = [0; 1024];
    // A read fails after the last slave of the terminal was closed.
    while let Ok(n @ 1..) = master.read(&mut bytes) {
        output.push_str(&String::from_utf8_lossy(&bytes[..n]));
    }
    for words in ["/dev/pts/0", "33 77", "got hello"] {
        assert!(output.contains(words), "{output}");
    }
    wait_for(&oci, "c", "stopped");
    oci.run(&["delete", "c"]).ok();
    oci.assert_nothing_left();
}

/// Accepts a connection, which must come in time.
#[track_caller]
fn accept(listener: &std::os::unix::net::UnixListener) -> std::os::unix::net::UnixStream {
    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
    let came = poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&limit));
    assert_eq!(came, Ok(1), "no connection came");
    listener.accept().expect("a connection").0
}

/// A bundle in a user namespace of its own, with a program that waits.
fn in_a_user_namespace(oci: &Oci) -> Bundle {
    let bundle = Bundle::new(oci, &["sleep", "1000"]);
    oci.sh(&format!("chown -R 200000:200000 {}", bundle.rootfs().display())).ok();
    bundle.edit(|c| {
        let map = json!([{"containerID": 0, "hostID": 200_000, "size": 65_536}]);
        (c["linux"]["uidMappings"], c["linux"]["gidMappings"]) = (map.clone(), map);
        c["linux"]["namespaces"].as_array_mut().expect("a list").push(json!({"type": "user"}));
    });
    bundle
}

/// The number of a process in the innermost pid namespace that it is in.
fn innermost_pid(pid: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:")).expect("numbers");
    line.split_whitespace().last().expect("a number").to_owned()
}

/// A container that joins a user and a pid namespace by path has one number there, and another on the
/// host. A process of the host with the inner number is not the container's.
#[test]
fn joined_user_and_pid_namespaces_leave_host_process_alone() {
    let oci = Oci::new();
    let first = in_a_user_namespace(&oci);
    oci.run(&["run", "-d", "-b", first.dir(), "first"]).ok();
    let first_pid = oci.state("first")["pid"].to_string();
    let mut victim = oci.host().command("sleep");
    let mut victim = victim.arg("1000").spawn().expect("started");
    let number = victim.id();
    let is_hit = |victim: &mut std::process::Child| {
        let cgroup = fs::read_to_string(format!("/proc/{number}/cgroup")).expect("there");
        victim.try_wait().expect("a child").is_some() || cgroup.contains("/oci-")
    };
    let mut seen = Vec::new();
    // The newborn gets the number, or a helper does and the newborn the next one.
    for (round, last) in [number - 2, number - 1].into_iter().enumerate() {
        let bundle = in_a_user_namespace(&oci);
        bundle.edit(|c| {
            (c["linux"]["uidMappings"], c["linux"]["gidMappings"]) = (json!([]), json!([]));
            for namespace in c["linux"]["namespaces"].as_array_mut().expect("a list") {
                if let Some(kind @ ("user" | "pid")) = namespace["type"].as_str() {
                    namespace["path"] = format!("/proc/{first_pid}/ns/{kind}").into();
                }
            }
        });
        let set = format!("echo {last} > /proc/sys/kernel/ns_last_pid");
        oci.sh(&format!("nsenter -t {first_pid} --pid sh -c '{set}'")).ok();
        let (id, pid_file) = (format!("c{round}"), bundle.path("pid"));
        oci.run(&["run", "-d", "-b", bundle.dir(), "--pid-file", &pid_file, &id]).ok();
        let pid = oci.state(&id)["pid"].to_string();
        assert_eq!(fs::read_to_string(&pid_file).expect("a pid file"), pid);
        assert!(!is_hit(&mut victim), "{id}: process {number} of the host was taken for its own");
        seen.push(innermost_pid(&pid));
        let own = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("it lives");
        let path = bundle.read()["linux"]["cgroupsPath"].as_str().expect("a path").to_owned();
        assert!(own.lines().any(|line| line.ends_with(&path)), "{own}");
        let script = "readlink /proc/self/ns/pid; readlink /proc/self/ns/user";
        let said = oci.run(&["exec", &id, "sh", "-c", script]).ok();
        let theirs = |kind| fs::read_link(format!("/proc/{first_pid}/ns/{kind}")).expect("read");
        let expected = format!("{}\n{}", theirs("pid").display(), theirs("user").display());
        assert_eq!(said.trim(), expected);
        if round == 0 {
            oci.run(&["kill", &id, "KILL"]).ok();
            wait_for(&oci, &id, "stopped");
            oci.run(&["delete", &id]).ok();
        } else {
            oci.run(&["delete", "-f", &id]).ok();
        }
        assert!(!is_hit(&mut victim), "{id}: process {number} of the host was hit");
    }
    assert!(seen.contains(&number.to_string()), "no container had the number {number}: {seen:?}");
    assert_eq!(oci.status("first"), "running");
    victim.kill().and_then(|()| victim.wait()).expect("ended");
    oci.run(&["delete", "-f", "first"]).ok();
    oci.assert_nothing_left();
}

/// A hook that fails is named by its list, its place and its program, with the last words of it. A
/// program of the container's cannot write to the caller's terminal by them.
#[test]
fn failed_hook_is_named_with_its_words() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sleep", "1000"]);
    let script = "printf 'some \\033[31mwords\\n' >&2; exit 3";
    for stage in ["createRuntime", "createContainer", "startContainer"] {
        bundle.edit(|c| {
            let hook = |args: Value| json!({"path": "/bin/sh", "args": args});
            c["hooks"] = json!({stage: [hook(json!(["sh", "-c", "exit 0"])),
                                        hook(json!(["sh", "-c", script]))]});
        });
        let error = oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).err(1);
        let has = |words: &str| error.contains(words);
        assert!(has(stage) && has("#1") && has("/bin/sh") && has("words"), "{error}");
        assert!(has("exit status 3") || has("exit status: 3"), "{error}");
        assert!(stage == "createRuntime" || !has("\u{1b}"), "{error}");
        bundle.edit(|c| c["hooks"] = json!({stage: [{"path": "/not/there"}]}));
        let error = oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).err(1);
        assert!(error.contains("#0") && error.to_lowercase().contains("no such file"), "{error}");
    }
    oci.assert_nothing_left();
}

/// A filter is for the hook's program, and does not keep the newborn from waiting for it.
#[test]
fn filter_does_not_keep_newborn_from_waiting_for_hook() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sh", "-c", "echo program >> /out/said"]);
    bundle.edit(|c| {
        bundle.volume(c, "/out");
        c["hooks"] = json!({"startContainer": [{"path": "/bin/sh", "timeout": 60,
                                                "args": ["sh", "-c", "echo hook >> /out/said"]}]});
        c["linux"]["seccomp"] = json!({
            "defaultAction": "SCMP_ACT_ALLOW",
            "syscalls": [{"names": ["wait4", "waitid", "poll", "ppoll", "pidfd_open", "clone", "fork"],
                          "action": "SCMP_ACT_ERRNO"}],
        });
    });
    oci.run(&["run", "-b", bundle.dir(), "c"]).ok();
    assert_eq!(fs::read_to_string(bundle.out("said")).expect("written"), "hook\nprogram\n");
    oci.assert_nothing_left();
}

/// The listener of a container's filter is asked about the calls of its hooks, too.
#[test]
fn listener_is_asked_about_calls_of_hook() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sleep", "1000"]);
    let path = bundle.path("agent");
    bundle.edit(|c| {
        bundle.volume(c, "/out");
        let script = "mkdir /out/made || echo refused > /out/said";
        c["hooks"] = json!({"startContainer": [{"path": "/bin/sh", "args": ["sh", "-c", script]}]});
        c["linux"]["seccomp"] = json!({
            "defaultAction": "SCMP_ACT_ALLOW",
            "listenerPath": path,
            "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_NOTIFY"}],
        });
    });
    let agent = std::os::unix::net::UnixListener::bind(&path).expect("bound");
    oci.run(&["create", "-b", bundle.dir(), "c"]).ok();
    std::thread::scope(|scope| {
        let start = scope.spawn(|| oci.run(&["start", "c"]));
        let stream = accept(&agent);
        let (listener, _) = bundle::receive_with(&stream);
        let mut fds = [PollFd::new(&listener, PollFlags::IN)];
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&limit)), Ok(1), "no call was asked about");
        drop(listener);
        start.join().expect("no panic").ok();
    });
    assert_eq!(fs::read_to_string(bundle.out("said")).expect("written"), "refused\n");
    oci.run(&["delete", "-f", "c"]).ok();
    oci.assert_nothing_left();
}

/// runc and crun take flags after the id, except where a command follows.
#[test]
fn flags_may_follow_the_id() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sleep", "1000"]);
    let pid_file = bundle.path("pid");
    oci.run(&["create", "c", "--bundle", bundle.dir(), "--pid-file", &pid_file]).ok();
    assert_eq!(oci.state("c")["pid"].to_string(), fs::read_to_string(&pid_file).expect("a file"));
    oci.run(&["start", "c"]).ok();
    // Those of the command are its own.
    assert_eq!(oci.run(&["exec", "c", "echo", "-t", "--bundle"]).ok(), "-t --bundle");
    oci.run(&["delete", "c", "--force"]).ok();
    assert!(oci.run(&["create", "c", "d", "-b", bundle.dir()]).err(1).contains("too many"));
    oci.assert_nothing_left();
}

/// The caller's CPU affinity is not the container's.
#[test]
fn affinity_is_that_of_cpuset_or_configuration() {
    let oci = Oci::new();
    let allowed = "grep Cpus_allowed_list /proc/self/status";
    let host = oci.sh(allowed).ok();
    let bundle = Bundle::new(&oci, &["sh", "-c", &format!("{allowed}; exec sleep 1000")]);
    let pinned = |words: &[&str]| {
        let command = oci.command(words);
        let mut pinned = oci.host().command("taskset");
        pinned.args(["-c", "0"]).arg(command.get_program()).args(command.get_args());
        dormouse_testkit::run(pinned, b"", Duration::from_secs(60)).ok()
    };
    bundle.edit(|c| c["process"]["args"] = json!(["sh", "-c", allowed]));
    assert_eq!(pinned(&["run", "-b", bundle.dir(), "c"]), host);
    bundle.edit(|c| {
        c["process"]["args"] = json!(["sleep", "1000"]);
        c["process"]["execCPUAffinity"] = json!({"initial": "0", "final": "0"});
    });
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    let pid = oci.state("c")["pid"].to_string();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
    assert!(status.contains(host.trim()), "it is of later processes alone: {status}");
    assert_eq!(oci.run(&["exec", "c", "sh", "-c", allowed]).ok(), "Cpus_allowed_list:\t0");
    oci.run(&["delete", "-f", "c"]).ok();
    bundle.edit(|c| {
        c["process"].as_object_mut().expect("an object").remove("execCPUAffinity");
    });
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    assert_eq!(pinned(&["exec", "c", "sh", "-c", allowed]), host);
    oci.run(&["delete", "-f", "c"]).ok();
    bundle.edit(|c| c["process"]["execCPUAffinity"] = json!({"final": "0-x"}));
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    let error = oci.run(&["exec", "c", "true"]).err(255);
    assert!(error.contains("process.execCPUAffinity.final"), "{error}");
    oci.run(&["delete", "-f", "c"]).ok();
    oci.assert_nothing_left();
}

#[test]
fn environment_has_each_name_once() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["env"]);
    fs::create_dir_all(bundle.rootfs().join("etc")).expect("made");
    fs::write(bundle.rootfs().join("etc/passwd"), "root:x:0:0::/home/of-root:/bin/sh\n").expect("");
    bundle.edit(|c| {
        c["process"]["env"] = json!(["PATH=/bin", "ONE=first", "HOME=", "TWO=2", "ONE=last"]);
    });
    let said = oci.run(&["run", "-b", bundle.dir(), "c"]).ok();
    let mut lines: Vec<&str> = said.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["HOME=/home/of-root", "ONE=last", "PATH=/bin", "TWO=2"]);
    bundle.edit(|c| c["process"]["args"] = json!(["sleep", "1000"]));
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    let said = oci.run(&["exec", "-e", "ONE=of exec", "c", "env"]).ok();
    assert!(said.contains("ONE=of exec") && !said.contains("ONE=last"), "{said}");
    oci.run(&["delete", "-f", "c"]).ok();
    oci.assert_nothing_left();
}

/// runtime-spec config.md, process.capabilities: a warning, and no error.
#[test]
fn unknown_capability_is_warned_of() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["grep", "CapBnd", "/proc/self/status"]);
    bundle.edit(|c| {
        c["process"]["capabilities"]["bounding"] = json!(["CAP_CHOWN", "CAP_OF_TOMORROW"]);
    });
    let out = oci.run(&["run", "-b", bundle.dir(), "c"]);
    assert!(out.stderr.contains("process.capabilities.bounding[1]"), "{out}");
    assert!(out.stderr.contains("CAP_OF_TOMORROW") && out.stderr.contains("warning"), "{out}");
    assert_eq!(out.ok(), "CapBnd:\t0000000000000001");
    oci.assert_nothing_left();
}

/// A tmpfs without a mode has that of the directory that it covers.
#[test]
fn tmpfs_has_mode_of_covered_directory() {
    let oci = Oci::new();
    let script = "stat -c '%a %n' /covered /given /new /fixed /up";
    let bundle = Bundle::new(&oci, &["sh", "-c", script]);
    for (name, mode) in [("covered", 0o710), ("given", 0o710), ("fixed", 0o2750), ("up", 0o700)] {
        let dir = bundle.rootfs().join(name);
        fs::create_dir(&dir).expect("made");
        fs::set_permissions(&dir, PermissionsExt::from_mode(mode)).expect("set");
    }
    bundle.edit(|c| {
        let list = c["mounts"].as_array_mut().expect("a list");
        for (place, options) in [
            ("/covered", json!(["nosuid"])),
            ("/given", json!(["mode=0711"])),
            ("/new", json!([])),
            ("/fixed", json!(["ro"])),
            ("/up", json!(["tmpcopyup"])),
        ] {
            list.push(json!({"destination": place, "type": "tmpfs", "source": "x",
                             "options": options}));
        }
    });
    let said = oci.run(&["run", "-b", bundle.dir(), "c"]).ok();
    assert_eq!(said, "710 /covered\n711 /given\n1777 /new\n2750 /fixed\n700 /up");
    oci.assert_nothing_left();
}

/// What belongs into `/dev` is there before it becomes read-only.
#[test]
fn read_only_dev_has_its_links_and_nodes() {
    let oci = Oci::new();
    let script = "readlink /dev/fd; [ -c /dev/null ] && echo null > /dev/null && echo node; \
                  touch /dev/new 2>&1";
    let bundle = Bundle::new(&oci, &["sh", "-c", script]);
    bundle.edit(|c| {
        let list = c["mounts"].as_array_mut().expect("a list");
        let dev = list.iter_mut().find(|m| m["destination"] == "/dev").expect("there");
        dev["options"].as_array_mut().expect("a list").push("ro".into());
    });
    let out = oci.run(&["run", "-b", bundle.dir(), "c"]);
    assert!(out.stdout.starts_with("/proc/self/fd\nnode\n"), "{out}");
    assert!(out.stdout.contains("Read-only file system"), "{out}");
    oci.assert_nothing_left();
}

/// A later process has a filter of its own, and the agent a listener for it.
#[test]
fn later_process_gets_listener_of_its_own() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sleep", "1000"]);
    let path = bundle.path("agent");
    bundle.edit(|c| {
        c["linux"]["seccomp"] = json!({
            "defaultAction": "SCMP_ACT_ALLOW",
            "listenerPath": path,
            "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_NOTIFY"}],
        });
    });
    let agent = std::os::unix::net::UnixListener::bind(&path).expect("bound");
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    let (first, _) = bundle::receive_with(&accept(&agent));
    let words = ["exec", "c", "sh", "-c", "mkdir /tmp/made || echo refused"];
    std::thread::scope(|scope| {
        let exec = scope.spawn(|| oci.run(&words));
        let stream = accept(&agent);
        let (listener, text) = bundle::receive_with(&stream);
        let told: Value = serde_json::from_slice(&text).expect("JSON");
        assert_eq!(
            (&told["state"]["id"], &told["state"]["status"]),
            (&json!("c"), &json!("running"))
        );
        assert_ne!(told["pid"], told["state"]["pid"]);
        let mut fds = [PollFd::new(&listener, PollFlags::IN)];
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&limit)), Ok(1), "no call was asked about");
        drop(listener);
        let said = exec.join().expect("no panic");
        assert!(said.stdout.contains("refused"), "{said}");
    });
    drop(first);
    oci.run(&["delete", "-f", "c"]).ok();
    oci.assert_nothing_left();
}

/// As runc's client has it: the terminal that the output is copied to ends lines, and a file that it is
/// copied to has none of a terminal's carriage returns.
#[test]
fn foreground_terminal_adds_no_carriage_return() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sh", "-c", "tty; echo two; exec sleep 1000"]);
    bundle.edit(|c| {
        c["process"]["terminal"] = true.into();
        c["process"]["args"] = json!(["sh", "-c", "tty; echo two"]);
    });
    assert_eq!(oci.run(&["run", "-b", bundle.dir(), "c"]).stdout, "/dev/pts/0\ntwo\n");
    bundle.edit(|c| {
        c["process"]["terminal"] = false.into();
        c["process"]["args"] = json!(["sleep", "1000"]);
    });
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    let out = oci.run(&["exec", "-t", "c", "sh", "-c", "tty; echo two"]);
    assert_eq!(out.stdout, "/dev/pts/0\ntwo\n");
    oci.run(&["delete", "-f", "c"]).ok();
    oci.assert_nothing_left();
}

#[test]
fn bind_mount_takes_words_about_access_times() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["grep", " /bound", "/proc/self/mountinfo"]);
    for (words, has, lacks) in [
        (vec!["atime"], "relatime", "noatime"),
        (vec!["ratime", "rdev"], "relatime", "noatime"),
        (vec!["noatime"], "noatime", "relatime"),
        (vec!["noatime", "atime"], "relatime", "noatime"),
        (vec!["nostrictatime", "suid", "exec", "atime"], "relatime", "noatime"),
        (vec!["strictatime", "noatime"], "noatime", "relatime"),
    ] {
        bundle.edit(|c| {
            let list = c["mounts"].as_array_mut().expect("a list");
            list.retain(|m| m["destination"] != "/bound");
            let mut options = vec!["bind"];
            options.extend(&words);
            list.push(json!({"destination": "/bound", "type": "bind",
                             "source": bundle.path("out"), "options": options}));
        });
        let said = oci.run(&["run", "-b", bundle.dir(), "c"]).ok();
        let options = said.split(' ').nth(5).expect("options");
        let is = |word: &str| options.split(',').any(|option| option == word);
        assert!(is(has) && !is(lacks), "{words:?}: {said}");
    }
    oci.assert_nothing_left();
}

#[test]
fn device_rule_and_path_are_taken_as_runc_takes_them() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sh", "-c", "ls -l /mnt/null; : > /dev/kmsg && echo opened"]);
    bundle.edit(|c| {
        c["linux"]["devices"] = json!([
            {"type": "c", "path": "/mnt/null/", "major": 1, "minor": 3},
            {"type": "c", "path": "/dev/kmsg", "major": 1, "minor": 11},
        ]);
        c["linux"]["resources"]["devices"] = json!([
            {"allow": false, "access": "rwm"},
            {"allow": true, "type": "c", "major": 1, "minor": 11, "access": "a"},
        ]);
    });
    let out = oci.run(&["run", "-b", bundle.dir(), "c"]);
    assert!(out.stdout.contains("1,   3") && out.stdout.contains("opened"), "{out}");
    oci.assert_nothing_left();
}

/// The variable is inherited by programs that have none of the descriptors.
#[test]
fn listen_fds_without_descriptor_is_passed_over() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sh", "-c", "echo ${LISTEN_FDS-none}"]);
    let run = |environment: &str| {
        let (program, root) = (oci.program().display(), oci.root());
        let run = format!("{program} --root {} run -b {} c", root.display(), bundle.dir());
        oci.sh(&format!("exec 3<&- 3< /dev/null; {environment} {run}")).ok()
    };
    assert_eq!(run("exec 3<&-; LISTEN_FDS=1"), "none");
    assert_eq!(run("LISTEN_PID=1 LISTEN_FDS=1"), "none");
    assert_eq!(run("LISTEN_FDS=1"), "1");
    oci.assert_nothing_left();
}

/// Without a pid namespace of its own a container's processes outlive its first one, and `kill` reaches
/// them.
#[test]
fn kill_reaches_processes_without_first_one() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sh", "-c", "sleep 1000 & exec sleep 1000"]);
    bundle.edit(|c| {
        let list = c["linux"]["namespaces"].as_array_mut().expect("a list");
        list.retain(|n| n["type"] != "pid");
        let list = c["mounts"].as_array_mut().expect("a list");
        let proc = list.iter_mut().find(|m| m["destination"] == "/proc").expect("there");
        *proc = json!({"destination": "/proc", "type": "bind", "source": "/proc",
                       "options": ["rbind"]});
        (c["linux"]["maskedPaths"], c["linux"]["readonlyPaths"]) = (json!([]), json!([]));
    });
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    let pids = || oci.run(&["ps", "-f", "json", "c"]).ok();
    let first = oci.state("c")["pid"].to_string();
    assert!(wait_until(soon(), || pids().contains(',')));
    oci.sh(&format!("kill -9 {first}")).ok();
    wait_for(&oci, "c", "stopped");
    assert_ne!(pids(), "[]");
    assert!(oci.run(&["kill", "c", "TERM"]).err(1).contains("container not running"));
    oci.run(&["kill", "c", "KILL"]).ok();
    assert!(wait_until(soon(), || pids() == "[]"));
    assert!(oci.run(&["kill", "c", "KILL"]).err(1).contains("container not running"));
    oci.run(&["delete", "c"]).ok();
    oci.assert_nothing_left();
}

/// A process that is born in a frozen cgroup never runs.
#[test]
fn frozen_cgroup_is_refused() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["true"]);
    let path = bundle.read()["linux"]["cgroupsPath"].as_str().expect("a path").to_owned();
    let v2 = [Path::new("/sys/fs/cgroup"), Path::new("/sys/fs/cgroup/unified")];
    let v2 = v2.into_iter().find(|top| top.join("cgroup.controllers").exists());
    let v1 = Path::new("/sys/fs/cgroup/freezer");
    let (top, file, value) = match v1.is_dir() {
        true => (v1, "freezer.state", "FROZEN"),
        false => (v2.expect("v1 or v2"), "cgroup.freeze", "1"),
    };
    let dir = top.join(&path[1..]);
    fs::create_dir_all(&dir).expect("made");
    fs::write(dir.join(file), value).expect("frozen");
    let error = oci.run(&["run", "-b", bundle.dir(), "c"]).err(1);
    assert!(error.contains("linux.cgroupsPath") && error.contains("frozen"), "{error}");
    fs::remove_dir(&dir).and_then(|()| fs::remove_dir(dir.parent().expect("one"))).expect("gone");
    oci.assert_nothing_left();
}

/// A container may wait for its start for long: it holds no descriptor of a cgroup meanwhile.
#[test]
fn created_process_holds_no_cgroup_descriptor() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["true"]);
    oci.run(&["create", "-b", bundle.dir(), "c"]).ok();
    let dir = format!("/proc/{}/fd", oci.state("c")["pid"]);
    let links = fs::read_dir(dir).expect("it lives").flatten();
    let links = links.filter_map(|entry| fs::read_link(entry.path()).ok());
    let held: Vec<_> = links.filter(|to| to.starts_with("/sys/fs/cgroup")).collect();
    assert!(held.is_empty(), "{held:?}");
    oci.run(&["delete", "c"]).ok();
    oci.assert_nothing_left();
}

#[test]
fn pidfd_of_process_goes_to_the_socket() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sleep", "1000"]);
    let path = bundle.path("socket");
    let listener = std::os::unix::net::UnixListener::bind(&path).expect("bound");
    let receive = || {
        let (pidfd, word) = bundle::receive_with(&accept(&listener));
        let info = format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd());
        let info = fs::read_to_string(info).expect("it is open");
        let pid = info.lines().find_map(|line| line.strip_prefix("Pid:")).expect("a pidfd");
        (pid.trim().to_owned(), String::from_utf8(word).expect("UTF-8"))
    };
    oci.run(&["create", "-b", bundle.dir(), "--pidfd-socket", &path, "c"]).ok();
    let pid = oci.state("c")["pid"].to_string();
    assert_eq!(receive(), (pid, "standard".to_owned()));
    oci.run(&["start", "c"]).ok();
    let pid_file = bundle.path("pid");
    let flags = ["exec", "-d", "--pid-file", &pid_file, "--pidfd-socket", &path, "c"];
    oci.run(&[&flags[..], &["sleep", "1000"]].concat()).ok();
    assert_eq!(receive(), (fs::read_to_string(&pid_file).expect("a file"), "setns".to_owned()));
    oci.run(&["delete", "-f", "c"]).ok();
    let missing = bundle.path("missing");
    let error = oci.run(&["create", "-b", bundle.dir(), "--pidfd-socket", &missing, "c"]).err(1);
    assert!(error.contains("pidfd"), "{error}");
    oci.assert_nothing_left();
}

/// Hooks need no mount namespace: those of the host look at the root by its path.
#[test]
fn hooks_run_without_mount_namespace() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sh", "-c", "echo program >> /said"]);
    let said = bundle.rootfs().join("said");
    bundle.edit(|c| {
        let list = c["linux"]["namespaces"].as_array_mut().expect("a list");
        list.retain(|n| n["type"] != "mount");
        c["mounts"] = json!([]);
        (c["linux"]["maskedPaths"], c["linux"]["readonlyPaths"]) = (json!([]), json!([]));
        c["hooks"] = json!({});
        for stage in ["prestart", "createRuntime", "createContainer", "startContainer"] {
            let place = if stage == "startContainer" { "/said".into() } else { said.clone() };
            let script = format!("echo {stage} >> {}", place.display());
            c["hooks"][stage] = json!([{"path": "/bin/sh", "args": ["sh", "-c", script]}]);
        }
    });
    oci.run(&["run", "-b", bundle.dir(), "c"]).ok();
    let text = fs::read_to_string(&said).expect("written");
    let expected = ["prestart", "createRuntime", "createContainer", "startContainer", "program"];
    assert_eq!(text.lines().collect::<Vec<_>>(), expected);
    oci.assert_nothing_left();
}

#[test]
fn memory_policy_is_applied() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["grep", "-c", " interleave", "/proc/self/numa_maps"]);
    for (policy, field) in [
        (json!({"mode": "MPOL_X"}), "linux.memoryPolicy.mode"),
        (json!({"mode": "MPOL_BIND", "nodes": "x"}), "linux.memoryPolicy.nodes"),
        (json!({"mode": "MPOL_BIND", "nodes": "0", "flags": ["X"]}), "linux.memoryPolicy.flags[0]"),
    ] {
        bundle.edit(|c| c["linux"]["memoryPolicy"] = policy);
        let error = oci.run(&["run", "-b", bundle.dir(), "c"]).err(1);
        assert!(error.contains(field), "{error}");
    }
    oci.assert_nothing_left();
    if !Path::new("/proc/self/numa_maps").exists() {
        eprintln!("NOT RUN in part: this kernel has no NUMA");
        return;
    }
    bundle.edit(|c| c["linux"]["memoryPolicy"] = json!({"mode": "MPOL_INTERLEAVE", "nodes": "0"}));
    assert_ne!(oci.run(&["run", "-b", bundle.dir(), "c"]).ok(), "0");
    oci.assert_nothing_left();
}

/// A limit that may not be set is told by `create`, and not by a program that cannot be executed.
#[test]
fn refused_limit_is_told_by_create() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["true"]);
    // More than fs.nr_open is refused for every caller.
    let most = fs::read_to_string("/proc/sys/fs/nr_open").expect("read");
    let more = most.trim().parse::<u64>().expect("a number") + 1;
    bundle.edit(|c| {
        c["process"]["rlimits"] = json!([{"type": "RLIMIT_NOFILE", "soft": more, "hard": more}]);
    });
    let error = oci.run(&["create", "-b", bundle.dir(), "c"]).err(1);
    assert!(error.contains("resource limit nofile"), "{error}");
    oci.assert_nothing_left();
}
