//! The life of a process between clone and execve: it receives its plan and executes it.
//!
//! **State.** A table of the descriptors it received, the plan in a private mapping, the master of
//! a terminal if it opened one. Descriptors 0 to 2 are the keeper's `/dev/null`, 3 is the socket to
//! the engine, 4 the keeper's procfs; all others of the keeper's are closed first.
//!
//! **Rules.** It is a copy of the keeper: it must not allocate, lock or panic, and never returns.
//! Paths are texts of the plan;
//! where a part of one is needed it is copied to the stack.
//!
//! **Whom it trusts.** The engine, which wrote the plan; not the image: every path below the root
//! is opened by openat2 with RESOLVE_IN_ROOT and RESOLVE_NO_MAGICLINKS, the places of procfs,
//! sysfs, devpts and their like without following any link, and what is written to or taken from
//! procfs and devpts is checked to be of that filesystem (CVE-2019-16884, CVE-2019-19921,
//! CVE-2023-27561, CVE-2025-31133, CVE-2025-52565, CVE-2025-52881).
//!
//! **Ends.** By execve, or in a restore program (the crate `checkpoint`); or it says `Failed` and
//! exits with 125 (126, 127 where execve failed); or, when the engine goes away before Go, it exits
//! with 125 in silence.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};

use dormouse_kernel::call::{
    self as kernel, CapabilityMasks, CloneFlags, FsCommand, Instruction, MountAttr, OpenTreeFlags,
};
use dormouse_launch::flat::{self, Code, Damaged, Flat, Record};
use dormouse_launch::protocol::{FromNewborn, ToNewborn};
use dormouse_launch::wire;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::{RecvFlags, SendFlags};
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;

use crate::call;

/// Number of the socket to the engine.
const SOCK: RawFd = 3;
/// Number of the keeper's procfs.
const PROC: RawFd = 4;
/// Resource number of the limit on descriptors (getrlimit(2)).
const NOFILE: u32 = 7;
/// CAP_SYS_ADMIN as a bit.
const SYS_ADMIN: u64 = 1 << 21;
/// f_type of procfs (statfs(2)).
const PROC_MAGIC: u64 = 0x9fa0;
/// f_type of devpts.
const DEVPTS_MAGIC: u64 = 0x1cd1;
/// Index of a failure that is of no operation.
const NO_OPERATION: u32 = u32::MAX;

/// What a newborn takes along from the keeper.
#[derive(Debug, Clone, Copy)]
pub struct Heritage {
    /// Limit on descriptors before the keeper raised its own.
    pub nofile: (u64, u64),
    /// The keeper's oom_score_adj before it lowered its own.
    pub oom_score_adj: Option<i32>,
    pub(crate) arguments: call::Arguments,
}

impl Heritage {
    /// What this process has now, before it changes it.
    pub fn now() -> Self {
        let nofile = kernel::prlimit(NOFILE, None).unwrap_or((1024, 4096));
        Self { nofile, oom_score_adj: None, arguments: call::Arguments::find() }
    }
}

impl Heritage {
    /// Gives back to a process what the keeper has taken for itself.
    pub(crate) fn give_back(&self, proc: BorrowedFd<'_>) -> Outcome {
        kernel::prlimit(NOFILE, Some(self.nofile))?;
        match self.oom_score_adj {
            Some(value) => write_oom_score_adj(proc, i64::from(value)),
            None => Ok(()),
        }
    }
}

/// Writes the calling process's oom_score_adj through a procfs.
fn write_oom_score_adj(proc: BorrowedFd<'_>, value: i64) -> Outcome {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(proc, c"self/oom_score_adj", flags, Mode::empty())?;
    rustix::io::write(&file, decimal(value, &mut [0; 20])).map(drop)
}

type Outcome<T = ()> = Result<T, Errno>;

/// A damaged plan, as the errno that is reported.
fn damaged(_: Damaged) -> Errno {
    Errno::BADMSG
}

/// A descriptor of this process by its number.
fn borrowed(fd: RawFd) -> BorrowedFd<'static> {
    // SAFETY: a newborn closes nothing that it refers to by number; a wrong number is an error of
    // the kernel's (EBADF), not of memory.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// Closes a descriptor by its number.
fn close(fd: RawFd) {
    // SAFETY: the caller has just made it and forgets it.
    unsafe { rustix::io::close(fd) }
}

