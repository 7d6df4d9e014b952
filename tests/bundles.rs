//! Hostile bundles: root filesystems and configurations that try to make the OCI runtime read or
//! write outside of the container.
//!
//! Each attack is written once and run twice. On the shipped program the attack must fail. On the
//! build of the same source in which the targeted protection can be left out (feature `weaken`) it
//! must succeed. Where each of two protections suffices, either alone must stop the attack.
//!
//! A protection that is not a separate step has no such second run: hooks are never started with
//! the image's environment.
//!
//! | class | test |
//! |---|---|
//! | CVE-2016-9962 | `vm_joining_process_cannot_be_inspected` |
//! | CVE-2019-5736 | `vm_runtime_program_cannot_be_overwritten` |
//! | CVE-2019-16884, 2023-27561 | `vm_proc_accepts_procfs_only` |
//! | CVE-2019-19921, 2023-28642 | `proc_symlink_is_refused` |
//! | CVE-2020-15257 | `containerd.rs`: `pod_has_one_shim_and_no_abstract_socket` |
//! | CVE-2021-30465, 2024-45310 | `swapped_mount_points_do_not_lead_outside` |
//! | CVE-2021-32760, 2022-23648, 2025-24965 | `hostile.rs`: archives, and files made inside |
//! | CVE-2022-0492 | `release_agent_is_out_of_reach` |
//! | CVE-2022-0811 | `vm_host_sysctls_are_out_of_reach` |
//! | CVE-2022-1708, -31030 | `hostile.rs`: `endless_output_is_bounded` |
//! | CVE-2022-29162, -27650, 2025-27612 | `exec_capabilities_are_not_inheritable` |
//! | CVE-2023-0386, -2640, -32629, 2022-0185, -0847 | `isolation.rs`: refused calls and mounts |
//! | CVE-2024-0132, 2025-23266 | `hooks_ignore_environment_of_image` |
//! | CVE-2024-9676 | `passwd_of_other_file_type_is_read_in_bounded_time` |
//! | CVE-2024-21626 | `host_descriptors_do_not_lead_outside` |
//! | CVE-2025-31133 | `vm_masked_paths_use_null_device_of_host` |
//! | CVE-2025-52565 | `console_is_opened_terminal_despite_swapped_path` |
//! | CVE-2025-52881 | writes to procfs use a descriptor of the runtime's own or a checked procfs |
//! | CVE-2026-30892 | `errors.rs`: `user_option_selects_exact_ids_or_is_refused` |
//! | CVE-2026-41579, -47766 | `dev_symlink_does_not_lead_outside` |
//! | forged checkpoints | `checkpoint.rs`: hostile records |
//! | the host's files in `/proc` and `/sys`, sockets, keys | `isolation.rs` |
//! | devices | `vm_host_devices_cannot_be_opened`, `isolation.rs` |

use crate::bundle;

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use bundle::{Bundle, Oci};
use serde_json::{Value, json};

/// A directory of the host with a file in it, neither of which may change.
struct Precious(PathBuf);

impl Precious {
    fn new(oci: &Oci) -> Self {
        let dir = oci.host().dir().join("precious");
        fs::create_dir(&dir).expect("made");
        fs::write(dir.join("file"), "precious").expect("written");
        Self(dir)
    }

    fn is_untouched(&self) -> bool {
        let names: Vec<_> =
            fs::read_dir(&self.0).expect("there").map(|e| e.expect("listed").file_name()).collect();
        names == ["file"] && fs::read_to_string(self.0.join("file")).is_ok_and(|t| t == "precious")
    }
}

/// The mounts of a configuration, to be changed.
fn mounts(config: &mut Value) -> &mut Vec<Value> {
    config["mounts"].as_array_mut().expect("a list")
}

/// CVE-2026-41579, CVE-2026-47766.
#[test]
fn dev_symlink_does_not_lead_outside() {
    // Returns whether the link's target directory is unchanged.
    let attack = |oci: &Oci| {
        let precious = Precious::new(oci);
        let up =
            format!("{}{}", "../".repeat(20), precious.0.strip_prefix("/").expect("abs").display());
        for (target, with_mount) in
            [(&precious.0, false), (&precious.0, true), (&up.clone().into(), false)]
        {
            let bundle = Bundle::new(oci, &["true"]);
            let dev = bundle.rootfs().join("dev");
            let _ = fs::remove_dir_all(&dev); // if the image has one
            symlink(target, &dev).expect("linked");
            bundle.edit(|c| {
                c["process"]["capabilities"]["bounding"] = json!(["CAP_MKNOD"]);
                mounts(c).retain(|m| {
                    let at = m["destination"].as_str().expect("a path");
                    !at.starts_with("/dev") || (with_mount && at == "/dev")
                });
            });
            let out = oci.run(&["run", "-b", bundle.dir(), "c"]);
            assert!(oci.weakened().is_some() || out.status == 1, "{out:?}");
        }
        precious.is_untouched()
    };
    let oci = Oci::new();
    assert!(attack(&oci));
    oci.assert_nothing_left();
    Oci::control("plain-targets", |weak| assert!(attack(weak)));
    Oci::control("in-root", |weak| assert!(!attack(weak)));
}

