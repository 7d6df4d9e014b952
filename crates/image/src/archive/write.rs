//! Writing a tar: pax with ustar headers, the same bytes for the same entries.
//!
//! A pax header is written only for values that a plain one cannot hold: long names, ids above
//! seven octal digits, sizes from 8 GiB, times with nanoseconds or before 1970, xattrs
//! (`SCHILY.xattr`), holes (GNU sparse 1.0, which GNU tar, bsdtar and Go read).

use std::io::{self, Write};

use super::{Kind, Meta, Piece};

const BLOCK: usize = 512;

/// An entry without the data of its file.
#[derive(Debug)]
pub(crate) struct Head<'a> {
    /// Without a leading `/`; empty for the root.
    pub path: &'a [u8],
    pub meta: &'a Meta,
    /// A file's content is the map of a sparse file, `None` for one without holes.
    pub kind: Kind<Option<Vec<Piece>>>,
}

/// Writes entries one after another.
#[derive(Debug)]
pub(crate) struct Writer<W> {
    out: W,
    /// Data of the current file that is still to come, and its padding.
    left: u64,
    padding: usize,
}

impl<W: Write> Writer<W> {
    pub(crate) fn new(out: W) -> Self {
        Self { out, left: 0, padding: 0 }
    }

    /// Begins an entry. The data passed to [`Writer::data`] must have the length of the file, or of
    /// all pieces of its map together.
    pub(crate) fn entry(&mut self, head: &Head<'_>) -> io::Result<()> {
        assert_eq!(self.left, 0, "the data of the entry before is complete");
        let mut header = tar::Header::new_ustar();
        let mut pax = Vec::new();
        let mut path = if head.path.is_empty() { b".".to_vec() } else { head.path.to_vec() };
        let meta = head.meta;
        let mut link: &[u8] = b"";
        let (mut stored, mut map_text) = (0, Vec::new());
        let kind = match &head.kind {
            Kind::Directory => {
                path.push(b'/');
                tar::EntryType::Directory
            }
            Kind::File { size, content: None } => {
                stored = *size;
                tar::EntryType::Regular
            }
            Kind::File { size, content: Some(map) } => {
                record(&mut pax, b"GNU.sparse.major", b"1");
                record(&mut pax, b"GNU.sparse.minor", b"0");
                record(&mut pax, b"GNU.sparse.name", &path);
                record(&mut pax, b"GNU.sparse.realsize", size.to_string().as_bytes());
                map_text = format!("{}\n", map.len()).into_bytes();
                for piece in map {
                    writeln!(map_text, "{}\n{}", piece.offset, piece.length)?;
                }
                map_text.resize(map_text.len().next_multiple_of(BLOCK), 0);
                stored = map.iter().map(|p| p.length).sum::<u64>() + map_text.len() as u64;
                tar::EntryType::Regular
            }
            Kind::HardLink { target } => {
                link = target;
                tar::EntryType::Link
            }
            Kind::Symlink { target } => {
                link = target;
                tar::EntryType::Symlink
            }
            Kind::Char { major, minor } | Kind::Block { major, minor } => {
                header.set_device_major(*major)?;
                header.set_device_minor(*minor)?;
                match &head.kind {
                    Kind::Char { .. } => tar::EntryType::Char,
                    _ => tar::EntryType::Block,
                }
            }
            Kind::Fifo => tar::EntryType::Fifo,
        };
        header.set_entry_type(kind);
        {
            let old = header.as_old_mut();
            if path.len() <= 100 {
                old.name[..path.len()].copy_from_slice(&path);
            } else {
                old.name.copy_from_slice(&path[..100]);
                record(&mut pax, b"path", &path);
            }
            if link.len() <= 100 {
                old.linkname[..link.len()].copy_from_slice(link);
            } else {
                old.linkname.copy_from_slice(&link[..100]);
                record(&mut pax, b"linkpath", link);
            }
        }
        header.set_mode(meta.mode);
        let mut number = |key: &[u8], n: u64, limit: u64| {
            if n >= limit {
                record(&mut pax, key, n.to_string().as_bytes());
            }
            n.min(limit - 1)
        };
        header.set_uid(number(b"uid", meta.uid.into(), 1 << 21));
        header.set_gid(number(b"gid", meta.gid.into(), 1 << 21));
        header.set_size(number(b"size", stored, 1 << 33));
        let (seconds, nanos) = meta.mtime;
        let plain = u64::try_from(seconds).ok().filter(|s| *s < 1 << 33 && nanos == 0);
        header.set_mtime(plain.unwrap_or_else(|| seconds.clamp(0, (1 << 33) - 1) as u64));
        if plain.is_none() {
            record(&mut pax, b"mtime", time(seconds, nanos).as_bytes());
        }
        for (name, value) in &meta.xattrs {
            record(&mut pax, &[b"SCHILY.xattr.", name.as_slice()].concat(), value);
        }
        if !pax.is_empty() {
            let mut extension = tar::Header::new_ustar();
            extension.as_old_mut().name[..9].copy_from_slice(b"PaxHeader");
            extension.set_entry_type(tar::EntryType::XHeader);
            extension.set_mode(0o644);
            extension.set_uid(0);
            extension.set_gid(0);
            extension.set_mtime(0);
            extension.set_size(pax.len() as u64);
            extension.set_cksum();
            self.out.write_all(extension.as_bytes())?;
            pax.resize(pax.len().next_multiple_of(BLOCK), 0);
            self.out.write_all(&pax)?;
        }
        header.set_cksum();
        self.out.write_all(header.as_bytes())?;
        self.out.write_all(&map_text)?;
        self.left = stored - map_text.len() as u64;
        self.padding = (self.left.wrapping_neg() % BLOCK as u64) as usize;
        Ok(())
    }

