//! Changes of `struct termios2` that let data in a terminal be taken out and put back unchanged.

use dormouse_kernel::call::TERMIOS_BYTES;

/// Modes of a terminal, in the kernel's form.
type Modes = [u8; TERMIOS_BYTES];

/// Offsets: four words of flags, a line discipline, characters.
const INPUT: usize = 0;
const OUTPUT: usize = 4;
const LOCAL: usize = 12;
const CHARACTERS: usize = 17;
const CHARACTERS_END: usize = 36;
/// Characters that stop and start output: a master in packet mode is notified when they change.
const KEPT: [usize; 2] = [libc::VSTART, libc::VSTOP];

fn word(modes: &Modes, at: usize) -> u32 {
    u32::from_ne_bytes([modes[at], modes[at + 1], modes[at + 2], modes[at + 3]])
}

fn set(modes: &mut Modes, at: usize, value: u32) {
    modes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
}

/// Modes without echo, translation and special characters, except the end of a line. Lines stay as
/// they were.
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

/// The same without lines: all typed input can be read, and a read never blocks.
pub(crate) fn raw(quiet: &Modes) -> Modes {
    let mut modes = *quiet;
    set(&mut modes, LOCAL, word(quiet, LOCAL) & !libc::ICANON);
    modes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quiet_modes_keep_line_input_only() {
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
