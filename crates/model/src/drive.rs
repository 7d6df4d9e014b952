//! The contract of a drive: how many bytes and files a container may store.

use std::fmt;

use crate::{Invalid, Limits, Size, parse_bytes};

/// The unit in which a drive is sized: a block of its file system.
const BLOCK_BYTES: u64 = 4096;
/// LIMIT: below this, journal and tables take most of the drive.
const LEAST_BYTES: u64 = 16 << 20;
/// LIMIT: the largest file of an ext4 with blocks of 4 kB, in which the drive may be.
const MOST_BYTES: u64 = (16 << 40) - (64 << 20);
/// LIMIT: fewer files than this hold no root file system of any use.
const LEAST_INODES: u32 = 64;
/// LIMIT: bytes per file. mke2fs makes at most one inode for each block.
const BYTES_PER_INODE: u64 = 2 * BLOCK_BYTES;

/// A file system of the container's own, for all that it writes outside of volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drive {
    /// Its size, with its own tables.
    pub bytes: u64,
    /// Files and directories; `None` is one for each 16 kB.
    pub inodes: Option<u32>,
    /// Whether its place below is taken at once. Otherwise it is taken as files are written.
    pub guaranteed: bool,
}

impl Drive {
    /// The drive of a container with these limits, if it has one.
    pub fn of(limits: &Limits) -> Option<Self> {
        let (inodes, guaranteed) = (limits.disk_inodes, limits.disk_guaranteed);
        limits.disk_bytes.map(|bytes| Self { bytes, inodes, guaranteed })
    }

    /// Parses the size of `--disk`, rounded down to whole blocks.
    pub fn parse_bytes(text: &str) -> Result<u64, Invalid> {
        let bytes = parse_bytes(text)? / BLOCK_BYTES * BLOCK_BYTES;
        match (LEAST_BYTES..=MOST_BYTES).contains(&bytes) {
            true => Ok(bytes),
            false => Err(Invalid::new("size of the disk", text, "at least 16m, and less than 16t")),
        }
    }

    /// Parses the number of `--inodes`.
    pub fn parse_inodes(text: &str) -> Result<u32, Invalid> {
        // parse() would take a sign.
        let digits = text.trim().bytes().all(|b| b.is_ascii_digit());
        let number = text.trim().parse().ok().filter(|n| digits && *n >= LEAST_INODES);
        number.ok_or_else(|| Invalid::new("number of inodes", text, "a number of at least 64"))
    }

    /// Refuses limits that no file system can have, also some that were not parsed here.
    pub fn check(limits: &Limits) -> Result<(), Invalid> {
        let Some(drive) = Self::of(limits) else {
            let of = match (limits.disk_inodes, limits.disk_guaranteed) {
                (Some(inodes), _) => ("number of inodes", inodes.to_string()),
                (None, true) => ("guarantee", "--disk-guaranteed".to_owned()),
                (None, false) => return Ok(()),
            };
            return Err(Invalid::new(
                of.0,
                of.1,
                "a disk of the container's own, too: add --disk SIZE",
            ));
        };
        let whole = drive.bytes.is_multiple_of(BLOCK_BYTES);
        if !whole || !(LEAST_BYTES..=MOST_BYTES).contains(&drive.bytes) {
            let expected = "whole blocks of 4k, at least 16m, and less than 16t";
            return Err(Invalid::new("size of the disk", drive.bytes.to_string(), expected));
        }
        let most = u32::try_from(drive.bytes / BYTES_PER_INODE).unwrap_or(u32::MAX);
        match drive.inodes.filter(|inodes| !(LEAST_INODES..=most).contains(inodes)) {
            None => Ok(()),
            Some(inodes) => {
                let expected = "64 to one for each 8k of --disk";
                Err(Invalid::new("number of inodes", inodes.to_string(), expected))
            }
        }
    }

