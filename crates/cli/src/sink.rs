//! Output to a file, written completely or not at all, or to standard output.
//!
//! A device or a named pipe has no earlier content, and is written to. A file in its place would replace the host's
//! `/dev/null`, and a reader of the pipe would wait forever.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::OFlags;

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
/// when it is complete; a device or a named pipe is written to. No output may be a terminal.
pub(crate) fn write(
    to: Option<&Path>,
    holds: Holds,
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<()> {
    let Some(path) = to.filter(|p| *p != Path::new("-")) else {
        if terminal::is_terminal(rustix::stdio::stdout()) {
            bail!(FOR_A_TERMINAL);
        }
        let mut out = BufWriter::with_capacity(64 << 10, io::stdout().lock());
        return write(&mut out)
            .and_then(|()| out.flush().context("cannot write to standard output"))
            .map_err(|e| if is_broken_pipe(&e) { fail::quiet(141) } else { e });
    };
    to_file(path, (holds, false), write)
}

const FOR_A_TERMINAL: &str =
    "an archive is not for a terminal: give a file with --output, or redirect";

/// Writes memory to a file, which appears when it is complete and on the disk.
pub(crate) fn keep(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    to_file(path, (Holds::Memory, true), write)
}

/// Returns whether a file is written to as it is: a device, a named pipe, or a link of the host to one of the caller's
/// open files, such as `/dev/stdout`. Any other link is replaced: another user may have made it.
fn is_written_in_place(path: &Path) -> bool {
    let Ok(found) = std::fs::symlink_metadata(path) else { return false };
    let kind = found.file_type();
    let is_of_host = |dir: &Path| {
        dir.starts_with("/proc") || [Path::new("/dev"), Path::new("/dev/fd")].contains(&dir)
    };
    match kind.is_symlink() {
        true => path.parent().is_some_and(is_of_host),
        false => !kind.is_file() && !kind.is_dir(),
    }
}

/// Writes to a file that exists.
fn in_place(
    path: &Path,
    durable: bool,
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<()> {
    let step = || format!("cannot write '{}'", path.display());
    let is_link = path.is_symlink();
    let flags = if is_link { OFlags::empty() } else { OFlags::NOFOLLOW };
    let mut options = File::options();
    // With O_CREAT the kernel refuses another user's pipe in a directory such as /tmp (`protected_fifos`, proc(5)).
    options.write(true).create(!is_link).truncate(false).mode(0o600);
    let file = options.custom_flags(flags.bits() as i32).open(path).with_context(step)?;
    if terminal::is_terminal(&file) {
        bail!(FOR_A_TERMINAL);
    }
    let mut out = BufWriter::with_capacity(64 << 10, file);
    write(&mut out)?;
    out.flush().with_context(step)?;
    if !durable {
        return Ok(());
    }
    match out.get_ref().sync_all() {
        // EINVAL: it has no disk.
        Err(e) if e.kind() == io::ErrorKind::InvalidInput => Ok(()),
        synced => synced.with_context(step),
    }
}

fn to_file(
    path: &Path,
    (holds, durable): (Holds, bool),
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<()> {
    if is_written_in_place(path) {
        return in_place(path, durable, write);
    }
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{FileTypeExt, symlink};

    use rustix::fs::{CWD, FileType, Mode};

    use super::*;

    fn put(path: &Path) -> Result<()> {
        write(Some(path), Holds::Files, |out| Ok(out.write_all(b"archive")?))
    }

    #[test]
    fn named_pipe_is_written_to_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        // Each open waits for the other side's.
        let read_while = |write: &dyn Fn()| {
            let path = pipe.clone();
            let reader = std::thread::spawn(move || fs::read(path).unwrap());
            write();
            reader.join().unwrap()
        };
        assert_eq!(read_while(&|| put(&pipe).unwrap()), b"archive");
        let kept = || keep(&pipe, |out| Ok(out.write_all(b"memory")?)).unwrap();
        assert_eq!(read_while(&kept), b"memory");
        assert!(fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn file_and_link_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let [file, link, device] = ["file", "link", "device"].map(|name| dir.path().join(name));
        fs::write(&file, "old").unwrap();
        symlink(&file, &link).unwrap();
        symlink("/dev/null", &device).unwrap();
        for path in [&link, &device] {
            put(path).unwrap();
            assert!(fs::symlink_metadata(path).unwrap().is_file(), "{}", path.display());
            assert_eq!(fs::read(path).unwrap(), b"archive");
        }
        assert_eq!(fs::read(&file).unwrap(), b"old");
        put(&file).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"archive");
    }

    #[test]
    fn devices_and_open_files_are_written_in_place() {
        for path in ["/dev/null", "/proc/self/fd/1", "/dev/stdout", "/dev/fd/1"] {
            // A small /dev has no links.
            let is_there = fs::symlink_metadata(path).is_ok();
            assert_eq!(is_written_in_place(Path::new(path)), is_there, "{path}");
        }
        assert!(is_written_in_place(Path::new("/dev/null")));
        assert!(!is_written_in_place(Path::new("/dev/no such file")));
        assert!(!is_written_in_place(Path::new("/")));
    }
}
