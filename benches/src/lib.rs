//! Common code of the benchmarks: a private host, peers that run interleaved, and figures as JSON
//! lines.
//!
//! A figure is a median with its minimum and 95th percentile. A promise is a ratio of medians of
//! one run, in which the arms took turns. The machine's facts are part of every line, so that
//! figures of two machines are never compared by mistake.
#![forbid(unsafe_code)]

pub mod farm;
pub mod podman;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use dormouse_kernel::process::{CloneFlags, unshare};
use dormouse_kernel::swap;
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

/// nginx with one worker at port 80, independent of the host's configuration.
pub const NGINX: [&str; 3] = [
    "/bin/sh",
    "-c",
    "echo 'daemon off; worker_processes 1; user root; pid /tmp/bench-nginx.pid; error_log /dev/null; \
     events {} http { access_log off; server { listen 80; location / { return 200 bench; } } }' \
     > /tmp/bench-nginx.conf && exec /usr/sbin/nginx -c /tmp/bench-nginx.conf",
];

/// One contender: a name and the command of each turn.
pub struct Arm {
    /// The name in tables.
    pub name: String,
    /// Returns the command of turn `n`.
    pub command: Box<dyn Fn(usize) -> Command + Sync>,
    /// Hides the v2 hierarchy, without which crun before 1.9 refuses hybrid hosts.
    pub hide_v2: bool,
}

impl Arm {
    /// A contender with nothing special.
    pub fn new(name: &str, command: impl Fn(usize) -> Command + Sync + 'static) -> Self {
        Self { name: name.into(), command: Box::new(command), hide_v2: false }
    }
}

/// The times of one arm, ascending.
#[derive(Debug, Clone)]
pub struct Times(Vec<Duration>);

impl Times {
    /// From measurements in any order.
    pub fn new(mut times: Vec<Duration>) -> Self {
        times.sort();
        Self(times)
    }

    /// The number of times.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no times.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The median, in milliseconds.
    pub fn median_ms(&self) -> f64 {
        self.at(0.5)
    }

    /// The mean, in milliseconds.
    pub fn mean_ms(&self) -> f64 {
        let sum: Duration = self.0.iter().sum();
        sum.as_secs_f64() * 1e3 / self.0.len() as f64
    }

    /// The quantile `part`, in milliseconds.
    pub fn at(&self, part: f64) -> f64 {
        let last = self.0.len().saturating_sub(1);
        let index = (last as f64 * part).round() as usize;
        self.0.get(index).map_or(f64::NAN, |d| d.as_secs_f64() * 1e3)
    }
}

/// Returns the medians by the name of the arm, in milliseconds.
pub fn medians<'a>(arms: &'a [Arm], times: &'a [Times]) -> impl Fn(&str) -> Option<f64> + 'a {
    |name| arms.iter().position(|arm| arm.name == name).map(|at| times[at].median_ms())
}

/// Prints a table, and one JSON line per arm, with `more` beside its times. Returns the medians by the name of the arm.
pub fn tabulate<'a>(
    benchmark: &str,
    title: &str,
    arms: &'a [Arm],
    times: &'a [Times],
    more: &serde_json::Value,
) -> impl Fn(&str) -> Option<f64> + 'a {
    eprintln!("\n{title} (ms)");
    eprintln!("  {:<14} {:>8} {:>8} {:>8}", "", "median", "min", "p95");
    for (arm, times) in arms.iter().zip(times) {
        let (median, min, p95) = (times.median_ms(), times.at(0.0), times.at(0.95));
        eprintln!("  {:<14} {median:>8.2} {min:>8.2} {p95:>8.2}", arm.name);
        let mut more = more.clone();
        (more["min_ms"], more["p95_ms"]) = (min.into(), p95.into());
        figure(benchmark, &arm.name, median, "ms", more);
    }
    medians(arms, times)
}

/// Runs the arms in turn, after a warm-up, and returns the times of `rounds` turns of each.
///
/// A hypervisor takes processors away now and then, for longer than a command takes. A disturbed
/// round (`steal` of proc_stat(5)) is repeated, up to three times the requested number. If that is
/// not enough, the least disturbed rounds count, and a message reports it.
pub fn interleave(arms: &[Arm], rounds: usize) -> Result<Vec<Times>> {
    for n in 0..(rounds / 10).clamp(1, 5) {
        round(arms, n)?;
    }
    let mut taken: Vec<(u64, Vec<Duration>)> = Vec::new();
    while taken.iter().filter(|(stolen, _)| *stolen == 0).count() < rounds {
        if taken.len() == rounds * 4 {
            break;
        }
        let before = stolen();
        let times = round(arms, taken.len())?;
        taken.push((stolen().saturating_sub(before), times));
    }
    let repeated = taken.len() - rounds;
    taken.sort_by_key(|(stolen, _)| *stolen);
    taken.truncate(rounds);
    if repeated > 0 {
        let most = taken.last().map_or(0, |(stolen, _)| *stolen);
        eprintln!(
            "{repeated} rounds were disturbed from outside; at most {most} ticks in the rest"
        );
    }
    let of_arm = |i: usize| taken.iter().map(|(_, times)| times[i]).collect();
    Ok((0..arms.len()).map(|i| Times::new(of_arm(i))).collect())
}

