//! Recovery: completes what killed processes left behind.
//!
//! Without a keeper no process polls for connections to sleeping containers, so the room holds the
//! keeper's pidfd and recovers when it has exited. A killed worker or command may have left a
//! container frozen, so the room also recovers after each failed job, and every ten minutes.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use dormouse_container::{Engine, Outcome};

use crate::error::Result;
use crate::notify::say;
use crate::room::{Done, Notice, Room};

/// Interval of recoveries.
const EVERY: Duration = Duration::from_secs(600);
/// Delay of the next recovery if the keeper was killed during one.
const AGAIN: Duration = Duration::from_millis(100);

/// The room of recovery.
#[derive(Debug)]
pub(crate) struct Recovery {
    engine: Rc<Engine>,
    /// The keeper's pidfd; readable when the keeper has exited.
    keeper: Option<OwnedFd>,
    next: Instant,
}

impl Recovery {
    /// Recovers for the first time.
    pub(crate) fn begin(engine: Rc<Engine>) -> Self {
        let mut recovery = Self { engine, keeper: None, next: Instant::now() };
        recovery.recover();
        recovery
    }

    fn recover(&mut self) {
        self.keeper = None;
        self.next = Instant::now() + EVERY;
        if let Err(e) = self.engine.recover() {
            say(&format!("cannot finish what was interrupted: {e}"));
        }
        self.find_keeper();
    }

    /// Finds the keeper and holds its pidfd. A keeper that was killed before that, such as during a
    /// recovery, is replaced in the next one.
    fn find_keeper(&mut self) {
        if self.keeper.is_some() {
            return;
        }
        self.keeper = self.engine.custodian_handle().ok().flatten();
        if self.keeper.is_none() && self.engine.is_orphaned().is_ok_and(|orphaned| orphaned) {
            self.next = self.next.min(Instant::now() + AGAIN);
        }
    }
}

impl Room for Recovery {
    fn name(&self) -> &'static str {
        "recovery"
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.keeper.iter().map(AsFd::as_fd).collect()
    }

    fn due(&self) -> Option<Instant> {
        Some(self.next)
    }

    fn turn(&mut self, _now: Instant, _ready: &[bool]) -> Result<Vec<Notice>> {
        self.recover();
        Ok(Vec::new())
    }

    fn notice(&mut self, _now: Instant, notice: &Notice) {
        match notice {
            Notice::Events => self.find_keeper(), // the keeper is there as soon as a container runs
            // The worker may have been killed in the middle of its job. ORDER: recovered before
            // other rooms read the state of the container.
            Notice::Ended(Done { fell: Outcome::Awake { .. }, .. }) => self.recover(),
            Notice::Ended(_) | Notice::MaySleep(..) | Notice::Wanted(_) => {}
        }
    }
}
