//! `dormouse export`

use std::os::fd::AsFd;
use std::path::PathBuf;

use anyhow::Result;

use crate::command::Global;
use crate::{layers, sink};

/// Write the files of a container as a tar
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Output file; standard output by default
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Name or id
    #[arg(value_name = "CONTAINER")]
    name: String,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let config = engine.config(&engine.find(&args.name)?)?;
    let layers = layers::open(&engine, &config)?;
    let store = engine.images()?;
    sink::write(args.output.as_deref(), sink::Holds::Files, |out| {
        Ok(store.export(&layers.lower, Some(layers.own.upper.as_fd()), &config.ids, out)?)
    })?;
    Ok(0)
}
