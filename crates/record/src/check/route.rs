//! Checks of addresses, routes and routing rules, in the form of rtnetlink(7).

use dormouse_kernel::netlink::{attributes, u16_at};

use crate::{Bytes, Said};

/// The form of the entries of one of the kernel's tables.
#[derive(Debug)]
pub struct Form {
    /// Bytes of the structure at the start.
    pub head_bytes: usize,
    /// Attributes that can be configured.
    pub chosen: &'static [u16],
    /// The attribute [`WAYS`] holds several next hops.
    has_ways: bool,
}

/// `struct ifaddrmsg`: family, prefix, flags, scope, device.
pub const ADDRESS: Form =
    Form { head_bytes: 8, chosen: &[1, 2, 3, 4, LIFETIME, FLAGS, 9], has_ways: false };
/// `struct rtmsg`: family, prefixes, service, table, protocol, scope, kind, flags.
pub const ROUTE: Form =
    Form { head_bytes: 12, chosen: &[1, 2, OUT, 5, 6, 7, 8, WAYS, 15, 18, 20], has_ways: true };
/// `struct fib_rule_hdr`: the same, except for the action and unused fields.
pub const RULE: Form = Form {
    head_bytes: 12,
    chosen: &[1, 2, 3, 4, 6, 10, 11, 13, 14, 15, 16, 17, 20, 21, 22, 23, 24],
    has_ways: false,
};

/// Of an address (`IFA_*`): the preferred and valid lifetimes, and since when.
pub const LIFETIME: u16 = 6;
/// Of an address (`IFA_*`): flags.
pub const FLAGS: u16 = 8;
/// Of a route (`RTA_*`): the device.
pub const OUT: u16 = 4;
/// Of a route (`RTA_*`): several next hops.
pub const WAYS: u16 = 9;
/// `RTNH_F_ONLINK`; the others show the state of the device.
pub const ON_LINK: u32 = 4;
/// `struct rtnexthop`: length, flags, weight, device; attributes behind it.
const WAY_HEAD: usize = 8;
/// The offset of the flags in it.
pub const WAY_FLAGS: usize = 2;
/// LIMIT: some 200 next hops.
const WAYS_BYTES_MAX: usize = 4096;

impl Form {
    /// Checks that a record can be an entry of this table.
    pub fn is_sound(&self, said: &Said) -> bool {
        let fits = |(kind, value): &(u16, Bytes)| match *kind {
            WAYS if self.has_ways => value.0.len() <= WAYS_BYTES_MAX && are_ways(&value.0),
            kind => self.chosen.contains(&kind) && value.0.len() <= 256,
        };
        said.head.0.len() == self.head_bytes
            && said.attributes.len() <= self.chosen.len()
            && said.attributes.iter().all(fits)
    }
}

/// Checks that several next hops are valid: each has a gateway, which may be of another family, and
/// a realm, and nothing else.
fn are_ways(mut rest: &[u8]) -> bool {
    const MAY_HAVE: [u16; 3] = [5, 11, 18];
    while !rest.is_empty() {
        let way = u16_at(rest, 0).map(usize::from).and_then(|length| rest.get(..length));
        let has = way.and_then(|way| attributes(way.get(WAY_HEAD..)?));
        let (Some(way), Some(has)) = (way, has) else { return false };
        let is_known = has.iter().all(|(kind, _)| MAY_HAVE.contains(kind));
        if !is_known || u32::from(way[WAY_FLAGS]) & !ON_LINK != 0 {
            return false;
        }
        rest = rest.get(way.len().next_multiple_of(4)..).unwrap_or_default();
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_hops_have_gateways_and_nothing_else() {
        let sound = |ways: &[u8]| {
            let attributes = vec![(WAYS, Bytes(ways.to_vec()))];
            ROUTE.is_sound(&Said { head: Bytes(vec![0; 12]), attributes })
        };
        let good = [16, 0, 0, 1, 70, 0, 0, 0, 8, 0, 5, 0, 10, 1, 2, 3];
        let with = |at: usize, value: u8| {
            let mut ways = good;
            ways[at] = value;
            ways
        };
        assert!(sound(&good) && sound(&[good, good].concat()));
        // The length, a flag of the device's state, a tunnel.
        for (at, value) in [(0, 0), (0, 4), (0, 99), (2, 1), (10, 22)] {
            assert!(!sound(&[good, with(at, value)].concat()), "{at}");
        }
        assert!(!sound(&good[..7]) && !sound(&good.repeat(300)));
    }
}
