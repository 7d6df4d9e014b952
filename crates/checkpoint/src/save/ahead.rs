//! Large memory, copied while its processes run.
//!
//! Pages of large areas are write-protected in a way that does not block the writer: the kernel
//! removes the protection of a page at the first write to it, which records the write
//! (userfaultfd(2), UFFD_FEATURE_WP_ASYNC). Then all pages are copied. After the processes have
//! been stopped, only the pages written since are copied again (PAGEMAP_SCAN). The stop time
//! therefore grows with the rate of writes and hardly with the size of memory.
//!
//! ORDER: a page that is written while it is copied may be half old and half new. Such a page
//! counts as written, so it is copied again. The kernel alone keeps the protection: areas that are
//! unmapped, moved or mapped anew since, and copies made by fork(2), are not protected and are read
//! as usual.
//!
//! A write that began before the protection is not recorded: read(2) with O_DIRECT writes to memory
//! that it has pinned. All threads are therefore stopped for a moment between protection and copy,
//! so that no thread is in the middle of a call. The kernel continues asynchronous work for a
//! stopped process, so memory of a process with an io_uring or asynchronous I/O (io_setup(2)) is not copied
//! ahead.
//!
//! A page that was copied twice is twice in `pages`, and no run refers to the first copy. LIMIT:
//! one round, however much is written meanwhile.
//!
//! A userfaultfd belongs to the address space that created it, so the process itself creates it and
//! is stopped for a moment for that, too. The descriptor is taken over at once, and closed when all
//! was read: nothing is protected then. KERNEL(6.7): before, everything is copied while all are
//! stopped.

use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::time::Duration;

use dormouse_kernel::call::{self, Scan};
use dormouse_kernel::{Errno, pidfd, proc};
use dormouse_parcel::Sink;
use dormouse_record::{Area, Backing, Error, PAGE_BYTES, Result, Run};
use rustix::fd::{AsFd, OwnedFd};

use super::calls::begin;
use super::halt::Halt;
use super::mapping::{Mapping, mappings};
use super::pages::{Batch, Files, Known, own_pages};
use super::seen::Seen;
use super::stop::stop_tree;
use super::subject::Subject;
use super::thaw::Thawed;
use super::wait::{Blocks, prepare_resume};
use crate::inject::landing::Ground;
use crate::look::descriptor::numbers;

/// Below this amount of private memory, copying costs less than a second stop.
const LARGE_BYTES: u64 = 16 << 20;

/// The same limit for a single area.
const LARGE_AREA_BYTES: u64 = 1 << 20;

/// Memory that was copied ahead, by process.
#[derive(Debug)]
pub(crate) struct Ahead {
    of: HashMap<u32, Copied>,
    took: Duration,
}

/// Memory of one process that was copied ahead.
#[derive(Debug)]
pub(crate) struct Copied {
    /// Identifies the process: the pid is not reused while this process is alive.
    process: OwnedFd,
    files: Files,
    /// The userfaultfd. When it is closed, nothing is protected any more.
    _notes: OwnedFd,
    /// Ranges in which writes are recorded.
    noted: Vec<Range<u64>>,
    /// Ranges that were copied, by address.
    covered: Vec<Range<u64>>,
    /// Runs of the copied pages, without pages of zeros.
    runs: Vec<Run>,
}

/// Copies the memory of large processes; `None` if there is no large process.
pub(super) fn copy(
    subject: &Subject,
    tree: &[Seen],
    blocks: &Blocks,
    known: &mut Known,
    sink: &mut dyn Sink,
) -> Result<Option<Ahead>> {
    let large: Vec<u32> = tree.iter().filter(|seen| is_large(seen)).map(|seen| seen.pid).collect();
    if large.is_empty() {
        return Ok(None);
    }
    let mut watched = Vec::new();
    let first = for_a_moment(subject, blocks, |seen| {
        if large.contains(&seen.pid) {
            // A process that cannot be watched is copied later.
            watched.extend(watch(&seen).ok().flatten().map(|copied| (seen, copied)));
        }
    })?;
    let mut protected: Vec<(Seen, Copied, Vec<Range<u64>>)> = Vec::new();
    for (seen, copied) in watched {
        let pages = copied.protect();
        protected.push((seen, copied, pages));
    }
    // A process may have set up asynchronous I/O before its memory was protected.
    let mut asynchronous = Vec::new();
    let took = first
        + for_a_moment(subject, blocks, |seen| {
            if protected.iter().any(|(of, ..)| of.pid == seen.pid) && has_contexts(&seen) {
                asynchronous.push(seen.pid);
            }
        })?;
    protected.retain(|(seen, ..)| !asynchronous.contains(&seen.pid));
    let mut of = HashMap::new();
    for (seen, mut copied, pages) in protected {
        copied.read(&seen, pages, known, sink)?;
        of.insert(seen.pid, copied);
    }
    Ok(Some(Ahead { of, took }))
}

