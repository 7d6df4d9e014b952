//! Landlock: threads that have restricted themselves are refused.

use std::sync::OnceLock;

use dormouse_kernel::landlock::Domains;
use dormouse_kernel::proc;
use dormouse_record::{Error, Result};

use super::seen::Seen;

/// No interface reports the rules of a Landlock domain, so it cannot be made again.
pub(super) const DOMAIN: &str = "it has restricted itself by Landlock, which is not saved yet";

/// Whether a thread may be in a Landlock domain: landlock_restrict_self(2) needs no_new_privs or
/// CAP_SYS_ADMIN.
fn may_have_domain(seen: &Seen, fields: &proc::Fields) -> bool {
    const SYS_ADMIN: u64 = 1 << 21;
    let may_administer = fields.mask("CapBnd").is_none_or(|mask| mask & SYS_ADMIN != 0);
    !seen.is_zombie && (fields.number("NoNewPrivs") == Some(1) || may_administer)
}

/// Whether a thread is in a Landlock domain. LIMIT: none is found where BPF may not be loaded.
fn has_domain(tid: u32) -> bool {
    static DOMAINS: OnceLock<Option<Domains>> = OnceLock::new();
    let domains = DOMAINS.get_or_init(|| Domains::load().ok().flatten());
    domains.as_ref().is_some_and(|domains| domains.has_one(tid).unwrap_or(false))
}

/// Whether a thread of a process is in a Landlock domain.
pub(super) fn has_domains(seen: &Seen, is_in_user_namespace: bool) -> bool {
    let may_have_domains = may_have_domain(seen, &seen.fields) || is_in_user_namespace;
    may_have_domains && seen.tids.iter().any(|tid| has_domain(*tid))
}

/// Refuses a stopped thread in a Landlock domain, if the fields of its process did not require the check.
pub(super) fn check_thread(seen: &Seen, tid: u32, fields: &proc::Fields) -> Result<()> {
    let is_known = tid == seen.pid || !may_have_domain(seen, fields);
    match is_known || !has_domain(tid) {
        true => Ok(()),
        false => Err(Error::Refused(vec![seen.refuse("", DOMAIN)])),
    }
}
