//! The features of this kernel, determined by trying them.
//!
//! A version number proves nothing: features are configured out, refused by lockdown or by a
//! seccomp filter around us, or carried back into older kernels. So each [`Feature`] has a probe
//! that uses it once, on scratch things (a child process, a thread with a namespace of its own, a
//! scratch directory, a scratch cgroup), and leaves nothing behind.
//!
//! The table in `docs/kernel-features.md` is [`markdown`]; a test holds the two together.

mod btf;
mod host;
mod mount;
mod net;
mod scratch;
mod task;

use std::time::{Duration, Instant};

pub use scratch::ProbePlaces;

use scratch::{Probed, Reason, Scratch};

/// A feature of the kernel or of the host.
#[derive(Debug)]
pub struct Feature {
    /// The name.
    pub name: &'static str,
    /// The first version of Linux that has it; `-` where the version does not decide.
    pub since: &'static str,
    /// The use of the feature.
    pub used_for: &'static str,
    /// The effect of its absence.
    pub without: &'static str,
    /// The cost of its absence.
    pub cost: &'static str,
    /// No container can run without it.
    pub required: bool,
    probe: fn(&Scratch) -> Probed,
}

/// The result of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Available. The text adds an observation, and may be empty.
    Have(String),
    /// Not available, with the reason.
    Lack(String),
}

/// One line of [`probe_all`].
#[derive(Debug, Clone)]
pub struct Finding {
    /// The feature.
    pub feature: &'static Feature,
    /// The result.
    pub outcome: Outcome,
    /// Duration of the probe.
    pub took: Duration,
}

impl Finding {
    /// Returns whether it is available.
    pub fn have(&self) -> bool {
        matches!(self.outcome, Outcome::Have(_))
    }

    /// Returns whether it is missing and no container can run without it.
    pub fn prevents_containers(&self) -> bool {
        self.feature.required && !self.have()
    }
}

/// Uses every feature once, in the order of the table. Takes well under 2 s, and needs root.
pub fn probe_all(places: &ProbePlaces) -> Vec<Finding> {
    let scratch = Scratch::new(places);
    let probe = |feature: &'static Feature| {
        let begin = Instant::now();
        let outcome = match (feature.probe)(&scratch) {
            Ok(seen) => Outcome::Have(seen),
            Err(Reason(why)) => Outcome::Lack(why),
        };
        Finding { feature, outcome, took: begin.elapsed() }
    };
    FEATURES.iter().map(probe).collect()
}

/// Returns whether containers can run: nothing that is required is missing.
pub fn can_run_containers(findings: &[Finding]) -> bool {
    !findings.iter().any(Finding::prevents_containers)
}

/// All features, in the order of the table.
pub fn features() -> &'static [Feature] {
    FEATURES
}

/// The table of `docs/kernel-features.md`.
pub fn markdown() -> String {
    let mut text = String::from(
        "| feature | since | used for | fallback | what the fallback costs |\n|---|---|---|---|---|\n",
    );
    for f in FEATURES {
        let name = if f.required { format!("**{}**", f.name) } else { f.name.to_owned() };
        text +=
            &format!("| {name} | {} | {} | {} | {} |\n", f.since, f.used_for, f.without, f.cost);
    }
    text
}

const fn feature(
    name: &'static str,
    since: &'static str,
    used_for: &'static str,
    (without, cost): (&'static str, &'static str),
    probe: fn(&Scratch) -> Probed,
) -> Feature {
    Feature { name, since, used_for, without, cost, required: false, probe }
}

const fn required(
    name: &'static str,
    since: &'static str,
    used_for: &'static str,
    probe: fn(&Scratch) -> Probed,
) -> Feature {
    let without = "none: no container can run";
    Feature { name, since, used_for, without, cost: "-", required: true, probe }
}

/// Informational: nothing is missing, a figure is worth knowing.
const INFORMATION: (&str, &str) = ("-", "-");

