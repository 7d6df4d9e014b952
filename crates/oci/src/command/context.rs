//! A verb of the command line, and the context of its code.

use std::os::fd::OwnedFd;

use super::flag::{Flag, Given};
use crate::Runtime;
use crate::error::Result;

/// Context of a verb.
pub(super) struct Context<'c> {
    pub(super) runtime: &'c Runtime,
    pub(super) given: &'c Given,
    /// Descriptors that the caller passes on.
    pub(super) inherited: Vec<OwnedFd>,
}

/// The code of a verb.
pub(super) enum Run {
    /// For a verb without a container.
    Alone(fn(&Given) -> Result<u8>),
    /// For a verb with containers.
    With(fn(Context<'_>) -> Result<u8>),
}

/// A verb: its name, its arguments, its description, its flags, its code.
pub(super) struct Verb {
    pub(super) name: &'static str,
    pub(super) words: &'static str,
    pub(super) what: &'static str,
    pub(super) flags: &'static [Flag],
    pub(super) run: Run,
}
