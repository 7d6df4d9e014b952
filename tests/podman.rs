//! podman with our runtime: the common commands, each on a private host.
//!
//! State of podman outside of its `--root` and `--runroot` is in filesystems that cover the
//! machine's own directories for the time of a test.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use dormouse_testkit::{Host, Output, Terminal, image, program, run, slowness, soon, wait_until};

/// The time limit of a command.
const LIMIT: Duration = Duration::from_secs(60);
/// Directories in which podman, netavark and our runtime write regardless of their options.
const COVERED: [&str; 3] = ["/run", "/dev/shm", "/var/tmp"];
/// Programs that Debian's packages cannot place elsewhere.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// podman on a private host, with an image `box` of busybox.
pub(crate) struct Podman {
    dir: PathBuf,
    /// The parent cgroup of all containers of this test.
    cgroup: String,
    host: Host,
}

impl Podman {
    pub(crate) fn new() -> Self {
        let host = Host::new();
        let dir = host.dir().to_owned();
        let name = dir.file_name().expect("a name").to_string_lossy();
        let cgroup = format!("podman-{}", name.trim_start_matches('.'));
        COVERED.iter().for_each(|place| {
            host.sh(&format!("mount -t tmpfs podman {place}")).ok();
        });
        // Limits that need no CAP_SYS_RESOURCE.
        let text = format!(
            "[containers]\n\
             default_ulimits = [\"nofile=1024:1024\", \"nproc=1000:1000\"]\n\
             log_driver = \"k8s-file\"\n\
             [engine]\n\
             cgroup_manager = \"cgroupfs\"\n\
             events_logger = \"file\"\n\
             lock_type = \"file\"\n\
             runtime_supports_json = [\"crun\", \"runc\", \"dormouse-oci\"]\n\
             [network]\n\
             network_backend = \"netavark\"\n\
             network_config_dir = \"{}/networks\"\n",
            dir.display()
        );
        fs::write(dir.join("containers.conf"), text).expect("written");
        let tar = dir.join("box.tar").display().to_string();
        host.sh(&format!("tar -C {} -cf {tar} .", image::busybox().display())).ok();
        let this = Self { dir, cgroup, host };
        this.podman(&["import", "-q", &tar, "box"]).ok();
        this
    }

    pub(crate) fn host(&self) -> &Host {
        &self.host
    }

    fn command(&self, words: &[&str]) -> Command {
        let place = |name: &str| self.dir.join(name).display().to_string();
        let mut command = self.host.command("env");
        command.arg(format!("CONTAINERS_CONF={}", place("containers.conf")));
        command.arg(format!("PATH={PATH}"));
        command.args(["podman", "--root", &place("lib"), "--runroot", &place("run")]);
        command.args(["--tmpdir", &place("libpod"), "--storage-driver", "overlay", "--runtime"]);
        command.arg(program("dormouse-oci"));
        let (verb, rest) = words.split_first().expect("a verb");
        command.arg(verb);
        match (*verb, rest.split_first()) {
            ("run" | "create", _) => {
                command.arg(format!("--cgroup-parent=/{}", self.cgroup)).args(rest);
            }
            ("pod", Some((&"create", rest))) => {
                command.args(["create", &format!("--cgroup-parent=/{}", self.cgroup)]).args(rest);
            }
            _ => {
                command.args(rest);
            }
        }
        command
    }

    /// Runs podman.
    #[track_caller]
    pub(crate) fn podman(&self, words: &[&str]) -> Output {
        run(self.command(words), b"", LIMIT)
    }

    /// Runs a script in a container of its own.
    #[track_caller]
    fn script(&self, flags: &[&str], script: &str) -> Output {
        self.podman(&[&["run", "--rm"], flags, &["box", "sh", "-c", script]].concat())
    }

    /// Starts a container that stays.
    #[track_caller]
    fn start(&self, name: &str, flags: &[&str], script: &str) {
        let words = [&["run", "-d", "--name", name], flags, &["box", "sh", "-c", script]];
        self.podman(&words.concat()).ok();
    }

    /// Returns one value of `inspect`.
    #[track_caller]
    fn inspect(&self, name: &str, what: &str) -> String {
        self.podman(&["inspect", "--format", &format!("{{{{{what}}}}}"), name]).ok()
    }

    #[track_caller]
    fn wait_for(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        assert!(wait_until(LIMIT * slowness(), &mut is_so), "{what}");
    }

