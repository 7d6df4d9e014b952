//! The kernel's shared object (vdso(7)), and how processes go on with another kernel's.
//!
//! A program finds the object by AT_SYSINFO_EHDR and keeps the addresses of its functions. The object
//! belongs to the kernel that mapped it: its code reads that kernel's data (`[vvar]`), which lies at
//! another place, in another form, in the next. So under another kernel the old object stays where it
//! is, as memory of the process's own, and the kernel's lies close to it. Every function of the old
//! begins with a jump to the one of the same name in the new, or makes the system call itself where the
//! new has none.
//!
//! ```text
//!             made by one kernel                    under another
//!   data      [vvar] [vvar_vclock]                  zeros, read only
//!   AT_SYS..> [vdso]                                the same bytes; functions jump ---+
//!                                                   [vvar] [vvar_vclock]              |
//!                                                   [vdso] <--------------------------+
//! ```
//!
//! A process that comes under a third kernel, or back under the first, has its old object's jumps
//! written anew: its symbols are all there still. So there are never more than two objects.
//!
//! **Who is inside.** A thread that stands in the object when it is stopped would go on in code whose
//! data is gone, so it is let out ([`crate::save`]); one that did not come out in time can only come
//! back under the same kernel, and is named otherwise. LIMIT: a signal handler that has interrupted a
//! function of the object returns into it. Its data being zeros, that function then asks the kernel, but
//! for the coarse clocks and time(2), which say 0 that once.
//!
//! **getrandom.** What `__vdso_getrandom` keeps between calls is of a size and form that its kernel chose.
//! The old one makes the system call. That memory (MAP_DROPPABLE) is never saved: its kernel may drop
//! it at any time, and what came back from it twice would be no random numbers.
//!
//! **Trust.** The old object may be anything. It is read as an ELF file by a library that checks it,
//! and what is written to it is written to memory of that process alone.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use dormouse_kernel::proc;
use object::elf::FileHeader64;
use object::read::elf::{FileHeader, Sym};
use object::{Endianness, elf};

use crate::error::{Error, Result};
use crate::format::check::USER_END;
use crate::format::{Area, Backing, Memory, PAGE_BYTES, Records};

/// LIMIT: bytes of an object; today's have two pages.
pub(crate) const IMAGE_BYTES_MAX: u64 = 64 << 10;
/// LIMIT: how far the kernel's object may be from the old one, for a jump to reach it.
const REACH_BYTES: u64 = 1 << 30;
/// Room below a stack, which may grow.
const STACK_BYTES: u64 = 1 << 30;
/// The entry of the auxiliary vector that says where the object is.
const AT_SYSINFO_EHDR: u64 = 33;

/// This kernel's object.
#[derive(Debug, Clone)]
pub(crate) struct Object {
    /// All of its bytes.
    pub(crate) image: Vec<u8>,
    /// Bytes of the data below it.
    data_bytes: u64,
}

impl Object {
    /// The one that this very process has mapped. `None` without one.
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
        hash(&self.image)
    }

    fn bytes(&self) -> u64 {
        self.data_bytes + self.image.len() as u64
    }
}

/// BLAKE3 of an object.
pub(crate) fn hash(image: &[u8]) -> String {
    blake3::hash(image).to_hex().to_string()
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

/// Where the kernel's object is in a process.
pub(crate) fn of_process(pid: u32) -> Option<Range<u64>> {
    Maps::of(pid)?.object()
}

/// Where a process has objects: the kernel's, and the one that it came along with.
pub(crate) fn all_of_process(pid: u32) -> Vec<Range<u64>> {
    let Some(maps) = Maps::of(pid) else { return Vec::new() };
    let auxv = fs::read(format!("/proc/{pid}/auxv")).unwrap_or_default();
    let first = told(&auxv).unwrap_or_default();
    let is_object =
        |(range, name): &(Range<u64>, &str)| *name == "[vdso]" || range.contains(&first);
    maps.ranges().filter(is_object).map(|(range, _)| range).collect()
}

/// What an auxiliary vector says.
fn told(auxv: &[u8]) -> Option<u64> {
    let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_ne_bytes); // eight bytes each
    let (entries, _) = auxv.as_chunks::<16>();
    let entry = entries.iter().find(|entry| number(&entry[..8]) == AT_SYSINFO_EHDR)?;
    Some(number(&entry[8..]))
}

/// An old object that goes along, as it is from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bent {
    /// Where it is.
    pub(crate) address: u64,
    /// All of its bytes.
    pub(crate) image: Vec<u8>,
}

/// Makes place for this kernel's object in every memory that has another's; gives what becomes of that
/// one, by memory. `read` reads memory as it was saved.
///
/// Errors: [`Error::Elsewhere`] where a thread stands in it, or nothing is known of it.
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

/// The object that a process came along with, where the kernel's is not the one it was told of.
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
    let image = read(area, first..area.end.min(first.saturating_add(IMAGE_BYTES_MAX)))?;
    // A program may have put anything there; what is no object is not called as one.
    Ok(functions(&image).is_some().then_some((first, image)))
}

/// The areas that are in the place of a kernel's object and its data.
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

/// The place nearest to `near` where nothing is for so many bytes.
fn hole(memory: &Memory, near: u64, bytes: u64) -> Option<u64> {
    let mut places = Vec::new();
    // The lowest addresses are nobody's.
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

/// Functions of an object by name, without what the kernel puts before it: where they are.
type Functions = BTreeMap<Vec<u8>, Range<usize>>;

/// `None` where it is no object.
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

/// Has the functions of an object at `address` go on in those of another at `there`. What it has no
/// counterpart for and is no system call stays as it is.
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
        // One that is shorter than its jump is no function of any kernel's.
        if let Some(begin) = body.get_mut(..code.len()) {
            begin.copy_from_slice(&code);
        }
    }
}

/// `jmp`, relative.
fn jump(from: u64, to: u64) -> Vec<u8> {
    const BYTES: u64 = 5;
    let distance = to.wrapping_sub(from + BYTES) as i32; // within reach, as was asked of the hole
    let mut code = vec![0xe9];
    code.extend(distance.to_le_bytes());
    code
}

/// `mov eax, NUMBER; syscall; ret`: arguments and results are where a function has them.
fn call(number: i64) -> Vec<u8> {
    let mut code = vec![0xb8];
    code.extend((number as u32).to_le_bytes());
    code.extend([0x0f, 0x05, 0xc3]);
    code
}

/// The call that a function saves its callers.
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

/// getrandom(2), but for the question how much memory it needs (fifth argument: all bits), which is
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
    use super::*;
    use crate::format::check::tests::small;
    use crate::format::{Bytes, Run, Thread};

    const OLD: u64 = 0x7fff_0000_0000;
    const PAGES: u64 = 4 * PAGE_BYTES;

    /// Records of another kernel's, whose object differs in a byte that no function has.
    fn foreign(here: &Object) -> Records {
        let mut records = small();
        let mut image = here.image.clone();
        *image.last_mut().unwrap() ^= 1;
        records.about.vdso = hash(&image);
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

    /// Where the function of an object goes on that begins with a jump.
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
    fn functions_of_the_old_go_on_in_the_new() {
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

        // Once more, under a third: the first object stays the one that is called.
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
        // Who stands where it was may not be let go on.
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
    fn the_same_object_stays_and_one_that_nobody_knows_is_refused() {
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
    fn what_the_new_kernel_has_not_is_a_system_call() {
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
    fn the_place_is_close_and_nobodys() {
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
        fn any_bytes_are_an_object_or_none(
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
