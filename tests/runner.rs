//! Commands that are executed by a runner of the keeper: as by a process of their own, and killed with it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};

use dormouse_testkit::{Host, soon, wait_until};

/// A host with two runners at most.
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

/// Waits until a command has ended.
fn ended(child: &mut Child) -> ExitStatus {
    let mut status = None;
    let has_ended = wait_until(soon(), || {
        status = child.try_wait().expect("a child");
        status.is_some()
    });
    if !has_ended {
        let _ = child.kill();
    }
    status.expect("it ends")
}

/// Waits until a command has written its first line.
fn await_line(child: &mut Child) {
    let output = child.stdout.as_mut().expect("a pipe");
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line).expect("a line");
    assert_eq!(line, "begun\n");
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

/// A command of a container that reports that it has begun, and ends by TERM with 9.
const TRAPS: [&str; 7] = [
    "run",
    "--name",
    "x",
    "busybox",
    "sh",
    "-c",
    "trap 'exit 9' TERM; echo begun; while :; do sleep 0.05; done",
];

/// Starts a command until a runner executes one.
fn start_in_runner(host: &Host, words: &[&str]) -> (Child, u32) {
    let mut started = None;
    let is_by_runner = || {
        await_runner(host);
        let before = runners(host);
        let mut child = command(host, words).spawn().expect("it starts");
        await_line(&mut child);
        // The keeper is the parent of what a runner has started, so the runner shows by the pipe of its caller.
        let by = before.into_iter().find(|pid| has_pipe_of(*pid, child.id()));
        match by {
            Some(pid) => started = Some((child, pid)),
            None => {
                let _ = child.kill();
                let _ = child.wait();
                host.dm(&["rm", "--force", "--ignore", "x"]).ok();
            }
        }
        started.is_some()
    };
    assert!(wait_until(soon(), is_by_runner), "no runner executes {words:?}");
    started.expect("started")
}

/// Whether two processes have a pipe in common that is not a standard stream of the second one.
fn has_pipe_of(pid: u32, other: u32) -> bool {
    let pipes = |pid: u32, first: u32| {
        let all = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let number = |name: &std::ffi::OsStr| name.to_str().and_then(|it| it.parse::<u32>().ok());
        let all = all.filter(move |it| number(&it.file_name()).is_some_and(|it| it >= first));
        let all = all.filter_map(|it| fs::read_link(it.path()).ok());
        all.filter(|it| it.to_string_lossy().starts_with("pipe:")).collect::<Vec<_>>()
    };
    let own = pipes(pid, 3);
    pipes(other, 3).iter().any(|pipe| own.contains(pipe))
}

#[test]
fn killed_caller_ends_its_command_and_no_container() {
    let host = host();
    let (mut child, runner) = start_in_runner(&host, &TRAPS);
    child.kill().expect("killed");
    child.wait().expect("it ends");
    let is_gone = || !runners(&host).contains(&runner);
    assert!(wait_until(soon(), is_gone), "{runner} lives on");
    assert_eq!(host.state_of("x"), "running");
    host.dm(&["rm", "--force", "x"]).ok();
}

#[test]
fn signals_reach_the_command() {
    let host = host();
    let (mut child, _) = start_in_runner(&host, &TRAPS);
    kill_by(&host, &child, "TERM");
    kill_by(&host, &child, "CONT");
    assert_eq!(ended(&mut child).code(), Some(9));
    host.dm(&["rm", "x"]).ok();

    // A verb that takes no signals dies of them, and its caller as well.
    let program = "trap '' TERM; echo begun; while :; do sleep 0.05; done";
    host.dm(&["run", "-d", "--name", "x", "busybox", "sh", "-c", program]).ok();
    assert!(wait_until(soon(), || host.dm(&["logs", "x"]).stdout == "begun\n"), "it is not ready");
    let stop = |tool: &[&str], seconds: &str| {
        await_runner(&host);
        let words = ["stop", "--time", seconds, "x"];
        let stop = without_test_variables(host.dormouse_under(tool, &words)).spawn();
        let stop = stop.expect("it starts");
        let exe = format!("/proc/{}/exe", stop.id());
        let is_it = || fs::read_link(&exe).is_ok_and(|it| it.ends_with("dormouse"));
        assert!(wait_until(soon(), is_it), "it does not begin");
        std::thread::sleep(std::time::Duration::from_millis(300));
        stop
    };
    let mut child = stop(&["env"], "1000");
    kill_by(&host, &child, "TERM");
    kill_by(&host, &child, "CONT");
    assert_eq!(ended(&mut child).signal(), Some(15));
    assert_eq!(host.state_of("x"), "running");

    // Unless the caller ignores them.
    let mut child = stop(&["sh", "-c", "trap '' TERM; exec \"$0\" \"$@\""], "1");
    kill_by(&host, &child, "TERM");
    assert_eq!(ended(&mut child).code(), Some(0));
    assert_eq!(host.state_of("x"), "stopped");
    host.dm(&["rm", "--force", "x"]).ok();
}

