//! Contexts of asynchronous I/O (io_setup(2)).
//!
//! The state of a context is its ring, in the memory of the process, and its unfinished requests, which only the
//! kernel knows. A BPF program counts them ([`dormouse_bpf::aio`]). While all tasks are stopped, no request
//! begins, and a disk finishes those that are in flight: the checkpoint waits for them before it reads anything
//! ([`finish`]), since they write to memory and files and signal eventfds. A request that waits for an event of a
//! file may never finish, and is refused.
//!
//! LIMIT: a context whose ring the process has unmapped is found only beside another one. Where BPF may not be
//! loaded, every context is refused.

use std::collections::HashSet;
use std::collections::hash_map::Entry;
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::thread::sleep;
use std::time::{Duration, Instant};

use dormouse_bpf::aio::{Context, Contexts};
use dormouse_parcel::Sink;
use dormouse_record::{AioContext, Area, Backing, Error, Of, Result, Thing};
use rustix::fs::{Mode, OFlags};

use super::mapping::Mapping;
use super::pages::{Files, memory_runs};
use super::refusal::Reason;
use super::seen::Seen;
use super::survey::{Found, Survey};
use super::wait::prepare_resume;
use crate::look::aio::{HEADER_BYTES, Header, MAGIC};

/// How long the stopped processes wait for their requests.
const FINISHED_WITHIN: Duration = Duration::from_secs(5);

/// The program that counts requests, loaded on first use.
fn contexts() -> std::result::Result<&'static Contexts, Reason> {
    static CONTEXTS: OnceLock<Contexts> = OnceLock::new();
    if let Some(loaded) = CONTEXTS.get() {
        return Ok(loaded);
    }
    // What fails once may succeed later.
    Contexts::load().map(|loaded| CONTEXTS.get_or_init(|| loaded)).map_err(|why| {
        format!(
            "a context of asynchronous I/O (io_setup), whose requests only BPF can count ({why})"
        )
    })
}

/// The contexts of a process.
fn of(pid: u32) -> std::result::Result<Vec<Context>, Reason> {
    let failed = |e| format!("a context of asynchronous I/O (io_setup): {e}");
    contexts()?.of(pid).map_err(failed)
}

/// The object of the context of a ring; `None` for any other file.
pub(super) fn ring(
    survey: &mut Survey<'_>,
    seen: &Seen,
    mapping: &Mapping<'_>,
    place: &str,
) -> std::result::Result<Option<usize>, Reason> {
    let open = rustix::fs::open(place, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let status = open.and_then(|open| rustix::fs::fstatfs(open.as_fd()));
    let status = status.map_err(|e| format!("it cannot be inspected: {e}"))?;
    if status.f_type as u32 != MAGIC {
        return Ok(None);
    }
    let all = match survey.aio.of.entry(seen.pid) {
        Entry::Occupied(known) => known.into_mut(),
        Entry::Vacant(new) => new.insert(of(seen.pid)?),
    };
    let context = all.iter().find(|context| context.id == mapping.start).copied();
    let refused = |what: &str| {
        Err(format!("a context of asynchronous I/O (io_setup) {what}, which is not saved"))
    };
    let Some(context) = context else {
        return refused("of another process, or a part of its ring");
    };
    let Context { slot, requests, events, tail, unfinished, polls, .. } = context;
    if polls {
        return refused("with a request that waits for an event of a file (IOCB_CMD_POLL)");
    }
    if let Some(finished) = &survey.aio.finished {
        if !finished.contains(&seen.pid) {
            return Err(survey.passing("a context of asynchronous I/O that is new".into()));
        }
        if unfinished > 0 {
            return Err(survey.passing("asynchronous I/O that is not finished".into()));
        }
    }
    let Some(header) = Header::read(seen.pid, mapping.start) else {
        return refused("with a ring that is not readable");
    };
    let head = header.head;
    // While processes run, events arrive between the two readings.
    let tail = if survey.aio.finished.is_some() { tail } else { header.tail };
    let expected = Header { slot, events, head, tail, magic: MAGIC, bytes: HEADER_BYTES };
    if header != expected || head >= events || tail >= events {
        return refused("whose ring the process has changed");
    }
    let it = AioContext { slot, requests, events, head, tail, runs: Vec::new() };
    if slot >= AioContext::SLOTS_MAX {
        return refused("behind more than 4096 others");
    }
    if it.uncollected() > it.uncollected_max() {
        return refused("with more events to be collected than it was made for");
    }
    if (mapping.offset, mapping.end - mapping.start) != (0, it.ring_bytes()) {
        return refused("of whose ring a part is unmapped");
    }
    let index = survey.add(Thing::AioContext(it));
    survey.found.rings.push((index, seen.pid, mapping.start));
    Ok(Some(index))
}

/// Refuses a context of a process that has unmapped its ring: its requests write to memory, too.
pub(super) fn check_mapped(survey: &mut Survey<'_>, seen: &Seen, areas: &[Area]) {
    let Some(all) = survey.aio.of.get(&seen.pid) else { return };
    let objects = &survey.found.objects;
    let is_ring = |area: &&Area| match area.backing {
        Backing::Shared { object, .. } => matches!(objects[object].thing, Thing::AioContext(_)),
        _ => false,
    };
    let rings: HashSet<u64> = areas.iter().filter(is_ring).map(|area| area.start).collect();
    let is_known = |context: &Context| rings.contains(&context.id);
    // A ring that was refused has named its context.
    let is_refused = survey.found.refusals.iter().any(|refusal| refusal.pid == seen.inner);
    if !is_refused && !all.iter().all(is_known) {
        let why = "it has unmapped the ring of a context of asynchronous I/O (io_setup), which is \
                   not saved";
        survey.found.refusals.push(seen.refuse("", why));
    }
}

/// Waits until all requests of stopped processes are finished, without those that wait for an event of a file.
/// `pids` are those of processes with contexts. All processes resume after an error.
pub(super) fn finish(processes: &[Seen], pids: &HashSet<u32>) -> Result<()> {
    let deadline = Instant::now() + FINISHED_WITHIN;
    for seen in processes.iter().filter(|seen| pids.contains(&seen.pid)) {
        let mut pause = Duration::from_micros(20);
        loop {
            let why = match of(seen.pid) {
                Ok(all) if !all.iter().any(|it| it.unfinished > 0 && !it.polls) => break,
                Ok(_) if Instant::now() < deadline => {
                    sleep(pause);
                    pause = (pause * 2).min(Duration::from_millis(1));
                    continue;
                }
                Ok(_) => "asynchronous I/O (io_setup) that is not finished within 5 s".into(),
                Err(why) => why,
            };
            for seen in processes.iter().filter(|seen| !seen.is_zombie) {
                for tid in &seen.tids {
                    prepare_resume(seen, *tid).map_err(Error::of("set the registers", *tid))?;
                }
            }
            return Err(Error::Refused(vec![seen.refuse("", why)]));
        }
    }
    Ok(())
}

/// Reads the rings of stopped processes.
pub(super) fn contents(found: &mut Found, sink: &mut dyn Sink) -> Result<()> {
    for (index, pid, start) in std::mem::take(&mut found.rings) {
        let Thing::AioContext(context) = &mut found.objects[index].thing else { continue };
        let memory = Files::of(pid)?.memory;
        let ring = start..start + context.ring_bytes();
        let failed = Error::file("cannot read", format!("/proc/{pid}/mem"));
        context.runs = memory_runs(&memory, ring, Of::Object(index), sink).map_err(failed)??;
    }
    Ok(())
}
