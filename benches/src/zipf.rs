//! Many servers, memory for some of them: the number of answered requests.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin zipf -- --servers 40 --seconds 4
//! ```
//!
//! Some clients send requests to one server after the other, to server n with a probability of
//! 1/n^alpha, each in a connection of its own. The daemon has memory for a part of the servers. In
//! one arm the memory of the others is in swap. In another arm the others are asleep, and are woken
//! by a request while another server is suspended instead. An answer touches all memory of a
//! server, or as much as a static web server touches. The reference has memory for all of them, in
//! the same run, before and after. Smaller numbers of servers are measured on the way, with memory
//! for all and for `--fit` of them. Denali (OSDI 2002), figures 8 to 11.
#![forbid(unsafe_code)]

use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use dormouse_benches::farm::{Asked, Callers, Farm, Touched};
use dormouse_benches::{Bench, Line, Swap, figure, plot, promise};

/// Options.
#[derive(Parser)]
struct Options {
    /// Number of servers.
    #[arg(long, default_value_t = 40)]
    servers: usize,
    /// Memory of each: about that of python's http.server.
    #[arg(long, default_value_t = 8192)]
    kib: u64,
    /// Number of concurrent clients.
    #[arg(long, default_value_t = 4)]
    clients: usize,
    /// Duration of each point.
    #[arg(long, default_value_t = 4)]
    seconds: u64,
    /// Number of servers that fit where not all do.
    #[arg(long, default_value_t = 10)]
    fit: usize,
    /// The first number of servers at which requests are measured; doubled each time.
    #[arg(long, default_value_t = 5)]
    from: usize,
    /// The exponents of the popularity.
    #[arg(long, value_delimiter = ',', default_values_t = [0.0, 0.5, 1.0, 1.5])]
    alpha: Vec<f64>,
    /// The parts of the servers that fit.
    #[arg(long, value_delimiter = ',', default_values_t = [0.1, 0.25, 0.5, 0.75])]
    part: Vec<f64>,
    /// The memory that an answer touches.
    #[arg(long, value_delimiter = ',', default_value = "few,all")]
    touched: Vec<Touched>,
}

/// The way of freeing memory, and the memory that an answer touches.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Arm {
    reclaim: &'static str,
    touched: Touched,
}

const ARMS: [Arm; 4] = [
    Arm { reclaim: "swap", touched: Touched::Few },
    Arm { reclaim: "swap", touched: Touched::All },
    Arm { reclaim: "sleep", touched: Touched::Few },
    Arm { reclaim: "sleep", touched: Touched::All },
];

impl std::fmt::Display for Arm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let touched = match self.touched {
            Touched::Few => "64 kB",
            Touched::All => "all",
        };
        write!(f, "{}, {touched} touched", self.reclaim)
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    let bench = Bench::new()?;
    let swap = Swap::on(&bench, (options.servers as u64 * (options.kib + 1024)) << 10)?;
    let mut farm = Farm::new(&bench, options.kib);
    against_their_number(&options, &mut farm)?;
    let (mut by_alpha, mut by_arm) = (Vec::new(), Vec::new());
    for &alpha in &options.alpha {
        for &touched in &options.touched {
            let arms = || ARMS.into_iter().filter(|arm| arm.touched == touched);
            let all_fit = |arm: Arm| point(&options, &farm, arm, alpha, 1.0);
            let before = all_fit(ARMS[0].with(touched))?;
            let mut found = Vec::new();
            for &part in &options.part {
                for arm in arms() {
                    found.push((arm, part, point(&options, &farm, arm, alpha, part)?));
                }
            }
            let after = all_fit(ARMS[0].with(touched))?;
            let resident = (before.requests_per_s + after.requests_per_s) / 2.0;
            for arm in arms() {
                let of_arm = found.iter().filter(|(one, ..)| *one == arm);
                let mut points = Vec::new();
                for (_, part, answers) in of_arm {
                    let room = farm.room_bytes(fit(&farm, *part));
                    report(&options, arm, alpha, *part, answers, resident, room);
                    points.push((*part, answers.requests_per_s / resident));
                }
                let is_promised = alpha == 1.0 && arm == ARMS[0];
                let of_a_tenth = points.iter().find(|(part, _)| is_promised && *part == 0.1);
                if let Some((_, answered)) = of_a_tenth {
                    let of_all = 1.0 / answered;
                    promise("alpha 1, memory for a tenth: all in memory against it", of_all, 2.0);
                }
                points.push((1.0, 1.0));
                if alpha == 1.0 {
                    by_arm.push((arm.to_string(), points.clone()));
                }
                if arm == ARMS[0] {
                    by_alpha.push((format!("alpha {alpha}"), points));
                }
            }
        }
    }
    let axes = ["part of them that has room", "requests, of all in memory"];
    let title = format!("{} servers, memory for some of them: {}", options.servers, ARMS[0]);
    if !by_alpha.is_empty() {
        plot("zipf", &title, axes, &lines(&by_alpha))?;
    }
    let title = format!("{} servers, memory for some of them, alpha 1", options.servers);
    if !by_arm.is_empty() {
        plot("zipf-reclaim", &title, axes, &lines(&by_arm))?;
    }
    drop(swap);
    Ok(())
}

