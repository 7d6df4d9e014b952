//! `dormouse prune`

use std::time::Duration;

use anyhow::Result;
use dormouse_image::Prune;
use dormouse_model::State;
use serde::Serialize;

use crate::command::Global;
use crate::output;

/// Free disk space without references
///
/// Always: leftovers of interrupted imports, and files of removed images.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Images that no container is made from, not only those without a name
    #[arg(long, short)]
    all: bool,
    /// Stopped containers too
    #[arg(long)]
    containers: bool,
    /// Volumes that no container uses too
    #[arg(long)]
    volumes: bool,
    /// Accepted for scripts: there is no question
    #[arg(long, short)]
    force: bool,
    /// Stopped containers only; 'container prune' is this
    #[arg(long, hide = true, conflicts_with_all = ["all", "containers", "volumes"])]
    only_containers: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// The removed objects.
#[derive(Debug, Default, Serialize)]
struct Removed {
    containers: Vec<String>,
    volumes: Vec<String>,
    images: Vec<String>,
    layers: usize,
    objects: usize,
    bytes: u64,
}

/// How long layers without an image are kept for an interrupted pull.
const GRACE: Duration = Duration::from_secs(3600);

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let mut containers = Vec::new();
    if args.containers || args.only_containers {
        for d in engine.list()?.into_iter().filter(|d| d.state == State::Stopped) {
            engine.remove(&d.id, false, true)?;
            containers.push(d.id.to_string());
        }
    }
    if args.only_containers {
        match args.json {
            true => output::json(&Removed { containers, ..Removed::default() })?,
            false => {
                output::print(containers.iter().map(|id| format!("{id}\n")).collect::<String>())?
            }
        }
        return Ok(0);
    }
    let mut volumes = Vec::new();
    if args.volumes {
        volumes.extend(engine.remove_unused_volumes()?.iter().map(ToString::to_string));
    }
    // They have their images mounted.
    engine.dismiss_spares();
    engine.sweep()?;
    let grace = if args.all { Duration::ZERO } else { GRACE };
    let pruned = engine.images()?.prune(&Prune {
        in_use: engine.images_in_use()?,
        unnamed: true,
        all: args.all,
        grace,
    })?;
    let removed = Removed {
        containers,
        volumes,
        images: pruned.images,
        layers: pruned.layers,
        objects: pruned.objects,
        bytes: pruned.bytes,
    };
    if args.json {
        output::json(&removed)?;
        return Ok(0);
    }
    for (what, list) in [
        ("container", &removed.containers),
        ("volume", &removed.volumes),
        ("image", &removed.images),
    ] {
        for name in list {
            output::line(&format!("removed {what} {name}"))?;
        }
    }
    output::line(&format!(
        "{} freed ({} layers, {} files)",
        output::bytes(removed.bytes),
        removed.layers,
        removed.objects
    ))?;
    Ok(0)
}
