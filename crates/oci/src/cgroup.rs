//! The cgroup of a container: its path, and the translation of `linux.resources` to the values of
//! its files.
//!
//! The files are the kernel's (Documentation/admin-guide/cgroup-v1, cgroup-v2.rst). The
//! specification's terms are v1's; for v2 they are converted as runc and crun do.

use dormouse_kernel::CallError;
use dormouse_kernel::cgroup::{DeviceAccess, DeviceKind, DeviceRule, Forest, Tree};

use crate::error::{Error, Result};
use crate::spec::{self, BlockIo, Cpu, Memory, Resources, ThrottleDevice};

/// Parent of containers without a configured path.
const DEFAULT_PARENT: &str = "dormouse-oci";
/// LIMIT: the kernel's, for a file.
const PAGE: usize = 4096;

/// Returns the path of a container's cgroup.
pub(crate) fn path(given: Option<&str>, id: &str, systemd: bool) -> Result<String> {
    let given = given.filter(|path| !path.is_empty());
    if !systemd {
        return Ok(given.map_or(format!("{DEFAULT_PARENT}/{id}"), str::to_owned));
    }
    let field = |why: &str| Error::field("linux.cgroupsPath", why);
    let (slice, prefix, name) = match given {
        None => ("system.slice", "dormouse", id),
        Some(path) => {
            let parts: Vec<&str> = path.split(':').collect();
            match parts.as_slice() {
                ["", prefix, name] => ("system.slice", *prefix, *name),
                [slice, prefix, name] => (*slice, *prefix, *name),
                _ => return Err(field("with --systemd-cgroup it is SLICE:PREFIX:NAME")),
            }
        }
    };
    let unit = match (name.ends_with(".slice"), prefix) {
        (true, _) => name.to_owned(),
        (false, "") => format!("{name}.scope"),
        (false, prefix) => format!("{prefix}-{name}.scope"),
    };
    let stem = slice.strip_suffix(".slice").ok_or_else(|| field("its slice does not end so"))?;
    if stem.contains('/') || unit.contains('/') {
        return Err(field("a unit's name has no slash"));
    }
    let mut path = String::new();
    // `-` is the root; `a-b.slice` lies in `a.slice`.
    let mut so_far = String::new();
    for part in stem.split('-').filter(|part| !part.is_empty()) {
        so_far = if so_far.is_empty() { part.to_owned() } else { format!("{so_far}-{part}") };
        path.push_str(&format!("{so_far}.slice/"));
    }
    Ok(path + &unit)
}

/// Returns the v1 controllers that some limit needs a directory of.
pub(crate) fn needed(resources: &Resources) -> Vec<&'static str> {
    let mut names = Vec::new();
    if let Some(cpu) = &resources.cpu
        && [&cpu.cpus, &cpu.mems].iter().any(|set| set.as_ref().is_some_and(|s| !s.is_empty()))
    {
        names.push("cpuset");
    }
    if !resources.hugepage_limits.is_empty() {
        names.push("hugetlb");
    }
    if let Some(network) = &resources.network {
        names.extend(network.class_id.map(|_| "net_cls"));
        names.extend((!network.priorities.is_empty()).then_some("net_prio"));
    }
    if !resources.rdma.is_empty() {
        names.push("rdma");
    }
    names
}

