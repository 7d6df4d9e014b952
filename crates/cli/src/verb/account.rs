//! `dormouse account`

mod top;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Result, bail};
use dormouse_account::{AgreedHost, Balance, Day, ROOT, Usage};
use dormouse_container::{AccountDetails, AccountUpdate, Engine, NewAccount, SocketCount};
use dormouse_model::Name;
use serde::Serialize;

use crate::command::Global;
use crate::fail;
use crate::format::{Format, Headings};
use crate::option::label;
use crate::output::{self, Table, bytes};
use crate::template::Template;

/// Make, show and remove accounts, which resource use is charged to
///
/// Every container has an account of its own, named @ and the container's name, or one made here (run --account).
/// With --rm it is root, which also takes the balances of removed containers.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    of: Of,
}

#[derive(Debug, clap::Subcommand)]
enum Of {
    /// Make an account and print its number
    Create {
        /// The account above it
        #[arg(long, value_name = "ACCOUNT", default_value = ROOT)]
        parent: Name,
        /// A number from 1073741824 to 2147483647 that several machines use for one account; by default the next of
        /// this machine
        #[arg(long, value_name = "NUMBER")]
        number: Option<u32>,
        /// How many days the figures of single days are kept; by default as its parent
        #[arg(long, value_name = "DAYS")]
        keep_days: Option<u32>,
        /// Add a label; by default it has those of its parent
        #[arg(long, short, value_name = "KEY=VALUE")]
        label: Vec<String>,
        /// Name of the account
        #[arg(value_name = "ACCOUNT")]
        name: Name,
    },
    /// Change an account
    ///
    /// What an account does not set for itself is its parent's value, also when that changes.
    Set {
        /// Another account above it; its balance moves along
        #[arg(long, value_name = "ACCOUNT")]
        parent: Option<Name>,
        /// How many days the figures of single days are kept
        #[arg(long, value_name = "DAYS")]
        keep_days: Option<u32>,
        /// Add a label. The account then has labels of its own, which begin as those of its parent
        #[arg(long, short, value_name = "KEY=VALUE")]
        label: Vec<String>,
        /// How many connections to shared services its containers may have at once, with those of the accounts below
        /// it: a number, or unlimited. A daemon enforces it while gates are loaded
        #[arg(long, value_name = "N", value_parser = most)]
        connections: Option<Most>,
        /// What becomes of a further connection: wait in order until another one ends (the default), refuse it
        /// (ECONNREFUSED), drop its packets (ETIMEDOUT), or pass it all the same
        #[arg(long, value_name = "WHAT")]
        on_limit: Option<OnLimit>,
        /// How many sockets of IPv4 and IPv6 its containers may have at once, with those of the accounts below it: a
        /// number, or unlimited. Further ones fail with EMFILE
        #[arg(long, value_name = "N", value_parser = most)]
        sockets: Option<Most>,
        /// How many processes and threads, in the same way. Further ones fail with EAGAIN
        #[arg(long, value_name = "N", value_parser = most)]
        pids: Option<Most>,
        /// Share a value with its parent again: keep-days or labels
        #[arg(long, value_name = "VALUE", conflicts_with_all = ["keep_days", "label"])]
        share: Vec<Share>,
        /// Name
        #[arg(value_name = "ACCOUNT")]
        name: Name,
    },
    /// List accounts with all that was charged to each
    #[command(alias = "list")]
    Ls {
        /// Print names only
        #[arg(long, short)]
        quiet: bool,
        /// json, a Go template, or 'table' and a template
        #[arg(long, value_name = "FORMAT")]
        format: Option<String>,
        /// Print without headings
        #[arg(long, short)]
        noheading: bool,
    },
    /// Show everything about accounts, as JSON
    Inspect {
        /// json, or a Go template
        #[arg(long, short, value_name = "FORMAT")]
        format: Option<String>,
        /// Names; @NAME is the own account of a container
        #[arg(value_name = "ACCOUNT", required = true)]
        names: Vec<String>,
    },
    /// Print what was charged in a period
    ///
    /// A day is one of UTC, and has what was read on it: at the end of a container, when the daemon reads, and when
    /// accounts are shown.
    Report {
        /// First day, YYYY-MM-DD; by default also the days that are no longer kept
        #[arg(long, value_name = "DAY")]
        since: Option<Day>,
        /// Last day; by default today
        #[arg(long, value_name = "DAY")]
        until: Option<Day>,
        /// A row for each day
        #[arg(long)]
        days: bool,
        /// With the accounts below each
        #[arg(long, short)]
        recursive: bool,
        /// json, csv, a Go template, or 'table' and a template
        #[arg(long, value_name = "FORMAT")]
        format: Option<String>,
        /// Print without headings
        #[arg(long, short)]
        noheading: bool,
        /// Names; all accounts by default
        #[arg(value_name = "ACCOUNT")]
        names: Vec<String>,
    },
    /// Show what accounts use per second, until q is typed
    ///
    /// 100 % is one CPU. Nothing is charged by this.
    Top {
        /// End after so many tables
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        count: Option<u32>,
        /// Time between two tables, 100ms to 1d
        #[arg(long, value_name = "TIME", default_value = "1s", value_parser = top::every)]
        every: Duration,
        /// With the accounts below each
        #[arg(long, short)]
        recursive: bool,
        /// json: an object per table, on a line of its own
        #[arg(long, value_name = "FORMAT", value_parser = ["json"])]
        format: Option<String>,
    },
    /// Share accounts with other hosts
    ///
    /// A connection to a host on the list takes the account along for which it is made, and one from there works for
    /// that account here, if it has a number from 1073741824 to 2147483647 (create --number) and exists on both hosts.
    /// The other host has this one on its list as well. Both need gates (gate load).
    Host {
        #[command(subcommand)]
        of: OfHost,
    },
    /// Watch which container works for which account, and print rules for it
    ///
    /// The text is for `dormouse rules check` and `rules apply`; read it first. Nothing is changed. The gate 'receive'
    /// has to be loaded, and connections from before are not seen.
    Trace {
        /// Watch for this time, 100ms to 1d
        #[arg(long, value_name = "TIME", default_value = "30s", value_parser = top::every)]
        during: Duration,
    },
    /// Remove accounts
    ///
    /// An account with containers, accounts below it, or a balance is not removed.
    #[command(alias = "remove")]
    Rm {
        /// Add its balance to the account above it
        #[arg(long)]
        merge: bool,
        /// Names
        #[arg(value_name = "ACCOUNT", required = true)]
        names: Vec<String>,
    },
}

