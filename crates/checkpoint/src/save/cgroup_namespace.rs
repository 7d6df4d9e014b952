//! Cgroup namespaces: the control group at the root of each. From inside a namespace the kernel
//! shows the group of any process by its path from that root (cgroup_namespaces(7)), from outside
//! by its whole path. Any process below the root is therefore enough to find it.

use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::call::Namespace;
use dormouse_kernel::{namespace, pidfd, proc};
use dormouse_record::{CgroupNamespace, Thing};

use super::known::namespace::Links;
use super::refusal::Reason;
use super::seen::{Seen, link_of_first};
use super::survey::Survey;
use crate::look::cgroup::Own;

/// The object of the namespace of a process.
pub(super) fn of(survey: &mut Survey<'_>, links: &Links) -> Result<Option<usize>, Reason> {
    let Some(link) = &links.cgroup else { return Ok(None) };
    match survey.cgroup_namespaces.by_link.get(link) {
        Some(Ok(object)) => Ok(Some(*object)),
        Some(Err(why)) => Err(format!("it is in a cgroup namespace of its own {why}")),
        None => Err(survey.passing("it has made a cgroup namespace just now".into())),
    }
}

/// Finds all namespaces.
pub(super) fn find(survey: &mut Survey<'_>, tree: &[Seen]) {
    let container = link_of_first(survey.subject.init, tree, "cgroup");
    for seen in tree.iter().filter(|seen| !seen.is_zombie) {
        // The process may have exited meanwhile: nothing is stopped yet.
        let is_another = |link: &&str| Some(*link) != container.as_deref();
        let Some(link) = seen.link("cgroup").filter(is_another) else { continue };
        if survey.cgroup_namespaces.by_link.contains_key(link) {
            continue;
        }
        let opened = |seen: &Seen| pidfd::namespace(seen.pidfd.as_ref()?, Namespace::Cgroup).ok();
        let Some(namespace) = opened(seen) else { continue };
        let root = root(survey.own_cgroup.as_ref(), tree, &namespace);
        let found = root.map(|root| survey.add(Thing::CgroupNamespace(CgroupNamespace { root })));
        survey.cgroup_namespaces.by_link.insert(link.to_owned(), found);
    }
}

/// The group at the root of a namespace, by its path below the container's own.
fn root(own: Option<&Own>, tree: &[Seen], namespace: &OwnedFd) -> Result<String, Reason> {
    let pids: Vec<u32> = tree.iter().filter(|seen| !seen.is_zombie).map(|seen| seen.pid).collect();
    let groups = || -> Vec<String> {
        let text = |pid: &u32| proc::whole_text(format!("/proc/{pid}/cgroup"));
        pids.iter().map(|pid| text(pid).unwrap_or_default()).collect()
    };
    let inside = namespace::visit(namespace.as_fd(), Namespace::Cgroup, groups);
    let inside = inside.map_err(|e| format!("that cannot be inspected: {e}"))?;
    let found = groups().iter().zip(&inside).find_map(|(out, inside)| root_by(own, out, inside));
    found.unwrap_or_else(|| {
        Err("with no process below its root, which may be gone: that is not saved yet".into())
    })
}

/// The same by the groups of one process, as seen from outside and inside; `None` if the process is
/// not below the root.
fn root_by(own: Option<&Own>, outside: &str, inside: &str) -> Option<Result<String, Reason>> {
    const VERSION_2: &str = "0::/";
    let others: Vec<&str> = inside.lines().filter(|line| !line.starts_with(VERSION_2)).collect();
    let below = inside.lines().find_map(|line| line.strip_prefix(VERSION_2));
    if outside.is_empty() || inside.is_empty() || below.is_some_and(is_above) {
        return None;
    }
    // HIERARCHY:CONTROLLERS:PATH
    let is_at_the_root = |line: &&str| line.splitn(3, ':').nth(2) == Some("/");
    if !others.iter().all(is_at_the_root) {
        let why = "with another root in a hierarchy of version 1, which is not saved yet";
        return Some(Err(why.into()));
    }
    let path = match own {
        Some(own) => own.split(outside)?.0,
        None => String::new(),
    };
    let below = below.unwrap_or_default();
    let root = match path.strip_suffix(below) {
        Some(root) if below.is_empty() || root.is_empty() => Some(root),
        Some(root) => root.strip_suffix('/'),
        None => None,
    };
    Some(
        root.map(str::to_owned).ok_or_else(|| "with a root above the container's own group".into()),
    )
}

/// Whether a path, without its leading slash, leads out of the directory that it starts from.
fn is_above(path: &str) -> bool {
    path == ".." || path.starts_with("../")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_is_the_difference_of_the_two_paths() {
        let own = Own::at("/house/a");
        let root = |outside: &str, inside: &str| {
            let lines = |path: &str, other: &str| format!("9:pids:{other}\n0::{path}\n");
            root_by(Some(&own), &lines(outside, "/house/a"), &lines(inside, "/"))
        };
        let path = |root: &str| Some(Ok(root.to_owned()));
        assert_eq!(root("/house/a/b.slice/c", "/"), path("b.slice/c"));
        assert_eq!(root("/house/a/b.slice/c", "/c"), path("b.slice"));
        assert_eq!(root("/house/a/b.slice/c", "/b.slice/c"), path(""));
        assert_eq!(root("/house/a", "/"), path(""));
        assert_eq!(root("/house/a/b", "/../b"), None);
        assert_eq!(
            root("/house/a/b", "/..b"),
            Some(Err("with a root above the container's own group".into()))
        );
        assert!(root("/house/a/b", "/house/a/b").unwrap().is_err());
        assert_eq!(root("/elsewhere", "/"), None);
        assert_eq!(root_by(None, "0::/house/a\n", "0::/\n"), path(""));
        assert_eq!(root_by(None, "1:pids:/house/a\n", "1:pids:/\n"), path(""));
        assert!(root_by(None, "1:pids:/house/a\n", "1:pids:/a\n").unwrap().is_err());
        assert_eq!(root_by(None, "", ""), None);
    }
}
