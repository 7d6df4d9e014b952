//! The code that a task continues in if its tracer ends while a call is injected into it, so that the program is not
//! disturbed.
//!
//! When a tracer ends, by SIGKILL for instance, the kernel detaches its tracees, and each goes on from the registers
//! that it has at that moment. Those are the program's own, or lead into this code. It undoes what was made for the
//! injected calls alone (a mapping, a descriptor), restores the signal mask and the registers, and continues what was
//! interrupted. Vector registers, flags and the stack pointer are those of the program all the time.
//!
//! **Place.** Code and data are in the zeros behind the ELF file in the last page of the vDSO, which every program has
//! mapped, readable and executable. The page is a copy of the process's own once it is written. A checkpoint contains
//! the code with its slots if there are any, for the handlers.
//!
//! ```text
//!   vDSO      ELF file
//!   room      code, the same in all processes; its first instruction is the `syscall` of injected calls
//!             slots of 208 bytes: the registers and the mask of one thread
//! ```
//!
//! A slot, by the distance from the address in a register, which is that of its code:
//!
//! ```text
//!    -64 mask   -56 address   -48 address after EINTR   -40 rax   -32 call that detects a handler
//!    -24 r9     -16 rcx       -8 r8
//!      0 code that loads r9 and jumps, and 13 bytes further the same with the address after EINTR
//!     32 rbx  40 rbp  48 r12  56 r13  64 r14  72 r15  80 rdx  88 rsi  96 rdi  104 r10  112 r11
//!    120 address of a selector, or start of a range   128 its byte   129 a byte that is lent   130 kind   131 mode
//!    136 length of the range
//! ```
//!
//! A slot of zeros is free, and the tracer that used one writes zeros. The slot of a tracer that was killed stays: a
//! signal handler may have interrupted this code, and will return to it. Another tracer uses such a slot only for the
//! same contents, and leaves it, until there is no free one. Then it takes one that no thread of the process has an
//! address of in its registers, in the part of its stack where the frames of handlers are, or in another slot that it
//! will come to.
//!
//! **Threads that did not run.** A thread that was stopped all the time (by SIGSTOP, by the freezer) when its tracer
//! ended is at the entry of this code, or at an injected call. The next tracer reads its registers from the slot and
//! makes the call that undoes ([`Ground::parked`]), so that such tracers use one slot, however many they are.
//!
//! **Interrupted calls.** As long as no call is injected, the registers say which call was interrupted and how
//! (-ERESTARTSYS and its like), with the address of this code. So the kernel itself decides whether the call begins
//! again: it continues two bytes before that address, or at it, with EINTR, after a signal handler. While calls are
//! injected all signals are blocked. The mask is then restored by ppoll(2) and rt_sigprocmask(2). ppoll fails with
//! EINTR if a handler runs. Then a call that any handler ends (pause(2), nanosleep(2), epoll_wait(2)) also fails with
//! EINTR. Other calls (read(2) of a pipe) begin again, as if the signal had arrived just before them.
//!
//! **Dispatched calls.** A thread may have its system calls reported to itself ([`super::selector`]). As long as its
//! selector says so it continues in a part of the code that makes none. The code writes the selector last, or makes
//! the dispatch anew.
//!
//! LIMIT: where there is no room for a slot (no vDSO, an ELF file that fills its last page, a vDSO that the program
//! has changed, five slots to which handlers will return), for 32-bit code and for a program that single-steps
//! itself, a task whose tracer ends in an injected call continues with wrong registers. LIMIT: a system call filter of
//! the program that ends it for one of the injected calls, ppoll(2) or rt_sigprocmask(2) does so: it is suspended only
//! as long as the tracer lives. LIMIT: the frame of a handler is not seen that another one, on an alternate stack, has
//! interrupted, nor beyond [`FRAMES_BYTES`]. KERNEL(6.12): a host may forbid writes to the memory of processes
//! (`proc_mem.force_override`).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use dormouse_kernel::call::{self, Registers};
use dormouse_record::PAGE_BYTES;

