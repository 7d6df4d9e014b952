//! The store of images: layout, locks, and consistency after a crash.
//!
//! ```text
//! DIR/                         `images` below the state directory, 0700
//!   lock                       the store's lock (flock(2))
//!   names.lock  names.json     names of images -> image ids, replaced as a whole
//!   objects/ab/cdef…           contents of files: BLAKE3-named, 0444, root's, never modified
//!   layers/DIGITS              one file per layer, named by its diffID (see `layer`)
//!   images/ID/                 ID is the SHA-256 of the configuration, 64 hex digits
//!     config.json              the configuration, byte for byte as it came
//!     image.json               ours: layers, digest, size (`Record`)
//!     manifest.json            the manifest it came with, where there was one
//!     meta.erofs  or  stub/    the tree: names, owners, modes, xattrs, and where the content is
//!   partial/                   downloads that were cut, for the registry client
//!   tmp/                       what is being made; on the same file system, so that rename publishes
//! RUN/images/                  `images` below the runtime directory, 0700
//!   lock                       taken to mount and unmount
//!   ID/                        meta.erofs, mounted read-only; one mount for all containers
//! ```
//!
//! **Publication.** Everything is created in `tmp/`, synced, and renamed into its place. Objects
//! are synced by one syncfs(2) per layer: thousands of fsync(2) would take minutes. ORDER: objects,
//! syncfs, layer file, image directory, name. A reader that finds a name finds all the rest. A
//! crash leaves files in `tmp/` and unreferenced objects, which [`Store::prune`] sweeps.
//!
//! **Locks**, taken in this order: `lock` (shared during an import, so that an object found present
//! stays present; exclusive during a sweep), `names.lock`, `RUN/images/lock`. Reading takes none:
//! published files are immutable, and names.json is replaced by rename.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use dormouse_kernel::cgroup::ChargingImages;
use dormouse_model::Reference;
use oci_spec::image::ImageConfiguration;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::error::{At, Fault, ImageError, Result};

/// The identity of an image: the SHA-256 of its configuration, 64 lower-case hex digits.
pub type ImageId = String;

/// The representation of an image's tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Metadata {
    /// One EROFS file, mounted from the file (KERNEL(6.12)).
    Erofs,
    /// A directory of empty files that point to the objects: where EROFS cannot be mounted.
    Stub,
}

/// All images of one host.
#[derive(Debug)]
pub struct Store {
    pub(crate) dir: PathBuf,
    pub(crate) run: PathBuf,
    pub(crate) metadata: Metadata,
    charge: Option<Box<dyn Charge>>,
}

/// Moves the charge for page cache of images from the command that imports or reads them to a cgroup of their own.
pub trait Charge: std::fmt::Debug + Send + Sync {
    /// Begins; the charge is that of the command again when the result is dropped. `None` if it stays there.
    fn begin(&self) -> Option<ChargingImages>;
}

/// One image.
#[derive(Debug, Clone)]
pub struct Image {
    /// The SHA-256 of the configuration, 64 hex digits.
    pub id: ImageId,
    /// The names; none for an image whose name was given to another.
    pub names: Vec<Reference>,
    /// The configuration (OCI image specification, "Image Configuration").
    pub config: ImageConfiguration,
    /// Bytes of its files as the tree shows them, whether shared with other images or not.
    pub size_bytes: u64,
    /// Creation time: `created` of the configuration (RFC 3339), if present.
    pub created: Option<String>,
    /// Digest of the manifest it was pulled with.
    pub digest: Option<Digest>,
    /// Its layers, lowest first.
    pub layers: Vec<LayerRef>,
    pub(crate) metadata: Metadata,
}

/// A layer as an image names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerRef {
    /// Digest of the uncompressed tar.
    pub diff_id: Digest,
    /// Bytes of the uncompressed tar.
    pub tar_bytes: u64,
}

/// `image.json`. Fields are only ever added, each with a default.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Format of this record; this page describes 1.
    pub version: u32,
    pub layers: Vec<LayerRef>,
    pub size_bytes: u64,
    pub metadata: Metadata,
    /// BLAKE3 of meta.erofs, which `verify` compares.
    #[serde(default)]
    pub metadata_blake3: Option<String>,
    #[serde(default)]
    pub digest: Option<Digest>,
}

/// The whole of names.json.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Names {
    version: u32,
    pub names: BTreeMap<String, ImageId>,
}

impl Image {
    /// Returns the name by which [`Store::find`] has found the image; `None` if it was an id.
    pub fn given_name(&self, text: &str) -> Option<&Reference> {
        let wanted: Reference = text.parse().ok()?;
        let known = |is: &dyn Fn(&Reference) -> bool| self.names.iter().find(|name| is(name));
        known(&|name| *name == wanted).or_else(|| known(&|name| name.is_same(&wanted))).or_else(
            || known(&|name| *name == wanted.local()).filter(|_| wanted.registry.is_none()),
        )
    }
}