/// Runs each arm `row` times back to back, then the next one, after a warm-up, until each had at least `rounds` turns.
///
/// The kernel then spares some commands a wait that the last one has had, and a command meets what the last one does
/// behind its answer. Disturbed rounds count.
pub fn interleave_rows(arms: &[Arm], rounds: usize, row: usize) -> Result<Vec<Times>> {
    round(arms, 0)?;
    let mut taken = vec![Vec::with_capacity(rounds + row); arms.len()];
    let mut number = 1;
    for start in 0..rounds.div_ceil(row) {
        for i in (0..arms.len()).map(|i| (i + start) % arms.len()) {
            for _ in 0..row {
                let arm = &arms[i];
                taken[i].push(turn(arm, number).with_context(|| format!("{} failed", arm.name))?);
                number += 1;
            }
        }
    }
    Ok(taken.into_iter().map(Times::new).collect())
}

/// One turn of each arm. Each round has an order of its own, the same in each run, so that no arm follows another one
/// more often than others do: what a command leaves in caches and behind itself, such as ending namespaces and parts of
/// the next container, costs the next one time.
fn round(arms: &[Arm], n: usize) -> Result<Vec<Duration>> {
    let mut order: Vec<usize> = (0..arms.len()).collect();
    shuffle(&mut order, &mut (n as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let mut times = vec![Duration::ZERO; arms.len()];
    for i in order {
        let arm = &arms[i];
        times[i] = turn(arm, n).with_context(|| format!("{} failed", arm.name))?;
    }
    Ok(times)
}

/// Ticks that the hypervisor gave to other machines.
fn stolen() -> u64 {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let total = text.lines().next().and_then(|line| line.split_whitespace().nth(8));
    total.and_then(|ticks| ticks.parse().ok()).unwrap_or(0)
}

fn turn(arm: &Arm, n: usize) -> Result<Duration> {
    let run = || -> Result<Duration> {
        let mut command = (arm.command)(n);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let start = Instant::now();
        let output = command.spawn()?.wait_with_output()?;
        let took = start.elapsed();
        if !output.status.success() {
            bail!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(took)
    };
    if arm.hide_v2 { without_v2(run) } else { run() }
}

/// Runs a closure on a thread with a mount namespace in which the v2 hierarchy is not mounted.
pub fn without_v2<T: Send>(f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let run = || -> Result<T> {
        unshare(CloneFlags::NEWNS)?;
        rustix::mount::mount_change(
            "/",
            rustix::mount::MountPropagationFlags::PRIVATE
                | rustix::mount::MountPropagationFlags::REC,
        )?;
        let v2 = "/sys/fs/cgroup/unified";
        if Path::new(v2).exists() {
            rustix::mount::unmount(v2, rustix::mount::UnmountFlags::DETACH)?;
        }
        f()
    };
    std::thread::scope(|s| s.spawn(run).join()).unwrap_or_else(|_| bail!("a thread panicked"))
}

/// Facts of the machine, one copy with every figure.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    kernel: String,
    cpus: usize,
    memory_mb: u64,
    cgroups: &'static str,
    load: String,
}

impl Machine {
    /// This machine, now.
    pub fn now() -> Self {
        let read = |p: &str| fs::read_to_string(p).unwrap_or_default();
        let memory = read("/proc/meminfo");
        let total = memory.lines().next().and_then(|l| l.split_whitespace().nth(1));
        let v1 = Path::new("/sys/fs/cgroup/memory").exists();
        let unified = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
        Self {
            kernel: read("/proc/sys/kernel/osrelease").trim().into(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            memory_mb: total.and_then(|t| t.parse::<u64>().ok()).unwrap_or(0) / 1024,
            cgroups: if unified {
                "v2"
            } else if v1 {
                "hybrid"
            } else {
                "none"
            },
            load: read("/proc/loadavg").split(' ').take(3).collect::<Vec<_>>().join(" "),
        }
    }
}

/// Prints a figure as one JSON line.
pub fn figure(benchmark: &str, name: &str, value: f64, unit: &str, more: serde_json::Value) {
    let line = serde_json::json!({
        "benchmark": benchmark, "name": name, "value": (value * 1000.0).round() / 1000.0,
        "unit": unit, "more": more, "machine": Machine::now(),
    });
    println!("{line}");
}

/// Reports whether a promise is kept; the exit status is independent.
pub fn promise(text: &str, value: f64, limit: f64) {
    let word = if value <= limit { "kept" } else { "NOT KEPT" };
    eprintln!("  {word}: {text}: {value:.2} (promised: at most {limit})");
}

/// The same for a promise of at least something.
pub fn promise_least(text: &str, value: f64, limit: f64) {
    let word = if value >= limit { "kept" } else { "NOT KEPT" };
    eprintln!("  {word}: {text}: {value:.2} (promised: at least {limit})");
}

/// Reports a figure of these programs as a part of that of the programs of `--before`.
pub fn change(text: &str, now: f64, before: f64) {
    eprintln!("  {text}: {:.2} of the programs before", now / before);
}

/// A directory for one benchmark, with our programs, a private root and a busybox image. The
/// process and its children are in network and mount namespaces that play the host. Files that
/// belong below `/run` on a host are on a tmpfs here too: ours in `root/run`, those of other
/// runtimes in [`Bench::STATE`].
///
/// A signal that ends the benchmark also removes everything.
pub struct Bench {
    /// The directory of everything; removed by the drop.
    pub dir: tempfile::TempDir,
    place: Place,
    watch: Option<Watch>,
}

/// Objects of a benchmark that are to be removed.
#[derive(Debug, Clone)]
struct Place {
    dir: PathBuf,
    /// The directory of our programs.
    bin: PathBuf,
    disk: Disk,
}

/// A thread that cleans up when a signal ends this process.
struct Watch {
    handle: Handle,
    thread: JoinHandle<()>,
}

/// The number of places: the last cleanup ends the process.
static PLACES: AtomicUsize = AtomicUsize::new(0);

/// The disk of a benchmark's directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disk {
    /// The disk of the repository.
    OfRepository,
    /// An ext4 with the defaults of mkfs.ext4(8), that is with a journal, in a file on the
    /// repository's disk (loop(4)).
    Journaled,
}

impl std::fmt::Display for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::OfRepository => "the repository's disk",
            Self::Journaled => "an ext4 with a journal",
        })
    }
}

