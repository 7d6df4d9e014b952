//! The first instructions of `dormouse`: they hand a command over to a *runner*, a process that is ready to execute it.
//!
//! The kernel starts the program at `dormouse_entry`. If the command is one that a runner may execute, and the instance
//! has a socket for such commands, the words, the environment and the standard streams are sent there, and this process
//! only forwards signals and exits as the runner says. Otherwise the C library's `_start` goes on as if nothing had
//! happened. A process that goes on there has 0.6 ms to go before `main`, and page faults of as much again behind it.
//!
//! # Rules of this crate
//!
//! The C library has not started: there is no thread-local storage, no allocator, and its string functions have no
//! addresses yet (IFUNC). So nothing here may call them, and the compiler must not do so by itself: `no_builtins`, no
//! comparison or copy of slices, no array with an initial value. `tests/runner.rs` looks for such calls in the
//! program. The kernel interface is that of x86-64.
//!
//! # Protocol
//!
//! `RUN/command.sock` is a SOCK_SEQPACKET socket of the keeper, mode 0600, which exists where `[keeper] runners` is not
//! 0. The client sends one message: [`Head`], and the texts that the kernel has put above its stack, words and then
//! environment, each with its 0. Descriptors: the standard streams, the working directory, and the read end of a pipe
//! to which nothing is written. The keeper gives the connection to a runner, which sends messages of four bytes
//! ([`Answer`]):
//!
//! - [`Answer::TAKEN`]: the runner begins. Descriptor: its pidfd, which signals are sent to from here on.
//! - [`Answer::ENDED`]: the second byte is the exit code.
//!
//! A connection that ends before [`Answer::TAKEN`] means that nothing was done, and the client goes on by itself. One
//! that ends behind it means that the runner was killed, as by a signal that was forwarded: then the client ends by
//! that signal. The runner is killed by the kernel when the client's end of the pipe is closed (`F_SETSIG`, fcntl(2)):
//! a command that is killed stops, in either process. The socket would not do for that, as the message of the client
//! may cause an event after the runner has received it.
#![no_std]
#![no_builtins]

use core::arch::{asm, global_asm};
use core::mem::MaybeUninit;

/// Name of the socket in the runtime directory.
pub const SOCKET: &str = "command.sock";
/// LIMIT: bytes of words and environment that are handed over.
pub const TEXTS_MAX_BYTES: usize = 128 << 10;
/// Descriptors of a command: the standard streams, the working directory, and the pipe.
pub const DESCRIPTORS: usize = 5;

/// The verbs that are handed over: those that programs call often, and that end soon or use the streams as they are.
const VERBS: [&str; 8] = ["run", "exec", "create", "start", "stop", "kill", "rm", "inspect"];

/// The first bytes of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Head {
    /// [`Head::MAGIC`].
    pub magic: u32,
    /// Number of words.
    pub words: u32,
    /// The umask of the client.
    pub umask: u32,
    /// The signals that the client ignores, as bits ([`bit`]).
    pub ignored: u32,
    /// Bytes of the texts.
    pub bytes: u32,
}

impl Head {
    /// "DMC1".
    pub const MAGIC: u32 = u32::from_ne_bytes(*b"DMC1");
    /// Its bytes.
    pub const BYTES: usize = size_of::<Self>();

    /// Reads the head of a command.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        let field = |at: usize| {
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let (words, umask, ignored, bytes) = (field(4), field(8), field(12), field(16));
        Self { magic: field(0), words, umask, ignored, bytes }
    }
}

/// A message to the client: its kind, and a code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer;

impl Answer {
    /// The runner begins. Descriptor: its pidfd.
    pub const TAKEN: [u8; 4] = *b"t\0\0\0";
    /// First byte: the command has ended with the code in the second byte.
    pub const ENDED: u8 = b'e';

    /// The command has ended.
    pub const fn ended(code: u8) -> [u8; 4] {
        [Self::ENDED, code, 0, 0]
    }
}

