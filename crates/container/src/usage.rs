//! Images that containers use, and the needs of a sleeping container: disk, memory, tasks.
//!
//! Uses `ground`.

use std::fs;

use dormouse_image::Image;
use dormouse_kernel::proc;
use dormouse_model::{Config, ContainerId, Limits, RootSource};
use dormouse_parcel::Reader;
use dormouse_record::{Process, Records};

use crate::error::{Error, Result};
use crate::ground::Ground;
use crate::settings;

/// Returns the size of an asleep container's checkpoint in bytes; 0 if it is awake.
pub(crate) fn asleep_bytes(ground: &Ground, id: &ContainerId) -> u64 {
    let files = fs::read_dir(ground.asleep_dir(id)).into_iter().flatten().flatten();
    files.filter_map(|file| file.metadata().ok()).map(|meta| meta.len()).sum()
}

/// LIMIT: processes and threads of a checkpoint where the container has no limit of its own (`--pids`).
pub(crate) const TASKS_MAX: u64 = 16_384;

/// Refuses a checkpoint with more processes and threads than the container may have. A record is small, and
/// each task costs the kernel some 20 kB and a pid: refused before the first is made.
pub(crate) fn check_tasks(config: &Config, records: &Records) -> Result<()> {
    let of = |process: &Process| process.threads.len().max(1) as u64;
    let tasks = records.processes.iter().map(of).sum::<u64>() + u64::from(config.spec.init);
    let limit = config.spec.limits.tasks_max().map_or(TASKS_MAX, u64::from);
    match tasks <= limit {
        true => Ok(()),
        false => Err(Error::Invalid(format!(
            "the checkpoint of container '{}' has {tasks} processes and threads, more than its limit of \
             {limit}: allow more with --pids N, or with `dormouse update --pids N`",
            config.name
        ))),
    }
}

/// Memory that the kernel itself needs for a small container: page tables, stacks, descriptors.
const KERNEL_BYTES: u64 = 512 << 10;

/// Memory that the kernel may need for the processes of a restore, such as page tables and descriptors: this, and
/// so large a part of their memory.
const RESTORE_BYTES: u64 = 16 << 20;
const RESTORE_PART: u64 = 8;

/// Returns the memory with which a restored container begins, with a part for the kernel.
pub(crate) fn restored_bytes(records: &Records) -> u64 {
    let bytes = records.pages.bytes;
    bytes.saturating_add(bytes / RESTORE_PART).saturating_add(RESTORE_BYTES)
}

/// Returns the memory with which an asleep container will begin; `None` if it is awake. A checkpoint that cannot be
/// read has no bound: its wake fails for its own reason.
pub(crate) fn wake_bytes(ground: &Ground, id: &ContainerId) -> Option<u64> {
    let dir = ground.asleep_dir(id);
    match Reader::open(&dir) {
        Ok(reader) => Some(restored_bytes(reader.records())),
        Err(_) if dir.exists() => Some(u64::MAX),
        Err(_) => None,
    }
}

/// Refuses limits below the memory that a sleeping container needs to wake: the kernel would kill the
/// woken container. Swap that the limits permit, and the host has, counts.
pub(crate) fn check_wake_fits(ground: &Ground, config: &Config, limits: &Limits) -> Result<()> {
    let Some(memory_max) = limits.memory_max_bytes else { return Ok(()) };
    let reader = Reader::open(&ground.asleep_dir(&config.id))?;
    let needed = reader.records().pages.bytes.saturating_add(KERNEL_BYTES);
    let swap = limits.swap_max_bytes.unwrap_or(u64::MAX).min(host_swap_bytes());
    if needed <= memory_max.saturating_add(swap) {
        return Ok(());
    }
    let with_swap = match swap {
        0 => String::new(),
        swap => format!(" and {} of swap", kilobytes(swap)),
    };
    Err(Error::Invalid(format!(
        "container '{}' is asleep and needs {} of memory to wake, more than the new limit of {}{with_swap}: \
         choose a higher limit, or wake it and let it release memory first",
        config.name,
        kilobytes(needed),
        kilobytes(memory_max),
    )))
}

/// An amount as `--memory` accepts it.
fn kilobytes(bytes: u64) -> String {
    format!("{}k", bytes.div_ceil(1024))
}

/// Returns the memory of the host.
pub(crate) fn host_memory_bytes() -> u64 {
    meminfo(&["MemTotal:"])
}

/// Returns the size of the host's swap.
fn host_swap_bytes() -> u64 {
    meminfo(&["SwapTotal:"])
}

/// Returns the sum of some lines of proc_meminfo(5), in bytes.
fn meminfo(names: &[&str]) -> u64 {
    let text = proc::read_text("/proc/meminfo", 1 << 20).unwrap_or_default();
    let value = |line: &str| {
        let rest = names.iter().find_map(|name| line.strip_prefix(name))?;
        rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    };
    text.lines().filter_map(value).sum::<u64>().saturating_mul(1024)
}

/// LIMIT: a checkpoint with less memory is not compared with the host's: a start needs about as much.
const SMALL_BYTES: u64 = 16 << 20;

/// Refuses a wake for which the host has no memory: the kernel would kill some process. Such a wake fails as
/// any other, so that clients wait, and is tried again.
///
/// LIMIT: wakes at the same time see the same free memory. The keeper runs four at once.
pub(crate) fn check_room(ground: &Ground, records: &Records) -> Result<()> {
    // Unreadable settings do not prevent a wake.
    let reserve = settings::reserve_bytes(&ground.settings()).unwrap_or(0);
    let needed = records.pages.bytes;
    if reserve == 0 && needed < SMALL_BYTES {
        return Ok(());
    }
    let free = meminfo(&["MemAvailable:", "SwapFree:"]);
    match needed.saturating_add(reserve) <= free {
        true => Ok(()),
        false => Err(Error::NoRoom { needed_kb: needed.div_ceil(1024), free_kb: free / 1024 }),
    }
}

/// Returns the image of a container, if it has one.
pub(crate) fn image_of(ground: &Ground, config: &Config) -> Result<Option<Image>> {
    match &config.spec.root {
        RootSource::Image { id, .. } => Ok(Some(ground.images()?.find(id)?)),
        RootSource::Directory(_) => Ok(None),
    }
}

/// Returns the ids of images that containers are made from: `prune` must keep them.
pub(crate) fn images_in_use(ground: &Ground) -> Result<Vec<String>> {
    let mut used = Vec::new();
    for id in ground.ids()? {
        match ground.config(&id) {
            Ok(config) => {
                if let RootSource::Image { id, .. } = config.spec.root {
                    used.push(id);
                }
            }
            Err(Error::NoContainer(_)) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(used)
}

/// The image's name as lists show it.
pub(crate) fn image_label(config: &Config) -> String {
    match &config.spec.root {
        RootSource::Image { reference, .. } => reference.to_string(),
        RootSource::Directory(path) => path.display().to_string(),
    }
}
