//! containerd and dockerd, with our shim, and with our runtime under their own shim.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use dormouse_testkit::{Host, Output, Registry, Terminal, image, program, run, soon, wait_until};

/// The time limit of a command.
const LIMIT: Duration = Duration::from_secs(60);
/// The option of `ctr run` that selects our shim.
const OURS: &str = "--runtime io.containerd.dormouse.v2";

/// A daemon on a private host. Its drop kills it and unmounts its mounts.
struct Daemon {
    child: Option<Child>,
    command: Vec<String>,
    dir: PathBuf,
    host: Host,
}

impl Daemon {
    fn start(host: Host, command: Vec<String>) -> Self {
        let mut daemon = Self { child: None, command, dir: host.dir().to_owned(), host };
        daemon.again();
        daemon
    }

    /// Starts the daemon again.
    fn again(&mut self) {
        let ours = program("containerd-shim-dormouse-v2");
        let ours = ours.parent().expect("a directory").display().to_string();
        let path = std::env::var("PATH").expect("there is a PATH");
        let log = fs::File::options().create(true).append(true).open(self.dir.join("log"));
        let log = log.expect("opened");
        let mut command = self.host.command(&self.command[0]);
        command.args(&self.command[1..]).env("PATH", format!("{ours}:/usr/sbin:{path}"));
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("duplicated")).stderr(log);
        self.child = Some(command.spawn().expect("the command starts"));
    }

    fn kill(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        let _ = child.kill(); // may have ended already
        let _ = child.wait();
    }

    fn wait_for(&self, answers: impl FnMut() -> bool) {
        let is_up = wait_until(soon(), answers);
        let log = fs::read_to_string(self.dir.join("log")).unwrap_or_default();
        assert!(is_up, "the daemon does not answer:\n{log}");
    }

    /// Processes of shims on this host.
    fn shims(&self) -> Vec<u32> {
        let all = self.host.processes().into_iter();
        all.filter(|(_, name)| name.contains("shim-dormouse")).map(|(pid, _)| pid).collect()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
        // A daemon leaves its mounts behind.
        self.host.clear_below(&self.dir);
    }
}

/// containerd with an image of busybox.
struct Containerd {
    daemon: Daemon,
    namespace: String,
}

const IMAGE: &str = "127.0.0.1:5000/box:1";

impl Containerd {
    fn new() -> Self {
        let host = Host::new();
        let dir = host.dir().to_owned();
        let config = dir.join("containerd.toml");
        let text = format!(
            "version = 2\nroot = \"{0}/lib\"\nstate = \"{0}/run\"\n\
             disabled_plugins = [\"io.containerd.grpc.v1.cri\", \"io.containerd.internal.v1.opt\"]\n\
             [grpc]\n  address = \"{0}/sock\"\n",
            dir.display()
        );
        fs::write(&config, text).expect("written");
        let pull = {
            host.import(&image::busybox(), IMAGE);
            let registry = Registry::start(&host);
            host.dm(&["push", IMAGE]).ok();
            registry
        };
        let words = ["containerd", "--config", config.to_str().expect("UTF-8")];
        let name =
            dir.file_name().expect("a name").to_string_lossy().trim_start_matches('.').into();
        let this = Self {
            daemon: Daemon::start(host, words.map(str::to_owned).to_vec()),
            namespace: name,
        };
        this.daemon.wait_for(|| this.ctr("version").status == 0);
        this.ctr(&format!("image pull --plain-http {IMAGE}")).ok();
        drop(pull);
        this
    }

    fn command(&self, words: &str) -> Command {
        let mut command = self.daemon.host.command("ctr");
        command.arg("--address").arg(self.daemon.dir.join("sock"));
        command.args(["--namespace", &self.namespace]);
        command.args(words.split(' ').filter(|word| !word.is_empty()));
        command
    }

    /// Runs `ctr` with these words.
    #[track_caller]
    fn ctr(&self, words: &str) -> Output {
        run(self.command(words), b"", LIMIT)
    }

