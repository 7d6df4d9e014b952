//! `dormouse daemon`

use anyhow::Result;

use crate::command::Global;

/// Suspend idle containers (--sleep-after, --drowsy-after), until SIGTERM
///
/// In addition a wake waits until there is memory for it. Meanwhile memory of idle containers with
/// --sleep-after goes to swap, if there is some, or they sleep, the least used first.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Memory for all awake containers, or 'off'; by default the setting of config.toml under
    /// [daemon], or three quarters of the host's
    #[arg(long, value_name = "SIZE")]
    memory: Option<dormouse_daemon::Memory>,
    /// Number of waiting wakes for which containers are suspended at once, 1 to 64; by default the
    /// setting of config.toml, or 4
    #[arg(long, value_name = "N")]
    batch: Option<dormouse_daemon::Batch>,
    /// How memory is reclaimed from idle containers: 'swap' pushes it out to the host's swap before
    /// they sleep, 'sleep' lets them sleep at once; by default the setting of config.toml, or
    /// 'swap'
    #[arg(long, value_name = "HOW")]
    reclaim: Option<dormouse_daemon::Reclaim>,
    /// Free memory of the host below which containers that use more than their guarantee (--memory-min) give memory
    /// (--evict), or 'off'; by default the setting of config.toml, or a 32nd of all, from 256m to 2g
    #[arg(long, value_name = "SIZE")]
    evict_below: Option<dormouse_daemon::Memory>,
    /// A swap file for the memory of idle and drowsy containers, created if missing; several on
    /// several disks share the work. By default those of config.toml, or none
    #[arg(long, value_name = "FILE=SIZE")]
    swap: Vec<dormouse_daemon::SwapFile>,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let Args { memory, batch, reclaim, evict_below, swap } = args;
    let settings = dormouse_daemon::Settings { memory, batch, reclaim, evict_below, swap };
    dormouse_daemon::run(global.places(), settings)?;
    Ok(0)
}
