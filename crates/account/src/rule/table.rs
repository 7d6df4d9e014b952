//! The table of rules that the kernel's programs evaluate.

use std::fmt;
use std::str::FromStr;

use dormouse_model::Invalid;

use crate::book::DEPTH_MAX;

/// Number that stands for every account, and at the peer also for none.
pub const ANY: u32 = u32::MAX;

/// LIMIT: rows of a table, without those of shared containers.
pub const ROWS_MAX: usize = 256;

/// LIMIT: bytes of a path, without a '/' behind it. The path of an open file is compared up to here.
pub const PATH_BYTES_MAX: usize = 247;

/// Entries of a line: an account on the deepest level, those above it, and root.
pub const LINE: usize = DEPTH_MAX + 1;

/// In [`Row::below`]: accounts below the row's home match too.
pub const BELOW_HOME: u32 = 1;
/// In [`Row::below`]: accounts below the row's label match too.
pub const BELOW_LABEL: u32 = 2;
/// In [`Row::below`]: accounts below the row's peer match too.
pub const BELOW_PEER: u32 = 4;
/// In [`Row::below`]: the row is for connections that the other side has opened, where the kernel knows it. An answer
/// to the task's own container is none of its clients' requests.
pub const ACCEPTED: u32 = 8;

/// A kind of passage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum Gate {
    /// A task has received data from a socket.
    Receive = 1,
    /// A task sends data to a socket.
    Send = 2,
    /// A task makes another one, which begins with its label.
    Fork = 3,
    /// A task executes another program.
    Exec = 4,
    /// A task is about to make another one.
    Create = 5,
    /// A task is about to open a file.
    Open = 6,
    /// A task has received a message of System V.
    Message = 7,
    /// A task has read from a pipe or FIFO.
    Pipe = 8,
    /// A task has taken from a semaphore of System V.
    Semaphore = 9,
    /// A task attaches shared memory of System V.
    Shm = 10,
}

/// The label of a task after a passage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum Becomes {
    /// The same as before.
    Keep = 0,
    /// The task's home.
    Home = 1,
    /// The account of the peer. Where the peer is outside of all containers, the task's home: work that belongs to
    /// no client is that of its own container, and not of the client before.
    Peer = 2,
    /// The account in [`Row::account`].
    Account = 3,
    /// The same as before: the call fails with the errno in [`Row::account`].
    Refused = 4,
}

/// One rule as the kernel's programs evaluate it: all of its fields match a passage, or the next row is tried.
/// The programs get it field by field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Row {
    /// Number of the [`Gate`].
    pub gate: u32,
    /// Number of the [`Becomes`].
    pub becomes: u32,
    /// The label afterwards, for [`Becomes::Account`], or the errno of [`Becomes::Refused`]; else 0.
    pub account: u32,
    /// The task's home, or [`ANY`].
    pub home: u32,
    /// The task's label, or [`ANY`].
    pub label: u32,
    /// The peer, or [`ANY`].
    pub peer: u32,
    /// Which of the three match the accounts below them too: [`BELOW_HOME`], [`BELOW_LABEL`], [`BELOW_PEER`].
    /// And [`ACCEPTED`].
    pub below: u32,
    /// Local port of the socket; 0 is any, and sockets without ports.
    pub port: u32,
    /// What tells `account` apart from an earlier one with its number: [`Account::owner`](crate::Account::owner).
    pub owner: u64,
    /// 1 and the index of a path in [`Table::paths`], for files below it; 0 is any.
    pub path: u32,
}

/// A table of rules, with the part of the hierarchy that it needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    /// The rules, the first that matches first: at most [`ROWS_MAX`] of the file, and then those of shared containers,
    /// which the kernel's programs know by the container instead ([`Table::of_file`]).
    pub rows: Vec<Row>,
    /// Made accounts, each with a line: itself, those above it, and root to the end. For the rows, an absent account
    /// is directly below root.
    pub lines: Vec<(u32, [u32; LINE])>,
    /// The paths that rows name.
    pub paths: Vec<String>,
}

