//! Disks without a guarantee (`--disk`): the room that lets them accept no more than there is place for below.
//!
//! [`dormouse_governor::disk`] decides what each disk may accept, and the kernel reserves the rest of its free space
//! ([`ext4::reserve`]). Inside, `df` shows what is left, and a write beyond it fails like one to a full disk: nothing
//! is lost that was accepted. Each disk in use is read once a second, with many of them seldom enough for a twentieth
//! of one processor. Without such a disk nothing is read.
//!
//! **A thread of its own** reads and writes: the kernel has a reader wait while a file system is unmounted, and that
//! may take long. LIMIT: meanwhile the other disks keep what they were given last.
//!
//! **Killed.** Disks keep what they were given last, until a daemon runs again or they are mounted again. LIMIT: then a
//! disk may accept more than there is place for, as without a daemon, or less.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use dormouse_api::EventKind;
use dormouse_container::{Engine, Places};
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
/// How long the end of the daemon waits for the thread.
const ENDS_WITHIN: Duration = Duration::from_secs(5);
const LOOKS_AGAIN: Duration = Duration::from_millis(2);

/// The devices of all files.
type Devices = HashMap<(u64, u64), PathBuf>;

/// A disk of a running container.
#[derive(Debug)]
struct Watched {
    /// Its file.
    file: PathBuf,
    /// Its loop device at the last look.
    device: Option<PathBuf>,
    /// The size of its file system at the last look.
    bytes: Option<u64>,
    /// Whether it is short of place; `None` before the first look.
    is_short: Option<bool>,
}

