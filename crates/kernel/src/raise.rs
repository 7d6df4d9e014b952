//! Parameters of the host (sysctl(8)) are raised, and stay raised over a boot.
//!
//! The file of `sysctl.d` with the values is written first, at once (rename(2)), and then the parameters are set. An
//! interrupted run therefore leaves a file whose values hold from the next boot on, and the next run sets the rest. A
//! value is never lowered: neither that of the kernel, nor one that an earlier run has written into the file. Lines of
//! the operator in the file are kept.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::scale::{Limit, Verdict};

/// The directories in which parameters are set.
#[derive(Debug, Clone)]
pub struct Places {
    /// `/proc/sys`
    pub parameters: PathBuf,
    /// The file that sets them at a boot.
    pub file: PathBuf,
}

impl Default for Places {
    fn default() -> Self {
        Self { parameters: "/proc/sys".into(), file: "/etc/sysctl.d/90-dormouse.conf".into() }
    }
}

/// A parameter that is too low.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Its name, such as `kernel.pid_max`.
    pub name: &'static str,
    /// The value before.
    pub old: u64,
    /// The value that it is to have.
    pub new: u64,
}

impl Change {
    /// The command that sets the old value.
    pub fn undo(&self) -> String {
        format!("sysctl {}={}", self.name, self.old)
    }
}

