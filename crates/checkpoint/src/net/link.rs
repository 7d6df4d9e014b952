//! Network devices: those of a stack, and how one is made.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;

use super::message::{Body, NEW, ask, request};
use super::setting::is_link_name;
use crate::format::{Bytes, Elsewhere, Link, LinkKind};
use crate::netlink::{attributes, u32_at};

/// The loopback device is the first of every stack.
pub(super) const LOOPBACK: u32 = 1;
/// The configurable flags of `IFF_*`: up, no ARP, promiscuous, all multicasts, multicast.
pub(crate) const CHOSEN: u32 = 1 | 0x80 | 0x100 | 0x200 | 0x1000;
const UP: u32 = libc::IFF_UP as u32;

/// Kinds of messages.
const NEW_LINK: u16 = 16;
const GET_LINK: u16 = 18;
/// `struct ifinfomsg`.
const HEAD: usize = 16;

/// `IFLA_*`.
const ADDRESS: u16 = 1;
const NAME: u16 = 3;
const MTU: u16 = 4;
const OTHER: u16 = 5;
const DISCIPLINE: u16 = 6;
const MASTER: u16 = 10;
const QUEUE: u16 = 13;
const INFO: u16 = 18;
const ALIAS: u16 = 20;
const GROUP: u16 = 27;
const ELSEWHERE: u16 = 37;
const STACK: u16 = 28;
/// `IFLA_INFO_*`.
const KIND: u16 = 1;
const DATA: u16 = 2;
const PORT_DATA: u16 = 5;
/// `VETH_INFO_PEER`.
const PEER: u16 = 1;
/// Options of a port that can be configured: `IFLA_BRPORT_*`.
const PORT_OPTIONS: std::ops::RangeInclusive<u16> = 2..=11;

/// Options of a bridge that can be configured and do not change by themselves: `IFLA_BR_*`.
pub(crate) fn is_bridge_option(kind: u16) -> bool {
    matches!(kind, 1..=9 | 20 | 22..=26 | 28..=39 | 41..=46)
}

/// A device, as the kernel reports it.
pub(super) struct Seen {
    pub(super) number: u32,
    pub(super) name: String,
    kind: String,
    /// The number of the device that it is connected to or based on.
    other: Option<u32>,
    /// The id that this stack has for the stack of the other device, if that is another.
    pub(super) elsewhere: Option<u32>,
    pub(super) address: Vec<u8>,
    mtu: u32,
    queue: u32,
    pub(super) flags: u32,
    master: Option<u32>,
    /// Options of a bridge.
    options: Vec<(u16, Vec<u8>)>,
    /// Everything that must be equal in a copy.
    pub(super) told: Vec<u8>,
}

impl Seen {
    pub(super) fn is_up(&self) -> bool {
        self.flags & UP != 0
    }

    fn read(body: &[u8]) -> Option<Self> {
        let found = attributes(body.get(HEAD..)?)?;
        let get = |kind| found.iter().find(|(one, _)| *one == kind).map(|(_, value)| *value);
        let number_of = |kind| get(kind).and_then(|value| u32_at(value, 0));
        let text = |value: &[u8]| {
            String::from_utf8_lossy(value.split(|b| *b == 0).next().unwrap_or_default()).into()
        };
        let info = attributes(get(INFO).unwrap_or_default())?;
        let of_info = |kind| info.iter().find(|(one, _)| *one & 0x7fff == kind).map(|(_, v)| *v);
        let kind: String = of_info(KIND).map(text).unwrap_or_default();
        let options = |kind, is: fn(u16) -> bool| -> Option<Vec<(u16, Vec<u8>)>> {
            let all = attributes(of_info(kind).unwrap_or_default())?.into_iter();
            Some(all.filter(|(kind, _)| is(*kind)).map(|(kind, v)| (kind, v.to_vec())).collect())
        };
        let bridge = if kind == "bridge" { options(DATA, is_bridge_option)? } else { Vec::new() };
        let port = options(PORT_DATA, |kind| PORT_OPTIONS.contains(&kind))?;
        let flags = u32_at(body, 8)? & CHOSEN;
        // Family and type of the device; then the configurable values.
        let mut told = body.get(..8)?.to_vec();
        told.extend(flags.to_ne_bytes());
        told.extend(kind.as_bytes());
        let kept = [ADDRESS, NAME, MTU, OTHER, DISCIPLINE, MASTER, QUEUE, ALIAS, GROUP, ELSEWHERE];
        let plain = found.iter().filter(|(kind, _)| kept.contains(kind));
        // The id of another stack is only valid in this one.
        let value =
            |kind, value: &[u8]| if kind == ELSEWHERE { Vec::new() } else { value.to_vec() };
        let plain = plain.map(|(kind, it)| (*kind, value(*kind, it)));
        for (kind, value) in plain.chain(bridge.iter().cloned()).chain(port) {
            told.extend(kind.to_ne_bytes());
            told.extend(value);
        }
        Some(Self {
            number: u32_at(body, 4)?,
            name: text(get(NAME)?),
            kind,
            other: number_of(OTHER),
            elsewhere: number_of(ELSEWHERE),
            address: get(ADDRESS).unwrap_or_default().to_vec(),
            mtu: number_of(MTU)?,
            queue: number_of(QUEUE).unwrap_or_default(),
            flags,
            master: number_of(MASTER),
            options: bridge,
            told,
        })
    }

