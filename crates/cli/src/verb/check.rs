//! `dormouse check`

use anyhow::Result;
use dormouse_kernel::probe::{Finding, Outcome, ProbePlaces, can_run_containers, probe_all};
use serde::Serialize;

use crate::command::Global;
use crate::output::{self, printable};

/// Show which kernel features are there, and what is missing without the others
///
/// Each is tried by using it. The exit code is 0 if containers can run, else 1.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// What is missing only
    #[arg(long, short)]
    missing: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// `check --json`
#[derive(Debug, Serialize)]
struct Report<'a> {
    /// Nothing that every container needs is missing.
    can_run_containers: bool,
    kernel: String,
    features: Vec<Row<'a>>,
}

/// A feature in `check --json`.
#[derive(Debug, Serialize)]
struct Row<'a> {
    name: &'a str,
    have: bool,
    /// No container can run without it.
    required: bool,
    /// The first Linux that has it; `-` where the version does not decide.
    since: &'a str,
    used_for: &'a str,
    /// What happens without it.
    without: &'a str,
    /// What that costs.
    cost: &'a str,
    /// What was seen, or why it does not work.
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

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let findings = probe_all(&ProbePlaces { store: global.places().lib });
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    let report = Report {
        can_run_containers: can_run_containers(&findings),
        kernel,
        features: findings.iter().map(Row::from).filter(|row| !args.missing || !row.have).collect(),
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
    text.push_str(&match report.can_run_containers {
        true => format!("containers can run on Linux {}\n", report.kernel),
        false => format!("containers cannot run on Linux {}: see LACK above\n", report.kernel),
    });
    output::print(text)?;
    Ok(code)
}
