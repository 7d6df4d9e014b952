//! The deadline of a waiting task: from its restart block, for an interrupted call that is resumed
//! by restart_syscall(2); from the timer on its kernel stack, for a task that still sleeps.
//!
//! No interface reports either, so a BPF program of a few instructions runs over one task
//! (Documentation/bpf/bpf_iterators.rst) and copies both out; the offsets of their fields come from
//! this kernel's BTF. KERNEL(6.1): iterators over one task; before, or if BPF may not be loaded,
//! the deadline is not known.
//!
//! A task that sleeps with a timeout has a `struct hrtimer_sleeper` in one of its frames, which
//! points to the task. That pointer and the other fields of a running timer identify it. The search
//! goes upwards from the stack pointer of the switched-out task, where all frames are live.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};

use crate::bpf::{self, AttachType, Insn, Program, ProgramType};
use crate::btf::{Btf, FUNC};
use crate::error::{CallError, Result};

/// The task's address and how often it was switched out, 8 bytes each.
const HEAD_BYTES: usize = 16;
/// Bytes of the block that are read: more than any kernel's has.
const BLOCK_BYTES: usize = 64;
/// Bytes of the stack that are read, and how many at a time: a program has 512 of its own.
const STACK_BYTES: usize = 1024;
const PIECE_BYTES: usize = 256;
/// Helpers by number (bpf-helpers(7)).
const PROBE_READ_KERNEL: i32 = 113;
const SEQ_WRITE: i32 = 127;

/// The program, loaded, and where what it reads is.
#[derive(Debug)]
pub struct Waits {
    program: OwnedFd,
    sleeper: Option<Sleeper>,
    futex_time: usize,
    sleep_expires: usize,
    poll_seconds: usize,
    poll_nanoseconds: usize,
}

/// Layout of `struct hrtimer_sleeper`.
#[derive(Debug, Clone, Copy)]
struct Sleeper {
    task: usize,
    expires: usize,
    soft_expires: usize,
    function: usize,
    base: usize,
    /// KERNEL: not all have it.
    state: Option<usize>,
}

/// State of a waiting task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskWait {
    /// The restart block, which an interrupted call would resume with; valid while the task is
    /// stopped.
    pub restart: RestartBlock,
    /// Latest end of the present sleep, by CLOCK_MONOTONIC of the host. Another kind of wait, or
    /// one without a timeout, has none.
    pub sleeps_until_ns: Option<u64>,
    /// Number of voluntary switches before this reading.
    pub switches: u64,
}

/// End of a wait, for each call that it may be: only one of them is valid. Nanoseconds of the clock
/// that the call uses, the host's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RestartBlock {
    /// futex(2).
    pub futex_ns: u64,
    /// nanosleep(2), clock_nanosleep(2).
    pub sleep_ns: u64,
    /// poll(2).
    pub poll_ns: u64,
}

impl Waits {
    /// Loads the program.
    pub fn load() -> Result<Self> {
        let failed = |what: &str| {
            CallError::new("bpf", "PROG_LOAD, a task iterator".into(), libc::ENOTSUP)
                .with_note(what.to_owned())
        };
        let btf = Btf::read().map_err(|_| failed("this kernel has no BTF"))?;
        let block = btf.offset("task_struct", &["restart_block"]);
        let field = |path: &[&str]| {
            let found = btf.offset("restart_block", path).map(|at| at as usize);
            let fits = found.filter(|at| at + 8 <= BLOCK_BYTES);
            fits.ok_or_else(|| failed("the restart block of this kernel is another"))
        };
        let block = block.ok_or_else(|| failed("the kernel's tasks have no restart block"))?;
        let of_task = |path: &[&str]| {
            let found = btf.offset("task_struct", path).and_then(|at| i16::try_from(at).ok());
            found.ok_or_else(|| failed("the tasks of this kernel are others"))
        };
        let code = program(block as i32, of_task(&["nvcsw"])?, of_task(&["thread", "sp"])?);
        let program = Program {
            kind: ProgramType::Tracing,
            attach: AttachType::Iterator,
            code: &code,
            name: "dormouse_wait",
            btf_id: btf.find(FUNC, "bpf_iter_task"),
        };
        let of_sleeper = |path: &[&str]| btf.offset("hrtimer_sleeper", path).map(|at| at as usize);
        let sleeper = || {
            Some(Sleeper {
                task: of_sleeper(&["task"])?,
                expires: of_sleeper(&["timer", "node", "expires"])?,
                soft_expires: of_sleeper(&["timer", "_softexpires"])?,
                function: of_sleeper(&["timer", "function"])?,
                base: of_sleeper(&["timer", "base"])?,
                state: of_sleeper(&["timer", "state"]),
            })
        };
        Ok(Self {
            program: bpf::load(&program)?,
            sleeper: sleeper(),
            futex_time: field(&["futex", "time"])?,
            sleep_expires: field(&["nanosleep", "expires"])?,
            // One structure in later kernels.
            poll_seconds: field(&["poll", "tv_sec"])
                .or_else(|_| field(&["poll", "end_time", "tv_sec"]))?,
            poll_nanoseconds: field(&["poll", "tv_nsec"])
                .or_else(|_| field(&["poll", "end_time", "tv_nsec"]))?,
        })
    }

