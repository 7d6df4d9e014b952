//! Mount namespaces that processes have created, and mounts that they have added to the container's
//! own: each mount as mountinfo (proc_pid_mountinfo(5)) describes it, and its source for the
//! restore.
//!
//! A mount shows a part of a file system. The source may be a mount of the same part that the
//! configuration makes, an earlier mount of the same namespace, or a namespace that is restored
//! before. A tmpfs without such a source is saved with its contents, and a procfs is mounted anew.
//! Everything else is refused.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::call::{self, CloneFlags};
use dormouse_kernel::{mount as kernel_mount, pidfd, process};
use dormouse_record::{Mount, MountSource, Mounts, PROC_OPTIONS, Thing, Tmpfs};
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, StatxAttributes, StatxFlags};

use super::known::mount::MountNamespace;
use super::refusal::{self, Reason};
use super::seen::Seen;
use super::subject::Places;
use super::survey::Survey;
use super::tmpfs;
use crate::look::file::{self, mount_of};
use crate::look::mountinfo::{Row, below, rows};

/// Finds all namespaces, and refuses those that cannot be saved.
pub(super) fn find(survey: &mut Survey<'_>, tree: &[Seen]) {
    let Some(first) = tree.first() else { return };
    let Some(base) = Base::of(first.pid, survey.subject.mounts.as_ref()) else { return };
    // ORDER: other namespaces may use these mounts as sources.
    if let Err(why) = own(survey, &base, first) {
        survey.found.refusals.push(refusal::of_object(why));
    }
    let container = first.link("mnt");
    let mut groups: Vec<(&str, Vec<&Seen>)> = Vec::new();
    for seen in tree.iter().filter(|seen| !seen.is_zombie) {
        // The process may have exited meanwhile: nothing is stopped yet.
        let Some(link) = seen.link("mnt").filter(|link| Some(*link) != container) else {
            continue;
        };
        match groups.iter_mut().find(|(one, _)| *one == link) {
            Some((_, members)) => members.push(seen),
            None => groups.push((link, vec![seen])),
        }
    }
    for (link, members) in groups {
        let found = one(survey, &base, &members);
        survey.mounts.by_link.insert(link.to_owned(), found);
    }
}

/// Adds the mount namespace of some processes; returns its number.
fn one(survey: &mut Survey<'_>, base: &Base, members: &[&Seen]) -> Result<usize, Reason> {
    // mountinfo shows only the mounts below the root of the process.
    let is_at_the_top = |seen: &&&Seen| {
        let root = fs::read_link(format!("/proc/{}/root", seen.pid));
        root.is_ok_and(|root| root.as_os_str() == "/")
    };
    let witness = members.iter().find(is_at_the_top);
    let witness = witness.ok_or("no process at its root, which is not saved yet")?;
    let rows = rows(witness.pid).ok_or("an incomplete mountinfo")?;
    let object = survey.reserve();
    let (mounts, order) = namespace(survey, base, witness, object, &rows)?;
    survey.found.objects[object].thing = Thing::Mounts(Mounts { mounts, own: false });
    let number = survey.mounts.all.len();
    survey.mounts.of_mounts.extend(rows.iter().map(|row| (row.id, number)));
    survey.mounts.all.push(MountNamespace { witness: witness.pid, object, rows, order });
    Ok(number)
}

/// Adds the mounts that processes have added to the container's own namespace, if any.
fn own(survey: &mut Survey<'_>, base: &Base, first: &Seen) -> Result<(), Reason> {
    if base.rows.iter().all(|row| base.is_made_anew(row)) {
        return Ok(());
    }
    let object = survey.reserve();
    let mut order: Vec<usize> = Vec::new();
    let mut mounts = Vec::new();
    for n in in_order(&base.rows)? {
        let row = &base.rows[n];
        if base.is_made_anew(row) {
            continue;
        }
        let reason = |what: &str| {
            format!(
                "its processes have mounted {} at '{}' {what}, which is not saved yet",
                row.kind, row.place
            )
        };
        if row.root.ends_with("//deleted") {
            return Err(reason("of what was deleted"));
        }
        if base.is_place_gone(row) {
            return Err(reason("at a place that its processes have made in /dev"));
        }
        let attributes =
            row.attributes.ok_or_else(|| reason("with an option that is not known"))?;
        let peers = base.rows.iter().filter(|other| other.shared == row.shared).count();
        if row.is_special || row.shared.is_some() && peers > 1 {
            return Err(reason("that is shared with another"));
        }
        let source = source(survey, base, first, (object, &base.rows), (&order, &mounts), row)
            .map_err(|why| format!("its processes have mounted something: {why}"))?;
        let (parent, place) = (None, row.place.clone());
        let (name, shared) = (name(row, &source)?, row.shared.is_some());
        mounts.push(Mount { parent, place, source, attributes, shared, name });
        order.push(n);
    }
    survey.found.objects[object].thing = Thing::Mounts(Mounts { mounts, own: true });
    let rows = base.rows.clone();
    let number = survey.mounts.all.len();
    survey.mounts.of_mounts.extend(order.iter().map(|n| (rows[*n].id, number)));
    survey.mounts.all.push(MountNamespace { witness: first.pid, object, rows, order });
    Ok(())
}

