//! Pulls and pushes against a registry in this process that misbehaves on request, and one against
//! Debian's docker-registry.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use dormouse_kernel::ErrorKind;
use dormouse_model::Reference;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::fake::{Content, Fake, Reply, Seen};
use super::*;
use crate::{Digest, Image, ImageError, Metadata, Progress, Store};

/// A store of its own, with configuration.
struct Place {
    dir: TempDir,
    store: Store,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |sub: &str| dir.path().join(sub);
        let store = Store::open_with(&at("images"), &at("run"), Metadata::Stub).unwrap();
        std::fs::create_dir(at("etc")).unwrap();
        Self { store, dir }
    }

    fn access(&self) -> Access {
        Access { config_dir: self.dir.path().join("etc"), credentials: None, insecure: true }
    }

    fn pull(&self, name: &Reference) -> crate::Result<Image> {
        self.pull_as(name, self.access())
    }

    fn pull_as(&self, name: &Reference, access: Access) -> crate::Result<Image> {
        let options = PullOptions { access, platform: Some("linux/amd64".parse().unwrap()) };
        let id = pull(&self.store, name, &options, &crate::Silent)?;
        self.store.find(&id)
    }

    fn push(&self, image: &Image, to: &Reference) -> crate::Result<Digest> {
        let options = PushOptions { access: self.access(), compression: None };
        push(&self.store, image, to, &options, &crate::Silent)
    }

    /// The partial blobs that are left: how long each is.
    fn partials(&self) -> BTreeMap<String, u64> {
        let Ok(entries) = std::fs::read_dir(self.dir.path().join("images/partial")) else {
            return BTreeMap::new();
        };
        entries
            .map(|entry| {
                let entry = entry.unwrap();
                (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().len())
            })
            .collect()
    }

    fn partial_path(&self, digest: &Digest) -> PathBuf {
        self.dir.path().join("images/partial").join(digest.hex())
    }

    /// Asserts that nothing of a refused image is visible.
    fn assert_nothing_published(&self) {
        assert!(self.store.list().unwrap().is_empty());
        let layers = std::fs::read_dir(self.dir.path().join("images/layers")).unwrap();
        assert_eq!(layers.count(), 0, "a layer was kept");
    }
}

/// A tar with files of these sizes and incompressible contents.
fn tar(files: &[(&str, usize)]) -> Vec<u8> {
    let mut state = 88172645463325252u64;
    let mut builder = tar::Builder::new(Vec::new());
    for (name, bytes) in files {
        let data: Vec<u8> = std::iter::repeat_with(|| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .take(*bytes)
        .collect();
        let mut header = tar::Header::new_gnu();
        header.set_size(data.len() as u64);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1);
        builder.append_data(&mut header, name, &data[..]).unwrap();
    }
    builder.into_inner().unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    out.write_all(bytes).unwrap();
    out.finish().unwrap()
}

const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// An image in a registry.
struct Sample {
    content: Content,
    manifest: Digest,
    config: Digest,
    layers: Vec<Digest>,
    diff_ids: Vec<Digest>,
}

fn config_json(diff_ids: &[Digest]) -> Value {
    json!({
        "architecture": "amd64", "os": "linux", "config": { "Cmd": ["/bin/true"] },
        "rootfs": { "type": "layers", "diff_ids": diff_ids }
    })
}

fn manifest_json(config: (&Digest, usize), layers: &[(Digest, usize)]) -> Value {
    let layers: Vec<Value> = layers
        .iter()
        .map(|(digest, size)| json!({ "mediaType": LAYER, "digest": digest, "size": size }))
        .collect();
    json!({
        "schemaVersion": 2, "mediaType": MANIFEST,
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": config.0, "size": config.1
        },
        "layers": layers
    })
}

/// `a:1` with one layer of these files each.
fn sample(layers: &[&[(&str, usize)]]) -> Sample {
    sample_of(&layers.iter().map(|files| tar(files)).collect::<Vec<_>>())
}

/// The same, with these tars.
fn sample_of(tars: &[Vec<u8>]) -> Sample {
    let mut content = Content::default();
    let diff_ids: Vec<Digest> = tars.iter().map(|tar| Digest::of(tar)).collect();
    let blobs: Vec<Vec<u8>> = tars.iter().map(|tar| gzip(tar)).collect();
    let layers: Vec<Digest> = blobs.iter().map(|blob| content.blob("a", blob)).collect();
    let config_bytes = config_json(&diff_ids).to_string();
    let config = content.blob("a", config_bytes.as_bytes());
    let sized: Vec<(Digest, usize)> =
        layers.iter().copied().zip(blobs.iter().map(Vec::len)).collect();
    let manifest = manifest_json((&config, config_bytes.len()), &sized).to_string();
    let manifest = content.manifest("a", "1", MANIFEST, manifest.as_bytes());
    Sample { content, manifest, config, layers, diff_ids }
}

