//! Real programs of Debian are slept and woken, checkpointed and restored, in rounds, with open connections.
//!
//! Each row of [`PROGRAMS`] is one program. `rounds/servers.sh NAME` starts the program as container `a`. Its
//! client is another container, which runs `rounds/client.py NAME` and is never disturbed, or a terminal. A
//! client keeps the expected state: counters, rows, keys, lines. One round is:
//!
//! 1. use over connection A, and over connection B of the round before;
//! 2. sleep; use over A, which wakes the program;
//! 3. sleep; a new connection B, which wakes it, and use over B;
//! 4. checkpoint, which ends the processes; restore; use over A and B.
//!
//! Timers wake none of them (`--wake-on call,data,file`), except cron. Each wake is therefore one of the protocol.
//!
//! `DORMOUSE_ROUNDS` is the number of rounds, two without it. In the directory `DORMOUSE_ROUNDS_RESULTS` each
//! program leaves its result as a JSON file. `cargo xtask programs` runs twenty rounds each, and writes
//! docs/programs.md from these files.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use dormouse_testkit::{Host, Terminal, image, slowness, wait_until};
use serde_json::json;

/// LIMIT: the time of one step of a client, and until a program serves.
const PATIENCE: Duration = Duration::from_secs(120);
/// LIMIT: attempts at a sleep that data in flight or a thread at work ends at once.
const ATTEMPTS: usize = 20;
/// The keeper wakes a container that was stopped at work, within some milliseconds.
const SETTLED: Duration = Duration::from_millis(100);
/// Keys that detach a terminal.
const DETACH: &str = "\u{10}\u{11}";

/// How a program is used.
enum Client {
    /// By this program's class in `rounds/client.py`.
    Script,
    /// From a terminal, which is attached to the container.
    Terminal(&'static Typed),
}

/// The use of a program in a terminal: a text that is typed, and the text that the program shows then.
struct Typed {
    /// Typed by a client that was just attached.
    redraw: &'static str,
    /// Shown by the program when it waits for input.
    prompt: &'static str,
    /// Typed for the n-th use. `{n}` is its number, and `{next}` the number after it.
    keys: &'static str,
    /// Shown then: only a program with the state of all uses before shows it.
    shown: &'static str,
}

/// One row of the table.
struct Program {
    name: &'static str,
    /// The package of Debian whose version is shown.
    package: &'static str,
    /// What the client does, and which state it finds again: a cell of the table.
    does: &'static str,
    client: Client,
    /// Further options of `run`.
    options: &'static [&'static str],
    /// Events that wake it.
    wake_on: &'static str,
    /// The part of a refusal that is permitted, where the program uses an object that is not saved today.
    may_refuse: Option<&'static str>,
}

const PLAIN: Program = Program {
    name: "",
    package: "",
    does: "",
    client: Client::Script,
    options: &[],
    wake_on: "call,data,file",
    may_refuse: None,
};

/// The rows, and a test for each.
macro_rules! programs {
    ($($name:ident: $package:literal, $does:literal $(, $field:ident = $value:expr)*;)*) => {
        const PROGRAMS: &[Program] = &[$(
            Program {
                name: stringify!($name),
                package: $package,
                does: $does,
                $($field: $value,)*
                ..PLAIN
            },
        )*];
        $(
            mod $name {
                #[test]
                fn big_rounds() {
                    super::test(stringify!($name));
                }
            }
        )*
    };
}

