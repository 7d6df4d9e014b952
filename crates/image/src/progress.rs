//! Progress reports.

/// Receives progress. Every task has a unique id; tasks run at the same time, on several threads.
pub trait Progress: Sync {
    /// A task begins: its description, and its number of bytes if known.
    fn start(&self, what: &str, total_bytes: Option<u64>) -> u64;
    /// So many more bytes of the task are done.
    fn advance(&self, id: u64, bytes: u64);
    /// The task has completed or failed.
    fn finish(&self, id: u64);
}

/// Discards all progress.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn start(&self, _what: &str, _total_bytes: Option<u64>) -> u64 {
        0
    }
    fn advance(&self, _id: u64, _bytes: u64) {}
    fn finish(&self, _id: u64) {}
}
