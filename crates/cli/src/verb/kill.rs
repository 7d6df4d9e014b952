//! `dormouse kill`

use anyhow::Result;

use crate::command::Global;
use crate::option::signal::signal;
use crate::target::Targets;
use crate::view::is_alive;

/// Send a signal to the first process of containers
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Name or number of the signal
    #[arg(long, short, value_name = "SIGNAL", default_value = "KILL")]
    signal: String,
    #[command(flatten)]
    targets: Targets,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let number = signal(&args.signal)?;
    args.targets.each(global, is_alive, |engine, id| Ok(engine.kill(id, number)?))
}
