//! The network stack of a container, looked at from inside it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::Errno;
use dormouse_kernel::call::Namespace;
use dormouse_kernel::{pidfd, proc};
use rustix::thread::LinkNameSpaceType;

use crate::error::{Error, Result as Outcome};

/// Our address and the peer's.
pub(crate) type Ends = [SocketAddr; 2];

/// The network namespace of a process.
pub(crate) fn of(pid: u32) -> Outcome<OwnedFd> {
    pidfd::open(pid)
        .and_then(|pidfd| pidfd::namespace(&pidfd, Namespace::Net))
        .map_err(|e| Error::Elsewhere(e.to_string()))
}

/// Does something in the network namespace of a process.
pub(crate) fn inside<T: Send>(
    pid: u32,
    act: impl FnOnce() -> Result<T, Errno> + Send,
) -> Result<T, Errno> {
    let netns = pidfd::open(pid).and_then(|pidfd| pidfd::namespace(&pidfd, Namespace::Net));
    inside_of(&netns.map_err(|e| Errno::from_raw_os_error(e.errno()))?, act)
}

/// Does something in a network namespace: a thread enters it, and never comes back.
pub(crate) fn inside_of<T: Send>(
    netns: &OwnedFd,
    act: impl FnOnce() -> Result<T, Errno> + Send,
) -> Result<T, Errno> {
    std::thread::scope(|scope| {
        let done = scope.spawn(|| {
            let kind = Some(LinkNameSpaceType::Network);
            rustix::thread::move_into_link_name_space(netns.as_fd(), kind)?;
            act()
        });
        done.join().unwrap_or(Err(Errno::IO))
    })
}

/// Where the kernel has a UDP socket, whatever its owner is told.
pub(crate) fn udp_address(pid: u32, socket: &OwnedFd) -> Result<SocketAddr, Errno> {
    let inode = rustix::fs::fstat(socket)?.st_ino;
    let found = inside(pid, || Ok(look("udp", &[inode])))?;
    found.first().map(|(_, [own, _])| *own).ok_or(Errno::NOENT)
}

/// Both addresses of TCP connections, by inode, as the kernel has them.
pub(crate) fn tcp_addresses(netns: &OwnedFd, inodes: &[u64]) -> Result<Vec<(u64, Ends)>, Errno> {
    inside_of(netns, || Ok(look("tcp", inodes)))
}

/// Reads `/proc/net/PROTOCOL` and its other for IPv6 in the namespace of the thread that calls.
fn look(protocol: &str, inodes: &[u64]) -> Vec<(u64, Ends)> {
    let mut all = Vec::new();
    for name in [protocol.to_owned(), format!("{protocol}6")] {
        // A host may be without IPv6.
        let text = proc::whole_text(format!("/proc/thread-self/net/{name}"));
        let text = text.unwrap_or_default();
        all.extend(text.lines().filter_map(line).filter(|(inode, _)| inodes.contains(inode)));
    }
    all
}

/// Reads `SL: LOCAL REMOTE ST TX:RX TR:WHEN RETRANSMITS UID TIMEOUT INODE ...`.
fn line(line: &str) -> Option<(u64, Ends)> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let addresses = [address(words.next()?)?, address(words.next()?)?];
    Some((words.nth(6)?.parse().ok()?, addresses))
}

/// Reads `0100007F:1F90`, words of 32 bits as the processor has them.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| u32::from_str_radix(ip.get(at..at + 8)?, 16).ok().map(u32::to_ne_bytes);
    let ip = match ip.len() {
        8 => IpAddr::V4(Ipv4Addr::from(word(0)?)),
        32 => {
            let words = [word(0)?, word(8)?, word(16)?, word(24)?];
            let bytes: [u8; 16] = words.concat().try_into().ok()?;
            IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_socket_table_is_read() {
        let text = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000 \
                    1000 0 12345 1 0000000000000000";
        let expected = ["127.0.0.1:8080".parse().unwrap(), "0.0.0.0:0".parse().unwrap()];
        assert_eq!(line(text), Some((12345, expected)));
        let mapped = "0000000000000000FFFF00000200000A:0050";
        assert_eq!(address(mapped), Some("10.0.0.2:80".parse().unwrap()));
        assert_eq!(line("  sl  local_address rem_address"), None);
        assert_eq!(address("01:2"), None);
    }
}