/// CVE-2019-16884, CVE-2019-19921, CVE-2023-27561, CVE-2023-28642.
#[test]
fn vm_proc_accepts_procfs_only() {
    let attack = |oci: &Oci, mount: Value, first: bool| {
        let bundle = Bundle::new(oci, &["true"]);
        fs::create_dir_all(bundle.path("out/self/attr")).expect("made");
        bundle.edit(|c| {
            let list = mounts(c);
            if first {
                list[0] = mount;
            } else {
                list.push(mount);
            }
        });
        oci.run(&["run", "-b", bundle.dir(), "c"])
    };
    let fake = |oci: &Oci| {
        let source = oci.host().dir().join("fake");
        fs::create_dir_all(&source).expect("made");
        json!({"destination": "/proc", "type": "bind", "source": source, "options": ["rbind"]})
    };
    let oci = Oci::new();
    let tmpfs = json!({"destination": "/proc", "type": "tmpfs", "source": "tmpfs"});
    let sys =
        json!({"destination": "/proc/sys", "type": "bind", "source": "/tmp", "options": ["bind"]});
    let roundabout = json!({"destination": "//proc/./sys", "type": "tmpfs", "source": "x"});
    for (mount, first) in [(fake(&oci), true), (tmpfs, true), (sys, false), (roundabout, false)] {
        let error = attack(&oci, mount, first).err(1);
        assert!(error.contains("destination"), "{error}");
    }
    oci.assert_nothing_left();
    let sys =
        json!({"destination": "/proc/sys", "type": "bind", "source": "/tmp", "options": ["bind"]});
    Oci::control("proc-mounts", |weak| {
        attack(weak, sys, false).ok();
    });
}

/// The same with a link in the image.
#[test]
fn proc_symlink_is_refused() {
    let attack = |oci: &Oci| {
        let bundle = Bundle::new(oci, &["ls", "/elsewhere/self"]);
        let _ = fs::remove_dir_all(bundle.rootfs().join("proc")); // if the image has one
        fs::create_dir(bundle.rootfs().join("elsewhere")).expect("made");
        symlink("/elsewhere", bundle.rootfs().join("proc")).expect("linked");
        bundle.edit(|c| {
            // Masked and read-only paths would not follow the link either.
            (c["linux"]["maskedPaths"], c["linux"]["readonlyPaths"]) = (json!([]), json!([]));
        });
        oci.run(&["run", "-b", bundle.dir(), "c"])
    };
    let oci = Oci::new();
    attack(&oci).err(1);
    oci.assert_nothing_left();
    Oci::control("plain-targets", |weak| {
        attack(weak).ok();
    });
}

/// CVE-2025-31133: masks are binds of the host's `/dev/null`, whatever file the image has there.
#[test]
fn vm_masked_paths_use_null_device_of_host() {
    let attack = |oci: &Oci| {
        let bundle = Bundle::new(oci, &["sh", "-c", "cat /proc/version | wc -c"]);
        fs::write(bundle.rootfs().join("real"), "of the image").expect("written");
        fs::create_dir_all(bundle.rootfs().join("dev")).expect("made");
        symlink("/real", bundle.rootfs().join("dev/null")).expect("linked");
        bundle.edit(|c| {
            c["linux"]["maskedPaths"] = json!(["/proc/version"]);
            // With the image's own `/dev`, the runtime's null would be that link.
            let own = json!({"destination": "/dev", "type": "bind",
                             "source": bundle.rootfs().join("dev"), "options": ["bind"]});
            mounts(c).retain(|m| !m["destination"].as_str().is_some_and(|d| d.starts_with("/dev")));
            mounts(c).push(own);
        });
        oci.run(&["run", "-b", bundle.dir(), "c"]).ok().trim().to_owned()
    };
    let oci = Oci::new();
    assert_eq!(attack(&oci), "0");
    oci.assert_nothing_left();
    Oci::control("masked-paths", |weak| assert_ne!(attack(weak), "0"));
}

