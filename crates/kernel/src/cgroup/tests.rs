//! Against this host's own cgroups, in scratch parents that are removed at the end.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use dormouse_model::CpuBurst;

use super::*;
use crate::ErrorKind;

#[test]
fn control_file_and_reserved_names_are_refused() {
    for bad in
        ["keeper", "images", "devices-1", "devices-1-77", "cgroup.procs", "memory.max", "blkio.x"]
    {
        assert!(check_name(bad).is_err(), "{bad}");
    }
    for good in ["web", "a.b", "0123456789abcdef0123456789abcdef", "memory"] {
        assert!(check_name(good).is_ok(), "{good}");
    }
}

/// A parent of its own for one test.
struct Scratch {
    hierarchy: Hierarchy,
}

impl Scratch {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let parent = format!("dormouse-test-{}-{n}", std::process::id());
        Self { hierarchy: Hierarchy::open(&parent).unwrap() }
    }

    /// All directories of this parent, as paths below /sys/fs/cgroup.
    fn directories(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let v1 = self.hierarchy.0.v1.iter().map(|v1| &v1.mount);
        for mount in v1.chain(self.hierarchy.0.v2.iter().map(|v2| &v2.mount)) {
            let Ok(entries) = std::fs::read_dir(mount.join(self.hierarchy.parent())) else {
                continue;
            };
            let entries = entries.map(|e| e.unwrap());
            found.extend(entries.filter(|e| e.file_type().unwrap().is_dir()).map(|e| e.path()));
        }
        found
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        for name in self.hierarchy.names().unwrap_or_default() {
            if let Ok(Some(cgroup)) = self.hierarchy.find(&name) {
                let _ = cgroup.kill();
                let _ = cgroup.remove();
            }
        }
        let removed = self.hierarchy.remove_parent();
        if !std::thread::panicking() {
            removed.unwrap();
        }
    }
}

/// Runs a shell in a cgroup as a start does: it places itself before exec.
fn spawn(cgroup: &Cgroup, script: &str) -> Child {
    let placement = cgroup.placement().unwrap();
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script]).stdin(std::process::Stdio::null());
    let procs = cgroup.v2.as_ref().map(|v2| v2.open_file("cgroup.procs", OFlags::WRONLY).unwrap());
    let fds: Vec<_> = placement.v1_tasks.into_iter().chain(procs).collect();
    let join = move || {
        fds.iter().try_for_each(|fd| {
            // SAFETY: the descriptor is open as long as the closure lives; ManuallyDrop leaves it.
            let file = unsafe { File::from_raw_fd(fd.as_raw_fd()) };
            std::mem::ManuallyDrop::new(file).write_all(b"0")
        })
    };
    // SAFETY: the closure only calls write(2).
    unsafe { command.pre_exec(join) };
    command.spawn().unwrap()
}

