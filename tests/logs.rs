//! Logs of containers: order, times, and output that waits while no process reads it.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::time::Duration;

use dormouse_testkit::{Host, image, run, slowness, wait_until};

/// How long a condition may take on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// Runs a shell script in a new detached container, whose output a reader of the keeper writes.
#[track_caller]
fn detached(host: &Host, name: &str, options: &[&str], script: &str) {
    let words = ["run", "-d", "--log-driver", "k8s-file", "--name", name];
    host.dm(&[&words[..], options, &["busybox", "sh", "-c", script]].concat()).ok();
}

/// The log with both streams on one descriptor, as a terminal shows it.
#[track_caller]
fn shown(host: &Host, options: &[&str]) -> String {
    let command = host
        .dormouse_under(&["sh", "-c", "exec \"$0\" \"$@\" 2>&1"], &[&["logs"], options].concat());
    let out = run(command, b"", LONG);
    assert_eq!(out.status, 0, "{out}");
    out.stdout
}

/// The directory with the log of a container.
fn directory(host: &Host, name: &str) -> PathBuf {
    host.root().join("lib/containers").join(host.inspect(name)["id"].as_str().expect("an id"))
}

/// Pids of the processes that read output.
fn readers(host: &Host) -> Vec<u32> {
    let all = host.processes().into_iter().filter(|(_, line)| line == "[dormouse-reader]");
    all.map(|(pid, _)| pid).collect()
}

fn signal(pid: u32, signal: &str) {
    let sent = std::process::Command::new("kill").args([signal, &pid.to_string()]).status();
    assert!(sent.expect("kill is a program").success(), "{signal} of {pid}");
}

/// Kills a process. One that ended with another one is gone already.
fn kill(pid: u32) {
    let killed = std::process::Command::new("kill").args(["-KILL", &pid.to_string()]).output();
    let killed = killed.expect("kill is a program");
    let is_gone = !std::path::Path::new(&format!("/proc/{pid}")).exists();
    assert!(killed.status.success() || is_gone, "{pid}: {killed:?}");
}

/// A shell loop that counts on standard output, 2,000 lines a second at most.
fn counting(to: u32) -> String {
    let pause = "[ $((n % 100)) = 0 ] && sleep 0.05";
    format!("n=0; while [ $n -lt {to} ]; do n=$((n+1)); echo $n; {pause}; done; echo end")
}

/// Checks that a log has each number, in ascending order. Lines are repeated only if `may_repeat`.
#[track_caller]
fn is_complete(log: &str, to: u32, may_repeat: bool) {
    let mut seen = 0;
    for line in log.lines().filter(|line| *line != "end") {
        let number: u32 = line.parse().unwrap_or_else(|_| panic!("not a number: '{line}'"));
        assert!(number <= seen + 1, "after {seen} comes {number}");
        assert!(may_repeat || number == seen + 1, "{number} is repeated");
        seen = seen.max(number);
    }
    assert_eq!(seen, to, "the last line");
}

/// A pipe holds sixteen writes. A signal without a write of its own moves one stream by one of them, until
/// both pipes are empty. A fast writer waits for room all the time, and each wait has a second signal.
#[test]
fn vm_log_has_the_order_of_each_stream_and_of_both_within_a_pipe() {
    let count = 20_000 / slowness() as usize;
    let host = Host::with_busybox();
    for streams in ["oe", "ooe", "oeee"] {
        detached(&host, streams, &[], &format!("exec probe lines {count} {streams}"));
        assert_eq!(host.dm(&["wait", streams]).ok(), "0");
        let number = |line: &str| line.parse::<usize>().expect("a number");
        let of = |number: usize| streams.as_bytes()[(number - 1) % streams.len()];
        let log = shown(&host, &[streams]);
        let all: Vec<usize> = log.lines().map(number).collect();
        assert_eq!(all.len(), count, "{streams}");
        let out = host.dm(&["logs", streams]);
        for (stream, shown) in [(b'o', &out.stdout), (b'e', &out.stderr)] {
            let written = (1..=count).filter(|number| of(*number) == stream);
            assert!(shown.lines().map(number).eq(written), "each stream has its order");
        }
        let apart = all.iter().zip(1..).map(|(number, place)| number.abs_diff(place));
        let (moved, most) = (apart.clone().filter(|it| *it > 0).count(), apart.max());
        println!("{streams}: {moved} of {count} lines are out of place, by {most:?} at most");
        assert!(most <= Some(16 * streams.len()), "{streams}: {moved} lines, by {most:?}");
        assert!(log.ends_with(&shown(&host, &["--tail", "3", streams])));
        assert_eq!(shown(&host, &["-n", "0", streams]), "");
    }
}

