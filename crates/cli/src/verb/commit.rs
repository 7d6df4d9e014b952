//! `dormouse commit`

use std::os::fd::AsFd;

use anyhow::Result;
use dormouse_image::Commit;

use crate::command::Global;
use crate::{image, layers, output};

/// Make an image from a container and print its id
///
/// A running container is frozen meanwhile.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Change its configuration, as a Dockerfile does: CMD, ENTRYPOINT, ENV, LABEL, USER, ...
    #[arg(long, short, value_name = "INSTRUCTION")]
    change: Vec<String>,
    /// Author of the image
    #[arg(long, short)]
    author: Option<String>,
    /// Description of the change
    #[arg(long, short)]
    message: Option<String>,
    /// Show no progress
    #[arg(long, short)]
    quiet: bool,
    /// Name or id
    #[arg(value_name = "CONTAINER")]
    container: String,
    /// Name of the image
    #[arg(value_name = "IMAGE")]
    name: Option<String>,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let id = engine.find(&args.container)?;
    let commit = Commit {
        name: args.name.as_deref().map(str::parse).transpose()?,
        author: args.author,
        message: args.message,
        changes: args.change,
        undated: false,
    };
    let made = engine.while_frozen(&id, || {
        let config = engine.config(&id)?;
        let layers = layers::open(&engine, &config)?;
        let progress = image::progress(args.quiet);
        let store = engine.images()?;
        let upper = layers.own.upper.as_fd();
        anyhow::Ok(store.commit(
            layers.image.as_ref(),
            &layers.lower,
            upper,
            &config.ids,
            &commit,
            &*progress,
        )?)
    })?;
    output::line(&made?)?;
    Ok(0)
}
