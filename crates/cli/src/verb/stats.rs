//! `dormouse stats`

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use dormouse_container::Engine;
use dormouse_kernel::cgroup::Stats;
use dormouse_model::{ContainerId, State};
use serde::Serialize;

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

/// One container in `stats --json`.
#[derive(Debug, Serialize)]
struct Row {
    id: String,
    name: String,
    /// Of one CPU, since the reading before.
    cpu_percent: f64,
    cpu_usage_ns: u64,
    cpu_user_ns: u64,
    cpu_system_ns: u64,
    cpu_throttled_ns: u64,
    memory_bytes: u64,
    /// Part of it: file cache that is reclaimed first.
    memory_inactive_file_bytes: u64,
    memory_peak_bytes: u64,
    memory_max_bytes: Option<u64>,
    swap_bytes: u64,
    pids: u64,
    pids_max: Option<u64>,
    io_read_bytes: u64,
    io_write_bytes: u64,
    oom_kills: u64,
}

/// Readings of containers, with their times.
type Readings = BTreeMap<ContainerId, (Instant, Stats)>;

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let mut before = read(&engine, &args.names)?.0;
    // A share needs two readings.
    let mut pause = Duration::from_millis(250);
    let screen = !args.json && !args.no_stream && terminal::is_terminal(rustix::stdio::stdout());
    loop {
        std::thread::sleep(pause);
        let (now, rows) = read(&engine, &args.names)?;
        let rows: Vec<Row> =
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

fn row(
    id: &ContainerId,
    name: String,
    before: Option<&(Instant, Stats)>,
    (at, s): &(Instant, Stats),
) -> Row {
    let share = before.map_or(0.0, |(then, b)| {
        let passed = at.duration_since(*then).as_nanos().max(1) as f64;
        s.cpu_usage_ns.saturating_sub(b.cpu_usage_ns) as f64 / passed * 100.0
    });
    Row {
        id: id.to_string(),
        name,
        cpu_percent: (share * 100.0).round() / 100.0,
        cpu_usage_ns: s.cpu_usage_ns,
        cpu_user_ns: s.cpu_user_ns,
        cpu_system_ns: s.cpu_system_ns,
        cpu_throttled_ns: s.cpu_throttled_ns,
        memory_bytes: s.memory_bytes,
        memory_inactive_file_bytes: s.memory_inactive_file_bytes,
        memory_peak_bytes: s.memory_peak_bytes,
        memory_max_bytes: s.memory_max_bytes,
        swap_bytes: s.swap_bytes,
        pids: s.pids,
        pids_max: s.pids_max,
        io_read_bytes: s.io_read_bytes,
        io_write_bytes: s.io_write_bytes,
        oom_kills: s.oom_kills,
    }
}

fn show(rows: &[Row], json: bool, screen: bool) -> Result<()> {
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
