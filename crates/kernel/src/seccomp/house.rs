//! The default policy: the system calls that a container's programs may make.
//!
//! In spirit the policy is that of podman and docker: an allow-list of the calls that programs use;
//! calls for privileged use are allowed to containers that have the capability. The differences:
//!
//! - **Nested user namespaces work** for all containers (sandboxes of browsers, `unshare -U`), but
//!   without CAP_SYS_ADMIN no file system may be mounted in them. Root in a nested namespace would
//!   otherwise reach every file system's parser, overlay and fsconfig (CVE-2022-0185,
//!   CVE-2023-0386), and a release_agent (CVE-2022-0492). Two kinds of namespace are refused,
//!   because the kernel does not charge their memory to their creator. A network namespace is about
//!   100 kB outside every limit and brings most of the kernel's network configuration within reach.
//!   An ipc namespace is a superblock, which enlarges every memory cgroup of the host permanently.
//! - For that, flags must be visible, and **clone3 gets ENOSYS**: its flags are behind a pointer.
//!   The C libraries fall back to clone, as they have had to under docker for years.
//! - **io_uring gets ENOSYS**: its operations never pass a filter.
//! - **Keys get ENOSYS**: keyrings belong to user ids, not to containers.
//! - **sched_setattr gets ENOSYS** without CAP_SYS_NICE: since 6.12 a process sets the length of its
//!   own turns with it, up to 100 ms, and makes other containers wait for seconds; the length is
//!   behind a pointer. Policies and priorities are set with sched_setscheduler(2), which has no such
//!   argument.
//! - **Sockets** are UNIX, INET and INET6 of the ordinary protocols, and NETLINK_ROUTE. In a stack
//!   shared with other containers, SOCK_DIAG would list their connections, audit concerns the host,
//!   and SCTP, MPTCP or raw sockets would bypass the hooks that keep a container to its addresses.
//!   In a private network namespace a container may use more.
//! - **Device events** (NETLINK_KOBJECT_UEVENT), which logind listens for, are those of the whole
//!   machine in every network namespace of the initial user namespace, and of its own network
//!   devices in all others (lib/kobject_uevent.c, since 4.18). Therefore they depend on the owner
//!   of the stack.
//! - **syslog, kcmp, cachestat, vmsplice, userfaultfd, migrate_pages** show or affect more than the
//!   container itself. cachestat would show which pages of a shared image other containers have
//!   read.
//!
//! Calls that the kernel would refuse with EPERM without the capability get EPERM. Calls that
//! programs can do without get ENOSYS, and so does every unlisted one: a call newer than this list
//! must look like one of an older kernel, or libraries would not fall back.

use libc::*;

use super::filter::Filter;
use super::policy::{Action, Argument, Condition, Decision, Policy, Rule, Test};
use crate::capability::{Capability, Set};

/// The network stack that a container uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// The host's, or one that belongs to the initial user namespace.
    Host,
    /// A stack shared with other containers, which belongs to none of them.
    Shared,
    /// A network namespace of its own, which belongs to its user namespace.
    Own,
}

