//! `dormouse internal`: calls of Dormouse by its own processes.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use dormouse_container::{Idle, Outcome, Reason, Request};
use rustix::net::SendFlags;

use crate::command::{Global, whole};
use crate::{output, runner};

/// Calls of Dormouse by its own processes; not for operators
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Clean up after containers that ended without a waiting command; reads their ids from standard
    /// input, a socket, and answers there
    Settle {
        /// The id of one container
        id: Option<String>,
    },
    /// Wake containers after an event; reads their ids and the reason (called, timer) from standard
    /// input, a socket, and answers there
    Wake,
    /// Make the listening sockets of asleep containers, and give them to the keeper; reads their
    /// directories from standard input
    Listen,
    /// Put containers to sleep, make them drowsy or push their memory out, if they have not run;
    /// reads a line for each from standard input and prints the outcome. A line has the id, the
    /// request (drowsy, asleep, pages-out, cool) and the reason (idle, memory). Unless the container is to
    /// sleep in any case, three numbers follow: for how many ms it has not run, its CPU time in ns
    /// by then, and the shortest sleep in ms that is worth it
    Sleep,
    /// Put connections back that a checkpoint has changed, if its process is killed; reads them from standard input, a
    /// socket
    Rescue,
    /// Make parts of containers ahead while containers come and go, and give them to commands that start containers;
    /// exits at the end of standard input
    Nursery,
    /// Execute commands for their callers; receives their connections over standard input, a socket, and exits at
    /// its end
    Runner,
    /// Remove the objects that containers share if none runs; called by the keeper at its end
    Tidy,
    /// Remove everything that a reboot would; refused while a container runs
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
        // The keeper of an older program.
        What::Settle { id: Some(id) } => {
            let engine = global.engine()?;
            engine.settle(&id.parse()?, || {})?;
            Ok(0)
        }
        What::Settle { id: None } => {
            let engine = global.engine()?;
            for id in std::io::stdin().lines() {
                let id = id.context("cannot read container id")?;
                // The container is settled, and the keeper has others settled meanwhile. If it was killed, the restart
                // takes place all the same.
                engine.settle(&id.parse()?, || drop(answer(b"~")))?;
                answer(b"\n")?;
            }
            Ok(0)
        }
        What::Wake => {
            let engine = global.engine_alone()?;
            engine.get_ready();
            let mut lines = std::io::stdin().lines();
            while let Some(line) = lines.next().transpose().context("cannot read container id")? {
                let mut words = line.split_ascii_whitespace();
                let id = words.next().unwrap_or_default();
                let is_awake =
                    engine.wake_for_event(&id.parse()?, Reason::of_keeper(words.next()))?;
                answer(if is_awake { b"\n" } else { b"." })?;
                engine.prepare_next();
            }
            Ok(0)
        }
        What::Sleep => {
            let engine = global.engine()?;
            for line in std::io::stdin().lines() {
                let line = line.context("cannot read request")?;
                let words: Vec<&str> = line.split_ascii_whitespace().collect();
                let [id, asked, why, numbers @ ..] = &words[..] else {
                    bail!("request '{line}' is incomplete")
                };
                let idle = match numbers {
                    [quiet, used, worth] => Some(Idle {
                        quiet: Duration::from_millis(quiet.parse()?),
                        used_ns: used.parse()?,
                        worth: Duration::from_millis(worth.parse()?),
                    }),
                    _ => None,
                };
                let (asked, why): (Request, _) = (asked.parse()?, Reason::of_daemon(why));
                let id = id.parse()?;
                let fell = engine.fall_asleep(&id, idle.as_ref(), asked, why);
                output::json_line(&fell)?;
                // ORDER: the daemon has the outcome, and waits for nothing more.
                if let (Outcome::Asleep { .. }, Some(idle), Reason::Idle) = (fell, idle, why) {
                    engine.keep_if_called_often(&id, &idle);
                }
            }
            Ok(0)
        }
        What::Listen => {
            let asked = std::io::stdin().lines().map_while(Result::ok);
            global
                .engine_alone()?
                .listen_for(asked, |line| drop(output::print(format!("{line}\n"))))?;
            Ok(0)
        }
        What::Rescue => {
            let socket = std::io::stdin().as_fd().try_clone_to_owned();
            let socket = socket.context("cannot duplicate a descriptor")?;
            dormouse_checkpoint::save::rescue_connections(socket)?;
            Ok(0)
        }
        What::Nursery => {
            global.engine()?.nurse(rustix::stdio::stdin())?;
            Ok(0)
        }
        What::Runner => {
            runner::run()?;
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

/// Answers the keeper, whose socket is the standard input.
fn answer(answer: &[u8]) -> Result<()> {
    let (keeper, flags) = (rustix::stdio::stdin(), SendFlags::NOSIGNAL);
    rustix::net::send(keeper, answer, flags).map(drop).context("cannot answer the keeper")
}
