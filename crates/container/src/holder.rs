//! Waits for the lock of a container that end: the process that holds the lock, and a blocked wake.
//!
//! Most verbs hold the lock for milliseconds, and a wake holds it until the container runs. A volume on a file
//! system that does not answer blocks a wake, and thus the lock, without limit. The verbs that end a container
//! do not wait for that:
//!
//! - `stop` waits for its timeout, or for the longest time of a wake if that is longer. It then reports the holder.
//! - `stop --time 0`, `kill` and `rm --force` end the wake ([`lock_to_end`]). As after any killed wake, the
//!   container is asleep, with its complete checkpoint.
//!
//! **The holder** is found in `/proc/locks` and held by pidfd. Its open files (`/proc/PID/fdinfo`) then confirm
//! the lock: the pid in `/proc/locks` may be that of an earlier process. A wake is a process with the keeper's
//! command line for wakers, or with an intention to wake ([`crate::pending`]).
//!
//! LIMIT: only wakes are ended. A command that saves or copies something may be the operator's own, and keeps
//! the lock until its end.
//!
//! Uses `ground`, `settings`, `state` and `pending`.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use dormouse_kernel::{pidfd, proc};
use dormouse_model::{Config, ContainerId, State};
use dormouse_parcel::Reader;

use crate::disk::{Lock, Waiting};
use crate::error::{Error, Result};
use crate::exit::SIGKILL;
use crate::ground::{CONFIG, Ground};
use crate::{pending, settings, state};

/// How long a verb that ends a container waits until it ends a wake that holds the lock.
const WAKE_GRACE: Duration = Duration::from_secs(2);

/// LIMIT: time in which a killed wake releases the lock. A process that waits for a disk (state D) ends only
/// afterwards.
const KILLED_WITHIN: Duration = Duration::from_secs(30);

/// Time of a wake beside that of its restore.
const BESIDE_RESTORE: Duration = Duration::from_secs(10);

/// LIMIT: characters of a command line in an error.
const COMMAND_CHARS_MAX: usize = 100;

/// The process that holds the lock of a container.
#[derive(Debug)]
struct Holder {
    pid: u32,
    process: OwnedFd,
    is_wake: bool,
}

/// Waits for the lock of a container, at least as long as a wake of it may last.
///
/// Errors: [`Error::Held`] when the time has passed.
pub(crate) fn lock_within(ground: &Ground, id: &ContainerId, limit: Duration) -> Result<Lock> {
    let waiting = begin(ground, id)?;
    let began = Instant::now();
    if let Some(lock) = waiting.take(WAKE_GRACE.min(limit))? {
        return Ok(lock);
    }
    // Not before the lock was found to be held for long: the time of a wake needs the checkpoint's records.
    let limit = limit.max(wake_limit(ground, id));
    if let Some(lock) = waiting.take(limit.saturating_sub(began.elapsed()))? {
        return Ok(lock);
    }
    Err(held(ground, id, find(ground, id).as_ref(), limit))
}

/// Waits for the lock of a container that is to be ended in any case. A wake that holds the lock is killed.
///
/// Errors: [`Error::Held`] if another process has held the lock for the time of a wake, or the killed one does
/// not end.
pub(crate) fn lock_to_end(ground: &Ground, id: &ContainerId) -> Result<Lock> {
    lock_ending_wakes(ground, id, true)
}

/// The same without a limit for processes other than wakes.
pub(crate) fn lock_without_wakes(ground: &Ground, id: &ContainerId) -> Result<Lock> {
    lock_ending_wakes(ground, id, false)
}

fn lock_ending_wakes(ground: &Ground, id: &ContainerId, is_limited: bool) -> Result<Lock> {
    let waiting = begin(ground, id)?;
    let began = Instant::now();
    let mut limit = None;
    loop {
        if let Some(lock) = waiting.take(WAKE_GRACE)? {
            return Ok(lock);
        }
        limit = limit.or_else(|| is_limited.then(|| wake_limit(ground, id)));
        let holder = find(ground, id);
        if let Some(wake) = holder.as_ref().filter(|holder| holder.is_wake) {
            let _ = pidfd::send_signal(&wake.process, SIGKILL); // may have ended already
            let ended = pidfd::wait(&wake.process, Some(KILLED_WITHIN));
            if !ended.map_err(Error::call("cannot wait for the end of a wake"))? {
                return Err(Error::Undying {
                    name: name_of(ground, id),
                    pid: wake.pid,
                    waited: KILLED_WITHIN,
                });
            }
        }
        if limit.is_some_and(|limit| began.elapsed() >= limit) {
            return Err(held(ground, id, holder.as_ref(), began.elapsed()));
        }
    }
}

