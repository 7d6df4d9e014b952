//! The command line: runc's verbs, flags, output and exit codes.
//!
//! Exit codes: 0; 1 for what failed (255 for `exec`); of `run` and `exec` in the foreground the
//! process's own, 128 and the number of a signal that ended it.

mod checkpoint;
mod flag;
mod log;
mod table;
mod update;
mod verb;

use std::ffi::OsString;
use std::os::fd::OwnedFd;

use flag::{Flag, Given, Takes};

use crate::error::{Error, Result};
use crate::{OCI_VERSION, Runtime};

pub(crate) use log::warn;

/// Where state is unless `--root` says otherwise.
const DEFAULT_ROOT: &str = "/run/dormouse-oci";

const GLOBAL: &[Flag] = &[
    ("debug", "", Takes::Nothing, "say more in the log"),
    ("log", "", Takes::One, "write the log to this file instead of standard error"),
    ("log-format", "", Takes::One, "text or json"),
    ("root", "", Takes::One, "directory of the state of containers"),
    ("systemd-cgroup", "", Takes::Nothing, "cgroupsPath is SLICE:PREFIX:NAME"),
    ("rootless", "", Takes::One, "true, false or auto; taken and not needed"),
    ("criu", "", Takes::One, "taken and not needed"),
    ("version", "v", Takes::Nothing, "print the version"),
    ("help", "h", Takes::Nothing, "show this"),
];

/// What a verb is run with.
struct Context<'c> {
    runtime: &'c Runtime,
    given: &'c Given,
    /// Descriptors that the caller wants to be passed on.
    inherited: Vec<OwnedFd>,
}

/// The code of a verb.
enum Run {
    /// It is about no container.
    Alone(fn(&Given) -> Result<u8>),
    /// It is about containers.
    With(fn(Context<'_>) -> Result<u8>),
}

/// A verb: its name, what follows its flags, what it does, its flags, its code.
struct Verb {
    name: &'static str,
    words: &'static str,
    what: &'static str,
    flags: &'static [Flag],
    run: Run,
}

/// The current time, RFC 3339.
pub(crate) fn now() -> String {
    let now = time::OffsetDateTime::now_utc();
    now.format(&time::format_description::well_known::Rfc3339).unwrap_or_default()
}

/// Reads the command line and does what it says; gives the exit code.
pub fn main() -> u8 {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    match run(words) {
        Ok(code) => code,
        Err((verb, e)) => {
            log::error(&format!("dormouse-oci {verb}: {e}"));
            if verb == "exec" { 255 } else { 1 }
        }
    }
}

#[allow(clippy::result_large_err)] // once in the life of this program
fn run(words: Vec<OsString>) -> std::result::Result<u8, (String, Error)> {
    let of_all = |e| (String::from("command line"), e);
    let global = Given::read(GLOBAL, words).map_err(of_all)?;
    if global.has("version") {
        println!(
            "dormouse-oci version {}\nspec: {OCI_VERSION}\nlibseccomp: none",
            env!("CARGO_PKG_VERSION")
        );
        return Ok(0);
    }
    let mut words = global.rest.iter().cloned();
    let name = words.next().unwrap_or_default();
    if global.has("help") || name.is_empty() || name == "help" {
        print!("{}", help());
        return Ok(0);
    }
    let named = |e| (name.clone(), e);
    let verb = table::VERBS.iter().find(|verb| verb.name == name);
    let verb = verb.ok_or_else(|| {
        named(Error::Usage("there is no such verb; see dormouse-oci --help".into()))
    })?;
    let given = Given::read(verb.flags, words.map(OsString::from).collect()).map_err(named)?;
    if given.has("help") {
        let (name, words, what) = (verb.name, verb.words, verb.what);
        print!("dormouse-oci {name} [flags] {words}\n\n{what}\n\n{}", flag::help(verb.flags));
        return Ok(0);
    }
    // ORDER: before anything is opened here, which would get the first number that is free.
    let inherited = verb::inherited(&given).map_err(named)?;
    log::open(global.one("log"), global.one("log-format"), global.has("debug")).map_err(named)?;
    log::debug(&format!("{name} of process {}", std::process::id()));
    let run = match verb.run {
        Run::Alone(run) => return run(&given).map_err(named),
        Run::With(run) => run,
    };
    if matches!(verb.name, "create" | "run" | "exec" | "restore") {
        crate::sealed::ensure().map_err(named)?;
    }
    let root = global.one("root").filter(|root| !root.is_empty()).unwrap_or(DEFAULT_ROOT);
    let runtime = Runtime::open(root, global.has("systemd-cgroup")).map_err(named)?;
    run(Context { runtime: &runtime, given: &given, inherited }).map_err(named)
}

fn help() -> String {
    let mut text = String::from("dormouse-oci [global flags] verb [flags] words\n\nVerbs:\n");
    for verb in table::VERBS {
        text.push_str(&format!(
            "   {:<34} {}\n",
            format!("{} {}", verb.name, verb.words),
            verb.what
        ));
    }
    text.push_str("\nGlobal flags:\n");
    text.push_str(&flag::help(GLOBAL));
    text
}
