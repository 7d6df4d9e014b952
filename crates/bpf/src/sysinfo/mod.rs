//! sysinfo(2) of processes in containers; see `sysinfo.bpf.c`.
//!
//! Map and link have names in a directory of a bpffs, which the caller mounts, and which keeps them while no process
//! has a descriptor. Callers hold a lock for [`Sysinfo::load`].
//!
//! ORDER: a load names the map last, after the program is attached. [`Sysinfo::find`] looks for it.
//!
//! LIMIT: the kernel attaches 38 programs to one function, so as many instances can have views of sysinfo(2).

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use crate::call::{self, Map};
use crate::error::BpfError;
use crate::group::Description;
use crate::record::{Record, record};

type Result<T, E = BpfError> = std::result::Result<T, E>;

static GROUP: Description = Description {
    name: "sysinfo",
    object: include_bytes!(concat!(env!("OUT_DIR"), "/sysinfo.o")),
    programs: &[],
    anchor: PROGRAM,
    maps: &[VIEWS],
    about: VIEWS,
};

const PROGRAM: &str = "dm_sysinfo_exit";
const VIEWS: &str = "dm_sysinfo";

/// LIMIT: containers with a view.
pub const VIEWS_MAX: u32 = 1 << 16;

/// `DM_SYSINFO_MEMORY`
const MEMORY: u32 = 1;
/// `DM_SYSINFO_SWAP_V1`
const SWAP_V1: u32 = 2;

record! {
    struct Config = "dm_sysinfo_config" {
        level: u32,
        page_bytes: u32,
    }
}

record! {
    struct ViewRecord = "dm_sysinfo_view" {
        memory_bytes: u64,
        swap_bytes: u64,
        shared_bytes: u64,
        loads: [u64; 3],
        called_ns: u64,
        base: u32,
        flags: u32,
    }
}

/// Memory as a container sees it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// All memory.
    pub bytes: u64,
    /// All swap.
    pub swap_bytes: u64,
    /// Of the memory in use, that of tmpfs and shared memory.
    pub shared_bytes: u64,
}

/// What sysinfo(2) returns in a container.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct View {
    /// The first host id of the container.
    pub base: u32,
    /// Its memory; `None` is that of the host.
    pub memory: Option<Memory>,
    /// Load averages over 1, 5 and 15 minutes.
    pub loads: [f64; 3],
    /// The boot clock at the last call, in nanoseconds; 0 before the first.
    pub called_ns: u64,
}

/// SI_LOAD_SHIFT of sysinfo(2).
const LOAD_PARTS: f64 = 65536.0;

impl View {
    fn record(&self, is_v2: bool) -> ViewRecord {
        let memory = self.memory.unwrap_or_default();
        let has = if self.memory.is_some() { MEMORY } else { 0 };
        ViewRecord {
            memory_bytes: memory.bytes,
            swap_bytes: memory.swap_bytes,
            shared_bytes: memory.shared_bytes,
            loads: self.loads.map(|load| (load * LOAD_PARTS) as u64),
            called_ns: self.called_ns,
            base: self.base,
            flags: has | if is_v2 { 0 } else { SWAP_V1 },
        }
    }

    fn of(record: &ViewRecord) -> Self {
        let memory = Memory {
            bytes: record.memory_bytes,
            swap_bytes: record.swap_bytes,
            shared_bytes: record.shared_bytes,
        };
        Self {
            base: record.base,
            memory: (record.flags & MEMORY != 0).then_some(memory),
            loads: record.loads.map(|load| load as f64 / LOAD_PARTS),
            called_ns: record.called_ns,
        }
    }
}

fn config(level: u32) -> Vec<u8> {
    let page_bytes = u32::try_from(rustix::param::page_size()).unwrap_or(4096);
    Config { level, page_bytes }.to_bytes()
}

/// The program, attached until the link and its names are gone.
fn attach(level: u32) -> Result<(Map, OwnedFd)> {
    let missing = |name: &str| BpfError::Missing { object: GROUP.name, name: name.into() };
    let (maps, programs) = GROUP.load_alone_with(&config(level))?;
    let map = maps.into_iter().next().ok_or_else(|| missing(VIEWS))?;
    let program = programs.into_iter().next().ok_or_else(|| missing(PROGRAM))?;
    let link = call::attach_to_tracepoint(program.as_fd());
    let link = link.map_err(|source| BpfError::Attach { program: PROGRAM, source })?;
    Ok((map, link))
}

