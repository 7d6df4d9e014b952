//! Calls injected into another task that is stopped: by its own registers and an existing `syscall`
//! instruction.
//!
//! A call is two stops, at its entry and at its exit; neither sends a signal. (A single step would:
//! SIGTRAP, and if the task blocks or ignores that, the kernel resets its action.) Signals are
//! blocked meanwhile, so that none is delivered between two calls.
//!
//! ORDER: the kernel decides about restarting an interrupted system call only while it handles
//! signals. So a task is brought to a stop there ([`Remote::finish`]) before it gets its own
//! registers back.
//!
//! ORDER: this process may end between any two requests, and the task then continues with the registers
//! and the mask that it has. The program's own registers go with its own mask. All others lead into the landing code
//! ([`super::landing`]), which restores both.

use std::ops::Range;
use std::time::Duration;

use dormouse_kernel::Errno;
use dormouse_kernel::call::{self, Registers, Stop};
use dormouse_record::PAGE_BYTES;

use super::landing::{self, Berth, Ground, Parked};
use super::selector::Selector;

/// As many polls take less time than a sleep.
const LOOKS_AT_ONCE: u32 = 50;

/// PTRACE_EVENT_STOP.
pub(crate) const EVENT_STOP: i32 = 128;

/// A stopped tracee into which calls are injected.
#[derive(Debug)]
pub(crate) struct Remote<'g> {
    tid: u32,
    ground: &'g Ground,
    registers: Registers,
    mask: u64,
    /// The registers with which the task continues.
    resumed: Registers,
    /// It would report injected calls to itself.
    selector: Option<Selector>,
    berth: Option<Berth>,
    undo: Undo,
    /// The task has continued by itself.
    has_gone_on: bool,
}

/// The call that undoes another one: its number (0 for none), its first argument (0 for the result of the other), its
/// second.
#[derive(Debug, Clone, Copy, Default)]
struct Undo([u64; 3]);

impl<'g> Remote<'g> {
    /// Begins.
    pub(crate) fn begin(tid: u32, ground: &'g Ground) -> Result<Self, Errno> {
        Self::begin_to_resume(tid, ground, |registers| registers)
    }

    /// Begins; `resumed` returns the registers with which the task continues in the end, by the original ones.
    pub(crate) fn begin_to_resume(
        tid: u32,
        ground: &'g Ground,
        resumed: impl FnOnce(Registers) -> Registers,
    ) -> Result<Self, Errno> {
        let (registers, mask) = (call::registers(tid)?, call::signal_mask(tid)?);
        // ORDER: the kernel forgets the sequence at the first call from elsewhere.
        let registers = abort_sequence(tid, registers);
        let selector = Selector::of(tid)?;
        let at = landing::skip_wait(tid, &registers).unwrap_or(registers);
        let parked = ground.parked(&at).filter(|_| selector.is_none());
        let (registers, mask, call) = match parked {
            Some(Parked { registers, mask, call }) => (registers, mask, call),
            None => (registers, mask, None),
        };
        let resumed = resumed(registers);
        let berth = ground.berth(&resumed, mask, selector.as_ref());
        let (undo, has_gone_on) = (Undo::default(), false);
        let mut new =
            Self { tid, ground, registers, mask, resumed, selector, berth, undo, has_gone_on };
        if let Some([number, first, second]) = call {
            // ORDER: the registers that lead to this call are replaced by the call itself, which is made once.
            new.call_raw(number as i64, [first, second])?;
        }
        if let Some(selector) = &new.selector {
            selector.lend(new.tid(), new.spare())?;
            if let Some(berth) = &new.berth {
                call::set_registers(new.tid(), &berth.still)?;
            }
            selector.allow(new.tid(), new.spare())?;
        }
        if let Some(berth) = &new.berth {
            call::set_registers(new.tid(), &berth.parked)?;
        }
        call::set_signal_mask(new.tid(), u64::MAX)?;
        Ok(new)
    }

    /// The task, for one request. Tests end this process before any of them.
    fn tid(&self) -> u32 {
        #[cfg(test)]
        super::deaths::point();
        self.tid
    }

