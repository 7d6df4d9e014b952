//! The changes of a container: as a list, as a layer, as a tree.
//!
//! Three trees are walked side by side: *merged* (the container's view, mounted read-only for the
//! purpose), *base* (the same without the upper), and the *upper* directory. Only directories that
//! exist in the upper are read, so the cost depends on the changes, not on the image. The merged
//! view supplies what is missing in the upper: contents of files that were only chmodded
//! (metacopy), and of renamed directories (redirect). An opaque or renamed directory has no
//! counterpart in the base: all of its contents count as changed.
//!
//! A hard link of the image that was written under one name has changed under all of them, although
//! the upper has only the one: if overlayfs keeps an index, all directories are searched.
//!
//! **Ids.** The upper holds host ids, the image its own: an id in the container's range on the host
//! is shifted back, every other is left. An image's id that happens to be in that range is shifted
//! as well; no process of the container could have used it.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;

use dormouse_model::{IdMap, Reference};
use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::archive::Meta;
use crate::arrival::{Expect, NewImage};
use crate::digest::Digest;
use crate::error::{At, Fault, Result};
use crate::import::{architecture, layer_of, now};
use crate::ingest::Import;
use crate::mount::{Lower, view};
use crate::progress::Progress;
use crate::store::{Image, ImageId, Store, to_json};
use crate::walk::{Here, Walker, join, names, open_at, stat_at, too_deep};

/// The kind of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeKind {
    /// The path did not exist in the base.
    Added,
    /// The path existed and is different; a directory also if something in it changed.
    Changed,
    /// The path does not exist any more.
    Deleted,
}

impl ChangeKind {
    /// The letter that `diff` prints: `A`, `C` or `D`.
    pub fn letter(self) -> char {
        match self {
            Self::Added => 'A',
            Self::Changed => 'C',
            Self::Deleted => 'D',
        }
    }
}

/// A path that differs between a container and its image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The kind.
    pub kind: ChangeKind,
    /// The path, absolute inside the container; bytes as the file system has them.
    pub path: Vec<u8>,
}

/// The metadata of a commit.
#[derive(Debug, Clone, Default)]
pub struct Commit {
    /// The name of the new image.
    pub name: Option<Reference>,
    /// `author` of the configuration.
    pub author: Option<String>,
    /// Recorded in the history.
    pub message: Option<String>,
    /// Changes of the configuration in the words of a Dockerfile: `CMD`, `ENTRYPOINT`, `ENV`,
    /// `EXPOSE`, `LABEL`, `STOPSIGNAL`, `USER`, `VOLUME`, `WORKDIR`.
    pub changes: Vec<String>,
    /// Without the time of the commit: the same layers make the same image.
    pub undated: bool,
}

impl Store {
    /// Lists the changes of a container, sorted by path. `upper` is its upper directory, with
    /// owners as host ids of `ids`. The container may run; concurrent changes may or may not be
    /// included.
    pub fn diff(&self, lower: &Lower, upper: BorrowedFd<'_>, ids: &IdMap) -> Result<Vec<Change>> {
        let mut list = List::default();
        compare_all(lower, upper, ids, &mut list)?;
        let change = |(path, kind): (Vec<u8>, ChangeKind)| Change { kind, path };
        Ok(list.0.into_iter().map(change).collect())
    }