/// One layer, long enough to be cut in the middle.
fn small() -> Sample {
    sample(&[&[("etc/hostname", 5), ("big", 700_000)]])
}

/// Error and causes in one text.
fn with_causes(error: &ImageError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(next) = cause {
        text = format!("{text}: {next}");
        cause = next.source();
    }
    text
}

fn refused(place: &Place, name: &Reference) -> (ErrorKind, String) {
    let error = place.pull(name).expect_err("this pull must fail");
    (error.kind(), with_causes(&error))
}

#[test]
fn image_is_pulled_and_a_second_tag_costs_no_blob() {
    let mut sample = sample(&[&[("a", 10)], &[("b", 300_000)], &[("c", 10)]]);
    let (kind, bytes) = sample.content.manifests[&("a".into(), "1".into())].clone();
    sample.content.manifest("a", "2", &kind, &bytes);
    let (fake, place) = (Fake::start(sample.content), Place::new());
    let image = place.pull(&fake.name("a:1")).unwrap();
    assert_eq!(image.id, sample.config.hex());
    assert_eq!(image.digest, Some(sample.manifest));
    assert_eq!(image.names, [fake.name("a:1")]);
    assert_eq!(image.layers.iter().map(|l| l.diff_id).collect::<Vec<_>>(), sample.diff_ids);
    assert!(place.partials().is_empty(), "{:?}", place.partials());
    let before = fake.blobs_fetched();
    assert_eq!(before, 4);
    let again = place.pull(&fake.name("a:2")).unwrap();
    assert_eq!(again.names, [fake.name("a:1"), fake.name("a:2")]);
    assert_eq!(fake.blobs_fetched(), before);
    // By digest, too.
    place.pull(&format!("{}/a@{}", fake.address, sample.manifest).parse().unwrap()).unwrap();
}

#[test]
fn present_layers_are_not_fetched() {
    let mut two = sample(&[&[("a", 10)], &[("b", 300_000)]]);
    let config = config_json(&two.diff_ids[1..]).to_string();
    let config_digest = two.content.blob("a", config.as_bytes());
    let bytes = two.content.blobs[&("a".into(), two.layers[1].to_string())].len();
    let one = manifest_json((&config_digest, config.len()), &[(two.layers[1], bytes)]);
    two.content.manifest("a", "one", MANIFEST, one.to_string().as_bytes());
    let (fake, place) = (Fake::start(two.content), Place::new());
    place.pull(&fake.name("a:one")).unwrap();
    place.pull(&fake.name("a:1")).unwrap();
    let times = |digest| fake.seen().iter().filter(|s| s.is_blob(digest)).count();
    assert_eq!((times(&two.layers[0]), times(&two.layers[1])), (1, 1));
}

#[test]
fn cut_connection_is_resumed_where_it_broke() {
    let sample = small();
    let layer = sample.layers[0];
    let fake = Fake::twisted(sample.content, move |seen, before, mut reply| {
        if seen.is_blob(&layer) && before < 2 {
            reply.cut_after = Some(100_000);
        }
        reply
    });
    let place = Place::new();
    place.pull(&fake.name("a:1")).unwrap();
    let ranges: Vec<Option<String>> = fake
        .seen()
        .iter()
        .filter(|s| s.is_blob(&layer))
        .map(|s| s.header("range").map(str::to_owned))
        .collect();
    assert_eq!(ranges.len(), 3);
    assert_eq!(ranges[0], None);
    let start = |i: usize| -> u64 {
        let range: &str = ranges[i].as_ref().unwrap();
        range["bytes=".len()..range.len() - 1].parse().unwrap()
    };
    assert_eq!((start(1), start(2)), (100_000, 200_000));
}

#[test]
fn registry_without_ranges_is_read_from_the_start() {
    let sample = small();
    let layer = sample.layers[0];
    let whole = sample.content.blobs[&("a".into(), layer.to_string())].clone();
    let fake = Fake::twisted(sample.content, move |seen, before, reply| {
        if !seen.is_blob(&layer) {
            return reply;
        }
        let mut reply = Reply::new(200, whole.clone());
        if before == 0 {
            reply.cut_after = Some(100_000);
        }
        reply
    });
    let place = Place::new();
    place.pull(&fake.name("a:1")).unwrap();
}

#[test]
fn range_that_was_not_requested_is_refused() {
    let sample = small();
    let layer = sample.layers[0];
    let whole = sample.content.blobs[&("a".into(), layer.to_string())].clone();
    for status in [206, 416] {
        let whole = whole.clone();
        let content = small().content;
        let fake = Fake::twisted(content, move |seen, before, mut reply| {
            if seen.is_blob(&layer) && before == 0 {
                reply.cut_after = Some(100_000);
            } else if seen.is_blob(&layer) && seen.header("range").is_some() {
                let from = 150_000;
                let range = format!("bytes {from}-{}/{}", whole.len() - 1, whole.len());
                reply = Reply::new(status, &whole[from..]).with("content-range", range);
            }
            reply
        });
        let place = Place::new();
        place.pull(&fake.name("a:1")).unwrap_or_else(|e| panic!("{status}: {}", with_causes(&e)));
    }
}

