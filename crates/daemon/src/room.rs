//! The loop of the daemon, and the rooms that it serves.
//!
//! A *room* is one task of the daemon with state of its own, such as admission control. Rooms share
//! no state. A room reports by [`Notice`], and the loop delivers each notice to all rooms. A new
//! room therefore changes neither the loop nor another room.
//!
//! ```text
//! poll all descriptors until the earliest due time
//! for each room with a readable descriptor or a due time that has passed, earliest first:
//!     turn -> notices -> every room
//! ```
//!
//! **Failures.** A failed turn is logged, and its room has no further turn for [`RESTS`]. The other
//! rooms continue. Only a failed poll(2) ends the loop.
//!
//! One thread serves all rooms, so a turn must be short: it bounds the delay of every other room.

use std::error::Error as _;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use dormouse_container::{Idle, Outcome, Reason, Request};
use dormouse_model::ContainerId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};

use crate::error::{Error, Result, step};
use crate::notify::{self, say};

/// Time for which a room is left alone after a failed turn.
const RESTS: Duration = Duration::from_secs(1);

/// A job for a worker process, such as to suspend a container, or to push its pages out.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub(crate) id: ContainerId,
    pub(crate) asked: Request,
    /// The idle time required of it; None if it is suspended although it is active.
    pub(crate) idle: Option<Idle>,
    pub(crate) why: Reason,
}

/// The outcome of a job.
#[derive(Debug, Clone)]
pub(crate) struct Done {
    pub(crate) id: ContainerId,
    pub(crate) asked: Request,
    pub(crate) why: Reason,
    pub(crate) fell: Outcome,
}

/// A change that other rooms may depend on.
#[derive(Debug, Clone)]
pub(crate) enum Notice {
    /// `LIB/events` has new lines.
    Events,
    /// The settings of a container were read: it has, or has not, an idle time until sleep.
    MaySleep(ContainerId, bool),
    /// A job is to be run.
    Wanted(Job),
    /// A job has ended.
    Ended(Done),
}

/// One task of the daemon.
pub(crate) trait Room {
    /// Name in messages.
    fn name(&self) -> &'static str;

    /// Descriptors to poll for input until the next turn.
    fn fds(&self) -> Vec<BorrowedFd<'_>>;

    /// Time of the next turn if no descriptor becomes readable. A time in the past is at once.
    fn due(&self) -> Option<Instant>;

    /// Acts, and returns notices for all rooms. `ready` has a flag for each descriptor of the last
    /// poll, in the order of [`Room::fds`]; it is empty if the room was not polled.
    fn turn(&mut self, now: Instant, ready: &[bool]) -> Result<Vec<Notice>>;

    /// Receives a notice, those of its own turn included. ORDER: notices arrive between a poll and
    /// the turn, so they may append descriptors, and must not remove or reorder them.
    fn notice(&mut self, _now: Instant, _notice: &Notice) {}

    /// Finishes at the end of the daemon.
    fn end(self: Box<Self>) {}
}

/// CPU time of this thread, for the cost of readings.
pub(crate) fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

/// A room and its failures.
struct Served {
    room: Box<dyn Room>,
    /// No turn before this time, because the last one failed.
    rests_until: Option<Instant>,
    /// The last logged failure.
    logged: Option<String>,
}

/// Serves the rooms until `signals` is readable, and ends them.
pub(crate) fn serve(rooms: Vec<Box<dyn Room>>, signals: BorrowedFd<'_>) -> Result<()> {
    serve_with(rooms, signals, &mut |line| say(line))
}

fn serve_with(
    rooms: Vec<Box<dyn Room>>,
    signals: BorrowedFd<'_>,
    log: &mut dyn FnMut(&str),
) -> Result<()> {
    let serve = |room| Served { room, rests_until: None, logged: None };
    let mut rooms: Vec<Served> = rooms.into_iter().map(serve).collect();
    while let Some(ready) = wait(&mut rooms, signals)? {
        for at in turns(&rooms, &ready, Instant::now()) {
            let now = Instant::now();
            match rooms[at].room.turn(now, &ready[at]) {
                Ok(notices) => {
                    rooms[at].logged = None;
                    for notice in &notices {
                        rooms.iter_mut().for_each(|other| other.room.notice(now, notice));
                    }
                }
                Err(e) => rooms[at].failed(now, &e, log),
            }
        }
    }
    notify::tell("STOPPING=1");
    rooms.into_iter().for_each(|served| served.room.end());
    Ok(())
}

