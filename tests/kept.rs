//! State that a checkpoint keeps or refuses by name although programs seldom use it: alternate stacks,
//! restartable sequences, restrictions of a process by itself, unusual sharing, guard regions, options of
//! sockets, signal-driven I/O.

use std::collections::BTreeMap;
use std::os::fd::AsFd;

use super::*;

workloads! {
    vm_restored_tasks_have_no_alternate_stack_of_the_loader: "altstack";
    vm_checkpoint_aborts_restartable_sequences: "sequence";
    vm_checkpoint_keeps_options_of_tcp_connections: "reuse";
    vm_dispatches_of_system_calls_stay: "dispatch";
    vm_clients_without_data_of_deferring_listeners_are_accepted: "defer";
    vm_periodic_timers_with_untaken_expiries_go_on: "ticking";
    vm_restrictions_by_the_process_itself_stay: "sandbox";
    vm_threads_with_a_directory_of_their_own_keep_it: "place";
    vm_threads_wait_until_a_socket_has_room: "full";
}

/// Runs a workload that is restored each round, and one that continues each round.
#[track_caller]
fn keeps(name: &str) {
    let host = host();
    round_trip(&host, name, &["--net", "none"]);
    if slowness() == 1 {
        run_on(&host, name, &["--net", "none"]);
    }
}

#[test]
fn vm_processes_share_descriptors_and_directories_again() {
    keeps("joint");
}

#[test]
fn vm_threads_with_descriptors_of_their_own_keep_them() {
    keeps("ownfiles");
}

/// Sharing that a restore does not make again is refused.
#[test]
fn vm_checkpoint_refuses_unusual_sharing_by_name() {
    let host = host();
    let cases = [
        ("memory", "it shares memory (CLONE_VM) with process 1"),
        ("crossed", "and its descendants share descriptors (CLONE_FILES)"),
        ("root", "it shares a working directory (CLONE_FS) with process 2 below another root"),
        ("thread", "shares descriptors (CLONE_FILES) with a task of process"),
    ];
    for (what, why) in cases {
        refuses(&host, what, why, true);
    }
}

#[test]
fn vm_checkpoint_refuses_landlock_by_name() {
    let host = host();
    refuses(&host, "landlock", "restricted itself by Landlock", true);
    refuses(&host, "landlock of a thread", "restricted itself by Landlock", false);
}

/// Connections whose state the kernel does not give back are refused.
#[test]
fn vm_checkpoint_refuses_unreadable_tcp_connections_by_name() {
    let host = host();
    let why = "a TCP connection with urgent data (MSG_OOB) that is not read yet";
    refuses(&host, "urgent", why, true);
    refuses(&host, "urgent, read", why, false);
}

/// The headers of the first packet of a connection are refused until they are read.
#[test]
fn vm_checkpoint_refuses_saved_headers_of_tcp_requests_by_name() {
    let host = host();
    let why = "(TCP_SAVED_SYN)";
    refuses(&host, "request", why, true);
    refuses(&host, "request, queued", "(TCP_SAVE_SYN)", true);
    start(&host, "apart", &["--net", "none", "--env", "SHARES=request, read"]);
    wait_for_line(&host, "apart", "ready 0");
    host.dm(&["checkpoint", "apart"]).ok();
    host.dm(&["restore", "apart"]).ok();
}

/// Keys of TCP segments are found where the kernel has the module `tcp_diag`.
#[test]
fn checkpoint_refuses_signed_tcp_sockets_by_name() {
    let host = host();
    let why = "a socket with keys for its segments (TCP_MD5SIG)";
    refuses(&host, "signed", why, true);
    refuses(&host, "signed, six", why, true);
}

/// A program of a group of sockets is found by BPF.
#[test]
fn vm_checkpoint_refuses_sockets_with_a_program_for_their_group_by_name() {
    let host = host();
    let why = "a program that distributes what arrives (SO_ATTACH_REUSEPORT_CBPF)";
    refuses(&host, "distributed", why, true);
    refuses(&host, "distributed datagrams", why, true);
}

/// A checkpoint that leaves the container running puts no connection into a queue.
#[test]
fn vm_checkpoint_leaves_clients_without_data_out_of_the_queue() {
    run_on(&host(), "defer", &["--net", "none", "--env", "LIVE=1"]);
}

