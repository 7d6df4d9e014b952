//! Maintenance of the store: removal, sweep, verification.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::archive::{Kind, Piece};
use crate::digest::{Digest, ObjectId};
use crate::error::{At, Result};
use crate::layer::{Content, LayerFile};
use crate::object::name_of;
use crate::store::{Image, ImageId, Lock, LockKind, Record, Store};

/// The objects to sweep.
#[derive(Debug, Clone, Default)]
pub struct Prune {
    /// Images that containers are made from: these stay in any case.
    pub in_use: Vec<ImageId>,
    /// Remove images that have no name.
    pub unnamed: bool,
    /// Remove every image that is not in use.
    pub all: bool,
    /// Layers of no image are kept for so long, for an interrupted pull that is repeated.
    pub grace: Duration,
}

/// The swept objects.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Images removed.
    pub images: Vec<ImageId>,
    /// Layers removed.
    pub layers: usize,
    /// Objects removed.
    pub objects: usize,
    /// Bytes of disk given back.
    pub bytes: u64,
}

/// Damage of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// Path below the store's directory.
    pub path: String,
    /// The damage.
    pub problem: String,
}

impl Store {
    /// Removes an image and its names. Its layers and objects are removed by the next prune. The
    /// caller checks that no container is made from it.
    pub fn remove(&self, image: &Image) -> Result<()> {
        let _lock = self.lock("lock", LockKind::Shared)?;
        self.remove_locked(&image.id)
    }

    fn remove_locked(&self, id: &str) -> Result<()> {
        // ORDER: names, then the mount, then the image, so that no name refers to a missing image.
        self.change_names(|names| {
            names.retain(|_, of| of != id);
            Ok(())
        })?;
        self.unmount(id)?;
        let (dir, tmp) = (self.image_dir(id), self.tmp_path());
        match fs::rename(&dir, &tmp) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(e).at("remove the image", &dir),
            Ok(()) => fs::remove_dir_all(&tmp).at("remove the directory", &tmp),
        }
    }

    /// Removes unreferenced files. Waits for imports in progress.
    pub fn prune(&self, prune: &Prune) -> Result<Pruned> {
        let lock = self.lock("lock", LockKind::Exclusive)?;
        let mut images = Vec::new();
        for image in self.list()? {
            let goes = prune.all || (prune.unnamed && image.names.is_empty());
            if goes && !prune.in_use.contains(&image.id) {
                self.remove_locked(&image.id)?;
                images.push(image.id);
            }
        }
        let pruned = self.sweep(&lock, Some(prune.grace))?;
        Ok(Pruned { images, ..pruned })
    }

    /// After a failed import: removes its leftovers, unless another import runs now. Layers stay,
    /// for the next attempt. An error here is not reported, because it would hide the cause of the
    /// failed import; `prune` reports it.
    pub(crate) fn sweep_if_idle(&self) {
        if let Ok(Some(lock)) = Lock::try_exclusive(&self.dir.join("lock")) {
            let _ = self.sweep(&lock, None);
        }
    }

    /// Removes unmarked objects, the contents of `tmp/`, and, if older than `grace`, layers of no
    /// image and partial downloads. The lock is the store's, held exclusively: processes that write
    /// an object or name a layer hold it shared.
    fn sweep(&self, _lock: &Lock, grace: Option<Duration>) -> Result<Pruned> {
        let mut pruned = Pruned::default();
        let old = |meta: &fs::Metadata| match (grace, meta.modified()) {
            (Some(grace), Ok(modified)) => modified.elapsed().is_ok_and(|age| age >= grace),
            _ => false,
        };
        let wanted = self.wanted_layers()?;
        let mut marked: HashSet<ObjectId> = HashSet::new();
        for (path, meta) in files(&self.dir.join("layers"))? {
            let Some(diff_id) = layer_name(&path) else { continue };
            if !wanted.contains(&diff_id) && old(&meta) {
                remove_file(&path)?;
                pruned.layers += 1;
                pruned.bytes += meta.blocks() * 512;
                continue;
            }
            // An unreadable layer would lose its objects: in that case nothing is swept.
            for (id, ..) in objects_of(&self.layer(&diff_id)?) {
                marked.insert(id);
            }
        }
        let objects = self.dir.join("objects");
        for entry in fs::read_dir(&objects).at("list", &objects)? {
            let dir = entry.at("list", &objects)?.path();
            for (path, meta) in files(&dir)? {
                if object_name(&path).is_some_and(|id| !marked.contains(&id)) {
                    remove_file(&path)?;
                    pruned.objects += 1;
                    pruned.bytes += meta.blocks() * 512;
                }
            }
        }
        for (path, meta) in files(&self.dir.join("partial"))? {
            if old(&meta) {
                remove_file(&path)?;
                pruned.bytes += meta.blocks() * 512;
            }
        }
        let tmp = self.dir.join("tmp");
        for (path, meta) in files(&tmp)? {
            // Naming an image holds `names.lock` alone, so files of live processes stay.
            if is_of_living_process(&path) {
                continue;
            }
            match meta.is_dir() {
                true => fs::remove_dir_all(&path).at("remove the directory", &path)?,
                false => remove_file(&path)?,
            }
        }
        Ok(pruned)
    }

    /// Layers that images are made of.
    fn wanted_layers(&self) -> Result<HashSet<Digest>> {
        let names = self.names()?;
        let mut wanted = HashSet::new();
        for id in self.ids()? {
            wanted.extend(self.load(&id, &names)?.layers.iter().map(|layer| layer.diff_id));
        }
        Ok(wanted)
    }

    /// Reads every object, layer and metadata file and compares it with its hash.
    pub fn verify(&self) -> Result<Vec<Damage>> {
        let _charging = self.charging();
        let _lock = self.lock("lock", LockKind::Shared)?;
        let mut damage = Vec::new();
        let mut note = |path: &Path, problem: String| {
            let path = path.strip_prefix(&self.dir).unwrap_or(path).display().to_string();
            damage.push(Damage { path, problem });
        };
        let mut checked: HashSet<ObjectId> = HashSet::new();
        for (path, _) in files(&self.dir.join("layers"))? {
            let Some(diff_id) = layer_name(&path) else { continue };
            let layer = match self.layer(&diff_id) {
                Ok(layer) => layer,
                Err(e) => {
                    note(&path, e.to_string());
                    continue;
                }
            };
            for (id, size, map) in objects_of(&layer) {
                if !checked.insert(id) {
                    continue;
                }
                let path = self.dir.join("objects").join(id.path());
                let found = self.open_object(&id, size).and_then(|_| name_of(&path, map));
                match found {
                    Ok(found) if found == id => {}
                    Ok(_) => note(&path, "its content does not match its name".to_owned()),
                    Err(e) => note(&path, e.to_string()),
                }
            }
        }
        for id in self.ids()? {
            let dir = self.image_dir(&id);
            let path = dir.join("config.json");
            match fs::read(&path) {
                Ok(bytes) if Digest::of(&bytes).hex() == id => {}
                Ok(_) => note(&path, "its digest is not the image's id".to_owned()),
                Err(e) => note(&path, e.to_string()),
            }
            let record = fs::read(dir.join("image.json")).map_err(|e| e.to_string());
            let record = record.and_then(|bytes| {
                serde_json::from_slice::<Record>(&bytes).map_err(|e| e.to_string())
            });
            let hash = match record {
                Ok(record) => {
                    for layer in record.layers {
                        let path = self.layer_path(&layer.diff_id);
                        if !path.exists() {
                            note(&path, format!("it is missing, and image {id} is made of it"));
                        }
                    }
                    record.metadata_blake3
                }
                Err(e) => {
                    note(&dir.join("image.json"), e);
                    None
                }
            };
            if let Some(hash) = hash {
                let path = dir.join("meta.erofs");
                match fs::read(&path) {
                    Ok(bytes) if *blake3::hash(&bytes).to_hex() == *hash => {}
                    Ok(_) => note(&path, "its content is not what was written".to_owned()),
                    Err(e) => note(&path, e.to_string()),
                }
            }
        }
        Ok(damage)
    }
}

