//! The tree of an image: OCI's rules for stacking layers, in memory.
//!
//! A layer is first made into a separate tree, then merged over the lower tree. Names are looked up
//! in these trees and nowhere else. The rules (OCI image specification, "Image Layer Filesystem
//! Changeset"; where it is silent, the behaviour of docker's and podman's overlay drivers):
//!
//! - An entry replaces the one of the same name, but a directory laid over a directory keeps what
//!   is in it. Of two entries of one path in a layer the later one counts.
//! - `.wh.NAME` removes NAME of the layers below; `.wh..wh..opq` removes everything in the
//!   directory below. Neither affects entries of its own layer, whichever comes first. Other
//!   `.wh..wh.` names are aufs' own and are ignored.
//! - A path that leads through a symlink of its own layer follows it, inside the tree. A symlink
//!   of a lower layer is not followed: the path makes a directory in its place.
//! - A directory that is only named in passing gets mode 0755 and root, or stays as it is below.
//! - A hard link is to a file of its own layer or, if there is none, of the layers below.

use std::collections::{BTreeMap, BTreeSet};

use crate::archive::{Entry, Kind, Meta};
use crate::error::{Fault, ImageError, Result};
use crate::layer::Content;

/// Deepest directory. LIMIT: PATH_MAX allows 2048, links in a hostile archive allow more.
const MAX_DEPTH: usize = 1024;
/// Symlinks followed for one path, as the kernel does.
const MAX_LINKS: usize = 40;

/// LIMIT: directories that only the paths of a layer or an image name, beyond one for each entry. One path
/// of a few kilobytes can name [`MAX_DEPTH`] of them.
const MAX_IMPLIED: usize = 1 << 16;

type Name = Box<[u8]>;
type Id = usize;

/// Something with a name.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub meta: Meta,
    pub kind: NodeKind,
}

/// The kind of the node.
#[derive(Debug, Clone)]
pub(crate) enum NodeKind {
    Directory(Directory),
    File {
        size: u64,
        content: Content,
    },
    Symlink(Vec<u8>),
    Char {
        major: u32,
        minor: u32,
    },
    Block {
        major: u32,
        minor: u32,
    },
    Fifo,
    /// In the tree of a layer only: a hard link to a path of the layers below.
    LinkBelow(Vec<u8>),
}

/// Names in a directory. Two names of one node are hard links.
#[derive(Debug, Clone, Default)]
pub(crate) struct Directory {
    pub entries: BTreeMap<Name, Id>,
    /// In the tree of a layer: names that are removed below.
    whiteouts: BTreeSet<Name>,
    /// In the tree of a layer: everything below is removed.
    opaque: bool,
    /// In the tree of a layer: no entry gave its owner and mode.
    implied: bool,
}

/// Nodes by number; the root is 0. Nodes that no name leads to are left over from layers below.
#[derive(Debug, Clone)]
pub(crate) struct Tree {
    pub nodes: Vec<Node>,
}

impl Tree {
    /// A root directory and nothing in it.
    pub(crate) fn new() -> Self {
        Self { nodes: vec![implied_directory()] }
    }

    /// Adds the mount points of every container, if the layers have nothing of those names.
    /// Otherwise they would be created in the writable layer of each container: two copied
    /// directories and three files, with their blocks on the disk.
    pub(crate) fn add_mount_points(&mut self) {
        for name in ["dev", "proc", "sys"] {
            self.entry(0, name, implied_directory);
        }
        let etc = self.entry(0, "etc", implied_directory);
        if let NodeKind::Directory(_) = self.nodes[etc].kind {
            for name in ["hostname", "hosts", "resolv.conf"] {
                self.entry(etc, name, empty_file);
            }
        }
    }

    /// Returns the entry of this name in a directory, created if missing.
    fn entry(&mut self, directory: Id, name: &str, make: fn() -> Node) -> Id {
        let next = self.nodes.len();
        let NodeKind::Directory(into) = &mut self.nodes[directory].kind else { return directory };
        let id = *into.entries.entry(name.as_bytes().into()).or_insert(next);
        if id == next {
            self.nodes.push(make());
        }
        id
    }

    /// Merges a layer over this tree.
    pub(crate) fn lay(&mut self, entries: &[Entry<Content>]) -> Result<()> {
        let layer = layer_tree(entries)?;
        let mut moved = vec![None; layer.nodes.len()];
        self.lay_directory(0, &layer, 0, &mut moved)
    }

