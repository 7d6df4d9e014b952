//! Properties of processes and threads in procfs: stat, limits, personality, and times in their memory.

use dormouse_kernel::{call, proc};
use dormouse_record::{Error, Limit, Result};

/// A task's stat (proc_pid_stat(5)).
#[derive(Debug)]
pub(crate) struct Stat(String);

/// Reads the stat of a task.
pub(crate) fn stat(pid: u32, tid: u32) -> Option<Stat> {
    proc::whole_text(format!("/proc/{pid}/task/{tid}/stat")).ok().map(Stat)
}

impl Stat {
    /// Field `number`, as the manual counts, from the third on.
    pub(crate) fn field(&self, number: usize) -> Option<&str> {
        let rest = self.0.rsplit_once(')')?.1;
        rest.split_ascii_whitespace().nth(number.checked_sub(3)?)
    }
}

/// Reads one field of a task's stat.
pub(crate) fn stat_field(pid: u32, tid: u32, number: usize) -> Option<String> {
    stat(pid, tid)?.field(number).map(str::to_owned)
}

/// The personality(2) that a thread or one of its ancestors has set.
pub(crate) fn personality(pid: u32, tid: u32) -> u32 {
    let text = proc::whole_text(format!("/proc/{pid}/task/{tid}/personality"));
    text.ok().and_then(|t| u32::from_str_radix(t.trim(), 16).ok()).unwrap_or(0)
}

/// Limits in the order of `/proc/PID/limits`, with the kernel's numbers (getrlimit(2)).
///
/// prlimit(2) is of no use: for a process of another user it requires CAP_SYS_RESOURCE.
const LIMITS: [(&str, u32); 16] = [
    ("Max cpu time", 0),
    ("Max file size", 1),
    ("Max data size", 2),
    ("Max stack size", 3),
    ("Max core file size", 4),
    ("Max resident set", 5),
    ("Max processes", 6),
    ("Max open files", 7),
    ("Max locked memory", 8),
    ("Max address space", 9),
    ("Max file locks", 10),
    ("Max pending signals", 11),
    ("Max msgqueue size", 12),
    ("Max nice priority", 13),
    ("Max realtime priority", 14),
    ("Max realtime timeout", 15),
];

/// The limits of a process.
pub(crate) fn limits(pid: u32) -> Result<Vec<Limit>> {
    let path = format!("/proc/{pid}/limits");
    let text = proc::whole_text(&path).map_err(Error::file("cannot read", path))?;
    let value = |word: Option<&str>| match word {
        Some("unlimited") => Some(u64::MAX),
        Some(word) => word.parse().ok(),
        None => None,
    };
    let row = |(name, resource): &(&str, u32)| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let mut words = line.split_ascii_whitespace();
        let (soft, hard) = (value(words.next())?, value(words.next())?);
        Some(Limit { resource: *resource, soft, hard })
    };
    Ok(LIMITS.iter().filter_map(row).collect())
}

/// Reads seconds and a fraction, in units of `part_ns` nanoseconds, from the memory of a process; as
/// nanoseconds.
pub(crate) fn time_at(pid: u32, address: u64, part_ns: u64) -> Option<u64> {
    let mut bytes = [0; 16];
    let read = call::read_memory(pid, &mut bytes, &[(address, 16)]).ok()?;
    let [seconds, part] = numbers(&bytes);
    let part = part.saturating_mul(part_ns);
    (read == 16).then(|| seconds.saturating_mul(1_000_000_000).saturating_add(part))
}

/// Decodes the first `N` 64-bit numbers.
fn numbers<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let mut all = [0; N];
    for (number, eight) in all.iter_mut().zip(bytes.chunks_exact(8)) {
        *number = u64::from_ne_bytes(eight.try_into().unwrap_or([0; 8])); // eight by the iterator
    }
    all
}
