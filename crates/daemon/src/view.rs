//! Views: writes a file of procfs or sysfs inside a container when it is opened (container/view.rs).
//!
//! The kernel holds back each open of a view until this process answers (fanotify(7), FAN_OPEN_PERM). Two threads:
//!
//! ```text
//! kernel ---- open ----> responder ---- view not written lately ----> writer: reads cgroups, writes the view
//!                          |  ^                                          |
//!                          |  +------------ answers after 100 ms --------+ answers
//!                          +-- written less than 100 ms ago: answers, and the kernel asks no more until then
//! ```
//!
//! **Bounds.** The responder makes no call that waits: it reads and answers events. An open that the writer does not
//! answer within [`ANSWERS_WITHIN`] goes on with the old contents. A view is written at most every [`FRESH`]. A
//! container that opens a view in a loop causes two events in that time, because the kernel is told to leave the file
//! out (FAN_MARK_IGNORED_MASK). The threads parse nothing that a container can write: an event is a descriptor, and
//! number and group of the file name the view.
//!
//! A third thread loads the program for sysinfo(2) (container/sysinfo.rs) when the first container has views, and
//! measures what it shows every [`MEASURES`].
//!
//! **Killed at any time.** The kernel closes the group with the process and lets all waiting opens go on. Views keep
//! their last contents. LIMIT: while the whole process is stopped (SIGSTOP, a debugger), opens of views wait.

use std::collections::HashMap;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use dormouse_container::{Engine, Places, SysinfoCalls, Viewed};
use dormouse_kernel::call::{
    Opening, fanotify_allow, fanotify_ignore, fanotify_init, fanotify_open_perm, fanotify_read,
};
use dormouse_kernel::cgroup::Hierarchy;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};

use crate::error::{Result, step};
use crate::notify::say;
use crate::room::{Notice, Room};

/// Time for which the contents of a view count as new.
const FRESH: Duration = Duration::from_millis(100);

/// LIMIT: how long an open waits for the contents.
const ANSWERS_WITHIN: Duration = Duration::from_millis(100);

/// LIMIT: opens of one view that wait for its contents. Later ones go on with the old contents.
const OPENS_MAX: usize = 16;

/// LIMIT: opens that wait, of all views: each has a descriptor here. Opens of more views go on with the old contents.
const WAITS_MAX: usize = 4096;

/// LIMIT: views whose opens are not reported for a moment: each has a descriptor here. Opens of others are answered.
const IGNORED_MAX: usize = 4096;

/// LIMIT: containers whose cgroups and views are held open.
const CONTAINERS_MAX: usize = 256;

/// Files whose last writing is remembered, before old ones are forgotten.
const FILES_MAX: usize = 8192;

/// Time between measurements of loads for sysinfo(2), as in the kernel (kernel/sched/loadavg.c).
const MEASURES: Duration = Duration::from_secs(5);

/// The room of views: watches the file system of this instance's views, while it is mounted.
#[derive(Debug)]
pub(crate) struct Views {
    places: Places,
    all: PathBuf,
    /// The parent of the containers' cgroups.
    parent: String,
    server: Option<Server>,
    due: Option<Instant>,
}

impl Views {
    pub(crate) fn begin(engine: &Engine) -> Self {
        let parent = engine.places().cgroup.clone();
        let places = engine.places().clone();
        Self { places, all: engine.views(), parent, server: None, due: Some(Instant::now()) }
    }
}

impl Room for Views {
    fn name(&self) -> &'static str {
        "views"
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn due(&self) -> Option<Instant> {
        self.due
    }

    fn turn(&mut self, _now: Instant, _ready: &[bool]) -> Result<Vec<Notice>> {
        self.due = None;
        let device = device(&self.all);
        let serves = self.server.as_ref().filter(|server| server.is_alive());
        if serves.map(|server| server.device) != device {
            self.server = None; // its file system is gone
            let start = |device| Server::start(&self.places, &self.all, &self.parent, device);
            self.server = device.map(start).transpose()?;
        }
        Ok(Vec::new())
    }

    fn notice(&mut self, now: Instant, notice: &Notice) {
        // The first container with views mounts their file system.
        if matches!(notice, Notice::Events) {
            self.due = Some(now);
        }
    }
}

/// The device of the file system of views, if it is mounted.
fn device(all: &Path) -> Option<u64> {
    let own = fs::metadata(all).ok()?.dev();
    let above = fs::metadata(all.parent()?).ok()?.dev();
    (own != above).then_some(own)
}

/// Opens that wait for the contents of a view, by the number of its inode, with their deadlines. A view with an entry
/// is being written.
type Waiting = Arc<Mutex<HashMap<u64, Vec<(OwnedFd, Instant)>>>>;