    /// Writes data of the current file.
    pub(crate) fn data(&mut self, data: &[u8]) -> io::Result<()> {
        assert!(data.len() as u64 <= self.left, "a file gets no more data than it was begun with");
        self.out.write_all(data)?;
        self.left -= data.len() as u64;
        if self.left == 0 {
            let padding = std::mem::take(&mut self.padding);
            self.out.write_all(&[0; BLOCK][..padding])?;
        }
        Ok(())
    }

    /// Fills up a file that turned out shorter than it was begun with.
    pub(crate) fn zeros(&mut self) -> io::Result<()> {
        while self.left > 0 {
            let n = self.left.min(4096) as usize;
            self.data(&[0; 4096][..n])?;
        }
        Ok(())
    }

    /// Ends the archive.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        assert_eq!(self.left, 0, "the data of the last entry is complete");
        self.out.write_all(&[0; 2 * BLOCK])?;
        self.out.flush()?;
        Ok(self.out)
    }
}

/// `LENGTH KEY=VALUE\n`, where the length counts itself.
fn record(pax: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + rest.to_string().len();
    if rest + length.to_string().len() != length {
        length = rest + length.to_string().len();
    }
    pax.extend_from_slice(format!("{length} ").as_bytes());
    pax.extend_from_slice(key);
    pax.push(b'=');
    pax.extend_from_slice(value);
    pax.push(b'\n');
}

