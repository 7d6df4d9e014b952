//! Who calls a container that sleeps by what lies on a volume: unix sockets, and files that are watched.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use dormouse_testkit::{Host, slowness, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

fn soon() -> Duration {
    Duration::from_secs(20) * slowness()
}

/// A container `x` (`probe local`) with a volume, and what it has connected to outside.
struct Local {
    host: Host,
    dir: TempDir,
    outside: UnixStream,
}

impl Local {
    #[track_caller]
    fn start() -> Self {
        let host = Host::with_busybox();
        // A name of 108 bytes at most fits into an address.
        let dir = tempfile::Builder::new().prefix("v").tempdir_in("/tmp").expect("made");
        let path = |name: &str| dir.path().join(name);
        let watched = path("watched");
        std::fs::create_dir(&watched).expect("it can be made");
        for place in [dir.path(), &watched] {
            let all = std::fs::Permissions::from_mode(0o777);
            std::fs::set_permissions(place, all).expect("they are ours");
        }
        let listener = UnixListener::bind(path("outside")).expect("it is free");
        let all = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(path("outside"), all).expect("it is ours");
        let volume = format!("{}:/v", dir.path().display());
        let serve = ["busybox", "probe", "local", "/v"];
        host.dm(&[&["run", "-d", "--name", "x", "-v", &volume], &serve[..]].concat()).ok();
        let (outside, _) = listener.accept().expect("it connects");
        let stream = path("stream");
        assert!(wait_until(soon(), || stream.exists()), "it listens");
        Self { host, dir, outside: limited(outside) }
    }

    /// A caller of the host: a connection belongs to the network of whoever makes it.
    #[track_caller]
    fn connect(&self) -> UnixStream {
        let dir = self.dir.path().to_owned();
        self.host.in_network(move || connect(&dir)).join().expect("whoever calls is never refused")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    #[track_caller]
    fn put_to_sleep(&self) {
        self.host.dm(&["sleep", "x"]).ok();
        assert_eq!(self.host.state_of("x"), "asleep");
    }

    #[track_caller]
    fn is_woken(&self) {
        let is_awake = || self.host.state_of("x") == "running";
        assert!(wait_until(soon(), is_awake), "it sleeps on");
    }
}

fn limited(stream: UnixStream) -> UnixStream {
    stream.set_read_timeout(Some(soon())).expect("a limit can be set");
    stream
}

#[track_caller]
fn connect(dir: &Path) -> UnixStream {
    limited(UnixStream::connect(dir.join("stream")).expect("whoever calls is never refused"))
}

/// Says a line; what comes back.
#[track_caller]
fn say(mut stream: &UnixStream, word: &str) -> String {
    stream.write_all(format!("{word}\n").as_bytes()).expect("it is connected");
    let mut said = String::new();
    BufReader::new(stream).read_line(&mut said).expect("it is answered in time");
    said.trim().to_owned()
}

#[test]
fn vm_who_calls_a_unix_socket_on_a_volume_wakes_it() {
    let local = Local::start();
    let open = local.connect();
    assert_eq!(say(&open, "a"), "1 a");
    for round in 0..3 {
        let before = 1 + round * 4;
        local.put_to_sleep();
        let new = local.connect();
        assert_eq!(say(&new, "new"), format!("{} new", before + 1));
        drop(new);
        local.put_to_sleep();
        assert_eq!(say(&open, "open"), format!("{} open", before + 2), "it goes on");
        local.put_to_sleep();
        // The other way round: it has connected to somebody outside.
        assert_eq!(say(&local.outside, "outside"), format!("{} outside", before + 3));
        local.put_to_sleep();
        let sender = UnixDatagram::unbound().expect("it can be made");
        sender.send_to(b"datagram", local.path("datagram")).expect("it is received");
        local.is_woken();
        let line = format!("{} datagram", before + 4);
        let is_told = || local.host.dm(&["logs", "x"]).stdout.contains(&line);
        assert!(wait_until(soon(), is_told), "it is not told of it");
    }
    // Its end is heard, too.
    local.put_to_sleep();
    drop(open);
    local.is_woken();
}

#[test]
fn vm_many_who_call_a_unix_socket_while_it_falls_asleep_are_answered() {
    let local = Local::start();
    let dir = local.dir.path().to_owned();
    let callers = local.host.in_network(move || {
        (0..200).map(|n| (n, say(&connect(&dir), "x"))).collect::<Vec<(u32, String)>>()
    });
    while !callers.is_finished() {
        // It may have a caller just now who keeps it from falling asleep.
        local.host.dm(&["sleep", "x"]);
    }
    for (n, said) in callers.join().expect("all were answered") {
        assert_eq!(said, format!("{} x", n + 1));
    }
}

#[test]
fn vm_a_file_that_is_made_on_a_volume_wakes_who_watches() {
    let local = Local::start();
    for round in 0..3 {
        local.put_to_sleep();
        let name = format!("file{round}");
        std::fs::write(local.path("watched").join(&name), "").expect("it can be made");
        local.is_woken();
        let line = format!("saw {name} by watch 1");
        let is_told = || local.host.dm(&["logs", "x"]).stdout.contains(&line);
        assert!(wait_until(soon(), is_told), "round {round}: it is not told of it");
    }
    assert_eq!(local.host.dm(&["logs", "x"]).stdout.matches("saw").count(), 3, "each once");
}

#[test]
fn what_only_sleep_can_do_is_told() {
    let local = Local::start();
    let out = local.host.dm(&["explain", "x"]);
    assert!(out.status == 1 && out.stdout.contains("is outside the container"), "{out}");
    assert!(out.stdout.contains("it can sleep all the same"), "{out}");
    let out = local.host.dm(&["checkpoint", "x"]);
    assert!(out.status != 0 && out.stderr.contains("is outside the container"), "{out}");
    assert_eq!(say(&local.outside, "a"), "1 a", "it goes on");
}

#[test]
fn vm_without_keeper_and_vault_a_unix_connection_is_over_and_the_rest_is_made_again() {
    let local = Local::start();
    let mut open = local.connect();
    assert_eq!(say(&open, "a"), "1 a");
    local.put_to_sleep();
    let ours = |line: &str| line.contains("dormouse-keeper") || line.contains("dormouse-vault");
    let both = || local.host.processes().into_iter().filter(|(_, line)| ours(line));
    let pids: Vec<u32> = both().map(|(pid, _)| pid).collect();
    assert_eq!(pids.len(), 2, "somebody holds it");
    for signal in [Signal::STOP, Signal::KILL] {
        for pid in &pids {
            let pid = Pid::from_raw(*pid as i32).expect("a pid");
            kill_process(pid, signal).expect("it lives");
        }
    }
    assert!(wait_until(soon(), || both().count() == 0));
    let mut said = Vec::new();
    assert_eq!(open.read_to_end(&mut said).ok(), Some(0), "its peer is told");
    local.host.dm(&["wake", "x"]).ok();
    assert_eq!(say(&local.connect(), "b"), "2 b");
    std::fs::write(local.path("watched/file"), "").expect("it can be made");
    let is_told = || local.host.dm(&["logs", "x"]).stdout.contains("saw file by watch 1");
    assert!(wait_until(soon(), is_told));
}