#[test]
fn vm_reopened_stdout_keeps_earlier_lines() {
    let host = Host::with_busybox();
    let script = "echo one; echo two > /dev/stdout; echo three >&2; echo four > /dev/stderr; \
                  echo five; readlink /proc/self/fd/1; printf end";
    detached(&host, "a", &[], script);
    assert_eq!(host.dm(&["wait", "a"]).ok(), "0");
    let log = host.dm(&["logs", "a"]);
    assert_eq!(log.stderr, "three\nfour\n", "{log}");
    let rest = log.stdout.strip_prefix("one\ntwo\nfive\n").unwrap_or_else(|| panic!("{log}"));
    // No path of the host is in the container.
    assert!(rest.starts_with("pipe:[") && rest.ends_with("]\nend"), "{log}");
}

#[test]
fn vm_failed_writes_of_one_container_reach_no_other_log() {
    let host = Host::with_busybox();
    host.import(&image::busybox_with_attack(), "attack");
    let script = "attack failed-writes >/dev/stdout 2>/dev/null; echo mine; exec sleep 1000";
    let words = ["run", "-d", "--log-driver", "k8s-file", "--name", "bad", "attack", "sh", "-c"];
    detached(&host, "good", &[], &counting(2000));
    host.dm(&[&words[..], &[script]].concat()).ok();
    let last = |name: &str| shown(&host, &["--tail", "1", name]);
    assert!(wait_until(LONG, || last("good") == "end\n" && last("bad") == "mine\n"));
    is_complete(&shown(&host, &["good"]), 2000, false);
    let of_bad = shown(&host, &["bad"]);
    assert!(of_bad.lines().all(|line| line == "mine" || line.contains("stopped")), "{of_bad}");
}

#[test]
fn vm_container_does_not_change_its_log_file() {
    let host = Host::with_busybox();
    let script = "echo one; chmod 4777 /proc/self/fd/1 /proc/self/fd/2; truncate -s 0 /dev/stdout; \
                  : > /dev/stdout; echo two";
    detached(&host, "a", &[], script);
    host.dm(&["wait", "a"]).ok();
    assert_eq!(host.dm(&["logs", "a"]).stdout, "one\ntwo\n");
    let directory = directory(&host, "a");
    let log = directory.join("output.log").metadata().expect("a log");
    assert_eq!((log.permissions().mode() & 0o7777, log.uid()), (0o600, 0));
    assert_eq!(directory.metadata().expect("a directory").mode() & 0o7777, 0o700);
}

#[test]
fn vm_lines_are_selected_by_time() {
    let host = Host::with_busybox();
    let script = "echo one; while [ ! -e /go ]; do sleep 0.1; done; echo two >&2; echo three";
    detached(&host, "a", &[], script);
    assert!(wait_until(LONG, || shown(&host, &["a"]) == "one\n"));
    std::thread::sleep(Duration::from_millis(10)); // times are compared by milliseconds
    host.dm(&["exec", "a", "touch", "/go"]).ok();
    host.dm(&["wait", "a"]).ok();
    let timed = shown(&host, &["-t", "a"]);
    let lines: Vec<(&str, &str)> = timed.lines().filter_map(|line| line.split_once(' ')).collect();
    let texts: Vec<&str> = lines.iter().map(|(_, text)| *text).collect();
    assert_eq!(texts, ["one", "two", "three"], "{timed}");
    assert!(lines.is_sorted() || lines[0].0 < lines[1].0, "{timed}");
    let (first, second) = (lines[0].0, lines[1].0);
    assert_eq!(shown(&host, &["--since", second, "a"]), "two\nthree\n");
    assert_eq!(shown(&host, &["--until", first, "a"]), "one\n");
    assert_eq!(shown(&host, &["--since", "1h", "--until", first, "a"]), "one\n");
    assert_eq!(shown(&host, &["--follow", "--until", first, "a"]), "one\n");
    assert_eq!(shown(&host, &["--since", "2099-01-01T00:00:00Z", "a"]), "");
    assert_eq!(host.dm(&["logs", "--since", "yesterday", "a"]).status, 125);
}

