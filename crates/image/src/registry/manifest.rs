//! Manifests: which kinds are accepted, how large they may be, which platform is taken.

use std::fmt;
use std::str::FromStr;

use dormouse_model::{Invalid, Reference};
use reqwest::Method;
use reqwest::header::{ACCEPT, CONTENT_TYPE};
use serde::{Deserialize, Serialize};

use super::client::{Client, Request};
use super::error::{Failure, plain};
use crate::digest::Digest;

pub(super) const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(super) const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(super) const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";
const ACCEPTED: [&str; 4] = [OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST];

/// The media types of a layer. The compression is recognised by the bytes; the type only marks a
/// layer. `nondistributable` and `foreign` ones are requested from the registry like all others.
const LAYERS: [&str; 9] = [
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd",
    "application/vnd.oci.image.layer.nondistributable.v1.tar",
    "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
    "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
];

/// LIMIT: bytes of a manifest or index.
pub(super) const MANIFEST_MAX_BYTES: u64 = 4 << 20;
/// LIMIT: bytes of a configuration.
pub(super) const CONFIG_MAX_BYTES: u64 = 8 << 20;
/// LIMIT: layers of an image; overlayfs itself takes 500.
pub(super) const LAYERS_MAX: usize = 512;
/// LIMIT: bytes of one layer as it comes.
pub(super) const LAYER_MAX_BYTES: u64 = 1 << 40;
/// LIMIT: images of an index.
const INDEX_MAX: usize = 4096;

/// The target of programs: `os/architecture[/variant]` in Go's terms.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Platform {
    /// `linux`; nothing else can run here.
    pub os: String,
    /// `amd64`, `arm64`, `arm`, `386`, `ppc64le`, `riscv64`, `s390x`, ...
    pub architecture: String,
    /// `v7` of `arm/v7`.
    pub variant: Option<String>,
}

impl Platform {
    /// Returns the platform of this machine.
    pub fn host() -> Self {
        let (architecture, variant) = match std::env::consts::ARCH {
            "x86_64" => ("amd64", None),
            "x86" => ("386", None),
            "aarch64" => ("arm64", Some("v8")),
            "arm" => ("arm", Some("v7")),
            "powerpc64" if cfg!(target_endian = "little") => ("ppc64le", None),
            "powerpc64" => ("ppc64", None),
            "mips64" if cfg!(target_endian = "little") => ("mips64le", None),
            "loongarch64" => ("loong64", None),
            other => (other, None),
        };
        Self {
            os: "linux".into(),
            architecture: architecture.into(),
            variant: variant.map(str::to_owned),
        }
    }

    /// Rates an image of `offer`: 0 is best, `None` does not fit.
    fn rank(&self, offer: &Offer) -> Option<u32> {
        if offer.os != self.os || offer.architecture != self.architecture {
            return None;
        }
        let number = |variant: &Option<String>| -> Option<u32> {
            variant.as_deref()?.strip_prefix('v')?.parse().ok()
        };
        let basis = match self.architecture.as_str() {
            "amd64" => Some(1),
            "arm64" => Some(8),
            "arm" => Some(7),
            _ => None,
        };
        match (number(&self.variant).or(basis), number(&offer.variant).or(basis)) {
            (Some(mine), Some(theirs)) => mine.checked_sub(theirs),
            _ if self.variant == offer.variant => Some(0),
            _ if offer.variant.is_none() || self.variant.is_none() => Some(1),
            _ => None,
        }
    }
}

impl FromStr for Platform {
    type Err = Invalid;

    /// Reads `linux/amd64`, `linux/arm/v7` or just `amd64`.
    fn from_str(s: &str) -> Result<Self, Invalid> {
        let bad = || Invalid::new("platform", s, "[linux/]ARCHITECTURE[/VARIANT]");
        let parts: Vec<&str> = s.split('/').collect();
        let (os, architecture, variant) = match parts[..] {
            [architecture] => ("linux", architecture, None),
            [os, architecture] => (os, architecture, None),
            [os, architecture, variant] => (os, architecture, Some(variant)),
            _ => return Err(bad()),
        };
        let word =
            |w: &str| !w.is_empty() && w.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        if os != "linux" || !word(architecture) || !variant.is_none_or(word) {
            return Err(bad());
        }
        let (architecture, variant) = match (architecture, variant) {
            ("x86_64", v) => ("amd64", v),
            ("aarch64", v) => ("arm64", v),
            ("armhf", None) => ("arm", Some("v7")),
            other => other,
        };
        Ok(Self {
            os: os.into(),
            architecture: architecture.into(),
            variant: variant.map(str::to_owned),
        })
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        match &self.variant {
            Some(variant) => write!(f, "/{variant}"),
            None => Ok(()),
        }
    }
}

