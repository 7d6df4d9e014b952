//! The namespaces of a container: new ones, and existing ones to join.

use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::call::CloneFlags;
use dormouse_kernel::namespace;
use rustix::fs::{Mode, OFlags};

use crate::error::{Error, Result};
use crate::spec::Namespace;

/// The words of the specification, with the kernel's flags.
const KINDS: [(&str, CloneFlags); 8] = [
    ("user", CloneFlags::NEWUSER),
    ("pid", CloneFlags::NEWPID),
    ("network", CloneFlags::NEWNET),
    ("mount", CloneFlags::NEWNS),
    ("ipc", CloneFlags::NEWIPC),
    ("uts", CloneFlags::NEWUTS),
    ("cgroup", CloneFlags::NEWCGROUP),
    ("time", CloneFlags::NEWTIME),
];

/// Returns all kinds, for `features`.
pub(crate) fn kinds() -> impl Iterator<Item = &'static str> {
    KINDS.iter().map(|(word, _)| *word)
}

/// Returns the flag of a kind.
pub(crate) fn flag(word: &str) -> Option<CloneFlags> {
    KINDS.iter().find(|(known, _)| *known == word).map(|(_, flag)| *flag)
}

#[derive(Debug)]
struct One {
    word: &'static str,
    flag: CloneFlags,
    path: Option<String>,
}

/// The namespaces of a configuration.
#[derive(Debug)]
pub(crate) struct Namespaces(Vec<One>);

impl Namespaces {
    /// Checks the list.
    pub(crate) fn check(list: &[Namespace]) -> Result<Self> {
        let mut all: Vec<One> = Vec::new();
        for (at, given) in list.iter().enumerate() {
            let field = |name: &str| format!("linux.namespaces[{at}].{name}");
            let Some((word, flag)) = KINDS.iter().find(|(word, _)| *word == given.kind) else {
                return Err(Error::field(
                    field("type"),
                    format!("there is no namespace {:?}", given.kind),
                ));
            };
            if all.iter().any(|one| one.word == *word) {
                return Err(Error::field(field("type"), format!("{word:?} is listed twice")));
            }
            let path = given.path.clone().filter(|p| !p.is_empty());
            if path.as_ref().is_some_and(|p| !p.starts_with('/') || p.contains('\0')) {
                return Err(Error::field(field("path"), "it is not an absolute path"));
            }
            all.push(One { word, flag: *flag, path });
        }
        Ok(Self(all))
    }

    /// Returns whether the container has a namespace of this kind other than the caller's.
    pub(crate) fn has(&self, word: &str) -> bool {
        self.0.iter().any(|one| one.word == word)
    }

    /// Returns whether the container gets a new namespace of this kind.
    pub(crate) fn makes(&self, word: &str) -> bool {
        self.0.iter().any(|one| one.word == word && one.path.is_none())
    }

    /// Returns the flags of the new ones.
    pub(crate) fn new_flags(&self) -> CloneFlags {
        self.0.iter().filter(|one| one.path.is_none()).map(|one| one.flag).collect()
    }

    /// Returns the names of all kinds.
    pub(crate) fn words(&self) -> Vec<String> {
        self.0.iter().map(|one| one.word.to_owned()).collect()
    }

    /// Opens the namespaces to join; each must be of the declared kind.
    pub(crate) fn open(&self) -> Result<Vec<(CloneFlags, OwnedFd)>> {
        let mut opened = Vec::new();
        for (at, one) in self.0.iter().enumerate() {
            let Some(path) = &one.path else { continue };
            let field = || format!("linux.namespaces[{at}].path");
            let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
            let fd = rustix::fs::open(path.as_str(), flags, Mode::empty())
                .map_err(|e| Error::field(field(), format!("{path}: {e}")))?;
            match namespace::kind(fd.as_fd()) {
                Ok(kind) if kind == one.flag => opened.push((one.flag, fd)),
                _ => {
                    let why = format!("{path} is no {} namespace", one.word);
                    return Err(Error::field(field(), why));
                }
            }
        }
        Ok(opened)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(kinds: &[(&str, Option<&str>)]) -> Vec<Namespace> {
        let one = |(kind, path): &(&str, Option<&str>)| Namespace {
            kind: (*kind).to_owned(),
            path: path.map(str::to_owned),
        };
        kinds.iter().map(one).collect()
    }

    fn why(kinds: &[(&str, Option<&str>)]) -> String {
        Namespaces::check(&list(kinds)).expect_err("it is bad").to_string()
    }

    #[test]
    fn duplicate_or_unknown_namespace_is_refused() {
        assert!(why(&[("pid", None), ("pid", None)]).starts_with("linux.namespaces[1].type"));
        assert!(why(&[("net", None)]).starts_with("linux.namespaces[0].type"));
        assert!(why(&[("pid", Some("a"))]).starts_with("linux.namespaces[0].path"));
    }

    #[test]
    fn namespace_path_must_have_declared_kind() {
        let good = list(&[("uts", Some("/proc/self/ns/uts"))]);
        assert_eq!(Namespaces::check(&good).expect("good").open().expect("opened").len(), 1);
        for path in ["/proc/self/ns/net", "/dev/null", "/nowhere"] {
            let bad = Namespaces::check(&list(&[("uts", Some(path))])).expect("checked");
            let why = bad.open().expect_err("it is bad").to_string();
            assert!(why.starts_with("linux.namespaces[0].path"), "{why}");
        }
    }
}