    /// Returns whether the files of a container may differ from those of its image; otherwise they do not. Arguments as
    /// of [`Store::diff`]. The time of the root directory is not compared: that of the upper is what is seen, and each
    /// container has its own.
    pub fn may_have_changes(lower: &Lower, upper: BorrowedFd<'_>, ids: &IdMap) -> Result<bool> {
        let dir = rustix::fs::Dir::read_from(upper).at("read", "an upper")?;
        for entry in dir {
            let entry = entry.at("read", "an upper")?;
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                return Ok(true);
            }
        }
        // A removal in the root leaves a whiteout: the root itself is what can still differ.
        let Some(base) = lower.layers.first() else { return Ok(true) };
        let look = |dir: BorrowedFd<'_>| rustix::fs::fstat(dir).at("stat", "a root");
        let (own, was) = (look(upper)?, look(base.dir.as_fd())?);
        let inside = |id: u32| ids.to_inside(id).unwrap_or(id);
        let owner = (inside(own.st_uid), inside(own.st_gid));
        let same = own.st_mode == was.st_mode && owner == (was.st_uid, was.st_gid);
        let xattrs = |dir: BorrowedFd<'_>, map: &dyn Fn(u32) -> u32| {
            let path = format!("/proc/self/fd/{}/", dir.as_raw_fd());
            crate::walk::xattrs(path.as_bytes(), true, map).at("read the xattrs of", "a root")
        };
        Ok(!same || xattrs(upper, &inside)? != xattrs(base.dir.as_fd(), &|id| id)?)
    }

    /// Creates an image from a container: its image's layers (none for `--rootfs`, then the one new
    /// layer contains everything) and a layer with its changes. The container must be stopped or
    /// paused.
    pub fn commit(
        &self,
        base: Option<&Image>,
        lower: &Lower,
        upper: BorrowedFd<'_>,
        ids: &IdMap,
        commit: &Commit,
        progress: &dyn Progress,
    ) -> Result<ImageId> {
        self.with_layer(base, commit, |import| {
            layer_of(import, progress, |out| changes(base.is_none(), lower, upper, ids, out))
        })
    }

    /// Writes the layer of a [`Store::commit`] as a tar, with the ids inside the container: its
    /// changes, or with `whole` all of its files. The container must be stopped or paused.
    pub fn changes(
        &self,
        whole: bool,
        lower: &Lower,
        upper: BorrowedFd<'_>,
        ids: &IdMap,
        out: &mut dyn Write,
    ) -> Result<()> {
        changes(whole, lower, upper, ids, out)
    }

    /// Creates an image from another one (without `base`: from nothing) and a layer in a tar, such
    /// as [`Store::changes`] has written. The tar is untrusted.
    pub fn add_layer(
        &self,
        base: Option<&Image>,
        layer: &mut dyn Read,
        commit: &Commit,
        progress: &dyn Progress,
    ) -> Result<ImageId> {
        self.with_layer(base, commit, |import| {
            Ok(import.layer(layer, Expect::default(), progress)?.diff_id)
        })
    }

    /// Creates an image from another one and a layer that `make` imports.
    fn with_layer(
        &self,
        base: Option<&Image>,
        commit: &Commit,
        make: impl FnOnce(&Import<'_>) -> Result<Digest>,
    ) -> Result<ImageId> {
        let result = self.begin().and_then(|import| {
            let layer = make(&import)?;
            let mut config = match base {
                Some(image) => {
                    let bytes = self.config_bytes(image)?;
                    serde_json::from_slice(&bytes).map_err(|source| Fault::Json {
                        what: "image configuration",
                        path: self.image_dir(&image.id).join("config.json"),
                        source,
                    })?
                }
                None => json!({ "architecture": architecture(), "os": "linux" }),
            };
            extend(&mut config, &layer.to_string(), commit)?;
            let config = to_json(&config)?;
            import.image(NewImage { config: &config, manifest: None, name: commit.name.as_ref() })
        });
        if result.is_err() {
            self.sweep_if_idle();
        }
        result
    }

    /// Writes the files of a container as a tar, with the ids inside the container.
    pub fn export(
        &self,
        lower: &Lower,
        upper: Option<BorrowedFd<'_>>,
        ids: &IdMap,
        out: &mut dyn Write,
    ) -> Result<()> {
        let inside = |id: u32| ids.to_inside(id).unwrap_or(id);
        let root = here(view(lower, upper)?)?;
        let mut walker = Walker::new(out, &inside);
        walker.tree(&root, b"", 0)?;
        walker.out.finish().at("end the tar of", "the container").map(drop)
    }
}

/// A receiver of changes.
trait Sink {
    /// A directory that may have changes below; `kind` is `None` if the directory itself is
    /// unchanged.
    fn directory(&mut self, kind: Option<ChangeKind>, here: &Here, path: &[u8]) -> Result<()>;
    /// Any other kind of file.
    fn leaf(&mut self, kind: ChangeKind, place: &Place<'_>, stat: &Stat) -> Result<()>;
    /// A name was removed.
    fn deleted(&mut self, parent: &[u8], name: &[u8]) -> Result<()>;
}

/// A name in a directory of the merged view.
struct Place<'p> {
    dir: &'p OwnedFd,
    name: &'p [u8],
    path: &'p [u8],
}

/// A list, with every directory that has changes below.
#[derive(Debug, Default)]
struct List(BTreeMap<Vec<u8>, ChangeKind>);

