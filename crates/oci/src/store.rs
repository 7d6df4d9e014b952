//! The state of containers on disk. The crate's root lists the files.
//!
//! **Locks and their order.** The mark of a creation (`.creating/ID`, fcntl) before the container's
//! own lock (`ID/lock`, flock); no command waits for a mark. A verb holds the container's lock
//! while it makes a change.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dormouse_kernel::pidfd;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::spec::{self, Hook, Spec};

/// LIMIT: longest id, as a file name.
const LONGEST_ID: usize = 255;
/// How long a verb waits for another verb that changes the same container.
const PATIENCE: Duration = Duration::from_secs(10);
const CREATING: &str = ".creating";
/// Prefix of the marks of containers that are frozen for a moment.
const FROZEN: &str = ".frozen-";

/// State of a container, with the names of the specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// The container is being made.
    Creating,
    /// The container waits for `start`.
    Created,
    /// The program runs.
    Running,
    /// The container is frozen.
    Paused,
    /// The first process has exited.
    Stopped,
}

impl Status {
    /// Returns the name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Created => "created",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
        }
    }
}

/// `state.json`. Fields are only ever added.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    /// Version of this format.
    pub version: u32,
    /// The container.
    pub id: String,
    /// `ociVersion` of the configuration.
    pub oci_version: String,
    /// Absolute path of the bundle.
    pub bundle: PathBuf,
    /// Absolute path of the root filesystem.
    pub rootfs: PathBuf,
    /// RFC 3339.
    pub created: String,
    /// The first process; 0 while there is none.
    pub pid: u32,
    /// Field 22 of its `/proc/PID/stat`: identifies the process together with the pid.
    pub start_time: u64,
    /// Its cgroup below the top of every hierarchy.
    pub cgroup: String,
    /// How many parent directories were made for it.
    pub cgroup_made: usize,
    /// Kinds of the first process's namespaces that a later process joins.
    pub namespaces: Vec<String>,
    /// Its pid namespace was made for it: all its processes end with the first.
    pub owns_pids: bool,
    /// The caller's annotations.
    pub annotations: BTreeMap<String, String>,
    /// Remaining steps of the newborn, for the errors of `start`.
    pub steps: Vec<(u16, String)>,
    /// Hooks to run after `start`.
    pub poststart: Vec<Hook>,
    /// Hooks to run after `delete`.
    pub poststop: Vec<Hook>,
    /// Device and inode of the caller's standard streams; empty with a private terminal.
    pub streams: Vec<Option<(u64, u64)>>,
}

/// The state for hooks and callers.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct State<'r> {
    oci_version: &'r str,
    id: &'r str,
    status: Status,
    #[serde(skip_serializing_if = "is_zero")]
    pid: u32,
    bundle: &'r Path,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    annotations: &'r BTreeMap<String, String>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // required by serde
fn is_zero(n: &u32) -> bool {
    *n == 0
}

impl Record {
    /// Returns the state in the format of the specification.
    pub fn state(&self, status: Status, pid: u32) -> State<'_> {
        let pid = if status == Status::Stopped { 0 } else { pid };
        State {
            oci_version: crate::spec::OCI_VERSION,
            id: &self.id,
            status,
            pid,
            bundle: &self.bundle,
            annotations: &self.annotations,
        }
    }

    /// Returns the first process, unless it has exited.
    pub fn process(&self) -> Option<OwnedFd> {
        if self.pid == 0 {
            return None;
        }
        let pidfd = pidfd::open_exactly(self.pid, self.start_time).ok()?;
        pidfd::is_alive(&pidfd).then_some(pidfd)
    }
}

/// The root directory.
#[derive(Debug, Clone)]
pub struct Store {
    root: PathBuf,
}

/// Leftover of an interrupted command.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// A partly made container.
    Creation(String),
    /// A container that was frozen for a moment and may still be.
    Frozen(String),
}

/// The mark of an operation in progress.
#[derive(Debug)]
pub(crate) struct Mark {
    path: PathBuf,
    _lock: File,
}

impl Mark {
    /// Removes the mark: the operation is complete, or was undone completely.
    pub(crate) fn remove(self) -> Result<()> {
        fs::remove_file(&self.path).map_err(Error::file("remove", &self.path))
    }
}