/// A client outside has connected to a listener with TCP_DEFER_ACCEPT and has sent nothing. The client
/// sends its first data while the server is absent, or after the restore.
#[test]
fn vm_outside_client_that_has_sent_no_data_is_answered_after_restore() {
    let host = host();
    start(&host, "defer", &["--env", "OUTSIDE=1"]);
    for round in 0..rounds() {
        wait_for_line(&host, "defer", &format!("ready {round}"));
        let address = host.address_of("defer");
        let client = host.in_network(move || TcpStream::connect((address, 7003)));
        let mut client = client.join().expect("no panic").expect("the server listens");
        client.set_read_timeout(Some(Duration::from_secs(20) * slowness())).expect("a socket");
        host.dm(&["checkpoint", "--leave-running", "defer"]).ok();
        host.dm(&["checkpoint", "defer"]).ok();
        let send = |mut client: &TcpStream| client.write_all(&[7]).expect("the connection is open");
        let is_early = round % 2 == 1;
        if is_early {
            send(&client);
        }
        host.dm(&["restore", "defer"]).ok();
        if !is_early {
            send(&client);
        }
        go_on(&host, "defer", round);
        let mut answer = [0];
        client.read_exact(&mut answer).expect("an answer");
        assert_eq!(answer, [8], "round {round}");
    }
    wait_for_line(&host, "defer", "ok");
}

/// A container with an own domain's stack that lasts: another one runs in it.
fn host_with_lasting_stack() -> Host {
    let host = host();
    host.dm(&["run", "-d", "--name", "lasts", "workloads", "sleep", "1000"]).ok();
    host
}

/// The ended connections (TIME_WAIT and alike) at a port that the stack of a container lists, of every container, by
/// their local address.
fn ended_connections(host: &Host, port: u16) -> BTreeMap<String, usize> {
    let pid = host.inspect("lasts")["pid"].as_u64().expect("the container runs");
    let table =
        |family| fs::read_to_string(format!("/proc/{pid}/net/{family}")).unwrap_or_default();
    let mut all = BTreeMap::new();
    for line in format!("{}{}", table("tcp"), table("tcp6")).lines() {
        let mut words = line.split_ascii_whitespace().skip(1);
        let Some(at) = words.next().filter(|at| at.ends_with(&format!(":{port:04X}"))) else {
            continue;
        };
        if words.nth(1).is_some_and(|state| ["05", "06"].contains(&state)) {
            *all.entry(at.to_owned()).or_insert(0) += 1;
        }
    }
    all
}

/// Connections that a program has ended first keep the address of its listener for a minute in a stack that lasts,
/// if the listener has no SO_REUSEADDR.
#[test]
fn vm_listeners_are_restored_beside_connections_that_just_ended() {
    let host = host_with_lasting_stack();
    round_trip(&host, "finished", &["--env", "WAITS=1"]);
    round_trip(&host, "finished", &["--net", "none"]);
    start(&host, "finished", &["--env", "OUTSIDE=1"]);
    for round in 0..rounds() {
        wait_for_line(&host, "finished", &format!("listens {round}"));
        let address = host.address_of("finished");
        // The client closes after the server.
        let call = move || {
            for port in [7104, 7103] {
                let mut client = TcpStream::connect((&*address, port)).expect("the server listens");
                client.write_all(b"a").expect("it is open");
                let mut answer = Vec::new();
                client.read_to_end(&mut answer).expect("an answer");
                assert_eq!(answer, b"b");
            }
        };
        host.in_network(call).join().expect("no panic");
        wait_for_line(&host, "finished", &format!("ready {round}"));
        assert!(!ended_connections(&host, 7104).is_empty(), "round {round}");
        host.dm(&["checkpoint", "finished"]).ok();
        host.dm(&["restore", "finished"]).ok();
        go_on(&host, "finished", round);
    }
    wait_for_line(&host, "finished", "ok");
}

/// As with a new network namespace, a program that is started again finds its address free.
#[test]
fn vm_restarted_program_finds_its_address_free() {
    let host = host_with_lasting_stack();
    start(&host, "finished", &[]);
    wait_for_line(&host, "finished", "ready 0");
    assert!(!ended_connections(&host, 7101).is_empty());
    for _ in 0..2 {
        let began = |host: &Host| host.dm(&["logs", "finished"]).stdout.matches("ready 0").count();
        let before = began(&host);
        host.dm(&["restart", "--time", "0", "finished"]).ok();
        let is_up = || began(&host) > before || host.state_of("finished") != "running";
        assert!(wait_until(soon(), is_up));
        assert!(began(&host) > before, "{}", host.dm(&["logs", "finished"]).stdout);
    }
}

