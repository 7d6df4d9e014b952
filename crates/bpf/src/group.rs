//! A group of programs attached to one cgroup: load, attach, find, replace, detach.
//!
//! The group is complete when its *about* map, kept by its *anchor* program, holds the version of
//! the build; it is written last. Anything else is unfinished or older: then the programs are
//! loaded again around the maps that are there (containers keep their entries, sockets their
//! identity) and take the places of the attached ones, each in one step. Two processes must not do
//! that at once: callers hold a lock.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;

use libbpf_rs::{Link, MapCore, MapType, Object, ObjectBuilder, OpenObject, PrintLevel};

use crate::call::{self, Map, Program};
use crate::error::BpfError;

/// The parts of a group.
#[derive(Debug)]
pub struct Description {
    /// Name for messages.
    pub name: &'static str,
    /// The compiled object.
    pub object: &'static [u8],
    /// Programs and the hook of each (a `BPF_*` attach type).
    pub programs: &'static [(&'static str, u32)],
    /// The program that is queried for the maps.
    pub anchor: &'static str,
    /// Maps that outlive the programs.
    pub maps: &'static [&'static str],
    /// The map that holds the version.
    pub about: &'static str,
}

/// The maps of an attached group.
#[derive(Debug)]
pub struct Attached {
    maps: Vec<Map>,
    /// Id of the program that keeps them.
    anchor: u32,
    /// Programs of the object with another hook, if they were loaded just now.
    others: Vec<(String, Program)>,
}

impl Attached {
    /// A map by its name.
    pub fn map(&self, name: &str) -> Option<&Map> {
        self.maps.iter().find(|m| m.name == name)
    }

    /// A program with another hook, if it was loaded together with those of the group.
    pub fn other(&self, name: &str) -> Option<&Program> {
        self.others.iter().find(|(n, _)| n == name).map(|(_, program)| program)
    }

    /// Returns the ids by which one of the maps is found.
    pub fn trace(&self, map: &str) -> Option<Trace> {
        Some(Trace { anchor: self.anchor, map: self.map(map)?.id })
    }
}

/// Ids of the anchor and of one map, by which the map of an attached group is found without a
/// search of all maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trace {
    /// The program.
    pub anchor: u32,
    /// The map.
    pub map: u32,
}

/// The last output of libbpf: its callback carries no state of ours.
static LOG: Mutex<String> = Mutex::new(String::new());

fn log(_: PrintLevel, line: String) {
    if let Ok(mut log) = LOG.lock() {
        log.push_str(&line);
    }
}

fn last_lines() -> String {
    let log = LOG.lock().map(|mut l| std::mem::take(&mut *l)).unwrap_or_default();
    let lines: Vec<&str> = log.lines().filter(|l| !l.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(12)..].join("; ")
}

impl Description {
    /// The version of this build with these constants: a hash (FNV-1a) of both.
    pub(crate) fn version(&self, constants: &[u8]) -> u64 {
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for byte in self.object.iter().chain(constants) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
        hash
    }

    /// Opens the object, before the kernel sees it.
    fn open(&self) -> Result<OpenObject, BpfError> {
        libbpf_rs::set_print(Some((PrintLevel::Warn, log)));
        let _ = last_lines();
        let open = ObjectBuilder::default().open_memory(self.object);
        open.map_err(|source| BpfError::Open { object: self.name, source })
    }

    /// The maps of a loaded object, by the names of this description.
    fn maps_of(&self, loaded: &Object) -> Result<Vec<Map>, BpfError> {
        let mut maps = Vec::new();
        for name in self.maps {
            let map = loaded.maps().find(|m| m.name() == *name);
            let missing = || BpfError::Missing { object: self.name, name: (*name).into() };
            maps.push(Map::new(duplicate(map.ok_or_else(missing)?.as_fd())?)?);
        }
        Ok(maps)
    }

