//! `dormouse restore`

use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::{Result, bail};
use dormouse_container::From;

use super::clone;
use crate::command::Global;
use crate::output;

/// Restore the processes of a stopped container from a checkpoint
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of the checkpoint, the last unless given
    #[arg(long, short, value_name = "N")]
    number: Option<u32>,
    /// A checkpoint made with `--to`
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
    /// Make a new container of this name, which gets the files as they are now
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Address of the new container, IPv4 or IPv6
    #[arg(long, alias = "ip6", value_name = "ADDRESS", requires = "name")]
    ip: Vec<IpAddr>,
    /// Fill large memory while it runs already, touched pages first (userfaultfd(2))
    #[arg(long, conflicts_with = "name")]
    lazy: bool,
    /// Name or id
    #[arg(value_name = "CONTAINER")]
    container: String,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let from = match (args.number, args.from) {
        (None, None) => From::Last,
        (Some(number), None) => From::Number(number),
        (None, Some(path)) if path.is_file() => bail!(
            "'{}' is an archive: make a container from it with 'dormouse checkpoint import'",
            path.display()
        ),
        (None, Some(dir)) => From::Directory(dir),
        _ => bail!("give either --number or --from, not both"),
    };
    let id = engine.find(&args.container)?;
    match args.name {
        Some(name) => {
            let checkpoint = engine.checkpoint_path(&id, &from)?;
            clone::restore(&engine, &engine.config(&id)?, checkpoint, &name, args.ip)?;
        }
        None => {
            engine.restore(&id, &from, args.lazy)?.detach();
            output::line(&args.container)?;
        }
    }
    Ok(0)
}
