//! Disks without a guarantee: files that take place on the file system below as they are written.
//!
//! Together they may be larger than what is free below. If that is used up, data that a disk has accepted is lost. So
//! each disk is given a *credit*, and accepts no more than that: a write beyond it fails like one to a full disk. The
//! credits are decided anew each second, and a disk uses up its own as it writes.
//!
//! ```text
//! need   = what the disk has accepted and not stored below      of each disk: it is taken in any case
//! room   = free below - the host's part - all needs
//! credit = room / disks
//! ```
//!
//! All credits together are no more than the room, whatever is done with them at once. A disk that writes gets the
//! next part of the room at the next decision. LIMIT: what the host writes until then comes out of its own part.

/// A disk in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// The size of its file system.
    pub bytes: u64,
    /// What is free inside, reserved or not.
    pub free_bytes: u64,
    /// What its file has on the file system below.
    pub stored_bytes: u64,
    /// Data in memory that has no blocks yet.
    pub delayed_bytes: u64,
    /// Inodes of no file: their part of the tables may never be written.
    pub free_inode_bytes: u64,
}

impl Reading {
    /// What it has accepted and not stored below: data in memory, the journal, and space that was allocated ahead. The
    /// data in memory needs its place even where as much was removed: that is given back later.
    fn need(&self) -> u64 {
        let taken = self.bytes.saturating_sub(self.free_bytes);
        let stored = self.stored_bytes.saturating_add(self.free_inode_bytes);
        taken.saturating_sub(stored).max(self.delayed_bytes)
    }
}

/// What each of these disks may accept, with what is free below and the part of it that the host keeps.
pub fn credit(free_below_bytes: u64, host_bytes: u64, disks: &[Reading]) -> u64 {
    let needs: u64 = disks.iter().map(Reading::need).fold(0, u64::saturating_add);
    let room = free_below_bytes.saturating_sub(host_bytes).saturating_sub(needs);
    room / (disks.len() as u64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1 << 20;
    const GB: u64 = 1 << 30;

    fn empty(bytes: u64) -> Reading {
        Reading { bytes, free_bytes: bytes, stored_bytes: 0, delayed_bytes: 0, free_inode_bytes: 0 }
    }

    #[test]
    fn one_disk_may_take_all_that_the_host_does_not_keep() {
        assert_eq!(credit(10 * GB, GB, &[empty(100 * GB)]), 9 * GB);
        assert_eq!(credit(GB / 2, GB, &[empty(100 * GB)]), 0);
        assert_eq!(credit(10 * GB, GB, &[]), 9 * GB);
    }

    #[test]
    fn accepted_data_has_its_place() {
        let used = Reading { free_bytes: 6 * GB, stored_bytes: 3 * GB, ..empty(10 * GB) };
        assert_eq!(credit(10 * GB, GB, &[used]), 8 * GB);
        // Removed files that are not given back yet.
        let removed = Reading { stored_bytes: 9 * GB, ..used };
        assert_eq!(credit(10 * GB, GB, &[removed]), 9 * GB);
        let again = Reading { delayed_bytes: 2 * GB, ..removed };
        assert_eq!(credit(10 * GB, GB, &[again]), 7 * GB, "data in memory comes before they are");
        let tables = Reading { free_inode_bytes: GB, ..used };
        assert_eq!(credit(10 * GB, GB, &[tables]), 9 * GB, "unused tables need no place");
    }

    #[test]
    fn disks_divide_the_room() {
        let two = [empty(100 * GB); 2];
        assert_eq!(credit(GB + 400 * MB, GB, &two), 200 * MB);
        assert_eq!(credit(11 * GB, GB, &two), 5 * GB);
        let thousand = [empty(100 * GB); 1000];
        assert_eq!(credit(11 * GB, GB, &thousand), 10 * GB / 1000);
    }

    /// Disks that write as fast as they may, by whatever they are given first, never take the host's part.
    #[test]
    fn host_keeps_its_part_while_disks_grow() {
        let mut random = 12_345_u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % below
        };
        for count in 1..8_usize {
            let mut disks = vec![empty(20 * GB); count];
            let (mut free, host) = (30 * GB, GB);
            for _ in 0..200 {
                let credit = credit(free, host, &disks);
                for disk in &mut disks {
                    let wanted = next(12 * GB);
                    let taken = wanted.min(credit).min(disk.free_bytes);
                    disk.free_bytes -= taken;
                    // Some of it is stored below at once.
                    let stored = disk.need() / (1 + next(3));
                    disk.stored_bytes += stored;
                    free -= stored;
                }
                let needs: u64 = disks.iter().map(Reading::need).sum();
                assert!(free >= host + needs, "{count} disks: {free} free, {needs} needed");
            }
            let is_full = free < host + 2 * MB || disks.iter().all(|disk| disk.free_bytes == 0);
            assert!(is_full, "{count} disks: {free} are free at last");
        }
    }
}
