//! Newborns and their keeper on the running kernel: a runtime directory and a busybox tree of their
//! own for each test, nothing mocked. They need root.

mod scratch;

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use dormouse_kernel::call::Namespace;
use dormouse_kernel::{ErrorKind, namespace, pidfd};
use dormouse_launch::protocol::watch;
use dormouse_launch::{
    CapabilityMasks, ExitStatus, Ids, Keeper, Kind, LaunchError, Plan, Spawn, TargetKind, Terminal,
};
use rustix::process::Signal;
use scratch::{ALL, Scratch, mount_of, output, output_lossy, program, until};

#[test]
fn root_container_runs_and_its_exit_code_is_known() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let (pid, _) = scratch.run(&mut keeper, "c1", &["sh", "-c", "exit 7"], |_| {});
    let status = keeper.wait(pid).unwrap();
    assert_eq!((status.code, status.signal), (7, None));
    let on_disk = ExitStatus::read(&scratch.container_dir("c1"), pid).unwrap().unwrap();
    assert_eq!(on_disk, status);
    keeper.settled(pid).unwrap();
}

#[test]
fn root_signal_is_128_and_its_number() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let (pid, pidfd) = scratch.run(&mut keeper, "c1", &["sleep", "100"], |_| {});
    pidfd::send_signal(pidfd.as_fd(), 9).unwrap();
    let status = keeper.wait(pid).unwrap();
    assert_eq!((status.code, status.signal), (137, Some(9)));
}

#[test]
fn root_container_sees_itself_alone() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let script = "echo pid=$$; id -u; hostname; ls /proc | grep -c '^[0-9]*$'; cat /proc/mounts; \
                  echo fds $(ls /proc/self/fd); cat /proc/self/status";
    let text = scratch.output(&mut keeper, "c1", script, |plan| {
        plan.hostname("inside");
        plan.mqueue("/dev/mqueue");
        plan.devpts("/dev/pts", Some(5), 64);
    });
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("pid=1"));
    assert_eq!(lines.next(), Some("0"));
    assert_eq!(lines.next(), Some("inside"));
    // The shell, ls, and grep if it was started by then.
    let processes = lines.next();
    assert!(matches!(processes, Some("2" | "3")), "{text}");
    // Root, proc, mqueue, devpts: the tiny root below is not visible.
    for (place, kind) in [("/proc", "proc"), ("/dev/mqueue", "mqueue"), ("/dev/pts", "devpts")] {
        assert!(text.contains(&format!(" {place} {kind} ")), "{text}");
    }
    // What ls has open: 0, 1, 2 and the directory it reads.
    assert!(text.contains("fds 0 1 2 3\n"), "{text}");
    for set in ["CapInh", "CapAmb"] {
        assert!(text.contains(&format!("{set}:\t0000000000000000")), "{text}");
    }
}

#[test]
fn root_nested_user_namespace_works() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let script = "unshare -Ur id -u && unshare -Urm sh -c 'mount -t tmpfs none /tmp && echo yes'";
    assert_eq!(scratch.output(&mut keeper, "c1", script, |_| {}), "0\nyes\n");
}

#[test]
fn root_nothing_of_the_host_is_below_the_root() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    // All capabilities of its user namespace: it may take its own root off.
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let words = ["sh", "-c", "umount -l / && echo off; exec 1>&- 2>&-; while :; do read x; done"];
    let (held, _keep) = rustix::pipe::pipe().unwrap();
    let (_, init) = scratch.run(&mut keeper, "c1", &words, |plan| {
        let (input, out) = (plan.fd(held), plan.fd(writer));
        plan.stdio([input, out, out]);
    });
    assert_eq!(output(reader), "off\n");
    // Whoever enters its mount namespace now stands in an empty directory that stays empty.
    let mut enter = |edit: &dyn Fn(&mut Plan)| {
        let pid_namespace_of = Some(init.try_clone().unwrap());
        let spawn = Spawn { pid_namespace_of, ..Spawn::new("c1", Kind::Exec, 0) };
        let mut newborn = keeper.spawn(spawn).unwrap();
        let mut plan = Plan::new();
        let target = plan.fd(init.try_clone().unwrap());
        plan.setns(target, ALL as u32 & !0x2000_0000);
        plan.become_root();
        edit(&mut plan);
        plan.exec(&program(&["ls", "/"]));
        newborn.send(plan).unwrap();
        match newborn.go() {
            Err(LaunchError::Failed(failure)) => failure,
            other => panic!("{other:?}"),
        }
    };
    let failure = enter(&|_| {});
    assert!(failure.is_exec() && failure.exit_code() == 127, "{failure}");
    for name in ["proc", "dev", "etc", "run", "tmp"] {
        let failure = enter(&|plan| plan.chdir(name, false));
        assert_eq!(failure.errno, 2, "{failure}");
    }
    let failure = enter(&|plan| plan.make_dir("/made", 0o755));
    assert_eq!(failure.errno, 30, "{failure}");
}

#[test]
fn root_program_has_the_capabilities_it_was_given() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    // CAP_CHOWN and CAP_KILL; a filter that allows everything.
    let bounding = 1 << 0 | 1 << 5;
    let allow = [0x06u16.to_ne_bytes().as_slice(), &[0, 0], &0x7fff_0000u32.to_ne_bytes()].concat();
    for (uid, no_new_privs) in [(0, true), (0, false), (33, true), (33, false)] {
        let own = if uid == 0 { bounding } else { 0 };
        let id = format!("c{uid}{no_new_privs}");
        let text = scratch.output_as(&mut keeper, &id, "cat /proc/self/status", |plan| {
            plan.credentials(&Ids { uid, gid: uid, groups: vec![44, 45] });
            plan.capabilities(&CapabilityMasks {
                bounding,
                effective: own,
                permitted: own,
                ..CapabilityMasks::default()
            });
            if no_new_privs {
                plan.no_new_privs();
            }
            plan.seccomp(&allow);
        });
        let field = |name: &str| {
            let line = text.lines().find_map(|l| l.strip_prefix(name));
            line.unwrap_or_else(|| panic!("no {name} in {text}")).trim().to_owned()
        };
        let mask = |name: &str| u64::from_str_radix(&field(name), 16).unwrap();
        assert_eq!(mask("CapBnd:"), bounding);
        assert_eq!(mask("CapEff:"), own, "uid {uid}");
        assert_eq!(mask("CapPrm:"), own, "uid {uid}");
        assert_eq!((mask("CapInh:"), mask("CapAmb:")), (0, 0));
        assert_eq!(field("NoNewPrivs:"), if no_new_privs { "1" } else { "0" });
        assert_eq!(field("Seccomp:"), "2");
        assert_eq!(field("Uid:"), format!("{uid}\t{uid}\t{uid}\t{uid}"));
        assert_eq!(field("Groups:"), "44 45");
    }
}