programs! {
    // Servers of pages, and proxies.
    nginx: "nginx-light", "pages over kept connections; its count of requests is exact";
    apache2: "apache2", "pages over kept connections; its count of requests is exact";
    haproxy: "haproxy", "requests to a server behind it over kept connections; its count of requests is exact";
    varnish: "varnish", "a page from the cache and new ones from the server behind it; its count of hits is exact";
    squid: "squid", "a page from the cache and new ones from the server behind it";
    caddy: "caddy", "requests to a server behind it over kept connections (Go)";
    // Databases, caches and queues.
    redis: "redis-server", "a counter and keys, with its append-only file; a transaction (MULTI) stays open";
    memcached: "memcached", "a counter and values of up to 100 kB";
    beanstalkd: "beanstalkd", "each connection has a reserved job; its log of jobs is a file";
    postgresql: "postgresql-15", "rows of a table; each session has an open transaction and a temporary table";
    mariadb: "mariadb-server", "rows of a table; each session has an open transaction and a temporary table";
    etcd: "etcd-server", "keys over its JSON gateway; the revision counts all changes (Go)";
    influxdb: "influxdb", "points of a series, their number and sum (Go)";
    slapd: "slapd", "entries of a directory, over LDAP";
    nats: "nats-server", "messages from each connection to all others, in order (Go)";
    mosquitto: "mosquitto", "messages from each connection to all others, acknowledged, over MQTT";
    rabbitmq: "rabbitmq-server", "messages from each connection to all others, over STOMP (Erlang)";
    // Runtimes of languages, each with a server of sums.
    openjdk: "openjdk-17-jdk-headless", "sums in memory by four threads; answers of up to 230 kB";
    node: "nodejs", "sums in memory; answers of up to 230 kB";
    python: "python3", "Python with threads that count meanwhile: sums in memory; answers of up to 230 kB";
    asyncio: "python3", "Python with asyncio tasks that count meanwhile: sums in memory; answers of up to 230 kB";
    gunicorn: "gunicorn", "sums in the memory of a worker with four threads; answers of up to 230 kB";
    ruby: "puma", "sums in memory, by threads of puma; answers of up to 230 kB";
    perl: "starman", "sums in files, by four processes of starman; answers of up to 230 kB";
    php: "php8.2-fpm", "sums in sessions, by php-fpm behind nginx; answers of up to 230 kB";
    rseq: "libc6", "four threads count per CPU in restartable sequences, with tcmalloc; no count is lost";
    // Other programs in Go.
    registry: "docker-registry", "layers of images, each uploaded half before and half after a sleep (Go)";
    prometheus: "prometheus", "its own values each second; the number of samples never falls (Go)";
    alertmanager: "prometheus-alertmanager", "silences, one more each time (Go)";
    netdata: "netdata-core", "graphs of the host: values of earlier seconds stay; without those of itself and of IPC";
    // Other services of a network.
    sshd: "openssh-server", "sessions with a terminal, whose shells count";
    dnsmasq: "dnsmasq-base", "queries by datagrams and over a TCP connection";
    unbound: "unbound", "queries by datagrams and over a TCP connection, with two threads";
    rsync: "rsync", "a connection in the middle of its greeting; files written and read back over new ones";
    git: "git", "branches over connections of protocol 2; commits pushed and cloned over new ones";
    dovecot: "dovecot-imapd", "mails of a selected mailbox, over IMAP";
    cron: "cron", "its timer wakes it for each job, which counts; a minute lasts a second; the answer is the next job",
        wake_on = "call,data,file,timer";
    systemd: "systemd", "sums by a socket-activated service, with journal, bus and logins",
        options = &["--systemd", "always"];
    // Programs in a terminal.
    tmux: "tmux", "a shell in a window counts",
        client = Client::Terminal(&SHELL);
    screen: "screen", "a shell in a window counts",
        client = Client::Terminal(&SHELL);
    vim: "vim", "a text with one line more each time, written to its file",
        client = Client::Terminal(&Typed {
            // A long text hides the signs below its end. The command itself does not contain the prompt.
            redraw: "\u{c}:echo 'op'.'en'\r",
            prompt: "open",
            keys: "GoLine {n}\u{1b}:w\r",
            shown: "{next}L, ",
        });
    emacs: "emacs-nox", "a text with one line more each time, counted and written to its file",
        client = Client::Terminal(&Typed {
            redraw: "\u{c}",
            prompt: "text",
            keys: "line {n}\r\u{18}h\u{1b}=\u{1b}>\u{18}\u{13}",
            shown: "has {n} line",
        });
}

