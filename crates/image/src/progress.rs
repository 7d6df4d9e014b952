//! Telling somebody how far it is.

/// Who is told. Every task has an id of its own; tasks run at the same time, from several threads.
pub trait Progress: Sync {
    /// A task begins: what it is, and how many bytes it will take where that is known.
    fn start(&self, what: &str, total_bytes: Option<u64>) -> u64;
    /// So many more bytes of the task are done.
    fn advance(&self, id: u64, bytes: u64);
    /// The task is over, well or not.
    fn finish(&self, id: u64);
}

/// Nobody is told.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn start(&self, _what: &str, _total_bytes: Option<u64>) -> u64 {
        0
    }
    fn advance(&self, _id: u64, _bytes: u64) {}
    fn finish(&self, _id: u64) {}
}