fn until(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn limits() -> Limits {
    Limits {
        cpu_max_milli: Some(500),
        cpu_weight: Some(200),
        memory_max_bytes: Some(64 << 20),
        swap_max_bytes: Some(16 << 20),
        pids_max: Some(20),
        ..Limits::default()
    }
}

#[test]
fn root_container_is_placed_counted_killed_and_leaves_nothing() {
    let scratch = Scratch::new();
    let cgroup = scratch.hierarchy.create("a", &limits()).unwrap();
    let mut child = spawn(&cgroup, "while :; do :; done & sleep 100 & wait");
    until("three processes", || cgroup.pids().unwrap().len() == 3);
    assert!(cgroup.pids().unwrap().contains(&child.id()));
    until("CPU time", || cgroup.stats().unwrap().cpu_usage_ns > 50_000_000);
    let stats = cgroup.stats().unwrap();
    assert_eq!((stats.pids, stats.pids_max), (3, Some(20)));
    assert_eq!(stats.memory_max_bytes, Some(64 << 20));
    assert!(stats.memory_bytes > 100_000, "{stats:?}");
    assert!(stats.cpu_user_ns + stats.cpu_system_ns > 0, "{stats:?}");
    assert_eq!(stats.oom_kills, 0);
    assert!(!cgroup.wait_empty(Duration::from_millis(5)).unwrap());

    let found = scratch.hierarchy.find("a").unwrap().unwrap();
    assert_eq!(found.v2_id(), cgroup.v2_id());
    assert_eq!(found.pids().unwrap(), cgroup.pids().unwrap());
    assert_eq!(scratch.hierarchy.names().unwrap(), ["a"]);

    found.kill().unwrap();
    assert!(found.wait_empty(Duration::from_secs(5)).unwrap());
    child.wait().unwrap();
    found.remove().unwrap();
    assert!(scratch.hierarchy.find("a").unwrap().is_none());
    found.remove().unwrap(); // twice does no harm
}

#[test]
fn root_counters_have_the_number_of_their_cgroup_and_end_with_it() {
    let scratch = Scratch::new();
    let cgroup = scratch.hierarchy.create("a", &Limits::default()).unwrap();
    let mut child = spawn(&cgroup, "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done");
    child.wait().unwrap();
    assert!(cgroup.wait_empty(Duration::from_secs(5)).unwrap());
    let counters = cgroup.counters().unwrap().unwrap();
    assert!(counters.cpu_ns > 0 && counters.cpu_user_ns <= counters.cpu_ns, "{counters:?}");
    assert_eq!(counters.cpu_ns, cgroup.stats().unwrap().cpu_usage_ns);
    // KERNEL(6.1): none is seen before.
    assert!(counters.tasks == 0 && counters.tasks_peak >= 1, "{counters:?}");
    let again = scratch.hierarchy.find("a").unwrap().unwrap().counters().unwrap().unwrap();
    assert_eq!((again.cgroup, again.cpu_ns), (counters.cgroup, counters.cpu_ns));
    cgroup.remove().unwrap();
    assert_eq!(cgroup.counters().unwrap(), None);
    let next = scratch.hierarchy.create("a", &Limits::default()).unwrap();
    let next = next.counters().unwrap().unwrap();
    assert_ne!(next.cgroup, counters.cgroup);
    assert_eq!(next.cpu_ns, 0);
}

#[test]
fn root_frozen_cgroup_stops_thawed_resumes_and_frozen_is_killed() {
    let scratch = Scratch::new();
    let cgroup = scratch.hierarchy.create("a", &Limits::default()).unwrap();
    let mut child = spawn(&cgroup, "while :; do :; done");
    let used = || cgroup.stats().unwrap().cpu_usage_ns;
    until("it runs", || used() > 10_000_000);
    cgroup.freeze().unwrap();
    assert!(cgroup.is_frozen().unwrap());
    let frozen = used();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(used(), frozen);
    cgroup.thaw().unwrap();
    assert!(!cgroup.is_frozen().unwrap());
    until("it goes on", || used() > frozen + 1_000_000);
    cgroup.freeze().unwrap();
    cgroup.kill().unwrap();
    child.wait().unwrap();
    cgroup.remove().unwrap();
}

#[test]
fn root_limits_hold_and_can_be_changed_both_ways() {
    let scratch = Scratch::new();
    let cgroup = scratch.hierarchy.create("a", &limits()).unwrap();
    for (memory, swap) in [(128, 64), (32, 0), (256, 256), (40, 1)] {
        let (memory, swap) = (memory << 20, swap << 20);
        let new = Limits {
            memory_max_bytes: Some(memory),
            swap_max_bytes: Some(swap),
            ..Limits::default()
        };
        cgroup.set(&new).unwrap();
        assert_eq!(cgroup.stats().unwrap().memory_max_bytes, Some(memory));
        if let Some(v1) = cgroup.in_v1(Controllers::MEMORY) {
            let memsw = v1.read_number("memory.memsw.limit_in_bytes").unwrap();
            assert_eq!(memsw, Some(memory + swap));
        }
    }
    if let Some(v1) = cgroup.in_v1(Controllers::CPU) {
        assert_eq!(v1.read("cpu.shares").unwrap().trim(), "2048");
        assert_eq!(v1.read("cpu.cfs_quota_us").unwrap().trim(), "50000");
    }
    cgroup.set(&Limits { pids_max: Some(1), ..Limits::default() }).unwrap();
    let mut child = spawn(&cgroup, "sleep 1 & wait");
    assert!(!child.wait().unwrap().success(), "a second process was possible");
    assert_eq!(cgroup.stats().unwrap().memory_max_bytes, Some(40 << 20), "others stay");
}

#[test]
fn root_quota_period_and_burst_change_in_any_order() {
    let scratch = Scratch::new();
    let cgroup = scratch.hierarchy.create("a", &Limits::default()).unwrap();
    let (dir, files) = match cgroup.in_v1(Controllers::CPU) {
        Some(dir) => (dir, ["cpu.cfs_quota_us", "cpu.cfs_burst_us"]),
        None => (cgroup.in_v2(Controllers::CPU).unwrap(), ["cpu.max", "cpu.max.burst"]),
    };
    let first = |file: &str| {
        let text = dir.read(file).unwrap();
        text.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    let some = [(500, 100_000, None), (1500, 10_000, Some(CpuBurst::Percent(100)))];
    let more = [(100, 1_000_000, Some(CpuBurst::Us(1))), (2000, 1000, Some(CpuBurst::Us(0)))];
    let all = [some, more].concat();
    for (from, to) in all.iter().flat_map(|from| all.iter().map(move |to| (from, to))) {
        for (milli, period, burst) in [from, to] {
            let limits = Limits {
                cpu_max_milli: Some(*milli),
                cpu_period_us: Some(*period),
                cpu_burst: *burst,
                ..Limits::default()
            };
            cgroup.set(&limits).unwrap();
            let quota = u64::from(*milli) * u64::from(*period) / 1000;
            let burst = dormouse_model::Cpu::of(&limits).burst_us();
            assert_eq!(files.map(first), [quota, burst], "{from:?} to {to:?}");
        }
    }
    cgroup.remove().unwrap();
}

#[test]
fn root_weight_is_changed_through_kept_descriptors_until_the_cgroup_is_removed() {
    let scratch = Scratch::new();
    let hierarchy = &scratch.hierarchy;
    let cgroup = hierarchy.create("a", &Limits::default()).unwrap();
    assert_eq!(hierarchy.shares_of("a").unwrap(), Some(1024));
    let share = hierarchy.cpu_share("a").unwrap().unwrap();
    for shares in [2048, 102_400, 1024] {
        assert!(share.set(shares).unwrap());
        assert_eq!(hierarchy.shares_of("a").unwrap(), Some(shares));
        assert!(hierarchy.set_shares("a", shares * 2).unwrap());
    }
    assert_eq!(share.used_ns().unwrap(), Some(0));
    let mut child = spawn(&cgroup, "while :; do :; done");
    until("CPU time", || share.used_ns().unwrap() > Some(20_000_000));
    cgroup.kill().unwrap();
    child.wait().unwrap();
    cgroup.remove().unwrap();
    assert_eq!((share.used_ns().unwrap(), share.set(1024).unwrap()), (None, false));
    assert_eq!(hierarchy.shares_of("a").unwrap(), None);
    assert!(!hierarchy.set_shares("a", 1024).unwrap());
    assert!(hierarchy.cpu_share("a").unwrap().is_none());
}

#[test]
fn root_parent_gets_what_is_reserved_while_its_weight_is_set() {
    let scratch = Scratch::new();
    let hierarchy = &scratch.hierarchy;
    let _cgroup = hierarchy.create("a", &Limits::default()).unwrap();
    let weight = || {
        let (version, parent) = hierarchy.cpu_parent().unwrap();
        share::read(version, parent).unwrap()
    };
    assert_eq!(weight(), 1024);
    hierarchy.set_parent_shares(Some((1900, 2000))).unwrap();
    assert!(weight() >= 19 * 1024, "{}", weight());
    hierarchy.set_parent_shares(None).unwrap();
    assert_eq!(weight(), 1024);
}

#[test]
fn root_memory_hog_is_killed_and_counted() {
    let scratch = Scratch::new();
    let hog =
        Limits { memory_max_bytes: Some(8 << 20), swap_max_bytes: Some(0), ..Limits::default() };
    let cgroup = scratch.hierarchy.create("hog", &hog).unwrap();
    let mut child = spawn(&cgroup, "exec head -c 64m /dev/zero | tail -c 64m | wc -c");
    child.wait().unwrap();
    assert!(cgroup.oom_kills().unwrap() >= 1);
    assert_eq!(cgroup.stats().unwrap().oom_kills, cgroup.oom_kills().unwrap());
}

#[test]
fn root_refused_limits_leave_nothing_behind() {
    let scratch = Scratch::new();
    let before = scratch.directories();
    let bad = [
        Limits { cpu_weight: Some(10_001), ..limits() },
        Limits { cpuset_cpus: Some("60000".into()), ..limits() },
        Limits { cpuset_cpus: Some("zero".into()), ..limits() },
        Limits { pids_max: Some(0), ..limits() },
    ];
    for limits in bad {
        let error = scratch.hierarchy.create("a", &limits).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert_eq!(scratch.directories(), before, "{error}");
    }
}

#[test]
fn root_name_in_use_is_refused_and_half_made_is_found() {
    let scratch = Scratch::new();
    let cgroup = scratch.hierarchy.create("a", &Limits::default()).unwrap();
    let error = scratch.hierarchy.create("a", &Limits::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exists);
    assert!(scratch.hierarchy.find("a").unwrap().is_some(), "the first one must survive");
    cgroup.remove().unwrap();

    // As after a SIGKILL in the middle of create.
    let parent = scratch.hierarchy.0.v2.as_ref().map(|v2| &v2.parent);
    let parent = parent.or(scratch.hierarchy.v1_parent(Controllers::PIDS).unwrap()).unwrap();
    drop(parent.make("half").unwrap());
    assert_eq!(scratch.hierarchy.names().unwrap(), ["half"]);
    scratch.hierarchy.find("half").unwrap().unwrap().remove().unwrap();
    assert!(scratch.hierarchy.names().unwrap().is_empty());
}

#[test]
fn root_cgroups_made_inside_are_emptied_and_removed() {
    let scratch = Scratch::new();
    let cgroup = scratch.hierarchy.create("a", &Limits::default()).unwrap();
    let dir = cgroup.v2.as_ref().unwrap_or_else(|| &cgroup.v1[0].1).path().to_owned();
    std::fs::create_dir_all(dir.join("x/y/z")).unwrap();
    std::fs::create_dir_all(dir.join("x/w")).unwrap();
    let mut child = spawn(&cgroup, "exec sleep 100");
    until("it is there", || cgroup.pids().unwrap() == [child.id()]);
    std::fs::write(dir.join("x/y/z/cgroup.procs"), child.id().to_string()).unwrap();
    assert_eq!(cgroup.pids().unwrap(), [child.id()]);
    cgroup.kill().unwrap();
    child.wait().unwrap();
    cgroup.remove().unwrap();
    assert!(!dir.exists());
}

#[test]
fn root_busy_cgroup_is_not_removed() {
    let scratch = Scratch::new();
    let cgroup = scratch.hierarchy.create("a", &Limits::default()).unwrap();
    let mut child = spawn(&cgroup, "exec sleep 100");
    let error = cgroup.remove_within(Duration::from_millis(30)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(matches!(error, CgroupError::InUse { pids, .. } if pids == [child.id()]));
    cgroup.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn root_cpu_set_keeps_to_its_cpus() {
    let scratch = Scratch::new();
    let one = Limits { cpuset_cpus: Some("0".into()), ..Limits::default() };
    let cgroup = scratch.hierarchy.create("a", &one).unwrap();
    let mut child = spawn(&cgroup, "grep -q 'Cpus_allowed_list:.0$' /proc/self/status");
    assert!(child.wait().unwrap().success());
    cgroup.set(&Limits { cpuset_cpus: Some("0".into()), ..Limits::default() }).unwrap();
}

#[test]
fn root_devices_outside_the_list_cannot_be_used() {
    let scratch = Scratch::new();
    let mut cgroup = scratch.hierarchy.create("a", &Limits::default()).unwrap();
    let temp = std::env::temp_dir().join(format!("dormouse-test-{}-kmsg", std::process::id()));
    let script = format!(
        "echo >/dev/null && head -c 1 /dev/urandom >/dev/null && mknod {0} c 1 11 || exit 3; \
         head -c 0 {0}; s=$?; rm {0}; exit $s",
        temp.display()
    );
    assert_eq!(spawn(&cgroup, &script).wait().unwrap().code(), Some(1), "/dev/kmsg was opened");
    let kmsg = DeviceRule {
        kind: DeviceKind::Char,
        major: Some(1),
        minor: Some(11),
        access: DeviceAccess::READ,
    };
    cgroup.allow_devices(&[kmsg]).unwrap();
    assert_eq!(spawn(&cgroup, &script).wait().unwrap().code(), Some(0), "it was allowed");
}

/// The v2 way, on whatever host this is: the process is in the v2 cgroup alone.
#[test]
fn root_devices_outside_the_program_cannot_be_used() {
    let scratch = Scratch::new();
    let cgroup = scratch.hierarchy.create("a", &Limits::default()).unwrap();
    let Some(v2) = &cgroup.v2 else { return };
    let parent = &scratch.hierarchy.0.v2.as_ref().unwrap().parent;
    device::guard_parent(parent).unwrap();
    assert!(
        crate::bpf::is_attached(parent, crate::bpf::AttachType::Device, "dormouse_dev_1").unwrap()
    );
    device::guard_parent(parent).unwrap();
    let temp = std::env::temp_dir().join(format!("dormouse-test-{}-v2", std::process::id()));
    let run = |access: &str| {
        let script = format!(
            "echo 0 >{}/cgroup.procs && echo >/dev/null && head -c 1 /dev/urandom >/dev/null && \
             mknod {node} c 1 11 || exit 3; {access} {node}; s=$?; rm {node}; exit $s",
            v2.path().display(),
            node = temp.display(),
        );
        Command::new("/bin/sh").args(["-c", &script]).status().unwrap().code()
    };
    assert_eq!(run("head -c 0"), Some(1), "/dev/kmsg was opened");
    let kmsg = DeviceRule {
        kind: DeviceKind::Char,
        major: Some(1),
        minor: Some(11),
        access: DeviceAccess::READ,
    };
    device::attach_program(v2, device::ORDINARY.iter().copied().chain([kmsg])).unwrap();
    assert_eq!(run("head -c 0"), Some(0), "it was allowed");
    assert_ne!(run("printf x | tee"), Some(0), "only reading was allowed");
}

#[test]
fn root_delegated_tree_belongs_to_the_container() {
    use std::os::unix::fs::MetadataExt;
    let scratch = Scratch::new();
    let cgroup = scratch.hierarchy.create("a", &Limits::default()).unwrap();
    let Some(v2) = &cgroup.v2 else {
        assert!(cgroup.delegate(1, 2).is_err());
        return;
    };
    cgroup.delegate(1_000_000, 1_000_001).unwrap();
    let owner = |file: &str| {
        let meta = std::fs::metadata(v2.path().join(file)).unwrap();
        (meta.uid(), meta.gid())
    };
    for file in ["", "cgroup.procs", "cgroup.threads", "cgroup.subtree_control"] {
        assert_eq!(owner(file), (1_000_000, 1_000_001), "{file}");
    }
    for file in ["cgroup.freeze", "cgroup.max.descendants"] {
        assert_eq!(owner(file), (0, 0), "{file}");
    }
}

#[test]
fn root_removed_parent_is_created_again() {
    let scratch = Scratch::new();
    scratch.hierarchy.remove_parent().unwrap();
    let cgroup = scratch.hierarchy.create("a", &Limits::default()).unwrap();
    assert_eq!(scratch.hierarchy.names().unwrap(), [""; 0], "the old descriptor sees nothing");
    cgroup.remove().unwrap();
    let again = Hierarchy::open(scratch.hierarchy.parent()).unwrap();
    assert!(again.names().unwrap().is_empty());
}

#[test]
fn root_keeper_cgroup_is_beside_the_containers() {
    let scratch = Scratch::new();
    let dirs = scratch.hierarchy.keeper_dirs().unwrap();
    assert_eq!(dirs, scratch.hierarchy.keeper_dirs().unwrap());
    let v2 = usize::from(scratch.hierarchy.layout() != Layout::Legacy);
    assert_eq!(dirs.len(), scratch.hierarchy.0.v1.len() + v2);
    let script: String =
        dirs.iter().map(|d| format!("echo 0 >{}/cgroup.procs;", d.display())).collect();
    let mut keeper =
        Command::new("/bin/sh").args(["-ec", &format!("{script} exec sleep 100")]).spawn().unwrap();
    let procs = || dirs.iter().map(|d| std::fs::read_to_string(d.join("cgroup.procs")).unwrap());
    until("it entered all", || procs().all(|text| text.trim() == keeper.id().to_string()));
    assert!(scratch.hierarchy.names().unwrap().is_empty());
    assert_eq!(scratch.hierarchy.remove_parent().unwrap_err().kind(), ErrorKind::Busy);
    keeper.kill().unwrap();
    keeper.wait().unwrap();
}

#[test]
fn root_parent_memory_is_raised_but_not_lowered_without_reclaim() {
    let scratch = Scratch::new();
    let hierarchy = &scratch.hierarchy;
    let _a = hierarchy.create("a", &Limits::default()).unwrap();
    let max = || {
        let parents = hierarchy.0.v1.iter().filter_map(|v1| v1.parent.get());
        let all = parents.chain(hierarchy.0.v2.iter().map(|v2| &v2.parent));
        let read = |dir: &Dir| {
            let files = ["memory.limit_in_bytes", "memory.max"];
            files.iter().find_map(|file| dir.read_number(file).ok()).map(Option::unwrap_or_default)
        };
        let max = all.filter_map(read).next().expect("a limit of memory");
        if max >= limit::V1_UNLIMITED_BYTES { 0 } else { max >> 20 }
    };
    let mb = |mb: Option<u64>| ParentMemory {
        max_bytes: mb.map(|mb| mb << 20),
        ..ParentMemory::default()
    };
    hierarchy.raise_parent_memory(mb(Some(200))).unwrap();
    assert_eq!(max(), 0, "a limit where there was none is a lower one");
    hierarchy.set_parent_memory(mb(Some(200))).unwrap();
    hierarchy.raise_parent_memory(mb(Some(100))).unwrap();
    assert_eq!(max(), 200);
    hierarchy.raise_parent_memory(mb(Some(300))).unwrap();
    assert_eq!(max(), 300);
    hierarchy.set_parent_memory(mb(Some(100))).unwrap();
    assert_eq!(max(), 100);
    hierarchy.raise_parent_memory(mb(None)).unwrap();
    assert_eq!(max(), 0);
}

#[test]
fn root_limit_of_a_removed_cgroup_reaches_no_later_one() {
    let scratch = Scratch::new();
    let hierarchy = &scratch.hierarchy;
    let cgroup = hierarchy.create("a", &Limits::default()).unwrap();
    let Some(share) = hierarchy.memory_share("a").unwrap() else {
        assert!(hierarchy.keeps_memory(), "only v2 has none");
        return;
    };
    assert_eq!(share.set(64 << 20).unwrap(), LimitSet::Set);
    cgroup.remove().unwrap();
    let _again = hierarchy.create("a", &Limits::default()).unwrap();
    assert_eq!(share.set(32 << 20).unwrap(), LimitSet::Removed);
    assert_eq!((share.used_bytes().unwrap(), share.limit_bytes().unwrap()), (None, None));
    let again = hierarchy.memory_share("a").unwrap().expect("a limit");
    assert_eq!(again.limit_bytes().unwrap(), Some(u64::MAX));
}

/// Held by tests that move their process, of which all threads share the cgroup.
static MOVES: std::sync::Mutex<()> = std::sync::Mutex::new(());

/// Bytes of a file that a test has cached.
const CACHED_BYTES: usize = 32 << 20;

/// Reads a file in a process of a cgroup.
fn read_in(cgroup: &Cgroup, file: &Path) {
    let mut child = spawn(cgroup, &format!("exec cat {} >/dev/null", file.display()));
    assert!(child.wait().unwrap().success());
}

#[test]
fn root_vm_file_written_for_images_is_charged_to_no_reader() {
    let _moves = MOVES.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let scratch = Scratch::new();
    let hierarchy = &scratch.hierarchy;
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let write = |name: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, vec![1; CACHED_BYTES]).unwrap();
        path
    };
    let place = || std::fs::read_to_string("/proc/self/cgroup").unwrap();
    assert_eq!(hierarchy.images_memory().unwrap(), None, "there is no cgroup yet");
    let before = place();
    let charging = hierarchy.charge_images().unwrap().expect("a memory controller");
    assert!(place().lines().any(|line| line.ends_with("/images")), "{}", place());
    let file = write("image");
    drop(charging);
    assert_eq!(place(), before, "moved back");
    let images = hierarchy.images_memory().unwrap().expect("a cgroup of images");
    assert!(images.file_bytes >= CACHED_BYTES as u64, "{images:?}");
    for name in ["a", "b"] {
        let cgroup = hierarchy.create(name, &Limits::default()).unwrap();
        read_in(&cgroup, &file);
        let used = cgroup.memory_bytes().unwrap();
        assert!(used < CACHED_BYTES as u64 / 4, "{name}: {used}");
    }
    assert_eq!(hierarchy.names().unwrap(), ["a", "b"], "images are no container");
}

#[test]
fn root_parent_stays_while_images_are_written() {
    let _moves = MOVES.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let scratch = Scratch::new();
    let hierarchy = &scratch.hierarchy;
    let charging = hierarchy.charge_images().unwrap().expect("a memory controller");
    // A process that removes the parent leaves its cgroups. Another one stays.
    let mut writer = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    drop(charging);
    hierarchy.remove_parent().unwrap();
    assert!(hierarchy.images_memory().unwrap().is_some(), "in use");
    writer.kill().unwrap();
    writer.wait().unwrap();
    hierarchy.remove_parent().unwrap();
    assert!(scratch.directories().is_empty(), "{:?}", scratch.directories());
}

#[test]
fn root_vm_images_are_limited_or_protected_beside_guarantees() {
    let _moves = MOVES.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let scratch = Scratch::new();
    let hierarchy = &scratch.hierarchy;
    let memory = |max_mb: Option<u64>| ParentMemory {
        max_bytes: max_mb.map(|mb| mb << 20),
        low_bytes: 1 << 20,
        images_bytes: 200 << 20,
        ..ParentMemory::default()
    };
    hierarchy.set_parent_memory(memory(Some(1000))).unwrap();
    drop(hierarchy.charge_images().unwrap().expect("a memory controller"));
    hierarchy.set_parent_memory(memory(Some(1000))).unwrap();
    if hierarchy.keeps_memory() {
        let v2 = hierarchy.0.v2.as_ref().unwrap();
        let images = v2.parent.child(IMAGES).unwrap().unwrap();
        assert_eq!(images.read_number("memory.low").unwrap(), Some(200 << 20));
        assert_eq!(v2.parent.read_number("memory.low").unwrap(), Some(201 << 20));
        assert_eq!(images.read_number("memory.max").unwrap(), None);
        return;
    }
    let limit = || hierarchy.images_share().unwrap().expect("v1").limit_bytes().unwrap();
    assert_eq!(limit(), Some(200 << 20));
    hierarchy.raise_parent_memory(memory(None)).unwrap();
    assert_eq!(limit(), Some(u64::MAX), "nothing is guaranteed any more");
    let small = ParentMemory { images_bytes: 100 << 20, ..memory(Some(1000)) };
    hierarchy.raise_parent_memory(small).unwrap();
    assert_eq!(limit(), Some(u64::MAX), "a lower limit waits for reclaim");
    hierarchy.set_parent_memory(small).unwrap();
    assert_eq!(limit(), Some(100 << 20));
}