/// A lock on one container, released when dropped.
#[derive(Debug)]
pub(crate) struct Lock(#[allow(dead_code)] Option<File>);

/// Checks an id, which is one name in a directory and in a cgroup hierarchy.
pub(crate) fn check_id(id: &str) -> Result<()> {
    let good = |b: u8| b.is_ascii_alphanumeric() || b"_+-.".contains(&b);
    if id.is_empty() || id.len() > LONGEST_ID || !id.bytes().all(good) || id.starts_with('.') {
        return Err(Error::Usage(format!(
            "invalid container id {id:?}: 1 to {LONGEST_ID} of A-Z a-z 0-9 _ + - . and no . first"
        )));
    }
    Ok(())
}

fn make_dir(path: &Path) -> std::io::Result<()> {
    match fs::DirBuilder::new().recursive(true).mode(0o700).create(path) {
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

fn lock_file(path: &Path) -> std::io::Result<File> {
    File::options().create(true).truncate(false).write(true).mode(0o600).open(path)
}

/// Holds a mark if it is free. With a lock of the process (fcntl(2)): a newborn would inherit one
/// of the open file (flock(2)), until it has closed unneeded descriptors.
fn try_hold(file: &File) -> std::io::Result<bool> {
    match rustix::fs::fcntl_lock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::ACCESS | rustix::io::Errno::AGAIN) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

fn try_lock(file: &File) -> std::io::Result<bool> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Renames a file; the new name must be free.
fn rename_new(from: &Path, to: &Path) -> std::result::Result<(), rustix::io::Errno> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)
}

/// Returns whether a path still names the held file.
fn is_still(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), fs::metadata(path)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

impl Store {
    /// Opens the root directory, made if missing.
    pub(crate) fn open(root: PathBuf) -> Result<Self> {
        let root = std::path::absolute(&root).map_err(Error::file("find", &root))?;
        let creating = root.join(CREATING);
        if !creating.is_dir() {
            make_dir(&creating).map_err(Error::file("make directory", &creating))?;
        }
        Ok(Self { root })
    }

    /// Returns the directory of a container.
    pub(crate) fn dir(&self, id: &str) -> PathBuf {
        self.root.join(id)
    }

    /// Marks a creation as in progress. `Exists` if another one is, for the same id.
    pub(crate) fn mark(&self, id: &str) -> Result<Mark> {
        self.mark_as(id, b"")?.ok_or_else(|| Error::Exists(id.to_owned()))
    }

    /// Marks a container as frozen for a moment, for a command that finds it so.
    pub(crate) fn mark_frozen(&self, id: &str) -> Result<Mark> {
        let name = format!("{FROZEN}{}", std::process::id());
        let marked = self.mark_as(&name, id.as_bytes())?;
        marked.ok_or(Error::Exists(name))
    }

    /// ORDER: held, then named: a free mark is therefore an abandoned one.
    fn mark_as(&self, name: &str, text: &[u8]) -> Result<Option<Mark>> {
        let path = self.root.join(CREATING).join(name);
        let draft = self.root.join(CREATING).join(format!(".{}", std::process::id()));
        loop {
            let mut file = lock_file(&draft).map_err(Error::file("make", &draft))?;
            if !try_hold(&file).map_err(Error::file("lock", &draft))? {
                // Found by another command between creation and lock, and about to be removed.
                std::thread::sleep(Duration::from_micros(50));
                continue;
            }
            let written = file.set_len(0).and_then(|()| file.write_all(text));
            written.map_err(Error::file("write", &draft))?;
            match rename_new(&draft, &path) {
                Ok(()) => return Ok(Some(Mark { path, _lock: file })),
                Err(rustix::io::Errno::NOENT) => {} // removed by another command
                Err(rustix::io::Errno::EXIST) => {
                    let _ = fs::remove_file(&draft); // on failure the next command does it
                    return Ok(None);
                }
                Err(e) => return Err(Error::file("name", path)(e.into())),
            }
        }
    }

    /// Returns leftovers of interrupted commands, each held. Unnamed ones are removed.
    pub(crate) fn abandoned(&self) -> Result<Vec<(Left, Mark)>> {
        let dir = self.root.join(CREATING);
        let mut found = Vec::new();
        for entry in fs::read_dir(&dir).map_err(Error::file("list", &dir))? {
            let Ok(entry) = entry else { continue };
            let Ok(name) = entry.file_name().into_string() else { continue };
            let path = entry.path();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                let _ = fs::remove_dir_all(&path); // its removal was interrupted, or is in progress
                continue;
            }
            let Ok(file) = File::options().write(true).open(&path) else { continue };
            if !try_hold(&file).unwrap_or(false) || !is_still(&file, &path) {
                continue;
            }
            let mark = Mark { path, _lock: file };
            if check_id(&name).is_ok() {
                found.push((Left::Creation(name), mark));
            } else if name.starts_with(FROZEN) {
                let id = fs::read_to_string(&mark.path).unwrap_or_default();
                found.push((Left::Frozen(id), mark));
            } else {
                let _ = mark.remove(); // on failure the next command does it
            }
        }
        Ok(found)
    }

    /// Makes the directory of a container. `Exists` if there is one.
    pub(crate) fn make(&self, id: &str) -> Result<PathBuf> {
        let dir = self.dir(id);
        match fs::DirBuilder::new().mode(0o711).create(&dir) {
            Ok(()) => Ok(dir),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                Err(Error::Exists(id.to_owned()))
            }
            Err(e) => Err(Error::file("make directory", dir)(e)),
        }
    }

    /// Removes the directory of a container.
    ///
    /// ORDER: renamed first, so that a partly removed directory is no container's state; every
    /// command looks for it under the new name.
    pub(crate) fn remove(&self, id: &str) -> Result<()> {
        let (dir, gone) =
            (self.dir(id), self.root.join(CREATING).join(format!(".gone-{}", std::process::id())));
        let _ = fs::remove_dir_all(&gone); // left by an interrupted removal
        match fs::rename(&dir, &gone) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            other => other.map_err(Error::file("remove", &dir))?,
        }
        loop {
            match fs::remove_dir_all(&gone) {
                // Another command takes it for an interrupted removal, and removes it, too.
                Err(e) if e.kind() == std::io::ErrorKind::NotFound && gone.exists() => {}
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
                other => return other.map_err(Error::file("remove", &gone)),
            }
        }
    }

    /// Writes the record.
    pub(crate) fn write(&self, record: &Record) -> Result<()> {
        let path = self.dir(&record.id).join("state.json");
        let text = serde_json::to_vec(record)
            .map_err(|e| Error::Config { path: path.clone(), why: e.to_string() })?;
        publish(&path, &text)
    }

    /// Reads the record of a container.
    pub fn read(&self, id: &str) -> Result<Record> {
        check_id(id)?;
        let path = self.dir(id).join("state.json");
        match path.try_exists() {
            Ok(true) => spec::read(&path),
            Ok(false) => Err(Error::NotFound(id.to_owned())),
            Err(e) => Err(Error::file("look at", path)(e)),
        }
    }

    /// Reads the configuration of a container from its creation.
    pub(crate) fn config(&self, id: &str) -> Result<Spec> {
        spec::read(&self.dir(id).join("config.json"))
    }

    /// Locks a container against other verbs that change it. With `force` the lock is skipped after
    /// `PATIENCE`: a hanging verb must not block `delete --force`.
    pub(crate) fn lock(&self, id: &str, force: bool) -> Result<Lock> {
        let path = self.dir(id).join("lock");
        let deadline = Instant::now() + PATIENCE;
        let file = match lock_file(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Err(Error::NotFound(id.to_owned()));
            }
            other => other.map_err(Error::file("make", &path))?,
        };
        while !try_lock(&file).map_err(Error::file("lock", &path))? {
            if Instant::now() >= deadline {
                if force {
                    return Ok(Lock(None));
                }
                let why = "another command is changing it";
                return Err(Error::State { id: id.to_owned(), state: "busy", why });
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(Lock(Some(file)))
    }

    /// The places of the cgroup hierarchies, kept for the next command ([`Forest::find_kept`]). No id begins with a
    /// dot.
    ///
    /// [`Forest::find_kept`]: dormouse_kernel::cgroup::Forest::find_kept
    pub(crate) fn mounts(&self) -> PathBuf {
        self.root.join(".mounts")
    }

    /// Returns the ids of all containers, sorted.
    pub fn ids(&self) -> Result<Vec<String>> {
        let mut ids = Vec::new();
        for entry in fs::read_dir(&self.root).map_err(Error::file("list", &self.root))? {
            let Ok(entry) = entry else { continue };
            let Ok(name) = entry.file_name().into_string() else { continue };
            if check_id(&name).is_ok() && entry.path().join("state.json").exists() {
                ids.push(name);
            }
        }
        ids.sort_unstable();
        Ok(ids)
    }

    /// Returns the present state of a container.
    pub(crate) fn status(&self, record: &Record, is_frozen: impl FnOnce() -> bool) -> Status {
        if record.pid == 0 {
            return Status::Creating;
        }
        if record.process().is_none() {
            return Status::Stopped;
        }
        match self.dir(&record.id).join("start").exists() {
            _ if is_frozen() => Status::Paused,
            true => Status::Created,
            false => Status::Running,
        }
    }
}

