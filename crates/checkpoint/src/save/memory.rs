//! Memory: areas from `/proc/PID/smaps`, with their files; contents by [`super::pages`].
//!
//! Only private pages of a process are read. A page of a private file mapping that was never
//! written is in the file, and shared memory is read once, from the file that the kernel keeps it
//! in. Anonymous pages of zeros are left out.

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;

use dormouse_kernel::call::{self, PageRun, Scan};
use dormouse_kernel::{Errno, handle, proc};
use dormouse_parcel::Sink;
use dormouse_record::{
    Area, Backing, Bytes, Error, Memory, Of, PAGE_BYTES, Result, SharedMemory, Thing,
};
use rustix::fs::{Mode, OFlags};

use super::ahead::Copied;
use super::mapping::{Mapping, mappings};
use super::pages::{Batch, Files, Known, file_runs, huge_runs, own_pages};
use super::refusal::Reason;
use super::seen::Seen;
use super::survey::{Found, Survey};
use super::{aio, deleted, file};

/// Flags of areas that madvise(2), mlock(2), mmap(2) and mseal(2) set and that are restored.
const KEPT: [&str; 14] =
    ["gd", "dc", "dd", "wf", "hg", "nh", "mg", "lo", "lf", "nr", "dp", "sl", "sr", "rr"];

/// Flags of areas that cannot be saved. The texts follow "memory that is".
const REFUSED: [(&str, &str); 4] = [
    ("um", "watched by a userfaultfd"),
    ("uw", "watched by a userfaultfd"),
    ("io", "a device's"),
    ("pf", "a device's"),
];

/// How the names of memory of System V begin.
const SYSTEM_V: &str = "/SYSV";

/// The areas of a process, without contents.
pub(crate) fn areas(survey: &mut Survey<'_>, seen: &Seen) -> Result<Memory> {
    let path = format!("/proc/{}/smaps", seen.pid);
    let text = match proc::whole_text(&path) {
        Ok(text) => text,
        // The process has exited since it was found.
        Err(e) if e.raw_os_error() == Some(libc::ESRCH) => return Ok(Memory::default()),
        Err(e) => return Err(Error::file("cannot read", path)(e)),
    };
    let no_huge_pages = seen.fields.number("THP_enabled") == Some(0);
    let mut memory = Memory { no_huge_pages, ..Memory::default() };
    let mut last = None;
    for mapping in mappings(&text) {
        match mapping.name {
            "[vsyscall]" => {}
            "[vdso]" | "[vvar]" | "[vvar_vclock]" => {
                let start = memory.vdso.map_or(mapping.start, |(start, _)| start);
                memory.vdso = Some((start, mapping.end - start));
            }
            _ => match area(survey, seen, &mapping, &mut last) {
                Ok(area) => memory.areas.push(area),
                Err(why) => {
                    let what = format!("memory at {:x}", mapping.start);
                    survey.found.refusals.push(seen.refuse(what, why));
                }
            },
        }
    }
    aio::check_mapped(survey, seen, &memory.areas);
    Ok(memory)
}

/// The file of the previous entry: programs and libraries are mapped in several pieces, in a row.
struct LastFile<'t> {
    device: &'t str,
    inode: u64,
    name: &'t str,
    writes: bool,
    object: usize,
}

impl LastFile<'_> {
    fn is(&self, mapping: &Mapping<'_>, writes: bool) -> bool {
        let its = (self.device, self.inode, self.name, self.writes);
        its == (mapping.device, mapping.inode, mapping.name, writes)
    }
}

fn area<'t>(
    survey: &mut Survey<'_>,
    seen: &Seen,
    mapping: &Mapping<'t>,
    last: &mut Option<LastFile<'t>>,
) -> std::result::Result<Area, Reason> {
    let has = |flag: &str| mapping.flags.contains(&flag);
    let noted = || survey.ahead.is_some_and(|a| a.notes(seen, mapping.start..mapping.end));
    let mut refused = REFUSED.iter().filter(|(flag, _)| has(flag));
    if let Some((_, why)) = refused.find(|(flag, _)| *flag != "uw" || !noted()) {
        return Err((*why).to_owned());
    }
    let access = mapping.access.bytes().zip([b'r', b'w', b'x']).enumerate();
    let access = access.fold(0, |sum, (n, (has, bit))| sum | u32::from(has == bit) << n);
    let mut flags: Vec<String> = KEPT.iter().filter(|f| has(f)).map(|f| (*f).to_owned()).collect();
    let shared = mapping.access.ends_with('s');
    let backing = backing(survey, seen, mapping, shared, last)?;
    let is_private = matches!(backing, Backing::Private { .. } | Backing::Anonymous);
    if is_private && has(Area::ACCOUNTED) && access & libc::PROT_WRITE as u32 == 0 {
        flags.push(Area::ACCOUNTED.into());
    }
    let is_attached = shared && mapping.name.starts_with(SYSTEM_V);
    if is_attached && has(Area::MAY_WRITE) && access & libc::PROT_WRITE as u32 == 0 {
        flags.push(Area::MAY_WRITE.into());
    }
    let (start, end) = (mapping.start, mapping.end);
    Ok(Area { start, end, access, backing, flags, runs: Vec::new() })
}