#[derive(Debug, clap::Subcommand)]
enum OfHost {
    /// Add hosts to the list
    Add {
        /// Addresses from which packets of the hosts come, or networks of hosts
        #[arg(value_name = "ADDRESS", required = true)]
        hosts: Vec<AgreedHost>,
    },
    /// Print the list
    #[command(alias = "list")]
    Ls,
    /// Remove hosts from the list
    ///
    /// Work over connections that were made before stays that of their accounts.
    #[command(alias = "remove")]
    Rm {
        /// As on the list
        #[arg(value_name = "ADDRESS", required = true)]
        hosts: Vec<AgreedHost>,
    },
}

/// A limit; `None` for any number.
#[derive(Debug, Clone, Copy)]
struct Most(Option<u32>);

fn most(text: &str) -> Result<Most, String> {
    match text {
        "unlimited" => Ok(Most(None)),
        number => match number.parse() {
            Ok(number) => Ok(Most(Some(number))),
            Err(_) => Err(format!("a number from 0 to {}, or unlimited", u32::MAX)),
        },
    }
}

/// What becomes of a connection beyond a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum OnLimit {
    Wait,
    Refuse,
    Drop,
    Pass,
}

impl From<OnLimit> for dormouse_account::OnLimit {
    fn from(what: OnLimit) -> Self {
        match what {
            OnLimit::Wait => Self::Wait,
            OnLimit::Refuse => Self::Refuse,
            OnLimit::Drop => Self::Drop,
            OnLimit::Pass => Self::Pass,
        }
    }
}