    fn lay_directory(
        &mut self,
        below: Id,
        layer: &Tree,
        above: Id,
        moved: &mut [Option<Id>],
    ) -> Result<()> {
        let NodeKind::Directory(from) = &layer.nodes[above].kind else { return Ok(()) };
        if !from.implied {
            self.nodes[below].meta = layer.nodes[above].meta.clone();
        }
        let NodeKind::Directory(into) = &mut self.nodes[below].kind else { return Ok(()) };
        into.implied &= from.implied;
        if from.opaque {
            into.entries.clear();
        }
        for name in &from.whiteouts {
            into.entries.remove(name);
        }
        for (name, child) in &from.entries {
            let NodeKind::Directory(into) = &self.nodes[below].kind else { return Ok(()) };
            let old = into.entries.get(name).copied();
            let both = |id: Id| {
                matches!(self.nodes[id].kind, NodeKind::Directory(_))
                    && matches!(layer.nodes[*child].kind, NodeKind::Directory(_))
            };
            let id = match old {
                Some(old) if both(old) => {
                    self.lay_directory(old, layer, *child, moved)?;
                    continue;
                }
                _ => self.copy(layer, *child, moved)?,
            };
            if let NodeKind::Directory(into) = &mut self.nodes[below].kind {
                into.entries.insert(name.clone(), id);
            }
        }
        Ok(())
    }

    /// Copies a node of a layer, once for all its names.
    fn copy(&mut self, layer: &Tree, from: Id, moved: &mut [Option<Id>]) -> Result<Id> {
        if let Some(id) = moved[from] {
            return Ok(id);
        }
        let node = &layer.nodes[from];
        let id = match &node.kind {
            NodeKind::LinkBelow(target) => match self.find(target) {
                Some(id) if !matches!(self.nodes[id].kind, NodeKind::Directory(_)) => id,
                _ => return Err(link_to_nothing(target)),
            },
            NodeKind::Directory(_) => {
                let id = self.nodes.len();
                let mut empty = Directory::default();
                if let NodeKind::Directory(d) = &node.kind {
                    empty.implied = d.implied;
                }
                let meta = node.meta.clone();
                self.nodes.push(Node { meta, kind: NodeKind::Directory(empty) });
                self.lay_directory(id, layer, from, moved)?;
                id
            }
            _ => {
                self.nodes.push(node.clone());
                self.nodes.len() - 1
            }
        };
        moved[from] = Some(id);
        Ok(id)
    }

    /// Returns the node at a path with directories as parents.
    fn find(&self, path: &[u8]) -> Option<Id> {
        let mut at = 0;
        for part in path.split(|b| *b == b'/').filter(|p| !p.is_empty()) {
            let NodeKind::Directory(directory) = &self.nodes[at].kind else { return None };
            at = *directory.entries.get(part)?;
        }
        Some(at)
    }

    /// Returns the number of names of each node; 0 for replaced nodes of lower layers.
    pub(crate) fn links(&self) -> Vec<u32> {
        let mut links = vec![0; self.nodes.len()];
        let mut waiting = vec![0];
        while let Some(id) = waiting.pop() {
            links[id] += 1;
            if let NodeKind::Directory(directory) = &self.nodes[id].kind {
                waiting.extend(directory.entries.values());
            }
        }
        links
    }

    /// Bytes of all files, each counted once.
    pub(crate) fn size_bytes(&self) -> u64 {
        let used = self.links();
        let size = |(node, links): (&Node, &u32)| match node.kind {
            NodeKind::File { size, .. } if *links > 0 => size,
            _ => 0,
        };
        self.nodes.iter().zip(&used).map(size).fold(0, u64::saturating_add)
    }
}

/// Checks that entries make a layer, without keeping the tree.
pub(crate) fn check_layer(entries: &[Entry<Content>]) -> Result<()> {
    layer_tree(entries).map(drop)
}

/// The tree of one layer.
fn layer_tree(entries: &[Entry<Content>]) -> Result<Tree> {
    let mut tree = Tree::new();
    for (index, entry) in entries.iter().enumerate() {
        tree.add(entry).map_err(|problem| {
            let name = String::from_utf8_lossy(&entry.path).chars().take(120).collect::<String>();
            ImageError::from(Fault::Entry { entry: name.escape_debug().to_string(), problem })
        })?;
        tree.check_size(index + 1)?;
    }
    Ok(tree)
}