/// Returns the longest time of a wake of this container, as far as its checkpoint can be read.
pub(crate) fn wake_limit(ground: &Ground, id: &ContainerId) -> Duration {
    let reader = Reader::open(&ground.asleep_dir(id));
    let bytes = reader.map_or(0, |reader| reader.records().pages.bytes);
    settings::restore_limit(&ground.settings(), bytes).saturating_add(BESIDE_RESTORE)
}

fn begin(ground: &Ground, id: &ContainerId) -> Result<Waiting> {
    match Waiting::begin(&ground.dir(id)) {
        Err(Error::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            Err(Error::NoContainer(id.short().to_owned()))
        }
        other => other,
    }
}

fn name_of(ground: &Ground, id: &ContainerId) -> String {
    ground.config(id).map_or_else(|_| id.short().to_owned(), |config| config.name.to_string())
}

fn held(ground: &Ground, id: &ContainerId, holder: Option<&Holder>, waited: Duration) -> Error {
    let process = match holder {
        Some(Holder { pid, .. }) => {
            let words = proc::read(format!("/proc/{pid}/cmdline"), 4096).unwrap_or_default();
            format!("process {pid} ('{}')", shown(&String::from_utf8_lossy(&words)).escape_debug())
        }
        None => "another process".to_owned(),
    };
    let remedy = match holder {
        Some(Holder { is_wake: true, .. }) => {
            "a file system of a volume may not answer; 'stop --time 0' ends the wake and the container without \
             its stop signal, and its memory is lost"
        }
        _ => "wait for the end of that process, or end it, and try again",
    };
    let waited = Duration::from_secs(waited.as_secs());
    Error::Held { name: name_of(ground, id), process, waited, remedy }
}

/// Returns a command line without the directory of its program. The begin of a long one is left out: the verb
/// is at the end.
fn shown(words: &str) -> String {
    let words = words.trim_end_matches('\0');
    let program_end = words.find('\0').unwrap_or(words.len());
    let name = words[..program_end].rfind('/').map_or(0, |slash| slash + 1);
    let words = words[name..].replace('\0', " ");
    let excess = words.chars().count().saturating_sub(COMMAND_CHARS_MAX);
    let rest: String = words.chars().skip(excess).collect();
    if excess == 0 { rest } else { format!("...{rest}") }
}

/// Finds the process that holds the lock; `None` if it cannot be identified, or has ended.
fn find(ground: &Ground, id: &ContainerId) -> Option<Holder> {
    let dir = ground.dir(id);
    // `beside` is a file on the same file system without an exclusive lock.
    let file = |path: &Path, beside: &Path| {
        Some(format!("{}:{}", device(beside)?, fs::metadata(path).ok()?.ino()))
    };
    let lock = file(&dir, &dir.join(CONFIG))?;
    let locks = proc::whole_text("/proc/locks").ok()?;
    for pid in locks.lines().filter_map(|line| exclusive(line, &lock)) {
        // ORDER: the open file is looked up after the pidfd is open, and the process lives thereafter: the
        // pidfd is that of the holder.
        let Ok(process) = pidfd::open(pid) else { continue };
        if !has_lock(pid, &lock) {
            continue;
        }
        let config = ground.config(id);
        let is_asleep = config.is_ok_and(|config| is_not_awake(ground, &config));
        let is_wake = is_asleep
            && (is_waker(ground, pid)
                || pending::sleep_intents(ground, id).iter().any(|intent| {
                    let lock = file(intent, &ground.places.run.join("boot"));
                    lock.is_some_and(|lock| has_lock(pid, &lock))
                }));
        if pidfd::is_alive(&process) {
            return Some(Holder { pid, process, is_wake });
        }
    }
    None
}

/// Returns whether a container is asleep, or has only processes of an incomplete wake.
fn is_not_awake(ground: &Ground, config: &Config) -> bool {
    state::observe(ground, config).is_ok_and(|observed| {
        observed.state == State::Asleep || observed.init.is_some_and(|init| init.unready)
    })
}

