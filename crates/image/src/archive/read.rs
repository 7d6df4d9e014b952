//! Reading an untrusted tar.
//!
//! The formats are those of image layers: v7, ustar, pax (POSIX.1-2017, `pax`, "pax Interchange
//! Format") with `SCHILY.xattr`, GNU long names, and sparse files in the four formats of GNU tar
//! (the old header, pax 0.0, 0.1 and 1.0). Where readers of tars differ, this one does what Go's
//! does, because Go programs made and checked the existing images: links, directories and devices
//! have no data whatever their size field, global pax headers change nothing, an unknown type is a
//! file.
//!
//! The `tar` crate's reader is not used: it splits pax records at newlines, which cuts binary
//! xattrs in two, does not know sparse pax, and does not return the bytes of headers. Those bytes
//! are needed to write the same tar again. Its header type reads and writes the fields here.
//!
//! The reader gives out entries one after another; every byte it takes as a header or padding goes
//! to [`Source::raw`], every byte of a file's data is taken by the caller. Bounds are in the
//! parent module.

use std::ops::ControlFlow;

use super::{Entry, Kind, MAX_NAME, MAX_PATH, MAX_XATTRS, Meta, Piece, keep_xattr, map_is_sound};
use crate::error::{Fault, ImageError, Result};

/// Longest pax header or GNU long name, in bytes. LIMIT: xattrs and a path fit many times.
const MAX_EXTENSION: u64 = 1 << 20;
/// Most pieces of a sparse file. LIMIT: 16 MiB of map.
const MAX_PIECES: usize = 1 << 20;
/// Most bytes after the end of the archive. LIMIT: GNU tar pads to 10 KiB, tapes to more.
const MAX_TRAILER: u64 = 16 << 20;
const BLOCK: usize = 512;

/// The source of a tar.
pub(crate) trait Source {
    /// Returns the next bytes of the file's data, at most `limit` of them, and none only at the end
    /// of the stream.
    fn data(&mut self, limit: usize) -> Result<&[u8]>;
    /// Reads exactly as many bytes as `buffer` is long, and remembers them as bytes that belong to
    /// no file. `Ok(false)` where the stream ends before the first.
    fn raw(&mut self, buffer: &mut [u8]) -> Result<bool>;
}

/// The contents of pax records for the next entry.
#[derive(Debug, Default)]
struct Extension {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u64>,
    gid: Option<u64>,
    mtime: Option<(i64, u32)>,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    sparse_major: Option<u64>,
    sparse_minor: Option<u64>,
    sparse_size: Option<u64>,
    sparse_map: Option<Vec<u64>>,
    sparse_name: Option<Vec<u8>>,
}

/// The content of a file in the tar.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Data {
    /// Bytes of data that follow in the stream, without padding.
    pub length: u64,
    /// The pieces of a sparse file.
    pub map: Option<Vec<Piece>>,
}

/// Reads entries.
pub(crate) struct Reader<S> {
    pub source: S,
    /// Bytes of padding after the data of the last entry.
    padding: usize,
}

impl<S: Source> Reader<S> {
    pub(crate) fn new(source: S) -> Self {
        Self { source, padding: 0 }
    }

    /// The next entry; `None` at the end of the archive, which is read to the end of the stream.
    ///
    /// The data of the entry before must have been taken, all of it.
    pub(crate) fn next(&mut self) -> Result<Option<Entry<Data>>> {
        let mut extension = Extension::default();
        let mut found = false;
        loop {
            let mut block = [0; BLOCK];
            let padding = std::mem::take(&mut self.padding);
            // umoci ends a layer right behind the data of its last file; Go reads it, GNU tar not.
            let padded = padding == 0 || self.source.raw(&mut block[..padding])?;
            if !padded || !self.source.raw(&mut block)? {
                // GNU tar and Go take an archive without its two zero blocks, too.
                return if found {
                    Err(broken("it ends after an extension header"))
                } else {
                    Ok(None)
                };
            }
            if block.iter().all(|b| *b == 0) {
                if found {
                    return Err(broken("it ends after an extension header"));
                }
                self.trailer()?;
                return Ok(None);
            }
            let header = tar::Header::from_byte_slice(&block);
            check_sum(&block, header)?;
            let field_size = header.entry_size().map_err(|_| broken("a size is not a number"))?;
            match block[156] {
                b'x' | b'X' => {
                    let text = self.extension(field_size)?;
                    extension.read(&text)?;
                    found = true;
                }
                b'g' => drop(self.extension(field_size)?),
                b'L' => {
                    extension.path.get_or_insert(until_nul(&self.extension(field_size)?));
                    found = true;
                }
                b'K' => {
                    extension.link.get_or_insert(until_nul(&self.extension(field_size)?));
                    found = true;
                }
                _ => return self.entry(&block, extension, field_size).map(Some),
            }
        }
    }

