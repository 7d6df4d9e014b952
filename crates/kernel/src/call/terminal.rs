//! Terminals as their kernel state is: ioctl_tty(2), and the calls that `rustix` leaves out.

use std::os::fd::{AsRawFd, BorrowedFd};

use super::check;
use crate::Errno;

/// Bytes of `struct termios2`: four words of flags, a line discipline, 19 characters, two speeds.
pub const TERMIOS_BYTES: usize = 44;

/// Properties of a terminal that are one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum TerminalNumber {
    /// TIOCGDEV: the device that it is, whatever name it was opened by; of a master its slave's.
    Device = 0x8004_5432,
    /// TIOCGPKT: a master reads every piece of output behind a byte with its kind.
    Packet = 0x8004_5438,
    /// TIOCGPTLCK: the slave cannot be opened.
    Locked = 0x8004_5439,
    /// TIOCGEXCL: it cannot be opened again.
    Exclusive = 0x8004_5440,
}

fn ioctl(fd: BorrowedFd<'_>, request: u64, argument: u64) -> Result<usize, Errno> {
    // SAFETY: callers in this module pass memory that is as large as the request requires.
    check(unsafe { libc::syscall(libc::SYS_ioctl, fd.as_raw_fd(), request, argument) })
}

/// Reads one number; ENOTTY if it is not a terminal, EIO if it has hung up.
pub fn terminal_number(terminal: BorrowedFd<'_>, what: TerminalNumber) -> Result<u32, Errno> {
    let mut number = 0u32;
    ioctl(terminal, u64::from(what as u32), &raw mut number as u64)?;
    Ok(number)
}

/// TCGETS2: how a terminal treats what goes through it.
pub fn termios(terminal: BorrowedFd<'_>) -> Result<[u8; TERMIOS_BYTES], Errno> {
    const TCGETS2: u64 = 0x802c_542a;
    let mut bytes = [0; TERMIOS_BYTES];
    ioctl(terminal, TCGETS2, bytes.as_mut_ptr() as u64)?;
    Ok(bytes)
}

/// TCSETS2: at once, and nothing that is on its way is thrown away.
pub fn set_termios(terminal: BorrowedFd<'_>, bytes: &[u8; TERMIOS_BYTES]) -> Result<(), Errno> {
    const TCSETS2: u64 = 0x402c_542b;
    ioctl(terminal, TCSETS2, bytes.as_ptr() as u64).map(drop)
}

/// TIOCSTI: a byte as if it had been typed. Of another's terminal it needs CAP_SYS_ADMIN.
pub fn type_byte(terminal: BorrowedFd<'_>, byte: u8) -> Result<(), Errno> {
    const TIOCSTI: u64 = 0x5412;
    ioctl(terminal, TIOCSTI, &raw const byte as u64).map(drop)
}
