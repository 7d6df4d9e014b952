//! Fills the memory of a container that runs already, from its checkpoint (userfaultfd(2)).
//!
//! Each restore has two processes for as long as the filling takes. The *filler* serves page
//! faults, 64 kB around the page at once, and fills the rest in between. The *second* only waits
//! for the filler to exit. Both share one table of descriptors and one file, which contains the
//! state of the work ([`dormouse_launch::fill`]). If the filler is killed, the second takes its
//! place and starts another second; if the second is killed, the filler starts another. Therefore
//!
//! - if either process is killed, nothing is lost. Messages of the kernel are read directly into
//!   the shared file, and descriptors from the kernel (of a child, after fork(2)) are in the shared
//!   table. At no moment does only one of the two have them;
//! - the keeper has the descriptors as well. If both are killed it starts again, unless a process
//!   has forked meanwhile: the keeper has no descriptor of the child, so the container is ended;
//! - if the keeper is killed, the two continue. LIMIT: if all three are killed at once, the kernel
//!   maps missing pages as zeros until the next command or the daemon ends the container.
//!
//! **Invariant.** A page of [`Left`] has not been there since the restore, or is there already: the
//! kernel never fills a page twice (EEXIST). Changes of the memory are reported before they take
//! effect, and no page is filled before the report was read (EAGAIN). Therefore the list is
//! recorded after each such event, while filled pages are removed from it later.
//!
//! **Contents** are compared with their BLAKE3, a chunk at a time, before any of it is copied to a
//! process. On a mismatch the container is ended.

mod left;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use dormouse_kernel::call::{self as kernel, CloneArgs, CloneFlags, Cloned, UserfaultEvent};
use dormouse_launch::fill::{self, Job, TOUCHED_MAX, Touched, head, list_bytes};
use dormouse_launch::protocol::{FILL_DESCRIPTORS, Id};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use rustix::process::{PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};

use crate::call;
use left::Left;

/// LIMIT: how often the keeper starts again when both are killed.
const BEGINS_MAX: u32 = 3;
/// Filling of the rest starts after so long without a fault, and after [`FIRST_WITHIN`] at the
/// latest. A restored process is busy with its wake and may share the only processor.
const QUIET: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
const FIRST_WITHIN: Duration = Duration::from_millis(100);
const NOT_AT_ALL: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
/// Time that a served process has for its next fault before filling of the rest continues.
const MORE_WITHIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000 };
/// LIMIT: chunks kept in memory.
const CHUNKS_KEPT: usize = 4;
/// LIMIT: retries of a page for which the container's memory limit has no room.
const MEMORY_WITHIN: Duration = Duration::from_secs(20);
/// Time for the container to exit.
const END_WITHIN: Duration = Duration::from_secs(20);
/// Filled bytes after which the list is recorded without an event.
const RECORD_BYTES: u64 = 16 << 20;
/// The range in which all mappings are.
const ALL: (u64, u64) = (1 << 16, 0x7fff_ffff_f000);

/// Memory that is being filled, as the keeper sees it.
#[derive(Debug)]
pub(crate) struct Fill {
    pub(crate) id: Id,
    given: Inputs,
    /// Hung up when the filling processes have exited.
    alive: OwnedFd,
    begins: u32,
}

/// Inputs of the filling processes.
///
/// ORDER: dropped in this order, so that a holder of the file's lock finds memory without a
/// userfaultfd.
#[derive(Debug)]
struct Inputs {
    sources: Vec<OwnedFd>,
    file: File,
    /// The contents, listed in [`Job::parts`].
    pages: Vec<File>,
    /// The first process of the container.
    first: OwnedFd,
    touched: File,
}

/// Result of the filling.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// All memory is filled, or the container has ended.
    Done,
    /// Others are at it.
    Again,
    /// Impossible: the container was ended.
    Lost,
}

