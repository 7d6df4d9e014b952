//! First processes of containers whose keeper was killed.
//!
//! Such a process has become a child of the host's init, which reaps it. The next keeper watches it
//! by a pidfd. A holder of the pidfd can read the exit status after the process has been reaped.
//! KERNEL(6.15): before, the status is unknown.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dormouse_kernel::call::{PidfdInfo, pidfd_get_info};
use dormouse_kernel::process::Exit;
use dormouse_launch::protocol::{Ended, Id};

/// How long the host's init may take to reap a process; some look for zombies once a second.
const REAPED_WITHIN: Duration = Duration::from_secs(5);
/// Interval of the attempts to read an exit status.
const AGAIN: Duration = Duration::from_millis(10);

#[derive(Debug)]
struct Adoptee {
    id: Id,
    pid: u32,
    process: OwnedFd,
    /// It has exited; its status is read until this time.
    read_until: Option<Instant>,
}

/// An adopted process that has ended.
#[derive(Debug)]
pub(crate) struct Gone {
    pub(crate) id: Id,
    pub(crate) pid: u32,
    /// `None`: the kernel does not keep the status.
    pub(crate) ended: Option<Ended>,
}

/// The adopted processes, by the serial numbers of their pidfds in the epoll set.
#[derive(Debug, Default)]
pub(crate) struct Adopted(HashMap<u64, Adoptee>);

impl Adopted {
    /// Adds a process, and returns its pidfd to be watched. A second request for a process changes
    /// nothing.
    pub(crate) fn add(&mut self, serial: u64, id: Id, pid: u32, fd: OwnedFd) -> Option<&OwnedFd> {
        match self.0.values().any(|it| it.id == id && it.pid == pid) {
            true => None,
            false => {
                let adoptee = Adoptee { id, pid, process: fd, read_until: None };
                Some(&self.0.entry(serial).or_insert(adoptee).process)
            }
        }
    }

    pub(crate) fn remove(&mut self, serial: u64) {
        self.0.remove(&serial);
    }

    pub(crate) fn has(&self, id: Id) -> bool {
        self.0.values().any(|it| it.id == id)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Notes that a pidfd is readable: the process has exited. Returns the pidfd, which is not to be
    /// watched any more. `None` if the number belongs to no adopted process.
    pub(crate) fn exited(&mut self, serial: u64, now: Instant) -> Option<&OwnedFd> {
        let adoptee = self.0.get_mut(&serial)?;
        adoptee.read_until.get_or_insert(now + REAPED_WITHIN);
        Some(&adoptee.process)
    }

    /// When [`Adopted::take_gone`] is due.
    pub(crate) fn next(&self, now: Instant) -> Option<Instant> {
        self.0.values().any(|it| it.read_until.is_some()).then(|| now + AGAIN)
    }

    /// Removes and returns the processes whose exit status is known, or is not going to be.
    pub(crate) fn take_gone(&mut self, now: Instant) -> Vec<Gone> {
        let mut gone = Vec::new();
        self.0.retain(|_, it| {
            let Some(until) = it.read_until else { return true };
            let exit = match pidfd_get_info(it.process.as_fd(), PidfdInfo::EXIT) {
                Ok(info) if info.mask & PidfdInfo::EXIT != 0 => {
                    Exit::from_wait_status(info.exit_code)
                }
                Ok(_) if now < until => return true, // not reaped yet
                Ok(_) | Err(_) => None,
            };
            gone.push(Gone { id: it.id, pid: it.pid, ended: exit.map(ended_now) });
            false
        });
        gone
    }
}

fn ended_now(exit: Exit) -> Ended {
    let signal = match exit {
        Exit::Signal(signal) => signal,
        Exit::Code(_) => 0,
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ended { code: exit.code(), signal, finished_unix_ms: now.as_millis() as i64 }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use dormouse_kernel::pidfd;

    use super::*;

    #[test]
    fn adopted_process_is_gone_once_reaped_with_its_status() {
        let mut child = Command::new("sh").args(["-c", "exit 3"]).spawn().unwrap();
        let (id, pid) = (Id::new(b"one").unwrap(), child.id());
        let mut adopted = Adopted::default();
        let process = pidfd::open(pid).unwrap();
        assert!(adopted.add(7, id, pid, process.try_clone().unwrap()).is_some());
        assert!(adopted.add(8, id, pid, process.try_clone().unwrap()).is_none(), "once");
        let now = Instant::now();
        // KERNEL(6.15)
        let keeps_status = pidfd_get_info(process.as_fd(), PidfdInfo::EXIT).is_ok();
        assert!(adopted.take_gone(now).is_empty() && adopted.next(now).is_none());
        assert!(adopted.exited(8, now).is_none());

        pidfd::wait(adopted.exited(7, now).unwrap(), None).unwrap();
        if keeps_status {
            assert!(adopted.take_gone(now).is_empty(), "not reaped yet");
            assert!(adopted.next(now).is_some());
        }
        child.wait().unwrap();
        let gone = adopted.take_gone(now + REAPED_WITHIN);
        let [Gone { pid: gone, ended, .. }] = gone.as_slice() else { panic!("{gone:?}") };
        assert_eq!(*gone, pid);
        let known = ended.map(|ended| (ended.code, ended.signal));
        assert_eq!(known, keeps_status.then_some((3, 0)));
        assert!(adopted.is_empty() && !adopted.has(id));
    }
}
