//! UTS namespaces: the names are read inside them.

use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::call::Namespace;
use dormouse_kernel::{namespace, pidfd};
use dormouse_record::{Error, Result as Outcome, Thing, Uts};
use rustix::io::Errno;

use super::refusal::Reason;
use super::seen::Seen;
use super::subject::Subject;
use super::survey::Survey;

/// The object of the UTS namespace of a process, by its link in procfs, if it is not the first
/// process's.
pub(crate) fn object(survey: &mut Survey<'_>, seen: &Seen, link: &str) -> Result<usize, Reason> {
    if let Some(index) = survey.uts.get(link) {
        return Ok(*index);
    }
    let first = pidfd::open(seen.first).map_err(|e| failed(&e))?;
    let (container, own) = (names(&first)?, names(seen.pidfd.as_ref().unwrap_or(&first))?);
    let other = |own: String, container: &str| (own != container).then_some(own);
    let uts = Uts { hostname: other(own.0, &container.0), domainname: other(own.1, &container.1) };
    let index = survey.add(Thing::Uts(uts));
    survey.uts.insert(link.to_owned(), index);
    Ok(index)
}

/// The names of host and domain of the container's own namespace, where processes have set others than
/// those of the configuration. Refused if the configuration does not permit that: a restore would not
/// set them.
pub(super) fn own(subject: &Subject) -> Outcome<Result<[Option<String>; 2], Reason>> {
    let Some(names) = &subject.names else { return Ok(Ok([None, None])) };
    let first = pidfd::open(subject.init).map_err(|e| Error::Elsewhere(failed(&e)))?;
    let (host, domain) = self::names(&first).map_err(Error::Elsewhere)?;
    // A new namespace has the names of its creator, the host's.
    let outside = rustix::system::uname();
    let is_set = |now: &str, configured: &Option<String>, outside: &CStr| match configured {
        Some(name) => name != now,
        None => outside.to_bytes() != now.as_bytes(),
    };
    let mut changed = [None, None];
    for (place, (now, (configured, outside))) in changed.iter_mut().zip([
        (host, (&names.hostname, outside.nodename())),
        (domain, (&names.domainname, outside.domainname())),
    ]) {
        if !is_set(&now, configured, outside) {
            continue;
        }
        match (names.can_be_set, configured) {
            (true, _) => *place = Some(now),
            (false, Some(former)) => {
                return Ok(Err(format!(
                    "the name '{now}' in place of '{former}' (sethostname, setdomainname), set with a \
                     capability that the container's configuration does not give (SYS_ADMIN): set \
                     the former name again"
                )));
            }
            // The host itself has another name since.
            (false, None) => {}
        }
    }
    Ok(Ok(changed))
}

fn failed(e: &dyn std::fmt::Display) -> Reason {
    format!("a UTS namespace without readable names: {e}")
}

/// The names of host and domain as a process sees them.
fn names(process: &OwnedFd) -> Result<(String, String), Reason> {
    let uts = pidfd::namespace(process, Namespace::Uts).map_err(|e| failed(&e))?;
    let read = || {
        let found = rustix::system::uname();
        let text = |name: &CStr| name.to_str().map(str::to_owned).map_err(|_| Errno::ILSEQ);
        Ok((text(found.nodename())?, text(found.domainname())?))
    };
    namespace::visit(uts.as_fd(), Namespace::Uts, read).flatten().map_err(|e| failed(&e))
}