/// CVE-2025-52565: `/dev/console` is a bind of the opened terminal, although its path is swapped
/// meanwhile.
#[test]
fn console_is_opened_terminal_despite_swapped_path() {
    // Returns whether a container found another file there within so many rounds.
    let attack = |oci: &Oci, rounds: usize| {
        let script = "[ -c /dev/console ] || echo fooled > /out/fooled";
        let bundle = Bundle::new(oci, &["sh", "-c", script]);
        let dev = PathBuf::from(bundle.path("dev"));
        for dir in ["pts", "decoy"] {
            fs::create_dir_all(dev.join(dir)).expect("made");
        }
        fs::write(bundle.rootfs().join("secret"), "a secret").expect("written");
        symlink("/secret", dev.join("decoy/0")).expect("linked");
        bundle.edit(|c| {
            c["process"]["terminal"] = true.into();
            mounts(c).retain(|m| {
                let at = m["destination"].as_str().expect("a path");
                !at.starts_with("/dev/") || at == "/dev/pts"
            });
            let at = mounts(c).iter().position(|m| m["destination"] == "/dev").expect("there");
            mounts(c)[at] = json!({"destination": "/dev", "type": "bind", "source": dev,
                                   "options": ["bind"]});
            bundle.volume(c, "/out");
        });
        let ends = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                use rustix::fs::{CWD, RenameFlags, renameat_with};
                let (one, other) = (dev.join("pts"), dev.join("decoy"));
                while !ends.load(Ordering::Relaxed) {
                    let _ = renameat_with(CWD, &one, CWD, &other, RenameFlags::EXCHANGE);
                }
            });
            let mut is_fooled = false;
            for _ in 0..rounds {
                // An error is as good as a terminal.
                let out = oci.run(&["run", "-b", bundle.dir(), "c"]);
                assert!(oci.weakened().is_some() || [0, 1].contains(&out.status), "{out:?}");
                is_fooled = bundle.out("fooled").exists();
                if is_fooled {
                    break;
                }
            }
            ends.store(true, Ordering::Relaxed);
            is_fooled
        })
    };
    let oci = Oci::new();
    assert!(!attack(&oci, 60));
    oci.assert_nothing_left();
    Oci::control("console-by-handle", |weak| assert!(attack(weak, 1000)));
}

/// CVE-2022-0492: the file `release_agent`, which names a program that the host's root runs, is out
/// of reach: neither in the container's mounts nor in mounts that its root can make. (Only cgroup
/// v1 has the file.)
#[test]
fn release_agent_is_out_of_reach() {
    let attack = |oci: &Oci| {
        let script = "find /sys/fs/cgroup/ -name release_agent | wc -l; attack release-agent";
        let bundle = Bundle::new(oci, &["sh", "-c", script]);
        bundle.edit(|c| {
            // Without CAP_SETFCAP, root cannot be mapped into a new user namespace.
            for set in ["bounding", "effective", "permitted"] {
                let all = c["process"]["capabilities"][set].as_array_mut().expect("a list");
                all.push("CAP_SETFCAP".into());
            }
            mounts(c).retain(|m| m["destination"] != "/sys/fs/cgroup");
            mounts(c).push(json!({"destination": "/sys/fs/cgroup", "type": "cgroup",
                                  "source": "cgroup", "options": ["nosuid", "nodev", "noexec"]}));
        });
        oci.run(&["run", "-b", bundle.dir(), "c"])
    };
    let agents = || {
        let script = "for f in /sys/fs/cgroup/*/release_agent; do [ ! -e $f ] || cat $f; done";
        Oci::new().sh(script).ok()
    };
    let before = agents();
    let oci = Oci::new();
    let out = attack(&oci);
    assert!(out.status == 1 && out.stdout.starts_with("0\n"), "{out}");
    oci.assert_nothing_left();
    Oci::control("own-cgroup", |weak| {
        let out = attack(weak);
        assert!(!out.stdout.starts_with("0\n"), "{out}");
    });
    assert_eq!(agents(), before);
}

/// CVE-2024-21626: no descriptor of the host's directories is in reach, as a working directory or
/// otherwise.
#[test]
fn host_descriptors_do_not_lead_outside() {
    // Returns the descriptor numbers through which a container's program reaches the host's root.
    let attack = |oci: &Oci| -> Vec<i32> {
        let escapes = |number: &i32| {
            let bundle = Bundle::new(oci, &["ls", "etc/debian_version"]);
            bundle.edit(|c| c["process"]["cwd"] = format!("/proc/self/fd/{number}").into());
            let out = oci.run(&["run", "-b", bundle.dir(), "c"]);
            assert!(oci.weakened().is_some() || out.status == 1, "{out:?}");
            out.status == 0
        };
        (3..32).filter(escapes).collect()
    };
    let oci = Oci::new();
    assert_eq!(attack(&oci), [0; 0]);
    for two in [
        "close-descriptors,in-root",
        "close-descriptors,reachable-directory",
        "in-root,reachable-directory",
    ] {
        Oci::control(two, |weak| assert_eq!(attack(weak), [0; 0], "without {two}"));
    }
    Oci::control("close-descriptors,in-root,reachable-directory", |weak| {
        assert_ne!(attack(weak), [0; 0])
    });
    let bundle = Bundle::new(&oci, &["sleep", "1000"]);
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    for number in 3..16 {
        let cwd = format!("/proc/self/fd/{number}");
        let out = oci.run(&["exec", "--cwd", &cwd, "c", "pwd"]);
        assert_eq!(out.status, 255, "{out:?}");
    }
    let count = oci.run(&["exec", "c", "sh", "-c", "ls /proc/self/fd | wc -l"]).ok();
    assert_eq!(count.trim(), "4"); // 0, 1, 2 and the directory that `ls` reads
    oci.run(&["delete", "-f", "c"]).ok();
    oci.assert_nothing_left();
}

