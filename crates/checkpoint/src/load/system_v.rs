//! Objects of System V: made by the engine in the container's IPC namespace, as their creators,
//! before any process attaches memory; each gets its recorded id.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use dormouse_kernel::call::Namespace;
use dormouse_kernel::system_v::{self, Owner, SystemV};
use dormouse_kernel::{Errno, pidfd};
use dormouse_parcel::PageFiles;
use dormouse_record::{Error, PAGE_BYTES, Result, Run, SystemVHead, Thing};

use super::restore::Restore;
use crate::look::ids::Maps;
use crate::look::ipc as namespace;

/// Memory that is removed with its last detach: the namespaces, and its ids.
#[derive(Debug, Default)]
pub(super) struct Removed(Vec<(OwnedFd, i32)>);

/// Makes all objects. All processes wait, and none has memory of its own yet.
pub(super) fn restore(pid: u32, restore: &Restore) -> Result<Removed> {
    let mut wanted = restore.records.objects.iter().enumerate().filter(|(_, object)| {
        let thing = &object.thing;
        matches!(
            thing,
            Thing::SystemVMemory(_) | Thing::SystemVSemaphores(_) | Thing::SystemVQueue(_)
        )
    });
    let mut removed = Removed::default();
    let Some(first) = wanted.next() else { return Ok(removed) };
    let elsewhere = |e: &dyn std::fmt::Display| Error::Elsewhere(e.to_string());
    let handle = pidfd::open(pid).map_err(|e| elsewhere(&e))?;
    let own = pidfd::namespace(&handle, Namespace::Ipc).map_err(|e| elsewhere(&e))?;
    let maps = Maps::read(pid);
    for (index, object) in std::iter::once(first).chain(wanted) {
        let thing = &object.thing;
        let inner;
        let namespace = match head(thing).and_then(|head| head.namespace) {
            None => &own,
            // The first process has the namespace open.
            Some(n) => {
                let number = restore.number(n).map_err(Error::of("find an IPC namespace", pid))?;
                inner = pidfd::copy_descriptor(&handle, number).map_err(|e| elsewhere(&e))?;
                &inner
            }
        };
        let made = namespace::inside(namespace, || make(thing, &maps, &restore.pages));
        made.map_err(|source| Error::Restore {
            what: format!("object {index} ({})", thing.name()),
            call: "the engine's part".into(),
            source,
        })?;
        if let Thing::SystemVMemory(memory) = thing
            && memory.removed
        {
            let namespace = namespace.try_clone().map_err(|e| elsewhere(&e))?;
            removed.0.push((namespace, memory.head.id));
        }
    }
    Ok(removed)
}

impl Removed {
    /// Removes the memory, once all processes have attached it.
    pub(super) fn remove(self) -> Result<()> {
        for (namespace, id) in &self.0 {
            namespace::inside(namespace, || system_v::remove_segment(*id))
                .map_err(Error::call("remove shared memory"))?;
        }
        Ok(())
    }
}

fn head(thing: &Thing) -> Option<&SystemVHead> {
    match thing {
        Thing::SystemVMemory(memory) => Some(&memory.head),
        Thing::SystemVSemaphores(set) => Some(&set.head),
        Thing::SystemVQueue(queue) => Some(&queue.head),
        _ => None,
    }
}

/// Makes an object, in the namespace of the calling thread.
fn make(thing: &Thing, maps: &Maps, pages: &PageFiles) -> std::result::Result<(), Errno> {
    match thing {
        Thing::SystemVMemory(memory) => {
            let size = memory.bytes as usize;
            let (head, kind) = (&memory.head, SystemV::Memory);
            make_one(kind, head, size, maps)?;
            let file = File::from(system_v::segment_file(head.id, memory.bytes)?);
            fill(&file, &memory.runs, pages)?;
            give(kind, head, maps)
        }
        Thing::SystemVSemaphores(set) => {
            make_one(SystemV::Semaphores, &set.head, set.values.len(), maps)?;
            system_v::set_semaphore_values(set.head.id, &set.values)?;
            give(SystemV::Semaphores, &set.head, maps)
        }
        Thing::SystemVQueue(queue) => {
            make_one(SystemV::Queue, &queue.head, 0, maps)?;
            for message in &queue.messages {
                system_v::queue_message(queue.head.id, message.kind, &message.text.0)?;
            }
            give(SystemV::Queue, &queue.head, maps)
        }
        _ => Ok(()),
    }
}

/// Makes an object with its recorded id, as its creator.
fn make_one(
    kind: SystemV,
    head: &SystemVHead,
    size: usize,
    maps: &Maps,
) -> std::result::Result<(), Errno> {
    let name = match kind {
        SystemV::Memory => "shm",
        SystemV::Semaphores => "sem",
        SystemV::Queue => "msg",
    };
    // Sets the id of the next object (proc(5)); the kernel uses the value once.
    let path = format!("/proc/sys/kernel/{name}_next_id");
    std::fs::write(path, head.id.to_string())
        .map_err(|e| e.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error))?;
    let (uid, gid) = maps.outside(head.creator_uid, head.creator_gid).ok_or(Errno::INVAL)?;
    let make = || system_v::make_system_v(kind, head.key, size, head.mode);
    match system_v::as_user(uid, gid, make)?? {
        id if id == head.id => Ok(()),
        _ => Err(Errno::EXIST),
    }
}

fn give(kind: SystemV, head: &SystemVHead, maps: &Maps) -> std::result::Result<(), Errno> {
    let (uid, gid) = maps.outside(head.uid, head.gid).ok_or(Errno::INVAL)?;
    system_v::set_owner(kind, head.id, Owner { uid, gid, mode: head.mode })
}

pub(super) fn fill(file: &File, runs: &[Run], pages: &PageFiles) -> std::result::Result<(), Errno> {
    let failed = |e: std::io::Error| e.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error);
    let length = rustix::fs::fstat(file.as_fd())?.st_size as u64;
    let mut page = vec![0; PAGE_BYTES as usize];
    for run in runs {
        for n in 0..run.pages {
            pages.read_exact_at(&mut page, (run.first + n) * PAGE_BYTES).map_err(failed)?;
            let at = run.address + n * PAGE_BYTES;
            // The last page may exceed the requested size.
            let bytes = PAGE_BYTES.min(length.saturating_sub(at)) as usize;
            file.write_all_at(&page[..bytes], at).map_err(failed)?;
        }
    }
    Ok(())
}