    /// A byte for a dispatch without a selector.
    fn spare(&self) -> Option<u64> {
        self.berth.as_ref().map(Berth::selector)
    }

    /// The original registers; those of the abort handler for a thread inside a restartable sequence.
    pub(crate) fn registers(&self) -> Registers {
        self.registers
    }

    /// The original signal mask.
    pub(crate) fn mask(&self) -> u64 {
        self.mask
    }

    /// Makes a call and returns its result.
    pub(crate) fn call<const N: usize>(
        &mut self,
        number: i64,
        args: [u64; N],
    ) -> Result<u64, Errno> {
        let returned = self.call_raw(number, args)? as i64;
        if (-4095..0).contains(&returned) {
            return Err(Errno::from_raw_os_error(-returned as i32));
        }
        Ok(returned as u64)
    }

    /// The same; an error of the call is returned as its result.
    pub(crate) fn call_raw<const N: usize>(
        &mut self,
        number: i64,
        args: [u64; N],
    ) -> Result<u64, Errno> {
        self.enter(number, args)?;
        self.step_to_call()?;
        Ok(call::registers(self.tid())?.rax)
    }

    /// Makes a call whose effect is undone by [`Remote::undo`], or in the task itself if this process ends before:
    /// `undo` is the number and the second argument of the call that does so, with the result as the first.
    pub(super) fn call_for_now<const N: usize>(
        &mut self,
        number: i64,
        args: [u64; N],
        undo: (i64, u64),
    ) -> Result<u64, Errno> {
        debug_assert!(landing::UNDO.contains(&(undo.0 as u64)), "the next tracer makes no others");
        self.undo = Undo([undo.0 as u64, 0, undo.1]);
        let made = self.call(number, args);
        self.undo.0[1] = *made.as_ref().unwrap_or(&0);
        if made.is_err() {
            self.undo = Undo::default();
        }
        made
    }

    /// Undoes the last [`Remote::call_for_now`].
    pub(super) fn undo(&mut self) -> Result<(), Errno> {
        // ORDER: the call itself is made once, also if this process ends meanwhile.
        let Undo([number, first, second]) = std::mem::take(&mut self.undo);
        self.call(number as i64, [first, second]).map(drop)
    }

    /// Makes a descriptor in the task; returns what `copy` makes of its number. It is closed afterwards.
    pub(crate) fn descriptor<const N: usize, T>(
        &mut self,
        number: i64,
        args: [u64; N],
        copy: impl FnOnce(u64) -> T,
    ) -> Result<T, Errno> {
        let made = self.call_for_now(number, args, (libc::SYS_close, 0))?;
        let copy = copy(made);
        self.undo().map(|()| copy)
    }

    /// Where a script ([`super::script`]) continues whose tracer has ended; `None` if it waits for ever.
    pub(super) fn landing(&self) -> Option<u64> {
        self.ground.after_call().filter(|_| self.berth.is_some())
    }

    /// Makes the task follow a script ([`super::script`]) until it is done, and stops it. `code` is mapped by
    /// [`Remote::call_for_now`].
    pub(super) fn follow(
        &mut self,
        code: u64,
        calls: Range<u64>,
        is_done: impl Fn() -> Result<bool, Errno>,
    ) -> Result<(), Errno> {
        let (rbx, r13) = (calls.start, calls.end.wrapping_neg());
        let (rip, orig_rax) = (code, u64::MAX);
        let registers = Registers { rip, rbx, r13, orig_rax, ..self.led() };
        call::set_registers(self.tid(), &registers)?;
        call::resume(self.tid(), 0)?;
        let followed = self.until_done(code, is_done);
        match followed {
            // Ended, or at the stop before a signal.
            Err(Errno::SRCH | Errno::INTR) => return followed,
            Ok(()) | Err(_) => {
                call::interrupt(self.tid())?;
                self.until_event_stop(Some(code))?;
            }
        }
        // After a long pause of this process the task has continued by itself.
        self.has_gone_on = self.is_outside(code)?;
        if self.has_gone_on { Err(Errno::TIME) } else { followed }
    }

