//! `dormouse logs`

use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::command::Global;
use crate::log::Follower;
use crate::session;
use crate::stream::{self, Watch};
use crate::view::is_alive;

/// Polling interval while a followed container is asleep.
const ASLEEP_LOOK: Duration = Duration::from_millis(200);

/// Show the output of a container
///
/// Its standard output is shown on standard output, its errors on standard error. The order between
/// the two is not recorded, nor is the time of a line.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Continue until it stops
    #[arg(long, short)]
    follow: bool,
    /// Only the last lines of each stream
    #[arg(long, short = 'n', value_name = "LINES", allow_hyphen_values = true)]
    tail: Option<String>,
    /// Only lines since then (not recorded yet)
    #[arg(long, value_name = "TIME", hide = true)]
    since: Option<String>,
    /// With the time of each line (not recorded yet)
    #[arg(long, short, hide = true)]
    timestamps: bool,
    /// Name or id
    #[arg(value_name = "CONTAINER")]
    name: String,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    if args.since.is_some() || args.timestamps {
        bail!(
            "the time of a line is not recorded: programs write to their log themselves; use --tail"
        );
    }
    let tail = match args.tail.as_deref() {
        None | Some("all" | "-1") => None,
        Some(n) => match n.parse() {
            Ok(n) => Some(n),
            Err(_) => bail!("number of lines '{n}' is not valid: a number, or all"),
        },
    };
    let engine = global.engine()?;
    let id = engine.find(&args.name)?;
    let logs = session::open_logs(&engine, &id, tail)?;
    let mut follower = Follower::new(logs)?;
    follower.show()?;
    if !args.follow {
        return Ok(0);
    }
    // An asleep container lives, and has another process after its wake; a removed one does not.
    while let Ok(found) = engine.inspect(&id)
        && is_alive(found.state)
    {
        // If the container stops between this check and the wait, its pidfd is readable at once.
        let pidfd = found.pid.and_then(|pid| dormouse_kernel::pidfd::open(pid).ok());
        let pidfd = pidfd.filter(|_| engine.inspect(&id).is_ok_and(|d| d.pid == found.pid));
        let Some(pidfd) = pidfd else {
            stream::wait_readable(&[follower.fd()], Some(ASLEEP_LOOK))?;
            follower.serve()?;
            continue;
        };
        while dormouse_kernel::pidfd::is_alive(&pidfd) {
            stream::wait_readable(&[pidfd.as_fd(), follower.fd()], None)?;
            follower.serve()?;
        }
    }
    follower.show()?;
    Ok(0)
}
