//! Standard streams: containerd's named pipes, files, and terminals.
//!
//! A pipe is passed to the container itself. The shim holds it open for reading and writing, so
//! that it does not break when the other end is closed or reopened. After the exit of the process
//! the shim closes it, and a reader sees the end. The shim opens no pipe in a way that would block.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use dormouse_launch::wire;
use rustix::fs::{Mode, OFlags};
use rustix::net::RecvFlags;
use rustix::termios::Winsize;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::task::JoinHandle;

/// Time for reading the remaining output of a terminal after its process has exited.
const DRAINS_WITHIN: Duration = Duration::from_secs(2);
/// Bytes that are copied at a time.
const CHUNK: usize = 16 << 10;

/// The streams that containerd requests for a process; an empty text means none.
#[derive(Debug, Default, Clone)]
pub struct Wanted {
    pub stdin: String,
    pub stdout: String,
    pub stderr: String,
    pub terminal: bool,
}

/// The streams of the process.
#[derive(Debug)]
pub struct Ends(pub [Stdio; 3]);

/// The ends of a process's streams that the shim keeps until the process exits.
#[derive(Debug, Default)]
pub struct Held(Mutex<Keep>);

#[derive(Debug, Default)]
struct Keep {
    input: Option<File>,
    output: Vec<File>,
    terminal: Option<Terminal>,
}

#[derive(Debug)]
struct Terminal {
    master: Arc<AsyncFd<OwnedFd>>,
    input: Option<JoinHandle<()>>,
    output: Option<JoinHandle<()>>,
}

/// Opens the streams of a process. With a terminal there are none: see [`Console`].
pub fn open(wanted: &Wanted) -> Result<(Ends, Held)> {
    if wanted.terminal {
        return Ok((Ends([Stdio::null(), Stdio::null(), Stdio::null()]), Held::default()));
    }
    let mut keep = Keep::default();
    let input = match wanted.stdin.as_str() {
        "" => Stdio::null(),
        path => {
            // ORDER: held first; opening for reading alone would wait for a writer.
            keep.input = Some(open_both(path)?);
            File::open(path).with_context(|| format!("opening {path}"))?.into()
        }
    };
    let mut output = |path: &str| -> Result<Stdio> {
        if path.is_empty() {
            return Ok(Stdio::null());
        }
        let path = file_of(path)?;
        let is_pipe = std::fs::metadata(&path).is_ok_and(|m| m.file_type().is_fifo());
        if is_pipe {
            keep.output.push(open_both(&path)?);
        }
        let file = OpenOptions::new().append(true).create(!is_pipe).open(&path);
        Ok(file.with_context(|| format!("opening {}", path.display()))?.into())
    };
    let ends = [input, output(&wanted.stdout)?, output(&wanted.stderr)?];
    Ok((Ends(ends), Held(Mutex::new(keep))))
}

fn open_both(path: impl AsRef<Path>) -> Result<File> {
    let file = OpenOptions::new().read(true).write(true).open(&path);
    file.with_context(|| format!("opening {}", path.as_ref().display()))
}

/// A descriptor that is waited for.
#[allow(deprecated)] // unsafe only for types with a changing descriptor, unlike this one
pub fn watched(fd: OwnedFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(fd)
}

/// A stream is a path, or an address with one.
fn file_of(text: &str) -> Result<PathBuf> {
    match text.split_once("://") {
        None => Ok(text.into()),
        Some(("fifo" | "file", path)) => {
            let path = path.split('?').next().unwrap_or_default();
            ensure!(path.starts_with('/'), "{text}: the path is not absolute");
            Ok(path.into())
        }
        Some((scheme, _)) => bail!("{text}: a stream that is {scheme} is not supported"),
    }
}

impl Held {
    fn keep(&self) -> std::sync::MutexGuard<'_, Keep> {
        // Plain values: there is nothing half done about them.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The process sees the end of its input when others have closed it, too.
    pub fn close_input(&self) {
        let mut keep = self.keep();
        keep.input = None;
        if let Some(input) = keep.terminal.as_mut().and_then(|terminal| terminal.input.take()) {
            input.abort();
        }
    }

