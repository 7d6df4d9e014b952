//! Containers with a stack of their own in a trust domain (`--net private`): a veth pair between the two stacks.
//!
//! ```text
//! stack of the container                        stack of the domain
//! eth0: its addresses, /32 and /128      ────>  dpNUMBER: a route to each of its addresses
//!       default route: the domain's address     forwards to other pairs, to its own addresses, and to the uplink
//! ```
//!
//! A pair is a link of two, without a bridge: containers have no link layer in common. Their addresses are of the
//! pool, as in address mode, so names, published ports, masquerading and traffic classes are the same code. The
//! domain's whole pool is local to its stack; the routes of a pair are exceptions in the table of local addresses.
//!
//! The number of the domain's end of a pair is that of the container's address. The program of the domain's devices
//! (`dormouse_bpf::address`, ARRIVE) knows by it which sources a packet from there may have. The neighbours at both
//! ends are permanent entries, so no packet waits for ARP. The program also lets a container ask for its gateway,
//! because setting a device down removes its entries.
//!
//! A pair ends with the stack of the container, some time after its last process. [`Network::disconnect`] does not
//! wait for that. [`Network::connect`] removes a pair that an interrupted command has left.

use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dormouse_bpf::address;
use dormouse_kernel::mount::{self, MountAttr};
use dormouse_kernel::netlink::route;
use dormouse_kernel::weakened;
use dormouse_model::{ContainerId, Name};

use crate::domain::INSIDE;
use crate::error::{Error, Result};
use crate::ground::{Domain, Network, new_stack};
use crate::link::{End, Links};
use crate::ready::read_ready;
use crate::stack;
use crate::store::{CHUNK, Plan};

/// The device at the container's end, and its number.
const DEVICE: &str = "eth0";
const DEVICE_INDEX: u32 = route::LOOPBACK + 1;
/// The label of the domain's end of a pair that is complete at both ends.
const CONNECTED: &str = "connected";
/// The number of the hardware address at the domain's end.
const DOMAIN_END: u32 = 1;
/// The address that the kernel makes from it, which answers neighbour solicitations. The domain's own IPv6 address is
/// on another device, and does not.
const LINK_LOCAL: Ipv6Addr =
    Ipv6Addr::new(0xfe80, 0, 0, 0, 0x64, 0x6dff, 0xfe00, DOMAIN_END as u16);

/// The name of the domain's end of a pair.
fn device(number: u32) -> String {
    format!("dp{number:x}")
}

impl Network {
    /// Connects the stack of a container to its domain, unless it was connected before (`again`) and still is.
    /// Returns a mount of the sysfs of that stack (detached, read-only).
    pub fn connect(
        &self,
        domain: &Domain,
        id: &ContainerId,
        netns: BorrowedFd<'_>,
        addresses: &[IpAddr],
        again: bool,
    ) -> Result<OwnedFd> {
        let (led, store) = self.route(domain, id, addresses)?;
        drop(store); // ORDER: the lock of the domains comes before that of the table
        self.add_further(&led)?;
        let gateways = [led.plan.v4(domain.gateway()).into(), LINK_LOCAL.into()];
        let name = device(led.first);
        let pair = End { name: &name, index: address::pair(led.first), hardware: DOMAIN_END };
        let connected = stack::inside(domain.netns.as_fd(), || {
            let mut links = Links::open()?;
            match links.find(&name)? {
                Some(old) if again && old.alias.as_deref() == Some(CONNECTED) => return Ok(true),
                // Of an earlier start that was not cleaned up, or of a wake that was killed here.
                Some(old) => links.remove(old.index)?,
                None => {}
            }
            become_router()?;
            let uplink = links.find(INSIDE)?;
            let mtu = uplink.as_ref().map_or(1500, |link| link.mtu);
            let end = End { name: DEVICE, index: DEVICE_INDEX, hardware: led.first };
            links.add_pair(&pair, &end, mtu, netns)?;
            // ORDER: before the device is up, so before any packet.
            self.guard(&mut links, &led.plan, pair.index)?;
            stack::sysctl_if_there(&format!("net/ipv6/conf/{name}/disable_ipv6"), "0");
            links.up(pair.index)?;
            for to in led.numbers.iter().flat_map(|number| led.plan.addresses(*number)) {
                links.add_neighbour(pair.index, to, led.first)?;
                links.add_neighbour_route(to, pair.index)?;
            }
            Ok(false)
        })?;
        let sys = stack::inside(netns, || {
            if !connected {
                set_up(&led.plan, &led.numbers, gateways)?;
            }
            mount_sys()
        })?;
        if !connected {
            // ORDER: last.
            stack::inside(domain.netns.as_fd(), || Links::open()?.label(pair.index, CONNECTED))?;
        }
        Ok(sys)
    }

    /// Makes a stack for an asleep container whose own one is gone, with the settings that a start gives it. The
    /// container has no capability over it, and needs none.
    pub fn new_stack(&self) -> Result<OwnedFd> {
        let netns = new_stack()?;
        stack::inside(netns.as_fd(), || {
            Links::open()?.up(route::LOOPBACK)?;
            stack::sysctl("net/ipv4/ip_unprivileged_port_start", "0")?;
            // LIMIT: the kernel takes no larger group id.
            stack::sysctl("net/ipv4/ping_group_range", "0 2147483647")?;
            stack::sysctl_if_there("net/unix/max_dgram_qlen", "512");
            Ok(())
        })?;
        Ok(netns)
    }

