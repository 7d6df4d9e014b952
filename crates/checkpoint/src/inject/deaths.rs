//! Tracers that end before each of their requests in turn, and programs that must not notice.
//!
//! Program and tracer are children by fork(2). The program enters a state, and checks afterwards that it continues as
//! if nothing had been. The tracer stops it, injects calls and detaches, or ends before, and the kernel detaches it.

use std::arch::global_asm;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU8, AtomicU32};
use std::time::{Duration, Instant};

use dormouse_kernel::Errno;
use dormouse_kernel::call::{self, Registers, Stop, TraceOptions};

use super::landing::Ground;
use super::remote::{EVENT_STOP, Remote};
use super::script::{Arg, Script};

/// The number of requests until the end of this process; negative if it does not end.
static LEFT: AtomicI64 = AtomicI64::new(-1);

/// The number of requests until a long pause; negative without one.
static PAUSE: AtomicI64 = AtomicI64::new(-1);

const SHORT: Duration = Duration::from_millis(20);

const ENDED: i32 = 9;
const HAS_GONE_ON: i32 = 8;
const FAILED: i32 = 7;

/// A request to the kernel about a tracee follows.
pub(super) fn point() {
    match LEFT.load(SeqCst) {
        // SAFETY: it ends this process.
        0 => unsafe { libc::_exit(ENDED) },
        1.. => drop(LEFT.fetch_sub(1, SeqCst)),
        _ => {}
    }
    match PAUSE.load(SeqCst) {
        0 => {
            PAUSE.store(-1, SeqCst);
            std::thread::sleep(SHORT * 5);
        }
        1.. => drop(PAUSE.fetch_sub(1, SeqCst)),
        _ => {}
    }
}

/// How long a script waits for its tracer.
pub(super) fn waits() -> Option<Duration> {
    let is_one = LEFT.load(SeqCst) >= 0 || PAUSE.load(SeqCst) >= 0;
    is_one.then_some(SHORT)
}

/// Tracers use no slot.
static UNPROTECTED: AtomicU32 = AtomicU32::new(0);

/// Whether calls are injected as where there is no place for a slot.
pub(super) fn is_unprotected() -> bool {
    UNPROTECTED.load(SeqCst) == 1
}

/// Memory that all processes of a test share.
#[derive(Debug, Default)]
struct Shared {
    /// The program has entered its state.
    is_ready: AtomicU32,
    /// The program may leave its state.
    may_go: AtomicU32,
    /// Runs of the signal handler.
    handled: AtomicU32,
    /// The signal was sent.
    is_sent: AtomicU32,
    /// The program has left its state; its result.
    is_done: AtomicU32,
    result: AtomicI32,
    may_end: AtomicU32,
    /// Errors of a system call in a signal handler.
    inner: AtomicI32,
}

static SHARED: std::sync::atomic::AtomicPtr<Shared> =
    std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());

fn shared() -> &'static Shared {
    // SAFETY: only children read it, which have set it to a mapping that stays.
    unsafe { &*SHARED.load(SeqCst) }
}

impl Shared {
    fn map() -> &'static Self {
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: it maps new memory, of zeros, which is never unmapped.
        unsafe {
            let mapped = libc::mmap(std::ptr::null_mut(), 4096, access, kind, -1, 0);
            assert_ne!(mapped, libc::MAP_FAILED);
            &*mapped.cast()
        }
    }
}

/// A state of a program. Results are 0, or say what is wrong.
#[derive(Clone, Copy)]
struct State {
    /// Enters the state and leaves it; `pipe` is the reading end of a pipe.
    enter: fn(pipe: i32) -> i32,
    /// The call that it waits in.
    call: Option<i64>,
    /// A signal that arrives while the program is stopped.
    signal: Option<i32>,
    /// Leaves by a byte in the pipe.
    by_pipe: bool,
    /// The tracer uses no slot.
    is_unprotected: bool,
}

static HOUR: libc::timespec = libc::timespec { tv_sec: 3600, tv_nsec: 0 };

/// The signals that the programs block.
static MASK: u64 = 1 << (libc::SIGUSR2 - 1) | 1 << (libc::SIGALRM - 1);

fn mask() -> u64 {
    let mut mask = 0u64;
    // SAFETY: it writes the mask to a number of that length.
    unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, 0, 0usize, &raw mut mask, 8);
    }
    mask
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