/// A value that accounts share with their parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Share {
    KeepDays,
    Labels,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    match args.of {
        Of::Create { parent, number, keep_days, label, name } => {
            let labels = (!label.is_empty()).then(|| labels(&label)).transpose()?;
            let new = NewAccount { name, parent, number, keep_days, labels };
            output::line(&engine.create_account(new)?.to_string())?;
            Ok(0)
        }
        Of::Set { parent, keep_days, label, connections, on_limit, sockets, pids, share, name } => {
            let shares = |one| share.contains(&one);
            let keep_days = match keep_days {
                None if shares(Share::KeepDays) => Some(None),
                days => days.map(Some),
            };
            let (labels, share_labels) = (labels(&label)?, shares(Share::Labels));
            let update = AccountUpdate {
                parent,
                keep_days,
                labels,
                share_labels,
                connections: connections.map(|most| most.0),
                on_limit: on_limit.map(dormouse_account::OnLimit::from),
                sockets: sockets.map(|most| most.0),
                pids: pids.map(|most| most.0),
            };
            engine.set_account(&name, update)?;
            output::line(name.as_str())?;
            Ok(0)
        }
        Of::Ls { quiet, format, noheading } => {
            let format = format.as_deref().map(Format::read).transpose()?;
            list(&read(&engine)?, quiet, noheading, format.as_ref())?;
            Ok(0)
        }
        Of::Inspect { format, names } => {
            let all = read(&engine)?;
            let held = Held {
                connections: engine.account_connections()?,
                tasks: engine.account_tasks()?,
                sockets: engine.account_sockets()?,
            };
            inspect(&all, &held, format.as_deref(), &names)
        }
        Of::Report { since, until, days, recursive, format, noheading, names } => {
            let format = Report::read(format.as_deref())?;
            let all = read(&engine)?;
            let period = Period { since, until, days, recursive };
            let rows = period.rows(&all, &names)?;
            report(&rows, days, noheading, &format)?;
            Ok(0)
        }
        Of::Top { count, every, recursive, format } => {
            top::run(&engine, count, every, recursive, format.is_some())
        }
        Of::Host { of } => {
            match of {
                OfHost::Add { hosts } => engine.add_agreed_hosts(&hosts)?,
                OfHost::Rm { hosts } => engine.remove_agreed_hosts(&hosts)?,
                OfHost::Ls => {
                    let all = engine.agreed_hosts()?;
                    output::print(all.iter().map(|host| format!("{host}\n")).collect::<String>())?;
                }
            }
            Ok(0)
        }
        Of::Trace { during } => {
            output::print(engine.trace_rules(during)?)?;
            Ok(0)
        }
        Of::Rm { merge, names } => Ok(fail::for_each(&names, |name| {
            if name.starts_with('@') {
                bail!(
                    "account '{name}' belongs to a container, and ends with it: remove the container"
                );
            }
            engine.remove_account(&name.parse()?, merge)?;
            output::line(name)
        })),
    }
}

fn labels(texts: &[String]) -> Result<BTreeMap<String, String>> {
    Ok(texts.iter().map(|text| label(text)).collect::<Result<_, _>>()?)
}

/// Charges what running containers have used, and reads all accounts.
fn read(engine: &Engine) -> Result<Vec<AccountDetails>> {
    engine.charge_running()?;
    Ok(engine.accounts()?)
}

fn find<'a>(all: &'a [AccountDetails], name: &str) -> Result<&'a AccountDetails> {
    let of = |a: &&AccountDetails| {
        a.name == name
            || a.own.as_ref().is_some_and(|id| name.strip_prefix('@') == Some(id.as_str()))
    };
    match all.iter().find(of) {
        Some(found) => Ok(found),
        None => bail!("no account is called '{name}': see `dormouse account ls`"),
    }
}

/// The figures of a use.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Figures {
    /// With the work of other accounts' containers for this one, and without its containers' work for others.
    cpu_ns: u64,
    cpu_given_ns: u64,
    cpu_taken_ns: u64,
    cpu_user_ns: u64,
    page_faults: u64,
    major_faults: u64,
    read_bytes: u64,
    written_bytes: u64,
    memory_peak_bytes: u64,
    /// The most at once that are known.
    pids_peak: u64,
    sockets_peak: u64,
    lives: u64,
    wakes: u64,
}

impl From<Usage> for Figures {
    fn from(usage: Usage) -> Self {
        Self {
            cpu_ns: usage.charged_ns(),
            cpu_given_ns: usage.cpu_given_ns,
            cpu_taken_ns: usage.cpu_taken_ns,
            cpu_user_ns: usage.cpu_user_ns,
            page_faults: usage.page_faults,
            major_faults: usage.major_faults,
            read_bytes: usage.read_bytes,
            written_bytes: usage.written_bytes,
            memory_peak_bytes: usage.memory_peak_bytes,
            pids_peak: usage.tasks_peak,
            sockets_peak: usage.sockets_peak,
            lives: usage.lives,
            wakes: usage.wakes,
        }
    }
}

