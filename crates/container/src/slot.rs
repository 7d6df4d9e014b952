//! Allocation of the host's id space to containers.
//!
//! 32 bits of ids are 131,072 slots of 32,768. `LIB/ids/slots` has one bit per slot, under a lock
//! held for microseconds, or for a few syncs where a block is claimed. A bit is set as long as a container has
//! files of its own. A slot is taken in a block of this instance only ([`crate::host_ids`]).
//!
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
use crate::host_ids::{BLOCK_SLOTS, BLOCKS, Blocks, Claim, HostIds, Need, REGISTRY};

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
    /// The first slot that is tried, at the start of a block.
    first: u32,
    path: PathBuf,
    owners: PathBuf,
    lock: PathBuf,
    host_ids: HostIds,
}

impl Slots {
    pub(crate) fn new(dir: &Path) -> Self {
        Self::with(dir, Path::new(REGISTRY), first_of(dir))
    }

    fn with(dir: &Path, registry: &Path, first: u32) -> Self {
        Self {
            first,
            host_ids: HostIds::new(dir, registry),
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
        let need = if wide { 2 } else { 1 };
        let mut swept = false;
        loop {
            let (lock, file, mut bits) = self.open()?;
            let search = Search { first: self.first, bits: &bits, avoid: &avoid, need };
            let has =
                |first: &u32| (*first..*first + need).all(|s| self.host_ids.has(s / BLOCK_SLOTS));
            let mut found = self.host_ids.own().and_then(|own| search.slot(&own)).filter(has);
            if found.is_none() {
                let need = |own: &Blocks, free: &Blocks| search.need(own, free);
                match self.host_ids.claim(&blocks_of(&bits), swept, need)? {
                    Claim::Has(own) => found = search.slot(&own),
                    Claim::Scarce => {
                        drop(lock);
                        // The claim after it returns the errors that matter.
                        let _ = self.host_ids.sweep();
                        swept = true;
                        continue;
                    }
                }
            }
            let first = found.ok_or_else(|| Error::NoIds("remove some".into()))?;
            self.set_owner(&self.owners()?, first..first + need, id)?;
            for s in first..first + need {
                bits[(s / 8) as usize] |= 1 << (s % 8);
            }
            self.write(&file, &bits, first)?;
            let slot = IdSlot(first);
            return Ok(if wide { IdMap::wide(slot) } else { IdMap::narrow(slot) });
        }
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
        self.write(&file, &bits, map.base / IdSlot::IDS)?;
        self.give_back(&bits, slots_of(map));
        Ok(())
    }

    /// Releases all slots of a container: a search through 2 MiB.
    pub(crate) fn release_all(&self, id: &ContainerId) -> Result<()> {
        let (_lock, file, mut bits) = self.open()?;
        let owners = fs::read(&self.owners).unwrap_or_default();
        let mut released = Vec::new();
        for (s, owner) in (0..).zip(owners.chunks_exact(OWNER_BYTES)) {
            if owner == id.to_bytes() {
                bits[(s / 8) as usize] &= !(1 << (s % 8));
                released.push(s);
            }
        }
        file.write_all_at(&bits, 0).map_err(Error::file("cannot write", &self.path))?;
        self.give_back(&bits, released);
        Ok(())
    }

    /// Gives back blocks that have no taken slot any more.
    fn give_back(&self, bits: &[u8], released: impl IntoIterator<Item = u32>) {
        let taken = blocks_of(bits);
        if released.into_iter().all(|s| taken.contains(s / BLOCK_SLOTS)) {
            return; // nearly always
        }
        if let Some(own) = self.host_ids.own() {
            self.host_ids.give_back(&own, &taken);
        }
    }

    /// Gives back all blocks of an instance without containers.
    pub(crate) fn leave(&self) -> Result<()> {
        let (_lock, _, bits) = self.open()?;
        self.host_ids.leave(&blocks_of(&bits));
        Ok(())
    }

    /// Returns how many slots are taken.
    pub(crate) fn count(&self) -> Result<u32> {
        let (_lock, _, bits) = self.open()?;
        Ok(bits.iter().map(|b| b.count_ones()).sum())
    }

    /// Sets exactly these slots, after a boot: clears bits whose containers were never published.
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
        file.write_all_at(&bits, 0).map_err(Error::file("cannot write", &self.path))?;
        self.host_ids.recover(&blocks_of(&bits));
        Ok(())
    }

    /// Writes the bytes around one slot.
    fn write(&self, file: &File, bits: &[u8], first: u32) -> Result<()> {
        let byte = (first / 8) as usize;
        let end = (byte + 2).min(bits.len());
        file.write_all_at(&bits[byte..end], byte as u64)
            .map_err(Error::file("cannot write", &self.path))
    }
}

