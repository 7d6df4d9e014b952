//! `events`: the resource use of a container, in runc's JSON.

use std::collections::BTreeMap;
use std::time::Duration;

use dormouse_kernel::cgroup::{Forest, Tree};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::Runtime;
use crate::error::{Error, Result};
use crate::store::Status;

/// A line of `events`, with its fields in runc's order, which scripts rely on.
#[derive(Debug, Serialize)]
pub struct Event<'e> {
    #[serde(rename = "type")]
    kind: &'static str,
    id: &'e str,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<Stats>,
}

impl<'e> Event<'e> {
    /// The resource use of a container.
    pub(crate) fn stats(id: &'e str, stats: Stats) -> Self {
        Self { kind: "stats", id, data: Some(stats) }
    }
}

/// The present resource use of a container, as the `data` of a `stats` event.
#[derive(Debug, Serialize)]
pub struct Stats {
    cpu: Value,
    memory: Value,
    pids: Value,
    blkio: Value,
    hugetlb: Map<String, Value>,
    intel_rdt: Map<String, Value>,
    network_interfaces: Option<Value>,
}

/// Parses a flat file: `name value` in each line.
fn fields(text: &str) -> BTreeMap<&str, u64> {
    let line = |line: &str| {
        let (name, value) = line.split_at(line.find(' ')?);
        Some((name.len(), value.trim().parse().ok()?))
    };
    let pair = |l| line(l).map(|(n, v): (usize, u64)| (&l[..n], v));
    text.lines().filter_map(pair).collect()
}

fn number(text: &str) -> u64 {
    match text.trim() {
        "max" => u64::MAX,
        number => number.parse().unwrap_or(0),
    }
}

/// A reader for controllers of v1 and v2.
struct Reader<'r> {
    tree: &'r Tree,
    forest: &'r Forest,
}

impl Reader<'_> {
    fn is_v1(&self, controller: &str) -> bool {
        self.forest.is_v1(controller)
    }

    /// Reads a file; returns an empty text if it is missing.
    fn text(&self, controller: &str, file: &str) -> String {
        let text = match self.is_v1(controller) {
            true => self.tree.read_v1(controller, file),
            false => self.tree.read_v2(file),
        };
        text.unwrap_or_default()
    }

    fn number(&self, controller: &str, file: &str) -> u64 {
        number(&self.text(controller, file))
    }

    fn cpu(&self) -> Value {
        let stat = self.text("cpu", "cpu.stat");
        let stat = fields(&stat);
        let get = |name: &str| stat.get(name).copied().unwrap_or(0);
        let mut usage = Map::new();
        if self.is_v1("cpuacct") {
            usage.insert("total".into(), self.number("cpuacct", "cpuacct.usage").into());
            let per_cpu = self.text("cpuacct", "cpuacct.usage_percpu");
            let per_cpu: Vec<u64> = per_cpu.split_whitespace().map(number).collect();
            usage.insert("percpu".into(), per_cpu.into());
            // In units of USER_HZ, which is 100 on every Linux.
            let split = self.text("cpuacct", "cpuacct.stat");
            let split = fields(&split);
            for (name, field) in [("user", "user"), ("kernel", "system")] {
                let ticks = split.get(field).copied().unwrap_or(0);
                usage.insert(name.into(), (ticks * 10_000_000).into());
            }
        } else {
            let text = self.tree.read_v2("cpu.stat").unwrap_or_default();
            let stat = fields(&text);
            for (name, field) in
                [("total", "usage_usec"), ("user", "user_usec"), ("kernel", "system_usec")]
            {
                let us = stat.get(field).copied().unwrap_or(0);
                usage.insert(name.into(), (us * 1000).into());
            }
        }
        let throttled_ns = match self.is_v1("cpu") {
            true => get("throttled_time"),
            false => get("throttled_usec") * 1000,
        };
        json!({
            "usage": usage,
            "throttling": {
                "periods": get("nr_periods"),
                "throttledPeriods": get("nr_throttled"),
                "throttledTime": throttled_ns,
            },
        })
    }

    fn memory(&self) -> Value {
        let text = self.text("memory", "memory.stat");
        let raw = fields(&text);
        let raw: BTreeMap<String, u64> =
            raw.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let v1 = |prefix: &str| {
            json!({
                "usage": self.number("memory", &format!("{prefix}.usage_in_bytes")),
                "max": self.number("memory", &format!("{prefix}.max_usage_in_bytes")),
                "failcnt": self.number("memory", &format!("{prefix}.failcnt")),
                "limit": self.number("memory", &format!("{prefix}.limit_in_bytes")),
            })
        };
        if self.is_v1("memory") {
            return json!({
                "cache": raw.get("cache").copied().unwrap_or(0),
                "usage": v1("memory"),
                "swap": v1("memory.memsw"),
                "kernel": v1("memory.kmem"),
                "kernelTCP": v1("memory.kmem.tcp"),
                "raw": raw,
            });
        }
        let usage = |used: &str, max: &str, peak: &str| {
            json!({
                "usage": self.number("memory", used),
                "limit": self.number("memory", max),
                "max": self.number("memory", peak),
                "failcnt": 0,
            })
        };
        json!({
            "cache": raw.get("file").copied().unwrap_or(0),
            "usage": usage("memory.current", "memory.max", "memory.peak"),
            "swap": usage("memory.swap.current", "memory.swap.max", "memory.swap.peak"),
            "raw": raw,
        })
    }

    fn block_io(&self) -> Value {
        let mut bytes = Vec::new();
        let mut served = Vec::new();
        if self.is_v1("blkio") {
            for (file, out) in [
                ("blkio.throttle.io_service_bytes_recursive", &mut bytes),
                ("blkio.throttle.io_serviced_recursive", &mut served),
            ] {
                for line in self.text("blkio", file).lines() {
                    let words: Vec<&str> = line.split_whitespace().collect();
                    let [device, op, value] = words.as_slice() else { continue };
                    let Some((major, minor)) = device.split_once(':') else { continue };
                    out.push(json!({
                        "major": number(major), "minor": number(minor), "op": op,
                        "value": number(value),
                    }));
                }
            }
        } else {
            for line in self.text("io", "io.stat").lines() {
                let mut words = line.split_whitespace();
                let Some((major, minor)) = words.next().and_then(|d| d.split_once(':')) else {
                    continue;
                };
                for word in words {
                    let Some((name, value)) = word.split_once('=') else { continue };
                    let (out, op) = match name {
                        "rbytes" => (&mut bytes, "Read"),
                        "wbytes" => (&mut bytes, "Write"),
                        "rios" => (&mut served, "Read"),
                        "wios" => (&mut served, "Write"),
                        _ => continue,
                    };
                    out.push(json!({
                        "major": number(major), "minor": number(minor), "op": op,
                        "value": number(value),
                    }));
                }
            }
        }
        json!({ "ioServiceBytesRecursive": bytes, "ioServicedRecursive": served })
    }

    fn pids(&self) -> Value {
        let limit = match self.text("pids", "pids.max").trim() {
            "max" | "" => 0,
            text => number(text),
        };
        json!({ "current": self.number("pids", "pids.current"), "limit": limit })
    }

    fn oom_kills(&self) -> u64 {
        let file = if self.is_v1("memory") { "memory.oom_control" } else { "memory.events" };
        let text = self.text("memory", file);
        fields(&text).get("oom_kill").copied().unwrap_or(0)
    }
}

