//! Wakes through files of a volume: unix sockets of an asleep container, and files that it watches.

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

/// A container `x` (`probe local`) with a volume, and the accepted side of its outgoing connection.
struct Local {
    host: Host,
    dir: TempDir,
    outside: UnixStream,
}

impl Local {
    #[track_caller]
    fn start() -> Self {
        let host = Host::with_busybox();
        // A socket address holds at most 108 bytes of path.
        let dir = tempfile::Builder::new().prefix("v").tempdir_in("/tmp").expect("made");
        let path = |name: &str| dir.path().join(name);
        let watched = path("watched");
        std::fs::create_dir(&watched).expect("created");
        for place in [dir.path(), &watched] {
            let all = std::fs::Permissions::from_mode(0o777);
            std::fs::set_permissions(place, all).expect("our files");
        }
        let listener = UnixListener::bind(path("outside")).expect("a free name");
        let all = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(path("outside"), all).expect("our child");
        let volume = format!("{}:/v", dir.path().display());
        let serve = ["busybox", "probe", "local", "/v"];
        host.dm(&[&["run", "-d", "--name", "x", "-v", &volume], &serve[..]].concat()).ok();
        let (outside, _) = listener.accept().expect("the container connects");
        let stream = path("stream");
        assert!(wait_until(soon(), || stream.exists()), "the server listens");
        Self { host, dir, outside: limited(outside) }
    }

    /// Connects from the host's network: a connection belongs to the network namespace of its
    /// client.
    #[track_caller]
    fn connect(&self) -> UnixStream {
        let dir = self.dir.path().to_owned();
        self.host.in_network(move || connect(&dir)).join().expect("a connection is never refused")
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
        assert!(wait_until(soon(), is_awake), "the container is not woken");
    }
}

fn limited(stream: UnixStream) -> UnixStream {
    stream.set_read_timeout(Some(soon())).expect("a timeout");
    stream
}

#[track_caller]
fn connect(dir: &Path) -> UnixStream {
    limited(UnixStream::connect(dir.join("stream")).expect("a connection is never refused"))
}

/// Sends a line, and returns the answer.
#[track_caller]
fn exchange(mut stream: &UnixStream, word: &str) -> String {
    stream.write_all(format!("{word}\n").as_bytes()).expect("the connection is open");
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).expect("an answer in time");
    answer.trim().to_owned()
}

#[test]
fn vm_unix_socket_on_volume_wakes_container() {
    let local = Local::start();
    let open = local.connect();
    assert_eq!(exchange(&open, "a"), "1 a");
    for round in 0..3 {
        let before = 1 + round * 4;
        local.put_to_sleep();
        let new = local.connect();
        assert_eq!(exchange(&new, "new"), format!("{} new", before + 1));
        drop(new);
        local.put_to_sleep();
        assert_eq!(
            exchange(&open, "open"),
            format!("{} open", before + 2),
            "the connection continues"
        );
        local.put_to_sleep();
        // The other direction: the container has connected to a process outside.
        assert_eq!(exchange(&local.outside, "outside"), format!("{} outside", before + 3));
        local.put_to_sleep();
        let sender = UnixDatagram::unbound().expect("created");
        sender.send_to(b"datagram", local.path("datagram")).expect("a receiver");
        local.is_woken();
        let line = format!("{} datagram", before + 4);
        let is_logged = || local.host.dm(&["logs", "x"]).stdout.contains(&line);
        assert!(wait_until(soon(), is_logged), "the datagram is not delivered");
    }
    // The close of a connection is delivered, too.
    local.put_to_sleep();
    drop(open);
    local.is_woken();
}

#[test]
fn vm_unix_connections_during_suspend_are_answered() {
    let local = Local::start();
    let dir = local.dir.path().to_owned();
    let callers = local.host.in_network(move || {
        (0..200).map(|n| (n, exchange(&connect(&dir), "x"))).collect::<Vec<(u32, String)>>()
    });
    while !callers.is_finished() {
        // An open connection may keep the container from falling asleep.
        local.host.dm(&["sleep", "x"]);
    }
    for (n, answer) in callers.join().expect("an answer to each client") {
        assert_eq!(answer, format!("{} x", n + 1));
    }
}