/// Lives. `sock` and `proc` are numbers of the keeper's table, of which this process has a copy.
pub fn live(sock: RawFd, proc: RawFd, heritage: Heritage) -> ! {
    let mut newborn = Newborn {
        fds: [-1; flat::FDS_MAX],
        count: 0,
        master: -1,
        capabilities: None,
        nofile: None,
        sealed: false,
        heritage,
    };
    if let Err(errno) = newborn.settle_in(sock, proc) {
        // Nothing is at its place yet: there is nobody to tell but the keeper, by the exit code.
        let _ = errno;
        kernel::exit(125);
    }
    match newborn.receive() {
        Ok((plan, length)) => {
            // SAFETY: the mapping is private, writable, of that length, and is never unmapped.
            let bytes = unsafe { std::slice::from_raw_parts_mut(plan, length) };
            match Flat::new(bytes) {
                Ok(mut flat) => newborn.execute(&mut flat),
                Err(e) => newborn.fail(NO_OPERATION, damaged(e), 125),
            }
        }
        Err(errno) => newborn.fail(NO_OPERATION, errno, 125),
    }
}

struct Newborn {
    fds: [RawFd; flat::FDS_MAX],
    count: usize,
    master: RawFd,
    capabilities: Option<CapabilityMasks>,
    nofile: Option<Record>,
    sealed: bool,
    heritage: Heritage,
}

impl Newborn {
    /// Takes its own place: descriptors, signals, umask; nobody may look inside.
    fn settle_in(&mut self, sock: RawFd, proc: RawFd) -> Outcome {
        // ORDER: both are moved out of the way before one of them is put onto the other.
        let sock = rustix::io::fcntl_dupfd_cloexec(borrowed(sock), 16)?.into_raw_fd();
        let proc = rustix::io::fcntl_dupfd_cloexec(borrowed(proc), 16)?.into_raw_fd();
        // SAFETY: this process is a copy of the keeper that never returns to its code: nobody uses
        // the keeper's descriptors any more.
        unsafe {
            call::duplicate_to(borrowed(sock), SOCK, true)?;
            call::duplicate_to(borrowed(proc), PROC, true)?;
            call::close_from(5)?;
            self.heritage.arguments.overwrite(b"dormouse-newborn");
        }
        kernel::set_dumpable(false)?;
        call::block_signals(0)?;
        rustix::process::umask(Mode::from_raw_mode(0o022));
        Ok(())
    }

    /// Receives the plan and its descriptors; maps the plan.
    fn receive(&mut self) -> Outcome<(*mut u8, usize)> {
        let mut memory = -1;
        let mut expected = None;
        loop {
            let mut bytes = [0; 32];
            let mut first = None;
            let (fds, count) = (&mut self.fds, &mut self.count);
            let awaits_memory = memory < 0;
            let n = wire::receive(borrowed(SOCK), &mut bytes, RecvFlags::empty(), |fd| {
                if awaits_memory && first.is_none() {
                    first = Some(fd.into_raw_fd());
                } else if let Some(slot) = fds.get_mut(*count) {
                    *slot = fd.into_raw_fd();
                    *count += 1;
                }
            })?;
            match (ToNewborn::from_bytes(bytes.get(..n).unwrap_or_default()), expected) {
                // The engine is gone.
                (None, _) if n == 0 => kernel::exit(125),
                (Some(ToNewborn::Plan { bytes, descriptors }), None) => {
                    memory = first.ok_or(Errno::BADMSG)?;
                    expected = Some((bytes as usize, descriptors as usize));
                }
                (Some(ToNewborn::More), Some(_)) => {}
                _ => return Err(Errno::BADMSG),
            }
            let Some((length, descriptors)) = expected else { return Err(Errno::BADMSG) };
            if descriptors > flat::FDS_MAX || self.count > descriptors {
                return Err(Errno::BADMSG);
            }
            if self.count == descriptors {
                self.restore_descriptor_limit();
                let size = rustix::fs::fstat(borrowed(memory))?.st_size as u64;
                if length == 0 || length > flat::PLAN_MAX_BYTES || (length as u64) > size {
                    return Err(Errno::BADMSG);
                }
                let (access, private) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
                let hint = std::ptr::null_mut();
                // SAFETY: a new mapping at an address that the kernel chooses.
                let at = unsafe {
                    rustix::mm::mmap(hint, length, access, private, borrowed(memory), 0)?
                };
                close(memory);
                return Ok((at.cast(), length));
            }
        }
    }