extern "C" fn count(_: i32) {
    shared().handled.fetch_add(1, SeqCst);
}

fn handle(signal: i32, flags: i32, handler: extern "C" fn(i32)) {
    // SAFETY: the handler only changes atomic numbers and makes system calls.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = flags;
        assert_eq!(libc::sigaction(signal, &raw const action, std::ptr::null_mut()), 0);
    }
}

fn sleeps(_: i32) -> i32 {
    let time = libc::timespec { tv_sec: 0, tv_nsec: 60_000_000 };
    let began = Instant::now();
    // SAFETY: it reads a timespec.
    let slept = unsafe {
        libc::clock_nanosleep(libc::CLOCK_MONOTONIC, 0, &raw const time, std::ptr::null_mut())
    };
    match slept {
        0 if began.elapsed() >= Duration::from_millis(60) => 0,
        0 => 100,
        error => error,
    }
}

fn reads(pipe: i32) -> i32 {
    let mut byte = 0u8;
    // SAFETY: it reads one byte into a byte.
    match unsafe { libc::read(pipe, (&raw mut byte).cast(), 1) } {
        1 if byte == b'x' => 0,
        1 => 100,
        _ => errno(),
    }
}

fn polls(pipe: i32) -> i32 {
    let mut polled = libc::pollfd { fd: pipe, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd.
    match unsafe { libc::poll(&raw mut polled, 1, 3_600_000) } {
        1 => reads(pipe),
        0 => 100,
        _ => errno(),
    }
}

fn waits_by_epoll(pipe: i32) -> i32 {
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 7 };
    // SAFETY: one event. A tracer that ends while it stops the program makes this call fail with EINTR (signal(7)).
    unsafe {
        let epoll = libc::epoll_create1(0);
        libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, pipe, &raw mut event);
        let mut found = libc::epoll_event { events: 0, u64: 0 };
        loop {
            match libc::epoll_wait(epoll, &raw mut found, 1, -1) {
                1 if found.u64 == 7 => return reads(pipe),
                -1 if errno() == libc::EINTR => {}
                -1 => return errno(),
                _ => return 100,
            }
        }
    }
}

fn waits_by_futex(_: i32) -> i32 {
    // SAFETY: a word that stays, and a timespec.
    let waited = unsafe {
        libc::syscall(
            libc::SYS_futex,
            shared().may_go.as_ptr(),
            libc::FUTEX_WAIT,
            0,
            &raw const HOUR,
            0,
            0,
        )
    };
    if waited == 0 || errno() == libc::EAGAIN { 0 } else { errno() }
}

/// A call must have failed with EINTR, by one run of a handler.
fn was_interrupted(returned: i32, errno: i32) -> i32 {
    match (returned, errno, shared().handled.load(SeqCst)) {
        (-1, libc::EINTR, 1) => 0,
        (-1, libc::EINTR, runs) => 100 + runs as i32,
        (returned, errno, _) => {
            if errno == 0 {
                200 + returned
            } else {
                errno
            }
        }
    }
}

fn pauses(_: i32) -> i32 {
    handle(libc::SIGUSR1, libc::SA_RESTART, count);
    // SAFETY: it has no arguments.
    let returned = unsafe { libc::pause() };
    was_interrupted(returned, errno())
}

fn sleeps_long(_: i32) -> i32 {
    handle(libc::SIGUSR1, 0, count);
    // SAFETY: it reads a timespec.
    let error = unsafe {
        libc::clock_nanosleep(libc::CLOCK_MONOTONIC, 0, &raw const HOUR, std::ptr::null_mut())
    };
    was_interrupted(if error == 0 { 0 } else { -1 }, error)
}

/// The signal of the handler is only unblocked inside the call.
fn suspends(_: i32) -> i32 {
    handle(libc::SIGUSR2, 0, count);
    let inside = 0u64;
    // SAFETY: it reads a mask.
    let returned = unsafe { libc::syscall(libc::SYS_rt_sigsuspend, &raw const inside, 8) } as i32;
    was_interrupted(returned, errno())
}

