//! A bundle: a directory with a configuration, read and checked as a whole before anything is made.
//!
//! Rules about several fields are checked here; a single field is checked where it becomes part of
//! a plan.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::namespace::Namespaces;
use crate::spec::{self, IdMapping, Linux, Process, Spec};

/// A checked configuration, with the paths it uses.
#[derive(Debug)]
pub struct Bundle {
    /// Absolute path.
    pub dir: PathBuf,
    /// The configuration.
    pub spec: Spec,
    /// Absolute path of the root filesystem.
    pub rootfs: PathBuf,
}

impl Bundle {
    /// Reads `config.json` of a directory.
    pub fn open(dir: &Path) -> Result<Self> {
        let dir = std::fs::canonicalize(dir).map_err(Error::file("find the bundle", dir))?;
        let config = dir.join("config.json");
        let mut spec: Spec = spec::read(&config)?;
        let rootfs = check(&spec, &dir).map_err(|e| match e {
            Error::Field { field, why } => {
                Error::Config { path: config, why: format!("{field}: {why}") }
            }
            other => other,
        })?;
        for mount in &mut spec.mounts {
            if let Some(rest) = inside(&rootfs, &mount.destination) {
                mount.destination = rest.to_owned();
            }
        }
        Ok(Self { dir, spec, rootfs })
    }

    /// Returns its `linux`; an empty one if there is none, which [`Bundle::open`] refuses.
    pub fn linux(&self) -> &Linux {
        static NONE: std::sync::OnceLock<Linux> = std::sync::OnceLock::new();
        self.spec.linux.as_ref().unwrap_or_else(|| NONE.get_or_init(Linux::default))
    }
}

/// Checks a configuration; returns the path of the root filesystem.
pub(crate) fn check(spec: &Spec, dir: &Path) -> Result<PathBuf> {
    check_version(&spec.oci_version)?;
    for (name, other) in [("vm", &spec.vm), ("solaris", &spec.solaris), ("windows", &spec.windows)]
    {
        if other.is_some() {
            return Err(Error::field(name, "this runtime makes Linux containers only"));
        }
    }
    let linux = spec.linux.as_ref().ok_or_else(|| Error::field("linux", "it is missing"))?;
    let namespaces = Namespaces::check(&linux.namespaces)?;
    check_linux(linux, &namespaces)?;
    check_names(spec, &namespaces)?;
    for (at, mount) in spec.mounts.iter().enumerate() {
        if mount.destination.is_empty() || mount.destination.contains('\0') {
            return Err(Error::field(format!("mounts[{at}].destination"), "it is not a path"));
        }
    }
    let hooks = &spec.hooks;
    for (stage, list) in [
        ("prestart", &hooks.prestart),
        ("createRuntime", &hooks.create_runtime),
        ("createContainer", &hooks.create_container),
        ("startContainer", &hooks.start_container),
        ("poststart", &hooks.poststart),
        ("poststop", &hooks.poststop),
    ] {
        for (at, hook) in list.iter().enumerate() {
            let field = |name: &str| format!("hooks.{stage}[{at}].{name}");
            if !hook.path.starts_with('/') {
                return Err(Error::field(field("path"), "it is not an absolute path"));
            }
            if hook.timeout.is_some_and(|t| t <= 0) {
                return Err(Error::field(field("timeout"), "it is not more than 0"));
            }
        }
    }
    if let Some(process) = &spec.process {
        check_process(process)?;
    }
    let root = spec.root.as_ref().ok_or_else(|| Error::field("root", "it is missing"))?;
    if root.path.is_empty() {
        return Err(Error::field("root.path", "it is empty"));
    }
    let rootfs = dir.join(&root.path);
    let rootfs = std::fs::canonicalize(&rootfs)
        .map_err(|e| Error::field("root.path", format!("{}: {e}", rootfs.display())))?;
    if !rootfs.is_dir() {
        return Err(Error::field("root.path", format!("{} is no directory", rootfs.display())));
    }
    if rootfs == Path::new("/") {
        return Err(Error::field("root.path", "it is the root of the host"));
    }
    Ok(rootfs)
}

/// Returns the path inside the root of a path of the host that leads there. A destination of a mount may
/// be one, too: runc takes the path of the root filesystem off its beginning.
pub(crate) fn inside<'p>(root: &Path, path: &'p str) -> Option<&'p str> {
    let root = root.to_str().filter(|root| *root != "/")?;
    path.strip_prefix(root).filter(|rest| rest.starts_with('/'))
}

