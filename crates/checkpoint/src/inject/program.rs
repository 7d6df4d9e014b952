//! Restore programs: flat lists of system calls, laid out in one piece of shared memory.
//!
//! ```text
//! 0      the interpreter
//! 4096   data that operations point to
//! ...    operations of 64 bytes
//! ...    cells, 4 bytes each: descriptor numbers and other results of calls
//! ```
//!
//! Cells come last: their number is known once everything else is laid out, and not before.
//!
//! The memory is a memfd, mapped shared at one address in every process of a restore, and read and
//! written as a file by the conductor. So a cell that one process writes is visible to all. Every
//! pointer in it is an address of that mapping. Data of a checkpoint only become operations through
//! the functions that the modules of [`crate::load`] call.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::MemfdFlags;
use rustix::io::Errno;

use super::blob::interpreter;

/// Bytes of one operation.
pub(crate) const OPERATION_BYTES: u64 = 64;
/// Where data begin.
const DATA_AT: u64 = 4096;
const PAGE: u64 = 4096;

const FLAG_STAGE: u32 = 0x100;
const FLAG_FORK: u32 = 0x200;
const FLAG_LENIENT: u32 = 0x400;
const FLAG_EXPECT: u32 = 0x800;
const FLAG_STORE: u32 = 0x1000;

/// A number that becomes known while the programs run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Cell(u32);

/// An argument of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Arg {
    /// A number or an address.
    Number(u64),
    /// The content of a cell at run time.
    Of(Cell),
    /// The address of a cell, for calls that write numbers to memory, such as pipe2(2) into two.
    At(Cell),
}

impl From<u64> for Arg {
    fn from(value: u64) -> Self {
        Self::Number(value)
    }
}
impl From<u32> for Arg {
    fn from(value: u32) -> Self {
        Self::Number(u64::from(value))
    }
}
impl From<i32> for Arg {
    fn from(value: i32) -> Self {
        Self::Number(i64::from(value) as u64)
    }
}
impl From<Cell> for Arg {
    fn from(cell: Cell) -> Self {
        Self::Of(cell)
    }
}

/// The purpose of one operation, for the error if it fails.
#[derive(Debug, Clone)]
pub(crate) struct About {
    /// The object that was being restored: `descriptor 5 (a pipe)`.
    pub(crate) what: String,
    /// The system call's number.
    pub(crate) call: i64,
    /// The operation is the end of a stage, and `what` its name.
    pub(crate) is_stage: bool,
}

/// A call that is being built.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    number: i64,
    args: [Arg; 6],
    flags: u32,
}

impl Call {
    /// A call that must succeed.
    pub(crate) fn new<const N: usize>(number: i64, args: [Arg; N]) -> Self {
        let mut all = [Arg::Number(0); 6];
        all[..N].copy_from_slice(&args);
        Self { number, args: all, flags: 0 }
    }

    /// Ignores a failure of the call.
    pub(crate) fn lenient(mut self) -> Self {
        self.flags |= FLAG_LENIENT;
        self
    }

    /// Makes the call fail unless it returns this number; the call must not have a sixth argument.
    pub(crate) fn returns(mut self, value: u64) -> Self {
        self.flags |= FLAG_EXPECT;
        self.args[5] = Arg::Number(value);
        self
    }
}

/// The operations of one process or thread, in order.
#[derive(Debug, Default)]
pub(crate) struct Sequence {
    calls: Vec<(Call, Then, String)>,
}

/// The use of the result of a call.
#[derive(Debug, Clone, Copy)]
enum Then {
    Nothing,
    Into(Cell),
    To(u64),
    Child(usize),
}

impl Sequence {
    /// Adds a call; `what` names the object that it restores.
    pub(crate) fn call(&mut self, what: impl Into<String>, call: Call) {
        self.calls.push((call, Then::Nothing, what.into()));
    }

    /// Adds a call whose result goes into a cell.
    pub(crate) fn call_into(&mut self, what: impl Into<String>, cell: Cell, call: Call) {
        self.calls.push((call, Then::Into(cell), what.into()));
    }

    /// Adds a call whose result goes, as 4 bytes, to an address in data.
    pub(crate) fn call_to(&mut self, what: impl Into<String>, address: u64, call: Call) {
        self.calls.push((call, Then::To(address), what.into()));
    }

    /// Adds a call that creates a process or thread, which runs sequence number `child`.
    pub(crate) fn fork(&mut self, what: impl Into<String>, child: usize, call: Call) {
        self.calls.push((call, Then::Child(child), what.into()));
    }

    /// Adds all calls of another sequence.
    pub(crate) fn append(&mut self, other: Self) {
        self.calls.extend(other.calls);
    }

    /// Adds the end of a stage: every task waits for all others.
    pub(crate) fn stage(&mut self, name: &'static str) {
        let mut call = Call::new(0, []);
        call.flags = FLAG_STAGE;
        self.calls.push((call, Then::Nothing, name.into()));
    }
}

/// The shared memory while it is written.
pub(crate) struct Builder {
    base: u64,
    cells: u32,
    bytes: Vec<u8>,
    abouts: Vec<(u64, About)>,
}

impl Builder {
    /// A program that will be mapped at `base`.
    pub(crate) fn new(base: u64) -> Self {
        let mut bytes = vec![0; DATA_AT as usize];
        let code = interpreter();
        bytes[..code.len()].copy_from_slice(code);
        Self { base, cells: 0, bytes, abouts: Vec::new() }
    }

    /// Adds a cell. Of two consecutive cells the second is adjacent to the first.
    pub(crate) fn cell(&mut self) -> Cell {
        self.cells += 1;
        Cell(self.cells - 1)
    }