fn reads_and_handles(pipe: i32) -> i32 {
    handle(libc::SIGUSR1, libc::SA_RESTART, count);
    match (reads(pipe), shared().handled.load(SeqCst)) {
        (0, 1) => 0,
        (0, runs) => 100 + runs as i32,
        (error, _) => error,
    }
}

/// Where the outer handler has a local variable.
static OUTER: AtomicI64 = AtomicI64::new(0);
static PIPE: AtomicI32 = AtomicI32::new(0);

extern "C" fn inner(_: i32) {
    let local = std::hint::black_box([0u64; 32]);
    let below = OUTER.load(SeqCst) - (&raw const local) as i64;
    // On the same stack, further down.
    let is_below = (0..64 << 10).contains(&below);
    shared().inner.store(if is_below { 0 } else { 110 }, SeqCst);
    shared().handled.fetch_add(1, SeqCst);
}

extern "C" fn outer(_: i32) {
    let local = std::hint::black_box([0x5a5a_5a5a_u64; 512]);
    OUTER.store((&raw const local) as i64, SeqCst);
    let read = reads(PIPE.load(SeqCst));
    let is_same = std::hint::black_box(&local).iter().all(|word| *word == 0x5a5a_5a5a);
    let inner = shared().inner.load(SeqCst);
    let result = if is_same { read } else { 111 };
    shared().inner.store(if inner == 0 { result } else { inner }, SeqCst);
}

/// Inside a handler on an alternate stack, another one arrives.
fn reads_on_alternate_stack(pipe: i32) -> i32 {
    PIPE.store(pipe, SeqCst);
    let (access, kind) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: the stack is new memory, and the handlers are simple.
    unsafe {
        let memory = libc::mmap(std::ptr::null_mut(), 128 << 10, access, kind, -1, 0);
        let stack = libc::stack_t { ss_sp: memory, ss_flags: 0, ss_size: 128 << 10 };
        libc::sigaltstack(&raw const stack, std::ptr::null_mut());
        handle(libc::SIGHUP, libc::SA_ONSTACK, outer);
        handle(libc::SIGUSR1, libc::SA_ONSTACK | libc::SA_RESTART, inner);
        libc::raise(libc::SIGHUP);
    }
    match (shared().inner.load(SeqCst), shared().handled.load(SeqCst)) {
        (0, 1) => 0,
        (0, runs) => 100 + runs as i32,
        (error, _) => error,
    }
}

/// The selector of a dispatch of system calls, and the calls that were reported.
static SELECTOR: AtomicU8 = AtomicU8::new(0);
static REPORTED: AtomicU32 = AtomicU32::new(0);

extern "C" fn report(_: i32) {
    REPORTED.fetch_add(1, SeqCst);
}

/// Does `work` with its system calls reported that are made outside this program (PR_SET_SYSCALL_USER_DISPATCH).
fn dispatches(has_selector: bool, work: fn(i32) -> i32, pipe: i32) -> i32 {
    const SET_DISPATCH: i32 = 59;
    unsafe extern "C" {
        static __executable_start: u8;
        static etext: u8;
    }
    const SYSCALL_AND_RETURN: [u8; 3] = [0x0f, 0x05, 0xc3];
    handle(libc::SIGSYS, 0, report);
    let (start, end) = (&raw const __executable_start as usize, &raw const etext as usize);
    let selector = if has_selector { SELECTOR.as_ptr() } else { std::ptr::null_mut() };
    // SAFETY: code of its own in new memory. Calls of this program are made as before.
    let outside = unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let page = libc::mmap(std::ptr::null_mut(), 4096, access, kind, -1, 0);
        page.cast::<[u8; 3]>().write(SYSCALL_AND_RETURN);
        if libc::prctl(SET_DISPATCH, 1, start, end - start, selector) != 0 {
            return errno();
        }
        page as usize
    };
    SELECTOR.store(1, SeqCst);
    let result = work(pipe);
    if result != 0 || REPORTED.load(SeqCst) != 0 || SELECTOR.load(SeqCst) != 1 {
        return if result != 0 { result } else { 130 };
    }
    // SAFETY: the call has no effect, whether it is made or not.
    unsafe {
        std::arch::asm!("call {}", in(reg) outside, inout("rax") libc::SYS_getpid => _,
            out("rcx") _, out("r11") _);
    }
    if REPORTED.load(SeqCst) == 1 { 0 } else { 131 }
}

