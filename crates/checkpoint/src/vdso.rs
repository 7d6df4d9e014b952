//! The kernel's shared object (vdso(7)), and how processes continue with another kernel's.
//!
//! A program finds the vDSO by AT_SYSINFO_EHDR and keeps the addresses of its functions. The vDSO
//! belongs to the kernel that mapped it: its code reads that kernel's data (`[vvar]`), which has
//! another address and another layout in the next kernel. So under another kernel the old vDSO
//! stays at its address, as private memory of the process, and the kernel's is mapped close to it.
//! Every function of the old begins with a jump to the function of the same name in the new, or
//! makes the system call itself if the new one lacks the function.
//!
//! ```text
//!             made by one kernel                    under another
//!   data      [vvar] [vvar_vclock]                  zeros, read only
//!   AT_SYS..> [vdso]                                the same bytes; functions jump ---+
//!                                                   [vvar] [vvar_vclock]              |
//!                                                   [vdso] <--------------------------+
//! ```
//!
//! If a process is restored under a third kernel, or under the first again, the jumps of its old
//! vDSO are rewritten: its symbols are all still there. So there are never more than two vDSOs.
//!
//! **Threads inside.** A thread that is stopped inside the vDSO would resume in code without its
//! data, so the save resumes it until it leaves ([`crate::save`]). A thread that did not leave in
//! time can only be restored under the same kernel, and is reported otherwise. LIMIT: a signal
//! handler that has interrupted a function of the vDSO returns into it. As its data is zeros, that
//! function then makes the system call, except for the coarse clocks and time(2), which return 0
//! that once.
//!
//! **getrandom.** The state that `__vdso_getrandom` keeps between calls has a size and layout that
//! its kernel chose. The old function makes the system call. That memory (MAP_DROPPABLE) is never
//! saved: its kernel may drop it at any time, and the same state in two clones would not be random.
//!
//! **Trust.** The old vDSO may contain any bytes. A library that checks it parses it as an ELF
//! file, and changes to it are only written to memory of that process.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use dormouse_kernel::proc;
use dormouse_record::check::USER_END;
use dormouse_record::{
    Area, Backing, Error, Memory, PAGE_BYTES, Records, Result, VDSO_BYTES_MAX, vdso_hash,
};
use object::elf::FileHeader64;
use object::read::elf::{FileHeader, Sym};
use object::{Endianness, elf};

/// LIMIT: the distance between the kernel's vDSO and the old one, for a jump to reach it.
const REACH_BYTES: u64 = 1 << 30;
/// Space below a stack, which may grow.
const STACK_BYTES: u64 = 1 << 30;
/// The entry of the auxiliary vector with the address of the vDSO.
const AT_SYSINFO_EHDR: u64 = 33;

/// The vDSO of this kernel.
#[derive(Debug, Clone)]
pub(crate) struct Object {
    /// All of its bytes.
    pub(crate) image: Vec<u8>,
    /// Bytes of the data below it.
    data_bytes: u64,
}

impl Object {
    /// The vDSO that this process itself has mapped. `None` without one.
    pub(crate) fn here() -> Option<Self> {
        let maps = Maps::of("self")?;
        let text = maps.object()?;
        let data = maps.ranges().filter(|(_, name)| name.starts_with("[vvar")).map(|(r, _)| r);
        let data_bytes = data.map(|r| r.end - r.start).sum();
        let mut image = vec![0; (text.end - text.start) as usize];
        fs::File::open("/proc/self/mem").ok()?.read_exact_at(&mut image, text.start).ok()?;
        Some(Self { image, data_bytes })
    }

    /// BLAKE3 of its bytes.
    pub(crate) fn hash(&self) -> String {
        vdso_hash(&self.image)
    }

    fn bytes(&self) -> u64 {
        self.data_bytes + self.image.len() as u64
    }
}

/// `/proc/PID/maps`.
struct Maps(String);

impl Maps {
    fn of(pid: impl std::fmt::Display) -> Option<Self> {
        proc::whole_text(format!("/proc/{pid}/maps")).ok().map(Self)
    }

    /// Ranges of addresses by their names, which may be empty.
    fn ranges(&self) -> impl Iterator<Item = (Range<u64>, &str)> {
        self.0.lines().filter_map(|line| {
            let (start, end) = line.split_once(' ')?.0.split_once('-')?;
            let number = |text| u64::from_str_radix(text, 16).ok();
            let name = line.split_ascii_whitespace().nth(5).unwrap_or("");
            Some((number(start)?..number(end)?, name))
        })
    }

