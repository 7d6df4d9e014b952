//! Directories of the engine.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The directories of one instance of Dormouse. Instances with different roots are independent:
/// they share the kernel and the table of host ids (`/var/lib/dormouse-ids`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    /// Persistent state: images, containers, names, ids.
    pub lib: PathBuf,
    /// State lost at a reboot: sockets, mounts, records of processes.
    pub run: PathBuf,
    /// Configuration.
    pub etc: PathBuf,
    /// Name of the cgroup above all containers of this instance.
    pub cgroup: String,
    root: Option<PathBuf>,
}

impl Places {
    /// `/var/lib/dormouse`, `/run/dormouse`, `/etc/dormouse`.
    pub fn system() -> Self {
        Self {
            lib: "/var/lib/dormouse".into(),
            run: "/run/dormouse".into(),
            etc: "/etc/dormouse".into(),
            cgroup: "dormouse".into(),
            root: None,
        }
    }

    /// `ROOT/lib`, `ROOT/run`, `ROOT/etc`; the cgroup is named after a hash of the root's path, so
    /// that two instances have different ones.
    pub fn below(root: &Path) -> Self {
        let hash = root.as_os_str().as_encoded_bytes().iter().fold(
            0xcbf2_9ce4_8422_2325_u64, // FNV-1a, 64 bit
            |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3),
        );
        Self {
            lib: root.join("lib"),
            run: root.join("run"),
            etc: root.join("etc"),
            cgroup: format!("dormouse-{hash:016x}"),
            root: Some(root.to_owned()),
        }
    }

    /// Returns the options that select the same directories in another invocation of this program.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        match &self.root {
            None => Vec::new(),
            Some(root) => vec!["--root".into(), root.clone().into_os_string()],
        }
    }

    /// The directory of `--root`, if the instance has one.
    pub(crate) fn root(&self) -> Option<&Path> {
        self.root.as_deref()
    }

    pub(crate) fn containers(&self) -> PathBuf {
        self.lib.join("containers")
    }

    pub(crate) fn pending(&self) -> PathBuf {
        self.lib.join("pending")
    }

    /// Parts of containers made ahead; see `spare.rs`.
    pub(crate) fn spares(&self) -> PathBuf {
        self.lib.join("spares")
    }

    /// Records of warm sleepers; see `warm.rs`. Made when it is first needed.
    pub(crate) fn warm(&self) -> PathBuf {
        self.run.join("warm")
    }

    /// Changes in progress that mean nothing after a boot. Made when it is first needed.
    pub(crate) fn changes(&self) -> PathBuf {
        self.run.join("pending")
    }

    pub(crate) fn names(&self) -> PathBuf {
        self.lib.join("names")
    }

    pub(crate) fn volumes(&self) -> PathBuf {
        self.lib.join("volumes")
    }

    pub(crate) fn running(&self) -> PathBuf {
        self.run.join("c")
    }

    /// The tmpfs file systems that containers share; see `shared.rs`.
    pub(crate) fn tmpfs(&self) -> PathBuf {
        self.run.join("tmpfs")
    }

    /// The bpffs of the program for sysinfo(2); see `sysinfo.rs`.
    pub(crate) fn sysinfo(&self) -> PathBuf {
        self.run.join("sysinfo")
    }

    /// The bpffs of the programs of the barrier; see `barrier.rs`.
    pub(crate) fn barrier(&self) -> PathBuf {
        self.run.join("barrier")
    }

    /// The tmpfs of views; see `view.rs`.
    pub(crate) fn views(&self) -> PathBuf {
        self.run.join("views")
    }

    /// The shared tmpfs of an earlier version.
    pub(crate) fn shared(&self) -> PathBuf {
        self.run.join("shared")
    }
}
