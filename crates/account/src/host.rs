//! Hosts with which accounts are shared.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use dormouse_model::Invalid;
use serde::{Deserialize, Serialize};

/// LIMIT: hosts and networks with which one machine shares accounts. The programs in the kernel have a table of this
/// size.
pub const HOSTS_MAX: usize = 1024;

/// The address of a host, or a network of such addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AgreedHost {
    address: IpAddr,
    bits: u8,
}

const FORM: &str = "an address such as 192.0.2.7, or a network such as 192.0.2.0/24 or 2001:db8::/64, which \
                    begins with its own address and is not all addresses";

impl AgreedHost {
    /// Returns its address and how many of the first bits count, with IPv4 mapped into IPv6.
    pub fn mapped(&self) -> (Ipv6Addr, u32) {
        let before = if self.address.is_ipv4() { 96 } else { 0 };
        (mapped(self.address), before + u32::from(self.bits))
    }

    /// Returns whether this is its address, or one of its network.
    pub fn contains(&self, ip: IpAddr) -> bool {
        let ((own, bits), ip) = (self.mapped(), mapped(ip));
        // The last bits, which do not count.
        let rest = u128::MAX.checked_shr(bits).unwrap_or(0);
        (own.to_bits() ^ ip.to_bits()) & !rest == 0
    }

    fn new(address: IpAddr, bits: u8) -> Option<Self> {
        // A mapped address is the IPv4 one: packets have no others.
        let (address, bits) = match address {
            IpAddr::V6(v6) => match v6.to_ipv4_mapped() {
                Some(v4) => (v4.into(), bits.checked_sub(96)?),
                None => (address, bits),
            },
            IpAddr::V4(_) => (address, bits),
        };
        let host = Self { address, bits };
        let (mapped, all) = host.mapped();
        let rest = u128::MAX.checked_shr(all).unwrap_or(0);
        let is_valid = bits > 0 && all <= 128 && mapped.to_bits() & rest == 0;
        is_valid.then_some(host)
    }
}

fn mapped(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

impl FromStr for AgreedHost {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let (address, bits) = text.split_once('/').map_or((text, None), |(a, b)| (a, Some(b)));
        let read = || {
            let address: IpAddr = address.parse().ok()?;
            let most = if address.is_ipv4() { 32 } else { 128 };
            let bits = bits.map_or(Some(most), |bits| bits.parse().ok())?;
            Self::new(address, bits)
        };
        read().ok_or_else(|| Invalid::new("host", text, FORM))
    }
}

impl fmt::Display for AgreedHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let most = if self.address.is_ipv4() { 32 } else { 128 };
        if self.bits == most {
            return self.address.fmt(f);
        }
        write!(f, "{}/{}", self.address, self.bits)
    }
}

impl TryFrom<String> for AgreedHost {
    type Error = Invalid;

    fn try_from(text: String) -> Result<Self, Invalid> {
        text.parse()
    }
}

impl From<AgreedHost> for String {
    fn from(host: AgreedHost) -> Self {
        host.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_is_an_address_or_a_network() {
        let cases = [
            ("192.0.2.7", Some("192.0.2.7"), 128),
            ("192.0.2.7/32", Some("192.0.2.7"), 128),
            ("192.0.2.0/24", Some("192.0.2.0/24"), 120),
            ("2001:db8::/64", Some("2001:db8::/64"), 64),
            ("2001:db8::7", Some("2001:db8::7"), 128),
            ("::ffff:192.0.2.0/120", Some("192.0.2.0/24"), 120),
            ("192.0.2.7/24", None, 0),
            ("2001:db8::1/64", None, 0),
            ("0.0.0.0/0", None, 0),
            ("::/0", None, 0),
            ("::ffff:0:0/95", None, 0),
            ("192.0.2.0/33", None, 0),
            ("2001:db8::/129", None, 0),
            ("192.0.2.7/", None, 0),
            ("host", None, 0),
            ("", None, 0),
        ];
        for (text, shown, bits) in cases {
            let read = text.parse::<AgreedHost>().ok();
            assert_eq!(read.map(|host| host.to_string()).as_deref(), shown, "{text}");
            assert!(read.is_none_or(|host| host.mapped().1 == bits), "{text}: {read:?}");
        }
    }

    #[test]
    fn network_contains_its_addresses_alone() {
        for (host, inside, outside) in [
            ("192.0.2.7", "192.0.2.7", "192.0.2.6"),
            ("192.0.2.7", "::ffff:192.0.2.7", "::192.0.2.7"),
            ("192.0.2.0/24", "192.0.2.255", "192.0.3.0"),
            ("128.0.0.0/1", "255.0.0.1", "127.255.255.255"),
            ("2001:db8::/64", "2001:db8::1:0:0:1", "2001:db8:0:1::"),
            ("2001:db8::7", "2001:db8::7", "2001:db8::6"),
            ("8000::/1", "ffff::", "192.0.2.7"),
        ] {
            let host: AgreedHost = host.parse().unwrap();
            assert!(host.contains(inside.parse().unwrap()), "{host} {inside}");
            assert!(!host.contains(outside.parse().unwrap()), "{host} {outside}");
        }
    }
}
