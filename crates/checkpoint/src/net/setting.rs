//! Settings of a stack, below `/proc/sys/net`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use dormouse_kernel::proc;

/// The directory of all settings.
const PLACE: &str = "/proc/sys/net";
/// Directories, in the order in which they are written: settings for all devices before those for
/// one.
const DIRS: [&str; 10] = [
    "core",
    "unix",
    "ipv4",
    "ipv6",
    "ipv4/conf/all",
    "ipv4/conf/default",
    "ipv4/conf/lo",
    "ipv6/conf/all",
    "ipv6/conf/default",
    "ipv6/conf/lo",
];
/// Directories with one subdirectory for each device.
const OF_LINKS: [&str; 4] = ["ipv4/conf", "ipv6/conf", "ipv4/neigh", "ipv6/neigh"];

/// Paths, and values.
pub(super) type Settings = BTreeMap<String, String>;

/// Checks a device name, so that it cannot lead to another path: stricter than the kernel.
pub(crate) fn is_link_name(name: &str) -> bool {
    let known = |b: u8| b.is_ascii_alphanumeric() || b"_.-".contains(&b);
    (1..16).contains(&name.len()) && name.bytes().all(known) && !name.starts_with('.')
}

/// The name of the device of a setting, unless it is the loopback device or none.
pub(super) fn link_of(path: &str) -> Option<&str> {
    let (dir, _) = path.rsplit_once('/')?;
    let (group, link) = dir.rsplit_once('/')?;
    (OF_LINKS.contains(&group) && !DIRS.contains(&dir)).then_some(link)
}

/// Whether a setting is in a known directory.
pub(crate) fn is_setting(path: &str) -> bool {
    let is_name = |name: &str| {
        let known = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
        !name.is_empty() && name.bytes().all(known)
    };
    path.rsplit_once('/').is_some_and(|(dir, name)| {
        (DIRS.contains(&dir) || link_of(path).is_some_and(is_link_name)) && is_name(name)
    })
}

/// Readable settings by their paths, of the stack and of these devices.
pub(super) fn all<'n>(links: impl Iterator<Item = &'n str>) -> Settings {
    let of_links = links.flat_map(|name| OF_LINKS.map(|group| format!("{group}/{name}")));
    let mut all = Settings::new();
    for dir in DIRS.into_iter().map(str::to_owned).chain(of_links) {
        for entry in fs::read_dir(Path::new(PLACE).join(&dir)).into_iter().flatten().flatten() {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let path = format!("{dir}/{name}");
            if !entry.file_type().is_ok_and(|kind| kind.is_file()) || !is_setting(&path) {
                continue;
            }
            // A setting without a value yet, or that can only be written.
            let Ok(value) = proc::whole_text(entry.path()) else { continue };
            all.insert(path, value.trim_end().to_owned());
        }
    }
    all
}

/// The settings of `all` that differ from `like`, in the order in which they are written.
pub(super) fn changed(all: &Settings, like: &Settings) -> Vec<(String, String)> {
    let changed = all.iter().filter(|(path, value)| like.get(*path) != Some(value));
    let mut changed: Vec<(String, String)> =
        changed.map(|(path, value)| (path.clone(), value.clone())).collect();
    let order = |path: &str| {
        let dir = path.rsplit_once('/').map_or("", |(dir, _)| dir);
        DIRS.iter().position(|one| *one == dir).unwrap_or(DIRS.len())
    };
    changed.sort_by_key(|(path, _)| order(path));
    changed
}

/// Writes settings; the error names one that cannot be written.
pub(super) fn make<'s>(
    settings: impl Iterator<Item = &'s (String, String)>,
) -> std::result::Result<(), String> {
    for (path, value) in settings {
        if !is_setting(path) || fs::write(Path::new(PLACE).join(path), value).is_err() {
            return Err(format!("with the setting net/{path}, which cannot be made again"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_is_below_the_directories_of_a_stack() {
        assert!(is_setting("ipv4/ip_forward") && is_setting("ipv6/conf/lo/disable_ipv6"));
        assert!(is_setting("ipv4/conf/eth0.7/forwarding"));
        assert_eq!(link_of("ipv4/conf/eth0.7/forwarding"), Some("eth0.7"));
        assert_eq!((link_of("ipv4/conf/lo/forwarding"), link_of("ipv4/ip_forward")), (None, None));
        for bad in [
            "",
            "ipv4",
            "ipv4/../../kernel/core_pattern",
            "ipv4/conf/../ip_forward",
            "ipv4/conf/a b/forwarding",
            "/ipv4/a",
            "ipv4/other/eth0/a",
            "kernel/a",
        ] {
            assert!(!is_setting(bad), "{bad}");
        }
    }
}
