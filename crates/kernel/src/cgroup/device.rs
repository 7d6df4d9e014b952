//! Access to devices: a second barrier behind the missing nodes in a container's `/dev`, and behind
//! its user namespace, which prevents it from creating any.
//!
//! v1 keeps a list per cgroup. One cgroup with the ordinary list serves all containers, and a
//! container with more devices gets a separate list. v2 runs a BPF program (KERNEL(4.15)) at the
//! parent, or instead one at the container's own cgroup if there is one. A program stays attached
//! as long as its cgroup exists; no process of ours has to stay.

use std::sync::atomic::{AtomicU32, Ordering};

use std::os::fd::AsFd;

use super::dir::Dir;
use super::error::CgroupError;
use super::{Cgroup, Controllers, DevicePolicy, Hierarchy, SHARED_DEVICES};
use crate::bpf::{self, AttachType, Insn, Program, ProgramType};
use crate::error::Result as CallResult;
use crate::weaken::weakened;

/// Character or block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// `c`
    Char,
    /// `b`
    Block,
}

bitflags::bitflags! {
    /// Kinds of access to a device (Documentation/admin-guide/cgroup-v1/devices.rst).
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

/// One line of an allow-list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceRule {
    /// Character or block.
    pub kind: DeviceKind,
    /// `None` is every one.
    pub major: Option<u32>,
    /// `None` is every one.
    pub minor: Option<u32>,
    /// The allowed access.
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
    pub(super) fn to_v1(self) -> String {
        let number = |n: Option<u32>| n.map_or("*".into(), |n| n.to_string());
        let kind = if self.kind == DeviceKind::Char { 'c' } else { 'b' };
        let letters =
            [(DeviceAccess::READ, 'r'), (DeviceAccess::WRITE, 'w'), (DeviceAccess::MKNOD, 'm')];
        let access: String =
            letters.iter().filter(|(a, _)| self.access.contains(*a)).map(|(_, c)| *c).collect();
        format!("{kind} {}:{} {access}", number(self.major), number(self.minor))
    }

    /// Instructions that return 1 if the rule allows the requested access, and otherwise fall
    /// through. r2 is the access, r3 the kind, r4 and r5 major and minor.
    fn to_program(self, code: &mut Vec<Insn>) {
        // `BPF_DEVCG_DEV_*`, `BPF_DEVCG_ACC_*` (the same bits as ours).
        let kind = if self.kind == DeviceKind::Block { 1 } else { 2 };
        let numbers = [(4, self.major), (5, self.minor)];
        let numbers = numbers.into_iter().filter_map(|(register, n)| Some((register, n?)));
        // From each test to behind the two instructions that allow.
        let mut left = 2 + numbers.clone().count() as i16;
        let denied = (DeviceAccess::all() - self.access).bits() as i32;
        code.push(Insn::skip_unless(3, kind, left + 3));
        code.push(Insn::copy(0, 2));
        code.push(Insn::and(0, denied));
        code.push(Insn::skip_unless(0, 0, left));
        for (register, number) in numbers {
            left -= 1;
            code.push(Insn::skip_unless(register, number as i32, left));
        }
        code.push(Insn::set(0, 1));
        code.push(Insn::exit());
    }
}

/// The same for a rule of a list in which the last match decides. The code returns if the rule
/// matches the device and, for an allowing rule, covers all of the requested access; for a denying
/// rule, any of it.
fn to_verdict(rule: &DeviceRule, allow: bool, code: &mut Vec<Insn>) {
    let kind = if rule.kind == DeviceKind::Block { 1 } else { 2 };
    let numbers = [(4, rule.major), (5, rule.minor)];
    let numbers = numbers.into_iter().filter_map(|(register, n)| Some((register, n?)));
    let mut left = 2 + numbers.clone().count() as i16;
    let denied = (DeviceAccess::all() - rule.access).bits() as i32;
    code.push(Insn::skip_unless(3, kind, left + 3 + i16::from(!allow)));
    code.push(Insn::copy(0, 2));
    if allow {
        code.push(Insn::and(0, denied));
        code.push(Insn::skip_unless(0, 0, left));
    } else {
        // Skips the return if none of the requested access is denied.
        code.push(Insn::and(0, rule.access.bits() as i32));
        code.push(Insn::skip_unless(0, 0, 1));
        code.push(Insn::jump(left));
    }
    for (register, number) in numbers {
        left -= 1;
        code.push(Insn::skip_unless(register, number as i32, left));
    }
    code.push(Insn::set(0, i32::from(allow)));
    code.push(Insn::exit());
}

