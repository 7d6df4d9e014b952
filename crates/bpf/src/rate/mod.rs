//! Classes of packets at the uplink of a domain: the programs of `rate.bpf.c`, and their map.
//!
//! The programs are found through the devices that they are attached to, and end with them.

use std::os::fd::AsFd;

use dormouse_kernel::CallError;
use libbpf_rs::libbpf_sys as sys;

use crate::address::Constants;
use crate::call::{self, Map, Program};
use crate::error::BpfError;
use crate::group::Description;
use crate::record::{Record, record};

static GROUP: Description = Description {
    name: "rate",
    object: include_bytes!(concat!(env!("OUT_DIR"), "/rate.o")),
    programs: &[],
    anchor: OUT,
    maps: &[CLASSES],
    about: "",
};

const OUT: &str = "dm_rate_out";
const IN: &str = "dm_rate_in";
const CLASSES: &str = "dm_classes";

record! {
    /// The class of an address.
    struct Class = "dm_class" {
        priority: u32,
    }
}

/// The direction of packets that a device sends, as a container sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// What containers send, at the domain's end of the uplink.
    Out,
    /// What they receive, at the host's end.
    In,
}

/// The programs, loaded, and not attached yet.
#[derive(Debug)]
pub struct Loaded {
    programs: Vec<Program>,
    classes: Map,
}

impl Loaded {
    /// Loads the programs with a new map.
    pub fn new(constants: Constants) -> Result<Self, BpfError> {
        let missing = |name: &str| BpfError::Missing { object: GROUP.name, name: name.into() };
        let (maps, programs) = GROUP.load_alone_with(&constants.to_bytes())?;
        let classes = maps.into_iter().next().ok_or_else(|| missing(CLASSES))?;
        Ok(Self { programs, classes })
    }

    /// Attaches a program to a device of the calling thread's network namespace, in place of older ones.
    pub fn attach(&self, device: u32, direction: Direction) -> Result<(), BpfError> {
        detach(device)?;
        let name = if direction == Direction::Out { OUT } else { IN };
        let program = self.programs.iter().find(|program| program.name == name);
        let program =
            program.ok_or_else(|| BpfError::Missing { object: GROUP.name, name: name.into() })?;
        call::attach_to_device_at(device, sys::BPF_TCX_EGRESS, program.as_fd())
            .map_err(|source| BpfError::Attach { program: name, source })
    }

    /// The map.
    pub fn into_classes(self) -> Classes {
        Classes(self.classes)
    }
}

/// The programs of ours at a device of the calling thread's network namespace.
fn attached(device: u32) -> Result<Vec<Program>, BpfError> {
    let mut found = Vec::new();
    for id in call::attached_to_device(device, sys::BPF_TCX_EGRESS)? {
        match Program::by_id(id) {
            Ok(program) if [OUT, IN].contains(&program.name.as_str()) => found.push(program),
            Err(e) if e.errno() != libc::ENOENT => return Err(e.into()),
            _ => {} // of others, or detached meanwhile
        }
    }
    Ok(found)
}

/// Takes our programs away from a device of the calling thread's network namespace.
pub fn detach(device: u32) -> Result<(), BpfError> {
    for program in attached(device)? {
        call::detach_from_device(device, sys::BPF_TCX_EGRESS, program.as_fd())?;
    }
    Ok(())
}

/// The classes of addresses.
#[derive(Debug)]
pub struct Classes(Map);

impl Classes {
    /// Finds the map through a device of the calling thread's network namespace.
    pub fn find(device: u32) -> Result<Option<Self>, BpfError> {
        for program in attached(device)? {
            for id in program.maps {
                let map = Map::by_id(id)?;
                if map.name == CLASSES {
                    return Ok(Some(Self(map)));
                }
            }
        }
        Ok(None)
    }

    /// The priority of packets of an address.
    pub fn of(&self, index: u32) -> Result<Option<u32>, CallError> {
        let found = self.0.get(&index.to_ne_bytes())?;
        Ok(found.map(|bytes| Class::from_bytes(&bytes).priority))
    }

    /// All priorities, one for each address.
    pub fn priorities(&self) -> Result<Vec<u32>, CallError> {
        let entries = self.0.entries()?;
        Ok(entries.iter().map(|(_, value)| Class::from_bytes(value).priority).collect())
    }

    /// Sets the priority of packets of an address.
    pub fn set(&self, index: u32, priority: u32) -> Result<(), CallError> {
        self.0.set(&index.to_ne_bytes(), &Class { priority }.to_bytes())
    }

    /// Removes an address.
    pub fn remove(&self, index: u32) -> Result<(), CallError> {
        self.0.remove(&index.to_ne_bytes()).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_has_the_layout_of_the_header() {
        crate::record::tests::assert_same::<Class>(GROUP.object);
    }
}
