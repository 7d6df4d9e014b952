//! The thread that keeps guarantees of memory on cgroup v1.
//!
//! [`dormouse_governor::memory`] decides, this thread reads and writes: ten times a second the memory of every
//! running container, through descriptors that stay open. For a second after a notice and after fast growth it does so
//! up to fifty times a second, in a tenth of a CPU at most. A new limit is written when it has changed by a hundredth.
//! The write returns when the kernel has reclaimed what is above the limit, which may take long: hence a thread, not a
//! room. No other part of the daemon writes limits.
//!
//! **A limit that stays**, because the memory cannot be reclaimed, is tried again after a second, then after two,
//! and so on up to a minute. Each try takes page cache of the container. Meanwhile others are limited in its place.
//!
//! **Verbs change limits too**: those of a container that starts, wakes or is updated, and of all when a guarantee
//! changes. [`MemoryGranted::set`] compares the guarantees before each write. The thread lowers no limit to a ceiling
//! but one that it has written itself: a container that wakes with more than its ceiling keeps it.
//!
//! **Errors.** After an error the limits are those that hold without the thread. The thread goes on after a second.
//!
//! **Nothing to do.** Without guarantees the thread waits for the next notice, and does not tick. With some, the
//! notices of one tick are taken together before its decision, so no number of notices delays a decision.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use dormouse_container::{MemoryGranted, MemoryLimits, Places, Result};
use dormouse_governor::memory::{Reading, State, decide};
use dormouse_kernel::cgroup::LimitSet;
use dormouse_model::ContainerId;

use crate::notify::say;

/// Time between decisions.
const TICK: Duration = Duration::from_millis(100);
/// The least time between decisions while containers come or grow fast, as a part of [`TICK`].
const HURRY: u32 = 5;
/// How long decisions come so often after that, in ticks.
const HURRIES: u32 = 10;
/// What of the time decisions that come so often may take.
const BUSY: u32 = 10;
/// Time between looks at a thread that ends.
const LOOKS_AGAIN: Duration = Duration::from_millis(10);
/// Time between an error and the next try.
const RESTS: Duration = Duration::from_secs(1);
/// The first and the longest pause after a limit that stays.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The running thread. A drop ends it, and does not wait.
#[derive(Debug)]
pub(crate) struct Shrinker {
    notices: Option<Sender<()>>,
    thread: JoinHandle<()>,
}

/// The name of the thread.
const NAME: &str = "memory";

impl Shrinker {
    /// Begins with the present guarantees. Errors: the thread cannot be made.
    pub(crate) fn begin(places: &Places) -> std::io::Result<Self> {
        let (notices, received) = mpsc::channel();
        let places = places.clone();
        let body = move || {
            let limits = MemoryLimits::new(&places);
            run(&received, RESTS, || keep(&limits, &received), || limits.govern(false), &mut |e| {
                say(e)
            });
        };
        let thread = Builder::new().name(NAME.into()).spawn(body)?;
        Ok(Self { notices: Some(notices), thread })
    }

    /// Reports that containers or guarantees may have changed.
    pub(crate) fn look_again(&self) {
        // After a panic of the thread itself the room begins another one.
        let _ = self.notices.as_ref().map(|notices| notices.send(()));
    }

    /// Lets the thread write the static limits and end.
    pub(crate) fn stop(&mut self) {
        self.notices = None;
    }

    /// Returns whether the thread has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for the end of a stopped thread. Returns false if a limit is still being written after so long.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        while !self.has_ended() && Instant::now() < until {
            std::thread::sleep(LOOKS_AGAIN);
        }
        self.has_ended()
    }
}

/// Keeps the guarantees until the notices end. After an error or a panic it gives the limits back, and tries again.
fn run(
    notices: &Receiver<()>,
    rests: Duration,
    mut keep: impl FnMut() -> Result<()>,
    mut give_back: impl FnMut() -> Result<()>,
    report: &mut dyn FnMut(&str),
) {
    let mut last = None;
    loop {
        let kept = catch_unwind(AssertUnwindSafe(&mut keep));
        let line = match kept {
            Ok(Ok(())) => return,
            Ok(Err(e)) => format!("memory is not governed: {e}"),
            Err(_) => "memory is not governed: its thread has panicked".into(),
        };
        // Reported once while it repeats.
        if last.as_ref() != Some(&line) {
            report(&line);
        }
        last = Some(line);
        // The mark stays if this fails too: the next command writes the limits if the daemon ends.
        let _ = catch_unwind(AssertUnwindSafe(&mut give_back));
        if notices.recv_timeout(rests) == Err(RecvTimeoutError::Disconnected) {
            return;
        }
    }
}

/// What was written into the limit of one container.
#[derive(Default)]
struct Pace {
    /// The limit that was written last.
    written_bytes: Option<u64>,
    /// The next try, and the pause before it, after a limit that stayed.
    later: Option<(Instant, Duration)>,
}

impl Pace {
    fn is_paused(&self, now: Instant) -> bool {
        self.later.is_some_and(|(next, _)| now < next)
    }
}

