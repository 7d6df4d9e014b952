//! `dormouse clone`

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use dormouse_container::{CheckpointOptions, Engine, From};
use dormouse_image::Commit;
use dormouse_model::{Config, ContainerId, Name, RootSource, State};

use crate::bulk::Bulk;
use crate::command::Global;
use crate::{image, layers, output};

/// Make containers that go on from where another is
///
/// Each has its own name, ids and addresses, the files of the other as they are at that moment, and
/// its processes with their memory and open files. Ports of the host stay with the other.
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
    /// A checkpoint of a stopped container, the last unless given
    #[arg(long, value_name = "N")]
    number: Option<u32>,
    /// Name or id
    #[arg(value_name = "CONTAINER")]
    container: String,
}

/// What clones are made from.
struct Template {
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
    let template = template(&engine, &id, &config, args.number)?;
    let names = names(&stem, args.count)?;
    let made = match args.asleep {
        true => all_asleep(&engine, &config, &template, names),
        false => all(&engine, &config, &template, &names),
    };
    if let Some(number) = template.made {
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

fn all(engine: &Engine, config: &Config, template: &Template, names: &[Name]) -> Result<()> {
    let bulk = Bulk::new("cloning", names.len());
    for name in names {
        one(engine, config, template, name, Vec::new())?;
        bulk.done(1);
    }
    Ok(())
}

fn all_asleep(
    engine: &Engine,
    config: &Config,
    template: &Template,
    names: Vec<Name>,
) -> Result<()> {
    let bulk = Bulk::new("cloning", names.len());
    let told = |names: Vec<Name>| {
        bulk.done(names.len());
        output::print(names.iter().map(|name| format!("{name}\n")).collect::<String>())
    };
    let mut unborn = engine.unborn(config, root(config, template)?, &template.checkpoint)?;
    for name in names {
        let said = format!("cannot make '{name}'");
        told(unborn.make(name, Vec::new()).context(said)?)?;
    }
    told(unborn.publish()?)
}

/// The root of a clone.
fn root(config: &Config, template: &Template) -> Result<RootSource> {
    let reference = match &config.root {
        RootSource::Image { reference, .. } => reference.clone(),
        RootSource::Directory(_) => "clone".parse()?,
    };
    Ok(RootSource::Image { reference, id: template.image.clone() })
}

/// A new container from a checkpoint and files.
fn one(
    engine: &Engine,
    config: &Config,
    template: &Template,
    name: &Name,
    addresses: Vec<IpAddr>,
) -> Result<()> {
    let root = root(config, template)?;
    let clone = engine
        .clone_of(config, name.clone(), addresses, root, &template.checkpoint)
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
    let template = Template { checkpoint, made: None, image: keep_files(engine, config)? };
    one(engine, config, &template, &name.parse()?, addresses)
}

/// A checkpoint and the files that belong to it. ORDER: the files are kept while nothing runs that
/// could change them.
fn template(
    engine: &Engine,
    id: &ContainerId,
    config: &Config,
    number: Option<u32>,
) -> Result<Template> {
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
        return Ok(Template { checkpoint: made.path, made: made.number, image });
    }
    if state != State::Stopped {
        bail!("'{}' is {state}: only what runs or has stopped is cloned", config.name);
    }
    let which = number.map_or(From::Last, From::Number);
    let checkpoint = engine.checkpoint_path(id, &which)?;
    let image = keep_files(&checkpoint)?;
    Ok(Template { checkpoint, made: None, image })
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
