//! The steps of a newborn between its birth and execve, laid out by the engine.
//!
//! A [`Plan`] is built in the engine, where memory, locks and errors are free, and becomes one flat
//! piece of memory (see [`crate::flat`]). The newborn executes the operations in the order of the
//! method calls. The order is the caller's responsibility; each method documents its constraints. A
//! usual start is:
//!
//! ```text
//! join_cgroup*  become_root  unshare(NEWCGROUP)  session_keyring  setsid
//! root  attach(/dev, /sys, ...)  proc  mqueue  devpts  sysctl  mask  read_only
//! hostname  rlimit  oom_score_adj  umask  terminal or stdio  chdir
//! sync  credentials  capabilities  no_new_privs  seccomp  [init]  exec
//! ```
//!
//! A start by the OCI command line, which has no keeper, begins in a copy of the host's mount
//! namespace, where hooks of the bundle may inspect the container before it is closed, and waits
//! twice:
//!
//! ```text
//! setns*  join_cgroup*  become_root  unshare(NEWCGROUP)  setsid
//! root_below  attach*  filesystem*  device*  [sync  hook*]  pivot
//! mask  read_only  hostname  rlimit  stdio or terminal  chdir
//! wait_for_start  credentials  capabilities  no_new_privs  [hook_with  hook*]  seccomp  exec
//! ```
//!
//! and an exec into a running container:
//!
//! ```text
//! join_cgroup*  setns(pidfd, everything but pid)  become_root  session_keyring  setsid
//! rlimit  umask  terminal or stdio  chdir  sync  credentials  capabilities  ... exec
//! ```

use std::os::fd::{AsFd, OwnedFd};

use dormouse_kernel::call::CloneFlags;
use dormouse_kernel::{rlimit, sysctl};

use crate::error::LaunchError;
use crate::flat::{self, Code, NO_FD, Record, Table, Writer};

/// A descriptor that travels with a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FdIndex(pub(crate) u32);

/// The required type of a mount's target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetKind {
    /// A directory; symbolic links on the way are followed inside the root.
    Dir,
    /// Anything but a directory; links as above.
    File,
    /// A directory reached without any symbolic link: for procfs, sysfs and `/dev`, whose place an
    /// image must not choose (CVE-2019-19921, CVE-2023-27561).
    PlainDir,
}

/// Capability sets as bit masks (capabilities(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CapabilityMasks {
    /// The bound that no later process can exceed.
    pub bounding: u64,
    /// In effect. Only the init of [`Plan::init`] keeps this; execve computes it anew.
    pub effective: u64,
    /// Permitted, the same.
    pub permitted: u64,
    /// Inheritable: zero but for special needs (CVE-2022-29162).
    pub inheritable: u64,
    /// Ambient: what a program that is not root keeps over execve; a subset of permitted and
    /// inheritable.
    pub ambient: u64,
}

/// Propagation of mount events below a mount (mount_namespaces(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spread {
    /// No propagation.
    Private,
    /// Receives events and sends none.
    Slave,
    /// Both ways.
    Shared,
    /// No propagation, and the mount cannot be bound.
    Unbindable,
}

/// A device node that a newborn makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Node {
    /// Kind (`S_IFCHR`, `S_IFBLK`, `S_IFIFO`) and permissions.
    pub mode: u32,
    /// Device number, as from makedev(3).
    pub device: u64,
    /// Owner, as seen inside.
    pub uid: u32,
    /// Group, as seen inside.
    pub gid: u32,
}

/// The ids a program runs under, as seen inside.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ids {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Supplementary groups, 65,536 at most.
    pub groups: Vec<u32>,
}

/// A terminal of the container's own devpts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Terminal {
    /// Mount point of the devpts inside.
    pub devpts: String,
    /// Rows and columns at first; 0 leaves them.
    pub size: (u16, u16),
    /// The owner.
    pub uid: u32,
    /// Whether it is bound at `/dev/console` too.
    pub console: bool,
}

impl Default for Terminal {
    fn default() -> Self {
        Self { devpts: "/dev/pts".into(), size: (0, 0), uid: 0, console: false }
    }
}

/// The program at the end of a plan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exec {
    /// Paths inside that are tried in turn, as a shell does along `PATH`.
    pub candidates: Vec<Vec<u8>>,
    /// Its arguments, the first being its name.
    pub argv: Vec<Vec<u8>>,
    /// `NAME=value`.
    pub envp: Vec<Vec<u8>>,
}

