//! Real programs are suspended, or checkpointed and restored, in the middle of their work, again
//! and again. Their clients notice nothing: connections stay, every answer is right.
//!
//! The server is container `a`. Its client `c` checks every answer (`programs/`). The client works
//! and pauses by turns, so rounds meet both. `DORMOUSE_ROUNDS` is the number of rounds.

use std::time::Duration;

use dormouse_testkit::{Host, Terminal, image, slowness, ssh, wait_until};

/// LIMIT: the time of one step, and of the rest of the work after the last round.
const PATIENCE: Duration = Duration::from_secs(120);

fn rounds() -> usize {
    let given = std::env::var("DORMOUSE_ROUNDS").ok();
    given.map_or(6, |n| n.parse().expect("DORMOUSE_ROUNDS is a number"))
}

fn host() -> Host {
    let host = Host::new();
    host.import(&image::software(), "software");
    host
}

/// Runs `words` in a container that has the scripts of `programs/`.
#[track_caller]
fn start(host: &Host, name: &str, words: &[&str]) {
    let programs = format!("{}/programs:/programs:ro", env!("CARGO_MANIFEST_DIR"));
    let run = ["run", "-d", "--name", name, "-v", &programs, "-w", "/tmp", "software"];
    host.dm(&[&run[..], words].concat()).ok();
}

#[track_caller]
fn wait_for_log(host: &Host, name: &str, text: &str) {
    let mut log = String::new();
    let found = wait_until(PATIENCE * slowness(), || {
        log = host.dm(&["logs", name]).to_string();
        log.contains(text) || host.state_of(name) == "stopped"
    });
    assert!(found && log.contains(text), "{name} does not print '{text}': {log}");
}

/// One round: every third is a checkpoint and a restore, the others are sleeps.
#[track_caller]
fn disturb(host: &Host, round: usize) {
    if round % 3 == 2 {
        let out = host.dm(&["checkpoint", "a"]);
        assert_eq!(out.status, 0, "round {round}: {out}");
        let out = host.dm(&["restore", "a"]);
        assert_eq!(out.status, 0, "round {round}: {out}");
        host.dm(&["checkpoint", "rm", "a", "1"]).ok();
    } else {
        let out = host.dm(&["sleep", "a"]);
        assert_eq!(out.status, 0, "round {round}: {out}");
    }
}

/// Runs the rounds during the work, which wakes the server every time.
#[track_caller]
fn go_round(host: &Host, worker: &str) {
    wait_for_log(host, worker, "begun");
    for round in 0..rounds() {
        disturb(host, round);
        host.wait_for_state("a", "running");
        // Sometimes the server gets to work between two rounds, sometimes not.
        std::thread::sleep(Duration::from_millis(round as u64 * 37 % 200));
    }
}

/// Stops the client, which exits with success if every answer was right.
#[track_caller]
fn stop(host: &Host, name: &str) {
    host.dm(&["exec", name, "touch", "/tmp/stop"]).ok();
    ends_well(host, name);
}

#[track_caller]
fn ends_well(host: &Host, name: &str) {
    let status = host.dm_within(PATIENCE * slowness(), &["wait", name]).stdout;
    let log = host.dm(&["logs", name]);
    assert!(status.trim() == "0" && log.stdout.contains("all was right"), "{status} {log}");
}

#[track_caller]
fn serve(server: &[&str], client: &[&str]) {
    let host = host();
    start(&host, "a", server);
    start(&host, "c", client);
    go_round(&host, "c");
    stop(&host, "c");
}

#[test]
fn big_node_with_open_connections() {
    serve(&["node", "/programs/server.js"], &["python3", "/programs/client.py"]);
}

#[test]
fn big_python_with_threads() {
    serve(&["python3", "/programs/server.py"], &["python3", "/programs/client.py"]);
}

#[test]
fn big_java_with_compiled_code() {
    serve(&["java", "/programs/Server.java"], &["python3", "/programs/client.py"]);
}