    /// The keeper has raised its own limit; the program begins with what the keeper began with.
    /// Room is left for the descriptors of the plan: the engine sets the final limit.
    fn restore_descriptor_limit(&self) {
        let (soft, hard) = self.heritage.nofile;
        let soft = soft.max(self.count as u64 + 64).min(hard);
        let _ = kernel::prlimit(NOFILE, Some((soft, hard)));
    }

    fn say(&self, message: FromNewborn, fds: &[BorrowedFd<'_>]) -> Outcome {
        wire::send(borrowed(SOCK), &message.to_bytes(), fds, SendFlags::empty())
    }

    fn fail(&self, index: u32, errno: Errno, status: i32) -> ! {
        let _ = self.say(FromNewborn::Failed { index, errno: errno.raw_os_error() }, &[]);
        kernel::exit(status)
    }

    fn execute(&mut self, plan: &mut Flat<'_>) -> ! {
        for index in 0..plan.count() {
            let record = match plan.record(index) {
                Ok(record) => record,
                Err(e) => self.fail(index as u32, damaged(e), 125),
            };
            if Code::from_number(record.code) == Some(Code::Exec) {
                let errno = self.exec(plan, &record);
                self.fail(index as u32, errno, if errno == Errno::NOENT { 127 } else { 126 });
            }
            if Code::from_number(record.code) == Some(Code::Follow) {
                let errno = self.follow(plan, &record);
                self.fail(index as u32, errno, 125);
            }
            if let Err(errno) = self.step(plan, &record) {
                self.fail(index as u32, errno, 125);
            }
        }
        // A plan without an end.
        self.fail(NO_OPERATION, Errno::NOEXEC, 125)
    }

    /// A descriptor of the plan.
    fn descriptor(&self, index: u64) -> Outcome<BorrowedFd<'static>> {
        let fds = self.fds.get(..self.count).unwrap_or_default();
        fds.get(index as usize).map(|fd| borrowed(*fd)).ok_or(Errno::BADF)
    }

