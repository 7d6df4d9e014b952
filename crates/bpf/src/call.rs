//! bpf(2) for maps and attached programs: what a container start needs, without libbpf.
//!
//! A thin safe layer: sizes are checked against the map before the kernel reads or writes memory.

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use dormouse_kernel::CallError;

type Result<T, E = CallError> = std::result::Result<T, E>;

/// Several programs may be attached to one cgroup and hook (`BPF_F_ALLOW_MULTI`).
pub const ALLOW_MULTI: u32 = 2;
/// The program takes the place of another (`BPF_F_REPLACE`), since Linux 5.6.
pub const REPLACE: u32 = 4;

const MAP_LOOKUP: i32 = 1;
const MAP_UPDATE: i32 = 2;
const MAP_DELETE: i32 = 3;
const MAP_NEXT_KEY: i32 = 4;
const PIN: i32 = 6;
const PINNED: i32 = 7;
const PROG_ATTACH: i32 = 8;
const PROG_DETACH: i32 = 9;
const PROG_BY_ID: i32 = 13;
const MAP_BY_ID: i32 = 14;
const INFO: i32 = 15;
const PROG_QUERY: i32 = 16;
const RAW_TRACEPOINT_OPEN: i32 = 17;
const MAP_TAKE: i32 = 21;
const MAP_LOOKUP_BATCH: i32 = 24;
const LINK_CREATE: i32 = 28;
const ENABLE_STATS: i32 = 32;
const PROG_BIND_MAP: i32 = 35;

/// The part of `union bpf_attr` that one command reads. The kernel takes the rest as zero.
///
/// # Safety
/// Every pointer in `attr` must be valid for what `command` does with it.
unsafe fn bpf<T>(command: i32, attr: &mut T) -> Result<i32, i32> {
    // SAFETY: attr is a local value of the given size, and the caller guarantees the pointers
    // within.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attr as *mut T, size_of::<T>()) };
    if result < 0 {
        Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    } else {
        Ok(result as i32)
    }
}