impl Runtime {
    /// Returns the present resource use of a container.
    pub fn stats(&self, id: &str) -> Result<Stats> {
        let (record, status) = self.look(id)?;
        if status == Status::Stopped {
            let why = "a stopped container uses nothing";
            return Err(Error::State { id: id.to_owned(), state: status.as_str(), why });
        }
        let forest = self.forest()?;
        let tree = forest.open(&record.cgroup, record.cgroup_made)?;
        let reader = Reader { tree: &tree, forest };
        Ok(Stats {
            cpu: reader.cpu(),
            memory: reader.memory(),
            pids: reader.pids(),
            blkio: reader.block_io(),
            hugetlb: Map::new(),
            intel_rdt: Map::new(),
            network_interfaces: None,
        })
    }

    /// Passes the events of a container to `each` until it ends: resource use, every `interval`,
    /// and kills by the OOM killer.
    pub fn events(
        &self,
        id: &str,
        interval: Duration,
        mut each: impl FnMut(Event<'_>) -> Result<()>,
    ) -> Result<()> {
        let (record, _) = self.look(id)?;
        let forest = self.forest()?;
        let tree = forest.open(&record.cgroup, record.cgroup_made)?;
        let reader = Reader { tree: &tree, forest };
        let mut killed = reader.oom_kills();
        let timeout = Timespec {
            tv_sec: interval.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: interval.subsec_nanos().into(),
        };
        while let Some(process) = record.process() {
            each(Event::stats(id, self.stats(id)?))?;
            match poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&timeout)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(Error::file("wait for", "the container")(e.into())),
            }
            let now = reader.oom_kills();
            if now > killed {
                each(Event { kind: "oom", id, data: None })?;
            }
            killed = now;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flat_file_is_parsed_by_name() {
        let text = "nr_periods 5\nnr_throttled 2\nbroken\nthrottled_usec 70\n";
        let found = fields(text);
        assert_eq!(found.get("nr_throttled"), Some(&2));
        assert_eq!(found.get("throttled_usec"), Some(&70));
        assert_eq!(found.len(), 3);
    }
}