/// Returns whether a process has the command line of this instance's wakers.
fn is_waker(ground: &Ground, pid: u32) -> bool {
    use std::os::unix::ffi::OsStrExt;
    let Ok(words) = ground.internal("wake") else { return false };
    let Ok(found) = proc::read(format!("/proc/{pid}/cmdline"), 1 << 16) else { return false };
    let mut found = found.strip_suffix(b"\0").unwrap_or(&found).split(|byte| *byte == 0);
    found.next().is_some() && found.eq(words[1..].iter().map(|word| word.as_bytes()))
}

/// Returns the device of a file as the kernel prints it for locks. `st_dev` differs from it on some file
/// systems, such as btrfs.
fn device(file: &Path) -> Option<String> {
    let share = Lock::share(file).ok()?;
    let text = fdinfo("self", share.file().as_raw_fd().to_string().as_ref())?;
    let line = text.lines().find(|line| line.starts_with("lock:"))?;
    let file = line.split_ascii_whitespace().find(|word| word.matches(':').count() == 2)?;
    file.rsplit_once(':').map(|(device, _)| device.to_owned())
}

/// Returns the pid of a line of `/proc/locks` if it is an exclusive flock(2) of this file that is held.
fn exclusive(line: &str, file: &str) -> Option<u32> {
    let mut words = line.split_ascii_whitespace().skip_while(|word| *word != "FLOCK");
    let is_waiting = line.contains("->");
    let [_, _, kind, pid, found] =
        [words.next()?, words.next()?, words.next()?, words.next()?, words.next()?];
    (!is_waiting && kind == "WRITE" && found == file).then(|| pid.parse().ok()).flatten()
}

/// Returns whether a process has a file open with an exclusive lock on it.
fn has_lock(pid: u32, file: &str) -> bool {
    let open = fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter().flatten().flatten();
    let mut texts = open.filter_map(|entry| fdinfo(&pid.to_string(), &entry.file_name()));
    texts.any(|text| {
        let mut locks = text.lines().filter_map(|line| line.strip_prefix("lock:"));
        locks.any(|line| exclusive(line, file).is_some())
    })
}

fn fdinfo(process: &str, number: &std::ffi::OsStr) -> Option<String> {
    proc::whole_text(Path::new("/proc").join(process).join("fdinfo").join(number)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_of_a_holder_is_shown_with_its_verb() {
        assert_eq!(shown("/opt/a/dormouse\0stop\0x\0"), "dormouse stop x");
        assert_eq!(shown("dormouse\0"), "dormouse");
        assert_eq!(shown(""), "");
        let long = format!("/bin/dormouse\0--root\0/{}\0internal\0wake\0", "d".repeat(200));
        let text = shown(&long);
        assert!(text.starts_with("...ddd") && text.ends_with("d internal wake"), "{text}");
        assert_eq!(text.len(), COMMAND_CHARS_MAX + 3);
    }

    #[test]
    fn lines_of_proc_locks_name_the_holder_of_an_exclusive_flock() {
        let line = "1: FLOCK  ADVISORY  WRITE 1234 00:2a:77 0 EOF";
        assert_eq!(exclusive(line, "00:2a:77"), Some(1234));
        assert_eq!(exclusive(line, "00:2a:7"), None);
        for other in [
            "1: FLOCK  ADVISORY  READ 1234 00:2a:77 0 EOF",
            "1: -> FLOCK  ADVISORY  WRITE 1234 00:2a:77 0 EOF",
            "1: POSIX  ADVISORY  WRITE 1234 00:2a:77 0 EOF",
            "1: FLOCK  ADVISORY  WRITE",
        ] {
            assert_eq!(exclusive(other, "00:2a:77"), None, "{other}");
        }
    }

    #[test]
    fn own_lock_is_found_by_its_device_and_number() {
        let dir = tempfile::tempdir().unwrap();
        let other = dir.path().join("other");
        fs::write(&other, "").unwrap();
        let lock = Lock::take(dir.path()).unwrap();
        let file = |path: &Path| {
            format!("{}:{}", device(&other).unwrap(), fs::metadata(path).unwrap().ino())
        };
        assert!(has_lock(std::process::id(), &file(dir.path())));
        assert!(!has_lock(std::process::id(), &file(&other)));
        let locks = proc::whole_text("/proc/locks").unwrap();
        let held = locks.lines().filter_map(|line| exclusive(line, &file(dir.path())));
        assert_eq!(held.collect::<Vec<_>>(), [std::process::id()]);
        drop(lock);
        assert!(!has_lock(std::process::id(), &file(dir.path())));
    }
}
