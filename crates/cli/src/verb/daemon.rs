//! `dormouse daemon`

use anyhow::Result;

use crate::command::Global;

/// Let containers fall asleep that are idle (--sleep-after, --drowsy-after), until SIGTERM
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(global: &Global, _: Args) -> Result<u8> {
    dormouse_daemon::run(global.places())?;
    Ok(0)
}