fn reads_with_selector(pipe: i32) -> i32 {
    dispatches(true, reads, pipe)
}

fn reads_without_selector(pipe: i32) -> i32 {
    dispatches(false, reads, pipe)
}

fn computes_with_selector(pipe: i32) -> i32 {
    dispatches(true, computes, pipe)
}

fn computes_without_selector(pipe: i32) -> i32 {
    dispatches(false, computes, pipe)
}

fn handles_with_selector(pipe: i32) -> i32 {
    dispatches(true, reads_and_handles, pipe)
}

fn handles_without_selector(pipe: i32) -> i32 {
    dispatches(false, reads_and_handles, pipe)
}

global_asm!(
    ".pushsection .text.dormouse_deaths_busy, \"ax\"",
    ".globl dormouse_deaths_busy",
    ".hidden dormouse_deaths_busy",
    // From rdi (a word), until it is not 0. The result is 0, or a number that says what has changed.
    "dormouse_deaths_busy:",
    "push rbx",
    "push rbp",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    // The red zone.
    "mov rax, 0x1122334455667788",
    "mov qword ptr [rsp - 8], rax",
    "mov qword ptr [rsp - 64], rax",
    "mov qword ptr [rsp - 128], rax",
    "movq xmm0, rax",
    "movq xmm7, rax",
    "movq xmm15, rax",
    "mov rsi, 0x0101010101010101",
    "mov rbp, 0x0202020202020202",
    "mov r8, 0x0303030303030303",
    "mov r9, 0x0404040404040404",
    "mov r10, 0x0505050505050505",
    "mov r11, 0x0606060606060606",
    "mov r12, 0x0707070707070707",
    "mov r13, 0x0808080808080808",
    "mov r14, 0x0909090909090909",
    "mov r15, 0x0a0a0a0a0a0a0a0a",
    "mov rbx, 0",
    "mov rdx, 1",
    // Carry, parity and sign.
    "mov eax, 0xd500",
    "sahf",
    "mov rax, 0x0b0b0b0b0b0b0b0b",
    "2: lea rbx, [rbx + 1]",
    "lea rdx, [rdx + rdx * 4 + 1]",
    "mov ecx, dword ptr [rdi]",
    "jrcxz 2b",
    "mov rcx, rax",
    "lahf",
    "mov rdi, rax",
    "mov rax, 0x0b0b0b0b0b0b0b0b",
    "cmp rcx, rax",
    "mov eax, 1",
    "jne 9f",
    "mov eax, 2",
    "and edi, 0xd500",
    "cmp edi, 0xd500",
    "jne 9f",
    "mov rdi, 0x0101010101010101",
    "mov rcx, rdi",
    ".irp register, rsi, rbp, r8, r9, r10, r11, r12, r13, r14, r15",
    "mov eax, 3",
    "cmp \\register, rcx",
    "jne 9f",
    "add rcx, rdi",
    ".endr",
    "mov rdi, 0x1122334455667788",
    "mov eax, 4",
    "cmp qword ptr [rsp - 8], rdi",
    "jne 9f",
    "cmp qword ptr [rsp - 64], rdi",
    "jne 9f",
    "cmp qword ptr [rsp - 128], rdi",
    "jne 9f",
    "mov eax, 5",
    "movq rcx, xmm0",
    "cmp rcx, rdi",
    "jne 9f",
    "movq rcx, xmm7",
    "cmp rcx, rdi",
    "jne 9f",
    "movq rcx, xmm15",
    "cmp rcx, rdi",
    "jne 9f",
    // The same computation once more.
    "mov eax, 6",
    "mov rcx, 1",
    "3: lea rcx, [rcx + rcx * 4 + 1]",
    "dec rbx",
    "jnz 3b",
    "cmp rcx, rdx",
    "jne 9f",
    "mov eax, 0",
    "9: pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbp",
    "pop rbx",
    "ret",
    ".popsection",
);

unsafe extern "C" {
    fn dormouse_deaths_busy(until: *const u32) -> i32;
}

fn computes(_: i32) -> i32 {
    shared().is_ready.store(1, SeqCst);
    // SAFETY: the function keeps the registers that functions keep, and reads the word.
    unsafe { dormouse_deaths_busy(shared().may_go.as_ptr()) }
}