    fn step(&mut self, plan: &Flat<'_>, op: &Record) -> Outcome {
        let text = || plan.text(op).map_err(damaged);
        let fd = || self.descriptor(u64::from(op.fd));
        let Some(code) = Code::from_number(op.code) else { return Err(Errno::NOSYS) };
        match code {
            Code::JoinCgroup => rustix::io::write(fd()?, b"0").map(drop),
            Code::Setns => kernel::setns(fd()?, CloneFlags::from_bits_retain(op.a)),
            Code::BecomeRoot => {
                kernel::set_groups(&[])?;
                kernel::set_gid(0)?;
                kernel::set_uid(0)?;
                kernel::set_dumpable(false)
            }
            Code::Unshare => kernel::unshare(CloneFlags::from_bits_retain(op.a)),
            Code::Loopback => call::loopback_up(),
            Code::SessionKeyring => match kernel::join_session_keyring() {
                // A kernel without keys has none to hide.
                Err(Errno::NOSYS) => Ok(()),
                other => other.map(drop),
            },
            Code::Root => put_root(fd()?),
            Code::RootReadOnly => {
                let root = root()?;
                kernel::mount_setattr(root.as_fd(), false, MountAttr::RDONLY, none(), None, None)
            }
            Code::Attach => {
                let create = op.flags & flat::CREATE != 0;
                let kind = Target::from_number(op.a).ok_or(Errno::INVAL)?;
                let place = target(text()?, kind, create)?;
                kernel::move_mount(fd()?, place.as_fd(), c"")
            }
            Code::NewFilesystem => new_filesystem(op, text()?),
            Code::Bind => {
                let source = plan.text_at(op.b).map_err(damaged)?;
                bind(source, text()?, op.flags & flat::READ_ONLY != 0)
            }
            Code::Mask => mask(text()?, fd()?, self.descriptor(op.a)?),
            Code::ReadOnly => read_only(text()?),
            Code::Sysctl => sysctl(text()?, plan.text_at(op.b).map_err(damaged)?),
            Code::Hostname => call::set_uts_name(text()?, false),
            Code::Domainname => call::set_uts_name(text()?, true),
            // ORDER: with a small limit nothing could be opened any more, so it comes last.
            Code::Rlimit if op.fd == NOFILE => {
                self.nofile = Some(*op);
                Ok(())
            }
            Code::Rlimit => rlimit(op),
            Code::Umask => {
                rustix::process::umask(Mode::from_raw_mode(op.a as u32 & 0o777));
                Ok(())
            }
            Code::OomScoreAdj => match write_oom_score_adj(borrowed(PROC), op.a as i64) {
                Err(Errno::ACCESS | Errno::PERM) if op.flags & flat::LENIENT != 0 => Ok(()),
                other => other,
            },
            Code::Stdio => {
                let all = [fd()?, self.descriptor(op.a)?, self.descriptor(op.b)?];
                become_stdio(all)
            }
            Code::Terminal => {
                self.master = terminal(op, text()?)?;
                Ok(())
            }
            Code::Setsid => rustix::process::setsid().map(drop),
            Code::Sync => self.sync(),
            Code::Chdir => {
                let create = op.flags & flat::CREATE != 0;
                rustix::process::fchdir(&target(text()?, Target::Dir, create)?)?;
                if call::directory_is_reachable() { Ok(()) } else { Err(Errno::XDEV) }
            }
            Code::MakeDir => {
                let mode = Mode::from_raw_mode(op.a as u32 & 0o7777);
                make(text()?, Target::Dir, mode).map(drop)
            }
            Code::Symlink => symlink(plan.text_at(op.b).map_err(damaged)?, text()?),
            Code::Credentials => credentials(plan, op),
            Code::Capabilities => self.capabilities(plan, op),
            Code::NoNewPrivs => kernel::set_no_new_privs(),
            Code::Seccomp => {
                self.seal()?;
                let data = plan.data(op).map_err(damaged)?;
                // SAFETY: an instruction is 8 bytes of plain numbers, any of which are valid.
                let (before, program, after) = unsafe { data.align_to::<Instruction>() };
                let whole = before.is_empty() && after.is_empty() && program.len() as u64 == op.a;
                if whole { kernel::load_filter(program) } else { Err(Errno::BADMSG) }
            }
            Code::Init => {
                self.seal()?;
                crate::init::become_init(self.heritage.arguments, self.capabilities)
            }
            Code::Exec | Code::Follow => Err(Errno::NOSYS),
        }
    }

    /// Whatever is open beyond standard error ends with execve.
    fn seal(&mut self) -> Outcome {
        if !std::mem::replace(&mut self.sealed, true) {
            call::close_on_exec_from(SOCK)?;
            if let Some(op) = self.nofile {
                rlimit(&op)?;
            }
        }
        Ok(())
    }

    fn sync(&mut self) -> Outcome {
        let master = std::mem::replace(&mut self.master, -1);
        if master < 0 {
            self.say(FromNewborn::Ready, &[])?;
        } else {
            self.say(FromNewborn::Ready, &[borrowed(master)])?;
            close(master);
        }
        let mut bytes = [0; 32];
        let n = wire::receive(borrowed(SOCK), &mut bytes, RecvFlags::empty(), drop)?;
        match ToNewborn::from_bytes(bytes.get(..n).unwrap_or_default()) {
            Some(ToNewborn::Go) => Ok(()),
            None if n == 0 => kernel::exit(125),
            _ => Err(Errno::BADMSG),
        }
    }

    /// Sets the capabilities.
    ///
    /// What is permitted now says nothing about the program: execve computes its sets from the
    /// bounding, inheritable and ambient ones. So CAP_SYS_ADMIN (of this user namespace) can stay
    /// until then, and the filter be loaded last even without no_new_privs.
    fn capabilities(&mut self, plan: &Flat<'_>, op: &Record) -> Outcome {
        let data = plan.data(op).map_err(damaged)?;
        let mut masks = [0u64; 5];
        for (mask, bytes) in masks.iter_mut().zip(data.chunks_exact(8)) {
            *mask = u64::from_ne_bytes(bytes.try_into().map_err(|_| Errno::BADMSG)?);
        }
        if data.len() != 40 {
            return Err(Errno::BADMSG);
        }
        let [bounding, effective, permitted, inheritable, ambient] = masks;
        let now = kernel::capget()?;
        kernel::capset(CapabilityMasks { effective: now.permitted, ..now })?;
        kernel::capability_bound(bounding)?;
        let permitted = (permitted | ambient) & now.permitted;
        let effective = effective & permitted;
        let stays = now.permitted & SYS_ADMIN;
        kernel::capset(CapabilityMasks {
            effective: effective | stays,
            permitted: permitted | stays,
            inheritable,
        })?;
        kernel::capability_ambient(ambient)?;
        self.capabilities = Some(CapabilityMasks { effective, permitted, inheritable });
        Ok(())
    }

