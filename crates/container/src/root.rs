//! Plan of a container's root: all mounts before its program starts, and where they are.
//!
//! A container has four superblocks of its own (overlay, proc, its ipc namespace's mqueue, and devpts): a
//! memory cgroup costs 16 bytes for every superblock of the machine. `/dev`, `/dev/shm` and tmpfs
//! mounts are directories of a shared tmpfs, `/sys` is a clone of its domain's. `--devpts no` leaves the
//! devpts out.
//!
//! Uses `ground`, `io`, `net`, `view`, `volume`, and its own modules.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use dormouse_checkpoint::save::Places;
use dormouse_kernel::call::{CloneFlags, Namespace};
use dormouse_kernel::mount::MountAttr;
use dormouse_kernel::{mount, namespace, sysctl, weakened};
use dormouse_launch::{Plan, TargetKind};
use dormouse_model::{Config, IdMap, Mount, MountKind, NetMode, Propagation};
use rustix::fs::CWD;

use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::io::TTY_GROUP;
use crate::net::Net;
use crate::view;
use crate::volume;

pub(crate) mod dir;
pub(crate) mod name;

/// The parts of a container's root.
pub(crate) struct RootParts {
    pub(crate) root: OwnedFd,
    pub(crate) proc: Option<OwnedFd>,
    pub(crate) mounts: HostMounts,
    pub(crate) userns: OwnedFd,
    /// Its directories of the shared tmpfs.
    pub(crate) shared: PathBuf,
    /// Terminals of its devpts.
    pub(crate) terminals: u32,
    /// The newborn makes its network stack, and sets it up.
    pub(crate) own_stack: bool,
}

