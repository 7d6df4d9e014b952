//! Converts `mounts` to detached mounts and to mounts that the newborn makes itself.
//!
//! | type | made by | reason |
//! |---|---|---|
//! | bind | this process | the source is a path of the caller's |
//! | bind of an earlier mount of the list | the newborn | only its root filesystem has the source |
//! | tmpfs | the newborn | |
//! | tmpfs with `tmpcopyup`, or read-only | this process | it is filled before it is visible |
//! | cgroup, cgroup2 | this process | a bind of the container's own directories, no parents |
//! | proc, sysfs, mqueue, devpts, others | the newborn | they belong to its namespaces |
//!
//! The newborn attaches all of them, in the order of the list. The kernel's table of mounts is
//! sorted by age, and mounts of this process are older than those of the newborn. After a mount of
//! the newborn in the list, the newborn therefore attaches a copy, made at that moment.

mod copy;
mod option;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use dormouse_kernel::cgroup::{Forest, Layout, Tree};
use dormouse_kernel::mount::{self, FsContext, MountAttr, Propagation};
use dormouse_kernel::{namespace, resolve, weakened};
use dormouse_launch::flat::SPREADS_MAX;
use dormouse_launch::{Plan, TargetKind};
use rustix::fs::{CWD, FileType, Gid, Mode, OFlags, Uid};

use self::copy::{Left, copy_dir, tree_dir};
pub(crate) use self::option::{Options, known_options, propagation, spread};
use crate::bundle::inside;
use crate::error::{Error, Result};
use crate::identity::{Ids, map_text};
use crate::spec::{IdMapping, Mount};

/// f_type of procfs (statfs(2)).
const PROC_MAGIC: i64 = 0x9fa0;

/// Permitted targets inside `/proc`: informational files that others emulate (lxcfs), no controls.
const PROC_FILES: [&str; 11] = [
    "cpuinfo",
    "diskstats",
    "meminfo",
    "stat",
    "swaps",
    "uptime",
    "loadavg",
    "slabinfo",
    "net/dev",
    "sys/kernel/ns_last_pid",
    "sys/crypto/fips_enabled",
];

/// Context for making mounts.
pub(crate) struct Given<'g> {
    pub(crate) bundle: &'g Path,
    /// The root filesystem, detached.
    pub(crate) root: BorrowedFd<'g>,
    /// Its path.
    pub(crate) rootfs: &'g Path,
    pub(crate) ids: &'g Ids,
    /// The container's user namespace, if it has one.
    pub(crate) userns: Option<BorrowedFd<'g>>,
    pub(crate) cgroup: &'g Tree,
    pub(crate) forest: &'g Forest,
    /// Default propagation of mounts.
    pub(crate) spread: (Propagation, bool),
    /// The kernel's table of mounts must have them in the order of the list.
    pub(crate) in_order: bool,
}

/// Clones the root filesystem, with everything mounted below it.
pub(crate) fn root(path: &Path, spread: (Propagation, bool)) -> Result<OwnedFd> {
    let tree = mount::clone_tree_in_group(CWD, path, true)
        .map_err(|e| Error::field("root.path", format!("{}: {e}", path.display())))?;
    // ORDER: nothing is shared with the host before pivot_root, which would refuse it; the
    // configured propagation is set afterwards.
    let slave = !matches!(spread.0, Propagation::Private | Propagation::Unbindable);
    mount::set_propagation(tree.as_fd(), slave)
        .map_err(Error::call("set the propagation of the root filesystem"))?;
    Ok(tree)
}

/// Joins the components of a path.
fn clean(path: &str) -> String {
    let parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty() && *p != ".").collect();
    parts.join("/")
}

/// Returns the rest of `path` below `place`, empty for the place itself; both as in the
/// configuration.
fn is_at(path: &str, place: &str) -> Option<String> {
    let rest = clean(path);
    if rest == place {
        return Some(String::new());
    }
    rest.strip_prefix(place)?.strip_prefix('/').map(str::to_owned)
}

