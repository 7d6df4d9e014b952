//! The life of a process between clone and execve: it receives its plan and executes it.
//!
//! **State.** The table of received descriptors, the plan in a private mapping, and the master of a
//! terminal if one was opened. Descriptors 0 to 2 are those of the cloning process (the keeper's
//! are `/dev/null`), 3 is the socket to the engine, 4 its procfs; all others are closed first.
//!
//! **Rules.** A newborn is a copy of the keeper: it must not allocate, lock or panic, and never
//! returns. Paths are texts of the plan; a part of a path is copied to the stack when needed.
//!
//! **Trust.** The engine, which wrote the plan, is trusted; the image is not: see [`crate::tree`].
//!
//! **Exit.** By execve, or in a restore program (the crate `checkpoint`). On a failure the newborn
//! sends `Failed` and exits with 125 (126, 127 if execve failed). If the engine exits before Go,
//! the newborn exits with 125 without a message.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};

use dormouse_kernel::call::{self as kernel, CapabilityMasks, CloneFlags, Instruction};
use dormouse_kernel::weakened;
use dormouse_launch::NEVER_BEGAN;
use dormouse_launch::flat::{self, Code, Damaged, Flat, Record};
use dormouse_launch::protocol::{FromNewborn, ToNewborn};
use dormouse_launch::wire;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Access, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::{RecvFlags, SendFlags, SocketFlags};

use crate::setting::{NOFILE, Outcome, become_stdio, rlimit, write_oom_score_adj};
use crate::tree::{self, Target, Tree};
use crate::{call, program};

pub use crate::heritage::Heritage;

/// Number of the socket to the engine.
const SOCK: RawFd = 3;
/// Number of the keeper's procfs.
const PROC: RawFd = 4;
/// The number of a descriptor that was closed: the kernel returns EBADF.
const CLOSED: RawFd = -2;
/// CAP_SYS_ADMIN as a bit.
const SYS_ADMIN: u64 = 1 << 21;
/// f_type of procfs (statfs(2)).
const PROC_MAGIC: u64 = 0x9fa0;
/// Signals that end a container that waits for its start: SIGHUP, SIGINT, SIGQUIT, SIGTERM.
const ENDING: u64 = 1 | 1 << 1 | 1 << 2 | 1 << 14;
/// Index of a failure that is of no operation.
const NO_OPERATION: u32 = u32::MAX;

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

/// Makes this process undumpable, so that no process of the container can inspect or trace it.
fn hide() -> Outcome {
    // On a change of ids the kernel itself would do this.
    kernel::set_dumpable(weakened("undumpable"))
}

/// Closes a descriptor by its number.
fn close(fd: RawFd) {
    // SAFETY: the caller has just created it and does not use it any more.
    unsafe { rustix::io::close(fd) }
}

/// Runs the newborn. `sock` and `proc` are numbers of the keeper's table, of which this process has
/// a copy.
pub fn live(sock: RawFd, proc: RawFd, heritage: Heritage) -> ! {
    let mut newborn = Newborn {
        fds: [-1; flat::FDS_MAX],
        count: 0,
        master: -1,
        capabilities: None,
        nofile: None,
        sealed: false,
        synced: None,
        operations_before: 0,
        fds_before: 0,
        sock: SOCK,
        preserved: 0,
        root: None,
        hook_dir: None,
        sys: None,
        output: None,
        hook_filter: None,
        listener: None,
        heritage,
    };
    if let Err(errno) = newborn.settle_in(sock, proc) {
        // Nothing is set up yet: only the keeper can be notified, by the exit code.
        let _ = errno;
        kernel::exit(NEVER_BEGAN);
    }
    newborn.execute_received()
}

/// A Sync whose Go is to be awaited.
#[derive(Debug, Clone, Copy)]
struct Synced {
    /// The number of the operation.
    number: u32,
    /// Whether operations other than sysctls come before the wait.
    early: bool,
}

