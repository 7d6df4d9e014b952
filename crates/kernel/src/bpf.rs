//! Programs of a few instructions, assembled by hand and loaded by bpf(2): for the device list and
//! for probing what this kernel lets load. Everything larger is written in C and lives elsewhere.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::Errno;
use crate::error::{Explain, Result};

/// One eBPF instruction (Documentation/bpf/standardization/instruction-set.rst).
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Insn(u64);

/// Registers by number: 0 is returned, 1 is the context.
impl Insn {
    const fn new(code: u8, dst: u8, src: u8, offset: i16, immediate: i32) -> Self {
        let registers = dst | src << 4;
        Self(
            code as u64
                | (registers as u64) << 8
                | (offset as u16 as u64) << 16
                | (immediate as u32 as u64) << 32,
        )
    }

    /// `dst = immediate`
    pub(crate) const fn set(dst: u8, immediate: i32) -> Self {
        Self::new(0xb7, dst, 0, 0, immediate)
    }

    /// `dst = src`
    pub(crate) const fn copy(dst: u8, src: u8) -> Self {
        Self::new(0xbf, dst, src, 0, 0)
    }

    /// `dst &= immediate`
    pub(crate) const fn and(dst: u8, immediate: i32) -> Self {
        Self::new(0x57, dst, 0, 0, immediate)
    }

    /// `dst >>= bits`
    pub(crate) const fn shift_right(dst: u8, bits: i32) -> Self {
        Self::new(0x77, dst, 0, 0, bits)
    }

    /// `dst = *(u32 *)(src + offset)`
    pub(crate) const fn load(dst: u8, src: u8, offset: i16) -> Self {
        Self::new(0x61, dst, src, offset, 0)
    }

    /// `dst += immediate`
    pub(crate) const fn add(dst: u8, immediate: i32) -> Self {
        Self::new(0x07, dst, 0, 0, immediate)
    }

    /// `dst = *(u64 *)(src + offset)`
    pub(crate) const fn load_wide(dst: u8, src: u8, offset: i16) -> Self {
        Self::new(0x79, dst, src, offset, 0)
    }

    /// `*(u64 *)(dst + offset) = src`
    pub(crate) const fn store_wide(dst: u8, offset: i16, src: u8) -> Self {
        Self::new(0x7b, dst, src, offset, 0)
    }

    /// `r0 = helper(r1, r2, r3, r4, r5)`
    pub(crate) const fn call(helper: i32) -> Self {
        Self::new(0x85, 0, 0, 0, helper)
    }

    /// `if dst != immediate, skip so many instructions`
    pub(crate) const fn skip_unless(dst: u8, immediate: i32, instructions: i16) -> Self {
        Self::new(0x55, dst, 0, instructions, immediate)
    }

    /// `skip so many instructions`
    pub(crate) const fn jump(instructions: i16) -> Self {
        Self::new(0x05, 0, 0, instructions, 0)
    }

    /// `return r0`
    pub(crate) const fn exit() -> Self {
        Self::new(0x95, 0, 0, 0, 0)
    }
}

/// `enum bpf_prog_type`, as far as it is used.
#[derive(Debug, Clone, Copy)]
#[repr(u32)]
pub(crate) enum ProgramType {
    CgroupSkb = 8,
    CgroupSock = 9,
    SockOps = 13,
    CgroupDevice = 15,
    CgroupSockAddr = 18,
    CgroupSockopt = 25,
    Tracing = 26,
    Lsm = 29,
}

/// `enum bpf_attach_type`, as far as it is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum AttachType {
    SkbIngress = 0,
    SockCreate = 2,
    SockOps = 3,
    Device = 6,
    Bind4 = 8,
    Bind6 = 9,
    Connect4 = 10,
    Connect6 = 11,
    PostBind4 = 12,
    Sendmsg4 = 14,
    Sendmsg6 = 15,
    Setsockopt = 22,
    RawTracepoint = 23,
    Fentry = 24,
    Fexit = 25,
    LsmMac = 27,
    Iterator = 28,
    Getsockname4 = 31,
    SockRelease = 34,
    /// KERNEL(6.7)
    UnixConnect = 49,
}