/// A shell that counts. Its echo of the keys has no number.
const SHELL: Typed = Typed {
    redraw: "\r",
    prompt: "# ",
    keys: "n=$((n+1)); echo \"count=$n\"=\r",
    shown: "count={n}=",
};

/// What is counted of a run.
#[derive(Default)]
struct Count {
    rounds: usize,
    sleeps: usize,
    wakes: usize,
    checkpoints: usize,
    /// Milliseconds from the request of a client to the answer of a program that was asleep.
    wakes_ms: Vec<f64>,
    /// The distinct refusals.
    refused: BTreeSet<String>,
}

fn rounds() -> usize {
    let given = std::env::var("DORMOUSE_ROUNDS").ok();
    given.map_or(2, |n| n.parse().expect("DORMOUSE_ROUNDS is a number"))
}

/// The test of one program.
fn test(name: &str) {
    let program = PROGRAMS.iter().find(|row| row.name == name).expect("a row of the table");
    let mut count = Count::default();
    let mut version = String::new();
    let result = catch_unwind(AssertUnwindSafe(|| {
        let root = image::programs();
        version = version_of(&root, program.package);
        let host = Host::new();
        go_round(&host, &root, program, &mut count);
    }));
    let message = |panic: &Box<dyn std::any::Any + Send>| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_owned()
    };
    record(program, &version, &count, result.as_ref().err().map(message));
    if let Err(panic) = result {
        resume_unwind(panic);
    }
}

/// Writes the result of a program where `DORMOUSE_ROUNDS_RESULTS` wants it.
fn record(program: &Program, version: &str, count: &Count, failed: Option<String>) {
    let Some(dir) = std::env::var_os("DORMOUSE_ROUNDS_RESULTS").map(PathBuf::from) else { return };
    let mut times = count.wakes_ms.clone();
    times.sort_by(f64::total_cmp);
    let row = PROGRAMS.iter().position(|row| row.name == program.name);
    let result = json!({
        "row": row,
        "name": program.name,
        "package": program.package,
        "version": version,
        "does": program.does,
        "rounds_wanted": rounds(),
        "rounds": count.rounds,
        "sleeps": count.sleeps,
        "wakes": count.wakes,
        "checkpoints": count.checkpoints,
        "answer_p50_ms": times.get(times.len() / 2),
        "refused": count.refused,
        "failed": failed,
    });
    std::fs::create_dir_all(&dir).expect("the directory of results can be made");
    let text = serde_json::to_string_pretty(&result).expect("JSON") + "\n";
    std::fs::write(dir.join(program.name).with_extension("json"), text).expect("write the result");
}

/// The version of a package, from dpkg's own list.
fn version_of(root: &Path, package: &str) -> String {
    let status = std::fs::read_to_string(root.join("var/lib/dpkg/status")).expect("dpkg's list");
    let wanted = format!("Package: {package}");
    let paragraph = status.split("\n\n").find(|p| p.lines().any(|line| line == wanted));
    let version = paragraph.and_then(|p| p.lines().find_map(|line| line.strip_prefix("Version: ")));
    version.unwrap_or_else(|| panic!("the image has no package {package}")).to_owned()
}