impl Names {
    /// The image with a name, or with a name that means the same.
    fn find(&self, wanted: &Reference) -> Option<&ImageId> {
        if let Some(id) = self.names.get(&wanted.to_string()) {
            return Some(id);
        }
        let mut known = self.names.iter();
        let same = known.find(|(name, _)| name.parse().is_ok_and(|n: Reference| n.is_same(wanted)));
        if let Some((_, id)) = same {
            return Some(id);
        }
        self.names.get(&wanted.local().to_string()).filter(|_| wanted.registry.is_none())
    }
}

impl Store {
    /// Opens the store at `dir`, with its mounts below `run`; both are made where they are missing.
    pub fn open(dir: &Path, run: &Path) -> Result<Self> {
        Self::open_with(dir, run, Metadata::Erofs)
    }

    /// The same, with this representation for new images.
    pub fn open_with(dir: &Path, run: &Path, metadata: Metadata) -> Result<Self> {
        let make = |path: &Path| {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(path)
                .at("make the directory", path)
        };
        // ORDER: `tmp` last: where it is there, so are the others.
        if !dir.join("tmp").is_dir() {
            for sub in ["objects", "layers", "images", "partial", "tmp"] {
                make(&dir.join(sub))?;
            }
        }
        make(run)?;
        Ok(Self { dir: dir.to_owned(), run: run.to_owned(), metadata, charge: None })
    }

    /// Sets what the page cache of images is charged to while the store is written, verified or saved.
    #[must_use]
    pub fn charged_by(mut self, charge: impl Charge + 'static) -> Self {
        self.charge = Some(Box::new(charge));
        self
    }

    /// Charges page cache to images until the result is dropped.
    pub(crate) fn charging(&self) -> Option<ChargingImages> {
        self.charge.as_ref()?.begin()
    }

    /// The image called `name`: a name (with `:latest` where no tag is given), an id, or the
    /// beginning of one that no other image shares.
    ///
    /// A name without an image of its own also finds the other form of a name of docker.io, and a short
    /// name finds the name below `localhost/` that podman gives to images without a registry.
    pub fn find(&self, name: &str) -> Result<Image> {
        let names = self.names()?;
        if let Ok(reference) = name.parse::<Reference>()
            && let Some(id) = names.find(&reference)
        {
            return self.load(id, &names);
        }
        let digits = name.strip_prefix("sha256:").unwrap_or(name);
        let hex = digits.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        if hex && !digits.is_empty() && digits.len() <= 64 {
            let mut found = self.ids()?;
            found.retain(|id| id.starts_with(digits));
            match found.as_slice() {
                [id] => return self.load(id, &names),
                [] => {}
                many => {
                    let what = format!("'{name}' begins the ids of {} images", many.len());
                    return Err(Fault::Invalid { what }.into());
                }
            }
        }
        Err(Fault::NotFound { what: format!("no image is called '{name}'") }.into())
    }

