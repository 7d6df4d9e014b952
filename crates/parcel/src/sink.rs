//! The destination of a checkpoint that is being made.

use std::fmt::Debug;

use dormouse_record::{Of, Pages, Records, Result};

/// Receives pages, in any number of rounds, and the records at the end. A sink that is dropped before
/// [`Sink::publish`] leaves no checkpoint.
///
/// [`DirSink`](crate::DirSink) is a directory. A stream to another host fits the trait as well: pages are
/// only appended, and records follow all pages.
pub trait Sink: Debug {
    /// Number of the next page.
    fn next_page(&self) -> u64;

    /// The number of appended bytes.
    fn new_bytes(&self) -> u64;

    /// The number of appended bytes, and of those that the destination had.
    fn bytes(&self) -> u64;

    /// The number of a page that need not be appended, since the destination has it.
    fn find(&mut self, of: Of, address: u64, page: &[u8]) -> Option<u64>;

    /// Appends whole pages. A failed write may be reported by a later call.
    fn append(&mut self, pages: &[u8]) -> Result<()>;

    /// Appended pages are first buffered in preallocated memory, up to so many bytes. While processes are
    /// frozen, appends then wait neither for the destination nor for checksums.
    fn make_room(&mut self, bytes: u64);

    /// Lengths and checksums of all pages.
    fn pages(&mut self) -> Result<Pages>;

    /// Writes the records and completes the checkpoint: it exists as a whole from then on.
    fn publish(self: Box<Self>, records: &Records) -> Result<()>;
}
