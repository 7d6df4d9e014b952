//! A person at a terminal: types, reads the screen, changes the window's size.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;

use crate::process::{slowness, soon, wait, wait_until};

/// A program running on a terminal of its own.
pub struct Terminal {
    master: File,
    child: Child,
    screen: Arc<Mutex<String>>,
    /// Bytes of the screen that were already matched.
    seen: usize,
}

impl Terminal {
    /// Starts a command as a session leader with a new controlling terminal of 24 rows and 80
    /// columns.
    pub fn spawn(command: &Command) -> Self {
        let master =
            rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)
                .expect("a pseudoterminal can be opened");
        rustix::pty::grantpt(&master).expect("granted");
        rustix::pty::unlockpt(&master).expect("unlocked");
        let path = rustix::pty::ptsname(&master, Vec::new()).expect("a terminal name");
        let path = path.into_string().expect("a pty's name is ASCII");
        let open = || -> Stdio {
            let options = OpenOptions::new().read(true).write(true).clone();
            options.open(&path).expect("the slave can be opened").into()
        };
        let child = Command::new("setsid")
            .arg("--ctty")
            .arg(command.get_program())
            .args(command.get_args())
            .env("TERM", "xterm")
            .stdin(open())
            .stdout(open())
            .stderr(open())
            .spawn()
            .expect("setsid starts");
        let master: OwnedFd = master;
        let mut reader = File::from(master.try_clone().expect("duplicate the descriptor"));
        let screen = Arc::new(Mutex::new(String::new()));
        let shown = Arc::clone(&screen);
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            // EIO is the end: the last process with an open slave has closed it.
            while let Ok(count @ 1..) = reader.read(&mut bytes) {
                let text = String::from_utf8_lossy(&bytes[..count]);
                shown.lock().expect("the reader does not panic").push_str(&text);
            }
        });
        let terminal = Self { master: master.into(), child, screen, seen: 0 };
        terminal.resize(24, 80);
        terminal
    }

    /// Types a text.
    #[track_caller]
    pub fn send(&mut self, text: &str) {
        self.master.write_all(text.as_bytes()).expect("a terminal accepts input");
    }

    /// Waits until `text` appears after the text matched before, and marks it as matched. Panics
    /// with the screen after ten seconds.
    #[track_caller]
    pub fn expect(&mut self, text: &str) {
        let mut end = None;
        let screen = Arc::clone(&self.screen);
        let seen = self.seen;
        wait_until(soon(), || {
            let screen = screen.lock().expect("the reader does not panic");
            end = screen[seen..].find(text).map(|at| seen + at + text.len());
            end.is_some()
        });
        match end {
            Some(end) => self.seen = end,
            None => {
                panic!("'{text}' did not appear; the screen since:\n{}", &self.screen()[seen..])
            }
        }
    }

    /// Everything shown so far.
    pub fn screen(&self) -> String {
        self.screen.lock().expect("the reader does not panic").clone()
    }

    /// Changes the window's size; the kernel signals the foreground processes.
    pub fn resize(&self, rows: u16, columns: u16) {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        rustix::termios::tcsetwinsize(&self.master, size).expect("a terminal has a size");
    }

    /// The host's pid of the program.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the program's exit; panics after twenty seconds.
    #[track_caller]
    pub fn wait(mut self) -> i32 {
        match wait(&mut self.child, Duration::from_secs(20) * slowness()) {
            Some(status) => status,
            None => panic!("the program does not exit; the screen:\n{}", self.screen()),
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill(); // ignored: may have ended already
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shell_receives_input_and_window_size() {
        let mut terminal = Terminal::spawn(&Command::new("sh"));
        terminal.resize(33, 99);
        terminal.send("stty size; tty\n");
        terminal.expect("33 99");
        terminal.expect("/dev/pts/");
        terminal.send("exit 7\n");
        assert_eq!(terminal.wait(), 7);
    }
}
