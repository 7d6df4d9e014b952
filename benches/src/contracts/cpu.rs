//! CPU time: how much each of several containers gets, and how much it is due.
//!
//! The cases are those of the papers: fair shares (Linux-VServer, section 4), reservations that are used all the
//! time, some of the time or not at all, hard limits, several threads against one, and a hundred containers. Each
//! case runs in turn
//!
//! - with the daemon, which governs the weights,
//! - with the daemon's scheduler, where the kernel has sched_ext,
//! - with static weights, without a daemon,
//! - in podman's containers, and
//! - in plain cgroups.
//!
//! Podman and plain cgroups have no reservations. They get the best that a weight can do: weights in proportion to
//! what is due when every container is hungry and no other process runs.
//!
//! All containers together are due what they got: other processes of the host take the rest. A *point* is a hundredth
//! of all CPUs.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use dormouse_benches::{Line, cpu_time, figure, median, ok, plot, promise};
use dormouse_testkit::wait_until;

use crate::{Claim, Hosts, due};

/// The time from the start of the last container to the measurement.
const SETTLES: Duration = Duration::from_secs(1);
/// LIMIT: the time until the daemon's scheduler is in force.
const BEGINS: Duration = Duration::from_secs(60);
/// The time between two readings.
const WINDOW: Duration = Duration::from_millis(100);
/// Weight of a container without a share of its own.
const NO_SHARE: u32 = 1;
/// Weight of the other containers, which is the default.
const SHARE: u32 = 100;

/// One container of a case.
#[derive(Debug, Clone, Copy)]
struct Member {
    threads: u32,
    /// CPU time and pause in turn, in milliseconds; `None`: always hungry.
    works_ms: Option<(u32, u32)>,
    reserve: f64,
    weight: u32,
    limit: Option<f64>,
}

/// A container with one hungry thread.
const HOG: Member = Member { threads: 1, works_ms: None, reserve: 0.0, weight: SHARE, limit: None };

impl Member {
    /// The most CPUs that it can use.
    fn wants(&self) -> f64 {
        let part = match self.works_ms {
            Some((work, rest)) => f64::from(work) / f64::from(work + rest),
            None => 1.0,
        };
        (part * f64::from(self.threads)).min(self.limit.unwrap_or(f64::INFINITY))
    }

    fn claim(&self) -> Claim {
        Claim { reserve: self.reserve, weight: self.weight, wants: self.wants() }
    }

    fn words(&self) -> Vec<String> {
        let mut words = vec!["hog".to_owned(), self.threads.to_string()];
        words
            .extend(self.works_ms.iter().flat_map(|(work, rest)| [work, rest]).map(u32::to_string));
        words
    }
}

/// What is measured of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Goal {
    /// Every container is within one point of what it is due.
    Each,
    /// The first container gets what it is due, or a part of it; what the others get is told.
    First { percent: u32 },
}

struct Case {
    name: &'static str,
    members: Vec<Member>,
    /// Hungry processes of the host outside of all containers.
    outside: usize,
    goal: Goal,
    /// Podman takes part. Each of its starts takes half a second.
    podman: bool,
}

impl Case {
    fn of(name: &'static str, members: Vec<Member>, goal: Goal) -> Self {
        Self { name, members, outside: 0, goal, podman: true }
    }

    /// One container beside seven hungry ones.
    fn one_of_eight(name: &'static str, first: Member, goal: Goal) -> Self {
        Self::of(name, [vec![first], vec![HOG; 7]].concat(), goal)
    }

    fn claims(&self) -> Vec<Claim> {
        self.members.iter().map(Member::claim).collect()
    }

    fn beside(self, outside: usize) -> Self {
        Self { outside, ..self }
    }
}