/// The mounts of the container's own namespace.
struct Base {
    pid: u32,
    rows: Vec<Row>,
    /// The mounts of its configuration.
    given: HashSet<u64>,
    /// Mounts that came from the host with one of these, or that are mounted when needed.
    passed_by: HashSet<u64>,
}

impl Base {
    fn of(pid: u32, places: Option<&Places>) -> Option<Self> {
        let rows = rows(pid)?;
        let (mut given, mut passed_by) = (HashSet::new(), HashSet::new());
        let Some(places) = places else {
            given.extend(rows.iter().map(|row| row.id));
            return Some(Self { pid, rows, given, passed_by });
        };
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let root = format!("/proc/{pid}/root");
        let root = rustix::fs::open(root, flags | OFlags::DIRECTORY, Mode::empty()).ok()?;
        let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let at = |path: &String| {
            // The lowest mount at the place was the first.
            if let Some(row) = rows.iter().find(|row| row.place == *path) {
                return Some(row.id);
            }
            // The path may lead through a symbolic link.
            let open = rustix::fs::openat2(&root, path, flags, Mode::empty(), how).ok()?;
            let (at, wanted) = (AtFlags::EMPTY_PATH, StatxFlags::MNT_ID);
            let status = rustix::fs::statx(&open, c"", at, wanted).ok()?;
            if !status.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
                return None;
            }
            let mut row = rows.iter().find(|row| row.id == status.stx_mnt_id)?;
            while let Some(below) = rows.iter().find(|other| {
                other.id == row.parent && other.id != row.id && other.place == row.place
            }) {
                row = below;
            }
            Some(row.id)
        };
        given.extend(places.configured.iter().filter_map(at));
        let is_theirs = |row: &Row| row.kind == "devpts" && row.place == places.terminals;
        passed_by.extend(rows.iter().filter(|row| is_theirs(row)).map(|row| row.id));
        let mut above: Vec<u64> = places.trees.iter().filter_map(at).collect();
        while let Some(id) = above.pop() {
            let inner = rows.iter().filter(|row| row.parent == id && !given.contains(&row.id));
            let inner: Vec<u64> = inner.map(|row| row.id).collect();
            passed_by.extend(&inner);
            above.extend(inner);
        }
        Some(Self { pid, rows, given, passed_by })
    }

    /// Whether a start mounts it, or it is not needed.
    fn is_made_anew(&self, row: &Row) -> bool {
        self.given.contains(&row.id) || self.passed_by.contains(&row.id)
    }

    /// Whether a mount is at a place in the engine's directory of devices that a start does not make.
    fn is_place_gone(&self, row: &Row) -> bool {
        const MADE: [&str; 10] =
            ["null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm", "mqueue"];
        let is_of_engine = |other: &&Row| other.id == row.parent && other.place == "/dev";
        let name = row.place.strip_prefix("/dev/");
        let is_covered = |other: &Row| other.place == row.place && self.given.contains(&other.id);
        !self.rows.iter().any(is_covered)
            && self.rows.iter().find(is_of_engine).is_some_and(|dev| self.given.contains(&dev.id))
            && name.is_some_and(|name| !MADE.contains(&name))
    }

    /// Whether the path below a mount's root is visible, and not covered.
    fn is_seen(&self, row: &Row, below: &str) -> bool {
        let open = file::lookup(self.pid, &join(&row.place, below));
        open.is_ok_and(|open| mount_of(open.as_fd()) == Ok(row.id))
    }

    /// The path at which the container has the same part of a file system.
    fn path(&self, wanted: &Row, inode: Option<(u64, u64)>) -> Option<String> {
        self.rows.iter().find_map(|row| {
            let below = wanted.part_of(row)?;
            let is_alone = self.rows.iter().filter(|other| other.place == row.place).count() == 1;
            if !is_alone || !self.given.contains(&row.id) {
                return None;
            }
            let path = join(&row.place, below);
            let open = file::lookup(self.pid, &path).ok()?;
            let stat = rustix::fs::fstat(&open).ok()?;
            let is_same = inode.is_none_or(|inode| inode == (stat.st_dev, stat.st_ino));
            (mount_of(open.as_fd()) == Ok(row.id) && is_same).then_some(path)
        })
    }
}

fn join(above: &str, below: &str) -> String {
    if below.is_empty() {
        above.to_owned()
    } else {
        format!("{}/{below}", above.trim_end_matches('/'))
    }
}

