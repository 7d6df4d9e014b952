//! POSIX message queues of the ipc namespace: they are not saved yet, so there must be none.
//!
//! They belong to no process and would be gone without a word: the namespace is made anew. What
//! else is in it has a module of its own ([`super::system_v`]).

use std::fs;

use super::object::Survey;
use super::tree::Seen;
use crate::error::Refusal;

/// Refuses the queues in the ipc namespace of the first process.
pub(super) fn check(survey: &mut Survey<'_>, first: &Seen) {
    let queues = format!("/proc/{}/root/dev/mqueue", first.pid);
    if fs::read_dir(queues).is_ok_and(|mut dir| dir.next().is_some()) {
        survey.found.refusals.push(Refusal {
            pid: 0,
            process: String::new(),
            what: String::new(),
            why: "it has POSIX message queues, which are not saved yet".into(),
        });
    }
}
