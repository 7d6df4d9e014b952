//! Addresses, routes and routing rules: the kernel reports and takes them in the same form.

use std::net::IpAddr;

use rustix::io::Errno;

use super::link::LOOPBACK;
use super::message::{Body, NEW, ask, request};
use crate::format::{Bytes, Said};
use crate::netlink::{attributes, u16_at, u32_at};

/// One of the kernel's tables.
pub(crate) struct Table {
    /// Kinds of messages: to request all, and to make one.
    list: u16,
    make: u16,
    /// Bytes of the structure at the start.
    head: usize,
    /// Attributes that can be configured.
    chosen: &'static [u16],
    /// The name of an entry.
    name: &'static str,
}

/// `struct ifaddrmsg`: family, prefix, flags, scope, device.
pub(crate) const ADDRESSES: Table = Table {
    list: 22,
    make: 20,
    head: 8,
    chosen: &[1, 2, 3, 4, LIFETIME, FLAGS, 9],
    name: "an address",
};
/// `struct rtmsg`: family, prefixes, service, table, protocol, scope, kind, flags.
pub(crate) const ROUTES: Table = Table {
    list: 26,
    make: 24,
    head: 12,
    chosen: &[1, 2, OUT, 5, 6, 7, 8, WAYS, 15, 18, 20],
    name: "a route",
};
/// `struct fib_rule_hdr`: the same, except for the action and unused fields.
pub(crate) const RULES: Table = Table {
    list: 34,
    make: 32,
    head: 12,
    chosen: &[1, 2, 3, 4, 6, 10, 11, 13, 14, 15, 16, 17, 20, 21, 22, 23, 24],
    name: "a rule of routing",
};

/// Of an address (`IFA_*`): the preferred and valid lifetimes, and since when; flags.
const LIFETIME: u16 = 6;
const FLAGS: u16 = 8;
/// Of a route (`RTA_*`): the device, several next hops, and when it was last used.
const OUT: u16 = 4;
const WAYS: u16 = 9;
const CACHE: u16 = 12;
/// Flags of `IFA_F_*` that are configured, or follow from the order: all except those by which the
/// kernel shows the progress of an address.
const ADDRESS_FLAGS: u32 = !(0x02 | 0x04 | 0x08 | 0x40);
/// No duplicate address detection (`IFA_F_NODAD`): the address was the stack's own.
const NOT_ASKED: u32 = 0x02;
/// `RTNH_F_ONLINK`; the others show the state of the device.
const ON_LINK: u32 = 4;
/// `FIB_RULE_INVERT`; the others show whether the device exists.
const INVERT: u32 = 2;
/// `struct rtnexthop`: length, flags, weight, device; attributes behind it.
const WAY_HEAD: usize = 8;
const WAY_FLAGS: usize = 2;
/// LIMIT: some 200 next hops.
const WAYS_BYTES_MAX: usize = 4096;
/// `RTPROT_KERNEL`.
const BY_KERNEL: u8 = 2;

/// One entry of a table.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    /// A name for messages.
    pub(super) name: String,
    /// Its record.
    pub(super) said: Said,
    /// Everything that must be equal in a copy, configured or not.
    pub(super) told: Vec<u8>,
    /// The kernel may add such an entry by itself, at any time.
    pub(super) may_come: bool,
}

impl Table {
    /// Checks that a record can be of this table.
    pub(crate) fn is_sound(&self, said: &Said) -> bool {
        let fits = |(kind, value): &(u16, Bytes)| match *kind {
            WAYS if self.list == ROUTES.list => {
                value.0.len() <= WAYS_BYTES_MAX && are_ways(&value.0)
            }
            kind => self.chosen.contains(&kind) && value.0.len() <= 256,
        };
        said.head.0.len() == self.head
            && said.attributes.len() <= self.chosen.len()
            && said.attributes.iter().all(fits)
    }

