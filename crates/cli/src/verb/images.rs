//! `dormouse images`

use std::collections::{BTreeMap, HashMap};

use anyhow::Result;
use dormouse_image::Image;
use dormouse_model::Reference;
use serde::Serialize;

use crate::command::Global;
use crate::compatible;
use crate::format::{Format, Headings};
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
    /// Print as JSON, with this program's names
    #[arg(long, conflicts_with = "format")]
    json: bool,
    /// json (with podman's names), a Go template such as '{{.Repository}}:{{.Tag}}', or 'table' and a
    /// template
    #[arg(long, value_name = "FORMAT")]
    format: Option<String>,
    /// Print without headings
    #[arg(long, short)]
    noheading: bool,
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

const HEADINGS: &Headings = &[
    ("Repository", "REPOSITORY"),
    ("Tag", "TAG"),
    ("ID", "IMAGE ID"),
    ("Digest", "DIGEST"),
    ("Created", "CREATED"),
    ("CreatedSince", "CREATED"),
    ("CreatedAt", "CREATED AT"),
    ("Size", "SIZE"),
    ("Names", "NAMES"),
    ("Labels", "LABELS"),
    ("Containers", "CONTAINERS"),
];

/// A name of an image as a template shows it, with podman's names.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Line {
    repository: String,
    tag: String,
    #[serde(rename = "ID")]
    id: String,
    digest: String,
    created: String,
    created_since: String,
    created_at: String,
    size: String,
    names: Vec<String>,
    labels: BTreeMap<String, String>,
    containers: usize,
}

/// A line for each name of an image, as in the table.
fn lines(image: &Image, id: &str, containers: usize) -> Vec<Line> {
    let listed = compatible::listed_image(image, containers);
    let line = |repository: String, tag: &str| Line {
        repository,
        tag: tag.to_owned(),
        id: id.to_owned(),
        digest: listed.digest.clone(),
        created: age(image.created.as_deref()),
        created_since: age(image.created.as_deref()),
        created_at: listed.created_at.clone(),
        size: output::bytes(image.size_bytes),
        names: listed.names.clone(),
        labels: listed.labels.clone(),
        containers,
    };
    if image.names.is_empty() {
        return vec![line("<none>".to_owned(), "<none>")];
    }
    let of = |name: &Reference| {
        let repository = Reference { tag: None, digest: None, ..name.clone() };
        line(repository.to_string(), name.tag.as_deref().unwrap_or("<none>"))
    };
    image.names.iter().map(of).collect()
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let format = args.format.as_deref().map(Format::read).transpose()?;
    let engine = global.engine()?;
    let mut list = engine.images()?.list()?;
    if let Some(name) = &args.name {
        let fits =
            |text: &str| text == name || text.rsplit_once(':').is_some_and(|(n, _)| n == name);
        let wanted = name.parse::<Reference>().ok();
        let is_same = |n: &Reference| wanted.as_ref().is_some_and(|wanted| n.is_same(wanted));
        list.retain(|i| i.names.iter().any(|n| fits(&n.to_string()) || is_same(n)));
    }
    if args.json {
        output::json(&list.iter().map(Row::of).collect::<Vec<_>>())?;
        return Ok(0);
    }
    let id = |i: &Image| match args.no_trunc {
        true => i.id.clone(),
        false => i.id.get(..12).unwrap_or(&i.id).to_owned(),
    };
    if let Some(format) = format {
        let mut used: HashMap<String, usize> = HashMap::new();
        for image in engine.images_in_use()? {
            *used.entry(image).or_default() += 1;
        }
        let containers = |i: &Image| used.get(&i.id).copied().unwrap_or(0);
        let rows = list.iter().flat_map(|i| lines(i, &id(i), containers(i)));
        let json = || {
            let all = list.iter().map(|i| compatible::listed_image(i, containers(i)));
            output::json(&all.collect::<Vec<_>>())
        };
        format.print(rows, HEADINGS, json)?;
        return Ok(0);
    }
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
    match args.noheading {
        true => output::print(table.body())?,
        false => table.print()?,
    }
    Ok(0)
}

/// Formats the age of an RFC 3339 time; empty without one.
pub(super) fn age(created: Option<&str>) -> String {
    let now = now_ms();
    let ms = created.and_then(|c| moment(c, now).ok());
    ms.map_or_else(String::new, |ms| format!("{} ago", span(now - ms)))
}