/// All rounds of one program.
#[track_caller]
fn go_round(host: &Host, root: &Path, program: &Program, count: &mut Count) {
    let mut user = User::start(host, root, program);
    for round in 0..rounds() {
        user.use_open("A");
        if round > 0 {
            user.use_open("B");
            user.close_new();
        }
        for connection in ["A", "B"] {
            if !end_processes(host, &mut user, program, count, &["sleep", "a"]) {
                return;
            }
            count.sleeps += 1;
            let took_ms = match connection {
                "A" => user.use_open("A"),
                _ => user.use_new(),
            };
            host.wait_for_state("a", "running");
            count.wakes += 1;
            count.wakes_ms.push(took_ms);
        }
        if !end_processes(host, &mut user, program, count, &["checkpoint", "a"]) {
            return;
        }
        host.dm_within(PATIENCE, &["restore", "a"]).ok();
        host.dm(&["checkpoint", "rm", "a", "1"]).ok();
        count.checkpoints += 1;
        user.use_open("A");
        user.use_open("B");
        count.rounds += 1;
    }
}

/// Puts the program to sleep or into a checkpoint. A refusal must leave the program as it was. Returns false
/// after one that the row permits; another one fails, unless it is gone at the next attempt.
#[track_caller]
fn end_processes(
    host: &Host,
    user: &mut User,
    program: &Program,
    count: &mut Count,
    words: &[&str],
) -> bool {
    let ended = if words[0] == "sleep" { "asleep" } else { "stopped" };
    let mut last = String::new();
    for attempt in 1..=ATTEMPTS {
        user.detach();
        let out = host.dm_within(PATIENCE, words);
        if out.status == 0 && ended == "asleep" {
            std::thread::sleep(SETTLED);
        }
        let state = host.state_of("a");
        if out.status == 0 && state == ended {
            return true;
        }
        if out.status != 0 {
            assert_eq!(state, "running", "after a refusal: {out}");
            last = out.stderr.trim().to_owned();
            count.refused.insert(last.clone());
            user.use_open("A");
            if program.may_refuse.is_some_and(|part| last.contains(part)) {
                return false;
            }
        } else {
            // Data in flight or a client inside may wake it at once.
            last = format!("{words:?}: it is {state}, not {ended}");
        }
        // A wake is work, too: systemd has some for half a second, more on a busy host.
        std::thread::sleep(Duration::from_millis(200) * attempt.min(15) as u32);
    }
    panic!("{last}");
}

/// The client of a program.
enum User<'h> {
    Script(Script<'h>),
    /// Without a client between the end of the processes and the next use.
    Terminal {
        host: &'h Host,
        typed: &'static Typed,
        terminal: Option<Terminal>,
        uses: usize,
    },
}

/// A running `rounds/client.py`.
struct Script<'h> {
    host: &'h Host,
    child: Child,
    answers: Receiver<String>,
}

