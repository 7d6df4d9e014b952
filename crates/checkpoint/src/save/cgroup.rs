//! Control groups that processes have created below the container's own: read where they are
//! mounted inside, through the root of the first process.
//!
//! A process in a group that is frozen from inside can be stopped, but cannot run an injected call.
//! Such groups are [thawed](Thawed) as long as all processes are stopped.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use dormouse_kernel::proc;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::object::Survey;
use super::thread::Maps;
use super::tree::Seen;
use super::{Subject, deleted, file};
use crate::error::{Error, Refusal, Result as Outcome};
use crate::format::{CGROUPS_AT, Cgroup, Cgroups, SETTINGS, Thing};

/// LIMIT: groups in each other.
const DEPTH_MAX: usize = 32;

/// The path of the container's own group, as this process sees it.
#[derive(Debug)]
pub(crate) struct Own(String);

impl Own {
    /// The root of the cgroup2 file system that is mounted inside.
    fn of(pid: u32) -> Option<Self> {
        let table = proc::whole_text(format!("/proc/{pid}/mountinfo")).ok()?;
        // A mount that covers another one follows it in the table (proc_pid_mountinfo(5)).
        let mut lines = table.lines().rev().filter_map(|line| {
            let (before, after) = line.split_once(" - ")?;
            let words: Vec<&str> = before.split_ascii_whitespace().collect();
            Some((*words.get(3)?, *words.get(4)?, after.split_ascii_whitespace().next()?))
        });
        let (root, _, kind) = lines.find(|(_, place, _)| *place == CGROUPS_AT)?;
        (kind == "cgroup2").then(|| Self(root.trim_end_matches('/').to_owned()))
    }

    /// Makes one from a path, for tests.
    #[cfg(test)]
    pub(super) fn at(path: &str) -> Self {
        Self(path.to_owned())
    }

    /// The path of a process's group below this one, and all other groups of the process (version
    /// 1).
    pub(crate) fn split(&self, groups: &str) -> Option<(String, String)> {
        let (own, others): (Vec<&str>, Vec<&str>) =
            groups.lines().partition(|line| line.starts_with("0::"));
        let path = own.first()?.strip_prefix("0::")?.strip_prefix(self.0.as_str())?;
        let path = match path.strip_prefix('/') {
            Some(below) => below,
            None if path.is_empty() => "",
            None => return None,
        };
        Some((path.to_owned(), others.join("\n")))
    }
}

/// Finds all groups, and refuses those that cannot be saved.
pub(super) fn find(survey: &mut Survey<'_>, first: &Seen) {
    if !survey.subject.cgroups {
        return;
    }
    survey.own_cgroup = Own::of(first.pid);
    if survey.own_cgroup.is_none() {
        return;
    }
    let mut groups = Vec::new();
    let walked = walk_all(first, &mut |dir, path| {
        groups.push(group(dir, path, first.maps())?);
        Ok(())
    });
    match walked {
        Ok(()) => drop(survey.add(Thing::Cgroups(Cgroups { groups }))),
        Err(why) => survey.found.refusals.push(Refusal {
            pid: 0,
            process: String::new(),
            what: String::new(),
            why,
        }),
    }
}

/// Called for each group with its directory and its path.
type Each<'e> = dyn FnMut(&File, &str) -> Result<(), String> + 'e;

fn walk_all(first: &Seen, each: &mut Each<'_>) -> Result<(), String> {
    let place = file::lookup(first.pid, CGROUPS_AT);
    walk(&place.map_err(|e| format!("'{CGROUPS_AT}': {e}"))?, "", each)
}

fn walk(place: &OwnedFd, path: &str, each: &mut Each<'_>) -> Result<(), String> {
    let failed = |e: Errno| format!("the control group '{path}' cannot be read: {e}");
    if path.split('/').count() > DEPTH_MAX {
        return Err(format!("the control group '{path}' is too deep to be saved"));
    }
    let dir = open(place.as_fd(), ".", OFlags::RDONLY | OFlags::DIRECTORY).map_err(failed)?;
    let dir = File::from(dir);
    each(&dir, path)?;
    for entry in rustix::fs::Dir::read_from(&dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let Ok(name) = entry.file_name().to_str() else {
            return Err(format!("a control group in '{path}' with a name that is not UTF-8"));
        };
        if entry.file_type() != rustix::fs::FileType::Directory || [".", ".."].contains(&name) {
            continue;
        }
        let inner = if path.is_empty() { name.to_owned() } else { format!("{path}/{name}") };
        match open(dir.as_fd(), name, OFlags::PATH | OFlags::DIRECTORY) {
            Ok(child) => walk(&child, &inner, each)?,
            // Removed meanwhile: nothing is stopped yet.
            Err(Errno::NOENT) => {}
            Err(e) => return Err(failed(e)),
        }
    }
    Ok(())
}