/// CVE-2019-5736: the program behind `/proc/self/exe` of a container's root is not writable, even
/// for the host's own root.
#[test]
fn vm_runtime_program_cannot_be_overwritten() {
    let attack = |oci: &Oci| {
        let copy = oci.host().dir().join("runtime");
        fs::copy(oci.program(), &copy).expect("copied");
        let bundle = Bundle::new(oci, &["sleep", "1000"]);
        let before = fs::read(&copy).expect("read");
        let root = oci.root();
        let mut create = oci.host().command("sh");
        // The waiting newborn keeps the streams.
        create.args(["-c", "exec \"$@\" > /dev/null 2>&1", "sh"]).arg(&copy);
        create.arg("--root").arg(root).args(["create", "-b", bundle.dir(), "c"]);
        if let Some(weakened) = oci.weakened() {
            create.env("DORMOUSE_WEAKEN", weakened);
        }
        // A newborn waits for its start. The host's root opens the newborn's program, as a
        // container's root without a user namespace would.
        let out = dormouse_testkit::run(create, b"", std::time::Duration::from_secs(60));
        assert_eq!(out.status, 0, "{out:?}");
        let pid = &oci.state("c")["pid"];
        let held = fs::File::open(format!("/proc/{pid}/exe")).expect("opened");
        oci.run(&["delete", "-f", "c"]).ok();
        // A running program cannot be written to (ETXTBSY). A descriptor kept open is the way in
        // after its end.
        let again = format!("/proc/self/fd/{}", held.as_raw_fd());
        let error = fs::OpenOptions::new().write(true).open(again).err();
        assert_eq!(before, fs::read(&copy).expect("read"));
        error.and_then(|e| e.raw_os_error())
    };
    let oci = Oci::new();
    assert_eq!(attack(&oci), Some(30)); // EROFS
    oci.assert_nothing_left();
    Oci::control("sealed-program", |weak| assert_eq!(attack(weak), None));
}

/// CVE-2022-0811.
#[test]
fn vm_host_sysctls_are_out_of_reach() {
    let oci = Oci::new();
    let before = fs::read("/proc/sys/kernel/core_pattern").expect("read");
    let bundle = Bundle::new(&oci, &["true"]);
    for (key, value) in [
        ("kernel.core_pattern", "|/x"),
        ("kernel/core_pattern", "|/x"),
        ("net/../kernel/core_pattern", "|/x"),
        ("kernel.shmmax", "1\nkernel.core_pattern=|/x"),
        ("vm.swappiness", "1"),
    ] {
        bundle.edit(|c| c["linux"]["sysctl"] = json!({key: value}));
        let error = oci.run(&["run", "-b", bundle.dir(), "c"]).err(1);
        assert!(error.contains("linux.sysctl["), "{error}");
    }
    assert_eq!(fs::read("/proc/sys/kernel/core_pattern").expect("read"), before);
    // Sysctls of a namespace that the container shares with the host are the host's.
    let attack = |oci: &Oci| {
        let bundle = Bundle::new(oci, &["true"]);
        bundle.edit(|c| {
            c["linux"]["sysctl"] = json!({"net.ipv4.ip_default_ttl": "77"});
            c["linux"]["namespaces"].as_array_mut().expect("").retain(|n| n["type"] != "network");
        });
        oci.run(&["run", "-b", bundle.dir(), "c"]);
        oci.sh("cat /proc/sys/net/ipv4/ip_default_ttl").ok()
    };
    assert_ne!(attack(&oci), "77");
    oci.assert_nothing_left();
    Oci::control("sysctl-owner", |weak| assert_eq!(attack(weak), "77"));
}

/// CVE-2022-29162: capabilities of `exec --cap` are not inheritable.
#[test]
fn exec_capabilities_are_not_inheritable() {
    let attack = |oci: &Oci| {
        let script = "grep -E 'Cap(Inh|Amb)' /proc/self/status";
        let bundle = Bundle::new(oci, &["sh", "-c", &format!("{script}; exec sleep 1000")]);
        oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
        let lines = oci.run(&["exec", "--cap", "CAP_NET_RAW", "c", "sh", "-c", script]).ok();
        oci.run(&["delete", "-f", "c"]).ok();
        lines
    };
    let none = "CapInh:\t0000000000000000\nCapAmb:\t0000000000000000";
    let oci = Oci::new();
    assert_eq!(attack(&oci), none);
    oci.assert_nothing_left();
    Oci::control("exec-capabilities", |weak| assert_ne!(attack(weak), none));
}

