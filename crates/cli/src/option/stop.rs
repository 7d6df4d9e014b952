//! Time limit for a container to stop.

use std::time::Duration;

use super::Invalid;

/// The option of `stop` and `restart`.
#[derive(Debug, clap::Args)]
pub(crate) struct StopArgs {
    /// Seconds until a stop becomes a kill, -1 for never
    #[arg(long, short, value_name = "SECONDS", alias = "timeout", allow_hyphen_values = true)]
    time: Option<String>,
}

impl StopArgs {
    /// Returns the given timeout; `None` means the container's own.
    pub(crate) fn timeout(&self) -> Result<Option<Duration>, Invalid> {
        let seconds = self.time.as_deref().map(stop_timeout).transpose()?;
        Ok(seconds.map(|s| Duration::from_secs(s.into())))
    }
}

/// Reads the seconds until a stop becomes a kill; -1 is never.
pub(crate) fn stop_timeout(text: &str) -> Result<u32, Invalid> {
    match text {
        "-1" => Ok(u32::MAX),
        t => t.parse().map_err(|_| Invalid::new("timeout", t, "a number of seconds, or -1")),
    }
}
