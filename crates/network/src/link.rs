//! Links, addresses and routes, by netlink. Every function works on the stack of its thread.

use std::future::Future;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, BorrowedFd};

use futures_util::TryStreamExt;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::link::{LinkAttribute, LinkFlags};
use rtnetlink::packet_route::neighbour::NeighbourState;
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteScope, RouteType,
};
use rtnetlink::{Handle, LinkUnspec, LinkVeth, RouteMessageBuilder};

use crate::error::{Error, Result};

/// Linux's routing table for its own addresses (rtnetlink(7)).
const TABLE_LOCAL: u32 = 255;

/// A netlink conversation.
pub(crate) struct Links {
    runtime: tokio::runtime::Runtime,
    handle: Handle,
}

/// A link of the stack.
#[derive(Debug, Clone, Default)]
pub(crate) struct Link {
    pub index: u32,
    pub name: String,
    pub mtu: u32,
    /// The label of an uplink is the runtime directory of its instance.
    pub alias: Option<String>,
}

/// A destination other than everything, with the link it leads to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Destination {
    pub first: Ipv4Addr,
    pub bits: u8,
    pub link: Option<u32>,
}

fn at(step: impl Into<String>) -> impl FnOnce(rtnetlink::Error) -> Error {
    move |source| Error::Netlink { step: step.into(), source }
}

