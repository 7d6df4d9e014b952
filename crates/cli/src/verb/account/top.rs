//! `dormouse account top`

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use dormouse_account::{Client, Life, ROOT, Usage};
use dormouse_container::{Engine, LifeReading};
use dormouse_kernel::clock::now_unix_ms;
use dormouse_model::{Invalid, parse_span_ms};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::Serialize;

use crate::output::{self, Table, bytes, cut};
use crate::signal::{self, Signals};
use crate::terminal::{self, Raw};

/// Tables for which the last reading of a life is kept after it was seen for the last time: a killed command can
/// leave its charge to the next one.
const KEPT_TABLES: u64 = 100;

/// Reads the time between two tables.
pub(super) fn every(text: &str) -> Result<Duration, Invalid> {
    let bad = || Invalid::new("time", text, "100ms to 1d, such as 5s");
    let ms = parse_span_ms(text).filter(|ms| (100..=86_400_000).contains(ms)).ok_or_else(bad)?;
    Ok(Duration::from_millis(ms.unsigned_abs()))
}

/// The last readings of lives.
#[derive(Debug, Default)]
struct Meter {
    /// With the number of the table in which it was seen.
    lives: BTreeMap<Life, (Usage, u64)>,
    /// The same of their work for others, in nanoseconds.
    work: BTreeMap<(Life, Client), (u64, u64)>,
    tables: u64,
}

/// The use of an account between two readings.
#[derive(Debug, Clone, Default, PartialEq)]
struct Use {
    usage: Usage,
    /// Lives that go on.
    containers: usize,
    /// Their processes and threads at the last reading.
    tasks: u64,
}

impl Meter {
    /// Returns what each account has used since the call before; nothing at the first.
    fn used(&mut self, readings: &[LifeReading]) -> BTreeMap<String, Use> {
        let is_first = self.tables == 0;
        self.tables += 1;
        let mut used: BTreeMap<String, Use> = BTreeMap::new();
        for reading in readings {
            let new = match is_first {
                true => reading.usage,
                false => Usage::default(),
            };
            let (last, seen) = self.lives.entry(reading.life.clone()).or_insert((new, 0));
            let (latest, account) = (last.latest(reading.usage), reading.account.clone());
            let it = used.entry(account).or_default();
            it.usage = it.usage.plus(latest.beyond(*last));
            // A life that ends meanwhile has two readings.
            let is_new = reading.is_running && *seen < self.tables;
            it.containers += usize::from(is_new);
            it.tasks += if is_new { reading.tasks } else { 0 };
            (*last, *seen) = (latest, self.tables);
            for (client, work) in &reading.work {
                let key = (reading.life.clone(), work.client);
                let first = if is_first { work.cpu_ns } else { 0 };
                let (last, seen) = self.work.entry(key).or_insert((first, 0));
                let more = work.cpu_ns.saturating_sub(*last);
                used.entry(reading.account.clone()).or_default().usage.cpu_given_ns += more;
                used.entry(client.clone()).or_default().usage.cpu_taken_ns += more;
                (*last, *seen) = (*last + more, self.tables);
            }
        }
        self.lives.retain(|_, (_, seen)| *seen + KEPT_TABLES > self.tables);
        self.work.retain(|_, (_, seen)| *seen + KEPT_TABLES > self.tables);
        used.retain(|_, it| it.containers > 0 || it.usage.charged_ns() > 0);
        used
    }
}

/// Adds the use of each account to all above it.
fn with_below(
    used: &BTreeMap<String, Use>,
    parents: &BTreeMap<String, String>,
) -> BTreeMap<String, Use> {
    let mut all: BTreeMap<String, Use> = BTreeMap::new();
    for (account, it) in used {
        // Each at most once, even in a hierarchy that is broken by hand.
        let mut line = BTreeSet::from([account.as_str(), ROOT]);
        let mut at = account;
        while let Some(above) = parents.get(at).filter(|above| !line.contains(above.as_str())) {
            line.insert(above);
            at = above;
        }
        for above in line {
            let sum = all.entry(above.to_owned()).or_default();
            sum.usage = sum.usage.plus(it.usage);
            sum.containers += it.containers;
            sum.tasks += it.tasks;
        }
    }
    all
}

