//! A small machine: namespaces that play the host and a neighbour, and a scratch root.
//!
//! ```text
//!   test process        host namespaces (net, mount)          neighbour (net)
//!   nsenter ----------> dormouse --root DIR ...
//!                       host0 192.0.2.1/24 ------veth------ client0 192.0.2.2/24
//!                             2001:db8::1/64                        2001:db8::2/64
//! ```
//!
//! The mount namespace's tree is shared within itself, as systemd sets it up on a real host. Two
//! processes that wait for the end of their standard input hold the namespaces. They exit with the
//! test process however that ends, and the namespaces with them.
//!
//! The namespaces are entered and held by busybox, one static program: under emulation a
//! dynamically linked program takes a tenth of a second to start, and each test starts dozens.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::process::{Output, dormouse, run, slowness, soon, wait_until, weak_dormouse};
use crate::{image, leftover};

/// The time limit of a command.
const LIMIT: Duration = Duration::from_secs(60);

/// The time after which a host has no further interlude.
const INTERLUDES: Duration = Duration::from_secs(60);

/// A private host for one test. See the [crate].
pub struct Host {
    dir: TempDir,
    host: Child,
    neighbour: Child,
    program: PathBuf,
    environment: Vec<(String, String)>,
    before: State,
    /// Milliseconds that interludes have taken.
    interludes_ms: AtomicU64,
}

/// The state of a host outside its containers.
#[derive(PartialEq, Eq)]
struct State {
    mounts: Vec<String>,
    links: String,
    routes: String,
    rules: String,
}

impl Host {
    /// The host's address on the wire to its neighbour.
    pub const ADDRESS: &str = "192.0.2.1";
    /// The same in IPv6.
    pub const ADDRESS6: &str = "2001:db8::1";
    /// The neighbour's address.
    pub const NEIGHBOUR: &str = "192.0.2.2";
    /// The same in IPv6.
    pub const NEIGHBOUR6: &str = "2001:db8::2";

    /// A new host with nothing on it.
    #[allow(clippy::new_without_default, reason = "a host makes namespaces: no default value")]
    #[track_caller]
    pub fn new() -> Self {
        Self::with_program(dormouse())
    }

    /// A new host with a given program as `dormouse`.
    #[track_caller]
    pub fn with_program(program: PathBuf) -> Self {
        assert!(rustix::process::geteuid().is_root(), "whole-system tests must be run as root");
        let dir = tempfile::Builder::new().prefix("dm-").tempdir().expect("a scratch directory");
        let neighbour = hold(&["--net"], "true");
        let host =
            hold(&["--net", "--mount", "--propagation", "private"], "mount --make-rshared /");
        let empty = State {
            mounts: Vec::new(),
            links: String::new(),
            routes: String::new(),
            rules: String::new(),
        };
        let (environment, interludes_ms) = (Vec::new(), AtomicU64::new(0));
        let mut this =
            Self { dir, host, neighbour, program, environment, before: empty, interludes_ms };
        this.connect();
        this.set_up();
        this.before = this.state();
        this
    }

    /// A new host with the image `busybox`.
    #[track_caller]
    pub fn with_busybox() -> Self {
        let host = Self::new();
        host.import(&image::busybox(), "busybox");
        host
    }

    /// A new host with the image `attack`: busybox and the attacks.
    #[track_caller]
    pub fn with_attacks(program: PathBuf) -> Self {
        let host = Self::with_program(program);
        host.import(&image::busybox_with_attack(), "attack");
        host
    }

    /// A new host with the image `busybox` and a program without these protections, where the control arms are
    /// built.
    #[track_caller]
    pub fn without(protections: &str) -> Option<Self> {
        let mut host = Self::with_program(weak_dormouse()?);
        host.set_env("DORMOUSE_WEAKEN", protections);
        host.import(&image::busybox(), "busybox");
        Some(host)
    }

    /// The keeper does not linger after the last container: a test sees what containers leave.
    fn set_up(&self) {
        let etc = self.root().join("etc");
        fs::create_dir_all(&etc).expect("a scratch directory is writable");
        fs::write(etc.join("config.toml"), "[keeper]\nlinger = \"0s\"\n").expect("written");
    }

