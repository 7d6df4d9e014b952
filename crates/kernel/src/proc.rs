//! Bounded reads of /proc: nothing here reads more than it was told to.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::{CallError, Explain, Result};

/// Longest `/proc/PID/stat` or `status` that is looked at, in bytes.
const PAGE: usize = 16 * 1024;

/// The contents of a file of at most `max_bytes` bytes; EFBIG when it is longer.
pub fn read(path: impl AsRef<Path>, max_bytes: usize) -> Result<Vec<u8>> {
    let path = path.as_ref();
    let file = File::open(path).explain("open", || path.display().to_string())?;
    let mut bytes = Vec::new();
    file.take(max_bytes as u64 + 1)
        .read_to_end(&mut bytes)
        .explain("read", || path.display().to_string())?;
    if bytes.len() > max_bytes {
        let arguments = format!("{}, {max_bytes}", path.display());
        return Err(CallError::new("read", arguments, libc::EFBIG));
    }
    Ok(bytes)
}

/// The same as text; EILSEQ when it is not UTF-8.
pub fn read_text(path: impl AsRef<Path>, max_bytes: usize) -> Result<String> {
    let path = path.as_ref();
    String::from_utf8(read(path, max_bytes)?)
        .map_err(|_| CallError::new("read", path.display().to_string(), libc::EILSEQ))
}

/// A number that is new with every boot of the host (random(4)), 36 characters.
pub fn boot_id() -> Result<String> {
    Ok(read_text("/proc/sys/kernel/random/boot_id", 64)?.trim().to_owned())
}

/// When the process was started, in clock ticks since boot (proc_pid_stat(5), field 22).
///
/// Together with the boot id and the pid it names one process for all time. ESRCH when there is
/// none.
pub fn start_time(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/stat");
    let gone = |error: CallError| match error.errno() {
        libc::ENOENT => CallError::new("open", path.clone(), libc::ESRCH),
        _ => error,
    };
    let bytes = read(&path, PAGE).map_err(gone)?;
    // The second field is the program's name in parentheses, and may contain any of them: the
    // last closing one ends it.
    let after = bytes.iter().rposition(|&byte| byte == b')').map(|end| &bytes[end + 1..]);
    after
        .and_then(|rest| std::str::from_utf8(rest).ok())
        .and_then(|rest| rest.split_ascii_whitespace().nth(19))
        .and_then(|field| field.parse().ok())
        .ok_or_else(|| CallError::new("parse", path.clone(), libc::EBADMSG))
}

/// What `/proc/PID/status` tells (proc_pid_status(5)).
#[derive(Debug, Clone)]
pub struct Status(String);

/// Reads the status of a process; ESRCH when there is none.
pub fn status(pid: u32) -> Result<Status> {
    let path = format!("/proc/{pid}/status");
    read_text(&path, PAGE).map(Status).map_err(|error| match error.errno() {
        libc::ENOENT => CallError::new("open", path, libc::ESRCH),
        _ => error,
    })
}

impl Status {
    /// The text of a field, such as `"Name"`.
    pub fn field(&self, name: &str) -> Option<&str> {
        let value = |line: &'_ str| -> Option<usize> {
            line.strip_prefix(name)?.strip_prefix(':').map(|rest| line.len() - rest.len())
        };
        self.0.lines().find_map(|line| value(line).map(|at| line[at..].trim()))
    }

    /// A field whose value is a decimal number, whatever unit follows.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.field(name)?.split_ascii_whitespace().next()?.parse().ok()
    }

    /// A field whose value is a mask in hexadecimal, such as `"CapEff"`.
    pub fn mask(&self, name: &str) -> Option<u64> {
        u64::from_str_radix(self.field(name)?, 16).ok()
    }

    /// The letter of the state: `R`, `S`, `D`, `T`, `t`, `Z` or `X`.
    pub fn state(&self) -> Option<char> {
        self.field("State")?.chars().next()
    }

    /// The pid in each nested pid namespace, the reader's own first.
    pub fn pids(&self) -> Vec<u32> {
        let field = self.field("NSpid").unwrap_or_default();
        field.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_of_ourselves_is_truthful() {
        let status = status(std::process::id()).unwrap();
        assert_eq!(status.pids(), [std::process::id()]);
        assert_eq!(status.number("Tgid"), Some(u64::from(std::process::id())));
        assert!(status.state().is_some());
        assert!(status.field("Nam").is_none(), "a prefix is not a field");
    }

    #[test]
    fn start_time_survives_a_hostile_program_name() {
        let before = start_time(std::process::id()).unwrap();
        std::thread::spawn(move || {
            crate::call::set_name(c") S 1 2 (x").unwrap();
        })
        .join()
        .unwrap();
        assert_eq!(start_time(std::process::id()).unwrap(), before);
        assert!(before > 0);
    }

    #[test]
    fn long_file_is_refused() {
        assert_eq!(read("/proc/self/status", 10).unwrap_err().errno(), libc::EFBIG);
    }

    #[test]
    fn missing_process_is_not_found() {
        assert_eq!(start_time(u32::MAX).unwrap_err().errno(), libc::ESRCH);
        assert_eq!(boot_id().unwrap().len(), 36);
    }
}
