//! The filter of the house, loaded by a real process that then tries real calls.
//!
//! Children are made in a process with threads: they neither allocate nor lock, and report by
//! their exit status.

use std::os::fd::OwnedFd;

use dormouse_kernel::call::{self, CloneArgs, CloneFlags, Cloned, StringTable};
use dormouse_kernel::capability::{Set, default_set};
use dormouse_kernel::process::{self, Exit};
use dormouse_kernel::seccomp::{Filter, Network, default_filter, default_filter_for};
use dormouse_kernel::{Errno, pidfd};

fn child(flags: CloneFlags, life: impl FnOnce() -> i32) -> Exit {
    let args = CloneArgs { flags, ..CloneArgs::default() };
    // SAFETY: the closures of this file call the thin layer and raw system calls.
    let pidfd: OwnedFd = match unsafe { process::clone3(&args).unwrap() } {
        Cloned::Child => call::exit(life()),
        Cloned::Parent { pidfd, .. } => pidfd,
    };
    pidfd::wait(&pidfd, None).unwrap();
    pidfd::reap(&pidfd).unwrap().unwrap()
}

fn raw(number: libc::c_long, arguments: [u64; 6]) -> i32 {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: callers pass calls that fail, or whose pointers are null or to statics.
    let returned = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if returned >= 0 {
        return 0;
    }
    // SAFETY: the location is valid for the life of the thread.
    unsafe { *libc::__errno_location() }
}

/// A child with no_new_privs and the filter makes each call, and leaves with the place of the
/// first that does not give what is expected (0 for success), or with 200.
fn try_all(filter: &Filter, calls: &[(libc::c_long, &[u64], i32)]) -> Exit {
    let bytes = filter.to_bytes();
    child(CloneFlags::empty(), || {
        if call::set_no_new_privs().and_then(|()| call::load_filter_bytes(&bytes)).is_err() {
            return 201;
        }
        for (place, (number, given, expected)) in calls.iter().enumerate() {
            let mut arguments = [0u64; 6];
            for (space, value) in arguments.iter_mut().zip(*given) {
                *space = *value;
            }
            if raw(*number, arguments) != *expected {
                return place as i32;
            }
        }
        200
    })
}

#[test]
fn root_calls_return_the_results_of_the_policy() {
    use libc::*;
    let (nothing, enosys, eperm) = (&[][..], ENOSYS, EPERM);
    let calls: &[(c_long, &[u64], i32)] = &[
        (SYS_getppid, nothing, 0),
        (SYS_socket, &[AF_UNIX as u64, SOCK_STREAM as u64, 0], 0),
        (SYS_socket, &[AF_INET as u64, SOCK_STREAM as u64, 0], 0),
        (SYS_socket, &[AF_INET6 as u64, SOCK_DGRAM as u64, 0], 0),
        (SYS_socket, &[AF_NETLINK as u64, SOCK_RAW as u64, NETLINK_ROUTE as u64], 0),
        (
            SYS_socket,
            &[AF_NETLINK as u64, SOCK_RAW as u64, NETLINK_SOCK_DIAG as u64],
            EPROTONOSUPPORT,
        ),
        (SYS_socket, &[AF_NETLINK as u64, SOCK_RAW as u64, NETLINK_KOBJECT_UEVENT as u64], 0),
        (SYS_socket, &[AF_NETLINK as u64, SOCK_RAW as u64, NETLINK_AUDIT as u64], EPROTONOSUPPORT),
        (SYS_socket, &[AF_PACKET as u64, SOCK_RAW as u64, 0], EAFNOSUPPORT),
        (SYS_socket, &[1 << 32 | AF_PACKET as u64, SOCK_RAW as u64, 0], EAFNOSUPPORT),
        (SYS_socket, &[AF_INET as u64, 10, 0], ESOCKTNOSUPPORT),
        (SYS_socket, &[AF_ALG as u64, SOCK_SEQPACKET as u64, 0], EAFNOSUPPORT),
        (SYS_socket, &[AF_VSOCK as u64, SOCK_STREAM as u64, 0], EAFNOSUPPORT),
        (SYS_io_uring_setup, &[1, 0], enosys),
        (SYS_keyctl, &[0, 0], enosys),
        (SYS_add_key, nothing, enosys),
        (SYS_clone3, nothing, enosys),
        (SYS_userfaultfd, nothing, eperm),
        (SYS_bpf, nothing, eperm),
        (SYS_perf_event_open, nothing, eperm),
        (SYS_mount, nothing, eperm),
        (SYS_fsopen, nothing, eperm),
        (SYS_open_tree, nothing, eperm),
        (467, nothing, eperm),
        (SYS_setns, nothing, eperm),
        (SYS_open_by_handle_at, nothing, eperm),
        (SYS_syslog, &[3, 0, 0], eperm),
        (SYS_ioctl, &[0, TIOCSTI], eperm),
        (SYS_ioctl, &[0, 1 << 32 | TIOCSTI], eperm),
        (SYS_ioctl, &[u64::MAX, TIOCGWINSZ], EBADF),
        (SYS_personality, &[0xffff_ffff], 0),
        (SYS_personality, &[0x4_0000], eperm),
        (451, nothing, enosys),
        (5000, nothing, enosys),
        (0x4000_0000 | SYS_getppid, nothing, enosys),
        (SYS_unshare, &[CLONE_NEWNET as u64], eperm),
        (SYS_unshare, &[CLONE_NEWUSER as u64 | CLONE_NEWNET as u64], eperm),
        (SYS_unshare, &[CLONE_NEWUSER as u64 | CLONE_NEWIPC as u64], eperm),
    ];
    let exit = try_all(&default_filter(default_set()), calls);
    assert_eq!(exit, Exit::Code(200), "the number is the place of the call that differs");
    // The same calls without a filter: at least the first of the refused ones succeeds.
    let sock_diag = [AF_NETLINK as u64, SOCK_RAW as u64, NETLINK_SOCK_DIAG as u64, 0, 0, 0];
    assert_eq!(child(CloneFlags::empty(), || raw(SYS_socket, sock_diag)), Exit::Code(0));
}