/// Arguments of [`load`].
#[derive(Debug)]
pub(crate) struct Program<'a> {
    pub(crate) kind: ProgramType,
    pub(crate) attach: AttachType,
    pub(crate) code: &'a [Insn],
    /// At most 15 bytes are kept.
    pub(crate) name: &'a str,
    /// The type in the kernel's BTF that a tracing or LSM program is for.
    pub(crate) btf_id: Option<u32>,
}

const PROG_LOAD: u32 = 5;
const PROG_ATTACH: u32 = 8;
const PROG_GET_FD_BY_ID: u32 = 13;
const OBJ_GET_INFO_BY_FD: u32 = 15;
const PROG_QUERY: u32 = 16;
const LINK_CREATE: u32 = 28;
const ITER_CREATE: u32 = 33;
/// A program further down replaces this one for its part of the tree.
const ALLOW_OVERRIDE: u32 = 1;

/// bpf(2). The attributes are zero-extended by the kernel where they are shorter than its own.
fn bpf<T>(command: u32, attributes: &mut T) -> Result<usize, Errno> {
    // SAFETY: the size passed is that of the structure, its pointers are to data that the callers
    // below keep alive over the call, and the kernel writes to nothing else.
    let returned = unsafe {
        libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attributes), size_of::<T>())
    };
    if returned >= 0 {
        return Ok(returned as usize);
    }
    // SAFETY: the location is valid for the life of the thread.
    Err(Errno::from_raw_os_error(unsafe { *libc::__errno_location() }))
}

/// A descriptor that a command has just returned.
fn owned(returned: usize) -> OwnedFd {
    // SAFETY: the call made it and no other value owns it; bpf(2) sets close-on-exec.
    unsafe { OwnedFd::from_raw_fd(returned as RawFd) }
}

/// Loads a program. EPERM without CAP_BPF and its kind (CAP_NET_ADMIN, CAP_PERFMON), EINVAL for a
/// kind that the kernel does not know.
pub(crate) fn load(program: &Program<'_>) -> Result<OwnedFd> {
    #[repr(C)]
    #[derive(Default)]
    struct Attributes {
        kind: u32,
        length: u32,
        code: u64,
        license: u64,
        log_level: u32,
        log_size: u32,
        log: u64,
        version: u32,
        flags: u32,
        name: [u8; 16],
        interface: u32,
        attach: u32,
        btf: u32,
        func_info_size: u32,
        func_info: u64,
        func_info_count: u32,
        line_info_size: u32,
        line_info: u64,
        line_info_count: u32,
        btf_id: u32,
        btf_object: u32,
        unused: u32,
    }
    let license = c"GPL";
    let mut attributes = Attributes {
        kind: program.kind as u32,
        length: program.code.len() as u32,
        code: program.code.as_ptr() as u64,
        license: license.as_ptr() as u64,
        attach: program.attach as u32,
        btf_id: program.btf_id.unwrap_or(0),
        ..Attributes::default()
    };
    let name = program.name.as_bytes();
    let kept = name.len().min(15);
    attributes.name[..kept].copy_from_slice(&name[..kept]);
    bpf(PROG_LOAD, &mut attributes)
        .map(owned)
        .explain("bpf", || format!("PROG_LOAD, {:?} for {:?}", program.kind, program.attach))
}

/// The attributes of a link to an iterator.
#[repr(C)]
#[derive(Default)]
struct IteratorLink {
    program: u32,
    target: u32,
    attach: u32,
    flags: u32,
    info: u64,
    info_length: u32,
    unused: u32,
}

/// Runs an iterator over tasks, or what they have, for one of them: what it writes is what is read
/// from here (Documentation/bpf/bpf_iterators.rst). KERNEL(6.1): before, it would be run for all.
pub fn iterate_task(program: BorrowedFd<'_>, tid: u32) -> Result<OwnedFd> {
    #[repr(C)]
    #[derive(Default)]
    struct Task {
        tid: u32,
        pid: u32,
        pidfd: u32,
        unused: u32,
    }
    let task = Task { tid, ..Task::default() };
    let info = std::ptr::from_ref(&task) as u64;
    let info_length = size_of::<Task>() as u32;
    let link = IteratorLink { info, info_length, ..IteratorLink::default() };
    begin(program, link, || format!("an iterator over task {tid}"))
}

/// Runs an iterator over all objects of its kind in the namespaces of the calling thread; the output is
/// read from the returned file. KERNEL(5.8).
pub fn iterate(program: BorrowedFd<'_>) -> Result<OwnedFd> {
    begin(program, IteratorLink::default(), || "an iterator".into())
}

