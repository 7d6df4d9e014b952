//! A program under ptrace(2) that is run from step to step, to be killed at any of them.
//!
//! A step is a system call that changes something: state on disk and in the kernel changes by these
//! calls only. Between two steps the state is that before the later one. The program is stopped
//! before it makes the call, and the caller decides what happens meanwhile. Only the main thread is
//! traced, by the thread that began.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use dormouse_kernel::call::{self, Stop, TraceOptions};
use dormouse_kernel::pidfd;

use crate::slowness;

/// Calls that change something, or let another process change something.
const STEPS: [(i64, &str); 43] = [
    (libc::SYS_mkdir, "mkdir"),
    (libc::SYS_mkdirat, "mkdirat"),
    (libc::SYS_rename, "rename"),
    (libc::SYS_renameat, "renameat"),
    (libc::SYS_renameat2, "renameat2"),
    (libc::SYS_unlink, "unlink"),
    (libc::SYS_unlinkat, "unlinkat"),
    (libc::SYS_rmdir, "rmdir"),
    (libc::SYS_link, "link"),
    (libc::SYS_linkat, "linkat"),
    (libc::SYS_symlink, "symlink"),
    (libc::SYS_symlinkat, "symlinkat"),
    (libc::SYS_write, "write"),
    (libc::SYS_pwrite64, "pwrite64"),
    (libc::SYS_ftruncate, "ftruncate"),
    (libc::SYS_fallocate, "fallocate"),
    (libc::SYS_copy_file_range, "copy_file_range"),
    (libc::SYS_fsync, "fsync"),
    (libc::SYS_fdatasync, "fdatasync"),
    (libc::SYS_syncfs, "syncfs"),
    (libc::SYS_fchmod, "fchmod"),
    (libc::SYS_fchown, "fchown"),
    (libc::SYS_fchownat, "fchownat"),
    (libc::SYS_setxattr, "setxattr"),
    (libc::SYS_fsetxattr, "fsetxattr"),
    (libc::SYS_flock, "flock"),
    (libc::SYS_mount, "mount"),
    (libc::SYS_umount2, "umount2"),
    (libc::SYS_fsopen, "fsopen"),
    (libc::SYS_fsconfig, "fsconfig"),
    (libc::SYS_fsmount, "fsmount"),
    (libc::SYS_open_tree, "open_tree"),
    (libc::SYS_move_mount, "move_mount"),
    (libc::SYS_mount_setattr, "mount_setattr"),
    (libc::SYS_clone, "clone"),
    (libc::SYS_clone3, "clone3"),
    (libc::SYS_vfork, "vfork"),
    (libc::SYS_setns, "setns"),
    (libc::SYS_unshare, "unshare"),
    (libc::SYS_sendmsg, "sendmsg"),
    (libc::SYS_bpf, "bpf"),
    (libc::SYS_kill, "kill"),
    (libc::SYS_pidfd_send_signal, "pidfd_send_signal"),
];

/// PTRACE_EVENT_EXEC: the program has called execve(2).
const EXECUTED: i32 = 4;
/// The time limit between two steps.
const LIMIT: Duration = Duration::from_secs(60);

/// A traced program. See the [module](self).
pub struct Led {
    pid: u32,
    child: Option<Child>,
    /// Steps count only after execve(2) of this program.
    until: Option<String>,
    status: Option<i32>,
    /// Its drop ends the watch of the time limit.
    _watch: mpsc::Sender<()>,
}

/// Kills a process that takes too long.
fn watch(pid: u32) -> mpsc::Sender<()> {
    let (sender, receiver) = mpsc::channel::<()>();
    let process = pidfd::open(pid).expect("the process exists");
    thread::spawn(move || {
        if receiver.recv_timeout(LIMIT * slowness()) == Err(mpsc::RecvTimeoutError::Timeout) {
            let _ = pidfd::send_signal(&process, libc::SIGKILL); // may have ended just now
        }
    });
    sender
}

impl Led {
    /// Starts a command. Only the steps of `program` count, which the command may have to execute
    /// first. The standard streams are `/dev/null`.
    #[track_caller]
    pub fn start(command: &Command, program: &Path) -> Self {
        let script = "echo ready; read -r line; exec \"$@\" </dev/null >/dev/null 2>&1";
        let mut held = Command::new("sh");
        held.args(["-c", script, "sh"]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            held.env(name, value.expect("no variable is removed"));
        }
        held.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = held.spawn().expect("sh starts");
        let mut line = String::new();
        let output = child.stdout.take().expect("a pipe");
        BufReader::new(output).read_line(&mut line).expect("a pipe can be read");
        let pid = child.id();
        call::seize(pid, TraceOptions::SYSGOOD | TraceOptions::EXEC | TraceOptions::EXIT_KILL)
            .expect("a child can be traced");
        call::interrupt(pid).expect("a seized process");
        let (_, stop) = call::wait_stop(Some(pid)).expect("a stop");
        assert!(matches!(stop, Stop::Event(..)), "{stop:?}");
        let mut stdin = child.stdin.take().expect("a pipe");
        stdin.write_all(b"\n").expect("sh reads");
        let name = program.file_name().expect("a file").to_string_lossy().into_owned();
        Self { pid, child: Some(child), until: Some(name), status: None, _watch: watch(pid) }
    }