#[test]
fn fetched_part_of_a_killed_pull_is_not_fetched_again() {
    let sample = small();
    let layer = sample.layers[0];
    let broken = Arc::new(Mutex::new(true));
    let is_broken = broken.clone();
    let fake = Fake::twisted(sample.content, move |seen, before, mut reply| {
        if seen.is_blob(&layer) && *is_broken.lock().unwrap() {
            reply.cut_after = Some(if before == 0 { 300_000 } else { 0 });
        }
        reply
    });
    let place = Place::new();
    let (kind, text) = refused(&place, &fake.name("a:1"));
    assert!(matches!(kind, ErrorKind::Os(_)), "{kind:?} {text}");
    assert!(text.contains("300000 of"), "{text}");
    assert_eq!(place.partials(), BTreeMap::from([(layer.hex(), 300_000)]));
    place.assert_nothing_published();
    *broken.lock().unwrap() = false;
    let before = fake.seen().len();
    place.pull(&fake.name("a:1")).unwrap();
    let seen = fake.seen();
    let blob: Vec<&Seen> = seen[before..].iter().filter(|s| s.is_blob(&layer)).collect();
    assert_eq!(blob.len(), 1);
    assert_eq!(blob[0].header("range"), Some("bytes=300000-"));
    assert!(place.partials().is_empty());
}

#[test]
fn damaged_leftovers_are_fetched_again() {
    let sample = small();
    let (layer, place) = (sample.layers[0], Place::new());
    let fake = Fake::start(sample.content);
    let path = place.partial_path(&layer);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    for leftover in [vec![0; 100_000], vec![0; 10_000_000]] {
        std::fs::write(&path, leftover).unwrap();
        let place_of_its_own = Place::new();
        std::fs::create_dir_all(place_of_its_own.partial_path(&layer).parent().unwrap()).unwrap();
        std::fs::rename(&path, place_of_its_own.partial_path(&layer)).unwrap();
        place_of_its_own.pull(&fake.name("a:1")).unwrap();
        assert!(place_of_its_own.partials().is_empty());
    }
}

/// umoci ends a layer right behind the data of its last file.
#[test]
fn layer_without_an_end_mark_is_read_and_written_unchanged() {
    let whole = tar(&[("a", 100)]);
    let cut = whole[..512 + 100].to_vec();
    let sample = sample_of(std::slice::from_ref(&cut));
    let (diff_id, place) = (sample.diff_ids[0], Place::new());
    place.pull(&Fake::start(sample.content).name("a:1")).unwrap();
    let mut written = Vec::new();
    place.store.layer_blob(&diff_id, crate::Compression::None, &mut written).unwrap();
    assert_eq!(written, cut);
    // But not in the middle of anything.
    for at in [512 + 99, 512 + 101, 100] {
        let sample = sample_of(&[whole[..at].to_vec()]);
        let fake = Fake::start(sample.content);
        let (kind, text) = refused(&Place::new(), &fake.name("a:1"));
        assert_eq!(kind, ErrorKind::Invalid, "{at}: {text}");
    }
}

#[test]
fn two_pulls_of_one_image_fetch_it_once() {
    let sample = small();
    let layer = sample.layers[0];
    let fake = Fake::twisted(sample.content, move |seen, _, reply| {
        if seen.is_blob(&layer) {
            std::thread::sleep(std::time::Duration::from_millis(300));
        }
        reply
    });
    let place = Place::new();
    std::thread::scope(|scope| {
        let pulls: Vec<_> =
            (0..2).map(|_| scope.spawn(|| place.pull(&fake.name("a:1")).unwrap())).collect();
        pulls.into_iter().for_each(|pull| drop(pull.join().unwrap()));
    });
    assert_eq!(fake.seen().iter().filter(|s| s.is_blob(&layer)).count(), 1);
}