/// A restore program: machine code that is run instead of executing a program. The crate
/// `checkpoint` documents it.
#[derive(Debug)]
pub struct Follow {
    /// Its memory.
    pub memory: OwnedFd,
    /// Address of the mapping.
    pub base: u64,
    /// Length of the mapping.
    pub length_bytes: u64,
    /// The address of its first operation.
    pub start: u64,
    /// Offset in the mapping of the numbers of `descriptors`, 4 bytes each.
    pub descriptors_at: u64,
    /// The descriptors it receives, in this order.
    pub descriptors: Vec<OwnedFd>,
}

/// The steps of a newborn between its birth and execve.
pub struct Plan {
    writer: Writer,
    tables: Vec<Table>,
    pub(crate) fds: Vec<OwnedFd>,
    pub(crate) steps: Vec<Step>,
    root_read_only: bool,
    is_apart: bool,
    invalid: Option<&'static str>,
}

impl Default for Plan {
    fn default() -> Self {
        Self::new()
    }
}

impl Plan {
    /// A plan of nothing.
    pub fn new() -> Self {
        Self {
            writer: Writer::new(),
            tables: Vec::new(),
            fds: Vec::new(),
            steps: Vec::new(),
            root_read_only: false,
            is_apart: false,
            invalid: None,
        }
    }

    /// Adds a descriptor. The newborn's copy is closed at execve; a descriptor that becomes one of
    /// 0, 1, 2 by [`Plan::stdio`] stays.
    pub fn fd(&mut self, fd: OwnedFd) -> FdIndex {
        self.fds.push(fd);
        FdIndex(self.fds.len() as u32 - 1)
    }

    #[allow(clippy::too_many_arguments)]
    fn push(&mut self, code: Code, flags: u16, fd: u32, a: u64, b: u64, text: &[u8], about: &str) {
        if text.contains(&0) {
            self.invalid = Some("a NUL byte in a text");
        }
        let at = self.writer.text(text);
        self.push_at(code, flags, fd, a, b, at, about);
    }

    #[allow(clippy::too_many_arguments)]
    fn push_at(
        &mut self,
        code: Code,
        flags: u16,
        fd: u32,
        a: u64,
        b: u64,
        at: (u32, u32),
        about: &str,
    ) {
        let (text, text_len) = at;
        self.writer.records.push(Record { code: code as u16, flags, fd, a, b, text, text_len });
        self.steps.push(Step { code, about: about.to_owned() });
    }

    fn simple(&mut self, code: Code, a: u64, about: &str) {
        self.push(code, 0, NO_FD, a, 0, b"", about);
    }

    /// Joins a v1 cgroup through its opened `tasks` file.
    ///
    /// ORDER: before [`Plan::setns`] and [`Plan::become_root`], and while there is one thread.
    pub fn join_cgroup(&mut self, tasks: FdIndex) {
        self.push(Code::JoinCgroup, 0, tasks.0, 0, 0, b"", "");
    }

    /// Enters namespaces: `fd` is a namespace or a pidfd, `flags` are `CLONE_NEW*` (setns(2)).
    pub fn setns(&mut self, fd: FdIndex, flags: u32) {
        self.push(Code::Setns, 0, fd.0, u64::from(flags), 0, b"", "");
    }

    /// Becomes uid and gid 0 of its user namespace, with no supplementary group.
    pub fn become_root(&mut self) {
        self.simple(Code::BecomeRoot, 0, "");
    }

    /// unshare(2).
    ///
    /// A network namespace made so belongs to the container's user namespace: root inside has the
    /// capabilities over it that it was granted.
    ///
    /// ORDER: `CLONE_NEWCGROUP` comes after placement, or the namespace is rooted in the keeper's
    /// own cgroup.
    pub fn unshare(&mut self, flags: u32) {
        self.simple(Code::Unshare, u64::from(flags), "");
    }

    /// Sets the loopback device of its own network namespace up.
    pub fn loopback(&mut self) {
        self.simple(Code::Loopback, 0, "");
    }

    /// Joins a new, empty session keyring (keyctl(2)); nothing where the kernel has no keys.
    pub fn session_keyring(&mut self) {
        self.push(Code::SessionKeyring, flat::LENIENT, NO_FD, 0, 0, b"", "");
    }

    /// Writes a text to a descriptor: a file of procfs that the newborn itself could not open.
    pub fn write(&mut self, fd: FdIndex, text: &str, about: &str) {
        self.push(Code::Write, 0, fd.0, 0, 0, text.as_bytes(), about);
    }

    /// Creates a time namespace and enters it, which makes its offsets final. `offsets` is the `timens_offsets` of the
    /// newborn with the text to be written to it, opened by another process: the newborn may have no rights over it.
    pub fn own_time(&mut self, offsets: Option<(OwnedFd, &str)>, about: &str) {
        self.unshare(CloneFlags::NEWTIME.bits() as u32);
        if let Some((file, text)) = offsets {
            let fd = self.fd(file);
            self.write(fd, text, about);
        }
        self.simple(Code::EnterTime, 0, "");
    }

