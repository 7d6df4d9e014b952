//! Locks of files: fdinfo tells those of the open file and those of the process that has it open.

use super::object::Why;
use crate::format::{Lock, LockKind};

/// Reads the lines `lock:` of an fdinfo.
pub(crate) fn of(info: &str) -> Result<Vec<Lock>, Why> {
    info.lines().filter_map(|line| line.strip_prefix("lock:")).map(one).collect()
}

/// Reads `1: POSIX  ADVISORY  WRITE 359 00:13:11691 0 EOF`.
fn one(line: &str) -> Result<Lock, Why> {
    let unknown = || format!("a lock that is not known ({})", line.trim());
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let [_, kind, how, access, _, _, start, end] = words[..] else { return Err(unknown()) };
    let kind = match kind {
        "POSIX" => LockKind::Process,
        "OFDLCK" => LockKind::OpenFile,
        "FLOCK" => LockKind::Whole,
        "LEASE" | "DELEG" => return Err("a lease, which is not saved yet".into()),
        _ => return Err(unknown()),
    };
    if how != "ADVISORY" {
        return Err(unknown());
    }
    let writes = match access {
        "READ" => false,
        "WRITE" => true,
        _ => return Err(unknown()),
    };
    let end = match end {
        "EOF" => None,
        end => Some(end.parse().map_err(|_| unknown())?),
    };
    Ok(Lock { kind, writes, start: start.parse().map_err(|_| unknown())?, end })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_of_fdinfo_are_read() {
        let info = "pos:\t0\nflags:\t02\nlock:\t1: POSIX  ADVISORY  WRITE 359 00:13:11691 3 9\n\
                    lock:\t2: FLOCK  ADVISORY  READ 0 00:13:11691 0 EOF\n";
        let expected = [
            Lock { kind: LockKind::Process, writes: true, start: 3, end: Some(9) },
            Lock { kind: LockKind::Whole, writes: false, start: 0, end: None },
        ];
        assert_eq!(of(info).unwrap(), expected);
        let lease = "lock:\t1: LEASE  ACTIVE    WRITE 359 00:13:11691 0 EOF\n";
        assert!(of(lease).unwrap_err().contains("lease"));
        assert!(of("lock:\t1: -> POSIX\n").is_err());
    }
}
