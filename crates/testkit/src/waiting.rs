//! What a process and its descendants wait for, from proc_pid_wchan(5) and proc_pid_stat(5): the last
//! words of a test that passed its deadline.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;

/// Processes that are described at most.
const PROCESSES_MAX: usize = 24;
/// Characters of a command line that are shown.
const COMMAND_MAX: usize = 100;

/// One line for the process and each descendant: pid, state, kernel function, command line.
pub fn describe(pid: u32) -> String {
    let parents = parents();
    let mut lines = String::new();
    let mut next = vec![pid];
    let mut shown = 0;
    while let Some(pid) = next.pop() {
        next.extend(parents.iter().filter(|(_, parent)| **parent == pid).map(|(child, _)| *child));
        shown += 1;
        if shown > PROCESSES_MAX {
            let _ = writeln!(lines, "  (and more)");
            break;
        }
        let read = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let text = |name: &str| String::from_utf8_lossy(&read(name)).into_owned();
        let state = stat(pid).map_or('?', |(state, _)| state);
        let call = text("wchan");
        let command = text("cmdline").replace('\0', " ");
        let command: String = command.chars().take(COMMAND_MAX).collect();
        let _ = writeln!(lines, "  {pid} {state} in {call}: {}", command.trim());
    }
    lines
}

/// The parent of every process.
fn parents() -> BTreeMap<u32, u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter_map(|pid| Some((pid, stat(pid)?.1))).collect()
}

/// State and parent: the fields after the name, which ends at the last parenthesis.
fn stat(pid: u32) -> Option<(char, u32)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = text.rsplit_once(')')?.1.split_ascii_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn descendants_are_described() {
        let mut child = Command::new("sh").args(["-c", "sleep 60; true"]).spawn().unwrap();
        let begun = std::time::Instant::now();
        while !describe(child.id()).contains("sleep 60\n") && begun.elapsed().as_secs() < 30 {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let lines = describe(child.id());
        assert!(lines.contains(&format!("  {} ", child.id())), "{lines}");
        assert!(lines.lines().count() >= 2, "{lines}");
        Command::new("pkill").args(["-P", &child.id().to_string()]).status().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
