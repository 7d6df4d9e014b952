//! `struct termios2`, as far as what is on its way through a terminal must be taken out and put in
//! unchanged.

use dormouse_kernel::call::TERMIOS_BYTES;

/// Modes of a terminal, as the kernel has them.
type Modes = [u8; TERMIOS_BYTES];

/// Where things are: four words of flags, a line discipline, characters.
const INPUT: usize = 0;
const OUTPUT: usize = 4;
const LOCAL: usize = 12;
const CHARACTERS: usize = 17;
const CHARACTERS_END: usize = 36;
/// Characters that stop and start output: a master in packet mode is told when they change.
const KEPT: [usize; 2] = [libc::VSTART, libc::VSTOP];

fn word(modes: &Modes, at: usize) -> u32 {
    u32::from_ne_bytes([modes[at], modes[at + 1], modes[at + 2], modes[at + 3]])
}

fn set(modes: &mut Modes, at: usize, value: u32) {
    modes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
}

/// Nothing is echoed, changed, or special but the end of a line; lines are lines as before.
pub(crate) fn quiet(own: &Modes) -> Modes {
    let mut modes = *own;
    set(&mut modes, INPUT, word(own, INPUT) & libc::IXON);
    set(&mut modes, OUTPUT, 0);
    set(&mut modes, LOCAL, word(own, LOCAL) & (libc::ICANON | libc::EXTPROC));
    for (n, byte) in modes[CHARACTERS..CHARACTERS_END].iter_mut().enumerate() {
        if !KEPT.contains(&n) {
            *byte = 0;
        }
    }
    modes
}

/// The same with no lines: everything that was typed can be read, and reading never waits.
pub(crate) fn raw(quiet: &Modes) -> Modes {
    let mut modes = *quiet;
    set(&mut modes, LOCAL, word(quiet, LOCAL) & !libc::ICANON);
    modes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lines_are_left() {
        let mut own = [0xff; TERMIOS_BYTES];
        set(&mut own, LOCAL, libc::ICANON | libc::ECHO | libc::ISIG);
        let quiet = quiet(&own);
        assert_eq!(word(&quiet, LOCAL), libc::ICANON);
        assert_eq!((word(&quiet, INPUT), word(&quiet, OUTPUT)), (libc::IXON, 0));
        assert_eq!(quiet[CHARACTERS + libc::VSTOP], 0xff);
        assert_eq!(quiet[CHARACTERS + libc::VEOF], 0);
        assert_eq!(word(&raw(&quiet), LOCAL), 0);
        assert_eq!(quiet[CHARACTERS_END..], own[CHARACTERS_END..], "speeds");
    }
}