    fn object(&self) -> Option<Range<u64>> {
        self.ranges().find(|(_, name)| *name == "[vdso]").map(|(range, _)| range)
    }
}

/// Where the kernel's vDSO is in a process.
pub(crate) fn of_process(pid: u32) -> Option<Range<u64>> {
    Maps::of(pid)?.object()
}

/// Where a process has vDSOs: the kernel's, and one that was restored with it.
pub(crate) fn all_of_process(pid: u32) -> Vec<Range<u64>> {
    let Some(maps) = Maps::of(pid) else { return Vec::new() };
    let auxv = fs::read(format!("/proc/{pid}/auxv")).unwrap_or_default();
    let first = told(&auxv).unwrap_or_default();
    let is_object =
        |(range, name): &(Range<u64>, &str)| *name == "[vdso]" || range.contains(&first);
    maps.ranges().filter(is_object).map(|(range, _)| range).collect()
}

/// The address in an auxiliary vector.
fn told(auxv: &[u8]) -> Option<u64> {
    let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_ne_bytes); // eight bytes each
    let (entries, _) = auxv.as_chunks::<16>();
    let entry = entries.iter().find(|entry| number(&entry[..8]) == AT_SYSINFO_EHDR)?;
    Some(number(&entry[8..]))
}

/// An old vDSO that is restored, with its changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bent {
    /// Its address.
    pub(crate) address: u64,
    /// All of its bytes.
    pub(crate) image: Vec<u8>,
}

/// Finds an address for this kernel's vDSO in every memory that has another's; returns that one
/// with its changes, by memory. `read` reads memory as it was saved.
///
/// Errors: [`Error::Elsewhere`] if a thread is inside it, or its bytes are not recorded.
pub(crate) fn bend(
    records: &mut Records,
    here: Option<&Object>,
    read: impl Fn(&Area, Range<u64>) -> Result<Vec<u8>>,
) -> Result<Vec<Option<Bent>>> {
    let none = vec![None; records.memories.len()];
    let has_object = records.memories.iter().any(|memory| memory.vdso.is_some());
    let is_same = here.is_some_and(|here| here.hash() == records.about.vdso);
    if !has_object || is_same {
        return Ok(none);
    }
    let elsewhere = |why: &str| {
        let kernel = &records.about.kernel;
        Error::Elsewhere(format!("it was made under Linux {kernel}, and {why}"))
    };
    let here = here.ok_or_else(|| elsewhere("this kernel has no shared object (vdso)"))?;
    let image = &records.about.vdso_image.0;
    if image.is_empty() {
        return Err(elsewhere("does not hold that kernel's shared object (vdso)"));
    }
    let targets = functions(&here.image).ok_or_else(|| elsewhere("this kernel's is no object"))?;
    let mut all = none;
    for (n, memory) in records.memories.iter_mut().enumerate() {
        let Some((start, bytes)) = memory.vdso else { continue };
        let Some(data_bytes) = bytes.checked_sub(image.len() as u64) else {
            return Err(elsewhere("a process has a part of its shared object (vdso) only"));
        };
        let text = start + data_bytes..start + bytes;
        let came_along = came_along(memory, &text, &read)?;
        let (address, mut image) = came_along.unwrap_or_else(|| (text.start, image.clone()));
        let own = address..address + image.len() as u64;
        for process in records.processes.iter().filter(|p| p.memory == Some(n)) {
            let is_inside = |rip: u64| text.contains(&rip) || own.contains(&rip);
            let inside = process.threads.iter().find(|t| is_inside(t.registers.rip));
            if let Some(thread) = inside {
                return Err(Error::Elsewhere(format!(
                    "thread {} of process {} ({}) stood in the shared object (vdso) of Linux {}, \
                     which is not this kernel's",
                    thread.tid, process.pid, process.name, records.about.kernel
                )));
            }
        }
        if address == text.start {
            memory.areas.extend(stay(start, &text));
            memory.areas.sort_by_key(|area| area.start);
        }
        let place = hole(memory, address, here.bytes()).ok_or_else(|| {
            Error::Elsewhere("its memory has no hole for this kernel's shared object (vdso)".into())
        })?;
        memory.vdso = Some((place, here.bytes()));
        bend_image(&mut image, address, &targets, place + here.data_bytes);
        all[n] = Some(Bent { address, image });
    }
    Ok(all)
}