impl Figures {
    /// The figures as cells of a table.
    fn cells(&self) -> [String; 10] {
        [
            format!("{:.3} s", Duration::from_nanos(self.cpu_ns).as_secs_f64()),
            self.page_faults.to_string(),
            self.major_faults.to_string(),
            bytes(self.read_bytes),
            bytes(self.written_bytes),
            bytes(self.memory_peak_bytes),
            self.pids_peak.to_string(),
            self.sockets_peak.to_string(),
            self.lives.to_string(),
            self.wakes.to_string(),
        ]
    }
}

/// A row of a list.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Row<'a> {
    number: u32,
    name: &'a str,
    parent: &'a str,
    containers: usize,
    #[serde(flatten)]
    figures: Figures,
}

const HEADINGS: &Headings = &[
    ("Number", "NUMBER"),
    ("Name", "NAME"),
    ("Parent", "PARENT"),
    ("Containers", "CONTAINERS"),
    ("Since", "SINCE"),
    ("Until", "UNTIL"),
    ("CpuNs", "CPU NS"),
    ("CpuGivenNs", "CPU GIVEN NS"),
    ("CpuTakenNs", "CPU TAKEN NS"),
    ("CpuUserNs", "CPU USER NS"),
    ("PageFaults", "FAULTS"),
    ("MajorFaults", "MAJOR FAULTS"),
    ("ReadBytes", "READ"),
    ("WrittenBytes", "WRITTEN"),
    ("MemoryPeakBytes", "MEMORY PEAK"),
    ("PidsPeak", "PIDS PEAK"),
    ("SocketsPeak", "SOCKETS PEAK"),
    ("Lives", "LIVES"),
    ("Wakes", "WAKES"),
];

fn list(
    all: &[AccountDetails],
    quiet: bool,
    noheading: bool,
    format: Option<&Format>,
) -> Result<()> {
    let rows = || {
        all.iter().map(|account| Row {
            number: account.number.0,
            name: &account.name,
            parent: account.parent.as_deref().unwrap_or_default(),
            containers: account.containers.len(),
            figures: account.balance.total.into(),
        })
    };
    if let Some(format) = format {
        return format.print(rows(), HEADINGS, || output::json(&rows().collect::<Vec<_>>()));
    }
    if quiet {
        return output::print(all.iter().map(|a| format!("{}\n", a.name)).collect::<String>());
    }
    let mut table = Table::new([
        "NUMBER",
        "NAME",
        "PARENT",
        "CONTAINERS",
        "CPU TIME",
        "FAULTS",
        "MAJOR",
        "READ",
        "WRITTEN",
        "MEMORY PEAK",
        "PIDS PEAK",
        "SOCKETS PEAK",
        "LIVES",
        "WAKES",
    ]);
    for row in rows() {
        let (number, containers) = (row.number.to_string(), row.containers.to_string());
        let (name, parent) = (row.name.to_owned(), row.parent.to_owned());
        let [cpu, faults, major, read, written, memory, pids, sockets, lives, wakes] =
            row.figures.cells();
        table.row([
            number, name, parent, containers, cpu, faults, major, read, written, memory, pids,
            sockets, lives, wakes,
        ]);
    }
    print_table(table, noheading)
}

fn print_table(table: Table, noheading: bool) -> Result<()> {
    match noheading {
        true => output::print(table.body()),
        false => table.print(),
    }
}

/// Everything about an account.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Whole<'a> {
    number: u32,
    name: &'a str,
    parent: Option<&'a str>,
    created_at: Option<String>,
    containers: &'a [String],
    keep_days: u32,
    labels: &'a BTreeMap<String, String>,
    /// Connections to shared services now, with those of the accounts below it.
    connections: u64,
    /// The most.
    connections_max: Option<u32>,
    on_limit: Option<dormouse_account::OnLimit>,
    /// Processes and threads now, with those of the accounts below it.
    pids: u64,
    /// The most.
    pids_max: Option<u32>,
    /// Sockets now, in the same way; none without a limit, when they are not counted.
    sockets: Option<u64>,
    /// The most.
    sockets_max: Option<u32>,
    /// Values that are those of its parent.
    shared: Vec<&'static str>,
    total: Figures,
    total_with_below: Figures,
    /// The part of days that are no longer kept.
    older: Figures,
    days: BTreeMap<String, Figures>,
}

