//! `run` and `exec` in the foreground: forwards signals and the terminal's bytes, and returns the
//! exit code of the process.

use std::io::IsTerminal;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dormouse_kernel::pidfd;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::termios::{OptionalActions, OutputModes, Termios};

use crate::create::Created;
use crate::error::{Error, Result};

/// Signals of this program, held until they can be forwarded.
///
/// ORDER: held before the process is made, since an early signal would end this program.
pub(crate) struct Signals(SignalFd);

impl Signals {
    pub(crate) fn hold() -> Result<Self> {
        let mut held = SigSet::all();
        // Signals of own faults cannot be held, and SIGTRAP belongs to a tracer.
        for own in
            [Signal::SIGSEGV, Signal::SIGBUS, Signal::SIGILL, Signal::SIGFPE, Signal::SIGTRAP]
        {
            held.remove(own);
        }
        let made = sigprocmask(SigmaskHow::SIG_BLOCK, Some(&held), None).and_then(|()| {
            SignalFd::with_flags(&held, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
        });
        made.map(Self).map_err(|e| Error::file("hold", "signals")(e.into()))
    }

    fn next(&mut self) -> Option<i32> {
        let info = self.0.read_signal().ok().flatten()?;
        i32::try_from(info.ssi_signo).ok()
    }
}

/// The caller's terminal in raw mode; restored when dropped.
struct Raw {
    terminal: OwnedFd,
    before: Termios,
}

impl Raw {
    fn enter() -> Option<Self> {
        let stdin = std::io::stdin();
        if !stdin.is_terminal() {
            return None;
        }
        let terminal = stdin.as_fd().try_clone_to_owned().ok()?;
        let before = rustix::termios::tcgetattr(&terminal).ok()?;
        let mut raw = before.clone();
        raw.make_raw();
        // The container's terminal leaves the ends of lines to this one (`leave_line_ends`).
        raw.output_modes.insert(OutputModes::OPOST);
        rustix::termios::tcsetattr(&terminal, OptionalActions::Now, &raw).ok()?;
        Some(Self { terminal, before })
    }

    fn copy_size(&self, master: BorrowedFd<'_>) {
        if let Ok(size) = rustix::termios::tcgetwinsize(&self.terminal) {
            let _ = rustix::termios::tcsetwinsize(master, size);
        }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = rustix::termios::tcsetattr(&self.terminal, OptionalActions::Now, &self.before);
    }
}

/// Serves a process until it exits; returns its exit code, or 128 and the signal's number if it was
/// killed.
pub(crate) fn stay(created: &Created, mut signals: Signals) -> Result<i32> {
    let raw = created.console.as_ref().and_then(|_| Raw::enter());
    if let (Some(raw), Some(master)) = (&raw, &created.console) {
        raw.copy_size(master.as_fd());
    }
    let failed = |e: rustix::io::Errno| Error::file("wait for", "the process")(e.into());
    let (stdin, stdout) = (rustix::stdio::stdin(), rustix::stdio::stdout());
    let (mut input, mut output) = (created.console.is_some(), created.console.is_some());
    let mut ended = false;
    loop {
        let mut watched = vec![
            PollFd::new(&created.pidfd, PollFlags::IN),
            PollFd::new(&signals.0, PollFlags::IN),
        ];
        if let Some(master) = created.console.as_ref().filter(|_| output) {
            watched.push(PollFd::new(master, PollFlags::IN));
            if input {
                watched.push(PollFd::from_borrowed_fd(stdin, PollFlags::IN));
            }
        }
        match poll(&mut watched, None) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other.map_err(failed)?,
        };
        let ready: Vec<bool> = watched.iter().map(|w| !w.revents().is_empty()).collect();
        drop(watched);
        if ready[1] {
            while let Some(signal) = signals.next() {
                tell(created, raw.as_ref(), signal);
            }
        }
        if let Some(master) = created.console.as_ref().filter(|_| output) {
            // Its output is read to the end, also after its exit.
            if ready[2] || ended {
                output = pump(master.as_fd(), stdout)? && (!ended || ready[2]);
            }
            if input && ready.get(3) == Some(&true) {
                input = pump(stdin, master.as_fd())?;
            }
        }
        ended |= ready[0];
        if ended && (!output || ready.get(2) != Some(&true)) {
            break;
        }
    }
    drop(raw);
    let exit =
        pidfd::reap(&created.pidfd).map_err(Error::call("read the process's exit status"))?;
    Ok(exit.map_or(0, dormouse_kernel::process::Exit::code))
}

fn tell(created: &Created, raw: Option<&Raw>, signal: i32) {
    let winch = Signal::SIGWINCH as i32;
    let not_for_it = [Signal::SIGCHLD as i32, Signal::SIGPIPE as i32, Signal::SIGURG as i32];
    match (raw, &created.console) {
        (Some(raw), Some(master)) if signal == winch => raw.copy_size(master.as_fd()),
        _ if not_for_it.contains(&signal) => {}
        // The process may just have exited.
        _ => drop(pidfd::send_signal(&created.pidfd, signal)),
    }
}

/// Moves the available bytes; returns false at the end.
fn pump(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<bool> {
    let mut bytes = [0_u8; 16384];
    let n = match rustix::io::read(from, &mut bytes) {
        // EIO: the last user of the terminal has closed it.
        Ok(0) | Err(rustix::io::Errno::IO) => return Ok(false),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(true),
        other => other.map_err(|e| Error::file("read", "the terminal")(e.into()))?,
    };
    let mut rest = &bytes[..n];
    while !rest.is_empty() {
        match rustix::io::write(to, rest) {
            Ok(n) => rest = &rest[n..],
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => {
                let _ = poll(&mut [PollFd::from_borrowed_fd(to, PollFlags::OUT)], None);
            }
            Err(_) => return Ok(false),
        }
    }
    Ok(true)
}
