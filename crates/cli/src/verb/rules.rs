//! `dormouse rules`

use std::fs::File;
use std::io::{self, Read};

use anyhow::{Context, Result, bail};
use dormouse_account::rule::{Compiled, Gate, Origin, Rule, TEXT_BYTES_MAX, Then};
use dormouse_container::{Error, RuleAnswer, RuleQuestion};
use serde::Serialize;

use crate::command::Global;
use crate::fail;
use crate::format::{Format, Headings};
use crate::output::{self, Table};

/// Say whose work shared services do
///
/// A task works for the account of its container, its home, until a rule changes that: when it receives or sends
/// data, forks or executes a program. Some rules have calls fail. Gates in the kernel evaluate the rules.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    of: Of,
}

#[derive(Debug, clap::Subcommand)]
enum Of {
    /// Report all errors of a file of rules, and change nothing
    Check {
        /// File in TOML, or - for standard input
        #[arg(value_name = "FILE")]
        file: String,
    },
    /// Install the rules of a file in place of all others
    ///
    /// With an error nothing changes.
    Apply {
        /// File in TOML, or - for standard input
        #[arg(value_name = "FILE")]
        file: String,
    },
    /// List the installed rules, in the order in which they are evaluated
    Show {
        /// Print the file as it was given
        #[arg(long, conflicts_with_all = ["format", "noheading"])]
        file: bool,
        /// json, a Go template, or 'table' and a template
        #[arg(long, value_name = "FORMAT")]
        format: Option<String>,
        /// Print without headings
        #[arg(long, short)]
        noheading: bool,
    },
    /// Show which installed rule decides a passage, and why the others do not
    ///
    /// Accounts are names of made ones, or @ and the name of a container for its own.
    Explain {
        /// Kind of passage: receive, send, fork, exec, create, open, message, pipe, semaphore, shm
        #[arg(long)]
        gate: Gate,
        /// Account of the container in which the task runs
        #[arg(long, value_name = "ACCOUNT")]
        home: String,
        /// Account for which the task works before; by default its home
        #[arg(long, value_name = "ACCOUNT")]
        label: Option<String>,
        /// Account of the container at the other side of the socket; by default there is no such container
        #[arg(long, value_name = "ACCOUNT")]
        peer: Option<String>,
        /// Local port of the socket
        #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
        port: Option<u16>,
        /// File that is opened, from the root directory of the container
        #[arg(long)]
        path: Option<String>,
        /// json, or a Go template
        #[arg(long, value_name = "FORMAT")]
        format: Option<String>,
    },
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    match args.of {
        Of::Check { file } => told(&file, |name, text| engine.check_rules(name, text)),
        Of::Apply { file } => told(&file, |name, text| engine.apply_rules(name, text)),
        Of::Show { file: true, .. } => {
            output::print(engine.rules_text()?)?;
            Ok(0)
        }
        Of::Show { file: false, format, noheading } => {
            let format = format.as_deref().map(Format::read).transpose()?;
            match engine.rules() {
                Ok(compiled) => show(&compiled, noheading, format.as_ref()).map(|()| 0),
                Err(e) => each_error(e),
            }
        }
        Of::Explain { gate, home, label, peer, port, path, format } => {
            let question = RuleQuestion { gate, home, label, peer, port, path };
            let format = format.as_deref().map(Format::read).transpose()?;
            match engine.explain_rules(&question) {
                Ok(answer) => explain(&answer, format.as_ref()).map(|()| 0),
                Err(e) => each_error(e),
            }
        }
    }
}

/// Name of a file in errors.
fn name(file: &str) -> &str {
    if file == "-" { "standard input" } else { file }
}

/// Reads a file of rules. More than it may have is read, so that the error is that of the rules.
fn read(file: &str) -> Result<Vec<u8>> {
    let input: Box<dyn Read> = match file {
        "-" => Box::new(io::stdin().lock()),
        path => Box::new(File::open(path).with_context(|| format!("cannot open '{path}'"))?),
    };
    let mut text = Vec::new();
    let read = input.take(TEXT_BYTES_MAX as u64 + 1).read_to_end(&mut text);
    read.with_context(|| format!("cannot read '{file}'"))?;
    Ok(text)
}

/// Takes rules, and notes those that decide nothing.
fn told(
    file: &str,
    take: impl FnOnce(&str, &str) -> dormouse_container::Result<Compiled>,
) -> Result<u8> {
    let text = read(file)?;
    let name = name(file);
    let text = match std::str::from_utf8(&text) {
        Ok(text) => text,
        Err(e) => {
            let before = text.iter().take(e.valid_up_to());
            let line = 1 + before.filter(|byte| **byte == b'\n').count();
            bail!("{name}: line {line}: a character is not UTF-8");
        }
    };
    let compiled = match take(name, text) {
        Ok(compiled) => compiled,
        Err(e) => return each_error(e),
    };
    let of_file = |rule: &Rule| matches!(rule.origin, Origin::Line(_));
    for row in rows(&compiled) {
        if row.line.is_some() && row.state != State::Active {
            fail::note(&format!("line {}: {}", row.line.unwrap_or_default(), row.why));
        }
    }
    match compiled.rules().iter().filter(|rule| of_file(rule)).count() {
        1 => output::line("1 rule")?,
        n => output::line(&format!("{n} rules"))?,
    }
    Ok(0)
}

