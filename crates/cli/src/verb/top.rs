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
use crate::target::Target;

/// List the processes of a container
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    target: Target,
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
    let (engine, id) = args.target.find(global)?;
    let pids = engine.pids(&id)?;
    let root = engine.root(&id)?;
    let users = users(root.fd.as_fd());
    let inside = |host: u32| -> Option<u32> { proc::fields(host).ok()?.pids().last().copied() };
    let names: BTreeMap<u32, u32> =
        pids.iter().filter_map(|host| Some((*host, inside(*host)?))).collect();
    let up_ms = uptime_ms();
    // A process that exits meanwhile is left out.
    let mut rows: Vec<Row> =
        pids.iter().filter_map(|host| row(*host, &names, &users, &root.ids, up_ms)).collect();
    rows.sort_by_key(|r| r.pid);
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