#[test]
fn root_failures_name_their_step() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let mut fail = |id: &str, words: &[&str], edit: &dyn Fn(&mut Plan)| match scratch.try_run(
        &mut keeper,
        id,
        words,
        |plan| edit(plan),
    ) {
        Err(LaunchError::Failed(failure)) => failure,
        other => panic!("{other:?}"),
    };
    let failure = fail("a", &["/bin/nothing"], &|_| {});
    assert!(failure.is_exec() && failure.exit_code() == 127, "{failure}");
    let failure = fail("b", &["/etc"], &|_| {});
    assert_eq!((failure.exit_code(), failure.errno), (126, 13), "{failure}");
    let failure = fail("c", &["true"], &|plan| plan.chdir("/not/there", false));
    assert_eq!((failure.exit_code(), failure.op), (125, "change to the working directory"));
    assert!(failure.to_string().contains("/not/there"), "{failure}");
    let failure = fail("d", &["true"], &|plan| plan.rlimit(7, 5, 4, false));
    assert_eq!(failure.errno, 22);
}

#[test]
fn root_image_links_lead_nowhere_outside() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let root = scratch.root();
    let outside = scratch.path("outside");
    std::fs::create_dir(&outside).unwrap();
    // /dev leads up and out, by an absolute and by a relative link: inside the root, both are
    // directories that may be made there, and nothing else.
    std::fs::remove_dir(root.join("dev")).unwrap();
    std::os::unix::fs::symlink("/../../../../../etc", root.join("dev")).unwrap();
    let failed = scratch.try_run(&mut keeper, "a", &["true"], |plan| plan.mqueue("/dev/mqueue"));
    assert!(matches!(failed, Err(LaunchError::Failed(f)) if f.errno == 40), "links are followed");
    std::os::unix::fs::symlink(&outside, root.join("out")).unwrap();
    // The target of a dangling link is made inside the root.
    let made = scratch.try_run(&mut keeper, "b", &["true"], |plan| {
        plan.make_dir("/out/in", 0o755);
    });
    assert!(made.is_ok());
    assert!(root.join(outside.strip_prefix("/").unwrap()).join("in").is_dir());
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
    // procfs is refused where the image has put a link (the scratch run mounts it at /proc).
    std::fs::remove_dir(root.join("proc")).unwrap();
    std::os::unix::fs::symlink("tmp", root.join("proc")).unwrap();
    let failed = scratch.try_run(&mut keeper, "c", &["true"], |_| {});
    assert!(matches!(failed, Err(LaunchError::Failed(f)) if f.errno == 40), "links are followed");
}

#[test]
fn root_masked_and_read_only_paths_are() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let null = scratch.path("null");
    std::fs::write(&null, "").unwrap();
    let empty = scratch.path("empty");
    std::fs::create_dir(&empty).unwrap();
    let script = "cat /proc/cpuinfo /proc/meminfo; ls /proc/sys /proc/irq; \
                  touch /proc/bus/pci; echo 5000 > /proc/sys/kernel/shmmni; \
                  cat /proc/sys/kernel/shmall; touch /made";
    let text = scratch.output(&mut keeper, "c1", script, |plan| {
        plan.sysctl("kernel.shmall", "4242").unwrap();
        let null = plan.fd(mount_of(&null, None));
        let empty = plan.fd(mount_of(&empty, None));
        let paths = ["/proc/cpuinfo", "/proc/meminfo", "/proc/irq", "/proc/acpi", "/proc/none"];
        plan.mask(null, empty, &paths);
        plan.read_only(&["/proc/sys", "/proc/bus"]);
    });
    assert!(text.contains("4242"), "{text}");
    assert!(!text.contains("processor") && !text.contains("MemTotal"), "{text}");
    assert!(text.contains("kernel"), "{text}");
    assert_eq!(text.matches("Read-only file system").count(), 2, "{text}");
}

/// The engine is busy between Ready and Go.
#[test]
fn root_newborn_sets_sysctls_after_a_sync_before_go() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let mut newborn = keeper.spawn(scratch.spawn("c1")).unwrap();
    let mut plan = Plan::new();
    scratch.plan_root(&mut plan, &mut newborn);
    plan.sync();
    plan.sysctl("kernel.shmall", "4242").unwrap();
    plan.exec(&program(&["true"]));
    newborn.send(plan).unwrap();
    newborn.ready().unwrap();
    let ipc = pidfd::namespace(&newborn.pidfd, Namespace::Ipc).unwrap();
    let read = || std::fs::read_to_string("/proc/sys/kernel/shmall").unwrap();
    let inside = || namespace::visit(ipc.as_fd(), Namespace::Ipc, read).unwrap();
    assert!(until(|| inside().trim() == "4242"), "{}", inside());
    newborn.go().unwrap();
}

#[test]
fn root_newborn_has_its_confinement_before_go_after_an_early_sync() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let allow = [0x06u16.to_ne_bytes().as_slice(), &[0, 0], &0x7fff_0000u32.to_ne_bytes()].concat();
    for is_early in [true, false] {
        let mut newborn = keeper.spawn(scratch.spawn("c1")).unwrap();
        let mut plan = Plan::new();
        scratch.plan_root(&mut plan, &mut newborn);
        if is_early {
            plan.sync_early()
        } else {
            plan.sync()
        }
        plan.chdir("/", false);
        plan.credentials(&Ids { uid: 33, gid: 33, groups: Vec::new() });
        plan.capabilities(&CapabilityMasks::default());
        plan.no_new_privs();
        plan.seccomp(&allow);
        plan.exec(&program(&["sleep", "1000"]));
        newborn.send(plan).unwrap();
        newborn.ready().unwrap();
        let is_filtered = || {
            let status = std::fs::read_to_string(format!("/proc/{}/status", newborn.pid)).unwrap();
            status.contains("Seccomp:\t2\n")
        };
        if is_early {
            assert!(until(is_filtered));
        } else {
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!is_filtered(), "the confinement waits for Go");
        }
        let (pid, pidfd) = (newborn.pid, newborn.pidfd.try_clone().unwrap());
        let exe = || std::fs::read_link(format!("/proc/{pid}/exe")).unwrap();
        let before = exe();
        newborn.go().unwrap();
        assert_ne!(exe(), before, "the program is executed after Go");
        pidfd::send_signal(pidfd.as_fd(), 9).unwrap();
        keeper.wait(pid).unwrap();
    }
}