/// A row of a table: figures per second.
#[derive(Debug, Serialize, PartialEq)]
#[serde(rename_all = "PascalCase")]
struct Row {
    name: String,
    /// Containers with processes.
    containers: usize,
    /// Their processes and threads.
    pids: u64,
    /// Of one CPU: for this account, wherever it is used.
    cpu_percent: f64,
    /// In its containers, for whatever account.
    cpu_user_percent: f64,
    page_faults: f64,
    major_faults: f64,
    read_bytes: f64,
    written_bytes: f64,
}

/// A table.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Rates {
    unix_ms: i64,
    /// Time since the reading before.
    seconds: f64,
    /// Of all accounts.
    cpu_percent: f64,
    accounts: Vec<Row>,
}

/// Returns rows, the largest use of CPU first.
fn rows(used: BTreeMap<String, Use>, time: Duration) -> Vec<Row> {
    let seconds = time.as_secs_f64();
    let per_second = |count: u64| count as f64 / seconds;
    let percent = |ns: u64| ns as f64 / seconds / 1e7;
    let row = |(name, it): (String, Use)| Row {
        name,
        containers: it.containers,
        pids: it.tasks,
        cpu_percent: percent(it.usage.charged_ns()),
        cpu_user_percent: percent(it.usage.cpu_user_ns),
        page_faults: per_second(it.usage.page_faults),
        major_faults: per_second(it.usage.major_faults),
        read_bytes: per_second(it.usage.read_bytes),
        written_bytes: per_second(it.usage.written_bytes),
    };
    let mut rows: Vec<Row> = used.into_iter().map(row).collect();
    // Stable: accounts with the same use stay in the order of their names.
    rows.sort_by(|a, b| b.cpu_percent.total_cmp(&a.cpu_percent));
    rows
}

fn table(rows: &[Row]) -> String {
    let mut table = Table::new([
        "NAME",
        "CONTAINERS",
        "PIDS",
        "CPU %",
        "USER %",
        "FAULTS/S",
        "MAJOR/S",
        "READ/S",
        "WRITTEN/S",
    ]);
    for row in rows {
        table.row([
            row.name.clone(),
            row.containers.to_string(),
            row.pids.to_string(),
            format!("{:.1}", row.cpu_percent),
            format!("{:.1}", row.cpu_user_percent),
            format!("{:.0}", row.page_faults),
            format!("{:.0}", row.major_faults),
            bytes(row.read_bytes as u64),
            bytes(row.written_bytes as u64),
        ]);
    }
    table.text()
}

pub(super) fn run(
    engine: &Engine,
    count: Option<u32>,
    every: Duration,
    recursive: bool,
    json: bool,
) -> Result<u8> {
    let screen = Screen::open(json)?;
    let mut meter = Meter::default();
    meter.used(&engine.life_readings()?);
    let mut last = Instant::now();
    let mut shown = 0;
    while count.is_none_or(|count| shown < count) {
        if screen.wait_until(last + every)? {
            return Ok(0);
        }
        let used = meter.used(&engine.life_readings()?);
        let time = last.elapsed();
        last += time;
        let cpu_ns = used.values().map(|it| it.usage.charged_ns()).sum::<u64>();
        let used = if recursive { with_below(&used, &engine.account_parents()?) } else { used };
        let rates = Rates {
            unix_ms: now_unix_ms(),
            seconds: time.as_secs_f64(),
            cpu_percent: cpu_ns as f64 / time.as_secs_f64() / 1e7,
            accounts: rows(used, time),
        };
        match json {
            true => output::json_line(&rates)?,
            false => screen.show(&table(&rates.accounts), shown == 0)?,
        }
        shown += 1;
    }
    Ok(0)
}

/// The place where tables are shown: a terminal, on which each replaces the one before, or a file.
struct Screen {
    keys: Option<Raw>,
    signals: Signals,
    is_terminal: bool,
}

