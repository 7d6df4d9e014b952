//! Bounded reads of /proc: no read exceeds the limit that the caller sets.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::OnceLock;

use crate::error::{CallError, Explain, Result};

/// Longest `/proc/PID/stat` or `status` that is read, in bytes.
const PAGE: usize = 16 * 1024;

/// The contents of a file of at most `max_bytes` bytes; EFBIG when it is longer.
pub fn read(path: impl AsRef<Path>, max_bytes: usize) -> Result<Vec<u8>> {
    let path = path.as_ref();
    let file = File::open(path).explain("open", || path.display().to_string())?;
    let mut bytes = Vec::with_capacity(max_bytes.min(PAGE) + 1);
    // LIMIT: one byte more is requested, to detect the end of the file.
    file.take(max_bytes as u64 + 1)
        .read_to_end(&mut bytes)
        .explain("read", || path.display().to_string())?;
    if bytes.len() > max_bytes {
        let arguments = format!("{}, {max_bytes}", path.display());
        return Err(CallError::new("read", arguments, libc::EFBIG));
    }
    Ok(bytes)
}

/// Reads a whole file of the kernel as text. Such files report no size, so
/// [`std::fs::read_to_string`] would query the size and then read in pieces of thirty bytes; this
/// function needs two reads.
pub fn whole_text(path: impl AsRef<Path>) -> std::io::Result<String> {
    let mut bytes = Vec::with_capacity(PAGE);
    // Without a limit [`File`] would query the size.
    File::open(path)?.take(u64::MAX).read_to_end(&mut bytes)?;
    String::from_utf8(bytes).map_err(|e| std::io::Error::new(std::io::ErrorKind::InvalidData, e))
}

/// The same as text; EILSEQ if it is not UTF-8.
pub fn read_text(path: impl AsRef<Path>, max_bytes: usize) -> Result<String> {
    let path = path.as_ref();
    String::from_utf8(read(path, max_bytes)?)
        .map_err(|_| CallError::new("read", path.display().to_string(), libc::EILSEQ))
}

/// A number that is new with every boot of the host (random(4)), 36 characters. It is read once.
pub fn boot_id() -> Result<&'static str> {
    static BOOT_ID: OnceLock<String> = OnceLock::new();
    if let Some(id) = BOOT_ID.get() {
        return Ok(id);
    }
    let id = read_text("/proc/sys/kernel/random/boot_id", 64)?;
    Ok(BOOT_ID.get_or_init(|| id.trim().to_owned()))
}

/// The idle time of all CPUs since the boot, in nanoseconds (`/proc/uptime`, proc_uptime(5)). The kernel counts it in
/// hundredths of a second.
pub fn idle_ns() -> Result<u64> {
    const PATH: &str = "/proc/uptime";
    let text = read_text(PATH, 128)?;
    idle_of(&text).ok_or_else(|| CallError::new("read", PATH.into(), libc::EINVAL))
}

/// The second number of `/proc/uptime`, which has two decimals, in nanoseconds.
fn idle_of(text: &str) -> Option<u64> {
    let (seconds, hundredths) = text.split_whitespace().nth(1)?.split_once('.')?;
    let hundredths = Some(hundredths).filter(|it| it.len() == 2)?.parse::<u64>().ok()?;
    seconds.parse::<u64>().ok()?.checked_mul(100)?.checked_add(hundredths)?.checked_mul(10_000_000)
}

/// The CPUs that are online, in the kernel's list format (Documentation/admin-guide/cputopology.rst).
pub fn online_cpus() -> Result<String> {
    read_text("/sys/devices/system/cpu/online", 1 << 16)
}

/// The CPUs that can come online before the next boot, in the same format.
pub fn possible_cpus() -> Result<String> {
    read_text("/sys/devices/system/cpu/possible", 1 << 16)
}

/// The runs of a list of CPUs such as `0-3,8`, in ascending order, with no CPU twice; `None` where it is no such list.
pub fn cpu_runs(list: &str) -> Option<Vec<(u32, u32)>> {
    let number = |text: &str| {
        // parse() would take a sign.
        text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse::<u32>().ok())?
    };
    let run = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        // LIMIT: no kernel has more CPUs (CONFIG_NR_CPUS is 8192 at most).
        (first <= last && last < 65_536).then_some((first, last))
    };
    let mut given = list.split(',').map(run).collect::<Option<Vec<_>>>()?;
    given.sort_unstable();
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for (first, last) in given {
        match runs.last_mut() {
            Some(before) if first <= before.1 => before.1 = before.1.max(last),
            _ => runs.push((first, last)),
        }
    }
    Some(runs)
}

