//! `dormouse gate`

use std::time::Duration;

use anyhow::Result;
use dormouse_account::rule::Gate;
use dormouse_container::{Engine, GateStat, GateState};
use dormouse_model::{Invalid, parse_span_ms};
use serde::Serialize;

use crate::command::Global;
use crate::format::{Format, Headings};
use crate::output::{self, Table};

/// Load, show and unload gates, which charge work for clients to their accounts
///
/// A process that serves several customers works for the one whose request it received last. Rules say which
/// processes do, and for whom. The gates are programs in the kernel that follow them. They are loaded by the operator
/// alone, until they are unloaded or the host is booted.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    of: Of,
}

#[derive(Debug, clap::Subcommand)]
enum Of {
    /// List gates
    #[command(alias = "list")]
    Ls {
        /// Print the names of loaded gates only
        #[arg(long, short)]
        quiet: bool,
        /// json, a Go template, or 'table' and a template
        #[arg(long, value_name = "FORMAT")]
        format: Option<String>,
        /// Print without headings
        #[arg(long, short)]
        noheading: bool,
    },
    /// Load gates, in the place of those that are loaded
    ///
    /// Containers may run meanwhile. Their processes work for their own accounts until they pass a gate.
    Load {
        /// receive (data was received from a socket), send (data was given to one), fork (a process or thread was
        /// made), exec (another program was begun), and where the kernel permits programs of security modules, create
        /// (a process or thread is to be made), open (a file is to be opened), message (a message of System V was
        /// received), pipe (data was read from a pipe or FIFO), semaphore (a semaphore of System V was taken), shm
        /// (shared memory of System V is to be attached); by default all that the kernel takes
        #[arg(value_name = "GATE")]
        gates: Vec<Gate>,
    },
    /// Unload all gates, after what they have counted was charged
    Unload,
    /// Show how often gates were passed, and what that costs
    Stats {
        /// Count for this time, and show the programs' runs and time as well. The counting costs each run some 20 ns
        #[arg(long, value_name = "TIME", value_parser = time)]
        during: Option<Duration>,
        /// json, a Go template, or 'table' and a template
        #[arg(long, value_name = "FORMAT")]
        format: Option<String>,
        /// Print without headings
        #[arg(long, short)]
        noheading: bool,
    },
}

fn time(text: &str) -> Result<Duration, Invalid> {
    match parse_span_ms(text) {
        Some(ms @ 1..=86_400_000) => Ok(Duration::from_millis(ms.unsigned_abs())),
        _ => Err(Invalid::new("time", text, "up to a day, such as 10s")),
    }
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    match args.of {
        Of::Ls { quiet, format, noheading } => {
            let format = format.as_deref().map(Format::read).transpose()?;
            list(&engine, quiet, noheading, format.as_ref())?;
        }
        Of::Load { gates } => {
            let mut chosen = gates;
            chosen.sort_unstable();
            chosen.dedup();
            let loaded = engine.load_gates(&chosen)?;
            loaded.iter().try_for_each(|gate| output::line(gate.name()))?;
        }
        Of::Unload => {
            engine.unload_gates()?;
        }
        Of::Stats { during, format, noheading } => {
            let format = format.as_deref().map(Format::read).transpose()?;
            stats(&engine, during, noheading, format.as_ref())?;
        }
    }
    Ok(0)
}

const HEADINGS: &Headings = &[
    ("Name", "NAME"),
    ("Loaded", "LOADED"),
    ("Gate", "GATE"),
    ("Program", "PROGRAM"),
    ("ProgramId", "PROGRAM ID"),
    ("Lack", "LACK"),
    ("Passages", "PASSAGES"),
    ("Changed", "CHANGED"),
    ("Unknown", "UNKNOWN"),
    ("Full", "FULL"),
    ("Refused", "REFUSED"),
    ("Runs", "RUNS"),
    ("Ns", "NS"),
    ("NsPerRun", "NS PER RUN"),
];

