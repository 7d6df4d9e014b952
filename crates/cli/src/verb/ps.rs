//! `dormouse ps`

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;

use anyhow::{Result, bail};
use dormouse_container::{Engine, Listed};
use dormouse_model::{RootSource, State};
use serde::Serialize;

use crate::command::Global;
use crate::compatible;
use crate::format::{Format, Headings};
use crate::option::key_value;
use crate::option::time::{now_ms, span};
use crate::output::{self, Table, cut};
use crate::spectator::{Seen, Spectator};
use crate::view::{self, is_alive};

/// List containers
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Also containers that do not run
    #[arg(long, short)]
    all: bool,
    /// Print ids only
    #[arg(long, short)]
    quiet: bool,
    /// Only matching containers: name=TEXT, state=STATE, label=KEY[=VALUE], id=DIGITS, image=NAME,
    /// exited=CODE
    #[arg(long, short, value_name = "KEY=VALUE")]
    filter: Vec<String>,
    /// Do not shorten
    #[arg(long)]
    no_trunc: bool,
    /// Print as JSON, with this program's names
    #[arg(long, conflicts_with = "format")]
    json: bool,
    /// json (with podman's names), a Go template such as '{{.Names}}', or 'table' and a template
    #[arg(long, value_name = "FORMAT")]
    format: Option<String>,
    /// Only the newest so many, in any state
    #[arg(long, short = 'n', value_name = "COUNT", conflicts_with = "latest")]
    last: Option<usize>,
    /// Only the newest, in any state
    #[arg(long, short)]
    latest: bool,
    /// Print without headings
    #[arg(long)]
    noheading: bool,
    /// Containers of all trust domains and instances of the host, with the number of their processes
    #[arg(long, conflicts_with = "format")]
    all_domains: bool,
}

/// A container in `ps --all-domains --json`.
#[derive(Debug, Serialize)]
struct SpectatedRow<'c> {
    /// The directory for `--root`; null for the instance of the system.
    instance: Option<&'c str>,
    /// The host's pids of its processes.
    processes: &'c [u32],
    #[serde(flatten)]
    container: dormouse_api::Summary<'c>,
}

const HEADINGS: &Headings = &[
    ("ID", "CONTAINER ID"),
    ("Names", "NAMES"),
    ("Image", "IMAGE"),
    ("ImageID", "IMAGE ID"),
    ("Command", "COMMAND"),
    ("Created", "CREATED"),
    ("CreatedAt", "CREATED AT"),
    ("CreatedHuman", "CREATED"),
    ("RunningFor", "CREATED"),
    ("StartedAt", "STARTED AT"),
    ("State", "STATE"),
    ("Status", "STATUS"),
    ("Exited", "EXITED"),
    ("ExitCode", "EXIT CODE"),
    ("Pid", "PID"),
    ("Ports", "PORTS"),
    ("Labels", "LABELS"),
    ("Networks", "NETWORKS"),
    ("Addresses", "ADDRESSES"),
];

/// A container as a template shows it, with podman's names.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Row<'c> {
    #[serde(rename = "ID")]
    id: &'c str,
    names: &'c str,
    image: String,
    #[serde(rename = "ImageID")]
    image_id: &'c str,
    command: String,
    created: String,
    created_at: String,
    created_human: String,
    running_for: String,
    started_at: i64,
    state: &'static str,
    status: String,
    exited: bool,
    exit_code: i32,
    pid: u32,
    ports: String,
    labels: &'c BTreeMap<String, String>,
    networks: String,
    addresses: String,
}

impl<'c> Row<'c> {
    fn of(engine: &Engine, c: &'c Listed, no_trunc: bool) -> Self {
        let ended = c.exit.as_ref().filter(|_| !is_alive(c.state));
        let age = format!("{} ago", span(now_ms() - c.created_unix_s * 1000));
        let at = dormouse_api::rfc3339(c.created_unix_s.saturating_mul(1000));
        // As podman prints it: 2026-11-27 00:38:34 +0000 UTC
        let at = at.split_once('.').map_or(at.as_str(), |(seconds, _)| seconds).replace('T', " ");
        let image_id = match &c.root {
            RootSource::Image { id, .. } if no_trunc => id.as_str(),
            RootSource::Image { id, .. } => id.get(..12).unwrap_or(id),
            RootSource::Directory(_) => "",
        };
        Self {
            id: if no_trunc { c.id.as_str() } else { c.id.short() },
            names: c.name.as_str(),
            image: view::image(&c.root),
            image_id,
            command: c.args.join(" "),
            created: age.clone(),
            created_at: format!("{at} +0000 UTC"),
            created_human: age.clone(),
            running_for: age,
            started_at: c.started_unix_ms.map_or(0, |ms| ms / 1000),
            state: compatible::status(c.state),
            status: view::status_with_checkpoints(engine, c),
            exited: c.state == State::Stopped,
            exit_code: ended.and_then(|exit| exit.code).unwrap_or(0),
            pid: c.pid.unwrap_or(0),
            ports: view::ports(&c.publish),
            labels: &c.labels,
            networks: compatible::networks(c).join(","),
            addresses: view::addresses(&c.addresses),
        }
    }
}

