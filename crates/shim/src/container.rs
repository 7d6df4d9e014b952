//! Containers and their processes, as the shim remembers them.
//!
//! **States** of a process: `Wanted` (an exec that was not started), `Created`, `Running`, then
//! ended. Paused is a state of the container.
//!
//! **Locks and their order.** `Process::order` (held over awaits: during the start of the process
//! with its event, and while its exit is reported, so that the start is always reported first),
//! then the plain mutexes, each for a moment and never two of them.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use dormouse_kernel::cgroup::{Forest, Tree};
use tokio::sync::watch;

use crate::runtime::Runtime;
use crate::stream::{Held, Wanted};

/// Locks; a holder that panicked has left plain values.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Exit of a process.
#[derive(Debug, Clone, Copy)]
pub struct End {
    pub status: u32,
    pub at: SystemTime,
}

/// Phase of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Requested, but not created yet.
    Wanted,
    /// Created, not started yet.
    Created,
    /// Running.
    Running,
}

/// The first process of a container, or one more.
#[derive(Debug)]
pub struct Process {
    /// Empty for the first.
    pub exec_id: String,
    pub wanted: Wanted,
    pub held: Mutex<Arc<Held>>,
    pub order: tokio::sync::Mutex<()>,
    now: Mutex<(Phase, u32)>,
    ended: watch::Sender<Option<End>>,
}

impl Process {
    /// A process that is only described.
    pub fn new(exec_id: &str, wanted: Wanted) -> Self {
        Self {
            exec_id: exec_id.to_owned(),
            wanted,
            held: Mutex::default(),
            order: tokio::sync::Mutex::default(),
            now: Mutex::new((Phase::Wanted, 0)),
            ended: watch::Sender::new(None),
        }
    }

    pub fn phase(&self) -> Phase {
        lock(&self.now).0
    }

    /// The pid; 0 while there is no process.
    pub fn pid(&self) -> u32 {
        lock(&self.now).1
    }

    /// Records that the process exists from now on.
    pub fn is_there(&self, phase: Phase, pid: u32, held: Arc<Held>) {
        *lock(&self.now) = (phase, pid);
        *lock(&self.held) = held;
    }

    pub fn runs(&self) {
        lock(&self.now).0 = Phase::Running;
    }

    pub fn streams(&self) -> Arc<Held> {
        lock(&self.held).clone()
    }

    /// Its end is known.
    pub fn ends(&self, end: End) {
        self.ended.send_replace(Some(end));
    }

    pub fn end(&self) -> Option<End> {
        *self.ended.borrow()
    }

    /// Waits for the end.
    pub async fn wait(&self) -> End {
        let mut ended = self.ended.subscribe();
        loop {
            if let Some(end) = *ended.borrow_and_update() {
                return end;
            }
            if ended.changed().await.is_err() {
                // Its sender lives as long as this process is borrowed.
                return End { status: 255, at: SystemTime::now() };
            }
        }
    }
}

/// A container.
#[derive(Debug)]
pub struct Container {
    pub id: String,
    pub bundle: PathBuf,
    pub runtime: Runtime,
    pub first: Arc<Process>,
    /// Additional processes, by their exec id.
    pub others: Mutex<HashMap<String, Arc<Process>>>,
    pub is_paused: AtomicBool,
    /// Its processes end with the first one.
    pub has_pid_namespace: bool,
    /// Count of out-of-memory kills at the last query.
    oom_kills: AtomicU64,
    cgroup: Mutex<Option<Tree>>,
}

impl Container {
    /// A container that is about to be created.
    pub fn new(
        id: &str,
        bundle: PathBuf,
        runtime: Runtime,
        wanted: Wanted,
        has_pid_namespace: bool,
    ) -> Self {
        Self {
            id: id.to_owned(),
            bundle,
            runtime,
            first: Arc::new(Process::new("", wanted)),
            others: Mutex::default(),
            is_paused: AtomicBool::new(false),
            has_pid_namespace,
            oom_kills: AtomicU64::new(0),
            cgroup: Mutex::new(None),
        }
    }

    /// Returns one of its processes.
    pub fn process(&self, exec_id: &str) -> Option<Arc<Process>> {
        match exec_id {
            "" => Some(self.first.clone()),
            exec_id => lock(&self.others).get(exec_id).cloned(),
        }
    }

    /// Remembers the cgroup of its memory, by the first process, while that is there.
    pub fn find_cgroup(&self) {
        let text = std::fs::read_to_string(format!("/proc/{}/cgroup", self.first.pid()));
        let (Ok(text), Ok(forest)) = (text, Forest::find()) else { return };
        let is_v1 = forest.is_v1("memory");
        let own = |line: &&str| match line.split(':').nth(1) {
            Some(names) if is_v1 => names.split(',').any(|name| name == "memory"),
            names => names == Some(""),
        };
        let path = text.lines().find(own).and_then(|line| line.splitn(3, ':').nth(2));
        *lock(&self.cgroup) = path.and_then(|path| forest.open(path, 0).ok());
    }

    /// Returns whether a process of the container was killed for lack of memory since the last
    /// call.
    pub fn ran_out_of_memory(&self) -> bool {
        let cgroup = lock(&self.cgroup);
        let Some(tree) = cgroup.as_ref() else { return false };
        let text = match tree.has_v1("memory") {
            true => tree.read_v1("memory", "memory.oom_control"),
            false => tree.read_v2("memory.events"),
        };
        let text = text.unwrap_or_default();
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        let count = count.and_then(|count| count.trim().parse().ok()).unwrap_or(0);
        count > self.oom_kills.swap(count, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_is_seen_by_waiters_and_by_later_callers() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(async {
            let process = Arc::new(Process::new("", Wanted::default()));
            let early = tokio::spawn({
                let process = process.clone();
                async move { process.wait().await.status }
            });
            tokio::task::yield_now().await;
            process.ends(End { status: 7, at: SystemTime::now() });
            assert_eq!(early.await.expect("it waited"), 7);
            assert_eq!(process.wait().await.status, 7);
        });
    }
}