    /// Returns the contents of a file of a container's cgroup, by its names in v1 and v2.
    #[track_caller]
    fn limit(&self, name: &str, controller: &str, v1: &str, v2: &str) -> String {
        let pid = self.inspect(name, ".State.Pid");
        let table = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("a live process");
        let path = |wanted: &str| {
            let each = table.lines().map(|line| line.splitn(3, ':').collect::<Vec<_>>());
            let mut of = each.filter(|l| l[1].split(',').any(|w| w == wanted));
            of.next().map(|l| l[2].trim_start_matches('/').to_owned())
        };
        let top = Path::new("/sys/fs/cgroup");
        let file = match path(controller) {
            Some(path) => top.join(controller).join(path).join(v1),
            None => top.join(path("").expect("v2")).join(v2),
        };
        let text = fs::read_to_string(&file);
        text.unwrap_or_else(|e| panic!("{}: {e}", file.display())).trim().to_owned()
    }

    /// Asserts that no container, process, state of ours or cgroup of a container is left.
    #[track_caller]
    fn assert_nothing_left(&self) {
        assert_eq!(self.podman(&["ps", "--all", "--quiet"]).ok(), "");
        let processes = || self.host.processes();
        let gone = || processes().is_empty();
        assert!(wait_until(soon(), gone), "{:?}", processes());
        assert_eq!(self.host.sh("ls /run/dormouse-oci 2>/dev/null; true").ok(), "");
        let found = format!("find /sys/fs/cgroup -type d -path '*{}/libpod-*'; true", self.cgroup);
        // podman's own cgroups for its monitors stay.
        let left = self.host.sh(&found).ok();
        let left: Vec<&str> = left.lines().filter(|dir| !dir.contains("conmon")).collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        // Leftovers of podman: mounts of its store, bridges, rules, its parent cgroups.
        self.host.clear_below(&self.dir);
        COVERED.iter().for_each(|place| {
            self.host.sh(&format!("umount -l {place}"));
        });
        self.host.sh(
            "nft flush ruleset; ip -o link show type bridge | cut -d: -f2 | xargs -rn1 ip link del",
        );
        self.host.sh(&format!(
            "find /sys/fs/cgroup -depth -type d -path '*/{}*' -exec rmdir {{}} +",
            self.cgroup
        ));
    }
}