impl List {
    fn note(&mut self, path: &[u8], kind: ChangeKind) {
        let path = [b"/", path].concat();
        for (at, _) in path.iter().enumerate().skip(1).filter(|(_, b)| **b == b'/') {
            self.0.entry(path[..at].to_vec()).or_insert(ChangeKind::Changed);
        }
        self.0.insert(path, kind);
    }
}

impl Sink for List {
    fn directory(&mut self, kind: Option<ChangeKind>, _here: &Here, path: &[u8]) -> Result<()> {
        if let Some(kind) = kind.filter(|_| !path.is_empty()) {
            self.note(path, kind);
        }
        Ok(())
    }

    fn leaf(&mut self, kind: ChangeKind, place: &Place<'_>, _stat: &Stat) -> Result<()> {
        self.note(place.path, kind);
        Ok(())
    }

    fn deleted(&mut self, parent: &[u8], name: &[u8]) -> Result<()> {
        self.note(&join(parent, name), ChangeKind::Deleted);
        Ok(())
    }
}

/// A layer.
struct Layer<'w, 'i, W: Write> {
    walker: &'w mut Walker<'i, W>,
}

impl<W: Write> Sink for Layer<'_, '_, W> {
    fn directory(&mut self, kind: Option<ChangeKind>, here: &Here, path: &[u8]) -> Result<()> {
        if kind.is_some() {
            self.walker.head(here, path)?;
        }
        Ok(())
    }

    fn leaf(&mut self, _kind: ChangeKind, place: &Place<'_>, stat: &Stat) -> Result<()> {
        self.walker.leaf(place.dir, place.name, place.path, stat)
    }

    fn deleted(&mut self, parent: &[u8], name: &[u8]) -> Result<()> {
        self.walker.whiteout(parent, name)
    }
}

/// Writes the tar of a layer: the changes of a container, or all of its files.
fn changes(
    whole: bool,
    lower: &Lower,
    upper: BorrowedFd<'_>,
    ids: &IdMap,
    out: impl Write,
) -> Result<()> {
    let inside = |id: u32| ids.to_inside(id).unwrap_or(id);
    let mut walker = Walker::new(out, &inside);
    if whole {
        let root = here(view(lower, Some(upper))?)?;
        walker.tree(&root, b"", 0)?;
    } else {
        let mut sink = Layer { walker: &mut walker };
        compare_all(lower, upper, ids, &mut sink)?;
    }
    walker.out.finish().at("end the tar of", "the container").map(drop)
}

fn here(dir: OwnedFd) -> Result<Here> {
    let stat = rustix::fs::fstat(&dir).at("stat", "the root of a container")?;
    Ok(Here { dir, stat })
}

fn compare_all(
    lower: &Lower,
    upper: BorrowedFd<'_>,
    ids: &IdMap,
    sink: &mut dyn Sink,
) -> Result<()> {
    let merged = here(view(lower, Some(upper))?)?;
    let base = here(view(lower, None)?)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let upper = rustix::fs::openat(upper, ".", flags, Mode::empty()).at("open", "an upper")?;
    let changed = !same_meta(ids, &merged.dir, b".", &merged.stat, &base.dir, &base.stat)?;
    sink.directory(changed.then_some(ChangeKind::Changed), &merged, b"")?;
    let mut linked = HashSet::new();
    if has_index(&upper) {
        collect_linked(&merged, &upper, &mut linked, b"", 0)?;
    }
    let trees = Trees { base: Some(base.dir), upper: Some(upper), all: false };
    Compare { ids, sink, linked }.directory(&merged, &trees, b"", 0)
}

/// Returns whether overlayfs keeps hard links of the image together for this upper (`index=on`):
/// then a file can have changed under a name that is not in the upper.
fn has_index(upper: &OwnedFd) -> bool {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let index = std::path::Path::new("..").join("work").join("index");
    rustix::fs::openat(upper, index, flags, Mode::empty())
        .and_then(rustix::fs::Dir::new)
        .is_ok_and(|dir| dir.flatten().any(|e| !matches!(e.file_name().to_bytes(), b"." | b"..")))
}

