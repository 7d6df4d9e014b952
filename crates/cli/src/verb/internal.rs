//! `dormouse internal`: what Dormouse asks of itself.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::command::{Global, whole};

/// What Dormouse asks of itself; not for people
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Clean up after a container that ended while nobody waited for it
    Settle {
        /// Its id
        id: String,
    },
    /// Wake a container that somebody calls
    Wake {
        /// Its id; - to get ready and read it from standard input
        id: String,
    },
    /// Make the sockets at which an asleep container is called, and give them to the keeper
    Listen {
        /// Its id
        id: String,
    },
    /// Take away what containers share if none runs; the keeper asks for it at its end
    Tidy,
    /// Give back everything that a reboot would, which is refused while a container runs
    #[command(alias = "dismantle")]
    Reset,
    /// Write the man pages into a directory
    Man {
        /// The directory
        dir: PathBuf,
    },
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    match args.what {
        What::Settle { id } => {
            let engine = global.engine()?;
            engine.settle(&id.parse()?)?;
            Ok(0)
        }
        What::Wake { id } if id == "-" => {
            let engine = global.engine_alone()?;
            engine.get_ready();
            let mut id = String::new();
            std::io::stdin().read_line(&mut id).context("cannot read whom to wake")?;
            if !id.is_empty() {
                engine.wake(&id.trim().parse()?)?;
            }
            Ok(0)
        }
        What::Wake { id } => {
            global.engine()?.wake(&id.parse()?)?;
            Ok(0)
        }
        What::Listen { id } => {
            global.engine_alone()?.listen_for(&id.parse()?)?;
            Ok(0)
        }
        What::Tidy => {
            global.engine()?.tidy()?;
            Ok(0)
        }
        What::Reset => {
            global.engine()?.dismantle()?;
            Ok(0)
        }
        What::Man { dir } => {
            std::fs::create_dir_all(&dir)
                .and_then(|()| clap_mangen::generate_to(whole(), &dir))
                .with_context(|| format!("cannot write man pages to '{}'", dir.display()))?;
            Ok(0)
        }
    }
}