/// One `--filter`.
#[derive(Debug, PartialEq, Eq)]
enum Filter {
    Name(NamePart),
    Id(String),
    State(String),
    Label(String, Option<String>),
    Image(String),
    Exited(i32),
}

/// A part of a name; `^` and `$` are its ends, as in the regular expressions of podman.
#[derive(Debug, PartialEq, Eq)]
struct NamePart {
    text: String,
    at_start: bool,
    at_end: bool,
}

impl NamePart {
    fn read(value: &str) -> Result<Self> {
        let (at_start, text) = match value.strip_prefix('^') {
            Some(rest) => (true, rest),
            None => (false, value),
        };
        // docker's own names begin with a slash.
        let text = if at_start { text.strip_prefix('/').unwrap_or(text) } else { text };
        let (at_end, text) = match text.strip_suffix('$') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        // No name has another character, so such a filter is a regular expression.
        if text.chars().any(|c| !c.is_ascii_alphanumeric() && !"_.-".contains(c)) {
            bail!(
                "filter 'name={value}' is not valid: a part of a name, with ^ before its start or $ after its end"
            );
        }
        Ok(Self { text: text.to_owned(), at_start, at_end })
    }

    fn fits(&self, name: &str) -> bool {
        match (self.at_start, self.at_end) {
            (true, true) => name == self.text,
            (true, false) => name.starts_with(&self.text),
            (false, true) => name.ends_with(&self.text),
            (false, false) => name.contains(&self.text),
        }
    }
}

impl Filter {
    fn read(text: &str) -> Result<Self> {
        let (key, value) = key_value(text);
        let value = value.to_owned();
        Ok(match key {
            "name" => Self::Name(NamePart::read(&value)?),
            "id" => Self::Id(value),
            "state" | "status" => match value.as_str() {
                "created" | "running" | "paused" | "drowsy" | "asleep" | "stopped" => {
                    Self::State(value)
                }
                "exited" => Self::State("stopped".into()),
                _ => bail!(
                    "state '{value}' is none of created, running, paused, drowsy, asleep, stopped"
                ),
            },
            "label" => match value.split_once('=') {
                Some((k, v)) => Self::Label(k.into(), Some(v.into())),
                None => Self::Label(value, None),
            },
            "image" | "ancestor" => Self::Image(value),
            "exited" => match value.parse() {
                Ok(code) => Self::Exited(code),
                Err(_) => bail!("filter '{text}' is not valid: exited= and an exit code"),
            },
            _ => {
                bail!("filter '{text}' is not valid: name=, id=, state=, label=, image= or exited=")
            }
        })
    }

    fn fits(&self, c: &Listed) -> bool {
        match self {
            Self::Name(part) => part.fits(c.name.as_str()),
            Self::Id(digits) => c.id.as_str().starts_with(digits.as_str()),
            Self::State(state) => c.state.as_str() == state,
            Self::Label(key, value) => {
                c.labels.get(key).is_some_and(|v| value.as_ref().is_none_or(|w| v == w))
            }
            Self::Exited(code) => {
                c.state == State::Stopped && c.exit.as_ref().and_then(|e| e.code) == Some(*code)
            }
            Self::Image(name) => {
                let image = view::image(&c.root);
                image == *name || image.rsplit_once(':').is_some_and(|(n, _)| n == name)
            }
        }
    }
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let filters: Vec<Filter> =
        args.filter.iter().map(|f| Filter::read(f)).collect::<Result<_>>()?;
    // A filter by state selects among all containers.
    let newest = args.last.or(args.latest.then_some(1));
    let all = args.all
        || newest.is_some()
        || filters.iter().any(|f| matches!(f, Filter::State(_) | Filter::Exited(_)));
    let format = args.format.as_deref().map(Format::read).transpose()?;
    let fits =
        |c: &Listed| (all || is_alive(c.state)) && filters.iter().all(|filter| filter.fits(c));
    if args.all_domains {
        return run_all(global, &args, newest, fits);
    }
    let engine = global.engine()?;
    let mut list = engine.list()?;
    list.retain(|c| fits(c));
    list.reverse();
    list.truncate(newest.unwrap_or(usize::MAX));
    // Freed by the end of the program: freeing a hundred thousand entries one by one gains nothing.
    let list = ManuallyDrop::new(list);
    if args.json {
        output::json_list(&list, |c| c.summary())?;
        return Ok(0);
    }
    if let Some(format) = format {
        let rows = list.iter().map(|c| Row::of(&engine, c, args.no_trunc));
        format.print(rows, HEADINGS, || output::json_list(&list, |c| compatible::listed(c)))?;
        return Ok(0);
    }
    let id = |c: &Listed| id_of(c, args.no_trunc);
    if args.quiet {
        output::print(list.iter().map(|c| id(c) + "\n").collect::<String>())?;
        return Ok(0);
    }
    let short = |text: &str, max| if args.no_trunc { text.to_owned() } else { cut(text, max) };
    let mut table = Table::new([
        "CONTAINER ID",
        "NAME",
        "IMAGE",
        "COMMAND",
        "CREATED",
        "STATUS",
        "ADDRESS",
        "PORTS",
    ]);
    table.rows(&list, |c| {
        [
            id(c),
            c.name.to_string(),
            short(&view::image(&c.root), 40),
            short(&c.args.join(" "), 24),
            format!("{} ago", span(now_ms() - c.created_unix_s * 1000)),
            short(&view::status_with_checkpoints(&engine, c), 100),
            short(&view::addresses(&c.addresses), 40),
            short(&view::ports(&c.publish), 40),
        ]
    });
    match args.noheading {
        true => output::print(table.body())?,
        false => table.print()?,
    }
    Ok(0)
}

