//! Access to a registry: its address, protocol, certificates, and the credentials for it.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use dormouse_model::Reference;
use serde::Deserialize;
use serde_json::Value;

use super::error::Failure;

/// The registry of names that give none.
const DOCKER_HUB: &str = "docker.io";

/// LIMIT: bytes of a file with credentials or certificates.
const FILE_MAX_BYTES: u64 = 1 << 20;

/// A user name and a password, or an identity token in the place of the password.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The user; empty when `secret` is an identity token.
    pub user: String,
    /// The password or token.
    pub secret: String,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Credentials({}, ...)", self.user)
    }
}

impl std::str::FromStr for Credentials {
    type Err = dormouse_model::Invalid;

    /// Parses `USER:PASSWORD`; the password may contain a colon.
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        match s.split_once(':') {
            Some((user, secret)) if !user.is_empty() => {
                Ok(Self { user: user.to_owned(), secret: secret.to_owned() })
            }
            // The input is not repeated in the error: it is a secret.
            _ => Err(dormouse_model::Invalid::new("credentials", "***", "USER:PASSWORD")),
        }
    }
}

/// The operator's settings for access to registries.
#[derive(Debug, Clone)]
pub struct Access {
    /// The directory of `config.toml` and `auth.json`, `/etc/dormouse` by default.
    pub config_dir: PathBuf,
    /// `--creds`: used instead of the credentials in files.
    pub credentials: Option<Credentials>,
    /// Plain http, regardless of the configuration.
    pub insecure: bool,
}

impl Default for Access {
    fn default() -> Self {
        Self { config_dir: "/etc/dormouse".into(), credentials: None, insecure: false }
    }
}

/// A repository of a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    /// `docker.io`, `127.0.0.1:5000`: as names are written and credentials are filed.
    pub registry: String,
    /// `library/nginx`.
    pub repository: String,
}

impl Place {
    /// Resolves a name: without a registry to docker.io, there without an owner to `library`.
    pub fn of(reference: &Reference) -> Self {
        let registry = match reference.registry.as_deref() {
            None | Some("index.docker.io" | "registry-1.docker.io") => DOCKER_HUB,
            Some(registry) => registry,
        };
        let repository = match registry == DOCKER_HUB && !reference.repository.contains('/') {
            true => format!("library/{}", reference.repository),
            false => reference.repository.clone(),
        };
        Self { registry: registry.to_owned(), repository }
    }

    /// The host, with its port, that answers for the registry.
    pub fn host(&self) -> &str {
        match self.registry.as_str() {
            DOCKER_HUB => "registry-1.docker.io",
            host => host,
        }
    }

    /// Whether it can only be a program on this machine.
    pub fn is_loopback(&self) -> bool {
        let host = match self.registry.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|b| b.is_ascii_digit()) => host,
            _ => &self.registry,
        };
        let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }
}

/// The protocol of a registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scheme {
    Https,
    Http,
    /// https, or http if the registry has no https: registries on this machine, as docker does.
    Either,
}

/// `[registries."HOST:PORT"]` of config.toml.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    /// Plain http.
    #[serde(default)]
    insecure: bool,
    /// A file with certificates (PEM) that may sign the registry's, beside the system's.
    ca: Option<PathBuf>,
}

/// The section of config.toml that is read here.
#[derive(Debug, Default, Deserialize)]
struct ConfigFile {
    #[serde(default)]
    registries: std::collections::BTreeMap<String, Settings>,
}

/// The parameters for access to one registry.
#[derive(Debug, Clone)]
pub(super) struct Route {
    pub scheme: Scheme,
    /// PEM, as read.
    pub ca: Option<Vec<u8>>,
    pub credentials: Option<Credentials>,
    pub config_file: PathBuf,
}

impl Access {
    /// Resolves the parameters for one registry.
    pub(super) fn route(&self, place: &Place) -> Result<Route, Failure> {
        let config_file = self.config_dir.join("config.toml");
        let config: ConfigFile = match read(&config_file)? {
            None => ConfigFile::default(),
            Some(text) => toml::from_str(&text).map_err(|e| Failure::File {
                path: config_file.clone(),
                problem: super::error::plain(e.message()),
            })?,
        };
        let settings = config.registries.get(&place.registry).cloned().unwrap_or_default();
        let scheme = match self.insecure || settings.insecure {
            true => Scheme::Http,
            false if place.is_loopback() => Scheme::Either,
            false => Scheme::Https,
        };
        let ca = match settings.ca {
            None => None,
            Some(path) => {
                let path = self.config_dir.join(path);
                let pem = read(&path)?.ok_or_else(|| Failure::File {
                    path: path.clone(),
                    problem: format!(
                        "there is no such file, but config.toml names it as the ca of {}",
                        place.registry
                    ),
                })?;
                Some(pem.into_bytes())
            }
        };
        let credentials = match &self.credentials {
            Some(given) => Some(given.clone()),
            None => self.stored_credentials(place)?,
        };
        Ok(Route { scheme, ca, credentials, config_file })
    }

