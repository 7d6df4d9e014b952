//! `dormouse internal`: what Dormouse asks of itself.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use dormouse_container::{Idle, Tier, Why};

use crate::command::{Global, whole};
use crate::output;

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
        /// Its id; - to get ready and read it and why from standard input
        id: String,
        /// Why: called, timer
        why: Option<String>,
    },
    /// Make the sockets at which asleep containers are called, and give them to the keeper; reads
    /// their directories from standard input
    Listen,
    /// Put a container to sleep, or have it become drowsy, if it has not run; prints what came of
    /// it
    Sleep {
        /// Its id
        id: String,
        /// How far: drowsy, asleep
        tier: String,
        /// Why: idle, memory
        why: String,
        /// For how long it has not run; without it and the rest it sleeps whatever it does
        #[arg(requires = "worth_ms")]
        quiet_ms: Option<u64>,
        /// The CPU time it had used then
        used_ns: Option<u64>,
        /// From how long on a sleep is worth it
        worth_ms: Option<u64>,
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
        What::Wake { id, .. } if id == "-" => {
            let engine = global.engine_alone()?;
            engine.get_ready();
            let mut told = String::new();
            std::io::stdin().read_line(&mut told).context("cannot read whom to wake")?;
            let mut words = told.split_ascii_whitespace();
            if let Some(id) = words.next() {
                engine.wake(&id.parse()?, Why::of_keeper(words.next()))?;
            }
            Ok(0)
        }
        What::Wake { id, why } => {
            global.engine()?.wake(&id.parse()?, Why::of_keeper(why.as_deref()))?;
            Ok(0)
        }
        What::Sleep { id, tier, why, quiet_ms, used_ns, worth_ms } => {
            let (tier, why): (Tier, _) = (tier.parse()?, Why::of_daemon(&why));
            let times = quiet_ms.zip(worth_ms).zip(used_ns);
            let idle = times.map(|((quiet, worth), used_ns)| {
                let [quiet, worth] = [quiet, worth].map(Duration::from_millis);
                Idle { quiet, used_ns, worth }
            });
            let fell = global.engine()?.fall_asleep(&id.parse()?, idle.as_ref(), tier, why);
            output::json_line(&fell)?;
            Ok(0)
        }
        What::Listen => {
            let asked = std::io::stdin().lines().map_while(Result::ok);
            global.engine_alone()?.listen_for(asked, |line| drop(output::line(line)))?;
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
