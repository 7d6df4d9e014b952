//! Volumes: wakes through their files (unix sockets of an asleep container, watched files), and what a new
//! one holds.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use dormouse_testkit::{Host, soon, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

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
        // The name is there before the socket listens: then it has the flag __SO_ACCEPTCON.
        let sockets = format!("/proc/{}/net/unix", host.inspect("x")["pid"]);
        let is_it = |line: &str| line.ends_with(" /v/stream") && line.contains(" 00010000 ");
        let listens = || {
            let all = std::fs::read_to_string(&sockets).expect("the container runs");
            all.lines().any(is_it)
        };
        assert!(wait_until(soon(), listens), "the server listens");
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
        self.host.put_to_sleep("x");
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

/// An image whose `/data` belongs to a user, with files of every kind, and hostile links beside it.
fn image_with_data(host: &Host) {
    let dir = host.dir().join("data-image");
    let script = format!(
        "cp -a {} {dir} && cd {dir} && mkdir -m 0750 data && mkdir data/sub empty && cd data && \
         echo text > file && ln file sub/same && ln -s file soft && mkfifo fifo && mknod node c 1 3 && \
         ln -s /etc/shadow shadow && ln -s ../../../../../../etc up && chown -R 100:101 . && \
         chmod 4755 file && cd .. && ln -s /data link && ln -s ../../../../../../../etc out && \
         chown 7:8 empty && chmod 2700 empty",
        dormouse_testkit::image::busybox().display(),
        dir = dir.display()
    );
    host.sh(&script).ok();
    host.import(&dir, "data");
}

#[test]
fn vm_first_use_of_volume_copies_files_owner_and_mode_of_image() {
    let host = Host::new();
    image_with_data(&host);
    let run = |volume: &str, script: &str| {
        host.dm(&["run", "--rm", "--net", "none", "-v", volume, "data", "sh", "-c", script]).ok()
    };
    let list = "cd /data && stat -c '%n %a %u:%g %h' . file sub soft fifo && ls -a && cat file";
    let shown = run("v:/data", list);
    assert!(shown.starts_with(". 750 100:101 3\nfile 4755 100:101 2\n"), "{shown}");
    for part in ["soft 777 100:101", "fifo 644 100:101", "text", "shadow", "up", "sub"] {
        assert!(shown.contains(part), "'{part}' is missing:\n{shown}");
    }
    assert!(!shown.contains("node"), "a device was copied:\n{shown}");
    // The links were copied as texts.
    let links =
        "readlink /data/shadow; readlink /data/up; [ -e /data/up/dormouse-host ] && echo out; true";
    assert_eq!(run("v:/data", links), "/etc/shadow\n../../../../../../etc");
    // Later uses change nothing.
    run("v:/data", "rm -r /data/sub; echo new > /data/file");
    assert_eq!(run("v:/data", "cat /data/file; ls /data/sub 2>/dev/null; true"), "new");
    run("v:/data", "rm -r /data/*");
    assert_eq!(run("v:/data", "ls /data"), "", "the emptied volume was filled again");
    // Without a copy, of another path, of a missing one, and of a path behind a link.
    assert_eq!(run("n:/data:nocopy", "ls /data; stat -c '%a %u:%g' /data"), "755 0:0");
    assert_eq!(run("e:/empty", "stat -c '%a %u:%g' /empty"), "2700 7:8");
    assert_eq!(
        run("m:/missing/path", "stat -c '%a %u:%g' /missing/path; ls /missing/path"),
        "755 0:0"
    );
    assert_eq!(run("l:/link", "cat /data/file"), "text");
    // A path out of the image is one inside it.
    let inside = run("o:/out", "ls /etc");
    assert!(inside.contains("passwd") && !inside.contains("debian_version"), "{inside}");
    let names = host.dm(&["volume", "ls", "-q"]).ok();
    assert_eq!(names.lines().collect::<Vec<_>>(), ["e", "l", "m", "n", "o", "v"]);
    // Nothing of the host was read.
    let volumes = host.root().join("lib/volumes");
    assert!(volumes.join("o").join("passwd").exists());
    host.dm(&["volume", "prune"]).ok();
    let left: Vec<_> = std::fs::read_dir(&volumes).expect("a directory").flatten().collect();
    assert!(left.iter().all(|e| e.file_name() == ".records"), "{left:?}");
}