// The stack is as the kernel has made it (System V ABI, "Initial Stack and Register State"): the number of words, their
// addresses, 0, those of the environment, 0. `_start` finds it again, and rdx as well.
global_asm!(
    ".globl dormouse_entry",
    ".type dormouse_entry, @function",
    "dormouse_entry:",
    "mov rbx, rsp",
    "mov r12, rdx",
    "mov rdi, rsp",
    "and rsp, -16",
    "call {hand_over}",
    "mov rsp, rbx",
    "mov rdx, r12",
    "xor ebp, ebp",
    "jmp _start",
    ".size dormouse_entry, . - dormouse_entry",
    hand_over = sym hand_over,
);

/// Numbers of system calls.
mod number {
    pub(super) const READ: usize = 0;
    pub(super) const WRITE: usize = 1;
    pub(super) const CLOSE: usize = 3;
    pub(super) const RT_SIGACTION: usize = 13;
    pub(super) const RT_SIGPROCMASK: usize = 14;
    pub(super) const IOCTL: usize = 16;
    pub(super) const GETPID: usize = 39;
    pub(super) const SOCKET: usize = 41;
    pub(super) const CONNECT: usize = 42;
    pub(super) const SENDMSG: usize = 46;
    pub(super) const RECVMSG: usize = 47;
    pub(super) const GETSOCKOPT: usize = 55;
    pub(super) const KILL: usize = 62;
    pub(super) const UMASK: usize = 95;
    pub(super) const EXIT_GROUP: usize = 231;
    pub(super) const OPENAT: usize = 257;
    pub(super) const PPOLL: usize = 271;
    pub(super) const SIGNALFD4: usize = 289;
    pub(super) const PIPE2: usize = 293;
    pub(super) const PIDFD_SEND_SIGNAL: usize = 424;
}

const AF_UNIX: u16 = 1;
const SOCK_SEQPACKET_CLOEXEC: usize = 5 | O_CLOEXEC;
const SOL_SOCKET: usize = 1;
const SO_PEERCRED: usize = 17;
const SCM_RIGHTS: u32 = 1;
const MSG_NOSIGNAL: usize = 0x4000;
const MSG_CMSG_CLOEXEC: usize = 0x4000_0000;
const O_CLOEXEC: usize = 0o2_000_000;
const O_PATH_DIRECTORY: usize = 0o10_000_000 | 0o200_000;
const AT_FDCWD: usize = -100_isize as usize;
const TCGETS: usize = 0x5401;
const EINTR: isize = -4;
const EBADF: isize = -9;
const POLLIN: i16 = 1;
const SFD_NONBLOCK_CLOEXEC: usize = 0o4000 | O_CLOEXEC;
const SIG_BLOCK: usize = 0;
const SIG_SETMASK: usize = 2;
/// Exit code of a failure of this program.
const FAILED: usize = 125;
/// The umask of this program, as in `main`.
const OWN_UMASK: usize = 0o022;

/// The signals that are forwarded: HUP, INT, QUIT, USR1, USR2, TERM, CONT, WINCH.
pub const FORWARDED: [u32; 8] = [1, 2, 3, 10, 12, 15, 18, 28];

/// A signal in a set of them.
pub const fn bit(signal: u32) -> u32 {
    1 << (signal - 1)
}

/// All that are forwarded.
const fn forwarded() -> u64 {
    let (mut set, mut index) = (0, 0);
    while index < FORWARDED.len() {
        set |= bit(FORWARDED[index]);
        index += 1;
    }
    set as u64
}

