//! Images from files: a directory, a tar, an OCI layout or archive, a docker archive.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{BufReader, Read, Seek, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use dormouse_model::Reference;
use oci_spec::image::{ImageIndex, ImageManifest};
use rustix::fs::{Mode, OFlags};
use serde::Deserialize;

use crate::archive::{Kind, MAX_ENTRIES, Reader, Source};
use crate::arrival::{Expect, NewImage};
use crate::bound::{Budget, check_expansion};
use crate::digest::Digest;
use crate::error::{At, Fault, ImageError, Result, Step};
use crate::ingest::Import;
use crate::object::Objects;
use crate::pipeline::Packing;
use crate::progress::Progress;
use crate::store::{ImageId, Store, to_json};
use crate::walk::{Here, Walker};

/// Largest JSON document that is read. LIMIT: as registries have it, doubled.
const MAX_JSON: u64 = 8 << 20;
/// Indexes inside of indexes.
const MAX_NESTING: usize = 4;

impl Store {
    /// Imports the file or directory at `path`, recognised by its content: a directory with an
    /// `oci-layout` file, any other directory (a root file system), an archive of an OCI layout, of
    /// `docker save`, or a tar of a root file system; archives may be compressed by gzip or zstd.
    ///
    /// A root file system becomes an image of one layer with an empty configuration. Without `name`
    /// the image gets the names in the archive. Of an archive of several images all are imported,
    /// and the last one's id is returned.
    pub fn import(
        &self,
        path: &Path,
        name: Option<&Reference>,
        progress: &dyn Progress,
    ) -> Result<ImageId> {
        let ids = self.sweep_after_error(self.begin().and_then(|import| {
            let meta = fs::metadata(path).at("find", path)?;
            match meta.is_dir() {
                true => from_directory(&import, path, name, progress),
                false => from_file(&import, path, name, Contents::Any, progress),
            }
        }))?;
        ids.last().cloned().ok_or_else(|| no_image(path))
    }

    /// Imports all images of a directory or file that is an OCI layout, or an archive of one or of
    /// `docker save`, and returns their ids. A root file system is refused.
    pub fn import_archive(&self, path: &Path, progress: &dyn Progress) -> Result<Vec<ImageId>> {
        self.sweep_after_error(self.begin().and_then(|import| {
            let meta = fs::metadata(path).at("find", path)?;
            match meta.is_dir() {
                true if !is_layout(path) => Err(no_image(path)),
                true => from_directory(&import, path, None, progress),
                false => from_file(&import, path, None, Contents::Images, progress),
            }
        }))
    }

    /// The same for a stream, which is first written to a file without a name.
    pub fn import_stream(
        &self,
        stream: &mut dyn Read,
        progress: &dyn Progress,
    ) -> Result<Vec<ImageId>> {
        let objects = Objects::new(self)?;
        let tmp = self.tmp_path();
        let mut file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&tmp)
            .at("create", &tmp)?;
        fs::remove_file(&tmp).at("remove", &tmp)?;
        let mut buffer = vec![0; 1 << 20];
        loop {
            let n = stream.read(&mut buffer).at("read", "standard input")?;
            if n == 0 {
                break;
            }
            objects.room_for(n as u64)?;
            file.write_all(&buffer[..n]).at("write", &tmp)?;
        }
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        self.import_archive(Path::new(&path), progress)
    }

    fn sweep_after_error<T>(&self, result: Result<T>) -> Result<T> {
        if result.is_err() {
            self.sweep_if_idle();
        }
        result
    }
}

/// The accepted contents of a file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Contents {
    /// Images, or a root file system.
    Any,
    /// Images.
    Images,
}

fn is_layout(path: &Path) -> bool {
    path.join("oci-layout").is_file() && path.join("index.json").is_file()
}

fn no_image(path: &Path) -> ImageError {
    let problem = "it holds no image; 'dormouse import' makes one of a root file system";
    let what = format!("'{}'", path.display());
    Fault::Archive { what, problem: problem.to_owned() }.into()
}