/// CVE-2016-9962: a process that joins a container cannot be inspected, traced or robbed of its
/// descriptors by processes inside, even by a root with all capabilities of its user namespace.
#[test]
fn vm_joining_process_cannot_be_inspected() {
    let attack = |oci: &Oci| {
        // The fourth descriptor of a joining process is a procfs of the host.
        let script = "while :; do for p in /proc/[0-9]*; do \
                      [ -e $p/fd/4/uptime ] && echo $p >> /out/seen; done; done";
        let bundle = Bundle::new(oci, &["sh", "-c", script]);
        oci.sh(&format!("chown -R 200000:200000 {}", bundle.rootfs().display())).ok();
        fs::set_permissions(bundle.path("out"), PermissionsExt::from_mode(0o777)).expect("set");
        bundle.edit(|c| {
            let map = json!([{"containerID": 0, "hostID": 200_000, "size": 65_536}]);
            (c["linux"]["uidMappings"], c["linux"]["gidMappings"]) = (map.clone(), map);
            c["linux"]["namespaces"].as_array_mut().expect("a list").push(json!({"type": "user"}));
            let all = every_capability();
            for set in ["bounding", "effective", "permitted"] {
                c["process"]["capabilities"][set] = json!(all);
            }
            c["process"]["noNewPrivileges"] = false.into();
            bundle.volume(c, "/out");
        });
        oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
        let seen = || bundle.out("seen").exists();
        for _ in 0..races(oci) {
            oci.run(&["exec", "c", "true"]).ok();
            if seen() {
                break;
            }
        }
        oci.run(&["delete", "-f", "c"]).ok();
        seen()
    };
    let oci = Oci::new();
    assert!(!attack(&oci));
    oci.assert_nothing_left();
    Oci::control("undumpable", |weak| assert!(attack(weak)));
}

/// Rounds of a race that must be lost: few under emulation.
fn races(oci: &Oci) -> usize {
    if dormouse_testkit::slowness() > 1 && oci.weakened().is_none() { 5 } else { 100 }
}

/// All capabilities of the kernel by name.
fn every_capability() -> Vec<&'static str> {
    vec![
        "CAP_CHOWN",
        "CAP_DAC_OVERRIDE",
        "CAP_DAC_READ_SEARCH",
        "CAP_FOWNER",
        "CAP_FSETID",
        "CAP_KILL",
        "CAP_SETGID",
        "CAP_SETUID",
        "CAP_SETPCAP",
        "CAP_LINUX_IMMUTABLE",
        "CAP_NET_BIND_SERVICE",
        "CAP_NET_BROADCAST",
        "CAP_NET_ADMIN",
        "CAP_NET_RAW",
        "CAP_IPC_LOCK",
        "CAP_IPC_OWNER",
        "CAP_SYS_MODULE",
        "CAP_SYS_RAWIO",
        "CAP_SYS_CHROOT",
        "CAP_SYS_PTRACE",
        "CAP_SYS_PACCT",
        "CAP_SYS_ADMIN",
        "CAP_SYS_BOOT",
        "CAP_SYS_NICE",
        "CAP_SYS_RESOURCE",
        "CAP_SYS_TIME",
        "CAP_SYS_TTY_CONFIG",
        "CAP_MKNOD",
        "CAP_LEASE",
        "CAP_AUDIT_WRITE",
        "CAP_AUDIT_CONTROL",
        "CAP_SETFCAP",
        "CAP_MAC_OVERRIDE",
        "CAP_MAC_ADMIN",
        "CAP_SYSLOG",
        "CAP_WAKE_ALARM",
        "CAP_BLOCK_SUSPEND",
        "CAP_AUDIT_READ",
        "CAP_PERFMON",
        "CAP_BPF",
        "CAP_CHECKPOINT_RESTORE",
    ]
}

/// A node of a host's device can be created but not opened.
#[test]
fn vm_host_devices_cannot_be_opened() {
    let attack = |oci: &Oci| {
        // A loop device: every host has the driver, and opening an unused one reads nothing.
        let bundle =
            Bundle::new(oci, &["sh", "-c", "mknod /tmp/d c 10 237 && : < /tmp/d && echo opened"]);
        bundle.edit(|c| {
            for set in ["bounding", "effective", "permitted"] {
                c["process"]["capabilities"][set] = json!(["CAP_MKNOD"]);
            }
        });
        oci.run(&["run", "-b", bundle.dir(), "c"])
    };
    let oci = Oci::new();
    let out = attack(&oci);
    assert!(out.status != 0 && out.stderr.contains("ermitted"), "{out:?}");
    oci.assert_nothing_left();
    // A host without the driver reports that, and not a missing permission.
    let Some(weak) = Oci::without("devices") else { return };
    let out = attack(&weak);
    assert!(out.stdout.contains("opened") || !out.stderr.contains("ermitted"), "{out:?}");
}

