//! Addresses, routes and routing rules: the kernel reports and takes them in the same form.

use std::net::IpAddr;

use dormouse_kernel::error::Result;
use dormouse_kernel::netlink::{Message, NEW, attributes, u16_at, u32_at};
use dormouse_record::check::link::LOOPBACK;
use dormouse_record::check::route::{self, FLAGS, Form, LIFETIME, ON_LINK, OUT, WAY_FLAGS, WAYS};
use dormouse_record::{Bytes, Said};

use super::message::{list, request};

/// One of the kernel's tables.
pub(super) struct Table {
    /// Kinds of messages: to request all, and to make one.
    list: u16,
    make: u16,
    /// The form of its entries.
    form: &'static Form,
    /// The name of an entry.
    name: &'static str,
}

pub(super) const ADDRESSES: Table =
    Table { list: 22, make: 20, form: &route::ADDRESS, name: "an address" };
pub(super) const ROUTES: Table = Table { list: 26, make: 24, form: &route::ROUTE, name: "a route" };
pub(super) const RULES: Table =
    Table { list: 34, make: 32, form: &route::RULE, name: "a rule of routing" };

/// Of a route (`RTA_*`): when it was last used.
const CACHE: u16 = 12;
/// Flags of `IFA_F_*` that are configured, or follow from the order: all except those by which the
/// kernel shows the progress of an address.
const ADDRESS_FLAGS: u32 = !(0x02 | 0x04 | 0x08 | 0x40);
/// No duplicate address detection (`IFA_F_NODAD`): the address was the stack's own.
const NOT_ASKED: u32 = 0x02;
/// `FIB_RULE_INVERT`; the others show whether the device exists.
const INVERT: u32 = 2;
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
    pub(super) reported: Vec<u8>,
    /// The kernel may add such an entry by itself, at any time.
    pub(super) may_come: bool,
}

impl Table {
    /// All entries of the calling thread's stack, except routes that the kernel has made for an
    /// address: those are made again with the address.
    pub(super) fn all(&self) -> Result<Vec<Seen>> {
        let mut all = Vec::new();
        list(self.list, &vec![0; self.form.head_bytes], |body| {
            let mut head = body.get(..self.form.head_bytes)?.to_vec();
            let found = attributes(body.get(self.form.head_bytes.next_multiple_of(4)..)?)?;
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
            let mut reported = head;
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
                    22 => *kind == LIFETIME || !self.form.chosen.contains(kind),
                    _ => *kind == CACHE,
                };
                if !passes {
                    reported.extend(kind.to_ne_bytes());
                    reported.extend(&value);
                }
                if self.form.chosen.contains(kind) {
                    said.attributes.push((*kind, Bytes(value)));
                }
            }
            let bits = said.head.0[1];
            let name = match (self.list, address) {
                (22, Some(ip)) => format!("the address {ip}/{bits}"),
                (26, Some(ip)) => format!("a route to {ip}/{bits}"),
                _ => self.name.to_owned(),
            };
            all.push(Seen { name, said, reported, may_come });
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
    fn make(&self, said: &Said) -> Result<()> {
        let (mut head, is_six) =
            (said.head.0.clone(), said.head.0.first() == Some(&(libc::AF_INET6 as u8)));
        let is_address = self.list == ADDRESSES.list;
        if is_address && is_six {
            head[2] |= NOT_ASKED as u8;
        }
        let mut body = Message::new(&head);
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
            Err(e) if e.errno() == libc::EEXIST => Ok(()),
            made => made,
        }
    }

    /// Makes all entries: one that needs another, such as the route to its gateway, after that.
    pub(super) fn make_all(&self, all: &[Said]) -> Result<()> {
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

/// Entries that are not in another stack.
pub(super) fn missing(all: &[Seen], there: &[Seen]) -> Vec<Said> {
    let lacks = |seen: &&Seen| !there.iter().any(|other| other.reported == seen.reported);
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
