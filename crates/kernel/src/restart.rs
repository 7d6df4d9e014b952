//! What a task's restart block says: until when a call waits that was interrupted and goes on by
//! restart_syscall(2).
//!
//! The kernel tells nobody, so a program of a few instructions is run over one task
//! (Documentation/bpf/bpf_iterators.rst) and writes the block out as it is; where its fields are
//! says this kernel's BTF. KERNEL(6.1): iterators over one task; before, or where BPF may not be
//! loaded, the end of such a wait is not known.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};

use crate::bpf::{self, AttachType, Insn, Program, ProgramType};
use crate::btf::{Btf, FUNC};
use crate::error::{CallError, Result};

/// Bytes of the block that are read: more than any kernel's has.
const BLOCK_BYTES: usize = 64;
/// Helpers by number (bpf-helpers(7)).
const PROBE_READ_KERNEL: i32 = 113;
const SEQ_WRITE: i32 = 127;

/// The program, loaded, and where what it reads is.
#[derive(Debug)]
pub struct RestartBlocks {
    program: OwnedFd,
    futex_time: usize,
    sleep_expires: usize,
    poll_seconds: usize,
    poll_nanoseconds: usize,
}

/// When a wait ends, by each call that it may be: only one of them is true. Nanoseconds of the
/// clock that the call waits by, the host's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RestartBlock {
    /// futex(2).
    pub futex_ns: u64,
    /// nanosleep(2), clock_nanosleep(2).
    pub sleep_ns: u64,
    /// poll(2).
    pub poll_ns: u64,
}

impl RestartBlocks {
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
        let code = program(block as i32);
        let program = Program {
            kind: ProgramType::Tracing,
            attach: AttachType::Iterator,
            code: &code,
            name: "dormouse_wait",
            btf_id: btf.find(FUNC, "bpf_iter_task"),
        };
        Ok(Self {
            program: bpf::load(&program)?,
            futex_time: field(&["futex", "time"])?,
            sleep_expires: field(&["nanosleep", "expires"])?,
            // One structure in later kernels.
            poll_seconds: field(&["poll", "tv_sec"])
                .or_else(|_| field(&["poll", "end_time", "tv_sec"]))?,
            poll_nanoseconds: field(&["poll", "tv_nsec"])
                .or_else(|_| field(&["poll", "end_time", "tv_nsec"]))?,
        })
    }

    /// The block of one thread; what it says is true while the thread stands still.
    pub fn of(&self, tid: u32) -> Result<RestartBlock> {
        let mut file = std::fs::File::from(bpf::iterate_task(self.program.as_fd(), tid)?);
        let mut bytes = [0; BLOCK_BYTES];
        file.read_exact(&mut bytes).map_err(|e| {
            CallError::new("read", format!("task {tid}"), e.raw_os_error().unwrap_or(libc::ESRCH))
        })?;
        let number = |at: usize| {
            let eight = bytes[at..at + 8].try_into().unwrap_or([0; 8]); // within, by `load`
            u64::from_ne_bytes(eight)
        };
        let seconds = number(self.poll_seconds).saturating_mul(1_000_000_000);
        Ok(RestartBlock {
            futex_ns: number(self.futex_time),
            sleep_ns: number(self.sleep_expires),
            poll_ns: seconds.saturating_add(number(self.poll_nanoseconds)),
        })
    }
}

/// Writes out the block of the task it is called for. At the end it is called without one.
fn program(block: i32) -> [Insn; 18] {
    let bytes = BLOCK_BYTES as i32;
    [
        Insn::load_wide(6, 1, 8),   // the task
        Insn::skip_unless(6, 0, 1), // none: the end
        Insn::jump(13),
        Insn::load_wide(7, 1, 0), // what is known of the iteration
        Insn::load_wide(7, 7, 0), // where it writes to
        Insn::copy(1, 10),
        Insn::add(1, -bytes),
        Insn::set(2, bytes),
        Insn::copy(3, 6),
        Insn::add(3, block),
        Insn::call(PROBE_READ_KERNEL),
        Insn::copy(1, 7),
        Insn::copy(2, 10),
        Insn::add(2, -bytes),
        Insn::set(3, bytes),
        Insn::call(SEQ_WRITE),
        Insn::set(0, 0),
        Insn::exit(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_an_interrupted_wait_is_known() {
        let blocks = match RestartBlocks::load() {
            Ok(blocks) => blocks,
            Err(e) => return eprintln!("SKIPPED: {e}"),
        };
        // A thread that sleeps with nowhere to put what is left, stopped and gone on once.
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(100));
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let pid = child.id();
        crate::call::seize(pid, crate::call::TraceOptions::empty()).unwrap();
        crate::call::interrupt(pid).unwrap();
        crate::call::wait_stop(Some(pid)).unwrap();
        let found = blocks.of(pid).unwrap();
        child.kill().unwrap();
        let _ = child.wait();
        let left = found.sleep_ns as i64 - (now.tv_sec * 1_000_000_000 + now.tv_nsec);
        assert!((98_000_000_000..100_000_000_000).contains(&left), "{left}: {found:?}");
    }
}
