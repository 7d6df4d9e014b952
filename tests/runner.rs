//! Commands that are executed by a runner of the keeper: as by a process of their own, and killed with it.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use dormouse_testkit::{Host, soon, wait_until};

/// A host whose commands are executed by runners, two at most.
fn host() -> Host {
    let host = Host::with_busybox();
    fs::write(host.root().join("etc/config.toml"), "[keeper]\nlinger = \"0s\"\nrunners = 2\n")
        .expect("written");
    // The first keeper that reads it.
    host.dm(&["run", "-d", "--name", "stays", "busybox", "sleep", "1000"]).ok();
    host
}

/// Pids of the runners.
fn runners(host: &Host) -> Vec<u32> {
    let all = host.processes().into_iter();
    all.filter(|(_, line)| line.ends_with(" internal runner")).map(|(pid, _)| pid).collect()
}

/// Kills the runners.
fn kill_runners(host: &Host) {
    for pid in runners(host) {
        host.sh(&format!("kill -KILL {pid} || true")).ok();
    }
}

/// A command that a runner may execute.
fn command(host: &Host, words: &[&str]) -> Command {
    without_test_variables(host.dormouse(words))
}

/// A variable with that prefix keeps a command in its process.
fn without_test_variables(mut command: Command) -> Command {
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("DORMOUSE_")) {
        command.env_remove(name);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs a command, and returns what its caller sees, and whether runners have worked meanwhile.
fn seen(host: &Host, mut command: Command) -> ((Option<i32>, String, String), bool) {
    let before = turns(host);
    let output = command.output().expect("it starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    let seen = (output.status.code(), text(output.stdout), text(output.stderr));
    // A command that is declined takes a runner two or three turns, one that is executed more.
    (seen, turns(host) > before + 5)
}

/// How often runners have waited.
fn turns(host: &Host) -> u64 {
    let turns = |pid: u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.map_or(0, |count| count.trim().parse().expect("a number"))
    };
    runners(host).into_iter().map(turns).sum()
}

/// Executes commands until a runner is there.
fn await_runner(host: &Host) {
    let is_there = || {
        seen(host, command(host, &["inspect", "stays"]));
        !runners(host).is_empty()
    };
    assert!(wait_until(soon(), is_there), "no runner: {:?}", host.processes());
}

/// Starts a command that a runner executes: if one is killed now, the command ends.
fn start_in_runner(host: &Host, words: &[&str], is_begun: impl Fn() -> bool) -> Child {
    await_runner(host);
    let child = command(host, words).spawn().expect("it starts");
    assert!(wait_until(soon(), is_begun), "it does not begin: {words:?}");
    child
}

#[test]
fn command_of_a_runner_is_as_one_of_a_process() {
    let host = host();
    await_runner(&host);
    let here = host.dir().join("here");
    fs::create_dir(&here).expect("made");
    fs::write(here.join("file"), "of the caller\n").expect("written");
    let arms: [(&[&str], i32); 9] = [
        (&["run", "--rm", "busybox", "sh", "-c", "echo out; echo err >&2; exit 7"], 7),
        (&["run", "--rm", "busybox", "sh", "-c", "sh -c 'kill -9 $$'; exit"], 137),
        (&["run", "--rm", "busybox", "/none"], 127),
        (&["run", "--rm", "-i", "busybox", "cat"], 0),
        (&["run", "--rm", "-e", "OF_CALLER", "busybox", "sh", "-c", "echo $OF_CALLER"], 0),
        (&["run", "--rm", "-v", "./here:/here:ro", "busybox", "cat", "/here/file"], 0),
        (&["run", "--none", "busybox"], 125),
        (&["exec", "stays", "sh", "-c", "echo in; exit 3"], 3),
        (&["inspect", "none"], 125),
    ];
    for (words, code) in arms {
        let input = fs::File::open(here.join("file")).expect("there");
        let prepare = |mut command: Command| {
            command.env("OF_CALLER", "the caller's");
            command.stdin(input.try_clone().expect("duplicated"));
            rustix::fs::seek(&input, rustix::fs::SeekFrom::Start(0)).expect("at its start");
            command
        };
        let under = ["env", "-C", host.dir().to_str().expect("UTF-8")];
        let there = || without_test_variables(host.dormouse_under(&under, words));
        let mut alone = prepare(there());
        alone.env("DORMOUSE_ALONE", "1");
        let (alone, _) = seen(&host, alone);
        assert_eq!(alone.0, Some(code), "{words:?}: {alone:?}");
        // While runners are busy, it is executed alone. One that fails at once takes a runner few turns.
        let is_by_runner = || {
            let (by_runner, worked) = seen(&host, prepare(there()));
            assert_eq!(by_runner, alone, "{words:?}");
            worked || code == 125
        };
        assert!(wait_until(soon(), is_by_runner), "no runner executes {words:?}");
    }
}

#[test]
fn more_commands_than_runners_are_executed() {
    let host = host();
    await_runner(&host);
    for _ in 0..3 {
        let words = ["run", "--rm", "busybox", "sh", "-c", "echo $$; sleep 0.2; exit 4"];
        let all = [(); 6].map(|()| command(&host, &words).spawn().expect("it starts"));
        for child in all {
            let output = child.wait_with_output().expect("it ends");
            assert_eq!(output.status.code(), Some(4), "{output:?}");
            assert_eq!(output.stdout, b"1\n");
        }
    }
    assert!(runners(&host).len() <= 2, "{:?}", runners(&host));
}

#[test]
fn killed_caller_ends_its_command_and_no_container() {
    let host = host();
    let runs = || host.dm(&["exec", "x", "true"]).status == 0;
    let mut child =
        start_in_runner(&host, &["run", "--name", "x", "busybox", "sleep", "1000"], runs);
    let before = runners(&host);
    child.kill().expect("killed");
    child.wait().expect("it ends");
    let is_gone = || before.iter().any(|pid| !runners(&host).contains(pid));
    assert!(wait_until(soon(), is_gone), "{before:?} live on");
    assert_eq!(host.state_of("x"), "running");
    host.dm(&["rm", "--force", "x"]).ok();
}

#[test]
fn signals_reach_the_command() {
    let host = host();
    let runs = || host.dm(&["logs", "x"]).stdout == "ready\n";
    let program = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.05; done";
    let words = ["run", "--name", "x", "busybox", "sh", "-c", program];
    let mut child = start_in_runner(&host, &words, runs);
    kill_by(&host, &child, "TERM");
    assert_eq!(child.wait().expect("it ends").code(), Some(9));

    // A verb that takes no signals dies of them, and its caller as well.
    let program = "trap '' TERM; echo ready; while :; do sleep 0.05; done";
    host.dm(&["rm", "x"]).ok();
    host.dm(&["run", "-d", "--name", "x", "busybox", "sh", "-c", program]).ok();
    assert!(wait_until(soon(), runs), "it is not ready");
    let mut child = start_in_runner(&host, &["stop", "--time", "1000", "x"], || true);
    std::thread::sleep(std::time::Duration::from_millis(300));
    kill_by(&host, &child, "INT");
    assert_eq!(child.wait().expect("it ends").signal(), Some(2));
    assert_eq!(host.state_of("x"), "running");
    host.dm(&["rm", "--force", "x"]).ok();
}

fn kill_by(host: &Host, child: &Child, signal: &str) {
    host.sh(&format!("kill -{signal} {}", child.id())).ok();
}

#[test]
fn killed_runner_is_reported_and_replaced() {
    let host = host();
    let runs = || host.dm(&["exec", "x", "true"]).status == 0;
    let child = start_in_runner(&host, &["run", "--name", "x", "busybox", "sleep", "1000"], runs);
    kill_runners(&host);
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    let text = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(text.contains("was killed"), "{text}");
    assert_eq!(host.state_of("x"), "running");
    host.dm(&["rm", "--force", "x"]).ok();
    await_runner(&host);
}

#[test]
fn caller_with_other_rights_executes_its_command_itself() {
    let host = host();
    let tools: [&[&str]; 4] = [
        &["setpriv", "--no-new-privs"],
        &["setpriv", "--bounding-set", "-sys_time"],
        &["unshare", "--uts"],
        &["unshare", "--mount", "--propagation", "unchanged"],
    ];
    for tool in tools {
        await_runner(&host);
        let words = ["exec", "stays", "sh", "-c", "echo begun; sleep 1; exit 5"];
        let child = without_test_variables(host.dormouse_under(tool, &words)).spawn();
        let child = child.expect("it starts");
        std::thread::sleep(std::time::Duration::from_millis(400));
        kill_runners(&host);
        let output = child.wait_with_output().expect("it ends");
        assert_eq!(output.status.code(), Some(5), "{tool:?}: {output:?}");
    }
}

#[test]
fn malformed_commands_are_dropped() {
    use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
    let host = host();
    await_runner(&host);
    let path = host.root().join("run/command.sock");
    for bytes in [&b""[..], b"DMC1", b"DMC1\xff\xff\xff\xff\0\0\0\0\x04\0\0\0run\0", &[b'x'; 200]] {
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        );
        let socket = socket.expect("a socket");
        let address = SocketAddrUnix::new(&path).expect("a short path");
        rustix::net::connect(&socket, &address).expect("connected");
        rustix::net::send(&socket, bytes, SendFlags::NOSIGNAL).expect("sent");
        drop(socket);
        let (seen, _) = seen(&host, command(&host, &["exec", "stays", "echo", "on"]));
        assert_eq!((seen.0, seen.1.as_str()), (Some(0), "on\n"), "{seen:?}");
    }
}

