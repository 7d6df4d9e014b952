//! From processes to records: [`save`] is all of it but the first.
//!
//! 1. [`explain`]: everything that has no record is found by looking, with nothing stopped.
//!    Where memory is large it is copied then, while they run (`ahead`).
//! 2. [`stop`]: every task of the container is seized and interrupted, again and again until a look
//!    finds no new one; tasks that stand still make none.
//! 3. `Stopped::read`: what procfs, copies of descriptors (pidfd_getfd(2)), pagemaps and a
//!    handful of calls made in the processes themselves tell becomes records.
//! 4. `Draft::publish`: the checkpoint is whole and on the disk. Processes that are to go on
//!    ([`Stopped`] is dropped) do so before; those that are not stand still until then, and the caller
//!    kills them: nothing happens between the checkpoint and their end.
//!
//! Nothing is left in the processes: a page that holds results of calls is unmapped, registers and
//! signal masks are given back. When this program is killed in the middle the kernel lets the
//! tasks go on. LIMIT: a task in which calls are being made at that very moment (some 0.2 ms of
//! each) goes on in the middle of them.
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
mod in_call;
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
mod signal;
mod socket;
pub(crate) mod system_v;
pub(crate) mod tcp;
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

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::error::{Error, Refusal, Result};
use crate::format::{Base, Cause, Records, Thread, Writer};
use ahead::Ahead;
pub use drowsy::{Calls, Still, stand_still};
pub use limit::Wait;
pub use mount::Places;
use object::Survey;
pub use tree::Stopped;

pub(crate) use cgroup::freeze;
pub(crate) use file::modified_ns;
pub(crate) use host::now_unix_ms;
pub(crate) use process::find;
pub(crate) use thread::Maps;
pub(crate) use tmpfs::place as tmpfs_at;

/// What of the host's a container's descriptors may lead to, and what it is called.
#[derive(Debug, Clone)]
pub struct Outside {
    /// The name: `stdout.log`.
    pub name: String,
    /// `st_dev` and `st_ino`.
    pub identity: (u64, u64),
    /// The number that it was given under: of two names for one file it is this one's there.
    pub number: Option<u32>,
}

/// A container, as this crate sees it.
#[derive(Debug, Clone)]
pub struct Subject {
    /// Its id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Its first process, by the host's id.
    pub init: u32,
    /// That is the init of the house, which is made anew and not saved.
    pub has_init: bool,
    /// All processes of its cgroup, by the host's ids.
    pub pids: Vec<u32>,
    /// Its standard streams and what else is the engine's.
    pub outside: Vec<Outside>,
    /// Directories inside that are kept in memory.
    pub memory: Vec<String>,
    /// Devices below these that its configuration makes again.
    pub nodes: Vec<String>,
    /// Where the engine mounts something; none where all is mounted by that.
    pub mounts: Option<Places>,
    /// Where files of others are mounted inside.
    pub volumes: Vec<String>,
    /// What is in its ipc namespace is its own, and goes with it.
    pub own_ipc: bool,
    /// It has a network stack to itself, which its processes may set up.
    pub own_network: bool,
    /// It may make control groups below its own.
    pub cgroups: bool,
    /// TCP connections are saved; otherwise they are refused.
    pub connections: bool,
    /// System call filters that its configuration gives every process.
    pub filters: u32,
    /// Sockets that are called from outside are to be held open ([`Written::held`]) until it comes
    /// back on this host, so that whoever calls meanwhile is not refused; those who have connected
    /// already, accepted or not, wait there too, and what they send.
    pub hold: bool,
    /// None of its tasks has run for so long, as far as is known: they have waited that long.
    pub quiet: Duration,
}

/// How long it took, and how much it is.
#[derive(Debug, Clone, Copy, Default)]
pub struct Figures {
    /// Processes.
    pub processes: usize,
    /// Threads.
    pub threads: usize,
    /// Bytes of memory contents.
    pub bytes: u64,
    /// Bytes of them that were written, as no earlier checkpoint had them.
    pub new_bytes: u64,
    /// TCP connections, which are kept quiet until they are back.
    pub connections: usize,
    /// For how long everything stood still before, so that large memory could be copied ahead.
    pub ahead: Duration,
    /// Until everything stood still.
    pub stop: Duration,
    /// From there until all was read: they could go on.
    pub read: Duration,
    /// From there until all was written, checked, on the disk, and had its name.
    pub publish: Duration,
}

impl Figures {
    /// For how long everything stood still, before it might have gone on.
    pub fn pause(&self) -> Duration {
        self.ahead + self.stop + self.read
    }
}

/// A checkpoint that was written.
#[derive(Debug)]
pub struct Written {
    /// How long it took.
    pub figures: Figures,
    /// Open files to be held. The checkpoint is whole without them, but for the connections among
    /// them.
    pub held: Vec<HeldFile>,
    /// Some thread was at work, or was about to be: it waits for nobody.
    pub is_busy: bool,
    /// How long until the first timer rings or the first wait is over ([`Records::next_ring_ns`]),
    /// from when it was written.
    pub next_ring: Option<Duration>,
}

/// An open file that is held while the processes are gone ([`Subject::hold`]).
#[derive(Debug)]
pub struct HeldFile {
    /// The number of its object ([`crate::load::Allowed::held`]).
    pub object: u32,
    /// A copy.
    pub file: OwnedFd,
    /// What happens to it that the processes would want to know.
    pub wakes: Wakes,
    /// What that is to them.
    pub cause: Cause,
}

/// What happens to an open file that its owner waits for. A file for which nothing does has nothing
/// more to tell.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wakes {
    /// There is something to read, or its other side has hung up.
    pub readable: bool,
    /// There is room to write.
    pub writable: bool,
}

