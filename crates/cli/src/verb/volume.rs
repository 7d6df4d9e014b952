//! `dormouse volume`

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use dormouse_container::{Engine, Error, Volume};
use dormouse_model::Name;

use crate::command::Global;
use crate::format::{Format, Headings};
use crate::option::{key_value, label};
use crate::output::{self, Table};
use crate::{compatible, fail, name};

/// List, make and remove named volumes
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    of: Of,
}

#[derive(Debug, clap::Subcommand)]
enum Of {
    /// Make an empty volume and print its name
    ///
    /// The first container that mounts it copies the image's files at that path into it, with their
    /// owners and modes, unless the volume has files already or is mounted with the option nocopy.
    Create {
        /// Add a label
        #[arg(long, short, value_name = "KEY=VALUE")]
        label: Vec<String>,
        /// Name of the volume; a random one by default
        name: Option<String>,
    },
    /// List volumes
    #[command(alias = "list")]
    Ls {
        /// Print names only
        #[arg(long, short)]
        quiet: bool,
        /// Only matching volumes: name=TEXT, label=KEY[=VALUE], dangling=BOOL (used by no container)
        #[arg(long, short, value_name = "KEY=VALUE")]
        filter: Vec<String>,
        /// json, a Go template, or 'table' and a template
        #[arg(long, value_name = "FORMAT")]
        format: Option<String>,
        /// Print without headings
        #[arg(long, short)]
        noheading: bool,
    },
    /// Show everything about volumes, as JSON
    Inspect {
        /// json, or a Go template
        #[arg(long, short, value_name = "FORMAT")]
        format: Option<String>,
        /// All volumes
        #[arg(long, short)]
        all: bool,
        /// Names
        #[arg(value_name = "VOLUME")]
        names: Vec<String>,
    },
    /// Test whether a volume exists: the exit code is 0 or 1
    Exists {
        /// Name
        #[arg(value_name = "VOLUME")]
        name: String,
    },
    /// Remove volumes
    ///
    /// The exit code is 1 if there is no such volume and 2 if a container uses it.
    #[command(alias = "remove")]
    Rm {
        /// Remove the containers that use them as well; missing volumes are no error
        #[arg(long, short)]
        force: bool,
        /// All volumes
        #[arg(long, short)]
        all: bool,
        /// Names
        #[arg(value_name = "VOLUME")]
        names: Vec<String>,
    },
    /// Remove all volumes that no container uses
    Prune {
        /// Accepted for scripts: there is no question
        #[arg(long, short)]
        force: bool,
    },
}

const HEADINGS: &Headings = &[
    ("Name", "VOLUME NAME"),
    ("Driver", "DRIVER"),
    ("Mountpoint", "MOUNTPOINT"),
    ("CreatedAt", "CREATED AT"),
    ("Labels", "LABELS"),
    ("Scope", "SCOPE"),
    ("Options", "OPTIONS"),
    ("UsedBy", "USED BY"),
    ("NeedsCopyUp", "NEEDS COPY UP"),
];

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    match args.of {
        Of::Create { label: labels, name } => {
            let labels: BTreeMap<String, String> =
                labels.iter().map(|text| label(text)).collect::<Result<_, _>>()?;
            let name = name.map_or_else(name::volume, |name| Ok(name.parse()?))?;
            engine.create_volume(&name, labels)?;
            output::line(name.as_str())?;
            Ok(0)
        }
        Of::Ls { quiet, filter, format, noheading } => {
            let format = format.as_deref().map(Format::read).transpose()?;
            list(&engine, &filter, quiet, noheading, format.as_ref())?;
            Ok(0)
        }
        Of::Inspect { format, all, names } => inspect(&engine, format.as_deref(), all, names),
        Of::Exists { name } => match engine.volume(&name.parse()?) {
            Ok(_) => Ok(0),
            Err(Error::NoVolume(_)) => Ok(1),
            Err(e) => Err(e.into()),
        },
        Of::Rm { force, all, names } => remove(&engine, force, all, names),
        Of::Prune { force: _ } => {
            for name in engine.remove_unused_volumes()? {
                output::line(name.as_str())?;
            }
            Ok(0)
        }
    }
}