impl Served {
    /// Logs a failure, once while it repeats, and leaves the room alone.
    fn failed(&mut self, now: Instant, e: &Error, log: &mut dyn FnMut(&str)) {
        let mut line = format!("{}: {e}", self.room.name());
        let mut cause = e.source();
        while let Some(e) = cause {
            line += &format!(": {e}");
            cause = e.source();
        }
        if self.logged.as_ref() != Some(&line) {
            log(&line);
        }
        (self.logged, self.rests_until) = (Some(line), Some(now + RESTS));
    }

    fn due(&self) -> Option<Instant> {
        self.rests_until.or_else(|| self.room.due())
    }
}

/// Waits until a descriptor is readable or a room is due. Returns the flags of each room, and None
/// if `signals` is readable.
fn wait(rooms: &mut [Served], signals: BorrowedFd<'_>) -> Result<Option<Vec<Vec<bool>>>> {
    let now = Instant::now();
    for served in rooms.iter_mut() {
        served.rests_until = served.rests_until.filter(|until| *until > now);
    }
    let next = rooms.iter().filter_map(Served::due).min();
    // Rounded up, so that the wait does not return before the due time.
    let left = next.map(|next| match next.saturating_duration_since(now) {
        Duration::ZERO => Duration::ZERO,
        left => left + Duration::from_micros(100),
    });
    let left = left.map(|left| Timespec {
        tv_sec: left.as_secs() as i64,
        tv_nsec: left.subsec_nanos().into(),
    });
    let polled = |served: &Served| served.rests_until.is_none();
    let fds: Vec<Vec<BorrowedFd<'_>>> =
        rooms.iter().map(|it| if polled(it) { it.room.fds() } else { Vec::new() }).collect();
    let mut all: Vec<PollFd<'_>> = std::iter::once(&signals)
        .chain(fds.iter().flatten())
        .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN))
        .collect();
    match poll(&mut all, left.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(e) => return Err(step("wait")(e)),
    }
    let mut ready = all.iter().map(|fd| !fd.revents().is_empty());
    if ready.next() == Some(true) {
        return Ok(None);
    }
    Ok(Some(fds.iter().map(|fds| ready.by_ref().take(fds.len()).collect()).collect()))
}

