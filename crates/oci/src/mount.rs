//! From `mounts` to detached mounts and to what the newborn mounts itself.
//!
//! | type | who makes it | why |
//! |---|---|---|
//! | bind | this process | the source is a path of the caller's |
//! | tmpfs | the newborn | |
//! | tmpfs with `tmpcopyup`, or read-only | this process | it is filled before it is seen |
//! | cgroup, cgroup2 | this process | a bind of the container's own directories: the way up is not there |
//! | proc, sysfs, mqueue, devpts, others | the newborn | they are of its namespaces |
//!
//! All of them are attached by the newborn, in the order of the list. The kernel's table of mounts
//! goes by their age, though, and what this process makes is older than what the newborn does: of what
//! follows one of the newborn's in the list, a copy is attached, made at that moment.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use dormouse_kernel::cgroup::{Forest, Layout, Tree};
use dormouse_kernel::mount::{self, FsContext, MountAttr, Propagation};
use dormouse_kernel::{namespace, resolve, weakened};
use dormouse_launch::{FdIndex, Plan, TargetKind};
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Uid};

use crate::error::{Error, Result};
use crate::identity::{Ids, map_text};
use crate::spec::{IdMapping, Mount};

/// f_type of procfs (statfs(2)).
const PROC_MAGIC: i64 = 0x9fa0;
/// LIMIT: how deep `tmpcopyup` goes, and how many files it copies.
const COPY_DEPTH: usize = 32;
const COPY_FILES: usize = 20_000;
/// LIMIT: bytes that `tmpcopyup` copies.
const COPY_BYTES: u64 = 256 << 20;

/// What may be mounted on inside `/proc`: files that others make up (lxcfs), nothing that decides.
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

/// The options of a mount, each in its place.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    set: MountAttr,
    clear: MountAttr,
    set_all: MountAttr,
    clear_all: MountAttr,
    propagation: Vec<(Propagation, bool)>,
    bind: bool,
    recursive: bool,
    idmap: Option<bool>,
    copy_up: bool,
    /// What the filesystem itself is told.
    data: Vec<String>,
}

/// Words that set attributes, and those that take them back.
const ATTRIBUTES: [(&str, &str, MountAttr); 7] = [
    ("ro", "rw", MountAttr::RDONLY),
    ("nosuid", "suid", MountAttr::NOSUID),
    ("nodev", "dev", MountAttr::NODEV),
    ("noexec", "exec", MountAttr::NOEXEC),
    ("nodiratime", "diratime", MountAttr::NODIRATIME),
    ("nosymfollow", "symfollow", MountAttr::NOSYMFOLLOW),
    ("noatime", "atime", MountAttr::NOATIME),
];

/// Words about propagation; with an `r` before, for everything below, too.
const PROPAGATION: [(&str, Propagation); 4] = [
    ("private", Propagation::Private),
    ("slave", Propagation::Slave),
    ("shared", Propagation::Shared),
    ("unbindable", Propagation::Unbindable),
];

/// Words that say what is so anyway, or that no kernel listens to for a mount of its own.
const NOTHING: [&str; 9] = [
    "defaults",
    "async",
    "loud",
    "norelatime",
    "relatime",
    "remount",
    "nolazytime",
    "nomand",
    "noiversion",
];

/// Every word that `features` tells of.
pub(crate) fn known_options() -> Vec<String> {
    let attributes = ATTRIBUTES.iter().flat_map(|(on, off, _)| [*on, *off]);
    let plain: Vec<String> = attributes
        .chain(["strictatime", "nostrictatime", "bind", "rbind", "idmap", "ridmap", "tmpcopyup"])
        .chain(NOTHING)
        .chain(["dirsync", "iversion", "lazytime", "mand", "silent", "sync"])
        .map(str::to_owned)
        .collect();
    let recursive =
        ATTRIBUTES.iter().flat_map(|(on, off, _)| [format!("r{on}"), format!("r{off}")]);
    let spread = PROPAGATION.iter().flat_map(|(word, _)| [(*word).to_owned(), format!("r{word}")]);
    let access = ["rstrictatime", "rnostrictatime", "rrelatime", "rnorelatime"].map(str::to_owned);
    let mut all: Vec<String> =
        plain.into_iter().chain(recursive).chain(spread).chain(access).collect();
    all.sort_unstable();
    all
}

