//! `dormouse attach`

use anyhow::Result;

use crate::command::Global;
use crate::create::AttachArgs;
use crate::session;

/// Attach to the terminal, or to input and output, of a running container
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Do not forward standard input
    #[arg(long)]
    no_stdin: bool,
    #[command(flatten)]
    attach: AttachArgs,
    /// Name or id
    #[arg(value_name = "CONTAINER")]
    name: String,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let id = engine.find(&args.name)?;
    Ok(session::attach(&engine, &id, !args.no_stdin, &args.attach)?.code())
}