impl Screen {
    fn open(json: bool) -> Result<Self> {
        let is_terminal = !json && terminal::is_terminal(rustix::stdio::stdout());
        // ORDER: signals first: one in between would end this with a raw terminal.
        let signals = Signals::take()?;
        let keys = if is_terminal { Raw::enter()? } else { None };
        Ok(Self { keys, signals, is_terminal })
    }

    fn show(&self, text: &str, is_first: bool) -> Result<()> {
        if !self.is_terminal {
            let line = if is_first { "" } else { "\n" };
            return output::print(format!("{line}{text}"));
        }
        let (rows, columns) = terminal::size().map_or((24, 80), |s| (s.ws_row, s.ws_col));
        let lines = text.lines().take(usize::from(rows).saturating_sub(1));
        // A raw terminal does not return to the first column by itself.
        let lines: String = lines.map(|line| cut(line, columns.into()) + "\r\n").collect();
        // Cursor home, clear the screen, then the table.
        output::print(format!("\x1b[H\x1b[2J{lines}"))
    }

    /// Waits; returns whether the operator has ended it by a key or a signal.
    fn wait_until(&self, end: Instant) -> Result<bool> {
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let stdin = rustix::stdio::stdin();
            let mut fds = vec![PollFd::new(&self.signals, PollFlags::IN)];
            if self.keys.is_some() {
                fds.push(PollFd::new(&stdin, PollFlags::IN));
            }
            let timeout = Timespec::try_from(left).context("cannot wait so long")?;
            match poll(&mut fds, Some(&timeout)) {
                Err(Errno::INTR) | Ok(0) => continue,
                other => other.context("cannot wait for keys")?,
            };
            let has_key = fds.get(1).is_some_and(|fd| !fd.revents().is_empty());
            if self.is_ended(has_key)? {
                return Ok(true);
            }
        }
    }

    fn is_ended(&self, has_key: bool) -> Result<bool> {
        while let Some(signal) = self.signals.next() {
            match (signal, &self.keys) {
                (signal::SIGCONT, Some(raw)) => raw.again()?,
                (signal::SIGCONT | signal::SIGWINCH, _) => {}
                _ => return Ok(true),
            }
        }
        if !has_key {
            return Ok(false);
        }
        let mut typed = [0; 64];
        let count = std::io::stdin().lock().read(&mut typed).context("cannot read keys")?;
        // q, ctrl-c, ctrl-d, or a terminal that has hung up.
        Ok(count == 0 || typed.iter().take(count).any(|key| b"qQ\x03\x04".contains(key)))
    }
}

#[cfg(test)]
mod tests {
    use dormouse_account::{Number, Work};
    use dormouse_model::ContainerId;

    use super::*;

    fn reading(account: &str, life: u64, cpu_ns: u64, is_running: bool) -> LifeReading {
        let container = ContainerId::from_bytes([7; 16]);
        let life = Life { container, boot: "b".into(), cgroup: life };
        let usage = Usage { cpu_ns, lives: 1, ..Usage::default() };
        let (account, work) = (account.into(), Vec::new());
        LifeReading { account, life, usage, work, is_running, tasks: 3 }
    }

    fn cpu(used: &BTreeMap<String, Use>) -> Vec<(&str, u64, usize)> {
        used.iter().map(|(name, it)| (name.as_str(), it.usage.cpu_ns, it.containers)).collect()
    }

    #[test]
    fn use_is_the_difference_of_readings_of_each_life() {
        let mut meter = Meter::default();
        let first = [reading("a", 1, 100, true), reading("b", 2, 70, false)];
        assert_eq!(cpu(&meter.used(&first)), [("a", 0, 1)], "nothing is known of the time before");
        let second =
            [reading("a", 1, 130, true), reading("a", 3, 5, true), reading("b", 2, 70, false)];
        assert_eq!(
            cpu(&meter.used(&second)),
            [("a", 35, 2)],
            "a life that has begun since counts whole"
        );
        // A life that ends between the two looks at it, and one that both began and ended.
        let third = [
            reading("a", 1, 140, true),
            reading("a", 1, 145, false),
            reading("a", 3, 9, false),
            reading("b", 4, 11, false),
        ];
        assert_eq!(cpu(&meter.used(&third)), [("a", 19, 1), ("b", 11, 0)]);
        assert_eq!(
            cpu(&meter.used(&third)),
            [("a", 0, 1)],
            "a reading that comes again adds nothing"
        );
        assert_eq!(cpu(&meter.used(&[])), []);
        assert_eq!(cpu(&meter.used(&[reading("a", 3, 9, false)])), [], "it is still known");
        for _ in 0..=KEPT_TABLES {
            meter.used(&[]);
        }
        assert!(meter.lives.is_empty());
    }