impl Tree {
    /// Refuses a tree that so many entries made larger than honest ones do.
    pub(crate) fn check_size(&self, entries: usize) -> Result<()> {
        let limit = 2 * entries + MAX_IMPLIED;
        if self.nodes.len() <= limit {
            return Ok(());
        }
        let what = "the number of directories that only paths of the archive name".to_owned();
        Err(Fault::Limit { what, limit: limit as u64 }.into())
    }

    /// Adds an entry to the tree of its layer.
    fn add(&mut self, entry: &Entry<Content>) -> Result<(), String> {
        let path = &entry.path[..];
        if path.is_empty() {
            return match entry.kind {
                Kind::Directory => {
                    self.nodes[0].meta = entry.meta.clone();
                    self.explicit(0);
                    Ok(())
                }
                _ => Err("the root is not a directory".to_owned()),
            };
        }
        let (parent, name) = match path.iter().rposition(|b| *b == b'/') {
            Some(slash) => (&path[..slash], &path[slash + 1..]),
            None => (&path[..0], path),
        };
        let (parent, depth) = self.make_directories(parent)?;
        if let Some(hidden) = name.strip_prefix(b".wh.") {
            let directory = self.directory(parent)?;
            match hidden {
                b".wh..opq" => directory.opaque = true,
                [b'.', b'w', b'h', b'.', ..] => {}
                b"" | b"." | b".." => return Err("it hides no name".to_owned()),
                _ => drop(directory.whiteouts.insert(hidden.into())),
            }
            return Ok(());
        }
        if depth >= MAX_DEPTH {
            return Err(format!("it is more than {MAX_DEPTH} directories deep"));
        }
        let old = self.directory(parent)?.entries.get(name).copied();
        let kind = match &entry.kind {
            Kind::Directory => {
                if let Some(old) = old
                    && matches!(self.nodes[old].kind, NodeKind::Directory(_))
                {
                    self.nodes[old].meta = entry.meta.clone();
                    self.explicit(old);
                    return Ok(());
                }
                NodeKind::Directory(Directory::default())
            }
            Kind::HardLink { target } => {
                let id = match self.follow_parent(target)? {
                    Some(id) if matches!(self.nodes[id].kind, NodeKind::Directory(_)) => {
                        return Err("it is a hard link to a directory".to_owned());
                    }
                    Some(id) if Some(id) == old => return Ok(()),
                    Some(id) => id,
                    None => {
                        let kind = NodeKind::LinkBelow(target.clone());
                        self.push(Node { meta: Meta::default(), kind })
                    }
                };
                self.directory(parent)?.entries.insert(name.into(), id);
                return Ok(());
            }
            Kind::File { size, content } => {
                NodeKind::File { size: *size, content: content.clone() }
            }
            Kind::Symlink { target } => NodeKind::Symlink(target.clone()),
            Kind::Char { major, minor } => NodeKind::Char { major: *major, minor: *minor },
            Kind::Block { major, minor } => NodeKind::Block { major: *major, minor: *minor },
            Kind::Fifo => NodeKind::Fifo,
        };
        let id = self.push(Node { meta: entry.meta.clone(), kind });
        self.directory(parent)?.entries.insert(name.into(), id);
        Ok(())
    }

