//! What a survey has found of each kind of object, by the properties that identify it.
//!
//! Only data, and questions about it: the modules of the kinds, above the survey, read the kernel and fill it.

pub(crate) mod aio;
pub(crate) mod file;
pub(crate) mod mount;
pub(crate) mod namespace;
pub(crate) mod net;
pub(crate) mod shared;
pub(crate) mod socket;
pub(crate) mod stream;