/// The guarantees, and what the thread has made of them.
struct Kept {
    granted: MemoryGranted,
    paces: BTreeMap<ContainerId, Pace>,
    state: State<ContainerId>,
}

/// What the thread does at each tick.
trait Work {
    /// Reads the guarantees again. Returns whether there are some.
    fn refresh(&mut self) -> Result<bool>;
    /// Decides once. Returns false if the guarantees have changed.
    fn decide(&mut self) -> Result<bool>;
    /// Returns whether the next decision is to come soon.
    fn hurries(&self) -> bool;
}

/// The limits of an instance, and its guarantees if there are some.
struct Keeping<'a> {
    limits: &'a MemoryLimits,
    kept: Option<Kept>,
}

impl Work for Keeping<'_> {
    fn refresh(&mut self) -> Result<bool> {
        let before = self.kept.take();
        let governs = before.is_some();
        match self.limits.granted()? {
            Some(granted) => {
                if !governs {
                    // ORDER: marked first: limits that a killed daemon has changed are always found.
                    self.limits.govern(true)?;
                }
                self.kept = Some(take_over(granted, before)?);
            }
            None if governs => self.limits.govern(false)?,
            None => {}
        }
        Ok(self.kept.is_some())
    }

    fn decide(&mut self) -> Result<bool> {
        self.kept.as_mut().map_or(Ok(true), turn)
    }

    fn hurries(&self) -> bool {
        self.kept.as_ref().is_some_and(|kept| kept.state.grows_fast())
    }
}

fn keep(limits: &MemoryLimits, notices: &Receiver<()>) -> Result<()> {
    let mut keeping = Keeping { limits, kept: None };
    work(notices, TICK, &mut keeping)?;
    if keeping.kept.is_some() { limits.govern(false) } else { Ok(()) }
}

/// Works until the notices end: decides once in each tick while memory is guaranteed.
fn work(notices: &Receiver<()>, tick: Duration, work: &mut impl Work) -> Result<()> {
    let (mut governs, mut is_outdated) = (false, true);
    let mut hurries_until = Instant::now();
    loop {
        let begun = Instant::now();
        if is_outdated || work.hurries() {
            hurries_until = begun + tick * HURRIES;
        }
        if is_outdated {
            governs = work.refresh()?;
        }
        is_outdated = governs && !work.decide()?;
        let now = Instant::now();
        let soon = (tick / HURRY).max((now - begun) * BUSY).min(tick);
        let next = if now < hurries_until { soon } else { tick };
        match wait(notices, governs.then(|| now + next)) {
            Some(came) => is_outdated |= came,
            None => return Ok(()),
        }
    }
}

/// Waits until a time and takes all notices meanwhile, or waits for one notice. Returns whether one came; `None` if
/// the notices have ended.
fn wait(notices: &Receiver<()>, until: Option<Instant>) -> Option<bool> {
    let Some(until) = until else { return notices.recv().ok().map(|()| true) };
    let mut came = false;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match notices.recv_timeout(left) {
            // A notice that waits is taken also at the end of the tick, but only one.
            Ok(()) if left.is_zero() => return Some(true),
            Ok(()) => came = true,
            Err(RecvTimeoutError::Timeout) => return Some(came),
            Err(RecvTimeoutError::Disconnected) => return None,
        }
    }
}

/// Continues with other guarantees. A container with the same cgroup keeps its pace.
fn take_over(granted: MemoryGranted, before: Option<Kept>) -> Result<Kept> {
    let mut kept = Kept { granted, paces: BTreeMap::new(), state: State::default() };
    if let Some(before) = before {
        kept.state = before.state;
        for (id, pace) in before.paces {
            let was = before.granted.members.get(&id);
            // The cgroup of a container that slept is a new one.
            let is_same = was.map(|was| was.share.used_bytes()).transpose()?.flatten().is_some();
            if is_same && kept.granted.members.contains_key(&id) {
                kept.paces.insert(id, pace);
            }
        }
    }
    Ok(kept)
}