    /// The data of an extension header, with its padding.
    fn extension(&mut self, size: u64) -> Result<Vec<u8>> {
        if size > MAX_EXTENSION {
            let what = format!("an extension header of {size} bytes");
            return Err(Fault::Limit { what, limit: MAX_EXTENSION }.into());
        }
        let mut text = vec![0; size.next_multiple_of(BLOCK as u64) as usize];
        if !text.is_empty() && !self.source.raw(&mut text)? {
            return Err(broken("it ends inside an extension header"));
        }
        text.truncate(size as usize);
        Ok(text)
    }

    fn entry(
        &mut self,
        block: &[u8; BLOCK],
        mut extension: Extension,
        field_size: u64,
    ) -> Result<Entry<Data>> {
        let header = tar::Header::from_byte_slice(block);
        let sparse_name = extension.sparse_name.take();
        let path = sparse_name.or(extension.path.take());
        let path = path.unwrap_or_else(|| header.path_bytes().into_owned());
        let slash = path.ends_with(b"/");
        let path = clean_path(&path)?;
        let bad = |problem: &str| fault(&path, problem);
        let number = |pax: Option<u64>, field: std::io::Result<u64>, what| match pax {
            Some(n) => Ok(n),
            None => field.map_err(|_| bad(what)),
        };
        let uid = number(extension.uid, header.uid(), "its user id is not a number")?;
        let gid = number(extension.gid, header.gid(), "its group id is not a number")?;
        // u32::MAX is "no id" to the kernel.
        let id = |n: u64| u32::try_from(n).ok().filter(|n| *n != u32::MAX);
        let mut xattrs = std::mem::take(&mut extension.xattrs);
        xattrs.retain(|(name, _)| keep_xattr(name));
        // Later records win over earlier ones of the same name.
        xattrs.reverse();
        xattrs.sort_by(|a, b| a.0.cmp(&b.0));
        xattrs.dedup_by(|a, b| a.0 == b.0);
        if xattrs.iter().any(|(name, _)| name.len() > MAX_NAME || name.contains(&0)) {
            return Err(bad("the name of an xattr is longer than 255 bytes or has a NUL"));
        }
        if xattrs.iter().map(|(n, v)| n.len() + v.len()).sum::<usize>() > MAX_XATTRS {
            return Err(bad("its xattrs are more than 64 KiB"));
        }
        let meta = Meta {
            mode: header.mode().map_err(|_| bad("its mode is not a number"))? & 0o7777,
            uid: id(uid).ok_or_else(|| bad("its user id is more than 32 bits"))?,
            gid: id(gid).ok_or_else(|| bad("its group id is more than 32 bits"))?,
            mtime: match extension.mtime {
                Some(mtime) => mtime,
                // Some writers leave it empty, and no file is refused for its age.
                None => (mtime_field(header), 0),
            },
            xattrs,
        };
        let link = || {
            let link = extension.link.clone();
            let link = link.or_else(|| header.link_name_bytes().map(|l| l.into_owned()));
            let link = link.unwrap_or_default();
            match link {
                l if l.is_empty() => Err(bad("it is a link to nowhere")),
                l if l.len() > MAX_PATH => Err(bad("its target is longer than 4095 bytes")),
                l if l.contains(&0) => Err(bad("its target has a NUL")),
                l => Ok(l),
            }
        };
        let device = || {
            let part = |n: std::io::Result<Option<u32>>, max: u32| {
                let n = n.ok().flatten().unwrap_or(0);
                if n > max { Err(bad("its device number is out of range")) } else { Ok(n) }
            };
            // Linux keeps 12 bits of a major and 20 of a minor number.
            Ok::<_, ImageError>((
                part(header.device_major(), 0xfff)?,
                part(header.device_minor(), 0xf_ffff)?,
            ))
        };
        let kind = match block[156] {
            b'1' => Kind::HardLink { target: clean_path(&link()?)? },
            b'2' => Kind::Symlink { target: link()? },
            b'3' => device().map(|(major, minor)| Kind::Char { major, minor })?,
            b'4' => device().map(|(major, minor)| Kind::Block { major, minor })?,
            b'5' => Kind::Directory,
            b'6' => Kind::Fifo,
            // A v7 directory is a file with a name that ends in a slash.
            0 | b'0' if slash => Kind::Directory,
            flag => {
                let stored = extension.size.unwrap_or(field_size);
                self.padding = (stored.wrapping_neg() % BLOCK as u64) as usize;
                let (size, data) = self.content(&path, block, flag, &extension, stored)?;
                Kind::File { size, content: data }
            }
        };
        Ok(Entry { path, meta, kind })
    }

