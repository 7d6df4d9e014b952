//! Terminals: pairs of a master and a slave (pty(7)), and what is open of them.

use serde::{Deserialize, Serialize};

use super::Bytes;

/// A terminal of the container's own devpts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terminal {
    /// Its number: `/dev/pts/NUMBER`.
    pub number: u32,
    /// Its master is the engine's: it is the container's console.
    pub is_console: bool,
    /// `struct termios2`, of which there is one for both sides.
    pub termios: Bytes,
    /// Rows, columns, and the same in pixels.
    pub size: [u16; 4],
    /// The slave's owner, group and mode; ids are the container's.
    pub owner: (u32, u32, u32),
    /// TIOCGPTLCK.
    pub locked: bool,
    /// TIOCGPKT.
    pub packet: bool,
    /// TIOCGEXCL.
    pub exclusive: bool,
    /// What was typed, and nobody has read.
    #[serde(default)]
    pub typed: Bytes,
    /// What was written to it, and nobody has read from the master.
    #[serde(default)]
    pub written: Bytes,
    /// The process group in the foreground; 0 for none.
    #[serde(default)]
    pub foreground: u32,
    /// The session whose terminal it is; 0 for none.
    #[serde(default)]
    pub session: u32,
}

/// An open side of a terminal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSide {
    /// The terminal, an object.
    pub terminal: usize,
    /// It is the master, of which there is one.
    pub is_master: bool,
    /// It was opened as `/dev/console`.
    pub as_console: bool,
    /// `O_*`.
    pub flags: u32,
}