    fn push(&mut self, node: Node) -> Id {
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    fn explicit(&mut self, id: Id) {
        if let NodeKind::Directory(directory) = &mut self.nodes[id].kind {
            directory.implied = false;
        }
    }

    fn directory(&mut self, id: Id) -> Result<&mut Directory, String> {
        match &mut self.nodes[id].kind {
            NodeKind::Directory(directory) => Ok(directory),
            _ => Err("what should hold it is not a directory".to_owned()),
        }
    }

    /// The directory at a path and how deep it is; made where it is missing.
    fn make_directories(&mut self, path: &[u8]) -> Result<(Id, usize), String> {
        self.walk(path, true)?.ok_or_else(|| "what should hold it is missing".to_owned())
    }

    /// Returns the node at a path without following its last part; `None` if there is none.
    fn follow_parent(&mut self, path: &[u8]) -> Result<Option<Id>, String> {
        let (parent, name) = match path.iter().rposition(|b| *b == b'/') {
            Some(slash) => (&path[..slash], &path[slash + 1..]),
            None => (&path[..0], path),
        };
        if name.is_empty() {
            return Err("it is a hard link to the root".to_owned());
        }
        let Some((parent, _)) = self.walk(parent, false)? else { return Ok(None) };
        Ok(self.directory(parent)?.entries.get(name).copied())
    }

    /// Follows a path to a directory, through symlinks of this tree, never above its root.
    fn walk(&mut self, path: &[u8], make: bool) -> Result<Option<(Id, usize)>, String> {
        // From the root down to the current directory.
        let mut stack = vec![0];
        let parts = |path: &[u8]| -> Vec<Name> {
            let parts = path.split(|b| *b == b'/').filter(|p| !p.is_empty() && *p != b".");
            parts.rev().map(Name::from).collect()
        };
        let mut todo = parts(path);
        let mut links = 0;
        while let Some(part) = todo.pop() {
            let here = *stack.last().unwrap_or(&0);
            if *part == *b".." {
                if stack.len() > 1 {
                    stack.pop();
                }
                continue;
            }
            let found = match &self.nodes[here].kind {
                NodeKind::Directory(directory) => directory.entries.get(&part).copied(),
                _ => return Err("what should hold it is not a directory".to_owned()),
            };
            let next = match found {
                Some(next) => next,
                None if !make => return Ok(None),
                None => {
                    let next = self.push(implied_directory());
                    self.directory(here)?.entries.insert(part, next);
                    next
                }
            };
            match &self.nodes[next].kind {
                NodeKind::Directory(_) => stack.push(next),
                NodeKind::Symlink(target) => {
                    links += 1;
                    if links > MAX_LINKS {
                        return Err("its path leads through too many symlinks".to_owned());
                    }
                    if target.starts_with(b"/") {
                        stack.truncate(1);
                    }
                    todo.extend(parts(target));
                }
                NodeKind::LinkBelow(_) if !make => return Ok(None),
                _ => return Err("what should hold it is not a directory".to_owned()),
            }
            if stack.len() > MAX_DEPTH || todo.len() > 8 * MAX_DEPTH {
                return Err(format!("it is more than {MAX_DEPTH} directories deep"));
            }
        }
        Ok(Some((*stack.last().unwrap_or(&0), stack.len())))
    }
}

fn implied_directory() -> Node {
    let kind = NodeKind::Directory(Directory { implied: true, ..Directory::default() });
    Node { meta: Meta { mode: 0o755, ..Meta::default() }, kind }
}

fn empty_file() -> Node {
    let kind = NodeKind::File { size: 0, content: Content::Inline(Vec::new()) };
    Node { meta: Meta { mode: 0o644, ..Meta::default() }, kind }
}

fn link_to_nothing(target: &[u8]) -> ImageError {
    let entry = String::from_utf8_lossy(target).chars().take(120).collect::<String>();
    let problem = "a hard link leads there, and no layer has it".to_owned();
    Fault::Entry { entry: entry.escape_debug().to_string(), problem }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_created_and_those_of_layers_stay() {
        let entry = |path: &str, kind| Entry {
            path: path.as_bytes().to_vec(),
            meta: Meta { mode: 0o700, ..Meta::default() },
            kind,
        };
        let link = Kind::Symlink { target: b"../run/resolv.conf".to_vec() };
        let mut tree = Tree::new();
        tree.lay(&[entry("etc", Kind::Directory), entry("etc/resolv.conf", link)]).unwrap();
        tree.add_mount_points();
        let node = |path: &str| tree.find(path.as_bytes()).map(|id| &tree.nodes[id]);
        for directory in ["dev", "proc", "sys"] {
            assert!(matches!(node(directory).unwrap().kind, NodeKind::Directory(_)), "{directory}");
        }
        for file in ["etc/hostname", "etc/hosts"] {
            assert!(matches!(node(file).unwrap().kind, NodeKind::File { size: 0, .. }), "{file}");
        }
        assert_eq!(node("etc").unwrap().meta.mode, 0o700);
        assert!(matches!(node("etc/resolv.conf").unwrap().kind, NodeKind::Symlink(_)));
    }
}
