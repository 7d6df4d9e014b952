//! Requests of TCP connections, which have no socket yet; see `request.bpf.c`.

use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;

use dormouse_kernel::CallError;

use crate::call::Program;
use crate::error::BpfError;
use crate::group::Description;
use crate::record::{Field, Record, record};

static GROUP: Description = Description {
    name: "request",
    object: include_bytes!(concat!(env!("OUT_DIR"), "/request.o")),
    programs: &[],
    anchor: READ,
    maps: &[],
    about: "",
};

const READ: &str = "dm_request_read";

record! {
    /// A request as the program writes it.
    struct Entry = "dm_request" {
        listener: u64,
        address: [u32; 4],
        peer: [u32; 4],
        family: u16,
        port: u16,
        peer_port: u16,
        segment_bytes: u16,
        sent: u32,
        received: u32,
        stamp_offset: u32,
        scale_sent: u8,
        scale_received: u8,
        scales: u8,
        selective: u8,
        timestamps: u8,
        microseconds: u8,
        acknowledged: u8,
        reserved: [u8; 5],
    }
}

/// The unit of the time stamps of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StampUnit {
    /// The usual one.
    Milliseconds,
    /// That of a route with the feature `tcp_usec_ts` (ip-route(8)).
    Microseconds,
}

/// A request of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The cookie of its listener (SO_COOKIE).
    pub listener: u64,
    /// The address of this side; mapped addresses as those of IPv4.
    pub address: SocketAddr,
    /// That of the peer.
    pub peer: SocketAddr,
    /// Initial sequence numbers, of this side and of the peer.
    pub sequences: (u32, u32),
    /// Largest segment that the peer takes, in bytes.
    pub segment_bytes: u16,
    /// Window scales, of what is sent and of what is received.
    pub scales: Option<(u8, u8)>,
    /// Selective acknowledgements.
    pub selective: bool,
    /// Our clock of time stamps, as the offset from the monotonic clock in a unit.
    pub stamps: Option<(u32, StampUnit)>,
    /// The last segment of the handshake has arrived, and the listener waits for data
    /// (TCP_DEFER_ACCEPT).
    pub is_acknowledged: bool,
}

impl From<Entry> for Request {
    fn from(entry: Entry) -> Self {
        let ip = |words: [u32; 4]| -> IpAddr {
            let mut bytes = [0; 16];
            words.put(&mut bytes);
            let [a, b, c, d, ..] = bytes;
            match i32::from(entry.family) {
                libc::AF_INET6 => IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical(),
                _ => Ipv4Addr::new(a, b, c, d).into(),
            }
        };
        let unit = match entry.microseconds {
            0 => StampUnit::Milliseconds,
            _ => StampUnit::Microseconds,
        };
        Self {
            listener: entry.listener,
            address: SocketAddr::new(ip(entry.address), entry.port),
            peer: SocketAddr::new(ip(entry.peer), u16::from_be(entry.peer_port)),
            sequences: (entry.sent, entry.received),
            segment_bytes: entry.segment_bytes,
            scales: (entry.scales != 0).then_some((entry.scale_sent, entry.scale_received)),
            selective: entry.selective != 0,
            stamps: (entry.timestamps != 0).then_some((entry.stamp_offset, unit)),
            is_acknowledged: entry.acknowledged != 0,
        }
    }
}

/// Tests whether this kernel loads the program.
pub fn supported() -> Result<(), BpfError> {
    GROUP.supported(&[])
}

/// Reads all requests in the network namespace of the calling thread. Nothing changes.
pub fn read() -> Result<Vec<Request>, BpfError> {
    let missing = || BpfError::Missing { object: GROUP.name, name: READ.into() };
    let (_, programs) = GROUP.load_alone()?;
    let program: &Program = programs.first().ok_or_else(missing)?;
    let mut file = std::fs::File::from(dormouse_kernel::iterate(program.as_fd())?);
    let mut output = Vec::new();
    file.read_to_end(&mut output).map_err(|e| {
        let errno = e.raw_os_error().unwrap_or(libc::EIO);
        CallError::new("read", "an iterator over TCP sockets".into(), errno)
    })?;
    let entries = output.chunks_exact(size_of::<Entry>()).map(Entry::from_bytes);
    Ok(entries.map(Request::from).collect())
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn record_has_the_layout_of_the_header() {
        crate::record::tests::assert_same::<Entry>(GROUP.object);
    }

    /// A listener that waits for data, and its cookie.
    fn deferring(at: &str) -> (TcpListener, u64) {
        let listener = TcpListener::bind(at).unwrap();
        let seconds = 1000;
        let fd = listener.as_fd();
        let set =
            |level, name, value| dormouse_kernel::call::set_int_option(fd, level, name, value);
        set(libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, seconds).unwrap();
        let mut cookie = [0; 8];
        let read = |buffer: &mut [u8]| {
            dormouse_kernel::call::socket_option(fd, libc::SOL_SOCKET, libc::SO_COOKIE, buffer)
        };
        assert_eq!(read(&mut cookie), Ok(8));
        (listener, u64::from_ne_bytes(cookie))
    }

    #[test]
    fn root_requests_of_a_listener_are_read_and_stay() {
        if let Err(e) = supported() {
            eprintln!("SKIPPED: {e}");
            return;
        }
        for at in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(_) = TcpListener::bind(at) else { continue };
            let (listener, cookie) = deferring(at);
            let address = listener.local_addr().unwrap();
            let of_listener = || -> Vec<Request> {
                let all = read().unwrap().into_iter();
                all.filter(|one| one.listener == cookie && one.is_acknowledged).collect()
            };
            assert_eq!(of_listener(), []);
            let clients = [(); 100].map(|()| TcpStream::connect(address).unwrap());
            // The last packet of a handshake may arrive late on a busy machine.
            while of_listener().len() < clients.len() {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            let mut found = of_listener();
            found.sort_by_key(|one| one.peer.port());
            let mut peers = clients.each_ref().map(|one| one.local_addr().unwrap());
            peers.sort_by_key(SocketAddr::port);
            assert!(found.iter().map(|one| one.peer).eq(peers), "{at}");
            assert!(found.iter().all(|one| one.address == address && one.segment_bytes > 500));
            assert_eq!(of_listener().len(), clients.len(), "a look removes nothing");
            drop(clients);
        }
    }
}