    /// Determines the content of a file in the stream: `stored` bytes of it.
    fn content(
        &mut self,
        path: &[u8],
        block: &[u8; BLOCK],
        flag: u8,
        extension: &Extension,
        stored: u64,
    ) -> Result<(u64, Data)> {
        let bad = |problem: &str| fault(path, problem);
        let mut length = stored;
        let (numbers, size) = if flag == b'S' {
            self.old_map(path, block)?
        } else if extension.sparse_major == Some(1) && extension.sparse_minor == Some(0) {
            let (map, used) = self.map_1_0(path, stored)?;
            length -= used;
            (map, extension.sparse_size.ok_or_else(|| bad("it is sparse and has no size"))?)
        } else if let Some(map) = &extension.sparse_map {
            let size = extension.sparse_size;
            (map.clone(), size.ok_or_else(|| bad("it is sparse and has no size"))?)
        } else {
            return Ok((stored, Data { length, map: None }));
        };
        if numbers.len() % 2 != 0 || numbers.len() / 2 > MAX_PIECES {
            return Err(bad("its map of holes is not whole"));
        }
        let piece = |pair: &[u64]| Piece { offset: pair[0], length: pair[1] };
        let mut map: Vec<Piece> = numbers.chunks_exact(2).map(piece).collect();
        map.retain(|piece| piece.length > 0);
        // The largest file that ext4 with 4 KiB blocks can hold. LIMIT
        if size > 1 << 44 || !map_is_sound(&map, size) {
            return Err(bad("its map of holes lies outside of it, or it is larger than 16 TiB"));
        }
        if map.iter().map(|piece| piece.length).sum::<u64>() != length {
            return Err(bad("its map of holes does not fit its data"));
        }
        Ok((size, Data { length, map: Some(map) }))
    }

    /// The map in the header of GNU's type `S` and the blocks after it; and the size of the file.
    fn old_map(&mut self, path: &[u8], block: &[u8; BLOCK]) -> Result<(Vec<u64>, u64)> {
        let bad = || fault(path, "its map of holes is not made of numbers");
        let mut map = Vec::new();
        let mut read = |bytes: &[u8]| -> Result<()> {
            for pair in bytes.chunks_exact(24).filter(|pair| pair[0] != 0) {
                map.push(number_field(&pair[..12]).ok_or_else(bad)?);
                map.push(number_field(&pair[12..]).ok_or_else(bad)?);
            }
            if map.len() > 2 * MAX_PIECES { Err(bad()) } else { Ok(()) }
        };
        read(&block[386..386 + 4 * 24])?;
        let size = number_field(&block[483..495]).ok_or_else(bad)?;
        let mut more = block[482] != 0;
        while more {
            let mut next = [0; BLOCK];
            if !self.source.raw(&mut next)? {
                return Err(broken("it ends inside a map of holes"));
            }
            read(&next[..21 * 24])?;
            more = next[504] != 0;
        }
        Ok((map, size))
    }

