//! Memory: areas from `/proc/PID/smaps`, contents by PAGEMAP_SCAN and `/proc/PID/mem`.
//!
//! Only private pages of a process are read. A page of a private file mapping that was never
//! written is in the file, and shared memory is read once, from the file that the kernel keeps it
//! in. Anonymous pages of zeros are left out. Pages that parent and child share since fork(2) are
//! read from each, since the kernel may move them at any time, and written once.

use std::collections::HashMap;
use std::fs::{self, File};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, MetadataExt};

use dormouse_kernel::call::{self, PageRun, Scan};
use dormouse_kernel::{Errno, proc, system_v};
use rustix::fs::{Mode, OFlags, SeekFrom};

use super::ahead::Copied;
use super::object::{Found, Survey, Why};
use super::tree::Seen;
use super::{deleted, file};
use crate::error::{Error, Result};
use crate::format::{
    Area, Backing, Bytes, Memory, Of, PAGE_BYTES, Run, SharedMemory, Thing, Writer, warm,
};

/// Flags of areas that madvise(2), mlock(2), mmap(2) and mseal(2) set and that are restored.
const KEPT: [&str; 11] = ["gd", "dc", "dd", "wf", "hg", "nh", "mg", "lo", "nr", "dp", "sl"];
/// Flags of areas that cannot be saved. The texts follow "memory that is".
const REFUSED: [(&str, &str); 4] = [
    ("um", "watched by a userfaultfd"),
    ("uw", "watched by a userfaultfd"),
    ("io", "a device's"),
    ("pf", "a device's"),
];
/// Bytes that are copied at a time: as much as stays in a processor's cache until it is written.
const BATCH_BYTES: u64 = 1 << 20;

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
    Ok(memory)
}

/// One entry of smaps, or of maps, which has no flags.
pub(super) struct Mapping<'t> {
    pub(super) start: u64,
    pub(super) end: u64,
    access: &'t str,
    offset: u64,
    device: &'t str,
    inode: u64,
    name: &'t str,
    page_bytes: u64,
    flags: Vec<&'t str>,
}

impl Mapping<'_> {
    /// Whether this is private memory, of pages of the usual size.
    pub(super) fn is_anonymous(&self) -> bool {
        let is_plain =
            ["", "[heap]", "[stack]"].contains(&self.name) || self.name.starts_with("[anon:");
        self.inode == 0 && is_plain && !self.access.ends_with('s')
    }
}

pub(super) fn mappings(text: &str) -> Vec<Mapping<'_>> {
    let mut all: Vec<Mapping<'_>> = Vec::new();
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if let Some(last) = all.last_mut() {
                last.flags = flags.split_ascii_whitespace().collect();
            }
        } else if let Some(size) = line.strip_prefix("KernelPageSize:") {
            let kb = size.trim().trim_end_matches(" kB").parse::<u64>().ok();
            if let (Some(last), Some(kb)) = (all.last_mut(), kb) {
                last.page_bytes = kb << 10;
            }
        } else if let Some(mapping) = head(line) {
            all.push(mapping);
        }
    }
    all
}

/// Reads `START-END ACCESS OFFSET DEVICE INODE   NAME`.
fn head(line: &str) -> Option<Mapping<'_>> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let mut rest = rest.splitn(4, ' ');
    let (access, offset, device) = (rest.next()?, rest.next()?, rest.next()?);
    let (inode, name) = match rest.next()?.split_once(' ') {
        Some((inode, name)) => (inode, name.trim_start()),
        None => return None,
    };
    Some(Mapping {
        start: u64::from_str_radix(start, 16).ok()?,
        end: u64::from_str_radix(end, 16).ok()?,
        access,
        offset: u64::from_str_radix(offset, 16).ok()?,
        device,
        inode: inode.parse().ok()?,
        name,
        page_bytes: PAGE_BYTES,
        flags: Vec::new(),
    })
}

/// The file of the previous entry: programs and libraries are mapped in several pieces, in a row.
struct Met<'t> {
    device: &'t str,
    inode: u64,
    name: &'t str,
    writes: bool,
    object: usize,
}

impl Met<'_> {
    fn is(&self, mapping: &Mapping<'_>, writes: bool) -> bool {
        let its = (self.device, self.inode, self.name, self.writes);
        its == (mapping.device, mapping.inode, mapping.name, writes)
    }
}