/// A view to be written.
#[derive(Debug)]
struct Job {
    inode: u64,
    base: u32,
}

/// The threads that serve one file system.
#[derive(Debug)]
struct Server {
    device: u64,
    /// The root of the file system. While it is open, no other one has the number.
    root: OwnedFd,
    /// Closed at the end.
    over: Option<OwnedFd>,
    responder: Option<JoinHandle<()>>,
    _calls: Calls,
}

/// The thread for sysinfo(2). A drop ends it.
#[derive(Debug)]
struct Calls {
    goes_on: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Calls {
    fn start(places: &Places) -> Result<Self> {
        let (goes_on, over) = mpsc::channel();
        let places = places.clone();
        let thread = Builder::new().name("sysinfo".into()).spawn(move || {
            if let Err(e) = measure(&places, &over) {
                say(&format!("sysinfo(2) in containers shows the host: {}", e.with_causes()));
            }
        });
        let thread = thread.map_err(step("make a thread"))?;
        Ok(Self { goes_on: Some(goes_on), thread: Some(thread) })
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        self.goes_on = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic of it has ended it alone
        }
    }
}

/// Loads the program, and measures until the other end of `over` is dropped, or the program is removed.
fn measure(places: &Places, over: &Receiver<()>) -> dormouse_container::Result<()> {
    let mut calls = SysinfoCalls::load(places)?;
    while calls.measure()? {
        if over.recv_timeout(MEASURES) != Err(mpsc::RecvTimeoutError::Timeout) {
            return Ok(());
        }
    }
    Ok(())
}

impl Server {
    fn start(places: &Places, all: &Path, parent: &str, device: u64) -> Result<Self> {
        let group = Arc::new(fanotify_init().map_err(step("watch views"))?);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(all, flags, Mode::empty()).map_err(step("open the views"))?;
        let (is_over, over) = pipe_with(PipeFlags::CLOEXEC).map_err(step("make a pipe"))?;
        let waiting = Waiting::default();
        let (jobs, to_do) = mpsc::channel();
        let (all, parent) = (all.to_owned(), parent.to_owned());
        let writer = {
            let (group, waiting) = (Arc::clone(&group), Arc::clone(&waiting));
            move || {
                Writer { all, parent, known: HashMap::new(), turn: 0, said: None }
                    .serve(&group, &waiting, &to_do)
            }
        };
        let named = |name: &str| Builder::new().name(name.to_owned());
        let writer = named("view writer").spawn(writer).map_err(step("make a thread"))?;
        let responder = {
            let group = Arc::clone(&group);
            move || respond(Responder::new(group, waiting, jobs), is_over.as_fd(), &writer)
        };
        let responder = named("views").spawn(responder).map_err(step("make a thread"))?;
        let _calls = Calls::start(places)?;
        let server = Self { device, root, over: Some(over), responder: Some(responder), _calls };
        // ORDER: the threads first: from now on opens wait for them.
        fanotify_open_perm(group.as_fd(), server.root.as_fd()).map_err(step("watch views"))?;
        Ok(server)
    }

    /// Whether its threads have not failed.
    fn is_alive(&self) -> bool {
        self.responder.as_ref().is_some_and(|responder| !responder.is_finished())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.over = None;
        if let Some(responder) = self.responder.take() {
            let _ = responder.join(); // it does not panic
        }
    }
}

/// Serves until `over` is closed, and then until the writer has ended: the writer opens views as well.
///
/// A panic aborts the process. With a thread less, the group would stay open, and opens of views would wait.
fn respond(mut responder: Responder, over: BorrowedFd<'_>, writer: &JoinHandle<()>) {
    let serve = AssertUnwindSafe(|| {
        if let Err(e) = responder.serve(over, writer) {
            say(&format!("views keep their contents: {e}"));
        }
        responder.drain(writer);
    });
    if catch_unwind(serve).is_err() {
        std::process::abort();
    }
}

/// Reads events, and answers those that need no work or have waited too long.
struct Responder {
    group: Arc<OwnedFd>,
    waiting: Waiting,
    jobs: Sender<Job>,
    /// When each view was last given to the writer, by the number of its inode.
    served: HashMap<u64, Instant>,
    /// Files whose opens are not reported, and until when.
    ignored: Vec<(OwnedFd, Instant)>,
}

impl Responder {
    fn new(group: Arc<OwnedFd>, waiting: Waiting, jobs: Sender<Job>) -> Self {
        Self { group, waiting, jobs, served: HashMap::new(), ignored: Vec::new() }
    }

