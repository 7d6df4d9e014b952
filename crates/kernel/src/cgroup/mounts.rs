//! Mount points of cgroup file systems, from `/proc/self/mountinfo` (proc_pid_mountinfo(5)).

use std::path::{Path, PathBuf};

use super::controller::Controllers;
use super::error::CgroupError;
use crate::proc;

const ROOT: &str = "/sys/fs/cgroup";
/// `statfs.f_type` of cgroup v2 (linux/magic.h).
const CGROUP2_SUPER_MAGIC: i64 = 0x6367_7270;
/// A host with 100,000 mounts (fs.mount-max) has about 20 MB of them.
const LARGEST_TABLE_BYTES: usize = 64 << 20;

/// The cgroup file systems of this host.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Mounts {
    /// Each v1 hierarchy that has a controller of interest.
    pub(super) v1: Vec<(Controllers, PathBuf)>,
    /// The v2 hierarchy.
    pub(super) v2: Option<PathBuf>,
}

impl Mounts {
    /// Reads the mounts of this host.
    pub(super) fn find() -> Result<Self, CgroupError> {
        // The table need not be read on a host with v2 alone, which is nearly every host: one call
        // against one line for each mount of the machine.
        if let Ok(fs) = rustix::fs::statfs(ROOT)
            && fs.f_type == CGROUP2_SUPER_MAGIC
        {
            return Ok(Self { v1: Vec::new(), v2: Some(ROOT.into()) });
        }
        let table =
            proc::read("/proc/self/mountinfo", LARGEST_TABLE_BYTES).map_err(CgroupError::Mounts)?;
        let found = Self::parse(&String::from_utf8_lossy(&table));
        if found.v1.is_empty() && found.v2.is_none() {
            return Err(CgroupError::NotMounted);
        }
        Ok(found)
    }

    /// Reads a table. The same hierarchy may be mounted many times (a chroot has its own copies):
    /// the one below `/sys/fs/cgroup` counts, else the first.
    pub(super) fn parse(table: &str) -> Self {
        let mut found = Self::default();
        for line in table.lines() {
            let Some((mount, fs)) = line.split_once(" - ") else { continue };
            let mut fs = fs.split(' ');
            let (kind, options) = (fs.next(), fs.nth(1).unwrap_or_default());
            let Some(at) = mount.split(' ').nth(4) else { continue };
            let at = unescape(at);
            match kind {
                Some("cgroup2") if better(found.v2.as_deref(), &at) => found.v2 = Some(at),
                Some("cgroup") => {
                    let controllers = Controllers::from_v1_options(options);
                    match found.v1.iter_mut().find(|(c, _)| *c == controllers) {
                        Some((_, old)) if better(Some(old), &at) => *old = at,
                        Some(_) => {}
                        None if controllers.is_empty() => {}
                        None => found.v1.push((controllers, at)),
                    }
                }
                _ => {}
            }
        }
        found
    }
}

/// Hierarchies with the words that name them.
pub(super) type Named = Vec<(String, PathBuf)>;

/// Every v1 hierarchy below `/sys/fs/cgroup` with its options that name it (`cpu,cpuacct`,
/// `name=systemd`), and the v2 hierarchy.
pub(super) fn find_all() -> Result<(Named, Option<PathBuf>), CgroupError> {
    if let Ok(fs) = rustix::fs::statfs(ROOT)
        && fs.f_type == CGROUP2_SUPER_MAGIC
    {
        return Ok((Vec::new(), Some(ROOT.into())));
    }
    let table =
        proc::read("/proc/self/mountinfo", LARGEST_TABLE_BYTES).map_err(CgroupError::Mounts)?;
    let table = String::from_utf8_lossy(&table);
    let mut v1: Vec<(String, PathBuf)> = Vec::new();
    for line in table.lines() {
        let Some((mount, fs)) = line.split_once(" - ") else { continue };
        let mut fs = fs.split(' ');
        let (Some("cgroup"), Some(options)) = (fs.next(), fs.nth(1)) else { continue };
        // `major:minor root place`: a mount of a subdirectory is not the hierarchy.
        let mut fields = mount.split(' ').skip(3);
        let (Some("/"), Some(at)) = (fields.next(), fields.next()) else { continue };
        let at = unescape(at);
        let of_all = ["rw", "ro", "xattr", "noprefix", "clone_children", "cpuset_v2_mode"];
        let names =
            options.split(',').filter(|o| !of_all.contains(o) && !o.starts_with("release_agent="));
        let names = names.collect::<Vec<_>>().join(",");
        if at.starts_with(ROOT) && !v1.iter().any(|(known, _)| *known == names) {
            v1.push((names, at));
        }
    }
    Ok((v1, Mounts::parse(&table).v2))
}

/// Returns whether `new` is preferred to the place found so far.
fn better(old: Option<&Path>, new: &Path) -> bool {
    old.is_none_or(|old| !old.starts_with(ROOT) && new.starts_with(ROOT))
}

/// Space, tab, newline and backslash are written as three octal digits.
fn unescape(field: &str) -> PathBuf {
    let mut text = field.to_owned();
    for (written, meant) in [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")] {
        text = text.replace(written, meant);
    }
    text.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
20 23 0:30 / /srv/a\\040chroot/sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:7 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
38 31 0:35 / /sys/fs/cgroup/blkio rw,relatime - cgroup cgroup rw,blkio
36 31 0:33 / /sys/fs/cgroup/net_cls rw,relatime - cgroup cgroup rw,net_cls,net_prio
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate
55 44 0:38 / /tmp/root/sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
50 44 0:35 / /tmp/root/sys/fs/cgroup/blkio rw,relatime - cgroup cgroup rw,blkio
";

    #[test]
    fn co_mounted_controllers_are_one_hierarchy_and_the_hosts_own_mount_wins() {
        let found = Mounts::parse(HYBRID);
        assert_eq!(found.v2, Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(
            found.v1,
            [
                (Controllers::MEMORY, "/sys/fs/cgroup/memory".into()),
                (Controllers::CPU | Controllers::CPUACCT, "/sys/fs/cgroup/cpu,cpuacct".into()),
                (Controllers::IO, "/sys/fs/cgroup/blkio".into()),
            ]
        );
    }

    #[test]
    fn escaped_names_are_decoded_and_malformed_lines_skipped() {
        let line = "20 23 0:30 / /a\\040b\\134c rw - cgroup cgroup rw,pids\nnot a mount\n";
        assert_eq!(Mounts::parse(line).v1, [(Controllers::PIDS, "/a b\\c".into())]);
        assert_eq!(Mounts::parse(""), Mounts::default());
    }
}