/// CVE-2021-30465, CVE-2024-45310: mount points that are swapped for links meanwhile.
#[test]
fn swapped_mount_points_do_not_lead_outside() {
    let attack = |oci: &Oci| {
        let precious = Precious::new(oci);
        let bundle = Bundle::new(oci, &["true"]);
        let shared = bundle.path("out");
        fs::create_dir_all(format!("{shared}/dir")).expect("made");
        bundle.edit(|c| {
            bundle.volume(c, "/shared");
            mounts(c)
                .push(json!({"destination": "/shared/place/made", "type": "tmpfs", "source": "x"}));
            mounts(c).push(json!({"destination": "/shared/place/file", "type": "bind",
                                  "source": "/dev/null", "options": ["bind"]}));
        });
        let script = format!(
            "cd {shared}; while [ -e swap ]; do mkdir place 2>/dev/null; rm -rf place; \
             ln -s {0} place; rm -f place; ln -s ../../../../../../../..{0} place; rm -f place; \
             done",
            precious.0.display()
        );
        fs::write(format!("{shared}/swap"), "").expect("written");
        let mut swapper = oci.host().command("sh");
        swapper.arg("-c").arg(script).stderr(std::process::Stdio::null());
        let mut swapper = swapper.spawn().expect("started");
        let mut rounds = 0;
        while rounds < races(oci) && precious.is_untouched() {
            rounds += 1;
            // An error is as good as a container.
            let out = oci.run(&["run", "-b", bundle.dir(), "c"]);
            assert!(oci.weakened().is_some() || [0, 1].contains(&out.status), "{out:?}");
        }
        fs::remove_file(format!("{shared}/swap")).expect("removed");
        swapper.wait().expect("reaped");
        precious.is_untouched()
    };
    let oci = Oci::new();
    assert!(attack(&oci));
    oci.assert_nothing_left();
    Oci::control("in-root", |weak| assert!(!attack(weak)));
}

/// A container's root that is the host's root cannot unmount its root filesystem to reach the
/// host's.
#[test]
fn vm_host_root_is_not_mounted_below_container_root() {
    let attack = |oci: &Oci| {
        // setns(2) into a mount namespace leads to the root of that namespace, not to that of the
        // process. One or two mounts may cover the host's root.
        let script = "cd /proc/1/ns; umount -l /; nsenter --mount=mnt sh -c '/bin/ls -d \
                      /etc/debian_version; mount -t proc x /proc; \
                      cd /proc/self/ns; umount -l /; nsenter --mount=mnt /bin/ls -d \
                      /etc/debian_version'; mkdir /tmp/jail; cd /; chroot /tmp/jail true; \
                      ls -d etc/debian_version ../etc/debian_version \
                      /proc/1/root/etc/debian_version";
        let bundle = Bundle::new(oci, &["sh", "-c", script]);
        bundle.edit(|c| {
            for set in ["bounding", "effective", "permitted"] {
                c["process"]["capabilities"][set] =
                    json!(["CAP_SYS_ADMIN", "CAP_SYS_CHROOT", "CAP_SYS_PTRACE"]);
            }
        });
        oci.run(&["run", "-b", bundle.dir(), "c"])
    };
    let oci = Oci::new();
    let out = attack(&oci);
    assert!(!out.stdout.contains("debian_version"), "{out:?}");
    oci.assert_nothing_left();
    Oci::control("pivot", |weak| {
        let out = attack(weak);
        assert!(out.stdout.contains("debian_version"), "{out:?}");
    });
}

/// `/etc/passwd` of an image is read in bounded time, and only if it is a regular file.
#[test]
fn passwd_of_other_file_type_is_read_in_bounded_time() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sh", "-c", "echo $HOME"]);
    let passwd = bundle.rootfs().join("etc/passwd");
    for make in ["mkfifo", "mkdir", "ln -s /dev/zero", "truncate -s 2G"] {
        oci.sh(&format!("rm -rf {0}; {make} {0}", passwd.display())).ok();
        assert_eq!(oci.run(&["run", "-b", bundle.dir(), "c"]).ok(), "/", "{make}");
    }
    oci.assert_nothing_left();
    let Some(weak) = Oci::without("plain-passwd") else { return };
    let bundle = Bundle::new(&weak, &["true"]);
    let passwd = bundle.rootfs().join("etc/passwd");
    weak.sh(&format!("rm -f {0}; mkfifo {0}", passwd.display())).ok();
    let command = weak.command(&["run", "-b", bundle.dir(), "c"]);
    let mut bounded = weak.host().command("timeout");
    bounded.args(["--signal=KILL", "5"]).arg(command.get_program()).args(command.get_args());
    bounded.env("DORMOUSE_WEAKEN", "plain-passwd");
    let out = dormouse_testkit::run(bounded, b"", std::time::Duration::from_secs(60));
    assert_eq!(out.status, 137, "{out:?}");
    weak.run(&["list"]).ok(); // removes the interrupted container
}

