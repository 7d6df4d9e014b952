//! Pipes and terminals that were found: both have ends that several processes may have open.

use std::os::fd::OwnedFd;

use dormouse_record::Refusal;

/// The ends of one pipe that were seen.
#[derive(Debug, Default)]
pub(crate) struct PipeEnds {
    pub(crate) pipe: usize,
    /// A copy of an end that can read, and of one that can only write.
    pub(crate) reader: Option<OwnedFd>,
    pub(crate) writer: Option<OwnedFd>,
    pub(crate) has_writer: bool,
    pub(crate) has_name: bool,
    /// For the message: a process that has an end of it.
    pub(crate) first: Option<Refusal>,
}

/// The sides of one terminal that were seen.
#[derive(Debug)]
pub(crate) struct TerminalSides {
    pub(crate) object: usize,
    pub(crate) master: Option<OwnedFd>,
    pub(crate) slave: Option<OwnedFd>,
}
