//! `dormouse unpause`

use anyhow::Result;
use dormouse_model::State;

use crate::command::Global;
use crate::target::Targets;

/// Resume paused containers
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    targets: Targets,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let is_paused = |state| state == State::Paused;
    args.targets.each(global, is_paused, |engine, id| Ok(engine.unpause(id)?))
}
