//! `exec`: one more process in a container.
//!
//! The process is cloned into the container's pid namespace and cgroup, enters the other namespaces
//! by the first process's pidfd, and follows the last part of a plan. Processes of the container
//! can see it from its first moment. It cannot be traced or inspected before execve
//! (CVE-2016-9962), and has no descriptor of the host except those it was given (CVE-2024-21626).

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use dormouse_keeper::birth::{self, Wanted};
use dormouse_keeper::newborn::Heritage;
use dormouse_keeper::tiny::Outside;
use dormouse_kernel::call::{self, CloneFlags};
use dormouse_kernel::cgroup::{Placement, Tree};
use dormouse_kernel::{pidfd, weakened};
use dormouse_launch::{Newborn, Plan};
use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::create::{Created, check_exec, copies, told};
use crate::descriptor::clone_fd;
use crate::error::{Error, Result};
use crate::identity::{self, Ids};
use crate::life::serve_listener;
use crate::process::{self, Affinity, Io, Last};
use crate::spec::Process;
use crate::store::{self, Status};
use crate::{Runtime, console, filter, namespace};

/// Options of `exec`.
#[derive(Debug, Default)]
pub struct Exec {
    /// The process; missing fields are taken from the container's own.
    pub process: Process,
    /// Socket that receives the master of a terminal.
    pub console_socket: Option<PathBuf>,
    /// File that receives the pid.
    pub pid_file: Option<PathBuf>,
    /// Socket to which a pidfd of the process is sent.
    pub pidfd_socket: Option<PathBuf>,
    /// Descriptors for the program at 3 and following.
    pub preserve: Vec<OwnedFd>,
    /// The master of a terminal is returned.
    pub keep_console: bool,
    /// In a paused container the process may wait until it is resumed.
    pub ignore_paused: bool,
    /// Cgroups below the container's own for the process: `PATH` in every hierarchy, or
    /// `CONTROLLER[,CONTROLLER]:PATH`.
    pub cgroups: Vec<String>,
}

/// Parses cgroups below a container's own: pairs of a controller, empty for every hierarchy, and a path
/// without `..`.
fn cgroups_below(given: &[String], tree: &Tree) -> Result<Vec<(String, String)>> {
    let bad =
        |text: &str, why: &str| Error::Usage(format!("invalid --cgroup argument: {text} ({why})"));
    let mut all: Vec<(String, String)> = Vec::new();
    for text in given {
        let (controllers, path) = match text.split_once(':') {
            Some(pair) => pair,
            None if given.len() == 1 => ("", text.as_str()),
            None => return Err(bad(text, "missing <controller>: prefix")),
        };
        if path.split('/').any(|part| part == "..") {
            return Err(Error::Usage(format!("--cgroup: bad sub cgroup path: {path}")));
        }
        for word in controllers.split(',') {
            if word.is_empty() && text.contains(':') {
                return Err(bad(text, "empty <controller> prefix"));
            }
            if !word.is_empty() && !tree.has_hierarchy(word) {
                return Err(Error::Usage(format!("--cgroup: unknown controller {word} in {text}")));
            }
            if all.iter().any(|(known, _)| known == word) {
                return Err(bad(text, "controller specified twice"));
            }
            all.push((word.to_owned(), path.to_owned()));
        }
    }
    Ok(all)
}

/// Opens the cgroups of a later process.
fn placement(tree: &Tree, given: &[String]) -> Result<Placement> {
    let below = cgroups_below(given, tree)?;
    if below.is_empty() {
        return Ok(tree.placement()?);
    }
    let path = |words: &str| {
        let is_of = |word: &str| word.is_empty() || words.split(',').any(|known| known == word);
        below.iter().find(|(word, _)| is_of(word)).map(|(_, path)| path.as_str())
    };
    tree.placement_below(path).map_err(|e| {
        let why = std::error::Error::source(&e).map_or(e.to_string(), ToString::to_string);
        Error::Usage(format!("--cgroup: error adding pid to cgroups: {why}"))
    })
}

/// The page by which a listener's descriptor is fetched ([`serve_listener`]).
fn listener_page() -> Result<File> {
    let make = || {
        let page = File::from(memfd_create("listener", MemfdFlags::CLOEXEC)?);
        page.set_len(4096)?;
        Ok(page)
    };
    make().map_err(Error::file("make", "the page of a seccomp listener"))
}

impl Runtime {
    /// Returns the process of a container's own configuration, as defaults for another process.
    pub fn process(&self, id: &str) -> Result<Process> {
        self.store.read(id)?;
        Ok(self.store.config(id)?.process.unwrap_or_default())
    }