/// Adds the mounts of a list to the plan. Returns whether this process fills `/dev`.
pub(crate) fn plan(plan: &mut Plan, mounts: &[Mount], given: &Given<'_>) -> Result<Dev> {
    let mut dev = Dev::Root;
    // Whether the newborn makes an earlier mount of the list.
    let mut is_late = false;
    for (at, mount) in mounts.iter().enumerate() {
        let late = is_late && given.in_order;
        let earlier = mounts.get(..at).unwrap_or_default();
        let one = One { mount, options: Options::parse(&mount.options), at, given, late, earlier };
        let is_bind = one.options.bind || mount.kind.as_deref() == Some("bind");
        one.check(is_bind)?;
        let kind = mount.kind.as_deref().unwrap_or_default();
        let is_dev = is_at(&mount.destination, "dev").is_some_and(|rest| rest.is_empty());
        match kind {
            _ if is_bind => {
                is_late |= one.bind(plan)?;
                if is_dev {
                    dev = Dev::Bound;
                }
            }
            "tmpfs" if !one.is_ours() => {
                one.filesystem(plan, kind);
                is_late = true;
            }
            "tmpfs" => {
                let tree = one.tmpfs()?;
                for below in mounts.iter().skip(at + 1) {
                    one.make_place(tree.as_fd(), below);
                }
                if is_dev {
                    // Filled before it is visible, and made read-only afterwards.
                    let copy = tree.as_fd().try_clone_to_owned();
                    dev = Dev::Made(
                        copy.map_err(Error::file("duplicate", "a descriptor"))?,
                        one.read_only(),
                    );
                } else {
                    mount::set_attr(tree.as_fd(), false, one.read_only(), MountAttr::empty())
                        .map_err(|e| one.field("options", e.to_string()))?;
                }
                let place = (mount.destination.as_str(), one.target(TargetKind::Dir));
                one.attach(plan, tree, place, &one.options.propagation)?;
            }
            "cgroup" | "cgroup2" => one.cgroup(plan)?,
            "" => return Err(one.field("type", "it is missing, and this is no bind mount")),
            _ => {
                one.filesystem(plan, kind);
                is_late = true;
            }
        }
    }
    Ok(dev)
}

/// Returns the top directory of the filesystem of a directory.
fn top_of(dir: &OwnedFd) -> Result<OwnedFd> {
    let failed = |e: rustix::io::Errno| Error::file("open", "the top of a filesystem")(e.into());
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut top = rustix::fs::openat(dir, ".", flags, Mode::empty()).map_err(failed)?;
    let here = rustix::fs::fstat(&top).map_err(failed)?.st_dev;
    loop {
        let up = rustix::fs::openat(&top, "..", flags, Mode::empty()).map_err(failed)?;
        if rustix::fs::fstat(&up).map_err(failed)?.st_dev != here {
            return Ok(top);
        }
        top = up;
    }
}

/// Destination of device nodes.
#[derive(Debug)]
pub(crate) enum Dev {
    /// Into a tmpfs that was made for the container, which gets these attributes afterwards.
    Made(OwnedFd, MountAttr),
    /// Into the root filesystem.
    Root,
    /// None: a directory of the caller is mounted there.
    Bound,
}

struct One<'g> {
    mount: &'g Mount,
    options: Options,
    at: usize,
    given: &'g Given<'g>,
    /// The newborn makes an earlier mount.
    late: bool,
    /// The mounts before it in the list.
    earlier: &'g [Mount],
}

