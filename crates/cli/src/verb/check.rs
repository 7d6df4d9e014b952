//! `dormouse check`

use anyhow::{Context, Result};
use dormouse_container::Engine;
use dormouse_kernel::probe::{Finding, Outcome, ProbePlaces, can_run_containers, probe_all};
use dormouse_kernel::raise::{self, Change, Places};
use dormouse_kernel::scale::{Limit, Verdict, bounds, limits};
use dormouse_model::TASKS_DEFAULT;
use serde::Serialize;

use crate::command::Global;
use crate::output::{self, Table, printable};

/// Show which kernel features exist, and the effects of missing ones
///
/// Each is tried by using it. The exit code is 0 if containers can run, else 1.
///
/// Parameters of the host (sysctl) that 16 containers could use up, each within its own limits, are
/// shown with a value that suffices. They do not count.
///
/// With --scale N: limits of the host that N awake containers reach, and how to raise them. The
/// exit code is 1 if one of them is too low. Limits that only some programs need are shown and do
/// not count.
///
/// With --fix: sets the low parameters, and writes them into /etc/sysctl.d/90-dormouse.conf for later
/// boots. Prints old and new values, and the commands that undo it. No value is lowered. Without
/// --fix nothing is changed.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Show the limits of the host for so many awake containers, instead
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    scale: Option<u64>,
    /// Set the parameters that are too low, now and at each boot
    #[arg(long, conflicts_with_all = ["missing", "json"])]
    fix: bool,
    /// Show missing features, or low limits, only
    #[arg(long, short)]
    missing: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// `check --json`
#[derive(Debug, Serialize)]
struct Report<'a> {
    /// Every feature that all containers need exists.
    can_run_containers: bool,
    kernel: String,
    features: Vec<Row<'a>>,
    /// Parameters of the host.
    parameters: Vec<LimitRow>,
}

/// A feature in `check --json`.
#[derive(Debug, Serialize)]
struct Row<'a> {
    name: &'a str,
    have: bool,
    /// No container can run without it.
    required: bool,
    /// The first Linux that has it; `-` if the version does not decide.
    since: &'a str,
    used_for: &'a str,
    /// The effect of its absence.
    without: &'a str,
    /// The cost of that.
    cost: &'a str,
    /// The observation, or why it does not work.
    seen: &'a str,
    took_us: u64,
}

impl<'a> From<&'a Finding> for Row<'a> {
    fn from(f: &'a Finding) -> Self {
        let (Outcome::Have(seen) | Outcome::Lack(seen)) = &f.outcome;
        Self {
            name: f.feature.name,
            have: f.have(),
            required: f.feature.required,
            since: f.feature.since,
            used_for: f.feature.used_for,
            without: f.feature.without,
            cost: f.feature.cost,
            seen,
            took_us: f.took.as_micros() as u64,
        }
    }
}

/// A parameter in `check --json`, and a limit in `check --scale N --json`.
#[derive(Debug, Serialize)]
struct LimitRow {
    name: &'static str,
    /// `enough`, `short`, or `perhaps`: short for programs that use it.
    verdict: &'static str,
    /// Null if there is no such limit.
    have: Option<u64>,
    need: u64,
    /// How much is in use; absent if that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    used: Option<u64>,
    what_for: &'static str,
    /// How to raise the limit if it is too low.
    set: String,
}

impl From<Limit> for LimitRow {
    fn from(l: Limit) -> Self {
        Self {
            name: l.name,
            verdict: word(l.verdict),
            have: l.have,
            need: l.need,
            used: l.used,
            what_for: l.what_for,
            set: l.set,
        }
    }
}

fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Enough => "enough",
        Verdict::Short => "short",
        Verdict::Perhaps => "perhaps",
    }
}

/// The parameters that containers could use up, with the operator's default of tasks.
fn host_bounds(global: &Global) -> Result<Vec<Limit>> {
    let tasks = Engine::default_tasks(&global.places())?.unwrap_or(TASKS_DEFAULT);
    Ok(bounds(tasks.into()))
}

/// Sets the parameters that are too low.
fn fix(limits: &[Limit]) -> Result<u8> {
    let changes = raise::changes(limits);
    if changes.is_empty() {
        output::line("nothing to change: no parameter is too low")?;
        return Ok(0);
    }
    let places = Places::default();
    let file = places.file.display();
    let mut table = Table::new(["PARAMETER", "OLD", "NEW", "UNDO"]);
    let row = |it: &Change| {
        table.row([it.name.to_owned(), it.old.to_string(), it.new.to_string(), it.undo()]);
    };
    let raised = raise::raise(&places, &changes, row);
    table.print()?;
    output::line(&format!("{file} sets them at each boot: remove it to undo that"))?;
    let step = || format!("some parameters are as before: {file} sets them at the next boot");
    raised.with_context(step)?;
    Ok(0)
}

