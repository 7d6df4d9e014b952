//! A container sleeps without processes and answers whoever calls as if it had not.

use std::thread;
use std::time::Duration;

use dormouse_testkit::{Host, image, slowness, wait_until};

/// A server that numbers its callers: what it has in memory goes on, or the numbers would not.
const COUNT: &[&str] = &["busybox", "probe", "count", "0.0.0.0", "80"];

#[track_caller]
fn counting(options: &[&str]) -> Host {
    let host = Host::with_busybox();
    host.dm(&[&["run", "-d", "--name", "x"], options, COUNT].concat()).ok();
    host
}

/// Calls it from the host at its own address.
#[track_caller]
fn call(host: &Host) -> String {
    let address = host.address_of("x");
    let mut said = None;
    // Only the first call may come before it listens.
    wait_until(Duration::from_secs(10) * slowness(), || {
        let mut probe = host.command(image::probe());
        probe.args(["ask", &address, "80"]);
        let out = dormouse_testkit::run(probe, b"", Duration::from_secs(20) * slowness());
        let answered = out.status == 0;
        said = Some(out);
        answered
    });
    said.expect("it was asked at least once").ok().trim().to_owned()
}

#[track_caller]
fn put_to_sleep(host: &Host) {
    host.dm(&["sleep", "x"]).ok();
    assert_eq!(host.state_of("x"), "asleep");
}

/// Processes of the container, as the host sees them.
fn inside(host: &Host) -> Vec<(u32, String)> {
    host.processes().into_iter().filter(|(_, command)| command.contains("probe")).collect()
}

#[test]
fn vm_whoever_calls_wakes_it_and_is_answered() {
    let host = counting(&["-p", "8080:80"]);
    assert_eq!(call(&host), "call 1");
    assert_eq!(inside(&host).len(), 1);
    for round in 0..3 {
        put_to_sleep(&host);
        assert_eq!(inside(&host), []);
        assert_eq!(call(&host), format!("call {}", 2 + round * 2));
        assert_eq!(host.state_of("x"), "running");
        // From another machine, at the published port.
        put_to_sleep(&host);
        let said = host.neighbour_sh(&format!("busybox nc {} 8080 </dev/null", Host::ADDRESS));
        assert_eq!(said.ok().trim(), format!("call {}", 3 + round * 2));
    }
    assert!(host.dm(&["ps"]).ok().contains("Up"));
}

#[test]
fn vm_a_datagram_wakes_it_and_is_answered() {
    let host = Host::with_busybox();
    let serve = ["run", "-d", "--name", "x", "busybox", "probe", "udp-echo", "0.0.0.0", "53"];
    host.dm(&serve).ok();
    let address = host.address_of("x");
    let ask = || {
        let mut probe = host.command(image::probe());
        probe.args(["udp-ask", &address, "53", "squeak"]);
        dormouse_testkit::run(probe, b"", Duration::from_secs(10) * slowness())
    };
    assert!(wait_until(Duration::from_secs(10) * slowness(), || ask().status == 0));
    for _ in 0..3 {
        put_to_sleep(&host);
        assert_eq!(ask().ok().trim(), "squeak");
        assert_eq!(host.state_of("x"), "running");
    }
}

#[test]
fn vm_a_call_while_it_falls_asleep_is_answered() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    let address = host.address_of("x");
    for round in 0..5 * (10 / slowness().min(10)).max(1) {
        let callers: Vec<_> = (0..3)
            .map(|n| {
                let address = address.clone();
                host.in_network(move || {
                    thread::sleep(Duration::from_millis(u64::from(round % 5 + n * 3)));
                    let mut probe = std::process::Command::new(image::probe());
                    probe.args(["ask", &address, "80"]);
                    dormouse_testkit::run(probe, b"", Duration::from_secs(30) * slowness())
                })
            })
            .collect();
        // A connection that it has open keeps it awake: that is said, and nothing is harmed.
        let out = host.dm(&["sleep", "x"]);
        assert!(out.status == 0 || out.stderr.contains("TCP connection"), "{out}");
        for caller in callers {
            let said = caller.join().expect("it does not panic").ok();
            assert!(said.starts_with("call "), "{said}");
        }
    }
    let after = 5 * (10 / slowness().min(10)).max(1) * 3 + 2;
    assert_eq!(call(&host), format!("call {after}"), "every caller was counted once");
}

#[test]
fn vm_commands_wake_it_or_say_what_to_do() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    put_to_sleep(&host);
    assert_eq!(host.dm(&["exec", "x", "echo", "hello"]).ok(), "hello");
    assert_eq!(host.state_of("x"), "running");
    put_to_sleep(&host);
    host.dm(&["wake", "x"]).ok();
    assert_eq!(call(&host), "call 2");
    put_to_sleep(&host);
    host.dm(&["start", "x"]).ok();
    assert_eq!(call(&host), "call 3");
    put_to_sleep(&host);
    for command in [&["pause", "x"][..], &["checkpoint", "x"], &["rm", "x"]] {
        let out = host.dm(command);
        assert!(out.status != 0 && out.stderr.contains("asleep"), "{command:?}: {out}");
    }
    put_to_sleep(&host); // it is already
    assert_eq!(call(&host), "call 4");
}

#[test]
fn vm_an_asleep_container_is_stopped_and_removed_as_others_are() {
    let host = counting(&["-p", "8080:80"]);
    assert_eq!(call(&host), "call 1");
    put_to_sleep(&host);
    host.dm(&["stop", "x"]).ok();
    assert_eq!(host.state_of("x"), "stopped");
    let gone = host.neighbour_sh(&format!("busybox nc -w 2 {} 8080 </dev/null", Host::ADDRESS));
    assert!(gone.status != 0 || gone.stdout.is_empty(), "{gone}");
    host.dm(&["start", "x"]).ok();
    assert_eq!(call(&host), "call 1", "it was started anew");
    put_to_sleep(&host);
    host.dm(&["rm", "--force", "x"]).ok();
    assert_eq!(host.dm(&["ps", "--all", "--quiet"]).ok(), "");
}

#[test]
fn vm_what_cannot_sleep_says_why_and_goes_on() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    let mut visitor = host.dormouse(&["exec", "x", "sleep", "1000"]).spawn().expect("it starts");
    host.wait_inside("x", "pidof sleep");
    let out = host.dm(&["sleep", "x"]);
    assert!(out.status != 0 && out.stderr.contains("(sleep)"), "{out}");
    visitor.kill().expect("it runs");
    visitor.wait().expect("it was started");
    assert_eq!(host.state_of("x"), "running");
    assert_eq!(call(&host), "call 2");
    let out = host.dm(&["run", "-d", "--rm", "--name", "y", "busybox", "sleep", "1000"]);
    out.ok();
    let out = host.dm(&["sleep", "y"]);
    assert!(out.status != 0 && out.stderr.contains("--rm"), "{out}");
}

#[test]
fn vm_who_waits_for_its_end_keeps_it_awake() {
    let host = counting(&[]);
    assert_eq!(call(&host), "call 1");
    let mut waiter = host.dormouse(&["wait", "x"]).spawn().expect("it can be started");
    let refused = || {
        let out = host.dm(&["sleep", "x"]);
        if out.status == 0 {
            host.dm(&["wake", "x"]).ok(); // it did not wait yet
        }
        out.status != 0
    };
    assert!(wait_until(Duration::from_secs(10) * slowness(), refused));
    assert_eq!(call(&host), "call 2");
    host.dm(&["kill", "x"]).ok();
    assert!(waiter.wait().expect("it can be waited for").success());
}
