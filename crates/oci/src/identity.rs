//! Ids inside and outside of a container's user namespace.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dormouse_kernel::{proc, resolve, weakened};
use rustix::fs::{FileType, Mode, OFlags};

use crate::error::{Error, Result};
use crate::spec::IdMapping;

/// LIMIT: longest `/etc/passwd` that is read.
const LARGEST_PASSWD: usize = 1 << 20;

/// The maps of a user namespace; `None` without one.
#[derive(Debug, Default)]
pub(crate) struct Ids {
    uid: Option<Vec<IdMapping>>,
    gid: Option<Vec<IdMapping>>,
}

impl Ids {
    /// Reads the maps of a process, as this process sees them.
    pub(crate) fn of(pid: u32) -> Result<Self> {
        let read = |name: &str| -> Result<_> {
            let path = format!("/proc/{pid}/{name}");
            let text = proc::read_text(&path, 1 << 16)
                .map_err(Error::call("read the ids of a process"))?;
            Ok(Some(parse_map(&text)))
        };
        Ok(Self { uid: read("uid_map")?, gid: read("gid_map")? })
    }

    /// Returns the host's id of a user inside.
    pub(crate) fn host_uid(&self, inside: u32) -> Option<u32> {
        to_host(self.uid.as_deref(), inside)
    }

    /// Returns the host's id of a group inside.
    pub(crate) fn host_gid(&self, inside: u32) -> Option<u32> {
        to_host(self.gid.as_deref(), inside)
    }
}

impl Ids {
    /// Returns how many ids there are inside, from 0 on.
    pub(crate) fn count_from_zero(&self) -> u32 {
        let all = |map: &Option<Vec<IdMapping>>| {
            let Some(map) = map else { return u32::MAX };
            let mut sorted: Vec<&IdMapping> = map.iter().collect();
            sorted.sort_unstable_by_key(|one| one.container_id);
            let step = |end: u32, one: &&IdMapping| match one.container_id == end {
                true => end.saturating_add(one.size),
                false => end,
            };
            sorted.iter().fold(0, step)
        };
        all(&self.uid).min(all(&self.gid))
    }
}

fn to_host(map: Option<&[IdMapping]>, inside: u32) -> Option<u32> {
    let Some(map) = map else { return Some(inside) };
    map.iter().find_map(|one| {
        let offset = inside.checked_sub(one.container_id).filter(|o| *o < one.size)?;
        one.host_id.checked_add(offset)
    })
}

fn parse_map(text: &str) -> Vec<IdMapping> {
    let line = |line: &str| {
        let mut numbers = line.split_whitespace().map(str::parse);
        match (numbers.next(), numbers.next(), numbers.next()) {
            (Some(Ok(container_id)), Some(Ok(host_id)), Some(Ok(size))) => {
                Some(IdMapping { container_id, host_id, size })
            }
            _ => None,
        }
    };
    text.lines().filter_map(line).collect()
}

/// Formats the text for `uid_map` and `gid_map`.
pub(crate) fn map_text(map: &[IdMapping]) -> String {
    map.iter().map(|m| format!("{} {} {}\n", m.container_id, m.host_id, m.size)).collect()
}

/// Returns the home directory of a user by the `/etc/passwd` of a root filesystem; `/` without an
/// entry. The file may be an attacker's: only a regular file is read, up to a bound.
pub(crate) fn home(root: BorrowedFd<'_>, uid: u32) -> String {
    let text = open_passwd(root).and_then(|file| read(file.as_fd())).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let own = text.lines().find_map(|line| {
        let fields: Vec<_> = line.split(':').collect();
        (fields.len() >= 6 && fields[2].parse() == Ok(uid)).then(|| fields[5].to_owned())
    });
    own.filter(|home| home.starts_with('/')).unwrap_or_else(|| "/".to_owned())
}

fn open_passwd(root: BorrowedFd<'_>) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
    // ORDER: opened with O_PATH first: opening a device or a pipe may have side effects.
    let path = "etc/passwd";
    if weakened("plain-passwd") {
        return resolve::in_root(root, path, OFlags::RDONLY, Mode::empty()).ok();
    }
    let place = resolve::in_root(root, path, OFlags::PATH, Mode::empty()).ok()?;
    let stat = rustix::fs::fstat(&place).ok()?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return None;
    }
    let file = resolve::in_root(root, path, flags, Mode::empty()).ok()?;
    let again = rustix::fs::fstat(&file).ok()?;
    ((stat.st_dev, stat.st_ino) == (again.st_dev, again.st_ino)).then_some(file)
}

fn read(file: BorrowedFd<'_>) -> Option<Vec<u8>> {
    let mut text = vec![0; LARGEST_PASSWD];
    let mut length = 0;
    while length < text.len() {
        match rustix::io::read(file, &mut text[length..]).ok()? {
            0 => break,
            n => length += n,
        }
    }
    text.truncate(length);
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inside_id_maps_to_one_host_id_or_none() {
        let map = parse_map("         0     100000      1000\n      2000          5         1\n");
        let ids = Ids { uid: Some(map), gid: None };
        assert_eq!(ids.host_uid(0), Some(100_000));
        assert_eq!(ids.host_uid(999), Some(100_999));
        assert_eq!(ids.host_uid(1000), None);
        assert_eq!(ids.host_uid(2000), Some(5));
        assert_eq!(ids.host_gid(7), Some(7));
        assert_eq!(ids.count_from_zero(), 1000);
    }

    #[test]
    fn home_is_read_from_a_regular_file_only() {
        let dir = tempfile::tempdir().expect("a directory");
        let etc = dir.path().join("etc");
        std::fs::create_dir(&etc).expect("made");
        let root = std::fs::File::open(dir.path()).expect("opened");
        assert_eq!(home(root.as_fd(), 0), "/");
        std::fs::write(etc.join("passwd"), "root:x:0:0::/root:/bin/sh\na:x:7:7::/a:\n").expect("");
        assert_eq!(home(root.as_fd(), 0), "/root");
        assert_eq!(home(root.as_fd(), 7), "/a");
        assert_eq!(home(root.as_fd(), 8), "/");
        std::fs::remove_file(etc.join("passwd")).expect("removed");
        std::os::unix::fs::symlink("/dev/zero", etc.join("passwd")).expect("linked");
        assert_eq!(home(root.as_fd(), 0), "/");
    }
}
