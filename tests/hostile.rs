//! Hostile images, configurations and processes: nothing outside the container is read, written
//! or signalled, and nothing hangs.
//!
//! Each test is a class of holes of container programs. `docs/decisions` lists the classes.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dormouse_testkit::{Host, dormouse, image, slowness, soon, wait_until};

/// A directory of the host with its contents, which must not change.
struct Precious {
    dir: PathBuf,
}

impl Precious {
    fn new(host: &Host) -> Self {
        let dir = host.dir().join("precious");
        fs::create_dir(&dir).expect("made");
        fs::write(dir.join("file"), "precious").expect("written");
        Self { dir }
    }

    fn path(&self) -> &str {
        self.dir.to_str().expect("UTF-8")
    }

    #[track_caller]
    fn assert_untouched(&self) {
        let names: Vec<_> = fs::read_dir(&self.dir)
            .expect("the file still exists")
            .map(|e| e.expect("listed").file_name())
            .collect();
        assert_eq!(names, ["file"], "a file was created on the host");
        assert_eq!(
            fs::read_to_string(self.dir.join("file")).expect("the file still exists"),
            "precious"
        );
    }
}

/// A member of a tar in a form that no library would write (tar(5), ustar).
struct Entry {
    name: String,
    kind: u8,
    link: String,
}

impl Entry {
    fn new(name: &str, kind: u8, link: &str) -> Self {
        Self { name: name.to_owned(), kind, link: link.to_owned() }
    }

    fn to_bytes(&self) -> Vec<u8> {
        let data: &[u8] = if self.kind == b'0' { b"broken" } else { b"" };
        let mut header = [0_u8; 512];
        let mut put = |at: usize, text: &[u8]| header[at..at + text.len()].copy_from_slice(text);
        // Long names are split at a slash: 155 bytes of prefix, 100 of name.
        let name = self.name.as_bytes();
        let cut = (name.len() > 100).then(|| {
            let slash = name.iter().take(155).rposition(|b| *b == b'/');
            slash.expect("a long name of a test has a slash")
        });
        match cut {
            Some(at) => {
                put(345, &name[..at]);
                put(0, &name[at + 1..]);
            }
            None => put(0, name),
        }
        put(100, b"0000777\0");
        put(108, b"0000000\0");
        put(116, b"0000000\0");
        put(124, format!("{:011o}\0", data.len()).as_bytes());
        put(136, b"00000000000\0");
        put(148, b"        ");
        put(156, &[self.kind]);
        put(157, &self.link.as_bytes()[..self.link.len().min(100)]);
        put(257, b"ustar\x0000");
        let sum: u32 = header.iter().map(|b| u32::from(*b)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        let mut bytes = header.to_vec();
        bytes.extend(data);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        bytes
    }
}

/// A copy of the busybox directory, to be damaged.
fn copy_of_busybox(host: &Host, name: &str) -> PathBuf {
    let dir = host.dir().join(name);
    host.sh(&format!("cp -a {} {}", image::busybox_with_attack().display(), dir.display())).ok();
    dir
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn archives_cannot_write_outside() {
    let host = Host::new();
    let precious = Precious::new(&host);
    let out = precious.path();
    let up = format!("{}{}", "../".repeat(20), &out[1..]);
    let (file, made) = (format!("{out}/file"), format!("{out}/made"));
    let entry = |name: &str, kind: u8, link: &str| Entry::new(name, kind, link);
    let cases = [
        vec![entry(&format!("{up}/made"), b'0', "")],
        vec![entry(&made, b'0', "")],
        vec![entry("d", b'2', out), entry("d/made", b'0', "")],
        vec![entry("d", b'2', &up), entry("d/made", b'0', "")],
        vec![entry("d", b'1', &file), entry("d", b'0', "")],
        vec![entry("d", b'2', &file), entry("d", b'0', "")],
        vec![entry("d", b'2', out), entry("e", b'1', "d/file"), entry("e", b'0', "")],
        vec![entry("d", b'2', out), entry("d/.wh.file", b'0', "")],
        vec![entry("d", b'2', out), entry("d", b'5', ""), entry("d/made", b'5', "")],
        vec![entry(".wh...", b'0', "")],
        vec![entry("d/.wh..", b'0', "")],
        vec![entry("a", b'2', "b"), entry("b", b'2', "a"), entry("a/x", b'0', "")],
        vec![entry("", b'0', "")],
        vec![entry("/", b'0', "")],
        vec![entry("..", b'5', "")],
    ];
    for (n, case) in cases.iter().enumerate() {
        let path = host.dir().join(format!("hostile-{n}.tar"));
        let mut bytes: Vec<u8> = case.iter().flat_map(Entry::to_bytes).collect();
        bytes.extend([0; 1024]);
        fs::write(&path, bytes).expect("written");
        let out = host.dm(&["import", "--name", &format!("h{n}"), text(&path)]);
        // Refused or kept inside: both are correct.
        assert!(out.status == 0 || out.status == 125, "{n}: {out}");
        assert!(!out.stderr.contains("panicked"), "{n}: {out}");
        precious.assert_untouched();
    }
}

#[test]
fn files_made_at_start_follow_no_symlink_outside() {
    let host = Host::new();
    let precious = Precious::new(&host);
    let up = format!("{}{}", "../".repeat(20), &precious.path()[1..]);
    for (n, link) in
        ["dev", "proc", "sys", "etc", "run", "tmp", "dev/shm", "etc/hosts", "etc/hostname"]
            .iter()
            .flat_map(|link| [(link, precious.path().to_owned()), (link, up.clone())])
            .enumerate()
    {
        let (link, target) = link;
        let dir = copy_of_busybox(&host, &format!("root{n}"));
        let path = dir.join(link);
        fs::create_dir_all(path.parent().expect("a parent")).expect("made");
        let _ = fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path)); // may be absent
        symlink(&target, &path).expect("create the link");
        let tmpfs = format!("/{link}/made");
        for options in [&[][..], &["--tmpfs", &tmpfs], &["-t"]] {
            let words = ["run", "--rm", "--net", "none", "--rootfs", text(&dir)];
            let out = host.dm(&[&words[..], options, &["true"]].concat());
            assert!(!out.stderr.contains("panicked"), "{link}: {out}");
            precious.assert_untouched();
        }
    }
}

