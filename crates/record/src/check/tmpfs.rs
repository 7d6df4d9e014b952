//! Checks of files in memory: each name is below its directory.

use std::collections::HashSet;

use super::{Found, TEXT_MAX, ensure};
use crate::{Tmpfs, TmpfsKind};

/// LIMIT: entries of one tmpfs.
const ENTRIES_MAX: usize = 1 << 20;

pub(super) fn names(tmpfs: &Tmpfs) -> Found {
    let text = |text: &str| !text.is_empty() && text.len() < TEXT_MAX && !text.contains('\0');
    let target = tmpfs.target.starts_with('/') && text(&tmpfs.target);
    ensure(target && tmpfs.entries.len() <= ENTRIES_MAX, || "its directory".into())?;
    let mut files = HashSet::new();
    for entry in &tmpfs.entries {
        let part = |part: &str| !part.is_empty() && part != "." && part != "..";
        let sound = text(&entry.path) && entry.path.split('/').all(part);
        ensure(sound, || format!("the path '{}'", entry.path.escape_debug()))?;
        let is_file = matches!(entry.what, TmpfsKind::File { .. });
        if is_file {
            files.insert(entry.path.as_str());
        }
        // A checkpoint must not create a file that gives root's rights to a process that executes
        // it.
        let mode = if is_file { 0o1777 } else { 0o7777 };
        ensure(entry.mode & !mode == 0, || format!("the mode of '{}'", entry.path))?;
        let link = match &entry.what {
            TmpfsKind::Link { to } => text(to),
            TmpfsKind::Name { of } => files.contains(of.as_str()),
            _ => true,
        };
        ensure(link, || format!("the link '{}'", entry.path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TmpfsEntry;

    #[test]
    fn paths_outside_of_the_directory_are_refused() {
        let with = |path: &str, mode, what: TmpfsKind| {
            let path = path.to_owned();
            let entry = TmpfsEntry { path, mode, uid: 0, gid: 0, modified_ns: 0, what };
            names(&Tmpfs { target: "/dev/shm".into(), namespace: None, entries: vec![entry] })
        };
        let file = || TmpfsKind::File { bytes: 0, runs: Vec::new() };
        assert!(with("a/b", 0o644, file()).is_ok());
        assert!(with("a", 0o1777, TmpfsKind::Directory).is_ok());
        for path in ["", "/a", "a/", "a//b", "../a", "a/../b", ".", "a\0b"] {
            assert!(with(path, 0o644, file()).is_err(), "{path:?}");
        }
        assert!(with("a", 0o4755, file()).is_err(), "set-user-ID");
        assert!(with("a", 0o777, TmpfsKind::Link { to: String::new() }).is_err());
        assert!(with("a", 0o600, TmpfsKind::Name { of: "../b".into() }).is_err());
    }
}