impl Arm {
    fn with(self, touched: Touched) -> Self {
        Self { touched, ..self }
    }
}

fn lines(all: &[(String, Vec<(f64, f64)>)]) -> Vec<Line<'_>> {
    all.iter().map(|(name, points)| Line { name, points: points.clone() }).collect()
}

/// Starts the servers, and plots the requests answered by smaller numbers on the way.
fn against_their_number(options: &Options, farm: &mut Farm<'_>) -> Result<()> {
    let mut all: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    let counts = std::iter::successors(Some(options.from.max(1)), |count| Some(count * 2));
    let counts = counts.take_while(|count| *count < options.servers).chain([options.servers]);
    for count in counts {
        farm.grow(count)?;
        let arms = options.alpha.iter();
        let arms =
            arms.map(|alpha| (format!("alpha {alpha}, room for {}", options.fit), *alpha, false));
        // With memory for all, no server is asleep or swapped out, so popularity hardly matters.
        for (name, alpha, all_fit) in
            [("room for all".to_owned(), 1.0, true)].into_iter().chain(arms)
        {
            let part = if all_fit { 1.0 } else { (options.fit as f64 / count as f64).min(1.0) };
            let found = point(options, farm, ARMS[0], alpha, part)?;
            let what = format!("{count} servers, {name}");
            eprintln!("  {what}: {:.0} requests/s, {} wakes", found.requests_per_s, found.wakes);
            let more = serde_json::json!({
                "servers": count, "kib": options.kib, "clients": options.clients, "alpha": alpha,
                "wakes": found.wakes, "p50_ms": found.times.median_ms(), "p99_ms": found.times.at(0.99),
            });
            figure("zipf", &format!("{what}: requests"), found.requests_per_s, "1/s", more);
            let place = (count as f64, found.requests_per_s);
            match all.iter_mut().find(|(line, _)| *line == name) {
                Some((_, points)) => points.push(place),
                None => all.push((name, vec![place])),
            }
        }
    }
    let title = format!("More and more servers, memory for {} of them: {}", options.fit, ARMS[0]);
    plot("zipf-servers", &title, ["servers", "requests a second"], &lines(&all))
}

fn report(
    options: &Options,
    arm: Arm,
    alpha: f64,
    part: f64,
    found: &Asked,
    resident: f64,
    room: u64,
) {
    let Asked { requests_per_s, times, wakes, memory_bytes } = found;
    let (room_mb, memory_mb) = (room >> 20, memory_bytes >> 20);
    let ratio = requests_per_s / resident;
    eprintln!(
        "  {arm}, alpha {alpha}, room for {part}: {requests_per_s:.0} requests/s, {ratio:.2} of all in \
         memory; p50 {:.2} ms, p99 {:.1} ms, longest {:.0} ms; {wakes} wakes; {memory_mb} MB of \
         {room_mb} in the end",
        times.median_ms(),
        times.at(0.99),
        times.at(1.0)
    );
    let more = serde_json::json!({
        "servers": options.servers, "kib": options.kib, "clients": options.clients,
        "seconds": options.seconds, "requests_per_s": requests_per_s, "wakes": wakes,
        "room_mb": room_mb, "memory_mb": memory_mb,
        "p50_ms": times.median_ms(), "p99_ms": times.at(0.99), "max_ms": times.at(1.0),
    });
    let name = format!("{arm}, alpha {alpha}, room for {part}: requests, of all in memory");
    figure("zipf", &name, ratio, "", more);
}

/// The number that fits into this part of the memory. All of it means half as many more, which is
/// no limit.
fn fit(farm: &Farm<'_>, part: f64) -> usize {
    let part = if part < 1.0 { part } else { 1.5 };
    (farm.all.len() as f64 * part).round() as usize
}

/// Runs the clients for a while, with memory for a part of the servers, all of which have theirs at
/// first.
fn point(options: &Options, farm: &Farm<'_>, arm: Arm, alpha: f64, part: f64) -> Result<Asked> {
    farm.fill()?;
    let _daemon = farm.with_room_for(fit(farm, part), &["--reclaim", arm.reclaim])?;
    let time = Duration::from_secs(options.seconds);
    farm.query(Callers { clients: options.clients, alpha, time, touched: arm.touched })
}
