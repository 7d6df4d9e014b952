//! `dormouse info`

use std::path::PathBuf;

use anyhow::Result;
use dormouse_container::Engine;
use dormouse_model::State;
use serde::Serialize;

use crate::command::Global;
use crate::output;

/// Show directories, counts and capacities
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// `info --json`
#[derive(Debug, Serialize)]
struct Info {
    version: &'static str,
    kernel: String,
    state_dir: PathBuf,
    runtime_dir: PathBuf,
    config_dir: PathBuf,
    /// The parent of the containers' cgroups.
    cgroup: String,
    containers: usize,
    running: usize,
    paused: usize,
    drowsy: usize,
    asleep: usize,
    stopped: usize,
    images: usize,
    /// Slots of host ids, of 32,768 each, that belong to containers.
    id_slots: u32,
    /// Addresses (an IPv4 with its IPv6 counts once) that belong to containers.
    addresses: u32,
    cpus: usize,
    memory_bytes: u64,
    /// Page cache of images and what else is charged to them, and how much of it is reclaimed last.
    image_memory_bytes: u64,
    image_memory_low_bytes: u64,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let places = global.places();
    let engine = Engine::open(places.clone())?;
    let list = engine.list()?;
    let count = |s: State| list.iter().filter(|d| d.state == s).count();
    let (id_slots, addresses) = engine.taken()?;
    let memory = rustix::system::sysinfo();
    let (image_memory_bytes, image_memory_low_bytes) = engine.images_memory()?;
    let info = Info {
        version: env!("CARGO_PKG_VERSION"),
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        state_dir: places.lib,
        runtime_dir: places.run,
        config_dir: places.etc,
        cgroup: places.cgroup,
        containers: list.len(),
        running: count(State::Running),
        paused: count(State::Paused),
        drowsy: count(State::Drowsy),
        asleep: count(State::Asleep),
        stopped: count(State::Stopped),
        images: engine.images()?.list()?.len(),
        id_slots,
        addresses,
        cpus: std::thread::available_parallelism().map_or(1, Into::into),
        memory_bytes: memory.totalram * u64::from(memory.mem_unit),
        image_memory_bytes,
        image_memory_low_bytes,
    };
    if args.json {
        output::json(&info)?;
        return Ok(0);
    }
    let rows = [
        ("version", info.version.to_owned()),
        ("kernel", info.kernel),
        ("state", info.state_dir.display().to_string()),
        ("runtime", info.runtime_dir.display().to_string()),
        ("configuration", info.config_dir.display().to_string()),
        ("cgroup", info.cgroup),
        (
            "containers",
            format!(
                "{} ({} running, {} paused, {} drowsy, {} asleep, {} stopped)",
                info.containers, info.running, info.paused, info.drowsy, info.asleep, info.stopped
            ),
        ),
        ("images", info.images.to_string()),
        ("id slots", info.id_slots.to_string()),
        ("addresses", info.addresses.to_string()),
        ("cpus", info.cpus.to_string()),
        ("memory", output::bytes(info.memory_bytes)),
        (
            "image memory",
            format!(
                "{} ({} reclaimed last)",
                output::bytes(info.image_memory_bytes),
                output::bytes(info.image_memory_low_bytes)
            ),
        ),
    ];
    output::print(rows.iter().map(|(k, v)| format!("{k:<14} {v}\n")).collect::<String>())?;
    Ok(0)
}
