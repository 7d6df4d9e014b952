//! Clocks that start with the host: the values of a container's clocks, and their continuation
//! elsewhere.
//!
//! A time namespace adds an offset to CLOCK_MONOTONIC and CLOCK_BOOTTIME (time_namespaces(7)), each
//! relative to the clock of the host, in whatever namespace it is read. A container that is
//! restored in the same boot keeps its offsets. In another boot, or on another host,
//! CLOCK_MONOTONIC continues from its saved value, as after a suspend, and CLOCK_BOOTTIME includes
//! the time in between.

use std::os::fd::AsFd;

pub(crate) use dormouse_kernel::clock::Offsets;
use dormouse_kernel::clock::now_unix_ms;
use dormouse_kernel::{namespace, proc};
use dormouse_record::{About, CLOCK_MAX_NS, Error, Result, Time};
use rustix::time::ClockId;

const SECOND_NS: i64 = 1_000_000_000;

/// The offsets of a process's own time namespace; `timens_offsets` contains those of its children's.
pub(crate) fn offsets_of_process(pid: u32) -> Result<Offsets> {
    let [own, for_children] =
        ["time", "time_for_children"].map(|name| namespace::link(pid, pid, name));
    if own == for_children {
        return offsets_of(pid);
    }
    let path = format!("/proc/{pid}/ns/time");
    let open = std::fs::File::open(&path).map_err(Error::file("cannot open", path))?;
    let text = namespace::clock_offsets(open.as_fd());
    text.map(|text| Offsets::parse(&text)).map_err(|e| Error::Elsewhere(e.to_string()))
}

/// [`Offsets::of`] with an error that names the file.
pub(crate) fn offsets_of(pid: impl std::fmt::Display) -> Result<Offsets> {
    let path = format!("/proc/{pid}/timens_offsets");
    Offsets::of(pid).map_err(Error::file("cannot read", path))
}

/// The offsets of clocks that are ahead of others by a `Time`.
pub(crate) fn ahead(offsets: Offsets, time: &Time) -> Offsets {
    Offsets {
        monotonic_ns: offsets.monotonic_ns.saturating_add(time.monotonic_ns),
        boottime_ns: offsets.boottime_ns.saturating_add(time.boottime_ns),
    }
}

/// Both clocks, for a process with these offsets.
pub(crate) fn now(offsets: Offsets) -> Result<Offsets> {
    let own = offsets_of("self")?;
    let read = |clock, own: i64, other: i64| {
        let now = rustix::time::clock_gettime(clock);
        now.tv_sec * SECOND_NS + now.tv_nsec - own + other
    };
    Ok(Offsets {
        monotonic_ns: read(ClockId::Monotonic, own.monotonic_ns, offsets.monotonic_ns),
        boottime_ns: read(ClockId::Boottime, own.boottime_ns, offsets.boottime_ns),
    })
}

/// Whether the host has not rebooted since a checkpoint was made: kernel and CPU are the same.
pub(crate) fn is_same_boot(about: &About) -> Result<bool> {
    let boot_id = proc::boot_id().map_err(|e| Error::Elsewhere(e.to_string()))?;
    Ok(boot_id == about.boot_id)
}

/// The offsets with which the clocks of a checkpoint continue here; `None` if a process that is
/// created here has them anyway.
pub(crate) fn here(about: &About, is_same_boot: bool) -> Result<Option<Offsets>> {
    let wanted = if is_same_boot {
        Offsets { monotonic_ns: about.monotonic_offset_ns, boottime_ns: about.boottime_offset_ns }
    } else {
        elsewhere(about, now(Offsets::default())?, now_unix_ms())
    };
    Ok((wanted != offsets_of("self")?).then_some(wanted))
}

/// The offsets in another boot, where the clocks of the host are `host`.
fn elsewhere(about: &About, host: Offsets, now_unix_ms: i64) -> Offsets {
    // The time of day may have been set back, and a record may contain any value.
    let passed_ms = now_unix_ms.saturating_sub(about.created_unix_ms).max(0);
    let boottime = about.boottime_ns.saturating_add(passed_ms.saturating_mul(1_000_000));
    Offsets {
        monotonic_ns: about.monotonic_ns - host.monotonic_ns,
        boottime_ns: boottime.min(CLOCK_MAX_NS) - host.boottime_ns,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_continue_in_another_boot() {
        let about = About {
            created_unix_ms: 1_000,
            monotonic_ns: 50 * SECOND_NS,
            boottime_ns: 60 * SECOND_NS,
            ..About::default()
        };
        let host = Offsets { monotonic_ns: 3 * SECOND_NS, boottime_ns: 3 * SECOND_NS };
        let found = elsewhere(&about, host, 5_000);
        assert_eq!(found.monotonic_ns, 47 * SECOND_NS);
        assert_eq!(found.boottime_ns, 61 * SECOND_NS, "four seconds have passed");
        assert_eq!(elsewhere(&about, host, 0).boottime_ns, 57 * SECOND_NS, "no time has passed");
        let liar = About { created_unix_ms: i64::MIN, ..about };
        assert_eq!(elsewhere(&liar, host, i64::MAX).boottime_ns, CLOCK_MAX_NS - 3 * SECOND_NS);
    }

    #[test]
    fn clocks_of_the_calling_process_match_the_kernel() {
        let own = Offsets::of("self").unwrap();
        let now = now(own).unwrap();
        let kernel = rustix::time::clock_gettime(ClockId::Monotonic);
        let kernel = kernel.tv_sec * SECOND_NS + kernel.tv_nsec;
        assert!(now.monotonic_ns <= kernel && kernel - now.monotonic_ns < 60 * SECOND_NS);
    }
}