fn kill_by(host: &Host, child: &Child, signal: &str) {
    host.sh(&format!("kill -{signal} {} || true", child.id())).ok();
}

#[test]
fn killed_runner_is_reported_and_replaced() {
    let host = host();
    let (mut child, runner) = start_in_runner(&host, &TRAPS);
    host.sh(&format!("kill -KILL {runner}")).ok();
    assert_eq!(ended(&mut child).code(), Some(125));
    let text = child.wait_with_output().expect("it has ended").stderr;
    let text = String::from_utf8(text).expect("UTF-8");
    assert!(text.contains("was killed"), "{text}");
    assert_eq!(host.state_of("x"), "running");
    host.dm(&["rm", "--force", "x"]).ok();
    await_runner(&host);
}

#[test]
fn commands_go_on_beyond_the_life_of_a_runner() {
    let host = host();
    await_runner(&host);
    let words = ["exec", "stays", "true"];
    let many = "n=0; while [ $n -lt 1100 ]; do \"$0\" \"$@\" || exit; n=$((n+1)); done";
    let (seen, worked) =
        seen(&host, without_test_variables(host.dormouse_under(&["sh", "-c", many], &words)));
    assert_eq!((seen, worked), ((Some(0), String::new(), String::new()), true));
}

#[test]
fn files_of_the_caller_are_its_own_when_it_has_its_exit_code() {
    let host = host();
    await_runner(&host);
    let program = host.dir().join("busybox");
    let program = program.to_str().expect("UTF-8");
    // Execution is refused while a process has the file open for writing (ETXTBSY).
    let script = format!(
        "for n in 1 2 3 4 5 6 7 8 9 10; do \"$0\" \"$@\" >{program} && chmod +x {program} && \
         {program} true || exit; rm {program}; done"
    );
    let words = ["exec", "stays", "cat", "/bin/busybox"];
    let command = without_test_variables(host.dormouse_under(&["sh", "-c", &script], &words));
    let (seen, worked) = seen(&host, command);
    assert_eq!((seen, worked), ((Some(0), String::new(), String::new()), true));
}

#[test]
fn runner_killed_at_any_time_leaves_nothing() {
    let host = host();
    for round in 0..40 {
        await_runner(&host);
        let pids = runners(&host);
        let words = ["run", "--rm", "--name", "x", "busybox", "true"];
        let child = command(&host, &words).spawn().expect("it starts");
        std::thread::sleep(std::time::Duration::from_micros(round * 250));
        for pid in pids {
            let pid = rustix::process::Pid::from_raw(pid as i32).expect("a pid");
            // It may have exited after its last command.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        let output = child.wait_with_output().expect("it ends");
        let is_killed = output.status.code() == Some(125);
        assert!(is_killed || output.status.success(), "round {round}: {output:?}");
        // What a killed command has left is completed or undone: the name is free.
        host.dm(&["rm", "--force", "--ignore", "x"]).ok();
    }
    host.await_removals();
    assert_eq!(host.dm(&["ps", "--all", "--format", "{{.Names}}"]).ok(), "stays");
    let is_gone = || host.cgroups().iter().all(|dir| containers_below(dir) <= 1);
    assert!(wait_until(soon(), is_gone), "cgroups stay: {:?}", host.cgroups());
}

/// Cgroups of containers in a hierarchy.
fn containers_below(dir: &std::path::Path) -> usize {
    let all = fs::read_dir(dir).into_iter().flatten().flatten();
    let is_id = |name: &str| name.len() == 32 && name.bytes().all(|it| it.is_ascii_hexdigit());
    all.filter(|entry| entry.file_name().to_str().is_some_and(is_id)).count()
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
        let mut child = child.expect("it starts");
        await_line(&mut child);
        kill_runners(&host);
        assert_eq!(ended(&mut child).code(), Some(5), "{tool:?}");
    }
}

#[test]
fn malformed_commands_are_dropped() {
    use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
    let host = host();
    await_runner(&host);
    let path = host.root().join("run/command.sock");
    for bytes in
        [&b""[..], b"DMC1", b"DMC1\xff\xff\xff\xff\0\0\0\0\0\0\0\0\x04\0\0\0run\0", &[b'x'; 200]]
    {
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        );
        let socket = socket.expect("a socket");
        let address = SocketAddrUnix::new(&path).expect("a short path");
        rustix::net::connect(&socket, &address).expect("connected");
        // Without a runner at rest the keeper has closed it.
        let _ = rustix::net::send(&socket, bytes, SendFlags::NOSIGNAL);
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
