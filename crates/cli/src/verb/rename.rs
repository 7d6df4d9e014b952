//! `dormouse rename`

use anyhow::Result;

use crate::command::Global;

/// Rename a container
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Name or id
    #[arg(value_name = "CONTAINER")]
    container: String,
    /// The new name
    name: String,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    engine.rename(&engine.find(&args.container)?, &args.name.parse()?)?;
    Ok(0)
}
