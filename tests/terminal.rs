//! Terminals: sizes, signals, detach and attach.

use std::time::Duration;

use dormouse_record::Thing;
use dormouse_testkit::{Host, Terminal};

use crate::checkpoint::{newest, rewrite};

#[test]
fn vm_run_with_terminal_is_interactive_and_resizes() {
    let host = Host::with_busybox();
    let command = host.dormouse(&["run", "--rm", "-it", "--net", "none", "busybox", "sh"]);
    let mut terminal = Terminal::spawn(&command);
    terminal.send("test -t 0 && test -t 1 && echo is a tty\n");
    terminal.expect("\nis a tty");
    terminal.send("stty size\n");
    terminal.expect("24 80");
    terminal.resize(50, 132);
    std::thread::sleep(Duration::from_millis(300));
    terminal.send("stty size\n");
    terminal.expect("50 132");
    terminal.send("tty\n");
    terminal.expect("/dev/pts/0");
    terminal.send("exit 6\n");
    assert_eq!(terminal.wait(), 6);
}

#[test]
fn vm_control_c_reaches_program_inside_only() {
    let host = Host::with_busybox();
    let command = host.dormouse(&["run", "--rm", "-it", "--net", "none", "busybox", "sh"]);
    let mut terminal = Terminal::spawn(&command);
    // Input is echoed by the outer terminal until a process inside reads it. Only output of the
    // shell shows that the shell runs.
    terminal.send("echo re''ady; sleep 1000; echo status $?\n");
    terminal.expect("ready");
    std::thread::sleep(Duration::from_millis(500));
    terminal.send("\u{3}");
    terminal.expect("^C");
    terminal.send("echo still here\n");
    terminal.expect("\nstill here");
    terminal.send("exit\n");
    terminal.wait();
}

#[test]
fn detached_container_runs_on_and_is_attached_again() {
    let host = Host::with_busybox();
    let command = host.dormouse(&["run", "-it", "--name", "a", "--net", "none", "busybox", "sh"]);
    let mut terminal = Terminal::spawn(&command);
    terminal.send("echo $((40 + 2))\n");
    terminal.expect("42");
    terminal.send("\u{10}\u{11}");
    assert_eq!(terminal.wait(), 0);
    assert_eq!(host.state_of("a"), "running");
    let mut terminal = Terminal::spawn(&host.dormouse(&["attach", "a"]));
    terminal.send("echo $((20 + 3))\n");
    terminal.expect("23");
    terminal.send("exit 4\n");
    assert_eq!(terminal.wait(), 4);
    host.wait_for_state("a", "stopped");
}

#[test]
fn killed_terminal_leaves_container_running() {
    let host = Host::with_busybox();
    let command = host.dormouse(&["run", "-it", "--name", "a", "--net", "none", "busybox", "sh"]);
    let mut terminal = Terminal::spawn(&command);
    terminal.send("echo $((50 + 5))\n");
    terminal.expect("55");
    drop(terminal);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(host.state_of("a"), "running");
    let mut terminal = Terminal::spawn(&host.dormouse(&["attach", "a"]));
    terminal.send("echo $((60 + 6)); exit\n");
    terminal.expect("66");
    terminal.wait();
}

/// A client stays attached to the terminal of an asleep container, and its input wakes the container.
#[test]
fn vm_terminal_stays_attached_over_sleep() {
    let host = Host::with_busybox();
    let run = ["run", "-it", "--name", "a", "--net", "none", "busybox", "sh"];
    let mut terminal = Terminal::spawn(&host.dormouse(&run));
    terminal.send("x=40; echo $((x + 2))\n");
    terminal.expect("42");
    for round in 1..=3 {
        host.put_to_sleep("a");
        assert_eq!(host.state_of("a"), "asleep");
        terminal.resize(50 + round, 100);
        terminal.send(&format!("echo $((x + 100 * {round})); stty size\n"));
        terminal.expect(&format!("\n{}", 40 + 100 * round));
        terminal.expect(&format!("{} 100", 50 + round));
        assert_eq!(host.state_of("a"), "running");
    }
    // It is woken by another event, and its output appears.
    terminal.send("while ! test -e /go; do sleep 0.01; done; echo again $((x + 3)); sleep 1000\n");
    terminal.expect("sleep 1000");
    host.wait_inside("a", "pidof sleep");
    host.dm(&["sleep", "a"]).ok();
    host.dm(&["exec", "a", "touch", "/go"]).ok();
    terminal.expect("again 43");
    terminal.send("\u{3}");
    terminal.send("echo $((x + 4))\n");
    terminal.expect("\n44");
    // The keys that detach wake nothing.
    host.put_to_sleep("a");
    terminal.send("\u{10}\u{11}");
    assert_eq!(terminal.wait(), 0);
    assert_eq!(host.state_of("a"), "asleep");
    // A client that has attached later, and the exit status.
    let mut terminal = Terminal::spawn(&host.dormouse(&["attach", "a"]));
    terminal.send("echo $((x + 5))\n");
    terminal.expect("\n45");
    host.put_to_sleep("a");
    terminal.send("exit 7\n");
    assert_eq!(terminal.wait(), 7);
    host.wait_for_state("a", "stopped");
}