/// The C library has not started when these functions run, so that a call of one of its functions would jump nowhere.
#[test]
fn entry_calls_no_function_but_its_own() {
    let program = dormouse_testkit::dormouse();
    let tool = |name: &str, options: &[&str]| {
        let output = Command::new(name).args(options).arg(&program).output();
        let text = output.expect("binutils are there").stdout;
        String::from_utf8(text).expect("UTF-8")
    };
    let symbols = tool("nm", &["--numeric-sort"]);
    let of_entry = symbols.lines().filter(|line| line.contains("dormouse_entry"));
    let addresses: Vec<&str> = of_entry.filter_map(|line| line.split(' ').next()).collect();
    let (Some(first), Some(last)) = (addresses.first(), addresses.last()) else {
        panic!("the program does not begin in crate entry")
    };
    let last = u64::from_str_radix(last, 16).expect("an address") + 4096;
    let range = [format!("--start-address=0x{first}"), format!("--stop-address={last}")];
    let text = tool("objdump", &["-d", "--no-show-raw-insn", &range[0], &range[1]]);
    let (mut is_inside, mut calls) = (false, Vec::new());
    for line in text.lines() {
        if line.ends_with(">:") {
            is_inside = line.contains("dormouse_entry");
        } else if is_inside && (line.contains("\tcall") || line.contains("\tjmp")) {
            calls.push(line.rsplit_once('<').map_or(line, |(_, target)| target).to_owned());
        }
    }
    assert!(calls.iter().any(|call| call.contains("hand_over")), "{calls:?}");
    let is_own = |call: &str| {
        let is_in_table = call.contains("\tjmp    *0x"); // within the function
        let names = ["dormouse_entry", "_start>", "panicking"];
        is_in_table || names.iter().any(|name| call.contains(name))
    };
    let foreign: Vec<_> = calls.iter().filter(|call| !is_own(call)).collect();
    assert!(foreign.is_empty(), "{foreign:?}");
}
