//! Kernel parameters (proc_sys(5)), by name.
//!
//! Only those that belong to a namespace of the container are settable from a container's
//! configuration; [`owner`] says which namespace that is.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{Mode, OFlags};

use crate::call::Namespace;
use crate::error::{CallError, Explain, Result};
use crate::resolve;

/// LIMIT: longest value, in bytes; the kernel takes less than a page.
const VALUE_MAX: usize = 4096;

/// The namespace that a parameter belongs to; `None` when it is the whole host's, or unknown.
///
/// Names are written with dots or slashes: `net.ipv4.ip_forward`, `net/ipv4/ip_forward`.
pub fn owner(name: &str) -> Option<Namespace> {
    let path = path(name)?;
    const IPC: [&str; 11] = [
        "kernel/auto_msgmni",
        "kernel/msgmax",
        "kernel/msgmnb",
        "kernel/msgmni",
        "kernel/msg_next_id",
        "kernel/sem",
        "kernel/sem_next_id",
        "kernel/shmall",
        "kernel/shmmax",
        "kernel/shmmni",
        "kernel/shm_next_id",
    ];
    match path.as_str() {
        "kernel/hostname" | "kernel/domainname" => Some(Namespace::Uts),
        "kernel/shm_rmid_forced" => Some(Namespace::Ipc),
        _ if IPC.contains(&path.as_str()) || path.starts_with("fs/mqueue/") => Some(Namespace::Ipc),
        _ if path.starts_with("net/") => Some(Namespace::Net),
        _ => None,
    }
}

/// The path below `/proc/sys`; `None` when the name is not that of a parameter.
///
/// A name with a slash is a path already: there a dot is part of a name, as in
/// `net/ipv4/conf/eth0.1/forwarding`.
pub fn path(name: &str) -> Option<String> {
    let path = if name.contains('/') { name.to_owned() } else { name.replace('.', "/") };
    let good = |part: &str| {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.@:".contains(&byte);
        !part.is_empty() && part != "." && part != ".." && part.bytes().all(known)
    };
    (path.contains('/') && path.split('/').all(good)).then_some(path)
}

/// Writes a parameter below `proc`, which is the root of a procfs.
///
/// EINVAL for a name or value that could mean more than one setting, and what the kernel says.
pub fn set(proc: BorrowedFd<'_>, name: &str, value: &str) -> Result<()> {
    let refuse = |why| CallError::new("sysctl", format!("{name:?}, {value:?}"), why);
    let path = path(name).ok_or_else(|| refuse(libc::EINVAL))?;
    if value.len() > VALUE_MAX || value.bytes().any(|byte| byte == b'\n' || byte == 0) {
        return Err(refuse(libc::EINVAL));
    }
    let flags = OFlags::WRONLY | OFlags::NOFOLLOW;
    let file = resolve::in_root(proc, format!("sys/{path}"), flags, Mode::empty())?;
    if !resolve::is_on(&file, resolve::PROC_SUPER_MAGIC)? {
        return Err(refuse(libc::EXDEV));
    }
    // ORDER: one write, as the kernel takes each write for a whole value.
    let written = rustix::io::write(file.as_fd(), value.as_bytes())
        .explain("sysctl", || format!("{name:?}, {value:?}"))?;
    if written == value.len() { Ok(()) } else { Err(refuse(libc::EIO)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_of_the_host_has_no_owner() {
        assert_eq!(owner("kernel.core_pattern"), None);
        assert_eq!(owner("vm.swappiness"), None);
        assert_eq!(owner("kernel.shmmax"), Some(Namespace::Ipc));
        assert_eq!(owner("fs.mqueue.msg_max"), Some(Namespace::Ipc));
        assert_eq!(owner("net.ipv4.ip_forward"), Some(Namespace::Net));
        assert_eq!(owner("net/ipv4/conf/eth0.1/forwarding"), Some(Namespace::Net));
    }

    #[test]
    fn name_cannot_leave_its_tree() {
        for name in ["net/../kernel/core_pattern", "net..x", "", "net", "net/", "/net/x", "net.a b"]
        {
            assert_eq!(path(name), None, "{name}");
        }
    }

    #[test]
    fn value_cannot_carry_a_second_setting() {
        let proc = std::fs::File::open("/proc").unwrap();
        let error = set(proc.as_fd(), "kernel.hostname", "a\nb").unwrap_err();
        assert_eq!(error.errno(), libc::EINVAL);
    }

    #[test]
    fn root_parameter_of_the_own_namespace_is_set() {
        let name = std::thread::spawn(|| {
            crate::process::unshare(crate::call::CloneFlags::NEWUTS).unwrap();
            let proc = std::fs::File::open("/proc").unwrap();
            set(proc.as_fd(), "kernel.hostname", "dormouse-test").unwrap();
            let error = set(proc.as_fd(), "kernel.no_such", "1").unwrap_err();
            assert_eq!(error.kind(), crate::ErrorKind::NotFound);
            rustix::system::uname().nodename().to_owned()
        })
        .join()
        .unwrap();
        assert_eq!(name.as_c_str(), c"dormouse-test");
        assert_ne!(rustix::system::uname().nodename(), c"dormouse-test");
    }

    #[test]
    fn file_that_only_looks_like_a_parameter_is_not_written() {
        let fake = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(fake.path().join("sys/kernel")).unwrap();
        std::fs::write(fake.path().join("sys/kernel/hostname"), "before").unwrap();
        let root = std::fs::File::open(fake.path()).unwrap();
        let error = set(root.as_fd(), "kernel.hostname", "after").unwrap_err();
        assert_eq!(error.errno(), libc::EXDEV);
        let text = std::fs::read_to_string(fake.path().join("sys/kernel/hostname")).unwrap();
        assert_eq!(text, "before");
    }
}