#[test]
fn created_volume_is_filled_unless_it_has_files() {
    let host = Host::new();
    image_with_data(&host);
    let run = |volume: &str, script: &str| {
        host.dm(&["run", "--rm", "--net", "none", "-v", volume, "data", "sh", "-c", script]).ok()
    };
    for name in ["a", "b"] {
        assert_eq!(host.dm(&["volume", "create", "--label", "k=v", name]).ok(), name);
    }
    let place = host.dm(&["volume", "inspect", "-f", "{{.Mountpoint}} {{.NeedsCopyUp}}", "b"]).ok();
    let place = place.strip_suffix(" true").expect("it is new").to_owned();
    std::fs::write(Path::new(&place).join("own"), "kept").expect("our directory");
    assert_eq!(run("a:/data", "cat /data/file; stat -c '%a %u:%g' /data"), "text\n750 100:101");
    assert_eq!(run("b:/data", "ls /data; cat /data/own"), "own\nkept");
    let filter = ["volume", "ls", "-q", "--filter", "label=k=v"];
    assert_eq!(host.dm(&filter).ok(), "a\nb");
    assert_eq!(host.dm(&["volume", "inspect", "-f", "{{.NeedsCopyUp}}", "a"]).ok(), "false");
    host.dm(&["run", "-d", "--name", "x", "--net", "none", "-v", "a:/v", "data", "sleep", "1000"])
        .ok();
    let line = host.dm(&["volume", "rm", "a"]).err(2);
    assert!(line.contains("'a' is in use by x"), "{line}");
    host.dm(&["volume", "rm", "-f", "a"]).ok();
    assert_eq!(host.dm(&["ps", "-aq"]).ok(), "", "the container was not removed");
    host.dm(&["volume", "rm", "b"]).ok();
    host.dm(&["volume", "create", "../x"]).err(125);
}

/// Several containers start with one new volume at once: all see the same whole copy.
#[test]
fn volume_that_is_used_first_by_many_is_filled_once() {
    let host = Host::new();
    image_with_data(&host);
    let run = || {
        let script = "cat /data/same && stat -c %i /data";
        let words = ["run", "--rm", "--net", "none", "-v", "v:/data/sub", "data", "sh", "-c"];
        let inside = script.replace("/data", "/data/sub");
        host.dm(&[&words[..], &[&inside]].concat()).ok()
    };
    let all: Vec<String> = std::thread::scope(|scope| {
        let run = &run;
        let all: Vec<_> = (0..6).map(|_| scope.spawn(run)).collect();
        all.into_iter().map(|one| one.join().expect("a command")).collect()
    });
    assert!(all[0].starts_with("text\n") && all.iter().all(|one| *one == all[0]), "{all:?}");
}

/// Containers have different host ids, and see the same owners on a shared volume.
#[test]
fn vm_containers_share_volume_with_the_same_owners() {
    let host = Host::new();
    image_with_data(&host);
    let start = |name: &str, more: &[&str]| {
        let words = [&["run", "-d", "--name", name, "--net", "none", "-v", "v:/data"], more];
        host.dm(&[&words.concat()[..], &["data", "sleep", "1000"]].concat()).ok();
    };
    let sh = |name: &str, script: &str| host.dm(&["exec", name, "sh", "-c", script]).ok();
    start("a", &[]);
    start("b", &[]);
    start("wide", &["--ids", "65536"]);
    let owners = "stat -c '%u:%g' /data /data/file";
    for name in ["a", "b", "wide"] {
        assert_eq!(sh(name, owners), "100:101\n100:101", "{name}");
        let script = format!(
            "echo {name} > /data/{name} && chown 7:8 /data/{name} && chmod 700 /data/{name}"
        );
        sh(name, &script);
    }
    for name in ["a", "b", "wide"] {
        let script = "cd /data; stat -c '%u:%g' a b wide; cat a b wide; echo more >> file";
        assert_eq!(sh(name, script), "7:8\n7:8\n7:8\na\nb\nwide", "{name}");
    }
    // The owner of the files is gone, and another container gets its ids.
    host.dm(&["sleep", "b"]).ok();
    host.dm(&["rm", "-f", "a", "wide"]).ok();
    start("c", &[]);
    assert_eq!(sh("c", "stat -c '%u:%g' /data/b"), "7:8");
    assert_eq!(
        sh("b", "stat -c '%u:%g' /data/wide; echo > /data/new; stat -c '%u' /data/new"),
        "7:8\n0"
    );
    // Files of the host in a new volume belong to root inside.
    host.dm(&["volume", "create", "own"]).ok();
    let place = host.dm(&["volume", "inspect", "-f", "{{.Mountpoint}}", "own"]).ok();
    std::fs::write(Path::new(&place).join("file"), "text").expect("our directory");
    let script = "stat -c '%u:%g' /own /own/file && echo more >> /own/file && cat /own/file";
    let words = ["run", "--rm", "--net", "none", "-v", "own:/own", "data", "sh", "-c", script];
    assert_eq!(host.dm(&words).ok(), "0:0\n0:0\ntextmore");
    host.dm(&["rm", "-f", "b", "c"]).ok();
}
