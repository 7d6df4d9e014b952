//! The command line: runc's verbs, flags, output and exit codes.
//!
//! Exit codes: 0; 1 for a failure (255 for `exec`). `run` and `exec` in the foreground return the
//! process's own, or 128 and the number of the signal that killed it.

mod checkpoint;
mod context;
mod flag;
mod table;
mod update;
mod verb;

use std::ffi::OsString;
use std::os::fd::AsFd;

use context::{Context, Run, Verb};
use flag::{Flag, Given, Takes, Words};

use crate::checkpoint::RESCUE;
use crate::error::Error;
use crate::{OCI_VERSION, Runtime, log};

/// Directory of the state without `--root`.
const DEFAULT_ROOT: &str = "/run/dormouse-oci";

const GLOBAL: &[Flag] = &[
    ("debug", "", Takes::Nothing, "write more to the log"),
    ("log", "", Takes::One, "write the log to this file instead of standard error"),
    ("log-format", "", Takes::One, "text or json"),
    ("root", "", Takes::One, "directory of the state of containers"),
    ("systemd-cgroup", "", Takes::Nothing, "cgroupsPath is SLICE:PREFIX:NAME"),
    ("rootless", "", Takes::One, "true, false or auto; accepted without effect"),
    ("criu", "", Takes::One, "accepted without effect"),
    ("version", "v", Takes::Nothing, "print the version"),
    ("help", "h", Takes::Nothing, "show this"),
];

fn rescue() -> crate::error::Result<()> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned();
    let socket = socket.map_err(Error::file("duplicate", "standard input"))?;
    Ok(dormouse_checkpoint::save::rescue_connections(socket)?)
}

/// Executes the command line; returns the exit code.
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
    if words == [RESCUE] {
        return rescue().map(|()| 0).map_err(|e| (RESCUE.to_owned(), e));
    }
    let of_all = |e| (String::from("command line"), e);
    let global = Given::read(GLOBAL, Words::End, words).map_err(of_all)?;
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
        named(Error::Usage(format!("No help topic for '{name}': see dormouse-oci --help")))
    })?;
    // What follows the id is a command's or ps(1)'s.
    let between = if matches!(verb.name, "exec" | "ps") { Words::End } else { Words::Between };
    let words = words.map(OsString::from).collect();
    let given = Given::read(verb.flags, between, words).map_err(named)?;
    if given.has("help") {
        print!("{}", help_of(verb));
        return Ok(0);
    }
    // ORDER: before this process opens a file, which would get the lowest free number.
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
    let given_root = global.one("root").filter(|root| !root.is_empty());
    if let Some(root) = given_root.filter(|_| verb.name == "list") {
        // A directory that was named by mistake has no containers either, and is not made here.
        std::fs::read_dir(root).map_err(Error::file("list", root)).map_err(named)?;
    }
    let root = given_root.unwrap_or(DEFAULT_ROOT);
    let runtime = Runtime::open(root, global.has("systemd-cgroup")).map_err(named)?;
    run(Context { runtime: &runtime, given: &given, inherited }).map_err(named)
}

/// Formats a section of a help text, with the headings of runc's, which scripts search for.
fn section(heading: &str, text: &str) -> String {
    format!("{heading}:\n{text}\n")
}

fn help() -> String {
    let verbs: String = table::VERBS
        .iter()
        .map(|verb| format!("   {:<34} {}\n", format!("{} {}", verb.name, verb.words), verb.what))
        .collect();
    [
        section("NAME", "   dormouse-oci - Open Container Initiative runtime\n"),
        section(
            "USAGE",
            "   dormouse-oci [global options] command [command options] [arguments...]\n",
        ),
        section("VERSION", &format!("   {}\n", env!("CARGO_PKG_VERSION"))),
        section("COMMANDS", &verbs),
        section("GLOBAL OPTIONS", &flag::help(GLOBAL)),
    ]
    .concat()
}

fn help_of(verb: &Verb) -> String {
    let Verb { name, words, what, .. } = verb;
    [
        section("NAME", &format!("   dormouse-oci {name} - {what}\n")),
        section("USAGE", &format!("   dormouse-oci {name} [command options] {words}\n")),
        section("OPTIONS", &flag::help(verb.flags)),
    ]
    .concat()
}