/// A platform in an index.
#[derive(Debug, Clone, Default, Deserialize)]
struct Offer {
    #[serde(default)]
    os: String,
    #[serde(default)]
    architecture: String,
    variant: Option<String>,
}

/// A manifest's description of a blob.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Descriptor {
    pub media_type: String,
    pub digest: String,
    pub size: u64,
}

/// All fields of all accepted manifests; the present ones distinguish them.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Any {
    #[serde(default)]
    schema_version: u32,
    media_type: Option<String>,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
    manifests: Option<Vec<Entry>>,
    #[serde(rename = "fsLayers")]
    fs_layers: Option<serde_json::Value>,
}

#[derive(Debug, Deserialize)]
struct Entry {
    #[serde(flatten)]
    at: Descriptor,
    platform: Option<Offer>,
}

/// A layer or configuration to be fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blob {
    pub digest: Digest,
    pub bytes: u64,
}

/// A manifest of one image, checked.
#[derive(Debug)]
pub(super) struct Manifest {
    /// As it came.
    pub bytes: Vec<u8>,
    pub config: Blob,
    pub layers: Vec<(Blob, String)>,
}

/// The result of parsing a manifest.
enum Parsed {
    Image { config: Blob, layers: Vec<(Blob, String)> },
    Index(Vec<Entry>),
}

impl Client {
    /// Fetches the manifest that a name leads to; of an index, that of the platform.
    pub async fn manifest(
        &self,
        reference: &Reference,
        wanted: Option<&Platform>,
    ) -> Result<Manifest, Failure> {
        let host = Platform::host();
        let platform = wanted.unwrap_or(&host);
        let which = reference.digest.as_ref().or(reference.tag.as_ref());
        let which = which.map_or("latest", String::as_str);
        let expected = match &reference.digest {
            Some(digest) => Some((parse_digest(&self.place.registry, digest)?, None)),
            None => None,
        };
        let (bytes, parsed) = self.manifest_at(which, expected).await?;
        let entries = match parsed {
            Parsed::Image { config, layers } => return Ok(Manifest { bytes, config, layers }),
            Parsed::Index(entries) => entries,
        };
        let entry = choose(&entries, platform).ok_or_else(|| Failure::Platform {
            reference: reference.to_string(),
            wanted: platform.to_string(),
            offered: offered(&entries),
        })?;
        let digest = parse_digest(&self.place.registry, &entry.at.digest)?;
        let (bytes, parsed) =
            self.manifest_at(&entry.at.digest, Some((digest, Some(entry.at.size)))).await?;
        match parsed {
            Parsed::Image { config, layers } => Ok(Manifest { bytes, config, layers }),
            // Not followed: an index of indexes may be of any depth, or circular.
            Parsed::Index(_) => Err(Failure::Unsupported {
                what: format!("{reference} is an index of indexes, which is not supported"),
            }),
        }
    }

    /// Fetches and checks one manifest.
    async fn manifest_at(
        &self,
        which: &str,
        expected: Option<(Digest, Option<u64>)>,
    ) -> Result<(Vec<u8>, Parsed), Failure> {
        let what = format!("manifest of {}:{which}", self.place.repository);
        let url = self.url(&format!("manifests/{which}"));
        let request = Request::new(Method::GET, url, &what).header(ACCEPT, ACCEPTED.join(", "));
        let mut failures = 0;
        let (bytes, kind, stated) = loop {
            let response = self.send(&request).await?;
            let header = |name: &str| {
                let value = response.headers().get(name)?.to_str().ok()?;
                Some(value.split(';').next().unwrap_or(value).trim().to_owned())
            };
            let (kind, stated) = (header(CONTENT_TYPE.as_str()), header("docker-content-digest"));
            match self.read(response, MANIFEST_MAX_BYTES, &what).await {
                Ok(bytes) => break (bytes, kind, stated),
                Err(failure) if failure.is_passing() && failures < 3 => {
                    failures += 1;
                    self.wait(failures, failure).await?;
                }
                Err(failure) => return Err(failure),
            }
        };
        let found = Digest::of(&bytes);
        let mismatch = |expected: String| Failure::Digest {
            registry: self.place.registry.clone(),
            what: format!("the {what}"),
            expected,
            found: found.to_string(),
        };
        if let Some((digest, size)) = expected {
            if digest != found {
                return Err(mismatch(digest.to_string()));
            }
            if size.is_some_and(|size| size != bytes.len() as u64) {
                return Err(self.malformed(&what, "the index states another size for it"));
            }
        } else if let Some(stated) = stated
            && stated.starts_with("sha256:")
            && stated != found.to_string()
        {
            return Err(mismatch(plain(&stated)));
        }
        let parsed = parse(&self.place.registry, &bytes, kind.as_deref(), &what)?;
        Ok((bytes, parsed))
    }
}

