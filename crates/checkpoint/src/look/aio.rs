//! The header of a ring of asynchronous I/O (`struct aio_ring`), in the memory of a process.

use dormouse_kernel::call;

/// `f_type` of the file system of rings, and the word behind the places in a header (AIO_RING_MAGIC).
pub(crate) const MAGIC: u32 = 0xa10a_10a1;

/// Bytes of a header.
pub(crate) const HEADER_BYTES: u32 = 32;

/// A header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// The place of the context in the table of the address space.
    pub(crate) slot: u32,
    /// Places of the ring.
    pub(crate) events: u32,
    /// The place of the first event that is not collected yet. Programs may change it.
    pub(crate) head: u32,
    /// The place of the next event.
    pub(crate) tail: u32,
    pub(crate) magic: u32,
    /// Its own length.
    pub(crate) bytes: u32,
}

impl Header {
    /// Reads the header at an address; `None` if there is no memory.
    pub(crate) fn read(pid: u32, at: u64) -> Option<Self> {
        let mut bytes = [0; HEADER_BYTES as usize];
        let read = call::read_memory(pid, &mut bytes, &[(at, u64::from(HEADER_BYTES))]).ok()?;
        let (words, _) = bytes.as_chunks();
        let word = |n: usize| words.get(n).map_or(0, |word| u32::from_ne_bytes(*word));
        let [slot, events, head, tail, magic] = std::array::from_fn(word);
        (read == bytes.len()).then(|| Self { slot, events, head, tail, magic, bytes: word(7) })
    }

    /// How many events are to be collected; 0 if this is no header.
    pub(crate) fn uncollected(&self) -> u32 {
        let Self { events, head, tail, magic, .. } = *self;
        if events == 0 || magic != MAGIC {
            return 0;
        }
        // As the kernel reads numbers that a program has changed.
        let (head, tail) = (head % events, tail % events);
        if tail < head { tail + (events - head) } else { tail - head }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_a_ring_in_memory_are_counted() {
        let count = |words: [u32; 8]| {
            let header = Header::read(std::process::id(), words.as_ptr() as u64).unwrap();
            header.uncollected()
        };
        assert_eq!(count([0, 127, 5, 9, MAGIC, 1, 0, 32]), 4);
        assert_eq!(count([0, 127, 120, 3, MAGIC, 1, 0, 32]), 10);
        assert_eq!(count([0, 127, 247, 3, MAGIC, 1, 0, 32]), 10);
        assert_eq!(count([0, 0, 5, 9, MAGIC, 1, 0, 32]), 0);
        assert_eq!(count([0, 127, 5, 9, 7, 1, 0, 32]), 0);
        assert_eq!(Header::read(std::process::id(), 8), None);
    }
}
