//! Images and volumes that containers use, and the size of a sleeping container.
//!
//! Uses `ground`.

use std::fs;
use std::path::PathBuf;

use dormouse_image::Image;
use dormouse_model::{Config, ContainerId, MountKind, Name, RootSource};

use crate::error::{Error, Result};
use crate::ground::Ground;

/// Returns the size of an asleep container's checkpoint in bytes; 0 if it is awake.
pub(crate) fn asleep_bytes(ground: &Ground, id: &ContainerId) -> u64 {
    let files = fs::read_dir(ground.asleep_dir(id)).into_iter().flatten().flatten();
    files.filter_map(|file| file.metadata().ok()).map(|meta| meta.len()).sum()
}

/// Returns the image of a container, if it has one.
pub(crate) fn image_of(ground: &Ground, config: &Config) -> Result<Option<Image>> {
    match &config.spec.root {
        RootSource::Image { id, .. } => Ok(Some(ground.images()?.find(id)?)),
        RootSource::Directory(_) => Ok(None),
    }
}

/// Returns the ids of images that containers are made from: `prune` must keep them.
pub(crate) fn images_in_use(ground: &Ground) -> Result<Vec<String>> {
    let mut used = Vec::new();
    for id in ground.ids()? {
        match ground.config(&id) {
            Ok(config) => {
                if let RootSource::Image { id, .. } = config.spec.root {
                    used.push(id);
                }
            }
            Err(Error::NoContainer(_)) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(used)
}

/// Returns the named volumes that no container mounts.
pub(crate) fn unused_volumes(ground: &Ground) -> Result<Vec<Name>> {
    let mut used = std::collections::HashSet::new();
    for id in ground.ids()? {
        for mount in ground.config(&id)?.spec.mounts {
            if let MountKind::Volume { name } = mount.kind {
                used.insert(name);
            }
        }
    }
    let dir = ground.places.volumes();
    let mut unused = Vec::new();
    for entry in fs::read_dir(&dir).map_err(Error::file("cannot list", &dir))? {
        let entry = entry.map_err(Error::file("cannot list", &dir))?;
        let name = entry.file_name().to_str().and_then(|n| n.parse::<Name>().ok());
        unused.extend(name.filter(|n| !used.contains(n)));
    }
    Ok(unused)
}

/// Removes a volume, which no container may be using.
pub(crate) fn remove_volume(ground: &Ground, name: &Name) -> Result<()> {
    let path = ground.places.volumes().join(name.as_str());
    fs::remove_dir_all(&path).map_err(Error::file("cannot remove volume", path))
}

/// The named volumes that a container mounts.
pub(crate) fn volumes_of(ground: &Ground, config: &Config) -> Vec<PathBuf> {
    let name = |m: &dormouse_model::Mount| match &m.kind {
        MountKind::Volume { name } => Some(ground.places.volumes().join(name.as_str())),
        _ => None,
    };
    config.spec.mounts.iter().filter_map(name).collect()
}

/// The image's name as lists show it.
pub(crate) fn image_label(config: &Config) -> String {
    match &config.spec.root {
        RootSource::Image { reference, .. } => reference.to_string(),
        RootSource::Directory(path) => path.display().to_string(),
    }
}