/// A sleep would seem to be the exit for which a command waits.
#[test]
fn vm_sleep_is_refused_while_a_command_waits_for_the_exit() {
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--name", "a", "--net", "none", "busybox", "sleep", "1000"]).ok();
    let mut waiter = host.dormouse(&["wait", "a"]);
    let mut waiter = waiter.stdout(std::process::Stdio::null()).spawn().expect("it starts");
    let mut refused = String::new();
    // The command may not wait yet.
    dormouse_testkit::wait_until(Duration::from_secs(20), || {
        refused = host.dm(&["sleep", "a"]).stderr;
        let is_asleep = refused.is_empty();
        if is_asleep {
            host.dm(&["wake", "a"]).ok();
        }
        !is_asleep
    });
    assert!(refused.contains("'a' does not sleep while a command waits for its exit"), "{refused}");
    assert_eq!(host.state_of("a"), "running");
    waiter.kill().expect("our child");
    waiter.wait().expect("our child");
    host.put_to_sleep("a");
}

/// The end of an asleep container ends its attached client.
#[test]
fn vm_end_of_a_sleeper_ends_its_attached_client() {
    let host = Host::with_busybox();
    for (verb, code) in [(&["kill", "a"][..], 137), (&["rm", "--force", "a"], 125)] {
        let run = ["run", "-it", "--name", "a", "--net", "none", "busybox", "sh"];
        let mut terminal = Terminal::spawn(&host.dormouse(&run));
        terminal.send("echo $((30 + 3))\n");
        terminal.expect("33");
        host.put_to_sleep("a");
        host.dm(verb).ok();
        assert_eq!(terminal.wait(), code, "{verb:?}");
        host.dm(&["rm", "--force", "a"]);
    }
}

#[test]
fn vm_exec_with_terminal_has_size_and_exit_status() {
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--name", "a", "--net", "none", "busybox", "sleep", "1000"]).ok();
    let mut terminal = Terminal::spawn(&host.dormouse(&["exec", "-it", "a", "sh"]));
    terminal.resize(40, 100);
    std::thread::sleep(Duration::from_millis(300));
    terminal.send("stty size; tty\n");
    terminal.expect("40 100");
    terminal.expect("/dev/pts/");
    terminal.send("exit 3\n");
    assert_eq!(terminal.wait(), 3);
    assert_eq!(host.state_of("a"), "running");
}

#[test]
fn foreground_command_forwards_signals() {
    let host = Host::with_busybox();
    let script = "trap 'echo asked; exit 9' TERM; echo ready; while :; do sleep 0.1; done";
    let child = host
        .dormouse(&["run", "--rm", "--name", "a", "--net", "none", "busybox", "sh", "-c", script])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("busybox starts");
    let ready = || host.dm(&["logs", "a"]).stdout.contains("ready");
    // With --rm the log may be removed: the state suffices.
    dormouse_testkit::wait_until(Duration::from_secs(3), ready);
    host.wait_for_state("a", "running");
    std::thread::sleep(Duration::from_millis(300));
    host.sh(&format!("kill -TERM {}", child.id())).ok();
    let out = child.wait_with_output().expect("our child");
    assert_eq!(out.status.code(), Some(9), "{}", String::from_utf8_lossy(&out.stdout));
}

/// Programs of a container without a terminal of its own open some, also after a restore and a sleep.
#[test]
fn vm_detached_container_opens_terminals() {
    let host = Host::with_busybox();
    let script = "exec 3<>/dev/ptmx && echo open && sleep 1000";
    host.dm(&["run", "-d", "--name", "a", "--net", "none", "busybox", "sh", "-c", script]).ok();
    let is_open = |script: &str| host.wait_inside("a", script);
    is_open("test -c /dev/pts/0 && ls -l /proc/1/fd/3 | grep -q ptmx");
    assert_eq!(host.dm(&["exec", "a", "stat", "-c", "%a %u:%g", "/dev/pts/0"]).ok(), "620 0:5");
    // Each open of /dev/ptmx makes one more.
    let more = "exec 3<>/dev/ptmx 4<>/dev/ptmx; ls /dev/pts";
    assert_eq!(host.dm(&["exec", "a", "sh", "-c", more]).ok(), "0\n1\n2\nptmx");
    host.dm(&["checkpoint", "a"]).ok();
    host.dm(&["restore", "a"]).ok();
    is_open("test -c /dev/pts/0 && ls -l /proc/1/fd/3 | grep -q ptmx");
    host.dm(&["sleep", "a"]).ok();
    assert_eq!(host.state_of("a"), "asleep");
    is_open("test -c /dev/pts/0 && ls -l /proc/1/fd/3 | grep -q ptmx");
    assert_eq!(host.dm(&["exec", "a", "sh", "-c", more]).ok(), "0\n1\n2\nptmx");
    host.dm(&["rm", "-f", "a"]).ok();
}

