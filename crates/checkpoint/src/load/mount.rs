//! Mount namespaces: each is created by a helper process, with the rights of the container's own
//! root, and entered by its members.
//!
//! A helper process has a copy of the container's mount namespace. In the copy it clones mounts,
//! which are private, and assembles them to another tree, each below the descriptor of its parent.
//! The tree becomes the root, and the copy is unmounted. Then the helper opens the files that are
//! open there: a file opened in a namespace leads to no other.
//!
//! A namespace that belongs to a user namespace inside is a copy of such a tree, made by a helper
//! that has entered the user namespace. The mounts in the copy are locked, as are those that it has
//! from the container (mount_namespaces(7)).
//!
//! Mounts that processes have added to the container's own namespace are mounted there by a helper
//! process, by their paths.
//!
//! Each tmpfs is created before, empty, and filled by the engine ([`super::tmpfs`]) at a separate
//! stage.

use std::collections::HashMap;

use dormouse_record::{Error, Mount, MountSource, Mounts, Process, Result, Thing};

use super::plan::Plan;
use super::{file, helper, open, stage, user};
use crate::inject::program::{Arg, Call, Cell, Sequence};

const FSCONFIG_SET_STRING: u64 = 1;
const FSCONFIG_CMD_CREATE: u64 = 6;
const FSOPEN_CLOEXEC: u64 = 1;
const FSMOUNT_CLOEXEC: u64 = 1;
const MOVE_FROM_EMPTY_PATH: u64 = 0x4;
const MOVE_TO_EMPTY_PATH: u64 = 0x40;

/// Copies of mounts for other namespaces, by namespace and number there.
type Copies = HashMap<(usize, usize), Cell>;

/// Makes all namespaces, and opens the files that are open there.
pub(super) fn make_all(plan: &mut Plan<'_>, sequence: &mut Sequence) -> Result<()> {
    let records = plan.records;
    let all = records.objects.iter().enumerate().filter_map(|(n, object)| match &object.thing {
        Thing::Mounts(mounts) => Some((n, mounts)),
        _ => None,
    });
    let all: Vec<(usize, &Mounts)> = all.collect();
    let mut copies = Copies::new();
    for (n, mounts) in &all {
        for (number, mount) in mounts.mounts.iter().enumerate() {
            let what = what(*n, mount);
            let made = match &mount.source {
                MountSource::Tmpfs { options, contents } => {
                    let kind = ("tmpfs", mount.name.as_deref());
                    let made = new(plan, sequence, &what, (kind, options), 0)?;
                    plan.memories.insert(*contents, made);
                    made
                }
                MountSource::MessageQueues { namespace } => {
                    queues(plan, sequence, &what, *namespace, mount.name.as_deref())?
                }
                _ => continue,
            };
            copies.insert((*n, number), made);
        }
    }
    if !plan.memories.is_empty() {
        sequence.stage(stage::MEMORY);
    }
    for (n, mounts) in &all {
        let mut part = Sequence::default();
        let made = match mounts.own {
            true => {
                own(plan, &mut part, *n, mounts, &mut copies)?;
                None
            }
            false => Some(namespace(plan, &mut part, *n, mounts, &mut copies)?),
        };
        let whole = format!("object {n} (mount namespace)");
        if let (Some(made), Some(_)) = (made, records.objects[*n].user) {
            // The creator has no rights over the container any more, which opening its files needs.
            helper::run(plan, sequence, &whole, std::mem::take(&mut part));
            let args = [made.into(), Arg::from(libc::CLONE_NEWNS)];
            part.call(&*whole, Call::new(libc::SYS_setns, args));
        }
        for (index, object) in records.objects.iter().enumerate() {
            let Thing::File(it) = &object.thing else { continue };
            if it.namespace != Some(*n) || it.deleted.is_some() {
                continue;
            }
            let what = format!("object {index} (file)");
            let open = file::make(plan, &mut part, &what, it)?;
            plan.cells[index] = Some(plan.lift(&mut part, &what, open));
        }
        helper::run(plan, sequence, &whole, part);
        if let Some(made) = made {
            plan.cells[*n] = Some(plan.lift(sequence, &whole, made));
        }
    }
    Ok(())
}