/// Allowed to all containers.
#[rustfmt::skip]
const ALLOWED: &[c_long] = &[
    SYS_accept, SYS_accept4, SYS_access, SYS_adjtimex, SYS_alarm, SYS_arch_prctl, SYS_bind,
    SYS_brk, SYS_capget, SYS_capset, SYS_chdir, SYS_chmod, SYS_chown, SYS_clock_adjtime,
    SYS_clock_getres, SYS_clock_gettime, SYS_clock_nanosleep, SYS_close, SYS_close_range,
    SYS_connect, SYS_copy_file_range, SYS_creat, SYS_dup, SYS_dup2, SYS_dup3, SYS_epoll_create,
    SYS_epoll_create1, SYS_epoll_ctl, SYS_epoll_pwait, SYS_epoll_pwait2, SYS_epoll_wait,
    SYS_eventfd, SYS_eventfd2, SYS_execve, SYS_execveat, SYS_exit, SYS_exit_group,
    SYS_faccessat, SYS_faccessat2, SYS_fadvise64, SYS_fallocate, SYS_fanotify_mark, SYS_fchdir,
    SYS_fchmod, SYS_fchmodat, SYS_fchmodat2, SYS_fchown, SYS_fchownat, SYS_fcntl, SYS_fdatasync,
    SYS_fgetxattr, SYS_flistxattr, SYS_flock, SYS_fork, SYS_fremovexattr, SYS_fsetxattr,
    SYS_fstat, SYS_fstatfs, SYS_fsync, SYS_ftruncate, SYS_futex, SYS_futex_waitv, SYS_futimesat,
    SYS_get_mempolicy, SYS_get_robust_list, SYS_getcpu, SYS_getcwd, SYS_getdents,
    SYS_getdents64, SYS_getegid, SYS_geteuid, SYS_getgid, SYS_getgroups, SYS_getitimer,
    SYS_getpeername, SYS_getpgid, SYS_getpgrp, SYS_getpid, SYS_getppid, SYS_getpriority,
    SYS_getrandom, SYS_getresgid, SYS_getresuid, SYS_getrlimit, SYS_getrusage, SYS_getsid,
    SYS_getsockname, SYS_getsockopt, SYS_gettid, SYS_gettimeofday, SYS_getuid, SYS_getxattr,
    SYS_inotify_add_watch, SYS_inotify_init, SYS_inotify_init1, SYS_inotify_rm_watch,
    SYS_io_cancel, SYS_io_destroy, SYS_io_getevents, SYS_io_setup, SYS_io_submit,
    SYS_ioprio_get, SYS_ioprio_set, SYS_kill, SYS_landlock_add_rule,
    SYS_landlock_create_ruleset, SYS_landlock_restrict_self, SYS_lchown, SYS_lgetxattr,
    SYS_link, SYS_linkat, SYS_listen, SYS_listxattr, SYS_llistxattr, SYS_lremovexattr,
    SYS_lseek, SYS_lsetxattr, SYS_lstat, SYS_madvise, SYS_mbind, SYS_membarrier,
    SYS_memfd_create, SYS_memfd_secret, SYS_mincore, SYS_mkdir, SYS_mkdirat, SYS_mknod,
    SYS_mknodat, SYS_mlock, SYS_mlock2, SYS_mlockall, SYS_mmap, SYS_modify_ldt, SYS_mprotect,
    SYS_mq_getsetattr, SYS_mq_notify, SYS_mq_open, SYS_mq_timedreceive, SYS_mq_timedsend,
    SYS_mq_unlink, SYS_mremap, SYS_mseal, SYS_msgctl, SYS_msgget, SYS_msgrcv, SYS_msgsnd,
    SYS_msync, SYS_munlock, SYS_munlockall, SYS_munmap, SYS_name_to_handle_at, SYS_nanosleep,
    SYS_newfstatat, SYS_open, SYS_openat, SYS_openat2, SYS_pause, SYS_pidfd_getfd,
    SYS_pidfd_open, SYS_pidfd_send_signal, SYS_pipe, SYS_pipe2, SYS_pkey_alloc, SYS_pkey_free,
    SYS_pkey_mprotect, SYS_poll, SYS_ppoll, SYS_prctl, SYS_pread64, SYS_preadv, SYS_preadv2,
    SYS_prlimit64, SYS_process_madvise, SYS_process_mrelease, SYS_process_vm_readv,
    SYS_process_vm_writev, SYS_pselect6, SYS_ptrace, SYS_pwrite64, SYS_pwritev, SYS_pwritev2,
    SYS_read, SYS_readahead, SYS_readlink, SYS_readlinkat, SYS_readv, SYS_reboot, SYS_recvfrom,
    SYS_recvmmsg, SYS_recvmsg, SYS_remap_file_pages, SYS_removexattr, SYS_rename, SYS_renameat,
    SYS_renameat2, SYS_restart_syscall, SYS_rmdir, SYS_rseq, SYS_rt_sigaction,
    SYS_rt_sigpending, SYS_rt_sigprocmask, SYS_rt_sigqueueinfo, SYS_rt_sigreturn,
    SYS_rt_sigsuspend, SYS_rt_sigtimedwait, SYS_rt_tgsigqueueinfo, SYS_sched_get_priority_max,
    SYS_sched_get_priority_min, SYS_sched_getaffinity, SYS_sched_getattr, SYS_sched_getparam,
    SYS_sched_getscheduler, SYS_sched_rr_get_interval, SYS_sched_setaffinity,
    SYS_sched_setparam, SYS_sched_setscheduler, SYS_sched_yield, SYS_seccomp, SYS_select,
    SYS_semctl, SYS_semget, SYS_semop, SYS_semtimedop, SYS_sendfile, SYS_sendmmsg, SYS_sendmsg,
    SYS_sendto, SYS_set_mempolicy, SYS_set_mempolicy_home_node, SYS_set_robust_list,
    SYS_set_tid_address, SYS_setfsgid, SYS_setfsuid, SYS_setgid, SYS_setgroups, SYS_setitimer,
    SYS_setpgid, SYS_setpriority, SYS_setregid, SYS_setresgid, SYS_setresuid, SYS_setreuid,
    SYS_setrlimit, SYS_setsid, SYS_setsockopt, SYS_setuid, SYS_setxattr, SYS_shmat, SYS_shmctl,
    SYS_shmdt, SYS_shmget, SYS_shutdown, SYS_sigaltstack, SYS_signalfd, SYS_signalfd4,
    SYS_splice, SYS_stat, SYS_statfs, SYS_statx, SYS_symlink, SYS_symlinkat, SYS_sync,
    SYS_sync_file_range, SYS_syncfs, SYS_sysinfo, SYS_tee, SYS_tgkill, SYS_time,
    SYS_timer_create, SYS_timer_delete, SYS_timer_getoverrun, SYS_timer_gettime,
    SYS_timer_settime, SYS_timerfd_create, SYS_timerfd_gettime, SYS_timerfd_settime, SYS_times,
    SYS_tkill, SYS_truncate, SYS_umask, SYS_uname, SYS_unlink, SYS_unlinkat, SYS_utime,
    SYS_utimensat, SYS_utimes, SYS_vfork, SYS_wait4, SYS_waitid, SYS_write, SYS_writev,
];