/// Sets all given limits; the others do not change.
pub(crate) fn set(tree: &Tree, forest: &Forest, resources: &Resources) -> Result<()> {
    let set = Set { tree, forest };
    if let Some(cpu) = &resources.cpu {
        set.cpu(cpu)?;
    }
    if let Some(memory) = &resources.memory {
        set.memory(memory)?;
    }
    if let Some(limit) = resources.pids.as_ref().and_then(|pids| pids.limit) {
        // None at all is one for the process itself, as with runc and systemd.
        let value = if limit < 0 { "max".to_owned() } else { limit.max(1).to_string() };
        set.write("pids.limit", "pids", "pids.max", "pids.max", &value)?;
    }
    if let Some(block_io) = &resources.block_io {
        set.block_io(block_io)?;
    }
    for (at, limit) in resources.hugepage_limits.iter().enumerate() {
        let (size, value) = (&limit.page_size, limit.limit.to_string());
        if size.is_empty() || !size.bytes().all(|b| b.is_ascii_alphanumeric()) {
            let field = format!("linux.resources.hugepageLimits[{at}].pageSize");
            return Err(Error::field(field, format!("{size:?} is no page size")));
        }
        let field = format!("hugepageLimits[{at}].limit");
        let v1 = format!("hugetlb.{size}.limit_in_bytes");
        set.write(&field, "hugetlb", &v1, &format!("hugetlb.{size}.max"), &value)?;
    }
    if let Some(network) = &resources.network {
        if let Some(class) = network.class_id {
            let (file, value) = ("net_cls.classid", class.to_string());
            set.write("network.classID", "net_cls", file, file, &value)?;
        }
        for (at, one) in network.priorities.iter().enumerate() {
            let (file, value) = ("net_prio.ifpriomap", format!("{} {}", one.name, one.priority));
            set.write(&format!("network.priorities[{at}]"), "net_prio", file, file, &value)?;
        }
    }
    for (device, limit) in &resources.rdma {
        let mut value = device.clone();
        for (word, number) in [("hca_handle", limit.hca_handles), ("hca_object", limit.hca_objects)]
        {
            if let Some(number) = number {
                value.push_str(&format!(" {word}={number}"));
            }
        }
        set.write(&format!("rdma[{device}]"), "rdma", "rdma.max", "rdma.max", &value)?;
    }
    for (file, value) in &resources.unified {
        set.unified(file, value)?;
    }
    Ok(())
}

struct Set<'s> {
    tree: &'s Tree,
    forest: &'s Forest,
}

fn refused(field: &str, e: &CallError) -> Error {
    Error::field(format!("linux.resources.{field}"), e.to_string())
}

