//! `dormouse images`

use anyhow::Result;
use dormouse_image::Image;
use serde::Serialize;

use crate::command::Global;
use crate::option::time::{moment, now_ms, span};
use crate::output::{self, Table};

/// List images
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print ids only
    #[arg(long, short)]
    quiet: bool,
    /// Do not shorten
    #[arg(long)]
    no_trunc: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
    /// Only those with this name, with or without a tag
    name: Option<String>,
}

/// An image in `images --json`.
#[derive(Debug, Serialize)]
struct Row<'a> {
    id: &'a str,
    names: Vec<String>,
    digest: Option<String>,
    created: Option<&'a str>,
    /// Size of its files, including those shared with other images.
    size_bytes: u64,
    layers: usize,
}

impl<'a> Row<'a> {
    fn of(i: &'a Image) -> Self {
        Self {
            id: &i.id,
            names: i.names.iter().map(ToString::to_string).collect(),
            digest: i.digest.as_ref().map(ToString::to_string),
            created: i.created.as_deref(),
            size_bytes: i.size_bytes,
            layers: i.layers.len(),
        }
    }
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let mut list = global.engine()?.images()?.list()?;
    if let Some(name) = &args.name {
        let fits =
            |text: &str| text == name || text.rsplit_once(':').is_some_and(|(n, _)| n == name);
        list.retain(|i| i.names.iter().any(|n| fits(&n.to_string())));
    }
    if args.json {
        output::json(&list.iter().map(Row::of).collect::<Vec<_>>())?;
        return Ok(0);
    }
    let id = |i: &Image| match args.no_trunc {
        true => i.id.clone(),
        false => i.id.get(..12).unwrap_or(&i.id).to_owned(),
    };
    if args.quiet {
        output::print(list.iter().map(|i| id(i) + "\n").collect::<String>())?;
        return Ok(0);
    }
    let mut table = Table::new(["IMAGE", "IMAGE ID", "CREATED", "SIZE"]);
    for image in &list {
        let mut names: Vec<String> = image.names.iter().map(ToString::to_string).collect();
        if names.is_empty() {
            names.push("<none>".to_owned());
        }
        for name in names {
            table.row([
                name,
                id(image),
                age(image.created.as_deref()),
                output::bytes(image.size_bytes),
            ]);
        }
    }
    table.print()?;
    Ok(0)
}

/// Formats the age of an RFC 3339 time; empty without one.
pub(super) fn age(created: Option<&str>) -> String {
    let now = now_ms();
    let ms = created.and_then(|c| moment(c, now).ok());
    ms.map_or_else(String::new, |ms| format!("{} ago", span(now - ms)))
}
