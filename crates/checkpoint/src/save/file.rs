//! Files and directories with a name, devices without state, and files of the engine.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd};

use dormouse_record::{
    Area, Backing, Device, External, File, LockKind, PROGRAMS, ProcessFile, Thing,
};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};

use super::known::file::Mapped;
use super::open::Open;
use super::refusal::Reason;
use super::seen::Seen;
use super::subject::Subject;
use super::survey::Survey;
use super::{deleted, lock};
use crate::look;
use crate::look::file::{lookup, modified_ns, mount_of};
use crate::look::mountinfo;

/// Devices without state per open file, by number (null(4), random(4)).
const DEVICES: [(u32, u32, &str); 5] =
    [(1, 3, "null"), (1, 5, "zero"), (1, 7, "full"), (1, 8, "random"), (1, 9, "urandom")];

fn file_type(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// The file as one of the engine's, by its identity.
pub(crate) fn external(subject: &Subject, open: &Open<'_>) -> Option<Thing> {
    let identity = (open.stat.st_dev, open.stat.st_ino);
    let mut all = subject.outside.iter().filter(|o| o.identity == identity);
    let first = all.clone().next()?;
    let found = all.find(|o| o.number == Some(open.number)).unwrap_or(first);
    Some(Thing::External(External { name: found.name.clone(), flags: open.flags() }))
}

pub(crate) fn is_device(open: &Open<'_>) -> bool {
    file_type(&open.stat) == FileType::CharacterDevice && open.link.starts_with('/')
}

pub(crate) fn device(_: &mut Survey<'_>, open: &Open<'_>) -> Result<Thing, Reason> {
    device_of(&open.stat, open.flags())
        .ok_or_else(|| format!("the device '{}', which is not saved yet", open.link))
}

fn device_of(stat: &Stat, flags: u32) -> Option<Thing> {
    let number = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
    let known = DEVICES.iter().find(|(major, minor, _)| (*major, *minor) == number)?;
    Some(Thing::Device(Device { name: known.2.to_owned(), flags }))
}

/// Whether the container of a process has the device `/dev/zero`, by that name.
pub(crate) fn has_zero(pid: u32) -> bool {
    let found = lookup(pid, "/dev/zero").and_then(rustix::fs::fstat);
    found.is_ok_and(|stat| {
        let is_character = file_type(&stat) == FileType::CharacterDevice;
        let zero = Device { name: "zero".to_owned(), flags: 0 };
        is_character && device_of(&stat, 0) == Some(Thing::Device(zero))
    })
}

pub(crate) fn is_file(open: &Open<'_>) -> bool {
    let known = [FileType::RegularFile, FileType::Directory];
    let is_place = open.flags() & libc::O_PATH as u32 != 0;
    open.link.starts_with('/') && (is_place || known.contains(&file_type(&open.stat)))
}

pub(crate) fn save(survey: &mut Survey<'_>, open: &Open<'_>) -> Result<Thing, Reason> {
    let mut locks = lock::of(&open.info)?;
    locks.retain(|lock| lock.kind != LockKind::Process);
    let mut flags =
        open.flags() & !(libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC | libc::O_NOCTTY) as u32;
    if let Some(lease) = lock::lease(open)? {
        flags &= !libc::O_ASYNC as u32; // a lease sets it
        // The kernel makes one of a lease for writing that was not given up in time, and sets none on such a file.
        let is_writable = matches!(flags as i32 & libc::O_ACCMODE, libc::O_WRONLY | libc::O_RDWR);
        if is_writable && !lease.writes {
            return Err(format!(
                "'{}' with a lease for reading (F_SETLEASE) that was one for writing, not saved yet",
                open.link
            ));
        }
        // A read of the contents would break a lease for writing. A memfd that is opened again permits none.
        let has_contents = is_deleted(&open.link, &open.stat) || is_in_memory(open);
        // A lease needs the owner of the file, and procfs shows another one while a task is restored.
        let is_of_procfs = is_of_procfs(open.copy.as_fd());
        if is_of_procfs || has_contents && (lease.writes || open.link.starts_with(deleted::MEMORY))
        {
            return Err(format!("'{}' with a lease (F_SETLEASE), not saved yet", open.link));
        }
    }
    if flags & libc::O_ASYNC as u32 != 0 {
        return Err(format!("'{}', which signals when it is ready (O_ASYNC)", open.link));
    }
    // As with a lease.
    if flags & libc::O_NOATIME as u32 != 0 && is_of_procfs(open.copy.as_fd()) {
        return Err(format!("'{}' opened with O_NOATIME, which is not saved yet", open.link));
    }
    if locks.is_empty()
        && is_of_procfs(open.copy.as_fd())
        && let Some((pid, path)) = of_process(survey, open)
    {
        is_there(open.process.first, name_of_net(&open.link).unwrap_or(&open.link), &open.stat)?;
        let file_type = open.stat.st_mode & libc::S_IFMT;
        let file = ProcessFile { pid, path, flags, offset: open.offset(), file_type };
        check_reader(survey, open.process, &file)?;
        return Ok(Thing::ProcessFile(file));
    }
    let file = found(survey, open.process, &open.link, &open.stat, open.copy.as_fd())?;
    // An error of a place, which has none.
    let write_hint = dormouse_kernel::call::write_hint(open.copy.as_fd()).unwrap_or(0);
    let write_hint = if write_hint <= File::WRITE_HINT_MAX { write_hint } else { 0 };
    Ok(Thing::File(File { flags, offset: open.offset(), locks, write_hint, ..file }))
}

/// Whether a file is one of a tmpfs, whose contents are saved.
fn is_in_memory(open: &Open<'_>) -> bool {
    const TMPFS: u64 = 0x0102_1994;
    rustix::fs::fstatfs(&open.copy).is_ok_and(|of| of.f_type as u64 == TMPFS)
}

fn is_of_procfs(open: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatfs(open).is_ok_and(|of| of.f_type == look::file::PROCFS)
}

/// A file that can be found again: by its name, which is looked up and must lead to the same file;
/// or, if it is deleted, as an object of its own. `open` refers to the file.
fn found(
    survey: &mut Survey<'_>,
    seen: &Seen,
    link: &str,
    stat: &Stat,
    open: BorrowedFd<'_>,
) -> Result<File, Reason> {
    if link.starts_with("/SYSV") {
        return Err(format!("the memory '{link}', which is not saved yet"));
    }
    let is_of_procfs = is_of_procfs(open);
    let link = if is_of_procfs { name_of_net(link).unwrap_or(link) } else { link };
    if is_of_procfs {
        check_process_file(survey, seen, link, stat)?;
    }
    let apart = survey.mounts.of_file(open);
    let witness = apart.map_or(seen.first, |(witness, _)| witness);
    let renamed = if is_of_procfs { None } else { other_name(witness, link, stat) };
    let link = renamed.as_deref().unwrap_or(link);
    let file = File {
        path: link.to_owned(),
        flags: 0,
        offset: 0,
        file_type: stat.st_mode & libc::S_IFMT,
        bytes: stat.st_size as u64,
        // procfs shows the moment at which the kernel made its inode.
        modified_ns: if is_of_procfs { 0 } else { modified_ns(stat) },
        unchanged: false,
        deleted: None,
        namespace: apart.map(|(_, namespace)| namespace),
        locks: Vec::new(),
        write_hint: 0,
    };
    if is_deleted(link, stat) {
        if apart.is_some() && file_type(stat) == FileType::Directory {
            return Err(format!(
                "the deleted directory '{link}' in a mount namespace of its own, not saved yet"
            ));
        }
        let deleted = deleted::object(survey, seen, link, stat, open)?;
        return Ok(File { deleted: Some(deleted), namespace: None, ..file });
    }
    is_there(witness, link, stat).map_err(|why| covered(witness, link, open).unwrap_or(why))?;
    Ok(file)
}

/// The reason for a file that another mount covers; `None` if none does. `open` refers to the file.
pub(crate) fn covered(pid: u32, link: &str, open: BorrowedFd<'_>) -> Option<Reason> {
    let rows = mountinfo::rows(pid)?;
    let own = mount_of(open).ok()?;
    // Of several mounts at a place the last one listed is seen.
    let above = rows.iter().filter(|row| mountinfo::below(link, &row.place).is_some());
    let top = above.max_by_key(|row| row.place.len())?;
    (top.id != own && rows.iter().any(|row| row.id == own)).then(|| {
        format!(
            "'{link}', which the mount of {} at '{}' covers, not saved yet",
            top.kind, top.place
        )
    })
}

/// LIMIT: entries of a directory in which another name is sought.
const ENTRIES_MAX: usize = 4096;

/// Another name of a file in the directory of its deleted name. The C library makes a named semaphore under one
/// name, and links it to that of the program (sem_open(3)).
fn other_name(pid: u32, link: &str, stat: &Stat) -> Option<String> {
    let deleted = link.strip_suffix(" (deleted)")?;
    if stat.st_nlink == 0 || file_type(stat) != FileType::RegularFile {
        return None;
    }
    let (directory, _) = deleted.rsplit_once('/')?;
    let place = lookup(pid, if directory.is_empty() { "/" } else { directory }).ok()?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let listed = rustix::fs::openat(&place, ".", flags, Mode::empty()).ok()?;
    let entries = rustix::fs::Dir::new(listed).ok()?.take(ENTRIES_MAX).flatten();
    let is_it = |name: &str| {
        let found = rustix::fs::statat(&place, name, AtFlags::SYMLINK_NOFOLLOW);
        found.is_ok_and(|found| (found.st_dev, found.st_ino) == (stat.st_dev, stat.st_ino))
    };
    let mut names = entries.filter_map(|entry| entry.file_name().to_str().ok().map(str::to_owned));
    names.find(|name| is_it(name)).map(|name| format!("{directory}/{name}"))
}

/// The name of a file below `/proc/PID/net`. The kernel looks each name up anew there, after which the link of an
/// open file reads as if the file were deleted.
fn name_of_net(link: &str) -> Option<&str> {
    let name = link.strip_suffix(" (deleted)")?;
    let of_process = name.strip_prefix("/proc/").filter(|rest| rest.starts_with(DIGITS))?;
    of_process.split('/').any(|part| part == "net").then_some(name)
}

/// The process that an open file of procfs is of, and its path below that one's directory: if it is a living process
/// but the first, and no thread or descriptor of it, which a restore makes later.
fn of_process(survey: &mut Survey<'_>, open: &Open<'_>) -> Option<(u32, String)> {
    let link = name_of_net(&open.link).unwrap_or(&open.link);
    let rest = link.strip_prefix("/proc/")?;
    let (pid, path) = rest.split_once('/').unwrap_or((rest, ""));
    let pid: u32 = pid.parse().ok()?;
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let is_place = open.flags() & libc::O_PATH as u32 != 0;
    let is_whole = !path.split('/').any(is_number) && !is_deleted(link, &open.stat);
    // A task that is being restored is not dumpable: its files are those of the host's root (proc(5)).
    let is_reader = open.flags() as i32 & libc::O_ACCMODE == libc::O_RDONLY;
    let is_for_all = is_reader && open.stat.st_mode & 0o004 != 0;
    let is_apart = survey.mounts.of_file(open.copy.as_fd()).is_some();
    let is_sound = is_whole && is_for_all && !is_place && !is_apart;
    (is_sound && !is_made_first(survey, open.process, pid)).then(|| (pid, path.to_owned()))
}

/// Files of a process that any other may open, and that show its state when they are read.
const OF_ANY: [&str; 16] = [
    "",
    "autogroup",
    "cgroup",
    "cmdline",
    "comm",
    "cpuset",
    "limits",
    "loginuid",
    "oom_adj",
    "oom_score",
    "oom_score_adj",
    "sched",
    "sessionid",
    "stat",
    "statm",
    "status",
];
/// Files that only the process itself may open while it is restored, since it is not dumpable (ptrace(2), access mode
/// checking).
const OF_ITSELF: [&str; 5] = ["maps", "numa_maps", "smaps", "smaps_rollup", "timers"];

/// Refuses a file of procfs that a process could not open while it is restored, or that keeps what its process has
/// at the open: namespaces, a root.
pub(crate) fn check_reader(
    survey: &mut Survey<'_>,
    seen: &Seen,
    file: &ProcessFile,
) -> Result<(), Reason> {
    let path = file.path.as_str();
    let is_own = seen.fields.pids().last() == Some(&file.pid);
    // LIMIT: which network namespace such a file shows is not known where there are several.
    if (path == "net" || path.starts_with("net/")) && survey.nets.by_link.is_empty() {
        return Ok(());
    }
    if OF_ANY.contains(&path) || is_own && OF_ITSELF.contains(&path) {
        return Ok(());
    }
    Err(survey.passing(of_another(&file.whole_path())))
}

fn of_another(link: &str) -> String {
    format!("'{link}', which is of a process, not saved yet but of the first")
}

/// Whether a process exists before the objects of a restore are made.
fn is_made_first(survey: &Survey<'_>, seen: &Seen, pid: u32) -> bool {
    let fields = dormouse_kernel::proc::fields(seen.first).ok();
    let first = fields.and_then(|fields| fields.pids().last().copied());
    first == Some(pid) || survey.subject.has_init && PROGRAMS.contains(&pid)
}

/// Refuses what procfs has of another process than the first, if it is mapped or a directory of a process: objects
/// are made before there is another. An open file of it is a [`ProcessFile`].
fn check_process_file(
    survey: &mut Survey<'_>,
    seen: &Seen,
    link: &str,
    stat: &Stat,
) -> Result<(), Reason> {
    let mut numbers = link.split('/').filter_map(|part| part.parse::<u32>().ok());
    // Below other directories of it, such as `irq`, numbers are no processes.
    let is_elsewhere = link.strip_prefix("/proc/").is_some_and(|rest| !rest.starts_with(DIGITS));
    let has_ended = is_deleted(link, stat);
    let is_first = |pid| is_made_first(survey, seen, pid);
    let is_of_another = match numbers.next() {
        None => has_ended,
        Some(_) if is_elsewhere => false,
        // A number behind it is one of a thread or a descriptor, which come later.
        Some(pid) => has_ended || !is_first(pid) || numbers.any(|tid| tid != pid),
    };
    if !is_of_another {
        return Ok(());
    }
    // Most processes have it open for a moment, to read it.
    Err(survey.passing(of_another(link)))
}

const DIGITS: [char; 10] = ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9'];

/// Whether a file is found by its name, below the root of a process.
pub(crate) fn is_there(pid: u32, link: &str, stat: &Stat) -> Result<(), Reason> {
    let there = lookup(pid, link).map_err(|e| format!("the file '{link}' is not found: {e}"))?;
    let there = rustix::fs::fstat(&there).map_err(|e| format!("the file '{link}': {e}"))?;
    if (there.st_dev, there.st_ino) != (stat.st_dev, stat.st_ino) {
        return Err(format!("'{link}', which is another file by that name now"));
    }
    Ok(())
}

/// Whether a file is deleted. A name may also end with the kernel's suffix by itself.
fn is_deleted(link: &str, stat: &Stat) -> bool {
    stat.st_nlink == 0 || link.ends_with(" (deleted)")
}

/// The root of a process, if it differs from the container's (chroot(2)).
pub(crate) fn root(survey: &Survey<'_>, seen: &Seen) -> Result<Option<String>, Reason> {
    let place = format!("/proc/{}/root", seen.pid);
    let link = fs::read_link(&place).map_err(|e| format!("it cannot be read: {e}"))?;
    let link = link.to_string_lossy().into_owned();
    if link == "/" {
        return Ok(None);
    }
    let stat = rustix::fs::stat(&place).map_err(|e| format!("it cannot be read: {e}"))?;
    if is_deleted(&link, &stat) {
        return Err(format!("'{link}': a root that was removed, which is not saved yet"));
    }
    is_there(survey.mounts.witness(seen), &link, &stat)?;
    Ok(Some(link))
}

/// The working directory of a process.
pub(crate) fn directory(survey: &mut Survey<'_>, seen: &Seen) -> Result<usize, Reason> {
    directory_of(survey, seen, seen.pid)
}

/// The working directory of a thread.
pub(crate) fn directory_of(
    survey: &mut Survey<'_>,
    seen: &Seen,
    tid: u32,
) -> Result<usize, Reason> {
    let at = |name: &str| format!("/proc/{}/task/{tid}/{name}", seen.pid);
    let link = fs::read_link(at("cwd")).map_err(|e| format!("it cannot be read: {e}"))?;
    let link = link.to_string_lossy().into_owned();
    let flags = (libc::O_PATH | libc::O_DIRECTORY) as u32;
    let open = rustix::fs::open(at("cwd"), OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let open = open.map_err(|e| format!("it cannot be read: {e}"))?;
    let namespace = survey.mounts.of_file(open.as_fd()).map(|(_, namespace)| namespace);
    if let Some(index) = survey.named.get(&(link.clone(), flags, namespace)) {
        return Ok(*index);
    }
    let stat = rustix::fs::fstat(&open).map_err(|e| format!("it cannot be read: {e}"))?;
    let file = found(survey, seen, &link, &stat, open.as_fd())?;
    let is_named = file.deleted.is_none();
    let index = survey.add(Thing::File(File { flags, ..file }));
    // Several files may have had one name, one after the other.
    if is_named {
        survey.named.insert((link, flags, namespace), index);
    }
    Ok(index)
}

/// A mapped file, or the program, opened again for that. `place` is a link to it.
pub(crate) fn mapped(
    survey: &mut Survey<'_>,
    seen: &Seen,
    link: &str,
    place: &str,
    writes: bool,
) -> Result<usize, Reason> {
    let flags = (if writes { libc::O_RDWR } else { libc::O_RDONLY }) as u32;
    let open = rustix::fs::open(place, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let open = open.map_err(|e| format!("it cannot be inspected: {e}"))?;
    let stat = rustix::fs::fstat(&open).map_err(|e| format!("it cannot be inspected: {e}"))?;
    if file_type(&stat) != FileType::RegularFile {
        return Err(format!("'{link}' mapped, which is not saved yet"));
    }
    // A deleted file is identified by device and inode.
    let name = match is_deleted(link, &stat) {
        true => format!("{:x}:{:x}", stat.st_dev, stat.st_ino),
        false => link.to_owned(),
    };
    let namespace = survey.mounts.of_file(open.as_fd()).map(|(_, namespace)| namespace);
    if let Some(index) = survey.named.get(&(name.clone(), flags, namespace)) {
        return Ok(*index);
    }
    let file = found(survey, seen, link, &stat, open.as_fd())?;
    // A view over a file of procfs or sysfs shows the present, also after a restore.
    let is_view = ["/proc/", "/sys/"].iter().any(|above| link.starts_with(above));
    let unchanged = !writes && !is_view && file.deleted.is_none();
    let identity = (stat.st_dev, stat.st_ino);
    let index = survey.add(Thing::File(File { flags, unchanged, ..file }));
    survey.named.insert((name, flags, namespace), index);
    survey.mapped.insert(index, Mapped { identity, mount: mount_of(open.as_fd()).ok(), writes });
    Ok(index)
}

/// Lets areas be mapped by the open file with a lease for writing: a file has no other beside it when such a
/// lease is set, so a mapping that keeps its open file keeps this one.
///
/// A mapping through overlayfs does not keep it, and may have been made by another open file, which is
/// recognized by its access mode and mount. An object of its own is right for such a mapping.
pub(crate) fn map_by_leased(survey: &Survey<'_>, areas: &mut [Area]) {
    if survey.leased.is_empty() {
        return;
    }
    for area in areas {
        let is_shared = matches!(area.backing, Backing::Shared { .. });
        if let Backing::Private { object, .. } | Backing::Shared { object, .. } = &mut area.backing
            && let Some(mapped) = survey.mapped.get(object)
            && let Some(leased) = survey.leased.get(&mapped.identity)
            && mapped.is_by(leased, is_shared)
        {
            *object = leased.index;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_a_network_are_not_deleted() {
        assert_eq!(name_of_net("/proc/1/net/dev (deleted)"), Some("/proc/1/net/dev"));
        let task = "/proc/1/task/1/net/stat/nf_conntrack";
        assert_eq!(name_of_net(&format!("{task} (deleted)")), Some(task));
        for other in ["/proc/1/net/dev", "/proc/1/stat (deleted)", "/proc/sys/net/x (deleted)"] {
            assert_eq!(name_of_net(other), None, "{other}");
        }
    }
}