    fn connect(&self) {
        let neighbour = self.neighbour.id();
        let up = |link: &str, v4: &str, v6: &str, gateway: &str| {
            format!(
                "link set lo up\naddr add {v4}/24 dev {link}\naddr add {v6}/64 dev {link} nodad\n\
                 link set {link} up\nroute add default via {gateway}\n"
            )
        };
        let pair = format!("link add host0 type veth peer name client0 netns {neighbour}\n");
        let host = up("host0", Self::ADDRESS, Self::ADDRESS6, Self::NEIGHBOUR);
        self.ip(self.command("ip"), &(pair + &host)).ok();
        let neighbour = up("client0", Self::NEIGHBOUR, Self::NEIGHBOUR6, Self::ADDRESS);
        self.ip(self.neighbour_command("ip"), &neighbour).ok();
    }

    /// Runs several commands with one ip(8).
    #[track_caller]
    fn ip(&self, mut command: Command, commands: &str) -> Output {
        command.args(["-oneline", "-batch", "-"]);
        run(command, commands.as_bytes(), LIMIT)
    }

    /// Another program as `dormouse` for every later command.
    pub fn set_program(&mut self, program: PathBuf) {
        self.program = program;
    }

    /// A variable for every later `dormouse` command.
    pub fn set_env(&mut self, name: &str, value: &str) {
        self.environment.push((name.to_owned(), value.to_owned()));
    }

    /// The scratch directory. Its subdirectory `root` is the argument of `--root`.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The directory of `--root`: `lib`, `run` and `etc` lie below it.
    pub fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    /// Waits until no create, removal or change is in progress. `run --rm` returns before the files of its
    /// container are removed.
    ///
    /// # Panics
    /// If one lasts too long.
    pub fn await_removals(&self) {
        let is_empty = |dir: &str| {
            std::fs::read_dir(self.root().join(dir)).is_ok_and(|mut all| all.next().is_none())
        };
        let has_changes = || self.root().join("run/pending").exists() && !is_empty("run/pending");
        let is_done = || is_empty("lib/pending") && !has_changes();
        assert!(wait_until(soon(), is_done), "a change of {} never ends", self.root().display());
    }

    /// Waits until no change is in progress, and the processes that settle containers and make spares
    /// have exited.
    ///
    /// # Panics
    /// If one stays.
    #[track_caller]
    pub fn await_settlers(&self) {
        self.await_removals();
        let rests = |line: &str| {
            [" internal settle", " internal nursery"].iter().any(|verb| line.ends_with(verb))
        };
        let is_done = || !self.processes().iter().any(|(_, line)| rests(line));
        assert!(wait_until(soon(), is_done), "a settler stays: {:?}", self.processes());
    }

    /// Waits until the last life of a stopped container, by its id, is charged: its cgroup is gone.
    ///
    /// # Panics
    /// If it stays.
    #[track_caller]
    pub fn await_charged(&self, id: &str) {
        let is_charged = || self.cgroups().iter().all(|dir| !dir.join(id).exists());
        assert!(wait_until(soon(), is_charged), "the cgroup of {id} stays");
    }

    /// The process that holds the host's namespaces.
    pub fn pid(&self) -> u32 {
        self.host.id()
    }

