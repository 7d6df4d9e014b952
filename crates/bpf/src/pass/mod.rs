//! Connections to shared services that go on without waiting; see `pass.bpf.c`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};

use dormouse_kernel::CallError;

use crate::call::{Map, Program};
use crate::error::BpfError;
use crate::group::Description;
use crate::record::{Field, Record, record};

static GROUP: Description = Description {
    name: "pass",
    object: include_bytes!(concat!(env!("OUT_DIR"), "/pass.o")),
    programs: &[],
    anchor: PROGRAM,
    maps: &[MAP],
    about: MAP,
};

const PROGRAM: &str = "dm_pass_first";
const MAP: &str = "dm_passes";

/// LIMIT: connections that an allowance is for.
pub const ALLOWED_MAX: u32 = 16;
/// LIMIT: listeners with an allowance.
pub const PASSES_MAX: u32 = 1024;

record! {
    struct Key = "dm_pass_key" {
        address: [u32; 4],
        port: u16,
        reserved: u16,
    }
}

record! {
    struct Pass = "dm_pass" {
        allowed: u64,
        count: u64,
        addresses: [[u32; 4]; 16],
        ports: [u16; 16],
        numbers: [u32; 16],
    }
}

/// The connections that have used an allowance.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Passed {
    /// How many.
    pub count: u32,
    /// Their clients, in the order of arrival, without those of incomplete notes.
    pub clients: Vec<SocketAddr>,
}

/// The program with its allowances. It is in force while a rule has it.
#[derive(Debug)]
pub struct Passes {
    program: Program,
    map: Map,
}

/// Tests whether this kernel loads the program.
pub fn supported() -> Result<(), BpfError> {
    GROUP.supported(&[])
}

impl Passes {
    /// Loads the program, without an allowance.
    pub fn load() -> Result<Self, BpfError> {
        let missing = |name: &str| BpfError::Missing { object: GROUP.name, name: name.into() };
        let (mut maps, mut programs) = GROUP.load_alone()?;
        let program = programs.pop().ok_or_else(|| missing(PROGRAM))?;
        Ok(Self { program, map: maps.pop().ok_or_else(|| missing(MAP))? })
    }

    /// The program, for a rule.
    pub fn program(&self) -> BorrowedFd<'_> {
        self.program.as_fd()
    }

    /// Lets so many connections to this address go on, at most [`ALLOWED_MAX`], in place of an earlier allowance. E2BIG
    /// if the map is full.
    pub fn allow(&self, to: SocketAddr, count: u32) -> Result<(), CallError> {
        let allowed = u64::from(count.min(ALLOWED_MAX));
        self.map.set(&key(to), &Pass { allowed, ..Pass::zero() }.to_bytes())
    }

    /// Ends an allowance, and returns what has used it; `None` if there is none.
    pub fn take_back(&self, to: SocketAddr) -> Result<Option<Passed>, CallError> {
        Ok(self.map.take(&key(to))?.map(|bytes| passed(&Pass::from_bytes(&bytes))))
    }
}

fn key(to: SocketAddr) -> Vec<u8> {
    let address = match to.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    Key { address: Field::get(&address.octets()), port: to.port().to_be(), reserved: 0 }.to_bytes()
}

fn passed(pass: &Pass) -> Passed {
    let count = u32::try_from(pass.count).unwrap_or(u32::MAX).min(ALLOWED_MAX);
    let notes = pass.addresses.iter().zip(&pass.ports).zip(&pass.numbers).zip(1..=count);
    let client = |(((address, port), number), expected): (((&[u32; 4], &u16), &u32), u32)| {
        let mut octets = [0; 16];
        address.put(&mut octets);
        let ip = Ipv6Addr::from(octets);
        let ip = ip.to_ipv4_mapped().map_or(IpAddr::from(ip), |ip: Ipv4Addr| ip.into());
        (*number == expected).then(|| SocketAddr::new(ip, u16::from_be(*port)))
    };
    Passed { count, clients: notes.filter_map(client).collect() }
}

#[cfg(test)]
mod tests {
    use crate::group::tests::assert_full;
    use crate::record::tests::assert_same;

    use super::*;

    #[test]
    fn records_have_the_layout_of_the_header() {
        assert_same::<Key>(GROUP.object);
        assert_same::<Pass>(GROUP.object);
    }

    #[test]
    fn root_kernel_takes_the_program() {
        supported().unwrap();
    }

    #[test]
    fn incomplete_note_is_counted_and_has_no_client() {
        let mut pass = Pass { allowed: 3, count: 2, ..Pass::zero() };
        pass.addresses[1] = Field::get(&Ipv4Addr::new(10, 0, 0, 7).to_ipv6_mapped().octets());
        (pass.ports[1], pass.numbers[1]) = (80u16.to_be(), 2);
        let client = "10.0.0.7:80".parse().unwrap();
        assert_eq!(passed(&pass), Passed { count: 2, clients: vec![client] });
        // More than there can be.
        pass.count = u64::MAX;
        assert_eq!(passed(&pass), Passed { count: ALLOWED_MAX, clients: vec![client] });
    }

    #[test]
    fn root_allowance_is_taken_back_once_and_bounded() {
        let passes = Passes::load().unwrap();
        let [to, other] = ["10.0.0.7:80", "[fd00::7]:80"].map(|to| to.parse().unwrap());
        assert_eq!(passes.take_back(to).unwrap(), None);
        passes.allow(to, u32::MAX).unwrap();
        let bytes = passes.map.get(&key(to)).unwrap().unwrap();
        assert_eq!(Pass::from_bytes(&bytes).allowed, u64::from(ALLOWED_MAX));
        assert_eq!(passes.take_back(other).unwrap(), None);
        assert_eq!(passes.take_back(to).unwrap(), Some(Passed::default()));
        assert_eq!(passes.take_back(to).unwrap(), None);
        assert_full(&passes.map, PASSES_MAX);
    }
}
