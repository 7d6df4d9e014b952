//! Words of 64 bits in the input files of the keeper's helper processes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// An error for invalid data.
pub(crate) fn bad(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Reads so many.
pub(crate) fn read(file: &File, at: u64, count: usize) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; count * 8];
    file.read_exact_at(&mut bytes, at)?;
    let number = |b: &[u8]| u64::from_ne_bytes(b.try_into().unwrap_or_default()); // 8 bytes
    Ok(bytes.chunks_exact(8).map(number).collect())
}

/// Writes them.
pub(crate) fn write(file: &File, at: u64, numbers: &[u64]) -> io::Result<()> {
    let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_ne_bytes()).collect();
    file.write_all_at(&bytes, at)
}