fn backing<'t>(
    survey: &mut Survey<'_>,
    seen: &Seen,
    mapping: &Mapping<'t>,
    shared: bool,
    last: &mut Option<LastFile<'t>>,
) -> std::result::Result<Backing, Reason> {
    if mapping.is_anonymous() {
        return Ok(Backing::Anonymous);
    }
    if mapping.name == deleted::HUGE_MEMORY && !shared {
        return Ok(Backing::Huge { page_bytes: mapping.page_bytes });
    }
    if mapping.name.starts_with('[') && !mapping.name.starts_with("[anon_shmem:") {
        return Err(format!("{}, which is not saved", mapping.name));
    }
    let place = format!("/proc/{}/map_files/{:x}-{:x}", seen.pid, mapping.start, mapping.end);
    let offset = mapping.offset;
    if shared && (mapping.name == "/dev/zero (deleted)" || mapping.name.starts_with("[anon_shmem:"))
    {
        let object = shared_memory(survey, seen, mapping, &place)?;
        let thing = &survey.found.objects[object].thing;
        if matches!(thing, Thing::SharedMemory(memory) if offset >= memory.bytes) {
            return Err("shared memory mapped behind its end, which is not saved yet".into());
        }
        return Ok(Backing::Shared { object, offset });
    }
    if shared && mapping.name.starts_with(SYSTEM_V) {
        // Ids belong to a namespace, and the file's inode has no other number.
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let handle = rustix::fs::open(&place, flags, Mode::empty())
            .and_then(|file| handle::handle_of(file.as_fd()));
        let handle = handle.map_err(|e| format!("System V shared memory: {e}"))?;
        let object = survey.segments.get(&handle).copied();
        let ipc = survey.ipc.of_process(seen);
        let (object, bytes) = object
            .and_then(|object| match &survey.found.objects[object].thing {
                Thing::SystemVMemory(memory) if memory.head.namespace == ipc => {
                    Some((object, memory.bytes.next_multiple_of(PAGE_BYTES)))
                }
                _ => None,
            })
            .ok_or("System V shared memory of another ipc namespace")?;
        if (offset, mapping.end - mapping.start) != (0, bytes) {
            return Err("a part of System V shared memory, which is not saved yet".into());
        }
        return Ok(Backing::Shared { object, offset });
    }
    if mapping.may_be_ring()
        && let Some(object) = aio::ring(survey, seen, mapping, &place)?
    {
        return Ok(Backing::Shared { object, offset });
    }
    let writes = shared && mapping.flags.contains(&"mw");
    // One file may be mapped through mounts of two namespaces, and then is two objects.
    let known = last.as_ref().filter(|last| last.is(mapping, writes) && survey.mounts.is_empty());
    let object = match known {
        Some(last) => last.object,
        None => file::mapped(survey, seen, mapping.name, &place, writes)?,
    };
    let Mapping { device, inode, name, .. } = *mapping;
    *last = Some(LastFile { device, inode, name, writes, object });
    Ok(match shared {
        true => Backing::Shared { object, offset },
        false => Backing::Private { object, offset },
    })
}

/// Shared memory without a file: identified by the inode that the kernel gave it.
fn shared_memory(
    survey: &mut Survey<'_>,
    seen: &Seen,
    mapping: &Mapping<'_>,
    place: &str,
) -> std::result::Result<usize, Reason> {
    let failed = |e: std::io::Error| format!("shared memory that cannot be opened: {e}");
    let file = File::open(place).map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    let identity = (meta.dev(), meta.ino());
    if let Some(index) = survey.shared.get(&identity) {
        return Ok(*index);
    }
    let bytes = meta.len().next_multiple_of(PAGE_BYTES);
    // LIMIT: without the container's /dev/zero it is restored as memory of MAP_ANONYMOUS.
    let no_exec = !mapping.flags.contains(&"me") && file::has_zero(seen.first);
    let memory = SharedMemory { bytes, runs: Vec::new(), no_exec };
    let index = survey.add(Thing::SharedMemory(memory));
    survey.shared.insert(identity, index);
    survey.found.contents.push((index, file));
    Ok(index)
}