/// Size of a disk that is made for a benchmark; the file is sparse.
const DISK_BYTES: u64 = 4 << 30;

impl Bench {
    /// Makes a benchmark's directory on the disk of the repository, because runtimes keep their
    /// layers on disks.
    pub fn new() -> Result<Self> {
        Self::on(Disk::OfRepository)
    }

    /// Makes a benchmark's directory on a disk.
    pub fn on(disk: Disk) -> Result<Self> {
        unshare(CloneFlags::NEWNET | CloneFlags::NEWNS).context("run as root")?;
        ok(Command::new("mount").args(["--make-rprivate", "/"]))?;
        ok(Command::new("ip").args(["link", "set", "lo", "up"]))?;
        let exe = std::env::current_exe()?;
        Self::of_programs(exe.parent().context("no directory")?, disk, None)
    }

    /// A second instance on the same host, with the programs of another build in `bin`, such as
    /// those of an earlier commit. Arms of both instances take turns in one run, which two runs
    /// one after the other cannot replace: the load of the machine differs by more than builds do.
    ///
    /// Both instances then run copies of their programs that were made alike ([`Bench::copy_programs`]).
    pub fn before(&mut self, bin: &Path) -> Result<Self> {
        let bin = bin.canonicalize().with_context(|| bin.display().to_string())?;
        // Two instances of one network namespace need different pools.
        let mut before = Self::of_programs(&bin, self.place.disk, Some("10.128.0.0/14"))?;
        self.copy_programs()?;
        before.copy_programs()?;
        Ok(before)
    }

    /// A further instance on the same host with the same programs, a pool of its own and these settings.
    pub fn beside(&self, pool: &str, settings: &str) -> Result<Self> {
        let bench = Self::of_programs(&self.place.bin, self.place.disk, Some(pool))?;
        let path = bench.path("root/etc/config.toml");
        let text = fs::read_to_string(&path)? + settings;
        fs::write(path, text)?;
        Ok(bench)
    }

    /// Runs copies of the programs from now on, each made by one write(2).
    ///
    /// The size of that write is the size of the folios in the page cache. Each page fault of a program maps
    /// up to 64 kB, and costs 2 to 20 times as much where these are 16 folios. A linker writes its output
    /// through a mapping, page by page. 138 faults in the text of `dormouse` took 0.28 to 0.36 ms after the
    /// linker or a copy by small writes, and the unmapping 0.17 to 0.22 ms; after one large write 0.02 and
    /// 0.01 ms (Linux 6.18, ext4). Two builds of equal speed may thus differ by half a millisecond per process.
    fn copy_programs(&mut self) -> Result<()> {
        let copies = self.path("programs");
        fs::create_dir(&copies)?;
        for name in ["dormouse", "dormouse-keeper", "dormouse-oci"] {
            let (from, to) = (self.place.bin.join(name), copies.join(name));
            fs::write(&to, fs::read(&from).with_context(|| from.display().to_string())?)?;
            fs::set_permissions(&to, fs::Permissions::from_mode(0o755))?;
        }
        self.place.bin = copies;
        Ok(())
    }

