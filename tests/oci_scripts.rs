//! Properties of the OCI command line that scripts written for runc rely on: words of errors and of
//! help texts, the order of JSON fields, and details of flags and of the configuration.

use crate::bundle;

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::Path;

use bundle::{Bundle, Oci};
use dormouse_testkit::{soon, wait_until};
use serde_json::{Value, json};

/// Asserts that a text has these fields in this order.
#[track_caller]
fn assert_order(text: &str, names: &[&str]) {
    let at = |name: &&str| text.find(&format!("\"{name}\":"));
    let places: Vec<_> =
        names.iter().map(|name| at(name).unwrap_or_else(|| panic!("{name}: {text}"))).collect();
    assert!(places.is_sorted(), "{names:?} in {text}");
}

#[test]
fn json_fields_have_the_order_of_runc() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sleep", "1000"]);
    bundle.edit(|c| c["annotations"] = json!({"a": "b"}));
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    let names = [
        "ociVersion",
        "id",
        "pid",
        "status",
        "bundle",
        "rootfs",
        "created",
        "annotations",
        "owner",
    ];
    assert_order(&oci.run(&["state", "c"]).ok(), &names);
    let listed = oci.run(&["list", "-f", "json"]).ok();
    assert!(listed.starts_with("[{\"ociVersion\":"), "{listed}");
    assert_order(&listed, &names);
    let stats = oci.run(&["events", "--stats", "c"]).ok();
    assert!(stats.starts_with("{\"type\":\"stats\",\"id\":\"c\",\"data\":{\"cpu\":"), "{stats}");
    assert_order(&stats, &["cpu", "memory", "pids", "blkio", "hugetlb", "intel_rdt"]);
    oci.run(&["delete", "-f", "c"]).ok();
    oci.assert_nothing_left();
}

#[test]
fn help_has_headings_and_names_command() {
    let oci = Oci::new();
    let help = oci.run(&["--help"]).ok();
    assert!(
        help.starts_with("NAME:\n   dormouse-oci - Open Container Initiative runtime"),
        "{help}"
    );
    for heading in ["USAGE:", "VERSION:", "COMMANDS:", "GLOBAL OPTIONS:"] {
        assert!(help.lines().any(|line| line == heading), "{help}");
    }
    for verb in ["state", "exec", "update", "restore", "features"] {
        let help = oci.run(&[verb, "-h"]).ok();
        assert!(help.starts_with(&format!("NAME:\n   dormouse-oci {verb} - ")), "{help}");
        assert!(help.contains("\nOPTIONS:\n   --"), "{help}");
    }
    assert!(oci.run(&["foo", "-h"]).err(1).contains("No help topic for 'foo'"));
}

#[test]
fn list_refuses_missing_root_that_was_named() {
    let oci = Oci::new();
    let root = oci.root();
    assert!(!root.exists());
    let error = oci.run(&["list"]).err(1);
    assert!(error.contains(&root.display().to_string()), "{error}");
    assert!(!root.exists(), "the command has made it");
}

#[test]
fn failed_hook_is_named_with_its_place() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["true"]);
    for stage in ["prestart", "createRuntime", "createContainer", "startContainer", "poststart"] {
        bundle.edit(|c| {
            c["hooks"] = json!({stage: [{"path": "/bin/true"}, {"path": "/bin/false"}]});
        });
        let error = oci.run(&["run", "-b", bundle.dir(), "c"]).err(1);
        assert!(error.contains(&format!("error running {stage} hook #1:")), "{error}");
    }
    // A hook that its filter kills.
    bundle.edit(|c| {
        let hook = json!({"path": "/bin/mkdir", "args": ["mkdir", "/tmp/x"]});
        c["hooks"] = json!({"startContainer": [hook]});
        c["linux"]["seccomp"] = json!({
            "defaultAction": "SCMP_ACT_ALLOW",
            "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_KILL_PROCESS"}],
        });
    });
    let error = oci.run(&["run", "-b", bundle.dir(), "c"]).err(1);
    assert!(error.contains("error running startContainer hook #0:"), "{error}");
    assert!(error.contains("bad system call"), "{error}");
    oci.assert_nothing_left();
}