impl Links {
    pub fn open() -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .map_err(Error::file("make an event loop for", "netlink"))?;
        let (connection, handle, _) = {
            let _entered = runtime.enter();
            rtnetlink::new_connection().map_err(Error::file("open a socket for", "netlink"))?
        };
        runtime.spawn(connection);
        Ok(Self { runtime, handle })
    }

    fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    pub fn all(&self) -> Result<Vec<Link>> {
        let links: Vec<_> = self
            .run(self.handle.link().get().execute().try_collect())
            .map_err(at("list the links"))?;
        Ok(links
            .into_iter()
            .filter(|l| !l.header.flags.contains(LinkFlags::Loopback))
            .map(|l| {
                let mut link = Link { index: l.header.index, ..Link::default() };
                for attribute in l.attributes {
                    match attribute {
                        LinkAttribute::IfName(name) => link.name = name,
                        LinkAttribute::Mtu(mtu) => link.mtu = mtu,
                        LinkAttribute::IfAlias(alias) => link.alias = Some(alias),
                        _ => {}
                    }
                }
                link
            })
            .collect())
    }

    pub fn find(&self, name: &str) -> Result<Option<Link>> {
        Ok(self.all()?.into_iter().find(|l| l.name == name))
    }

    pub fn remove(&self, index: u32) -> Result<()> {
        self.run(self.handle.link().del(index).execute()).map_err(at("remove a link"))
    }

    pub fn up(&self, index: u32) -> Result<()> {
        let message = LinkUnspec::new_with_index(index).up().build();
        self.run(self.handle.link().set(message).execute()).map_err(at("set a link up"))
    }

    /// Labels a link (`ip link set alias`).
    pub fn label(&self, index: u32, alias: &str) -> Result<()> {
        let message = LinkUnspec::new_with_index(index).alias(alias).build();
        self.run(self.handle.link().set(message).execute()).map_err(at("label a link"))
    }

    /// A veth pair: `name` here, `peer` in the other namespace. Both have fixed hardware addresses:
    /// the last byte is 1 here and 2 there.
    pub fn add_pair(&self, name: &str, mtu: u32, peer: &str, netns: BorrowedFd<'_>) -> Result<()> {
        let step = format!("make the link '{name}'");
        let passing = format!("{name}p"); // the peer's name until it is where it belongs
        let add = LinkVeth::new(name, &passing).address(hardware(1)).mtu(mtu).build();
        self.run(self.handle.link().add(add).execute()).map_err(at(step.clone()))?;
        let message = LinkUnspec::new_with_name(&passing).address(hardware(2)).mtu(mtu).build();
        self.run(self.handle.link().set(message).execute()).map_err(at(step.clone()))?;
        let index = self.find(&passing)?.map_or(0, |l| l.index);
        let message =
            LinkUnspec::new_with_index(index).name(peer).setns_by_fd(netns.as_raw_fd()).build();
        self.run(self.handle.link().set(message).execute()).map_err(at(step))
    }

    /// Gives a link an address of its own, and a permanent neighbour entry for the other end.
    pub fn add_address(&self, index: u32, own: IpAddr, other: IpAddr, last: u8) -> Result<()> {
        if own.is_ipv6() && !has_ipv6() {
            return Ok(());
        }
        let bits = if own.is_ipv4() { 32 } else { 128 };
        let mut request = self.handle.address().add(index, own, bits).replace();
        // No duplicate address detection: there is no other host on this link.
        request.message_mut().header.flags =
            rtnetlink::packet_route::address::AddressHeaderFlags::Nodad;
        self.run(request.execute()).map_err(at(format!("add the address {own}")))?;
        let neighbour = self
            .handle
            .neighbours()
            .add(index, other)
            .link_layer_address(&hardware(last))
            .state(NeighbourState::Permanent)
            .replace();
        self.run(neighbour.execute()).map_err(at(format!("add the neighbour {other}")))
    }

    fn add_route(&self, message: RouteMessage, what: String) -> Result<()> {
        if message.header.address_family == AddressFamily::Inet6 && !has_ipv6() {
            return Ok(());
        }
        self.run(self.handle.route().add(message).replace().execute())
            .map_err(at(format!("add the route {what}")))
    }

    /// `bits` of `to` by way of a neighbour on the link.
    pub fn add_via(&self, to: IpAddr, bits: u8, via: IpAddr, link: u32) -> Result<()> {
        let what = format!("{to}/{bits} via {via}");
        let message = match (to, via) {
            (IpAddr::V4(to), IpAddr::V4(via)) => RouteMessageBuilder::<Ipv4Addr>::new()
                .destination_prefix(to, bits)
                .gateway(via)
                .output_interface(link)
                .onlink()
                .build(),
            (IpAddr::V6(to), IpAddr::V6(via)) => RouteMessageBuilder::<std::net::Ipv6Addr>::new()
                .destination_prefix(to, bits)
                .gateway(via)
                .output_interface(link)
                .onlink()
                .build(),
            _ => return Ok(()),
        };
        self.add_route(message, what)
    }

    /// Excludes one address from a prefix that is local to this stack: the address is a neighbour
    /// on the link. The table of local addresses is searched first, so the exception is added
    /// there.
    pub fn add_neighbour_route(&self, to: IpAddr, link: u32) -> Result<()> {
        let message = match to {
            IpAddr::V4(to) => RouteMessageBuilder::<Ipv4Addr>::new()
                .destination_prefix(to, 32)
                .scope(RouteScope::Link)
                .table_id(TABLE_LOCAL)
                .output_interface(link)
                .build(),
            IpAddr::V6(to) => RouteMessageBuilder::<std::net::Ipv6Addr>::new()
                .destination_prefix(to, 128)
                .table_id(TABLE_LOCAL)
                .output_interface(link)
                .build(),
        };
        self.add_route(message, format!("{to}"))
    }

    /// Makes every address of a prefix one of this stack's own (AnyIP), on the loopback device.
    /// `source` is what packets to it that have no source yet come from.
    pub fn add_local(&self, to: IpAddr, bits: u8, source: Option<IpAddr>) -> Result<()> {
        let what = format!("local {to}/{bits}");
        let message = match to {
            IpAddr::V4(to) => {
                let mut route = RouteMessageBuilder::<Ipv4Addr>::new()
                    .destination_prefix(to, bits)
                    .kind(RouteType::Local)
                    .scope(RouteScope::Host)
                    .table_id(TABLE_LOCAL)
                    .output_interface(1);
                if let Some(IpAddr::V4(source)) = source {
                    route = route.pref_source(source);
                }
                route.build()
            }
            IpAddr::V6(to) => RouteMessageBuilder::<std::net::Ipv6Addr>::new()
                .destination_prefix(to, bits)
                .kind(RouteType::Local)
                .table_id(TABLE_LOCAL)
                .output_interface(1)
                .build(),
        };
        self.add_route(message, what)
    }

    /// IPv4 destinations of the main table, the default route not among them, and the link of the
    /// default route.
    pub fn destinations(&self) -> Result<(Vec<Destination>, Option<u32>)> {
        let request = self.handle.route().get(RouteMessageBuilder::<Ipv4Addr>::new().build());
        let routes: Vec<RouteMessage> =
            self.run(request.execute().try_collect()).map_err(at("list the routes"))?;
        let (mut found, mut default) = (Vec::new(), None);
        for route in routes {
            if route.header.table != RouteHeader::RT_TABLE_MAIN {
                continue;
            }
            let (mut first, mut link) = (None, None);
            for attribute in &route.attributes {
                match attribute {
                    RouteAttribute::Destination(RouteAddress::Inet(a)) => first = Some(*a),
                    RouteAttribute::Oif(index) => link = Some(*index),
                    _ => {}
                }
            }
            match first {
                Some(first) if route.header.destination_prefix_length > 0 => {
                    let bits = route.header.destination_prefix_length;
                    found.push(Destination { first, bits, link });
                }
                _ => default = default.or(link),
            }
        }
        Ok((found, default))
    }
}

/// Returns whether the kernel has IPv6 (was not started with `ipv6.disable=1`). Without it, IPv6
/// addresses are allocated but not configured.
fn has_ipv6() -> bool {
    std::path::Path::new("/proc/sys/net/ipv6").exists()
}

/// Locally administered, the same on every uplink: each is a wire of its own.
fn hardware(last: u8) -> Vec<u8> {
    vec![0x02, 0x64, 0x6d, 0, 0, last]
}
