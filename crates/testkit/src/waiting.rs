//! What a process waits for, its descendants, and the processes that they trace: the last words of a test that passed
//! its deadline. From proc_pid_wchan(5), proc_pid_stack(5), proc_pid_syscall(5) and proc_pid_status(5).
//!
//! A restore waits for processes that it traces, and these are children of the keeper: by the parents alone the cause
//! of a hang would not be among the described.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;

/// Processes that are described at most.
const PROCESSES_MAX: usize = 24;
/// Characters of a command line that are shown.
const COMMAND_MAX: usize = 100;
/// Kernel functions of a task that are shown.
const FUNCTIONS_MAX: usize = 6;

/// The processes that a process is known by.
struct Relatives {
    parent: u32,
    /// A thread of its tracer; 0 if it has none.
    tracer: u32,
}

/// One line for the process, each descendant, and each process that one of these traces: pid, state, kernel functions
/// from the innermost on, number of the system call, command line. Lines of threads that are not the first follow.
pub fn describe(pid: u32) -> String {
    let all = relatives();
    let mut lines = String::new();
    let (mut next, mut known) = (vec![pid], BTreeSet::from([pid]));
    let mut shown = 0;
    while let Some(pid) = next.pop() {
        shown += 1;
        if shown > PROCESSES_MAX {
            let _ = writeln!(lines, "  (and more)");
            break;
        }
        let threads = threads(pid);
        let is_next = |it: &Relatives| it.parent == pid || threads.contains(&it.tracer);
        let found = all.iter().filter(|(_, it)| is_next(it)).map(|(pid, _)| *pid);
        next.extend(found.filter(|pid| known.insert(*pid)));
        let read = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let command = String::from_utf8_lossy(&read("cmdline")).replace('\0', " ");
        let command: String = command.chars().take(COMMAND_MAX).collect();
        let tracer = match all.get(&pid).map_or(0, |it| it.tracer) {
            0 => String::new(),
            tracer => format!(" (traced by {tracer})"),
        };
        let _ = writeln!(lines, "  {pid} {}{tracer}: {}", place(pid, pid), command.trim());
        for tid in threads.into_iter().filter(|tid| *tid != pid) {
            let _ = writeln!(lines, "    thread {tid} {}", place(pid, tid));
        }
    }
    lines
}

/// State of a thread, the kernel functions that it is in, and its system call.
fn place(pid: u32, tid: u32) -> String {
    let text = |name: &str| {
        fs::read_to_string(format!("/proc/{pid}/task/{tid}/{name}")).unwrap_or_default()
    };
    let state = stat(&text("stat")).map_or('?', |(state, _)| state);
    // Lines such as `[<0>] do_wait+0x5f/0xf0`; the outermost are of the entry to every call.
    let stack = text("stack");
    let names = stack.lines().filter_map(|line| Some(line.split_once(' ')?.1.split_once('+')?.0));
    let names = names.take_while(|name| *name != "do_syscall_64").take(FUNCTIONS_MAX);
    let names: Vec<&str> = names.collect();
    let functions = if names.is_empty() { text("wchan") } else { names.join(" < ") };
    // The number and the arguments, `running`, or -1 outside a call.
    let call = text("syscall");
    let call = call.split_ascii_whitespace().next().unwrap_or("?");
    format!("{state} in {functions} (call {call})")
}

fn threads(pid: u32) -> BTreeSet<u32> {
    numbers(&format!("/proc/{pid}/task")).collect()
}

/// The entries of a directory that are numbers.
fn numbers(dir: &str) -> impl Iterator<Item = u32> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The relatives of every process.
fn relatives() -> BTreeMap<u32, Relatives> {
    let of = |pid: u32| {
        let text = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}"));
        let parent = stat(&text("stat").ok()?)?.1;
        let status = text("status").unwrap_or_default();
        let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
        let tracer = tracer.and_then(|number| number.trim().parse().ok()).unwrap_or(0);
        Some((pid, Relatives { parent, tracer }))
    };
    numbers("/proc").filter_map(of).collect()
}

/// State and parent: the fields after the name, which ends at the last parenthesis.
fn stat(text: &str) -> Option<(char, u32)> {
    let mut fields = text.rsplit_once(')')?.1.split_ascii_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use dormouse_kernel::call::{self, TraceOptions};

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

    #[test]
    fn traced_processes_are_described_that_are_no_descendants() {
        // Its parent has exited.
        let script = "sleep 60 >/dev/null 2>&1 & echo $!";
        let orphan = Command::new("sh").args(["-c", script]).output();
        let orphan: u32 =
            String::from_utf8(orphan.unwrap().stdout).unwrap().trim().parse().unwrap();
        let line = format!("  {orphan} ");
        assert!(!describe(std::process::id()).contains(&line));
        // The tracer is a thread that is not the first.
        call::seize(orphan, TraceOptions::EXIT_KILL).unwrap();
        let lines = describe(std::process::id());
        let described = lines.lines().find(|it| it.starts_with(&line)).expect("is described");
        assert!(described.contains(" (traced by "), "{lines}");
        assert!(lines.lines().any(|it| it.starts_with("    thread ")), "{lines}");
    }
}
