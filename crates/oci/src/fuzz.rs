//! Entry points for the fuzzers (`cargo xtask fuzz`). Each passes arbitrary bytes to the readers of
//! one document. Each panics if an error does not name the field, or if a reader accepts a value
//! that it promises to refuse.

use dormouse_launch::Plan;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};
use crate::mount::Dev;
use crate::namespace::Namespaces;
use crate::process::{Io, Last};
use crate::spec::{self, Process, Spec};
use crate::{bundle, cgroup, device, filter, identity, mount, process};

/// Reads a document; the result can be written, and reading it again gives the same.
fn read<T: DeserializeOwned + Serialize>(bytes: &[u8]) -> Option<T> {
    let document: T = match spec::parse(bytes) {
        Ok(document) => document,
        Err(why) => {
            assert!(!why.is_empty(), "an error without a text");
            return None;
        }
    };
    let written = serde_json::to_vec(&document).expect("a document can be written");
    let again: T = spec::parse(&written).expect("what was written can be read");
    assert_eq!(serde_json::to_vec(&again).expect("it can be written"), written);
    Some(document)
}

/// Returns a good value; an error must name its field.
fn named<T>(result: Result<T>) -> Option<T> {
    match result {
        Ok(good) => Some(good),
        Err(Error::Field { field, why }) => {
            assert!(!field.is_empty() && !why.is_empty(), "{field:?}: {why:?}");
            None
        }
        // These errors describe themselves.
        Err(Error::Usage(_) | Error::Program { .. } | Error::Launch(_)) => None,
        Err(other) => panic!("an error that names no field: {other}"),
    }
}

/// `config.json`: all decisions about it without access to the host.
pub fn config(bytes: &[u8]) {
    let Some(spec) = read::<Spec>(bytes) else { return };
    let _ = named(bundle::check(&spec, std::path::Path::new("/nowhere")));
    for mount in &spec.mounts {
        let _ = mount::Options::parse(&mount.options);
    }
    let Some(linux) = &spec.linux else { return };
    let _ = named(Namespaces::check(&linux.namespaces));
    let _ = named(cgroup::path(linux.cgroups_path.as_deref(), "id", true));
    let _ = cgroup::needed(&linux.resources.clone().unwrap_or_default());
    if let Some(seccomp) = &linux.seccomp
        && let Some(compiled) = named(filter::compile(seccomp))
    {
        // LIMIT: the kernel's.
        assert!(compiled.program.len() <= 8 * 4096 && compiled.program.len() % 8 == 0);
    }
    let mut plan = Plan::new();
    let _ = named(device::plan(
        &mut plan,
        &linux.devices,
        &Dev::Root,
        &identity::Ids::default(),
        false,
    ));
    for (name, value) in &linux.sysctl {
        if plan.sysctl(name, value).is_ok() {
            // With slashes as separators a dot is part of a name.
            let separator = if name.contains('/') { '/' } else { '.' };
            let is_named = name.split(separator).all(|part| !matches!(part, "" | "." | ".."));
            assert!(is_named && !value.contains('\n'), "{name} = {value}");
        }
    }
    if let Some(process) = &spec.process {
        prepare(process, linux.personality.as_ref());
    }
}

/// `process.json`.
pub fn process(bytes: &[u8]) {
    if let Some(process) = read::<Process>(bytes) {
        prepare(&process, None);
    }
}

/// All steps of a process, up to the plan.
fn prepare(process: &Process, personality: Option<&spec::Personality>) {
    if named(bundle::check_process(process)).is_none() {
        return;
    }
    let mut plan = Plan::new();
    let Some(program) = named(process::program(process, || "/".to_owned())) else { return };
    assert!(!program.candidates.is_empty());
    let last = Last {
        process,
        program: &program,
        filter: None,
        listener: None,
        preserve: Vec::new(),
        personality,
        hooks: None,
    };
    if named(process::plan_before(&mut plan, process, Io::Terminal)).is_some() {
        let _ = named(last.plan(&mut plan));
    }
}
