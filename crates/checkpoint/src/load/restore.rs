//! The result of [`super::prepare`]: the program that the newborn follows, and everything that the
//! conductor and the engine's half of each kind need beside it.
//!
//! This module uses [`super::lazy`] for its type alone.

use std::collections::HashMap;

use dormouse_kernel::Errno;
use dormouse_parcel::PageFiles;
use dormouse_record::{Records, Terminal, Thing};

use super::lazy::Lazy;
use crate::clock::Offsets;
use crate::inject::program::{Cell, Program};

/// A restore, ready to be followed.
#[derive(Debug)]
pub struct Restore {
    pub(super) records: Records,
    pub(super) program: Program,
    /// The numbers of what came along, and the ranges between them.
    pub(super) given: Vec<Cell>,
    pub(super) gaps: Vec<[Cell; 2]>,
    /// What the configuration gives at most.
    pub(super) capabilities: u64,
    pub(super) no_new_privileges: bool,
    /// Bytes of the work area: the program and shared memory.
    pub(super) work_bytes: u64,
    /// The descriptors that the newborn receives, in this order.
    pub(super) passed: Vec<Passed>,
    /// The cell of each object's descriptor number, valid while the first process has all of them.
    pub(super) cells: Vec<Option<Cell>>,
    /// The contents of memory.
    pub(super) pages: PageFiles,
    /// Directories that are tmpfs by the configuration.
    pub(super) memory: Vec<String>,
    /// Cells of each tmpfs in mount namespaces inside, by object.
    pub(super) memories: HashMap<usize, Cell>,
    /// Pipes, and the cells of the sizes that they were given; 0 where the kernel refused it.
    pub(super) pipes: Vec<(usize, Cell)>,
    /// The container whose packets were dropped meanwhile.
    pub(super) quiet: Option<String>,
    /// The offsets of its clocks from the host's, if they differ from the newborn's.
    pub(super) clocks: Option<Offsets>,
    /// The checkpoint comes from another kernel, and has addresses in that kernel's vDSO.
    pub(super) is_foreign: bool,
    /// Memory that is filled while the processes run, and the cells of its descriptor numbers.
    pub(super) lazy: Option<Lazy>,
    pub(super) lazy_cells: Vec<Cell>,
}

/// A descriptor that the newborn receives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Passed {
    /// The sealed memory of the program ([`Program::sealed`]).
    Program,
    /// A part of the contents of memory, readable, by its number.
    Pages(usize),
    /// `ns_last_pid`, which sets the next pid.
    LastPid,
    /// A descriptor of the caller.
    Caller(Wanted),
}

/// A descriptor that a restore needs from its caller ([`Restore::follow`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// A file of the engine, by the name that it had at the checkpoint.
    Outside(String),
    /// The held open file of this object ([`super::Allowed::held`]).
    Held(u32),
    /// `/dev/userfaultfd`, for memory that is filled while the processes run
    /// ([`super::Memory::Later`]).
    Userfaults,
}

impl Restore {
    /// Packets of this container's connections were dropped ([`crate::end_quiet`]): the drop rules
    /// are removed once the connections are complete.
    pub fn end_quiet(&mut self, id: &str) {
        self.quiet = Some(id.to_owned());
    }

    /// The size of the console, in rows and columns; `None` if there is none.
    pub fn console_size(&self) -> Option<(u16, u16)> {
        let console = console(&self.records)?;
        Some((console.size[0], console.size[1]))
    }

    /// Whether the restore creates a time namespace, in which the clocks of another boot continue.
    pub fn moves_clocks(&self) -> bool {
        self.clocks.is_some()
    }

    /// The descriptor number of an object, valid while the first process has all of them.
    pub(super) fn number(&self, index: usize) -> std::result::Result<i32, Errno> {
        let cell = self.cells.get(index).copied().flatten();
        cell.ok_or(Errno::BADF).and_then(|cell| self.program.value(cell))
    }

    /// The records that it restores.
    pub fn records(&self) -> &Records {
        &self.records
    }
}

/// The terminal whose master is the engine's.
pub(super) fn console(records: &Records) -> Option<&Terminal> {
    records.objects.iter().find_map(|object| match &object.thing {
        Thing::Terminal(terminal) if terminal.is_console => Some(terminal),
        _ => None,
    })
}