    /// An instance with the programs in `bin`, on this process's host.
    fn of_programs(bin: &Path, disk: Disk, pool: Option<&str>) -> Result<Self> {
        let exe = std::env::current_exe()?;
        let target = exe.parent().and_then(Path::parent).context("no directory")?;
        let is_guest = is_guest();
        let target = if is_guest { std::env::temp_dir() } else { target.to_owned() };
        let dir = tempfile::Builder::new().prefix("bench-").tempdir_in(&target)?;
        if disk == Disk::Journaled {
            let image = tempfile::NamedTempFile::new_in(&target)?;
            image.as_file().set_len(DISK_BYTES)?;
            // Complete at once: deferred initialization would disturb the measurement.
            let whole = "lazy_itable_init=0,lazy_journal_init=0";
            ok(Command::new("mkfs.ext4").args(["-q", "-E", whole]).arg(image.path()))?;
            // The loop device keeps the file, which has no name after this function.
            ok(Command::new("mount").args(["-o", "loop"]).arg(image.path()).arg(dir.path()))?;
        }
        let place = Place { dir: dir.path().to_owned(), bin: bin.to_owned(), disk };
        // ORDER: after the namespaces, which the thread inherits.
        let watch = Watch::begin(place.clone())?;
        let bench = Self { dir, place, watch: Some(watch) };
        for runtime in RUNTIME {
            fs::create_dir_all(bench.path(runtime))?;
            ok(Command::new("mount").args(["-t", "tmpfs", "bench"]).arg(bench.path(runtime)))?;
        }
        if let Some(pool) = pool {
            fs::create_dir_all(bench.path("root/etc"))?;
            fs::write(
                bench.path("root/etc/config.toml"),
                format!("[network]\npool = \"{pool}\"\n"),
            )?;
        }
        let root = bench.path("rootfs");
        for sub in ["bin", "proc", "dev", "sys", "tmp", "etc", "root"] {
            fs::create_dir_all(root.join(sub))?;
        }
        fs::copy("/bin/busybox", root.join("bin/busybox")).context("busybox-static is missing")?;
        for name in ["true", "sh", "sleep", "cat"] {
            std::os::unix::fs::symlink("busybox", root.join("bin").join(name))?;
        }
        fs::write(root.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n")?;
        for program in [
            "floor",
            "calls",
            "serve",
            "tick",
            "hog",
            "passage",
            "site",
            "neighbour",
            "stream",
            "customer",
        ] {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("floor/{program}.c"));
            let (to, programs) = (bench.path(program), kept("programs"));
            if is_guest {
                let missing = "no benchmark has run on the host of this guest";
                fs::copy(programs.join(program), &to).context(missing)?;
                continue;
            }
            let mut cc = Command::new("cc");
            ok(cc.args(["-O2", "-static", "-o"]).arg(&to).arg(source).arg("-lm"))?;
            // The guest has no compiler. Another benchmark may do the same.
            let new = tempfile::NamedTempFile::new_in(&programs)?;
            fs::copy(&to, &new)?;
            new.persist(programs.join(program))?;
        }
        for program in ["calls", "serve", "tick", "hog", "passage", "site", "neighbour", "stream"] {
            fs::copy(bench.path(program), root.join("bin").join(program))?;
        }
        ok(bench.dormouse().args(["import", "--name", "bench"]).arg(&root))?;
        Ok(bench)
    }

    /// The directory of other runtimes for files that belong below `/run`.
    pub const STATE: &str = "state";

    /// A path below the directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Our command with the private root.
    pub fn dormouse(&self) -> Command {
        self.place.dormouse()
    }

    /// Our command with another root, without running containers: removing the directory is enough.
    pub fn dormouse_in(&self, root: &Path) -> Command {
        self.place.dormouse_in(root)
    }

    /// Replaces the settings of the instance.
    pub fn configure(&self, settings: &str) -> Result<()> {
        fs::create_dir_all(self.path("root/etc"))?;
        let path = self.path("root/etc/config.toml");
        fs::write(&path, settings).with_context(|| path.display().to_string())
    }

    /// Starts our daemon, and waits until it is ready.
    pub fn daemon(&self, options: &[&str]) -> Result<Daemon> {
        let mut command = self.dormouse();
        let mut child = command.arg("daemon").args(options).stderr(Stdio::piped()).spawn()?;
        let mut output = BufReader::new(child.stderr.take().context("no pipe")?);
        let daemon = Daemon(child);
        let mut line = String::new();
        output.read_line(&mut line)?;
        ensure!(line.contains("ready"), "unexpected output of the daemon: {line}");
        // Read on, or the daemon would block on a full pipe.
        std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
        Ok(daemon)
    }

    /// What `inspect` shows of a container.
    pub fn record(&self, name: &str) -> Result<serde_json::Value> {
        let text = ok(self.dormouse().args(["inspect", "--json", name]))?;
        let mut record: serde_json::Value = serde_json::from_str(&text)?;
        // A list of one record, or the record itself.
        Ok(record.get_mut(0).map(serde_json::Value::take).unwrap_or(record))
    }

