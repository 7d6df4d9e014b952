//! `dormouse start`

use anyhow::{Result, bail};
use dormouse_container::{Engine, Stream};
use dormouse_model::{ContainerId, State};

use crate::command::Global;
use crate::create::AttachArgs;
use crate::session::{self, Of, Pipes};
use crate::signal::Signals;
use crate::{fail, output};

/// Start containers that are created or stopped
///
/// A container that runs already is left as it is, without an error, unless it is to be attached to.
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
            match detached(&engine, &engine.find(name)?) {
                Err(e) if runs_already(&e) => Ok(()),
                Err(e) => Err(e),
                Ok(()) => output::line(name),
            }
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

/// Returns whether a start failed because the container runs, which is no error in podman.
fn runs_already(error: &anyhow::Error) -> bool {
    use dormouse_container::Error;
    let state = match error.downcast_ref() {
        Some(Error::State { state, .. }) => *state,
        _ => return false,
    };
    matches!(state, State::Running | State::Drowsy)
}

/// Starts a container in the background.
pub(crate) fn detached(engine: &Engine, id: &ContainerId) -> Result<()> {
    let stdin = if engine.config(id)?.spec.process.stdin { Stream::Kept } else { Stream::Null };
    engine.start(id, session::elsewhere(stdin, || Stream::Log))?.detach();
    Ok(())
}