impl Synced {
    /// Returns whether an operation comes before the wait.
    fn permits(self, op: &Record) -> bool {
        match Code::from_number(op.code) {
            Some(Code::Sysctl) => true,
            Some(Code::Chdir | Code::Credentials | Code::Capabilities | Code::NoNewPrivs) => {
                self.early
            }
            // The engine fetches a listener after Go.
            Some(Code::Seccomp) => self.early && op.fd == flat::NO_FD,
            _ => false,
        }
    }
}

struct Newborn {
    fds: [RawFd; flat::FDS_MAX],
    count: usize,
    master: RawFd,
    capabilities: Option<CapabilityMasks>,
    nofile: Option<Record>,
    sealed: bool,
    /// A Sync whose Go has not been awaited.
    synced: Option<Synced>,
    /// Operations of earlier parts of the plan.
    operations_before: u32,
    /// Descriptors of earlier parts.
    fds_before: usize,
    /// The socket to the engine: `SOCK`, until that number is needed for another descriptor.
    sock: RawFd,
    /// Number of descriptors from 3 on that are the program's.
    preserved: u32,
    /// The mount that is to become the root, until it is.
    root: Option<BorrowedFd<'static>>,
    /// The working directory of hooks, while the root is attached below the host's.
    hook_dir: Option<BorrowedFd<'static>>,
    /// `/proc/sys` of the cloning process, while operations that write there follow each other.
    sys: Option<OwnedFd>,
    /// Where the programs of hooks write to.
    output: Option<BorrowedFd<'static>>,
    /// The operation that has their filter.
    hook_filter: Option<Record>,
    /// The listener of the filter that is loaded, until a hook runs.
    listener: Option<RawFd>,
    heritage: Heritage,
}

impl Newborn {
    /// Sets up descriptors, signals and umask, and makes the process undumpable.
    fn settle_in(&mut self, sock: RawFd, proc: RawFd) -> Outcome {
        // ORDER: both are moved out of the way before one of them is put onto the other.
        let sock = rustix::io::fcntl_dupfd_cloexec(borrowed(sock), 16)?.into_raw_fd();
        let proc = rustix::io::fcntl_dupfd_cloexec(borrowed(proc), 16)?.into_raw_fd();
        // SAFETY: this process is a copy of the keeper that never returns to its code: no code uses
        // the keeper's descriptors any more.
        unsafe {
            call::duplicate_to(borrowed(sock), SOCK, true)?;
            call::duplicate_to(borrowed(proc), PROC, true)?;
            if !weakened("close-descriptors") {
                call::close_from(5)?;
            }
            self.heritage.arguments.overwrite(b"dormouse-newborn");
        }
        if !self.heritage.shared.0.is_empty() {
            let _ = kernel::set_name(c"dormouse-keeper"); // as all newborns
        }
        hide()?;
        call::block_signals(0)?;
        rustix::process::umask(Mode::from_raw_mode(0o022));
        Ok(())
    }

    /// Receives a plan, or its next part, and executes it.
    fn execute_received(&mut self) -> ! {
        match self.receive() {
            Ok((plan, length)) => {
                // SAFETY: the mapping is private, writable, of that length, and is never unmapped.
                let bytes = unsafe { std::slice::from_raw_parts_mut(plan, length) };
                match Flat::new(bytes) {
                    Ok(mut flat) => {
                        if !flat.has_rest() {
                            self.restore_descriptor_limit();
                        }
                        self.execute(&mut flat)
                    }
                    Err(e) => self.fail(NO_OPERATION, damaged(e), NEVER_BEGAN),
                }
            }
            Err(errno) => self.fail(NO_OPERATION, errno, NEVER_BEGAN),
        }
    }

