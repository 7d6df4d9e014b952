//! Bad input: one clear line, a distinct exit status, nothing half made.

use dormouse_testkit::Host;

/// Asserts that no container and no process of one exists.
#[track_caller]
fn assert_nothing_is_there(host: &Host) {
    assert_eq!(host.dm(&["ps", "--all", "--quiet"]).ok(), "");
    let containers = host.root().join("lib/containers");
    let left = std::fs::read_dir(containers).map_or(0, |entries| entries.count());
    assert_eq!(left, 0, "a container is half made");
}

#[test]
fn unknown_image_and_container_are_named() {
    let host = Host::with_busybox();
    let line = host.dm(&["run", "--pull", "never", "nothing", "true"]).err(125);
    assert!(line.contains("nothing"), "{line}");
    for verb in ["start", "stop", "pause", "rm", "logs", "kill"] {
        let line = host.dm(&[verb, "absent"]).fails();
        assert!(line.contains("absent"), "{verb}: {line}");
    }
    assert_nothing_is_there(&host);
}

#[test]
fn command_not_found_is_127_and_not_executable_is_126() {
    let host = Host::with_busybox();
    let line = host.dm(&["run", "--rm", "busybox", "no-such-program"]).err(127);
    assert!(line.contains("no-such-program"), "{line}");
    host.dm(&["run", "busybox", "/no/such/file"]).err(127);
    host.dm(&["run", "--rm", "busybox", "/etc/passwd"]).err(126);
    host.dm(&["run", "--rm", "busybox", "/tmp"]).err(126);
    host.dm(&["run", "-d", "busybox", "no-such-program"]).err(127);
    assert_nothing_is_there(&host);
    host.dm(&["run", "-d", "--name", "a", "busybox", "sleep", "1000"]).ok();
    host.dm(&["exec", "a", "no-such-program"]).err(127);
    host.dm(&["exec", "a", "/etc/passwd"]).err(126);
    assert_eq!(host.state_of("a"), "running");
}

#[test]
fn invalid_options_are_refused_without_leftovers() {
    let host = Host::with_busybox();
    for options in [
        &["--memory", "12q"][..],
        &["--memory", "1"],
        &["--cpus", "0"],
        &["--cpus", "-1"],
        &["--pids", "many"],
        &["--name", "a/b"],
        &["--name", ".."],
        &["-p", "80:0"],
        &["-p", "99999:80"],
        &["--net", "sideways"],
        &["--ip", "1.2.3"],
        &["--ip", "8.8.8.8"],
        &["--user", "nobody-knows"],
        &["--user", "1:2:3"],
        &["--user", "-1"],
        &["--user", "4294967296"],
        &["--cap-add", "CAP_FLY"],
        &["--ulimit", "wings=1"],
        &["--ulimit", "nofile=5:4"],
        &["--restart", "sometimes"],
        &["-v", "relative/../path:/x"],
        &["-v", "/no/such/directory:/x"],
        &["-v", "/etc:relative"],
        &["-e", "=x"],
        &["--hostname", "a b"],
        &["--entrypoint", "[\"broken"],
        &["--sysctl", "kernel.core_pattern=x"],
        &["--sysctl", "kernel.msgmax=1\n2"],
        &["--no-such-option"],
    ] {
        let out = host.dm(&[&["run"], options, &["busybox", "true"]].concat());
        assert_eq!(out.status, 125, "{out}");
        let lines = out.stderr.lines().count();
        assert!(lines == 1 && !out.stderr.contains("panicked"), "{out}");
    }
    host.dm(&["run"]).err(125);
    host.dm(&["no-such-verb"]).err(125);
    assert_nothing_is_there(&host);
}

#[test]
fn user_option_selects_exact_ids_or_is_refused() {
    let host = Host::with_busybox();
    for (user, ids) in
        [("0", "0 0"), ("user", "1000 1000"), ("1000", "1000 1000"), ("5:6", "5 6"), ("01", "1 0")]
    {
        let words = ["run", "--rm", "-u", user, "--net", "none", "busybox", "sh", "-c"];
        let out = host.dm(&[&words[..], &["echo $(id -u) $(id -g)"]].concat());
        if user == "01" {
            // Parsed as a decimal number or refused, never as root.
            assert!(out.status == 125 || out.stdout.starts_with("1 "), "{out}");
        } else {
            assert_eq!(out.ok(), ids, "{user}");
        }
    }
    for user in ["1:", ":1", "+1", "1:2:3", "-1", "4294967296", "\u{661}", " 0"] {
        let out = host.dm(&["run", "--rm", "-u", user, "--net", "none", "busybox", "id", "-u"]);
        assert!(out.status == 125 || out.stdout.trim() == "1", "'{user}' {out}");
    }
}

