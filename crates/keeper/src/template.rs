//! Memory that the clones of one checkpoint share until they write to it.
//!
//! A *template* is a separate process, a copy of the keeper. The template maps the areas on a list
//! ([`dormouse_launch::template`]) at their final addresses, reads them once, and clones a newborn
//! on each request of the keeper. The newborn is an ordinary child of the keeper (CLONE_PARENT) and
//! does what any newborn does. Its pages come from the template (clone(2)); the kernel copies them
//! when they are written. The keeper does not block on the clone, because page tables are copied (2
//! kB per megabyte) and other containers have to be woken meanwhile. After the template has exited
//! its newborns share the pages with each other.
//!
//! **Lifetime**: that of the connection which requested it. A template exits when that is closed or
//! the keeper exits: by the end of its socket, by the parent death signal, or because it is killed.
//!
//! **Ownership.** A template holds the memory of one checkpoint. Its name is known to its requester
//! only, so no other container's newborn comes from it. The process is not dumpable.
//!
//! **Conflicts.** Nothing is mapped over an existing mapping: an area where the keeper's program,
//! heap or stack lies is left out, and each clone reads its own.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use dormouse_kernel::call::{self as kernel, CloneArgs, CloneFlags, Cloned};
use dormouse_launch::protocol::{Id, MESSAGE_MAX_BYTES, Reply, Request, SpawnRequest};
use dormouse_launch::template::{self, Area, Piece};
use dormouse_launch::wire;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair};

use crate::birth::{self, Wanted};
use crate::heritage::{Heritage, Shared};
use crate::owner::AsOwner;
use crate::tiny::Outside;
use crate::{Failed, Step, call};

/// LIMIT: time for a clone, which copies page tables: 2 kB per megabyte.
const CLONE_WITHIN: Duration = Duration::from_secs(20);
/// LIMIT: nothing is mapped within this distance below its stack, which may grow.
const STACK_BYTES: u64 = 16 << 20;
/// Bytes per read.
const READ_BYTES: u64 = 2 << 20;
/// A read of at least this size populates its pages at once before.
const POPULATED_BYTES: u64 = 8 << 10;

/// A template, as the keeper sees it.
#[derive(Debug)]
pub(crate) struct Template {
    pub(crate) key: Id,
    /// The connection that requested it.
    pub(crate) connection: u64,
    /// Readable when its memory is there, or when it has ended.
    sock: OwnedFd,
    pidfd: OwnedFd,
    /// A client waits until its memory is there.
    pub(crate) is_awaited: bool,
    /// The pending request for a newborn.
    pub(crate) pending: Option<PendingBirth>,
}

/// A request to a template for a newborn.
#[derive(Debug)]
pub(crate) struct PendingBirth {
    pub(crate) request: SpawnRequest,
    pub(crate) fds: Vec<OwnedFd>,
    /// The connection that waits.
    pub(crate) connection: u64,
    /// Time at which the request has failed.
    pub(crate) until: Instant,
    /// Children of the keeper that exited meanwhile and were unknown to it. The newborn may be one
    /// of them.
    pub(crate) ended: Vec<u32>,
}

/// The failed step when a template does not deliver a newborn.
pub(crate) const BEAR: &str = "have a process cloned from the template";

impl Drop for Template {
    fn drop(&mut self) {
        let _ = kernel::pidfd_send_signal(self.pidfd.as_fd(), libc::SIGKILL); // may have exited
    }
}

impl Template {
    /// Starts a template, which reads its memory in the background.
    pub(crate) fn begin(
        (outside, heritage): (&Outside, Heritage),
        key: Id,
        connection: u64,
        fds: Vec<OwnedFd>,
    ) -> Result<Self, Failed> {
        let mut fds = fds.into_iter().map(File::from);
        let list = fds.next().ok_or(Errno::BADMSG).step("find the list of a template")?;
        let parts: Vec<File> = fds.collect();
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let pair = socketpair(AddressFamily::UNIX, kind, flags, None).step("make a socket")?;
        let (sock, theirs) = pair;
        let keeper = rustix::process::getpid();
        let args = CloneArgs::default();
        // SAFETY: the keeper has one thread, so no lock is held by another.
        match unsafe { kernel::clone3(&args) }.step("make a template")? {
            Cloned::Parent { pidfd, .. } => {
                Ok(Self { key, connection, sock, pidfd, is_awaited: true, pending: None })
            }
            Cloned::Child => {
                let inputs = Inputs { outside, heritage, sock: theirs, list, parts };
                let code = inputs.settle_in(keeper).map_or(1, |()| inputs.live());
                kernel::exit(code)
            }
        }
    }