/// One `--filter`.
fn fits(filter: &str, volume: &Volume) -> Result<bool> {
    let (key, value) = key_value(filter);
    Ok(match key {
        "name" => volume.name.as_str().contains(value),
        "label" => {
            let (key, wanted) = match value.split_once('=') {
                Some((key, value)) => (key, Some(value)),
                None => (value, None),
            };
            let found = volume.labels.get(key);
            found.is_some_and(|v| wanted.is_none_or(|wanted| v == wanted))
        }
        "dangling" => match value {
            "true" | "1" => volume.used_by.is_empty(),
            "false" | "0" => !volume.used_by.is_empty(),
            _ => bail!("filter '{filter}' is not valid: dangling=true or dangling=false"),
        },
        _ => bail!("filter '{filter}' is not valid: name=, label= or dangling="),
    })
}

fn list(
    engine: &Engine,
    filters: &[String],
    quiet: bool,
    noheading: bool,
    format: Option<&Format>,
) -> Result<()> {
    let mut volumes = Vec::new();
    for volume in engine.volumes()? {
        let mut all = true;
        for filter in filters {
            all &= fits(filter, &volume)?;
        }
        if all {
            volumes.push(volume);
        }
    }
    if let Some(format) = format {
        let rows = || volumes.iter().map(compatible::volume);
        return format.print(rows(), HEADINGS, || output::json(&rows().collect::<Vec<_>>()));
    }
    if quiet {
        return output::print(volumes.iter().map(|v| format!("{}\n", v.name)).collect::<String>());
    }
    let mut table = Table::new(["DRIVER", "VOLUME NAME"]);
    for volume in &volumes {
        table.row(["local".to_owned(), volume.name.to_string()]);
    }
    match noheading {
        true => output::print(table.body()),
        false => table.print(),
    }
}

fn inspect(engine: &Engine, format: Option<&str>, all: bool, names: Vec<String>) -> Result<u8> {
    let format = format.filter(|text| *text != "json").map(crate::template::Template::read);
    let format = format.transpose()?;
    let names: Vec<Name> = match (all, names.is_empty()) {
        (true, true) => engine.volumes()?.into_iter().map(|v| v.name).collect(),
        (false, false) => names.iter().map(|n| n.parse()).collect::<Result<_, _>>()?,
        _ => bail!("name volumes, or give --all"),
    };
    let mut found = Vec::new();
    let code = fail::for_each(&names, |name| {
        found.push(compatible::volume(&engine.volume(name)?));
        Ok(())
    });
    match format {
        None => output::json(&found)?,
        Some(template) => {
            for volume in &found {
                output::print(template.fill(volume)? + "\n")?;
            }
        }
    }
    Ok(code)
}

fn remove(engine: &Engine, force: bool, all: bool, names: Vec<String>) -> Result<u8> {
    let names: Vec<String> = match (all, names.is_empty()) {
        (true, true) => engine.volumes()?.iter().map(|v| v.name.to_string()).collect(),
        (false, false) => names,
        _ => bail!("name volumes, or give --all"),
    };
    Ok(fail::for_each(&names, |name| {
        let name: Name = name.parse()?;
        if force && let Ok(volume) = engine.volume(&name) {
            for container in &volume.used_by {
                match engine.find(container.as_str()) {
                    Ok(id) => engine.remove(&id, true, false)?,
                    Err(Error::NoContainer(_)) => {} // removed meanwhile
                    Err(e) => return Err(e.into()),
                }
            }
        }
        match engine.remove_volume(&name) {
            Ok(()) => output::line(name.as_str()),
            Err(Error::NoVolume(_)) if force => Ok(()),
            Err(e @ Error::NoVolume(_)) => Err(fail::exit(1, e.to_string())),
            Err(e @ Error::VolumeInUse { .. }) => Err(fail::exit(2, e.to_string())),
            Err(e) => Err(e.into()),
        }
    }))
}