/// CVE-2024-0132 and similar: hooks get nothing from the image.
#[test]
fn hooks_ignore_environment_of_image() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["true"]);
    let log = bundle.path("log");
    bundle.edit(|c| {
        c["process"]["env"] = json!(["PATH=/bin", "LD_PRELOAD=/evil.so"]);
        let script = format!("cat > /dev/null; pwd >> {log}; env >> {log}");
        let hook = json!([{"path": "/bin/sh", "args": ["sh", "-c", script], "env": ["A=b"]}]);
        c["hooks"] = json!({"createRuntime": hook, "poststop": hook});
    });
    oci.run(&["run", "-b", bundle.dir(), "c"]).ok();
    let text = fs::read_to_string(&log).expect("written");
    assert!(!text.contains("LD_PRELOAD") && text.contains("A=b"), "{text}");
    assert_eq!(text.lines().filter(|line| *line == bundle.dir()).count(), 2, "{text}");
    oci.assert_nothing_left();
}

/// The program of a `startContainer` hook comes from the container's own root, so it has the user, groups,
/// capabilities, filter and environment of the container's process, and no more.
#[test]
fn start_container_hook_is_confined_as_process() {
    let attack = |oci: &Oci| {
        let ask = "grep -E '^(Uid|Gid|Groups|Cap|NoNewPrivs|Seccomp)' /proc/self/status; \
                   echo $NAME; ulimit -n; mkdir /tmp/refused 2>&1; ls /proc/self/fd | wc -l";
        let bundle = Bundle::new(oci, &["sh", "-c", &format!("({ask}) > /out/process")]);
        fs::set_permissions(bundle.path("out"), PermissionsExt::from_mode(0o777)).expect("set");
        bundle.edit(|c| {
            let script = format!("({ask}) > /out/hook");
            c["hooks"] =
                json!({"startContainer": [{"path": "/bin/sh", "args": ["sh", "-c", script]}]});
            c["process"]["user"] = json!({"uid": 1000, "gid": 1001, "additionalGids": [5]});
            c["process"]["env"] = json!(["PATH=/bin", "NAME=of the process"]);
            c["process"]["rlimits"] = json!([{"type": "RLIMIT_NOFILE", "soft": 77, "hard": 78}]);
            c["linux"]["seccomp"] = json!({
                "defaultAction": "SCMP_ACT_ALLOW",
                "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO"}],
            });
            bundle.volume(c, "/out");
        });
        oci.run(&["run", "-b", bundle.dir(), "c"]).ok();
        let said = |name| fs::read_to_string(bundle.out(name)).expect("written");
        (said("hook"), said("process"))
    };
    let oci = Oci::new();
    let (hook, process) = attack(&oci);
    assert_eq!(hook, process);
    for line in ["Uid:\t1000", "NoNewPrivs:\t1", "Seccomp:\t2", "of the process", "77", "permitted"]
    {
        assert!(hook.contains(line), "{line}: {hook}");
    }
    oci.assert_nothing_left();
    Oci::control("hook-confinement", |weak| {
        let (hook, process) = attack(weak);
        assert!(hook.contains("Uid:\t0") && process.contains("Uid:\t1000"), "{hook}{process}");
    });
}

/// A user namespace inside may mount a procfs only where one without masks is in the mount namespace. A
/// root that only covers the host's (`--no-pivot`) leaves none there, neither the host's nor its own.
#[test]
fn covered_root_leaves_no_procfs_to_nested_user_namespace() {
    let attack = |oci: &Oci, has_user: bool| {
        let inner = "mount -t proc none /proc && echo MOUNTED; head -c 20 /proc/timer_list";
        let bundle = Bundle::new(oci, &["unshare", "-mrpf", "sh", "-c", inner]);
        bundle.edit(|c| {
            for set in ["bounding", "effective", "permitted"] {
                let all = c["process"]["capabilities"][set].as_array_mut().expect("a list");
                all.push("CAP_SETFCAP".into());
            }
            if has_user {
                let map = json!([{"containerID": 0, "hostID": 200_000, "size": 65_536}]);
                (c["linux"]["uidMappings"], c["linux"]["gidMappings"]) = (map.clone(), map);
                let list = c["linux"]["namespaces"].as_array_mut().expect("a list");
                list.push(json!({"type": "user"}));
            }
        });
        if has_user {
            oci.sh(&format!("chown -R 200000:200000 {}", bundle.rootfs().display())).ok();
        }
        oci.run(&["run", "--no-pivot", "-b", bundle.dir(), "c"])
    };
    let oci = Oci::new();
    for has_user in [false, true] {
        let out = attack(&oci, has_user);
        assert!(out.stderr.contains("mount") && !out.stdout.contains("MOUNTED"), "{out}");
    }
    // One that root of the container's user namespace cannot reach, as in a private directory of a service.
    let private = oci.host().dir().join("private").display().to_string();
    oci.sh(&format!("mkdir -m 700 {private} && mkdir {private}/proc")).ok();
    oci.sh(&format!("mount -t proc none {private}/proc")).ok();
    let out = attack(&oci, true);
    assert!(out.stderr.contains("mount") && !out.stdout.contains("MOUNTED"), "{out}");
    oci.sh(&format!("umount {private}/proc")).ok();
    // Only the container's own procfs is in the mount table.
    let bundle = Bundle::new(&oci, &["grep", "-c", " - proc ", "/proc/self/mountinfo"]);
    bundle.edit(|c| {
        (c["linux"]["maskedPaths"], c["linux"]["readonlyPaths"]) = (json!([]), json!([]));
    });
    assert_eq!(oci.run(&["run", "--no-pivot", "-b", bundle.dir(), "c"]).ok(), "1");
    oci.assert_nothing_left();
    Oci::control("host-proc", |weak| {
        let out = attack(weak, false);
        assert!(out.stdout.contains("MOUNTED"), "{out}");
    });
}

