//! Waiting for a cgroup: until it is no longer in use, or reports an event.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::dir::{Dir, field};
use crate::error::{Explain, Result as CallResult};

/// Retries on EBUSY until `timeout` has passed.
pub(super) fn retry_busy<T>(
    timeout: Duration,
    mut call: impl FnMut() -> CallResult<T>,
) -> CallResult<T> {
    let deadline = Instant::now() + timeout;
    let mut pause = Duration::from_micros(50);
    loop {
        match call() {
            Err(e) if e.errno() == libc::EBUSY && Instant::now() < deadline => {}
            other => return other,
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(10));
    }
}

/// Waits until `cgroup.events` contains `name value`; `false` at the deadline.
pub(super) fn wait_event(dir: &Dir, name: &str, value: u64, deadline: Instant) -> CallResult<bool> {
    let file = dir.open_file("cgroup.events", OFlags::RDONLY)?;
    let show = || format!("{:?}", dir.path().join("cgroup.events"));
    loop {
        // ORDER: reading arms the notification, so no change between reading and polling is lost.
        if event(&file, name).explain("pread64", show)? == Some(value) {
            return Ok(true);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        let timeout = Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(&file, PollFlags::PRI)], Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e).explain("poll", show),
        }
    }
}

/// Reads one value of `cgroup.events`; `None` if it is missing.
fn event(file: &OwnedFd, name: &str) -> Result<Option<u64>, Errno> {
    let mut bytes = [0; 256];
    let n = match rustix::io::pread(file, &mut bytes, 0) {
        // The cgroup was removed: no process is in it.
        Err(Errno::NODEV) => return Ok(Some(0)),
        other => other?,
    };
    let text = String::from_utf8_lossy(&bytes[..n]);
    Ok(text.contains(name).then(|| field(&text, name)))
}
