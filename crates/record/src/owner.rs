//! The owners of contents: processes, objects, and files in memory.

use crate::{Process, Records, Run, Thing, TmpfsKind};

/// The owner of contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Of {
    /// The memory of a process, by its id inside.
    Process(u32),
    /// An object, by its number.
    Object(usize),
    /// A file in memory: the object, and the index of the entry.
    Entry(usize, usize),
}

impl Records {
    /// All runs that refer to pages.
    pub fn runs(&self) -> impl Iterator<Item = (Of, &Run)> {
        let of_process = |process: &Process| {
            let memory = process.memory.and_then(|n| self.memories.get(n));
            let of = Of::Process(process.pid);
            memory
                .into_iter()
                .flat_map(|m| &m.areas)
                .flat_map(|a| &a.runs)
                .map(move |run| (of, run))
        };
        let objects = self.objects.iter().enumerate();
        let of_objects = objects.flat_map(|(n, object)| of_thing(n, &object.thing));
        self.processes.iter().flat_map(of_process).chain(of_objects)
    }
}

fn of_thing(number: usize, thing: &Thing) -> Vec<(Of, &Run)> {
    let runs = match thing {
        Thing::SharedMemory(memory) => &memory.runs,
        Thing::SystemVMemory(memory) => &memory.runs,
        Thing::AioContext(context) => &context.runs,
        Thing::MemoryFile(file) => &file.runs,
        Thing::Deleted(file) => &file.runs,
        Thing::Tmpfs(tree) => {
            let files =
                tree.entries.iter().enumerate().filter_map(|(n, entry)| match &entry.what {
                    TmpfsKind::File { runs, .. } => Some((Of::Entry(number, n), runs)),
                    _ => None,
                });
            return files.flat_map(|(of, runs)| runs.iter().map(move |run| (of, run))).collect();
        }
        _ => return Vec::new(),
    };
    runs.iter().map(|run| (Of::Object(number), run)).collect()
}
