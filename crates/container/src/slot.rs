//! Allocation of the host's id space to containers.
//!
//! 32 bits of ids are 131,072 slots of 32,768. `LIB/ids/slots` has one bit per slot, under a lock
//! held for microseconds; a bit is set as long as a container has files of its own.
//! `LIB/ids/owners` has 16 bytes per slot, the id of the last container that took it. The owner is
//! written before the bit, so that each taken slot can be released by its owner, and by no other
//! container. The first slots given out are above 1,879,048,191, a range that nothing on a Debian
//! host uses. When those 73,728 are exhausted, lower ones follow. systemd-nspawn may also use that
//! range (524,288 to 1,879,048,191), so ranges of its own and of `/etc/subuid` and `/etc/subgid`
//! are skipped.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use dormouse_model::{ContainerId, IdMap, IdRange, IdSlot};

use crate::disk::{FILE_MODE, Lock};
use crate::error::{Error, Result};

const BITMAP_BYTES: usize = (IdSlot::COUNT / 8) as usize;
/// The first slot above systemd-nspawn's range.
const FIRST: u32 = 1_879_048_192 / IdSlot::IDS;
/// The first slot whose groups may not ping: net.ipv4.ping_group_range ends at 2,147,483,647.
const PINGS: u32 = (1 << 31) / IdSlot::IDS;
/// The first slot above the host's own users (0 to 65,535) and their subordinate ids (100,000 to
/// 524,287 on Debian).
const LOWEST: u32 = 524_288 / IdSlot::IDS;

/// LIMIT: how many slots there are.
pub(crate) const ROOM: u32 = IdSlot::COUNT - LOWEST;
const OWNER_BYTES: usize = 16;

/// The bitmap of slots, and their owners.
#[derive(Debug)]
pub(crate) struct Slots {
    /// The first slot that is tried.
    first: u32,
    path: PathBuf,
    owners: PathBuf,
    lock: PathBuf,
}

impl Slots {
    pub(crate) fn new(dir: &Path) -> Self {
        Self {
            first: first_of(dir),
            path: dir.join("slots"),
            owners: dir.join("owners"),
            lock: dir.join("lock"),
        }
    }

