//! Other users of the host, and an unusual umask of the caller. Neither opens files of an instance to other
//! users, nor closes files that a container needs.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use dormouse_testkit::{Host, Output};

/// A host with a directory open to every user and a running container. The container has a volume with a
/// set-user-id program, and a secret in its environment.
fn reachable_host() -> Host {
    reachable(Host::with_busybox())
}

fn reachable(host: Host) -> Host {
    fs::set_permissions(host.dir(), fs::Permissions::from_mode(0o755)).expect("changed");
    host.dm(&[
        "run",
        "-d",
        "--name",
        "a",
        "-e",
        "SECRET=hunter2",
        "-v",
        "vol:/data",
        "busybox",
        "sh",
        "-c",
        "cp /bin/busybox /data/busybox; chmod 4755 /data/busybox; cp /bin/busybox /busybox; \
         chmod 4755 /busybox; \
         echo ready; exec sleep 1000",
    ])
    .ok();
    host.wait_inside("a", "test -u /busybox");
    host
}

/// Runs a script as a user of the host without any privilege.
fn as_user(host: &Host, script: &str) -> Output {
    let mut command = host.command("setpriv");
    command.args(["--reuid", "1234", "--regid", "1234", "--clear-groups", "--inh-caps=-all"]);
    command.args(["sh", "-c", script]).env("ROOT", host.root());
    dormouse_testkit::run(command, b"", std::time::Duration::from_secs(60))
}

#[test]
fn host_user_reaches_no_file_of_state_or_runtime_directory() {
    let host = reachable_host();
    host.dm(&["account", "ls"]).ok();
    let user = |script: &str| as_user(&host, script);
    assert_eq!(user("cd $ROOT && id -u").ok(), "1234", "the user comes as far as the root");
    for (what, script) in [
        ("state directory", "ls $ROOT/lib"),
        ("runtime directory", "ls $ROOT/run"),
        ("events", "cat $ROOT/lib/events"),
        ("environment", "cat $ROOT/lib/containers/*/config.json"),
        ("program of a volume", "$ROOT/lib/volumes/vol/busybox id -u"),
        ("lock of all starts", "flock -n -x $ROOT/run/use.lock true"),
        ("lock of the ids", "flock -n -x $ROOT/lib/ids/lock true"),
        ("balances", "cat $ROOT/lib/accounts/balances/*.json"),
        ("lock of the balances", "flock -n -x $ROOT/lib/accounts/lock true"),
        ("domain's names", "cat $ROOT/run/domains/default/hosts"),
    ] {
        let out = user(script);
        assert_ne!(out.status, 0, "{what}: {out}");
        assert!(!out.stdout.contains("hunter2"), "{what}: {out}");
    }
    let id = host.inspect("a")["id"].as_str().expect("an id").to_owned();
    for (what, script) in [
        ("lock of the container", format!("flock -n -x $ROOT/lib/containers/{id} true")),
        ("set-user-id program", format!("$ROOT/lib/containers/{id}/upper/busybox id -u")),
        ("shared memory", format!("echo x >$ROOT/run/tmpfs/*/{id}/shm/x")),
        ("socket of the keeper", "test -e $ROOT/run/keeper.sock".to_owned()),
    ] {
        let out = user(&script);
        assert_ne!(out.status, 0, "{what}: {out}");
    }
    // Where the directories are open, the program of the volume runs.
    if let Some(weak) = Host::without("private-directories").map(reachable) {
        assert_eq!(as_user(&weak, "$ROOT/lib/volumes/vol/busybox id -u").status, 0);
    }
    // Every user inside still reaches the files of the container.
    host.dm(&["exec", "--user", "1000", "a", "sh", "-c", "echo >/dev/shm/x; cat /etc/hosts"]).ok();
    assert_eq!(host.dm(&["exec", "--user", "1000", "a", "cat", "/data/busybox"]).status, 0);
}

