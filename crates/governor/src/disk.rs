//! Disks without a guarantee: files that take place on the file system below as they are written.
//!
//! Together they may be larger than what is free below. If that is used up, data that a disk has accepted is lost. So
//! each disk is given a *credit*, and accepts no more than that: a write beyond it fails like one to a full disk. The
//! credits are decided anew each second, and a disk uses up its own as it writes.
//!
//! ```text
//! need   = what the disk has accepted and not stored below      of each disk: it is taken in any case
//! room   = free below - the host's part - all needs
//! credit = the larger of   room / disks   and   room - (disks - 1) x growth
//! ```
//!
//! With much room each disk may take nearly all of it, because the others take at most [`GROWTH_BYTES`] until the next
//! decision. With little room they divide it. LIMIT: disks that grow faster, and the host itself, use up the host's
//! part.

/// LIMIT: what a disk is expected to grow at most from one decision to the next.
pub const GROWTH_BYTES: u64 = 1 << 30;

/// A disk in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// The size of its file system.
    pub bytes: u64,
    /// What is free inside, reserved or not.
    pub free_bytes: u64,
    /// What its file has on the file system below.
    pub stored_bytes: u64,
}

impl Reading {
    /// What it has accepted and not stored below: data in memory, tables, and space that was allocated ahead.
    fn need(&self) -> u64 {
        self.bytes.saturating_sub(self.free_bytes).saturating_sub(self.stored_bytes)
    }
}

/// What each of these disks may accept, with what is free below and the part of it that the host keeps.
pub fn credit(free_below_bytes: u64, host_bytes: u64, disks: &[Reading]) -> u64 {
    let needs: u64 = disks.iter().map(Reading::need).fold(0, u64::saturating_add);
    let room = free_below_bytes.saturating_sub(host_bytes).saturating_sub(needs);
    let count = (disks.len() as u64).max(1);
    let others = (count - 1).saturating_mul(GROWTH_BYTES);
    (room / count).max(room.saturating_sub(others))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1 << 20;
    const GB: u64 = 1 << 30;

    fn empty(bytes: u64) -> Reading {
        Reading { bytes, free_bytes: bytes, stored_bytes: 0 }
    }

    #[test]
    fn one_disk_may_take_all_that_the_host_does_not_keep() {
        assert_eq!(credit(10 * GB, GB, &[empty(100 * GB)]), 9 * GB);
        assert_eq!(credit(GB / 2, GB, &[empty(100 * GB)]), 0);
        assert_eq!(credit(10 * GB, GB, &[]), 9 * GB);
    }

    #[test]
    fn accepted_data_has_its_place() {
        let used = Reading { bytes: 10 * GB, free_bytes: 6 * GB, stored_bytes: 3 * GB };
        assert_eq!(credit(10 * GB, GB, &[used]), 8 * GB);
        // Removed files that are not given back yet.
        let removed = Reading { stored_bytes: 9 * GB, ..used };
        assert_eq!(credit(10 * GB, GB, &[removed]), 9 * GB);
    }

    #[test]
    fn disks_divide_little_room_and_share_much() {
        let two = [empty(100 * GB); 2];
        assert_eq!(credit(GB + 400 * MB, GB, &two), 200 * MB);
        assert_eq!(credit(11 * GB, GB, &two), 9 * GB);
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
                    let wanted = next(2 * GROWTH_BYTES).min(GROWTH_BYTES);
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
