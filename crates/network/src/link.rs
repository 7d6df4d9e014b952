//! Devices, addresses, neighbours and routes, by rtnetlink(7).

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, BorrowedFd};

use dormouse_kernel::CallError;
use dormouse_kernel::netlink::traffic::{self, Class};
use dormouse_kernel::netlink::{self, Message, Protocol, Socket, attributes, route, u32_at};

use rustix::io::Errno;

use crate::error::{Error, Result};

/// Families of addresses.
const INET: u8 = 2;
const INET6: u8 = 10;

/// `IFF_UP`, `IFF_LOOPBACK`.
const UP: u32 = 1;
const IS_LOOPBACK: u32 = 8;

/// `IFA_ADDRESS`, `IFA_LOCAL`; no duplicate address detection (`IFA_F_NODAD`).
const ADDRESS: u16 = 1;
const LOCAL: u16 = 2;
const NO_DETECTION: u8 = 2;

/// `NDA_DST`, `NDA_LLADDR`; `NUD_PERMANENT`.
const NEIGHBOUR: u16 = 1;
const NEIGHBOUR_ADDRESS: u16 = 2;
const PERMANENT: u16 = 0x80;

/// `RTA_*`.
const DESTINATION: u16 = 1;
const OUT: u16 = 4;
const GATEWAY: u16 = 5;
const SOURCE: u16 = 7;
/// Routing tables: the main one, and the one of the stack's own addresses.
const MAIN: u8 = 254;
const OWN: u8 = 255;
/// `RTPROT_STATIC`, the protocol of a route that an operator or a program adds.
const STATIC: u8 = 4;
/// `RT_SCOPE_*`: the distance of a destination.
const UNIVERSE: u8 = 0;
const ON_LINK: u8 = 253;
const IN_HOST: u8 = 254;
/// Kinds of routes (`RTN_*`): to another host, to the stack itself.
const UNICAST: u8 = 1;
const TO_SELF: u8 = 2;
/// The gateway is a neighbour, without a route to it (`RTNH_F_ONLINK`).
const GATEWAY_ON_LINK: u32 = 4;

/// rtnetlink(7) in the stack of the thread that opened it.
pub(crate) struct Links(Socket);

/// A link of the stack.
#[derive(Debug, Clone, Default)]
pub(crate) struct Link {
    pub index: u32,
    pub name: String,
    pub mtu: u32,
    /// The label of an uplink is the runtime directory of its instance.
    pub alias: Option<String>,
}

/// An end of a pair that is to be made.
pub(crate) struct End<'n> {
    pub name: &'n str,
    /// The number of the device; 0 for the next free one.
    pub index: u32,
    /// The number of its [hardware address](hardware).
    pub hardware: u32,
}

/// A destination other than everything, with the link it leads to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Destination {
    pub first: Ipv4Addr,
    pub bits: u8,
    pub link: Option<u32>,
}

fn at(step: impl Into<String>) -> impl FnOnce(CallError) -> Error {
    move |source| Error::Netlink { step: step.into(), source }
}

/// The kernel's answers for a tree or a class that is not there.
fn is_none(error: &CallError) -> bool {
    let none = [Errno::NOENT, Errno::INVAL, Errno::OPNOTSUPP].map(Errno::raw_os_error);
    none.contains(&error.errno())
}

impl Links {
    pub fn open() -> Result<Self> {
        Socket::open(Protocol::Route).map(Self).map_err(at("open a netlink socket"))
    }

    /// All links but the loopback device.
    pub fn all(&mut self) -> Result<Vec<Link>> {
        let mut all = Vec::new();
        let request = Message::new(&[0; route::LINK_HEAD_BYTES]);
        let listed = self.0.dump(route::GET_LINK, &request, |entry| {
            let (link, flags) = Link::parse(entry)?;
            if flags & IS_LOOPBACK == 0 {
                all.push(link);
            }
            Some(())
        });
        listed.map_err(at("list the links"))?;
        Ok(all)
    }

