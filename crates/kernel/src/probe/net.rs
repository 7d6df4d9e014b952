//! Networking, in a network namespace that a thread makes for itself and that ends with it.

use std::net::{Ipv4Addr, TcpListener};

use super::scratch::{Probed, Reason, Scratch, lack};
use crate::netlink::{self, Message, Protocol, Socket, queue, route, traffic};
use crate::nft::{self, NftError};
use crate::process::{self, CloneFlags};

fn in_scratch(probe: fn() -> Probed) -> Probed {
    let thread = std::thread::spawn(move || {
        process::unshare(CloneFlags::NEWNET)?;
        probe()
    });
    thread.join().unwrap_or_else(|_| lack("the probe failed"))
}

fn request(kind: u16, flags: u16, message: &Message) -> Result<(), Reason> {
    Ok(Socket::open(Protocol::Route)?.request(kind, flags, message)?)
}

pub(super) fn veth(_: &Scratch) -> Probed {
    in_scratch(|| {
        let info = Message::new(&[]).with_text(route::INFO_KIND, "veth");
        let message = route::link(0, 0, 0).nested(route::LINK_INFO, &info);
        request(route::NEW_LINK, netlink::NEW, &message)?;
        Ok(String::new())
    })
}

/// A tree with a class, which is bounded by a rate.
pub(super) fn classes(_: &Scratch) -> Probed {
    in_scratch(|| {
        request(traffic::NEW_DISCIPLINE, netlink::NEW, &traffic::tree(route::LOOPBACK, 2))?;
        let class = traffic::Class { above: 0, rate: 1 << 20, ceil: 1 << 20, quantum: 1 << 16 };
        let message = traffic::class(route::LOOPBACK, 2, &class);
        request(traffic::NEW_CLASS, netlink::NEW, &message)?;
        Ok("at the uplinks of trust domains; loopback traffic inside a domain has no limit".into())
    })
}

fn set_loopback_up() -> Result<(), Reason> {
    let up = libc::IFF_UP as u32;
    request(route::NEW_LINK, 0, &route::link(route::LOOPBACK, up, up))
}

/// Loopback up, and `10.136.0.0/14` local on it.
fn loopback() -> Result<(), Reason> {
    set_loopback_up()?;
    // `struct rtmsg`: IPv4, /14, table local, protocol static, scope host, type local.
    let message = Message::new(&[libc::AF_INET as u8, 14, 0, 0, 255, 4, 254, 2, 0, 0, 0, 0])
        .with(1, &Ipv4Addr::new(10, 136, 0, 0).octets())
        .with(4, &route::LOOPBACK.to_ne_bytes());
    request(route::NEW_ROUTE, netlink::NEW, &message)
}

pub(super) fn any_ip(_: &Scratch) -> Probed {
    in_scratch(|| {
        loopback()?;
        TcpListener::bind((Ipv4Addr::new(10, 137, 1, 2), 80))?;
        Ok(String::new())
    })
}

pub(super) fn nonlocal_bind(_: &Scratch) -> Probed {
    in_scratch(|| {
        std::fs::write("/proc/sys/net/ipv6/ip_nonlocal_bind", "1")?;
        set_loopback_up()?;
        TcpListener::bind("[fd00:1:2:3::4]:80")?;
        Ok(String::new())
    })
}

pub(super) fn masquerade(_: &Scratch) -> Probed {
    in_scratch(|| {
        let rules = "table ip probe { chain c { type nat hook postrouting priority 100; \
                     ip saddr 10.136.0.0/14 masquerade; }; }\n";
        match nft::apply(rules) {
            Ok(()) => Ok(String::new()),
            Err(e @ NftError::NotRun(_)) => Err(Reason(format!("nft cannot be run: {e}"))),
            Err(NftError::Refused(message)) => lack(message),
        }
    })
}

/// As `dormouse_stacks::held` does it, with a program that lets all pass.
pub(super) fn passes(_: &Scratch) -> Probed {
    in_scratch(|| {
        match nft::apply("table ip probe { chain passes { }; }\n") {
            Ok(()) => queue::add_pass(libc::AF_INET as u8, ("probe", "passes"), None)?,
            Err(e @ NftError::NotRun(_)) => {
                return Err(Reason(format!("nft cannot be run: {e}")));
            }
            Err(NftError::Refused(message)) => return lack(message),
        }
        Ok(String::new())
    })
}

/// As `dormouse_stacks::held` does it.
pub(super) fn queue(_: &Scratch) -> Probed {
    in_scratch(|| {
        queue::Queue::open(1, 1)?;
        let rules = |rule: &str| format!("table ip probe {{ chain held {{ {rule} }}; }}\n");
        if nft::apply(&rules("queue flags bypass to 1")).is_ok() {
            return Ok(String::new());
        }
        match nft::apply(&rules("")) {
            Ok(()) => queue::add_rule(libc::AF_INET as u8, ("probe", "held"), 1)?,
            Err(e @ NftError::NotRun(_)) => {
                return Err(Reason(format!("nft cannot be run: {e}")));
            }
            Err(NftError::Refused(message)) => return lack(message),
        }
        Ok("by xtables".into())
    })
}