/// `[-]SECONDS[.FRACTION]` without trailing zeros.
fn time(seconds: i64, nanos: u32) -> String {
    let (sign, seconds, nanos) = match seconds < 0 && nanos > 0 {
        true => ("-", -(seconds + 1), 1_000_000_000 - nanos),
        false => ("", seconds, nanos),
    };
    match nanos {
        0 => format!("{sign}{seconds}"),
        _ => format!("{sign}{seconds}.{nanos:09}").trim_end_matches('0').to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Entry, Reader, Source};
    use super::*;
    use crate::error::Result;

    /// A tar in memory.
    struct Memory<'a>(&'a [u8]);

    impl Source for Memory<'_> {
        fn data(&mut self, limit: usize) -> Result<&[u8]> {
            let n = limit.min(self.0.len());
            let (data, rest) = self.0.split_at(n);
            self.0 = rest;
            Ok(data)
        }
        fn raw(&mut self, buffer: &mut [u8]) -> Result<bool> {
            if self.0.is_empty() {
                return Ok(false);
            }
            buffer.copy_from_slice(&self.0[..buffer.len()]);
            self.0 = &self.0[buffer.len()..];
            Ok(true)
        }
    }

    #[test]
    fn odd_entries_round_trip() {
        let odd = Meta {
            mode: 0o4755,
            uid: 4_000_000_000,
            gid: 7,
            mtime: (-3, 250_000_000),
            xattrs: vec![
                (b"security.capability".to_vec(), b"\x01\0\0\x02\n\0=\0".to_vec()),
                (b"user.a".to_vec(), Vec::new()),
            ],
        };
        let plain = Meta { mode: 0o644, mtime: (1_700_000_000, 0), ..Meta::default() };
        let long = [b"d/".repeat(90), b"x".repeat(255)].concat();
        let map = vec![Piece { offset: 4096, length: 3 }, Piece { offset: 5 << 30, length: 2 }];
        type Written<'a> = (&'a [u8], &'a Meta, Kind<Option<Vec<Piece>>>);
        let kinds: Vec<Written> = vec![
            (b"", &plain, Kind::Directory),
            (b"d", &odd, Kind::Directory),
            (&long, &odd, Kind::File { size: 5, content: None }),
            (b"d/sparse", &plain, Kind::File { size: 6 << 30, content: Some(map) }),
            (b"l", &plain, Kind::Symlink { target: b"../x".repeat(50) }),
            (b"h", &plain, Kind::HardLink { target: long.clone() }),
            (b"c", &plain, Kind::Char { major: 4095, minor: 0xf_ffff }),
            (b"b", &odd, Kind::Block { major: 8, minor: 1 }),
            (b"f", &plain, Kind::Fifo),
        ];
        let mut writer = Writer::new(Vec::new());
        for (path, meta, kind) in &kinds {
            writer.entry(&Head { path, meta, kind: kind.clone() }).unwrap();
            let n = writer.left;
            writer.data(&b"hello"[..n as usize]).unwrap();
        }
        let tar = writer.finish().unwrap();
        assert_eq!(tar.len() % BLOCK, 0);
        let mut reader = Reader::new(Memory(&tar));
        for (path, meta, kind) in &kinds {
            let entry = reader.next().unwrap().unwrap();
            let data = match &entry.kind {
                Kind::File { content, .. } => {
                    reader.source.data(content.length as usize).unwrap().len()
                }
                _ => 0,
            };
            let Entry { path: p, meta: m, kind: k } = entry;
            assert_eq!((p.as_slice(), &m), (*path, *meta));
            match (k, kind) {
                (Kind::File { size, content }, Kind::File { size: s, content: map }) => {
                    assert_eq!((size, &content.map), (*s, map));
                    assert_eq!(data, 5);
                }
                (Kind::Directory, Kind::Directory) | (Kind::Fifo, Kind::Fifo) => {}
                (Kind::Symlink { target: a }, Kind::Symlink { target: b }) => assert_eq!(a, *b),
                (Kind::HardLink { target: a }, Kind::HardLink { target: b }) => assert_eq!(a, *b),
                (Kind::Char { major, minor }, Kind::Char { .. }) => {
                    assert_eq!((major, minor), (4095, 0xf_ffff));
                }
                (Kind::Block { major, minor }, Kind::Block { .. }) => {
                    assert_eq!((major, minor), (8, 1));
                }
                (a, b) => panic!("{a:?} is not {b:?}"),
            }
        }
        assert!(reader.next().unwrap().is_none());
    }

    #[test]
    fn records_count_their_own_length() {
        for n in 0..1200 {
            let mut pax = Vec::new();
            record(&mut pax, b"k", &vec![b'v'; n]);
            let text = String::from_utf8(pax.clone()).unwrap();
            assert_eq!(text.split(' ').next().unwrap().parse::<usize>().unwrap(), pax.len());
        }
    }
}