fn cases(cpus: f64) -> Vec<Case> {
    let whole = Goal::First { percent: 100 };
    let most = Goal::First { percent: 93 };
    let reserved = |reserve: f64| Member { reserve, weight: NO_SHARE, ..HOG };
    let at_times = |work: u32, rest: u32| {
        let times = Some((work, rest));
        Member { works_ms: times, ..reserved(0.5) }
    };
    let shared = Member { reserve: 0.5, ..HOG };
    let idle = Member { works_ms: Some((0, 100)), ..shared };
    let four = Member { threads: 4, ..HOG };
    vec![
        Case::of("4 equal", vec![HOG; 4], Goal::Each),
        Case::of("8 equal", vec![HOG; 8], Goal::Each),
        Case::one_of_eight("a quarter of the machine reserved", reserved(cpus / 4.0), whole),
        Case::one_of_eight("a quarter of a CPU reserved", reserved(0.25), whole),
        Case::one_of_eight("one CPU reserved", reserved(1.0), whole),
        Case::one_of_eight(
            "a quarter of the machine reserved, host busy",
            reserved(cpus / 4.0),
            whole,
        )
        .beside(1),
        Case::one_of_eight("one CPU reserved, host busy", reserved(1.0), whole).beside(1),
        Case::one_of_eight(
            "half a CPU reserved, 20 ms of work, 20 ms of rest",
            at_times(20, 20),
            most,
        ),
        Case::one_of_eight("half a CPU reserved, 5 ms of work, 5 ms of rest", at_times(5, 5), most),
        Case::one_of_eight("half a CPU reserved, and a share", shared, whole),
        Case::of(
            "half a CPU reserved, beside an idle reservation",
            [vec![shared, idle], vec![HOG; 6]].concat(),
            whole,
        ),
        Case::of(
            "a limit of 0.3 CPUs, alone",
            vec![Member { limit: Some(0.3), ..HOG }],
            Goal::Each,
        ),
        Case::one_of_eight(
            "a limit of 0.1 CPUs beside seven",
            Member { limit: Some(0.1), ..HOG },
            whole,
        ),
        // The bucket of the paper: time that was not used may be used once, at most two periods' worth.
        Case::of(
            "a limit of 0.1 CPUs with its burst, 18 ms of work, 182 ms of rest",
            vec![Member { limit: Some(0.1), works_ms: Some((18, 182)), ..HOG }],
            Goal::First { percent: 97 },
        ),
        Case::of(
            "a limit of 30 % of the machine, four threads, alone",
            vec![Member { limit: Some(cpus * 0.3), threads: 4, ..HOG }],
            Goal::Each,
        ),
        Case::of(
            "one thread beside three with four threads",
            [vec![HOG], vec![four; 3]].concat(),
            Goal::Each,
        ),
        Case { podman: false, ..Case::of("100 equal", vec![HOG; 100], Goal::Each) },
    ]
}

/// A way to run the containers of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Arm {
    /// With the daemon, which governs weights.
    Governed,
    /// With the daemon's scheduler.
    Scheduled,
    /// With static weights.
    Static,
    Podman,
    /// Plain cgroups.
    Cgroups,
}

impl Arm {
    const ALL: [Self; 5] =
        [Self::Governed, Self::Scheduled, Self::Static, Self::Podman, Self::Cgroups];

    fn has_daemon(self) -> bool {
        matches!(self, Self::Governed | Self::Scheduled)
    }

    /// The settings of the daemon.
    fn settings(self) -> &'static str {
        match self {
            Self::Scheduled => "[contract]\ncpu-scheduler = \"sched_ext\"\n",
            _ => "",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Governed => "dormouse with its daemon",
            Self::Scheduled => "dormouse with sched_ext",
            Self::Static => "dormouse, static weights",
            Self::Podman => "podman",
            Self::Cgroups => "plain cgroups",
        }
    }
}

/// Running containers, which end with this.
struct Set<'a> {
    hosts: &'a Hosts,
    arm: Arm,
    names: Vec<String>,
    children: Vec<Child>,
    groups: Vec<PathBuf>,
    pids: Vec<u32>,
}

/// The directory of a new cgroup for CPU time, and its file for the weight.
fn cgroup(name: &str) -> Result<(PathBuf, &'static str)> {
    let v1 = PathBuf::from("/sys/fs/cgroup/cpu");
    let (root, file) = match v1.exists() {
        true => (v1, "cpu.shares"),
        false => (PathBuf::from("/sys/fs/cgroup"), "cpu.weight"),
    };
    let all = root.join(format!("bench-contracts-{}", std::process::id()));
    let dir = all.join(name);
    fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
    if file == "cpu.weight" {
        for above in [&root, &all] {
            let control = above.join("cgroup.subtree_control");
            fs::write(&control, "+cpu").with_context(|| control.display().to_string())?;
        }
    }
    Ok((dir, file))
}

/// Starts a process of the host in a cgroup.
fn start_in(dir: &std::path::Path, program: PathBuf, words: &[String]) -> Result<Child> {
    let mut command = Command::new("sh");
    command.args(["-c", "echo $$ >\"$0\"/cgroup.procs && exec \"$@\""]).arg(dir).arg(program);
    Ok(command.args(&words[1..]).stdout(Stdio::null()).spawn()?)
}

impl<'a> Set<'a> {
    fn start(hosts: &'a Hosts, arm: Arm, case: &Case) -> Result<Self> {
        let mut set = Self {
            hosts,
            arm,
            names: Vec::new(),
            children: Vec::new(),
            groups: Vec::new(),
            pids: Vec::new(),
        };
        // Weights in proportion to what is due, for the arms without reservations.
        let weights: Vec<f64> = due(&case.claims(), hosts.cpus);
        for (n, (member, weight)) in case.members.iter().zip(weights).enumerate() {
            set.add(n, member, weight)?;
        }
        for n in 0..case.outside {
            let (dir, _) = cgroup(&format!("outside{n}"))?;
            set.children.push(start_in(&dir, hosts.bench.path("hog"), &HOG.words())?);
            set.groups.push(dir);
        }
        Ok(set)
    }