    /// Maps a restore program, tells it which numbers its descriptors have, and follows it; gives
    /// why it could not.
    fn follow(&mut self, plan: &Flat<'_>, op: &Record) -> Errno {
        let go = || -> Outcome<(*const u8, u64)> {
            if let Some(op) = self.nofile {
                rlimit(&op)?;
            }
            let data = plan.data(op).map_err(damaged)?;
            let mut numbers = data.chunks_exact(8).map(|eight| {
                let eight = eight.try_into().map_err(|_| Errno::BADMSG)?;
                Ok(u64::from_ne_bytes(eight))
            });
            let mut next = || numbers.next().ok_or(Errno::BADMSG)?;
            let (start, descriptors_at, count) = (next()?, next()?, next()?);
            let end = count.checked_mul(4).and_then(|n| n.checked_add(descriptors_at));
            if end.is_none_or(|end| end > op.b) || op.a == 0 || start.wrapping_sub(op.a) >= op.b {
                return Err(Errno::BADMSG);
            }
            let memory = self.descriptor(u64::from(op.fd))?;
            let access = ProtFlags::READ | ProtFlags::WRITE | ProtFlags::EXEC;
            let flags = MapFlags::SHARED | MapFlags::FIXED_NOREPLACE;
            let place = std::ptr::with_exposed_provenance_mut(op.a as usize);
            // SAFETY: a new mapping at an address where there is none, or the call fails.
            let at = unsafe { rustix::mm::mmap(place, op.b as usize, access, flags, memory, 0)? };
            if at != place {
                return Err(Errno::OPNOTSUPP); // KERNEL(4.17): FIXED_NOREPLACE; before, a hint
            }
            for n in 0..count {
                let number = self.descriptor(next()?)?.as_raw_fd();
                // SAFETY: inside the mapping, as was checked above; a multiple of 4 bytes into it.
                unsafe {
                    let cell = at.cast::<u8>().add((descriptors_at + n * 4) as usize);
                    cell.cast::<RawFd>().write_unaligned(number);
                }
            }
            Ok((at.cast(), start))
        };
        match go() {
            Ok((code, start)) => {
                // The engine takes the end of the socket for success, as with execve.
                close(SOCK);
                // SAFETY: the engine has laid code out there for this very purpose.
                unsafe { call::follow(code, start) }
            }
            Err(errno) => errno,
        }
    }

    /// Becomes the program; gives why it could not, as a shell chooses among several candidates:
    /// one that may not be executed says more than one that is not there.
    fn exec(&mut self, plan: &mut Flat<'_>, op: &Record) -> Errno {
        if let Err(errno) = self.seal() {
            return errno;
        }
        let base = plan.base() as usize;
        let (argv, envp) = match (plan.relocate(op.a), plan.relocate(op.b)) {
            (Ok(argv), Ok(envp)) => ((base + argv) as *const _, (base + envp) as *const _),
            _ => return Errno::BADMSG,
        };
        let Ok(mut rest) = plan.data(op) else { return Errno::BADMSG };
        let mut said = Errno::NOENT;
        while !rest.is_empty() {
            let at = op.text as usize + op.text_len as usize - rest.len();
            let Ok(path) = plan.text_at(at as u64) else { return Errno::BADMSG };
            // SAFETY: `relocate` has checked that every entry points to a text of the plan, and
            // that the tables end with null.
            match unsafe { call::execve(path, argv, envp) } {
                Errno::NOENT | Errno::NOTDIR => {}
                Errno::ACCESS => said = Errno::ACCESS,
                other => return other,
            }
            rest = rest.get(path.count_bytes() + 1..).unwrap_or_default();
        }
        said
    }
}

/// No attribute.
fn none() -> MountAttr {
    MountAttr::empty()
}

