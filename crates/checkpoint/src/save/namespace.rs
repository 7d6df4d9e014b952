//! The namespaces and control groups of a process, compared with those of the first process.

use dormouse_kernel::{namespace, proc};

use super::known::namespace::{Home, Links};
use super::seen::{NAMESPACES, Seen};
use super::survey::Survey;
use crate::look::cgroup::Own;

/// The links of all namespaces of a thread.
fn namespaces(pid: u32, tid: u32) -> [Option<String>; NAMESPACES.len()] {
    NAMESPACES.map(|name| namespace::link(pid, tid, name))
}

/// The same of a process, cached.
fn own_namespaces(seen: &Seen) -> [Option<String>; NAMESPACES.len()] {
    NAMESPACES.map(|name| seen.link(name).map(str::to_owned))
}

/// The control group of a process below the container's own, if groups inside are saved, and the
/// groups that must be the same for all processes.
fn cgroups(pid: u32, own: Option<&Own>) -> Option<(Option<String>, String)> {
    let text = proc::whole_text(format!("/proc/{pid}/cgroup")).ok()?;
    match own {
        Some(own) => own.split(&text).map(|(path, others)| (Some(path), others)),
        None => Some((None, text)),
    }
}

/// The control group of a process below the container's own.
pub(super) fn cgroup(pid: u32, survey: &Survey<'_>) -> Option<String> {
    cgroups(pid, Some(survey.own_cgroup.as_ref()?))?.0
}

/// Compares a process with the first one: returns the differences that cannot be saved, and those
/// that can.
pub(super) fn elsewhere(seen: &Seen, survey: &Survey<'_>) -> (Vec<String>, Links) {
    let groups = |pid| cgroups(pid, survey.own_cgroup.as_ref()).map(|(_, others)| others);
    let first = survey.home.get_or_init(|| {
        let fields = proc::fields(seen.first).ok()?; // it may have exited
        Some(Home {
            depth: fields.pids().len(),
            namespaces: namespaces(seen.first, seen.first),
            cgroups: groups(seen.first),
        })
    });
    let Some(first) = first else { return Default::default() };
    let own = Home {
        depth: seen.fields.pids().len(),
        namespaces: own_namespaces(seen),
        cgroups: groups(seen.pid),
    };
    let of_its_own =
        |name: &str| format!("it is in a {name} namespace of its own, which is not saved yet");
    let mut all = Vec::new();
    // One number per pid namespace.
    all.extend((own.depth != first.depth).then(|| of_its_own("pid")));
    let mut apart = Links::default();
    let pairs = own.namespaces.iter().zip(&first.namespaces).zip(NAMESPACES);
    for ((own, _), name) in pairs.filter(|((own, first), _)| own != first) {
        match name {
            "mnt" => apart.mounts.clone_from(own),
            "uts" => apart.uts.clone_from(own),
            "ipc" => apart.ipc.clone_from(own),
            "net" => apart.net.clone_from(own),
            "time" => apart.time.clone_from(own),
            "cgroup" => apart.cgroup.clone_from(own),
            // Compared with the process's own time namespace below.
            "time_for_children" => {}
            "user" => apart.user.clone_from(own),
            _ => all.push(of_its_own(name)),
        }
    }
    if own.cgroups != first.cgroups {
        all.push("it is in a control group of its own, which is not saved".into());
    }
    (all, apart)
}

/// Whether a thread is in other namespaces than its process. Only CAP_SYS_ADMIN allows that.
pub(super) fn has_threads_apart(seen: &Seen) -> bool {
    const SYS_ADMIN: u64 = 1 << 21;
    let bound = seen.fields.field("CapBnd").and_then(|mask| u64::from_str_radix(mask, 16).ok());
    if seen.tids.len() == 1 || bound.is_some_and(|mask| mask & SYS_ADMIN == 0) {
        return false;
    }
    let own = own_namespaces(seen);
    let mut others = seen.tids.iter().skip(1).map(|tid| namespaces(seen.pid, *tid));
    // A thread that exits has none.
    others.any(|other| other != own && other.iter().chain(&own).all(Option::is_some))
}
