//! `checkpoint`: the processes of a container become files, by the engine that
//! `dormouse checkpoint` has (the crate `dormouse_checkpoint`).
//!
//! A checkpoint is the directory `dormouse` in the directory that the caller names (`--image-path`).
//! It takes its name when it is whole, and the place of an older one in one step. Only then are the
//! processes killed, all of which have stood still since it was made, and the container is deleted: its
//! caller sees its end. So whoever is killed in between leaves it running, or stopped with a whole
//! checkpoint.
//!
//! **What makes it again** is the bundle that `restore` is given: namespaces, mounts, cgroups, limits,
//! filters. What the container's processes have added to that (a mount, a namespace, a control group)
//! is refused by name, before anything is stopped. So is what another party has a hand in: a pid
//! namespace that is shared, a filter with a listener.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use dormouse_checkpoint::save::{self, Figures, Outside, Subject};
use dormouse_checkpoint::{Error as CheckpointError, Refusal};
use dormouse_kernel::capability::{Capability, Set};
use dormouse_kernel::{pidfd, proc, resolve};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, StatxFlags};

use crate::error::{Error, Result};
use crate::namespace::Namespaces;
use crate::spec::{Linux, Mount, Spec};
use crate::store::{Record, Status};
use crate::{Runtime, device, process};

/// The checkpoint's name in the directory that the caller names.
pub(crate) const NAME: &str = "dormouse";
/// The same while there is an older one.
const NEXT: &str = "dormouse-next";
/// What a standard stream of the caller's is called.
pub(crate) const STREAMS: [&str; 3] = ["stdin", "stdout", "stderr"];

/// What `checkpoint` is asked for.
#[derive(Debug, Default)]
pub struct Checkpoint {
    /// The directory that it is put in; made where it is missing.
    pub image: PathBuf,
    /// The container goes on.
    pub leave_running: bool,
    /// TCP connections are saved, too, and kept quiet until they are back.
    pub connections: bool,
}

impl Runtime {
    /// Saves the processes of a running container; gives how long it took.
    ///
    /// Errors: [`CheckpointError::Refused`] names everything that cannot be saved; nothing was stopped.
    pub fn checkpoint(&self, id: &str, options: &Checkpoint) -> Result<Figures> {
        let lock = self.store.lock(id, false)?;
        let (record, status) = self.look(id)?;
        let not = |why| Error::State { id: id.to_owned(), state: status.as_str(), why };
        match status {
            Status::Running => {}
            Status::Paused => return Err(not("resume it first")),
            _ => return Err(not("only a running container can be checkpointed")),
        }
        let first = record.process().ok_or_else(|| not("its process has ended"))?;
        let spec = self.store.config(id)?;
        let linux = spec.linux.clone().unwrap_or_default();
        let namespaces = Namespaces::check(&linux.namespaces)?;
        check(&linux, &namespaces)?;
        let subject = self.subject(&record, &spec, &namespaces, options)?;
        let mounted = foreign_mounts(&record, &spec)?;
        if !mounted.is_empty() {
            return Err(CheckpointError::Refused(mounted).into());
        }
        let image = &options.image;
        fs::create_dir_all(image).map_err(Error::file("make directory", image))?;
        let place = Place::free(image)?;
        let (stopped, figures) = save::save(&subject, &place.path, None, options.leave_running)?;
        place.settle(image)?;
        let Some(stopped) = stopped else { return Ok(figures) };
        // ORDER: published above; now, and not before, the processes may go. With the first of a pid
        // namespace go all.
        let kill = || pidfd::send_signal(&first, 9);
        stopped.kill(kill).map_err(Error::call("end the container"))?;
        drop(lock);
        self.delete(id, true)?;
        Ok(figures)
    }