    pub fn find(&mut self, name: &str) -> Result<Option<Link>> {
        let step = || at(format!("find the link '{name}'"));
        let request = route::link(0, 0, 0).with_text(route::LINK_NAME, name);
        let entry = match self.0.answer(route::GET_LINK, &request) {
            Err(e) if e.errno() == Errno::NODEV.raw_os_error() => return Ok(None),
            entry => entry.map_err(step())?,
        };
        let malformed = CallError::new("netlink", name.to_owned(), Errno::BADMSG.raw_os_error());
        let (link, _) = Link::parse(&entry).ok_or(malformed).map_err(step())?;
        Ok(Some(link))
    }

    /// Removes a link, if it is still there: the end of the other namespace of a pair removes it as well, later
    /// than the last process there.
    pub fn remove(&mut self, index: u32) -> Result<()> {
        let message = route::link(index, 0, 0);
        match self.0.request(route::REMOVE_LINK, 0, &message) {
            Err(e) if e.errno() == Errno::NODEV.raw_os_error() => Ok(()),
            other => other.map_err(at("remove a link")),
        }
    }

    pub fn up(&mut self, index: u32) -> Result<()> {
        self.set(&route::link(index, UP, UP), "set a link up")
    }

    /// Labels a link (`ip link set alias`).
    pub fn label(&mut self, index: u32, alias: &str) -> Result<()> {
        let message = route::link(index, 0, 0).with(route::LINK_ALIAS, alias.as_bytes());
        self.set(&message, "label a link")
    }

    fn set(&mut self, message: &Message, step: &'static str) -> Result<()> {
        self.0.request(route::NEW_LINK, 0, message).map_err(at(step))
    }