impl Set<'_> {
    fn is_v1(&self, controller: &str) -> bool {
        self.forest.is_v1(controller)
    }

    fn try_write(
        &self,
        controller: &str,
        v1: &str,
        v2: &str,
        value: &str,
    ) -> std::result::Result<(), CallError> {
        match self.is_v1(controller) {
            true => self.tree.write_v1(controller, v1, value),
            false => self.tree.write_v2(v2, value),
        }
    }

    fn write(&self, field: &str, controller: &str, v1: &str, v2: &str, value: &str) -> Result<()> {
        self.try_write(controller, v1, v2, value).map_err(|e| {
            if e.errno() != rustix::io::Errno::NOENT.raw_os_error() {
                return refused(field, &e);
            }
            let why = format!("this host's cgroups have no {controller} controller for it");
            Error::field(format!("linux.resources.{field}"), why)
        })
    }

    /// Writes two files whose order depends on their old values: the kernel may refuse either one
    /// first.
    fn write_pair(&self, first: Pair<'_>, second: Pair<'_>) -> Result<()> {
        let write =
            |pair: &Pair<'_>| self.try_write(pair.controller, pair.v1, pair.v2, &pair.value);
        if write(&first).is_ok() {
            return self.write_one(&second);
        }
        self.write_one(&second)?;
        self.write_one(&first)
    }

    /// Writes those of two such files that have a value.
    fn write_some(&self, first: Option<Pair<'_>>, second: Option<Pair<'_>>) -> Result<()> {
        match (first, second) {
            (Some(first), Some(second)) => self.write_pair(first, second),
            (Some(one), None) | (None, Some(one)) => self.write_one(&one),
            (None, None) => Ok(()),
        }
    }

    fn write_one(&self, pair: &Pair<'_>) -> Result<()> {
        self.write(pair.field, pair.controller, pair.v1, pair.v2, &pair.value)
    }

    fn cpu(&self, cpu: &Cpu) -> Result<()> {
        if let Some(idle) = cpu.idle {
            self.write("cpu.idle", "cpu", "cpu.idle", "cpu.idle", &idle.to_string())?;
        }
        if let Some(shares) = cpu.shares.filter(|shares| *shares != 0) {
            let value = if self.is_v1("cpu") {
                shares
            } else {
                1 + (shares.clamp(2, 262_144) - 2) * 9999 / 262_142
            };
            self.write("cpu.shares", "cpu", "cpu.shares", "cpu.weight", &value.to_string())?;
        }
        self.cpu_bandwidth(cpu)?;
        let pair = |field, v1, value| Pair { field, controller: "cpu", v1, v2: v1, value };
        let period = cpu.realtime_period.filter(|us| *us != 0);
        let period =
            period.map(|us| pair("cpu.realtimePeriod", "cpu.rt_period_us", us.to_string()));
        let runtime = cpu.realtime_runtime.filter(|us| *us != 0);
        let runtime =
            runtime.map(|us| pair("cpu.realtimeRuntime", "cpu.rt_runtime_us", us.to_string()));
        self.write_some(period, runtime)?;
        for (field, list, file) in
            [("cpu.cpus", &cpu.cpus, "cpuset.cpus"), ("cpu.mems", &cpu.mems, "cpuset.mems")]
        {
            if let Some(list) = list.as_deref().filter(|list| !list.is_empty()) {
                self.write(field, "cpuset", file, file, list)?;
            }
        }
        Ok(())
    }

    fn cpu_bandwidth(&self, cpu: &Cpu) -> Result<()> {
        let quota = cpu.quota.filter(|quota| *quota != 0);
        let period = cpu.period.filter(|period| *period != 0);
        let burst = || match cpu.burst {
            None => Ok(()),
            Some(burst) => {
                let (v1, v2) = ("cpu.cfs_burst_us", "cpu.max.burst");
                self.write("cpu.burst", "cpu", v1, v2, &burst.to_string())
            }
        };
        if self.is_v1("cpu") {
            let pair = |field, v1, value| Pair { field, controller: "cpu", v1, v2: v1, value };
            let period = period.map(|p| pair("cpu.period", "cpu.cfs_period_us", p.to_string()));
            let quota = quota.map(|q| pair("cpu.quota", "cpu.cfs_quota_us", q.to_string()));
            self.write_some(period, quota)?;
            return burst();
        }
        if quota.is_some() || period.is_some() {
            let mut value = match quota {
                Some(quota) if quota > 0 => quota.to_string(),
                Some(_) => "max".to_owned(),
                None => {
                    let now = self.tree.read_v2("cpu.max").unwrap_or_default();
                    now.split_whitespace().next().unwrap_or("max").to_owned()
                }
            };
            if let Some(period) = period {
                value.push_str(&format!(" {period}"));
            }
            self.write("cpu.quota", "cpu", "cpu.max", "cpu.max", &value)?;
        }
        burst()
    }

    fn memory(&self, memory: &Memory) -> Result<()> {
        let limit = memory.limit.filter(|limit| *limit != 0);
        let swap = memory.swap.filter(|swap| *swap != 0);
        if let (Some(limit), Some(swap)) = (limit, swap)
            && swap > 0
            && (limit > swap || limit < 0)
        {
            let why = "memory and swap together cannot be less than memory alone";
            return Err(Error::field("linux.resources.memory.swap", why));
        }
        if self.is_v1("memory") {
            self.memory_v1(memory, limit, swap)
        } else {
            self.memory_v2(memory, limit, swap)
        }
    }

    fn memory_v1(&self, memory: &Memory, limit: Option<i64>, swap: Option<i64>) -> Result<()> {
        let pair = |field, v1, value: i64| Pair {
            field,
            controller: "memory",
            v1,
            v2: v1,
            value: value.to_string(),
        };
        let limit_file = "memory.limit_in_bytes";
        let swap_file = "memory.memsw.limit_in_bytes";
        // Without swap accounting there is nothing to limit, and no limit to lift.
        let swap = swap.filter(|swap| *swap > 0 || self.tree.has_v1_file("memory", swap_file));
        let limit = limit.map(|limit| pair("memory.limit", limit_file, limit));
        let swap = match (swap, &limit) {
            // Lifting the limit of memory requires lifting this one first.
            (None, Some(limit)) if limit.value == "-1" => {
                self.tree.has_v1_file("memory", swap_file).then_some(-1)
            }
            (swap, _) => swap,
        };
        let swap = swap.map(|swap| pair("memory.swap", swap_file, swap));
        self.write_some(limit, swap)?;
        for (field, value, file) in [
            ("memory.reservation", memory.reservation, "memory.soft_limit_in_bytes"),
            ("memory.kernelTCP", memory.kernel_tcp, "memory.kmem.tcp.limit_in_bytes"),
        ] {
            if let Some(value) = value.filter(|value| *value != 0) {
                self.write_one(&pair(field, file, value))?;
            }
        }
        if let Some(swappiness) = memory.swappiness {
            if swappiness > 100 {
                let why = format!("{swappiness} is not one of 0 to 100");
                return Err(Error::field("linux.resources.memory.swappiness", why));
            }
            let file = "memory.swappiness";
            self.write("memory.swappiness", "memory", file, file, &swappiness.to_string())?;
        }
        if memory.disable_oom_killer == Some(true) {
            let file = "memory.oom_control";
            self.write("memory.disableOOMKiller", "memory", file, file, "1")?;
        }
        Ok(())
    }

    fn memory_v2(&self, memory: &Memory, limit: Option<i64>, swap: Option<i64>) -> Result<()> {
        let text = |bytes: i64| if bytes < 0 { "max".to_owned() } else { bytes.to_string() };
        if memory.check_before_update == Some(true)
            && let Some(limit) = limit.filter(|limit| *limit > 0)
        {
            let used = self.tree.read_v2("memory.current").unwrap_or_default();
            if used.trim().parse().is_ok_and(|used: i64| used > limit) {
                let why = "more than that is in use";
                return Err(Error::field("linux.resources.memory.limit", why));
            }
        }
        let swap = match (swap, limit) {
            (Some(swap), _) if swap < 0 => Some(-1),
            (Some(swap), Some(limit)) => Some(swap - limit),
            (Some(_), None) => {
                let why = "on cgroup v2 it needs a limit of memory beside it";
                return Err(Error::field("linux.resources.memory.swap", why));
            }
            (None, Some(limit)) if limit < 0 => Some(-1),
            (None, _) => None,
        };
        let mut files = Vec::new();
        files.extend(swap.map(|bytes| ("memory.swap", "memory.swap.max", text(bytes))));
        files.extend(limit.map(|bytes| ("memory.limit", "memory.max", text(bytes))));
        let low = memory.reservation.filter(|bytes| *bytes != 0);
        files.extend(low.map(|bytes| ("memory.reservation", "memory.low", text(bytes))));
        for (field, file, value) in files {
            // A kernel without swap has no limit to lift.
            if file == "memory.swap.max" && value == "max" && !self.tree.has_v2(file) {
                continue;
            }
            self.write(field, "memory", file, file, &value)?;
        }
        Ok(())
    }

    fn block_io(&self, io: &BlockIo) -> Result<()> {
        let v1 = self.is_v1("blkio");
        let weight_file = |leaf: bool, device: bool| match (leaf, device) {
            (true, false) => "blkio.leaf_weight",
            (true, true) => "blkio.leaf_weight_device",
            (false, false) if self.tree.has_v1_file("blkio", "blkio.weight") => "blkio.weight",
            (false, false) => "blkio.bfq.weight",
            (false, true) if self.tree.has_v1_file("blkio", "blkio.weight_device") => {
                "blkio.weight_device"
            }
            (false, true) => "blkio.bfq.weight_device",
        };
        let on_v2 = |weight: u16| match self.tree.has_v2("io.bfq.weight") {
            true => ("io.bfq.weight", u64::from(weight)),
            false => ("io.weight", 1 + (u64::from(weight.clamp(10, 1000)) - 10) * 9999 / 990),
        };
        if let Some(weight) = io.weight.filter(|weight| *weight != 0) {
            let (v2, converted) = on_v2(weight);
            let value = if v1 { u64::from(weight) } else { converted };
            self.write(
                "blockIO.weight",
                "blkio",
                weight_file(false, false),
                v2,
                &value.to_string(),
            )?;
        }
        if let Some(weight) = io.leaf_weight.filter(|weight| v1 && *weight != 0) {
            let file = weight_file(true, false);
            self.write("blockIO.leafWeight", "blkio", file, file, &weight.to_string())?;
        }
        for (at, device) in io.weight_device.iter().enumerate() {
            let field = format!("blockIO.weightDevice[{at}]");
            let number = device_number(&field, device.major, device.minor)?;
            if let Some(weight) = device.weight.filter(|weight| *weight != 0) {
                let (v2, converted) = on_v2(weight);
                let value = if v1 { u64::from(weight) } else { converted };
                let value = format!("{number} {value}");
                self.write(&field, "blkio", weight_file(false, true), v2, &value)?;
            }
            if let Some(weight) = device.leaf_weight.filter(|weight| v1 && *weight != 0) {
                let file = weight_file(true, true);
                self.write(&field, "blkio", file, file, &format!("{number} {weight}"))?;
            }
        }
        let throttle: [(&str, &Vec<ThrottleDevice>, &str, &str); 4] = [
            ("throttleReadBpsDevice", &io.throttle_read_bps_device, "read_bps", "rbps"),
            ("throttleWriteBpsDevice", &io.throttle_write_bps_device, "write_bps", "wbps"),
            ("throttleReadIOPSDevice", &io.throttle_read_iops_device, "read_iops", "riops"),
            ("throttleWriteIOPSDevice", &io.throttle_write_iops_device, "write_iops", "wiops"),
        ];
        for (name, list, v1_word, v2_word) in throttle {
            for (at, device) in list.iter().enumerate() {
                let field = format!("blockIO.{name}[{at}]");
                let number = device_number(&field, device.major, device.minor)?;
                let file = format!("blkio.throttle.{v1_word}_device");
                let value = match (v1, device.rate) {
                    (true, rate) => format!("{number} {rate}"),
                    (false, 0) => format!("{number} {v2_word}=max"),
                    (false, rate) => format!("{number} {v2_word}={rate}"),
                };
                self.write(&field, "blkio", &file, "io.max", &value)?;
            }
        }
        Ok(())
    }

    /// Writes a v2 file by its own name.
    fn unified(&self, file: &str, value: &str) -> Result<()> {
        let field = format!("unified[{file}]");
        let bad = |why: &str| Err(Error::field(format!("linux.resources.{field}"), why));
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
        if !file.contains('.') || !file.bytes().all(plain) || file.starts_with('.') {
            return bad("it is no file of a cgroup");
        }
        // Files that control the membership of a cgroup are not limits.
        if file.starts_with("cgroup.")
            && !["cgroup.max.depth", "cgroup.max.descendants"].contains(&file)
        {
            return bad("it is not a limit");
        }
        if value.len() > PAGE {
            return bad("its value is longer than a page");
        }
        if !self.tree.has_v2(file) {
            return bad("invalid configuration: the container's cgroup v2 has no such file here");
        }
        for line in value.lines() {
            self.tree.write_v2(file, line).map_err(|e| refused(&field, &e))?;
        }
        Ok(())
    }
}

