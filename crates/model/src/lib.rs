//! The words of Dormouse as plain types: what a container is called, what it is made of, what it
//! may use, which state it is in.
//!
//! Everything here is a value. Parsing and validation are beside each type, so that every floor
//! above refuses the same bad input with the same words. No function here reads a file, a clock or
//! calls the kernel.
#![forbid(unsafe_code)]

mod bandwidth;
mod config;
mod contract;
mod drive;
mod eviction;
mod id;
mod limit;
mod log;
mod rate;
mod reference;
mod shortage;
mod size;
mod state;
mod view;
mod wake;

pub use bandwidth::{Bandwidth, Bits, NET_WEIGHT, parse_net_rate, parse_net_weight};
pub use config::{
    Config, IdRange, Mount, MountKind, NetMode, Process, Propagation, Protocol, Publish, Restart,
    Rlimit, RootSource, SeccompChoice, Security, Sleep, Spec, User,
};
pub use contract::{
    CPU_PERIOD_US, CPU_WEIGHT, Contradiction, Cpu, Cpus, Memory, Time, parse_cpu_idle_rate,
    parse_cpu_period_us, parse_cpu_reserve,
};
pub use drive::Drive;
pub use eviction::{Evict, Eviction};
pub use id::{ContainerId, IdExtent, IdMap, IdSlot, Name};
pub use limit::{CpuBurst, Limits, TASKS_DEFAULT, TASKS_UNLIMITED};
pub use log::{LogDriver, LogEntry, LogStamp, LogStream, write_entries};
pub use rate::{DiskRate, DiskRateKind};
pub use reference::Reference;
pub use shortage::{Brink, OutOfMemory};
pub use size::{Size, parse_bytes, parse_cpus, parse_span_ms};
pub use state::State;
pub use view::Views;
pub use wake::{WakeOn, WakeOnTimer};

/// Input that is not a value of its type, with a description of valid ones.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} '{input}' is not valid: {expected}")]
pub struct Invalid {
    /// The kind of value.
    pub what: &'static str,
    /// The input, truncated for display.
    pub input: String,
    /// The valid form.
    pub expected: &'static str,
}

impl Invalid {
    /// An error about `input`, which is shortened to 80 characters.
    pub fn new(what: &'static str, input: impl AsRef<str>, expected: &'static str) -> Self {
        let input = input.as_ref().chars().take(80).collect();
        Self { what, input, expected }
    }
}