/// The rows of a namespace in the order in which they can be mounted: each after its parent, and a
/// covered mount before the one that covers it.
fn in_order(rows: &[Row]) -> Result<Vec<usize>, Reason> {
    let ids: HashSet<u64> = rows.iter().map(|row| row.id).collect();
    let mut children: HashMap<u64, Vec<usize>> = HashMap::new();
    let mut tops = Vec::new();
    for (n, row) in rows.iter().enumerate() {
        match ids.contains(&row.parent) && row.parent != row.id {
            true => children.entry(row.parent).or_default().push(n),
            false => tops.push(n),
        }
    }
    let [top] = tops[..] else { return Err("more than one root, which is not saved yet".into()) };
    let mut order = Vec::new();
    let mut next = vec![top];
    while let Some(n) = next.pop() {
        order.push(n);
        let mut inner = children.remove(&rows[n].id).unwrap_or_default();
        // The last is taken first.
        inner.sort_by_key(|child| rows[*child].place.len());
        next.extend(inner);
    }
    Ok(order)
}

/// The record of a namespace, and the row of each of its mounts.
fn namespace(
    survey: &mut Survey<'_>,
    base: &Base,
    witness: &Seen,
    object: usize,
    rows: &[Row],
) -> Result<(Vec<Mount>, Vec<usize>), Reason> {
    let order = in_order(rows)?;
    let mut mounts: Vec<Mount> = Vec::new();
    for (n, row) in order.iter().map(|n| &rows[*n]).enumerate() {
        let reason =
            |what: &str| format!("a mount at '{}' {what}, which is not saved yet", row.place);
        let parent = order[..n].iter().position(|other| rows[*other].id == row.parent);
        let place = match parent {
            None if n == 0 && row.place == "/" => "",
            None => return Err(reason("that is out of reach")),
            Some(parent) => below(&row.place, &rows[order[parent]].place)
                .ok_or_else(|| reason("that is out of reach"))?,
        };
        if row.root.ends_with("//deleted") {
            return Err(reason("of what was deleted"));
        }
        let attributes =
            row.attributes.ok_or_else(|| reason("with an option that is not known"))?;
        let peers = survey.mounts.all.iter().flat_map(|other| &other.rows).chain(&base.rows);
        let peers = peers.chain(rows).filter(|other| other.shared == row.shared).count();
        if row.is_special || row.shared.is_some() && peers > 1 {
            return Err(reason("that is shared with another"));
        }
        let source = source(survey, base, witness, (object, rows), (&order[..n], &mounts), row)?;
        let place = place.to_owned();
        let (name, shared) = (name(row, &source)?, row.shared.is_some());
        mounts.push(Mount { parent, place, source, attributes, shared, name });
    }
    Ok((mounts, order))
}

/// The name of a new file system, if it has another than its type. A copy of a mount has that of its source.
fn name(row: &Row, source: &MountSource) -> Result<Option<String>, Reason> {
    let is_copy = matches!(source, MountSource::Container { .. } | MountSource::Mount { .. });
    if is_copy || row.name == row.kind {
        return Ok(None);
    }
    if row.name.len() > Mount::NAME_BYTES_MAX {
        return Err(format!(
            "a mount at '{}' whose source has a name of {} bytes, not saved",
            row.place,
            row.name.len()
        ));
    }
    Ok(Some(row.name.clone()))
}