    /// Attaches the detached mount at `place`, a path of the host whose mount namespace the newborn
    /// has a copy of; that copy becomes private. Later operations are inside this root, and nothing
    /// else leaves the view before [`Plan::pivot`].
    pub fn root_below(&mut self, mount: FdIndex, place: &str, read_only: bool) {
        self.push(Code::RootBelow, 0, mount.0, 0, 0, place.as_bytes(), place);
        self.root_read_only = read_only;
    }

    /// Later operations are inside the detached mount, which is attached nowhere: the newborn
    /// shares the mount namespace of its cloning process, and changes nothing in it. KERNEL(6.15)
    pub fn root_apart(&mut self, mount: FdIndex, read_only: bool) {
        self.push(Code::RootBelow, flat::APART, mount.0, 0, 0, b"", "");
        (self.is_apart, self.root_read_only) = (true, read_only);
    }

    /// Makes the root of [`Plan::root_apart`] that of the process. Nothing is above it.
    pub fn enter_root(&mut self) {
        self.push(Code::Pivot, flat::APART, NO_FD, 0, 0, b"", "");
    }

    /// Makes the root of [`Plan::root_below`] that of the mount namespace; nothing of the host
    /// stays below it. Without `pivot`, for a host whose own root is its initramfs, the new root
    /// only covers the old one.
    pub fn pivot(&mut self, pivot: bool) {
        let flags = if pivot { 0 } else { flat::NO_PIVOT };
        self.push(Code::Pivot, flags, NO_FD, 0, 0, b"", "");
    }

    /// Sets the propagation of the root mount, and of all below it.
    ///
    /// ORDER: after [`Plan::pivot`], which a shared root would refuse.
    pub fn spread(&mut self, spread: Spread, recursive: bool) {
        let flags = if recursive { flat::RECURSIVE } else { 0 };
        self.push(Code::Spread, flags, NO_FD, spread as u64, 0, b"", "");
    }

    /// Settings of propagation as they travel; the flag is for all mounts below, too.
    fn spreads(&mut self, spreads: &[(Spread, bool)]) -> u64 {
        if spreads.len() > flat::SPREADS_MAX {
            self.invalid = Some("the propagation of a mount set more than 8 times");
        }
        let number = |(spread, recursive): &(Spread, bool)| {
            let below = if *recursive { flat::SPREAD_RECURSIVE } else { 0 };
            flat::SPREAD_SET | below | *spread as u64
        };
        let first_lowest = spreads.iter().take(flat::SPREADS_MAX).rev();
        first_lowest.fold(0, |all, one| all << flat::SPREAD_BITS | number(one)) << 32
    }

    /// Mounts a new file system of its own namespaces at `target`, which is created; `attr` are
    /// bits of `MountAttr`, `options` words or `key=value`. The propagation is set for each element
    /// of the list, at most 8.
    pub fn filesystem_with(
        &mut self,
        fstype: &str,
        target: &str,
        kind: TargetKind,
        (attr, spreads): (u64, &[(Spread, bool)]),
        options: &[&str],
    ) {
        let mut words = Vec::new();
        for word in std::iter::once(&fstype).chain(options).filter(|w| !w.is_empty()) {
            if word.contains('\0') {
                self.invalid = Some("a NUL byte in a mount option");
            }
            words.extend_from_slice(word.as_bytes());
            words.push(0);
        }
        let at = u64::from(self.writer.text(&words).0);
        let a = self.spreads(spreads) | attr & u64::from(u32::MAX);
        let flags = if self.is_apart { flat::APART } else { 0 };
        self.push(Code::Filesystem, flags, kind as u32, a, at, target.as_bytes(), target);
    }

    /// Makes a device node, unless the same is there, with the directories that lead to it; no
    /// link is followed.
    pub fn device(&mut self, path: &str, node: &Node) {
        let b = u64::from(node.uid) << 32 | u64::from(node.mode);
        self.push(Code::Device, 0, node.gid, node.device, b, path.as_bytes(), path);
    }

    /// Sets standard output and error of the programs of later hooks, and their system call filter with
    /// its flags of seccomp(2), if any.
    ///
    /// The filter does not apply to the newborn itself, so a filter for one program cannot keep the
    /// newborn from waiting for another.
    pub fn hook_with(&mut self, output: FdIndex, filter: Option<(&[u8], u16)>) {
        let (program, flags) = filter.unwrap_or_default();
        if filter.is_some() && !is_filter(program) {
            self.invalid = Some("an invalid system call filter");
        }
        let at = self.writer.aligned(program);
        let count = (program.len() / 8) as u64;
        self.push_at(Code::HookWith, flags, output.0, count, 0, at, "");
    }

