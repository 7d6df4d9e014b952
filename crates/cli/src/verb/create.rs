//! `dormouse create`

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;

use anyhow::{Context, Result};
use dormouse_container::{Create, Created, Engine};
use dormouse_image::Image;
use dormouse_model::Config;

use crate::command::Global;
use crate::create::{CreateArgs, Here, with_name};
use crate::option::env;
use crate::{fail, image, output, umask};

/// Create a container without starting it
#[derive(Debug, clap::Args)]
#[command(override_usage = "dormouse create [OPTIONS] IMAGE [COMMAND]...")]
pub(crate) struct Args {
    #[command(flatten)]
    create: CreateArgs,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let image = image(&engine, &args.create)?;
    let created = create(&engine, &args.create, image, |engine, create| engine.create(create))?;
    output::line(created.config.id.as_str())?;
    Ok(0)
}

/// Finds the requested image; none with `--rootfs`.
pub(crate) fn image(engine: &Engine, args: &CreateArgs) -> Result<Option<Image>> {
    let name = args.image()?;
    name.map(|name| image::resolve(engine, name, &args.pull, args.quiet)).transpose()
}

/// Creates a container from the options and the image.
pub(crate) fn create(
    engine: &Engine,
    args: &CreateArgs,
    image: Option<Image>,
    make: impl Fn(&Engine, Create) -> dormouse_container::Result<Created>,
) -> Result<Created> {
    let cwd = std::env::current_dir().context("cannot find the working directory")?;
    let here = Here {
        cwd: &cwd,
        env: &env::host,
        env_files: args.process.read_env_files()?,
        default_volume: &|| Ok(engine.default_volume()?),
        log_driver: &|| Ok(engine.log_driver()?),
        pids: &|| Ok(engine.default_pids()?),
    };
    let id_file = match &args.cidfile {
        None => None,
        Some(path) => {
            let step = || format!("cannot write the id to '{}'", path.display());
            let file = fs::File::options().write(true).create_new(true).mode(0o600).open(path);
            let file = file.with_context(step)?;
            umask::apply(&file).with_context(step)?;
            Some(file)
        }
    };
    let created = with_name(args, || args.merge(image.clone(), &here), |c| make(engine, c));
    let created = created.inspect_err(|_| forget_cidfile(args))?;
    if let Some(mut file) = id_file {
        file.write_all(created.config.id.as_str().as_bytes()).context("cannot write the id")?;
    }
    say_not_enforced(engine, &created.config)?;
    Ok(created)
}

/// Says on stderr which limits are not enforced.
pub(crate) fn say_not_enforced(engine: &Engine, config: &Config) -> Result<()> {
    for text in engine.not_enforced(config)? {
        fail::note(&text);
    }
    Ok(())
}

/// Removes the file of `--cidfile`, whose container does not exist any more.
pub(crate) fn forget_cidfile(args: &CreateArgs) {
    if let Some(path) = &args.cidfile {
        let _ = fs::remove_file(path); // the first error is returned
    }
}
