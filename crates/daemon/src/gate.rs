//! The gatekeeper: whoever wakes a container waits here until there is memory for it.
//!
//! First come, first served: those that come later wait behind the first, however little they need, so
//! nobody waits for ever. Who has more of the processors by its record (`--cpu-weight`) has so much to do in
//! time: twice the weight stands before those who came a quarter of a second earlier, and no weight before
//! those who came some seconds earlier. For the first ones in the line others give their pages to swap, or are put
//! to sleep ([`crate::room`] says which), by the same processes that put the idle to sleep.
//!
//! **Looks.** What is awake is what has a directory below `RUN/c`; each has its CPU time and its memory
//! looked at, three small files: ten times a second while there is little room, more often while
//! somebody waits; and never for more than a hundredth of the time (a tenth while somebody waits). At
//! leisure that is a thousandth, and one file tells every two seconds how much all of them take.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use dormouse_container::{Answer, Asker, Engine, Gate as Door, Heard, TOLD_EVERY};
use dormouse_kernel::cgroup::{CpuTime, MemoryInUse};
use dormouse_kernel::swap;
use dormouse_model::ContainerId;

use crate::room::{Choice, Need, PATIENCE, Room};
use crate::{Batch, Reclaim};

/// How often all that is awake is looked at: at leisure, while there is little room, and while somebody
/// waits for some.
const LOOKS: [Duration; 3] =
    [Duration::from_secs(2), Duration::from_millis(100), Duration::from_millis(5)];
/// How many times what a look takes has to pass before the next, at least.
const LOOK_SHARES: [u32; 3] = [1000, 100, 10];
/// How often it is looked how much all take together.
const GLANCES: Duration = Duration::from_secs(2);
/// How much earlier one has come, as it were, with twice the weight of another.
const TWICE: Duration = Duration::from_millis(250);
/// The weight of one that says nothing of it (cgroups(7)).
const WEIGHT: f64 = 100.0;
/// After how long it is told that somebody waits.
const LONG: Duration = Duration::from_secs(2);

/// Somebody who has come.
#[derive(Debug)]
struct Guest {
    asker: Asker,
    /// Whom it is to wake, once it has said so.
    id: Option<ContainerId>,
    has_leave: bool,
    since: Instant,
    /// Where it stands in the line: when it has come, or earlier where it has more weight.
    place: Instant,
    told: Instant,
}

/// Where one with a weight stands that comes now.
fn place(now: Instant, weight: Option<u32>) -> Instant {
    let doublings = weight.map_or(0.0, |weight| (f64::from(weight) / WEIGHT).log2());
    let ahead = TWICE.mul_f64(doublings.abs());
    match doublings < 0.0 {
        true => now + ahead,
        false => now.checked_sub(ahead).unwrap_or(now),
    }
}

/// All of it.
#[derive(Debug)]
pub(crate) struct Gate {
    door: Door,
    memory: MemoryInUse,
    room: Room,
    /// For how many of those that wait room is made at once, and how many are put to sleep for it.
    batch: usize,
    /// Pages of the idle go to swap first.
    swaps: bool,
    /// In their order.
    guests: Vec<Guest>,
    looked: Instant,
    look_took: Duration,
    glanced: Instant,
    /// All together take so much that there is little room.
    is_tight: bool,
    /// Since when more is taken than there is, though nobody waits.
    over_since: Option<Instant>,
    /// Who was told of last as waiting for long.
    lamented: Option<ContainerId>,
}

impl Gate {
    /// Opens the gate to so much memory.
    pub(crate) fn open(
        engine: &Engine,
        memory: MemoryInUse,
        room_bytes: u64,
        (batch, reclaim): (Batch, Reclaim),
    ) -> dormouse_container::Result<Self> {
        Ok(Self {
            door: Door::open(engine)?,
            memory,
            room: Room::of(room_bytes),
            batch: batch.count(),
            swaps: reclaim == Reclaim::Swap,
            guests: Vec::new(),
            looked: Instant::now(),
            look_took: Duration::ZERO,
            glanced: Instant::now(),
            is_tight: true,
            over_since: None,
            lamented: None,
        })
    }

