//! Whether a task is in a Landlock domain (landlock(7)).
//!
//! The kernel reports a task's domain through no interface. The domain is a pointer in the security blob of
//! the task's credentials, and a program of a few instructions writes that blob out as it is
//! (Documentation/bpf/bpf_iterators.rst). The place of the pointer depends on the security modules of the
//! boot, so a thread of this process enters a domain of its own: one word of its blob changes, from none to
//! an address.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};

use crate::bpf::{self, AttachType, Insn, Program, ProgramType};
use crate::btf::{Btf, FUNC};
use crate::call;
use crate::error::{CallError, Result};

/// Bytes of a blob that are read: more than the modules of any kernel keep for credentials. What lies behind
/// a smaller blob is another object of the same allocation cache, and never read as a domain.
const BLOB_BYTES: usize = 128;
/// Helpers by number (bpf-helpers(7)).
const PROBE_READ_KERNEL: i32 = 113;
const SEQ_WRITE: i32 = 127;

/// The program, loaded, and the place of the domain in a blob.
#[derive(Debug)]
pub struct Domains {
    program: OwnedFd,
    place: usize,
}

impl Domains {
    /// Loads the program. `None` where this kernel has no Landlock, and so no task a domain.
    pub fn load() -> Result<Option<Self>> {
        let failed = |why: &str| {
            CallError::new("bpf", "PROG_LOAD, a task iterator".into(), libc::ENOTSUP)
                .with_note(why.to_owned())
        };
        // Ignored: ENOSYS where the kernel lacks it, EOPNOTSUPP where the boot has disabled it.
        let Ok(ruleset) = call::create_ruleset(call::RESTRICT_MAKE_SOCK) else { return Ok(None) };
        let btf = Btf::read().map_err(|_| failed("this kernel has no BTF"))?;
        let field = |structure, name| {
            let found = btf.offset(structure, &[name]).and_then(|at| i16::try_from(at).ok());
            found.ok_or_else(|| failed("the credentials of this kernel are others"))
        };
        let code = program(field("task_struct", "cred")?, field("cred", "security")?);
        let program = bpf::load(&Program {
            kind: ProgramType::Tracing,
            attach: AttachType::Iterator,
            code: &code,
            name: "dormouse_domain",
            btf_id: btf.find(FUNC, "bpf_iter_task"),
        })?;
        let own = || -> Result<Option<usize>> {
            let tid = rustix::thread::gettid().as_raw_nonzero().get() as u32;
            // A thread that is in a domain already is in no less than that.
            let before = blob(&program, tid)?;
            call::set_no_new_privs().and_then(|()| call::restrict_self(ruleset.as_fd())).map_err(
                |e| CallError::new("landlock_restrict_self", String::new(), e.raw_os_error()),
            )?;
            let after = blob(&program, tid)?;
            let mut all = (0..BLOB_BYTES).step_by(8);
            Ok(all.find(|at| {
                word(&before, *at) != word(&after, *at) && word(&after, *at) >= KERNEL_AT
            }))
        };
        let place = std::thread::scope(|scope| scope.spawn(own).join());
        let place = place.map_err(|_| failed("a thread of its own has ended"))??;
        let place = place.ok_or_else(|| failed("a domain is kept elsewhere in this kernel"))?;
        Ok(Some(Self { program, place }))
    }

    /// Whether a thread is in a domain.
    pub fn has_one(&self, tid: u32) -> Result<bool> {
        Ok(word(&blob(&self.program, tid)?, self.place) != 0)
    }
}

/// Addresses of the kernel begin here.
const KERNEL_AT: u64 = 1 << 63;

fn word(blob: &[u8; BLOB_BYTES], at: usize) -> u64 {
    let eight = blob.get(at..at + 8).and_then(|bytes| bytes.first_chunk());
    eight.map_or(0, |bytes| u64::from_ne_bytes(*bytes))
}

/// The security blob of a thread's credentials.
fn blob(program: &OwnedFd, tid: u32) -> Result<[u8; BLOB_BYTES]> {
    let mut file = std::fs::File::from(bpf::iterate_task(program.as_fd(), tid)?);
    let mut bytes = [0; BLOB_BYTES];
    file.read_exact(&mut bytes).map_err(|e| {
        CallError::new("read", format!("task {tid}"), e.raw_os_error().unwrap_or(libc::ESRCH))
    })?;
    Ok(bytes)
}

/// Writes out the blob of the task it is called for. At the end it is called without one.
fn program(credentials: i16, security: i16) -> Vec<Insn> {
    let bytes = BLOB_BYTES as i32;
    let body = [
        Insn::load_wide(7, 1, 0), // what is known of the iteration
        Insn::load_wide(7, 7, 0), // where it writes to
        Insn::load_wide(8, 6, credentials),
        Insn::load_wide(8, 8, security),
        Insn::copy(1, 10),
        Insn::add(1, -bytes),
        Insn::set(2, bytes),
        Insn::copy(3, 8),
        Insn::call(PROBE_READ_KERNEL),
        Insn::copy(1, 7),
        Insn::copy(2, 10),
        Insn::add(2, -bytes),
        Insn::set(3, bytes),
        Insn::call(SEQ_WRITE),
    ];
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
    use super::*;

    #[test]
    fn domain_of_a_thread_is_found() {
        let domains = match Domains::load() {
            Ok(Some(domains)) => domains,
            other => return eprintln!("SKIPPED: {other:?}"),
        };
        let tid = || rustix::thread::gettid().as_raw_nonzero().get() as u32;
        assert!(!domains.has_one(tid()).unwrap());
        let inside = || {
            let ruleset = call::create_ruleset(call::RESTRICT_MAKE_SOCK).unwrap();
            call::set_no_new_privs().unwrap();
            let without = domains.has_one(tid()).unwrap();
            call::restrict_self(ruleset.as_fd()).unwrap();
            (without, domains.has_one(tid()).unwrap())
        };
        let found = std::thread::scope(|scope| scope.spawn(inside).join().unwrap());
        assert_eq!(found, (false, true));
        assert!(!domains.has_one(tid()).unwrap(), "another thread's");
    }
}