#[test]
fn root_plan_in_parts_is_executed_as_one() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let begin = |keeper: &mut Keeper| {
        let mut newborn = keeper.spawn(scratch.spawn("c1")).unwrap();
        let mut plan = Plan::new();
        scratch.plan_root(&mut plan, &mut newborn);
        let mut plan = newborn.send_part(plan).unwrap();
        assert_eq!(plan.descriptors(), 0, "the first part is sent");
        plan.make_dir("/first", 0o755);
        let rest = newborn.send_part(plan).unwrap();
        (newborn, rest)
    };
    let (mut newborn, mut plan) = begin(&mut keeper);
    // Numbers of descriptors of the first part, too.
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let (held, _keep) = rustix::pipe::pipe().unwrap();
    let (out, input) = (plan.fd(writer), plan.fd(held));
    plan.stdio([input, out, out]);
    plan.sync();
    plan.chdir("/first", false);
    plan.exec(&program(&["sh", "-c", "pwd; ulimit -n"]));
    newborn.send(plan).unwrap();
    newborn.ready().unwrap();
    let pid = newborn.pid;
    newborn.go().unwrap();
    let text = output(reader);
    assert!(text.starts_with("/first\n"), "{text}");
    let own = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let limit: u64 = text.lines().nth(1).unwrap().parse().unwrap();
    assert_eq!(Some(limit), own, "the keeper's raised limit is taken back");
    assert_eq!(keeper.wait(pid).unwrap().code, 0);

    // A failed operation is named, in any part.
    let (mut newborn, mut plan) = begin(&mut keeper);
    plan.chdir("/missing", false);
    plan.sync();
    plan.exec(&program(&["true"]));
    newborn.send(plan).unwrap();
    let Err(LaunchError::Failed(failure)) = newborn.ready() else { panic!("it fails") };
    assert!(failure.to_string().contains("/missing"), "{failure}");
    let mut newborn = keeper.spawn(scratch.spawn("c1")).unwrap();
    let mut plan = Plan::new();
    scratch.plan_root(&mut plan, &mut newborn);
    plan.chdir("/absent", false);
    let mut rest = newborn.send_part(plan).unwrap();
    assert!(pidfd::wait(&newborn.pidfd, Some(std::time::Duration::from_secs(60))).unwrap());
    rest.sync();
    rest.exec(&program(&["true"]));
    newborn.send(rest).unwrap();
    let Err(LaunchError::Failed(failure)) = newborn.ready() else { panic!("it fails") };
    assert!(failure.to_string().contains("/absent"), "{failure}");

    // Without an engine the newborn does not wait for ever.
    let (newborn, _) = begin(&mut keeper);
    let process = newborn.pidfd.try_clone().unwrap();
    drop(newborn);
    assert!(pidfd::wait(&process, Some(std::time::Duration::from_secs(60))).unwrap());
}

#[test]
fn root_kept_newborn_goes_on_with_another_client_once() {
    let scratch = Scratch::new();
    let keep = || {
        let mut maker = scratch.keeper();
        let mut newborn = maker.spawn(scratch.spawn("c1")).unwrap();
        let mut plan = Plan::new();
        scratch.plan_root(&mut plan, &mut newborn);
        newborn.send_part(plan).unwrap();
        let process = newborn.pidfd.try_clone().unwrap();
        let passed = maker.passed(&newborn);
        maker.keep_newborn("c1", newborn).unwrap();
        (passed, process)
    };
    let ends = |process: &OwnedFd| {
        assert!(pidfd::wait(process, Some(std::time::Duration::from_secs(60))).unwrap());
    };
    let take = |keeper: &mut Keeper, passed: &dormouse_launch::Passed| {
        let asked = keeper.ask_for_newborn("c1", passed.clone()).unwrap().expect("of this keeper");
        keeper.taken_newborn(asked).unwrap()
    };
    let (passed, process) = keep();
    let mut keeper = scratch.keeper();
    assert!(pidfd::is_alive(&process) && passed.is_alive(), "its maker has ended");
    let mut newborn = take(&mut keeper, &passed).expect("it waits");
    assert!(take(&mut keeper, &passed).is_none(), "it is given away once");
    let mut plan = Plan::new();
    plan.sync();
    plan.exec(&program(&["sh", "-c", "exit 7"]));
    newborn.send(plan).unwrap();
    newborn.ready().unwrap();
    let pid = newborn.pid;
    newborn.go().unwrap();
    assert_eq!(keeper.wait(pid).unwrap().code, 7, "the client is its starter");

    // Taken and left, and ended while it waits.
    let (passed, process) = keep();
    drop(take(&mut keeper, &passed).expect("it waits"));
    ends(&process);
    let (passed, process) = keep();
    pidfd::send_signal(process.as_fd(), 9).unwrap();
    ends(&process);
    assert!(take(&mut keeper, &passed).is_none());

    // It exits with the keeper.
    let (_, process) = keep();
    let own = pidfd::open(keeper.status().unwrap().pid).unwrap();
    pidfd::send_signal(own.as_fd(), 9).unwrap();
    ends(&process);
}

/// Nothing would remove the entry.
#[test]
fn root_keeper_keeps_no_stream_of_a_container_that_has_ended() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let stdin = || rustix::pipe::pipe().unwrap().1;
    let (pid, pidfd) = scratch.run(&mut keeper, "c1", &["sleep", "1000"], |_| {});
    keeper.keep_stdin("c1", stdin()).unwrap();
    keeper.attach_stdin("c1").unwrap();
    pidfd::send_signal(pidfd.as_fd(), 9).unwrap();
    keeper.wait(pid).unwrap();
    keeper.keep_stdin("c1", stdin()).unwrap();
    let kept = keeper.attach_stdin("c1");
    assert!(kept.is_err_and(|e| e.kind() == ErrorKind::NotFound));
}

#[test]
fn root_exec_joins_everything_and_is_waited_for() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let (pid, pidfd) = scratch.run(&mut keeper, "c1", &["sleep", "100"], |plan| {
        plan.hostname("joined");
    });
    let script = "hostname; readlink /proc/self/ns/pid; readlink /proc/1/ns/pid; id -u; ls /; \
                  cat /proc/1/comm; exit 3";
    let (text, status) = scratch.exec(&mut keeper, &pidfd, script);
    assert!(text.starts_with("joined\n"), "{text}");
    let mut lines = text.lines().skip(1);
    assert_eq!(lines.next(), lines.next(), "{text}");
    assert_eq!(lines.next(), Some("0"), "{text}");
    assert!(text.contains("sleep"), "{text}");
    assert_eq!(status.code, 3);
    assert!(pidfd::is_alive(pidfd.as_fd()));
    pidfd::send_signal(pidfd.as_fd(), 9).unwrap();
    assert_eq!(keeper.wait(pid).unwrap().code, 137);
}