    /// Runs one more process.
    pub fn exec(&self, id: &str, exec: &Exec) -> Result<Created> {
        let (record, status) = self.look(id)?;
        let not = |why| Error::State { id: id.to_owned(), state: status.as_str(), why };
        match status {
            Status::Running | Status::Created => {}
            Status::Paused if exec.ignore_paused => {}
            Status::Paused => return Err(not("cannot exec in a paused container")),
            _ => return Err(not("cannot exec in a container that is not running")),
        }
        let init = record.process().ok_or_else(|| not("its process has ended"))?;
        let config = self.store.config(id)?;
        let linux = config.linux.clone().unwrap_or_default();
        let own = config.process.unwrap_or_default();
        let mut process = exec.process.clone();
        // Missing fields are the container's own.
        process.capabilities = process.capabilities.or(own.capabilities);
        process.apparmor_profile = process.apparmor_profile.or(own.apparmor_profile);
        process.selinux_label = process.selinux_label.or(own.selinux_label);
        process.oom_score_adj = process.oom_score_adj.or(own.oom_score_adj);
        if process.cwd.is_empty() {
            process.cwd = own.cwd;
        }
        check_exec(&process)?;
        process::warn_of_unknown(process.capabilities.as_ref());
        console::check(process.terminal, exec.console_socket.as_deref(), exec.keep_console)?;
        let filter = linux.seccomp.as_ref().map(filter::compile).transpose()?;
        let page = match filter.as_ref().is_some_and(|filter| filter.notifies) {
            true => Some(listener_page()?),
            false => None,
        };
        let tree = self.tree(&record)?;
        if !tree.exists() {
            return Err(not("its cgroup is gone"));
        }

        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(|e| Error::file("make", "a socket pair")(e.into()))?;
        let placement = placement(&tree, &exec.cgroups)?;
        let has = |word: &str| record.namespaces.iter().any(|known| known == word);
        let affinity = Affinity::of(&process)?;
        if let Some(initial) = &affinity.initial {
            // The new process has it from this one, which needs none of its own any more.
            let mask: Vec<u8> = initial.iter().flat_map(|word| word.to_ne_bytes()).collect();
            call::set_affinity(&mask)
                .map_err(|e| Error::field("process.execCPUAffinity.initial", e.to_string()))?;
        }
        let born = birth::give(
            &Outside::here()?,
            Heritage::now(),
            &Wanted {
                flags: CloneFlags::empty(),
                sock: theirs.as_fd(),
                netns: None,
                pid_namespace: has("pid").then(|| init.as_fd()),
                user_namespace: None,
                cgroup: placement.v2.as_ref().map(AsFd::as_fd),
                uid_map: "",
                gid_map: "",
                proc: false,
            },
        )?;
        drop(theirs);
        let mut newborn = Newborn::new(born.pid, born.start_time, born.pidfd, ours);
        let result = (|| -> Result<Option<OwnedFd>> {
            let ids = if has("user") { Ids::of(record.pid)? } else { Ids::default() };
            let mut plan = Plan::new();
            for tasks in placement.v1_tasks {
                let fd = plan.fd(tasks);
                plan.join_cgroup(fd);
            }
            affinity.plan(&mut plan);
            if let Some(policy) = &linux.memory_policy {
                let (mode, nodes) = process::memory_policy(policy)?;
                plan.memory_policy(mode, &nodes);
            }
            if let Some(adj) = process.oom_score_adj {
                plan.oom_score_adj(adj);
            }
            let joined = record.namespaces.iter().filter(|word| *word != "pid");
            let flags: CloneFlags = joined.filter_map(|word| namespace::flag(word)).collect();
            let target = plan.fd(clone_fd(init.as_fd())?);
            plan.setns(target, flags.bits() as u32);
            plan.become_root();
            if !weakened("keyring") {
                plan.session_keyring();
            }
            let root = format!("/proc/{}/root", record.pid);
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let root = rustix::fs::open(root, flags, Mode::empty())
                .map_err(|e| Error::file("open", "the container's root")(e.into()))?;
            // ORDER: the pid was the container's before the root was opened, and still is.
            if !pidfd::is_alive(&init) {
                return Err(not("its process has ended"));
            }
            if !has("mount") {
                // No mount namespace leads to the root.
                let fd = plan.fd(clone_fd(root.as_fd())?);
                plan.root_apart(fd, false);
                plan.enter_root();
            }
            let program =
                process::program(&process, || identity::home(root.as_fd(), process.user.uid))?;
            let io = match process.terminal {
                true => Io::Terminal,
                false => Io::Fds(process::own_streams(&ids, process.user.uid)?),
            };
            process::plan_before(&mut plan, &process, io)?;
            plan.chdir(&process.cwd, true);
            plan.lookup(&program);
            plan.sync();
            let listener = match &page {
                Some(page) => Some(plan.fd(clone_fd(page.as_fd())?)),
                None => None,
            };
            let last = Last {
                process: &process,
                program: &program,
                filter: filter.as_ref(),
                listener,
                preserve: copies(&exec.preserve)?,
                personality: linux.personality.as_ref(),
                hooks: None,
            };
            last.plan(&mut plan)?;
            newborn.send(plan)?;
            let master = newborn.ready().map_err(|e| told(&process, e))?;
            match (master, &exec.console_socket) {
                (Some(master), Some(socket)) => console::send(socket, master).map(|()| None),
                (Some(master), None) => {
                    console::leave_line_ends(&master)?;
                    Ok(Some(master))
                }
                (None, _) => Ok(None),
            }
        })();
        let (pid, pidfd) = (newborn.pid, clone_fd(newborn.pidfd.as_fd())?);
        let done = result.and_then(|console| {
            if let Some(path) = &exec.pid_file {
                store::publish_pid(path, pid)?;
            }
            if let Some(path) = &exec.pidfd_socket {
                console::send_pidfd(path, "setns", pidfd.as_fd())?;
            }
            match &page {
                None => newborn.go().map_err(|e| told(&process, e))?,
                Some(page) => {
                    newborn.release()?;
                    let state = (&record, status);
                    let served = serve_listener(&newborn, page, state, linux.seccomp.as_ref());
                    newborn.watch().map_err(|e| told(&process, e))?;
                    served?;
                }
            }
            Ok(console)
        });
        match done {
            Ok(console) => Ok(Created { pid, pidfd, console }),
            Err(e) => {
                let _ = pidfd::send_signal(&pidfd, 9);
                let _ = pidfd::reap(&pidfd);
                Err(e)
            }
        }
    }
}