#[test]
fn vm_killed_keeper_loses_no_line() {
    let host = Host::with_busybox();
    detached(&host, "a", &[], &counting(10_000));
    for _ in 0..3 {
        signal(host.keeper().expect("a keeper"), "-KILL");
        // The next command starts another one, which has the output read.
        let before = shown(&host, &["a"]).len();
        let goes_on =
            || shown(&host, &["a"]).len() > before || shown(&host, &["a"]).contains("end");
        assert!(wait_until(LONG, goes_on));
    }
    assert!(wait_until(LONG, || shown(&host, &["a"]).ends_with("end\n")));
    is_complete(&shown(&host, &["a"]), 10_000, false);
}

#[test]
fn vm_output_is_read_again_after_a_kill_of_keeper_and_vault() {
    let host = Host::with_busybox();
    detached(&host, "a", &[], &counting(10_000));
    let lines = || shown(&host, &["a"]);
    assert!(wait_until(LONG, || !lines().is_empty()));
    let all = host.processes();
    let holders = ["[dormouse-vault]", "[dormouse-keeper]", "[dormouse-reader]"];
    let pids = all.iter().filter(|(_, line)| holders.contains(&line.as_str()));
    let pids: Vec<u32> = pids.map(|(pid, _)| *pid).collect();
    assert_eq!(pids.len(), 3, "{all:?}");
    pids.into_iter().for_each(kill);
    assert!(wait_until(LONG, || lines().ends_with("end\n")), "{}", lines());
    is_complete(&lines(), 10_000, true);
}

#[test]
fn vm_killed_reader_loses_no_line() {
    let host = Host::with_busybox();
    detached(&host, "a", &[], &counting(10_000));
    for _ in 0..5 {
        let found = wait_until(LONG, || !readers(&host).is_empty());
        assert!(found, "{:?}", host.processes());
        readers(&host).into_iter().for_each(kill);
        let before = shown(&host, &["a"]).len();
        let goes_on =
            || shown(&host, &["a"]).len() > before || shown(&host, &["a"]).contains("end");
        assert!(wait_until(LONG, goes_on));
    }
    assert_eq!(host.dm(&["wait", "a"]).ok(), "0");
    // A reader that is killed between the log and the pipe leaves lines that are written again.
    is_complete(&shown(&host, &["a"]), 10_000, true);
}

#[test]
fn vm_output_outlives_container_keeper_and_reader() {
    let host = Host::with_busybox();
    let script = "trap 'echo late; exit' USR1; echo begun; while :; do sleep 0.1; done";
    detached(&host, "a", &[], script);
    assert!(wait_until(LONG, || shown(&host, &["a"]) == "begun\n"));
    let init = host.inspect("a")["pid"].as_u64().expect("a pid") as u32;
    let (keeper, reader) = (host.keeper().expect("a keeper"), readers(&host));
    // Written while no process reads.
    [keeper, reader[0]].into_iter().for_each(|pid| signal(pid, "-STOP"));
    signal(init, "-USR1");
    let has_ended = || {
        let state = std::fs::read_to_string(format!("/proc/{init}/stat")).unwrap_or_default();
        !state.contains(") ") || state.contains(") Z ")
    };
    assert!(wait_until(LONG, has_ended), "the container waits for a reader");
    [keeper, reader[0]].into_iter().for_each(kill);
    let is_complete = || shown(&host, &["a"]) == "begun\nlate\n";
    assert!(wait_until(LONG, is_complete), "{}", shown(&host, &["a"]));
}