    /// Runs a program with the newborn's namespaces and credentials, and waits for it; `input`, from its
    /// beginning, becomes its standard input, and 0 seconds mean no limit. The plan fails if the program
    /// does. `about` names the hook in the error.
    pub fn hook(&mut self, program: &Exec, input: FdIndex, seconds: u16, about: &str) {
        let path = program.candidates.first().cloned().unwrap_or_default();
        if program.argv.iter().chain(&program.envp).flatten().any(|b| *b == 0) {
            self.invalid = Some("a NUL byte in an argument of a hook");
        }
        let (argv, envp) = (self.writer.table(&program.argv), self.writer.table(&program.envp));
        let (a, b) = (u64::from(argv.at), u64::from(envp.at));
        self.tables.push(argv);
        self.tables.push(envp);
        self.push(Code::Hook, seconds, input.0, a, b, &path, about);
    }

    /// Sends Ready, waits for [`crate::Newborn::release`], then disconnects from its engine and
    /// waits for a connection to `listener` and its Go. The newborn exits if either goes away
    /// before.
    ///
    /// ORDER: the newborn first closes every descriptor that was added before `listener`, since it may
    /// wait for long. Operations that follow use descriptors that are added later.
    pub fn wait_for_start(&mut self, listener: FdIndex) {
        self.seal_root();
        self.push(Code::Await, 0, listener.0, u64::from(listener.0), 0, b"", "");
    }

    /// personality(2).
    pub fn personality(&mut self, persona: u64) {
        self.simple(Code::Personality, persona, "");
    }

    /// sched_setaffinity(2): `mask` has a bit for each CPU. `None` is every CPU that the cpuset of the
    /// cgroup allows, whatever the caller is bound to.
    ///
    /// ORDER: after placement in the cgroup, which the kernel takes the CPUs from.
    pub fn affinity(&mut self, mask: Option<&[u64]>) {
        let all = [u64::MAX; flat::AFFINITY_WORDS];
        let flags = if mask.is_none() { flat::LENIENT } else { 0 };
        let words = mask.unwrap_or(&all).iter();
        let bytes: Vec<u8> = words.flat_map(|word| word.to_ne_bytes()).collect();
        let at = self.writer.aligned(&bytes);
        self.push_at(Code::Affinity, flags, NO_FD, 0, 0, at, "");
    }

    /// set_mempolicy(2): `mode` with its flags, `nodes` has a bit for each node. execve(2) keeps it.
    pub fn memory_policy(&mut self, mode: u32, nodes: &[u64]) {
        let bytes: Vec<u8> = nodes.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let at = self.writer.aligned(&bytes);
        self.push_at(Code::MemoryPolicy, 0, NO_FD, mode.into(), 0, at, "");
    }

    /// sched_setattr(2): `attributes` is the kernel's `struct sched_attr`.
    pub fn scheduler(&mut self, attributes: &[u8]) {
        let at = self.writer.aligned(attributes);
        self.push_at(Code::Scheduler, 0, NO_FD, 0, 0, at, "");
    }

    /// ioprio_set(2), of this process.
    pub fn io_priority(&mut self, priority: u16) {
        self.simple(Code::IoPriority, u64::from(priority), "");
    }

    /// Gives the program these descriptors as 3 and following, in order.
    pub fn preserve(&mut self, fds: Vec<OwnedFd>) {
        let (first, count) = (self.fds.len() as u32, fds.len() as u64);
        self.fds.extend(fds);
        self.push(Code::Preserve, 0, first, count, 0, b"", "");
    }

    /// The label that the program gets from the host's security module at execve.
    pub fn label(&mut self, label: &str) {
        self.push(Code::Label, 0, NO_FD, 0, 0, label.as_bytes(), label);
    }

    /// Checks that there is a program to execute, so that a missing one is reported before the
    /// start.
    pub fn lookup(&mut self, exec: &Exec) {
        let name = exec.argv.first().map(|n| String::from_utf8_lossy(n).into_owned());
        let at = self.writer.text(&exec.candidates.join(&0));
        self.push_at(Code::Lookup, 0, NO_FD, 0, 0, at, &name.unwrap_or_default());
    }

    /// Makes the detached mount the root, by move_mount over `/` and chroot: no task of the host is
    /// visited, and the root is the namespace's own (nested user namespaces work).
    ///
    /// `read_only` takes effect before the first of [`Plan::sync`], [`Plan::credentials`],
    /// [`Plan::capabilities`], [`Plan::no_new_privs`], [`Plan::exec`], so that mount points can
    /// still be made.
    pub fn root(&mut self, mount: FdIndex, read_only: bool) {
        self.push(Code::Root, 0, mount.0, 0, 0, b"", "");
        self.root_read_only = read_only;
    }