    /// Opens the table of owners; unwritten entries read as zeros, which is no container's id.
    fn owners(&self) -> Result<File> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(FILE_MODE);
        options.open(&self.owners).map_err(Error::file("cannot open", &self.owners))
    }

    fn set_owner(
        &self,
        owners: &File,
        slots: std::ops::Range<u32>,
        id: &ContainerId,
    ) -> Result<()> {
        let entries = id.to_bytes().repeat(slots.len());
        owners
            .write_all_at(&entries, u64::from(slots.start) * OWNER_BYTES as u64)
            .map_err(Error::file("cannot write", &self.owners))
    }

    fn open(&self) -> Result<(Lock, File, Vec<u8>)> {
        let lock = Lock::take_new(&self.lock)?;
        let open = || -> std::io::Result<_> {
            let file = File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(FILE_MODE)
                .open(&self.path)?;
            let mut bits = vec![0; BITMAP_BYTES];
            let len = file.metadata()?.len();
            if len == BITMAP_BYTES as u64 {
                file.read_exact_at(&mut bits, 0)?;
            } else if len == 0 {
                file.write_all_at(&bits, 0)?;
            } else {
                return Err(std::io::Error::other("it has the wrong size"));
            }
            Ok((file, bits))
        };
        let (file, bits) = open().map_err(Error::file("cannot read", &self.path))?;
        Ok((lock, file, bits))
    }

    /// Takes a free slot, or two neighbours for a wide map.
    pub(crate) fn take(&self, wide: bool, id: &ContainerId) -> Result<IdMap> {
        let avoid = ranges_in_use();
        let (_lock, file, mut bits) = self.open()?;
        let need = if wide { 2 } else { 1 };
        // The last slot holds (uid_t)-1, which is no id (credentials(7)).
        let ranges =
            [self.first..PINGS, FIRST..self.first, PINGS..IdSlot::COUNT - 1, LOWEST..FIRST];
        let free = |bits: &[u8], s: u32| bits[(s / 8) as usize] & (1 << (s % 8)) == 0;
        let usable = |s: u32| (s..s + need).all(|s| free(&bits, s) && !overlaps(&avoid, s));
        let found = ranges.into_iter().find_map(|range| find(&bits, range, need, usable));
        let first = found.ok_or(Error::NoIds)?;
        self.set_owner(&self.owners()?, first..first + need, id)?;
        for s in first..first + need {
            bits[(s / 8) as usize] |= 1 << (s % 8);
        }
        self.write(&file, &bits, first)?;
        let slot = IdSlot(first);
        Ok(if wide { IdMap::wide(slot) } else { IdMap::narrow(slot) })
    }

    /// Releases slots, if this container owns them.
    pub(crate) fn release(&self, map: IdMap, id: &ContainerId) -> Result<()> {
        let (_lock, file, mut bits) = self.open()?;
        let owners = self.owners()?;
        for s in slots_of(map) {
            let mut owner = [0; OWNER_BYTES];
            let at = u64::from(s) * OWNER_BYTES as u64;
            owners
                .read_exact_at(&mut owner, at)
                .map_err(Error::file("cannot read", &self.owners))?;
            if owner == id.to_bytes() {
                bits[(s / 8) as usize] &= !(1 << (s % 8));
            }
        }
        self.write(&file, &bits, map.base / IdSlot::IDS)
    }

    /// Releases all slots of a container: a search through 2 MiB.
    pub(crate) fn release_all(&self, id: &ContainerId) -> Result<()> {
        let (_lock, file, mut bits) = self.open()?;
        let owners = fs::read(&self.owners).unwrap_or_default();
        for (s, owner) in owners.chunks_exact(OWNER_BYTES).enumerate() {
            if owner == id.to_bytes() {
                bits[s / 8] &= !(1 << (s % 8));
            }
        }
        file.write_all_at(&bits, 0).map_err(Error::file("cannot write", &self.path))
    }

    /// Returns how many slots are taken.
    pub(crate) fn count(&self) -> Result<u32> {
        let (_lock, _, bits) = self.open()?;
        Ok(bits.iter().map(|b| b.count_ones()).sum())
    }

    /// Sets exactly these slots: clears bits whose containers were never published.
    pub(crate) fn reset(
        &self,
        taken: impl Fn() -> Result<Vec<(IdMap, ContainerId)>>,
    ) -> Result<()> {
        let (_lock, file, _) = self.open()?;
        let owners = self.owners()?;
        let mut bits = vec![0; BITMAP_BYTES];
        for (map, id) in taken()? {
            self.set_owner(&owners, slots_of(map), &id)?;
            slots_of(map).for_each(|s| bits[(s / 8) as usize] |= 1 << (s % 8));
        }
        file.write_all_at(&bits, 0).map_err(Error::file("cannot write", &self.path))
    }

    /// Writes the bytes around one slot.
    fn write(&self, file: &File, bits: &[u8], first: u32) -> Result<()> {
        let byte = (first / 8) as usize;
        let end = (byte + 2).min(bits.len());
        file.write_all_at(&bits[byte..end], byte as u64)
            .map_err(Error::file("cannot write", &self.path))
    }
}

/// The first slot of an instance, by its path. Instances with different roots do not know each other's
/// slots, so each begins at a different one.
///
/// LIMIT: two instances share slots if one has more containers than their first slots are apart.
fn first_of(dir: &Path) -> u32 {
    if dir == Path::new("/var/lib/dormouse/ids") {
        return FIRST;
    }
    let hash = dir.as_os_str().as_encoded_bytes().iter().fold(
        0xcbf2_9ce4_8422_2325_u64, // FNV-1a, 64 bit
        |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3),
    );
    FIRST + (hash % u64::from(PINGS - FIRST)) as u32
}

/// The slots of a map.
fn slots_of(map: IdMap) -> std::ops::Range<u32> {
    let first = map.base / IdSlot::IDS;
    first..first + if map.wide { 2 } else { 1 }
}

