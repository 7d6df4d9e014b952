//! Swap files that an operator gives, for the memory of those that are drowsy.
//!
//! All have one priority, above that of what the host has without saying any, so the kernel spreads what is
//! pushed out over the disks that they are on. They stay in use when the daemon ends: what is
//! in them belongs to containers. `swapoff FILE` ends it, and a reboot.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use dormouse_kernel::swap;
use dormouse_model::{Invalid, parse_bytes};

use crate::{Error, Result, say};

/// The kernel gives swap areas without a priority negative ones.
const PRIORITY: u16 = 100;

/// A file, and how much it is to hold where it has to be made: `/var/swap=8g`.
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

/// Has the kernel swap to all of them; makes those that are not there.
pub(crate) fn begin(files: &[SwapFile]) -> Result<()> {
    for SwapFile { path, bytes } in files {
        let failed = |what: &str, e: std::io::Error| Error::Settings {
            path: path.clone(),
            what: format!("{what}: {e}"),
        };
        let known = swap::areas().map_err(|e| failed("cannot read /proc/swaps", e))?;
        let read = |e| failed("cannot be read", e);
        // The kernel shows the path behind links.
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
        // ORDER: opened once: whoever may write to a directory on the way may put another file there.
        let file = swap::open(&real).map_err(read)?;
        if !swap::is_area(&file).map_err(read)? {
            let what = "there is a file that is not for swap: remove it, or give another name";
            return Err(Error::Settings { path: path.clone(), what: what.into() });
        }
        let meta = file.metadata().map_err(read)?;
        if meta.uid() != 0 || meta.mode() & 0o077 != 0 {
            let what =
                "others than root may read what is swapped there: chown root and chmod 600 it";
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
    fn a_swap_file_is_a_path_and_a_size() {
        let file: SwapFile = "/var/a=b=8m".parse().unwrap();
        assert_eq!((file.path.as_path(), file.bytes), (Path::new("/var/a=b"), 8 << 20));
        for bad in ["", "/var/swap", "swap=8g", "/=8g", "/var/swap=", "/var/swap=4k", "/a=much"] {
            assert!(bad.parse::<SwapFile>().is_err(), "{bad}");
        }
    }

    #[test]
    fn what_others_may_read_is_not_swapped_to() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("swap");
        swap::make(&path, 1 << 20).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        let error = begin(&[SwapFile { path, bytes: 1 << 20 }]).unwrap_err();
        assert!(error.to_string().contains("chmod 600"), "{error}");
    }

    #[test]
    fn what_is_no_swap_file_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("diary");
        std::fs::write(&path, "dear diary").unwrap();
        let error = begin(&[SwapFile { path: path.clone(), bytes: 1 << 20 }]).unwrap_err();
        assert!(error.to_string().contains("not for swap"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "dear diary");
    }
}
