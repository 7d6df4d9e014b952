//! `dormouse restore`

use std::path::PathBuf;

use anyhow::{Result, bail};
use dormouse_container::From;

use crate::command::Global;
use crate::output;

/// Bring the processes of a stopped container back from a checkpoint
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of the checkpoint, the last unless given
    #[arg(long, short, value_name = "N")]
    number: Option<u32>,
    /// A checkpoint made with `--to`
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
    /// Name or id
    #[arg(value_name = "CONTAINER")]
    name: String,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let from = match (args.number, args.from) {
        (None, None) => From::Last,
        (Some(number), None) => From::Number(number),
        (None, Some(dir)) => From::Directory(dir),
        _ => bail!("give either --number or --from, not both"),
    };
    engine.restore(&engine.find(&args.name)?, &from)?.detach();
    output::line(&args.name)?;
    Ok(0)
}
