//! Programs started by tests: always with a time limit, always with all their output.

use std::fmt;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::waiting::describe;

/// The output and exit status of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// The command line, for messages.
    pub command: String,
    /// Exit code; 128 + signal where a signal ended it.
    pub status: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { command, status, stdout, stderr } = self;
        write!(f, "$ {command}\nstatus {status}\n-- stdout\n{stdout}\n-- stderr\n{stderr}")
    }
}

impl Output {
    /// Panics unless the program exited with status 0; returns standard output without the final
    /// newlines.
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!(self.status, 0, "{self}");
        self.stdout.trim_end_matches('\n').to_owned()
    }

    /// Panics unless the program failed, with any status, and reported one clear line; returns that
    /// line.
    #[track_caller]
    pub fn fails(self) -> String {
        assert!(self.status != 0 && self.status < 126, "{self}");
        let status = self.status;
        self.err(status)
    }

    /// Panics unless the program exited with this status and one clear line on standard error;
    /// returns that line.
    #[track_caller]
    pub fn err(self, status: i32) -> String {
        assert_eq!(self.status, status, "{self}");
        let lines: Vec<&str> = self.stderr.lines().filter(|l| !l.trim().is_empty()).collect();
        assert_eq!(lines.len(), 1, "one clear line is wanted\n{self}");
        assert!(!lines[0].contains("panicked"), "{self}");
        lines[0].to_owned()
    }
}

/// The factor by which this machine is slower than a developer's: 1, or the value of
/// `DORMOUSE_TEST_SLOWNESS` (the guest's runner sets it). Every time limit is multiplied by this
/// factor.
pub fn slowness() -> u32 {
    let text = std::env::var("DORMOUSE_TEST_SLOWNESS").unwrap_or_default();
    text.parse().unwrap_or(1).max(1)
}

/// The distance of the steps at which a test kills a process: 1, or 3 with `DORMOUSE_FAULT=third` (the prepush ring
/// sets it).
pub fn fault_stride() -> usize {
    if std::env::var("DORMOUSE_FAULT").as_deref() == Ok("third") { 3 } else { 1 }
}

/// The time in which a condition comes true, also on a busy machine: a limit for [`wait_until`](crate::wait_until).
pub fn soon() -> Duration {
    Duration::from_secs(90) * slowness()
}

/// The `dormouse` program that was built beside the running test, or the path in `DORMOUSE_BIN`.
#[track_caller]
pub fn dormouse() -> PathBuf {
    match std::env::var_os("DORMOUSE_BIN") {
        Some(path) => path.into(),
        None => program("dormouse"),
    }
}

/// The `dormouse` program whose protections can be left out one by one, for the control arms of the
/// isolation tests: each shows that its attack succeeds where that one protection is missing.
///
/// None, with a line on standard output, where `cargo xtask weak` found no protection changed.
pub fn weak_dormouse() -> Option<PathBuf> {
    let dir = crate::cache::cache();
    let path = dir.parent().expect("target/testkit has a parent").join("weak/dormouse");
    if !path.is_file() {
        println!("control arm not run: no {} (cargo xtask weak --always)", path.display());
        return None;
    }
    Some(path)
}

/// A program of the workspace that was built beside the running test.
#[track_caller]
pub fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("/proc/self/exe can be read");
    let built = test.ancestors().skip(1).take(2).map(|dir| dir.join(name));
    let found = built.into_iter().find(|path| path.is_file());
    found.unwrap_or_else(|| {
        panic!("no program '{name}' beside {}: cargo build --release first", test.display())
    })
}

