//! A process between its clone and its execve, as the engine sees it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::error::LaunchError;
use crate::failure::Failure;
use crate::flat::{self, Code};
use crate::plan::{self, Plan, Step};
use crate::protocol::{FromNewborn, ToNewborn};
use crate::wire;

/// LIMIT: how long a newborn of the keeper's may be silent. A step of its plan that takes so long waits for a
/// file system that does not answer, or for a cgroup that is frozen from inside. The plan of another starter
/// has programs of its caller, and no limit.
pub(crate) const SILENT_MAX: Duration = Duration::from_secs(30);

/// LIMIT: bytes of a program's last words in an error.
const LAST_WORDS: usize = 1024;

/// The last words of a program, from the descriptor that it wrote to. The program may be an image's: a
/// control character is escaped, so that a terminal does not follow it.
fn last_words(fd: &OwnedFd) -> String {
    let size = rustix::fs::fstat(fd).map_or(0, |stat| stat.st_size.cast_unsigned());
    let mut bytes = [0; LAST_WORDS];
    let from = size.saturating_sub(LAST_WORDS as u64);
    let read = rustix::io::pread(fd, &mut bytes, from).unwrap_or(0);
    let text = String::from_utf8_lossy(&bytes[..read]);
    let shown = |c: char| match c {
        '\n' => String::from(' '),
        c if c.is_control() => c.escape_default().to_string(),
        c => c.to_string(),
    };
    text.trim().chars().map(shown).collect()
}

/// A process between its clone and its execve. Dropped before [`Newborn::go`], the process exits.
#[derive(Debug)]
pub struct Newborn {
    /// Its pid in the keeper's (the host's) pid namespace.
    pub pid: u32,
    /// Field 22 of `/proc/PID/stat`: with the pid it names the process for all time (of one boot).
    pub start_time: u64,
    /// Itself.
    pub pidfd: OwnedFd,
    pub(crate) proc: Option<OwnedFd>,
    pub(crate) sock: OwnedFd,
    pub(crate) steps: Vec<Step>,
    /// Whether its plan has a sync point.
    pub(crate) waits: bool,
    /// Whether its plan may have several parts.
    pub(crate) takes_parts: bool,
    /// Descriptors that were sent.
    pub(crate) sent: usize,
}

impl Newborn {
    /// A process that was just cloned, or one that waits at [`Plan::wait_for_start`]; `sock` is the
    /// connection to it.
    pub fn new(pid: u32, start_time: u64, pidfd: OwnedFd, sock: OwnedFd) -> Self {
        let steps = Vec::new();
        Self {
            pid,
            start_time,
            pidfd,
            proc: None,
            sock,
            steps,
            waits: true,
            takes_parts: false,
            sent: 0,
        }
    }

    /// Returns the operations, for [`Newborn::recall`] by a later process.
    pub fn memory(&self) -> Vec<(u16, String)> {
        self.steps.iter().map(|step| (step.code as u16, step.about.clone())).collect()
    }

    /// Sets the operations from an earlier [`Newborn::memory`], so that errors name them.
    pub fn recall(&mut self, memory: &[(u16, String)]) {
        let step = |(code, about): &(u16, String)| {
            Some(Step { code: Code::from_number(*code)?, about: about.clone() })
        };
        self.steps = memory.iter().map_while(step).collect();
    }

    /// The detached procfs of its pid namespace, if [`crate::Spawn::proc`] requested one; the plan
    /// attaches it ([`Plan::proc`]).
    pub fn take_proc(&mut self) -> Option<OwnedFd> {
        self.proc.take()
    }

    /// Returns whether its plan may have several parts.
    pub fn takes_parts(&self) -> bool {
        self.takes_parts
    }

    /// Returns whether it takes a plan in parts, and has executed all of them so far without a failure.
    pub fn is_waiting(&self) -> bool {
        self.takes_parts && wire::is_quiet(&self.sock)
    }

    /// Sends a part of its plan, and returns the next part, which is empty. The newborn executes the part while
    /// the engine makes the next. With a keeper of an older program nothing is sent yet, and the plan goes on.
    ///
    /// [`Newborn::ready`] returns the error of a part that has failed.
    pub fn send_part(&mut self, plan: Plan) -> Result<Plan, LaunchError> {
        if !self.takes_parts {
            return Ok(plan);
        }
        let (part, next) = plan.split();
        self.send(part)?;
        Ok(next)
    }

    /// Sends its plan, or the last part of it.
    pub fn send(&mut self, plan: Plan) -> Result<(), LaunchError> {
        let is_first = self.steps.is_empty();
        match self.send_to_it(plan) {
            // The message of a newborn that has failed is still readable.
            Err(LaunchError::SendPlan { source: Errno::PIPE | Errno::CONNRESET }) if !is_first => {
                Ok(())
            }
            sent => sent,
        }
    }

