//! `dormouse save`

use std::path::PathBuf;

use anyhow::{Context, Result};
use dormouse_image::SaveFormat;

use crate::command::Global;
use crate::{image, sink};

/// Write images to an archive, in the format of other engines
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Output file; standard output by default
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Show no progress
    #[arg(long, short)]
    quiet: bool,
    /// Names or ids
    #[arg(required = true, value_name = "IMAGE")]
    names: Vec<String>,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let store = engine.images()?;
    let mut images = Vec::new();
    for name in &args.names {
        images.push(store.find(name).with_context(|| format!("image '{name}'"))?);
    }
    let progress = image::progress(args.quiet);
    sink::write(args.output.as_deref(), sink::Holds::Files, |out| {
        Ok(store.save(&images, SaveFormat::OciArchive, out, &*progress)?)
    })?;
    Ok(0)
}