    /// Receives the next part of the plan and its descriptors; maps the part.
    fn receive(&mut self) -> Outcome<(*mut u8, usize)> {
        let mut memory = -1;
        let mut expected = None;
        loop {
            let mut bytes = [0; 32];
            let mut first = None;
            let sock = borrowed(self.sock);
            let (fds, count) = (&mut self.fds, &mut self.count);
            let awaits_memory = memory < 0;
            let n = wire::receive(sock, &mut bytes, RecvFlags::empty(), |fd| {
                if awaits_memory && first.is_none() {
                    first = Some(fd.into_raw_fd());
                } else if let Some(slot) = fds.get_mut(*count) {
                    *slot = fd.into_raw_fd();
                    *count += 1;
                }
            })?;
            match (ToNewborn::from_bytes(bytes.get(..n).unwrap_or_default()), expected) {
                // The engine has exited.
                (None, _) if n == 0 => kernel::exit(NEVER_BEGAN),
                (Some(ToNewborn::Plan { bytes, descriptors }), None) => {
                    memory = first.ok_or(Errno::BADMSG)?;
                    expected = Some((bytes as usize, descriptors as usize));
                }
                (Some(ToNewborn::More), Some(_)) => {}
                _ => return Err(Errno::BADMSG),
            }
            let Some((length, descriptors)) = expected else { return Err(Errno::BADMSG) };
            let end = self.fds_before + descriptors;
            if end > flat::FDS_MAX || self.count > end {
                return Err(Errno::BADMSG);
            }
            if self.count == end {
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

    /// The keeper has raised its own limit; the program starts with the keeper's original one. Room
    /// is left for the descriptors of the plan: the engine sets the final limit.
    ///
    /// ORDER: after all descriptors of the plan are received, which the limit may not permit any more.
    fn restore_descriptor_limit(&self) {
        let (soft, hard) = self.heritage.nofile;
        let soft = soft.max(self.count as u64 + 64).min(hard);
        let _ = kernel::prlimit(NOFILE, Some((soft, hard)));
    }

    fn say(&self, message: FromNewborn, fds: &[BorrowedFd<'_>]) -> Outcome {
        wire::send(borrowed(self.sock), &message.to_bytes(), fds, SendFlags::empty())
    }

    fn fail(&self, index: u32, errno: Errno, status: i32) -> ! {
        self.fail_with(index, errno.raw_os_error(), status, None)
    }

    /// `number` is an errno or the end of a program (`flat::PROGRAM_ENDED`), which has written to
    /// `output`.
    fn fail_with(&self, index: u32, number: i32, status: i32, output: Option<BorrowedFd<'_>>) -> ! {
        let _ = self.say(FromNewborn::Failed { index, errno: number }, output.as_slice());
        kernel::exit(status)
    }

    /// The root that this process works below.
    fn tree(&self) -> Outcome<Tree> {
        Tree::new(self.root)
    }

    fn execute(&mut self, plan: &mut Flat<'_>) -> ! {
        for index in 0..plan.count() {
            let number = self.operations_before + index as u32;
            let record = match plan.record(index) {
                Ok(record) => record,
                Err(e) => self.fail(number, damaged(e), NEVER_BEGAN),
            };
            let code = Code::from_number(record.code);
            if let Some(synced) = self.synced
                && !synced.permits(&record)
            {
                self.synced = None;
                if let Err(errno) = self.wait_for_go() {
                    self.fail(synced.number, errno, NEVER_BEGAN);
                }
            }
            if code == Some(Code::Sync) {
                self.synced = Some(Synced { number, early: record.flags & flat::EARLY != 0 });
            }
            if code == Some(Code::Rest) {
                self.operations_before = number + 1;
                self.fds_before = self.count;
                self.execute_received();
            }
            if code == Some(Code::Exec) {
                let errno = self.exec(plan, &record);
                self.fail(number, errno, if errno == Errno::NOENT { 127 } else { 126 });
            }
            if code == Some(Code::Follow) {
                let errno = self.follow(plan, &record);
                self.fail(number, errno, NEVER_BEGAN);
            }
            if code == Some(Code::Hook) {
                if let Err(why) = self.hook(plan, &record) {
                    self.fail_with(number, why, NEVER_BEGAN, self.output);
                }
            } else if let Err(errno) = self.step(plan, &record) {
                self.fail(number, errno, NEVER_BEGAN);
            }
        }
        // A plan without a final operation.
        self.fail(NO_OPERATION, Errno::NOEXEC, NEVER_BEGAN)
    }

    /// A descriptor of the plan.
    fn descriptor(&self, index: u64) -> Outcome<BorrowedFd<'static>> {
        let fds = self.fds.get(..self.count).unwrap_or_default();
        fds.get(self.place(index)).map(|fd| borrowed(*fd)).ok_or(Errno::BADF)
    }

    /// The place in the table of a descriptor of this part of the plan.
    fn place(&self, index: u64) -> usize {
        (index as usize).saturating_add(self.fds_before)
    }

    /// Closes a descriptor of the plan that no later operation uses: a created container may wait for its
    /// start for long.
    fn let_go(&mut self, index: u32) {
        let place = self.place(index.into());
        if let Some(fd) = self.fds.get_mut(place).filter(|fd| **fd >= 0) {
            close(std::mem::replace(fd, CLOSED));
        }
    }

    /// Writes a sysctl of this process's namespaces through the procfs of the cloning process. The
    /// kernel takes the namespace from the writer, and the image has no influence on that procfs.
    fn sysctl(&mut self, key: &CStr, value: &CStr) -> Outcome {
        let dir = match &self.sys {
            Some(dir) => dir,
            None => {
                let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let dir = rustix::fs::openat(borrowed(PROC), c"sys", flags, Mode::empty())?;
                tree::is_of(&dir, PROC_MAGIC)?;
                self.sys.insert(dir)
            }
        };
        let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let file = rustix::fs::openat2(dir, key, flags, Mode::empty(), how)?;
        rustix::io::write(&file, value.to_bytes()).map(drop)
    }

    fn step(&mut self, plan: &Flat<'_>, op: &Record) -> Outcome {
        if Code::from_number(op.code) != Some(Code::Sysctl) {
            self.sys = None;
        }
        let text = || plan.text(op).map_err(damaged);
        let fd = || self.descriptor(u64::from(op.fd));
        let Some(code) = Code::from_number(op.code) else { return Err(Errno::NOSYS) };
        match code {
            Code::JoinCgroup => {
                rustix::io::write(fd()?, b"0")?;
                self.let_go(op.fd);
                Ok(())
            }
            Code::Setns => kernel::setns(fd()?, CloneFlags::from_bits_retain(op.a)),
            Code::BecomeRoot => {
                kernel::set_groups(&[])?;
                kernel::set_gid(0)?;
                kernel::set_uid(0)?;
                hide()
            }
            Code::Unshare => kernel::unshare(CloneFlags::from_bits_retain(op.a)),
            Code::Loopback => call::loopback_up(),
            Code::SessionKeyring => match kernel::join_session_keyring() {
                // A kernel without keys has none to hide.
                Err(Errno::NOSYS) => Ok(()),
                other => other.map(drop),
            },
            Code::Root => tree::put_root(fd()?),
            Code::RootBelow => {
                let mount = fd()?;
                if op.flags & flat::APART == 0 {
                    tree::put_root_below(mount, text()?)?;
                    self.hook_dir = Some(mount);
                }
                self.root = Some(mount);
                Ok(())
            }
            Code::Pivot => {
                let mount = self.root.take().ok_or(Errno::INVAL)?;
                self.hook_dir = None;
                match op.flags & (flat::NO_PIVOT | flat::APART) {
                    0 => tree::pivot(mount),
                    flat::APART => tree::enter(mount),
                    _ => tree::cover(mount, borrowed(PROC)),
                }
            }
            Code::RootReadOnly => self.tree()?.make_read_only(),
            Code::Spread => self.tree()?.spread(op.a, op.flags & flat::RECURSIVE != 0),
            Code::Attach => {
                let create = op.flags & flat::CREATE != 0;
                let kind = Target::from_number(op.a & u64::from(u32::MAX)).ok_or(Errno::INVAL)?;
                let place = self.tree()?.target(text()?, kind, create)?;
                match op.flags & flat::COPY {
                    0 => tree::attach(fd()?, place.as_fd(), op.a >> 32),
                    _ => tree::attach_copy(fd()?, place.as_fd(), borrowed(PROC), op.a >> 32),
                }
            }
            Code::Take => {
                let half = u64::from(u32::MAX);
                let userns = match op.b & half {
                    none if none == u64::from(flat::NO_FD) => None,
                    index => Some(self.descriptor(index)?),
                };
                let taken = self.tree()?.take(text()?, op, userns)?;
                let place = self.place(op.fd.into());
                let slot = self.fds.get_mut(place).ok_or(Errno::BADF)?;
                close(std::mem::replace(slot, taken.into_raw_fd()));
                Ok(())
            }
            Code::NewFilesystem => self.tree()?.new_filesystem(op, text()?),
            Code::Filesystem => {
                let mut at = op.b;
                let words = std::iter::from_fn(|| match plan.text_at(at) {
                    Ok(word) if word.is_empty() => None,
                    Ok(word) => {
                        at += word.count_bytes() as u64 + 1;
                        Some(Ok(word))
                    }
                    Err(e) => Some(Err(damaged(e))),
                });
                self.tree()?.filesystem(op, words, text()?)
            }
            Code::Device => self.tree()?.device(op, text()?),
            Code::Bind => {
                let source = plan.text_at(op.b).map_err(damaged)?;
                self.tree()?.bind(source, text()?, op.flags & flat::READ_ONLY != 0)
            }
            Code::Mask => self.tree()?.mask(text()?, fd()?, self.descriptor(op.a)?),
            Code::ReadOnly => self.tree()?.read_only(text()?),
            Code::Sysctl => self.sysctl(text()?, plan.text_at(op.b).map_err(damaged)?),
            Code::Hostname => call::set_uts_name(text()?, false),
            Code::Domainname => call::set_uts_name(text()?, true),
            // ORDER: with a small limit nothing could be opened any more, so it comes last.
            Code::Rlimit if op.fd == NOFILE => {
                self.nofile = Some(*op);
                // A hard limit that is refused is refused now, by its name, and not as a failed execve.
                match kernel::prlimit(NOFILE, None)? {
                    (soft, hard) if hard < op.b => {
                        match kernel::prlimit(NOFILE, Some((soft, op.b))) {
                            Err(Errno::PERM) if op.flags & flat::LENIENT != 0 => Ok(()),
                            other => other.map(drop),
                        }
                    }
                    _ => Ok(()),
                }
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
                self.master = self.tree()?.terminal(op, text()?)?;
                Ok(())
            }
            Code::Setsid => rustix::process::setsid().map(drop),
            Code::Sync => self.report(),
            Code::Chdir => {
                let create = op.flags & flat::CREATE != 0;
                let place = self.tree()?.target(text()?, Target::Dir, create)?;
                rustix::process::fchdir(&place)?;
                let inside = call::directory_is_reachable() || weakened("reachable-directory");
                if inside { Ok(()) } else { Err(Errno::XDEV) }
            }
            Code::MakeDir => {
                let mode = Mode::from_raw_mode(op.a as u32 & 0o7777);
                self.tree()?.make(text()?, Target::Dir, mode).map(drop)
            }
            Code::Symlink => self.tree()?.symlink(plan.text_at(op.b).map_err(damaged)?, text()?),
            Code::Await => {
                let listener = fd()?;
                self.output = None;
                (0..op.a.min(self.count as u64)).for_each(|index| self.let_go(index as u32));
                self.wait_for_start(listener)
            }
            Code::Write => rustix::io::write(fd()?, text()?.to_bytes()).map(drop),
            Code::EnterTime => {
                let flags = OFlags::RDONLY | OFlags::CLOEXEC;
                let path = c"self/ns/time_for_children";
                let made = rustix::fs::openat(borrowed(PROC), path, flags, Mode::empty())?;
                kernel::setns(made.as_fd(), CloneFlags::NEWTIME)
            }
            Code::Personality => call::set_personality(op.a),
            Code::Scheduler => call::set_scheduler(plan.data(op).map_err(damaged)?),
            Code::IoPriority => call::set_io_priority(op.a as i32),
            Code::Preserve => self.preserve(op),
            Code::Label => label(text()?),
            Code::Lookup => lookup(plan, op),
            Code::HookWith => {
                self.output = Some(fd()?);
                self.hook_filter = (op.a != 0).then_some(*op);
                Ok(())
            }
            Code::Affinity => match kernel::set_affinity(plan.data(op).map_err(damaged)?) {
                Err(Errno::INVAL) if op.flags & flat::LENIENT != 0 => Ok(()),
                other => other,
            },
            Code::MemoryPolicy => {
                kernel::set_memory_policy(op.a as u32, plan.data(op).map_err(damaged)?)
            }
            Code::Hook => Err(Errno::NOSYS),
            Code::Credentials => credentials(plan, op),
            Code::Capabilities => self.capabilities(plan, op),
            Code::NoNewPrivs => kernel::set_no_new_privs(),
            Code::Seccomp => {
                let page = if op.fd == flat::NO_FD { None } else { Some(fd()?) };
                self.seal()?;
                let program = instructions(plan, op)?;
                match page {
                    None => kernel::load_filter_with(program, op.flags.into()).map(drop),
                    Some(page) => {
                        self.listener = Some(load_with_listener(program, op.flags.into(), page)?);
                        Ok(())
                    }
                }
            }
            Code::Init => {
                self.seal()?;
                let own = crate::init::Own::read(plan.data(op).map_err(damaged)?)?;
                let own = own.unwrap_or(crate::init::Own {
                    ids: None,
                    capabilities: self.capabilities,
                    program: None,
                });
                crate::init::become_init(self.heritage.arguments, &own, self.heritage.shared)
            }
            Code::Exec | Code::Follow | Code::Rest => Err(Errno::NOSYS),
        }
    }

    /// Descriptors beyond standard error are closed by execve. The host's procfs is closed now: in
    /// the middle of execve the memory is the container's already, and a root with CAP_SYS_PTRACE
    /// there could inspect open descriptors (seen under emulation, where the middle is long).
    fn seal(&mut self) -> Outcome {
        if !std::mem::replace(&mut self.sealed, true) {
            if PROC >= SOCK + self.preserved as RawFd {
                close(PROC);
            }
            call::close_on_exec_from(SOCK + self.preserved as RawFd)?;
            if let Some(op) = self.nofile {
                rlimit(&op)?;
            }
        }
        Ok(())
    }

    /// Sends Ready.
    fn report(&mut self) -> Outcome {
        let master = std::mem::replace(&mut self.master, -1);
        if master < 0 {
            return self.say(FromNewborn::Ready, &[]);
        }
        self.say(FromNewborn::Ready, &[borrowed(master)])?;
        close(master);
        Ok(())
    }

    fn wait_for_go(&self) -> Outcome {
        let mut bytes = [0; 32];
        let n = wire::receive(borrowed(self.sock), &mut bytes, RecvFlags::empty(), drop)?;
        match ToNewborn::from_bytes(bytes.get(..n).unwrap_or_default()) {
            Some(ToNewborn::Go) => Ok(()),
            None if n == 0 => kernel::exit(NEVER_BEGAN),
            _ => Err(Errno::BADMSG),
        }
    }

    /// The engine exits meanwhile; the starting command connects to the listener.
    fn wait_for_start(&mut self, listener: BorrowedFd<'_>) -> Outcome {
        // The first process of a pid namespace ignores signals without a handler, but blocked ones
        // stay pending for the descriptor. So SIGTERM ends a created container.
        call::block_signals(ENDING)?;
        let ending = call::signal_descriptor(ENDING)?;
        self.report()?;
        self.wait_for_go()?;
        let mut watched = [
            PollFd::new(&ending, PollFlags::IN),
            PollFd::from_borrowed_fd(listener, PollFlags::IN),
        ];
        rustix::io::retry_on_intr(|| poll(&mut watched, None))?;
        if !watched[0].revents().is_empty() {
            let mut info = [0u8; 128]; // signalfd(2): struct signalfd_siginfo
            rustix::io::read(&ending, &mut info)?;
            kernel::exit(128 + i32::from(info[0]));
        }
        drop(ending);
        call::block_signals(0)?;
        let starter =
            rustix::io::retry_on_intr(|| rustix::net::accept_with(listener, SocketFlags::CLOEXEC))?;
        // SAFETY: the number is that of the socket to the engine, which no code uses any more.
        unsafe { call::duplicate_to(starter.as_fd(), self.sock, true)? };
        self.wait_for_go()
    }

    /// Runs a program and waits for it; an error is as `fail_with` takes it.
    fn hook(&mut self, plan: &mut Flat<'_>, op: &Record) -> Result<(), i32> {
        let input = self.descriptor(u64::from(op.fd)).map_err(Errno::raw_os_error)?;
        let base = plan.base() as usize;
        let bad = Errno::BADMSG.raw_os_error();
        let (Ok(argv), Ok(envp)) = (plan.relocate(op.a), plan.relocate(op.b)) else {
            return Err(bad);
        };
        let path = plan.text(op).map_err(|_| bad)?;
        let (argv, envp) = ((base + argv) as *const _, (base + envp) as *const _);
        let filter = match &self.hook_filter {
            Some(op) => Some((instructions(plan, op).map_err(|_| bad)?, op.flags.into())),
            None => None,
        };
        if let Some(listener) = self.listener.take() {
            // The receiver has a copy. Where that is closed, calls fail instead of waiting for ever.
            close(listener);
        }
        let (output, nofile, dir) = (self.output, self.nofile, self.hook_dir);
        let given = program::Given { input, output, dir, nofile, filter, seconds: op.flags };
        // SAFETY: `relocate` has checked that every entry points to a text of the plan, and that
        // the tables end with null.
        unsafe { program::run(path, argv, envp, &given) }
    }

    /// Descriptors of the plan become 3 and following.
    fn preserve(&mut self, op: &Record) -> Outcome {
        let (first, count) = (self.place(op.fd.into()), op.a as usize);
        let end = first.checked_add(count).filter(|end| *end <= self.count).ok_or(Errno::BADF)?;
        // ORDER: everything leaves the numbers that are wanted before one of them is used again.
        let free = SOCK + count as RawFd;
        let high = |fd: RawFd| {
            rustix::io::fcntl_dupfd_cloexec(borrowed(fd), free).map(IntoRawFd::into_raw_fd)
        };
        self.sock = high(self.sock)?;
        for at in 0..self.count {
            if (0..free).contains(&self.fds[at]) {
                self.fds[at] = high(self.fds[at])?;
            }
        }
        for (number, at) in (SOCK..).zip(first..end) {
            // SAFETY: what had the number has just left it, or (the procfs) is not needed again.
            unsafe { call::duplicate_to(borrowed(self.fds[at]), number, false)? };
        }
        self.preserved = count as u32;
        Ok(())
    }

    /// Sets the capabilities.
    ///
    /// The permitted set has no effect on the program: execve computes its sets from the bounding,
    /// inheritable and ambient ones. Therefore CAP_SYS_ADMIN (of this user namespace) can stay
    /// until then, and the filter can be loaded last even without no_new_privs.
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
        // A process cannot give capabilities that it does not have.
        let permitted = (permitted | ambient) & now.permitted;
        let effective = effective & permitted;
        let inheritable = inheritable & now.permitted;
        let ambient = ambient & permitted & inheritable;
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

    /// Maps a restore program, passes it the numbers of its descriptors, and jumps into it. Returns
    /// the error if that fails.
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
                close(self.sock);
                // SAFETY: the engine has laid code out there for this very purpose.
                unsafe { call::follow(code, start) }
            }
            Err(errno) => errno,
        }
    }

