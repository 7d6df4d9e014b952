//! Recorded durations of tests: `tests/durations.json`, seconds by full name.
//!
//! The queue starts the longest tests first, gives each test its deadline, and the quick ring takes the
//! short ones. The nightly ring refreshes the file (`--record`); a test without an entry is only less well
//! placed.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

/// Where the durations are kept, from the top of the repository.
pub const PATH: &str = "tests/durations.json";

/// Durations by full name.
#[derive(Debug, Default, Clone)]
pub struct Durations(BTreeMap<String, f64>);

impl Durations {
    /// Reads the file; an absent file has no entries.
    pub fn read(path: &Path) -> Result<Self> {
        match fs::read(path) {
            Ok(text) => {
                let map = serde_json::from_slice(&text);
                Ok(Self(map.with_context(|| path.display().to_string())?))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error).with_context(|| path.display().to_string()),
        }
    }

    /// Writes the file, one entry per line.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(&self.0)? + "\n";
        fs::write(path, text).with_context(|| path.display().to_string())
    }

    /// The recorded duration of a test.
    pub fn get(&self, full_name: &str) -> Option<Duration> {
        self.0.get(full_name).map(|seconds| Duration::from_secs_f64(seconds.max(0.0)))
    }

    /// Records a duration, in steps of 0.1 s so that the file changes little.
    pub fn set(&mut self, full_name: &str, took: Duration) {
        let tenths = (took.as_secs_f64() * 10.0).round();
        self.0.insert(full_name.to_owned(), tenths / 10.0);
    }

    /// Keeps only entries of tests that exist.
    pub fn retain(&mut self, exists: impl Fn(&str) -> bool) {
        self.0.retain(|name, _| exists(name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_survive_the_file_in_tenths() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("d.json");
        assert_eq!(Durations::read(&path).unwrap().get("a::b"), None);
        let mut durations = Durations::default();
        durations.set("a::b", Duration::from_millis(1234));
        durations.set("gone::c", Duration::from_millis(10));
        durations.retain(|name| name.starts_with("a::"));
        durations.write(&path).unwrap();
        let again = Durations::read(&path).unwrap();
        assert_eq!(again.get("a::b"), Some(Duration::from_millis(1200)));
        assert_eq!(again.get("gone::c"), None);
        fs::write(&path, "[]").unwrap();
        assert!(Durations::read(&path).is_err());
    }
}