    /// Serves until `over` is closed, or the writer has panicked.
    fn serve(
        &mut self,
        over: BorrowedFd<'_>,
        writer: &JoinHandle<()>,
    ) -> std::result::Result<(), Errno> {
        let group = Arc::clone(&self.group);
        // A writer that panics leaves an open without an answer, and the deadline of that one ends the wait below.
        while !writer.is_finished() {
            let left = self.next().map(|at| at.saturating_duration_since(Instant::now()));
            let left = left.map(|left| Timespec {
                tv_sec: left.as_secs().cast_signed(),
                tv_nsec: left.subsec_nanos().into(),
            });
            let mut both = [
                PollFd::from_borrowed_fd(group.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(over, PollFlags::IN),
            ];
            match poll(&mut both, left.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
            if !both[1].revents().is_empty() {
                return Ok(());
            }
            let now = Instant::now();
            self.end_waits(now);
            self.ignored.retain(|(file, until)| {
                let is_left = *until > now;
                if !is_left {
                    let _ = fanotify_ignore(group.as_fd(), file.as_fd(), false); // removed meanwhile
                }
                is_left
            });
            match fanotify_read(group.as_fd()) {
                Ok(openings) => openings.into_iter().for_each(|one| self.open(one, now)),
                // The kernel has refused the open of an event for which there was no descriptor.
                Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => {}
                // The event's file cannot be opened any more.
                Err(Errno::NOENT | Errno::STALE | Errno::ACCESS | Errno::PERM) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Lets all opens go on until the writer has ended.
    fn drain(&mut self, writer: &JoinHandle<()>) {
        const AGAIN: Duration = Duration::from_millis(1);
        self.jobs = mpsc::channel().0;
        while !writer.is_finished() {
            // An event that cannot be read is refused by the kernel.
            for opening in fanotify_read(self.group.as_fd()).unwrap_or_default() {
                let _ = fanotify_allow(self.group.as_fd(), opening.file.as_fd()); // its opener was killed
            }
            std::thread::sleep(AGAIN);
        }
    }

    /// Time of the next action without an event.
    fn next(&self) -> Option<Instant> {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = waiting.values().flatten().map(|(_, until)| *until).min();
        let ignored = self.ignored.iter().map(|(_, until)| *until);
        waits.into_iter().chain(ignored).min()
    }

    /// Answers opens that have waited too long.
    fn end_waits(&self, now: Instant) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        for opens in waiting.values_mut() {
            opens.retain(|(file, until)| {
                let is_left = *until > now;
                if !is_left {
                    let _ = fanotify_allow(self.group.as_fd(), file.as_fd()); // its opener was killed
                }
                is_left
            });
        }
    }

    fn open(&mut self, opening: Opening, now: Instant) {
        let group = Arc::clone(&self.group);
        let file = opening.file;
        let allow = |file: &OwnedFd| {
            let _ = fanotify_allow(group.as_fd(), file.as_fd()); // its opener was killed
        };
        let is_own = u32::try_from(opening.pid) == Ok(std::process::id());
        let status = rustix::fs::fstat(&file);
        let Some(status) = status.ok().filter(|status| {
            // A view that is just being made, and the description, are for root alone.
            let is_file = FileType::from_raw_mode(status.st_mode) == FileType::RegularFile;
            let is_view = is_file && status.st_mode & 0o004 != 0;
            !is_own && is_view && status.st_gid != 0
        }) else {
            return allow(&file);
        };
        let inode = status.st_ino;
        {
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(opens) = waiting.get_mut(&inode) {
                if opens.len() >= OPENS_MAX {
                    return allow(&file);
                }
                return opens.push((file, now + ANSWERS_WITHIN));
            }
            // With few for each view, the number of views bounds that of opens.
            if waiting.len() >= WAITS_MAX / OPENS_MAX {
                return allow(&file);
            }
        }
        let is_fresh = |at: &Instant| now.duration_since(*at) < FRESH;
        if let Some(at) = self.served.get(&inode).filter(|at| is_fresh(at)).copied() {
            if self.ignored.len() < IGNORED_MAX
                && fanotify_ignore(group.as_fd(), file.as_fd(), true).is_ok()
            {
                allow(&file);
                self.ignored.push((file, at + FRESH));
                return;
            }
            return allow(&file);
        }
        if self.served.len() >= FILES_MAX {
            self.served.retain(|_, at| is_fresh(at));
        }
        self.served.insert(inode, now);
        let opens = vec![(file, now + ANSWERS_WITHIN)];
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(inode, opens);
        if self.jobs.send(Job { inode, base: status.st_gid }).is_err() {
            answer(&group, &self.waiting, inode); // the writer has panicked
        }
    }
}

/// Answers all opens that wait for a view.
fn answer(group: &OwnedFd, waiting: &Waiting, inode: u64) {
    let opens = waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&inode);
    for (file, _) in opens.unwrap_or_default() {
        let _ = fanotify_allow(group.as_fd(), file.as_fd()); // its opener was killed
    }
}

/// Writes views.
struct Writer {
    all: PathBuf,
    parent: String,
    /// The containers of the last events, by their first host ids, and their last turns.
    known: HashMap<u32, (Viewed, u64)>,
    turn: u64,
    /// The last failure in the log.
    said: Option<String>,
}

impl Writer {
    /// Serves until the responder ends.
    fn serve(mut self, group: &OwnedFd, waiting: &Waiting, jobs: &Receiver<Job>) {
        for job in jobs {
            let written = self.write(&job);
            answer(group, waiting, job.inode);
            match written {
                Ok(()) => self.said = None,
                Err(e) => {
                    self.known.remove(&job.base);
                    let line = format!("views: {}", e.with_causes());
                    // The container may have ended meanwhile.
                    let exists = self.all.join(job.base.to_string()).exists();
                    if exists && self.said.as_ref() != Some(&line) {
                        say(&line);
                        self.said = Some(line);
                    }
                }
            }
        }
    }

    /// Writes a view, and once more if the limits have changed meanwhile: an update describes, then writes.
    fn write(&mut self, job: &Job) -> dormouse_container::Result<()> {
        self.write_once(job)?;
        let is_current = self.known.get(&job.base).is_none_or(|(viewed, _)| viewed.is_current());
        if is_current { Ok(()) } else { self.write_once(job) }
    }

    fn write_once(&mut self, job: &Job) -> dormouse_container::Result<()> {
        self.turn += 1;
        if !self.known.get(&job.base).is_some_and(|(viewed, _)| viewed.is_current()) {
            self.known.remove(&job.base);
            // A hierarchy has descriptors of cgroups that may have been removed with the last container.
            let cgroups = Hierarchy::open(&self.parent)?;
            let Some(viewed) = Viewed::open(&cgroups, &self.all, job.base)? else { return Ok(()) };
            if self.known.len() >= CONTAINERS_MAX {
                let oldest = self.known.iter().min_by_key(|(_, (_, turn))| *turn);
                if let Some(oldest) = oldest.map(|(base, _)| *base) {
                    self.known.remove(&oldest);
                }
            }
            self.known.insert(job.base, (viewed, self.turn));
        }
        match self.known.get_mut(&job.base) {
            Some((viewed, turn)) => {
                *turn = self.turn;
                viewed.write(job.inode)
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::process::Command;
    use std::thread;

    use dormouse_kernel::mount::{FsContext, MountAttr};

    use super::*;

    /// The kernel lets all opens go on when the responder has ended, and a new server is started.
    #[test]
    fn root_responder_ends_with_a_writer_that_panics() {
        // A file system of its own: a mark on another one would hold back opens of the whole host.
        let make = || {
            let fs = FsContext::open("tmpfs")?;
            fs.create(MountAttr::NOEXEC)
        };
        let (group, tree) = match (fanotify_init(), make()) {
            (Ok(group), Ok(tree)) => (Arc::new(group), tree),
            (group, tree) => {
                eprintln!("SKIPPED: {group:?} {tree:?}");
                return;
            }
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::openat(&tree, ".", flags, Mode::empty()).unwrap();
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
        let view = rustix::fs::openat(&root, "view", flags, Mode::from_raw_mode(0o444)).unwrap();
        std::os::unix::fs::fchown(&view, None, Some(7)).unwrap();
        drop(view);
        let (is_over, over) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let (jobs, to_do) = mpsc::channel::<Job>();
        let writer = thread::spawn(move || {
            let job = to_do.recv();
            panic!("{job:?}");
        });
        fanotify_open_perm(group.as_fd(), root.as_fd()).unwrap();
        let responder = thread::spawn(move || {
            respond(Responder::new(group, Waiting::default(), jobs), is_over.as_fd(), &writer);
        });
        // Opens of this process are no opens of a container.
        let path = format!("/proc/{}/fd/{}/view", std::process::id(), root.as_raw_fd());
        for _ in 0..2 {
            assert!(Command::new("cat").arg(&path).status().unwrap().success());
        }
        let until = Instant::now() + Duration::from_secs(60);
        while !responder.is_finished() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(responder.is_finished(), "it serves without a writer");
        assert!(Command::new("cat").arg(&path).status().unwrap().success());
        drop(over);
    }
}
