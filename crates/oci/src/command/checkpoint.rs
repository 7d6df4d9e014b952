//! `checkpoint` and `restore`: flags of runc-checkpoint(8) and runc-restore(8).
//!
//! Flags about CRIU's internals are accepted without effect, which the help states; flags for
//! unsupported functions are refused.

use std::path::PathBuf;

use super::context::Context;
use super::flag::{BUNDLE, CONSOLE, DETACH, Flag, Given, HELP, KEYRING, NO_PIVOT, PID_FILE, Takes};
use super::verb::asked;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::foreground::{self, Signals};
use crate::restore::Restore;

use Takes::{Many, Nothing, One};

const IMAGE: Flag =
    ("image-path", "", One, "directory of the checkpoint, ./checkpoint if not given");
const WORK: Flag = ("work-path", "", One, "accepted without effect: nothing is logged there");
const TCP: Flag = ("tcp-established", "", Nothing, "TCP connections, too");
const EXTERNAL: Flag =
    ("ext-unix-sk", "", Nothing, "accepted; a socket with a peer outside is refused all the same");
const SHELL: Flag = ("shell-job", "", Nothing, "accepted without effect");
const LOCKS: Flag = ("file-locks", "", Nothing, "accepted without effect: locks are always saved");
const CGROUPS: Flag =
    ("manage-cgroups-mode", "", One, "accepted without effect: limits are the configuration's");
const EMPTY: Flag = ("empty-ns", "", Many, "network only, accepted without effect");
const DEDUP: Flag = ("auto-dedup", "", Nothing, "accepted without effect");
const LAZY: Flag = ("lazy-pages", "", Nothing, "refused: no page server");

pub(super) const CHECKPOINT: &[Flag] = &[
    IMAGE,
    WORK,
    ("leave-running", "", Nothing, "the container continues; otherwise it is deleted"),
    TCP,
    ("tcp-skip-in-flight", "", Nothing, "accepted; in-flight connections are waited for"),
    ("link-remap", "", Nothing, "accepted without effect"),
    EXTERNAL,
    SHELL,
    LOCKS,
    CGROUPS,
    EMPTY,
    DEDUP,
    LAZY,
    ("pre-dump", "", Nothing, "refused: a checkpoint is whole"),
    ("parent-path", "", One, "refused: a checkpoint is whole"),
    ("page-server", "", One, "refused: no page server"),
    ("status-fd", "", One, "refused: no page server"),
    HELP,
];

pub(super) const RESTORE: &[Flag] = &[
    BUNDLE,
    IMAGE,
    WORK,
    CONSOLE,
    DETACH,
    PID_FILE,
    TCP,
    EXTERNAL,
    SHELL,
    LOCKS,
    CGROUPS,
    EMPTY,
    DEDUP,
    ("no-subreaper", "", Nothing, "accepted without effect"),
    NO_PIVOT,
    KEYRING,
    LAZY,
    ("lsm-profile", "", One, "refused: labels are the configuration's"),
    ("lsm-mount-context", "", One, "refused: labels are the configuration's"),
    HELP,
];

/// Refuses flags for unsupported functions.
fn refuse(given: &Given) -> Result<()> {
    let no = |flag: &str, why: &str| Err(Error::Usage(format!("--{flag}: {why}")));
    let has_text = |flag: &str| given.one(flag).is_some_and(|value| !value.is_empty());
    let whole = "every checkpoint is whole; leave it out";
    if given.has("pre-dump") {
        return no("pre-dump", whole);
    }
    if has_text("parent-path") {
        return no("parent-path", whole);
    }
    if given.has("lazy-pages") {
        return no("lazy-pages", "memory is restored at once; leave it out");
    }
    for flag in ["page-server", "status-fd"] {
        if has_text(flag) {
            return no(flag, "there is no page server; leave it out");
        }
    }
    for flag in ["lsm-profile", "lsm-mount-context"] {
        if has_text(flag) {
            return no(flag, "labels are those of config.json; leave it out");
        }
    }
    if let Some(other) = given.many("empty-ns").iter().find(|kind| *kind != "network") {
        return no("empty-ns", &format!("{other:?} is not network"));
    }
    let modes = ["", "soft", "full", "strict", "ignore"];
    if given.one("manage-cgroups-mode").is_some_and(|mode| !modes.contains(&mode)) {
        return no("manage-cgroups-mode", "it is none of soft, full, strict, ignore");
    }
    Ok(())
}

fn image(given: &Given) -> PathBuf {
    given.one("image-path").filter(|path| !path.is_empty()).unwrap_or("checkpoint").into()
}

pub(super) fn checkpoint(context: Context<'_>) -> Result<u8> {
    let given = context.given;
    refuse(given)?;
    let options = Checkpoint {
        image: image(given),
        leave_running: given.has("leave-running"),
        connections: given.has("tcp-established"),
    };
    let figures = context.runtime.checkpoint(given.id()?, &options)?;
    crate::log::debug(&format!(
        "{} processes, {} bytes; stopped in {} us, read in {}, published in {}",
        figures.processes,
        figures.bytes,
        figures.stop.as_micros(),
        figures.read.as_micros(),
        figures.publish.as_micros(),
    ));
    Ok(0)
}

pub(super) fn restore(mut context: Context<'_>) -> Result<u8> {
    let (runtime, given) = (context.runtime, context.given);
    refuse(given)?;
    let id = given.id()?;
    let mut create = asked(&mut context);
    let detach = given.has("detach");
    create.keep_console = !detach && create.console_socket.is_none();
    let signals = if detach { None } else { Some(Signals::hold()?) };
    let connections = given.has("tcp-established");
    let created = runtime.restore(id, &Restore { create, image: image(given), connections })?;
    let Some(signals) = signals else { return Ok(0) };
    let ended = foreground::stay(&created, signals);
    let deleted = runtime.delete(id, true);
    let code = ended?; // the first error is returned
    deleted?;
    Ok(code as u8)
}
