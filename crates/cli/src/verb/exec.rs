//! `dormouse exec`

use anyhow::{Context, Result, bail};
use dormouse_container::{Exec, Stream};
use dormouse_model::{Process, User};

use crate::command::Global;
use crate::create::AttachArgs;
use crate::option::env::{self, Environment};
use crate::option::key_value;
use crate::option::process::ProcessArgs;
use crate::session::{self, Of, Pipes};
use crate::signal::Signals;

/// Run a command in a running container
#[derive(Debug, clap::Args)]
#[command(override_usage = "dormouse exec [OPTIONS] CONTAINER COMMAND...")]
pub(crate) struct Args {
    /// Leave it running in the background
    #[arg(long, short)]
    pub(crate) detach: bool,
    #[command(flatten)]
    pub(crate) process: ProcessArgs,
    /// All capabilities of the container's namespace, no seccomp filter
    #[arg(long)]
    privileged: bool,
    #[command(flatten)]
    attach: AttachArgs,
    /// Container, then the command
    #[arg(required = true, num_args = 1.., trailing_var_arg = true, value_name = "CONTAINER COMMAND")]
    pub(crate) words: Vec<String>,
}

impl Args {
    /// The arguments without any option and word.
    pub(crate) fn plain() -> Self {
        Self {
            detach: false,
            process: ProcessArgs::default(),
            privileged: false,
            attach: AttachArgs::plain(),
            words: Vec::new(),
        }
    }
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let (name, command) = args.words.split_first().context("no container was given")?;
    if command.is_empty() {
        bail!("no command was given: dormouse exec CONTAINER COMMAND");
    }
    let id = engine.find(name)?;
    let config = engine.config(&id)?;
    let mut environment = Environment::default();
    for entry in &config.spec.process.env {
        let (name, value) = key_value(entry);
        // HOME of the container's first user may not fit this user.
        environment.set(name, value);
    }
    let asked = args.process;
    asked.set(&mut environment, &asked.read_env_files()?, &env::host)?;
    let signals = if args.detach { None } else { Some(Signals::take()?) };
    let (io, pipes) = if args.detach || asked.tty {
        (session::elsewhere(Stream::Null, || Stream::Null), Pipes::default())
    } else {
        session::pipes(asked.interactive, || Stream::Null)?
    };
    let exec = Exec {
        process: Process {
            args: command.to_vec(),
            entrypoint: 0,
            env: environment.into_entries(),
            cwd: asked.workdir.unwrap_or_default(),
            user: User(asked.user.unwrap_or_default()),
            umask: None,
            terminal: asked.tty,
            stdin: asked.interactive,
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
        asked.interactive,
        Of::Exec,
        &args.attach,
        &signals,
    )?;
    Ok(ending.code())
}