    /// Executes the program. Returns the error if that fails; among several candidates, as in a
    /// shell, one that may not be executed takes precedence over one that does not exist.
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
        let mut error = Errno::NOENT;
        while !rest.is_empty() {
            let at = op.text as usize + op.text_len as usize - rest.len();
            let Ok(path) = plan.text_at(at as u64) else { return Errno::BADMSG };
            // SAFETY: `relocate` has checked that every entry points to a text of the plan, and
            // that the tables end with null.
            match unsafe { call::execve(path, argv, envp) } {
                Errno::NOENT | Errno::NOTDIR => {}
                Errno::ACCESS => error = Errno::ACCESS,
                other => return other,
            }
            rest = rest.get(path.count_bytes() + 1..).unwrap_or_default();
        }
        error
    }
}

/// Requests a label of the host's security module at execve (proc_pid_attr(5)): AppArmor's own file
/// if there is one, otherwise the one that all modules share.
fn label(label: &CStr) -> Outcome {
    let open = |path: &CStr| {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        rustix::fs::openat(borrowed(PROC), path, flags, Mode::empty())
    };
    let file = match open(c"self/attr/apparmor/exec") {
        Err(Errno::NOENT) => open(c"self/attr/exec")?,
        file => file?,
    };
    rustix::io::write(&file, label.to_bytes()).map(drop)
}