static FEATURES: &[Feature] = &[
    required("clone3 with a pidfd", "5.3", "every process is born with a handle", task::clone3),
    required("pidfd_open, waitid on a pidfd", "5.4", "finding and awaiting processes", task::pidfd),
    required("user namespaces", "3.8", "root inside has no rights outside", task::user_namespace),
    required("mount namespaces", "2.4.19", "a file tree of its own", task::mount_namespace),
    required("pid namespaces", "3.8", "processes of its own", task::pid_namespace),
    required("ipc namespaces", "3.0", "IPC objects of its own", task::ipc_namespace),
    required("uts namespaces", "3.0", "a host name of its own", task::uts_namespace),
    required("network namespaces", "3.0", "trust domains; `--net none`", task::net_namespace),
    required("cgroup namespaces", "4.6", "a view of its own cgroup only", task::cgroup_namespace),
    feature(
        "time namespaces",
        "5.6",
        "clocks of its own",
        ("the container shows the host's uptime", "clocks jump when a container moves"),
        task::time_namespace,
    ),
    required("seccomp filter", "3.17", "the allow-list of system calls", task::seccomp),
    required("close_range", "5.9", "no descriptor leaks into a container", task::close_range),
    required("openat2(RESOLVE_IN_ROOT)", "5.6", "paths in a container's tree", mount::openat2),
    feature(
        "setns with a pidfd",
        "5.8",
        "`exec` joins all namespaces at once",
        ("one at a time, by /proc/PID/ns", "a few system calls for each `exec`"),
        task::setns_pidfd,
    ),
    feature(
        "pidfd_getfd",
        "5.6",
        "custody of sockets and pipes",
        ("none: no sleep", "open connections are lost over a checkpoint"),
        task::pidfd_getfd,
    ),
    feature(
        "process_madvise",
        "5.10",
        "pushing out the memory of drowsy containers",
        ("only page cache is taken back", "drowsy containers keep their memory"),
        task::page_out,
    ),
    feature(
        "PAGEMAP_SCAN",
        "6.7",
        "finding the pages that a checkpoint must hold",
        ("none: no checkpoint", "containers cannot be saved"),
        task::pagemap_scan,
    ),
    feature(
        "/dev/userfaultfd",
        "6.1",
        "waking and restoring: large memory comes when it is touched",
        ("all of it is read before anything runs", "0.6 s and more for each GB"),
        task::userfault,
    ),
    feature(
        "noting writes without waiting (UFFD_FEATURE_WP_ASYNC)",
        "6.7",
        "copying large memory before its processes are stopped",
        ("all of it is copied while they stand still", "a pause of 0.5 s and more for each GB"),
        task::note_writes,
    ),
    feature(
        "tracing past a filter",
        "4.3",
        "calls of a checkpoint or a restore that a container must not make itself",
        ("none: no checkpoint", "containers cannot be saved"),
        task::trace_past_a_filter,
    ),
    feature(
        "kcmp",
        "3.5",
        "detecting descriptors of a checkpoint that share one open file",
        ("none: no checkpoint", "containers cannot be saved"),
        task::kcmp,
    ),
    feature(
        "PIDFD_GET_USER_NAMESPACE",
        "6.11",
        "the user namespace of a newborn",
        (
            "/proc/PID/ns/user, then a look whether it still lives",
            "two system calls for each start",
        ),
        task::pidfd_namespace,
    ),
    feature(
        "listmount",
        "6.11",
        "the check that files of a restore are in its mounts",
        ("/proc/PID/mountinfo", "0.1 ms for each restore"),
        task::mounts,
    ),
    feature(
        "listmount of the own namespace",
        "6.8",
        "the places of cgroup v1, kept for the next command",
        ("/proc/self/mountinfo", "0.1 ms for each start on a host with cgroup v1"),
        task::own_mounts,
    ),
    feature(
        "PIDFD_GET_INFO with the exit status",
        "6.15",
        "exit codes for processes that are not the parent",
        ("only the parent knows", "after the loss of the keeper: \"exit unknown\""),
        task::pidfd_exit,
    ),
    feature(
        "session keyrings",
        "2.6.10",
        "keys of the starting user stay out of reach",
        ("nothing: a kernel without keys has none to protect", "-"),
        task::keyring,
    ),
    required("new mount interface", "5.2", "mounts by descriptor, detached", mount::new_interface),
    feature(
        "open_tree_attr",
        "6.15",
        "copies of mounts with attributes in one call",
        ("open_tree and mount_setattr", "a call for each mount of a start, 8 to 16"),
        mount::open_tree_attr,
    ),
    required("idmapped mounts of the store", "5.12", "image layers with its owners", mount::idmap),
    required("overlay", "6.5", "its root file system", mount::overlay),
    required("overlay on idmapped layers", "5.19", "images shared by all", mount::overlay_idmapped),
    required("overlay data-only layers", "6.5", "files shared by images", mount::data_only),
    feature(
        "overlay layers by descriptor",
        "6.13",
        "no paths in the making of a root",
        ("by path, in a mount namespace made for it", "0.13 ms for each start"),
        mount::overlay_descriptor,
    ),
    feature(
        "overlay layers that are detached mounts",
        "6.15",
        "idmapped layers are attached nowhere",
        ("by path, in a mount namespace made for it", "0.13 ms for each start"),
        mount::overlay_detached,
    ),
    feature(
        "erofs from a file",
        "6.12",
        "metadata images without a block device",
        ("a loop device", "one for each image in use, 1 ms to attach"),
        mount::erofs_file,
    ),
    feature(
        "loop devices",
        "2.6",
        "erofs where it takes no file; `--disk`",
        (
            "directories of empty files instead of metadata images",
            "an inode for each file of an image",
        ),
        mount::loop_device,
    ),
    required("mqueue", "2.6.6", "POSIX message queues of its own", mount::mqueue),
    required("devpts", "2.6.29", "terminals of its own", mount::devpts),
    required("cgroups", "2.6.24", "limits, freezing, killing, counting", host::cgroups),
    feature(
        "cgroup v2 hierarchy",
        "4.5",
        "address networking; systemd inside; freezing that can be traced",
        ("v1 freezer; no address networking", "`--net host` or `none` only"),
        host::v2,
    ),
    feature(
        "CLONE_INTO_CGROUP",
        "5.7",
        "born in its v2 cgroup",
        ("none where there is v2", "a process moved by its pid waits 12 ms"),
        host::clone_into,
    ),
    feature(
        "cgroup.freeze",
        "5.2",
        "`pause`, checkpoints",
        ("the v1 freezer", "frozen processes can be neither traced nor killed"),
        host::freeze,
    ),
    feature(
        "permission events of a file system",
        "4.20",
        "views that the daemon writes when they are opened",
        (
            "views as they were at the start or the last update",
            "`free` inside shows the limit, and no use",
        ),
        mount::open_events,
    ),
    feature(
        "cgroup.kill",
        "5.14",
        "killing all at once, also those that fork",
        ("frozen, signalled one by one, thawed", "time in proportion to the processes"),
        host::kill,
    ),
    feature(
        "cpu controller",
        "2.6.24",
        "`--cpus`, `--cpu-weight`, `--cpu-reserve`",
        NO_LIMIT,
        host::cpu,
    ),
    feature(
        "memory controller",
        "2.6.25",
        "`--memory`, `--memory-min`, `--memory-low`, `--memory-high`",
        NO_LIMIT,
        host::memory,
    ),
    feature(
        "counting of swap",
        "2.6.34",
        "`--memory-swap`",
        ("swap cannot be limited", "a container can fill the host's swap"),
        host::swap,
    ),
    feature(
        "pressure stall information",
        "4.20",
        "`--evict`: containers give memory while tasks wait for it; connections in service of servers with many \
         processes count",
        (
            "free memory alone counts; pending connections alone",
            "page cache that is read again and again is found late",
        ),
        host::pressure,
    ),
    feature("pids controller", "4.3", "`--pids`", NO_LIMIT, host::pids),
    feature("io controller", "2.6.33", "bytes read and written", NO_COUNT, host::io),
    feature("io weight", "5.4", "`--io-weight`", NO_LIMIT, host::io_weight),
    feature(
        "io rates",
        "2.6.37",
        "`--io-read-bps`, `--io-write-bps`, `--io-read-iops`, `--io-write-iops`",
        NO_LIMIT,
        host::disk_rates,
    ),
    feature(
        "io rates of a disk",
        "2.6.37",
        "`--io-write-bps` and `--io-write-iops` of a container with `--disk`, through the page cache (cgroup v1: rates \
         of its loop device in the root cgroup; the bound of its dirty pages since 6.2)",
        ("direct and synchronous writes alone", "writes through the page cache have no rate"),
        host::disk_write_rates,
    ),
    feature("cpuset controller", "2.6.24", "`--cpuset-cpus`", NO_LIMIT, host::cpuset),
    feature(
        "device list",
        "4.15",
        "which devices may be used (v1 controller, or BPF on v2)",
        ("none", "one lock less behind the missing device nodes"),
        host::devices,
    ),
    feature("cgroup BPF: bind", "4.17", "any address is its own", NO_ADDRESS, host::bpf_bind),
    feature("cgroup BPF: connect", "4.17", "its own source address", NO_ADDRESS, host::bpf_connect),
    feature("cgroup BPF: sendmsg", "4.18", "the same for UDP", NO_ADDRESS, host::bpf_sendmsg),
    feature("cgroup BPF: sock_create", "4.10", "no raw sockets", NO_ADDRESS, host::bpf_sock),
    feature("cgroup BPF: skb", "4.10", "nothing foreign gets in", NO_ADDRESS, host::bpf_skb),
    feature(
        "cgroup BPF: getsockname",
        "5.8",
        "its own name for a socket",
        NO_ADDRESS,
        host::bpf_name,
    ),
    feature("BPF: sock_ops", "4.13", "listen without bind", NO_ADDRESS, host::bpf_sockops),
    feature(
        "cgroup BPF: sock_release",
        "5.9",
        "`--sockets` (with Linux 5.18)",
        NO_LIMIT,
        host::bpf_sock_release,
    ),
    feature(
        "cgroup BPF: connect_unix",
        "6.7",
        "abstract unix sockets stay inside",
        ("none", "containers of a domain see each other's abstract sockets"),
        host::bpf_unix,
    ),
    feature(
        "BTF",
        "4.18",
        "BPF programs that fit every kernel",
        ("programs without it", "no accounts"),
        btf::present,
    ),
    feature(
        "BPF: tp_btf",
        "5.5",
        "accounts",
        ("none", "no accounts of shared services"),
        btf::tp_btf,
    ),
    feature(
        "BPF: sock_recv_length",
        "6.3",
        "gates: the work of a shared service is charged to its client",
        ("none", "`gate load` fails; work is charged to the container that does it"),
        btf::receive,
    ),
    feature(
        "cgroup BPF: task storage",
        "6.16",
        "gates: a program of a shared container says for which client it works",
        ("none", "the call fails with ENOPROTOOPT; the label is that of the last passage"),
        host::bpf_task_storage,
    ),
    feature(
        "BPF: iterator over a task",
        "6.1",
        "checkpoints: how long a poll, futex, nanosleep, epoll_wait or sigtimedwait that is interrupted has to wait; \
         since 6.9 the data in un-accepted unix connections; the unfinished requests of asynchronous I/O (io_setup)",
        (
            "the whole time again; waiting a second until it is",
            "a wait with a limit takes longer, by what it had waited; a container with such a connection is not \
             checkpointed, nor one with asynchronous I/O",
        ),
        btf::task_iterator,
    ),
    feature(
        "BPF: bpf_sk_assign_tcp_reqsk",
        "6.9",
        "un-accepted connections are restored from a checkpoint, also those without data at a listener with \
         TCP_DEFER_ACCEPT (an iterator over TCP sockets, 5.9)",
        (
            "waiting a second until they are",
            "a container with such connections is not checkpointed; it sleeps",
        ),
        btf::request_socket,
    ),
    feature(
        "BPF: LSM",
        "5.7",
        "the barrier: a second lock by container",
        ("namespaces alone", "one lock instead of two"),
        btf::lsm,
    ),
    feature(
        "BPF: fentry",
        "5.5",
        "gates `pipe` and `semaphore`",
        ("none", "`gate load` without names leaves them out"),
        btf::fentry,
    ),
    feature(
        "sched_ext",
        "6.19",
        "CPU contracts by a scheduler of our own (`cpu-scheduler = \"sched_ext\"`)",
        (
            "the kernel's scheduler, by weights that the daemon governs",
            "a reservation that is used at times gets 0.87 to 0.96 of it, and not 0.98 to 0.99",
        ),
        btf::scheduler,
    ),
    feature(
        "BPF: bpf_probe_write_user at the return of sysinfo(2)",
        "5.5",
        "sysinfo(2) in containers: memory, load and tasks are the container's",
        ("views of files alone", "busybox's free and uptime show memory and load of the host"),
        btf::sysinfo,
    ),
    feature(
        "veth pairs",
        "2.6.24",
        "the uplink of a trust domain; `--net private`",
        ("none: no address networking", "`--net host` or `none` only"),
        net::veth,
    ),
    feature(
        "HTB traffic classes",
        "2.6.20",
        "`--net-rate`, `--net-ceil`, `--net-weight`",
        NO_LIMIT,
        net::classes,
    ),
    feature(
        "AnyIP routes",
        "2.6.37",
        "thousands of addresses in one stack",
        ("none: no address networking", "`--net host` or `none` only"),
        net::any_ip,
    ),
    feature(
        "IPv6 ip_nonlocal_bind",
        "4.3",
        "the same for IPv6",
        ("IPv4 addresses only", "no IPv6 inside"),
        net::nonlocal_bind,
    ),
    feature(
        "nftables masquerade",
        "3.18",
        "the way out of a trust domain, and published ports",
        ("none", "no way out, no published ports"),
        net::masquerade,
    ),
    feature(
        "NFQUEUE",
        "3.10",
        "connections of shared services are ordered by account",
        ("none", "the kernel's order: a client with many connections makes others wait"),
        net::queue,
    ),
    feature(
        "xt_bpf",
        "4.16",
        "connections of shared services that need not wait are not held",
        ("each is held", "some 20 us for each connection"),
        net::passes,
    ),
    feature(
        "CAP_SYS_RESOURCE",
        "-",
        "resource limits above the caller's own",
        ("such a limit is refused", "`--ulimit` only lowers"),
        task::sys_resource,
    ),
    feature(
        "kernel.pid_max",
        "-",
        "processes of all containers together",
        INFORMATION,
        host::pid_max,
    ),
    feature(
        "user.max_user_namespaces",
        "4.9",
        "containers at the same time",
        INFORMATION,
        host::max_namespaces,
    ),
    feature(
        "fs.inotify.max_user_instances",
        "-",
        "systemd, cron, tail inside",
        INFORMATION,
        host::inotify,
    ),
];

