//! The functions that usual commands execute, for `scripts/ordered-cc`: it has the linker place them side by side
//! (docs/decisions/0057-functions-side-by-side.md).
//!
//! Each command of a scene is run one instruction after the other, and the function of each instruction is looked up in
//! the symbols of the program. The list is in the order of their first execution, which is that of the pages as well.

use std::collections::{BTreeMap, HashSet};
use std::io::Write;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, ensure};
use dormouse_testkit::{Host, Led, dormouse};

/// The list, in the repository.
const LIST: &str = "crates/cli/functions.gz";

/// Commands, and whether they are run step by step.
const SCENES: &[(bool, &[&str])] = &[
    (true, &["run", "--rm", "busybox", "true"]),
    (true, &["run", "--rm", "--memory", "64m", "--cpus", "1", "busybox", "true"]),
    (true, &["run", "-d", "--name", "a", "busybox", "httpd", "-f", "-h", "/www"]),
    (true, &["exec", "a", "true"]),
    (true, &["inspect", "a"]),
    (true, &["checkpoint", "--unproven", "a"]),
    (true, &["restore", "a"]),
    (false, &["sleep", "a"]),
    (true, &["wake", "a"]),
    (true, &["kill", "a"]),
    (true, &["rm", "--force", "a"]),
    (true, &["create", "--name", "b", "busybox", "sleep", "1000"]),
    (true, &["start", "b"]),
    (true, &["stop", "--time", "0", "b"]),
    (true, &["rm", "b"]),
];

pub(crate) fn run(top: &Path) -> Result<ExitCode> {
    let symbols = symbols(&dormouse())?;
    // Tracer and tracee on one processor: a wakeup of another one for each instruction takes five times as long.
    let own = std::process::id().to_string();
    piped("taskset", &["--cpu-list", "--pid", "0", &own], top, b"")?;
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--name", "other", "busybox", "sleep", "100000"]).ok();
    let (mut names, mut seen) = (Vec::new(), HashSet::new());
    for (is_stepped, words) in SCENES {
        if !is_stepped {
            host.dm(words).ok();
            continue;
        }
        let (mut steps, before) = (0_u64, names.len());
        let mut led = Led::start(&host.dormouse(words), &dormouse());
        // Most instructions are in the function of the last one.
        let mut here = 0..0;
        led.step_to_end(|address| {
            steps += 1;
            if here.contains(&address) {
                return;
            }
            let Some((start, (end, name))) = symbols.range(..=address).next_back() else { return };
            here = *start..*end;
            if here.contains(&address) && seen.insert(*start) {
                names.push(name.clone());
            }
        });
        let new = names.len() - before;
        ensure!(
            led.status() == Some(0),
            "{words:?} has failed or took too long: {:?}",
            led.status()
        );
        eprintln!("{}: {steps} instructions, {new} more functions", words.join(" "));
    }
    ensure!(names.len() > 1000, "only {} functions were executed", names.len());
    let plain = piped("sed", &["-f", "scripts/plain-names.sed"], top, names.join("\n").as_bytes())?;
    let mut once = HashSet::new();
    let plain = String::from_utf8(plain)?;
    let list: Vec<&str> = plain.lines().filter(|name| once.insert(*name)).collect();
    let packed = piped("gzip", &["-9n"], top, (list.join("\n") + "\n").as_bytes())?;
    std::fs::write(top.join(LIST), packed)?;
    println!("{LIST}: {} functions", list.len());
    Ok(ExitCode::SUCCESS)
}

/// The functions of a program by their addresses: the end of each, and its name.
fn symbols(program: &Path) -> Result<BTreeMap<u64, (u64, String)>> {
    let output = Command::new("nm").args(["-S", "--defined-only"]).arg(program).output()?;
    ensure!(output.status.success(), "nm: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout)?;
    let mut all = BTreeMap::new();
    for line in text.lines() {
        if let [address, size, "t" | "T" | "w" | "W", name] = *line.split(' ').collect::<Vec<_>>() {
            let start = u64::from_str_radix(address, 16)?;
            let end = start + u64::from_str_radix(size, 16)?;
            all.insert(start, (end, name.to_owned()));
        }
    }
    Ok(all)
}

/// The output of a program with this input.
fn piped(program: &str, words: &[&str], top: &Path, input: &[u8]) -> Result<Vec<u8>> {
    let mut command = Command::new(program);
    command.args(words).current_dir(top).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot run {program}"))?;
    let mut stdin = child.stdin.take().context("no pipe")?;
    let input = input.to_vec();
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output()?;
    writer.join().map_err(|_| anyhow::anyhow!("the writer has panicked"))??;
    ensure!(output.status.success(), "{program}: {}", output.status);
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_functions_lie_side_by_side() {
        let program = dormouse();
        let read = Command::new("readelf").args(["-p", ".comment"]).arg(&program).output().unwrap();
        if !String::from_utf8_lossy(&read.stdout).contains("LLD") {
            return; // another linker orders no functions
        }
        let top = crate::top();
        let packed = std::fs::read(top.join(LIST)).unwrap();
        let list = piped("gzip", &["-dc"], &top, &packed).unwrap();
        let list = String::from_utf8(list).unwrap();
        let listed: HashSet<&str> = list.lines().collect();
        let symbols = symbols(&program).unwrap();
        let names: Vec<&str> = symbols.values().map(|(_, name)| &**name).collect();
        let sed = ["-f", "scripts/plain-names.sed"];
        let plain = piped("sed", &sed, &top, names.join("\n").as_bytes()).unwrap();
        let plain = String::from_utf8(plain).unwrap();
        let (mut found, mut bytes, mut starts) = (HashSet::new(), 0, Vec::new());
        for ((start, (end, _)), name) in symbols.iter().zip(plain.lines()) {
            if listed.contains(name) {
                found.insert(name);
                bytes += end - start;
                starts.push(*start);
            }
        }
        let part = found.len() * 100 / listed.len();
        assert!(part >= 60, "the program has {part} of 100 functions: run `cargo xtask order`");
        // Where 95 of 100 of them are.
        let within = starts[starts.len() * 95 / 100] - starts[0];
        assert!(within < bytes * 2, "{bytes} bytes lie within {within}");
    }
}
