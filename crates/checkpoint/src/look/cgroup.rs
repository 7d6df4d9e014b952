//! Control groups that processes have created below the container's own, where they are mounted inside.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dormouse_kernel::proc;
use dormouse_record::{CGROUPS_AT, Cgroups};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::file;

/// LIMIT: groups in each other.
const DEPTH_MAX: usize = 32;

/// The path of the container's own group, as this process sees it.
#[derive(Debug)]
pub(crate) struct Own(String);

impl Own {
    /// The root of the cgroup2 file system that is mounted inside.
    pub(crate) fn of(pid: u32) -> Option<Self> {
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
    pub(crate) fn at(path: &str) -> Self {
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

/// Called for each group with its directory and its path.
pub(crate) type Each<'e> = dyn FnMut(&File, &str) -> Result<(), String> + 'e;

/// Calls `each` for every group inside, parents first. `first` is the first process, by the host's id.
pub(crate) fn walk_all(first: u32, each: &mut Each<'_>) -> Result<(), String> {
    let place = file::lookup(first, CGROUPS_AT);
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

/// The file that contains whether a group itself is frozen.
pub(crate) const FREEZE: &str = "cgroup.freeze";

/// Freezes the groups inside that were frozen. `pid` is the first process, which is stopped.
pub(crate) fn freeze(pid: u32, cgroups: &Cgroups) -> Result<(), Errno> {
    for group in cgroups.groups.iter().filter(|group| group.frozen) {
        let place = file::lookup(pid, CGROUPS_AT)?;
        let dir = open(place.as_fd(), &group.path, OFlags::PATH | OFlags::DIRECTORY)?;
        set_freeze(dir.as_fd(), true)?;
    }
    Ok(())
}

/// Freezes or thaws a group; returns its open file [`FREEZE`].
pub(crate) fn set_freeze(dir: BorrowedFd<'_>, freeze: bool) -> Result<File, Errno> {
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
pub(crate) fn read(dir: BorrowedFd<'_>, name: &str) -> Result<Option<String>, Errno> {
    let file = match open(dir, name, OFlags::RDONLY) {
        Err(Errno::NOENT) => return Ok(None),
        other => other?,
    };
    let mut text = String::new();
    match File::from(file).read_to_string(&mut text) {
        Ok(_) => Ok(Some(text.trim_end().to_owned())),
        // The group was removed meanwhile, or lacks the controller of the file.
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENODEV | libc::EOPNOTSUPP)) => Ok(None),
        Err(e) => Err(Errno::from_io_error(&e).unwrap_or(Errno::IO)),
    }
}

/// Opens a file or group of a group, through no symbolic link and on the same mount.
pub(crate) fn open(dir: BorrowedFd<'_>, name: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::openat2(dir, name, flags, Mode::empty(), how)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_is_identified_by_its_path_below_the_containers_own() {
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