    /// The files that may hold credentials, the first one that does wins.
    fn auth_files(&self) -> Vec<PathBuf> {
        let env = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let mut files = Vec::new();
        files.extend(env("REGISTRY_AUTH_FILE"));
        files.push(self.config_dir.join("auth.json"));
        files.extend(env("XDG_RUNTIME_DIR").map(|d| d.join("containers/auth.json")));
        files.extend(
            env("DOCKER_CONFIG")
                .or_else(|| env("HOME").map(|home| home.join(".docker")))
                .map(|d| d.join("config.json")),
        );
        files
    }

    fn stored_credentials(&self, place: &Place) -> Result<Option<Credentials>, Failure> {
        for path in self.auth_files() {
            let Some(text) = read(&path)? else { continue };
            if let Some(found) =
                find_credentials(&text, place).map_err(|problem| Failure::File { path, problem })?
            {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }
}

/// Looks a registry up in an auth.json or docker's config.json.
///
/// Keys are `HOST[:PORT]`, also with a repository or the beginning of one behind it (the longest
/// wins), and docker's old `https://HOST/v1/`.
fn find_credentials(text: &str, place: &Place) -> Result<Option<Credentials>, String> {
    let file: Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
    let mut keys = Vec::new();
    let full = format!("{}/{}", place.registry, place.repository);
    let mut end = full.len();
    loop {
        keys.push(full[..end].to_owned());
        match full[..end].rfind('/') {
            Some(slash) => end = slash,
            None => break,
        }
    }
    let is_hub = place.registry == DOCKER_HUB;
    let host_of = |key: &str| {
        let key = key.split_once("://").map_or(key, |(_, rest)| rest);
        let key = key.split('/').next().unwrap_or(key);
        match is_hub && matches!(key, "index.docker.io" | "registry-1.docker.io") {
            true => DOCKER_HUB.to_owned(),
            false => key.to_owned(),
        }
    };
    if let Some(auths) = file.get("auths").and_then(Value::as_object) {
        let exact = keys.iter().find_map(|key| auths.get(key));
        let by_url = || {
            let url = |key: &str| key.contains("://") || key.ends_with("/v1/");
            auths.iter().find(|(key, _)| {
                (url(key) || is_hub && !key.contains('/')) && host_of(key) == place.registry
            })
        };
        if let Some(entry) = exact.or_else(|| by_url().map(|(_, entry)| entry))
            && let Some(found) = read_entry(entry)?
        {
            return Ok(Some(found));
        }
    }
    let helpers = file.get("credHelpers").and_then(Value::as_object);
    let helper = helpers
        .and_then(|helpers| helpers.get(&place.registry))
        .or_else(|| file.get("credsStore"))
        .and_then(Value::as_str);
    match helper {
        // A credential store for every registry is no reason to refuse an anonymous pull.
        Some(helper) if helpers.is_some_and(|h| h.contains_key(&place.registry)) => Err(format!(
            "the credentials for {} are with the helper '{helper}', and helpers are not supported: \
             use `login` or --creds USER:PASSWORD",
            place.registry
        )),
        _ => Ok(None),
    }
}

fn read_entry(entry: &Value) -> Result<Option<Credentials>, String> {
    let text = |name| entry.get(name).and_then(Value::as_str).filter(|s| !s.is_empty());
    if let Some(token) = text("identitytoken") {
        return Ok(Some(Credentials { user: String::new(), secret: token.to_owned() }));
    }
    if let Some(auth) = text("auth") {
        let pair = STANDARD.decode(auth).ok().and_then(|b| String::from_utf8(b).ok());
        let pair = pair.as_deref().and_then(|p| p.split_once(':'));
        let (user, secret) = pair.ok_or("an 'auth' in it is not the base64 of USER:PASSWORD")?;
        let secret = secret.trim_end_matches('\0');
        return Ok(Some(Credentials { user: user.to_owned(), secret: secret.to_owned() }));
    }
    let pair = text("username").zip(text("password"));
    Ok(pair.map(|(user, secret)| Credentials { user: user.to_owned(), secret: secret.to_owned() }))
}

/// Reads a small text file; `None` if it does not exist.
pub(super) fn read(path: &Path) -> Result<Option<String>, Failure> {
    let io = |source| Failure::Io { step: "read", path: path.to_owned(), source };
    match fs::metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io(e)),
        Ok(meta) if !meta.is_file() || meta.len() > FILE_MAX_BYTES => {
            let problem = format!("not a file of at most {FILE_MAX_BYTES} bytes");
            return Err(Failure::File { path: path.to_owned(), problem });
        }
        Ok(_) => {}
    }
    fs::read_to_string(path).map(Some).map_err(io)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(name: &str) -> Place {
        Place::of(&name.parse().unwrap())
    }

