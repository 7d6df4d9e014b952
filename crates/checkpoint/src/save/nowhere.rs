//! The destination of contents that are not kept: a twin is read for its records alone.

use dormouse_parcel::Sink;
use dormouse_record::{Of, PAGE_BYTES, Pages, Records, Result};

/// A sink that keeps nothing and counts pages.
#[derive(Debug, Default)]
pub(super) struct Nowhere {
    pages: u64,
}

impl Sink for Nowhere {
    fn next_page(&self) -> u64 {
        self.pages
    }

    fn new_bytes(&self) -> u64 {
        self.bytes()
    }

    fn bytes(&self) -> u64 {
        self.pages * PAGE_BYTES
    }

    fn find(&mut self, _: Of, _: u64, _: &[u8]) -> Option<u64> {
        None
    }

    fn append(&mut self, pages: &[u8]) -> Result<()> {
        self.pages += pages.len() as u64 / PAGE_BYTES;
        Ok(())
    }

    fn make_room(&mut self, _: u64) {}

    fn pages(&mut self) -> Result<Pages> {
        Ok(Pages::default())
    }

    fn publish(self: Box<Self>, _: &Records) -> Result<()> {
        Ok(())
    }
}