#[test]
fn podman_runs_and_removes_containers() {
    let podman = Podman::new();
    let out = podman.script(&[], "echo hello; echo oh >&2; exit 7");
    assert_eq!((out.status, out.stdout.as_str()), (7, "hello\n"), "{out:?}");
    assert!(out.stderr.contains("oh"), "{out:?}");
    let typed = podman.command(&["run", "--rm", "-i", "box", "cat"]);
    assert_eq!(run(typed, b"typed", LIMIT).ok(), "typed");
    // podman's report of a program that cannot be executed.
    let out = podman.podman(&["run", "--rm", "box", "/nowhere"]);
    assert!(out.status == 127 && out.stderr.contains("no such file or directory"), "{out:?}");
    let out = podman.podman(&["run", "--rm", "box", "nowhere"]);
    assert!(out.status == 127 && out.stderr.contains("not found in $PATH"), "{out:?}");
    let out = podman.podman(&["run", "--rm", "box", "/etc/passwd"]);
    assert!(out.status == 126 && out.stderr.contains("ermission denied"), "{out:?}");

    let limits = ["--memory", "64m", "--pids-limit", "50", "--cpus", "0.5", "--hostname", "named"];
    podman.start(
        "c",
        &limits,
        "trap 'echo stopping; exit 5' TERM; echo said; while :; do sleep 0.1; done",
    );
    assert_eq!(
        podman.podman(&["ps", "--format", "{{.Names}} {{.Status}}"]).ok().split(' ').next(),
        Some("c")
    );
    podman.wait_for("no output", || podman.podman(&["logs", "c"]).ok() == "said");
    assert_eq!(podman.limit("c", "memory", "memory.limit_in_bytes", "memory.max"), "67108864");
    assert_eq!(podman.limit("c", "pids", "pids.max", "pids.max"), "50");

    let exec = |words: &[&str]| podman.podman(&[&["exec"], words].concat());
    assert_eq!(exec(&["c", "hostname"]).ok(), "named");
    assert_eq!(
        exec(&["-u", "user", "-w", "/tmp", "-e", "A=b", "c", "sh", "-c", "id -u; pwd; echo $A"])
            .ok(),
        "1000\n/tmp\nb"
    );
    assert_eq!(exec(&["c", "sh", "-c", "exit 9"]).status, 9);
    assert_eq!(exec(&["c", "nowhere"]).status, 127);
    assert_eq!(run(podman.command(&["exec", "-i", "c", "cat"]), b"typed", LIMIT).ok(), "typed");
    exec(&["-d", "c", "sh", "-c", "echo > /tmp/by-exec; exec sleep 1000"]).ok();
    podman.wait_for("a detached exec has no effect", || {
        exec(&["c", "test", "-e", "/tmp/by-exec"]).status == 0
    });
    let top = podman.podman(&["top", "c", "pid", "comm"]).ok();
    assert!(top.lines().any(|line| line.split_whitespace().eq(["1", "sh"])), "{top}");

    let stats =
        podman.podman(&["stats", "--no-stream", "--format", "{{.MemUsage}} {{.PIDS}}", "c"]).ok();
    let words: Vec<&str> = stats.split_whitespace().collect();
    // The shell, its child, and the exec'd process.
    assert!(words[2] == "67.11MB" && ["2", "3"].contains(&words[3]), "{stats}");
    assert!(!words[0].starts_with("0B"), "{stats}");
    podman.podman(&["update", "--memory", "128m", "c"]).ok();
    assert_eq!(podman.limit("c", "memory", "memory.limit_in_bytes", "memory.max"), "134217728");

    podman.podman(&["pause", "c"]).ok();
    assert_eq!(podman.inspect("c", ".State.Status"), "paused");
    podman.podman(&["unpause", "c"]).ok();
    assert_eq!(podman.inspect("c", ".State.Status"), "running");
    podman.podman(&["cp", "c:/etc/passwd", &podman.dir.join("copy").display().to_string()]).ok();
    assert!(fs::read_to_string(podman.dir.join("copy")).expect("copied").contains("user:x:1000"));

    podman.podman(&["stop", "-t", "30", "c"]).ok();
    assert_eq!(podman.inspect("c", ".State.Status"), "exited");
    assert_eq!(podman.inspect("c", ".State.ExitCode"), "5");
    assert_eq!(podman.podman(&["logs", "c"]).ok(), "said\nstopping");
    podman.podman(&["start", "c"]).ok();
    podman.podman(&["restart", "-t", "5", "c"]).ok();
    podman.podman(&["kill", "c"]).ok();
    assert_eq!(podman.podman(&["wait", "c"]).ok(), "137");
    podman.podman(&["rm", "c"]).ok();

    // A container that ignores SIGTERM is killed. A running one is removed by force.
    podman.start("deaf", &[], "trap : TERM; while :; do sleep 0.1; done");
    podman.podman(&["stop", "-t", "1", "deaf"]).ok();
    assert_eq!(podman.inspect("deaf", ".State.ExitCode"), "137");
    podman.podman(&["start", "deaf"]).ok();
    podman.podman(&["rm", "-f", "-t", "0", "deaf"]).ok();
    podman.assert_nothing_left();
}

#[test]
fn terminals_are_sized_attached_and_detached() {
    let podman = Podman::new();
    // The container receives the size a moment after its start.
    let sized = "until stty size | grep -q '24 80'; do sleep 0.1; done; echo si''zed; tty\n";
    let mut terminal = Terminal::spawn(&podman.command(&["run", "--rm", "-it", "box", "sh"]));
    terminal.send(sized);
    terminal.expect("sized");
    terminal.expect("/dev/pts/0");
    terminal.resize(30, 100);
    terminal.send("until stty size | grep -q '30 100'; do sleep 0.1; done; echo lar''ger\n");
    terminal.expect("larger");
    terminal.send("exit 3\n");
    assert_eq!(terminal.wait(), 3);

    podman.start("c", &["-it"], "read word; echo got $word; exec sleep 1000");
    let mut terminal = Terminal::spawn(&podman.command(&["exec", "-it", "c", "sh"]));
    terminal.send(sized);
    terminal.expect("sized");
    terminal.expect("/dev/pts/1");
    terminal.send("exit 4\n");
    assert_eq!(terminal.wait(), 4);
    let mut terminal =
        Terminal::spawn(&podman.command(&["attach", "--detach-keys", "ctrl-x", "c"]));
    terminal.send("something\n");
    terminal.expect("got something");
    terminal.send("\u{18}");
    assert_eq!(terminal.wait(), 0);
    assert_eq!(podman.inspect("c", ".State.Status"), "running");
    podman.podman(&["rm", "-f", "-t", "0", "c"]).ok();
    podman.assert_nothing_left();
}

