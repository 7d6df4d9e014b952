//! Output to a file, written completely or not at all, or to standard output.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::{fail, terminal, umask};

/// Content of a file, which decides its permissions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holds {
    /// Files: permissions by the umask of the caller.
    Files,
    /// Memory of processes, which may contain secrets: readable by the owner only.
    Memory,
}

/// Returns whether the reader of our output has closed the pipe.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = |e: &(dyn std::error::Error + 'static)| {
        e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
    };
    error.chain().any(io)
}

/// Writes the output of `write` to a file, or to standard output if none is given. The file appears
/// when it is complete; standard output must not be a terminal.
pub(crate) fn write(
    to: Option<&Path>,
    holds: Holds,
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<()> {
    let Some(path) = to.filter(|p| *p != Path::new("-")) else {
        if terminal::is_terminal(rustix::stdio::stdout()) {
            bail!("an archive is not for a terminal: give a file with --output, or redirect");
        }
        let mut out = BufWriter::with_capacity(64 << 10, io::stdout().lock());
        return write(&mut out)
            .and_then(|()| out.flush().context("cannot write to standard output"))
            .map_err(|e| if is_broken_pipe(&e) { fail::quiet(141) } else { e });
    };
    to_file(path, (holds, false), write)
}

/// Writes memory to a file, which appears when it is complete and on the disk.
pub(crate) fn keep(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    to_file(path, (Holds::Memory, true), write)
}

fn to_file(
    path: &Path,
    (holds, durable): (Holds, bool),
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<()> {
    let mut part = path.as_os_str().to_owned();
    part.push(format!(".part-{}", std::process::id()));
    let part = PathBuf::from(part);
    let step = || format!("cannot write '{}'", path.display());
    let done = (|| {
        let file = File::options().write(true).create_new(true).mode(0o600).open(&part);
        let file = file.with_context(step)?;
        if holds == Holds::Files {
            umask::apply(&file).with_context(step)?;
        }
        let mut out = BufWriter::with_capacity(64 << 10, file);
        write(&mut out)?;
        out.flush().with_context(step)?;
        if durable {
            out.get_ref().sync_all().with_context(step)?;
        }
        std::fs::rename(&part, path).with_context(step)?;
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
        match durable {
            true => File::open(dir.unwrap_or(Path::new("."))).and_then(|d| d.sync_all()),
            false => Ok(()),
        }
        .with_context(step)
    })();
    if done.is_err() {
        let _ = std::fs::remove_file(&part); // the first error is returned
    }
    done
}