    /// The first process of a running container.
    pub fn pid(&self, name: &str) -> Result<u32> {
        let pid = self.record(name)?["pid"].as_u64().context("the container does not run")?;
        Ok(u32::try_from(pid)?)
    }

    /// The address of a container.
    pub fn address(&self, name: &str, port: u16) -> Result<std::net::SocketAddr> {
        let record = self.record(name)?;
        let address = record["address"].as_str().context("the container has no address")?;
        Ok(std::net::SocketAddr::new(address.parse()?, port))
    }

    /// An OCI bundle of the same root filesystem, made by the runtime's own `spec`, with the same
    /// namespaces. Without `netns` it has no network namespace.
    pub fn bundle(&self, name: &str, netns: bool) -> Result<PathBuf> {
        let bundle = self.path(name);
        fs::create_dir_all(&bundle)?;
        ok(Command::new("runc").arg("spec").current_dir(&bundle))?;
        let path = bundle.join("config.json");
        let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path)?)?;
        config["process"]["terminal"] = false.into();
        config["process"]["args"] = serde_json::json!(["/bin/true"]);
        config["process"]["rlimits"] = serde_json::json!([]);
        config["root"] = serde_json::json!({"path": self.path("rootfs"), "readonly": true});
        if !netns && let Some(list) = config["linux"]["namespaces"].as_array_mut() {
            list.retain(|n| n["type"] != "network");
        }
        if !netns && let Some(list) = config["mounts"].as_array_mut() {
            // sysfs can only be mounted by the owner of the network namespace.
            list.retain(|m| m["type"] != "sysfs" && m["type"] != "cgroup");
        }
        fs::write(&path, serde_json::to_vec(&config)?)?;
        Ok(bundle)
    }
}

/// The hierarchies in which the floor program makes a group, below `floor-bench`.
pub const FLOOR_CGROUPS: [&str; 7] =
    ["cpu", "cpuacct", "memory", "pids", "freezer", "blkio", "unified"];

/// Our daemon; its drop ends it.
pub struct Daemon(Child);

impl Daemon {
    /// Its process.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
        let _ = self.0.wait();
    }
}

/// A swap file of the whole machine; its drop removes it.
pub struct Swap(PathBuf);

impl Swap {
    /// Makes a swap file of `bytes`.
    pub fn on(bench: &Bench, bytes: u64) -> Result<Self> {
        let path = bench.path("swap");
        swap::make(&path, bytes)?;
        ok(Command::new("swapon").arg(&path))?;
        Ok(Self(path))
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        if let Err(e) = ok(Command::new("swapoff").arg(&self.0)) {
            eprintln!("{e:#}");
        }
    }
}

/// Directories on a tmpfs.
const RUNTIME: [&str; 2] = ["root/run", Bench::STATE];