    /// The map at the beginning of the data of pax 1.0, decimal lines padded to blocks; and the
    /// bytes it takes.
    fn map_1_0(&mut self, path: &[u8], stored: u64) -> Result<(Vec<u64>, u64)> {
        let bad = || fault(path, "its map of holes is not made of numbers");
        let mut map = Vec::new();
        let mut used = 0;
        let mut expected: Option<u64> = None;
        let mut line = Vec::new();
        while expected != Some(map.len() as u64) {
            let mut block = [0; BLOCK];
            used += BLOCK as u64;
            if used > stored || !self.source.raw(&mut block)? {
                return Err(bad());
            }
            let mut push = |byte: u8| -> Result<ControlFlow<()>> {
                if byte != b'\n' {
                    line.push(byte);
                    return if line.len() > 20 {
                        Err(bad())
                    } else {
                        Ok(ControlFlow::Continue(()))
                    };
                }
                let n = decimal(&line).ok_or_else(bad)?;
                line.clear();
                match expected {
                    None if n > MAX_PIECES as u64 => return Err(bad()),
                    None => expected = Some(2 * n),
                    Some(_) => map.push(n),
                }
                let done = expected == Some(map.len() as u64);
                Ok(if done { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
            };
            for byte in block {
                if push(byte)?.is_break() {
                    break;
                }
            }
        }
        Ok((map, used))
    }

    /// Reads what comes after the first zero block.
    fn trailer(&mut self) -> Result<()> {
        let mut block = [0; BLOCK];
        let mut length = 0;
        let mut first = true;
        while self.source.raw(&mut block)? {
            if first && block.iter().any(|b| *b != 0) {
                return Err(broken("there is an empty block between its entries"));
            }
            first = false;
            length += BLOCK as u64;
            if length > MAX_TRAILER {
                let what = "what follows the end of the archive".to_owned();
                return Err(Fault::Limit { what, limit: MAX_TRAILER }.into());
            }
        }
        Ok(())
    }
}

impl Extension {
    /// Reads pax records: `LENGTH KEY=VALUE\n`, where the value may hold any byte.
    fn read(&mut self, mut text: &[u8]) -> Result<()> {
        let bad = || broken("a pax header is not made of records");
        let mut offsets = Vec::new();
        while !text.is_empty() && text[0] != 0 {
            let space = text.iter().position(|b| *b == b' ').ok_or_else(bad)?;
            let length = decimal(&text[..space]).ok_or_else(bad)?;
            let length = usize::try_from(length).map_err(|_| bad())?;
            let (record, rest) = text.split_at_checked(length).ok_or_else(bad)?;
            text = rest;
            let record = record.get(space + 1..).and_then(|r| r.strip_suffix(b"\n"));
            let record = record.ok_or_else(bad)?;
            let equals = record.iter().position(|b| *b == b'=').ok_or_else(bad)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            let n = || decimal(value).ok_or_else(bad);
            match key {
                b"path" => self.path = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"size" => self.size = Some(n()?),
                b"uid" => self.uid = Some(n()?),
                b"gid" => self.gid = Some(n()?),
                b"mtime" => self.mtime = Some(time(value).ok_or_else(bad)?),
                b"GNU.sparse.major" => self.sparse_major = Some(n()?),
                b"GNU.sparse.minor" => self.sparse_minor = Some(n()?),
                b"GNU.sparse.size" | b"GNU.sparse.realsize" => self.sparse_size = Some(n()?),
                b"GNU.sparse.name" => self.sparse_name = Some(value.to_vec()),
                b"GNU.sparse.offset" | b"GNU.sparse.numbytes" => offsets.push(n()?),
                b"GNU.sparse.map" => {
                    let numbers = value.split(|b| *b == b',').filter(|n| !n.is_empty());
                    let map: Option<Vec<u64>> = numbers.map(decimal).collect();
                    self.sparse_map = Some(map.ok_or_else(bad)?);
                }
                _ => {
                    if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                        self.xattrs.push((name.to_vec(), value.to_vec()));
                    }
                }
            }
        }
        if !offsets.is_empty() {
            self.sparse_map = Some(offsets);
        }
        Ok(())
    }
}

/// A path as components joined by `/`; refuses what leads out of the tree.
fn clean_path(path: &[u8]) -> Result<Vec<u8>> {
    let bad = |problem: &str| Err(fault(path, problem));
    if path.len() > MAX_PATH {
        return bad("its path is longer than 4095 bytes");
    }
    if path.contains(&0) {
        return bad("its path has a NUL");
    }
    let mut clean = Vec::with_capacity(path.len());
    for part in path.split(|b| *b == b'/') {
        match part {
            b"" | b"." => continue,
            b".." => return bad("its path leads out of the archive"),
            p if p.len() > MAX_NAME => return bad("a part of its path is longer than 255 bytes"),
            _ => {}
        }
        if !clean.is_empty() {
            clean.push(b'/');
        }
        clean.extend_from_slice(part);
    }
    Ok(clean)
}

/// Compares a header with its checksum; some old writers added signed bytes.
fn check_sum(block: &[u8; BLOCK], header: &tar::Header) -> Result<()> {
    let expected = header.cksum().map_err(|_| broken("it is not a tar, or a header is damaged"))?;
    let blanked = |i: usize, b: u8| if (148..156).contains(&i) { b' ' } else { b };
    let bytes = || block.iter().enumerate().map(|(i, b)| blanked(i, *b));
    let unsigned: u32 = bytes().map(u32::from).sum();
    let signed: i32 = bytes().map(|b| i32::from(b as i8)).sum();
    // A fuzzer would spend its time on sums.
    if cfg!(fuzzing) || unsigned == expected || u32::try_from(signed) == Ok(expected) {
        return Ok(());
    }
    Err(broken("it is not a tar, or a header is damaged (its checksum is wrong)"))
}

/// The modification time of a header; base-256 may be negative, and an empty field is 0.
fn mtime_field(header: &tar::Header) -> i64 {
    let field = &header.as_old().mtime;
    if field[0] == 0xff {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&field[4..12]);
        return i64::from_be_bytes(bytes);
    }
    header.mtime().map_or(0, |t| i64::try_from(t).unwrap_or(i64::MAX))
}

