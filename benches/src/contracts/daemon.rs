//! What the daemon uses of a CPU beside many containers, of which some have reservations, and some may be asleep.

use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use dormouse_benches::{Bench, cpu_time, figure, median, ok};

use crate::Hosts;

/// Containers with a reservation of CPU time.
const RESERVED: usize = 10;
/// From the start of the daemon to the measurement: it looks at all containers.
const SETTLES: Duration = Duration::from_secs(10);
/// The longest time of a measurement counts several of its rounds.
const LEAST_SECONDS: u64 = 10;

pub fn daemon(hosts: &Hosts) -> Result<()> {
    let (bench, options) = (&hosts.bench, &hosts.options);
    let many = options.containers;
    eprintln!("\nthe daemon beside {many} containers, and {} asleep", options.asleep);
    for n in 0..many {
        let words = ["--net", "none", "--name", &format!("n{n}"), "bench", "sleep", "1000000"];
        ok(bench.dormouse().args(["run", "-d"]).args(words))?;
    }
    if options.asleep > 0 {
        let count = options.asleep.to_string();
        ok(bench.dormouse().args(["run", "-d", "--name", "server", "bench", "serve", "80", "16"]))?;
        let clone = ["clone", "--asleep", "-n", &count, "--name", "a", "server"];
        ok(bench.dormouse().args(clone))?;
    }
    measure(hosts, "no reservation")?;
    for n in 0..RESERVED.min(many) {
        let update = ["update", "--cpu-reserve", "0.05", &format!("n{n}")];
        ok(bench.dormouse().args(update))?;
    }
    measure(hosts, &format!("{RESERVED} reservations, all idle"))?;
    start(bench, "hungry", &["--cpu-reserve", "0.5"], &["hog", "1"])?;
    measure(hosts, &format!("{} reservations, one hungry", RESERVED + 1))?;
    for n in 0..4 {
        start(bench, &format!("hog{n}"), &[], &["hog", "1"])?;
    }
    measure(hosts, &format!("{} reservations, one hungry beside four busy ones", RESERVED + 1))?;
    ok(bench.dormouse().args(["rm", "--force", "--all"])).map(drop)
}

fn start(bench: &Bench, name: &str, options: &[&str], words: &[&str]) -> Result<()> {
    let mut run = bench.dormouse();
    run.args(["run", "-d", "--net", "none", "--name", name]).args(options).arg("bench");
    ok(run.args(words)).map(drop)
}

/// The part of one CPU that a daemon uses.
fn measure(hosts: &Hosts, name: &str) -> Result<()> {
    let duration = Duration::from_secs(hosts.options.seconds.max(LEAST_SECONDS));
    let daemon = hosts.bench.daemon(&[])?;
    sleep(SETTLES);
    let mut percents = Vec::new();
    for _ in 0..hosts.options.rounds {
        let before = cpu_time(daemon.pid())?;
        sleep(duration);
        let used = cpu_time(daemon.pid())? - before;
        percents.push(used / duration.as_secs_f64() * 100.0);
    }
    let percent = median(percents.clone());
    eprintln!("  {name}: {percent:.2} % of one CPU");
    let more = serde_json::json!({
        "containers": hosts.options.containers, "asleep": hosts.options.asleep, "rounds": percents,
    });
    figure("contracts", &format!("the daemon, {name}"), percent, "% of a CPU", more);
    Ok(())
}
