//! Parts of containers made ahead: what takes them, what must not, and what is left of them.
//!
//! A container took a spare if its id was there, in `lib/spares`, before the request.

use std::collections::BTreeSet;
use std::process::Stdio;

use dormouse_testkit::{Host, soon, wait_until};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

/// Ids of the spares of a host, with those that are being made.
fn spares(host: &Host) -> BTreeSet<String> {
    let all = std::fs::read_dir(host.root().join("lib/spares")).into_iter().flatten().flatten();
    all.map(|entry| entry.file_name().into_string().expect("an id")).collect()
}

/// Pids of the nurseries.
fn nurseries(host: &Host) -> Vec<u32> {
    let all = host.processes().into_iter();
    all.filter(|(_, line)| line.ends_with(" internal nursery")).map(|(pid, _)| pid).collect()
}

/// Starts containers until there are spares for the next one, and returns them.
pub(crate) fn stock(host: &Host) -> BTreeSet<String> {
    stock_with(host, &[])
}

/// The same for containers with these options.
fn stock_with(host: &Host, options: &[&str]) -> BTreeSet<String> {
    let mut there = BTreeSet::new();
    let is_stocked = || {
        // At once: one after the other, they may be more than a second apart.
        let names = ["probe", "probe-1", "probe-2", "probe-3"];
        let starts = names.map(|name| {
            let run = [&["run", "-d", "--name", name], options, &["busybox", "true"]].concat();
            let mut start = host.dormouse(&run);
            start.stdout(Stdio::null()).spawn().expect("it starts")
        });
        for mut start in starts {
            assert!(start.wait().expect("it ends").success());
        }
        let remove = [&["rm", "--force"], &names[..]].concat();
        host.dm(&remove).ok();
        there = spares(host);
        !there.is_empty()
    };
    assert!(wait_until(soon(), is_stocked), "there are no spares: {:?}", host.processes());
    there
}

/// Starts a container, and returns whether it took a spare.
fn takes(host: &Host, options: &[&str], program: &[&str]) -> bool {
    let there = stock(host);
    let words = [&["run", "-d", "--name", "x"], options, &["busybox"], program].concat();
    let id = host.dm(&words).ok();
    host.dm(&["rm", "--force", "x"]).ok();
    there.contains(&id)
}

/// Whether a start takes a spare at last: one may be in the making, or dropped for want of memory.
fn takes_at_last(host: &Host, options: &[&str]) -> bool {
    wait_until(soon(), || takes(host, options, &["true"]))
}

/// A host that makes spares.
fn host() -> Host {
    let host = Host::with_busybox();
    std::fs::create_dir_all(host.root().join("etc")).expect("a directory");
    set(&host, SPARES);
    host
}

const SPARES: &str = "[spares]\nkeep = 8\n";

fn set(host: &Host, text: &str) {
    std::fs::write(host.root().join("etc/config.toml"), text).expect("written");
}

/// What a program finds around it. The id, the host name and the addresses differ from container to container, as do
/// numbers of mounts and devices.
const LOOK: &str = r#"
    id; umask; pwd; tty; env | sort; ulimit -a
    grep -E '^(Cap|Seccomp|NoNewPrivs|Groups|Uid|Gid|Threads|NStgid|SigBlk|SigIgn|SigCgt)' /proc/self/status
    cut -d' ' -f5- /proc/self/mountinfo | sed -E 's/(upperdir|workdir|lowerdir|gid)=?[^ ,]*//g' | sort
    ls -ln / /dev /dev/shm /etc /proc/self/fd |
        sed -E 's/ [A-Z][a-z]+ +[0-9]+ +[0-9:]+ / /; s/^([a-z-]{10}) +[0-9]+ /\1 /; s/pipe:.*/a pipe/'
    cat /proc/self/oom_score_adj /proc/self/uid_map /proc/sys/user/max_pid_namespaces /proc/1/comm
    cat /proc/self/cgroup /proc/self/timens_offsets; hostname; cat /etc/hosts /etc/resolv.conf
    head -1 /proc/meminfo; grep -c processor /proc/cpuinfo; cat /sys/devices/system/cpu/online; wc -l /proc/diskstats
    head -1 /proc/swaps
    readlink /proc/self/ns/cgroup >/dev/null && echo alone; ps
