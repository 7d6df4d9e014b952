//! `dormouse save`

use std::path::PathBuf;

use anyhow::{Context, Result};
use dormouse_image::{Image, SaveFormat};

use crate::command::Global;
use crate::{image, sink};

/// Write images to an archive, in the format of other engines
///
/// An image has the given names in the archive, or all of its names if it was given by its id.
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
    let mut images: Vec<Image> = Vec::new();
    for name in &args.names {
        let mut image = store.find(name).with_context(|| format!("image '{name}'"))?;
        // Only the given names are written; all of them if the image was given by its id.
        if let Some(given) = image.given_name(name).cloned() {
            image.names = vec![given];
        }
        match images.iter_mut().find(|other| other.id == image.id) {
            Some(other) => {
                image.names.retain(|name| !other.names.contains(name));
                other.names.append(&mut image.names);
            }
            None => images.push(image),
        }
    }
    let progress = image::progress(args.quiet);
    sink::write(args.output.as_deref(), sink::Holds::Files, |out| {
        Ok(store.save(&images, SaveFormat::OciArchive, out, &*progress)?)
    })?;
    Ok(0)
}