struct Pair<'p> {
    field: &'p str,
    controller: &'p str,
    v1: &'p str,
    v2: &'p str,
    value: String,
}

fn device_number(field: &str, major: i64, minor: i64) -> Result<String> {
    match (u32::try_from(major), u32::try_from(minor)) {
        (Ok(major), Ok(minor)) => Ok(format!("{major}:{minor}")),
        _ => Err(Error::field(format!("linux.resources.{field}"), "it is no device number")),
    }
}

/// Devices that every container may use: the nodes of its `/dev` and its terminals. It may also
/// make any node, which does not permit its use.
const ORDINARY: [(DeviceKind, Option<u32>, Option<u32>, DeviceAccess); 11] = {
    use DeviceKind::{Block, Char};
    let all = DeviceAccess::all();
    [
        (Char, None, None, DeviceAccess::MKNOD),
        (Block, None, None, DeviceAccess::MKNOD),
        (Char, Some(1), Some(3), all),
        (Char, Some(1), Some(8), all),
        (Char, Some(1), Some(7), all),
        (Char, Some(5), Some(0), all),
        (Char, Some(1), Some(5), all),
        (Char, Some(1), Some(9), all),
        (Char, Some(136), None, all),
        (Char, Some(5), Some(2), all),
        (Char, Some(5), Some(1), all),
    ]
};

