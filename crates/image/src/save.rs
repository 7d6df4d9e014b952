//! Export of images: tars of layers, and archives.

use std::collections::HashSet;
use std::io::{self, Write};

use serde_json::json;
use sha2::Digest as _;

use crate::digest::Digest;
use crate::error::{At, Fault, Result};
use crate::progress::Progress;
use crate::store::{Image, Store, to_json};

/// Compression of a written layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Not.
    None,
    /// gzip, level 6: readable by every registry and engine.
    Gzip,
    /// zstd, level 3: faster and smaller.
    Zstd,
}

/// A layer as it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blob {
    /// Digest of what was written.
    pub digest: Digest,
    /// Its length.
    pub bytes: u64,
    /// Its OCI media type.
    pub media_type: &'static str,
}

/// The kinds of archive that `save` writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveFormat {
    /// An OCI image layout in a tar, with docker's `manifest.json` beside it: both sides load it.
    OciArchive,
}

/// Hashes and counts the bytes written.
struct Hashed<'w> {
    out: &'w mut dyn Write,
    hasher: sha2::Sha256,
    bytes: u64,
}

impl Write for Hashed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.out.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl Store {
    /// Writes the tar of a layer, byte for byte as it was imported (its digest is `diff_id`), with
    /// the requested compression. The same layer gives the same bytes every time.
    pub fn layer_blob(
        &self,
        diff_id: &Digest,
        compression: Compression,
        out: &mut dyn Write,
    ) -> Result<Blob> {
        let layer = self.layer(diff_id)?;
        let mut hashed = Hashed { out, hasher: sha2::Sha256::new(), bytes: 0 };
        let step = "write a layer";
        let media_type = match compression {
            Compression::None => {
                layer.write_tar(self, &mut hashed)?;
                "application/vnd.oci.image.layer.v1.tar"
            }
            Compression::Gzip => {
                let mut gzip =
                    flate2::write::GzEncoder::new(&mut hashed, flate2::Compression::new(6));
                layer.write_tar(self, &mut gzip)?;
                gzip.finish().at(step, "stream")?;
                "application/vnd.oci.image.layer.v1.tar+gzip"
            }
            Compression::Zstd => {
                let mut zstd = zstd::Encoder::new(&mut hashed, 3).at(step, "stream")?;
                layer.write_tar(self, &mut zstd)?;
                zstd.finish().at(step, "stream")?;
                "application/vnd.oci.image.layer.v1.tar+zstd"
            }
        };
        hashed.flush().at(step, "stream")?;
        let digest = Digest::from_bytes(hashed.hasher.finalize().into());
        Ok(Blob { digest, bytes: hashed.bytes, media_type })
    }

    /// The configuration of an image, byte for byte.
    pub fn config_bytes(&self, image: &Image) -> Result<Vec<u8>> {
        let path = self.image_dir(&image.id).join("config.json");
        std::fs::read(&path).at("read", path)
    }

    /// Writes images as one archive that docker, podman, skopeo and [`Store::import`] read. Layers
    /// are in it once and uncompressed: so their digests are the diffIDs, their lengths are known
    /// before they are written, and nothing is written twice; compress the whole where size
    /// matters.
    ///
    /// The names written are [`Image::names`]. A caller that saves one of them leaves only that one
    /// there: skopeo and podman accept an archive without a given name if it contains one name.
    pub fn save(
        &self,
        images: &[Image],
        format: SaveFormat,
        out: &mut dyn Write,
        progress: &dyn Progress,
    ) -> Result<()> {
        let SaveFormat::OciArchive = format;
        // Holds the lock that prevents a sweep.
        let _import = self.begin()?;
        let mut archive = Archive { out };
        let mut written = HashSet::new();
        let mut index = Vec::new();
        let mut docker = Vec::new();
        archive.file("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        for image in images {
            let mut layers = Vec::new();
            for layer in &image.layers {
                if written.insert(layer.diff_id) {
                    archive.layer(self, &layer.diff_id, layer.tar_bytes, progress)?;
                }
                layers.push(layer.diff_id);
            }
            let config = self.config_bytes(image)?;
            let manifest = to_json(&json!({
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": descriptor(CONFIG, &Digest::of(&config), config.len() as u64),
                "layers": image
                    .layers
                    .iter()
                    .map(|layer| descriptor(TAR, &layer.diff_id, layer.tar_bytes))
                    .collect::<Vec<_>>(),
            }))?;
            for blob in [&config, &manifest] {
                let digest = Digest::of(blob);
                if written.insert(digest) {
                    archive.file(&blob_path(&digest), blob)?;
                }
            }
            let digest = Digest::of(&manifest);
            let entry = descriptor(MANIFEST, &digest, manifest.len() as u64);
            // A name by digest cannot be given to another image.
            let names: Vec<_> = image.names.iter().filter(|name| name.digest.is_none()).collect();
            for name in &names {
                let mut entry = entry.clone();
                entry["annotations"] = json!({
                    "io.containerd.image.name": name.to_string(),
                    "org.opencontainers.image.ref.name": name.tag,
                });
                index.push(entry);
            }
            if names.is_empty() {
                index.push(entry);
            }
            docker.push(json!({
                "Config": blob_path(&Digest::of(&config)),
                "RepoTags": names.iter().map(|name| name.to_string()).collect::<Vec<_>>(),
                "Layers": layers.iter().map(blob_path).collect::<Vec<_>>(),
            }));
        }
        let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": index });
        archive.file("index.json", &to_json(&index)?)?;
        archive.file("manifest.json", &to_json(&docker)?)?;
        archive.end()
    }
}

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const TAR: &str = "application/vnd.oci.image.layer.v1.tar";