    /// Loads programs that are operations of the kernel (`struct_ops`), with constants, has the caller fill the maps,
    /// and puts the operations in force. They end with the link.
    pub(crate) fn load_operations(
        &self,
        constants: &[u8],
        fill: impl FnOnce(&[Map]) -> Result<(), BpfError>,
    ) -> Result<(Vec<Map>, Link), BpfError> {
        let object = self.name;
        let mut open = self.open()?;
        for mut map in open.maps_mut() {
            if map.name().to_string_lossy().ends_with(".rodata.config") {
                map.set_initial_value(constants)
                    .map_err(|source| BpfError::Open { object, source })?;
            }
        }
        let mut loaded =
            open.load().map_err(|source| BpfError::Load { object, log: last_lines(), source })?;
        let maps = self.maps_of(&loaded)?;
        fill(&maps)?;
        let mut all = loaded.maps_mut();
        let operations = all.find(|map| map.map_type() == MapType::StructOps);
        let missing = || BpfError::Missing { object, name: "struct_ops".into() };
        let link = operations.ok_or_else(missing)?.attach_struct_ops();
        let link = link.map_err(|source| BpfError::Load { object, log: last_lines(), source })?;
        Ok((maps, link))
    }

    /// Loads the programs named and gives them with the maps, reusing those of `old`.
    fn load(
        &self,
        constants: &[u8],
        only: &dyn Fn(&str) -> bool,
        old: Option<&Attached>,
        targets: &[(&str, &str)],
    ) -> Result<Loaded, BpfError> {
        let object = self.name;
        let mut open = self.open()?;
        for mut map in open.maps_mut() {
            let name = map.name().to_string_lossy().into_owned();
            if name.ends_with(".rodata.config") {
                map.set_initial_value(constants)
                    .map_err(|source| BpfError::Open { object, source })?;
            } else if let Some(old) = old.and_then(|o| o.map(&name)) {
                map.reuse_fd(old.as_fd()).map_err(|source| BpfError::Open { object, source })?;
            }
        }
        for mut program in open.progs_mut() {
            let name = program.name().to_string_lossy().into_owned();
            program.set_autoload(only(&name));
            let target = targets.iter().find(|(of, _)| only(&name) && *of == name);
            if let Some((_, target)) = target {
                program
                    .set_attach_target(0, Some((*target).to_owned()))
                    .map_err(|source| BpfError::Load { object, log: last_lines(), source })?;
            }
        }
        let loaded =
            open.load().map_err(|source| BpfError::Load { object, log: last_lines(), source })?;
        let maps = self.maps_of(&loaded)?;
        let mut programs = Vec::new();
        for program in loaded.progs_mut() {
            let name = program.name().to_string_lossy().into_owned();
            if only(&name) {
                programs.push((name, Program::new(duplicate(program.as_fd())?)?));
            }
        }
        Ok(Loaded { maps, programs })
    }

    /// Tests whether the kernel loads every program of the group. Nothing stays loaded.
    pub fn supported(&self, constants: &[u8]) -> Result<(), BpfError> {
        self.load(constants, &|_| true, None, &[]).map(drop)
    }

    /// Loads all programs and their maps, to be attached elsewhere and to end when they are
    /// dropped.
    pub fn load_alone(&self) -> Result<(Vec<Map>, Vec<Program>), BpfError> {
        self.load_alone_with(&[])
    }

    /// The same with constants.
    pub(crate) fn load_alone_with(
        &self,
        constants: &[u8],
    ) -> Result<(Vec<Map>, Vec<Program>), BpfError> {
        self.load_some(constants, &|_| true)
    }

    /// The same without programs that are not wanted.
    pub(crate) fn load_some(
        &self,
        constants: &[u8],
        wanted: &dyn Fn(&str) -> bool,
    ) -> Result<(Vec<Map>, Vec<Program>), BpfError> {
        self.load_at(constants, wanted, &[])
    }

    /// The same, with other functions of the kernel as the targets of programs: pairs of a program and a function.
    pub(crate) fn load_at(
        &self,
        constants: &[u8],
        wanted: &dyn Fn(&str) -> bool,
        targets: &[(&str, &str)],
    ) -> Result<(Vec<Map>, Vec<Program>), BpfError> {
        let loaded = self.load(constants, wanted, None, targets)?;
        Ok((loaded.maps, loaded.programs.into_iter().map(|(_, program)| program).collect()))
    }