#[test]
fn root_nested_user_namespace_works_but_mounts_nothing() {
    let filter = default_filter(default_set()).to_bytes();
    let try_it = |filter: Option<&[u8]>| {
        child(CloneFlags::empty(), || {
            let nested = call::set_no_new_privs()
                .and_then(|()| filter.map_or(Ok(()), call::load_filter_bytes))
                .and_then(|()| call::unshare(CloneFlags::NEWUSER | CloneFlags::NEWNS));
            if nested.is_err() {
                return 201;
            }
            let tmpfs = c"tmpfs".as_ptr() as u64;
            let on = c"/tmp".as_ptr() as u64;
            raw(libc::SYS_mount, [tmpfs, on, tmpfs, 0, 0, 0])
        })
    };
    assert_eq!(try_it(None), Exit::Code(0), "the control: root of a nested namespace may mount");
    assert_eq!(try_it(Some(&filter)), Exit::Code(libc::EPERM));
}

#[test]
fn root_call_of_i386_ends_the_process() {
    /// getpid by the other door.
    fn getpid_of_i386() -> i32 {
        let result: i32;
        // SAFETY: call 20 of i386 takes no argument and touches no memory; the entry may change
        // r8 to r11.
        unsafe {
            std::arch::asm!(
                "int 0x80",
                inlateout("eax") 20 => result,
                out("r8") _, out("r9") _, out("r10") _, out("r11") _,
            );
        }
        result
    }
    let control = child(CloneFlags::NEWPID, getpid_of_i386);
    if control != Exit::Code(1) {
        eprintln!("SKIPPED: this kernel has no i386 calls ({control:?})");
        return;
    }
    let filter = default_filter(default_set()).to_bytes();
    let exit = child(CloneFlags::empty(), || {
        match call::set_no_new_privs().and_then(|()| call::load_filter_bytes(&filter)) {
            Ok(()) => getpid_of_i386(),
            Err(errno) => errno.raw_os_error(),
        }
    });
    assert_eq!(exit, Exit::Signal(libc::SIGSYS));
}

#[test]
fn root_programs_run_under_the_filter() {
    let filter = default_filter_for(Set::empty(), Network::Own).to_bytes();
    let script = b"sh\0-c\0ls -l / >/dev/null && (echo a; sleep 0.01) | cat >/dev/null && \
        grep -q 'Seccomp:.2' /proc/self/status && ! mount -t tmpfs x /mnt 2>/dev/null && \
        exit 42\0";
    let exit = child(CloneFlags::NEWNS, || {
        let (mut arguments, mut environment) = ([0usize; 4], [0usize; 2]);
        let Some(arguments) = StringTable::build(script, &mut arguments) else { return 1 };
        let path = b"PATH=/usr/bin:/bin:/usr/sbin:/sbin\0";
        let Some(environment) = StringTable::build(path, &mut environment) else { return 2 };
        match call::set_no_new_privs().and_then(|()| call::load_filter_bytes(&filter)) {
            Ok(()) => {}
            Err(errno) => return errno.raw_os_error(),
        }
        let sh = c"/bin/sh";
        call::execveat(rustix::fs::CWD, sh, &arguments, &environment).raw_os_error()
    });
    assert_eq!(exit, Exit::Code(42));
}

#[test]
fn root_malformed_or_unprivileged_filter_is_refused() {
    let filter = default_filter(default_set()).to_bytes();
    let exit = child(CloneFlags::empty(), || {
        let none = call::CapabilityMasks::default();
        match call::capset(none).and_then(|()| call::load_filter_bytes(&filter)) {
            Err(Errno::ACCESS) => 0,
            _ => 1,
        }
    });
    assert_eq!(exit, Exit::Code(0), "neither no_new_privs nor CAP_SYS_ADMIN");
    let exit = child(CloneFlags::empty(), || {
        let cut = call::load_filter_bytes(&filter[..filter.len() - 1]);
        let endless = call::load_filter_bytes(&filter[..16]);
        i32::from(cut != Err(Errno::INVAL) || endless != Err(Errno::INVAL))
    });
    assert_eq!(exit, Exit::Code(0));
}
