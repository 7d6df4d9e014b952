//! The `dormouse` command.
//!
//! # Shape
//!
//! One file per verb under `verb/`, each a clap `Args` and a `run` that returns the exit code;
//! [`command`] lists them. What several verbs share stands beside: `option/` reads what stands
//! after options, `create` merges it with an image's configuration, `stream` moves bytes between a
//! container and the caller, `terminal` and `signal` own the caller's terminal and signals, `log`
//! follows files, `output` prints tables and JSON, `fail` errors and exit codes.
//!
//! # What a start may cost
//!
//! `dormouse run IMAGE true` is measured against other runtimes in milliseconds, and each page
//! this program touches costs microseconds before a container exists. So the verb is found before
//! clap is asked, and clap is given that one verb alone; nothing is opened, read or started that
//! the verb does not need; there is no async runtime and no thread.
//!
//! # Exit codes
//!
//! podman's: 125 where this program failed, 126 a command that cannot be executed, 127 one that
//! does not exist, 128+n a process that signal n ended, otherwise the process's own. Errors are one
//! line on stderr: `dormouse: STEP: CAUSE; HINT`.
//!
//! # JSON
//!
//! `--json` prints one document on stdout: an array for what is listed, an object per thing that
//! is inspected. Field names are snake_case, units stand last (`_bytes _ms _ns`), times are
//! RFC 3339 in UTC. Fields are only ever added.
#![forbid(unsafe_code)]

mod bulk;
mod command;
mod copy;
mod create;
mod fail;
mod image;
mod layers;
mod log;
mod name;
mod option;
mod output;
mod registry;
mod session;
mod signal;
mod sink;
mod stream;
mod target;
mod terminal;
mod verb;
mod view;

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(command::main(std::env::args_os().collect()))
}