use super::blob;
use super::gadget::find;
use super::selector::Selector;
use crate::vdso;

const SLOT_BYTES: usize = 208;

/// How far from the stack pointer the frames of signal handlers are searched.
const FRAMES_BYTES: usize = 256 << 10;

/// Where in a slot the address in a register points to.
const PIVOT: u64 = 64;

/// Where in a slot, from there, a byte is that can be a selector.
const SELECTOR_AT: u64 = 129;

/// The trap flag.
const STEPS: u64 = 1 << 8;

/// The length of a `syscall` instruction.
const SYSCALL_BYTES: u64 = 2;

/// The calls that undo others.
pub(super) const UNDO: [u64; 2] = [libc::SYS_munmap as u64, libc::SYS_close as u64];

const ERESTARTSYS: i64 = -512;
const ERESTARTNOINTR: i64 = -513;
const ERESTARTNOHAND: i64 = -514;
const ERESTART_RESTARTBLOCK: i64 = -516;

type Slot = [u8; SLOT_BYTES];

/// The places in the memory of a process through which calls are injected into its threads.
#[derive(Debug)]
pub(crate) struct Ground {
    /// The address of a `syscall` instruction.
    pub(super) syscall: u64,
    room: Option<Room>,
}

#[derive(Debug)]
struct Room {
    pid: u32,
    /// `/proc/PID/mem`: an executable page is written as by a debugger.
    memory: File,
    /// The address of the code.
    start: u64,
    /// The slots as they were found.
    slots: Vec<Slot>,
}

/// A stopped thread that has not run since its tracer ended.
#[derive(Debug)]
pub(super) struct Parked {
    /// Its own registers, and its own mask.
    pub(super) registers: Registers,
    pub(super) mask: u64,
    /// The call that it would make before it continues: the number and two arguments.
    pub(super) call: Option<[u64; 3]>,
}

/// A slot that contains the registers of a stopped thread.
#[derive(Debug)]
pub(super) struct Berth {
    /// The address of the slot in a register.
    pub(super) pivot: u64,
    /// The registers with which the thread continues in the landing code.
    pub(super) parked: Registers,
    /// The same, if it has its own mask and no call can be made.
    pub(super) still: Registers,
    /// To be written with zeros.
    frees: Option<u64>,
}

impl Berth {
    /// The address of a byte in the slot for a dispatch without a selector.
    pub(super) fn selector(&self) -> u64 {
        self.pivot + SELECTOR_AT
    }
}

impl Ground {
    /// Of a process whose threads are stopped; `otherwise` returns the address of a `syscall` instruction outside the
    /// vDSO. `None` if there is none.
    pub(crate) fn of(
        pid: u32,
        object: Option<(u64, u64)>,
        otherwise: impl FnOnce() -> Option<u64>,
    ) -> Option<Self> {
        if let Some(room) = object.and_then(|(_, end)| Room::of(pid, end)) {
            return Some(Self { syscall: room.start, room: Some(room) });
        }
        let inside = object.and_then(|(start, end)| find(pid, start, end - start));
        let syscall = inside.or_else(otherwise)?;
        Some(Self { syscall, room: None })
    }

    /// The same, of a process with a vDSO.
    pub(crate) fn in_object(pid: u32) -> Option<Self> {
        let object = vdso::of_process(pid)?;
        Self::of(pid, Some((object.start, object.end)), || None)
    }

    /// A `syscall` instruction alone: for processes that end with their tracer.
    pub(crate) fn bare(syscall: u64) -> Self {
        Self { syscall, room: None }
    }