"#;

fn look(host: &Host, options: &[&str]) -> (String, String) {
    let words = [&["run", "--name", "x"], options, &["busybox", "sh", "-c", LOOK]].concat();
    let seen = host.dm(&words).ok();
    let id = host.inspect("x")["id"].as_str().expect("an id").to_owned();
    host.dm(&["rm", "x"]).ok();
    let plain = plain(&seen, &id);
    (id, plain)
}

/// What a program finds in a created container that is then started, and whether that goes on with a newborn that was
/// there.
fn look_created(host: &Host, options: &[&str]) -> (bool, String) {
    let script = format!("{LOOK}\necho END; exec sleep 1000");
    let words = [&["create", "--name", "x"], options, &["busybox", "sh", "-c", &script]].concat();
    let id = host.dm(&words).ok();
    let waits = newborn(host, &id);
    host.dm(&["start", "x"]).ok();
    let goes_on = waits.is_some() && waits == pid_of_x(host);
    let mut seen = String::new();
    let is_over = || {
        seen = host.dm(&["logs", "x"]).ok();
        seen.ends_with("END")
    };
    assert!(wait_until(soon(), is_over), "{options:?}");
    host.dm(&["rm", "--force", "x"]).ok();
    (goes_on, plain(&seen, &id))
}

/// Without what differs from container to container.
fn plain(seen: &str, id: &str) -> String {
    let plain = seen.replace(id, "ID").replace(&id[..12], "SHORT");
    let base = plain.lines().map(|line| {
        // The base of its ids on the host, and padding of the domain's hosts file.
        let mut words: Vec<&str> = line.split_whitespace().collect();
        if words.len() == 3 && words.iter().all(|word| word.parse::<u64>().is_ok()) {
            words[1] = "BASE";
        }
        // A clock that has begun with the container.
        if let ["boottime", seconds, nanoseconds] = &mut words[..]
            && seconds.starts_with('-')
        {
            (*seconds, *nanoseconds) = ("SECONDS", "NANOSECONDS");
        }
        if words.ends_with(&["SHORT", "x"]) {
            words[0] = "ADDRESS";
        }
        // The length of its addresses.
        if let [_mode, _uid, _gid, bytes, "hosts"] = &mut words[..] {
            *bytes = "SIZE";
        }
        words.join(" ")
    });
    let plain: Vec<String> = base.filter(|line| !line.is_empty()).collect();
    plain.join("\n")
}

/// The process in the cgroups of a container, if there is one.
fn newborn(host: &Host, id: &str) -> Option<u32> {
    let pids = |dir: &std::path::PathBuf| {
        let text = std::fs::read_to_string(dir.join(id).join("cgroup.procs")).unwrap_or_default();
        text.lines().next().and_then(|line| line.parse().ok())
    };
    host.cgroups().iter().find_map(pids)
}