/// The propagation that a word stands for.
pub(crate) fn propagation(word: &str) -> Option<(Propagation, bool)> {
    let known = |word: &str| PROPAGATION.iter().find(|(w, _)| *w == word).map(|(_, p)| *p);
    known(word).map(|p| (p, false)).or_else(|| Some((known(word.strip_prefix('r')?)?, true)))
}

impl Options {
    pub(crate) fn parse(words: &[String]) -> Self {
        let mut all = Self::default();
        words.iter().for_each(|word| all.take(word));
        all
    }

    fn take(&mut self, word: &str) {
        match word {
            "bind" => self.bind = true,
            "rbind" => (self.bind, self.recursive) = (true, true),
            "idmap" => self.idmap = Some(false),
            "ridmap" => self.idmap = Some(true),
            "tmpcopyup" => self.copy_up = true,
            "strictatime" => set_bits(&mut self.set, &mut self.clear, MountAttr::STRICTATIME),
            "nostrictatime" => set_bits(&mut self.clear, &mut self.set, MountAttr::STRICTATIME),
            "rstrictatime" => {
                set_bits(&mut self.set_all, &mut self.clear_all, MountAttr::STRICTATIME);
            }
            "rnostrictatime" | "rrelatime" | "rnorelatime" => {
                set_bits(&mut self.clear_all, &mut self.set_all, MountAttr::ATIME);
            }
            word if NOTHING.contains(&word) => {}
            word => self.take_of_tables(word),
        }
    }

    fn take_of_tables(&mut self, word: &str) {
        if let Some(spread) = propagation(word) {
            self.propagation.push(spread);
            return;
        }
        for (on, off, bit) in ATTRIBUTES {
            let (set, clear) = (&mut self.set, &mut self.clear);
            match word {
                _ if word == on => return set_bits(set, clear, bit),
                _ if word == off => return set_bits(clear, set, bit),
                _ => {}
            }
            let (set, clear) = (&mut self.set_all, &mut self.clear_all);
            match word.strip_prefix('r') {
                Some(rest) if rest == on => return set_bits(set, clear, bit),
                Some(rest) if rest == off => return set_bits(clear, set, bit),
                _ => {}
            }
        }
        self.data.push(word.to_owned());
    }

    /// The value of a `key=value` for the filesystem.
    fn value(&self, key: &str) -> Option<&str> {
        self.data.iter().rev().find_map(|d| d.strip_prefix(key)?.strip_prefix('='))
    }
}

fn set_bits(to: &mut MountAttr, from: &mut MountAttr, bits: MountAttr) {
    to.insert(bits);
    from.remove(bits);
}

/// What mounts are made with.
pub(crate) struct Given<'g> {
    pub(crate) bundle: &'g Path,
    /// The root filesystem, detached.
    pub(crate) root: BorrowedFd<'g>,
    pub(crate) ids: &'g Ids,
    /// The container's user namespace, where it has one.
    pub(crate) userns: Option<BorrowedFd<'g>>,
    pub(crate) cgroup: &'g Tree,
    pub(crate) forest: &'g Forest,
    /// What mounts hear of that say nothing about it.
    pub(crate) spread: (Propagation, bool),
    /// The kernel's table of mounts is to have them in their order.
    pub(crate) in_order: bool,
}

/// Clones the root filesystem, with everything mounted below it.
pub(crate) fn root(path: &Path, spread: (Propagation, bool)) -> Result<OwnedFd> {
    let tree = mount::clone_tree_in_group(CWD, path, true)
        .map_err(|e| Error::field("root.path", format!("{}: {e}", path.display())))?;
    // ORDER: nothing is shared with the host before pivot_root, which would refuse it; what the
    // configuration asks for comes after.
    let slave = !matches!(spread.0, Propagation::Private | Propagation::Unbindable);
    mount::set_propagation(tree.as_fd(), slave)
        .map_err(Error::call("set the propagation of the root filesystem"))?;
    Ok(tree)
}