fn computes_and_handles(pipe: i32) -> i32 {
    handle(libc::SIGUSR1, 0, count);
    match (computes(pipe), shared().handled.load(SeqCst)) {
        (0, 1) => 0,
        (0, runs) => 100 + runs as i32,
        (error, _) => error,
    }
}

/// System calls without a pause.
fn calls(_: i32) -> i32 {
    shared().is_ready.store(1, SeqCst);
    // SAFETY: these have no arguments, or one that is read only.
    let own = unsafe { libc::getpid() };
    while shared().may_go.load(SeqCst) == 0 {
        // SAFETY: as above.
        if unsafe { libc::syscall(libc::SYS_getpid) } as i32 != own {
            return 100;
        }
    }
    0
}

fn child(work: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child runs `work` alone, and ends.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: a failed test leaves no process.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            // SAFETY: it ends this process.
            unsafe { libc::_exit(result.unwrap_or(99)) }
        }
        pid => pid,
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn exit_code(pid: i32) -> Option<i32> {
    let mut status = 0;
    // SAFETY: it writes a number.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
    (waited == pid).then(|| {
        if libc::WIFEXITED(status) {
            libc::WEXITSTATUS(status)
        } else {
            128 + libc::WTERMSIG(status)
        }
    })
}

fn waited(what: &str, pid: i32) -> i32 {
    let mut code = None;
    until(what, || {
        code = exit_code(pid);
        code.is_some()
    });
    code.unwrap()
}

/// What a program has: lines of its maps, and descriptors.
fn belongings(pid: i32) -> (usize, usize) {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().lines().count();
    (maps, std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count())
}

fn is_in(pid: i32, call: i64) -> bool {
    let text = std::fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap_or_default();
    text.split(' ').next().is_some_and(|number| number == call.to_string())
}

/// A call that fails with EINTR without a handler begins again, as a save makes it do.
fn again(registers: Registers) -> Registers {
    let is_spurious = registers.orig_rax == libc::SYS_epoll_wait as u64;
    let rax = registers.rax as i64;
    match is_spurious && rax == -i64::from(libc::EINTR) {
        true => Registers { rax: -514i64 as u64, ..registers },
        false => registers,
    }
}

/// Stops a program, injects calls and detaches.
fn trace(pid: u32, signal: Option<i32>) -> Result<(), Errno> {
    point();
    call::seize(pid, TraceOptions::SYSGOOD)?;
    point();
    call::interrupt(pid)?;
    loop {
        match call::wait_stop(Some(pid))?.1 {
            Stop::Event(EVENT_STOP, _) => break,
            Stop::Signal(signal) => call::resume(pid, signal)?,
            _ => call::resume(pid, 0)?,
        }
    }
    point();
    if let Some(signal) = signal
        && shared().is_sent.swap(1, SeqCst) == 0
    {
        // SAFETY: it sends a signal to a child of the test.
        unsafe { libc::kill(pid as i32, signal) };
    }
    for _ in 0..2 {
        let ground = Ground::in_object(pid).ok_or(Errno::NOEXEC)?;
        let before = ground.slots_in_use();
        let mut remote = Remote::begin_to_resume(pid, &ground, again)?;
        let mut script = Script::default();
        let own = script.call(libc::SYS_getpid, []);
        let room = script.room(32);
        script.call(libc::SYS_getitimer, [Arg::from(0), room.into()]);
        let answers = script.run(pid, &mut remote);
        let made = match &answers {
            Ok(_) => remote.descriptor(libc::SYS_eventfd2, [0, 0], |number| number).map(drop),
            Err(_) => Ok(()),
        };
        remote.give_back()?;
        made?;
        assert_eq!(answers?.returned(own), Ok(pid.into()));
        // The slot is free again.
        assert!(Ground::in_object(pid).is_some_and(|ground| ground.slots_in_use() <= before));
    }
    point();
    call::detach(pid, 0)
}

/// How a tracer has ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    BeforeAll,
    AfterAll,
    GoneOn,
}

/// A program in its state.
struct Run {
    memory: &'static Shared,
    pipe: [i32; 2],
    program: i32,
}