#[test]
fn damaged_archives_are_refused_and_leave_nothing() {
    let host = Host::new();
    let whole = host.dir().join("whole.tar");
    let busybox = dormouse_testkit::image::busybox();
    host.sh(&format!("tar -C {} -cf {} .", busybox.display(), whole.display())).ok();
    let bytes = std::fs::read(&whole).expect("the archive");
    let mut flipped = bytes.clone();
    flipped[148] ^= 0x40; // the checksum of the first header
    for (name, content) in [
        ("short.tar", &bytes[..bytes.len() / 3 / 512 * 512 + 100]),
        ("flipped.tar", &flipped),
        ("text.tar", &b"this is no archive, whatever its name says"[..]),
    ] {
        let path = host.dir().join(name);
        std::fs::write(&path, content).expect("written");
        let path = path.to_str().expect("UTF-8");
        let line = host.dm(&["import", "--name", "x", path]).err(125);
        assert!(!line.is_empty(), "{name}");
    }
    host.dm(&["import", "--name", "x", "/no/such/file"]).err(125);
    let images = host.dm(&["images", "--json"]).ok();
    assert_eq!(images.trim(), "[]");
}

#[test]
fn vm_full_disk_fails_import_and_frees_space() {
    let host = Host::new();
    let root = host.root();
    std::fs::create_dir_all(&root).expect("made");
    let disk = host.dir().join("disk");
    let script = format!(
        "truncate -s 8M {disk} && mke2fs -q -t ext4 {disk} && mount -o loop {disk} {root}",
        disk = disk.display(),
        root = root.display()
    );
    host.sh(&script).ok();
    let free = format!("df -k --output=avail {} | tail -n 1", root.display());
    let before: i64 = host.sh(&free).ok().trim().parse().expect("a number");
    let big = host.dir().join("big");
    std::fs::create_dir(&big).expect("made");
    std::fs::write(big.join("file"), vec![7_u8; 20 << 20]).expect("written");
    let line = host.dm(&["import", "--name", "x", big.to_str().expect("UTF-8")]).err(125);
    assert!(line.contains("No space left") || line.contains("no room"), "{line}");
    assert_eq!(host.dm(&["images", "--json"]).ok().trim(), "[]");
    let after: i64 = host.sh(&free).ok().trim().parse().expect("a number");
    assert!(before - after < 1024, "{before} kB were free, now {after}");
    host.dm(&["internal", "reset"]).ok();
    host.sh(&format!("umount {}", root.display())).ok();
}

#[test]
fn vm_check_reports_kernel_features() {
    let host = Host::new();
    let out = host.dm(&["check"]);
    assert_eq!(out.status, 0, "{out}");
    assert!(out.stdout.lines().count() > 10, "{out}");
    let json = host.dm(&["check", "--json"]).ok();
    let value: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert!(value.is_array() || value.is_object());
}

#[test]
fn vm_check_scale_names_short_limits() {
    let host = Host::new();
    let read = |out: &dormouse_testkit::Output| -> serde_json::Value {
        serde_json::from_str(&out.stdout).expect("JSON")
    };
    let few = host.dm(&["check", "--scale", "1", "--json"]);
    assert_eq!((few.status, &read(&few)["fits"]), (0, &true.into()), "{few}");
    // More containers than any host has ids for.
    let many = host.dm(&["check", "--scale", "1000000", "--missing", "--json"]);
    assert_eq!((many.status, &read(&many)["fits"]), (1, &false.into()), "{many}");
    let report = read(&many);
    let limits = report["limits"].as_array().expect("a list");
    let named = |name: &str| limits.iter().find(|limit| limit["name"] == name);
    let slots = named("id slots").expect("a limit that is short");
    assert_eq!((&slots["verdict"], &slots["need"]), (&"short".into(), &1_000_000.into()));
    assert!(limits.iter().all(|limit| limit["verdict"] != "enough" && limit["set"] != ""));
    let text = host.dm(&["check", "--scale", "1000000"]);
    assert!(text.status == 1 && text.stdout.contains("do not fit"), "{text}");
    assert!(text.stdout.contains("sysctl user.max_pid_namespaces="), "{text}");
    for bad in ["0", "-1", "many"] {
        assert_ne!(host.dm(&["check", "--scale", bad]).status, 0, "{bad}");
    }
}