/// Applies the list of device rules.
pub(crate) fn set_devices(tree: &Tree, list: &[spec::DeviceRule]) -> Result<()> {
    let (mut rules, mut everything) = (Vec::new(), false);
    for (at, given) in list.iter().enumerate() {
        let field = |name: &str| format!("linux.resources.devices[{at}].{name}");
        let kinds: &[DeviceKind] = match given.kind.as_deref().unwrap_or("a") {
            "a" | "" => &[DeviceKind::Char, DeviceKind::Block],
            "c" | "u" => &[DeviceKind::Char],
            "b" => &[DeviceKind::Block],
            other => {
                return Err(Error::field(field("type"), format!("{other:?} is none of a c b")));
            }
        };
        let number = |name: &str, value: Option<i64>| match value {
            None | Some(-1) => Ok(None),
            Some(value) => u32::try_from(value)
                .map(Some)
                .map_err(|_| Error::field(field(name), format!("{value} is no device number"))),
        };
        let (major, minor) = (number("major", given.major)?, number("minor", given.minor)?);
        let mut access = DeviceAccess::empty();
        for letter in given.access.as_deref().unwrap_or("rwm").chars() {
            access |= match letter {
                'r' => DeviceAccess::READ,
                'w' => DeviceAccess::WRITE,
                'm' => DeviceAccess::MKNOD,
                // As runc takes it.
                'a' => DeviceAccess::all(),
                other => {
                    let why = format!("{other:?} is none of r w m");
                    return Err(Error::field(field("access"), why));
                }
            };
        }
        if kinds.len() == 2 && major.is_none() && minor.is_none() && access.is_all() {
            // Earlier rules have no effect any more.
            (rules, everything) = (Vec::new(), given.allow);
            continue;
        }
        let rule =
            |kind: &DeviceKind| (DeviceRule { kind: *kind, major, minor, access }, given.allow);
        rules.extend(kinds.iter().map(rule));
    }
    if !everything {
        let ordinary = ORDINARY.iter().map(|(kind, major, minor, access)| {
            (DeviceRule { kind: *kind, major: *major, minor: *minor, access: *access }, true)
        });
        rules.extend(ordinary);
    }
    Ok(tree.set_devices(&rules, everything)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup_path_is_the_given_one_or_a_scope() {
        assert_eq!(path(None, "a", false).expect("good"), "dormouse-oci/a");
        assert_eq!(path(Some("/x/y"), "a", false).expect("good"), "/x/y");
        let scope = path(Some("user-1000.slice:libpod:a"), "a", true).expect("good");
        assert_eq!(scope, "user.slice/user-1000.slice/libpod-a.scope");
        assert_eq!(path(None, "a", true).expect("good"), "system.slice/dormouse-a.scope");
        assert_eq!(path(Some("-.slice:x:y"), "a", true).expect("good"), "x-y.scope");
        assert!(path(Some("/x/y"), "a", true).is_err());
    }
}
