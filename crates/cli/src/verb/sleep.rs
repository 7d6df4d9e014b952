//! `dormouse sleep`

use std::time::Duration;

use anyhow::Result;
use dormouse_container::{Engine, PushOut, Trial};
use dormouse_model::{ContainerId, State};

use crate::command::Global;
use crate::fail;
use crate::output::bytes;
use crate::target::Targets;

/// Put running containers to sleep: their processes become files, and a connection wakes them
///
/// The first time, and whenever a container has objects of new kinds, its checkpoint is restored for a trial
/// before the processes end. After a difference the container continues.
///
/// With --drowsy the processes stay, frozen, and their memory is pushed out to swap. Every
/// container can be drowsy, also one that cannot be checkpointed. A connection wakes it, unlike
/// after 'pause'.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Keep the processes: freeze them until an event arrives, and push their memory out
    #[arg(long)]
    drowsy: bool,
    /// Do not restore the checkpoint for a trial before the processes end
    #[arg(long, conflicts_with = "drowsy")]
    unproven: bool,
    /// Keep parts of the next wake: cgroups, mounts and an empty process. Their number is 'warm' under [sleep] in
    /// config.toml, 0 by default
    #[arg(long, conflicts_with = "drowsy")]
    warm: bool,
    #[command(flatten)]
    targets: Targets,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    if args.drowsy {
        return args.targets.each(global, |state| state == State::Running, drowse);
    }
    let trial = if args.unproven { Trial::Skipped } else { Trial::Made };
    let runs = |state| matches!(state, State::Running | State::Drowsy);
    args.targets.each(global, runs, |engine, id| {
        if args.warm {
            engine.check_warm(id)?;
        }
        let waits = engine.short_waits(id, SHORT).unwrap_or_default(); // only for a hint
        if engine.sleep(id, trial)?.is_some()
            && let Some(wait) = waits.iter().min_by_key(|wait| wait.at_most)
        {
            fail::note(&format!(
                "a timer wakes it within {:?}: process {} ({}) waits in {}; after 'dormouse update \
                 --wake-on call,data,file' timers do not wake it, and with timer=1m they wait",
                wait.at_most, wait.pid, wait.process, wait.call
            ));
        }
        if args.warm {
            keep_warm(engine, id);
        }
        Ok(())
    })
}

/// Keeps parts of the next wake of a container that is asleep now. One that was active is awake again.
fn keep_warm(engine: &Engine, id: &ContainerId) {
    if let Err(e) = engine.keep_warm(id) {
        fail::note(&format!("it is not kept warm: {}", e.with_causes()));
    }
}

/// A sleep that a timer ends earlier gains little.
const SHORT: Duration = Duration::from_secs(10);

fn drowse(engine: &Engine, id: &ContainerId) -> Result<()> {
    let Some(PushOut { before_bytes, after_bytes, has_swap }) = engine.drowse(id)? else {
        return Ok(());
    };
    if !has_swap {
        fail::note(&format!(
            "this host has no swap: only page cache was freed, {} of {}; add a swap file \
             ('dormouse daemon --swap', swapon(8)) or zram",
            bytes(before_bytes.saturating_sub(after_bytes)),
            bytes(before_bytes)
        ));
    }
    Ok(())
}