    /// Its record, or why it has none. `stacks` are other stacks, by this one's ids.
    pub(super) fn record(&self, stacks: &HashMap<u32, Elsewhere>) -> Result<Link, String> {
        let name = &self.name;
        if !is_link_name(name) {
            return Err(format!("with a link of the name {name:?}"));
        }
        let kind = match (&*self.kind, self.other) {
            ("dummy", _) => LinkKind::Dummy,
            ("bridge", _) => LinkKind::Bridge { options: Vec::new() },
            ("veth", Some(peer)) => {
                let elsewhere = match self.elsewhere {
                    None => None,
                    Some(number) => Some(*stacks.get(&number).ok_or_else(|| {
                        format!("with a link {name} and its other end outside the container")
                    })?),
                };
                LinkKind::Veth { peer, elsewhere }
            }
            (kind, _) => return Err(format!("with a link {name} of the kind {kind:?}")),
        };
        Ok(Link {
            number: self.number,
            name: name.clone(),
            kind,
            address: Bytes(self.address.clone()),
            mtu: self.mtu,
            queue: self.queue,
            flags: self.flags,
            master: self.master,
        })
    }

    /// Options that differ from another bridge.
    pub(super) fn options_unlike(&self, other: &Self) -> Vec<(u16, Bytes)> {
        let differ = self.options.iter().filter(|option| !other.options.contains(option));
        differ.map(|(kind, value)| (*kind, Bytes(value.clone()))).collect()
    }
}

/// All devices of the calling thread's stack.
pub(super) fn all() -> Result<Vec<Seen>, Errno> {
    let mut all = Vec::new();
    ask(GET_LINK, &[0; HEAD], |body| {
        all.push(Seen::read(body)?);
        Some(())
    })?;
    Ok(all)
}

/// The other end of a pair, in another stack.
pub(super) struct Far<'a> {
    pub(super) record: Link,
    pub(super) stack: &'a OwnedFd,
}

/// Makes devices: down, without a bridge, with default options. `far` returns the other end of a
/// pair that is in another stack; `None` if the pair exists.
pub(super) fn make<'a>(
    links: &[Link],
    mut far: impl FnMut(&Link, Elsewhere) -> Result<Option<Far<'a>>, Errno>,
) -> Result<(), Errno> {
    let mut made = HashSet::new();
    let as_record = |body: Body, link: &Link| {
        let body = body.with_text(NAME, &link.name).with(ADDRESS, &link.address.0);
        body.with(MTU, &link.mtu.to_ne_bytes()).with(QUEUE, &link.queue.to_ne_bytes())
    };
    for link in links {
        if !made.insert(link.number) {
            continue;
        }
        let new = Body::new(&[]);
        let info = match &link.kind {
            LinkKind::Dummy => new.with_text(KIND, "dummy"),
            LinkKind::Bridge { .. } => new.with_text(KIND, "bridge"),
            LinkKind::Veth { peer, elsewhere } => {
                let other = match elsewhere {
                    Some(elsewhere) => {
                        let Some(far) = far(link, *elsewhere)? else { continue };
                        let number = far.stack.as_raw_fd() as u32;
                        as_record(Body::of_link(*peer, 0, 0), &far.record)
                            .with(STACK, &number.to_ne_bytes())
                    }
                    None => {
                        let other = links.iter().find(|other| other.number == *peer);
                        made.insert(*peer);
                        as_record(Body::of_link(*peer, 0, 0), other.ok_or(Errno::NODEV)?)
                    }
                };
                let data = Body::new(&[]).with_inner(PEER, &other);
                new.with_text(KIND, "veth").with_inner(DATA, &data)
            }
        };
        let body = as_record(Body::of_link(link.number, 0, 0), link);
        request(NEW_LINK, NEW, &body.with_inner(INFO, &info))?;
    }
    links.iter().try_for_each(|link| set_options(link.number, &link.kind))
}

/// Sets the options of a bridge.
pub(super) fn set_options(number: u32, kind: &LinkKind) -> Result<(), Errno> {
    let LinkKind::Bridge { options } = kind else { return Ok(()) };
    if options.is_empty() {
        return Ok(());
    }
    let with = |body: Body, (kind, value): &(u16, Bytes)| body.with(*kind, &value.0);
    let data = options.iter().fold(Body::new(&[]), with);
    let info = Body::new(&[]).with_text(KIND, "bridge").with_inner(DATA, &data);
    request(NEW_LINK, 0, &Body::of_link(number, 0, 0).with_inner(INFO, &info))
}

