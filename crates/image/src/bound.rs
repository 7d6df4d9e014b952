//! Bounds on an archive that is imported: its bytes do not decide how much memory, disk or time they take.
//!
//! - Entries of a layer share a [`Budget`] of memory, and those of all layers of an image another one. Paths,
//!   links, xattrs and maps of sparse files count, so that entries of 64 KiB end the import as early as many
//!   more plain ones. Directories that no entry describes are bounded in `tree`, headers in `layer`.
//! - A compressed stream may expand by the factor that gzip reaches ([`check_expansion`]). A frame of zstd
//!   reaches ten thousand and more, which would keep a processor busy for hours.
//! - Disk is bounded in `object`: a reserve stays free, and runs of zeros become holes.

use crate::archive::{Entry, Kind};
use crate::error::{Fault, Result};
use crate::object::INLINE_MAX;

/// Memory that an entry takes besides its strings: the entry, its place in the tree and in the file of
/// metadata. Measured: 300,000 empty files took 299 MB.
const ENTRY_BYTES: u64 = 1024;
/// Memory for the entries of one archive, where the machine has enough.
const ENTRIES_MAX_BYTES: u64 = 1 << 30;
/// Memory that an xattr takes besides its bytes: two vectors and their allocations, in three trees.
const XATTR_BYTES: usize = 256;
/// Entries of a layer may take one part in so many of the available memory; those of an image twice that.
const SHARE: u64 = 4;

/// A stream may always expand to this size.
const UNPACKED_FREE_BYTES: u64 = 1 << 30;
/// Beyond it: bytes for each compressed byte. DEFLATE reaches 1,032 (RFC 1951: 258 bytes in two bits).
const EXPANSION_MAX: u64 = 1100;

/// Memory for the entries of an archive.
#[derive(Debug)]
pub(crate) struct Budget {
    bytes: u64,
    left: u64,
}

impl Budget {
    /// One GiB, or a quarter of the available memory if that is less.
    pub(crate) fn of_entries() -> Self {
        let available = dormouse_kernel::scale::available_bytes();
        Self::new(available.map_or(ENTRIES_MAX_BYTES, |n| (n / SHARE).min(ENTRIES_MAX_BYTES)))
    }

    /// Twice as much, for the layers of one image.
    pub(crate) fn of_image() -> Self {
        Self::new(2 * Self::of_entries().bytes)
    }

    fn new(bytes: u64) -> Self {
        Self { bytes, left: bytes }
    }

    /// Takes the memory of an entry whose content is elsewhere.
    pub(crate) fn take<C>(&mut self, entry: &Entry<C>) -> Result<()> {
        let link = match &entry.kind {
            Kind::HardLink { target } | Kind::Symlink { target } => target.len(),
            _ => 0,
        };
        let xattrs: usize = entry
            .meta
            .xattrs
            .iter()
            .map(|(name, value)| XATTR_BYTES + name.len() + value.len())
            .sum();
        self.take_bytes(ENTRY_BYTES + INLINE_MAX + (entry.path.len() + link + xattrs) as u64)
    }

    /// Takes so many bytes.
    pub(crate) fn take_bytes(&mut self, bytes: u64) -> Result<()> {
        match self.left.checked_sub(bytes) {
            Some(left) => self.left = left,
            None => {
                let what = "the memory in bytes that the entries of the archive take".to_owned();
                return Err(Fault::Limit { what, limit: self.bytes }.into());
            }
        }
        Ok(())
    }
}

/// Refuses a stream that expands more than any honest one.
pub(crate) fn check_expansion(packed: u64, unpacked: u64) -> Result<()> {
    let limit = UNPACKED_FREE_BYTES.saturating_add(packed.saturating_mul(EXPANSION_MAX));
    if unpacked <= limit {
        return Ok(());
    }
    let what = format!(
        "the uncompressed size in bytes of a layer of which {packed} compressed bytes were read"
    );
    Err(Fault::Limit { what, limit }.into())
}

#[cfg(test)]
mod tests {
    use dormouse_kernel::ErrorKind;

    use super::*;
    use crate::archive::Meta;

    #[test]
    fn budget_counts_strings_of_entries() {
        let plain = Entry { path: vec![b'a'; 10], meta: Meta::default(), kind: Kind::<()>::Fifo };
        let xattrs = vec![(b"user.a".to_vec(), vec![0; 60_000])];
        let meta = Meta { xattrs, ..Meta::default() };
        let large = Entry { path: vec![b'a'; 10], meta, kind: Kind::<()>::Directory };
        let count = |entry: &Entry<()>| {
            let mut budget = Budget::new(1 << 20);
            (0..).take_while(|_| budget.take(entry).is_ok()).count()
        };
        assert_eq!((count(&plain), count(&large)), (954, 17));
    }

    #[test]
    fn expansion_beyond_gzip_is_refused() {
        let gib = 1 << 30;
        assert!(check_expansion(100, gib).is_ok());
        assert_eq!(check_expansion(100, gib + 110_001).unwrap_err().kind(), ErrorKind::Limit);
        assert!(check_expansion(100 << 20, 100 * gib).is_ok());
        assert!(check_expansion(u64::MAX, u64::MAX).is_ok());
    }
}