/// Determines the type of a manifest, and refuses an ambiguous one (CVE-2021-41190).
fn parse(registry: &str, bytes: &[u8], kind: Option<&str>, what: &str) -> Result<Parsed, Failure> {
    let bad = |problem: String| Failure::malformed(registry, what, plain(&problem));
    let any: Any = serde_json::from_slice(bytes).map_err(|e| bad(e.to_string()))?;
    let kind = any.media_type.as_deref().or(kind.filter(|k| ACCEPTED.contains(k)));
    if any.fs_layers.is_some() || any.schema_version == 1 {
        return Err(Failure::Unsupported {
            what: format!(
                "the {what} is in schema 1, given up in 2019 and not supported: push the image \
                 again with a newer program"
            ),
        });
    }
    if any.schema_version != 2 {
        return Err(bad(format!("schema version {}", any.schema_version)));
    }
    let is_index = matches!(kind, Some(OCI_INDEX | DOCKER_LIST));
    let is_image = matches!(kind, Some(OCI_MANIFEST | DOCKER_MANIFEST));
    match (any.manifests, any.config, any.layers) {
        (Some(entries), None, None) if !is_image => {
            if let Some(kind) = kind.filter(|_| !is_index) {
                return Err(unknown_kind(what, kind));
            }
            match entries.len() {
                0..=INDEX_MAX => Ok(Parsed::Index(entries)),
                n => Err(bad(format!("an index of {n} images; {INDEX_MAX} is the limit"))),
            }
        }
        (None, Some(config), Some(layers)) if !is_index => {
            if let Some(kind) = kind.filter(|_| !is_image) {
                return Err(unknown_kind(what, kind));
            }
            if !matches!(config.media_type.as_str(), OCI_CONFIG | DOCKER_CONFIG) {
                return Err(Failure::Unsupported {
                    what: format!(
                        "the {what} is not a container image but a {}",
                        plain(&config.media_type)
                    ),
                });
            }
            if layers.len() > LAYERS_MAX {
                return Err(bad(format!("{} layers; {LAYERS_MAX} is the limit", layers.len())));
            }
            let config = blob(registry, &config, CONFIG_MAX_BYTES, "configuration")?;
            let layers = layers
                .into_iter()
                .map(|layer| match LAYERS.contains(&layer.media_type.as_str()) {
                    true => {
                        Ok((blob(registry, &layer, LAYER_MAX_BYTES, "layer")?, layer.media_type))
                    }
                    false => Err(Failure::Unsupported {
                        what: format!(
                            "the {what} has a layer of type '{}', which is not supported",
                            plain(&layer.media_type)
                        ),
                    }),
                })
                .collect::<Result<_, _>>()?;
            Ok(Parsed::Image { config, layers })
        }
        _ => match kind {
            Some(kind) if !is_index && !is_image => Err(unknown_kind(what, kind)),
            _ => Err(bad("neither the manifest of one image nor an index".into())),
        },
    }
}

/// LIMIT: the size of a blob in a manifest.
fn blob(registry: &str, at: &Descriptor, max_bytes: u64, what: &str) -> Result<Blob, Failure> {
    if at.size > max_bytes {
        return Err(Failure::TooLarge {
            registry: registry.to_owned(),
            what: format!("a {what}"),
            limit: max_bytes,
        });
    }
    Ok(Blob { digest: parse_digest(registry, &at.digest)?, bytes: at.size })
}

fn unknown_kind(what: &str, kind: &str) -> Failure {
    let kind = plain(kind);
    Failure::Unsupported { what: format!("the {what} is of type '{kind}', which is not supported") }
}

fn parse_digest(registry: &str, digest: &str) -> Result<Digest, Failure> {
    digest.parse().map_err(|_| {
        let problem = format!("'{}' is not a sha256 digest", plain(digest));
        Failure::malformed(registry, "the manifest", problem)
    })
}

/// The best image for a platform; one that names no platform where it is the only one.
fn choose<'e>(entries: &'e [Entry], platform: &Platform) -> Option<&'e Entry> {
    let ranked =
        entries.iter().filter_map(|entry| Some((platform.rank(entry.platform.as_ref()?)?, entry)));
    if let Some((_, entry)) = ranked.min_by_key(|(rank, _)| *rank) {
        return Some(entry);
    }
    let mut nameless = entries.iter().filter(|e| e.platform.is_none());
    nameless.next().filter(|_| nameless.next().is_none())
}