/// A restore takes no connection of another container, and no address at which another socket listens.
#[test]
fn vm_restore_ends_no_connection_of_other_containers() {
    let host = host_with_lasting_stack();
    for name in ["one", "other"] {
        let words =
            ["run", "-d", "--name", name, "--env", "ROUNDS=9", "workloads", "/bin/finished"];
        host.dm(&words).ok();
        wait_for_line(&host, name, "ready 0");
    }
    host.dm(&["checkpoint", "one"]).ok();
    // Later than those of the first one.
    host.dm(&["exec", "other", "touch", "/go-0"]).ok();
    wait_for_line(&host, "other", "ready 1");
    let all = ended_connections(&host, 7101);
    host.dm(&["restore", "one"]).ok();
    let rest = ended_connections(&host, 7101);
    // Each address is of one container.
    let is_whole = |(at, count): (&String, &usize)| all.get(at).is_some_and(|all| count <= all);
    assert!(rest.iter().all(is_whole), "{rest:?} of {all:?}");
    assert!(!rest.is_empty() && rest.len() < all.len(), "{rest:?} of {all:?}");
    host.dm(&["exec", "one", "touch", "/go-0"]).ok();
    wait_for_line(&host, "one", "ready 1");
    // A process outside of all containers listens at its address.
    let address = host.address_of("one");
    host.dm(&["checkpoint", "one"]).ok();
    let pid = host.inspect("lasts")["pid"].as_u64().expect("the container runs");
    let namespace = fs::File::open(format!("/proc/{pid}/ns/net")).expect("it runs");
    let taken = std::thread::spawn(move || {
        let kind = Some(rustix::thread::LinkNameSpaceType::Network);
        rustix::thread::move_into_link_name_space(namespace.as_fd(), kind).expect("root may");
        std::net::TcpListener::bind((address, 7104))
    });
    let listener = taken.join().expect("no panic").expect("the address is free");
    let out = host.dm(&["restore", "one"]);
    assert!(out.status != 0 && out.stderr.contains("Address already in use"), "{out}");
    drop(listener);
    host.dm(&["restore", "one"]).ok();
    wait_for_line(&host, "one", "ready 1");
}

/// A new network namespace has settings of its host. A restore on a host with other ones keeps them: here the records
/// are those of such a host.
#[test]
fn vm_network_namespace_keeps_the_settings_of_its_first_host() {
    let host = host();
    let rights = ["--net", "none", "--cap-add", "SYS_ADMIN", "--cap-add", "NET_ADMIN"];
    let script = "unshare -n sh -c 'touch /up; exec sleep 100000' & wait";
    let words = [&["run", "-d", "--name", "a"], &rights[..], &["workloads", "sh", "-c", script]];
    host.dm(&words.concat()).ok();
    host.wait_inside("a", "test -e /up");
    let forwards = || {
        let look = "nsenter -t $(pidof sleep) -n cat /proc/sys/net/ipv4/ip_forward";
        let out = host.dm(&["exec", "--privileged", "a", "sh", "-c", look]);
        out.ok().trim().to_owned()
    };
    let before = forwards();
    let after = if before == "0" { "1" } else { "0" };
    host.dm(&["checkpoint", "a"]).ok();
    rewrite(&newest(&host, "a"), |records| {
        let nets = records.objects.iter_mut().filter_map(|object| match &mut object.thing {
            Thing::Net(net) => Some(net),
            _ => None,
        });
        let mut count = 0;
        for (path, value) in nets.flat_map(|net| &mut net.inherited) {
            if ["ipv4/ip_forward", "ipv4/conf/all/forwarding"].contains(&&**path) {
                assert_eq!(*value, before);
                after.clone_into(value);
                count += 1;
            }
        }
        assert_eq!(count, 2);
    });
    host.dm(&["restore", "a"]).ok();
    assert_eq!(forwards(), after);
    // The next checkpoint is of a stack that differs from a new one.
    host.dm(&["checkpoint", "a"]).ok();
    host.dm(&["restore", "a"]).ok();
    assert_eq!(forwards(), after);
}

/// The container has removed or renumbered its user since its start.
#[test]
fn vm_container_without_its_user_is_restored() {
    let host = host();
    let words = ["run", "-d", "--name", "a", "--user", "app:app", "app", "sleep", "100000"];
    let image = "mkdir -p /etc; echo app:x:1234:1235::/:/bin/sh >>/etc/passwd; echo app:x:1235: >>/etc/group";
    host.dm(&["run", "--name", "made", "workloads", "sh", "-c", image]).ok();
    host.dm(&["commit", "made", "app"]).ok();
    host.dm(&words).ok();
    let exec = ["exec", "--user", "0", "a", "sh", "-c"];
    let as_root = |script: &str| host.dm(&[&exec[..], &[script]].concat()).ok();
    for change in ["sed -i s/1234/1236/ /etc/passwd", "sed -i /app/d /etc/passwd /etc/group"] {
        as_root(change);
        let own = || as_root("grep -E '^(Uid|Gid|Groups)' /proc/1/status");
        let before = own();
        assert!(before.contains("1234") && before.contains("1235"), "{before}");
        host.dm(&["checkpoint", "a"]).ok();
        host.dm(&["restore", "a"]).ok();
        assert_eq!(own(), before, "{change}");
        host.dm(&["sleep", "a"]).ok();
        host.dm(&["wake", "a"]).ok();
        assert_eq!(own(), before, "{change}");
    }
    host.dm(&["clone", "--name", "b", "a"]).ok();
    host.dm(&["clone", "--asleep", "--name", "c", "a"]).ok();
    for name in ["b", "c"] {
        let out = host.dm(&["exec", "--user", "0", name, "sh", "-c", "grep ^Uid /proc/1/status"]);
        assert!(out.stdout.contains("1234"), "{name}: {out}");
    }
}

