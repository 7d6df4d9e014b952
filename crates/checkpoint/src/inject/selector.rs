//! Threads that have their system calls reported to themselves (PR_SET_SYSCALL_USER_DISPATCH(2const)), while calls are
//! injected into them.
//!
//! The kernel reports calls by the address they are made from, unless a byte in the memory of the program, the
//! selector, allows all. So the selector allows them while calls are injected, and has its own value again afterwards.
//!
//! ORDER: at every moment a thread whose tracer ends continues with its own selector, or in code that writes it
//! ([`super::landing`]), which makes no call where the selector does not allow any. A dispatch without a selector is
//! lent one first: a byte in the slot of the thread that reports calls as before. The program, which cannot write this
//! byte, makes the dispatch anew if it allows calls.
//!
//! LIMIT: without a slot, a thread whose tracer ends in an injected call keeps a selector that allows calls, or has no
//! dispatch any more. LIMIT: a signal handler that interrupts the landing code finds such a selector.

use dormouse_kernel::Errno;
use dormouse_kernel::call::{self, Dispatch};

use crate::vdso;

/// The selector of a stopped thread whose calls are reported to itself.
#[derive(Debug)]
pub(super) struct Selector {
    own: Dispatch,
    /// The byte at its address.
    byte: u8,
}

impl Selector {
    /// `None` if the calls of the thread are made. EFAULT if the selector cannot be read: the next call would end the
    /// program.
    pub(super) fn of(tid: u32) -> Result<Option<Self>, Errno> {
        let Some(own) = own_dispatch(tid)? else { return Ok(None) };
        let byte = match own.selector {
            0 => Dispatch::BLOCK,
            address => read(tid, address)?,
        };
        Ok((byte != Dispatch::ALLOW).then_some(Self { own, byte }))
    }

    /// What the landing code reads from the slot.
    pub(super) fn words(&self) -> [u64; 3] {
        const WITH: u8 = 1;
        const WITHOUT: u8 = 2;
        let Dispatch { selector, mode, start, length_bytes } = self.own;
        let (first, kind) = if selector == 0 { (start, WITHOUT) } else { (selector, WITH) };
        let bytes = [self.byte, self.byte, kind, mode as u8, 0, 0, 0, 0];
        [first, u64::from_le_bytes(bytes), length_bytes]
    }

    /// Makes a byte in the slot of the thread the selector of a dispatch without one. It has its value already.
    pub(super) fn lend(&self, tid: u32, spare: Option<u64>) -> Result<(), Errno> {
        match spare {
            _ if self.own.selector != 0 => Ok(()),
            Some(selector) => call::set_dispatch(tid, &Dispatch { selector, ..self.own }),
            None => call::set_dispatch(tid, &Dispatch::NONE),
        }
    }

    /// Ends that.
    pub(super) fn take_back(&self, tid: u32) -> Result<(), Errno> {
        match self.own.selector {
            0 => call::set_dispatch(tid, &self.own),
            _ => Ok(()),
        }
    }

    /// Has calls made, as far as the selector is concerned.
    pub(super) fn allow(&self, tid: u32, spare: Option<u64>) -> Result<(), Errno> {
        self.write(tid, spare, Dispatch::ALLOW)
    }

    /// Has calls reported again.
    pub(super) fn restore(&self, tid: u32, spare: Option<u64>) -> Result<(), Errno> {
        self.write(tid, spare, self.byte)
    }

    fn write(&self, tid: u32, spare: Option<u64>, byte: u8) -> Result<(), Errno> {
        let address = match self.own.selector {
            0 => spare,
            selector => Some(selector),
        };
        address.map_or(Ok(()), |address| write(tid, address, byte))
    }
}

/// The dispatch that a stopped thread has made: without the byte that a killed tracer has lent to it, unless the thread
/// is in the landing code yet, which that byte allows calls.
pub(crate) fn own_dispatch(tid: u32) -> Result<Option<Dispatch>, Errno> {
    let mut found = match call::dispatch(tid) {
        // KERNEL(6.4): before, the kernel does not report it.
        Err(Errno::IO) => return Ok(None),
        found => found?,
    };
    if let Some(Dispatch { selector, .. }) = &mut found
        && *selector != 0
        && vdso::of_process(tid).is_some_and(|object| object.contains(selector))
        && read(tid, *selector)? != Dispatch::ALLOW
    {
        *selector = 0;
    }
    Ok(found)
}

fn read(tid: u32, address: u64) -> Result<u8, Errno> {
    let mut byte = [0];
    match call::read_memory(tid, &mut byte, &[(address, 1)])? {
        1 => Ok(byte[0]),
        _ => Err(Errno::FAULT),
    }
}

fn write(tid: u32, address: u64, byte: u8) -> Result<(), Errno> {
    use std::os::unix::fs::FileExt;
    let memory = std::fs::File::options().write(true).open(format!("/proc/{tid}/mem"));
    let written = memory.and_then(|memory| memory.write_all_at(&[byte], address));
    written.map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::FAULT))
}