fn owned(fd: i32) -> OwnedFd {
    // SAFETY: bpf(2) has just made this descriptor for us alone (it is close-on-exec).
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// A map, with the sizes that calls are checked against.
#[derive(Debug)]
pub struct Map {
    fd: OwnedFd,
    /// Name as the kernel keeps it: the first 15 bytes.
    pub name: String,
    /// Its id. The kernel gives one again only after two thousand million others.
    pub id: u32,
    /// Number of entries that it can hold.
    pub capacity: u32,
    key_bytes: usize,
    value_bytes: usize,
}

#[repr(C)]
struct Element {
    map: u32,
    pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

impl Map {
    /// Takes a descriptor of a map (Linux 4.13 for its description).
    pub fn new(fd: OwnedFd) -> Result<Self> {
        let info: MapInfo = info(fd.as_fd(), "map")?;
        Ok(Self {
            fd,
            name: text(&info.name),
            id: info.id,
            capacity: info.max_entries,
            key_bytes: info.key_size as usize,
            value_bytes: info.value_size as usize,
        })
    }

    /// Bytes of a key.
    pub fn key_bytes(&self) -> usize {
        self.key_bytes
    }

    /// Bytes of a value.
    pub fn value_bytes(&self) -> usize {
        self.value_bytes
    }

    /// The map with this id (Linux 4.13).
    pub fn by_id(id: u32) -> Result<Self> {
        let mut attr = [id, 0, 0];
        // SAFETY: BPF_MAP_GET_FD_BY_ID reads three words and no pointer.
        let fd = unsafe { bpf(MAP_BY_ID, &mut attr) }
            .map_err(|e| CallError::new("bpf", format!("MAP_GET_FD_BY_ID, {id}"), e))?;
        Self::new(owned(fd))
    }

    fn element(&self, key: &[u8], value: u64, flags: u64) -> Result<Element> {
        if key.len() != self.key_bytes {
            return Err(self.error("key", libc::EINVAL));
        }
        let map = self.fd.as_raw_fd() as u32;
        Ok(Element { map, pad: 0, key: key.as_ptr() as u64, value, flags })
    }

    fn error(&self, what: &str, errno: i32) -> CallError {
        CallError::new("bpf", format!("{what}, map '{}'", self.name), errno)
    }

    /// Sets the value of a key. Not for per-CPU maps.
    pub fn set(&self, key: &[u8], value: &[u8]) -> Result<()> {
        if value.len() != self.value_bytes {
            return Err(self.error("value", libc::EINVAL));
        }
        let mut attr = self.element(key, value.as_ptr() as u64, 0)?;
        // SAFETY: key and value are as long as the map's, and outlive the call.
        unsafe { bpf(MAP_UPDATE, &mut attr) }.map_err(|e| self.error("MAP_UPDATE_ELEM", e))?;
        Ok(())
    }

    /// Sets the value of a key that has none. Returns whether it had none. Not for per-CPU maps.
    pub fn set_new(&self, key: &[u8], value: &[u8]) -> Result<bool> {
        const NOEXIST: u64 = 1;
        if value.len() != self.value_bytes {
            return Err(self.error("value", libc::EINVAL));
        }
        let mut attr = self.element(key, value.as_ptr() as u64, NOEXIST)?;
        // SAFETY: key and value are as long as the map's, and outlive the call.
        match unsafe { bpf(MAP_UPDATE, &mut attr) } {
            Err(libc::EEXIST) => Ok(false),
            other => other.map(|_| true).map_err(|e| self.error("MAP_UPDATE_ELEM", e)),
        }
    }

    /// The value of a key, if there is one. Not for per-CPU maps.
    pub fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let mut value = vec![0u8; self.value_bytes];
        let mut attr = self.element(key, value.as_mut_ptr() as u64, 0)?;
        // SAFETY: the kernel writes value_size bytes into a buffer of that size.
        match unsafe { bpf(MAP_LOOKUP, &mut attr) } {
            Ok(_) => Ok(Some(value)),
            Err(libc::ENOENT) => Ok(None),
            Err(e) => Err(self.error("MAP_LOOKUP_ELEM", e)),
        }
    }

    /// The value of a key in a per-CPU map: one for each possible processor.
    pub fn get_per_cpu(&self, key: &[u8]) -> Result<Vec<Vec<u8>>> {
        let processors = libbpf_rs::num_possible_cpus().unwrap_or(1);
        // The kernel writes each at a multiple of eight.
        let each = self.value_bytes.next_multiple_of(8);
        let mut values = vec![0u8; each * processors];
        let mut attr = self.element(key, values.as_mut_ptr() as u64, 0)?;
        // SAFETY: the kernel writes a padded value for each possible processor into room for as many.
        unsafe { bpf(MAP_LOOKUP, &mut attr) }.map_err(|e| self.error("MAP_LOOKUP_ELEM", e))?;
        Ok(values.chunks(each).map(|value| value[..self.value_bytes].to_vec()).collect())
    }

    /// All entries of a hash map, in no order (Linux 5.6). An entry that is changed meanwhile is read before or
    /// after; one that is added or removed may be in it.
    pub fn entries(&self) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        #[repr(C)]
        struct Batch {
            from: u64,
            to: u64,
            keys: u64,
            values: u64,
            count: u32,
            map: u32,
            element_flags: u64,
            flags: u64,
        }
        let (mut from, mut to) = (0u32, 0u32);
        let (mut is_first, mut room) = (true, 1024usize);
        let mut entries = Vec::new();
        loop {
            let mut keys = vec![0u8; self.key_bytes * room];
            let mut values = vec![0u8; self.value_bytes * room];
            let mut attr = Batch {
                from: if is_first { 0 } else { &raw mut from as u64 },
                to: &raw mut to as u64,
                keys: keys.as_mut_ptr() as u64,
                values: values.as_mut_ptr() as u64,
                count: room as u32,
                map: self.fd.as_raw_fd() as u32,
                element_flags: 0,
                flags: 0,
            };
            // SAFETY: the kernel writes at most `count` keys and values into room for as many. The place in a
            // hash map is one word.
            let result = unsafe { bpf(MAP_LOOKUP_BATCH, &mut attr) };
            // A bucket with more entries than there is room for.
            if result == Err(libc::ENOSPC) {
                room *= 2;
                continue;
            }
            if let Err(e) = result
                && e != libc::ENOENT
            {
                return Err(self.error("MAP_LOOKUP_BATCH", e));
            }
            let found = keys.chunks(self.key_bytes).zip(values.chunks(self.value_bytes));
            let found = found.take(attr.count as usize);
            entries.extend(found.map(|(key, value)| (key.to_vec(), value.to_vec())));
            if result.is_err() {
                return Ok(entries);
            }
            (from, is_first) = (to, false);
        }
    }

    /// Removes a key; `false` if it was not there.
    pub fn remove(&self, key: &[u8]) -> Result<bool> {
        let mut attr = self.element(key, 0, 0)?;
        // SAFETY: the key is as long as the map's and outlives the call.
        match unsafe { bpf(MAP_DELETE, &mut attr) } {
            Ok(_) => Ok(true),
            Err(libc::ENOENT) => Ok(false),
            Err(e) => Err(self.error("MAP_DELETE_ELEM", e)),
        }
    }

    /// Removes a key of a hash map, and returns its value if it was there (`MAP_LOOKUP_AND_DELETE_ELEM`, Linux 5.14).
    /// Not for per-CPU maps.
    pub fn take(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let mut value = vec![0u8; self.value_bytes];
        let mut attr = self.element(key, value.as_mut_ptr() as u64, 0)?;
        // SAFETY: the kernel writes value_size bytes into a buffer of that size.
        match unsafe { bpf(MAP_TAKE, &mut attr) } {
            Ok(_) => Ok(Some(value)),
            Err(libc::ENOENT) => Ok(None),
            Err(e) => Err(self.error("MAP_LOOKUP_AND_DELETE_ELEM", e)),
        }
    }

    /// Returns the key after `key`, the first one for `None`. After a removed key it starts from
    /// the beginning.
    pub fn next_key(&self, key: Option<&[u8]>) -> Result<Option<Vec<u8>>> {
        let mut next = vec![0u8; self.key_bytes];
        let pointer = next.as_mut_ptr() as u64;
        let mut attr = match key {
            Some(key) => self.element(key, pointer, 0)?,
            None => Element {
                map: self.fd.as_raw_fd() as u32,
                pad: 0,
                key: 0,
                value: pointer,
                flags: 0,
            },
        };
        // SAFETY: the kernel writes key_size bytes into a buffer of that size.
        match unsafe { bpf(MAP_NEXT_KEY, &mut attr) } {
            Ok(_) => Ok(Some(next)),
            Err(libc::ENOENT) => Ok(None),
            Err(e) => Err(self.error("MAP_GET_NEXT_KEY", e)),
        }
    }
}