/// A createContainer hook finds the root filesystem at its working directory.
#[test]
fn create_container_hook_runs_in_the_root() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["cat", "/by-hook", "/by-mount"]);
    let script = format!(
        "echo made > ./by-hook && : > ./by-mount && mount --bind {} ./by-mount",
        bundle.path("out/file")
    );
    fs::write(bundle.out("file"), "mounted\n").expect("written");
    bundle.edit(|c| {
        let hook = json!({"path": "/bin/sh", "args": ["sh", "-c", script],
                          "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]});
        c["hooks"] = json!({"createContainer": [hook]});
    });
    assert_eq!(oci.run(&["run", "-b", bundle.dir(), "c"]).ok(), "made\nmounted");
    oci.assert_nothing_left();
}

/// A created container waits for its start for long: the process holds nothing that it needs no more.
#[test]
fn created_process_holds_only_its_sockets() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["true"]);
    bundle.edit(|c| {
        bundle.volume(c, "/out");
        c["linux"]["maskedPaths"] = json!(["/proc/keys", "/etc"]);
    });
    oci.run(&["create", "-b", bundle.dir(), "c"]).ok();
    let dir = format!("/proc/{}/fd", oci.state("c")["pid"]);
    let links = fs::read_dir(dir).expect("it lives").flatten();
    let names = links
        .filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok_and(|n| n > 2));
    let held: Vec<String> = names
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .map(|to| to.display().to_string())
        .filter(|to| !to.starts_with("socket:") && to != "anon_inode:[signalfd]")
        .collect();
    // The procfs for sysctls and labels.
    assert!(held.len() <= 1 && held.iter().all(|to| to == "/"), "{held:?}");
    oci.run(&["delete", "c"]).ok();
    oci.assert_nothing_left();
}

#[test]
fn signal_ends_created_container() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sleep", "1000"]);
    for signal in ["TERM", "INT", "HUP"] {
        oci.run(&["create", "-b", bundle.dir(), "c"]).ok();
        oci.run(&["kill", "c", signal]).ok();
        let is_over = || oci.status("c") == "stopped";
        assert!(wait_until(soon(), is_over), "{signal}");
        assert!(oci.run(&["start", "c"]).err(1).contains("stopped"));
        oci.run(&["delete", "c"]).ok();
    }
    // The program starts with no signal blocked.
    bundle.edit(|c| c["process"]["args"] = json!(["grep", "SigBlk", "/proc/self/status"]));
    assert_eq!(oci.run(&["run", "-b", bundle.dir(), "c"]).ok(), "SigBlk:\t0000000000000000");
    oci.assert_nothing_left();
}

#[test]
fn pids_limit_of_zero_is_one() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sleep", "1000"]);
    bundle.edit(|c| c["linux"]["resources"]["pids"] = json!({"limit": 0}));
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    let limit = || oci.cgroup("c", "pids", "pids.max", "pids.max");
    assert_eq!(limit(), "1");
    for (given, set) in [("7", "7"), ("-1", "max"), ("0", "1")] {
        oci.run(&["update", "c", "--pids-limit", given]).ok();
        assert_eq!(limit(), set);
    }
    oci.run(&["delete", "-f", "c"]).ok();
    oci.assert_nothing_left();
}

