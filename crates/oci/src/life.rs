//! A container's life after its creation: start, signals, freezing, limits, its end.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use dormouse_kernel::cgroup::Tree;
use dormouse_kernel::{CallError, pidfd};
use dormouse_launch::Newborn;

use crate::create::{LISTENER, START, told};
use crate::error::{Error, Result};
use crate::spec::{Resources, Seccomp};
use crate::store::{Record, Status};
use crate::{Runtime, cgroup, console, hook};

/// A signal by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signal(pub i32);

impl std::str::FromStr for Signal {
    type Err = Error;

    /// Parses `9`, `KILL`, `SIGKILL`, `RTMIN+3`.
    fn from_str(text: &str) -> Result<Self> {
        const NAMES: [&str; 31] = [
            "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV",
            "USR2", "PIPE", "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN",
            "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
        ];
        let unknown = || Error::Usage(format!("unknown signal {text:?}"));
        if let Ok(number) = text.parse::<i32>() {
            return (0..=64).contains(&number).then_some(Self(number)).ok_or_else(unknown);
        }
        let upper = text.to_ascii_uppercase();
        let name = upper.strip_prefix("SIG").unwrap_or(&upper);
        if let Some(at) = NAMES.iter().position(|known| *known == name) {
            return Ok(Self(at as i32 + 1));
        }
        let real_time = |rest: &str, from: i32, step: i32| {
            let rest = rest.strip_prefix(['+', '-']).unwrap_or(rest);
            let offset = if rest.is_empty() { Ok(0) } else { rest.parse::<i32>() };
            offset.ok().map(|offset| from + step * offset).filter(|n| (34..=64).contains(n))
        };
        let number = match (name.strip_prefix("RTMIN"), name.strip_prefix("RTMAX")) {
            (Some(rest), _) => real_time(rest, 34, 1),
            (_, Some(rest)) => real_time(rest, 64, -1),
            _ if name == "POLL" => Some(29),
            _ if name == "IOT" => Some(6),
            _ if name == "CLD" => Some(17),
            _ => None,
        };
        number.map(Self).ok_or_else(unknown)
    }
}

impl Runtime {
    /// Returns the record of a container and its present state.
    pub fn look(&self, id: &str) -> Result<(Record, Status)> {
        let record = self.store.read(id)?;
        let status = self.store.status(&record, || {
            self.tree(&record).and_then(|tree| Ok(tree.is_frozen()?)).unwrap_or(false)
        });
        Ok((record, status))
    }

    /// Returns the ids of all containers.
    pub fn ids(&self) -> Result<Vec<String>> {
        self.store.ids()
    }

    pub(crate) fn tree(&self, record: &Record) -> Result<Tree> {
        Ok(self.forest()?.open(&record.cgroup, record.cgroup_made)?)
    }

    fn not(record: &Record, status: Status, why: &'static str) -> Error {
        Error::State { id: record.id.clone(), state: status.as_str(), why }
    }

    /// Starts the program of a created container.
    pub fn start(&self, id: &str) -> Result<()> {
        let _lock = self.store.lock(id, false)?;
        let (record, status) = self.look(id)?;
        if status != Status::Created {
            return Err(Self::not(&record, status, "cannot start a container that is not created"));
        }
        let spec = self.store.config(id)?;
        let process = spec.process.clone();
        let process = process.ok_or_else(|| Error::field("process", "it is missing"))?;
        let pidfd = record.process();
        let pidfd =
            pidfd.ok_or_else(|| Self::not(&record, Status::Stopped, "its process has ended"))?;
        let dir = self.store.dir(id);
        let sock = console::call(&dir, START)?
            .ok_or_else(|| Self::not(&record, Status::Stopped, "its process no longer waits"))?;
        // ORDER: the socket is removed before the process is released, so that no second `start`
        // finds it.
        let path = dir.join(START);
        std::fs::remove_file(&path).map_err(Error::file("remove", path))?;
        let seccomp = spec.linux.as_ref().and_then(|linux| linux.seccomp.as_ref());
        let mut newborn = Newborn::new(record.pid, record.start_time, pidfd, sock);
        newborn.recall(&record.steps);
        let page = dir.join(LISTENER);
        let mut served = Ok(());
        let started = match page.exists() {
            false => newborn.go(),
            true => {
                let file = std::fs::File::options().read(true).write(true).open(&page);
                let file = file.map_err(Error::file("open", &page))?;
                newborn.release().and_then(|()| {
                    served = serve_listener(&newborn, &file, (&record, Status::Creating), seccomp);
                    newborn.watch()
                })
            }
        };
        let started = started.map_err(|e| told(&process, e)).and(served);
        if let Err(e) = started {
            self.end(&record)?;
            return Err(e);
        }
        if let Err(e) = hook::run("poststart", &record.poststart, &record, Status::Running) {
            self.end(&record)?;
            return Err(e);
        }
        Ok(())
    }