#[test]
fn root_joining_process_cannot_be_looked_into() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    // Root of the container, with all capabilities there, reads whatever it can of each process
    // that appears (CVE-2016-9962, CVE-2024-21626).
    let spy = "while :; do for p in /proc/[0-9]*; do \
               cat $p/cmdline $p/environ; readlink $p/exe; readlink $p/cwd; \
               for f in $p/fd/*; do readlink $f; done; done; done";
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let (_, init) = scratch.run(&mut keeper, "c1", &["sh", "-c", spy], |plan| {
        let out = plan.fd(writer);
        let null = plan.fd(std::fs::File::open("/dev/null").unwrap().into());
        plan.stdio([null, out, null]);
    });
    let seen = std::thread::spawn(move || output_lossy(reader));
    for _ in 0..100 {
        assert_eq!(scratch.exec(&mut keeper, &init, "exit 4").1.code, 4);
    }
    pidfd::send_signal(init.as_fd(), 9).unwrap();
    let seen = seen.join().unwrap();
    assert!(seen.contains("/bin/busybox"), "the spy saw nothing at all");
    let run = scratch.run_dir();
    for secret in ["dormouse-keeper", "memfd", "keeper.sock", "--run", run.to_str().unwrap()] {
        let place = seen.find(secret).map(|at| {
            let from = seen.floor_char_boundary(at.saturating_sub(80));
            &seen[from..seen.ceil_char_boundary(at + 40)]
        });
        assert_eq!(place, None, "{secret} is visible");
    }
}

#[test]
fn root_program_begins_with_a_clean_slate() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let mut newborn = keeper.spawn(scratch.spawn("c1")).unwrap();
    let mut plan = Plan::new();
    plan.oom_score_adj(345);
    scratch.plan_root(&mut plan, &mut newborn);
    let out = plan.fd(writer);
    let null = plan.fd(std::fs::File::open("/dev/null").unwrap().into());
    plan.stdio([null, out, out]);
    plan.umask(0o027);
    plan.rlimit(7, 100, 200, false);
    // Raising needs a capability of the host: leniently, it stays what it is.
    plan.rlimit(8, u64::MAX, u64::MAX, true);
    plan.domainname("nis");
    plan.sync();
    let files = ["status", "oom_score_adj", "limits", "environ"].map(|f| format!("/proc/self/{f}"));
    let words = ["cat", &files[0], &files[1], &files[2], &files[3], "/proc/sys/kernel/domainname"];
    plan.exec(&program(&words));
    newborn.send(plan).unwrap();
    newborn.ready().unwrap();
    newborn.go().unwrap();
    let text = output(reader);
    for line in ["SigIgn:\t0000000000000000", "SigBlk:\t0000000000000000", "Umask:\t0027"] {
        assert!(text.contains(line), "{line} is not in {text}");
    }
    assert!(text.contains("\n345\n"), "{text}");
    assert!(text.contains("PATH=/bin\0TERM=dumb\0nis\n"), "{text}");
    let open_files = text.lines().find(|l| l.starts_with("Max open files")).unwrap();
    let limits: Vec<&str> = open_files.split_whitespace().skip(3).take(2).collect();
    assert_eq!(limits, ["100", "200"]);
}

#[test]
fn root_kept_stdin_and_logs_serve_whoever_comes_later() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let log_path = scratch.path("stdout.log");
    let log = std::fs::File::options().append(true).create(true).open(&log_path).unwrap();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let script = "read a; echo first $a; while read a; do echo $a$a$a$a$a$a$a$a; done; echo end";
    let (pid, _) = scratch.run(&mut keeper, "c1", &["sh", "-c", script], |plan| {
        let (input, out) = (plan.fd(reader), plan.fd(log.into()));
        plan.stdio([input, out, out]);
    });
    keeper.keep_stdin("c1", writer).unwrap();
    keeper.keep_logs("c1", 64 << 10, &[&log_path]).unwrap();
    drop(keeper);
    // A later client finds it, and what the keeper holds ends with the container's own end.
    let mut later = Keeper::connect(&scratch.run_dir()).unwrap().unwrap();
    assert!(matches!(later.attach_stdin("c2"), Err(LaunchError::Refused { .. })));
    assert!(matches!(later.attach_console("c1"), Err(LaunchError::Refused { .. })));
    let mut stdin = std::fs::File::from(later.attach_stdin("c1").unwrap());
    let line = format!("{}\n", "x".repeat(100));
    use std::io::Write;
    for _ in 0..2000 {
        stdin.write_all(line.as_bytes()).unwrap();
    }
    // 1.6 MB were written; a look every two seconds leaves 64 kB.
    use std::os::unix::fs::MetadataExt;
    let size = || std::fs::metadata(&log_path).unwrap();
    assert!(until(|| size().len() > 1_500_000 && size().blocks() * 512 <= 80 << 10));
    drop(stdin);
    later.forget("c1").unwrap();
    // It may be reaped before it can be waited for; how it ended is on disk then.
    let dir = scratch.container_dir("c1");
    assert!(until(|| ExitStatus::read(&dir, pid).unwrap().is_some()));
    assert_eq!(ExitStatus::read(&dir, pid).unwrap().unwrap().code, 0);
    assert!(std::fs::read(&log_path).unwrap().ends_with(b"end\n"));
}

#[test]
fn root_terminal_belongs_to_the_program_and_is_kept() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let log_path = scratch.path("log");
    // It waits a little, so that whoever typed the line has detached: what is said while somebody is
    // attached is theirs to log.
    let script = "tty; stty size; echo begun; read line; sleep 1; echo got $line; exit 5";
    let mut newborn = keeper.spawn(scratch.spawn("c1")).unwrap();
    let mut plan = Plan::new();
    scratch.plan_root(&mut plan, &mut newborn);
    plan.devpts("/dev/pts", None, 64);
    plan.terminal(&Terminal { size: (33, 99), console: true, ..Terminal::default() });
    plan.sync();
    plan.exec(&program(&["sh", "-c", script]));
    newborn.send(plan).unwrap();
    let master = newborn.ready().unwrap().expect("a terminal was opened");
    let log = std::fs::File::options().append(true).create(true).open(&log_path).unwrap();
    keeper.keep_console("c1", master, log.into()).unwrap();
    let (pid, status) = (newborn.pid, newborn.go());
    status.unwrap();
    let logged = || std::fs::read_to_string(&log_path).unwrap();
    assert!(until(|| logged().contains("begun")), "{}", logged());
    assert!(logged().contains("/dev/pts/0") && logged().contains("33 99"), "{}", logged());
    {
        let mut other = Keeper::connect(&scratch.run_dir()).unwrap().unwrap();
        let console = other.attach_console("c1").unwrap();
        let mut third = Keeper::connect(&scratch.run_dir()).unwrap().unwrap();
        assert!(matches!(third.attach_console("c1"), Err(LaunchError::Refused { .. })));
        rustix::io::write(&console.master, b"there\n").unwrap();
    }
    assert_eq!(keeper.wait(pid).unwrap().code, 5);
    assert!(until(|| logged().contains("got there")), "{}", logged());
    assert_eq!(keeper.status().unwrap().consoles, 0);
}