fn start(state: State) -> Run {
    let memory = Shared::map();
    SHARED.store(std::ptr::from_ref(memory).cast_mut(), SeqCst);
    let mut pipe = [0; 2];
    // SAFETY: it writes two numbers.
    assert_eq!(unsafe { libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    let program = child(|| {
        SHARED.store(std::ptr::from_ref(memory).cast_mut(), SeqCst);
        // SAFETY: it reads a mask.
        unsafe {
            libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const MASK, 0usize, 8);
        }
        let mut result = (state.enter)(pipe[0]);
        if result == 0 && mask() != MASK {
            result = 120;
        }
        memory.result.store(result, SeqCst);
        memory.is_done.store(1, SeqCst);
        while memory.may_end.load(SeqCst) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        0
    });
    match state.call {
        Some(call) => {
            until("the program waits", || is_in(program, call) || exit_code(program).is_some())
        }
        None => until("the program computes", || memory.is_ready.load(SeqCst) == 1),
    }
    Run { memory, pipe, program }
}

/// How a tracer ends that does so before its request of this number, or makes a pause before it.
fn traced(state: State, run: &Run, number: i64, pauses: bool) -> i32 {
    let tracer = child(|| {
        SHARED.store(std::ptr::from_ref(run.memory).cast_mut(), SeqCst);
        (if pauses { &PAUSE } else { &LEFT }).store(number, SeqCst);
        UNPROTECTED.store(state.is_unprotected.into(), SeqCst);
        match trace(run.program as u32, state.signal) {
            Ok(()) => 0,
            Err(Errno::TIME) => HAS_GONE_ON,
            Err(_) => FAILED,
        }
    });
    waited("the tracer ends", tracer)
}

/// A tracer ends before its request of this number, or makes a pause before it.
fn try_one(state: State, number: i64, pauses: bool) -> End {
    let run = start(state);
    let before = belongings(run.program);
    let end = traced(state, &run, number, pauses);
    finish(state, &run, before, &format!("request {number}, {end}"));
    match end {
        0 => End::AfterAll,
        ENDED => End::BeforeAll,
        HAS_GONE_ON => End::GoneOn,
        other => panic!("the tracer of request {number}: {other}"),
    }
}

/// The program leaves its state, and has what it had before.
fn finish(state: State, run: &Run, before: (usize, usize), what: &str) {
    let Run { memory, pipe, program } = *run;
    if let Some(signal) = state.signal.filter(|_| memory.is_sent.load(SeqCst) == 0) {
        // SAFETY: it sends a signal to a child.
        unsafe { libc::kill(program, signal) };
    }
    if state.by_pipe {
        // A handler that interrupts this must run before.
        until(what, || state.signal.is_none() || memory.handled.load(SeqCst) == 1);
        // SAFETY: one byte.
        assert_eq!(unsafe { libc::write(pipe[1], b"x".as_ptr().cast(), 1) }, 1);
    }
    if state.call.is_none() {
        until(what, || state.signal.is_none() || memory.handled.load(SeqCst) == 1);
    }
    memory.may_go.store(1, SeqCst);
    // SAFETY: a word that stays.
    unsafe {
        libc::syscall(libc::SYS_futex, memory.may_go.as_ptr(), libc::FUTEX_WAKE, 1, 0usize, 0, 0);
    }
    let mut code = None;
    until(&format!("the program continues: {what}"), || {
        code = exit_code(program);
        code.is_some() || memory.is_done.load(SeqCst) == 1
    });
    assert_eq!((code, memory.result.load(SeqCst)), (None, 0), "{what}");
    // A program that was done before may be in the landing code yet.
    until(&format!("nothing is left: {what}"), || belongings(program) == before);
    memory.may_end.store(1, SeqCst);
    assert_eq!(waited("the program ends", program), 0, "{what}");
    // SAFETY: both are of this function.
    unsafe { assert_eq!(pipe.map(|end| libc::close(end)), [0; 2]) };
}

/// A tracer that ends before each of its requests in turn.
fn try_all(state: State) {
    let mut number = 0;
    loop {
        match try_one(state, number, false) {
            End::BeforeAll => number += 1,
            // This machine is busy.
            End::GoneOn => {}
            End::AfterAll => break,
        }
    }
    assert!(number > 40, "{number}");
}

const fn state(enter: fn(i32) -> i32, call: i64) -> State {
    State { enter, call: Some(call), signal: None, by_pipe: false, is_unprotected: false }
}

const fn busy(enter: fn(i32) -> i32) -> State {
    State { enter, call: None, signal: None, by_pipe: false, is_unprotected: false }
}

#[test]
fn sleep_outlives_its_tracer() {
    try_all(state(sleeps, libc::SYS_clock_nanosleep));
}

#[test]
fn read_outlives_its_tracer() {
    try_all(State { by_pipe: true, ..state(reads, libc::SYS_read) });
}

#[test]
fn poll_outlives_its_tracer() {
    try_all(State { by_pipe: true, ..state(polls, libc::SYS_poll) });
}

#[test]
fn epoll_wait_outlives_its_tracer() {
    try_all(State { by_pipe: true, ..state(waits_by_epoll, libc::SYS_epoll_wait) });
}

#[test]
fn futex_wait_outlives_its_tracer() {
    try_all(state(waits_by_futex, libc::SYS_futex));
}

#[test]
fn computation_outlives_its_tracer() {
    try_all(busy(computes));
    try_all(busy(calls));
}

#[test]
fn handler_of_computation_runs_once() {
    try_all(State { signal: Some(libc::SIGUSR1), ..busy(computes_and_handles) });
}

#[test]
fn handler_ends_pause() {
    try_all(State { signal: Some(libc::SIGUSR1), ..state(pauses, libc::SYS_pause) });
}

#[test]
fn handler_ends_sleep() {
    try_all(State { signal: Some(libc::SIGUSR1), ..state(sleeps_long, libc::SYS_clock_nanosleep) });
}

#[test]
fn handler_ends_sigsuspend() {
    try_all(State { signal: Some(libc::SIGUSR2), ..state(suspends, libc::SYS_rt_sigsuspend) });
}

#[test]
fn handler_that_restarts_leaves_read() {
    try_all(State {
        signal: Some(libc::SIGUSR1),
        by_pipe: true,
        ..state(reads_and_handles, libc::SYS_read)
    });
}

#[test]
fn handlers_keep_their_alternate_stack() {
    try_all(State {
        signal: Some(libc::SIGUSR1),
        by_pipe: true,
        ..state(reads_on_alternate_stack, libc::SYS_read)
    });
}

#[test]
fn dispatch_of_calls_outlives_tracer() {
    for enter in [reads_with_selector, reads_without_selector] {
        try_all(State { by_pipe: true, ..state(enter, libc::SYS_read) });
    }
    try_all(busy(computes_with_selector));
    try_all(busy(computes_without_selector));
}

#[test]
fn dispatch_of_calls_outlives_tracer_and_handler() {
    for enter in [handles_with_selector, handles_without_selector] {
        try_all(State {
            signal: Some(libc::SIGUSR1),
            by_pipe: true,
            ..state(enter, libc::SYS_read)
        });
    }
}

/// A tracer that ends leaves its byte as the selector, and the next one takes it away.
#[test]
fn dispatch_of_calls_is_its_own_after_another_tracer() {
    let waiting = state(reads_without_selector, libc::SYS_read);
    let run = start(State { by_pipe: true, ..waiting });
    let before = belongings(run.program);
    let waits = || is_in(run.program, libc::SYS_read);
    for kill in 0..60 {
        let end = traced(waiting, &run, kill / 2, false);
        assert!(end == ENDED || end == HAS_GONE_ON, "kill {kill}: {end}");
        if kill % 2 == 1 {
            until("the program waits again", waits);
        }
    }
    assert_eq!(traced(waiting, &run, -1, false), 0);
    let own = child(|| {
        call::seize(run.program as u32, TraceOptions::SYSGOOD).unwrap();
        call::interrupt(run.program as u32).unwrap();
        while !matches!(
            call::wait_stop(Some(run.program as u32)).unwrap().1,
            Stop::Event(EVENT_STOP, _)
        ) {}
        let found = call::dispatch(run.program as u32).unwrap().unwrap();
        assert_eq!((found.mode, found.selector), (call::Dispatch::FROM_OUTSIDE, 0));
        0
    });
    assert_eq!(waited("the dispatch is read", own), 0);
    finish(State { by_pipe: true, ..waiting }, &run, before, "after sixty tracers");
}

/// Each tracer leaves its slot behind, with registers of its own.
#[test]
fn many_tracers_end_in_one_program() {
    let state = busy(computes);
    let run = start(state);
    let before = belongings(run.program);
    for kill in 0..20 {
        let end = traced(state, &run, 30 + kill, false);
        assert!(end == ENDED || end == HAS_GONE_ON, "kill {kill}: {end}");
    }
    assert_eq!(traced(state, &run, -1, false), 0);
    finish(state, &run, before, "after twenty tracers");
}

/// Tracers of a program that does not run between them end before each of their requests.
fn end_while_stopped(state: State) {
    let run = start(state);
    let before = belongings(run.program);
    // SAFETY: it sends a signal to a child.
    let send = |signal| assert_eq!(unsafe { libc::kill(run.program, signal) }, 0);
    let is_stopped = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", run.program)).unwrap();
        stat.contains(") T ")
    };
    send(libc::SIGSTOP);
    until("the program stops", is_stopped);
    let (mut number, mut gone_on) = (0, 0);
    loop {
        match traced(state, &run, number, false) {
            ENDED => number += 1,
            // This machine is busy: the program was stopped anywhere on its way through the landing code.
            HAS_GONE_ON => gone_on += 1,
            0 => break,
            other => panic!("the tracer of request {number}: {other}"),
        }
        until("the program is stopped again", is_stopped);
        let slots = Ground::in_object(run.program as u32).unwrap().slots_in_use();
        assert!(slots <= 2 + gone_on, "request {number}: {slots} slots");
    }
    assert!(number > 40, "{number}");
    send(libc::SIGCONT);
    finish(state, &run, before, "after tracers of a stopped program");
}

