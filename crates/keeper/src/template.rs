//! Memory that the clones of one checkpoint share until they write to it.
//!
//! A *template* is a process of its own: a copy of the keeper, which maps the areas that it is told of
//! ([`dormouse_launch::template`]) where they will be in the end, reads them once, and then clones a newborn
//! whenever the keeper asks for one. The newborn is the keeper's child like any other (CLONE_PARENT), and
//! does what any other does; it has those pages from the template (clone(2)), the kernel's to copy when
//! somebody writes. The keeper does not wait for it: what says where pages are is copied, 2 kB of each
//! megabyte, and others are to be woken meanwhile. When the template has ended those who came from it share
//! them with each other.
//!
//! **Its life** is that of the connection over which it was asked for. It ends when that is closed, or the
//! keeper ends: by the end of its socket, by the death signal, or because it is killed.
//!
//! **Whose it is.** It holds the memory of one checkpoint and has a name that only whoever asked for it
//! knows, so no other container's newborn comes from it. Nobody may look into it.
//!
//! **What is in the way.** Nothing is mapped over what is there: an area where the keeper's own program, heap
//! or stack lies stays out, and is each clone's own.

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
use crate::newborn::{Heritage, Shared};
use crate::tiny::Outside;
use crate::{Failed, Step, call};

/// LIMIT: how long it may take to clone, which copies what says where its pages are: 2 kB of each megabyte.
const CLONE_WITHIN: Duration = Duration::from_secs(20);
/// LIMIT: so much below its stack nothing is mapped, for that may grow.
const STACK_BYTES: u64 = 16 << 20;
/// What is read at once.
const READ_BYTES: u64 = 2 << 20;
/// So many bytes are made in one go before.
const POPULATED_BYTES: u64 = 8 << 10;

/// A template, as the keeper sees it.
#[derive(Debug)]
pub(crate) struct Template {
    pub(crate) key: Id,
    /// Whose it is.
    pub(crate) connection: u64,
    /// Readable when its memory is there, or when it has ended.
    sock: OwnedFd,
    pidfd: OwnedFd,
    /// Somebody waits until its memory is there.
    pub(crate) is_awaited: bool,
    /// Somebody waits for a newborn.
    pub(crate) asked: Option<Asked>,
}

/// A newborn that a template was asked for.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) request: SpawnRequest,
    pub(crate) fds: Vec<OwnedFd>,
    /// Who waits for it.
    pub(crate) connection: u64,
    /// It has failed if it is not there by then.
    pub(crate) until: Instant,
    /// Children of the keeper that ended meanwhile and that it knew nothing of. The newborn may be one of them.
    pub(crate) ended: Vec<u32>,
}

/// The step that fails when somebody waits for a newborn in vain.
pub(crate) const BEAR: &str = "have a process cloned from the template";

impl Drop for Template {
    fn drop(&mut self) {
        let _ = kernel::pidfd_send_signal(self.pidfd.as_fd(), libc::SIGKILL); // it may have ended
    }
}

impl Template {
    /// Makes one, which gets its memory meanwhile.
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
                Ok(Self { key, connection, sock, pidfd, is_awaited: true, asked: None })
            }
            Cloned::Child => {
                let given = Given { outside, heritage, sock: theirs, list, parts };
                let code = given.settle_in(keeper).map_or(1, |()| given.live());
                kernel::exit(code)
            }
        }
    }

    pub(crate) fn sock(&self) -> BorrowedFd<'_> {
        self.sock.as_fd()
    }

    /// What it says when its memory is there, or about a newborn, which comes with it; an error where it has
    /// ended.
    pub(crate) fn hear(&self) -> Result<(Reply, Option<OwnedFd>), Errno> {
        let (mut bytes, mut fd) = ([0; MESSAGE_MAX_BYTES], None);
        let n = wire::receive(&self.sock, &mut bytes, RecvFlags::DONTWAIT, |one| fd = Some(one));
        let n = match n {
            // It had not read what it was asked.
            Err(Errno::CONNRESET) => return Err(Errno::CHILD),
            n => n?,
        };
        let reply = Reply::decode(&bytes[..n]).map_err(|_| Errno::CHILD)?;
        Ok((reply, fd))
    }

    /// Asks it for a newborn, of which it is [heard](Self::hear). One at a time: who asks is one command.
    pub(crate) fn ask(
        &mut self,
        request: SpawnRequest,
        fds: Vec<OwnedFd>,
        connection: u64,
    ) -> Result<(), Errno> {
        if self.asked.is_some() {
            return Err(Errno::BUSY);
        }
        let sent: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let message = Request::Spawn(request.clone()).encode();
        wire::send(&self.sock, &message, &sent, SendFlags::DONTWAIT)?;
        let until = Instant::now() + CLONE_WITHIN;
        self.asked = Some(Asked { request, fds, connection, until, ended: Vec::new() });
        Ok(())
    }
}

