//! The root filesystem that containerd describes: mounted on `BUNDLE/rootfs`, unmounted at the end.

use std::ffi::CString;
use std::path::Path;

use anyhow::{Context, Result};
use containerd_shim_protos::api;
use dormouse_kernel::mount::{FsContext, MountAttr, attach};
use rustix::fs::CWD;
use rustix::mount::{MountFlags, UnmountFlags};

/// LIMIT: bytes of options that mount(2) takes: a page with its NUL.
const DATA_MAX: usize = 4095;

/// Words of mount(8) that are flags: the others are the filesystem's.
const FLAGS: [(&str, MountFlags); 8] = [
    ("ro", MountFlags::RDONLY),
    ("nosuid", MountFlags::NOSUID),
    ("nodev", MountFlags::NODEV),
    ("noexec", MountFlags::NOEXEC),
    ("noatime", MountFlags::NOATIME),
    ("nodiratime", MountFlags::NODIRATIME),
    ("relatime", MountFlags::RELATIME),
    ("sync", MountFlags::SYNCHRONOUS),
];

/// Mounts a list of filesystems, one on the other.
pub fn mount(place: &Path, mounts: &[api::Mount]) -> Result<()> {
    if mounts.is_empty() {
        return Ok(());
    }
    match std::fs::create_dir(place) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(e).with_context(|| format!("making {}", place.display()));
        }
        _ => {}
    }
    let mounted = mounts.iter().try_for_each(|one| {
        let what = || format!("mounting {} {} on {}", one.type_, one.source, place.display());
        mount_one(&place.join(one.target.trim_start_matches('/')), one).with_context(what)
    });
    if mounted.is_err() {
        let _ = unmount(place); // the first error is the one to return
    }
    mounted
}

fn mount_one(place: &Path, one: &api::Mount) -> Result<()> {
    let (flags, data) = options(&one.options);
    if one.type_ == "bind" || one.options.iter().any(|word| word == "bind" || word == "rbind") {
        let bind =
            MountFlags::BIND | if recursive(one) { MountFlags::REC } else { MountFlags::empty() };
        rustix::mount::mount(one.source.as_str(), place, "none", bind, None)?;
        if !flags.is_empty() {
            // The flags of a bind mount are set in a second call.
            rustix::mount::mount_remount(place, MountFlags::BIND | flags, c"")?;
        }
        return Ok(());
    }
    let text = data.join(",");
    if text.len() > DATA_MAX {
        return overlay(place, one, flags, &data);
    }
    let text = CString::new(text)?;
    rustix::mount::mount(one.source.as_str(), place, one.type_.as_str(), flags, text.as_c_str())?;
    Ok(())
}

fn recursive(one: &api::Mount) -> bool {
    one.options.iter().any(|word| word == "rbind")
}

fn options(words: &[String]) -> (MountFlags, Vec<&str>) {
    let mut flags = MountFlags::empty();
    let mut data = Vec::new();
    for word in words {
        match FLAGS.iter().find(|(name, _)| name == word) {
            Some((_, flag)) => flags |= *flag,
            None if ["rw", "bind", "rbind", "defaults"].contains(&word.as_str()) => {}
            None => data.push(word.as_str()),
        }
    }
    (flags, data)
}

/// An overlay of more layers than mount(2) takes the names of. KERNEL(6.8): a layer in each call.
fn overlay(place: &Path, one: &api::Mount, flags: MountFlags, data: &[&str]) -> Result<()> {
    let filesystem = FsContext::open(&one.type_)?;
    filesystem.set_string("source", &one.source)?;
    for word in data {
        match word.split_once('=') {
            Some(("lowerdir", layers)) => {
                for layer in layers.split(':') {
                    filesystem
                        .set_string("lowerdir+", layer)
                        .context("so many layers need Linux 6.8")?;
                }
            }
            Some((key, value)) => filesystem.set_string(key, value)?,
            None => filesystem.set_flag(word)?,
        }
    }
    let mut attr = MountAttr::empty();
    attr.set(MountAttr::RDONLY, flags.contains(MountFlags::RDONLY));
    attr.set(MountAttr::NOSUID, flags.contains(MountFlags::NOSUID));
    attr.set(MountAttr::NODEV, flags.contains(MountFlags::NODEV));
    let mount = filesystem.create(attr)?;
    attach(std::os::fd::AsFd::as_fd(&mount), CWD, place)?;
    Ok(())
}

/// Takes off all that is mounted there.
pub fn unmount(place: &Path) -> Result<()> {
    loop {
        match rustix::mount::unmount(place, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            // Not a mount point, or a missing directory.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => return Ok(()),
            Err(e) => return Err(e).with_context(|| format!("unmounting {}", place.display())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_flags_are_separated_from_options_of_the_file_system() {
        let words = ["ro", "index=off", "lowerdir=/a:/b", "nosuid", "rw"].map(str::to_owned);
        let (flags, data) = options(&words);
        assert_eq!(flags, MountFlags::RDONLY | MountFlags::NOSUID);
        assert_eq!(data, ["index=off", "lowerdir=/a:/b"]);
    }
}
