//! `dormouse import`

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::command::Global;
use crate::{image, output};

/// Make an image from a directory or an archive and print its id
///
/// A directory is a root filesystem or an OCI layout, an archive one of those or of docker,
/// recognised by its content.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Name of the image; an archive may contain one
    #[arg(long, short)]
    name: Option<String>,
    /// Show no progress
    #[arg(long, short)]
    quiet: bool,
    /// Directory or file
    path: PathBuf,
    /// The same as --name
    #[arg(value_name = "NAME", conflicts_with = "name")]
    reference: Option<String>,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let given = args.name.or(args.reference);
    let name = given.as_deref().map(str::parse).transpose()?;
    let engine = global.engine()?;
    let progress = image::progress(args.quiet);
    let id = engine.images()?.import(&args.path, name.as_ref(), &*progress);
    let id = id.with_context(|| format!("cannot import '{}'", args.path.display()))?;
    engine.record(dormouse_api::EventKind::Import, &id, &given.unwrap_or_default(), &[]);
    output::line(&id)?;
    Ok(0)
}
