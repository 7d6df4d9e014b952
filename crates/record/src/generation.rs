//! The order in which time namespaces are made.
//!
//! A process that makes one by unshare(2) stays in its old one: its children are in the new one. So
//! a process may be in one ([`Process::time`]) and have made another
//! ([`Process::time_for_children`]). Only unshare(2) leads to that state: setns(2) changes both.

use std::collections::HashMap;

use crate::{Process, Records, Thing, Time};

/// The making of a time namespace that a process had made for its children.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Made {
    /// The process that had made it.
    pub by: u32,
    /// The number of namespaces to be made one after the other, up to and with this one.
    pub generation: usize,
}

impl Records {
    /// The time namespaces that processes had made for their children and are not in, by object;
    /// `None` if two processes have made the same, or if they derive from each other.
    pub fn times_made(&self) -> Option<HashMap<usize, Made>> {
        let mut makers: HashMap<usize, &Process> = HashMap::new();
        for process in self.processes.iter().filter(|process| process.ended.is_none()) {
            let Some(made) = process.time_for_children else { continue };
            if makers.insert(made, process).is_some() {
                return None;
            }
        }
        let generation = |made: usize| {
            let (mut at, mut count) = (Some(made), 0);
            while let Some(maker) = at.and_then(|n| makers.get(&n)) {
                at = maker.time;
                count += 1;
                if count > makers.len() {
                    return None;
                }
            }
            Some(count)
        };
        let made = |(n, by): (&usize, &&Process)| {
            Some((*n, Made { by: by.pid, generation: generation(*n)? }))
        };
        makers.iter().map(made).collect()
    }

    /// The offsets of a process's clocks from the container's own.
    pub fn time_of(&self, process: &Process) -> Time {
        match process.time.and_then(|n| self.objects.get(n)).map(|object| &object.thing) {
            Some(Thing::Time(time)) => time.clone(),
            _ => Time::default(),
        }
    }
}
