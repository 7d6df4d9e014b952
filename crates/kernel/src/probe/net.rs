//! Networking, in a network namespace that a thread makes for itself and that ends with it.

use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::scratch::{Probed, Reason, Scratch, lack};
use crate::nft::{self, NftError};
use crate::process::{self, CloneFlags};

fn in_scratch(probe: fn() -> Probed) -> Probed {
    let thread = std::thread::spawn(move || {
        process::unshare(CloneFlags::NEWNET)?;
        probe()
    });
    thread.join().unwrap_or_else(|_| lack("the probe failed"))
}

/// One request to rtnetlink(7): a message and the kernel's answer to it.
fn request(kind: u16, flags: u16, body: &[u8]) -> Result<(), Reason> {
    // SAFETY: no pointer is passed.
    let fd = unsafe {
        libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::NETLINK_ROUTE)
    };
    if fd < 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    // SAFETY: the call has just made it for us.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut message = Vec::with_capacity(16 + body.len());
    message.extend((16 + body.len() as u32).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    // NLM_F_REQUEST | NLM_F_ACK
    message.extend((flags | 5).to_ne_bytes());
    message.extend([0; 8]);
    message.extend(body);
    rustix::io::write(&socket, &message)?;
    let mut answer = [0u8; 1024];
    // SAFETY: the length passed is that of the buffer.
    let length = unsafe { libc::recv(socket.as_raw_fd(), answer.as_mut_ptr().cast(), 1024, 0) };
    if length < 20 {
        return lack("rtnetlink did not answer");
    }
    let code = i32::from_ne_bytes([answer[16], answer[17], answer[18], answer[19]]);
    if code == 0 { Ok(()) } else { Err(std::io::Error::from_raw_os_error(-code).into()) }
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend((4 + value.len() as u16).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// `struct ifinfomsg`
fn link(index: i32, flags: u32) -> Vec<u8> {
    let mut bytes = vec![0; 4];
    bytes.extend(index.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes
}

const RTM_NEWLINK: u16 = 16;
const RTM_NEWROUTE: u16 = 24;
/// NLM_F_CREATE | NLM_F_EXCL
const CREATE: u16 = 0x600;

pub(super) fn veth(_: &Scratch) -> Probed {
    in_scratch(|| {
        const IFLA_LINKINFO: u16 = 18;
        const IFLA_INFO_KIND: u16 = 1;
        let mut body = link(0, 0);
        body.extend(attribute(IFLA_LINKINFO, &attribute(IFLA_INFO_KIND, b"veth\0")));
        request(RTM_NEWLINK, CREATE, &body)?;
        Ok(String::new())
    })
}

/// Loopback up, and `10.136.0.0/14` local on it.
fn loopback() -> Result<(), Reason> {
    request(RTM_NEWLINK, 0, &link(1, libc::IFF_UP as u32))?;
    // `struct rtmsg`: IPv4, /14, table local, protocol static, scope host, type local.
    let mut body = vec![libc::AF_INET as u8, 14, 0, 0, 255, 4, 254, 2, 0, 0, 0, 0];
    body.extend(attribute(1, &Ipv4Addr::new(10, 136, 0, 0).octets()));
    body.extend(attribute(4, &1i32.to_ne_bytes()));
    request(RTM_NEWROUTE, CREATE, &body)
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
        request(RTM_NEWLINK, 0, &link(1, libc::IFF_UP as u32))?;
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