#[test]
fn vm_new_file_on_watched_volume_wakes_container() {
    let local = Local::start();
    for round in 0..3 {
        local.put_to_sleep();
        let name = format!("file{round}");
        std::fs::write(local.path("watched").join(&name), "").expect("created");
        local.is_woken();
        let line = format!("saw {name} by watch 1");
        let is_logged = || local.host.dm(&["logs", "x"]).stdout.contains(&line);
        assert!(wait_until(soon(), is_logged), "round {round}: the event is not delivered");
    }
    assert_eq!(local.host.dm(&["logs", "x"]).stdout.matches("saw").count(), 3, "each once");
}

#[test]
fn explain_reports_container_that_can_sleep_only() {
    let local = Local::start();
    let out = local.host.dm(&["explain", "x"]);
    assert!(out.status == 1 && out.stdout.contains("is outside the container"), "{out}");
    assert!(out.stdout.contains("it can sleep all the same"), "{out}");
    let out = local.host.dm(&["checkpoint", "x"]);
    assert!(out.status != 0 && out.stderr.contains("is outside the container"), "{out}");
    assert_eq!(exchange(&local.outside, "a"), "1 a", "the container continues");
}

#[test]
fn vm_killed_keeper_and_vault_cost_open_unix_connections_only() {
    let local = Local::start();
    let mut open = local.connect();
    assert_eq!(exchange(&open, "a"), "1 a");
    local.put_to_sleep();
    let ours = |line: &str| line.contains("dormouse-keeper") || line.contains("dormouse-vault");
    let both = || local.host.processes().into_iter().filter(|(_, line)| ours(line));
    let pids: Vec<u32> = both().map(|(pid, _)| pid).collect();
    assert_eq!(pids.len(), 2, "a keeper and a vault");
    for signal in [Signal::STOP, Signal::KILL] {
        for pid in &pids {
            let pid = Pid::from_raw(*pid as i32).expect("a pid");
            kill_process(pid, signal).expect("the process exists");
        }
    }
    assert!(wait_until(soon(), || both().count() == 0));
    let mut rest = Vec::new();
    assert_eq!(open.read_to_end(&mut rest).ok(), Some(0), "end of stream");
    local.host.dm(&["wake", "x"]).ok();
    assert_eq!(exchange(&local.connect(), "b"), "2 b");
    std::fs::write(local.path("watched/file"), "").expect("created");
    let is_logged = || local.host.dm(&["logs", "x"]).stdout.contains("saw file by watch 1");
    assert!(wait_until(soon(), is_logged));
}

#[test]
fn default_volume_option_prevents_set_user_id_files_of_host_root() {
    use std::os::unix::fs::MetadataExt;
    let host = Host::with_busybox();
    let dir = host.dir().join("share");
    std::fs::create_dir(&dir).expect("made");
    std::os::unix::fs::chown(&dir, Some(0), Some(0)).expect("ours");
    let make = |name: &str, options: &str| {
        let mount = format!("{}:/data{options}", dir.display());
        let script = format!("cp /bin/busybox /data/{name} && chmod 4755 /data/{name}");
        host.dm(&["run", "--rm", "-v", &mount, "busybox", "sh", "-c", &script])
    };
    make("mapped", "").ok();
    let mode = |name: &str| std::fs::metadata(dir.join(name)).map(|m| (m.uid(), m.mode() & 0o7777));
    assert_eq!(
        mode("mapped").expect("made"),
        (0, 0o4755),
        "the file belongs to root of the host, as documented"
    );
    std::fs::create_dir_all(host.root().join("etc")).expect("made");
    let text = "[run]\ndefault-volume = \"noidmap\"\n";
    std::fs::write(host.root().join("etc/config.toml"), text).expect("written");
    // The directory is not writable with the container's ids.
    assert_ne!(make("unmapped", "").status, 0);
    assert!(mode("unmapped").is_err());
    make("asked", ":idmap").ok();
    assert_eq!(mode("asked").expect("made").0, 0);
    host.sh(&format!("chmod 1777 {}", dir.display())).ok();
    make("own", "").ok();
    assert_ne!(mode("own").expect("made").0, 0, "the file belongs to an id of the container");
    assert!(host.dm(&["run", "--help"]).ok().contains("default-volume"));
}