/// Reports each error of a file in a line of its own.
fn each_error(e: Error) -> Result<u8> {
    let Error::Rules { file, errors } = e else { return Err(e.into()) };
    for error in errors {
        fail::note(&format!("{file}: {error}"));
    }
    Ok(fail::FAILED)
}

/// What a rule is good for at present.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// It decides the passages that it matches, unless others rank before it.
    Active,
    /// An earlier rule decides all passages that it matches.
    Covered,
    /// It has no row in the table.
    Inert,
}

/// A rule in a list.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Row<'r> {
    /// Its line in the file; none of a shared container.
    line: Option<usize>,
    /// The shared container.
    shared: Option<&'r str>,
    name: &'r str,
    gate: &'static str,
    home: String,
    label: String,
    peer: String,
    /// 0 is any.
    port: u16,
    /// Empty is any.
    path: &'r str,
    account: String,
    /// None is below all others.
    priority: Option<i32>,
    state: State,
    /// The reason for another state than active.
    why: String,
}

impl<'r> Row<'r> {
    fn new(rule: &'r Rule, state: State, why: String) -> Self {
        let (line, shared) = match &rule.origin {
            Origin::Line(line) => (Some(*line), None),
            Origin::Shared(container) => (None, Some(container.as_str())),
        };
        Self {
            line,
            shared,
            name: rule.name.as_deref().unwrap_or_default(),
            gate: rule.gate.name(),
            home: rule.home.to_string(),
            label: rule.label.to_string(),
            peer: rule.peer.to_string(),
            port: rule.port.unwrap_or_default(),
            path: rule.path.as_deref().unwrap_or_default(),
            account: rule.account.to_string(),
            priority: rule.priority,
            state,
            why,
        }
    }

    fn cells(&self) -> [String; 11] {
        [
            self.line.map_or_else(String::new, |line| line.to_string()),
            match self.shared {
                Some(container) => format!("shared container {container}"),
                None => self.name.to_owned(),
            },
            self.gate.to_owned(),
            self.home.clone(),
            self.label.clone(),
            self.peer.clone(),
            if self.port == 0 { "any".to_owned() } else { self.port.to_string() },
            if self.path.is_empty() { "any" } else { self.path }.to_owned(),
            self.account.clone(),
            self.priority.map_or_else(|| "least".to_owned(), |priority| priority.to_string()),
            match self.state {
                State::Active => "active".to_owned(),
                State::Covered | State::Inert => self.why.clone(),
            },
        ]
    }
}

/// The rules in the order of the table, and then those without a row.
fn rows(compiled: &Compiled) -> Vec<Row<'_>> {
    let active =
        compiled.in_order().enumerate().map(|(row, rule)| match compiled.covered_by(row) {
            None => Row::new(rule, State::Active, String::new()),
            Some(earlier) => Row::new(
                rule,
                State::Covered,
                format!("decides nothing: {earlier} matches all of it"),
            ),
        });
    let inert =
        compiled.inert().map(|(rule, why)| Row::new(rule, State::Inert, format!("inert: {why}")));
    active.chain(inert).collect()
}

const HEADINGS: &Headings = &[
    ("Line", "LINE"),
    ("Shared", "SHARED"),
    ("Name", "NAME"),
    ("Gate", "GATE"),
    ("Home", "HOME"),
    ("Label", "LABEL"),
    ("Peer", "PEER"),
    ("Port", "PORT"),
    ("Path", "PATH"),
    ("Account", "ACCOUNT"),
    ("Priority", "PRIORITY"),
    ("State", "STATE"),
    ("Why", "WHY"),
];

fn show(compiled: &Compiled, noheading: bool, format: Option<&Format>) -> Result<()> {
    let rows = rows(compiled);
    if let Some(format) = format {
        return format.print(rows.iter(), HEADINGS, || output::json(&rows));
    }
    let mut table = Table::new([
        "LINE", "NAME", "GATE", "HOME", "LABEL", "PEER", "PORT", "PATH", "ACCOUNT", "PRIORITY",
        "STATE",
    ]);
    rows.iter().for_each(|row| table.row(row.cells()));
    if noheading { output::print(table.body()) } else { table.print() }
}

/// An explanation.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Explained<'r> {
    label: &'r str,
    decides: Option<Row<'r>>,
    others: Vec<Row<'r>>,
}

fn explain(answer: &RuleAnswer, format: Option<&Format>) -> Result<()> {
    if let Some(format) = format {
        let row = |rule, why: &String| Row::new(rule, State::Active, why.clone());
        let explained = Explained {
            label: &answer.label,
            decides: answer.decides.as_ref().map(|rule| row(rule, &String::new())),
            others: answer.others.iter().map(|(rule, why)| row(rule, why)).collect(),
        };
        return format.print([&explained].into_iter(), &[], || output::json(&explained));
    }
    match &answer.decides {
        Some(rule) => match rule.account {
            Then::Refused(errno) => {
                output::line(&format!("{rule} decides: the call fails with {}", errno.name()))?
            }
            _ => {
                output::line(&format!("{rule} decides: the task then works for {}", answer.label))?
            }
        },
        None => output::line(&format!(
            "no rule matches: the task goes on to work for {}",
            answer.label
        ))?,
    }
    for (rule, why) in &answer.others {
        output::line(&format!("{rule} matches, too: {why}"))?;
    }
    Ok(())
}
