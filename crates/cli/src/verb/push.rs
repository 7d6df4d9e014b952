//! `dormouse push`

use anyhow::{Context, Result, bail};
use dormouse_image::Compression;
use dormouse_image::registry::{PushOptions, push};
use dormouse_model::Reference;

use crate::command::Global;
use crate::registry::RegistryArgs;
use crate::{image, output};

/// Send an image to a registry and print the digest of its manifest
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Compression of layers: gzip, zstd, none (by default as the registry has them, else gzip)
    #[arg(long, value_name = "FORMAT")]
    compression: Option<String>,
    #[command(flatten)]
    registry: RegistryArgs,
    /// Show no progress
    #[arg(long, short)]
    quiet: bool,
    /// Name or id
    image: String,
    /// Destination, if that is not its name
    #[arg(value_name = "DESTINATION")]
    to: Option<String>,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let to: Reference = args.to.as_deref().unwrap_or(&args.image).parse()?;
    let compression = match args.compression.as_deref() {
        None => None,
        Some("gzip") => Some(Compression::Gzip),
        Some("zstd") => Some(Compression::Zstd),
        Some("none") => Some(Compression::None),
        Some(other) => bail!("compression '{other}' is not valid: gzip, zstd or none"),
    };
    let engine = global.engine()?;
    let store = engine.images()?;
    let image = store.find(&args.image).with_context(|| format!("image '{}'", args.image))?;
    let options = PushOptions { access: args.registry.access(&engine)?, compression };
    let progress = image::progress(args.quiet);
    let digest = push(store, &image, &to, &options, &*progress)
        .with_context(|| format!("cannot push '{to}'"))?;
    engine.record(dormouse_api::EventKind::Push, &image.id, &to.to_string(), &[]);
    output::line(&digest.to_string())?;
    Ok(0)
}
