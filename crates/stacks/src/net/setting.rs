//! Settings of a stack, below `/proc/sys/net`.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use dormouse_kernel::proc;
use dormouse_record::check::setting::{DIRS, OF_LINKS, is_inherited, is_setting};

/// The directory of all settings.
const PLACE: &str = "/proc/sys/net";
/// Paths, and values.
pub(super) type Settings = BTreeMap<String, String>;

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

/// The settings of a new stack that it has from its host, in the order in which they are written.
pub(super) fn inherited(new: &Settings) -> Vec<(String, String)> {
    let mut all = changed(new, &Settings::new());
    let is_writable = |path: &str| {
        let meta = fs::metadata(Path::new(PLACE).join(path));
        meta.is_ok_and(|meta| meta.permissions().mode() & 0o200 != 0)
    };
    all.retain(|(path, _)| is_inherited(path) && is_writable(path));
    all
}

/// Gives a new stack the settings that a new one had on another host. A setting that this kernel does not have is
/// left out; the error names one that cannot be written.
pub(super) fn adopt<'s>(
    settings: impl Iterator<Item = &'s (String, String)>,
) -> std::result::Result<(), String> {
    for (path, value) in settings {
        // ORDER: read just before: a setting may change others (ip-sysctl, ip_forward).
        match proc::whole_text(Path::new(PLACE).join(path)) {
            Ok(here) if here.trim_end() != value => {
                make([&(path.clone(), value.clone())].into_iter())?
            }
            _ => {}
        }
    }
    Ok(())
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