    /// Has the program of the domain's devices decide about the packets from a pair. In the domain's stack.
    fn guard(&self, links: &mut Links, plan: &Plan, pair: u32) -> Result<()> {
        if weakened("pair-guard") || self.is_without(address::ARRIVE) {
            return Ok(());
        }
        let mut add = |program: BorrowedFd<'_>| {
            // KERNEL(6.6): TCX waits for a grace period of RCU, 5 to 15 ms. It is for kernels without the other way.
            match links.add_program(pair, program, address::ARRIVE) {
                Err(_) => Ok(address::attach_arrive(pair, program)?),
                added => added,
            }
        };
        // Found at the loopback device within microseconds, where loading takes tens of milliseconds.
        match address::arrive_of(route::LOOPBACK)? {
            Some(program) => add(program.as_fd()),
            None => self.programs(plan)?.with_arrive(add),
        }
    }

    /// Removes the pair of a container, if it has one. Its addresses stay its own.
    pub fn disconnect(&self, id: &ContainerId) -> Result<()> {
        let Some(store) = self.existing_store()? else { return Ok(()) };
        let Some(holding) = store.holding(id)? else { return Ok(()) };
        drop(store);
        let Some(first) = holding.numbers.first() else { return Ok(()) };
        let Some((_, netns)) = read_ready(&self.domain_dir(&holding.domain))? else {
            return Ok(());
        };
        stack::inside(netns.as_fd(), || {
            let mut links = Links::open()?;
            match links.find(&device(*first))? {
                Some(link) => links.remove(link.index),
                None => Ok(()),
            }
        })
    }

    /// Returns whether a container with a stack of its own is connected to a domain.
    pub(crate) fn has_pairs(&self, name: &Name) -> Result<bool> {
        let Some((_, netns)) = read_ready(&self.domain_dir(name))? else { return Ok(false) };
        let links = stack::inside(netns.as_fd(), || Links::open()?.all())?;
        Ok(links.iter().any(|link| address::is_pair(link.index)))
    }
}

impl Domain {
    /// The number of its own address.
    fn gateway(&self) -> u32 {
        self.ready.chunks.first().copied().unwrap_or_default() * CHUNK + 2
    }
}

/// Makes this thread's stack, that of a domain, forward packets. Forwarding is the setting of the whole stack: its
/// devices are the uplink and pairs.
///
/// A new stack may inherit settings of the host's (`net.core.devconf_inherit_init_net`), so forwarding says nothing
/// about the others. A device takes the default ones when it is made.
fn become_router() -> Result<()> {
    const IPV4: &str = "net/ipv4/ip_forward";
    let is_set = |path: &str| {
        std::fs::read_to_string(format!("/proc/sys/{path}")).is_ok_and(|value| value.trim() == "1")
    };
    if !is_set(IPV4) {
        stack::sysctl(IPV4, "1")?;
    }
    // Changes nothing, and takes no lock, where they have these values.
    for which in ["all", "default", INSIDE] {
        stack::sysctl_if_there(&format!("net/ipv4/conf/{which}/forwarding"), "1");
        // A container is no router, and the domain is the only way from a container.
        stack::sysctl_if_there(&format!("net/ipv4/conf/{which}/accept_redirects"), "0");
        stack::sysctl_if_there(&format!("net/ipv4/conf/{which}/send_redirects"), "0");
        stack::sysctl_if_there(&format!("net/ipv6/conf/{which}/accept_redirects"), "0");
    }
    for which in ["all", "default"] {
        let ipv6 = format!("net/ipv6/conf/{which}/forwarding");
        if !is_set(&ipv6) {
            stack::sysctl_if_there(&ipv6, "1");
        }
    }
    Ok(())
}

/// Gives the container's end its addresses and routes, in the container's stack.
fn set_up(plan: &Plan, numbers: &[u32], gateways: [IpAddr; 2]) -> Result<()> {
    // The host's default for new stacks may be 1.
    stack::sysctl_if_there(&format!("net/ipv6/conf/{DEVICE}/disable_ipv6"), "0");
    // No link-local address: with its route, packets to any number of link-local addresses would each make an entry in
    // the machine's one table of neighbours. The container's own address asks for the gateway.
    stack::sysctl_if_there(&format!("net/ipv6/conf/{DEVICE}/addr_gen_mode"), "1");
    stack::sysctl_if_there(&format!("net/ipv6/conf/{DEVICE}/accept_ra"), "0");
    stack::sysctl_if_there(&format!("net/ipv6/conf/{DEVICE}/accept_dad"), "0");
    let mut links = Links::open()?;
    for own in numbers.iter().flat_map(|number| plan.addresses(*number)) {
        links.add_address(DEVICE_INDEX, own)?;
    }
    links.up(DEVICE_INDEX)?;
    for via in gateways {
        links.add_neighbour(DEVICE_INDEX, via, DOMAIN_END)?;
        let all = if via.is_ipv4() { [0; 4].into() } else { IpAddr::from([0u8; 16]) };
        links.add_via(all, 0, via, DEVICE_INDEX)?;
    }
    Ok(())
}

/// Mounts the sysfs of this thread's stack.
fn mount_sys() -> Result<OwnedFd> {
    let step = |e| Error::Step("mount the sysfs of a container's network namespace", e);
    let context = mount::FsContext::open("sysfs").map_err(step)?;
    let mut attr = MountAttr::NOSUID | MountAttr::NODEV | MountAttr::NOEXEC;
    attr.set(MountAttr::RDONLY, !weakened("read-only-sys"));
    context.create(attr).map_err(step)
}