/// Whether `path` is `place` or below it; both as the configuration writes them.
fn is_at(path: &str, place: &str) -> Option<String> {
    let clean: Vec<&str> = path.split('/').filter(|p| !p.is_empty() && *p != ".").collect();
    let rest = clean.join("/");
    if rest == place {
        return Some(String::new());
    }
    rest.strip_prefix(place)?.strip_prefix('/').map(str::to_owned)
}

/// Puts the mounts of a list into the plan. Gives whether `/dev` is one that we fill.
pub(crate) fn plan(plan: &mut Plan, mounts: &[Mount], given: &Given<'_>) -> Result<Dev> {
    let mut dev = Dev::Root;
    // Whether the newborn makes one of those before.
    let mut is_late = false;
    for (at, mount) in mounts.iter().enumerate() {
        let late = is_late && given.in_order;
        let one = One { mount, options: Options::parse(&mount.options), at, given, late };
        let is_bind = one.options.bind || mount.kind.as_deref() == Some("bind");
        one.check(is_bind)?;
        let kind = mount.kind.as_deref().unwrap_or_default();
        let is_dev = is_at(&mount.destination, "dev").is_some_and(|rest| rest.is_empty());
        match kind {
            _ if is_bind => {
                one.bind(plan)?;
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
                    // Filled before anybody can see it.
                    dev = Dev::Made(
                        tree.as_fd()
                            .try_clone_to_owned()
                            .map_err(Error::file("duplicate", "a descriptor"))?,
                    );
                }
                let fd = plan.fd(tree);
                one.attach(plan, fd, &mount.destination, one.target(TargetKind::Dir), true);
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

/// The first directory of the filesystem that a directory is in.
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

/// Where device nodes go.
#[derive(Debug)]
pub(crate) enum Dev {
    /// Into a tmpfs that was made for the container.
    Made(OwnedFd),
    /// Into the root filesystem.
    Root,
    /// Nowhere: somebody's directory is mounted there.
    Bound,
}

struct One<'g> {
    mount: &'g Mount,
    options: Options,
    at: usize,
    given: &'g Given<'g>,
    /// The newborn mounts something before.
    late: bool,
}

impl One<'_> {
    fn field(&self, name: &str, why: impl Into<String>) -> Error {
        Error::field(format!("mounts[{}].{name}", self.at), why)
    }

    /// Attaches what this process has made.
    fn attach(&self, plan: &mut Plan, fd: FdIndex, place: &str, kind: TargetKind, create: bool) {
        match self.late {
            true => plan.attach_copy(fd, place, kind, create),
            false => plan.attach(fd, place, kind, create),
        }
    }

    /// Places below `/dev`, `/proc` and `/sys` are reached without any link: which file it is that
    /// is hidden or shown must not be an image's choice.
    fn target(&self, otherwise: TargetKind) -> TargetKind {
        let special =
            ["dev", "proc", "sys"].iter().any(|p| is_at(&self.mount.destination, p).is_some());
        match otherwise {
            TargetKind::Dir if special => TargetKind::PlainDir,
            other => other,
        }
    }

    /// `/proc` is a procfs, and in it is nothing but procfs (CVE-2019-16884, CVE-2019-19921,
    /// CVE-2023-27561).
    fn check(&self, is_bind: bool) -> Result<()> {
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

    fn bind(&self, plan: &mut Plan) -> Result<()> {
        let (source, options) = (self.source()?, &self.options);
        let tree = mount::clone_tree_in_group(CWD, &source, options.recursive)
            .map_err(|e| self.field("source", format!("{}: {e}", source.display())))?;
        let failed = |e| self.field("options", format!("{e}"));
        self.idmap(tree.as_fd())?;
        // As a mount in a copy of the host's namespace would be: first what the copy is, then what
        // is said of this mount.
        let (default, recursive) = self.given.spread;
        mount::spread(tree.as_fd(), default, recursive || options.recursive).map_err(failed)?;
        for (spread, recursive) in &options.propagation {
            mount::spread(tree.as_fd(), *spread, *recursive).map_err(failed)?;
        }
        let (set, clear) = (options.set, options.clear);
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
        let fd = plan.fd(tree);
        self.attach(plan, fd, &self.mount.destination, kind, true);
        Ok(())
    }

    /// By its own maps, or by those of the container.
    fn idmap(&self, tree: BorrowedFd<'_>) -> Result<()> {
        let (uid, gid) = (&self.mount.uid_mappings, &self.mount.gid_mappings);
        if self.options.idmap.is_none() && uid.is_empty() && gid.is_empty() {
            return Ok(());
        }
        let recursive = self.options.idmap.unwrap_or(false);
        let own;
        let userns = match (uid.is_empty(), gid.is_empty()) {
            (true, true) => self.given.userns.ok_or_else(|| {
                let why = "there is no user namespace to take the ids from: give uidMappings and \
                           gidMappings";
                self.field("options", why)
            })?,
            (false, false) => {
                for (name, map) in [("uidMappings", uid), ("gidMappings", gid)] {
                    crate::bundle::check_map(&format!("mounts[{}].{name}", self.at), map)?;
                }
                let text = |map: &[IdMapping]| map_text(map);
                own = namespace::new_user(&text(uid), &text(gid))
                    .map_err(|e| self.field("uidMappings", e.to_string()))?;
                own.as_fd()
            }
            (true, false) => return Err(self.field("uidMappings", "it is missing")),
            (false, true) => return Err(self.field("gidMappings", "it is missing")),
        };
        mount::idmap(tree, userns, recursive)
            .map_err(|e| self.field("options", format!("the ids cannot be mapped: {e}")))
    }

    /// Whether a tmpfs is made by this process.
    fn is_ours(&self) -> bool {
        let is_read_only = (self.options.set | self.options.set_all).contains(MountAttr::RDONLY);
        self.options.copy_up || is_read_only
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
            fs.create(self.options.set | self.options.set_all)
        };
        let tree = make().map_err(|e| self.field("options", e.to_string()))?;
        if self.options.copy_up {
            self.copy_up(tree.as_fd())?;
        }
        for (spread, recursive) in &self.options.propagation {
            mount::spread(tree.as_fd(), *spread, *recursive)
                .map_err(|e| self.field("options", e.to_string()))?;
        }
        Ok(tree)
    }

    /// A tmpfs that is read-only could get no places for later mounts from the newborn.
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
        // What cannot be made is missed, and told, by the one who needs it.
        let _ = resolve::create_directories(tree, rest, Mode::from_raw_mode(0o755));
    }

    /// What the image has at this place is in the tmpfs, too.
    fn copy_up(&self, tree: BorrowedFd<'_>) -> Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let source = match resolve::in_root(
            self.given.root,
            &self.mount.destination,
            flags,
            Mode::empty(),
        ) {
            Err(_) => return Ok(()), // nothing there, or no directory
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
        let mut left = Left { files: COPY_FILES, bytes: COPY_BYTES };
        copy_dir(source.as_fd(), tree, 0, &mut left).map_err(failed)
    }

    /// The container's own cgroups: its directory of v2, or a tmpfs with one for each v1 hierarchy.
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
            let fd = plan.fd(bind(dir)?);
            self.attach(plan, fd, place, self.target(TargetKind::Dir), true);
            return Ok(());
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
        let fd = plan.fd(top);
        self.attach(plan, fd, place, self.target(TargetKind::Dir), true);
        for (place, tree) in mounts {
            let fd = plan.fd(tree);
            self.attach(plan, fd, &place, TargetKind::PlainDir, false);
        }
        Ok(())
    }

    /// Anything else: the newborn makes it, of its own namespaces.
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
        plan.filesystem_with(kind, &self.mount.destination, place, attr.bits(), &options);
    }
}

