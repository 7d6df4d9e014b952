//! A container on its way to sleep: a process of ours that does it and prints what came of it.
//!
//! A process, so that several can at once (a tracer waits for all tracees of its process), so that
//! one that meets something odd takes nobody with it, and so that the daemon stays as small as it
//! was.

use std::ffi::OsString;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Stdio};

use dormouse_container::{Fell, Idle, Tier, Why};
use dormouse_model::ContainerId;

/// One of them.
#[derive(Debug)]
pub(crate) struct Errand {
    pub(crate) id: ContainerId,
    pub(crate) tier: Tier,
    pub(crate) why: Why,
    child: Child,
    said: ChildStdout,
}

impl Errand {
    /// Starts it; `command` is the program and its arguments up to the id. Without `idle` it sleeps
    /// whatever it does.
    pub(crate) fn start(
        command: &[OsString],
        id: &ContainerId,
        idle: Option<&Idle>,
        tier: Tier,
        why: Why,
    ) -> std::io::Result<Self> {
        let mut words = command.iter();
        let program = words.next().ok_or(std::io::ErrorKind::NotFound)?;
        let mut command = Command::new(program);
        command.args(words).args([id.as_str(), tier.as_str(), why.as_str()]);
        if let Some(Idle { quiet, used_ns, worth }) = idle {
            let numbers = [quiet.as_millis() as u64, *used_ns, worth.as_millis() as u64];
            command.args(numbers.map(|n| n.to_string()));
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        // What ends the daemon at a terminal lets it come to its end.
        let mut child = command.process_group(0).spawn()?;
        let said = child.stdout.take().ok_or(std::io::ErrorKind::BrokenPipe)?;
        Ok(Self { id: id.clone(), tier, why, child, said })
    }

    /// Readable when it has come to its end.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.said.as_fd()
    }

    /// Waits for its end and tells what came of it.
    pub(crate) fn finish(mut self) -> Fell {
        let mut text = String::new();
        let read = self.said.read_to_string(&mut text);
        let ended = self.child.wait();
        let fell = serde_json::from_str(text.trim());
        fell.unwrap_or_else(|_| Fell::Awake {
            why: match (read, ended) {
                (Err(e), _) | (_, Err(e)) => format!("nobody knows what came of it: {e}"),
                (_, Ok(status)) => format!("what was to put it to sleep failed: {status}"),
            },
        })
    }
}
