//! `dormouse checkpoint`, and its verbs for existing checkpoints.

mod archive;
mod diff;
mod seal;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use dormouse_api::rfc3339;
use dormouse_container::{CheckpointOptions, Engine, From, NewCheckpoint, Trial};
use dormouse_parcel::Reader;
use dormouse_record::{Records, Thing};
use serde_json::json;

use crate::command::Global;
use crate::output::{self, Table};

/// Save the processes of a running container, and stop it
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    /// Let the container continue
    #[arg(long)]
    leave_running: bool,
    /// Do not restore the checkpoint for a trial before the processes end
    #[arg(long)]
    unproven: bool,
    /// Write to PATH, a new directory, instead of the container's own checkpoints
    #[arg(long, value_name = "PATH")]
    to: Option<PathBuf>,
    /// Write one archive to PATH, with the container's files, for import elsewhere
    #[arg(long, requires = "to")]
    archive: bool,
    /// Compress the archive
    #[arg(long, requires = "archive")]
    compress: bool,
    #[command(flatten)]
    seal: seal::SealArgs,
    /// Print durations and sizes, as JSON
    #[arg(long)]
    json: bool,
    /// Name or id
    #[arg(value_name = "CONTAINER")]
    name: Option<String>,
    #[command(subcommand)]
    of: Option<Of>,
}

#[derive(Debug, clap::Subcommand)]
enum Of {
    /// List checkpoints, of all containers unless one is named
    Ls {
        /// Name or id
        #[arg(value_name = "CONTAINER")]
        name: Option<String>,
    },
    /// Print the contents of a checkpoint
    Inspect(Which),
    /// Compare the contents of a checkpoint with its checksums
    Verify(Which),
    /// Show the differences between two checkpoints of a container
    Diff(diff::Args),
    /// Write a checkpoint of a stopped container, and its files, as an archive
    Export(archive::Export),
    /// Make a container from an archive; `restore` restores its processes
    Import(Box<archive::Import>),
    /// Remove a checkpoint
    Rm {
        /// Name or id
        #[arg(value_name = "CONTAINER")]
        name: String,
        /// Numbers of checkpoints
        #[arg(required = true, value_name = "N")]
        numbers: Vec<u32>,
    },
}

#[derive(Debug, clap::Args)]
struct Which {
    /// Everything, as JSON
    #[arg(long)]
    json: bool,
    /// A checkpoint made with `--to`
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
    /// Name or id
    #[arg(value_name = "CONTAINER")]
    name: Option<String>,
    /// Number of the checkpoint, the last unless given
    #[arg(value_name = "N")]
    number: Option<u32>,
}

impl Which {
    fn path(&self, engine: &Engine) -> Result<PathBuf> {
        match (&self.from, &self.name) {
            (Some(dir), None) => Ok(dir.clone()),
            (None, Some(name)) => {
                let which = self.number.map_or(From::Last, From::Number);
                Ok(engine.checkpoint_path(&engine.find(name)?, &which)?)
            }
            _ => bail!("give either a container or --from"),
        }
    }
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    match (args.of, args.name) {
        (Some(Of::Ls { name }), _) => list(&engine, name.as_deref())?,
        (Some(Of::Inspect(which)), _) => inspect(&engine, &which)?,
        (Some(Of::Verify(which)), _) => {
            Reader::open(&which.path(&engine)?)?.verify()?;
            output::line("whole")?;
        }
        (Some(Of::Diff(args)), _) => return diff::run(&engine, &args),
        (Some(Of::Export(args)), _) => archive::export(&engine, &args)?,
        (Some(Of::Import(args)), _) => archive::import(&engine, &args)?,
        (Some(Of::Rm { name, numbers }), _) => {
            let id = engine.find(&name)?;
            for number in numbers {
                engine.remove_checkpoint(&id, number)?;
            }
        }
        (None, Some(name)) => {
            let id = engine.find(&name)?;
            let (leave_running, to) = (args.leave_running, args.to);
            let trial = if args.unproven { Trial::Skipped } else { Trial::Made };
            let seal = args.seal.read()?;
            if seal.is_some() && !args.archive {
                bail!("only an archive is encrypted: give --archive --to FILE as well");
            }
            let made = match to {
                Some(file) if args.archive => {
                    let options = CheckpointOptions { leave_running, trial, to: None };
                    archive::save(&engine, &id, &options, args.compress, seal.as_ref(), file)?
                }
                to => engine.checkpoint(&id, &CheckpointOptions { leave_running, trial, to })?,
            };
            tell(&made, args.json)?;
        }
        (None, None) => bail!("no container was given"),
    }
    Ok(0)
}

