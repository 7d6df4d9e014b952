//! The `dormouse` command.
//!
//! # Shape
//!
//! One file per verb under `verb/`, each a clap `Args` and a `run` that returns the exit code;
//! [`command`] lists them. Shared parts stand beside: `option/` parses the values of options,
//! `create` merges them with an image's configuration, `stream` moves bytes between a container and
//! the caller, `terminal` and `signal` own the caller's terminal and signals, `log` follows files,
//! `output` prints tables and JSON, `fail` errors and exit codes.
//!
//! # What a start may cost
//!
//! `dormouse run IMAGE true` is measured against other runtimes in milliseconds, and each page this
//! program touches costs microseconds before a container exists. So the plainest forms of `run` and
//! `exec` are read without clap ([`quick`]). Otherwise the verb is found before clap is called, and
//! clap receives that one verb alone. A verb opens, reads and starts only what it
//! needs. There is no async runtime. Threads are started by lists of many items only ([`output`],
//! and the engine's list), by a large restore and by image transfers, never by a plain start.
//!
//! # Exit codes
//!
//! podman's: 125 if this program failed, 126 for a command that cannot be executed, 127 for a
//! command that does not exist, 128+n for a process killed by signal n, otherwise the process's
//! own. Errors are one line on stderr: `dormouse: STEP: CAUSE; HINT`.
//!
//! # JSON
//!
//! `--json` prints one document on stdout: an array for a list, an object per inspected thing.
//! Field names are snake_case, units stand last (`_bytes _ms _ns`), times are RFC 3339 in UTC.
//! Fields are only ever added. `inspect` without options, and lists with `--format json`, print arrays
//! with podman's names instead; `--format` also takes the templates of [`template`].
#![forbid(unsafe_code)]
#![cfg_attr(not(test), no_main)]

mod bulk;
mod command;
mod compatible;
mod copy;
mod create;
mod entry;
mod fail;
mod format;
mod hint;
mod image;
mod layers;
mod log;
mod name;
mod option;
mod output;
mod quick;
mod registry;
mod runner;
mod session;
mod signal;
mod sink;
mod spectator;
mod stream;
mod target;
mod template;
mod terminal;
mod text;
mod umask;
mod verb;
mod view;

#[cfg(not(test))]
dormouse_kernel::main!(begin);

#[cfg_attr(test, expect(dead_code, reason = "tests have a start of their own"))]
fn begin() -> u8 {
    // ORDER: first, before any file is created.
    umask::set();
    quick::main(std::env::args_os().collect())
}