const NO_LIMIT: (&str, &str) = ("the option is refused", "no such limit");
const NO_COUNT: (&str, &str) = ("`stats` shows 0", "no figures");
const NO_ADDRESS: (&str, &str) = ("none: no address networking", "`--net host` or `none` only");

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsFd;

    use super::*;
    use crate::process::CloneFlags;

    #[test]
    fn page_of_features_is_the_table() {
        let page = include_str!("../../../../docs/kernel-features.md");
        let table: Vec<_> = page.lines().filter(|l| l.starts_with('|')).collect();
        let expected = markdown();
        let expected: Vec<_> = expected.lines().collect();
        assert_eq!(table, expected, "\n\n{}", markdown());
    }

    #[test]
    fn root_probes_find_this_kernel_fit_and_leave_nothing() {
        let temp = std::env::temp_dir().join(Scratch::name());
        fs::create_dir_all(&temp).unwrap();
        // A mount namespace of this thread's own: other programs mount meanwhile.
        crate::process::unshare(CloneFlags::NEWNS).unwrap();
        let root = fs::File::open("/").unwrap();
        crate::mount::set_propagation(root.as_fd(), false).unwrap();
        let mounts = || fs::read_to_string("/proc/thread-self/mountinfo").unwrap().lines().count();
        let mounts_before = mounts();
        let begin = Instant::now();
        let findings = probe_all(&ProbePlaces { store: temp.clone() });
        println!("all in {:?}", begin.elapsed());
        for f in &findings {
            println!("{:40} {:?} {:?}", f.feature.name, f.took, f.outcome);
        }
        assert_eq!(findings.len(), FEATURES.len());
        let lacking: Vec<_> = findings.iter().filter(|f| f.prevents_containers()).collect();
        assert!(can_run_containers(&findings), "{lacking:#?}");
        assert_eq!(fs::read_dir(&temp).unwrap().count(), 0);
        fs::remove_dir(&temp).unwrap();
        assert_eq!(mounts(), mounts_before);
        let hierarchy = format!("dormouse-probe-{}-", std::process::id());
        for dir in fs::read_dir("/sys/fs/cgroup").unwrap().map(|e| e.unwrap().path()) {
            let entries = fs::read_dir(&dir).into_iter().flatten();
            let mut left = entries.filter_map(|e| e.unwrap().file_name().into_string().ok());
            assert!(!left.any(|name| name.starts_with(&hierarchy)), "{dir:?}");
        }
    }
}
