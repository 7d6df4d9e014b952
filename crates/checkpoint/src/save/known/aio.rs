//! Contexts of asynchronous I/O.

use std::collections::{HashMap, HashSet};

use dormouse_bpf::aio::Context;

/// What a survey knows of the contexts of each process, by the host's ids.
#[derive(Debug, Default)]
pub(crate) struct AioContexts {
    pub(crate) of: HashMap<u32, Vec<Context>>,
    /// The stopped processes whose requests were finished before anything was read. `None` while all run.
    pub(crate) finished: Option<HashSet<u32>>,
}
