//! The relay: checkpoints go from one kernel to the other and back (`tests/relay.rs`).
//!
//! A leg is one boot. What it hands on are archives in `target/guest/relay`, which is the one place
//! that a guest writes to.

use std::fs;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result};
use dormouse_testkit::image;

use super::machine::{Accelerator, Guest, Machine};
use super::output::output_of;
use crate::suite;

/// The leg on the machine itself, by its test.
const BEFORE: &str = "checkpoint::relay::leg_0_on_the_machine_itself";
/// Legs in the guest: under the newer kernel or not, and what the CPU lacks.
const LEGS: [(&str, bool, &str); 4] = [
    ("checkpoint::relay::leg_1_sets_out", false, ""),
    ("checkpoint::relay::leg_2_goes_on_under_a_newer_kernel", true, ""),
    ("checkpoint::relay::leg_3_comes_home", false, ""),
    ("checkpoint::relay::leg_4_is_refused_by_a_smaller_cpu", true, ",-avx2"),
];

/// Runs all legs; the exit status is that of the first that fails.
pub fn run(guest: &Guest, limit: Duration) -> Result<ExitCode> {
    // Made here, as for the other tests.
    image::workloads();
    let baton = guest.dir.join("relay");
    let _ = fs::remove_dir_all(&baton); // ignored: it may be absent
    fs::create_dir_all(&baton).context("making target/guest/relay")?;
    let tests = suite::system_tests(&guest.top)?;
    let program = &tests.first().context("there are no whole-system tests")?.program;
    let mut before = Command::new(program);
    before.args(["--ignored", "--exact", BEFORE]).env("DORMOUSE_RELAY", &baton);
    println!("{}", output_of(before)?);
    let (own, next) = (guest.own_kernel(), guest.next_kernel());
    guest.prepare(&own)?;
    guest.prepare(&next)?;
    // A leg needs a CPU whose features QEMU can take away.
    let accelerator = Accelerator::Tcg;
    for (leg, is_next, cpu) in LEGS {
        let kernel = if is_next { &next } else { &own };
        let machine = Machine { kernel, cpu, has_cx16: false, accelerator };
        let script = format!(
            "mount -o remount,rw {top}\n\
             DORMOUSE_RELAY={baton} {program} --ignored --exact {leg} --nocapture\n",
            top = guest.top.display(),
            baton = baton.display(),
            program = program.display(),
        );
        let status = guest.boot(&machine, &|_| Ok(script.clone()), limit)?;
        if status != 0 {
            return Ok(ExitCode::from(u8::try_from(status).unwrap_or(1)));
        }
    }
    Ok(ExitCode::SUCCESS)
}