    /// Ends the first process of a container, and with it the others.
    fn end(&self, record: &Record) -> Result<()> {
        let process = record.process();
        if let Some(process) = &process {
            let _ = pidfd::send_signal(process, 9);
        }
        self.end_rest(record, process.as_ref(), &self.tree(record)?)
    }

    /// Sends a signal to the first process, or to all.
    pub fn kill(&self, id: &str, signal: Signal, all: bool) -> Result<()> {
        let (record, status) = self.look(id)?;
        let failed = |e: CallError| Error::Call { what: "signal the container".into(), source: e };
        let tree = self.tree(&record)?;
        if all {
            // Also for a stopped container: without a pid namespace its other processes live on.
            return match signal.0 {
                9 => Ok(tree.kill()?),
                _ => self.signal_all(id, &tree, signal),
            };
        }
        let Some(process) = record.process() else {
            if signal.0 == 9 && !record.owns_pids && !tree.pids()?.is_empty() {
                // Processes of a pid namespace that is not the container's outlive its first one.
                return Ok(tree.kill()?);
            }
            return Err(Error::Usage("container not running".into()));
        };
        pidfd::send_signal(&process, signal.0).map_err(failed)?;
        if signal.0 == 9 {
            if status == Status::Paused {
                // A frozen v1 cgroup prevents even the exit.
                tree.thaw()?;
            }
            if !record.owns_pids {
                // Without a private pid namespace the end of the first process does not end the
                // others.
                tree.kill()?;
            }
        }
        Ok(())
    }

    /// Signals every process of a cgroup; the cgroup is frozen meanwhile, so that none is missed.
    fn signal_all(&self, id: &str, tree: &Tree, signal: Signal) -> Result<()> {
        let freezes = !tree.is_frozen()?;
        let mark = freezes.then(|| self.store.mark_frozen(id)).transpose()?;
        if freezes {
            tree.freeze()?;
        }
        let sent = (|| -> Result<()> {
            for pid in tree.pids()? {
                let Ok(process) = pidfd::open(pid) else { continue };
                match pidfd::send_signal(&process, signal.0) {
                    Err(e) if e.errno() == rustix::io::Errno::SRCH.raw_os_error() => {}
                    other => other.map_err(Error::call("signal a process"))?,
                }
            }
            Ok(())
        })();
        let thawed = if freezes { tree.thaw() } else { Ok(()) };
        if let (Some(mark), Ok(())) = (mark, &thawed) {
            mark.remove()?;
        }
        sent.and(thawed.map_err(Error::from))
    }

    /// Removes a container that has ended, or was never started; with `force` in any state.
    pub fn delete(&self, id: &str, force: bool) -> Result<()> {
        let looked = match self.look(id) {
            Err(Error::NotFound(_)) if force => return self.store.remove(id),
            // An unreadable container: remove its directory.
            Err(_) if force && self.store.dir(id).exists() => return self.store.remove(id),
            other => other,
        };
        let (record, status) = looked?;
        let lock = self.store.lock(id, force)?;
        match status {
            Status::Stopped => {}
            Status::Created => {}
            _ if force => {}
            _ => {
                let why = "cannot delete a container that is not stopped";
                return Err(Self::not(&record, status, why));
            }
        }
        self.take_down(&record)?;
        drop(lock);
        let hooks = &record.poststop;
        for at in 0..hooks.len() {
            // A failed hook prevents neither the other hooks nor the removal.
            if let Err(e) = hook::run_at("poststop", hooks, at, &record, Status::Stopped) {
                crate::log::warn(&e.to_string());
            }
        }
        Ok(())
    }

    /// Freezes all processes.
    pub fn pause(&self, id: &str) -> Result<()> {
        let _lock = self.store.lock(id, false)?;
        let (record, status) = self.look(id)?;
        match status {
            Status::Running | Status::Created => Ok(self.tree(&record)?.freeze()?),
            _ => Err(Self::not(&record, status, "only a running container can be paused")),
        }
    }