fn tell(made: &NewCheckpoint, as_json: bool) -> Result<()> {
    if as_json {
        let us = |d: Duration| d.as_micros() as u64;
        let figures = made.figures;
        return output::json_line(&json!({
            "path": made.path, "number": made.number, "processes": figures.processes,
            "threads": figures.threads, "bytes": figures.bytes,
            "new_bytes": figures.new_bytes,
            "ahead_us": us(figures.ahead), "stop_us": us(figures.stop),
            "read_us": us(figures.read), "pause_us": us(figures.pause()),
            "publish_us": us(figures.publish), "proof_us": us(figures.proof),
        }));
    }
    match made.number {
        Some(number) => output::line(&number.to_string()),
        None => output::line(&made.path.display().to_string()),
    }
}

fn list(engine: &Engine, name: Option<&str>) -> Result<()> {
    let ids = match name {
        Some(name) => vec![engine.find(name)?],
        None => engine.list()?.into_iter().map(|d| d.id).collect(),
    };
    let mut table = Table::new(["CONTAINER", "N", "CREATED", "PROCESSES", "SIZE", "STATE"]);
    for id in ids {
        let config = engine.config(&id)?;
        for one in engine.checkpoints(&id)? {
            let created = one.created_unix_ms.map_or_else(String::new, rfc3339);
            let state = one.damage.unwrap_or_else(|| "whole".to_owned());
            table.row([
                config.name.to_string(),
                one.number.to_string(),
                created,
                one.processes.to_string(),
                output::bytes(one.bytes),
                state,
            ]);
        }
    }
    table.print()
}

/// LIMIT: characters of one text of an archive in an output line.
const TEXT_MAX: usize = 128;

fn inspect(engine: &Engine, which: &Which) -> Result<()> {
    let reader = Reader::open(&which.path(engine)?)?;
    let records = reader.records();
    if which.json {
        return output::json(records);
    }
    let about = &records.about;
    let text = |text: &str| output::cut(text, TEXT_MAX);
    output::line(&format!(
        "container {} ({}), Linux {}, {}",
        text(&about.name),
        text(&about.container),
        text(&about.kernel),
        rfc3339(about.created_unix_ms)
    ))?;
    output::line(&format!("{} of memory", output::bytes(records.pages.bytes)))?;
    let mut table = Table::new(["PID", "PPID", "PGID", "SID", "THREADS", "MEMORY", "NAME"]);
    for process in &records.processes {
        let memory = process.memory.and_then(|m| records.memories.get(m));
        let pages = memory.iter().flat_map(|m| &m.areas).flat_map(|a| &a.runs).map(|r| r.pages);
        let ended = process.ended.is_some();
        let name = if ended { format!("{} (ended)", process.name) } else { process.name.clone() };
        table.row([
            process.pid.to_string(),
            process.parent.to_string(),
            process.group.to_string(),
            process.session.to_string(),
            process.threads.len().to_string(),
            output::bytes(pages.sum::<u64>() * 4096),
            name,
        ]);
    }
    table.print()?;
    descriptors(records)
}

fn descriptors(records: &Records) -> Result<()> {
    let mut rows = Table::new(["PID", "FD", "OBJECT", "KIND", "WHAT"]);
    for table in records.tables() {
        for descriptor in table.descriptors {
            let thing = records.objects.get(descriptor.object).map(|o| &o.thing);
            let what = match thing {
                Some(Thing::File(file)) => file.path.clone(),
                Some(Thing::ProcessFile(file)) => file.whole_path(),
                Some(Thing::Device(device)) => format!("/dev/{}", device.name),
                Some(Thing::External(external)) => external.name.clone(),
                Some(Thing::Listener(listener)) => listener.address.to_string(),
                _ => String::new(),
            };
            rows.row([
                table.task.to_string(),
                descriptor.number.to_string(),
                descriptor.object.to_string(),
                thing.map_or("", Thing::name).to_owned(),
                output::printable(&what).into_owned(),
            ]);
        }
    }
    rows.print()
}
