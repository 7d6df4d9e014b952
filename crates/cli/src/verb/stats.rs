//! `dormouse stats`

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use dormouse_api::Stats;
use dormouse_container::{Engine, SocketCount as Count};
use dormouse_kernel::cgroup;
use dormouse_model::{ContainerId, Cpu, DiskRate, State};

use crate::command::Global;
use crate::output::{self, Table, bytes};
use crate::view::of_most;
use crate::{terminal, view};

/// Show the resource use of containers
///
/// The CPU share is of one CPU, over the time between two readings. Beside it are the CPU time that is
/// guaranteed (--cpu-reserve) and the most (--cpus), also of one CPU. The last
/// column is the most that may be read and written per second (--io-read-bps and its like).
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

/// A container that is shown.
struct Shown {
    id: ContainerId,
    name: String,
    cpu: Cpu,
    disk_rates: Vec<DiskRate>,
    sockets: Option<Count>,
}

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
            rows.into_iter().map(|it| row(before.get(&it.id), &now[&it.id], it)).collect();
        let used = || engine.images_memory().map_or(0, |(used, _)| used);
        let images = if args.names.is_empty() { used() } else { 0 };
        show(&rows, images, args.json, screen)?;
        if args.no_stream {
            return Ok(0);
        }
        before = now;
        pause = Duration::from_secs(args.interval.into());
    }
}

fn read(engine: &Engine, names: &[String]) -> Result<(Readings, Vec<Shown>)> {
    let mut ids = Vec::new();
    if names.is_empty() {
        let has_processes = |s: State| matches!(s, State::Running | State::Paused | State::Drowsy);
        ids.extend(engine.list()?.into_iter().filter(|d| has_processes(d.state)).map(|d| d.id));
    } else {
        for name in names {
            ids.push(engine.find(name)?);
        }
    }
    let (mut readings, mut shown) = (Readings::new(), Vec::new());
    for id in ids {
        let read = engine.config(&id).and_then(|config| Ok((config, engine.stats(&id)?)));
        match read {
            Ok((config, stats)) => {
                readings.insert(id.clone(), (Instant::now(), stats));
                let cpu = Cpu::of(&config.spec.limits);
                let sockets = engine.sockets(&config)?;
                let disk_rates = config.spec.limits.disk_rates;
                shown.push(Shown { id, name: config.name.to_string(), cpu, disk_rates, sockets });
            }
            // The container stopped since it was listed.
            Err(_) if names.is_empty() => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok((readings, shown))
}

/// Returns what is shown of a container.
fn row(
    before: Option<&(Instant, cgroup::Stats)>,
    (at, now): &(Instant, cgroup::Stats),
    it: Shown,
) -> Stats {
    let before = before.map(|(then, before)| (before, at.duration_since(*then)));
    let sockets = it.sockets.map(|count| count.sockets);
    let sockets_max = it.sockets.and_then(|count| count.most);
    let of = Stats::of(it.id.to_string(), it.name, (&it.cpu, it.disk_rates), now, before);
    Stats { sockets, sockets_max, ..of }
}

fn show(rows: &[Stats], images_bytes: u64, json: bool, screen: bool) -> Result<()> {
    if json {
        return output::json_line(rows);
    }
    let mut table = Table::new([
        "CONTAINER ID",
        "NAME",
        "CPU %",
        "RESERVED %",
        "MOST %",
        "MEMORY",
        "LIMIT",
        "PIDS",
        "SOCKETS",
        "READ",
        "WRITTEN",
        "DISK MOST",
    ]);
    let percent = |milli: u32| (f64::from(milli) / 10.0).to_string();
    let none = || "-".to_owned();
    for r in rows {
        table.row([
            r.id[..12].to_owned(),
            r.name.clone(),
            format!("{:.2}", r.cpu_percent),
            if r.cpu_reserve_milli == 0 { none() } else { percent(r.cpu_reserve_milli) },
            r.cpu_max_milli.map_or_else(none, percent),
            // Memory that is reclaimed first does not count, as in podman.
            bytes(r.memory_bytes.saturating_sub(r.memory_inactive_file_bytes)),
            r.memory_max_bytes.map_or_else(none, bytes),
            r.pids.to_string(),
            r.sockets.map_or_else(none, |sockets| of_most(sockets, r.sockets_max)),
            bytes(r.io_read_bytes),
            bytes(r.io_write_bytes),
            match r.disk_rates.is_empty() {
                true => none(),
                false => view::disk_rates(&r.disk_rates),
            },
        ]);
    }
    // Cursor home, clear the screen, then the table.
    let mut text = table.text();
    if images_bytes > 0 {
        text += &format!(
            "images have {} in page cache, charged to no container\n",
            bytes(images_bytes)
        );
    }
    output::print(if screen { format!("\x1b[H\x1b[2J{text}") } else { text })
}