#[test]
fn vm_flooding_neighbour_delays_no_log_and_fills_no_disk() {
    let host = Host::with_busybox();
    detached(&host, "flood", &["--log-max-size", "1m"], "yes | cat; yes >&2");
    detached(&host, "drip", &["--log-max-size", "1m"], "while :; do echo x; echo y >&2; done");
    detached(&host, "quiet", &[], &counting(500));
    assert!(wait_until(LONG, || shown(&host, &["--tail", "1", "quiet"]) == "end\n"));
    is_complete(&shown(&host, &["quiet"]), 500, false);
    for name in ["flood", "drip"] {
        let log = directory(&host, name).join("output.log");
        let look = || log.metadata().expect("a log");
        let is_over = || {
            let on_disk = look().blocks() * 512;
            assert!(on_disk <= 2 << 20, "{name}: {on_disk} bytes are on disk");
            look().len() > 5 << 19
        };
        assert!(wait_until(LONG * slowness(), is_over), "{name}: {} bytes", look().len());
        // Only whole lines; more are written meanwhile.
        let lines = host.dm(&["logs", "-n", "1", name]).stdout;
        assert!(lines.lines().all(|line| ["x", "y"].contains(&line)), "{name}: {lines:?}");
    }
}

#[test]
fn vm_sleeper_restored_container_and_clone_have_their_own_log() {
    let host = Host::with_busybox();
    let script = "trap 'echo asked' USR1; echo begun; while :; do sleep 0.2; done";
    detached(&host, "a", &[], script);
    let ask = |name: &str, before: &str| {
        host.dm(&["kill", "-s", "USR1", name]).ok();
        let text = format!("{before}asked\n");
        let is_shown = || shown(&host, &[name]) == text;
        assert!(wait_until(LONG, is_shown), "{name}: {}", shown(&host, &[name]));
        text
    };
    let mut text = ask("a", "begun\n");
    host.dm(&["sleep", "a"]).ok();
    assert_eq!(shown(&host, &["a"]), text);
    host.dm(&["wake", "a"]).ok();
    text = ask("a", &text);
    host.dm(&["checkpoint", "a"]).ok();
    host.dm(&["restore", "a"]).ok();
    text = ask("a", &text);
    host.dm(&["checkpoint", "--leave-running", "a"]).ok();
    host.dm(&["clone", "--name", "c", "a"]).ok();
    let of_clone = ask("c", "");
    text = ask("a", &text);
    assert_eq!(shown(&host, &["c"]), of_clone, "the log of the clone has the clone's lines only");
    host.dm(&["restart", "--time", "1", "a"]).ok();
    text += "begun\n";
    assert!(wait_until(LONG, || shown(&host, &["a"]) == text), "{}", shown(&host, &["a"]));
    host.dm(&["rm", "--force", "a", "c"]).ok();
}

#[test]
fn vm_checkpoint_moves_between_the_drivers() {
    let host = Host::with_busybox();
    let script = "trap 'echo asked' USR1; echo begun; while :; do sleep 0.2; done";
    for (driver, other) in [("k8s-file", "file"), ("file", "k8s-file")] {
        let net = ["--net", "none"];
        let words = ["run", "-d", net[0], net[1], "--log-driver", driver, "--name", "a", "busybox"];
        host.dm(&[&words[..], &["sh", "-c", script]].concat()).ok();
        assert!(wait_until(LONG, || shown(&host, &["a"]) == "begun\n"));
        let archive = host.dir().join(format!("{driver}.archive")).display().to_string();
        host.dm(&["checkpoint", "--archive", "--to", &archive, "a"]).ok();
        let import = ["checkpoint", "import", "--log-driver", other, "--name", "b"];
        host.dm(&[&import[..], &net, &[&archive]].concat()).ok();
        host.dm(&["restore", "b"]).ok();
        host.dm(&["kill", "-s", "USR1", "b"]).ok();
        let is_shown = || shown(&host, &["b"]) == "asked\n";
        assert!(wait_until(LONG, is_shown), "{driver}: {}", shown(&host, &["b"]));
        host.dm(&["rm", "--force", "a", "b"]).ok();
    }
}

