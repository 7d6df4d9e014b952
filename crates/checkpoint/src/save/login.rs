//! The login user, by which audit names all that a task does (proc_pid_loginuid(5)): set once by a login
//! program, and inherited. The number of the session that the kernel chooses with it is another one afterwards.

use dormouse_kernel::proc;
use dormouse_record::{Error, Process, Result};

use super::refusal::Reason;
use super::seen::Seen;
use crate::look::ids::Maps;

/// The login of a thread, by ids inside; `None` if it has none, or one that the container cannot have set.
pub(super) fn uid(seen: &Seen, tid: u32) -> Option<u32> {
    // LIMIT: a kernel without audit has no such file.
    let text = proc::whole_text(format!("/proc/{}/task/{tid}/loginuid", seen.pid)).ok()?;
    let outside: u32 = text.trim().parse().ok()?;
    let inside =
        if outside == u32::MAX { u32::MAX } else { Maps::inside(&seen.maps().uids, outside) };
    (inside != u32::MAX).then_some(inside)
}

/// Refuses a login that a restore does not set: each task writes its own to its own procfs.
pub(super) fn check(seen: &Seen, is_in_other_user: bool) -> std::result::Result<(), Reason> {
    let has_root = || std::fs::read_link(format!("/proc/{}/root", seen.pid));
    let is_apart = is_in_other_user || has_root().is_ok_and(|root| root.as_os_str() != "/");
    if is_apart && uid(seen, seen.pid).is_some() {
        return Err(
            "it has a login (loginuid) in a user namespace or below a root of its own, which is \
                    not saved yet"
                .into(),
        );
    }
    Ok(())
}

/// Refuses the logins of several threads that may not be inspected: they would open these files at different times
/// from the one at which they may.
pub(super) fn check_threads(seen: &Seen, record: &Process) -> Result<()> {
    let has_one = record.threads.iter().any(|thread| thread.login_uid.is_some());
    if has_one && record.threads.len() > 1 && record.dumpable != 1 {
        let why = "it has threads with a login (loginuid) and may not be inspected (PR_SET_DUMPABLE), which \
                   is not saved yet";
        return Err(Error::Refused(vec![seen.refuse("", why)]));
    }
    Ok(())
}