/// Makes a system call.
///
/// # Safety
/// As the call of that number requires.
#[inline(always)]
unsafe fn call(number: usize, [a, b, c, d, e]: [usize; 5]) -> isize {
    let result;
    // SAFETY: the kernel changes rax, rcx and r11, and memory that the caller has named.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// A text of the kernel's, which ends with 0.
#[derive(Clone, Copy)]
struct Text(*const u8);

impl Text {
    fn at(self, index: usize) -> u8 {
        // SAFETY: callers read no byte behind one that is 0.
        unsafe { *self.0.add(index) }
    }

    fn length(self) -> usize {
        let mut length = 0;
        while self.at(length) != 0 {
            length += 1;
        }
        length
    }

    /// The rest of the text, if it begins so.
    fn behind(self, start: &str) -> Option<Self> {
        let mut index = 0;
        for byte in start.bytes() {
            if self.at(index) != byte {
                return None;
            }
            index += 1;
        }
        // SAFETY: within the text, or at its end.
        Some(Self(unsafe { self.0.add(index) }))
    }

    fn is(self, text: &str) -> bool {
        self.behind(text).is_some_and(|rest| rest.at(0) == 0)
    }
}

/// The table of words and environment.
#[derive(Clone, Copy)]
struct Table {
    words: *const *const u8,
    count: usize,
}

impl Table {
    fn word(self, index: usize) -> Option<Text> {
        // SAFETY: the kernel has put so many pointers there.
        (index < self.count).then(|| Text(unsafe { *self.words.add(index) }))
    }

    /// The variable with this number.
    fn variable(self, index: usize) -> Option<Text> {
        // SAFETY: the environment follows the 0 behind the words, and ends with 0; callers stop there.
        let text = unsafe { *self.words.add(self.count + 1 + index) };
        (!text.is_null()).then_some(Text(text))
    }

    /// The directory after `--root`, if there is one, for a command that a runner may execute.
    fn root(self) -> Option<Option<Text>> {
        let mut root = None;
        let mut index = 1;
        loop {
            let word = self.word(index)?;
            let dir = match word.behind("--root=") {
                Some(dir) => dir,
                None if word.is("--root") => {
                    index += 1;
                    self.word(index)?
                }
                None => {
                    return VERBS.iter().any(|verb| word.is(verb)).then_some(root);
                }
            };
            if root.is_some() || dir.at(0) == 0 || dir.at(0) == b'-' {
                return None;
            }
            root = Some(dir);
            index += 1;
        }
    }

    /// The texts of words and environment, which the kernel has put one behind the other. Variables of the tests keep
    /// the command in this process.
    fn texts(self) -> Option<Part> {
        let start = self.word(0)?.0;
        let mut end = start;
        let mut next = |text: Text| {
            let length = text.length() + 1;
            let is_next = text.0 == end;
            // SAFETY: the byte behind the text, or the end of its memory.
            end = unsafe { end.add(length) };
            is_next
        };
        let mut index = 0;
        while let Some(word) = self.word(index) {
            if !next(word) {
                return None;
            }
            index += 1;
        }
        index = 0;
        while let Some(variable) = self.variable(index) {
            if variable.behind("DORMOUSE_").is_some() || !next(variable) {
                return None;
            }
            index += 1;
        }
        let length = end as usize - start as usize;
        (length <= TEXTS_MAX_BYTES).then_some(Part { start: start as usize, length })
    }
}

/// A part of a message (struct iovec).
#[repr(C)]
struct Part {
    start: usize,
    length: usize,
}

/// struct msghdr
#[repr(C)]
struct Message {
    name: usize,
    name_length: usize,
    parts: usize,
    part_count: usize,
    control: usize,
    control_length: usize,
    flags: usize,
}

/// A control message (struct cmsghdr) with descriptors.
#[repr(C)]
struct Control<const N: usize> {
    length: usize,
    level: u32,
    kind: u32,
    fds: [i32; N],
}

/// struct sockaddr_un
#[repr(C)]
struct Address {
    family: u16,
    path: [MaybeUninit<u8>; 108],
}

/// struct pollfd
#[repr(C)]
struct Polled {
    fd: i32,
    events: i16,
    returned: i16,
}

/// A connection to the keeper, and what was changed in this process for it.
struct Connection {
    socket: usize,
    cwd: usize,
    /// Read end and write end.
    pipe: [u32; 2],
    mask: u64,
    umask: usize,
    ignored: u32,
}

/// What receives signals, once a runner has the command.
#[derive(Clone, Copy)]
struct Runner {
    pidfd: usize,
    signals: usize,
}

/// Hands the command over, and exits; or returns, and has changed nothing.
extern "C" fn hand_over(table: *const usize) {
    // SAFETY: the kernel's table, see above.
    let table = Table { words: unsafe { table.add(1) }.cast(), count: unsafe { *table } };
    let Some(root) = table.root() else { return };
    let Some(texts) = table.texts() else { return };
    if !streams_are_usual() {
        return;
    }
    let Some(socket) = connect(root) else { return };
    let Some(connection) = Connection::prepare(socket) else { return };
    let words = table.count as u32;
    if connection.send(words, texts) {
        connection.follow();
    }
    connection.give_up();
}

/// Returns whether all standard streams are open and none is a terminal: a terminal belongs to the session of this
/// process.
fn streams_are_usual() -> bool {
    let mut settings = MaybeUninit::<[u8; 64]>::uninit();
    let mut fd = 0;
    while fd < 3 {
        // SAFETY: the kernel writes struct termios, which is shorter.
        let got =
            unsafe { call(number::IOCTL, [fd, TCGETS, settings.as_mut_ptr() as usize, 0, 0]) };
        if got == 0 || got == EBADF {
            return false;
        }
        fd += 1;
    }
    true
}

/// Connects to the keeper of an instance. `None` if it takes no commands.
fn connect(root: Option<Text>) -> Option<usize> {
    let mut address = Address { family: AF_UNIX, path: [MaybeUninit::uninit(); 108] };
    let mut length = 0;
    let mut put = |byte: u8| match address.path.get_mut(length) {
        Some(place) => {
            place.write(byte);
            length += 1;
            true
        }
        None => false,
    };
    let is_whole = match root {
        Some(root) => {
            let mut index = 0;
            while root.at(index) != 0 && put(root.at(index)) {
                index += 1;
            }
            root.at(index) == 0 && "/run/".bytes().all(&mut put)
        }
        None => "/run/dormouse/".bytes().all(&mut put),
    };
    if !(is_whole && SOCKET.bytes().all(&mut put) && put(0)) {
        return None;
    }
    // SAFETY: no memory is passed.
    let socket =
        unsafe { call(number::SOCKET, [usize::from(AF_UNIX), SOCK_SEQPACKET_CLOEXEC, 0, 0, 0]) };
    let socket = usize::try_from(socket).ok()?;
    // SAFETY: so many bytes of the address are written.
    let connected =
        unsafe { call(number::CONNECT, [socket, &raw const address as usize, 2 + length, 0, 0]) };
    if connected != 0 {
        close(socket);
        return None;
    }
    let mut peer = MaybeUninit::<[u32; 3]>::uninit(); // struct ucred: pid, uid, gid
    let mut size = 12_u32;
    let (peer_at, size_at) = (peer.as_mut_ptr() as usize, &raw mut size as usize);
    // SAFETY: the kernel writes at most so many bytes, and their number.
    let known =
        unsafe { call(number::GETSOCKOPT, [socket, SOL_SOCKET, SO_PEERCRED, peer_at, size_at]) };
    // SAFETY: the kernel has written it, or it is not read.
    if known == 0 && size == 12 && unsafe { peer.assume_init() }[1] == 0 {
        return Some(socket);
    }
    close(socket);
    None
}

/// The forwarded signals that this process ignores.
fn ignored() -> u32 {
    let mut set = 0;
    let mut action = MaybeUninit::<[usize; 4]>::uninit(); // the kernel's struct sigaction
    for signal in FORWARDED {
        let action_at = action.as_mut_ptr() as usize;
        // SAFETY: the kernel writes 32 bytes.
        let got = unsafe { call(number::RT_SIGACTION, [signal as usize, 0, action_at, 8, 0]) };
        // SAFETY: written by the kernel. Its first field is the handler: 1 is SIG_IGN.
        if got == 0 && unsafe { *action.as_ptr().cast::<usize>() } == 1 {
            set |= bit(signal);
        }
    }
    set
}

fn close(fd: usize) {
    // SAFETY: a descriptor of this crate, which is not used any more.
    unsafe { call(number::CLOSE, [fd, 0, 0, 0, 0]) };
}

impl Connection {
    /// Opens what is sent.
    fn prepare(socket: usize) -> Option<Self> {
        let (here, flags) = (c".".as_ptr() as usize, O_PATH_DIRECTORY | O_CLOEXEC);
        // SAFETY: a text that ends with 0.
        let cwd = unsafe { call(number::OPENAT, [AT_FDCWD, here, flags, 0, 0]) };
        let Ok(cwd) = usize::try_from(cwd) else {
            close(socket);
            return None;
        };
        let mut pipe = MaybeUninit::<[u32; 2]>::uninit();
        // SAFETY: the kernel writes two descriptors.
        let made = unsafe { call(number::PIPE2, [pipe.as_mut_ptr() as usize, O_CLOEXEC, 0, 0, 0]) };
        if made != 0 {
            close(socket);
            close(cwd);
            return None;
        }
        // SAFETY: the kernel has written them.
        let pipe = unsafe { pipe.assume_init() };
        let mut mask = 0_u64;
        // SAFETY: a set of 8 bytes.
        unsafe { call(number::RT_SIGPROCMASK, [SIG_BLOCK, 0, &raw mut mask as usize, 8, 0]) };
        // SAFETY: no memory is passed.
        let umask = unsafe { call(number::UMASK, [OWN_UMASK, 0, 0, 0, 0]) } as usize;
        let this = Self { socket, cwd, pipe, mask, umask, ignored: ignored() };
        // A signal that is blocked from the start would never arrive.
        if mask & forwarded() != 0 {
            this.give_up();
            return None;
        }
        Some(this)
    }

    /// Puts everything back.
    fn give_up(&self) {
        // SAFETY: no memory is passed.
        unsafe { call(number::UMASK, [self.umask, 0, 0, 0, 0]) };
        for fd in [self.socket, self.cwd, self.pipe[0] as usize, self.pipe[1] as usize] {
            close(fd);
        }
    }

    /// A runner has begun: signals are for it. `None` if they cannot be received.
    fn receive_signals(&self, pidfd: usize) -> Option<Runner> {
        let set = forwarded();
        let set_at = &raw const set as usize;
        // SAFETY: a set of 8 bytes.
        unsafe { call(number::RT_SIGPROCMASK, [SIG_BLOCK, set_at, 0, 8, 0]) };
        // SAFETY: a set of 8 bytes.
        let signals =
            unsafe { call(number::SIGNALFD4, [usize::MAX, set_at, 8, SFD_NONBLOCK_CLOEXEC, 0]) };
        usize::try_from(signals).ok().map(|signals| Runner { pidfd, signals })
    }

    /// Permits the signals again that were not blocked before.
    fn unblock(&self) {
        let mask_at = &raw const self.mask as usize;
        // SAFETY: a set of 8 bytes.
        unsafe { call(number::RT_SIGPROCMASK, [SIG_SETMASK, mask_at, 0, 8, 0]) };
    }

    /// Sends the command.
    fn send(&self, words: u32, texts: Part) -> bool {
        let (umask, bytes) = (self.umask as u32, texts.length as u32);
        let head = Head { magic: Head::MAGIC, words, umask, ignored: self.ignored, bytes };
        let length = texts.length + Head::BYTES;
        let parts = [Part { start: &raw const head as usize, length: Head::BYTES }, texts];
        let fds = [0, 1, 2, self.cwd as i32, self.pipe[0] as i32, 0];
        // The sixth is padding.
        let control = Control { length: 36, level: SOL_SOCKET as u32, kind: SCM_RIGHTS, fds };
        let message = Message {
            name: 0,
            name_length: 0,
            parts: &raw const parts as usize,
            part_count: 2,
            control: &raw const control as usize,
            control_length: 40,
            flags: 0,
        };
        let message_at = &raw const message as usize;
        // SAFETY: the parts of the message live until the call returns.
        let sent = unsafe { call(number::SENDMSG, [self.socket, message_at, MSG_NOSIGNAL, 0, 0]) };
        sent == length as isize
    }

    /// Forwards signals, and exits as the runner says. Returns if no runner has begun.
    fn follow(&self) {
        let mut runner: Option<Runner> = None;
        let mut deadly = 0;
        loop {
            let signals = runner.map_or(-1, |runner| runner.signals as i32);
            let mut polled = [
                Polled { fd: self.socket as i32, events: POLLIN, returned: 0 },
                Polled { fd: signals, events: POLLIN, returned: 0 },
            ];
            // SAFETY: two entries.
            unsafe { call(number::PPOLL, [&raw mut polled as usize, 2, 0, 0, 8]) };
            if polled[0].returned != 0 {
                match (self.receive(), runner) {
                    (Received::Taken(pidfd), _) => match self.receive_signals(pidfd) {
                        Some(it) => runner = Some(it),
                        None => exit(FAILED), // the runner ends with this process
                    },
                    (Received::Ended(code), _) => exit(usize::from(code)),
                    (Received::Nothing, _) => {}
                    (Received::Closed, None) => return,
                    (Received::Closed, Some(runner)) => self.end_as_killed(runner, deadly),
                }
            } else if let (Some(runner), true) = (runner, polled[1].returned != 0) {
                deadly = runner.forward().unwrap_or(deadly);
            }
        }
    }

    fn receive(&self) -> Received {
        let mut bytes = [0_u8; 4];
        let part = Part { start: &raw mut bytes as usize, length: 4 };
        let mut control = Control { length: 0, level: 0, kind: 0, fds: [-1, 0] };
        let mut message = Message {
            name: 0,
            name_length: 0,
            parts: &raw const part as usize,
            part_count: 1,
            control: &raw mut control as usize,
            control_length: 24,
            flags: 0,
        };
        let message_at = &raw mut message as usize;
        // SAFETY: the kernel writes into the parts of the message, which live until the call returns.
        let got =
            unsafe { call(number::RECVMSG, [self.socket, message_at, MSG_CMSG_CLOEXEC, 0, 0]) };
        // SAFETY: written by the kernel.
        let (bytes, control) =
            unsafe { ((&raw const bytes).read_volatile(), (&raw const control).read_volatile()) };
        match (got, bytes[0]) {
            (EINTR, _) => Received::Nothing,
            (4, kind)
                if kind == Answer::TAKEN[0] && control.length >= 20 && control.fds[0] >= 0 =>
            {
                Received::Taken(control.fds[0] as usize)
            }
            (4, Answer::ENDED) => Received::Ended(bytes[1]),
            _ => Received::Closed,
        }
    }

    /// The runner was killed: by the last signal with that effect, if one was forwarded.
    fn end_as_killed(&self, runner: Runner, signal: usize) -> ! {
        // ORDER: what it has held is free when this process ends, as if the command had been executed here.
        let mut polled = Polled { fd: runner.pidfd as i32, events: POLLIN, returned: 0 };
        // SAFETY: one entry.
        while unsafe { call(number::PPOLL, [&raw mut polled as usize, 1, 0, 0, 8]) } == EINTR {}
        if signal != 0 {
            self.unblock();
            // SAFETY: no memory is passed.
            unsafe {
                let own = call(number::GETPID, [0; 5]);
                call(number::KILL, [own as usize, signal, 0, 0, 0]);
            }
        }
        let text = "dormouse: the process that executed this command was killed; repeat it\n";
        // SAFETY: so many bytes.
        unsafe { call(number::WRITE, [2, text.as_ptr() as usize, text.len(), 0, 0]) };
        exit(FAILED)
    }
}

impl Runner {
    /// Forwards a signal. Returns its number, if a process without a handler dies of it.
    fn forward(self) -> Option<usize> {
        const CONT: usize = 18;
        const WINCH: usize = 28;
        let mut info = MaybeUninit::<[u32; 32]>::uninit(); // struct signalfd_siginfo
        let info_at = info.as_mut_ptr() as usize;
        // SAFETY: the kernel writes 128 bytes.
        let got = unsafe { call(number::READ, [self.signals, info_at, 128, 0, 0]) };
        if got != 128 {
            return None;
        }
        // SAFETY: the kernel has written it.
        let signal = unsafe { *info.as_ptr().cast::<u32>() } as usize;
        // SAFETY: no memory is passed.
        let sent = unsafe { call(number::PIDFD_SEND_SIGNAL, [self.pidfd, signal, 0, 0, 0]) };
        (sent == 0 && signal != CONT && signal != WINCH).then_some(signal)
    }
}

/// A message from the runner.
enum Received {
    Taken(usize),
    Ended(u8),
    Nothing,
    Closed,
}

fn exit(code: usize) -> ! {
    loop {
        // SAFETY: no memory is passed.
        unsafe { call(number::EXIT_GROUP, [code, 0, 0, 0, 0]) };
    }
}