/// The top of a mount as a directory that can be changed: a mount's own descriptor is only a place.
fn tree_dir(tree: BorrowedFd<'_>) -> std::result::Result<OwnedFd, rustix::io::Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(tree, ".", flags, Mode::empty())
}

struct Left {
    files: usize,
    bytes: u64,
}

/// Copies what is in a directory: files, directories and links with owners and permissions. Links
/// are copied, never followed.
fn copy_dir(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    depth: usize,
    left: &mut Left,
) -> std::result::Result<(), rustix::io::Errno> {
    use rustix::io::Errno;
    if depth > COPY_DEPTH {
        return Err(Errno::LOOP);
    }
    for entry in rustix::fs::Dir::read_from(from)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        left.files = left.files.checked_sub(1).ok_or(Errno::DQUOT)?;
        let stat = rustix::fs::statat(from, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let (uid, gid) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
        let mode = Mode::from_raw_mode(stat.st_mode & 0o7777);
        let own = |to: BorrowedFd<'_>| {
            rustix::fs::chownat(to, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
        };
        let nofollow = OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | nofollow;
                rustix::fs::mkdirat(to, name, Mode::from_raw_mode(0o700))?;
                let source = rustix::fs::openat(from, name, flags, Mode::empty())?;
                let copy = rustix::fs::openat(to, name, flags, Mode::empty())?;
                copy_dir(source.as_fd(), copy.as_fd(), depth + 1, left)?;
                own(to)?;
                rustix::fs::fchmod(&copy, mode)?;
            }
            FileType::RegularFile => {
                let flags = OFlags::RDONLY | OFlags::NONBLOCK | nofollow;
                let source = rustix::fs::openat(from, name, flags, Mode::empty())?;
                let now = rustix::fs::fstat(&source)?;
                if FileType::from_raw_mode(now.st_mode) != FileType::RegularFile {
                    return Err(Errno::INVAL);
                }
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | nofollow;
                let copy = rustix::fs::openat(to, name, flags, Mode::from_raw_mode(0o600))?;
                let room = left.bytes;
                let copied = copy_bytes(source, copy.as_fd(), room)?;
                left.bytes -= copied;
                rustix::fs::fchown(&copy, Some(uid), Some(gid))?;
                rustix::fs::fchmod(&copy, mode)?;
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(from, name, Vec::new())?;
                rustix::fs::symlinkat(target.as_c_str(), to, name)?;
                own(to)?;
            }
            // Sockets, pipes and devices mean nothing in a copy.
            _ => {}
        }
    }
    Ok(())
}