/// Calls `act` for each process while all are stopped; returns how long they were stopped.
fn for_a_moment(subject: &Subject, blocks: &Blocks, mut act: impl FnMut(Seen)) -> Result<Duration> {
    let (processes, seized) = stop_tree(subject, blocks)?;
    let began = seized.began();
    let thawed = Thawed::thaw(subject, processes.first())?;
    for seen in processes.into_iter().filter(|seen| !seen.is_zombie) {
        for tid in &seen.tids {
            prepare_resume(&seen, *tid).map_err(Error::of("set the registers", *tid))?;
        }
        act(seen);
    }
    drop((thawed, seized));
    Ok(began.elapsed())
}

fn is_large(seen: &Seen) -> bool {
    let kb = |name| seen.fields.number(name).unwrap_or(0);
    let is_ring = |number: u32| {
        let link = fs::read_link(format!("/proc/{}/fd/{number}", seen.pid));
        link.is_ok_and(|link| link.as_os_str() == "anon_inode:[io_uring]")
    };
    let has_ring = || numbers(seen.pid).map_or(true, |all| all.into_iter().any(is_ring));
    kb("RssAnon") + kb("VmSwap") >= LARGE_BYTES >> 10 && !has_ring()
}

/// Whether a process has asynchronous I/O (io_setup(2)).
fn has_contexts(seen: &Seen) -> bool {
    let text = proc::whole_text(format!("/proc/{}/maps", seen.pid));
    text.is_ok_and(|text| mappings(&text).iter().any(Mapping::may_be_ring))
}

/// Prepares the recording of writes to the large areas of a stopped process, once they are
/// protected.
fn watch(seen: &Seen) -> std::result::Result<Option<Copied>, Errno> {
    let pid = seen.pid;
    let text = proc::whole_text(format!("/proc/{pid}/maps")).map_err(|_| Errno::SRCH)?;
    let all = mappings(&text);
    if all.iter().any(Mapping::may_be_ring) {
        return Ok(None);
    }
    let large = all.into_iter().filter(|m| m.is_anonymous() && m.end - m.start >= LARGE_AREA_BYTES);
    let large: Vec<Range<u64>> = large.map(|m| m.start..m.end).collect();
    let ground = Ground::in_object(pid);
    let (Some(ground), Some(handle), false) = (ground, &seen.pidfd, large.is_empty()) else {
        return Ok(None);
    };
    let _halt = Halt::take(seen, &ground)?;
    let mut remote = begin(seen, pid, &ground)?;
    let copy = |number| pidfd::copy_descriptor(handle, number as i32);
    let made = remote.descriptor(libc::SYS_userfaultfd, [call::NOTE_FLAGS], copy);
    remote.give_back()?;
    let made = made?.map_err(|e| Errno::from_raw_os_error(e.errno()));
    let notes = made?;
    call::userfault_note_writes(notes.as_fd())?;
    // Areas that are registered with a userfaultfd of the process itself are left out.
    let register = |area: &Range<u64>| {
        call::userfault_register_writes(notes.as_fd(), area.start, area.end - area.start).is_ok()
    };
    Ok(Some(Copied {
        process: handle.try_clone().map_err(|_| Errno::MFILE)?,
        files: Files::of(pid).map_err(|_| Errno::SRCH)?,
        noted: large.into_iter().filter(register).collect(),
        _notes: notes,
        covered: Vec::new(),
        runs: Vec::new(),
    }))
}

impl Ahead {
    /// How long the processes were stopped.
    pub(super) fn took(&self) -> Duration {
        self.took
    }

    /// The copied memory of a stopped process.
    pub(super) fn of(&self, seen: &Seen) -> Option<&Copied> {
        self.of.get(&seen.pid).filter(|copied| pidfd::is_alive(&copied.process))
    }

    /// Whether writes to this area are recorded by this checkpoint. A recording by another process
    /// needs a descriptor, which is refused by itself.
    pub(super) fn notes(&self, seen: &Seen, area: Range<u64>) -> bool {
        let is_within = |noted: &Range<u64>| noted.start < area.end && area.start < noted.end;
        self.of(seen).is_some_and(|copied| copied.noted.iter().any(is_within))
    }
}