/// What accounts hold now, by their numbers.
#[derive(Debug)]
struct Held {
    connections: BTreeMap<u32, u32>,
    tasks: BTreeMap<u32, u64>,
    /// With those of the accounts below each.
    sockets: BTreeMap<u32, SocketCount>,
}

fn inspect(
    all: &[AccountDetails],
    held: &Held,
    format: Option<&str>,
    names: &[String],
) -> Result<u8> {
    let format = format.filter(|text| *text != "json").map(Template::read).transpose()?;
    let mut found = Vec::new();
    let code = fail::for_each(names, |name| {
        found.push(whole(all, held, find(all, name)?));
        Ok(())
    });
    match format {
        None => output::json(&found)?,
        Some(template) => {
            for account in &found {
                output::print(template.fill(account)? + "\n")?;
            }
        }
    }
    Ok(code)
}

/// The sum of a figure of an account and of all below it.
fn with_below(
    all: &[AccountDetails],
    account: &AccountDetails,
    figure: &dyn Fn(u32) -> u64,
) -> u64 {
    let below = all.iter().filter(|other| other.parent.as_ref() == Some(&account.name));
    let own = figure(account.number.0);
    below.map(|child| with_below(all, child, figure)).fold(own, u64::saturating_add)
}

fn whole<'a>(all: &[AccountDetails], held: &Held, account: &'a AccountDetails) -> Whole<'a> {
    let connections = |number| held.connections.get(&number).copied().unwrap_or(0).into();
    let tasks = |number| held.tasks.get(&number).copied().unwrap_or(0);
    let shared =
        [(account.shares_keep_days, "keep-days"), (account.shares_labels, "labels")].into_iter();
    let made = account.created_unix_ms;
    let days = account.balance.days.iter();
    Whole {
        number: account.number.0,
        name: &account.name,
        parent: account.parent.as_deref(),
        created_at: (made != 0).then(|| dormouse_api::rfc3339(made)),
        containers: &account.containers,
        keep_days: account.keep_days,
        labels: &account.labels,
        connections: with_below(all, account, &connections),
        connections_max: account.limit.map(|limit| limit.connections),
        on_limit: account.limit.map(|limit| limit.on_limit),
        pids: with_below(all, account, &tasks),
        pids_max: account.pids_max,
        sockets: held.sockets.get(&account.number.0).map(|count| count.sockets),
        sockets_max: account.sockets_max,
        shared: shared.filter(|(is, _)| *is).map(|(_, name)| name).collect(),
        total: account.balance.total.into(),
        total_with_below: account.with_below(all, &|balance| balance.total).into(),
        older: account.balance.older.into(),
        days: days.map(|(day, usage)| (day.to_string(), (*usage).into())).collect(),
    }
}

/// A period of a report.
#[derive(Debug, Clone, Copy)]
struct Period {
    since: Option<Day>,
    until: Option<Day>,
    /// A row for each day.
    days: bool,
    /// With the accounts below each.
    recursive: bool,
}

/// A row of a report.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Line<'a> {
    number: u32,
    name: &'a str,
    /// First day; empty where the period has no beginning.
    since: String,
    /// Last day; empty where the period has no end.
    until: String,
    #[serde(flatten)]
    figures: Figures,
}