/// Everything that keeps this container from being saved, by name. Nothing is stopped.
pub fn explain(subject: &Subject) -> Result<Vec<Refusal>> {
    Ok(look(subject, None)?.found.refusals)
}

/// How often something that would refuse is looked at before it does. Nothing stands still yet: whoever
/// is made or ends between two looks may seem to be somebody outside.
const LOOKS: usize = 12;

/// What a look found while everything ran.
struct Look {
    tree: Vec<tree::Seen>,
    found: object::Found,
    tables: Option<system_v::Tables>,
}

fn look(subject: &Subject, ahead: Option<&Ahead>) -> Result<Look> {
    let mut looks = 1;
    let mut tables = None;
    loop {
        let tree = tree::look(subject)?;
        if let (Some(first), true, true) = (tree.first(), subject.own_ipc, tables.is_none()) {
            tables = system_v::Tables::open(first)?;
        }
        let found = survey(subject, ahead, &tree, tables.as_ref())?;
        if found.refusals.is_empty() || looks == LOOKS {
            return Ok(Look { tree, found, tables });
        }
        looks += 1;
    }
}

/// Looks at what belongs to no process.
fn of_nobody(
    survey: &mut Survey<'_>,
    tree: &[tree::Seen],
    tables: Option<&system_v::Tables>,
) -> Result<()> {
    survey.outsiders(tree);
    user::find(survey, tree);
    // ORDER: mounts may show their message queues.
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
    tables: Option<&system_v::Tables>,
) -> Result<object::Found> {
    let mut survey = Survey::new(subject, ahead);
    of_nobody(&mut survey, tree, tables)?;
    for process in tree {
        let before = (survey.found.refusals.len(), survey.found.passing);
        let looked = survey.process(process);
        if looked.is_ok() && survey.found.refusals.len() == before.0 {
            continue;
        }
        // Nothing stands still yet: what has ended meanwhile keeps nobody from anything.
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

/// The threads of a container that wait for some time at most. Nothing is stopped.
pub fn waits(subject: &Subject) -> Result<Vec<Wait>> {
    Ok(tree::look(subject)?.iter().flat_map(limit::waits).collect())
}

/// Stops all processes of a container, none of which has anything that cannot be saved.
///
/// Errors: [`Error::Refused`] names what cannot; nothing was stopped then. [`Error::Passing`], when all
/// of that would pass in a moment.
pub fn stop(subject: &Subject) -> Result<Stopped> {
    let (_, before) = ready(subject, None)?;
    tree::stop(subject, before)
}

/// Looks at a container that has nothing that cannot be saved. ORDER: what takes long and can be done
/// before it is stopped is.
fn ready(subject: &Subject, ahead: Option<&Ahead>) -> Result<(Vec<tree::Seen>, tree::Before)> {
    let Look { tree, found, tables } = look(subject, ahead)?;
    refused(found).map(drop)?;
    let (blocks, host) = (thread::Blocks::for_waiting(&tree), host::Host::look()?);
    Ok((tree, tree::Before { blocks, host, tables }))
}

/// How long what passes in a moment is waited for: connections that are being accepted or ended.
const PASSES_WITHIN: Duration = Duration::from_secs(1);

/// Makes the directory `place` of a container's processes, and returns them with what it took: they
/// stand still until they are dropped or killed. Those that are to `go_on` do so as soon as all is read,
/// before it is on the disk. What an earlier checkpoint (`base`) has is not written again.
///
/// Errors: as [`stop`], but what passes in a moment was waited for.
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
                (_, before) = ready(subject, ahead.as_ref())?; // they have run since
            }
            let bytes = memory::own_bytes(&tree);
            known.make_room(bytes);
            writer.make_room(bytes);
            let mut stopped = tree::stop(subject, before)?;
            let draft = stopped.read(subject, ahead.as_ref(), known, writer)?;
            let stopped = (!go_on).then_some(stopped);
            // ORDER: they go on; to take the protection away takes a while.
            drop(ahead);
            Ok((stopped, draft.publish()?.figures))
        });
        match saved {
            Err(Error::Passing(_)) if began.elapsed() < PASSES_WITHIN => {
                std::thread::sleep(Duration::from_millis(5)); // they go on meanwhile
            }
            other => return other,
        }
    }
}

/// What was found, unless something of it cannot be saved.
fn refused(found: object::Found) -> Result<object::Found> {
    match found.refusals.len() {
        0 => Ok(found),
        all if all == found.passing => Err(Error::Passing(found.refusals)),
        _ => Err(Error::Refused(found.refusals)),
    }
}

/// Everything that was read of processes that stood still. Dropped, it is no checkpoint.
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
    /// Writes the rest, checks it, and gives it its name.
    fn publish(mut self) -> Result<Written> {
        let began = Instant::now();
        self.records.pages = self.writer.pages()?;
        // What cannot be read back, or become processes, is no checkpoint: better known now than then.
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
    /// Reads everything and publishes it. The processes stay stopped. To begin the checkpoint before
    /// they are stops them for a shorter time.
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
        let mut processes = Vec::new();
        let mut memories = Vec::new();
        for seen in self.processes() {
            let surveyed = survey.process(seen)?;
            let mut record = process::record(seen, &surveyed, &blocks, subject)?;
            if record.ended.is_none() {
                let memory = process::inside(seen, &mut record, &mut survey, surveyed.memory)?;
                record.memory = Some(memories.len());
                let copied = ahead.and_then(|ahead| ahead.of(seen));
                memories.push(memory::contents(seen, memory, copied, &mut known, &mut writer)?);
            }
            processes.push(record);
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
