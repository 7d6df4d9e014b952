//! ```text
//! dormouse-keeper --run DIR [--cgroup DIR]... [--linger MILLISECONDS]
//!                 [--settle WORD]... [--wake WORD]... [--tidy WORD]... [--nursery WORD]...
//!                 [--runner WORD]... [--runners NUMBER]
//! ```
//!
//! Started by [`dormouse_launch::Keeper::connect_or_start`], which holds the lock of the runtime
//! directory. This process returns 0 when its daemon listens, or 1 with a one-line reason.
//!
//! `--cgroup` names the directory of its own cgroup in one hierarchy; `--settle` gives program and
//! arguments, one word each, that clean up after a container, `--wake` those that wake one,
//! `--tidy` what the keeper becomes at its end, `--nursery` those that make spares, `--runner` those that execute
//! commands, at most `--runners` of them at once, `--linger` how long it stays without work (see
//! [`dormouse_keeper::server`]).

use std::ffi::{CString, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use dormouse_keeper::commands::Commands;
use dormouse_keeper::listener::{listen, remove};
use dormouse_keeper::newborn::Heritage;
use dormouse_keeper::server::{Parts, Server};
use dormouse_keeper::tiny;
use dormouse_keeper::vault::Vault;
use dormouse_kernel::call::{self as kernel, CloneArgs, Cloned};
use dormouse_launch::keeper::SOCKET;
use rustix::fs::{Mode, OFlags};

/// Resource number of the limit on descriptors (getrlimit(2)).
const NOFILE: u32 = 7;
/// Badness of the keeper: the last process to be killed when memory is short.
const OOM_SCORE_ADJ: i32 = -999;

fn main() -> ExitCode {
    // ORDER: first, so that the caller's umask changes no mode of the instance's files.
    rustix::process::umask(Mode::from_raw_mode(0o077));
    match start() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

#[derive(Default)]
struct Arguments {
    run: PathBuf,
    cgroups: Vec<PathBuf>,
    settle: Vec<CString>,
    wake: Vec<CString>,
    tidy: Vec<CString>,
    nursery: Vec<CString>,
    runner: Vec<CString>,
    runners: usize,
    linger: Duration,
}

fn arguments() -> Result<Arguments, String> {
    let mut all = Arguments::default();
    let mut words = std::env::args_os().skip(1);
    while let Some(option) = words.next() {
        let value: OsString = words.next().ok_or("an option without its value")?;
        match option.to_str() {
            Some("--run") => all.run = value.into(),
            Some("--cgroup") => all.cgroups.push(value.into()),
            Some("--linger") => {
                let ms = value.to_str().and_then(|ms| ms.parse().ok());
                all.linger = Duration::from_millis(ms.ok_or("--linger is no number")?);
            }
            Some("--runners") => {
                let number = value.to_str().and_then(|number| number.parse().ok());
                all.runners = number.ok_or("--runners is no number")?;
            }
            Some(list @ ("--settle" | "--wake" | "--tidy" | "--nursery" | "--runner")) => {
                let word = CString::new(value.into_vec()).map_err(|e| e.to_string())?;
                match list {
                    "--settle" => all.settle.push(word),
                    "--wake" => all.wake.push(word),
                    "--nursery" => all.nursery.push(word),
                    "--runner" => all.runner.push(word),
                    _ => all.tidy.push(word),
                }
            }
            _ => return Err(format!("unknown option {}", option.to_string_lossy())),
        }
    }
    if all.run.as_os_str().is_empty() {
        return Err("--run DIR is missing".into());
    }
    Ok(all)
}

/// Wipes the arguments from memory. Until execve a newborn that joins a container shows the
/// keeper's arguments, and `/proc/PID/cmdline` is readable without ptrace permission. The container
/// would learn the paths of the host.
///
/// ORDER: after the arguments were copied, while there is one thread.
fn wipe_arguments() {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // proc_pid_stat(5): fields 48 and 49; the second ends with the last parenthesis.
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let mut fields = rest.split_ascii_whitespace().skip(45).map(|f| f.parse::<usize>().ok());
    let (Some(Some(start)), Some(Some(end))) = (fields.next(), fields.next()) else { return };
    if start != 0 && start < end {
        // SAFETY: the kernel wrote the arguments there, on our own writable stack. Their only
        // reader, the standard library's `args`, has copied them and is not called again.
        unsafe { std::ptr::write_bytes(start as *mut u8, 0, end - start) };
    }
    let _ = kernel::set_name(c"dormouse-keeper"); // shown by ps
}

fn start() -> Result<(), String> {
    // Descriptors inherited from the command that starts the first container (such as the lock of a
    // shell script) would stay open as long as any container exists.
    // SAFETY: no descriptor was opened yet, and the standard streams stay.
    unsafe { dormouse_keeper::close_from(3) }.map_err(|e| format!("close what is open: {e}"))?;
    let all = arguments()?;
    wipe_arguments();
    kernel::reset_signals().map_err(|e| format!("reset its signals: {e}"))?;
    let mut heritage = Heritage::now();
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let run = rustix::fs::open(&all.run, flags, Mode::empty());
    let run: OwnedFd = run.map_err(|e| format!("open {}: {e}", all.run.display()))?;
    let mut cgroup = None;
    for dir in &all.cgroups {
        cgroup = enter_cgroup(dir)?.or(cgroup);
    }
    heritage.oom_score_adj = lower_oom_score();
    let listener = listen(&run, SOCKET).map_err(|e| e.to_string())?;
    let (name, most) = (dormouse_entry::SOCKET, all.runners);
    let commands = match most {
        0 => remove(&run, name).map(|()| None),
        _ => listen(&run, name).map(Some),
    };
    let commands = commands.map_err(|e| e.to_string())?;
    let commands = commands.map(|listener| Commands { listener, program: all.runner, most });
    let vault = Vault::open(&run).map_err(|e| format!("make the vault's socket: {e}"))?;
    // Any directory will do as the place of a mount that no other process sees; this one is there.
    let outside = tiny::enter(&all.run).map_err(|e| e.to_string())?;
    let (_, hard) = heritage.nofile;
    let _ = kernel::prlimit(NOFILE, Some((hard, hard)));
    let null = {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let null = rustix::fs::openat(&outside.root, c"dev/null", flags, Mode::empty());
        null.map_err(|e| format!("open /dev/null: {e}"))?
    };
    let Arguments { settle, wake, tidy, nursery, linger, .. } = all;
    let parts = Parts {
        run,
        listener,
        vault,
        outside,
        heritage,
        settle,
        wake,
        tidy,
        nursery,
        commands,
        linger,
    };
    let into_cgroup = cgroup.as_ref().map(AsFd::as_fd);
    // SAFETY: there is one thread, so the child may do all that the parent may.
    match unsafe { kernel::clone3(&CloneArgs { into_cgroup, ..CloneArgs::default() }) } {
        Ok(Cloned::Parent { .. }) => Ok(()),
        Ok(Cloned::Child) => {
            let _ = rustix::process::setsid();
            let _ = kernel::set_name(c"dormouse-keeper");
            let stdio = [
                rustix::stdio::dup2_stdin(null.as_fd()),
                rustix::stdio::dup2_stdout(null.as_fd()),
                rustix::stdio::dup2_stderr(null.as_fd()),
            ];
            drop((null, cgroup));
            let served = match stdio.into_iter().collect::<Result<Vec<_>, _>>() {
                Ok(_) => Server::new(parts).and_then(Server::run).is_ok(),
                Err(_) => false,
            };
            kernel::exit(i32::from(!served))
        }
        Err(e) => Err(format!("make the daemon: {e}")),
    }
}

/// Enters a v1 cgroup by `tasks`, which needs no wait, because this process has one thread. Returns
/// a v2 cgroup instead, for the daemon to be cloned into: entering one waits for an RCU grace
/// period.
fn enter_cgroup(dir: &Path) -> Result<Option<OwnedFd>, String> {
    let failed = |e: std::io::Error| format!("enter the cgroup {}: {e}", dir.display());
    // Not fs::write, which creates: cgroup v2 answers that with EACCES, not ENOENT.
    match std::fs::OpenOptions::new().write(true).open(dir.join("tasks")) {
        Ok(mut tasks) => std::io::Write::write_all(&mut tasks, b"0").map(|()| None).map_err(failed),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let cgroup = rustix::fs::open(dir, flags, Mode::empty());
            cgroup.map(Some).map_err(|e| failed(e.into()))
        }
        Err(e) => Err(failed(e)),
    }
}

/// Lowers its oom_score_adj where that is allowed; gives what it was then.
fn lower_oom_score() -> Option<i32> {
    let path = "/proc/self/oom_score_adj";
    let before = std::fs::read_to_string(path).ok()?.trim().parse().ok()?;
    std::fs::write(path, OOM_SCORE_ADJ.to_string()).ok().map(|()| before)
}
