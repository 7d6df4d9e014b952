//! Bandwidth of containers: a tree of classes at both ends of the uplink of their domain.
//!
//! ```text
//! eth0 in the domain   sends what containers send      }  tree -> class 1, the uplink
//! dmXXXXXXXX           sends what containers receive   }             -> a class for each container with a contract
//!                                                      }             -> the class of all others
//! ```
//!
//! A program at each end (`dormouse_bpf::rate`) sets the class of a packet by the address of its container. Both
//! devices are ours, so no queueing of the operator is touched. Trees, classes and programs end with the devices.
//! Traffic inside a domain goes over the loopback device and has no classes.
//!
//! A tree is made for the first container of a domain with a contract, and removed with the last one. Other domains
//! have none. The map of the programs says which classes are in use: a class without an address is the rest of an
//! interrupted call, and the next container gets it. A map without an address is the rest of an interrupted call as
//! well, whose trees may be gone: they are made anew.
//!
//! LIMIT: trees of several domains do not know each other. A guarantee holds among the containers of one domain.

use std::net::IpAddr;
use std::os::fd::AsFd;

use dormouse_bpf::rate::{self, Classes, Direction, Loaded};
use dormouse_kernel::netlink::traffic::{self, Class};
use dormouse_model::Bandwidth;

use crate::domain::INSIDE;
use crate::error::{Error, Result};
use crate::ground::{Domain, Network};
use crate::link::Links;
use crate::{numbers, stack};

/// The class of the uplink, and that of containers without a contract.
const UPLINK: u16 = 1;
const OTHERS: u16 = u16::MAX;
/// The first class of a container.
const FIRST: u16 = 2;
/// The rate of an uplink without a setting, in bytes per second: more than a device has.
const UNBOUNDED: u64 = 1 << 37;
/// What a class without a guarantee sends in any case: the kernel takes no class without a rate.
const LEAST: u64 = 1000;
/// Bytes of a turn at the smallest weight: no packet is larger before the device cuts it.
const TURN_BYTES: u64 = 1 << 16;

/// The numbers of the devices at the two ends of an uplink.
#[derive(Debug, Clone, Copy)]
struct Ends {
    inside: u32,
    host: u32,
}

impl Network {
    /// Gives a container of a domain its part of the uplink, in place of an earlier one.
    ///
    /// Unsupported without HTB (CONFIG_NET_SCH_HTB) or TCX (Linux 6.6).
    pub fn shape(
        &self,
        domain: &Domain,
        addresses: &[IpAddr],
        bandwidth: &Bandwidth,
    ) -> Result<()> {
        let plan = self.store()?.plan;
        let numbers = numbers(&plan, addresses)?;
        let first =
            *numbers.first().ok_or_else(|| Error::NoAddress("one without addresses".into()))?;
        let _lock = self.lock_domains()?;
        let gone = || Error::Corrupt { path: domain.dir.clone(), message: "no uplink".into() };
        let ends = ends(domain)?.ok_or_else(gone)?;
        let uplink = self.settings.uplink_bps.map_or(UNBOUNDED, |bits| bits / 8);
        let constants = self.constants(&plan);
        let mut found = Classes::find(ends.host)?;
        if let Some(classes) = &found
            && classes.priorities().map_err(at("list the classes"))?.is_empty()
        {
            found = None;
        }
        let classes = match found {
            Some(classes) if classes.is_current(constants) => classes,
            older => {
                if older.is_none() {
                    make(domain, ends, uplink)?;
                }
                let loaded = Loaded::new(constants, older)?;
                stack::inside(domain.netns.as_fd(), || {
                    Ok(loaded.attach(ends.inside, Direction::Out)?)
                })?;
                // ORDER: last: it shows that the rest is there.
                loaded.attach(ends.host, Direction::In)?;
                loaded.into_classes()
            }
        };
        let number = match classes.of(first).map_err(at("read a class"))? {
            Some(priority) => priority as u16,
            None => free(&classes.priorities().map_err(at("list the classes"))?)?,
        };
        let weight = u64::from(bandwidth.weight);
        let rate = (bandwidth.rate_bps / 8).max(LEAST);
        let class = Class {
            above: UPLINK,
            rate,
            ceil: bandwidth.ceil_bps.map_or(uplink, |bits| (bits / 8).min(uplink)).max(rate),
            quantum: (TURN_BYTES * weight / 100) as u32,
        };
        both(domain, ends, |links, device| {
            // The uplink may have been set otherwise since the tree was made.
            set_outer(links, device, uplink)?;
            links.set_class(device, number, &class)
        })?;
        // ORDER: the class is there before a packet has it.
        for index in numbers {
            classes.set(index, traffic::priority(number)).map_err(at("set a class"))?;
        }
        Ok(())
    }