    fn send_to_it(&mut self, plan: Plan) -> Result<(), LaunchError> {
        let finished = plan.finish()?;
        self.sent += finished.fds.len();
        if self.sent > flat::FDS_MAX {
            return Err(LaunchError::Plan { why: plan::TOO_MANY_DESCRIPTORS });
        }
        let memory = finished.to_memfd()?;
        let bytes = finished.bytes.len() as u32;
        let descriptors = finished.fds.len() as u32;
        let mut fds: Vec<BorrowedFd<'_>> = vec![memory.as_fd()];
        fds.extend(finished.fds.iter().map(AsFd::as_fd));
        let mut message = ToNewborn::Plan { bytes, descriptors };
        self.waits |= finished.steps.iter().any(|step| step.code == Code::Sync);
        self.steps.extend(finished.steps);
        for some in fds.chunks(wire::FDS_PER_MESSAGE) {
            wire::send(&self.sock, &message.to_bytes(), some, SendFlags::empty())
                .map_err(|source| LaunchError::SendPlan { source })?;
            message = ToNewborn::More;
        }
        Ok(())
    }

    /// `output` is what a program wrote to, where it was one that failed.
    fn failure(&self, index: u32, errno: i32, output: Option<OwnedFd>) -> Failure {
        let words = output.as_ref().map(last_words).unwrap_or_default();
        match self.steps.get(index as usize) {
            Some(step) => {
                Failure { op: step.code.text(), detail: step.about.clone(), errno, words }
            }
            None => Failure { op: "receive the plan", detail: String::new(), errno, words },
        }
    }

    fn hear(&self) -> Result<(Option<FromNewborn>, Option<OwnedFd>), LaunchError> {
        let mut bytes = [0; 32];
        let mut fd = None;
        let mut receive =
            || wire::receive(&self.sock, &mut bytes, RecvFlags::empty(), |f| fd = Some(f));
        // A process that exits with unread messages of ours resets the connection; the error is
        // returned once, before its own messages.
        let n = match receive() {
            Err(Errno::CONNRESET) => receive(),
            other => other,
        };
        match n {
            Ok(0) | Err(Errno::CONNRESET) => Ok((None, None)),
            Ok(n) => match FromNewborn::from_bytes(&bytes[..n]) {
                Some(message) => Ok((Some(message), fd)),
                None => Err(LaunchError::Newborn { what: "sent an unknown message" }),
            },
            Err(Errno::AGAIN) => {
                // A frozen newborn would not notice that its starter is gone.
                let kill = rustix::process::Signal::KILL;
                let _ = rustix::process::pidfd_send_signal(&self.pidfd, kill);
                Err(LaunchError::Silent { waited: SILENT_MAX })
            }
            Err(source) => Err(LaunchError::HearNewborn { source }),
        }
    }

    /// Waits until it is at its sync point. Returns the master of its terminal, if it opened one.
    pub fn ready(&self) -> Result<Option<OwnedFd>, LaunchError> {
        match self.hear()? {
            (Some(FromNewborn::Ready), master) => Ok(master),
            (Some(FromNewborn::Failed { index, errno }), output) => {
                Err(LaunchError::Failed(self.failure(index, errno, output)))
            }
            (None, _) => Err(LaunchError::Newborn { what: "ended before it was ready" }),
        }
    }

    /// Releases the newborn from one sync point to the next.
    pub fn release(&self) -> Result<(), LaunchError> {
        wire::send(&self.sock, &ToNewborn::Go.to_bytes(), &[], SendFlags::empty())
            .map_err(|source| LaunchError::SendPlan { source })
    }

    /// Waits until it has executed the program, after its last [`Newborn::release`].
    pub fn watch(self) -> Result<(), LaunchError> {
        match self.hear()? {
            (Some(FromNewborn::Failed { index, errno }), output) => {
                Err(LaunchError::Failed(self.failure(index, errno, output)))
            }
            (Some(FromNewborn::Ready), _) => Err(LaunchError::Newborn { what: "was ready twice" }),
            (None, _) => Ok(()),
        }
    }

    /// Releases the newborn and waits until it has executed the program.
    ///
    /// LIMIT: a seccomp filter that forbids sendmsg(2) hides why execve failed; the process then
    /// exits with 127 or 126 all the same.
    pub fn go(self) -> Result<(), LaunchError> {
        let sent = wire::send(&self.sock, &ToNewborn::Go.to_bytes(), &[], SendFlags::empty());
        // A newborn that has failed, or has no sync point, may have exited; its last message is
        // still readable.
        if let Err(source) = sent
            && !matches!(source, Errno::PIPE | Errno::CONNRESET)
        {
            return Err(LaunchError::SendPlan { source });
        }
        match self.hear()? {
            (None, _) if sent.is_err() && self.waits => {
                Err(LaunchError::Newborn { what: "ended before it could go on" })
            }
            (None, _) => Ok(()),
            (Some(FromNewborn::Failed { index, errno }), output) => {
                Err(LaunchError::Failed(self.failure(index, errno, output)))
            }
            (Some(FromNewborn::Ready), _) => Err(LaunchError::Newborn { what: "was ready twice" }),
        }
    }
}
