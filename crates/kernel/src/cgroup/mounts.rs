//! Mount points of cgroup file systems, from `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
//!
//! The kernel writes that table anew for each reader: some 4 us a mount, and every start would read it. On a host with
//! v1 its lines about cgroups can therefore be kept in a file of the caller's ([`table`]), with the ids of all mounts
//! of the namespace. The kernel lists these ids in a few microseconds (listmount(2), KERNEL(6.8)) and uses none of
//! them twice, so the lines are valid as long as the ids are the same, and the mounts are in their places. LIMIT: a
//! hierarchy that is remounted with other controllers while it is empty is not noticed.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::controller::Controllers;
use super::error::CgroupError;
use crate::{namespace, proc};

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
    /// Reads the mounts of this host, or what was kept of them in a file.
    pub(super) fn find(kept: Option<&Path>) -> Result<Self, CgroupError> {
        // The table need not be read on a host with v2 alone, which is nearly every host: one call
        // against one line for each mount of the machine.
        if let Ok(fs) = rustix::fs::statfs(ROOT)
            && fs.f_type == CGROUP2_SUPER_MAGIC
        {
            return Ok(Self { v1: Vec::new(), v2: Some(ROOT.into()) });
        }
        let found = Self::parse(&table(kept)?);
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
pub(super) fn find_all(kept: Option<&Path>) -> Result<(Named, Option<PathBuf>), CgroupError> {
    if let Ok(fs) = rustix::fs::statfs(ROOT)
        && fs.f_type == CGROUP2_SUPER_MAGIC
    {
        return Ok((Vec::new(), Some(ROOT.into())));
    }
    let table = table(kept)?;
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

/// The lines of the table of mounts that are about cgroup file systems.
fn table(kept: Option<&Path>) -> Result<String, CgroupError> {
    let stamp = kept.and_then(|_| stamp());
    if let (Some(path), Some(stamp)) = (kept, &stamp)
        && let Ok(text) = fs::read_to_string(path)
        && let Some(lines) = lines_of(&text, stamp)
    {
        return Ok(lines.to_owned());
    }
    let table =
        proc::read("/proc/self/mountinfo", LARGEST_TABLE_BYTES).map_err(CgroupError::Mounts)?;
    let table = String::from_utf8_lossy(&table);
    let is_ours = |line: &&str| line.contains(" - cgroup ") || line.contains(" - cgroup2 ");
    let lines: String = table.lines().filter(is_ours).flat_map(|line| [line, "\n"]).collect();
    // The mounts may have changed while they were read.
    if let (Some(path), Some(before)) = (kept, stamp)
        && self::stamp().is_some_and(|after| after == before)
    {
        // Where that fails, the next reader reads the table.
        let _ = kept_text(&before, &lines).map(|text| keep(path, &text));
    }
    Ok(lines)
}

/// The text of a file with these lines: before them their length and the ids of their mounts.
fn kept_text(stamp: &str, lines: &str) -> Option<String> {
    Some(format!("{stamp} {} {}\n{lines}", lines.len(), ids(lines)?))
}

/// Returns the kept lines, if they have this stamp, are complete, and their mounts are in their places: a mount that is
/// moved keeps its id.
fn lines_of<'t>(text: &'t str, stamp: &str) -> Option<&'t str> {
    let (first, lines) = text.strip_prefix(stamp)?.strip_prefix(' ')?.split_once('\n')?;
    let (length, known) = first.split_once(' ')?;
    (length.parse() == Ok(lines.len()) && ids(lines)? == known).then_some(lines)
}

/// The unique ids of the mounts at the places of these lines.
fn ids(lines: &str) -> Option<String> {
    let id = |line: &str| {
        let place = unescape(line.split(' ').nth(4)?);
        namespace::unique_mount_id(place.to_str()?).ok()?
    };
    let ids: Option<Vec<u64>> = lines.lines().map(id).collect();
    Some(ids?.iter().map(|id| format!("{id},")).collect())
}