#[test]
fn help_and_version_hide_internal_commands() {
    let host = Host::new();
    let help = host.dm(&["--help"]).ok();
    for verb in ["run", "ps", "images", "check"] {
        assert!(help.contains(verb), "{verb}");
    }
    assert!(!help.contains("internal"), "{help}");
    assert!(host.dm(&["version"]).ok().contains("0.1"));
}

/// A hint names what this program has, and a suggestion is a likely misspelling.
#[test]
fn unknown_options_and_verbs_have_no_misleading_hints() {
    let host = Host::with_busybox();
    for (words, wanted) in [
        (&["run", "--device", "/dev/null", "busybox", "true"][..], "no devices of the host"),
        (&["run", "--tz", "UTC", "busybox", "true"], "--env TZ=ZONE"),
        (&["run", "--health-cmd=true", "busybox"], "no health checks"),
        (&["run", "--memroy", "1g", "busybox"], "did you mean '--memory'?"),
        (&["build", "."], "podman save | dormouse load"),
        (&["network", "ls"], "dormouse run --domain NAME"),
        (&["help", "run"], "dormouse VERB --help"),
        (&["insect", "a"], "did you mean 'inspect'?"),
    ] {
        let line = host.dm(words).err(125);
        assert!(line.contains(wanted), "{words:?}: {line}");
        for misleading in ["as a value", "similar", "--env-file", "restore"] {
            assert!(!line.contains(misleading), "{words:?}: {line}");
        }
    }
    let line = host.dm(&["run", "-v", "rel/path:/x", "busybox", "true"]).err(125);
    assert!(line.contains("begins with / or ./"), "{line}");
    let line = host.dm(&["ps", "--format", "{{.Nope}}"]);
    assert_eq!(line.status, 0, "no container, so no row");
    for (format, wanted) in
        [("{{.X", "without '}}'"), ("xml", "json, a template"), ("{{f}}", "'f'")]
    {
        let line = host.dm(&["ps", "-a", "--format", format]);
        assert!(line.status == 125 || format == "{{f}}", "{line}");
        assert!(line.status == 0 || line.stderr.contains(wanted), "{line}");
    }
    assert_nothing_is_there(&host);
}

#[test]
fn invalid_accounts_are_refused() {
    let host = Host::with_busybox();
    let long = "a".repeat(129);
    host.dm(&["account", "create", "a"]).ok();
    for options in [
        &["create", "a/b"][..],
        &["create", ".."],
        &["create", ""],
        &["create", &long],
        &["create", "a\u{1b}[2J"],
        &["create", "a\nb"],
        &["create", "@a"],
        &["create", "root"],
        &["create", "a"],
        &["create", "--parent", "absent", "b"],
        &["create", "--parent", "../a", "b"],
        &["create", "--number", "5", "b"],
        &["create", "--number", "-1", "b"],
        &["create", "--keep-days", "-1", "b"],
        &["create", "--label", "=x", "b"],
        &["set", "absent"],
        &["set", "--parent", "a", "a"],
        &["set", "--parent", "a", "root"],
        &["set", "--share", "labels", "root"],
        &["set", "--share", "everything", "a"],
        &["inspect", "absent"],
        &["inspect", "@absent"],
        &["report", "--since", "yesterday"],
        &["report", "--since", "2026-13-01"],
        &["report", "--format", "xml"],
        &["report", "absent"],
        &["ls", "--format", "csv"],
        &["rm", "absent"],
        &["rm", "root"],
        &["rm", "@a"],
        &["rm", "../../containers"],
        &["rm"],
        &["sideways"],
    ] {
        let out = host.dm(&[&["account"], options].concat());
        assert_ne!(out.status, 0, "{options:?}: {out}");
        assert_eq!(out.stderr.lines().count(), 1, "{options:?}: {out}");
        assert!(!out.stderr.contains('\u{1b}') && !out.stderr.contains("panicked"), "{out}");
    }
    assert_eq!(host.dm(&["account", "ls", "--quiet"]).ok(), "root\na");
    for account in ["absent", "a/b", "@a", "..", &long] {
        let out = host.dm(&["run", "--account", account, "busybox", "true"]);
        assert_eq!(out.status, 125, "{account}: {out}");
        assert_eq!(out.stderr.lines().count(), 1, "{account}: {out}");
    }
    assert_nothing_is_there(&host);
    let pending = std::fs::read_dir(host.root().join("lib/pending")).expect("a directory");
    assert_eq!(pending.count(), 0, "a create is half done");
}
