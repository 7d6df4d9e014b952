//! `dormouse daemon`

use anyhow::Result;

use crate::command::Global;

/// Let containers fall asleep that are idle (--sleep-after, --drowsy-after), until SIGTERM
///
/// And those that wake wait until there is memory for them: others with --sleep-after sleep meanwhile,
/// the least used first.
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
    /// A swap file for the memory of those that are drowsy, made where it is not there; several on
    /// several disks share the work. By default those that config.toml says, or none
    #[arg(long, value_name = "FILE=SIZE")]
    swap: Vec<dormouse_daemon::SwapFile>,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let Args { memory, batch, swap } = args;
    dormouse_daemon::run(global.places(), dormouse_daemon::Settings { memory, batch, swap })?;
    Ok(0)
}
