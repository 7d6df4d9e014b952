//! `dormouse start`

use anyhow::{Result, bail};
use dormouse_container::{Engine, Stream};
use dormouse_model::ContainerId;

use crate::command::Global;
use crate::create::AttachArgs;
use crate::session::{self, Of, Pipes};
use crate::signal::Signals;
use crate::{fail, output};

/// Start containers that are created or stopped
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Attach to its output and pass signals on
    #[arg(long, short)]
    attach: bool,
    /// Attach to its standard input too
    #[arg(long, short)]
    interactive: bool,
    #[command(flatten)]
    how: AttachArgs,
    /// Names or ids
    #[arg(required = true, value_name = "CONTAINER")]
    names: Vec<String>,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    if !args.attach && !args.interactive {
        return Ok(fail::for_each(&args.names, |name| {
            detached(&engine, &engine.find(name)?)?;
            output::line(name)
        }));
    }
    let [name] = &args.names[..] else { bail!("only one container can be attached to") };
    let id = engine.find(name)?;
    let config = engine.config(&id)?;
    let interactive = args.interactive && config.spec.process.stdin;
    let signals = Signals::take()?;
    let (io, pipes) = if config.spec.process.terminal {
        (session::elsewhere(Stream::Null, || Stream::Log), Pipes::default())
    } else {
        session::pipes(interactive, || Stream::Log)?
    };
    let running = engine.start(&id, io)?;
    let of = Of::Container { logs: !config.spec.auto_remove };
    let ending =
        session::foreground(&engine, running, pipes, interactive, of, &args.how, &signals)?;
    Ok(ending.code())
}

/// Starts a container in the background.
pub(crate) fn detached(engine: &Engine, id: &ContainerId) -> Result<()> {
    let stdin = if engine.config(id)?.spec.process.stdin { Stream::Kept } else { Stream::Null };
    engine.start(id, session::elsewhere(stdin, || Stream::Log))?.detach();
    Ok(())
}