/// Collects files with several names of which the upper contains only some, by device and inode in
/// the merged view.
fn collect_linked(
    merged: &Here,
    upper: &OwnedFd,
    linked: &mut HashSet<(u64, u64)>,
    path: &[u8],
    depth: usize,
) -> Result<()> {
    too_deep(path, depth)?;
    for name in names(&merged.dir, path)? {
        let below = join(path, &name);
        let Some(in_upper) = stat_at(upper, &name, &below)? else { continue };
        let Some(stat) = stat_at(&merged.dir, &name, &below)? else { continue };
        if is_directory(&stat) && is_directory(&in_upper) {
            let children = (open_at(&merged.dir, &name, &below)?, open_at(upper, &name, &below)?);
            if let (Some(merged), Some(upper)) = children {
                collect_linked(&merged, &upper.dir, linked, &below, depth + 1)?;
            }
        } else if stat.st_nlink > 1 {
            linked.insert((stat.st_dev, stat.st_ino));
        }
    }
    Ok(())
}

/// The directories that a merged directory is compared with.
struct Trees {
    base: Option<OwnedFd>,
    upper: Option<OwnedFd>,
    /// Everything counts as changed, even if it looks unchanged.
    all: bool,
}

struct Compare<'c> {
    ids: &'c IdMap,
    sink: &'c mut dyn Sink,
    linked: HashSet<(u64, u64)>,
}

impl Compare<'_> {
    fn directory(&mut self, merged: &Here, trees: &Trees, path: &[u8], depth: usize) -> Result<()> {
        too_deep(path, depth)?;
        let present = names(&merged.dir, path)?;
        for name in &present {
            let below = join(path, name);
            let Some(stat) = stat_at(&merged.dir, name, &below)? else { continue };
            let look = |tree: &Option<OwnedFd>| match tree {
                Some(dir) => stat_at(dir, name, &below),
                None => Ok(None),
            };
            let in_upper = look(&trees.upper)?;
            let link = self.linked.contains(&(stat.st_dev, stat.st_ino)) && !is_directory(&stat);
            let look_in = is_directory(&stat) && !self.linked.is_empty();
            if in_upper.is_none() && !trees.all && !link && !look_in {
                continue;
            }
            let in_base = look(&trees.base)?;
            if is_directory(&stat) {
                let Some(child) = open_at(&merged.dir, name, &below)? else { continue };
                let open = |tree: &Option<OwnedFd>| -> Result<Option<OwnedFd>> {
                    match tree {
                        Some(dir) => Ok(open_at(dir, name, &below)?.map(|here| here.dir)),
                        None => Ok(None),
                    }
                };
                let (base, upper) = (open(&trees.base)?, open(&trees.upper)?);
                let kind = match (&base, &in_base) {
                    (Some(base), Some(was)) => {
                        let same = same_meta(self.ids, &child.dir, b".", &child.stat, base, was)?;
                        (!same).then_some(ChangeKind::Changed)
                    }
                    (_, Some(_)) => Some(ChangeKind::Changed),
                    (_, None) => Some(ChangeKind::Added),
                };
                self.sink.directory(kind, &child, &below)?;
                let all = trees.all || upper.as_ref().is_some_and(is_another);
                self.directory(&child, &Trees { base, upper, all }, &below, depth + 1)?;
                continue;
            }
            let kind = match &in_base {
                None => ChangeKind::Added,
                Some(was) => {
                    let same = match (&trees.base, &trees.upper) {
                        (Some(base), Some(upper)) if !trees.all && !link => {
                            same_meta(self.ids, &merged.dir, name, &stat, base, was)?
                                && same_content(&merged.dir, base, upper, name, &stat, &below)?
                        }
                        _ => false,
                    };
                    if same {
                        continue;
                    }
                    ChangeKind::Changed
                }
            };
            let place = Place { dir: &merged.dir, name, path: &below };
            self.sink.leaf(kind, &place, &stat)?;
        }
        if let Some(base) = &trees.base {
            for name in names(base, path)? {
                if present.binary_search(&name).is_err() {
                    self.sink.deleted(path, &name)?;
                }
            }
        }
        Ok(())
    }
}

