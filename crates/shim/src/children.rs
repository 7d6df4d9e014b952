//! The children of the shim: which ones it reaps itself.

use std::collections::HashSet;
use std::sync::Mutex;

use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};

use crate::container::lock;

/// Processes whose parent the shim is or becomes.
///
/// Processes of containers are reaped by the code that waits for them, and so are calls of the
/// runtime. All others are orphans of a container without a pid namespace. They are reaped when no
/// call is in progress, because its child may be a process that is not registered yet.
#[derive(Debug, Default)]
pub struct Children(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    calls: usize,
    pids: HashSet<u32>,
}

/// A call of the runtime that is under way.
#[derive(Debug)]
pub struct Call<'c>(&'c Children);

impl Drop for Call<'_> {
    fn drop(&mut self) {
        lock(&self.0.0).calls -= 1;
        self.0.sweep();
    }
}

impl Children {
    /// Begins a call.
    pub fn call(&self) -> Call<'_> {
        lock(&self.0).calls += 1;
        Call(self)
    }

    /// Registers a process that is waited for.
    pub fn know(&self, pid: u32) {
        lock(&self.0).pids.insert(pid);
    }

    /// Removes a process that was reaped.
    pub fn forget(&self, pid: u32) {
        lock(&self.0).pids.remove(&pid);
        self.sweep();
    }

    /// Reaps orphans. The kernel shows one dead child at a time: if that one is registered, the
    /// rest is left to the sweep after it was reaped.
    pub fn sweep(&self) {
        let known = lock(&self.0);
        if known.calls > 0 {
            return;
        }
        let ended = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG;
        loop {
            let pid = match waitid(Id::All, ended | WaitPidFlag::WNOWAIT) {
                Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..)) => pid,
                _ => return,
            };
            if known.pids.contains(&pid.as_raw().cast_unsigned()) {
                return;
            }
            if waitid(Id::Pid(pid), ended).is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::time::Duration;

    #[test]
    fn only_unregistered_children_are_reaped() {
        let children = Children::default();
        let mut known = Command::new("true").spawn().expect("started");
        children.know(known.id());
        let call = children.call();
        let mut orphan = Command::new("true").spawn().expect("started");
        let is_there = |pid: u32| std::path::Path::new(&format!("/proc/{pid}")).exists();
        std::thread::sleep(Duration::from_millis(200));
        children.sweep();
        assert!(is_there(orphan.id()), "it was reaped under a call");
        drop(call);
        let code = known.wait().expect("not reaped elsewhere").code();
        children.forget(known.id());
        assert_eq!(code, Some(0));
        assert!(!is_there(orphan.id()));
        assert!(orphan.wait().is_err(), "it was still to be reaped");
    }
}