    /// Reads how one thread waits.
    pub fn of(&self, tid: u32) -> Result<TaskWait> {
        let mut file = std::fs::File::from(bpf::iterate_task(self.program.as_fd(), tid)?);
        let mut bytes = [0; HEAD_BYTES + BLOCK_BYTES + STACK_BYTES];
        file.read_exact(&mut bytes).map_err(|e| {
            CallError::new("read", format!("task {tid}"), e.raw_os_error().unwrap_or(libc::ESRCH))
        })?;
        let (head, rest) = bytes.split_at(HEAD_BYTES);
        let (block, stack) = rest.split_at(BLOCK_BYTES);
        // Within, by `load`.
        let of_block = |at| number(block, at).unwrap_or(0);
        let seconds = of_block(self.poll_seconds).saturating_mul(1_000_000_000);
        let task = number(head, 0).unwrap_or(0);
        Ok(TaskWait {
            restart: RestartBlock {
                futex_ns: of_block(self.futex_time),
                sleep_ns: of_block(self.sleep_expires),
                poll_ns: seconds.saturating_add(of_block(self.poll_nanoseconds)),
            },
            sleeps_until_ns: self.sleeper.and_then(|sleeper| sleeper.ends(task, stack)),
            switches: number(head, 8).unwrap_or(0),
        })
    }
}

fn number(bytes: &[u8], at: usize) -> Option<u64> {
    let eight = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_ne_bytes(eight.try_into().ok()?))
}

impl Sleeper {
    /// Returns when a timer on this stack ends the sleep of a task: the requested time, without the
    /// slack that the kernel may add (PR_SET_TIMERSLACK).
    fn ends(&self, task: u64, stack: &[u8]) -> Option<u64> {
        const KERNEL_AT: u64 = 1 << 63;
        const QUEUED: u8 = 1;
        let at = |place: usize| {
            let start = place.checked_sub(self.task)?;
            let field = |offset: usize| number(stack, start.checked_add(offset)?);
            let leads_to_kernel = |offset: usize| field(offset).is_some_and(|to| to >= KERNEL_AT);
            let is_queued = self.state.is_none_or(|at| stack.get(start + at) == Some(&QUEUED));
            let (soft, hard) = (field(self.soft_expires)?, field(self.expires)?);
            let is_it = field(self.task)? == task
                && leads_to_kernel(self.function)
                && leads_to_kernel(self.base)
                && is_queued
                && (1..=hard).contains(&soft)
                && hard < KERNEL_AT;
            is_it.then_some(soft)
        };
        (0..stack.len()).step_by(8).find_map(at)
    }
}