fn from_directory(
    import: &Import<'_>,
    path: &Path,
    name: Option<&Reference>,
    progress: &dyn Progress,
) -> Result<Vec<ImageId>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(path, flags, Mode::empty()).at("open", path)?;
    if is_layout(path) {
        let files = Files::Directory { dir, path: path.to_owned() };
        return from_layout(import, &files, name, progress);
    }
    let stat = rustix::fs::fstat(&dir).at("stat", path)?;
    let ids = |id| id;
    let layer = layer_of(import, progress, |out| {
        let mut walker = Walker::new(out, &ids);
        walker.tree(&Here { dir, stat }, b"", 0)?;
        walker.out.finish().at("end the tar of", path).map(drop)
    })?;
    Ok(vec![root_image(import, layer, path, name)?])
}

/// Imports a layer whose tar `write` produces on a separate thread.
pub(crate) fn layer_of(
    import: &Import<'_>,
    progress: &dyn Progress,
    write: impl FnOnce(ChannelWriter) -> Result<()> + Send,
) -> Result<Digest> {
    let (writer, mut reader) = pipe();
    std::thread::scope(|scope| {
        let abort = writer.chunks.clone();
        let writer = scope.spawn(move || {
            let result = write(writer);
            // A truncated stream could look like a whole archive.
            if result.is_err() {
                let _ = abort.send(Err(()));
            }
            result
        });
        let taken = import.layer(&mut reader, Expect::default(), progress);
        drop(reader);
        let written = writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        match (written, taken) {
            (Ok(()), taken) => taken.map(|layer| layer.diff_id),
            // The writer's only error is the broken pipe.
            (Err(e), Err(taken)) if broken_pipe(&e) => Err(taken),
            (Err(e), _) => Err(e),
        }
    })
}

fn broken_pipe(error: &ImageError) -> bool {
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            return io.kind() == std::io::ErrorKind::BrokenPipe;
        }
        cause = error.source();
    }
    false
}

/// An image of one layer that is a whole root filesystem.
fn root_image(
    import: &Import<'_>,
    layer: Digest,
    path: &Path,
    name: Option<&Reference>,
) -> Result<ImageId> {
    let from = path.file_name().unwrap_or_default().to_string_lossy();
    let now = now();
    let config = serde_json::json!({
        "created": now,
        "architecture": architecture(),
        "os": "linux",
        "config": {},
        "rootfs": { "type": "layers", "diff_ids": [layer.to_string()] },
        "history": [{ "created": now, "created_by": "dormouse import", "comment": from }],
    });
    import.image(NewImage { config: &to_json(&config)?, manifest: None, name })
}

/// The time as configurations have it (RFC 3339, seconds).
pub(crate) fn now() -> String {
    let now = time::OffsetDateTime::now_utc();
    let now = now.replace_nanosecond(0).unwrap_or(now);
    now.format(&time::format_description::well_known::Rfc3339).unwrap_or_default()
}

/// The machine in OCI's words, which are Go's.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" => "ppc64le",
        other => other,
    }
}

fn from_file(
    import: &Import<'_>,
    path: &Path,
    name: Option<&Reference>,
    contents: Contents,
    progress: &dyn Progress,
) -> Result<Vec<ImageId>> {
    let file = File::open(path).at("open", path)?;
    if !file.metadata().at("stat", path)?.is_file() {
        let what = format!("'{}' is neither a file nor a directory", path.display());
        return Err(Fault::Invalid { what }.into());
    }
    let mut head = [0; 512];
    let n = read_head(&file, &mut head).at("read", path)?;
    let packing = Packing::of(&head[..n])?;
    if packing == Packing::None {
        if let Some(files) = Files::archive(file.try_clone().at("open", path)?, path)? {
            return files.import(import, name, progress);
        }
    } else {
        // The first entry decides whether it is a root file system. An archive of an image would
        // have to be decompressed for more, and is.
        let stream = BufReader::new(file.try_clone().at("open", path)?);
        let mut inside = packing.decoder(stream).at("decompress", path)?;
        let mut head = [0; 512];
        inside.read_exact(&mut head).at("decompress", path)?;
        if looks_like_image(&head) {
            let plain = unpack(import.store, path, packing)?;
            if let Some(files) = Files::archive(plain, path)? {
                return files.import(import, name, progress);
            }
        }
    }
    if contents == Contents::Images {
        return Err(no_image(path));
    }
    let mut file = File::open(path).at("open", path)?;
    let bytes = file.metadata().at("stat", path)?.len();
    let expect = Expect { blob_bytes: Some(bytes), ..Expect::default() };
    let layer = import.layer(&mut file, expect, progress)?;
    Ok(vec![root_image(import, layer.diff_id, path, name)?])
}