    /// Writes a slot. `None` if there is no place for it.
    pub(super) fn berth(
        &self,
        registers: &Registers,
        mask: u64,
        selector: Option<&Selector>,
    ) -> Option<Berth> {
        let room = self.room.as_ref()?;
        if !registers.are_of_64_bit() || registers.eflags & STEPS != 0 {
            return None;
        }
        let slot = slot(registers, mask, selector);
        #[cfg(test)]
        if super::deaths::is_unprotected() {
            return None;
        }
        let known = room.slots.iter().position(|found| *found == slot);
        let free = || room.slots.iter().position(is_free);
        let number = known.or_else(free).or_else(|| room.forgotten())?;
        let address = room.address(number);
        if known.is_none() {
            room.memory().write_all_at(&slot, address).ok()?;
        }
        let pivot = address + PIVOT;
        let at = |place: u64| match how(registers) {
            // The kernel continues two bytes before.
            How::Call { .. } => Registers { rip: room.start + place + 2, r11: pivot, ..*registers },
            How::Code => {
                let (rip, orig_rax) = (room.start + place, u64::MAX);
                Registers { rip, r11: pivot, orig_rax, ..*registers }
            }
        };
        let (parked, still) = (at(blob::parked()), at(blob::still()));
        Some(Berth { pivot, parked, still, frees: known.is_none().then_some(address) })
    }

    /// What a stopped thread with these registers continues behind the landing code. `None` if it is elsewhere.
    ///
    /// A program can forge these registers. It changes its own state alone: `call` is munmap(2) or close(2), and no
    /// filter of system calls protects the host from these.
    pub(super) fn parked(&self, registers: &Registers) -> Option<Parked> {
        let room = self.room.as_ref()?;
        let (place, is_again) = match how(registers) {
            How::Call { .. } => (registers.rip.wrapping_sub(SYSCALL_BYTES), true),
            How::Code => (registers.rip, false),
        };
        let place = place.wrapping_sub(room.start);
        let is_injected = place == 0 || place == SYSCALL_BYTES && !is_again;
        let pivot = match place {
            _ if is_injected => registers.r15,
            _ if place == blob::parked() => registers.r11,
            _ => return None,
        };
        let mut own = continued(room.slot(pivot)?, registers)?;
        if !is_injected {
            if is_again {
                // The kernel has not decided yet whether the call begins again.
                let Registers { rax, orig_rax, .. } = *registers;
                own.registers = Registers { rax, orig_rax, ..own.registers };
            }
            return Some(own);
        }
        let Registers { rbp, r12, r14, rdi, rsi, .. } = *registers;
        let number = if is_again { registers.orig_rax } else { registers.rax };
        own.call = match (place, rbp, r12) {
            (0, 0, _) => Some([number, rdi, rsi]),
            // There is nothing to undo yet.
            (0, _, 0) | (_, 0, _) => None,
            (_, _, 0) => Some([rbp, registers.rax, r14]),
            _ => Some([rbp, r12, r14]),
        };
        own.call = own.call.filter(|[number, ..]| UNDO.contains(number));
        Some(own)
    }

    /// Ends the use of a slot by a thread that has its own registers again.
    pub(super) fn leave(&self, berth: &Berth) {
        if let (Some(room), Some(address)) = (&self.room, berth.frees) {
            // A slot that cannot be written now is not used again.
            let _ = room.memory().write_all_at(&[0; SLOT_BYTES], address);
        }
    }

    /// The code with its slots, and their address, if tracers that were killed have left slots.
    pub(crate) fn left(&self) -> Option<(u64, Vec<u8>)> {
        let room = self.room.as_ref().filter(|room| !room.slots.iter().all(is_free))?;
        Some((room.start, [blob::landing(), room.slots.as_flattened()].concat()))
    }

    /// The number of slots that a thread may still use.
    #[cfg(test)]
    pub(super) fn slots_in_use(&self) -> usize {
        let slots = self.room.iter().flat_map(|room| &room.slots);
        slots.filter(|slot| !is_free(slot)).count()
    }

    /// Where a script continues if its tracer has ended: behind the injected call.
    pub(super) fn after_call(&self) -> Option<u64> {
        self.room.as_ref().map(|room| room.start + SYSCALL_BYTES)
    }
}