    /// Makes the root read-only if that was requested. No mount point is made in it from then on. Each sync does so, if
    /// it was not done before.
    pub fn seal_root(&mut self) {
        if std::mem::take(&mut self.root_read_only) {
            self.simple(Code::RootReadOnly, 0, "");
        }
    }

    /// Attaches a detached mount at `target` inside the root; `create` makes what is missing.
    pub fn attach(&mut self, mount: FdIndex, target: &str, kind: TargetKind, create: bool) {
        let flags = if create { flat::CREATE } else { 0 };
        self.push(Code::Attach, flags, mount.0, kind as u64, 0, target.as_bytes(), target);
    }

    /// The same, with `create`, for a copy of the mount, which is younger than all earlier mounts.
    /// The propagation is set for each element of the list, at most 8.
    pub fn attach_copy(
        &mut self,
        mount: FdIndex,
        target: &str,
        kind: TargetKind,
        spreads: &[(Spread, bool)],
    ) {
        let a = self.spreads(spreads) | kind as u64;
        let flags = flat::COPY | flat::CREATE;
        self.push(Code::Attach, flags, mount.0, a, 0, target.as_bytes(), target);
    }

    /// Attaches a copy of what is at `source` inside the root by then, with everything below if
    /// `recursive`; `place` is any descriptor, which is replaced by it. `attr` are bits of `MountAttr` to
    /// set and to clear. Ids are mapped as in a user namespace, of all mounts below where that is set.
    /// The propagation is set for each element of the list, at most 8.
    pub fn attach_inside(
        &mut self,
        (place, source): (FdIndex, &str),
        (target, kind): (&str, TargetKind),
        recursive: bool,
        attr: (u32, u32),
        idmap: Option<(FdIndex, bool)>,
        spreads: &[(Spread, bool)],
    ) {
        let flags = if recursive { flat::RECURSIVE } else { 0 };
        let a = u64::from(attr.1) << 32 | u64::from(attr.0);
        let b = match idmap {
            Some((userns, below)) => u64::from(below) << 32 | u64::from(userns.0),
            None => u64::from(NO_FD),
        };
        self.push(Code::Take, flags, place.0, a, b, source.as_bytes(), source);
        let a = self.spreads(spreads) | kind as u64;
        self.push(Code::Attach, flat::CREATE, place.0, a, 0, target.as_bytes(), target);
    }

    /// Attaches the procfs of the container's own pid namespace ([`crate::Newborn::take_proc`]).
    ///
    /// The keeper makes the procfs: one made inside the tiny mount namespace would be refused,
    /// because no procfs is visible there.
    pub fn proc(&mut self, mount: FdIndex, target: &str) {
        self.attach(mount, target, TargetKind::PlainDir, true);
    }

    fn filesystem(&mut self, index: u64, target: &str) {
        let text = target.as_bytes();
        self.push(Code::NewFilesystem, flat::CREATE, NO_FD, 0, index, text, target);
    }

    /// Mounts the message queues of its ipc namespace.
    pub fn mqueue(&mut self, target: &str) {
        self.filesystem(0, target);
    }

    /// Mounts a new devpts for at most so many terminals; `gid` owns them where it is mapped.
    ///
    /// A keeper of an older program does not read the number; its newborns have at most 256.
    pub fn devpts(&mut self, target: &str, gid: Option<u32>, terminals: u32) {
        let (text, gid) = (target.as_bytes(), gid.map_or(u64::MAX, u64::from));
        self.push(Code::NewFilesystem, flat::CREATE, terminals, gid, 1, text, target);
    }

    /// Mounts the v2 hierarchy, rooted in its cgroup namespace.
    pub fn cgroup2(&mut self, target: &str) {
        self.filesystem(2, target);
    }

    /// Binds a path inside the root at another, with everything below.
    pub fn bind(&mut self, source_inside: &str, target: &str, read_only: bool) {
        let source = self.writer.text(source_inside.as_bytes()).0;
        let flags = flat::CREATE | if read_only { flat::READ_ONLY } else { 0 };
        let text = target.as_bytes();
        self.push(Code::Bind, flags, NO_FD, 0, u64::from(source), text, target);
    }

    /// Makes a directory and its parents inside the root; an existing one is left as it is.
    pub fn make_dir(&mut self, path: &str, mode: u32) {
        self.push(Code::MakeDir, 0, NO_FD, u64::from(mode), 0, path.as_bytes(), path);
    }