fn copy_bytes(
    from: OwnedFd,
    to: BorrowedFd<'_>,
    room: u64,
) -> std::result::Result<u64, rustix::io::Errno> {
    let mut from = std::io::Read::take(File::from(from), room + 1);
    let mut to = File::from(to.try_clone_to_owned().map_err(|_| rustix::io::Errno::MFILE)?);
    let copied = std::io::copy(&mut from, &mut to).map_err(|_| rustix::io::Errno::IO)?;
    if copied > room { Err(rustix::io::Errno::FBIG) } else { Ok(copied) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Options {
        Options::parse(&words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn the_last_word_about_an_attribute_counts() {
        let options = parse(&["ro", "nosuid", "rw", "rnoexec", "rbind", "size=1k", "rslave"]);
        assert_eq!((options.set, options.clear), (MountAttr::NOSUID, MountAttr::RDONLY));
        assert_eq!(options.set_all, MountAttr::NOEXEC);
        assert!(options.bind && options.recursive);
        assert_eq!(options.data, ["size=1k"]);
        assert_eq!(options.propagation, [(Propagation::Slave, true)]);
        assert_eq!(parse(&["rro"]).set_all, MountAttr::RDONLY);
        assert_eq!(parse(&["rrw"]).clear_all, MountAttr::RDONLY);
    }

    #[test]
    fn every_known_word_is_no_data() {
        for word in known_options() {
            let of_fs = ["dirsync", "iversion", "lazytime", "mand", "silent", "sync"];
            let is_data = !parse(&[&word]).data.is_empty();
            assert_eq!(is_data, of_fs.contains(&word.as_str()), "{word}");
        }
    }

    #[test]
    fn places_are_compared_by_their_parts() {
        assert_eq!(is_at("/dev", "dev").as_deref(), Some(""));
        assert_eq!(is_at("//dev/./pts/", "dev").as_deref(), Some("pts"));
        assert_eq!(is_at("/device", "dev"), None);
        assert_eq!(is_at("/", "dev"), None);
    }
}
