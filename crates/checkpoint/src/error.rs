//! Errors of this crate: those of crate `record`.

pub use dormouse_record::{Error, Refusal, Result};