/// Tests whether this kernel loads and attaches the program. It runs at each sysinfo(2) of the host for a moment, and
/// knows no container.
pub fn supported() -> Result<()> {
    attach(2).map(drop)
}

/// The views of sysinfo(2) of an instance.
#[derive(Debug)]
pub struct Sysinfo {
    views: Map,
}

impl Sysinfo {
    /// Loads and attaches the program for containers at this level below the root of cgroups, and names it in this
    /// directory of a bpffs. Takes some 30 ms. Names of an interrupted load are replaced by those of this one.
    pub fn load(dir: &Path, level: u32) -> Result<Self> {
        let (views, link) = attach(level)?;
        let place = dir.join(PROGRAM);
        match std::fs::remove_file(&place) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                let errno = e.raw_os_error().unwrap_or(libc::EIO);
                let call = dormouse_kernel::CallError::new("unlink", format!("{place:?}"), errno);
                return Err(call.into());
            }
            _ => {}
        }
        call::pin(link.as_fd(), &place)?;
        call::pin(views.as_fd(), &dir.join(VIEWS))?;
        Ok(Self { views })
    }

    /// The views with names in this directory; `None` if there are none, or those of a build with other records.
    pub fn find(dir: &Path) -> Result<Option<Self>> {
        let Some(views) = call::pinned(&dir.join(VIEWS))? else { return Ok(None) };
        let views = Map::new(views)?;
        Ok((views.value_bytes() == size_of::<ViewRecord>()).then_some(Self { views }))
    }

    /// Sets what processes below a cgroup of v2 see. `is_v2`: memory is counted by cgroup v2. E2BIG if the map is full.
    pub fn set(&self, cgroup_v2_id: u64, view: &View, is_v2: bool) -> Result<()> {
        let value = view.record(is_v2).to_bytes();
        Ok(self.views.set(&cgroup_v2_id.to_ne_bytes(), &value)?)
    }

    /// Returns what processes below a cgroup see; `None` if that is the host.
    pub fn get(&self, cgroup_v2_id: u64) -> Result<Option<View>> {
        let value = self.views.get(&cgroup_v2_id.to_ne_bytes())?;
        Ok(value.map(|value| View::of(&ViewRecord::from_bytes(&value))))
    }

    /// Returns all views by their cgroups.
    pub fn all(&self) -> Result<Vec<(u64, View)>> {
        let view = |(key, value): (Vec<u8>, Vec<u8>)| {
            let id = key.first_chunk().map_or(0, |id| u64::from_ne_bytes(*id));
            (id, View::of(&ViewRecord::from_bytes(&value)))
        };
        Ok(self.views.entries()?.into_iter().map(view).collect())
    }

    /// Forgets a cgroup that has no processes any more.
    pub fn leave(&self, cgroup_v2_id: u64) -> Result<()> {
        self.views.remove(&cgroup_v2_id.to_ne_bytes())?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::group::tests::assert_full;
    use crate::record::tests::assert_same;

    use super::*;

    #[test]
    fn records_have_the_layout_of_the_header() {
        assert_same::<Config>(GROUP.object);
        assert_same::<ViewRecord>(GROUP.object);
        for name in [PROGRAM, VIEWS] {
            assert!(name.len() <= 15, "{name}");
        }
    }

    #[test]
    fn view_is_read_as_it_was_written() {
        let memory = Memory { bytes: 5 << 20, swap_bytes: 7, shared_bytes: 8 };
        let view = View { base: 9, memory: Some(memory), loads: [0.5, 1.0, 2.25], called_ns: 3 };
        assert_eq!(View::of(&view.record(true)), view);
        assert_eq!(View::of(&View::default().record(false)), View::default());
        assert_eq!(view.record(false).flags, MEMORY | SWAP_V1);
    }

    #[test]
    fn root_kernel_takes_the_program_or_refuses_all_of_its_kind() {
        match supported() {
            Ok(()) => {}
            // A kernel in lockdown.
            Err(BpfError::Load { source, .. })
                if source.kind() == libbpf_rs::ErrorKind::PermissionDenied =>
            {
                eprintln!("SKIPPED: {source}");
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn root_full_map_refuses_one_more_entry_and_takes_it_after_a_removal() {
        let Ok((map, _link)) = attach(2).inspect_err(|e| eprintln!("SKIPPED: {e}")) else { return };
        assert_full(&map, VIEWS_MAX);
    }
}