fn is_directory(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

/// Returns whether an upper directory is not a version of the lower one of the same name: it hides
/// that, or was renamed.
fn is_another(upper: &OwnedFd) -> bool {
    let mut value = [0; 4096];
    let opaque = rustix::fs::fgetxattr(upper, "trusted.overlay.opaque", &mut value[..]);
    // "x" means that it contains whiteouts that are files, not that it hides the lower directory.
    let opaque = opaque.is_ok_and(|n| &value[..n] == b"y");
    let redirect = rustix::fs::fgetxattr(upper, "trusted.overlay.redirect", &mut value[..]);
    opaque || matches!(redirect, Ok(_) | Err(Errno::RANGE))
}

fn same_meta(
    ids: &IdMap,
    dir: &OwnedFd,
    name: &[u8],
    stat: &Stat,
    base_dir: &OwnedFd,
    was: &Stat,
) -> Result<bool> {
    let inside = |id: u32| ids.to_inside(id).unwrap_or(id);
    let plain = stat.st_mode == was.st_mode
        && inside(stat.st_uid) == was.st_uid
        && inside(stat.st_gid) == was.st_gid
        && (stat.st_mtime, stat.st_mtime_nsec) == (was.st_mtime, was.st_mtime_nsec)
        && stat.st_rdev == was.st_rdev
        && (stat.st_size == was.st_size || is_directory(stat));
    if !plain {
        return Ok(false);
    }
    let read = |dir: &OwnedFd| -> Result<Meta> {
        let path = [format!("/proc/self/fd/{}/", dir.as_raw_fd()).as_bytes(), name].concat();
        let xattrs = crate::walk::xattrs(&path, true, &inside)
            .at("read the xattrs of", OsStr::from_bytes(name))?;
        Ok(Meta { xattrs, ..Meta::default() })
    };
    Ok(read(dir)? == read(base_dir)?)
}

/// Returns whether a file with the same metadata has the same content: it may have been written to,
/// with its old time restored.
fn same_content(
    dir: &OwnedFd,
    base: &OwnedFd,
    upper: &OwnedFd,
    name: &[u8],
    stat: &Stat,
    path: &[u8],
) -> Result<bool> {
    let shown = OsStr::from_bytes(path);
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {}
        FileType::Symlink => {
            let target = |dir| rustix::fs::readlinkat(dir, name, Vec::new()).at("read", shown);
            return Ok(target(dir)? == target(base)?);
        }
        _ => return Ok(true),
    }
    let proc = [format!("/proc/self/fd/{}/", upper.as_raw_fd()).as_bytes(), name].concat();
    let mut value = [0; 256];
    if rustix::fs::lgetxattr(&proc[..], "trusted.overlay.metacopy", &mut value[..]).is_ok() {
        return Ok(true);
    }
    let open = |dir| -> Result<File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        rustix::fs::openat(dir, name, flags, Mode::empty()).at("open", shown).map(File::from)
    };
    let (now, was) = (open(dir)?, open(base)?);
    let (mut a, mut b) = (vec![0; 64 << 10], vec![0; 64 << 10]);
    let mut at = 0;
    loop {
        let n = now.read_at(&mut a, at).at("read", shown)?;
        if n == 0 {
            return Ok(at == stat.st_size as u64);
        }
        if was.read_exact_at(&mut b[..n], at).is_err() || a[..n] != b[..n] {
            return Ok(false);
        }
        at += n as u64;
    }
}

/// Adds a layer and the metadata of a commit to a configuration.
fn extend(config: &mut Value, diff_id: &str, commit: &Commit) -> Result<()> {
    let bad = |what: &str| Fault::Invalid { what: format!("the image's configuration: {what}") };
    let root = config.as_object_mut().ok_or_else(|| bad("it is not an object"))?;
    let now = (!commit.undated).then(now);
    if let Some(now) = &now {
        root.insert("created".to_owned(), json!(now));
    }
    if let Some(author) = &commit.author {
        root.insert("author".to_owned(), json!(author));
    }
    let rootfs = root
        .entry("rootfs")
        .or_insert_with(|| json!({ "type": "layers", "diff_ids": [] }))
        .get_mut("diff_ids")
        .and_then(Value::as_array_mut)
        .ok_or_else(|| bad("it has no list of layers"))?;
    rootfs.push(json!(diff_id));
    let mut entry = json!({ "created_by": "dormouse commit" });
    if let Some(now) = now {
        entry["created"] = json!(now);
    }
    if let Some(message) = &commit.message {
        entry["comment"] = json!(message);
    }
    if let Some(author) = &commit.author {
        entry["author"] = json!(author);
    }
    root.entry("history")
        .or_insert_with(|| json!([]))
        .as_array_mut()
        .ok_or_else(|| bad("its history is not a list"))?
        .push(entry);
    let process = root.entry("config").or_insert_with(|| json!({}));
    if process.is_null() {
        *process = json!({});
    }
    for change in &commit.changes {
        apply(process, change)?;
    }
    Ok(())
}