    fn subject(
        &self,
        record: &Record,
        spec: &Spec,
        namespaces: &Namespaces,
        options: &Checkpoint,
    ) -> Result<Subject> {
        let linux = spec.linux.clone().unwrap_or_default();
        let named = (0..).zip(STREAMS).zip(&record.streams);
        let outside = named.filter_map(|((number, name), identity)| {
            let number = Some(number);
            identity.map(|identity| Outside { name: name.into(), identity, number })
        });
        Ok(Subject {
            id: record.id.clone(),
            name: record.id.clone(),
            init: record.pid,
            has_init: false,
            pids: self.tree(record)?.pids()?,
            outside: outside.collect(),
            memory: memory(&spec.mounts),
            nodes: device::paths(&linux.devices),
            mounts: None, // all others are refused ([`foreign_mounts`])
            volumes: Vec::new(),
            own_ipc: namespaces.makes("ipc"),
            own_network: own_network(spec),
            cgroups: false,
            connections: options.connections,
            filters: u32::from(linux.seccomp.is_some()),
            hold: false,
            quiet: Duration::ZERO,
        })
    }
}

/// Whether a container has a network stack that nobody else sets up: hooks may bring in devices from outside.
pub(crate) fn own_network(spec: &Spec) -> bool {
    let namespaces = spec.linux.as_ref().and_then(|it| Namespaces::check(&it.namespaces).ok());
    let process = spec.process.as_ref();
    let granted = process.and_then(|it| process::capabilities(it.capabilities.as_ref()).ok());
    namespaces.is_some_and(|all| all.makes("network"))
        && spec.hooks.is_empty()
        && granted.is_some_and(|it| Set::from_bits(it.bounding).contains(Capability::NetAdmin))
}

/// What the caller's standard streams are, for whoever looks at the container's later. A device that
/// keeps nothing of who has it open is as good inside.
pub(crate) fn streams() -> Vec<Option<(u64, u64)>> {
    const MEMORY: u32 = 1; // the major number of null and its like (null(4))
    let identity = |fd: BorrowedFd<'_>| {
        let stat = rustix::fs::fstat(fd).ok()?;
        let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
        let keeps = !is_device || rustix::fs::major(stat.st_rdev) != MEMORY;
        keeps.then_some((stat.st_dev, stat.st_ino))
    };
    let (input, output) = (rustix::stdio::stdin(), rustix::stdio::stdout());
    [input, output, rustix::stdio::stderr()].map(identity).into()
}

/// Refuses what `restore` could not make again, or not alone.
fn check(linux: &Linux, namespaces: &Namespaces) -> Result<()> {
    let refused = |why: &str| {
        let why = why.to_owned();
        let whole = Refusal { pid: 0, process: String::new(), what: String::new(), why };
        Err(CheckpointError::Refused(vec![whole]).into())
    };
    if !namespaces.makes("pid") {
        return refused(
            "it has no pid namespace of its own, in which its processes keep their ids",
        );
    }
    if !namespaces.makes("mount") {
        return refused("it has no mount namespace of its own");
    }
    if linux.seccomp.as_ref().is_some_and(|seccomp| seccomp.listener_path.is_some()) {
        return refused("its filter has a listener, which answers for it");
    }
    Ok(())
}

/// Directories that a configuration has in memory and lets be written.
pub(crate) fn memory(mounts: &[Mount]) -> Vec<String> {
    let has = |mount: &Mount, word: &str| mount.options.iter().any(|option| option == word);
    let is_ours = |mount: &&Mount| {
        let is_bind = has(mount, "bind") || has(mount, "rbind");
        mount.kind.as_deref() == Some("tmpfs") && !is_bind && !has(mount, "ro")
    };
    mounts.iter().filter(is_ours).map(|mount| clean(&mount.destination)).collect()
}

/// An absolute path without repetitions.
fn clean(path: &str) -> String {
    let parts = path.split('/').filter(|part| !part.is_empty() && *part != ".");
    parts.fold(String::new(), |all, part| all + "/" + part)
}

