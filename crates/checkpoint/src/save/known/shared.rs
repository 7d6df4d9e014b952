//! Processes that share what processes seldom share.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};

use dormouse_kernel::call::{self, Shared};
use dormouse_kernel::process::Ended;
use dormouse_record::{Descriptor, HeldLock, OwnPlace, OwnTable};

/// Processes that share descriptors or directories, by the host's ids.
#[derive(Debug, Default)]
pub(crate) struct Sharing {
    /// For each process that has no table of its own, the first process with its table.
    pub(crate) table_of: HashMap<u32, u32>,
    /// The same for the working directory, root and umask.
    pub(crate) place_of: HashMap<u32, u32>,
    /// The same for the undo values of semaphores.
    pub(crate) undo_of: HashMap<u32, u32>,
    /// The same for the I/O context.
    pub(crate) io_of: HashMap<u32, u32>,
    /// The first processes of those that share.
    pub(crate) firsts: HashSet<u32>,
    /// The first task of each table, in the order of kcmp(2).
    pub(crate) tables: Vec<u32>,
    /// The same for the working directory.
    pub(crate) places: Vec<u32>,
    /// The same for the undo values; one of them may be a task that has none.
    pub(crate) undos: Vec<u32>,
    /// The same for the I/O context; one of them may be a task that has none.
    pub(crate) ios: Vec<u32>,
    /// A task without any of these, made on first use.
    ended: OnceCell<Option<Ended>>,
    /// What the first processes have.
    pub(crate) owners: HashMap<u32, Owner>,
    /// Locks that a process has set on files of a table that it shares.
    pub(crate) locks: HashMap<u32, Vec<HeldLock>>,
}

impl Sharing {
    /// Notes that a process has a resource of an earlier one.
    pub(crate) fn share(&mut self, what: Shared, pid: u32, of: u32) {
        let all = match what {
            Shared::Descriptors => &mut self.table_of,
            Shared::FileSystem => &mut self.place_of,
            Shared::Undo => &mut self.undo_of,
            Shared::Io => &mut self.io_of,
            Shared::Memory | Shared::Handlers => return,
        };
        all.insert(pid, of);
        self.firsts.insert(of);
    }

    /// Whether a task has no undo values, or no I/O context. Tasks without compare as if they shared one.
    pub(crate) fn is_without(&self, what: Shared, task: u32) -> bool {
        if !matches!(what, Shared::Undo | Shared::Io) {
            return false;
        }
        let ended = self.ended.get_or_init(|| Ended::make().ok()).as_ref();
        // Neither has a task that has ended meanwhile.
        ended.is_none_or(|ended| call::is_shared(what, ended.pid(), task) != Ok(false))
    }

    /// The id inside of the first process with the undo values, and with the I/O context, of a process.
    pub(crate) fn others_of(&self, pid: u32) -> [Option<u32>; 2] {
        [&self.undo_of, &self.io_of].map(|all| Some(self.owners.get(all.get(&pid)?)?.inner))
    }
}

/// What the first process has for those that share it.
#[derive(Debug)]
pub(crate) struct Owner {
    /// Its id inside.
    pub(crate) inner: u32,
    pub(crate) descriptors: Vec<Descriptor>,
    pub(crate) directory: Option<usize>,
    /// The process is in a user namespace inside.
    pub(crate) is_inside: bool,
}

/// What a thread has apart from its process.
#[derive(Debug, Clone, Default)]
pub(crate) struct Apart {
    /// Its id inside.
    pub(crate) inner: u32,
    pub(crate) place: Option<OwnPlace>,
    /// The first thread of its process with the same place, by its id inside.
    pub(crate) place_of: Option<u32>,
    /// The thread is the first of its process with its table of descriptors.
    pub(crate) has_table: bool,
    /// That table.
    pub(crate) table: Option<OwnTable>,
    /// The first thread of its process with the same table, by its id inside.
    pub(crate) table_of: Option<u32>,
    /// It does not have the undo values of semaphores of its process.
    pub(crate) own_undo: bool,
    /// It has the I/O context of its process.
    pub(crate) shares_io: bool,
}