    pub(crate) fn sock(&self) -> BorrowedFd<'_> {
        self.sock.as_fd()
    }

    /// Receives the message that its memory is there, or the reply about a newborn, with its pidfd.
    /// Fails if the template has exited.
    pub(crate) fn receive(&self) -> Result<(Reply, Option<OwnedFd>), Errno> {
        let (mut bytes, mut fd) = ([0; MESSAGE_MAX_BYTES], None);
        let n = wire::receive(&self.sock, &mut bytes, RecvFlags::DONTWAIT, |one| fd = Some(one));
        let n = match n {
            // Requests in its socket were not read.
            Err(Errno::CONNRESET) => return Err(Errno::CHILD),
            n => n?,
        };
        let reply = Reply::decode(&bytes[..n]).map_err(|_| Errno::CHILD)?;
        Ok((reply, fd))
    }

    /// Requests a newborn; the reply is [received](Self::receive) later. One request at a time,
    /// because a template has one client.
    pub(crate) fn request(
        &mut self,
        request: SpawnRequest,
        fds: Vec<OwnedFd>,
        connection: u64,
    ) -> Result<(), Errno> {
        if self.pending.is_some() {
            return Err(Errno::BUSY);
        }
        let sent: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let message = Request::Spawn(request.clone()).encode();
        wire::send(&self.sock, &message, &sent, SendFlags::DONTWAIT)?;
        let until = Instant::now() + CLONE_WITHIN;
        self.pending = Some(PendingBirth { request, fds, connection, until, ended: Vec::new() });
        Ok(())
    }
}

impl PendingBirth {
    /// Returns the newborn from a reply of the template.
    pub(crate) fn born(
        &self,
        received: Result<(Reply, Option<OwnedFd>), Errno>,
    ) -> Result<(u32, OwnedFd), Errno> {
        match received? {
            // Already reaped, so the pid may be another process's by now.
            (Reply::Spawned { pid, .. }, _) if self.ended.contains(&pid) => Err(Errno::SRCH),
            (Reply::Spawned { pid, .. }, Some(pidfd)) => Ok((pid, pidfd)),
            (Reply::Refused { errno, .. }, _) => Err(Errno::from_raw_os_error(errno)),
            _ => Err(Errno::BADMSG),
        }
    }
}

/// Inputs of the template process.
struct Inputs<'o> {
    outside: &'o Outside,
    heritage: Heritage,
    sock: OwnedFd,
    list: File,
    parts: Vec<File>,
}

impl Inputs<'_> {
    /// Sets up the new process, which has copies of all descriptors of the keeper.
    fn settle_in(&self, keeper: rustix::process::Pid) -> Result<(), Errno> {
        let outside = self.outside;
        let own = [&self.sock, &outside.proc, &outside.net, &outside.pid].map(AsFd::as_fd);
        let files = self.parts.iter().chain([&self.list]).map(AsFd::as_fd);
        call::close_all_but(own.into_iter().chain(files))?;
        // ORDER: the parent may have exited before the death signal was set.
        kernel::set_parent_death_signal(libc::SIGKILL)?;
        if rustix::process::getppid() != Some(keeper) {
            return Err(Errno::CHILD);
        }
        kernel::set_dumpable(false)?;
        let _ = kernel::set_name(c"dormouse-share");
        // Memory is to be taken from the template first: its clones live on without it.
        self.heritage.give_back(outside.proc.as_fd())
    }

    fn live(self) -> i32 {
        let filled = self.fill();
        let reply = match &filled {
            Ok(_) => Reply::Done,
            Err(Failed { step, source }) => {
                Reply::Refused { errno: source.raw_os_error(), step: (*step).to_owned() }
            }
        };
        let Self { outside, heritage, sock, list, parts } = self;
        drop((list, parts));
        let sent = wire::send(&sock, &reply.encode(), &[], SendFlags::empty());
        let (Ok(shared), Ok(())) = (filled, sent) else { return 1 };
        let heritage = heritage.with(shared);
        while let Some((reply, pidfd)) = serve(&sock, outside, heritage) {
            let fds: Vec<_> = pidfd.iter().map(AsFd::as_fd).collect();
            if wire::send(&sock, &reply.encode(), &fds, SendFlags::empty()).is_err() {
                break;
            }
        }
        0
    }

    /// Maps the areas and reads their contents. Returns the mapped areas.
    fn fill(&self) -> Result<Shared, Failed> {
        // The mappings are inherited by clones that may map less than the host's root may
        // (CAP_SYS_RAWIO).
        let lowest = lowest(self.outside.proc.as_fd()).step("read vm.mmap_min_addr")?;
        let list = template::Template::read(&self.list, self.parts.len(), lowest);
        let list = list.map_err(errno).step("read the list of a template")?;
        if list.no_huge_pages {
            call::disable_huge_pages().step("do without huge pages")?;
        }
        let mut mapped: Vec<(u64, u64)> = Vec::with_capacity(list.areas.len());
        for (place, area) in list.areas.iter().enumerate() {
            if map(area).step("map memory that is shared")? {
                mapped.push((area.start, area.end));
                let stored = template::set_mapped(&self.list, place);
                stored.map_err(errno).step("record the mapped areas")?;
            }
        }
        for piece in &list.pieces {
            let next = mapped.partition_point(|(_, end)| *end <= piece.start);
            if mapped.get(next).is_some_and(|(start, _)| *start <= piece.start) {
                self.read(piece).step("read memory that is shared")?;
            }
        }
        Ok(Shared::leak(mapped))
    }

    /// Reads contents to their place.
    fn read(&self, piece: &Piece) -> Result<(), Errno> {
        let part = self.parts.get(piece.part as usize).ok_or(Errno::BADMSG)?;
        let mut done = 0;
        while done < piece.bytes {
            let length = (piece.bytes - done).min(READ_BYTES);
            let at: *mut u8 = std::ptr::with_exposed_provenance_mut((piece.start + done) as usize);
            if length >= POPULATED_BYTES {
                // SAFETY: as below; the area is still empty. KERNEL(5.14): before, pages are
                // created as they are read.
                let _ = unsafe { madvise(at.cast(), length as usize, Advice::LinuxPopulateWrite) };
            }
            // SAFETY: the range is within an area that was just mapped here, as checked when the
            // list was read, and nothing else refers to it.
            let bytes = unsafe { std::slice::from_raw_parts_mut(at, length as usize) };
            match rustix::io::retry_on_intr(|| {
                rustix::io::pread(part, &mut *bytes, piece.offset + done)
            })? {
                0 => return Err(Errno::IO),
                n => done += n as u64,
            }
        }
        Ok(())
    }
}