#[test]
fn next_command_closes_open_directories_of_earlier_version() {
    let host = reachable_host();
    let root = host.root();
    let id = host.inspect("a")["id"].as_str().expect("an id").to_owned();
    let upper = root.join("lib/containers").join(&id).join("upper");
    let before = fs::metadata(&upper).expect("there").mode();
    let script = "chmod 0711 $R/lib $R/run $R/lib/containers $R/lib/volumes $R/run/c
        chmod 0755 $R/lib/containers/* ; chmod 0644 $R/lib/events $R/lib/containers/*/config.json
        chmod 0666 $R/run/use.lock $R/lib/ids/lock";
    host.sh(&format!("R={}; {script}", root.display())).ok();
    assert_eq!(as_user(&host, "cat $ROOT/lib/events >/dev/null").status, 0, "it was open");
    host.dm(&["ps"]).ok();
    let open = host.sh(&format!(
        "cd {}; find lib run -maxdepth 1 -perm /077 ! -type l; find lib/containers lib/ids lib/names run/c \
         -maxdepth 2 -user 0 -perm /077 ! -type l",
        root.display()
    ));
    assert_eq!(open.ok(), "");
    assert_eq!(fs::metadata(&upper).expect("there").mode(), before);
    assert_eq!(host.dm(&["exec", "--user", "1000", "a", "cat", "/etc/hosts"]).status, 0);
    host.dm(&["restart", "--time", "0", "a"]).ok();
}

#[test]
fn directory_of_another_user_is_refused() {
    let host = Host::new();
    let lib = host.root().join("lib");
    fs::create_dir_all(&lib).expect("made");
    std::os::unix::fs::chown(&lib, Some(1234), None).expect("given away");
    let out = host.dm(&["ps"]);
    assert_eq!(out.status, 125, "{out}");
    assert!(out.stderr.contains("belongs to uid 1234"), "{out}");
    fs::remove_dir(&lib).expect("it is empty");
}

/// Runs a command under an umask.
fn under(host: &Host, umask: &str, words: &[&str]) -> Output {
    let script = format!("umask {umask}; exec \"$@\"");
    let mut command = host.dormouse_under(&["sh", "-c", &script, "sh"], words);
    command.current_dir(host.dir());
    dormouse_testkit::run(command, b"", std::time::Duration::from_secs(60))
}

/// Files of the instance that other users than root can write.
fn loose(host: &Host) -> String {
    let find = "find lib run -xdev -perm /022 ! -type l ! -path '*/upper*' ! -path '*/images/*'";
    host.sh(&format!("cd {}; {find}", host.root().display())).ok()
}

#[test]
fn callers_umask_changes_no_mode_of_the_instance() {
    if let Some(weak) = Host::without("own-umask") {
        under(&weak, "0", &["run", "-d", "--name", "a", "busybox", "sleep", "1000"]).ok();
        assert_ne!(loose(&weak), "", "the umask of the caller");
    }
    for umask in ["0", "077"] {
        let host = Host::new();
        host.import(&dormouse_testkit::image::busybox(), "busybox");
        let words = ["run", "-d", "--name", "a", "-v", "vol:/data", "--add-host", "h:10.1.2.3"];
        under(&host, umask, &[&words[..], &["busybox", "sleep", "1000"]].concat()).ok();
        under(&host, umask, &["run", "-d", "--name", "b", "busybox", "sleep", "1000"]).ok();
        // No file of the instance is writable for other users than root, under any umask.
        assert_eq!(loose(&host), "", "umask {umask}");
        for name in ["a", "b"] {
            for file in ["/etc/hosts", "/etc/resolv.conf", "/etc/hostname"] {
                let out = host.dm(&["exec", "--user", "1000", name, "cat", file]);
                assert_eq!(out.status, 0, "umask {umask}: {file} of {name}: {out}");
            }
        }
        assert_eq!(
            host.dm(&["exec", "a", "stat", "-c", "%a", "/data"]).ok(),
            "755",
            "umask {umask}"
        );
        assert_eq!(host.dm(&["exec", "a", "sh", "-c", "umask"]).ok(), "0022", "umask {umask}");
    }
}

