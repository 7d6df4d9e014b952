//! `dormouse container exists` and `dormouse image exists`

use anyhow::Result;
use dormouse_container::Error;
use dormouse_kernel::ErrorKind;

use crate::command::Global;

/// Test whether a container or an image exists: the exit code is 0 or 1
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Kind of the object
    #[arg(long = "type", value_name = "KIND", value_parser = ["container", "image"])]
    kind: String,
    /// Name or id
    name: String,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    if args.kind == "container" {
        return match engine.find(&args.name) {
            Ok(_) => Ok(0),
            Err(Error::NoContainer(_)) => Ok(1),
            Err(e) => Err(e.into()),
        };
    }
    match engine.images()?.find(&args.name) {
        Ok(_) => Ok(0),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(1),
        Err(e) => Err(e.into()),
    }
}