impl Fill {
    /// Starts the filling processes.
    pub(crate) fn begin(id: Id, parts: u8, fds: Vec<OwnedFd>) -> Result<Self, Errno> {
        let mut fds = fds.into_iter();
        let [Some(file), Some(first), Some(touched)]: [_; FILL_DESCRIPTORS] =
            std::array::from_fn(|_| fds.next())
        else {
            return Err(Errno::BADMSG);
        };
        let pages = fds.by_ref().take(usize::from(parts)).map(File::from).collect();
        let (file, touched) = (file.into(), File::from(touched));
        let given = Inputs { file, pages, first, touched, sources: fds.collect() };
        let alive = start(&given)?;
        Ok(Self { id, given, alive, begins: 1 })
    }

    pub(crate) fn alive(&self) -> BorrowedFd<'_> {
        self.alive.as_fd()
    }

    /// The filling processes have exited: returns the result, or starts them again.
    pub(crate) fn ended(&mut self) -> Ended {
        if fill::number(&self.given.file, head::DONE).is_ok_and(|done| done != 0) {
            return Ended::Done;
        }
        self.begins += 1;
        if self.begins <= BEGINS_MAX
            && let Ok(alive) = start(&self.given)
        {
            self.alive = alive;
            return Ended::Again;
        }
        let why = "the processes that filled its memory were killed repeatedly";
        let _ = fill::give_reason(&self.given.file, why);
        let _ = pidfd_send_signal(&self.given.first, Signal::KILL);
        Ended::Lost
    }
}

/// Starts a filling process. Returns a pipe that hangs up when it and all its helpers have exited.
fn start(given: &Inputs) -> Result<OwnedFd, Errno> {
    let (alive, living) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let args = CloneArgs::default();
    // SAFETY: the keeper has one thread, so no lock is held by another.
    match unsafe { kernel::clone3(&args) }? {
        Cloned::Child => {
            let files = given.pages.iter().chain([&given.file, &given.touched]).map(AsFd::as_fd);
            let more = given.sources.iter().chain([&given.first, &living]).map(AsFd::as_fd);
            // ORDER: from here on no copy of a descriptor that the keeper closes stays open.
            let closed = call::close_all_but(files.chain(more));
            let code = match closed.and_then(|()| rustix::io::write(&living, &[0])) {
                Ok(1) => live(given, true),
                _ => 1,
            };
            kernel::exit(code)
        }
        Cloned::Parent { .. } => {
            drop(living);
            match rustix::io::retry_on_intr(|| rustix::io::read(&alive, &mut [0]))? {
                1 => Ok(alive),
                _ => Err(Errno::CHILD),
            }
        }
    }
}

/// Body of both processes, at the start or when one takes the other's place.
fn live(given: &Inputs, is_first: bool) -> i32 {
    let Ok(head) = Head::map(&given.file) else { return 1 };
    let _ = rustix::thread::set_name(c"dormouse-fill");
    let mut filler = match Filler::load(given, &head, is_first) {
        Ok(filler) => filler,
        Err(why) => return give_up(given, &head, &why),
    };
    match filler.run() {
        Ok(()) => {
            filler.record_touched();
            head.set(head::DONE, 1);
            // ORDER: before the file, as the keeper does it.
            for source in given.sources.iter().map(AsRawFd::as_raw_fd) {
                // SAFETY: it is done, so neither of the two uses them any more, nor drops them.
                let _ = unsafe { call::close_range(source, source) };
            }
            0
        }
        Err(why) => give_up(given, &head, &why),
    }
}

/// The second of the two processes.
struct Second {
    pidfd: OwnedFd,
    /// The filler, for the second: the shared table of descriptors shows it the filler's exit.
    _filler: OwnedFd,
}

/// Starts a second; the function does not return in it.
fn make_second(given: &Inputs, head: &Head) -> Result<Second, Errno> {
    let filler = pidfd_open(getpid(), PidfdFlags::empty())?;
    let flags = CloneFlags::FILES | CloneFlags::PARENT;
    // SAFETY: this process has one thread. The second closes nothing, because the table is shared.
    match unsafe { kernel::clone3(&CloneArgs { flags, ..CloneArgs::default() }) }? {
        Cloned::Parent { pidfd, .. } => Ok(Second { pidfd, _filler: filler }),
        Cloned::Child => {
            let _ = rustix::thread::set_name(c"dormouse-wait");
            has_ended(filler.as_fd(), None);
            let is_done = head.get(head::DONE) != 0;
            kernel::exit(if is_done { 0 } else { live(given, false) })
        }
    }
}