#[test]
fn passwd_of_other_file_type_is_refused_in_bounded_time() {
    let host = Host::new();
    let make: [(&str, &str); 6] = [
        ("fifo", "rm etc/passwd && mkfifo etc/passwd"),
        ("directory", "rm etc/passwd && mkdir etc/passwd"),
        ("zero", "ln -sf /dev/zero etc/passwd"),
        ("huge", "rm etc/passwd && truncate -s 4G etc/passwd"),
        ("line", "tr '\\0' x </dev/zero | head -c 64m >etc/passwd"),
        ("outside", "ln -sf ../../../../../../../../etc/shadow etc/passwd"),
    ];
    for (name, script) in make {
        let dir = copy_of_busybox(&host, name);
        host.sh(&format!("cd {} && {script}", dir.display())).ok();
        let words = ["run", "--rm", "--net", "none", "--rootfs", text(&dir), "-u", "daemon", "id"];
        let out = host.dm_within(Duration::from_secs(20), &words);
        assert_eq!(out.status, 125, "{name}: {out}");
    }
}

#[test]
fn working_directory_stays_inside() {
    let host = Host::new();
    let dir = copy_of_busybox(&host, "tree");
    let precious = Precious::new(&host);
    symlink("/proc/self/fd/7", dir.join("seven")).expect("made");
    for cwd in (3..12).map(|n| format!("/proc/self/fd/{n}")).chain(["/seven".to_owned()]) {
        let words = ["run", "--rm", "--net", "none", "--rootfs", text(&dir), "-w", &cwd];
        let probe =
            format!("cd .. 2>/dev/null; cat ./{0}/file .{0}/file {0}/file", precious.path());
        let out = host.dm(&[&words[..], &["sh", "-c", &probe]].concat());
        assert!(!out.stdout.contains("precious"), "{cwd}: {out}");
    }
}