fn group(dir: &File, path: &str, maps: &Maps) -> Result<Cgroup, String> {
    let failed = |e: std::io::Error| format!("the control group '{path}' cannot be read: {e}");
    let said = |name: &str| read(dir.as_fd(), name).map_err(|e| failed(e.into()));
    if said("cgroup.type")?.is_some_and(|kind| kind.starts_with("threaded")) {
        return Err(format!("the control group '{path}' has threads in it, not saved yet"));
    }
    let is_own = path.is_empty();
    let mut settings = Vec::new();
    for (name, usual) in SETTINGS.iter().filter(|_| !is_own) {
        if let Some(value) = said(name)?.filter(|value| value != usual) {
            settings.push(((*name).to_owned(), value));
        }
    }
    let owner = |uid, gid| match maps.owner(uid, gid) {
        // An id outside the container is the engine's, for processes that were started later.
        (u32::MAX, _) | (_, u32::MAX) => (0, 0),
        owner => owner,
    };
    let stat = dir.metadata().map_err(failed)?;
    let procs = open(dir.as_fd(), "cgroup.procs", OFlags::PATH).and_then(rustix::fs::fstat);
    let procs = procs.map_err(|e| failed(e.into()))?;
    let hands_down = said("cgroup.subtree_control")?.unwrap_or_default();
    Ok(Cgroup {
        path: path.to_owned(),
        mode: stat.mode() & 0o777,
        owner: owner(stat.uid(), stat.gid()),
        manager: owner(procs.st_uid, procs.st_gid),
        frozen: !is_own && said(FREEZE)?.is_some_and(|text| text != "0"),
        hands_down: hands_down.split_ascii_whitespace().map(str::to_owned).collect(),
        settings,
        attributes: deleted::attributes(dir, &format!("the control group '{path}'"))?,
    })
}

/// The file that contains whether a group itself is frozen.
const FREEZE: &str = "cgroup.freeze";

/// Groups that are thawed while all processes in them are stopped. The drop freezes them again.
///
/// ORDER: dropped before any process is released. LIMIT: a process that polls `cgroup.events`
/// inside is notified of it. If this program is killed, the groups stay thawed.
#[derive(Debug, Default)]
pub(super) struct Thawed(Vec<File>);

impl Thawed {
    /// Thaws all groups inside that are themselves frozen. All processes are stopped.
    pub(super) fn thaw(subject: &Subject, first: Option<&Seen>) -> Outcome<Self> {
        let mut thawed = Self::default();
        let first = first.filter(|first| subject.cgroups && Own::of(first.pid).is_some());
        let Some(first) = first else { return Ok(thawed) };
        let walked = walk_all(first, &mut |dir, path| {
            let failed = |e: Errno| format!("the control group '{path}' cannot be thawed: {e}");
            let said = read(dir.as_fd(), FREEZE).map_err(failed)?;
            if !path.is_empty() && said.is_some_and(|text| text != "0") {
                thawed.0.push(set_freeze(dir.as_fd(), false).map_err(failed)?);
            }
            Ok(())
        });
        walked.map(|()| thawed).map_err(Error::Elsewhere)
    }
}

impl Drop for Thawed {
    fn drop(&mut self) {
        for file in &mut self.0 {
            let _ = file.write_all(b"1"); // written before, or removed since
        }
    }
}

/// Freezes the groups inside that were frozen. `pid` is the first process, which is stopped.
pub(crate) fn freeze(pid: u32, cgroups: &Cgroups) -> Result<(), Errno> {
    for group in cgroups.groups.iter().filter(|group| group.frozen) {
        let place = file::lookup(pid, CGROUPS_AT)?;
        let dir = open(place.as_fd(), &group.path, OFlags::PATH | OFlags::DIRECTORY)?;
        set_freeze(dir.as_fd(), true)?;
    }
    Ok(())
}

fn set_freeze(dir: BorrowedFd<'_>, freeze: bool) -> Result<File, Errno> {
    let file = open(dir, FREEZE, OFlags::WRONLY | OFlags::NONBLOCK)?;
    // Another file system may be mounted there by the container.
    const CGROUP2: i64 = 0x6367_7270;
    if rustix::fs::fstatfs(&file)?.f_type != CGROUP2 {
        return Err(Errno::NOTSUP);
    }
    rustix::io::write(&file, if freeze { b"1" } else { b"0" })?;
    Ok(file.into())
}

/// Contents of a file without the last newline; `None` if there is no such file.
fn read(dir: BorrowedFd<'_>, name: &str) -> Result<Option<String>, Errno> {
    let file = match open(dir, name, OFlags::RDONLY) {
        Err(Errno::NOENT) => return Ok(None),
        other => other?,
    };
    let mut text = String::new();
    match fs::File::from(file).read_to_string(&mut text) {
        Ok(_) => Ok(Some(text.trim_end().to_owned())),
        // The group was removed meanwhile, or lacks the controller of the file.
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENODEV | libc::EOPNOTSUPP)) => Ok(None),
        Err(e) => Err(Errno::from_io_error(&e).unwrap_or(Errno::IO)),
    }
}

fn open(dir: BorrowedFd<'_>, name: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::openat2(dir, name, flags, Mode::empty(), how)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_identified_by_its_path_below_the_containers_own() {
        let own = Own("/house/a".into());
        let split = |text| own.split(text);
        let others = "9:cpu:/x\n1:name=systemd:/".to_owned();
        let found = split("9:cpu:/x\n1:name=systemd:/\n0::/house/a/b.slice/c\n");
        assert_eq!(found, Some(("b.slice/c".into(), others)));
        assert_eq!(split("0::/house/a\n"), Some((String::new(), String::new())));
        assert_eq!(split("0::/house/ab\n"), None);
        assert_eq!(split("0::/\n"), None);
        assert_eq!(Own(String::new()).split("0::/b\n"), Some(("b".into(), String::new())));
    }
}