/// Returns the rooms that have a turn now, by due time. A readable descriptor counts as due now.
fn turns(rooms: &[Served], ready: &[Vec<bool>], now: Instant) -> Vec<usize> {
    let mut turns = Vec::new();
    for (at, served) in rooms.iter().enumerate().filter(|(_, it)| it.rests_until.is_none()) {
        let due = served.room.due().filter(|due| *due <= now);
        let called = ready[at].contains(&true).then_some(now);
        if let Some(when) = due.or(called) {
            turns.push((when, at));
        }
    }
    turns.sort();
    turns.into_iter().map(|(_, at)| at).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::os::fd::{AsFd, OwnedFd};
    use std::rc::Rc;

    use super::*;

    /// Records of the turns, notices and ends of all rooms of a test.
    type Log = Rc<RefCell<Vec<String>>>;
    type Act = dyn FnMut(&mut Option<Instant>) -> Result<Vec<Notice>>;

    /// A room with a name, a due time, pipes, and one action per turn.
    struct Fake {
        name: &'static str,
        due: Option<Instant>,
        pipes: Vec<OwnedFd>,
        log: Log,
        act: Box<Act>,
    }

    impl Fake {
        fn new(name: &'static str, log: &Log) -> Self {
            let (due, pipes, log) = (None, Vec::new(), Rc::clone(log));
            Self { name, due, pipes, log, act: Box::new(|_| Ok(Vec::new())) }
        }

        fn due(mut self, due: Instant) -> Self {
            self.due = Some(due);
            self
        }

        /// Runs `act` at each turn; it may set the next due time, which is None before.
        fn act(
            mut self,
            act: impl FnMut(&mut Option<Instant>) -> Result<Vec<Notice>> + 'static,
        ) -> Box<dyn Room> {
            self.act = Box::new(act);
            Box::new(self)
        }
    }

    impl Room for Fake {
        fn name(&self) -> &'static str {
            self.name
        }

        fn fds(&self) -> Vec<BorrowedFd<'_>> {
            self.pipes.iter().map(AsFd::as_fd).collect()
        }

        fn due(&self) -> Option<Instant> {
            self.due
        }

        fn turn(&mut self, now: Instant, ready: &[bool]) -> Result<Vec<Notice>> {
            assert!(ready.contains(&true) || self.due.is_some_and(|due| due <= now));
            let flags: String = ready.iter().map(|flag| if *flag { '1' } else { '0' }).collect();
            self.log.borrow_mut().push(format!("{} {flags}", self.name));
            self.due = None;
            (self.act)(&mut self.due)
        }

        fn notice(&mut self, _now: Instant, notice: &Notice) {
            if matches!(notice, Notice::Events) {
                self.log.borrow_mut().push(format!("{} notice", self.name));
            }
        }

        fn end(self: Box<Self>) {
            self.log.borrow_mut().push(format!("{} end", self.name));
        }
    }

    /// A pipe whose closed write end makes it readable.
    fn pipe() -> (OwnedFd, OwnedFd) {
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap()
    }

    /// Serves rooms until one of them drops the write end, and returns what was logged.
    fn run(signals: &OwnedFd, rooms: Vec<Box<dyn Room>>) -> Vec<String> {
        let mut lines = Vec::new();
        serve_with(rooms, signals.as_fd(), &mut |line| lines.push(line.to_owned())).unwrap();
        lines
    }

    fn nothing() -> Result<Vec<Notice>> {
        Ok(Vec::new())
    }

    #[test]
    fn rooms_have_turns_in_the_order_of_their_due_times() {
        let (log, now) = (Log::default(), Instant::now());
        let (signals, stop) = pipe();
        let mut stop = Some(stop);
        let after = |ms| now + Duration::from_millis(ms);
        let rooms = vec![
            Fake::new("last", &log).due(after(30)).act(move |_| {
                stop.take();
                nothing()
            }),
            Fake::new("first", &log).due(after(10)).act(|_| nothing()),
            Fake::new("never", &log).act(|_| nothing()),
            Fake::new("second", &log).due(after(20)).act(|_| nothing()),
        ];
        run(&signals, rooms);
        assert!(now.elapsed() >= Duration::from_millis(30), "no room has a turn before its time");
        let log = log.borrow();
        assert_eq!(log[..3], ["first ", "second ", "last "]);
        assert_eq!(log[3..], ["last end", "first end", "never end", "second end"]);
    }

    #[test]
    fn room_receives_a_flag_for_each_of_its_descriptors() {
        let log = Log::default();
        let (signals, stop) = pipe();
        let mut stop = Some(stop);
        let pipes: Vec<(OwnedFd, OwnedFd)> = (0..4).map(|_| pipe()).collect();
        let (mut reads, mut writes): (Vec<_>, Vec<_>) = pipes.into_iter().unzip();
        writes.remove(2); // readable: its write end is closed
        let mut other = Fake::new("other", &log);
        other.pipes = reads.drain(..1).collect();
        let mut called = Fake::new("called", &log);
        called.pipes = reads;
        let rooms = vec![
            other.act(|_| nothing()),
            called.act(move |_| {
                stop.take();
                nothing()
            }),
        ];
        run(&signals, rooms);
        assert_eq!(log.borrow()[..], ["called 010", "other end", "called end"]);
    }

    #[test]
    fn failed_room_is_logged_once_and_does_not_stop_the_others() {
        let (log, begin) = (Log::default(), Instant::now());
        let (signals, stop) = pipe();
        let mut stop = Some(stop);
        let (read, write) = pipe();
        drop(write);
        let mut broken = Fake::new("broken", &log); // readable for ever
        broken.pipes.push(read);
        let error = || step("read events")(std::io::Error::other("the disk is gone"));
        let mut left = 100;
        let sound = Fake::new("sound", &log).due(begin).act(move |due| {
            left -= 1;
            *due = (left > 0).then(|| Instant::now() + Duration::from_millis(15));
            if left == 0 {
                stop.take();
            }
            nothing()
        });
        let lines = run(&signals, vec![broken.act(move |_| Err(error())), sound]);
        assert_eq!(lines, ["broken: cannot read events: the disk is gone"]);
        let turns = |name: &str| log.borrow().iter().filter(|line| line.starts_with(name)).count();
        assert_eq!(turns("sound "), 101, "with its end");
        let (failed, rests) = (turns("broken 1"), begin.elapsed().as_secs() as usize);
        assert!((2..=1 + rests).contains(&failed), "{failed} turns in {rests} s");
    }

    #[test]
    fn notice_reaches_every_room() {
        let (log, now) = (Log::default(), Instant::now());
        let (signals, stop) = pipe();
        let mut stop = Some(stop);
        let rooms = vec![
            Fake::new("sender", &log).due(now).act(|_| Ok(vec![Notice::Events])),
            Fake::new("other", &log).due(now + Duration::from_millis(1)).act(move |_| {
                stop.take();
                nothing()
            }),
        ];
        run(&signals, rooms);
        assert_eq!(log.borrow()[..4], ["sender ", "sender notice", "other notice", "other "]);
    }
}
