//! Worker processes that suspend containers to disk or push their pages out to swap.
//!
//! Separate processes are used for three reasons: several can work at once (a tracer waits for all
//! tracees of its process), a failure in one does not stop the daemon, and the daemon stays small.
//! A worker runs one job at a time. An idle worker is kept for a while, because starting one costs
//! as much as a job.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use dormouse_container::{Asked, Fell, Idle, Why};
use dormouse_model::ContainerId;

/// Time after which an idle worker is ended.
const RESTS: Duration = Duration::from_secs(2);

/// A worker process. It reads one line for each job and replies with one line.
#[derive(Debug)]
struct Worker {
    child: Child,
    /// None when the worker is to exit.
    requests: Option<ChildStdin>,
    replies: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts a worker; `command` is the program and its arguments.
    fn start(command: &[OsString]) -> std::io::Result<Self> {
        let mut words = command.iter();
        let program = words.next().ok_or(std::io::ErrorKind::NotFound)?;
        let mut command = Command::new(program);
        command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        // Own process group: a terminal signal for the daemon must not interrupt a running job.
        let mut child = command.process_group(0).spawn()?;
        let (requests, replies) = (child.stdin.take(), child.stdout.take());
        let replies = replies.ok_or(std::io::ErrorKind::BrokenPipe)?;
        Ok(Self { child, requests, replies: BufReader::new(replies) })
    }

    fn request(&mut self, line: &str) -> std::io::Result<()> {
        let requests = self.requests.as_mut().ok_or(std::io::ErrorKind::BrokenPipe)?;
        requests.write_all(line.as_bytes())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.requests.take());
        let _ = self.child.wait(); // the exit status is not used
    }
}

/// The idle workers, and how to start more.
#[derive(Debug)]
pub(crate) struct Workers {
    command: Vec<OsString>,
    /// Idle workers with the time when each became idle, the most recent last.
    free: Vec<(Instant, Worker)>,
}

impl Workers {
    /// Returns an empty set; `command` is the worker program and its arguments.
    pub(crate) fn new(command: Vec<OsString>) -> Self {
        Self { command, free: Vec::new() }
    }

    /// Time when the longest idle worker is to be ended.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.free.first().map(|(since, _)| *since + RESTS)
    }

    /// Ends the workers that have been idle for [`RESTS`].
    pub(crate) fn rest(&mut self, now: Instant) {
        self.free.retain(|(since, _)| *since + RESTS > now);
    }

    /// Starts a job for a container. Without `idle` the container is suspended even if it is
    /// active.
    pub(crate) fn start(
        &mut self,
        id: &ContainerId,
        idle: Option<&Idle>,
        asked: Asked,
        why: Why,
    ) -> std::io::Result<Errand> {
        let mut line = format!("{id} {} {}", asked.as_str(), why.as_str());
        if let Some(Idle { quiet, used_ns, worth }) = idle {
            line += &format!(" {} {used_ns} {}", quiet.as_millis(), worth.as_millis());
        }
        line.push('\n');
        let of = |worker| Errand { id: id.clone(), asked, why, worker };
        while let Some((_, mut worker)) = self.free.pop() {
            // A worker that was killed in the meantime is replaced.
            if worker.request(&line).is_ok() {
                return Ok(of(worker));
            }
        }
        let mut worker = Worker::start(&self.command)?;
        worker.request(&line)?;
        Ok(of(worker))
    }

    /// Waits for the result of a job.
    pub(crate) fn finish(&mut self, now: Instant, errand: Errand) -> Fell {
        let mut worker = errand.worker;
        let mut text = String::new();
        let read = worker.replies.read_line(&mut text);
        if let Ok(fell) = serde_json::from_str(text.trim()) {
            self.free.push((now, worker));
            return fell;
        }
        drop(worker.requests.take());
        Fell::Awake {
            why: match (read, worker.child.wait()) {
                (Err(e), _) | (_, Err(e)) => format!("the result of the job is not known: {e}"),
                (_, Ok(status)) => format!("the worker process failed: {status}"),
            },
        }
    }
}

/// A running job for one container.
#[derive(Debug)]
pub(crate) struct Errand {
    pub(crate) id: ContainerId,
    pub(crate) asked: Asked,
    pub(crate) why: Why,
    worker: Worker,
}

impl Errand {
    /// Readable when the job has completed.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.worker.replies.get_ref().as_fd()
    }
}
