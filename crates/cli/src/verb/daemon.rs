//! `dormouse daemon`

use anyhow::Result;

use crate::command::Global;

/// Let containers fall asleep that are idle (--sleep-after, --drowsy-after), until SIGTERM
///
/// And those that wake wait until there is memory for them: pages of others with --sleep-after go to swap
/// meanwhile, if there is some, or they sleep, the least used first.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Memory for all that is awake, or 'off'; by default what config.toml says under [daemon], or
    /// three quarters of the host's
    #[arg(long, value_name = "SIZE")]
    memory: Option<dormouse_daemon::Memory>,
    /// For how many that wait for memory others are put to sleep at once, 1 to 64; by default what
    /// config.toml says, or 4
    #[arg(long, value_name = "N")]
    batch: Option<dormouse_daemon::Batch>,
    /// How memory is had of the idle where others need it: 'swap' pushes it out to the swap that the host has
    /// before they sleep, 'sleep' has them sleep at once; by default what config.toml says, or 'swap'
    #[arg(long, value_name = "HOW")]
    reclaim: Option<dormouse_daemon::Reclaim>,
    /// A swap file for the memory of those that are idle or drowsy, made where it is not there; several on
    /// several disks share the work. By default those that config.toml says, or none
    #[arg(long, value_name = "FILE=SIZE")]
    swap: Vec<dormouse_daemon::SwapFile>,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let Args { memory, batch, reclaim, swap } = args;
    let settings = dormouse_daemon::Settings { memory, batch, reclaim, swap };
    dormouse_daemon::run(global.places(), settings)?;
    Ok(0)
}
