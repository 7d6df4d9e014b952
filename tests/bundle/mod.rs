//! Bundles and the OCI program of one test, on a private host.

#![allow(dead_code)] // each test file uses a part

use std::fs;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use dormouse_testkit::{Host, Output, image, program, run, weak_dormouse};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::{Value, json};

/// The time limit of a command.
const LIMIT: Duration = Duration::from_secs(60);

/// The program with a private root directory.
pub struct Oci {
    host: Host,
    program: PathBuf,
    weakened: Option<&'static str>,
}

impl Oci {
    /// The program as shipped.
    pub fn new() -> Self {
        Self { host: Host::new(), program: program("dormouse-oci"), weakened: None }
    }

    /// A build without one protection, where the control arms are built.
    pub fn without(protection: &'static str) -> Option<Self> {
        let program = weak_dormouse()?.with_file_name("dormouse-oci");
        Some(Self { host: Host::new(), program, weakened: Some(protection) })
    }

    /// Runs the control arm of an attack where the control arms are built.
    pub fn control(protection: &'static str, arm: impl FnOnce(&Self)) {
        if let Some(weak) = Self::without(protection) {
            arm(&weak);
        }
    }

    /// Another runtime, for a comparison.
    pub fn with_program(program: &Path) -> Self {
        Self { host: Host::new(), program: program.to_owned(), weakened: None }
    }

    /// The omitted protection.
    pub fn weakened(&self) -> Option<&'static str> {
        self.weakened
    }

    pub fn host(&self) -> &Host {
        &self.host
    }

    pub fn program(&self) -> &Path {
        &self.program
    }

    pub fn root(&self) -> PathBuf {
        self.host.dir().join("oci")
    }

    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = self.host.command(&self.program);
        command.arg("--root").arg(self.root()).args(words);
        if let Some(protection) = self.weakened {
            command.env("DORMOUSE_WEAKEN", protection);
        }
        command
    }

    /// Runs the program. A process left by `create` and `-d` keeps the standard streams, which are
    /// files then.
    #[track_caller]
    pub fn run(&self, words: &[&str]) -> Output {
        if words[0] != "create" && !words.contains(&"-d") {
            return run(self.command(words), b"", LIMIT);
        }
        let file = self.host.dir().join("output");
        let mut script = self.host.command("sh");
        script.args(["-c", "file=$1; shift; exec \"$@\" > $file 2>&1", "sh"]).arg(&file);
        let command = self.command(words);
        script.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            script.env(name, value.expect("a value"));
        }
        let mut out = run(script, b"", LIMIT);
        out.stderr = fs::read_to_string(file).expect("written");
        out
    }

    #[track_caller]
    pub fn sh(&self, script: &str) -> Output {
        self.host.sh(script)
    }

    #[track_caller]
    pub fn state(&self, id: &str) -> Value {
        serde_json::from_str(&self.run(&["state", id]).ok()).expect("JSON")
    }

    #[track_caller]
    pub fn status(&self, id: &str) -> String {
        self.state(id)["status"].as_str().expect("a word").to_owned()
    }

    /// Reads a file of a container's cgroup, in v1 or in v2.
    #[track_caller]
    pub fn cgroup(&self, id: &str, controller: &str, v1: &str, v2: &str) -> String {
        let pid = &self.state(id)["pid"];
        let table = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("a live process");
        let path = |own: &str| {
            let line = table.lines().map(|line| line.splitn(3, ':').collect::<Vec<_>>());
            line.filter(|l| l[1].split(',').any(|w| w == own)).map(|l| l[2].to_owned()).next()
        };
        let below = Path::new("/sys/fs/cgroup");
        let v1 = path(controller)
            .map(|path| below.join(controller).join(&path[1..]).join(v1))
            .filter(|file| file.exists());
        let file = v1.unwrap_or_else(|| below.join(&path("").expect("v2")[1..]).join(v2));
        fs::read_to_string(&file)
            .unwrap_or_else(|e| panic!("{}: {e}", file.display()))
            .trim()
            .into()
    }

    /// Asserts that no state, cgroup or process of any container is left.
    #[track_caller]
    pub fn assert_nothing_left(&self) {
        let left = self.left();
        assert!(left.is_empty(), "left behind: {left:?}");
    }

    /// State, cgroups and processes of containers.
    pub fn left(&self) -> Vec<String> {
        let root = self.root();
        let mut left: Vec<String> = Vec::new();
        for dir in [root.clone(), root.join(".creating")] {
            let names = fs::read_dir(dir).into_iter().flatten().flatten();
            let names = names.map(|e| e.file_name().into_string().expect("UTF-8"));
            // What is kept for the next command, and what a killed one has written of it.
            let kept = [".creating", ".mounts", ".mounts.new"];
            left.extend(names.filter(|name| !kept.contains(&name.as_str())));
        }
        let own = self.cgroup_name();
        let below = |dir: &Path| fs::read_dir(dir).into_iter().flatten().flatten();
        let top = Path::new("/sys/fs/cgroup");
        let hierarchies = below(top).map(|entry| entry.path()).filter(|path| path.is_dir());
        for parent in std::iter::once(top.to_owned()).chain(hierarchies) {
            let below = below(&parent);
            let ours = below.filter(|e| e.file_name().to_string_lossy().starts_with(&own));
            left.extend(ours.map(|e| e.path().display().to_string()));
        }
        left.extend(self.host.processes().into_iter().map(|(pid, line)| format!("{pid} {line}")));
        left
    }

    /// The name prefix of this test's cgroups.
    fn cgroup_name(&self) -> String {
        let name = self.host.dir().file_name().expect("a name").to_string_lossy().into_owned();
        format!("oci-{}", name.trim_start_matches('.'))
    }
}

