//! `dormouse restart`

use anyhow::Result;

use super::start;
use crate::command::Global;
use crate::option::stop::StopArgs;
use crate::target::Targets;
use crate::view::is_alive;

/// Stop containers and start them again
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    stop: StopArgs,
    #[command(flatten)]
    targets: Targets,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let timeout = args.stop.timeout()?;
    args.targets.each(global, is_alive, |engine, id| {
        engine.stop(id, timeout)?;
        start::detached(engine, id)
    })
}
