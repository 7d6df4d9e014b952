//! `dormouse run`

use anyhow::Result;
use dormouse_container::Stream;

use super::create;
use crate::command::Global;
use crate::create::{AttachArgs, CreateArgs};
use crate::output;
use crate::session::{self, Of, Pipes};
use crate::signal::Signals;

/// Run a command in a new container
#[derive(Debug, clap::Args)]
#[command(override_usage = "dormouse run [OPTIONS] IMAGE [COMMAND]...")]
pub(crate) struct Args {
    /// Leave it running in the background and print its id
    #[arg(long, short)]
    detach: bool,
    #[command(flatten)]
    attach: AttachArgs,
    #[command(flatten)]
    create: CreateArgs,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let (create, stay) = (&args.create, !args.detach);
    let image = create::image(&engine, create)?;
    // ORDER: before anything runs, so that no signal finds us unprepared.
    let signals = if stay { Some(Signals::take()?) } else { None };
    let id = create::create(&engine, create, image)?;
    let io = if stay && !create.process.tty {
        let unwanted = if create.rm { || Stream::Null } else { || Stream::Log };
        session::pipes(create.process.interactive, unwanted)
    } else {
        let stdin = if create.process.interactive { Stream::Kept } else { Stream::Null };
        Ok((session::elsewhere(stdin, || Stream::Log), Pipes::default()))
    };
    let started = io.and_then(|(io, pipes)| Ok((engine.start(&id, io)?, pipes)));
    let (running, pipes) = started.inspect_err(|_| {
        // A container that never ran is of no use to anybody; the first error is the one to tell.
        let _ = engine.remove(&id, true, true);
        create::forget_cidfile(create);
    })?;
    let Some(signals) = signals else {
        running.detach();
        output::line(id.as_str())?;
        return Ok(0);
    };
    let of = Of::Container { logs: !create.rm };
    let ending = session::foreground(
        &engine,
        running,
        pipes,
        create.process.interactive,
        of,
        &args.attach,
        &signals,
    )?;
    Ok(ending.code())
}
