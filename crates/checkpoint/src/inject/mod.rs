//! Machine code: the interpreter of restore programs, and calls injected into another task, one by
//! one ([`remote`]) or many at once ([`script`]), and harmless if this process ends meanwhile ([`landing`]).
//!
//! The one place of this crate with `unsafe` and with knowledge of x86_64.

mod blob;
#[cfg(test)]
mod deaths;
pub(crate) mod gadget;
pub(crate) mod landing;
pub(crate) mod peek;
pub(crate) mod program;
pub(crate) mod remote;
pub(crate) mod script;
pub(crate) mod selector;