/// Mounts that the configuration does not make, by name. What is below a bind of the caller's comes
/// with it again.
fn foreign_mounts(record: &Record, spec: &Spec) -> Result<Vec<Refusal>> {
    let linux = spec.linux.clone().unwrap_or_default();
    let root = format!("/proc/{}/root", record.pid);
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(&*root, flags, Mode::empty())
        .map_err(|e| Error::file("open", &root)(e.into()))?;
    let mounted_at = |path: &str| mount_id(&root, path);
    let table = format!("/proc/{}/mountinfo", record.pid);
    let table = proc::read_text(&table, 4 << 20).map_err(Error::call("read its mounts"))?;
    // mount id, parent, device, root, mount point (proc_pid_mountinfo(5))
    let rows = table.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_ascii_whitespace().take(5).collect();
        Some((words.first()?.parse().ok()?, words.get(1)?.parse().ok()?, *words.get(4)?))
    });
    let rows: Vec<(u64, u64, &str)> = rows.collect();
    let mut known: Vec<u64> = mounted_at("/").into_iter().collect();
    let mut whole = Vec::new();
    for mount in &spec.mounts {
        let Some(id) = mounted_at(&mount.destination) else { continue };
        known.push(id);
        let is_cgroup = mount.kind.as_deref() == Some("cgroup"); // one below for each hierarchy
        if is_cgroup || mount.options.iter().any(|option| option == "rbind") {
            whole.push(id);
        }
    }
    let others = linux.masked_paths.iter().chain(&linux.readonly_paths).cloned();
    let others = others.chain(device::paths(&linux.devices)).chain(["/dev/console".to_owned()]);
    known.extend(others.filter_map(|path| mounted_at(&path)));
    // Parents come before what is mounted in them.
    for (id, parent, _) in &rows {
        if whole.contains(parent) {
            whole.push(*id);
        }
    }
    let foreign = rows.iter().filter(|(id, ..)| !known.contains(id) && !whole.contains(id));
    let refusal = |(_, _, place): &(u64, u64, &str)| Refusal {
        pid: 0,
        process: String::new(),
        what: String::new(),
        why: format!("'{place}' was mounted inside, which is not saved: unmount it"),
    };
    Ok(foreign.map(refusal).collect())
}

/// The id of the mount that a path inside leads to. KERNEL(5.8): statx(2) tells it
fn mount_id(root: &OwnedFd, path: &str) -> Option<u64> {
    let place = resolve::in_root(root.as_fd(), path, OFlags::PATH, Mode::empty()).ok()?;
    let found = rustix::fs::statx(&place, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).ok()?;
    (found.stx_mask & StatxFlags::MNT_ID.bits() != 0).then_some(found.stx_mnt_id)
}

/// Where a checkpoint is written.
struct Place {
    path: PathBuf,
    /// An older one has the name.
    replaces: bool,
}

impl Place {
    fn free(image: &Path) -> Result<Self> {
        let (last, next) = (image.join(NAME), image.join(NEXT));
        if next.exists() {
            // Of one that was killed between two steps.
            fs::remove_dir_all(&next).map_err(Error::file("remove", &next))?;
        }
        match last.exists() {
            true => Ok(Self { path: next, replaces: true }),
            false => Ok(Self { path: last, replaces: false }),
        }
    }

    /// Gives it its name.
    fn settle(self, image: &Path) -> Result<()> {
        if !self.replaces {
            return Ok(());
        }
        let last = image.join(NAME);
        rustix::fs::renameat_with(CWD, &self.path, CWD, &last, RenameFlags::EXCHANGE)
            .map_err(|e| Error::file("replace", &last)(e.into()))?;
        fs::remove_dir_all(&self.path).map_err(Error::file("remove", self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_in_memory_are_those_that_can_be_written() {
        let mount = |destination: &str, kind: &str, options: &[&str]| Mount {
            destination: destination.into(),
            kind: Some(kind.into()),
            options: options.iter().map(|o| (*o).to_owned()).collect(),
            ..Mount::default()
        };
        let mounts = [
            mount("/dev", "tmpfs", &["nosuid"]),
            mount("//run/./x/", "tmpfs", &[]),
            mount("/fixed", "tmpfs", &["ro"]),
            mount("/bound", "tmpfs", &["rbind"]),
            mount("/proc", "proc", &[]),
        ];
        assert_eq!(memory(&mounts), ["/dev", "/run/x"]);
    }
}
