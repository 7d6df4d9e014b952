//! Classes of packets at the uplink of a domain: the programs of `rate.bpf.c`, and their map.
//!
//! The programs are found through the devices that they are attached to, and end with them. A map beside that of the
//! classes has their version, so that a newer build replaces them. The classes stay.

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
    maps: &[CLASSES, ABOUT],
    about: ABOUT,
};

const OUT: &str = "dm_rate_out";
const IN: &str = "dm_rate_in";
const CLASSES: &str = "dm_classes";
const ABOUT: &str = "dm_about";

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
    classes: Classes,
}

impl Loaded {
    /// Loads the programs, with the classes of older ones or with none.
    pub fn new(constants: Constants, classes: Option<Classes>) -> Result<Self, BpfError> {
        let missing = |name: &str| BpfError::Missing { object: GROUP.name, name: name.into() };
        let constants = constants.to_bytes();
        let (maps, programs) = match classes {
            Some(old) => GROUP.load_around(&constants, old.map)?,
            None => GROUP.load_alone_with(&constants)?,
        };
        let mut maps = maps.into_iter();
        let map = maps.next().ok_or_else(|| missing(CLASSES))?;
        let about = maps.next().ok_or_else(|| missing(ABOUT))?;
        let version = GROUP.version(&constants);
        about.set(&0u32.to_ne_bytes(), &version.to_ne_bytes())?;
        for program in &programs {
            program.keep(about.as_fd())?;
        }
        Ok(Self { programs, classes: Classes { map, version } })
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

    /// The classes.
    pub fn into_classes(self) -> Classes {
        self.classes
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
pub struct Classes {
    map: Map,
    /// The version of the attached programs; 0 is that of programs without one.
    version: u64,
}

impl Classes {
    /// Finds the map through a device of the calling thread's network namespace.
    pub fn find(device: u32) -> Result<Option<Self>, BpfError> {
        for program in attached(device)? {
            let (mut classes, mut version) = (None, 0);
            for id in program.maps {
                let map = Map::by_id(id)?;
                if map.name == CLASSES {
                    classes = Some(map);
                } else if map.name == ABOUT {
                    let found = map.get(&0u32.to_ne_bytes())?.unwrap_or_default();
                    version = found.first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
                }
            }
            if let Some(map) = classes {
                return Ok(Some(Self { map, version }));
            }
        }
        Ok(None)
    }

    /// Whether the attached programs are of this build with these constants.
    pub fn is_current(&self, constants: Constants) -> bool {
        self.version == GROUP.version(&constants.to_bytes())
    }

    /// The priority of packets of an address.
    pub fn of(&self, index: u32) -> Result<Option<u32>, CallError> {
        let found = self.map.get(&index.to_ne_bytes())?;
        Ok(found.map(|bytes| Class::from_bytes(&bytes).priority))
    }

    /// All priorities, one for each address.
    pub fn priorities(&self) -> Result<Vec<u32>, CallError> {
        let entries = self.map.entries()?;
        Ok(entries.iter().map(|(_, value)| Class::from_bytes(value).priority).collect())
    }

    /// Sets the priority of packets of an address.
    pub fn set(&self, index: u32, priority: u32) -> Result<(), CallError> {
        self.map.set(&index.to_ne_bytes(), &Class { priority }.to_bytes())
    }

    /// Removes an address.
    pub fn remove(&self, index: u32) -> Result<(), CallError> {
        self.map.remove(&index.to_ne_bytes()).map(drop)
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
