//! Whether a path leads through a link of procfs to what a process has: `/proc/PID/fd/5`, `/proc/PID/exe`.
//!
//! Such a link leads to an open file, whatever its name is and wherever it was opened (proc(5)). While a
//! container is restored its first process has files of the host open. The kernel refuses these links as
//! well, when a path is opened (`load/file.rs` of crate `checkpoint`). Here a path that names one is refused
//! by its name.

use super::Found;
use crate::{MountSource, Thing, UnixSocket};

/// Refuses a path through such a link.
pub(super) fn leads_into(path: &str, name: &str) -> Found {
    refuse(path, name, false)
}

/// The same; what is opened may be such a link itself, which nothing follows.
fn refuse(path: &str, name: &str, is_link: bool) -> Found {
    let parts = path.split('/').filter(|part| !part.is_empty() && *part != ".");
    let mut parts: Vec<&str> = parts.collect();
    if is_link {
        parts.pop();
    }
    let rest = match parts[..] {
        ["proc", _, "task", _, ref rest @ ..] | ["proc", _, ref rest @ ..] => rest,
        _ => return Ok(()),
    };
    let leads = match rest {
        ["cwd" | "root" | "exe", ..] => true,
        ["fd" | "ns" | "map_files", more @ ..] => !more.is_empty(),
        _ => false,
    };
    match leads {
        true => Err(format!(
            "{name} '{}' leads through a link of procfs to what a process has, which is not saved",
            path.escape_debug()
        )),
        false => Ok(()),
    }
}

/// All paths of an object.
pub fn of_thing(thing: &Thing) -> Found {
    let plain = |path: &str| leads_into(path, "its path");
    match thing {
        Thing::File(file) => {
            let is_link = file.file_type == libc::S_IFLNK && file.flags & libc::O_PATH as u32 != 0;
            refuse(&file.path, "its path", is_link)
        }
        Thing::ProcessFile(file) => plain(&file.whole_path()),
        Thing::Deleted(deleted) => leads_into(&deleted.place, "its place"),
        Thing::Pipe(pipe) => pipe.path.as_deref().map_or(Ok(()), plain),
        Thing::Inotify(inotify) => {
            inotify.watches.iter().try_for_each(|watch| leads_into(&watch.path, "a watch"))
        }
        Thing::Fanotify(fanotify) => {
            fanotify.marks.iter().try_for_each(|mark| leads_into(&mark.path, "a mark"))
        }
        Thing::UnixSocket(socket) => of_socket(socket),
        Thing::Mounts(mounts) => mounts.mounts.iter().try_for_each(|mount| {
            if let MountSource::Container { path } = &mount.source {
                leads_into(path, "a mount of")?;
            }
            match mounts.own {
                true => leads_into(&mount.place, "a mount at"),
                false => Ok(()),
            }
        }),
        _ => Ok(()),
    }
}

fn of_socket(socket: &UnixSocket) -> Found {
    let Some(name) = &socket.name else { return Ok(()) };
    if let Some(directory) = &name.directory {
        leads_into(directory, "its directory")?;
    }
    name.path().map_or(Ok(()), |path| leads_into(path, "its name"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_through_links_of_procfs_are_refused() {
        for path in [
            "/proc/self/fd/5",
            "/proc/1/fd/5/x",
            "//proc/./self/exe",
            "/proc/thread-self/cwd",
            "/proc/7/task/8/root/etc/passwd",
            "/proc/7/map_files/1000-2000",
            "/proc/self/ns/net",
        ] {
            let said = refuse(path, "its path", false);
            assert!(said.is_err_and(|said| said.contains(path)), "{path}");
        }
        for path in [
            "/",
            "/proc",
            "/proc/1/status",
            "/proc/self/fd",
            "/proc/1/task/1/comm",
            "/proc/sys/kernel/ns_last_pid",
            "/srv/proc/self/fd/5",
            "/data/fd/5",
        ] {
            assert_eq!(refuse(path, "its path", false), Ok(()), "{path}");
        }
        assert_eq!(refuse("/proc/1/exe", "its path", true), Ok(()), "the link itself");
        assert!(refuse("/proc/1/cwd/x", "its path", true).is_err());
    }
}
