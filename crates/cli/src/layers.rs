//! The layers of a container, for verbs that read or keep its files.

use anyhow::{Context, Result};
use dormouse_container::{Engine, Writable};
use dormouse_image::{Image, Lower};
use dormouse_model::{Config, RootSource};

use rustix::fs::Mode;

use crate::session::DIRECTORY;

/// The layers of a container's root.
#[derive(Debug)]
pub(crate) struct Layers {
    pub(crate) image: Option<Image>,
    pub(crate) lower: Lower,
    pub(crate) own: Writable,
}

/// Opens the layers of a container.
pub(crate) fn open(engine: &Engine, config: &Config) -> Result<Layers> {
    let image = engine.image_of(config)?;
    let lower = match (&config.spec.root, &image) {
        (RootSource::Directory(dir), _) => Lower::directory(
            rustix::fs::open(dir, DIRECTORY, Mode::empty())
                .with_context(|| format!("cannot open '{}'", dir.display()))?,
        ),
        (_, Some(image)) => engine.images()?.rootfs(&image.id)?,
        (RootSource::Image { reference, .. }, None) => {
            anyhow::bail!("image '{reference}' of container '{}' is gone", config.name)
        }
    };
    let own = engine.writable(config).context("cannot open the container's own files")?;
    Ok(Layers { image, lower, own })
}