/// Returns the lowest address that an unprivileged process may map (proc_sys_vm(5)).
fn lowest(proc: BorrowedFd<'_>) -> Result<u64, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(proc, c"sys/vm/mmap_min_addr", flags, Mode::empty())?;
    let mut bytes = [0; 32];
    let n = rustix::io::read(&file, &mut bytes)?;
    let text = std::str::from_utf8(&bytes[..n]).map_err(|_| Errno::BADMSG)?;
    text.trim().parse().map_err(|_| Errno::BADMSG)
}

/// Maps an area at its final address; returns false if another mapping is in the way.
fn map(area: &Area) -> Result<bool, Errno> {
    let here = 0u8;
    let stack = (&raw const here).expose_provenance() as u64;
    // The kernel may grow the stack down to just above an area below it.
    if area.start <= stack && area.end > stack.saturating_sub(STACK_BYTES) {
        return Ok(false);
    }
    let mut flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
    flags.set(MapFlags::NORESERVE, area.no_reserve);
    let (place, length) = (area.start as usize, (area.end - area.start) as usize);
    let place = std::ptr::with_exposed_provenance_mut(place);
    // SAFETY: a new mapping at an address where there is none, or the call fails.
    let mapped =
        match unsafe { mmap_anonymous(place, length, ProtFlags::READ | ProtFlags::WRITE, flags) } {
            Err(Errno::EXIST) => return Ok(false),
            mapped => mapped?,
        };
    if mapped != place {
        return Err(Errno::OPNOTSUPP); // KERNEL(4.17): FIXED_NOREPLACE; before, a hint
    }
    let advice = match area.huge_pages {
        None => return Ok(true),
        Some(true) => Advice::LinuxHugepage,
        Some(false) => Advice::LinuxNoHugepage,
    };
    // SAFETY: it was mapped just now, and the advice changes no contents.
    unsafe { madvise(mapped, length, advice) }.map(|()| true)
}

fn errno(e: std::io::Error) -> Errno {
    Errno::from_io_error(&e).unwrap_or(Errno::BADMSG)
}

/// Serves requests of the keeper until its socket is closed.
fn serve(
    sock: &OwnedFd,
    outside: &Outside,
    heritage: Heritage,
) -> Option<(Reply, Option<OwnedFd>)> {
    let (mut bytes, mut fds) = ([0; MESSAGE_MAX_BYTES], Vec::new());
    let n = wire::receive(sock, &mut bytes, RecvFlags::empty(), |fd| fds.push(fd)).ok()?;
    let Ok(Request::Spawn(request)) = Request::decode(&bytes[..n]) else { return None };
    let born = Wanted::of(&request, &fds).and_then(|wanted| {
        let _owner = AsOwner::of(wanted.uid_map);
        birth::clone_newborn(outside, heritage, &wanted, CloneFlags::PARENT)
    });
    // A change of ids clears the parent death signal (prctl(2)). The socket shows the exit of a keeper
    // in the meantime.
    let _ = kernel::set_parent_death_signal(libc::SIGKILL);
    Some(match born {
        Ok((pid, pidfd)) => (Reply::Spawned { pid, start_time: 0 }, Some(pidfd)),
        Err(Failed { step, source }) => {
            (Reply::Refused { errno: source.raw_os_error(), step: step.to_owned() }, None)
        }
    })
}