/// Writes a number in decimal digits into the end of `text`.
fn decimal(value: i64, text: &mut [u8; 20]) -> &[u8] {
    let mut at = text.len();
    let mut rest = value.unsigned_abs();
    loop {
        at -= 1;
        text[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 || at == 1 {
            break;
        }
    }
    if value < 0 {
        at -= 1;
        text[at] = b'-';
    }
    &text[at..]
}

/// The root of this process, as a place to begin.
fn root() -> Outcome<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(c"/", flags, Mode::empty())
}

fn put_root(mount: BorrowedFd<'static>) -> Outcome {
    kernel::move_mount(mount, root()?.as_fd(), c"")?;
    rustix::process::fchdir(mount)?;
    rustix::process::chroot(c".")?;
    rustix::process::chdir(c"/")
}

/// What a target must be: the kinds of `launch::TargetKind`, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    Dir,
    File,
    PlainDir,
}

impl Target {
    fn from_number(number: u64) -> Option<Self> {
        match number {
            0 => Some(Self::Dir),
            1 => Some(Self::File),
            2 => Some(Self::PlainDir),
            _ => None,
        }
    }
}

/// Opens a path below the root as a place, never leaving it.
fn open(path: &CStr, extra: ResolveFlags) -> Outcome<OwnedFd> {
    open_below(root()?.as_fd(), path, extra)
}

fn open_below(root: BorrowedFd<'_>, path: &CStr, extra: ResolveFlags) -> Outcome<OwnedFd> {
    let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | extra;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    // A rename anywhere on the way makes the kernel unsure of `..`: it says EAGAIN.
    for _ in 0..128 {
        match rustix::fs::openat2(root, path, flags, Mode::empty(), how) {
            Err(Errno::AGAIN) => {}
            other => return other,
        }
    }
    Err(Errno::AGAIN)
}

fn is_dir(fd: BorrowedFd<'_>) -> Outcome<bool> {
    Ok(FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode) == FileType::Directory)
}

/// Opens the target of a mount, made when it is missing and `create` says so.
fn target(path: &CStr, kind: Target, create: bool) -> Outcome<OwnedFd> {
    let extra = match kind {
        Target::PlainDir => ResolveFlags::NO_SYMLINKS,
        _ => ResolveFlags::empty(),
    };
    let fd = match open(path, extra) {
        Err(Errno::NOENT) if create => make(path, kind, Mode::from_raw_mode(0o755))?,
        other => other?,
    };
    match (kind, is_dir(fd.as_fd())?) {
        (Target::File, true) => Err(Errno::ISDIR),
        (Target::Dir | Target::PlainDir, false) => Err(Errno::NOTDIR),
        _ => Ok(fd),
    }
}

/// Makes a directory, or an empty file, with the directories that lead to it. Links on the way are
/// followed inside the root; one that leads nowhere is an error.
fn make(path: &CStr, kind: Target, mode: Mode) -> Outcome<OwnedFd> {
    let extra = match kind {
        Target::PlainDir => ResolveFlags::NO_SYMLINKS,
        _ => ResolveFlags::empty(),
    };
    let bytes = path.to_bytes();
    let mut part = [0u8; 4096];
    if bytes.len() >= part.len() {
        return Err(Errno::NAMETOOLONG);
    }
    let root = root()?;
    let mut here = open_below(root.as_fd(), c"/", extra)?;
    let mut start = 0;
    while start < bytes.len() {
        if bytes[start] == b'/' {
            start += 1;
            continue;
        }
        let end = bytes[start..].iter().position(|b| *b == b'/').map_or(bytes.len(), |n| start + n);
        let last = bytes[end..].iter().all(|b| *b == b'/');
        part[..end].copy_from_slice(&bytes[..end]);
        part[end] = 0;
        let name = CStr::from_bytes_until_nul(&part[start..]).map_err(|_| Errno::INVAL)?;
        let so_far = CStr::from_bytes_until_nul(&part).map_err(|_| Errno::INVAL)?;
        here = match open_below(root.as_fd(), so_far, extra) {
            Err(Errno::NOENT) => {
                if last && kind == Target::File {
                    let flags = OFlags::WRONLY
                        | OFlags::CREATE
                        | OFlags::EXCL
                        | OFlags::NOFOLLOW
                        | OFlags::CLOEXEC;
                    match rustix::fs::openat(&here, name, flags, Mode::from_raw_mode(0o644)) {
                        Ok(_) => {}
                        Err(Errno::EXIST) => {}
                        Err(e) => return Err(e),
                    }
                } else {
                    let mode = if last { mode } else { Mode::from_raw_mode(0o755) };
                    match rustix::fs::mkdirat(&here, name, mode) {
                        Ok(()) if last && mode.bits() & 0o7022 != 0 => {
                            // The umask has cut it.
                            rustix::fs::chmodat(&here, name, mode, AtFlags::empty())?;
                        }
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(e) => return Err(e),
                    }
                }
                open_below(root.as_fd(), so_far, extra)?
            }
            other => other?,
        };
        start = end;
    }
    Ok(here)
}