    /// What becomes readable when there is something to do.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::once(self.door.as_fd()).chain(self.guests.iter().map(|it| it.asker.as_fd()))
    }

    fn waiting(&self) -> impl Iterator<Item = (&Guest, &ContainerId)> {
        let waits = |it: &&Guest| !it.has_leave;
        self.guests.iter().filter(waits).filter_map(|it| Some((it, it.id.as_ref()?)))
    }

    /// When there is something to do though nobody comes.
    pub(crate) fn next(&self) -> Instant {
        let told = self.waiting().map(|(guest, _)| guest.told + TOLD_EVERY);
        told.fold(self.next_look().min(self.glanced + GLANCES), Instant::min)
    }

    fn next_look(&self) -> Instant {
        let is_tight = self.is_tight || self.room.is_tight_with(self.room.taken_bytes());
        let is_wanted = self.waiting().next().is_some() || self.over_since.is_some();
        let haste = match (is_wanted, is_tight) {
            (true, _) => 2,
            (false, true) => 1,
            (false, false) => 0,
        };
        self.looked + LOOKS[haste].max(self.look_took * LOOK_SHARES[haste])
    }

    /// Hears who has come and gone, gives leave, and says who is to sleep.
    pub(crate) fn serve(&mut self, engine: &Engine, cpu: &CpuTime) -> Vec<Choice> {
        let now = Instant::now();
        while let Some(asker) = self.door.accept() {
            let (id, has_leave, since) = (None, false, now);
            let guest = Guest { asker, id, has_leave, since, place: now, told: now };
            self.guests.push(guest);
        }
        let room = &mut self.room;
        self.guests.retain_mut(|guest| match guest.asker.hear() {
            Heard::Nothing => true,
            Heard::Wakes(id) => {
                let config = engine.config(&id).ok();
                guest.place = place(guest.since, config.and_then(|it| it.limits.cpu_weight));
                guest.id = Some(id);
                true
            }
            Heard::Gone => {
                if let Some(id) = guest.id.as_ref().filter(|_| guest.has_leave) {
                    room.arrived(now, id);
                }
                false
            }
        });
        self.guests.sort_by_key(|guest| guest.place);
        if self.glanced + GLANCES <= now {
            self.glanced = now;
            let all = self.memory.of_all();
            self.is_tight = all.is_ok_and(|all| self.room.is_tight_with(all.bytes));
        }
        if self.next_look() <= now {
            self.look(now, engine, cpu);
        }
        self.give_leave(now, engine);
        self.choose(now, engine)
    }

    /// Looks at all that is awake.
    fn look(&mut self, now: Instant, engine: &Engine, cpu: &CpuTime) {
        let Ok(ids) = engine.started() else { return };
        for id in &ids {
            let used_ns = cpu.of(id.as_str()).ok().flatten();
            let in_use = self.memory.of(id.as_str()).ok().flatten();
            if let (Some(used_ns), Some(in_use)) = (used_ns, in_use) {
                self.room.look(now, id, used_ns, in_use, || may_sleep(engine, id));
            }
        }
        if self.swaps {
            let areas = swap::areas().unwrap_or_default();
            let free = |area: &swap::Area| area.bytes.saturating_sub(area.used_bytes);
            self.room.has_swap(areas.iter().map(free).sum());
        }
        let there: HashSet<&ContainerId> = ids.iter().collect();
        self.room.only(now, |id| there.contains(id));
        (self.looked, self.look_took) = (Instant::now(), now.elapsed());
    }

    /// ORDER: who stands before another has leave first.
    fn give_leave(&mut self, now: Instant, engine: &Engine) {
        for guest in self.guests.iter_mut().filter(|guest| !guest.has_leave) {
            let Some(id) = &guest.id else { continue };
            // One that falls asleep just now sleeps first.
            if self.room.is_leaving(id) {
                break;
            }
            let bytes = self.room.needs(id, || engine.asleep_bytes(id));
            if !self.room.knows(id) && !self.room.has_room(now, bytes) {
                break;
            }
            guest.has_leave = true;
            guest.asker.tell(Answer::Go);
            self.room.admit(now, id.clone(), may_sleep(engine, id), bytes);
        }
        for guest in self.guests.iter_mut().filter(|guest| !guest.has_leave && guest.id.is_some()) {
            if now - guest.told >= TOLD_EVERY {
                guest.asker.tell(Answer::Wait);
                guest.told = now;
            }
        }
    }

    fn choose(&mut self, now: Instant, engine: &Engine) -> Vec<Choice> {
        let first = self.waiting().next().map(|(guest, id)| (guest.since, id.clone()));
        let is_over = self.room.taken_bytes() > self.room.room_bytes();
        self.over_since = is_over.then(|| self.over_since.unwrap_or(now));
        let Some((since, id)) = first else {
            // It has grown, or was started, or awake before there was a daemon.
            let need = match self.over_since {
                None => Need::Ahead,
                Some(since) if now - since < PATIENCE => Need::Now,
                Some(_) => Need::Urgent,
            };
            return self.room.choose(now, need, 0, self.batch);
        };
        let waits = now - since;
        if waits >= LONG && self.lamented.as_ref() != Some(&id) {
            let (taken, all) = (self.room.taken_bytes() >> 20, self.room.room_bytes() >> 20);
            crate::say(&format!("{} waits: {taken} of {all} MiB are taken", id.short()));
            self.lamented = Some(id);
        }
        let needs = |id: &ContainerId| self.room.needs(id, || engine.asleep_bytes(id));
        let wanted = self.waiting().take(self.batch).map(|(_, id)| needs(id)).sum();
        let need = if waits >= PATIENCE { Need::Urgent } else { Need::Now };
        self.room.choose(now, need, wanted, self.batch)
    }

    /// Whose fate the daemon knows of.
    pub(crate) fn room(&mut self) -> &mut Room {
        &mut self.room
    }
}

/// Whether a container may be put to sleep: it does fall asleep by itself.
pub(crate) fn may_sleep(engine: &Engine, id: &ContainerId) -> bool {
    engine.config(id).is_ok_and(|config| config.sleep.after().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_more_weight_stands_before_those_who_came_a_little_earlier() {
        let now = Instant::now() + Duration::from_secs(60);
        let later = |ms| now + Duration::from_millis(ms);
        assert_eq!(place(now, None), now);
        assert_eq!(place(now, Some(100)), now, "as one that says nothing");
        assert!(place(later(200), Some(200)) < place(now, None));
        assert!(place(later(300), Some(200)) > place(now, None), "not before who waits for long");
        assert!(place(now, Some(50)) > place(later(200), None));
        assert!(place(now, Some(50)) < place(later(300), None));
        let most = Duration::from_secs(2);
        assert!(place(now, Some(10_000)) > now - most && place(now, Some(1)) < now + most);
    }
}
