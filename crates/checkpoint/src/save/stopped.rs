//! A container with all tasks stopped: its records are read, written and published.
//!
//! The value belongs to the thread that created it: a tracer is a thread.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use dormouse_kernel::call::{self, Stop};
use dormouse_parcel::Sink;
use dormouse_record::{Process, Records, Result, Thread, check};

use super::ahead::Ahead;
use super::due::Due;
use super::held::HeldFile;
use super::host::Host;
use super::inspect::{Settings, unless_refused, without_process};
use super::nowhere::Nowhere;
use super::option::Fresh;
use super::pages::Known;
use super::seen::Seen;
use super::stop::{Seized, stop_tree, take_over};
use super::subject::Subject;
use super::survey::Survey;
use super::tcp::Connections;
use super::thaw::Thawed;
use super::wait::Blocks;
use super::{
    aio, due, file, lock, memory, mqueue, object, pipe, process, restart, terminal, tmpfs, udp,
};
use crate::look::ipc::Tables;

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
    /// The trial restore, for which everything stays stopped; zero if there was none.
    pub proof: Duration,
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

/// A container with all tasks stopped. The drop resumes them.
#[derive(Debug)]
pub struct Stopped {
    /// ORDER: dropped first: connections resume before the processes that use them.
    connections: Connections,
    processes: Vec<Seen>,
    /// ORDER: frozen again before any process resumes.
    thawed: Thawed,
    seized: Seized,
    before: Before,
    rehearse: Rehearse,
    took: Duration,
}

/// State that was read or prepared while everything ran.
#[derive(Debug)]
pub(super) struct Before {
    pub(super) blocks: Blocks,
    pub(super) host: Host,
    /// The tables of the container's own IPC namespace.
    pub(super) tables: Option<Tables>,
    pub(super) settings: Settings,
    /// Options of new sockets.
    pub(super) fresh: Fresh,
    /// Processes with asynchronous I/O, by the host's ids.
    pub(super) asynchronous: HashSet<u32>,
}

/// Checks that records can be restored, without making anything.
pub(super) type Rehearse = fn(&Records) -> Result<()>;

/// Stops all tasks.
pub(super) fn stop(subject: &Subject, before: Before, rehearse: Rehearse) -> Result<Stopped> {
    let (processes, seized) = stop_tree(subject, &before.blocks)?;
    // ORDER: before anything is read: requests write to memory and files, and signal eventfds.
    aio::finish(&processes, &before.asynchronous)?;
    let took = seized.began().elapsed();
    let connections = Connections::default();
    let thawed = Thawed::default();
    Ok(Stopped { connections, processes, thawed, seized, before, rehearse, took })
}

/// Reads the records of a twin, whose tasks the calling thread has stopped, and ends it.
pub(super) fn read_twin(
    subject: &Subject,
    (tasks, first): (Vec<(u32, Option<i64>)>, OwnedFd),
    waits: Blocks,
    before: impl FnOnce() -> Result<Before>,
    rehearse: Rehearse,
) -> Result<Records> {
    let (processes, seized) = take_over(subject, tasks, first, &Blocks::default())?;
    let took = seized.began().elapsed();
    // ORDER: `seized` ends the twin when this returns, also by an error.
    let (connections, thawed) = (Connections::default(), Thawed::default());
    let before = Before { blocks: waits, ..before()? };
    let mut stopped = Stopped { connections, processes, thawed, seized, before, rehearse, took };
    let draft = stopped.read(subject, None, Known::default(), Box::new(Nowhere::default()))?;
    Ok(draft.records)
}

impl Stopped {
    fn processes(&self) -> &[Seen] {
        &self.processes
    }

    /// Takes the program that reads waits, for use now.
    fn take_blocks(&mut self) -> Blocks {
        std::mem::take(&mut self.before.blocks)
    }

    /// Takes the program that reads waits, for the twin of this container.
    pub fn take_waits(&mut self) -> Blocks {
        self.take_blocks()
    }

    fn took(&self) -> Duration {
        self.took
    }

    /// Whether a task has run while others were stopped already, or has a deliverable signal.
    fn have_worked(&self) -> bool {
        self.seized.have_worked
    }

    /// Kills all tasks, none of which runs again: `kill` sends SIGKILL to every process. Returns
    /// when the last has exited.
    pub fn kill<E>(
        mut self,
        kill: impl FnOnce() -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        self.connections.hold();
        kill()?;
        self.connections.stay();
        // A tracer is notified of the exit of its tracees before their parents are. The first
        // process of a pid namespace exits after all others, so no order can be chosen.
        while let Ok((tid, stop)) = call::wait_stop(None) {
            if matches!(stop, Stop::Ended(_)) {
                self.seized.tasks.remove(&tid);
            }
        }
        Ok(())
    }

    /// Reads everything and publishes it. The processes stay stopped, for a shorter time if the
    /// caller has created `sink` before the stop.
    pub fn write(&mut self, subject: &Subject, sink: impl Sink + 'static) -> Result<Written> {
        self.read(subject, None, Known::default(), Box::new(sink))?.publish()
    }