impl One<'_> {
    fn field(&self, name: &str, why: impl Into<String>) -> Error {
        Error::field(format!("mounts[{}].{name}", self.at), why)
    }

    /// Attaches a mount of this process, with its propagation set in order.
    fn attach(
        &self,
        plan: &mut Plan,
        tree: OwnedFd,
        (place, kind): (&str, TargetKind),
        spreads: &[(Propagation, bool)],
    ) -> Result<()> {
        if self.late {
            let fd = plan.fd(tree);
            let spreads: Vec<_> = spreads.iter().copied().map(spread).collect();
            plan.attach_copy(fd, place, kind, &spreads);
            return Ok(());
        }
        for (spread, recursive) in spreads {
            mount::spread(tree.as_fd(), *spread, *recursive)
                .map_err(|e| self.field("options", e.to_string()))?;
        }
        let fd = plan.fd(tree);
        plan.attach(fd, place, kind, true);
        Ok(())
    }

    /// Paths below `/dev`, `/proc` and `/sys` are resolved without any link: an image must not
    /// choose which file is hidden or shown.
    fn target(&self, otherwise: TargetKind) -> TargetKind {
        let special =
            ["dev", "proc", "sys"].iter().any(|p| is_at(&self.mount.destination, p).is_some());
        match otherwise {
            TargetKind::Dir if special => TargetKind::PlainDir,
            other => other,
        }
    }

    /// Permits only a procfs on `/proc`, and nothing else inside it (CVE-2019-16884,
    /// CVE-2019-19921, CVE-2023-27561).
    fn check(&self, is_bind: bool) -> Result<()> {
        if self.options.propagation.len() >= SPREADS_MAX {
            let why = format!("{SPREADS_MAX} words about propagation are too many");
            return Err(self.field("options", why));
        }
        if weakened("proc-mounts") {
            return Ok(());
        }
        let field = |why: &str| self.field("destination", why);
        match is_at(&self.mount.destination, "proc").as_deref() {
            None => Ok(()),
            Some("") if is_bind => {
                let source = self.source()?;
                let magic = rustix::fs::statfs(&source).map(|s| s.f_type);
                match magic {
                    Ok(PROC_MAGIC) => Ok(()),
                    _ => Err(field("only a procfs may be mounted on /proc")),
                }
            }
            Some("") if self.mount.kind.as_deref() == Some("proc") => Ok(()),
            Some("") => Err(field("only a procfs may be mounted on /proc")),
            Some(rest) if is_bind && PROC_FILES.contains(&rest) => Ok(()),
            Some(_) => Err(field("nothing may be mounted there, inside /proc")),
        }
    }

    fn source(&self) -> Result<std::path::PathBuf> {
        let source = self.mount.source.as_deref().filter(|s| !s.is_empty());
        let source = source.ok_or_else(|| self.field("source", "a bind mount needs one"))?;
        Ok(self.given.bundle.join(source))
    }

    /// Returns the path inside the root of a source to which earlier mounts of the list belong: only the
    /// newborn has them.
    fn source_inside(&self) -> Result<Option<String>> {
        let source = self.source()?;
        let Some(path) = source.to_str().and_then(|path| inside(self.given.rootfs, path)) else {
            return Ok(None);
        };
        let path = clean(path);
        let is_part = |above: &str, below: &str| is_at(below, above).is_some();
        let belongs = |mount: &Mount| {
            let place = clean(&mount.destination);
            is_part(&place, &path) || (self.options.recursive && is_part(&path, &place))
        };
        Ok(self.earlier.iter().any(belongs).then(|| format!("/{path}")))
    }

    /// Plans a bind mount of what earlier mounts of the list make inside the root.
    fn bind_inside(&self, plan: &mut Plan, source: &str) -> Result<()> {
        let options = &self.options;
        if !(options.set_all | options.clear_all).is_empty() {
            let why = "a source that is a mount of this list takes no recursive attribute";
            return Err(self.field("options", why));
        }
        let (set, clear) = options.of_bind(self.given.userns.is_some());
        let idmap = self.id_map()?;
        let idmap = idmap.map(|userns| (plan.fd(userns), options.idmap.unwrap_or(false)));
        let place = self.given.root.try_clone_to_owned();
        let place = plan.fd(place.map_err(Error::file("duplicate", "a descriptor"))?);
        let bits = |attr: MountAttr| attr.bits() as u32;
        let (default, recursive) = self.given.spread;
        let mut spreads = vec![(default, recursive || options.recursive)];
        spreads.extend(&options.propagation);
        let spreads: Vec<_> = spreads.into_iter().map(spread).collect();
        // Where earlier mounts cover the source it is taken for a directory.
        let kind = match self.source()?.metadata() {
            Ok(meta) if !meta.is_dir() => TargetKind::File,
            _ => self.target(TargetKind::Dir),
        };
        let target = (self.mount.destination.as_str(), kind);
        let (attr, from) = ((bits(set), bits(clear)), (place, source));
        plan.attach_inside(from, target, options.recursive, attr, idmap, &spreads);
        Ok(())
    }

    /// Plans a bind mount; returns whether the newborn makes it.
    fn bind(&self, plan: &mut Plan) -> Result<bool> {
        if let Some(source) = self.source_inside()? {
            return self.bind_inside(plan, &source).map(|()| true);
        }
        let (source, options) = (self.source()?, &self.options);
        let tree = mount::clone_tree_in_group(CWD, &source, options.recursive)
            .map_err(|e| self.field("source", format!("{}: {e}", source.display())))?;
        let failed = |e| self.field("options", format!("{e}"));
        self.idmap(tree.as_fd())?;
        let (set, clear) = options.of_bind(self.given.userns.is_some());
        if !set.is_empty() || !clear.is_empty() {
            mount::set_attr(tree.as_fd(), false, set, clear).map_err(failed)?;
        }
        let (set, clear) = (options.set_all, options.clear_all);
        if !set.is_empty() || !clear.is_empty() {
            mount::set_attr(tree.as_fd(), true, set, clear).map_err(failed)?;
        }
        let stat = rustix::fs::fstat(&tree).map_err(|e| self.field("source", e.to_string()))?;
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => self.target(TargetKind::Dir),
            _ => TargetKind::File,
        };
        // As for a mount in a copy of the host's namespace: first the propagation of the copy, then
        // that of this mount.
        let (default, recursive) = self.given.spread;
        let mut spreads = vec![(default, recursive || options.recursive)];
        spreads.extend(&options.propagation);
        self.attach(plan, tree, (self.mount.destination.as_str(), kind), &spreads)?;
        Ok(false)
    }

    /// Maps the ids by the mount's own maps, or by those of the container.
    fn idmap(&self, tree: BorrowedFd<'_>) -> Result<()> {
        let Some(userns) = self.id_map()? else { return Ok(()) };
        mount::idmap(tree, userns.as_fd(), self.options.idmap.unwrap_or(false))
            .map_err(|e| self.field("options", format!("the ids cannot be mapped: {e}")))
    }

    /// Returns a user namespace with these maps; `None` if ids are not mapped.
    fn id_map(&self) -> Result<Option<OwnedFd>> {
        let (uid, gid) = (&self.mount.uid_mappings, &self.mount.gid_mappings);
        if self.options.idmap.is_none() && uid.is_empty() && gid.is_empty() {
            return Ok(None);
        }
        match (uid.is_empty(), gid.is_empty()) {
            (true, true) => {
                let userns = self.given.userns.ok_or_else(|| {
                    let why = "there is no user namespace to take the ids from: give uidMappings \
                               and gidMappings";
                    self.field("options", why)
                })?;
                let copy = userns.try_clone_to_owned();
                copy.map(Some).map_err(Error::file("duplicate", "a user namespace"))
            }
            (false, false) => {
                for (name, map) in [("uidMappings", uid), ("gidMappings", gid)] {
                    crate::bundle::check_map(&format!("mounts[{}].{name}", self.at), map)?;
                }
                let text = |map: &[IdMapping]| map_text(map);
                namespace::new_user(&text(uid), &text(gid))
                    .map(Some)
                    .map_err(|e| self.field("uidMappings", e.to_string()))
            }
            (true, false) => Err(self.field("uidMappings", "it is missing")),
            (false, true) => Err(self.field("gidMappings", "it is missing")),
        }
    }

    /// Returns whether this process makes a tmpfs.
    fn is_ours(&self) -> bool {
        self.options.copy_up || !self.read_only().is_empty()
    }

    /// RDONLY, if the mount is to have it.
    fn read_only(&self) -> MountAttr {
        (self.options.set | self.options.set_all) & MountAttr::RDONLY
    }

    fn tmpfs(&self) -> Result<OwnedFd> {
        let ids = self.given.ids;
        let number = |key: &str, host: &dyn Fn(u32) -> Option<u32>| -> Result<Option<u32>> {
            let inside = match self.options.value(key) {
                Some(text) => text.parse().ok(),
                None => Some(0),
            };
            let bad = || self.field("options", format!("{key} is no id of the container"));
            inside.and_then(host).map(Some).ok_or_else(bad)
        };
        let (uid, gid) =
            (number("uid", &|id| ids.host_uid(id))?, number("gid", &|id| ids.host_gid(id))?);
        let make = || {
            let fs = FsContext::open("tmpfs")?;
            let source = self.mount.source.as_deref().filter(|s| !s.is_empty());
            fs.set_string("source", source.unwrap_or("tmpfs"))?;
            for (key, id) in [("uid", uid), ("gid", gid)] {
                if let Some(id) = id.filter(|id| *id != 0) {
                    fs.set_string(key, &id.to_string())?;
                }
            }
            for word in &self.options.data {
                match word.split_once('=') {
                    Some(("uid" | "gid", _)) => {}
                    Some((key, value)) => fs.set_string(key, value)?,
                    None => fs.set_flag(word)?,
                }
            }
            if let Some(mode) = self.covered_mode().filter(|_| self.options.value("mode").is_none())
            {
                fs.set_string("mode", &format!("{mode:04o}"))?;
            }
            fs.create((self.options.set | self.options.set_all) - MountAttr::RDONLY)
        };
        let tree = make().map_err(|e| self.field("options", e.to_string()))?;
        if self.options.copy_up {
            self.copy_up(tree.as_fd())?;
        }
        Ok(tree)
    }

    /// The permissions of the directory that the mount covers.
    fn covered_mode(&self) -> Option<u32> {
        let (root, place) = (self.given.root, &self.mount.destination);
        let covered = resolve::in_root(root, place, OFlags::PATH, Mode::empty()).ok()?;
        rustix::fs::fstat(&covered).ok().map(|stat| stat.st_mode & 0o7777)
    }

    /// Makes the targets of later mounts in a read-only tmpfs, in which the newborn cannot make
    /// them.
    fn make_place(&self, tree: BorrowedFd<'_>, below: &Mount) {
        let own = self.mount.destination.trim_matches('/');
        let Some(rest) = is_at(&below.destination, own).filter(|r| !r.is_empty()) else { return };
        let is_bind = below.kind.as_deref() == Some("bind")
            || below.options.iter().any(|o| o == "bind" || o == "rbind");
        if is_bind
            || rest.split('/').any(|p| p == "..")
            || !self.options.set.contains(MountAttr::RDONLY)
        {
            return;
        }
        // A missing target is reported by the mount that needs it.
        let _ = resolve::create_directories(tree, rest, Mode::from_raw_mode(0o755));
    }

    /// Copies the image's files at this place into the tmpfs.
    fn copy_up(&self, tree: BorrowedFd<'_>) -> Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let source = match resolve::in_root(
            self.given.root,
            &self.mount.destination,
            flags,
            Mode::empty(),
        ) {
            Err(_) => return Ok(()), // missing, or no directory
            Ok(source) => source,
        };
        let failed = |e: rustix::io::Errno| self.field("options", format!("tmpcopyup: {e}"));
        let stat = rustix::fs::fstat(&source).map_err(failed)?;
        let (uid, gid) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
        if self.options.value("uid").is_none() && self.options.value("gid").is_none() {
            rustix::fs::fchown(tree_dir(tree).map_err(failed)?, Some(uid), Some(gid))
                .map_err(failed)?;
        }
        if self.options.value("mode").is_none() {
            let mode = Mode::from_raw_mode(stat.st_mode & 0o7777);
            rustix::fs::fchmod(tree_dir(tree).map_err(failed)?, mode).map_err(failed)?;
        }
        copy_dir(source.as_fd(), tree, 0, &mut Left::default()).map_err(failed)
    }

    /// Mounts the container's own cgroups: its directory of v2, or a tmpfs with one for each v1
    /// hierarchy.
    fn cgroup(&self, plan: &mut Plan) -> Result<()> {
        let attr = self.options.set | self.options.set_all;
        let failed = |e: dormouse_kernel::CallError| self.field("type", e.to_string());
        let bind = |dir: &OwnedFd| {
            let top;
            let dir = match weakened("own-cgroup") {
                true => {
                    top = top_of(dir)?;
                    &top
                }
                false => dir,
            };
            let tree = mount::clone_tree(dir.as_fd(), "", false).map_err(failed)?;
            mount::set_attr(tree.as_fd(), false, attr, MountAttr::empty()).map_err(failed)?;
            Ok::<_, Error>(tree)
        };
        let directories = self.given.cgroup.directories()?;
        let place = &self.mount.destination;
        let is_v2_only = self.given.forest.layout() == Layout::Unified;
        if is_v2_only || self.mount.kind.as_deref() == Some("cgroup2") {
            let v2 = directories.iter().find(|(words, _)| words.is_empty());
            let (_, dir) = v2.ok_or_else(|| self.field("type", "no cgroup2 is mounted here"))?;
            let at = (place.as_str(), self.target(TargetKind::Dir));
            return self.attach(plan, bind(dir)?, at, &self.options.propagation);
        }
        let top = {
            let make = || {
                let fs = FsContext::open("tmpfs")?;
                fs.set_string("source", "tmpfs")?;
                fs.set_string("mode", "0755")?;
                fs.create(attr - MountAttr::RDONLY)
            };
            make().map_err(failed)?
        };
        let told = |e: rustix::io::Errno| self.field("type", e.to_string());
        let mut mounts = Vec::new();
        for (words, dir) in directories.iter().filter(|(words, _)| !words.is_empty()) {
            let name = words.strip_prefix("name=").unwrap_or(words);
            rustix::fs::mkdirat(&top, name, Mode::from_raw_mode(0o755)).map_err(told)?;
            for alias in name.split(',').filter(|alias| *alias != name) {
                rustix::fs::symlinkat(name, &top, alias).map_err(told)?;
            }
            mounts.push((format!("{place}/{name}"), bind(dir)?));
        }
        mount::set_attr(top.as_fd(), false, attr, MountAttr::empty()).map_err(failed)?;
        let at = (place.as_str(), self.target(TargetKind::Dir));
        self.attach(plan, top, at, &self.options.propagation)?;
        for (place, tree) in mounts {
            let at = (place.as_str(), TargetKind::PlainDir);
            self.attach(plan, tree, at, &self.options.propagation)?;
        }
        Ok(())
    }

    /// Plans any other filesystem: the newborn makes it, in its own namespaces.
    fn filesystem(&self, plan: &mut Plan, kind: &str) {
        let mut options: Vec<String> = self.options.data.clone();
        if let Some(source) = self.mount.source.as_deref().filter(|s| !s.is_empty()) {
            options.push(format!("source={source}"));
        }
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        let attr = self.options.set | self.options.set_all;
        let place = match kind {
            "tmpfs" => self.target(TargetKind::Dir),
            _ => TargetKind::PlainDir,
        };
        let spreads: Vec<_> = self.options.propagation.iter().copied().map(spread).collect();
        let how = (attr.bits(), spreads.as_slice());
        plan.filesystem_with(kind, &self.mount.destination, place, how, &options);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_paths_are_compared_by_components() {
        assert_eq!(is_at("/dev", "dev").as_deref(), Some(""));
        assert_eq!(is_at("//dev/./pts/", "dev").as_deref(), Some("pts"));
        assert_eq!(is_at("/device", "dev"), None);
        assert_eq!(is_at("/", "dev"), None);
    }
}
