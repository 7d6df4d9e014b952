//! Scratch objects and results of probes.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::cgroup::{Cgroup, CgroupError, Hierarchy};

/// Directories for scratch files of probes.
#[derive(Debug, Clone)]
pub struct ProbePlaces {
    /// A directory on the file system that images and containers are kept on; made where it is
    /// missing. Idmapped mounts and overlay are probed there.
    pub store: PathBuf,
}

/// The observation, or why the feature does not work.
pub(super) type Probed = Result<String, Reason>;

/// A reason in words.
#[derive(Debug)]
pub(super) struct Reason(pub(super) String);

impl<E: std::error::Error> From<E> for Reason {
    fn from(error: E) -> Self {
        let cause = error.source().map_or(String::new(), |e| format!(": {e}"));
        Self(format!("{error}{cause}"))
    }
}

/// Fails with a reason.
pub(super) fn lack<T>(why: impl Into<String>) -> Result<T, Reason> {
    Err(Reason(why.into()))
}

/// Scratch objects of one run, removed on drop.
pub(super) struct Scratch {
    dir: PathBuf,
    cgroup: OnceLock<Result<(Hierarchy, Cgroup), String>>,
    pub(super) btf: OnceLock<Result<crate::btf::Btf, String>>,
}

impl Scratch {
    pub(super) fn new(places: &ProbePlaces) -> Self {
        Self { dir: places.store.join(Self::name()), cgroup: OnceLock::new(), btf: OnceLock::new() }
    }

    pub(super) fn name() -> String {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        format!("dormouse-probe-{}-{number}", std::process::id())
    }

    /// An empty directory of this name on the file system of the store.
    pub(super) fn directory(&self, name: &str) -> std::io::Result<PathBuf> {
        let dir = self.dir.join(name);
        match fs::remove_dir_all(&dir) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
            _ => fs::create_dir_all(&dir)?,
        }
        Ok(dir)
    }

    /// The nearest directory that exists on the file system of the store.
    pub(super) fn storage(&self) -> PathBuf {
        let exists = self.dir.ancestors().find(|dir| dir.exists());
        exists.unwrap_or(Path::new("/")).to_owned()
    }

    /// A cgroup without limits below a parent of its own.
    pub(super) fn cgroup(&self) -> Result<&(Hierarchy, Cgroup), Reason> {
        let make = || -> Result<_, CgroupError> {
            let hierarchy = Hierarchy::open(&Self::name())?;
            let made = hierarchy.create("probe", &dormouse_model::Limits::default());
            match made {
                Ok(cgroup) => Ok((hierarchy, cgroup)),
                Err(e) => {
                    let _ = hierarchy.remove_parent();
                    Err(e)
                }
            }
        };
        let made = self.cgroup.get_or_init(|| make().map_err(|e| Reason::from(e).0));
        made.as_ref().map_err(|why| Reason(why.clone()))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A failure cannot be handled here, and no object in use is in them.
        let _ = fs::remove_dir_all(&self.dir);
        if let Some(Ok((hierarchy, cgroup))) = self.cgroup.get() {
            let _ = cgroup.kill();
            let _ = cgroup.remove();
            let _ = hierarchy.remove_parent();
        }
    }
}

/// A descriptor of a directory.
pub(super) fn open_dir(path: &Path) -> crate::error::Result<std::os::fd::OwnedFd> {
    use crate::error::Explain;
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).explain("open", || format!("{path:?}"))
}
