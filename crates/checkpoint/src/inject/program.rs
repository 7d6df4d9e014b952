//! Restore programs: flat lists of system calls, laid out in two pieces of shared memory.
//!
//! ```text
//! sealed     0      the interpreter
//!            4096   data that operations point to
//!            ...    operations of 64 bytes
//!
//! writable   0      the interpreter, until the sealed memory is mapped
//!            4096   the first operations, which map the sealed memory and continue there
//!            8192   cells, 4 bytes each: descriptor numbers and other results of calls; data that
//!                   calls write to
//! ```
//!
//! Both are memfds of mode 0, which no path opens again, mapped shared at one address in every
//! process of a restore. The sealed memory is readable and executable, and no process can write to
//! it. The writable memory is mapped by the newborn; the conductor reads and writes it as a file. No
//! process executes it after the first stage, and no operation is read from it.
//!
//! Every pointer in them is an address of these mappings. Data of a checkpoint only become operations
//! through the functions that the modules of [`crate::load`] call, and an address of a checkpoint lies
//! in neither mapping ([`dormouse_record::check`]).

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, Mode, SealFlags};
use rustix::io::Errno;

use super::blob::interpreter;

/// Bytes of one operation.
pub(crate) const OPERATION_BYTES: u64 = 64;
/// Where data begin.
const DATA_AT: u64 = 4096;
const PAGE: u64 = 4096;
/// Where the writable memory is mapped, from the begin of the sealed one.
const WRITABLE_AT: u64 = 3 << 28;
/// Where both end at the latest.
pub(crate) const END: u64 = 1 << 30;
/// Where the first operations are, in the writable memory.
const BOOT_AT: u64 = 4096;
/// Where cells begin there.
const CELLS_AT: u64 = 8192;

const FLAG_STAGE: u32 = 0x100;
const FLAG_FORK: u32 = 0x200;
const FLAG_LENIENT: u32 = 0x400;
const FLAG_EXPECT: u32 = 0x800;
const FLAG_STORE: u32 = 0x1000;
const FLAG_WIDE: u32 = 0x2000;

/// A number that becomes known while the programs run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Cell(u32);

impl Cell {
    /// Where it is in the writable memory.
    fn offset(self) -> u64 {
        CELLS_AT + u64::from(self.0) * 4
    }
}

/// An argument of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Arg {
    /// A number or an address.
    Number(u64),
    /// The content of a cell at run time.
    Of(Cell),
    /// The address of a cell, for calls that write numbers to memory, such as pipe2(2) into two.
    At(Cell),
    /// The number of 64 bits that is at this address at run time, in data that can be written; the first
    /// argument alone.
    Wide(u64),
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

    /// Adds a call whose result goes, as 4 bytes, to an address in data that can be written.
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
    bytes: Vec<u8>,
    /// From [`CELLS_AT`] on.
    writable: Vec<u8>,
    abouts: Vec<(u64, About)>,
}

impl Builder {
    /// A program that will be mapped at `base`.
    pub(crate) fn new(base: u64) -> Self {
        let mut bytes = vec![0; DATA_AT as usize];
        let code = interpreter();
        bytes[..code.len()].copy_from_slice(code);
        Self { base, bytes, writable: Vec::new(), abouts: Vec::new() }
    }

    /// Adds a cell. Of two consecutive cells the second is adjacent to the first.
    pub(crate) fn cell(&mut self) -> Cell {
        let cell = Cell((self.writable.len() / 4) as u32);
        self.writable.extend([0; 4]);
        cell
    }

    /// Adds a cell that has this content until a call writes to it.
    pub(crate) fn cell_of(&mut self, content: u32) -> Cell {
        let cell = self.cell();
        self.writable[cell.0 as usize * 4..][..4].copy_from_slice(&content.to_ne_bytes());
        cell
    }

    /// Keeps bytes that a call writes to, aligned to 16, and gives their address.
    pub(crate) fn writable(&mut self, bytes: &[u8]) -> u64 {
        self.writable.resize(self.writable.len().next_multiple_of(16), 0);
        let at = self.base + WRITABLE_AT + CELLS_AT + self.writable.len() as u64;
        self.writable.extend_from_slice(bytes);
        self.writable.resize(self.writable.len().next_multiple_of(4), 0);
        at
    }

