//! Many servers, memory for some of them: how many requests are answered.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin zipf -- --servers 40 --seconds 4
//! ```
//!
//! Some clients ask one server after the other, number n with a probability of 1/n^alpha, each request
//! a connection of its own. The daemon has memory for a part of the servers; the others sleep, and are
//! woken by whoever asks them, when another one sleeps in their place. The reference has memory for all
//! of them, in the same run, before and after. On the way to that many servers it is measured how many
//! requests fewer of them answer, with memory for all and for `--fit` of them. Denali (OSDI 2002), figures 8
//! to 11.
#![forbid(unsafe_code)]

use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use dormouse_benches::farm::{Asked, Callers, Farm};
use dormouse_benches::{Bench, Line, figure, plot, promise};

/// Options.
#[derive(Parser)]
struct Options {
    /// How many servers.
    #[arg(long, default_value_t = 40)]
    servers: usize,
    /// Memory of each of them.
    #[arg(long, default_value_t = 2048)]
    kib: u64,
    /// How many ask at once.
    #[arg(long, default_value_t = 4)]
    clients: usize,
    /// How long each point is measured.
    #[arg(long, default_value_t = 4)]
    seconds: u64,
    /// How many have room where not all have.
    #[arg(long, default_value_t = 10)]
    fit: usize,
    /// From how many servers on it is measured how many requests they answer, twice as many each time.
    #[arg(long, default_value_t = 5)]
    from: usize,
}

const ALPHAS: [f64; 4] = [0.0, 0.5, 1.0, 1.5];
const PARTS: [f64; 4] = [0.1, 0.25, 0.5, 0.75];

fn main() -> Result<()> {
    let options = Options::parse();
    let bench = Bench::new()?;
    let mut farm = Farm::new(&bench, options.kib);
    against_their_number(&options, &mut farm)?;
    let mut lines = Vec::new();
    for alpha in ALPHAS {
        let before = point(&options, &farm, alpha, 1.0)?;
        let mut line = Vec::new();
        for part in PARTS {
            let found = point(&options, &farm, alpha, part)?;
            line.push((part, found));
        }
        let after = point(&options, &farm, alpha, 1.0)?;
        let resident = (before.requests_per_s + after.requests_per_s) / 2.0;
        for (part, found) in &line {
            tell(&options, alpha, *part, found, resident);
        }
        if alpha == 1.0 {
            let of_all = resident / line[0].1.requests_per_s;
            promise("alpha 1, memory for a tenth: all in memory against it", of_all, 2.0);
        }
        let ratios = line.iter().map(|(part, found)| (*part, found.requests_per_s / resident));
        lines.push((format!("alpha {alpha}"), ratios.chain([(1.0, 1.0)]).collect()));
    }
    let lines: Vec<Line<'_>> =
        lines.into_iter().map(|(name, points)| Line { name: name.leak(), points }).collect();
    let title = format!("{} servers, memory for some of them", options.servers);
    plot("zipf", &title, ["part of them that has room", "requests, of all in memory"], &lines)
}

/// Starts the servers, and draws how many requests so many of them answer on the way.
fn against_their_number(options: &Options, farm: &mut Farm<'_>) -> Result<()> {
    let mut lines: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    let counts = std::iter::successors(Some(options.from.max(1)), |count| Some(count * 2));
    let counts = counts.take_while(|count| *count < options.servers).chain([options.servers]);
    for count in counts {
        farm.grow(count)?;
        let arms =
            ALPHAS.map(|alpha| (format!("alpha {alpha}, room for {}", options.fit), alpha, false));
        // With room for all of them nobody is asked for what nobody has: who is popular hardly matters.
        for (name, alpha, all_fit) in
            [("room for all".to_owned(), 1.0, true)].into_iter().chain(arms)
        {
            let part = if all_fit { 1.0 } else { (options.fit as f64 / count as f64).min(1.0) };
            let found = point(options, farm, alpha, part)?;
            let what = format!("{count} servers, {name}");
            eprintln!("  {what}: {:.0} requests/s, {} wakes", found.requests_per_s, found.wakes);
            let more = serde_json::json!({
                "servers": count, "kib": options.kib, "clients": options.clients, "alpha": alpha,
                "wakes": found.wakes, "p50_ms": found.times.median_ms(), "p99_ms": found.times.at(0.99),
            });
            figure("zipf", &format!("{what}: requests"), found.requests_per_s, "1/s", more);
            let place = (count as f64, found.requests_per_s);
            match lines.iter_mut().find(|(line, _)| *line == name) {
                Some((_, points)) => points.push(place),
                None => lines.push((name, vec![place])),
            }
        }
    }
    let drawn = lines.iter().map(|(name, points)| Line { name, points: points.clone() });
    let title = format!("More and more servers, memory for {} of them", options.fit);
    plot("zipf-servers", &title, ["servers", "requests a second"], &drawn.collect::<Vec<_>>())
}

fn tell(options: &Options, alpha: f64, part: f64, found: &Asked, resident: f64) {
    let Asked { requests_per_s, times, wakes } = found;
    let ratio = requests_per_s / resident;
    eprintln!(
        "  alpha {alpha}, room for {part}: {requests_per_s:.0} requests/s, {ratio:.2} of all in \
         memory; p50 {:.2} ms, p99 {:.1} ms, longest {:.0} ms; {wakes} wakes",
        times.median_ms(),
        times.at(0.99),
        times.at(1.0)
    );
    let more = serde_json::json!({
        "servers": options.servers, "kib": options.kib, "clients": options.clients,
        "seconds": options.seconds, "requests_per_s": requests_per_s, "wakes": wakes,
        "p50_ms": times.median_ms(), "p99_ms": times.at(0.99), "max_ms": times.at(1.0),
    });
    let name = format!("alpha {alpha}, room for {part}: requests, of all in memory");
    figure("zipf", &name, ratio, "", more);
}

/// Asks for a while, with memory for a part of them.
fn point(options: &Options, farm: &Farm<'_>, alpha: f64, part: f64) -> Result<Asked> {
    let _daemon = farm.with_room_for((farm.all.len() as f64 * part).round() as usize, &[])?;
    let time = Duration::from_secs(options.seconds);
    farm.ask(Callers { clients: options.clients, alpha, time })
}