fn area<'t>(
    survey: &mut Survey<'_>,
    seen: &Seen,
    mapping: &Mapping<'t>,
    last: &mut Option<Met<'t>>,
) -> std::result::Result<Area, Why> {
    let has = |flag: &str| mapping.flags.contains(&flag);
    let noted = || survey.ahead.is_some_and(|a| a.notes(seen, mapping.start..mapping.end));
    let mut refused = REFUSED.iter().filter(|(flag, _)| has(flag));
    if let Some((_, why)) = refused.find(|(flag, _)| *flag != "uw" || !noted()) {
        return Err((*why).to_owned());
    }
    let access = mapping.access.bytes().zip([b'r', b'w', b'x']).enumerate();
    let access = access.fold(0, |sum, (n, (has, bit))| sum | u32::from(has == bit) << n);
    let flags = KEPT.iter().filter(|f| has(f)).map(|f| (*f).to_owned()).collect();
    let shared = mapping.access.ends_with('s');
    let backing = backing(survey, seen, mapping, shared, last)?;
    let (start, end) = (mapping.start, mapping.end);
    Ok(Area { start, end, access, backing, flags, runs: Vec::new() })
}

fn backing<'t>(
    survey: &mut Survey<'_>,
    seen: &Seen,
    mapping: &Mapping<'t>,
    shared: bool,
    last: &mut Option<Met<'t>>,
) -> std::result::Result<Backing, Why> {
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
        let object = shared_memory(survey, &place)?;
        return Ok(Backing::Shared { object, offset });
    }
    if shared && mapping.name.starts_with("/SYSV") {
        // Ids belong to a namespace, and the file's inode has no other number.
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let handle = rustix::fs::open(&place, flags, Mode::empty())
            .and_then(|file| system_v::handle_of(file.as_fd()));
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
    let writes = shared && mapping.flags.contains(&"mw");
    // One file may be mapped through mounts of two namespaces, and then is two objects.
    let known = last.as_ref().filter(|met| met.is(mapping, writes) && survey.mounts.is_empty());
    let object = match known {
        Some(met) => met.object,
        None => file::mapped(survey, seen, mapping.name, &place, writes)?,
    };
    let Mapping { device, inode, name, .. } = *mapping;
    *last = Some(Met { device, inode, name, writes, object });
    Ok(match shared {
        true => Backing::Shared { object, offset },
        false => Backing::Private { object, offset },
    })
}

/// Shared memory without a file: identified by the inode that the kernel gave it.
fn shared_memory(survey: &mut Survey<'_>, place: &str) -> std::result::Result<usize, Why> {
    let failed = |e: std::io::Error| format!("shared memory that cannot be opened: {e}");
    let file = File::open(place).map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    let identity = (meta.dev(), meta.ino());
    if let Some(index) = survey.shared.get(&identity) {
        return Ok(*index);
    }
    let bytes = meta.len().next_multiple_of(PAGE_BYTES);
    let index = survey.add(Thing::SharedMemory(SharedMemory { bytes, runs: Vec::new() }));
    survey.shared.insert(identity, index);
    survey.found.contents.push((index, file));
    Ok(index)
}

/// Reads the contents of all objects that have any.
pub(crate) fn object_contents(found: &mut Found, writer: &mut Writer) -> Result<()> {
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
                file.runs = huge_runs(&contents, file.bytes, of, writer).map_err(failed)??;
                continue;
            }
            Thing::MemoryFile(file) => (deleted::whole_pages(file.bytes), &mut file.runs),
            Thing::Deleted(deleted) => (deleted::whole_pages(deleted.bytes), &mut deleted.runs),
            _ => continue,
        };
        let failed = Error::file("cannot read the contents of", thing_name(&contents));
        *runs = file_runs(&contents, bytes, Of::Object(index), writer).map_err(failed)??;
    }
    Ok(())
}

/// The target of a descriptor of this program, for the message.
fn thing_name(file: &File) -> String {
    let link = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    link.map(|l| l.display().to_string()).unwrap_or_default()
}