/// A timer queues its signal behind another of the same number, as no call of the restore can.
#[test]
fn vm_checkpoint_refuses_a_timer_signal_behind_another_by_name() {
    let why = "signal 10 of a POSIX timer is pending behind another signal of that number";
    refuses(&host(), "queued twice", why, false);
}

/// Runs the workload `apart`, of which `explain` and `checkpoint` name what is refused; it goes on.
#[track_caller]
fn refuses(host: &Host, what: &str, why: &str, is_explained: bool) {
    let shares = format!("SHARES={what}");
    start(host, "apart", &["--net", "none", "--env", &shares]);
    wait_for_line(host, "apart", "ready 0");
    if is_explained {
        let out = host.dm(&["explain", "apart"]);
        assert!(out.status == 1 && out.stdout.contains(why), "{what}: {out}");
    }
    let out = host.dm(&["checkpoint", "apart"]);
    assert!(out.status != 0 && out.stderr.contains(why), "{what}: {out}");
    assert_eq!(host.state_of("apart"), "running");
    host.dm(&["exec", "apart", "touch", "/go-0"]);
    wait_for_line(host, "apart", "ok");
    host.dm(&["rm", "--force", "apart"]).ok();
}

/// A program that is asleep handles the stop signal like one that is awake.
#[test]
fn vm_stop_of_a_sleeper_runs_its_signal_handler() {
    let host = host();
    let script = "trap 'echo asked; exit 7' TERM; touch /dev/shm/up; sleep 100000 & wait";
    let words = ["run", "-d", "--name", "a", "--net", "none", "workloads", "sh", "-c", script];
    host.dm(&words).ok();
    host.wait_inside("a", "test -e /dev/shm/up");
    let asked = || host.dm(&["logs", "a"]).stdout.matches("asked").count();
    host.dm(&["sleep", "a"]).ok();
    host.dm(&["restart", "a"]).ok();
    assert_eq!((host.state_of("a").as_str(), asked()), ("running", 1));
    host.wait_inside("a", "test -e /dev/shm/up");
    host.dm(&["sleep", "a"]).ok();
    host.wait_for_state("a", "asleep");
    host.dm(&["stop", "a"]).ok();
    assert_eq!(host.state_of("a"), "stopped");
    assert_eq!((host.dm(&["wait", "a"]).ok().as_str(), asked()), ("7", 2));
    // Without time for an answer, and by `kill`, it is not woken.
    for verb in [&["stop", "--time", "0", "a"][..], &["kill", "a"]] {
        host.dm(&["start", "a"]).ok();
        host.wait_inside("a", "test -e /dev/shm/up");
        host.dm(&["sleep", "a"]).ok();
        host.dm(verb).ok();
        assert_eq!((host.dm(&["wait", "a"]).ok().as_str(), asked()), ("137", 2), "{verb:?}");
    }
}

workloads! {
    vm_guards_within_memory_stay: "guard";
    vm_segments_of_tcp_connections_stay_as_large: "segment";
    vm_barriers_and_ids_for_files_stay: "barrier";
    vm_notices_of_open_files_stay: "notice";
    vm_stops_stay_waitable: "stops";
    vm_sockets_with_withdrawn_options_are_restored: "together";
    vm_udp_sockets_stay_shut_down: "udpshut";
    vm_many_open_files_of_one_file: "many";
    vm_options_of_sockets_stay: "sockopt";
    vm_privileged_options_of_sockets_stay: "sockopt", "--cap-add", "NET_ADMIN", "--env", "PRIVILEGED=1";
    vm_sockets_at_addresses_of_no_device_are_restored: "nodevice";
    vm_datagrams_received_as_one_keep_their_lengths: "gro";
    vm_settings_for_later_memory_stay: "future";
    vm_multicast_groups_of_sockets_stay: "groups";
    vm_flags_and_locks_of_open_files_stay: "flags";
    vm_owners_of_sockets_and_pipes_stay: "maker";
    vm_choice_of_memory_in_core_dumps_stays: "dump";
    vm_address_chosen_by_the_kernel_is_not_bound: "chosen";
    vm_options_with_values_of_another_network_stay: "preset",
        "--sysctl", "net.ipv6.bindv6only=1", "--sysctl", "net.ipv4.ip_default_ttl=77";
    vm_changes_of_the_own_namespaces_stay: "names", "--cap-add", "SYS_ADMIN";
    vm_changes_beside_configured_settings_stay: "names", "--cap-add", "SYS_ADMIN",
        "--hostname", "first", "--sysctl", "kernel.domainname=its.domain",
        "--sysctl", "kernel.shm_rmid_forced=1", "--sysctl", "kernel.msgmni=77";
    vm_zombies_keep_their_ids_and_groups: "zombie";
    vm_daemon_with_a_zombie_in_the_group_of_its_ended_leader_is_restored: "orphan";
    vm_deleted_files_of_a_private_directory_stay: "ownplace", "--cap-add", "SYS_ADMIN";
    vm_orphans_of_a_later_subreaper_stay_where_they_are: "adopted";
    vm_nice_values_of_sessions_stay: "autogroup";
    vm_expected_lives_of_data_stay: "hint";
    vm_programs_executed_from_memory_are_restored: "memexe";
    vm_names_of_mounted_file_systems_stay: "sources", "--cap-add", "SYS_ADMIN";
    vm_pipes_beyond_the_pages_of_one_user_keep_their_sizes: "pipes";
    vm_open_files_up_to_the_limit_of_their_process_stay: "seats";
    vm_twelve_thousand_open_files_of_twenty_thousand_stay: "seats", "--env", "MORE=11500";
}

