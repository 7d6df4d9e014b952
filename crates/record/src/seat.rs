//! The descriptor numbers that a restore needs.
//!
//! Its first process makes the open files of all processes, at numbers above theirs, and each process gives its own the
//! recorded numbers then. So every open file takes two numbers at once. Where the limit of open files (RLIMIT_NOFILE)
//! is lower than that, files have *seats*: a file that one process alone has open, and once, is made at its recorded
//! number. As a number can be the seat of one file only, seats are those of one table, the one with the most files.

use std::collections::{HashMap, HashSet};

use crate::{Descriptor, Object, Process, Records, Thing, Thread};

/// A descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Use {
    /// The open file, an object.
    pub object: usize,
    /// The process, or the thread, whose table it is in.
    pub task: u32,
    /// Its number.
    pub number: u32,
}

/// Descriptors that the restore itself uses.
const OWN: u64 = 64;

/// The resource number of the limit on descriptors.
pub const NOFILE: u32 = 7;

/// Returns the seats: the numbers, by object.
pub fn seats(uses: &[Use], objects: &[Object]) -> HashMap<usize, u32> {
    let mut first = HashMap::new();
    let mut often = HashSet::new();
    for one in uses {
        if first.insert(one.object, *one).is_some() {
            often.insert(one.object);
        }
    }
    let may_sit = |object: &usize| objects.get(*object).is_some_and(|it| has_seat(&it.thing));
    first.retain(|object, _| !often.contains(object) && may_sit(object));
    let mut counts: HashMap<u32, usize> = HashMap::new();
    first.values().for_each(|one| *counts.entry(one.task).or_default() += 1);
    // The order of equal tables is the same in every run.
    let most = counts.into_iter().max_by_key(|(task, count)| (*count, *task));
    first.retain(|_, one| most.is_some_and(|(task, _)| task == one.task));
    first.into_iter().map(|(object, one)| (object, one.number)).collect()
}

/// Whether a restore makes such an object by itself, and uses its number no more.
fn has_seat(thing: &Thing) -> bool {
    match thing {
        Thing::File(file) => file.deleted.is_none() && file.namespace.is_none(),
        Thing::UnixSocket(socket) => socket.backlog.is_none() && socket.name.is_none(),
        Thing::TcpSocket(socket) => !socket.held,
        Thing::Device(_)
        | Thing::PipeEnd(_)
        | Thing::Event(_)
        | Thing::Timer(_)
        | Thing::Signal(_)
        | Thing::Inotify(_)
        | Thing::Epoll(_) => true,
        _ => false,
    }
}

fn has_number(object: &Object) -> bool {
    use Thing::{AioContext, Pipe, SharedMemory, SystemVMemory, SystemVQueue, SystemVSemaphores};
    !matches!(
        object.thing,
        AioContext(_)
            | Pipe(_)
            | SharedMemory(_)
            | SystemVMemory(_)
            | SystemVQueue(_)
            | SystemVSemaphores(_)
    )
}

/// The numbers that a restore without seats needs, for these open files in tables up to the number `highest`.
pub fn numbers_needed(highest: u32, objects: &[Object]) -> u64 {
    let files = objects.iter().filter(|object| has_number(object)).count() as u64;
    u64::from(highest) + files + OWN
}

/// The numbers that a restore needs if `seated` files have seats. Of every other one it has two for a while.
pub fn numbers_needed_beside(seated: usize, highest: u32, objects: &[Object]) -> u64 {
    let files = objects.iter().filter(|object| has_number(object)).count();
    u64::from(highest) + 2 * files.saturating_sub(seated) as u64 + OWN
}

impl Records {
    /// The seats of a restore, by object: none where its first process may have enough numbers without. LIMIT: nor
    /// where processes share a table, or a thread has one to itself.
    pub fn seats(&self) -> HashMap<usize, u32> {
        let is_apart = |thread: &Thread| thread.table.is_some() || thread.table_of.is_some();
        let is_unusual = |it: &Process| it.table_of.is_some() || it.threads.iter().any(is_apart);
        if self.processes.iter().any(is_unusual) {
            return HashMap::new();
        }
        let uses = || {
            self.tables().flat_map(|table| {
                let of = move |it: &Descriptor| Use {
                    object: it.object,
                    task: table.task,
                    number: it.number,
                };
                table.descriptors.iter().map(of)
            })
        };
        let limits = self.processes.first().map_or(&[][..], |first| &first.limits);
        let limit =
            limits.iter().find(|limit| limit.resource == NOFILE).map_or(u64::MAX, |l| l.hard);
        let highest = uses().map(|one| one.number).max().unwrap_or(0);
        match numbers_needed(highest, &self.objects) > limit {
            true => seats(&uses().collect::<Vec<_>>(), &self.objects),
            false => HashMap::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::small;
    use crate::{Event, Limit};

    fn descriptor(number: u32, object: usize) -> Descriptor {
        Descriptor { number, object, close_on_exec: false }
    }

    /// Two processes: 100 files of the first alone, 3 of the second alone, one of both, one that the first has twice.
    fn records(hard: u64) -> Records {
        let mut records = small();
        let event = Event { count: 0, semaphore: false, flags: 0 };
        records.objects.extend((0..105).map(|_| Thing::Event(event.clone()).into()));
        let first = &mut records.processes[0];
        first.limits = vec![Limit { resource: NOFILE, soft: hard, hard }];
        first.descriptors = (1..=100).map(|n| descriptor(n as u32 + 2, n)).collect();
        let more = [(103, 104), (104, 105), (105, 105)];
        first.descriptors.extend(more.map(|(number, object)| descriptor(number, object)));
        let second = Process {
            pid: 2,
            descriptors: (101..=104).map(|n| descriptor(n as u32 - 101, n)).collect(),
            ..records.processes[0].clone()
        };
        records.processes.push(second);
        records
    }

    #[test]
    fn files_that_one_process_has_once_have_seats() {
        let seats = records(200).seats();
        let expected: HashMap<usize, u32> = (1..=100).map(|n| (n, n as u32 + 2)).collect();
        assert_eq!(seats, expected);
        let objects = records(200).objects;
        assert_eq!(numbers_needed(105, &objects), 105 + 106 + 64);
        assert_eq!(numbers_needed_beside(100, 105, &objects), 105 + 2 * 6 + 64);
    }

    #[test]
    fn there_are_no_seats_where_numbers_suffice_or_tables_are_shared() {
        assert!(records(105 + 106 + 64).seats().is_empty());
        let mut records = records(200);
        records.processes[1].table_of = Some(1);
        assert!(records.seats().is_empty());
    }
}