/// Makes a symbolic link unless something has that name.
fn symlink(points_to: &CStr, path: &CStr) -> Outcome {
    let bytes = path.to_bytes();
    let mut part = [0u8; 4096];
    if bytes.len() >= part.len() {
        return Err(Errno::NAMETOOLONG);
    }
    part[..bytes.len()].copy_from_slice(bytes);
    let slash = bytes.iter().rposition(|b| *b == b'/');
    let (parent, name) = match slash {
        None => (root()?, 0),
        Some(at) => {
            part[at] = 0;
            let parent = CStr::from_bytes_until_nul(&part).map_err(|_| Errno::INVAL)?;
            let whole = if parent.is_empty() { c"/" } else { parent };
            (make(whole, Target::Dir, Mode::from_raw_mode(0o755))?, at + 1)
        }
    };
    let name = CStr::from_bytes_until_nul(&part[name..]).map_err(|_| Errno::INVAL)?;
    match rustix::fs::symlinkat(points_to, &parent, name) {
        Err(Errno::EXIST) => Ok(()),
        other => other,
    }
}

/// mqueue, devpts or cgroup2 of the process's own namespaces.
fn new_filesystem(op: &Record, path: &CStr) -> Outcome {
    let name = flat::FILESYSTEMS.get(op.b as usize).ok_or(Errno::NODEV)?;
    let context = kernel::fsopen(name)?;
    let context = context.as_fd();
    kernel::fsconfig(context, FsCommand::String(c"source", name))?;
    let mut attr = MountAttr::NOSUID | MountAttr::NOEXEC;
    if op.b == 1 {
        kernel::fsconfig(context, FsCommand::Flag(c"newinstance"))?;
        kernel::fsconfig(context, FsCommand::String(c"ptmxmode", c"0666"))?;
        kernel::fsconfig(context, FsCommand::String(c"mode", c"0620"))?;
        if op.a <= u64::from(u32::MAX) {
            let mut text = [0; 20];
            let mut gid = [0; 21];
            let digits = decimal(op.a as i64, &mut text);
            gid[..digits.len()].copy_from_slice(digits);
            let gid = CStr::from_bytes_until_nul(&gid).map_err(|_| Errno::INVAL)?;
            kernel::fsconfig(context, FsCommand::String(c"gid", gid))?;
        }
    } else {
        attr |= MountAttr::NODEV;
    }
    kernel::fsconfig(context, FsCommand::Create)?;
    let mount = kernel::fsmount(context, attr)?;
    let place = target(path, Target::PlainDir, true)?;
    kernel::move_mount(mount.as_fd(), place.as_fd(), c"")
}

/// A detached copy of what is mounted at `place`.
fn copy(place: BorrowedFd<'_>, recursive: bool) -> Outcome<OwnedFd> {
    let mut flags = OpenTreeFlags::CLONE | OpenTreeFlags::EMPTY_PATH;
    if recursive {
        flags |= OpenTreeFlags::RECURSIVE;
    }
    kernel::open_tree(place, c"", flags)
}

fn bind(source: &CStr, path: &CStr, read_only: bool) -> Outcome {
    let source = open(source, ResolveFlags::empty())?;
    let kind = if is_dir(source.as_fd())? { Target::Dir } else { Target::File };
    let mount = copy(source.as_fd(), true)?;
    if read_only {
        kernel::mount_setattr(mount.as_fd(), true, MountAttr::RDONLY, none(), None, None)?;
    }
    kernel::move_mount(mount.as_fd(), target(path, kind, true)?.as_fd(), c"")
}

