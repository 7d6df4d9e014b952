//! Objects of System V, from the tables of the IPC namespace.
//!
//! The objects belong to no process, so they are found before the processes are inspected: attached
//! memory is identified by its id. Values, messages and contents are read in the namespace, by a
//! separate thread.
//!
//! LIMIT: semaphore adjustments at process exit (SEM_UNDO) cannot be read, and are not restored.

use std::fs::File;
use std::os::fd::AsFd;

use dormouse_kernel::{handle, proc, system_v};
use dormouse_record::{
    Bytes, Error, Result, SystemVHead, SystemVMemory, SystemVMessage, SystemVQueue,
    SystemVSemaphores, Thing,
};
use rustix::io::Errno;

use super::refusal;
use super::seen::Seen;
use super::survey::Survey;
use crate::look::ids::Maps;
use crate::look::ipc::{Tables, errno, inside};

/// The mode bit of memory that is removed with its last detach (SHM_DEST).
const REMOVED: u32 = 0o1000;

/// Opens the tables of the IPC namespace of a process, unless it has exited.
pub(super) fn tables(seen: &Seen) -> Result<Option<Tables>> {
    seen.pidfd.as_ref().map(|handle| Tables::open(seen.pid, handle)).transpose()
}

/// Finds all objects, with their contents. Contents of memory are read later, if at all.
pub(super) fn find(
    survey: &mut Survey<'_>,
    seen: &Seen,
    tables: &Tables,
    namespace: Option<usize>,
) -> Result<()> {
    let failed = |e| Error::of("read the objects of System V", seen.pid)(e);
    // Entering the namespace takes a thread, and most containers have no such object.
    if !tables.has_rows().map_err(failed)? {
        return Ok(());
    }
    let maps = seen.maps();
    // ORDER: before contents are read, which attaches the memory for a moment.
    let loose = inside(tables.namespace(), loose).map_err(failed)?;
    if let Some(id) = loose {
        survey.found.refusals.push(refusal::of_object(format!(
            "the shared memory of System V with id {id}, which no process has attached: under \
             kernel.shm_rmid_forced = 1 the end of its maker removes it, which a restore cannot know"
        )));
        return Ok(());
    }
    let found = inside(tables.namespace(), || {
        let mut all = memory(maps)?;
        all.extend(semaphores(maps)?.into_iter().map(|thing| (thing, None)));
        all.extend(queues(maps)?.into_iter().map(|thing| (thing, None)));
        Ok(all)
    });
    let found = found.map_err(failed)?;
    for (mut thing, file) in found {
        match &mut thing {
            Thing::SystemVMemory(SystemVMemory { head, .. })
            | Thing::SystemVSemaphores(SystemVSemaphores { head, .. })
            | Thing::SystemVQueue(SystemVQueue { head, .. }) => head.namespace = namespace,
            _ => {}
        }
        let index = survey.add(thing);
        if let Some(file) = &file {
            let handle = handle::handle_of(file.as_fd()).map_err(failed)?;
            survey.segments.insert(handle, index);
        }
        survey.found.contents.extend(file.map(|file| (index, file)));
    }
    Ok(())
}

/// A segment that no process has attached, where such segments are removed with their maker or with their
/// last detach (`kernel.shm_rmid_forced`, proc(5)).
fn loose() -> std::result::Result<Option<i64>, Errno> {
    let forced = proc::whole_text("/proc/sys/kernel/shm_rmid_forced").map_err(errno)?;
    if forced.trim() == "0" {
        return Ok(None);
    }
    const ID: usize = 1;
    const ATTACHED: usize = 6;
    let loose = rows("shm")?.into_iter().find(|row| row.get(ATTACHED) == Some(&0));
    Ok(loose.and_then(|row| row.get(ID).copied()))
}

/// The rows of a table, without the heading.
fn rows(name: &str) -> std::result::Result<Vec<Vec<i64>>, Errno> {
    let text = proc::whole_text(format!("/proc/sysvipc/{name}"));
    Ok(text.map_err(errno)?.lines().skip(1).filter_map(row).collect())
}

/// Reads `KEY ID MODE ...`, the mode in octal.
fn row(line: &str) -> Option<Vec<i64>> {
    let words = line.split_ascii_whitespace().enumerate();
    let number = |(n, word): (usize, &str)| i64::from_str_radix(word, if n == 2 { 8 } else { 10 });
    words.map(number).collect::<std::result::Result<_, _>>().ok()
}

/// The head of a record. The columns `uid gid cuid cgid` begin at column `ids`.
fn head(row: &[i64], ids: usize, maps: &Maps) -> Option<SystemVHead> {
    let at = |n: usize| row.get(n).copied();
    let id = |n: usize| at(ids + n).map(|id| id as u32);
    let (uid, gid) = maps.owner(id(0)?, id(1)?);
    let (creator_uid, creator_gid) = maps.owner(id(2)?, id(3)?);
    let (key, mode) = (at(0)? as i32, at(2)? as u32);
    let (id, namespace) = (at(1)? as i32, None);
    Some(SystemVHead { id, key, mode, uid, gid, creator_uid, creator_gid, namespace })
}

type Found = (Thing, Option<File>);

/// `key shmid perms size cpid lpid nattch uid gid cuid cgid ...`
fn memory(maps: &Maps) -> std::result::Result<Vec<Found>, Errno> {
    let mut all = Vec::new();
    for row in rows("shm")? {
        let mut head = head(&row, 7, maps).ok_or(Errno::BADMSG)?;
        let bytes = row[3] as u64;
        let removed = head.mode & REMOVED != 0;
        head.mode &= 0o777;
        // LIMIT: attached for a moment, which changes the attach and detach times.
        let file = system_v::segment_file(head.id, bytes)?;
        let thing = SystemVMemory { head, bytes, removed, runs: Vec::new() };
        all.push((Thing::SystemVMemory(thing), Some(File::from(file))));
    }
    Ok(all)
}

/// `key semid perms nsems uid gid cuid cgid ...`
fn semaphores(maps: &Maps) -> std::result::Result<Vec<Thing>, Errno> {
    let one = |row: Vec<i64>| {
        let mut head = head(&row, 4, maps).ok_or(Errno::BADMSG)?;
        head.mode &= 0o777;
        let values = system_v::semaphore_values(head.id, row[3] as usize)?;
        Ok(Thing::SystemVSemaphores(SystemVSemaphores { head, values }))
    };
    rows("sem")?.into_iter().map(one).collect()
}

/// `key msqid perms cbytes qnum lspid lrpid uid gid cuid cgid ...`
fn queues(maps: &Maps) -> std::result::Result<Vec<Thing>, Errno> {
    let one = |row: Vec<i64>| {
        let mut head = head(&row, 7, maps).ok_or(Errno::BADMSG)?;
        head.mode &= 0o777;
        let mut messages = Vec::new();
        while let Some((kind, text)) = system_v::queued_message(head.id, messages.len())? {
            messages.push(SystemVMessage { kind, text: Bytes(text) });
        }
        Ok(Thing::SystemVQueue(SystemVQueue { head, messages }))
    };
    rows("msg")?.into_iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_of_a_table_is_read() {
        let line = "       -42      65538   600          1  1000  1001  1002  1003 170 0";
        let row = row(line).unwrap();
        let maps = Maps::read(std::process::id());
        let head = head(&row, 4, &maps).unwrap();
        assert_eq!((head.key, head.id, head.mode, row[3]), (-42, 65_538, 0o600, 1));
        assert!(super::row("key shmid perms").is_none());
    }
}