#[test]
fn vm_device_nodes_of_image_cannot_be_opened() {
    let host = Host::new();
    let dir = copy_of_busybox(&host, "tree");
    // The disk of the host, its memory, its log.
    let disk = fs::read_to_string("/proc/partitions").expect("the kernel lists disks");
    let disk = disk.lines().skip(2).find_map(|line| {
        let mut words = line.split_whitespace();
        Some(format!("b {} {}", words.next()?, words.next()?))
    });
    let nodes = [disk.expect("a disk"), "c 1 1".to_owned(), "c 1 11".to_owned()];
    for (n, node) in nodes.iter().enumerate() {
        host.sh(&format!("mknod -m 666 {}/node{n} {node}", dir.display())).ok();
    }
    host.import(&dir, "nodes");
    for n in 0..nodes.len() {
        let node = format!("/node{n}");
        let rootfs = ["run", "--rm", "--rootfs", text(&dir), "--net", "none"];
        let image = ["run", "--rm", "--net", "none", "nodes"];
        for words in [&rootfs[..], &image] {
            let out = host.dm(&[words, &["attack", "open-node", &node]].concat());
            assert_eq!(out.status, 1, "{out}");
        }
    }
}

#[test]
fn vm_program_cannot_be_overwritten_from_inside() {
    let host = Host::with_attacks(dormouse());
    let sums = || {
        let keeper = dormouse_testkit::program("dormouse-keeper");
        host.sh(&format!("sha256sum {} {}", dormouse().display(), keeper.display())).ok()
    };
    let before = sums();
    let words = ["run", "-d", "--name", "a", "--cap-add", "ALL", "attack", "attack"];
    host.dm(&[&words[..], &["overwrite-exe", "600"]].concat()).ok();
    let execs = if slowness() > 1 { 10 } else { 100 };
    for _ in 0..execs {
        let _ = host.dm(&["exec", "a", "/proc/self/exe", "true"]); // not a file of the container
        host.dm(&["exec", "a", "true"]).ok();
    }
    // The attack exits at its first success.
    assert_eq!(host.state_of("a"), "running", "{}", host.dm(&["logs", "a"]));
    assert_eq!(sums(), before);
}

#[test]
fn endless_output_is_bounded() {
    let host = Host::with_busybox();
    // Appended by the container itself; for the other driver see `logs`.
    let words = ["run", "-d", "--log-driver", "file", "--log-max-size", "1m", "--name", "a"];
    host.dm(&[&words[..], &["busybox", "yes"]].concat()).ok();
    let logs =
        host.root().join("lib/containers").join(host.inspect("a")["id"].as_str().expect("an id"));
    let used = || -> u64 {
        use std::os::unix::fs::MetadataExt;
        let files = std::fs::read_dir(&logs).expect("the directory of logs");
        let files = files.flatten().filter(|f| f.file_name().to_string_lossy().ends_with(".log"));
        files.filter_map(|f| f.metadata().ok()).map(|m| m.blocks() / 2).sum()
    };
    // Writes are hundreds of megabytes a second, so the size at a random moment proves little.
    std::thread::sleep(Duration::from_secs(5));
    host.dm(&["pause", "a"]).ok();
    let down = || used() <= 2 << 10;
    assert!(wait_until(soon(), down), "{} kB after a pause", used());
    let written = std::fs::metadata(logs.join("stdout.log")).expect("a log").len();
    assert!(written > 4 << 20, "no more was written than is kept: {written} bytes");
}