#[test]
fn root_ctrl_c_reaches_the_program_on_its_terminal() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    for init in [false, true] {
        let id = format!("c{init}");
        let mut newborn = keeper.spawn(scratch.spawn(&id)).unwrap();
        let mut plan = Plan::new();
        scratch.plan_root(&mut plan, &mut newborn);
        plan.devpts("/dev/pts", None, 64);
        plan.terminal(&Terminal::default());
        plan.sync();
        if init {
            plan.init();
        }
        let script = "trap 'exit 42' INT; echo begun; while :; do sleep 0.02; done";
        plan.exec(&program(&["sh", "-c", script]));
        newborn.send(plan).unwrap();
        let master = newborn.ready().unwrap().unwrap();
        let pid = newborn.pid;
        newborn.go().unwrap();
        let mut said = [0; 64];
        rustix::io::read(&master, &mut said).unwrap();
        rustix::io::write(&master, b"\x03").unwrap();
        assert_eq!(keeper.wait(pid).unwrap().code, 42, "init: {init}");
    }
}

#[test]
fn root_cgroup_view_begins_at_its_own() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let text = scratch.output(&mut keeper, "c1", "cat /proc/self/cgroup; ls /sys/cg", |plan| {
        plan.unshare(0x0200_0000);
        plan.cgroup2("/sys/cg");
    });
    assert!(text.contains("0::/\n"), "{text}");
    assert!(text.contains("cgroup.procs"), "{text}");
}

#[test]
fn root_born_in_a_given_network_namespace() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let net = |path: &str| std::fs::read_link(path).unwrap();
    // A namespace of a thread of ours.
    let other: OwnedFd = std::thread::spawn(|| {
        dormouse_kernel::call::unshare(dormouse_kernel::call::CloneFlags::NEWNET).unwrap();
        std::fs::File::open("/proc/thread-self/ns/net").unwrap().into()
    })
    .join()
    .unwrap();
    let mut pids = Vec::new();
    for (id, netns) in [("c1", Some(other.try_clone().unwrap())), ("c2", None)] {
        let mut newborn = keeper.spawn(Spawn { netns, ..scratch.spawn(id) }).unwrap();
        pids.push(net(&format!("/proc/{}/ns/net", newborn.pid)));
        drop(newborn.take_proc());
    }
    assert_ne!(pids[0], net("/proc/self/ns/net"));
    assert_eq!(pids[1], net("/proc/self/ns/net"));
    let begin = Instant::now();
    for _ in 0..100 {
        let netns = Some(other.try_clone().unwrap());
        drop(keeper.spawn(Spawn { netns, ..scratch.spawn("c1") }).unwrap());
    }
    println!("birth in another network namespace: {:?}", begin.elapsed() / 100);
}

#[test]
fn root_init_reaps_forwards_and_ends_with_the_program() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let script = "sh -c 'sleep 0.05 &'; sleep 0.3; cat /proc/1/comm /proc/1/cmdline; \
                  ps | grep -c sleep; exit 9";
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let (pid, _) = scratch.run_under_init(&mut keeper, "c1", &["sh", "-c", script], |plan| {
        let out = plan.fd(writer);
        let null = plan.fd(std::fs::File::open("/dev/null").unwrap().into());
        plan.stdio([null, out, out]);
    });
    let text = output(reader);
    assert_eq!(keeper.wait(pid).unwrap().code, 9);
    assert!(text.contains("dormouse-init"), "{text}");
    assert!(!text.contains(scratch.run_dir().to_str().unwrap()), "{text}");
    let script = "trap 'exit 11' TERM; while :; do sleep 0.05; done";
    let (pid, pidfd) = scratch.run_under_init(&mut keeper, "c2", &["sh", "-c", script], |_| {});
    std::thread::sleep(Duration::from_millis(200));
    pidfd::send_signal(pidfd.as_fd(), 15).unwrap();
    assert_eq!(keeper.wait(pid).unwrap().code, 11);
}

#[test]
fn root_engine_that_dies_leaves_no_process() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    // Before the plan, after the plan, and at the sync point.
    for stage in 0..3 {
        let mut client = Keeper::connect(&scratch.run_dir()).unwrap().unwrap();
        let id = format!("c{stage}");
        std::fs::create_dir_all(scratch.container_dir(&id)).unwrap();
        let mut newborn = client.spawn(scratch.spawn(&id)).unwrap();
        if stage > 0 {
            let mut plan = Plan::new();
            scratch.plan_root(&mut plan, &mut newborn);
            plan.sync();
            plan.exec(&program(&["sleep", "100"]));
            newborn.send(plan).unwrap();
        }
        if stage > 1 {
            newborn.ready().unwrap();
        }
        let pidfd = newborn.pidfd.try_clone().unwrap();
        drop((newborn, client));
        assert!(pidfd::wait(pidfd.as_fd(), Some(Duration::from_secs(20))).unwrap(), "{stage}");
    }
    assert!(until(|| keeper.status().unwrap().children == 0));
}

#[test]
fn root_settle_runs_when_the_spawner_is_gone_and_only_then() {
    let scratch = Scratch::new();
    let settled = scratch.path("settled");
    let log = settled.display();
    let script =
        format!("while read id; do echo $id >> {log}; echo $$ >> {log}.pids; echo >&0; done");
    let mut start = scratch.start();
    start.settle = ["/bin/busybox", "sh", "-c", &script].map(Into::into).to_vec();
    let mut keeper = Keeper::connect_or_start(&start).unwrap();
    let run = |client: &mut Keeper, id: &str, words: &[&str]| {
        std::fs::create_dir_all(scratch.container_dir(id)).unwrap();
        let spawn = Spawn { settle: true, ..scratch.spawn(id) };
        let mut newborn = client.spawn(spawn).unwrap();
        let mut plan = Plan::new();
        scratch.plan_root(&mut plan, &mut newborn);
        plan.sync();
        plan.exec(&program(words));
        newborn.send(plan).unwrap();
        newborn.ready().unwrap();
        let pid = newborn.pid;
        newborn.go().unwrap();
        pid
    };
    let read = || std::fs::read_to_string(&settled).unwrap_or_default();
    // Settled by who spawned it.
    let pid = run(&mut keeper, "mine", &["true"]);
    keeper.wait(pid).unwrap();
    keeper.settled(pid).unwrap();
    // The spawner has left before the end, and after it without a word.
    let mut client = Keeper::connect(&scratch.run_dir()).unwrap().unwrap();
    run(&mut client, "left", &["sleep", "0.1"]);
    drop(client);
    assert!(until(|| read() == "left\n"), "{}", read());
    let mut client = Keeper::connect(&scratch.run_dir()).unwrap().unwrap();
    let pid = run(&mut client, "killed", &["true"]);
    client.wait(pid).unwrap();
    drop(client);
    assert!(until(|| read() == "left\nkilled\n"), "{}", read());
    // Many at once are all settled.
    for n in 0..12 {
        let mut client = Keeper::connect(&scratch.run_dir()).unwrap().unwrap();
        run(&mut client, &format!("n{n}"), &["true"]);
    }
    assert!(until(|| read().lines().count() == 14), "{}", read());
    assert!(!read().contains("mine"));
    // By processes that settle one container after the other, and exit when there are no more.
    let mut keeper = Keeper::connect(&scratch.run_dir()).unwrap().unwrap();
    (0..200).for_each(|n| keeper.settle(&format!("m{n}")).unwrap());
    assert!(until(|| read().lines().count() == 214), "{}", read());
    let pids = std::fs::read_to_string(scratch.path("settled.pids")).unwrap();
    let pids: std::collections::BTreeSet<&str> = pids.lines().collect();
    assert!(pids.len() < 100, "{pids:?}");
    let is_there = |pid: &&str| std::path::Path::new("/proc").join(pid).exists();
    assert!(until(|| !pids.iter().any(is_there)), "{pids:?}");
}

