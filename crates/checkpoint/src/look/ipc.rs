//! IPC namespaces: entering one, and its tables of objects.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use dormouse_kernel::call::Namespace;
use dormouse_kernel::{mqueue, namespace, pidfd};
use dormouse_record::{Error, Result};
use rustix::io::Errno;

/// Calls `act` in an IPC namespace ([`namespace::visit`]).
pub(crate) fn inside<T: Send>(
    ipc: &OwnedFd,
    act: impl FnOnce() -> std::result::Result<T, Errno> + Send,
) -> std::result::Result<T, Errno> {
    namespace::visit(ipc.as_fd(), Namespace::Ipc, act)?
}

/// The tables of an IPC namespace, and the directory of its POSIX message queues. Open tables stay
/// those of the namespace in which they were opened, and can be read again.
#[derive(Debug)]
pub(crate) struct Tables {
    namespace: OwnedFd,
    files: [File; TABLES.len()],
    queues: OwnedFd,
}

const TABLES: [&str; 3] = ["shm", "sem", "msg"];

impl Tables {
    /// Opens the tables of a process; `handle` is its pidfd.
    pub(crate) fn open(pid: u32, handle: &OwnedFd) -> Result<Self> {
        let namespace = pidfd::namespace(handle, Namespace::Ipc);
        let namespace = namespace.map_err(|e| Error::Elsewhere(e.to_string()))?;
        let files = inside(&namespace, || {
            let [memory, semaphores, queues] =
                TABLES.map(|name| File::open(format!("/proc/sysvipc/{name}")).map_err(errno));
            Ok(([memory?, semaphores?, queues?], mqueue::directory()?))
        });
        let (files, queues) =
            files.map_err(Error::of("open the tables of its ipc namespace", pid))?;
        Ok(Self { namespace, files, queues })
    }

    /// The namespace of the tables.
    pub(crate) fn namespace(&self) -> &OwnedFd {
        &self.namespace
    }

    /// The directory of the POSIX message queues.
    pub(crate) fn queues(&self) -> &OwnedFd {
        &self.queues
    }

    /// Whether there is any object now: an empty table has one line, the heading.
    pub(crate) fn has_rows(&self) -> std::result::Result<bool, Errno> {
        let mut start = [0; 1024]; // the longest heading has some 200 bytes
        let has = |file: &File| {
            let read = file.read_at(&mut start, 0).map_err(errno)?;
            let lines = start[..read].split(|byte| *byte == b'\n');
            Ok(lines.filter(|line| !line.is_empty()).count() > 1)
        };
        let all: std::result::Result<Vec<bool>, Errno> = self.files.iter().map(has).collect();
        Ok(all?.contains(&true))
    }
}

/// The number of an error of reading a table.
pub(crate) fn errno(e: std::io::Error) -> Errno {
    e.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}