/// Objects of a layer, with the size of the file and the map of a sparse one.
fn objects_of(layer: &LayerFile) -> impl Iterator<Item = (ObjectId, u64, Option<&[Piece]>)> {
    layer.entries.iter().filter_map(|entry| match &entry.kind {
        Kind::File { size, content: Content::Object { id, map } } => {
            Some((*id, *size, map.as_deref()))
        }
        _ => None,
    })
}

/// Entries of a directory.
fn files(dir: &Path) -> Result<Vec<(PathBuf, fs::Metadata)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).at("list", dir)? {
        let entry = entry.at("list", dir)?;
        match entry.metadata() {
            Ok(meta) => found.push((entry.path(), meta)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(e).at("stat", entry.path()),
        }
    }
    Ok(found)
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        result => result.at("remove", path),
    }
}

/// Returns whether the process named at the start of a name in `tmp/` is alive.
fn is_of_living_process(path: &Path) -> bool {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let pid = name.split('-').next().unwrap_or_default();
    pid.parse::<u32>().is_ok_and(|pid| Path::new(&format!("/proc/{pid}")).exists())
}

/// Returns the layer of a file in `layers/`; `None` for an unknown file.
fn layer_name(path: &Path) -> Option<Digest> {
    format!("sha256:{}", path.file_name()?.to_str()?).parse().ok()
}

/// Returns the object of a file in `objects/ab/`; `None` for an unknown file.
fn object_name(path: &Path) -> Option<ObjectId> {
    let name = path.file_name()?.to_str()?;
    let first = path.parent()?.file_name()?.to_str()?;
    let mut bytes = [0; 32];
    hex::decode_to_slice(format!("{first}{name}"), &mut bytes).ok()?;
    Some(ObjectId(bytes))
}