/// A numeric field: octal digits, or base-256 where the first bit is set.
fn number_field(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 != 0 {
        let (high, low) = field.split_at(field.len() - 8);
        if high[0] != 0x80 || high[1..].iter().any(|b| *b != 0) {
            return None;
        }
        return Some(u64::from_be_bytes(low.try_into().ok()?));
    }
    let text: Vec<u8> = field.iter().copied().filter(|b| *b != 0 && *b != b' ').collect();
    if text.is_empty() {
        return Some(0);
    }
    u64::from_str_radix(std::str::from_utf8(&text).ok()?, 8).ok()
}

fn decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// `[-]SECONDS[.FRACTION]`.
fn time(text: &[u8]) -> Option<(i64, u32)> {
    let text = std::str::from_utf8(text).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().ok()?;
    if !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let nanos: u32 = digits.parse().ok()?;
    // -1.25 is 750 million nanoseconds after -2.
    match whole.starts_with('-') && nanos > 0 {
        true => Some((seconds.checked_sub(1)?, 1_000_000_000 - nanos)),
        false => Some((seconds, nanos)),
    }
}

fn until_nul(text: &[u8]) -> Vec<u8> {
    text.split(|b| *b == 0).next().unwrap_or_default().to_vec()
}

fn fault(path: &[u8], problem: &str) -> ImageError {
    let entry = String::from_utf8_lossy(path);
    let entry = entry.chars().take(120).flat_map(char::escape_debug).collect();
    Fault::Entry { entry, problem: problem.to_owned() }.into()
}

fn broken(problem: &str) -> ImageError {
    Fault::Archive { what: "the archive".into(), problem: problem.to_owned() }.into()
}
