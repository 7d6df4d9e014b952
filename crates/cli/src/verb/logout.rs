//! `dormouse logout`

use anyhow::{Result, bail};
use dormouse_image::registry::logout;

use crate::command::Global;
use crate::registry;

/// Remove the stored user and password for a registry
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The registry, such as registry.example.org:5000
    registry: String,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    if !logout(&args.registry, &registry::access(engine.places().etc.clone()))? {
        bail!("no user is stored for registry '{}'", args.registry);
    }
    Ok(0)
}