fn read_head(file: &File, head: &mut [u8]) -> std::io::Result<usize> {
    let mut n = 0;
    while n < head.len() {
        match file.read_at(&mut head[n..], n as u64)? {
            0 => break,
            more => n += more,
        }
    }
    Ok(n)
}

/// Returns whether the first entry of an archive is one that archives of images begin with.
fn looks_like_image(head: &[u8; 512]) -> bool {
    let name = tar::Header::from_byte_slice(head).path_bytes().into_owned();
    let name = name.strip_prefix(b"./").unwrap_or(&name);
    let first = name.split(|b| *b == b'/').next().unwrap_or_default();
    let digits = first.strip_suffix(b".json").unwrap_or(first);
    [&b"blobs"[..], b"oci-layout", b"index.json", b"manifest.json", b"repositories"]
        .contains(&first)
        || (digits.len() == 64 && digits.iter().all(u8::is_ascii_hexdigit))
}

/// Decompresses an archive into a file without a name.
fn unpack(store: &Store, path: &Path, packing: Packing) -> Result<File> {
    let objects = Objects::new(store)?;
    let tmp = store.tmp_path();
    let file = File::options().read(true).write(true).create_new(true).open(&tmp);
    let file = file.at("create", &tmp)?;
    fs::remove_file(&tmp).at("remove", &tmp)?;
    let packed = File::open(path).at("open", path)?;
    // Both descriptors have one position.
    let mut position = packed.try_clone().at("open", path)?;
    let stream = BufReader::with_capacity(256 << 10, packed);
    let mut inside = packing.decoder(stream).at("decompress", path)?;
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    loop {
        let n = inside.read(&mut buffer).at("decompress", path)?;
        if n == 0 {
            return Ok(file);
        }
        check_expansion(position.stream_position().at("read", path)?, at + n as u64)?;
        objects.room_for(n as u64)?;
        file.write_all_at(&buffer[..n], at).at("write", &tmp)?;
        at += n as u64;
    }
}

/// Files by name: of a directory, or of an archive that is a plain file.
enum Files {
    Directory { dir: OwnedFd, path: PathBuf },
    Archive { file: File, path: PathBuf, index: HashMap<Vec<u8>, Place> },
}

/// The position of a file in an archive.
enum Place {
    At { offset: u64, length: u64 },
    Link { target: Vec<u8> },
}

impl Files {
    /// The index of an archive, if it is one of an image; `None` for another.
    fn archive(file: File, path: &Path) -> Result<Option<Self>> {
        let mut index = HashMap::new();
        let length = file.metadata().at("stat", path)?.len();
        let mut reader = Reader::new(Seeking { file, path, at: 0, length });
        let mut image = false;
        let mut budget = Budget::of_entries();
        while let Some(entry) = reader.next()? {
            budget.take(&entry)?;
            let here = reader.source.at;
            let place = match entry.kind {
                Kind::File { content, .. } => {
                    reader.source.at = here.saturating_add(content.length);
                    Place::At { offset: here, length: content.length }
                }
                Kind::Symlink { target } | Kind::HardLink { target } => Place::Link { target },
                _ => continue,
            };
            image |= matches!(&entry.path[..], b"oci-layout" | b"manifest.json");
            index.insert(entry.path, place);
            if index.len() > MAX_ENTRIES {
                let what = "the number of entries in the archive".to_owned();
                return Err(Fault::Limit { what, limit: MAX_ENTRIES as u64 }.into());
            }
            // A root file system: recognised without reading it to its end.
            if !image && index.len() > 4096 {
                return Ok(None);
            }
        }
        let Seeking { file, .. } = reader.source;
        let has = |name: &str| index.contains_key(name.as_bytes());
        let image = (has("oci-layout") && has("index.json")) || has("manifest.json");
        Ok(image.then(|| Self::Archive { file, path: path.to_owned(), index }))
    }

    fn import(
        &self,
        import: &Import<'_>,
        name: Option<&Reference>,
        progress: &dyn Progress,
    ) -> Result<Vec<ImageId>> {
        let layout = self.has("oci-layout") && self.has("index.json");
        match layout {
            true => from_layout(import, self, name, progress),
            false => from_docker(import, self, name, progress),
        }
    }