/// The source from which a mount can be made again.
fn source(
    survey: &mut Survey<'_>,
    base: &Base,
    witness: &Seen,
    (object, rows): (usize, &[Row]),
    (order, mounts): (&[usize], &[Mount]),
    row: &Row,
) -> Result<MountSource, Reason> {
    let reason = |what: &str| format!("a mount at '{}' {what}, which is not saved yet", row.place);
    // The mount itself, unless it is covered.
    let open = file::lookup(witness.pid, &row.place).ok();
    let open = open.filter(|open| mount_of(open.as_fd()) == Ok(row.id));
    let stat = open.as_ref().and_then(|open| rustix::fs::fstat(open).ok());
    let inode = stat.map(|stat| (stat.st_dev, stat.st_ino));
    if let Some(path) = base.path(row, inode) {
        return Ok(MountSource::Container { path });
    }
    let is_own = witness.pid == base.pid;
    for (mount, other) in order.iter().map(|n| &rows[*n]).enumerate() {
        let is_there = |path: &&str| match is_own {
            true => base.is_seen(other, path),
            false => !is_covered(mounts, mount, path),
        };
        let Some(path) = row.part_of(other).filter(is_there) else { continue };
        return Ok(MountSource::Mount { namespace: object, mount, path: path.to_owned() });
    }
    // In another namespace the root of each mount is usable as a source. In the container's own,
    // any visible path of an added mount is.
    for other in &survey.mounts.all {
        for (mount, its) in other.order.iter().map(|n| &other.rows[*n]).enumerate() {
            let is_seen = |path: &&str| {
                path.is_empty() || other.witness == base.pid && base.is_seen(its, path)
            };
            if let Some(path) = row.part_of(its).filter(is_seen) {
                let (namespace, path) = (other.object, path.to_owned());
                return Ok(MountSource::Mount { namespace, mount, path });
            }
        }
    }
    let is_whole = row.root == "/" && !row.options.split(',').any(|option| option == "ro");
    if let Some(namespace) = queues(survey, row) {
        return Ok(MountSource::MessageQueues { namespace });
    }
    match row.kind.as_str() {
        // A file system of the container's own namespace has a source there, or was mounted from
        // inside.
        _ if !is_own && base.rows.iter().any(|other| other.device == row.device) => {
            Err(reason("of what was mounted in the container's own namespace or is covered there"))
        }
        "tmpfs" if is_whole => {
            let stat = stat.ok_or_else(|| reason("that is covered by another"))?;
            let place = uncovered(witness, &row.place)
                .map_err(|e| reason(&format!("that cannot be inspected ({e})")))?;
            let copied = rustix::fs::fstat(&place).map(|stat| (stat.st_dev, stat.st_ino)).ok();
            if copied != inode {
                return Err(reason("that was covered just now"));
            }
            let (uid, gid) = witness.maps().owner(stat.st_uid, stat.st_gid);
            let mut kept = vec![
                ("mode".to_owned(), format!("{:o}", stat.st_mode & 0o7777)),
                ("uid".to_owned(), uid.to_string()),
                ("gid".to_owned(), gid.to_string()),
            ];
            for option in row.options.split(',') {
                match option.split_once('=') {
                    Some((name @ ("size" | "nr_inodes"), value)) => {
                        kept.push((name.to_owned(), value.to_owned()));
                    }
                    Some(("mode" | "uid" | "gid", _)) => {}
                    None if ["rw", "inode32", "inode64"].contains(&option) => {}
                    _ => return Err(reason(&format!("with the option {option}"))),
                }
            }
            let (target, namespace) = (row.place.clone(), Some(object));
            let entries = tmpfs::entries(&place, &target, witness.maps(), &[])?;
            let contents = tmpfs::add(survey, Tmpfs { target, namespace, entries }, place);
            Ok(MountSource::Tmpfs { options: kept, contents })
        }
        "proc" if is_whole => {
            let mut kept = Vec::new();
            for option in row.options.split(',').filter(|option| *option != "rw") {
                match option.split_once('=') {
                    Some((name, value)) if PROC_OPTIONS.contains(&name) => {
                        kept.push((name.to_owned(), value.to_owned()));
                    }
                    _ => return Err(reason(&format!("with the option {option}"))),
                }
            }
            Ok(MountSource::Proc { options: kept })
        }
        kind @ ("tmpfs" | "proc") if row.root != "/" => Err(reason(&format!(
            "of the directory '{}' of a {kind} that is mounted nowhere",
            row.root
        ))),
        kind @ ("tmpfs" | "proc") => {
            Err(reason(&format!("of a {kind} that is read-only as a whole (mount(2), MS_RDONLY)")))
        }
        kind => Err(reason(&format!("of {kind}, a file system that cannot be made anew"))),
    }
}

/// The IPC namespace inside of the message queues that a mount shows.
fn queues(survey: &Survey<'_>, row: &Row) -> Option<usize> {
    if (row.kind.as_str(), row.root.as_str()) != ("mqueue", "/") {
        return None;
    }
    let (major, minor) = row.device.split_once(':')?;
    let device = rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?);
    survey.ipc.of_queues(device)
}

/// Clones the mount at a place in the namespace of a process, without the mounts below it.
fn uncovered(witness: &Seen, place: &str) -> dormouse_kernel::error::Result<OwnedFd> {
    let handle = pidfd::open(witness.pid)?;
    let mounts = pidfd::namespace(&handle, call::Namespace::Mount)?;
    // A separate thread enters the namespace and ends there.
    let copied = std::thread::scope(|scope| {
        let copied = scope.spawn(|| {
            process::unshare(CloneFlags::FS)?;
            process::setns(mounts.as_fd(), CloneFlags::NEWNS)?;
            kernel_mount::clone_tree(rustix::fs::CWD, place, false)
        });
        copied.join()
    });
    copied.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Whether a path below the root of a mount leads into another mount that is made before.
fn is_covered(mounts: &[Mount], mount: usize, path: &str) -> bool {
    let mut inner = mounts.iter().filter(|inner| inner.parent == Some(mount));
    !path.is_empty() && inner.any(|inner| below(path, &inner.place).is_some())
}