/// The program may have been removed since the keeper was started.
#[test]
fn root_settler_that_cannot_be_executed_leaves_no_errand() {
    let scratch = Scratch::new();
    let mut start = scratch.start();
    start.settle = vec![scratch.path("missing").into()];
    let mut keeper = Keeper::connect_or_start(&start).unwrap();
    (0..6).for_each(|n| keeper.settle(&format!("m{n}")).unwrap());
    assert!(until(|| keeper.status().unwrap().settling == 0));
}

/// Four containers are settled at once, and those that take long do not hold up the end of others. Nor do those that
/// wait for their restart, which is any number.
#[test]
fn root_waiting_settlers_do_not_hold_up_other_containers() {
    let long = ["long1", "long2", "long3", "long4", "long5"].map(String::from);
    assert_others_are_settled(&long);
    let waiting: Vec<String> = (0..40).map(|n| format!("waits{n}")).collect();
    assert_others_are_settled(&waiting);
}

/// Has the settling of these containers last until another one is settled.
#[track_caller]
fn assert_others_are_settled(slow: &[String]) {
    let scratch = Scratch::new();
    let (settled, over) = (scratch.path("settled"), scratch.path("over"));
    let script = format!(
        "while read id; do case $id in waits*) echo -n '~' >&0;; esac; \
         [ $id = other ] || until [ -e {over} ]; do sleep 1; done; \
         echo $id >> {log}; echo >&0; done",
        over = over.display(),
        log = settled.display()
    );
    let mut start = scratch.start();
    start.settle = ["/bin/busybox", "sh", "-c", &script].map(Into::into).to_vec();
    let mut keeper = Keeper::connect_or_start(&start).unwrap();
    slow.iter().for_each(|id| keeper.settle(id).unwrap());
    keeper.settle("other").unwrap();
    let read = || std::fs::read_to_string(&settled).unwrap_or_default();
    let is_settled = until(|| read() == "other\n");
    std::fs::write(&over, "").unwrap();
    assert!(is_settled, "{}", read());
    assert!(until(|| read().lines().count() == slow.len() + 1), "{}", read());
}

/// A file system of one container may never answer. Four wakes run at once.
#[test]
fn root_blocked_wakes_do_not_hold_up_those_of_other_containers() {
    let scratch = Scratch::new();
    let place = scratch.path("wakes");
    std::fs::create_dir(&place).unwrap();
    let script = format!(
        "cd {}; while read id why; do echo $$ > $id; \
         case $id in blocked*) exec sleep 1000;; esac; echo >&0; done",
        place.display()
    );
    let mut start = scratch.start();
    start.wake = ["/bin/busybox", "sh", "-c", &script].map(Into::into).to_vec();
    let mut keeper = Keeper::connect_or_start(&start).unwrap();
    let event = rustix::event::eventfd(1, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let blocked: Vec<String> = (1..=4).map(|n| format!("blocked{n}")).collect();
    for id in &blocked {
        keeper.hold(id, 0, event.as_fd(), watch::READ).unwrap();
    }
    let pid = |id: &str| {
        let text = std::fs::read_to_string(place.join(id)).ok()?;
        rustix::process::Pid::from_raw(text.trim().parse().ok()?)
    };
    assert!(until(|| blocked.iter().all(|id| pid(id).is_some())), "four wakes run");
    keeper.hold("free", 0, event.as_fd(), watch::READ).unwrap();
    // A wake counts as blocked after ten seconds.
    let is_woken = (0..6).any(|_| until(|| pid("free").is_some()));
    // A waker without sleepers is not started again.
    for id in blocked.iter().map(String::as_str).chain(["free"]) {
        keeper.let_go(id).unwrap();
    }
    blocked.iter().filter_map(|id| pid(id)).for_each(|pid| {
        rustix::process::kill_process(pid, Signal::KILL).unwrap();
    });
    assert!(is_woken, "the fifth container waits for the others");
}

#[test]
fn root_killed_keeper_leaves_its_children_and_another_can_start() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let (_, pidfd) = scratch.run(&mut keeper, "c1", &["sleep", "100"], |_| {});
    let status = keeper.status().unwrap();
    let old = rustix::process::Pid::from_raw(status.pid as i32).unwrap();
    rustix::process::kill_process(old, Signal::KILL).unwrap();
    assert!(matches!(keeper.status(), Err(LaunchError::KeeperGone)));
    assert!(pidfd::is_alive(pidfd.as_fd()));
    assert!(Keeper::connect(&scratch.run_dir()).unwrap().is_none());
    let mut second = scratch.keeper();
    assert_ne!(second.status().unwrap().pid, status.pid);
    let (pid, _) = scratch.run(&mut second, "c2", &["true"], |_| {});
    assert_eq!(second.wait(pid).unwrap().code, 0);
    // Those of the first are not the second's.
    let (text, _) = scratch.exec(&mut second, &pidfd, "echo still here");
    assert_eq!(text, "still here\n");
    pidfd::send_signal(pidfd.as_fd(), 9).unwrap();
}

#[test]
fn root_keeper_ends_when_there_is_nothing_to_keep() {
    let scratch = Scratch::new();
    let keeper = scratch.keeper();
    let socket = scratch.run_dir().join("keeper.sock");
    assert!(socket.exists());
    drop(keeper);
    assert!(until(|| !socket.exists()));
    let begin = Instant::now();
    drop(scratch.keeper());
    println!("a keeper is there after {:?}", begin.elapsed());
    // Asked to end, it does so at once, but not while it keeps something.
    let mut keeper = scratch.keeper();
    let (pid, pidfd) = scratch.run(&mut keeper, "c1", &["sleep", "100"], |_| {});
    let other = Keeper::connect(&scratch.run_dir()).unwrap().unwrap();
    assert!(matches!(other.end(), Err(LaunchError::Refused { .. })));
    pidfd::send_signal(pidfd.as_fd(), 9).unwrap();
    keeper.wait(pid).unwrap();
    keeper.end().unwrap();
    assert!(!socket.exists());
}

#[test]
fn root_keeper_tidies_at_its_end() {
    let scratch = Scratch::new();
    let tidied = scratch.path("tidied");
    // Only in the host's namespace are the socket's place and this file.
    let socket = scratch.run_dir().join("keeper.sock");
    let script = format!("test -e {} || echo yes > {}", socket.display(), tidied.display());
    let mut start = scratch.start();
    start.tidy = ["/bin/busybox", "sh", "-c", &script].map(Into::into).to_vec();
    Keeper::connect_or_start(&start).unwrap().end().unwrap();
    assert!(until(|| std::fs::read_to_string(&tidied).is_ok_and(|text| text == "yes\n")));
}