    /// Changes the size of the terminal, where there is one.
    pub fn resize(&self, width: u32, height: u32) -> Result<()> {
        let keep = self.keep();
        let terminal = keep.terminal.as_ref().context("it has no terminal")?;
        let size = Winsize {
            ws_row: height.try_into().unwrap_or(u16::MAX),
            ws_col: width.try_into().unwrap_or(u16::MAX),
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        rustix::termios::tcsetwinsize(terminal.master.get_ref(), size).context("resizing it")
    }

    /// Handles the exit of the process: passes on its remaining output, and closes everything.
    pub async fn end(&self) {
        let Keep { input, output, terminal } = std::mem::take(&mut *self.keep());
        drop((input, output));
        let Some(terminal) = terminal else { return };
        if let Some(input) = terminal.input {
            input.abort();
        }
        if let Some(mut copying) = terminal.output {
            // A process that lives on may hold the terminal for as long as it likes.
            if tokio::time::timeout(DRAINS_WITHIN, &mut copying).await.is_err() {
                copying.abort();
            }
        }
    }
}

/// A socket at which the runtime leaves the master of a new terminal.
#[derive(Debug)]
pub struct Console {
    listener: UnixListener,
    path: PathBuf,
}

impl Console {
    /// Listens at `name` in the directory of the bundle.
    pub fn listen(bundle: &Path, name: &str) -> Result<Self> {
        let path = bundle.join(name);
        let failed = || format!("listening at {}", path.display());
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(bundle, flags, Mode::empty()).with_context(failed)?;
        let _ = std::fs::remove_file(&path); // of one that was interrupted
        // An address holds 108 bytes, and a bundle's path may be longer.
        let short = format!("/proc/self/fd/{}/{name}", dir.as_raw_fd());
        let listener = UnixListener::bind(short).with_context(failed)?;
        listener.set_nonblocking(true).with_context(failed)?;
        Ok(Self { listener, path })
    }

    /// For the command line.
    pub fn path(&self) -> String {
        self.path.to_string_lossy().into_owned()
    }

    /// The runtime has left the master there: from now on it is copied.
    pub fn attach(self, wanted: &Wanted, held: &Held) -> Result<()> {
        let (stream, _) = self.listener.accept().context("no terminal was received")?;
        let mut master = None;
        wire::receive(&stream, &mut [0; 256], RecvFlags::empty(), |fd| master = Some(fd))
            .context("receiving the terminal")?;
        let master = master.context("the terminal is missing")?;
        let flags = rustix::fs::fcntl_getfl(&master).context("looking at the terminal")?;
        rustix::fs::fcntl_setfl(&master, flags | OFlags::NONBLOCK).context("using the terminal")?;
        let master = Arc::new(watched(master).context("watching the terminal")?);
        let both = |path: &str| -> Result<(PathBuf, pipe::OpenOptions)> {
            let mut options = pipe::OpenOptions::new();
            options.read_write(true);
            Ok((file_of(path)?, options))
        };
        let input = match wanted.stdin.as_str() {
            "" => None,
            path => {
                let (path, options) = both(path)?;
                let from = options.open_receiver(&path);
                let from = from.with_context(|| format!("opening {}", path.display()))?;
                Some(tokio::spawn(copy_in(from, master.clone())))
            }
        };
        let to = match wanted.stdout.as_str() {
            "" => None,
            path => {
                let (path, options) = both(path)?;
                let to = options.open_sender(&path);
                Some(to.with_context(|| format!("opening {}", path.display()))?)
            }
        };
        let output = Some(tokio::spawn(copy_out(master.clone(), to)));
        held.keep().terminal = Some(Terminal { master, input, output });
        Ok(())
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path); // otherwise removed with the bundle
    }
}

/// Copies until it is stopped: the pipe is held open by the shim, too.
async fn copy_in(mut from: pipe::Receiver, master: Arc<AsyncFd<OwnedFd>>) {
    let mut bytes = vec![0; CHUNK];
    while let Ok(n @ 1..) = from.read(&mut bytes).await {
        let mut rest = &bytes[..n];
        while !rest.is_empty() {
            let Ok(mut ready) = master.writable().await else { return };
            match ready.try_io(|fd| Ok(rustix::io::write(fd.get_ref().as_fd(), rest)?)) {
                Ok(Ok(n)) => rest = &rest[n..],
                Ok(Err(_)) => return,
                Err(_would_block) => {}
            }
        }
    }
}

/// Copies until the last process closes the terminal: then reading is an error (EIO).
async fn copy_out(master: Arc<AsyncFd<OwnedFd>>, mut to: Option<pipe::Sender>) {
    let mut bytes = vec![0; CHUNK];
    loop {
        let Ok(mut ready) = master.readable().await else { return };
        let n = match ready.try_io(|fd| Ok(rustix::io::read(fd.get_ref().as_fd(), &mut bytes)?)) {
            Ok(Ok(n @ 1..)) => n,
            Ok(_) => return,
            Err(_would_block) => continue,
        };
        if let Some(to) = &mut to
            && to.write_all(&bytes[..n]).await.is_err()
        {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_is_a_path_or_a_url_of_one() {
        assert_eq!(file_of("/run/a").expect("good"), Path::new("/run/a"));
        assert_eq!(file_of("file:///var/log/a?x=y").expect("good"), Path::new("/var/log/a"));
        for bad in ["binary:///bin/logger", "file://relative", "vsock://1:2"] {
            assert!(file_of(bad).is_err(), "{bad}");
        }
    }
}