pub(super) fn file_runs(
    file: &File,
    bytes: u64,
    of: Of,
    writer: &mut Writer,
) -> std::io::Result<Result<Vec<Run>>> {
    let mut runs = Vec::new();
    let (mut at, mut buffer) = (0, Vec::new());
    while at < bytes {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Err(rustix::io::Errno::NXIO) => break,
            found => found? / PAGE_BYTES * PAGE_BYTES,
        };
        let end = rustix::fs::seek(file, SeekFrom::Hole(start))?.next_multiple_of(PAGE_BYTES);
        let end = end.min(bytes);
        at = start;
        while at < end {
            let length = (end - at).min(BATCH_BYTES);
            buffer.clear();
            buffer.resize(length as usize, 0); // zeros behind the end of the file
            let n = file.read_at(&mut buffer, at)?;
            debug_assert!(n as u64 == length || at + n as u64 >= file.metadata()?.len());
            if let Err(e) = put(&mut runs, of, at, &buffer, false, writer) {
                return Ok(Err(e));
            }
            at += length;
        }
    }
    Ok(Ok(runs))
}

/// The same for memory of huge pages, which does not report its holes: they read as zeros.
fn huge_runs(
    file: &File,
    bytes: u64,
    of: Of,
    writer: &mut Writer,
) -> std::io::Result<Result<Vec<Run>>> {
    let mut runs = Vec::new();
    let mut buffer = vec![0; BATCH_BYTES as usize];
    for at in (0..bytes).step_by(BATCH_BYTES as usize) {
        let part = &mut buffer[..(bytes - at).min(BATCH_BYTES) as usize];
        file.read_exact_at(part, at)?;
        if let Err(e) = put(&mut runs, of, at, part, true, writer) {
            return Ok(Err(e));
        }
    }
    Ok(Ok(runs))
}

/// Writes contents that begin at an address, without pages that an earlier checkpoint has.
fn put(
    runs: &mut Vec<Run>,
    of: Of,
    start: u64,
    contents: &[u8],
    skips_zeros: bool,
    writer: &mut Writer,
) -> Result<()> {
    // Adjacent pages are written at once.
    let mut new = 0..0;
    let places = (0..contents.len()).step_by(PAGE_BYTES as usize);
    for (at, page) in places.zip(contents.chunks(PAGE_BYTES as usize)) {
        if skips_zeros && page == ZEROS {
            continue;
        }
        let address = start + at as u64;
        let number = match writer.find(of, address, page) {
            Some(known) => known,
            None => {
                if new.end != at {
                    writer.append(&contents[std::mem::replace(&mut new, at..at)])?;
                }
                new.end = at + page.len();
                writer.next_page() + (at - new.start) as u64 / PAGE_BYTES
            }
        };
        note(runs, address, number);
    }
    writer.append(&contents[new])
}

/// State that is kept from one process to the next.
#[derive(Default)]
pub(crate) struct Known {
    /// Pages that several processes share (fork(2)), by a hash of their contents: each is written
    /// once.
    pages: HashMap<[u8; 32], u64>,
    /// The buffer for copies, reused: new memory costs as much as the copy into it.
    buffer: Vec<u8>,
}

impl Known {
    /// Prepares the buffer for as many bytes that are read next.
    pub(crate) fn make_room(&mut self, bytes: u64) {
        warm(&mut self.buffer, bytes.min(BATCH_BYTES) as usize);
    }
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
    writer: &mut Writer,
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
                batch.add(n, run.start..run.end, &mut memory.areas, known, writer)?;
                continue;
            };
            memory.areas[n].runs.extend(ahead.runs_within(run.start..run.end));
            for rest in ahead.missing_from(run.start..run.end) {
                batch.add(n, rest, &mut memory.areas, known, writer)?;
            }
        }
    }
    batch.save(&mut memory.areas, known, writer)?;
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

/// The files by which memory is found and read (proc_pid_pagemap(5), proc_pid_mem(5)).
#[derive(Debug)]
pub(super) struct Files {
    pub(super) pagemap: File,
    pub(super) memory: File,
}

impl Files {
    pub(super) fn of(pid: u32) -> Result<Self> {
        let open = |name: &str| {
            let path = format!("/proc/{pid}/{name}");
            File::open(&path).map_err(Error::file("cannot open", path))
        };
        Ok(Self { pagemap: open("pagemap")?, memory: open("mem")? })
    }
}