impl Watched {
    /// Reads the disk; `None` if it is not in use. `devices` is filled when a device has to be found.
    fn read(
        &mut self,
        engine: &Engine,
        devices: &mut Option<Devices>,
    ) -> std::result::Result<Option<(LoopDevice, Found)>, String> {
        let Ok(meta) = fs::metadata(&self.file) else { return Ok(None) };
        let file = (meta.dev(), meta.ino());
        let again = self.device.take().and_then(|path| loop_device::open_of(&path, file));
        let device = match (again, &devices) {
            (Some(device), _) => Some(device),
            (None, Some(known)) => {
                known.get(&file).and_then(|path| loop_device::open_of(path, file))
            }
            (None, None) => {
                let known = devices.insert(loop_device::all().map_err(|e| e.to_string())?);
                known.get(&file).and_then(|path| loop_device::open_of(path, file))
            }
        };
        let Some(device) = device else { return Ok(None) };
        let Some(space) = ext4::space(&device).map_err(|e| e.to_string())? else {
            return Ok(None); // the device is about to end
        };
        self.device = Some(device.path().to_owned());
        let bytes = match self.bytes {
            Some(bytes) if engine.drive_is_growing(&self.file) => bytes,
            _ => meta.len(),
        };
        self.bytes = Some(bytes);
        let reading = Reading {
            bytes,
            free_bytes: space.free_bytes,
            stored_bytes: meta.blocks().saturating_mul(512),
            delayed_bytes: space.delayed_bytes,
            free_inode_bytes: space.free_inode_bytes,
        };
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

/// The disks that are looked at.
struct Disks {
    engine: Engine,
    watched: BTreeMap<ContainerId, Watched>,
    /// Errors of the last look, which are reported once.
    errors: Vec<String>,
}

impl Disks {
    /// Finds the disk of a container that has begun to run.
    fn consider(&mut self, id: ContainerId) {
        let config = self.engine.config(&id).ok();
        match config.and_then(|config| self.engine.sparse_drive_file(&config)) {
            Some(file) => {
                let new = Watched { file, device: None, bytes: None, is_short: None };
                self.watched.entry(id).or_insert(new);
            }
            None => drop(self.watched.remove(&id)),
        }
    }

    /// Reads all disks, and sets what they may accept.
    fn look(&mut self) {
        let (mut all, mut errors, mut devices) = (Vec::new(), Vec::new(), None);
        let engine = &self.engine;
        self.watched.retain(|id, watched| match watched.read(engine, &mut devices) {
            Ok(None) => false, // its next start is an event
            Ok(Some((device, found))) => {
                all.push((id.clone(), device, found));
                true
            }
            Err(e) => {
                errors.push(format!("{}: {e}", id.short()));
                true
            }
        });
        match self.engine.drive_room() {
            Ok((free_bytes, host_bytes)) => {
                let readings: Vec<_> = all.iter().map(|(_, _, found)| found.reading).collect();
                let credit_bytes = disk::credit(free_bytes, host_bytes, &readings);
                for (id, device, found) in &all {
                    let reserve_bytes = found.reserve(credit_bytes);
                    let done = reserve_bytes.map_or(Ok(()), |bytes| ext4::reserve(device, bytes));
                    match done {
                        Err(e) => errors.push(format!("{}: {e}", id.short())),
                        Ok(()) => self.report(id, found, reserve_bytes, free_bytes),
                    }
                }
            }
            Err(e) => errors.push(e.to_string()),
        }
        if self.errors != errors {
            errors.iter().for_each(|line| say(&format!("disks: {line}")));
            self.errors = errors;
        }
    }

    /// Records that there is less place below a disk than it has free, or enough again.
    fn report(&mut self, id: &ContainerId, found: &Found, reserved: Option<u64>, below_bytes: u64) {
        let Some(watched) = self.watched.get_mut(id) else { return };
        // A daemon before may have left it short, and has reported that.
        let before = watched.is_short.or_else(|| found.is_short(found.reserved_bytes));
        let reserved = reserved.unwrap_or(found.reserved_bytes);
        let is_short = found.is_short(reserved).or(before).unwrap_or(false);
        watched.is_short = Some(is_short);
        if is_short == before.unwrap_or(false) {
            return;
        }
        let Ok(config) = self.engine.config(id) else { return };
        let kind = if is_short { EventKind::DiskShort } else { EventKind::DiskEnough };
        let about = [
            ("size", found.reading.bytes),
            ("free", found.reading.free_bytes),
            ("accepts", found.reading.free_bytes.saturating_sub(reserved)),
            ("free_below", below_bytes),
        ];
        let about = about.map(|(name, bytes)| (name, Size(bytes).to_string()));
        self.engine.record(kind, id.as_str(), config.name.as_str(), &about);
    }

    /// Each disk may accept all that it has free again, as without a daemon.
    fn give_back(&mut self) {
        let mut devices = None;
        for (id, watched) in &mut self.watched {
            let Ok(Some((device, found))) = watched.read(&self.engine, &mut devices) else {
                continue;
            };
            if let Some(usual) = found.reserve(u64::MAX)
                && let Err(e) = ext4::reserve(&device, usual)
            {
                say(&format!("disks: {}: {e}", id.short()));
            }
        }
    }

    /// Looks at the disks until the notices end.
    fn run(&mut self, notices: &Receiver<ContainerId>) {
        let mut not_before = Instant::now();
        let mut next = None;
        loop {
            let came = match next {
                None => notices.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(at) => {
                    notices.recv_timeout(Instant::saturating_duration_since(&at, Instant::now()))
                }
            };
            match came {
                Ok(id) => {
                    self.consider(id);
                    notices
                        .try_iter()
                        .collect::<Vec<_>>()
                        .into_iter()
                        .for_each(|id| self.consider(id));
                    // A new disk is looked at soon.
                    next = Some(next.map_or(not_before, |at: Instant| at.min(not_before)));
                }
                Err(RecvTimeoutError::Timeout) => {
                    let began = cpu_time();
                    self.look();
                    let took = cpu_time().saturating_sub(began);
                    not_before = Instant::now() + took * LOOKS_SHARE;
                    next = (!self.watched.is_empty())
                        .then(|| Instant::now() + LOOKS.max(took * LOOKS_SHARE));
                }
                Err(RecvTimeoutError::Disconnected) => return self.give_back(),
            }
        }
    }
}

/// The room of disks without a guarantee: it passes containers on to the thread.
#[derive(Debug)]
pub(crate) struct Space {
    notices: Sender<ContainerId>,
    thread: JoinHandle<()>,
}

impl Space {
    /// Begins with no disk: containers that run are found by the room of idle containers.
    pub(crate) fn begin(places: &Places) -> Result<Self> {
        let engine = Engine::open(places.clone())?;
        let (notices, received) = mpsc::channel();
        let mut disks = Disks { engine, watched: BTreeMap::new(), errors: Vec::new() };
        let body = move || disks.run(&received);
        let thread =
            Builder::new().name("disks".into()).spawn(body).map_err(step("make a thread"))?;
        Ok(Self { notices, thread })
    }
}

impl Room for Space {
    fn name(&self) -> &'static str {
        "disks without a guarantee"
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn due(&self) -> Option<Instant> {
        None
    }

    fn turn(&mut self, _now: Instant, _ready: &[bool]) -> Result<Vec<Notice>> {
        Ok(Vec::new())
    }

    fn notice(&mut self, _now: Instant, notice: &Notice) {
        if let Notice::MaySleep(id, _) = notice
            && self.notices.send(id.clone()).is_err()
        {
            say("disks are not looked at any more: the thread has ended");
        }
    }

    fn end(self: Box<Self>) {
        let Self { notices, thread } = *self;
        drop(notices);
        let until = Instant::now() + ENDS_WITHIN;
        while !thread.is_finished() && Instant::now() < until {
            std::thread::sleep(LOOKS_AGAIN);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1 << 20;

    fn found(free_bytes: u64, reserved_bytes: u64) -> Found {
        let (stored_bytes, delayed_bytes, free_inode_bytes) = (0, 0, 0);
        let bytes = 1600 * MB;
        let reading = Reading { bytes, free_bytes, stored_bytes, delayed_bytes, free_inode_bytes };
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