#[test]
fn wrong_digests_are_refused_and_nothing_stays() {
    // The damage, and a word of the message.
    let flip = |bytes: &mut Vec<u8>| {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
    };
    for what in ["layer", "config", "manifest by tag", "manifest by digest"] {
        let sample = small();
        let (layer, config) = (sample.layers[0], sample.config);
        let fake = Fake::twisted(sample.content, move |seen, _, mut reply| {
            let is_manifest = seen.path.contains("/manifests/");
            match what {
                "layer" if seen.is_blob(&layer) => flip(&mut reply.body),
                "config" if seen.is_blob(&config) => flip(&mut reply.body),
                "manifest by tag" | "manifest by digest" if is_manifest => reply.body.push(b' '),
                _ => {}
            }
            reply
        });
        let place = Place::new();
        let name = match what {
            "manifest by digest" => format!("{}/a@{}", fake.address, sample.manifest),
            _ => format!("{}/a:1", fake.address),
        };
        let (kind, text) = refused(&place, &name.parse().unwrap());
        // Of a layer the damage may show in the tar before all of it was hashed.
        let is_layer = what == "layer" && kind == ErrorKind::Invalid;
        assert!(kind == ErrorKind::Corrupt || is_layer, "{what}: {kind:?} {text}");
        place.assert_nothing_published();
        assert!(place.partials().is_empty(), "{what}: {:?}", place.partials());
    }
}

#[test]
fn layer_that_differs_from_the_configuration_is_refused() {
    let mut sample = small();
    let config = config_json(&[Digest::of(b"something else")]).to_string();
    let digest = sample.content.blob("a", config.as_bytes());
    let layer = sample.layers[0];
    let bytes = sample.content.blobs[&("a".into(), layer.to_string())].len();
    let manifest = manifest_json((&digest, config.len()), &[(layer, bytes)]).to_string();
    sample.content.manifest("a", "1", MANIFEST, manifest.as_bytes());
    let (fake, place) = (Fake::start(sample.content), Place::new());
    let (kind, text) = refused(&place, &fake.name("a:1"));
    assert_eq!(kind, ErrorKind::Corrupt, "{text}");
    place.assert_nothing_published();
    assert!(place.partials().is_empty());
}

#[test]
fn bodies_without_end_are_aborted() {
    for what in ["manifest", "config", "layer", "error", "token"] {
        let sample = small();
        let (layer, config) = (sample.layers[0], sample.config);
        let fake = Fake::twisted(sample.content, move |seen, _, mut reply| {
            let hit = match what {
                "manifest" => seen.path.contains("/manifests/"),
                "config" => seen.is_blob(&config),
                "layer" => seen.is_blob(&layer),
                "error" => {
                    reply.status = 400;
                    true
                }
                _ if seen.path.starts_with("/token") => {
                    reply.status = 200;
                    true
                }
                _ => {
                    let host = seen.header("host").unwrap();
                    let wants = format!("Bearer realm=\"http://{host}/token\",service=\"s\"");
                    return Reply::new(401, "").with("www-authenticate", wants);
                }
            };
            if hit {
                reply.endless = true;
                reply.body = [&reply.body[..], &[b' '; 65536]].concat();
            }
            reply
        });
        let place = Place::new();
        let (_, text) = refused(&place, &fake.name("a:1"));
        let word = match what {
            "layer" => "goes on after",
            "error" => "answered 400",
            _ => "more than the limit",
        };
        assert!(text.contains(word), "{what}: {text}");
        place.assert_nothing_published();
    }
}

#[test]
fn lengths_that_differ_from_the_manifest_are_refused() {
    for stated in [100, 10_000_000_000] {
        let sample = small();
        let layer = sample.layers[0];
        let fake = Fake::twisted(sample.content, move |seen, _, mut reply| {
            if seen.is_blob(&layer) {
                reply.stated_bytes = Some(stated);
            }
            reply
        });
        let place = Place::new();
        let (kind, text) = refused(&place, &fake.name("a:1"));
        assert_eq!(kind, ErrorKind::Corrupt, "{text}");
        assert!(place.partials().is_empty());
    }
}

#[test]
fn busy_registry_is_retried() {
    let busy = |retry: &'static str| {
        let sample = small();
        let fake = Fake::twisted(sample.content, move |_, before, reply| match before {
            0 => {
                Reply::new(429, r#"{"errors":[{"code":"TOOMANYREQUESTS","message":"slow\u001b"}]}"#)
                    .with("retry-after", retry)
            }
            1 => Reply::new(503, ""),
            _ => reply,
        });
        (fake, Place::new())
    };
    let (fake, place) = busy("0");
    place.pull(&fake.name("a:1")).unwrap();
    // A requested wait of an hour is reported to the user.
    let (fake, place) = busy("3600");
    let (kind, text) = refused(&place, &fake.name("a:1"));
    assert_eq!(kind, ErrorKind::Busy, "{text}");
    assert!(text.contains("TOOMANYREQUESTS: slow") && !text.contains('\u{1b}'), "{text}");
    assert_eq!(fake.seen().len(), 1);
}

