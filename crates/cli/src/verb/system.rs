//! `dormouse system`

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::Result;
use dormouse_container::Engine;
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use serde::Serialize;

use crate::command::Global;
use crate::format::{Format, Headings};
use crate::output::{self, Table};

/// Show the use of the disk
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    of: Of,
}

#[derive(Debug, clap::Subcommand)]
enum Of {
    /// Show the disk space of images, containers and volumes
    ///
    /// A file that several images share counts for each of them. Files of removed images are not shown;
    /// 'prune' frees their space.
    Df {
        /// json, a Go template, or 'table' and a template
        #[arg(long, value_name = "FORMAT")]
        format: Option<String>,
    },
}

/// One line.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Row {
    r#type: &'static str,
    total: usize,
    active: usize,
    #[serde(skip)]
    bytes: u64,
    #[serde(skip)]
    unused_bytes: u64,
    size: String,
    reclaimable: String,
}

/// The same with numbers.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Plain {
    r#type: &'static str,
    total: usize,
    active: usize,
    raw_size: u64,
    raw_reclaimable: u64,
    size: String,
    reclaimable: String,
}

const HEADINGS: &Headings = &[
    ("Type", "TYPE"),
    ("Total", "TOTAL"),
    ("Active", "ACTIVE"),
    ("Size", "SIZE"),
    ("Reclaimable", "RECLAIMABLE"),
];

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

impl Row {
    /// `parts` are the bytes of each object, and whether a running container needs it.
    fn new(r#type: &'static str, parts: &[(u64, bool)]) -> Self {
        let bytes: u64 = parts.iter().map(|(bytes, _)| bytes).sum();
        let unused_bytes: u64 =
            parts.iter().filter(|(_, used)| !used).map(|(bytes, _)| bytes).sum();
        let percent = (unused_bytes * 100).checked_div(bytes).unwrap_or(0);
        Self {
            r#type,
            total: parts.len(),
            active: parts.iter().filter(|(_, used)| *used).count(),
            bytes,
            unused_bytes,
            size: output::bytes(bytes),
            reclaimable: format!("{} ({percent}%)", output::bytes(unused_bytes)),
        }
    }
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let Of::Df { format } = args.of;
    let format = format.as_deref().map(Format::read).transpose()?;
    let rows = [images(&engine)?, containers(&engine)?, volumes(&engine)?];
    let plain = |row: &Row| Plain {
        r#type: row.r#type,
        total: row.total,
        active: row.active,
        raw_size: row.bytes,
        raw_reclaimable: row.unused_bytes,
        size: row.size.clone(),
        reclaimable: row.reclaimable.clone(),
    };
    if let Some(format) = format {
        let json = || output::json(&rows.iter().map(plain).collect::<Vec<_>>());
        format.print(rows.iter(), HEADINGS, json)?;
        return Ok(0);
    }
    let mut table = Table::new(["TYPE", "TOTAL", "ACTIVE", "SIZE", "RECLAIMABLE"]);
    for row in rows {
        let (total, active) = (row.total.to_string(), row.active.to_string());
        table.row([row.r#type.to_owned(), total, active, row.size, row.reclaimable]);
    }
    table.print()?;
    Ok(0)
}

/// Images. An image is active if a container is made from it.
fn images(engine: &Engine) -> Result<Row> {
    let used: HashSet<String> = engine.images_in_use()?.into_iter().collect();
    let images = engine.images()?.list()?;
    let parts: Vec<_> = images.iter().map(|i| (i.size_bytes, used.contains(&i.id))).collect();
    Ok(Row::new("Images", &parts))
}

/// Containers with their own files and checkpoints. A container is active if it lives.
fn containers(engine: &Engine) -> Result<Row> {
    let list = engine.list()?;
    let part = |c: &dormouse_container::Listed| {
        let dir = engine.upper(&c.id);
        (dir.parent().map_or(0, used_bytes), c.state.is_alive())
    };
    let parts: Vec<_> = list.iter().map(|c| part(c)).collect();
    Ok(Row::new("Containers", &parts))
}

/// Volumes. A volume is active if a container mounts it.
fn volumes(engine: &Engine) -> Result<Row> {
    let volumes = engine.volumes()?;
    let parts: Vec<_> =
        volumes.iter().map(|v| (used_bytes(&v.path), !v.used_by.is_empty())).collect();
    Ok(Row::new("Local Volumes", &parts))
}

/// LIMIT: directories inside one another. Deeper files do not count.
const DEPTH_MAX: usize = 200;

/// The bytes on disk of the files in a directory. A file with several names counts once. A file that
/// disappears meanwhile, or cannot be read, does not count.
fn used_bytes(dir: &Path) -> u64 {
    let mut seen = HashSet::new();
    match rustix::fs::open(dir, DIRECTORY, Mode::empty()) {
        Ok(dir) => used_in(&dir, &mut seen, 0),
        Err(_) => 0,
    }
}

/// A container may replace directories by links meanwhile, so each is opened relative to its parent.
fn used_in(dir: &OwnedFd, seen: &mut HashSet<(u64, u64)>, depth: usize) -> u64 {
    let mut bytes = 0;
    for entry in rustix::fs::Dir::read_from(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let Ok(stat) = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
        if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
            if stat.st_nlink == 1 || seen.insert((stat.st_dev, stat.st_ino)) {
                bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
            }
        } else if depth < DEPTH_MAX
            && let Ok(below) = rustix::fs::openat(dir, name, DIRECTORY, Mode::empty())
        {
            bytes += used_in(&below, seen, depth + 1);
        }
    }
    bytes
}