#[test]
fn vm_plain_log_is_readable_and_has_no_times() {
    let host = Host::with_busybox();
    let words = ["run", "-d", "--log-driver", "file", "--name", "a", "busybox", "sh", "-c"];
    host.dm(&[&words[..], &["echo one; echo two >&2"]].concat()).ok();
    host.dm(&["wait", "a"]).ok();
    let check = || {
        let out = host.dm(&["logs", "a"]);
        assert_eq!((out.stdout.as_str(), out.stderr.as_str()), ("one\n", "two\n"));
        let refused = host.dm(&["logs", "-t", "a"]).fails();
        assert!(refused.contains("--log-driver k8s-file"), "{refused}");
    };
    check();
    // A container made by a program without drivers.
    let config = directory(&host, "a").join("config.json");
    let text = std::fs::read_to_string(&config).expect("a configuration");
    let mut record: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let driver = record.as_object_mut().expect("an object").remove("log_driver");
    assert_eq!(driver, Some("file".into()));
    std::fs::write(&config, record.to_string()).expect("write the file");
    check();
    // Without a log.
    let words = ["run", "-d", "--log-driver", "none", "--name", "b", "busybox", "echo", "one"];
    host.dm(&words).ok();
    host.dm(&["wait", "b"]).ok();
    assert!(host.dm(&["logs", "b"]).fails().contains("--log-driver none"));
    let words = ["run", "-d", "--log-driver", "journald", "busybox", "true"];
    assert!(host.dm(&words).fails().contains("k8s-file, file or none"));
}

#[test]
fn vm_driver_without_an_option_is_that_of_the_configuration() {
    let host = Host::with_busybox();
    let driver = |name: &str, options: &[&str]| {
        host.dm(&[&["create", "--name", name], options, &["busybox", "true"]].concat()).ok();
        let config = std::fs::read_to_string(directory(&host, name).join("config.json"));
        let config: serde_json::Value =
            serde_json::from_str(&config.expect("a configuration")).expect("JSON");
        config["log_driver"].as_str().expect("a driver").to_owned()
    };
    assert_eq!(driver("a", &[]), "file");
    let settings = host.root().join("etc/config.toml");
    std::fs::create_dir_all(settings.parent().expect("a directory")).expect("make a directory");
    std::fs::write(&settings, "[run]\nlog-driver = \"k8s-file\"\n").expect("write the settings");
    assert_eq!(driver("b", &[]), "k8s-file");
    assert_eq!(driver("c", &["--log-driver", "none"]), "none");
    std::fs::write(&settings, "[run]\nlog-driver = \"syslog\"\n").expect("write the settings");
    assert!(host.dm(&["create", "busybox", "true"]).fails().contains("syslog"));
}

#[test]
fn vm_output_of_an_attached_run_is_logged_with_times() {
    let host = Host::with_busybox();
    let words = ["run", "--log-driver", "k8s-file", "--name", "a", "busybox", "sh", "-c"];
    let out = host.dm(&[&words[..], &["echo one; echo two >&2; exit 3"]].concat());
    assert_eq!((out.status, out.stdout.as_str(), out.stderr.as_str()), (3, "one\n", "two\n"));
    let out = host.dm(&["logs", "a"]);
    assert_eq!((out.stdout.as_str(), out.stderr.as_str()), ("one\n", "two\n"));
    assert!(shown(&host, &["-t", "a"]).lines().all(|line| line.as_bytes()[10] == b'T'));
    host.dm(&["start", "a"]).ok();
    host.dm(&["wait", "a"]).ok();
    assert_eq!(host.dm(&["logs", "a"]).stdout, "one\none\n");
}