/// The first usable slot of a range, full bytes skipped eight at a time.
fn find(
    bits: &[u8],
    range: std::ops::Range<u32>,
    need: u32,
    usable: impl Fn(u32) -> bool,
) -> Option<u32> {
    let mut s = range.start;
    while s + need <= range.end {
        if s.is_multiple_of(8) && bits[(s / 8) as usize] == 0xff {
            s += 8;
        } else if usable(s) {
            return Some(s);
        } else {
            s += 1;
        }
    }
    None
}

fn overlaps(avoid: &[IdRange], slot: u32) -> bool {
    let first = u64::from(slot) * u64::from(IdSlot::IDS);
    let end = first + u64::from(IdSlot::IDS);
    avoid.iter().any(|r| {
        let r_first = u64::from(r.first);
        r_first < end && first < r_first + u64::from(r.count)
    })
}

/// Ranges used by others: subordinate ids (subuid(5)), and the whole range of systemd-nspawn if
/// that has ever run with private users.
fn ranges_in_use() -> Vec<IdRange> {
    let mut ranges = Vec::new();
    for path in ["/etc/subuid", "/etc/subgid"] {
        ranges.extend(parse_subids(&fs::read_to_string(path).unwrap_or_default()));
    }
    let machines = fs::read_dir("/var/lib/machines").is_ok_and(|mut d| d.next().is_some());
    if machines || Path::new("/run/systemd/nspawn").exists() {
        ranges.push(IdRange { first: 524_288, count: 1_879_048_192 - 524_288 });
    }
    ranges
}

fn parse_subids(text: &str) -> impl Iterator<Item = IdRange> {
    text.lines().filter_map(|line| {
        let mut parts = line.split(':').skip(1);
        let first = parts.next()?.trim().parse().ok()?;
        let count = parts.next()?.trim().parse().ok()?;
        Some(IdRange { first, count })
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn slot_has_one_owner_and_is_reused_after_release() {
        let dir = tempfile::tempdir().unwrap();
        let slots = Slots::new(dir.path());
        let id = |n: u8| ContainerId::from_bytes([n; 16]);
        let maps: Vec<IdMap> = (0..200).map(|i| slots.take(i % 10 == 0, &id(i)).unwrap()).collect();
        let mut seen = HashSet::new();
        for map in &maps {
            slots_of(*map).for_each(|s| assert!(seen.insert(s), "{map:?}"));
        }
        slots.release(maps[7], &id(8)).unwrap(); // not its own
        assert_eq!(slots.count().unwrap(), 220);
        slots.release(maps[7], &id(7)).unwrap();
        assert_eq!(slots.take(false, &id(201)).unwrap(), maps[7]);
        slots.release_all(&id(7)).unwrap(); // its old slot has another owner now
        slots.release_all(&id(10)).unwrap();
        assert_eq!(slots.count().unwrap(), 218);
        assert_eq!(slots.take(true, &id(202)).unwrap(), maps[10]);
    }

    #[test]
    fn slot_search_skips_foreign_ranges_and_last_slot() {
        let text = "root:1879048192:65536\nx:bad\ny:4294934528:32768\n";
        let avoid: Vec<IdRange> = parse_subids(text).collect();
        assert_eq!(avoid.len(), 2);
        assert!(overlaps(&avoid, FIRST) && overlaps(&avoid, FIRST + 1));
        assert!(!overlaps(&avoid, FIRST + 2));
        let bits = vec![0xff; BITMAP_BYTES];
        assert_eq!(find(&bits, LOWEST..IdSlot::COUNT - 1, 1, |_| true), None);
    }

    #[test]
    fn slots_suffice_for_hundred_thousand_containers() {
        let dir = tempfile::tempdir().unwrap();
        let slots = Slots::new(dir.path());
        let taken = 100_000;
        let all = (FIRST..IdSlot::COUNT - 1).chain(LOWEST..FIRST);
        let id = ContainerId::from_bytes([1; 16]);
        let owners: Vec<IdMap> = all.take(taken - 1).map(|s| IdMap::narrow(IdSlot(s))).collect();
        slots.reset(|| Ok(owners.iter().map(|map| (*map, id.clone())).collect())).unwrap();
        let map = slots.take(false, &id).unwrap();
        assert!(!owners.contains(&map));
    }
}