fn what(namespace: usize, mount: &Mount) -> String {
    format!("object {namespace} (mount namespace), the mount at '{}'", mount.place)
}

/// Makes the calling process mount the added mounts in the container's own namespace, in the same
/// order.
fn own(
    plan: &mut Plan<'_>,
    part: &mut Sequence,
    n: usize,
    all: &Mounts,
    copies: &mut Copies,
) -> Result<()> {
    let here = Arg::from(libc::AT_FDCWD);
    // ORDER: before any source is covered.
    let mut given = HashMap::new();
    for (number, mount) in all.mounts.iter().enumerate() {
        if let MountSource::Container { path } = &mount.source {
            let what = what(n, mount);
            open::check_parent(plan, part, &what, path);
            given.insert(number, copy(plan, part, &what, here, path)?);
        }
    }
    let mut own: Vec<Cell> = Vec::new();
    for (number, mount) in all.mounts.iter().enumerate() {
        let what = what(n, mount);
        let cell = match given.get(&number) {
            Some(cell) => *cell,
            None => source(plan, part, (n, number), mount, &own, copies)?,
        };
        set(plan, part, &what, cell, [mount.attributes, Mount::ALL_ATTRIBUTES, 0]);
        open::check_parent(plan, part, &what, &mount.place);
        attach(plan, part, &what, cell, (here, &mount.place));
        own.push(cell);
    }
    copy_for_others(plan, part, n, &own, copies)?;
    share_and_close(plan, part, n, all, own);
    Ok(())
}

/// The source of a mount, not attached.
fn source(
    plan: &mut Plan<'_>,
    part: &mut Sequence,
    (n, number): (usize, usize),
    mount: &Mount,
    own: &[Cell],
    copies: &Copies,
) -> Result<Cell> {
    let what = what(n, mount);
    let what = what.as_str();
    match &mount.source {
        MountSource::Container { path } => {
            open::check_parent(plan, part, what, path);
            copy(plan, part, what, Arg::from(libc::AT_FDCWD), path)
        }
        MountSource::Mount { namespace, mount, path } if *namespace == n => {
            copy(plan, part, what, own[*mount].into(), path)
        }
        MountSource::Mount { .. }
        | MountSource::Tmpfs { .. }
        | MountSource::MessageQueues { .. } => {
            let copied = copies.get(&(n, number)).copied();
            copied.ok_or_else(|| Error::damaged("section 'object'", "a mount of nothing"))
        }
        MountSource::Proc { options } => {
            let kind = ("proc", mount.name.as_deref());
            new(plan, part, what, (kind, options), mount.attributes)
        }
    }
}

/// Attaches a mount to a place by move_mount(2).
fn attach(
    plan: &mut Plan<'_>,
    part: &mut Sequence,
    what: &str,
    cell: Cell,
    (to, place): (Arg, &str),
) {
    let to_itself = if place.is_empty() { MOVE_TO_EMPTY_PATH } else { 0 };
    let flags = Arg::Number(MOVE_FROM_EMPTY_PATH | to_itself);
    let (empty, place) = (plan.builder.text(b""), plan.builder.text(place.as_bytes()));
    let args = [cell.into(), empty.into(), to, place.into(), flags];
    part.call(what, Call::new(libc::SYS_move_mount, args));
}

/// The last steps for new mounts.
fn share_and_close(
    plan: &mut Plan<'_>,
    part: &mut Sequence,
    n: usize,
    all: &Mounts,
    own: Vec<Cell>,
) {
    for (mount, cell) in all.mounts.iter().zip(own) {
        let what = what(n, mount);
        if mount.shared {
            // ORDER: a mount below a shared mount becomes shared, too.
            set(plan, part, &what, cell, [0, 0, libc::MS_SHARED]);
        }
        part.call(what, Call::new(libc::SYS_close, [cell.into()]));
    }
}