impl Room {
    fn of(pid: u32, end: u64) -> Option<Self> {
        let object = Object::here()?;
        let start = end.checked_sub(object.bytes)?;
        let page = end - PAGE_BYTES;
        let mut found = vec![0; HEADER_BYTES + PAGE_BYTES as usize];
        let places = [(start, HEADER_BYTES as u64), (page, PAGE_BYTES)];
        if call::read_memory(pid, &mut found, &places) != Ok(found.len()) {
            return None;
        }
        let (header, last) = found.split_at(HEADER_BYTES);
        let at = object.bytes_of_file.checked_sub(object.bytes - PAGE_BYTES)?;
        if header != object.header {
            return None;
        }
        let code = blob::landing();
        let (in_place, slots) = last.get(at as usize..)?.split_at_checked(code.len())?;
        let slots: Vec<Slot> = slots.as_chunks().0.to_vec();
        let has_code = in_place == code;
        // Another's bytes stay.
        let is_empty = || in_place.iter().chain(slots.as_flattened()).all(|byte| *byte == 0);
        if slots.is_empty() || !has_code && !is_empty() {
            return None;
        }
        let memory =
            File::options().read(true).write(true).open(format!("/proc/{pid}/mem")).ok()?;
        let room = Self { pid, memory, start: page + at, slots };
        if !has_code {
            room.memory().write_all_at(code, room.start).ok()?;
        }
        Some(room)
    }

    /// A slot of a killed tracer to which no thread will return. All threads are stopped.
    fn forgotten(&self) -> Option<usize> {
        let mut forgotten = vec![true; self.slots.len()];
        let mut stack = vec![0; FRAMES_BYTES];
        for thread in std::fs::read_dir(format!("/proc/{}/task", self.pid)).ok()? {
            let tid = thread.ok()?.file_name().to_str()?.parse().ok()?;
            let Registers { r9, r11, r15, rip, rsp, .. } = call::registers(tid).ok()?;
            let read =
                call::read_memory(tid, &mut stack, &[(rsp, FRAMES_BYTES as u64)]).unwrap_or(0);
            let words = stack[..read].as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
            let selector = call::dispatch(tid).ok().flatten().map_or(0, |one| one.selector);
            for word in words.chain([r9, r11, r15, rip, selector]) {
                self.remember(word, &mut forgotten);
            }
        }
        forgotten.into_iter().position(|is_forgotten| is_forgotten)
    }

    /// Strikes off the slot that this may be an address in, and those that its registers may be addresses in.
    fn remember(&self, word: u64, forgotten: &mut [bool]) {
        let number = (word.wrapping_sub(self.address(0)) / SLOT_BYTES as u64) as usize;
        if let Some(is_forgotten @ true) = forgotten.get_mut(number) {
            *is_forgotten = false;
            for word in words_of(&self.slots[number]) {
                self.remember(word, forgotten);
            }
        }
    }

    /// The slot that a register points to.
    fn slot(&self, pivot: u64) -> Option<&Slot> {
        let at = pivot.wrapping_sub(PIVOT).wrapping_sub(self.address(0));
        let slot = self.slots.get((at / SLOT_BYTES as u64) as usize);
        slot.filter(|_| at.is_multiple_of(SLOT_BYTES as u64))
    }

    fn memory(&self) -> &File {
        #[cfg(test)]
        super::deaths::point();
        &self.memory
    }

    fn address(&self, number: usize) -> u64 {
        self.start + (blob::landing().len() + number * SLOT_BYTES) as u64
    }
}

const HEADER_BYTES: usize = 64;

/// The vDSO of this kernel: processes have the same.
struct Object {
    header: [u8; HEADER_BYTES],
    /// The length of the ELF file, rounded up.
    bytes_of_file: u64,
    /// The length of the mapping.
    bytes: u64,
}