/// A directory with a configuration and a root filesystem.
pub struct Bundle {
    dir: PathBuf,
}

impl Bundle {
    /// A bundle with the configuration that `spec` writes, this command, no terminal, a writable
    /// root with busybox, a cgroup of this test and a cgroup namespace.
    pub fn new(oci: &Oci, args: &[&str]) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = oci.host.dir().join(format!("bundle-{number}"));
        fs::create_dir(&dir).expect("made");
        let bundle = Self { dir };
        let image = image::busybox_with_attack();
        oci.sh(&format!("cp -a {} {}", image.display(), bundle.rootfs().display())).ok();
        fs::create_dir(bundle.path("out")).expect("made");
        oci.run(&["spec", "-b", bundle.dir()]).ok();
        bundle.edit(|c| {
            c["process"]["terminal"] = false.into();
            c["process"]["args"] = json!(args);
            c["root"]["readonly"] = false.into();
            let list = c["linux"]["namespaces"].as_array_mut().expect("a list");
            list.retain(|namespace| namespace["type"] != "cgroup");
            list.push(json!({"type": "cgroup"}));
            c["linux"]["cgroupsPath"] = format!("/{}/{number}", oci.cgroup_name()).into();
        });
        bundle
    }

    pub fn dir(&self) -> &str {
        self.dir.to_str().expect("UTF-8")
    }

    pub fn path(&self, name: &str) -> String {
        self.dir.join(name).to_str().expect("UTF-8").to_owned()
    }

    pub fn rootfs(&self) -> PathBuf {
        self.dir.join("rootfs")
    }

    /// A file of the volume that [`Bundle::volume`] mounts.
    pub fn out(&self, name: &str) -> PathBuf {
        self.dir.join("out").join(name)
    }

    pub fn read(&self) -> Value {
        let text = fs::read(self.path("config.json")).expect("read");
        serde_json::from_slice(&text).expect("JSON")
    }

    pub fn write(&self, config: &Value) {
        fs::write(self.path("config.json"), config.to_string()).expect("written");
    }

    pub fn edit(&self, edit: impl FnOnce(&mut Value)) {
        let mut config = self.read();
        edit(&mut config);
        self.write(&config);
    }

    /// Mounts the directory `out` of the bundle somewhere.
    pub fn volume(&self, config: &mut Value, place: &str) {
        let mount = json!({"destination": place, "type": "bind", "source": self.path("out"),
                           "options": ["bind"]});
        config["mounts"].as_array_mut().expect("a list").push(mount);
    }
}

/// Receives a descriptor.
pub fn receive(stream: &UnixStream) -> OwnedFd {
    receive_with(stream).0
}

/// Receives a descriptor and the bytes beside it.
pub fn receive_with(stream: &UnixStream) -> (OwnedFd, Vec<u8>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 4096];
    let mut iov = [IoSliceMut::new(&mut bytes)];
    let message = recvmsg(stream, &mut iov, &mut control, RecvFlags::CMSG_CLOEXEC);
    let length = message.expect("received").bytes;
    let fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let fd = fds.into_iter().next().expect("a descriptor");
    (fd, bytes[..length].to_vec())
}
