//! Settings for wakes and mounts: `[wake]` and `[run]` in `config.toml`.
//!
//! ```toml
//! [run]
//! default-volume = "noidmap"   # options of each -v HOST:CTR and --mount type=bind, before its own
//! log-driver = "k8s-file"      # of containers without --log-driver: k8s-file, file, none
//!
//! [wake]
//! block = "64k"   # memory filled when a page of it is touched: a power of two, 4k to 1m
//! ```

use std::path::Path;

use dormouse_launch::fill::{AROUND_BYTES, is_around};
use dormouse_model::{LogDriver, parse_bytes};
use serde::Deserialize;

use crate::error::{Error, Result};

#[derive(Deserialize, Default)]
struct File {
    #[serde(default)]
    wake: Section,
    #[serde(default)]
    run: RunSection,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RunSection {
    default_volume: Option<String>,
    log_driver: Option<LogDriver>,
}

/// The options before those of every mount of a host directory, in the form of `-v`.
pub(crate) fn default_volume(path: &Path) -> Result<String> {
    Ok(read(path)?.run.default_volume.unwrap_or_default())
}

/// The log driver of containers without `--log-driver`.
pub(crate) fn log_driver(path: &Path) -> Result<LogDriver> {
    Ok(read(path)?.run.log_driver.unwrap_or_default())
}

fn read(path: &Path) -> Result<File> {
    let text = match std::fs::read_to_string(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(File::default()),
        text => text.map_err(Error::file("cannot read", path))?,
    };
    toml::from_str(&text).map_err(|e| Error::Invalid(format!("{}: {e}", path.display())))
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct Section {
    block: Option<String>,
}

/// Returns how much memory is filled when a page of it is touched, in bytes.
pub(crate) fn block_bytes(path: &Path) -> Result<u64> {
    let Some(block) = read(path)?.wake.block else { return Ok(AROUND_BYTES) };
    let bad = |what: String| Error::Invalid(format!("{}: {what}", path.display()));
    let bytes = parse_bytes(&block).map_err(|e| bad(e.to_string()))?;
    match is_around(bytes) {
        true => Ok(bytes),
        false => Err(bad(format!("block '{block}' is no power of two from 4k to 1m"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_size_is_power_of_two_within_bounds() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = |text: &str| {
            std::fs::write(file.path(), text).unwrap();
            block_bytes(file.path())
        };
        assert_eq!(read("[daemon]\nmemory = \"off\"\n").unwrap(), AROUND_BYTES);
        assert_eq!(read("[wake]\nblock = \"4k\"\n").unwrap(), 4096);
        for bad in ["5k", "2k", "2m", "much"] {
            let error = read(&format!("[wake]\nblock = \"{bad}\"\n")).unwrap_err();
            assert!(error.to_string().contains(bad), "{error}");
        }
        assert!(read("[run]\ndefault-volumes = \"ro\"\n").is_err());
        assert!(read("[wake]\nblocks = \"4k\"\n").is_err());
        assert_eq!(block_bytes(Path::new("/no/such/file")).unwrap(), AROUND_BYTES);
    }
}
