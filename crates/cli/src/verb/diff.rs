//! `dormouse diff`

use std::os::fd::AsFd;

use anyhow::Result;
use serde::Serialize;

use crate::command::Global;
use crate::target::Target;
use crate::{layers, output};

/// List the changes of a container against its image: added (A), changed (C), deleted (D)
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    target: Target,
}

/// A path in `diff --json`.
#[derive(Debug, Serialize)]
struct Row {
    /// `A`, `C` or `D`.
    kind: char,
    path: String,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let (engine, id) = args.target.find(global)?;
    let config = engine.config(&id)?;
    let layers = layers::open(&engine, &config)?;
    let changes = engine.images()?.diff(&layers.lower, layers.own.upper.as_fd(), &config.ids)?;
    let rows = changes.into_iter().map(|c| Row {
        kind: c.kind.letter(),
        path: String::from_utf8_lossy(&c.path).into_owned(),
    });
    if args.json {
        output::json(&rows.collect::<Vec<_>>())?;
    } else {
        let line = |r: Row| format!("{} {}\n", r.kind, output::printable(&r.path));
        output::print(rows.map(line).collect::<String>())?;
    }
    Ok(0)
}