/// The vDSO that a process was restored with, if its auxiliary vector does not name the kernel's.
fn came_along(
    memory: &Memory,
    text: &Range<u64>,
    read: impl Fn(&Area, Range<u64>) -> Result<Vec<u8>>,
) -> Result<Option<(u64, Vec<u8>)>> {
    let is_other = |first: &u64| *first != text.start && first.is_multiple_of(PAGE_BYTES);
    let Some(first) = told(&memory.auxv.0).filter(is_other) else { return Ok(None) };
    const EXECUTABLE: u32 = 4;
    let is_it = |area: &&Area| {
        let is_own = area.backing == Backing::Anonymous && area.access & EXECUTABLE != 0;
        is_own && (area.start..area.end).contains(&first)
    };
    let Some(area) = memory.areas.iter().find(is_it) else { return Ok(None) };
    let image = read(area, first..area.end.min(first.saturating_add(VDSO_BYTES_MAX)))?;
    // A program may have put anything there; bytes that are no vDSO are not treated as one.
    Ok(functions(&image).is_some().then_some((first, image)))
}

/// The areas that replace a kernel's vDSO and its data.
fn stay(start: u64, text: &Range<u64>) -> impl Iterator<Item = Area> {
    let (read, execute) = (libc::PROT_READ as u32, libc::PROT_EXEC as u32);
    let areas = [(start..text.start, read), (text.clone(), read | execute)];
    areas.into_iter().filter(|(range, _)| !range.is_empty()).map(|(range, access)| Area {
        start: range.start,
        end: range.end,
        access,
        backing: Backing::Anonymous,
        flags: Vec::new(),
        runs: Vec::new(),
    })
}

/// The free range of a length that is nearest to `near`.
fn hole(memory: &Memory, near: u64, bytes: u64) -> Option<u64> {
    let mut places = Vec::new();
    // The lowest addresses are never used.
    let mut at = REACH_BYTES;
    let used = memory.areas.iter().map(|area| {
        let grows = if area.has("gd") { STACK_BYTES } else { 0 };
        (area.start.saturating_sub(grows), area.end)
    });
    for (start, end) in used.chain([(USER_END, USER_END)]) {
        if start >= at + bytes {
            places.extend([at, start - bytes]);
        }
        at = at.max(end);
    }
    let nearest = places.into_iter().min_by_key(|place| place.abs_diff(near));
    nearest.filter(|place| place.abs_diff(near) < REACH_BYTES)
}

/// The ranges of the functions of a vDSO by name, without the kernel's prefix.
type Functions = BTreeMap<Vec<u8>, Range<usize>>;

/// `None` if the bytes are no vDSO.
fn functions(image: &[u8]) -> Option<Functions> {
    let header = FileHeader64::<Endianness>::parse(image).ok()?;
    let endian = header.endian().ok()?;
    let sections = header.sections(endian, image).ok()?;
    let table = sections.symbols(endian, image, elf::SHT_DYNSYM).ok()?;
    let function = |symbol: &elf::Sym64<Endianness>| {
        let start = usize::try_from(symbol.st_value(endian)).ok()?;
        let end = start.checked_add(usize::try_from(symbol.st_size(endian)).ok()?)?;
        let is_function = symbol.st_type() == elf::STT_FUNC && !symbol.is_undefined(endian);
        let name = symbol.name(endian, table.strings()).ok()?;
        let name = name.strip_prefix(b"__vdso_").unwrap_or(name);
        (is_function && start < end && end <= image.len()).then(|| (name.to_vec(), start..end))
    };
    let all: Functions = table.iter().filter_map(function).collect();
    (!all.is_empty()).then_some(all)
}

/// ENDBR64, with which a function may begin and which must stay in its place.
const LANDING: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

/// Makes the functions of a vDSO at `address` continue in those of another at `there`. A function
/// without a counterpart that is no system call stays unchanged.
fn bend_image(image: &mut [u8], address: u64, targets: &Functions, there: u64) {
    for (name, place) in functions(image).unwrap_or_default() {
        let Some(mut body) = image.get_mut(place.clone()) else { continue };
        let mut entry = address + place.start as u64;
        if body.starts_with(&LANDING) {
            body = &mut body[LANDING.len()..];
            entry += LANDING.len() as u64;
        }
        let code = match (&name[..], targets.get(&name)) {
            (b"getrandom", _) => GETRANDOM.to_vec(),
            (_, Some(target)) => jump(entry, there + target.start as u64),
            (name, None) => match call_of(name) {
                Some(number) => call(number),
                None => continue,
            },
        };
        // A function that is shorter than its jump is not one of a kernel.
        if let Some(begin) = body.get_mut(..code.len()) {
            begin.copy_from_slice(&code);
        }
    }
}

