//! Names of images.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Invalid;

/// An image's name as people write it: `[REGISTRY[:PORT]/]REPOSITORY[:TAG][@DIGEST]`.
///
/// Short names stay short: `nginx` is a local name until a registry is contacted, and then it is
/// `docker.io/library/nginx`, as docker and podman expand it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Reference {
    /// The registry with its port, where one was given.
    pub registry: Option<String>,
    /// The repository, `library/nginx` or `nginx`.
    pub repository: String,
    /// The tag; `latest` where neither tag nor digest was given.
    pub tag: Option<String>,
    /// `sha256:` and 64 hex digits.
    pub digest: Option<String>,
}

impl Reference {
    /// Returns whether two names mean the same image: `x`, `library/x` and `docker.io/library/x` do.
    pub fn is_same(&self, other: &Self) -> bool {
        let full = |name: &Self| {
            let (registry, repository) = name.full();
            (registry.to_owned(), repository.to_owned())
        };
        full(self) == full(other) && (&self.tag, &self.digest) == (&other.tag, &other.digest)
    }

    /// The name below `localhost/`, which podman gives to images without a registry.
    pub fn local(&self) -> Self {
        Self { registry: Some("localhost".to_owned()), ..self.clone() }
    }

    /// The registry that a name leads to, and the repository without the `library/` of docker.io.
    fn full(&self) -> (&str, &str) {
        let repository = self.repository.as_str();
        match self.registry.as_deref() {
            None | Some("docker.io" | "index.docker.io" | "registry-1.docker.io") => {
                let short = repository.strip_prefix("library/").filter(|r| !r.contains('/'));
                ("docker.io", short.unwrap_or(repository))
            }
            Some(other) => (other, repository),
        }
    }
}

impl FromStr for Reference {
    type Err = Invalid;

    fn from_str(s: &str) -> Result<Self, Invalid> {
        let bad = || Invalid::new("image name", s, "[REGISTRY[:PORT]/]NAME[:TAG][@sha256:DIGEST]");
        if s.is_empty() || s.len() > 512 {
            return Err(bad());
        }
        let (rest, digest) = match s.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest)),
            None => (s, None),
        };
        let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        if let Some(digest) = digest {
            let digits = digest.strip_prefix("sha256:").ok_or_else(bad)?;
            if digits.len() != 64 || !digits.bytes().all(hex) {
                return Err(bad());
            }
        }
        let (rest, tag) = match rest.rsplit_once(':') {
            Some((rest, tag)) if !tag.contains('/') => (rest, Some(tag)),
            _ => (rest, None),
        };
        let tag_byte = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
        if let Some(tag) = tag
            && (tag.is_empty()
                || tag.len() > 128
                || tag.starts_with(['.', '-'])
                || !tag.bytes().all(tag_byte))
        {
            return Err(bad());
        }
        let is_registry = |s: &str| s.contains(['.', ':']) || s == "localhost";
        let (registry, repository) = match rest.split_once('/') {
            Some((first, rest)) if is_registry(first) => (Some(first), rest),
            _ => (None, rest),
        };
        let part_ok = |p: &str| {
            let ok = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-".contains(&b);
            let edge = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_alphanumeric());
            edge(p.bytes().next()) && edge(p.bytes().last()) && p.bytes().all(ok)
        };
        if !repository.split('/').all(part_ok) {
            return Err(bad());
        }
        if let Some(registry) = registry {
            let ok = |b: u8| b.is_ascii_alphanumeric() || b".-:[]".contains(&b);
            let edge = |b: u8| b.is_ascii_alphanumeric() || b == b'[';
            if !registry.bytes().all(ok) || !registry.bytes().next().is_some_and(edge) {
                return Err(bad());
            }
        }
        let tag = match (tag, digest) {
            (None, None) => Some("latest"),
            (tag, _) => tag,
        };
        Ok(Self {
            registry: registry.map(str::to_owned),
            repository: repository.to_owned(),
            tag: tag.map(str::to_owned),
            digest: digest.map(str::to_owned),
        })
    }
}

impl TryFrom<String> for Reference {
    type Error = Invalid;
    fn try_from(s: String) -> Result<Self, Invalid> {
        s.parse()
    }
}

impl From<Reference> for String {
    fn from(r: Reference) -> String {
        r.to_string()
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(registry) = &self.registry {
            write!(f, "{registry}/")?;
        }
        f.write_str(&self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        if let Some(digest) = &self.digest {
            write!(f, "@{digest}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_and_full_names_of_docker_hub_are_the_same() {
        let same = |a: &str, b: &str| {
            let [a, b]: [Reference; 2] = [a, b].map(|name| name.parse().unwrap());
            assert_eq!(a.is_same(&b), b.is_same(&a));
            a.is_same(&b)
        };
        for (a, b) in [
            ("x:1", "docker.io/library/x:1"),
            ("x", "index.docker.io/x:latest"),
            ("library/x", "x"),
            ("a/b", "docker.io/a/b"),
        ] {
            assert!(same(a, b), "{a} {b}");
        }
        for (a, b) in [
            ("x:1", "x:2"),
            ("x", "quay.io/library/x"),
            ("a/x", "docker.io/library/x"),
            ("library/a/x", "a/x"),
            ("localhost/x", "x"),
            ("ghcr.io/library/x", "ghcr.io/x"),
        ] {
            assert!(!same(a, b), "{a} {b}");
        }
    }

    #[test]
    fn references_are_read_as_docker_reads_them() {
        for (text, written) in [
            ("nginx", "nginx:latest"),
            ("a/b:1.0", "a/b:1.0"),
            ("localhost:5000/web", "localhost:5000/web:latest"),
            ("10.0.0.1:5000/a/b:x", "10.0.0.1:5000/a/b:x"),
            ("ghcr.io/x/y_z", "ghcr.io/x/y_z:latest"),
        ] {
            assert_eq!(text.parse::<Reference>().unwrap().to_string(), written);
        }
        for bad in ["", ":", "a:", "A", "a//b", "/a", "a/", "a:b:c", "a@sha256:12", "../a", "a b"] {
            assert!(bad.parse::<Reference>().is_err(), "{bad}");
        }
    }
}