fn offered(entries: &[Entry]) -> String {
    let mut all: Vec<String> = entries
        .iter()
        .filter_map(|entry| {
            let Offer { os, architecture, variant } = entry.platform.as_ref()?;
            // Attestations are listed as unknown/unknown.
            if os == "unknown" {
                return None;
            }
            let variant = variant.as_ref().map_or(String::new(), |v| format!("/{v}"));
            Some(plain(&format!("{os}/{architecture}{variant}")))
        })
        .take(16)
        .collect();
    all.dedup();
    match all.is_empty() {
        true => "no platform at all".into(),
        false => all.join(", "),
    }
}

/// The fields of a configuration that are read here; the store reads the rest.
#[derive(Debug, Deserialize)]
pub(super) struct ConfigHead {
    #[serde(default)]
    pub os: String,
    #[serde(default)]
    pub architecture: String,
    #[serde(default)]
    pub variant: Option<String>,
    pub rootfs: Rootfs,
}

#[derive(Debug, Deserialize)]
pub(super) struct Rootfs {
    pub diff_ids: Vec<Digest>,
}

impl ConfigHead {
    /// Returns whether it runs on `platform`; true if the configuration names no platform.
    pub fn serves(&self, platform: &Platform) -> bool {
        let offer = Offer {
            os: self.os.clone(),
            architecture: self.architecture.clone(),
            variant: self.variant.clone().filter(|v| !v.is_empty()),
        };
        (offer.os.is_empty() || offer.os == platform.os)
            && (offer.architecture.is_empty() || offer.architecture == platform.architecture)
    }
}

/// For the fuzzer: a manifest and a configuration of an untrusted registry.
pub(crate) fn fuzz(bytes: &[u8]) {
    let Some((first, rest)) = bytes.split_first() else { return };
    let kind = ACCEPTED.get(usize::from(*first)).copied();
    match parse("registry.example", rest, kind, "manifest") {
        Ok(Parsed::Image { config, layers }) => {
            assert!(config.bytes <= CONFIG_MAX_BYTES && layers.len() <= LAYERS_MAX);
            assert!(layers.iter().all(|(layer, _)| layer.bytes <= LAYER_MAX_BYTES));
        }
        Ok(Parsed::Index(entries)) => {
            assert!(entries.len() <= INDEX_MAX);
            let chosen = choose(&entries, &Platform::host());
            assert!(chosen.is_some() || entries.len() != 1 || entries[0].platform.is_some());
            assert!(!offered(&entries).chars().any(char::is_control));
        }
        Err(failure) => assert!(!failure.to_string().chars().any(char::is_control)),
    }
    if let Ok(head) = serde_json::from_slice::<ConfigHead>(rest) {
        let _ = head.serves(&Platform::host()); // either answer is one
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(os: &str, architecture: &str, variant: Option<&str>, digest: &str) -> Entry {
        Entry {
            at: Descriptor { media_type: OCI_MANIFEST.into(), digest: digest.into(), size: 1 },
            platform: Some(Offer {
                os: os.into(),
                architecture: architecture.into(),
                variant: variant.map(str::to_owned),
            }),
        }
    }

    #[test]
    fn the_nearest_variant_is_chosen() {
        let entries = [
            entry("windows", "amd64", None, "windows"),
            entry("linux", "amd64", Some("v3"), "amd64v3"),
            entry("linux", "amd64", None, "amd64"),
            entry("linux", "arm", Some("v5"), "v5"),
            entry("linux", "arm", Some("v6"), "v6"),
            entry("linux", "arm64", Some("v8"), "arm64"),
            entry("unknown", "unknown", None, "attestation"),
        ];
        for (platform, digest) in [
            ("linux/amd64", Some("amd64")),
            ("amd64/v3", None),
            ("linux/amd64/v3", Some("amd64v3")),
            ("linux/amd64/v2", Some("amd64")),
            ("linux/arm/v7", Some("v6")),
            ("linux/arm/v5", Some("v5")),
            ("linux/arm64", Some("arm64")),
            ("aarch64", Some("arm64")),
            ("linux/riscv64", None),
        ] {
            let Ok(platform) = platform.parse() else {
                assert_eq!(digest, None);
                continue;
            };
            let chosen = choose(&entries, &platform).map(|e| e.at.digest.as_str());
            assert_eq!(chosen, digest, "{platform}");
        }
        assert!(offered(&entries).contains("linux/arm/v6"));
        assert!(!offered(&entries).contains("unknown"));
    }

    #[test]
    fn platforms_are_read_strictly() {
        for bad in ["", "windows/amd64", "linux/", "linux/a/b/c", "linux/a b", "a;b"] {
            assert!(bad.parse::<Platform>().is_err(), "{bad}");
        }
        assert_eq!("x86_64".parse::<Platform>().unwrap().to_string(), "linux/amd64");
    }
}