/// A passage, with the accounts that take part in it. Its connection, if it has one, is one that the other side has
/// opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Passage<'p> {
    /// Its kind.
    pub gate: Gate,
    /// Home of the task.
    pub home: u32,
    /// Label of the task before.
    pub label: u32,
    /// The peer; `None` without a socket, and for a peer outside of all containers or not known. Of a message,
    /// bytes of a pipe, units of a semaphore and a segment, the account for which the task worked that sent, wrote,
    /// gave or made them.
    pub peer: Option<u32>,
    /// Local port of the socket; 0 for a socket without ports.
    pub port: u32,
    /// The file that is opened, from the root directory of the task.
    pub path: Option<&'p str>,
}

/// Whether a file is a directory, or is below it.
pub(super) fn is_below(path: &str, directory: &str) -> bool {
    let rest = path.strip_prefix(directory.trim_end_matches('/'));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

impl Gate {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Receive,
        Self::Send,
        Self::Fork,
        Self::Exec,
        Self::Create,
        Self::Open,
        Self::Message,
        Self::Pipe,
        Self::Semaphore,
        Self::Shm,
    ];

    /// Its name in rules.
    pub fn name(self) -> &'static str {
        match self {
            Self::Receive => "receive",
            Self::Send => "send",
            Self::Fork => "fork",
            Self::Exec => "exec",
            Self::Create => "create",
            Self::Open => "open",
            Self::Message => "message",
            Self::Pipe => "pipe",
            Self::Semaphore => "semaphore",
            Self::Shm => "shm",
        }
    }

    /// Whether a socket takes part in the passage, and with it a port.
    pub fn has_socket(self) -> bool {
        matches!(self, Self::Receive | Self::Send)
    }

    /// Whether another account takes part in the passage.
    pub fn has_peer(self) -> bool {
        self.has_socket()
            || matches!(self, Self::Message | Self::Pipe | Self::Semaphore | Self::Shm)
    }

    /// Whether a call can fail at this gate.
    pub fn can_refuse(self) -> bool {
        matches!(self, Self::Create | Self::Open)
    }
}

impl FromStr for Gate {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let found = Self::ALL.into_iter().find(|gate| gate.name() == text);
        found.ok_or_else(|| {
            let hint = "receive, send, fork, exec, create, open, message, pipe, semaphore or shm";
            Invalid::new("gate", text, hint)
        })
    }
}

impl fmt::Display for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Table {
    /// Returns the rows of the file.
    pub fn of_file(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| row.below & ACCEPTED == 0)
    }

    /// Returns the index of the row that decides a passage, in the way of the kernel's programs.
    pub fn decide(&self, passage: &Passage<'_>) -> Option<usize> {
        self.rows.iter().position(|row| self.is_match(row, passage))
    }

    /// Returns whether a row matches a passage.
    pub fn is_match(&self, row: &Row, passage: &Passage<'_>) -> bool {
        let is = |pattern: u32, below: u32, account: Option<u32>| {
            pattern == ANY
                || account.is_some_and(|account| {
                    pattern == account
                        || (row.below & below != 0 && self.is_below(account, pattern))
                })
        };
        row.gate == passage.gate as u32
            && is(row.home, BELOW_HOME, Some(passage.home))
            && is(row.label, BELOW_LABEL, Some(passage.label))
            && is(row.peer, BELOW_PEER, passage.peer)
            && (row.port == 0 || row.port == passage.port)
            && (row.path == 0 || passage.path.is_some_and(|path| self.is_at(row, path)))
    }

    fn is_at(&self, row: &Row, path: &str) -> bool {
        let directory = self.paths.get((row.path as usize).wrapping_sub(1));
        directory.is_some_and(|directory| is_below(path, directory))
    }

    fn is_below(&self, account: u32, above: u32) -> bool {
        let line = self.lines.iter().find(|(of, _)| *of == account);
        line.map_or(above == 0, |(_, line)| line.contains(&above))
    }

    /// Returns the label after a passage.
    pub fn label(&self, passage: &Passage<'_>) -> u32 {
        let Some(row) = self.decide(passage).and_then(|index| self.rows.get(index)) else {
            return passage.label;
        };
        match row.becomes {
            1 => passage.home,
            2 => passage.peer.unwrap_or(passage.home),
            3 => row.account,
            _ => passage.label,
        }
    }
}