    #[test]
    fn work_is_shown_where_it_is_charged() {
        let with = |cpu_ns: u64, parts: [u64; 2]| {
            let mut reading = reading("db", 1, cpu_ns, true);
            let client = |number| Client { number: Number(number), owner: 0, load: 1 };
            let part = |(number, cpu_ns)| Work { client: client(number), cpu_ns };
            let work = (1..).zip(parts).map(part);
            reading.work = ["a", "b"].map(String::from).into_iter().zip(work).collect();
            vec![reading, super::tests::reading("a", 2, 50, true)]
        };
        let charged = |used: &BTreeMap<String, Use>| -> Vec<(String, u64)> {
            used.iter().map(|(name, it)| (name.clone(), it.usage.charged_ns())).collect()
        };
        let of = |all: &[(&str, u64)]| -> Vec<(String, u64)> {
            all.iter().map(|(name, ns)| ((*name).to_owned(), *ns)).collect()
        };
        let mut meter = Meter::default();
        let first = meter.used(&with(100, [20, 30]));
        assert_eq!(charged(&first), of(&[("a", 0), ("db", 0)]));
        let second = meter.used(&with(200, [50, 40]));
        assert_eq!(charged(&second), of(&[("a", 30), ("b", 10), ("db", 60)]));
        assert_eq!(charged(&meter.used(&with(200, [50, 40]))), of(&[("a", 0), ("db", 0)]));
    }

    #[test]
    fn rows_have_figures_per_second_and_the_largest_first() {
        let mut meter = Meter::default();
        meter.used(&[]);
        let used = meter.used(&[
            reading("a", 1, 200_000_000, true),
            reading("b", 2, 900_000_000, true),
            reading("c", 3, 200_000_000, true),
        ]);
        let rows = rows(used, Duration::from_millis(500));
        let shown: Vec<_> = rows.iter().map(|row| (row.name.as_str(), row.cpu_percent)).collect();
        assert_eq!(shown, [("b", 180.0), ("a", 40.0), ("c", 40.0)]);
        assert!(table(&rows).lines().nth(1).unwrap().contains("180.0"));
    }

    #[test]
    fn use_below_is_part_of_each_account_above_once() {
        let it =
            |cpu_ns| Use { usage: Usage { cpu_ns, ..Usage::default() }, containers: 1, tasks: 2 };
        let text = |name: &str| name.to_owned();
        let used = [("a", 1), ("b", 10), ("@x", 100), ("root", 1000), ("p", 10_000)];
        let used = used.into_iter().map(|(name, ns)| (text(name), it(ns))).collect();
        // p and q are broken by hand.
        let parents = [("a", "root"), ("b", "a"), ("p", "q"), ("q", "p")];
        let parents =
            parents.into_iter().map(|(name, parent)| (text(name), text(parent))).collect();
        let all = with_below(&used, &parents);
        assert_eq!(
            cpu(&all),
            [
                ("@x", 100, 1),
                ("a", 11, 2),
                ("b", 10, 1),
                ("p", 10_000, 1),
                ("q", 10_000, 1),
                ("root", 11_111, 5)
            ]
        );
    }

    #[test]
    fn time_between_tables_is_read_or_refused() {
        assert_eq!(every("1500ms"), Ok(Duration::from_millis(1500)));
        for bad in ["", "1", "99ms", "2d", "-1s", "x"] {
            assert!(every(bad).is_err(), "{bad}");
        }
    }
}