/// A registry that requires a token of its own token service; `user` is the accepted user.
fn with_tokens(user: Option<&'static str>) -> (Fake, Sample) {
    let mut sample = small();
    let content = std::mem::take(&mut sample.content);
    let fake = Fake::twisted(content, move |seen, _, reply| {
        if seen.path.starts_with("/token?") {
            let basic = seen.header("authorization").map(str::to_owned);
            let wanted = user.map(|user| {
                use base64::Engine as _;
                let text = base64::engine::general_purpose::STANDARD.encode(user);
                format!("Basic {text}")
            });
            return match basic == wanted {
                true => Reply::new(200, r#"{"token":"abc","expires_in":60}"#),
                false => Reply::new(401, r#"{"errors":[{"code":"UNAUTHORIZED","message":"no"}]}"#),
            };
        }
        match seen.header("authorization") {
            Some("Bearer abc") => reply,
            _ => {
                let host = seen.header("host").unwrap();
                let wants = format!(
                    "Bearer realm=\"http://{host}/token\",service=\"the registry\",\
                     scope=\"repository:other:pull\""
                );
                Reply::new(401, "").with("www-authenticate", wants)
            }
        }
    });
    (fake, sample)
}

#[test]
fn tokens_are_fetched_with_and_without_a_password() {
    let (fake, _) = with_tokens(None);
    Place::new().pull(&fake.name("a:1")).unwrap();
    let tokens: Vec<Seen> =
        fake.seen().into_iter().filter(|s| s.path.starts_with("/token")).collect();
    assert_eq!(tokens.len(), 1, "one token serves the whole pull");
    assert!(tokens[0].path.contains("scope=repository%3Aa%3Apull"), "{}", tokens[0].path);
    assert!(tokens[0].path.contains("service=the+registry"), "{}", tokens[0].path);

    let (fake, _) = with_tokens(Some("me:s:ecret"));
    let place = Place::new();
    let creds = |text: &str| Access { credentials: Some(text.parse().unwrap()), ..place.access() };
    let error = place.pull_as(&fake.name("a:1"), creds("me:wrong")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Os(13), "{}", with_causes(&error));
    assert!(
        with_causes(&error).contains("'me'") && !with_causes(&error).contains("wrong"),
        "{}",
        with_causes(&error)
    );
    let (kind, text) = refused(&place, &fake.name("a:1"));
    assert_eq!(kind, ErrorKind::Os(13), "{text}");
    assert!(text.contains("login"), "{text}");
    place.pull_as(&fake.name("a:1"), creds("me:s:ecret")).unwrap();
}

#[test]
fn login_stores_credentials_that_the_registry_accepts() {
    let (fake, _) = with_tokens(Some("me:s:ecret"));
    let place = Place::new();
    let host = fake.address.to_string();
    assert!(login(&host, &"me:no".parse().unwrap(), &place.access()).is_err());
    assert!(place.pull(&fake.name("a:1")).is_err());
    let file = login(&host, &"me:s:ecret".parse().unwrap(), &place.access()).unwrap();
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(std::fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
    place.pull(&fake.name("a:1")).unwrap();
    assert!(logout(&host, &place.access()).unwrap());
    assert!(!logout(&host, &place.access()).unwrap());
    assert!(login("not a host", &"a:b".parse().unwrap(), &place.access()).is_err());
}

#[test]
fn passwords_are_shown_to_the_registry_alone() {
    // The blobs are elsewhere, as with all large registries.
    let mut sample = small();
    let elsewhere = Fake::start(std::mem::take(&mut sample.content));
    let to = elsewhere.address;
    let manifests = elsewhere.content.lock().unwrap().manifests.clone();
    let fake =
        Fake::twisted(
            Content { manifests, ..Content::default() },
            move |seen, _, reply| match seen.header("authorization") {
                None => Reply::new(401, "").with("www-authenticate", "Basic realm=\"x\""),
                Some("Basic bWU6cHc=") if seen.path.contains("/blobs/") => {
                    Reply::new(307, "").with("location", format!("http://{to}{}", seen.path))
                }
                Some("Basic bWU6cHc=") => reply,
                Some(_) => Reply::new(401, "").with("www-authenticate", "Basic realm=\"x\""),
            },
        );
    let place = Place::new();
    let creds = |text: &str| Access { credentials: Some(text.parse().unwrap()), ..place.access() };
    let (kind, text) = refused(&place, &fake.name("a:1"));
    assert_eq!(kind, ErrorKind::Os(13), "{text}");
    assert!(place.pull_as(&fake.name("a:1"), creds("me:no")).is_err());
    place.pull_as(&fake.name("a:1"), creds("me:pw")).unwrap();
    assert_eq!(elsewhere.blobs_fetched(), 2);
    assert!(elsewhere.seen().iter().all(|s| s.header("authorization").is_none()));
}

#[test]
fn endless_redirects_are_aborted() {
    let fake = Fake::twisted(small().content, |seen, _, _| {
        Reply::new(307, "").with("location", format!("{}x", seen.path))
    });
    let (_, text) = refused(&Place::new(), &fake.name("a:1"));
    assert!(text.contains("redirects too often"), "{text}");
}

#[test]
fn loopback_registries_need_no_configuration_for_http() {
    let (fake, place) = (Fake::start(small().content), Place::new());
    let access = Access { insecure: false, ..place.access() };
    place.pull_as(&fake.name("a:1"), access).unwrap();
}

#[test]
fn https_is_used_with_a_trusted_certificate() {
    use rustls::pki_types::pem::PemObject;
    drop(rustls::crypto::ring::default_provider().install_default());
    let pem = include_str!("testdata/cert.pem");
    let chain = vec![rustls::pki_types::CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()];
    let key = include_bytes!("testdata/key.pem");
    let key = rustls::pki_types::PrivateKeyDer::from_pem_slice(key).unwrap();
    let tls = rustls::ServerConfig::builder().with_no_client_auth();
    let fake = Fake::tls(small().content, Arc::new(tls.with_single_cert(chain, key).unwrap()));
    let place = Place::new();
    let access = Access { insecure: false, ..place.access() };
    let error = place.pull_as(&fake.name("a:1"), access.clone()).unwrap_err();
    assert!(with_causes(&error).contains("ca = "), "{}", with_causes(&error));
    assert!(fake.seen().is_empty(), "a request was sent to a registry that is not trusted");
    let etc = place.dir.path().join("etc");
    std::fs::write(etc.join("ca.pem"), pem).unwrap();
    let config = format!("[registries.\"{}\"]\nca = \"ca.pem\"\n", fake.address);
    std::fs::write(etc.join("config.toml"), config).unwrap();
    place.pull_as(&fake.name("a:1"), access).unwrap();
    // And https is not left for http when a registry requests it.
    let error = place.pull(&fake.name("a:2")).unwrap_err();
    assert!(!with_causes(&error).contains("ca = "), "{}", with_causes(&error));
}

#[test]
fn image_of_the_platform_is_chosen_from_an_index() {
    let mut sample = small();
    let bytes = sample.content.manifests[&("a".into(), "1".into())].1.len();
    let index = |entries: Value| {
        json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": entries }).to_string()
    };
    let entry = |digest: &Digest, size: usize, arch: &str| {
        json!({
            "mediaType": MANIFEST, "digest": digest, "size": size,
            "platform": { "os": "linux", "architecture": arch }
        })
    };
    let other = Digest::of(b"not there");
    let good = index(json!([entry(&other, 9, "arm64"), entry(&sample.manifest, bytes, "amd64")]));
    let none = index(json!([entry(&other, 9, "arm64"), entry(&other, 9, "riscv64")]));
    let size = index(json!([entry(&sample.manifest, bytes + 1, "amd64")]));
    let inner = sample.content.manifest("a", "good", INDEX, good.as_bytes());
    let nested = index(json!([entry(&inner, good.len(), "amd64")]));
    for (tag, text) in [("none", &none), ("size", &size), ("nested", &nested)] {
        sample.content.manifest("a", tag, INDEX, text.as_bytes());
    }
    let (fake, place) = (Fake::start(sample.content), Place::new());
    let (kind, text) = refused(&place, &fake.name("a:none"));
    assert_eq!(kind, ErrorKind::NotFound);
    assert!(text.contains("linux/arm64, linux/riscv64"), "{text}");
    assert_eq!(refused(&place, &fake.name("a:size")).0, ErrorKind::Corrupt);
    let (kind, _) = refused(&place, &fake.name("a:nested"));
    assert!(matches!(kind, ErrorKind::Unsupported { .. }));
    let image = place.pull(&fake.name("a:good")).unwrap();
    assert_eq!(image.id, sample.config.hex());
}

#[test]
fn strange_manifests_are_refused_by_name() {
    let digest = Digest::of(b"");
    let config = |kind: &str| json!({ "mediaType": kind, "digest": digest, "size": 2 });
    let oci = config("application/vnd.oci.image.config.v1+json");
    let layer =
        |kind: &str, size: u64| json!({ "mediaType": kind, "digest": digest, "size": size });
    let layers = |n: usize| vec![layer(LAYER, 1); n];
    let bad_digest = json!({ "mediaType": LAYER, "digest": "sha256:../../etc", "size": 1 });
    for (manifest, word) in [
        (json!({ "schemaVersion": 1, "fsLayers": [] }), "schema 1"),
        (json!({ "schemaVersion": 3 }), "schema version 3"),
        (json!({ "schemaVersion": 2 }), "neither"),
        (json!({ "schemaVersion": 2, "mediaType": "a/b" }), "a/b"),
        (json!({ "schemaVersion": 2, "config": oci, "layers": [], "manifests": [] }), "neither"),
        (json!({ "schemaVersion": 2, "mediaType": INDEX, "config": oci, "layers": [] }), "neither"),
        (json!({ "schemaVersion": 2, "config": config("application/helm"), "layers": [] }), "helm"),
        (json!({ "schemaVersion": 2, "config": oci, "layers": [layer("x/enc", 1)] }), "x/enc"),
        (json!({ "schemaVersion": 2, "config": oci, "layers": layers(513) }), "513 layers"),
        (json!({ "schemaVersion": 2, "config": oci, "layers": [layer(LAYER, u64::MAX)] }), "limit"),
        (json!({ "schemaVersion": 2, "config": oci, "layers": [bad_digest] }), "sha256"),
        (json!([]), "not valid"),
        (json!("x"), "not valid"),
    ] {
        let mut content = Content::default();
        content.manifest("a", "1", MANIFEST, manifest.to_string().as_bytes());
        let (fake, place) = (Fake::start(content), Place::new());
        let (_, text) = refused(&place, &fake.name("a:1"));
        assert!(text.contains(word), "{manifest}: {text}");
        assert!(!text.contains('\n'), "{text}");
    }
    let deep = format!("{}{}", "[".repeat(200_000), "]".repeat(200_000));
    let mut content = Content::default();
    content.manifest("a", "1", MANIFEST, deep.as_bytes());
    let (fake, place) = (Fake::start(content), Place::new());
    assert_eq!(refused(&place, &fake.name("a:1")).0, ErrorKind::Corrupt);
}

/// Whatever a registry makes of a manifest, it is refused or taken, in bounded time.
#[test]
fn damaged_manifests_never_panic() {
    let sample = small();
    let whole = sample.content.manifests[&("a".into(), "1".into())].1.clone();
    let mut content = Content::default();
    let mut state = 88172645463325252u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    const TRIES: usize = 300;
    for i in 0..TRIES {
        let mut bytes = whole.clone();
        for _ in 0..=random(4) {
            let at = random(bytes.len());
            match random(4) {
                0 => bytes[at] = random(256) as u8,
                1 => bytes.truncate(at + 1),
                2 => drop(bytes.remove(at)),
                _ => {
                    let piece = bytes[at..bytes.len().min(at + 40)].to_vec();
                    bytes.splice(at..at, piece);
                }
            }
            if bytes.is_empty() {
                break;
            }
        }
        content.manifest("a", &format!("t{i}"), MANIFEST, &bytes);
    }
    let (fake, place) = (Fake::start(content), Place::new());
    for i in 0..TRIES {
        // The blobs are not there, so none of them can become an image.
        let (_, text) = refused(&place, &fake.name(&format!("a:t{i}")));
        assert!(text.len() < 2000 && !text.contains('\n'), "{text}");
    }
}

#[test]
fn absent_images_and_registries_are_distinguished() {
    let (fake, place) = (Fake::start(small().content), Place::new());
    let (kind, text) = refused(&place, &fake.name("a:absent"));
    assert_eq!(kind, ErrorKind::NotFound, "{text}");
    assert!(text.contains("MANIFEST_UNKNOWN"), "{text}");
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (kind, text) = refused(&place, &format!("{nobody}/a:1").parse().unwrap());
    assert_eq!(kind, ErrorKind::Os(111), "{text}");
    assert!(text.contains("cannot reach"), "{text}");
}

/// A pulled image is pushed byte for byte, and only missing blobs are sent.
#[test]
fn root_pushed_image_keeps_its_digest_and_only_missing_blobs_are_sent() {
    let sample = sample(&[&[("a", 10)], &[("b", 300_000)]]);
    let (fake, place) = (Fake::start(sample.content), Place::new());
    let image = place.pull(&fake.name("a:1")).unwrap();
    // Another tag there, another repository of the same registry, another registry.
    assert_eq!(place.push(&image, &fake.name("a:2")).unwrap(), sample.manifest);
    assert_eq!(place.push(&image, &fake.name("team/b:1")).unwrap(), sample.manifest);
    let puts = |fake: &Fake| {
        let upload = |s: &&Seen| s.method == "PUT" && s.path.contains("/uploads/");
        fake.seen().iter().filter(upload).count()
    };
    assert_eq!(puts(&fake), 1, "the configuration; the layers are mounted");
    let other = Fake::twisted(Content::default(), |seen, before, reply| {
        match seen.method == "PUT" && before == 0 && seen.path.contains("/uploads/1?") {
            true => Reply::new(503, ""),
            false => reply,
        }
    });
    let digest = place.push(&image, &other.name("c:1")).unwrap();
    assert_eq!(puts(&other), 4, "two layers, the configuration, and one that was sent again");
    let pushes = other.seen().len();
    assert_eq!(place.push(&image, &other.name("c:1")).unwrap(), digest);
    assert_eq!(puts(&other), 4, "{:?}", &other.seen()[pushes..]);
    let elsewhere = Place::new();
    let back = elsewhere.pull(&other.name("c:1")).unwrap();
    assert_eq!(back.id, image.id);
    assert_eq!(back.layers, image.layers);
    // A name with a digest cannot be pushed to.
    let to = format!("{}/c@{digest}", other.address).parse().unwrap();
    assert_eq!(place.push(&image, &to).unwrap_err().kind(), ErrorKind::Invalid);
}

#[test]
fn progress_adds_up() {
    /// Name, total, progress and end of a task.
    type Task = (String, Option<u64>, u64, bool);
    #[derive(Default)]
    struct Sum(Mutex<BTreeMap<u64, Task>>);
    impl Progress for Sum {
        fn start(&self, what: &str, total_bytes: Option<u64>) -> u64 {
            let mut tasks = self.0.lock().unwrap();
            let id = tasks.len() as u64;
            tasks.insert(id, (what.to_owned(), total_bytes, 0, false));
            id
        }
        fn advance(&self, id: u64, bytes: u64) {
            self.0.lock().unwrap().get_mut(&id).unwrap().2 += bytes;
        }
        fn finish(&self, id: u64) {
            self.0.lock().unwrap().get_mut(&id).unwrap().3 = true;
        }
    }
    let (fake, place) =
        (Fake::start(sample(&[&[("a", 10)], &[("b", 300_000)]]).content), Place::new());
    let sum = Sum::default();
    let platform = Some("linux/amd64".parse().unwrap());
    let options = PullOptions { access: place.access(), platform };
    pull(&place.store, &fake.name("a:1"), &options, &sum).unwrap();
    let tasks = sum.0.into_inner().unwrap();
    assert_eq!(tasks.len(), 2);
    for (what, total, done, finished) in tasks.values() {
        assert_eq!((total, finished), (&Some(*done), &true), "{what}");
    }
}

/// Debian's docker-registry, with a directory of its own.
struct DockerRegistry {
    child: std::process::Child,
    address: String,
    _dir: TempDir,
}

impl DockerRegistry {
    /// Starts docker-registry; `None`, with a message, if it is not installed.
    fn start() -> Option<Self> {
        let program = ["/usr/bin/docker-registry", "/usr/bin/registry"]
            .into_iter()
            .find(|path| std::path::Path::new(path).exists());
        let Some(program) = program else {
            eprintln!(
                "SKIPPED: no docker-registry here, so nothing was pulled from or pushed to a real \
                 registry; apt install docker-registry"
            );
            return None;
        };
        let dir = tempfile::tempdir().unwrap();
        let address = {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            listener.local_addr().unwrap().to_string()
        };
        let config = dir.path().join("config.yml");
        std::fs::write(
            &config,
            format!(
                "version: 0.1\nlog: {{level: error}}\nstorage:\n  filesystem: {{rootdirectory: {}}}\n\
                 http: {{addr: '{address}'}}\n",
                dir.path().join("data").display()
            ),
        )
        .unwrap();
        let child = std::process::Command::new(program)
            .arg("serve")
            .arg(config)
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let registry = Self { child, address, _dir: dir };
        let answers = (0..100).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(50));
            std::net::TcpStream::connect(&registry.address).is_ok()
        });
        assert!(answers, "docker-registry does not answer");
        Some(registry)
    }

    fn name(&self, rest: &str) -> Reference {
        format!("{}/{rest}", self.address).parse().unwrap()
    }
}