impl AsFd for Map {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A loaded program: its descriptor and the kernel's information about it.
#[derive(Debug)]
pub struct Program {
    fd: OwnedFd,
    /// Name as the kernel keeps it: the first 15 bytes.
    pub name: String,
    /// Its id.
    pub id: u32,
    /// Ids of the maps it uses.
    pub maps: Vec<u32>,
}

impl Program {
    /// Takes a descriptor of a program (Linux 4.13 for its description).
    pub fn new(fd: OwnedFd) -> Result<Self> {
        let mut maps = vec![0u32; 64];
        let mut about = ProgramInfo {
            maps: maps.as_mut_ptr() as u64,
            map_count: maps.len() as u32,
            ..ProgramInfo::default()
        };
        fill_info(fd.as_fd(), &mut about, "program")?;
        maps.truncate(about.map_count as usize);
        Ok(Self { fd, name: text(&about.name), id: about.id, maps })
    }

    /// The program with this id (Linux 4.13).
    pub fn by_id(id: u32) -> Result<Self> {
        let mut attr = [id, 0, 0];
        // SAFETY: BPF_PROG_GET_FD_BY_ID reads three words and no pointer.
        let fd = unsafe { bpf(PROG_BY_ID, &mut attr) }
            .map_err(|e| CallError::new("bpf", format!("PROG_GET_FD_BY_ID, {id}"), e))?;
        Self::new(owned(fd))
    }