    /// Resumes all processes.
    pub fn resume(&self, id: &str) -> Result<()> {
        let _lock = self.store.lock(id, false)?;
        let (record, status) = self.look(id)?;
        match status {
            Status::Paused => Ok(self.tree(&record)?.thaw()?),
            _ => Err(Self::not(&record, status, "it is not paused")),
        }
    }

    /// Returns the pids of all processes, in this process's pid namespace.
    pub fn pids(&self, id: &str) -> Result<Vec<u32>> {
        let (record, _) = self.look(id)?;
        let mut pids = self.tree(&record)?.pids()?;
        pids.sort_unstable();
        Ok(pids)
    }

    /// Changes limits of a container; missing ones do not change.
    pub fn update(&self, id: &str, resources: &Resources) -> Result<()> {
        let _lock = self.store.lock(id, false)?;
        let (mut record, status) = self.look(id)?;
        if status == Status::Stopped {
            return Err(Self::not(&record, status, "it has no limits any more"));
        }
        let forest = self.forest()?;
        let mut tree = forest.open(&record.cgroup, record.cgroup_made)?;
        // On v1 it was created only where it was limited or counted then.
        forest.extend(&mut tree, &cgroup::needed(resources))?;
        if tree.made() > record.cgroup_made {
            // `delete` removes the directories above it, too.
            record.cgroup_made = tree.made();
            self.store.write(&record)?;
        }
        cgroup::set(&tree, forest, resources)
    }

    /// Waits until the first process has exited.
    pub fn wait(&self, process: BorrowedFd<'_>) -> Result<()> {
        pidfd::wait(process, None).map(drop).map_err(Error::call("wait for the container"))
    }
}

/// Fetches the descriptor of a filter's listener from the newborn and sends it to the process that
/// serves it. Meanwhile the newborn waits without a system call, since the filter may notify about
/// any.
pub(crate) fn serve_listener(
    newborn: &Newborn,
    page: &File,
    (record, status): (&Record, Status),
    seccomp: Option<&Seccomp>,
) -> Result<()> {
    let socket = seccomp.and_then(|seccomp| seccomp.listener_path.as_deref());
    let socket =
        socket.ok_or_else(|| Error::field("linux.seccomp.listenerPath", "it is missing"))?;
    let deadline = Instant::now() + Duration::from_secs(10);
    let number = (|| -> std::io::Result<Option<i32>> {
        use std::os::unix::fs::FileExt;
        let mut word = [0_u8; 4];
        while Instant::now() < deadline && pidfd::is_alive(&newborn.pidfd) {
            page.read_exact_at(&mut word, 0)?;
            match i32::from_ne_bytes(word) {
                0 => std::thread::sleep(Duration::from_micros(50)),
                number => return Ok(Some(number - 1)),
            }
        }
        Ok(None)
    })();
    let place = "the page of a seccomp listener";
    let Some(number) = number.map_err(Error::file("read", place))? else { return Ok(()) };
    let listener: OwnedFd = pidfd::copy_descriptor(newborn.pidfd.as_fd(), number)
        .map_err(Error::call("fetch the seccomp listener"))?;
    let metadata = seccomp.and_then(|seccomp| seccomp.listener_metadata.clone());
    let state = serde_json::json!({
        "ociVersion": crate::OCI_VERSION,
        "fds": ["seccompFd"],
        "pid": newborn.pid,
        "metadata": metadata.unwrap_or_default(),
        "state": record.state(status, record.pid),
    });
    let sent = console::send_listener(socket, state.to_string().as_bytes(), listener);
    let went_on = std::os::unix::fs::FileExt::write_all_at(page, &1_i32.to_ne_bytes(), 4);
    went_on.map_err(Error::file("write", place))?;
    sent
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_is_parsed_by_number_or_name() {
        let number = |text: &str| text.parse::<Signal>().map(|s| s.0).ok();
        assert_eq!(number("9"), Some(9));
        assert_eq!(number("KILL"), Some(9));
        assert_eq!(number("sigterm"), Some(15));
        assert_eq!(number("SIGRTMIN+3"), Some(37));
        assert_eq!(number("RTMAX-1"), Some(63));
        assert_eq!(number("SYS"), Some(31));
        for bad in ["", "65", "-1", "SIGNONE", "RTMIN+99", "+9x"] {
            assert_eq!(number(bad), None, "{bad}");
        }
    }
}