    /// All images, newest first.
    pub fn list(&self) -> Result<Vec<Image>> {
        let names = self.names()?;
        let mut images = Vec::new();
        for id in self.ids()? {
            match self.load(&id, &names) {
                Ok(image) => images.push(image),
                // Removed since the directory was read.
                Err(e) if e.kind() == dormouse_kernel::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
        images.sort_by(|a, b| b.created.cmp(&a.created).then_with(|| a.id.cmp(&b.id)));
        Ok(images)
    }

    /// Gives the image one more name. A name of another image moves to this one.
    pub fn tag(&self, image: &Image, name: &Reference) -> Result<()> {
        self.name(&image.id, name)
    }

    /// Removes a name; the image stays. Returns whether the name existed.
    pub fn untag(&self, name: &Reference) -> Result<bool> {
        self.change_names(|names| Ok(names.remove(&name.to_string()).is_some()))
    }

    /// Names an image by its id.
    pub(crate) fn name(&self, id: &str, name: &Reference) -> Result<()> {
        self.change_names(|names| {
            let dir = self.image_dir(id);
            fs::metadata(&dir).at("find the image", &dir)?;
            names.insert(name.to_string(), id.to_owned());
            Ok(())
        })
    }

    /// The directory of incomplete downloads, which can be resumed; on the same file system as the
    /// rest. Files without a write for the grace time are removed by [`Store::prune`].
    pub fn partial_dir(&self) -> PathBuf {
        self.dir.join("partial")
    }

    pub(crate) fn image_dir(&self, id: &str) -> PathBuf {
        self.dir.join("images").join(id)
    }

    pub(crate) fn names(&self) -> Result<Names> {
        let path = self.dir.join("names.json");
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map_err(|source| Fault::Json { what: "list of image names", path, source }.into()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Names::default()),
            Err(e) => Err(e).at("read", path),
        }
    }

    /// Changes names.json under its lock.
    pub(crate) fn change_names<T>(
        &self,
        change: impl FnOnce(&mut BTreeMap<String, ImageId>) -> Result<T>,
    ) -> Result<T> {
        let _lock = self.lock("names.lock", LockKind::Exclusive)?;
        let mut names = self.names()?;
        let before = names.names.clone();
        let result = change(&mut names.names)?;
        if names.names != before {
            names.version = 1;
            let text = to_json(&names)?;
            self.publish_file(&text, &self.dir.join("names.json"))?;
        }
        Ok(result)
    }

    /// Ids of all images, in no order.
    pub(crate) fn ids(&self) -> Result<Vec<ImageId>> {
        let dir = self.dir.join("images");
        let mut ids = Vec::new();
        for entry in fs::read_dir(&dir).at("list", &dir)? {
            let name = entry.at("list", &dir)?.file_name();
            if let Some(name) = name.to_str().filter(|n| n.len() == 64) {
                ids.push(name.to_owned());
            }
        }
        Ok(ids)
    }

    pub(crate) fn load(&self, id: &str, names: &Names) -> Result<Image> {
        let dir = self.image_dir(id);
        let path = dir.join("image.json");
        let bytes = fs::read(&path).at("read", &path)?;
        let record: Record = serde_json::from_slice(&bytes).map_err(|source| Fault::Json {
            what: "image record",
            path,
            source,
        })?;
        let path = dir.join("config.json");
        let bytes = fs::read(&path).at("read", &path)?;
        let config: ImageConfiguration = serde_json::from_slice(&bytes)
            .map_err(|source| Fault::Json { what: "image configuration", path, source })?;
        let mine = names.names.iter().filter(|(_, of)| *of == id);
        Ok(Image {
            id: id.to_owned(),
            names: mine.filter_map(|(name, _)| name.parse().ok()).collect(),
            size_bytes: record.size_bytes,
            created: config.created().clone(),
            config,
            digest: record.digest,
            layers: record.layers,
            metadata: record.metadata,
        })
    }

    /// Writes a small file beside its place, syncs it and renames it there.
    pub(crate) fn publish_file(&self, bytes: &[u8], path: &Path) -> Result<()> {
        let tmp = self.tmp_path();
        let write = || -> std::io::Result<()> {
            let mut file =
                fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&tmp)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&tmp, path)?;
            sync_dir(path.parent().unwrap_or(Path::new("/")))
        };
        write().inspect_err(|_| drop(fs::remove_file(&tmp))).at("write", path)
    }

    /// Returns a unique name in `tmp/`.
    pub(crate) fn tmp_path(&self) -> PathBuf {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        self.dir.join("tmp").join(format!("{}-{n}", std::process::id()))
    }

    /// Takes one of the locks and waits for it.
    pub(crate) fn lock(&self, name: &str, kind: LockKind) -> Result<Lock> {
        Lock::take(&self.dir.join(name), kind)
    }
}

/// The mode of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LockKind {
    Shared,
    Exclusive,
}

/// A lock that is held until this is dropped (flock(2): also when the process dies).
#[derive(Debug)]
pub(crate) struct Lock {
    _file: OwnedFd,
}

impl Lock {
    fn file(path: &Path) -> Result<File> {
        let mut options = fs::OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        options.open(path).at("open the lock", path)
    }

    /// Takes a lock if it is free.
    pub(crate) fn try_exclusive(path: &Path) -> Result<Option<Self>> {
        let file = Self::file(path)?;
        match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self { _file: file.into() })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(e).at("lock", path),
        }
    }

    pub(crate) fn take(path: &Path, kind: LockKind) -> Result<Self> {
        let file = Self::file(path)?;
        let operation = match kind {
            LockKind::Shared => rustix::fs::FlockOperation::LockShared,
            LockKind::Exclusive => rustix::fs::FlockOperation::LockExclusive,
        };
        loop {
            match rustix::fs::flock(&file, operation) {
                Err(rustix::io::Errno::INTR) => {}
                result => return result.at("lock", path).map(|()| Self { _file: file.into() }),
            }
        }
    }
}

/// Syncs a directory's entries.
pub(crate) fn sync_dir(dir: &Path) -> std::io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Serializes a record of the store, which fails only by a bug.
pub(crate) fn to_json(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec_pretty(value).map_err(|e| {
        ImageError::with_source(
            dormouse_kernel::ErrorKind::Invalid,
            "a record of the store cannot be written as JSON",
            e,
        )
    })
}