#[test]
fn vm_memory_policies_stay() {
    keeps("policy");
}

#[test]
fn vm_stop_signals_of_stopped_processes_stay_pending() {
    keeps("halt");
}

/// Whether a task that this host starts has no login yet. Where an operator has logged in, all containers have that
/// login, which only privileges over the host change.
fn has_no_login() -> bool {
    let login = fs::read_to_string("/proc/self/loginuid");
    let is_none = login.is_ok_and(|text| text.trim() == u32::MAX.to_string());
    if !is_none {
        eprintln!("SKIPPED: this host has no audit, or its own login (/proc/self/loginuid)");
    }
    is_none
}

#[test]
fn vm_logins_stay() {
    if has_no_login() {
        keeps("login");
    }
}

#[test]
fn vm_checkpoint_refuses_a_login_below_another_root_by_name() {
    if has_no_login() {
        let host = host();
        start(&host, "lost", &["--net", "none", "--env", "HAS=login"]);
        wait_for_line(&host, "lost", "ready 0");
        let why = "it has a login (loginuid) in a user namespace or below a root of its own";
        for verb in ["explain", "checkpoint", "sleep"] {
            let out = host.dm(&[verb, "lost"]);
            assert!(
                out.status != 0 && format!("{}{}", out.stdout, out.stderr).contains(why),
                "{out}"
            );
            assert_eq!(host.state_of("lost"), "running");
        }
    }
}

/// Contexts have their ids and places, threads wait on, and every event arrives once.
#[test]
fn vm_asynchronous_io_keeps_its_rings_and_events() {
    let host = host();
    round_trip(&host, "aio", &["--net", "none"]);
    if slowness() == 1 {
        run_on(&host, "aio", &["--net", "none"]);
    }
}

/// Requests that are in flight when the processes stop are finished before anything is read, and their events
/// arrive.
#[test]
fn vm_direct_io_goes_on_through_checkpoints() {
    let host = host();
    let busy = ["--net", "none", "--env", "BUSY=1"];
    round_trip(&host, "aio", &busy);
    start(&host, "aio", &busy);
    for round in 0..rounds() {
        wait_for_line(&host, "aio", &format!("ready {round}"));
        for _ in 0..5 {
            host.dm(&["checkpoint", "--leave-running", "aio"]).ok();
        }
        for _ in 0..2 {
            host.dm(&["sleep", "aio"]).ok();
            host.dm(&["wake", "aio"]).ok();
        }
        go_on(&host, "aio", round);
    }
    wait_for_line(&host, "aio", "ok");
}

/// Asynchronous I/O that no restore could make again is refused, and the processes go on.
#[test]
fn vm_checkpoint_refuses_unsavable_asynchronous_io_by_name() {
    let host = host();
    let cases = [
        ("poll", "with a request that waits for an event of a file (IOCB_CMD_POLL)"),
        ("child", "of another process"),
        ("unmapped", "it has unmapped the ring of a context of asynchronous I/O (io_setup)"),
        ("changed", "whose ring the process has changed"),
        ("full", "with more events to be collected than it was made for"),
    ];
    for (what, why) in cases {
        let lost = format!("LOST={what}");
        start(&host, "aio", &["--net", "none", "--env", &lost]);
        wait_for_line(&host, "aio", "ready 0");
        let out = host.dm(&["explain", "aio"]);
        assert!(out.status == 1 && out.stdout.contains(why), "{what}: {out}");
        for verb in ["checkpoint", "sleep"] {
            let out = host.dm(&[verb, "aio"]);
            assert!(out.status != 0 && out.stderr.contains(why), "{what}: {out}");
            assert_eq!(host.state_of("aio"), "running");
        }
        host.dm(&["exec", "aio", "touch", "/go-0"]);
        wait_for_line(&host, "aio", "ok");
        host.dm(&["rm", "--force", "aio"]).ok();
    }
}