    /// A veth pair: `here` in this stack, `there` in the other namespace.
    pub fn add_pair(
        &mut self,
        here: &End<'_>,
        there: &End<'_>,
        mtu: u32,
        netns: BorrowedFd<'_>,
    ) -> Result<()> {
        let end = |end: &End<'_>| {
            route::link(end.index, 0, 0)
                .with_text(route::LINK_NAME, end.name)
                .with(route::LINK_ADDRESS, &hardware(end.hardware))
                .with(route::LINK_MTU, &mtu.to_ne_bytes())
        };
        let peer = end(there).with(route::LINK_STACK, &netns.as_raw_fd().to_ne_bytes());
        let data = Message::new(&[]).nested(route::PAIR_PEER, &peer);
        let info =
            Message::new(&[]).with_text(route::INFO_KIND, "veth").nested(route::INFO_DATA, &data);
        let pair = end(here).nested(route::LINK_INFO, &info);
        let made = self.0.request(route::NEW_LINK, netlink::NEW, &pair);
        made.map_err(at(format!("make the link '{}'", here.name)))
    }

    /// Has a program decide about every packet that comes in at a link. Takes no grace period of RCU, as TCX does.
    pub fn add_program(&mut self, index: u32, program: BorrowedFd<'_>, name: &str) -> Result<()> {
        let hooks = self.0.request(traffic::NEW_DISCIPLINE, netlink::NEW, &traffic::hooks(index));
        hooks.map_err(at("add hooks to a link (clsact, CONFIG_NET_SCH_INGRESS)"))?;
        let filter = traffic::filter(index, program, name);
        let made = self.0.request(traffic::NEW_FILTER, netlink::NEW, &filter);
        made.map_err(at("add a program to a link (CONFIG_NET_CLS_BPF)"))
    }

    /// Adds an empty tree of classes to a link, with the number of its default class.
    pub fn add_tree(&mut self, index: u32, default: u16) -> Result<()> {
        let made =
            self.0.request(traffic::NEW_DISCIPLINE, netlink::NEW, &traffic::tree(index, default));
        made.map_err(at("add a tree of traffic classes (HTB, CONFIG_NET_SCH_HTB)"))
    }

    /// Removes the queueing of a link, if it has one.
    pub fn remove_tree(&mut self, index: u32) -> Result<()> {
        match self.0.request(traffic::REMOVE_DISCIPLINE, 0, &traffic::no_tree(index)) {
            // A link without queueing has a handle of zero.
            Err(e) if is_none(&e) => Ok(()),
            other => other.map_err(at("remove the traffic classes of a link")),
        }
    }

    /// Adds a class to the tree of a link, or changes it.
    pub fn set_class(&mut self, index: u32, number: u16, class: &Class) -> Result<()> {
        let message = traffic::class(index, number, class);
        let set = self.0.request(traffic::NEW_CLASS, netlink::REPLACE, &message);
        set.map_err(at(format!("set the traffic class {number}")))
    }

    /// Removes a class, if it is there.
    pub fn remove_class(&mut self, index: u32, number: u16) -> Result<()> {
        match self.0.request(traffic::REMOVE_CLASS, 0, &traffic::no_class(index, number)) {
            Err(e) if is_none(&e) => Ok(()),
            other => other.map_err(at("remove a traffic class")),
        }
    }

    /// Gives a link an address of its own.
    pub fn add_address(&mut self, index: u32, own: IpAddr) -> Result<()> {
        if own.is_ipv6() && !has_ipv6() {
            return Ok(());
        }
        // struct ifaddrmsg: family, prefix, flags, scope, device. No duplicate address detection:
        // there is no other host on this link.
        let mut head = vec![family(own), all_bits(own), NO_DETECTION, UNIVERSE];
        head.extend(index.to_ne_bytes());
        let address = octets(own);
        let message = Message::new(&head).with(ADDRESS, &address).with(LOCAL, &address);
        let added = self.0.request(route::NEW_ADDRESS, netlink::REPLACE, &message);
        added.map_err(at(format!("add the address {own}")))
    }

    /// Adds a permanent entry for a neighbour on the link, by its number ([`hardware`]).
    pub fn add_neighbour(&mut self, index: u32, other: IpAddr, number: u32) -> Result<()> {
        if other.is_ipv6() && !has_ipv6() {
            return Ok(());
        }
        // struct ndmsg: family, device, state, flags, kind.
        let mut head = vec![family(other), 0, 0, 0];
        head.extend(index.to_ne_bytes());
        head.extend(PERMANENT.to_ne_bytes());
        head.extend([0; 2]);
        let message = Message::new(&head)
            .with(NEIGHBOUR, &octets(other))
            .with(NEIGHBOUR_ADDRESS, &hardware(number));
        let added = self.0.request(route::NEW_NEIGHBOUR, netlink::REPLACE, &message);
        added.map_err(at(format!("add the neighbour {other}")))
    }

    fn add_route(&mut self, route: &Route, what: String) -> Result<()> {
        if route.to.is_ipv6() && !has_ipv6() {
            return Ok(());
        }
        let added = self.0.request(route::NEW_ROUTE, netlink::REPLACE, &route.message());
        added.map_err(at(format!("add the route {what}")))
    }

    /// `bits` of `to` by way of a neighbour on the link.
    pub fn add_via(&mut self, to: IpAddr, bits: u8, via: IpAddr, link: u32) -> Result<()> {
        let route = Route { via: Some(via), flags: GATEWAY_ON_LINK, ..Route::new(to, bits, link) };
        self.add_route(&route, format!("{to}/{bits} via {via}"))
    }

    /// Excludes one address from a prefix that is local to this stack: the address is a neighbour
    /// on the link. The table of local addresses is searched first, so the exception is added
    /// there.
    pub fn add_neighbour_route(&mut self, to: IpAddr, link: u32) -> Result<()> {
        let scope = if to.is_ipv4() { ON_LINK } else { UNIVERSE };
        let route = Route { table: OWN, scope, ..Route::new(to, all_bits(to), link) };
        self.add_route(&route, format!("{to}"))
    }

    /// Makes every address of a prefix one of this stack's own (AnyIP), on the loopback device.
    /// `source` is what packets to it that have no source yet come from.
    pub fn add_local(&mut self, to: IpAddr, bits: u8, source: Option<IpAddr>) -> Result<()> {
        let scope = if to.is_ipv4() { IN_HOST } else { UNIVERSE };
        let source = source.filter(|source| source.is_ipv4() && to.is_ipv4());
        let own = Route::new(to, bits, route::LOOPBACK);
        let route = Route { table: OWN, scope, kind: TO_SELF, source, ..own };
        self.add_route(&route, format!("local {to}/{bits}"))
    }

    /// IPv4 destinations of the main table, the default route not among them, and the link of the
    /// default route.
    pub fn destinations(&mut self) -> Result<(Vec<Destination>, Option<u32>)> {
        let (mut found, mut default) = (Vec::new(), None);
        let mut head = [0; Route::HEAD_BYTES];
        head[0] = INET;
        let listed = self.0.dump(route::GET_ROUTE, &Message::new(&head), |entry| {
            let head = entry.get(..Route::HEAD_BYTES)?;
            let (bits, table) = (head[1], head[4]);
            if table != MAIN {
                return Some(());
            }
            let (mut first, mut link) = (None, None);
            for (kind, value) in attributes(&entry[Route::HEAD_BYTES..])? {
                match kind {
                    DESTINATION => first = Some(Ipv4Addr::from(*value.first_chunk::<4>()?)),
                    OUT => link = u32_at(value, 0),
                    _ => {}
                }
            }
            match first {
                Some(first) if bits > 0 => found.push(Destination { first, bits, link }),
                _ => default = default.or(link),
            }
            Some(())
        });
        listed.map_err(at("list the routes"))?;
        Ok((found, default))
    }
}