#[cfg(test)]
mod tests {
    use dormouse_kernel::ErrorKind;

    use super::*;
    use crate::{Metadata, Silent};

    struct Scratch {
        dir: tempfile::TempDir,
        store: Store,
    }

    impl Scratch {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let at = |sub: &str| dir.path().join(sub);
            let store = Store::open_with(&at("images"), &at("run"), Metadata::Stub).unwrap();
            Self { store, dir }
        }

        /// An image with these files of 1,000 bytes each, filled with the file's letter.
        fn image(&self, name: &str, files: &[u8]) -> Image {
            let root = self.dir.path().join(format!("root-{name}"));
            fs::create_dir(&root).unwrap();
            for file in files {
                fs::write(root.join((*file as char).to_string()), [*file; 1000]).unwrap();
            }
            let name = name.parse().unwrap();
            let id = self.store.import(&root, Some(&name), &Silent).unwrap();
            self.store.find(&id).unwrap()
        }

        fn objects(&self) -> Vec<PathBuf> {
            let objects = self.dir.path().join("images/objects");
            let parts = files(&objects).unwrap().into_iter();
            parts.flat_map(|(part, _)| files(&part).unwrap()).map(|(path, _)| path).collect()
        }
    }

    #[test]
    fn pruning_removes_unreferenced_objects_and_nothing_else() {
        let scratch = Scratch::new();
        let store = &scratch.store;
        let (one, two) = (scratch.image("one", b"ab"), scratch.image("two", b"bc"));
        assert_eq!(scratch.objects().len(), 3);
        assert_eq!(store.prune(&Prune::default()).unwrap(), Pruned::default());
        store.remove(&one).unwrap();
        assert_eq!(store.find("one").unwrap_err().kind(), ErrorKind::NotFound);
        // Its layer is young.
        let grace = Duration::from_secs(3600);
        let kept = store.prune(&Prune { grace, ..Prune::default() }).unwrap();
        assert_eq!((kept.layers, kept.objects, scratch.objects().len()), (0, 0, 3));
        let swept = store.prune(&Prune::default()).unwrap();
        assert_eq!((swept.layers, swept.objects, scratch.objects().len()), (1, 1, 2));
        assert!(swept.bytes >= 4096, "{swept:?}");
        assert_eq!(store.verify().unwrap(), []);
        store.untag(&"two".parse().unwrap()).unwrap();
        let in_use = vec![two.id.clone()];
        let used = Prune { in_use, unnamed: true, all: true, ..Prune::default() };
        assert_eq!(store.prune(&used).unwrap(), Pruned::default());
        let swept = store.prune(&Prune { unnamed: true, ..Prune::default() }).unwrap();
        assert_eq!((swept.images, scratch.objects().len()), (vec![two.id], 0));
        assert!(store.list().unwrap().is_empty());
    }

    #[test]
    fn leftovers_of_dead_processes_are_removed_and_those_of_live_ones_stay() {
        let scratch = Scratch::new();
        let tmp = scratch.dir.path().join("images/tmp");
        // No process has this id: pid_max ends at 2^22.
        let (dead, alive) = (tmp.join("4194999-0"), tmp.join(format!("{}-x", std::process::id())));
        fs::create_dir(&dead).unwrap();
        fs::write(dead.join("file"), b"").unwrap();
        fs::write(&alive, b"").unwrap();
        scratch.store.prune(&Prune::default()).unwrap();
        assert!(!dead.exists() && alive.exists());
    }

    #[test]
    fn damage_is_reported_and_prevents_a_sweep() {
        let scratch = Scratch::new();
        let (store, image) = (&scratch.store, scratch.image("one", b"ab"));
        assert_eq!(store.verify().unwrap(), []);
        let root = scratch.dir.path().join("images");
        let flip = |path: &Path| {
            let mut bytes = fs::read(path).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::remove_file(path).unwrap();
            fs::write(path, bytes).unwrap();
        };
        let object = scratch.objects().remove(0);
        flip(&object);
        let found = store.verify().unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].path, object.strip_prefix(&root).unwrap().to_str().unwrap());
        fs::remove_file(&object).unwrap();
        assert_eq!(store.verify().unwrap().len(), 1);
        flip(&root.join("images").join(&image.id).join("config.json"));
        assert_eq!(store.verify().unwrap().len(), 2);
        flip(&store.layer_path(&image.layers[0].diff_id));
        let found = store.verify().unwrap();
        assert!(found.iter().any(|d| d.path.starts_with("layers/")), "{found:?}");
        // The objects of the damaged layer are unknown, so nothing is removed.
        let before = scratch.objects();
        assert_eq!(store.prune(&Prune::default()).unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!(scratch.objects(), before);
    }
}