    /// Keeps numbers of 64 bits that a call writes to.
    pub(crate) fn writable_numbers(&mut self, numbers: &[u64]) -> u64 {
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_ne_bytes()).collect();
        self.writable(&bytes)
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

    /// Lays out the sequences. The first process executes `boot`, which leads to its first stage, and
    /// then the first sequence. `memory` receives the number of the sealed memory.
    pub(crate) fn finish(
        mut self,
        memory: Cell,
        boot: Sequence,
        sequences: Vec<Sequence>,
    ) -> Result<Program, Errno> {
        self.bytes.resize(self.bytes.len().next_multiple_of(OPERATION_BYTES as usize), 0);
        let mut starts = Vec::with_capacity(sequences.len());
        let mut at = self.base + self.bytes.len() as u64;
        for sequence in &sequences {
            starts.push(at);
            at += sequence.calls.len() as u64 * OPERATION_BYTES;
        }
        let mut operations = Vec::with_capacity((at - self.base) as usize - self.bytes.len());
        let from = self.base + self.bytes.len() as u64;
        for (call, then, what) in sequences.into_iter().flat_map(|sequence| sequence.calls) {
            self.operation(&mut operations, from, call, then, &starts, what);
        }
        self.bytes.append(&mut operations);
        self.bytes.resize(self.bytes.len().next_multiple_of(PAGE as usize), 0);
        let sealed_bytes = self.bytes.len() as u64;
        let length =
            (CELLS_AT + self.writable.len() as u64).next_multiple_of(PAGE).max(CELLS_AT + PAGE);
        if sealed_bytes > WRITABLE_AT || length > END - WRITABLE_AT {
            return Err(Errno::FBIG);
        }

        let writable_base = self.base + WRITABLE_AT;
        let boot = self.boot(memory, boot, (sealed_bytes, length));
        let mut writable = vec![0; CELLS_AT as usize];
        let code = interpreter();
        writable[..code.len()].copy_from_slice(code);
        let mut operations = Vec::new();
        for (call, then, what) in boot.calls {
            self.operation(
                &mut operations,
                writable_base + BOOT_AT,
                call,
                then,
                &starts[..1],
                what,
            );
        }
        let room = writable[BOOT_AT as usize..].get_mut(..operations.len());
        room.ok_or(Errno::FBIG)?.copy_from_slice(&operations);
        writable.append(&mut self.writable);
        writable.resize(length as usize, 0);

        let size = SealFlags::SHRINK | SealFlags::GROW;
        // No mapping of it can be written to: there is none yet.
        let sealed = memory_of(&self.bytes, size | SealFlags::FUTURE_WRITE)?;
        let memory = memory_of(&writable, size)?;
        Ok(Program { base: self.base, length, sealed, memory, abouts: self.abouts })
    }

    /// What is done in the writable memory: until `boot` has come to its stage, where the conductor has the
    /// process go on in the sealed interpreter, and a few operations more.
    fn boot(&self, memory: Cell, boot: Sequence, (sealed, writable): (u64, u64)) -> Sequence {
        let what = "the program of the restore";
        let mut all = Sequence::default();
        let access = libc::PROT_READ | libc::PROT_EXEC;
        let kind = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
        let place = [self.base.into(), sealed.into(), Arg::from(access), Arg::from(kind)];
        let [start, length, access, kind] = place;
        let args = [start, length, access, kind, memory.into(), Arg::Number(0)];
        all.call(what, Call::new(libc::SYS_mmap, args));
        all.call(what, Call::new(libc::SYS_close, [memory.into()]));
        all.append(boot);
        let access = Arg::from(libc::PROT_READ | libc::PROT_WRITE);
        let args = [(self.base + WRITABLE_AT).into(), writable.into(), access];
        all.call(what, Call::new(libc::SYS_mprotect, args));
        // A call that returns 0 goes where a child would.
        all.fork(what, 0, Call::new(libc::SYS_sched_yield, []));
        all
    }

