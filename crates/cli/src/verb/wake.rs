//! `dormouse wake`

use anyhow::Result;
use dormouse_container::Reason;
use dormouse_model::State;

use crate::command::Global;
use crate::target::Targets;

/// Wake containers that are asleep or drowsy
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    targets: Targets,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let sleeps = |state| matches!(state, State::Asleep | State::Drowsy);
    args.targets.each(global, sleeps, |engine, id| Ok(engine.wake(id, Reason::Operator)?))
}