    /// Makes a symbolic link inside the root, unless something is there.
    pub fn symlink(&mut self, points_to: &str, path: &str) {
        let to = self.writer.text(points_to.as_bytes()).0;
        self.push(Code::Symlink, 0, NO_FD, 0, u64::from(to), path.as_bytes(), path);
    }

    /// Hides paths: files under `null`, a detached mount of `/dev/null`; directories under
    /// `empty`, a detached read-only mount of an empty directory. A missing path needs no mask.
    pub fn mask(&mut self, null: FdIndex, empty: FdIndex, paths: &[&str]) {
        for path in paths {
            let text = path.as_bytes();
            self.push(Code::Mask, 0, null.0, u64::from(empty.0), 0, text, path);
        }
    }

    /// Makes paths read-only with everything mounted below. A missing path is passed over.
    pub fn read_only(&mut self, paths: &[&str]) {
        for path in paths {
            self.push(Code::ReadOnly, 0, NO_FD, 0, 0, path.as_bytes(), path);
        }
    }

    /// Sets a sysctl of the container's own namespaces, `kernel.shmmax` or
    /// `net.ipv4.ping_group_range` ([`sysctl::owner`]), through its own procfs at `/proc`.
    ///
    /// ORDER: after [`Plan::proc`], before [`Plan::read_only`] of `/proc/sys`.
    ///
    /// Errors: a key that is not of a namespace, or a value of more than one line.
    pub fn sysctl(&mut self, name: &str, value: &str) -> Result<(), LaunchError> {
        let path = sysctl::path(name).filter(|_| sysctl::owner(name).is_some());
        let path = path.ok_or_else(|| LaunchError::Sysctl { name: name.to_owned() })?;
        if !sysctl::is_value(value) {
            return Err(LaunchError::SysctlValue { name: name.to_owned() });
        }
        match path.as_str() {
            // Only the host's root may write these two files, in any namespace.
            "kernel/hostname" => self.hostname(value),
            "kernel/domainname" => self.domainname(value),
            _ => self.write_sysctl(name, &path, value),
        }
        Ok(())
    }

    fn write_sysctl(&mut self, name: &str, path: &str, value: &str) {
        let value = self.writer.text(value.as_bytes()).0;
        self.push(Code::Sysctl, 0, NO_FD, 0, u64::from(value), path.as_bytes(), name);
    }

    /// sethostname(2), 64 bytes at most.
    pub fn hostname(&mut self, name: &str) {
        self.push(Code::Hostname, 0, NO_FD, 0, 0, name.as_bytes(), name);
    }

    /// setdomainname(2), 64 bytes at most.
    pub fn domainname(&mut self, name: &str) {
        self.push(Code::Domainname, 0, NO_FD, 0, 0, name.as_bytes(), name);
    }

    /// setrlimit(2): `resource` is the kernel's number, `u64::MAX` unlimited. Raising the hard
    /// limit needs CAP_SYS_RESOURCE of the host; a lenient limit that is refused is lowered to what
    /// the process may have.
    pub fn rlimit(&mut self, resource: u32, soft: u64, hard: u64, lenient: bool) {
        let flags = if lenient { flat::LENIENT } else { 0 };
        let name = rlimit::name(resource).map_or(resource.to_string(), str::to_owned);
        self.push(Code::Rlimit, flags, resource, soft, hard, b"", &name);
    }

    /// umask(2).
    pub fn umask(&mut self, mask: u32) {
        self.simple(Code::Umask, u64::from(mask & 0o777), "");
    }

    /// `/proc/PID/oom_score_adj` (proc(5)); lowering it may be refused, which is no failure.
    ///
    /// ORDER: before [`Plan::become_root`] (or setns): afterwards the file is not the process's
    /// own.
    pub fn oom_score_adj(&mut self, value: i32) {
        let value = i64::from(value) as u64;
        self.push(Code::OomScoreAdj, flat::LENIENT, NO_FD, value, 0, b"", "");
    }

    /// Sets standard input, output and error.
    pub fn stdio(&mut self, fds: [FdIndex; 3]) {
        let [input, output, error] = fds.map(|f| f.0);
        self.push(Code::Stdio, 0, input, u64::from(output), u64::from(error), b"", "");
    }

    /// Opens a terminal, makes it the controlling one and standard input, output and error. Its
    /// master comes with Ready ([`crate::Newborn::ready`]), so [`Plan::sync`] must follow.
    pub fn terminal(&mut self, terminal: &Terminal) {
        let flags = if terminal.console { flat::CONSOLE } else { 0 };
        let size = u64::from(terminal.size.0) << 16 | u64::from(terminal.size.1);
        let text = terminal.devpts.as_bytes();
        self.push(Code::Terminal, flags, terminal.uid, size, 0, text, &terminal.devpts);
    }

