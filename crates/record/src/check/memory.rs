//! Checks of address spaces, and of the pages that hold contents.

use super::{Found, USER_END, address, ensure, object};
use crate::{Area, Backing, Memory, MemoryPolicy, PAGE_BYTES, Pages, Records, Run, Thing};

pub(super) fn memory(memory: &Memory, records: &Records) -> Found {
    let mut end = 0;
    ensure(memory.areas.len() <= 1 << 20, || "too many areas".into())?;
    for area in &memory.areas {
        let said = |what: &str| format!("area at {:x}: {what}", area.start);
        let aligned = [area.start, area.end].iter().all(|a| a.is_multiple_of(PAGE_BYTES));
        ensure(aligned, || said("not of whole pages"))?;
        let inside = area.start >= end && area.start < area.end && area.end <= USER_END;
        ensure(inside, || said("overlaps another or nothing"))?;
        ensure(area.access <= 7, || said("access"))?;
        end = area.end;
        self::area(area, records).map_err(|what| said(&what))?;
    }
    let mut end = 0;
    for (first, behind) in memory.guards.iter().copied() {
        let aligned = first.is_multiple_of(PAGE_BYTES) && behind.is_multiple_of(PAGE_BYTES);
        let in_order = first >= end && first < behind;
        let is_sound = aligned && in_order && has_areas(memory, first, behind);
        ensure(is_sound, || format!("guards at {first:x}"))?;
        end = behind;
    }
    let mut end = 0;
    for it in &memory.policies {
        let aligned = it.start.is_multiple_of(PAGE_BYTES) && it.end.is_multiple_of(PAGE_BYTES);
        let in_order = it.start >= end && it.start < it.end;
        let is_sound = aligned && in_order && has_areas(memory, it.start, it.end);
        ensure(is_sound, || format!("the policy at {:x}", it.start))?;
        policy(&it.policy)?;
        end = it.end;
    }
    let locks = [0, libc::MCL_FUTURE, libc::MCL_FUTURE | libc::MCL_ONFAULT].map(i32::cast_unsigned);
    ensure(locks.contains(&memory.locks_later), || "the locks of later memory".into())?;
    if let Some((start, bytes)) = memory.vdso {
        let fits = start.is_multiple_of(PAGE_BYTES) && bytes <= 1 << 20 && start < USER_END - bytes;
        ensure(fits, || "the kernel's object".into())?;
    }
    if let Some((address, bytes)) = &memory.landing {
        let (start, length) = memory.vdso.unwrap_or_default();
        let behind = address.checked_add(bytes.0.len() as u64);
        let is_inside = behind.is_some_and(|behind| *address >= start && behind <= start + length);
        let fits = is_inside && bytes.0.len() as u64 <= PAGE_BYTES;
        ensure(fits, || "the code behind the kernel's object".into())?;
    }
    address::of_layout(&memory.layout)?;
    ensure(memory.auxv.0.len() <= 4096, || "the auxiliary vector".into())?;
    match memory.program {
        Some(n) => ensure(matches!(object(n, records)?, Thing::File(_)), || "program".into()),
        None => Ok(()),
    }
}

/// Whether areas are at all addresses of a range. The restore itself may lie where no area is.
fn has_areas(memory: &Memory, first: u64, behind: u64) -> bool {
    let next = memory.areas.partition_point(|area| area.end <= first);
    let mut covered = first;
    for area in memory.areas[next..].iter().take_while(|area| area.start < behind) {
        covered = if area.start <= covered { area.end } else { covered };
    }
    covered >= behind
}

pub(super) fn policy(policy: &MemoryPolicy) -> Found {
    let mode = policy.mode & !MemoryPolicy::FLAGS;
    let is_known = (1..=MemoryPolicy::MODE_MAX).contains(&mode);
    let fits = policy.nodes.len() <= MemoryPolicy::WORDS_MAX;
    ensure(is_known && fits, || "a memory policy".into())
}

fn area(area: &Area, records: &Records) -> Found {
    runs(&area.runs, area.start, area.end, &records.pages)?;
    match area.backing {
        Backing::Anonymous => Ok(()),
        Backing::Huge { page_bytes } => {
            huge_page(page_bytes)?;
            let whole = [area.start, area.end].iter().all(|at| at.is_multiple_of(page_bytes));
            ensure(whole, || "not of whole pages".into())
        }
        Backing::Private { object: n, offset } => {
            ensure(offset.is_multiple_of(PAGE_BYTES), || "offset".into())?;
            ensure(matches!(object(n, records)?, Thing::File(_) | Thing::Device(_)), || {
                "maps an object that is not a file".into()
            })
        }
        Backing::Shared { object: n, offset } => {
            ensure(area.runs.is_empty(), || "pages of its own".into())?;
            ensure(offset.is_multiple_of(PAGE_BYTES), || "offset".into())?;
            match object(n, records)? {
                Thing::SystemVMemory(memory) => {
                    let whole = memory.bytes.next_multiple_of(PAGE_BYTES);
                    ensure(offset == 0 && area.bytes() == whole, || "a part of it".into())
                }
                Thing::File(_) => Ok(()),
                Thing::AioContext(context) => {
                    let is_whole = offset == 0 && area.bytes() == context.ring_bytes();
                    ensure(is_whole, || "a part of a ring".into())?;
                    let is_executable = area.access & libc::PROT_EXEC.cast_unsigned() != 0;
                    ensure(!is_executable, || "executable, which no ring is".into())
                }
                Thing::SharedMemory(memory) => {
                    // An area that has grown (mremap(2)) ends behind the memory.
                    ensure(offset < memory.bytes, || "beyond the end".into())?;
                    let is_executable = area.access & libc::PROT_EXEC.cast_unsigned() != 0;
                    ensure(!memory.no_exec || !is_executable, || {
                        "executable, which its memory is not".into()
                    })
                }
                _ => Err("maps an object that is not a file".into()),
            }
        }
    }
}

/// LIMIT: bytes of a huge page, of any architecture.
pub(super) fn huge_page(bytes: u64) -> Found {
    let known = bytes.is_power_of_two() && (64 << 10..=16 << 30).contains(&bytes);
    ensure(known, || "the size of its pages".into())
}

/// Checks pages of contents from `start` to `end`: each is in the files of pages.
pub(super) fn runs(runs: &[Run], start: u64, end: u64, pages: &Pages) -> Found {
    let mut at = start;
    for run in runs {
        let bytes = run.pages.checked_mul(PAGE_BYTES).ok_or("too many pages")?;
        let run_end = run.address.checked_add(bytes).ok_or("too many pages")?;
        let fits = run.address.is_multiple_of(PAGE_BYTES) && run.address >= at && run_end <= end;
        ensure(fits && run.pages > 0, || format!("pages at {:x}", run.address))?;
        let first = run.first.checked_mul(PAGE_BYTES);
        let there = first.and_then(|first| Some(first..first.checked_add(bytes)?));
        ensure(there.is_some_and(|all| pages.has(all)), || "pages that are not there".into())?;
        at = run_end;
    }
    Ok(())
}
