//! `dormouse rm`

use std::time::Duration;

use anyhow::{Context, Result};
use dormouse_container::{Engine, Error};
use dormouse_model::ContainerId;

use crate::command::Global;
use crate::option::stop::stop_timeout;
use crate::target::Targets;
use crate::{fail, output};

/// Remove containers
///
/// The exit code is 1 if there is no such container and 2 if one is running.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Kill running ones; missing containers are no error
    #[arg(long, short)]
    force: bool,
    /// With --force, seconds in which running ones may stop before they are killed
    #[arg(long, short, value_name = "SECONDS", default_value = "0", requires = "force")]
    time: String,
    /// Also remove anonymous volumes
    #[arg(long, short)]
    volumes: bool,
    /// Missing containers are no error
    #[arg(long, short)]
    ignore: bool,
    #[command(flatten)]
    targets: Targets,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let known = |e: Error| match e {
        Error::NoContainer(_) => fail::exit(1, e.to_string()),
        Error::State { .. } => fail::exit(2, e.to_string()),
        e => e.into(),
    };
    let seconds = stop_timeout(&args.time)?;
    let remove = |engine: &Engine, id: &ContainerId| {
        if seconds > 0 {
            match engine.stop(id, Some(Duration::from_secs(seconds.into()))) {
                Err(Error::State { .. }) => {} // it has no process
                other => other?,
            }
        }
        engine.remove(id, args.force, args.volumes)
    };
    if args.targets.all {
        return args.targets.each(global, |_| true, |engine, id| remove(engine, id).map_err(known));
    }
    let engine = global.engine()?;
    anyhow::ensure!(!args.targets.names.is_empty(), "no container was given: name some, or --all");
    Ok(fail::for_each(&args.targets.names, |name| {
        let removed = engine.find(name).and_then(|id| remove(&engine, &id));
        match removed {
            Ok(()) => output::line(name),
            Err(Error::NoContainer(_)) if args.force || args.ignore => Ok(()),
            Err(e) => Err(known(e)).context("cannot remove"),
        }
    }))
}
