//! Who is to give memory when others need it, and how.
//!
//! **Who sleeps.** Whoever is put to sleep gives its memory, and will cost its wake as often as it is
//! used: worth = popularity x wake / memory, and the least worth sleeps first. A wake has a price of its
//! own and one by the byte.
//!
//! **Swap first.** Where the host has swap with room in it, whoever is idle need not sleep at once: its pages
//! are pushed out, and it goes on. That gives nearly as much and costs far less, since nothing is to be made
//! again: the kernel reads what is touched. What is left then is the kernel's part, and sleep gives that.
//!
//! **In turn**, while somebody waits: those that are idle and have been awake for a moment; when that
//! is of no help for a while, all that are idle; then those at work, too, that had their time. One that
//! was at work asks for its wake at once and waits behind the others: where the busy do not fit
//! together, each has its turn.

use std::time::{Duration, Instant};

use dormouse_container::{Asked, Idle, Tier};
use dormouse_model::ContainerId;

use super::{Awake, Room, Step, TURN};

/// What is asked of whom nothing less helps.
pub(super) const SLEEP: Asked = Asked::Fall(Tier::Asleep);
/// What a wake costs whatever it brings back, in seconds.
const WAKE_S: f64 = 0.005;
/// What each byte adds: memory is read at some 1 GB/s.
const WAKE_S_PER_BYTE: f64 = 1e-9;
/// What it costs to have pages read again from swap, whatever they are, in seconds, and for each byte: the
/// kernel reads some of them at a time.
const SWAP_S: f64 = 0.0005;
const SWAP_S_PER_BYTE: f64 = 2e-9;
/// What is less than this is not pushed out, nor what is less than a quarter of all.
const PUSHED_BYTES_MIN: u64 = 64 << 10;
/// How long one is left where it is that has been woken, so that it does what it was woken for.
pub(super) const SETTLES: Duration = Duration::from_millis(20);
/// A sleep that a timer ends sooner is not worth it.
const WORTH: Duration = Duration::from_secs(1);

/// One that is to give memory now.
#[derive(Debug)]
pub(crate) struct Choice {
    pub(crate) id: ContainerId,
    /// How: its pages go to swap, or it sleeps.
    pub(crate) asked: Asked,
    /// What it is to be still; none where it sleeps though it is at work.
    pub(crate) idle: Option<Idle>,
}

/// How one could give memory.
struct Offer {
    id: ContainerId,
    asked: Asked,
    is_busy: bool,
    /// What it is worth to have a byte of that in memory, in seconds a second.
    worth: f64,
    bytes: u64,
}

/// How much somebody who waits may ask of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Need {
    /// Nobody waits: room is made ahead.
    Ahead,
    /// Somebody waits.
    Now,
    /// Somebody has waited for a while.
    Urgent,
}

impl Awake {
    /// How it can give memory that may go, where so much has room in swap.
    fn offer(&self, now: Instant, id: &ContainerId, swap_bytes: u64) -> Offer {
        let is_busy = !self.is_idle();
        let pages = self.for_swap_bytes;
        let goes_to_swap = !is_busy
            && pages <= swap_bytes
            && pages >= PUSHED_BYTES_MIN.max(self.bytes / 4)
            && self.keeps_pages_until <= now;
        let (asked, bytes, once, per_byte) = match goes_to_swap {
            true => (Asked::PagesOut, pages, SWAP_S, SWAP_S_PER_BYTE),
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

    /// Whether it may be put to sleep now, where so much is asked of it.
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

impl Room {
    /// Who is to give memory so that `wanted` bytes more have room, or that there is some ahead; at most so
    /// many at once. They are leaving from now on.
    pub(crate) fn choose(
        &mut self,
        now: Instant,
        need: Need,
        wanted: u64,
        count_max: usize,
    ) -> Vec<Choice> {
        let room = match need {
            Need::Ahead => self.bytes - self.reserve_bytes(),
            Need::Now | Need::Urgent => self.bytes,
        };
        let leaving = self.awake.values().filter(|awake| awake.step == Step::Leaving);
        let (count, leaving) =
            leaving.fold((0, 0), |(count, sum), awake| (count + 1, sum + awake.leaving_bytes));
        let mut excess = self.taken_bytes().saturating_add(wanted).saturating_sub(room + leaving);
        if excess == 0 || count >= count_max {
            return Vec::new();
        }
        let may_go = self.awake.iter().filter(|(_, awake)| awake.may_go(now, need));
        let mut all: Vec<Offer> =
            may_go.map(|(id, awake)| awake.offer(now, id, self.swap_bytes)).collect();
        all.sort_by(|a, b| a.is_busy.cmp(&b.is_busy).then_with(|| a.worth.total_cmp(&b.worth)));
        let (mut chosen, mut swap_bytes) = (Vec::new(), self.swap_bytes);
        for Offer { id, asked, is_busy, bytes, .. } in all.into_iter().take(count_max - count) {
            if asked == Asked::PagesOut {
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