/// Asynchronous I/O is a limit of the whole host. A sleeper whose share another container has taken stays
/// asleep, and wakes when the share is free again.
#[test]
fn vm_wake_beyond_the_limit_of_asynchronous_io_names_it_and_succeeds_later() {
    let lock = fs::File::create(image::cache().join("aio.lock")).expect("target can be written");
    lock.lock().expect("a file can be locked");
    let limit = fs::read_to_string("/proc/sys/fs/aio-max-nr").expect("the kernel has it");
    let limit: u64 = limit.trim().parse().expect("a number");
    // Less than half remains for tests that run at the same time.
    let taken = limit / 10 * 6;
    let takes = format!("TAKES={taken}");
    let used = || {
        let text = fs::read_to_string("/proc/sys/fs/aio-nr").expect("the kernel has it");
        text.trim().parse::<u64>().expect("a number")
    };
    let host = host();
    let run = |name: &str| {
        // The kernel returns the share of an ended process a little later.
        assert!(wait_until(soon(), || used() + taken <= limit), "{} of {limit} are used", used());
        // No timer wakes it.
        let options = ["run", "-d", "--net", "none", "--wake-on", "call", "--env", &takes];
        host.dm(&[&options[..], &["--name", name, "workloads", "/bin/aio"]].concat()).ok();
        wait_for_line(&host, name, "ready 0");
    };
    run("a");
    // A short wait of its process that ends while it is saved wakes it again.
    let stays_asleep = || {
        host.dm(&["sleep", "a"]).ok();
        !wait_until(Duration::from_millis(500), || host.state_of("a") != "asleep")
    };
    assert!(wait_until(soon(), stays_asleep));
    run("b");
    let out = host.dm(&["wake", "a"]);
    let why = "(/proc/sys/fs/aio-max-nr: ";
    assert!(out.status != 0 && out.stderr.contains(why), "{out}");
    assert_eq!(host.state_of("a"), "asleep");
    host.dm(&["rm", "--force", "b"]).ok();
    // As above.
    assert!(wait_until(soon(), || host.dm(&["wake", "a"]).status == 0));
    host.dm(&["exec", "a", "touch", "/go-0"]);
    wait_for_line(&host, "a", "ok");
}

/// A socket uses a module of the kernel that is unloaded while its container sleeps. No container loads it.
#[test]
fn vm_wake_without_a_module_names_it_and_succeeds_when_it_is_loaded() {
    const MODULE: &str = "tcp_htcp";
    let host = host();
    let place = Path::new("/sys/module").join(MODULE);
    let load = || host.sh(&format!("modprobe {MODULE}"));
    if place.exists() {
        return eprintln!("SKIPPED: this host uses the module {MODULE}");
    }
    if load().status != 0 || !place.join("refcnt").exists() {
        return eprintln!("SKIPPED: the kernel has no module {MODULE}");
    }
    // A program that waits for nothing is not woken before the test wakes it.
    let options = ["--net", "none", "--cap-add", "NET_ADMIN", "--env", "STILL=1"];
    let run = ["run", "-d", "--name", "a"];
    host.dm(&[&run[..], &options, &["workloads", "/bin/congestion"]].concat()).ok();
    wait_for_line(&host, "a", "ready 0");
    host.dm(&["sleep", "a"]).ok();
    host.wait_for_state("a", "asleep");
    // The kernel frees the sockets of ended processes a little later.
    let unload = format!("rmmod {MODULE}");
    assert!(wait_until(soon(), || host.sh(&unload).status == 0), "{}", host.sh(&unload));
    for verb in ["wake", "exec"] {
        let words: &[&str] = if verb == "exec" { &["exec", "a", "true"] } else { &["wake", "a"] };
        let out = host.dm(words);
        let why = format!("the congestion control 'htcp' (module {MODULE})");
        assert!(out.status != 0 && out.stderr.contains(&why), "{verb}: {out}");
        host.wait_for_state("a", "asleep");
        assert!(host.inspect("a")["wake_failed"]["cause"].to_string().contains(&why), "{verb}");
        let shown = host.dm(&["ps", "--no-trunc"]).ok();
        assert!(shown.contains("(wake failed: ") && shown.contains(&why), "{shown}");
    }
    load().ok();
    host.dm(&["wake", "a"]).ok();
    assert_eq!(host.state_of("a"), "running");
    host.dm(&["exec", "a", "true"]).ok();
    let uses = fs::read_to_string(place.join("refcnt")).expect("it is loaded");
    assert_eq!(uses.trim(), "1", "the socket has its control again");
    host.dm(&["rm", "--force", "a"]).ok();
    // As the host was before; a socket may still be there.
    wait_until(soon(), || host.sh(&unload).status == 0);
}