/// Returns whether a process exits within a time; `None` waits without limit.
fn has_ended(pidfd: BorrowedFd<'_>, within: Option<Duration>) -> bool {
    let time = within.map(|within| Timespec {
        tv_sec: within.as_secs() as i64,
        tv_nsec: i64::from(within.subsec_nanos()),
    });
    let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
    rustix::io::retry_on_intr(|| poll(&mut fds, time.as_ref())).is_ok_and(|ready| ready > 0)
}

/// Ends the container, which must not continue with wrong memory.
///
/// ORDER: descriptors stay open until all processes of the container have exited; otherwise pending
/// faults would be resolved with zeros.
fn give_up(given: &Inputs, head: &Head, why: &str) -> i32 {
    let _ = fill::give_reason(&given.file, why);
    let _ = pidfd_send_signal(&given.first, Signal::KILL);
    has_ended(given.first.as_fd(), Some(END_WITHIN));
    head.set(head::DONE, 1);
    1
}

/// The first page of the file, shared by all processes.
struct Head(*mut u64);

impl Head {
    const BYTES: usize = 4096;

    fn map(file: &File) -> Result<Self, Errno> {
        use rustix::mm::{MapFlags, ProtFlags, mlock, mmap};
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses a place, so nothing is mapped over.
        let at =
            unsafe { mmap(std::ptr::null_mut(), Self::BYTES, access, MapFlags::SHARED, file, 0) }?;
        // Locked, so that the kernel never faults when it writes to it.
        // SAFETY: it was mapped just now.
        let _ = unsafe { mlock(at, Self::BYTES) };
        Ok(Self(at.cast()))
    }

    fn get(&self, place: usize) -> u64 {
        // SAFETY: a place is one of `head`, all within the page, which is never unmapped.
        unsafe { self.0.add(place).read_volatile() }
    }

    fn set(&self, place: usize, value: u64) {
        // SAFETY: as above.
        unsafe { self.0.add(place).write_volatile(value) }
    }

    /// Reads a message into the shared head, where it survives the death of either process.
    fn receive(&self, source: i64, fd: RawFd) -> Result<(), Errno> {
        self.set(head::SENDER, source.cast_unsigned());
        self.set(head::MESSAGE, 0);
        // SAFETY: as above; a message is four numbers.
        let n = unsafe { libc::read(fd, self.0.add(head::MESSAGE).cast(), kernel::MESSAGE_BYTES) };
        match n {
            0.. => Ok(()),
            // SAFETY: the location is valid for the life of the thread.
            _ => Err(Errno::from_raw_os_error(unsafe { *libc::__errno_location() })),
        }
    }

    fn message(&self) -> Option<UserfaultEvent> {
        UserfaultEvent::decode(std::array::from_fn(|n| self.get(head::MESSAGE + n)))
    }
}

/// Reason memory cannot be filled.
type Reason = String;

/// The filling process.
struct Filler<'g> {
    given: &'g Inputs,
    head: &'g Head,
    job: Job,
    left: Left,
    /// Address spaces of children, by their descriptors.
    children: Vec<RawFd>,
    second: Option<Second>,
    /// Chunks that are right, the one used last at the end.
    chunks: Vec<(u64, Vec<u8>)>,
    touched: Vec<Touched>,
    /// Bytes filled since the list was last recorded.
    unrecorded: u64,
    /// The two places for a list, begin and length of each, and the end of the file.
    places: [(u64, u64); 2],
    end: u64,
}