/// The fields of `/proc/PID/stat` (proc_pid_stat(5)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// The letter of the state: `R`, `S`, `D`, `T`, `t`, `Z`, `X` or `I`.
    pub state: char,
    /// Process id of the parent, 0 when it is not visible.
    pub ppid: u32,
    /// Start time in clock ticks since boot. Together with the boot id and the pid it identifies
    /// one process permanently.
    pub start_time: u64,
    /// The process was killed by a signal or is exiting; it may have all its resources still.
    pub is_exiting: bool,
    /// SIGKILL was sent to the process. It may not have taken the signal yet. KERNEL(5.17): false before, and without
    /// the right to trace the process.
    pub is_killed: bool,
}

const SIGKILL: i32 = 9;

/// The flags of a task that ends: `PF_SIGNALED`, from the moment when a deadly signal is taken, and
/// `PF_EXITING` (the kernel's `linux/sched.h`).
const EXITING: u32 = 0x400 | 0x4;

impl Stat {
    /// Returns whether it has exited; it may be waiting to be reaped.
    pub fn is_zombie(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x')
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        // The second field is the program's name in parentheses, and may contain any of them: the
        // last closing one ends it.
        let end = bytes.iter().rposition(|&byte| byte == b')')?;
        let mut fields = std::str::from_utf8(&bytes[end + 1..]).ok()?.split_ascii_whitespace();
        Some(Self {
            state: fields.next()?.chars().next()?,
            ppid: fields.next()?.parse().ok()?,
            is_exiting: fields.nth(4)?.parse::<u32>().ok()? & EXITING != 0,
            start_time: fields.nth(12)?.parse().ok()?,
            // `exit_code`, which the kernel sets for the group with the signal.
            is_killed: fields.nth(29).and_then(|code| code.parse().ok()) == Some(SIGKILL),
        })
    }
}

/// Reads state, parent and start time of a process at once. ESRCH if there is none.
pub fn status(pid: u32) -> Result<Stat> {
    let path = format!("/proc/{pid}/stat");
    let bytes = read(&path, PAGE).map_err(gone)?;
    Stat::parse(&bytes).ok_or_else(|| CallError::new("parse", path, libc::EBADMSG))
}

/// Returns whether a process ends: it was killed, is exiting, or is not there. `fields` were read just before.
///
/// ORDER: as a killed process passes through them. SIGKILL is pending, then it is taken, which the flags of the task
/// show.
pub fn is_ending(pid: u32, fields: &Fields) -> bool {
    let is_ending = status(pid).map_or(true, |stat| stat.is_exiting || stat.is_killed);
    let pending = ["SigPnd", "ShdPnd"].into_iter().filter_map(|name| fields.mask(name));
    is_ending || pending.fold(0, |all, mask| all | mask) & (1 << (SIGKILL - 1)) != 0
}

/// Returns the start time of the process, in clock ticks since boot. ESRCH if there is none.
pub fn start_time(pid: u32) -> Result<u64> {
    Ok(status(pid)?.start_time)
}

/// A file of /proc/PID that is not there means that the process is not.
fn gone(error: CallError) -> CallError {
    match error.errno() {
        libc::ENOENT => CallError::new(error.call(), error.arguments().to_owned(), libc::ESRCH),
        _ => error,
    }
}

/// The fields of `/proc/PID/status` (proc_pid_status(5)).
#[derive(Debug, Clone)]
pub struct Fields(String);

/// Reads `/proc/PID/status`; ESRCH when there is no such process.
pub fn fields(pid: u32) -> Result<Fields> {
    read_text(format!("/proc/{pid}/status"), PAGE).map(Fields).map_err(gone)
}