    /// Makes the program keep `map`, though its code does not use it (Linux 5.10).
    pub fn keep(&self, map: BorrowedFd<'_>) -> Result<()> {
        let mut attr = [self.fd.as_raw_fd() as u32, map.as_raw_fd() as u32, 0];
        // SAFETY: BPF_PROG_BIND_MAP reads three words and no pointer.
        unsafe { bpf(PROG_BIND_MAP, &mut attr) }
            .map_err(|e| CallError::new("bpf", format!("PROG_BIND_MAP, '{}'", self.name), e))?;
        Ok(())
    }
}

impl AsFd for Program {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[repr(C)]
#[derive(Default)]
struct ProgramInfo {
    kind: u32,
    id: u32,
    tag: [u8; 8],
    jited_bytes: u32,
    xlated_bytes: u32,
    jited: u64,
    xlated: u64,
    load_time: u64,
    uid: u32,
    map_count: u32,
    maps: u64,
    name: [u8; 16],
}

#[repr(C)]
#[derive(Default)]
struct MapInfo {
    kind: u32,
    id: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    name: [u8; 16],
}

fn info<T: Default>(fd: BorrowedFd<'_>, what: &str) -> Result<T> {
    let mut info = T::default();
    fill_info(fd, &mut info, what)?;
    Ok(info)
}

fn fill_info<T>(fd: BorrowedFd<'_>, info: &mut T, what: &str) -> Result<()> {
    #[repr(C)]
    struct Attr {
        fd: u32,
        bytes: u32,
        info: u64,
    }
    let mut attr = Attr {
        fd: fd.as_raw_fd() as u32,
        bytes: size_of::<T>() as u32,
        info: info as *mut T as u64,
    };
    // SAFETY: the kernel writes at most `bytes` bytes to `info`; both descriptions are plain words,
    // and the one pointer within (map ids) has room for the count beside it.
    unsafe { bpf(INFO, &mut attr) }
        .map_err(|e| CallError::new("bpf", format!("OBJ_GET_INFO_BY_FD, {what}"), e))?;
    Ok(())
}

fn text(name: &[u8; 16]) -> String {
    let end = name.iter().position(|b| *b == 0).unwrap_or(16);
    String::from_utf8_lossy(&name[..end]).into_owned()
}

#[repr(C)]
struct Pin {
    path: u64,
    fd: u32,
    flags: u32,
}

/// Gives a map, a program or a link a name in a bpffs, which keeps it (Linux 4.4).
pub fn pin(object: BorrowedFd<'_>, path: &Path) -> Result<()> {
    let explain = |e| CallError::new("bpf", format!("OBJ_PIN, {path:?}"), e);
    let name = CString::new(path.as_os_str().as_bytes()).map_err(|_| explain(libc::EINVAL))?;
    let mut attr = Pin { path: name.as_ptr() as u64, fd: object.as_raw_fd() as u32, flags: 0 };
    // SAFETY: the name is a string that outlives the call.
    unsafe { bpf(PIN, &mut attr) }.map_err(explain)?;
    Ok(())
}

/// Opens an object by its name in a bpffs; `None` if there is no such name (Linux 4.4).
pub fn pinned(path: &Path) -> Result<Option<OwnedFd>> {
    let explain = |e| CallError::new("bpf", format!("OBJ_GET, {path:?}"), e);
    let name = CString::new(path.as_os_str().as_bytes()).map_err(|_| explain(libc::EINVAL))?;
    let mut attr = Pin { path: name.as_ptr() as u64, fd: 0, flags: 0 };
    // SAFETY: the name is a string that outlives the call.
    match unsafe { bpf(PINNED, &mut attr) } {
        Ok(fd) => Ok(Some(owned(fd))),
        Err(libc::ENOENT) => Ok(None),
        Err(e) => Err(explain(e)),
    }
}

/// Attaches a program to the tracepoint with BTF that it was loaded for, until the returned descriptor and all
/// names of it are gone (Linux 5.5).
pub fn attach_to_tracepoint(program: BorrowedFd<'_>) -> Result<OwnedFd> {
    // The name is a part of the program.
    let mut attr = [0, 0, program.as_raw_fd() as u32, 0];
    // SAFETY: BPF_RAW_TRACEPOINT_OPEN reads a null pointer and a descriptor.
    let link = unsafe { bpf(RAW_TRACEPOINT_OPEN, &mut attr) }
        .map_err(|e| CallError::new("bpf", "RAW_TRACEPOINT_OPEN".into(), e))?;
    Ok(owned(link))
}

/// Returns whether the kernel calls BPF programs at the hooks of security modules. It loads them also where it does
/// not. lsm_list_modules(2), Linux 6.8; `None` before.
pub fn bpf_module() -> Option<bool> {
    const LIST_MODULES: libc::c_long = 461;
    const BPF: u64 = 109;
    let mut ids = [0_u64; 64];
    let mut bytes = size_of_val(&ids) as u32;
    // SAFETY: the kernel writes at most `bytes` bytes to `ids`, and then their number.
    let count = unsafe { libc::syscall(LIST_MODULES, ids.as_mut_ptr(), &raw mut bytes, 0) };
    let ids = ids.get(..usize::try_from(count).ok()?)?;
    Some(ids.contains(&BPF))
}

/// The same; true if that is not known.
pub fn has_bpf_module() -> bool {
    bpf_module().unwrap_or(true)
}

/// The id of the program of a link (Linux 5.8).
pub fn program_of_link(link: BorrowedFd<'_>) -> Result<u32> {
    #[repr(C)]
    #[derive(Default)]
    struct LinkInfo {
        kind: u32,
        id: u32,
        program: u32,
        pad: u32,
    }
    let info: LinkInfo = info(link, "link")?;
    Ok(info.program)
}

/// Counts runs of programs and their time until the returned descriptor is closed (Linux 5.8). Costs each run
/// some 20 ns.
pub fn count_runs() -> Result<OwnedFd> {
    let mut attr = [libbpf_rs::libbpf_sys::BPF_STATS_RUN_TIME, 0];
    // SAFETY: BPF_ENABLE_STATS reads one word.
    let counting = unsafe { bpf(ENABLE_STATS, &mut attr) }
        .map_err(|e| CallError::new("bpf", "ENABLE_STATS".into(), e))?;
    Ok(owned(counting))
}

/// Waits until every program that runs now has ended: membarrier(2), which waits for an RCU grace period.
pub fn wait_for_programs() {
    // SAFETY: membarrier(2) has two numbers as its arguments.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_GLOBAL, 0) };
    if result != 0 {
        // A kernel with nohz_full refuses. A program runs with preemption off, for some microseconds.
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}

/// How often a program ran, and for how long, while runs were counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Runs {
    /// Number of runs.
    pub count: u64,
    /// Time of all of them.
    pub ns: u64,
}

impl Program {
    /// Returns the runs that were counted: see [`count_runs`] and the sysctl `kernel.bpf_stats_enabled`.
    pub fn runs(&self) -> Result<Runs> {
        let mut about = libbpf_rs::libbpf_sys::bpf_prog_info::default();
        fill_info(self.fd.as_fd(), &mut about, "program")?;
        Ok(Runs { count: about.run_cnt, ns: about.run_time_ns })
    }
}

#[repr(C)]
struct Attachment {
    target: u32,
    program: u32,
    hook: u32,
    flags: u32,
    replaced: u32,
    pad: u32,
    revision: u64,
}

/// Attaches a program to a cgroup; with `replaced`, in one step in the place of that one.
/// `hook` is a `BPF_*` attach type (Linux 4.15, with `replaced` 5.6).
pub fn attach_to_cgroup(
    cgroup: BorrowedFd<'_>,
    program: BorrowedFd<'_>,
    hook: u32,
    replaced: Option<BorrowedFd<'_>>,
) -> Result<()> {
    let mut attr = Attachment {
        target: cgroup.as_raw_fd() as u32,
        program: program.as_raw_fd() as u32,
        hook,
        flags: ALLOW_MULTI | if replaced.is_some() { REPLACE } else { 0 },
        replaced: replaced.map_or(0, |r| r.as_raw_fd() as u32),
        pad: 0,
        revision: 0,
    };
    // SAFETY: BPF_PROG_ATTACH reads words and descriptors, no pointer.
    unsafe { bpf(PROG_ATTACH, &mut attr) }
        .map_err(|e| CallError::new("bpf", format!("PROG_ATTACH, hook {hook}"), e))?;
    Ok(())
}

/// Attaches a program to a cgroup until the returned descriptor and all names of it are gone (Linux 5.7).
pub fn link_to_cgroup(
    cgroup: BorrowedFd<'_>,
    program: BorrowedFd<'_>,
    hook: u32,
) -> Result<OwnedFd> {
    // Program, cgroup, hook, flags; no other program to be before or behind, any revision.
    let mut attr = [program.as_raw_fd() as u32, cgroup.as_raw_fd() as u32, hook, 0, 0, 0, 0, 0];
    // SAFETY: BPF_LINK_CREATE reads words and descriptors, no pointer.
    let link = unsafe { bpf(LINK_CREATE, &mut attr) }
        .map_err(|e| CallError::new("bpf", format!("LINK_CREATE, hook {hook}"), e))?;
    Ok(owned(link))
}

/// Detaches a program from a cgroup (Linux 4.10).
pub fn detach_from_cgroup(
    cgroup: BorrowedFd<'_>,
    program: BorrowedFd<'_>,
    hook: u32,
) -> Result<()> {
    let mut attr = Attachment {
        target: cgroup.as_raw_fd() as u32,
        program: program.as_raw_fd() as u32,
        hook,
        flags: 0,
        replaced: 0,
        pad: 0,
        revision: 0,
    };
    // SAFETY: BPF_PROG_DETACH reads words and descriptors, no pointer.
    unsafe { bpf(PROG_DETACH, &mut attr) }
        .map_err(|e| CallError::new("bpf", format!("PROG_DETACH, hook {hook}"), e))?;
    Ok(())
}

/// Attaches a program to the ingress of a device of the calling thread's network namespace (TCX,
/// Linux 6.6). The attachment ends with the device.
pub fn attach_to_device(ifindex: u32, program: BorrowedFd<'_>) -> Result<()> {
    attach_to_device_at(ifindex, libbpf_rs::libbpf_sys::BPF_TCX_INGRESS, program)
}

/// The same at a hook of TCX.
pub fn attach_to_device_at(ifindex: u32, hook: u32, program: BorrowedFd<'_>) -> Result<()> {
    let mut attr = Attachment {
        target: ifindex,
        program: program.as_raw_fd() as u32,
        hook,
        flags: 0,
        replaced: 0,
        pad: 0,
        revision: 0,
    };
    // SAFETY: BPF_PROG_ATTACH reads words and a descriptor, no pointer.
    unsafe { bpf(PROG_ATTACH, &mut attr) }
        .map_err(|e| CallError::new("bpf", format!("PROG_ATTACH, TCX, device {ifindex}"), e))?;
    Ok(())
}

/// Detaches a program from a hook of TCX.
pub fn detach_from_device(ifindex: u32, hook: u32, program: BorrowedFd<'_>) -> Result<()> {
    let mut attr = Attachment {
        target: ifindex,
        program: program.as_raw_fd() as u32,
        hook,
        flags: 0,
        replaced: 0,
        pad: 0,
        revision: 0,
    };
    // SAFETY: BPF_PROG_DETACH reads words and a descriptor, no pointer.
    unsafe { bpf(PROG_DETACH, &mut attr) }
        .map_err(|e| CallError::new("bpf", format!("PROG_DETACH, TCX, device {ifindex}"), e))?;
    Ok(())
}

/// The same until the returned descriptor is closed.
pub fn link_to_device(ifindex: u32, program: BorrowedFd<'_>) -> Result<OwnedFd> {
    // Program, device, hook, flags; no other program to be before or behind, any revision.
    let hook = libbpf_rs::libbpf_sys::BPF_TCX_INGRESS;
    let mut attr = [program.as_raw_fd() as u32, ifindex, hook, 0, 0, 0, 0, 0];
    // SAFETY: BPF_LINK_CREATE reads words and a descriptor, no pointer.
    let link = unsafe { bpf(LINK_CREATE, &mut attr) }
        .map_err(|e| CallError::new("bpf", format!("LINK_CREATE, TCX, device {ifindex}"), e))?;
    Ok(owned(link))
}

/// Ids of the programs attached to this very cgroup (Linux 4.15).
pub fn attached_to_cgroup(cgroup: BorrowedFd<'_>, hook: u32) -> Result<Vec<u32>> {
    attached(cgroup.as_raw_fd() as u32, hook)
}

/// Ids of the programs at a hook (TCX) of a device of the calling thread's network namespace (Linux 6.6).
pub fn attached_to_device(ifindex: u32, hook: u32) -> Result<Vec<u32>> {
    match attached(ifindex, hook) {
        Err(e) if e.errno() == libc::ENOENT => Ok(Vec::new()), // none was ever attached
        other => other,
    }
}

fn attached(target: u32, hook: u32) -> Result<Vec<u32>> {
    #[repr(C)]
    struct Attr {
        target: u32,
        hook: u32,
        query_flags: u32,
        attach_flags: u32,
        ids: u64,
        count: u32,
        pad: u32,
        // The kernel writes here (program flags, revision), even if the size passed is smaller.
        room: [u64; 4],
    }
    let mut ids = vec![0u32; 64];
    let mut attr = Attr {
        target,
        hook,
        query_flags: 0,
        attach_flags: 0,
        ids: ids.as_mut_ptr() as u64,
        count: ids.len() as u32,
        pad: 0,
        room: [0; 4],
    };
    // SAFETY: the kernel writes at most `count` words to `ids`. LIMIT: 64 programs per cgroup and
    // hook, which is the kernel's own limit.
    unsafe { bpf(PROG_QUERY, &mut attr) }
        .map_err(|e| CallError::new("bpf", format!("PROG_QUERY, hook {hook}"), e))?;
    ids.truncate(attr.count as usize);
    Ok(ids)
}

/// The cookie of a socket's network namespace, never used again (socket(7), Linux 5.14).
pub fn netns_cookie(socket: BorrowedFd<'_>) -> Result<u64> {
    let mut cookie = 0u64;
    let mut size = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `size` bytes to `cookie`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut size,
        )
    };
    if result < 0 {
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        return Err(CallError::new("getsockopt", "SO_NETNS_COOKIE".into(), errno));
    }
    Ok(cookie)
}
