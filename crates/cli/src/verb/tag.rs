//! `dormouse tag`

use anyhow::{Context, Result};

use crate::command::Global;

/// Give an image more names
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Name or id
    image: String,
    /// The new names
    #[arg(required = true)]
    name: Vec<String>,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let store = engine.images()?;
    let image = store.find(&args.image).with_context(|| format!("image '{}'", args.image))?;
    for name in &args.name {
        store.tag(&image, &name.parse()?)?;
    }
    Ok(0)
}
