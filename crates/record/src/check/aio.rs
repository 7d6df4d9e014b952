//! Checks of contexts of asynchronous I/O.

use std::collections::HashSet;

use super::{Found, ensure, memory, object};
use crate::{AioContext, Backing, PAGE_BYTES, Records, Thing};

/// LIMIT: bytes of all events of a ring (KERNEL: 0x10000000 in io_setup(2)), and one page.
const RING_BYTES_MAX: u64 = (256 << 20) + PAGE_BYTES;

/// Checks a context by itself.
pub(super) fn context(context: &AioContext, records: &Records) -> Found {
    let AioContext { slot, requests, events, head, tail, .. } = *context;
    ensure(slot < AioContext::SLOTS_MAX, || "its place".into())?;
    ensure(requests > 0, || "its requests".into())?;
    let bytes = context.ring_bytes();
    let is_whole = AioContext::events_of(bytes) == u64::from(events);
    ensure(is_whole && events > 0 && bytes <= RING_BYTES_MAX, || "the length of its ring".into())?;
    ensure(head < events && tail < events, || "the places of its events".into())?;
    let fits = context.uncollected() <= context.uncollected_max();
    ensure(fits, || "more events than it has places for".into())?;
    memory::runs(&context.runs, 0, bytes, &records.pages)
}

/// LIMIT: events and places of tables of all contexts: the restore makes as many calls, or few less.
const EVENTS_MAX: u64 = 1 << 24;
const PLACES_MAX: u64 = 1 << 16;

/// Checks that each context has one ring, and each place of a table one context.
pub(super) fn all(records: &Records) -> Found {
    let mut mapped = HashSet::new();
    let (mut events, mut places) = (0, 0);
    for memory in &records.memories {
        let mut slots = HashSet::new();
        for area in &memory.areas {
            let Backing::Shared { object: n, .. } = area.backing else { continue };
            let Thing::AioContext(context) = object(n, records)? else { continue };
            ensure(mapped.insert(n), || format!("number {n} has two rings"))?;
            let is_first = slots.insert(context.slot);
            ensure(is_first, || format!("number {n} is in the place of another"))?;
            events += u64::from(context.events);
        }
        places += slots.into_iter().max().map_or(0, |last| u64::from(last) + 1);
    }
    let are_few = events <= EVENTS_MAX && places <= PLACES_MAX;
    ensure(are_few, || "too many contexts of asynchronous I/O".into())?;
    let is_context = |n: &usize| matches!(records.objects[*n].thing, Thing::AioContext(_));
    let mut contexts = (0..records.objects.len()).filter(is_context);
    match contexts.find(|n| !mapped.contains(n)) {
        Some(n) => Err(format!("number {n} has no ring")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::records;
    use crate::sample::small;
    use crate::{Area, Run};

    /// The sample with two contexts, whose rings of one page are behind each other.
    fn with(change: fn(&mut Records)) -> String {
        let mut all = small();
        for slot in 0..2 {
            let runs = vec![Run { address: 0, pages: 1, first: 0 }];
            let context = AioContext { slot, requests: 8, events: 127, head: 0, tail: 0, runs };
            all.objects.push(Thing::AioContext(context).into());
            let start = 0x20_0000 + u64::from(slot) * PAGE_BYTES;
            let backing = Backing::Shared { object: 1 + slot as usize, offset: 0 };
            let (end, flags, runs) = (start + PAGE_BYTES, Vec::new(), Vec::new());
            all.memories[0].areas.push(Area { start, end, access: 3, backing, flags, runs });
        }
        change(&mut all);
        records(&all).err().map(|e| e.to_string()).unwrap_or_default()
    }

    fn first(records: &mut Records) -> &mut AioContext {
        match &mut records.objects[1].thing {
            Thing::AioContext(context) => context,
            _ => unreachable!("the sample has it there"),
        }
    }

    #[test]
    fn unsound_contexts_of_asynchronous_io_are_refused() {
        assert_eq!(with(|_| {}), "");
        assert_eq!(with(|r| (first(r).head, first(r).tail) = (100, 10)), "");
        type Case = (fn(&mut Records), &'static str);
        let cases: [Case; 16] = [
            (|r| first(r).slot = 4096, "its place"),
            (|r| first(r).slot = 1, "in the place of another"),
            (|r| first(r).requests = 0, "its requests"),
            (|r| first(r).events = 0, "the length of its ring"),
            (|r| first(r).events = 126, "the length of its ring"),
            (|r| first(r).events = 255, "a part of a ring"),
            (|r| first(r).events = u32::MAX, "too many contexts"),
            (|r| first(r).head = 127, "the places of its events"),
            (|r| first(r).tail = 127, "the places of its events"),
            (|r| first(r).tail = 64, "more events than it has places for"),
            (|r| (first(r).head, first(r).tail) = (1, 0), "more events than it has places for"),
            (|r| first(r).runs[0].address = PAGE_BYTES, "pages at 1000"),
            (|r| first(r).runs[0].first = 1, "not there"),
            (|r| r.memories[0].areas[1].access = 7, "executable"),
            (
                |r| r.memories[0].areas[1].backing = Backing::Shared { object: 2, offset: 0 },
                "number 2 has two rings",
            ),
            (|r| drop(r.memories[0].areas.pop()), "number 2 has no ring"),
        ];
        for (change, text) in cases {
            let refusal = with(change);
            assert!(refusal.contains(text), "{text}: {refusal}");
        }
    }
}
