//! Hostile bundles: root filesystems and configurations that try to make the OCI runtime read or
//! write outside of the container.

mod bundle;

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

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
fn vm_a_dev_that_is_a_link_leads_nowhere() {
    let oci = Oci::new();
    let precious = Precious::new(&oci);
    let up =
        format!("{}{}", "../".repeat(20), precious.0.strip_prefix("/").expect("abs").display());
    for target in [precious.0.clone(), up.into()] {
        for with_mount in [false, true] {
            let bundle = Bundle::new(&oci, &["true"]);
            let dev = bundle.rootfs().join("dev");
            let _ = fs::remove_dir_all(&dev); // if the image has one
            symlink(&target, &dev).expect("linked");
            bundle.edit(|c| {
                c["process"]["capabilities"]["bounding"] = json!(["CAP_MKNOD"]);
                mounts(c).retain(|m| {
                    let at = m["destination"].as_str().expect("a path");
                    !at.starts_with("/dev") || (with_mount && at == "/dev")
                });
            });
            oci.run(&["run", "-b", bundle.dir(), "c"]).err(1);
            assert!(precious.is_untouched());
        }
    }
    oci.assert_nothing_left();
}

/// CVE-2019-16884, CVE-2019-19921, CVE-2023-27561, CVE-2023-28642.
#[test]
fn vm_nothing_but_procfs_is_proc() {
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
}

/// The same by a link in the image.
#[test]
fn vm_a_proc_that_is_a_link_is_refused() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["true"]);
    let _ = fs::remove_dir_all(bundle.rootfs().join("proc")); // if the image has one
    fs::create_dir(bundle.rootfs().join("elsewhere")).expect("made");
    symlink("/elsewhere", bundle.rootfs().join("proc")).expect("linked");
    oci.run(&["run", "-b", bundle.dir(), "c"]).err(1);
    oci.assert_nothing_left();
}