#[test]
fn vm_symlinks_swapped_during_start_do_not_lead_outside() {
    // Two containers share a volume. One replaces a directory with a link that leads outside, again
    // and again, while others start with mounts below that directory.
    let host = Host::with_attacks(dormouse());
    let precious = Precious::new(&host);
    let up = format!("{}{}", "../".repeat(20), &precious.path()[1..]);
    let swap = format!(
        "cd /shared; mkdir -p a; ln -s {up} b; \
         while :; do mv a c; mv b a; mv a b; mv c a; done 2>/dev/null"
    );
    let swapper = ["run", "-d", "--name", "swapper", "-v", "shared:/shared", "attack"];
    host.dm(&[&swapper[..], &["sh", "-c", &swap]].concat()).ok();
    let starts = if slowness() > 1 { 6 } else { 40 };
    for n in 0..starts {
        let target = format!("/shared/a/made{n}");
        let words = ["run", "--rm", "--net", "none", "-v", "shared:/shared", "--tmpfs", &target];
        let out =
            host.dm(&[&words[..], &["-v", "data:/shared/a/deep/er", "attack", "true"]].concat());
        assert!(out.status == 0 || out.status == 125, "{out}");
        precious.assert_untouched();
    }
}

#[test]
fn vm_reused_pid_is_not_mistaken_for_container() {
    // The pid of a dead container is reused by another process, which no command may affect.
    let host = Host::with_busybox();
    // Another process on the machine may take the pid first. Then another container is tried.
    let found = (0..10).find_map(|n| {
        let name = format!("a{n}");
        take_pid_of_dead(&host, &name).map(|(pid, bystander)| (name, pid, bystander))
    });
    let Some((name, pid, mut bystander)) = found else {
        // Orphans are reaped by the machine's pid 1, and a pid is free only after that.
        eprintln!("NOT RUN: pid 1 of this machine does not reap, so no pid comes back");
        return;
    };
    let a = name.as_str();
    let state = host.state_of(a);
    for words in [
        &["kill", a][..],
        &["stop", "--time", "0", a],
        &["pause", a],
        &["exec", a, "true"],
        &["rm", "--force", a],
    ] {
        let _ = host.dm(words); // some succeed, some report that the container is stopped
    }
    let alive = bystander.try_wait().expect("our child").is_none();
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    bystander.kill().and_then(|()| bystander.wait()).expect("end the process");
    assert!(alive && !stat.contains(") T"), "another process was affected: {stat}");
    assert_eq!(state, "stopped");
}

/// Starts a container, kills it with its keeper as in a crash, and gives its pid to a child of
/// ours.
fn take_pid_of_dead(host: &Host, name: &str) -> Option<(u64, std::process::Child)> {
    host.dm(&["run", "-d", "--name", name, "busybox", "sleep", "1000"]).ok();
    let pid = host.inspect(name)["pid"].as_u64().expect("a pid");
    for (process, _) in host.processes() {
        host.sh(&format!("kill -9 {process}"));
    }
    for _ in 0..1000 {
        fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).expect("set the last pid");
        let mut child =
            std::process::Command::new("sleep").arg("1000").spawn().expect("sleep starts");
        if u64::from(child.id()) == pid {
            return Some((pid, child));
        }
        child.kill().and_then(|()| child.wait()).expect("end the process");
    }
    None
}

#[test]
fn vm_status_of_short_lived_container_is_reported() {
    // A container exits before its parent has looked, many times.
    let host = Host::with_busybox();
    let rounds = if slowness() > 1 { 5 } else { 40 };
    for n in 0..rounds {
        let status = n % 7;
        let script = format!("exit {status}");
        let words = ["run", "--rm", "--net", "none", "busybox", "sh", "-c", &script];
        assert_eq!(host.dm(&words).status, status);
        let name = format!("c{n}");
        let words = ["run", "-d", "--name", &name, "--net", "none", "busybox", "sh", "-c", &script];
        host.dm(&words).ok();
        assert_eq!(host.dm(&["wait", &name]).ok(), status.to_string());
        host.dm(&["rm", &name]).ok();
    }
}