fn begin(
    program: BorrowedFd<'_>,
    mut attributes: IteratorLink,
    describe: impl Fn() -> String,
) -> Result<OwnedFd> {
    attributes.program = program.as_raw_fd() as u32;
    attributes.attach = AttachType::Iterator as u32;
    let link = bpf(LINK_CREATE, &mut attributes).map(owned).explain("bpf", &describe)?;
    let mut from_link = [link.as_raw_fd() as u32, 0];
    bpf(ITER_CREATE, &mut from_link).map(owned).explain("bpf", &describe)
}

#[repr(C)]
#[derive(Default)]
struct Attachment {
    target: u32,
    program: u32,
    kind: u32,
    flags: u32,
    replaced: u32,
}

/// Attaches a program to a v2 cgroup in place of the one that is there; a cgroup below may have
/// its own instead.
pub(crate) fn attach(cgroup: impl AsFd, program: BorrowedFd<'_>, kind: AttachType) -> Result<()> {
    let mut attributes = Attachment {
        target: cgroup.as_fd().as_raw_fd() as u32,
        program: program.as_raw_fd() as u32,
        kind: kind as u32,
        flags: ALLOW_OVERRIDE,
        ..Attachment::default()
    };
    bpf(PROG_ATTACH, &mut attributes).explain("bpf", || format!("PROG_ATTACH, {kind:?}"))?;
    Ok(())
}

/// Whether a program of this name is attached to a v2 cgroup itself.
pub(crate) fn is_attached(cgroup: impl AsFd, kind: AttachType, name: &str) -> Result<bool> {
    #[repr(C)]
    #[derive(Default)]
    struct Query {
        target: u32,
        kind: u32,
        flags: u32,
        attach_flags: u32,
        ids: u64,
        count: u32,
        unused: u32,
    }
    #[repr(C)]
    #[derive(Default)]
    struct ById {
        id: u32,
        next: u32,
        flags: u32,
    }
    #[repr(C)]
    #[derive(Default)]
    struct Info {
        fd: u32,
        length: u32,
        info: u64,
    }
    /// `struct bpf_prog_info` up to the name.
    #[repr(C)]
    #[derive(Default)]
    struct ProgramInfo {
        before: [u64; 8],
        name: [u8; 16],
    }
    // As many as the kernel allows for one hook of one cgroup (BPF_CGROUP_MAX_PROGS).
    let mut ids = [0u32; 64];
    let mut query = Query {
        target: cgroup.as_fd().as_raw_fd() as u32,
        kind: kind as u32,
        ids: ids.as_mut_ptr() as u64,
        count: ids.len() as u32,
        ..Query::default()
    };
    bpf(PROG_QUERY, &mut query).explain("bpf", || format!("PROG_QUERY, {kind:?}"))?;
    for id in ids.into_iter().take(query.count as usize) {
        let mut by_id = ById { id, ..ById::default() };
        let program = match bpf(PROG_GET_FD_BY_ID, &mut by_id) {
            Ok(fd) => owned(fd),
            Err(Errno::NOENT) => continue, // detached meanwhile
            Err(e) => return Err(e).explain("bpf", || format!("PROG_GET_FD_BY_ID, {id}")),
        };
        let mut found = ProgramInfo::default();
        let mut info = Info {
            fd: program.as_raw_fd() as u32,
            length: size_of::<ProgramInfo>() as u32,
            info: std::ptr::from_mut(&mut found) as u64,
        };
        bpf(OBJ_GET_INFO_BY_FD, &mut info)
            .explain("bpf", || format!("OBJ_GET_INFO_BY_FD, {id}"))?;
        let length = found.name.iter().position(|b| *b == 0).unwrap_or(16);
        if &found.name[..length] == name.as_bytes() {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_encoded_as_the_kernel_reads_them() {
        assert_eq!(Insn::set(0, 1).0, 0x0000_0001_0000_00b7);
        assert_eq!(Insn::load(4, 1, 8).0, 0x0000_0000_0008_1461);
        assert_eq!(Insn::skip_unless(3, -1, 2).0, 0xffff_ffff_0002_0355);
        assert_eq!(Insn::exit().0, 0x95);
    }
}