impl Link {
    /// Parses an entry: the link and its flags. `None` if it is malformed.
    fn parse(entry: &[u8]) -> Option<(Self, u32)> {
        // struct ifinfomsg: family, type, device, flags, changed flags.
        let mut link = Self { index: u32_at(entry, 4)?, ..Self::default() };
        for (kind, value) in attributes(entry.get(route::LINK_HEAD_BYTES..)?)? {
            let text = || String::from_utf8_lossy(value).trim_end_matches('\0').to_owned();
            match kind {
                route::LINK_NAME => link.name = text(),
                route::LINK_MTU => link.mtu = u32_at(value, 0)?,
                route::LINK_ALIAS => link.alias = Some(text()),
                _ => {}
            }
        }
        Some((link, u32_at(entry, 8)?))
    }
}

/// A route to be added.
struct Route {
    to: IpAddr,
    bits: u8,
    link: u32,
    via: Option<IpAddr>,
    source: Option<IpAddr>,
    table: u8,
    scope: u8,
    kind: u8,
    flags: u32,
}

impl Route {
    /// Bytes of `struct rtmsg`.
    const HEAD_BYTES: usize = 12;

    /// A route of the main table over a link.
    fn new(to: IpAddr, bits: u8, link: u32) -> Self {
        let (table, scope, kind) = (MAIN, UNIVERSE, UNICAST);
        Self { to, bits, link, via: None, source: None, table, scope, kind, flags: 0 }
    }

    fn message(&self) -> Message {
        // struct rtmsg: family, prefix, prefix of the source, service, table, protocol, scope, kind,
        // flags.
        let (family, scope) = (family(self.to), self.scope);
        let mut head = vec![family, self.bits, 0, 0, self.table, STATIC, scope, self.kind];
        head.extend(self.flags.to_ne_bytes());
        let mut message = Message::new(&head).with(DESTINATION, &octets(self.to));
        for (kind, address) in [(GATEWAY, self.via), (SOURCE, self.source)] {
            if let Some(address) = address {
                message = message.with(kind, &octets(address));
            }
        }
        message.with(OUT, &self.link.to_ne_bytes())
    }
}

fn family(address: IpAddr) -> u8 {
    if address.is_ipv4() { INET } else { INET6 }
}

fn all_bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// Returns whether the kernel has IPv6 (was not started with `ipv6.disable=1`). Without it, IPv6
/// addresses are allocated but not configured.
fn has_ipv6() -> bool {
    std::path::Path::new("/proc/sys/net/ipv6").exists()
}

/// The hardware address with this number, of which there are 2^24. Locally administered, and the same on every pair:
/// each is a wire of its own.
fn hardware(number: u32) -> [u8; 6] {
    let [_, a, b, c] = number.to_be_bytes();
    [0x02, 0x64, 0x6d, a, b, c]
}