    /// Refuses a change that no file system with files can follow.
    pub fn check_change(now: &Limits, change: &Limits) -> Result<(), Invalid> {
        if let Some(inodes) = change.disk_inodes.filter(|it| now.disk_inodes != Some(*it)) {
            let expected =
                "no change: it is chosen when the container is made, and grows with --disk";
            return Err(Invalid::new("number of inodes", inodes.to_string(), expected));
        }
        if change.disk_guaranteed && !now.disk_guaranteed {
            let expected = "no change: it is chosen when the container is made";
            return Err(Invalid::new("guarantee", "--disk-guaranteed", expected));
        }
        match (change.disk_bytes, now.disk_bytes) {
            (None, _) => Ok(()),
            (Some(new), Some(old)) if new >= old => Ok(()),
            (Some(new), Some(old)) => {
                let sizes = format!("{}, where it has {}", Size(new), Size(old));
                let expected = "no less than it has: a disk with files does not shrink";
                Err(Invalid::new("size of the disk", sizes, expected))
            }
            (Some(new), None) => {
                let expected =
                    "a container that was made with --disk: this one has no disk of its own";
                Err(Invalid::new("size of the disk", Size(new).to_string(), expected))
            }
        }
    }
}

impl fmt::Display for Drive {
    /// `10g, 100000 inodes, guaranteed`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Size(self.bytes))?;
        self.inodes.map_or(Ok(()), |inodes| write!(f, ", {inodes} inodes"))?;
        f.write_str(if self.guaranteed { ", guaranteed" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(bytes: u64, inodes: Option<u32>) -> Limits {
        Limits { disk_bytes: Some(bytes), disk_inodes: inodes, ..Limits::default() }
    }

    #[test]
    fn sizes_are_whole_blocks_within_bounds() {
        assert_eq!(Drive::parse_bytes("64m"), Ok(64 << 20));
        assert_eq!(Drive::parse_bytes("16777217"), Ok(16 << 20));
        for bad in ["", "0", "16383k", "16t", "-1", "x", "18446744073709551615"] {
            assert!(Drive::parse_bytes(bad).is_err(), "{bad}");
        }
        assert_eq!(Drive::parse_inodes("64"), Ok(64));
        for bad in ["", "0", "63", "+64", "-1", "1k", "4294967296"] {
            assert!(Drive::parse_inodes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn contradictory_limits_are_refused() {
        assert_eq!(Drive::check(&Limits::default()), Ok(()));
        assert_eq!(Drive::check(&limits(16 << 20, Some(2048))), Ok(()));
        assert!(Drive::check(&limits(16 << 20, Some(2049))).is_err(), "more than one for 8k");
        assert!(Drive::check(&limits((16 << 20) + 1, None)).is_err(), "part of a block");
        let alone = Limits { disk_inodes: Some(100), ..Limits::default() };
        assert!(Drive::check(&alone).unwrap_err().to_string().contains("--disk SIZE"));
        assert!(Drive::check(&Limits { disk_guaranteed: true, ..Limits::default() }).is_err());
    }

    #[test]
    fn drive_only_grows() {
        let now = limits(64 << 20, Some(1000));
        let to = |bytes| limits(bytes, None);
        assert_eq!(Drive::check_change(&now, &to(64 << 20)), Ok(()));
        assert_eq!(Drive::check_change(&now, &to(65 << 20)), Ok(()));
        let e = Drive::check_change(&now, &to(63 << 20)).unwrap_err().to_string();
        assert!(e.contains("63m, where it has 64m") && e.contains("shrink"), "{e}");
        assert!(Drive::check_change(&Limits::default(), &to(64 << 20)).is_err());
        assert!(Drive::check_change(&now, &limits(64 << 20, Some(2000))).is_err());
        let guaranteed = Limits { disk_guaranteed: true, ..Limits::default() };
        assert!(Drive::check_change(&now, &guaranteed).is_err());
    }

    #[test]
    fn drive_is_shown_with_its_limits() {
        let drive = Drive { bytes: 1 << 30, inodes: Some(500), guaranteed: true };
        assert_eq!(drive.to_string(), "1g, 500 inodes, guaranteed");
        assert_eq!(Drive { inodes: None, guaranteed: false, ..drive }.to_string(), "1g");
    }
}