impl Fields {
    /// The text of a field, such as `"Name"`.
    pub fn field(&self, name: &str) -> Option<&str> {
        let value = |line: &'_ str| -> Option<usize> {
            line.strip_prefix(name)?.strip_prefix(':').map(|rest| line.len() - rest.len())
        };
        self.0.lines().find_map(|line| value(line).map(|at| line[at..].trim()))
    }

    /// Returns a field with a decimal number as its value; a unit after it is ignored.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.field(name)?.split_ascii_whitespace().next()?.parse().ok()
    }

    /// Returns a field with a hexadecimal mask as its value, such as `"CapEff"`.
    pub fn mask(&self, name: &str) -> Option<u64> {
        u64::from_str_radix(self.field(name)?, 16).ok()
    }

    /// The pid in each nested pid namespace, the reader's own first.
    pub fn pids(&self) -> Vec<u32> {
        let field = self.field("NSpid").unwrap_or_default();
        field.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_stat_fields_are_correct() {
        let fields = fields(std::process::id()).unwrap();
        assert_eq!(fields.pids(), [std::process::id()]);
        assert_eq!(fields.number("Tgid"), Some(u64::from(std::process::id())));
        assert!(fields.field("Nam").is_none(), "a prefix is not a field");
    }

    #[test]
    fn idle_time_is_read_in_hundredths_of_a_second() {
        assert_eq!(idle_of("12.34 56.07\n"), Some(56_070_000_000));
        for bad in [
            "",
            "12.34",
            "12.34 56",
            "12.34 56.7",
            "12.34 56.078",
            "1.00 x.00",
            "1.00 99999999999999999999.00",
        ] {
            assert_eq!(idle_of(bad), None, "{bad}");
        }
        let before = idle_ns().unwrap();
        assert!(idle_ns().unwrap() >= before);
    }

    #[test]
    fn runs_of_cpus_are_in_order_and_have_no_cpu_twice() {
        assert_eq!(cpu_runs("0-3,8"), Some(vec![(0, 3), (8, 8)]));
        assert_eq!(cpu_runs("8,2-3,0-2,1"), Some(vec![(0, 3), (8, 8)]));
        for bad in ["", "a", "0,", "1-", "-1", "3-1", "+1", "0-65536", "0 1", "0\n"] {
            assert_eq!(cpu_runs(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn own_status_fields_are_correct() {
        let stat = status(std::process::id()).unwrap();
        assert_eq!(stat.ppid, std::os::unix::process::parent_id());
        assert!(stat.start_time > 0 && !stat.is_zombie());
    }

    #[test]
    fn killed_process_ends_from_the_signal_on() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let ends = || fields(child.id()).map_or(true, |fields| is_ending(child.id(), &fields));
        assert!(!ends());
        crate::pidfd::send_signal(crate::pidfd::open(child.id()).unwrap(), SIGKILL).unwrap();
        for _ in 0..100 {
            assert!(ends());
        }
        child.wait().unwrap();
    }

    #[test]
    fn hostile_program_name_does_not_shift_fields() {
        let line = b"7 (a) Z 1 2 3) S 4 7 7 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 777 1 2\n";
        let (is_exiting, is_killed) = (false, false);
        let stat = Stat { state: 'S', ppid: 4, start_time: 777, is_exiting, is_killed };
        assert_eq!(Stat::parse(line), Some(stat));
        assert_eq!(Stat::parse(b"7 (a"), None);
        assert_eq!(Stat::parse(b"7 (a) S 4 7"), None);
    }

    proptest::proptest! {
        #[test]
        fn any_program_name_is_passed_over(
            name in proptest::collection::vec(proptest::num::u8::ANY, 0..16),
            ppid in 0u32..=u32::MAX,
            start_time in 0u64..=u64::MAX,
            flags in 0u32..=u32::MAX,
        ) {
            let mut line = b"7 (".to_vec();
            line.extend(name);
            line.extend(format!(") R {ppid} 1 1 0 -1 {flags} 1 0 0 0 0 0 0 0 20 0 1 0 ").bytes());
            line.extend(format!("{start_time} 1 2 3\n").bytes());
            let (is_exiting, is_killed) = (flags & EXITING != 0, false);
            let stat = Stat { state: 'R', ppid, start_time, is_exiting, is_killed };
            proptest::prop_assert_eq!(Stat::parse(&line), Some(stat));
        }

        #[test]
        fn any_bytes_are_parsed_or_refused(
            bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300),
        ) {
            let _ = Stat::parse(&bytes); // returns for any input
        }
    }

    #[test]
    fn long_file_is_refused() {
        assert_eq!(read("/proc/self/status", 10).unwrap_err().errno(), libc::EFBIG);
    }

    #[test]
    fn missing_process_is_not_found() {
        assert_eq!(start_time(u32::MAX).unwrap_err().errno(), libc::ESRCH);
        assert_eq!(boot_id().unwrap().len(), 36);
    }
}