/// Allowed to all containers, and newer than the C library's list of names (or missing in it).
#[rustfmt::skip]
const ALLOWED_NEWER: &[c_long] = &[
    333, // io_pgetevents
    335, // uretprobe, KERNEL(6.11): the kernel's own trampoline calls it where the host traces
    336, // uprobe, KERNEL(6.18): likewise
    453, // map_shadow_stack, KERNEL(6.6)
    454, 455, 456, // futex_wake, futex_wait, futex_requeue, KERNEL(6.7)
    457, 458, // statmount, listmount, KERNEL(6.8): of the own mount namespace
    459, 461, // lsm_get_self_attr, lsm_list_modules, KERNEL(6.8)
    463, 464, 465, 466, // setxattrat, getxattrat, listxattrat, removexattrat, KERNEL(6.13)
    468, 469, // file_getattr, file_setattr, KERNEL(6.17)
];

const OPEN_TREE_ATTR: c_long = 467; // KERNEL(6.15)

/// Allowed to containers that have one of the capabilities, EPERM to others.
const PRIVILEGED: &[(&[Capability], &[c_long])] = &[
    (
        &[Capability::SysAdmin],
        &[
            SYS_mount,
            SYS_umount2,
            SYS_pivot_root,
            SYS_open_tree,
            SYS_move_mount,
            SYS_fsopen,
            SYS_fsconfig,
            SYS_fsmount,
            SYS_fspick,
            SYS_mount_setattr,
            OPEN_TREE_ATTR,
            SYS_setns,
            SYS_sethostname,
            SYS_setdomainname,
            SYS_quotactl,
            SYS_quotactl_fd,
            SYS_fanotify_init,
        ],
    ),
    (&[Capability::SysAdmin, Capability::Bpf], &[SYS_bpf]),
    (&[Capability::SysAdmin, Capability::Perfmon], &[SYS_perf_event_open]),
    (&[Capability::SysAdmin, Capability::Syslog], &[SYS_syslog]),
    (&[Capability::SysAdmin, Capability::SysNice], &[SYS_move_pages, SYS_migrate_pages]),
    (&[Capability::SysChroot], &[SYS_chroot]),
    (&[Capability::DacReadSearch], &[SYS_open_by_handle_at]),
    (&[Capability::SysModule], &[SYS_init_module, SYS_finit_module, SYS_delete_module]),
    (&[Capability::SysPacct], &[SYS_acct]),
    (&[Capability::SysPtrace], &[SYS_kcmp]),
    (&[Capability::SysRawio], &[SYS_ioperm, SYS_iopl]),
    (&[Capability::SysTime], &[SYS_settimeofday, SYS_clock_settime]),
    (&[Capability::SysTtyConfig], &[SYS_vhangup]),
];