impl<'g> Filler<'g> {
    /// Continues from the state in the file.
    fn load(given: &'g Inputs, head: &'g Head, is_first: bool) -> Result<Self, Reason> {
        let read = |e: std::io::Error| format!("what is left of its memory cannot be read: {e}");
        let job = Job::read(&given.file).map_err(read)?;
        if job.parts.len() != given.pages.len() {
            return Err("the files of its memory are not as many as were announced".into());
        }
        if job.processes.len() != given.sources.len() {
            return Err("the address spaces to be filled are not as many as were announced".into());
        }
        let side = (head.get(head::STATE) & 1) as usize;
        let (at, count) = (head.get(head::LISTS + side * 2), head.get(head::LISTS + side * 2 + 1));
        let left = Left::new(job.read_list(&given.file, at, count).map_err(read)?);
        let end = given.file.metadata().map_err(read)?.len().next_multiple_of(4096);
        let mut places = [(end, 0); 2];
        places[side] = (at, list_bytes(count as usize));
        let chunks = Vec::with_capacity(CHUNKS_KEPT);
        let (children, touched) = (Vec::new(), Vec::new());
        let (second, unrecorded) = (None, 0);
        let mut filler = Self {
            given,
            head,
            job,
            left,
            children,
            second,
            chunks,
            touched,
            unrecorded,
            places,
            end,
        };
        let is_followed = head.get(head::STATE) & 2 != 0;
        let message = head.message().filter(|_| !is_followed);
        let has_forked = matches!(message, Some(UserfaultEvent::Fork(_)));
        if is_first && (has_forked || head.get(head::FORKED) != 0) {
            return Err(
                "the processes that filled its memory were killed after one of its processes \
                 forked, and the descriptor of the child is lost"
                    .into(),
            );
        }
        let mut children: Vec<i64> = filler.left.pieces().iter().map(|p| p.source).collect();
        children.retain(|source| *source < 0);
        children.dedup();
        filler.children = children.into_iter().map(number_of).collect();
        let sender = head.get(head::SENDER).cast_signed();
        match message {
            // The faulting thread faults again, see below.
            None | Some(UserfaultEvent::Fault(_)) => filler.settle(),
            Some(event) => filler.follow(sender, event)?,
        }
        filler.wake_all();
        Ok(filler)
    }

    /// Fills until no page is missing.
    fn run(&mut self) -> Result<(), Reason> {
        let began = Instant::now();
        while began.elapsed() < FIRST_WITHIN && self.serve(QUIET)? {}
        loop {
            self.serve(NOT_AT_ALL)?;
            let Some(next) = self.left.next() else { return Ok(()) };
            self.copy(next.source, next.start..next.end.min(next.start + self.job.around_bytes))?;
            if self.unrecorded > RECORD_BYTES {
                self.put_on_record(false)?;
            }
        }
    }

    /// Serves faults for a time and looks after the second. Returns whether there was any fault.
    fn serve(&mut self, mut within: Timespec) -> Result<bool, Reason> {
        let mut was_served = false;
        loop {
            self.close_children()?;
            let sources = 0..self.given.sources.len() as i64;
            let all: Vec<i64> =
                sources.chain(self.children.iter().map(|fd| source_of(*fd))).collect();
            let borrowed: Vec<BorrowedFd<'_>> =
                all.iter().map(|s| borrow(self.given, *s)).collect();
            let mut fds: Vec<PollFd<'_>> =
                borrowed.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
            if let Some(second) = &self.second {
                fds.push(PollFd::new(&second.pidfd, PollFlags::IN));
            }
            let polled = rustix::io::retry_on_intr(|| poll(&mut fds, Some(&within)));
            polled.map_err(|e| format!("its memory cannot be listened to: {e}"))?;
            let is_ready = |fd: &PollFd<'_>| fd.revents().contains(PollFlags::IN);
            let lacks_second = fds.get(all.len()).is_none_or(is_ready);
            let ready: Vec<i64> =
                all.iter().zip(&fds).filter(|(_, fd)| is_ready(fd)).map(|(s, _)| *s).collect();
            if lacks_second {
                // After a failure the next attempt is made a while later.
                self.second = make_second(self.given, self.head).ok();
            }
            let mut has_received = false;
            for source in ready {
                has_received |= self.receive_event(source)?;
            }
            if !has_received {
                return Ok(was_served);
            }
            was_served = true;
            within = MORE_WITHIN;
        }
    }