/// On v1 a container is put into the hierarchies that limit or count something for it, and into others
/// when `update` limits it there.
#[test]
fn update_limits_cpus_of_running_container() {
    let oci = Oci::new();
    let script = "sleep 1000 & sleep 1000 & while :; do sleep 1; done";
    let bundle = Bundle::new(&oci, &["sh", "-c", script]);
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    let pids = || -> Vec<u32> {
        serde_json::from_str(&oci.run(&["ps", "-f", "json", "c"]).ok()).expect("JSON")
    };
    assert!(wait_until(soon(), || pids().len() >= 3));
    oci.run(&["update", "c", "--cpuset-cpus", "0"]).ok();
    for pid in pids() {
        // A child of the shell may have ended meanwhile.
        let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else { continue };
        let allowed = status.lines().find(|line| line.starts_with("Cpus_allowed_list:"));
        assert_eq!(allowed, Some("Cpus_allowed_list:\t0"), "{pid}");
    }
    let later = oci.run(&["exec", "c", "grep", "Cpus_allowed_list", "/proc/self/status"]).ok();
    assert_eq!(later, "Cpus_allowed_list:\t0");
    oci.run(&["delete", "-f", "c"]).ok();
    oci.assert_nothing_left();
}

#[test]
fn exec_enters_cgroup_below_the_container() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sleep", "1000"]);
    bundle.edit(|c| {
        // The paths are those of the host.
        let list = c["linux"]["namespaces"].as_array_mut().expect("a list");
        list.retain(|namespace| namespace["type"] != "cgroup");
    });
    let path = bundle.read()["linux"]["cgroupsPath"].as_str().expect("a path").to_owned();
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    let own = |flags: &[&str]| {
        let words = [&["exec"], flags, &["c", "cat", "/proc/self/cgroup"]].concat();
        oci.run(&words)
    };
    let is_at = |text: &str, controller: &str, place: &str| {
        let mut lines = text.lines().map(|line| line.splitn(3, ':').collect::<Vec<_>>());
        lines.any(|l| l[1].split(',').any(|word| word == controller) && l[2] == place)
    };
    for (flags, words) in [
        (["--cgroup", ".."], "bad sub cgroup path"),
        (["--cgroup", "memory:../x"], "bad sub cgroup path"),
        (["--cgroup", "missing"], " adding pid "),
        (["--cgroup", "nothing:/"], "unknown controller nothing"),
    ] {
        let error = own(&flags).err(255);
        assert!(error.contains(words), "{error}");
    }
    let v1 = Path::new("/sys/fs/cgroup/memory");
    match v1.is_dir() {
        true => {
            fs::create_dir(v1.join(&path[1..]).join("part")).expect("made");
            let text = own(&["--cgroup", "memory:part"]).ok();
            assert!(is_at(&text, "memory", &format!("{path}/part")), "{text}");
            assert!(is_at(&text, "pids", &path), "{text}");
            assert!(is_at(&own(&["--cgroup", "/"]).ok(), "memory", &path));
        }
        false => {
            let dir = Path::new("/sys/fs/cgroup").join(&path[1..]).join("part");
            fs::create_dir(dir).expect("made");
            let text = own(&["--cgroup", "part"]).ok();
            assert!(is_at(&text, "", &format!("{path}/part")), "{text}");
        }
    }
    oci.run(&["delete", "-f", "c"]).ok();
    oci.assert_nothing_left();
}

/// With any word about its attributes a bind mount has those that are named, and no others of its
/// source.
#[test]
fn bind_mount_has_attributes_that_are_named() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["grep", " /bound ", "/proc/self/mountinfo"]);
    let source = bundle.path("source");
    fs::create_dir(&source).expect("made");
    let mount = format!(
        "mount -t tmpfs tmpfs {source} && mount -o remount,bind,nosuid,nodev,noexec,noatime {source}"
    );
    oci.sh(&mount).ok();
    for (words, has, lacks) in [
        (vec!["bind"], vec!["nosuid", "nodev", "noexec", "noatime"], vec![]),
        (vec!["bind", "ro"], vec!["ro", "noatime"], vec!["nosuid", "nodev", "noexec"]),
        (vec!["bind", "dev"], vec!["rw", "noatime"], vec!["nosuid", "nodev", "noexec"]),
        (vec!["bind", "relatime"], vec!["relatime"], vec!["noatime"]),
        (vec!["bind", "nodiratime"], vec!["relatime", "nodiratime"], vec!["noatime"]),
    ] {
        bundle.edit(|c| {
            let list = c["mounts"].as_array_mut().expect("a list");
            list.retain(|m| m["destination"] != "/bound");
            list.push(json!({"destination": "/bound", "type": "bind", "source": source,
                             "options": words}));
        });
        let said = oci.run(&["run", "-b", bundle.dir(), "c"]).ok();
        let options: Vec<&str> = said.split(' ').nth(5).expect("options").split(',').collect();
        assert!(has.iter().all(|word| options.contains(word)), "{words:?}: {said}");
        assert!(!lacks.iter().any(|word| options.contains(word)), "{words:?}: {said}");
    }
    oci.sh(&format!("umount {source}")).ok();
    oci.assert_nothing_left();
}