    /// Adds an operation to those that are at `from`.
    fn operation(
        &mut self,
        operations: &mut Vec<u8>,
        from: u64,
        call: Call,
        then: Then,
        starts: &[u64],
        what: String,
    ) {
        let cell_address = |cell: Cell| self.base + WRITABLE_AT + cell.offset();
        let mut flags = call.flags;
        let mut args = [0u64; 6];
        for (n, (slot, arg)) in args.iter_mut().zip(call.args).enumerate() {
            *slot = match arg {
                Arg::Number(value) => value,
                Arg::At(cell) => cell_address(cell),
                Arg::Wide(address) => {
                    debug_assert_eq!(n, 0, "no other argument has 64 bits");
                    flags |= FLAG_WIDE;
                    address
                }
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
        let at = from + operations.len() as u64;
        let is_stage = flags & FLAG_STAGE != 0;
        self.abouts.push((at, About { what, call: call.number, is_stage }));
        operations.extend_from_slice(&(call.number as u32).to_ne_bytes());
        operations.extend_from_slice(&flags.to_ne_bytes());
        for arg in args {
            operations.extend_from_slice(&arg.to_ne_bytes());
        }
        operations.extend_from_slice(&out.to_ne_bytes());
    }
}

/// Bytes as memory that no path opens, with seals that stay.
fn memory_of(bytes: &[u8], seals: SealFlags) -> Result<OwnedFd, Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = rustix::fs::memfd_create(c"dormouse-restore", flags)?;
    rustix::fs::fchmod(&memory, Mode::empty())?;
    let mut rest = bytes;
    while !rest.is_empty() {
        let n = rustix::io::write(&memory, rest)?;
        rest = &rest[n..];
    }
    rustix::fs::fcntl_add_seals(&memory, seals | SealFlags::SEAL)?;
    Ok(memory)
}

/// Programs, laid out for all processes of a restore.
#[derive(Debug)]
pub(crate) struct Program {
    base: u64,
    length: u64,
    sealed: OwnedFd,
    memory: OwnedFd,
    abouts: Vec<(u64, About)>,
}

impl Program {
    /// The address at which the writable memory must be mapped.
    pub(crate) fn base(&self) -> u64 {
        self.base + WRITABLE_AT
    }

    /// The length of that mapping, in bytes.
    pub(crate) fn length_bytes(&self) -> u64 {
        self.length
    }

    /// The address of the first process's first operation.
    pub(crate) fn start(&self) -> u64 {
        self.base() + BOOT_AT
    }

    /// Where in the writable memory the numbers of the passed descriptors are written, 4 bytes each.
    pub(crate) fn descriptors_at(&self) -> u64 {
        CELLS_AT
    }

    /// The memory that is followed.
    pub(crate) fn memory(&self) -> &OwnedFd {
        &self.memory
    }

    /// The sealed memory, which the newborn receives as its first descriptor.
    pub(crate) fn sealed(&self) -> &OwnedFd {
        &self.sealed
    }

    #[cfg(test)]
    fn sealed_bytes(&self) -> usize {
        rustix::fs::fstat(&self.sealed).map_or(0, |stat| stat.st_size as usize)
    }

    /// The address of the sealed interpreter, where the work area begins.
    pub(crate) fn sealed_base(&self) -> u64 {
        self.base
    }

    /// The address of a `syscall` instruction in sealed memory.
    pub(crate) fn gadget(&self) -> Option<u64> {
        const SYSCALL: [u8; 2] = [0x0f, 0x05];
        let at = interpreter().windows(2).position(|bytes| bytes == SYSCALL)?;
        Some(self.base + at as u64)
    }

    /// The purpose of the operation at an address.
    pub(crate) fn about(&self, address: u64) -> Option<&About> {
        let at = self.abouts.binary_search_by_key(&address, |(at, _)| *at).ok()?;
        Some(&self.abouts[at].1)
    }

