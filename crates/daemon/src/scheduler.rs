//! The scheduler of containers: loads it where the settings say so, gives it the contracts, and notices its end. The
//! room of contracts ([`crate::govern`]) calls it.
//!
//! While the scheduler is loaded, the room changes no weights: the scheduler repays reservations at each wakeup. It
//! ends with the daemon. If it cannot be loaded, or the kernel unloads it, the room governs by weights from then on.

use std::rc::Rc;
use std::time::{Duration, Instant};

use dormouse_container::{CpuScheduler, Engine};
use dormouse_kernel::cgroup::Hierarchy;
use dormouse_model::{ContainerId, Cpu};

use crate::error::Result;
use crate::notify::say;

/// Time between looks at the scheduler.
const LOOKS_EVERY: Duration = Duration::from_secs(1);

/// The scheduler, if one is loaded.
#[derive(Debug)]
pub(crate) struct Ext {
    loaded: Option<CpuScheduler>,
    looked: Instant,
}

impl Ext {
    /// Loads it if the settings say so.
    pub(crate) fn begin(engine: &Rc<Engine>, now: Instant) -> Self {
        let loaded = engine.begin_scheduler().unwrap_or_else(|e| {
            say(&format!("no scheduler, CPU reservations are kept by weights: {}", chain(&e)));
            None
        });
        if loaded.is_some() {
            say("the scheduler of containers is loaded");
        }
        Self { loaded, looked: now }
    }

    pub(crate) fn is_loaded(&self) -> bool {
        self.loaded.is_some()
    }

    /// The time of the next look.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.is_loaded().then(|| self.looked + LOOKS_EVERY)
    }

    /// Returns whether the kernel has unloaded it since the last look.
    pub(crate) fn look(&mut self, now: Instant) -> bool {
        let Some(loaded) = &self.loaded else { return false };
        self.looked = now;
        let reason = match loaded.ended() {
            Ok(None) => return false,
            Ok(Some(reason)) => reason,
            Err(e) => chain(&e),
        };
        say(&format!(
            "the kernel has unloaded the scheduler, CPU reservations are kept by weights: {reason}"
        ));
        self.loaded = None;
        true
    }

    /// Gives it the contracts of the running containers with a reservation.
    pub(crate) fn keep(&self, cgroups: &Hierarchy, reserved: &[(ContainerId, Cpu)]) -> Result<()> {
        self.loaded.as_ref().map_or(Ok(()), |loaded| Ok(loaded.keep(cgroups, reserved)?))
    }
}

/// An error with its causes, in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