impl Object {
    fn here() -> Option<&'static Self> {
        static HERE: OnceLock<Option<Object>> = OnceLock::new();
        HERE.get_or_init(Self::read).as_ref()
    }

    fn read() -> Option<Self> {
        // SAFETY: it reads the auxiliary vector of this process.
        let start = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) };
        let mut header = [0; HEADER_BYTES];
        let places = [(start, HEADER_BYTES as u64)];
        let read = call::read_memory(std::process::id(), &mut header, &places);
        if start == 0 || read != Ok(HEADER_BYTES) || !header.starts_with(b"\x7fELF\x02\x01") {
            return None;
        }
        let number = |at: usize| header[at..].first_chunk().map(|b| u64::from_le_bytes(*b));
        let short =
            |at: usize| header[at..].first_chunk().map(|b| u64::from(u16::from_le_bytes(*b)));
        // The section headers are the last part of the file.
        let sections = number(0x28).filter(|at| *at != 0)?;
        let end = sections.checked_add(short(0x3a)? * short(0x3c)?)?;
        let bytes_of_file = end.checked_next_multiple_of(16)?;
        Some(Self { header, bytes_of_file, bytes: end.checked_next_multiple_of(PAGE_BYTES)? })
    }
}

fn is_free(slot: &Slot) -> bool {
    slot.iter().all(|byte| *byte == 0)
}

/// What a thread with these registers continues.
enum How {
    Code,
    /// An interrupted call: the number with which it begins again, and whether every signal handler ends it.
    Call {
        number: u64,
        ends: bool,
    },
}

fn how(registers: &Registers) -> How {
    let number = registers.orig_rax;
    match registers.rax as i64 {
        _ if (number as i64) < 0 => How::Code,
        ERESTARTSYS | ERESTARTNOINTR => How::Call { number, ends: false },
        ERESTARTNOHAND => How::Call { number, ends: true },
        ERESTART_RESTARTBLOCK => How::Call { number: libc::SYS_restart_syscall as u64, ends: true },
        _ => How::Code,
    }
}

/// mov r9, [-24]; jmp [-56]; mov r9, [-24]; jmp [-48]
const CODE: [u8; 32] = [
    0x4c, 0x8b, 0x0d, 0xe1, 0xff, 0xff, 0xff, 0xff, 0x25, 0xbb, 0xff, 0xff, 0xff, //
    0x4c, 0x8b, 0x0d, 0xd4, 0xff, 0xff, 0xff, 0xff, 0x25, 0xb6, 0xff, 0xff, 0xff, //
    0, 0, 0, 0, 0, 0,
];

fn slot(registers: &Registers, mask: u64, selector: Option<&Selector>) -> Slot {
    let Registers { rip, rax, r8, r9, rcx, rbx, rbp, r12, r13, r14, r15, .. } = *registers;
    let Registers { rdx, rsi, rdi, r10, r11, .. } = *registers;
    let detects = |ends| if ends { libc::SYS_ppoll } else { libc::SYS_rt_sigprocmask } as u64;
    let (again, rax, call) = match how(registers) {
        How::Call { number, ends } => (rip - SYSCALL_BYTES, number, detects(ends)),
        How::Code => (rip, rax, detects(false)),
    };
    let before = [mask, again, rip, rax, call, r9, rcx, r8];
    let behind = [rbx, rbp, r12, r13, r14, r15, rdx, rsi, rdi, r10, r11];
    let words =
        |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let dispatch = selector.map_or([0; 3], Selector::words);
    let parts = [words(&before), CODE.to_vec(), words(&behind), words(&dispatch)];
    let mut slot = [0; SLOT_BYTES];
    slot.copy_from_slice(&parts.concat());
    slot
}