/// A row of `gate ls`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Row<'a> {
    name: &'static str,
    loaded: bool,
    /// The id of its program; 0 if it is not loaded.
    program_id: u32,
    /// The reason for which this kernel does not take it; empty if it does.
    lack: &'a str,
}

fn list(engine: &Engine, quiet: bool, noheading: bool, format: Option<&Format>) -> Result<()> {
    let gates = if quiet { engine.gates(None)?.0 } else { engine.gates_with_lacks()? };
    fn row(gate: &GateState) -> Row<'_> {
        Row {
            name: gate.gate.name(),
            loaded: gate.stat.is_some(),
            program_id: gate.stat.as_ref().map_or(0, |stat| stat.program.1),
            lack: gate.lack.as_deref().unwrap_or_default(),
        }
    }
    let rows = || gates.iter().map(row);
    if let Some(format) = format {
        return format.print(rows(), HEADINGS, || output::json(&rows().collect::<Vec<_>>()));
    }
    if quiet {
        let loaded = rows().filter(|row| row.loaded);
        return output::print(loaded.map(|row| format!("{}\n", row.name)).collect::<String>());
    }
    let mut table = Table::new(["NAME", "LOADED", "PROGRAM", "LACK"]);
    for row in rows() {
        let id = if row.loaded { row.program_id.to_string() } else { "-".to_owned() };
        let lack = if row.lack.is_empty() { "-" } else { row.lack };
        table.row([row.name.to_owned(), row.loaded.to_string(), id, lack.to_owned()]);
    }
    if noheading { output::print(table.body()) } else { table.print() }
}

/// A row of `gate stats`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Line<'a> {
    /// The gate; empty for a program that all gates share.
    gate: &'static str,
    program: &'a str,
    program_id: u32,
    passages: u64,
    changed: u64,
    unknown: u64,
    full: u64,
    refused: u64,
    /// 0 as long as the kernel does not count.
    runs: u64,
    ns: u64,
    ns_per_run: u64,
}

impl<'a> Line<'a> {
    fn of(gate: &'static str, stat: &'a GateStat) -> Self {
        Self {
            gate,
            program: &stat.program.0,
            program_id: stat.program.1,
            passages: stat.passages,
            changed: stat.changed,
            unknown: stat.unknown,
            full: stat.full,
            refused: stat.refused,
            runs: stat.runs.count,
            ns: stat.runs.ns,
            ns_per_run: stat.runs.ns.checked_div(stat.runs.count).unwrap_or(0),
        }
    }
}

fn stats(
    engine: &Engine,
    during: Option<Duration>,
    noheading: bool,
    format: Option<&Format>,
) -> Result<()> {
    let (gates, shared) = engine.gates(during)?;
    let rows = || {
        let own =
            gates.iter().filter_map(|gate| Some(Line::of(gate.gate.name(), gate.stat.as_ref()?)));
        own.chain(shared.iter().map(|stat| Line::of("", stat)))
    };
    if let Some(format) = format {
        return format.print(rows(), HEADINGS, || output::json(&rows().collect::<Vec<_>>()));
    }
    let mut table = Table::new([
        "GATE",
        "PROGRAM",
        "PASSAGES",
        "CHANGED",
        "UNKNOWN",
        "FULL",
        "REFUSED",
        "RUNS",
        "NS PER RUN",
    ]);
    for row in rows() {
        let decisions = [row.passages, row.changed, row.unknown, row.full, row.refused];
        let [passages, changed, unknown, full, refused] = decisions.map(|n| n.to_string());
        let [runs, each] = [row.runs, row.ns_per_run].map(|n| n.to_string());
        let (gate, program) = (row.gate.to_owned(), row.program.to_owned());
        table.row([gate, program, passages, changed, unknown, full, refused, runs, each]);
    }
    if noheading { output::print(table.body()) } else { table.print() }
}