/// Puts a list of rules on a v2 cgroup, of which the last one that matches decides, and `otherwise`
/// where none does; in place of what was there.
pub(super) fn attach_verdicts(
    cgroup: &Dir,
    rules: &[(DeviceRule, bool)],
    otherwise: bool,
) -> CallResult<()> {
    let mut code = preamble();
    rules.iter().rev().for_each(|(rule, allow)| to_verdict(rule, *allow, &mut code));
    code.extend([Insn::set(0, i32::from(otherwise)), Insn::exit()]);
    let loaded = bpf::load(&Program {
        kind: ProgramType::CgroupDevice,
        attach: AttachType::Device,
        code: &code,
        name: "dormouse_oci",
        btf_id: None,
    })?;
    bpf::attach(cgroup, loaded.as_fd(), AttachType::Device)
}

/// The name by which the program is known again; the number changes with [`ORDINARY`].
const PROGRAM: &str = "dormouse_dev_1";

/// Access into r2, kind into r3, major and minor into r4 and r5.
fn preamble() -> Vec<Insn> {
    vec![
        Insn::load(2, 1, 0),
        Insn::copy(3, 2),
        Insn::and(3, 0xffff),
        Insn::shift_right(2, 16),
        Insn::load(4, 1, 4),
        Insn::load(5, 1, 8),
    ]
}

/// A program that allows what the rules allow: `struct bpf_cgroup_dev_ctx` is access << 16 | kind,
/// major, minor.
fn program(rules: impl Iterator<Item = DeviceRule>) -> Vec<Insn> {
    let mut code = preamble();
    rules.for_each(|rule| rule.to_program(&mut code));
    code.extend([Insn::set(0, 0), Insn::exit()]);
    code
}

pub(super) fn attach_program(
    cgroup: &Dir,
    rules: impl Iterator<Item = DeviceRule>,
) -> CallResult<()> {
    let loaded = bpf::load(&Program {
        kind: ProgramType::CgroupDevice,
        attach: AttachType::Device,
        code: &program(rules),
        name: PROGRAM,
        btf_id: None,
    })?;
    bpf::attach(cgroup, loaded.as_fd(), AttachType::Device)
}

/// Puts the ordinary list on the parent where it is not yet. Cheap when it is: four calls.
pub(super) fn guard_parent(parent: &Dir) -> CallResult<()> {
    if bpf::is_attached(parent, AttachType::Device, PROGRAM)? {
        return Ok(());
    }
    attach_program(parent, ORDINARY.iter().copied())
}

/// The devices that every container may use. Nodes of any device may be created (subject to the
/// user namespace), but not used.
pub(super) const ORDINARY: &[DeviceRule] = &[
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

impl Hierarchy {
    /// Puts the device list in force, and returns how.
    ///
    /// A host that can enforce none is no error: containers have no other device nodes and can
    /// make none, and `check` reports it.
    pub fn device_policy(&self) -> DevicePolicy {
        self.0.device_policy.get_or_init(|| self.enforce_devices()).clone()
    }

    fn enforce_devices(&self) -> DevicePolicy {
        if weakened("devices") {
            return DevicePolicy::None("left out of this build".into());
        }
        match (self.device_list(), &self.0.v2) {
            (Ok(Some(_)), _) => DevicePolicy::Controller,
            (Err(e), _) => DevicePolicy::None(describe(&e)),
            (Ok(None), Some(v2)) => match guard_parent(&v2.parent) {
                Ok(()) => DevicePolicy::Program,
                Err(e) => DevicePolicy::None(e.to_string()),
            },
            (Ok(None), None) => {
                DevicePolicy::None("the v1 devices controller is mounted nowhere".into())
            }
        }
    }

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
        // ORDER: filled first and then renamed, so that no process ever joins one that still allows
        // everything.
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
    /// Allows devices on top of the ordinary ones; on v2 all of them at once, instead of those of
    /// an earlier call. Called before [`placement`](Self::placement): on v1, processes that were
    /// placed before stay with the list that they have.
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
            return Ok(());
        }
        match &self.v2 {
            Some(v2) => attach_program(v2, ORDINARY.iter().chain(rules).copied())
                .map_err(CgroupError::Devices),
            None => Ok(()),
        }
    }
}

fn describe(error: &CgroupError) -> String {
    let cause = std::error::Error::source(error).map_or(String::new(), |e| format!(": {e}"));
    format!("{error}{cause}")
}