    /// Runs `ctr` until its output contains these texts (of standard output, of standard error), then
    /// sends it a line and the end of its input.
    ///
    /// `ctr` opens the fifos of the output in the background, and gives up on one that is not open
    /// when the task exits: a busy host loses the output of a short task.
    #[track_caller]
    fn end_after(&self, ctr: &Command, input: &str, (out, err): (&str, &str)) -> Output {
        let script = "cd \"$(mktemp -d)\" && touch out err || exit
            input=$1 out=$2 err=$3; shift 3
            has() { [ -z \"$2\" ] || grep -q \"$2\" $1; }
            (printf %s \"$input\"
             until has out \"$out\" && has err \"$err\"; do sleep 0.05; done
             echo) | \"$@\" >out 2>err
            status=$?; cat out; cat err >&2; rm -r \"$PWD\"; exit $status";
        let mut command = self.daemon.host.command("sh");
        command.args(["-c", script, "sh", input, out, err]).arg(ctr.get_program());
        command.args(ctr.get_args());
        run(command, b"", LIMIT)
    }

    /// Runs a script in an existing container until its output contains a text.
    #[track_caller]
    fn exec(&self, name: &str, id: &str, (script, output): (&str, &str)) -> Output {
        let mut command = self.command(&format!("task exec --exec-id {id} {name} sh -c"));
        command.arg(format!("{script}; status=$?; read line; exit $status"));
        self.end_after(&command, "", (output, ""))
    }

    /// Runs a script in a new container until its output contains these texts.
    #[track_caller]
    fn run(&self, flags: &str, name: &str, script: &str, outputs: (&str, &str)) -> Output {
        let mut command = self.command(&format!("run {flags} {IMAGE} {name} sh -c"));
        command.arg(script);
        self.end_after(&command, "", outputs)
    }

    /// Returns the pid and status of a task, from its line `NAME PID STATUS`.
    fn task(&self, name: &str) -> Option<(u32, String)> {
        let all = self.ctr("task ls").ok();
        let line = all.lines().find(|line| line.split_whitespace().next() == Some(name))?;
        let mut words = line.split_whitespace().skip(1);
        Some((words.next()?.parse().ok()?, words.next()?.to_owned()))
    }

    #[track_caller]
    fn wait_for(&self, name: &str, status: &str) {
        let is = || self.task(name).is_some_and(|(_, now)| now == status);
        assert!(wait_until(LIMIT, is), "{name} is {:?}", self.task(name));
    }

    /// Asserts that no container, shim, cgroup or mount is left.
    #[track_caller]
    fn assert_nothing_left(&self) {
        let gone = || self.daemon.shims().is_empty();
        assert!(wait_until(soon(), gone), "a shim is left");
        let name = &self.namespace;
        let found = format!("find /sys/fs/cgroup -type d -name '{name}*' 2>/dev/null; true");
        assert_eq!(self.daemon.host.sh(&found).ok(), "");
        let bundles = format!("{}/run/io.containerd.runtime.v2.task", self.daemon.dir.display());
        let mounts = self.daemon.host.mounts();
        assert!(!mounts.iter().any(|m| m.contains(&bundles)), "{mounts:?}");
        let left = format!("find {bundles} -mindepth 2 2>/dev/null; true");
        assert_eq!(self.daemon.host.sh(&left).ok(), "");
    }
}

fn parent(pid: u32) -> u32 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("a live process");
    let line = text.lines().find_map(|line| line.strip_prefix("PPid:"));
    line.and_then(|pid| pid.trim().parse().ok()).expect("a parent")
}

/// All requests that `ctr` can send, with one way of running containers.
fn everything(containerd: &Containerd, flags: &str) {
    let script = "echo hello; echo oh >&2; read line; exit 7";
    let out = containerd.run(&format!("--rm {flags}"), "one", script, ("hello", "oh"));
    assert_eq!((out.status, out.stdout.trim()), (7, "hello"), "{out:?}");
    assert!(out.stderr.contains("oh"), "{out:?}");
    // Standard input of the container ends with that of `ctr`.
    let ctr = containerd.command(&format!("run --rm {flags} {IMAGE} two cat"));
    assert_eq!(containerd.end_after(&ctr, "typed", ("typed", "")).ok(), "typed");

    let limit = "--memory-limit 67108864";
    containerd.ctr(&format!("run -d {flags} {limit} {IMAGE} three sleep 1000")).ok();
    let (pid, status) = containerd.task("three").expect("an entry of the list");
    assert_eq!(status, "RUNNING");
    let out = containerd.exec("three", "e", ("id -u; (exit 5)", "0"));
    assert_eq!((out.status, out.stdout.trim()), (5, "0"), "{out:?}");
    containerd.ctr("task pause three").ok();
    assert_eq!(containerd.task("three").expect("listed").1, "PAUSED");
    containerd.ctr("task resume three").ok();
    assert_eq!(containerd.task("three").expect("listed").1, "RUNNING");
    let metrics = containerd.ctr("task metrics three").ok();
    let used = |name: &str| {
        let line = metrics.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_whitespace().nth(1)).map(str::to_owned)
    };
    // The names of cgroup v1, and those of v2.
    let either = |v1: &str, v2: &str| used(v1).or_else(|| used(v2)).unwrap_or_default();
    assert_eq!(used("pids.current").as_deref(), Some("1"), "{metrics}");
    assert_eq!(either("memory.limit_in_bytes", "memory.usage_limit"), "67108864", "{metrics}");
    for (v1, v2) in [("memory.usage_in_bytes", "memory.usage"), ("cpuacct.usage", "cpu.usage_usec")]
    {
        let number: u64 = either(v1, v2).parse().unwrap_or(0);
        assert!(number > 0, "{v1}: {metrics}");
    }
    assert!(containerd.ctr("task ps three").ok().contains(&pid.to_string()));
    // An exec'd process is signalled alone.
    containerd.ctr("task exec -d --exec-id other three sleep 2000").ok();
    containerd.ctr("task kill --exec-id other -s KILL three").ok();
    assert_eq!(containerd.task("three").expect("listed").1, "RUNNING");
    containerd.ctr("task kill -s KILL three").ok();
    containerd.wait_for("three", "STOPPED");
    containerd.ctr("task rm three");
    containerd.ctr("container rm three").ok();