/// An image's `/etc/resolv.conf` may be a link to a file that is not there yet. The place of a mount is
/// made inside the root, as the link says, and nowhere else.
#[test]
fn mount_follows_dangling_link_inside_root() {
    let oci = Oci::new();
    let script = "cat /etc/relative /etc/absolute /etc/up; ls -d /run/dir/made /deep";
    let bundle = Bundle::new(&oci, &["sh", "-c", script]);
    let etc = bundle.rootfs().join("etc");
    fs::create_dir_all(&etc).expect("made");
    for (link, points_to) in [
        ("relative", "../run/systemd/resolve/stub"),
        ("absolute", "/nowhere/absolute"),
        ("up", "../../../../../../out-of-root"),
        ("to-link", "chain"),
        ("chain", "/run/dir"),
        ("loop", "loop"),
    ] {
        symlink(points_to, etc.join(link)).expect("linked");
    }
    let file = bundle.path("file");
    fs::write(&file, "bound\n").expect("written");
    bundle.edit(|c| {
        let list = c["mounts"].as_array_mut().expect("a list");
        for place in ["/etc/relative", "/etc/absolute", "/etc/up"] {
            list.push(json!({"destination": place, "type": "bind", "source": file,
                             "options": ["bind"]}));
        }
        list.push(json!({"destination": "/etc/to-link/made", "type": "tmpfs", "source": "x"}));
        list.push(json!({"destination": "/deep", "type": "tmpfs", "source": "x"}));
    });
    let said = oci.run(&["run", "-b", bundle.dir(), "c"]).ok();
    assert_eq!(said, "bound\nbound\nbound\n/deep\n/run/dir/made");
    let is_file = |place: &str| bundle.rootfs().join(place).is_file();
    assert!(is_file("run/systemd/resolve/stub") && is_file("nowhere/absolute"));
    assert!(is_file("out-of-root") && !PathBuf::from("/out-of-root").exists());
    assert!(!PathBuf::from("/nowhere").exists());
    bundle.edit(|c| {
        let list = c["mounts"].as_array_mut().expect("a list");
        list.push(json!({"destination": "/etc/loop", "type": "bind", "source": file,
                         "options": ["bind"]}));
    });
    let error = oci.run(&["run", "-b", bundle.dir(), "c"]).err(1);
    assert!(error.contains("/etc/loop"), "{error}");
    oci.assert_nothing_left();
}

/// The root that covers the host's is unmounted once it is copied. With shared mounts below it, the unmount
/// must not propagate to the host.
#[test]
fn covered_root_unmounts_no_shared_mount_of_the_host() {
    let oci = Oci::new();
    let data = oci.host().dir().join("data");
    let sub = data.join("sub");
    oci.sh(&format!("mkdir -p {0} && mount -t tmpfs none {0} && touch {0}/kept", sub.display()))
        .ok();
    for flags in [&["--no-pivot"][..], &[]] {
        let bundle = Bundle::new(&oci, &["ls", "/data/sub/kept"]);
        bundle.edit(|c| {
            c["linux"]["rootfsPropagation"] = json!("rshared");
            let bind = json!({"destination": "/data", "type": "bind", "source": data,
                "options": ["rbind", "rshared"]});
            c["mounts"].as_array_mut().expect("a list").push(bind);
        });
        let words = [&["run"], flags, &["-b", bundle.dir(), "c"]].concat();
        assert_eq!(oci.run(&words).ok(), "/data/sub/kept", "{flags:?}");
        oci.sh(&format!("test -e {}/kept", sub.display())).ok();
    }
    oci.sh(&format!("umount {}", sub.display())).ok();
}
