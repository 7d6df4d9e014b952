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
    pub(crate) detach: bool,
    #[command(flatten)]
    attach: AttachArgs,
    #[command(flatten)]
    pub(crate) create: CreateArgs,
}

impl Args {
    /// The arguments without any option and word.
    pub(crate) fn plain() -> Self {
        Self { detach: false, attach: AttachArgs::plain(), create: CreateArgs::plain() }
    }
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let (create, stay) = (&args.create, !args.detach);
    let image = create::image(&engine, create)?;
    // ORDER: before the container starts, so that no signal ends this program meanwhile.
    let signals = if stay { Some(Signals::take()?) } else { None };
    let created =
        create::create(&engine, create, image, |engine, create| engine.create_to_start(create))?;
    let id = created.config.id.clone();
    let io = if stay && !create.process.tty {
        let unwanted = if create.rm { || Stream::Null } else { || Stream::Log };
        session::pipes(create.process.interactive, unwanted)
    } else {
        let stdin = if create.process.interactive { Stream::Kept } else { Stream::Null };
        Ok((session::elsewhere(stdin, || Stream::Log), Pipes::default()))
    };
    // A container that never ran is removed.
    let started = match io {
        Ok((io, pipes)) => engine.start_new(created, io).map(|r| (r, pipes)).map_err(Into::into),
        Err(e) => {
            engine.discard(created);
            Err(e)
        }
    };
    let (running, pipes) = started.inspect_err(|_| create::forget_cidfile(create))?;
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
