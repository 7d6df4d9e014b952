//! Resource use.

use serde::{Deserialize, Serialize};

/// Resource use, of one life as far as it was read, or added up in a balance.
///
/// Only counters that the kernel keeps for a cgroup, or the engine for a life, are here, and work for other accounts.
/// Fields are only added.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Usage {
    /// CPU time of its containers, whatever it was used for: see [`Usage::charged_ns`].
    #[serde(skip_serializing_if = "is_zero")]
    pub cpu_ns: u64,
    /// Of it, work for other accounts.
    #[serde(skip_serializing_if = "is_zero")]
    pub cpu_given_ns: u64,
    /// CPU time of containers of other accounts that worked for this one.
    #[serde(skip_serializing_if = "is_zero")]
    pub cpu_taken_ns: u64,
    /// Of it, in user mode, as the kernel divides it.
    #[serde(skip_serializing_if = "is_zero")]
    pub cpu_user_ns: u64,
    /// Page faults, with those that needed no disk.
    #[serde(skip_serializing_if = "is_zero")]
    pub page_faults: u64,
    /// Of them, page faults that waited for a disk or swap.
    #[serde(skip_serializing_if = "is_zero")]
    pub major_faults: u64,
    /// Read from block devices.
    #[serde(skip_serializing_if = "is_zero")]
    pub read_bytes: u64,
    /// Written to block devices. On cgroup v1 without what went through the page cache.
    #[serde(skip_serializing_if = "is_zero")]
    pub written_bytes: u64,
    /// Wakes from sleep and from drowsiness.
    #[serde(skip_serializing_if = "is_zero")]
    pub wakes: u64,
    /// Lives: starts, wakes from sleep and restores.
    #[serde(skip_serializing_if = "is_zero")]
    pub lives: u64,
    /// The most memory that one life has held at once. Of several it is the largest, not the sum.
    #[serde(skip_serializing_if = "is_zero")]
    pub memory_peak_bytes: u64,
    /// The most processes and threads at once that are known: of one life, or of all running ones together when they
    /// were read.
    #[serde(skip_serializing_if = "is_zero")]
    pub tasks_peak: u64,
    /// The most sockets at once, in the same way, as far as they are counted.
    #[serde(skip_serializing_if = "is_zero")]
    pub sockets_peak: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl Usage {
    /// Combines two uses field by field. The peak of memory is always the larger one; `peak` combines the others.
    fn with(
        self,
        other: Self,
        combine: impl Fn(u64, u64) -> u64,
        peak: impl Fn(u64, u64) -> u64,
    ) -> Self {
        Self {
            cpu_ns: combine(self.cpu_ns, other.cpu_ns),
            cpu_given_ns: combine(self.cpu_given_ns, other.cpu_given_ns),
            cpu_taken_ns: combine(self.cpu_taken_ns, other.cpu_taken_ns),
            cpu_user_ns: combine(self.cpu_user_ns, other.cpu_user_ns),
            page_faults: combine(self.page_faults, other.page_faults),
            major_faults: combine(self.major_faults, other.major_faults),
            read_bytes: combine(self.read_bytes, other.read_bytes),
            written_bytes: combine(self.written_bytes, other.written_bytes),
            wakes: combine(self.wakes, other.wakes),
            lives: combine(self.lives, other.lives),
            memory_peak_bytes: self.memory_peak_bytes.max(other.memory_peak_bytes),
            tasks_peak: peak(self.tasks_peak, other.tasks_peak),
            sockets_peak: peak(self.sockets_peak, other.sockets_peak),
        }
    }

    /// Returns the CPU time that is charged: that of its containers, without their work for other accounts, and with
    /// the work of others for it.
    pub fn charged_ns(&self) -> u64 {
        // What was given is a part of the time of the same readings.
        self.cpu_ns.saturating_add(self.cpu_taken_ns).saturating_sub(self.cpu_given_ns)
    }

    /// Returns the sum.
    pub fn plus(self, other: Self) -> Self {
        self.with(other, u64::saturating_add, u64::max)
    }

    /// Returns what a reading has beyond an earlier one. Counters that are behind, as in a reading that arrives
    /// late, count as equal. A number of tasks or sockets that was not exceeded since is that of an earlier day, so it
    /// is left out.
    #[must_use]
    pub fn beyond(self, earlier: Self) -> Self {
        let exceeded = |new, old| if new > old { new } else { 0 };
        self.with(earlier, u64::saturating_sub, exceeded)
    }

    /// Returns the latest of two readings of one life.
    #[must_use]
    pub fn latest(self, other: Self) -> Self {
        self.with(other, u64::max, u64::max)
    }

    /// Returns whether nothing was used.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

impl std::iter::Sum for Usage {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), Self::plus)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn usage() -> impl Strategy<Value = Usage> {
        proptest::array::uniform13(0_u64..1 << 40).prop_map(|n| Usage {
            cpu_ns: n[0],
            cpu_user_ns: n[1],
            page_faults: n[2],
            major_faults: n[3],
            read_bytes: n[4],
            written_bytes: n[5],
            wakes: n[6],
            lives: n[7],
            memory_peak_bytes: n[8],
            cpu_given_ns: n[9],
            cpu_taken_ns: n[10],
            tasks_peak: n[11],
            sockets_peak: n[12],
        })
    }

    proptest! {
        #[test]
        fn difference_and_sum_are_inverse(a in usage(), b in usage()) {
            let latest = a.latest(b);
            prop_assert_eq!(b.plus(latest.beyond(b)), latest);
            prop_assert_eq!(a.latest(latest), latest);
            let memory_peak_bytes = a.memory_peak_bytes.max(b.memory_peak_bytes);
            let exceeding = |a, b| if a > b { a } else { 0 };
            let tasks_peak = exceeding(a.tasks_peak, b.tasks_peak);
            let sockets_peak = exceeding(a.sockets_peak, b.sockets_peak);
            let rest = Usage { memory_peak_bytes, tasks_peak, sockets_peak, ..a };
            prop_assert_eq!(a.plus(b).beyond(b), rest);
        }

        #[test]
        fn text_is_read_back(a in usage()) {
            let text = serde_json::to_string(&a).unwrap();
            prop_assert_eq!(serde_json::from_str::<Usage>(&text).unwrap(), a);
        }
    }

    #[test]
    fn sum_stops_at_the_largest_number() {
        let all = Usage { cpu_ns: u64::MAX, ..Usage::default() };
        assert_eq!(all.plus(all).cpu_ns, u64::MAX);
        assert_eq!(serde_json::to_string(&Usage::default()).unwrap(), "{}");
        assert!(serde_json::from_str::<Usage>(r#"{"later_field":1}"#).unwrap().is_none());
    }
}