    /// Takes the part of a container back, if it has one. The last one of a domain takes the tree along.
    pub fn unshape(&self, domain: &Domain, addresses: &[IpAddr]) -> Result<()> {
        let numbers = numbers(&self.store()?.plan, addresses)?;
        let _lock = self.lock_domains()?;
        let Some(ends) = ends(domain)? else { return Ok(()) };
        let (mut gone, mut left) = (None, Vec::new());
        if let Some(classes) = Classes::find(ends.host)? {
            for index in numbers {
                gone = gone.or(classes.of(index).map_err(at("read a class"))?);
                classes.remove(index).map_err(at("remove a class"))?;
            }
            left = classes.priorities().map_err(at("list the classes"))?;
        }
        // An interrupted call has left a tree without programs, or the programs of one end.
        if left.is_empty() {
            // ORDER: the host's end is the one that is looked for.
            stack::inside(domain.netns.as_fd(), || Ok(rate::detach(ends.inside)?))?;
            both(domain, ends, Links::remove_tree)?;
            return Ok(rate::detach(ends.host)?);
        }
        match gone {
            // An address that was added later has the same class.
            Some(priority) if !left.contains(&priority) => {
                both(domain, ends, |links, device| links.remove_class(device, priority as u16))
            }
            _ => Ok(()),
        }
    }

    /// The bandwidth of the uplink in bits per second, as the operator has set it.
    pub fn uplink_bps(&self) -> Option<u64> {
        self.settings.uplink_bps
    }
}

fn at(step: &'static str) -> impl Fn(dormouse_kernel::CallError) -> Error {
    move |e| Error::Step(step, e)
}

/// The lowest class that no address has.
fn free(used: &[u32]) -> Result<u16> {
    let is_free = |number: &u16| !used.contains(&traffic::priority(*number));
    // LIMIT: 65,533 containers with a contract in one domain.
    (FIRST..OTHERS).find(is_free).ok_or(Error::NoClass)
}

/// The uplink of a domain; `None` if it was removed, with all that is at its ends.
fn ends(domain: &Domain) -> Result<Option<Ends>> {
    let Some(host) = Links::open()?.find(&domain.ready.uplink)? else { return Ok(None) };
    let inside = stack::inside(domain.netns.as_fd(), || Links::open()?.find(INSIDE))?;
    Ok(inside.map(|inside| Ends { inside: inside.index, host: host.index }))
}

/// Does the same at both ends.
fn both(
    domain: &Domain,
    ends: Ends,
    step: impl Fn(&mut Links, u32) -> Result<()> + Sync + Send,
) -> Result<()> {
    stack::inside(domain.netns.as_fd(), || step(&mut Links::open()?, ends.inside))?;
    step(&mut Links::open()?, ends.host)
}

/// Makes the trees, in place of what an interrupted call has left.
fn make(domain: &Domain, ends: Ends, uplink: u64) -> Result<()> {
    both(domain, ends, |links, device| {
        links.remove_tree(device)?;
        links.add_tree(device, OTHERS)?;
        set_outer(links, device, uplink)
    })
}

/// Sets the class of the uplink, and that of containers without a contract.
fn set_outer(links: &mut Links, device: u32, uplink: u64) -> Result<()> {
    let top = Class { above: 0, rate: uplink, ceil: uplink, quantum: TURN_BYTES as u32 };
    let others = Class { above: UPLINK, rate: LEAST, ..top };
    links.set_class(device, UPLINK, &top)?;
    links.set_class(device, OTHERS, &others)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lowest_free_class_is_chosen() {
        let used = |list: &[u16]| list.iter().map(|n| traffic::priority(*n)).collect::<Vec<_>>();
        assert_eq!(free(&[]).unwrap(), FIRST);
        assert_eq!(free(&used(&[2, 3, 5])).unwrap(), 4);
        let all: Vec<u16> = (FIRST..OTHERS).collect();
        assert!(free(&used(&all)).is_err());
    }
}