/// EPERM to all containers.
const FORBIDDEN: &[c_long] =
    &[SYS_kexec_load, SYS_kexec_file_load, SYS_swapon, SYS_swapoff, SYS_userfaultfd, SYS_vmsplice];

// ENOSYS because they are not listed: io_uring_setup, io_uring_enter, io_uring_register, keyctl,
// add_key, request_key, cachestat, lsm_set_self_attr, and all calls that no kernel has any more.

/// Namespaces that need CAP_SYS_ADMIN.
const KEPT_BACK: u64 = (CLONE_NEWNET | CLONE_NEWIPC) as u64;

/// The filter of a container in a shared stack that was granted these capabilities.
pub fn default_filter(granted: Set) -> Filter {
    default_filter_for(granted, Network::Shared)
}

/// The filter of a container that was granted these capabilities.
pub fn default_filter_for(granted: Set, network: Network) -> Filter {
    // Proven by a test for every single capability and all of them, in both networks: the program
    // has some 300 instructions, of 4,096.
    default_policy(granted, network).compile().expect("the policy of the house compiles")
}

/// The same without asynchronous I/O: io_setup(2) gets ENOSYS, as from a kernel without CONFIG_AIO. All contexts of a
/// host share its `fs.aio-max-nr`.
pub fn default_filter_without_aio(granted: Set, network: Network) -> Filter {
    let mut policy = default_policy(granted, network);
    policy.set(SYS_io_setup as u32, Action::Errno(ENOSYS as u16));
    policy.compile().expect("the policy of the house compiles with one number changed")
}

/// The policy of a container that was granted these capabilities.
pub fn default_policy(granted: Set, network: Network) -> Policy {
    let no_such_call = Action::Errno(ENOSYS as u16);
    let not_permitted = Action::Errno(EPERM as u16);
    let mut policy = Policy::new(no_such_call);
    for &number in ALLOWED.iter().chain(ALLOWED_NEWER) {
        policy.set(number as u32, Action::Allow);
    }
    for &number in FORBIDDEN {
        policy.set(number as u32, not_permitted);
    }
    for (capabilities, numbers) in PRIVILEGED {
        let may = capabilities.iter().any(|capability| granted.contains(*capability));
        for &number in *numbers {
            policy.set(number as u32, if may { Action::Allow } else { not_permitted });
        }
    }

    if granted.contains(Capability::SysAdmin) {
        for number in [SYS_clone, SYS_clone3, SYS_unshare] {
            policy.set(number as u32, Action::Allow);
        }
    } else {
        // The kernel uses the lower half of clone's flags; unshare's upper half must be zero, which
        // the kernel enforces.
        let without = Test::Masked { mask: KEPT_BACK, value: 0 };
        for number in [SYS_clone, SYS_unshare] {
            let rules = vec![allow([Condition::new(Argument::Int(0), without.clone())])];
            policy.set(number as u32, Decision { rules, otherwise: not_permitted });
        }
    }

    if granted.contains(Capability::SysNice) {
        policy.set(SYS_sched_setattr as u32, Action::Allow);
    }
    policy.set(SYS_ioctl as u32, terminal_injection());
    policy.set(SYS_personality as u32, execution_domain());
    policy.set(SYS_socket as u32, socket(granted, network));
    let families = [AF_UNIX, AF_INET, AF_INET6].map(|family| family as u64).to_vec();
    policy.set(
        SYS_socketpair as u32,
        Decision {
            rules: vec![allow([Condition::new(Argument::Int(0), Test::OneOf(families))])],
            otherwise: Action::Errno(EAFNOSUPPORT as u16),
        },
    );
    policy
}