/// Runs of private pages, each entirely clean or entirely written.
pub(super) fn own_pages(
    pagemap: &File,
    scan: Scan,
    start: u64,
    end: u64,
) -> std::result::Result<Vec<PageRun>, Errno> {
    let mut all: Vec<PageRun> = Vec::new();
    let mut buffer = [PageRun::default(); 512];
    let mut at = start;
    while at < end {
        let (count, walked) = call::scan_own_pages(pagemap.as_fd(), scan, at, end, &mut buffer)?;
        for run in &buffer[..count] {
            match all.last_mut() {
                Some(last) if last.end == run.start && last.is_clean() == run.is_clean() => {
                    last.end = run.end;
                }
                _ => all.push(*run),
            }
        }
        if walked <= at {
            return Err(Errno::IO); // the kernel promises progress
        }
        at = walked;
    }
    Ok(all)
}

/// LIMIT: places that are copied at a time.
const PLACES_MAX: usize = 1024;

/// A part of an area to be copied.
struct Place {
    area: usize,
    address: u64,
    bytes: u64,
}

/// The places that are copied at a time.
pub(super) struct Batch<'p> {
    seen: &'p Seen,
    files: &'p Files,
    places: Vec<Place>,
    bytes: u64,
}

/// The contents of a page that was never written.
const ZEROS: [u8; PAGE_BYTES as usize] = [0; PAGE_BYTES as usize];

impl<'p> Batch<'p> {
    pub(super) fn new(seen: &'p Seen, files: &'p Files) -> Self {
        Self { seen, files, places: Vec::new(), bytes: 0 }
    }

    /// Gathers a range of an area, and saves each batch that is full.
    fn add(
        &mut self,
        area: usize,
        range: Range<u64>,
        areas: &mut [Area],
        known: &mut Known,
        writer: &mut Writer,
    ) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            at += self.gather(area, at..range.end);
            if self.bytes == BATCH_BYTES || self.places.len() == PLACES_MAX {
                self.save(areas, known, writer)?;
            }
        }
        Ok(())
    }

    /// Gathers as much as there is space for; returns the number of bytes.
    pub(super) fn gather(&mut self, area: usize, range: Range<u64>) -> u64 {
        let bytes = (range.end - range.start).min(BATCH_BYTES - self.bytes);
        self.places.push(Place { area, address: range.start, bytes });
        self.bytes += bytes;
        bytes
    }

    /// Copies the gathered places, and writes the pages that are not stored yet.
    fn save(&mut self, areas: &mut [Area], known: &mut Known, writer: &mut Writer) -> Result<()> {
        let shared = self.read(known)?;
        self.write(shared, areas, known, writer)
    }

    /// Copies the gathered places; returns which pages of each place are shared with another
    /// process.
    pub(super) fn read(&mut self, known: &mut Known) -> Result<Vec<Vec<bool>>> {
        let shared = |place: &Place| shared_pages(&self.files.pagemap, place.address, place.bytes);
        let shared = self.places.iter().map(shared).collect::<std::result::Result<Vec<_>, _>>();
        let shared = shared.map_err(Error::of("find the pages in memory", self.seen.pid))?;
        self.copy(&mut known.buffer)?;
        Ok(shared)
    }

    /// Writes the copied pages that are not stored yet.
    pub(super) fn write(
        &mut self,
        shared: Vec<Vec<bool>>,
        areas: &mut [Area],
        known: &mut Known,
        writer: &mut Writer,
    ) -> Result<()> {
        let buffer = std::mem::take(&mut known.buffer);
        let mut rest = &buffer[..];
        let of = Of::Process(self.seen.inner);
        // Adjacent pages are written at once.
        let mut new = 0..0;
        for (place, shared) in std::mem::take(&mut self.places).into_iter().zip(shared) {
            let is_anonymous =
                matches!(areas[place.area].backing, Backing::Anonymous | Backing::Huge { .. });
            for (address, is_shared) in (place.address..).step_by(PAGE_BYTES as usize).zip(shared) {
                let at = buffer.len() - rest.len();
                let (page, later) = rest.split_at(PAGE_BYTES as usize);
                rest = later;
                if is_anonymous && page == ZEROS {
                    continue;
                }
                let next = writer.next_page() + new.len() as u64 / PAGE_BYTES;
                let mut find = || writer.find(of, address, page).unwrap_or(next);
                let number = match is_shared {
                    true => *known.pages.entry(*blake3::hash(page).as_bytes()).or_insert_with(find),
                    false => find(),
                };
                if number == next && new.end == at {
                    new.end += page.len();
                } else if number == next {
                    writer.append(&buffer[new])?;
                    new = at..at + page.len();
                }
                note(&mut areas[place.area].runs, address, number);
            }
        }
        self.bytes = 0;
        writer.append(&buffer[new])?;
        known.buffer = buffer;
        Ok(())
    }

    /// Reads through the process's memory file, which does not change the memory.
    /// process_vm_readv(2) pins the pages that it reads, which costs three times as much. In
    /// addition it refuses areas with PROT_NONE (whose pages may have been written before) and
    /// permanently copies each page that is shared since fork(2) (KERNEL(5.19)).
    fn copy(&self, buffer: &mut Vec<u8>) -> Result<()> {
        buffer.resize(self.bytes as usize, 0);
        let failed = |e| Error::file("cannot read", format!("/proc/{}/mem", self.seen.pid))(e);
        let mut rest = &mut buffer[..];
        for place in &self.places {
            let (now, later) = rest.split_at_mut(place.bytes as usize);
            self.files.memory.read_exact_at(now, place.address).map_err(failed)?;
            rest = later;
        }
        Ok(())
    }
}

