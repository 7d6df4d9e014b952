//! `dormouse pull`

use anyhow::Result;
use dormouse_image::registry::{Platform, PullOptions};
use dormouse_model::Reference;

use crate::command::Global;
use crate::registry::RegistryArgs;
use crate::{image, output};

/// Fetch an image from a registry and print its id
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Which of several images: linux/arm64, linux/arm/v7, ...
    #[arg(long, value_name = "OS/ARCHITECTURE")]
    platform: Option<String>,
    #[command(flatten)]
    registry: RegistryArgs,
    /// Show no progress
    #[arg(long, short)]
    quiet: bool,
    /// Its name, such as registry.example.org:5000/web:1.2
    name: String,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let reference: Reference = args.name.parse()?;
    let platform = args.platform.as_deref().map(str::parse::<Platform>).transpose()?;
    let engine = global.engine()?;
    let options = PullOptions { access: args.registry.access(&engine)?, platform };
    output::line(&image::fetch(&engine, &reference, &options, args.quiet)?)?;
    Ok(0)
}