/// Objects that a restore could not make again are refused while all processes run.
#[test]
fn vm_checkpoint_refuses_unrestorable_objects_by_name() {
    let host = host();
    start(&host, "lost", &["--net", "none", "--env", "HAS=own"]);
    wait_for_line(&host, "lost", "ready 0");
    host.dm(&["checkpoint", "lost"]).ok();
    host.dm(&["restore", "lost"]).ok();
    host.dm(&["exec", "lost", "touch", "/go-0"]);
    wait_for_line(&host, "lost", "ok");
    host.dm(&["rm", "--force", "lost"]).ok();
    // Keys are the last: the kernel frees keys some time after the processes that had them, and another
    // container with the same users would see it.
    let cases = [
        ("ended", "/status"),
        ("thread", "/status', which is of a process"),
        ("maps", "/maps', which is of a process"),
        ("fdinfo", "/fdinfo', which is of a process"),
        ("oom_score_adj", "/oom_score_adj', which is of a process"),
        ("renamed", "'/tmp/old/socket', whose file has another name now"),
        ("numbers", "numbers, and its limit is 600 (ulimit -n)"),
        ("place", "at a place that its processes have made in /dev"),
        ("loose", "which no process has attached"),
        ("covered file", "'/tmp/place/file', which the mount of tmpfs at '/tmp/place' covers"),
        ("covered directory", "'/tmp/place', which the mount of tmpfs at '/tmp/place' covers"),
        ("covered socket", "'/tmp/place/socket', which the mount of tmpfs at '/tmp/place' covers"),
        ("read-only", "at '/tmp/place' of a tmpfs that is read-only as a whole"),
        ("part", "at '/tmp/other' of the directory '/part' of a tmpfs that is mounted nowhere"),
        ("foreign", "at '/tmp/place' of sysfs, a file system that cannot be made anew"),
        ("changes", "'/tmp/place', a directory with a process to notify (F_NOTIFY, F_SETOWN)"),
        ("secret", "secret memory (memfd_secret)"),
        ("keyring", "the keyring 'ring of mine' (keyrings(7)) of user 0"),
        ("key", "the key 'secret of mine' (keyrings(7), type user) of user 0"),
    ];
    for (what, why) in cases {
        let has = format!("HAS={what}");
        let mut more = vec!["--net", "none", "--env", &has];
        let mounts = ["place", "read-only", "part", "foreign"].contains(&what);
        if mounts || what.starts_with("covered") {
            more.extend(["--cap-add", "SYS_ADMIN"]);
        }
        if what.starts_with("key") {
            more.push("--privileged");
        }
        start(&host, "lost", &more);
        wait_for_line(&host, "lost", "ready 0");
        let explain = || host.dm(&["explain", "lost"]);
        // The kernel may not have freed the keyring of the container before yet.
        let is_named = || explain().stdout.contains(why);
        let is_found = if what == "key" { wait_until(soon(), is_named) } else { is_named() };
        assert!(is_found && explain().status == 1, "{what}: {}", explain());
        for verb in ["checkpoint", "sleep"] {
            let out = host.dm(&[verb, "lost"]);
            assert!(out.status != 0 && out.stderr.contains(why), "{what}: {out}");
            assert_eq!(host.state_of("lost"), "running");
        }
        host.dm(&["rm", "--force", "lost"]).ok();
    }
}

/// The record beside the checkpoint of a sleeper can be damaged, and it wakes all the same.
#[test]
fn vm_a_sleeper_wakes_with_a_damaged_record_of_its_first_process() {
    let host = host();
    host.dm(&["run", "-d", "--name", "a", "--net", "none", "workloads", "sleep", "100000"]).ok();
    host.dm(&["sleep", "a"]).ok();
    host.wait_for_state("a", "asleep");
    let id = host.inspect("a")["id"].as_str().expect("it has one").to_owned();
    let path = host.root().join("lib/containers").join(id).join("asleep/init.json");
    let whole = fs::read(&path).expect("it is there");
    let text = String::from_utf8(whole.clone()).expect("it is text");
    let digit = text.find("started_unix_ms\":").expect("it is told") + 18;
    for at in [0, digit, whole.len() / 2, whole.len() - 1] {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        fs::write(&path, damaged).expect("it can be written");
        assert_eq!(host.inspect("a")["state"], "asleep", "byte {at}");
    }
    let mut damaged = whole;
    damaged[digit] ^= 1;
    fs::write(&path, damaged).expect("it can be written");
    host.dm(&["wake", "a"]).ok();
    assert_eq!(host.state_of("a"), "running");
    let events = host.dm(&["events", "--no-stream"]).ok();
    assert!(events.contains("init.json"), "the damage is named: {events}");
}