    /// Whether a stopped task is outside the code of a script.
    fn is_outside(&self, code: u64) -> Result<bool, Errno> {
        Ok(call::registers(self.tid())?.rip.wrapping_sub(code) >= PAGE_BYTES)
    }

    /// A task that has continued by itself after a script gets a signal at the stop before it, and stops behind it.
    fn pass_on(&self, code: Option<u64>, signal: i32) -> Result<(), Errno> {
        if !code.is_some_and(|code| self.is_outside(code) == Ok(true)) {
            return Err(Errno::INTR);
        }
        call::interrupt(self.tid())?;
        call::resume(self.tid(), signal)
    }

    fn until_done(
        &self,
        code: u64,
        is_done: impl Fn() -> Result<bool, Errno>,
    ) -> Result<(), Errno> {
        let mut looks = 0u32;
        while !is_done()? {
            match call::poll_stop(self.tid())? {
                None => {}
                // A group stop that was pending: the task continues all the same.
                Some(Stop::Event(EVENT_STOP, _)) => call::resume(self.tid(), 0)?,
                Some(Stop::Ended(_)) => return Err(Errno::SRCH),
                Some(Stop::Signal(signal)) => {
                    return self.pass_on(Some(code), signal).and(Err(Errno::TIME));
                }
                Some(_) => return Err(Errno::INTR),
            }
            looks += 1;
            match looks {
                0..LOOKS_AT_ONCE => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(20)),
            }
        }
        Ok(())
    }

    /// The original registers, but for those that lead the task if this process ends.
    fn led(&self) -> Registers {
        let Undo([rbp, r12, r14]) = self.undo;
        let r15 = self.berth.as_ref().map_or(self.registers.r15, |berth| berth.pivot);
        Registers { rbp, r12, r14, r15, ..self.registers }
    }

    /// Brings the task to the entry of a call.
    fn enter<const N: usize>(&mut self, number: i64, args: [u64; N]) -> Result<(), Errno> {
        let mut all = [0; 6];
        all[..N].copy_from_slice(&args);
        let [rdi, rsi, rdx, r10, r8, r9] = all;
        if self.has_gone_on {
            return Err(Errno::TIME);
        }
        let rip = self.ground.syscall;
        let (rax, orig_rax) = (number as u64, u64::MAX);
        let registers = Registers { rdi, rsi, rdx, r10, r8, r9, rax, orig_rax, rip, ..self.led() };
        call::set_registers(self.tid(), &registers)?;
        self.step_to_call()
    }

    /// Makes a call that waits, and interrupts it before it can: the kernel then keeps the restart
    /// block in the task (restart_syscall(2)).
    pub(crate) fn interrupted(&mut self, number: i64, args: [u64; 6]) -> Result<i64, Errno> {
        self.enter(number, args)?;
        call::interrupt(self.tid())?;
        call::resume(self.tid(), 0)?;
        self.until_event_stop(None)?;
        Ok(call::registers(self.tid())?.rax as i64)
    }

    fn step_to_call(&self) -> Result<(), Errno> {
        call::resume_to_call(self.tid())?;
        loop {
            match call::wait_stop(Some(self.tid()))?.1 {
                Stop::Call => return Ok(()),
                Stop::Ended(_) => return Err(Errno::SRCH),
                // A group stop that was pending: the task continues all the same.
                Stop::Event(EVENT_STOP, _) => call::resume_to_call(self.tid())?,
                Stop::Signal(_) | Stop::Event(..) => return Err(Errno::INTR),
            }
        }
    }

    /// `code` is that of a script.
    fn until_event_stop(&self, code: Option<u64>) -> Result<(), Errno> {
        loop {
            match call::wait_stop(Some(self.tid()))?.1 {
                Stop::Event(EVENT_STOP, _) => return Ok(()),
                Stop::Ended(_) => return Err(Errno::SRCH),
                Stop::Call => call::resume(self.tid(), 0)?,
                Stop::Signal(signal) => self.pass_on(code, signal)?,
                Stop::Event(..) => return Err(Errno::INTR),
            }
        }
    }

    /// Ends: the task is at a stop inside signal handling, with these registers and this mask.
    pub(crate) fn finish(self, registers: &Registers, mask: u64) -> Result<(), Errno> {
        if self.has_gone_on {
            return Ok(());
        }
        call::interrupt(self.tid())?;
        call::resume(self.tid(), 0)?;
        self.until_event_stop(None)?;
        if let Some(berth) = &self.berth {
            call::set_registers(self.tid(), &berth.parked)?;
            call::set_signal_mask(self.tid(), mask)?;
        }
        if let Some(selector) = &self.selector {
            if let Some(berth) = &self.berth {
                call::set_registers(self.tid(), &berth.still)?;
            }
            selector.restore(self.tid(), self.spare())?;
        }
        call::set_registers(self.tid(), registers)?;
        if let Some(selector) = &self.selector {
            selector.take_back(self.tid())?;
        }
        match &self.berth {
            Some(berth) => self.ground.leave(berth),
            None => call::set_signal_mask(self.tid(), mask)?,
        }
        Ok(())
    }

    /// Ends: the task is at a stop inside signal handling, with the registers with which it continues and its mask.
    pub(crate) fn give_back(self) -> Result<(), Errno> {
        let (registers, mask) = (self.resumed, self.mask);
        self.finish(&registers, mask)
    }
}

