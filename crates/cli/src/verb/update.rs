//! `dormouse update`

use std::net::IpAddr;

use anyhow::{Result, ensure};
use dormouse_container::Update;
use dormouse_model::Limits;

use crate::command::Global;
use crate::option::limit::LimitArgs;
use crate::option::sleep::SleepArgs;
use crate::output;

/// Change limits, addresses and policies of a container, also while it runs
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Start it again when it ends: no, always, unless-stopped, on-failure[:TIMES]
    #[arg(long, value_name = "POLICY")]
    restart: Option<String>,
    #[command(flatten)]
    sleep: SleepArgs,
    /// Add an address
    #[arg(long, value_name = "ADDRESS")]
    ip_add: Vec<IpAddr>,
    /// Remove an address
    #[arg(long, value_name = "ADDRESS")]
    ip_rm: Vec<IpAddr>,
    #[command(flatten)]
    limits: LimitArgs,
    /// Name or id
    #[arg(value_name = "CONTAINER")]
    name: String,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let update = Update {
        limits: args.limits.read()?,
        restart: args.restart.as_deref().map(str::parse).transpose()?,
        sleep: args.sleep.read()?,
        drowsy: args.sleep.read_drowsy()?,
        wake_on: args.sleep.read_wake_on()?,
        oom: args.sleep.read_oom(),
        evict: args.sleep.read_evict(),
        ip_add: args.ip_add,
        ip_rm: args.ip_rm,
    };
    let nothing = update.limits == Limits::default()
        && update.restart.is_none()
        && update.sleep.is_none()
        && update.drowsy.is_none()
        && update.wake_on.is_none()
        && update.oom.is_none()
        && update.evict.is_none()
        && update.ip_add.is_empty()
        && update.ip_rm.is_empty();
    ensure!(!nothing, "there is nothing to change: give a limit, an address or a policy");
    let engine = global.engine()?;
    let id = engine.find(&args.name)?;
    engine.update(&id, &update)?;
    let limits = &update.limits;
    if limits.io_weight.is_some() || !limits.disk_rates.is_empty() || limits.disk_bytes.is_some() {
        super::create::say_not_enforced(&engine, &engine.config(&id)?)?;
    }
    output::line(&args.name)?;
    Ok(0)
}