    /// Reads one message and handles it. Returns whether there was one.
    fn receive_event(&mut self, source: i64) -> Result<bool, Reason> {
        match self.head.receive(source, self.number(source)) {
            // Too many descriptors: it can be read again when some are closed.
            Err(Errno::AGAIN | Errno::INTR | Errno::MFILE | Errno::NFILE) => return Ok(false),
            Err(e) => return Err(format!("the events of its memory cannot be read: {e}")),
            Ok(()) => {}
        }
        match self.head.message() {
            Some(UserfaultEvent::Fault(address)) => self.fault(source, address)?,
            Some(event) => self.follow(source, event)?,
            None => return Err("the kernel reports an unknown event of its memory".into()),
        }
        Ok(true)
    }

    /// Applies a change of a range and records it before the next message is read.
    fn follow(&mut self, source: i64, event: UserfaultEvent) -> Result<(), Reason> {
        match event {
            UserfaultEvent::Fault(_) => {}
            UserfaultEvent::Removed(range) | UserfaultEvent::Unmapped(range) => {
                self.left.cut(source, range);
            }
            UserfaultEvent::Moved { from, to, bytes } => self.left.moved(source, from, to, bytes),
            UserfaultEvent::Fork(child) => {
                self.head.set(head::FORKED, 1);
                self.left.forked(source, source_of(child));
                self.children.push(child);
            }
        }
        self.put_on_record(true)
    }

    /// Resolves a page fault.
    fn fault(&mut self, source: i64, address: u64) -> Result<(), Reason> {
        if self.left.find(source, address).is_some() {
            self.note(source, address);
        }
        loop {
            let Some(piece) = self.left.find(source, address) else {
                if self.zero(source, address)? {
                    return Ok(());
                }
                continue;
            };
            let around_bytes = self.job.around_bytes;
            let around = address & !(around_bytes - 1);
            let range = piece.start.max(around)..piece.end.min(around + around_bytes);
            // Of its chunk first.
            let offset = piece.offset + (address - piece.start);
            let back = (offset % self.job.chunk_bytes).min(address - range.start);
            let ahead = self.job.chunk_bytes - offset % self.job.chunk_bytes;
            let first = address - back..range.end.min(address + ahead);
            self.copy(source, first.clone())?;
            self.copy_all(source, range.start..first.start)?;
            self.copy_all(source, first.end..range.end)?;
        }
    }

    /// Maps a page of zeros where nothing is to be filled. Returns whether a page is there.
    fn zero(&mut self, source: i64, address: u64) -> Result<bool, Reason> {
        let fd = borrow(self.given, source);
        match kernel::userfault_zero(fd, address, 4096) {
            Ok(()) => Ok(true),
            Err((_, Errno::AGAIN)) => {
                self.let_happen(source)?;
                Ok(false)
            }
            // A page is there, or no mapping is: the woken thread faults again if needed.
            Err((_, Errno::EXIST | Errno::NOENT | Errno::FAULT | Errno::INVAL)) => {
                let _ = kernel::userfault_wake(fd, address, 4096);
                Ok(true)
            }
            Err((_, Errno::SRCH)) => {
                self.left.forget(source);
                Ok(true)
            }
            Err((_, e)) => Err(format!("a page of zeros cannot be given to it: {e}")),
        }
    }

    /// Fills a range chunk by chunk, until an event changes it.
    fn copy_all(&mut self, source: i64, range: std::ops::Range<u64>) -> Result<(), Reason> {
        let mut at = range.start;
        while at < range.end {
            let Some(piece) = self.left.find(source, at) else { return Ok(()) };
            let offset = piece.offset + (at - piece.start);
            let room = self.job.chunk_bytes - offset % self.job.chunk_bytes;
            let end = range.end.min(piece.end).min(at + room);
            self.copy(source, at..end)?;
            if self.left.find(source, at).is_some() {
                return Ok(()); // blocked by a pending event; filled after that
            }
            at = end;
        }
        Ok(())
    }