fn descriptor(media_type: &str, digest: &Digest, size: u64) -> serde_json::Value {
    json!({ "mediaType": media_type, "digest": digest, "size": size })
}

fn blob_path(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// A tar of regular files, the same for the same content.
struct Archive<'w> {
    out: &'w mut dyn Write,
}

impl Archive<'_> {
    fn file(&mut self, path: &str, bytes: &[u8]) -> Result<()> {
        self.header(path, bytes.len() as u64)?;
        self.write(bytes)?;
        self.pad(bytes.len() as u64)
    }

    fn layer(
        &mut self,
        store: &Store,
        diff_id: &Digest,
        bytes: u64,
        progress: &dyn Progress,
    ) -> Result<()> {
        self.header(&blob_path(diff_id), bytes)?;
        let task = progress.start(&format!("layer {}", &diff_id.hex()[..12]), Some(bytes));
        let mut out = Counted { out: self.out, progress, task };
        let written = store.layer_blob(diff_id, Compression::None, &mut out);
        progress.finish(task);
        let blob = written?;
        if blob.digest != *diff_id || blob.bytes != bytes {
            let what = format!("layer {}", diff_id.hex());
            let problem = "its tar does not come out as it went in".to_owned();
            return Err(Fault::Damaged { what, problem }.into());
        }
        self.pad(bytes)
    }

    fn header(&mut self, path: &str, bytes: u64) -> Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_path(path).at("name an entry of the archive", path)?;
        header.set_size(bytes);
        header.set_mode(0o444);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_cksum();
        self.write(header.as_bytes())
    }

    fn pad(&mut self, bytes: u64) -> Result<()> {
        let zeros = [0; 512];
        self.write(&zeros[..bytes.next_multiple_of(512).wrapping_sub(bytes) as usize])
    }

    fn end(mut self) -> Result<()> {
        self.write(&[0; 1024])?;
        self.out.flush().at("write", "the archive")
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).at("write", "the archive")
    }
}

/// Reports how many bytes have passed.
struct Counted<'w> {
    out: &'w mut dyn Write,
    progress: &'w dyn Progress,
    task: u64,
}

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.out.write(bytes)?;
        self.progress.advance(self.task, n as u64);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Metadata, Silent};

    fn tar_of(names: &[&str]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for name in names {
            let mut header = tar::Header::new_ustar();
            header.set_size(1000);
            header.set_mode(0o644);
            header.set_uid(0);
            header.set_gid(0);
            header.set_mtime(1);
            builder.append_data(&mut header, name, &[7; 1000][..]).unwrap();
        }
        builder.into_inner().unwrap()
    }

    #[test]
    fn saved_image_is_imported_with_names_and_the_same_layers() {
        let dir = tempfile::tempdir().unwrap();
        let at = |sub: &str| dir.path().join(sub);
        let open = |sub: &str| {
            Store::open_with(&at(sub), &at(&format!("{sub}-run")), Metadata::Stub).unwrap()
        };
        let store = open("a");
        let mut images = Vec::new();
        for (file, names) in [("one", &["x/one:1", "two:2"][..]), ("three", &["h.example/t:3"])] {
            std::fs::write(at("in.tar"), tar_of(&["etc/passwd", file])).unwrap();
            let id = store.import(&at("in.tar"), None, &Silent).unwrap();
            for name in names {
                let image = store.find(&id).unwrap();
                store.tag(&image, &name.parse().unwrap()).unwrap();
            }
            images.push(store.find(&id).unwrap());
        }
        let save = || {
            let mut saved = Vec::new();
            store.save(&images, SaveFormat::OciArchive, &mut saved, &Silent).unwrap();
            saved
        };
        let saved = save();
        assert!(saved == save(), "the same images give the same archive");
        std::fs::write(at("saved.tar"), &saved).unwrap();
        let other = open("b");
        other.import(&at("saved.tar"), None, &Silent).unwrap();
        for image in &images {
            let back = other.find(&image.id).unwrap();
            assert_eq!(back.names, image.names);
            assert_eq!(back.layers, image.layers);
        }
        // One image by a chosen name.
        let mut saved = Vec::new();
        store.save(&images[..1], SaveFormat::OciArchive, &mut saved, &Silent).unwrap();
        std::fs::write(at("saved.tar"), &saved).unwrap();
        let other = open("c");
        let name = "mine:1".parse().unwrap();
        assert_eq!(other.import(&at("saved.tar"), Some(&name), &Silent).unwrap(), images[0].id);
        assert_eq!(other.find("mine:1").unwrap().names, [name]);
    }
}
