//! Resource usage of a container: from the runtime's JSON to the messages that containerd knows,
//! one for cgroup v1 and one for v2.

use anyhow::Result;
use containerd_shim_protos::protobuf::MessageField;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::{cgroups, cgroups_v2};
use serde_json::Value;

use crate::event::any;

/// A number somewhere in a document; 0 where it is not.
fn number(value: &Value, path: &str) -> u64 {
    value.pointer(path).and_then(Value::as_u64).unwrap_or(0)
}

/// The message for the `data` of a `stats` event.
pub fn of(data: &Value, is_v1: bool) -> Result<Any> {
    if is_v1 { any(&v1(data)) } else { any(&v2(data)) }
}

fn v1(data: &Value) -> cgroups::metrics::Metrics {
    use cgroups::metrics::{
        BlkIOEntry, BlkIOStat, CPUStat, CPUUsage, MemoryEntry, MemoryOomControl, MemoryStat,
        Metrics, PidsStat, Throttle,
    };
    let entry = |name: &str| {
        let of = |field: &str| number(data, &format!("/memory/{name}/{field}"));
        MessageField::some(MemoryEntry {
            limit: of("limit"),
            usage: of("usage"),
            max: of("max"),
            failcnt: of("failcnt"),
            ..Default::default()
        })
    };
    let raw = |name: &str| number(data, &format!("/memory/raw/{name}"));
    let memory = MemoryStat {
        cache: raw("cache"),
        rss: raw("rss"),
        rss_huge: raw("rss_huge"),
        mapped_file: raw("mapped_file"),
        dirty: raw("dirty"),
        writeback: raw("writeback"),
        pg_pg_in: raw("pgpgin"),
        pg_pg_out: raw("pgpgout"),
        pg_fault: raw("pgfault"),
        pg_maj_fault: raw("pgmajfault"),
        inactive_anon: raw("inactive_anon"),
        active_anon: raw("active_anon"),
        inactive_file: raw("inactive_file"),
        active_file: raw("active_file"),
        unevictable: raw("unevictable"),
        hierarchical_memory_limit: raw("hierarchical_memory_limit"),
        hierarchical_swap_limit: raw("hierarchical_memsw_limit"),
        total_cache: raw("total_cache"),
        total_rss: raw("total_rss"),
        total_rss_huge: raw("total_rss_huge"),
        total_mapped_file: raw("total_mapped_file"),
        total_dirty: raw("total_dirty"),
        total_writeback: raw("total_writeback"),
        total_pg_pg_in: raw("total_pgpgin"),
        total_pg_pg_out: raw("total_pgpgout"),
        total_pg_fault: raw("total_pgfault"),
        total_pg_maj_fault: raw("total_pgmajfault"),
        total_inactive_anon: raw("total_inactive_anon"),
        total_active_anon: raw("total_active_anon"),
        total_inactive_file: raw("total_inactive_file"),
        total_active_file: raw("total_active_file"),
        total_unevictable: raw("total_unevictable"),
        usage: entry("usage"),
        swap: entry("swap"),
        kernel: entry("kernel"),
        kernel_tcp: entry("kernelTCP"),
        ..Default::default()
    };
    let usage = CPUUsage {
        total: number(data, "/cpu/usage/total"),
        kernel: number(data, "/cpu/usage/kernel"),
        user: number(data, "/cpu/usage/user"),
        per_cpu: list(data, "/cpu/usage/percpu").filter_map(Value::as_u64).collect(),
        ..Default::default()
    };
    let throttling = Throttle {
        periods: number(data, "/cpu/throttling/periods"),
        throttled_periods: number(data, "/cpu/throttling/throttledPeriods"),
        throttled_time: number(data, "/cpu/throttling/throttledTime"),
        ..Default::default()
    };
    let entries = |name: &str| {
        let each = |entry: &Value| BlkIOEntry {
            op: entry["op"].as_str().unwrap_or_default().to_owned(),
            major: number(entry, "/major"),
            minor: number(entry, "/minor"),
            value: number(entry, "/value"),
            ..Default::default()
        };
        list(data, &format!("/blkio/{name}")).map(each).collect()
    };
    Metrics {
        pids: MessageField::some(PidsStat {
            current: number(data, "/pids/current"),
            limit: number(data, "/pids/limit"),
            ..Default::default()
        }),
        cpu: MessageField::some(CPUStat {
            usage: MessageField::some(usage),
            throttling: MessageField::some(throttling),
            ..Default::default()
        }),
        memory: MessageField::some(memory),
        blkio: MessageField::some(BlkIOStat {
            io_service_bytes_recursive: entries("ioServiceBytesRecursive"),
            io_serviced_recursive: entries("ioServicedRecursive"),
            ..Default::default()
        }),
        memory_oom_control: MessageField::some(MemoryOomControl::default()),
        ..Default::default()
    }
}