    /// Fills a range of one piece, to the end of a chunk at most.
    fn copy(&mut self, source: i64, range: std::ops::Range<u64>) -> Result<(), Reason> {
        let Some(piece) = self.left.find(source, range.start) else { return Ok(()) };
        let offset = piece.offset + (range.start - piece.start);
        let (number, within) = (offset / self.job.chunk_bytes, offset % self.job.chunk_bytes);
        let bytes = (range.end - range.start).min(self.job.chunk_bytes - within) as usize;
        let slot = self.chunk(number)?;
        let fd = borrow(self.given, source);
        let pages = self.chunks[slot].1.get(within as usize..within as usize + bytes);
        let pages = pages.ok_or("what is left of its memory is beyond the end of a file")?;
        let (mut done, mut most) = (0, bytes);
        let mut lacks_since: Option<Instant> = None;
        let (mut waits, mut gone) = (false, None);
        while done < bytes && !waits {
            let now = &pages[done..bytes.min(done + most)];
            let Err((part, errno)) = kernel::userfault_copy(fd, range.start + done as u64, now)
            else {
                done += now.len();
                continue;
            };
            done += part as usize;
            match errno {
                Errno::AGAIN => waits = part == 0,
                Errno::EXIST => done += 4096,
                // The range is in two mappings by now; a page is in one, or in none.
                Errno::NOENT if now.len() > 4096 => most = 4096,
                // The range may just have moved, which the next attempt reports (EAGAIN).
                Errno::NOENT if gone != Some(done) => gone = Some(done),
                Errno::NOENT => done += 4096,
                Errno::SRCH => {
                    self.left.forget(source);
                    return Ok(());
                }
                Errno::NOMEM if lacks_since.is_none_or(|since| since.elapsed() < MEMORY_WITHIN) => {
                    lacks_since.get_or_insert_with(Instant::now);
                    std::thread::sleep(Duration::from_millis(1));
                }
                e => return Err(format!("its memory cannot be filled: {e}")),
            }
        }
        self.left.cut(source, range.start..range.start + done as u64);
        self.unrecorded += done as u64;
        if waits { self.let_happen(source) } else { Ok(()) }
    }

    /// Handles the pending event of the memory; nothing is filled before that.
    fn let_happen(&mut self, source: i64) -> Result<(), Reason> {
        if !self.receive_event(source)? {
            // The event was read, and the thread that caused it has yet to continue.
            rustix::thread::sched_yield();
        }
        Ok(())
    }

    /// Returns the index of a verified chunk in the cache.
    fn chunk(&mut self, number: u64) -> Result<usize, Reason> {
        if let Some(at) = self.chunks.iter().position(|(n, _)| *n == number) {
            let found = self.chunks.remove(at);
            self.chunks.push(found);
            return Ok(self.chunks.len() - 1);
        }
        let at = number * self.job.chunk_bytes;
        // An address on the list lies within all parts, but possibly in a gap between two.
        let places = self.job.places();
        let part = places.iter().position(|part| part.contains(&at));
        let part = part.ok_or("what is left of its memory is in no file")?;
        let length = self.job.chunk_bytes.min(places[part].end - at) as usize;
        let mut chunk = match self.chunks.len() {
            CHUNKS_KEPT.. => self.chunks.remove(0).1,
            _ => Vec::new(),
        };
        chunk.resize(length, 0);
        let read = self.given.pages[part].read_exact_at(&mut chunk, at - places[part].start);
        read.map_err(|e| format!("its checkpoint cannot be read any more: {e}"))?;
        // In bounds, as every piece of a list is.
        if blake3::hash(&chunk).as_bytes() != &self.job.checksums[number as usize] {
            return Err(format!(
                "its checkpoint is damaged: {}: chunk {number} of its memory is not what it was",
                fill::part_name(part)
            ));
        }
        self.chunks.push((number, chunk));
        Ok(self.chunks.len() - 1)
    }