fn pid_of_x(host: &Host) -> Option<u32> {
    host.inspect("x")["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok())
}

/// Creates container `x` with a spare. Returns its id and the pid of its newborn, which waits for at most a second.
fn create(host: &Host) -> (String, u32) {
    let mut found = None;
    let has_spare = || {
        host.dm(&["rm", "--force", "--ignore", "x"]).ok();
        let there = stock(host);
        let id = host.dm(&["create", "--name", "x", "busybox", "sleep", "1000"]).ok();
        found = newborn(host, &id).filter(|_| there.contains(&id)).map(|pid| (id, pid));
        found.is_some()
    };
    assert!(wait_until(soon(), has_spare), "no created container has taken a spare");
    found.expect("an id")
}

/// Repeats what has to follow the creation of a container within a second. `does` returns whether it did.
fn in_time(what: &str, mut does: impl FnMut() -> bool) {
    let is_done = || {
        let is_done = does();
        if !is_done {
            // No spare waits for a start for some seconds after one that came too late.
            std::thread::sleep(std::time::Duration::from_secs(1));
        }
        is_done
    };
    assert!(wait_until(soon(), is_done), "{what}");
}

#[test]
fn vm_start_of_created_container_goes_on_with_its_spare() {
    let host = host();
    in_time("no start goes on with a spare", || {
        let (_, waits) = create(&host);
        assert_eq!(host.inspect("x")["state"], "created");
        host.dm(&["start", "x"]).ok();
        pid_of_x(&host) == Some(waits)
    });
    assert_eq!(host.dm(&["exec", "x", "echo", "on"]).ok(), "on");
    host.dm(&["restart", "--time", "0", "x"]).ok();
    host.dm(&["exec", "x", "true"]).ok();
    host.dm(&["rm", "--force", "x"]).ok();
}

#[test]
fn vm_program_of_created_container_finds_the_same_in_a_spare_as_without() {
    let host = host();
    let cases: [&[&str]; 2] =
        [&["-e", "A=b", "-u", "7:9"], &["--cap-drop", "all", "--init", "--pids", "50"]];
    for options in cases {
        set(&host, "[spares]\nkeep = 0\n");
        let (goes_on, without) = look_created(&host, options);
        assert!(!goes_on, "none is made");
        host.dm(&["internal", "reset"]).ok();
        set(&host, SPARES);
        let mut seen = String::new();
        in_time(&format!("{options:?}"), || {
            // Several at once: one after the other, they may be more than a second apart.
            stock(&host);
            let (_, _) = look_created(&host, options);
            let (goes_on, with) = look_created(&host, options);
            seen = with;
            goes_on
        });
        assert_eq!(seen, without, "{options:?}");
        host.dm(&["internal", "reset"]).ok();
    }
}

#[test]
fn vm_created_container_that_is_not_started_gives_its_parts_back() {
    let host = host();
    let (id, _) = create(&host);
    let run = host.root().join("run/c").join(&id);
    let is_released =
        || newborn(&host, &id).is_none() && !run.exists() && nurseries(&host).is_empty();
    assert!(wait_until(soon(), is_released), "{:?}", host.processes());
    assert_eq!(host.inspect("x")["state"], "created");
    assert!(host.cgroups().iter().all(|dir| !dir.join(&id).exists()));
    host.dm(&["start", "x"]).ok();
    host.dm(&["exec", "x", "true"]).ok();
}

#[test]
fn created_containers_that_are_not_started_keep_at_most_eight_spares() {
    let host = host();
    stock(&host);
    for n in 0..30 {
        host.dm(&["create", "--name", &format!("c{n}"), "busybox", "true"]).ok();
        let running = std::fs::read_dir(host.root().join("run/c")).expect("a directory");
        let ids: Vec<_> = running.flatten().map(|entry| entry.file_name()).collect();
        let created =
            ids.iter().filter(|id| host.root().join("lib/containers").join(id).exists()).count();
        assert!(created <= 8, "{created} created containers have a newborn");
    }
    let is_gone = || {
        nurseries(&host).is_empty()
            && std::fs::read_dir(host.root().join("run/c")).is_ok_and(|all| all.count() == 0)
    };
    assert!(wait_until(soon(), is_gone), "{:?}", host.processes());
}

/// Commands that read or change what the newborn has copied, or is mounted on, end it first.
#[test]
fn change_of_created_container_ends_its_spare() {
    let host = host();
    std::fs::write(host.dir().join("file"), "copied").expect("written");
    let file = host.dir().join("file").display().to_string();
    for (change, after, shown) in [
        (&["rename", "x", "y"][..], &["exec", "y", "hostname"][..], None),
        (&["update", "--pids", "77", "x"], &["exec", "x", "sh", "-c", "ulimit -u"], None),
        (&["cp", &file, "x:/file"], &["exec", "x", "cat", "/file"], Some("copied")),
        (&["diff", "x"], &["exec", "x", "true"], None),
        (&["commit", "x", "new"], &["exec", "x", "true"], None),
    ] {
        let (id, waits) = create(&host);
        host.dm(change).ok();
        let left = newborn(&host, &id);
        assert!(left.is_none(), "{change:?}: {left:?} is left of {waits}");
        host.dm(&["start", &id]).ok();
        let found = host.dm(after).ok();
        assert!(shown.is_none_or(|shown| found == shown), "{change:?}: {found}");
        let pid = host.inspect(&id)["pid"].as_u64();
        assert!(pid.is_some() && pid != Some(u64::from(waits)), "{change:?}: {pid:?}");
        host.dm(&["rm", "--force", &id]).ok();
    }
    let (id, _) = create(&host);
    host.dm(&["rm", "x"]).ok();
    assert!(newborn(&host, &id).is_none() && !host.root().join("run/c").join(&id).exists());
    assert!(host.cgroups().iter().all(|dir| !dir.join(&id).exists()));
}

/// A spare is made for no account. The limits of one hold all the same for a container that takes it.
#[test]
fn vm_limits_of_an_account_hold_with_a_spare() {
    let host = host();
    host.dm(&["account", "create", "smith"]).ok();
    host.dm(&["account", "set", "--sockets", "20", "--pids", "30", "smith"]).ok();
    let hold = |id: &str| {
        let room = host.dm(&["exec", id, "probe", "sockets", "100", "0"]).ok();
        assert!(room.starts_with("20 "), "{room}");
        let most = |dir: &std::path::PathBuf| {
            let most = std::fs::read_to_string(dir.join(id).join("pids.max")).ok()?;
            most.trim().parse::<u64>().ok()
        };
        let most = host.cgroups().iter().find_map(most);
        assert!(most.is_some_and(|most| most <= 30), "{most:?}");
        host.dm(&["rm", "--force", id]).ok();
    };
    let words = ["--name", "x", "--account", "smith", "busybox", "sleep", "1000"];
    let takes = || {
        let there = stock(&host);
        let id = host.dm(&[&["run", "-d"], &words[..]].concat()).ok();
        hold(&id);
        there.contains(&id)
    };
    assert!(wait_until(soon(), takes), "no run takes a spare");
    in_time("no start goes on with a spare", || {
        stock(&host);
        let id = host.dm(&[&["create"], &words[..]].concat()).ok();
        let waits = newborn(&host, &id);
        host.dm(&["start", "x"]).ok();
        let goes_on = waits.is_some() && waits == pid_of_x(&host);
        hold(&id);
        goes_on
    });
}

#[test]
fn changed_settings_make_spare_of_created_container_unfit() {
    let host = host();
    let (_, waits) = create(&host);
    set(&host, &format!("{SPARES}# a comment\n"));
    host.dm(&["start", "x"]).ok();
    assert_ne!(pid_of_x(&host), Some(waits), "made under other settings");
    host.dm(&["exec", "x", "true"]).ok();
}

#[test]
fn killed_or_stopped_nursery_delays_no_start_of_created_container() {
    let host = host();
    for signal in ["KILL", "STOP"] {
        let (id, _) = create(&host);
        let nursery = nurseries(&host);
        nursery.iter().for_each(|pid| drop(host.sh(&format!("kill -{signal} {pid}"))));
        host.dm(&["start", "x"]).ok();
        let pid = pid_of_x(&host);
        // It has what it was given, and gives that up: not the container, which has started without.
        nursery.iter().for_each(|pid| drop(host.sh(&format!("kill -CONT {pid}"))));
        let is_gone = || nurseries(&host).is_empty() && spares(&host).is_empty();
        assert!(wait_until(soon(), is_gone), "{:?}", spares(&host));
        assert_eq!(host.dm(&["exec", "x", "echo", "on"]).ok(), "on", "{signal}");
        assert_eq!((pid_of_x(&host), newborn(&host, &id)), (pid, pid), "{signal}");
        host.dm(&["rm", "--force", "x"]).ok();
    }
}

#[test]
fn vm_program_finds_the_same_in_a_spare_as_without() {
    let host = host();
    let cases: [&[&str]; 6] = [
        &[],
        &["--memory", "64m", "--memory-swap", "64m", "--cpus", "0.5", "--cpu-burst", "20%"],
        &["--views", "yes", "--cpus", "1", "--restart", "no"],
        &["-e", "A=b", "-w", "/tmp", "--cap-drop", "all", "--ulimit", "nofile=77:88"],
        &["-u", "7:9", "--security-opt", "no-new-privileges"],
        &["--oom-score-adj", "500", "--pids", "50", "--init"],
    ];
    for options in cases {
        set(&host, "[spares]\nkeep = 0\n");
        let (_, without) = look(&host, options);
        assert!(spares(&host).is_empty() && nurseries(&host).is_empty(), "none is made");
        host.dm(&["internal", "reset"]).ok();
        set(&host, SPARES);
        let mut seen = String::new();
        let took = wait_until(soon(), || {
            let there = spares(&host);
            let (id, with) = look(&host, options);
            seen = with;
            there.contains(&id)
        });
        assert!(took, "{options:?}");
        assert_eq!(seen, without, "{options:?}");
        host.dm(&["internal", "reset"]).ok();
    }
}

/// Looks around in a new container that goes on from the checkpoint of container `t`. Returns its id, what it finds,
/// and what it has kept.
fn look_restored(host: &Host, restore: &[&str]) -> (String, String, String) {
    host.dm(restore).ok();
    let id = host.inspect("x")["id"].as_str().expect("an id").to_owned();
    // Its program, not one that came later.
    host.dm(&["exec", "x", "touch", "/tmp/go"]).ok();
    host.wait_inside("x", "grep END /tmp/seen");
    let seen = host.dm(&["exec", "x", "cat", "/tmp/seen"]).ok();
    let kept = host.dm(&["exec", "x", "cat", "/tmp/kept"]).ok();
    host.dm(&["rm", "--force", "x"]).ok();
    (id.clone(), plain(&seen, &id), kept)
}

#[test]
fn vm_new_container_of_a_checkpoint_finds_the_same_in_a_spare_as_without() {
    let host = host();
    // Pids are those of a loop, which goes on for some time.
    let look = LOOK.replace("|NStgid", "").replace("; ps\n", "\n");
    let script = format!(
        "kept=$RANDOM$RANDOM; echo $kept; while ! [ -e /tmp/go ]; do sleep 0.05; done; echo $kept >/tmp/kept; \
         look() {{ {look}\n}}; look >/tmp/seen; echo END >>/tmp/seen; exec sleep 1000"
    );
    let run = ["run", "-d", "--name", "t", "-e", "A=b", "busybox", "sh", "-c", &script];
    host.dm(&run).ok();
    let mut kept = String::new();
    let has_begun = || {
        kept = host.dm(&["logs", "t"]).ok();
        !kept.is_empty()
    };
    assert!(wait_until(soon(), has_begun));
    host.dm(&["checkpoint", "t"]).ok();
    for restore in [["restore", "--name", "x", "t"], ["clone", "--name", "x", "t"]] {
        set(&host, "[spares]\nkeep = 0\n");
        let is_idle = || spares(&host).is_empty() && nurseries(&host).is_empty();
        assert!(wait_until(soon(), is_idle), "{:?}", host.processes());
        let (_, without, same) = look_restored(&host, &restore);
        assert!(is_idle(), "none is made");
        assert_eq!(same, kept, "{restore:?}");
        set(&host, SPARES);
        let mut seen = String::new();
        let took = wait_until(soon(), || {
            // Of the same kind: the container has changed no file, so it has their image.
            let there = stock(&host);
            let (id, with, same) = look_restored(&host, &restore);
            assert_eq!(same, kept, "{restore:?}");
            seen = with;
            there.contains(&id)
        });
        assert!(took, "{restore:?}");
        assert_eq!(seen, without, "{restore:?}");
        assert_eq!(host.dm(&["images", "--quiet"]).ok().lines().count(), 1);
        if restore[0] == "restore" {
            host.dm(&["restore", "t"]).ok(); // for the clone
        }
    }
}

/// A container that got views by an update has the clock of the host, as have its clones.
#[test]
fn vm_new_container_of_a_checkpoint_has_its_clocks_beside_spares() {
    let host = host();
    host.dm(&["run", "-d", "--name", "t", "busybox", "sleep", "1000"]).ok();
    host.dm(&["update", "--memory", "64m", "t"]).ok();
    let offsets = |name: &str| host.dm(&["exec", name, "cat", "/proc/self/timens_offsets"]).ok();
    let before = offsets("t");
    // Of the kind of its clones: they have views, and a clock of their own.
    let there = stock_with(&host, &["--memory", "64m"]);
    let clones = ["x-0", "x-1", "x-2"];
    for name in clones {
        host.dm(&["clone", "--name", name, "t"]).ok();
        assert!(!there.contains(host.inspect(name)["id"].as_str().expect("an id")), "{name}");
        assert_eq!(offsets(name), before, "{name}");
    }
}

#[test]
fn vm_start_takes_spare_with_each_option_of_its_program() {
    let host = host();
    host.dm(&["run", "-d", "--name", "other", "busybox", "sleep", "1000"]).ok();
    for options in [
        &["--name", "y", "-e", "A=b"][2..],
        &["--label", "a=b", "--restart", "no", "--stop-timeout", "3"],
        &["-p", "8080:80", "--cpu-weight", "200", "--pids", "100"],
        &["-t", "-i"],
    ] {
        assert!(takes_at_last(&host, options), "{options:?}");
    }
    // It is known by its names, has its address, and answers at the published port.
    let words = ["-p", "8080:80", "--name", "web"];
    let is_taken = wait_until(soon(), || {
        let there = stock(&host);
        host.dm(&["rm", "--force", "--ignore", "web"]).ok();
        let run = [&["run", "-d"], &words[..], &["busybox", "httpd", "-f", "-h", "/www"]].concat();
        there.contains(&host.dm(&run).ok())
    });
    assert!(is_taken);
    host.wait_inside("other", "wget -q -O - http://web/");
    assert!(!host.fetch(&format!("http://{}:8080/", Host::ADDRESS)).is_empty());
    host.dm(&["exec", "web", "sh", "-c", "echo written >/file"]).ok();
    host.dm(&["restart", "--time", "0", "web"]).ok();
    assert_eq!(host.dm(&["exec", "web", "cat", "/file"]).ok(), "written");
}

#[test]
fn start_with_another_root_network_or_limit_takes_no_spare() {
    let host = host();
    std::fs::create_dir(host.dir().join("shared")).expect("a directory");
    let volume = format!("{}:/mnt", host.dir().join("shared").display());
    for options in [
        &["--net", "none"][..],
        &["--net", "host"],
        &["--domain", "other"],
        &["--ids", "65536"],
        &["--privileged"],
        &["--read-only"],
        &["--hostname", "named"],
        &["--memory-min", "8m"],
        &["--cpuset-cpus", "0"],
        &["--nproc", "1"],
        &["--sockets", "50"],
        &["--net-ceil", "10mbit"],
        &["--tmpfs", "/tmp"],
        &["-v", &volume],
        &["--dns", "192.0.2.53"],
        &["--add-host", "a:192.0.2.9"],
        &["--devpts", "no"],
        &["--sysctl", "kernel.msgmax=9000"],
        &["--sleep-after", "1h"],
    ] {
        assert!(!takes(&host, options, &["true"]), "{options:?}");
    }
    // They work all the same, and spares are still there for others.
    assert!(takes_at_last(&host, &[]));
}

#[test]
fn vm_spares_go_a_second_after_the_last_start() {
    let host = host();
    host.dm(&["run", "-d", "--name", "other", "busybox", "sleep", "1000"]).ok();
    host.await_settlers();
    let taken = || {
        let info = host.dm(&["info", "--json"]).ok();
        let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
        let running = std::fs::read_dir(host.root().join("run/c")).expect("a directory").count();
        let groups = |dir: &std::path::PathBuf| std::fs::read_dir(dir).map_or(0, Iterator::count);
        let groups: usize = host.cgroups().iter().map(groups).sum();
        (
            info["id_slots"].as_u64(),
            info["addresses"].as_u64(),
            running,
            groups,
            // A tmpfs that containers share stays mounted.
            host.mounts().into_iter().filter(|at| !at.contains("/run/tmpfs/")).collect::<Vec<_>>(),
        )
    };
    let before = taken();
    let made = stock(&host).len();
    assert!((1..=8).contains(&made), "{made}");
    // No list shows them.
    assert_eq!(host.dm(&["ps", "--all", "--quiet"]).ok().lines().count(), 1);
    let is_gone = || nurseries(&host).is_empty() && spares(&host).is_empty() && taken() == before;
    assert!(wait_until(soon(), is_gone), "{before:?} is {:?}", taken());
    assert!(!host.root().join("run/spares.sock").exists());
}

#[test]
fn no_spares_are_made_for_a_single_start_or_with_keep_0() {
    let host = host();
    host.dm(&["run", "--rm", "busybox", "true"]).ok();
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(nurseries(&host), [0; 0]);
    set(&host, "[spares]\nkeep = 9\n");
    let refused = host.dm(&["run", "--rm", "busybox", "true"]).fails();
    assert!(refused.contains("config.toml") && refused.contains('9'), "{refused}");
    // Also beside a keeper that was started with other settings.
    set(&host, "[spares]\nkeep = 0\n");
    for _ in 0..8 {
        host.dm(&["run", "--rm", "busybox", "true"]).ok();
        assert!(spares(&host).is_empty());
    }
}

#[test]
fn changed_settings_make_spares_unfit() {
    let host = host();
    for text in ["# a comment\n", "[wake]\nreserve = \"1m\"\n"] {
        assert!(takes_at_last(&host, &[]));
        let there = stock(&host);
        set(&host, &format!("{SPARES}{text}"));
        let id = host.dm(&["run", "-d", "--name", "x", "busybox", "true"]).ok();
        assert!(!there.contains(&id), "made under other settings");
        host.dm(&["rm", "--force", "x"]).ok();
        assert!(wait_until(soon(), || spares(&host).is_disjoint(&there)), "they are released");
    }
}

#[test]
fn removed_image_and_prune_find_no_spare() {
    let host = host();
    stock(&host);
    host.dm(&["prune"]).ok();
    assert!(spares(&host).is_empty());
    stock(&host);
    host.dm(&["rmi", "busybox"]).ok();
    host.dm(&["prune", "--all"]).ok();
    assert!(spares(&host).is_empty());
    let images = host.root().join("run/images").display().to_string();
    assert!(!host.mounts().iter().any(|at| at.starts_with(&images)), "{:?}", host.mounts());
    host.dm(&["run", "--rm", "--pull", "never", "busybox", "true"]).fails();
}

#[test]
fn big_spares_give_their_addresses_back_before_there_is_none() {
    const FREE: usize = 6;
    let host = host();
    // The smallest pool: 1,024 addresses.
    set(&host, &format!("{SPARES}[network]\npool = \"10.99.0.0/22\"\n"));
    let create = || host.dm(&["create", "busybox", "true"]);
    let mut ids = Vec::new();
    loop {
        let created = create();
        if created.status != 0 {
            break;
        }
        ids.push(created.ok());
    }
    assert!(ids.len() > 200, "{} containers", ids.len());
    for round in 0..3 {
        // `stock` starts four containers at once.
        let free: Vec<String> = ids.drain(..FREE).collect();
        free.iter().for_each(|id| drop(host.dm(&["rm", id]).ok()));
        stock(&host);
        for n in 0..FREE {
            let created = create();
            assert_eq!(created.status, 0, "round {round}, container {n}: {created}");
            ids.push(created.ok());
        }
    }
}

#[test]
fn stopped_nursery_delays_no_start() {
    let host = host();
    stock(&host);
    let nursery = nurseries(&host);
    assert_eq!(nursery.len(), 1);
    host.sh(&format!("kill -STOP {}", nursery[0])).ok();
    for _ in 0..3 {
        host.dm(&["run", "--rm", "busybox", "true"]).ok();
    }
    host.sh(&format!("kill -CONT {}", nursery[0])).ok();
    // What it has given away to commands that did not wait is released, too.
    let is_gone = || nurseries(&host).is_empty() && spares(&host).is_empty();
    assert!(wait_until(soon(), is_gone), "{:?}", spares(&host));
    host.await_removals();
}

/// The answer of a nursery comes when the command has a container already, made from nothing.
#[test]
fn late_spare_is_not_kept_by_a_running_container() {
    let host = host();
    stock(&host);
    let nursery = nurseries(&host);
    assert_eq!(nursery.len(), 1);
    host.sh(&format!("kill -STOP {}", nursery[0])).ok();
    let words = ["run", "--name", "long", "busybox", "sleep", "1000"];
    let mut long = host.dormouse(&words).stdout(Stdio::null()).spawn().expect("it starts");
    assert!(wait_until(soon(), || host.dm(&["exec", "long", "true"]).status == 0));
    host.sh(&format!("kill -CONT {}", nursery[0])).ok();
    let is_gone = || nurseries(&host).is_empty() && spares(&host).is_empty();
    assert!(wait_until(soon(), is_gone), "{:?}", spares(&host));
    host.dm(&["rm", "--force", "long"]).ok();
    long.wait().expect("it ends");
}

#[test]
fn full_queue_of_stopped_nursery_delays_no_start() {
    let host = host();
    stock(&host);
    let nursery = nurseries(&host);
    assert_eq!(nursery.len(), 1);
    host.sh(&format!("kill -STOP {}", nursery[0])).ok();
    // More than its queue takes.
    let address = SocketAddrUnix::new(host.root().join("run/spares.sock")).expect("a short path");
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connect = || {
        let sock = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let sock = sock.expect("a socket");
        rustix::net::connect(&sock, &address).map(|()| sock)
    };
    let mut queue = Vec::new();
    let full = loop {
        match connect() {
            Ok(sock) => queue.push(sock),
            Err(e) => break e,
        }
    };
    assert_eq!(full, rustix::io::Errno::AGAIN, "{} connections", queue.len());
    host.dm(&["run", "--rm", "busybox", "true"]).ok();
    host.sh(&format!("kill -CONT {}", nursery[0])).ok();
    // The connections stay open, and are not waited for.
    let is_gone = || nurseries(&host).is_empty() && spares(&host).is_empty();
    assert!(wait_until(soon(), is_gone), "{:?}", spares(&host));
}

#[test]
fn spares_give_back_an_address_that_is_asked_for() {
    let host = host();
    host.dm(&["run", "-d", "--name", "other", "busybox", "sleep", "1000"]).ok();
    let first = host.inspect("other")["addresses"][0].as_str().expect("an address").to_owned();
    let (net, last) = first.rsplit_once('.').expect("an IPv4 address");
    let last: u8 = last.parse().expect("a number");
    for n in 1..=8 {
        stock(&host);
        host.await_removals();
        host.dm(&["update", "--ip-add", &format!("{net}.{}", last + n), "other"]).ok();
    }
}

#[test]
fn killed_nursery_leaves_nothing() {
    let host = host();
    host.dm(&["run", "-d", "--name", "other", "busybox", "sleep", "1000"]).ok();
    for _ in 0..5 {
        stock(&host);
        for pid in nurseries(&host) {
            host.sh(&format!("kill -KILL {pid}")).ok();
        }
        // By the settlers of its newborns, or the next command: one in the making may have no newborn yet.
        let is_gone = || host.dm(&["ps"]).status == 0 && spares(&host).is_empty();
        assert!(wait_until(soon(), is_gone), "{:?}", spares(&host));
        host.dm(&["run", "--rm", "busybox", "true"]).ok();
    }
    assert_eq!(host.dm(&["exec", "other", "echo", "on"]).ok(), "on");
}