impl Asked {
    /// The newborn, by what was heard of the template.
    pub(crate) fn born(
        &self,
        heard: Result<(Reply, Option<OwnedFd>), Errno>,
    ) -> Result<(u32, OwnedFd), Errno> {
        match heard? {
            // It was reaped, so its number may be another's by now.
            (Reply::Spawned { pid, .. }, _) if self.ended.contains(&pid) => Err(Errno::SRCH),
            (Reply::Spawned { pid, .. }, Some(pidfd)) => Ok((pid, pidfd)),
            (Reply::Refused { errno, .. }, _) => Err(Errno::from_raw_os_error(errno)),
            _ => Err(Errno::BADMSG),
        }
    }
}

/// What the template has.
struct Given<'o> {
    outside: &'o Outside,
    heritage: Heritage,
    sock: OwnedFd,
    list: File,
    parts: Vec<File>,
}

impl Given<'_> {
    /// In a new process, which has copies of all that the keeper has.
    fn settle_in(&self, keeper: rustix::process::Pid) -> Result<(), Errno> {
        let outside = self.outside;
        let own = [&self.sock, &outside.proc, &outside.net, &outside.pid].map(AsFd::as_fd);
        let files = self.parts.iter().chain([&self.list]).map(AsFd::as_fd);
        call::close_all_but(own.into_iter().chain(files))?;
        // ORDER: its parent may have ended before it could ask for the signal.
        kernel::set_parent_death_signal(libc::SIGKILL)?;
        if rustix::process::getppid() != Some(keeper) {
            return Err(Errno::CHILD);
        }
        kernel::set_dumpable(false)?;
        let _ = kernel::set_name(c"dormouse-share");
        // It is what memory is taken from first: whoever was cloned lives on without it.
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
        let said = wire::send(&sock, &reply.encode(), &[], SendFlags::empty());
        let (Ok(shared), Ok(())) = (filled, said) else { return 1 };
        let heritage = heritage.with(shared);
        while let Some((reply, pidfd)) = serve(&sock, outside, heritage) {
            let fds: Vec<_> = pidfd.iter().map(AsFd::as_fd).collect();
            if wire::send(&sock, &reply.encode(), &fds, SendFlags::empty()).is_err() {
                break;
            }
        }
        0
    }

    /// Maps and reads. Gives where.
    fn fill(&self) -> Result<Shared, Failed> {
        // What it maps its clones have, who may map less than the host's root may (CAP_SYS_RAWIO).
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
                let said = template::set_mapped(&self.list, place);
                said.map_err(errno).step("say what is mapped")?;
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
                // SAFETY: as below; nothing is there yet. KERNEL(5.14): before, pages are made as they are read.
                let _ = unsafe { madvise(at.cast(), length as usize, Advice::LinuxPopulateWrite) };
            }
            // SAFETY: it is within an area that was mapped here just now, as was checked when the list was
            // read, and nobody else refers to it.
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

/// The lowest address that everybody may map (proc_sys_vm(5)).
fn lowest(proc: BorrowedFd<'_>) -> Result<u64, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(proc, c"sys/vm/mmap_min_addr", flags, Mode::empty())?;
    let mut bytes = [0; 32];
    let n = rustix::io::read(&file, &mut bytes)?;
    let text = std::str::from_utf8(&bytes[..n]).map_err(|_| Errno::BADMSG)?;
    text.trim().parse().map_err(|_| Errno::BADMSG)
}

/// Maps an area where it will be; false where something is in its way.
fn map(area: &Area) -> Result<bool, Errno> {
    let here = 0u8;
    let stack = (&raw const here).expose_provenance() as u64;
    // The kernel lets a stack grow, and somebody's own may have ended just below it.
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

/// Does what the keeper asks for; nothing when that is gone.
fn serve(
    sock: &OwnedFd,
    outside: &Outside,
    heritage: Heritage,
) -> Option<(Reply, Option<OwnedFd>)> {
    let (mut bytes, mut fds) = ([0; MESSAGE_MAX_BYTES], Vec::new());
    let n = wire::receive(sock, &mut bytes, RecvFlags::empty(), |fd| fds.push(fd)).ok()?;
    let Ok(Request::Spawn(request)) = Request::decode(&bytes[..n]) else { return None };
    let born = Wanted::of(&request, &fds)
        .and_then(|wanted| birth::clone_newborn(outside, heritage, &wanted, CloneFlags::PARENT));
    Some(match born {
        Ok((pid, pidfd)) => (Reply::Spawned { pid, start_time: 0 }, Some(pidfd)),
        Err(Failed { step, source }) => {
            (Reply::Refused { errno: source.raw_os_error(), step: step.to_owned() }, None)
        }
    })
}