/// Attaches the ports, and sets the flags of all devices.
pub(super) fn raise(links: &[Link]) -> Result<(), Errno> {
    for link in links {
        if let Some(master) = link.master {
            let body = Body::of_link(link.number, 0, 0).with(MASTER, &master.to_ne_bytes());
            request(NEW_LINK, 0, &body)?;
        }
    }
    let set = |link: &Link| request(NEW_LINK, 0, &Body::of_link(link.number, link.flags, CHOSEN));
    links.iter().try_for_each(set)
}

/// Sets the loopback device up or down.
pub(super) fn set_loopback(up: bool) -> Result<(), Errno> {
    request(NEW_LINK, 0, &Body::of_link(LOOPBACK, u32::from(up), UP))
}

/// Checks that a record of a device is valid.
pub(crate) fn is_sound(link: &Link) -> bool {
    let options = match &link.kind {
        LinkKind::Bridge { options } => {
            options.len() <= 64
                && options.iter().all(|(kind, value)| is_bridge_option(*kind) && value.0.len() <= 8)
        }
        LinkKind::Dummy | LinkKind::Veth { .. } => true,
    };
    link.number > LOOPBACK
        && link.number <= i32::MAX as u32
        && is_link_name(&link.name)
        && link.address.0.len() == 6
        && link.flags & !CHOSEN == 0
        && options
}

/// Checks that the devices that a record refers to exist: the other end of a pair, which must refer
/// back, and its bridge. [`far_end`] checks a pair in two stacks.
pub(crate) fn is_among(link: &Link, all: &[Link]) -> bool {
    let any = |is: &dyn Fn(&Link) -> bool| all.iter().any(is);
    let pair = match link.kind {
        LinkKind::Veth { elsewhere: Some(_), .. } => true,
        LinkKind::Veth { peer, elsewhere: None } => {
            let back = LinkKind::Veth { peer: link.number, elsewhere: None };
            peer != link.number && any(&|other| other.number == peer && other.kind == back)
        }
        LinkKind::Dummy | LinkKind::Bridge { .. } => true,
    };
    let is_bridge = |number: u32| {
        any(&|other| other.number == number && matches!(other.kind, LinkKind::Bridge { .. }))
    };
    pair && link.master.is_none_or(is_bridge)
}

/// The other end of a pair in two stacks, if it refers back to this one, which is in `stack`.
pub(crate) fn far_end<'a>(link: &Link, stack: Elsewhere, there: &'a [Link]) -> Option<&'a Link> {
    let LinkKind::Veth { peer, elsewhere: Some(elsewhere) } = link.kind else { return None };
    let back = LinkKind::Veth { peer: link.number, elsewhere: Some(stack) };
    let is_it = |other: &&Link| other.number == peer && other.kind == back;
    there.iter().find(is_it).filter(|_| elsewhere != stack)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_links_are_refused() {
        let good = Link {
            number: 2,
            name: "veth0".into(),
            kind: LinkKind::Veth { peer: 3, elsewhere: None },
            address: Bytes(vec![2, 0, 0, 0, 0, 1]),
            mtu: 1500,
            queue: 1000,
            flags: UP,
            master: None,
        };
        assert!(is_sound(&good));
        let bridge = |options| LinkKind::Bridge { options };
        let bad = [
            Link { number: 1, ..good.clone() },
            Link { name: "../lo".into(), ..good.clone() },
            Link { name: String::new(), ..good.clone() },
            Link { address: Bytes(vec![0; 40]), ..good.clone() },
            Link { flags: 0x40, ..good.clone() },
            Link { kind: bridge(vec![(11, Bytes(vec![0; 8]))]), ..good.clone() },
            Link { kind: bridge(vec![(5, Bytes(vec![0; 9000]))]), ..good.clone() },
        ];
        bad.iter().for_each(|link| assert!(!is_sound(link), "{link:?}"));
        let kind = |number, kind| Link { number, kind, ..good.clone() };
        let other = kind(3, LinkKind::Veth { peer: 2, elsewhere: None });
        assert!(is_among(&good, &[good.clone(), other.clone()]));
        let to_itself = kind(2, LinkKind::Veth { peer: 2, elsewhere: None });
        assert!(!is_among(&to_itself, std::slice::from_ref(&to_itself)));
        for wrong in [LinkKind::Dummy, LinkKind::Veth { peer: 4, elsewhere: None }] {
            assert!(!is_among(&good, &[good.clone(), kind(3, wrong)]));
        }
        let port = Link { master: Some(3), ..kind(2, LinkKind::Dummy) };
        assert!(is_among(&port, &[kind(3, bridge(Vec::new()))]));
        assert!(!is_among(&port, &[other]));
        let (own, inner) = (Elsewhere::Container, Elsewhere::Object(7));
        let far =
            |number, peer, stack| kind(number, LinkKind::Veth { peer, elsewhere: Some(stack) });
        let it = far(2, 2, inner);
        assert!(far_end(&it, own, &[far(2, 2, own)]).is_some());
        for wrong in [far(2, 2, inner), far(3, 2, own), far(2, 3, own), good.clone()] {
            assert!(far_end(&it, own, &[wrong]).is_none());
        }
        assert!(far_end(&it, inner, std::slice::from_ref(&it)).is_none());
    }
}
