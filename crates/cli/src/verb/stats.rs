//! `dormouse stats`

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use dormouse_api::Stats;
use dormouse_container::Engine;
use dormouse_kernel::cgroup;
use dormouse_model::{ContainerId, State};

use crate::command::Global;
use crate::output::{self, Table, bytes};
use crate::terminal;

/// Show the resource use of containers
///
/// The CPU share is of one CPU, over the time between two readings.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// One reading instead of one every second
    #[arg(long)]
    no_stream: bool,
    /// Seconds between readings
    #[arg(long, short, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    interval: u16,
    /// Print as JSON: an array per reading, on a line of its own
    #[arg(long)]
    json: bool,
    /// Names or ids; all running ones by default
    #[arg(value_name = "CONTAINER")]
    names: Vec<String>,
}

/// Readings of containers, with their times.
type Readings = BTreeMap<ContainerId, (Instant, cgroup::Stats)>;

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let mut before = read(&engine, &args.names)?.0;
    // A share needs two readings.
    let mut pause = Duration::from_millis(250);
    let screen = !args.json && !args.no_stream && terminal::is_terminal(rustix::stdio::stdout());
    loop {
        std::thread::sleep(pause);
        let (now, rows) = read(&engine, &args.names)?;
        let rows: Vec<Stats> =
            rows.into_iter().map(|(id, name)| row(&id, name, before.get(&id), &now[&id])).collect();
        show(&rows, args.json, screen)?;
        if args.no_stream {
            return Ok(0);
        }
        before = now;
        pause = Duration::from_secs(args.interval.into());
    }
}

fn read(engine: &Engine, names: &[String]) -> Result<(Readings, Vec<(ContainerId, String)>)> {
    let mut list = Vec::new();
    if names.is_empty() {
        let has_processes = |s: State| matches!(s, State::Running | State::Paused | State::Drowsy);
        for d in engine.list()?.into_iter().filter(|d| has_processes(d.state)) {
            list.push((d.id, d.name.to_string()));
        }
    } else {
        for name in names {
            let id = engine.find(name)?;
            let name = engine.config(&id)?.name.to_string();
            list.push((id, name));
        }
    }
    let mut readings = Readings::new();
    for (id, _) in &list {
        match engine.stats(id) {
            Ok(stats) => drop(readings.insert(id.clone(), (Instant::now(), stats))),
            // The container stopped since it was listed.
            Err(_) if names.is_empty() => {}
            Err(e) => return Err(e.into()),
        }
    }
    list.retain(|(id, _)| readings.contains_key(id));
    Ok((readings, list))
}

/// Returns what is shown of a container.
fn row(
    id: &ContainerId,
    name: String,
    before: Option<&(Instant, cgroup::Stats)>,
    (at, now): &(Instant, cgroup::Stats),
) -> Stats {
    let before = before.map(|(then, before)| (before, at.duration_since(*then)));
    Stats::of(id.to_string(), name, now, before)
}

fn show(rows: &[Stats], json: bool, screen: bool) -> Result<()> {
    if json {
        return output::json_line(rows);
    }
    let mut table =
        Table::new(["CONTAINER ID", "NAME", "CPU %", "MEMORY", "LIMIT", "PIDS", "READ", "WRITTEN"]);
    for r in rows {
        table.row([
            r.id[..12].to_owned(),
            r.name.clone(),
            format!("{:.2}", r.cpu_percent),
            // Memory that is reclaimed first does not count, as in podman.
            bytes(r.memory_bytes.saturating_sub(r.memory_inactive_file_bytes)),
            r.memory_max_bytes.map_or_else(|| "-".to_owned(), bytes),
            r.pids.to_string(),
            bytes(r.io_read_bytes),
            bytes(r.io_write_bytes),
        ]);
    }
    // Cursor home, clear the screen, then the table.
    let text = table.text();
    output::print(if screen { format!("\x1b[H\x1b[2J{text}") } else { text })
}
