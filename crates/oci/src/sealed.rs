//! Protects this program's file from writing through `/proc/PID/exe` (CVE-2019-5736).
//!
//! Until execve a process of the container is a copy of this program, and `/proc/PID/exe` leads to
//! the file. Container root that is the host's root could overwrite it. With a user namespace that
//! does not map the host's root this is impossible. For the other containers the program executes
//! itself once more from a read-only detached mount of its file. The kernel refuses writing through
//! that mount (EROFS) to every process. After this process has closed the mount, no process can
//! change its attributes any more. Costs an execve and three calls, and no copy of the program.

use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use dormouse_kernel::mount::{self, MountAttr};
use dormouse_kernel::weakened;
use rustix::fs::{CWD, Mode, OFlags, StatVfsMountFlags};

use crate::error::{Error, Result};

/// Marks the second execution, so that a host on which sealing fails causes no endless loop.
const TRIED: &str = "_DORMOUSE_OCI_SEALED";

/// Makes this program run from a read-only mount. Returns when it does.
pub(crate) fn ensure() -> Result<()> {
    if weakened("sealed-program") || is_read_only()? {
        return Ok(());
    }
    if std::env::var_os(TRIED).is_some() {
        return Err(Error::Usage("this program's file cannot be made read-only".into()));
    }
    let failed = Error::call("seal this program");
    let sealed = mount::clone_tree(CWD, "/proc/self/exe", false).and_then(|tree| {
        let attr = MountAttr::RDONLY | MountAttr::NOSUID | MountAttr::NODEV;
        mount::set_attr(tree.as_fd(), false, attr, MountAttr::empty())?;
        Ok(tree)
    });
    let sealed = sealed.map_err(failed)?;
    let mut words = std::env::args_os();
    let name = words.next().unwrap_or_default();
    let mut command = Command::new(format!("/proc/self/fd/{}", sealed.as_raw_fd()));
    command.arg0(name).args(words).env(TRIED, "1");
    Err(Error::file("execute", "this program again")(command.exec()))
}

fn is_read_only() -> Result<bool> {
    let program = rustix::fs::open("/proc/self/exe", OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let flags = program.and_then(rustix::fs::fstatvfs).map(|stat| stat.f_flag);
    let flags = flags.map_err(|e| Error::file("look at", "this program")(e.into()))?;
    Ok(flags.contains(StatVfsMountFlags::RDONLY))
}