/// Reads, decides and writes. Returns false if the guarantees have changed.
fn turn(kept: &mut Kept) -> Result<bool> {
    let Kept { granted, paces, state } = kept;
    let mut readings = Vec::with_capacity(granted.members.len());
    for (id, member) in &granted.members {
        // The cgroup of a container that has ended or sleeps is gone.
        let (used, limit) = (member.share.used_bytes()?, member.share.limit_bytes()?);
        let (Some(used_bytes), Some(mut limit_bytes)) = (used, limit) else { continue };
        let pace = paces.entry(id.clone()).or_default();
        if pace.written_bytes == Some(limit_bytes) && limit_bytes > member.ceiling_bytes {
            // Written for other guarantees.
            if !set(granted, id, pace, limit_bytes, member.ceiling_bytes)? {
                return Ok(false);
            }
            limit_bytes = member.share.limit_bytes()?.unwrap_or(limit_bytes);
        }
        readings.push(Reading {
            id: id.clone(),
            used_bytes,
            min_bytes: member.min_bytes,
            restored_bytes: member.restored_bytes,
            ceiling_bytes: member.ceiling_bytes,
            limit_bytes,
        });
    }
    let now = Instant::now();
    let cache = |id: &ContainerId| match paces.get(id) {
        Some(pace) if !pace.is_paused(now) => granted.file_cache_bytes(id).unwrap_or(0),
        _ => 0,
    };
    let (next, settings) = decide(granted.room_bytes()?, &readings, state, cache);
    *state = next;
    let present: BTreeMap<&ContainerId, u64> =
        readings.iter().map(|it| (&it.id, it.limit_bytes)).collect();
    for setting in settings {
        let pace = paces.entry(setting.id.clone()).or_default();
        let present = present.get(&setting.id).copied().unwrap_or(u64::MAX);
        if !set(granted, &setting.id, pace, present, setting.limit_bytes)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Writes a limit. A lower one waits for its time where the last one stayed. Returns false if the guarantees have
/// changed.
fn set(
    granted: &MemoryGranted,
    id: &ContainerId,
    pace: &mut Pace,
    present_bytes: u64,
    limit_bytes: u64,
) -> Result<bool> {
    let now = Instant::now();
    let is_lower = limit_bytes < present_bytes;
    if is_lower && pace.is_paused(now) {
        return Ok(true);
    }
    let Some(member) = granted.members.get(id) else { return Ok(true) };
    let Some(set) = granted.set(&member.share, limit_bytes)? else { return Ok(false) };
    if set == LimitSet::Set {
        // Read, because the kernel rounds it.
        pace.written_bytes = member.share.limit_bytes()?;
    }
    // A raise that stays is decided again at the next turn.
    if is_lower {
        let next = || pace.later.map_or(PAUSES.0, |(_, last)| (last * 2).min(PAUSES.1));
        pace.later = (set == LimitSet::Stays).then(next).map(|pause| (now + pause, pause));
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use dormouse_container::Error;

    use super::*;

    #[test]
    fn limits_are_given_back_and_governed_again_after_errors() {
        let (notices, received) = mpsc::channel::<()>();
        let (mut tries, mut given_back, mut lines) = (0, 0, Vec::new());
        let keep = || {
            tries += 1;
            match tries {
                1 | 2 => Err(Error::Invalid("no memory".into())),
                3 => panic!("a panic of the test"),
                _ => Ok(()),
            }
        };
        let give_back = || {
            given_back += 1;
            Err(Error::Invalid("not now".into()))
        };
        run(&received, Duration::ZERO, keep, give_back, &mut |line| lines.push(line.to_owned()));
        drop(notices);
        assert_eq!((tries, given_back, lines.len()), (4, 3, 2), "{lines:?}");
        assert!(lines[0].contains("no memory") && lines[1].contains("panicked"), "{lines:?}");
    }

    /// Counts, and ends with an error after some decisions.
    #[derive(Default)]
    struct Counts {
        refreshes: u32,
        decisions: u32,
    }

    /// Decisions after which [`Counts`] ends.
    const DECISIONS: u32 = 5;

    impl Work for Counts {
        fn hurries(&self) -> bool {
            false
        }

        fn refresh(&mut self) -> Result<bool> {
            self.refreshes += 1;
            Ok(true)
        }

        fn decide(&mut self) -> Result<bool> {
            self.decisions += 1;
            match self.decisions < DECISIONS {
                true => Ok(true),
                false => Err(Error::Invalid("enough".into())),
            }
        }
    }

    #[test]
    fn steady_notices_do_not_delay_decisions() {
        let (notices, received) = mpsc::channel::<()>();
        let (stop, stopped) = mpsc::channel::<()>();
        // Twenty notices in a second, which is more than one in each tick.
        let every = Duration::from_millis(50);
        notices.send(()).expect("a receiver");
        let sender = std::thread::spawn(move || {
            for _ in 0..600 {
                let _ = notices.send(());
                if stopped.recv_timeout(every) == Err(RecvTimeoutError::Disconnected) {
                    return;
                }
            }
        });
        let mut counts = Counts::default();
        let ended = work(&received, TICK, &mut counts);
        drop(stop);
        sender.join().expect("the sender");
        assert!(ended.is_err(), "the notices have ended before {} decisions", counts.decisions);
        assert_eq!(counts.decisions, DECISIONS);
        let refreshes = counts.refreshes;
        assert!(refreshes > 1, "notices are taken");
        assert!(refreshes <= DECISIONS, "the notices of a tick are one refresh: {refreshes}");
    }

    #[test]
    fn ended_notices_end_the_work() {
        let (notices, received) = mpsc::channel::<()>();
        notices.send(()).expect("a receiver");
        drop(notices);
        let mut counts = Counts::default();
        work(&received, Duration::from_secs(3600), &mut counts).expect("an end");
        assert_eq!((counts.refreshes, counts.decisions), (1, 1));
    }

    #[test]
    fn stopped_thread_does_not_try_again() {
        let (notices, received) = mpsc::channel::<()>();
        drop(notices);
        let mut tries = 0;
        let keep = || {
            tries += 1;
            Err(Error::Invalid("no memory".into()))
        };
        run(&received, Duration::from_secs(3600), keep, || Ok(()), &mut |_| {});
        assert_eq!(tries, 1);
    }
}