/// Writes the file with a pid, readable for all, completely or not at all.
///
/// The file has no name before it is complete, so that no draft is left in the caller's directory.
pub(crate) fn publish_pid(path: &Path, pid: u32) -> Result<()> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let write = || -> std::io::Result<()> {
        let flags = rustix::fs::OFlags::TMPFILE.bits().cast_signed();
        let mut file = File::options().write(true).mode(0o644).custom_flags(flags).open(parent)?;
        file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))?; // past our umask
        file.write_all(pid.to_string().as_bytes())?;
        let name = format!("/proc/self/fd/{}", file.as_raw_fd());
        let follow = rustix::fs::AtFlags::SYMLINK_FOLLOW;
        let link = || rustix::fs::linkat(rustix::fs::CWD, &name, rustix::fs::CWD, path, follow);
        match link() {
            Err(rustix::io::Errno::EXIST) => {
                fs::remove_file(path)?;
                Ok(link()?)
            }
            other => Ok(other?),
        }
    };
    match write() {
        // A filesystem without O_TMPFILE.
        Err(e) if [Some(95), Some(21)].contains(&e.raw_os_error()) => {
            publish(path, pid.to_string().as_bytes())?;
            let readable = std::os::unix::fs::PermissionsExt::from_mode(0o644);
            fs::set_permissions(path, readable).map_err(Error::file("write", path))
        }
        other => other.map_err(Error::file("write", path)),
    }
}

