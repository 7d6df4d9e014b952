//! Network namespaces (network_namespaces(7)) that processes have made for themselves: with nothing but a
//! loopback device. Sockets in one name it ([`super::Object::net`]).

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// One of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Net {
    /// The loopback device is up.
    #[serde(default)]
    pub up: bool,
    /// Addresses of the loopback device that the kernel has not given it, and the lengths of their
    /// prefixes in bits.
    #[serde(default)]
    pub addresses: Vec<(IpAddr, u8)>,
    /// Settings that are not as in a new namespace, in the order in which they are made: paths below
    /// `/proc/sys/net`, and values.
    #[serde(default)]
    pub settings: Vec<(String, String)>,
}

impl Net {
    /// Whether it is as somebody may leave it who has no rights over it but to make it.
    pub(crate) fn is_new(&self) -> bool {
        *self == Self::default()
    }
}
