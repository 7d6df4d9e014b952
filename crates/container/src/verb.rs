//! The verbs of a container's life, one module each.

pub(crate) mod pause;
pub(crate) mod restore;
pub(crate) mod settle;
pub(crate) mod start;
pub(crate) mod stop;
pub(crate) mod update;
pub(crate) mod wait;
