//! `dormouse sleep`

use anyhow::Result;
use dormouse_model::State;

use crate::command::Global;
use crate::target::Targets;

/// Put running containers to sleep: their processes become files, and whoever calls wakes them
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    targets: Targets,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    args.targets.each(
        &engine,
        |state| state == State::Running,
        |id| {
            engine.sleep(id)?;
            Ok(())
        },
    )
}
