//! `dormouse pause`

use anyhow::Result;
use dormouse_model::State;

use crate::command::Global;
use crate::target::Targets;

/// Freeze all processes of containers
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    targets: Targets,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let runs = |state| matches!(state, State::Running | State::Drowsy);
    args.targets.each(global, runs, |engine, id| Ok(engine.pause(id)?))
}