    /// setsid(2).
    pub fn setsid(&mut self) {
        self.simple(Code::Setsid, 0, "");
    }

    /// [`Plan::sync`] in the middle, while the root is not complete yet. An operation that is no sysctl follows.
    pub fn wait_for_engine(&mut self) {
        self.simple(Code::Sync, 0, "");
    }

    /// Sends Ready and waits for Go; the newborn exits if the engine does. The newborn sets sysctls that follow
    /// ([`Plan::sysctl`]) before it waits, while the engine is busy with Ready.
    pub fn sync(&mut self) {
        self.seal_root();
        self.simple(Code::Sync, 0, "");
    }

    /// The same, and before the wait come more operations that follow: the working directory, credentials and
    /// confinement. Any other operation waits for Go first. The newborns of a keeper of an older program wait
    /// before all of them but sysctls.
    ///
    /// ORDER: a filter among them permits recvmsg(2), by which the newborn waits.
    pub fn sync_early(&mut self) {
        self.seal_root();
        self.push(Code::Sync, flat::EARLY, NO_FD, 0, 0, b"", "");
    }

    /// Ends a part of a plan, and returns it and an empty next one. Descriptors belong to their part.
    pub(crate) fn split(mut self) -> (Self, Self) {
        let root_read_only = std::mem::take(&mut self.root_read_only);
        self.simple(Code::Rest, 0, "");
        let rest = Self { root_read_only, is_apart: self.is_apart, ..Self::new() };
        (self, rest)
    }

    /// Sets the working directory, which must be inside the root (CVE-2024-21626); `create` makes
    /// it.
    pub fn chdir(&mut self, path: &str, create: bool) {
        let flags = if create { flat::CREATE } else { 0 };
        self.push(Code::Chdir, flags, NO_FD, 0, 0, path.as_bytes(), path);
    }

    /// Sets the ids, keeping the permitted capabilities.
    ///
    /// ORDER: [`Plan::capabilities`] follows at once.
    pub fn credentials(&mut self, ids: &Ids) {
        self.seal_root();
        let groups: Vec<u8> = ids.groups.iter().flat_map(|g| g.to_ne_bytes()).collect();
        let at = self.writer.aligned(&groups);
        let about = format!("{}:{}", ids.uid, ids.gid);
        let (gid, count) = (u64::from(ids.gid), ids.groups.len() as u64);
        self.push_at(Code::Credentials, 0, ids.uid, gid, count, at, &about);
    }

    /// Bounds and sets the capabilities. CAP_SYS_ADMIN of its own user namespace stays in effect
    /// until execve, which takes it away, so that a filter can be loaded without no_new_privs.
    pub fn capabilities(&mut self, masks: &CapabilityMasks) {
        self.seal_root();
        let all =
            [masks.bounding, masks.effective, masks.permitted, masks.inheritable, masks.ambient];
        let bytes: Vec<u8> = all.iter().flat_map(|m| m.to_ne_bytes()).collect();
        let at = self.writer.aligned(&bytes);
        self.push_at(Code::Capabilities, 0, NO_FD, 0, 0, at, "");
    }

    /// No process gains privileges by execve any more (prctl(2)).
    pub fn no_new_privs(&mut self) {
        self.seal_root();
        self.simple(Code::NoNewPrivs, 0, "");
    }

    /// Loads a seccomp filter: `program` is an array of `struct sock_filter`, 8 bytes each.
    ///
    /// ORDER: the last operation before [`Plan::exec`] (or [`Plan::init`], whose own calls the
    /// filter must allow: fork, execve, wait4, rt_sigtimedwait, kill, close_range, exit_group).
    pub fn seccomp(&mut self, program: &[u8]) {
        if !is_filter(program) {
            self.invalid = Some("an invalid system call filter");
        }
        let at = self.writer.aligned(program);
        let count = (program.len() / 8) as u64;
        self.push_at(Code::Seccomp, 0, NO_FD, count, 0, at, "");
    }

    /// The same with flags of seccomp(2) (`SECCOMP_FILTER_FLAG_*`), and, for a filter with user
    /// notification, with a shared page by which the listener's descriptor is fetched
    /// ([`crate::Listener`]).
    pub fn seccomp_with(&mut self, program: &[u8], flags: u16, page: Option<FdIndex>) {
        self.seccomp(program);
        if let Some(record) = self.writer.records.last_mut() {
            record.flags = flags;
            record.fd = page.map_or(NO_FD, |page| page.0);
        }
    }

    /// Keeps a tiny init as this process, pid 1: it passes signals on to the program, reaps orphans
    /// and exits with the program's status.
    ///
    /// ORDER: followed by [`Plan::exec`] only.
    pub fn init(&mut self) {
        self.simple(Code::Init, 0, "");
    }