/// Why parameters were not set.
#[derive(Debug, thiserror::Error)]
pub enum RaiseError {
    /// The file could not be read or written.
    #[error("cannot write {path}")]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The kernel refused a value.
    #[error("cannot set {name} to {value}")]
    Set {
        /// The parameter.
        name: &'static str,
        /// The value.
        value: u64,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// Returns the parameters among these limits that are too low, each once.
pub fn changes(limits: &[Limit]) -> Vec<Change> {
    let mut all: Vec<Change> = Vec::new();
    for limit in limits.iter().filter(|limit| limit.verdict != Verdict::Enough) {
        let Some((old, new)) = limit.have.zip(limit.raise).filter(|(old, new)| old < new) else {
            continue;
        };
        match all.iter_mut().find(|change| change.name == limit.name) {
            Some(change) => change.new = change.new.max(new),
            None => all.push(Change { name: limit.name, old, new }),
        }
    }
    all
}

/// Sets parameters, now and at each boot. Calls `done` after each one that was set. One that cannot be set keeps no
/// other from it, and is the error.
pub fn raise(
    places: &Places,
    changes: &[Change],
    mut done: impl FnMut(&Change),
) -> Result<(), RaiseError> {
    if changes.is_empty() {
        return Ok(());
    }
    keep(places, changes)?;
    let mut first = None;
    for change in changes {
        let (name, value) = (change.name, change.new);
        let path = places.parameters.join(name.replace('.', "/"));
        let set = || -> io::Result<()> {
            let now = fs::read_to_string(&path)?;
            // Another program may have raised it meanwhile.
            if now.trim().parse::<u64>().is_ok_and(|now| now >= value) {
                return Ok(());
            }
            // One write(2), and no O_TRUNC or O_CREAT.
            fs::OpenOptions::new().write(true).open(&path)?.write_all(value.to_string().as_bytes())
        };
        match set() {
            Ok(()) => done(change),
            Err(source) => {
                first.get_or_insert(RaiseError::Set { name, value, source });
            }
        }
    }
    first.map_or(Ok(()), Err)
}

const HEADER: &str = "\
# Written by `dormouse check --fix`: limits of the kernel for containers. Remove this file, and set the old values, to
# undo it. Larger values are kept.
";

/// Writes the values into the file.
fn keep(places: &Places, changes: &[Change]) -> Result<(), RaiseError> {
    let path = &places.file;
    let write = || -> io::Result<()> {
        let old = match fs::read_to_string(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
            other => other?,
        };
        let new = text(&old, changes);
        if new == old {
            return Ok(());
        }
        let dir = path.parent().unwrap_or(Path::new("/"));
        fs::DirBuilder::new().recursive(true).mode(0o755).create(dir)?;
        // Names that begin with a dot, or do not end with .conf, are no files of parameters (sysctl.d(5)).
        let part = dir.join(format!(".90-dormouse.{}", std::process::id()));
        let written = write_file(&part, &new).and_then(|()| fs::rename(&part, path));
        written.inspect_err(|_| {
            let _ = fs::remove_file(&part); // the first error is returned
        })?;
        fs::File::open(dir)?.sync_all()
    };
    write().map_err(|source| RaiseError::File { path: path.clone(), source })
}

fn write_file(path: &Path, text: &str) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o644).open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

/// Returns the text of the file with these values.
fn text(old: &str, changes: &[Change]) -> String {
    let value_of = |line: &str, name: &str| -> Option<u64> {
        let (key, value) = line.split_once('=')?;
        // sysctl.d(5): a slash stands for a dot, and a leading minus sign for a value that may fail.
        let key = key.trim().trim_start_matches('-').replace('/', ".");
        (key == name).then(|| value.trim().parse().ok())?
    };
    let mut lines: Vec<String> =
        if old.is_empty() { HEADER } else { old }.lines().map(Into::into).collect();
    for change in changes {
        let known = lines.iter_mut().find(|line| value_of(line, change.name).is_some());
        let line = format!("{} = {}", change.name, change.new);
        match known {
            Some(known) if value_of(known, change.name) >= Some(change.new) => {}
            Some(known) => *known = line,
            None => lines.push(line),
        }
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(values: &[(&str, &str)]) -> (tempfile::TempDir, Places) {
        let dir = tempfile::tempdir().unwrap();
        let places = Places {
            parameters: dir.path().join("proc"),
            file: dir.path().join("etc/sysctl.d/90-dormouse.conf"),
        };
        for (name, value) in values {
            let path = places.parameters.join(name.replace('.', "/"));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, value).unwrap();
        }
        (dir, places)
    }

    fn change(name: &'static str, old: u64, new: u64) -> Change {
        Change { name, old, new }
    }

    fn value(places: &Places, name: &str) -> String {
        fs::read_to_string(places.parameters.join(name.replace('.', "/"))).unwrap()
    }

    #[test]
    fn raised_parameters_are_set_and_written_for_the_next_boot() {
        // A write does not truncate a file of procfs, so the new value is as long as the old one.
        let (_dir, places) = scratch(&[("kernel.pid_max", "32768"), ("fs.aio-max-nr", "65536")]);
        let changes =
            [change("kernel.pid_max", 32_768, 65_536), change("fs.aio-max-nr", 65_536, 99_999)];
        let mut set = Vec::new();
        raise(&places, &changes, |it| set.push(it.undo())).unwrap();
        assert_eq!(set, ["sysctl kernel.pid_max=32768", "sysctl fs.aio-max-nr=65536"]);
        assert_eq!(value(&places, "kernel.pid_max"), "65536");
        let text = fs::read_to_string(&places.file).unwrap();
        let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(lines, ["kernel.pid_max = 65536", "fs.aio-max-nr = 99999"]);
        let files = fs::read_dir(places.file.parent().unwrap()).unwrap().count();
        assert_eq!(files, 1, "no part is left");
    }

    #[test]
    fn larger_values_are_kept_in_kernel_and_file() {
        let (_dir, places) = scratch(&[("kernel.pid_max", "99999"), ("fs.aio-max-nr", "65536")]);
        fs::create_dir_all(places.file.parent().unwrap()).unwrap();
        fs::write(&places.file, "# mine\nfs/aio-max-nr=2000000\nvm.swappiness = 1\n").unwrap();
        // The first has been raised by another program since it was read.
        let changes =
            [change("kernel.pid_max", 32_768, 65_536), change("fs.aio-max-nr", 65_536, 99_998)];
        raise(&places, &changes, |_| {}).unwrap();
        assert_eq!(value(&places, "kernel.pid_max"), "99999");
        assert_eq!(value(&places, "fs.aio-max-nr"), "99998");
        let text = fs::read_to_string(&places.file).unwrap();
        let expected = "# mine\nfs/aio-max-nr=2000000\nvm.swappiness = 1\nkernel.pid_max = 65536\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn nothing_is_written_without_a_change() {
        let (_dir, places) = scratch(&[]);
        raise(&places, &[], |_| panic!("nothing was to be set")).unwrap();
        assert!(!places.file.exists());
    }

    #[test]
    fn value_that_the_kernel_refuses_is_named() {
        let (_dir, places) = scratch(&[("fs.aio-max-nr", "1")]);
        let changes = [change("kernel.pid_max", 1, 2), change("fs.aio-max-nr", 1, 2)];
        let error = raise(&places, &changes, |_| {}).unwrap_err();
        assert_eq!(error.to_string(), "cannot set kernel.pid_max to 2");
        assert_eq!(value(&places, "fs.aio-max-nr"), "2");
        assert!(places.file.exists(), "the value holds from the next boot on");
    }

    #[test]
    fn changes_are_the_low_parameters_with_the_larger_of_two_needs() {
        let limit = |name, have, need, raise| Limit {
            raise,
            ..Limit::new(name, have, need, "", String::new())
        };
        let all = [
            limit("a", Some(1), 2, Some(4)),
            limit("a", Some(1), 5, Some(8)),
            limit("b", Some(9), 2, Some(4)),
            limit("c", None, 2, Some(4)),
            limit("superblocks", Some(1), 2, None),
        ];
        assert_eq!(changes(&all), [change("a", 1, 8)]);
    }
}