/// `jmp`, relative.
fn jump(from: u64, to: u64) -> Vec<u8> {
    const BYTES: u64 = 5;
    let distance = to.wrapping_sub(from + BYTES) as i32; // within reach, by the choice of the hole
    let mut code = vec![0xe9];
    code.extend(distance.to_le_bytes());
    code
}

/// `mov eax, NUMBER; syscall; ret`: arguments and results are in the registers of a function call.
fn call(number: i64) -> Vec<u8> {
    let mut code = vec![0xb8];
    code.extend((number as u32).to_le_bytes());
    code.extend([0x0f, 0x05, 0xc3]);
    code
}

/// The system call that a function replaces.
fn call_of(name: &[u8]) -> Option<i64> {
    Some(match name {
        b"clock_gettime" => libc::SYS_clock_gettime,
        b"clock_getres" => libc::SYS_clock_getres,
        b"gettimeofday" => libc::SYS_gettimeofday,
        b"time" => libc::SYS_time,
        b"getcpu" => libc::SYS_getcpu,
        _ => return None,
    })
}

/// getrandom(2), except for the query of its memory needs (fifth argument: all bits), which is
/// answered as if there were no such function: -ENOSYS.
const GETRANDOM: [u8; 20] = [
    0x49, 0x83, 0xf8, 0xff, // cmp r8, -1
    0x74, 0x08, // je
    0xb8, 0x3e, 0x01, 0x00, 0x00, // mov eax, 318
    0x0f, 0x05, // syscall
    0xc3, // ret
    0xb8, 0xda, 0xff, 0xff, 0xff, // mov eax, -38
    0xc3, // ret
];

#[cfg(test)]
mod tests {
    use dormouse_record::sample::small;
    use dormouse_record::{Bytes, Run, Thread};

    use super::*;

    const OLD: u64 = 0x7fff_0000_0000;
    const PAGES: u64 = 4 * PAGE_BYTES;

    /// Records of another kernel, whose vDSO differs in a byte outside all functions.
    fn foreign(here: &Object) -> Records {
        let mut records = small();
        let mut image = here.image.clone();
        *image.last_mut().unwrap() ^= 1;
        records.about.vdso = vdso_hash(&image);
        records.memories[0].vdso = Some((OLD, PAGES + image.len() as u64));
        records.memories[0].auxv = auxv(OLD + PAGES);
        records.about.vdso_image = Bytes(image);
        records
    }

    fn auxv(address: u64) -> Bytes {
        Bytes([AT_SYSINFO_EHDR, address, 0, 0].map(u64::to_ne_bytes).as_flattened().to_vec())
    }

    fn nothing(_: &Area, range: Range<u64>) -> Result<Vec<u8>> {
        Ok(vec![0; (range.end - range.start) as usize])
    }

    /// The target of the jump with which a function of a vDSO begins.
    fn goes_on(image: &[u8], address: u64, name: &str) -> Option<u64> {
        let start = functions(image)?.get(name.as_bytes())?.start;
        let landing = if image[start..].starts_with(&LANDING) { LANDING.len() } else { 0 };
        let [0xe9, distance @ ..] = image[start + landing..].first_chunk::<5>()? else {
            return None;
        };
        let end = address + (start + landing + 5) as u64;
        Some(end.wrapping_add_signed(i32::from_le_bytes(*distance).into()))
    }

    #[test]
    fn functions_of_the_old_vdso_jump_to_the_new_one() {
        let here = Object::here().unwrap();
        let mut records = foreign(&here);
        let bent = bend(&mut records, Some(&here), nothing).unwrap().remove(0).unwrap();
        let memory = &records.memories[0];
        let (place, bytes) = memory.vdso.unwrap();
        assert_eq!((bent.address, bent.image.len()), (OLD + PAGES, here.image.len()));
        assert_eq!(bytes, here.bytes());
        let own = OLD..OLD + PAGES + bent.image.len() as u64;
        assert!(place >= own.end || place + bytes <= own.start, "{place:x}");
        for name in ["clock_gettime", "gettimeofday", "time", "getcpu", "clock_getres"] {
            let there = functions(&here.image).unwrap()[name.as_bytes()].start as u64;
            let jumps = goes_on(&bent.image, bent.address, name);
            assert_eq!(jumps, Some(place + here.data_bytes + there), "{name}");
        }
        let accesses: Vec<_> = memory.areas.iter().rev().take(2).map(|a| a.access).collect();
        assert_eq!(accesses, [5, 1]);
        assert!(memory.areas.is_sorted_by_key(|area| area.start));

        // Again, under a third kernel: the first vDSO stays the one that is called.
        let (text, first) = (memory.vdso.unwrap().0 + here.data_bytes, bent.clone());
        records.about.vdso = "of a third".into();
        let held = |_: &Area, range: Range<u64>| {
            assert_eq!(range.start, first.address);
            Ok(first.image.clone())
        };
        let again = bend(&mut records, Some(&here), held).unwrap().remove(0).unwrap();
        assert_eq!(again.address, bent.address);
        let to = goes_on(&again.image, again.address, "time").unwrap();
        let place = records.memories[0].vdso.unwrap().0;
        assert!((place..place + here.bytes()).contains(&to));
        // A thread inside it must not be resumed.
        let thread = Thread { tid: 1, ..records.processes[0].threads[0].clone() };
        for rip in [text + 9, bent.address + 9] {
            let mut records = records.clone();
            records.memories[0].vdso = Some((text - here.data_bytes, here.bytes()));
            let registers = dormouse_kernel::call::Registers { rip, ..thread.registers };
            records.processes[0].threads = vec![Thread { registers, ..thread.clone() }];
            let said = bend(&mut records, Some(&here), held).unwrap_err().to_string();
            assert!(said.contains("thread 1 of process 1 (a) stood in"), "{said}");
        }
    }