    /// All entries of the calling thread's stack, except routes that the kernel has made for an
    /// address: those are made again with the address.
    pub(super) fn all(&self) -> Result<Vec<Seen>, Errno> {
        let mut all = Vec::new();
        ask(self.list, &vec![0; self.head], |body| {
            let mut head = body.get(..self.head)?.to_vec();
            let found = attributes(body.get(self.head.next_multiple_of(4)..)?)?;
            let get = |kind| found.iter().find(|(one, _)| *one == kind).map(|(_, value)| *value);
            let link = match self.list {
                22 => u32_at(&head, 4),
                26 => get(OUT).and_then(|value| u32_at(value, 0)),
                _ => None,
            };
            let is_of_loopback = link == Some(LOOPBACK);
            if self.list == ROUTES.list && head[5] == BY_KERNEL && link.is_some() && !is_of_loopback
            {
                return Some(());
            }
            self.clean(&mut head);
            let address = get(1).and_then(address);
            let may_come = self.list == ADDRESSES.list
                && !is_of_loopback
                && matches!(address, Some(IpAddr::V6(ip)) if ip.is_unicast_link_local());
            let mut said = Said { head: Bytes(head.clone()), attributes: Vec::new() };
            let mut told = head;
            for (kind, value) in &found {
                let mut value = value.to_vec();
                match *kind {
                    FLAGS if self.list == ADDRESSES.list => mask(&mut value, 0, ADDRESS_FLAGS),
                    // Since when, by a clock of the host.
                    LIFETIME if self.list == ADDRESSES.list => {
                        value.iter_mut().skip(8).for_each(|b| *b = 0);
                    }
                    WAYS if self.list == ROUTES.list => {
                        let mut at = 0;
                        while let Some(length) = u16_at(&value, at).filter(|length| *length >= 8) {
                            let flags = value.get_mut(at + WAY_FLAGS);
                            flags.into_iter().for_each(|flags| *flags &= ON_LINK as u8);
                            at += usize::from(length).next_multiple_of(4);
                        }
                    }
                    _ => {}
                }
                let passes = match self.list {
                    22 => *kind == LIFETIME || !self.chosen.contains(kind),
                    _ => *kind == CACHE,
                };
                if !passes {
                    told.extend(kind.to_ne_bytes());
                    told.extend(&value);
                }
                if self.chosen.contains(kind) {
                    said.attributes.push((*kind, Bytes(value)));
                }
            }
            let bits = said.head.0[1];
            let name = match (self.list, address) {
                (22, Some(ip)) => format!("the address {ip}/{bits}"),
                (26, Some(ip)) => format!("a route to {ip}/{bits}"),
                _ => self.name.to_owned(),
            };
            all.push(Seen { name, said, told, may_come });
            Some(())
        })?;
        Ok(all)
    }

    /// Clears the flags that are not configured.
    fn clean(&self, head: &mut [u8]) {
        match self.list {
            22 => head[2] &= ADDRESS_FLAGS as u8,
            26 => mask(head, 8, ON_LINK),
            _ => mask(head, 8, INVERT),
        }
    }

    /// Makes an entry. An existing one is as good.
    fn make(&self, said: &Said) -> Result<(), Errno> {
        let (mut head, is_six) =
            (said.head.0.clone(), said.head.0.first() == Some(&(libc::AF_INET6 as u8)));
        let is_address = self.list == ADDRESSES.list;
        if is_address && is_six {
            head[2] |= NOT_ASKED as u8;
        }
        let mut body = Body::new(&head);
        for (kind, value) in &said.attributes {
            let mut value = value.0.clone();
            if is_address
                && is_six
                && *kind == FLAGS
                && let Some(flags) = u32_at(&value, 0)
            {
                value = (flags | NOT_ASKED).to_ne_bytes().to_vec();
            }
            body = body.with(*kind, &value);
        }
        match request(self.make, NEW, &body) {
            Err(Errno::EXIST) => Ok(()),
            made => made,
        }
    }

    /// Makes all entries: one that needs another, such as the route to its gateway, after that.
    pub(super) fn make_all(&self, all: &[Said]) -> Result<(), Errno> {
        let mut rest: Vec<&Said> = all.iter().collect();
        while !rest.is_empty() {
            let mut failed = Ok(());
            let before = rest.len();
            rest.retain(|said| match self.make(said) {
                Ok(()) => false,
                Err(e) => {
                    failed = Err(e);
                    true
                }
            });
            if rest.len() == before {
                return failed;
            }
        }
        Ok(())
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

/// Entries that are not in another stack.
pub(super) fn missing(all: &[Seen], there: &[Seen]) -> Vec<Said> {
    let lacks = |seen: &&Seen| !there.iter().any(|other| other.told == seen.told);
    all.iter().filter(lacks).map(|seen| seen.said.clone()).collect()
}

fn mask(bytes: &mut [u8], at: usize, kept: u32) {
    if let Some(value) = u32_at(bytes, at) {
        bytes[at..at + 4].copy_from_slice(&(value & kept).to_ne_bytes());
    }
}

fn address(value: &[u8]) -> Option<IpAddr> {
    match value.len() {
        4 => Some(IpAddr::from(<[u8; 4]>::try_from(value).ok()?)),
        16 => Some(IpAddr::from(<[u8; 16]>::try_from(value).ok()?)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_hops_have_gateways_and_nothing_else() {
        let sound = |ways: &[u8]| {
            let attributes = vec![(WAYS, Bytes(ways.to_vec()))];
            ROUTES.is_sound(&Said { head: Bytes(vec![0; 12]), attributes })
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