    fn path(&self) -> &Path {
        match self {
            Self::Directory { path, .. } | Self::Archive { path, .. } => path,
        }
    }

    fn has(&self, name: &str) -> bool {
        self.open(name).is_ok()
    }

    /// Opens a file for reading from its beginning; and its length.
    fn open(&self, name: &str) -> Result<(Box<dyn Read + '_>, u64)> {
        match self {
            Self::Directory { dir, path } => {
                let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
                let file =
                    dormouse_kernel::resolve::in_root(dir.as_fd(), name, flags, Mode::empty())
                        .step("open a file of the image layout")?;
                let file = File::from(file);
                let meta = file.metadata().at("stat", path.join(name))?;
                if !meta.is_file() {
                    let problem = format!("'{name}' is not a file");
                    return Err(self.bad(problem));
                }
                Ok((Box::new(file), meta.len()))
            }
            Self::Archive { file, index, .. } => {
                let mut name = name.as_bytes().to_vec();
                // docker's old archives keep a layer once and link to it.
                for _ in 0..8 {
                    match index.get(&name) {
                        Some(Place::At { offset, length }) => {
                            let at = ReadAt { file, at: *offset, end: offset + length };
                            return Ok((Box::new(at), *length));
                        }
                        Some(Place::Link { target }) => name = beside(&name, target),
                        None => break,
                    }
                }
                Err(self.bad(format!("it lacks '{}'", String::from_utf8_lossy(&name))))
            }
        }
    }

    fn bad(&self, problem: String) -> ImageError {
        Fault::Archive { what: format!("'{}'", self.path().display()), problem }.into()
    }

    /// A whole small file.
    fn read(&self, name: &str) -> Result<Vec<u8>> {
        let (reader, length) = self.open(name)?;
        if length > MAX_JSON {
            let what = format!("the size of '{name}' in the archive");
            return Err(Fault::Limit { what, limit: MAX_JSON }.into());
        }
        let mut bytes = Vec::new();
        reader.take(MAX_JSON).read_to_end(&mut bytes).at("read", self.path())?;
        Ok(bytes)
    }

    fn json<T: for<'de> Deserialize<'de>>(&self, what: &'static str, name: &str) -> Result<T> {
        let bytes = self.read(name)?;
        let path = self.path().join(name);
        serde_json::from_slice(&bytes).map_err(|source| Fault::Json { what, path, source }.into())
    }

    /// A blob of an OCI layout, compared with its digest.
    fn blob(&self, digest: &Digest) -> Result<Vec<u8>> {
        let bytes = self.read(&blob_name(digest))?;
        let found = Digest::of(&bytes);
        if found != *digest {
            let (expected, found) = (digest.to_string(), found.to_string());
            let what = format!("a blob of '{}'", self.path().display());
            return Err(Fault::Digest { what, expected, found }.into());
        }
        Ok(bytes)
    }
}

