//! Swap files given by the operator, for the memory of drowsy (frozen) containers.
//!
//! All of them have one priority, above that of the host's own areas without a priority, so the
//! kernel spreads pages over their disks. They stay in use after the daemon has exited, because
//! they hold memory of containers. `swapoff FILE` or a reboot ends their use.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use dormouse_kernel::swap;
use dormouse_model::{Invalid, parse_bytes};

use crate::error::{Error, Result};
use crate::notify::say;

/// Swap areas without an explicit priority get negative ones from the kernel.
const PRIORITY: u16 = 100;

/// A file, and its size if it has to be created: `/var/swap=8g`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwapFile {
    path: PathBuf,
    bytes: u64,
}

impl FromStr for SwapFile {
    type Err = Invalid;

    fn from_str(text: &str) -> std::result::Result<Self, Invalid> {
        let bad = || Invalid::new("swap file", text, "an absolute path and a size: /var/swap=8g");
        let (path, size) = text.rsplit_once('=').ok_or_else(bad)?;
        let bytes = parse_bytes(size).map_err(|_| bad())? >> 12 << 12; // whole pages
        let path = Path::new(path);
        let is_file = path.is_absolute() && path.file_name().is_some();
        (is_file && bytes >= swap::BYTES_MIN)
            .then(|| Self { path: path.into(), bytes })
            .ok_or_else(bad)
    }
}

/// Enables swapping to all of them; creates the missing ones.
pub(crate) fn begin(files: &[SwapFile]) -> Result<()> {
    for SwapFile { path, bytes } in files {
        let failed = |what: &str, e: std::io::Error| Error::Settings {
            path: path.clone(),
            what: format!("{what}: {e}"),
        };
        let known = swap::areas().map_err(|e| failed("cannot read /proc/swaps", e))?;
        let read = |e| failed("cannot be read", e);
        // /proc/swaps shows resolved paths.
        let real = match path.canonicalize() {
            Ok(real) => real,
            Err(_) => {
                swap::make(path, *bytes).map_err(|e| failed("cannot be made", e))?;
                path.canonicalize().map_err(read)?
            }
        };
        if known.iter().any(|area| area.path == real) {
            continue;
        }
        // ORDER: opened once. A user with write access to a parent directory could replace the file
        // between two opens.
        let file = swap::open(&real).map_err(read)?;
        if !swap::is_area(&file).map_err(read)? {
            let what = "the file exists and is not a swap file: remove it, or give another name";
            return Err(Error::Settings { path: path.clone(), what: what.into() });
        }
        let meta = file.metadata().map_err(read)?;
        if meta.uid() != 0 || meta.mode() & 0o077 != 0 {
            let what = "the swap file is readable by others than root: chown root and chmod 600 it";
            return Err(Error::Settings { path: path.clone(), what: what.into() });
        }
        let why = "cannot be swapped to (its file system must be one such as ext4 or xfs)";
        swap::begin(&file, PRIORITY).map_err(|e| failed(why, e))?;
        say(&format!("swaps to {}", path.display()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_file_setting_is_a_path_and_a_size() {
        let file: SwapFile = "/var/a=b=8m".parse().unwrap();
        assert_eq!((file.path.as_path(), file.bytes), (Path::new("/var/a=b"), 8 << 20));
        for bad in ["", "/var/swap", "swap=8g", "/=8g", "/var/swap=", "/var/swap=4k", "/a=much"] {
            assert!(bad.parse::<SwapFile>().is_err(), "{bad}");
        }
    }

    #[test]
    fn swap_file_readable_by_others_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("swap");
        swap::make(&path, 1 << 20).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        let error = begin(&[SwapFile { path, bytes: 1 << 20 }]).unwrap_err();
        assert!(error.to_string().contains("chmod 600"), "{error}");
    }

    #[test]
    fn existing_file_that_is_no_swap_file_is_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("diary");
        std::fs::write(&path, "dear diary").unwrap();
        let error = begin(&[SwapFile { path: path.clone(), bytes: 1 << 20 }]).unwrap_err();
        assert!(error.to_string().contains("not a swap file"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "dear diary");
    }
}