/// A container may be without a devpts, and gets one by `exec --tty`.
#[test]
fn devpts_is_left_out_on_request() {
    let host = Host::with_busybox();
    let run =
        ["run", "-d", "--name", "a", "--net", "none", "--devpts", "no", "busybox", "sleep", "1000"];
    host.dm(&run).ok();
    let mounts = ["exec", "a", "cat", "/proc/mounts"];
    assert!(!host.dm(&mounts).ok().contains("devpts"));
    // The mount is looked at meanwhile: a restore makes it again only for a terminal.
    let words = ["exec", "-t", "a", "sh", "-c", "tty; grep -c devpts /proc/mounts"];
    let mut terminal = Terminal::spawn(&host.dormouse(&words));
    terminal.expect("/dev/pts/0");
    terminal.expect("1");
    assert_eq!(terminal.wait(), 0);
    host.dm(&["rm", "-f", "a"]).ok();
    // One that the operator mounts there replaces that of the engine.
    let words = [
        "run",
        "--rm",
        "--net",
        "none",
        "--mount",
        "type=devpts",
        "busybox",
        "cat",
        "/proc/mounts",
    ];
    assert_eq!(host.dm(&words).ok().matches("devpts /dev/pts").count(), 1);
}

/// The terminals of the host (kernel.pty.max, 4,096) are for all containers, so a few cannot take them all.
#[test]
fn terminals_of_a_container_are_bounded() {
    let host = Host::with_busybox();
    let open = "n=0; while [ $n -lt 70 ]; do n=$((n+1)); \
                sh -c 'exec 3<>/dev/ptmx; exec sleep 1000' 2>/refused.$n & done; wait";
    for (name, script) in [("a", open), ("b", "exec sleep 1000")] {
        host.dm(&["run", "-d", "--name", name, "--net", "none", "busybox", "sh", "-c", script])
            .ok();
    }
    // A shell writes its error in pieces, so each has a file of its own.
    let is_full = "test $(ls /dev/pts | grep -c '^[0-9]') = 64 && \
                   test $(cat /refused.* | grep -c ptmx) = 6";
    host.wait_inside("a", is_full);
    host.dm(&["exec", "b", "sh", "-c", "exec 3<>/dev/ptmx"]).ok();
    // More are not made by a mount of the operator, or of `exec`.
    for options in [&["--mount", "type=devpts"][..], &["-t"]] {
        let words =
            [&["run", "--rm", "--net", "none"], options, &["busybox", "cat", "/proc/mounts"]];
        let mounts = host.dm(&words.concat()).ok();
        assert!(mounts.contains("max=64"), "{mounts}");
    }
}

/// A container of an older program had up to 256 terminals.
#[test]
fn checkpoint_with_more_terminals_than_the_bound_is_restored() {
    let host = Host::with_busybox();
    let script = "exec sleep 1000 <>/dev/ptmx";
    host.dm(&["run", "-d", "--name", "a", "--net", "none", "busybox", "sh", "-c", script]).ok();
    host.wait_inside("a", "test -c /dev/pts/0 && grep -q sleep /proc/1/cmdline");
    host.dm(&["checkpoint", "a"]).ok();
    rewrite(&newest(&host, "a"), |records| {
        for object in &mut records.objects {
            if let Thing::Terminal(terminal) = &mut object.thing {
                terminal.number = 255;
            }
        }
    });
    host.dm(&["restore", "a"]).ok();
    assert_eq!(host.dm(&["exec", "a", "ls", "/dev/pts"]).ok(), "255\nptmx");
    // One without so many has the bound again.
    host.dm(&["stop", "--time", "0", "a"]).ok();
    host.dm(&["start", "a"]).ok();
    let mounts = host.dm(&["exec", "a", "cat", "/proc/mounts"]).ok();
    assert!(mounts.contains("max=64"), "{mounts}");
}