    fn add(&mut self, n: usize, member: &Member, weight: f64) -> Result<()> {
        let name = format!("m{n}");
        // 1024 for half a CPU; an idle container has the least weight.
        let shares = ((weight * 2048.0) as u32).clamp(2, 262_144);
        match self.arm {
            Arm::Governed | Arm::Scheduled | Arm::Static => {
                let mut run = self.hosts.bench.dormouse();
                run.args(["run", "-d", "--net", "none", "--name", &name]);
                run.args(["--cpu-weight", &member.weight.to_string()]);
                if member.reserve > 0.0 {
                    run.args(["--cpu-reserve", &member.reserve.to_string()]);
                }
                run.args(member.limit.iter().flat_map(|it| ["--cpus".to_owned(), it.to_string()]));
                self.names.push(name.clone());
                ok(run.arg("bench").args(member.words()))?;
                self.pids.push(self.hosts.bench.pid(&name)?);
            }
            Arm::Podman => {
                let podman = self.hosts.podman.as_ref().context("podman is not installed")?;
                let mut run = podman.run();
                run.args(["-d", "--name", &name, "--cpu-shares", &shares.to_string()]);
                run.args(member.limit.iter().flat_map(|it| ["--cpus".to_owned(), it.to_string()]));
                self.names.push(name.clone());
                let words = member.words();
                ok(run.arg("bench").arg("/bin/hog").args(&words[1..]))?;
                let mut inspect = podman.command();
                let pid = ok(inspect.args(["inspect", "--format", "{{.State.Pid}}", &name]))?;
                self.pids.push(pid.parse()?);
            }
            Arm::Cgroups => {
                let (dir, file) = cgroup(&name)?;
                // The weight of cgroup v2 has a hundredth where v1 has 1024.
                let number =
                    if file == "cpu.weight" { (shares / 10).clamp(1, 10_000) } else { shares };
                fs::write(dir.join(file), number.to_string())?;
                if let Some(limit) = member.limit {
                    let quota_us = (limit * 100_000.0) as u64;
                    match file {
                        "cpu.weight" => {
                            fs::write(dir.join("cpu.max"), format!("{quota_us} 100000"))?
                        }
                        _ => fs::write(dir.join("cpu.cfs_quota_us"), quota_us.to_string())?,
                    }
                }
                let child = start_in(&dir, self.hosts.bench.path("hog"), &member.words())?;
                self.pids.push(child.id());
                self.children.push(child);
                self.groups.push(dir);
            }
        }
        Ok(())
    }

    /// The CPU time of each container until now, in seconds.
    fn used(&self) -> Result<Vec<f64>> {
        self.pids.iter().map(|pid| cpu_time(*pid)).collect()
    }
}

impl Drop for Set<'_> {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill().and_then(|()| child.wait());
        }
        // Best effort: the benchmark removes everything at its end.
        match (self.arm, &self.hosts.podman) {
            (Arm::Podman, Some(podman)) if !self.names.is_empty() => {
                let _ =
                    ok(podman.command().args(["rm", "--force", "--time", "0"]).args(&self.names));
            }
            (Arm::Governed | Arm::Scheduled | Arm::Static, _) if !self.names.is_empty() => {
                let _ = ok(self.hosts.bench.dormouse().args(["rm", "--force"]).args(&self.names));
            }
            _ => {}
        }
        for dir in &self.groups {
            let _ = fs::remove_dir(dir);
            let _ = dir.parent().map(fs::remove_dir);
        }
    }
}

/// The measurement of one round.
struct Round {
    /// CPUs of each container.
    got: Vec<f64>,
    due: Vec<f64>,
    /// By container: seconds since the begin, and CPUs in the window before.
    windows: Vec<Vec<(f64, f64)>>,
}

impl Round {
    fn take(set: &Set<'_>, case: &Case, duration: Duration) -> Result<Self> {
        sleep(SETTLES);
        let (start, first) = (Instant::now(), set.used()?);
        let (mut at, mut last) = (0.0, first.clone());
        let mut windows = vec![Vec::new(); first.len()];
        while start.elapsed() < duration {
            sleep(WINDOW);
            let (now, used) = (start.elapsed().as_secs_f64(), set.used()?);
            for (n, windows) in windows.iter_mut().enumerate() {
                windows.push((now, (used[n] - last[n]) / (now - at)));
            }
            (at, last) = (now, used);
        }
        let got: Vec<f64> =
            last.iter().zip(&first).map(|(last, first)| (last - first) / at).collect();
        let due = due(&case.claims(), got.iter().sum());
        Ok(Self { got, due, windows })
    }
}