    /// The same around a map that is there already.
    pub(crate) fn load_around(
        &self,
        constants: &[u8],
        map: Map,
    ) -> Result<(Vec<Map>, Vec<Program>), BpfError> {
        let old = Attached { maps: vec![map], anchor: 0, others: Vec::new() };
        let loaded = self.load(constants, &|_| true, Some(&old), &[])?;
        Ok((loaded.maps, loaded.programs.into_iter().map(|(_, program)| program).collect()))
    }

    /// Loads one program around the maps of an attached group, to be attached elsewhere.
    pub fn load_one(
        &self,
        constants: &[u8],
        name: &str,
        attached: &Attached,
    ) -> Result<Program, BpfError> {
        let loaded = self.load(constants, &|n| n == name, Some(attached), &[])?;
        let missing = || BpfError::Missing { object: self.name, name: name.into() };
        loaded.programs.into_iter().next().map(|(_, p)| p).ok_or_else(missing)
    }

    /// The maps of the group at this cgroup, complete or not.
    pub fn find(&self, cgroup: BorrowedFd<'_>) -> Result<Option<Attached>, BpfError> {
        for id in call::attached_to_cgroup(cgroup, self.anchor_hook()?)? {
            let program = match Program::by_id(id) {
                Ok(program) => program,
                Err(e) if e.errno() == libc::ENOENT => continue, // detached meanwhile
                Err(e) => return Err(e.into()),
            };
            if !is_named(&program.name, self.anchor) {
                continue;
            }
            let mut maps = Vec::with_capacity(program.maps.len());
            for id in &program.maps {
                maps.push(Map::by_id(*id)?);
            }
            return Ok(Some(Attached { maps, anchor: id, others: Vec::new() }));
        }
        Ok(None)
    }

    /// The map found before, if its group is still attached to the cgroup.
    pub fn follow(&self, cgroup: BorrowedFd<'_>, trace: Trace) -> Result<Option<Map>, BpfError> {
        if !call::attached_to_cgroup(cgroup, self.anchor_hook()?)?.contains(&trace.anchor) {
            return Ok(None);
        }
        match Map::by_id(trace.map) {
            Err(e) if e.errno() == libc::ENOENT => Ok(None), // detached just now
            other => Ok(Some(other?)),
        }
    }

    fn anchor_hook(&self) -> Result<u32, BpfError> {
        let hook = self.programs.iter().find(|(name, _)| *name == self.anchor);
        hook.map(|(_, hook)| *hook)
            .ok_or_else(|| BpfError::Missing { object: self.name, name: self.anchor.into() })
    }

    /// Returns whether `attached` is of this build with these constants, completely attached.
    pub fn is_current(&self, attached: &Attached, constants: &[u8]) -> Result<bool, BpfError> {
        let Some(about) = attached.map(self.about) else { return Ok(false) };
        let found = about.get(&0u32.to_ne_bytes())?;
        Ok(found.as_deref() == Some(&self.version(constants).to_ne_bytes()[..]))
    }

    /// Attaches the group to the cgroup, over no group, an unfinished or an older one. `without`
    /// names programs to leave out: a test's way to show their effect.
    pub fn attach(
        &self,
        cgroup: BorrowedFd<'_>,
        constants: &[u8],
        without: &[&str],
    ) -> Result<Attached, BpfError> {
        let old = self.find(cgroup)?;
        if let Some(old) = old {
            if without.is_empty() && self.is_current(&old, constants)? {
                return Ok(old);
            }
            return self.attach_around(cgroup, constants, without, Some(&old));
        }
        self.attach_around(cgroup, constants, without, None)
    }