/// The words of a slot.
fn words_of(slot: &Slot) -> [u64; SLOT_BYTES / 8] {
    let mut words = [0; SLOT_BYTES / 8];
    for (word, bytes) in words.iter_mut().zip(slot.as_chunks().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

/// What a thread continues by a slot; its other registers are its own. `None` if that is not a slot, or that of a
/// thread that has its system calls reported to itself.
fn continued(slot: &Slot, registers: &Registers) -> Option<Parked> {
    let words = words_of(slot);
    let [mask, again, rip, rax, call, r9, rcx, r8] = *words.first_chunk()?;
    let [rbx, rbp, r12, r13, r14, r15, rdx, rsi, rdi, r10, r11, 0, 0, 0] = *words.last_chunk()?
    else {
        return None;
    };
    if slot[PIVOT as usize..][..CODE.len()] != CODE {
        return None;
    }
    let is_call = again != rip;
    let orig_rax = if is_call { rax } else { u64::MAX };
    let rax = match (rax.cast_signed(), call.cast_signed()) {
        (_, _) if !is_call => rax,
        (libc::SYS_restart_syscall, _) => ERESTART_RESTARTBLOCK.cast_unsigned(),
        (_, libc::SYS_ppoll) => ERESTARTNOHAND.cast_unsigned(),
        _ => ERESTARTNOINTR.cast_unsigned(),
    };
    let registers = Registers { rip, rax, orig_rax, rbx, rbp, r12, r13, r14, r15, ..*registers };
    let registers = Registers { r8, r9, r10, r11, rcx, rdx, rsi, rdi, ..registers };
    Some(Parked { registers, mask, call: None })
}

/// Registers with which a stopped thread continues that waits in a script whose tracer has ended; `None` if it does
/// not, or continues by itself.
pub(crate) fn skip_wait(tid: u32, registers: &Registers) -> Option<Registers> {
    /// Where the address is at which a script continues, behind its page of code ([`super::script`]).
    const NEXT_AT: u64 = 16;
    let (base, follower) = (registers.r12, blob::follower());
    let is_inside = base.is_multiple_of(PAGE_BYTES)
        && registers.rip.wrapping_sub(base) < follower.len() as u64
        && registers.rbp == libc::SYS_munmap as u64;
    if !is_inside {
        return None;
    }
    let mut found = vec![0; follower.len() + 8];
    let places = [(base, follower.len() as u64), (base + PAGE_BYTES + NEXT_AT, 8)];
    if call::read_memory(tid, &mut found, &places) != Ok(found.len()) {
        return None;
    }
    let (found, next) = found.split_last_chunk()?;
    let rip = u64::from_ne_bytes(*next);
    // Nothing is known of the calls from here on, which have no effect.
    let again = Registers { rip, orig_rax: u64::MAX, ..*registers };
    (found == follower && rip != base).then_some(again)
}

/// Puts the code of another process with its slots into a process, at its address in the vDSO.
pub(crate) fn put(pid: u32, address: u64, bytes: &[u8]) -> std::io::Result<()> {
    let object = vdso::of_process(pid).unwrap_or_default();
    if address < object.start || address + bytes.len() as u64 > object.end {
        return Err(std::io::ErrorKind::NotFound.into());
    }
    let memory = File::options().write(true).open(format!("/proc/{pid}/mem"))?;
    memory.write_all_at(bytes, address)
}

/// Whether these may be registers of a thread inside the landing code: its address is in the page of its slot.
pub(crate) fn may_be_inside(registers: &Registers) -> bool {
    let is_near = |slot: u64| slot / PAGE_BYTES == registers.rip / PAGE_BYTES;
    [registers.r9, registers.r11, registers.r15].into_iter().any(is_near)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slot_that_another_one_leads_to_is_not_forgotten() {
        let memory = File::open("/dev/null").unwrap();
        let mut room = Room { pid: 0, memory, start: 0x7000, slots: vec![[0; SLOT_BYTES]; 5] };
        let [first, second, fourth] = [0, 1, 3].map(|number| room.address(number) + PIVOT);
        // Threads in the landing code have such an address in one of these registers.
        let to = |r15, r11| slot(&Registers { r15, r11, ..Registers::default() }, 0, None);
        (room.slots[3], room.slots[1]) = (to(0, second), to(first, 0));
        let mut forgotten = vec![true; 5];
        room.remember(fourth, &mut forgotten);
        assert_eq!(forgotten, [false, false, true, false, true]);
    }
}