fn allow<const N: usize>(when: [Condition; N]) -> Rule {
    Rule { when: when.into(), then: Action::Allow }
}

fn refuse<const N: usize>(when: [Condition; N], errno: c_int) -> Rule {
    Rule { when: when.into(), then: Action::Errno(errno as u16) }
}

/// Requests that put characters into a terminal, as if its user had typed them.
fn terminal_injection() -> Decision {
    const TIOCSTI: u64 = 0x5412;
    const TIOCLINUX: u64 = 0x541c;
    let request = Test::OneOf(vec![TIOCSTI, TIOCLINUX]);
    Decision {
        rules: vec![refuse([Condition::new(Argument::Int(1), request)], EPERM)],
        otherwise: Action::Allow,
    }
}

/// The ordinary domain, 32 bits, old version numbers, and the query. The other domains take
/// randomness from addresses or make pages executable.
fn execution_domain() -> Decision {
    const LINUX32: u64 = 0x8;
    const UNAME26: u64 = 0x2_0000;
    const QUERY: u64 = 0xffff_ffff;
    let known = Test::OneOf(vec![0, LINUX32, UNAME26, UNAME26 | LINUX32, QUERY]);
    Decision {
        rules: vec![allow([Condition::new(Argument::Int(0), known)])],
        otherwise: Action::Errno(EPERM as u16),
    }
}

fn socket(granted: Set, network: Network) -> Decision {
    let is = |argument, value: c_int| Condition::new(Argument::Int(argument), equal(value));
    let one_of = |argument, values: &[c_int]| {
        let values = values.iter().map(|&value| value as u64).collect();
        Condition::new(Argument::Int(argument), Test::OneOf(values))
    };
    let internet = || one_of(0, &[AF_INET, AF_INET6]);
    // SOCK_PACKET is obsolete: the kernel turns it into an AF_PACKET socket.
    let packet = Test::Masked { mask: 0xf, value: 10 };
    let mut rules = vec![
        allow([is(0, AF_UNIX)]),
        refuse([is(0, AF_INET), Condition::new(Argument::Int(1), packet)], ESOCKTNOSUPPORT),
    ];
    match network {
        Network::Host | Network::Shared => {
            let ordinary = [0, IPPROTO_TCP, IPPROTO_UDP, IPPROTO_ICMP, IPPROTO_ICMPV6];
            rules.push(allow([internet(), one_of(2, &ordinary)]));
            rules.push(refuse([internet()], EPROTONOSUPPORT));
            let mut protocols = vec![NETLINK_ROUTE];
            if network == Network::Shared {
                protocols.push(NETLINK_KOBJECT_UEVENT);
            }
            rules.push(allow([is(0, AF_NETLINK), one_of(2, &protocols)]));
        }
        Network::Own => {
            rules.push(allow([internet()]));
            let mut protocols =
                vec![NETLINK_ROUTE, NETLINK_SOCK_DIAG, NETLINK_KOBJECT_UEVENT, NETLINK_GENERIC];
            if granted.contains(Capability::NetAdmin) {
                protocols.extend([NETLINK_NETFILTER, NETLINK_XFRM]);
            }
            rules.push(allow([is(0, AF_NETLINK), one_of(2, &protocols)]));
            if granted.contains(Capability::NetRaw) {
                rules.push(allow([is(0, AF_PACKET)]));
            }
        }
    }
    rules.push(refuse([is(0, AF_NETLINK)], EPROTONOSUPPORT));
    Decision { rules, otherwise: Action::Errno(EAFNOSUPPORT as u16) }
}

fn equal(value: c_int) -> Test {
    Test::Equal(value as u64)
}
