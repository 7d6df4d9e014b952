//! Processes, namespaces, identity and pidfds, seen from outside and inside of real ones.
//!
//! The tests run in threads, so a child may only use the layer that neither allocates nor locks;
//! it reports by its exit status.

use std::ffi::CStr;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use dormouse_kernel::call::{self, CapabilityMasks, CloneArgs, CloneFlags, Cloned, StringTable};
use dormouse_kernel::process::{self, Exit};
use dormouse_kernel::{Errno, capability, pidfd, proc};
use rustix::fs::{CWD, Mode, OFlags};

struct Child {
    pid: u32,
    pidfd: OwnedFd,
}

impl Child {
    /// A process that runs `life` and leaves with what it returns.
    fn new(args: &CloneArgs<'_>, life: impl FnOnce() -> i32) -> Self {
        // SAFETY: the closures of this file call the thin layer and what does not allocate.
        match unsafe { process::clone3(args).unwrap() } {
            Cloned::Child => call::exit(life()),
            Cloned::Parent { pid, pidfd } => Self { pid, pidfd },
        }
    }

    /// A process that has done `prepare` and waits to be killed.
    fn waiting(args: &CloneArgs<'_>, prepare: impl FnOnce() -> Result<(), Errno>) -> Self {
        let (done, tell) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let child = Self::new(args, || match prepare() {
            Ok(()) => {
                let _ = rustix::io::write(&tell, b"x");
                loop {
                    call::pause();
                }
            }
            Err(errno) => errno.raw_os_error(),
        });
        drop(tell);
        let read = rustix::io::read(&done, &mut [0u8; 1]).unwrap();
        if read == 0 {
            panic!("the child ended with {:?}", child.join());
        }
        child
    }

    fn join(&self) -> Exit {
        assert!(pidfd::wait(&self.pidfd, Some(Duration::from_secs(10))).unwrap(), "it never ended");
        pidfd::reap(&self.pidfd).unwrap().unwrap()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = pidfd::send_signal(&self.pidfd, libc::SIGKILL);
        let _ = pidfd::wait(&self.pidfd, None);
        let _ = pidfd::reap(&self.pidfd);
    }
}

#[test]
fn root_child_is_first_in_its_pid_namespace() {
    let args = CloneArgs { flags: CloneFlags::NEWPID, ..CloneArgs::default() };
    let child = Child::new(&args, || rustix::process::getpid().as_raw_nonzero().get());
    assert_eq!(child.join(), Exit::Code(1));
}

#[test]
fn root_child_has_every_namespace_of_its_own() {
    let flags = CloneFlags::NEWUSER
        | CloneFlags::NEWNS
        | CloneFlags::NEWPID
        | CloneFlags::NEWIPC
        | CloneFlags::NEWUTS
        | CloneFlags::NEWCGROUP
        | CloneFlags::NEWNET;
    let child = Child::waiting(&CloneArgs { flags, ..CloneArgs::default() }, || Ok(()));
    for kind in ["user", "mnt", "pid", "ipc", "uts", "cgroup", "net"] {
        let link = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap();
        assert_ne!(link(&child.pid.to_string()), link("self"), "{kind}");
    }
}

#[test]
fn root_time_namespace_is_made_by_clone() {
    let args = CloneArgs { flags: CloneFlags::NEWTIME, ..CloneArgs::default() };
    let child = Child::waiting(&args, || Ok(()));
    let link = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/time")).unwrap();
    assert_ne!(link(&child.pid.to_string()), link("self"));
}

/// Mount point of cgroup v2, on unified and hybrid hosts.
fn cgroup2() -> PathBuf {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2")).unwrap();
    line.split(' ').nth(1).unwrap().into()
}

