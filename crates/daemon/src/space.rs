//! Disks without a guarantee (`--disk`): the room that lets them accept no more than there is place for below.
//!
//! [`dormouse_governor::disk`] decides what each disk may accept, and the kernel reserves the rest of its free space
//! ([`ext4::reserve`]). Inside, `df` shows what is left, and a write beyond it fails like one to a full disk: nothing
//! is lost that was accepted. Each disk in use is read once a second, with many of them seldom enough for a twentieth
//! of one processor. Without such a disk the room does not tick.
//!
//! **Killed.** Disks keep what they were given last, until a daemon runs again or they are mounted again. LIMIT: then a
//! disk may accept more than there is place for, as without a daemon, or less.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};
use std::{fs, io};

use dormouse_api::EventKind;
use dormouse_container::Engine;
use dormouse_governor::disk::{self, Reading};
use dormouse_kernel::ext4;
use dormouse_kernel::loop_device::{self, LoopDevice};
use dormouse_model::{ContainerId, Size};

use crate::error::{Result, step};
use crate::notify::say;
use crate::room::{Notice, Room, cpu_time};

/// Time between readings.
const LOOKS: Duration = Duration::from_secs(1);
/// Readings take at most one part in so many of the time.
const LOOKS_SHARE: u32 = 20;
/// More free space is given back in steps of at least this size; less is taken at once.
const STEP_BYTES: u64 = 1 << 20;
/// A disk is short of place if it may not accept more than this part of it.
const REPORTED: u64 = 16;

/// A disk of a running container.
#[derive(Debug)]
struct Watched {
    /// Its file.
    file: PathBuf,
    /// Its loop device at the last look.
    device: Option<PathBuf>,
    /// Whether it was reported to be short of place.
    is_short: bool,
}

impl Watched {
    /// Reads the disk; `None` if it is not in use.
    fn read(&mut self) -> Result<Option<(LoopDevice, Found)>> {
        let Ok(meta) = fs::metadata(&self.file) else { return Ok(None) };
        let file = (meta.dev(), meta.ino());
        let again = self.device.take().and_then(|path| loop_device::open_of(&path, file));
        let failed =
            |e: &dyn std::error::Error| step("read a disk")(io::Error::other(e.to_string()));
        let device = match again {
            Some(device) => device,
            None => match loop_device::find_of(file).map_err(|e| failed(&e))? {
                Some(device) => device,
                None => return Ok(None),
            },
        };
        let Some(space) = ext4::space(&device).map_err(|e| failed(&e))? else {
            return Ok(None); // the device is about to end
        };
        self.device = Some(device.path().to_owned());
        let (bytes, stored_bytes) = (meta.len(), meta.blocks().saturating_mul(512));
        let reading = Reading { bytes, free_bytes: space.free_bytes, stored_bytes };
        Ok(Some((device, Found { reading, reserved_bytes: space.reserved_bytes })))
    }
}

/// What was read of a disk.
#[derive(Debug, Clone, Copy)]
struct Found {
    reading: Reading,
    reserved_bytes: u64,
}

impl Found {
    /// What the kernel reserves by itself.
    fn usual_bytes(&self) -> u64 {
        ext4::usual_reserve(self.reading.bytes)
    }

    /// What is to be reserved of a disk that may accept so many bytes; `None` if that is nearly so.
    fn reserve(&self, credit_bytes: u64) -> Option<u64> {
        let usual = self.usual_bytes();
        let wanted = self.reading.free_bytes.saturating_sub(credit_bytes).max(usual);
        let is_due = wanted > self.reserved_bytes
            || wanted.saturating_add(STEP_BYTES) <= self.reserved_bytes
            || (wanted == usual && self.reserved_bytes > usual);
        is_due.then_some(wanted)
    }

    /// Whether a disk with this reserve is short of place; `None` if it is as short as before.
    fn is_short(&self, reserve_bytes: u64) -> Option<bool> {
        match reserve_bytes.saturating_sub(self.usual_bytes()) {
            0 => Some(false),
            kept => (kept > self.reading.bytes / REPORTED).then_some(true),
        }
    }
}

/// The room of disks without a guarantee.
#[derive(Debug)]
pub(crate) struct Disks {
    engine: Rc<Engine>,
    watched: BTreeMap<ContainerId, Watched>,
    /// Containers that have begun to run.
    new: Vec<ContainerId>,
    next: Instant,
}

impl Disks {
    /// Begins with no disk: containers that run are found by the room of idle containers.
    pub(crate) fn begin(engine: Rc<Engine>) -> Self {
        Self { engine, watched: BTreeMap::new(), new: Vec::new(), next: Instant::now() }
    }

    /// Finds the disks of containers that have begun to run.
    fn consider(&mut self) {
        for id in std::mem::take(&mut self.new) {
            let config = self.engine.config(&id).ok();
            let Some(file) = config.and_then(|config| self.engine.sparse_drive_file(&config))
            else {
                self.watched.remove(&id);
                continue;
            };
            self.watched.entry(id).or_insert(Watched { file, device: None, is_short: false });
        }
    }