    /// The same for a program that is restored ([`Plan::follow`]) with the process id that it had,
    /// and takes its credentials by itself: the init has this user, group and capabilities.
    pub fn init_as(&mut self, program: u32, ids: &Ids, masks: &CapabilityMasks) {
        let [uid, gid, program] = [ids.uid, ids.gid, program].map(u64::from);
        let all = [uid, gid, masks.effective, masks.permitted, masks.inheritable, program];
        let bytes: Vec<u8> = all.iter().flat_map(|n| n.to_ne_bytes()).collect();
        let at = self.writer.aligned(&bytes);
        self.push_at(Code::Init, 0, NO_FD, 0, 0, at, "");
    }

    /// Executes the program; the last operation.
    pub fn exec(&mut self, exec: &Exec) {
        self.seal_root();
        if exec.candidates.is_empty() || exec.argv.is_empty() {
            self.invalid = Some("no program");
        }
        let texts = exec.candidates.iter().chain(&exec.argv).chain(&exec.envp);
        if texts.flatten().any(|b| *b == 0) {
            self.invalid = Some("a NUL byte in an argument");
        }
        let argv = self.writer.table(&exec.argv);
        let envp = self.writer.table(&exec.envp);
        let candidates = exec.candidates.join(&0);
        let at = self.writer.text(&candidates);
        let name = exec.argv.first().map(|n| String::from_utf8_lossy(n).into_owned());
        let (a, b) = (u64::from(argv.at), u64::from(envp.at));
        self.tables.push(argv);
        self.tables.push(envp);
        self.push_at(Code::Exec, 0, NO_FD, a, b, at, &name.unwrap_or_default());
    }

    /// Runs a restore program instead of executing one; the last operation.
    ///
    /// ORDER: after [`Plan::sync`]: between Ready and Go the newborn is seized by its tracer,
    /// without which the program does not pass its first stage.
    pub fn follow(&mut self, follow: Follow) {
        self.seal_root();
        let Follow { memory, base, length_bytes, start, descriptors_at, descriptors } = follow;
        let memory = self.fd(memory);
        let count = descriptors.len() as u64;
        let indices = descriptors.into_iter().map(|fd| u64::from(self.fd(fd).0));
        let numbers: Vec<u64> = [start, descriptors_at, count].into_iter().chain(indices).collect();
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_ne_bytes()).collect();
        let at = self.writer.aligned(&bytes);
        self.push_at(Code::Follow, 0, memory.0, base, length_bytes, at, "");
    }

    /// Number of descriptors of the plan.
    pub fn descriptors(&self) -> usize {
        self.fds.len()
    }

    /// Returns the flat form, its descriptors, and the objects of the steps.
    pub(crate) fn finish(mut self) -> Result<Finished, LaunchError> {
        self.seal_root();
        if let Some(why) = self.invalid {
            return Err(LaunchError::Plan { why });
        }
        if self.fds.len() > flat::FDS_MAX {
            return Err(LaunchError::Plan { why: TOO_MANY_DESCRIPTORS });
        }
        if self.writer.len() > flat::PLAN_MAX_BYTES {
            return Err(LaunchError::Plan { why: "arguments and environment larger than 8 MiB" });
        }
        let bytes = self.writer.finish(&self.tables, self.fds.len());
        Ok(Finished { bytes, fds: self.fds, steps: self.steps })
    }
}

/// The reason for the refusal of a plan with more than [`flat::FDS_MAX`] descriptors.
pub(crate) const TOO_MANY_DESCRIPTORS: &str = "more than 2,048 descriptors";

/// Whether these are instructions, and no more than the kernel takes.
fn is_filter(program: &[u8]) -> bool {
    program.len().is_multiple_of(8) && !program.is_empty() && program.len() <= 8 * 4096
}

/// The object of one operation of a plan, for errors.
#[derive(Debug, Clone)]
pub struct Step {
    pub(crate) code: Code,
    pub(crate) about: String,
}

/// A plan ready to be sent.
pub(crate) struct Finished {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
    pub(crate) steps: Vec<Step>,
}

impl Finished {
    /// A memfd that holds the plan.
    pub(crate) fn to_memfd(&self) -> Result<OwnedFd, LaunchError> {
        use rustix::fs::{MemfdFlags, memfd_create};
        let step = |source| LaunchError::Memory { source };
        let fd = memfd_create(c"dormouse-plan", MemfdFlags::CLOEXEC).map_err(step)?;
        let mut rest = &self.bytes[..];
        while !rest.is_empty() {
            let n = rustix::io::write(fd.as_fd(), rest).map_err(step)?;
            rest = &rest[n..];
        }
        Ok(fd)
    }
}
