//! Leftovers on a host, found by inspection rather than by a program's own report.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::wait_until;

/// The directory of the kernel's cgroup hierarchies, v1 or v2.
const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// The directories of one cgroup name in every hierarchy of the machine.
pub fn cgroups(name: &str) -> Vec<PathBuf> {
    let mut roots = vec![PathBuf::from(CGROUP_ROOT)];
    if let Ok(listing) = fs::read_dir(CGROUP_ROOT) {
        roots.extend(listing.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()));
    }
    roots.into_iter().map(|root| root.join(name)).filter(|path| path.is_dir()).collect()
}

/// Removes one cgroup name and all below it, in every hierarchy of the machine. No other directory is
/// read: cgroups of other tests come and go meanwhile, and find(1) fails on a directory that is gone.
pub fn remove_cgroups(name: &str) {
    cgroups(name).iter().for_each(|path| remove_cgroup(path));
}

fn remove_cgroup(path: &Path) {
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            remove_cgroup(&entry.path());
        }
    }
    // Ignored: the caller reports a busy cgroup.
    wait_until(Duration::from_millis(500), || fs::remove_dir(path).is_ok());
}

/// The cgroup above all containers of the instance at `root`: `dormouse-` and the FNV-1a hash of
/// the path.
pub fn cgroup_name(root: &Path) -> String {
    format!("dormouse-{:016x}", fnv(root.as_os_str().as_encoded_bytes()))
}

/// FNV-1a, 64 bit.
pub fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// The mount points of a process's mount namespace.
pub fn mounts(pid: u32) -> Vec<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
    let point = |line: &str| line.split(' ').nth(4).map(str::to_owned);
    text.lines().filter_map(point).collect()
}

/// A process's namespace of one kind, as the kernel names it.
fn namespace(pid: u32, kind: &str) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok()
}

/// Returns whether a process is in the network or the mount namespace of process `holder`.
pub(crate) fn is_inside(holder: u32, pid: u32) -> bool {
    ["net", "mnt"].iter().any(|kind| {
        let of_holder = namespace(holder, kind);
        of_holder.is_some() && namespace(pid, kind) == of_holder
    })
}

/// Processes with their command lines, if they are in one of the namespaces of process `holder`,
/// have `root` on their command line, or descend from such a process. The holder and the calling
/// process are excluded.
pub fn processes(holder: u32, root: &Path) -> Vec<(u32, String)> {
    let net = namespace(holder, "net");
    let mnt = namespace(holder, "mnt");
    let root = root.as_os_str().as_encoded_bytes();
    let mut ours = BTreeSet::new();
    let mut all = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        let Ok(line) = fs::read(entry.path().join("cmdline")) else { continue };
        let mentions = line.windows(root.len()).any(|window| window == root);
        let is_inside = (net.is_some() && namespace(pid, "net") == net)
            || (mnt.is_some() && namespace(pid, "mnt") == mnt);
        if mentions || is_inside {
            ours.insert(pid);
        }
        let status = fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        let field = |name: &str| field(&status, name);
        let parent = field("PPid:").and_then(|p| p.parse::<u32>().ok()).unwrap_or(0);
        let is_zombie = field("State:").is_some_and(|state| state.starts_with('Z'));
        let mut line = String::from_utf8_lossy(&line).replace('\0', " ").trim().to_owned();
        if line.is_empty() {
            // The keeper wipes its own command line; ps(1) shows the name then, too.
            line = format!("[{}]", field("Name:").unwrap_or_default());
        }
        all.push((pid, parent, is_zombie, line));
    }
    ours.remove(&std::process::id());
    ours.remove(&holder);
    loop {
        let children: Vec<u32> = all
            .iter()
            .filter(|(pid, parent, _, _)| ours.contains(parent) && !ours.contains(pid))
            .map(|(pid, ..)| *pid)
            .collect();
        if children.is_empty() {
            break;
        }
        ours.extend(children);
    }
    all.into_iter()
        .filter(|(pid, _, is_zombie, _)| ours.contains(pid) && !is_zombie)
        .map(|(pid, _, _, line)| (pid, line))
        .collect()
}

/// One line of `/proc/PID/status`.
fn field<'s>(status: &'s str, name: &str) -> Option<&'s str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// The parent of a live process.
pub(crate) fn parent(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    field(&status, "PPid:")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_children_are_found_by_their_command_line() {
        let mark = format!("dm-leftover-{}", std::process::id());
        let mut child = std::process::Command::new("sh")
            .args(["-c", "sleep 5; :", &mark])
            .spawn()
            .expect("sh starts");
        let found = || processes(0, Path::new(&mark));
        let seen = crate::wait_until(std::time::Duration::from_secs(3), || !found().is_empty());
        let listed = found();
        child.kill().and_then(|()| child.wait()).expect("end the process");
        assert!(seen && listed.iter().any(|(pid, _)| *pid == child.id()), "{listed:?}");
    }

    #[test]
    fn cgroup_name_is_derived_from_root() {
        assert_eq!(cgroup_name(Path::new("")), "dormouse-cbf29ce484222325");
        assert_ne!(cgroup_name(Path::new("/a")), cgroup_name(Path::new("/b")));
    }
}