impl Copied {
    /// Protects the recorded areas of a running process; returns the ranges of their pages.
    fn protect(&self) -> Vec<Range<u64>> {
        // An area that was unmapped meanwhile has no pages to copy ahead.
        let found =
            |area: &Range<u64>| own_pages(&self.files.pagemap, Scan::Protect, area.start, area.end);
        let all = self.noted.iter().flat_map(|area| found(area).unwrap_or_default());
        all.map(|run| run.start..run.end).collect()
    }

    /// Copies pages of a running process. Pages that are unmapped meanwhile or not readable are
    /// left out.
    fn read(
        &mut self,
        seen: &Seen,
        pages: Vec<Range<u64>>,
        known: &mut Known,
        sink: &mut dyn Sink,
    ) -> Result<()> {
        let whole = 0..u64::MAX;
        let mut areas = [Area {
            start: whole.start,
            end: whole.end,
            access: 0,
            backing: Backing::Anonymous,
            flags: Vec::new(),
            runs: Vec::new(),
        }];
        for range in pages {
            let mut at = range.start;
            while at < range.end {
                let mut batch = Batch::new(seen, &self.files);
                let end = at + batch.gather(0, at..range.end);
                let read = batch.read(known);
                // ORDER: alive after the read, so the memory that was read was that of this
                // process.
                if !pidfd::is_alive(&self.process) {
                    return Ok(());
                }
                if let Ok(shared) = read {
                    batch.write(shared, &mut areas, known, sink)?;
                    cover(&mut self.covered, at..end);
                }
                at = end;
            }
        }
        let [all] = areas;
        self.runs = all.runs;
        Ok(())
    }

    /// Runs of a range whose pages have not been written since the copy.
    pub(super) fn runs_within(&self, range: Range<u64>) -> impl Iterator<Item = Run> + '_ {
        let end = |run: &Run| run.address + run.pages * PAGE_BYTES;
        let first = self.runs.partition_point(|run| end(run) <= range.start);
        let within = self.runs[first..].iter().take_while(move |run| run.address < range.end);
        within.map(move |run| {
            let (from, to) = (run.address.max(range.start), end(run).min(range.end));
            let skipped = (from - run.address) / PAGE_BYTES;
            Run { address: from, pages: (to - from) / PAGE_BYTES, first: run.first + skipped }
        })
    }

    /// Parts of a range that were not copied.
    pub(super) fn missing_from(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let first = self.covered.partition_point(|covered| covered.end <= range.start);
        let mut all = Vec::new();
        let mut at = range.start;
        for covered in self.covered[first..].iter().take_while(|c| c.start < range.end) {
            if at < covered.start {
                all.push(at..covered.start);
            }
            at = covered.end;
        }
        if at < range.end {
            all.push(at..range.end);
        }
        all
    }
}

fn cover(all: &mut Vec<Range<u64>>, range: Range<u64>) {
    match all.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => all.push(range),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copied() -> Copied {
        let file = || fs::File::open("/dev/null").unwrap();
        let mut covered = Vec::new();
        for page in [1, 2, 3, 7, 8] {
            cover(&mut covered, page * PAGE_BYTES..(page + 1) * PAGE_BYTES);
        }
        // The third page is zeros.
        let run = |page: u64, pages, first| Run { address: page * PAGE_BYTES, pages, first };
        let runs = vec![run(1, 1, 10), run(2, 1, 30), run(7, 2, 40)];
        Copied {
            process: file().into(),
            files: Files { pagemap: file(), memory: file() },
            _notes: file().into(),
            noted: Vec::new(),
            covered,
            runs,
        }
    }

    fn pages(range: Range<u64>) -> Range<u64> {
        range.start * PAGE_BYTES..range.end * PAGE_BYTES
    }

    #[test]
    fn pages_without_a_copy_are_missing() {
        let missing = |range| copied().missing_from(pages(range));
        assert_eq!(missing(1..4), []);
        assert_eq!(missing(0..10), [pages(0..1), pages(4..7), pages(9..10)]);
        assert_eq!(missing(2..8), [pages(4..7)]);
        assert_eq!(missing(4..6), [pages(4..6)]);
        assert_eq!(missing(9..12), [pages(9..12)]);
    }

    #[test]
    fn runs_are_cut_to_the_requested_range() {
        let within = |range| {
            let all = copied().runs_within(pages(range)).collect::<Vec<_>>();
            all.iter().map(|r| (r.address / PAGE_BYTES, r.pages, r.first)).collect::<Vec<_>>()
        };
        assert_eq!(within(0..10), [(1, 1, 10), (2, 1, 30), (7, 2, 40)]);
        assert_eq!(within(2..8), [(2, 1, 30), (7, 1, 40)]);
        assert_eq!(within(8..9), [(8, 1, 41)]);
        assert_eq!(within(3..7), []);
    }
}
