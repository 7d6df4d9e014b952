//! rtnetlink(7): numbers that several crates use for devices, addresses, neighbours and routes.

use super::message::Message;

/// Makes or changes a device (`RTM_NEWLINK`).
pub const NEW_LINK: u16 = libc::RTM_NEWLINK;
/// Removes a device.
pub const REMOVE_LINK: u16 = libc::RTM_DELLINK;
/// Requests devices.
pub const GET_LINK: u16 = libc::RTM_GETLINK;
/// Adds an address.
pub const NEW_ADDRESS: u16 = libc::RTM_NEWADDR;
/// Adds a route.
pub const NEW_ROUTE: u16 = libc::RTM_NEWROUTE;
/// Requests routes.
pub const GET_ROUTE: u16 = libc::RTM_GETROUTE;
/// Adds a neighbour.
pub const NEW_NEIGHBOUR: u16 = libc::RTM_NEWNEIGH;

/// Bytes of `struct ifinfomsg`, at the start of messages about devices.
pub const LINK_HEAD_BYTES: usize = 16;
/// The number of the loopback device, the first of every stack.
pub const LOOPBACK: u32 = 1;

/// The link-layer address of a device (`IFLA_ADDRESS`).
pub const LINK_ADDRESS: u16 = libc::IFLA_ADDRESS;
/// Its name.
pub const LINK_NAME: u16 = libc::IFLA_IFNAME;
/// Its largest packet, in bytes.
pub const LINK_MTU: u16 = libc::IFLA_MTU;
/// Its kind, and options of that kind.
pub const LINK_INFO: u16 = libc::IFLA_LINKINFO;
/// Its label.
pub const LINK_ALIAS: u16 = libc::IFLA_IFALIAS;
/// The network namespace that it is made in, as a descriptor.
pub const LINK_STACK: u16 = libc::IFLA_NET_NS_FD;
/// Inside [`LINK_INFO`]: the name of the kind.
pub const INFO_KIND: u16 = libc::IFLA_INFO_KIND;
/// Inside [`LINK_INFO`]: the options.
pub const INFO_DATA: u16 = libc::IFLA_INFO_DATA;
/// Inside [`INFO_DATA`] of a connected pair: the message of the other end (`VETH_INFO_PEER`).
pub const PAIR_PEER: u16 = 1;

/// The message of a device: `struct ifinfomsg` with these flags, of which `change` are set.
pub fn link(number: u32, flags: u32, change: u32) -> Message {
    Message::new([0, number, flags, change].map(u32::to_ne_bytes).as_flattened())
}