fn id_of(c: &Listed, no_trunc: bool) -> String {
    if no_trunc { c.id.to_string() } else { c.id.short().to_owned() }
}

/// Lists the containers of the host.
fn run_all(
    global: &Global,
    args: &Args,
    newest: Option<usize>,
    fits: impl Fn(&Listed) -> bool,
) -> Result<u8> {
    let mut seen = Spectator::look(global)?;
    seen.containers.retain(|one| fits(&one.listed));
    if let Some(count) = newest {
        seen.containers.sort_by_key(|one| std::cmp::Reverse(one.listed.created_unix_s));
        seen.containers.truncate(count);
    }
    let all = &seen.containers;
    if args.json {
        output::json_list(all, |one| SpectatedRow {
            instance: one.root(),
            processes: &one.pids,
            container: one.listed.summary(),
        })?;
        return Ok(seen.code());
    }
    if args.quiet {
        let ids = all.iter().map(|one| id_of(&one.listed, args.no_trunc) + "\n");
        output::print(ids.collect::<String>())?;
        return Ok(seen.code());
    }
    let short = |text: &str, max| if args.no_trunc { text.to_owned() } else { cut(text, max) };
    let mut table = Table::new([
        "INSTANCE",
        "DOMAIN",
        "CONTAINER ID",
        "NAME",
        "IMAGE",
        "COMMAND",
        "STATE",
        "HOST PID",
        "PROCESSES",
        "ADDRESS",
    ]);
    table.rows(all, |one: &Seen| {
        let c = &one.listed;
        [
            one.root().unwrap_or("-").to_owned(),
            one.domain().unwrap_or("-").to_owned(),
            id_of(c, args.no_trunc),
            c.name.to_string(),
            short(&view::image(&c.root), 40),
            short(&c.args.join(" "), 24),
            c.state.to_string(),
            c.pid.map_or("-".to_owned(), |pid| pid.to_string()),
            one.pids.len().to_string(),
            short(&view::addresses(&c.addresses), 40),
        ]
    });
    match args.noheading {
        true => output::print(table.body())?,
        false => table.print()?,
    }
    Ok(seen.code())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filter_is_parsed_or_refused() {
        for (filter, fitting, others) in [
            ("web", &["web", "my-web-1"][..], &["we"][..]),
            ("^web", &["web", "web-1"], &["my-web"]),
            ("web$", &["web", "my-web"], &["web-1"]),
            ("^web$", &["web"], &["web-1", "my-web"]),
            ("^/web$", &["web"], &["web-1"]),
            ("", &["web"], &[]),
        ] {
            let Filter::Name(part) = Filter::read(&format!("name={filter}")).unwrap() else {
                panic!("{filter}");
            };
            assert!(fitting.iter().all(|name| part.fits(name)), "{filter}");
            assert!(!others.iter().any(|name| part.fits(name)), "{filter}");
        }
        assert_eq!(Filter::read("status=exited").unwrap(), Filter::State("stopped".into()));
        assert_eq!(
            Filter::read("label=a=b=c").unwrap(),
            Filter::Label("a".into(), Some("b=c".into()))
        );
        assert_eq!(Filter::read("state=asleep").unwrap(), Filter::State("asleep".into()));
        assert_eq!(Filter::read("exited=137").unwrap(), Filter::Exited(137));
        for bad in ["", "x=y", "state=awake", "exited=x", "name=a.*", "name"] {
            assert_eq!(Filter::read(bad).is_err(), bad != "name", "{bad}");
        }
    }
}
