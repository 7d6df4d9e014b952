//! From processes to records: [`save`] does all steps, and [`explain`] only the first.
//!
//! 1. [`explain`]: inspects the container and lists everything without a record; nothing is
//!    stopped. Large memory is copied then, while its processes run (`ahead`).
//! 2. [`stop`]: seizes and interrupts every task of the container, until a walk of the tree finds
//!    no new one. Stopped tasks create none.
//! 3. `Stopped::read`: makes records from procfs, copies of descriptors (pidfd_getfd(2)), pagemaps
//!    and a few calls that are injected into the processes themselves.
//! 4. `Draft::publish`: completes the checkpoint on disk. Processes that are to continue are
//!    resumed before ([`Stopped`] is dropped). The others stay stopped until then, and the caller
//!    kills them: they do nothing between the checkpoint and their end.
//!
//! Nothing is left in the processes: the page with results of calls is unmapped, registers and
//! signal masks are restored. If this program is killed in the middle, the kernel resumes the
//! tasks. LIMIT: a task in which calls are being injected at that moment (some 0.2 ms of each)
//! resumes inside them.
//!
//! One module per kind of object, of the same names as in [`crate::format`] and [`crate::load`].

mod ahead;

mod cgroup;

mod cgroup_namespace;

mod deleted;

mod diag;

mod drowsy;

mod due;

mod event;

mod fanotify;

mod file;

mod host;

mod inotify;

mod ipc;

mod limit;

mod lock;

mod memory;

mod mount;

mod mqueue;

mod net;

mod netlink;

mod object;

mod option;

mod pidfd;

mod pipe;

mod process;

mod raw;

mod schedule;

mod shared;

mod signal;

mod socket;

mod system_v;

mod tcp;

mod terminal;

mod thread;

mod time;

mod timer;

mod tmpfs;

mod tree;

mod udp;

mod unix;

mod user;

mod uts;

use crate::error::{Error, Refusal, Result};
use crate::format::{Base, Cause, Process, Records, Thread, Writer};
use crate::look::ipc::Tables;
use ahead::Ahead;
pub use drowsy::{Calls, Still, stand_still};
pub use limit::Wait;
pub use mount::Places;
use object::Survey;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};
pub use tree::Stopped;

/// A file of the host that descriptors of the container may refer to.
#[derive(Debug, Clone)]
pub struct Outside {
    /// The name: `stdout.log`.
    pub name: String,
    /// `st_dev` and `st_ino`.
    pub identity: (u64, u64),
    /// The descriptor number that it was passed as. It decides between two names for one file.
    pub number: Option<u32>,
}

/// The container to be saved.
#[derive(Debug, Clone)]
pub struct Subject {
    /// Its id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Its first process, by the host's id.
    pub init: u32,
    /// The first process is the house's init, which a start creates anew and which is not saved.
    pub has_init: bool,
    /// All processes of its cgroup, by the host's ids.
    pub pids: Vec<u32>,
    /// Its standard streams and other files of the engine.
    pub outside: Vec<Outside>,
    /// Directories inside that are tmpfs.
    pub memory: Vec<String>,
    /// Devices in these directories that the configuration creates again.
    pub nodes: Vec<String>,
    /// The places where the engine mounts something; `None` if the configuration makes all mounts.
    pub mounts: Option<Places>,
    /// Mount points of volumes, whose files other containers may use.
    pub volumes: Vec<String>,
    /// Its IPC namespace is private, and is removed with the container.
    pub own_ipc: bool,
    /// Its network stack is private, and its processes may configure it.
    pub own_network: bool,
    /// It may create control groups below its own.
    pub cgroups: bool,
    /// TCP connections are saved; otherwise they are refused.
    pub connections: bool,
    /// System call filters that its configuration gives every process.
    pub filters: u32,
    /// Sockets that are reachable from outside are held open ([`Written::held`]) until the
    /// container is restored on this host, so that later connections are not refused. Existing
    /// connections, accepted or pending, stay open, and data that their peers send is queued.
    pub hold: bool,
    /// As far as is known, no task has run for this time: all have waited at least that long.
    pub quiet: Duration,
}