/// Detached mounts that need nothing from the newborn: made while the keeper clones it.
pub(crate) struct HostMounts {
    dev: OwnedFd,
    shm: OwnedFd,
    /// `None`: of a stack that the newborn has yet to make ([`HostMounts::show`]).
    sys: Option<OwnedFd>,
    /// `/run` and `/run/lock`, for systemd.
    systemd: Option<[OwnedFd; 2]>,
    /// Files of names, and views, with their targets.
    names: Vec<(OwnedFd, &'static str)>,
    /// A file and a directory to be mounted over hidden paths.
    masks: Option<[OwnedFd; 2]>,
}

impl HostMounts {
    /// Adds the sysfs of a stack that was made since.
    pub(crate) fn show(&mut self, sys: OwnedFd) {
        self.sys = Some(sys);
    }
}

/// Makes the mounts from host directories and the container's shared directories, which do not
/// depend on its user namespace.
pub(crate) fn host_mounts(
    ground: &Ground,
    config: &Config,
    net: &Net,
    shared: &Path,
) -> Result<HostMounts> {
    let no_exec = MountAttr::NOSUID | MountAttr::NODEV | MountAttr::NOEXEC;
    let mut sys_attr = no_exec;
    sys_attr.set(MountAttr::RDONLY, !weakened("read-only-sys"));
    let systemd = || -> Result<[OwnedFd; 2]> {
        let run = dir::clone_dir(&shared.join("run"), MountAttr::NOSUID | MountAttr::NODEV)?;
        Ok([run, dir::clone_dir(&shared.join("lock"), no_exec)?])
    };
    let mut names = name::mounts(ground, config, net, shared)?;
    names.extend(view::make(ground, config)?);
    let is_masked = !config.spec.security.privileged && !weakened("masked-paths");
    Ok(HostMounts {
        dev: dir::clone_dir(&shared.join("dev"), MountAttr::NOSUID | MountAttr::NOEXEC)?,
        shm: dir::clone_dir(&shared.join("shm"), no_exec)?,
        sys: net.sys().map(|sys| dir::clone_of(sys, Path::new(""), sys_attr)).transpose()?,
        systemd: config.spec.systemd.then(systemd).transpose()?,
        names,
        masks: is_masked.then(|| masks(shared)).transpose()?,
    })
}

/// Plans what comes before the root: the namespaces that are made inside the user namespace, and a keyring.
///
/// ORDER: after placement in cgroups ([`Plan::unshare`]).
pub(crate) fn plan_namespaces(plan: &mut Plan, config: &Config) {
    plan.become_root();
    let mut own = CloneFlags::empty();
    own.set(CloneFlags::NEWCGROUP, !weakened("cgroup-namespace"));
    own.set(CloneFlags::NEWNET, config.spec.net == NetMode::None);
    plan.unshare(own.bits() as u32);
    if !weakened("keyring") {
        plan.session_keyring();
    }
}

/// Plans all mounts before the program starts.
pub(crate) fn plan_root(
    ground: &Ground,
    plan: &mut Plan,
    config: &Config,
    given: RootParts,
) -> Result<()> {
    let shared = given.shared;
    volume::prepare(ground, config, given.root.as_fd())?;
    let root = plan.fd(given.root);
    plan.root(root, config.spec.read_only);
    if let Some(proc) = given.proc {
        let proc = plan.fd(proc);
        plan.proc(proc, "/proc");
    }
    let HostMounts { dev, shm, sys, systemd, names, masks } = given.mounts;
    let dev = plan.fd(dev);
    plan.attach(dev, "/dev", TargetKind::PlainDir, true);
    let shm = plan.fd(shm);
    plan.attach(shm, "/dev/shm", TargetKind::PlainDir, false);
    // The container's user namespace may not mount the host's own mqueue.
    if !weakened("ipc-namespace") {
        plan.mqueue("/dev/mqueue");
    }
    if needs_devpts(config) {
        plan.devpts("/dev/pts", Some(TTY_GROUP), given.terminals);
    }
    if let Some(sys) = sys {
        let sys = plan.fd(sys);
        plan.attach(sys, "/sys", TargetKind::PlainDir, true);
    }
    if let Some([run, lock]) = systemd {
        let run = plan.fd(run);
        plan.attach(run, "/run", TargetKind::Dir, true);
        // Debian's systemd exits at once if this is no mount and it may not mount one itself.
        let lock = plan.fd(lock);
        plan.attach(lock, "/run/lock", TargetKind::Dir, true);
        plan.cgroup2("/sys/fs/cgroup");
    }
    for (tree, target) in names {
        let fd = plan.fd(tree);
        plan.attach(fd, target, TargetKind::File, true);
    }
    for (n, mount) in config.spec.mounts.iter().enumerate() {
        plan_mount(
            ground,
            plan,
            config,
            mount,
            &shared.join(format!("mount-{n}")),
            given.userns.as_fd(),
            given.terminals,
        )?;
    }
    if let Some([null, empty]) = masks {
        let (null, empty) = (plan.fd(null), plan.fd(empty));
        plan.mask(null, empty, hidden());
    }
    // Without its own UTS namespace the newborn would set the host's name.
    if !weakened("uts-namespace") {
        plan.hostname(&config.spec.hostname);
        if let Some(domain) = &config.spec.domainname {
            plan.domainname(domain);
        }
    }
    if given.own_stack {
        plan_own_stack(plan)?;
    }
    // A stack that was kept has its settings.
    let is_kept = |name: &str| !given.own_stack && sysctl::owner(name) == Some(Namespace::Net);
    for (name, value) in config.spec.sysctls.iter().filter(|(name, _)| !is_kept(name)) {
        plan.sysctl(name, value)?;
    }
    Ok(())
}

/// Plans one mount requested by the operator.
fn plan_mount(
    ground: &Ground,
    plan: &mut Plan,
    config: &Config,
    mount: &Mount,
    shared: &Path,
    userns: BorrowedFd<'_>,
    terminals: u32,
) -> Result<()> {
    let mut attr = MountAttr::empty();
    attr.set(MountAttr::RDONLY, mount.read_only);
    attr.set(MountAttr::NOEXEC, mount.no_exec);
    // Mounts from outside give no privileges.
    attr |= MountAttr::NOSUID | MountAttr::NODEV;
    let (tree, kind) = match &mount.kind {
        MountKind::Bind { source, recursive, idmap, propagation } => {
            let tree = mount::clone_tree_in_group(CWD, source, *recursive)
                .map_err(|e| Error::Rootfs(source.clone(), e))?;
            if *idmap {
                mount::idmap(tree.as_fd(), userns, *recursive)
                    .map_err(Error::call("cannot map the ids of a bind mount"))?;
            }
            if *propagation != Propagation::Shared {
                let slave = *propagation == Propagation::Slave;
                mount::set_propagation(tree.as_fd(), slave)
                    .map_err(Error::call("cannot set the propagation of a bind mount"))?;
            }
            mount::set_attr(tree.as_fd(), *recursive, attr, MountAttr::empty())
                .map_err(Error::call("cannot set the attributes of a bind mount"))?;
            let is_dir = fs::metadata(source).is_ok_and(|m| m.is_dir());
            (tree, if is_dir { TargetKind::Dir } else { TargetKind::File })
        }
        MountKind::Volume { name, .. } => {
            let tree = dir::clone_dir(&volume::path(ground, name), attr)?;
            if let Some(map) = volume::map(ground, name, config.ids)? {
                let ids = namespace::new_user(&map, &map)
                    .map_err(Error::call("cannot make a user namespace for a volume"))?;
                // KERNEL(5.12), and a file system that can. Elsewhere the files appear as those of nobody.
                let _ = mount::idmap(tree.as_fd(), ids.as_fd(), false);
            }
            (tree, TargetKind::Dir)
        }
        MountKind::Tmpfs { size_bytes, mode } => {
            let tree = match size_bytes {
                // Only a separate superblock can enforce a size.
                Some(size) => dir::tmpfs(*size, *mode, config.ids, attr)?,
                None => {
                    dir::make_owned_dir(shared, *mode, config.ids)?;
                    dir::clone_dir(shared, attr)?
                }
            };
            (tree, TargetKind::Dir)
        }
        MountKind::Devpts => {
            plan.devpts(&mount.target, Some(TTY_GROUP), terminals);
            return Ok(());
        }
    };
    let fd = plan.fd(tree);
    plan.attach(fd, &mount.target, kind, true);
    Ok(())
}

/// Plans a loopback device, and settings that permit in the private stack what root of a machine
/// may do: root inside has only the granted capabilities.
fn plan_own_stack(plan: &mut Plan) -> Result<()> {
    plan.loopback();
    plan.sysctl("net.ipv4.ip_unprivileged_port_start", "0")?;
    // Group ids are those of the writing process: up to the container's nobody, its last id on the
    // host.
    let all = format!("0 {}", IdMap::NOBODY);
    plan.sysctl("net.ipv4.ping_group_range", &all)?;
    plan.sysctl("net.unix.max_dgram_qlen", "512")?; // as systemd sets it on a host
    Ok(())
}

/// Returns the places where the engine mounts anything.
pub(crate) fn places(config: &Config) -> Places {
    let brings_others = |mount: &&Mount| match mount.kind {
        MountKind::Bind { recursive, propagation, .. } => {
            recursive || propagation != Propagation::Private
        }
        MountKind::Volume { .. } | MountKind::Tmpfs { .. } | MountKind::Devpts => false,
    };
    let trees = config.spec.mounts.iter().filter(brings_others);
    Places {
        configured: configured(config),
        trees: trees.map(|mount| mount.target.to_string()).collect(),
        terminals: "/dev/pts".into(),
    }
}

/// Returns the places that are mounted before the program starts.
fn configured(config: &Config) -> Vec<String> {
    let mut all = vec!["/", "/proc", "/dev", "/dev/shm", "/dev/mqueue", "/sys"];
    all.extend(["/etc/hostname", "/etc/hosts", "/etc/resolv.conf"]);
    if needs_devpts(config) {
        all.push("/dev/pts");
    }
    if config.spec.process.terminal && (config.spec.systemd || config.spec.init) {
        all.push("/dev/console");
    }
    if config.spec.systemd {
        all.extend(["/run", "/run/lock", "/sys/fs/cgroup"]);
    }
    all.extend(hidden());
    all.extend(view::of(config).into_iter().map(|view| view.target()));
    all.extend(config.spec.mounts.iter().map(|mount| &*mount.target));
    all.into_iter().map(str::to_owned).collect()
}

/// Returns the directories of a container that are kept in memory.
pub(crate) fn memory(config: &Config) -> Vec<String> {
    let mounts = config.spec.mounts.iter();
    let tmpfs = mounts.filter(|mount| matches!(mount.kind, MountKind::Tmpfs { .. }));
    let targets = tmpfs.map(|mount| mount.target.to_string());
    let own: &[&str] = match config.spec.systemd {
        true => &["/dev/shm", "/run", "/run/lock"],
        false => &["/dev/shm"],
    };
    own.iter().map(|target| (*target).to_owned()).chain(targets).collect()
}

/// Returns whether the engine mounts a devpts from the start. Other containers have one among their
/// mounts, or get one at the first `exec --tty`.
fn needs_devpts(config: &Config) -> bool {
    let spec = &config.spec;
    let is_given = spec.mounts.iter().any(|mount| mount.target == "/dev/pts");
    !is_given && (spec.devpts || spec.process.terminal || spec.init || spec.systemd)
}

/// Paths of `/proc` and `/sys` that user namespaces do not hide and that reveal facts about the
/// host, as far as this kernel has them. Files for the host's root only need no mask: no process
/// inside has its uid.
pub(crate) fn hidden() -> &'static [&'static str] {
    const HIDDEN: [&str; 12] = [
        "/proc/kcore",
        "/proc/keys",
        "/proc/latency_stats",
        "/proc/timer_list",
        "/proc/timer_stats",
        "/proc/sched_debug",
        "/proc/interrupts",
        "/proc/kallsyms",
        "/proc/acpi",
        "/proc/scsi",
        "/proc/asound",
        "/sys/firmware",
    ];
    static THERE: OnceLock<Vec<&str>> = OnceLock::new();
    THERE.get_or_init(|| HIDDEN.into_iter().filter(|path| Path::new(path).exists()).collect())
}

/// Makes a file and a directory to be mounted over hidden paths.
fn masks(shared: &Path) -> Result<[OwnedFd; 2]> {
    let attr = MountAttr::NOSUID | MountAttr::NOEXEC | MountAttr::RDONLY;
    let null = dir::clone_dir(&shared.join("dev/null"), attr)?;
    let empty = shared.join("empty");
    fs::create_dir(&empty).map_err(Error::file("cannot make directory", &empty))?;
    Ok([null, dir::clone_dir(&empty, attr)?])
}
