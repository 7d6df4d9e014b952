//! OCI runtimes compared: `create`, `start` and `delete` of a container, and `run`.
//!
//! ```sh
//! cargo run --release -p dormouse-benches --bin oci -- --rounds 50
//! ```
//!
//! The bundle is that of `runc spec`, with `true` as its program. Runtimes that are not from Debian
//! take part by `--runtime NAME=PATH`.
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::Parser;
use dormouse_benches::{Arm, Bench, Times, installed, interleave, promise, tabulate};

/// Options.
#[derive(Parser)]
struct Options {
    /// Turns of each arm.
    #[arg(long, default_value_t = 50)]
    rounds: usize,
    /// A further runtime, NAME=PATH.
    #[arg(long)]
    runtime: Vec<String>,
}

/// The name of the arm without a devpts in its bundle: the cost of a devpts alone.
const NO_DEVPTS: &str = "no devpts";

/// The promised ratio to crun.
const OF_CRUN: f64 = 0.6;

fn main() -> Result<()> {
    let options = Options::parse();
    let bench = Bench::new()?;
    let ours = Path::new(bench.dormouse().get_program()).with_file_name("dormouse-oci");
    let mut runtimes = vec![("dormouse-oci".to_owned(), ours)];
    for name in ["crun", "runc", "youki"] {
        match installed(name) {
            true => runtimes.push((name.to_owned(), name.into())),
            false => eprintln!("{name} is not installed: not measured"),
        }
    }
    for more in &options.runtime {
        let (name, path) = more.split_once('=').context("--runtime needs NAME=PATH")?;
        runtimes.push((name.to_owned(), path.into()));
    }
    runtimes.push((NO_DEVPTS.to_owned(), runtimes[0].1.clone()));
    let bundle = |(name, _): &(String, PathBuf)| {
        let bundle = bench.bundle(&directory(name), true)?;
        if name == NO_DEVPTS {
            let path = bundle.join("config.json");
            let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path)?)?;
            if let Some(mounts) = config["mounts"].as_array_mut() {
                mounts.retain(|mount| mount["type"] != "devpts");
            }
            fs::write(&path, serde_json::to_vec(&config)?)?;
        }
        anyhow::Ok(bundle)
    };
    let bundles: Vec<PathBuf> = runtimes.iter().map(bundle).collect::<Result<_>>()?;
    // Every runtime has a bundle of its own, for both scripts.
    let arms = |script| -> Vec<Arm> {
        let each = runtimes.iter().zip(&bundles);
        each.map(|((name, path), bundle)| arm(&bench, name, path, bundle, script)).collect()
    };
    for (what, script) in [
        (
            "create+start+delete",
            "\"$0\" --root \"$1\" create -b \"$2\" \"$3\" && \"$0\" --root \"$1\" start \"$3\" && \
                                 exec \"$0\" --root \"$1\" delete --force \"$3\"",
        ),
        ("run", "exec \"$0\" --root \"$1\" run -b \"$2\" \"$3\""),
    ] {
        let arms = arms(script);
        report(what, &arms, &interleave(&arms, options.rounds)?);
    }
    Ok(())
}

/// The name of an arm's directory. Runtimes write it into records and mount options, where a space or a comma
/// ends a field.
fn directory(arm: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    format!("oci-{}", arm.chars().map(safe).collect::<String>())
}

fn arm(bench: &Bench, name: &str, program: &Path, bundle: &Path, script: &'static str) -> Arm {
    let bundle = bundle.to_owned();
    let state = bench.path(Bench::STATE).join(directory(name));
    let program: PathBuf = program.to_owned();
    let mut arm = Arm::new(name, move |n| {
        let mut c = Command::new("sh");
        c.args(["-c", script]).arg(&program).arg(&state).arg(&bundle).arg(format!("bench-{n}"));
        c
    });
    arm.hide_v2 = name == "crun";
    arm
}

fn report(what: &str, arms: &[Arm], times: &[Times]) {
    let of = tabulate("oci", what, arms, times, &serde_json::json!({ "verb": what }));
    if let (Some(ours), Some(crun)) = (of("dormouse-oci"), of("crun")) {
        promise(&format!("{what}, of crun"), ours / crun, OF_CRUN);
    }
}