/// Identifies the mounts that this process sees; `None` on an older kernel.
fn stamp() -> Option<String> {
    let boot = proc::boot_id().ok()?;
    let root = namespace::unique_mount_id("/").ok()??;
    let mounts = namespace::mounts().ok()?;
    // FNV-1a: it tells lists apart that differ by chance. Only root could forge one.
    let step = |sum: u64, id: &u64| (sum ^ id).wrapping_mul(0x100_0000_01b3);
    let sum = mounts.iter().fold(0xcbf2_9ce4_8422_2325, step);
    Some(format!("mounts 2 {boot} {root} {} {sum:x}", mounts.len()))
}

/// Replaces a kept table in one step. Two writers at once leave one that is right, or one of another length than it
/// says.
fn keep(path: &Path, text: &str) -> std::io::Result<()> {
    let new = path.with_extension("new");
    let mut options = fs::File::options();
    options.write(true).create(true).truncate(true).mode(0o600);
    options.open(&new)?.write_all(text.as_bytes())?;
    fs::rename(&new, path)
}

/// Returns whether `new` is preferred to the place found so far.
fn better(old: Option<&Path>, new: &Path) -> bool {
    old.is_none_or(|old| !old.starts_with(ROOT) && new.starts_with(ROOT))
}

/// Space, tab, newline and backslash are written as three octal digits.
fn unescape(field: &str) -> PathBuf {
    if !field.contains('\\') {
        return field.into();
    }
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
    fn table_is_kept_until_a_mount_changes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mounts");
        let read = table(None).unwrap();
        assert!(read.lines().all(|line| line.contains(" - cgroup")), "{read}");
        assert_eq!(table(Some(&path)).unwrap(), read);
        let Some(stamp) = stamp() else { return assert!(!path.exists()) };
        // Whether it is read shows by another content.
        let keep_as = |text: &str| fs::write(&path, text).unwrap();
        let other = "36 31 0:33 / /proc rw - cgroup cgroup rw,pids\n";
        let kept = kept_text(&stamp, other).unwrap();
        keep_as(&kept);
        assert_eq!(table(Some(&path)).unwrap(), other);
        for bad in [
            kept_text(&format!("{stamp}1"), other).unwrap(),
            // It was moved: another mount is there.
            kept.replace("/proc", "/"),
            kept.replace("/proc", "/nowhere"),
            kept.trim_end().to_owned(),
            format!("{kept}{other}"),
            format!("{stamp} 0 0,\n"),
            stamp.clone(),
            String::new(),
        ] {
            keep_as(&bad);
            assert_eq!(table(Some(&path)).unwrap(), read, "{bad:?}");
            assert_eq!(lines_of(&fs::read_to_string(&path).unwrap(), &stamp), Some(&*read));
        }
    }

    #[test]
    fn root_stamp_changes_with_every_mount() {
        let dir = tempfile::tempdir().unwrap();
        let own = || {
            // A mount namespace of this thread's own.
            crate::process::unshare(crate::call::CloneFlags::NEWNS).unwrap();
            let root = fs::File::open("/").unwrap();
            crate::mount::set_propagation(std::os::fd::AsFd::as_fd(&root), false).unwrap();
            let Some(before) = stamp() else { return };
            let run = |program: &str, words: &[&str]| {
                let mut command = std::process::Command::new(program);
                assert!(command.args(words).arg(dir.path()).status().unwrap().success());
            };
            run("mount", &["-t", "tmpfs", "none"]);
            let mounted = stamp().unwrap();
            run("umount", &[]);
            assert_ne!(mounted, before);
            assert_eq!(stamp().unwrap(), before);
            run("mount", &["-t", "tmpfs", "none"]);
            assert_ne!(stamp().unwrap(), mounted, "the number of a mount is not used again");
        };
        std::thread::scope(|scope| scope.spawn(own).join()).unwrap();
    }

    #[test]
    fn escaped_names_are_decoded_and_malformed_lines_skipped() {
        let line = "20 23 0:30 / /a\\040b\\134c rw - cgroup cgroup rw,pids\nnot a mount\n";
        assert_eq!(Mounts::parse(line).v1, [(Controllers::PIDS, "/a b\\c".into())]);
        assert_eq!(Mounts::parse(""), Mounts::default());
    }
}
