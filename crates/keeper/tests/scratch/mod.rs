//! A runtime directory, a busybox tree and a keeper of one test.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dormouse_kernel::call::CloneFlags;
use dormouse_kernel::{mount, pidfd};
use dormouse_launch::{
    Exec, ExitStatus, Keeper, KeeperStart, Kind, LaunchError, Newborn, Plan, Spawn,
};
use rustix::fs::CWD;

/// Every namespace that a clone can make here.
pub const ALL: u64 = CloneFlags::NEWUSER
    .union(CloneFlags::NEWPID)
    .union(CloneFlags::NEWNS)
    .union(CloneFlags::NEWIPC)
    .union(CloneFlags::NEWUTS)
    .union(CloneFlags::NEWTIME)
    .bits();

/// An id map far from anything else.
const MAP: &str = "0 3000000000 65536\n";

/// The tree of one test.
pub struct Scratch {
    dir: tempfile::TempDir,
}

impl Scratch {
    /// Makes it, with `/bin/busybox` of the host inside.
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        // The container's ids must be able to reach the tree.
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let root = dir.path().join("root");
        for name in ["bin", "etc", "proc", "dev", "tmp", "sys"] {
            std::fs::create_dir_all(root.join(name)).unwrap();
        }
        std::fs::copy("/bin/busybox", root.join("bin/busybox"))
            .expect("the package busybox-static is needed");
        let applets = "sh true sleep cat ls echo id hostname grep readlink unshare mount umount ps \
                       tty stty touch stat nsenter";
        for applet in applets.split_whitespace() {
            symlink("busybox", root.join("bin").join(applet)).unwrap();
        }
        std::fs::create_dir_all(dir.path().join("run/c")).unwrap();
        Self { dir }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn root(&self) -> PathBuf {
        self.path("root")
    }

    pub fn run_dir(&self) -> PathBuf {
        self.path("run")
    }

    pub fn container_dir(&self, id: &str) -> PathBuf {
        self.run_dir().join("c").join(id)
    }

    pub fn start(&self) -> KeeperStart {
        KeeperStart {
            run_dir: self.run_dir(),
            program: env!("CARGO_BIN_EXE_dormouse-keeper").into(),
            ..KeeperStart::default()
        }
    }

    pub fn keeper(&self) -> Keeper {
        Keeper::connect_or_start(&self.start()).unwrap()
    }

    /// A connection that nothing has been said over.
    pub fn raw_connection(&self) -> OwnedFd {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
        let sock = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        let address = SocketAddrUnix::new(self.run_dir().join("keeper.sock")).unwrap();
        connect(&sock, &address).unwrap();
        sock
    }

    pub fn spawn(&self, id: &str) -> Spawn {
        std::fs::create_dir_all(self.container_dir(id)).unwrap();
        let id_map = Some((MAP.to_owned(), MAP.to_owned()));
        Spawn { id_map, proc: true, ..Spawn::new(id, Kind::Init, ALL) }
    }

    /// The tree as root, and its procfs.
    pub fn plan_root(&self, plan: &mut Plan, newborn: &mut Newborn) {
        plan.become_root();
        plan.session_keyring();
        plan.setsid();
        let userns = pidfd::user_namespace(newborn.pidfd.as_fd()).unwrap();
        let root = plan.fd(mount_of(&self.root(), Some(userns.as_fd())));
        plan.root(root, false);
        let proc = plan.fd(newborn.take_proc().unwrap());
        plan.proc(proc, "/proc");
    }

    fn start_one(
        &self,
        keeper: &mut Keeper,
        id: &str,
        words: &[&str],
        edit: impl FnOnce(&mut Plan),
        after: Option<&dyn Fn(&mut Plan)>,
    ) -> Result<(u32, OwnedFd), LaunchError> {
        let mut newborn = keeper.spawn(self.spawn(id))?;
        let mut plan = Plan::new();
        self.plan_root(&mut plan, &mut newborn);
        edit(&mut plan);
        if let Some(after) = after {
            plan.sync();
            after(&mut plan);
        }
        plan.exec(&program(words));
        newborn.send(plan)?;
        if after.is_some() {
            newborn.ready()?;
        }
        let (pid, pidfd) = (newborn.pid, newborn.pidfd.try_clone().unwrap());
        newborn.go()?;
        Ok((pid, pidfd))
    }

    /// Starts a program after what `edit` adds, and a sync point.
    pub fn try_run(
        &self,
        keeper: &mut Keeper,
        id: &str,
        words: &[&str],
        edit: impl FnOnce(&mut Plan),
    ) -> Result<(u32, OwnedFd), LaunchError> {
        self.start_one(keeper, id, words, edit, Some(&|_| {}))
    }

    pub fn run(
        &self,
        keeper: &mut Keeper,
        id: &str,
        words: &[&str],
        edit: impl FnOnce(&mut Plan),
    ) -> (u32, OwnedFd) {
        self.try_run(keeper, id, words, edit).unwrap()
    }