fn v2(data: &Value) -> cgroups_v2::metrics::Metrics {
    use cgroups_v2::metrics::{CPUStat, MemoryStat, Metrics, PidsStat};
    let raw = |name: &str| number(data, &format!("/memory/raw/{name}"));
    let us = |path: &str| number(data, path) / 1000;
    let memory = MemoryStat {
        anon: raw("anon"),
        file: raw("file"),
        kernel_stack: raw("kernel_stack"),
        slab: raw("slab"),
        sock: raw("sock"),
        shmem: raw("shmem"),
        file_mapped: raw("file_mapped"),
        file_dirty: raw("file_dirty"),
        file_writeback: raw("file_writeback"),
        anon_thp: raw("anon_thp"),
        inactive_anon: raw("inactive_anon"),
        active_anon: raw("active_anon"),
        inactive_file: raw("inactive_file"),
        active_file: raw("active_file"),
        unevictable: raw("unevictable"),
        slab_reclaimable: raw("slab_reclaimable"),
        slab_unreclaimable: raw("slab_unreclaimable"),
        pgfault: raw("pgfault"),
        pgmajfault: raw("pgmajfault"),
        usage: number(data, "/memory/usage/usage"),
        usage_limit: number(data, "/memory/usage/limit"),
        max_usage: number(data, "/memory/usage/max"),
        swap_usage: number(data, "/memory/swap/usage"),
        swap_limit: number(data, "/memory/swap/limit"),
        swap_max_usage: number(data, "/memory/swap/max"),
        ..Default::default()
    };
    Metrics {
        pids: MessageField::some(PidsStat {
            current: number(data, "/pids/current"),
            limit: number(data, "/pids/limit"),
            ..Default::default()
        }),
        cpu: MessageField::some(CPUStat {
            usage_usec: us("/cpu/usage/total"),
            user_usec: us("/cpu/usage/user"),
            system_usec: us("/cpu/usage/kernel"),
            nr_periods: number(data, "/cpu/throttling/periods"),
            nr_throttled: number(data, "/cpu/throttling/throttledPeriods"),
            throttled_usec: us("/cpu/throttling/throttledTime"),
            ..Default::default()
        }),
        memory: MessageField::some(memory),
        ..Default::default()
    }
}

fn list<'v>(value: &'v Value, path: &str) -> impl Iterator<Item = &'v Value> {
    value.pointer(path).and_then(Value::as_array).into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use containerd_shim_protos::protobuf::Message;
    use serde_json::json;

    #[test]
    fn figures_keep_their_names_and_units() {
        let data = json!({
            "pids": {"current": 3, "limit": 10},
            "cpu": {"usage": {"total": 5_000, "user": 2_000, "kernel": 3_000, "percpu": [1, 2]}},
            "memory": {"usage": {"usage": 7, "limit": 8}, "raw": {"rss": 9, "anon": 11}},
        });
        let all = of(&data, true).expect("written");
        assert_eq!(all.type_url, "io.containerd.cgroups.v1.Metrics");
        let read = cgroups::metrics::Metrics::parse_from_bytes(&all.value).expect("read");
        assert_eq!((read.pids.current, read.memory.usage.limit, read.memory.rss), (3, 8, 9));
        assert_eq!(read.cpu.usage.per_cpu, [1, 2]);
        let all = of(&data, false).expect("written");
        assert_eq!(all.type_url, "io.containerd.cgroups.v2.Metrics");
        let read = cgroups_v2::metrics::Metrics::parse_from_bytes(&all.value).expect("read");
        assert_eq!((read.cpu.usage_usec, read.memory.anon, read.memory.usage), (5, 11, 7));
    }
}