/// Makes the calling process create a mount namespace and enter it; returns a descriptor of it.
fn namespace(
    plan: &mut Plan<'_>,
    part: &mut Sequence,
    n: usize,
    all: &Mounts,
    copies: &mut Copies,
) -> Result<Cell> {
    let whole = format!("object {n} (mount namespace)");
    let here = Arg::from(libc::AT_FDCWD);
    part.call(&*whole, Call::new(libc::SYS_unshare, [Arg::from(libc::CLONE_NEWNS)]));
    let (top, none) = (Arg::from(plan.builder.text(b"/")), Arg::Number(0));
    let private = [none, top, none, Arg::from(libc::MS_REC | libc::MS_PRIVATE), none];
    part.call(&*whole, Call::new(libc::SYS_mount, private));
    // ORDER: while there is a procfs.
    let flags = (libc::O_PATH | libc::O_DIRECTORY) as u32;
    let links = open::own_path(plan, part, &whole, "/proc/self/ns", flags)?;
    let mut own: Vec<Cell> = Vec::new();
    for (number, mount) in all.mounts.iter().enumerate() {
        let what = what(n, mount);
        let cell = source(plan, part, (n, number), mount, &own, copies)?;
        set(plan, part, &what, cell, [mount.attributes, Mount::ALL_ATTRIBUTES, 0]);
        let to = match mount.parent {
            None => (here, "/"),
            Some(parent) => (own[parent].into(), mount.place.as_str()),
        };
        attach(plan, part, &what, cell, to);
        own.push(cell);
    }
    // Both arguments are one place: the old root ends up on top of the new one, and is unmounted.
    let dot = Arg::from(plan.builder.text(b"."));
    part.call(&*whole, Call::new(libc::SYS_fchdir, [own[0].into()]));
    part.call(&*whole, Call::new(libc::SYS_pivot_root, [dot, dot]));
    part.call(&*whole, Call::new(libc::SYS_umount2, [dot, Arg::from(libc::MNT_DETACH)]));
    part.call(&*whole, Call::new(libc::SYS_chdir, [top]));
    copy_for_others(plan, part, n, &own, copies)?;
    share_and_close(plan, part, n, all, own);
    if let Some(owner) = plan.records.objects[n].user {
        user::enter_one(plan, part, &whole, Some(owner))?;
        part.call(&*whole, Call::new(libc::SYS_unshare, [Arg::from(libc::CLONE_NEWNS)]));
    }
    let (made, name) = (plan.cell(), plan.builder.text(b"mnt"));
    let args = [links.into(), name.into(), Arg::from(libc::O_RDONLY | libc::O_CLOEXEC)];
    part.call_into(&*whole, made, Call::new(libc::SYS_openat, args));
    part.call(&*whole, Call::new(libc::SYS_close, [links.into()]));
    Ok(made)
}

/// Copies mounts that a namespace which is made later has, too.
fn copy_for_others(
    plan: &mut Plan<'_>,
    part: &mut Sequence,
    n: usize,
    own: &[Cell],
    copies: &mut Copies,
) -> Result<()> {
    let records = plan.records;
    for (other, object) in records.objects.iter().enumerate().skip(n + 1) {
        let Thing::Mounts(mounts) = &object.thing else { continue };
        for (number, it) in mounts.mounts.iter().enumerate() {
            let MountSource::Mount { namespace, mount, path } = &it.source else { continue };
            if *namespace == n {
                let what = what(other, it);
                let made = copy(plan, part, &what, own[*mount].into(), path)?;
                copies.insert((other, number), plan.lift(part, &what, made));
            }
        }
    }
    Ok(())
}