    /// The same without a sync point of its own.
    pub fn run_with(
        &self,
        keeper: &mut Keeper,
        id: &str,
        words: &[&str],
        edit: impl FnOnce(&mut Plan),
    ) -> (u32, OwnedFd) {
        self.start_one(keeper, id, words, edit, None).unwrap()
    }

    /// The same with an init of ours.
    pub fn run_under_init(
        &self,
        keeper: &mut Keeper,
        id: &str,
        words: &[&str],
        edit: impl FnOnce(&mut Plan),
    ) -> (u32, OwnedFd) {
        self.start_one(keeper, id, words, edit, Some(&|plan| plan.init())).unwrap()
    }

    /// What a script says, both streams, after what `edit` adds before the sync point.
    pub fn output(
        &self,
        keeper: &mut Keeper,
        id: &str,
        script: &str,
        edit: impl FnOnce(&mut Plan),
    ) -> String {
        self.output_of(keeper, id, script, edit, |_| {})
    }

    /// The same with what comes after the sync point.
    pub fn output_as(
        &self,
        keeper: &mut Keeper,
        id: &str,
        script: &str,
        edit: impl FnOnce(&mut Plan),
    ) -> String {
        self.output_of(keeper, id, script, |_| {}, edit)
    }

    fn output_of(
        &self,
        keeper: &mut Keeper,
        id: &str,
        script: &str,
        before: impl FnOnce(&mut Plan),
        after: impl FnOnce(&mut Plan),
    ) -> String {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let (pid, _) = self.run_with(keeper, id, &["sh", "-c", script], |plan| {
            before(plan);
            let out = plan.fd(writer);
            let null = plan.fd(std::fs::File::open("/dev/null").unwrap().into());
            plan.stdio([null, out, out]);
            plan.chdir("/", false);
            after(plan);
        });
        let text = output(reader);
        keeper.wait(pid).unwrap();
        text
    }

    /// Runs a script inside a running container.
    pub fn exec(&self, keeper: &mut Keeper, init: &OwnedFd, script: &str) -> (String, ExitStatus) {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let pid_namespace_of = Some(init.try_clone().unwrap());
        let spawn = Spawn { pid_namespace_of, ..Spawn::new("c1", Kind::Exec, 0) };
        let mut newborn = keeper.spawn(spawn).unwrap();
        let mut plan = Plan::new();
        let target = plan.fd(init.try_clone().unwrap());
        plan.setns(target, (ALL & !CloneFlags::NEWPID.bits()) as u32);
        plan.become_root();
        let out = plan.fd(writer);
        let null = plan.fd(std::fs::File::open("/dev/null").unwrap().into());
        plan.stdio([null, out, out]);
        plan.chdir("/", false);
        plan.sync();
        plan.exec(&program(&["sh", "-c", script]));
        newborn.send(plan).unwrap();
        newborn.ready().unwrap();
        let pid = newborn.pid;
        newborn.go().unwrap();
        (output(reader), keeper.wait(pid).unwrap())
    }
}

impl Drop for Scratch {
    /// A keeper ends by itself; only one that has to keep something outlives its test.
    fn drop(&mut self) {
        if let Ok(Some(mut keeper)) = Keeper::connect(&self.run_dir())
            && let Ok(status) = keeper.status()
            && status.children > 0
            && let Some(pid) = rustix::process::Pid::from_raw(status.pid as i32)
        {
            let children = format!("/proc/{}/task/{}/children", status.pid, status.pid);
            for child in std::fs::read_to_string(children).unwrap_or_default().split_whitespace() {
                if let Some(child) = child.parse().ok().and_then(rustix::process::Pid::from_raw) {
                    let _ = rustix::process::kill_process(child, rustix::process::Signal::KILL);
                }
            }
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

/// A detached mount of a directory or file, with its ids mapped.
pub fn mount_of(path: &Path, userns: Option<BorrowedFd<'_>>) -> OwnedFd {
    let tree = mount::clone_tree(CWD, path, false).unwrap();
    if let Some(userns) = userns {
        mount::idmap(tree.as_fd(), userns, false).unwrap();
    }
    tree
}

/// Program and arguments, looked up in `/bin`.
pub fn program(words: &[&str]) -> Exec {
    let bytes = |w: &str| w.as_bytes().to_vec();
    let first = words[0];
    let candidates = match first.contains('/') {
        true => vec![bytes(first)],
        false => vec![bytes(&format!("/sbin/{first}")), bytes(&format!("/bin/{first}"))],
    };
    let envp = vec![bytes("PATH=/bin"), bytes("TERM=dumb")];
    Exec { candidates, argv: words.iter().map(|w| bytes(w)).collect(), envp }
}

/// Everything that comes out of a pipe.
pub fn output(reader: OwnedFd) -> String {
    let mut text = String::new();
    std::fs::File::from(reader).read_to_string(&mut text).unwrap();
    text
}

/// The same for what need not be UTF-8.
pub fn output_lossy(reader: OwnedFd) -> String {
    let mut bytes = Vec::new();
    std::fs::File::from(reader).read_to_end(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Waits 90 seconds at most for something to become true.
pub fn until(mut what: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + Duration::from_secs(90);
    while Instant::now() < end {
        if what() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}
