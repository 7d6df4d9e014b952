//! Words of 64 bits in the files by which processes of the keeper's are told things.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// What is not what it should be.
pub(crate) fn bad(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Reads so many.
pub(crate) fn read(file: &File, at: u64, count: usize) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; count * 8];
    file.read_exact_at(&mut bytes, at)?;
    let number = |b: &[u8]| u64::from_ne_bytes(b.try_into().unwrap_or_default()); // eight by the slice
    Ok(bytes.chunks_exact(8).map(number).collect())
}

/// Writes them.
pub(crate) fn write(file: &File, at: u64, numbers: &[u64]) -> io::Result<()> {
    let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_ne_bytes()).collect();
    file.write_all_at(&bytes, at)
}