    /// Stores bytes, aligned to 16, and returns their address.
    pub(crate) fn data(&mut self, bytes: &[u8]) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0);
        let at = self.base + self.bytes.len() as u64;
        self.bytes.extend_from_slice(bytes);
        at
    }

    /// Stores a text and its NUL.
    pub(crate) fn text(&mut self, text: &[u8]) -> u64 {
        let mut bytes = text.to_vec();
        bytes.push(0);
        self.data(&bytes)
    }

    /// Stores numbers of 64 bits.
    pub(crate) fn numbers(&mut self, numbers: &[u64]) -> u64 {
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_ne_bytes()).collect();
        self.data(&bytes)
    }

    /// Lays out the sequences; the first process begins with the first.
    pub(crate) fn finish(mut self, sequences: Vec<Sequence>) -> Result<Program, Errno> {
        self.bytes.resize(self.bytes.len().next_multiple_of(OPERATION_BYTES as usize), 0);
        let mut starts = Vec::with_capacity(sequences.len());
        let mut at = self.base + self.bytes.len() as u64;
        for sequence in &sequences {
            starts.push(at);
            at += sequence.calls.len() as u64 * OPERATION_BYTES;
        }
        let cells_at = at - self.base;
        for sequence in sequences {
            for (call, then, what) in sequence.calls {
                self.operation(call, then, (&starts, cells_at), what);
            }
        }
        let length = (cells_at + u64::from(self.cells) * 4).next_multiple_of(PAGE);
        self.bytes.resize(length as usize, 0);
        let memory = rustix::fs::memfd_create(c"dormouse-restore", MemfdFlags::CLOEXEC)?;
        let mut rest = &self.bytes[..];
        while !rest.is_empty() {
            let n = rustix::io::write(&memory, rest)?;
            rest = &rest[n..];
        }
        let start = starts.first().copied().unwrap_or_default();
        Ok(Program { base: self.base, length, start, cells_at, memory, abouts: self.abouts })
    }

    fn operation(
        &mut self,
        call: Call,
        then: Then,
        (starts, cells_at): (&[u64], u64),
        what: String,
    ) {
        let cell_address = |cell: Cell| self.base + cells_at + u64::from(cell.0) * 4;
        let mut flags = call.flags;
        let mut args = [0u64; 6];
        for (n, (slot, arg)) in args.iter_mut().zip(call.args).enumerate() {
            *slot = match arg {
                Arg::Number(value) => value,
                Arg::At(cell) => cell_address(cell),
                Arg::Of(cell) => {
                    flags |= 1 << n;
                    cell_address(cell)
                }
            };
        }
        let out = match then {
            Then::Nothing => 0,
            Then::Into(cell) => {
                flags |= FLAG_STORE;
                cell_address(cell)
            }
            Then::To(address) => {
                flags |= FLAG_STORE;
                address
            }
            Then::Child(child) => {
                flags |= FLAG_FORK;
                starts.get(child).copied().unwrap_or_default()
            }
        };
        let at = self.base + self.bytes.len() as u64;
        let is_stage = flags & FLAG_STAGE != 0;
        self.abouts.push((at, About { what, call: call.number, is_stage }));
        self.bytes.extend_from_slice(&(call.number as u32).to_ne_bytes());
        self.bytes.extend_from_slice(&flags.to_ne_bytes());
        for arg in args {
            self.bytes.extend_from_slice(&arg.to_ne_bytes());
        }
        self.bytes.extend_from_slice(&out.to_ne_bytes());
    }
}

/// Programs, laid out for all processes of a restore.
#[derive(Debug)]
pub struct Program {
    base: u64,
    length: u64,
    start: u64,
    cells_at: u64,
    memory: OwnedFd,
    abouts: Vec<(u64, About)>,
}

impl Program {
    /// The address at which it must be mapped.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// The length of the mapping, in bytes.
    pub fn length_bytes(&self) -> u64 {
        self.length
    }

    /// The address of the first process's first operation.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Where the numbers of the descriptors that are passed in are written, 4 bytes each.
    pub fn descriptors_at(&self) -> u64 {
        self.cells_at
    }

    /// The memory.
    pub fn memory(&self) -> &OwnedFd {
        &self.memory
    }

    /// The purpose of the operation at an address.
    pub(crate) fn about(&self, address: u64) -> Option<&About> {
        let at = self.abouts.binary_search_by_key(&address, |(at, _)| *at).ok()?;
        Some(&self.abouts[at].1)
    }

    /// The present content of a cell.
    pub(crate) fn value(&self, cell: Cell) -> Result<i32, Errno> {
        let mut bytes = [0; 4];
        let offset = self.cells_at + u64::from(cell.0) * 4;
        match rustix::io::pread(self.memory.as_fd(), &mut bytes, offset)? {
            4 => Ok(i32::from_ne_bytes(bytes)),
            _ => Err(Errno::IO),
        }
    }

    /// Changes an operation before it is reached: `rseq(address, length, flags, signature)` and its
    /// like, with arguments that are only known once the process exists.
    pub(crate) fn patch(&self, operation: u64, number: i64, args: &[u64]) -> Result<(), Errno> {
        let offset = operation - self.base;
        rustix::io::pwrite(self.memory.as_fd(), &(number as u32).to_ne_bytes(), offset)?;
        for (n, arg) in args.iter().enumerate().take(6) {
            let at = offset + 8 + n as u64 * 8;
            rustix::io::pwrite(self.memory.as_fd(), &arg.to_ne_bytes(), at)?;
        }
        Ok(())
    }
}
