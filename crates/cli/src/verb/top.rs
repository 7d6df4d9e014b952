//! `dormouse top`

use std::collections::BTreeMap;
use std::io::Read;
use std::os::fd::AsFd;

use anyhow::Result;
use dormouse_kernel::{proc, resolve};
use dormouse_model::IdMap;
use rustix::fs::{Mode, OFlags};
use serde::Serialize;

use crate::command::Global;
use crate::output::{self, Table};
use crate::spectator::Spectator;

/// List the processes of a container, or of all containers of the host
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print as JSON
    #[arg(long)]
    json: bool,
    /// Of all containers, in all trust domains and instances of the host
    #[arg(long, conflicts_with = "name")]
    all_domains: bool,
    /// Name or id
    #[arg(value_name = "CONTAINER", required_unless_present = "all_domains")]
    name: Option<String>,
}

/// A process in `top --json`.
#[derive(Debug, Serialize)]
struct Row {
    /// Inside the container.
    pid: u32,
    /// Inside the container; 0 for one from outside.
    parent_pid: u32,
    host_pid: u32,
    /// Inside the container; null if it has no such id.
    uid: Option<u32>,
    /// By the container's own `/etc/passwd`, else the number.
    user: String,
    /// `R`, `S`, `D`, `Z`, `T`, ... (proc(5)).
    state: String,
    threads: u64,
    /// Time since it was started.
    elapsed_ms: u64,
    /// CPU time.
    cpu_ms: u64,
    resident_bytes: u64,
    command: Vec<String>,
}

/// Clock ticks per second that /proc counts in, the same on all of Linux's present machines.
const TICKS: u64 = 100;

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let Some(name) = args.name else { return run_all(global, args.json) };
    let engine = global.engine()?;
    let id = engine.find(&name)?;
    let pids = engine.pids(&id)?;
    let root = engine.root(&id)?;
    let users = users(root.fd.as_fd());
    let rows = rows(&pids, &users, &root.ids, uptime_ms());
    if args.json {
        output::json(&rows)?;
        return Ok(0);
    }
    let mut table = Table::new([
        "USER", "PID", "PPID", "HOST PID", "STATE", "ELAPSED", "CPU TIME", "MEMORY", "COMMAND",
    ]);
    for r in &rows {
        table.row([
            r.user.clone(),
            r.pid.to_string(),
            r.parent_pid.to_string(),
            r.host_pid.to_string(),
            r.state.clone(),
            clock(r.elapsed_ms),
            clock(r.cpu_ms),
            output::bytes(r.resident_bytes),
            r.command.join(" "),
        ]);
    }
    table.print()?;
    Ok(0)
}

/// A process in `top --all-domains --json`.
#[derive(Debug, Serialize)]
struct SpectatedRow<'c> {
    /// The directory for `--root`; null for the instance of the system.
    instance: Option<&'c str>,
    /// The trust domain; null with `--net host` and `--net none`.
    domain: Option<&'c str>,
    container: &'c str,
    container_id: &'c str,
    #[serde(flatten)]
    process: Row,
}

/// Lists the processes of all containers of the host.
fn run_all(global: &Global, is_json: bool) -> Result<u8> {
    let seen = Spectator::look(global)?;
    let up_ms = uptime_ms();
    let mut all = Vec::new();
    for one in &seen.containers {
        // Users by number: `/etc/passwd` of each container would have to be read.
        let processes = match one.config() {
            Ok(config) => rows(&one.pids, &BTreeMap::new(), &config.ids, up_ms),
            Err(_) => continue, // it was removed meanwhile
        };
        all.extend(processes.into_iter().map(|process| SpectatedRow {
            instance: one.root(),
            domain: one.domain(),
            container: one.listed.name.as_str(),
            container_id: one.listed.id.as_str(),
            process,
        }));
    }
    if is_json {
        output::json(&all)?;
        return Ok(seen.code());
    }
    let mut table = Table::new([
        "INSTANCE",
        "DOMAIN",
        "CONTAINER",
        "HOST PID",
        "PID",
        "USER",
        "STATE",
        "ELAPSED",
        "CPU TIME",
        "MEMORY",
        "COMMAND",
    ]);
    for r in &all {
        table.row([
            r.instance.unwrap_or("-").to_owned(),
            r.domain.unwrap_or("-").to_owned(),
            r.container.to_owned(),
            r.process.host_pid.to_string(),
            r.process.pid.to_string(),
            r.process.user.clone(),
            r.process.state.clone(),
            clock(r.process.elapsed_ms),
            clock(r.process.cpu_ms),
            output::bytes(r.process.resident_bytes),
            r.process.command.join(" "),
        ]);
    }
    table.print()?;
    Ok(seen.code())
}