/// Runs a command to its end, at most `limit` (times [`slowness`]) long.
///
/// Panics after the limit, and also when a remaining process still holds the output ten seconds
/// after the program's exit: a background program must close the streams of its caller.
#[track_caller]
pub fn run(mut command: Command, input: &[u8], limit: Duration) -> Output {
    let shown = show(&command);
    let limit = limit * slowness();
    command.stdin(if input.is_empty() { Stdio::null() } else { Stdio::piped() });
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => panic!("$ {shown}\n{error}"),
    };
    if let Some(mut stdin) = child.stdin.take() {
        let input = input.to_owned();
        thread::spawn(move || {
            let _ = stdin.write_all(&input); // ignored: the program may end before it reads all
        });
    }
    let streams = [inode(child.stdout.as_ref()), inode(child.stderr.as_ref())];
    let stdout = collect(child.stdout.take());
    let stderr = collect(child.stderr.take());
    let status = match wait_counted(&mut child, limit) {
        Ok(status) => status,
        Err(looks) => {
            let waits = describe(child.id());
            let _ = child.kill(); // ignored: may have ended just now
            let _ = child.wait();
            let short = Duration::from_millis(200);
            let errors = stderr.recv_timeout(short).unwrap_or_default();
            let out = stdout.recv_timeout(short).unwrap_or_default();
            let done = format!("not done after {limit:?}, at look {looks}");
            panic!("$ {shown}\n{done}\n{waits}-- stdout\n{out}\n-- stderr\n{errors}");
        }
    };
    let patience = Duration::from_secs(10) * slowness();
    let take = |from: mpsc::Receiver<String>, inode: u64, what: &str| {
        from.recv_timeout(patience).unwrap_or_else(|_| {
            let by = holders(inode).join(", ");
            panic!("$ {shown}\nexited with status {status}, but its {what} is still open in {by}")
        })
    };
    let stdout = take(stdout, streams[0], "standard output");
    let stderr = take(stderr, streams[1], "standard error");
    Output { command: shown, status, stdout, stderr }
}

fn inode(stream: Option<&impl AsFd>) -> u64 {
    stream.and_then(|stream| rustix::fs::fstat(stream).ok()).map_or(0, |stat| stat.st_ino)
}

/// The processes that have a pipe open.
fn holders(inode: u64) -> Vec<String> {
    let link = format!("pipe:[{inode}]");
    let mut found = Vec::new();
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let files = std::fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        let mut links = files.filter_map(|file| std::fs::read_link(file.path()).ok());
        if links.any(|to| to.as_os_str() == link.as_str()) {
            let status = std::fs::read_to_string(process.path().join("status")).unwrap_or_default();
            let head = ["Name:", "State:", "Pid:", "PPid:", "NSpid:", "TracerPid:"];
            let lines =
                status.lines().filter(|line| head.iter().any(|name| line.starts_with(name)));
            found.push(lines.collect::<Vec<_>>().join(" "));
        }
    }
    found
}

fn collect(stream: Option<impl Read + Send + 'static>) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    if let Some(mut stream) = stream {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = stream.read_to_end(&mut bytes); // ignored: the bytes read so far count
            let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
        });
    }
    receiver
}

/// Waits for a child; returns `None` after the limit.
pub(crate) fn wait(child: &mut Child, limit: Duration) -> Option<i32> {
    wait_counted(child, limit).ok()
}

/// The same; the error is how often the child was looked at. A minute has about 3000 looks, and fewer where the
/// machine stood still or its clock was set ahead: then the child was not given its time.
fn wait_counted(child: &mut Child, limit: Duration) -> Result<i32, u32> {
    use std::os::unix::process::ExitStatusExt;
    let (mut ended, mut looks) = (None, 0u32);
    wait_until(limit, || {
        ended = child.try_wait().expect("our child");
        looks += 1;
        ended.is_some()
    });
    let status = ended.ok_or(looks)?;
    Ok(status.code().unwrap_or(128 + status.signal().unwrap_or(0)))
}

/// Repeats a check until it holds; returns whether that was within `limit`.
pub fn wait_until(limit: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    // Each check may start a program, and under emulation other processes need the time.
    let slower = slowness().min(5);
    let mut pause = Duration::from_micros(500) * slower;
    loop {
        if is_so() {
            return true;
        }
        if start.elapsed() > limit {
            return false;
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20) * slower);
    }
}

fn show(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    const LIMIT: Duration = Duration::from_secs(5);

    #[test]
    fn run_returns_output_and_status() {
        let out = run(sh("cat; echo err >&2; exit 3"), b"in", LIMIT);
        assert_eq!((out.status, out.stdout.as_str(), out.stderr.as_str()), (3, "in", "err\n"));
        assert_eq!(run(sh("kill -9 $$"), b"", LIMIT).status, 137);
    }

    #[test]
    #[should_panic(expected = "not done after")]
    fn endless_program_is_killed() {
        run(sh("exec sleep 60"), b"", Duration::from_millis(50));
    }

    #[test]
    #[should_panic(expected = "still open")]
    fn background_process_with_open_streams_is_reported() {
        run(sh("sleep 13 & exit 0"), b"", LIMIT);
    }
}