    let words = containerd.command(&format!("run --rm -t {flags} {IMAGE} tty sh"));
    let mut terminal = Terminal::spawn(&words);
    terminal.send("tty; stty size; exit 3\n");
    terminal.expect("/dev/pts/0");
    assert_eq!(terminal.wait(), 3);

    let out = containerd.ctr(&format!("run --rm {flags} {IMAGE} bad /nowhere"));
    assert!(out.status == 1 && out.stderr.contains("no such file or directory"), "{out:?}");
    containerd.ctr("container rm bad");
}

#[test]
fn our_shim_runs_containers() {
    let containerd = Containerd::new();
    everything(&containerd, OURS);
    containerd.assert_nothing_left();
    // A bind of the copied layers instead of an overlay.
    containerd.ctr(&format!("image pull --snapshotter native --plain-http {IMAGE}"));
    let flags = format!("--rm {OURS} --memory-limit 33554432 --cwd /tmp");
    let out = containerd.run(&flags, "limited", "pwd; read line", ("/tmp", ""));
    assert_eq!(out.ok().trim(), "/tmp");
    containerd.assert_nothing_left();
}

#[test]
fn runc_shim_runs_containers_with_our_runtime() {
    let containerd = Containerd::new();
    let ours = program("dormouse-oci");
    let flags = format!("--runtime io.containerd.runc.v2 --runc-binary {}", ours.display());
    everything(&containerd, &flags);
    containerd.assert_nothing_left();
}

#[test]
fn pod_has_one_shim_and_no_abstract_socket() {
    let containerd = Containerd::new();
    let pod = |pod: &str| format!("run -d {OURS} --annotation io.kubernetes.cri.sandbox-id={pod}");
    for (name, of) in [("a", "one"), ("b", "one"), ("c", "one"), ("d", "two")] {
        containerd.ctr(&format!("{} {IMAGE} {name} sleep 1000", pod(of))).ok();
    }
    assert_eq!(containerd.daemon.shims().len(), 2);
    let shim = |name: &str| parent(containerd.task(name).expect("listed").0);
    assert_eq!(shim("a"), shim("b"));
    assert_ne!(shim("a"), shim("d"));
    // CVE-2020-15257: a process that shares the host's network does not reach the shim's socket.
    let names = fs::read_to_string(format!("/proc/{}/net/unix", shim("a"))).expect("read");
    let is_ours = |line: &&str| line.contains("dormouse-shim");
    let sockets: Vec<&str> =
        names.lines().filter(is_ours).filter_map(|line| line.split_whitespace().last()).collect();
    assert!(!sockets.is_empty() && sockets.iter().all(|name| name.starts_with('/')), "{names}");
    for path in sockets {
        let Ok(file) = fs::metadata(path) else { continue }; // of another test, which has ended
        assert!(file.file_type().is_socket());
        assert_eq!(file.permissions().mode() & 0o777, 0o600, "{path}");
    }
    // The other containers of a pod survive the removal of one.
    let end = |name: &str| {
        containerd.ctr(&format!("task kill -s KILL {name}")).ok();
        containerd.wait_for(name, "STOPPED");
        containerd.ctr(&format!("task rm {name}"));
        containerd.ctr(&format!("container rm {name}")).ok();
    };
    end("a");
    assert_eq!(containerd.exec("b", "x", ("echo alive", "alive")).ok(), "alive");
    ["b", "c", "d"].into_iter().for_each(end);
    containerd.assert_nothing_left();
}