#[test]
fn podman_volumes_and_mounts_work() {
    let podman = Podman::new();
    podman.podman(&["volume", "create", "kept"]).ok();
    // A new volume starts with the image's files at its mount point.
    let of_image = podman.script(&["-v", "kept:/www"], "cat /www/index.html; echo > /www/mine");
    assert_eq!(of_image.ok(), "hello from a container");
    assert_eq!(podman.script(&["-v", "kept:/v"], "ls /v").ok(), "index.html\nmine");
    let dir = podman.dir.join("dir");
    fs::create_dir(&dir).expect("made");
    fs::write(dir.join("file"), "of the host").expect("written");
    let bind = format!("{}:/host:ro", dir.display());
    let out = podman.script(&["-v", &bind], "cat /host/file; echo; echo > /host/new");
    assert!(out.status != 0 && out.stdout == "of the host\n", "{out:?}");
    assert!(out.stderr.contains("Read-only"), "{out:?}");
    let tmpfs = ["--read-only", "--tmpfs", "/scratch:size=1m"];
    let out = podman.script(&tmpfs, "df -k /scratch | tail -1; echo > /scratch/a; echo > /b");
    assert!(out.status != 0 && out.stdout.contains(" 1024 "), "{out:?}");
    // Also with mapped ids.
    let mapped = ["--uidmap", "0:200000:5000", "--gidmap", "0:200000:5000", "-v", "kept:/v:U"];
    assert_eq!(
        podman.script(&mapped, "id -u; echo > /v/mapped; stat -c %u /v/mapped").ok(),
        "0\n0"
    );
    podman.podman(&["volume", "rm", "kept"]).ok();

    // Mounts of a container propagate to the host, and the host's mounts stay.
    let place = dir.display();
    podman
        .host
        .sh(&format!(
            "mount -t tmpfs shared {place} && mkdir {place}/sub {place}/made && \
         mount -t tmpfs sub {place}/sub"
        ))
        .ok();
    let shared = ["--cap-add", "SYS_ADMIN", "--security-opt", "seccomp=unconfined", "-v"];
    let bind = format!("{place}:/host:rshared");
    podman.script(&[&shared[..], &[&bind]].concat(), "mount -t tmpfs made /host/made").ok();
    let mounts = podman.host.mounts();
    for name in ["sub", "made"] {
        assert!(mounts.contains(&format!("{place}/{name}")), "{name}: {mounts:?}");
    }
    podman.host.sh(&format!("umount -R {place}")).ok();
    podman.assert_nothing_left();
}

#[test]
fn podman_pods_share_namespaces() {
    let podman = Podman::new();
    podman.podman(&["pod", "create", "--name", "pod", "--share", "net,ipc,uts,pid"]).ok();
    podman.start("server", &["--pod", "pod"], "exec httpd -f -p 127.0.0.1:7000 -h /www");
    podman.start("caller", &["--pod", "pod"], "exec sleep 1000");
    podman.wait_for("the pod's loopback is not shared", || {
        let fetch = ["exec", "caller", "wget", "-q", "-O", "-", "http://127.0.0.1:7000/"];
        podman.podman(&fetch).stdout.trim() == "hello from a container"
    });
    let namespaces = |name: &str| {
        let script = "for kind in net ipc uts pid; do readlink /proc/self/ns/$kind; done";
        podman.podman(&["exec", name, "sh", "-c", script]).ok()
    };
    assert_eq!(namespaces("server"), namespaces("caller"));
    assert_eq!(podman.podman(&["exec", "caller", "hostname"]).ok(), "pod");
    let list =
        podman.podman(&["pod", "ps", "--format", "{{.Name}} {{.Status}} {{.NumberOfContainers}}"]);
    assert_eq!(list.ok(), "pod Running 3");
    let top = podman.podman(&["pod", "top", "pod", "args"]).ok();
    assert!(top.contains("sleep 1000"), "{top}");
    podman.podman(&["pod", "pause", "pod"]).ok();
    assert_eq!(podman.inspect("caller", ".State.Status"), "paused");
    podman.podman(&["pod", "unpause", "pod"]).ok();
    podman.podman(&["pod", "stop", "-t", "0", "pod"]).ok();
    podman.podman(&["pod", "start", "pod"]).ok();
    podman.podman(&["pod", "rm", "-f", "-t", "0", "pod"]).ok();

    // From a Kubernetes manifest.
    let file = podman.dir.join("pod.yaml");
    let text = "apiVersion: v1\nkind: Pod\nmetadata: { name: kube }\nspec:\n  containers:\n  \
                - name: one\n    image: localhost/box\n    imagePullPolicy: Never\n    \
                command: [/bin/sleep, '1000']\n    resources: { limits: { memory: 32Mi } }\n";
    fs::write(&file, text).expect("written");
    let file = file.display().to_string();
    podman.podman(&["play", "kube", &file]).ok();
    let limit = podman.limit("kube-one", "memory", "memory.limit_in_bytes", "memory.max");
    assert_eq!(limit, "33554432");
    podman.podman(&["exec", "kube-one", "/bin/true"]).ok();
    podman.podman(&["pod", "rm", "-f", "-t", "0", "kube"]).ok();
    podman.assert_nothing_left();
}

