//! Resource limits of a process (getrlimit(2)).

use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::OnceLock;

use crate::Errno;
use crate::error::{Explain, Result};

/// The number of descriptors.
const NOFILE: u32 = 7;
/// No limit.
pub const UNLIMITED: u64 = u64::MAX;

/// Names as `ulimit`, podman and OCI's `RLIMIT_*` write them, with the kernel's numbers.
const NAMES: [(&str, u32); 16] = [
    ("cpu", 0),
    ("fsize", 1),
    ("data", 2),
    ("stack", 3),
    ("core", 4),
    ("rss", 5),
    ("nproc", 6),
    ("nofile", 7),
    ("memlock", 8),
    ("as", 9),
    ("locks", 10),
    ("sigpending", 11),
    ("msgqueue", 12),
    ("nice", 13),
    ("rtprio", 14),
    ("rttime", 15),
];

/// The kernel's number of a resource, by its name in any case, with or without `RLIMIT_`.
pub fn resource(name: &str) -> Option<u32> {
    let name = name.to_ascii_lowercase();
    let name = name.strip_prefix("rlimit_").unwrap_or(&name);
    NAMES.iter().find(|(known, _)| *known == name).map(|(_, number)| *number)
}

/// The name of a resource, such as `nofile`.
pub fn name(resource: u32) -> Option<&'static str> {
    NAMES.iter().find(|(_, number)| *number == resource).map(|(name, _)| *name)
}

/// Soft and hard limit of the calling process; [`UNLIMITED`] for none.
pub fn get(resource: u32) -> Result<(u64, u64)> {
    crate::call::prlimit(resource, None)
        .explain("prlimit64", || name(resource).map_or(resource.to_string(), str::to_owned))
}

/// Sets soft and hard limit of the calling process.
///
/// EPERM when the hard limit would be raised without CAP_SYS_RESOURCE *of the initial user
/// namespace*, EINVAL when the soft one is above the hard one.
pub fn set(resource: u32, soft: u64, hard: u64) -> Result<()> {
    let result: Result<_, Errno> = crate::call::prlimit(resource, Some((soft, hard)));
    result
        .explain("prlimit64", || {
            let name = name(resource).map_or(resource.to_string(), str::to_owned);
            format!("{name}, {soft}:{hard}")
        })
        .map(drop)
}

/// The limits of descriptors before [`raise_descriptors`].
static BEFORE: OnceLock<(u64, u64)> = OnceLock::new();

/// Raises the soft limit of descriptors of the calling process to the hard one. Programs that it starts get the limit
/// from before by [`without_raise`].
pub fn raise_descriptors() -> Result<()> {
    let before = get(NOFILE)?;
    let (_, hard) = *BEFORE.get_or_init(|| before);
    set(NOFILE, hard, hard)
}

/// Lets a program begin with the limits of descriptors from before [`raise_descriptors`]: containers would get them
/// from a keeper that is started so.
pub fn without_raise(command: &mut Command) {
    if let Some(before) = BEFORE.get() {
        at_exec(command, NOFILE, *before);
    }
}

/// Lets a program begin with these soft and hard limits, whatever those of the calling process are then.
fn at_exec(command: &mut Command, resource: u32, (soft, hard): (u64, u64)) {
    let set = move || {
        let set: Result<_, Errno> = crate::call::prlimit(resource, Some((soft, hard)));
        set.map(drop).map_err(std::io::Error::from)
    };
    // SAFETY: between fork and execve the closure makes one system call, and allocates nothing.
    unsafe { command.pre_exec(set) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rlimit_names_parse_in_any_usual_form() {
        assert_eq!(resource("nofile"), Some(7));
        assert_eq!(resource("RLIMIT_NOFILE"), Some(7));
        assert_eq!(resource("NoFile"), Some(7));
        assert_eq!(resource("files"), None);
        assert!((0..16).all(|number| name(number).and_then(resource) == Some(number)));
    }

    #[test]
    fn program_begins_with_the_given_rlimit() {
        let (_, hard) = get(7).unwrap();
        let mut command = Command::new("/bin/sh");
        at_exec(command.args(["-c", "ulimit -Sn"]), 7, (61, hard));
        let out = command.output().unwrap();
        assert_eq!(String::from_utf8_lossy(&out.stdout).trim(), "61");
    }

    #[test]
    fn rlimit_reads_back_as_set() {
        let (soft, hard) = get(4).unwrap();
        set(4, 0, hard).unwrap();
        assert_eq!(get(4).unwrap(), (0, hard));
        set(4, soft, hard).unwrap();
        assert_eq!(set(4, 1, 0).unwrap_err().errno(), libc::EINVAL);
        assert!(set(99, 0, 0).unwrap_err().to_string().contains("99"));
    }
}
