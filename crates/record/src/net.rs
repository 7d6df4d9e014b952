//! The configuration of a private network stack (network_namespaces(7)): one that processes have
//! made, or the container's own. Sockets in a stack that processes have made refer to it
//! ([`crate::Object::net`]).

use serde::{Deserialize, Serialize};

use crate::Bytes;

/// All differences from a new stack.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Net {
    /// The loopback device is up.
    #[serde(default)]
    pub up: bool,
    /// Its other devices, in the order in which they are made.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<Link>,
    /// Addresses, without those that the kernel assigns by itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<Said>,
    /// Routes, without those that come with an address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Said>,
    /// Routing rules, without the kernel's three.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<Said>,
    /// Tables of packet filters, in the format of libnftables-json(5); empty if there are none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub filters: String,
    /// Settings that differ from a new stack, in the order in which they are written: paths below
    /// `/proc/sys/net`, and values.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub settings: Vec<(String, String)>,
    /// Settings that a new stack had from the host of the checkpoint ([`crate::check::setting::is_inherited`]), in the
    /// order in which they are written, before `settings`. A host with other ones gives them to a new stack, too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inherited: Vec<(String, String)>,
}

impl Net {
    /// Whether it is unchanged, so that a process could have made it without rights over it.
    pub fn is_new(&self) -> bool {
        *self == self.new_one()
    }

    /// A new stack on the host of the checkpoint.
    fn new_one(&self) -> Self {
        Self { inherited: self.inherited.clone(), ..Self::default() }
    }

    /// Whether it is new except for its loopback device, which is up.
    pub fn is_only_up(&self) -> bool {
        *self == Self { up: true, ..self.new_one() }
    }
}

/// A network device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Its number.
    pub number: u32,
    /// Its name.
    pub name: String,
    /// Its kind.
    pub kind: LinkKind,
    /// Its link-layer address.
    pub address: Bytes,
    /// The largest packet, in bytes.
    pub mtu: u32,
    /// The length of its queue, in packets.
    pub queue: u32,
    /// `IFF_UP` and other configurable flags.
    pub flags: u32,
    /// The bridge of this port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub master: Option<u32>,
}

/// Kinds of devices that are made again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum LinkKind {
    /// A device that drops all packets.
    Dummy,
    /// One end of a connected pair (veth(4)).
    Veth {
        /// The number of the other end.
        peer: u32,
        /// The stack of the other end, if that is another one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        elsewhere: Option<Elsewhere>,
    },
    /// A bridge.
    Bridge {
        /// Options of `IFLA_BR_*` that differ from a new bridge.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        options: Vec<(u16, Bytes)>,
    },
}

/// A network stack of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Elsewhere {
    /// The container's own.
    Container,
    /// The stack of an object.
    Object(usize),
}

/// An address, a route or a routing rule, in the form in which rtnetlink(7) reports and takes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Said {
    /// The structure at the start.
    pub head: Bytes,
    /// The configurable attributes, by number.
    pub attributes: Vec<(u16, Bytes)>,
}