/// Accepts 1.x.y, with or without a suffix.
fn check_version(version: &str) -> Result<()> {
    let number = version.split(['-', '+']).next().unwrap_or_default();
    let parts: Vec<_> = number.split('.').map(str::parse::<u32>).collect();
    match parts.as_slice() {
        [Ok(1), Ok(_), Ok(_)] => Ok(()),
        [Ok(_), Ok(_), Ok(_)] => Err(Error::field(
            "ociVersion",
            format!("{version:?} is not a version 1 of runtime-spec"),
        )),
        _ => Err(Error::field("ociVersion", format!("{version:?} is not a version"))),
    }
}

fn check_linux(linux: &Linux, namespaces: &Namespaces) -> Result<()> {
    let maps = [("uidMappings", &linux.uid_mappings), ("gidMappings", &linux.gid_mappings)];
    for (name, map) in maps {
        let field = format!("linux.{name}");
        check_map(&field, map)?;
        match (namespaces.makes("user"), namespaces.has("user"), map.is_empty()) {
            (true, _, true) => {
                return Err(Error::field(field, "a new user namespace needs at least one"));
            }
            (_, false, false) => {
                return Err(Error::field(field, "there is no user namespace in linux.namespaces"));
            }
            _ => {}
        }
    }
    if !namespaces.has("mount") {
        let bad = |why| Err(Error::field("linux.namespaces", why));
        if namespaces.has("user") {
            return bad("root in a user namespace cannot mount without a mount namespace");
        }
    }
    if !linux.time_offsets.is_empty() && !namespaces.makes("time") {
        let why = "only a new time namespace can have offsets";
        return Err(Error::field("linux.timeOffsets", why));
    }
    if linux.intel_rdt.is_some() {
        let why = "this runtime does not use resctrl; remove it";
        return Err(Error::field("linux.intelRdt", why));
    }
    if let Some(device) = linux.net_devices.keys().next() {
        let why = "this runtime moves no network devices; a createRuntime hook can";
        return Err(Error::field(format!("linux.netDevices[{device}]"), why));
    }
    for (name, paths) in
        [("maskedPaths", &linux.masked_paths), ("readonlyPaths", &linux.readonly_paths)]
    {
        if let Some(at) = paths.iter().position(|p| !p.starts_with('/')) {
            return Err(Error::field(format!("linux.{name}[{at}]"), "it is not an absolute path"));
        }
    }
    Ok(())
}

pub(crate) fn check_map(field: &str, map: &[IdMapping]) -> Result<()> {
    for (at, one) in map.iter().enumerate() {
        let ends = |start: u32| start.checked_add(one.size.saturating_sub(1));
        if one.size == 0 || ends(one.container_id).is_none() || ends(one.host_id).is_none() {
            return Err(Error::field(
                format!("{field}[{at}]"),
                "its size is 0 or reaches beyond 32 bits",
            ));
        }
    }
    // LIMIT: the kernel's.
    if map.len() > 340 {
        return Err(Error::field(field, "the kernel takes 340 lines at most"));
    }
    Ok(())
}

fn check_names(spec: &Spec, namespaces: &Namespaces) -> Result<()> {
    for (field, name) in [("hostname", &spec.hostname), ("domainname", &spec.domainname)] {
        let Some(name) = name.as_deref().filter(|n| !n.is_empty()) else { continue };
        if !namespaces.has("uts") {
            return Err(Error::field(field, "there is no uts namespace in linux.namespaces"));
        }
        // LIMIT: the kernel's.
        if name.len() > 64 || name.contains('\0') {
            return Err(Error::field(field, "it is longer than 64 bytes"));
        }
    }
    Ok(())
}

/// Checks a process, of the configuration or of `exec`.
pub(crate) fn check_process(process: &Process) -> Result<()> {
    if process.args.is_empty() || process.args[0].is_empty() {
        return Err(Error::field("process.args", "there is no program"));
    }
    if !process.cwd.starts_with('/') {
        return Err(Error::field(
            "process.cwd",
            format!("{:?} is not an absolute path", process.cwd),
        ));
    }
    let texts = |name: &str, list: &[String]| match list.iter().position(|t| t.contains('\0')) {
        Some(at) => Err(Error::field(format!("process.{name}[{at}]"), "it contains a NUL byte")),
        None => Ok(()),
    };
    texts("args", &process.args)?;
    texts("env", &process.env)?;
    if process.cwd.contains('\0') {
        return Err(Error::field("process.cwd", "it contains a NUL byte"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spec_version_1_is_accepted() {
        for version in ["1.0.0", "1.0.2-dev", "1.2.1", "1.9.9"] {
            assert!(check_version(version).is_ok(), "{version}");
        }
        for version in ["", "1", "1.0", "2.0.0", "99.0.0", "0.9.0", "a.b.c", "1.0.x"] {
            assert!(check_version(version).is_err(), "{version}");
        }
    }
}
