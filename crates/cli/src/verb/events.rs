//! `dormouse events`

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use dormouse_api::{Event, rfc3339};

use crate::command::Global;
use crate::option::time::{moment, now_ms};
use crate::output;

/// Show events of containers and images
///
/// Without --since from now on, without --until for ever.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Since then: a time, or an age such as 10m
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Until then
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// Stop at the last event instead of waiting for more
    #[arg(long)]
    no_stream: bool,
    /// Print as JSON, an event per line
    #[arg(long)]
    json: bool,
}

/// Polling interval.
const PAUSE: Duration = Duration::from_millis(100);

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let now = now_ms();
    let since = args.since.as_deref().map(|t| moment(t, now)).transpose()?;
    let until = args.until.as_deref().map(|t| moment(t, now)).transpose()?;
    let path = global.engine()?.events();
    let from = since.unwrap_or(if args.no_stream { i64::MIN } else { now });
    let span = from..=until.unwrap_or(i64::MAX);
    // ORDER: the present file is opened before the older one is read, so that no event is shown
    // twice or missed if the file is renamed in between.
    let mut file = open(&path)?;
    if (since.is_some() || args.no_stream)
        && let Some(mut old) = open(&path.with_extension("1"))?
    {
        show_new(&mut old, &span, args.json)?;
    }
    loop {
        let replaced = match &file {
            Some(file) => !is_at(file, &path),
            None => path.exists(),
        };
        // ORDER: compared first, then read: events before the rename are in the old file.
        if let Some(file) = &mut file {
            show_new(file, &span, args.json)?;
        }
        if replaced {
            file = open(&path)?;
            continue;
        }
        if args.no_stream || until.is_some_and(|until| now_ms() >= until) {
            return Ok(0);
        }
        std::thread::sleep(PAUSE);
    }
}

fn open(path: &Path) -> Result<Option<BufReader<File>>> {
    match File::open(path) {
        Ok(file) => Ok(Some(BufReader::new(file))),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| format!("cannot read '{}'", path.display())),
    }
}

/// Returns whether a file is still the one at this path: a full one is renamed.
fn is_at(file: &BufReader<File>, path: &Path) -> bool {
    match (file.get_ref().metadata(), std::fs::metadata(path)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => true, // between the rename and the first event there is no file
    }
}

/// Shows the events that were not read yet. An event is one write, so lines are complete.
fn show_new(
    file: &mut BufReader<File>,
    span: &std::ops::RangeInclusive<i64>,
    json: bool,
) -> Result<()> {
    let mut line = String::new();
    loop {
        line.clear();
        if file.read_line(&mut line).context("cannot read the events")? == 0 {
            return Ok(());
        }
        // A line cut short by a full disk is no event.
        if let Ok(event) = serde_json::from_str::<Event>(&line)
            && span.contains(&event.unix_ms)
        {
            show(&event, json)?;
        }
    }
}

fn show(event: &Event, json: bool) -> Result<()> {
    if json {
        return output::json_line(event);
    }
    let mut line = format!("{} {} {} {}", rfc3339(event.unix_ms), event.kind, event.id, event.name);
    for (key, value) in &event.attributes {
        line.push_str(&format!(" {key}={value}"));
    }
    output::line(&output::printable(&line))
}
