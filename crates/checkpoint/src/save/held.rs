//! Open files that are held while the processes are gone, and the events that wake the container.

use std::os::fd::OwnedFd;

use dormouse_record::Cause;

/// An open file that is held while the processes are gone ([`Subject::hold`](super::Subject::hold)).
#[derive(Debug)]
pub struct HeldFile {
    /// The number of its object ([`crate::load::Allowed::held`]).
    pub object: u32,
    /// A copy.
    pub file: OwnedFd,
    /// Events of the file that the processes wait for.
    pub wakes: Wakes,
    /// The cause to record for such an event.
    pub cause: Cause,
}

/// Events of an open file that its process waits for. A file with none of them reports nothing
/// more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wakes {
    /// There is something to read, or the peer has hung up.
    pub readable: bool,
    /// There is space to write.
    pub writable: bool,
}
