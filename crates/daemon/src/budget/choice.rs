//! Which containers give memory when others need it, and how.
//!
//! **Suspend.** A suspended container gives all its memory but has to be restored as often as it is
//! used: worth = popularity x wake / memory. The container of the least worth is suspended first. A
//! wake has a fixed cost and a cost per byte.
//!
//! **Swap first.** If the host has free swap, an idle container's pages are pushed out and it
//! continues to run. That frees nearly as much and costs far less: nothing has to be re-created,
//! and the kernel reads the touched pages back. Only kernel memory remains, which a suspend frees
//! as well.
//!
//! **Order**, while a client waits: first idle containers that have been awake for a moment; after
//! some time all idle ones; then also active ones that have had their turn. An active container
//! that was suspended requests its wake at once and queues behind the others. Active containers
//! that do not fit together therefore take turns.

use std::time::{Duration, Instant};

use dormouse_container::{Idle, Request, Tier};
use dormouse_model::ContainerId;

use super::{Awake, Budget, Step, TURN};

/// The last resort.
pub(super) const SLEEP: Request = Request::Suspend(Tier::Asleep);
/// Fixed cost of a wake, in seconds.
const WAKE_S: f64 = 0.005;
/// Cost per byte: memory is read at some 1 GB/s.
const WAKE_S_PER_BYTE: f64 = 1e-9;
/// Cost of reading pages back from swap, in seconds: a fixed part, and a part per byte. The kernel
/// reads several pages at a time.
const SWAP_S: f64 = 0.0005;
const SWAP_S_PER_BYTE: f64 = 2e-9;
/// Minimum to push out; a quarter of the container's memory is another minimum.
const PUSHED_BYTES_MIN: u64 = 64 << 10;
/// Time for which a woken container is left alone, so that it does what it was woken for.
pub(super) const SETTLES: Duration = Duration::from_millis(20);
/// A sleep that a timer would end sooner is not worth its cost.
const WORTH: Duration = Duration::from_secs(1);

/// A container that is to give memory now.
#[derive(Debug)]
pub(crate) struct Choice {
    pub(crate) id: ContainerId,
    /// Push out its pages, or suspend it.
    pub(crate) asked: Request,
    /// The idle time required of it; None if it is suspended although it is active.
    pub(crate) idle: Option<Idle>,
}

/// The memory that one container can give, and its price.
struct Offer {
    id: ContainerId,
    asked: Request,
    is_busy: bool,
    /// Worth of keeping one byte of it in memory, in seconds per second.
    worth: f64,
    bytes: u64,
}

/// Urgency of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Need {
    /// No client waits: memory is freed ahead.
    Ahead,
    /// A client waits.
    Now,
    /// A client has waited for longer than [`super::PATIENCE`].
    Urgent,
}

impl Awake {
    /// Returns how this container can give memory, with so much free swap.
    fn offer(&self, now: Instant, id: &ContainerId, swap_bytes: u64) -> Offer {
        let is_busy = !self.is_idle();
        let pages = self.for_swap_bytes;
        let goes_to_swap = !is_busy
            && pages <= swap_bytes
            && pages >= PUSHED_BYTES_MIN.max(self.bytes / 4)
            && self.keeps_pages_until <= now;
        let (asked, bytes, once, per_byte) = match goes_to_swap {
            true => (Request::PagesOut, pages, SWAP_S, SWAP_S_PER_BYTE),
            false => (SLEEP, self.bytes.max(1), WAKE_S, WAKE_S_PER_BYTE),
        };
        let cost = once + bytes as f64 * per_byte;
        Offer {
            id: id.clone(),
            asked,
            is_busy,
            worth: self.popularity * cost / bytes as f64,
            bytes,
        }
    }

    /// Returns whether the container may be chosen for this urgency.
    fn may_go(&self, now: Instant, need: Need) -> bool {
        let awake = now.saturating_duration_since(self.since);
        let here = self.may_sleep && self.step == Step::Here && self.left_alone_until <= now;
        let goes = match need {
            Need::Ahead | Need::Now => self.is_idle() && awake >= SETTLES,
            Need::Urgent => self.is_idle() || awake >= TURN,
        };
        here && goes
    }
}

impl Budget {
    /// Chooses the containers that are to give memory so that `wanted` more bytes fit (or the
    /// reserve is free); at most `count_max` at once. They are recorded as leaving.
    pub(crate) fn choose(
        &mut self,
        now: Instant,
        need: Need,
        wanted: u64,
        count_max: usize,
    ) -> Vec<Choice> {
        let budget = match need {
            Need::Ahead => self.bytes - self.reserve_bytes(),
            Need::Now | Need::Urgent => self.bytes,
        };
        let leaving = self.awake.values().filter(|awake| awake.step == Step::Leaving);
        let (count, leaving) =
            leaving.fold((0, 0), |(count, sum), awake| (count + 1, sum + awake.leaving_bytes));
        let mut excess = self.taken_bytes().saturating_add(wanted).saturating_sub(budget + leaving);
        if excess == 0 || count >= count_max {
            return Vec::new();
        }
        let may_go = self.awake.iter().filter(|(_, awake)| awake.may_go(now, need));
        let mut all: Vec<Offer> =
            may_go.map(|(id, awake)| awake.offer(now, id, self.swap_bytes)).collect();
        all.sort_by(|a, b| a.is_busy.cmp(&b.is_busy).then_with(|| a.worth.total_cmp(&b.worth)));
        let (mut chosen, mut swap_bytes) = (Vec::new(), self.swap_bytes);
        for Offer { id, asked, is_busy, bytes, .. } in all.into_iter().take(count_max - count) {
            if asked == Request::PagesOut {
                let Some(rest) = swap_bytes.checked_sub(bytes) else { continue };
                swap_bytes = rest;
            }
            let Some(awake) = self.awake.get_mut(&id) else { continue };
            (awake.step, awake.leaving_bytes) = (Step::Leaving, bytes);
            let quiet = now.saturating_duration_since(awake.still_since);
            let idle = Idle { quiet, used_ns: awake.used_ns, worth: WORTH };
            chosen.push(Choice { id, asked, idle: (!is_busy).then_some(idle) });
            excess = excess.saturating_sub(bytes);
            if excess == 0 {
                break;
            }
        }
        chosen
    }
}