#[test]
fn callers_umask_sets_mode_of_requested_files() {
    let host = Host::with_busybox();
    for (umask, expected) in [("077", 0o600), ("027", 0o640), ("002", 0o664)] {
        let file = host.dir().join(format!("saved-{umask}.tar"));
        let id_file = host.dir().join(format!("id-{umask}"));
        let script = format!("umask {umask}; exec \"$@\"");
        for words in [
            &["save", "--output", file.to_str().expect("UTF-8"), "busybox"][..],
            &["create", "--cidfile", id_file.to_str().expect("UTF-8"), "busybox", "true"],
        ] {
            let command = host.dormouse_under(&["sh", "-c", &script, "sh"], words);
            dormouse_testkit::run(command, b"", std::time::Duration::from_secs(60)).ok();
        }
        for path in [file, id_file] {
            let mode = fs::metadata(&path).expect("written").mode() & 0o777;
            assert_eq!(mode, expected, "umask {umask}: {}", path.display());
        }
    }
}

#[test]
fn host_sees_no_writable_sysfs_or_procfs_of_containers() {
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--name", "a", "busybox", "sleep", "1000"]).ok();
    host.dm(&["run", "-d", "--name", "b", "--net", "none", "busybox", "sleep", "1000"]).ok();
    let root = host.root();
    let mounts = host.sh("cat /proc/self/mountinfo").ok();
    let ours: Vec<&str> =
        mounts.lines().filter(|l| l.contains(root.to_str().expect("UTF-8"))).collect();
    let shown = |line: &&&str| line.contains(" - sysfs ") || line.contains(" - proc ");
    assert!(ours.iter().filter(shown).count() >= 2, "{mounts}");
    for line in ours.iter().filter(shown) {
        let options = line.split(' ').nth(5).expect("options");
        assert!(options.split(',').any(|o| o == "ro"), "{line}");
    }
    host.dm(&["exec", "b", "ls", "/sys/class/net"]).ok();
    assert_ne!(host.dm(&["exec", "b", "touch", "/sys/kernel/x"]).status, 0);
}

#[test]
fn command_without_root_is_refused_by_permission() {
    let host = reachable_host();
    let program = host.dir().join("dormouse");
    fs::copy(dormouse_testkit::dormouse(), &program).expect("copied");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("changed");
    let out = as_user(&host, &format!("{} --root $ROOT ps", program.display()));
    assert_eq!(out.status, 125, "{out}");
    assert!(out.stderr.contains("Permission denied") && !out.stderr.contains("chown"), "{out}");
}

#[test]
fn root_at_directories_of_others_is_refused_and_changes_no_mode() {
    let host = Host::with_busybox();
    let foreign = host.dir().join("foreign");
    for name in ["lib", "run"] {
        fs::create_dir_all(foreign.join(name).join("dpkg")).expect("made");
        let open = fs::Permissions::from_mode(0o755);
        fs::set_permissions(foreign.join(name), open.clone()).expect("changed");
        fs::set_permissions(foreign.join(name).join("dpkg"), open).expect("changed");
    }
    let mut command = host.command(dormouse_testkit::dormouse());
    command.arg("--root").arg(&foreign).arg("ps");
    let out = dormouse_testkit::run(command, b"", std::time::Duration::from_secs(60));
    assert_eq!(out.status, 125, "{out}");
    assert!(out.stderr.contains("not Dormouse's"), "{out}");
    for path in ["lib", "lib/dpkg", "run", "run/dpkg"] {
        let mode = fs::metadata(foreign.join(path)).expect("there").mode();
        assert_eq!(mode & 0o777, 0o755, "{path}");
    }
}