/// CVE-2025-31133: what masks is the host's own `/dev/null`, whatever the image has there.
#[test]
fn vm_masked_paths_are_masked_by_nothing_of_the_image() {
    let attack = |oci: &Oci| {
        let bundle = Bundle::new(oci, &["sh", "-c", "cat /proc/version | wc -c"]);
        fs::write(bundle.rootfs().join("real"), "of the image").expect("written");
        fs::create_dir_all(bundle.rootfs().join("dev")).expect("made");
        symlink("/real", bundle.rootfs().join("dev/null")).expect("linked");
        bundle.edit(|c| {
            c["linux"]["maskedPaths"] = json!(["/proc/version"]);
            // With the image's own `/dev` the runtime's null would be that link.
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
}

/// CVE-2024-21626: no descriptor of the host's directories is in reach, as a working directory or
/// otherwise.
#[test]
fn vm_no_descriptor_of_the_host_leads_out() {
    let oci = Oci::new();
    for number in 3..16 {
        let bundle = Bundle::new(&oci, &["sh", "-c", "cat etc/hostname; ls /proc/self/fd"]);
        bundle.edit(|c| c["process"]["cwd"] = format!("/proc/self/fd/{number}").into());
        let out = oci.run(&["run", "-b", bundle.dir(), "c"]);
        assert_eq!(out.status, 1, "{out:?}");
    }
    let bundle = Bundle::new(&oci, &["sleep", "1000"]);
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    for number in 3..16 {
        let cwd = format!("/proc/self/fd/{number}");
        let out = oci.run(&["exec", "--cwd", &cwd, "c", "pwd"]);
        assert_eq!(out.status, 255, "{out:?}");
    }
    let said = oci.run(&["exec", "c", "sh", "-c", "ls /proc/self/fd | wc -l"]).ok();
    assert_eq!(said.trim(), "4"); // 0, 1, 2 and the one that `ls` reads by
    oci.run(&["delete", "-f", "c"]).ok();
    oci.assert_nothing_left();
}

/// CVE-2019-5736: the program that a container's root finds behind `/proc/self/exe` cannot be
/// written to, even by the host's own root.
#[test]
fn vm_the_runtime_is_not_overwritten() {
    let attack = |oci: &Oci| {
        let copy = oci.host().dir().join("runtime");
        fs::copy(oci.program(), &copy).expect("copied");
        let bundle = Bundle::new(oci, &["sleep", "1000"]);
        let before = fs::read(&copy).expect("read");
        let root = oci.root();
        let mut create = oci.host().command("sh");
        // What waits keeps the streams.
        create.args(["-c", "exec \"$@\" > /dev/null 2>&1", "sh"]).arg(&copy);
        create.arg("--root").arg(root).args(["create", "-b", bundle.dir(), "c"]);
        if let Some(weakened) = oci.weakened() {
            create.env("DORMOUSE_WEAKEN", weakened);
        }
        // A newborn waits to be started; the host's root opens what it is a copy of, as a
        // container's root would that is the same.
        let out = dormouse_testkit::run(create, b"", std::time::Duration::from_secs(60));
        assert_eq!(out.status, 0, "{out:?}");
        let pid = &oci.state("c")["pid"];
        let held = fs::File::open(format!("/proc/{pid}/exe")).expect("opened");
        oci.run(&["delete", "-f", "c"]).ok();
        // As long as it runs nobody can write to it (ETXTBSY); afterwards who has kept it open.
        let again = format!("/proc/self/fd/{}", held.as_raw_fd());
        let error = fs::OpenOptions::new().write(true).open(again).err();
        assert_eq!(before, fs::read(&copy).expect("read"));
        error.and_then(|e| e.raw_os_error())
    };
    let oci = Oci::new();
    assert_eq!(attack(&oci), Some(30)); // EROFS
    oci.assert_nothing_left();
}

/// CVE-2022-0811.
#[test]
fn vm_sysctls_of_the_host_are_out_of_reach() {
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
    // Those of a namespace that the container shares with the host are the host's.
    bundle.edit(|c| {
        c["linux"]["sysctl"] = json!({"net.ipv4.ip_forward": "1"});
        c["linux"]["namespaces"].as_array_mut().expect("").retain(|n| n["type"] != "network");
    });
    oci.run(&["run", "-b", bundle.dir(), "c"]).err(1);
    assert_eq!(fs::read("/proc/sys/kernel/core_pattern").expect("read"), before);
    oci.assert_nothing_left();
}

/// CVE-2022-29162: what `exec --cap` gives is not inherited by everything that follows.
#[test]
fn vm_capabilities_are_never_inheritable_by_accident() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sh", "-c", "grep CapInh /proc/self/status; exec sleep 1000"]);
    bundle.edit(|c| bundle.volume(c, "/out"));
    oci.run(&["run", "-d", "-b", bundle.dir(), "c"]).ok();
    let script = "grep -E 'Cap(Inh|Amb)' /proc/self/status";
    let said = oci.run(&["exec", "--cap", "CAP_NET_RAW", "c", "sh", "-c", script]).ok();
    assert_eq!(said, "CapInh:\t0000000000000000\nCapAmb:\t0000000000000000");
    oci.run(&["delete", "-f", "c"]).ok();
    oci.assert_nothing_left();
}

/// A node of the host's disk can be made, and does not open.
#[test]
fn vm_devices_of_the_host_cannot_be_opened() {
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
}

/// CVE-2021-30465, CVE-2024-45310: places of mounts that are swapped for links meanwhile.
#[test]
fn vm_places_that_are_swapped_for_links_lead_nowhere() {
    let oci = Oci::new();
    let precious = Precious::new(&oci);
    let bundle = Bundle::new(&oci, &["true"]);
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
         ln -s {0} place; rm -f place; ln -s ../../../../../../../..{0} place; rm -f place; done",
        precious.0.display()
    );
    fs::write(format!("{shared}/swap"), "").expect("written");
    let mut swapper = oci.host().command("sh").arg("-c").arg(script).spawn().expect("started");
    for _ in 0..100 {
        // An error is as good as a container.
        let out = oci.run(&["run", "-b", bundle.dir(), "c"]);
        assert!(out.status == 0 || out.status == 1, "{out:?}");
        assert!(precious.is_untouched());
    }
    fs::remove_file(format!("{shared}/swap")).expect("removed");
    swapper.wait().expect("reaped");
    oci.assert_nothing_left();
}

/// A root of a container that is the host's root cannot take its root filesystem off.
#[test]
fn vm_nothing_of_the_host_is_below_the_root() {
    let oci = Oci::new();
    let script = "umount -l / 2>/dev/null; mkdir /tmp/jail; cd /; \
                  chroot /tmp/jail true 2>/dev/null; ls /; ls -d /proc/1/root/etc/debian_version \
                  /etc/debian_version 2>/dev/null; echo end";
    let bundle = Bundle::new(&oci, &["sh", "-c", script]);
    bundle.edit(|c| {
        for set in ["bounding", "effective", "permitted"] {
            c["process"]["capabilities"][set] = json!(["CAP_SYS_ADMIN", "CAP_SYS_CHROOT"]);
        }
    });
    let said = oci.run(&["run", "-b", bundle.dir(), "c"]);
    assert!(!said.stdout.contains("debian_version"), "{said:?}");
    oci.assert_nothing_left();
}

/// `/etc/passwd` of an image is read in bounded time, as a file and as nothing else.
#[test]
fn vm_a_strange_passwd_keeps_nobody_waiting() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["sh", "-c", "echo $HOME"]);
    let passwd = bundle.rootfs().join("etc/passwd");
    for make in ["mkfifo", "mkdir", "ln -s /dev/zero", "truncate -s 2G"] {
        oci.sh(&format!("rm -rf {0}; {make} {0}", passwd.display())).ok();
        assert_eq!(oci.run(&["run", "-b", bundle.dir(), "c"]).ok(), "/", "{make}");
    }
    oci.assert_nothing_left();
}

/// CVE-2024-0132 and its kin: the image has no say in how hooks run.
#[test]
fn vm_hooks_get_nothing_of_the_image() {
    let oci = Oci::new();
    let bundle = Bundle::new(&oci, &["true"]);
    let said = bundle.path("said");
    bundle.edit(|c| {
        c["process"]["env"] = json!(["PATH=/bin", "LD_PRELOAD=/evil.so"]);
        let script = format!("cat > /dev/null; pwd >> {said}; env >> {said}");
        let hook = json!([{"path": "/bin/sh", "args": ["sh", "-c", script], "env": ["A=b"]}]);
        c["hooks"] = json!({"createRuntime": hook, "poststop": hook});
    });
    oci.run(&["run", "-b", bundle.dir(), "c"]).ok();
    let text = fs::read_to_string(&said).expect("written");
    assert!(!text.contains("LD_PRELOAD") && text.contains("A=b"), "{text}");
    assert_eq!(text.lines().filter(|line| *line == bundle.dir()).count(), 2, "{text}");
    oci.assert_nothing_left();
}