/// Paths that are listed twice are masked once; a mount on a link is refused in runc's words.
#[test]
fn masks_and_mounts_are_refused_or_merged_as_runc_does() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["grep", "-c", " /etc ", "/proc/self/mountinfo"]);
    bundle.edit(|c| c["linux"]["maskedPaths"] = json!(["/etc", "/etc/", "/etc"]));
    assert_eq!(oci.run(&["run", "-b", bundle.dir(), "c"]).ok(), "1");
    let proc = bundle.rootfs().join("proc");
    fs::remove_dir(&proc).expect("removed");
    fs::create_dir(bundle.rootfs().join("other")).expect("made");
    std::os::unix::fs::symlink("/other", proc).expect("linked");
    let error = oci.run(&["run", "-b", bundle.dir(), "c"]).err(1);
    assert!(
        error.contains("/proc") && error.contains("must be mounted on ordinary directory"),
        "{error}"
    );
    oci.assert_nothing_left();
}

#[test]
fn ambient_capabilities_need_inheritable_ones() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sleep", "1000"]);
    bundle.edit(|c| {
        let caps = &mut c["process"]["capabilities"];
        for list in ["effective", "permitted"] {
            caps[list] = json!(["CAP_KILL", "CAP_CHOWN"]);
        }
        caps["bounding"] = json!(["CAP_KILL", "CAP_CHOWN", "CAP_SYSLOG"]);
        caps["inheritable"] = json!(["CAP_KILL", "CAP_SYSLOG"]);
        caps["ambient"] = json!(["CAP_KILL", "CAP_CHOWN"]);
    });
    let error = oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).stderr;
    assert!(error.contains("can't raise ambient capability CAP_CHOWN: "), "{error}");
    assert!(!error.contains("CAP_KILL"), "{error}");
    let ambient = |flags: &[&str]| {
        let words = [&["exec"], flags, &["c", "grep", "CapAmb", "/proc/self/status"]].concat();
        oci.run(&words).ok()
    };
    assert_eq!(ambient(&[]), "CapAmb:\t0000000000000020");
    // CAP_SYSLOG is inheritable, so it becomes ambient; CAP_SYS_TIME is not.
    assert_eq!(ambient(&["--cap", "CAP_SYSLOG"]), "CapAmb:\t0000000400000020");
    assert_eq!(ambient(&["--cap", "CAP_SYS_TIME"]), "CapAmb:\t0000000000000020");
    oci.run(&["delete", "-f", "c"]).ok();
    oci.assert_nothing_left();
}

