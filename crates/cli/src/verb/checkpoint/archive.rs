//! `dormouse checkpoint export` and `import`, and `dormouse checkpoint --archive`.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use dormouse_container::{CheckpointOptions, Engine, From, NewCheckpoint};
use dormouse_model::ContainerId;
use dormouse_parcel::seal::Seal;

use super::seal::{self, KeyArgs, SealArgs};
use crate::create::{CreateArgs, Here};
use crate::option::env;
use crate::{image, output, sink};

#[derive(Debug, clap::Args)]
pub(crate) struct Export {
    /// Output file; standard output by default
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Compress it
    #[arg(long)]
    compress: bool,
    #[command(flatten)]
    seal: SealArgs,
    /// Name or id
    #[arg(value_name = "CONTAINER")]
    name: String,
    /// Number of the checkpoint, the last unless given
    #[arg(value_name = "N")]
    number: Option<u32>,
}

/// The options are those of `create`: they alone give the new container parts of this host. ARCHIVE
/// is a file, or
/// - for standard input.
#[derive(Debug, clap::Args)]
#[command(override_usage = "dormouse checkpoint import [OPTIONS] ARCHIVE")]
pub(crate) struct Import {
    /// Restore its processes at once
    #[arg(long)]
    start: bool,
    #[command(flatten)]
    keys: KeyArgs,
    #[command(flatten)]
    create: CreateArgs,
}

pub(crate) fn export(engine: &Engine, args: &Export) -> Result<()> {
    let id = engine.find(&args.name)?;
    let which = args.number.map_or(From::Last, From::Number);
    let seal = args.seal.read()?;
    sink::write(args.output.as_deref(), sink::Holds::Memory, |out| {
        seal::through(seal.as_ref(), out, |out| {
            Ok(engine.export_checkpoint(&id, &which, args.compress, out)?)
        })
    })
}

/// Saves the processes of a running container as an archive.
///
/// ORDER: the archive is complete and on the disk before the processes are killed.
pub(crate) fn save(
    engine: &Engine,
    id: &ContainerId,
    options: &CheckpointOptions,
    compress: bool,
    seal: Option<&Seal>,
    file: PathBuf,
) -> Result<NewCheckpoint> {
    let config = engine.config(id)?;
    let (made, ()) = engine.checkpoint_while(id, options, |checkpoint| {
        sink::keep(&file, |out| {
            seal::through(seal, out, |out| {
                Ok(engine.write_archive(&config, checkpoint, compress, out)?)
            })
        })
    })?;
    if let Some(number) = made.number {
        engine.remove_checkpoint(id, number)?;
    }
    Ok(NewCheckpoint { path: file, number: None, figures: made.figures })
}

pub(crate) fn import(engine: &Engine, args: &Import) -> Result<()> {
    let create = &args.create;
    let Some(path) = create.words.first() else { bail!("no archive was given") };
    let keys = args.keys.read()?;
    let input: Box<dyn Read> = match path.as_str() {
        "-" => Box::new(io::stdin().lock()),
        path => Box::new(File::open(path).with_context(|| format!("cannot open '{path}'"))?),
    };
    let step = || format!("cannot import '{path}'");
    let mut input = keys.open(input).with_context(step)?;
    let cwd = std::env::current_dir().context("cannot find the working directory")?;
    let env_files = create.process.read_env_files()?;
    let default_volume = || Ok(engine.default_volume()?);
    let here = Here {
        cwd: Path::new(&cwd),
        env: &env::host,
        env_files,
        default_volume: &default_volume,
        log_driver: &|| Ok(engine.log_driver()?),
        pids: &|| Ok(engine.default_pids()?),
    };
    let progress = image::progress(create.quiet);
    let made = engine
        .import_checkpoint(&mut input, &*progress, |saved| create.merge_saved(saved, &here))
        .with_context(step)?;
    if args.start {
        engine.restore(&made.id, &From::Last, false)?.detach();
    }
    output::line(made.name.as_str())
}
