//! Network devices: those of a stack, and how one is made.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsRawFd, OwnedFd};

use dormouse_kernel::error::Result;
use dormouse_kernel::netlink::route::{
    INFO_DATA as DATA, INFO_KIND as KIND, LINK_ADDRESS as ADDRESS, LINK_ALIAS as ALIAS,
    LINK_HEAD_BYTES as HEAD, LINK_INFO as INFO, LINK_MTU as MTU, LINK_NAME as NAME,
    LINK_STACK as STACK, PAIR_PEER as PEER,
};
use dormouse_kernel::netlink::{Message, NEW, attributes, route, u32_at};
use dormouse_record::check::link::{CHOSEN, LOOPBACK, is_bridge_option};
use dormouse_record::check::setting::is_link_name;
use dormouse_record::{Bytes, Elsewhere, Link, LinkKind};

use super::message::{list, missing, request};

const UP: u32 = libc::IFF_UP as u32;

/// `IFLA_*`.
const OTHER: u16 = 5;
const DISCIPLINE: u16 = 6;
const MASTER: u16 = 10;
const QUEUE: u16 = 13;
const GROUP: u16 = 27;
const ELSEWHERE: u16 = 37;
/// `IFLA_INFO_*`.
const PORT_DATA: u16 = 5;
/// Options of a port that can be configured: `IFLA_BRPORT_*`.
const PORT_OPTIONS: std::ops::RangeInclusive<u16> = 2..=11;

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
    pub(super) reported: Vec<u8>,
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
        let mut reported = body.get(..8)?.to_vec();
        reported.extend(flags.to_ne_bytes());
        reported.extend(kind.as_bytes());
        let kept = [ADDRESS, NAME, MTU, OTHER, DISCIPLINE, MASTER, QUEUE, ALIAS, GROUP, ELSEWHERE];
        let plain = found.iter().filter(|(kind, _)| kept.contains(kind));
        // The id of another stack is only valid in this one.
        let value =
            |kind, value: &[u8]| if kind == ELSEWHERE { Vec::new() } else { value.to_vec() };
        let plain = plain.map(|(kind, it)| (*kind, value(*kind, it)));
        for (kind, value) in plain.chain(bridge.iter().cloned()).chain(port) {
            reported.extend(kind.to_ne_bytes());
            reported.extend(value);
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
            reported,
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
pub(super) fn all() -> Result<Vec<Seen>> {
    let mut all = Vec::new();
    list(route::GET_LINK, &[0; HEAD], |body| {
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
    mut far: impl FnMut(&Link, Elsewhere) -> Result<Option<Far<'a>>>,
) -> Result<()> {
    let mut made = HashSet::new();
    let as_record = |body: Message, link: &Link| {
        let body = body.with_text(NAME, &link.name).with(ADDRESS, &link.address.0);
        body.with(MTU, &link.mtu.to_ne_bytes()).with(QUEUE, &link.queue.to_ne_bytes())
    };
    for link in links {
        if !made.insert(link.number) {
            continue;
        }
        let new = Message::new(&[]);
        let info = match &link.kind {
            LinkKind::Dummy => new.with_text(KIND, "dummy"),
            LinkKind::Bridge { .. } => new.with_text(KIND, "bridge"),
            LinkKind::Veth { peer, elsewhere } => {
                let other = match elsewhere {
                    Some(elsewhere) => {
                        let Some(far) = far(link, *elsewhere)? else { continue };
                        let number = far.stack.as_raw_fd() as u32;
                        as_record(route::link(*peer, 0, 0), &far.record)
                            .with(STACK, &number.to_ne_bytes())
                    }
                    None => {
                        let other = links.iter().find(|other| other.number == *peer);
                        made.insert(*peer);
                        as_record(route::link(*peer, 0, 0), other.ok_or_else(|| missing(*peer))?)
                    }
                };
                let data = Message::new(&[]).nested(PEER, &other);
                new.with_text(KIND, "veth").nested(DATA, &data)
            }
        };
        let body = as_record(route::link(link.number, 0, 0), link);
        request(route::NEW_LINK, NEW, &body.nested(INFO, &info))?;
    }
    links.iter().try_for_each(|link| set_options(link.number, &link.kind))
}

/// Sets the options of a bridge.
pub(super) fn set_options(number: u32, kind: &LinkKind) -> Result<()> {
    let LinkKind::Bridge { options } = kind else { return Ok(()) };
    if options.is_empty() {
        return Ok(());
    }
    let with = |body: Message, (kind, value): &(u16, Bytes)| body.with(*kind, &value.0);
    let data = options.iter().fold(Message::new(&[]), with);
    let info = Message::new(&[]).with_text(KIND, "bridge").nested(DATA, &data);
    request(route::NEW_LINK, 0, &route::link(number, 0, 0).nested(INFO, &info))
}

/// Attaches the ports, and sets the flags of all devices.
pub(super) fn raise(links: &[Link]) -> Result<()> {
    for link in links {
        if let Some(master) = link.master {
            let body = route::link(link.number, 0, 0).with(MASTER, &master.to_ne_bytes());
            request(route::NEW_LINK, 0, &body)?;
        }
    }
    let set =
        |link: &Link| request(route::NEW_LINK, 0, &route::link(link.number, link.flags, CHOSEN));
    links.iter().try_for_each(set)
}

/// Sets the loopback device up or down.
pub(super) fn set_loopback(up: bool) -> Result<()> {
    request(route::NEW_LINK, 0, &route::link(LOOPBACK, u32::from(up), UP))
}
