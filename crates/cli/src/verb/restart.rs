//! `dormouse restart`

use std::time::Duration;

use anyhow::Result;

use super::start;
use crate::command::Global;
use crate::create::stop_timeout;
use crate::output;
use crate::target::Targets;
use crate::view::is_alive;

/// Stop containers and start them again
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Seconds until a stop becomes a kill, -1 for never
    #[arg(long, short, value_name = "SECONDS", alias = "timeout", allow_hyphen_values = true)]
    time: Option<String>,
    #[command(flatten)]
    targets: Targets,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let timeout = stop_timeout(args.time.as_deref())?.map(|s| Duration::from_secs(s.into()));
    args.targets.each(&engine, is_alive, |id, name| {
        engine.stop(id, timeout)?;
        start::detached(&engine, id)?;
        output::line(name)
    })
}
