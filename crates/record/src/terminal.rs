//! Terminals: pairs of a master and a slave (pty(7)), and their open file descriptions.

use serde::{Deserialize, Serialize};

use crate::Bytes;

/// A terminal of the container's own devpts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terminal {
    /// Its number: `/dev/pts/NUMBER`.
    pub number: u32,
    /// The container's console: the engine holds its master.
    pub is_console: bool,
    /// `struct termios2`, one for both sides.
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
    /// Input of the terminal that no process has read.
    #[serde(default)]
    pub typed: Bytes,
    /// Output of the terminal that was not read from the master.
    #[serde(default)]
    pub written: Bytes,
    /// The process group in the foreground; 0 for none.
    #[serde(default)]
    pub foreground: u32,
    /// The session with this controlling terminal; 0 for none.
    #[serde(default)]
    pub session: u32,
}

/// An open file description of one side of a terminal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSide {
    /// The terminal, an object.
    pub terminal: usize,
    /// The master, of which there is one.
    pub is_master: bool,
    /// Opened as `/dev/console`.
    pub as_console: bool,
    /// `O_*`.
    pub flags: u32,
}
