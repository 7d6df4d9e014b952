//! Which devices a container may use: a second lock behind the missing nodes in its `/dev` and
//! behind its user namespace, which lets it make none.
//!
//! v1 keeps a list in a cgroup; one cgroup with the ordinary list serves all containers, and one
//! with more devices gets a list of its own.

use std::sync::atomic::{AtomicU32, Ordering};

use super::dir::Dir;
use super::error::CgroupError;
use super::{Cgroup, Controllers, Hierarchy, SHARED_DEVICES};
use crate::error::Result as CallResult;

/// Character or block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// `c`
    Char,
    /// `b`
    Block,
}

bitflags::bitflags! {
    /// What may be done with a device (Documentation/admin-guide/cgroup-v1/devices.rst).
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct DeviceAccess: u32 {
        /// `m`: make a node of it.
        const MKNOD = 1;
        /// `r`
        const READ = 2;
        /// `w`
        const WRITE = 4;
    }
}

/// One line of a list of what is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceRule {
    /// Character or block.
    pub kind: DeviceKind,
    /// `None` is every one.
    pub major: Option<u32>,
    /// `None` is every one.
    pub minor: Option<u32>,
    /// What is allowed.
    pub access: DeviceAccess,
}

impl DeviceRule {
    const fn all(kind: DeviceKind, access: DeviceAccess) -> Self {
        Self { kind, major: None, minor: None, access }
    }

    const fn char(major: u32, minor: Option<u32>) -> Self {
        let access = DeviceAccess::all();
        Self { kind: DeviceKind::Char, major: Some(major), minor, access }
    }

    /// `c 1:3 rwm`, as v1 reads it.
    fn to_v1(self) -> String {
        let number = |n: Option<u32>| n.map_or("*".into(), |n| n.to_string());
        let kind = if self.kind == DeviceKind::Char { 'c' } else { 'b' };
        let letters =
            [(DeviceAccess::READ, 'r'), (DeviceAccess::WRITE, 'w'), (DeviceAccess::MKNOD, 'm')];
        let access: String =
            letters.iter().filter(|(a, _)| self.access.contains(*a)).map(|(_, c)| *c).collect();
        format!("{kind} {}:{} {access}", number(self.major), number(self.minor))
    }
}

/// What every container may use. A node of any device may be made (the user namespace decides
/// whether), but not used.
const ORDINARY: &[DeviceRule] = &[
    DeviceRule::all(DeviceKind::Char, DeviceAccess::MKNOD),
    DeviceRule::all(DeviceKind::Block, DeviceAccess::MKNOD),
    DeviceRule::char(1, Some(3)), // null
    DeviceRule::char(1, Some(5)), // zero
    DeviceRule::char(1, Some(7)), // full
    DeviceRule::char(1, Some(8)), // random
    DeviceRule::char(1, Some(9)), // urandom
    DeviceRule::char(5, Some(0)), // tty
    DeviceRule::char(5, Some(1)), // console
    DeviceRule::char(5, Some(2)), // ptmx
    DeviceRule::char(136, None),  // pts
];

/// How the device list is enforced on a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DevicePolicy {
    /// By the v1 controller.
    Controller,
    /// By a BPF program at the v2 parent.
    Program,
    /// Not at all, and why.
    None(String),
}

impl Hierarchy {
    /// The v1 cgroup with the ordinary list; `None` where v1 has no such controller.
    pub(super) fn device_list(&self) -> Result<Option<&Dir>, CgroupError> {
        if let Some(list) = self.0.device_list.get() {
            return Ok(Some(list));
        }
        let Some(parent) = self.v1_parent(Controllers::DEVICES)? else { return Ok(None) };
        let list = shared_list(parent).map_err(CgroupError::Devices)?;
        Ok(Some(self.0.device_list.get_or_init(|| list)))
    }
}

/// Opens the shared list, which is made where it is missing.
fn shared_list(parent: &Dir) -> CallResult<Dir> {
    loop {
        if let Some(list) = parent.child(SHARED_DEVICES)? {
            return Ok(list);
        }
        // ORDER: filled first and then given its name, so that nobody ever joins one that still
        // allows everything.
        static DRAFTS: AtomicU32 = AtomicU32::new(0);
        let number = DRAFTS.fetch_add(1, Ordering::Relaxed);
        let draft = format!("{SHARED_DEVICES}-{}-{number}", std::process::id());
        parent.remove(&draft)?; // left by an earlier process of this pid
        let list = parent.make(&draft)?;
        let filled = write_list(&list, ORDINARY);
        let published = filled.and_then(|()| parent.rename(&draft, SHARED_DEVICES));
        match published {
            Ok(()) => {}
            Err(e) => {
                let _ = parent.remove(&draft);
                if e.errno() != libc::EEXIST {
                    return Err(e);
                }
            }
        }
    }
}

fn write_list(list: &Dir, rules: &[DeviceRule]) -> CallResult<()> {
    list.write("devices.deny", "a")?;
    rules.iter().try_for_each(|rule| list.write("devices.allow", &rule.to_v1()))
}

impl Cgroup {
    /// Allows devices on top of the ordinary ones. Called before [`placement`](Self::placement):
    /// processes that were placed before stay with the list that they have.
    pub fn allow_devices(&mut self, rules: &[DeviceRule]) -> Result<(), CgroupError> {
        if let Some(list) = self.in_v1(Controllers::DEVICES) {
            let mut each = rules.iter();
            return each
                .try_for_each(|rule| list.write("devices.allow", &rule.to_v1()))
                .map_err(CgroupError::Devices);
        }
        if let Some(parent) = self.hierarchy.v1_parent(Controllers::DEVICES)? {
            let make = || {
                let list = parent.child_or_make(&self.name)?;
                write_list(&list, ORDINARY)?;
                rules.iter().try_for_each(|rule| list.write("devices.allow", &rule.to_v1()))?;
                Ok(list)
            };
            let list = make().map_err(CgroupError::Devices)?;
            self.v1.push((Controllers::DEVICES, list));
        }
        Ok(())
    }
}