    fn attach_around(
        &self,
        cgroup: BorrowedFd<'_>,
        constants: &[u8],
        without: &[&str],
        old: Option<&Attached>,
    ) -> Result<Attached, BpfError> {
        let loaded = self.load(constants, &|name| !without.contains(&name), old, &[])?;
        let hangs_here = |(name, _): &(String, Program)| self.programs.iter().any(|p| p.0 == name);
        let (programs, others): (Vec<_>, Vec<_>) =
            loaded.programs.into_iter().partition(hangs_here);
        let find = |name: &str| programs.iter().find(|(n, _)| n == name).map(|(_, p)| p);
        let anchor = find(self.anchor)
            .ok_or_else(|| BpfError::Missing { object: self.name, name: self.anchor.into() })?;
        for map in &loaded.maps {
            anchor.keep(map.as_fd())?;
        }
        let attached = Attached { anchor: anchor.id, maps: loaded.maps, others };
        // ORDER: the anchor first, so that the same maps are found again after an interruption.
        let first = self.programs.iter().filter(|(name, _)| *name == self.anchor);
        let rest = self.programs.iter().filter(|(name, _)| *name != self.anchor);
        for (name, hook) in first.chain(rest) {
            let Some(program) = find(name) else { continue };
            let mut replaced = None;
            for id in call::attached_to_cgroup(cgroup, *hook)? {
                let other = Program::by_id(id)?;
                if is_named(&other.name, name) {
                    replaced = Some(other);
                }
            }
            let replaced = replaced.as_ref().map(AsFd::as_fd);
            call::attach_to_cgroup(cgroup, program.as_fd(), *hook, replaced)
                .map_err(|source| BpfError::Attach { program: name, source })?;
        }
        for (name, hook) in self.programs.iter().filter(|(name, _)| without.contains(name)) {
            self.detach_one(cgroup, name, *hook)?;
        }
        // ORDER: the version last: it marks all programs as in place.
        let version = if without.is_empty() { self.version(constants) } else { 0 };
        if let Some(about) = attached.map(self.about) {
            about.set(&0u32.to_ne_bytes(), &version.to_ne_bytes())?;
        }
        Ok(attached)
    }

    /// Detaches the group from the cgroup. Removal of the cgroup detaches it as well.
    pub fn detach(&self, cgroup: BorrowedFd<'_>) -> Result<(), BpfError> {
        // ORDER: the anchor last, so that an interrupted detach is still found.
        let rest = self.programs.iter().filter(|(name, _)| *name != self.anchor);
        let last = self.programs.iter().filter(|(name, _)| *name == self.anchor);
        for (name, hook) in rest.chain(last) {
            self.detach_one(cgroup, name, *hook)?;
        }
        Ok(())
    }

    fn detach_one(
        &self,
        cgroup: BorrowedFd<'_>,
        name: &'static str,
        hook: u32,
    ) -> Result<(), BpfError> {
        for id in call::attached_to_cgroup(cgroup, hook)? {
            let program = Program::by_id(id)?;
            if is_named(&program.name, name) {
                call::detach_from_cgroup(cgroup, program.as_fd(), hook)
                    .map_err(|source| BpfError::Attach { program: name, source })?;
            }
        }
        Ok(())
    }
}

struct Loaded {
    maps: Vec<Map>,
    programs: Vec<(String, Program)>,
}

/// The kernel keeps 15 bytes of a name.
pub(crate) fn is_named(kept: &str, name: &str) -> bool {
    kept == &name[..name.len().min(15)]
}

fn duplicate(fd: BorrowedFd<'_>) -> Result<std::os::fd::OwnedFd, BpfError> {
    rustix::io::fcntl_dupfd_cloexec(fd, 3).map_err(|e| {
        dormouse_kernel::CallError::new("fcntl", "F_DUPFD_CLOEXEC".into(), e.raw_os_error()).into()
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Asserts that a hash map takes exactly so many entries, and one more after a removal.
    #[track_caller]
    pub(crate) fn assert_full(map: &Map, capacity: u32) {
        assert_eq!(map.capacity, capacity, "{}", map.name);
        let key = |n: u32| {
            let mut key = vec![0; map.key_bytes()];
            key[..4].copy_from_slice(&n.to_ne_bytes());
            key
        };
        let value = vec![0; map.value_bytes()];
        for n in 0..capacity {
            map.set(&key(n), &value).unwrap();
        }
        assert_eq!(map.set(&key(capacity), &value).unwrap_err().errno(), libc::E2BIG);
        map.set(&key(0), &value).unwrap(); // an existing entry can still be changed
        assert!(map.remove(&key(0)).unwrap());
        map.set(&key(capacity), &value).unwrap();
    }
}