    /// A command that runs in the host's namespaces.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        enter(self.host.id(), &["-n", "-m"], program.as_ref())
    }

    /// A command that runs in the neighbour's network.
    pub fn neighbour_command(&self, program: impl AsRef<OsStr>) -> Command {
        enter(self.neighbour.id(), &["-n"], program.as_ref())
    }

    /// `dormouse --root DIR ARGUMENTS`, not started.
    pub fn dormouse(&self, arguments: &[&str]) -> Command {
        self.under(self.command(&self.program), arguments)
    }

    /// `TOOL dormouse --root DIR ARGUMENTS`, not started: for tools that observe or disturb the
    /// program.
    pub fn dormouse_under(&self, tool: &[&str], arguments: &[&str]) -> Command {
        let mut command = self.command(tool[0]);
        command.args(&tool[1..]).arg(&self.program);
        self.under(command, arguments)
    }

    fn under(&self, mut command: Command, arguments: &[&str]) -> Command {
        command.arg("--root").arg(self.root()).args(arguments);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs `dormouse` with nothing on its standard input.
    #[track_caller]
    pub fn dm(&self, arguments: &[&str]) -> Output {
        self.interlude();
        run(self.dormouse(arguments), b"", LIMIT)
    }

    /// Runs `dormouse` for at most `limit`.
    #[track_caller]
    pub fn dm_within(&self, limit: Duration, arguments: &[&str]) -> Output {
        self.interlude();
        run(self.dormouse(arguments), b"", limit)
    }

    /// Runs `dormouse` with `input` on its standard input.
    #[track_caller]
    pub fn dm_with_input(&self, input: &[u8], arguments: &[&str]) -> Output {
        self.interlude();
        run(self.dormouse(arguments), input, LIMIT)
    }

    /// Where `DORMOUSE_INTERLUDE` is set, all running containers are checkpointed, ended and
    /// restored before each command: any test is a checkpoint test as well. A container that cannot
    /// be saved continues, and the cause is printed.
    ///
    /// Interludes of one host end after a time: of a container with 28,000 connections each takes half a
    /// minute, longer on a busy machine, and the commands of a test would not be reached.
    #[track_caller]
    fn interlude(&self) {
        if std::env::var_os("DORMOUSE_INTERLUDE").is_none()
            || self.interludes_ms.load(Ordering::Relaxed) > INTERLUDES.as_millis() as u64
        {
            return;
        }
        let began = Instant::now();
        // The survey of a container with 20,000 open files takes a busy machine a minute.
        let dm = |arguments: &[&str]| run(self.dormouse(arguments), b"", 5 * LIMIT);
        for id in dm(&["ps", "--quiet", "--filter", "state=running"]).stdout.lines() {
            let to = self.dir().join("interlude");
            let to = to.to_str().expect("UTF-8");
            let saved = dm(&["checkpoint", "--to", to, id]);
            if saved.status == 0 {
                dm(&["restore", "--from", to, id]).ok();
                fs::remove_dir_all(to).expect("remove the checkpoint");
            }
            let what = if saved.status == 0 { "restored" } else { &saved.stderr };
            eprintln!("interlude: {id}: {}", what.trim_end());
        }
        self.interludes_ms.fetch_add(began.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// `inspect --json` of one container or image: the first printed record.
    #[track_caller]
    pub fn inspect(&self, name: &str) -> Value {
        let text = self.dm(&["inspect", "--json", name]).ok();
        let value: Value = serde_json::from_str(&text).expect("inspect --json prints JSON");
        match value {
            Value::Array(mut records) if !records.is_empty() => records.remove(0),
            other => other,
        }
    }

    /// The row of `check` for a feature of the kernel, by its name.
    #[track_caller]
    pub fn feature(&self, name: &str) -> Value {
        let text = self.dm(&["check", "--json"]).stdout;
        let all: Value = serde_json::from_str(&text).expect("check --json prints JSON");
        let rows = all["features"].as_array().expect("a list");
        rows.iter().find(|row| row["name"] == name).expect("a feature of this name").clone()
    }

    /// The state that `inspect` shows.
    #[track_caller]
    pub fn state_of(&self, name: &str) -> String {
        self.inspect(name)["state"].as_str().unwrap_or("no state").to_owned()
    }

    /// Puts a container to sleep as soon as its first process waits. A container that is active when it is
    /// stopped is woken at once; another attempt is made then.
    #[track_caller]
    pub fn put_to_sleep(&self, name: &str) {
        let waits = |pid: u64| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('S'))
        };
        let sleeps = || {
            let is_ready = self.inspect(name)["pid"].as_u64().is_none_or(waits);
            is_ready && {
                self.dm(&["sleep", name]).ok();
                self.state_of(name) == "asleep"
            }
        };
        let asleep = wait_until(Duration::from_secs(60) * slowness(), sleeps);
        assert!(asleep, "'{name}' stays awake: {}", self.inspect(name));
    }

    /// Waits until a container is in a state; panics after ten seconds.
    #[track_caller]
    pub fn wait_for_state(&self, name: &str, state: &str) {
        let mut last = String::new();
        let limit = Duration::from_secs(10) * slowness();
        let reached = wait_until(limit, || {
            last = self.state_of(name);
            last == state
        });
        assert!(reached, "'{name}' is {last}, not {state}");
    }

    /// Imports an image from a path.
    #[track_caller]
    pub fn import(&self, path: &Path, name: &str) {
        let path = path.to_str().expect("paths of tests are UTF-8");
        self.dm_within(Duration::from_secs(180), &["import", "--name", name, path]).ok();
    }

    /// Runs a shell script in the host's namespaces.
    #[track_caller]
    pub fn sh(&self, script: &str) -> Output {
        let mut command = self.command("sh");
        command.args(["-c", script]);
        run(command, b"", LIMIT)
    }

    /// Runs a shell script on the neighbour.
    #[track_caller]
    pub fn neighbour_sh(&self, script: &str) -> Output {
        let mut command = self.neighbour_command("sh");
        command.args(["-c", script]);
        run(command, b"", LIMIT)
    }

    /// Fetches a page as the neighbour. Retries for ten seconds while there is no listener.
    #[track_caller]
    pub fn fetch(&self, url: &str) -> String {
        let mut last = None;
        wait_until(soon(), || {
            let out = self.neighbour_sh(&format!("exec timeout 5 busybox wget -q -O - '{url}'"));
            let is_there = out.status == 0;
            last = Some(out);
            is_there
        });
        last.expect("at least one attempt").ok()
    }

    /// Waits until a command inside a container succeeds; panics after a minute.
    #[track_caller]
    pub fn wait_inside(&self, container: &str, script: &str) {
        let mut last = None;
        wait_until(Duration::from_secs(60) * slowness(), || {
            let out = self.dm(&["exec", container, "sh", "-c", script]);
            let is_so = out.status == 0;
            if !is_so {
                thread::sleep(Duration::from_millis(100));
            }
            last = Some(out);
            is_so
        });
        last.expect("at least one attempt").ok();
    }

    /// Runs a function on a thread that is in the host's network: sockets it opens are the host's.
    pub fn in_network<T: Send + 'static>(
        &self,
        function: impl FnOnce() -> T + Send + 'static,
    ) -> thread::JoinHandle<T> {
        let namespace = fs::File::open(format!("/proc/{}/ns/net", self.host.id()));
        let namespace = namespace.expect("the holder of the namespaces runs");
        thread::spawn(move || {
            let kind = Some(rustix::thread::LinkNameSpaceType::Network);
            rustix::thread::move_into_link_name_space(namespace.as_fd(), kind)
                .expect("root may enter a network namespace");
            function()
        })
    }

    /// Runs a function in a thread in the host's mount namespace.
    pub fn in_mounts<T: Send + 'static>(
        &self,
        function: impl FnOnce() -> T + Send + 'static,
    ) -> thread::JoinHandle<T> {
        let namespace = fs::File::open(format!("/proc/{}/ns/mnt", self.host.id()));
        let namespace = namespace.expect("the holder of the namespaces runs");
        thread::spawn(move || {
            // A thread that shares its working directory with others cannot enter one.
            let own = dormouse_kernel::call::CloneFlags::FS;
            dormouse_kernel::process::unshare(own).expect("a thread may");
            let kind = Some(rustix::thread::LinkNameSpaceType::Mount);
            rustix::thread::move_into_link_name_space(namespace.as_fd(), kind)
                .expect("root may enter a mount namespace");
            function()
        })
    }

    /// The first address of a container.
    #[track_caller]
    pub fn address_of(&self, name: &str) -> String {
        let record = self.inspect(name);
        record["address"].as_str().map(str::to_owned).expect("an address")
    }

    /// Processes of this host besides the test itself: the keeper, containers, commands.
    pub fn processes(&self) -> Vec<(u32, String)> {
        leftover::processes(self.host.id(), self.dir.path())
    }

    /// Returns whether a process is in a namespace of this host. The look is at one process only, so
    /// it is fast where [`Host::processes`] reads those of the whole machine.
    pub fn has_process(&self, pid: u32) -> bool {
        leftover::is_inside(self.host.id(), pid)
    }

    /// The keeper of this host, if it has one.
    pub fn keeper(&self) -> Option<u32> {
        self.keepers().first().copied()
    }

    /// All keepers; more than one is a fault. A newborn before its execve has their name, too.
    pub fn keepers(&self) -> Vec<u32> {
        let all = self.processes().into_iter().filter(|(_, line)| line == "[dormouse-keeper]");
        let named: Vec<u32> = all.map(|(pid, _)| pid).collect();
        let is_born = |pid: &&u32| leftover::parent(**pid).is_some_and(|p| !named.contains(&p));
        named.iter().filter(is_born).copied().collect()
    }

    /// The mount points of the host.
    pub fn mounts(&self) -> Vec<String> {
        leftover::mounts(self.host.id())
    }

    /// The cgroups above this host's containers, one for each hierarchy that has it.
    pub fn cgroups(&self) -> Vec<PathBuf> {
        leftover::cgroups(&leftover::cgroup_name(&self.root()))
    }

    fn state(&self) -> State {
        let shown = self.ip(self.command("ip"), "link show\nroute show table all\n").stdout;
        let mut links = String::new();
        let mut routes = String::new();
        for line in shown.lines() {
            if line.starts_with(|first: char| first.is_ascii_digit()) && line.contains("> mtu ") {
                let what: Vec<&str> = line.splitn(3, ':').take(2).collect();
                links.push_str(&format!("{}\n", what.join(":")));
            } else if !line.contains(" pref ") || line.contains(" proto static ") {
                // Addresses that the kernel adds to IPv6 appear when they are ready, and so does a
                // carrier.
                routes.push_str(&format!("{}\n", line.replace(" linkdown", "")));
            }
        }
        let mut nft = self.command("nft");
        nft.args(["list", "ruleset"]);
        State { mounts: self.mounts(), links, routes, rules: run(nft, b"", LIMIT).stdout }
    }

    /// Removes all containers, resets the host, and returns all leftovers.
    fn leave(&self) -> Vec<String> {
        let mut left = Vec::new();
        let mut must = |out: Output| {
            if out.status != 0 {
                left.push(out.to_string());
            }
            out.stdout
        };
        let ids = must(self.dm(&["ps", "--all", "--quiet"]));
        for id in ids.lines() {
            must(self.dm(&["rm", "--force", id]));
        }
        // A failed start may still be ending, and until then a reset is refused.
        let mut reset = None;
        wait_until(soon(), || {
            let out = self.dm(&["internal", "reset"]);
            let is_done = out.status == 0;
            reset = Some(out);
            is_done
        });
        reset.map(must);
        wait_until(soon(), || self.processes().is_empty());
        left.extend(self.processes().iter().map(|(pid, line)| format!("process {pid}: {line}")));
        left.extend(self.cgroups().iter().map(|path| format!("cgroup {}", path.display())));
        let after = self.state();
        let new = |mount: &&String| !self.before.mounts.contains(mount);
        left.extend(after.mounts.iter().filter(new).map(|mount| format!("mount {mount}")));
        for (what, before, after) in [
            ("links", &self.before.links, &after.links),
            ("routes", &self.before.routes, &after.routes),
            ("nftables rules", &self.before.rules, &after.rules),
        ] {
            if before != after {
                left.push(format!("{what} before:\n{before}\n{what} after:\n{after}"));
            }
        }
        left
    }

    fn kill_all(&self) {
        for (pid, _) in self.processes() {
            let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
            let signal = rustix::process::Signal::KILL;
            // Ignored: the process may have ended since.
            let _ = pid.map(|pid| rustix::process::kill_process(pid, signal));
        }
    }

    /// Kills all processes of this host, and unmounts their mounts below `dir`: leftovers of a
    /// foreign daemon that was killed.
    pub fn clear_below(&self, dir: &Path) {
        self.kill_all();
        let below = dir.display();
        self.sh(&format!(
            "for m in $(awk '$5 ~ \"^{below}/\" {{print $5}}' /proc/self/mountinfo | sort -r); do \
             umount -l $m; done; true"
        ));
    }

    /// Kills and removes by force what `leave` may have found.
    fn clear(&mut self) {
        self.kill_all();
        wait_until(Duration::from_secs(2), || self.processes().is_empty());
        leftover::remove_cgroups(&leftover::cgroup_name(&self.root()));
        for holder in [&mut self.host, &mut self.neighbour] {
            let _ = holder.kill(); // ignored: may have ended already
            let _ = holder.wait();
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if thread::panicking() {
            self.clear();
            return;
        }
        // A panic on the way, such as a command that never ends, must not prevent the rest of the
        // cleanup.
        let left = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.leave()));
        self.clear();
        match left {
            Ok(left) => assert!(left.is_empty(), "left on the host:\n{}", left.join("\n")),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// A command in some namespaces of a process.
fn enter(pid: u32, namespaces: &[&str], program: &OsStr) -> Command {
    let mut command = Command::new("busybox");
    command.args(["nsenter", "-t", &pid.to_string()]).args(namespaces).arg("--");
    // By its path: busybox prefers its own applet for a bare name.
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places = std::env::split_paths(&path).map(|dir| dir.join(program));
    let found = places.find(|path| path.is_file());
    command.arg(found.unwrap_or_else(|| program.into()));
    command
}

/// Starts a process that holds new namespaces until its standard input ends.
fn hold(namespaces: &[&str], prepare: &str) -> Child {
    let mut child = Command::new("busybox")
        .arg("unshare")
        .args(namespaces)
        .args([
            "--",
            "busybox",
            "sh",
            "-c",
            &format!("{prepare} && echo ready && exec cat >/dev/null"),
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("busybox starts");
    let mut line = String::new();
    let stdout = child.stdout.take().expect("a pipe");
    BufReader::new(stdout).read_line(&mut line).expect("a pipe can be read");
    assert_eq!(line, "ready\n", "namespaces cannot be made");
    child
}
