//! Containers made by older programs are handled by today's.
//!
//! `./test nightly` builds the programs of an older commit in `target/old` (stage `old`), and this module
//! starts containers with them: one that runs, one that is asleep, one that is stopped, with the keeper of
//! the older programs. Today's programs then list, call, wake, stop, start and remove them.

use std::path::PathBuf;
use std::time::Duration;

use dormouse_testkit::{Host, dormouse, image, slowness, soon, wait_until};

/// `dormouse` of the older commit, beside its keeper.
fn old_dormouse() -> PathBuf {
    let target = image::cache().parent().expect("target/testkit has a parent").to_owned();
    let path = target.join("old/dormouse");
    assert!(path.is_file(), "no {}: `./test nightly old` builds it", path.display());
    path
}

/// The next number of a server that counts its connections, from the host.
#[track_caller]
fn call(host: &Host, name: &str) -> String {
    let address = host.address_of(name);
    let mut answer = String::new();
    let answered = wait_until(soon(), || {
        let mut probe = host.command(image::probe());
        probe.args(["ask", &address, "80"]);
        let out = dormouse_testkit::run(probe, b"", Duration::from_secs(20) * slowness());
        answer = out.stdout.trim().to_owned();
        out.status == 0
    });
    assert!(answered, "no answer from {name}");
    answer
}

#[test]
fn big_containers_of_older_programs_are_handled() {
    let mut host = Host::with_program(old_dormouse());
    host.import(&image::busybox(), "busybox");
    for name in ["runs", "sleeps", "stopped"] {
        host.dm(&["run", "-d", "--name", name, "busybox", "probe", "count", "0.0.0.0", "80"]).ok();
        assert_eq!(call(&host, name), "call 1");
    }
    host.dm(&["sleep", "sleeps"]).ok();
    host.dm(&["stop", "-t", "1", "stopped"]).ok();
    host.set_program(dormouse());

    for (name, state) in [("runs", "running"), ("sleeps", "asleep"), ("stopped", "stopped")] {
        assert_eq!(host.state_of(name), state);
    }
    assert_eq!(host.dm(&["ps", "--all", "--quiet"]).ok().lines().count(), 3);
    // The running server answers; exec(2) inside works under the keeper of the older programs.
    assert_eq!(call(&host, "runs"), "call 2");
    assert_eq!(host.dm(&["exec", "runs", "echo", "inside"]).ok().trim(), "inside");
    // A connection wakes the asleep server with its memory.
    assert_eq!(call(&host, "sleeps"), "call 2");
    host.wait_for_state("sleeps", "running");
    // Today's programs suspend what older programs started, and resume it.
    host.dm(&["sleep", "runs"]).ok();
    assert_eq!(call(&host, "runs"), "call 3");
    host.dm(&["start", "stopped"]).ok();
    assert_eq!(call(&host, "stopped"), "call 1");
    for name in ["runs", "sleeps", "stopped"] {
        host.dm(&["stop", "-t", "1", name]).ok();
        host.dm(&["rm", name]).ok();
    }
    assert_eq!(host.dm(&["ps", "--all", "--quiet"]).ok(), "");
}