/// The medians of some rounds, by container.
fn medians(rounds: &[Round], of: impl Fn(&Round) -> &Vec<f64>) -> Vec<f64> {
    let members = rounds.first().map_or(0, |round| of(round).len());
    (0..members).map(|n| median(rounds.iter().map(|round| of(round)[n]).collect())).collect()
}

pub fn cpu(hosts: &Hosts) -> Result<()> {
    for (number, case) in cases(hosts.cpus).iter().enumerate() {
        if case.name.contains(&hosts.options.only) {
            measure(hosts, number, case).with_context(|| case.name)?;
        }
    }
    Ok(())
}

/// Measures a case in all arms in turn, and reports.
fn measure(hosts: &Hosts, number: usize, case: &Case) -> Result<()> {
    let has_scheduler = PathBuf::from("/sys/kernel/sched_ext").exists();
    let takes_part = |arm: &Arm| match arm {
        Arm::Podman => case.podman && hosts.podman.is_some(),
        Arm::Scheduled => has_scheduler,
        _ => true,
    };
    let wanted = |arm: &Arm| hosts.options.arm.is_empty() || hosts.options.arm.contains(arm);
    let arms: Vec<Arm> = Arm::ALL.into_iter().filter(takes_part).filter(wanted).collect();
    let mut all: Vec<Vec<Round>> = arms.iter().map(|_| Vec::new()).collect();
    for turn in 0..hosts.options.rounds {
        for place in 0..arms.len() {
            let place = (place + turn) % arms.len();
            hosts.bench.configure(arms[place].settings())?;
            let daemon = arms[place].has_daemon().then(|| hosts.bench.daemon(&[])).transpose()?;
            if arms[place] == Arm::Scheduled {
                ensure!(wait_until(BEGINS, is_scheduling), "the scheduler does not begin");
            }
            let set = Set::start(hosts, arms[place], case)?;
            all[place].push(Round::take(&set, case, Duration::from_secs(hosts.options.seconds))?);
            drop(set);
            drop(daemon);
        }
    }
    eprintln!("\n{}", case.name);
    eprintln!(
        "  {:<26} {:>7} {:>7} {:>9} {:>20}",
        "", "due", "got", "worst", "others, of their due"
    );
    for (arm, rounds) in arms.iter().zip(&all) {
        report(hosts, case, *arm, rounds);
    }
    let governed = all.first().and_then(|rounds| rounds.first()).context("no round")?;
    let names: Vec<String> = (0..case.members.len()).map(|n| format!("container {n}")).collect();
    let lines: Vec<Line<'_>> = names
        .iter()
        .zip(&governed.windows)
        .take(LINES_MAX)
        .map(|(name, points)| Line { name, points: points.clone() })
        .collect();
    plot(&format!("contracts-{number}"), case.name, ["seconds", "CPUs in 100 ms"], &lines)
}

/// Whether a scheduler of sched_ext is in force.
fn is_scheduling() -> bool {
    let state = fs::read_to_string("/sys/kernel/sched_ext/state");
    state.is_ok_and(|state| state.trim() == "enabled")
}

/// Number of containers in a plot.
const LINES_MAX: usize = 9;

/// Prints the figures of one arm of a case.
fn report(hosts: &Hosts, case: &Case, arm: Arm, rounds: &[Round]) {
    let (got, due) = (medians(rounds, |it| &it.got), medians(rounds, |it| &it.due));
    let off = |n: usize| (got[n] - due[n]).abs() / hosts.cpus * 100.0;
    let worst = (0..got.len()).map(off).fold(0.0, f64::max);
    let others = || (1..got.len()).filter(|n| due[*n] > 0.0).map(|n| got[n] / due[n]);
    let (least, most) = (others().reduce(f64::min), others().reduce(f64::max));
    let range =
        least.zip(most).map_or("-".into(), |(least, most)| format!("{least:.2} to {most:.2}"));
    eprintln!("  {:<26} {:>7.3} {:>7.3} {:>6.1} pt {range:>20}", arm.name(), due[0], got[0], worst,);
    let more = serde_json::json!({
        "rounds": rounds.len(), "due_cpus": due, "got_cpus": got, "worst_points": worst,
        "others_least": least, "others_most": most,
    });
    figure("contracts", &format!("{}, {}", case.name, arm.name()), got[0], "CPUs", more);
    if arm.has_daemon() {
        match case.goal {
            Goal::Each => promise("points between got and due, at most", worst, 1.0),
            Goal::First { percent: 100 } => {
                promise("points that the first is off its due", off(0), 1.0)
            }
            Goal::First { percent } => {
                let missing = 1.0 - got[0] / due[0];
                promise(
                    "part of its due that is missing",
                    missing,
                    f64::from(100 - percent) / 100.0,
                );
            }
        }
    }
}
