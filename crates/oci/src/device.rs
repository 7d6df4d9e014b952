//! Device nodes and the links of `/dev`.
//!
//! | `/dev` is | nodes are |
//! |---|---|
//! | a tmpfs that this process fills (read-only, `tmpcopyup`) | made before attaching, past links |
//! | anything else | made by the newborn beneath its root, through no link (CVE-2026-41579) |
//! | the same in a user namespace, where a new node cannot be opened | binds of the host's own |
//! | a bind | not made, except those outside of it that `linux.devices` names |

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use dormouse_kernel::mount::MountAttr;
use dormouse_kernel::{mount, resolve};
use dormouse_launch::{Node, Plan, TargetKind};
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, Uid};
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::identity::Ids;
use crate::mount::Dev;
use crate::spec::Device;

/// Devices of every container, unless its configuration has another at the same path.
const DEFAULT: [(&str, u32, u32); 6] = [
    ("/dev/null", 1, 3),
    ("/dev/zero", 1, 5),
    ("/dev/full", 1, 7),
    ("/dev/random", 1, 8),
    ("/dev/urandom", 1, 9),
    ("/dev/tty", 5, 0),
];
const LINKS: [(&str, &str); 5] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

/// Returns the paths of a configuration's devices.
pub(crate) fn paths(devices: &[Device]) -> Vec<String> {
    let named = devices.iter().map(|device| device.path.clone());
    named.chain(DEFAULT.iter().map(|(path, ..)| (*path).to_owned())).collect()
}

/// Adds the devices of a configuration to the plan, or to the `/dev` that was made for it.
pub(crate) fn plan(
    plan: &mut Plan,
    devices: &[Device],
    dev: &Dev,
    ids: &Ids,
    has_userns: bool,
) -> Result<()> {
    let mut all = Vec::new();
    for (at, device) in devices.iter().enumerate() {
        let path = device.path.trim_end_matches('/').to_owned();
        all.push((format!("linux.devices[{at}]"), path, node(at, device)?));
    }
    for (path, major, minor) in DEFAULT {
        if !all.iter().any(|(_, known, _)| known == path) {
            let device = rustix::fs::makedev(major, minor);
            let mode = FileType::CharacterDevice.as_raw_mode() | 0o666;
            let node = Node { mode, device, uid: 0, gid: 0 };
            all.push((path.to_owned(), path.to_owned(), node));
        }
    }
    // This path is the link to the container's own terminals, even if the host's is listed.
    all.retain(|(_, path, _)| path != "/dev/ptmx");
    match dev {
        Dev::Bound => {
            // The caller is responsible for the contents of a bound `/dev`; devices elsewhere are
            // made.
            all.retain(|(field, ..)| field.starts_with("linux."));
            all.retain(|(_, path, _)| !path.starts_with("/dev/"));
        }
        Dev::Made(tree, _) => {
            for (name, target) in LINKS {
                link(tree.as_fd(), name, target)?;
            }
            if Path::new("/proc/kcore").exists() {
                link(tree.as_fd(), "core", "/proc/kcore")?;
            }
            // The terminal is bound there later: a read-only `/dev` permits no new file then.
            let flags = rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY;
            let mode = Mode::from_raw_mode(0o600);
            let _ = rustix::fs::openat(tree, "console", flags | rustix::fs::OFlags::CLOEXEC, mode);
        }
        Dev::Root => {
            for (name, target) in LINKS {
                plan.symlink(target, &format!("/dev/{name}"));
            }
        }
    }
    for (field, path, node) in all {
        match (dev, path.strip_prefix("/dev/")) {
            (Dev::Made(tree, _), Some(name)) => {
                make(tree.as_fd(), name, &node, ids)
                    .map_err(|e| Error::field(field, format!("{path}: {e}")))?;
            }
            _ if has_userns => {
                let fd = plan.fd(bind(&field, &path, &node)?);
                plan.attach(fd, &path, TargetKind::File, true);
            }
            _ => plan.device(&path, &node),
        }
    }
    if let Dev::Made(tree, attr) = dev {
        mount::set_attr(tree.as_fd(), false, *attr, MountAttr::empty())
            .map_err(Error::call("make /dev read-only"))?;
    }
    Ok(())
}

