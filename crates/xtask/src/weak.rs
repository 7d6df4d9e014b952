//! The programs of the control arms: `cargo xtask weak`.
//!
//! The isolation tests attack the shipped program, where the attack must fail, and a program built with the
//! feature `weaken`, in which one protection is left out, where the attack must succeed. The second build
//! compiles everything of ours once more. It is made always in the nightly ring, and in prepush only when one
//! of the files that apply a protection or attack it differs from the last recorded green run of the control
//! arms (`tests/protections`, a hash).
//!
//! Without the build, `target/weak` is absent and the control arms print that they did not run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::cargo::cargo;
use crate::suite::SELECTION;

/// The hash of the files below at the last green run of the control arms.
const RECORD: &str = "tests/protections";
/// The programs that are kept apart.
const PROGRAMS: [&str; 3] = ["dormouse", "dormouse-keeper", "dormouse-oci"];
/// How code names a protection.
const MARK: &str = "weakened(";
/// How a test names a program without protections, or a host with it.
const TEST_MARKS: [&str; 2] = ["weak_dormouse", "Host::without("];

/// Options of `cargo xtask weak`.
#[derive(Debug, Args)]
pub struct WeakArgs {
    /// Builds them whether or not a protection has changed.
    #[arg(long)]
    always: bool,
    /// Records that the control arms are green for the files as they are.
    #[arg(long, conflicts_with = "always")]
    record: bool,
}

/// Builds the programs into `target/weak`, or removes those of an earlier build.
pub fn run(top: &Path, args: &WeakArgs) -> Result<ExitCode> {
    let now = hash(top)?;
    let record = top.join(RECORD);
    if args.record {
        fs::write(&record, format!("{now}\n")).context(RECORD)?;
        return Ok(ExitCode::SUCCESS);
    }
    let dir = top.join("target/weak");
    let known = fs::read_to_string(&record).unwrap_or_default();
    if !args.always && known.trim() == now {
        let _ = fs::remove_dir_all(&dir); // absent, or of other files
        println!("control arms: not run, no protection has changed since they were green");
        return Ok(ExitCode::SUCCESS);
    }
    println!("control arms: building the programs whose protections can be left out");
    let mut build = cargo();
    build.arg("build").args(SELECTION).args(["--features", "dormouse-kernel/weaken"]);
    for program in PROGRAMS {
        build.args(["--bin", program]);
    }
    let status = build.current_dir(top).status().context("starting cargo")?;
    ensure!(status.success(), "the programs of the control arms do not compile");
    fs::create_dir_all(&dir).context("making target/weak")?;
    for program in PROGRAMS {
        let built = built(top, program);
        fs::copy(&built, dir.join(program)).with_context(|| built.display().to_string())?;
    }
    // The programs that users get go back to their place.
    let mut build = cargo();
    build.arg("build").args(SELECTION);
    for program in PROGRAMS {
        build.args(["--bin", program]);
    }
    let status = build.current_dir(top).status().context("starting cargo")?;
    ensure!(status.success(), "the programs do not compile");
    Ok(ExitCode::SUCCESS)
}

fn built(top: &Path, program: &str) -> PathBuf {
    top.join("target/x86_64-unknown-linux-gnu/release").join(program)
}

/// The hash of every file that applies a protection or attacks one.
fn hash(top: &Path) -> Result<String> {
    let mut files = Vec::new();
    let mut folders = vec![top.join("crates"), top.join("tests")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "rs" || end == "c") {
                files.push(path);
            }
        }
    }
    files.sort();
    let mut hasher = blake3::Hasher::new();
    for path in files {
        let text = fs::read(&path).with_context(|| path.display().to_string())?;
        let shown = String::from_utf8_lossy(&text);
        let is_attack = path.starts_with(top.join("tests/inside"));
        let is_test = TEST_MARKS.iter().any(|mark| shown.contains(mark));
        if is_attack || shown.contains(MARK) || is_test {
            let name = path.strip_prefix(top).unwrap_or(&path).display().to_string();
            hasher.update(name.as_bytes()).update(&[0]).update(&text).update(&[0]);
        }
    }
    Ok(hasher.finalize().to_hex().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_covers_protections_and_attacks_alone() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path();
        fs::create_dir_all(top.join("crates/a")).unwrap();
        fs::create_dir_all(top.join("tests/inside")).unwrap();
        let write = |path: &str, text: &str| fs::write(top.join(path), text).unwrap();
        write("crates/a/a.rs", "if !weakened(\"x\") {}");
        write("crates/a/b.rs", "fn b() {}");
        write("tests/inside/attack.c", "int main() {}");
        let first = hash(top).unwrap();
        write("crates/a/b.rs", "fn c() {}");
        assert_eq!(hash(top).unwrap(), first);
        write("tests/inside/attack.c", "int main() { }");
        let second = hash(top).unwrap();
        assert_ne!(second, first);
        write("crates/a/a.rs", "if !weakened(\"y\") {}");
        assert_ne!(hash(top).unwrap(), second);
    }
}
