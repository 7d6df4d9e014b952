//! Podman with directories of its own, as a peer.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::{Bench, ok};

/// Podman's directory of running containers. Podman limits the path to 50 bytes; the mount namespace is the
/// benchmark's.
const RUN: &str = "/run/bench-podman";

/// Podman's directory of images and containers, below that of a benchmark.
const ROOT: &str = "podman/root";

/// Removes all containers of podman in the directory of a benchmark, if it is used there.
pub(crate) fn remove_all(dir: &Path) {
    let podman = Podman { root: dir.join(ROOT) };
    if podman.root.exists() {
        let rm = ["rm", "--all", "--force", "--time", "0"];
        let _ = podman.command().args(rm).output(); // mostly none is left
    }
}

/// Podman with the image `bench`, and those that are imported.
#[derive(Debug, Clone)]
pub struct Podman {
    root: PathBuf,
}

impl Podman {
    /// Imports the benchmark's root file system.
    pub fn new(bench: &Bench) -> Result<Self> {
        fs::create_dir_all(RUN)?;
        ok(Command::new("mount").args(["-t", "tmpfs", "bench", RUN]))?;
        let podman = Self { root: bench.path(ROOT) };
        podman.import(bench, &bench.path("rootfs"), "bench")?;
        Ok(podman)
    }

    /// Imports a directory as an image.
    pub fn import(&self, bench: &Bench, dir: &Path, name: &str) -> Result<()> {
        let archive = bench.path("podman.tar");
        ok(Command::new("tar").arg("-C").arg(dir).arg("-cf").arg(&archive).arg("."))?;
        ok(self.command().arg("import").arg(&archive).arg(name))?;
        Ok(fs::remove_file(archive)?)
    }

    /// The command, without a verb.
    pub fn command(&self) -> Command {
        let mut command = Command::new("podman");
        // conmon(8) makes the file `oom` in its working directory.
        command.current_dir(RUN);
        command.arg("--root").arg(&self.root).args(["--runroot", RUN]);
        command.args(["--cgroup-manager", "cgroupfs", "--runtime", "runc"]);
        command
    }

    /// The start of a `run` without a network, with options before the image. Its default limits would
    /// exceed the hard limits of this process.
    pub fn run(&self) -> Command {
        let mut command = self.command();
        command.args(["run", "--network", "none", "--ulimit", "nofile=1024:1024"]);
        command.args(["--ulimit", "nproc=1000:1000"]);
        command
    }
}