/// The first slot of an instance, by its path: instances begin in different blocks where these are free.
fn first_of(dir: &Path) -> u32 {
    if dir == Path::new("/var/lib/dormouse/ids") {
        return FIRST;
    }
    let hash = dir.as_os_str().as_encoded_bytes().iter().fold(
        0xcbf2_9ce4_8422_2325_u64, // FNV-1a, 64 bit
        |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3),
    );
    FIRST + (hash % u64::from((PINGS - FIRST) / BLOCK_SLOTS)) as u32 * BLOCK_SLOTS
}

/// A search for one free slot, or two neighbours.
struct Search<'a> {
    /// The first slot that is tried.
    first: u32,
    bits: &'a [u8],
    /// Ranges of other programs.
    avoid: &'a [IdRange],
    need: u32,
}

impl Search<'_> {
    /// Ranges of slots in their order. Blocks of the first two are preferred.
    fn ranges(&self) -> [std::ops::Range<u32>; 4] {
        // The last slot holds (uid_t)-1, which is no id (credentials(7)).
        [self.first..PINGS, FIRST..self.first, PINGS..IdSlot::COUNT - 1, LOWEST..FIRST]
    }

    /// The first usable slot in these blocks.
    fn slot(&self, blocks: &Blocks) -> Option<u32> {
        self.ranges().into_iter().find_map(|range| self.slot_in(range, blocks))
    }

    fn slot_in(&self, range: std::ops::Range<u32>, blocks: &Blocks) -> Option<u32> {
        let is_free = |s: u32| self.bits[(s / 8) as usize] & (1 << (s % 8)) == 0;
        let is_usable =
            |s: u32| blocks.contains(s / BLOCK_SLOTS) && is_free(s) && !overlaps(self.avoid, s);
        let mut s = range.start;
        while s + self.need <= range.end {
            if s.is_multiple_of(BLOCK_SLOTS) && !blocks.contains(s / BLOCK_SLOTS) {
                s += BLOCK_SLOTS;
            } else if s.is_multiple_of(8) && self.bits[(s / 8) as usize] == 0xff {
                s += 8;
            } else if (s..s + self.need).all(is_usable) {
                return Some(s);
            } else {
                s += 1;
            }
        }
        None
    }

    /// Returns what is needed beside the own blocks. Both slots of a wide map are in the same new block.
    fn need(&self, own: &Blocks, free: &Blocks) -> Need {
        if self.slot(own).is_some() {
            return Need::Nothing;
        }
        let is_preferred = |block| (FIRST..PINGS).contains(&(block * BLOCK_SLOTS));
        let blocks = |range: std::ops::Range<u32>| {
            range.start / BLOCK_SLOTS..range.end.div_ceil(BLOCK_SLOTS)
        };
        let mut all = self.ranges().into_iter().flat_map(blocks);
        let suits = |block: &u32| {
            let first = block * BLOCK_SLOTS;
            let end = (first + BLOCK_SLOTS).min(IdSlot::COUNT - 1);
            let only = Blocks::from_iter([*block]);
            free.contains(*block) && self.slot_in(first.max(LOWEST)..end, &only).is_some()
        };
        match all.find(suits) {
            Some(block) => Need::Block { block, is_preferred: is_preferred(block) },
            None => Need::NoneSuits,
        }
    }
}

/// The blocks with taken slots.
fn blocks_of(bits: &[u8]) -> Blocks {
    let words = bits.chunks_exact((BLOCK_SLOTS / 8) as usize);
    (0..BLOCKS).zip(words).filter(|(_, w)| w.iter().any(|b| *b != 0)).map(|(b, _)| b).collect()
}