    #[test]
    fn the_same_vdso_stays_and_an_unknown_one_is_refused() {
        let here = Object::here().unwrap();
        let mut same = foreign(&here);
        same.about.vdso = here.hash();
        assert_eq!(bend(&mut same, Some(&here), nothing).unwrap(), [None]);
        let mut without = foreign(&here);
        without.memories[0].vdso = None;
        assert_eq!(bend(&mut without, None, nothing).unwrap(), [None]);
        for (change, text) in [
            ((|r| r.about.vdso_image.0.clear()) as fn(&mut Records), "does not hold"),
            (|r| r.memories[0].vdso = Some((OLD, PAGE_BYTES)), "a part of"),
        ] {
            let mut records = foreign(&here);
            change(&mut records);
            let said = bend(&mut records, Some(&here), nothing).unwrap_err().to_string();
            assert!(said.contains(text), "{said}");
        }
    }

    #[test]
    fn functions_missing_in_the_new_vdso_make_a_system_call() {
        let here = Object::here().unwrap();
        let mut image = here.image.clone();
        bend_image(&mut image, OLD, &Functions::new(), OLD + PAGES);
        for (name, place) in functions(&here.image).unwrap() {
            let code = &image[place.clone()];
            let code = code.strip_prefix(&LANDING[..]).unwrap_or(code);
            match call_of(&name) {
                Some(number) => assert_eq!(code[..8], call(number), "{name:?}"),
                None if &name[..] == b"getrandom" => assert!(code.starts_with(&GETRANDOM)),
                None => assert_eq!(image[place.clone()], here.image[place], "{name:?}"),
            }
        }
    }

    #[test]
    fn the_new_vdso_is_mapped_close_and_in_unused_space() {
        let area = |start: u64, end: u64, flags: &[&str]| Area {
            start,
            end,
            access: 3,
            backing: Backing::Anonymous,
            flags: flags.iter().map(|f| (*f).to_owned()).collect(),
            runs: Vec::<Run>::new(),
        };
        let with = |areas| Memory { areas, ..Memory::default() };
        let near = 0x7000_0000_0000;
        let alone = with(vec![area(near, near + 8192, &[])]);
        assert_eq!(hole(&alone, near, 4096), Some(near - 4096));
        let stack = with(vec![area(near, near + 8192, &["gd"])]);
        assert_eq!(hole(&stack, near, 4096), Some(near + 8192), "a stack may grow");
        let full = with(vec![area(near - 2 * REACH_BYTES, near + 2 * REACH_BYTES, &[])]);
        assert_eq!(hole(&full, near, 4096), None);
        let top = with(vec![area(4096, USER_END - 4096, &[])]);
        assert_eq!(hole(&top, USER_END - 8192, 4096), Some(USER_END - 4096));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_parse_as_a_vdso_or_none(
            flips in proptest::collection::vec((0usize..8192, 0u8..), 0..64),
            bytes in proptest::collection::vec(0u8.., 0..400),
        ) {
            let here = Object::here().unwrap();
            let targets = functions(&here.image).unwrap();
            let mut image = here.image.clone();
            for (at, value) in flips {
                if let Some(byte) = image.get_mut(at) {
                    *byte = value;
                }
            }
            for mut image in [image, bytes] {
                let length = image.len();
                bend_image(&mut image, OLD, &targets, OLD + PAGES);
                assert_eq!(image.len(), length);
            }
        }
    }
}
