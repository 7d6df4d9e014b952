//! Pending connections created without their peers; see `handshake.bpf.c`.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::CallError;

use crate::call::{self, Map};
use crate::error::BpfError;
use crate::group::Description;
use crate::record::{Field, Record, record};

static GROUP: Description = Description {
    name: "handshake",
    object: include_bytes!(concat!(env!("OUT_DIR"), "/handshake.o")),
    programs: &[],
    anchor: PROGRAM,
    maps: &[MAP],
    about: MAP,
};

const PROGRAM: &str = "dm_handshake_in";
const MAP: &str = "dm_handshake";

/// The loopback device is the first of every network namespace.
const LOOPBACK: u32 = 1;

/// Smallest segments that the kernel accepts as negotiated, by IPv4 and IPv6.
const SEGMENTS_MIN_BYTES: (u16, u16) = (536, 1220);

/// The options that both sides of a connection negotiated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreed {
    /// Address of the listening socket.
    pub listener: SocketAddr,
    /// The connection is by IPv6.
    pub is_v6: bool,
    /// The mark of the packet that ends the handshake.
    pub mark: u32,
    /// Largest segment that the peer takes, in bytes.
    pub segment_bytes: u16,
    /// Window scales, of what is sent and of what is received.
    pub scales: Option<(u8, u8)>,
    /// Selective acknowledgements.
    pub selective: bool,
    /// Our time stamp clock.
    pub timestamp: Option<u32>,
}

record! {
    /// The options as the program has them; address and port are in network byte order.
    struct Options = "dm_handshake" {
        mark: u32,
        timestamp: u32,
        segment_bytes: u16,
        scale_sent: u8,
        scale_received: u8,
        scales: u8,
        selective: u8,
        timestamps: u8,
        v6: u8,
        address: [u32; 4],
        port: u16,
        reserved: u16,
    }
}

impl Agreed {
    fn options(&self) -> Options {
        let least = if self.is_v6 { SEGMENTS_MIN_BYTES.1 } else { SEGMENTS_MIN_BYTES.0 };
        let (scale_sent, scale_received) = self.scales.unwrap_or_default();
        // A mapped address is found by IPv4.
        let (v6, address) = match self.listener.ip().to_canonical() {
            IpAddr::V4(ip) => (0, Field::get(&ip.octets())),
            IpAddr::V6(ip) => (1, Field::get(&ip.octets())),
        };
        Options {
            mark: self.mark,
            timestamp: self.timestamp.unwrap_or(0),
            segment_bytes: self.segment_bytes.max(least),
            scale_sent,
            scale_received,
            scales: self.scales.is_some().into(),
            selective: self.selective.into(),
            timestamps: self.timestamp.is_some().into(),
            v6,
            address,
            port: self.listener.port().to_be(),
            reserved: 0,
        }
    }
}

/// The program, attached to the loopback device of a network namespace until this is dropped.
#[derive(Debug)]
pub struct Handshakes {
    agreed: Map,
    _attached: OwnedFd,
}

/// Tests whether this kernel loads the program (Linux 6.9).
pub fn supported() -> Result<(), BpfError> {
    GROUP.supported(&[])
}

impl Handshakes {
    /// Attaches the program in the calling thread's network namespace.
    pub fn attach() -> Result<Self, BpfError> {
        let missing = |name: &str| BpfError::Missing { object: GROUP.name, name: name.into() };
        let (mut maps, programs) = GROUP.load_alone()?;
        let program = programs.first().ok_or_else(|| missing(PROGRAM))?;
        let attached = call::link_to_device(LOOPBACK, program.as_fd())
            .map_err(|source| BpfError::Attach { program: PROGRAM, source })?;
        let agreed = maps.pop().ok_or_else(|| missing(MAP))?;
        Ok(Self { agreed, _attached: attached })
    }

    /// Sets the options for the last segment that is sent next.
    pub fn agree(&self, agreed: &Agreed) -> Result<(), CallError> {
        self.agreed.set(&0u32.to_ne_bytes(), &agreed.options().to_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_has_the_layout_of_the_header() {
        crate::record::tests::assert_same::<Options>(GROUP.object);
    }

    #[test]
    fn root_kernel_takes_the_program() {
        supported().unwrap();
    }

    #[test]
    fn negotiated_options_have_the_layout_of_the_record() {
        let agreed = Agreed {
            listener: "[::ffff:1.2.3.4]:5".parse().unwrap(),
            is_v6: true,
            mark: 1,
            segment_bytes: 500,
            scales: Some((3, 4)),
            selective: false,
            timestamp: Some(2),
        };
        let [low, high] = 1220u16.to_ne_bytes();
        let record = agreed.options().to_bytes();
        assert_eq!(record[..16], [1, 0, 0, 0, 2, 0, 0, 0, low, high, 3, 4, 1, 0, 1, 0]);
        assert_eq!((&record[16..20], &record[32..]), (&[1, 2, 3, 4][..], &[0, 5, 0, 0][..]));
    }
}