/// Writes a file completely or not at all.
fn publish(path: &Path, text: &[u8]) -> Result<()> {
    let draft = path.with_extension(format!("new-{}", std::process::id()));
    let write = || {
        let mut file = File::options()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed())
            .open(&draft)?;
        file.write_all(text)?;
        fs::rename(&draft, path)
    };
    write().map_err(|e| {
        let _ = fs::remove_file(&draft); // the first error is returned
        Error::file("write", path)(e)
    })
}

/// Returns a short path of a file in an open directory, for socket addresses (108 bytes).
pub(crate) fn short_path(dir: impl AsFd, name: &str) -> String {
    format!("/proc/self/fd/{}/{name}", dir.as_fd().as_raw_fd())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_is_one_plain_name() {
        for id in ["a", "web-1", "a_b+c.d", &"x".repeat(255)] {
            assert!(check_id(id).is_ok(), "{id}");
        }
        for id in
            ["", ".", "..", ".creating", ".mounts", "a/b", "a b", "ä", "a\0", &"x".repeat(256)]
        {
            assert!(check_id(id).is_err(), "{id}");
        }
    }

    #[test]
    fn unheld_mark_is_abandoned() {
        let dir = tempfile::tempdir().expect("a directory");
        let store = Store::open(dir.path().join("root")).expect("opened");
        let held = store.mark("held").expect("marked");
        assert!(matches!(store.mark("held"), Err(Error::Exists(_))));
        held.remove().expect("removed");
        drop(store.mark("left").expect("marked"));
        drop(store.mark_frozen("cold").expect("marked"));
        fs::create_dir(store.root.join(CREATING).join(".gone-1")).expect("made");
        fs::write(store.root.join(CREATING).join(".1"), "a draft").expect("written");
        let mut found: Vec<_> =
            store.abandoned().expect("listed").into_iter().map(|f| f.0).collect();
        found.sort_unstable_by_key(|left| matches!(left, Left::Creation(_)));
        assert_eq!(found, [Left::Frozen("cold".into()), Left::Creation("left".into())]);
        let names = fs::read_dir(store.root.join(CREATING)).expect("listed").count();
        assert_eq!(names, 2, "left and frozen");
        assert!(store.mark("held").is_ok());
    }
}