#[test]
fn vm_sysctls_outside_namespaces_are_refused() {
    let host = Host::with_busybox();
    let before = fs::read_to_string("/proc/sys/kernel/core_pattern").expect("read");
    for bad in [
        "kernel.core_pattern=|/bin/sh",
        "kernel/core_pattern=x",
        "net.ipv4.ip_forward=1\nkernel.core_pattern=x",
        "kernel.shmmax+kernel.core_pattern=1",
        "kernel.../core_pattern=1",
        "vm.swappiness=0",
    ] {
        let out = host.dm(&["run", "--rm", "--sysctl", bad, "busybox", "true"]);
        assert_eq!(out.status, 125, "{bad}: {out}");
    }
    assert_eq!(fs::read_to_string("/proc/sys/kernel/core_pattern").expect("read"), before);
    for (set, path, value) in [
        ("kernel.msgmax=4444", "kernel/msgmax", "4444"),
        ("kernel.domainname=here", "kernel/domainname", "here"),
        ("fs.mqueue.msg_max=7", "fs/mqueue/msg_max", "7"),
        ("net/ipv4/ip_forward=1", "net/ipv4/ip_forward", "1"),
    ] {
        let words = ["run", "--rm", "--net", "none", "--sysctl", set, "busybox", "cat"];
        assert_eq!(host.dm(&[&words[..], &[&format!("/proc/sys/{path}")]].concat()).ok(), value);
    }
}

#[test]
fn vm_fork_bomb_ends_with_its_container() {
    let host = Host::with_busybox();
    let bomb = "b() { b | b & }; b; sleep 1000";
    let words =
        ["run", "-d", "--pids", "64", "--memory", "64m", "--name", "a", "busybox", "sh", "-c"];
    host.dm(&[&words[..], &[bomb]].concat()).ok();
    std::thread::sleep(Duration::from_secs(1));
    let count = host.processes().len();
    assert!(count <= 70, "{count} processes");
    host.dm(&["rm", "--force", "a"]).ok();
    let gone = || host.processes().iter().all(|(_, line)| !line.contains("sleep"));
    assert!(dormouse_testkit::wait_until(soon(), gone));
}

#[test]
fn vm_container_does_not_take_inotify_instances_of_another() {
    let host = Host::with_busybox();
    let taken = |name: &str, count: &str| {
        host.dm(&["run", "-d", "--name", name, "busybox", "probe", "inotify", count]).ok();
        let logged = || host.dm(&["logs", name]).stdout.trim().parse::<u32>().ok();
        let limit = Duration::from_secs(60) * slowness();
        assert!(wait_until(limit, || logged().is_some()), "{name} reports no count");
        logged().expect("a count was logged just now")
    };
    let mine = taken("greedy", "1000");
    assert!((1..=128).contains(&mine), "{mine} instances of one user");
    // A second user inside has a count of its own within the user namespace.
    let words =
        ["exec", "-d", "--user", "1000", "greedy", "sh", "-c", "probe inotify 1000 >/tmp/n"];
    host.dm(&words).ok();
    host.wait_inside("greedy", "test -s /tmp/n");
    assert_eq!(taken("neighbour", "100"), 100, "another container has its own limit");
}

