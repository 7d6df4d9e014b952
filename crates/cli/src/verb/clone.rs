//! `dormouse clone`

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use dormouse_container::{CheckpointOptions, Engine, From, Template};
use dormouse_image::{Commit, Store};
use dormouse_model::{Config, ContainerId, Name, RootSource, State};

use crate::bulk::Bulk;
use crate::command::Global;
use crate::{fail, image, layers, output};

/// Make containers that continue from the present state of another
///
/// Each has its own name, ids and addresses, the files of the other as they are at that moment, and
/// its processes with their memory and open files. Published ports stay with the other.
///
/// Several clones of a container with one process share its memory. Pages that a clone writes to
/// become its own, and are charged to its limit from then on.
///
/// With --asleep no process is made: a clone continues from there at the first connection, or by
/// 'wake'.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of clones
    #[arg(long, short = 'n', value_name = "COUNT", default_value_t = 1)]
    count: u32,
    /// Name of the clone; several get -1, -2, ... appended
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Make them asleep: they continue when a client connects
    #[arg(long)]
    asleep: bool,
    /// Let each read all its memory for itself, within its own limit
    #[arg(long, conflicts_with = "asleep")]
    unshared: bool,
    /// A checkpoint of a stopped container, the last unless given
    #[arg(long, value_name = "N")]
    number: Option<u32>,
    /// Name or id
    #[arg(value_name = "CONTAINER")]
    container: String,
}

/// Source of the clones.
struct Saved {
    checkpoint: PathBuf,
    /// The checkpoint was made for this purpose only.
    made: Option<u32>,
    /// The files, as an image.
    image: String,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let id = engine.find(&args.container)?;
    let config = engine.config(&id)?;
    let stem = args.name.unwrap_or_else(|| format!("{}-clone", config.name));
    let saved = saved(&engine, &id, &config, args.number)?;
    let names = names(&stem, args.count)?;
    let made = match args.asleep {
        true => all_asleep(&engine, &config, &saved, names),
        // A single clone has no other to share memory with.
        false => all(&engine, &config, &saved, &names, names.len() > 1 && !args.unshared),
    };
    if let Some(number) = saved.made {
        let removed = engine.remove_checkpoint(&id, number);
        made?;
        removed?;
    } else {
        made?;
    }
    Ok(0)
}

/// Returns the names of the clones.
fn names(stem: &str, count: u32) -> Result<Vec<Name>> {
    let name = |n| if count == 1 { stem.to_owned() } else { format!("{stem}-{n}") };
    (1..=count).map(|n| Ok(name(n).parse()?)).collect()
}

fn all(engine: &Engine, config: &Config, saved: &Saved, names: &[Name], share: bool) -> Result<()> {
    let bulk = Bulk::new("cloning", names.len());
    let mut template = engine.template(config, &saved.checkpoint, share)?;
    if let Some(why) = template.unshared() {
        // Only a note: the clones are made without sharing.
        fail::tell(&anyhow::Error::new(why).context("clones share no memory"));
    }
    for name in names {
        one(engine, config, (saved, &template), name, Vec::new())?;
        bulk.done(1);
    }
    Ok(())
}

fn all_asleep(engine: &Engine, config: &Config, saved: &Saved, names: Vec<Name>) -> Result<()> {
    let bulk = Bulk::new("cloning", names.len());
    let told = |names: Vec<Name>| {
        bulk.done(names.len());
        output::print(names.iter().map(|name| format!("{name}\n")).collect::<String>())
    };
    let mut unborn = engine.unborn(config, root(config, saved)?, &saved.checkpoint)?;
    for name in names {
        let said = format!("cannot make '{name}'");
        told(unborn.make(name, Vec::new()).context(said)?)?;
    }
    told(unborn.publish()?)
}

/// Returns the root of a clone.
fn root(config: &Config, saved: &Saved) -> Result<RootSource> {
    let reference = match &config.spec.root {
        RootSource::Image { reference, .. } => reference.clone(),
        RootSource::Directory(_) => "clone".parse()?,
    };
    Ok(RootSource::Image { reference, id: saved.image.clone() })
}

/// Makes a new container from a checkpoint and files.
fn one(
    engine: &Engine,
    config: &Config,
    (saved, template): (&Saved, &Template),
    name: &Name,
    addresses: Vec<IpAddr>,
) -> Result<()> {
    let root = root(config, saved)?;
    let clone = engine
        .clone_of(config, name.clone(), addresses, root, template)
        .with_context(|| format!("cannot make '{name}'"))?;
    clone.detach();
    output::line(name.as_str())
}

/// Implements `restore --name`: makes a new container from a checkpoint of a stopped one.
pub(crate) fn restore(
    engine: &Engine,
    config: &Config,
    checkpoint: PathBuf,
    name: &str,
    addresses: Vec<IpAddr>,
) -> Result<()> {
    let state = engine.inspect(&config.id)?.state;
    if !matches!(state, State::Created | State::Stopped) {
        bail!("'{}' is {state}: use 'dormouse clone', or stop it first", config.name);
    }
    let template = engine.template(config, &checkpoint, false)?;
    let saved = Saved { checkpoint, made: None, image: keep_files(engine, config)? };
    one(engine, config, (&saved, &template), &name.parse()?, addresses)
}

/// Returns a checkpoint with its files. ORDER: the files are kept while no process runs that could
/// change them.
fn saved(engine: &Engine, id: &ContainerId, config: &Config, number: Option<u32>) -> Result<Saved> {
    let keep_files = |_: &std::path::Path| keep_files(engine, config);
    let state = engine.inspect(id)?.state;
    if state == State::Running {
        if number.is_some() {
            bail!(
                "'{}' is running, and its files are no longer those of a checkpoint: clone it as \
                 it is, without --number",
                config.name
            );
        }
        let options = CheckpointOptions { leave_running: true, ..CheckpointOptions::default() };
        let (made, image) = engine.checkpoint_while(id, &options, keep_files)?;
        return Ok(Saved { checkpoint: made.path, made: made.number, image });
    }
    if state != State::Stopped {
        bail!("'{}' is {state}: only a running or stopped container can be cloned", config.name);
    }
    let which = number.map_or(From::Last, From::Number);
    let checkpoint = engine.checkpoint_path(id, &which)?;
    let image = keep_files(&checkpoint)?;
    Ok(Saved { checkpoint, made: None, image })
}

/// Keeps the files of a container as an image: its own, if it has changed none, or one without a name on top of that.
/// The same files are the same image, so a spare that was made for one fits the next.
fn keep_files(engine: &Engine, config: &Config) -> Result<String> {
    let layers = layers::open(engine, config)?;
    let (base, upper) = (layers.image.as_ref(), layers.own.upper.as_fd());
    let store = engine.images()?;
    if let Some(image) = base
        && !Store::may_have_changes(&layers.lower, upper, &config.ids)?
    {
        return Ok(image.id.clone());
    }
    let commit = Commit { message: Some("clone".into()), undated: true, ..Commit::default() };
    let progress = image::progress(true);
    let made = store.commit(base, &layers.lower, upper, &config.ids, &commit, &*progress)?;
    Ok(made.to_string())
}
