//! The umask of the caller and the umask of this program.
//!
//! The files of an instance have the same modes under every caller. With the umask 0, a configuration
//! would be writable for all users of the host. With 077, a container could not read its `/etc/hosts`.
//! The caller's umask applies to the files requested by the caller, such as `save --output`.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::Mode;

/// The umask of this program.
const OWN: Mode = Mode::from_raw_mode(0o022);

static CALLERS: AtomicU32 = AtomicU32::new(0o022);

/// Sets the umask of this program and records the umask of the caller.
pub(crate) fn set() {
    let callers = rustix::process::umask(OWN);
    if dormouse_kernel::weakened("own-umask") {
        rustix::process::umask(callers);
    }
    CALLERS.store(callers.as_raw_mode(), Ordering::Relaxed);
}

/// Records the umask of another caller.
pub(crate) fn set_callers(mask: u32) {
    CALLERS.store(mask & 0o777, Ordering::Relaxed);
}

/// Sets the mode of a new file requested by the caller: 0666 without the bits of the caller's umask.
pub(crate) fn apply(file: &File) -> io::Result<()> {
    let mode = 0o666 & !CALLERS.load(Ordering::Relaxed);
    file.set_permissions(Permissions::from_mode(mode))
}