/// systemd with its journal, bus, logins and cgroups, and with a socket-activated service. logind
/// has a mount namespace. Another service has private network and IPC namespaces, a third a user
/// namespace. In the end it is also restored as another container, and manages its services as
/// before.
#[test]
fn big_systemd_with_socket_activated_service() {
    let host = host();
    host.import(&image::systemd(), "systemd");
    let programs = format!("{}/programs:/programs:ro", env!("CARGO_MANIFEST_DIR"));
    host.dm(&["run", "-d", "--name", "a", "-v", &programs, "systemd", "/sbin/init"]).ok();
    let control = |name: &str, words: &[&str]| {
        host.dm(&[&["exec", name, "systemctl", "--no-pager"], words].concat())
    };
    let is_up = |name: &str| control(name, &["is-system-running"]).stdout.trim() == "running";
    let patience = PATIENCE * slowness();
    assert!(wait_until(patience, || is_up("a")), "{}", control("a", &["status"]));
    control("a", &["link", "/programs/sums.service", "/programs/sums.socket"]).ok();
    control("a", &["start", "sums.socket"]).ok();
    let apart = ["-p", "PrivateNetwork=yes", "-p", "PrivateIPC=yes", "sleep", "100000"];
    host.dm(&[&["exec", "a", "systemd-run", "-q", "-u", "apart"], &apart[..]].concat()).ok();
    let ids = ["-p", "PrivateUsers=yes", "-p", "User=games", "sleep", "100000"];
    host.dm(&[&["exec", "a", "systemd-run", "-q", "-u", "ids"], &ids[..]].concat()).ok();
    // Root and the service's user keep their names, and all others are shown as `nobody`.
    let sees_its_ids = |name: &str| {
        let script = "pid=$(systemctl show -P MainPID ids) && stat -c %U /proc/$pid && \
                      tr -s ' ' </proc/$pid/uid_map && \
                      nsenter -t $pid -U stat -c '%U %G' /var/mail";
        host.dm(&["exec", name, "sh", "-c", script])
    };
    let seen = sees_its_ids("a").ok();
    assert!(
        seen.contains("games") && seen.contains(" 5 5 1") && seen.contains("root nogroup"),
        "{seen}"
    );
    start(&host, "c", &["python3", "/programs/client.py"]);
    go_round(&host, "c");
    let manages = |name: &str| {
        assert!(is_up(name), "{}", control(name, &["status"]));
        let units = [
            "dbus",
            "systemd-journald",
            "systemd-logind",
            "sums.socket",
            "sums.service",
            "apart",
            "ids",
        ];
        assert_eq!(sees_its_ids(name).ok(), seen);
        control(name, &[&["is-active"], &units[..]].concat()).ok();
        // logind uses a mount namespace of its own, and reports over the bus.
        let logins =
            ["exec", name, "loginctl", "--no-pager", "show-session", "-p", "NCurrentSessions"];
        assert_eq!(host.dm(&logins).ok(), "NCurrentSessions=0");
        let in_its_own = |script: &str| {
            let script =
                format!("nsenter -m -t $(systemctl show -P MainPID systemd-logind) {script}");
            host.dm(&["exec", name, "sh", "-c", &script])
        };
        let out = in_its_own("touch /usr/new");
        assert!(out.status != 0 && out.stderr.contains("Read-only"), "{out}");
        in_its_own("touch /tmp/its-own").ok();
        host.dm(&["exec", name, "test", "!", "-e", "/tmp/its-own"]).ok();
        // Output of its processes is still logged, under the right unit.
        let print = ["exec", name, "systemd-run", "--wait", "-q", "-u", name, "echo", "still here"];
        host.dm(&print).ok();
        let journal = || host.dm(&["exec", name, "journalctl", "--no-pager", "-u", name]).stdout;
        assert!(wait_until(patience, || journal().contains("still here")), "{}", journal());
        let status = control(name, &["status", "sums.service"]).ok();
        assert!(status.contains("/system.slice/sums.service"), "{status}");
    };
    manages("a");
    stop(&host, "c");
    control("a", &["stop", "sums.service"]).ok();
    control("a", &["start", "sums.service"]).ok();
    host.dm(&["checkpoint", "a"]).ok();
    host.dm(&["restore", "--name", "b", "a"]).ok();
    host.dm(&["restore", "a"]).ok();
    manages("b");
    manages("a");
    for name in ["a", "b"] {
        host.dm_within(patience, &["stop", "--time", "60", name]).ok();
        assert_eq!(host.dm(&["wait", name]).ok(), "0");
    }
}

