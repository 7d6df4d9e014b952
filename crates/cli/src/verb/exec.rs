//! `dormouse exec`

use std::path::PathBuf;

use anyhow::{Context, Result};
use dormouse_container::{Exec, Stream};
use dormouse_model::{Process, User};

use crate::command::Global;
use crate::create::AttachArgs;
use crate::option::env::{self, Environment};
use crate::option::key_value;
use crate::session::{self, Of, Pipes};
use crate::signal::Signals;

/// Run a command in a running container
#[derive(Debug, clap::Args)]
#[command(override_usage = "dormouse exec [OPTIONS] CONTAINER COMMAND...")]
pub(crate) struct Args {
    /// Leave it running in the background
    #[arg(long, short)]
    detach: bool,
    /// Pass standard input on
    #[arg(long, short)]
    interactive: bool,
    /// Give it a terminal
    #[arg(long, short)]
    tty: bool,
    /// Set an environment variable; NAME or PREFIX* take the caller's
    #[arg(long, short, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// Read environment variables from a file
    #[arg(long, value_name = "FILE")]
    env_file: Vec<PathBuf>,
    /// Working directory inside
    #[arg(long, short, value_name = "DIR")]
    workdir: Option<String>,
    /// Run as this user and group, names or numbers
    #[arg(long, short, value_name = "USER[:GROUP]")]
    user: Option<String>,
    /// All capabilities of the container's namespace, no seccomp filter
    #[arg(long)]
    privileged: bool,
    #[command(flatten)]
    attach: AttachArgs,
    /// Container, then the command
    #[arg(required = true, num_args = 2.., trailing_var_arg = true, value_name = "CONTAINER COMMAND")]
    words: Vec<String>,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let (name, command) = args.words.split_first().context("no container was given")?;
    let id = engine.find(name)?;
    let config = engine.config(&id)?;
    let mut environment = Environment::default();
    for entry in &config.process.env {
        let (name, value) = key_value(entry);
        // Where HOME came from the container's first user it need not fit this one.
        environment.set(name, value);
    }
    for path in &args.env_file {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read environment file '{}'", path.display()))?;
        environment.add_file(&text, &env::host)?;
    }
    for text in &args.env {
        environment.add(text, &env::host)?;
    }
    let signals = if args.detach { None } else { Some(Signals::take()?) };
    let (io, pipes) = if args.detach || args.tty {
        (session::elsewhere(Stream::Null, || Stream::Null), Pipes::default())
    } else {
        session::pipes(args.interactive, || Stream::Null)?
    };
    let exec = Exec {
        process: Process {
            args: command.to_vec(),
            env: environment.into_entries(),
            cwd: args.workdir.unwrap_or_default(),
            user: User(args.user.unwrap_or_default()),
            umask: None,
            terminal: args.tty,
            stdin: args.interactive,
        },
        privileged: args.privileged,
        io,
    };
    let running = engine.exec(&id, exec)?;
    let Some(signals) = signals else {
        running.detach();
        return Ok(0);
    };
    let ending = session::foreground(
        &engine,
        running,
        pipes,
        args.interactive,
        Of::Exec,
        &args.attach,
        &signals,
    )?;
    Ok(ending.code())
}