#[test]
fn root_clients_that_start_at_once_share_one_keeper() {
    let scratch = Scratch::new();
    let pids: Vec<u32> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..16).map(|_| scope.spawn(|| scratch.keeper().status().unwrap().pid)).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(pids.iter().all(|pid| *pid == pids[0]), "{pids:?}");
}

#[test]
fn root_garbage_never_ends_the_keeper() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let pid = keeper.status().unwrap().pid;
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let null: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    for round in 0..2000 {
        let sock = scratch.raw_connection();
        let length = 1 + random() as usize % 200;
        let mut bytes: Vec<u8> = (0..length).map(|_| random() as u8).collect();
        // Half of them begin as a message does.
        if round % 2 == 0 && length > 8 {
            bytes[..4].copy_from_slice(b"DMK1");
            bytes[4..8].copy_from_slice(&[1, 0, 1 + (random() % 12) as u8, 0]);
        }
        let fds = vec![null.as_fd(); random() as usize % 4];
        let none = rustix::net::SendFlags::empty();
        dormouse_launch::wire::send(&sock, &bytes, &fds, none).unwrap();
    }
    assert_eq!(keeper.status().unwrap().pid, pid);
    assert!(until(|| keeper.status().unwrap().connections == 1));
    let (pid, _) = scratch.run(&mut keeper, "c1", &["true"], |_| {});
    assert_eq!(keeper.wait(pid).unwrap().code, 0);
}

#[test]
fn root_thousand_spawns_leak_nothing() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let pid = keeper.status().unwrap().pid;
    let open = || std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let memory = || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:").map(str::to_owned));
        line.unwrap().trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    // Printed for whoever is curious; benches/ holds the promise.
    let stages = ["birth", "plan", "ready", "exec", "end", "all"];
    let mut times = vec![Vec::new(); stages.len()];
    let (mut fds, mut kilobytes) = (0, 0);
    for n in 0..1000 {
        let mut marks = vec![Instant::now()];
        let mut newborn = keeper.spawn(scratch.spawn("c1")).unwrap();
        marks.push(Instant::now());
        let mut plan = Plan::new();
        scratch.plan_root(&mut plan, &mut newborn);
        plan.sync();
        plan.exec(&program(&["/bin/true"]));
        newborn.send(plan).unwrap();
        marks.push(Instant::now());
        newborn.ready().unwrap();
        marks.push(Instant::now());
        let pid = newborn.pid;
        newborn.go().unwrap();
        marks.push(Instant::now());
        assert_eq!(keeper.wait(pid).unwrap().code, 0);
        marks.push(Instant::now());
        for (stage, pair) in marks.windows(2).enumerate() {
            times[stage].push(pair[1] - pair[0]);
        }
        times[5].push(marks[5] - marks[0]);
        if n == 100 {
            (fds, kilobytes) = (open(), memory());
        }
    }
    for (stage, times) in stages.iter().zip(&mut times) {
        times.sort();
        println!("{stage:>6}: median {:?}, least {:?}", times[500], times[0]);
    }
    let each = dormouse_keeper::server::Server::CHILD_BYTES;
    println!("keeper {} kB, {each} bytes for a child", memory());
    assert_eq!(open(), fds);
    assert!(memory() <= kilobytes + 64, "{} kB after {kilobytes}", memory());
}

#[test]
fn root_many_descriptors_travel_with_a_plan() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let (pid, _) = scratch.run_with(&mut keeper, "c1", &["echo", "many"], |plan| {
        let null: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        for _ in 0..600 {
            plan.fd(null.try_clone().unwrap());
        }
        let out = plan.fd(writer.try_clone().unwrap());
        let null = plan.fd(null);
        plan.rlimit(7, 64, 64, false);
        plan.stdio([null, out, out]);
    });
    drop(writer);
    assert_eq!(output(reader), "many\n");
    assert_eq!(keeper.wait(pid).unwrap().code, 0);
}

#[test]
fn root_mounts_are_attached_where_they_belong() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let volume = scratch.path("volume");
    std::fs::create_dir(&volume).unwrap();
    std::fs::write(volume.join("hello"), "from outside\n").unwrap();
    let script = "cat /a/b/c/hello /etc/one/file /again/hello; touch /again/x; \
                  readlink /dev/fd; stat -c %a /run/lock; touch /made";
    let text = scratch.output(&mut keeper, "c1", script, |plan| {
        let dir = plan.fd(mount_of(&volume, None));
        plan.attach(dir, "/a/b/c", TargetKind::Dir, true);
        let file = plan.fd(mount_of(&volume.join("hello"), None));
        plan.attach(file, "etc//one/file", TargetKind::File, true);
        plan.bind("/a/b/c", "/again", true);
        plan.symlink("/proc/self/fd", "/dev/fd");
        plan.make_dir("/run/lock", 0o1777);
    });
    assert_eq!(text.matches("from outside").count(), 3, "{text}");
    assert!(text.contains("touch: /again/x: Read-only file system"), "{text}");
    assert!(text.contains("/proc/self/fd\n1777\n"), "{text}");
}

#[test]
fn root_read_only_root_is_read_only() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let mut newborn = keeper.spawn(scratch.spawn("c1")).unwrap();
    let mut plan = Plan::new();
    plan.become_root();
    let userns = pidfd::user_namespace(newborn.pidfd.as_fd()).unwrap();
    let root = plan.fd(mount_of(&scratch.root(), Some(userns.as_fd())));
    plan.root(root, true);
    let proc = plan.fd(newborn.take_proc().unwrap());
    // The mount point is made before the root is sealed.
    plan.proc(proc, "/made/proc");
    let out = plan.fd(writer);
    let null = plan.fd(std::fs::File::open("/dev/null").unwrap().into());
    plan.stdio([null, out, out]);
    plan.sync();
    plan.exec(&program(&["sh", "-c", "ls /made/proc/self/comm; touch /x"]));
    newborn.send(plan).unwrap();
    newborn.ready().unwrap();
    newborn.go().unwrap();
    let text = output(reader);
    assert!(text.starts_with("/made/proc/self/comm\n"), "{text}");
    assert!(text.contains("Read-only file system"), "{text}");
}

#[test]
fn root_wait_by_another_and_refusals() {
    let scratch = Scratch::new();
    let mut keeper = scratch.keeper();
    let (pid, pidfd) = scratch.run(&mut keeper, "c1", &["sleep", "0.2"], |_| {});
    let mut other = Keeper::connect(&scratch.run_dir()).unwrap().unwrap();
    assert_eq!(other.wait(pid).unwrap().code, 0);
    assert_eq!(keeper.wait(pid).unwrap().code, 0);
    assert!(matches!(other.wait(pid), Err(LaunchError::Refused { .. })));
    drop(pidfd);
    // A flag that is no namespace, and an id that is none.
    let bad = keeper.spawn(Spawn::new("c2", Kind::Init, 0x100));
    assert!(matches!(bad, Err(LaunchError::Refused { .. })));
    assert!(keeper.spawn(Spawn::new("../c2", Kind::Init, ALL)).is_err());
}