#[test]
fn podman_networks_connect_and_publish() {
    let podman = Podman::new();
    podman.podman(&["network", "create", "--subnet", "10.213.7.0/24", "net"]).ok();
    podman.start("web", &["--network", "net", "-p", "8080:80"], "exec httpd -f -h /www");
    let page = "hello from a container";
    // (A static program has no name resolution, which is in the C library.)
    let fetch = "wget -q -O - http://$(nslookup web.dns.podman | \
               awk '/^Name/ { found = 1 } found && /^Address/ { print $2; exit }')/";
    podman.wait_for("no page by name", || {
        podman.script(&["--network", "net"], fetch).stdout.trim() == page
    });
    assert_eq!(podman.host.fetch(&format!("http://{}:8080/", Host::ADDRESS)).trim(), page);
    assert_eq!(podman.podman(&["port", "web"]).ok(), "80/tcp -> 0.0.0.0:8080");
    let shared = ["--network", "container:web"];
    assert_eq!(podman.script(&shared, "wget -q -O - http://127.0.0.1/").ok(), page);
    assert_eq!(podman.script(&["--network", "none"], "ls /sys/class/net").ok(), "lo");
    assert!(podman.script(&["--network", "host"], "ls /sys/class/net").ok().contains("host0"));

    podman.podman(&["network", "create", "--subnet", "10.213.8.0/24", "other"]).ok();
    podman.podman(&["network", "connect", "other", "web"]).ok();
    assert!(podman.podman(&["exec", "web", "ip", "addr"]).ok().contains("10.213.8."));
    podman.podman(&["network", "disconnect", "other", "web"]).ok();
    assert!(!podman.podman(&["exec", "web", "ip", "addr"]).ok().contains("10.213.8."));
    podman.podman(&["rm", "-f", "-t", "0", "web"]).ok();
    podman.podman(&["network", "rm", "net", "other"]).ok();
    podman.assert_nothing_left();
}

#[test]
fn podman_runs_health_checks_and_builds() {
    let podman = Podman::new();
    let check = ["--health-cmd", "test -e /tmp/well", "--health-interval", "disable"];
    podman.start("c", &check, "exec sleep 1000");
    let healthy = || podman.podman(&["healthcheck", "run", "c"]).status;
    assert_eq!(healthy(), 1);
    podman.podman(&["exec", "c", "touch", "/tmp/well"]).ok();
    assert_eq!(healthy(), 0);
    assert_eq!(podman.inspect("c", ".State.Health.Status"), "healthy");
    podman.podman(&["commit", "-q", "c", "committed"]).ok();
    podman.podman(&["rm", "-f", "-t", "0", "c"]).ok();
    podman.podman(&["run", "--rm", "committed", "test", "-e", "/tmp/well"]).ok();

    let context = podman.dir.join("context");
    fs::create_dir(&context).expect("made");
    fs::write(context.join("added"), "added").expect("written");
    let text = "FROM localhost/box\nCOPY added /etc/added\nRUN cat /etc/added > /etc/built && \
                test $(id -u) = 0 && test -w /dev/null\nUSER user\nWORKDIR /home/user\n\
                RUN id -u > mine\nCMD cat /etc/built mine\n";
    fs::write(context.join("Dockerfile"), text).expect("written");
    let place = context.display().to_string();
    podman.podman(&["build", "-q", "--network", "none", "-t", "built", &place]).ok();
    assert_eq!(podman.podman(&["run", "--rm", "built"]).ok(), "added1000");
    fs::write(context.join("Dockerfile"), "FROM localhost/box\nRUN exit 6\n").expect("written");
    let out = podman.podman(&["build", "-q", "--network", "none", &place]);
    assert!(out.status != 0 && out.stderr.contains("exit status 6"), "{out:?}");
    podman.assert_nothing_left();
}