#[test]
fn vm_namespaces_of_a_container_are_bounded() {
    let host = Host::with_busybox();
    let read = "cd /proc/sys/user; cat max_user_namespaces max_net_namespaces max_mnt_namespaces";
    assert_eq!(host.dm(&["run", "--rm", "busybox", "sh", "-c", read]).ok(), "256\n256\n1024");
    let write = "echo 1000000 >/proc/sys/user/max_user_namespaces";
    assert_ne!(host.dm(&["run", "--rm", "busybox", "sh", "-c", write]).status, 0);
    for key in ["user.max_net_namespaces", "user/max_net_namespaces"] {
        let set = format!("{key}=7");
        let words = ["run", "--rm", "--sysctl", &set, "busybox", "sh", "-c", read];
        assert_eq!(host.dm(&words).ok(), "256\n7\n1024", "{key}");
    }
    let words = ["run", "--rm", "--sysctl", "user.max_user_namespaces=3", "busybox", "sh", "-c"];
    let nest = "for i in 1 2 3 4 5; do unshare -U sleep 5 & done; n=0
        while [ $(ls -l /proc/[0-9]*/ns/user | sed 's/.*-> //' | sort -u | wc -l) -lt 4 ] && [ $n -lt 50 ]
        do sleep 0.1; n=$((n+1)); done
        sleep 0.5; ls -l /proc/[0-9]*/ns/user | sed 's/.*-> //' | sort -u | wc -l";
    let out = host.dm(&[&words[..], &[nest]].concat());
    assert_eq!(out.stdout.trim(), "4", "the container's own namespace and three more: {out}");
    assert!(out.stderr.contains("No space left on device"), "{out}");
    // Without a bound, one container takes as many of the host's as it has processes.
    let many = "n=0; while [ $n -lt 280 ]; do n=$((n+1)); unshare -U sleep 1000 2>>/refused & done
        until [ $(( $(grep -l ^sleep /proc/[0-9]*/cmdline | wc -l) + $(wc -l </refused) )) -ge 280 ]
        do sleep 0.2; done; wc -l </refused";
    let refused = |host: &Host| {
        let words = ["run", "--rm", "--pids", "1000", "busybox", "sh", "-c", many];
        let count = host.dm_within(Duration::from_secs(120) * slowness(), &words).ok();
        count.trim().parse::<u32>().expect("a number")
    };
    assert_eq!(refused(&host), 280 - 256);
    if let Some(weak) = Host::without("namespace-limits") {
        assert_eq!(refused(&weak), 0);
    }
}

#[test]
fn cp_refuses_kernel_files_behind_a_link() {
    let host = Host::with_busybox();
    let links = "mkdir /app; ln -s /proc/vmallocinfo /app/a; ln -s /proc/kmsg /app/b; \
                 ln -s /sys/kernel /app/d; ln -s /proc /app/e; echo plain >/app/plain; exec sleep 1000";
    host.dm(&["run", "-d", "--name", "a", "busybox", "sh", "-c", links]).ok();
    host.wait_inside("a", "test -e /app/plain");
    let to = host.dir().join("out");
    fs::create_dir(&to).expect("made");
    let to = to.to_str().expect("UTF-8");
    let paths = [
        "/app/a",
        "/app/b",
        "/app/d",
        "/app/e/.",
        "/app/e/version",
        "/proc/iomem",
        "/sys/kernel/.",
    ];
    for path in paths {
        for to in [to, "-"] {
            let mut command = host.dormouse(&["cp", &format!("a:{path}"), to]);
            command.stdout(std::process::Stdio::piped());
            let out = dormouse_testkit::run(command, b"", Duration::from_secs(60));
            assert_eq!(out.status, 125, "{path} to {to}: {out}");
            assert!(out.stderr.contains("the host's kernel"), "{path} to {to}: {out}");
        }
    }
    let names = || fs::read_dir(to).expect("listed").count();
    assert_eq!(names(), 0);
    if let Some(weak) = Host::without("kernel-files") {
        let link = "ln -s /proc/version /link; exec sleep 1000";
        weak.dm(&["run", "-d", "--name", "a", "busybox", "sh", "-c", link]).ok();
        weak.wait_inside("a", "test -e /link");
        let copy = weak.dir().join("copy");
        weak.dm(&["cp", "a:/link", copy.to_str().expect("UTF-8")]).ok();
        let text = fs::read_to_string(copy).expect("copied");
        assert!(text.starts_with("Linux version"), "{text}");
    }
    // The copy of a whole tree omits these files, and keeps links as links.
    host.dm(&["cp", "a:/app", to]).ok();
    assert!(Path::new(to).join("app/a").is_symlink());
    assert_eq!(fs::read_to_string(Path::new(to).join("app/plain")).expect("there"), "plain\n");
    // The operator may copy such a file from the host.
    host.dm(&["cp", "/proc/version", "a:/version"]).ok();
    assert!(host.dm(&["exec", "a", "cat", "/version"]).ok().starts_with("Linux"));
}