impl Period {
    fn rows<'a>(&self, all: &'a [AccountDetails], names: &[String]) -> Result<Vec<Line<'a>>> {
        if let (Some(since), Some(until)) = (self.since, self.until)
            && until < since
        {
            bail!("the last day, {until}, is before the first, {since}: exchange them");
        }
        let chosen: Vec<&AccountDetails> = match names {
            [] => all.iter().collect(),
            names => names.iter().map(|name| find(all, name)).collect::<Result<_>>()?,
        };
        let mut rows = Vec::new();
        for account in chosen {
            let of = |figure: &dyn Fn(&Balance) -> Usage| match self.recursive {
                true => account.with_below(all, figure),
                false => figure(&account.balance),
            };
            let line = |since: Option<Day>, until: Option<Day>, usage: Usage| Line {
                number: account.number.0,
                name: &account.name,
                since: since.map_or_else(String::new, |day| day.to_string()),
                until: until.map_or_else(String::new, |day| day.to_string()),
                figures: usage.into(),
            };
            if !self.days {
                let usage = of(&|balance| balance.between(self.since, self.until));
                rows.push(line(self.since, self.until, usage));
                continue;
            }
            // Days that are no longer kept, as one row in front.
            let older = of(&|balance| balance.older);
            if self.since.is_none() && !older.is_none() {
                rows.push(line(None, None, older));
            }
            let is_in = |day: &Day| {
                self.since.is_none_or(|s| s <= *day) && self.until.is_none_or(|u| *day <= u)
            };
            let mut days = BTreeSet::new();
            collect_days(account, all, self.recursive, &mut days);
            for day in days.into_iter().filter(is_in) {
                let usage = of(&|balance| balance.days.get(&day).copied().unwrap_or_default());
                rows.push(line(Some(day), Some(day), usage));
            }
        }
        Ok(rows)
    }
}

fn collect_days(
    account: &AccountDetails,
    all: &[AccountDetails],
    recursive: bool,
    days: &mut BTreeSet<Day>,
) {
    days.extend(account.balance.days.keys());
    if recursive {
        let below = all.iter().filter(|other| other.parent.as_ref() == Some(&account.name));
        below.for_each(|child| collect_days(child, all, true, days));
    }
}

/// The form of a report.
enum Report {
    Plain,
    Csv,
    Format(Format),
}

impl Report {
    fn read(text: Option<&str>) -> Result<Self> {
        match text {
            None => Ok(Self::Plain),
            Some("csv") => Ok(Self::Csv),
            Some(text) => Ok(Self::Format(Format::read(text)?)),
        }
    }
}

const CSV: &str = "number,name,since,until,cpu_ns,cpu_user_ns,page_faults,major_faults,read_bytes,\
                   written_bytes,memory_peak_bytes,lives,wakes,cpu_given_ns,cpu_taken_ns,\
                   pids_peak,sockets_peak\n";