impl Drop for Bench {
    fn drop(&mut self) {
        // After a signal this never returns.
        if let Some(Watch { handle, thread }) = self.watch.take() {
            handle.close();
            let _ = thread.join();
        }
        self.place.clean();
        PLACES.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Watch {
    fn begin(place: Place) -> Result<Self> {
        let mut signals =
            Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot register signal handlers")?;
        let handle = signals.handle();
        PLACES.fetch_add(1, Ordering::Relaxed);
        let thread = std::thread::spawn(move || {
            let Some(signal) = signals.forever().next() else { return };
            eprintln!("\ncleaning up below {}", place.dir.display());
            end_children();
            place.clean();
            let _ = fs::remove_dir_all(&place.dir); // no error can be reported
            if PLACES.fetch_sub(1, Ordering::Relaxed) == 1 {
                std::process::exit(128 + signal);
            }
        });
        Ok(Self { handle, thread })
    }
}

/// Ends all child processes, so that nothing new is created during the cleanup.
fn end_children() {
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let lists = threads.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let pids: Vec<i32> =
        lists.flat_map(|list| list.split(' ').flat_map(str::parse).collect::<Vec<_>>()).collect();
    for pid in pids.into_iter().filter_map(Pid::from_raw) {
        let _ = kill_process(pid, Signal::TERM); // may have ended just now
    }
}

impl Place {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn dormouse(&self) -> Command {
        self.dormouse_in(&self.path("root"))
    }

    fn dormouse_in(&self, root: &Path) -> Command {
        let mut command = Command::new(self.bin.join("dormouse"));
        command.arg("--root").arg(root);
        command
    }

    fn clean(&self) {
        podman::remove_all(&self.dir);
        for hierarchy in FLOOR_CGROUPS {
            let _ = fs::remove_dir(format!("/sys/fs/cgroup/{hierarchy}/floor-bench")); // if made
        }
        let floor = self.path("floor-scratch/shm");
        if floor.exists() {
            let _ = Command::new("umount").arg(floor).status();
        }
        // The cleanup of an ended container may still run, and until then a reset is refused.
        let cleaned = (0..20).any(|n| {
            std::thread::sleep(Duration::from_millis(n * 20));
            let ended = self.dormouse().args(["rm", "--force", "--all"]).output();
            let gone = self.dormouse().args(["internal", "reset"]).output();
            matches!((ended, gone), (Ok(a), Ok(b)) if a.status.success() && b.status.success())
        });
        if !cleaned {
            eprintln!("cannot clean up below {}", self.dir.display());
        }
        let swap = self.path("swap");
        if swap.exists() {
            let _ = Command::new("swapoff").arg(swap).output(); // mostly not in use any more
        }
        for runtime in RUNTIME {
            let _ = Command::new("umount").arg("--lazy").arg(self.path(runtime)).status();
        }
        if self.disk == Disk::Journaled {
            let _ = Command::new("umount").arg("--lazy").arg(&self.dir).status();
        }
    }
}

/// Line colours that colour-blind readers can distinguish (Okabe and Ito, 2008), without its
/// yellow.
const COLORS: [(u8, u8, u8); 9] = [
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (230, 159, 0),
    (86, 180, 233),
    (0, 0, 0),
    (127, 127, 127),
    (136, 68, 34),
];

/// Draws lines over a common x axis into `target/bench/NAME.svg`, and prints the path.
pub fn plot(name: &str, title: &str, axes: [&str; 2], lines: &[Line<'_>]) -> Result<()> {
    use plotters::prelude::*;
    let path = drawing(name)?;
    let points = || lines.iter().flat_map(|line| &line.points);
    let end = |of: fn(&(f64, f64)) -> f64| points().map(of).fold(0.0, f64::max);
    let (right, high) = (end(|p| p.0), end(|p| p.1) * 1.05);
    let canvas = SVGBackend::new(&path, (900, 540)).into_drawing_area();
    let draw = || -> Result<(), Box<dyn std::error::Error>> {
        canvas.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&canvas)
            .caption(title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(56)
            .build_cartesian_2d(0.0..right, 0.0..high)?;
        let number = |number: &f64| (*number as f32).to_string();
        let mut mesh = chart.configure_mesh();
        mesh.x_label_formatter(&number).y_label_formatter(&number);
        mesh.x_desc(axes[0]).y_desc(axes[1]).light_line_style(WHITE).draw()?;
        for (n, line) in lines.iter().enumerate() {
            let (red, green, blue) = COLORS[n % COLORS.len()];
            let style = RGBColor(red, green, blue).stroke_width(2);
            let series = LineSeries::new(line.points.clone(), style).point_size(3);
            let drawn = chart.draw_series(series)?;
            drawn
                .label(line.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], style));
        }
        let side = emptiest_corner(lines, right, high);
        let mut legend = chart.configure_series_labels();
        legend.position(side).border_style(BLACK.mix(0.3));
        legend.background_style(WHITE.mix(0.7)).draw()?;
        Ok(canvas.present()?)
    };
    draw().map_err(|e| anyhow::anyhow!("cannot draw {}: {e}", path.display()))?;
    eprintln!("  drawn: {}", path.display());
    Ok(())
}

/// Draws points over two logarithmic axes, with the line on which both are equal, into `target/bench/NAME.svg`, and
/// prints the path. The points of the first set are drawn above those of the others. A number that is not positive is
/// drawn at the end of its axis.
pub fn scatter(name: &str, title: &str, axes: [&str; 2], sets: &[Line<'_>]) -> Result<()> {
    use plotters::prelude::*;
    const MARGIN: f64 = 1.3;
    let path = drawing(name)?;
    let range = |of: fn(&(f64, f64)) -> f64| {
        let all = sets.iter().flat_map(|set| &set.points).map(of).filter(|number| *number > 0.0);
        let ends = all.fold((f64::MAX, 0.0), |(low, high), at| (at.min(low), at.max(high)));
        (ends.0 / MARGIN, ends.1 * MARGIN)
    };
    let ((left, right), (low, high)) = (range(|point| point.0), range(|point| point.1));
    ensure!(left < right && low < high, "no points to draw for {}", path.display());
    let canvas = SVGBackend::new(&path, (900, 540)).into_drawing_area();
    let draw = || -> Result<(), Box<dyn std::error::Error>> {
        canvas.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&canvas)
            .caption(title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(56)
            .build_cartesian_2d((left..right).log_scale(), (low..high).log_scale())?;
        let number = |number: &f64| (*number as f32).to_string();
        let mut mesh = chart.configure_mesh();
        mesh.x_label_formatter(&number).y_label_formatter(&number);
        mesh.x_desc(axes[0]).y_desc(axes[1]).light_line_style(WHITE).draw()?;
        let equal = [left.max(low), right.min(high)].map(|end| (end, end));
        if equal[0].0 < equal[1].0 {
            chart.draw_series(LineSeries::new(equal, BLACK.mix(0.6)))?;
        }
        for (n, set) in sets.iter().enumerate().rev() {
            let (red, green, blue) = COLORS[n % COLORS.len()];
            let style = RGBColor(red, green, blue).mix(0.7).filled();
            let points = set.points.iter().map(|(x, y)| (x.max(left), y.max(low)));
            let drawn = chart.draw_series(points.map(|point| Circle::new(point, 3, style)))?;
            drawn.label(set.name).legend(move |(x, y)| Circle::new((x + 8, y), 4, style));
        }
        let mut legend = chart.configure_series_labels();
        legend.position(SeriesLabelPosition::UpperLeft).border_style(BLACK.mix(0.3));
        legend.background_style(WHITE.mix(0.7)).draw()?;
        Ok(canvas.present()?)
    };
    draw().map_err(|e| anyhow::anyhow!("cannot draw {}: {e}", path.display()))?;
    eprintln!("  drawn: {}", path.display());
    Ok(())
}

/// Bars of one colour in a drawing by [`bars`]: a height for each name.
pub struct Bars<'a> {
    /// The name in the legend.
    pub name: &'a str,
    /// Names below the bars, with heights.
    pub heights: Vec<(String, f64)>,
}

/// Draws groups of bars, one group for each name of the first set, and a line at `limit`, into
/// `target/bench/NAME.svg`, and prints the path.
pub fn bars(name: &str, title: &str, axis: &str, limit: f64, sets: &[Bars<'_>]) -> Result<()> {
    use plotters::prelude::*;
    use plotters::style::text_anchor::{HPos, Pos, VPos};
    let path = drawing(name)?;
    let first = sets.first().filter(|set| !set.heights.is_empty());
    let groups: Vec<&String> =
        first.context("nothing to draw")?.heights.iter().map(|(name, _)| name).collect();
    let all = || sets.iter().flat_map(|set| &set.heights);
    let high = all().map(|(_, height)| *height).fold(limit, f64::max) * 1.15;
    let right = groups.len() as f64;
    let canvas = SVGBackend::new(&path, (900, 540)).into_drawing_area();
    let draw = || -> Result<(), Box<dyn std::error::Error>> {
        canvas.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&canvas)
            .caption(title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(96)
            .y_label_area_size(56)
            .build_cartesian_2d(0.0..right, 0.0..high)?;
        let mut mesh = chart.configure_mesh();
        mesh.disable_x_mesh().x_labels(0).y_desc(axis).light_line_style(WHITE).draw()?;
        let width = 0.8 / sets.len() as f64;
        for (n, set) in sets.iter().enumerate() {
            let (red, green, blue) = COLORS[n % COLORS.len()];
            let style = RGBColor(red, green, blue).filled();
            let bar = |(group, height): (&String, f64)| {
                let place = groups.iter().position(|name| *name == group)?;
                let left = place as f64 + 0.1 + n as f64 * width;
                Some(Rectangle::new([(left, 0.0), (left + width, height)], style))
            };
            let bars = set.heights.iter().map(|(group, height)| (group, *height)).filter_map(bar);
            let drawn = chart.draw_series(bars)?;
            drawn
                .label(set.name)
                .legend(move |(x, y)| Rectangle::new([(x, y - 4), (x + 12, y + 4)], style));
        }
        chart.draw_series(LineSeries::new([(0.0, limit), (right, limit)], BLACK.mix(0.6)))?;
        let turned = ("sans-serif", 13).into_font().transform(FontTransform::Rotate90);
        let style = turned.color(&BLACK).pos(Pos::new(HPos::Left, VPos::Center));
        for (place, group) in groups.iter().enumerate() {
            let (x, y) = chart.backend_coord(&(place as f64 + 0.5, 0.0));
            canvas.draw(&Text::new(group.as_str(), (x, y + 6), style.clone()))?;
        }
        let mut legend = chart.configure_series_labels();
        legend.position(SeriesLabelPosition::UpperRight).border_style(BLACK.mix(0.3));
        legend.background_style(WHITE.mix(0.7)).draw()?;
        Ok(canvas.present()?)
    };
    draw().map_err(|e| anyhow::anyhow!("cannot draw {}: {e}", path.display()))?;
    eprintln!("  drawn: {}", path.display());
    Ok(())
}

/// A directory below `target/bench`, which stays.
fn kept(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench").join(name)
}

/// Whether this is the guest of `cargo xtask guest`, which has the repository read-only.
fn is_guest() -> bool {
    let dir = kept("programs");
    fs::create_dir_all(&dir).and_then(|()| tempfile::tempfile_in(&dir)).is_err()
}

/// The path of a drawing, in a directory that is made.
fn drawing(name: &str) -> Result<PathBuf> {
    let dir = if is_guest() { std::env::temp_dir() } else { kept("").canonicalize()? };
    Ok(dir.join(format!("{name}.svg")))
}

/// Returns the corner of a plot with the fewest line points.
fn emptiest_corner(
    lines: &[Line<'_>],
    right: f64,
    high: f64,
) -> plotters::chart::SeriesLabelPosition {
    use plotters::chart::SeriesLabelPosition::{LowerLeft, LowerRight, UpperLeft, UpperRight};
    const STEPS: u32 = 20;
    let between = |pair: &[(f64, f64)]| {
        let &[from, to] = pair else { return Vec::new() };
        let at = |step| f64::from(step) / f64::from(STEPS);
        let place = |at: f64| (from.0 + (to.0 - from.0) * at, from.1 + (to.1 - from.1) * at);
        (0..=STEPS).map(|step| place(at(step))).collect()
    };
    let pieces = lines.iter().flat_map(|line| line.points.windows(2));
    let places: Vec<(f64, f64)> = pieces.flat_map(between).collect();
    let count = |(at_right, at_top): (bool, bool)| {
        let is_in = |(x, y): &&(f64, f64)| {
            let (x, y) = (x / right, y / high);
            (if at_right { x > 0.65 } else { x < 0.35 }) && (if at_top { y > 0.7 } else { y < 0.3 })
        };
        places.iter().filter(is_in).count()
    };
    let corners = [
        (UpperLeft, (false, true)),
        (UpperRight, (true, true)),
        (LowerRight, (true, false)),
        (LowerLeft, (false, false)),
    ];
    let emptiest = corners.into_iter().min_by_key(|(_, corner)| count(*corner));
    emptiest.map_or(UpperRight, |(side, _)| side)
}

/// One line of a [`plot`], or one set of points of a [`scatter`].
pub struct Line<'a> {
    /// The name in the legend.
    pub name: &'a str,
    /// x and y of its points.
    pub points: Vec<(f64, f64)>,
}

/// LIMIT: the time for an answer before a benchmark gives up.
const PATIENCE: Duration = Duration::from_secs(20);

/// The time until the first byte of a `serve` server. The server is idle again on return.
pub fn first_byte(address: SocketAddr) -> Result<Duration> {
    let begin = Instant::now();
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"Q\n")?;
    ensure!(stream.read(&mut [0])? == 1, "no answer");
    let took = begin.elapsed();
    // The server closes the connection when it is done.
    stream.read_to_end(&mut Vec::new())?;
    Ok(took)
}

/// Runs a command that must succeed.
pub fn ok(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}: {}", output.status, text.trim());
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The CPU time of all threads of a process (the first field of schedstat, proc_pid_schedstat in
/// Documentation/scheduler/sched-stats.rst), in seconds.
pub fn cpu_time(pid: u32) -> Result<f64> {
    let mut sum = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = fs::read_to_string(task?.path().join("schedstat"))?;
        sum += text.split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).context("no number")?;
    }
    Ok(sum as f64 / 1e9)
}