    #[test]
    fn short_names_resolve_to_docker_hub() {
        for (name, registry, repository, host) in [
            ("nginx", "docker.io", "library/nginx", "registry-1.docker.io"),
            ("a/b:1", "docker.io", "a/b", "registry-1.docker.io"),
            ("docker.io/nginx", "docker.io", "library/nginx", "registry-1.docker.io"),
            ("index.docker.io/nginx", "docker.io", "library/nginx", "registry-1.docker.io"),
            ("localhost:5000/nginx", "localhost:5000", "nginx", "localhost:5000"),
            ("ghcr.io/x/y", "ghcr.io", "x/y", "ghcr.io"),
        ] {
            let place = place(name);
            assert_eq!(
                (place.registry.as_str(), place.repository.as_str(), place.host()),
                (registry, repository, host)
            );
        }
    }

    #[test]
    fn only_this_machine_is_loopback() {
        for name in
            ["localhost/x", "localhost:5000/x", "127.0.0.1:5000/x", "127.9.9.9/x", "[::1]:5000/x"]
        {
            assert!(place(name).is_loopback(), "{name}");
        }
        for name in ["nginx", "10.0.0.1:5000/x", "localhost.example.org/x", "127.0.0.1.nip.io/x"] {
            assert!(!place(name).is_loopback(), "{name}");
        }
    }

    #[test]
    fn credentials_are_found_as_podman_and_docker_file_them() {
        let b64 = |s: &str| STANDARD.encode(s);
        let file = serde_json::json!({
            "auths": {
                "https://index.docker.io/v1/": { "auth": b64("hub:p:w") },
                "10.0.0.1:5000": { "auth": b64("plain:pw") },
                "10.0.0.1:5000/team": { "auth": b64("team:pw") },
                "ghcr.io": { "identitytoken": "tok" },
                "quay.io": {}
            },
            "credsStore": "desktop",
            "credHelpers": { "gcr.io": "gcloud" }
        })
        .to_string();
        let found = |name: &str| find_credentials(&file, &place(name)).unwrap().map(|c| c.user);
        assert_eq!(found("nginx").as_deref(), Some("hub"));
        assert_eq!(found("10.0.0.1:5000/x").as_deref(), Some("plain"));
        assert_eq!(found("10.0.0.1:5000/team/x").as_deref(), Some("team"));
        assert_eq!(found("ghcr.io/x/y").as_deref(), Some(""));
        assert_eq!(found("quay.io/x").as_deref(), None);
        assert_eq!(found("10.0.0.1/x").as_deref(), None);
        assert!(find_credentials(&file, &place("gcr.io/x")).unwrap_err().contains("gcloud"));
        assert!(find_credentials("{", &place("x")).is_err());
        let bad = r#"{"auths":{"docker.io":{"auth":"!"}}}"#;
        assert!(find_credentials(bad, &place("x")).is_err());
        let hub = find_credentials(&file, &place("nginx")).unwrap().unwrap();
        assert_eq!(hub.secret, "p:w");
        assert!(!format!("{hub:?}").contains("p:w"));
    }

    #[test]
    fn configuration_chooses_protocol_and_ca() {
        let dir = tempfile::tempdir().unwrap();
        let access = Access { config_dir: dir.path().to_owned(), ..Access::default() };
        let scheme = |name: &str| access.route(&place(name)).map(|r| r.scheme);
        assert_eq!(scheme("10.0.0.1:5000/x").unwrap(), Scheme::Https);
        assert_eq!(scheme("127.0.0.1:5000/x").unwrap(), Scheme::Either);
        let write = |text: &str| fs::write(dir.path().join("config.toml"), text).unwrap();
        write("[network]\npool = 'x'\n[registries.'10.0.0.1:5000']\ninsecure = true\n");
        assert_eq!(scheme("10.0.0.1:5000/x").unwrap(), Scheme::Http);
        assert_eq!(scheme("10.0.0.2:5000/x").unwrap(), Scheme::Https);
        write("[registries.'10.0.0.1:5000']\nca = 'absent.pem'\n");
        assert!(scheme("10.0.0.1:5000/x").unwrap_err().to_string().contains("absent.pem"));
        write("[registries.'10.0.0.1:5000']\ninsecur = true\n");
        assert!(scheme("10.0.0.1:5000/x").unwrap_err().to_string().contains("insecur"));
    }
}