/// Applies one change in Dockerfile syntax.
pub(crate) fn apply(process: &mut Value, change: &str) -> Result<()> {
    let bad = || -> crate::ImageError {
        let what = format!(
            "'{change}' is not a change: expected CMD, ENTRYPOINT, ENV, EXPOSE, LABEL, STOPSIGNAL, \
             USER, VOLUME or WORKDIR and what it shall be"
        );
        Fault::Invalid { what }.into()
    };
    let (word, rest) = change.trim().split_once(char::is_whitespace).ok_or_else(bad)?;
    let rest = rest.trim();
    let object = process.as_object_mut().ok_or_else(bad)?;
    let list = || -> Result<Value> {
        match serde_json::from_str::<Vec<String>>(rest) {
            Ok(words) => Ok(json!(words)),
            Err(_) if rest.starts_with('[') => Err(bad()),
            Err(_) => Ok(json!(["/bin/sh", "-c", rest])),
        }
    };
    let pair = || -> Result<(&str, &str)> {
        let (key, value) = rest.split_once(['=', ' ']).ok_or_else(bad)?;
        let unquoted = value.strip_prefix('"').and_then(|v| v.strip_suffix('"'));
        Ok((key, unquoted.unwrap_or(value)))
    };
    let mut set = |key: &str, value: Value| drop(object.insert(key.to_owned(), value));
    match word.to_ascii_uppercase().as_str() {
        "CMD" => set("Cmd", list()?),
        "ENTRYPOINT" => set("Entrypoint", list()?),
        "USER" => set("User", json!(rest)),
        "WORKDIR" => set("WorkingDir", json!(rest)),
        "STOPSIGNAL" => set("StopSignal", json!(rest)),
        "LABEL" => {
            let (key, value) = pair()?;
            let labels = object.entry("Labels").or_insert_with(|| json!({}));
            labels.as_object_mut().ok_or_else(bad)?.insert(key.to_owned(), json!(value));
        }
        "EXPOSE" => {
            let port = if rest.contains('/') { rest.to_owned() } else { format!("{rest}/tcp") };
            let ports = object.entry("ExposedPorts").or_insert_with(|| json!({}));
            ports.as_object_mut().ok_or_else(bad)?.insert(port, json!({}));
        }
        "VOLUME" => {
            let volumes = object.entry("Volumes").or_insert_with(|| json!({}));
            let volumes = volumes.as_object_mut().ok_or_else(bad)?;
            let paths = serde_json::from_str(rest).unwrap_or_else(|_| vec![rest.to_owned()]);
            paths.into_iter().for_each(|path: String| drop(volumes.insert(path, json!({}))));
        }
        "ENV" => {
            let (key, value) = pair()?;
            let env = object.entry("Env").or_insert_with(|| json!([]));
            let env = env.as_array_mut().ok_or_else(bad)?;
            let start = format!("{key}=");
            env.retain(|old| !old.as_str().is_some_and(|old| old.starts_with(&start)));
            env.push(json!(format!("{start}{value}")));
        }
        _ => return Err(bad()),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dockerfile_instructions_change_the_configuration() {
        let mut config = json!({ "rootfs": { "type": "layers", "diff_ids": ["sha256:a"] },
            "config": { "Env": ["A=1", "B=2"] } });
        let words = [
            "ENV A=3",
            "CMD [\"/a\",\"b\"]",
            "ENTRYPOINT run it",
            "EXPOSE 80",
            "LABEL k=\"v w\"",
            "USER 5",
            "WORKDIR /w",
            "VOLUME [\"/v\"]",
            "STOPSIGNAL 9",
        ];
        let commit = Commit {
            changes: words.map(str::to_owned).to_vec(),
            message: Some("m".to_owned()),
            ..Commit::default()
        };
        extend(&mut config, "sha256:b", &commit).unwrap();
        assert_eq!(config["rootfs"]["diff_ids"], json!(["sha256:a", "sha256:b"]));
        assert_eq!(
            config["config"],
            json!({
                "Env": ["B=2", "A=3"], "Cmd": ["/a", "b"],
                "Entrypoint": ["/bin/sh", "-c", "run it"], "ExposedPorts": { "80/tcp": {} },
                "Labels": { "k": "v w" }, "User": "5", "WorkingDir": "/w",
                "Volumes": { "/v": {} }, "StopSignal": "9",
            })
        );
        assert_eq!(config["history"][0]["comment"], "m");
        for bad in ["", "CMD", "FROM x", "CMD [1", "ENV A"] {
            assert!(apply(&mut json!({}), bad).is_err(), "{bad}");
        }
    }
}
