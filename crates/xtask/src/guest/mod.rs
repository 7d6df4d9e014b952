//! The second kernel: Debian's newer one, in QEMU, with cgroup v2 and systemd.
//!
//! A test whose name has the prefix `vm_` runs here as well as on the developer's machine: all of them in
//! the nightly ring, one per subject in prepush (`tests/guest.txt`). Emulation without hardware help is ten to
//! sixteen times slower than the machine itself: the guest shows that a test passes, never how fast.
//!
//! ```text
//!   CACHE/guest/kernel/         vmlinuz and modules, from the -backports suite of apt's own mirror
//!   CACHE/guest/kernel.img      ext4: Debian, systemd, one service of ours; never written to
//!   CACHE/guest/kernel-next...  the same with the newest kernel of the release after that (relay, --next)
//!   CACHE/guest/accelerator     result of the trial boot with KVM, for one boot of the machine
//!   target/guest/command        the shell script that the service runs
//! ```
//!
//! CACHE is `DORMOUSE_TEST_CACHE`, or `/var/cache/dormouse-test`: outside the clone, so that a new clone does
//! not make the disk again. An absent cache costs two minutes and nothing else.
//!
//! Kernels are those for clouds, which have their disk (NVMe) and ext4 built in: no initramfs is needed. They
//! are downloaded and unpacked, not installed. The repository is shared with the guest, read only and at the
//! same path, so that the programs built here run there. Output comes back over one virtio port, the exit
//! status over another.
//!
//! KVM is used where a trial boot with it succeeds. The existence of `/dev/kvm` proves nothing: inside some
//! virtual machines the device opens and no kernel boots.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use dormouse_testkit::image;

use crate::suite;
use machine::{Guest, Machine};

mod kernel;
mod machine;
mod output;
mod relay;

/// Tests that the prepush ring runs in the guest, one full name per line.
pub const SMOKE: &str = "tests/guest.txt";
/// In the names of tests that are too much for an emulated machine.
const BIG: &str = "big_";

/// Options of `cargo xtask guest`.
#[derive(Args)]
pub struct GuestArgs {
    /// Seconds before the guest is switched off.
    #[arg(long, default_value_t = 2400)]
    limit_s: u64,
    /// Runs only tests whose name contains this.
    #[arg(long, default_value = "vm_")]
    tests: String,
    /// Under the newer kernel.
    #[arg(long)]
    next: bool,
    /// Runs one test per subject, those of tests/guest.txt.
    #[arg(long)]
    smoke: bool,
    /// Hands checkpoints from one kernel to the other and back, instead of the tests.
    #[arg(long, conflicts_with_all = ["next", "tests", "command"])]
    relay: bool,
    /// A shell command to be run in the guest instead of the tests.
    #[arg(last = true)]
    command: Vec<String>,
}

/// Runs a command, or the tests, in the guest; returns their exit status.
pub fn run(top: &Path, args: &GuestArgs) -> Result<ExitCode> {
    let guest = Guest { top: top.to_owned(), dir: top.join("target/guest"), cache: cache() };
    fs::create_dir_all(&guest.dir).context("making target/guest")?;
    let limit = Duration::from_secs(args.limit_s);
    if args.relay {
        return relay::run(&guest, limit);
    }
    let kernel = if args.next { guest.next_kernel() } else { guest.own_kernel() };
    guest.prepare(&kernel)?;
    let mut tests = Vec::new();
    if args.command.is_empty() {
        // Made here: the guest has no network to make them with, and the tree is read-only there.
        image::busybox_with_attack();
        image::workloads();
        image::nginx();
        tests = suite::system_tests(top)?;
        tests.retain(|test| test.name.contains(&args.tests) && !test.name.contains(BIG));
        if args.smoke {
            let smoke = fs::read_to_string(top.join(SMOKE)).context(SMOKE)?;
            let smoke: Vec<&str> = smoke.lines().filter(|line| !line.starts_with('#')).collect();
            tests.retain(|test| smoke.contains(&test.full_name().as_str()));
            ensure!(tests.len() == smoke.len(), "{SMOKE} names tests that do not exist");
        }
        ensure!(!tests.is_empty(), "no test's name contains {}", args.tests);
    }
    let accelerator = guest.accelerator(&kernel)?;
    let script = |green: &[&str]| match args.command.as_slice() {
        [] => guest.test_script(&tests, green),
        words => Ok(words.join(" ")),
    };
    let machine = Machine { kernel: &kernel, cpu: "", has_cx16: args.next, accelerator };
    let status = guest.boot(&machine, &script, limit)?;
    Ok(ExitCode::from(u8::try_from(status).unwrap_or(1)))
}

/// Where kernels and disks are kept.
fn cache() -> PathBuf {
    let dir = std::env::var_os("DORMOUSE_TEST_CACHE").map(PathBuf::from);
    dir.unwrap_or_else(|| "/var/cache/dormouse-test".into()).join("guest")
}
