//! The files of memory contents, numbered as one.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// The file name of a part.
pub fn part_name(number: usize) -> String {
    match number {
        0 => "pages".into(),
        number => format!("pages.{number}"),
    }
}

/// The open files.
#[derive(Debug)]
pub struct PageFiles {
    files: Vec<(Range<u64>, File)>,
}

impl PageFiles {
    pub(crate) fn new(files: Vec<(Range<u64>, File)>) -> Self {
        Self { files }
    }

    /// The files, in the order of their parts.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &File> {
        self.files.iter().map(|(_, file)| file)
    }

    /// The length of each file.
    pub fn lengths(&self) -> Vec<u64> {
        self.files.iter().map(|(part, _)| part.end - part.start).collect()
    }

    /// The files, and the byte range of each.
    pub(crate) fn parts(&self) -> &[(Range<u64>, File)] {
        &self.files
    }

    /// The number of the part with a byte.
    pub(crate) fn number_of(&self, at: u64) -> Option<usize> {
        self.files.iter().position(|(part, _)| part.contains(&at))
    }

    /// Reads bytes; all of the range must be in the files.
    pub fn read_exact_at(&self, mut buffer: &mut [u8], mut at: u64) -> io::Result<()> {
        while !buffer.is_empty() {
            let found = self.files.iter().find(|(part, _)| part.contains(&at));
            let (part, file) = found.ok_or(io::ErrorKind::UnexpectedEof)?;
            let most = usize::try_from(part.end - at).unwrap_or(usize::MAX);
            let (now, later) = buffer.split_at_mut(most.min(buffer.len()));
            file.read_exact_at(now, at - part.start)?;
            at += now.len() as u64;
            buffer = later;
        }
        Ok(())
    }

    /// The same files, by duplicated descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        let copy = |(part, file): &(Range<u64>, File)| Ok((part.clone(), file.try_clone()?));
        Ok(Self { files: self.files.iter().map(copy).collect::<io::Result<_>>()? })
    }
}

#[cfg(test)]
mod tests {
    use dormouse_record::CHUNK_BYTES;

    use super::*;

    #[test]
    fn several_files_are_read_as_one() {
        let file = |bytes: Vec<u8>| {
            let file = tempfile::tempfile().unwrap();
            file.write_all_at(&bytes, 0).unwrap();
            file
        };
        let chunk = CHUNK_BYTES;
        let one = file(vec![1; chunk as usize]);
        let files =
            PageFiles::new(vec![(0..chunk, one), (chunk..chunk + 4096, file(vec![2; 4096]))]);
        let mut both = vec![0; 8192];
        files.read_exact_at(&mut both, chunk - 4096).unwrap();
        assert_eq!(both, [vec![1; 4096], vec![2; 4096]].concat());
        assert!(files.read_exact_at(&mut both, chunk).is_err());
        assert_eq!(files.number_of(chunk), Some(1));
        assert_eq!(files.number_of(chunk + 4096), None);
    }
}