#[test]
fn killed_shim_leaves_nothing() {
    let containerd = Containerd::new();
    containerd.ctr(&format!("run -d {OURS} {IMAGE} c sleep 1000")).ok();
    let (pid, _) = containerd.task("c").expect("listed");
    let shim = parent(pid);
    containerd.daemon.host.sh(&format!("kill -9 {shim}")).ok();
    let is_gone = || !Path::new(&format!("/proc/{pid}/root/bin")).exists();
    assert!(wait_until(LIMIT, is_gone), "the container survives its shim");
    assert!(wait_until(LIMIT, || containerd.task("c").is_none()), "{:?}", containerd.task("c"));
    containerd.ctr("container rm c").ok();
    containerd.assert_nothing_left();
}

#[test]
fn containers_outlive_containerd() {
    let mut containerd = Containerd::new();
    containerd.ctr(&format!("run -d {OURS} {IMAGE} c sleep 1000")).ok();
    containerd.ctr(&format!("run -d {OURS} {IMAGE} short sleep 3")).ok();
    let before = containerd.task("c").expect("listed");
    containerd.daemon.kill();
    std::thread::sleep(Duration::from_secs(4)); // the short one ends meanwhile
    containerd.daemon.again();
    containerd.daemon.wait_for(|| containerd.ctr("version").status == 0);
    assert_eq!(containerd.task("c"), Some(before));
    assert_eq!(containerd.exec("c", "x", ("echo alive", "alive")).ok(), "alive");
    containerd.wait_for("short", "STOPPED");
    containerd.ctr("task kill -s KILL c").ok();
    for name in ["c", "short"] {
        containerd.wait_for(name, "STOPPED");
        containerd.ctr(&format!("task rm {name}"));
        containerd.ctr(&format!("container rm {name}")).ok();
    }
    containerd.assert_nothing_left();
}

#[test]
fn docker_runs_containers_with_our_runtime() {
    let host = Host::new();
    let dir = host.dir().to_owned();
    let place = |name: &str| dir.join(name).display().to_string();
    let ours = program("dormouse-oci").display().to_string();
    let words = vec![
        "dockerd".to_owned(),
        "--data-root".to_owned(),
        place("lib"),
        "--exec-root".to_owned(),
        place("run"),
        "--pidfile".to_owned(),
        place("pid"),
        "--host".to_owned(),
        format!("unix://{}", place("sock")),
        "--add-runtime".to_owned(),
        format!("dormouse={ours}"),
        "--bridge=none".to_owned(),
        "--iptables=false".to_owned(),
        "--ip6tables=false".to_owned(),
        "--storage-driver=vfs".to_owned(),
    ];
    let daemon = Daemon::start(host, words);
    let socket = format!("unix://{}", place("sock"));
    let docker = |words: &[&str]| {
        let mut command = daemon.host.command("/usr/bin/docker");
        command.args(["--host", &socket]).args(words);
        run(command, b"", LIMIT)
    };
    daemon.wait_for(|| docker(&["version"]).status == 0);
    let tar = place("box.tar");
    daemon.host.sh(&format!("tar -C {} -cf {tar} .", image::busybox().display())).ok();
    docker(&["import", &tar, "box"]).ok();
    let net = ["--runtime", "dormouse", "--network", "none"];
    let new = |more: &[&str], command: &[&str]| {
        docker(&[&["run"], &net[..], more, &["box"], command].concat())
    };
    let out = new(&["--rm"], &["sh", "-c", "echo hello; exit 7"]);
    assert_eq!((out.status, out.stdout.trim()), (7, "hello"), "{out:?}");
    new(&["-d", "--name", "kept"], &["sh", "-c", "echo said; exec sleep 1000"]).ok();
    assert_eq!(docker(&["exec", "kept", "id", "-u"]).ok(), "0");
    assert!(wait_until(LIMIT, || docker(&["logs", "kept"]).ok() == "said"));
    docker(&["pause", "kept"]).ok();
    assert!(docker(&["ps"]).ok().contains("(Paused)"));
    docker(&["unpause", "kept"]).ok();
    assert!(docker(&["top", "kept"]).ok().contains("sleep 1000"));
    docker(&["update", "--memory", "64m", "--memory-swap", "128m", "kept"]).ok();
    assert!(docker(&["stats", "--no-stream", "kept"]).ok().contains("64MiB"));
    docker(&["stop", "-t", "1", "kept"]).ok();
    docker(&["rm", "kept"]).ok();
    let volume = format!("{}:/volume:ro", dir.display());
    let limits = ["--rm", "--memory", "64m", "--cpus", "0.5", "--pids-limit", "50", "-v", &volume];
    assert!(new(&limits, &["ls", "/volume"]).ok().contains("box.tar"));
}
