//! Login and logout: credentials that a registry accepted, in `auth.json`.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use dormouse_kernel::ErrorKind;
use dormouse_model::Reference;
use serde_json::{Map, Value};

use super::access::{Access, Credentials, Place, read};
use super::block_on;
use super::client::Client;
use super::error::{Failure, plain};
use crate::error::{ImageError, Result};

/// Verifies these credentials with the registry and stores them in `CONFIG_DIR/auth.json`, readable
/// by root alone. Returns the file.
pub fn login(registry: &str, credentials: &Credentials, access: &Access) -> Result<PathBuf> {
    let place = registry_only(registry)?;
    let access = Access { credentials: Some(credentials.clone()), ..access.clone() };
    block_on(async { Client::open(&access, place.clone(), "pull").await?.check_login().await })?;
    change_auths(&access, |auths| {
        let pair = format!("{}:{}", credentials.user, credentials.secret);
        auths.insert(place.registry, serde_json::json!({ "auth": STANDARD.encode(pair) }));
        true
    })
}

/// Removes the credentials for a registry from `CONFIG_DIR/auth.json`. Returns whether there were
/// any.
pub fn logout(registry: &str, access: &Access) -> Result<bool> {
    let place = registry_only(registry)?;
    let mut was_there = false;
    change_auths(access, |auths| {
        was_there = auths.remove(&place.registry).is_some();
        was_there
    })?;
    Ok(was_there)
}

fn registry_only(registry: &str) -> Result<Place> {
    let reference: Reference =
        format!("{registry}/x").parse().map_err(|_| bad_registry(registry))?;
    match reference.registry {
        Some(_) if reference.repository == "x" => {
            let Place { registry, .. } = Place::of(&reference);
            Ok(Place { registry, repository: String::new() })
        }
        _ => Err(bad_registry(registry)),
    }
}

fn bad_registry(registry: &str) -> ImageError {
    let registry = plain(registry);
    ImageError::new(ErrorKind::Invalid, format!("'{registry}' is not a registry: HOST[:PORT]"))
}

fn change_auths(
    access: &Access,
    change: impl FnOnce(&mut Map<String, Value>) -> bool,
) -> Result<PathBuf> {
    let path = access.config_dir.join("auth.json");
    let mut file = match read(&path)? {
        None => Value::Object(Map::new()),
        Some(text) => serde_json::from_str(&text)
            .map_err(|e| Failure::File { path: path.clone(), problem: e.to_string() })?,
    };
    let broken = || Failure::File { path: path.clone(), problem: "no object with 'auths'".into() };
    let object = file.as_object_mut().ok_or_else(broken)?;
    let auths = object.entry("auths").or_insert_with(|| Value::Object(Map::new()));
    if change(auths.as_object_mut().ok_or_else(broken)?) {
        write_private(&path, &file).map_err(|source| Failure::Io {
            step: "write",
            path: path.clone(),
            source,
        })?;
    }
    Ok(path)
}

fn write_private(path: &Path, file: &Value) -> std::io::Result<()> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    fs::DirBuilder::new().recursive(true).mode(0o755).create(dir)?;
    let beside = dir.join(format!(".auth.json.{}", std::process::id()));
    let write = || {
        let mut out =
            File::options().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
        out.write_all(&serde_json::to_vec_pretty(file)?)?;
        out.sync_all()?;
        fs::rename(&beside, path)
    };
    write().inspect_err(|_| drop(fs::remove_file(&beside)))
}