/// Time and size of a checkpoint.
#[derive(Debug, Clone, Copy, Default)]
pub struct Figures {
    /// Processes.
    pub processes: usize,
    /// Threads.
    pub threads: usize,
    /// Bytes of memory contents.
    pub bytes: u64,
    /// The part of these bytes that was written, because no earlier checkpoint has it.
    pub new_bytes: u64,
    /// TCP connections, whose packets are dropped until they are restored.
    pub connections: usize,
    /// How long everything was stopped before, so that large memory could be copied ahead.
    pub ahead: Duration,
    /// Until everything was stopped.
    pub stop: Duration,
    /// From there until all was read, and the processes could resume.
    pub read: Duration,
    /// From there until all was written, verified, on the disk, and renamed.
    pub publish: Duration,
}

impl Figures {
    /// How long everything was stopped, before the processes could resume.
    pub fn pause(&self) -> Duration {
        self.ahead + self.stop + self.read
    }
}

/// A checkpoint that was written.
#[derive(Debug)]
pub struct Written {
    /// Time and size.
    pub figures: Figures,
    /// Open files to be held. The checkpoint is complete without them, except for the connections
    /// among them.
    pub held: Vec<HeldFile>,
    /// Some thread was active, or about to be: it waits for no event.
    pub is_busy: bool,
    /// How long from the time of writing until the first timer expires or the first call times out
    /// ([`Records::next_ring_ns`]).
    pub next_ring: Option<Duration>,
}

/// An open file that is held while the processes are gone ([`Subject::hold`]).
#[derive(Debug)]
pub struct HeldFile {
    /// The number of its object ([`crate::load::Allowed::held`]).
    pub object: u32,
    /// A copy.
    pub file: OwnedFd,
    /// Events of the file that the processes wait for.
    pub wakes: Wakes,
    /// The cause to record for such an event.
    pub cause: Cause,
}

/// Events of an open file that its process waits for. A file with none of them reports nothing
/// more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wakes {
    /// There is something to read, or the peer has hung up.
    pub readable: bool,
    /// There is space to write.
    pub writable: bool,
}

/// Lists everything that prevents this container from being saved. Nothing is stopped.
pub fn explain(subject: &Subject) -> Result<Vec<Refusal>> {
    Ok(look(subject, None)?.found.refusals)
}

/// How often the container is inspected before a refusal counts. Nothing is stopped yet: a process
/// that is created or exits between two inspections may seem to be outside the container.
const LOOKS: usize = 12;

/// The result of an inspection while everything ran.
struct Look {
    tree: Vec<tree::Seen>,
    found: object::Found,
    tables: Option<Tables>,
}

fn look(subject: &Subject, ahead: Option<&Ahead>) -> Result<Look> {
    let mut looks = 1;
    let mut tables = None;
    loop {
        let tree = tree::look(subject)?;
        if let (Some(first), true, true) = (tree.first(), subject.own_ipc, tables.is_none()) {
            tables = system_v::tables(first)?;
        }
        let found = survey(subject, ahead, &tree, tables.as_ref())?;
        if found.refusals.is_empty() || looks == LOOKS {
            return Ok(Look { tree, found, tables });
        }
        looks += 1;
    }
}

/// Inspects objects that belong to no process.
fn of_nobody(survey: &mut Survey<'_>, tree: &[tree::Seen], tables: Option<&Tables>) -> Result<()> {
    survey.outsiders(tree);
    shared::find(survey, tree);
    user::find(survey, tree);
    // ORDER: mounts may show the message queues of these namespaces.
    ipc::find(survey, tree)?;
    net::find(survey, tree);
    time::find(survey, tree)?;
    mount::find(survey, tree);
    let Some(first) = tree.first() else { return Ok(()) };
    if let Some(tables) = tables {
        mqueue::find(survey, first, tables, None)?;
        system_v::find(survey, first, tables, None)?;
    }
    tmpfs::find(survey, first);
    cgroup::find(survey, first);
    cgroup_namespace::find(survey, tree);
    Ok(())
}

fn survey(
    subject: &Subject,
    ahead: Option<&Ahead>,
    tree: &[tree::Seen],
    tables: Option<&Tables>,
) -> Result<object::Found> {
    let mut survey = Survey::new(subject, ahead);
    of_nobody(&mut survey, tree, tables)?;
    for process in tree {
        let before = (survey.found.refusals.len(), survey.found.passing);
        let looked = survey.process(process);
        if looked.is_ok() && survey.found.refusals.len() == before.0 {
            continue;
        }
        // Nothing is stopped yet: a process that has exited meanwhile is no reason to refuse.
        if process.has_ended() {
            survey.found.refusals.truncate(before.0);
            survey.found.passing = before.1;
        } else {
            looked?;
        }
    }
    terminal::sessions(&mut survey, tree);
    Ok(survey.finish(tree))
}