#[test]
fn exec_reads_no_account_from_a_kernel_file() {
    let host = Host::with_busybox();
    // A file of procfs with contents chosen by the container. The file kmsg would be the host's.
    let link =
        "rm -f /etc/passwd; ln -s /proc/1/cmdline /etc/passwd; sleep 1000; exit\nbob:x:7:7::/:\n";
    host.dm(&["run", "-d", "--name", "a", "busybox", "sh", "-c", link]).ok();
    let has_link = "test -L /etc/passwd && grep -q ^bob /etc/passwd";
    host.wait_inside("a", has_link);
    let out = host.dm(&["exec", "--user", "bob", "a", "id", "-u"]);
    assert_eq!(out.status, 125, "{out}");
    if let Some(weak) = Host::without("kernel-files") {
        weak.dm(&["run", "-d", "--name", "a", "busybox", "sh", "-c", link]).ok();
        weak.wait_inside("a", has_link);
        assert_eq!(weak.dm(&["exec", "--user", "bob", "a", "id", "-u"]).ok(), "7");
    }
    assert_eq!(host.dm(&["exec", "--user", "7", "a", "id", "-u"]).ok(), "7");
}

#[test]
fn cp_keeps_holes_both_ways() {
    use std::os::unix::fs::MetadataExt;
    let host = Host::with_busybox();
    let make = "truncate -s 100G /sparse; echo end | dd of=/sparse bs=1M seek=50000 conv=notrunc 2>/dev/null; \
                exec sleep 1000";
    host.dm(&["run", "-d", "--name", "a", "busybox", "sh", "-c", make]).ok();
    host.wait_inside(
        "a",
        "dd if=/sparse bs=1M skip=50000 count=1 2>/dev/null | head -c 3 | grep -q end",
    );
    let out = host.dir().join("out");
    fs::create_dir(&out).expect("made");
    let path = |name: &str| out.join(name).to_str().expect("UTF-8").to_owned();
    let check = |file: &str| {
        let meta = fs::metadata(file).expect("there");
        assert_eq!(meta.len(), 100 << 30, "{file}");
        assert!(meta.blocks() * 512 < 1 << 20, "{file}: {} blocks", meta.blocks());
        let end =
            host.sh(&format!("dd if={file} bs=1M skip=50000 count=1 2>/dev/null | head -c 3")).ok();
        assert_eq!(end, "end", "{file}");
    };
    host.dm(&["cp", "a:/sparse", &path("copied")]).ok();
    check(&path("copied"));
    host.dm(&["cp", &path("copied"), "a:/back"]).ok();
    let blocks = host.dm(&["exec", "a", "stat", "-c", "%s %b", "/back"]).ok();
    let (size, blocks) = blocks.split_once(' ').expect("two numbers");
    assert_eq!(size, (100_u64 << 30).to_string());
    assert!(blocks.parse::<u64>().expect("a number") < 2048, "{blocks} blocks");
    let program = dormouse();
    let tar = format!("{} --root {} cp", program.display(), host.root().display());
    host.sh(&format!("{tar} a:/sparse - >{}", path("tar"))).ok();
    assert!(fs::metadata(path("tar")).expect("there").len() < 1 << 20);
    host.sh(&format!("tar -C {} -xf {}", out.display(), path("tar"))).ok();
    check(&path("sparse"));
}