/// A newborn has the memory of the template that it asks for, and of no other.
#[test]
fn root_newborns_are_born_with_the_memory_of_a_template() {
    use dormouse_launch::template::{self, Area, Piece, Template};
    use std::os::unix::fs::FileExt;
    const AT: u64 = 0x10_0000_0000;
    let file = |name: &std::ffi::CStr| -> std::fs::File {
        rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap().into()
    };
    let refused = |result: Result<dormouse_launch::Newborn, LaunchError>| match result {
        Err(LaunchError::Refused { source, .. }) => source,
        other => panic!("{other:?}"),
    };
    let scratch = Scratch::new();
    let (mut keeper, mut owner) = (scratch.keeper(), scratch.keeper());
    let contents = file(c"contents");
    contents.write_all_at(&[7; 8192], 4096).unwrap();
    // The second area is where the keeper has something itself.
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", keeper.pid())).unwrap();
    let taken = maps.split('-').next().unwrap();
    let taken = u64::from_str_radix(taken, 16).unwrap();
    let area = |start: u64, pages: u64| Area {
        start,
        end: start + pages * 4096,
        no_reserve: false,
        huge_pages: None,
    };
    let mut areas = vec![area(AT, 4), area(taken, 1)];
    areas.sort_by_key(|area| area.start);
    let is_free: Vec<bool> = areas.iter().map(|area| area.start == AT).collect();
    let piece = |start| Piece { start, bytes: 4096, part: 0, offset: 8192 };
    let pieces = vec![piece(AT + 4096), piece(taken)];
    let list = file(c"list");
    Template { no_huge_pages: false, areas, pieces }.write(&list).unwrap();
    let parts: [OwnedFd; 1] = [contents.into()];
    owner.template("one", list.as_fd(), &parts).unwrap();
    assert_eq!(template::mapped(&list, 2).unwrap(), is_free);
    assert!(owner.template("one", list.as_fd(), &parts).is_err(), "there is one of that name");

    let born = |template: &str| Spawn { template: Some(template.into()), ..scratch.spawn("c1") };
    assert_eq!(refused(keeper.spawn(born("two"))), rustix::io::Errno::NOENT);
    for _ in 0..2 {
        let mut newborn = keeper.spawn(born("one")).unwrap();
        let status = std::fs::read_to_string(format!("/proc/{}/status", newborn.pid)).unwrap();
        assert!(status.contains(&format!("\nPPid:\t{}\n", keeper.pid())), "{status}");
        let memory = std::fs::File::open(format!("/proc/{}/mem", newborn.pid)).unwrap();
        let mut pages = [1; 4 * 4096];
        memory.read_exact_at(&mut pages, AT).unwrap();
        let is_right = |(n, byte): (usize, &u8)| *byte == if n / 4096 == 1 { 7 } else { 0 };
        assert!(pages.iter().enumerate().all(is_right));
        // It lives as any other.
        let mut plan = Plan::new();
        scratch.plan_root(&mut plan, &mut newborn);
        plan.exec(&program(&["sh", "-c", "exit 3"]));
        newborn.send(plan).unwrap();
        let pid = newborn.pid;
        newborn.go().unwrap();
        assert_eq!(keeper.wait(pid).unwrap().code, 3);
    }
    // Nobody else waits while it is at work; whoever does is answered when it is, or when it has ended.
    let children = format!("/proc/{0}/task/{0}/children", keeper.pid());
    let template = std::fs::read_to_string(children).unwrap();
    let is_it = |pid: &&str| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
        name.is_ok_and(|name| name == "dormouse-share\n")
    };
    let template = template.split_ascii_whitespace().find(is_it).expect("it is the keeper's");
    let template = rustix::process::Pid::from_raw(template.parse().unwrap()).unwrap();
    let signal = |signal| rustix::process::kill_process(template, signal).unwrap();
    use rustix::process::Signal;
    signal(Signal::STOP);
    let expected = keeper.expect(born("one")).unwrap();
    let mut other = scratch.keeper();
    assert_eq!(refused(other.spawn(born("one"))), rustix::io::Errno::BUSY, "one at a time");
    drop(other.spawn(scratch.spawn("c2")).unwrap());
    signal(Signal::CONT);
    drop(keeper.born(expected).unwrap());
    // One who ends before it is told of, as it sees that nobody waits for it any more, is no child.
    signal(Signal::STOP);
    drop(other.expect(born("one")).unwrap());
    drop(other);
    signal(Signal::CONT);
    assert!(until(|| keeper.status().unwrap().children == 0));
    // It may still be at work for the one that has ended.
    let is_born = || match keeper.spawn(born("one")) {
        Err(LaunchError::Refused { source: rustix::io::Errno::BUSY, .. }) => false,
        newborn => newborn.map(drop).is_ok(),
    };
    assert!(until(is_born));
    signal(Signal::STOP);
    let expected = keeper.expect(born("one")).unwrap();
    let busy = refused(scratch.keeper().spawn(born("one")));
    assert_eq!(busy, rustix::io::Errno::BUSY, "it was asked");
    signal(Signal::KILL);
    assert_eq!(refused(keeper.born(expected)), rustix::io::Errno::CHILD);
    assert_eq!(refused(keeper.spawn(born("one"))), rustix::io::Errno::NOENT);
    owner.template("one", list.as_fd(), &parts).unwrap();
    // What only the host's root may map no clone gets.
    let lowest = std::fs::read_to_string("/proc/sys/vm/mmap_min_addr").unwrap();
    let lowest = lowest.trim().parse::<u64>().unwrap().max(4096);
    let low = file(c"list");
    Template { areas: vec![area(lowest, 1)], ..Template::default() }.write(&low).unwrap();
    let is_refused = |done: Result<(), LaunchError>| match done {
        Err(LaunchError::Refused { source, .. }) => source == rustix::io::Errno::BADMSG,
        _ => false,
    };
    assert!(!is_refused(owner.template("low", low.as_fd(), &parts)));
    if lowest > 4096 {
        Template { areas: vec![area(lowest - 4096, 1)], ..Template::default() }
            .write(&low)
            .unwrap();
        assert!(is_refused(owner.template("lower", low.as_fd(), &parts)));
    } else {
        eprintln!("SKIPPED: everybody may map all but the first page here (vm.mmap_min_addr)");
    }
    // It ends with the connection of whoever asked for it.
    drop(owner);
    assert!(until(|| matches!(keeper.spawn(born("one")), Err(LaunchError::Refused { .. }))));
}