#[test]
fn big_redis_with_writes_in_a_pipeline() {
    let words = ["--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""];
    serve(&[&["redis-server"], &words[..]].concat(), &["python3", "/programs/redis.py"]);
}

#[test]
fn big_postgresql_under_pgbench() {
    let host = host();
    start(&host, "a", &["bash", "/programs/postgresql.sh"]);
    let seconds = (4 + rounds()).to_string();
    start(&host, "c", &["bash", "/programs/pgbench.sh", &seconds]);
    go_round(&host, "c");
    stop(&host, "c");
}

/// A database that reads and writes its tables by asynchronous I/O (io_setup(2)) all the time.
#[test]
fn big_mariadb_with_asynchronous_io() {
    let host = Host::new();
    host.import(&image::mariadb(), "software");
    start(&host, "a", &["bash", "/programs/mariadb.sh"]);
    start(&host, "c", &["bash", "/programs/mariadb-client.sh"]);
    wait_for_log(&host, "c", "begun");
    let has_rings = || {
        let pid = host.inspect("a")["pid"].as_u64().expect("it runs");
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("it runs");
        maps.contains("/[aio] (deleted)")
    };
    assert!(has_rings(), "{}", host.dm(&["logs", "a"]));
    go_round(&host, "c");
    assert!(has_rings(), "after the restores");
    stop(&host, "c");
}

#[test]
fn big_make_with_four_compilers() {
    let host = host();
    start(&host, "a", &["bash", "/programs/make.sh"]);
    go_round(&host, "a");
    stop(&host, "a");
}

/// A logged-in user goes on typing.
#[test]
fn big_sshd_with_a_session() {
    let host = host();
    let mut terminal = ssh::log_in(&host, &[]);
    terminal.send("kept=value; n=0\n");
    for round in 0..rounds() {
        disturb(&host, round);
        terminal.send("n=$((n+1)); echo $kept''_$n\n");
        terminal.expect(&format!("value_{}\r\n", round + 1));
    }
    terminal.send("exit 5\n");
    assert_eq!(terminal.wait(), 5);
}

/// A user edits a text, detaches from the terminal, attaches again, and continues.
#[test]
fn big_vim_in_a_terminal() {
    let host = host();
    host.dm(&["run", "-dt", "--name", "a", "software", "vim.tiny", "/root/text"]).ok();
    let attach = |text: &str| {
        let mut terminal = Terminal::spawn(&host.dormouse(&["attach", "a"]));
        terminal.send("\u{c}"); // redraws the screen
        terminal.expect(text);
        terminal.expect("~");
        terminal
    };
    let mut text = String::new();
    for round in 0..rounds() {
        let mut terminal = attach(&text);
        text = format!("for the {round}. time");
        terminal.send(&format!("S{text}\u{1b}:redraw!\r"));
        terminal.expect(&text);
        terminal.send("\u{10}\u{11}");
        assert_eq!(terminal.wait(), 0);
        disturb(&host, round);
    }
    let mut terminal = attach(&text);
    terminal.send(":wq\r");
    assert_eq!(terminal.wait(), 0);
    let copy = host.dir().join("text");
    host.dm(&["cp", "a:/root/text", copy.to_str().expect("UTF-8")]).ok();
    assert_eq!(std::fs::read_to_string(copy).expect("the file was written").trim_end(), text);
}
