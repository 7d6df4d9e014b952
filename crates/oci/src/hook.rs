//! Hooks: programs of the caller that run between the steps of a container's life.
//!
//! Hooks in the runtime's own namespaces are run here; those in the container's are part of the
//! plan and run by the newborn (`dormouse_launch::Plan::hook`). Each hook gets the state on
//! standard input, its own environment and nothing else of this process (CVE-2024-0132).

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use dormouse_kernel::pidfd;
use dormouse_launch::{Exec, Plan};
use rustix::fs::MemfdFlags;

use crate::error::{Error, Result};
use crate::spec::Hook;
use crate::store::{Record, Status};

/// LIMIT: bytes of a hook's output in an error.
const LAST_WORDS: u64 = 1024;

fn memory(name: &str) -> std::io::Result<File> {
    Ok(File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?))
}

/// Makes a file with the state, positioned at its beginning.
pub(crate) fn state_file(record: &Record, status: Status, pid: u32) -> Result<File> {
    let make = || {
        let mut file = memory("state")?;
        serde_json::to_writer(&file, &record.state(status, pid))?;
        file.seek(SeekFrom::Start(0))?;
        Ok(file)
    };
    make().map_err(Error::file("write", "the state for hooks"))
}

/// Runs the hooks of a list one after the other, in the bundle's directory.
pub(crate) fn run(
    stage: &'static str,
    hooks: &[Hook],
    record: &Record,
    status: Status,
) -> Result<()> {
    for index in 0..hooks.len() {
        run_at(stage, hooks, index, record, status)?;
    }
    Ok(())
}

/// Runs one hook of a list, in the bundle's directory.
pub(crate) fn run_at(
    stage: &'static str,
    hooks: &[Hook],
    index: usize,
    record: &Record,
    status: Status,
) -> Result<()> {
    let Some(hook) = hooks.get(index) else { return Ok(()) };
    run_one(hook, record, status, &record.bundle)
        .map_err(|why| Error::Hook { hook: name(stage, index, hook), why })
}

/// Names a hook in errors, with the words that scripts for runc search for.
fn name(stage: &str, index: usize, hook: &Hook) -> String {
    format!("{stage} hook #{index}: {:?}", hook.path)
}

fn run_one(
    hook: &Hook,
    record: &Record,
    status: Status,
    bundle: &Path,
) -> std::result::Result<(), String> {
    let told = |e: std::io::Error| e.to_string();
    let state = state_file(record, status, record.pid).map_err(|e| e.to_string())?;
    let mut said = memory("hook").map_err(told)?;
    let said_too = || said.try_clone().map(Stdio::from).map_err(told);
    let mut command = Command::new(&hook.path);
    if let Some(name) = hook.args.first() {
        command.arg0(name).args(&hook.args[1..]);
    }
    command.env_clear();
    for pair in hook.env.iter().flatten() {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        command.env(name, value);
    }
    command.current_dir(bundle).stdin(Stdio::from(state)).stdout(said_too()?).stderr(said_too()?);
    let mut child = command.spawn().map_err(told)?;
    if let Some(seconds) = hook.timeout {
        let seconds = u64::try_from(seconds).unwrap_or(0);
        // An unreaped child of this process: its pid is not reused.
        let ended = pidfd::open(child.id())
            .and_then(|pidfd| pidfd::wait(&pidfd, Some(Duration::from_secs(seconds))));
        if !ended.map_err(|e| e.to_string())? {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("it did not end within {seconds} s and was killed"));
        }
    }
    let ended = child.wait().map_err(told)?;
    if ended.success() {
        return Ok(());
    }
    let mut text = String::new();
    let _ = said.flush();
    let _ = said.seek(SeekFrom::Start(0));
    let _ = said.take(LAST_WORDS).read_to_string(&mut text);
    match text.trim() {
        "" => Err(ended.to_string()),
        text => Err(format!("{ended}: {text}")),
    }
}

/// Hooks that the newborn runs.
pub(crate) struct Inside<'i> {
    /// The name of their list in the configuration.
    pub(crate) stage: &'static str,
    pub(crate) hooks: &'i [Hook],
    /// The environment of a hook without one of its own.
    pub(crate) env: &'i [Vec<u8>],
    /// The state on their standard input; the pid is that of the newborn in its own pid namespace.
    pub(crate) state: (&'i Record, Status, u32),
}

/// Makes the newborn run hooks, at this place of its plan, with a filter if one is given.
pub(crate) fn plan(
    plan: &mut Plan,
    inside: &Inside<'_>,
    filter: Option<(&[u8], u16)>,
) -> Result<()> {
    if inside.hooks.is_empty() {
        return Ok(());
    }
    let output = memory("hook").map_err(Error::file("make", "a file for the output of hooks"))?;
    let output = plan.fd(output.into());
    plan.hook_with(output, filter);
    let (record, status, pid) = inside.state;
    for (at, hook) in inside.hooks.iter().enumerate() {
        let input = plan.fd(state_file(record, status, pid)?.into());
        let bytes = |texts: &[String]| texts.iter().map(|t| t.clone().into_bytes()).collect();
        let argv = match hook.args.is_empty() {
            true => vec![hook.path.clone().into_bytes()],
            false => bytes(&hook.args),
        };
        let envp = hook.env.as_deref().map_or(inside.env.to_vec(), bytes);
        let candidates = vec![hook.path.clone().into_bytes()];
        let program = Exec { candidates, argv, envp };
        let seconds = hook.timeout.map_or(0, |t| u16::try_from(t).unwrap_or(u16::MAX));
        plan.hook(&program, input, seconds, &name(inside.stage, at, hook));
    }
    Ok(())
}
