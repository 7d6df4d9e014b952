//! Contexts of asynchronous I/O (io_setup(2)): a ring in the memory of a process, into which the kernel writes
//! an event for each finished request. A context belongs to the address space, and no process inherits it.

use serde::{Deserialize, Serialize};

use crate::{PAGE_BYTES, Run};

/// A context without unfinished requests. One area maps its ring, and begins at the id of the context.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AioContext {
    /// Its place in the table of the address space, which the header of the ring repeats.
    pub slot: u32,
    /// The number of requests that io_setup(2) was called with.
    pub requests: u32,
    /// Places of the ring, for one event each.
    pub events: u32,
    /// The place of the first event that is not collected yet.
    pub head: u32,
    /// The place of the next event.
    pub tail: u32,
    /// The contents of the ring, with its header; addresses are offsets.
    pub runs: Vec<Run>,
}

/// Bytes of the header of a ring, and of an event.
const HEADER_BYTES: u64 = 32;
const EVENT_BYTES: u64 = 32;

impl AioContext {
    /// LIMIT: places of the table of an address space. The restore fills those that are free before the last.
    pub const SLOTS_MAX: u32 = 4096;

    /// Places of a ring of so many bytes.
    pub fn events_of(ring_bytes: u64) -> u64 {
        ring_bytes.saturating_sub(HEADER_BYTES) / EVENT_BYTES
    }

    /// The length of the ring.
    pub fn ring_bytes(&self) -> u64 {
        (HEADER_BYTES + u64::from(self.events) * EVENT_BYTES).next_multiple_of(PAGE_BYTES)
    }

    /// Events that are not collected yet.
    pub fn uncollected(&self) -> u32 {
        match self.tail.checked_sub(self.head) {
            Some(events) => events,
            None => self.tail + (self.events - self.head),
        }
    }

    /// The most events that a new ring of this size has places for, whichever CPUs the submitting thread
    /// runs on. KERNEL: each CPU keeps some of the free places, all together less than half of them. A
    /// program that submits no more requests than it was made for needs no more.
    pub fn uncollected_max(&self) -> u32 {
        self.events.saturating_sub(1) / 2
    }

    /// Places of the ring that a kernel with so many possible CPUs makes for a number of requests.
    ///
    /// KERNEL: twice as many places as requests, and at least eight for each CPU, so that all requests have
    /// one wherever the others are kept; two more; and as many as fit into whole pages.
    pub fn events_for(requests: u32, cpus: u32) -> u64 {
        let places = u64::from(requests.max(cpus.saturating_mul(4))) * 2 + 2;
        Self::events_of((HEADER_BYTES + places * EVENT_BYTES).next_multiple_of(PAGE_BYTES))
    }

    /// The number of requests for which a kernel with so many possible CPUs makes this ring: that of the
    /// first call if possible, otherwise the smallest. `None` if it makes only larger ones.
    pub fn requests_here(&self, cpus: u32) -> Option<u32> {
        let fits = |requests: u32| {
            requests > 0 && Self::events_for(requests, cpus) == u64::from(self.events)
        };
        // The first number that needs the last page: events are whole pages but for the header.
        let before = self.ring_bytes().saturating_sub(PAGE_BYTES);
        let least = (Self::events_of(before).saturating_sub(1) / 2) as u32;
        [self.requests, 1].into_iter().chain(least..=least.saturating_add(2)).find(|n| fits(*n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(requests: u32, events: u32) -> AioContext {
        AioContext { slot: 0, requests, events, head: 0, tail: 0, runs: Vec::new() }
    }

    #[test]
    fn rings_have_as_many_places_as_the_kernel_makes() {
        // As a kernel with 2 possible CPUs made them.
        for (requests, events) in
            [(1, 127), (8, 127), (62, 127), (63, 255), (64, 255), (2048, 4223)]
        {
            assert_eq!(AioContext::events_for(requests, 2), events, "{requests}");
            let context = context(requests, events as u32);
            assert_eq!(context.requests_here(2), Some(requests));
            assert_eq!(AioContext::events_of(context.ring_bytes()), events);
        }
    }

    #[test]
    fn another_host_makes_the_same_ring_for_another_number() {
        // 64 CPUs make at least 639 places.
        assert_eq!(AioContext::events_for(1, 64), 639);
        assert_eq!(context(1, 639).requests_here(64), Some(1));
        assert_eq!(context(1, 639).requests_here(2), Some(255));
        assert_eq!(context(300, 639).requests_here(64), Some(300));
        assert_eq!(context(8, 127).requests_here(64), None);
        assert_eq!(context(100, 255).requests_here(64), None);
        assert_eq!(context(2048, 4223).requests_here(64), Some(2048));
        for pages in 1..2000u64 {
            let events = AioContext::events_of(pages * PAGE_BYTES) as u32;
            let requests = context(0, events).requests_here(1).unwrap();
            assert_eq!(AioContext::events_for(requests, 1), u64::from(events));
        }
    }

    #[test]
    fn events_are_counted_across_the_end_of_the_ring() {
        let at = |head, tail| AioContext { head, tail, ..context(8, 127) }.uncollected();
        assert_eq!([at(0, 0), at(5, 9), at(120, 3), at(126, 125)], [0, 4, 10, 126]);
        assert!(context(62, 127).uncollected_max() >= 62);
    }
}
