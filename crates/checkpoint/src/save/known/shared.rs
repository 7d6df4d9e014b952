//! Processes that share what processes seldom share.

use std::collections::{HashMap, HashSet};

use dormouse_record::{Descriptor, HeldLock, OwnPlace, OwnTable};

/// Processes that share descriptors or directories, by the host's ids.
#[derive(Debug, Default)]
pub(crate) struct Sharing {
    /// For each process that has no table of its own, the first process with its table.
    pub(crate) table_of: HashMap<u32, u32>,
    /// The same for the working directory, root and umask.
    pub(crate) place_of: HashMap<u32, u32>,
    /// The first processes of those that share.
    pub(crate) firsts: HashSet<u32>,
    /// The first task of each table, in the order of kcmp(2).
    pub(crate) tables: Vec<u32>,
    /// The same for the working directory.
    pub(crate) places: Vec<u32>,
    /// What the first processes have.
    pub(crate) owners: HashMap<u32, Owner>,
    /// Locks that a process has set on files of a table that it shares.
    pub(crate) locks: HashMap<u32, Vec<HeldLock>>,
}

impl Sharing {
    /// Notes that a process has the table of an earlier one.
    pub(crate) fn share_table(&mut self, pid: u32, of: u32) {
        self.table_of.insert(pid, of);
        self.firsts.insert(of);
    }

    /// Notes that a process has the working directory of an earlier one.
    pub(crate) fn share_place(&mut self, pid: u32, of: u32) {
        self.place_of.insert(pid, of);
        self.firsts.insert(of);
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
}