/// `check --scale N --json`
#[derive(Debug, Serialize)]
struct Scale {
    containers: u64,
    /// Every limit is high enough.
    fits: bool,
    limits: Vec<LimitRow>,
}

fn scale(global: &Global, args: &Args, containers: u64) -> Result<u8> {
    let mut limits = limits(containers);
    let (slots, addresses) = Engine::room(&global.places())?;
    let own = |name, have: u32, what_for, set: &str| {
        Limit::new(name, Some(have.into()), containers, what_for, set.to_owned())
    };
    limits.push(own("id slots", slots, "host ids of its own each", "nothing raises it"));
    let set = "a larger pool in config.toml, 10.136.0.0/14 at most";
    limits.push(own("addresses", addresses, "an address each", set));
    if args.fix {
        limits.extend(host_bounds(global)?);
        return fix(&limits);
    }
    let fits = limits.iter().all(|limit| limit.verdict != Verdict::Short);
    limits.retain(|limit| !args.missing || limit.verdict != Verdict::Enough);
    let code = u8::from(!fits);
    if args.json {
        let limits = limits.into_iter().map(LimitRow::from).collect();
        output::json(&Scale { containers, fits, limits })?;
        return Ok(code);
    }
    let mut table = Table::new(["", "LIMIT", "HAVE", "NEED", "FOR", "SET"]);
    for limit in &limits {
        let set = if limit.verdict == Verdict::Enough { "" } else { &limit.set };
        table.row([
            word(limit.verdict).to_owned(),
            limit.name.to_owned(),
            limit.have.map_or_else(|| "-".to_owned(), |have| have.to_string()),
            limit.need.to_string(),
            limit.what_for.to_owned(),
            set.to_owned(),
        ]);
    }
    table.print()?;
    output::line(&match fits {
        true => format!("{containers} awake containers fit on this host"),
        false => format!("{containers} awake containers do not fit on this host: see 'short'"),
    })?;
    Ok(code)
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    if let Some(containers) = args.scale {
        return scale(global, &args, containers);
    }
    let mut parameters = host_bounds(global)?;
    if args.fix {
        return fix(&parameters);
    }
    parameters.retain(|it| !args.missing || it.verdict != Verdict::Enough);
    let findings = probe_all(&ProbePlaces { store: global.places().lib });
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    let report = Report {
        can_run_containers: can_run_containers(&findings),
        kernel,
        features: findings.iter().map(Row::from).filter(|row| !args.missing || !row.have).collect(),
        parameters: parameters.into_iter().map(LimitRow::from).collect(),
    };
    let code = if report.can_run_containers { 0 } else { 1 };
    if args.json {
        output::json(&report)?;
        return Ok(code);
    }
    let width = report.features.iter().map(|r| r.name.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for row in &report.features {
        let since = match row.since {
            "-" => String::new(),
            since => format!(" (Linux {since})"),
        };
        let seen = if row.seen.is_empty() { String::new() } else { format!(": {}", row.seen) };
        let line = if row.have {
            format!("have  {:width$}  {}{seen}", row.name, row.used_for)
        } else {
            let word = if row.required { "LACK" } else { "lack" };
            format!(
                "{word}  {:width$}  {}{since}{seen}; without it: {}",
                row.name, row.used_for, row.without
            )
        };
        text.push_str(&printable(&line));
        text.push('\n');
    }
    for it in &report.parameters {
        text.push_str(&parameter_line(it, width));
    }
    if report.parameters.iter().any(|it| it.verdict != word(Verdict::Enough)) {
        text.push_str("low parameters of the host are raised by `dormouse check --fix`\n");
    }
    text.push_str(&match report.can_run_containers {
        true => format!("containers can run on Linux {}\n", report.kernel),
        false => format!("containers cannot run on Linux {}: see LACK above\n", report.kernel),
    });
    output::print(text)?;
    Ok(code)
}

/// A line such as `low   kernel.pid_max  32768 of 36864: ...`.
fn parameter_line(it: &LimitRow, width: usize) -> String {
    let have = it.have.map_or_else(|| "no limit".to_owned(), |have| have.to_string());
    let used = it.used.map_or_else(String::new, |used| format!(", {used} in use"));
    let (name, need, what_for) = (it.name, it.need, it.what_for);
    match it.verdict == word(Verdict::Enough) {
        true => format!("have  {name:width$}  {have}{used}: {what_for}\n"),
        false => format!(
            "low   {name:width$}  {have}{used}, {need} needed: {what_for}; set: {}\n",
            it.set
        ),
    }
}