#[test]
fn errors_have_the_words_that_scripts_search() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sleep", "1000"]);
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    let error = oci.run(&["run", "-b", bundle.dir(), "d"]).err(1);
    assert!(error.contains("container's cgroup is not empty: 1 process(es) found"), "{error}");
    fs::write(bundle.rootfs().join("run.sh"), "#!/missing\n").expect("written");
    oci.sh(&format!("chmod +x {}", bundle.rootfs().join("run.sh").display())).ok();
    let error = oci.run(&["exec", "c", "/run.sh"]).err(255);
    assert!(error.contains("exec /run.sh: no such file or directory"), "{error}");
    oci.run(&["delete", "-f", "c"]).ok();
    for (pointer, value, words) in [
        ("/linux/resources/unified", json!({"no.such": "1"}), "invalid configuration"),
        ("/linux/memoryPolicy", json!({"nodes": "0"}), "invalid memory policy mode"),
        (
            "/linux/memoryPolicy",
            json!({"mode": "MPOL_BIND", "nodes": "0-9876543210"}),
            "invalid memory policy node",
        ),
        (
            "/linux/memoryPolicy",
            json!({"mode": "MPOL_DEFAULT", "nodes": "0-7"}),
            "mode requires 0 nodes but got 8",
        ),
        ("/linux/netDevices", json!({"eth7": {}}), "linux.netDevices[eth7]"),
    ] {
        let good = bundle.read();
        bundle.edit(|c| {
            let (parent, field) = pointer.rsplit_once('/').expect("a pointer");
            c.pointer_mut(parent).expect("the parent of the field")[field] = value;
        });
        let error = oci.run(&["run", "-b", bundle.dir(), "c"]).err(1);
        assert!(error.contains(words), "{pointer}: {error}");
        bundle.write(&good);
    }
    oci.assert_nothing_left();
}

/// Without `flags` a filter does not slow its processes down; an empty list is taken as it is.
#[test]
fn seccomp_flags_have_the_default_of_runc() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["true"]);
    let flags = |given: Value| {
        bundle.edit(|c| {
            c["linux"]["seccomp"] = json!({"defaultAction": "SCMP_ACT_ALLOW", "flags": given});
        });
        let out = oci.run(&["--debug", "run", "-b", bundle.dir(), "c"]);
        let (_, rest) = out.stderr.split_once("seccomp filter flags: ").expect("a line of the log");
        rest.split('"').next().expect("a number").to_owned()
    };
    assert_eq!(flags(Value::Null), "4");
    assert_eq!(flags(json!([])), "0");
    assert_eq!(flags(json!(["SECCOMP_FILTER_FLAG_TSYNC", "SECCOMP_FILTER_FLAG_LOG"])), "2");
    oci.assert_nothing_left();
}

#[test]
fn missing_seccomp_agent_is_named() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["true"]);
    let path = bundle.path("agent");
    bundle.edit(|c| {
        c["linux"]["seccomp"] = json!({
            "defaultAction": "SCMP_ACT_ALLOW",
            "listenerPath": path,
            "syscalls": [{"names": ["mkdir"], "action": "SCMP_ACT_NOTIFY"}],
        });
    });
    drop(UnixListener::bind(&path).expect("bound"));
    let error = oci.run(&["run", "-b", bundle.dir(), "c"]).err(1);
    assert!(error.contains("failed to connect with seccomp agent"), "{error}");
    oci.assert_nothing_left();
}

/// The source of a bind mount may be a mount of the list, by its path on the host.
#[test]
fn bind_mount_takes_earlier_mount_as_source() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sh", "-c", "cat /final/x/file /copy/file; touch /copy/new"]);
    for name in ["a/x", "b"] {
        fs::create_dir_all(bundle.out(name)).expect("made");
    }
    fs::write(bundle.out("b/file"), "b\n").expect("written");
    let root = bundle.rootfs();
    let at = |place: &str| root.join(place).display().to_string();
    bundle.edit(|c| {
        let list = c["mounts"].as_array_mut().expect("a list");
        for (source, destination, options) in [
            (bundle.path("out/a"), "/mnt".to_owned(), json!(["bind"])),
            (bundle.path("out/b"), "/mnt/x".to_owned(), json!(["bind"])),
            // The destination may have the path of the root filesystem before it.
            (at("mnt"), at("final"), json!(["rbind", "rprivate"])),
            (at("mnt/x"), "/copy".to_owned(), json!(["bind", "ro"])),
        ] {
            list.push(json!({"source": source, "destination": destination, "type": "bind",
                             "options": options}));
        }
    });
    let out = oci.run(&["run", "-b", bundle.dir(), "c"]);
    assert_eq!(out.stdout, "b\nb\n", "{out}");
    assert!(out.stderr.contains("Read-only file system"), "{out}");
    assert!(!bundle.out("b/new").exists());
    oci.assert_nothing_left();
}