/// Returns the program, which copies the fields of its task. At the end it is called without a
/// task.
fn program(block: i32, switches: i16, stack: i16) -> Vec<Insn> {
    let (head, piece) = (HEAD_BYTES as i32, PIECE_BYTES as i32);
    let write = |bytes: i32| {
        [
            Insn::copy(1, 7),
            Insn::copy(2, 10),
            Insn::add(2, -bytes),
            Insn::set(3, bytes),
            Insn::call(SEQ_WRITE),
        ]
    };
    // From register `from` and so many bytes on.
    let read = |from: u8, offset: i32, bytes: i32| {
        [
            Insn::copy(1, 10),
            Insn::add(1, -bytes),
            Insn::set(2, bytes),
            Insn::copy(3, from),
            Insn::add(3, offset),
            Insn::call(PROBE_READ_KERNEL),
        ]
    };
    let mut body = vec![
        Insn::load_wide(7, 1, 0), // the state of the iteration
        Insn::load_wide(7, 7, 0), // where it writes to
        Insn::store_wide(10, -head as i16, 6),
        Insn::load_wide(1, 6, switches),
        Insn::store_wide(10, 8 - head as i16, 1),
    ];
    body.extend(write(head));
    body.extend(read(6, block, BLOCK_BYTES as i32));
    body.extend(write(BLOCK_BYTES as i32));
    body.push(Insn::load_wide(8, 6, stack));
    for offset in (0..STACK_BYTES as i32).step_by(PIECE_BYTES) {
        body.extend(read(8, offset, piece));
        body.extend(write(piece));
    }
    let mut code = vec![
        Insn::load_wide(6, 1, 8),   // the task
        Insn::skip_unless(6, 0, 1), // none: the end
        Insn::jump(body.len() as i16),
    ];
    code.extend(body);
    code.extend([Insn::set(0, 0), Insn::exit()]);
    code
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    /// Runs a program, and reads its state twice: waiting, and stopped.
    fn looked_at(program: &mut Command) -> Option<(TaskWait, TaskWait, i64)> {
        let waits = match Waits::load() {
            Ok(waits) => waits,
            Err(e) => {
                eprintln!("SKIPPED: {e}");
                return None;
            }
        };
        let mut child = program.stdin(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(100));
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let pid = child.id();
        let before = waits.of(pid).unwrap();
        crate::call::seize(pid, crate::call::TraceOptions::empty()).unwrap();
        crate::call::interrupt(pid).unwrap();
        crate::call::wait_stop(Some(pid)).unwrap();
        crate::call::registers(pid).unwrap(); // which waits until it is switched out
        let after = waits.of(pid).unwrap();
        child.kill().unwrap();
        let _ = child.wait();
        Some((before, after, now.tv_sec * 1_000_000_000 + now.tv_nsec))
    }

    #[test]
    fn deadline_of_a_wait_is_found_before_and_after_interruption() {
        let Some((before, after, now_ns)) = looked_at(Command::new("sleep").arg("100")) else {
            return;
        };
        let left = |end: u64| end as i64 - now_ns;
        let expected = 98_000_000_000..100_000_000_000;
        assert!(expected.contains(&left(after.restart.sleep_ns)), "{after:?}");
        let until = before.sleeps_until_ns.expect("it sleeps");
        // The restart block includes the slack for several timers at once.
        assert!((until..until + 1_000_000).contains(&after.restart.sleep_ns), "{until}: {after:?}");
        assert_eq!(after.switches, before.switches + 1, "the stop, and nothing else");
    }

    #[test]
    fn timer_is_recognised_by_all_its_fields() {
        let sleeper = Sleeper {
            task: 64,
            expires: 24,
            soft_expires: 32,
            function: 40,
            base: 48,
            state: Some(56),
        };
        let task = 0xffff_8885_7f7c_5c00;
        let code = 0xffff_ffff_8142_04b0;
        let timer = |soft, hard, state| [0, 0, 0, hard, soft, code, code, state, task];
        let bytes = |words: &[u64]| words.iter().flat_map(|w| w.to_ne_bytes()).collect::<Vec<u8>>();
        // A decoy without a timer: the task, after other addresses.
        let decoy = [task, task, 7, code, task, code, code, 1, task];
        assert_eq!(sleeper.ends(task, &bytes(&decoy)), None);
        assert_eq!(sleeper.ends(task, &bytes(&timer(500, 510, 0))), None, "it does not run");
        let stack = [&[task][..], &decoy, &timer(500, 510, 1)].concat();
        assert_eq!(sleeper.ends(task, &bytes(&stack)), Some(500));
        assert_eq!(sleeper.ends(task + 8, &bytes(&stack)), None, "another's");
    }

    #[test]
    fn wait_without_timeout_has_no_deadline() {
        let Some((before, after, _)) = looked_at(&mut Command::new("cat")) else { return };
        assert_eq!(before.sleeps_until_ns, None);
        assert_eq!(after.sleeps_until_ns, None);
    }
}