    /// Reads everything that was not copied ahead. The processes stay stopped.
    pub(super) fn read(
        &mut self,
        subject: &Subject,
        ahead: Option<&Ahead>,
        mut known: Known,
        mut sink: Box<dyn Sink>,
    ) -> Result<Draft> {
        let began = Instant::now();
        let mut survey = Survey::new(subject, ahead);
        survey.fresh = std::mem::take(&mut self.before.fresh);
        survey.aio.finished = Some(std::mem::take(&mut self.before.asynchronous));
        without_process(&mut survey, self.processes(), self.before.tables.as_ref())?;
        self.thawed = Thawed::thaw(subject, self.processes().first())?;
        let blocks = self.take_blocks();
        let stopped = self.processes().iter().filter(|seen| seen.stopped.is_some());
        survey.stopped = stopped.map(|seen| (seen.parent, seen.inner)).collect();
        let mut processes: Vec<Process> = Vec::new();
        let mut memories = Vec::new();
        for seen in self.processes() {
            let surveyed = object::survey_process(&mut survey, seen)?;
            let mut record = process::record(seen, &surveyed, &blocks, subject)?;
            if record.ended.is_none() {
                let memory = process::inside(seen, &mut record, &mut survey, surveyed.memory)?;
                record.memory = Some(memories.len());
                let copied = ahead.and_then(|ahead| ahead.of(seen));
                let memory = memory::contents(seen, memory, copied, &mut known, &mut *sink)?;
                if let Err((tid, why)) = check::addresses(&record, &memory.areas) {
                    let refusal =
                        seen.refuse(format!("thread {tid}"), format!("{why}, not saved yet"));
                    survey.found.refusals.push(refusal);
                }
                memories.push(memory);
            }
            processes.push(record);
        }
        for record in processes.iter_mut().filter(|record| record.stopped.is_some()) {
            record.stop_was_told = Some(!survey.unreported.contains(&record.pid));
        }
        for memory in &mut memories {
            file::map_by_leased(&survey, &mut memory.areas);
        }
        let leases = std::mem::take(&mut survey.leases);
        let refused = lock::give_out(leases, self.processes(), &mut processes);
        survey.found.refusals.extend(refused);
        terminal::sessions(&mut survey, self.processes());
        let offsets = survey.times.own;
        let mut found = unless_refused(object::finish(survey, self.processes()))?;
        self.connections.read(subject, &mut found)?;
        terminal::contents(&mut found)?;
        mqueue::contents(&mut found)?;
        pipe::contents(&mut found)?;
        udp::contents(&mut found)?;
        tmpfs::contents(&mut found, &mut *sink)?;
        memory::object_contents(&mut found, &mut *sink)?;
        aio::contents(&mut found, &mut *sink)?;
        let host = std::mem::take(&mut self.before.host);
        let mut about = host.about(subject, offsets)?;
        about.network = found.network.take();
        let settings = std::mem::take(&mut self.before.settings);
        [about.hostname, about.domainname] = settings.names;
        about.ipc_limits = settings.limits;
        let (objects, held) = (found.objects, found.held);
        let records = Records { about, processes, memories, objects, ..Records::default() };
        let cgroups = records.cgroups();
        let is_frozen = |path: &String| cgroups.is_some_and(|all| all.stands_still(path));
        let mut at_work = records.processes.iter().zip(self.processes()).filter(|(p, _)| {
            p.ended.is_none() && p.stopped.is_none() && !p.cgroup.as_ref().is_some_and(is_frozen)
        });
        let mut has_rung = false;
        let is_busy = self.have_worked()
            || at_work.any(|(p, seen)| {
                let mut threads = seen.tids.iter().zip(&p.threads);
                let is_at_work = |(tid, t): (&u32, &Thread)| {
                    let due = due::due(seen, *tid, &t.registers);
                    has_rung |= due == Some(Due::Timer);
                    !restart::waits(t) || due == Some(Due::Event)
                };
                seen.has_run || threads.any(is_at_work)
            });
        // For the twin.
        self.before.blocks = blocks;
        let figures = Figures {
            processes: records.processes.len(),
            threads: records.processes.iter().map(|p| p.threads.len()).sum(),
            bytes: sink.bytes(),
            new_bytes: sink.new_bytes(),
            connections: self.connections.count(),
            ahead: ahead.map_or(Duration::ZERO, Ahead::took),
            stop: self.took(),
            read: began.elapsed(),
            publish: Duration::ZERO,
            proof: Duration::ZERO,
        };
        Ok(Draft {
            sink,
            records,
            figures,
            held,
            is_busy,
            has_rung,
            quiet: subject.quiet,
            rehearse: self.rehearse,
        })
    }
}

/// Everything that was read from stopped processes. If it is dropped, there is no checkpoint.
#[derive(Debug)]
pub(super) struct Draft {
    sink: Box<dyn Sink>,
    records: Records,
    figures: Figures,
    held: Vec<HeldFile>,
    is_busy: bool,
    /// A thread waits for a timer that has expired.
    has_rung: bool,
    quiet: Duration,
    rehearse: Rehearse,
}

impl Draft {
    /// Writes the rest, verifies it, and renames it to its final name.
    pub(super) fn publish(mut self) -> Result<Written> {
        let began = Instant::now();
        self.records.pages = self.sink.pages()?;
        // Records that cannot be read back, or not be restored, are an error now and not at the
        // restore.
        check::records(&self.records)?;
        (self.rehearse)(&self.records)?;
        self.sink.publish(&self.records)?;
        let figures = Figures { publish: began.elapsed(), ..self.figures };
        let next_ring = match self.has_rung {
            true => Some(0),
            false => self.records.next_ring_ns(self.quiet.as_nanos() as u64),
        };
        let next_ring = next_ring.map(Duration::from_nanos);
        Ok(Written { figures, held: self.held, is_busy: self.is_busy, next_ring })
    }
}