/// Reads the contents of all objects that have any.
pub(crate) fn object_contents(found: &mut Found, sink: &mut dyn Sink) -> Result<()> {
    for (index, contents) in std::mem::take(&mut found.contents) {
        let thing = &mut found.objects[index].thing;
        let (bytes, runs) = match thing {
            Thing::SharedMemory(memory) => (memory.bytes, &mut memory.runs),
            Thing::SystemVMemory(memory) => {
                (memory.bytes.next_multiple_of(PAGE_BYTES), &mut memory.runs)
            }
            Thing::MemoryFile(file) if file.huge_page_bytes.is_some() => {
                let failed = Error::file("cannot read the contents of", &file.name);
                let of = Of::Object(index);
                file.runs = huge_runs(&contents, file.bytes, of, sink).map_err(failed)??;
                continue;
            }
            Thing::MemoryFile(file) => (deleted::whole_pages(file.bytes), &mut file.runs),
            Thing::Deleted(deleted) => (deleted::whole_pages(deleted.bytes), &mut deleted.runs),
            _ => continue,
        };
        let failed = Error::file("cannot read the contents of", thing_name(&contents));
        *runs = file_runs(&contents, bytes, Of::Object(index), sink).map_err(failed)??;
    }
    Ok(())
}

/// The target of a descriptor of this program, for the message.
fn thing_name(file: &File) -> String {
    let link = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    link.map(|l| l.display().to_string()).unwrap_or_default()
}

/// A process may have as many bytes more than the kernel's count: each CPU batches its updates
/// (proc_pid_status(5), `RssAnon`).
const UNCOUNTED_BYTES: u64 = 64 << 10;

/// The private memory of some processes: an upper bound, approximately.
pub(crate) fn own_bytes(tree: &[Seen]) -> u64 {
    let counted = |seen: &Seen| seen.fields.number("RssAnon").unwrap_or(0) << 10;
    tree.iter().map(|seen| counted(seen) + UNCOUNTED_BYTES).sum()
}

/// Reads the private pages of a stopped process, without those that were copied ahead and have not
/// been written since.
pub(crate) fn contents(
    seen: &Seen,
    mut memory: Memory,
    ahead: Option<&Copied>,
    known: &mut Known,
    sink: &mut dyn Sink,
) -> Result<Memory> {
    memory.auxv = Bytes(
        fs::read(format!("/proc/{}/auxv", seen.pid))
            .map_err(Error::file("cannot read", format!("/proc/{}/auxv", seen.pid)))?,
    );
    let files = Files::of(seen.pid)?;
    let mut batch = Batch::new(seen, &files);
    for n in 0..memory.areas.len() {
        let area = &memory.areas[n];
        // Memory that the kernel may drop may hold contents that must not be restored twice
        // (vgetrandom).
        if matches!(area.backing, Backing::Shared { .. }) || area.has("dp") {
            continue;
        }
        let all = own_pages(&files.pagemap, Scan::Look, area.start, area.end)
            .map_err(Error::of("find the pages in memory", seen.pid))?;
        let ahead = ahead.filter(|_| area.backing == Backing::Anonymous);
        for run in all {
            let clean = ahead.filter(|_| run.is_clean());
            let Some(ahead) = clean else {
                batch.add(n, run.start..run.end, &mut memory.areas, known, sink)?;
                continue;
            };
            memory.areas[n].runs.extend(ahead.runs_within(run.start..run.end));
            for rest in ahead.missing_from(run.start..run.end) {
                batch.add(n, rest, &mut memory.areas, known, sink)?;
            }
        }
    }
    batch.save(&mut memory.areas, known, sink)?;
    for area in &mut memory.areas {
        area.runs.sort_unstable_by_key(|run| run.address);
    }
    memory.guards = guards(&files.pagemap, &memory.areas)
        .map_err(Error::of("find the guards in memory", seen.pid))?;
    Ok(memory)
}

/// Guard regions within areas, which have no pages (MADV_GUARD_INSTALL). LIMIT: KERNEL(6.13) has them,
/// KERNEL(6.16) reports where they are. Between the two, memory with guard regions cannot be read.
fn guards(pagemap: &File, areas: &[Area]) -> std::result::Result<Vec<(u64, u64)>, Errno> {
    let (Some(first), Some(last)) = (areas.first(), areas.last()) else { return Ok(Vec::new()) };
    let mut all: Vec<(u64, u64)> = Vec::new();
    let mut buffer = [PageRun::default(); 512];
    let mut at = first.start;
    while at < last.end {
        let found = call::scan_guards(pagemap.as_fd(), at, last.end, &mut buffer);
        let (count, walked) = match found {
            Err(Errno::INVAL) => return Ok(all),
            found => found?,
        };
        for run in &buffer[..count] {
            match all.last_mut() {
                Some((_, end)) if *end == run.start => *end = run.end,
                _ => all.push((run.start, run.end)),
            }
        }
        if walked <= at {
            return Err(Errno::IO); // the kernel promises progress
        }
        at = walked;
    }
    Ok(all)
}