fn blob_name(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// A link's target, which is relative to the directory that the link is in.
fn beside(name: &[u8], target: &[u8]) -> Vec<u8> {
    let mut parts: Vec<&[u8]> = match target.starts_with(b"/") {
        true => Vec::new(),
        false => name.split(|b| *b == b'/').collect(),
    };
    parts.pop();
    for part in target.split(|b| *b == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    parts.join(&b'/')
}

/// Imports the images of an OCI layout.
fn from_layout(
    import: &Import<'_>,
    files: &Files,
    name: Option<&Reference>,
    progress: &dyn Progress,
) -> Result<Vec<ImageId>> {
    let index: ImageIndex = files.json("OCI index", "index.json")?;
    // The names of each manifest in the index, and its digest.
    let mut found: Vec<(Vec<Reference>, Digest, Vec<u8>)> = Vec::new();
    for descriptor in index.manifests() {
        let annotations = descriptor.annotations().clone().unwrap_or_default();
        let names = ["io.containerd.image.name", "org.opencontainers.image.ref.name"]
            .iter()
            .filter_map(|key| annotations.get(*key))
            // A tag alone is not a name.
            .filter(|name| name.contains([':', '/']))
            .filter_map(|name| name.parse().ok())
            .take(1)
            .collect();
        let digest = descriptor.digest().to_string().parse()?;
        if let Some((digest, manifest)) = manifest_of(files, digest, 0)? {
            match found.iter_mut().find(|(_, other, _)| *other == digest) {
                Some((known, ..)) => known.extend::<Vec<Reference>>(names),
                None => found.push((names, digest, manifest)),
            }
        }
    }
    let named: Vec<_> = match name {
        Some(name) if found.len() > 1 => {
            let problem = format!("it holds {} images, which cannot all be '{name}'", found.len());
            return Err(files.bad(problem));
        }
        Some(name) => found.into_iter().map(|(_, _, m)| (vec![name.clone()], m)).collect(),
        None => found.into_iter().map(|(names, _, m)| (names, m)).collect(),
    };
    let mut ids = Vec::new();
    for (names, bytes) in named {
        let manifest = parse_manifest(files, &bytes)?;
        let config = files.blob(&manifest.config().digest().to_string().parse()?)?;
        let diff_ids = diff_ids(files, &config)?;
        if diff_ids.len() != manifest.layers().len() {
            let problem = "its configuration and its manifest list different numbers of layers";
            return Err(files.bad(problem.to_owned()));
        }
        for (descriptor, diff_id) in manifest.layers().iter().zip(&diff_ids) {
            if import.has_layer(diff_id) {
                continue;
            }
            let blob: Digest = descriptor.digest().to_string().parse()?;
            let (mut reader, length) = files.open(&blob_name(&blob))?;
            let expect =
                Expect { blob: Some(blob), blob_bytes: Some(length), diff_id: Some(*diff_id) };
            import.layer(&mut *reader, expect, progress)?;
        }
        let image = NewImage { config: &config, manifest: Some(&bytes), name: names.first() };
        let id = import.image(image)?;
        for name in names.iter().skip(1) {
            import.store.name(&id, name)?;
        }
        ids.push(id);
    }
    if ids.is_empty() {
        return Err(files.bad(format!("it holds no image for linux on {}", architecture())));
    }
    Ok(ids)
}

/// The manifest with this digest, or the one for this machine of the index with this digest.
fn manifest_of(files: &Files, digest: Digest, depth: usize) -> Result<Option<(Digest, Vec<u8>)>> {
    let bytes = files.blob(&digest)?;
    #[derive(Deserialize)]
    struct Either {
        manifests: Option<serde_json::Value>,
    }
    let either: Either = serde_json::from_slice(&bytes).map_err(|source| Fault::Json {
        what: "OCI manifest",
        path: files.path().to_owned(),
        source,
    })?;
    if either.manifests.is_none() {
        return Ok(Some((digest, bytes)));
    }
    if depth >= MAX_NESTING {
        return Err(files.bad("its indexes are nested too deep".to_owned()));
    }
    let index: ImageIndex = serde_json::from_slice(&bytes).map_err(|source| Fault::Json {
        what: "OCI index",
        path: files.path().to_owned(),
        source,
    })?;
    for descriptor in index.manifests() {
        let ours = descriptor.platform().as_ref().is_none_or(|platform| {
            platform.os().to_string() == "linux"
                && platform.architecture().to_string() == architecture()
        });
        if ours {
            return manifest_of(files, descriptor.digest().to_string().parse()?, depth + 1);
        }
    }
    Ok(None)
}

fn parse_manifest(files: &Files, bytes: &[u8]) -> Result<ImageManifest> {
    serde_json::from_slice(bytes).map_err(|source| {
        Fault::Json { what: "OCI manifest", path: files.path().to_owned(), source }.into()
    })
}

fn diff_ids(files: &Files, config: &[u8]) -> Result<Vec<Digest>> {
    let config: oci_spec::image::ImageConfiguration =
        serde_json::from_slice(config).map_err(|source| Fault::Json {
            what: "image configuration",
            path: files.path().to_owned(),
            source,
        })?;
    config.rootfs().diff_ids().iter().map(|d| d.parse()).collect()
}

/// One image of `manifest.json` as `docker save` writes it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerImage {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

/// Imports the images of a docker archive.
fn from_docker(
    import: &Import<'_>,
    files: &Files,
    name: Option<&Reference>,
    progress: &dyn Progress,
) -> Result<Vec<ImageId>> {
    let images: Vec<DockerImage> = files.json("docker manifest", "manifest.json")?;
    if let Some(name) = name.filter(|_| images.len() > 1) {
        let problem = format!("it holds {} images, which cannot all be '{name}'", images.len());
        return Err(files.bad(problem));
    }
    let mut ids = Vec::new();
    for image in images {
        let config = files.read(&image.config)?;
        let diff_ids = diff_ids(files, &config)?;
        if diff_ids.len() != image.layers.len() {
            let problem = "its configuration and its manifest list different numbers of layers";
            return Err(files.bad(problem.to_owned()));
        }
        for (layer, diff_id) in image.layers.iter().zip(&diff_ids) {
            if !import.has_layer(diff_id) {
                let (mut reader, length) = files.open(layer)?;
                let expect =
                    Expect { blob: None, blob_bytes: Some(length), diff_id: Some(*diff_id) };
                import.layer(&mut *reader, expect, progress)?;
            }
        }
        let id = import.image(NewImage { config: &config, manifest: None, name })?;
        if name.is_none() {
            for tag in image.repo_tags.unwrap_or_default() {
                if let Ok(name) = tag.parse() {
                    import.store.name(&id, &name)?;
                }
            }
        }
        ids.push(id);
    }
    if ids.is_empty() {
        return Err(files.bad("it holds no image".to_owned()));
    }
    Ok(ids)
}

/// Reads the headers of an archive and seeks over the data.
struct Seeking<'p> {
    file: File,
    path: &'p Path,
    at: u64,
    length: u64,
}

impl Source for Seeking<'_> {
    fn data(&mut self, _limit: usize) -> Result<&[u8]> {
        Ok(&[])
    }

    fn raw(&mut self, buffer: &mut [u8]) -> Result<bool> {
        if self.at == self.length && !buffer.is_empty() {
            return Ok(false);
        }
        if self.length.saturating_sub(self.at) < buffer.len() as u64 {
            let problem = "it ends in the middle of an entry".to_owned();
            return Err(Fault::Archive { what: "the archive".to_owned(), problem }.into());
        }
        self.file.read_exact_at(buffer, self.at).at("read the archive", self.path)?;
        self.at += buffer.len() as u64;
        Ok(true)
    }
}

