//! Containers on their way to sleep: processes of ours that do it, each one container after the other.
//!
//! Processes, so that several can at once (a tracer waits for all tracees of its process), so that
//! one that meets something odd takes nobody with it, and so that the daemon stays as small as it
//! was. One that has put a container to sleep is there for the next for a while: to make one costs as much
//! as what it is made for.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use dormouse_container::{Asked, Fell, Idle, Why};
use dormouse_model::ContainerId;

/// How long one is there that has nothing to do.
const RESTS: Duration = Duration::from_secs(2);

/// A process that puts containers to sleep: it reads a line for each, and answers with one.
#[derive(Debug)]
struct Hand {
    child: Child,
    /// None once it is to end.
    asked: Option<ChildStdin>,
    said: BufReader<ChildStdout>,
}

impl Hand {
    /// `command` is the program and its arguments.
    fn start(command: &[OsString]) -> std::io::Result<Self> {
        let mut words = command.iter();
        let program = words.next().ok_or(std::io::ErrorKind::NotFound)?;
        let mut command = Command::new(program);
        command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        // What ends the daemon at a terminal lets it come to its end.
        let mut child = command.process_group(0).spawn()?;
        let (asked, said) = (child.stdin.take(), child.stdout.take());
        let said = said.ok_or(std::io::ErrorKind::BrokenPipe)?;
        Ok(Self { child, asked, said: BufReader::new(said) })
    }

    fn ask(&mut self, line: &str) -> std::io::Result<()> {
        let asked = self.asked.as_mut().ok_or(std::io::ErrorKind::BrokenPipe)?;
        asked.write_all(line.as_bytes())
    }
}

impl Drop for Hand {
    fn drop(&mut self) {
        drop(self.asked.take());
        let _ = self.child.wait(); // it has nothing more to tell
    }
}

/// Those that have nothing to do.
#[derive(Debug)]
pub(crate) struct Hands {
    command: Vec<OsString>,
    /// Since when, the latest last.
    free: Vec<(Instant, Hand)>,
}

impl Hands {
    /// `command` is the program and its arguments.
    pub(crate) fn new(command: Vec<OsString>) -> Self {
        Self { command, free: Vec::new() }
    }

    /// When there is nothing to do for the first of them any more.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.free.first().map(|(since, _)| *since + RESTS)
    }

    /// Those end that have had nothing to do for a while.
    pub(crate) fn rest(&mut self, now: Instant) {
        self.free.retain(|(since, _)| *since + RESTS > now);
    }

    /// Begins to put a container to sleep; without `idle` it sleeps whatever it does.
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
        let of = |hand| Errand { id: id.clone(), asked, why, hand };
        while let Some((_, mut hand)) = self.free.pop() {
            // One that was killed meanwhile is made up for.
            if hand.ask(&line).is_ok() {
                return Ok(of(hand));
            }
        }
        let mut hand = Hand::start(&self.command)?;
        hand.ask(&line)?;
        Ok(of(hand))
    }

    /// Waits for what came of it.
    pub(crate) fn finish(&mut self, now: Instant, errand: Errand) -> Fell {
        let mut hand = errand.hand;
        let mut text = String::new();
        let read = hand.said.read_line(&mut text);
        if let Ok(fell) = serde_json::from_str(text.trim()) {
            self.free.push((now, hand));
            return fell;
        }
        drop(hand.asked.take());
        Fell::Awake {
            why: match (read, hand.child.wait()) {
                (Err(e), _) | (_, Err(e)) => format!("nobody knows what came of it: {e}"),
                (_, Ok(status)) => format!("what was to put it to sleep failed: {status}"),
            },
        }
    }
}

/// A container on its way.
#[derive(Debug)]
pub(crate) struct Errand {
    pub(crate) id: ContainerId,
    pub(crate) asked: Asked,
    pub(crate) why: Why,
    hand: Hand,
}

impl Errand {
    /// Readable when it has come to its end.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.hand.said.get_ref().as_fd()
    }
}