/// Names that the configuration gives are no change by a process, and a name that the configuration does not
/// permit is refused before anything stops.
#[test]
fn vm_configured_names_are_restored_without_a_capability() {
    let host = host();
    let names = ["--hostname", "box", "--sysctl", "kernel.domainname=its.domain"];
    let run = ["run", "-d", "--name", "a", "--net", "none"];
    let program = ["workloads", "sleep", "100000"];
    host.dm(&[&run[..], &names, &program].concat()).ok();
    let has_names = || {
        let out = host.dm(&["exec", "a", "sh", "-c", "hostname; cat /proc/sys/kernel/domainname"]);
        assert_eq!(out.ok().trim(), "box\nits.domain");
    };
    for _ in 0..2 {
        host.dm(&["checkpoint", "a"]).ok();
        host.dm(&["restore", "a"]).ok();
        has_names();
    }
    host.dm(&["exec", "--privileged", "a", "hostname", "other"]).ok();
    for verb in [&["explain", "a"][..], &["checkpoint", "a"], &["sleep", "a"]] {
        let out = host.dm(verb);
        let text = format!("{}{}", out.stdout, out.stderr);
        assert!(out.status != 0 && text.contains("'other' in place of 'box'"), "{out}");
        assert_eq!(host.state_of("a"), "running");
    }
    host.dm(&["exec", "--privileged", "a", "hostname", "box"]).ok();
    host.dm(&["sleep", "a"]).ok();
    host.dm(&["wake", "a"]).ok();
    has_names();
}

/// A file that another has replaced during the sleep is not opened in place of the first.
#[test]
fn vm_wake_refuses_a_file_of_another_type_by_its_path() {
    let host = host();
    let volume = host.dir().join("volume");
    let (file, dir) = (volume.join("file"), volume.join("dir"));
    fs::create_dir_all(&dir).expect("a scratch directory");
    fs::write(&file, "text").expect("a scratch file");
    let mount = format!("{}:/data", volume.display());
    let script = "exec 3</data/file 4</data/dir; touch /dev/shm/up; sleep 100000";
    let run = ["run", "-d", "--name", "a", "--net", "none", "-v", &mount, "workloads"];
    host.dm(&[&run[..], &["sh", "-c", script]].concat()).ok();
    host.wait_inside("a", "test -e /dev/shm/up");
    host.dm(&["sleep", "a"]).ok();
    let replaced = |place: &Path, with: &dyn Fn(), why: &str| {
        let aside = volume.join("aside");
        fs::rename(place, &aside).expect("it is there");
        with();
        let out = host.dm(&["wake", "a"]);
        assert!(out.status != 0 && out.stderr.contains(why), "{out}");
        assert_eq!(host.state_of("a"), "asleep");
        let removed = if place.is_dir() { fs::remove_dir(place) } else { fs::remove_file(place) };
        removed.expect("it was made");
        fs::rename(&aside, place).expect("it is there");
    };
    let fifo = || {
        let made = std::process::Command::new("mkfifo").arg(&file).status();
        assert!(made.expect("coreutils are there").success());
    };
    let why = "'/data/file' was a regular file, and a fifo has taken its place";
    replaced(&file, &fifo, why);
    let why = "'/data/file' was a regular file, and a directory has taken its place";
    replaced(&file, &|| fs::create_dir(&file).expect("a scratch directory"), why);
    let why = "'/data/dir' was a directory, and a regular file has taken its place";
    replaced(&dir, &|| fs::write(&dir, "text").expect("a scratch file"), why);
    host.dm(&["wake", "a"]).ok();
    assert_eq!(host.state_of("a"), "running");
}

/// Programs compare the numbers of a file system and of a file: dovecot takes its index for another one. The kernel
/// gives the lowest free number, and other tests take some, so one of many attempts is to succeed. Numbers below are
/// free each time, so that none succeeds by itself.
#[test]
fn vm_root_file_system_has_its_number_again() {
    let host = host();
    let run = |name: &str| {
        host.dm(&["run", "-d", "--name", name, "--net", "none", "workloads", "sleep", "1000"]).ok();
    };
    let number = || host.dm(&["exec", "x", "stat", "-c", "%d", "/"]).ok().trim().to_owned();
    let mut seen = Vec::new();
    let is_kept = (0..60).any(|_| {
        run("below");
        run("x");
        let before = number();
        host.dm(&["rm", "--force", "below"]).ok();
        host.put_to_sleep("x");
        host.dm(&["wake", "x"]).ok();
        let woken = number();
        host.dm(&["checkpoint", "x"]).ok();
        host.dm(&["restore", "x"]).ok();
        seen.push((before, woken, number()));
        host.dm(&["rm", "--force", "x"]).ok();
        seen.last().is_some_and(|(before, woken, restored)| before == woken && woken == restored)
    });
    assert!(is_kept, "{seen:?}");
}
