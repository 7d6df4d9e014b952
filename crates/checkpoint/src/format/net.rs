//! What is set up in a network stack (network_namespaces(7)) that processes have to themselves: one that they
//! have made, or the container's own. Sockets in one that they have made name it ([`super::Object::net`]).

use serde::{Deserialize, Serialize};

use super::Bytes;

/// All that a new stack has not.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Net {
    /// The loopback device is up.
    #[serde(default)]
    pub up: bool,
    /// Its other devices, in the order in which they are made.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<Link>,
    /// Addresses that the kernel has not given by itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<Said>,
    /// Routes that no address brings along.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Said>,
    /// Rules of routing beyond the kernel's three.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<Said>,
    /// Tables of packet filters, as libnftables-json(5) has them; empty where there are none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub filters: String,
    /// Settings that are not as in a new stack, in the order in which they are made: paths below
    /// `/proc/sys/net`, and values.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub settings: Vec<(String, String)>,
}

impl Net {
    /// Whether it is as somebody may leave it who has no rights over it but to make it.
    pub(crate) fn is_new(&self) -> bool {
        *self == Self::default()
    }
}

/// A network device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Its number.
    pub number: u32,
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: LinkKind,
    /// Its address of the link layer.
    pub address: Bytes,
    /// The largest packet, in bytes.
    pub mtu: u32,
    /// The length of its queue, in packets.
    pub queue: u32,
    /// `IFF_UP` and others that can be chosen.
    pub flags: u32,
    /// The bridge that it is a port of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub master: Option<u32>,
}

/// Kinds of devices that are made again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum LinkKind {
    /// One that swallows all.
    Dummy,
    /// One of two that are connected (veth(4)).
    Veth {
        /// The number of the other.
        peer: u32,
        /// The stack that the other is in, where it is another one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        elsewhere: Option<Elsewhere>,
    },
    /// A bridge.
    Bridge {
        /// `IFLA_BR_*` that are not as in a new one.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        options: Vec<(u16, Bytes)>,
    },
}

/// A stack of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Elsewhere {
    /// The container's own.
    Container,
    /// That of an object.
    Object(usize),
}

/// An address, a route, a rule of routing, as rtnetlink(7) tells it and takes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Said {
    /// The structure at its begin.
    pub head: Bytes,
    /// Attributes by number, of those that can be chosen.
    pub attributes: Vec<(u16, Bytes)>,
}