/// A tracer ends that has seen a signal, and has not resumed the program yet.
#[test]
fn signal_outlives_its_tracer() {
    let state = State { signal: Some(libc::SIGUSR1), ..state(pauses, libc::SYS_pause) };
    let run = start(state);
    let before = belongings(run.program);
    let tracer = child(|| {
        let pid = run.program as u32;
        call::seize(pid, TraceOptions::SYSGOOD).unwrap();
        // SAFETY: it sends a signal to a child of the test.
        unsafe { libc::kill(run.program, libc::SIGUSR1) };
        run.memory.is_sent.store(1, SeqCst);
        for stop in [call::wait_stop(Some(pid)), call::wait_stop(Some(pid))] {
            assert_eq!(stop, Ok((pid, Stop::Signal(libc::SIGUSR1))));
        }
        ENDED
    });
    assert_eq!(waited("the tracer ends", tracer), ENDED);
    finish(state, &run, before, "after a tracer at a signal");
}

#[test]
fn tracers_end_in_stopped_computation() {
    end_while_stopped(busy(computes));
}

#[test]
fn tracers_end_in_stopped_wait() {
    end_while_stopped(State { by_pipe: true, ..state(reads, libc::SYS_read) });
    end_while_stopped(state(waits_by_futex, libc::SYS_futex));
    end_while_stopped(state(sleeps, libc::SYS_clock_nanosleep));
}

#[test]
fn handler_after_tracers_of_stopped_program() {
    let pauses = state(pauses, libc::SYS_pause);
    end_while_stopped(State { signal: Some(libc::SIGUSR1), ..pauses });
    let waits = State { by_pipe: true, ..state(reads_and_handles, libc::SYS_read) };
    end_while_stopped(State { signal: Some(libc::SIGUSR1), ..waits });
}

/// Calls are made the same way where there is no place for a slot.
#[test]
fn tracer_without_slot_leaves_program_alone() {
    let waiting = State { by_pipe: true, ..state(reads, libc::SYS_read) };
    for one in [waiting, busy(computes)] {
        assert_eq!(try_one(State { is_unprotected: true, ..one }, -1, false), End::AfterAll);
    }
}

#[test]
fn late_tracer_leaves_program_alone() {
    let mut ends = Vec::new();
    for number in 0.. {
        let end = try_one(State { by_pipe: true, ..state(reads, libc::SYS_read) }, number, true);
        let is_last = end == End::AfterAll && number > 80;
        ends.push(end);
        if is_last {
            break;
        }
    }
    assert!(ends.contains(&End::GoneOn), "{ends:?}");
}