/// Adds a page to runs.
fn note(runs: &mut Vec<Run>, address: u64, number: u64) {
    match runs.last_mut() {
        Some(last)
            if last.address + last.pages * PAGE_BYTES == address
                && last.first + last.pages == number =>
        {
            last.pages += 1;
        }
        _ => runs.push(Run { address, pages: 1, first: number }),
    }
}

/// Which of the pages another process has mapped, too (pagemap, bit 56).
fn shared_pages(pagemap: &File, address: u64, bytes: u64) -> std::result::Result<Vec<bool>, Errno> {
    const ENTRY_BYTES: u64 = 8;
    const PRESENT: u64 = 1 << 63;
    const EXCLUSIVE: u64 = 1 << 56;
    let mut entries = vec![0; (bytes / PAGE_BYTES * ENTRY_BYTES) as usize];
    pagemap
        .read_exact_at(&mut entries, address / PAGE_BYTES * ENTRY_BYTES)
        .map_err(|e| e.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error))?;
    let is_shared = |entry: &[u8]| {
        let entry = u64::from_ne_bytes(entry.try_into().unwrap_or([0; 8])); // eight bytes each
        entry & (PRESENT | EXCLUSIVE) == PRESENT
    };
    Ok(entries.chunks_exact(ENTRY_BYTES as usize).map(is_shared).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_next_to_each_other_are_one_run() {
        let mut runs = Vec::new();
        for (address, number) in [(0, 5), (4096, 6), (8192, 9), (20480, 10), (24576, 11)] {
            note(&mut runs, address, number);
        }
        let found: Vec<_> = runs.iter().map(|r| (r.address, r.pages, r.first)).collect();
        assert_eq!(found, [(0, 2, 5), (8192, 1, 9), (20480, 2, 10)]);
    }

    #[test]
    fn entries_of_smaps_are_read() {
        let text = "00400000-00452000 r-xp 00001000 08:02 173521      /usr/bin/a b\n\
                    Size:     328 kB\nVmFlags: rd ex mr mw me\n\
                    7ffd0000-7ffd2000 rw-p 00000000 00:00 0                          [stack]\n\
                    KernelPageSize:     2048 kB\nVmFlags: rd wr gd\n\
                    10000-11000 rw-p 00000000 00:00 0 \nVmFlags: rd wr\n";
        let all = mappings(text);
        assert_eq!(all.len(), 3);
        assert_eq!((all[0].start, all[0].offset, all[0].inode), (0x40_0000, 0x1000, 173_521));
        assert_eq!(all[0].name, "/usr/bin/a b");
        assert_eq!((all[1].name, all[1].flags.as_slice()), ("[stack]", &["rd", "wr", "gd"][..]));
        assert_eq!((all[2].name, all[2].page_bytes), ("", PAGE_BYTES));
        assert_eq!(all[1].page_bytes, 2 << 20);
    }
}