/// The processes of one container, by their pids inside. A process that exits meanwhile is left out.
fn rows(pids: &[u32], users: &BTreeMap<u32, String>, ids: &IdMap, up_ms: u64) -> Vec<Row> {
    let inside = |host: u32| -> Option<u32> { proc::fields(host).ok()?.pids().last().copied() };
    let names: BTreeMap<u32, u32> =
        pids.iter().filter_map(|host| Some((*host, inside(*host)?))).collect();
    let mut rows: Vec<Row> =
        pids.iter().filter_map(|host| row(*host, &names, users, ids, up_ms)).collect();
    rows.sort_by_key(|r| r.pid);
    rows
}

fn row(
    host: u32,
    names: &BTreeMap<u32, u32>,
    users: &BTreeMap<u32, String>,
    ids: &IdMap,
    up_ms: u64,
) -> Option<Row> {
    let stat = proc::read_text(format!("/proc/{host}/stat"), 4096).ok()?;
    let status = proc::fields(host).ok()?;
    // The name in parentheses may contain any character, so fields are counted from the last one
    // on.
    let (head, fields) = stat.rsplit_once(')')?;
    let name = head.split_once('(')?.1;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let number = |i: usize| fields.get(i - 3)?.parse::<u64>().ok();
    let uid = ids.to_inside(status.field("Uid")?.split_whitespace().nth(1)?.parse().ok()?);
    let command = proc::read(format!("/proc/{host}/cmdline"), 64 << 10).unwrap_or_default();
    let mut command: Vec<String> =
        command.split(|b| *b == 0).map(|a| String::from_utf8_lossy(a).into_owned()).collect();
    command.pop(); // the empty part after the last NUL
    if command.is_empty() {
        command.push(format!("[{name}]"));
    }
    Some(Row {
        pid: *names.get(&host)?,
        parent_pid: names.get(&(number(4)? as u32)).copied().unwrap_or(0),
        host_pid: host,
        uid,
        user: uid.map_or_else(
            || "?".to_owned(),
            |u| users.get(&u).cloned().unwrap_or_else(|| u.to_string()),
        ),
        state: (*fields.first()?).to_owned(),
        threads: number(20)?,
        elapsed_ms: up_ms.saturating_sub(number(22)? * 1000 / TICKS),
        cpu_ms: (number(14)? + number(15)?) * 1000 / TICKS,
        resident_bytes: status.number("VmRSS").unwrap_or(0) * 1024,
        command,
    })
}

/// Returns the time since boot.
fn uptime_ms() -> u64 {
    let text = proc::read_text("/proc/uptime", 128).unwrap_or_default();
    text.split('.').next().and_then(|s| s.parse::<u64>().ok()).unwrap_or(0) * 1000
}

/// Returns names by id, from a container's `/etc/passwd`. The container writes that file, so it is
/// opened inside its root and read up to a limit.
fn users(root: std::os::fd::BorrowedFd) -> BTreeMap<u32, String> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut text = Vec::new();
    if let Ok(file) = resolve::in_root(root, "etc/passwd", flags, Mode::empty()) {
        let _ = std::fs::File::from(file).take(1 << 20).read_to_end(&mut text); // else numbers
    }
    let text = String::from_utf8_lossy(&text);
    let entry = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?.to_owned();
        Some((fields.nth(1)?.parse().ok()?, name))
    };
    // The first entry of an id names it.
    text.lines().rev().filter_map(entry).collect()
}

/// Formats `1:02:03` or `2:03`.
fn clock(ms: u64) -> String {
    let s = ms / 1000;
    match s / 3600 {
        0 => format!("{}:{:02}", s / 60, s % 60),
        h => format!("{h}:{:02}:{:02}", s / 60 % 60, s % 60),
    }
}
