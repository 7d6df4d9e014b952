//! Checks of network namespaces and their configuration.

use super::route::{self, Form};
use super::{Found, TEXT_MAX, ensure, object};
use super::{filter, link, setting};
use crate::{Elsewhere, LinkKind, Net, Object, Records, Said, Thing};

/// LIMIT: network namespaces inside; devices of one; addresses, routes, rules, and settings of one.
const NAMESPACES_MAX: usize = 1024;
const LINKS_MAX: usize = 256;
const THINGS_MAX: usize = 16_384;

/// Checks that there are no more than a program could have made.
pub(super) fn number(records: &Records) -> Found {
    let is_net = |object: &&Object| matches!(object.thing, Thing::Net(_));
    let count = records.objects.iter().filter(is_net).count();
    ensure(count <= NAMESPACES_MAX, || format!("{count} network namespaces"))
}

pub(super) fn net(net: &Net) -> Found {
    let sound = |form: &Form, all: &[Said]| {
        all.len() <= THINGS_MAX && all.iter().all(|said| form.is_sound(said))
    };
    ensure(sound(&route::ADDRESS, &net.addresses), || "its addresses".into())?;
    ensure(sound(&route::ROUTE, &net.routes), || "its routes".into())?;
    ensure(sound(&route::RULE, &net.rules), || "its rules".into())?;
    let links = net.links.len() <= LINKS_MAX && net.links.iter().all(link::is_sound);
    ensure(links, || "its links".into())?;
    let agree = net.links.iter().all(|one| link::is_among(one, &net.links));
    ensure(agree, || "its links, one with a missing peer or bridge".into())?;
    filter::check(&net.filters).map_err(|what| format!("its packet filters: {what}"))?;
    let sound = |(path, value): &(String, String)| {
        setting::is_setting(path) && value.len() < TEXT_MAX && !value.contains('\0')
    };
    let settings = net.settings.len() <= THINGS_MAX && net.settings.iter().all(sound);
    ensure(settings, || "its settings".into())?;
    let inherited = net.inherited.len() <= THINGS_MAX
        && net.inherited.iter().all(|one| sound(one) && setting::is_inherited(&one.0));
    ensure(inherited, || "its settings of a host".into())
}

/// Checks that pairs with ends in two stacks are complete.
pub(super) fn pairs(records: &Records) -> Found {
    let of_object = |n: usize| match records.objects.get(n).map(|object| &object.thing) {
        Some(Thing::Net(net)) => Some(net),
        _ => None,
    };
    let own = records.about.network.iter().map(|net| (Elsewhere::Container, net));
    let inside =
        (0..records.objects.len()).filter_map(|n| Some((Elsewhere::Object(n), of_object(n)?)));
    for (stack, net) in own.chain(inside) {
        for it in &net.links {
            let LinkKind::Veth { elsewhere: Some(elsewhere), .. } = it.kind else { continue };
            let other = match elsewhere {
                Elsewhere::Container => records.about.network.as_ref(),
                Elsewhere::Object(n) => of_object(n),
            };
            let end = other.and_then(|other| link::far_end(it, stack, &other.links));
            ensure(end.is_some(), || {
                format!("the device {} of a network namespace, with a missing other end", it.name)
            })?;
        }
    }
    Ok(())
}

/// Checks that an object of a network namespace is a socket, and that the namespace exists.
pub(super) fn place(it: &Object, records: &Records) -> Found {
    let Some(n) = it.net else { return Ok(()) };
    ensure(matches!(object(n, records)?, Thing::Net(_)), || "in no network namespace".into())?;
    let is_socket = matches!(
        it.thing,
        Thing::UnixSocket(_)
            | Thing::Listener(_)
            | Thing::TcpSocket(_)
            | Thing::UdpSocket(_)
            | Thing::RawSocket(_)
            | Thing::PacketSocket(_)
            | Thing::Netlink(_)
    );
    ensure(is_socket, || "in a network namespace, and not a socket".into())?;
    let is_held = match &it.thing {
        Thing::TcpSocket(socket) => socket.held,
        Thing::UnixSocket(socket) => socket.held,
        _ => false,
    };
    ensure(!is_held, || "held, but not reachable from outside".into())
}

#[cfg(test)]
mod tests {
    use super::super::records;
    use super::*;
    use crate::sample::small;
    use crate::{Bytes, Link};

    #[test]
    fn invalid_network_namespaces_are_refused() {
        let said = |change: fn(&mut Records)| {
            let mut all = small();
            all.objects.push(Thing::Net(Net { up: true, ..Net::default() }).into());
            all.processes[0].net = Some(1);
            change(&mut all);
            records(&all).err().map(|e| e.to_string()).unwrap_or_default()
        };
        fn its(records: &mut Records) -> &mut Net {
            match &mut records.objects[1].thing {
                Thing::Net(net) => net,
                _ => unreachable!("it is the second"),
            }
        }
        assert_eq!(said(|_| {}), "");
        fn head(bytes: usize) -> Said {
            Said { head: Bytes(vec![0; bytes]), attributes: Vec::new() }
        }
        fn end(peer: u32, elsewhere: Elsewhere) -> Link {
            Link {
                number: 9 - peer,
                name: "a".into(),
                kind: LinkKind::Veth { peer, elsewhere: Some(elsewhere) },
                address: Bytes(vec![2, 0, 0, 0, 0, 1]),
                mtu: 1500,
                queue: 0,
                flags: 0,
                master: None,
            }
        }
        fn with_own(records: &mut Records, links: Vec<Link>) {
            records.about.network = Some(Net { up: true, links, ..Net::default() });
        }
        let pair: fn(&mut Records) = |r| {
            its(r).links.push(end(5, Elsewhere::Container));
            with_own(r, vec![end(4, Elsewhere::Object(1))]);
        };
        assert_eq!(said(pair), "");
        type Case = (fn(&mut Records), &'static str);
        let nowhere = "with a missing other end";
        let cases: [Case; 15] = [
            (|r| its(r).links.push(end(5, Elsewhere::Container)), nowhere),
            (|r| its(r).links.push(end(5, Elsewhere::Object(0))), nowhere),
            (|r| its(r).links.push(end(5, Elsewhere::Object(1))), nowhere),
            (|r| with_own(r, vec![end(4, Elsewhere::Object(1))]), nowhere),
            (|r| r.processes[0].net = Some(0), "in no network namespace"),
            (|r| r.objects[0].net = Some(0), "in no network namespace"),
            (|r| r.objects[0].net = Some(1), "not a socket"),
            (|r| its(r).addresses.push(head(4)), "its addresses"),
            (|r| its(r).routes.push(head(8)), "its routes"),
            (|r| its(r).rules.push(head(4000)), "its rules"),
            (|r| its(r).filters = "include \"/etc/shadow\"".into(), "its packet filters"),
            (
                |r| its(r).settings.push(("../kernel/core_pattern".into(), "x".into())),
                "its settings",
            ),
            (
                |r| its(r).settings.push(("ipv4/conf/../forwarding".into(), "1".into())),
                "its settings",
            ),
            (
                |r| its(r).inherited.push(("ipv4/tcp_sack".into(), "0".into())),
                "its settings of a host",
            ),
            (
                |r| {
                    let one = r.objects[1].clone();
                    r.objects.extend(std::iter::repeat_n(one, NAMESPACES_MAX));
                },
                "1025 network namespaces",
            ),
        ];
        for (change, text) in cases {
            let said = said(change);
            assert!(said.contains(text), "{text}: {said}");
        }
    }
}