/// The threads of a container that are blocked with a timeout. Nothing is stopped.
pub fn waits(subject: &Subject) -> Result<Vec<Wait>> {
    Ok(tree::look(subject)?.iter().flat_map(limit::waits).collect())
}

/// Stops all processes of a container, after a check that everything can be saved.
///
/// Errors: [`Error::Refused`] lists what cannot be saved; then nothing was stopped.
/// [`Error::Passing`] if every refusal is likely to pass in a moment.
pub fn stop(subject: &Subject) -> Result<Stopped> {
    let (_, before) = ready(subject, None)?;
    tree::stop(subject, before)
}

/// Inspects a container in which everything can be saved. ORDER: slow steps that can be done before
/// the stop are done here.
fn ready(subject: &Subject, ahead: Option<&Ahead>) -> Result<(Vec<tree::Seen>, tree::Before)> {
    let Look { tree, found, tables } = look(subject, ahead)?;
    refused(found).map(drop)?;
    let (blocks, host) = (thread::Blocks::for_waiting(&tree), host::Host::look()?);
    Ok((tree, tree::Before { blocks, host, tables }))
}

/// How long to wait for states that pass in a moment: connections that are being accepted or
/// closed.
const PASSES_WITHIN: Duration = Duration::from_secs(1);

/// Writes the processes of a container to the directory `place`, and returns them with the figures:
/// they are stopped until they are dropped or killed. With `go_on` they resume as soon as all is
/// read, before it is on the disk. Pages of an earlier checkpoint (`base`) are not written again.
///
/// Errors: as [`stop`], after a wait for states that pass in a moment.
pub fn save(
    subject: &Subject,
    place: &Path,
    base: Option<&Base>,
    go_on: bool,
) -> Result<(Option<Stopped>, Figures)> {
    let began = Instant::now();
    loop {
        let saved = Writer::begin_upon(place, base.cloned()).and_then(|mut writer| {
            let (tree, mut before) = ready(subject, None)?;
            let mut known = memory::Known::default();
            let ahead = ahead::copy(subject, &tree, &before.blocks, &mut known, &mut writer)?;
            if ahead.is_some() {
                (_, before) = ready(subject, ahead.as_ref())?; // the processes have run since
            }
            let bytes = memory::own_bytes(&tree);
            known.make_room(bytes);
            writer.make_room(bytes);
            let mut stopped = tree::stop(subject, before)?;
            let draft = stopped.read(subject, ahead.as_ref(), known, writer)?;
            let stopped = (!go_on).then_some(stopped);
            // ORDER: the processes resume first, since removing the protection takes a while.
            drop(ahead);
            Ok((stopped, draft.publish()?.figures))
        });
        match saved {
            Err(Error::Passing(_)) if began.elapsed() < PASSES_WITHIN => {
                std::thread::sleep(Duration::from_millis(5)); // the processes run meanwhile
            }
            other => return other,
        }
    }
}

/// Returns what was found, or an error if something of it cannot be saved.
fn refused(found: object::Found) -> Result<object::Found> {
    match found.refusals.len() {
        0 => Ok(found),
        all if all == found.passing => Err(Error::Passing(found.refusals)),
        _ => Err(Error::Refused(found.refusals)),
    }
}

/// Everything that was read from stopped processes. If it is dropped, there is no checkpoint.
#[derive(Debug)]
struct Draft {
    writer: Writer,
    records: Records,
    figures: Figures,
    held: Vec<HeldFile>,
    is_busy: bool,
    quiet: Duration,
}

impl Draft {
    /// Writes the rest, verifies it, and renames it to its final name.
    fn publish(mut self) -> Result<Written> {
        let began = Instant::now();
        self.records.pages = self.writer.pages()?;
        // Records that cannot be read back, or not be restored, are an error now and not at the
        // restore.
        crate::format::check::records(&self.records)?;
        crate::load::rehearse(&self.records)?;
        self.writer.publish(&self.records)?;
        let figures = Figures { publish: began.elapsed(), ..self.figures };
        let next_ring = self.records.next_ring_ns(self.quiet.as_nanos() as u64);
        let next_ring = next_ring.map(Duration::from_nanos);
        Ok(Written { figures, held: self.held, is_busy: self.is_busy, next_ring })
    }
}