/// Clones the mount at a path below a descriptor, not attached.
fn copy(
    plan: &mut Plan<'_>,
    part: &mut Sequence,
    what: &str,
    from: Arg,
    path: &str,
) -> Result<Cell> {
    const OPEN_TREE_CLONE: i32 = 1;
    let itself = if path.is_empty() { libc::AT_EMPTY_PATH } else { 0 };
    let flags = OPEN_TREE_CLONE | libc::O_CLOEXEC | libc::AT_SYMLINK_NOFOLLOW | itself;
    let (cell, path) = (plan.cell(), plan.builder.text(path.as_bytes()));
    let args = [from, path.into(), Arg::from(flags)];
    part.call_into(what, cell, Call::new(libc::SYS_open_tree, args));
    Ok(cell)
}

/// Mounts the message queues of an IPC namespace in a helper process that enters it, not attached.
fn queues(
    plan: &mut Plan<'_>,
    sequence: &mut Sequence,
    what: &str,
    namespace: usize,
    name: Option<&str>,
) -> Result<Cell> {
    let mut part = Sequence::default();
    let args = [plan.object(namespace)?.into(), Arg::from(libc::CLONE_NEWIPC)];
    part.call(what, Call::new(libc::SYS_setns, args));
    let made = new(plan, &mut part, what, (("mqueue", name), &[]), 0)?;
    helper::run(plan, sequence, what, part);
    Ok(plan.lift(sequence, what, made))
}

/// A type of file system, and a name for its source.
type Kind<'a> = (&'a str, Option<&'a str>);

/// Creates a new file system, not attached, of a type and under a name for its source.
pub(super) fn new(
    plan: &mut Plan<'_>,
    part: &mut Sequence,
    what: &str,
    ((kind, called), options): (Kind<'_>, &[(String, String)]),
    attributes: u64,
) -> Result<Cell> {
    let context = plan.cell();
    let name = Arg::from(plan.builder.text(kind.as_bytes()));
    let open = [name, Arg::Number(FSOPEN_CLOEXEC)];
    part.call_into(what, context, Call::new(libc::SYS_fsopen, open));
    let source = [("source".to_owned(), called.unwrap_or(kind).to_owned())];
    for (name, value) in source.iter().chain(options) {
        let name = plan.builder.text(name.as_bytes());
        let value = plan.builder.text(value.as_bytes());
        let set = Arg::Number(FSCONFIG_SET_STRING);
        let args = [context.into(), set, name.into(), value.into(), Arg::Number(0)];
        part.call(what, Call::new(libc::SYS_fsconfig, args));
    }
    let nothing = Arg::Number(0);
    let create = [context.into(), Arg::Number(FSCONFIG_CMD_CREATE), nothing, nothing, nothing];
    part.call(what, Call::new(libc::SYS_fsconfig, create));
    let cell = plan.cell();
    let args = [context.into(), Arg::Number(FSMOUNT_CLOEXEC), attributes.into()];
    part.call_into(what, cell, Call::new(libc::SYS_fsmount, args));
    part.call(what, Call::new(libc::SYS_close, [context.into()]));
    Ok(cell)
}

/// mount_setattr(2) of one mount: flags to set, flags to clear before, propagation.
fn set(
    plan: &mut Plan<'_>,
    part: &mut Sequence,
    what: &str,
    cell: Cell,
    [set, clear, propagation]: [u64; 3],
) {
    let wanted = [set, clear, propagation, 0];
    let (empty, at) = (plan.builder.text(b""), plan.builder.numbers(&wanted));
    let length = std::mem::size_of_val(&wanted) as u64;
    let itself = Arg::from(libc::AT_EMPTY_PATH);
    let args = [cell.into(), empty.into(), itself, at.into(), length.into()];
    part.call(what, Call::new(libc::SYS_mount_setattr, args));
}

/// Makes a process enter its mount namespace. ORDER: before it has threads; its working directory
/// and root are set later.
pub(super) fn enter(plan: &Plan<'_>, sequence: &mut Sequence, record: &Process) -> Result<()> {
    let Some(mounts) = record.mounts else { return Ok(()) };
    let what = format!("the mount namespace of process {}", record.pid);
    let args = [plan.object(mounts)?.into(), Arg::from(libc::CLONE_NEWNS)];
    sequence.call(what, Call::new(libc::SYS_setns, args));
    Ok(())
}