/// Checks a device of the configuration.
fn node(at: usize, device: &Device) -> Result<Node> {
    let field = |name: &str| format!("linux.devices[{at}].{name}");
    let kind = match device.kind.as_str() {
        "c" | "u" => FileType::CharacterDevice,
        "b" => FileType::BlockDevice,
        "p" => FileType::Fifo,
        other => return Err(Error::field(field("type"), format!("{other:?} is none of c b u p"))),
    };
    let path = &device.path;
    if path.trim_end_matches('/').is_empty() {
        return Err(Error::field(field("path"), "it names no file"));
    }
    if !path.starts_with('/') || path.split('/').any(|p| p == "..") || path.contains('\0') {
        return Err(Error::field(field("path"), "it is not an absolute path without '..'"));
    }
    let number = |name: &str, value: i64| match u32::try_from(value) {
        Ok(number) => Ok(number),
        Err(_) if kind == FileType::Fifo => Ok(0),
        Err(_) => Err(Error::field(field(name), format!("{value} is no device number"))),
    };
    let (major, minor) = (number("major", device.major)?, number("minor", device.minor)?);
    let mode = kind.as_raw_mode() | (device.file_mode.unwrap_or(0o666) & 0o7777);
    let device_number = if kind == FileType::Fifo { 0 } else { rustix::fs::makedev(major, minor) };
    let (uid, gid) = (device.uid.unwrap_or(0), device.gid.unwrap_or(0));
    Ok(Node { mode, device: device_number, uid, gid })
}

fn link(tree: BorrowedFd<'_>, name: &str, target: &str) -> Result<()> {
    match rustix::fs::symlinkat(target, tree, name) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(e) => Err(Error::file("make link", format!("/dev/{name}"))(e.into())),
    }
}

/// Makes a node in a tree that no other process has.
fn make(
    tree: BorrowedFd<'_>,
    name: &str,
    node: &Node,
    ids: &Ids,
) -> std::result::Result<(), String> {
    let told = |e: Errno| e.to_string();
    let (parent, name) = match name.rsplit_once('/') {
        None => (None, name),
        Some((above, name)) => {
            let mode = Mode::from_raw_mode(0o755);
            let dir = resolve::create_directories(tree, above, mode).map_err(|e| e.to_string())?;
            (Some(dir), name)
        }
    };
    let parent = parent.as_ref().map_or(tree, |dir: &OwnedFd| dir.as_fd());
    let (kind, mode) =
        (FileType::from_raw_mode(node.mode), Mode::from_raw_mode(node.mode & 0o7777));
    match rustix::fs::mknodat(parent, name, kind, mode, node.device) {
        Err(Errno::EXIST) if name == "console" => {
            rustix::fs::unlinkat(parent, name, AtFlags::empty()).map_err(told)?;
            rustix::fs::mknodat(parent, name, kind, mode, node.device).map_err(told)?;
        }
        other => other.map_err(told)?,
    }
    // Despite the umask.
    rustix::fs::chmodat(parent, name, mode, AtFlags::empty()).map_err(told)?;
    let uid = ids.host_uid(node.uid).ok_or("its uid is no id of the container")?;
    let gid = ids.host_gid(node.gid).ok_or("its gid is no id of the container")?;
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    rustix::fs::chownat(parent, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW).map_err(told)
}

/// Makes a detached bind of the host's node, which must be the requested device.
fn bind(field: &str, path: &str, node: &Node) -> Result<OwnedFd> {
    let tree = mount::clone_tree(CWD, path, false)
        .map_err(|e| Error::field(field, format!("{path}: {e}")))?;
    let is = rustix::fs::fstat(&tree)
        .is_ok_and(|s| s.st_rdev == node.device && s.st_mode & 0o170_000 == node.mode & 0o170_000);
    if is { Ok(tree) } else { Err(Error::field(field, format!("{path} is another device here"))) }
}

/// Makes a detached read-only bind of the host's `/dev/null`, to hide files (CVE-2025-31133).
pub(crate) fn null() -> Result<OwnedFd> {
    let mode = FileType::CharacterDevice.as_raw_mode();
    let node = Node { mode, device: rustix::fs::makedev(1, 3), uid: 0, gid: 0 };
    let tree = bind("linux.maskedPaths", "/dev/null", &node)?;
    let attr = MountAttr::RDONLY | MountAttr::NOSUID | MountAttr::NOEXEC;
    mount::set_attr(tree.as_fd(), false, attr, MountAttr::empty())
        .map_err(Error::call("make the mask for files read-only"))?;
    Ok(tree)
}
