//! Network namespaces: the contents of each, by [`crate::net`]; and the namespace of a socket, by
//! the number that the kernel gives every namespace (SO_NETNS_COOKIE, Linux 5.14).

use std::os::fd::OwnedFd;

use dormouse_kernel::call::Namespace;
use dormouse_kernel::pidfd;
use dormouse_record::{Elsewhere, Net, Refusal, Thing};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::known::net::cookie;
use super::seen::Seen;
use super::survey::Survey;
use crate::{net, stack};

/// The number of the namespace of the calling thread.
fn cookie_here() -> Result<u64, Errno> {
    let flags = SocketFlags::CLOEXEC;
    cookie(&rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?)
}

fn opened(seen: &Seen) -> Option<OwnedFd> {
    pidfd::namespace(seen.pidfd.as_ref()?, Namespace::Net).ok()
}

/// Finds all namespaces, and the configuration of the container's own if that is private.
///
/// ORDER: each gets its number before any is inspected, as a device in one may have its peer in
/// another.
pub(super) fn find(survey: &mut Survey<'_>, tree: &[Seen]) {
    let Some(first) = tree.first() else { return };
    // The process may have exited meanwhile: nothing is stopped yet.
    let own = opened(first);
    let mut all = Vec::new();
    let mut links = Vec::new();
    let container = first.link("net");
    for seen in tree.iter().filter(|seen| !seen.is_zombie) {
        let Some(link) = seen.link("net").filter(|link| Some(*link) != container) else {
            continue;
        };
        if links.contains(&link) {
            continue;
        }
        let Some(netns) = opened(seen) else { continue };
        let object = survey.add(Thing::Net(Net::default()));
        all.push((Elsewhere::Object(object), netns));
        links.push(link);
    }
    if !all.is_empty() {
        survey.nets.own = own.as_ref().and_then(|own| stack::inside_of(own, cookie_here).ok());
    }
    // ORDER: the last, as it has no place among `links`.
    if survey.subject.own_network
        && let Some(own) = own
    {
        all.push((Elsewhere::Container, own));
    }
    for (n, (stack, netns)) in all.iter().enumerate() {
        let looked = stack::inside_of(netns, || Ok((cookie_here()?, net::look(&all)?)));
        let found = match looked {
            Ok((cookie, Ok(net))) => Ok((cookie, net)),
            Ok((_, Err(what))) => Err(format!("{what}, which is not saved yet")),
            Err(e) => Err(format!("that cannot be inspected: {e}")),
        };
        match *stack {
            Elsewhere::Object(object) => {
                let found = found.map(|(cookie, net)| {
                    survey.nets.by_cookie.insert(cookie, object);
                    survey.found.objects[object].thing = Thing::Net(net);
                    object
                });
                survey.nets.by_link.insert(links[n].to_owned(), found);
            }
            Elsewhere::Container => match found {
                // The stack has its default configuration.
                Ok((_, net)) if net.is_only_up() => {}
                Ok((_, net)) => survey.found.network = Some(net),
                Err(why) => survey.found.refusals.push(Refusal {
                    pid: first.inner,
                    process: first.name(),
                    what: "the container's network".into(),
                    why,
                }),
            },
        }
    }
    let saved = all.into_iter().filter(|(stack, _)| match stack {
        Elsewhere::Object(object) => survey.nets.by_cookie.values().any(|one| one == object),
        Elsewhere::Container => false,
    });
    survey.nets.open = saved.map(|(_, netns)| netns).collect();
}