/// A part of a file as a stream.
struct ReadAt<'f> {
    file: &'f File,
    at: u64,
    end: u64,
}

impl Read for ReadAt<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let n = (self.end - self.at).min(buffer.len() as u64) as usize;
        let n = self.file.read_at(&mut buffer[..n], self.at)?;
        self.at += n as u64;
        Ok(n)
    }
}

/// A pipe between two threads.
pub(crate) fn pipe() -> (ChannelWriter, ChannelReader) {
    let (to, from) = sync_channel(8);
    let buffer = Vec::with_capacity(ChannelWriter::CHUNK);
    (ChannelWriter { chunks: to, buffer }, ChannelReader { chunks: from, chunk: Vec::new(), at: 0 })
}

/// The end that is written to.
#[derive(Debug)]
pub(crate) struct ChannelWriter {
    chunks: SyncSender<Result<Vec<u8>, ()>>,
    buffer: Vec<u8>,
}

impl ChannelWriter {
    const CHUNK: usize = 256 << 10;
}

impl std::io::Write for ChannelWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let n = bytes.len().min(Self::CHUNK - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..n]);
        if self.buffer.len() == Self::CHUNK {
            self.flush()?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let full = std::mem::replace(&mut self.buffer, Vec::with_capacity(Self::CHUNK));
        self.chunks.send(Ok(full)).map_err(|_| std::io::ErrorKind::BrokenPipe.into())
    }
}

/// The end that is read from.
#[derive(Debug)]
pub(crate) struct ChannelReader {
    chunks: Receiver<Result<Vec<u8>, ()>>,
    chunk: Vec<u8>,
    at: usize,
}

impl Read for ChannelReader {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.at == self.chunk.len() {
            match self.chunks.recv() {
                Ok(Ok(chunk)) => (self.chunk, self.at) = (chunk, 0),
                Ok(Err(())) => return Err(std::io::Error::other("the writer of the layer failed")),
                Err(_) => return Ok(0),
            }
        }
        let n = (&self.chunk[self.at..]).read(buffer)?;
        self.at += n;
        Ok(n)
    }
}
