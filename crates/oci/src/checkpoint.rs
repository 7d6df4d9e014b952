//! `checkpoint`: saves the processes of a container as files, with the engine of `dormouse
//! checkpoint` (the crate `dormouse_checkpoint`).
//!
//! A checkpoint is the directory `dormouse` in the caller's directory (`--image-path`). A complete
//! checkpoint takes this name, or replaces an older one, in one step. Only then are the processes
//! killed, which were stopped since the save began, and the container is deleted; its caller sees
//! its end. A kill in between therefore leaves the container running, or stopped with a complete
//! checkpoint.
//!
//! **Restored from the bundle** of `restore`: namespaces, mounts, cgroups, limits, filters.
//! Additions by the container's processes (a mount, a namespace, a control group) are refused by
//! name, before any process is stopped. Objects shared with another party are refused, too: a
//! shared pid namespace, a filter with a listener.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use dormouse_checkpoint::save::{self, Figures, Names, Outside, Subject};
use dormouse_checkpoint::{Error as CheckpointError, Refusal};
use dormouse_kernel::capability::{Capability, Set};
use dormouse_kernel::{pidfd, proc, resolve, sysctl};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, StatxFlags};

use crate::error::{Error, Result};
use crate::namespace::Namespaces;
use crate::spec::{Linux, Mount, Spec};
use crate::store::{Record, Status};
use crate::{Runtime, device, process};

/// The command line of the second process of a checkpoint ([`dormouse_checkpoint::save::rescue_connections`]).
pub(crate) const RESCUE: &str = "internal-rescue";

/// The checkpoint's name in the caller's directory.
pub(crate) const NAME: &str = "dormouse";
/// Its name while an older one exists.
const NEXT: &str = "dormouse-next";
/// Recorded names of the caller's standard streams.
pub(crate) const STREAMS: [&str; 3] = ["stdin", "stdout", "stderr"];

/// Options of `checkpoint`.
#[derive(Debug, Default)]
pub struct Checkpoint {
    /// Directory that receives the checkpoint; made if missing.
    pub image: PathBuf,
    /// The container continues.
    pub leave_running: bool,
    /// TCP connections are saved, too, and their packets dropped until they are restored.
    pub connections: bool,
}

impl Runtime {
    /// Saves the processes of a running container; returns durations and sizes.
    ///
    /// Errors: [`CheckpointError::Refused`] names everything that cannot be saved; no process was
    /// stopped.
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
        // ORDER: published above; only now may the processes be killed. The end of the first
        // process of a pid namespace ends all.
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
        let granted =
            process::capabilities(spec.process.as_ref().and_then(|p| p.capabilities.as_ref()));
        let granted = granted.bounding | granted.inheritable | granted.ambient;
        let name = |name: &Option<String>| name.clone().filter(|name| !name.is_empty());
        let sysctls = linux.sysctl.iter();
        let sysctls: Vec<(String, String)> = sysctls
            .filter_map(|(name, value)| Some((sysctl::path(name)?, value.clone())))
            .collect();
        let by_sysctl = sysctls.iter().find(|(name, _)| name == "kernel/domainname");
        let by_sysctl = by_sysctl.map(|(_, value)| value.clone());
        let names = Names {
            hostname: name(&spec.hostname),
            domainname: by_sysctl.or_else(|| name(&spec.domainname)),
            can_be_set: Set::from_bits(granted).contains(Capability::SysAdmin),
        };
        Ok(Subject {
            id: record.id.clone(),
            name: record.id.clone(),
            init: record.pid,
            has_init: false,
            names: namespaces.makes("uts").then_some(names),
            sysctls,
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
            rescue: &[RESCUE],
        })
    }
}

/// Returns whether only the container sets up its network stack: hooks may add devices from
/// outside.
pub(crate) fn own_network(spec: &Spec) -> bool {
    let namespaces = spec.linux.as_ref().and_then(|it| Namespaces::check(&it.namespaces).ok());
    let process = spec.process.as_ref();
    let granted = process.map(|it| process::capabilities(it.capabilities.as_ref()));
    namespaces.is_some_and(|all| all.makes("network"))
        && spec.hooks.is_empty()
        && granted.is_some_and(|it| Set::from_bits(it.bounding).contains(Capability::NetAdmin))
}

/// Returns the identities of the caller's standard streams, for a later checkpoint. A memory device
/// has no state per open file, so the container's own one is equivalent.
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

/// Refuses a configuration that `restore` could not make again, or not without another party.
fn check(linux: &Linux, namespaces: &Namespaces) -> Result<()> {
    let refused = |why: &str| {
        let why = why.to_owned();
        let whole = Refusal { pid: 0, process: String::new(), what: String::new(), why };
        Err(CheckpointError::Refused(vec![whole]).into())
    };
    if !namespaces.makes("pid") {
        return refused(
            "it has no private pid namespace in which its processes could keep their ids",
        );
    }
    if !namespaces.makes("mount") {
        return refused("it has no private mount namespace");
    }
    if linux.seccomp.as_ref().is_some_and(|seccomp| seccomp.listener_path.is_some()) {
        return refused("its filter has a listener outside the container");
    }
    Ok(())
}

/// Returns the writable directories that a configuration keeps in memory.
pub(crate) fn memory(mounts: &[Mount]) -> Vec<String> {
    let has = |mount: &Mount, word: &str| mount.options.iter().any(|option| option == word);
    let is_ours = |mount: &&Mount| {
        let is_bind = has(mount, "bind") || has(mount, "rbind");
        mount.kind.as_deref() == Some("tmpfs") && !is_bind && !has(mount, "ro")
    };
    mounts.iter().filter(is_ours).map(|mount| clean(&mount.destination)).collect()
}

/// Normalizes an absolute path.
fn clean(path: &str) -> String {
    let parts = path.split('/').filter(|part| !part.is_empty() && *part != ".");
    parts.fold(String::new(), |all, part| all + "/" + part)
}

/// Returns refusals for mounts that the configuration does not make, by name. Mounts below a
/// recursive bind of the caller are restored with it.
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
    // Parents precede the mounts below them.
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

/// Returns the id of the mount at a path inside. KERNEL(5.8): statx(2) returns it
fn mount_id(root: &OwnedFd, path: &str) -> Option<u64> {
    let place = resolve::in_root(root.as_fd(), path, OFlags::PATH, Mode::empty()).ok()?;
    let found = rustix::fs::statx(&place, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).ok()?;
    (found.stx_mask & StatxFlags::MNT_ID.bits() != 0).then_some(found.stx_mnt_id)
}

/// Destination of a checkpoint.
struct Place {
    path: PathBuf,
    /// An older checkpoint has the name.
    replaces: bool,
}

impl Place {
    fn free(image: &Path) -> Result<Self> {
        let (last, next) = (image.join(NAME), image.join(NEXT));
        if next.exists() {
            // Left by a checkpoint that was killed between two steps.
            fs::remove_dir_all(&next).map_err(Error::file("remove", &next))?;
        }
        match last.exists() {
            true => Ok(Self { path: next, replaces: true }),
            false => Ok(Self { path: last, replaces: false }),
        }
    }

    /// Gives the checkpoint its name.
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
    fn memory_directories_are_writable_tmpfs_mounts() {
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