#[test]
fn root_child_is_born_in_its_cgroup() {
    struct Dir(PathBuf);
    impl Drop for Dir {
        fn drop(&mut self) {
            let end = Instant::now() + Duration::from_secs(5);
            while fs::remove_dir(&self.0).is_err() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
    let name = format!("dormouse-kernel-test-{}", std::process::id());
    let dir = Dir(cgroup2().join(&name));
    fs::create_dir(&dir.0).unwrap();
    let fd = fs::File::open(&dir.0).unwrap();
    let args = CloneArgs { into_cgroup: Some(fd.as_fd()), ..CloneArgs::default() };
    let child = Child::waiting(&args, || Ok(()));
    let cgroup = proc::read_text(format!("/proc/{}/cgroup", child.pid), 8192).unwrap();
    let line = cgroup.lines().find(|line| line.starts_with("0::")).unwrap();
    assert!(line.ends_with(&name), "{line}");
}

#[test]
fn root_exit_status_is_readable_through_any_pidfd() {
    let child = Child::new(&CloneArgs::default(), || 42);
    // A second descriptor, as another process would hold it.
    let other = pidfd::open(child.pid).unwrap();
    assert!(pidfd::wait(&other, Some(Duration::from_secs(10))).unwrap());
    assert!(!pidfd::is_alive(&other));
    assert_eq!(child.join(), Exit::Code(42));
    let found = pidfd::exit_status(&other).unwrap();
    // KERNEL(6.15): before, only the parent can read it.
    if kernel_is_at_least(6, 15) {
        assert_eq!(found, Some(Exit::Code(42)));
    } else {
        assert_eq!(found, None);
    }
    assert_eq!(pidfd::send_signal(&other, 0).unwrap_err().errno(), libc::ESRCH);
    assert_eq!(pidfd::pid(&other).unwrap_err().errno(), libc::ESRCH);
}

fn kernel_is_at_least(major: u32, minor: u32) -> bool {
    let uname = rustix::system::uname();
    let mut parts = uname.release().to_str().unwrap().split(['.', '-']);
    let mut next = || parts.next().and_then(|part| part.parse::<u32>().ok()).unwrap_or(0);
    (next(), next()) >= (major, minor)
}

#[test]
fn root_signal_ends_the_process_and_is_in_its_exit_status() {
    let child = Child::waiting(&CloneArgs::default(), || Ok(()));
    assert!(pidfd::is_alive(&child.pidfd));
    assert!(!pidfd::wait(&child.pidfd, Some(Duration::from_millis(20))).unwrap());
    assert_eq!(pidfd::reap(&child.pidfd).unwrap(), None);
    assert_eq!(pidfd::exit_status(&child.pidfd).unwrap(), None);
    assert_eq!(pidfd::pid(&child.pidfd).unwrap(), child.pid);
    pidfd::send_signal(&child.pidfd, libc::SIGKILL).unwrap();
    let exit = child.join();
    assert_eq!(exit, Exit::Signal(libc::SIGKILL));
    assert_eq!(exit.code(), 137);
}

#[test]
fn root_another_start_time_is_another_process() {
    let child = Child::waiting(&CloneArgs::default(), || Ok(()));
    let start = pidfd::start_time(child.pid).unwrap();
    pidfd::open_exactly(child.pid, start).unwrap();
    let error = pidfd::open_exactly(child.pid, start + 1).unwrap_err();
    assert_eq!(error.kind(), dormouse_kernel::ErrorKind::NotFound);
}

#[test]
fn root_descriptor_of_another_process_is_copied() {
    let file = tempfile::tempfile().unwrap();
    let child = Child::waiting(&CloneArgs::default(), || Ok(()));
    let copy = pidfd::copy_descriptor(&child.pidfd, file.as_raw_fd()).unwrap();
    let ids = |fd: &dyn AsFd| {
        let stat = rustix::fs::fstat(fd.as_fd()).unwrap();
        (stat.st_dev, stat.st_ino)
    };
    assert_eq!(ids(&copy), ids(&file));
}

#[test]
fn root_program_runs_with_the_requested_ids() {
    const KEEP: u64 = 1 << 10 | 1; // CHOWN, NET_BIND_SERVICE
    let child = Child::waiting(&CloneArgs::default(), || {
        call::capability_bound(KEEP)?;
        call::set_keep_capabilities(true)?;
        call::set_groups(&[7, 8])?;
        call::set_gid(33)?;
        call::set_uid(33)?;
        call::capset(CapabilityMasks { effective: 1, permitted: KEEP, inheritable: 1 })?;
        call::capability_ambient(1)?;
        call::set_no_new_privs()?;
        call::set_name(c"dormouse")
    });
    let fields = proc::fields(child.pid).unwrap();
    assert_eq!(fields.field("Uid"), Some("33\t33\t33\t33"));
    assert_eq!(fields.field("Gid"), Some("33\t33\t33\t33"));
    assert_eq!(fields.field("Groups"), Some("7 8"));
    assert_eq!(fields.mask("CapBnd"), Some(KEEP));
    assert_eq!(fields.mask("CapPrm"), Some(KEEP));
    assert_eq!(fields.mask("CapEff"), Some(1));
    assert_eq!(fields.mask("CapInh"), Some(1));
    assert_eq!(fields.mask("CapAmb"), Some(1));
    assert_eq!(fields.number("NoNewPrivs"), Some(1));
    assert_eq!(fields.field("Name"), Some("dormouse"));
    // The C library's own way would have changed every thread of this process.
    assert_eq!(capability::effective().unwrap(), {
        let own = proc::fields(std::process::id()).unwrap();
        capability::Set::from_bits(own.mask("CapEff").unwrap())
    });
}

#[test]
fn root_signals_are_as_a_new_program_expects_them() {
    let child = Child::waiting(&CloneArgs::default(), || {
        // SAFETY: ignoring a signal runs no code.
        unsafe { libc::signal(libc::SIGUSR1, libc::SIG_IGN) };
        call::reset_signals()
    });
    let fields = proc::fields(child.pid).unwrap();
    for mask in ["SigIgn", "SigCgt", "SigBlk"] {
        assert_eq!(fields.mask(mask), Some(0), "{mask}");
    }
}

#[test]
fn root_flags_of_a_process_are_set() {
    let ask = |request: libc::c_int| {
        // SAFETY: only integers are passed.
        unsafe { libc::prctl(request, 0, 0, 0, 0) }
    };
    let child = Child::new(&CloneArgs::default(), || {
        let mut subreaper: libc::c_int = 0;
        let set = call::set_dumpable(false)
            .and_then(|()| call::set_keep_capabilities(true))
            .and_then(|()| call::set_child_subreaper(true));
        // SAFETY: the pointer is to an int that outlives the call.
        unsafe { libc::prctl(libc::PR_GET_CHILD_SUBREAPER, &raw mut subreaper) };
        let found = [ask(libc::PR_GET_DUMPABLE), 1 - ask(libc::PR_GET_KEEPCAPS), 1 - subreaper];
        i32::from(set.is_err() || found != [0; 3])
    });
    assert_eq!(child.join(), Exit::Code(0));
}

#[test]
fn root_session_keyring_is_new() {
    let session = || {
        const GET_KEYRING_ID: libc::c_int = 0;
        const SESSION: libc::c_int = -3;
        // SAFETY: only integers are passed.
        unsafe { libc::syscall(libc::SYS_keyctl, GET_KEYRING_ID, SESSION, 1) }
    };
    let child = Child::new(&CloneArgs::default(), || {
        let before = session();
        match call::join_session_keyring() {
            Ok(serial) if i64::from(serial) == session() && session() != before => 0,
            Ok(_) => 1,
            Err(errno) => errno.raw_os_error(),
        }
    });
    assert_eq!(child.join(), Exit::Code(0));
}

#[test]
fn root_program_gets_its_arguments_and_environment() {
    let child = Child::new(&CloneArgs::default(), || {
        let (mut arguments, mut environment) = ([0usize; 4], [0usize; 2]);
        let script = b"sh\0-c\0test \"$X\" = y && test -z \"$HOME\" && exit 42\0";
        let Some(arguments) = StringTable::build(script, &mut arguments) else { return 1 };
        let Some(environment) = StringTable::build(b"X=y\0", &mut environment) else { return 2 };
        call::execveat(CWD, c"/bin/sh", &arguments, &environment).raw_os_error()
    });
    assert_eq!(child.join(), Exit::Code(42));
}

#[test]
fn root_missing_program_is_an_error_and_not_a_program() {
    let missing: &CStr = c"/no/such/program";
    let child = Child::new(&CloneArgs::default(), || {
        let (mut arguments, mut environment) = ([0usize; 2], [0usize; 1]);
        let Some(arguments) = StringTable::build(b"x\0", &mut arguments) else { return 1 };
        let Some(environment) = StringTable::build(b"", &mut environment) else { return 2 };
        call::execveat(CWD, missing, &arguments, &environment).raw_os_error()
    });
    assert_eq!(child.join(), Exit::Code(libc::ENOENT));
}

#[test]
fn table_without_room_or_end_is_refused() {
    assert!(StringTable::build(b"a\0b\0", &mut [0; 2]).is_none());
    assert!(StringTable::build(b"a\0b\0", &mut [0; 3]).is_some());
    assert!(StringTable::build(b"a\0b", &mut [0; 9]).is_none());
    assert!(StringTable::build(b"", &mut []).is_none());
}

#[test]
fn root_child_dies_with_the_thread_that_made_it() {
    let child = std::thread::spawn(|| {
        Child::waiting(&CloneArgs::default(), || call::set_parent_death_signal(libc::SIGKILL))
    })
    .join()
    .unwrap();
    assert_eq!(child.join(), Exit::Signal(libc::SIGKILL));
}

#[test]
fn root_namespace_is_joined_by_its_descriptor() {
    let args = CloneArgs { flags: CloneFlags::NEWUTS, ..CloneArgs::default() };
    let child = Child::waiting(&args, || {
        rustix::system::sethostname(b"dormouse-test").map_err(|_| Errno::IO)
    });
    let uts = pidfd::namespace(&child.pidfd, call::Namespace::Uts).unwrap();
    let name = std::thread::spawn(move || {
        process::setns(uts.as_fd(), CloneFlags::NEWUTS).unwrap();
        rustix::system::uname().nodename().to_owned()
    })
    .join()
    .unwrap();
    assert_eq!(name.as_c_str(), c"dormouse-test");
    let wrong = rustix::fs::open("/proc/self/ns/uts", OFlags::RDONLY, Mode::empty()).unwrap();
    let error = process::setns(wrong.as_fd(), CloneFlags::NEWIPC).unwrap_err();
    assert_eq!(error.kind(), dormouse_kernel::ErrorKind::Invalid);
}
