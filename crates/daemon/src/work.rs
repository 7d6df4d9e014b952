//! Worker processes that suspend containers to disk or push their pages out to swap.
//!
//! Separate processes are used for three reasons: several can work at once (a tracer waits for all
//! tracees of its process), a failure in one does not stop the daemon, and the daemon stays small.
//! A worker runs one job at a time. An idle worker is kept for a while, because starting one costs
//! as much as a job.
//!
//! [`Work`] is the room that starts a job for each [`Notice::Wanted`] and reports its end.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use dormouse_container::{Idle, Outcome};
use dormouse_kernel::rlimit;

use crate::error::Result;
use crate::room::{Done, Job, Notice, Room};

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
        rlimit::without_raise(&mut command);
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

/// The room that runs jobs.
#[derive(Debug)]
pub(crate) struct Work {
    /// The worker program and its arguments.
    command: Vec<OsString>,
    /// Idle workers with the time when each became idle, the most recent last.
    free: Vec<(Instant, Worker)>,
    /// Running jobs. A new one is last, as [`Room::notice`] requires.
    running: Vec<Running>,
    /// Jobs without a worker, with the time of the failure; they are reported in the next turn.
    failed: Vec<(Instant, Done)>,
}

/// A running job.
#[derive(Debug)]
struct Running {
    job: Job,
    worker: Worker,
}

impl Work {
    /// Takes the worker program and its arguments, and starts none.
    pub(crate) fn new(command: Vec<OsString>) -> Self {
        Self { command, free: Vec::new(), running: Vec::new(), failed: Vec::new() }
    }

    /// Starts a job. Without `idle` the container is suspended even if it is active.
    fn start(&mut self, job: &Job) -> std::io::Result<Running> {
        let mut line = format!("{} {} {}", job.id, job.asked.as_str(), job.why.as_str());
        if let Some(Idle { quiet, used_ns, worth }) = job.idle {
            line += &format!(" {} {used_ns} {}", quiet.as_millis(), worth.as_millis());
        }
        line.push('\n');
        let of = |worker| Running { job: job.clone(), worker };
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
    fn finish(&mut self, now: Instant, running: Running) -> Done {
        let Running { job: Job { id, asked, why, .. }, mut worker } = running;
        let mut text = String::new();
        let read = worker.replies.read_line(&mut text);
        if let Ok(fell) = serde_json::from_str(text.trim()) {
            self.free.push((now, worker));
            return Done { id, asked, why, fell };
        }
        drop(worker.requests.take());
        let cause = match (read, worker.child.wait()) {
            (Err(e), _) | (_, Err(e)) => format!("the result of the job is not known: {e}"),
            (_, Ok(status)) => format!("the worker process failed: {status}"),
        };
        Done { id, asked, why, fell: Outcome::Awake { why: cause } }
    }
}

impl Room for Work {
    fn name(&self) -> &'static str {
        "jobs"
    }

    /// A descriptor is readable when its job has completed.
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.running.iter().map(|it| it.worker.replies.get_ref().as_fd()).collect()
    }

    fn due(&self) -> Option<Instant> {
        let failed = self.failed.first().map(|(when, _)| *when);
        failed.or_else(|| self.free.first().map(|(since, _)| *since + RESTS))
    }

    fn turn(&mut self, now: Instant, ready: &[bool]) -> Result<Vec<Notice>> {
        let mut ended: Vec<Done> = self.failed.drain(..).map(|(_, done)| done).collect();
        // ORDER: from the last index to the first, so that the indices of the others stay valid.
        for at in (0..ready.len()).rev().filter(|at| ready[*at]) {
            let running = self.running.swap_remove(at);
            ended.push(self.finish(now, running));
        }
        self.free.retain(|(since, _)| *since + RESTS > now);
        Ok(ended.into_iter().map(Notice::Ended).collect())
    }

    fn notice(&mut self, now: Instant, notice: &Notice) {
        let Notice::Wanted(job) = notice else { return };
        match self.start(job) {
            Ok(running) => self.running.push(running),
            Err(e) => {
                let why = format!("cannot start a worker process: {e}");
                let Job { id, asked, .. } = job.clone();
                let done = Done { id, asked, why: job.why, fell: Outcome::Awake { why } };
                self.failed.push((now, done));
            }
        }
    }

    /// Waits for the running jobs.
    fn end(mut self: Box<Self>) {
        for running in std::mem::take(&mut self.running) {
            self.finish(Instant::now(), running);
        }
    }
}

#[cfg(test)]
mod tests {
    use dormouse_container::{Reason, Request};
    use dormouse_model::ContainerId;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn job(n: u8) -> Job {
        Job {
            id: ContainerId::from_bytes([n; 16]),
            asked: Request::PagesOut,
            idle: None,
            why: Reason::Memory,
        }
    }

    /// Gives the room turns until it reports the end of a job.
    fn ended(work: &mut Work) -> Done {
        loop {
            let ready: Vec<bool> = {
                let fds = work.fds();
                let mut fds: Vec<_> =
                    fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
                poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 1_000_000 })).unwrap();
                fds.iter().map(|fd| !fd.revents().is_empty()).collect()
            };
            for notice in work.turn(Instant::now(), &ready).unwrap() {
                if let Notice::Ended(done) = notice {
                    return done;
                }
            }
        }
    }

    #[test]
    fn job_without_a_worker_program_is_reported_as_failed() {
        let mut work = Work::new(vec!["/nonexistent/worker".into()]);
        let now = Instant::now();
        work.notice(now, &Notice::Wanted(job(1)));
        assert!(work.due().is_some_and(|due| due <= now), "at once");
        let done = ended(&mut work);
        assert!(
            matches!(&done.fell, Outcome::Awake { why } if why.contains("cannot start a worker"))
        );
        assert_eq!((done.id, work.due()), (job(1).id, None));
    }

    #[test]
    fn worker_serves_one_job_after_the_other() {
        let reply = "while read -r line; do echo '\"ran\"'; done";
        let mut work = Work::new(["/bin/sh", "-c", reply].map(OsString::from).into());
        for n in 0..3 {
            work.notice(Instant::now(), &Notice::Wanted(job(n)));
            let done = ended(&mut work);
            assert_eq!((done.id, done.fell), (job(n).id, Outcome::Ran));
            assert_eq!((work.free.len(), work.running.len()), (1, 0));
        }
        work.turn(Instant::now() + RESTS, &[]).unwrap();
        assert!(work.free.is_empty(), "an idle worker is ended");
    }
}
