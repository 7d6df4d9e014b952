//! `dormouse load`

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::command::Global;
use crate::{image, output, terminal};

/// Load images from an archive of 'save', docker or podman
///
/// The archive is an OCI archive or a docker archive, also compressed, or a directory with an OCI layout.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The archive; standard input by default
    #[arg(long, short, value_name = "FILE")]
    input: Option<PathBuf>,
    /// Show no progress
    #[arg(long, short)]
    quiet: bool,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let store = engine.images()?;
    let progress = image::progress(args.quiet);
    let ids = match &args.input {
        Some(path) => {
            let ids = store.import_archive(path, &*progress);
            ids.with_context(|| format!("cannot load '{}'", path.display()))?
        }
        None => {
            if terminal::is_terminal(rustix::stdio::stdin()) {
                bail!("standard input is a terminal: name the archive with --input FILE");
            }
            let ids = store.import_stream(&mut std::io::stdin().lock(), &*progress);
            ids.context("cannot load standard input")?
        }
    };
    for id in ids {
        let image = store.find(&id)?;
        let mut names: Vec<String> = image.names.iter().map(ToString::to_string).collect();
        engine.record(dormouse_api::EventKind::Import, &id, &names.join(" "), &[]);
        if names.is_empty() {
            names.push(format!("sha256:{id}"));
        }
        for name in names {
            output::line(&format!("Loaded image: {name}"))?;
        }
    }
    Ok(0)
}
