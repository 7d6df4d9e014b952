//! `dormouse logs`

use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::command::Global;
use crate::entry::Selection;
use crate::option::time;
use crate::session;
use crate::stream;
use crate::view::is_alive;

/// Polling interval while a followed container is asleep.
const ASLEEP_LOOK: Duration = Duration::from_millis(200);

/// Show the output of a container
///
/// Its standard output is shown on standard output, its errors on standard error, in the order in
/// which they were written. With --log-driver file, and with a terminal, the order between the two
/// is not recorded, nor is the time of a line.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Continue until it stops
    #[arg(long, short)]
    follow: bool,
    /// Only the last lines
    #[arg(long, short = 'n', value_name = "LINES", allow_hyphen_values = true)]
    tail: Option<String>,
    /// Only lines since then: RFC 3339, seconds since the epoch, or an age as 10m
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Only lines until then
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// With the time of each line
    #[arg(long, short)]
    timestamps: bool,
    /// Name or id
    #[arg(value_name = "CONTAINER")]
    name: String,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let tail = match args.tail.as_deref() {
        None | Some("all" | "-1") => None,
        Some(n) => match n.parse() {
            Ok(n) => Some(n),
            Err(_) => bail!("number of lines '{n}' is not valid: a number, or all"),
        },
    };
    let now_ms = time::now_ms();
    let moment =
        |text: &Option<String>| text.as_deref().map(|text| time::moment(text, now_ms)).transpose();
    let (since_ms, until_ms) = (moment(&args.since)?, moment(&args.until)?);
    let selection = Selection { tail, since_ms, until_ms, timestamps: args.timestamps };
    let engine = global.engine()?;
    let id = engine.find(&args.name)?;
    if engine.logs(&id)?.is_off {
        bail!("'{}' has no log: it was created with --log-driver none", args.name);
    }
    let mut follower = session::follow(&engine, &id, &selection, args.follow)?;
    follower.serve()?;
    // Later lines than `until` are not shown, so the program ends then.
    let rest = || {
        let ms = |until: i64| until.saturating_sub(time::now_ms()).max(0);
        until_ms.map(|until| Duration::from_millis(ms(until) as u64))
    };
    let is_over = || rest().is_some_and(|rest| rest.is_zero());
    if !args.follow {
        return Ok(0);
    }
    // An asleep container lives, and has another process after its wake; a removed one does not.
    while let Ok(found) = engine.inspect(&id)
        && is_alive(found.state)
        && !is_over()
    {
        // If the container stops between this check and the wait, its pidfd is readable at once.
        let pidfd = found.pid.and_then(|pid| dormouse_kernel::pidfd::open(pid).ok());
        let pidfd = pidfd.filter(|_| engine.inspect(&id).is_ok_and(|d| d.pid == found.pid));
        let Some(pidfd) = pidfd else {
            stream::wait_readable(&[follower.fd()], Some(ASLEEP_LOOK))?;
            follower.serve()?;
            continue;
        };
        while dormouse_kernel::pidfd::is_alive(&pidfd) && !is_over() {
            stream::wait_readable(&[pidfd.as_fd(), follower.fd()], rest())?;
            follower.serve()?;
        }
    }
    engine.flush_log(&id)?;
    follower.serve()?;
    Ok(0)
}
