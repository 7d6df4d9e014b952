//! `dormouse history`

use anyhow::{Context, Result};
use serde::Serialize;

use super::images::age;
use crate::command::Global;
use crate::output::{self, Table, cut};

/// Show the steps that made an image, newest first
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Do not shorten
    #[arg(long)]
    no_trunc: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
    /// Name or id
    image: String,
}

/// A step in `history --json`.
#[derive(Debug, Serialize)]
struct Row {
    created: Option<String>,
    created_by: Option<String>,
    author: Option<String>,
    comment: Option<String>,
    /// Digest of the step's layer; null if it made none.
    layer: Option<String>,
    /// Bytes of that layer's tar.
    size_bytes: u64,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let image = engine.images()?.find(&args.image);
    let image = image.with_context(|| format!("image '{}'", args.image))?;
    let mut layers = image.layers.iter();
    let mut rows = Vec::new();
    for step in image.config.history().iter().flatten() {
        let layer = if step.empty_layer() == Some(true) { None } else { layers.next() };
        rows.push(Row {
            created: step.created().clone(),
            created_by: step.created_by().clone(),
            author: step.author().clone(),
            comment: step.comment().clone(),
            layer: layer.map(|l| l.diff_id.to_string()),
            size_bytes: layer.map_or(0, |l| l.tar_bytes),
        });
    }
    // Layers missing from the history.
    rows.extend(layers.map(|l| Row {
        created: None,
        created_by: None,
        author: None,
        comment: None,
        layer: Some(l.diff_id.to_string()),
        size_bytes: l.tar_bytes,
    }));
    rows.reverse();
    if args.json {
        output::json(&rows)?;
        return Ok(0);
    }
    let mut table = Table::new(["CREATED", "CREATED BY", "SIZE", "COMMENT"]);
    for r in rows {
        let by = r.created_by.unwrap_or_default();
        table.row([
            age(r.created.as_deref()),
            if args.no_trunc { by } else { cut(&by, 60) },
            output::bytes(r.size_bytes),
            r.comment.unwrap_or_default(),
        ]);
    }
    table.print()?;
    Ok(0)
}
