//! `dormouse cp`

use std::io;
use std::path::Path;

use anyhow::{Context, Result, bail};
use dormouse_container::{Engine, Root};
use rustix::fs::Mode;

use crate::command::Global;
use crate::copy::{self, Owner, Place};
use crate::session::DIRECTORY;
use crate::sink;

/// Copy files between a container and the host
///
/// As cp does; a directory followed by "/." stands for its contents. "-" in place of a host path is
/// a tar on standard input or output. Copies belong to the container's root, or on the host to the
/// calling user, unless --archive keeps their ids. A copy on the host is never set-user-id.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Keep the ids of users and groups
    #[arg(long, short)]
    archive: bool,
    /// CONTAINER:PATH, PATH or -
    #[arg(value_name = "SOURCE")]
    from: String,
    /// CONTAINER:PATH, PATH or -
    #[arg(value_name = "DESTINATION")]
    to: String,
}

/// One side, as given.
#[derive(Debug, PartialEq, Eq)]
enum Side<'a> {
    Container(&'a str, &'a str),
    Host(&'a str),
    Stream,
}

impl<'a> Side<'a> {
    /// Reads one side. A path of the host begins with `/` or `.`, or has no colon.
    fn read(text: &'a str) -> Self {
        match text.split_once(':') {
            _ if text == "-" => Self::Stream,
            Some((name, path)) if !text.starts_with(['/', '.']) && !name.is_empty() => {
                Self::Container(name, if path.is_empty() { "/" } else { path })
            }
            _ => Self::Host(text),
        }
    }
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let keep = args.archive;
    match (Side::read(&args.from), Side::read(&args.to)) {
        (Side::Container(name, path), Side::Host(host)) => {
            let (inside, ids) = inside(&engine, name, path)?;
            copy::copy(&inside, &outside(host)?, Owner::Host { ids, keep })?;
        }
        (Side::Host(host), Side::Container(name, path)) => {
            let (inside, ids) = inside(&engine, name, path)?;
            copy::copy(&outside(host)?, &inside, Owner::Container { ids, keep })?;
        }
        (Side::Container(name, path), Side::Stream) => {
            let (inside, ids) = inside(&engine, name, path)?;
            let owner = Owner::Host { ids, keep: true };
            sink::write(None, sink::Holds::Files, |out| copy::to_tar(&inside, owner, out))?;
        }
        (Side::Stream, Side::Container(name, path)) => {
            let (inside, ids) = inside(&engine, name, path)?;
            let input = io::BufReader::with_capacity(64 << 10, io::stdin().lock());
            copy::from_tar(&inside, Owner::Container { ids, keep: true }, input)?;
        }
        _ => bail!("one side must be CONTAINER:PATH, the other a path of the host or -"),
    }
    Ok(0)
}

fn inside(engine: &Engine, name: &str, path: &str) -> Result<(Place, dormouse_model::IdMap)> {
    let Root { fd, ids, .. } = engine.root(&engine.find(name)?)?;
    Ok((Place { root: fd, path: Path::new("/").join(path) }, ids))
}

fn outside(path: &str) -> Result<Place> {
    let root = rustix::fs::open("/", DIRECTORY, Mode::empty()).context("cannot open /")?;
    let cwd = std::env::current_dir().context("cannot find the working directory")?;
    // Not `Path::join`, which would drop a trailing "/.", and that has a meaning here.
    let path =
        if path.starts_with('/') { path.into() } else { format!("{}/{path}", cwd.display()) };
    Ok(Place { root, path: path.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_side_is_container_host_or_stream() {
        assert_eq!(Side::read("web:/etc"), Side::Container("web", "/etc"));
        assert_eq!(Side::read("web:"), Side::Container("web", "/"));
        assert_eq!(Side::read("./a:b"), Side::Host("./a:b"));
        assert_eq!(Side::read("/a:b"), Side::Host("/a:b"));
        assert_eq!(Side::read(":b"), Side::Host(":b"));
        assert_eq!(Side::read("-"), Side::Stream);
    }
}