    /// Reads all disks, and sets what they may accept.
    fn look(&mut self) -> Result<()> {
        let mut all = Vec::new();
        let mut failed = Ok(());
        self.watched.retain(|id, watched| match watched.read() {
            Ok(None) => false, // its next start is an event
            Ok(Some((device, found))) => {
                all.push((id.clone(), device, found));
                true
            }
            Err(e) => {
                failed = Err(e);
                true
            }
        });
        let (free_bytes, host_bytes) = self.engine.drive_room()?;
        let readings: Vec<Reading> = all.iter().map(|(_, _, found)| found.reading).collect();
        let credit_bytes = disk::credit(free_bytes, host_bytes, &readings);
        for (id, device, found) in &all {
            let Some(reserve_bytes) = found.reserve(credit_bytes) else { continue };
            match ext4::reserve(device, reserve_bytes) {
                Err(e) => say(&format!("{}: {e}", id.short())),
                Ok(()) => self.report(id, found, reserve_bytes, free_bytes),
            }
        }
        failed
    }

    /// Records that there is less place below a disk than it has free, or enough again.
    fn report(&mut self, id: &ContainerId, found: &Found, reserve_bytes: u64, below_bytes: u64) {
        let Some(watched) = self.watched.get_mut(id) else { return };
        let is_short = found.is_short(reserve_bytes).unwrap_or(watched.is_short);
        if is_short == std::mem::replace(&mut watched.is_short, is_short) {
            return;
        }
        let Ok(config) = self.engine.config(id) else { return };
        let kind = if is_short { EventKind::DiskShort } else { EventKind::DiskEnough };
        let accepts = found.reading.free_bytes.saturating_sub(reserve_bytes);
        let about = [
            ("size", found.reading.bytes),
            ("free", found.reading.free_bytes),
            ("accepts", accepts),
            ("free_below", below_bytes),
        ];
        let about = about.map(|(name, bytes)| (name, Size(bytes).to_string()));
        self.engine.record(kind, id.as_str(), config.name.as_str(), &about);
    }
}

impl Room for Disks {
    fn name(&self) -> &'static str {
        "disks without a guarantee"
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn due(&self) -> Option<Instant> {
        (!self.watched.is_empty() || !self.new.is_empty()).then_some(self.next)
    }

    fn turn(&mut self, _now: Instant, _ready: &[bool]) -> Result<Vec<Notice>> {
        let began = cpu_time();
        self.consider();
        let looked = self.look();
        let took = cpu_time().saturating_sub(began);
        self.next = Instant::now() + LOOKS.max(took * LOOKS_SHARE);
        looked.map(|()| Vec::new())
    }

    fn notice(&mut self, now: Instant, notice: &Notice) {
        if let Notice::MaySleep(id, _) = notice {
            self.new.push(id.clone());
            if !self.watched.contains_key(id) {
                self.next = self.next.min(now);
            }
        }
    }

    /// Each disk may accept all that it has free again, as without a daemon.
    fn end(mut self: Box<Self>) {
        for (id, watched) in &mut self.watched {
            let Ok(Some((device, found))) = watched.read() else { continue };
            if let Some(usual) = found.reserve(u64::MAX)
                && let Err(e) = ext4::reserve(&device, usual)
            {
                say(&format!("{}: {e}", id.short()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1 << 20;

    fn found(free_bytes: u64, reserved_bytes: u64) -> Found {
        let reading = Reading { bytes: 1600 * MB, free_bytes, stored_bytes: 0 };
        Found { reading, reserved_bytes }
    }

    #[test]
    fn reserve_is_what_the_disk_may_not_accept() {
        let usual = ext4::usual_reserve(1600 * MB);
        assert_eq!(usual, 16 * MB);
        assert_eq!(found(1000 * MB, usual).reserve(2000 * MB), None, "it may accept all");
        assert_eq!(found(1000 * MB, usual).reserve(300 * MB), Some(700 * MB));
        assert_eq!(found(1000 * MB, 700 * MB).reserve(300 * MB), None, "as it is");
        assert_eq!(found(1000 * MB, 700 * MB).reserve(300 * MB - 1), Some(700 * MB + 1), "at once");
        assert_eq!(found(1000 * MB, 700 * MB).reserve(300 * MB + 1), None, "in steps");
        assert_eq!(found(1000 * MB, 700 * MB).reserve(301 * MB), Some(699 * MB));
        assert_eq!(found(1000 * MB, usual + 1).reserve(u64::MAX), Some(usual), "the last step");
        assert_eq!(found(1000 * MB, usual).reserve(0), Some(1000 * MB), "it is full");
    }

    #[test]
    fn short_disk_is_reported_once_and_when_it_has_enough() {
        let (usual, it) = (16 * MB, found(1000 * MB, 16 * MB));
        assert_eq!(it.is_short(usual), Some(false));
        assert_eq!(it.is_short(usual + 1), None);
        assert_eq!(it.is_short(usual + 101 * MB), Some(true));
    }
}