impl Stopped {
    /// Reads everything and publishes it. The processes stay stopped, for a shorter time if the
    /// caller has created `writer` before the stop.
    pub fn write(&mut self, subject: &Subject, writer: Writer) -> Result<Written> {
        self.read(subject, None, memory::Known::default(), writer)?.publish()
    }

    /// Reads everything that was not copied ahead. The processes stay stopped.
    fn read(
        &mut self,
        subject: &Subject,
        ahead: Option<&Ahead>,
        mut known: memory::Known,
        mut writer: Writer,
    ) -> Result<Draft> {
        let began = Instant::now();
        let mut survey = Survey::new(subject, ahead);
        of_nobody(&mut survey, self.processes(), self.before.tables.as_ref())?;
        self.thawed = cgroup::Thawed::thaw(subject, self.processes().first())?;
        let blocks = self.take_blocks();
        let stopped = self.processes().iter().filter(|seen| seen.stopped.is_some());
        survey.stopped = stopped.map(|seen| (seen.parent, seen.inner)).collect();
        let mut processes: Vec<Process> = Vec::new();
        let mut memories = Vec::new();
        for seen in self.processes() {
            let surveyed = survey.process(seen)?;
            let mut record = process::record(seen, &surveyed, &blocks, subject)?;
            if record.ended.is_none() {
                let memory = process::inside(seen, &mut record, &mut survey, surveyed.memory)?;
                record.memory = Some(memories.len());
                let copied = ahead.and_then(|ahead| ahead.of(seen));
                let memory = memory::contents(seen, memory, copied, &mut known, &mut writer)?;
                if let Err((tid, why)) = crate::format::check::addresses(&record, &memory.areas) {
                    let refusal =
                        seen.refuse(format!("thread {tid}"), format!("{why}, not saved yet"));
                    survey.found.refusals.push(refusal);
                }
                memories.push(memory);
            }
            processes.push(record);
        }
        for record in processes.iter_mut().filter(|record| record.stopped.is_some()) {
            record.stop_was_told = Some(!survey.untold.contains(&record.pid));
        }
        terminal::sessions(&mut survey, self.processes());
        let offsets = survey.times.own();
        let mut found = refused(survey.finish(self.processes()))?;
        self.connections.read(subject, &mut found)?;
        terminal::contents(&mut found)?;
        mqueue::contents(&mut found)?;
        pipe::contents(&mut found)?;
        udp::contents(&mut found)?;
        tmpfs::contents(&mut found, &mut writer)?;
        memory::object_contents(&mut found, &mut writer)?;
        let host = std::mem::take(&mut self.before.host);
        let mut about = host.about(subject, offsets)?;
        about.network = found.network.take();
        let (objects, held) = (found.objects, found.held);
        let records = Records { about, processes, memories, objects, ..Records::default() };
        let cgroups = records.cgroups();
        let is_frozen = |path: &String| cgroups.is_some_and(|all| all.stands_still(path));
        let mut at_work = records.processes.iter().zip(self.processes()).filter(|(p, _)| {
            p.ended.is_none() && p.stopped.is_none() && !p.cgroup.as_ref().is_some_and(is_frozen)
        });
        let is_busy = self.have_worked()
            || at_work.any(|(p, seen)| {
                let mut threads = seen.tids.iter().zip(&p.threads);
                let is_at_work = |(tid, t): (&u32, &Thread)| {
                    !thread::waits(t) || due::is_due(seen, *tid, &t.registers)
                };
                seen.has_run || threads.any(is_at_work)
            });
        let figures = Figures {
            processes: records.processes.len(),
            threads: records.processes.iter().map(|p| p.threads.len()).sum(),
            bytes: writer.bytes(),
            new_bytes: writer.new_bytes(),
            connections: self.connections.count(),
            ahead: ahead.map_or(Duration::ZERO, Ahead::took),
            stop: self.took(),
            read: began.elapsed(),
            publish: Duration::ZERO,
        };
        Ok(Draft { writer, records, figures, held, is_busy, quiet: subject.quiet })
    }
}