    /// Records the list; `is_followed` means that the message in the head has been applied to it.
    fn put_on_record(&mut self, is_followed: bool) -> Result<(), Reason> {
        let list = self.left.pieces();
        let other = 1 - (self.head.get(head::STATE) & 1) as usize;
        let bytes = list_bytes(list.len());
        if bytes > self.places[other].1 {
            let room = (bytes * 2).next_multiple_of(4096);
            self.places[other] = (self.end, room);
            self.end += room;
        }
        let (at, _) = self.places[other];
        fill::write_list(&self.given.file, at, &list)
            .map_err(|e| format!("what is left of its memory cannot be written down: {e}"))?;
        self.head.set(head::LISTS + other * 2, at);
        self.head.set(head::LISTS + other * 2 + 1, list.len() as u64);
        // ORDER: one write makes this list current and marks the message as applied.
        self.head.set(head::STATE, other as u64 | u64::from(is_followed) << 1);
        if is_followed {
            self.settle();
        }
        self.unrecorded = 0;
        Ok(())
    }

    /// Completes the message. ORDER: the message is cleared before its applied flag.
    fn settle(&self) {
        self.head.set(head::MESSAGE, 0);
        self.head.set(head::STATE, self.head.get(head::STATE) & 1);
    }

    /// Wakes all blocked threads; those whose page is missing fault again.
    fn wake_all(&self) {
        let sources = 0..self.given.sources.len() as i64;
        for source in sources.chain(self.children.iter().map(|fd| source_of(*fd))) {
            let _ = kernel::userfault_wake(borrow(self.given, source), ALL.0, ALL.1 - ALL.0);
        }
    }

    /// Closes the descriptors of children without missing pages. ORDER: removed from the record,
    /// then closed.
    fn close_children(&mut self) -> Result<(), Reason> {
        let left = &self.left;
        let all = std::mem::take(&mut self.children).into_iter();
        let (lack, whole): (Vec<RawFd>, _) = all.partition(|fd| left.has(source_of(*fd)));
        self.children = lack;
        if whole.is_empty() {
            return Ok(());
        }
        self.put_on_record(false)?;
        for fd in whole {
            // SAFETY: the kernel made it for us, and no list refers to it any more.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
        }
        Ok(())
    }

    fn number(&self, source: i64) -> RawFd {
        borrow(self.given, source).as_raw_fd()
    }

    /// Notes a page for the next restore, which reads it before the processes run.
    fn note(&mut self, source: i64, address: u64) {
        let process = usize::try_from(source).ok().and_then(|n| self.job.processes.get(n));
        if let (Some(pid), true) = (process, self.touched.len() < TOUCHED_MAX) {
            let start = address & !(self.job.around_bytes - 1);
            self.touched.push(Touched { pid: *pid, start });
        }
    }

    /// Records the touched pages: those of this run, then those of earlier runs.
    fn record_touched(&mut self) {
        if self.touched.is_empty() {
            return;
        }
        self.touched.extend(fill::read_touched(&self.given.touched));
        let mut seen = std::collections::HashSet::new();
        self.touched.retain(|touched| seen.insert((touched.pid, touched.start)));
        // A failure makes the next restore slower, nothing else.
        let _ = fill::write_touched(&self.given.touched, &self.touched);
    }
}

/// Returns the number that lists use for a child's descriptor.
fn source_of(fd: RawFd) -> i64 {
    -1 - i64::from(fd)
}

fn number_of(source: i64) -> RawFd {
    (-1 - source) as RawFd
}

/// The descriptor of an address space.
fn borrow(given: &Inputs, source: i64) -> BorrowedFd<'_> {
    match usize::try_from(source) {
        // A list contains no number beyond, as was checked when it was read.
        Ok(n) => given.sources[n].as_fd(),
        // SAFETY: the kernel made it for us; it is closed when no list refers to it any more.
        Err(_) => unsafe { BorrowedFd::borrow_raw(number_of(source)) },
    }
}