    /// Starts to trace a running process.
    #[track_caller]
    pub fn seize(pid: u32) -> Self {
        Self::seize_if_alive(pid).expect("a traceable process")
    }

    /// The same of a process that may have ended: `None`.
    #[track_caller]
    pub fn seize_if_alive(pid: u32) -> Option<Self> {
        call::seize(pid, TraceOptions::SYSGOOD).ok()?;
        call::interrupt(pid).ok()?;
        match call::wait_stop(Some(pid)).ok()?.1 {
            Stop::Ended(_) => None,
            stop => {
                assert!(matches!(stop, Stop::Event(..)), "{stop:?}");
                Some(Self { pid, child: None, until: None, status: None, _watch: watch(pid) })
            }
        }
    }

    /// Runs the program to its next step, before the call is made. Returns `None` after its exit or
    /// SIGWINCH: another thread ends the trace of a process that does not exit in this way.
    #[track_caller]
    pub fn next_step(&mut self) -> Option<&'static str> {
        loop {
            if self.status.is_some() || call::resume_to_call(self.pid).is_err() {
                // Possibly killed by another process; its exit is still to be collected.
                return self.collect_exit();
            }
            match call::wait_stop(Some(self.pid)).expect("a traced process").1 {
                Stop::Ended(status) => {
                    self.status = Some(status);
                    return None;
                }
                Stop::Signal(libc::SIGWINCH) => return None,
                Stop::Event(EXECUTED, _) => self.note_executed(),
                Stop::Call if self.until.is_none() => {
                    let Ok(registers) = call::registers(self.pid) else { continue };
                    // On entry of the call, before there is a result.
                    let enters = registers.rax as i64 == -i64::from(libc::ENOSYS);
                    let number = registers.orig_rax as i64;
                    let step = STEPS.iter().find(|(step, _)| *step == number);
                    if let Some((_, name)) = step.filter(|_| enters) {
                        return Some(name);
                    }
                }
                _ => {}
            }
        }
    }

    /// Runs the program to its end, one instruction after the other, and passes the address of each. No signal is
    /// delivered meanwhile.
    #[track_caller]
    pub fn step_to_end(&mut self, mut visit: impl FnMut(u64)) {
        while self.status.is_none() {
            let is_executed = self.until.is_none();
            let go = if is_executed { call::single_step } else { call::resume_to_call };
            if go(self.pid).is_err() {
                self.collect_exit();
                return;
            }
            match call::wait_stop(None).expect("a traced process").1 {
                Stop::Ended(status) => self.status = Some(status),
                Stop::Event(EXECUTED, _) => self.note_executed(),
                _ if is_executed => {
                    let registers = call::registers(self.pid);
                    registers.into_iter().for_each(|registers| visit(registers.rip));
                }
                _ => {}
            }
        }
    }

    fn note_executed(&mut self) {
        let now = std::fs::read_link(format!("/proc/{}/exe", self.pid)).unwrap_or_default();
        self.until.take_if(|name| now.file_name().is_some_and(|n| *n == **name));
    }

    fn collect_exit(&mut self) -> Option<&'static str> {
        while self.status.is_none() {
            match call::wait_stop(Some(self.pid)) {
                Ok((_, Stop::Ended(status))) => self.status = Some(status),
                Ok(_) => drop(call::resume(self.pid, 0)),
                Err(_) => self.status = Some(libc::SIGKILL),
            }
        }
        None
    }

    /// Kills the program at its current step.
    pub fn kill(&mut self) {
        if self.status.is_none() {
            let process = pidfd::open(self.pid).expect("a process before its wait");
            pidfd::send_signal(&process, libc::SIGKILL).expect("permission to kill");
            self.collect_exit();
        }
    }

    /// Detaches from the program, which continues.
    pub fn detach(self) {
        assert!(self.child.is_none(), "a child is traced to its end");
        let _ = call::detach(self.pid, 0); // may have been killed
    }

    /// Its exit code, or 128 and the number of the fatal signal.
    pub fn status(&self) -> Option<i32> {
        let code = |status: i32| match status & 0x7f {
            0 => (status >> 8) & 0xff,
            signal => 128 + signal,
        };
        self.status.map(code)
    }
}

impl Drop for Led {
    fn drop(&mut self) {
        if self.child.is_some() {
            self.kill();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_program_is_killed_before_its_next_step() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut mkdir = Command::new("mkdir");
        mkdir.args(["a", "b"].map(|name| dir.path().join(name)));
        let mut led = Led::start(&mkdir, Path::new("mkdir"));
        assert_eq!([led.next_step(), led.next_step()], [Some("mkdir"); 2]);
        led.kill();
        assert_eq!(led.status(), Some(137));
        assert!(dir.path().join("a").exists() && !dir.path().join("b").exists());
        let mut led = Led::start(&mkdir, Path::new("mkdir"));
        while led.next_step().is_some() {}
        assert_eq!(led.status(), Some(1)); // one exists already
    }
}
