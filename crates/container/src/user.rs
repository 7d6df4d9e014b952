//! User and groups of a process, read from the container's own `/etc/passwd` and `/etc/group`.
//!
//! Both files come from the image or the tenant and are hostile. They are opened inside the root
//! only, must be regular files, and are read up to a bound. A number is used as it is; a name must
//! exist in the file. An unparsable value is an error, never root.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};

use dormouse_kernel::resolve;
use dormouse_model::User;
use rustix::fs::{FileType, Mode, OFlags};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// LIMIT: bytes read of a passwd or group file; later entries are not found.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// LIMIT: supplementary groups; the kernel's own NGROUPS_MAX is 65,536.
const GROUPS_MAX: usize = 1024;

/// A resolved user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PasswdUser {
    /// User id inside.
    pub(crate) uid: u32,
    /// Group id inside.
    pub(crate) gid: u32,
    /// Supplementary groups inside.
    pub(crate) groups: Vec<u32>,
    /// Home directory, `/` if none is known.
    pub(crate) home: String,
}

/// The users and groups of one root filesystem.
#[derive(Debug, Default)]
pub(crate) struct Users {
    passwd: String,
    group: String,
}

impl Users {
    /// Reads both files below a root; a missing or irregular file counts as empty.
    pub(crate) fn read(root: BorrowedFd<'_>) -> Self {
        Self { passwd: read_file(root, "etc/passwd"), group: read_file(root, "etc/group") }
    }

    /// Finds `USER[:GROUP]`; an empty user is root.
    pub(crate) fn find(&self, user: &User) -> Result<PasswdUser> {
        let no_user = || Error::NoUser(user.0.clone());
        let (name, group) = match user.0.split_once(':') {
            Some((name, group)) => (name, Some(group)),
            None => (user.0.as_str(), None),
        };
        if (name.is_empty() && !user.0.is_empty()) || group.is_some_and(str::is_empty) {
            return Err(no_user());
        }
        let name = if name.is_empty() { "0" } else { name };
        let number = parse_id(name);
        let entry = self.passwd_entries().find(|e| match number {
            Some(uid) => e.uid == uid,
            None => e.name == name,
        });
        let uid = number.or(entry.as_ref().map(|e| e.uid)).ok_or_else(no_user)?;
        let mut gid = entry.as_ref().map_or(0, |e| e.gid);
        let mut groups = Vec::new();
        match group {
            Some(group) => {
                let found = || self.group_entries().find(|g| g.0 == group).map(|g| g.1);
                gid = parse_id(group).or_else(found).ok_or_else(no_user)?;
            }
            None => {
                if let Some(e) = &entry {
                    let member = |m: &str| m.split(',').any(|m| m == e.name);
                    let of = self.group_entries().filter(|g| member(g.2)).map(|g| g.1);
                    groups.extend(of.take(GROUPS_MAX));
                }
            }
        }
        let home = entry.map(|e| e.home).filter(|h| h.starts_with('/')).unwrap_or("/");
        Ok(PasswdUser { uid, gid, groups, home: home.to_owned() })
    }

    fn passwd_entries(&self) -> impl Iterator<Item = PasswdEntry<'_>> {
        self.passwd.lines().filter_map(|line| {
            let mut f = line.split(':');
            let name = f.next().filter(|n| !n.is_empty())?;
            let uid = parse_id(f.nth(1)?)?;
            let gid = parse_id(f.next()?)?;
            Some(PasswdEntry { name, uid, gid, home: f.nth(1).unwrap_or("/") })
        })
    }

    fn group_entries(&self) -> impl Iterator<Item = (&str, u32, &str)> {
        self.group.lines().filter_map(|line| {
            let mut f = line.split(':');
            let name = f.next().filter(|n| !n.is_empty())?;
            let gid = parse_id(f.nth(1)?)?;
            Some((name, gid, f.next().unwrap_or("")))
        })
    }
}

struct PasswdEntry<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

/// A decimal id as the kernel writes it: digits only, no leading zero, and not the `(uid_t)-1` that
/// means "no id".
fn parse_id(text: &str) -> Option<u32> {
    let plain = text.bytes().all(|b| b.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    text.parse().ok().filter(|id| plain && *id != u32::MAX)
}

/// Returns the text of a small regular file below a root; empty if there is none.
fn read_file(root: BorrowedFd<'_>, path: &str) -> String {
    // O_NONBLOCK: opening a FIFO must not block.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let Ok(fd) = resolve::in_root(root, path, flags, Mode::empty()) else {
        return String::new();
    };
    // A link into the container's /proc could lead to the host's kernel log, and reading empties the log.
    if resolve::shows_the_kernel(&fd) {
        return String::new();
    }
    let regular = rustix::fs::fstat(fd.as_fd())
        .is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::RegularFile);
    if !regular {
        return String::new();
    }
    let mut bytes = Vec::with_capacity(4096);
    match std::fs::File::from(fd).take(FILE_BYTES_MAX).read_to_end(&mut bytes) {
        Ok(_) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(_) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users() -> Users {
        Users {
            passwd: "root:x:0:0:root:/root:/bin/sh\nbad\nweb:x:33:33::/var/www:/bin/false\n\
                     01:x:5:5::/:/\nx:x:-1:0::/:/\n"
                .into(),
            group: "root:x:0:\nwww:x:33:\nssl:x:110:web,other\nadm:x:4:web\n".into(),
        }
    }

    fn find(text: &str) -> Option<(u32, u32, Vec<u32>, String)> {
        let a = users().find(&User(text.into())).ok()?;
        Some((a.uid, a.gid, a.groups, a.home))
    }

    #[test]
    fn user_is_found_exactly_or_refused() {
        assert_eq!(find(""), Some((0, 0, vec![], "/root".into())));
        assert_eq!(find("web"), Some((33, 33, vec![110, 4], "/var/www".into())));
        assert_eq!(find("33"), Some((33, 33, vec![110, 4], "/var/www".into())));
        assert_eq!(find("33:0"), Some((33, 0, vec![], "/var/www".into())));
        assert_eq!(find("web:ssl"), Some((33, 110, vec![], "/var/www".into())));
        assert_eq!(find("1000"), Some((1000, 0, vec![], "/".into())));
        assert_eq!(find("01"), Some((5, 5, vec![], "/".into())), "a name, not a number");
        for bad in [":", ":0", "0:", "nobody", "-1", "+1", "4294967295", "4294967296", "1:2:3", "٣"]
        {
            assert_eq!(find(bad), None, "{bad}");
        }
    }

    #[test]
    fn passwd_is_not_read_from_fifo_or_escaping_symlink() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("etc")).unwrap();
        let fifo = dir.path().join("etc/passwd");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, rustix::fs::Mode::RWXU, 0)
            .unwrap();
        std::os::unix::fs::symlink("/etc/group", dir.path().join("etc/group")).unwrap();
        let root = std::fs::File::open(dir.path()).unwrap();
        let a = Users::read(root.as_fd());
        assert!(a.passwd.is_empty() && a.group.is_empty());
    }
}