    /// The present content of a cell.
    pub(crate) fn value(&self, cell: Cell) -> Result<i32, Errno> {
        let mut bytes = [0; 4];
        match rustix::io::pread(self.memory.as_fd(), &mut bytes, cell.offset())? {
            4 => Ok(i32::from_ne_bytes(bytes)),
            _ => Err(Errno::IO),
        }
    }

    /// Writes to a cell.
    pub(crate) fn set(&self, cell: Cell, value: u32) -> Result<(), Errno> {
        rustix::io::pwrite(self.memory.as_fd(), &value.to_ne_bytes(), cell.offset()).map(drop)
    }

    /// Changes one of the first operations before it is reached: `rseq(address, length, flags,
    /// signature)`, with arguments that are only known once the process exists. No other operation
    /// can be changed.
    pub(crate) fn patch(&self, operation: u64, number: i64, args: &[u64]) -> Result<(), Errno> {
        let offset = operation.checked_sub(self.base()).filter(|at| *at < CELLS_AT);
        let offset = offset.ok_or(Errno::FAULT)?;
        rustix::io::pwrite(self.memory.as_fd(), &(number as u32).to_ne_bytes(), offset)?;
        for (n, arg) in args.iter().enumerate().take(6) {
            let at = offset + 8 + n as u64 * 8;
            rustix::io::pwrite(self.memory.as_fd(), &arg.to_ne_bytes(), at)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 0x20_0000_0000;

    fn program() -> Program {
        let mut builder = Builder::new(BASE);
        let (memory, other) = (builder.cell(), builder.cell());
        let written = builder.writable_numbers(&[7]);
        let mut sequence = Sequence::default();
        sequence.call_into("a number", other, Call::new(libc::SYS_getpid, []));
        sequence.call_to("a number", written, Call::new(libc::SYS_getpid, []));
        let mut boot = Sequence::default();
        boot.stage("begin");
        builder.finish(memory, boot, vec![sequence]).unwrap()
    }

    #[test]
    fn operations_are_sealed_and_no_path_opens_them() {
        let program = program();
        for memory in [program.sealed(), program.memory()] {
            assert_eq!(rustix::fs::fstat(memory).unwrap().st_mode & 0o7777, 0);
            let seals = rustix::fs::fcntl_get_seals(memory).unwrap();
            assert!(seals.contains(SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW));
        }
        let written = rustix::io::pwrite(program.sealed(), &[0; 8], DATA_AT);
        assert_eq!(written, Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(program.sealed(), 0), Err(Errno::PERM));
    }

    #[test]
    fn results_go_to_the_writable_memory_and_only_the_first_operations_change() {
        let program = program();
        let mut all = vec![0; program.sealed_bytes()];
        rustix::io::pread(program.sealed(), &mut all, 0).unwrap();
        let writable = program.base()..program.base() + program.length_bytes();
        let outs = all[DATA_AT as usize..].chunks_exact(OPERATION_BYTES as usize).take(2);
        for operation in outs {
            let out = u64::from_ne_bytes(*operation.last_chunk().unwrap());
            assert!(writable.contains(&out), "{out:x}");
        }
        let mut page = [0; 8];
        rustix::io::pread(program.memory(), &mut page, CELLS_AT + 16).unwrap();
        assert_eq!(u64::from_ne_bytes(page), 7);
        assert_eq!(program.patch(program.start(), libc::SYS_rseq, &[1; 4]), Ok(()));
        assert_eq!(program.patch(BASE + DATA_AT, libc::SYS_rseq, &[1; 4]), Err(Errno::FAULT));
        let cells = program.base() + CELLS_AT;
        assert_eq!(program.patch(cells, libc::SYS_rseq, &[1; 4]), Err(Errno::FAULT));
    }

    #[test]
    fn the_interpreter_has_a_syscall_instruction() {
        let program = program();
        let gadget = program.gadget().unwrap();
        let mut bytes = [0; 2];
        rustix::io::pread(program.sealed(), &mut bytes, gadget - BASE).unwrap();
        assert_eq!(bytes, [0x0f, 0x05]);
    }
}