/// The slots of a map.
fn slots_of(map: IdMap) -> std::ops::Range<u32> {
    let first = map.base / IdSlot::IDS;
    first..first + if map.wide { 2 } else { 1 }
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
    use std::collections::{HashMap, HashSet};

    use proptest::prelude::*;
    use tempfile::TempDir;

    use super::*;
    use crate::host_ids::tests::killed_at;

    /// A host with instances that all begin at the same slot.
    struct Scratch(TempDir);

    impl Scratch {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn slots(&self, name: &str) -> Slots {
            let dir = self.0.path().join(name);
            fs::create_dir_all(&dir).unwrap();
            Slots::with(&dir, &self.0.path().join("registry"), FIRST)
        }
    }

    fn id(n: u8) -> ContainerId {
        ContainerId::from_bytes([n; 16])
    }

    #[test]
    fn slot_has_one_owner_and_is_reused_after_release() {
        let scratch = Scratch::new();
        let slots = scratch.slots("a");
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
        let all: Blocks = (0..BLOCKS).collect();
        let full = vec![0xff; BITMAP_BYTES];
        let search = |bits: &[u8]| Search { first: FIRST, bits, avoid: &avoid, need: 1 }.slot(&all);
        assert_eq!(search(&full), None);
        assert_eq!(search(&[0; BITMAP_BYTES]), Some(FIRST + 2));
    }

    #[test]
    fn search_of_a_block_prefers_the_own_start_and_skips_foreign_ranges() {
        let own = Blocks::default();
        let all: Blocks = (0..BLOCKS).collect();
        let block = |first: u32, avoid: &[IdRange], free: &Blocks, need| {
            let bits = [0; BITMAP_BYTES];
            Search { first, bits: &bits, avoid, need }.need(&own, free)
        };
        let found = |block, is_preferred| Need::Block { block, is_preferred };
        let (first, pings, last) = (FIRST / 64, PINGS / 64, BLOCKS - 1);
        assert_eq!(block(FIRST, &[], &all, 1), found(first, true));
        assert_eq!(block(PINGS - 64, &[], &all, 2), found(pings - 1, true));
        let subids = [IdRange { first: 1_879_048_192, count: 63 * 32_768 }];
        assert_eq!(block(FIRST, &subids, &all, 1), found(first, true));
        assert_eq!(block(FIRST, &subids, &all, 2), found(first + 1, true));
        let few: Blocks = [0, 5, last].into_iter().collect();
        assert_eq!(block(FIRST, &[], &few, 2), found(last, false));
        let few: Blocks = [0, 5].into_iter().collect();
        assert_eq!(block(FIRST, &[], &few, 2), found(0, false));
        assert_eq!(block(FIRST, &[], &own, 1), Need::NoneSuits);
    }

    #[test]
    fn slots_suffice_for_hundred_thousand_containers() {
        let scratch = Scratch::new();
        let slots = scratch.slots("a");
        let taken = 100_000;
        let all = (FIRST..IdSlot::COUNT - 1).chain(LOWEST..FIRST);
        let owners: Vec<IdMap> = all.take(taken - 1).map(|s| IdMap::narrow(IdSlot(s))).collect();
        slots.reset(|| Ok(owners.iter().map(|map| (*map, id(1))).collect())).unwrap();
        let map = slots.take(false, &id(1)).unwrap();
        assert!(!owners.contains(&map));
    }

    #[test]
    fn slots_of_instances_are_disjoint_under_threads() {
        let scratch = Scratch::new();
        let names = ["a", "b", "c"];
        let all: Vec<Vec<(u32, &str)>> = std::thread::scope(|scope| {
            let take = |name: &'static str, thread: u8| {
                let slots = scratch.slots(name);
                let mut taken = Vec::new();
                for n in 0..120_u8 {
                    let map = slots.take(n.is_multiple_of(9), &id(thread)).unwrap();
                    if n.is_multiple_of(4) {
                        slots.release(map, &id(thread)).unwrap();
                    } else {
                        taken.extend(slots_of(map).map(|s| (s, name)));
                    }
                }
                taken
            };
            let threads: Vec<_> = names
                .iter()
                .flat_map(|name| [1, 2].map(|thread| scope.spawn(move || take(name, thread))))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let mut owners = HashMap::new();
        for (slot, name) in all.iter().flatten() {
            assert_eq!(owners.insert(slot, name), None, "slot {slot} was taken twice");
        }
        // Each block has one instance.
        let mut of_block = HashMap::new();
        for (slot, name) in all.iter().flatten() {
            assert_eq!(of_block.entry(slot / BLOCK_SLOTS).or_insert(name), &name);
        }
    }

    #[test]
    fn containers_of_earlier_programs_keep_their_slots() {
        let scratch = Scratch::new();
        let (a, b) = (scratch.slots("a"), scratch.slots("b"));
        // Both have used the first block, and b one of its own.
        let shared = IdMap::narrow(IdSlot(FIRST));
        let own = IdMap::narrow(IdSlot(FIRST + 10 * BLOCK_SLOTS));
        for (slots, maps) in [(&a, vec![shared]), (&b, vec![shared, own])] {
            let mut bits = vec![0; BITMAP_BYTES];
            maps.iter()
                .flat_map(|map| slots_of(*map))
                .for_each(|s| bits[(s / 8) as usize] |= 1 << (s % 8));
            fs::write(&slots.path, bits).unwrap();
        }
        let block =
            |slots: &Slots| slots.take(false, &id(9)).unwrap().base / IdSlot::IDS / BLOCK_SLOTS;
        assert_eq!(block(&a), FIRST / BLOCK_SLOTS);
        assert_eq!(block(&b), FIRST / BLOCK_SLOTS + 10);
        assert_eq!((a.count().unwrap(), b.count().unwrap()), (2, 3));
    }

    /// A change of one of three instances.
    #[derive(Debug, Clone)]
    enum Op {
        /// Several slots at once, narrow or wide.
        Take(usize, bool, u8),
        Release(usize, usize),
        /// All slots that a share of the containers has.
        ReleaseMany(usize, usize),
        /// A take, killed before a change of the registry.
        KilledTake(usize, usize),
        /// A release of everything, killed likewise.
        KilledRelease(usize, usize),
        Boot(usize),
        Sweep(usize),
        /// rm -rf, and a new instance at the same path.
        Remove(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        let one = 0..3_usize;
        prop_oneof![
            6 => (one.clone(), any::<bool>(), 1..70_u8).prop_map(|(i, wide, n)| Op::Take(i, wide, n)),
            2 => (one.clone(), any::<usize>()).prop_map(|(i, n)| Op::Release(i, n)),
            3 => (one.clone(), 1..4_usize).prop_map(|(i, n)| Op::ReleaseMany(i, n)),
            3 => (one.clone(), 0..6_usize).prop_map(|(i, n)| Op::KilledTake(i, n)),
            2 => (one.clone(), 0..6_usize).prop_map(|(i, n)| Op::KilledRelease(i, n)),
            1 => one.clone().prop_map(Op::Boot),
            1 => one.clone().prop_map(Op::Sweep),
            1 => one.prop_map(Op::Remove),
        ]
    }

    fn apply(scratch: &Scratch, maps: &mut [Vec<(IdMap, ContainerId)>; 3], op: &Op, number: usize) {
        const NAMES: [&str; 3] = ["a", "b", "c"];
        let owner = |k: usize| {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&(number as u64 + 1).to_le_bytes());
            bytes[8..].copy_from_slice(&(k as u64).to_le_bytes());
            ContainerId::from_bytes(bytes)
        };
        match *op {
            Op::Take(i, wide, count) => {
                for k in 0..usize::from(count) {
                    let map = scratch.slots(NAMES[i]).take(wide, &owner(k)).unwrap();
                    maps[i].push((map, owner(k)));
                }
            }
            Op::Release(i, n) if !maps[i].is_empty() => {
                let n = n % maps[i].len();
                let (map, id) = maps[i].remove(n);
                scratch.slots(NAMES[i]).release(map, &id).unwrap();
            }
            Op::Release(..) => {}
            Op::ReleaseMany(i, part) => {
                let keep = maps[i].len() - maps[i].len() / part;
                for (map, id) in maps[i].split_off(keep) {
                    scratch.slots(NAMES[i]).release(map, &id).unwrap();
                }
            }
            Op::KilledTake(i, steps) => {
                let slots = scratch.slots(NAMES[i]);
                // As many as a block has: at least one claim.
                for k in 0..65 {
                    let mut taken = None;
                    let is_killed = killed_at(steps, || taken = slots.take(false, &owner(k)).ok());
                    maps[i].extend(taken.map(|map| (map, owner(k))));
                    if is_killed {
                        break;
                    }
                }
            }
            Op::KilledRelease(i, steps) => {
                for (map, id) in std::mem::take(&mut maps[i]) {
                    killed_at(steps, || scratch.slots(NAMES[i]).release(map, &id));
                }
            }
            Op::Boot(i) => scratch.slots(NAMES[i]).reset(|| Ok(maps[i].clone())).unwrap(),
            Op::Sweep(i) => {
                if let Err(Error::File { .. }) = scratch.slots(NAMES[i]).host_ids.sweep() {
                    assert!(!scratch.0.path().join("registry").exists());
                }
            }
            Op::Remove(i) => {
                let _ = fs::remove_dir_all(scratch.0.path().join(NAMES[i]));
                maps[i].clear();
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

        #[test]
        fn no_slot_is_ever_in_two_instances(ops in proptest::collection::vec(op(), 1..40)) {
            let scratch = Scratch::new();
            let mut maps: [Vec<(IdMap, ContainerId)>; 3] = Default::default();
            for (number, op) in ops.iter().enumerate() {
                apply(&scratch, &mut maps, op, number);
                let mut seen = HashSet::new();
                for name in ["a", "b", "c"] {
                    let bits = fs::read(scratch.slots(name).path).unwrap_or_default();
                    let is_set = bits.iter().flat_map(|byte| (0..8).map(move |i| byte & (1 << i) != 0));
                    let taken = (0..IdSlot::COUNT).zip(is_set);
                    for (slot, _) in taken.filter(|(_, is_taken)| *is_taken) {
                        prop_assert!(seen.insert(slot), "slot {} after {:?}", slot, op);
                    }
                }
                let expected: usize = maps.iter().flatten().map(|(map, _)| slots_of(*map).len()).sum();
                prop_assert_eq!(seen.len(), expected);
            }
        }
    }
}