/// The directory of a process's cgroup with a controller, on cgroup v1 or v2 (cgroups(7)).
pub fn cgroup_of(pid: u32, controller: &str) -> Result<PathBuf> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let find = |wanted: &dyn Fn(&str) -> bool| {
        text.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            wanted(controllers).then(|| path.trim_start_matches('/'))
        })
    };
    let v1 = find(&|controllers| controllers.split(',').any(|one| one == controller));
    let of_v1 = |path| Path::new("/sys/fs/cgroup").join(controller).join(path);
    let v2 = || find(&str::is_empty).map(|path| Path::new("/sys/fs/cgroup").join(path));
    v1.map(of_v1).or_else(v2).with_context(|| format!("no cgroup of {pid} for {controller}"))
}

/// The median of some numbers.
pub fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    let at = |index: usize| all.get(index).copied().unwrap_or(f64::NAN);
    // Of an even number, the mean of the two in the middle.
    (at(all.len().saturating_sub(1) / 2) + at(all.len() / 2)) / 2.0
}

/// Shuffles a slice pseudo-randomly (xorshift64). The same `state`, which must not be 0, gives the
/// same order.
pub fn shuffle<T>(all: &mut [T], state: &mut u64) {
    for n in (1..all.len()).rev() {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        all.swap(n, (*state % (n as u64 + 1)) as usize);
    }
}

/// Whether a program is installed.
pub fn installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_returned_by_quantile() {
        let times = Times::new([5, 1, 3, 2, 4].map(Duration::from_millis).to_vec());
        assert_eq!((times.at(0.0), times.median_ms(), times.at(1.0)), (1.0, 3.0, 5.0));
    }

    #[test]
    fn legend_is_in_the_emptiest_corner() {
        use plotters::chart::SeriesLabelPosition::{LowerRight, UpperLeft, UpperRight};
        let level = vec![(0.1, 1.0), (1.0, 1.0)];
        let rises = vec![(0.0, 0.0), (1.0, 1.0)];
        let falls = vec![(0.0, 1.0), (1.0, 0.0)];
        for (points, corner) in [(level, LowerRight), (rises, UpperLeft), (falls, UpperRight)] {
            assert_eq!(emptiest_corner(&[Line { name: "", points }], 1.0, 1.05), corner);
        }
    }
}