/// Registers of a stopped task that was inside a restartable sequence, aborted as the kernel aborts one
/// at a preemption: at its abort handler (Documentation of `struct rseq_cs` in include/uapi/linux/rseq.h).
/// Other registers are returned as they are.
fn abort_sequence(tid: u32, registers: Registers) -> Registers {
    let Ok(rseq) = call::rseq_configuration(tid) else { return registers };
    // A system call inside a sequence is against its rules.
    if rseq.address == 0 || registers.orig_rax as i64 >= 0 {
        return registers;
    }
    const SEQUENCE_AT: u64 = 8; // rseq_cs of struct rseq
    let Some([descriptor]) = words(tid, rseq.address + SEQUENCE_AT) else { return registers };
    if descriptor == 0 {
        return registers;
    }
    // Version and flags, both 0; start, length, abort handler. The signature is in front of the handler.
    let Some([0, start, length, handler]) = words(tid, descriptor) else { return registers };
    let Some([signed]) = handler.checked_sub(8).and_then(|at| words(tid, at)) else {
        return registers;
    };
    let is_inside = |address: u64| address.wrapping_sub(start) < length;
    let is_signed = (signed >> 32) as u32 == rseq.signature;
    match is_inside(registers.rip) && !is_inside(handler) && is_signed {
        true => Registers { rip: handler, ..registers },
        false => registers,
    }
}

/// Numbers of 64 bits in the memory of a task.
fn words<const N: usize>(tid: u32, address: u64) -> Option<[u64; N]> {
    let mut all = [[0; 8]; N];
    let bytes = all.as_flattened_mut();
    let length = bytes.len();
    let read = call::read_memory(tid, bytes, &[(address, length as u64)]).ok()?;
    (read == length).then(|| all.map(u64::from_ne_bytes))
}

/// Memory of another process for the results of calls made in it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scratch {
    pid: u32,
    /// Its address.
    pub(crate) address: u64,
}

impl Scratch {
    /// The length in bytes.
    pub(crate) const BYTES: u64 = 4096;

    /// Makes the task map it.
    pub(crate) fn map(pid: u32, remote: &mut Remote<'_>) -> Result<Self, Errno> {
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let args = [0, Self::BYTES, access as u64, kind as u64, u64::MAX, 0];
        let address = remote.call(libc::SYS_mmap, args)?;
        Ok(Self { pid, address })
    }

    /// Makes the task unmap it.
    pub(crate) fn unmap(self, remote: &mut Remote<'_>) -> Result<(), Errno> {
        remote.call(libc::SYS_munmap, [self.address, Self::BYTES]).map(drop)
    }

    /// Writes to its start.
    pub(crate) fn write(&self, bytes: &[u8]) -> Result<(), Errno> {
        match call::write_memory(self.pid, self.address, bytes)? {
            n if n == bytes.len() => Ok(()),
            _ => Err(Errno::FAULT),
        }
    }
}
