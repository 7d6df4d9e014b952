//! `dormouse stop`

use anyhow::Result;

use crate::command::Global;
use crate::option::stop::StopArgs;
use crate::target::Targets;
use crate::view::is_alive;

/// Stop containers, and kill them after a timeout
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    stop: StopArgs,
    #[command(flatten)]
    targets: Targets,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let timeout = args.stop.timeout()?;
    args.targets.each(global, is_alive, |engine, id| Ok(engine.stop(id, timeout)?))
}