impl Drop for DockerRegistry {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

#[test]
fn root_docker_registry_takes_and_gives_images() {
    let Some(registry) = DockerRegistry::start() else { return };
    let (fake, place) =
        (Fake::start(sample(&[&[("a", 10)], &[("b", 300_000)]]).content), Place::new());
    let image = place.pull(&fake.name("a:1")).unwrap();
    let (kind, text) = refused(&place, &registry.name("team/a:1"));
    assert_eq!(kind, ErrorKind::NotFound, "{text}");
    let mut digests = Vec::new();
    for compression in [None, Some(crate::Compression::Zstd), Some(crate::Compression::None)] {
        let options = PushOptions { access: place.access(), compression };
        let to = registry.name(&format!("team/a:{}", digests.len()));
        let digest = push(&place.store, &image, &to, &options, &crate::Silent).unwrap();
        let other = Place::new();
        // Loopback: http without configuration.
        let back = other.pull_as(&to, Access { insecure: false, ..other.access() }).unwrap();
        assert_eq!((back.id, back.digest), (image.id.clone(), Some(digest)));
        digests.push(digest);
    }
    digests.dedup();
    assert_eq!(digests.len(), 3);
    // Another repository of the registry, where its blobs can be mounted.
    let digest = place.push(&image, &registry.name("b:1")).unwrap();
    let other = Place::new();
    let name = format!("{}/b@{digest}", registry.address).parse().unwrap();
    assert_eq!(other.pull(&name).unwrap().id, image.id);
}