fn report(rows: &[Line<'_>], days: bool, noheading: bool, format: &Report) -> Result<()> {
    match format {
        Report::Format(format) => {
            return format.print(rows.iter(), HEADINGS, || output::json(rows));
        }
        Report::Csv => {
            let heading = if noheading { "" } else { CSV };
            return output::print(
                rows.iter().fold(heading.to_owned(), |text, row| text + &csv(row)),
            );
        }
        Report::Plain => {}
    }
    let mut table = Table::new([
        "NAME",
        if days { "DAY" } else { "SINCE" },
        if days { "" } else { "UNTIL" },
        "CPU TIME",
        "FAULTS",
        "MAJOR",
        "READ",
        "WRITTEN",
        "MEMORY PEAK",
        "PIDS PEAK",
        "SOCKETS PEAK",
        "LIVES",
        "WAKES",
    ]);
    for row in rows {
        let since = match row.since.as_str() {
            "" if days => "earlier".to_owned(),
            since => since.to_owned(),
        };
        let until = if days { String::new() } else { row.until.clone() };
        let name = row.name.to_owned();
        let [cpu, faults, major, read, written, memory, pids, sockets, lives, wakes] =
            row.figures.cells();
        table.row([
            name, since, until, cpu, faults, major, read, written, memory, pids, sockets, lives,
            wakes,
        ]);
    }
    print_table(table, noheading)
}

/// A row as RFC 4180 has it. Names of accounts contain neither commas nor quotes.
fn csv(row: &Line<'_>) -> String {
    let f = &row.figures;
    let numbers = [
        f.cpu_ns,
        f.cpu_user_ns,
        f.page_faults,
        f.major_faults,
        f.read_bytes,
        f.written_bytes,
        f.memory_peak_bytes,
        f.lives,
        f.wakes,
        f.cpu_given_ns,
        f.cpu_taken_ns,
        f.pids_peak,
        f.sockets_peak,
    ];
    let numbers = numbers.map(|n| n.to_string()).join(",");
    format!("{},{},{},{},{numbers}\n", row.number, row.name, row.since, row.until)
}

#[cfg(test)]
mod tests {
    use dormouse_account::{Charge, Held, Holder, Life, Number};
    use dormouse_model::ContainerId;

    use super::*;

    const DAY_MS: i64 = 86_400_000;

    /// An account, with so much CPU time on each day.
    fn account(
        number: u32,
        name: &str,
        parent: Option<&str>,
        days: &[(i64, u64)],
    ) -> AccountDetails {
        let mut balance = Balance::default();
        for (n, (day, cpu_ns)) in days.iter().enumerate() {
            let container = ContainerId::from_bytes([7; 16]);
            let life = Life { container, boot: String::new(), cgroup: n as u64 };
            let usage = Usage { cpu_ns: *cpu_ns, ..Usage::default() };
            balance.apply(&Charge {
                to: Holder::Root,
                life,
                unix_ms: day * DAY_MS,
                usage,
                work: Vec::new(),
                held: Held::default(),
            });
        }
        AccountDetails {
            number: Number(number),
            name: name.to_owned(),
            parent: parent.map(str::to_owned),
            own: None,
            limit: None,
            sockets_max: None,
            pids_max: None,
            containers: Vec::new(),
            keep_days: 1,
            shares_keep_days: true,
            labels: BTreeMap::new(),
            shares_labels: false,
            created_unix_ms: 0,
            balance,
        }
    }

    fn all() -> Vec<AccountDetails> {
        vec![
            account(0, "root", None, &[(0, 1)]),
            account(1, "customer", Some("root"), &[(0, 10), (1, 20)]),
            account(2, "shop", Some("customer"), &[(2, 300)]),
        ]
    }

    fn rows(period: Period, names: &[&str]) -> Vec<(String, String, String, u64)> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let all = all();
        let rows = period.rows(&all, &names).unwrap();
        let row =
            |r: &Line<'_>| (r.name.to_owned(), r.since.clone(), r.until.clone(), r.figures.cpu_ns);
        rows.iter().map(row).collect()
    }

    fn day(n: i64) -> Option<Day> {
        Some(Day::of_unix_ms(n * DAY_MS))
    }

    #[test]
    fn report_adds_up_days_and_accounts_below() {
        let whole = Period { since: None, until: None, days: false, recursive: false };
        let sums =
            |rows: Vec<(String, String, String, u64)>| rows.iter().map(|r| r.3).collect::<Vec<_>>();
        assert_eq!(sums(rows(whole, &[])), [1, 30, 300]);
        let below = Period { recursive: true, ..whole };
        assert_eq!(sums(rows(below, &[])), [331, 330, 300]);
        let second = Period { since: day(1), until: day(1), ..below };
        assert_eq!(sums(rows(second, &["customer", "root"])), [20, 20]);
        let daily = Period { days: true, since: day(1), ..below };
        let text = |n| day(n).unwrap().to_string();
        let one = |n, ns| ("customer".to_owned(), text(n), text(n), ns);
        assert_eq!(rows(daily, &["customer"]), [one(1, 20), one(2, 300)]);
        assert_eq!(rows(Period { recursive: false, ..daily }, &["customer"]), [one(1, 20)]);
    }

    #[test]
    fn unknown_account_and_reversed_period_are_refused() {
        let period = Period { since: day(2), until: day(1), days: false, recursive: false };
        assert!(period.rows(&all(), &[]).is_err());
        let period = Period { since: None, ..period };
        assert!(period.rows(&all(), &["nothing".to_owned()]).is_err());
    }

    #[test]
    fn csv_has_a_cell_for_each_heading() {
        let all = all();
        let period = Period { since: day(0), until: None, days: false, recursive: false };
        let rows = period.rows(&all, &["customer".to_owned()]).unwrap();
        assert_eq!(csv(&rows[0]), "1,customer,1970-01-01,,30,0,0,0,0,0,0,0,0,0,0,0,0\n");
        assert_eq!(CSV.split(',').count(), csv(&rows[0]).split(',').count());
        let figures = serde_json::to_value(&rows[0].figures).unwrap();
        assert_eq!(figures.as_object().unwrap().len() + 4, CSV.split(',').count());
    }

    #[test]
    fn form_of_a_report_is_read_or_refused() {
        assert!(matches!(Report::read(None), Ok(Report::Plain)));
        assert!(matches!(Report::read(Some("csv")), Ok(Report::Csv)));
        assert!(matches!(Report::read(Some("{{.Name}}")), Ok(Report::Format(_))));
        assert!(Report::read(Some("xml")).is_err());
    }
}