/// Checks that one of the candidates is executable, with the choice of `exec`.
fn lookup(plan: &Flat<'_>, op: &Record) -> Outcome {
    let mut rest = plan.data(op).map_err(damaged)?;
    let mut error = Errno::NOENT;
    while !rest.is_empty() {
        let at = op.text as usize + op.text_len as usize - rest.len();
        let path = plan.text_at(at as u64).map_err(damaged)?;
        match rustix::fs::stat(path) {
            Err(Errno::NOENT | Errno::NOTDIR) => {}
            Err(e) => error = e,
            Ok(stat) => {
                let is_dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
                if !is_dir && rustix::fs::access(path, Access::EXEC_OK).is_ok() {
                    return Ok(());
                }
                error = Errno::ACCESS;
            }
        }
        rest = rest.get(path.count_bytes() + 1..).unwrap_or_default();
    }
    Err(error)
}

/// Loads a filter with a user-notification listener. A process outside the container fetches the
/// listener's descriptor from this process, by the number in the shared page (`launch::Listener`),
/// and then sets a flag in that page.
///
/// The filter may notify for any system call, so none is made: the thread busy-waits, for a bounded
/// time.
fn load_with_listener(program: &[Instruction], flags: u32, page: BorrowedFd<'_>) -> Outcome<RawFd> {
    use std::sync::atomic::{AtomicI32, Ordering};
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses.
    let at =
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, access, MapFlags::SHARED, page, 0)? };
    // SAFETY: the mapping is a page long, aligned, and never unmapped; other processes that map it
    // use atomic accesses, too.
    let words = unsafe { std::slice::from_raw_parts(at.cast::<AtomicI32>(), 2) };
    let listener = kernel::load_filter_with(program, flags | kernel::FILTER_NEW_LISTENER)?;
    words[0].store(listener + 1, Ordering::Release);
    for _ in 0..20_000_000_000_u64 {
        if words[1].load(Ordering::Acquire) != 0 {
            break;
        }
        std::hint::spin_loop();
    }
    Ok(listener)
}

/// The filter of an operation.
fn instructions<'p>(plan: &'p Flat<'_>, op: &Record) -> Outcome<&'p [Instruction]> {
    let data = plan.data(op).map_err(damaged)?;
    // SAFETY: an instruction is 8 bytes of plain numbers, any of which are valid.
    let (before, program, after) = unsafe { data.align_to::<Instruction>() };
    let whole = before.is_empty() && after.is_empty() && program.len() as u64 == op.a;
    if whole { Ok(program) } else { Err(Errno::BADMSG) }
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
    hide()
}