impl<'h> User<'h> {
    /// Starts the program as container `a` and its client, which waits until the program serves.
    #[track_caller]
    fn start(host: &'h Host, root: &Path, program: &Program) -> Self {
        let tests = env!("CARGO_MANIFEST_DIR");
        let rounds = format!("{tests}/rounds:/rounds:ro");
        let programs = format!("{tests}/programs:/programs:ro");
        let root = root.to_str().expect("UTF-8");
        let run = |name: &'static str| {
            ["--name", name, "-v", &rounds, "-v", &programs, "--rootfs", root].map(str::to_owned)
        };
        let dm = |words: &[&[&str]], files: &[String]| {
            let files: Vec<&str> = files.iter().map(String::as_str).collect();
            host.dormouse(&[words[0], &files, words[1]].concat())
        };
        let terminal: &[&str] = match program.client {
            Client::Script => &[],
            Client::Terminal(_) => &["-t"],
        };
        let options = [&["run", "-d", "--wake-on", program.wake_on], terminal, program.options];
        let server = ["sh", "/rounds/servers.sh", program.name];
        let server = dm(&[&options.concat(), &server], &run("a"));
        dormouse_testkit::run(server, b"", PATIENCE).ok();
        match program.client {
            Client::Script => {
                let client = ["python3", "/rounds/client.py", program.name];
                let mut client = dm(&[&["run", "-i"], &client], &run("c"));
                let mut script = Script::spawn(host, &mut client);
                script.must("start A");
                Self::Script(script)
            }
            Client::Terminal(typed) => {
                let mut user = Self::Terminal { host, typed, terminal: None, uses: 0 };
                user.attach();
                user
            }
        }
    }

    /// Attaches the client of a terminal where it has none.
    #[track_caller]
    fn attach(&mut self) {
        let Self::Terminal { host, typed, terminal, .. } = self else { return };
        if terminal.is_none() {
            let mut new = Terminal::spawn(&host.dormouse(&["attach", "a"]));
            new.send(typed.redraw);
            new.expect(typed.prompt);
            *terminal = Some(new);
        }
    }

    /// Detaches the client of a terminal. Input of an attached client does not wake an asleep container.
    #[track_caller]
    fn detach(&mut self) {
        if let Self::Terminal { terminal, .. } = self
            && let Some(mut client) = terminal.take()
        {
            client.send(DETACH);
            assert_eq!(client.wait(), 0, "the client of the terminal");
        }
    }

    /// Uses an open connection. Returns the milliseconds until the first answer.
    #[track_caller]
    fn use_open(&mut self, name: &str) -> f64 {
        let began = Instant::now();
        self.attach();
        match self {
            Self::Script(script) => script.must(&format!("use {name}")),
            Self::Terminal { typed, terminal, uses, .. } => {
                *uses += 1;
                let fill = |text: &str| {
                    let numbered = text.replace("{n}", &uses.to_string());
                    numbered.replace("{next}", &(*uses + 1).to_string())
                };
                let terminal = terminal.as_mut().expect("just attached");
                terminal.send(&fill(typed.keys));
                terminal.expect(&fill(typed.shown));
                began.elapsed().as_secs_f64() * 1000.0
            }
        }
    }

    /// Opens connection B and uses it. A terminal is attached again for any use.
    #[track_caller]
    fn use_new(&mut self) -> f64 {
        match self {
            Self::Script(script) => script.must("open B") + script.must("use B"),
            Self::Terminal { .. } => self.use_open("B"),
        }
    }

    #[track_caller]
    fn close_new(&mut self) {
        if let Self::Script(script) = self {
            script.must("close B");
        }
    }
}

impl<'h> Script<'h> {
    fn spawn(host: &'h Host, command: &mut Command) -> Self {
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("dormouse starts");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let (sender, answers) = mpsc::channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let _ = sender.send(line); // ignored: after the test there is no receiver
            }
        });
        Self { host, child, answers }
    }

    /// Returns the milliseconds that a verb took, or what was wrong.
    fn answer(&mut self, verb: &str) -> Result<f64, String> {
        let stdin = self.child.stdin.as_mut().expect("a pipe");
        writeln!(stdin, "{verb}").map_err(|error| format!("{verb}: {error}"))?;
        let answer = self.answers.recv_timeout(PATIENCE * slowness());
        let answer = answer.map_err(|error| format!("{verb}: {error}"))?;
        let took = answer.strip_prefix("ok ").and_then(|ms| ms.parse().ok());
        took.ok_or_else(|| format!("{verb}: {answer}"))
    }

    #[track_caller]
    fn must(&mut self, verb: &str) -> f64 {
        self.answer(verb).unwrap_or_else(|wrong| {
            let record = self.host.inspect("a");
            let (state, cause) = (&record["state"], &record["wake_failed"]);
            let log = self.host.dm(&["logs", "--tail", "20", "a"]);
            panic!("{wrong}\nit is {state}, wake failed: {cause}\n{log}")
        })
    }
}

impl Drop for Script<'_> {
    fn drop(&mut self) {
        drop(self.child.stdin.take()); // the end of its work
        let limit = Duration::from_secs(20) * slowness();
        if !wait_until(limit, || self.child.try_wait().is_ok_and(|ended| ended.is_some())) {
            let _ = self.child.kill(); // ignored: may have ended just now
            let _ = self.child.wait();
        }
    }
}