/// Hides a path. A mount from outside can be copied only once it is attached here, so the first use
/// attaches it and later ones copy that.
fn mask(path: &CStr, null: BorrowedFd<'_>, empty: BorrowedFd<'_>) -> Outcome {
    let place = match open(path, ResolveFlags::NO_SYMLINKS) {
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
        other => other?,
    };
    let with = if is_dir(place.as_fd())? { empty } else { null };
    match copy(with, false) {
        Err(Errno::INVAL) => kernel::move_mount(with, place.as_fd(), c""),
        mount => kernel::move_mount(mount?.as_fd(), place.as_fd(), c""),
    }
}

fn read_only(path: &CStr) -> Outcome {
    let place = match open(path, ResolveFlags::NO_SYMLINKS) {
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
        other => other?,
    };
    let mount = copy(place.as_fd(), true)?;
    kernel::mount_setattr(mount.as_fd(), true, MountAttr::RDONLY, none(), None, None)?;
    kernel::move_mount(mount.as_fd(), place.as_fd(), c"")
}

fn is_of(fd: &OwnedFd, magic: u64) -> Outcome {
    if rustix::fs::fstatfs(fd)?.f_type as u64 == magic { Ok(()) } else { Err(Errno::NODEV) }
}

/// Writes a sysctl through the procfs that the plan has mounted at `/proc`.
fn sysctl(key: &CStr, value: &CStr) -> Outcome {
    let dir = open(c"/proc/sys", ResolveFlags::NO_SYMLINKS)?;
    is_of(&dir, PROC_MAGIC)?;
    let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat2(&dir, key, flags, Mode::empty(), how)?;
    is_of(&file, PROC_MAGIC)?;
    rustix::io::write(&file, value.to_bytes()).map(drop)
}

fn rlimit(op: &Record) -> Outcome {
    match kernel::prlimit(op.fd, Some((op.a, op.b))) {
        Err(Errno::PERM) if op.flags & flat::LENIENT != 0 => {
            let (_, hard) = kernel::prlimit(op.fd, None)?;
            let hard = hard.min(op.b);
            kernel::prlimit(op.fd, Some((op.a.min(hard), hard))).map(drop)
        }
        other => other.map(drop),
    }
}

fn become_stdio(fds: [BorrowedFd<'_>; 3]) -> Outcome {
    for (number, fd) in fds.into_iter().enumerate() {
        // SAFETY: 0 to 2 are owned by nobody; descriptors of a plan have higher numbers.
        unsafe { call::duplicate_to(fd, number as RawFd, false)? };
    }
    Ok(())
}

/// Opens a terminal of the devpts at `path`; gives its master.
fn terminal(op: &Record, path: &CStr) -> Outcome<RawFd> {
    let devpts = open(path, ResolveFlags::NO_SYMLINKS)?;
    is_of(&devpts, DEVPTS_MAGIC)?;
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let master = rustix::fs::openat(&devpts, c"ptmx", flags, Mode::empty())?;
    rustix::pty::unlockpt(&master)?;
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
    rustix::fs::fchown(&slave, Some(rustix::fs::Uid::from_raw(op.fd)), None)?;
    let (rows, columns) = ((op.a >> 16) as u16, op.a as u16);
    if rows != 0 && columns != 0 {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        rustix::termios::tcsetwinsize(&master, size)?;
    }
    match rustix::process::setsid() {
        // It leads one already.
        Ok(_) | Err(Errno::PERM) => {}
        Err(e) => return Err(e),
    }
    rustix::process::ioctl_tiocsctty(&slave)?;
    become_stdio([slave.as_fd(); 3])?;
    if op.flags & flat::CONSOLE != 0 {
        let mount = copy(slave.as_fd(), false)?;
        let place = target(c"/dev/console", Target::File, true)?;
        kernel::move_mount(mount.as_fd(), place.as_fd(), c"")?;
    }
    Ok(master.into_raw_fd())
}

fn credentials(plan: &Flat<'_>, op: &Record) -> Outcome {
    let data = plan.data(op).map_err(damaged)?;
    // SAFETY: a group id is 4 bytes of a plain number, any of which is valid.
    let (before, groups, after) = unsafe { data.align_to::<u32>() };
    if !before.is_empty() || !after.is_empty() || groups.len() as u64 != op.b {
        return Err(Errno::BADMSG);
    }
    kernel::set_keep_capabilities(true)?;
    kernel::set_groups(groups)?;
    kernel::set_gid(op.a as u32)?;
    kernel::set_uid(op.fd)?;
    kernel::set_keep_capabilities(false)?;
    kernel::set_dumpable(false)
}