#[test]
fn container_with_full_shared_memory_stops_no_other() {
    let host = Host::with_busybox();
    let sleep = ["sleep", "1000"];
    for name in ["before", "greedy"] {
        host.dm(&[&["run", "-d", "--name", name, "busybox"], &sleep[..]].concat()).ok();
    }
    // The bounds are scaled down: those of a host are thousands of files and gigabytes.
    let root = host.root().display().to_string();
    host.sh(&format!(
        "for m in $(sed -n 's|.* {root}/run/\\([^ ]*\\) .* - tmpfs .*|\\1|p' /proc/self/mountinfo)
         do mount -o remount,nr_inodes=400,size=8m {root}/run/$m || exit 1; done"
    ))
    .ok();
    let fill = "i=0; while : >/dev/shm/$i; do i=$((i+1)); done 2>/dev/null
                dd if=/dev/zero of=/dev/shm/0 bs=64k 2>/dev/null; : >/dev/x";
    let out = host.dm(&["exec", "greedy", "sh", "-c", fill]);
    assert_ne!(out.status, 0, "the attack fills the file system: {out}");
    let write = ["sh", "-c", "for i in 1 2 3; do echo $i >/dev/shm/$i || exit 1; done"];
    host.dm(&[&["exec", "before"], &write[..]].concat()).ok();
    for _ in 0..3 {
        host.dm(&[&["run", "--rm", "busybox"], &write[..]].concat()).ok();
    }
    host.dm(&["restart", "--time", "0", "before"]).ok();
    host.dm(&["rm", "--force", "greedy"]).ok();
    host.await_settlers(); // spares have directories, too
    let left = host.sh(&format!("find {root}/run/tmpfs -mindepth 2 -maxdepth 2 -type d | wc -l"));
    assert_eq!(left.ok(), "1");
}

#[test]
fn checkpoint_inspect_escapes_control_characters_of_an_archive() {
    use dormouse_parcel::{DirSink, Reader, Sink};
    let host = Host::with_busybox();
    host.dm(&["run", "-d", "--name", "a", "busybox", "sleep", "1000"]).ok();
    let to = host.dir().join("saved");
    let dir = to.to_str().expect("UTF-8");
    host.dm(&["checkpoint", "--to", dir, "a"]).ok();
    let reader = Reader::open(&to).expect("it is whole");
    let mut records = reader.records().clone();
    drop(reader);
    let pages = fs::read(to.join("pages")).expect("it is there");
    fs::remove_dir_all(&to).expect("removed");
    let mut writer = Box::new(DirSink::begin(&to).expect("its place is free"));
    writer.append(&pages).expect("written");
    records.pages = writer.pages().expect("written");
    records.about.kernel = format!("6\u{1b}]0;owned\u{7}\u{9b}2J\r{}", "x".repeat(100_000));
    writer.publish(&records).expect("written");
    let out = host.dm(&["checkpoint", "inspect", "--from", dir]);
    assert_eq!(out.status, 0, "{out}");
    let first = out.stdout.lines().next().expect("a line");
    assert!(first.contains("owned") && first.len() < 1000, "{first}");
    assert!(!out.stdout.chars().any(|c| c.is_control() && c != '\n'), "{out}");
}

/// In images of installed systems `/etc/resolv.conf` is often a link to a file that a service makes.
#[test]
fn image_with_dangling_links_in_etc_runs() {
    let host = Host::with_busybox();
    let dir = host.dir().join("dangling");
    let image = image::busybox_with_attack();
    host.sh(&format!("cp -a {} {}", image.display(), dir.display())).ok();
    let etc = dir.join("etc");
    fs::create_dir_all(&etc).expect("made");
    for (name, points_to) in
        [("resolv.conf", "../run/systemd/resolve/stub-resolv.conf"), ("hosts", "/nowhere/hosts")]
    {
        let _ = fs::remove_file(etc.join(name)); // if the image has one
        symlink(points_to, etc.join(name)).expect("linked");
    }
    host.import(&dir, "dangling");
    let script = "cat /etc/hosts && cat /etc/resolv.conf > /dev/null && echo read";
    let output = host.dm(&["run", "--rm", "--name", "a", "dangling", "sh", "-c", script]).ok();
    assert!(output.contains("localhost") && output.ends_with("read"), "{output}");
    assert!(!Path::new("/nowhere").exists());
}
