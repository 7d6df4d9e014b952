//! `dormouse clone`

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use dormouse_container::{CheckpointOptions, Engine, From, Template};
use dormouse_image::Commit;
use dormouse_model::{Config, ContainerId, Name, RootSource, State};

use crate::bulk::Bulk;
use crate::command::Global;
use crate::{fail, image, layers, output};

/// Make containers that go on from where another is
///
/// Each has its own name, ids and addresses, the files of the other as they are at that moment, and
/// its processes with their memory and open files. Ports of the host stay with the other.
///
/// Several of a container with one process share its memory: what a clone writes to becomes its own, and
/// is charged to its limit from then on.
///
/// With --asleep no process is made: whoever calls one, or 'wake', has it go on from there.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// How many
    #[arg(long, short = 'n', value_name = "COUNT", default_value_t = 1)]
    count: u32,
    /// What to call it; several get -1, -2, ... behind it
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Have them sleep until somebody calls
    #[arg(long)]
    asleep: bool,
    /// Have each read all its memory for itself, within its own limit
    #[arg(long, conflicts_with = "asleep")]
    unshared: bool,
    /// A checkpoint of a stopped container, the last unless given
    #[arg(long, value_name = "N")]
    number: Option<u32>,
    /// Name or id
    #[arg(value_name = "CONTAINER")]
    container: String,
}

/// What clones are made from.
struct Saved {
    checkpoint: PathBuf,
    /// It was made for this, and nobody else wants it.
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
        // One alone would share it with nobody.
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

/// What clones are called.
fn names(stem: &str, count: u32) -> Result<Vec<Name>> {
    let name = |n| if count == 1 { stem.to_owned() } else { format!("{stem}-{n}") };
    (1..=count).map(|n| Ok(name(n).parse()?)).collect()
}

fn all(engine: &Engine, config: &Config, saved: &Saved, names: &[Name], share: bool) -> Result<()> {
    let bulk = Bulk::new("cloning", names.len());
    let mut template = engine.template(config, &saved.checkpoint, share)?;
    if let Some(why) = template.unshared() {
        // They come all the same.
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

/// The root of a clone.
fn root(config: &Config, saved: &Saved) -> Result<RootSource> {
    let reference = match &config.root {
        RootSource::Image { reference, .. } => reference.clone(),
        RootSource::Directory(_) => "clone".parse()?,
    };
    Ok(RootSource::Image { reference, id: saved.image.clone() })
}

/// A new container from a checkpoint and files.
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

/// What `restore --name` does: a new container from a checkpoint of one that has stopped.
pub(crate) fn restore(
    engine: &Engine,
    config: &Config,
    checkpoint: PathBuf,
    name: &str,
    addresses: Vec<IpAddr>,
) -> Result<()> {
    let state = engine.inspect(&config.id)?.state;
    if !matches!(state, State::Created | State::Stopped) {
        bail!("'{}' is {state}: clone it as it is, or stop it first", config.name);
    }
    let template = engine.template(config, &checkpoint, false)?;
    let saved = Saved { checkpoint, made: None, image: keep_files(engine, config)? };
    one(engine, config, (&saved, &template), &name.parse()?, addresses)
}

/// A checkpoint and the files that belong to it. ORDER: the files are kept while nothing runs that
/// could change them.
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
        let options = CheckpointOptions { leave_running: true, to: None };
        let (made, image) = engine.checkpoint_while(id, &options, keep_files)?;
        return Ok(Saved { checkpoint: made.path, made: made.number, image });
    }
    if state != State::Stopped {
        bail!("'{}' is {state}: only what runs or has stopped is cloned", config.name);
    }
    let which = number.map_or(From::Last, From::Number);
    let checkpoint = engine.checkpoint_path(id, &which)?;
    let image = keep_files(&checkpoint)?;
    Ok(Saved { checkpoint, made: None, image })
}

/// What a container has changed, on top of its image, as an image without a name.
fn keep_files(engine: &Engine, config: &Config) -> Result<String> {
    let layers = layers::open(engine, config)?;
    let commit =
        Commit { name: None, author: None, message: Some("clone".into()), changes: Vec::new() };
    let (base, upper) = (layers.image.as_ref(), layers.upper.as_fd());
    let progress = image::progress(true);
    let store = engine.images()?;
    let made = store.commit(base, &layers.lower, upper, &config.ids, &commit, &*progress)?;
    Ok(made.to_string())
}
