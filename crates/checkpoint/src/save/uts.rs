//! UTS namespaces: the names are read by a thread that enters them.

use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::call::Namespace;
use dormouse_kernel::pidfd;
use dormouse_record::{Thing, Uts};
use rustix::io::Errno;
use rustix::thread::LinkNameSpaceType;

use super::refusal::Reason;
use super::seen::Seen;
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

fn failed(e: &dyn std::fmt::Display) -> Reason {
    format!("a UTS namespace without readable names: {e}")
}

/// The names of host and domain as a process sees them.
fn names(process: &OwnedFd) -> Result<(String, String), Reason> {
    let uts = pidfd::namespace(process, Namespace::Uts).map_err(|e| failed(&e))?;
    // A separate thread enters the namespace and ends there.
    let asked = std::thread::scope(|scope| {
        let asked = scope.spawn(|| {
            let kind = Some(LinkNameSpaceType::HostNameAndNISDomainName);
            rustix::thread::move_into_link_name_space(uts.as_fd(), kind)?;
            let said = rustix::system::uname();
            let text = |name: &std::ffi::CStr| name.to_str().map(str::to_owned);
            text(said.nodename())
                .and_then(|host| Ok((host, text(said.domainname())?)))
                .map_err(|_| Errno::ILSEQ)
        });
        asked.join().unwrap_or(Err(Errno::IO))
    });
    asked.map_err(|e| failed(&e))
}
